"""Which masks a folder or Hub repository holds."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError

from ..file_kinds import read_plain
from ..hub import check_available, check_path
from .mask_cards import CARD_NAME, name_in
from .mask_files import MASK_CONFIG_NAME, MaskFileError, read_description
from .mask_sources import check_subfolder, mask_paths


def list_masks(source: str | os.PathLike, **hub_arguments: Any) -> list[dict[str, Any]]:
    """
    The masks in a folder or Hub repository, whose weights are not read: for each its `name` (subfolder), `made_by`,
    `form`, `sparsity` (`None` if it was not stored), `length`, `num_layers`, `num_heads`, `base_model`, and the
    `scores` of its card by their names.
    """
    within = check_subfolder(hub_arguments.pop("subfolder", None))
    check_path(source)
    try:
        check_available(source, MASK_CONFIG_NAME, **hub_arguments)
        paths = mask_paths(source, **hub_arguments)
    except HFValidationError as error:
        raise MaskFileError(f"{source}: neither an existing folder nor a valid Hub id") from error
    if within:
        paths = [path for path in paths if path == within or path.startswith(f"{within}/")]
    return [listed(source, path, **hub_arguments) for path in paths]


def listed(source: str | os.PathLike, path: str, **hub_arguments: Any) -> dict[str, Any]:
    """One mask of [`list_masks`], in a subfolder of the source or, if `path` is empty, at its top."""

    def find(name):
        if Path(source).is_dir():
            return Path(source, path, name)
        try:
            return Path(hf_hub_download(str(source), name, subfolder=path or None, **hub_arguments))
        except RemoteEntryNotFoundError:
            return None

    fields, metadata, sparsity, _ = read_description(find(MASK_CONFIG_NAME))
    return {
        "name": path,
        "made_by": name_in(metadata, "search") or name_in(metadata, "pattern"),
        "form": str(fields["form"]),
        "sparsity": sparsity,
        **{name: fields[name] for name in ("length", "num_layers", "num_heads")},
        "base_model": name_in(metadata, "base_model"),
        "scores": _scores(find(CARD_NAME)),
    }


def _scores(path):
    """The results in the card of a mask, by data set and metric."""
    try:
        results = ModelCard(read_plain(path).decode()).data.eval_results or [] if path else []
        return {
            f"{result.dataset_name} {result.metric_name or result.metric_type}": result.metric_value
            for result in results
        }
    except Exception:
        return {}  # a card that anybody may have written, or none
