"""Whether a run can go on from a checkpoint: what was searched there must be what is searched here."""

import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers.utils import CONFIG_NAME

from ..masks.sparse_mask import MASK_CONFIG_NAME, SparseMask
from ..models.attaching import SEARCH_CONFIG_NAME
from ..models.configuration_sparsebert import SparseBertConfig
from ..search.progressive_pruning import stored_settings


# What makes a search another one; a checkpoint of one cannot go on as the other.
MODE_FIELDS = (
    "search", "pattern", "target_sparsity", "initial_decay", "initial_sparsity", "sparsity_warmup", "sparsity_ramp",
    "mask_form", "hard", "temperature", "temperature_end", "noise_scale", "mask_length",
    "symmetric", "share_layers", "special_tokens", "diagonal", "probability_map", "probability_map_kwargs",
    "token_mixers",
)  # fmt: skip


def _stored_fields(checkpoint):
    """What the configuration in a checkpoint says about mask and search; empty where nothing is said."""
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


def check_checkpoint(checkpoint, model, pruning=None, freezes=False):
    """
    Whether a run can go on from a checkpoint: its search, pattern, target or pruning must be the same.

    Args:
        checkpoint (`str` or `os.PathLike`): Folder that a Trainer wrote.
        model (`PreTrainedModel`): As at the start of the run.
        pruning ([`ProgressivePruning`], *optional*): Of the run.
        freezes (`bool`): Whether the search ends before the run does.

    Raises:
        ValueError: If they differ; names the first field that does.
    """
    sparse_attention = getattr(model.base_model, "sparse_attention", None)
    if sparse_attention is None or not Path(checkpoint).is_dir():
        return
    stored, config = _stored_fields(checkpoint), sparse_attention.config
    here = {name: getattr(config, name) for name in (*MODE_FIELDS, "frozen")}
    # A search or the dense pattern turns into a frozen mask as pruning ends.
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
                f"{checkpoint}: resumed with another mode: {name} was {then!r}, is {now!r}; resume with the settings "
                "of the checkpoint, or start anew"
            )
    if pruning is None and not sparse_attention.searching and (Path(checkpoint) / MASK_CONFIG_NAME).is_file():
        if SparseMask.from_pretrained(checkpoint) != sparse_attention.mask:
            raise ValueError(f"{checkpoint}: resumed with another mask than the one that it was trained through")
