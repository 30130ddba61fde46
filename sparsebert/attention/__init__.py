"""
Attention backends, entered through the host's attention and mask tables.

A backend is a function and a row of `BACKENDS`. Explicit names never fall back; only `sparse_auto` (by a table of
measurements) and `sparse_measure` (by measuring) choose.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils import logging

from ..masks.sparse_mask import SparseMask
from ..probability import PROBABILITY_MAPS, ProbabilityMap, check_probability_map
from . import choice, cpu, flex, triton
from .eager import eager_attention
from .mask_inputs import MaskInputs, prepare_bias
from .sdpa import sdpa_attention


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Backend:
    """
    One way to run attention under a mask.

    Args:
        function (`Callable`): `(query, key, value, inputs, scaling, dropout) -> (output, weights or None)`; query of
            shape `(B, H, n, d)`, output of shape `(B, n, H, d)`, `inputs` a [`MaskInputs`] of one layer, `dropout` 0
            in evaluation.
        prepare (`Callable`): `(mask, inputs) -> dict`, the fields of [`MaskInputs`] that `function` reads, made once
            per forward for all layers.
        refuse (`Callable`): `(request) -> str or None`, why it cannot serve a [`Request`].
        supports (`frozenset`): What it can do beyond a frozen mask with padding: `"additive"` (the thresholded
            mask of a search, 4-D masks of the caller), `"learned"` (masks that are being learned), `"gate"`
            (multiplicative masks), `"weights"` (returns the attention probabilities), `"window"` (a window that
            differs by sequence).
        probability_maps (`tuple`): Names of the `PROBABILITY_MAPS` that it can apply.
    """

    function: Callable
    prepare: Callable
    refuse: Callable = lambda request: None
    supports: frozenset = frozenset()
    probability_maps: tuple = ("softmax",)


BACKENDS = {
    "sparse_eager": Backend(
        eager_attention,
        prepare_bias,
        supports=frozenset(choice.WANTED),
        probability_maps=tuple(PROBABILITY_MAPS),
    ),
    "sparse_sdpa": Backend(sdpa_attention, prepare_bias, supports=frozenset({"additive", "learned", "window"})),
    "sparse_cpu": Backend(cpu.csr_backend, cpu.prepare, cpu.refuse),
    "sparse_triton": Backend(triton.triton_backend, triton.prepare, triton.refuse),
    "sparse_flex": Backend(flex.flex_backend, flex.prepare, flex.refuse),
}
CHOICES = {"sparse_auto": choice.by_table, "sparse_measure": choice.by_measurement}
ATTENTION_NAMES = (*BACKENDS, *CHOICES)


def check_backend(name, probability_map="softmax"):
    """
    Raises:
        ValueError: If `name` is not an attention implementation that applies the mask and the probability map.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(f"attn_implementation must be one of {', '.join(ATTENTION_NAMES)}, got {name!r}")
    able = [other for other, backend in BACKENDS.items() if probability_map in backend.probability_maps]
    if name in BACKENDS and name not in able:
        raise ValueError(
            f"{name} does not support probability_map {probability_map!r}: use {', '.join(able)} or sparse_auto"
        )


# Depends on the mask and the request alone, so a graph compiled around a model may hold the answer.
@torch.compiler.assume_constant_result
def _choose(name, handle, fields):
    mask = None if handle is None else SparseMask.instances[handle]
    request = choice.Request(*fields)
    if name in BACKENDS:
        choice.check(BACKENDS, name, request)
        return name
    chosen, reason = CHOICES[name](BACKENDS, mask, request)
    logger.warning_once(f"{name} runs {chosen}: {reason}.")
    return chosen


def choose_backend(name, mask, *fields):
    """
    The backend that serves a request.

    Args:
        name (`str`): What the user set as attention implementation.
        mask ([`SparseMask`], *optional*): `None` while searching.
        fields: Of [`Request`], in their order.

    Raises:
        ValueError: If `name` is not one of ours, or cannot do what is required.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(
            f"this model carries a sparse mask, which the attention implementation {name!r} would ignore: use one of "
            f"{', '.join(ATTENTION_NAMES)}, for example model.set_attn_implementation('sparse_auto')"
        )
    return _choose(name, None if mask is None else mask.handle, fields)


def run_backend(query, key, value, inputs, scaling, dropout):
    """Output `(B, n, H, d)` and the probabilities `(B, H, n, m)` or `None`, under the mask of one layer."""
    device = query.device.type
    own = inputs.compiled[0] is not None or inputs.learned[0] is not None
    if own and torch.is_autocast_enabled(device):
        # Operators of PyTorch cast their inputs themselves, ours do not.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return BACKENDS[inputs.backend].function(query, key, value, inputs, scaling, dropout)


def sparse_attention_forward(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, mask_inputs=None, **kwargs
):
    """
    The function behind all our names in the host's attention table.

    `mask_inputs` is what [`SparseAttention`] prepared for this forward; modules that carry no mask (cross-attention)
    run dense. Returns the output `(B, n, H, d)` and the probabilities `(B, H, n, n)` or `None`.

    Raises:
        ValueError: If keys and mask do not fit (a static key/value cache).
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, "sparse_attention", None) is None:
        backend = mask_inputs.backend if mask_inputs and mask_inputs.compiled[0] is None else "sparse_sdpa"
        mask_inputs = MaskInputs.dense(attention_mask, backend)
    elif mask_inputs is None:
        raise RuntimeError(
            f"{type(module).__name__} carries a sparse mask but was called without its base model, which prepares it"
        )
    else:
        if key.shape[2] != mask_inputs.num_keys:
            raise ValueError(
                f"sparse attention expects {mask_inputs.num_keys} keys, got {key.shape[2]}: static key/value caches "
                "are not supported, use a DynamicCache or use_cache=False"
            )
        mask_inputs = mask_inputs.for_layer(module.mask_layer, attention_mask)
    if key.shape[1] != query.shape[1]:
        # Several query heads share a key head.
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    return run_backend(query, key, value, mask_inputs, scaling, dropout)


