"""
What `import sparsebert` adds to `from_pretrained` of stock models: a mask saved next to the weights is attached.

The files of an attached model are stock, so nothing in them can lead transformers to the mask. `from_pretrained` of
the class, which all others end in (`Auto*`, `pipeline`, sentence-transformers), is where the mask has to enter.
"""

import copy
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import hub, logging

from ..attention.choosing.choice import ATTENTION_NAMES, sparse_name
from ..attention.model_masks import sparse_attention_of
from ..masks.mask_files import MASK_CONFIG_NAME, SEARCH_CONFIG_NAME, MaskFileError
from ..masks.mask_sources import check_subfolder, find_descriptions, hub_arguments_in
from ..masks.sparse_mask import SparseMask
from ..models.architectures import ARCHITECTURES, describe
from ..models.attaching import (
    MASK_FIELDS,
    become_attached,
    make_sparse_attention,
    put_on,
    register,
    warn_of_changed_weights,
)
from ..models.bert.configuration_sparsebert import SparseBertConfig, read_search
from ..models.bert.remote_code import NOTE_FIELD, forget_saved_fields, warn_of_missing_mask
from ..models.derived import Derived
from ..models.saving import SparseModelMixin


logger = logging.get_logger(__name__)

# The commit that a revision is now, so that the cache can answer. Older transformers ask the Hub for every file.
_resolve_revision: Any = getattr(hub, "resolve_revision", None)
_stock_from_pretrained: Any = vars(PreTrainedModel)["from_pretrained"].__func__
_stock_save_pretrained: Any = PreTrainedModel.save_pretrained


def _searching_class(model_class: Any, source: Any, fields: dict[str, Any]) -> Any:
    """A class whose models have mask logits when transformers reads the weights."""

    class SearchingModel(model_class):
        stock_class = model_class
        _keep_in_fp32_modules_strict = {"mask_logits", *(model_class._keep_in_fp32_modules_strict or ())}

        def post_init(self):
            if sparse_attention_of(self) is None:
                try:
                    sparse_attention = make_sparse_attention(self, describe(self, **fields))
                except (ValueError, StrictDataclassError) as error:
                    raise MaskFileError(f"{source}: {' '.join(str(error).split())}") from error
                register(self, sparse_attention)
            super().post_init()

    # Transformers looks up what it knows about a class by these.
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(SearchingModel, name, getattr(model_class, name))
    return SearchingModel


def _load_searching(cls, source, path, args, kwargs, attn_implementation, fields):
    """The model and its loading information."""
    made = _searching_class(cls, source, read_search(path) | fields)
    model, info = _stock_from_pretrained(made, source, *args, **kwargs | {"output_loading_info": True})
    if missing := [name for name in info["missing_keys"] if name.endswith("mask_logits")]:
        raise MaskFileError(
            f"{source}: the weights lack {missing[0]}, though {SEARCH_CONFIG_NAME} says it is searched"
        )
    model.__class__ = model.stock_class
    become_attached(model, attn_implementation)
    return model, info


def attach_from(
    source: str | PathLike,
    model: PreTrainedModel,
    mask: SparseMask | None,
    attn_implementation: str | None = None,
    **fields: Any,
) -> None:
    """
    Attach a mask or search that was read from a file.

    Args:
        source (`str` or `os.PathLike`): Where from, for the message.
        model (`PreTrainedModel`): The stock model, changed in place.
        mask ([`SparseMask`], *optional*): `None` if `fields` name a search.
        attn_implementation (`str`, *optional*): Backend, or a stock name that means one.
        fields: How the mask is used, see [`attach`].

    Raises:
        MaskFileError: If it does not fit the model.
    """
    try:
        # Empty rows were accepted when the mask was frozen.
        put_on(model, mask, sparse_name(attn_implementation), **{"allow_empty_rows": True} | fields)
    except ValueError as error:
        raise MaskFileError(f"{source}: {error}") from error


def _plain_config(config, attn_implementation):
    """A configuration for the stock model, and the attention implementation that it or the caller asks for."""
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
        attn_implementation = attn_implementation or config._attn_implementation
        if isinstance(config, Derived):
            config.__class__ = config.stock_class
        if config._attn_implementation in ATTENTION_NAMES:
            config._attn_implementation = None  # what `detach` goes back to
    return config, attn_implementation


def _may_carry(cls):
    """Whether the models of a class are stock ones that can carry a mask."""
    model_type = getattr(cls.config_class, "model_type", None)
    remote = cls.__module__.partition(".")[0] == "transformers_modules"  # it knows what to do with its files
    return model_type in ARCHITECTURES and model_type != SparseBertConfig.model_type and not remote


