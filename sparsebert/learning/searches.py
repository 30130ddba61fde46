"""
Mask searches: what is learned per head, and how it becomes a mask.

Letters: L layers (1 when shared), H heads, n mask length, K learned parameters per head, B tile size, P the keep
probability.
A search learns one logit alpha per parameter; P = sigmoid(alpha). Entries that share a parameter are kept or removed
together, except those of `vertical_slash`, which have three and are kept if any of them is.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import logsigmoid

from ..checks import check_choice, check_range
from ..masks.expansion import SPECIAL_TOKENS, learned_ranges, parameter_index
from ..masks.patterns import PATTERNS
from ..masks.sparse_mask import SparseMask
from .decided_entries import VerticalSlash


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
    def toeplitz(self) -> bool:
        """Whether each parameter decides the entries of a distance, which is signed if the search is not symmetric."""
        return self.form in ("offsets", "blocks")

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
_OWN = tuple(SEARCHES)
_FORMS = ("table", "offsets", "blocks", "vertical_slash")


def register_search(
    name: str,
    form: str,
    *,
    stochastic: bool = True,
    special_tokens: str = "first_last",
    mask_constant: float | None = None,
) -> None:
    """
    Have a search of your own known in this process, wherever the key of `SEARCHES` is taken. Register it before a
    model that was searched with it is loaded.

    Args:
        name (`str`): An identifier, which must not be that of a search of this package or of a pattern. A search that
            was registered under it is replaced.
        form (`str`): What has a parameter: `"table"`, `"offsets"`, `"blocks"` or `"vertical_slash"`, see [`Search`].
        stochastic (`bool`, *optional*, defaults to `True`): Whether training samples the mask with Gumbel noise
            instead of using P itself.
        special_tokens (`str`, *optional*, defaults to `"first_last"`): Default of the configuration's field.
        mask_constant (`float`, *optional*): Default of the configuration's field, c of the additive form, in
            (0, 1e4]; 1e4 if the search is stochastic, else 10, since a larger one would saturate P at the start.

    Raises:
        ValueError: If the name is taken or no name, or one of the other values is not among those above.
    """
    if not (isinstance(name, str) and name.isidentifier()) or name in (*_OWN, *PATTERNS):
        raise ValueError(f"name must be an identifier, and none of {', '.join((*_OWN, *PATTERNS))}, got {name!r}")
    check_choice("form", form, _FORMS)
    check_choice("stochastic", stochastic, (True, False))
    check_choice("special_tokens", special_tokens, SPECIAL_TOKENS)
    if mask_constant is None:
        mask_constant = 1e4 if stochastic else 10.0
    check_range("mask_constant", mask_constant, 0, 1e4, (int, float))
    if not mask_constant:
        raise ValueError("mask_constant must be in (0, 1e4], got 0")
    SEARCHES[name] = Search(form, stochastic, special_tokens, float(mask_constant))


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
    """Values of any shape, with the gradient of `soft` of the same shape: a mask of 0 and 1 with that of P."""
    return _StraightThrough.apply(soft, values)


def gumbel_noise(shape: tuple[int, ...], device: torch.device | str, shared: bool = False) -> torch.Tensor:
    """
    Difference of two standard Gumbel variables, drawn from the global generator. It has a logistic distribution, so
    one clamped uniform draw is enough; float32 whatever the autocast dtype, since half precision would give inf.

    The processes of a distributed training usually begin with the same state of the generator. By default process r of
    R therefore shifts its uniform draws by r / R around the circle, which makes them stratified: an entry with the
    keep probability P is kept by floor(R P) to ceil(R P) of the R samples. `shared` gives all the noise of the first.
    """
    uniform = torch.rand(shape, device=device, dtype=torch.float32)
    if distributed.is_available() and distributed.is_initialized() and (size := distributed.get_world_size()) > 1:
        if shared:
            distributed.broadcast(uniform, src=0)
        else:
            uniform = (uniform + distributed.get_rank() / size) % 1.0
    return torch.logit(uniform, eps=1e-6)


def sample_mask(
    logits: torch.Tensor, temperature: float | torch.Tensor = 1.0, hard: bool = True, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Gumbel-sigmoid sample of a mask, and the noisy logits `(alpha + G1 - G2) / tau` that it came from. `hard` rounds it
    to 0 or 1, with the gradient of the soft sample; `noise` is G1 - G2, drawn by default.

    Source: SparseBERT (arXiv 2102.12871), Section 4.1, Algorithm 1.
    """
    noise = gumbel_noise(logits.shape, logits.device) if noise is None else noise
    noisy = (logits + noise) / temperature
    soft = torch.sigmoid(noisy)
    return (straight_through(soft, soft > 0.5) if hard else soft), noisy


