"""Attaching a mask to a model, and detaching it: one module, one reference per layer, a class with a `forward`."""

import copy
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from huggingface_hub.errors import HTTPError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..attention.choosing.choice import SAVED_NAMES, sparse_name
from ..attention.interface import WITHOUT_INTERFACE
from ..attention.model_masks import sparse_attention_of, without_adapters
from ..checks import nearest
from ..hub import check_path, check_revision, explained
from ..learning.mask_description import OWN_FIELDS, allowed_fields
from ..learning.searches import SEARCHES
from ..masks.mask_files import MaskFileError, weights_changed
from ..masks.mask_sources import HUB_ARGUMENTS
from ..masks.patterns import PATTERNS, as_mask
from ..masks.shipped import SHIPPED, shipped_folder
from ..masks.sparse_mask import SparseMask
from .architectures import FAMILIES, attention_modules, carrier_of, configs_of, describe
from .coverage import check_layers, lists_of_layers
from .forward_with_mask import MaskedBase
from .inference.compiled_models import check_not_compiled
from .model_configs import (
    CONFIGS_BEFORE,
    STOCK_NAMED,
    AttachedConfig,
    Derived,
    derive_configs,
    derived_class,
)
from .saving import AttachedModel, check_base
from .sparse_attention import SparseAttention, get_sparse_attention


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..learning.attach_fields import AttachFields

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def make_sparse_attention(model: PreTrainedModel, mask: SparseMask | None = None, **fields: Any) -> SparseAttention:
    """The [`SparseAttention`] of a stock model, not attached yet: a given mask, or what the fields describe."""
    check_layers(model)
    return SparseAttention(describe(model, **fields), mask, carrier_of(model))


def attach_module(model: PreTrainedModel, sparse_attention: SparseAttention) -> None:
    """
    Attach a [`SparseAttention`] to the base model and, as a reference, to its self-attention modules. The base model
    inside a head gets a class whose `forward` prepares the mask.
    """
    base = model.base_model
    base.sparse_attention = sparse_attention
    modules = attention_modules(model)
    sparse_attention.places, sparse_attention.lists = tuple(modules), lists_of_layers(base)
    for index, module in enumerate(modules.values()):
        # Not through Module.__setattr__, which would register it again under every layer.
        vars(module).update(sparse_attention=sparse_attention, mask_layer=index)
    for part, mixin in _own_parts(base):
        _change_class(part, derived_class(mixin, type(part)))
    if base is not model:
        _change_class(base, derived_class(MaskedBase, type(base)))


def _own_parts(base: Any) -> list[tuple[nn.Module, type]]:
    """The parts of a base model of one of the `FAMILIES`, with what they derive from while it carries a mask."""
    family = FAMILIES.get(base.config.model_type)
    mixins = {} if family is None else family.PARTS
    names = ((part, {cls.__name__ for cls in type(part).__mro__} & mixins.keys()) for part in base.modules())
    return [(part, mixins[found.pop()]) for part, found in names if found]


def _change_class(module: Any, new: Any) -> None:
    old, module.__class__ = type(module), new
    # Accelerate keeps the forward of a module that it has dispatched, and calls that one.
    if getattr(vars(module).get("_old_forward"), "__func__", None) is old.forward:
        module._old_forward = MethodType(new.forward, module)


def read_mask(name: str | PathLike, **hub_arguments: Any) -> SparseMask:
    """The [`SparseMask`] of a folder or Hub id; a `ValueError` if there is none."""
    name = str(name)
    if name in SEARCHES:
        raise ValueError(f"mask {name!r} is a search: give the folder or Hub id of a mask it found")
    if name in PATTERNS and not Path(name).is_dir():
        raise ValueError(f"mask {name!r} is a pattern: give it as the pattern, or the folder or Hub id of a mask")
    name = shipped_folder(name)
    # A Hub id has a slash.
    if not {"/", "\\"} & {*name} and not Path(name).is_dir():
        raise nearest("mask", name, (*PATTERNS, *SEARCHES, *SHIPPED))
    try:
        check_path(name)
        check_revision(hub_arguments.get("revision"), name)
        return SparseMask.from_pretrained(name, **hub_arguments)
    except (OSError, HTTPError) as error:
        reason = explained(error) if isinstance(error, HTTPError) else error
        raise ValueError(f"mask {name!r} cannot be read as a folder or Hub id: {reason}") from error


