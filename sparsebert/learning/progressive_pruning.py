"""
Progressive pruning: a schedule removes attention entries while the model trains, then the mask is frozen.

Letters: B batch, L layers (1 when shared), H heads, n mask length, K parameters of the mask per head, P the keep
probability.
"""

import inspect
import json
import math
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.utils import logging

from ..attention.backends import BACKENDS
from ..attention.model_masks import sparse_attention_of
from ..checks import check_choice, check_range, nearest
from ..masks.expansion import fixed_entries, table_policy
from ..masks.sparse_mask import SparseMask
from .attention_scores import AttentionScores
from .budget import scheduled
from .learned_mask import LearnedMask, save_probs
from .search_schedule import forget
from .selection import SCOPES, prune


logger = logging.get_logger(__name__)

PRUNING_NAME = "pruning.safetensors"
# Share of the entries that the schedule "step" removes at once.
STEP = 0.1


def _cubic(passed: float, final: float) -> float:
    return scheduled(passed, 0.0, 1.0, 0.0, final).item()


def _linear(passed: float, final: float) -> float:
    return passed * final


def _step(passed: float, final: float) -> float:
    levels = math.ceil(final / STEP - 1e-9)
    return final if passed >= 1 else min(final, STEP * (1 + math.floor(passed * (levels - 1) + 1e-9)))


# Name to the sparsity at a fraction of the way from `start` to `end`. Source of "cubic": arXiv 1710.01878, Section 3.
SCHEDULES: dict[str, Callable[[float, float], float]] = {"cubic": _cubic, "linear": _linear, "step": _step}

# Name to the scores `(L, H, K)` of a search. Those of "attention" are collected while the model trains.
SCORES: dict[str, Callable[[LearnedMask], torch.Tensor] | None] = {
    "probs": LearnedMask.probs,
    "logits": LearnedMask.alpha,
    "attention": None,
}


def _fixed(mask):
    return fixed_entries(mask.length, mask.special_tokens, mask.diagonal, mask.special_rows)


def _least_kept(mask, allow_empty_rows):
    """Number of entries per head that pruning cannot remove: the fixed ones, and one key for every query."""
    on = _fixed(mask) == 1
    return int(on.sum() + (0 if allow_empty_rows else (~on.any(-1)).sum()))


