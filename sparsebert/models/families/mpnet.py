"""
MPNet. Transformers runs its attention without an interface for attention functions, and adds to the scores of all
layers a bias per head and distance. While a mask is attached, the forward of its attention is ours.

Letters: B batch, n tokens, H heads, D hidden size.
"""

from typing import Any

import torch

from ...attention.interface import sparse_attention_forward
from ..model_configs import Derived


class MaskedMPNetEncoder(Derived):
    """Mixin of the encoder of an MPNet with a mask."""

    def compute_position_bias(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """No bias for every pair of tokens of every sequence: [`bias_by_distance`] is part of the mask inputs."""


class MaskedMPNetSelfAttention(Derived):
    """Mixin of the attention of an MPNet with a mask."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_bias: None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The forward of `MPNetSelfAttention` through an attention function, with a [`MaskInPlace`]."""
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        dropout = self.dropout.p if self.training else 0.0
        context, weights = sparse_attention_forward(
            self, query, key, value, attention_mask, dropout=dropout, is_causal=False
        )
        return self.o(context.flatten(2)), weights  # the encoder asks for the second only if they are wanted


# The classes of transformers, and the mixins of their parts in a model with a mask.
PARTS = {"MPNetEncoder": MaskedMPNetEncoder, "MPNetSelfAttention": MaskedMPNetSelfAttention}


def bias_by_distance(model: Any, length: int) -> tuple[torch.Tensor]:
    """The bias of an MPNet per distance i - j, `(H, 2n - 1)`, in column i - j + n - 1."""
    encoder, embedding = model.encoder, model.encoder.relative_attention_bias
    distance = torch.arange(1 - length, length, device=embedding.weight.device)
    return (embedding(encoder.relative_position_bucket(-distance)).T,)
