"""
Sliding windows of a model: layers in which a token attends to its neighbourhood only, whatever the mask says.

Letters: L layers (1 when shared), H heads, n queries, m keys.
"""

from dataclasses import replace

from ..masks.compiled import windowed
from .backends import BACKENDS, choose_backend
from .mask_inputs import REMOVED, MaskInputs, near_entries


def local_inputs(inputs, window, name, request, needs):
    """
    What the layers with a window see of a mask.

    Args:
        inputs ([`MaskInputs`]): Those of the other layers.
        window (`int`): Farthest offset.
        name (`str`): The model's attention implementation.
        request (`tuple`): Fields of [`Request`] up to `causal`.
        needs (`set`): Its last one.

    Returns:
        [`MaskInputs`]
    Raises:
        ValueError: If the backend cannot serve this.
    """
    mask = inputs.sparse_mask
    if mask is None:
        far = ~near_entries(inputs, window)
        return replace(inputs, bias=tuple(bias.masked_fill(far, REMOVED) for bias in inputs.bias))
    cut = None
    if mask.special_tokens == "first_last" and mask.last_token == "real" and inputs.padding is not None:
        # The last token differs by sequence, and kernels let it attend and be attended from everywhere.
        needs, cut = needs | {"window"}, window
    else:
        mask = windowed(mask, window, inputs.num_keys)
    backend = choose_backend(name, mask, *request, frozenset(needs))
    local = MaskInputs(
        backend, inputs.num_queries, inputs.num_keys, inputs.device, mask, inputs.padding, inputs.causal, cut
    )
    return replace(local, **BACKENDS[backend].prepare(mask, local))