def warn_of_changed_weights(source: str | PathLike, description: Path, hint: str = "") -> None:
    """
    Say so if a model was loaded that is not the one beside which its mask was saved. The weights are in the folder of
    the description of the mask, for the Hub in the cache.
    """
    if weights_changed(description, description.parent):
        logger.warning(
            f"{source}: the weights are not those that the mask was saved with.{' ' * bool(hint)}{hint} To end this "
            "warning, save this model again."
        )


def attach(
    model: Model,
    mask_or_search: SparseMask | torch.Tensor | str | PathLike,
    *,
    strict: bool = False,
    attn_implementation: str = "sparse_auto",
    **fields: "Unpack[AttachFields]",
) -> Model:
    """
    Give a stock model a mask, fixed or to be learned. Its configuration and weights stay as they are.

    Args:
        model (`PreTrainedModel`): A base model or head of one of the `ARCHITECTURES`, also inside a PEFT or
            sentence-transformers model.
        mask_or_search ([`SparseMask`], `torch.Tensor`, `str` or `os.PathLike`): A mask, also as a bool tensor
            `(n, n)`, `(H, n, n)` or `(L, H, n, n)` that is True where a query may attend to a key; the folder or Hub
            id of a mask; the name of one that comes with the package, such as `"minilm-l6-512-90"`; a key of
            `PATTERNS` or a key of `SEARCHES`.
        strict (`bool`, *optional*, defaults to `False`): Whether to refuse a mask that was found for another base
            model or revision, instead of warning.
        attn_implementation (`str`, *optional*, defaults to `"sparse_auto"`): Backend. `"eager"`, `"sdpa"` and
            `"flex_attention"` mean `"sparse_eager"`, `"sparse_sdpa"` and `"sparse_flex"`.
        fields: For a mask's folder or Hub id: `revision`, `subfolder` and `token`, see [`SparseMask.from_pretrained`].
            Fields of [`MaskDescription`]. For a search, [`SearchConfig`]: `mask_length`, `sparsity_weight`, ...; for a
            pattern, [`PatternConfig`]: `mask_length`, `pattern_kwargs`, `head_configuration`, `mask_seed`; for any
            mask: `length_policy`, `last_token`, `special_rows`, `diagonal`, `rest`, `allow_empty_rows`; for any mask
            or search: `skip_padding`.

    Returns:
        `model`, changed in place: it now has `sparse_attention`, `freeze`, `set_mask` and a `save_pretrained` that
        saves the mask too. `from_pretrained` and [`load`] read the mask back, and [`detach`] removes it.
    Raises:
        ValueError: If the architecture is not supported, the model carries a mask already, the mask does not fit it,
            or a field is wrong or has no meaning here. The model is unchanged then.
    """
    inner, options = without_adapters(model), cast("dict[str, Any]", fields)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"attach needs a model of transformers, got {type(inner).__name__}")
    check_not_compiled(inner, "attach")
    if sparse_attention_of(inner) is not None:
        raise ValueError(
            f"{type(inner).__name__} carries a mask already: change it with set_mask, or detach the model first"
        )
    for module in (inner, inner.base_model):
        if "_original_forward" in vars(module):  # where accelerate keeps the forward that it has wrapped
            raise ValueError(
                f"{type(module).__name__} was prepared by accelerate for mixed precision, and would run without the "
                "mask: attach the mask before Accelerator.prepare or a training in bf16 or fp16, or save the model, "
                "load it and attach the mask then"
            )
    if getattr(inner.base_model, "mask_files", None) is not None:
        raise ValueError(
            f"{type(inner).__name__} applies a mask by the code that is saved with it: load it with sparsebert.load"
        )
    sparse_name(attn_implementation)  # refuses a name before anything is changed
    if not isinstance(mask_or_search, (str, PathLike)):
        if not hasattr(inner.config, "num_attention_heads"):
            check_layers(inner)  # says what is wrong with the model
        mask_or_search = as_mask(mask_or_search, inner.config.num_attention_heads, "attach: mask_or_search")
    given = mask_or_search if isinstance(mask_or_search, str) else None
    if given in SEARCHES and given in PATTERNS:
        raise ValueError(f"{given!r} is a search and a registered pattern: register the pattern under another name")
    hub_arguments = {name: options.pop(name) for name in HUB_ARGUMENTS if name in options}
    if hub_arguments and (given in SEARCHES or given in PATTERNS or isinstance(mask_or_search, SparseMask)):
        raise ValueError(f"{next(iter(hub_arguments))} has meaning only for the folder or Hub id of a mask")
    for name in options.keys() - {*OWN_FIELDS}:
        raise nearest("field", name, allowed_fields(given))
    if refused := sorted(options.keys() - set(allowed_fields(given))):
        kind = "search" if given in SEARCHES else "pattern" if given in PATTERNS else "given mask"
        raise ValueError(
            f"{refused[0]} has no meaning for a {kind}: the fields may be {', '.join(allowed_fields(given))}"
        )
    mask = None
    if given in SEARCHES or given in PATTERNS:
        options["search" if given in SEARCHES else "pattern"] = given
    else:
        mask = mask_or_search if isinstance(mask_or_search, SparseMask) else read_mask(mask_or_search, **hub_arguments)
        check_base(inner, mask, strict)
    if (
        given in SEARCHES
        and inner.device.type == "meta"
        and any(hasattr(part, "_hf_hook") for part in inner.modules())
    ):
        raise ValueError(f"{type(inner).__name__} is offloaded, so a search would have no weights: attach it before")
    attach_described(inner, mask, attn_implementation, **options)
    if model is not inner and isinstance(model, nn.Module):
        own = set(inner.modules())
        if others := [type(part).__name__ for part in model.modules() if _is_other_model(part, own)]:
            logger.warning(
                f"attach: the first encoder of this {type(model).__name__} has the mask, and {', '.join(others)} stay "
                "dense unless a mask is attached to them too"
            )
    return model


