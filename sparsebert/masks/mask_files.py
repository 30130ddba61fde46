"""
The files of a mask: `mask_config.json` describes it, `mask.safetensors` holds one bit per parameter.

Letters: L layers (1 when shared), H heads, n length, K parameters of a Toeplitz form.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..version import __version__


MASK_CONFIG_NAME = "mask_config.json"
MASK_WEIGHTS_NAME = "mask.safetensors"
MASK_FORMAT_VERSION = 1

# Arguments of `from_pretrained` that select a file on the Hub.
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class MaskFileError(ValueError):
    """A mask file is missing, damaged or of the wrong kind."""


def write_mask_files(
    folder: Path, keep: torch.Tensor, description: dict[str, Any], sparsity: float, metadata: dict[str, Any]
) -> None:
    """
    Write both files of a mask, creating the folder if needed.

    Args:
        folder (`Path`): Folder to write to. Files already there stay complete until both new ones are.
        keep (`torch.Tensor` of shape `(L, H, K)` or `(L, H, n, n)`): Bool, the parameters.
        description (`dict`): The mask's other fields, as returned by [`SparseMask.description`].
        sparsity (`float`): Fraction of entries removed, stored for the reader's information.
        metadata (`dict`): Further fields to store.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **metadata,
        "format_version": MASK_FORMAT_VERSION,
        "library_version": __version__,
        **description,
        "sparsity": round(sparsity, 6),
    }
    bits = torch.from_numpy(np.packbits(keep.flatten().numpy()))
    temporary = {name: folder / f"{name}.tmp" for name in (MASK_WEIGHTS_NAME, MASK_CONFIG_NAME)}
    save_file({"keep": bits}, temporary[MASK_WEIGHTS_NAME])
    temporary[MASK_CONFIG_NAME].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, path in temporary.items():
        os.replace(path, folder / name)


def find_mask_files(pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> tuple[Path, Path]:
    """
    Locate the files of a mask in a folder, or download them from the Hub.

    Args:
        pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub id.
        kwargs: Any of `HUB_ARGUMENTS`.

    Returns:
        `tuple` of `Path`: The description and the weights. In a folder they may be missing.
    Raises:
        TypeError: If an argument is unknown.
        MaskFileError: If a file was given, or a name that is neither a folder nor a Hub id.
    """
    unknown = set(kwargs) - set(HUB_ARGUMENTS)
    if unknown:
        raise TypeError(f"unknown arguments {sorted(unknown)}; allowed: {', '.join(HUB_ARGUMENTS)}")
    source = Path(pretrained_model_name_or_path)
    if source.is_dir():
        folder = source / (kwargs.get("subfolder") or "")
        return folder / MASK_CONFIG_NAME, folder / MASK_WEIGHTS_NAME
    if source.is_file() or source.suffix in PICKLE_SUFFIXES:
        raise MaskFileError(
            f"{source}: expected a folder or Hub id with {MASK_CONFIG_NAME} and {MASK_WEIGHTS_NAME}; "
            "pickled files are never read"
        )
    name = str(pretrained_model_name_or_path)
    try:
        return (
            Path(hf_hub_download(name, MASK_CONFIG_NAME, **kwargs)),
            Path(hf_hub_download(name, MASK_WEIGHTS_NAME, **kwargs)),
        )
    except HFValidationError as error:
        raise MaskFileError(f"{name}: neither an existing folder nor a valid Hub id") from error


def read_mask_files(config_path: Path, weights_path: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """
    Read both files of a mask. Nothing is unpickled.

    Returns:
        `tuple`: The parameters, bool of shape `(L, H, K)` or `(L, H, n, n)`, and the other arguments of
        [`SparseMask`], of which only the sizes have been checked.
    Raises:
        MaskFileError: If a file is missing, damaged, pickled, or of another format version.
    """
    for path in (config_path, weights_path):
        if not path.is_file():
            raise MaskFileError(f"{path}: no such file")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        version = config.pop("format_version")
        if version != MASK_FORMAT_VERSION:
            raise MaskFileError(
                f"{config_path}: format_version must be {MASK_FORMAT_VERSION}, got {version!r}; update sparsebert"
            )
        shape = [config.pop("num_layers"), config.pop("num_heads"), config.pop("num_parameters")]
        fields = {name: config.pop(name) for name in ("length", "form", "block_size", "special_tokens")}
        fields |= {name: config.pop(name) for name in ("last_token", "diagonal", "length_policy")}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
        raise MaskFileError(f"{config_path}: not a mask description ({error!r})") from error
    if not all(isinstance(size, int) and 0 < size < 2**20 for size in (*shape, fields["length"])):
        raise MaskFileError(
            f"{config_path}: sizes must be positive integers below 2^20, got num_layers, num_heads and "
            f"num_parameters {shape}, length {fields['length']}"
        )
    if fields["form"] == "table":
        shape.append(shape[-1])
    for name in ("library_version", "sparsity"):
        config.pop(name, None)
    try:
        bits = load_file(weights_path).get("keep")
    except (SafetensorError, OSError) as error:
        raise MaskFileError(
            f"{weights_path}: damaged or not a safetensors file ({error}); write or download it again"
        ) from error
    num_bits = math.prod(shape)
    if bits is None or bits.dtype != torch.uint8 or bits.dim() != 1 or len(bits) != -(-num_bits // 8):
        got = "nothing" if bits is None else f"{bits.dtype} {tuple(bits.shape)}"
        raise MaskFileError(f"{weights_path}: expected {-(-num_bits // 8)} bytes for shape {shape}, got {got}")
    keep = torch.from_numpy(np.unpackbits(bits.numpy(), count=num_bits)).bool().view(shape)
    return keep, fields | {"metadata": config}
