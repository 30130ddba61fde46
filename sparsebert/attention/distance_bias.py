"""
A bias per head and signed distance of query and key, which some models learn and add to the scores of all layers.

It says nothing about which entries are kept: it is added to the scores of those that are, special tokens included. The
rest of a mask gets none. It stands for keys at many distances, a mean of which is a number per head, and that is what
its own bias is calibrated with (see `calibrate_rest`).

Letters: H heads, n queries (the last n of the m positions), m keys, i query, j key.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from .biases.offset_biases import OffsetBias
from .mask_inputs import MaskInputs


def check_distance_bias(bias: Any, num_heads: int, num_keys: int, device: torch.device) -> None:
    """Refuse what is no bias per distance for that many heads and keys."""
    shape = (num_heads, 2 * num_keys - 1)
    is_tensor = isinstance(bias, torch.Tensor)
    if not is_tensor or not bias.is_floating_point() or bias.shape != shape or bias.device != device:
        got = f"{bias.dtype} {tuple(bias.shape)} on {bias.device}" if is_tensor else type(bias).__name__
        raise ValueError(f"distance_bias must be floating-point of shape {shape} on {device}, got {got}")


def distance_table(values: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """The bias `(H, 2m - 1)` of distance i - j, in column i - j + m - 1, of every entry: `(H, n, m)`, not in half."""
    position = torch.arange(num_keys, device=values.device)
    index = position[num_keys - num_queries :, None] - position + num_keys - 1
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.index_select(1, index.flatten()).unflatten(1, (num_queries, num_keys))


def with_distance_forms(inputs: MaskInputs) -> MaskInputs:
    """
    The same with the bias in the form that the backend reads, made once per forward: tables, if it reads the mask as a
    bias, or else plain arrays in float32.
    """

    def form(values):
        if values is None or inputs.compiled[0] is not None:
            return values if values is None else values.float().contiguous()
        return distance_table(values, inputs.num_queries, inputs.num_keys)

    return replace(inputs, distance_bias=tuple(map(form, inputs.distance_bias)))


def merged_distances(inputs: MaskInputs) -> MaskInputs:
    """The inputs of one layer with the table of its distances in the bias of the mask, which may have a rest."""
    table, bias, learned = inputs.distance_bias[0], inputs.bias[0], inputs.learned[0]
    if table is None:
        return inputs
    if isinstance(learned, OffsetBias):
        learned = learned.table(inputs.num_keys, inputs.causal)
    known = bias if learned is None else learned
    if known is not None:
        table = pad(table, (0, known.shape[-1] - table.shape[-1])) + known
    if learned is not None:
        return replace(inputs, learned=(table,))
    return replace(inputs, bias=(table if table.dim() == 4 else table[None],))
