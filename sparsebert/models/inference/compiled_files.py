"""The folder of a compiled model: the graph, the weights of what is not in it, the mask, and what it was made with."""

import hashlib
import json
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub.utils.sha import sha_fileobj
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ...files import locked_output, make_folder, replace_files
from ...masks.mask_files import own_state


ENGINE_NAME = "engine.json"
HEAD_NAME = "head.safetensors"


def is_compiled(source: str | PathLike, subfolder: str | None = None) -> bool:
    """Whether a folder holds a compiled model."""
    return Path(source, subfolder or "", ENGINE_NAME).is_file()


def save_compiled(model: Any, folder: str | PathLike) -> None:
    """Write a compiled model into a folder, in which it may replace another one."""
    folder, base = Path(folder), model.base_model
    _check_no_weights(folder)
    make_folder(folder, "save_directory")
    sparse_attention = base._modules.get("sparse_attention")
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as made:
        # Not what a configuration says of a mask: transformers finds no weights here that could run without it.
        PreTrainedConfig.save_pretrained(model.config, made)
        if sparse_attention is not None:
            sparse_attention.mask.write_beside_model(Path(made))
        files = {path.name: path.read_bytes() for path in Path(made).iterdir()}
    files |= {name: (base.graph.folder / name).read_bytes() for name in base.graph.file_names}
    files[HEAD_NAME] = safetensors.torch.save(
        {name: weight.detach().clone().contiguous() for name, weight in model.state_dict().items()}
    )
    description = model.compiled_as | {"files": {name: _hash(content) for name, content in files.items()}}
    files[ENGINE_NAME] = (json.dumps(description, indent=2) + "\n").encode()
    with locked_output(folder):
        replace_files({folder / name: content for name, content in files.items()})
        for name in own_state(folder) - files.keys():
            (folder / name).unlink(missing_ok=True)


def _check_no_weights(folder):
    """A folder must say one thing."""
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "pytorch_model.bin"):
        if (folder / name).exists():
            raise ValueError(
                f"{folder} holds the weights of a model that is not compiled, {name}: choose another folder"
            )


def _hash(content):
    return hashlib.sha256(content).hexdigest()


def read_compiled(folder: Path) -> dict[str, Any]:
    """What the folder of a compiled model says of it, if all of its files are as they were saved."""
    try:
        described = json.loads((folder / ENGINE_NAME).read_text(encoding="utf-8"))
        engine, precision, files = described["engine"], described["precision"], described["files"]
        version = described["versions"][engine]
        if not all(isinstance(each, str) and Path(each).name == each for each in (engine, precision, version, *files)):
            raise ValueError("a value of it has the wrong type")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / ENGINE_NAME} is damaged ({error!r}): compile the model again") from error
    _check_no_weights(folder)
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: compile the model again")
        with open(path, "rb") as file:
            if sha_fileobj(file).hex() != expected:
                raise ValueError(f"{path} is not the file that was saved with {ENGINE_NAME}: compile the model again")
    return described
