"""What the scripts share: the Trainer, the arguments of pre-training, output folders, metrics files."""

import math
from pathlib import Path

import torch
from transformers import Trainer
from transformers.utils import logging

from ..masks.mask_files import MASK_CONFIG_NAME
from ..masks.sparse_mask import SparseMask
from ..search.progressive_pruning import ProgressivePruning
from ..search.search_schedule import SearchSchedule
from .resuming import check_checkpoint


logger = logging.get_logger(__name__)


class SparseBertTrainer(Trainer):
    """
    The stock Trainer, except that the logits of masks and of entmax's alpha get no weight decay, logs show sparsity
    and empty rows of the mask being learned, losses are averaged over accumulated batches for every model, a run goes
    on from a checkpoint of the same search only, and evaluation keeps the examples' order, masks the same tokens each
    time and leaves the training's random state alone.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # For a stock model it would leave the division by accumulation steps and processes to the model, which gets
        # the number of items only where there are "labels": its gradients would be too large by that factor.
        self.model_accepts_loss_kwargs = False
        if self._callback(SearchSchedule) is None:
            self.add_callback(SearchSchedule())

    def _callback(self, kind):
        return next((callback for callback in self.callback_handler.callbacks if isinstance(callback, kind)), None)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        # The host reads weights alone: what they belong to must be there, and the same.
        pruning, freezes = self._callback(ProgressivePruning), self._callback(SearchSchedule).end < 1
        check_checkpoint(resume_from_checkpoint, self.model, pruning, freezes)
        if pruning is not None:
            pruning.restore(resume_from_checkpoint, self.model)
        elif freezes and (Path(resume_from_checkpoint) / MASK_CONFIG_NAME).is_file():
            sparse_attention = self.model.base_model.sparse_attention
            mask = SparseMask.from_pretrained(resume_from_checkpoint)
            sparse_attention.set_mask(mask, search=sparse_attention.config.search)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def get_decay_parameter_names(self, model):
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.endswith(("mask_logits", "alpha_logits"))]

    def log(self, logs, *args, **kwargs):
        # A dense stock model has none.
        sparse_attention = getattr(self.accelerator.unwrap_model(self.model).base_model, "sparse_attention", None)
        if "loss" in logs and sparse_attention is not None and sparse_attention.searching:
            mask = sparse_attention.thresholded_mask()
            logs |= {"sparsity": round(mask.sparsity, 4), "empty_rows": mask.num_empty_rows()}
        super().log(logs, *args, **kwargs)

    def _get_eval_sampler(self, eval_dataset):
        # The host groups by length here as well, and predictions would come back in that order.
        strategy, self.args.train_sampling_strategy = self.args.train_sampling_strategy, "random"
        try:
            return super()._get_eval_sampler(eval_dataset)
        finally:
            self.args.train_sampling_strategy = strategy

    def evaluation_loop(self, *args, **kwargs):
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            return super().evaluation_loop(*args, **kwargs)


def reduce_logits(logits, labels):
    """
    `preprocess_logits_for_metrics`: instead of a vocabulary of logits per token, the predicted ids `(B, n)`, the
    negative log-likelihoods `(B, n)` (0 where nothing is masked) and, with NSP, the predicted classes `(B,)`.
    """
    logits = logits if isinstance(logits, tuple) else (logits,)
    labels = labels if isinstance(labels, tuple) else (labels,)
    losses = torch.nn.functional.cross_entropy(logits[0].flatten(0, 1).float(), labels[0].flatten(), reduction="none")
    reduced = (logits[0].argmax(-1), losses.view(labels[0].shape))
    return (*reduced, logits[1].argmax(-1)) if len(labels) > 1 else reduced


def pretraining_metrics(prediction):
    """`compute_metrics`: loss and accuracy of the masked tokens and, with NSP, accuracy of the pairs."""
    labels = prediction.label_ids if isinstance(prediction.label_ids, tuple) else (prediction.label_ids,)
    guesses, losses, *pairs = prediction.predictions
    masked = labels[0] != -100
    metrics = {
        "mlm_loss": float(losses[masked].mean()),
        "mlm_accuracy": float((guesses == labels[0])[masked].mean()),
    }
    if pairs:
        metrics["nsp_accuracy"] = float((pairs[0] == labels[1].reshape(-1)).mean())
    return metrics


def reduce_causal_logits(logits, labels):
    """[`reduce_logits`] of a causal model: the negative log-likelihoods of tokens 1 to n - 1, `(B, n - 1)`."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    return losses.view(labels.shape[0], -1)


def causal_metrics(prediction):
    """`compute_metrics` of a causal model: loss (nats per token) and perplexity."""
    loss = float(prediction.predictions[prediction.label_ids[:, 1:] != -100].mean())
    return {"lm_loss": loss, "perplexity": math.exp(loss)}
