"""
The files of a mask: `mask_config.json` describes it, `mask.safetensors` holds one bit per parameter
and the bias of a rest.

Letters: L layers (1 when shared), H heads, n length, K parameters of a Toeplitz form.
"""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from ..checks import MAX_HEADS, MAX_LAYERS, check_choice, in_short, is_out_of_memory, shortened
from ..file_kinds import check_readable, json_object
from ..files import is_damaged, is_index, replace_files
from ..version import __version__
from .expansion import FORMS


MASK_CONFIG_NAME = "mask_config.json"
MASK_WEIGHTS_NAME = "mask.safetensors"
# P before freezing.
MASK_PROBS_NAME = "mask_probs.safetensors"
# What is searched, beside a stock model that carries the logits.
SEARCH_CONFIG_NAME = "search_config.json"
# A field of the configuration file of every model that is saved with a mask.
NOTE_FIELD = "how_to_load"
# Another one, of a model made of parts: the names of those that have a mask, each in a folder of its own.
PARTS_FIELD = "parts_with_mask"
# The logits of a search beside an adapter, whose weights do not have them.
MASK_LOGITS_NAME = "mask_logits.safetensors"
# The state of a mask or of its search, which a newer one replaces.
MASK_STATE = (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME, MASK_PROBS_NAME, SEARCH_CONFIG_NAME, MASK_LOGITS_NAME)
# Version 2 is written for masks with one of the `OPTIONAL` fields, which readers of version 1 would not apply.
MASK_FORMAT_VERSIONS = (1, 2)
# Fields that a description leaves out where a mask has the default.
OPTIONAL: dict[str, Any] = {"rest": "none", "symmetric": True, "special_rows": True, "query_block_size": None}
# The code beside a BERT with a mask, for environments without this package.
CODE_NAME = "modeling_frozen_sparsebert.py"

# No real mask is larger: a description that is gets refused before anything is allocated for it.
MAX_MASK_LENGTH = 2**16
MAX_BITS = 2**34
MAX_CONFIG_BYTES = 2**20
MAX_NESTED = 64
# A weights file is its bits, and before them a header.
MAX_HEADER_BYTES = 2**16
# Parts of a model's weights that tell whether they changed since a mask was saved beside them.
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 1024
# The stored sparsity is rounded to 6 digits, and may have been computed in single precision.
SPARSITY_TOLERANCE = 2e-6
_SAMPLE_FIELD = "model_weights_sample"
# Fields of the description of a mask, and those that writing adds.
_DESCRIPTION = (
    *("form", "num_layers", "num_heads", "length", "num_parameters", "block_size", "special_tokens", "last_token"),
    *("diagonal", "length_policy"),
)
_REST_BIAS = "rest_bias"
_WRITTEN = ("format_version", "library_version", "sparsity", "weights_sha256")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# Fields that say where a mask comes from, each a name or nothing.
PROVENANCE = ("search", "pattern", "base_model", "base_model_revision")


