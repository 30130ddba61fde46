"""
Mask searches: what is learned per head, and how it becomes a mask.

Letters: L layers (1 when shared), H heads, n mask length, K learned parameters per head, B tile size.
A search learns one logit alpha per parameter; P = sigmoid(alpha). Entries that share a parameter are kept or removed
together.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from ..masks.expansion import parameter_index
from ..masks.sparse_mask import SPECIAL_TOKENS, SparseMask


@dataclass(frozen=True)
class Search:
    """
    A way to learn a mask.

    Args:
        form (`str`): Form of the frozen [`SparseMask`]: `"table"`, `"offsets"` or `"blocks"`.
        stochastic (`bool`): Whether training samples the mask with Gumbel noise, or uses P itself.
        special_tokens (`str`): Default special tokens.
        mask_constant (`float`): Default c of the additive form.
    """

    form: str
    stochastic: bool
    special_tokens: str
    mask_constant: float


# Source: SparseBERT (arXiv 2102.12871), Section 3.1 (soft), Section 4.1 (DAM_u, DAM_s). dam_b ties whole tiles.
# P starts near 1/2, where a soft mask with c = 1e4 would be saturated.
SEARCHES = {
    "soft": Search("table", stochastic=False, special_tokens="none", mask_constant=10.0),
    "dam_u": Search("table", stochastic=True, special_tokens="none", mask_constant=1e4),
    "dam_s": Search("offsets", stochastic=True, special_tokens="first_last", mask_constant=1e4),
    "dam_b": Search("blocks", stochastic=True, special_tokens="first_last", mask_constant=1e4),
}


class _StraightThrough(torch.autograd.Function):
    """Rounds to 0 or 1; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx, probs):
        return (probs > 0.5).to(probs.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


def gumbel_noise(shape, device):
    """
    Difference of two standard Gumbel variables, in float32 whatever the autocast dtype (half precision gives inf).

    It is logistic, so one clamped uniform draw of the global generator serves for both.
    """
    return torch.logit(torch.rand(shape, device=device, dtype=torch.float32), eps=1e-6)


def sample_mask(logits, temperature=1.0, hard=True, noise=None):
    """
    Gumbel-sigmoid sample of a mask.

    Args:
        logits (`torch.Tensor`): alpha, any shape, float32.
        temperature (`float`): tau > 0.
        hard (`bool`): Straight-through: 0 or 1 forward, gradient of the soft sample.
        noise (`torch.Tensor`, *optional*): G1 - G2 of the same shape; drawn when left out.

    Returns:
        `tuple` of two `torch.Tensor`: the sample, and the noisy logits `(alpha + G1 - G2) / tau` that it came from.

    Source: SparseBERT (arXiv 2102.12871), Section 4.1, Algorithm 1.
    """
    noise = gumbel_noise(logits.shape, logits.device) if noise is None else noise
    noisy = (logits + noise) / temperature
    soft = torch.sigmoid(noisy)
    return (_StraightThrough.apply(soft) if hard else soft), noisy


def mask_bias(mask, noisy, form, constant, hard):
    """
    Term added to the attention scores for a drawn mask.

    Args:
        mask (`torch.Tensor`): The sample M (or P itself for a soft search).
        noisy (`torch.Tensor`): Its logits, M = sigmoid(noisy) before any rounding.
        form (`str`): `"additive"`: `-c (1 - M)`. `"log"`: `log M`; a hard sample is 0 where kept and -c where removed,
            with the gradient of the soft sample's logarithm, which is bounded.
        constant (`float`): c.
        hard (`bool`): Whether M was rounded.

    Source: SparseBERT (arXiv 2102.12871), Eq. 5-6.
    """
    if form == "additive":
        return -constant * (1.0 - mask)
    log = logsigmoid(noisy)
    if not hard:
        return log
    return log + (-constant * (1.0 - mask) - log).detach()


def num_parameters(form, length, symmetric=True, special_tokens="none", block_size=None):
    """K: a symmetric table has one per unordered pair, offsets those of the block inside the special tokens."""
    if form == "table":
        return length * (length + 1) // 2 if symmetric else length * length
    if form == "blocks":
        return -(-length // block_size)
    return length - SPECIAL_TOKENS.index(special_tokens)


def parameter_distance(form, size, length, symmetric=True):
    """How far apart query and key of each of the K parameters are, in tokens or for `"blocks"` in tiles: `(K,)`."""
    if form != "table":
        return torch.arange(size)
    position = torch.arange(length)
    distance = (position[:, None] - position[None, :]).abs()
    return torch.zeros(size, dtype=torch.long).scatter_(
        0, parameter_index(form, length, length, symmetric).flatten(), distance.flatten()
    )


def select(probs, counts, fixed, threshold=0.5, sparsity=None, length=None):
    """
    Choose the parameters to keep.

    Args:
        probs (`torch.Tensor` of shape `(L, H, K)`): P per parameter.
        counts (`torch.Tensor` of shape `(K,)`): Entries that each parameter decides at the mask's length.
        fixed (`int`): Entries per head that are on whatever is chosen (special tokens, a kept diagonal).
        threshold (`float`): Keep where P exceeds it, unless `sparsity` is given.
        sparsity (`float`, *optional*): Keep the largest P of each head so that the fraction removed of its `length^2`
            entries is the nearest possible to this.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool.
    Raises:
        ValueError: If `threshold` or `sparsity` is out of range.
    """
    if sparsity is None:
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"threshold must be in [0, 1), got {threshold!r}")
        return probs > threshold
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity!r}")
    return keep_largest(probs, counts, (1.0 - sparsity) * length**2 - fixed)


