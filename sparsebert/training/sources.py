"""Folders and Hub ids that a run reads: what must be there, checked before any weights are read."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..hub import check_available
from ..masks.mask_files import MASK_CONFIG_NAME
from ..masks.patterns import PATTERNS
from ..masks.sparse_mask import SparseMask
from ..models.loading import check_folder
from .checkpoint_manifests import is_damaged


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model"),
    "sentencepiece.bpe.model",
)
_MODEL_FILES = ((CONFIG_NAME,), (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME))
# Fields that name a folder or Hub id, and what is read of it: of each group one file.
SOURCES = {
    "base_model": _MODEL_FILES,
    "model": (*_MODEL_FILES, _TOKENIZER_FILES),
    "mask": ((MASK_CONFIG_NAME,),),
    "tokenizer": (_TOKENIZER_FILES,),
}


def check_source(field: str, name: str | None, **hub_arguments: Any) -> None:
    """
    Check a folder or Hub id without reading weights.

    Args:
        field (`str`): The field that names it, a key of `SOURCES`.
        name (`str`, *optional*): Folder or Hub id.
        hub_arguments: `revision`, `subfolder` and `token`.

    Raises:
        FileNotFoundError: If it is the path of a folder that does not exist or has no such files, or a Hub id whose
            files are not in the cache when the Hub cannot be reached.
        ValueError: If the folder has a damaged file.
    """
    if name is None:
        return
    folder = Path(name)
    if folder.is_dir() and "subfolder" in hub_arguments:
        folder = folder / hub_arguments["subfolder"]
        name = str(folder)
    if not (field == "mask" and name in PATTERNS):
        check_folder(name, field, SOURCES[field][0])
    if not folder.is_dir():
        if field != "mask":  # whose reading checks this itself
            for filenames in SOURCES[field]:
                check_available(name, *filenames, **hub_arguments)
        return
    for path in sorted(folder.iterdir()):
        if (path.suffix == ".safetensors" or path.name == "config.json") and is_damaged(path):
            raise ValueError(f"{field}: {path} is damaged or truncated: write or download it again")


def read_given_mask(name: str, **hub_arguments: Any) -> SparseMask:
    """
    The mask of a folder or Hub id. `hub_arguments` are those of [`SparseMask.from_pretrained`].

    Raises:
        ValueError, OSError: If it cannot be read. The message names it.
    """
    try:
        return SparseMask.from_pretrained(name, **hub_arguments)
    except HTTPError as error:
        raise ValueError(f"mask {name!r} could not be downloaded ({type(error).__name__}: {error})") from error
