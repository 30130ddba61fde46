"""
From the parameters of a mask to its entries.

Letters: L layers (1 when shared), H heads, n tokens, K parameters per head, B tile size, i query, j key.

The form of a mask says which parameter decides entry (i, j): `"offsets"` has one per `abs(i - j)`, `"blocks"` one per
tile diagonal `abs(i // B - j // B)`, and `"table"` one per entry, or per unordered pair if it is symmetric.
"""

import torch

from ..checks import check_choice


FORMS = ("offsets", "blocks", "table")
SPECIAL_TOKENS = ("none", "first", "first_last")
LENGTH_POLICIES = ("extend", "dense", "error")


def default_length_policy(form: str) -> str:
    """`"extend"` for Toeplitz forms (offsets and blocks); `"error"` for a table, which knows no others."""
    return "error" if form == "table" else "extend"


def table_policy(policy: str) -> str:
    """The length policy of a table that is made of a mask with this one."""
    return default_length_policy("table") if policy == "extend" else policy


def toeplitz_index(length: int, block_size: int = 1, device: torch.device | str | None = None) -> torch.Tensor:
    """The parameter of each entry in a Toeplitz form, `abs(i // B - j // B)`: a long tensor of shape `(n, n)`."""
    block = torch.arange(length, device=device) // block_size
    return (block[:, None] - block[None, :]).abs()


