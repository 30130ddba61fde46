"""
Tables of finished runs: pre-training, fine-tuning, grids, GLUE.

Takes output folders of `pretrain` and `finetune`.
"""

from dataclasses import dataclass

from ..analysis.reports import read_metrics, report_tables
from ._command import Command, Printing, Results, needed


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
    pictures = [f"picture: {picture}" for folder in metrics for picture in sorted(folder.glob("*.png"))]
    return Results({str(folder): run for folder, run in metrics.items()}, report_tables(metrics), pictures)
