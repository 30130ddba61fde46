"""
The self-check of attention backends, as a program: errors against float64 by the rule that they are at most twice
those of plain PyTorch in the same dtype, and times.

It runs in a process of its own (see [`self_check_process`]), since a faulty kernel leaves the GPU unusable for the
process that called it.

Letters: B batch, H heads, n length, d head size.
"""

import functools
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from ...masks.sparse_mask import SparseMask
from ..backends import prepared
from ..biases.bias_entries import REMOVED, REMOVED_BELOW
from ..distance_bias import distance_table
from ..dot_product import sparse_dot_product_attention
from ..kernels.eager import power_of_two
from ..kernels.triton_launch import MOST_CONFIGURATIONS, launching
from ..mask_inputs import MaskInputs
from ..rest import pooled_rest, rest_fields
from .self_check_results import FINISHED, TRUSTED, Outcome, Setting, finding_of
from .timing import measure, timed_layers, trial


HEADS = 2
# A multiple of 1/65536, to which sparse_triton rounds.
DROPOUT = 0.125
# By default one tile, one for the kernels of short inputs and one for those of long inputs, none a multiple of a tile.
LENGTHS = (50, 77, 333)
# Tokens of a call that is timed, and number of calls.
TOKENS = {"cpu": 1024, "cuda": 16384}
ROUNDS = {"cpu": 3, "cuda": 20}
# Units in the last place that are allowed beside twice the error of plain PyTorch, whose own may be 0.
UNITS = {torch.float32: 16}


def masks(length: int) -> Iterable[tuple[SparseMask, bool]]:
    """
    Masks whose heads differ, and whether future keys are removed too: full, partial and empty tiles with special
    tokens; rows that keep nothing; a decoder; the columns of special tokens alone.
    """
    generator = torch.Generator().manual_seed(length)
    table = torch.rand(HEADS, length, length, generator=generator) < torch.tensor([0.1, 0.6])[:, None, None]
    tile = torch.arange(length) // 64
    apart = (tile[:, None] - tile).abs()
    tiles = table & (apart < 2)
    tiles[1, apart == 0] = True
    yield SparseMask(tiles, length, special_tokens="first_last"), False
    table[:, ::3] = False
    yield SparseMask(table, length), False
    yield SparseMask(tiles, length, special_tokens="first"), True
    yield SparseMask(tiles, length, special_tokens="first_last", special_rows=False), False


