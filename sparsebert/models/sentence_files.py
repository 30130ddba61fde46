"""What sentence-transformers keeps beside a model: its modules (pooling, normalization, ...) and settings."""

import json
import logging
import os
import shutil
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers.utils import cached_file

from ..masks.mask_sources import IF_THERE


logger = logging.getLogger(__name__)

_MODULES_NAME = "modules.json"
_SETTINGS = ("config_sentence_transformers.json", "sentence_*_config.json")


# The last line of a command that writes a model with a mask.
IMPORT_FIRST = (
    "to load it, `import sparsebert` first, then sparsebert.load, from_pretrained or SentenceTransformer: without it, "
    "transformers refuses"
)


def sentence_length(folder: str | PathLike) -> int | None:
    """The number of tokens that sentence-transformers cuts texts to; `None` for a folder that is not one of its."""
    folder = Path(folder)
    if not (folder / _MODULES_NAME).is_file():
        return None
    settings = [*sorted(folder.glob(_SETTINGS[1])), folder / "tokenizer_config.json"]
    read = [_read(path, dict) or {} for path in settings if path.is_file()]
    return next((one[name] for one in read for name in ("max_seq_length", "model_max_length") if one.get(name)), None)


def check_not_a_module(source: str | PathLike, subfolder: str | None = None, **hub_arguments: Any) -> None:
    """
    Check that a model is not a module of a sentence-transformers model in a folder of its own, as older versions wrote
    it: the pooling beside that folder would be lost.

    Raises:
        ValueError: If `modules.json` in the folder or repository above names it.
    """
    root = str(source)
    if subfolder:
        above, name = os.path.split(subfolder)
    elif Path(root).is_dir():
        root, name = os.path.split(os.path.abspath(root))
        above = ""
    else:
        return
    path = cached_file(root, _MODULES_NAME, subfolder=above, **hub_arguments, **IF_THERE)
    modules = _read(Path(path), list) if path else None
    if any(isinstance(module, dict) and module.get("path") == name for module in modules or ()):
        whole = os.path.join(root, above) if above else root
        raise ValueError(
            f"model {os.path.join(whole, name)} is a module of the sentence-transformers model {whole}, whose pooling "
            f"would be lost: give the folder that SentenceTransformer({whole!r}).save_pretrained writes"
        )


def _read(path, kind):
    """The JSON of a file; `None`, with a warning, if it does not hold what is expected."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if isinstance(content, kind):
        return content
    logger.warning(f"{path} is damaged: it is passed over")
    return None


def copy_sentence_files(
    source: str | PathLike, folder: Path, length: int | None = None, subfolder: str | None = None, **hub_arguments: Any
) -> None:
    """
    Copy what sentence-transformers keeps beside a model from the folder or repository that it was loaded from, if it
    is there. `length` replaces the number of tokens that texts are cut to.
    """
    root = Path(source)
    if not root.is_dir():
        patterns = ["/".join(filter(None, (subfolder, each))) for each in (_MODULES_NAME, *_SETTINGS, "[0-9]*_*/*")]
        with suppress(OSError):  # without a connection: what is in the cache
            root = Path(snapshot_download(str(source), allow_patterns=patterns, **hub_arguments))
    root = root / (subfolder or "")
    if not (root / _MODULES_NAME).is_file():
        return
    modules = _read(root / _MODULES_NAME, list)
    if modules is None:
        return
    places = [str(module.get("path", "")) for module in modules if isinstance(module, dict)]
    for name in places:
        if name and Path(name).name == name and (root / name).is_dir():
            shutil.copytree(root / name, folder / name, dirs_exist_ok=True)
    for path in (root / _MODULES_NAME, *(path for pattern in _SETTINGS for path in root.glob(pattern))):
        shutil.copyfile(path, folder / path.name)
        settings = _read(path, (dict, list)) or {}
        if length is not None and "max_seq_length" in settings:
            (folder / path.name).write_text(json.dumps(settings | {"max_seq_length": length}, indent=2) + "\n")