def mask_bias(mask: torch.Tensor, noisy: torch.Tensor, form: str, constant: float, hard: bool) -> torch.Tensor:
    """
    The term that a sampled mask M adds to the attention scores: `-c (1 - M)`, or for the form `"log"` `log M`, see
    [`hard_log_bias`] for hard samples. M = sigmoid(noisy) before rounding.

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
    """
    least = math.exp(-constant) if constant < _MOST_CONSTANT else 1.0
    return straight_through(torch.log(mask + least * (1 - mask.detach())), -constant * (1 - mask.detach()))


def num_parameters(
    form: str,
    length: int,
    symmetric: bool = True,
    special_tokens: str = "none",
    block_size: int | None = None,
    special_rows: bool = True,
) -> int:
    """
    K, the number of parameters per head: one per entry of a table, or per unordered pair if it is symmetric; one per
    tile diagonal; or one per offset that occurs between tokens that are not special, of which the queries may be
    special without `special_rows`. Offsets and tile diagonals that are not symmetric have one for either direction.
    `"vertical_slash"` has one more per token that is not special, or two if columns and rows have their own.
    """
    if form == "table":
        return length * (length + 1) // 2 if symmetric else length * length
    queries, keys = learned_ranges(length, SPECIAL_TOKENS.index(special_tokens), special_rows)
    if form == "vertical_slash":
        return len(keys) * (3 - symmetric)
    distances = max(queries.stop - keys.start, keys.stop - queries.start)
    if form == "blocks":
        distances = -(-length // (block_size or 1))
    return distances if symmetric else max(2 * distances - 1, 0)


def parameter_distance(form: str, size: int, length: int, symmetric: bool = True) -> torch.Tensor:
    """
    Distance between query and key of each parameter, in tokens, or in tiles for `"blocks"`: long `(K,)`. That of a
    column or a row is the mean distance of two tokens, a third of the length.
    """
    if form == "vertical_slash":
        offsets = torch.arange(size // (3 - symmetric))
        return torch.cat([offsets, torch.full((size - len(offsets),), length // 3)])
    if form != "table":
        return torch.arange(size) if symmetric else (torch.arange(size) - size // 2).abs()
    position = torch.arange(length)
    distance = (position[:, None] - position[None, :]).abs()
    return torch.zeros(size, dtype=torch.long).scatter_(
        0, parameter_index(form, length, length, symmetric).flatten(), distance.flatten()
    )


def to_sparse_mask(
    selected: torch.Tensor,
    form: str,
    length: int,
    symmetric: bool = True,
    block_size: int | None = None,
    **fields: Any,
) -> SparseMask:
    """The [`SparseMask`] that keeps the selected parameters, bool `(L, H, K)`; `fields` are its other arguments."""
    keep = selected
    if form == "table":
        keep = selected[..., parameter_index(form, length, length, symmetric)]
    elif form == "vertical_slash":
        form, union = "table", VerticalSlash(length, fields.get("special_tokens", "none"), symmetric)
        keep = union.expand(selected, length)
    block_size, symmetric = block_size if form == "blocks" else None, symmetric or form == "table"
    return SparseMask(keep, length, form=form, block_size=block_size, symmetric=symmetric, **fields)
