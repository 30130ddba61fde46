"""Our names in the tables of attention and mask functions of transformers."""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .backends import ATTENTION_NAMES, run_backend
from .mask_inputs import MaskInputs


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
