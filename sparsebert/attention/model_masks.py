"""Where the mask of a model is, also of one inside a PEFT or sentence-transformers model."""

from typing import Any

from torch import nn


def without_adapters(model: Any) -> Any:
    """The model inside a PEFT or sentence-transformers model."""
    model = getattr(model, "transformers_model", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def sparse_attention_of(model: Any) -> Any:
    """The [`SparseAttention`] of a base model or head; `None` if it carries no mask."""
    base = getattr(without_adapters(model), "base_model", None)
    # Its class may have a property of this name that raises if there is none.
    return base._modules.get("sparse_attention") if isinstance(base, nn.Module) else None
