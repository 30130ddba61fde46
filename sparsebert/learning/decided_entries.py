"""
How many entries the parameters of a search keep, for forms that tie entries together and for a union of them.

Letters: L layers (1 when shared), H heads, n mask length, m input length, N tokens that are not special, K learned
parameters per head, i query, j key, P the keep probability.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, softplus

from ..masks.expansion import SPECIAL_TOKENS, expand, toeplitz_index, token_pairs


# Added to -log(1 - P) of an entry, so that P stays above what no parameter keeps: its logarithm is finite.
_LEAST_HAZARD = 1e-26


def _exact(values):
    """Values to sum over entries, in float64 if they are bool, whose sum is then exact."""
    return values.double() if values.dtype == torch.bool else values


class TiedEntries:
    """Entries that have one parameter each, which some share; `counts` `(K,)` says how many entries each decides."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.counts = counts

    @property
    def total(self) -> int:
        return int(self.counts.double().sum())

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        """
        Number of entries per head that a sample, or on average P, in [0, 1] or bool, keeps: `(..., K)` to `(...)`.
        """
        return (_exact(values) * self.counts).sum(-1)

    def decided(self, values: torch.Tensor) -> torch.Tensor:
        """The derivative of [`~TiedEntries.kept`]: how many entries each parameter decides, given the others."""
        return self.counts.to(values.dtype)

    def nearest_number(self, rank: torch.Tensor, budget: float | torch.Tensor, joint: bool) -> torch.Tensor:
        """
        How many parameters to keep, `(..., 1)`, so that they keep as near as possible to `budget` entries, per head or
        of all heads together (`joint`). `rank` `(..., K)` is the order in which they are kept, from 0.
        """
        counts = self.counts.long().expand(rank.shape)  # their sum is deterministic on every device
        if joint:
            rank, counts = rank.flatten(), counts.flatten()
        kept = pad(torch.zeros_like(counts).scatter(-1, rank, counts).cumsum(-1), (1, 0))
        return (kept - budget).abs().argmin(dim=-1, keepdim=True)


