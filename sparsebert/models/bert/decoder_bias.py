"""
The decoder of BERT's masked-token head, without a bias parameter of its own.

In the stock classes the decoder and the head around it hold the same parameter. Engines that shard modules apart, such
as FSDP2, cannot have a parameter in two places.
"""

from typing import Any

import torch
from torch import nn


class TiedDecoder(nn.Linear):
    """A linear layer that adds the bias of the head it is in: made of a stock decoder by [`share_bias`]."""

    @property
    def bias(self) -> torch.Tensor:  # type: ignore[override]
        """The bias of the head, as the head has it at this moment: whole, sharded or cast."""
        return vars(self)["head"].bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(f"{prefix}bias", None)  # that of a stock model, which holds it twice
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def share_bias(model: Any) -> None:
    """
    Let the decoder of a BERT head for masked tokens use the bias of the head, under the key that it has in files.
    Other models, and decoders with a bias of their own, stay as they are.

    Args:
        model (`PreTrainedModel`): The model with its head, changed in place.
    """
    head: Any = getattr(getattr(model, "cls", None), "predictions", None)
    decoder = getattr(head, "decoder", None)
    if type(decoder) is not nn.Linear or decoder.bias is not head.bias:
        return
    del decoder.bias
    vars(decoder)["head"] = head  # not through Module.__setattr__, which would register it within itself
    decoder.__class__ = TiedDecoder
    ties = model._tied_weights_keys or {}
    model._tied_weights_keys = {name: source for name, source in ties.items() if not name.endswith("decoder.bias")}
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