class MaskFileError(ValueError):
    """A mask file is missing, damaged or of the wrong kind. A long message, which may quote the file, is shortened."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, 2000))


def check_sizes(description: dict[str, Any]) -> None:
    """
    Check the sizes in a mask's description, before its weights are read or written: none is larger than in a real
    mask.
    """
    check_choice("form", description["form"], FORMS)
    bounds = {"num_layers": MAX_LAYERS, "num_heads": MAX_HEADS, "length": MAX_MASK_LENGTH}
    bounds |= dict.fromkeys(("num_parameters", "block_size"), MAX_MASK_LENGTH)
    if description.get("symmetric") is False:
        bounds["num_parameters"] = 2 * MAX_MASK_LENGTH - 1
    for name, most in bounds.items():
        size = description[name]
        if (name, size) != ("block_size", None) and not (type(size) is int and 0 < size <= most):
            raise ValueError(f"sizes must be positive integers, {name} at most {most}, got {size!r}")
    bits = description["num_layers"] * description["num_heads"]
    bits *= description["num_parameters"] ** (2 if description["form"] == "table" else 1)
    if bits > MAX_BITS:
        raise ValueError(f"a mask may have {MAX_BITS} bits, one per parameter of every layer and head, got {bits}")


def write_mask_files(
    folder: Path,
    keep: torch.Tensor,
    rest_bias: torch.Tensor | None,
    description: dict[str, Any],
    sparsity: float,
    metadata: dict[str, Any],
) -> None:
    """
    Write both files of a mask, creating the folder if needed. Those already there stay until both new ones are on
    disk, and a reader tells a pair of which only one was replaced.
    """
    check_sizes(description)
    check_metadata(metadata)
    tensors = {"keep": torch.from_numpy(np.packbits(keep.flatten().numpy()))}
    weights = safetensors.torch.save(tensors if rest_bias is None else tensors | {_REST_BIAS: rest_bias})
    config = {
        **metadata,
        "format_version": MASK_FORMAT_VERSIONS[not OPTIONAL.keys().isdisjoint(description)],
        "library_version": __version__,
        **description,
        "sparsity": round(sparsity, 6),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (sample := sample_weights(folder)) is not None:
        config[_SAMPLE_FIELD] = sample
    content = (json.dumps(config, indent=2) + "\n").encode()
    if len(content) > MAX_CONFIG_BYTES:
        raise ValueError(f"the metadata of a mask may have {MAX_CONFIG_BYTES} bytes, got {len(content)}")
    # The description first: one with a hash never passes with other weights, as an older one without might.
    replace_files({folder / MASK_CONFIG_NAME: content, folder / MASK_WEIGHTS_NAME: weights})


def check_takes_mask(folder: Path) -> None:
    """Refuse a folder that holds a SparseBERT with a search or a pattern, which would not read a mask beside it."""
    config = json_object(folder / "config.json")
    pattern, unfrozen = config.get("pattern"), config.get("frozen") is False
    if config.get("model_type") == "sparsebert" and unfrozen and (pattern or config.get("search")):
        what = "that is being searched" if pattern is None else f"with the pattern {pattern!r}"
        raise ValueError(
            f"{folder} holds a SparseBERT {what}, and would not use a mask beside it: save the mask in another "
            "folder, or load the model, give it the mask with set_mask and save that"
        )


def sample_weights(folder: Path) -> str | None:
    """
    Hash of parts of the weights in a model's folder: their sizes, their beginnings and blocks all over them. Training
    changes it, saving the same weights again does not. `None` if there are no safetensors of a model.
    """
    # Not those of a `variant`, of which there may be all or none.
    found = (path for path in folder.glob("model*.safetensors") if _WEIGHTS.fullmatch(path.name))
    paths = sorted(path for path in found if path.is_file())
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size}\n".encode())
            for block in range(SAMPLED_BLOCKS):
                file.seek(max(size - SAMPLED_BYTES, 0) * block // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest() if paths else None


def weights_changed(config_path: Path, folder: Path) -> bool:
    """Whether the weights in a folder are not those beside which a mask was saved, as far as its description says."""
    try:
        saved = json.loads(_read(config_path, MAX_CONFIG_BYTES).decode("utf-8")).get(_SAMPLE_FIELD)
    except (ValueError, RecursionError, AttributeError) as error:
        raise MaskFileError(f"{config_path}: not a mask description ({in_short(error)})") from error
    return saved is not None and sample_weights(folder) not in (None, saved)


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse provenance of a mask that could not be read back."""
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be a dict, got {type(metadata).__name__}")
    for name, value in metadata.items():
        if name in (*_DESCRIPTION, *OPTIONAL, *_WRITTEN, _SAMPLE_FIELD) or not isinstance(name, str):
            raise ValueError(f"metadata: the names must be text, and not those of a mask's own fields, got {name!r}")
        if name in PROVENANCE and not isinstance(value, str | None):
            raise ValueError(f"metadata: {name} must be a name or null, got {value!r}")
        if _is_nested(value, MAX_NESTED):
            raise ValueError(f"metadata: {name} must not be nested more than {MAX_NESTED} levels deep")
        try:
            read = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"metadata: {name} must hold JSON values, got {value!r} ({error})") from error
        if read != value and repr(read) != repr(value):  # NaN is the same, and not equal
            raise ValueError(f"metadata: {name} must hold JSON values, such as lists instead of tuples, got {value!r}")


