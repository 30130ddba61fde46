"""
A mask while it is learned: how its logits become probabilities, a sample, and the mask to freeze.

Letters: L layers (1 when shared), H heads, n mask length, K learned parameters per head, P the keep probability.
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from transformers.utils import logging

from ..files import replace_files
from ..masks.expansion import expand, fill_fixed_entries
from ..masks.mask_files import MASK_PROBS_NAME
from ..masks.sparse_mask import SparseMask
from .budget import budget_shift, collapsed, disagreement, geometric, head_budgets, scheduled
from .mask_search import PENALIZED, MaskSearch
from .searches import gumbel_noise, sample_mask, straight_through
from .selection import best_of_rows, check_selection, keep_largest, keep_shares, prune, select


logger = logging.get_logger(__name__)

# A frozen mask that misses the requested sparsity by more than this is reported.
TOLERANCE = 0.005
# With a smaller width the sigmoid is a step function without a useful gradient.
_SMALLEST_WIDTH = 0.02
# Share of the learned entries that a budget leaves free at both ends, so that P never saturates.
_MARGIN = 1e-3

# Where a file of P holds, as JSON, the outcome of the search and what identifies the mask that was frozen. The order
# of several keys would be arbitrary, and with it the bytes of the file.
_FOUND = "found"
_OUTCOME, _MASK = "search_outcome", "mask"


def _digest(mask: SparseMask) -> str:
    return hashlib.blake2b(mask.keep.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def save_probs(
    folder: Path, probs: torch.Tensor, log_odds: torch.Tensor, mask: SparseMask, outcome: dict[str, Any] | None = None
) -> None:
    """
    Save what a search found, as `mask_probs.safetensors`: P, see [`LearnedMask.found_probs`], and the log-odds, both
    with L and H joined, under the keys `"probs"` and `"log_odds"`; the outcome; and a digest of the mask, without
    which P is not used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"probs": probs.flatten(0, 1).contiguous(), "log_odds": log_odds.flatten(0, 1).contiguous()}
    metadata = {_FOUND: json.dumps({_MASK: _digest(mask), _OUTCOME: outcome})}
    replace_files({folder / MASK_PROBS_NAME: safetensors.torch.save(tensors, metadata)})


def expand_probs(probs: torch.Tensor, mask: SparseMask) -> torch.Tensor:
    """
    P of every entry `(L, H, n, n)`, fixed ones included, from that of [`LearnedMask.found_probs`] and the mask that
    the search was frozen to.
    """
    if probs.ndim == 4:
        return probs
    sizes, rules = (mask.length, mask.length, mask.block_size), (mask.length_policy, mask.symmetric)
    table = expand(probs, mask.form, *sizes, *rules, off=0.0, on=1.0, query_block_size=mask.query_block_size)
    return fill_fixed_entries(table, mask.special_tokens, mask.diagonal, mask.special_rows)


