"""Loading a model with its mask from a folder or the Hub."""

import pickle
import re
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError, StrictDataclassError
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import CONFIG_NAME, cached_file, logging

from ..checks import in_short, is_out_of_memory
from ..hub import check_available, check_path, check_revision, naming_the_file, read_config
from ..masks.mask_files import MASK_CONFIG_NAME, PARTS_FIELD, SEARCH_CONFIG_NAME, MaskFileError, check_undamaged
from ..masks.mask_sources import check_subfolder, find_descriptions, hub_arguments_in
from . import saving, stock_loading
from .architectures import check_architecture
from .bert import modeling_sparsebert
from .bert.auto_classes import register_auto_classes
from .bert.configuration_sparsebert import SparseBertConfig
from .inference.compiled_files import is_compiled
from .inference.compiled_loading import load_compiled
from .model_classes import model_class_of


logger = logging.get_logger(__name__)

# What a folder or repository without a model may hold, and how that is loaded.
_OTHERS = {
    "adapter_config.json": "an adapter: load it with peft, as AutoPeftModel.from_pretrained, and its mask comes along",
    MASK_CONFIG_NAME: "a mask without a model: give it to a model with sparsebert.attach",
}


def find_file(source: str | PathLike, name: str, **hub_arguments: Any) -> str | None:
    """Path of a file in a folder or Hub repository, or `None` if there is no such file."""
    return cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub_arguments)


def carries_mask(source: str | PathLike, **hub_arguments: Any) -> bool:
    """Whether a folder or Hub repository holds a model with a mask, frozen or still being searched."""
    check_available(source, CONFIG_NAME, **hub_arguments)
    register_auto_classes()
    if read_config(source, **hub_arguments).model_type == SparseBertConfig.model_type:
        return True
    names = (MASK_CONFIG_NAME, SEARCH_CONFIG_NAME)
    return any(find_file(source, name, **hub_arguments) for name in names)


def check_folder(
    source: str | PathLike, field: str = "", names: tuple[str, ...] = (CONFIG_NAME,), subfolder: str | None = None
) -> None:
    """
    Check that a folder holds one of the files `names` that are to be read from it, without reading it. Whether a Hub
    id exists is not asked. `field` is what names the source in the message.
    """
    check_path(source, field)
    folder = Path(source)
    if not folder.is_dir():
        return
    folder, field = folder / (subfolder or ""), f"{field}: " if field else ""
    if any((folder / each).is_file() for each in names):
        return
    found = sorted(path.parent for each in names for path in folder.glob(f"*/{each}"))
    hint = f"; there is one in {', '.join(map(str, found[:3]))}" if found else ""
    if names == (MASK_CONFIG_NAME,) and (folder / SEARCH_CONFIG_NAME).is_file():
        hint = ", whose mask is still being searched: load the model, and freeze it first"
    raise FileNotFoundError(f"{field}there is no {' or '.join(names)} in the folder {str(folder)!r}{hint}")


