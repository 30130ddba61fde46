"""The experiments that `sparsebert reproduce NAME` runs. Each is a row here, and a module of its name."""

from .harness.experiment import Experiment
from .long_texts import long_embeddings, long_review_masks, long_reviews, needles, positions
from .other_papers import copying, cramming, language_modelling, mixers, translation
from .sparsebert_paper import sparsebert_figure7, sparsebert_table1, sparsebert_table2, sparsebert_table3
from .trained_models import (
    minilm,
    minilm_mixers,
    minilm_settings,
    minilm_task_masks,
    minilm_tasks,
    offsets,
    sentences,
    separators,
)


EXPERIMENTS: dict[str, Experiment] = {
    "copying": copying.EXPERIMENT,
    "language_modelling": language_modelling.EXPERIMENT,
    "translation": translation.EXPERIMENT,
    "mixers": mixers.EXPERIMENT,
    "minilm": minilm.EXPERIMENT,
    "minilm_settings": minilm_settings.EXPERIMENT,
    "minilm_mixers": minilm_mixers.EXPERIMENT,
    "minilm_tasks": minilm_tasks.EXPERIMENT,
    "minilm_task_masks": minilm_task_masks.EXPERIMENT,
    "long_reviews": long_reviews.EXPERIMENT,
    "long_review_masks": long_review_masks.EXPERIMENT,
    "document_embeddings": long_embeddings.DOCUMENTS,
    "review_embeddings": long_embeddings.REVIEWS,
    "needles": needles.EXPERIMENT,
    "positions": positions.EXPERIMENT,
    "sentences": sentences.EXPERIMENT,
    "offsets": offsets.EXPERIMENT,
    "separators": separators.EXPERIMENT,
    "cramming": cramming.EXPERIMENT,
    "sparsebert_table1": sparsebert_table1.EXPERIMENT,
    "sparsebert_table2": sparsebert_table2.EXPERIMENT,
    "sparsebert_table3": sparsebert_table3.EXPERIMENT,
    "sparsebert_figure7": sparsebert_figure7.EXPERIMENT,
}
