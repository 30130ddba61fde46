"""
Tables of finished runs: pre-training, fine-tuning, grids, GLUE.

Takes output folders of `pretrain` and `finetune`.
"""

from dataclasses import dataclass

from ..analysis.reports import read_metrics, report_tables
from ._command import Command, Printing, needed, print_note, print_results


@dataclass
class ReportArguments:
    """
    What to report.

    Args:
        runs (`list[str]`): Output folders of `pretrain` and `finetune`.
    """

    runs: list[str] | None = None


def command(words):
    return Command(
        run,
        {"report": ReportArguments, "print": Printing},
        examples=("runs/demo/dam_s runs/demo/dense", "runs/glue --json"),
        words="RUN ...",
        positional="report.runs",
    )


def run(values):
    needed(values, "report.runs")
    metrics = read_metrics(values["report"]["runs"])
    print_results(values, {str(folder): run for folder, run in metrics.items()}, *report_tables(metrics))
    for folder in metrics:
        for picture in sorted(folder.glob("*.png")):
            print_note(values, f"picture: {picture}")