@naming_the_file()
def load(pretrained_model_name_or_path: str | PathLike, model_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """
    Load a model with its mask, frozen or still being searched: a SparseBERT, a model that [`attach`] gave a mask, or
    one whose parts have masks; or a model that [`compile`] compiled, with a mask or without. If the weights changed
    since the mask was saved next to them, there is a warning.

    Args:
        pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub id that `save_pretrained` wrote.
        model_class (`type`, *optional*): Class or `Auto*` class to load. Defaults to the one that was saved.
        kwargs: Arguments of `PreTrainedModel.from_pretrained`. `length_policy`, `last_token`, `diagonal`,
            `allow_empty_rows` and `skip_padding` change how the mask is used. Code in the folder or repository is
            never run, whatever `trust_remote_code` says.

    Returns:
        `PreTrainedModel`: The model, in evaluation mode.
    Raises:
        MaskFileError: If the mask is damaged, or there is a model but no mask, a mask without a model, or an adapter.
        OSError: If there is no such folder or repository, or it is not in the cache and the Hub cannot be reached.
        ValueError: If another file in the folder is damaged, if configuration and weights do not fit, if the class
            that was saved is not part of transformers, or for a reason listed under [`attach`].
    """
    source = pretrained_model_name_or_path
    check_revision(kwargs.get("revision"), source)
    if is_compiled(source, kwargs.get("subfolder")):
        return load_compiled(source, model_class, **kwargs)
    check_folder(source, names=(CONFIG_NAME, *_OTHERS), subfolder=kwargs.get("subfolder"))
    check_undamaged(Path(source, kwargs.get("subfolder") or ""))
    if not (model_class is None or hasattr(model_class, "from_pretrained")):
        raise ValueError(f"model_class must be a class of transformers, got {model_class!r}")
    # The code beside a model is for environments without this package.
    kwargs.pop("trust_remote_code", None)
    hub_arguments = hub_arguments_in(kwargs)
    check_subfolder(hub_arguments.get("subfolder"))
    check_available(source, CONFIG_NAME, **hub_arguments)
    if not find_file(source, CONFIG_NAME, **hub_arguments):
        for name, kind in _OTHERS.items():
            if find_file(source, name, **hub_arguments):
                raise MaskFileError(f"{source} holds {kind}")
    register_auto_classes()
    config = read_config(source, **hub_arguments)
    model_class = model_class or model_class_of(config)
    if isinstance(config, SparseBertConfig):
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            if not issubclass(model_class, modeling_sparsebert.SparseBertPreTrainedModel):
                raise ValueError(
                    f"model_class {model_class.__name__} would ignore the mask of {source}: use a SparseBert or Auto "
                    "class"
                )
        return read_model(model_class.from_pretrained, source, **kwargs)
    if PARTS_FIELD in vars(config):
        if not saving.plugin_enabled:
            raise ValueError(f"{source}: only sparsebert.plugin attaches masks of parts: call its enable() first")
        return read_model(model_class.from_pretrained, source, **kwargs)
    check_architecture(config.model_type)
    own_config: Any = getattr(model_class, "config_class", None)
    if own_config is not None:
        check_architecture(own_config.model_type)  # another class, as the configuration may name it, has no mask
    if find_descriptions(source, **hub_arguments) == (None, None):
        raise MaskFileError(f"{source}: there is no {MASK_CONFIG_NAME} and no {SEARCH_CONFIG_NAME} beside the model")
    if saving.plugin_enabled:
        return read_model(model_class.from_pretrained, source, **kwargs)
    if hasattr(model_class, "_model_mapping"):
        model_class = _get_model_class(config, model_class._model_mapping)
    read = partial(stock_loading.from_pretrained_with_mask, _from_pretrained, model_class)
    return read_model(read, source, **kwargs)


def load_any(source: str | PathLike, **hub_arguments: Any) -> PreTrainedModel:
    """A model with its mask, see [`load`], or one of transformers without a mask."""
    if carries_mask(source, **hub_arguments):
        return load(source, **hub_arguments)
    check_undamaged(Path(source, hub_arguments.get("subfolder") or ""))
    model_class = model_class_of(read_config(source, **hub_arguments))
    return read_model(model_class.from_pretrained, source, **hub_arguments)


def _from_pretrained(cls, source, *args, **kwargs):
    return cls.from_pretrained(source, *args, **kwargs)


def read_model(read: Callable[..., Any], source: str | PathLike, **kwargs: Any) -> Any:
    """
    What a function such as `from_pretrained` of a class makes of a folder or Hub id. What does not fit there is a
    `ValueError` that names the source. An attention implementation that its configuration asks for is ignored: it may
    be a kernel, which transformers would fetch from the Hub.
    """
    if kwargs.get("config") is None:
        kwargs.setdefault("attn_implementation", None)
    try:
        return read(source, **kwargs)
    except (OSError, HTTPError, ImportError, MaskFileError, StrictDataclassError):
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{source}: its pickled weights hold other things than tensors, and are not read") from error
    except Exception as error:
        named = re.search(rf"(?<!\w){re.escape(str(source))}(?!\w)", str(error))
        if is_out_of_memory(error) or (isinstance(error, ValueError) and named):
            raise
        if isinstance(error, RuntimeError) and "ignore_mismatched_sizes" in str(error):
            _, info = read(source, **kwargs | {"ignore_mismatched_sizes": True, "output_loading_info": True})
            raise misfit(str(source), *min(info["mismatched_keys"])) from error
        raise ValueError(f"{source}: the model cannot be loaded ({in_short(error)})") from error


def misfit(source: str, name: str, stored: Any, expected: Any) -> ValueError:
    """The error for weights of other sizes than those of the configuration beside them, to be raised."""
    return ValueError(
        f"{source}: its weights do not fit its configuration: {name} has shape {tuple(stored)}, expected "
        f"{tuple(expected)}"
    )