@wraps(_stock_from_pretrained)
def _from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
    cls = cls.stock_class if issubclass(cls, Derived) else cls
    source = pretrained_model_name_or_path
    if source is None or not _may_carry(cls):
        return _stock_from_pretrained(cls, source, *args, **kwargs)
    hub_arguments = hub_arguments_in(kwargs)
    if _resolve_revision is not None and not Path(source).exists():
        pinning = ("revision", "token", "local_files_only", "cache_dir")
        known = {name: hub_arguments[name] for name in pinning if name in hub_arguments}
        revision = _resolve_revision(source, **known)
        if revision is not None:
            kwargs["revision"] = hub_arguments["revision"] = revision
    found = find_descriptions(source, **hub_arguments)
    if found == (None, None):
        loaded = _stock_from_pretrained(cls, source, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _attach_of_base(model, source)
        if sparse_attention_of(model) is None and hasattr(model.config, NOTE_FIELD):
            warn_of_missing_mask(source, "the model was loaded without a mask")
            forget_saved_fields(model.config)
        return loaded
    check_subfolder(hub_arguments.get("subfolder"))
    fields = {name: kwargs.pop(name) for name in MASK_FIELDS if name in kwargs}
    given = kwargs.pop("attn_implementation", None)
    config, attn_implementation = _plain_config(kwargs.pop("config", None), given)
    attn_implementation = sparse_name(attn_implementation)
    if config is not None:
        kwargs["config"] = config
    if given is not None and given not in ATTENTION_NAMES:
        kwargs["attn_implementation"] = given
    if found.mask is None:
        model, info = _load_searching(cls, source, found.search, args, kwargs, attn_implementation, fields)
        return (model, info) if kwargs.get("output_loading_info") else model
    mask = SparseMask.from_pretrained(source, **hub_arguments)
    loaded = _stock_from_pretrained(cls, source, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if sparse_attention_of(model) is None:  # an adapter brings a mask of its own
        over = f"If a model without a mask was saved over one that had it, delete {MASK_CONFIG_NAME}."
        warn_of_changed_weights(source, found.mask, over)
        attach_from(source, model, mask, attn_implementation, **fields)
    return loaded


def _attach_of_base(model, source):
    """Attach the mask of the base model that transformers went on to from the folder of an adapter."""
    base = model.config.name_or_path
    if not base or str(base) == str(source) or sparse_attention_of(model) is not None:
        return
    found = find_descriptions(base)
    if found.mask is not None:
        attach_from(base, model, SparseMask.from_pretrained(base))
    elif found.search is not None:
        logger.warning(
            f"{source}: the base model {base} has a mask that is being searched, and was loaded without it: load the "
            "base model first, then the adapter into it"
        )


def _save_mask_of_encoder(encoder, save_directory, is_main_process=True, *args, **kwargs):
    """The encoder in a model with a mask was saved alone."""
    sparse_attention = encoder.sparse_attention
    if sparse_attention.mask is not None and is_main_process:
        sparse_attention.mask.write_beside_model(Path(save_directory))
    elif sparse_attention.searching and isinstance(encoder.config, Derived):
        logger.warning(
            f"{type(encoder).__name__} is saved without its search: save the model that it is part of, from which "
            "load(folder, AutoModel) reads the encoder"
        )


@wraps(_stock_save_pretrained)
def _save_pretrained(self, *args, **kwargs):
    own = "sparse_attention" in self._modules and not isinstance(self, SparseModelMixin)
    if own:
        self.sparse_attention.record_progress()
    result = _stock_save_pretrained(self, *args, **kwargs)
    if own:
        _save_mask_of_encoder(self, *args, **kwargs)
        return result
    parts = [name for name, part in self.named_modules() if "sparse_attention" in part._modules]
    # Models with a mask of their own save it, and a SparseBERT has it in its configuration.
    if parts and not isinstance(self, SparseModelMixin) and isinstance(self.get_submodule(parts[0]).config, Derived):
        logger.warning(
            f"{type(self).__name__} is saved without the mask of its part {', '.join(parts)}: save that part in a "
            "folder of its own, too, and attach the mask again after loading."
        )
    return result


def extend_stock_loading() -> None:
    """
    Have `from_pretrained` of stock models attach the mask beside the weights; others load as before. `save_pretrained`
    of a model made of several warns of masks that it does not save.
    """
    stock: Any = PreTrainedModel
    stock.save_pretrained = _save_pretrained
    stock.from_pretrained = classmethod(_from_pretrained)
