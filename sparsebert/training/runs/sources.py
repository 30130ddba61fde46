"""Folders, Hub ids and text that a run reads: what must be there, checked before anything is read."""

from os import PathLike
from pathlib import Path
from typing import Any

from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ...data.documents import load_documents
from ...data.streams import find_shards
from ...files import TOKENIZER_FILES, check_other_folder, within
from ...hub import check_available
from ...masks.mask_files import MASK_CONFIG_NAME, check_undamaged
from ...masks.patterns import PATTERNS
from ...masks.shipped import shipped_folder
from ...models.inference.compiled_files import check_not_compiled
from ...models.loading import check_folder


_MODEL_FILES = ((CONFIG_NAME,), (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME))
# Fields that name a folder or Hub id, and what is read of it: one file of each group.
SOURCES = {
    "base_model": _MODEL_FILES,
    "model": (*_MODEL_FILES, TOKENIZER_FILES),
    "mask": ((MASK_CONFIG_NAME,),),
    "tokenizer": (TOKENIZER_FILES,),
}


def check_source(field: str, name: str | None, **hub_arguments: Any) -> None:
    """Check a folder or Hub id without reading weights."""
    if name is None:
        return
    if field == "mask":
        name = shipped_folder(name)
    folder = Path(name)
    if folder.is_dir() and "subfolder" in hub_arguments:
        folder = folder / hub_arguments["subfolder"]
        name = str(folder)
    if field != "mask":
        check_not_compiled(folder, field)
    if not (field == "mask" and name in PATTERNS):
        # Whether a model's folder has a tokenizer is left to its reading, which says more.
        for filenames in SOURCES[field][:2]:
            check_folder(name, field, filenames)
    if not folder.is_dir():
        if field != "mask":  # whose reading checks this itself
            for filenames in SOURCES[field]:
                check_available(name, *filenames, **hub_arguments)
        return
    check_undamaged(folder, field)


def check_kept(output: str | PathLike, field: str, options: Any) -> None:
    """Check that a run does not replace what it starts from: what a field of its options names, and its mask."""
    source = {field: within(getattr(options, field), options.subfolder)}
    check_other_folder(Path(output), **source, mask=within(options.mask, options.mask_subfolder))


def check_text_files(field: str, source: Any, streaming: bool = False) -> None:
    """Check that text files exist and are of a known format, without reading them. Hub datasets are not looked up."""
    named = f'{field} must be "builtin", "hub:owner/name" or one or more files'
    names = [source] if isinstance(source, str | PathLike) else list(source or ())
    if source is None or source == "builtin" or (isinstance(source, str) and source.startswith("hub:")):
        return
    if not names or not all(isinstance(name, str | PathLike) and str(name) for name in names):
        raise ValueError(f"{named}, got {source!r}")
    if alone := [name for name in names if name == "builtin" or str(name).startswith("hub:")]:
        raise ValueError(f"{named}, got {alone[0]!r} in a list")
    try:
        find_shards(source) if streaming else load_documents(source, "all")
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise type(error)(f"{field}: {error}") from error
