"""
A mask that is being learned: its logits, how they become a mask in every forward, and what they would freeze to.

Letters: B batch, L layers (1 when shared), H heads, n queries, m keys, K learned parameters per head.
"""

from dataclasses import replace

import torch
from torch import nn
from transformers import initialization as init

from ..attention.mask_inputs import (
    MAX_MASK_CONSTANT,
    bias_and_live,
    causal_entries,
    fix_entries,
    last_real,
    merged_bias,
    set_entries,
    special_rows,
    with_cuts,
)
from ..masks.sparse_mask import DIAGONALS, default_length_policy, special_entries
from .budget import budget_shift, collapsed, disagreement, geometric, scheduled
from .searches import (
    SEARCHES,
    gumbel_noise,
    mask_bias,
    num_parameters,
    parameter_distance,
    parameter_index,
    prune,
    sample_mask,
    select,
    to_sparse_mask,
)


# A frozen mask this far from the target is what its form can express.
TOLERANCE = 0.005
# Of an annealed search in the end, when P is 0 or 1 for nearly all.
ANNEALED_TEMPERATURE = 0.1
# What the logarithm of the distance weighs in the logits that such a search starts from.
LOCAL_DECAY = 3.0
# Narrower than this the sigmoid is a step, and nothing would be learned any more.
_NARROWEST = 0.02
# Of the learned entries, what a budget leaves on both sides, so that P never saturates.
_MARGIN = 1e-3


