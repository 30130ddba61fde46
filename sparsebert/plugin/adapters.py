"""A mask travels in the folder of an adapter that was trained with it, and is attached when PEFT loads the adapter."""

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, logging

from ..attention.model_masks import sparse_attention_of, without_adapters
from ..file_kinds import check_readable
from ..learning.mask_description import STATE_FIELDS
from ..learning.search_files import read_search
from ..masks.mask_files import MASK_LOGITS_NAME, MaskFileError
from ..masks.mask_sources import check_subfolder, find_descriptions, hub_arguments_in
from ..masks.sparse_mask import SparseMask
from ..models.architectures import check_architecture
from ..models.attaching import attach_saved
from ..models.model_configs import without_mask
from ..models.parts import warn_of_parts
from ..models.saving import keep_inside, mark_adapter, remove_mask, save_with_adapter, unmarked
from .replacements import by_name


logger = logging.get_logger(__name__)

# PEFT's name of an adapter that has none, which is saved in the folder itself.
DEFAULT = "default"
# Fields in which the search of an adapter may differ from that of the model that it is loaded into.
_MAY_DIFFER = {*STATE_FIELDS, "skip_padding"}


def attach_mask_of_adapter(
    model: torch.nn.Module,
    source: str | PathLike,
    is_trainable: bool = False,
    adapter: str = DEFAULT,
    **hub_arguments: Any,
) -> None:
    """Give a model the mask that was saved with an adapter in `source`, if there is one. `adapter`: its name here."""
    inner: Any = without_adapters(model)
    found = find_descriptions(source, **hub_arguments)
    if found == (None, None):
        if _is_marked(source, hub_arguments):
            raise MaskFileError(f"{without_mask(source)}: if the connection failed, try again")
        return
    if not isinstance(inner, PreTrainedModel):
        raise MaskFileError(
            f"{source}: the adapter was trained with a mask, which a {type(inner).__name__} cannot have: load it as a "
            "PeftModel of a model of transformers"
        )
    check_subfolder(hub_arguments.get("subfolder"))
    check_architecture(inner.config.model_type)
    if found.mask is not None:
        _attach_frozen(model, source, SparseMask.from_pretrained(source, **hub_arguments), adapter)
        return
    assert found.search is not None
    fields, logits = read_search(found.search), _read_logits(source, hub_arguments)
    if sparse_attention_of(inner) is None:
        attach_saved(source, inner, None, **fields)
    sparse_attention = sparse_attention_of(inner, adapter)
    parameter = sparse_attention.mask_logits
    if parameter is None:
        raise MaskFileError(
            f"{source}: the mask of the adapter is still being searched, but that of the model is frozen: load the "
            "adapter into a model without a mask"
        )
    config = sparse_attention.config
    for name in sorted(fields.keys() - _MAY_DIFFER):
        if fields[name] != getattr(config, name):
            raise MaskFileError(
                f"{source}: the search of the adapter has {name} {fields[name]!r}, that of the model "
                f"{getattr(config, name)!r}: load the adapter into a model without a mask"
            )
    if parameter.shape != logits.shape:
        raise MaskFileError(
            f"{source}: the logits of the adapter have shape {tuple(logits.shape)}, those of the model "
            f"{tuple(parameter.shape)}"
        )
    progress = fields.get("search_progress")
    progress = 1.0 if progress is None else progress
    if type(progress) not in (int, float) or not 0 <= progress <= 1:
        raise MaskFileError(f"{source}: search_progress must be a number from 0 to 1, got {progress!r}")
    with torch.no_grad():
        parameter.copy_(logits)
    sparse_attention.progress.fill_(progress)
    if fields.get("pruned") and not config.pruned:
        sparse_attention.start_pruning()
    parameter.requires_grad_(is_trainable)


def _attach_frozen(model, source, mask, adapter):
    sparse_attention, active = sparse_attention_of(model, adapter), _active(model)
    if sparse_attention is None:
        if active and adapter not in active:
            logger.warning(f"{source}: the mask of this adapter is now that of the model, also under {active[0]}.")
        attach_saved(source, without_adapters(model), mask)
        return
    if sparse_attention.mask == mask:
        return
    waits = sparse_attention.mask is not None and active and adapter not in active
    if not waits and (sparse_attention.mask is not None or sparse_attention.searching):
        logger.warning(
            f"{source}: the adapter was trained with another mask than that of the model, so the model now uses the "
            "mask of the adapter."
        )
    try:
        used = sparse_attention.config.used(mask)
        used.check_fits(sparse_attention.num_layers, sparse_attention.carrier.num_heads)
        if waits:
            _remember_mask(model)
            sparse_attention.masks_of_adapters[adapter] = used
        else:
            sparse_attention.set_mask(used, search=mask.metadata.get("search"))
    except ValueError as error:
        raise MaskFileError(f"{source}: {error}") from error