@dataclass(frozen=True)
class VerticalSlash:
    """
    Entries that are kept by any of three parameters: that of the offset `abs(i - j)`, of the column j ("vertical") and
    of the row i. A head has the parameters of N offsets, of N columns and of N rows, in this order; if `symmetric`, a
    token has one parameter for its column and its row, which makes it a global token, and K is 2N instead of 3N.
    Without `learned_diagonal`, entries of the diagonal are not counted.

    The draws of the parameters are independent, so an entry is kept with the probability `1 - (1 - P_offset) (1 -
    P_column) (1 - P_row)`: the share of hard samples in which one of the three is drawn. On the diagonal of a
    symmetric mask column and row are one draw, which counts once.

    Source: the vertical and slash lines of MInference (arXiv 2407.02490), Section 3, with the global tokens of
    Longformer (arXiv 2004.05150), Section 3.1.
    """

    length: int
    special_tokens: str
    symmetric: bool
    learned_diagonal: bool = True

    @property
    def first(self) -> int:
        """Position of the first token that is not special."""
        return min(SPECIAL_TOKENS.index(self.special_tokens), 1)

    @property
    def size(self) -> int:
        """N."""
        return self.length - SPECIAL_TOKENS.index(self.special_tokens)

    @property
    def total(self) -> int:
        return self.size**2 - (0 if self.learned_diagonal else self.size)

    def counts(self) -> torch.Tensor:
        """Number of entries that each parameter can keep: float32 `(K,)`."""
        offsets = token_pairs(range(self.size), range(self.size), 1, self.size)
        line = self.size - (not self.learned_diagonal)
        offsets[0] += self.size * self.learned_diagonal
        if self.symmetric:
            lines = torch.full((self.size,), 2 * line - self.learned_diagonal)
        else:
            lines = torch.full((2 * self.size,), line)
        return torch.cat([offsets.float(), lines.float()])

    def parts(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values `(..., K)` of the offsets, the columns and the rows: three tensors of shape `(..., N)`."""
        offsets, columns, *rows = values.unflatten(-1, (-1, self.size)).unbind(-2)
        return offsets, columns, rows[0] if rows else columns

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        """See [`TiedEntries.kept`]. No tensor of `n^2` entries is made."""
        removed = 1 - _exact(values)
        offsets, columns, rows = self.parts(removed)
        kept = self.total - (offsets * self._per_offset(columns, rows)).sum(-1)
        return kept.round() if values.dtype == torch.bool else kept

    def decided(self, values: torch.Tensor) -> torch.Tensor:
        """See [`TiedEntries.decided`]: the entries of each parameter that no other one keeps."""
        offsets, columns, rows = self.parts(1 - _exact(values))
        # Sums over the other tokens, of what their distance removes.
        distances = pad(offsets[..., 1:], (1, 0))
        spectrum = torch.fft.rfft(torch.cat([distances, pad(distances[..., 1:].flip(-1), (1, 0))], -1))
        size = 2 * self.size

        def from_others(lines):
            return torch.fft.irfft(spectrum * torch.fft.rfft(lines, size), size)[..., : self.size]

        diagonal = offsets[..., :1] * float(self.learned_diagonal)
        if self.symmetric:
            lines = [2 * from_others(columns) + diagonal]
        else:
            lines = [from_others(rows) + diagonal * rows, from_others(columns) + diagonal * columns]
        return torch.cat([self._per_offset(columns, rows), *lines], -1)

    def _per_offset(self, columns, rows):
        """For each offset the sum over its entries of `columns_j rows_i`."""
        size = 2 * self.size
        lags = torch.fft.irfft(torch.fft.rfft(rows, size).conj() * torch.fft.rfft(columns, size), size)
        both = lags[..., 1 : self.size] + lags[..., self.size + 1 :].flip(-1)
        diagonal = (columns if self.symmetric else columns * rows).sum(-1, keepdim=True) * float(self.learned_diagonal)
        return torch.cat([diagonal, both], -1)

    def nearest_number(self, rank: torch.Tensor, budget: float | torch.Tensor, joint: bool) -> torch.Tensor:
        """See [`TiedEntries.nearest_number`]: by bisection, since more parameters never keep fewer entries."""

        def kept(number):
            kept = self.kept(rank < number)
            return kept.sum()[None] if joint else kept[..., None]

        most = rank.numel() if joint else rank.shape[-1]
        low = torch.zeros((1,) if joint else (*rank.shape[:-1], 1), dtype=torch.long, device=rank.device)
        high = torch.full_like(low, most)
        for _ in range(most.bit_length()):
            middle = (low + high) // 2
            enough = kept(middle) >= budget
            low, high = torch.where(enough, low, (middle + 1).clamp(max=most)), torch.where(enough, middle, high)
        fewer = (high - 1).clamp(min=0)
        return torch.where(budget - kept(fewer) <= (kept(high) - budget).abs(), fewer, high)

    def entries(
        self,
        values: torch.Tensor,
        length: int,
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        neutral: bool | float,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Values of the parameters `(L, H, K)`, combined to values of the entries `(L, H, m, m)` of m <= n tokens.
        `neutral` is the value of a token or an offset without a parameter, `index` the result of [`toeplitz_index`].
        """
        offsets, *lines = self.parts(values)
        after = self.length - self.first - self.size
        columns, rows = (pad(line, (self.first, after), value=neutral)[..., :length] for line in lines)
        tokens = combine(columns[..., None, :], rows[..., :, None])
        if self.symmetric:
            tokens.diagonal(dim1=-2, dim2=-1).copy_(columns)
        return combine(expand(offsets, "offsets", length, self.length, off=neutral, index=index), tokens)

    def expand(self, values: torch.Tensor, length: int, index: torch.Tensor | None = None) -> torch.Tensor:
        """A sample or P of the parameters `(L, H, K)`, in [0, 1] or bool, as that of the entries `(L, H, m, m)`."""
        if values.dtype == torch.bool:
            return self.entries(values, length, torch.logical_or, False, index)
        return 1 - self.entries(1 - values, length, torch.mul, 1.0, index)

    def log_probs(self, noisy: torch.Tensor, length: int, index: torch.Tensor | None = None) -> torch.Tensor:
        """
        Logarithm of a soft sample of the entries `(L, H, m, m)`, from the noisy logits of the parameters `(L, H, K)`.
        """
        # -log(1 - sigmoid(x)) = softplus(x) adds up where probabilities to be removed multiply.
        hazard = self.entries(softplus(noisy), length, torch.add, 0.0, index)
        return torch.log(-torch.expm1(-(hazard + _LEAST_HAZARD)))

    def log_odds(self, noisy: torch.Tensor, length: int, index: torch.Tensor | None = None) -> torch.Tensor:
        """log(P / (1 - P)) of the entries `(L, H, m, m)`, from that of the parameters `(L, H, K)`."""
        hazard = self.entries(softplus(noisy), length, torch.add, 0.0, index).clamp(min=_LEAST_HAZARD)
        pruned = self.entries(noisy == -torch.inf, length, torch.logical_and, True, index)
        return (hazard + torch.log(-torch.expm1(-hazard))).masked_fill(pruned, -torch.inf)

    def sums(self, table: torch.Tensor) -> torch.Tensor:
        """The sum of the values `(L, H, n, n)` of the entries that each parameter can keep: `(L, H, K)`."""
        inner = slice(self.first, self.first + self.size)
        table = table[..., inner, inner]
        if not self.learned_diagonal:
            table = table - torch.diag_embed(table.diagonal(dim1=-2, dim2=-1))
        index = toeplitz_index(self.size, device=table.device).flatten()
        offsets = table.new_zeros(*table.shape[:2], self.size).index_add_(-1, index, table.flatten(-2))
        columns, rows = table.sum(-2), table.sum(-1)
        if self.symmetric:
            return torch.cat([offsets, columns + rows - table.diagonal(dim1=-2, dim2=-1)], -1)
        return torch.cat([offsets, columns, rows], -1)

    def parameters_of_entries(self) -> torch.Tensor:
        """The three parameters of each entry, long `(n, n, 3)`. An index of K or more means that there is none."""
        offset = toeplitz_index(self.length)
        token = torch.arange(self.length) - self.first
        none = (3 - self.symmetric) * self.size
        token = torch.where((token >= 0) & (token < self.size), token + self.size, none)
        row = token if self.symmetric else (token + self.size).clamp(max=none)
        offset = torch.where(offset < self.size, offset, none)
        return torch.stack(torch.broadcast_tensors(offset, token[None, :], row[:, None]), -1)


# What a search learns about entries.
DecidedEntries = TiedEntries | VerticalSlash