def _is_other_model(module, own):
    return isinstance(module, PreTrainedModel) and module.base_model is module and module not in own


def attach_described(
    model: PreTrainedModel, mask: SparseMask | None, attn_implementation: str | None, **fields: Any
) -> None:
    """[`attach`] without its checks: a given mask, or what the fields describe."""
    if mask is not None:
        fields |= {"frozen": True, "mask_length": mask.length}
    sparse_attention = make_sparse_attention(model, mask, **fields)
    _own_configs(model)
    attach_module(model, sparse_attention.to(model.device).train(model.training))
    attach_class(model, attn_implementation)


def attach_saved(
    source: str | PathLike,
    model: PreTrainedModel,
    mask: SparseMask | None,
    attn_implementation: str | None = None,
    **fields: Any,
) -> None:
    """[`attach_described`] for a mask or search from a file, named in an error about it."""
    try:
        # Empty rows were accepted when the mask was frozen.
        attach_described(model, mask, attn_implementation, **{"allow_empty_rows": True} | fields)
    except ValueError as error:
        raise MaskFileError(f"{source}: {error}") from error


def _own_configs(model: PreTrainedModel) -> None:
    """
    Give a model copies of its configurations, of which other models may have been made too. Base model and attention
    modules share one, with all modules that have had that of an attention: layers that were copied, and the parts of a
    composite model, have had their own. A model within, such as the stack of a T5, keeps the fields of its own.
    """
    shared = {id(vars(module).get("config")) for module in attention_modules(model).values()}
    parts = [
        part
        for part in model.base_model.modules()
        if id(vars(part).get("config", model)) in shared and not isinstance(part, PreTrainedModel)
    ]
    copies: dict[int, Any] = {}
    for module in model.modules():
        attributes = vars(module)
        if isinstance(config := attributes.get("config"), PreTrainedConfig):
            attributes["config"] = copy.deepcopy(config, copies)
            attributes[CONFIGS_BEFORE] = (*attributes.get(CONFIGS_BEFORE, ()), config)
    vars(model.base_model)["config"] = model.config
    for part in parts:
        vars(part)["config"] = model.config


