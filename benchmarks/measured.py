"""
The measured and the predicted tables of README.md and docs/, made from the committed results.

    python -m benchmarks.measured            # writes the tables anew
    python -m benchmarks.measured --check    # changes nothing; ends with 1 if a table is not that of the results

In a page a table stands between `<!-- measured NAME -->` and `<!-- end -->`, where NAME is a key of `TABLES`.
"""

import argparse
import json
import re
import sys

from sparsebert.analysis.tables import Table

from . import cramming, data_memory, engines, padding, pretrain
from ._report import RESULTS, ROOT
from .gpu import model as gpu_model


BLOCK = re.compile(r"(<!-- measured (?P<name>[\w.:-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def _read(name, folder=RESULTS):
    return json.loads((folder / f"{name}.json").read_text())


def _pretrain(kind):
    """The tables of the systems, or of their options, as in "dense+bf16"."""
    groups = pretrain.groups(_read("pretrain_cpu")["cells"])
    make = pretrain.option_tables if kind.startswith("options") else pretrain.tables
    return [make(group)[kind] for (of_options, *_), group in groups.items() if of_options == (make != pretrain.tables)]


# Functions that return a list of [`Table`].
TABLES = {
    **{
        f"pretrain.{kind}": lambda kind=kind: _pretrain(kind)
        for kind in ("speed", "ratios", "memory", "options.ratios", "options.memory")
    },
    "padding.speed": lambda: [padding.tables(_read("padding")["cells"])["speed"]],
    "padding.ratios": lambda: [padding.tables(_read("padding")["cells"])["ratios"]],
    "cramming": lambda: [cramming.table(_read("cramming", ROOT / "results"))],
    "data_memory.starts": lambda: [data_memory.tables(_read("data_memory"))["starts"]],
    "data_memory.waiting": lambda: [data_memory.tables(_read("data_memory"))["waiting"]],
    "engines.jobs": lambda: [engines.tables(_read("engines")["cells"])["jobs"]],
    **{
        f"gpu.{kind}": lambda kind=kind: [gpu_model.tables(_read("gpu_model"))[kind]]
        for kind in ("check", "forward", "training")
    },
    "engines.crossed": lambda: [engines.tables(_read("engines")["cells"])["crossed"]],
}


def body(table: Table) -> str:
    """A table without its title, which the page gives in its own words, and without notes."""
    return Table("", table.columns, table.rows).markdown().partition("\n\n")[2]


def written(text):
    """
    A page with its tables made anew.

    Args:
        text (`str`): The page.

    Raises:
        ValueError: If it names a table that there is not.
    """

    def made(match):
        if match["name"] not in TABLES:
            raise ValueError(f"no measured table {match['name']!r}; there are {', '.join(TABLES)}")
        found = TABLES[match["name"]]()
        if len(found) == 1:
            return f"{match[1]}{body(found[0])}{match[4]}"
        return match[1] + "\n".join(f"**{table.title}**\n\n{body(table)}" for table in found) + match[4]

    return BLOCK.sub(made, text)


def pages():
    """README.md and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description="Write the measured tables.")
    parser.add_argument("--check", action="store_true", help="change nothing, end with 1 if a page is out of date")
    options = parser.parse_args(arguments)
    stale = [page for page in pages() if written(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
        if not options.check:
            page.write_text(written(page.read_text()))
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())
