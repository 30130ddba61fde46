"""Whether a mask reaches all attention of a model: when it is attached, and in every forward."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..attention.choosing.choice import ATTENTION_NAMES
from .architectures import (
    ARCHITECTURES,
    DISTANCE_BIASED,
    INNER,
    attention_modules,
    check_architecture,
    has_decoder,
    shares_weights,
)


logger = logging.get_logger(__name__)

_AGAIN = "detach the mask, or load the model without it, and attach it to the model as it is now"


def check_layers(model: PreTrainedModel) -> None:
    """
    Check that a model can carry a mask and that the mask will reach the self-attention of every layer. A warning names
    other encoders in the model, which stay dense.
    """
    model_type, base = model.config.model_type, model.base_model
    parts = carriers_in(model)
    if model_type not in ARCHITECTURES and parts:
        raise ValueError(
            f"a {type(model).__name__} cannot carry a mask itself: attach one to its parts, {', '.join(parts)}"
        )
    check_architecture(model_type)
    found = attention_modules(model)
    if model_type in DISTANCE_BIASED and has_decoder(model):
        raise ValueError(
            f"{type(model).__name__} has a decoder, and a mask of this type of model is for its encoder alone: load "
            "that, with AutoModelForTextEncoding, and save it if it is to be given as a folder"
        )
    nested = [name for name, part in carriers_in(base).items() if any(is_inside(place, name) for place in found)]
    if nested:
        raise ValueError(
            f"the encoder of {type(model).__name__} cannot be found by its base_model_prefix "
            f"{model.base_model_prefix!r}: give the class the name of its attribute, or attach the mask to the part "
            f"{nested[0]} itself"
        )
    if not shares_weights(model.config) and len(found) != _num_attention_layers(model.config):
        raise ValueError(
            f"{type(base).__name__} has {len(found)} modules of class {ARCHITECTURES[model_type]}, its configuration "
            f"{_num_attention_layers(model.config)} layers with attention; {_without_attention(base, found)}"
        )
    inside = {id(module) for module in base.modules()}
    others = [name for name, part in parts.items() if id(part) not in inside]
    if others:
        logger.warning(
            f"{type(model).__name__}: the mask is attached to its {model.base_model_prefix}; its parts "
            f"{', '.join(others)} stay dense unless a mask is attached to them too"
        )


def _num_attention_layers(config: Any) -> int:
    return getattr(config, "num_attention_layers", config.num_hidden_layers)


def is_inside(name: str, part: str) -> bool:
    """Whether the module with a name is inside the one with the other name."""
    return name.startswith(f"{part}.")


def carriers_in(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The outermost models inside a model, by name, that can carry a mask of their own."""
    parts: dict[str, PreTrainedModel] = {}
    for name, part in model.named_modules():
        known = isinstance(part, PreTrainedModel) and part.config.model_type in ARCHITECTURES
        if known and name and type(part).__name__ not in INNER and not any(is_inside(name, other) for other in parts):
            parts[name] = part
    return parts


def lists_of_layers(base: nn.Module) -> dict[str, int]:
    """The lengths of the lists of layers in a base model, by their names."""
    return {name: len(part) for name, part in base.named_modules() if isinstance(part, nn.ModuleList)}


def _without_attention(base: nn.Module, found: dict[str, nn.Module]) -> str:
    """What is wrong with the layers, for a message."""
    layers = [f"{name}.{index}" for name, length in lists_of_layers(base).items() for index in range(length)]
    lacking = [name for name in layers if not any(is_inside(place, name) for place in found)]
    if lacking:
        return f"a mask would not reach {', '.join(lacking)}, which would run dense"
    return "set num_hidden_layers to the number of its layers"


def check_reached(base: Any, reached: set[int]) -> None:
    """
    Check, at the end of a forward of a base model outside of a graph, that all of its attention ran under the mask.
    `reached` are the `id` of the modules that did. A layer that was skipped, or runs in a graph of its own, passes.

    Raises:
        RuntimeError: If a module was replaced, removed, added or changed since the mask was attached.
    """
    sparse_attention = base.sparse_attention
    for name, length in sparse_attention.lists.items():
        if len(_find(base, name)) != length:
            raise RuntimeError(
                f"{name} of the {type(base).__name__} had {length} layers when its mask was attached, now "
                f"{len(_find(base, name))}: {_AGAIN}"
            )
    for index, place in enumerate(sparse_attention.places):
        module = _find(base, place)
        if id(module) not in reached and not _applies_mask(module):
            raise RuntimeError(
                f"{place} of the {type(base).__name__}, a {type(module).__name__}, ran without the mask: {_AGAIN}"
            )
        if module.mask_layer != index:
            other = sparse_attention.places[module.mask_layer]
            raise RuntimeError(f"{place} of the {type(base).__name__} ran under the mask of {other}: {_AGAIN}")


def _find(base: Any, name: str) -> Any:
    """The module with a name, or `()` if there is none, also inside of what wraps modules."""
    for part in name.split("."):
        found = vars(base).get("_modules", {}).get(part) if isinstance(base, nn.Module) else None
        base = getattr(base, part, ()) if found is None else found  # the attribute takes longer
    return base


def _applies_mask(module: Any) -> bool:
    """Whether an attention module runs under the mask whenever it runs."""
    if not isinstance(module, nn.Module):
        return False
    attributes, config = vars(module), getattr(module, "config", None)
    forward = attributes.get("forward")
    # Accelerate and torch.compile replace the forward of a module by one that calls it.
    replaced = forward is not None and "_old_forward" not in attributes
    return (
        "mask_layer" in attributes
        and (not replaced or hasattr(forward, "_torchdynamo_orig_callable"))
        and type(module).forward.__module__.startswith(("transformers.models.", f"{__package__}.families."))
        and (config is None or getattr(config, "_attn_implementation", None) in ATTENTION_NAMES)
    )
