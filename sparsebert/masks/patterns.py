"""
Attention patterns from the literature, as [`SparseMask`] values.

Letters: L layers (1 when all layers share the masks), H heads, n length, i query (row), j key (column), both from 0,
p patterns of a cycle.

A pattern is a function of the length and of its own keyword parameters. Random patterns also take the number of heads
and a seed, and draw each head independently. All others return a mask of one head; for a cycle, its p patterns are p
layers. [`build_pattern`] turns any of them into the mask of a model.

A pattern whose definition depends on `abs(i - j)` alone has one bit per offset. Length policies are such that a longer
input is either masked by the same definition or refused.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..checks import MAX_HEADS, MAX_LAYERS, check_choice, check_range, nearest
from .expansion import SPECIAL_TOKENS
from .mask_files import MAX_MASK_LENGTH
from .sparse_mask import SparseMask


HEAD_CONFIGURATIONS = ("sequential", "union", "multihead")


def _rows_and_columns(length):
    """Query indices `(n, 1)` and key indices `(1, n)`."""
    index = torch.arange(length)
    return index[:, None], index[None, :]


def _diagonals(length, keep):
    """Table `(n, n)` of what `keep` says about the signed offsets j - i."""
    return keep(torch.arange(1 - length, length)).unfold(0, length, 1).flip(0)


def _draw(shape, count, seed):
    """Bool tensor of `shape` with exactly `count` random entries on along the last dimension."""
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return torch.zeros(shape, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, True)


def _table(keep, length, **fields):
    """Mask with the given table `(n, n)`, or one table per head `(H, n, n)`."""
    return SparseMask(keep.view(1, -1, length, length), length, form="table", **fields)


def _cycle(sets, length):
    """Mask of one head whose p layers are the given tables `(n, n)`."""
    return SparseMask(torch.stack(sets)[:, None], length, form="table")  # (p, 1, n, n)


def _offsets(keep, length, length_policy, **fields):
    """Mask of one head with the given bit per offset `(K,)`."""
    return SparseMask(keep.view(1, 1, -1), length, form="offsets", length_policy=length_policy, **fields)


def dense(length: int) -> SparseMask:
    """All keys, at any length."""
    return _offsets(torch.ones(length, dtype=torch.bool), length, "dense")


def no_diag(length: int) -> SparseMask:
    """
    All keys but the query itself, at any length.

    Source: SparseBERT (arXiv 2102.12871), Section 3.3.
    """
    return dense(length).without_diagonal()


def random_drop(length: int, num_heads: int, seed: int) -> SparseMask:
    """
    All entries but n random ones per head: the control for [`no_diag`].

    Source: SparseBERT (arXiv 2102.12871), Section 3.3.
    """
    return _table(~_draw((num_heads, length * length), length, seed), length)


def random(length: int, num_heads: int, seed: int, *, sparsity: float = 0.9) -> SparseMask:
    """
    Entries drawn uniformly at random; `sparsity` is the fraction removed, the same in every head.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5.1; its Table 1 uses 0.9.
    """
    check_range("sparsity", sparsity, 0, 1, kinds=(int, float))
    return _table(_draw((num_heads, length * length), round((1 - sparsity) * length**2), seed), length)


def window(length: int, *, window_size: int = 5, num_global_tokens: int = 0) -> SparseMask:
    """
    The nearest keys, `abs(i - j) <= window_size`, at any length. `num_global_tokens` says how many tokens attend to
    and are attended by all: none (0), the first (1), or the first and the last (2).
    """
    check_range("window_size", window_size, 0, length - 1)
    check_range("num_global_tokens", num_global_tokens, 0, 2)
    keep = torch.ones(window_size + 1, dtype=torch.bool)
    return _offsets(keep, length, "extend", special_tokens=SPECIAL_TOKENS[num_global_tokens])


def strided(length: int, *, stride: int = 4) -> SparseMask:
    """
    `abs(i - j)` is less than `stride` or a multiple of it.

    Source: Sparse Transformer (arXiv 1904.10509) as in SparseBERT (arXiv 2102.12871), Figure 1c.
    """
    check_range("stride", stride, 1)
    offset = torch.arange(length)
    return _offsets((offset < stride) | (offset % stride == 0), length, "error")


def fixed(length: int, *, stride: int = 4, num_summary_tokens: int = 1) -> SparseMask:
    """
    The keys of the query's own segment of `stride` tokens, and the last `num_summary_tokens` keys of every segment.

    Source: Sparse Transformer (arXiv 1904.10509) as in SparseBERT (arXiv 2102.12871), Figure 1d.
    """
    check_range("stride", stride, 1)
    check_range("num_summary_tokens", num_summary_tokens, 0, stride)
    i, j = _rows_and_columns(length)
    return _table((i // stride == j // stride) | (j % stride >= stride - num_summary_tokens), length)


def logsparse(length: int) -> SparseMask:
    """
    `abs(i - j)` is 0 or a power of two.

    Source: LogSparse Transformer (arXiv 1907.00235) as in SparseBERT (arXiv 2102.12871), Figure 1b.
    """
    offset = torch.arange(length)
    return _offsets(offset & (offset - 1) == 0, length, "error")


def star(length: int, *, window_size: int = 1) -> SparseMask:
    """
    Token 0 is the relay, which attends to and is attended by all. The others form a ring, in which each attends to
    itself and `window_size` neighbors on both sides.

    Source: Star-Transformer (arXiv 1902.09113) as in SparseBERT (arXiv 2102.12871), Figure 1a.
    """
    check_range("window_size", window_size, 1)
    # Tokens 1..n-1 are a ring of n - 1: offset d is also n - 1 - d steps the other way round. This does not hold for
    # row and column 0, but these are on anyway, so one bit per offset is enough.
    offset = torch.arange(length)
    keep = (offset <= window_size) | (offset >= length - 1 - window_size)
    return _offsets(keep, length, "error", special_tokens="first")


def bigbird(
    length: int,
    num_heads: int,
    seed: int,
    *,
    window_size: int = 1,
    num_global_tokens: int = 2,
    num_random_keys: int = 2,
) -> SparseMask:
    """
    `abs(i - j) <= window_size`, global tokens as in [`window`], and `num_random_keys` different keys per query. These
    are drawn among all keys, so some of them may be in the window already.

    Source: BigBird (arXiv 2007.14062) without its blocks, as in SparseBERT (arXiv 2102.12871), Section 4.2.
    """
    check_range("window_size", window_size, 0)
    check_range("num_global_tokens", num_global_tokens, 0, 2)
    check_range("num_random_keys", num_random_keys, 0, length)
    near = _diagonals(length, lambda offset: offset.abs() <= window_size)
    keep = _draw((num_heads, length, length), num_random_keys, seed) | near
    return _table(keep, length, special_tokens=SPECIAL_TOKENS[num_global_tokens])


def longformer(
    length: int, num_heads: int, seed: int, *, window_size: int = 3, num_global_tokens: int = 4
) -> SparseMask:
    """
    `abs(i - j) <= window_size`, and `num_global_tokens` random tokens per head that attend to and are attended by
    all. The defaults give the sparsity in Tables 3 and 4 of SparseBERT; its Section 4.2 states 2 and 2, which removes
    more.

    Source: Longformer (arXiv 2004.05150) as in SparseBERT (arXiv 2102.12871), Section 4.2 and Figure 1e.
    """
    check_range("window_size", window_size, 0)
    check_range("num_global_tokens", num_global_tokens, 0, length)
    near = _diagonals(length, lambda offset: offset.abs() <= window_size)
    is_global = _draw((num_heads, length), num_global_tokens, seed)
    return _table(is_global[:, :, None] | is_global[:, None, :] | near, length)


def strided_cycle(length: int, *, stride: int = 16) -> SparseMask:
    """
    First pattern: the nearest keys, from `ceil(stride / 2)` before the query to `floor(stride / 2)` after it. Second
    pattern: every `stride`-th key. Their union is not [`strided`], whose window reaches `stride - 1` to both sides.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Eq. 4, w = `stride`.
    """
    check_range("stride", stride, 1)
    near = _diagonals(length, lambda offset: (offset >= -((stride + 1) // 2)) & (offset <= stride // 2))
    return _cycle([near, _diagonals(length, lambda offset: offset % stride == 0)], length)


def fixed_cycle(length: int, *, stride: int = 16) -> SparseMask:
    """
    First pattern: the query's own segment of `stride` tokens. Second pattern: the query itself and the last token of
    every complete segment.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Eq. 5, w = `stride`.
    """
    check_range("stride", stride, 1)
    i, j = _rows_and_columns(length)
    return _cycle([i // stride == j // stride, (i == j) | (j % stride == stride - 1)], length)


def star_cycle(length: int, *, window_size: int = 16, relay: int = -1) -> SparseMask:
    """
    A cycle of one pattern, [`star`] with the token at position `relay` as the relay; negative positions count from the
    end. In a causal model only the tokens after the relay attend to it, so the last token, the paper's relay, is of no
    use there.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Eq. 6, w = `window_size`, relay = -1.
    """
    check_range("window_size", window_size, 1)
    check_range("relay", relay, -length, length - 1)
    relay %= length
    i, j = _rows_and_columns(length)
    # The other n - 1 tokens are a ring, numbered without the relay.
    offset = ((i - (i > relay).long()) - (j - (j > relay).long())).abs()
    ring = (offset <= window_size) | (offset >= length - 1 - window_size)
    return _cycle([ring | (i == relay) | (j == relay)], length)


PATTERNS: dict[str, Callable[..., SparseMask | torch.Tensor]] = {
    "strided": strided,
    "fixed": fixed,
    "logsparse": logsparse,
    "star": star,
    "bigbird": bigbird,
    "longformer": longformer,
    "window": window,
    "random": random,
    "dense": dense,
    "no_diag": no_diag,
    "random_drop": random_drop,
    "strided_cycle": strided_cycle,
    "fixed_cycle": fixed_cycle,
    "star_cycle": star_cycle,
}

_OWN = tuple(PATTERNS)
# The patterns that take a head configuration; p is 2, 2 and 1.
CYCLES = {name: PATTERNS[name] for name in ("strided_cycle", "fixed_cycle", "star_cycle")}


def _arrange(sets, head_configuration, num_layers, num_heads):
    """
    Lay out the p patterns `(p, 1, n, n)` of a cycle over layers and heads: `(num_layers or 1, num_heads or 1, n, n)`.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5.1.
    """
    num_sets = len(sets)
    if num_sets == 1:
        return sets
    if head_configuration == "union":
        return sets.any(0, keepdim=True)
    if head_configuration == "multihead":
        if num_heads % num_sets:
            raise ValueError(
                f"num_heads must be a multiple of {num_sets} with head_configuration 'multihead', got {num_heads}"
            )
        return sets[torch.arange(num_heads) // (num_heads // num_sets)].transpose(0, 1)
    return sets[torch.arange(num_layers) % num_sets]


def as_mask(given: Any, num_heads: int, what: str = "mask") -> SparseMask:
    """A mask that is given as such or as a bool tensor `(n, n)`, `(H, n, n)` or `(L, H, n, n)`."""
    if isinstance(given, torch.Tensor) and given.dim():
        keep = given.expand(num_heads, *given.shape) if given.dim() == 2 else given
        return SparseMask(keep, keep.shape[-1])
    if not isinstance(given, SparseMask):
        raise ValueError(
            f"{what} must be a SparseMask, or a bool tensor (n, n), (H, n, n) or (L, H, n, n) that is True where a "
            f"query may attend to a key, got {type(given).__name__}"
        )
    return given


def register_pattern(name: str, function: Callable[..., SparseMask | torch.Tensor]) -> None:
    """
    Have a function known as a pattern in this process, wherever the key of `PATTERNS` is taken.

    Args:
        name (`str`): An identifier, which must not be that of a pattern of this package. A pattern that was registered
            under it is replaced.
        function (`Callable`): A function of the length, with keyword-only parameters that have defaults. Returns a
            bool tensor `(length, length)`, True where a query may attend to a key, or a [`SparseMask`] of one head. A
            function that also takes `num_heads` and `seed` returns a mask for all heads.

    Raises:
        ValueError: If the name is taken or no name, or the function has other parameters.
    """
    if not (isinstance(name, str) and name.isidentifier()) or name in _OWN:
        raise ValueError(f"name must be an identifier, and none of {', '.join(_OWN)}, got {name!r}")
    parameters = [*inspect.signature(function).parameters.values()] if inspect.isfunction(function) else []
    others = parameters[1:]
    drawn = [item.name for item in others if item.name in ("num_heads", "seed")]
    own = [item for item in others if item.name not in drawn]
    if not parameters or len(drawn) == 1 or any(item.name not in (function.__kwdefaults__ or {}) for item in own):
        raise ValueError(
            f"pattern {name!r} must be a function of the length, perhaps of num_heads and seed, and of keyword-only "
            f"parameters with defaults, got {function!r}"
        )
    PATTERNS[name] = function


def build_pattern(
    name: str,
    length: int,
    num_heads: int,
    num_layers: int = 1,
    diagonal: bool = True,
    seed: int = 0,
    head_configuration: str | None = None,
    **parameters: Any,
) -> SparseMask:
    """
    The mask of a model, built from the name of a pattern.

    Args:
        name (`str`): A key of `PATTERNS`.
        length (`int`): n. Longer inputs are either masked by the same definition (window, dense, no_diag) or refused.
        num_heads (`int`): H.
        num_layers (`int`, *optional*, defaults to 1): Number of layers of the model. It only matters for a sequential
            cycle; all other masks are shared by all layers.
        diagonal (`bool`, *optional*, defaults to `True`): `True` leaves the diagonal as the pattern defines it,
            `False` removes all its n entries.
        seed (`int`, *optional*, defaults to 0): Seed of random patterns. Each head is drawn independently.
        head_configuration (`str`, *optional*): Where the p patterns of a cycle go: `"sequential"` (the default; layer
            l uses pattern `l mod p`), `"union"` (all of them in every head) or `"multihead"` (each in an equal share
            of the heads).
        parameters: Parameters of the pattern, such as `window_size=3`.

    Returns:
        [`SparseMask`], with the pattern's name and parameters in its metadata.
    Raises:
        ValueError: If the name or a parameter is unknown, or a value is out of its range.
    """
    if name not in PATTERNS:
        raise nearest("pattern", name, PATTERNS)
    for field, size, most in (
        ("length", length, MAX_MASK_LENGTH),
        ("num_heads", num_heads, MAX_HEADS),
        ("num_layers", num_layers, MAX_LAYERS),
    ):
        check_range(field, size, 1, most)
    check_range("seed", seed, 0, 2**63 - 1)
    check_choice("diagonal", diagonal, (True, False))
    if head_configuration is not None:
        if name not in CYCLES:
            raise ValueError(
                f"head_configuration needs one of the patterns {', '.join(CYCLES)}, got {head_configuration!r} with "
                f"{name!r}"
            )
        check_choice("head_configuration", head_configuration, HEAD_CONFIGURATIONS)

    function = PATTERNS[name]
    signature = inspect.signature(function).parameters
    own = function.__kwdefaults__ or {}
    for key in parameters:
        if key not in own:
            raise nearest(f"parameter of pattern {name!r}:", key, own)
    metadata: dict[str, Any] = {"pattern": name, "pattern_parameters": own | parameters}
    drawn = {}
    if "seed" in signature:
        drawn = {"num_heads": num_heads, "seed": seed}
        metadata["pattern_seed"] = seed
    with torch.device("cpu"):  # whatever the default device is: a mask is data
        mask = as_mask(function(length, **drawn, **parameters), 1, f"what pattern {name!r} returns")
        if mask.length != length:
            raise ValueError(f"pattern {name!r} must return a mask of length {length}, got {mask.length}")
        keep = mask.keep
        if name in CYCLES:
            head_configuration = head_configuration or "sequential"
            metadata["head_configuration"] = head_configuration
            keep = _arrange(keep, head_configuration, num_layers, num_heads)
    keep = keep.expand(-1, num_heads, *keep.shape[2:])
    return mask.replace(keep=keep, diagonal=mask.diagonal if diagonal else False, metadata=metadata)
