"""
How close the masks that come with the package keep MiniLM to the dense model, with their rest and without it.

    python -m benchmarks.shipped_masks --text FILE

FILE is English text, `.txt` or `.txt.xz`. Prints the mean cosine of the mean last hidden states with those of the
dense model, over the first 32 rows that fill the length of the mask. Takes a minute on one core.
"""

import argparse
import lzma
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import sparsebert
from sparsebert.masks.shipped import SHIPPED
from sparsebert.training.searching.dense_agreement import agreement
from studies.shared.base_models import PACKAGE, located


ROWS = 32
# Enough for the rows of the longest mask.
CHARACTERS = 200_000


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    path = parser.parse_args().text
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        text = file.read(CHARACTERS)
    source = located(PACKAGE)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    for name in SHIPPED:
        mask = sparsebert.SparseMask.from_pretrained(name)
        model = sparsebert.attach(AutoModel.from_pretrained(source).eval(), mask)
        size = mask.length - 2
        pieces = [ids[index * size : (index + 1) * size] for index in range(min(ROWS, len(ids) // size))]
        rows = torch.tensor([[tokenizer.cls_token_id, *piece, tokenizer.sep_token_id] for piece in pieces])
        masks = {"with its rest": mask, "without": mask.replace(rest="none", rest_bias=None)}
        for how, found in agreement(model, masks, rows).items():
            print(f"{name} {how}: {found['cosine']:.4f} ({len(rows)} rows)")


if __name__ == "__main__":
    main()
