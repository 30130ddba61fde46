"""
What the attention layers of one forward see of the mask.

Letters: B batch, H heads, n queries, m keys.
"""

from dataclasses import dataclass, replace

import torch


# Vanishes in any softmax, and adding a score does not overflow float16.
REMOVED = torch.finfo(torch.float16).min / 2


def additive(keep):
    """float32, 0 where `keep`, `REMOVED` elsewhere."""
    return torch.zeros(keep.shape, device=keep.device).masked_fill_(~keep, REMOVED)


@dataclass(frozen=True)
class MaskInputs:
    """
    Everything that a backend needs, prepared once per forward, before the first layer.

    Args:
        backend (`str`): Key of `BACKENDS`.
        num_keys (`int`): m.
        sparse_mask ([`SparseMask`], *optional*): The frozen mask; `None` while searching.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        causal (`bool`): Whether key j > query i is cut.
        bias (`tuple` of `torch.Tensor`): Per layer, or one for all: added to the scores, `(B or 1, H or 1, n, m)`;
            padding and causality included.
        live (`tuple`, *optional*): Per layer, or one for all: bool `(B or 1, H or 1, n, 1)`, False where a query has
            no key, whose output is 0. `None` when every query has one.
        gate (`tuple`, *optional*): Per layer, or one for all: factor of the probabilities (multiplicative masks).
    """

    backend: str
    num_keys: int
    sparse_mask: object = None
    padding: torch.Tensor | None = None
    causal: bool = False
    bias: tuple = (None,)
    live: tuple = (None,)
    gate: tuple = (None,)

    @classmethod
    def dense(cls, attention_mask, backend):
        """No mask but the host's: bool `(B, m)` or `(B, 1, n, m)`, or an additive float, or `None`."""
        bias = None if attention_mask is None else _additive_4d(attention_mask)
        return cls(backend, num_keys=0, bias=(bias,))

    def for_layer(self, layer, attention_mask=None):
        """
        The inputs of one layer, as one-element tuples. A 4-D `attention_mask` (passed by the user, or made for a
        pattern of the host's own) applies on top; a 2-D one is the padding that the bias already holds.
        """
        bias, live, gate = (
            values if len(values) == 1 else (values[layer],) for values in (self.bias, self.live, self.gate)
        )
        if attention_mask is not None and attention_mask.dim() == 4:
            # Clamped, so that two removals stay finite in float16.
            bias = ((_additive_4d(attention_mask) + (0.0 if bias[0] is None else bias[0])).clamp(min=REMOVED),)
            live = ((bias[0] > REMOVED / 2).any(-1, keepdim=True),)
        return replace(self, bias=bias, live=live, gate=gate)


def _additive_4d(attention_mask):
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    return additive(attention_mask) if attention_mask.dtype == torch.bool else attention_mask.float()
