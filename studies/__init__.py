"""
The tables and figures of the papers, which `sparsebert reproduce NAME` runs.

One module per row of [`EXPERIMENTS`], named like it. A new experiment is such a module with an [`Experiment`] and a
row here. What they share: `experiment` (what an experiment is), `base_models` (the models that experiments start
from), `pattern_levels` (the patterns that are compared), `recipe_sections` (the recipe of a cell), `text_pretraining`
(cells that pre-train on text), `continued_pretraining` (cells that go on from one checkpoint), `task_parts` (some rows
of a task) and `review_classifiers` (classifiers of long movie reviews). `copying_task` is the model and the training
of the copying task, `reproduction` runs the cells of any experiment, `time_estimates` says how long they will take,
`result_tables` shows what they found, and `kept_files` has what outlives them.
"""

from . import (
    copying,
    language_modelling,
    long_review_masks,
    long_reviews,
    minilm,
    minilm_mixers,
    minilm_settings,
    minilm_task_masks,
    minilm_tasks,
    mixers,
    sparsebert_figure7,
    sparsebert_table1,
    sparsebert_table2,
    sparsebert_table3,
    translation,
)
from .experiment import Experiment


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
    "sparsebert_table1": sparsebert_table1.EXPERIMENT,
    "sparsebert_table2": sparsebert_table2.EXPERIMENT,
    "sparsebert_table3": sparsebert_table3.EXPERIMENT,
    "sparsebert_figure7": sparsebert_figure7.EXPERIMENT,
}
