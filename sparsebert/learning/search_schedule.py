"""
The Trainer callback that advances a search and ends it. What follows from its progress is elsewhere: the temperature
in `learned_mask.py`, the budget in `budget.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.utils import logging

from ..attention.model_masks import sparse_attention_of
from ..checks import check_range
from ..masks.mask_files import MASK_CONFIG_NAME, check_metadata
from ..masks.sparse_mask import SparseMask
from .learned_mask import save_probs
from .rank_agreement import check_same_mask
from .selection import check_selection


logger = logging.get_logger(__name__)


def _searched_in(model):
    """The mask of a model or a part of it that is searched, as in an encoder-decoder, or else that of the model."""
    found = sparse_attention_of(model)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    parts = [module for module in modules if sparse_attention_of(module) is not None]
    searched = {id(part): part for part in map(sparse_attention_of, parts) if part.searching}
    if len(searched) > 1:
        raise ValueError(f"SearchSchedule is for one search, not {len(searched)}: call set_progress of each")
    return next(iter(searched.values()), found)


class SearchSchedule(TrainerCallback):
    """
    Tells a mask that is being learned how far the search has progressed, which its temperature and sparsity follow. If
    the search ends before the training does, the mask is frozen at that point, and training continues through it with
    the same optimizer. The mask may be that of a part of the model, such as the encoder of an encoder-decoder. The
    processes of a distributed training compare their frozen masks when the training begins and when the search ends.

    When the mask is frozen during the training, P and the outcome are saved to the output folder, see [`save_probs`],
    since a run that resumes after that point cannot find them again.

    Args:
        end (`float`, *optional*, defaults to 1.0): Fraction of the training after which the mask is frozen, in (0, 1].
            With 1 the mask is not frozen: call `model.freeze()` after the training.
        threshold (`float`, *optional*): See [`SparseAttention.freeze`].
        sparsity (`float`, *optional*): See [`SparseAttention.freeze`].
        metadata (`dict`, *optional*): Provenance to store with the frozen mask.
        position (`Callable`, *optional*): Function of the `TrainerState` that returns how far the training is and
            where it ends. Defaults to the steps; [`TimeBudget`] has one that follows the clock.

    Attributes:
        probs (`torch.Tensor`): P when the mask was frozen, see [`LearnedMask.found_probs`]; `None` before.
        log_odds (`torch.Tensor`): See [`LearnedMask.log_odds`], likewise.
        mask ([`SparseMask`]): The frozen mask, likewise.
        outcome (`dict`): How the search ended, see [`LearnedMask.to_mask`]; `None` before.

    Raises:
        ValueError: If a value is out of its range, or `threshold` and `sparsity` are both given. Raised before the
            first step if `end` is less than 1 and the mask is pruned, because [`ProgressivePruning`] freezes it, or
            `load_best_model_at_end` is set: the best weights may be from before the mask was frozen. Raised also if a
            training resumes from a checkpoint with a frozen mask, and its model is not that of the checkpoint.
        MaskMismatchError: Raised by the training if the processes have different masks.
    """

    def __init__(
        self,
        end: float = 1.0,
        threshold: float | None = None,
        sparsity: float | None = None,
        metadata: dict[str, Any] | None = None,
        position: Callable[[TrainerState], tuple[float, int]] | None = None,
    ) -> None:
        check_range("search_end", end, 0, 1, (int, float))
        if end == 0:
            raise ValueError(f"search_end must be in (0, 1], got {end!r}")
        check_selection(threshold, sparsity)
        check_metadata(metadata or {})
        self.end = end
        self._freezing = (threshold, sparsity, metadata)
        self._position = position
        self._forget()

    def _forget(self) -> None:
        """Forget an earlier search."""
        self._refused = False
        self.probs: torch.Tensor | None = None
        self.log_odds: torch.Tensor | None = None
        self.mask: SparseMask | None = None
        self.outcome: dict[str, Any] | None = None

    def on_init_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        sparse_attention = _searched_in(model)
        if not args.load_best_model_at_end or sparse_attention is None or not sparse_attention.searching:
            return
        if self.end < 1:
            raise ValueError(
                f"load_best_model_at_end has no meaning with search_end {self.end}: the best weights may be from "
                "before the mask was frozen; leave it out"
            )
        logger.warning(
            "load_best_model_at_end: the best checkpoint of a search may be an early one, whose mask is hardly learned"
        )

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        sparse_attention = _searched_in(model)
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if sparse_attention is not None and sparse_attention.searching and (checkpoint / MASK_CONFIG_NAME).is_file():
            raise ValueError(
                f"{checkpoint} has a frozen mask, and the model that resumes from it is searching: make it with "
                f"sparsebert.load({str(checkpoint)!r}), or use SparseBertTrainer"
            )
        if sparse_attention is not None and sparse_attention.searching:
            self._forget()
        if sparse_attention is not None:
            check_same_mask(sparse_attention.mask, "a search" if sparse_attention.searching else "none")

    def on_step_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        sparse_attention = _searched_in(model)
        if sparse_attention is None or not sparse_attention.searching:
            return
        if self.end < 1 and sparse_attention.search.pruned:
            raise ValueError(f"search_end {self.end} has no meaning with pruning, which freezes the mask itself")
        done = self._done(state)
        sparse_attention.set_progress(min(done, 1.0))
        if done >= 1:
            self._end(args, state, sparse_attention, optimizer)

    def on_train_end(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        sparse_attention = _searched_in(model)
        # A search that ends with the last step, after which none begins.
        if sparse_attention is not None and sparse_attention.searching and self._done(state) >= 1:
            self._end(args, state, sparse_attention, optimizer)

    def _done(self, state):
        """How much of the search has been done, more than 1 after its end."""
        step, last = (state.global_step, state.max_steps) if self._position is None else self._position(state)
        return step / max(self.end * last, 1)

    def _end(self, args, state, sparse_attention, optimizer):
        """Freeze the mask, if it can be, unless the search lasts as long as the training."""
        if self.end < 1 and not self._refused:
            try:
                self.freeze(sparse_attention, optimizer)
            except ValueError as error:
                # A mask with empty rows must not cost hours of training.
                self._refused = True
                logger.warning(f"search_end: the mask cannot be frozen yet, so the search continues: {error}")
            else:
                if state.is_world_process_zero:
                    self.save(Path(str(args.output_dir)))

    def freeze(self, sparse_attention: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """End the search of a [`SparseAttention`], and take its logits out of the optimizer. Sets the attributes."""
        learned, logits = sparse_attention.learned, sparse_attention.mask_logits
        probs, log_odds = learned.found_probs(), learned.log_odds()
        try:
            _, outcome = sparse_attention.end_search(*self._freezing)
        except (ValueError, FloatingPointError) as error:
            check_same_mask(None, f"a mask that is refused ({error})")  # the others are waiting for the answer
            raise
        check_same_mask(sparse_attention.mask)
        self.outcome = outcome
        self.probs, self.log_odds, self.mask = probs, log_odds, sparse_attention.mask
        if optimizer is not None:
            forget(optimizer, logits)

    def save(self, folder: Path) -> None:
        """Save what was found when the mask was frozen, see [`save_probs`]."""
        if self.probs is not None and self.log_odds is not None and self.mask is not None:
            save_probs(folder, self.probs, self.log_odds, self.mask, self.outcome)


def forget(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Take a parameter out of an optimizer that has it. Its groups and the state of the other parameters stay."""
    if not any(other is parameter for group in optimizer.param_groups for other in group["params"]):
        return  # engines that shard keep an optimizer of another kind, which never has the logits
    for group in optimizer.param_groups:
        group["params"] = [other for other in group["params"] if other is not parameter]
    optimizer.state.pop(parameter, None)
