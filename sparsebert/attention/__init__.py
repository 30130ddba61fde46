"""
Attention backends, entered through the host's attention and mask tables.

A backend is a function and a row of `BACKENDS`. Explicit names never fall back; only `sparse_auto` chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils import logging

from .eager import eager_attention
from .mask_inputs import MaskInputs
from .sdpa import sdpa_attention


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Backend:
    """
    One way to run attention under a mask.

    Args:
        function (`Callable`): `(module, query, key, value, inputs, scaling, dropout) -> (output, weights or None)`;
            query of shape `(B, H, n, d)`, output of shape `(B, n, H, d)`, `inputs` a [`MaskInputs`].
        supports (`frozenset`): What it can do beyond a frozen or additive mask with padding and dropout: `"gate"`
            (multiplicative masks), `"weights"` (returns the attention probabilities).
        needs_bias (`bool`): Whether it reads `inputs.bias`, an additive mask of shape `(B or 1, H, n, n)`.
    """

    function: Callable
    supports: frozenset = frozenset()
    needs_bias: bool = True


BACKENDS = {
    "sparse_eager": Backend(eager_attention, frozenset({"gate", "weights"})),
    "sparse_sdpa": Backend(sdpa_attention),
}
ATTENTION_NAMES = (*BACKENDS, "sparse_auto")


def choose_backend(name, required, learning, dropout, length, device_type):
    """
    The backend that serves a request.

    Args:
        name (`str`): What the user set as attention implementation.
        required (`set`): Entries of [`Backend`]`.supports` that this forward needs.
        learning (`bool`): Whether the mask needs a gradient.
        dropout (`bool`): Whether attention dropout is active.
        length (`int`): Number of keys.
        device_type (`str`): `"cpu"`, `"cuda"`, ...

    Raises:
        ValueError: If `name` is not one of ours, or cannot do what is required.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(
            f"this model carries a sparse mask, which the attention implementation {name!r} would ignore: use one of "
            f"{', '.join(ATTENTION_NAMES)}, for example model.set_attn_implementation('sparse_auto')"
        )
    if name != "sparse_auto":
        if lacking := required - BACKENDS[name].supports:
            wanted = {"gate": "mask_form 'multiplicative'", "weights": "output_attentions=True"}
            raise ValueError(f"{name} does not support {wanted[min(lacking)]}: use sparse_eager")
        return name
    if required:
        choice, reason = "sparse_eager", "attention probabilities or a multiplicative mask are asked for"
    elif learning:
        choice, reason = "sparse_eager", "the mask is being learned, which fused attention runs on its slow path"
    elif device_type == "cpu" and dropout and length <= 128:
        choice, reason = "sparse_eager", "attention dropout on CPU at up to 128 tokens"
    else:
        choice, reason = "sparse_sdpa", "the fused attention of PyTorch with an additive mask"
    if not torch.compiler.is_compiling():
        logger.warning_once(f"sparse_auto runs {choice}: {reason}.")
    return choice


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
        mask_inputs = MaskInputs.dense(attention_mask, mask_inputs.backend if mask_inputs else "sparse_sdpa")
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
        mask_inputs = mask_inputs.for_layer(module.layer_idx, attention_mask)
    function = BACKENDS[mask_inputs.backend].function
    return function(module, query, key, value, mask_inputs, scaling, dropout)


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
