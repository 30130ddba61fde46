"""Settings with which every experiment runs in seconds, and the runner with its folders in `tmp_path`."""

import json

import pytest
from study_inputs import known, write_inputs


# The studies are imported where they are used: this module is loaded for all tests.


@pytest.fixture
def smallest(checkpoints, glue_folder, squad_folder, swag_folder, tmp_path):
    """`smallest(name, **changed)`: settings of an experiment on small inputs."""
    from studies.experiments import EXPERIMENTS

    (tmp_path / "inputs").mkdir()
    inputs = write_inputs(tmp_path / "inputs", checkpoints, glue_folder, squad_folder, swag_folder)
    return lambda name, **changed: (
        known(EXPERIMENTS[name], inputs | {"seeds": [5]}) | EXPERIMENTS[name].smallest | changed
    )


@pytest.fixture
def cells_of(smallest):
    """`cells_of(name, **changed)`: the checked cells of an experiment on small inputs."""
    from studies.experiments import EXPERIMENTS
    from studies.harness.reproduction import ReproductionArguments, plan_cells

    return lambda name, **changed: plan_cells(EXPERIMENTS[name], ReproductionArguments(), smallest(name, **changed))


@pytest.fixture
def run_cells(smallest, tmp_path):
    """`run_cells(name, only, **changed)`: run cells of an experiment; its tables and finished cells."""
    from studies.harness.reproduction import ReproductionArguments, run_experiment

    def run(name, only=None, **changed):
        options = ReproductionArguments(output=str(tmp_path / "out"), runs=str(tmp_path / "runs"), only=only)
        tables = run_experiment(name, options, smallest(name, **changed))
        return tables, json.loads((tmp_path / f"out/{name}_tiny.json").read_text())["cells"]

    return run


@pytest.fixture
def reproduce(tmp_path, capsys):
    """`reproduce(*words)`: the verb with its folders in `tmp_path`, and errors as exceptions; what it printed."""
    from sparsebert.commands import parse

    def run(*words, output="results", runs="runs"):
        folders = ["--output", tmp_path / output, "--runs", tmp_path / runs]
        command, values = parse(list(map(str, ["reproduce", *words, *folders])))
        command.run(values).show(values["print"].get("json", False))
        return capsys.readouterr().out

    return run
