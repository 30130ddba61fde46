"""A web page that shows masks and runs: one file, which loads nothing from the network."""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ...files import make_folder, replace_files
from ...masks.sparse_mask import SparseMask
from ...version import __version__
from ..saved_runs import SavedMask
from ..tables import Table
from .page_charts import score_figures, scores
from .page_gains import gains
from .page_masks import PAGE_BYTES, TILES, mask_data
from .repeated_runs import penalty_tables
from .reports import distinct_names, report_tables


SCRIPTS = (
    "web_page_theme.js", "web_page_data.js", "web_page_viewer.js", "web_page_heads.js", "web_page_compare.js",
)  # fmt: skip

# Longer texts of a table are broken into lines.
ONE_LINE = 40


@dataclass(frozen=True)
class PageMask:
    """A mask of a page: its name there, what the universality theorems say about it, and the facts behind that."""

    name: str
    saved: SavedMask
    verdict: str = ""
    facts: str = ""

    @property
    def mask(self) -> SparseMask:
        """The mask."""
        return self.saved.mask


def check_page(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Check that a page can be written to a file, before what takes long."""
    path = Path(path)
    if path.suffix != ".html":
        raise ValueError(f"output must be the name of an .html file, got {str(path)!r}")
    if path.is_dir():
        raise FileExistsError(f"output {path} is a folder: name a file in it, such as {path / 'report.html'}")
    if path.exists() and not overwrite:
        raise FileExistsError(f"output {path} exists: choose another, or pass --overwrite true")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"output {path}: {parent} is not a folder")


def write_page(path: str | os.PathLike, masks: Sequence[PageMask], runs: Mapping[Path, dict[str, Any]]) -> None:
    """Write a page with masks and the metrics of runs, from [`read_metrics`]. It is written whole or not at all."""
    content = make_page(masks, runs).encode()
    path = Path(path)
    make_folder(path.parent, "output")
    replace_files({path: content})


def make_page(masks: Sequence[PageMask], runs: Mapping[Path, dict[str, Any]]) -> str:
    """The page of [`write_page`] as text."""
    room = PAGE_BYTES // max(len(masks), 1)
    data = [mask_data(entry.name, entry.mask, room) for entry in masks]
    style = _text("web_page.css")
    names = [entry.name for entry in masks] or distinct_names([*runs])
    parts = {
        "style": style,
        "script": "".join(map(_text, SCRIPTS if masks else SCRIPTS[:1])),
        "title": escape(f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} - sparsebert report"),
        "version": escape(__version__),
        "gains": _gains_part(runs) if runs else "",
        "masks": _masks_part(masks, data) if masks else "<p>None of the runs has a mask.</p>",
        "pictures": _text("web_page_masks.html") if masks else "",
        "runs": _runs_part(runs) if runs else "",
        "data": _json(data),
    }
    # The browser runs this script and no other, whatever the texts of the page say, and loads nothing.
    policy = f"default-src 'none'; style-src '{_digest(parts['style'])}'; script-src '{_digest(parts['script'])}'"
    return Template(_text("web_page.html")).substitute(parts, policy=policy)


def _text(name):
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text):
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(data):
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _masks_part(masks, data):
    tiles = Table.of(
        "Live tiles, in %",
        [_tile_row(*pair) for pair in zip(masks, data, strict=True)],
        [
            "The share of square tiles that hold an entry, so that a kernel cannot skip them: mean over heads and "
            "layers, then the least and the greatest. Rows and columns of special tokens are left out."
        ],
    )
    return "\n".join([_html(mask_table(masks)), *map(_facts, masks), _html(tiles)])


def mask_table(masks: Sequence[PageMask]) -> Table:
    """What the masks are, as a table."""
    return Table.of("Masks", [_mask_row(entry) for entry in masks])


def _mask_row(entry):
    mask = entry.mask
    form = mask.form if mask.block_size is None else f"{mask.form} of {mask.block_size}"
    form = form if mask.query_block_size is None else f"{form} for {mask.query_block_size} queries"
    form = form if mask.symmetric else f"{form}, signed"
    columns = "" if mask.special_rows else ", their columns"
    layers = "all layers alike" if mask.num_layers == 1 else f"{mask.num_layers} layers"
    return {
        "mask": entry.name,
        "form": form,
        "tokens": str(mask.length),
        "layers and heads": f"{layers}, {mask.num_heads} heads",
        "removed": f"{100 * mask.sparsity:.1f} %",
        "special tokens": mask.special_tokens.replace("_", " and ") + columns,
        "diagonal": {None: "", True: "always kept", False: "removed"}[mask.diagonal],
        "universal approximation": entry.verdict,
        "read from": entry.saved.source,
    }


def _tile_row(entry, data):
    row = {"mask": entry.name}
    for side in TILES:
        shares = [100 * data["tiles"][side][which] for layer in data["heads"] for which in layer]
        mean = sum(shares) / len(shares)
        row[f"{side} x {side}"] = f"{mean:.1f} ({min(shares):.1f} to {max(shares):.1f})"
    return row


def _facts(entry):
    """The origin of a mask and the facts behind its verdict, to be unfolded."""
    origin = json.dumps(entry.mask.metadata, indent=2, default=str)
    return (
        f"<details><summary>{escape(entry.name)}: origin, and the facts behind the verdict</summary>"
        f"<pre>{escape(entry.facts)}</pre><pre>{escape(origin)}</pre></details>"
    )


def _named(runs):
    return dict(zip(distinct_names([*runs]), runs.values(), strict=True))


def _gains_part(runs):
    items = "".join(f"<li>{escape(text)}</li>" for text in gains(_named(runs)))
    return (
        f'<section aria-labelledby="gains"><h2 id="gains">What was gained</h2><ul class="gains">{items}</ul></section>'
    )


def _runs_part(runs):
    tables = "\n".join(map(_html, report_tables(runs) + penalty_tables(runs)))
    figures = [score_figures(what, found) for what, found in scores(_named(runs)).items() if len(found) > 1]
    charts = f"<h3>Quality against sparsity and time</h3>{''.join(figures)}" if figures else ""
    return f'<section aria-labelledby="runs"><h2 id="runs">Runs</h2>{charts}{tables}</section>'


def _html(table):
    """A table in HTML, that a narrow screen scrolls; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    marks = [
        ' class="long"' * any(len(cell) > ONE_LINE for cell in column) for column in zip(*table.rows, strict=True)
    ]
    rows = []
    for row in table.rows:
        cells = "".join(f"<td{long}>{escape(cell)}</td>" for cell, long in zip(row[1:], marks[1:], strict=True))
        rows.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"</div>{notes}"
    )