def padding_for(length: int) -> torch.Tensor:
    """Three sequences, bool `(3, n)`: full, padded on the right, padded on the left with a hole."""
    padding = torch.ones(3, length, dtype=torch.bool)
    padding[1, max(1, 5 * length // 8) :] = False
    padding[2, : length // 5] = padding[2, length // 2] = False
    return padding


def compare(name: str, device: torch.device, setting: Setting, length: int) -> Iterator[tuple[str, float, float]]:
    """What a backend computes on small inputs under several [`masks`], its error and what is allowed."""
    padding = padding_for(length).to(device) if setting.padded else None
    shape = (4, 2 if padding is None else len(padding), length, HEADS, setting.head_size)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(length))
    query, key, value, grad = drawn.to(device, getattr(torch, setting.dtype)).transpose(2, 3).unbind(0)
    scaling = setting.head_size**-0.5
    bias = [torch.linspace(-2, 2, HEADS * (2 * length - 1), device=device).view(HEADS, -1)] * setting.distances
    for without, causal in masks(length):
        keep = _kept(without, padding, causal, query)
        mask = without.replace(rest="mean") if setting.rest and not causal else without
        rest = _rest_of(mask, padding, keep)

        def attention(query, key, value, bias=None, mask=mask, causal=causal):
            torch.manual_seed(length)
            options = {"dropout_p": DROPOUT if setting.dropout else 0.0, "is_causal": causal, "distance_bias": bias}
            return sparse_dot_product_attention(query, key, value, mask, padding, backend=name, **options)

        factors = None
        if setting.dropout:
            with torch.no_grad():
                factors, compared = _dropout_factors(functools.partial(attention, mask=without), keep, query)
            yield from compared

        def formula(query, key, value, bias=None, keep=keep, factors=factors, rest=rest):
            return _dense(query, key, value, keep, factors, scaling, bias, rest)

        leaves = [query, key, value, *bias]
        results = _results(attention, leaves, grad, setting.gradients)
        truth = _results(formula, [leaf.double() for leaf in leaves], grad.double(), setting.gradients)
        plain = _results(formula, leaves, grad, setting.gradients)
        names = ("output", *(f"gradient of the {which}" for which in ("query", "key", "value", "bias per distance")))
        units = UNITS.get(query.dtype, 1) * torch.finfo(query.dtype).eps
        for what, got, want, other in zip(names, results, truth, plain, strict=False):
            error, allowed = (_largest(each.double() - want) for each in (got, other))
            yield what, error, 2 * allowed + units * max(1.0, _largest(want))
        has_key = keep.any(-1) if rest is None else keep.any(-1) | (rest[1][..., 0] > 0)
        yield "output without a key", _largest(results[0][~has_key]), 0.0


def _largest(tensor):
    """The largest absolute value, NaN if there is one, 0 of nothing."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _kept(mask, padding, causal, query):
    """The entries that are on, bool `(B, H, n, n)`, by the bias that the reference reads."""
    length = query.shape[2]
    inputs = MaskInputs("sparse_eager", length, length, query.device, mask, padding, causal)
    keep = prepared(inputs).for_layer(0).bias[0] > REMOVED_BELOW
    return keep.expand(*query.shape[:2], length, length)


def _rest_of(mask, padding, keep):
    """
    What [`_dense`] reads of a mask with a rest, else `None`: inputs that say what is pooled, and how many keys the
    rest stands for, `(B, H, n, 1)`, 0 where a query has none.
    """
    if mask.rest == "none":
        return None
    inputs = MaskInputs("sparse_eager", *keep.shape[2:], keep.device, mask, padding, False)
    inputs = replace(inputs, **rest_fields(mask, inputs)).for_layer(0)
    real = torch.ones_like(keep[:, 0, 0]) if padding is None else padding
    removed = (real.sum(-1)[:, None, None, None] - keep.sum(-1, keepdim=True)) * real[:, None, :, None]
    if inputs.rest_keys is not None:
        removed = removed * inputs.rest_keys.any(-1)[:, None, None, None]
    return inputs, removed


def _dense(query, key, value, keep, factors, scaling, bias, rest):
    """Plain PyTorch: the whole score matrix, softmax in float32 or float64; probabilities times `factors`."""
    power, left = power_of_two(scaling)
    scores = ((query * power) @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * left
    if bias is not None:
        scores = scores + distance_table(bias, *scores.shape[2:])
    if rest is not None:
        inputs, removed = rest
        pooled = pooled_rest(query, key, value, inputs, scaling)
        own = (query.to(pooled.key.dtype) @ pooled.key[..., None]) * scaling + pooled.score[..., None, None]
        scores = torch.cat([scores, own + removed.clamp(min=1).log()], -1)
        keep = torch.cat([keep, removed > 0], -1)
        value = torch.cat([value, pooled.value[:, :, None].to(value.dtype)], 2)
        if factors is not None:
            factors = torch.nn.functional.pad(factors, (0, 1), value=1.0)
    weights = scores.masked_fill(~keep, REMOVED).softmax(-1) * keep.any(-1, keepdim=True)
    weights = weights if factors is None else weights * factors
    return weights.to(value.dtype) @ value


def _results(function, tensors, grad, gradients):
    """Output and, if asked for, the gradients of query, key, value and, if there is one, the bias."""
    leaves = [tensor.detach().requires_grad_(gradients) for tensor in tensors]
    with torch.set_grad_enabled(gradients):
        output = function(*leaves)
        return [output.detach(), *(torch.autograd.grad(output, leaves, grad) if gradients else ())]


def _dropout_factors(attention, keep, query):
    """
    What dropout multiplies each probability with, read from uniform probabilities and one-hot values, and what is
    compared on the way.
    """
    length, width = query.shape[2:]
    zeros = torch.zeros_like(query)
    unit = torch.eye(length, -(-length // width) * width, dtype=query.dtype, device=query.device)
    columns = [attention(zeros, zeros, part.expand_as(query).contiguous()) for part in unit.split(width, dim=1)]
    factors = torch.cat(columns, dim=-1)[..., :length].double() * keep.sum(-1, keepdim=True)
    kept = factors > 0.5
    wanted = kept / (1 - DROPOUT)
    number = max(int(keep.sum()), 1)
    rate = abs(1 - int(kept.sum()) / number - DROPOUT)
    return wanted, [
        ("dropout outside of the mask", float((kept & ~keep).sum()), 0.0),
        ("dropout factor", _largest(factors - wanted), 0.02),
        # Six standard deviations.
        ("dropout rate", rate, 6 * (DROPOUT * (1 - DROPOUT) / number) ** 0.5),
    ]


def examine(
    name: str,
    device: str,
    setting: Setting,
    lengths: Sequence[int] = LENGTHS,
    say: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """
    Compare one backend at some lengths, and in every launch configuration that may be chosen: a [`finding_of`] it.
    `say` is called with what is about to be done.
    """
    worst: dict[str, dict[str, float]] = {}
    reason = None
    for length, number in product(lengths, range(MOST_CONFIGURATIONS if name == "sparse_triton" else 1)):
        say(f"{name} at {length} tokens" + f", configuration {number + 1}" * (number > 0))
        try:
            with launching(number):
                for what, off, allowed in compare(name, torch.device(device), setting, length):
                    found = {"tokens": length, "error": off, "allowed": allowed}
                    if what not in worst or _excess(found) > _excess(worst[what]):
                        worst[what] = found
        except Exception as error:  # whatever it is, a backend that raises is not to be chosen
            if number and type(error).__name__ == "OutOfResources":
                continue  # of Triton, for a configuration that is then never chosen
            reason = _described(error)
            break
    _synchronize(device)
    wrong = [what for what, found in worst.items() if not found["error"] <= found["allowed"]]
    if wrong and reason is None:
        what = max(wrong, key=lambda what: _excess(worst[what]))
        tokens, most, allowed = worst[what].values()
        reason = f"{what} at {tokens} tokens is off by {most:.3g}, allowed {allowed:.3g}"
    return finding_of(reason is None, reason, worst)


def _excess(found):
    """An error as a multiple of what is allowed."""
    error, allowed = found["error"], found["allowed"]
    if math.isnan(error) or (error and not allowed):
        return math.inf
    return error / allowed if allowed else 0.0


def _described(error):
    # The first line of an error of CUDA says what happened, the last one of a compiler's.
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"


def _synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def near_tiles(length: int, live: int, num_heads: int) -> SparseMask:
    """A mask of whole tiles near the diagonal, of which about `live` tenths are on."""
    count = -(-length // 64)
    tile = torch.arange(count)
    order = (tile[:, None] - tile).abs()
    threshold = order.flatten().sort().values[max(1, round(live / 10 * count**2)) - 1]
    table = (order <= threshold).repeat_interleave(64, 0).repeat_interleave(64, 1)[:length, :length]
    return SparseMask(table.expand(num_heads, -1, -1).contiguous(), length, special_tokens="first")


def times(
    names: Iterable[str], device: str, setting: Setting, mask: str | None = None, num_heads: int = 12
) -> tuple[dict[str, float], dict[str, str]]:
    """
    Milliseconds of each backend per layer, that of preparing the mask included, and the reasons why some could not be
    timed, under the mask of a folder or one of tiles near the diagonal.
    """
    if mask is None:
        timed = near_tiles(setting.length, setting.live, num_heads)
    else:
        timed = SparseMask.from_pretrained(mask)
    kind = torch.device(device).type
    batch = max(1, TOKENS[kind] // setting.length)
    request = setting.request(device, setting.length, batch, timed.num_heads)
    trials, reasons = {}, {}
    with torch.set_grad_enabled(setting.gradients):
        for name in names:
            try:
                # A copy, since the forms of all backends may be more than one mask keeps.
                trials[name] = trial(name, timed.replace(), request)
                trials[name]()
                _synchronize(device)
            except Exception as error:
                trials.pop(name, None)
                reasons[name] = _described(error)
                _synchronize(device)
        found = measure(trials, device, ROUNDS[kind])
    number = len(timed_layers(timed, kind))
    return {name: 1e3 * seconds / number for name, seconds in found.items()}, reasons


def check(
    device: str,
    setting: Setting,
    backends: Sequence[str],
    say: Callable[[Outcome], None],
    mask: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    num_heads: int = 12,
) -> None:
    """
    Compare backends at some `lengths` and time them, see [`times`]; `TRUSTED` is only timed on GPUs. `say` is called
    with the outcome so far before each step, and at the end.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    outcome = Outcome(setting)

    def doing(step):
        say(replace(outcome, ended=step))

    for name in backends:
        trusted = name == TRUSTED and device != "cpu"
        outcome.backends[name] = finding_of(True) if trusted else examine(name, device, setting, lengths, doing)
    doing("taking times")
    right = [name for name, finding in outcome.backends.items() if finding["right"]]
    found, reasons = times(right, device, setting, mask, num_heads)
    for name in right:
        changes = {"right": False, "reason": reasons[name]} if name in reasons else {"milliseconds": found[name]}
        outcome.backends[name] |= changes
    say(replace(outcome, ended=FINISHED))


def _end_with_the_input():
    """The process that asked is gone."""
    os.read(0, 1)
    os._exit(1)


def main(text: str) -> None:
    """Do the checks that are asked for as JSON, see [`run_self_checks`]. Writes each [`Outcome`] as a line of JSON."""
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    # Whatever a library prints must not get between the lines.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(outcome: Outcome) -> None:
        output.write(json.dumps(outcome.as_json()) + "\n")
        output.flush()

    options = json.loads(text)
    for setting, backends in options.pop("asked"):
        check(setting=Setting(**setting), backends=backends, say=say, **options)
