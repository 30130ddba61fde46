"""
Print tables of finished runs, and with `--output report.html` (or `-o`) write a web page that shows their masks.

Takes output folders of `pretrain`, `finetune`, `search` and `translate`, and folders or Hub ids of masks. The page is
one file that needs no network. It shows what runs gained and against what, their quality against sparsity and time,
every head, the share kept by distance, live tiles, what the universality theorems say, and two masks side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..analysis.reporting.repeated_runs import penalty_tables, seeds_table
from ..analysis.reporting.report_sources import Source, read_sources
from ..analysis.reporting.reports import distinct_names, report_tables
from ..analysis.reporting.web_page import PageMask, check_page, mask_table, write_page
from ..checks import check_choice
from ..files import runs_in
from ..theory.verdicts import Case, check_cases, details
from ._command import Command, Results


# The theorems are checked at this length if a mask is longer.
MAX_CHECKED = 1024
FORMATS = ("text", "markdown", "latex", "csv")


@dataclass
class ReportArguments:
    """
    What to report.

    Args:
        runs (`list[str]`): Output folders of finished runs, also of several seeds; folders or Hub ids of masks.
        output (`str`, *optional*): Web page to write, `report.html`; its folder is created if missing.
        overwrite (`bool`): Replace an existing page.
        seeds (`bool`): The runs differ in nothing but the seed: also print means and intervals of their numbers.
        format (`str`): What tables are printed as: `text`, `markdown`, `latex` (with booktabs) or `csv`.
    """

    runs: list[str]
    output: str | None = None
    overwrite: bool = False
    seeds: bool = False
    format: str = "text"


def command(words):
    examples = ("runs/demo/minilm runs/demo/recovered", "runs/demo/dam_s MASK_OR_HUB_ID -o report.html")
    return Command(run, {"report": ReportArguments}, examples, "RUN_OR_MASK ...", choices={"format": FORMATS})


def run(values):
    options = ReportArguments(**values["report"])
    check_choice("format", options.format, FORMATS)
    if options.output is not None:
        check_page(options.output, options.overwrite)
    elif options.overwrite:
        raise ValueError("--overwrite needs --output")
    sources = read_sources(runs_in(options.runs), with_masks=options.output is not None)
    metrics = {Path(source.name): source.metrics for source in sources if source.metrics is not None}
    tables = report_tables(metrics) + penalty_tables(metrics) + ([seeds_table(metrics)] if options.seeds else [])
    pictures = [f"picture: {picture}" for folder in metrics for picture in sorted(folder.glob("*.png"))]
    if options.output is not None:
        write_page(options.output, _page_masks(sources), metrics)
        pictures.append(f"written: {options.output}")
    alone = [PageMask(source.name, *source.masks) for source in sources if source.metrics is None]
    if alone:
        tables.append(mask_table(alone))
    content = {source.name: source.as_json() for source in sources}
    if options.format != "text":  # to be written to a file: nothing but the tables
        return Results(content, notes=[getattr(table, options.format)().rstrip("\n") + "\n" for table in tables])
    return Results(content, tables, pictures)


def _page_masks(sources: Sequence[Source]) -> list[PageMask]:
    """The masks with short names that differ, and what the theorems say about them."""
    saved = [mask for source in sources for mask in source.masks]
    names = distinct_names([mask.source for mask in saved])
    cases = []
    for name, mask in zip(names, saved, strict=True):
        length, setup = min(mask.mask.length, MAX_CHECKED), {"causal": True} if mask.is_decoder else {}
        cases.append(Case(name, mask.mask, length, setup, None, mask.is_decoder, mask.token_mixers))
    # One token has no other to attend to.
    checkable = [case for case in cases if case.length > 1]
    found = {case.name: verdict for case, verdict in zip(checkable, check_cases(checkable), strict=True)}
    return [_page_mask(case, mask, found.get(case.name)) for case, mask in zip(cases, saved, strict=True)]


def _page_mask(case, saved, found):
    if found is None:
        return PageMask(case.name, saved)
    verdict = f"{found.universal}: {found.reason}"
    if case.length < saved.mask.length:
        verdict += f" (checked at {case.length} tokens)"
    return PageMask(case.name, saved, verdict, details(case, found))
