"""Check that a run can resume from a checkpoint, that is, that both have the same search and the same recipe."""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import CONFIG_NAME, logging

from ...attention.model_masks import sparse_attention_of
from ...hub import without_secrets
from ...learning.mask_description import HELD_BY_MASK, MAY_CHANGE as MASK_MAY_CHANGE, RESUMED_FIELDS
from ...learning.progressive_pruning import stored_settings
from ...learning.search_files import with_meaning
from ...masks.mask_files import MASK_CONFIG_NAME, SEARCH_CONFIG_NAME
from ...masks.sparse_mask import SparseMask
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ...recipe_files import STATE_NAME, stored_recipe


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedModel

    from ...learning.progressive_pruning import ProgressivePruning

logger = logging.get_logger(__name__)

# By section of a recipe, the fields that may change when a run is resumed: beginnings of their names. They say where
# and how often something is written or measured, and on what the training runs.
MAY_CHANGE = {
    "data": (
        "max_validation_tokens", "attn_implementation", "pictures", "overwrite", "resume", "allow_partial_",
        "cache_dir",
        # of a post-hoc search, whose recovery compares its own fields with those of its own checkpoints
        "output_dir", "patterns", "timed", "save_steps", "recover",
        # of translation
        "test", "max_test_pairs", "num_beams",
        # of fine-tuning: which runs there are, and how they are evaluated
        "all", "seeds", "sweep", "baseline", "simple_baseline", "validation_split", "test_split", "n_best_size",
        "max_answer_length", "no_answer_threshold",
    ),
    "model": (
        "transformers_version", "_name_or_path", "architectures", *MASK_MAY_CHANGE,
    ),
    "training": (
        "output_dir", "resume_from_checkpoint", "do_", "bf16_full_", "fp16_full_", "eval_",
        "per_device_eval_", "batch_eval_", "prediction_", "include_", "metric_", "greater_", "load_best_",
        "log_", "logging_", "report_to", "run_name", "project", "trackio_", "disable_tqdm", "skip_memory_",
        "save_", "enable_jit_checkpoint", "restore_callback_", "push_to_", "hub_", "dataloader_num_",
        "dataloader_pin_", "dataloader_pers", "dataloader_pre", "dataloader_multi", "ddp_", "local_rank",
        "use_cpu", "debug", "torch_compile", "torch_empty_", "activation_", "gradient_check",
        "full_determinism", "liger_", "use_liger_", "use_cache",
    ),
}  # fmt: skip

# Columns of tokenized rows that a model learns to predict, in pre-training and in the tasks.
_LABELS = ("label", "labels", "next_sentence_label", "start_positions", "end_positions")


