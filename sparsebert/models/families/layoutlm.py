"""LayoutLM. It makes of padding a mask of its own, that is added to the scores, and knows no other."""

from typing import Any

import torch

from ..model_configs import Derived


class MaskedLayoutLMEncoder(Derived):
    """Mixin of the encoder of a LayoutLM with a mask."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        """The forward of `LayoutLMEncoder` without its mask: padding is part of the mask inputs."""
        if attention_mask.dim() > 4:
            raise ValueError("attention_mask must be of shape (batch, tokens): a LayoutLM takes no 4-D one")
        parent: Any = super()
        return parent.forward(hidden_states, None, **kwargs)


# The classes of transformers, and the mixins of their parts in a model with a mask.
PARTS = {"LayoutLMEncoder": MaskedLayoutLMEncoder}