def parameter_index(
    form: str,
    length: int,
    mask_length: int,
    symmetric: bool = True,
    block_size: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """
    The parameter of each entry at some input length, long `(length, length)`; K or more where there is none.

    `symmetric`: entries (i, j) and (j, i) of a table share their parameter.
    """
    if form != "table":
        return toeplitz_index(length, (block_size or 1) if form == "blocks" else 1, device)
    position = torch.arange(length, device=device)
    row, column = torch.broadcast_tensors(position[:, None], position[None, :])
    if symmetric:
        larger, smaller = torch.maximum(row, column), torch.minimum(row, column)
        return larger * (larger + 1) // 2 + smaller
    beyond = torch.maximum(row, column) >= mask_length
    return torch.where(beyond, mask_length * mask_length, row * mask_length + column)


def special_entries(
    length: int,
    special_tokens: str,
    first: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """
    The rows and columns of the special tokens, bool `(n, n)`, or `(B, n, n)` if `first` or `last` `(B,)` say where
    they are in each sequence of a batch. By default they are at 0 and n - 1.
    """
    check_choice("special_tokens", special_tokens, SPECIAL_TOKENS)
    position = torch.arange(length, device=device)
    special = torch.zeros(length, dtype=torch.bool, device=device)
    if special_tokens != "none":
        special = position == (0 if first is None else first[:, None])
    if special_tokens == "first_last":
        special = special | (position == (length - 1 if last is None else last[:, None]))
    return special[..., :, None] | special[..., None, :]


def fill_fixed_entries(table: torch.Tensor, special_tokens: str, diagonal: bool | None) -> torch.Tensor:
    """
    Set, in place, the entries of a table `(..., n, n)` that no parameter decides: 1 for special tokens, and then
    `diagonal`, unless it is `None`, for all n diagonal entries.
    """
    if special_tokens != "none":
        table.masked_fill_(special_entries(table.shape[-1], special_tokens, device=table.device), 1)
    if diagonal is not None:
        table.diagonal(dim1=-2, dim2=-1).fill_(diagonal)
    return table


def fixed_entries(length: int, special_tokens: str, diagonal: bool | None) -> torch.Tensor:
    """Which entries a search does not learn: int8 `(n, n)` on the CPU, 1 always on, 0 always off, -1 learned."""
    fixed = torch.full((length, length), -1, dtype=torch.int8, device="cpu")
    return fill_fixed_entries(fixed, special_tokens, diagonal)


def check_length(length: int, mask_length: int, form: str) -> None:
    """Check an input of a mask whose length policy is `"error"`."""
    if length > mask_length:
        allowed = "'dense'" if form == "table" else "'dense' or 'extend'"
        raise ValueError(
            f"input of {length} tokens is longer than the mask ({mask_length}): shorten it, or set length_policy to "
            f"{allowed}"
        )


def expand(
    values: torch.Tensor,
    form: str,
    length: int,
    mask_length: int,
    block_size: int | None = None,
    length_policy: str | None = None,
    symmetric: bool = True,
    off: bool | float = False,
    on: bool | float = True,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The value of every entry `(L, H, n, n)`, in memory of its own, given that of every parameter `(L, H, K)`.
    Differentiable.

    A table may also be given entry by entry, `(L, H, mask_length, mask_length)`; it is then cropped or padded without
    an index. `length_policy`, one of `LENGTH_POLICIES`, by default [`default_length_policy`], says how entries beyond
    `mask_length` are made: `"extend"` gives new offsets the value `off`, `"dense"` gives all new rows and columns the
    value `on`, `"error"` raises. `index` is [`parameter_index`], if the caller keeps it.
    """
    length_policy = length_policy or default_length_policy(form)
    if length_policy == "error":
        check_length(length, mask_length, form)
    new = max(length - mask_length, 0)
    if values.dim() == 4:
        return torch.nn.functional.pad(values[..., :length, :length], (0, new, 0, new), value=on)
    if index is None:
        index = parameter_index(form, length, mask_length, symmetric, block_size, values.device)
    # One parameter beyond the last stands for every entry that has none.
    values = torch.nn.functional.pad(values, (0, 1), value=off)
    index = index.clamp(max=values.shape[-1] - 1)
    table = values.flatten(0, 1).index_select(1, index.flatten()).view(*values.shape[:2], length, length)
    if new and length_policy == "dense":
        is_new = torch.arange(length, device=values.device) >= mask_length
        table = table.masked_fill(is_new[:, None] | is_new, on)
    return table


def token_pairs(start: int, end: int, block_size: int, num_parameters: int) -> torch.Tensor:
    """
    How many ordered pairs of the tokens from `start` to `end - 1` each parameter of a Toeplitz form decides, without
    those of a token with itself: float64 `(K,)`.
    """
    blocks = torch.arange(start, end, device="cpu") // block_size
    sizes = blocks.bincount(minlength=num_parameters).double()  # tokens per block
    spectrum = torch.fft.rfft(sizes, 2 * len(sizes))
    pairs = torch.fft.irfft(spectrum.abs() ** 2, 2 * len(sizes))[:num_parameters].round()
    pairs[1:] *= 2
    pairs[0] -= end - start
    return pairs


def kept_by_head(
    keep: torch.Tensor,
    form: str,
    length: int,
    block_size: int | None,
    num_special: int,
    diagonal: bool | None,
    known: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """
    Number of entries that each head of a mask keeps at some length, without making its table: int64 `(L, H)`.

    `num_special`: 0, 1 (the first token) or 2 (the last one, too). `known`: tokens after which all entries are on.
    """
    # The entries between the tokens that are neither special nor new are up to the parameters.
    start, end = min(num_special, 1), length - (num_special == 2)
    end = max(end if known is None else min(end, known), start)
    inner = end - start
    if form == "table":
        square = keep[..., start:end, start:end]
        on_diagonal = square.diagonal(dim1=-2, dim2=-1).sum(-1)
        # A sum would first turn the entries into integers of 8 bytes.
        counts = [head.count_nonzero() for head in (square.tril(-1) if causal else square).flatten(0, 1)]
        off_diagonal = torch.stack(counts).view(keep.shape[:2]) - (0 if causal else on_diagonal)
    else:
        pairs = token_pairs(start, end, block_size or 1, keep.shape[-1])
        off_diagonal = (keep.double() @ pairs).round().long() // (2 if causal else 1)
        on_diagonal = keep[..., 0].long() * inner
    outer = length**2 - inner**2
    total = off_diagonal + ((outer + length - inner) // 2 if causal else outer)
    if diagonal is None:
        return total + on_diagonal
    return total + (inner if diagonal else inner - length)


def num_empty_rows(
    keep: torch.Tensor,
    length: int,
    block_size: int | None,
    num_special: int,
    diagonal: bool | None,
    window: int | None = None,
) -> int:
    """
    Number of (layer, head, query) rows of a Toeplitz mask that keep no key within `window`, without making its table.
    """
    if diagonal:
        return 0
    size = block_size or 1
    token = torch.arange(length, device=keep.device)
    window = length if window is None else window
    distances = torch.arange(keep.shape[-1], device=keep.device).expand_as(keep).masked_fill(~keep, length)
    # Without any other block in the mask, as far as `length`, like one that is off.
    nearest = torch.nn.functional.pad(distances[..., 1:], (0, 1), value=length).amin(-1, keepdim=True)
    # The nearest keys in other blocks are the last token of one before and the first token of one after.
    before, after = token % size + (nearest - 1) * size + 1, nearest * size - token % size  # (L, H, n)
    full = (before <= token.clamp(max=window)) | (after <= (length - 1 - token).clamp(max=window))
    company = torch.ones_like(token, dtype=torch.bool)  # in its own block, itself included
    if diagonal is False:
        company = (token % size > 0) | ((token % size < size - 1) & (token < length - 1))
        company &= window > 0
    full |= keep[..., :1] & company
    for end in (0, length - 1)[:num_special]:
        reached = (token - end).abs() <= window
        if diagonal is False:
            reached[end] = min(window, length - 1) > 0
        full |= reached
    return int((~full).sum())
