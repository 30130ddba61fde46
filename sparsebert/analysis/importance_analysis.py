"""
The importance analysis of several seeds of one search: which positions they kept, as numbers, a table and pictures.

Letters: S runs, L layers (1 when shared), H heads, n length.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..files import make_folder, write_metrics
from ..masks.mask_cards import bridges
from .importance import (
    IMPORTANCE_GROUPS,
    SKETCH_LENGTH,
    analyzed_special_tokens,
    estimate,
    head_groups,
    offset_profile,
    sketch,
)
from .pictures.importance_pictures import plot_groups, plot_mean_probs, plot_offset_profile, plot_sketch
from .pictures.mask_pictures import plot_heads
from .saved_runs import MASK_ONLY, Run, read_runs
from .statistics import CONFIDENCE
from .tables import Table


def measure_importance(runs: Sequence[Run], special_tokens: str = "first_last") -> dict[str, Any]:
    """
    Which positions the runs of one search kept, as the numbers of `importance.json`: mean and intervals of the groups
    and of the profile over offsets, and the sketch (for 16 tokens or more), for all layers and, if they differ, for
    each.
    """
    probs = _stacked(runs)
    groups = head_groups(probs, special_tokens)
    offsets, profile = offset_profile(probs, special_tokens, signed=not runs[0].mask.symmetric)
    pooled = None
    if probs.shape[-1] >= SKETCH_LENGTH:
        pooled = sketch(probs.mean((0, 2)), special_tokens)  # (L, 16, 16)

    def numbers(layers):
        def of(values):
            values = values[:, layers]
            estimated = estimate(values.reshape(len(runs), -1, *values.shape[3:]))
            return {name: value.tolist() for name, value in estimated.items()}

        result = {"groups": {name: of(values) for name, values in groups.items()}}
        result["profile"] = {"offsets": offsets.tolist()} | of(profile)
        return result | ({} if pooled is None else {"sketch": pooled[layers].mean(0).tolist()})

    result = {
        "runs": [
            {"source": run.source, "sparsity": run.mask.sparsity, "bridges": bridges(run.mask, layers)}
            for run, layers in zip(runs, map(_num_layers, runs), strict=True)
        ],
        **runs[0].setup,
        "analyzed_special_tokens": special_tokens,
        "fixed_groups": _fixed_groups(runs[0], special_tokens),
        "offset_groups": IMPORTANCE_GROUPS,
        "confidence": CONFIDENCE,
        "intervals": "Student's t of the mean, [lows, highs], clipped to [0, 1]. over_heads: every head (of every "
        "layer and run) is one observation. over_seeds: the mean of every run is one observation.",
        "all_layers": numbers(slice(None)),
    }
    if probs.shape[1] > 1:
        result["layers"] = [numbers(slice(layer, layer + 1)) for layer in range(probs.shape[1])]
    return result


def _stacked(runs):
    """P of all runs, `(S, L, H, n, n)`; that of a single one, which may take gigabytes, is not copied."""
    return runs[0].probs[None] if len(runs) == 1 else torch.stack([run.probs for run in runs])


def _num_layers(run):
    """Those of the model; of a mask for all layers beside another model, or none, nobody knows how many."""
    layers = getattr(run.config, "num_attention_layers", getattr(run.config, "num_hidden_layers", 1))
    return max(run.mask.num_layers, layers)


def _fixed_groups(run, special_tokens):
    """Groups that the configuration fixed, so that the search did not decide on them."""
    groups = []
    if run.setup["search"] and run.mask.special_tokens == special_tokens != "none" and run.mask.special_rows:
        groups.append("special_tokens")
    if run.setup["search"] and run.mask.diagonal is not None:
        groups.append("diagonal")
    return groups


def importance_table(numbers: dict[str, Any]) -> Table:
    """The groups of all layers as a table: mean and intervals."""
    quantity = "mean of M" if numbers["quantity"] == MASK_ONLY else "mean P"
    rows = []
    for name, group in numbers["all_layers"]["groups"].items():
        row = {"group": name, quantity: f"{group['mean']:.3f}"}
        for kind in ("over_heads", "over_seeds"):
            if kind in group:
                low, high = group[kind]
                row[f"95 % {kind}"] = f"[{low:.3f}, {high:.3f}]"
        rows.append(row)
    return Table.of("Positions kept", rows)


def analyze(
    sources: Sequence[str | os.PathLike],
    output_dir: str | os.PathLike,
    special_tokens: str | None = None,
    **hub_arguments: Any,
) -> dict[str, Any]:
    """
    Read runs of one search, write `importance.json` and pictures (PNG and SVG), and return the numbers.

    Without `special_tokens`, the first token alone counts as special if the search keeps only that one, as in a
    decoder, else the first and the last.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("the pictures need matplotlib: pip install 'sparsebert[viz]'")
    output = Path(output_dir)
    runs = read_runs(sources, **hub_arguments)
    if special_tokens is None:
        special_tokens = analyzed_special_tokens(runs[0].mask)
    numbers = measure_importance(runs, special_tokens)
    probs, quantity = _stacked(runs), runs[0].quantity
    make_folder(output)
    for number, run in enumerate(runs, start=1):
        name = Path(run.source).name if len(runs) == 1 else f"run {number}, {Path(run.source).name}"
        plot_heads(run.mask, output / ("heads" if len(runs) == 1 else f"heads_{number}"), name)
    plot_mean_probs(probs, output / "mean_probs", quantity)
    if probs.shape[-1] >= SKETCH_LENGTH:
        plot_sketch(probs, output / "sketch", special_tokens, quantity)
    plot_groups(probs, output / "groups", special_tokens, tuple(numbers["fixed_groups"]), quantity)
    signed = not runs[0].mask.symmetric
    plot_offset_profile(probs, output / "offset_profile", special_tokens, quantity, signed)
    return write_metrics(output / "importance.json", numbers)
