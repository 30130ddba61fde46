"""
Attention under a sparse mask as a function of query, key and value, for use outside a model.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

import operator
from dataclasses import replace
from typing import Any

import torch

from ..masks.exported import exporting
from ..masks.sparse_mask import SparseMask
from .backends import ATTENTION_NAMES, BACKENDS, choose_backend, run_backend
from .mask_inputs import MaskInputs, autocast_dtype
from .probability_maps import ProbabilityMap, check_probability_map


def sparse_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SparseMask,
    padding: torch.Tensor | None = None,
    layer: int = 0,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str = "sparse_auto",
    probability_map: str = "softmax",
    probability_map_kwargs: dict[str, Any] | None = None,
) -> torch.Tensor:
    """
    Attention under a [`SparseMask`]: the counterpart of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query (`torch.Tensor` of shape `(B, H, n, d)`): Queries of the last n of the m positions.
        key (`torch.Tensor` of shape `(B, H, m, d)`): Keys of all m positions.
        value (`torch.Tensor` of shape `(B, H, m, d)`): Values of all m positions.
        mask ([`SparseMask`]): A mask for H heads.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        layer (`int`, *optional*, defaults to 0): The layer of the mask to apply.
        dropout_p (`float`, *optional*, defaults to 0.0): Probability of attention dropout, in [0, 1).
        is_causal (`bool`, *optional*, defaults to `False`): Whether to remove keys after the query.
        scale (`float`, *optional*): Factor of the scores. Defaults to `d ** -0.5`.
        backend (`str`, *optional*, defaults to `"sparse_auto"`): A key of `BACKENDS`, `"sparse_auto"` or
            `"sparse_measure"`.
        probability_map (`str`, *optional*, defaults to `"softmax"`): A key of `PROBABILITY_MAPS`.
        probability_map_kwargs (`dict`, *optional*): Parameters of the probability map.

    Returns:
        `torch.Tensor` of shape `(B, H, n, d)`: 0 for queries that are padded or have no key.
    Raises:
        ValueError: If mask and inputs do not fit, or if the backend cannot run them.
    """
    if backend not in ATTENTION_NAMES:
        raise ValueError(f"backend must be one of {', '.join(ATTENTION_NAMES)}, got {backend!r}")
    if not isinstance(mask, SparseMask):
        raise ValueError(f"mask must be a SparseMask, got {type(mask).__name__}")
    if query.dim() != 4:
        raise ValueError(f"query must have the shape (B, H, n, d), got {tuple(query.shape)}")
    exported = exporting()
    shape = (*query.shape, key.shape[2])
    batch, num_heads, num_queries, head_size, num_keys = shape if exported else map(operator.index, shape)
    expected = (batch, num_heads, num_keys, head_size)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != expected or tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} of shape {expected} on {query.device} to fit the query, got "
                f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
    if not (batch and 0 < num_queries <= num_keys):
        raise ValueError(
            f"query must have at least 1 sequence and from 1 to {num_keys} positions, the number of keys, got "
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
        raise ValueError("alpha of entmax must be a number outside a model, got 'learned'")
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    sizes = (0, mask.num_heads, 0, 0) if exported else (batch, num_heads, num_queries, num_keys)  # symbols say nothing
    dtype = autocast_dtype(query.device.type, query.dtype)
    request = (query.device.type, dtype, *sizes, head_size, dropout_p, gradients, padding is not None, is_causal)
    needs = frozenset({"export"} if exported else ())
    name = choose_backend(backend, mask, *request, needs, probability_map, query.device.index)
    inputs = MaskInputs(
        name, num_queries, num_keys, query.device, mask, padding, is_causal, probability_map=maps(num_keys)
    )
    inputs = replace(inputs, **BACKENDS[name].prepare(mask, inputs)).for_layer(layer)
    scale = head_size**-0.5 if scale is None else scale
    return run_backend(query, key, value, inputs, scale, dropout_p)[0].transpose(1, 2)