def _path_of(source, name, hub_arguments):
    if Path(source).is_dir():
        return Path(source, hub_arguments.get("subfolder") or "", name)
    return Path(hf_hub_download(str(source), name, **hub_arguments))


def _is_marked(source, hub_arguments):
    """Whether the configuration of an adapter says that it was saved with a mask."""
    try:
        fields = json.loads(_path_of(source, ADAPTER_CONFIG_NAME, hub_arguments).read_text(encoding="utf-8"))
    except (OSError, ValueError, HTTPError):
        return False  # which PEFT has read, or does without
    return unmarked(fields) != fields


def _read_logits(source, hub_arguments):
    """The logits of a search beside an adapter."""
    path = _path_of(source, MASK_LOGITS_NAME, hub_arguments)
    try:
        check_readable(path)
        return safetensors.torch.load_file(path)["mask_logits"]
    except (OSError, ValueError, SafetensorError, KeyError) as error:
        raise MaskFileError(f"{path}: not the logits of a search ({error!r})") from error


def _active(model):
    """Names of the active adapters of a model of PEFT or transformers."""
    found = getattr(model, "active_adapters", ())
    try:
        return list(found() if callable(found) else found)
    except ValueError:  # of transformers, which has no adapter
        return []


def _remember_mask(model):
    """Remember the mask that a model has now as that of its active adapters."""
    sparse_attention = sparse_attention_of(model)
    for name in _active(model):
        sparse_attention.masks_of_adapters[name] = sparse_attention.mask


def set_adapter(stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """What `set_adapter` of a model of PEFT or transformers does while the plugin is enabled: the mask goes along."""
    sparse_attention = sparse_attention_of(model)
    masks = getattr(sparse_attention, "masks_of_adapters", {})
    if masks and sparse_attention.mask is not None:
        _remember_mask(model)
    result = stock(model, *args, **kwargs)
    for name in _active(model) if masks and sparse_attention is sparse_attention_of(model) else ():
        if name not in masks:
            logger.warning(f"{name}: the adapter has no mask of its own, and runs through the one that the model has.")
        if masks.get(name) not in (None, sparse_attention.mask):
            sparse_attention.set_mask(masks[name], search=masks[name].metadata.get("search"))
    return result


def load_adapter(stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """What `load_adapter` of a model of PEFT or transformers does while the plugin is enabled."""
    if getattr(sparse_attention_of(model), "mask", None) is not None:
        _remember_mask(model)
    result = stock(model, *args, **kwargs)
    arguments = by_name(stock, model, *args, **kwargs)
    source = arguments.get("model_id", arguments.get("peft_model_id"))
    if source is not None:
        trained, adapter = arguments.get("is_trainable", False), arguments.get("adapter_name") or DEFAULT
        hub_arguments = hub_arguments_in({**(arguments.get("adapter_kwargs") or {}), **arguments})
        attach_mask_of_adapter(model, source, trained, adapter, **hub_arguments)
    return result


def adapter_config(stock: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What `from_json_file` of a configuration of PEFT does while the plugin is enabled, which attaches the mask."""
    return unmarked(stock(cls, *args, **kwargs))


def save_adapters(stock: Callable[..., Any], model: Any, save_directory: str, *args: Any, **kwargs: Any) -> Any:
    """What `save_pretrained` of a model of PEFT does while the plugin is enabled."""
    arguments = by_name(stock, model, save_directory, *args, **kwargs)
    folders = {}
    if arguments.get("is_main_process", True):
        names = arguments.get("selected_adapters") or model.peft_config
        folders = {name: Path(save_directory, "" if name == DEFAULT else name) for name in names}
    dense = sparse_attention_of(model) is None
    for folder in folders.values():
        if dense:
            remove_mask(folder, adapter=True)
        else:
            keep_inside(folder)
    result = stock(model, save_directory, *args, **kwargs)
    for name, folder in {}.items() if dense else folders.items():
        sparse_attention = sparse_attention_of(model, name)
        other = None if name in _active(model) else sparse_attention.masks_of_adapters.get(name)
        if other is None:
            save_with_adapter(sparse_attention, folder)
        else:
            other.save_pretrained(folder)
            mark_adapter(folder, other)
    if isinstance(inner := without_adapters(model), PreTrainedModel):
        warn_of_parts(inner)
    return result
