"""
The encoders of T5, mT5 and UMT5, which add to the scores a bias per head and distance: in T5 and mT5 that of the first
layer in all, in UMT5 one of each layer.

Letters: n tokens, H heads.
"""

from typing import Any

import torch

from ..model_configs import Derived


MODEL_TYPES = ("mt5", "t5", "umt5")


class MaskedT5Attention(Derived):
    """Mixin of the attention of a T5 with a mask."""

    def compute_bias(self, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """No bias for every pair of tokens: [`bias_by_distance`] is part of the mask inputs. `None` would be zeros."""
        return torch.zeros(())


# The classes of transformers, and the mixins of their parts in a model with a mask.
PARTS = dict.fromkeys(("MT5Attention", "T5Attention", "UMT5Attention"), MaskedT5Attention)


def bias_by_distance(model: Any, length: int) -> tuple[torch.Tensor, ...]:
    """The bias per distance i - j, `(H, 2n - 1)`, in column i - j + n - 1, of all layers or of each."""
    modules: Any = [module for module in model.modules() if isinstance(module, MaskedT5Attention)]
    # A single query in the middle of the keys has all distances j - i.
    sizes = (1, 2 * length - 1, None, length - 1)
    parents: Any = (super(MaskedT5Attention, each) for each in modules if each.has_relative_attention_bias)
    return tuple(parent.compute_bias(*sizes)[0, :, 0].flip(1) for parent in parents)
