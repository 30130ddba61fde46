"""
Mask searches: what is learned per head, and how it becomes a mask.

Letters: L layers (1 when shared), H heads, n mask length, K learned parameters per head, B tile size, R rows, P the
keep probability.
A search learns one logit alpha per parameter; P = sigmoid(alpha). Entries that share a parameter are kept or removed
together, except those of `vertical_slash`, which have three and are kept if any of them is.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import logsigmoid

from ..masks.expansion import parameter_index
from ..masks.sparse_mask import SPECIAL_TOKENS, SparseMask
from .decided_entries import DecidedEntries, TiedEntries, VerticalSlash


@dataclass(frozen=True)
class Search:
    """
    A way to learn a mask.

    Args:
        form (`str`): What has a parameter: `"table"`, `"offsets"` or `"blocks"`, as in a [`SparseMask`], or
            `"vertical_slash"`, see [`VerticalSlash`].
        stochastic (`bool`): Whether training samples the mask with Gumbel noise instead of using P itself.
        special_tokens (`str`): Default of the configuration's `special_tokens`.
        mask_constant (`float`): Default of the configuration's `mask_constant`, c of the additive form.
    """

    form: str
    stochastic: bool
    special_tokens: str
    mask_constant: float

    @property
    def frozen_form(self) -> str:
        """Form of the frozen [`SparseMask`]."""
        return "table" if self.form == "vertical_slash" else self.form


# Source: SparseBERT (arXiv 2102.12871), Section 3.1 (soft), Section 4.1 (DAM_u, DAM_s). dam_b ties whole tiles.
# A soft mask starts at P = 1/2, which c = 1e4 would saturate.
SEARCHES = {
    "soft": Search("table", stochastic=False, special_tokens="none", mask_constant=10.0),
    "dam_u": Search("table", stochastic=True, special_tokens="none", mask_constant=1e4),
    "dam_s": Search("offsets", stochastic=True, special_tokens="first_last", mask_constant=1e4),
    "dam_b": Search("blocks", stochastic=True, special_tokens="first_last", mask_constant=1e4),
    "vertical_slash": Search("vertical_slash", stochastic=True, special_tokens="first_last", mask_constant=1e4),
}


# Where a sparsity is met: in every head, or over all heads and layers together.
SCOPES = ("head", "global")
# Below this c, what is removed keeps attention that its gradient can be read from. Above it, 1 / M would only blow up
# the gradients of rows that keep nothing.
_MOST_CONSTANT = 14.0


class _StraightThrough(torch.autograd.Function):
    """Other values, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, soft, values):
        return values.to(soft.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def straight_through(soft: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """
    Values with the gradient of others, such as a mask of 0 and 1 with that of P.

    Args:
        soft (`torch.Tensor`): Where the gradient goes, of any shape.
        values (`torch.Tensor`): The result, of the same shape, bool or float.
    """
    return _StraightThrough.apply(soft, values)


def gumbel_noise(shape: tuple[int, ...], device: torch.device | str, shared: bool = False) -> torch.Tensor:
    """
    Difference of two standard Gumbel variables, drawn from the global generator.

    The difference has a logistic distribution, so one clamped uniform draw is enough. It is float32 whatever the
    autocast dtype, since half precision would give inf.

    The processes of a distributed training usually begin with the same state of the generator. By default process r
    of R therefore shifts its uniform draws by r / R around the circle, which makes them stratified: of R samples of
    an entry with the keep probability P, between floor(R P) and ceil(R P) keep it.

    Args:
        shape (`tuple`): Shape of the noise.
        device (`torch.device` or `str`): Its device.
        shared (`bool`, *optional*, defaults to `False`): Whether all processes of a distributed training get the noise
            of the first.
    """
    uniform = torch.rand(shape, device=device, dtype=torch.float32)
    if distributed.is_available() and distributed.is_initialized() and (size := distributed.get_world_size()) > 1:
        if shared:
            distributed.broadcast(uniform, src=0)
        else:
            uniform = (uniform + distributed.get_rank() / size) % 1.0
    return torch.logit(uniform, eps=1e-6)


def sample_mask(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    hard: bool = True,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Gumbel-sigmoid sample of a mask.

    Args:
        logits (`torch.Tensor`): alpha, any shape, float32.
        temperature (`float` or `torch.Tensor`, *optional*, defaults to 1.0): tau > 0.
        hard (`bool`, *optional*, defaults to `True`): Straight-through: round the sample to 0 or 1, with the gradient
            of the soft sample.
        noise (`torch.Tensor`, *optional*): G1 - G2, of the same shape. Drawn by default.

    Returns:
        `tuple` of two `torch.Tensor`: The sample, and the noisy logits `(alpha + G1 - G2) / tau` that it came from.

    Source: SparseBERT (arXiv 2102.12871), Section 4.1, Algorithm 1.
    """
    noise = gumbel_noise(logits.shape, logits.device) if noise is None else noise
    noisy = (logits + noise) / temperature
    soft = torch.sigmoid(noisy)
    return (straight_through(soft, soft > 0.5) if hard else soft), noisy


def mask_bias(mask: torch.Tensor, noisy: torch.Tensor, form: str, constant: float, hard: bool) -> torch.Tensor:
    """
    The term that a sampled mask adds to the attention scores.

    Args:
        mask (`torch.Tensor`): The sample M (P itself in a soft search).
        noisy (`torch.Tensor`): The noisy logits: M = sigmoid(noisy) before rounding.
        form (`str`): `"additive"` for `-c (1 - M)`, `"log"` for `log M`, see [`hard_log_bias`] for hard samples.
        constant (`float`): c.
        hard (`bool`): Whether M was rounded.

    Source: SparseBERT (arXiv 2102.12871), Eq. 5-6.
    """
    if form == "additive":
        return -constant * (1.0 - mask)
    return hard_log_bias(mask, constant) if hard else logsigmoid(noisy)


def hard_log_bias(mask: torch.Tensor, constant: float) -> torch.Tensor:
    """
    [`mask_bias`] of the form `"log"` for a hard sample: 0 where it keeps an entry, -c where it removes one, with the
    gradient of `log M`, where M of a removed entry stands for `exp(-c)`.

    To first order this gradient is what the entry would change if it were kept or removed, as long as c leaves removed
    entries some attention: a thousandth of it with c = 7. From c = 14 on they are as good as gone, and have the
    gradient of M, which tells them nothing.

    Args:
        mask (`torch.Tensor`): The sample M, 0 and 1.
        constant (`float`): c.
    """
    least = math.exp(-constant) if constant < _MOST_CONSTANT else 1.0
    return straight_through(torch.log(mask + least * (1 - mask.detach())), -constant * (1 - mask.detach()))


def num_parameters(
    form: str, length: int, symmetric: bool = True, special_tokens: str = "none", block_size: int | None = None
) -> int:
    """
    K, the number of parameters per head: one per entry of a table, or per unordered pair if it is symmetric; one per
    tile diagonal; or one per offset that occurs between tokens that are not special. `"vertical_slash"` has one more
    per token that is not special, or two if columns and rows have their own.
    """
    if form == "table":
        return length * (length + 1) // 2 if symmetric else length * length
    if form == "blocks":
        return -(-length // (block_size or 1))
    learned_tokens = length - SPECIAL_TOKENS.index(special_tokens)
    return learned_tokens * ((3 - symmetric) if form == "vertical_slash" else 1)


def parameter_distance(form: str, size: int, length: int, symmetric: bool = True) -> torch.Tensor:
    """
    Distance between query and key of each parameter, in tokens, or in tiles for `"blocks"`: long `(K,)`. That of a
    column or a row is the mean distance of two tokens, a third of the length.
    """
    if form == "vertical_slash":
        offsets = torch.arange(size // (3 - symmetric))
        return torch.cat([offsets, torch.full((size - len(offsets),), length // 3)])
    if form != "table":
        return torch.arange(size)
    position = torch.arange(length)
    distance = (position[:, None] - position[None, :]).abs()
    return torch.zeros(size, dtype=torch.long).scatter_(
        0, parameter_index(form, length, length, symmetric).flatten(), distance.flatten()
    )


def check_selection(threshold: float | None, sparsity: float | None) -> None:
    """
    Raises:
        ValueError: If `threshold` or `sparsity` is not a number in [0, 1), or both are given.
    """
    for name, value in (("threshold", threshold), ("sparsity", sparsity)):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < 1):
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    if threshold is not None and sparsity is not None:
        raise ValueError(f"threshold {threshold} and sparsity {sparsity} exclude each other: give one of them")


def select(
    probs: torch.Tensor,
    entries: DecidedEntries,
    fixed: int,
    threshold: float = 0.5,
    sparsity: float | None = None,
    *,
    length: int,
    scope: str = "head",
) -> torch.Tensor:
    """
    Choose the parameters to keep.

    Args:
        probs (`torch.Tensor` of shape `(L, H, K)`): P of each parameter.
        entries ([`TiedEntries`] or [`VerticalSlash`]): The entries that the parameters decide.
        fixed (`int`): Number of entries per head that are always on (special tokens, a kept diagonal).
        threshold (`float`, *optional*, defaults to 0.5): Keep parameters with P above this, in [0, 1). Ignored if
            `sparsity` is given.
        sparsity (`float`, *optional*): Keep the largest P, so that the fraction of entries removed is as near as
            possible to this, in [0, 1).
        length (`int`): n. A head has `n^2` entries.
        scope (`str`, *optional*, defaults to `"head"`): `"head"` removes this fraction of each head, `"global"` of all
            heads and layers together.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool.

    Raises:
        ValueError: If `threshold` or `sparsity` is out of its range.
    """
    if sparsity is None:
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"threshold must be in [0, 1), got {threshold!r}")
        return probs > threshold
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity!r}")
    return keep_largest(probs, entries, (1.0 - sparsity) * length**2 - fixed, scope)


def keep_largest(
    scores: torch.Tensor, entries: DecidedEntries, budget: float | torch.Tensor, scope: str = "head"
) -> torch.Tensor:
    """
    Choose the parameters with the largest scores, so many that they keep as near as possible to `budget` entries.

    Args:
        scores (`torch.Tensor` of shape `(L, H, K)`): Score of each parameter.
        entries ([`TiedEntries`] or [`VerticalSlash`]): The entries that the parameters decide.
        budget (`float`, or `torch.Tensor` of shape `(L, H, 1)`): Number of entries to keep per head.
        scope (`str`, *optional*, defaults to `"head"`): `"head"` ranks the parameters of each head, `"global"` all
            together, with the budget of all heads.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool.
    """
    joint = scope == "global"
    rank = _rank(scores.flatten() if joint else scores).view_as(scores)
    heads = scores[..., 0].numel() if joint else 1
    return rank < entries.nearest_number(rank, heads * budget, joint)


def keep_shares(scores: torch.Tensor, entries: DecidedEntries, budgets: torch.Tensor) -> torch.Tensor:
    """
    Choose the parameters with the largest scores of each head, so many that they keep as near as possible to its
    budget; and one more or one less in the heads where that costs least, so that all heads together keep as near as
    possible to the sum of the budgets.

    Args:
        scores (`torch.Tensor` of shape `(L, H, K)`): Score of each parameter.
        entries ([`TiedEntries`] or [`VerticalSlash`]): The entries that the parameters decide.
        budgets (`torch.Tensor` of shape `(L, H, 1)`): Number of entries to keep in each head.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool.
    """
    rank = _rank(scores)
    number = entries.nearest_number(rank, budgets, joint=False)
    kept = entries.kept(rank < number)[..., None]
    missing = (budgets - kept).sum()
    other = number + missing.sign().long()
    gain = entries.kept(rank < other)[..., None] - kept
    cost = (budgets - kept - gain).abs() - (budgets - kept).abs()
    order = cost.flatten().argsort(stable=True)
    gains = torch.nn.functional.pad(gain.flatten()[order].cumsum(0), (1, 0))
    changed = order.argsort() < (gains - missing).abs().argmin()
    return rank < torch.where(changed.view_as(number), other, number)


def _rank(scores):
    """The order of the scores along the last dimension, from 0 for the largest."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1, stable=True)


def best_of_rows(scores: torch.Tensor, index: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """
    The parameters of each row's best entry, for rows that no fixed entry keeps from being empty.

    Args:
        scores (`torch.Tensor` of shape `(L, H, K)`): Score of each parameter.
        index (`torch.Tensor` of shape `(n, n)` or `(n, n, 3)`): The parameter or the parameters of each entry, see
            [`parameter_index`].
        fixed (`torch.Tensor` of shape `(n, n)`): 1 always on, 0 always off, -1 learned.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool.
    """
    rows = ~(fixed == 1).any(-1)
    index = index.view(*fixed.shape, -1)
    index = torch.where(fixed[..., None] == -1, index, scores.shape[-1])[rows].flatten(1)  # (R, n) or (R, 3n)
    if not len(index):
        return torch.zeros_like(scores, dtype=torch.bool)
    padded = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    columns = padded[..., index].argmax(-1)  # (L, H, R)
    best = index[torch.arange(len(index)), columns]
    return torch.zeros_like(padded, dtype=torch.bool).scatter_(-1, best, True)[..., :-1]


def prune(
    kept: torch.Tensor,
    scores: torch.Tensor,
    index: torch.Tensor,
    fixed: torch.Tensor,
    sparsity: float,
    scope: str = "head",
    empty_rows: bool = False,
    entries: DecidedEntries | None = None,
) -> torch.Tensor:
    """
    Remove the parameters with the lowest scores until a sparsity is reached.

    Args:
        kept (`torch.Tensor` of shape `(L, H, K)`): Bool, the parameters that have not been removed yet.
        scores (`torch.Tensor` of shape `(L, H, K)`): Parameters with higher scores are kept.
        index (`torch.Tensor` of shape `(n, n)` or `(n, n, 3)`): The parameter or the parameters of each entry, see
            [`parameter_index`].
        fixed (`torch.Tensor` of shape `(n, n)`): 1 always on, 0 always off, -1 learned.
        sparsity (`float`): Fraction of the `n^2` entries to remove, in every head or on average.
        scope (`str`, *optional*, defaults to `"head"`): `"head"` ranks the parameters of each head, `"global"` all
            together.
        empty_rows (`bool`, *optional*, defaults to `False`): Whether a row may lose its last entry.
        entries ([`DecidedEntries`], *optional*): The entries that the parameters decide. By default those of `index`,
            one parameter each.

    Returns:
        `torch.Tensor` of shape `(L, H, K)`, bool: a subset of `kept`.
    """
    if entries is None:
        entries = TiedEntries(index[fixed == -1].bincount(minlength=scores.shape[-1]))
    budget = (1.0 - sparsity) * fixed.numel() - (fixed == 1).sum().item()
    scores = scores.masked_fill(~kept, -torch.inf)
    needed = torch.zeros_like(kept) if empty_rows else best_of_rows(scores, index, fixed)
    scores = scores.masked_fill(needed, torch.inf)
    chosen = keep_largest(scores, entries, budget, scope)
    return (chosen | needed) & kept


def to_sparse_mask(
    selected: torch.Tensor,
    form: str,
    length: int,
    symmetric: bool = True,
    block_size: int | None = None,
    **fields: Any,
) -> SparseMask:
    """
    The [`SparseMask`] that keeps the selected parameters.

    Args:
        selected (`torch.Tensor` of shape `(L, H, K)`): Bool.
        form (`str`): What has a parameter, see [`Search`].
        length (`int`): n.
        symmetric (`bool`, *optional*, defaults to `True`): Whether a table has one parameter per unordered pair, and
            the column and the row of a token in `"vertical_slash"` one parameter.
        block_size (`int`, *optional*): Tile size of the form `"blocks"`.
        fields: The other arguments of [`SparseMask`].
    """
    keep = selected
    if form == "table":
        keep = selected[..., parameter_index(form, length, length, symmetric)]
    elif form == "vertical_slash":
        form, union = "table", VerticalSlash(length, fields.get("special_tokens", "none"), symmetric)
        keep = union.expand(selected, length)
    return SparseMask(keep, length, form=form, block_size=block_size if form == "blocks" else None, **fields)
