"""Finding the files of masks in folders and Hub repositories."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from transformers.utils import cached_file, logging

from ..hub import check_available, naming_the_file
from .mask_files import MASK_CONFIG_NAME, MASK_WEIGHTS_NAME, SEARCH_CONFIG_NAME, MaskFileError, is_of_another_tool
from .shipped import shipped_folder


logger = logging.get_logger(__name__)

# Arguments of `from_pretrained` that select a file on the Hub.
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
# By which `cached_file` returns `None` where a file cannot be had.
IF_THERE: dict[str, Any] = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def hub_arguments_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments of `from_pretrained` that select a file on the Hub, and are given."""
    return {name: arguments[name] for name in HUB_ARGUMENTS if arguments.get(name) is not None}


def check_subfolder(subfolder: str | None) -> str | None:
    """
    A subfolder in its shortest spelling, `"a"` for `"./a/"`; `None` for the folder or repository itself. One that may
    lie outside of it is refused.
    """
    for path in (PurePosixPath(subfolder or ""), PureWindowsPath(subfolder or "")):
        if path.anchor or ".." in path.parts:
            raise MaskFileError(f"subfolder must lie inside the folder or repository, got {subfolder!r}")
    path = PurePosixPath(subfolder or "")
    return str(path) if path.parts else None


def mask_paths(source: str | os.PathLike, **hub_arguments: Any) -> list[str]:
    """
    Subfolders of a folder or Hub repository that hold a mask, `""` for itself, without those of checkpoints and
    unfinished runs.
    """
    if (folder := Path(source)).is_dir():
        names = [path.relative_to(folder).as_posix() for path in _entries(folder)]
    else:
        names = HfApi().list_repo_files(str(source), **hub_arguments)
    paths = [PurePosixPath(name).parent for name in names if PurePosixPath(name).name == MASK_CONFIG_NAME]
    kept = [path for path in paths if not any(part.startswith(("checkpoint-", ".", "_")) for part in path.parts)]
    return sorted("" if path == PurePosixPath() else str(path) for path in kept)


def _entries(folder):
    """Descriptions of masks in a folder and up to two levels below: a folder may be a home directory."""
    return [path for depth in ("", "*/", "*/*/") for path in folder.glob(depth + MASK_CONFIG_NAME)]


@naming_the_file()
def find_mask_files(pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> tuple[Path, Path]:
    """The description and the weights of a mask in a folder, where they may be missing, or downloaded from the Hub."""
    unknown = set(kwargs) - set(HUB_ARGUMENTS)
    if unknown:
        raise TypeError(f"unknown arguments {sorted(unknown)}; allowed: {', '.join(HUB_ARGUMENTS)}")
    check_subfolder(kwargs.get("subfolder"))
    name = shipped_folder(pretrained_model_name_or_path)
    source = Path(name)
    if source.is_dir():
        folder = source / (kwargs.get("subfolder") or "")
        if not (folder / MASK_CONFIG_NAME).is_file() and (names := [path for path in mask_paths(source) if path]):
            raise MaskFileError(
                f"{folder / MASK_CONFIG_NAME}: no such file; there are masks in {', '.join(names)}: give one of them "
                f"as subfolder, or its path, such as {source / names[0]}"
            )
        if not (folder / MASK_CONFIG_NAME).is_file() and (folder / SEARCH_CONFIG_NAME).is_file():
            raise MaskFileError(f"{folder}: its mask is still being searched: load the model, and freeze it first")
        return folder / MASK_CONFIG_NAME, folder / MASK_WEIGHTS_NAME
    if source.is_file() or source.suffix in PICKLE_SUFFIXES:
        raise MaskFileError(
            f"{source}: expected a folder or Hub id with {MASK_CONFIG_NAME} and {MASK_WEIGHTS_NAME}; "
            "pickled files are never read. SparseMask(keep, length).save_pretrained writes such a folder from a bool "
            "tensor"
        )
    found = []
    try:
        for filename in (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME):
            check_available(name, filename, fetch=f"{MASK_CONFIG_NAME} {MASK_WEIGHTS_NAME}", **kwargs)
            found.append(Path(hf_hub_download(name, filename, **kwargs)))
        return found[0], found[1]
    except HFValidationError as error:
        raise MaskFileError(f"{name}: neither an existing folder nor a valid Hub id") from error
    except RemoteEntryNotFoundError as error:
        within = {key: kwargs[key] for key in ("revision", "token") if kwargs.get(key) is not None}
        if not (names := [path for path in mask_paths(name, **within) if path]):
            raise
        raise MaskFileError(
            f"{name}: there is no mask in subfolder {kwargs.get('subfolder') or ''!r}; there are masks in "
            f"{', '.join(names)}: give one of them as subfolder"
        ) from error


class Descriptions(NamedTuple):
    """What describes the mask beside a model, or else its search. `None` for what is not there."""

    mask: Path | None
    search: Path | None


@naming_the_file()
def find_descriptions(source: str | os.PathLike, **hub_arguments: Any) -> Descriptions:
    """
    Find the description of a mask or search in a folder or Hub repository. A file of another tool is passed over, with
    a warning. Where the Hub does not answer, none is found: whether that matters is left to the download of the
    weights.
    """
    for name in (MASK_CONFIG_NAME, SEARCH_CONFIG_NAME):
        path = cached_file(source, name, **IF_THERE, **hub_arguments)
        if path is not None and is_of_another_tool(found := Path(path)):
            logger.warning_once(f"{source}: its {name} is a file of another tool, not the description of a mask.")
        elif path is not None:
            return Descriptions(found, None) if name == MASK_CONFIG_NAME else Descriptions(None, found)
    return Descriptions(None, None)
