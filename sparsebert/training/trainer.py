"""The Trainer of pre-training and fine-tuning."""

import math
import shutil
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging

from ..attention.model_masks import sparse_attention_of, without_adapters
from ..data.streams import RowStream
from ..files import replace_files
from ..finite_weights import check_weights, first_bad_weight
from ..learning.learned_mask import is_of_mask
from ..learning.progressive_pruning import ProgressivePruning
from ..learning.search_schedule import SearchSchedule
from ..masks.mask_files import MASK_CONFIG_NAME, MASK_PROBS_NAME
from ..masks.sparse_mask import SparseMask
from ..models.bert.masked_token_head import skips_logits
from .divergence import diverged
from .hub_trainer import HubTrainer
from .runs.checkpoint_manifests import whole_checkpoint
from .runs.resuming import check_checkpoint
from .runs.run_checks import warn_of_slow_bfloat16
from .sharded_trainer import ShardedTrainer
from .stream_loading import StreamLoader
from .time_budget import POSITIONS, TimeBudget, TrainingClock


if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput


logger = logging.get_logger(__name__)


class MaskingEpoch(TrainerCallback):
    """
    Tells a collator whose masking depends on the epoch, such as [`ReproducibleCollator`], which one begins, and seeds
    the generator from which the loader draws the seeds of its workers.
    """

    def __init__(self, trainer: "SparseBertTrainer") -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        collator: Any = self._trainer.data_collator
        epoch, seed = int(state.epoch or 0), args.seed if args.data_seed is None else args.data_seed
        if hasattr(collator, "set_epoch"):
            collator.set_epoch(epoch)
        self._trainer.worker_seeds.manual_seed(seed + epoch)
        self._trainer.grouping.manual_seed(seed + epoch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._trainer.train_dataset, RowStream):  # the stock Trainer counts from where it resumed
            state.epoch = state.global_step / state.max_steps


