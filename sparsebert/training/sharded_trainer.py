"""What a Trainer of models with a mask does under DeepSpeed and FSDP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer
from transformers.utils import SAFE_WEIGHTS_NAME

from ..models.bert.masked_token_head import share_bias
from .replicated_logits import (
    SHARDING,
    ReplicatedLogits,
    check_weights_are_gathered,
    keep_outside,
    stored_state_type,
    wrap_layers,
)
from .runs.checkpoint_manifests import check_whole, newest_whole
from .runs.engines import check_engine, record_engine, warn_of_ignored_engine


class ShardedTrainer(Trainer):
    """
    The part of [`SparseBertTrainer`] that is about engines that shard a model.

    - The mask logits stay whole on every process, see [`ReplicatedLogits`].
    - The decoder of a head for masked tokens uses the bias of the head, see [`share_bias`].
    - A run only resumes from a checkpoint that its engine can read.
    - `save_model` writes all weights also where FSDP's checkpoints hold shards.
    """

    _sparse_attention: Callable[[], Any]
    _restore_mask: Callable[[str], None]
    _freezes_on_the_way: Callable[[], bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        warn_of_ignored_engine(self.args)
        self._replicated: ReplicatedLogits | None = None
        if self._is_sharded() and self.model is not None:
            self._fit_to_engine()

    def _is_sharded(self):
        return self.accelerator.distributed_type in SHARDING

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint: Any = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = self._newest()
        elif checkpoint:
            check_whole(checkpoint, allow_partial=True, contents=False)  # the size shows what was cut off
        if checkpoint:
            check_engine(checkpoint, self.args)
        return super().train(checkpoint or resume_from_checkpoint, *args, **kwargs)

    def _newest(self):
        """The newest complete checkpoint; if there is none, as of a stock Trainer, the newest to resume from."""
        try:
            found = newest_whole(str(self.args.output_dir))
        except ValueError:
            found = newest_whole(str(self.args.output_dir), allow_partial=True)
        return found and str(found)

    def _inner_training_loop(self, *args, **kwargs):
        if self._is_sharded():
            self._make_ready(kwargs.get("resume_from_checkpoint"))
        elif self._freezes_on_the_way() and self.args.ddp_find_unused_parameters is None:
            # By default it is false with activation checkpointing, and DDP would wait for the logits in vain.
            if self.accelerator.ddp_handler is not None:
                self.accelerator.ddp_handler.find_unused_parameters = True
        return super()._inner_training_loop(*args, **kwargs)

    def _fit_to_engine(self):
        """What must be done before the engine wraps the model, be it for training or evaluation."""
        model: Any = self.accelerator.unwrap_model(self.model)
        if self.accelerator.distributed_type == DistributedType.FSDP:
            share_bias(model)
            wrap_layers(self.accelerator.state.fsdp_plugin, model)
        if (sparse_attention := self._sparse_attention()) is not None:
            keep_outside(sparse_attention, self.args.device)

    def _make_ready(self, checkpoint):
        """What must be done before a training under an engine."""
        self._fit_to_engine()  # again: the model may be a new one
        if checkpoint is not None:
            self._restore_mask(checkpoint)
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if deepspeed:
            check_weights_are_gathered(self.accelerator.state.deepspeed_plugin.hf_ds_config)
        if self._replicated is not None:
            self.remove_callback(self._replicated)  # of an earlier training
            self._replicated = None
        sparse_attention = self._sparse_attention()
        if sparse_attention is None or not sparse_attention.searching:
            return
        if deepspeed and self.args.fp16:
            raise ValueError("fp16 must be false while DeepSpeed searches a mask: use bf16 (--bf16)")
        optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(self.args)
        self._replicated = ReplicatedLogits(sparse_attention, optimizer_class, kwargs)
        self.add_callback(self._replicated)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._replicated is not None:
            # DeepSpeed updates the weights, and may change the rate, within the step.
            optimizer: Any = self.optimizer
            self._replicated.learning_rate = optimizer.param_groups[0]["lr"]
        return super().training_step(*args, **kwargs)

    @property
    def updates_logits_apart(self) -> bool:
        """Whether the logits of a search are not among the parameters that the engine updates."""
        return self._replicated is not None

    def _reduced_logits(self):
        """The gradient of the logits, averaged over the processes, or nothing."""
        if self._replicated is None:
            return []
        scaler = getattr(self.accelerator, "scaler", None)
        return self._replicated.reduce(scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0)

    def _state_plugin(self):
        return self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        plugin = self._state_plugin()
        if plugin is not None and "SHARDED_STATE_DICT" in str(plugin.state_dict_type):
            # The stock Trainer would save nothing. A checkpoint has the weights in shards already.
            folder = str(self.args.output_dir if output_dir is None else output_dir)
            self._save(folder, {} if _internal_call else self.accelerator.get_state_dict(self.model))
            if _internal_call and self.args.should_save:
                (Path(folder) / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            record_engine(output_dir, self.args)
            if self._replicated is not None:
                self._replicated.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if not self._is_sharded():
            self._restore_mask(resume_from_checkpoint)
        with stored_state_type(self._state_plugin(), resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        with stored_state_type(self._state_plugin(), checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if self._replicated is not None:
            self._replicated.load(checkpoint)
