"""Where the mask of a model is, also of one inside a PEFT or sentence-transformers model."""

from typing import Any

from torch import nn


def without_adapters(model: Any) -> Any:
    """The model inside a PEFT or sentence-transformers model."""
    model = getattr(model, "transformers_model", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def sparse_attention_of(model: Any, adapter: str | None = None) -> Any:
    """
    The [`SparseAttention`] of a base model or head; `None` if it carries no mask. With PEFT's `modules_to_save` each
    adapter has its own: that of the active adapter, or of the one named `adapter`.
    """
    base = getattr(without_adapters(model), "base_model", None)
    # Its class may have a property of this name that raises if there is none.
    found = base._modules.get("sparse_attention") if isinstance(base, nn.Module) else None
    of_adapters = getattr(found, "modules_to_save", {})
    return of_adapters[adapter] if adapter in of_adapters else found
