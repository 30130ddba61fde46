"""The callback that tells a search how far the training is, and ends it."""

from transformers import TrainerCallback
from transformers.utils import logging


logger = logging.get_logger(__name__)


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


def forget(optimizer, parameter):
    """Take a parameter out of an optimiser; its groups and the state of the others stay."""
    for group in optimizer.param_groups:
        group["params"] = [other for other in group["params"] if other is not parameter]
    optimizer.state.pop(parameter, None)
