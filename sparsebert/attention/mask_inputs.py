"""
What the attention layers of one forward see of the mask.

Letters: B batch, L layers (1 when shared), H heads, n queries (the last n of the m positions), m keys.
"""

from dataclasses import dataclass, replace

import torch

from ..masks.compiled import compiled
from ..masks.sparse_mask import special_entries


# Twice this is still less than what padding and causality subtract, so no mask outweighs them.
MAX_MASK_CONSTANT = 1e4


# Vanishes in any softmax. Not some ten thousand, for which the exponential of PyTorch's fused attention on CPUs meets
# denormal numbers: training takes up to half as long again.
REMOVED = -1e9
# What a mask of the caller removes is below this: float16 goes no further than four times as far.
REMOVED_BELOW = torch.finfo(torch.float16).min / 4


def additive(keep):
    """float32, 0 where `keep`, `REMOVED` elsewhere."""
    return torch.zeros(keep.shape, device=keep.device).masked_fill_(~keep, REMOVED)


@dataclass(frozen=True)
class MaskInputs:
    """
    Everything that a backend needs, prepared once per forward, before the first layer.

    Args:
        backend (`str`): Key of `BACKENDS`.
        num_queries (`int`): n.
        num_keys (`int`): m.
        device (`torch.device`): Of the activations.
        sparse_mask ([`SparseMask`], *optional*): The frozen mask; `None` while searching.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        causal (`bool`): Whether key j > query i is cut.
        window (`int`, *optional*): Keys farther from the query than this are cut.
        bias (`tuple` of `torch.Tensor`): Per layer, or one for all: added to the scores, `(B or 1, H or 1, n, m)`;
            padding and causality included.
        live (`tuple`, *optional*): Per layer, or one for all: bool `(B or 1, H or 1, n, 1)`, False where a query has
            no key, whose output is 0. `None` when every query has one.
        gate (`tuple`, *optional*): Per layer, or one for all: factor of the probabilities (multiplicative masks).
        compiled (`tuple`, *optional*): Per layer, or one for all: the mask in the form that the backend's kernel
            reads, instead of `bias` and `live`.
        local ([`MaskInputs`], *optional*): Those of the layers `local_layers`, whose attention has a sliding window.
        learned (`tuple` of `torch.Tensor`, *optional*): Per layer, or one for all: a bias `(H, n, m)` that is being
            learned, the same for all sequences, instead of `bias`; causality included. Padding comes on top, and so
            do, where `last_token` is given, the row and column of each sequence's last token, which have no bias.
        last_token (`torch.Tensor` of shape `(B,)`, *optional*): int64.
        learned_diagonal (`bool`): Whether that row and column contain their diagonal entry.
        probability_map (`tuple`, *optional*): Per layer, or one for all: a function of the scores, see
            [`ProbabilityMap`]; `None` for softmax.
    """

    backend: str
    num_queries: int = 0
    num_keys: int = 0
    device: torch.device | None = None
    sparse_mask: object = None
    padding: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None
    bias: tuple = (None,)
    live: tuple = (None,)
    gate: tuple = (None,)
    compiled: tuple = (None,)
    local: "MaskInputs | None" = None
    local_layers: tuple = ()
    learned: tuple = (None,)
    last_token: torch.Tensor | None = None
    learned_diagonal: bool = True
    probability_map: tuple = (None,)

    @classmethod
    def dense(cls, attention_mask, backend):
        """No mask but the host's: bool `(B, m)` or `(B, 1, n, m)`, or an additive float, or `None`."""
        bias = None if attention_mask is None else _additive_4d(attention_mask)
        return cls(backend, bias=(bias,))

    def for_layer(self, layer, attention_mask=None):
        """
        The inputs of one layer, as one-element tuples. A 4-D `attention_mask` (passed by the user, or made for a
        pattern of the host's own) applies on top; a 2-D one is the padding that the mask already holds.

        Raises:
            ValueError: For a 4-D mask on a backend that runs on a compiled form.
        """
        if layer in self.local_layers:
            return self.local.for_layer(layer, attention_mask)
        bias, live, gate, compiled, learned, maps = (
            values if len(values) == 1 else (values[layer],)
            for values in (self.bias, self.live, self.gate, self.compiled, self.learned, self.probability_map)
        )
        if attention_mask is not None and attention_mask.dim() == 4:
            if compiled[0] is not None:
                raise ValueError(
                    f"{self.backend} does not support a 4-D attention_mask, got one of shape "
                    f"{tuple(attention_mask.shape)}: use sparse_eager or sparse_sdpa"
                )
            if learned[0] is not None:
                bias, learned = (merged_bias(learned[0], self),), (None,)
            # Clamped, so that two removals stay finite.
            bias = ((_additive_4d(attention_mask) + (0.0 if bias[0] is None else bias[0])).clamp(min=REMOVED),)
            live = ((bias[0] > REMOVED_BELOW).any(-1, keepdim=True),)
        changes = {"bias": bias, "live": live, "gate": gate, "compiled": compiled, "learned": learned}
        return replace(self, probability_map=maps, **changes)

    def last(self):
        """
        Position of each sequence's last token where its row and column are on, int32 `(B,)`, or `(1,)` when it is
        the same for all; otherwise `None`.
        """
        mask = self.sparse_mask
        if mask.special_tokens != "first_last":
            return None
        if self.padding is None or mask.last_token == "position":
            return torch.full((1,), self.num_keys - 1, dtype=torch.int32, device=self.device)
        return last_real(self.padding).int()

    def last_of(self, batch):
        """[`last`] for every sequence of a batch: `(B,)`, contiguous."""
        last = self.last()
        return None if last is None else last.expand(batch).contiguous()


