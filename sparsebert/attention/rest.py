"""
The rest of a mask: one more key, which stands for all that the mask removes. See `rest` of [`SparseMask`].

The attention that a query q would pay to the keys k_j together is `sum_j exp(s q . k_j)`, s being the scale. Expanded
to first order around the mean query u, with `w = softmax(s u . k)`, its logarithm is `s q . sum_j(w_j k_j)` and a
constant, the entropy of w, and the query receives `sum_j(w_j v_j)`. So one key and one value stand for all and cost
what a query costs that attends to all keys. A query that lacks r of the N keys pays r / N of that attention.

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..masks.compiled_forms import rest_biases
from ..masks.expansion import SPECIAL_TOKENS
from ..masks.sparse_mask import SparseMask
from .biases.bias_entries import REMOVED, REMOVED_BELOW, first_real, last_real
from .biases.offset_biases import OffsetBias
from .mask_inputs import MaskInputs


# Channels that the score of the rest takes: as many as keep heads aligned for the kernels of PyTorch.
_MORE = 8
# A query for which less than this is removed, which only a mask being learned has, or nothing, has no rest.
LEAST_REMOVED = 1e-3


class Rest(NamedTuple):
    """
    The key and the value `(B, H, d)` of the rest, and what is added to its score `scale * query . key + log r` `(B,
    H)`; float32, or float64 for float64 states.
    """

    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor


def rest_fields(mask: Any, inputs: MaskInputs) -> dict[str, Any]:
    """The fields of [`MaskInputs`] about the rest of a [`SparseMask`], or of a search, which has no bias yet."""
    if mask.rest == "none":
        return {}
    frozen, device = isinstance(mask, SparseMask), inputs.device
    biases = rest_biases(mask, device) if frozen else (torch.zeros(mask.num_heads, device=device),)
    return {"rest": biases, "rest_keys": keys_of_rest(inputs, mask.special_tokens, mask.last_token)}


def keys_of_rest(inputs: MaskInputs, special_tokens: str, last_token: str) -> torch.Tensor | None:
    """
    The keys that the rest stands for, bool `(B or 1, m)`, `None` for all: the real tokens but the special ones, to
    which every query attends anyway.
    """
    padding, number = inputs.padding, SPECIAL_TOKENS.index(special_tokens)
    if padding is None and not number:
        return None
    position = torch.arange(inputs.num_keys, device=inputs.device)
    keys = real = torch.ones_like(position[None], dtype=torch.bool) if padding is None else padding
    if number:
        keys = keys & (position != first_real(real)[:, None])
    if number == 2:
        last = last_real(real)[:, None] if last_token == "real" else inputs.num_keys - 1
        keys = keys & (position != last)
    return keys


def pooled_rest(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float
) -> Rest:
    """The rest of one layer, for queries `(B, H, n, d)` and keys and values `(B, H, m, d)`."""
    bias, keys = inputs.rest[0], inputs.rest_keys
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (states.to(dtype) for states in (query, key, value))
        if keys is None:
            # Summed, since a number would fix the length in what is traced or exported.
            mean, count = query.mean(2, keepdim=True), torch.ones(key.shape[2], dtype=dtype, device=query.device).sum()
        else:
            # Zeros in the place of padding, which may hold anything.
            query, key, value = (
                torch.where(keys[:, None, -states.shape[2] :, None], states, 0.0) for states in (query, key, value)
            )
            asking = keys[:, None, -query.shape[2] :, None].sum(2, keepdim=True)
            mean = query.sum(2, keepdim=True) / asking.clamp(min=1)
            count = keys.sum(-1).clamp(min=1)[:, None].to(dtype)
        scores = mean @ key.mT * scaling  # (B, H, 1, m)
        if keys is not None:
            scores = scores.masked_fill(~keys[:, None, None], REMOVED)
        weights = scores.softmax(-1)
        key, value = (weights @ key)[:, :, 0], (weights @ value)[:, :, 0]
        score = scores.logsumexp(-1)[..., 0] - (mean[:, :, 0] * key).sum(-1) * scaling - count.log()
    return Rest(key, value, score + bias)


def num_removed(bias: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """
    How many real keys a bias `(B or 1, H or 1, n, m)` removes for each query, `(B or 1, H or 1, n, 1)`. A key that is
    lowered by x counts by `1 - exp(-x)`.
    """
    kept = bias.exp().sum(-1, keepdim=True)
    return (bias.shape[-1] if padding is None else padding.sum(-1)[:, None, None, None]) - kept


def removed_keys(table: torch.Tensor) -> tuple[torch.Tensor]:
    """How many keys a mask, bool `(H, m, m)`, removes for each query: int32 `(H, m)`, a form of [`compiled`]."""
    return ((~table).sum(-1, dtype=torch.int32),)


def with_rest(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, rest: Rest, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, MaskInputs]:
    """
    Query `(B, H, n, d + 8)`, and key and value `(B, H, m + 1, d + 8)` whose last row is the rest, with inputs whose
    bias and `live` know of it. The probabilities have a last column for it, and the output has 8 channels too many:
    one of query and key holds the score of the rest, which differs by sequence, while one bias may serve all.
    """
    learned, padding = inputs.learned[0], inputs.padding
    assert not isinstance(learned, OffsetBias)
    bias = inputs.bias[0] if learned is None else learned[None]
    assert bias is not None
    removed = num_removed(bias, padding)
    if inputs.rest_keys is not None:  # a sequence may have nothing but special tokens
        removed = torch.where(inputs.rest_keys.any(-1)[:, None, None, None], removed, 0.0)
    logs = torch.where(removed < LEAST_REMOVED, REMOVED, removed.clamp(min=LEAST_REMOVED).log())
    bias = torch.cat([bias, logs.to(bias.dtype)], -1)
    query = pad(pad(query, (0, 1), value=1.0), (0, _MORE - 1))
    last = torch.cat([rest.key, rest.score[..., None] / scaling], -1).to(key.dtype)[:, :, None]
    key = torch.cat([pad(key, (0, _MORE)), pad(last, (0, _MORE - 1))], 2)
    value = pad(torch.cat([value, rest.value[:, :, None].to(value.dtype)], 2), (0, _MORE))
    if learned is not None:
        return query, key, value, replace(inputs, learned=(bias[0],))
    live = None
    if inputs.rest_keys is not None:
        live = (bias > REMOVED_BELOW).any(-1, keepdim=True)
        live = live if padding is None else live & padding[:, None, -query.shape[2] :, None]
    return query, key, value, replace(inputs, bias=(bias,), live=(live,))


def check_rest(mask: SparseMask, causal: bool, probability_map: str) -> None:
    """Refuse what a mask with a rest has no meaning for."""
    if mask.rest == "none":
        return
    if causal:
        raise ValueError(f"rest {mask.rest!r} is undefined in causal attention: use mask.replace(rest='none')")
    if probability_map != "softmax":
        raise ValueError(f"rest {mask.rest!r} needs the probability_map 'softmax', got {probability_map!r}")
