"""
Train a BERT and learn its attention mask with the weights, or run through a given mask; in the end the mask is frozen.

Writes to `output_dir`: the model with its mask, the tokenizer, `metrics.json`, `trainer_state.json` (what was logged),
`mask_probs.safetensors` (P before freezing), pictures (with the extra `viz`), TensorBoard logs.
"""

from pathlib import Path

from transformers import TrainingArguments

from ..analysis.reports import report_tables
from ..training.pretraining import SECTIONS, pretrain
from ._command import Command, Printing, Results


def command(words):
    return Command(
        run,
        {**SECTIONS, "print": Printing},
        examples=(
            "demo_dam_s",
            "search --text FILE --validation FILE2 --target_sparsity 0.9 --output_dir DIR",
        ),
        # What freezing, pruning and saving set.
        excluded={"model": ("frozen", "pruned", "search_progress")},
    )


def run(values):
    metrics = pretrain(values)
    output = Path(TrainingArguments(**values["training"]).output_dir)
    notes = [*(f"picture: {picture}" for picture in sorted(output.glob("*.png"))), f"written to {output}"]
    return Results(metrics, report_tables({output: metrics}), notes)