def attach_class(model: PreTrainedModel, attn_implementation: str | None) -> None:
    """Give a model with an attached module the class of an attached model, and its attention implementation."""
    stock = model.config._attn_implementation
    vars(model)["_stock_attention"] = None if stock in SAVED_NAMES else stock
    derive_configs(configs_of(model))
    _change_class(model, derived_class(AttachedModel, type(model)))
    model.set_attn_implementation(attn_implementation or "sparse_auto")


def detach(model: Model) -> Model:
    """
    Remove the mask: the model becomes what it was before [`attach`], with its current weights. Saved or pushed in the
    place of a model with a mask, it also replaces that mask, unless the plugin is disabled.

    Args:
        model (`PreTrainedModel`): A model that [`attach`] gave a mask.

    Returns:
        `model`, changed in place.
    Raises:
        ValueError: If no mask was attached to it.
    """
    inner = without_adapters(model)
    check_not_compiled(inner, "detach")
    if not isinstance(inner, AttachedModel):
        base = getattr(inner, "base_model", None)
        hint = "there is nothing to detach"
        if isinstance(base, AttachedModel):
            hint = f"it was attached to its {type(base).__name__}, which is to be given"
        elif sparse_attention_of(inner) is not None and inner.config.model_type != "sparsebert":
            hint = "it was attached to a model with a head that contains this one, which is to be given"
        raise ValueError(f"no mask was attached to this {type(inner).__name__}: {hint}")
    attached: Any = inner
    attributes, base = vars(attached), attached.base_model
    holders = [part for part in base.modules() if isinstance(part, PreTrainedModel)]  # innermost last
    own = {id(module): part.config for part in holders for module in part.modules()}
    for module in attention_modules(attached).values():
        if "config" in vars(module):  # a model that this one was made a part of has given it another
            vars(module)["config"] = own[id(module)]
        for name in ("sparse_attention", "mask_layer"):
            vars(module).pop(name, None)  # a layer that was added since has none
    del base.sparse_attention
    for part, _ in _own_parts(base):
        if isinstance(part, Derived):  # it was not added since
            _change_class(part, part.stock_class)
    for part in {base, attached}:
        _change_class(part, part.stock_class)
    for config in configs_of(attached):
        if isinstance(config, AttachedConfig):
            config.__class__ = config.stock_class
            vars(config).pop(STOCK_NAMED, None)
    for module in attached.modules():
        # They stay for a model made of several, which holds one of them, if the current one says something else.
        before = vars(module).get(CONFIGS_BEFORE, ())
        if before and all(config.to_dict() == module.config.to_dict() for config in before):
            vars(module).pop(CONFIGS_BEFORE)
    stock = attributes.pop("_stock_attention")
    if base.config.model_type in WITHOUT_INTERFACE:  # transformers would refuse to set it
        base.config._attn_implementation = stock
    else:
        attached.set_attn_implementation(stock)
    return model


def sparsity_loss(model: nn.Module) -> torch.Tensor:
    """
    The penalty `lambda * ||M||_1` on the mask sampled in the last training forward, for loops that compute their own
    loss. A loss of several forwards needs it once.

    Args:
        model (`PreTrainedModel`): A model with a mask.

    Returns:
        `torch.Tensor`: A scalar to add to the loss; 0 if nothing was sampled or the search has a target.
    """
    return get_sparse_attention(model).sparsity_loss()


def sparsity(model: nn.Module) -> float:
    """
    Fraction of attention entries that the mask of a model removes at its own length.

    Args:
        model (`PreTrainedModel`): A model with a frozen mask, or with a search, which is thresholded for this.

    Returns:
        `float`
    """
    return get_sparse_attention(model).sparsity()