def _is_nested(value, levels):
    """Whether lists and dictionaries are nested deeper than so many levels."""
    inner = [value]
    for _ in range(levels + 1):
        held = [each.values() if isinstance(each, dict) else each for each in inner if isinstance(each, dict | list)]
        inner = list(itertools.chain.from_iterable(held))
    return bool(inner)


def read_description(config_path: Path) -> tuple[dict[str, Any], dict[str, Any], float | None, str | None]:
    """
    The fields of [`SparseMask.description`], the metadata, the sparsity and the hash of the weights, `None` where they
    were not stored. Sizes, provenance and sparsity have been checked; what is wrong is a [`MaskFileError`].
    """
    try:
        config = json.loads(_read(config_path, MAX_CONFIG_BYTES).decode("utf-8"))
        version = config.pop("format_version")
        if type(version) is not int or version not in MASK_FORMAT_VERSIONS:
            allowed = " or ".join(map(str, MASK_FORMAT_VERSIONS))
            raise MaskFileError(f"{config_path}: format_version must be {allowed}, got {version!r}; update sparsebert")
        fields = {name: config.pop(name) for name in _DESCRIPTION}
        fields |= {name: config.pop(name) for name in OPTIONAL if version > 1 and name in config}
        for name in ("library_version", _SAMPLE_FIELD):
            config.pop(name, None)
        sparsity, sha256 = config.pop("sparsity", None), config.pop("weights_sha256", None)
    except MaskFileError:
        raise
    # Numbers of thousands of digits are a ValueError, deep nesting is a RecursionError.
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise MaskFileError(f"{config_path}: not a mask description ({in_short(error)})") from error
    try:
        check_sizes(fields)
    except ValueError as error:
        raise MaskFileError(f"{config_path}: {error}") from error
    for name in PROVENANCE:
        if not isinstance(config.get(name), str | None):
            raise MaskFileError(f"{config_path}: {name} must be a name or null, got {config[name]!r}")
    if sparsity is not None and not (type(sparsity) in (int, float) and 0 <= sparsity <= 1):
        raise MaskFileError(f"{config_path}: sparsity must be a number from 0 to 1, got {sparsity!r}")
    return fields, config, sparsity, sha256


def read_mask_files(config_path: Path, weights_path: Path) -> tuple[torch.Tensor, dict[str, Any], float | None]:
    """
    The parameters of a mask, bool `(L, H, K)` or `(L, H, n, n)`, the other arguments of [`SparseMask`], of which only
    the sizes have been checked, and the sparsity if it was stored. Nothing is unpickled, and nothing is allocated for
    sizes that no mask has; what is wrong is a [`MaskFileError`].
    """
    fields, config, sparsity, sha256 = read_description(config_path)
    with enough_memory(weights_path):
        keep, rest_bias = _read_tensors(weights_path, fields, sha256)
    return keep, fields | {"rest_bias": rest_bias, "metadata": config}, sparsity