def _read_metadata(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as file:
        found = json.loads((file.metadata() or {}).get(_FOUND, "{}"))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {_FOUND} must hold fields, got {found!r}")
    return found


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """The outcome of a search that [`save_probs`] wrote to a folder, `None` if there is none."""
    try:
        return _read_metadata(folder / MASK_PROBS_NAME).get(_OUTCOME)
    except FileNotFoundError:
        return None


def is_of_mask(path: Path, mask: SparseMask) -> bool:
    """Whether a file that [`save_probs`] wrote belongs to this mask; `True` if the file does not say."""
    try:
        return _read_metadata(path).get(_MASK) in (None, _digest(mask))
    except (safetensors.SafetensorError, ValueError, RecursionError):  # it is damaged
        return False


def _watch_penalty(sample: torch.Tensor, previous: torch.Tensor | None) -> None:
    """
    Warn once if a gradient reaches a sample and its loss contains no penalty. A loss may be of several samples, all
    those since the last backward pass, and needs the penalty of one.
    """
    watch = getattr(previous, PENALIZED, None)
    if watch is None or watch.reached:
        watch = SimpleNamespace(penalized=False, reached=False)
    setattr(sample, PENALIZED, watch)

    def warn(gradient: torch.Tensor) -> None:
        watch.reached = True
        if not watch.penalized:
            logger.warning_once(
                "sparsity_weight: the loss was computed outside the model, without the penalty on the mask; add "
                "sparsebert.sparsity_loss(model) to it, or set sparsity_weight to 0"
            )

    sample.register_hook(warn)


class LearnedMask:
    """
    A mask at one moment of its search: its rules, the stored logits theta `(L, H, K)`, of which alpha is
    `mask_logit_scale` * theta, and the fraction of the search that is done, a 0-dimensional tensor in [0, 1]. It only
    holds references, so it can be made whenever it is needed.
    """

    def __init__(self, search: MaskSearch, logits: torch.Tensor, progress: torch.Tensor) -> None:
        self.search = search
        self.logits = logits
        self.progress = progress

    def with_real_last(self) -> "LearnedMask":
        """This mask with the last token of each sequence special, if position n - 1 is."""
        if self.search.last_token == "real":
            return self
        return LearnedMask(self.search.changed(last_token="real"), self.logits, self.progress)

    def alpha(self) -> torch.Tensor:
        """Mask logits `(L, H, K)`, float32."""
        return self.search.mask_logit_scale * self.logits.float()

    @property
    def kept(self) -> torch.Tensor:
        """Parameters that pruning has not removed, bool `(L, H, K)`."""
        return self.logits.detach() > -torch.inf

    def current_sparsity(self) -> torch.Tensor:
        """The sparsity that is due at this point on the way to the target, a 0-dimensional tensor on the CPU."""
        search, target = self.search, self.search.target_sparsity
        if target is None:
            raise ValueError(f"search {search.name!r} has no target_sparsity")
        first = target if search.initial_sparsity is None else min(search.initial_sparsity, target)
        return scheduled(self.progress, search.sparsity_warmup, search.sparsity_ramp, first, target)

    def temperature(self) -> float | torch.Tensor:
        """tau at this point."""
        start, end = self.search.temperature, self.search.temperature_end
        return start if start == end else geometric(self.progress, start, end)

    @property
    def _exact(self) -> bool:
        """Whether the forward pass keeps the entries of the largest P that make up the budget."""
        return self.search.has_budget and self.search.hard and not self.search.noise_scale

    def _budgets(self, sparsity: float | torch.Tensor, margin: float = 0.0) -> torch.Tensor:
        """Number of learned entries that each head keeps at a sparsity, see [`head_budgets`]."""
        search, alpha = self.search, self.alpha()
        budget = (1 - sparsity) * search.length**2 - search.num_fixed
        margin *= search.num_learned
        return head_budgets(alpha, budget, margin, search.num_learned - margin, search.sparsity_scope)

    def _within_budget(self, sparsity: float | torch.Tensor) -> torch.Tensor:
        """The parameters with the largest P that make up the budgets, bool `(L, H, K)`."""
        alpha = self.alpha().detach()  # in the order of P, but without its ties near 0 and 1
        entries, budgets = self.search.entries(alpha.device), self._budgets(sparsity).detach()
        keep = keep_shares if self.search.sparsity_scope == "global" else keep_largest
        return keep(alpha, entries, budgets)

    def _budgeted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """alpha, with a target shifted so that the budget is met, and the width of the sigmoid that gives P."""
        search, alpha = self.search, self.alpha()
        width = torch.as_tensor(search.noise_scale)
        if not search.hard or self._exact:
            width = torch.maximum(width, torch.as_tensor(self.temperature()))
        width = width.clamp(min=_SMALLEST_WIDTH).to(alpha.device)
        if not search.has_budget:
            return alpha, width
        budgets = self._budgets(self.current_sparsity(), _MARGIN)
        return alpha - budget_shift(alpha, search.entries(alpha.device), budgets, width), width

    def probs(self) -> torch.Tensor:
        """P of every parameter, `(L, H, K)`: sigmoid(alpha), with a target shifted to meet the budget."""
        alpha, width = self._budgeted()
        return torch.sigmoid(alpha / width)

    @torch.no_grad()
    def entry_probs(self) -> torch.Tensor:
        """P of every entry, fixed ones included: `(L, H, n, n)`, float32, on the CPU."""
        search = self.search
        probs = search.expand(self.probs().cpu(), search.length, off=0.0, on=1.0)
        return fill_fixed_entries(probs, search.special_tokens, search.fixed_diagonal, search.special_rows)

    @torch.no_grad()
    def found_probs(self) -> torch.Tensor:
        """
        P in the smallest form: of the parameters `(L, H, K)` if each decides the entries of a distance, otherwise of
        the entries `(L, H, n, n)`; float32, on the CPU. [`expand_probs`] turns the first into the second.
        """
        return self.probs().cpu() if self.search.by_distance(self.search.length) else self.entry_probs()

    @torch.no_grad()
    def log_odds(self) -> torch.Tensor:
        """
        log(P / (1 - P)), which still orders what has a P of 0 or 1 in float32: of the parameters `(L, H, K)`, in
        `"vertical_slash"` of the entries `(L, H, n, n)`; float32, on the CPU.
        """
        alpha, width = self._budgeted()
        return self.search.log_odds((alpha / width).cpu())

    def draw(self, previous: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Sample the mask, with noise from the global generator, see [`sample_mask`]. `previous` is the sample before
        this one, which may be part of the same loss.
        """
        search = self.search
        if torch.is_grad_enabled() and not self.logits.requires_grad and not torch.compiler.is_compiling():
            logger.warning_once(
                "mask_logits: their requires_grad is False, so the training does not learn the mask; call "
                "model.sparse_attention.mask_logits.requires_grad_() or, with PEFT, name 'sparse_attention' in "
                "modules_to_save"
            )
        alpha, width = self._budgeted()
        if self._exact:
            noisy = alpha / width
            return straight_through(torch.sigmoid(noisy), self._within_budget(self.current_sparsity())), noisy
        noise = torch.zeros(())
        if search.noise_scale:
            noise = search.noise_scale * gumbel_noise(alpha.shape, alpha.device, search.share_noise)
        sample, noisy = sample_mask(alpha, self.temperature(), search.hard, noise)
        penalized = search.sparsity_weight and search.target_sparsity is None
        if penalized and sample.requires_grad and not torch.compiler.is_compiling():
            _watch_penalty(sample, previous)
        return sample, noisy

    def _select(self, probs: torch.Tensor, threshold: float | None, sparsity: float | None) -> torch.Tensor:
        """Parameters to keep, given P on the CPU."""
        check_selection(threshold, sparsity)
        search = self.search
        if probs.isnan().any():
            raise FloatingPointError("mask_logits: the probabilities of the mask are NaN, so no mask can be chosen")
        if threshold is None and sparsity is None:
            if search.pruned:
                return self.kept.cpu()
            if search.target_sparsity is not None:
                sparsity = self.current_sparsity().item()
        if search.pruned and sparsity is not None and sparsity < (least := self.thresholded_mask().sparsity):
            raise ValueError(f"sparsity must be at least {least:.4f}, what pruning has removed, got {sparsity!r}")
        if sparsity is not None and search.has_budget:
            return self._within_budget(sparsity).cpu()
        return select(
            probs,
            search.entries(probs.device),
            search.num_fixed,
            threshold=0.5 if threshold is None else threshold,
            sparsity=sparsity,
            length=search.length,
            scope=search.sparsity_scope,
        )

    @torch.no_grad()
    def thresholded_mask(self, threshold: float | None = None, sparsity: float | None = None) -> SparseMask:
        """
        The mask that this search would freeze to now: all with P above `threshold`, by default 1/2, or the most
        probable ones at a `sparsity`, by default the one that is due in a search with a target.
        """
        return self.search.to_mask(self._select(self.probs().cpu(), threshold, sparsity))

    @torch.no_grad()
    def to_mask(
        self, threshold: float | None = None, sparsity: float | None = None, metadata: dict[str, Any] | None = None
    ) -> tuple[SparseMask, dict[str, Any]]:
        """
        The [`LearnedMask.thresholded_mask`], and how well the search has decided it, a `dict` with

        - `"asked"`: the requested sparsity, or `None`
        - `"got"`: the sparsity of the mask
        - `"undecided"`: share of the learned entries that the mask and the threshold 1/2 treat differently; 0 if
          training uses this mask itself (`hard` without noise, with a target)
        - `"range_of_p"`: where P of nine in ten parameters lies: around 1/2, the search has hardly begun to decide
        - `"dense_heads"` and `"empty_heads"`: number of heads whose learned entries are all kept, or all removed
        - `"warnings"`: what is wrong with the mask, a list of messages
        """
        search, probs = self.search, self.probs().cpu()
        entries = search.entries(probs.device)
        selected = self._select(probs, threshold, sparsity)
        mask = search.to_mask(selected, metadata)
        asked = search.target_sparsity if threshold is None and sparsity is None else sparsity
        dense, empty = collapsed(selected, entries)
        warnings = []
        if asked is not None and abs(mask.sparsity - asked) > TOLERANCE:
            warnings.append(
                f"asked for a sparsity of {asked:.3f}, got {mask.sparsity:.3f}: search "
                f"{search.name!r} can only keep or remove the entries of each of "
                f"{int((search.counts > 0).sum())} parameters together, at {search.length} tokens"
            )
        if (dense or empty) and search.sparsity_scope == "head":  # with one budget for all, some may well be
            heads = search.num_layers * search.num_heads
            warnings.append(f"the mask collapsed: of {heads} heads {dense} keep everything, {empty} remove everything")
        trained = probs > (0.5 if threshold is None else threshold)
        if self._exact and threshold is None and sparsity is None:
            trained = selected
        outcome = {
            "asked": asked,
            "got": mask.sparsity,
            "undecided": disagreement(selected, trained, entries),
            "range_of_p": np.quantile(probs[..., search.counts.cpu() > 0].numpy(), [0.05, 0.95]).tolist(),
            "dense_heads": dense,
            "empty_heads": empty,
            "warnings": warnings,
        }
        return mask, outcome

    @torch.no_grad()
    def prune(self, scores: torch.Tensor, sparsity: float, scope: str = "head") -> None:
        """
        Remove the parameters with the lowest scores `(L, H, K)` for good, up to a sparsity: their logits become -inf,
        which no optimizer changes. Every row keeps its best entry unless the search allows empty rows.
        """
        search, kept, cpu = self.search, self.kept, torch.device("cpu")
        scores = scores.detach().float().cpu()
        left = prune(
            kept.cpu(), scores, self._index(), search.fixed, sparsity, scope, search.allow_empty_rows,
            search.entries(cpu),
        )  # fmt: skip
        self.logits.masked_fill_(~left.to(kept.device), -torch.inf)

    @torch.no_grad()
    def keep_best_of_rows(self) -> None:
        """Raise the best parameter of each row that may become empty to the greatest logit of all."""
        best = best_of_rows(self.logits.float().cpu(), self._index(), self.search.fixed)
        self.logits.masked_fill_(best.to(self.logits.device), self.logits.max())

    def _index(self):
        """The parameter or the parameters of each entry, see [`parameter_index`]."""
        search = self.search
        if search.union is not None:
            return search.union.parameters_of_entries()
        return search.index(search.length, torch.device("cpu"))
