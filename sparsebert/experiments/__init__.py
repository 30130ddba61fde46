"""
The tables and figures of the papers, which `sparsebert reproduce NAME` runs.

One module per row of [`EXPERIMENTS`], named like it: `copying`, `language_modelling`, `translation`, `mixers`,
`minilm`, `minilm_tasks`. A new experiment is such a module with an [`Experiment`] and a row here. What they share:
`pattern_levels` (the patterns that are compared), `recipe_sections` (the recipe of a cell) and `text_pretraining`
(cells that pre-train on text). `copying_task` is the model and the training of the copying task, `reproduction` runs
the cells of any experiment.
"""

from . import copying, language_modelling, minilm, minilm_tasks, mixers, translation
from .experiment import Experiment


EXPERIMENTS: dict[str, Experiment] = {
    "copying": copying.EXPERIMENT,
    "language_modelling": language_modelling.EXPERIMENT,
    "translation": translation.EXPERIMENT,
    "mixers": mixers.EXPERIMENT,
    "minilm": minilm.EXPERIMENT,
    "minilm_tasks": minilm_tasks.EXPERIMENT,
}
