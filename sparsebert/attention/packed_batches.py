"""
Documents that lie one after the other in the rows of a batch, each of which attends to itself only.

Letters: B rows, n tokens per row, N documents, l tokens of the longest document, T tokens in all documents.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DocumentSpans:
    """
    Where the documents of a batch are among its B * n tokens, in the order of rows.

    Args:
        starts (`torch.Tensor` of shape `(N,)`): First token of each document, int64.
        padding (`torch.Tensor` of shape `(N, l)`): Bool, True = real token of the document.
        tokens (`torch.Tensor` of shape `(T,)`): The real tokens of all documents, int64.
        num_tokens (`int`): B * n.
        uniform (`bool`): Whether all documents have l real tokens.
    """

    starts: torch.Tensor
    padding: torch.Tensor
    tokens: torch.Tensor
    num_tokens: int
    uniform: bool

    @classmethod
    def of_lengths(cls, starts: torch.Tensor, lengths: torch.Tensor, real: torch.Tensor) -> "DocumentSpans":
        """
        Documents by their first tokens, int64 `(N,)`, ascending, and their lengths; `real` `(B, n)` is False for
        tokens that are padding wherever they lie.
        """
        place = torch.arange(int(lengths.max()), device=starts.device)
        inside = place < lengths[:, None]
        index = starts[:, None] + place
        padding = inside & real.flatten()[index.clamp(max=real.numel() - 1)]
        return cls(starts, padding, index[padding], real.numel(), bool(padding.all()))

    @property
    def shape(self) -> tuple[int, int]:
        """N and l."""
        return self.padding.shape[0], self.padding.shape[1]

    @property
    def contiguous(self) -> bool:
        """Whether no document has padding between its tokens."""
        return bool((self.padding[:, 1:] <= self.padding[:, :-1]).all())

    def compact(self) -> "DocumentSpans":
        """The same documents, which must be `contiguous`, in a single row that holds their tokens alone."""
        lengths = self.padding.sum(-1)
        return DocumentSpans.of_lengths(
            lengths.cumsum(0) - lengths,
            lengths,
            torch.ones(1, len(self.tokens), dtype=torch.bool, device=lengths.device),
        )

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """The documents of `states` `(B, H, n, d)` as a padded batch `(N, H, l, d)`; padding is 0."""
        packed = in_one_row(states)[0].transpose(0, 1)  # (B * n, H, d)
        if self.uniform and len(self.tokens) == self.num_tokens:
            return packed.unflatten(0, self.shape).transpose(1, 2)
        padded = packed.new_zeros(self.padding.numel(), *packed.shape[1:])
        padded = padded.index_copy(0, self._slots(), packed.index_select(0, self.tokens))
        return padded.unflatten(0, self.shape).transpose(1, 2)

    def pack(self, states: torch.Tensor, rows: int) -> torch.Tensor:
        """The inverse of `unpack` for outputs `(N, l, H, d)`: `(B, n, H, d)`, 0 for tokens of no document."""
        flat = states.flatten(0, 1)
        if not (self.uniform and len(self.tokens) == self.num_tokens):
            packed = flat.new_zeros(self.num_tokens, *flat.shape[1:])
            flat = packed.index_copy(0, self.tokens, flat.index_select(0, self._slots()))
        return flat.unflatten(0, (rows, -1))

    def pack_weights(self, weights: torch.Tensor, rows: int) -> torch.Tensor:
        """Attention probabilities `(N, H, l, l)` as `(B, H, n, n)`, 0 between documents."""
        length = self.num_tokens // rows
        document, query, key = (self.padding[:, :, None] & self.padding[:, None, :]).nonzero(as_tuple=True)
        row, first = self.starts[document] // length, self.starts[document] % length
        packed = weights.new_zeros(rows, length, length, weights.shape[1])
        chosen = weights.permute(0, 2, 3, 1)[document, query, key]
        return packed.index_put((row, first + query, first + key), chosen).permute(0, 3, 1, 2)

    def _slots(self):
        return self.padding.flatten().nonzero()[:, 0]


def in_one_row(states: torch.Tensor) -> torch.Tensor:
    """`(B, H, n, d)` as `(1, H, B * n, d)`, a view in the memory order of the host."""
    return states.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


# A graph cannot hold the answer, which depends on data.
@torch.compiler.disable
def packed_documents(position_ids: torch.Tensor, real: torch.Tensor) -> DocumentSpans | None:
    """
    The documents of packed rows: one begins where the position, of `position_ids` `(B, n)`, is that of the row's first
    token again. `None` if the rows are not packed: no position restarts, positions do not count up by one between
    restarts, or they are constant.
    """
    length = real.shape[1]
    column = torch.arange(length, device=real.device).expand_as(real)
    before = torch.where(real, column, -1).cummax(-1).values.roll(1, -1)  # the last real token up to the one before
    before[:, 0] = -1
    follows = position_ids == position_ids.gather(-1, before.clamp(min=0)) + column - before
    first = position_ids.gather(-1, real.int().argmax(-1, keepdim=True))
    starts = real & (position_ids == first)
    counts_up = follows & ~starts & real
    if not (bool((starts & (before >= 0)).any()) and bool(counts_up.any()) and bool((starts | follows | ~real).all())):
        return None
    number = starts.cumsum(-1) + length * torch.arange(len(real), device=real.device)[:, None]
    number = number.flatten()[(flat := real.flatten().nonzero()[:, 0])]
    # The last real token of a document is followed by one of another document, or by none.
    ends = flat[torch.cat([number[1:] != number[:-1], number.new_ones(1, dtype=torch.bool)])]
    begins = starts.flatten().nonzero()[:, 0]
    return DocumentSpans.of_lengths(begins, ends - begins + 1, real)


def row_documents(real: torch.Tensor) -> DocumentSpans | None:
    """
    Every row of a padded batch as a document; `None` if a row begins with padding, so that its positions are not those
    of its tokens.
    """
    if not bool(real[:, 0].all()):
        return None
    starts = torch.arange(len(real), device=real.device) * real.shape[1]
    return DocumentSpans.of_lengths(
        starts, (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(-1), real
    )