class LearnedMask(nn.Module):
    """
    The search of a mask. It has one parameter, `mask_logits` of shape `(L, H, K)`, theta with alpha =
    `mask_logit_scale` * theta, or `None` where nothing is learned.

    Args:
        config ([`SparseBertConfig`]): Says what is searched.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.diagonal = DIAGONALS[config.diagonal]
        # How much of the search is done: a tensor, so that compiled steps need no new graph.
        self.progress = torch.ones((), device="cpu")
        self._is_scheduled = False
        self._drawn = None
        self._cache = {}
        self.register_parameter("mask_logits", None)
        self.search = None if config.search is None else SEARCHES[config.search]
        if self.search is None:
            return
        # Unless told otherwise, a search with a target is annealed; with a penalty it samples, as in the paper.
        annealed = config.target_sparsity is not None
        sampled = self.search.stochastic and not annealed
        self.mask_form = config.mask_form or ("log" if annealed else "additive")
        self.hard = self.search.stochastic and (sampled if config.hard is None else config.hard)
        self.noise_scale = float(sampled) if config.noise_scale is None else config.noise_scale
        self.temperature_end = config.temperature_end or (ANNEALED_TEMPERATURE if annealed else config.temperature)
        self.initial_decay = config.initial_decay
        if self.initial_decay is None:
            self.initial_decay = LOCAL_DECAY if annealed else 0.0
        # In a decoder the last token changes as it generates.
        special_tokens = "first" if config.is_decoder and self.search.special_tokens != "none" else None
        self.special_tokens = config.special_tokens or special_tokens or self.search.special_tokens
        self.mask_constant = float(config.mask_constant or self.search.mask_constant)
        if config.pattern is None and not config.frozen:
            size = num_parameters(
                self.search.form, config.mask_length, config.symmetric, self.special_tokens, config.block_size
            )
            num_layers = 1 if config.share_layers else config.num_attention_layers
            self.mask_logits = nn.Parameter(torch.empty(num_layers, config.num_attention_heads, size))
            self.reset_parameters()
            self._check_target()

    def reset_parameters(self):
        """alpha ~ 1e-3 N(0, 1), so that P starts at 1/2 (SparseBERT, Algorithm 1), less the decay with distance."""
        if self.mask_logits is None:
            return
        config = self.config
        init.normal_(self.mask_logits, mean=0.0, std=1e-3 / config.mask_logit_scale)
        if self.initial_decay:
            distance = parameter_distance(
                self.search.form, self.mask_logits.shape[-1], config.mask_length, config.symmetric
            )
            decay = self.initial_decay / config.mask_logit_scale * distance.clamp(min=1).log()
            with torch.no_grad():
                self.mask_logits.sub_(decay.to(self.mask_logits))

    def set_progress(self, done):
        """
        Say how much of the search is done, which all schedules of temperature, noise and sparsity follow.

        Args:
            done (`float`): In [0, 1]. Where nobody says it, the search is as at its end.
        """
        self.progress.fill_(done)
        self._is_scheduled = True

    def alpha(self):
        """Mask logits `(L, H, K)`, float32. Raises `ValueError` on a frozen model."""
        if self.mask_logits is None:
            raise ValueError("the mask is frozen (or not loaded): there are no mask logits")
        return self.config.mask_logit_scale * self.mask_logits.float()

    @property
    def kept(self):
        """Parameters of a search that have not been removed for good, bool `(L, H, K)`."""
        return self.mask_logits.detach() > -torch.inf

    @torch.no_grad()
    def prune(self, scores, sparsity, scope="head"):
        """
        Remove the worst parameters of a search for good: their logits become -inf, which no optimiser changes.

        Args:
            scores (`torch.Tensor` of shape `(L, H, K)`): Higher is better.
            sparsity (`float`): Fraction of entries removed after this.
            scope (`str`): `"head"` or `"global"`. In either, every row keeps its best entry unless the configuration's
                `allow_empty_rows`.
        """
        length, kept = self.config.mask_length, self.kept
        index, fixed = self._index(length, torch.device("cpu")), self._fixed(length)
        scores = scores.detach().float().cpu()
        left = prune(kept.cpu(), scores, index, fixed, sparsity, scope, self.config.allow_empty_rows)
        self.mask_logits.masked_fill_(~left.to(kept.device), -torch.inf)

    def least_kept(self):
        """Entries per head that pruning cannot remove: special tokens, a kept diagonal, one key for every query."""
        fixed = self._fixed(self.config.mask_length) == 1
        rows = 0 if self.config.allow_empty_rows else (~fixed.any(-1)).sum()
        return int(fixed.sum() + rows)

    def _check_target(self):
        config, entries = self.config, self.config.mask_length**2
        with torch.device("cpu"):
            kept = int((self._fixed(config.mask_length) == 1).sum())
        if config.target_sparsity is not None and config.target_sparsity > 1 - kept / entries:
            raise ValueError(
                f"target_sparsity {config.target_sparsity} cannot be reached: special tokens and a kept diagonal are "
                f"{kept} of the {entries} entries of a mask for {config.mask_length} tokens, so it is at most "
                f"{1 - kept / entries:.4f}"
            )

    def current_sparsity(self):
        """What `target_sparsity` has grown to at this point of the search, a 0-dimensional tensor on the CPU."""
        config = self.config
        target = config.target_sparsity
        first = target if config.initial_sparsity is None else min(config.initial_sparsity, target)
        return scheduled(self.progress, config.sparsity_warmup, config.sparsity_ramp, first, target)

    def _temperature(self):
        start = self.config.temperature
        return start if start == self.temperature_end else geometric(self.progress, start, self.temperature_end)

    def _noise_scale(self):
        start, end = self.noise_scale, self.config.noise_scale_end
        return start if end is None else start + (end - start) * self.progress

    def _budgeted(self, device):
        """alpha, under a target less what keeps as many entries as are due, and the width of the sigmoid to P."""
        config, alpha = self.config, self.alpha()
        width = torch.as_tensor(self._noise_scale())
        if not self.hard:
            width = torch.maximum(width, torch.as_tensor(self._temperature()))
        width = width.clamp(min=_NARROWEST).to(device)
        if config.target_sparsity is None:
            return alpha, width
        counts = self._cached("counts", device, self._counts)
        fixed = self._cached("fixed", device, lambda: (self._fixed(config.mask_length) == 1).sum())
        budget = (1 - self.current_sparsity().to(device)) * config.mask_length**2 - fixed
        margin = _MARGIN * counts.sum()
        budget = torch.clamp(budget, margin, counts.sum() - margin)
        return alpha - budget_shift(alpha, counts, budget, width), width

    def probs(self):
        """P of every parameter, `(L, H, K)`: sigmoid(alpha), under a target less the multiplier of the budget."""
        alpha, width = self._budgeted(self.alpha().device)
        return torch.sigmoid(alpha / width)

    @torch.no_grad()
    def _selected(self, threshold=None, sparsity=None):
        config = self.config
        if config.pruned and threshold is None and sparsity is None:
            return self.kept.cpu()
        if threshold is None and sparsity is None and config.target_sparsity is not None:
            sparsity = self.current_sparsity().item()
        return select(
            self.probs().cpu(),
            self._counts(),
            int((self._fixed(config.mask_length) == 1).sum()),
            threshold=0.5 if threshold is None else threshold,
            sparsity=sparsity,
            length=config.mask_length,
        )

    @torch.no_grad()
    def outcome(self, threshold=None, sparsity=None):
        """
        What freezing would give, and how well the search has decided it.

        Returns:
            `dict`: `"asked"` (sparsity, or `None`), `"got"`, `"undecided"` (share of the learned entries on which the
            threshold 1/2 and the choice by sparsity differ), `"dense_heads"` and `"empty_heads"` (heads all of whose
            learned entries are kept, or removed), `"warnings"` (`list` of `str`).
        """
        config, counts = self.config, self._counts()
        asked = sparsity if sparsity is not None or threshold is not None else config.target_sparsity
        chosen, got = self._selected(threshold, sparsity), self.thresholded_mask(threshold, sparsity).sparsity
        by_threshold = self._selected(0.5 if threshold is None else threshold)
        dense, empty = collapsed(chosen, counts)
        warnings = []
        if asked is not None and abs(got - asked) > TOLERANCE:
            warnings.append(
                f"asked for a sparsity of {asked:.3f}, got {got:.3f}: the nearest that search {config.search} with "
                f"{int((counts > 0).sum())} parameters per head can express at {config.mask_length} tokens"
            )
        if dense or empty:
            heads = chosen[..., 0].numel()
            warnings.append(f"the mask collapsed: of {heads} heads {dense} keep everything, {empty} remove everything")
        undecided = disagreement(chosen, by_threshold, counts)
        result = {"asked": asked, "got": got, "undecided": undecided}
        return result | {"dense_heads": dense, "empty_heads": empty, "warnings": warnings}

    @torch.no_grad()
    def thresholded_mask(self, threshold=None, sparsity=None):
        """The [`SparseMask`] that [`~SparseAttention.freeze`] would set; in a search, at its present sparsity."""
        config = self.config
        return to_sparse_mask(
            self._selected(threshold, sparsity),
            self.search.form,
            config.mask_length,
            symmetric=config.symmetric,
            block_size=config.block_size,
            special_tokens=self.special_tokens,
            last_token=config.last_token,
            diagonal=self.diagonal,
            length_policy=config.length_policy,
        )

    def sparsity_loss(self):
        """
        lambda * ||M||_1 of the mask drawn in the last training forward: a sum over the entries of one layer's masks
        at the mask's length, all heads (mean over layers). 0 when nothing was drawn, and under a target sparsity.

        Source: SparseBERT (arXiv 2102.12871), Eq. 7.
        """
        if self._drawn is None or self.config.target_sparsity is not None:
            return torch.zeros(())
        device = self._drawn.device
        fixed = self._cached("fixed", device, lambda: (self._fixed(self.config.mask_length) == 1).sum())
        counts = self._cached("counts", device, self._counts)
        norm = (self._drawn * counts).sum(dim=(1, 2)) + fixed * self._drawn.shape[1]
        return self.config.sparsity_weight * norm.mean()

    def _cached(self, key, device, make):
        if torch.compiler.is_compiling():
            return make().to(device)  # a cache that changes would have every step compiled again
        key = (key, device)
        if key not in self._cache:
            # What is made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                self._cache[key] = make().to(device)
        return self._cache[key]

    def _corner(self, key, length, device, make):
        """
        What `make(length)` gives, `(..., n, n)`, from the cache; that of a shorter length is the corner of a longer.
        """
        cached = self._cache.get((key, device))
        if cached is None or cached.shape[-1] < length:
            self._cache.pop((key, device), None)
            cached = self._cached(key, device, lambda: make(length))
        return cached[..., :length, :length]

    def _index(self, length, device):
        config = self.config
        return self._corner(
            "index",
            length,
            device,
            lambda n: parameter_index(self.search.form, n, config.mask_length, config.symmetric, config.block_size),
        )

    def _fixed(self, length):
        """int8 `(n, n)`: 1 on, 0 off, -1 learned."""
        fixed = torch.full((length, length), -1, dtype=torch.int8)
        fixed[special_entries(length, self.special_tokens)] = 1
        if self.diagonal is not None:
            fixed.fill_diagonal_(int(self.diagonal))
        return fixed

    def _counts(self):
        """Learned entries per parameter at the mask's length: float `(K,)`."""
        length = self.config.mask_length
        learned = self._index(length, torch.device("cpu"))[self._fixed(length) == -1]
        return learned.bincount(minlength=self.mask_logits.shape[-1]).float()

    def _expand(self, values, length, off, on):
        """`(L, H, K)` values of parameters as `(L, H, n, n)` of entries."""
        config = self.config
        policy = config.length_policy or default_length_policy(self.search.form)
        if length > config.mask_length and policy == "error":
            raise ValueError(
                f"input of {length} tokens is longer than mask_length ({config.mask_length}): shorten it, or set "
                "length_policy to 'dense'"
            )
        values = nn.functional.pad(values, (0, 1), value=off)
        index = self._index(length, values.device).clamp(max=values.shape[-1] - 1)
        table = values.flatten(0, 1).index_select(1, index.flatten()).view(*values.shape[:2], length, length)
        if length > config.mask_length and policy == "dense":
            beyond = torch.arange(length, device=values.device) >= config.mask_length
            table = table.masked_fill(beyond[:, None] | beyond[None, :], on)
        return table

    def _drawn_inputs(self, inputs, merged):
        config = self.config
        alpha, _ = self._budgeted(inputs.device)
        noisy = self.noise_scale or self.config.noise_scale_end
        noise = self._noise_scale() * gumbel_noise(alpha.shape, alpha.device) if noisy else torch.zeros(())
        mask, noisy = sample_mask(alpha, self._temperature(), self.hard, noise)
        self._drawn, hard = mask, self.hard
        num_keys, first_row = inputs.num_keys, inputs.num_keys - inputs.num_queries
        if self.mask_form == "multiplicative":
            special = special_rows(inputs, self.special_tokens, config.last_token)
            gate = self._expand(mask, num_keys, off=0.0, on=1.0)[:, None, :, first_row:]
            gate = set_entries(gate, special, self.diagonal, on=1.0, off=0.0)
            bias = with_cuts(torch.zeros(1, 1, inputs.num_queries, num_keys, device=inputs.device), inputs)
            return {"gate": gate.unbind(0), "bias": (bias,)}
        last, special_tokens = None, self.special_tokens
        if special_tokens == "first_last" and inputs.padding is not None and config.last_token == "real":
            last, special_tokens = last_real(inputs.padding), "first"
        bias = mask_bias(mask, noisy, self.mask_form, self.mask_constant, hard)
        bias = self._expand(bias, num_keys, off=-self.mask_constant, on=0.0)[:, :, first_row:]
        bias = fix_entries(bias, inputs, special_tokens, self.diagonal, off=-self.mask_constant)  # (L, H, n, m)
        apart = {"last_token": last, "learned_diagonal": self.diagonal is None}
        if merged:
            return {"bias": tuple(merged_bias(layer, replace(inputs, **apart)) for layer in bias)}
        return {"learned": bias.unbind(0), **apart}

    def _pruned_inputs(self, inputs):
        """What is left, as a frozen mask would apply it; the logits get the gradient of P of their entries."""
        num_keys, first_row = inputs.num_keys, inputs.num_keys - inputs.num_queries
        keep = self._expand(self.kept.float(), num_keys, off=0.0, on=1.0)[:, None, :, first_row:] > 0
        if inputs.causal:
            keep = keep & causal_entries(inputs)
        prepared = bias_and_live(keep, inputs, self.special_tokens, self.config.last_token, self.diagonal)
        if not self.training:
            return prepared
        probs = torch.sigmoid(self.alpha() / self._temperature())
        bias = self._expand(self.mask_constant * (probs - probs.detach()), num_keys, off=0.0, on=0.0)[:, None]
        special = special_rows(inputs, self.special_tokens, self.config.last_token)
        bias = set_entries(bias[..., first_row:, :], special, self.diagonal, on=0.0, off=0.0)  # 0, with a gradient
        return prepared | {
            "bias": tuple(fixed + learned for fixed, learned in zip(prepared["bias"], bias.unbind(0), strict=True))
        }

    def _thresholded_inputs(self, inputs):
        """As in training: a query whose mask row is empty attends as if it were full."""
        mask = self.thresholded_mask()
        keep = mask.structure(inputs.num_keys).to(inputs.device)
        keep = keep[:, None, :, inputs.num_keys - inputs.num_queries :]
        special = special_rows(inputs, mask.special_tokens, mask.last_token)
        keep = set_entries(keep, special, mask.diagonal, on=True, off=False)  # (L, B or 1, H, n, m)
        bias = torch.zeros(keep.shape, device=inputs.device).masked_fill_(~keep, -MAX_MASK_CONSTANT)
        return {"bias": with_cuts(bias, inputs).unbind(0)}


# P before freezing, `(L * H, n, n)` float32 under the key "probs", beside a frozen model.
MASK_PROBS_NAME = "mask_probs.safetensors"