def keep_largest(scores, counts, budget):
    """
    The largest scores along the last dimension, as many as together decide nearest to `budget` entries.

    Args:
        scores (`torch.Tensor` of shape `(..., K)`): Of the parameters.
        counts (`torch.Tensor` of shape `(K,)`): Entries that each parameter decides.
        budget (`float`): Entries to keep.

    Returns:
        `torch.Tensor` of shape `(..., K)`, bool.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    kept = torch.nn.functional.pad(counts.double()[order].cumsum(-1), (1, 0))
    num_kept = (kept - budget).abs().argmin(dim=-1, keepdim=True)
    return order.argsort(dim=-1, stable=True) < num_kept


def best_of_rows(scores, index, fixed):
    """
    Parameters without which a row would keep nothing, if each row keeps its best entry.

    Args:
        scores (`torch.Tensor` of shape `(L, H, K)`): Of the parameters.
        index (`torch.Tensor` of shape `(n, n)`): As [`parameter_index`].
        fixed (`torch.Tensor` of shape `(n, n)`): 1 on, 0 off, -1 learned.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool.
    """
    rows = ~(fixed == 1).any(-1)
    index = torch.where(fixed == -1, index, scores.shape[-1])[rows]  # (R, n)
    if not len(index):
        return torch.zeros_like(scores, dtype=torch.bool)
    padded = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    columns = padded[..., index].argmax(-1)  # (L, H, R)
    best = index[torch.arange(len(index)), columns]
    return torch.zeros_like(padded, dtype=torch.bool).scatter_(-1, best, True)[..., :-1]


def prune(kept, scores, index, fixed, sparsity, scope="head", empty_rows=False):
    """
    Of the parameters that are left, keep the best down to a sparsity.

    Args:
        kept (`torch.Tensor` of shape `(L, H, K)`): Bool, what has not been removed yet.
        scores (`torch.Tensor` of shape `(L, H, K)`): Higher is better.
        index, fixed (`torch.Tensor` of shape `(n, n)`): As [`best_of_rows`].
        sparsity (`float`): Fraction of the `n^2` entries to remove, in every head or on average.
        scope (`str`): `"head"` ranks the parameters of each head, `"global"` all together.
        empty_rows (`bool`): Whether a row may lose its last entry.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool: a part of `kept`.
    """
    counts = index[fixed == -1].bincount(minlength=scores.shape[-1])
    budget = (1.0 - sparsity) * fixed.numel() - (fixed == 1).sum().item()
    scores = scores.masked_fill(~kept, -torch.inf)
    needed = torch.zeros_like(kept) if empty_rows else best_of_rows(scores, index, fixed)
    scores = scores.masked_fill(needed, torch.inf)
    if scope == "global":
        heads = kept[..., 0].numel()
        chosen = keep_largest(scores.flatten(), counts.repeat(heads), heads * budget).view_as(kept)
    else:
        chosen = keep_largest(scores, counts, budget)
    return (chosen | needed) & kept


def to_sparse_mask(selected, form, length, symmetric=True, block_size=None, **fields):
    """The chosen parameters `(L, H, K)` as a [`SparseMask`]; `fields` are its other arguments."""
    keep = selected
    if form == "table":
        keep = selected[..., parameter_index(form, length, length, symmetric)]
    return SparseMask(keep, length, form=form, block_size=block_size if form == "blocks" else None, **fields)
