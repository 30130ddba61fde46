"""
Train an encoder-decoder with sparse attention on pairs of sentences, and score its translations.

Writes to `output_dir` the model, `translations.txt` and `metrics.json` (cased BLEU from sacreBLEU). Needs the extra
`translation`, and a checkout of the repository: the training is in `studies/other_papers/translating.py`.
"""

from pathlib import Path

from transformers import Seq2SeqTrainingArguments

from ..analysis.reporting.reports import report_tables
from ._checkout import study
from ._command import Command, Results


def command(words):
    examples = (
        "translation --train PAIRS.tsv --test PAIRS2.tsv --output_dir DIR",
        "translation --train a.en a.cs --test b.en b.cs --output_dir DIR",
    )
    return Command(run, study("other_papers.translating").SECTIONS, examples)


def run(values):
    metrics = study("other_papers.translating").train_translation(values)
    output = Path(str(Seq2SeqTrainingArguments(**values["training"]).output_dir))
    return Results(metrics, report_tables({output: metrics}), [f"written to {output}"])
