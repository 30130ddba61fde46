"""Loading a stock model with the mask that was saved beside its weights, to which nothing in its stock files leads."""

import copy
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, hub

from ..attention.choosing.choice import ATTENTION_NAMES, SAVED_NAMES, sparse_name
from ..attention.model_masks import sparse_attention_of
from ..learning.mask_description import MASK_FIELDS
from ..learning.search_files import read_search
from ..masks.mask_files import MASK_CONFIG_NAME, NOTE_FIELD, PARTS_FIELD, SEARCH_CONFIG_NAME, MaskFileError
from ..masks.mask_sources import check_subfolder, find_descriptions, hub_arguments_in
from ..masks.sparse_mask import SparseMask
from .architectures import ARCHITECTURES
from .attaching import attach_class, attach_module, attach_saved, make_sparse_attention, warn_of_changed_weights
from .bert.configuration_sparsebert import SparseBertConfig
from .model_configs import Derived, saved_fields, without_mask


# The commit that a revision is now, so that the cache can answer. Older transformers ask the Hub for every file.
_resolve_revision: Any = getattr(hub, "resolve_revision", None)


def _searching_class(model_class: Any, source: Any, fields: dict[str, Any]) -> Any:
    """A class whose models have mask logits when transformers reads the weights."""

    class SearchingModel(model_class):
        stock_class = model_class
        _keep_in_fp32_modules_strict = {"mask_logits", *(model_class._keep_in_fp32_modules_strict or ())}

        def post_init(self):
            if sparse_attention_of(self) is None:
                try:
                    attach_module(self, make_sparse_attention(self, **fields))
                except ValueError as error:
                    raise MaskFileError(f"{source}: {error}") from error
            super().post_init()

    # Transformers looks up what it knows about a class by these.
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(SearchingModel, name, getattr(model_class, name))
    return SearchingModel


def _load_searching(read, cls, source, path, args, kwargs, attn_implementation, fields):
    """The model and its loading information."""
    made = _searching_class(cls, source, read_search(path) | fields)
    model, info = read(made, source, *args, **kwargs | {"output_loading_info": True})
    if missing := [name for name in info["missing_keys"] if name.endswith("mask_logits")]:
        raise MaskFileError(
            f"{source}: the weights lack {missing[0]}, though {SEARCH_CONFIG_NAME} says it is searched"
        )
    model.__class__ = model.stock_class
    attach_class(model, attn_implementation)
    return model, info


def _plain_config(config, attn_implementation):
    """A configuration for the stock model, and the attention implementation that it or the caller asks for."""
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
        attn_implementation = attn_implementation or config._attn_implementation
        if isinstance(config, Derived):
            config.__class__ = config.stock_class
        if config._attn_implementation in (*ATTENTION_NAMES, *SAVED_NAMES):
            config._attn_implementation = None  # what `detach` goes back to
    return config, attn_implementation


def may_carry(cls: Any) -> bool:
    """Whether the models of a class are stock ones that can carry a mask."""
    model_type = getattr(getattr(cls, "config_class", None), "model_type", None)
    remote = cls.__module__.partition(".")[0] == "transformers_modules"  # it knows what to do with its files
    return model_type in ARCHITECTURES and model_type != SparseBertConfig.model_type and not remote


def _read_at(read, commit, cls, source, *args, **kwargs):
    """What `read` returns, with a configuration that names the commit, which newer transformers do not."""
    loaded = read(cls, source, *args, **kwargs)
    config = (loaded[0] if isinstance(loaded, tuple) else loaded).config
    if commit is not None and str(config.name_or_path) == str(source):  # not that of an adapter's base model
        config._commit_hash = commit
    return loaded


def from_pretrained_with_mask(
    read: Callable[..., Any], cls: Any, source: str | PathLike | None, *args: Any, **kwargs: Any
) -> Any:
    """
    What `from_pretrained` of a class returns, with the mask that is beside the weights, if there is one. `read(cls,
    source, *args, **kwargs)` loads the weights; how the mask is used is among the arguments, see [`load`].
    """
    cls = cls.stock_class if issubclass(cls, Derived) else cls
    if source is None or not may_carry(cls):
        return read(cls, source, *args, **kwargs)
    hub_arguments = hub_arguments_in(kwargs)
    if _resolve_revision is not None and not Path(source).exists():
        pinning = ("revision", "token", "local_files_only", "cache_dir")
        known = {name: hub_arguments[name] for name in pinning if name in hub_arguments}
        revision = _resolve_revision(source, **known)
        if revision is not None:
            kwargs["revision"] = hub_arguments["revision"] = revision
        read = partial(_read_at, read, getattr(revision, "resolved", None))
    found = find_descriptions(source, **hub_arguments)
    if found == (None, None):
        loaded = read(cls, source, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _attach_of_base(model, source)
        of_parts = PARTS_FIELD in vars(model.config)
        if sparse_attention_of(model) is None and hasattr(model.config, NOTE_FIELD) and not of_parts:
            raise MaskFileError(
                f"{without_mask(source)}: if the connection failed, try again; to have the model without its mask, "
                f"delete {', '.join(saved_fields(model.config.model_type))} from its {CONFIG_NAME}"
            )
        return loaded
    check_subfolder(hub_arguments.get("subfolder"))
    fields = {name: kwargs.pop(name) for name in MASK_FIELDS if name in kwargs}
    given = kwargs.pop("attn_implementation", None)
    config, attn_implementation = _plain_config(kwargs.pop("config", None), given)
    sparse_name(attn_implementation)  # refuses a name before anything is loaded
    if config is not None:
        kwargs["config"] = config
    if config is None or given not in (None, *ATTENTION_NAMES):
        kwargs["attn_implementation"] = None if given in ATTENTION_NAMES else given
    if found.mask is None:
        model, info = _load_searching(read, cls, source, found.search, args, kwargs, attn_implementation, fields)
        return (model, info) if kwargs.get("output_loading_info") else model
    mask = SparseMask.from_pretrained(source, **hub_arguments)
    loaded = read(cls, source, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if sparse_attention_of(model) is None:  # an adapter brings a mask of its own
        over = f"If a model without a mask was saved over one that had it, delete {MASK_CONFIG_NAME}."
        warn_of_changed_weights(source, found.mask, over)
        attach_saved(source, model, mask, attn_implementation, **fields)
    else:
        sparse_attention = sparse_attention_of(model)
        sparse_attention.config = config = sparse_attention.config.changed(**fields)
        if sparse_attention.mask is not None:
            sparse_attention.set_mask(config.used(sparse_attention.mask), search=config.search)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
    return loaded


def _attach_of_base(model, source):
    """Attach the mask of the base model that transformers went on to from the folder of an adapter."""
    base = model.config.name_or_path
    if not base or str(base) == str(source) or sparse_attention_of(model) is not None:
        return
    found = find_descriptions(base)
    if found.mask is not None:
        attach_saved(base, model, SparseMask.from_pretrained(base))
    elif found.search is not None:
        raise MaskFileError(
            f"{source}: the base model {base} has a mask that is being searched: load the base model first, then the "
            "adapter into it"
        )
