"""
Scores of attention entries by what a model attends to while it trains.

Letters: B batch, L layers, H heads, n mask length.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.model_masks import sparse_attention_of


class AttentionScores:
    """The mean attention probability of every entry over the training batches since the last pruning step."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def watch(self, model: PreTrainedModel) -> None:
        """Make a model return its attention probabilities in training, and collect them until [`unwatch`]."""
        self.unwatch(model)
        sparse_attention = sparse_attention_of(model)
        sparse_attention.weights_wanted = True
        modules, length = _attention_modules(model, sparse_attention), sparse_attention.config.mask_length
        shape = (len(modules), sparse_attention.carrier.num_heads, length, length)
        self._hooks = [
            module.register_forward_hook(self._hook(layer, shape), with_kwargs=True)
            for layer, module in enumerate(modules)
        ]

    def unwatch(self, model: PreTrainedModel) -> None:
        """Stop collecting."""
        sparse_attention_of(model).weights_wanted = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def clear(self) -> None:
        """Begin to count anew, after a pruning step."""
        self.sums = {}

    def mean(self) -> torch.Tensor:
        """
        Attention probabilities `(L, H, n, n)`, averaged over the examples that have both tokens; 0 where none has.
        """
        return self.sums["probs"] / self.sums["examples"].clamp(min=1)

    def _hook(self, layer: int, shape: tuple[int, int, int, int]) -> Callable[..., None]:
        num_layers, _, length, _ = shape

        def collect(module, args, kwargs, output):
            if not module.training or output[-1] is None:  # left by a step that was interrupted
                return
            weights = output[-1].detach()[..., :length, :length]  # (B, H, n, n)
            size = weights.shape[-1]
            # An attention without an interface has them in the place of its attention mask.
            inputs = kwargs["mask_inputs"] if "mask_inputs" in kwargs else args[1].mask_inputs
            padding = inputs.padding
            if inputs.documents is not None:
                raise ValueError("score 'attention' is not defined for packed documents: set pack_documents to false")
            real = torch.ones(len(weights), size, device=weights.device)
            if padding is not None:
                real = padding[:, :length].float()  # (B, n)
            if not self.sums:
                self.sums["probs"] = torch.zeros(shape, device=weights.device)
                self.sums["examples"] = torch.zeros(num_layers, 1, length, length, device=weights.device)
            self.sums["probs"][layer, :, :size, :size] += weights.float().sum(0)
            self.sums["examples"][layer, 0, :size, :size] += real.T @ real

        return collect


def _attention_modules(model: PreTrainedModel, sparse_attention: nn.Module) -> list[nn.Module]:
    """The attention modules that run through a [`SparseAttention`], in the order of their layers."""
    # Each holds a reference that is not registered.
    modules = (module for module in model.modules() if "sparse_attention" in vars(module))
    return sorted(
        (module for module in modules if vars(module)["sparse_attention"] is sparse_attention),
        key=lambda module: vars(module)["mask_layer"],
    )
