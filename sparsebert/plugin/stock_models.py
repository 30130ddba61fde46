"""What `from_pretrained` and `save_pretrained` of all models of transformers do while the plugin is enabled."""

from collections.abc import Callable
from os import PathLike
from typing import Any

from transformers.utils import logging

from ..models.model_configs import Derived
from ..models.saving import SparseModelMixin
from ..models.stock_loading import from_pretrained_with_mask


logger = logging.get_logger(__name__)


def from_pretrained(
    stock: Callable[..., Any],
    cls: Any,
    pretrained_model_name_or_path: str | PathLike | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attach the mask beside the weights. All others (`Auto*`, `pipeline`, sentence-transformers) end here."""
    return from_pretrained_with_mask(stock, cls, pretrained_model_name_or_path, *args, **kwargs)


def save_pretrained(stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn of the masks of a model's parts, which it does not save."""
    result = stock(model, *args, **kwargs)
    if isinstance(model, SparseModelMixin) or "sparse_attention" in model._modules:
        return result
    parts = [name for name, part in model.named_modules() if "sparse_attention" in part._modules]
    # A SparseBERT has its mask in its configuration.
    if parts and isinstance(model.get_submodule(parts[0]).config, Derived):
        logger.warning(
            f"{type(model).__name__} is saved without the mask of its part {', '.join(parts)}: save that part in a "
            "folder of its own, too, and attach the mask again after loading."
        )
    return result
