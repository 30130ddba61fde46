"""What the scripts share: the Trainer, the arguments of pre-training, output folders, metrics files."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from .checkpoints import check_checkpoint
from .masks.sparse_mask import MASK_CONFIG_NAME, SparseMask
from .pruning import ProgressivePruning, forget


logger = logging.get_logger(__name__)


@dataclass
class PretrainingArguments:
    """
    Section `data` of a pre-training recipe.

    Args:
        text (`str` or `list`): `"builtin"`, files, or `"hub:owner/name"`, see [`load_documents`].
        validation (`str` or `list`, *optional*): The same for the held-out text; by default 1 document in 100.
        tokenizer (`str`, *optional*): Folder or Hub id; by default a WordPiece of `model.vocab_size` is trained.
        base_model (`str`, *optional*): Folder or Hub id of weights to start from.
        mask (`str`, *optional*): Folder or Hub id of a [`SparseMask`] to train through.
        nsp (`bool`): Next-sentence pairs and loss (BERT); otherwise packed text and MLM only, or with
            `model.is_decoder` the prediction of the next token.
        max_length (`int`): Tokens per example.
        max_tokens (`int`, *optional*): Stop reading the training text here.
        max_validation_tokens (`int`): Stop reading the held-out text here.
        mlm_probability (`float`): Share of the tokens to predict.
        freeze_threshold (`float`, *optional*): Keep what has P above it; 1/2 where nothing else is asked for.
        freeze_sparsity (`float`, *optional*): Keep the most probable down to this sparsity instead; by default the
            model's `target_sparsity`.
        search_end (`float`): Fraction of the training at which the mask is frozen; the rest trains through it.
        pruning (`dict`, *optional*): Arguments of [`ProgressivePruning`], such as `{"final_sparsity": 0.9}`: the mask
            is pruned by a schedule and frozen within the training.
        attn_implementation (`str`): Backend, `"sparse_auto"` or a name of `BACKENDS`.
        pictures (`bool`): Draw the mask in the end, where matplotlib is installed.
        overwrite (`bool`): Accept an output folder that is not empty.
    """

    text: str | list = "builtin"
    validation: str | list | None = None
    tokenizer: str | None = None
    base_model: str | None = None
    mask: str | None = None
    nsp: bool = True
    max_length: int = 128
    max_tokens: int | None = None
    max_validation_tokens: int = 200_000
    mlm_probability: float = 0.15
    freeze_threshold: float | None = None
    freeze_sparsity: float | None = None
    search_end: float = 1.0
    pruning: dict | None = None
    attn_implementation: str = "sparse_auto"
    pictures: bool = True
    overwrite: bool = False


class SearchSchedule(TrainerCallback):
    """
    Tells the mask how much of its search is done, for everything about it that is scheduled, and where the search ends
    before the training, freezes it: training goes on through the frozen mask with the same optimiser.

    Args:
        end (`float`): Fraction of the training, in (0, 1]; 1 leaves freezing to the caller.
        threshold, sparsity (`float`, *optional*): As of [`SparseAttention.freeze`].
        metadata (`dict`, *optional*): The same.

    Raises:
        ValueError: If `end` is out of its range.
    """

    def __init__(self, end=1.0, threshold=None, sparsity=None, metadata=None):
        if not 0 < end <= 1:
            raise ValueError(f"search_end must be in (0, 1], got {end!r}")
        self.end = end
        self._freezing = (threshold, sparsity, metadata)
        self.probs = self.outcome = self._refused = None

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        sparse_attention = getattr(model.base_model, "sparse_attention", None)
        if sparse_attention is None or not sparse_attention.searching:
            return
        done = state.global_step / max(self.end * state.max_steps, 1)
        sparse_attention.set_progress(min(done, 1.0))
        if self.end < 1 and done >= 1 and self._refused is None:
            try:
                self.freeze(sparse_attention, optimizer)
            except ValueError as error:
                self._refused = error  # a mask with empty rows: hours of training are not lost for it
                logger.warning(f"search_end: the mask cannot be frozen yet, the search goes on: {error}")

    def freeze(self, sparse_attention, optimizer=None):
        """End the search; keeps P `(L, H, n, n)` as `probs` and what [`SparseAttention.outcome`] says as `outcome`."""
        threshold, sparsity, metadata = self._freezing
        probs, logits = sparse_attention.mask_probs(), sparse_attention.mask_logits
        outcome = sparse_attention.outcome(threshold, sparsity)
        sparse_attention.freeze(threshold, sparsity, metadata)
        self.probs, self.outcome = probs, outcome
        if optimizer is not None:
            forget(optimizer, logits)


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


def check_output_dir(path, overwrite=False, resume=False):
    """
    Raises:
        FileExistsError: If the folder holds anything, unless told to overwrite or resume.
    """
    if not (overwrite or resume) and Path(path).is_dir() and any(Path(path).iterdir()):
        raise FileExistsError(f"output_dir {path} is not empty: choose another, or pass --overwrite true")


def write_metrics(path, metrics):
    """Write a metrics file (JSON, 6 significant digits), whole or not at all, and return what a reader gets."""
    text = json.dumps(_rounded(metrics), indent=2) + "\n"
    state = PartialState()
    if state.is_main_process:
        temporary = Path(f"{path}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
    state.wait_for_everyone()
    return json.loads(text)


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


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
