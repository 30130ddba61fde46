"""What all models with a mask have in common, and what they save: one state of the mask per folder and repository."""

import json
import os
import re
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HTTPError
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from ..attention.model_masks import sparse_attention_of
from ..checks import printable
from ..file_kinds import drop_links
from ..files import replace_files
from ..hub import commit_of, read_config
from ..learning.mask_description import OWN_FIELDS
from ..learning.search_files import search_file
from ..masks.mask_cards import CARD_NAME, own_card
from ..masks.mask_files import (
    CODE_NAME,
    MASK_CONFIG_NAME,
    MASK_LOGITS_NAME,
    MASK_PROBS_NAME,
    MASK_WEIGHTS_NAME,
    SEARCH_CONFIG_NAME,
    own_state,
)
from ..masks.pushing import push_folder
from ..masks.shipped import is_for
from ..masks.sparse_mask import SparseMask
from .architectures import configs_of
from .bert.configuration_sparsebert import SparseBertConfig
from .forward_with_mask import MaskedForward
from .model_cards import save_model_card
from .model_configs import AUTO_MAP_FIELD, Derived, derive_configs, saved_fields
from .sparse_attention import SparseAttention, get_sparse_attention


logger = logging.get_logger(__name__)

# Whether `from_pretrained` and `save_pretrained` of transformers know of masks, which the plugin says.
plugin_enabled = False

if TYPE_CHECKING:
    _ModelBase = PreTrainedModel
else:
    _ModelBase = object

# What follows the task type in the configuration of an adapter with a mask: PEFT without this package refuses it.
_TASK_NOTE = "with a sparse attention mask (of the package sparsebert)"
# What such files may say; only the first is written.
_TASK_NOTES = (_TASK_NOTE, "with a sparse attention mask (pip install sparsebert)")
# Names of the files that transformers and PEFT write, other than those of a tokenizer.
_WRITTEN = re.compile(
    r"(adapter_|generation_)?config\.json|(adapter_)?model([.-].+)?\.safetensors(\.index(\..+)?\.json)?"
)
HUB_UPLOAD_ARGUMENTS = ("repo_id", "commit_message", "private", "revision", "create_pr", "commit_description", "tags")


def keep_inside(folder: Path) -> None:
    """Have what other libraries save in a folder replace links there instead of following them, and refuse pipes."""
    drop_links(path for path in [*folder.glob("*")] if _WRITTEN.fullmatch(path.name))


def save_with_adapter(sparse_attention: SparseAttention, folder: Path) -> None:
    """
    Write a mask beside the weights of an adapter: the frozen mask, or what is searched and the logits. Files of
    another state of the mask are removed.
    """
    if sparse_attention.mask is not None:
        sparse_attention.mask.save_pretrained(folder)
        (folder / MASK_LOGITS_NAME).unlink(missing_ok=True)
    elif sparse_attention.mask_logits is not None:
        for name in (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME):
            (folder / name).unlink(missing_ok=True)
        sparse_attention.record_progress()
        logits = sparse_attention.mask_logits.detach().cpu().contiguous()
        weights = safetensors.torch.save({"mask_logits": logits})
        replace_files(
            {folder / SEARCH_CONFIG_NAME: search_file(sparse_attention.config), folder / MASK_LOGITS_NAME: weights}
        )
    mark_adapter(folder, sparse_attention.mask)


