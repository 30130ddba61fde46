"""
Repeat a table or figure of the papers, cell by cell, and show the published numbers beside the results.

First it says how many cells are done and to do, and about how long these will take, judged by finished cells. Finished
cells are not run again; an interrupted cell starts over, and a cell that fails does not stop the others (exit code 1).
After each cell, results are written to `output`: EXPERIMENT_SCALE.json (all numbers), .md (a table with the paper's
numbers) and, with the extra `viz`, .png (a plot).
Experiments with more pictures keep what they show, such as masks, in the folder EXPERIMENT_SCALE; `--redraw` writes
tables and pictures again from these files alone.

The experiments are in `studies/`, run by `studies/harness/reproduction.py`: a checkout of the repository has them, the
installed package has not.
"""

from transformers.utils import logging

from ..checks import nearest
from ._checkout import study
from ._command import Command, Results, advising


logger = logging.get_logger(__name__)


def command(words):
    experiments = study("experiments").EXPERIMENTS
    name = words[0] if words and not words[0].startswith("-") else None
    if name is not None and name not in experiments:
        raise nearest("experiment", name, list(experiments))
    sections = {"run": study("harness.reproduction").ReproductionArguments}
    if name is not None:
        sections["settings"] = experiments[name].arguments
    examples = ("copying --scale tiny --output DIR", "language_modelling --text FILE --output DIR --list_cells")
    return Command(run, sections, examples, name or "EXPERIMENT", choices={"experiment": experiments})


def run(values):
    experiments, reproduction = study("experiments").EXPERIMENTS, study("harness.reproduction")
    options = reproduction.ReproductionArguments(**values["run"])
    name = options.experiment
    if name is None:
        raise ValueError(f"give the name of an experiment: {', '.join(experiments)}")
    if options.list_cells and not options.redraw:
        cells = reproduction.plan_cells(experiments[name], options, values["settings"])
        logger.warning(reproduction.plan_text(name, options, cells))
        return Results(cells, notes=list(cells))
    failed = []
    again = "run the others with --only" if options.overwrite else "the same command runs the others"
    try:
        with advising(f"finished cells are kept, {again}"):
            tables = reproduction.run_experiment(name, options, values["settings"])
    except reproduction.CellsFailed as error:
        tables, failed = error.tables, [str(error)]
    notes = [f"written: {path}" for path in reproduction.result_files(name, options)] + failed
    return Results([table.as_json() for table in tables], tables, notes, exit_code=len(failed))
