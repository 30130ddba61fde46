"""
Fine-tune and evaluate a model: through its frozen mask, another mask (`--mask`), or dense.

Runs one seed or several (`--seeds`), fixed settings or the best of a grid (`--sweep`), one task or all of GLUE
(`--all`). Writes to `output_dir` the model with its mask, the tokenizer, predictions, `metrics.json`, `results.md`
(the tables that it prints). If the same command is run again, it runs only what is not finished. Learning rate, batch
size, epochs and warm-up are those of the task unless they are given.
"""

from ..analysis.reporting.reports import read_metrics, report_tables
from ..learning.mask_description import STATE_FIELDS
from ..training.finetuning.finetuning_runs import DEFAULTS, SECTIONS, finetune
from ._command import Command, Results


def command(words):
    examples = (
        "--task text_classification --data reviews.csv --model MODEL --output_dir DIR",
        "--task rte --model bert-base-uncased --mask bigbird --seeds 3 --output_dir DIR",
    )
    return Command(run, SECTIONS, examples, excluded={"model": STATE_FIELDS}, defaults=DEFAULTS)


def run(values):
    output = finetune(values)
    metrics = read_metrics([output])
    return Results(metrics[output], report_tables(metrics), [f"written to {output}"])
