"""What a forward asks of a backend, and what a backend can do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..masks.sparse_mask import SparseMask
from .mask_inputs import MaskInputs


# What a request may need beyond a frozen mask with padding, in the words of an error message.
WANTED = {
    "gate": "mask_form 'multiplicative'",
    "weights": "output_attentions=True",
    "additive": "a mask that is not frozen, or a 4-D attention_mask",
    "learned": "a mask that is being learned",
    "rest": "a mask with rest 'mean'",
    "distance_bias": "a bias per distance of query and key",
    "export": "torch.export, torch.onnx.export or torch.jit.trace",
    "window": "sliding windows around special tokens that differ by sequence (use special_tokens 'none')",
}


NO_FUNC_GRADIENTS = "it has no gradients under torch.func, such as torch.func.grad"


def in_func_grad() -> bool:
    """Whether `torch.func` computes gradients, which PyTorch does not support for operators of other libraries."""
    functorch: Any = torch._C._functorch
    return torch._C._are_functorch_transforms_active() and any(
        transform.key() == functorch.TransformType.Grad for transform in functorch.get_interpreter_stack()
    )


@dataclass(frozen=True)
class Request:
    """
    The properties of one forward that decide which backends can serve it.

    Args:
        device (`str`): Type of the device, such as `"cpu"` or `"cuda"`.
        dtype (`torch.dtype`): Dtype of query, key and value.
        batch (`int`): Number of sequences.
        num_heads (`int`): Number of heads.
        num_queries (`int`): Number of queries per sequence.
        num_keys (`int`): Number of keys per sequence.
        head_size (`int`): Size of a head.
        dropout (`bool`): Whether there is attention dropout.
        gradients (`bool`): Whether a backward pass may follow.
        padded (`bool`): Whether there is padding.
        causal (`bool`): Whether future keys are removed.
        needs (`frozenset` of `str`): Keys of `WANTED`.
        probability_map (`str`): A key of `PROBABILITY_MAPS`.
        index (`int`, *optional*): Index of the device among those of its type; `None` for the current one.
    """

    device: str
    dtype: torch.dtype
    batch: int
    num_heads: int
    num_queries: int
    num_keys: int
    head_size: int
    dropout: bool = False
    gradients: bool = False
    padded: bool = False
    causal: bool = False
    needs: frozenset[str] = frozenset()
    probability_map: str = "softmax"
    index: int | None = None

    def on_device(self) -> torch.device:
        """Device of query, key and value."""
        return torch.device(self.device if self.index is None else f"{self.device}:{self.index}")


@dataclass(frozen=True)
class Backend:
    """
    One way to run attention under a mask.

    Args:
        function (`Callable`): `(query, key, value, inputs, scaling, dropout) -> (output, probabilities or None)`. The
            query has shape `(B, H, n, d)`, the output `(B, n, H, d)`, the probabilities `(B, H, n, m)`; `inputs` are
            the [`MaskInputs`] of one layer, and `dropout` is 0 in evaluation. The output is contiguous. The first
            sentence of the docstring describes the backend in the table of the documentation.
        prepare (`Callable`): `(mask, inputs) -> dict`, called once per forward for all layers. Returns the fields of
            [`MaskInputs`] that `function` reads of a frozen mask.
        refuse (`Callable`, *optional*): `(request) -> str or None`, the reason why it cannot serve a [`Request`].
        supports (`frozenset`, *optional*): What it can do beyond a frozen mask with padding, as keys of `WANTED`:
            `"additive"` (the thresholded mask of a search, or a 4-D mask of the caller), `"learned"` (a mask that is
            being learned), `"export"` (consists of PyTorch's operators, so that a graph of it can be exported),
            `"gate"` (a multiplicative mask), `"weights"` (returns the probabilities), `"window"` (a sliding window
            that differs by sequence), `"rest"` (a mask with a rest, which a backend that reads `inputs.compiled`
            applies itself; for others it is appended to key, value and bias), `"distance_bias"` (a bias per distance,
            which such a backend reads in `inputs.distance_bias`; for others it is added to the bias).
        probability_maps (`tuple` of `str`, *optional*): The keys of `PROBABILITY_MAPS` that it can apply.
        raw (`bool`, *optional*, defaults to `False`): Whether `function` takes query, key and value as they are:
            padded tokens with whatever they hold, which must not affect others, and the documents of
            `inputs.documents` as they lie, in tensors `(1, H, tokens, d)`. For other backends padded tokens become 0,
            documents become a padded batch, the output of a query without a key becomes 0 afterwards, and
            `inputs.rest` is a [`Rest`] instead of its bias.
    """

    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    prepare: Callable[[SparseMask, MaskInputs], dict[str, Any]]
    refuse: Callable[[Request], str | None] = lambda request: None
    supports: frozenset[str] = frozenset()
    probability_maps: tuple[str, ...] = ("softmax",)
    raw: bool = False
