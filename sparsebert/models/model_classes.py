"""The class that a configuration was saved with."""

from typing import Any

import transformers
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedConfig, PreTrainedModel

from .bert import modeling_sparsebert
from .bert.configuration_sparsebert import SparseBertConfig
from .families.t5 import MODEL_TYPES


def encoder_class_of(config: PreTrainedConfig) -> Any:
    """The Auto class of the encoder of a model, without a head. `AutoModel` would give a T5 its decoder, too."""
    return AutoModelForTextEncoding if config.model_type in MODEL_TYPES else AutoModel


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a model was saved with, of transformers or, for a [`SparseBertConfig`], of this package."""
    module = modeling_sparsebert if isinstance(config, SparseBertConfig) else transformers
    names: Any = config.architectures or ["AutoModel"]
    name = names[0] if isinstance(names, list) else names
    if module is modeling_sparsebert and isinstance(name, str) and name.startswith("Bert"):
        name = f"Sparse{name}"  # the encoder of a head, saved alone
    found = getattr(module, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and (name == "AutoModel" or issubclass(found, PreTrainedModel))):
        raise ValueError(f"architectures: {name!r} is not a model of {module.__name__}: give the class as model_class")
    return found