class SparseBertTrainer(HubTrainer, ShardedTrainer):
    """
    A [`~transformers.Trainer`] for models with a mask. It differs from the stock Trainer in that

    - the logits of the mask and of entmax's alpha get no weight decay;
    - the gradient of the mask logits is clipped separately from that of the weights, and the logged norm is that of
      the weights;
    - in training, the head of [`SparseBertForMaskedLM`] and [`SparseBertForPreTraining`] sees only the tokens that are
      predicted, unless the loss is computed outside the model or the caller of `compute_loss` asks for the outputs;
    - the loss includes the penalty on the mask even with label smoothing or a custom loss function;
    - a loss, gradient or weight that is not finite stops the training before the next update, with an error;
    - under fp16, steps that overflow are skipped and counted in the logs as `skipped_steps`; too many in a row stop
      the training;
    - the logs show the sparsity of the mask being learned, and the number of its rows that keep nothing;
    - the loss is averaged over accumulated batches for every model;
    - the number of data loading workers changes neither the batches nor noise and dropout;
    - under DeepSpeed and FSDP every process has all mask logits, see [`ReplicatedLogits`];
    - every process reads its own part of a [`RowStream`], and a resumed run continues at the same place in the text;
    - a run only resumes from a checkpoint of the same search, and of an engine that it can read;
    - a complete checkpoint has a manifest, and older checkpoints are deleted only after it is written; what an error
      leaves incomplete is removed;
    - `train(resume_from_checkpoint=True)` takes the newest complete checkpoint, or if none is, the newest that can be
      resumed from, with a warning; damaged ones are refused;
    - a push to the Hub, at the end or of a checkpoint, contains the mask or the search, and deletes files that
      contradict it;
    - evaluation sees all examples and keeps their order, masks the same tokens every time, and does not change the
      random state of the training.

    Attributes:
        most_skipped_steps (`int`): Number of successive overflowing steps under fp16 that stops the training. The
            scaler halves its factor after each of them: 20 of them turn the initial 65536 into 1/16.
        worker_seeds (`torch.Generator`): Seeds the workers of the training data loader.
        grouping (`torch.Generator`): Draws the order of rows that are grouped by length.
        skipped_steps (`int`): Number of steps that were skipped since the process began to train.
        updates_in_step (`int`): Number of updates of the weights in this step, set by [`BatchRamp`].

    Raises:
        FloatingPointError: Raised by `train` and `save_model` if the loss, a gradient or a weight is not finite.
        ValueError: Raised by `train` if the training set has no whole batch and `dataloader_drop_last` is set.
    """

    most_skipped_steps = 20

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        warn_of_slow_bfloat16(self.args.bf16, self.args.device.type)
        # Otherwise the Trainer would leave the division by accumulation steps and processes to a stock model, which
        # only does so for inputs named "labels": the gradients of others would be too large by that factor.
        self.model_accepts_loss_kwargs = False
        if self._callback(SearchSchedule) is None:
            self.add_callback(SearchSchedule())
        if self._callback(TrainingClock) is None:
            self.add_callback(TrainingClock())
        self.worker_seeds, self.grouping = torch.Generator(), torch.Generator()
        self.add_callback(MaskingEpoch(self))
        self._step_losses: list[torch.Tensor] = []
        self._pushed_later: list[str] = []
        self.updates_in_step = 1
        self.skipped_steps = self._skipped_in_a_row = 0
        self._stream_loader: StreamLoader | None = None

    def _callback(self, kind):
        return next((callback for callback in self.callback_handler.callbacks if isinstance(callback, kind)), None)

    @property
    def train_seconds(self) -> float:
        """Seconds of training, including those before the run was resumed."""
        return self._callback(TrainingClock).elapsed

    def _restore_mask(self, resume_from_checkpoint):
        # The stock Trainer only loads the weights: the search they belong to must be the same, and its mask loaded.
        pruning, freezes = self._callback(ProgressivePruning), self._callback(SearchSchedule).end < 1
        check_checkpoint(resume_from_checkpoint, self.model, pruning, freezes)
        if pruning is not None:
            pruning.restore(resume_from_checkpoint, self.model)
        elif freezes and (Path(resume_from_checkpoint) / MASK_CONFIG_NAME).is_file():
            sparse_attention = self.model.base_model.sparse_attention
            mask = SparseMask.from_pretrained(resume_from_checkpoint)
            sparse_attention.set_mask(mask, search=sparse_attention.config.search)

        found, output = Path(resume_from_checkpoint, MASK_PROBS_NAME), Path(str(self.args.output_dir))
        if self.args.should_save and found.is_file():
            output.mkdir(parents=True, exist_ok=True)
            replace_files({output / MASK_PROBS_NAME: found.read_bytes()})

    def _save_search(self, checkpoint):
        """What a run that resumes from this checkpoint needs of a search, besides mask or logits."""
        if (pruning := self._callback(ProgressivePruning)) is not None:
            pruning.save(checkpoint, self.state)
        mask, probs = getattr(self._sparse_attention(), "mask", None), Path(str(self.args.output_dir), MASK_PROBS_NAME)
        if mask is not None and probs.is_file() and is_of_mask(probs, mask):
            shutil.copy(probs, checkpoint)

    def _freezes_on_the_way(self):
        sparse_attention = self._sparse_attention()
        searching = sparse_attention is not None and sparse_attention.searching
        return searching and self._callback(SearchSchedule).end < 1

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.model_init is None:
            self._check_weights("the model to train")
        output = super().train(*args, **kwargs)
        self._check_weights(f"after step {self.state.global_step}")
        return output

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._check_weights(f"not saved after step {self.state.global_step}")
        super().save_model(*args, **kwargs)

    def _check_weights(self, what: str) -> None:
        model: Any = self.model
        check_weights(model, what)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._step_losses.append(loss)
        return loss / self.updates_in_step  # the sum over the batches of a step is logged

    def update_within_step(self) -> None:
        """Update the weights from the batches since the last update, before the step ends. For [`BatchRamp`]."""
        self.accelerator.gradient_state._set_sync_gradients(True)
        self._clip_apart(self.model_wrapped, self.args.max_grad_norm or math.inf)
        optimizer: Any = self.optimizer
        optimizer.step()
        self.model_wrapped.zero_grad()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        # Then the model does not compute the loss, and does not add its penalty.
        outside = "labels" in inputs and (self.label_smoother is not None or self.compute_loss_func is not None)
        if model.training and not (outside or return_outputs) and skips_logits(self._inner_model(), inputs):
            inputs = {**inputs, "skip_logits": True}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        sparse_attention = self._sparse_attention() if outside and model.training else None
        if sparse_attention is not None and sparse_attention.searching:
            penalty = sparse_attention.sparsity_loss().to(loss.device)
            if self.compute_loss_func is not None:  # its loss is not divided any more
                penalty = penalty / self.current_gradient_accumulation_steps
            loss = loss + penalty
        return (loss, outputs) if return_outputs else loss

    def _sparse_attention(self) -> Any:
        """The [`SparseAttention`] of the model; a dense stock model has none."""
        model: Any = self.model
        # Unwrapping goes through all modules of a model.
        model = model if isinstance(model, PreTrainedModel) else self.accelerator.unwrap_model(model)
        return sparse_attention_of(model)

    def _inner_model(self) -> Any:
        """The model inside wrappers of processes, compilation and adapters."""
        return without_adapters(self.accelerator.unwrap_model(self.model))

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self._clip_apart(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            grad_norm = self._clip_apart(model, math.inf)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _clip_apart(self, model, max_norm):
        """
        Clip the gradients of the mask logits and of all other weights separately, and check that both are finite. The
        penalty sums over all entries, so if they were clipped together little would be left of the weights' gradient.
        """
        losses, self._step_losses = self._step_losses, []
        logits = getattr(self._sparse_attention(), "mask_logits", None)
        weights = [weight for weight in model.parameters() if weight.grad is not None and weight is not logits]
        if self._is_sharded() or any(hasattr(w.grad, "to_local") for w in weights):
            # Sharded gradients are clipped by those who shard them.
            norm = super()._clip_grad_norm(model) if max_norm < math.inf else super()._get_grad_norm(model)
            norms = [] if norm is None else [torch.as_tensor(getattr(norm, "full_tensor", lambda: norm)())]
            gradients = self._reduced_logits()
            self._check_step(model, losses, [*norms, *map(torch.linalg.vector_norm, gradients)], logits)
            if max_norm < math.inf and gradients:
                torch.nn.utils.clip_grad_norm_([logits], max_norm)
            return norm
        self.accelerator.unscale_gradients()
        groups = [weights, [] if logits is None or logits.grad is None else [logits]]
        norms = [get_total_norm([weight.grad for weight in group]) for group in groups]
        self._check_step(model, losses, norms, logits)
        if max_norm < math.inf:
            for group, norm in zip(groups, norms, strict=True):
                clip_grads_with_norm_(group, max_norm, norm)
        return norms[0]

    def _check_step(self, model, losses, norms, logits):
        numbers = [number.detach().float().to(self.args.device) for number in (*losses, *norms)]
        if logits is not None:
            # Not their sum: pruning sets logits to -inf.
            numbers.append(torch.where(logits.detach().isnan().any(), torch.nan, 0.0).to(self.args.device))
        if not numbers or bool(torch.stack(numbers).isfinite().all()):
            self._skipped_in_a_row = 0
            return
        inner, skipped = self.accelerator.unwrap_model(model), 0
        overflows = self._scales_the_loss() and not all(bool(norm.isfinite()) for norm in norms)
        if overflows and first_bad_weight(inner) is None:  # the scaler skips this step
            self.skipped_steps += 1
            skipped = self._skipped_in_a_row = self._skipped_in_a_row + 1
            if skipped < self.most_skipped_steps:
                return
        raise diverged(inner, losses, self.state.global_step + 1, self.args.output_dir, skipped)

    def _scales_the_loss(self):
        scaler = getattr(self.accelerator, "scaler", None)
        return (scaler is not None and scaler.is_enabled()) or self.accelerator.mixed_precision == "fp16"

    @contextmanager
    def _evaluation_loading(self) -> Iterator[None]:
        # Evaluation masks an example in one way, whatever the epoch of the training, and leaves no example out.
        collator: Any = self.data_collator
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        self.data_collator = collator.for_evaluation() if hasattr(collator, "for_evaluation") else collator
        try:
            yield
        finally:
            self.data_collator, self.args.dataloader_drop_last = collator, drop_last

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._stream_loader is not None:
            self._stream_loader.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._stream_loader is not None and checkpoint is not None:
            self._stream_loader.load(checkpoint)

    def get_train_dataloader(self) -> Any:
        if isinstance(self.train_dataset, RowStream):
            self.args.ignore_data_skip = True  # resumed by its state, and not by skipping batches
            self._stream_loader = StreamLoader(self.train_dataset, self.args, self.worker_seeds)
            return self._stream_loader
        loader: Any = super().get_train_dataloader()
        rows, batch = self.train_dataset, self.args.train_batch_size * self.args.world_size
        if isinstance(rows, Sized) and len(rows) < batch:
            message = f"the training set has {len(rows)} examples, fewer than a batch of {batch}"
            if self.args.dataloader_drop_last:
                raise ValueError(f"{message}, and dataloader_drop_last leaves none: take a smaller batch")
            logger.warning(f"{message}: every step sees all of them.")
        # By default it would draw from the global generator, which is for noise and dropout.
        getattr(loader, "base_dataloader", loader).generator = self.worker_seeds
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_loading():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_loading():
            return super().get_test_dataloader(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        budget = self._callback(TimeBudget)
        if budget is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        scheduler = super().create_scheduler(POSITIONS, optimizer)
        budget.pace(scheduler, self.state)
        return scheduler

    def _run_epoch(self, *args, **kwargs):
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # resumed at the end: the stock Trainer would do one step more
        else:
            super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        folder = Path(self._get_output_dir(trial))
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._pushed_later = []
        try:
            with whole_checkpoint(checkpoint):
                super()._save_checkpoint(model, trial)
                if self.args.should_save:
                    self._save_search(checkpoint)
        finally:
            self.args.save_total_limit = limit
        for pushed in self._pushed_later:
            super()._push_from_checkpoint(pushed)
        if self.args.should_save:
            rotate_checkpoints(str(folder), limit, self.state.best_model_checkpoint, use_mtime=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._pushed_later.append(checkpoint_folder)  # when it is complete

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.endswith(("mask_logits", "alpha_logits"))]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        sparse_attention = self._sparse_attention()
        if "loss" in logs and sparse_attention is not None and sparse_attention.searching:
            mask = sparse_attention.thresholded_mask()
            logs |= {"sparsity": round(mask.sparsity, 4), "empty_rows": mask.num_empty_rows()}
        if "loss" in logs and self._scales_the_loss():
            logs["skipped_steps"] = self.skipped_steps
        super().log(logs, *args, **kwargs)

    def _get_train_sampler(self, *args, **kwargs):
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            # By default it would draw from the global generator, and a resumed epoch would have another order.
            sampler.generator = self.grouping
        return sampler

    def _get_eval_sampler(self, eval_dataset):
        # The stock Trainer also groups evaluation by length and would return the predictions in that order.
        strategy, self.args.train_sampling_strategy = self.args.train_sampling_strategy, "random"
        try:
            return super()._get_eval_sampler(eval_dataset)
        finally:
            self.args.train_sampling_strategy = strategy

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> "EvalLoopOutput":
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            return super().evaluation_loop(*args, **kwargs)
