""""""

import inspect
import sys
from dataclasses import is_dataclass
from pathlib import Path

from rich.console import Console

from ..checks import nearest
from ..experiments import EXPERIMENTS
from ..experiments.reproduction import ReproductionArguments, plan_cells, run_experiment
from ..training.recipes import load_recipe


def _help(experiment=None):
    texts = [__doc__.strip(), f"experiments: {', '.join(EXPERIMENTS)}"]
    kinds = (ReproductionArguments,) if experiment is None else (ReproductionArguments, *experiment.arguments.__mro__)
    return "\n\n".join([*texts, *(inspect.getdoc(kind) for kind in kinds if is_dataclass(kind))])


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    name, *flags = arguments
    if name not in EXPERIMENTS:
        raise nearest("experiment", name, list(EXPERIMENTS))
    if {"-h", "--help"} & set(flags):
        print(_help(EXPERIMENTS[name]))
        return
    sections = {"run": ReproductionArguments, "settings": EXPERIMENTS[name].arguments}
    recipe = load_recipe(flags, sections) if flags else {"run": {}, "settings": {}}
    options = ReproductionArguments(**recipe["run"])
    if options.list_cells:
        print(*plan_cells(EXPERIMENTS[name], options, recipe["settings"]), sep="\n")
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in run_experiment(name, options, recipe["settings"]):
        console.print(table.rich())
    print("written:", *sorted(map(str, Path(options.output).glob(f"{name}_{options.scale}.*"))))
