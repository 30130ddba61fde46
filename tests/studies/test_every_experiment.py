"""Every experiment: its cells, one small run of it from end to end, and what it refuses before it runs."""

import json
import random
import sys
from dataclasses import fields

import pytest
import yaml

from sparsebert.commands._help import explanations
from studies.experiments import EXPERIMENTS
from studies.harness.experiment import unseeded
from studies.harness.reproduction import ReproductionArguments, plan_cells


EVERY = pytest.mark.parametrize("name", EXPERIMENTS)


@EVERY
def test_cells_of_every_scale_can_run(name, smallest):
    experiment, named = EXPERIMENTS[name], set()
    assert "tiny" in experiment.scales
    inputs = {field: value for field, value in smallest(name).items() if field not in experiment.smallest}
    # The sizes are those of the scale, but for what a small model cannot do.
    small = ("replaced",) if name == "minilm_mixers" else ("lengths",) if name.endswith("embeddings") else ()
    small = ("lengths", "masks") if name == "needles" else small
    inputs |= {field: experiment.smallest[field] for field in small}
    for scale, own in experiment.scales.items():
        assert own.keys() <= {field.name for field in fields(experiment.arguments)}
        cells = plan_cells(experiment, ReproductionArguments(scale=scale), inputs)  # checks each of them
        assert cells and json.loads(json.dumps(cells)) == cells
        assert len({json.dumps(cell, sort_keys=True) for cell in cells.values()}) == len(cells)
        named |= {unseeded(cell) for cell in cells}
    assert experiment.published.keys() <= named
    assert {metric for values in experiment.published.values() for metric in values} <= experiment.columns.keys()


@EVERY
def test_every_setting_is_explained_and_plain(name):
    experiment = EXPERIMENTS[name]
    settings = {field.name: field for field in fields(experiment.arguments)}
    assert settings.keys() <= explanations(experiment.arguments).keys()
    assert all(field.init and not isinstance(field.type, str) for field in settings.values())
    assert not settings.keys() & {field.name for field in fields(ReproductionArguments)}
    # The cells are counted before there are models.
    absent = {field: "absent" for field in ("model", "base_model") if field in settings}
    for own in experiment.scales.values():
        assert experiment.cells(experiment.arguments(**own | absent))


# Cells of these are run from end to end in test_experiment_runs.py.
RUN = ("language_modelling", "minilm", "mixers", "sentences", "sparsebert_table2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in RUN)) for name in EXPERIMENTS]
)
def test_smallest_run(name, run_cells, smallest, tmp_path, monkeypatch):
    """A new experiment is tested by this alone: a cell of its scale "tiny", with its smallest settings."""
    experiment, settings = EXPERIMENTS[name], smallest(name)
    cell = next(iter(plan_cells(experiment, ReproductionArguments(), settings)))
    seeds, seed = set(), random.seed
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "matplotlib", None)  # the pictures of a run take most of its time
        changed.setattr(random, "seed", lambda value: seeds.add(value) or seed(value))
        tables, cells = run_cells(name, cell)
    (made,) = cells.values()
    if "seeds" in settings:  # 0 is that of what all seeds share, and 42 that of a Trainer which only evaluates
        assert seeds <= {0, 5, 42} and (5 in seeds or name == "separators")
    values = made["settings"] | made["metrics"]
    assert set(experiment.plot) | set(experiment.layout or ()) <= values.keys()
    assert experiment.layout is None or experiment.layout[2] in experiment.columns
    # What only some settings give, such as the score of a task, may be missing; headings are of what is there.
    there = [heading for metric, (heading, _) in experiment.columns.items() if metric in made["metrics"]]
    assert there and set(there) <= set(tables[-1].columns)
    assert {"seconds", "cpu_seconds"} < made["metrics"].keys()
    for path in (tmp_path / "runs").rglob("recipe.yaml"):  # of a fine-tuning
        recipe = yaml.safe_load(path.read_text())
        trained = recipe["data"] | recipe["training"]
        own = {"seed", "max_length"}
        if name != "sparsebert_table2":  # whose rates are those of the pre-training, and its data a part of the task's
            own |= {"learning_rate", "num_train_epochs", "warmup_steps", "max_train_examples"}
        own &= made["settings"].keys()
        assert {each: trained.get(each) for each in own} == {each: made["settings"][each] for each in own}
    assert run_cells(name, cell)[1] == cells  # a finished cell is reused, and drawn
    assert any(path.stat().st_size > 1000 for path in (tmp_path / "out").glob(f"{name}_tiny*.png"))