def sparse_dot_product_attention(
    query,
    key,
    value,
    mask,
    padding=None,
    layer=0,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    backend="sparse_auto",
    probability_map="softmax",
    probability_map_kwargs=None,
):
    """
    `scaled_dot_product_attention` under a [`SparseMask`], for use outside a model.

    Args:
        query (`torch.Tensor` of shape `(B, H, n, d)`): The last n of m positions.
        key, value (`torch.Tensor` of shape `(B, H, m, d)`)
        mask ([`SparseMask`]): For H heads.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        layer (`int`): Which of the mask's layers.
        dropout_p (`float`): Probability of attention dropout, in [0, 1).
        is_causal (`bool`): Cut keys after the query.
        scale (`float`, *optional*): Factor of the scores; `d ** -0.5` by default.
        backend (`str`): One of `BACKENDS`, `"sparse_auto"` or `"sparse_measure"`.
        probability_map (`str`): A name of `PROBABILITY_MAPS`.
        probability_map_kwargs (`dict`, *optional*): Its parameters.

    Returns:
        `torch.Tensor` of shape `(B, H, n, d)`: 0 for queries that are padded or have no key.
    Raises:
        ValueError: If mask and inputs do not fit, or the backend cannot serve them.
    """
    if backend not in ATTENTION_NAMES:
        raise ValueError(f"backend must be one of {', '.join(ATTENTION_NAMES)}, got {backend!r}")
    if query.dim() != 4:
        raise ValueError(f"query must have the shape (B, H, n, d), got {tuple(query.shape)}")
    batch, num_heads, num_queries, head_size = map(operator.index, query.shape)
    num_keys = operator.index(key.shape[2])
    expected = (batch, num_heads, num_keys, head_size)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != expected or tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} of shape {expected} on {query.device} as the query says, got "
                f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
    if not (batch and 0 < num_queries <= num_keys):
        raise ValueError(
            f"query must hold at least one sequence and at most as many positions as the {num_keys} keys, got "
            f"{tuple(query.shape)}"
        )
    if mask.num_heads != num_heads:
        raise ValueError(f"mask must have the query's {num_heads} heads, got {mask.num_heads}")
    if not 0 <= layer < mask.num_layers:
        raise ValueError(f"layer must be in [0, {mask.num_layers - 1}], got {layer}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if padding is not None and (
        padding.shape != (batch, num_keys) or padding.dtype != torch.bool or padding.device != query.device
    ):
        raise ValueError(
            f"padding must be bool of shape {(batch, num_keys)} on {query.device}, got {padding.dtype} "
            f"{tuple(padding.shape)} on {padding.device}"
        )
    if is_causal and mask.special_tokens == "first_last":
        raise ValueError("is_causal needs a mask with special_tokens 'first' or 'none', got 'first_last'")
    check_probability_map(probability_map, probability_map_kwargs or {}, num_keys)
    maps = ProbabilityMap(probability_map, probability_map_kwargs, 1, num_heads)
    if maps.alpha_logits is not None:
        raise ValueError("alpha of entmax must be a number here: there is no model that could learn it")
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    shape = (batch, num_heads, num_queries, num_keys, head_size)
    request = (query.device.type, query.dtype, *shape, dropout_p, gradients, padding is not None, is_causal)
    name = choose_backend(backend, mask, *request, frozenset(), probability_map)
    inputs = MaskInputs(
        name, num_queries, num_keys, query.device, mask, padding, is_causal, probability_map=maps(num_keys)
    )
    inputs = replace(inputs, **BACKENDS[name].prepare(mask, inputs)).for_layer(layer)
    scale = head_size**-0.5 if scale is None else scale
    return run_backend(query, key, value, inputs, scale, dropout_p)[0].transpose(1, 2)


def sparse_attention_mask(
    batch_size, q_length, kv_length, mask_function=bidirectional_mask_function, attention_mask=None, **kwargs
):
    """
    The function behind our names in the host's mask table: plain masks stay a 2-D padding mask `(B, n)` or `None`,
    since [`SparseAttention`] applies padding and causality; anything else becomes a boolean `(B, 1, n, n)`.
    """
    if mask_function in (bidirectional_mask_function, causal_mask_function):
        return attention_mask
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


# Both tables: a name in the first alone makes the host drop padding without a word.
for _name in ATTENTION_NAMES:
    AttentionInterface.register(_name, sparse_attention_forward)
    AttentionMaskInterface.register(_name, sparse_attention_mask)