def _stored_fields(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """The fields about mask and search in a checkpoint's configuration; empty if it has none."""
    folder = Path(checkpoint)
    try:
        if (path := folder / SEARCH_CONFIG_NAME).is_file():
            return with_meaning(json.loads(path.read_text(encoding="utf-8")))
        path = folder / CONFIG_NAME
        if path.is_file() and json.loads(path.read_text()).get("model_type") == SparseBertConfig.model_type:
            config = SparseBertConfig.from_pretrained(folder)
            return {name: getattr(config, name) for name in (*RESUMED_FIELDS, "frozen")}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{path}: not a configuration ({error!r})") from error
    return {}


def check_checkpoint(
    checkpoint: str | os.PathLike,
    model: "PreTrainedModel",
    pruning: "ProgressivePruning | None" = None,
    freezes: bool = False,
) -> None:
    """Check that a run can resume from a checkpoint: mask, search (`RESUMED_FIELDS`) and pruning must agree."""
    sparse_attention = sparse_attention_of(model)
    if sparse_attention is None or not Path(checkpoint).is_dir():
        return
    stored, config = _stored_fields(checkpoint), sparse_attention.config
    # At the end of a search or of the pruning there is a frozen mask, which then holds some of the fields itself.
    changing = ("frozen",) * (freezes or pruning is not None) + HELD_BY_MASK * stored.get("frozen", False)
    here = {name: getattr(config, name) for name in (*RESUMED_FIELDS, "frozen")}
    pairs = [(name, stored[name], here[name]) for name in here if name in stored and name not in changing]
    if sparse_attention.searching and (Path(checkpoint) / MASK_CONFIG_NAME).is_file():
        mask, search = SparseMask.from_pretrained(checkpoint), sparse_attention.search
        names = ("special_tokens", "special_rows", "last_token", "length_policy")
        held = [("mask_length", mask.length, search.length), ("diagonal", mask.diagonal, search.fixed_diagonal)]
        held.append(("symmetric", mask.symmetric, search.toeplitz_symmetric))
        pairs += held + [(name, getattr(mask, name), getattr(search, name)) for name in names]
    settings = stored_settings(checkpoint)
    if pruning is not None:
        if settings is None:
            raise ValueError(
                f"{checkpoint}: cannot resume with pruning: the checkpoint is not of a SparseBertTrainer that pruned"
            )
        pairs += [(f"pruning.{name}", settings.get(name), value) for name, value in pruning.settings.items()]
    elif settings is not None:
        pairs.append(("pruning", settings, None))
    for name, then, now in pairs:
        if then != now:
            raise ValueError(
                f"{checkpoint}: cannot resume with other settings: {name} was {then!r}, is {now!r}; resume with the "
                "settings of the checkpoint, or start a new run"
            )
    if pruning is None and not sparse_attention.searching and (Path(checkpoint) / MASK_CONFIG_NAME).is_file():
        if sparse_attention.mask != SparseMask.from_pretrained(checkpoint):
            raise ValueError(f"{checkpoint}: cannot resume with another mask than the one it was trained with")


class RecipeRecord(TrainerCallback, ExportableState):
    """Writes the recipe of a run into the state of its checkpoints, for [`check_recipe`]."""

    def __init__(self, recipe: dict[str, dict[str, Any]]) -> None:
        self.recipe = recipe

    def state(self) -> dict[str, Any]:
        return {"args": {"recipe": self.recipe}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The state may come from a checkpoint that has no record.
        callbacks: Any = state.stateful_callbacks
        callbacks.setdefault(type(self).__name__, self.state())


def recipe_record(data: Any, config: "PreTrainedConfig", training: TrainingArguments) -> dict[str, dict[str, Any]]:
    """What defines a run, by section and field: all that may not change when it is resumed."""
    sections = {"data": without_secrets(asdict(data)), "model": config.to_dict(), "training": training.to_dict()}
    kept = {
        section: {name: value for name, value in fields.items() if not name.startswith(MAY_CHANGE[section])}
        for section, fields in sections.items()
    }
    return json.loads(json.dumps(kept | {"inputs": {"processes": PartialState().num_processes}}, default=str))


def rows_record(rows: "datasets.Dataset") -> dict[str, int]:
    """Number and checksum of tokenized rows: they change with the text, its order and the tokenizer."""
    checksum, columns = 0, [name for name in rows.column_names if name == "input_ids" or name in _LABELS]
    for table in rows.select_columns(columns).with_format("arrow").iter(batch_size=10_000):
        for column in table.columns:
            for chunk in column.chunks:
                while hasattr(chunk, "flatten"):  # lists, of lists in multiple choice
                    chunk = chunk.flatten()
                checksum = zlib.crc32(chunk.to_numpy(zero_copy_only=False), checksum)
    return {"rows": len(rows), "checksum of the rows": checksum}


def check_recipe(checkpoint: str | os.PathLike, recipe: Mapping[str, Mapping[str, Any]]) -> None:
    """
    Check that a run has the recipe of the checkpoint that it resumes from. Only sections and fields that both have are
    compared.
    """
    if not (Path(checkpoint) / STATE_NAME).is_file():
        return
    if (stored := stored_recipe(checkpoint)) is None:
        logger.warning(f"{checkpoint} does not hold the recipe it was trained with: the recipe is not compared.")
        return
    lines = []
    for section, fields in recipe.items():
        then = stored.get(section, {})
        for name in sorted(then.keys() & fields.keys()):
            if then[name] != fields[name] and name != "processes":
                lines.append(f"  {section}.{name}: {then[name]!r} -> {fields[name]!r}")
    if lines:
        raise ValueError(
            f"{checkpoint}: cannot resume with another recipe: resume with that of the checkpoint, or start a new "
            "run. What changed:\n" + "\n".join(lines)
        )
    before, now = (where.get("inputs", {}).get("processes") for where in (stored, recipe))
    if None not in (before, now) and before != now:
        logger.warning(f"{checkpoint} was trained by {before} processes, now by {now}: the batches will be different.")
