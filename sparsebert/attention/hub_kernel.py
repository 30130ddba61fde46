"""
What the kernel hub of Transformers loads: attention under a frozen mask, for stock models and without this package.

`python -m benchmarks.write_hub_kernel` writes the kernel, whose public names are those of this module. A model takes
it as `attn_implementation="organization/sparsebert-attention@v0"`.

Letters: B batch, H heads, n tokens, d head size.
"""

import weakref
from typing import Any

import torch
from torch import nn

from ..masks.mask_files import MaskFileError
from ..masks.sparse_mask import SparseMask
from .dot_product import sparse_dot_product_attention
from .mask_inputs import check_arguments


supports_flash_attn = True  # Transformers takes `flash_attn_forward` of modules that have both names
# The masks that were read, by the `id` of their model's configuration, as long as that exists: an `id` is used again.
_READ: dict[int, SparseMask] = {}


def set_mask(model: nn.Module, mask: SparseMask) -> None:
    """
    Give every attention layer of a stock model a mask, instead of the one beside its weights.

    Args:
        model (`torch.nn.Module`): A model of transformers.
        mask ([`SparseMask`]): A mask for its heads.
    """
    layers: Any = model.modules()
    for module in layers:
        if isinstance(getattr(module, "layer_idx", None), int):
            module.sparse_mask = mask


def _saved_mask(config):
    if (key := id(config)) not in _READ:
        name, revision = config._name_or_path, getattr(config, "_commit_hash", None)
        try:
            _READ[key] = SparseMask.from_pretrained(name, **({"revision": revision} if revision else {}))
        except (MaskFileError, OSError) as error:
            raise ValueError(
                f"there is no mask beside the weights of {name!r}, call set_mask(model, mask) of this kernel: {error}"
            ) from error
        weakref.finalize(config, _READ.pop, key)
    return _READ[key]


def _padding(attention_mask, causal):
    """
    The padding `(B, n)` that a mask of Transformers says; refused if it says something else, which is not checked in a
    compiled graph.
    """
    if attention_mask is None or attention_mask.dim() == 2:
        return None if attention_mask is None else attention_mask.bool()
    if attention_mask.is_floating_point():
        raise ValueError(f"attention_mask of four dimensions must be bool, got {attention_mask.dtype}")
    keep = attention_mask.bool()
    padding = keep[:, 0, -1]  # the last row of a causal model is whole
    if torch.compiler.is_compiling() or getattr(attention_mask, "_is_padding", None) is causal:
        return padding
    rows = padding[:, None, None, :].expand_as(keep)
    if not torch.equal(keep, rows.tril() if causal and keep.shape[2] > 1 else rows):
        raise ValueError(
            "attention_mask removes more than padding, as local attention, packed sequences or a mask of your own do, "
            "which this kernel cannot: use sparsebert.attach"
        )
    attention_mask._is_padding = causal  # all layers get the same mask
    return padding


def flash_attn_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention under the mask that lies beside the weights of the module's model, or that [`set_mask`] gave it.

    Args:
        module (`torch.nn.Module`): The self-attention module of a layer.
        query (`torch.Tensor` of shape `(B, H, n, d)`): Queries of all tokens.
        key (`torch.Tensor` of shape `(B, H, n, d)`): Keys.
        value (`torch.Tensor` of shape `(B, H, n, d)`): Values.
        attention_mask (`torch.Tensor`, *optional*): Padding, bool of shape `(B, 1, n, n)`, or `(B, n)`; true = real
            token.
        scaling (`float`, *optional*): Factor of the scores. Defaults to `d ** -0.5`.
        dropout (`float`, *optional*, defaults to 0.0): Probability of attention dropout.

    Returns:
        `tuple`: The output `(B, n, H, d)`, and `None` for the probabilities.
    Raises:
        ValueError: If there is no mask, it does not fit, this is not the self-attention of whole inputs, or
            `attention_mask` or another argument asks for more than padding.
    """
    check_arguments(module, kwargs, "sliding_window")
    if key.shape != query.shape:
        raise ValueError(
            "this kernel runs the self-attention of whole inputs, without key/value cache and with as many heads of "
            f"keys as of queries, got queries {tuple(query.shape)} and keys {tuple(key.shape)}"
        )
    mask: Any = getattr(module, "sparse_mask", None)
    if mask is None:
        module.sparse_mask = mask = _saved_mask(module.config)
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    layer: Any = module.layer_idx if max(mask.num_layers, len(mask.rest_biases())) > 1 else 0
    output = sparse_dot_product_attention(
        query,
        key,
        value,
        mask,
        _padding(attention_mask, causal),
        layer=layer,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
    )
    return output.transpose(1, 2), None