class ProgressivePruning(TrainerCallback):
    """
    Removes attention entries while a model trains. After the last pruning step the mask is frozen, and training
    continues through it with the same optimizer and learning rate schedule. Removed entries stay removed. All other
    entries are on and nothing is sampled, so that freezing changes nothing.

    With a search (`score` `"probs"` or `"logits"`) the logits are trained together with the weights, by the
    straight-through gradient of P and without a penalty. Without a search (`"attention"`) the model has the pattern
    `"dense"`, and the score of an entry is its mean attention probability over the batches since the last pruning
    step. All layers share a mask if `share_layers` is set in the configuration, as it is by default, and always in
    fine-tuning.

    Args:
        final_sparsity (`float`): Fraction of entries removed in the end, in (0, 1).
        start (`float`, *optional*, defaults to 0.1): Fraction of the training before anything is removed.
        end (`float`, *optional*, defaults to 0.6): Fraction at which the mask is frozen, less than 1: at least one
            step of training follows.
        schedule (`str`, *optional*, defaults to `"cubic"`): How sparsity grows in between: `"cubic"` (fast at first),
            `"linear"` or `"step"` (by tenths).
        score (`str`, *optional*, defaults to `"probs"`): What ranks the entries: `"probs"` or `"logits"` (which differ
            only where P is 0 or 1 in float32), or `"attention"`.
        scope (`str`, *optional*, defaults to `"head"`): `"head"` removes the same share of every head, `"global"`
            ranks all heads and layers together.
        every (`int`, *optional*, defaults to 10): Optimizer steps between pruning steps, except for `"step"`.

    Raises:
        ValueError: If a value is out of its range. Raised before training if the model does not fit the score, is
            already sparse or cannot become this sparse, or if training is distributed.
    """

    def __init__(
        self,
        final_sparsity: float,
        start: float = 0.1,
        end: float = 0.6,
        schedule: str = "cubic",
        score: str = "probs",
        scope: str = "head",
        every: int = 10,
    ) -> None:
        for name, value in (("final_sparsity", final_sparsity), ("start", start), ("end", end)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"pruning: {name} must be a number, got {value!r}")
        if not 0 < final_sparsity < 1:
            raise ValueError(f"pruning: final_sparsity must be in (0, 1), got {final_sparsity!r}")
        if not 0 <= start <= end < 1:
            raise ValueError(f"pruning: start and end must be 0 <= start <= end < 1, got {start!r} and {end!r}")
        check_range("pruning: every", every, 1)
        check_choice("pruning: schedule", schedule, tuple(SCHEDULES))
        check_choice("pruning: score", score, tuple(SCORES))
        check_choice("pruning: scope", scope, SCOPES)
        self.final_sparsity, self.start, self.end = final_sparsity, start, end
        self.schedule, self.score, self.scope, self.every = schedule, score, scope, every
        self._pruned: Any = None  # the SparseAttention that this training prunes
        self._attention = AttentionScores()

    @classmethod
    def from_settings(cls, settings: dict[str, Any] | None) -> "ProgressivePruning | None":
        """The callback that the field `pruning` of a recipe describes; `None` for `None`."""
        if settings is None:
            return None
        if not isinstance(settings, dict):
            raise ValueError(f"pruning must hold fields, such as {{final_sparsity: 0.9}}, got {settings!r}")
        allowed = list(inspect.signature(cls).parameters)
        for name in settings:
            if name not in allowed:
                raise nearest("field of pruning", str(name), allowed)
        if "final_sparsity" not in settings:
            raise ValueError("pruning: final_sparsity is missing")
        return cls(**settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the class."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def check(self, model: PreTrainedModel) -> None:
        """Check whether a model can be pruned with these settings."""
        sparse_attention = sparse_attention_of(model)
        if sparse_attention is None:
            raise ValueError("pruning: the model carries no mask: give it a search, or the pattern 'dense'")
        config, search, backend = sparse_attention.config, sparse_attention.search, model.config._attn_implementation
        if sparse_attention.carrier.window is not None:
            raise ValueError(f"pruning: a model of type {model.config.model_type!r} has sliding windows already")
        if search is None and sparse_attention.mask.sparsity > 0:
            raise ValueError(
                f"pruning: the model runs through {_mode(sparse_attention)}, which removes "
                f"{sparse_attention.mask.sparsity:.1%} already: start from the pattern 'dense'"
            )
        if (search is not None) == (self.score == "attention"):
            wanted = "the pattern 'dense' instead of a search" if self.score == "attention" else "a search"
            raise ValueError(f"pruning: score {self.score!r} needs {wanted}, got {_mode(sparse_attention)}")
        if self.score == "attention" and backend in BACKENDS and "weights" not in BACKENDS[backend].supports:
            able = [name for name, row in BACKENDS.items() if "weights" in row.supports]
            raise ValueError(
                f"pruning: score 'attention' needs attention probabilities, which {backend} does not give: use "
                f"{', '.join(able)} or sparse_auto"
            )
        if config.target_sparsity is not None:
            raise ValueError(
                f"pruning: target_sparsity must be unset beside final_sparsity, got {config.target_sparsity}"
            )
        if search is not None and search.mask_form == "multiplicative":
            raise ValueError("pruning: mask_form must be 'additive' or 'log', got 'multiplicative'")
        length = config.mask_length
        kept = _least_kept(sparse_attention.mask, config.allow_empty_rows) if search is None else search.least_kept
        if self.final_sparsity > 1 - kept / length**2:
            raise ValueError(
                f"pruning: final_sparsity {self.final_sparsity} cannot be reached: special tokens, a kept diagonal "
                f"and one key for every query are {kept} of the {length**2} entries of a mask for {length} tokens, so "
                f"it is at most {1 - kept / length**2:.4f}"
            )

    def _begin(self, model):
        self._pruned = sparse_attention_of(model)
        self._attention.clear()
        if self._pruned.searching:
            self._pruned.start_pruning()

    def on_init_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
            raise ValueError("pruning: training must run in one process, without DeepSpeed or FSDP")
        if args.load_best_model_at_end:
            raise ValueError("pruning: load_best_model_at_end must be false: checkpoints differ in their sparsity")
        self.check(model)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.max_steps < 2:
            raise ValueError(f"pruning: training must have at least 2 steps, got max_steps {state.max_steps}")
        if self._pruned is not sparse_attention_of(model):
            self.on_init_end(args, state, control, model)
            self._begin(model)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._attention.unwatch(model)
        self._pruned = None

    def on_step_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        step, (_, last) = state.global_step, self._bounds(state.max_steps)
        if step > last:
            return
        sparse_attention = sparse_attention_of(model)
        due = self._due(step, state.max_steps)
        if due > self._due(step - 1, state.max_steps):
            score_of = SCORES[self.score]
            if score_of is None:
                self._prune_by_attention(sparse_attention, due)
            else:
                learned = sparse_attention.learned
                learned.prune(score_of(learned), due, self.scope)
        if step == last:
            self._freeze(sparse_attention, optimizer, Path(str(args.output_dir)))
        elif self.score == "attention":
            self._attention.watch(model)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        # In every step anew: a training that is interrupted leaves nothing on the model.
        self._attention.unwatch(model)

    def _bounds(self, max_steps):
        """
        The first and the last step before which entries are removed. At least one step comes before, to rank entries
        by, and one after.
        """
        last = max(1, min(math.ceil(self.end * max_steps), max_steps - 1))
        return min(max(1, math.ceil(self.start * max_steps)), last), last

    def _due(self, step, max_steps):
        """Sparsity during this step."""
        first, last = self._bounds(max_steps)
        if step < first:
            return 0.0
        if step >= last:
            return self.final_sparsity
        if self.schedule != "step":
            step -= (step - first) % self.every
        return SCHEDULES[self.schedule]((step - first) / (last - first), self.final_sparsity)

    def _prune_by_attention(self, sparse_attention, sparsity):
        mask, config = sparse_attention.mask, sparse_attention.config
        scores = self._attention.mean()
        if config.share_layers:
            scores = scores.mean(0, keepdim=True)
        index = torch.arange(mask.length**2).view(mask.length, mask.length)
        kept, scores = mask.to_table().expand_as(scores), scores.cpu()
        kept = prune(
            kept.flatten(2), scores.flatten(2), index, _fixed(mask), sparsity, self.scope, config.allow_empty_rows
        ).view_as(kept)
        pruned = mask.replace(
            keep=kept,
            form="table",
            length_policy=table_policy(mask.length_policy),
            rest_bias=None if mask.rest_bias is None else mask.rest_bias.expand(len(kept), -1),
            metadata={"base_model": sparse_attention.carrier.name or None, "pruning": self.settings},
        )
        sparse_attention.set_mask(pruned)
        self._attention.clear()

    def _freeze(self, sparse_attention, optimizer, output):
        if sparse_attention.searching:
            learned, logits = sparse_attention.learned, sparse_attention.mask_logits
            probs, log_odds = learned.found_probs(), learned.log_odds()
            sparse_attention.freeze(metadata={"pruning": self.settings})
            if optimizer is not None:
                forget(optimizer, logits)
            save_probs(output, probs, log_odds, sparse_attention.mask)
        asked, got = self.final_sparsity, sparse_attention.mask.sparsity
        logger.warning(f"pruning: the mask is frozen, asked for a sparsity of {asked:.3f}, got {got:.3f}.")

    def save(self, checkpoint: str | PathLike, state: TrainerState) -> None:
        """Write what [`~ProgressivePruning.restore`] reads into a checkpoint that is being saved."""
        frozen = state.global_step > self._bounds(state.max_steps)[1]
        metadata = {"settings": json.dumps(self.settings), "frozen": json.dumps(frozen)}
        save_file(self._attention.sums, Path(checkpoint) / PRUNING_NAME, metadata)

    def restore(self, checkpoint: str | PathLike, model: PreTrainedModel) -> None:
        """Continue from a checkpoint that passed [`check_checkpoint`], before its weights are read."""
        sparse_attention = sparse_attention_of(model)
        with safe_open(Path(checkpoint) / PRUNING_NAME, "pt", device=str(model.device)) as file:
            sums = {name: file.get_tensor(name) for name in file.keys()}
            frozen = json.loads(file.metadata()["frozen"])
        if frozen or self.score == "attention":
            sparse_attention.set_mask(SparseMask.from_pretrained(checkpoint), search=sparse_attention.config.search)
        if not frozen:
            self._begin(model)
        self._pruned, self._attention.sums = sparse_attention, sums


def _mode(sparse_attention: Any) -> str:
    """What a model runs through, for messages."""
    if sparse_attention.searching:
        return f"search {sparse_attention.search.name!r}"
    pattern = sparse_attention.config.pattern
    return f"pattern {pattern!r}" if pattern else "a frozen mask"


def stored_settings(checkpoint: str | PathLike) -> dict[str, Any] | None:
    """The settings of the run that wrote a checkpoint; `None` if it did not prune."""
    path = Path(checkpoint) / PRUNING_NAME
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["settings"])
