"""The entries by which the `Auto*` classes of transformers load a SparseBERT."""

from typing import Any

import transformers

from ..model_configs import AUTO_CLASSES
from . import modeling_sparsebert
from .configuration_sparsebert import SparseBertConfig


# Class of transformers to class of this package.
MODEL_CLASSES: dict[Any, Any] = {
    getattr(transformers, auto): getattr(modeling_sparsebert, f"SparseBert{ending}")
    for auto, ending in AUTO_CLASSES.items()
}


def register_auto_classes() -> None:
    """Have the `Auto*` classes know the model type `sparsebert`."""
    transformers.AutoConfig.register(SparseBertConfig.model_type, SparseBertConfig, exist_ok=True)
    for auto_class, model_class in MODEL_CLASSES.items():
        auto_class.register(SparseBertConfig, model_class, exist_ok=True)


def unregister_auto_classes() -> None:
    """The opposite of [`register_auto_classes`], for which transformers has no function."""
    known: Any = transformers.CONFIG_MAPPING
    known._extra_content.pop(SparseBertConfig.model_type, None)
    for auto_class in MODEL_CLASSES:
        auto_class._model_mapping._extra_content.pop(SparseBertConfig, None)
