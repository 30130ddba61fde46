"""Tables of text, as the commands print them and as Markdown files hold them."""

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import printable


if TYPE_CHECKING:
    import rich.table


@dataclass
class Table:
    """A table of text: a heading, columns, rows of cells and lines below."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], notes: Iterable[str] = ()) -> "Table":
        """
        Make a table from one dictionary per row. Columns keep the order in which they first appear; one that is empty
        in every row is left out.
        """
        names = dict.fromkeys(name for row in rows for name in row)
        columns = [name for name in names if any(row.get(name) for row in rows)]
        cells = [[printable(row.get(name, "")) for name in columns] for row in rows]
        return cls(printable(title), [*map(printable, columns)], cells, tuple(map(printable, notes)))

    def rich(self) -> "rich.table.Table":
        """The table for a terminal, with numbers aligned to the right."""
        import rich.table

        table = rich.table.Table(title=self.title, caption="\n".join(self.notes) or None, caption_justify="left")
        for index, column in enumerate(self.columns):
            numeric = any(row[index][:1].isdigit() or row[index].startswith(("+", "-")) for row in self.rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        body = "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)
        return "\n\n".join([f"**{_escaped(self.title)}**", body, *map(_escaped, self.notes)]) + "\n"

    def csv(self) -> str:
        """The table as comma-separated values, without title and notes."""
        with io.StringIO(newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([self.columns, *self.rows])
            return file.getvalue()

    def latex(self) -> str:
        """The table in LaTeX, with the rules of the package booktabs."""
        head, *rows = [" & ".join(map(_in_latex, line)) + r" \\" for line in (self.columns, *self.rows)]
        body = [r"\toprule", head, r"\midrule", *rows, r"\bottomrule"]
        lines = [rf"\begin{{tabular}}{{{'l' * len(self.columns)}}}", *body, r"\end{tabular}"]
        notes = [rf"\par {_in_latex(note)}" for note in self.notes]
        table = [r"\begin{table}", rf"\caption{{{_in_latex(self.title)}}}", *lines, *notes, r"\end{table}"]
        return "\n".join(table) + "\n"

    def as_json(self) -> dict[str, Any]:
        """`{"title": ..., "rows": [{column: text}], "notes": [...]}`, all of it text."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


# What LaTeX would read as something else.
_LATEX = {name: rf"\{name}" for name in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"$<$", ">": r"$>$", "|": r"$|$",
}  # fmt: skip


def _in_latex(text: str) -> str:
    """A text in LaTeX that is shown as it is."""
    return " ".join("".join(_LATEX.get(each, each) for each in text).splitlines())


def _escaped(text: str) -> str:
    """A text in Markdown that neither ends its cell nor is read as HTML: names and values may come from anywhere."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").splitlines())


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables as wide as the terminal, or 200 columns wide if the output is not a terminal."""
    from rich.console import Console

    # As text: names and paths may look like markup.
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)
    for table in tables:
        console.print(table.rich())
