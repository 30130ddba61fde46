"""
Attention under a sparse mask as a function of query, key and value, for use outside a model.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

import math
import operator
from dataclasses import replace
from typing import Any

import torch

from ..checks import check_range
from ..masks.exported import exporting
from ..masks.sparse_mask import SparseMask
from .backends import prepared, run_backend
from .choosing.choice import ATTENTION_NAMES, choose_backend
from .distance_bias import check_distance_bias, with_distance_forms
from .mask_inputs import MaskInputs, autocast_dtype
from .probability_maps import ProbabilityMap, check_probability_map
from .rest import check_rest, rest_fields


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _described(value):
    """What a tensor is, or the type of what is none."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def sparse_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SparseMask,
    padding: torch.Tensor | None = None,
    layer: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str = "sparse_auto",
    probability_map: str = "softmax",
    probability_map_kwargs: dict[str, Any] | None = None,
    distance_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention under a [`SparseMask`]: the counterpart of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query (`torch.Tensor` of shape `(B, H, n, d)`): Queries of the last n of the m positions.
        key (`torch.Tensor` of shape `(B, H, m, d)`): Keys of all m positions.
        value (`torch.Tensor` of shape `(B, H, m, d)`): Values of all m positions.
        mask ([`SparseMask`]): A mask for H heads.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        layer (`int`, *optional*): The layer of the mask to apply; needed if its layers have masks of their own.
        dropout_p (`float`, *optional*, defaults to 0.0): Probability of attention dropout, in [0, 1).
        is_causal (`bool`, *optional*, defaults to `False`): Whether to remove keys after the query.
        scale (`float`, *optional*): Factor of the scores. Defaults to `d ** -0.5`.
        backend (`str`, *optional*, defaults to `"sparse_auto"`): A key of `BACKENDS`, `"sparse_auto"` or
            `"sparse_measure"`.
        probability_map (`str`, *optional*, defaults to `"softmax"`): A key of `PROBABILITY_MAPS`.
        probability_map_kwargs (`dict`, *optional*): Parameters of the probability map.
        distance_bias (`torch.Tensor` of shape `(H, 2m - 1)`, *optional*): Finite numbers to add to the scores, that of
            query i and key j in column i - j + m - 1; it gets a gradient. Not to the rest of a mask.

    Returns:
        `torch.Tensor` of shape `(B, H, n, d)`: 0 for queries that are padded, or have no key and no rest.
    Raises:
        ValueError: If mask and inputs do not fit, or if the backend cannot run them.
    """
    if backend not in ATTENTION_NAMES:
        raise ValueError(f"backend must be one of {', '.join(ATTENTION_NAMES)}, got {backend!r}")
    if not isinstance(mask, SparseMask):
        # A table is not taken: what is compiled of a mask is kept with it, and would be made at every call.
        raise ValueError(
            f"mask must be a SparseMask, got {type(mask).__name__}: make one of a bool tensor (H, n, n) with "
            "sparsebert.SparseMask(tensor, n), once for all calls"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        is_tensor = isinstance(tensor, torch.Tensor)
        if not is_tensor or tensor.dtype not in DTYPES or tensor.dim() != 4 or not tensor.shape[3]:
            raise ValueError(
                f"{name} must be a tensor of shape (B, H, n, d) with d > 0, one of {', '.join(map(str, DTYPES))}, got "
                f"{_described(tensor)}"
            )
    exported = exporting()
    shape = (*query.shape, key.shape[2])
    batch, num_heads, num_queries, head_size, num_keys = shape if exported else map(operator.index, shape)
    expected = (batch, num_heads, num_keys, head_size)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != expected or tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} of shape {expected} on {query.device} to fit the query, got "
                f"{_described(tensor)}"
            )
    if not (batch and 0 < num_queries <= num_keys):
        raise ValueError(
            f"query must have at least 1 sequence and from 1 to {num_keys} positions, the number of keys, got "
            f"{tuple(query.shape)}"
        )
    if mask.num_heads != num_heads:
        raise ValueError(f"mask must have the query's {num_heads} heads, got {mask.num_heads}")
    num_layers = max(mask.num_layers, len(mask.rest_biases()))
    if layer is None and num_layers > 1:
        raise ValueError(f"layer must say which of the mask's {num_layers} layers to apply, got None")
    layer = 0 if layer is None else layer
    check_range("layer", layer, 0, num_layers - 1 if num_layers > 1 else None)
    if not (isinstance(dropout_p, (int, float)) and 0 <= dropout_p < 1):
        raise ValueError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}")
    if scale is not None and not (isinstance(scale, (int, float)) and abs(scale) < math.inf):
        raise ValueError(f"scale must be a finite number, got {scale!r}: multiply the query by one that is learned")
    if scale == 0 and mask.rest != "none":
        raise ValueError("scale must not be 0 under a mask with a rest, whose score is a logarithm of scores")
    if padding is not None and not (
        isinstance(padding, torch.Tensor)
        and padding.shape == (batch, num_keys)
        and padding.dtype == torch.bool
        and padding.device == query.device
    ):
        raise ValueError(
            f"padding must be bool of shape {(batch, num_keys)} on {query.device}, got {_described(padding)}"
        )
    if is_causal and mask.special_tokens == "first_last":
        raise ValueError("is_causal needs a mask with special_tokens 'first' or 'none', got 'first_last'")
    check_rest(mask, is_causal, probability_map)
    check_probability_map(probability_map, probability_map_kwargs or {}, num_keys)
    maps = ProbabilityMap(probability_map, probability_map_kwargs, 1, num_heads)
    if maps.alpha_logits is not None:
        raise ValueError("alpha of entmax must be a number outside a model, got 'learned'")
    differentiable = [query, key, value]
    if distance_bias is not None:
        check_distance_bias(distance_bias, num_heads, num_keys, query.device)
        differentiable.append(distance_bias)
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable)
    drops = True if dropout_p > 0 else False  # a branch, since a compiled graph takes `bool` for a variable
    sizes = (0, mask.num_heads, 0, 0) if exported else (batch, num_heads, num_queries, num_keys)  # symbols say nothing
    dtype = autocast_dtype(query.device.type, query.dtype)
    request = (query.device.type, dtype, *sizes, head_size, drops, gradients, padding is not None, is_causal)
    asked = {"export": exported, "rest": mask.rest != "none", "distance_bias": distance_bias is not None}
    needs = frozenset(need for need, wanted in asked.items() if wanted)
    name = choose_backend(backend, mask, *request, needs, probability_map, query.device.index)
    where = (num_queries, num_keys, query.device)
    inputs = MaskInputs(name, *where, mask, padding, is_causal, probability_map=maps(num_keys), dtype=dtype)
    inputs = replace(inputs, distance_bias=(distance_bias,), **rest_fields(mask, inputs))
    inputs = with_distance_forms(prepared(inputs)).for_layer(layer)
    scale = head_size**-0.5 if scale is None else scale
    return run_backend(query, key, value, inputs, scale, dropout_p)[0].transpose(1, 2)
