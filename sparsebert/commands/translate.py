"""
Train an encoder-decoder with sparse attention on pairs of sentences, and score its translations.

Writes to `output_dir` the model, `translations.txt` and `metrics.json` (cased BLEU from sacreBLEU). Needs the extra
`translation`.
"""

from ..analysis.tables import Table
from ..training.seq2seq import SECTIONS, train_translation
from ._command import Command, Printing, Results


def command(words):
    return Command(
        run,
        {**SECTIONS, "print": Printing},
        examples=(
            "translation --train PAIRS.tsv --test PAIRS2.tsv --output_dir DIR",
            "translation --train a.en a.cs --test b.en b.cs --output_dir DIR",
        ),
    )


def run(values):
    metrics = train_translation(values)
    row = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
    return Results(metrics, [Table.of("Translation", [row])])
