"""
MPNet. Transformers runs its attention without an interface for attention functions, and adds to the scores of all
layers a bias per head and distance. While a mask is attached, the forward of its attention is ours.

Letters: B batch, n tokens, H heads, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...attention.interface import sparse_attention_forward
from ...attention.mask_inputs import MaskInputs
from ..model_configs import Derived


@dataclass(frozen=True)
class MaskInPlace:
    """
    What is passed in the place of the attention mask, which is all that reaches the attention of an MPNet.

    Args:
        mask_inputs ([`MaskInputs`]): The inputs of the mask.
        attention_mask (`torch.Tensor`, *optional*): A mask of the caller to apply in addition, if it is 4-D.
    """

    mask_inputs: MaskInputs
    attention_mask: torch.Tensor | None

    # What transformers asks of a mask before it gives it to ours, which returns it.
    ndim = 1

    @property
    def shape(self) -> tuple[int]:
        """The number of keys."""
        return (self.mask_inputs.num_keys,)


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
        inputs, own_mask = None, attention_mask
        if isinstance(attention_mask, MaskInPlace):
            inputs, own_mask = attention_mask.mask_inputs, attention_mask.attention_mask
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        dropout = self.dropout.p if self.training else 0.0
        context, weights = sparse_attention_forward(
            self, query, key, value, own_mask, dropout=dropout, mask_inputs=inputs, is_causal=False
        )
        return self.o(context.flatten(2)), weights  # the encoder asks for the second only if they are wanted


# The classes of transformers, and the mixins of their parts in a model with a mask.
PARTS = {"MPNetEncoder": MaskedMPNetEncoder, "MPNetSelfAttention": MaskedMPNetSelfAttention}


def bias_by_distance(model: Any, length: int) -> torch.Tensor:
    """The bias of an MPNet per distance i - j, `(H, 2n - 1)`, in column i - j + n - 1."""
    encoder, embedding = model.encoder, model.encoder.relative_attention_bias
    distance = torch.arange(1 - length, length, device=embedding.weight.device)
    return embedding(encoder.relative_position_bucket(-distance)).T
