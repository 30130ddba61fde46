"""
What the attention layers read of the mask: prepared once per forward, before the first layer, for the chosen backend.

A mask enters the scores as a bias, 0 where a query may attend and `REMOVED` where it may not. The functions here build
that bias from a frozen or a learned mask, its special tokens and diagonal, padding and causality.

Letters: B batch, L layers (1 when shared), H heads, n queries (the last n of the m positions), m keys.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..masks.compiled import compiled
from ..masks.exported import exported_structure, exporting
from ..masks.sparse_mask import SparseMask, special_entries
from .packed_batches import Documents


# Upper limit of the constant c that a learned mask subtracts. It is far below what padding and causality subtract, so
# no mask outweighs them.
MAX_MASK_CONSTANT = 1e4
# The bias of a removed entry, which vanishes in any softmax. With values of some ten thousand, the exponential of
# PyTorch's fused attention on CPUs would meet denormal numbers, and training would take up to half as long again.
REMOVED = -1e9
# A bias below this, such as in a mask that the caller passes in float16, counts as removed.
REMOVED_BELOW = torch.finfo(torch.float16).min / 4


def additive(keep: torch.Tensor) -> torch.Tensor:
    """A bool mask as a bias: float32, 0 where `keep` is true and `REMOVED` elsewhere."""
    return torch.zeros(keep.shape, device=keep.device).masked_fill_(~keep, REMOVED)


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
        sparse_mask ([`SparseMask`], *optional*): The frozen mask; `None` while searching.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        causal (`bool`): Whether keys j > query i are removed.
        window (`int`, *optional*): Keys farther than this from the query are removed.
        bias (`tuple` of `torch.Tensor`): Added to the scores, `(B or 1, H or 1, n, m)`, padding and causality
            included.
        live (`tuple` of `torch.Tensor`): Bool `(B or 1, H or 1, n, 1)`, False where a query has no key, so that its
            output must be 0. `None` when every query has one.
        gate (`tuple` of `torch.Tensor`): Factor of the probabilities, for multiplicative masks.
        compiled (`tuple`): The mask in the form that the backend's kernel reads, instead of `bias` and `live`.
        local ([`MaskInputs`], *optional*): The inputs of the layers in `local_layers`, whose attention has a sliding
            window.
        local_layers (`tuple` of `int`): Indices of these layers.
        learned (`tuple` of `torch.Tensor`): A bias `(H, n, m)` that is being learned, the same for all sequences,
            instead of `bias`. Causality is included; padding and the special tokens of each sequence are not.
        first_token (`torch.Tensor` of shape `(B,)`, *optional*): Position of each sequence's first token, whose row
            and column are on in addition to the `compiled` mask, and in whose row and column the `learned` bias does
            not count. In a `compiled` mask it has shape `(1,)` if it is the same for all sequences.
        last_token (`torch.Tensor` of shape `(B,)`, *optional*): The same for the last token.
        learned_diagonal (`bool`): Whether these rows and columns contain their diagonal entries.
        probability_map (`tuple` of `Callable`): Functions of the scores, see [`ProbabilityMap`]; `None` for softmax.
        dropout_layers (`int`): Number of layers that have dropout and run once each in this forward. 0 if there is no
            dropout or a layer may run several times.
        seeds (`tuple` of `torch.Tensor`): The seed of each layer's dropout; `None` where every call draws one.
        documents ([`Documents`], *optional*): Where the sequences are in a batch that is packed otherwise. All other
            fields are about the documents as a padded batch: B is their number, n = m the length of the longest.
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
    live: tuple[torch.Tensor | None, ...] = (None,)
    gate: tuple[torch.Tensor | None, ...] = (None,)
    compiled: tuple[Any, ...] = (None,)
    local: "MaskInputs | None" = None
    local_layers: tuple[int, ...] = ()
    learned: tuple[torch.Tensor | None, ...] = (None,)
    first_token: torch.Tensor | None = None
    last_token: torch.Tensor | None = None
    learned_diagonal: bool = True
    probability_map: tuple[Callable[[torch.Tensor], torch.Tensor] | None, ...] = (None,)
    dropout_layers: int = 0
    seeds: tuple[torch.Tensor | None, ...] = (None,)
    documents: Documents | None = None

    @classmethod
    def dense(cls, attention_mask: torch.Tensor | None, backend: str) -> "MaskInputs":
        """
        The inputs of dense attention, under the host's own mask only.

        Args:
            attention_mask (`torch.Tensor` of shape `(B, m)` or `(B, 1, n, m)`, *optional*): Bool, True = may attend,
                or float, added to the scores.
            backend (`str`): A key of `BACKENDS`.
        """
        bias = None if attention_mask is None else _additive_4d(attention_mask)
        return cls(backend, bias=(bias,))

    def for_layer(self, layer: int, attention_mask: torch.Tensor | None = None) -> "MaskInputs":
        """
        The inputs of one layer, in which every tuple has one element.

        Args:
            layer (`int`): Index of the layer.
            attention_mask (`torch.Tensor`, *optional*): The layer's argument of that name. A 4-D mask, from the caller
                or for a pattern of the host's own, is applied in addition; a 2-D one is padding, which `self` already
                includes.

        Raises:
            ValueError: If there is a 4-D mask and the backend runs on a compiled form.
        """
        if self.local is not None and layer in self.local_layers:
            return replace(self.local, documents=self.documents).for_layer(layer, attention_mask)

        def own(values):
            return values if len(values) == 1 else (values[layer],)

        bias, live, compiled, learned = own(self.bias), own(self.live), own(self.compiled), own(self.learned)
        if attention_mask is not None and attention_mask.dim() == 4:
            if compiled[0] is not None:
                raise ValueError(
                    f"{self.backend} does not support a 4-D attention_mask, got one of shape "
                    f"{tuple(attention_mask.shape)}: use sparse_eager or sparse_sdpa"
                )
            if learned[0] is not None:
                bias, learned = (merged_bias(learned[0], self),), (None,)
            # Clamped so that the sum of two removals stays finite in any dtype.
            bias = ((_additive_4d(attention_mask) + (0.0 if bias[0] is None else bias[0])).clamp(min=REMOVED),)
            live = ((bias[0] > REMOVED_BELOW).any(-1, keepdim=True),)
        return replace(
            self,
            bias=bias,
            live=live,
            gate=own(self.gate),
            compiled=compiled,
            learned=learned,
            probability_map=own(self.probability_map),
            seeds=own(self.seeds),
        )

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


def per_sequence(positions: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Positions `(B,)` or `(1,)` for every sequence of a batch of this size: `(B,)`, contiguous."""
    return None if positions is None else positions.expand(batch).contiguous()


