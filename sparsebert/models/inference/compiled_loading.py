"""Loading a compiled model from its folder."""

from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from ...checks import check_choice, in_short
from ...files import ENGINE_NAME, HEAD_NAME
from ...hub import read_config
from ...learning.mask_description import MASK_FIELDS
from ...masks.mask_files import MASK_CONFIG_NAME
from ...masks.sparse_mask import SparseMask
from ..attaching import attach_saved
from ..bert.configuration_sparsebert import SparseBertConfig
from ..model_classes import model_class_of
from .compiled_files import check_unchanged, read_compiled
from .compiling import PRECISIONS, engine_module, finish


# What a loading may say that is so anyway, or does not matter for a folder.
_ACCEPTED = {
    "attn_implementation": (None,),
    "dtype": (None, "auto", "float32", torch.float32),
    "device_map": (None, "auto", "cpu", torch.device("cpu"), {"": "cpu"}, {"": torch.device("cpu")}),
}
_IGNORED = (
    "config",
    "adapter_kwargs",
    "cache_dir",
    "token",
    "revision",
    "local_files_only",
    "force_download",
    "trust_remote_code",
)


def load_compiled(source: str | PathLike, model_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """
    Read a compiled model from a folder.

    Args:
        source (`str` or `os.PathLike`): Folder that `save_pretrained` of a compiled model wrote.
        model_class (`type`, *optional*): Class of transformers that is asked for: that of the model, or of its base
            model.
        kwargs: How the mask is used, see [`load`]. Arguments for the Hub have no meaning and are ignored.

    Returns:
        `PreTrainedModel`: The model, in evaluation mode.
    Raises:
        ImportError: If the engine is not installed.
        ValueError: If a file is damaged, this version of the engine cannot read it, the folder holds another class, or
            an argument has no meaning for a compiled model.
    """
    folder = Path(source, kwargs.pop("subfolder", None) or "")
    described, found = read_compiled(folder)
    fields = {name: kwargs.pop(name) for name in MASK_FIELDS if name in kwargs}
    for name, value in kwargs.items():
        if name[0] != "_" and name not in _IGNORED and value not in _ACCEPTED.get(name, (None,)):
            raise ValueError(f"{name} {value!r} has no meaning for {folder}, which holds a compiled model")
    module = engine_module(described["engine"])
    check_choice(f"{folder / ENGINE_NAME}: precision", described["precision"], PRECISIONS)
    if missing := {CONFIG_NAME, HEAD_NAME, *module.FILE_NAMES} - described["files"].keys():
        raise ValueError(f"{folder / ENGINE_NAME} is damaged, {min(missing)} is not among its files")
    config = read_config(folder)
    own_class: Any = model_class_of(config)
    if not hasattr(own_class, "_from_config"):
        raise ValueError(f"{folder / CONFIG_NAME} is damaged: it has no architectures")
    with torch.device("meta"):
        model: Any = own_class._from_config(config, dtype=torch.float32)
    if MASK_CONFIG_NAME in described["files"]:
        mask = SparseMask.from_pretrained(folder)
        if isinstance(config, SparseBertConfig):
            config.changed(**fields)
            model.set_mask(config.used(mask))
        else:
            attach_saved(folder, model, mask, **fields)
    elif fields:
        raise ValueError(f"{min(fields)} has no meaning for {folder}, which has no mask")
    try:
        graph = module.open_graph(folder, described["precision"])
    except RuntimeError as error:
        engine = described["engine"]
        raise ValueError(
            f"{folder} was compiled with {engine} {described['versions'][engine]}, which {engine} {module.VERSION} "
            f"cannot read: install that version, or compile the model again ({str(error).strip().splitlines()[-1]})"
        ) from error
    compiled_as = {name: value for name, value in described.items() if name != "files"}
    finish(model, graph, compiled_as, fields.get("skip_padding", True))
    try:
        model.load_state_dict(safetensors.torch.load_file(folder / HEAD_NAME), assign=True)
    except (SafetensorError, RuntimeError) as error:
        reason = " ".join(in_short(error).split())
        raise ValueError(f"{folder / HEAD_NAME} does not fit the model ({reason}): compile it again") from error
    check_unchanged(folder, found)
    model.config.name_or_path = str(source)
    return _as_class(model, model_class, folder)


def _as_class(model, model_class, folder):
    """The model, or its base model if that is what was asked for."""
    name = getattr(model_class, "__name__", None)
    for part in (model, model.base_model):
        if model_class is None or name in ("AutoModel" if part is model.base_model else "", type(part).__name__):
            return part
    if hasattr(model_class, "_model_mapping"):
        return model
    raise ValueError(f"{folder} holds a compiled {type(model).__name__}: it cannot be loaded as {name}")
