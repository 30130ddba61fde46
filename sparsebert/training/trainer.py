"""The Trainer of pre-training and fine-tuning, and the metrics of pre-training."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..masks.mask_files import MASK_CONFIG_NAME
from ..masks.sparse_mask import SparseMask
from ..search.progressive_pruning import ProgressivePruning
from ..search.search_schedule import SearchSchedule
from .checkpoint_manifests import whole_checkpoint
from .resuming import check_checkpoint


if TYPE_CHECKING:
    from transformers import EvalPrediction
    from transformers.trainer_utils import EvalLoopOutput


class SparseBertTrainer(Trainer):
    """
    A [`~transformers.Trainer`] for models with a mask. It differs from the stock Trainer in that

    - the logits of the mask and of entmax's alpha get no weight decay;
    - the logs show the sparsity of the mask being learned, and the number of its rows that keep nothing;
    - the loss is averaged over accumulated batches, whatever the model;
    - a run only resumes from a checkpoint of the same search;
    - a checkpoint is complete, with a manifest, or removed; older ones are deleted only then;
    - evaluation keeps the order of the examples, masks the same tokens every time, and does not change the random
      state of the training.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Otherwise the Trainer would leave the division by accumulation steps and processes to a stock model, which
        # only does so for inputs named "labels": the gradients of others would be too large by that factor.
        self.model_accepts_loss_kwargs = False
        if self._callback(SearchSchedule) is None:
            self.add_callback(SearchSchedule())

    def _callback(self, kind):
        return next((callback for callback in self.callback_handler.callbacks if isinstance(callback, kind)), None)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        # The stock Trainer only loads the weights: the search they belong to must be the same, and its mask loaded.
        pruning, freezes = self._callback(ProgressivePruning), self._callback(SearchSchedule).end < 1
        check_checkpoint(resume_from_checkpoint, self.model, pruning, freezes)
        if pruning is not None:
            pruning.restore(resume_from_checkpoint, self.model)
        elif freezes and (Path(resume_from_checkpoint) / MASK_CONFIG_NAME).is_file():
            sparse_attention = self.model.base_model.sparse_attention
            mask = SparseMask.from_pretrained(resume_from_checkpoint)
            sparse_attention.set_mask(mask, search=sparse_attention.config.search)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # resumed at the end: the stock Trainer would do one step more
        else:
            super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        folder = Path(self._get_output_dir(trial))
        try:
            with whole_checkpoint(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate_checkpoints(str(folder), limit, self.state.best_model_checkpoint, use_mtime=True)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.endswith(("mask_logits", "alpha_logits"))]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # A dense stock model has no such module.
        sparse_attention = getattr(self.accelerator.unwrap_model(self.model).base_model, "sparse_attention", None)
        if "loss" in logs and sparse_attention is not None and sparse_attention.searching:
            mask = sparse_attention.thresholded_mask()
            logs |= {"sparsity": round(mask.sparsity, 4), "empty_rows": mask.num_empty_rows()}
        super().log(logs, *args, **kwargs)

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


def reduce_logits(
    logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor | tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """
    Reduce the logits of pre-training to what [`pretraining_metrics`] needs, for `preprocess_logits_for_metrics`.

    Returns:
        `tuple`: The predicted ids `(B, n)`, the negative log-likelihoods `(B, n)` (0 for tokens that are not masked)
        and, with next-sentence pairs, the predicted classes `(B,)`.
    """
    logits = logits if isinstance(logits, tuple) else (logits,)
    labels = labels if isinstance(labels, tuple) else (labels,)
    losses = torch.nn.functional.cross_entropy(logits[0].flatten(0, 1).float(), labels[0].flatten(), reduction="none")
    reduced = (logits[0].argmax(-1), losses.view(labels[0].shape))
    return (*reduced, logits[1].argmax(-1)) if len(labels) > 1 else reduced


def pretraining_metrics(prediction: "EvalPrediction") -> dict[str, float]:
    """Loss and accuracy of the masked tokens and, with next-sentence pairs, their accuracy, for `compute_metrics`."""
    labels: Any = prediction.label_ids if isinstance(prediction.label_ids, tuple) else (prediction.label_ids,)
    predictions: Any = prediction.predictions
    guesses, losses, *pairs = predictions
    masked = labels[0] != -100
    metrics = {
        "mlm_loss": float(losses[masked].mean()),
        "mlm_accuracy": float((guesses == labels[0])[masked].mean()),
    }
    if pairs:
        metrics["nsp_accuracy"] = float((pairs[0] == labels[1].reshape(-1)).mean())
    return metrics


def reduce_causal_logits(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """[`reduce_logits`] for a causal model: the negative log-likelihoods `(B, n - 1)` of tokens 1 to n - 1."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    return losses.view(labels.shape[0], -1)


def causal_metrics(prediction: "EvalPrediction") -> dict[str, float]:
    """Loss (nats per token) and perplexity of a causal model, for `compute_metrics`."""
    losses, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    loss = float(losses[labels[:, 1:] != -100].mean())
    return {"lm_loss": loss, "perplexity": math.exp(loss)}
