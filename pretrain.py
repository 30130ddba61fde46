"""
Pre-train a SparseBERT from a recipe: `python pretrain.py RECIPE [--field value ...]`.

Learns the mask with the weights (or runs through a given one), freezes it, and writes to `output_dir`: the model with
its mask, the tokenizer, `metrics.json`, `trainer_state.json` (what was logged), `mask_probs.safetensors` (P before
freezing), pictures (with the extra `viz`), TensorBoard logs.
"""

from pathlib import Path

from transformers import TrainingArguments

from sparsebert.commands.command_line import run_script
from sparsebert.training.pretraining import SECTIONS, pretrain
from sparsebert.training.recipes import load_recipe


def main(arguments):
    recipe = load_recipe(arguments, SECTIONS)
    print(pretrain(recipe))
    print("pictures:", *sorted(map(str, Path(TrainingArguments(**recipe["training"]).output_dir).glob("*.png"))))


if __name__ == "__main__":
    run_script(main)
