"""
What the attention layers read of the mask: prepared once per forward, before the first layer, for the chosen backend.

Letters: B batch, L layers (1 when shared), H heads, n queries (the last n of the m positions), m keys.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch

from ..masks.sparse_mask import SparseMask
from .biases.bias_entries import (
    REMOVED,
    REMOVED_BELOW,
    additive_4d,
    first_real,
    last_real,
    token_entries,
    with_sequences,
)
from .biases.offset_biases import OffsetBias
from .packed_batches import DocumentSpans


# What some models of transformers ask of their attention function in addition.
_NOT_SUPPORTED = ("softcap", "position_bias", "s_aux")


@dataclass(frozen=True)
class MaskInputs:
    """
    Everything that a backend needs to know about the mask, prepared once per forward.

    Tuples hold one element per layer, or a single one for all layers.

    Args:
        backend (`str`): A key of `BACKENDS`.
        num_queries (`int`): n.
        num_keys (`int`): m.
        device (`torch.device`): Device of the activations.
        dtype (`torch.dtype`): Dtype in which attention computes.
        sparse_mask ([`SparseMask`], *optional*): The frozen mask; `None` while searching.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        causal (`bool`): Whether keys j > query i are removed.
        window (`int`, *optional*): Keys farther than this from the query are removed.
        bias (`tuple` of `torch.Tensor`): Added to the scores, `(B or 1, H or 1, n, m)`, padding and causality
            included. With `by_sequence` the bool masks `(1, H, n, m)` that [`~MaskInputs.for_layer`] makes it of.
        by_sequence (`tuple` of `torch.Tensor`, *optional*): Which entries of a bias depend on the sequence, bool `(B,
            1, n, m)`, and their values, in the dtype of the bias.
        live (`tuple` of `torch.Tensor`): Bool `(B or 1, H or 1, n, 1)`, False where a query has no key, so that its
            output must be 0. `None` when every query has one.
        gate (`tuple` of `torch.Tensor`): Factor of the probabilities, for multiplicative masks.
        compiled (`tuple`): The mask in the form that the backend's kernel reads, instead of `bias` and `live`.
        local ([`MaskInputs`], *optional*): The inputs of the layers in `local_layers`, whose attention has a sliding
            window.
        local_layers (`tuple` of `int`): Indices of these layers.
        learned (`tuple` of `torch.Tensor` or [`OffsetBias`]): A bias `(H, n, m)` that is being learned, the same for
            all sequences, instead of `bias`. Causality is included (not in an [`OffsetBias`]); padding and the special
            tokens of each sequence are not.
        first_token (`torch.Tensor` of shape `(B,)`, *optional*): Position of each sequence's first token, whose row
            and column are on in addition to the `compiled` mask, and in whose row and column the `learned` bias does
            not count. In a `compiled` mask it has shape `(1,)` if it is the same for all sequences.
        last_token (`torch.Tensor` of shape `(B,)`, *optional*): The same for the last token.
        learned_diagonal (`bool`): Whether these rows and columns contain their diagonal entries.
        special_rows (`bool`): Whether the `learned` bias does not count in the rows of these tokens either, or in
            their columns alone.
        probability_map (`tuple` of `Callable`): Functions of the scores, see [`ProbabilityMap`]; `None` for softmax.
        dropout_layers (`int`): Number of layers that have dropout and run once each in this forward. 0 if there is no
            dropout or a layer may run several times.
        rest (`tuple`): What is added to the scores of the rest of a [`SparseMask`], float32 `(H,)`; `None` for layers
            without one. Backends find the pooled [`Rest`] here, or a tensor of the same if they are `raw`.
        rest_keys (`torch.Tensor` of shape `(B or 1, m)`, *optional*): Bool, the keys that it stands for; `None` for
            all.
        distance_bias (`tuple` of `torch.Tensor`): What is added to the scores besides the mask, `(H, 2m - 1)`, in
            column i - j + m - 1 for query i and key j. For a backend that reads `bias` or `learned` a table `(H, n,
            m)`.
        seeds (`tuple` of `torch.Tensor`): The seed of each layer's dropout; `None` where every call draws one.
        documents ([`DocumentSpans`], *optional*): Where the sequences are in a batch that is packed otherwise. All
            other fields are about the documents as a padded batch: B is their number, n = m the length of the longest.

    Attributes:
        reached (`set` of `int`): The `id` of every attention module that ran with these inputs outside of a graph.
        moved (`dict`): These inputs by the other devices that layers of the model are on.
    """

    backend: str
    num_queries: int = 0
    num_keys: int = 0
    device: torch.device = torch.device("cpu")
    sparse_mask: SparseMask | None = None
    padding: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None
    bias: tuple[torch.Tensor | None, ...] = (None,)
    by_sequence: tuple[torch.Tensor, torch.Tensor] | None = None
    live: tuple[torch.Tensor | None, ...] = (None,)
    gate: tuple[torch.Tensor | None, ...] = (None,)
    compiled: tuple[Any, ...] = (None,)
    local: "MaskInputs | None" = None
    local_layers: tuple[int, ...] = ()
    learned: tuple[torch.Tensor | OffsetBias | None, ...] = (None,)
    first_token: torch.Tensor | None = None
    last_token: torch.Tensor | None = None
    learned_diagonal: bool = True
    special_rows: bool = True
    probability_map: tuple[Callable[[torch.Tensor], torch.Tensor] | None, ...] = (None,)
    rest: tuple[Any, ...] = (None,)
    rest_keys: torch.Tensor | None = None
    distance_bias: tuple[torch.Tensor | None, ...] = (None,)
    dropout_layers: int = 0
    seeds: tuple[torch.Tensor | None, ...] = (None,)
    documents: DocumentSpans | None = None
    dtype: torch.dtype = torch.float32
    reached: set[int] = field(init=False, default_factory=set)
    moved: dict[torch.device, "MaskInputs"] = field(init=False, default_factory=dict)

    @classmethod
    def dense(
        cls, attention_mask: torch.Tensor | None, backend: str, position_bias: torch.Tensor | None = None
    ) -> "MaskInputs":
        """
        The inputs of dense attention, under the host's own mask only: `(B, m)` or `(B, 1, n, m)`, bool or added to the
        scores, as is a `position_bias`.
        """
        bias = position_bias
        if attention_mask is not None:
            bias = additive_4d(attention_mask)
            bias = bias if position_bias is None else bias + position_bias
        return cls(backend, bias=(bias,))

    def for_layer(self, layer: int, attention_mask: torch.Tensor | None = None) -> "MaskInputs":
        """
        The inputs of one layer, in which every tuple has one element. A 4-D `attention_mask` of the layer, from the
        caller or for a pattern of the host's own, is applied in addition; a 2-D one is padding, which `self` already
        includes.
        """
        if self.local is not None and layer in self.local_layers:
            return replace(self.local, documents=self.documents).for_layer(layer, attention_mask)

        def own(values):
            return values if len(values) == 1 else (values[layer],)

        bias, live, compiled, learned = own(self.bias), own(self.live), own(self.compiled), own(self.learned)
        rest = own(self.rest)
        if self.by_sequence is not None:
            assert bias[0] is not None
            bias, live = ((each,) for each in with_sequences(bias[0], *self.by_sequence))
        if attention_mask is not None and attention_mask.dim() == 4:
            if rest[0] is not None:
                raise ValueError(
                    "a mask with rest 'mean' does not support a 4-D attention_mask, got one of shape "
                    f"{tuple(attention_mask.shape)}"
                )
            if compiled[0] is not None:
                raise ValueError(
                    f"{self.backend} does not support a 4-D attention_mask, got one of shape "
                    f"{tuple(attention_mask.shape)}: use sparse_eager or sparse_sdpa"
                )
            if learned[0] is not None:
                whole = learned[0]
                if isinstance(whole, OffsetBias):
                    whole = whole.table(self.num_keys, self.causal)
                bias, learned = (self.merged(whole),), (None,)
            # Clamped so that the sum of two removals stays finite in any dtype.
            bias = ((additive_4d(attention_mask) + (0.0 if bias[0] is None else bias[0])).clamp(min=REMOVED),)
            live = ((bias[0] > REMOVED_BELOW).any(-1, keepdim=True),)
        return replace(
            self,
            bias=bias,
            by_sequence=None,
            live=live,
            gate=own(self.gate),
            compiled=compiled,
            learned=learned,
            probability_map=own(self.probability_map),
            rest=rest,
            distance_bias=own(self.distance_bias),
            seeds=own(self.seeds),
        )

    # Not `to`, which accelerate would call for every layer.
    def on_device(self, device: torch.device) -> "MaskInputs":
        """
        The same on another device, but for what a backend reads of the frozen mask, which is to be prepared there, and
        for `local`.
        """
        names = ["padding", "documents", "probability_map", "rest", "rest_keys", "distance_bias"]
        if self.sparse_mask is None:
            names += ["bias", "live", "gate", "learned", "first_token", "last_token"]
        return replace(self, device=device, **{name: _moved(getattr(self, name), device) for name in names})

    def first(self) -> torch.Tensor | None:
        """
        Position of each sequence's first token, int32 `(B,)`, or `(1,)` when it is the same for all sequences. `None`
        if the frozen mask does not have it as a special token.
        """
        mask = self.sparse_mask
        if mask is None or mask.special_tokens == "none":
            return None
        if self.padding is None:
            return torch.zeros(1, dtype=torch.int32, device=self.device)
        return first_real(self.padding).int()

    def last(self) -> torch.Tensor | None:
        """The same for the last token."""
        mask = self.sparse_mask
        if mask is None or mask.special_tokens != "first_last":
            return None
        if self.padding is None or mask.last_token == "position":
            return torch.full((1,), self.num_keys - 1, dtype=torch.int32, device=self.device)
        return last_real(self.padding).int()

    def merged(self, learned: torch.Tensor) -> torch.Tensor:
        """
        A learned bias `(H, n, m)` with padding and special tokens, which differ by sequence: `(B, H, n, m)`, or
        `(1, H, n, m)` without padding.
        """
        if self.padding is None:
            return learned[None]
        fixed = ~self.padding[:, None]  # (B, 1, m)
        values = torch.zeros(fixed.shape, dtype=learned.dtype, device=learned.device).masked_fill_(fixed, REMOVED)
        tokens = [token for token in (self.first_token, self.last_token) if token is not None]
        if tokens:
            queries = slice(self.num_keys - self.num_queries, self.num_keys)
            fixed = fixed | token_entries(
                tokens, queries, self.num_keys, self.learned_diagonal, self.causal, self.special_rows
            )
        # A single pass over all heads, forward and backward.
        return torch.where(fixed[:, None], values[:, None], learned)

    def compiled_length(self, mask: SparseMask) -> int:
        """
        The length to compile a mask for, at least m. The rows of a decoder do not depend on later positions, so the
        lengths that generation passes through share a few tables.
        """
        length = self.num_keys
        if not self.causal or (length > mask.length and mask.length_policy == "error"):
            return length
        grown = 1 << (length - 1).bit_length()
        return min(grown, mask.length) if length <= mask.length else grown


@dataclass(frozen=True)
class MaskInPlace:
    """
    What a base model is given in the place of its attention mask, where that is all that reaches the attention, or
    where the model would make masks for sliding windows of it.

    Args:
        mask_inputs ([`MaskInputs`]): The inputs of the mask.
        attention_mask (`torch.Tensor`, *optional*): A mask of the caller to apply in addition, if it is 4-D.
    """

    mask_inputs: MaskInputs
    attention_mask: torch.Tensor | None

    # What transformers asks of a mask before it gives it to our function of masks, which returns it.
    ndim = 1

    @property
    def shape(self) -> tuple[int]:
        """The number of keys."""
        return (self.mask_inputs.num_keys,)


def _moved(value, device):
    """A field of [`MaskInputs`] on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    if isinstance(value, functools.partial):
        return functools.partial(value.func, **_moved_values(value.keywords, device))
    if is_dataclass(value):
        return replace(value, **_moved_values(vars(value), device))
    return value


def _moved_values(values, device):
    return {name: _moved(value, device) for name, value in values.items()}


def check_arguments(module: Any, given: Mapping[str, Any], *more: str) -> None:
    """Refuse what an attention function is given that ours do not have, or this one (`more`)."""
    for name in (*_NOT_SUPPORTED, *more):
        if given.get(name) is not None:
            raise ValueError(f"{type(module).__name__} needs an attention with {name}, which ours does not have")


def per_sequence(positions: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """`(B, ...)` or `(1, ...)` for every sequence of a batch of this size: `(B, ...)`, contiguous."""
    return None if positions is None else positions.expand(batch, *positions.shape[1:]).contiguous()


def autocast_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """
    The dtype in which attention computes: that of autocast on a type of device, or `dtype` if autocast is off. Like
    PyTorch's autocast, it leaves float64 alone. The meta device has none.
    """
    on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on and dtype != torch.float64 else dtype
