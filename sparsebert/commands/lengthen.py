"""Longer inputs: `python -m sparsebert.lengthen MODEL --length N --output_dir DIR` extends the position embeddings."""

import argparse
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from ..files import check_output_dir
from ..models.loading import carries_mask, load, model_class_of
from ..models.positions import METHODS, extend_positions
from .command_line import run_script


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m sparsebert.lengthen",
        description="Extend the position embeddings of a model, with its mask if it has one, for longer inputs.",
    )
    parser.add_argument("model", metavar="DIR_OR_HUB_ID")
    parser.add_argument("--length", type=int, required=True, metavar="N", help="tokens of the longest input")
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="created if missing")
    options = parser.parse_args(arguments)
    check_output_dir(options.output_dir)
    if carries_mask(options.model):
        model = load(options.model)
    else:
        model = model_class_of(AutoConfig.from_pretrained(options.model)).from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    extend_positions(model, options.length, options.method)
    tokenizer.model_max_length = options.length
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    print(f"{options.output_dir}: {options.length} positions ({options.method})")


if __name__ == "__main__":
    run_script(main)
