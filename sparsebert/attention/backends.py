"""
The registry of attention backends, and how one is selected and run.

To add a backend, write a function and give it a row in `BACKENDS`. A backend that is named explicitly either serves a
request or raises. Only `sparse_auto` (by a table of measurements, or a self-check) and `sparse_measure` (by measuring)
choose one.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from ..masks.sparse_mask import SparseMask
from . import choice, cpu, flex, triton, triton_limits
from .capabilities import WANTED, Backend, Request
from .eager import eager_attention
from .mask_biases import prepare_bias
from .mask_inputs import MaskInputs, autocast_dtype
from .packed_batches import in_one_row
from .probability_maps import PROBABILITY_MAPS
from .sdpa import sdpa_attention


logger = logging.get_logger(__name__)

# Choices that have been logged, with their reasons but for the numbers in them.
_SAID: set[tuple[str, str, str]] = set()


BACKENDS: dict[str, Backend] = {
    "sparse_eager": Backend(
        eager_attention,
        prepare_bias,
        supports=frozenset(WANTED),
        probability_maps=tuple(PROBABILITY_MAPS),
    ),
    "sparse_sdpa": Backend(
        sdpa_attention, prepare_bias, supports=frozenset({"additive", "export", "learned", "window"})
    ),
    "sparse_cpu": Backend(cpu.csr_backend, cpu.prepare, cpu.refuse, supports=frozenset({"window"}), packed=True),
    "sparse_triton": Backend(triton.triton_backend, triton.prepare, triton_limits.refuse),
    "sparse_flex": Backend(flex.flex_backend, flex.prepare, flex.refuse),
}
# The names that choose a backend for each request.
CHOICES: dict[str, Callable[..., tuple[str, str]]] = {
    "sparse_auto": choice.automatic,
    "sparse_measure": choice.by_measurement,
}
# What they do while a graph is captured or compiled, when nothing may be checked or, on a GPU, timed.
CHOICES_IN_A_GRAPH: dict[str, Callable[..., tuple[str, str]]] = {
    "sparse_auto": choice.by_table,
    "sparse_measure": choice.by_earlier_measurement,
}
ATTENTION_NAMES = (*BACKENDS, *CHOICES)
# What the names of transformers mean on a model that carries a mask.
TWINS = {"eager": "sparse_eager", "sdpa": "sparse_sdpa", "flex_attention": "sparse_flex"}


def sparse_name(name: str | None) -> str:
    """
    The name in `ATTENTION_NAMES` that an attention implementation means on a model that carries a mask: for a name of
    transformers its twin in `TWINS`, which is said once, and `sparse_auto` for `None`.

    Raises:
        ValueError: If there is no such name.
    """
    if name is None:
        return "sparse_auto"
    if name in ATTENTION_NAMES:
        return name
    if name not in TWINS:
        raise ValueError(
            f"attn_implementation {name!r} would ignore the mask that this model carries: use one of "
            f"{', '.join(ATTENTION_NAMES)}, or {', '.join(TWINS)} for {', '.join(TWINS.values())}"
        )
    logger.warning_once(f"attn_implementation {name!r} means {TWINS[name]!r} on a model that carries a sparse mask.")
    return TWINS[name]


def check_returns_attentions(name: str | None) -> None:
    """
    Check that a backend can return attention probabilities.

    Raises:
        ValueError: If a backend is named that does not return attention probabilities.
    """
    if name in BACKENDS and "weights" not in BACKENDS[name].supports:
        able = [other for other, backend in BACKENDS.items() if "weights" in backend.supports]
        raise ValueError(f"output_attentions: {name} does not return attentions, use {', '.join(able)} or sparse_auto")


def check_backend(name: str, probability_map: str = "softmax") -> None:
    """
    Check that there is a backend of this name that applies the probability map.

    Raises:
        ValueError: If `name` is none that [`sparse_name`] knows, or cannot apply the probability map.
    """
    name = sparse_name(name)
    able = [other for other, backend in BACKENDS.items() if probability_map in backend.probability_maps]
    if name in BACKENDS and name not in able:
        raise ValueError(
            f"{name} does not support probability_map {probability_map!r}: use {', '.join(able)} or sparse_auto"
        )


# A compiled graph holds the answer as a constant, since it depends on the mask and the request alone.
@torch.compiler.assume_constant_result
def _choose(name, handle, fields, compiling):
    mask = None if handle is None else SparseMask.instances[handle]
    request = Request(*fields)
    if name in BACKENDS:
        choice.check(BACKENDS, name, request)
        return name
    choices = CHOICES_IN_A_GRAPH if compiling or _capturing(request.device) else CHOICES
    chosen, reason = choices[name](BACKENDS, mask, request)
    # Inputs of other lengths, and a mask that grows sparser, have the same reason with other numbers.
    if (said := (name, chosen, re.sub(r"\d+(\.\d+)?", "", reason))) not in _SAID:
        _SAID.add(said)
        logger.warning(f"{name} runs {chosen}: {reason}.")
    return chosen


def _capturing(device):
    return device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def choose_backend(name: str, mask: SparseMask | None, *fields: Any) -> str:
    """
    The backend that serves a request.

    Args:
        name (`str`): The attention implementation that the user set.
        mask ([`SparseMask`], *optional*): The frozen mask; `None` while searching.
        fields: The fields of [`Request`], in order.

    Returns:
        `str`: A key of `BACKENDS`.
    Raises:
        ValueError: If `name` is not one of `ATTENTION_NAMES`, or cannot serve the request.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(
            f"this model carries a sparse mask, which the attention implementation {name!r} would ignore: use one of "
            f"{', '.join(ATTENTION_NAMES)}, for example model.set_attn_implementation('sparse_auto')"
        )
    return _choose(name, None if mask is None else mask.handle, fields, torch.compiler.is_compiling())


def run_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: MaskInputs,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Attention under the mask of one layer, on the backend that `inputs` names.

    Args:
        query (`torch.Tensor` of shape `(B, H, n, d)`): The last n of m positions.
        key (`torch.Tensor` of shape `(B, H, m, d)`): Keys of all positions.
        value (`torch.Tensor` of shape `(B, H, m, d)`): Values of all positions.
        inputs ([`MaskInputs`]): The inputs of one layer.
        scaling (`float`): Factor of the scores.
        dropout (`float`): Probability of attention dropout.

    Returns:
        `tuple`: The output `(B, n, H, d)`, and the probabilities `(B, H, n, m)` or `None`.
    """
    own_operator = inputs.compiled[0] is not None or inputs.learned[0] is not None
    if own_operator:
        # PyTorch's operators cast their inputs under autocast, ours do not.
        dtype = autocast_dtype(query.device.type, query.dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    backend, documents = BACKENDS[inputs.backend], inputs.documents
    if documents is None:
        return backend.function(query, key, value, inputs, scaling, dropout)
    rows = query.shape[0]
    if backend.packed:
        query, key, value = map(in_one_row, (query, key, value))
        output, weights = backend.function(query, key, value, inputs, scaling, dropout)
        return output.view(rows, -1, *output.shape[2:]), weights
    query, key, value = map(documents.unpack, (query, key, value))
    output, weights = backend.function(query, key, value, inputs, scaling, dropout)
    return documents.pack(output, rows), None if weights is None else documents.pack_weights(weights, rows)
