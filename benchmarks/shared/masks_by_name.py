"""
Masks by name, for all benchmarks.

Letters: H heads, n length, t tiles, t = ceil(n / 64).
"""

from pathlib import Path

import torch

from sparsebert import SparseMask, build_pattern
from sparsebert.masks.expansion import special_entries
from sparsebert.models.attaching import read_mask


FOLDER = Path(__file__).parents[1] / "masks"
TILE_SIZE = 64
HELP = (
    "dam_s[:DENSITY], random offsets; dam_u[:DENSITY], random entries; toeplitz64[:LIVE], random tile diagonals; "
    "window[:SIZE], a band and a global first token; learned:MASK[@LAYER], of benchmarks/masks/ or any other"
)


def _fill(sizes, budget, generator, first=()):
    """Bool per item: those of `first`, then random ones as long as the sum of their `sizes` stays in `budget`."""
    keep, used = torch.zeros(len(sizes), dtype=torch.bool), 0
    others = [item for item in torch.randperm(len(sizes), generator=generator).tolist() if item not in first]
    for item in (*first, *others):
        if item in first or used + sizes[item] <= budget:
            keep[item], used = True, used + sizes[item]
    return keep


def _offset_sizes(length):
    """Entries of each offset `abs(i - j)` in a square of `length`."""
    return [length] + [2 * (length - offset) for offset in range(1, length)]


def dam_s(length, num_heads, generator, density=0.09):
    """Random offsets per head, first and last token on, as a `dam_s` search freezes to."""
    special = 4 * length - 4
    # The special tokens' rows and columns hold the ends of every diagonal.
    sizes = [max(size, 0) for size in _offset_sizes(length - 2)] + [0, 0]
    keep = [_fill(sizes, density * length**2 - special, generator) for _ in range(num_heads)]
    return SparseMask(torch.stack(keep), length, form="offsets", special_tokens="first_last")


def dam_u(length, num_heads, generator, density=0.21):
    """Random symmetric entries per head, as a `dam_u` search freezes to."""
    upper = (torch.rand(num_heads, length, length, generator=generator) < density).triu()
    return SparseMask(upper | upper.mT, length, form="table")


def toeplitz64(length, num_heads, generator, live=None):
    """The diagonal and random other diagonals of 64 x 64 tiles per head, first and last token on, as in `dam_b`."""
    num_tiles = -(-length // TILE_SIZE)
    live = live or (0.35 if length <= 512 else 0.2)
    keep = [
        _fill(_offset_sizes(num_tiles), live * num_tiles**2, generator, first=(0,)) for _ in range(num_heads)
    ]  # the diagonal, since a token without its neighbors learns nothing
    return SparseMask(torch.stack(keep), length, form="blocks", block_size=TILE_SIZE, special_tokens="first_last")


def window(length, num_heads, generator, size=64):
    """The nearest keys, and a first token that attends to and is attended by all."""
    mask = build_pattern("window", length, num_heads, window_size=min(int(size), length - 1), num_global_tokens=1)
    return mask.replace(keep=mask.keep.expand(-1, num_heads, -1))


GENERATED = {"dam_s": dam_s, "dam_u": dam_u, "toeplitz64": toeplitz64, "window": window}


def _learned(name, num_heads, all_layers):
    name, _, layer = name.partition("@")
    path = FOLDER / name
    mask = read_mask(str(path) if path.is_dir() else name)
    if num_heads % mask.num_heads:
        raise ValueError(f"mask {name!r} has {mask.num_heads} heads, which do not divide {num_heads}")
    if all_layers and not layer:
        return mask
    layer = int(layer or 0)
    if not layer < mask.num_layers:
        raise ValueError(f"mask {name!r} has {mask.num_layers} layers, got layer {layer}")
    own = {"keep": mask.keep}
    if mask.rest_bias is not None:
        own["rest_bias"] = mask.rest_bias.expand(mask.num_layers, -1)
    repeats = num_heads // mask.num_heads
    own = {name: values[layer : layer + 1].repeat_interleave(repeats, dim=1) for name, values in own.items()}
    return mask.replace(**own)


def build_mask(name, length, num_heads, seed=0, all_layers=False):
    """A mask of one layer, or with `all_layers` of all that a learned one has."""
    kind, _, value = name.partition(":")
    if kind == "learned":
        return _learned(value, num_heads, all_layers)
    if kind not in GENERATED:
        raise ValueError(f"unknown mask {name!r}, allowed: {HELP}")
    generator = torch.Generator().manual_seed(seed)
    return GENERATED[kind](length, num_heads, generator, *([float(value)] if value else []))


def kept(mask, length, padding=None):
    """What a mask keeps, from its definition alone."""
    if padding is None:
        return mask.to_table(length)
    padding = padding.cpu()
    first, last = padding.int().argmax(-1), None
    if mask.last_token == "real":
        last = length - 1 - padding.flip(-1).int().argmax(-1)
    special = special_entries(length, mask.special_tokens, first, last, rows=mask.special_rows)
    keep = mask.structure(length) | special.view(-1, 1, length, length)
    if mask.diagonal is not None:
        keep.diagonal(dim1=-2, dim2=-1).fill_(mask.diagonal)
    return keep & padding[:, None, None, :] & padding[:, None, :, None]
