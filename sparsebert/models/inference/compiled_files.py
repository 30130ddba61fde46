"""The folder of a compiled model: the graph, the weights of what is not in it, the mask, and what it was made with."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub.utils.sha import sha_fileobj
from transformers import PreTrainedConfig

from ...checks import in_short
from ...file_kinds import check_readable, drop_links, read_plain
from ...files import (
    ENGINE_NAME,
    HEAD_NAME,
    METRICS_NAME,
    RESULT_FILES,
    locked_output,
    make_folder,
    replace_files,
    write_metrics,
)
from ...masks.mask_files import own_state
from ...output_folders import aside_of, finish_move, is_half_moved, weights_and_checkpoints, written_whole


# What other libraries would load from the folder.
_OF_OTHERS = re.compile(
    r"((pytorch_|tf_|adapter_)?model([.-].+)?\.(safetensors|bin|h5)(\.index(\..+)?\.json)?)|adapter_config\.json"
)
_PLAIN = re.compile(r"\w[\w.-]{0,99}")  # a name without a folder
_MAX_BYTES = 1 << 20  # of engine.json


def is_compiled(source: str | PathLike, subfolder: str | None = None) -> bool:
    """Whether a folder holds a compiled model, be it damaged: what names its files is not that of another tool."""
    folder = Path(source, subfolder or "")
    return _is_description(folder / ENGINE_NAME) or (
        is_half_moved(folder) and _is_description(aside_of(folder) / ENGINE_NAME)
    )


def _is_description(path):
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return path.is_file()
    try:
        content = json.loads(read_plain(path))
    except (ValueError, RecursionError):
        return True
    return isinstance(content, dict) and bool(content.keys() & {"precision", "files"})


def check_not_compiled(source: str | PathLike, field: str, subfolder: str | None = None) -> None:
    """Refuse the folder of a compiled model, which `field` names in the message, for all but inference."""
    if is_compiled(source, subfolder):
        raise ValueError(f"{field}: {source} holds a compiled model, for inference alone: use the model it is made of")


def save_compiled(model: Any, folder: str | PathLike) -> None:
    """Save a compiled model in a folder, in which it may replace another one: at any moment one of both is whole."""
    folder = Path(folder)
    check_alone(folder, "choose another folder")
    there = {path.name for path in weights_and_checkpoints(folder)}
    if not is_compiled(folder):
        there |= own_state(folder) | {name for name in (ENGINE_NAME, *RESULT_FILES) if (folder / name).is_file()}
    if there:
        raise ValueError(f"{folder} holds {min(there)}, which would be lost: choose another folder")
    make_folder(folder, "save_directory")
    with written_whole(folder, overwrite=True) as aside:
        write_compiled(model, aside)
        write_metrics(aside / METRICS_NAME, model.compiled_as)
        drop_links(folder / path.name for path in aside.iterdir())


def write_compiled(model: Any, folder: Path) -> None:
    """Write a compiled model into a folder that has none, see [`written_whole`]."""
    make_folder(folder)
    base = model.base_model
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as made:
        # Not what a configuration says of a mask: transformers finds no weights here that could run without it.
        PreTrainedConfig.save_pretrained(model.config, made)
        if "sparse_attention" in base._modules:
            base.sparse_attention.mask.write_beside_model(Path(made))
        files = {path.name: path.read_bytes() for path in Path(made).iterdir()}
    files |= base.graph.files()
    files[HEAD_NAME] = safetensors.torch.save(
        {name: weight.detach().clone().contiguous() for name, weight in model.state_dict().items()}
    )
    description = model.compiled_as | {"files": {name: _hash(content) for name, content in files.items()}}
    files[ENGINE_NAME] = (json.dumps(description, indent=2) + "\n").encode()
    replace_files({folder / name: content for name, content in files.items()})


def check_alone(folder: Path, advice: str, replaced: Collection[Path] = ()) -> None:
    """Refuse a folder that holds something else to load, but for what is `replaced`: it must say one thing."""
    for path in sorted(folder.glob("*")):
        if _OF_OTHERS.fullmatch(path.name) and path not in replaced:
            raise ValueError(f"{folder} holds {path.name}, of a model that is not compiled or of an adapter: {advice}")


def _hash(content):
    return hashlib.sha256(content).hexdigest()


def read_compiled(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    What the folder of a compiled model says of it, if all of its files are as they were saved, and which files these
    are, for [`check_unchanged`]. What a killed process had not moved there is moved first.
    """
    if is_half_moved(folder):
        with locked_output(folder):
            finish_move(folder)
    path = folder / ENGINE_NAME
    try:
        check_readable(path)
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        described = json.loads(path.read_text(encoding="utf-8"))
        engine, precision, files = described["engine"], described["precision"], described["files"]
        version = described["versions"][engine]
        if not isinstance(files, dict) or not all(
            isinstance(each, str) and _PLAIN.fullmatch(each) for each in (engine, precision, version, *files)
        ):
            raise ValueError("a value of it has the wrong type")
    except PermissionError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({in_short(error)}): compile the model again") from error
    check_alone(folder, f"delete {ENGINE_NAME} to have what was saved later, or compile into an empty folder")
    if state := own_state(folder) - files.keys():
        raise ValueError(f"{folder / min(state)} is not of the compiled model there, and would be ignored: move it")
    found = {}
    for name, expected in files.items():
        path = folder / name
        check_readable(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: compile the model again")
        with open(path, "rb") as file:
            found[name] = _identity(os.fstat(file.fileno()))
            if sha_fileobj(file).hex() != expected:
                raise ValueError(f"{path} is not the file that was saved with {ENGINE_NAME}: compile the model again")
    return described, found


def check_unchanged(folder: Path, found: dict[str, Any]) -> None:
    """Refuse a folder in which a file was replaced since [`read_compiled`] found it."""
    for name, identity in found.items():
        if not (folder / name).exists() or _identity(os.stat(folder / name)) != identity:
            raise ValueError(f"{folder} was replaced while it was read: load it again")


def _identity(status):
    return status.st_ino, status.st_size, status.st_mtime_ns