def mark_adapter(folder: Path, mask: SparseMask | None) -> None:
    """
    Have PEFT without this package refuse the adapter in a folder, if there is one. `mask`: that of the adapter, if it
    is frozen.
    """
    path = folder / ADAPTER_CONFIG_NAME
    if path.is_file():
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not _applied_by_base(mask, fields.get("base_model_name_or_path")):
            fields["task_type"] = f"{fields.get('task_type') or ''} {_TASK_NOTE}".lstrip()
            replace_files({path: (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()})


def _applied_by_base(mask, base):
    """Whether a base model has the same mask, and code that applies it where this package is not installed."""
    if mask is None or base is None:
        return False
    try:
        config = read_config(base, local_files_only=True)
        return AUTO_MAP_FIELD in saved_fields(config.model_type) and mask == SparseMask.from_pretrained(
            base, local_files_only=True
        )
    except (OSError, ValueError, HTTPError):
        return False  # it has none, or is not here


def unmarked(fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration of an adapter as PEFT wrote it, before [`mark_adapter`]."""
    task = fields.get("task_type")
    for note in _TASK_NOTES:
        if isinstance(task, str) and task.endswith(note):
            return fields | {"task_type": task.removesuffix(note).rstrip() or None}
    return fields


def remove_mask(folder: Path, adapter: bool) -> None:
    """
    Remove the mask of a model, or of an adapter, that one without a mask is about to replace in a folder, with the
    code and the card that are about it. A mask that is there alone, or beside what is not replaced, stays.
    """
    has_model = (folder / CONFIG_NAME).is_file()
    if has_model if adapter else not has_model:
        return
    if adapter and not (folder / ADAPTER_CONFIG_NAME).is_file():
        return
    stale = own_state(folder)
    if stale or (folder / CODE_NAME).is_file():
        if own_card(folder / CARD_NAME) is not None:
            stale.add(CARD_NAME)
        for name in (*stale, CODE_NAME):
            (folder / name).unlink(missing_ok=True)
        logger.warning(
            f"{folder}: the mask that was saved here is removed, since the {'adapter' if adapter else 'model'} that "
            "replaces its own has none."
        )


def _base_of(mask):
    """The model that a mask was found for, and its revision."""
    return tuple(mask.metadata.get(name) for name in ("base_model", "base_model_revision"))


def check_base(model: PreTrainedModel, mask: SparseMask, strict: bool = False) -> None:
    """Check whether a mask was found for the weights that it is to be used with."""
    if is_for(mask.metadata, model):
        return
    found = _base_of(mask)
    here = (model.config.name_or_path or None, commit_of(model.config))
    if all(None in pair or pair[0] == pair[1] or _same_folder(*pair) for pair in zip(found, here, strict=True)):
        return
    names = [printable(f"{name} (revision {revision or 'unknown'})") for name, revision in (found, here)]
    message = f"the mask was found for {names[0]}, this model is {names[1]}"
    if strict:
        raise ValueError(f"{message}: with strict=True both must be the same")
    logger.warning(f"{message}.")


def _same_folder(one, other):
    return os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other)


class SparseModelMixin(MaskedForward, _ModelBase):
    """
    What every model with a mask has: its [`SparseAttention`] as `sparse_attention`, the methods `freeze` and
    `set_mask`, and a `save_pretrained` that writes the frozen mask beside the weights.
    """

    # Otherwise Trainer assumes that the model divides the loss by the number of accumulation steps itself.
    accepts_loss_kwargs = False

    @property
    def sparse_attention(self) -> SparseAttention:
        """The [`SparseAttention`] of the base model."""
        return get_sparse_attention(self)

    def set_mask(self, mask: SparseMask | torch.Tensor) -> None:
        """
        Run through a [`SparseMask`], or a bool tensor as [`attach`] takes it, from now on, see
        [`SparseAttention.set_mask`]. Warns if it was found for another base model than the mask before, and than this
        model.
        """
        before = self.sparse_attention.mask
        if isinstance(mask, SparseMask) and (before is None or _base_of(before) != _base_of(mask)):
            check_base(self, mask)
        self.sparse_attention.set_mask(mask)

    def freeze(
        self, threshold: float | None = None, sparsity: float | None = None, metadata: dict[str, Any] | None = None
    ) -> SparseMask:
        """End the search and return the [`SparseMask`], see [`SparseAttention.freeze`]."""
        return self.sparse_attention.freeze(threshold, sparsity, metadata)

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Save the model as transformers does, the frozen mask as `mask_config.json` and `mask.safetensors`, and a card.
        A folder holds one state of a mask: the files of a search or a mask that was saved there before are removed. A
        README.md of the user stays. The arguments are those of `PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: If layers were removed from the model, but not from its mask.
        """
        hub = {name: kwargs.pop(name) for name in HUB_UPLOAD_ARGUMENTS if name in kwargs}
        self.prepare_saving()
        if is_main_process:
            keep_inside(Path(save_directory))
            # Before anything is written: what an interrupted save leaves must not pass for a model.
            for name in self._contradicting_files():
                (Path(save_directory) / name).unlink(missing_ok=True)
        state_dict = self._with_logits(state_dict)
        super().save_pretrained(save_directory, is_main_process, state_dict, False, *args, **kwargs)
        if is_main_process and getattr(self, "_hf_peft_config_loaded", False):
            # Transformers has written the adapter alone.
            save_with_adapter(self.sparse_attention, Path(save_directory))
        elif is_main_process:
            self._save_mask(Path(save_directory))
            save_model_card(self, Path(save_directory))
        if push_to_hub:
            # Not within the save above, which uploads only what it has written itself, without the mask.
            hub.setdefault("repo_id", Path(save_directory).name)
            self.push_to_hub(**hub, token=kwargs.get("token"))

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """The weights, with a warning if they are saved as a part of others by what knows of no masks."""
        if prefix and not plugin_enabled and sparse_attention_of(self) is not None:
            logger.warning_once(
                f"The weights of a model that contains a {type(self).__name__} with a mask do not hold that mask, and "
                "while sparsebert.plugin is disabled, save_pretrained of such a model or of an adapter does not write "
                "it: call sparsebert.plugin.enable(), or save this part too."
            )
        return super().state_dict(*args, prefix=prefix, **kwargs)

    def prepare_saving(self) -> None:
        """Check whether the model can be loaded from what is saved, and have its configuration describe the mask."""
        self._check_layers()
        derive_configs(configs_of(self))
        self.sparse_attention.record_progress()
        self._describe_mask()

    def _describe_mask(self):
        """Have the configuration describe the mask, which another head that shares the encoder may have changed."""
        found = self.sparse_attention.config
        if isinstance(self.config, SparseBertConfig) and found is not self.config:
            self.config.changed(**{name: getattr(found, name) for name in OWN_FIELDS})

    def _check_layers(self):
        """Raise a `ValueError` before a folder is written that cannot be loaded."""
        sparse_attention = self.sparse_attention
        mask, search = sparse_attention.mask, sparse_attention.search
        layers = getattr(self.config, "num_attention_layers", self.config.num_hidden_layers)
        held = {search.num_layers} if search is not None else set()
        held |= {mask.num_layers, len(mask.rest_biases())} if mask is not None else set()
        if found := max(held - {0, 1, layers}, default=None):
            raise ValueError(
                f"the mask has {found} layers, the configuration {layers} with attention: remove layers from the "
                "stock model, and then attach the mask of those that are left, mask.replace(keep=..., rest_bias=...)"
            )

    def _with_logits(self, state_dict):
        """The weights to save, with logits that are kept out of the parameters of the model."""
        logits = self.sparse_attention.mask_logits
        if logits is None or any(weight is logits for weight in self.sparse_attention.parameters()):
            return state_dict
        name = next(name for name, module in self.named_modules() if module is self.sparse_attention)
        given = self.state_dict() if state_dict is None else state_dict
        return {**given, f"{name}.mask_logits": logits.detach().cpu()}

    def _save_mask(self, folder):
        if self.sparse_attention.mask is not None:
            self.sparse_attention.mask.write_beside_model(folder)

    def _contradicting_files(self):
        """Names of files that belong to another state of the mask than that of this model."""
        code = () if AUTO_MAP_FIELD in saved_fields(type(self.config).model_type) else (CODE_NAME,)
        if self.sparse_attention.searching:
            return (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME, MASK_PROBS_NAME, SEARCH_CONFIG_NAME, *code)
        # A frozen model whose mask was never loaded says nothing about the mask in the folder.
        return code if self.sparse_attention.mask is None else (SEARCH_CONFIG_NAME, *code)

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, commit_message=None, **arguments):
        """The last step of `push_to_hub`. Its one commit also deletes what contradicts the new files."""
        # The step before has put a card without content, or that of the repository, in the place of the model's.
        card = Path(working_dir) / CARD_NAME
        tags = ModelCard.load(card, ignore_metadata_errors=True).data.tags if card.is_file() else None
        card.unlink(missing_ok=True)
        if (Path(working_dir) / CONFIG_NAME).is_file():  # which there is none of beside an adapter
            save_model_card(self, Path(working_dir))
        arguments |= {"commit_message": commit_message or "Upload model", "tags": tags}
        return push_folder(working_dir, repo_id, **arguments, replaced=self._contradicting_files())[0]


class AttachedModel(Derived, SparseModelMixin):
    """
    A stock model with a mask from [`attach`], under the name of its stock class. The files that it saves stay stock.
    While searching, the weights contain the mask logits as well, and `search_config.json` says what is searched.
    """

    def _save_mask(self, folder):
        super()._save_mask(folder)
        if self.sparse_attention.searching:
            replace_files({folder / SEARCH_CONFIG_NAME: search_file(self.sparse_attention.config)})

    def _contradicting_files(self):
        names = super()._contradicting_files()
        return tuple(n for n in names if n != SEARCH_CONFIG_NAME) if self.sparse_attention.searching else names