def first_real(padding: torch.Tensor) -> torch.Tensor:
    """Position of the first real token in each row of `padding` `(B, m)`: int64 `(B,)`, 0 if there is none."""
    return padding.int().argmax(-1)


def last_real(padding: torch.Tensor) -> torch.Tensor:
    """Position of the last real token in each row of `padding` `(B, m)`: int64 `(B,)`, 0 if there is none."""
    return (padding * torch.arange(padding.shape[-1], device=padding.device)).argmax(-1)


def compiled_length(mask: SparseMask, inputs: MaskInputs) -> int:
    """
    The length to compile a mask for, at least m. The rows of a decoder do not depend on later positions, so the
    lengths that generation passes through share a few tables.
    """
    length = inputs.num_keys
    if not inputs.causal or (length > mask.length and mask.length_policy == "error"):
        return length
    grown = 1 << (length - 1).bit_length()
    return min(grown, mask.length) if length <= mask.length else grown


def _additive_form(table):
    live = table.any(-1, keepdim=True)[None]
    return additive(table)[None], live[:0] if live.all() else live


def _table_form(table):
    return (table,)


def prepare_bias(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """
    A frozen mask as a bias, padding and causality included.

    Args:
        mask ([`SparseMask`]): The mask.
        inputs ([`MaskInputs`]): Everything known so far about this forward.

    Returns:
        `dict`: The fields `bias` and `live` of [`MaskInputs`].
    """
    first_row = inputs.num_keys - inputs.num_queries
    if exporting():
        keep = exported_structure(mask, inputs.num_keys, inputs.device)[:, None, :, first_row:]
        if inputs.causal:
            keep = keep & causal_entries(inputs)
        return bias_and_live(keep, inputs, mask.special_tokens, mask.last_token, mask.diagonal)
    if inputs.padding is None:
        # It is the same for every batch, so it is cached.
        length = compiled_length(mask, inputs)
        forms = compiled(mask, _additive_form, length, inputs.causal, inputs.device, special="all")
        if first_row or length > inputs.num_keys:
            rows = slice(first_row, inputs.num_keys)
            forms = tuple((bias[:, :, rows, : inputs.num_keys], live[:, :, rows]) for bias, live in forms)
        return {
            "bias": tuple(bias for bias, _ in forms),
            "live": tuple(live if len(live) else None for _, live in forms),
        }
    tables = compiled(mask, _table_form, compiled_length(mask, inputs), inputs.causal, inputs.device)
    keep = torch.stack([table[:, first_row : inputs.num_keys, : inputs.num_keys] for (table,) in tables])[:, None]
    return bias_and_live(keep, inputs, mask.special_tokens, mask.last_token, mask.diagonal)


def bias_and_live(
    keep: torch.Tensor, inputs: MaskInputs, special_tokens: str, last_token: str, diagonal: bool | None
) -> dict[str, Any]:
    """
    A bool mask as a bias, with what depends on the sequence: special tokens, padding and a sliding window.

    Args:
        keep (`torch.Tensor` of shape `(L, 1, H, n, m)`): Bool, True = may attend, causality included.
        inputs ([`MaskInputs`]): Everything known so far about this forward.
        special_tokens (`str`): See [`SparseMask`].
        last_token (`str`): See [`SparseMask`].
        diagonal (`bool`, *optional*): See [`SparseMask`].

    Returns:
        `dict`: The fields `bias` and `live` of [`MaskInputs`].
    """
    special = special_rows(inputs, special_tokens, last_token)
    if inputs.causal:
        special = special & causal_entries(inputs)
    keep = kept_entries(keep, special, diagonal)  # (L, B, H, n, m)
    if inputs.window is not None:
        keep = keep & near_entries(inputs, inputs.window)
    if inputs.padding is not None:
        first_row = inputs.num_keys - inputs.num_queries
        keep = keep & inputs.padding[:, None, None, :] & inputs.padding[:, None, first_row:, None]
    return {"bias": additive(keep).unbind(0), "live": keep.any(-1, keepdim=True).unbind(0)}


def special_rows(inputs: MaskInputs, special_tokens: str, last_token: str) -> torch.Tensor:
    """The rows and columns of the special tokens, for the queries of this forward: bool `(B or 1, 1, n, m)`."""
    first, last = real_tokens(inputs, special_tokens, last_token)
    special = special_entries(inputs.num_keys, special_tokens, first, last, inputs.device)
    special = special.view(-1, 1, inputs.num_keys, inputs.num_keys)
    if inputs.padding is not None:
        # For all masks alike, so that gradients are summed over the sequences in one order.
        special = special.expand(inputs.padding.shape[0], -1, -1, -1)
    return special[:, :, inputs.num_keys - inputs.num_queries :]


def real_tokens(
    inputs: MaskInputs, special_tokens: str, last_token: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    The special tokens whose positions depend on the padding.

    Args:
        inputs ([`MaskInputs`]): Its padding is read.
        special_tokens (`str`): See [`SparseMask`].
        last_token (`str`): See [`SparseMask`].

    Returns:
        `tuple`: Positions of the first and of the last token of each sequence, int64 `(B,)`; `None` for a token that
        is not special or has the same position in all sequences.
    """
    if inputs.padding is None or special_tokens == "none":
        return None, None
    follows = special_tokens == "first_last" and last_token == "real"
    return first_real(inputs.padding), last_real(inputs.padding) if follows else None


def with_cuts(bias: torch.Tensor, inputs: MaskInputs) -> torch.Tensor:
    """A bias `(..., n, m)` with padded keys and, in a decoder, future keys removed."""
    if inputs.padding is not None:
        bias = bias.masked_fill(~inputs.padding[:, None, None, :], REMOVED)
    return bias.masked_fill(~causal_entries(inputs), REMOVED) if inputs.causal else bias


def token_entries(
    tokens: Sequence[torch.Tensor], num_queries: int, num_keys: int, with_diagonal: bool, causal: bool
) -> torch.Tensor:
    """
    The rows and columns of some tokens of each sequence.

    Args:
        tokens (`Sequence` of `torch.Tensor` of shape `(B,)`): Positions of one or more tokens.
        num_queries (`int`): n.
        num_keys (`int`): m.
        with_diagonal (`bool`): Whether the entries where a token's row and column meet are included.
        causal (`bool`): Whether keys j > query i are left out.

    Returns:
        `torch.Tensor` of shape `(B, n, m)`, bool.
    """
    position = torch.arange(num_keys, device=tokens[0].device)
    chosen = functools.reduce(torch.logical_or, [position == token[:, None] for token in tokens])  # (B, m)
    row = position[num_keys - num_queries :, None]
    entries = chosen[:, num_keys - num_queries :, None] | chosen[:, None, :]
    if causal:
        return entries & (row >= position if with_diagonal else row > position)
    return entries if with_diagonal else entries & (row != position)


def fix_entries(
    bias: torch.Tensor, inputs: MaskInputs, special_tokens: str, diagonal: bool | None, off: float
) -> torch.Tensor:
    """
    A learned bias with the entries that are not learned set: special tokens, a fixed diagonal, causality.

    Args:
        bias (`torch.Tensor` of shape `(..., n, m)`): Any values; those of fixed entries are ignored and get no
            gradient.
        inputs ([`MaskInputs`]): Sizes, device and causality.
        special_tokens (`str`): Special tokens at a fixed position, see [`SparseMask`].
        diagonal (`bool`, *optional*): See [`SparseMask`].
        off (`float`): Bias of a removed diagonal.

    Returns:
        `torch.Tensor` of shape `(..., n, m)`.
    """
    special = special_entries(inputs.num_keys, special_tokens, device=inputs.device)
    special = special[inputs.num_keys - inputs.num_queries :]
    learned = set_entries(torch.ones(special.shape, device=inputs.device), special, diagonal, on=0.0, off=0.0)
    fixed = set_entries(torch.zeros(special.shape, device=inputs.device), special, diagonal, on=0.0, off=off)
    if inputs.causal:
        future = ~causal_entries(inputs)
        learned, fixed = learned.masked_fill(future, 0.0), fixed.masked_fill(future, REMOVED)
    # A single pass over all heads, forward and backward.
    return torch.addcmul(fixed, bias, learned)


def merged_bias(learned: torch.Tensor, inputs: MaskInputs) -> torch.Tensor:
    """
    A learned bias `(H, n, m)` with padding and special tokens, which differ by sequence: `(B, H, n, m)`, or
    `(1, H, n, m)` without padding.
    """
    if inputs.padding is None:
        return learned[None]
    fixed = ~inputs.padding[:, None]  # (B, 1, m)
    values = torch.zeros(fixed.shape, dtype=learned.dtype, device=learned.device).masked_fill_(fixed, REMOVED)
    tokens = [token for token in (inputs.first_token, inputs.last_token) if token is not None]
    if tokens:
        sizes = inputs.num_queries, inputs.num_keys
        fixed = fixed | token_entries(tokens, *sizes, inputs.learned_diagonal, inputs.causal)
    # A single pass over all heads, forward and backward.
    return torch.where(fixed[:, None], values[:, None], learned)


def kept_entries(keep: torch.Tensor, special: torch.Tensor, diagonal: bool | None) -> torch.Tensor:
    """
    The entries that are kept, with those of special tokens and of a fixed diagonal set: [`set_entries`] for a bool
    `keep`, on which it is faster, and by operators that all runtimes of exported graphs have.
    """
    keep = keep | special
    if diagonal is None:
        return keep
    on_diagonal = _diagonal_entries(keep)
    return keep | on_diagonal if diagonal else keep & ~on_diagonal


def set_entries(
    values: torch.Tensor, special: torch.Tensor, diagonal: bool | None, on: float, off: float
) -> torch.Tensor:
    """
    Values with those of special tokens and of a fixed diagonal set.

    Args:
        values (`torch.Tensor` of shape `(..., n, m)`): Values of all entries, of a floating-point dtype.
        special (`torch.Tensor` of shape `(B or 1, 1, n, m)` or `(n, m)`): Bool, the entries of special tokens, which
            are set to `on`.
        diagonal (`bool`, *optional*): `True` sets the diagonal to `on` and `False` to `off`, special tokens included.
        on (`float`): Value of an entry that is kept.
        off (`float`): Value of an entry that is removed.

    Returns:
        `torch.Tensor`: The values, broadcast to the batch of `special`.
    """
    kept, removed = (torch.as_tensor(value, dtype=values.dtype, device=values.device) for value in (on, off))
    values = torch.where(special, kept, values)
    if diagonal is None:
        return values
    return torch.where(_diagonal_entries(values), kept if diagonal else removed, values)


def _diagonal_entries(values):
    num_queries, num_keys = values.shape[-2:]
    position = torch.arange(num_keys, device=values.device)
    return position[num_keys - num_queries :, None] == position


def causal_entries(inputs: MaskInputs) -> torch.Tensor:
    """Bool `(n, m)`, True where key j <= query i."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return position[inputs.num_keys - inputs.num_queries :, None] >= position


def near_entries(inputs: MaskInputs, window: int) -> torch.Tensor:
    """Bool `(n, m)`, True where query and key are at most `window` apart."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return (position[inputs.num_keys - inputs.num_queries :, None] - position).abs() <= window


def _additive_4d(attention_mask):
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    return additive(attention_mask) if attention_mask.dtype == torch.bool else attention_mask.float()
