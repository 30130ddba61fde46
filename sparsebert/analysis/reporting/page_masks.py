"""
Masks as the data of a web page, which its script draws: compressed, and bounded in size.

Letters: L layers (1 when shared), H heads, U different heads among them, n length.
"""

import base64
import zlib
from typing import Any

import numpy as np
import torch

from ...masks.expansion import special_entries
from ...masks.sparse_mask import SparseMask
from ...masks.tiles import mask_tile_shares


# Bytes of all pictures of a page together, before compression.
PAGE_BYTES = 12 * 2**20
# A longer mask is drawn with cells of several tokens.
EXACT_LENGTH = 1024
# Cells along a side of such a picture.
REDUCED_SIZE = 512
# What follows in a longer mask is not drawn.
DRAWN_LENGTH = 4096
TILES = (16, 64, 128)
# Heads whose tables are made at a time, which is faster than one by one and takes little memory.
_TOGETHER = 12


def mask_data(name: str, mask: SparseMask, room: int = PAGE_BYTES) -> dict[str, Any]:
    """
    What the page's script needs of a mask, as JSON values; its picture takes `room` bytes before compression.

    `"heads"` says for each layer and head which of the U different heads it is; other lists hold one value per
    different head. `"kind"` tells what `"picture"` holds, in base64 and zlib:

    - `"toeplitz"`: `keep` of a Toeplitz form, one bit per parameter. If it is not `"symmetric"`, that of distance 0
      is at `"middle"`.
    - `"entries"`: `keep` of a table, one bit per entry.
    - `"cells"`: the whole mask with `"step"` tokens per cell, a byte of the share kept, 255 for all.

    Bits begin anew with each head, the lowest bit of a byte first. `"profile"` holds a byte of the share kept per head
    and offset, or per `"profile_step"` offsets, outside the special tokens. `"tiles"` are shares of live tiles by
    size, without the rows and columns of special tokens, as in [`plan`].
    """
    places: dict[bytes, int] = {}
    heads: list[SparseMask] = []
    layers: list[list[int]] = []
    for layer in mask.keep:
        layers.append([places.setdefault(head.numpy().tobytes(), len(places)) for head in layer])
        for which, head in zip(layers[-1], layer, strict=True):
            if which == len(heads):
                heads.append(mask.replace(keep=head[None, None], rest_bias=None))
    drawn = min(mask.length, DRAWN_LENGTH)
    kind, size = _kind(mask, len(heads), room)
    step = -(-drawn // size)
    pictures, profiles, removed = [], [], []
    tiles: dict[int, list[float]] = {side: [] for side in TILES}
    for start in range(0, len(heads), _TOGETHER):
        some = heads[start : start + _TOGETHER]
        together = mask.replace(keep=torch.cat([head.keep for head in some], 1), rest_bias=None)
        removed += together.head_sparsities()[0]
        for head, table in zip(some, together.to_table(drawn)[0].numpy(), strict=True):
            pictures.append(_shares(table, step) if kind == "cells" else _bits(head.keep.numpy()))
            profiles.append(_profile(table, mask.special_tokens))
            for side in TILES:
                tiles[side].append(mask_tile_shares(head, mask.length, side)[0])
    profile_step = -(-len(profiles[0]) // EXACT_LENGTH)
    return {
        "name": name,
        "length": mask.length,
        "drawn": drawn,
        "form": mask.form,
        "block_size": mask.block_size,
        "symmetric": mask.symmetric,
        "middle": mask.keep.shape[-1] // 2,
        "special_tokens": mask.special_tokens,
        "special_rows": mask.special_rows,
        "diagonal": mask.diagonal,
        "heads": layers,
        "kind": kind,
        "size": -(-drawn // step),
        "step": step,
        "picture": _packed(np.concatenate(pictures)),
        "profile": _packed(np.concatenate([_as_bytes(_pooled(profile, profile_step)) for profile in profiles])),
        "profile_step": profile_step,
        "removed": removed,
        "tiles": tiles,
    }


def _kind(mask, num_heads, room):
    """How to store the pictures, and cells along a side."""
    if mask.length <= EXACT_LENGTH and mask.form != "table" and mask.query_block_size is None:
        return "toeplitz", mask.length
    if mask.length <= EXACT_LENGTH and num_heads * -(-(mask.length**2) // 8) <= room:
        return "entries", mask.length
    size = min(REDUCED_SIZE, mask.length, int((room / num_heads) ** 0.5))
    return "cells", max(size, 1)


def _bits(keep):
    return np.packbits(keep.reshape(-1), bitorder="little")


def _packed(values):
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def _as_bytes(shares):
    """Shares as bytes: 0 and 255 stand for none and all, and only for these."""
    inner = np.clip(np.rint(255 * shares), 1, 254)
    return np.where(shares == 0, 0, np.where(shares == 1, 255, inner)).astype(np.uint8)


def _pooled(values, step):
    """Means of each `step` values along the last axis; the last mean may be of fewer."""
    starts = np.arange(0, values.shape[-1], step)
    counts = np.diff(np.append(starts, values.shape[-1]))
    return np.add.reduceat(values, starts, axis=-1, dtype=np.float64) / counts


def _shares(table, step):
    return _as_bytes(_pooled(_pooled(table, step).T, step).T).reshape(-1)


def _profile(table, special_tokens):
    """The share of each offset that is kept outside the special tokens, or anywhere if there is nothing else."""
    inner = ~special_entries(len(table), special_tokens).diagonal().numpy()
    table = table[inner][:, inner] if inner.any() else table
    length = len(table)
    return np.array(
        [(table.trace(offset) + table.trace(-offset)) / (2 * (length - offset)) for offset in range(length)]
    )