def last_real(padding):
    """Position of each sequence's last real token, int64 `(B,)`; 0 where all is padding."""
    return (padding * torch.arange(padding.shape[-1], device=padding.device)).argmax(-1)


def compiled_length(mask, inputs):
    """
    Length to compile a mask for: in a decoder rows do not depend on how many follow, so the lengths that generation
    grows through share few tables.
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


def prepare_bias(mask, inputs):
    """A frozen mask with padding and causality as an additive one, and which queries have a key."""
    first_row = inputs.num_keys - inputs.num_queries
    if inputs.padding is None:
        # The same for every batch, so it is kept.
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


def bias_and_live(keep, inputs, special_tokens, last_token, diagonal):
    """
    A bool structure `(L, 1, H, n, m)`, in a decoder without future keys, under special tokens, diagonal and padding:
    the fields `bias` and `live` of [`MaskInputs`].
    """
    special = special_rows(inputs, special_tokens, last_token)
    if inputs.causal:
        special = special & causal_entries(inputs)
    keep = set_entries(keep, special, diagonal, on=True, off=False)  # (L, B, H, n, m)
    if inputs.window is not None:
        keep = keep & near_entries(inputs, inputs.window)
    if inputs.padding is not None:
        first_row = inputs.num_keys - inputs.num_queries
        keep = keep & inputs.padding[:, None, None, :] & inputs.padding[:, None, first_row:, None]
    return {"bias": additive(keep).unbind(0), "live": keep.any(-1, keepdim=True).unbind(0)}


def special_rows(inputs, special_tokens, last_token):
    """Bool `(B or 1, 1, n, m)`: rows and columns of the special tokens."""
    last = None
    if inputs.padding is not None and last_token == "real":
        last = last_real(inputs.padding)
    special = special_entries(inputs.num_keys, special_tokens, last, inputs.device)
    special = special.view(-1, 1, inputs.num_keys, inputs.num_keys)
    return special[:, :, inputs.num_keys - inputs.num_queries :]


def with_cuts(bias, inputs):
    """Padded keys and, in a decoder, future keys removed from a bias `(..., n, m)`."""
    if inputs.padding is not None:
        bias = bias.masked_fill(~inputs.padding[:, None, None, :], REMOVED)
    return bias.masked_fill(~causal_entries(inputs), REMOVED) if inputs.causal else bias


def last_entries(last, num_queries, num_keys, with_diagonal):
    """Bool `(B, n, m)`: row and column of each sequence's last token `(B,)`, with their diagonal entry or without."""
    position = torch.arange(num_keys, device=last.device)
    row, last = position[num_keys - num_queries :, None], last[:, None, None]
    special = (row == last) | (position == last)
    return special if with_diagonal else special & (row != position)


def fix_entries(bias, inputs, special_tokens, diagonal, off):
    """A bias that is being learned `(..., n, m)` with special tokens, a fixed diagonal and causality."""
    special = special_entries(inputs.num_keys, special_tokens, device=inputs.device)
    special = special[inputs.num_keys - inputs.num_queries :]
    learned = set_entries(torch.ones(special.shape, device=inputs.device), special, diagonal, on=0.0, off=0.0)
    fixed = set_entries(torch.zeros(special.shape, device=inputs.device), special, diagonal, on=0.0, off=off)
    if inputs.causal:
        future = ~causal_entries(inputs)
        learned, fixed = learned.masked_fill(future, 0.0), fixed.masked_fill(future, REMOVED)
    # One pass over all heads, and one of backward.
    return torch.addcmul(fixed, bias, learned)


def merged_bias(learned, inputs):
    """A bias that is being learned `(H, n, m)` with what differs between sequences: `(B or 1, H, n, m)`."""
    bias = learned[None]
    if inputs.last_token is not None:
        special = last_entries(inputs.last_token, inputs.num_queries, inputs.num_keys, inputs.learned_diagonal)
        bias = bias.masked_fill(special[:, None], 0.0)
    return bias if inputs.padding is None else bias.masked_fill(~inputs.padding[:, None, None, :], REMOVED)


def set_entries(values, special, diagonal, on, off):
    """Special tokens and a fixed diagonal over values `(..., n, m)`; the batch dimension of `special` broadcasts."""
    on, off = (torch.as_tensor(value, dtype=values.dtype, device=values.device) for value in (on, off))
    values = torch.where(special, on, values)
    if diagonal is None:
        return values
    num_queries, num_keys = values.shape[-2:]
    position = torch.arange(num_keys, device=values.device)
    on_diagonal = position[num_keys - num_queries :, None] == position
    return torch.where(on_diagonal, on if diagonal else off, values)


def causal_entries(inputs):
    """Bool `(n, m)`, True for key j <= query i."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return position[inputs.num_keys - inputs.num_queries :, None] >= position


def near_entries(inputs, window):
    """Bool `(n, m)`, True where query and key are at most `window` apart."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return (position[inputs.num_keys - inputs.num_queries :, None] - position).abs() <= window


def _additive_4d(attention_mask):
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    return additive(attention_mask) if attention_mask.dtype == torch.bool else attention_mask.float()
