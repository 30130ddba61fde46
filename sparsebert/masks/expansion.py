"""
From the parameters of a mask to its entries.

Letters: L layers (1 when shared), H heads, n tokens, K parameters per head, B tile size, i query, j key.

The form of a mask says which parameter decides entry (i, j): `"offsets"` has one per `abs(i - j)`, `"blocks"` one per
tile diagonal `abs(i // B - j // B)`, and `"table"` one per entry, or per unordered pair if it is symmetric. A Toeplitz
form (offsets or blocks) that is not symmetric has one parameter per signed distance d, `i - j` or `i // B - j // B`:
an odd number of them, in ascending order, that of d at the index `d + K // 2`. Its tiles may be of more queries than
keys: with Q queries, a multiple of B, d is `i // Q * Q // B - j // B`.
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


def query_blocks(position: torch.Tensor, block_size: int, query_block_size: int | None = None) -> torch.Tensor:
    """The block of B keys at which the tile of a query at some position begins, long, see above."""
    return (position if query_block_size is None else position // query_block_size * query_block_size) // block_size


def signed_parameters(values: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """
    The parameters `(..., K)` of a Toeplitz form by their signed distance: `(..., 2K - 1)` for a symmetric one,
    otherwise themselves.
    """
    return torch.cat([values.flip(-1)[..., :-1], values], dim=-1) if symmetric else values


def num_distances(num_parameters: int, symmetric: bool) -> int:
    """How many distances `abs(i // B - j // B)`, from 0 on, the parameters of a Toeplitz form are about."""
    return num_parameters if symmetric else (num_parameters + 1) // 2


def parameter_index(
    form: str,
    length: int,
    mask_length: int,
    symmetric: bool = True,
    block_size: int | None = None,
    device: torch.device | str | None = None,
    size: int | None = None,
    query_block_size: int | None = None,
) -> torch.Tensor:
    """
    The parameter of each entry at some input length, long `(length, length)`; K or more where there is none.

    `symmetric`: entries (i, j) and (j, i) share their parameter. `size` is K, which a Toeplitz form that is not
    symmetric needs.
    """
    if form != "table":
        tile = (block_size or 1) if form == "blocks" else 1
        if symmetric:
            return toeplitz_index(length, tile, device)
        assert size is not None
        position = torch.arange(length, device=device)
        index = query_blocks(position, tile, query_block_size)[:, None] - position // tile + size // 2
        return index.masked_fill((index < 0) | (index > size), size)
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
    rows: bool = True,
) -> torch.Tensor:
    """
    The rows and columns of the special tokens, bool `(n, n)`, or `(B, n, n)` if `first` or `last` `(B,)` say where
    they are in each sequence of a batch. By default they are at 0 and n - 1. Without `rows` the columns alone.
    """
    check_choice("special_tokens", special_tokens, SPECIAL_TOKENS)
    position = torch.arange(length, device=device)
    special = torch.zeros(length, dtype=torch.bool, device=device)
    if special_tokens != "none":
        special = position == (0 if first is None else first[:, None])
    if special_tokens == "first_last":
        special = special | (position == (length - 1 if last is None else last[:, None]))
    columns = special[..., None, :]
    return special[..., :, None] | columns if rows else columns.expand(*special.shape, length)


def fill_fixed_entries(
    table: torch.Tensor, special_tokens: str, diagonal: bool | None, special_rows: bool = True
) -> torch.Tensor:
    """
    Set, in place, the entries of a table `(..., n, n)` that no parameter decides: 1 for special tokens, without their
    rows if not `special_rows`, and then `diagonal`, unless it is `None`, for all n diagonal entries.
    """
    if special_tokens != "none":
        special = special_entries(table.shape[-1], special_tokens, device=table.device, rows=special_rows)
        table.masked_fill_(special, 1)
    if diagonal is not None:
        table.diagonal(dim1=-2, dim2=-1).fill_(diagonal)
    return table


def fixed_entries(length: int, special_tokens: str, diagonal: bool | None, special_rows: bool = True) -> torch.Tensor:
    """Which entries a search does not learn: int8 `(n, n)` on the CPU, 1 always on, 0 always off, -1 learned."""
    fixed = torch.full((length, length), -1, dtype=torch.int8, device="cpu")
    return fill_fixed_entries(fixed, special_tokens, diagonal, special_rows)


def learned_ranges(
    length: int, num_special: int, special_rows: bool = True, known: int | None = None
) -> tuple[range, range]:
    """
    The queries and the keys between which parameters decide: those that are neither special (a query only if
    `special_rows`) nor beyond the `known` tokens. `num_special`: 0, 1 (the first token) or 2 (the last one, too).
    """
    most = length if known is None else min(length, known)
    start, end = min(num_special, 1), min(length - (num_special == 2), most)
    keys = range(start, max(end, start))
    return (keys if special_rows else range(most)), keys


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
    query_block_size: int | None = None,
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
        sizes = (block_size, values.device, values.shape[-1], query_block_size)
        index = parameter_index(form, length, mask_length, symmetric, *sizes)
    # One parameter beyond the last stands for every entry that has none.
    values = torch.nn.functional.pad(values, (0, 1), value=off)
    index = index.clamp(max=values.shape[-1] - 1)
    table = values.flatten(0, 1).index_select(1, index.flatten()).view(*values.shape[:2], length, length)
    if new and length_policy == "dense":
        is_new = torch.arange(length, device=values.device) >= mask_length
        table = table.masked_fill(is_new[:, None] | is_new, on)
    return table


def num_pairs(queries: range, keys: range) -> int:
    """Number of pairs of a query and a key before it."""
    return sum(max(queries.stop - max(queries.start, key + 1), 0) for key in keys)


def token_pairs(
    queries: range, keys: range, block_size: int, num_parameters: int, symmetric: bool = True, causal: bool = False
) -> torch.Tensor:
    """
    How many pairs of a query and a key each parameter of a Toeplitz form decides, without those of a token with
    itself: float64 `(K,)`. `causal`: only pairs with a key before the query.
    """
    reach = num_distances(num_parameters, symmetric)
    token = torch.arange(max(queries.stop, keys.stop), device="cpu")
    is_query, is_key = ((token >= tokens.start) & (token < tokens.stop) for tokens in (queries, keys))
    block = token // block_size
    size = max(reach, int(block[-1]) + 1 if len(token) else 0)
    sizes = [block[chosen].bincount(minlength=size).double() for chosen in (is_query, is_key)]  # tokens per block
    spectrum = [torch.fft.rfft(each, 2 * size) for each in sizes]
    pairs = torch.fft.irfft(spectrum[0] * spectrum[1].conj(), 2 * size).round()
    positive, negative = pairs[:reach], pairs[2 * size - reach + 1 :].flip(0)  # from distance 0 and from -1 on
    if causal:
        # The queries after each key in its own block.
        after = ((block + 1) * block_size).clamp(max=queries.stop) - (token + 1).clamp(min=queries.start)
        positive[0] = after[is_key].clamp(min=0).sum()
        negative.zero_()
    else:
        positive[0] -= (is_query & is_key).sum()
    if symmetric:
        positive[1:] += negative
        return positive
    return torch.cat([negative.flip(0), positive])


def rectangular_pairs(
    queries: range, keys: range, block_size: int, query_block_size: int, num_parameters: int, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`token_pairs`] of tiles of more queries than keys, and how many pairs of a key with itself each parameter decides:
    float64 `(K,)`. All keys are queries too.
    """
    first = torch.arange(0, queries.stop, query_block_size, device="cpu")[:, None]
    key = torch.arange(keys.start, keys.stop, device="cpu")
    least = first.clamp(min=queries.start)
    most = (first + query_block_size).clamp(max=queries.stop)
    number = (most - (torch.maximum(least, key + 1) if causal else least)).clamp(min=0).expand(len(first), len(key))

    def by_parameter(starts, counts):
        index = starts - key // block_size + num_parameters // 2
        known = (index >= 0) & (index < num_parameters)
        return counts.double()[known].new_zeros(num_parameters).index_add_(0, index[known], counts[known].double())

    own = by_parameter(query_blocks(key, block_size, query_block_size), torch.ones_like(key))
    pairs = by_parameter(first // block_size, number)
    return pairs if causal else pairs - own, own


def kept_by_head(
    keep: torch.Tensor,
    form: str,
    length: int,
    block_size: int | None,
    num_special: int,
    diagonal: bool | None,
    symmetric: bool = True,
    special_rows: bool = True,
    known: int | None = None,
    causal: bool = False,
    query_block_size: int | None = None,
) -> torch.Tensor:
    """
    Number of entries that each head of a mask keeps at some length, without making its table: int64 `(L, H)`.

    `num_special`: 0, 1 (the first token) or 2 (the last one, too). `known`: tokens after which all entries are on.
    """
    queries, keys = learned_ranges(length, num_special, special_rows, known)
    inner = len(keys)  # they are queries, too
    if form == "table":
        part = keep[..., queries.start : queries.stop, keys.start : keys.stop]
        shift = keys.start - queries.start
        on_diagonal = part.diagonal(-shift, dim1=-2, dim2=-1).sum(-1)
        # A sum would first turn the entries into integers of 8 bytes.
        counts = [head.count_nonzero() for head in (part.tril(-shift - 1) if causal else part).flatten(0, 1)]
        off_diagonal = torch.stack(counts).view(keep.shape[:2]) - (0 if causal else on_diagonal)
    elif query_block_size is not None:
        assert block_size is not None
        both = rectangular_pairs(queries, keys, block_size, query_block_size, keep.shape[-1], causal)
        off_diagonal, on_diagonal = ((keep.double() @ pairs).round().long() for pairs in both)
    else:
        pairs = token_pairs(queries, keys, block_size or 1, keep.shape[-1], symmetric, causal)
        off_diagonal = (keep.double() @ pairs).round().long()
        on_diagonal = keep[..., 0 if symmetric else keep.shape[-1] // 2].long() * inner
    whole = length * (length + 1) // 2 if causal else length**2
    outer = whole - inner - (num_pairs(queries, keys) if causal else len(queries) * inner - inner)
    total = off_diagonal + outer
    if diagonal is None:
        return total + on_diagonal
    return total + (inner if diagonal else inner - length)


def num_empty_rows(
    keep: torch.Tensor,
    length: int,
    block_size: int | None,
    num_special: int,
    diagonal: bool | None,
    symmetric: bool = True,
    special_rows: bool = True,
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
    keep = signed_parameters(keep, symmetric)
    middle = keep.shape[-1] // 2
    own, behind, ahead = keep[..., middle : middle + 1], keep[..., middle + 1 :], keep[..., :middle].flip(-1)
    # Where there is no other block in the mask, one as far as `length` stands for it, like one that is off.
    distance = torch.arange(1, middle + 1, device=keep.device)
    before, after = (
        torch.nn.functional.pad(distance.expand_as(kept).masked_fill(~kept, length), (0, 1), value=length).amin(
            -1, keepdim=True
        )
        for kept in (behind, ahead)
    )
    # The nearest keys in other blocks are the last token of one before and the first token of one after.
    before, after = token % size + (before - 1) * size + 1, after * size - token % size  # (L, H, n)
    full = (before <= token.clamp(max=window)) | (after <= (length - 1 - token).clamp(max=window))
    company = torch.ones_like(token, dtype=torch.bool)  # in its own block, itself included
    if diagonal is False:
        company = (token % size > 0) | ((token % size < size - 1) & (token < length - 1))
        company &= window > 0
    full |= own & company
    for end in (0, length - 1)[:num_special]:
        reached = (token - end).abs() <= window
        if diagonal is False:
            reached[end] = special_rows and min(window, length - 1) > 0
        full |= reached
    return int((~full).sum())