@contextmanager
def enough_memory(weights_path: Path) -> Iterator[None]:
    """Context manager in which memory that is missing for the entries of a mask is a [`MaskFileError`]."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MaskFileError(f"{weights_path}: there is not enough memory for the entries of the mask") from error


def _read_tensors(weights_path, fields, sha256):
    """The parameters of a mask, whose sizes are taken out of its fields, and the bias of its rest, if there is one."""
    shape = [fields.pop(name) for name in ("num_layers", "num_heads", "num_parameters")]
    if fields["form"] == "table":
        shape.append(shape[-1])
    num_bits = math.prod(shape)
    num_bytes = -(-num_bits // 8)
    most = num_bytes + (4 * MAX_LAYERS * shape[1] if "rest" in fields else 0)
    weights = _read(weights_path, most + MAX_HEADER_BYTES)
    tensors = _load(weights, weights_path, num_bytes)
    bits, problems = tensors.get("keep"), []
    if bits is None or bits.dtype != torch.uint8 or bits.dim() != 1 or len(bits) != num_bytes:
        got = "nothing" if bits is None else f"{bits.dtype} {tuple(bits.shape)}"
        problems.append(f"expected {num_bytes} bytes for shape {shape}, got {got}")
    if sha256 is not None and sha256 != hashlib.sha256(weights).hexdigest():
        problems.append(
            f"not the file that {MASK_CONFIG_NAME} was written with (weights_sha256): saving was interrupted, two "
            "processes saved here at once, or one of the two was changed; write or download both again"
        )
    if problems:
        raise MaskFileError(f"{weights_path}: {'; '.join(problems)}")
    keep = torch.from_numpy(np.unpackbits(bits.numpy(), count=num_bits)).view(torch.bool).view(shape)
    return keep, tensors.get(_REST_BIAS)


def is_of_another_tool(path: Path) -> bool:
    """
    Whether a file with one of our names describes neither a mask nor a search: JSON with none of our fields, beside a
    model that was not saved with a mask.
    """
    config = path.with_name("config.json")
    if config.is_file() and NOTE_FIELD in config.read_text(encoding="utf-8", errors="replace"):
        return False
    return has_other_content(path)


def has_other_content(path: Path) -> bool:
    """Whether a file with one of our names is JSON with none of our fields."""
    try:
        content = json.loads(_read(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except (ValueError, RecursionError):
        return False  # damaged
    ours = ("search",) if path.name == SEARCH_CONFIG_NAME else (*_DESCRIPTION, *_WRITTEN)
    return not isinstance(content, dict) or not content.keys() & set(ours)


def folder_of_part(name: str) -> str:
    """The folder of the mask of a part, in that of the whole model."""
    return f"mask-{name}"


def are_parts(names: Any) -> bool:
    """Whether what a configuration has as its parts are names, which become folders."""
    return isinstance(names, list) and all(isinstance(name, str) and not {*"/\\:"} & {*name} for name in names)


def parts_named_in(config_path: Path) -> list[str]:
    """The parts with a mask that a configuration file names, `[]` if it is not that of a model made of parts."""
    names: Any = json_object(config_path).get(PARTS_FIELD)
    return names if are_parts(names) else []


def own_state(folder: Path) -> set[str]:
    """Names of the files in a folder that are the state of a mask or of its search, and not those of another tool."""
    here = {name for name in MASK_STATE if (folder / name).is_file()}
    described = {n for n in here if n.endswith(".json") and not has_other_content(folder / n)}
    return described | {n for n in here if n.endswith(".safetensors")} if described else set()


def check_undamaged(folder: Path, field: str = "") -> None:
    """
    Check weights, configuration and mask of a model in a folder, if there is one, without reading the weights. `field`
    names the folder in the message. What may not be read is a `PermissionError`.
    """
    prefix = f"{field}: " if field else ""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    read = [path for path in paths if path.suffix == ".safetensors" or path.name == "config.json" or is_index(path)]
    for path in paths:
        if path in read or not path.is_file():
            check_readable(path)
    if (folder / MASK_CONFIG_NAME).is_file() and not is_of_another_tool(folder / MASK_CONFIG_NAME):
        try:
            read_mask_files(folder / MASK_CONFIG_NAME, folder / MASK_WEIGHTS_NAME)
        except MaskFileError as error:
            raise MaskFileError(f"{prefix}{error}") from error
    for path in read:
        if is_damaged(path):
            raise ValueError(f"{prefix}{path} is damaged or truncated: write or download it again")


def _read(path, limit):
    """The content of a file, which may not have more than `limit` bytes."""
    try:
        check_readable(path)
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise MaskFileError(f"{path}: no such file") from error
    except OSError as error:
        raise MaskFileError(f"{path}: cannot be read ({error})") from error
    except ValueError as error:
        raise MaskFileError(str(error)) from error
    if len(content) > limit:
        raise MaskFileError(f"{path}: too large, expected at most {limit} bytes")
    return content


def _load(weights, path, num_bytes):
    """The tensors of a weights file that has at least `num_bytes` of them."""
    try:
        return safetensors.torch.load(weights)
    # Types that torch does not have are a KeyError or ValueError.
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        header, reason = int.from_bytes(weights[:8], "little"), str(error)
        if header <= MAX_HEADER_BYTES and len(weights) < 8 + header + num_bytes:
            reason = f"truncated: it has {len(weights)} of {8 + header + num_bytes} bytes"
        raise MaskFileError(
            f"{path}: damaged or not a safetensors file ({reason}); write it again, or download it again with "
            "force_download=True"
        ) from error
