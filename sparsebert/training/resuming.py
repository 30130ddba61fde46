"""Check that a run can resume from a checkpoint, that is, that both have the same search."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers.utils import CONFIG_NAME

from ..masks.mask_files import MASK_CONFIG_NAME
from ..masks.sparse_mask import SparseMask
from ..models.configuration_sparsebert import SparseBertConfig
from ..models.saving import SEARCH_CONFIG_NAME
from ..search.progressive_pruning import stored_settings


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..search.progressive_pruning import ProgressivePruning

# Fields that define a search. A run cannot resume from a checkpoint in which one of them differs.
MODE_FIELDS = (
    "search", "pattern", "target_sparsity", "initial_decay", "initial_sparsity", "sparsity_warmup", "sparsity_ramp",
    "mask_form", "hard", "temperature", "temperature_end", "noise_scale", "mask_length",
    "symmetric", "share_layers", "special_tokens", "diagonal", "probability_map", "probability_map_kwargs",
    "token_mixers",
)  # fmt: skip


def _stored_fields(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """The fields about mask and search in a checkpoint's configuration; empty if it has none."""
    folder = Path(checkpoint)
    try:
        if (path := folder / SEARCH_CONFIG_NAME).is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        path = folder / CONFIG_NAME
        if path.is_file() and json.loads(path.read_text()).get("model_type") == SparseBertConfig.model_type:
            config = SparseBertConfig.from_pretrained(folder)
            return {name: getattr(config, name) for name in (*MODE_FIELDS, "frozen")}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{path}: not a configuration ({error!r})") from error
    return {}


def check_checkpoint(
    checkpoint: str | os.PathLike,
    model: "PreTrainedModel",
    pruning: "ProgressivePruning | None" = None,
    freezes: bool = False,
) -> None:
    """
    Check that a run can resume from a checkpoint: search, pattern, target and pruning must be the same.

    Args:
        checkpoint (`str` or `os.PathLike`): Folder written by a Trainer.
        model (`PreTrainedModel`): The model at the start of the run.
        pruning ([`ProgressivePruning`], *optional*): The pruning of the run.
        freezes (`bool`, *optional*, defaults to `False`): Whether the search ends before the run does.

    Raises:
        ValueError: If they differ. The message names the first field that does.
    """
    sparse_attention = getattr(model.base_model, "sparse_attention", None)
    if sparse_attention is None or not Path(checkpoint).is_dir():
        return
    stored, config = _stored_fields(checkpoint), sparse_attention.config
    here = {name: getattr(config, name) for name in (*MODE_FIELDS, "frozen")}
    # At the end of the pruning, a search or the dense pattern becomes a frozen mask.
    changing = ("frozen",) * freezes if pruning is None else ("pattern", "frozen", "mask_length", "diagonal")
    changing += ("diagonal",) * stored.get("frozen", False)  # the frozen mask holds it
    pairs = [(name, stored[name], here[name]) for name in here if name in stored and name not in changing]
    settings = stored_settings(checkpoint)
    for name, default in ({} if pruning is None else pruning.settings).items():
        pairs.append((f"pruning.{name}", (settings or {}).get(name), default))
    if pruning is None and settings is not None:
        pairs.append(("pruning", settings, None))
    for name, then, now in pairs:
        if then != now:
            raise ValueError(
                f"{checkpoint}: cannot resume with other settings: {name} was {then!r}, is {now!r}; resume with the "
                "settings of the checkpoint, or start a new run"
            )
    if pruning is None and not sparse_attention.searching and (Path(checkpoint) / MASK_CONFIG_NAME).is_file():
        if SparseMask.from_pretrained(checkpoint) != sparse_attention.mask:
            raise ValueError(f"{checkpoint}: cannot resume with another mask than the one it was trained with")
