"""
Attention patterns from the literature, as `SparseMask` values.

Letters: L layers (1 when all layers share the masks), H heads, n length, i query (row), j key (column), both from 0,
p patterns of a cycle.

A pattern is a function of the length and of its own keyword parameters. Those that draw at random also take the number
of heads and a seed, and draw each head anew; the others return one head, a cycle its p patterns as p layers.
[`build_pattern`] turns any of them into the mask of a model. A form with one bit per offset is used where the
definition depends on `abs(i - j)` alone, and the length policy is chosen so that a longer input is either masked by
the same definition or refused.
"""

import difflib
import inspect

import torch

from ..checks import check_choice, check_range
from .sparse_mask import SPECIAL_TOKENS, SparseMask


HEAD_CONFIGURATIONS = ("sequential", "union", "multihead")


def _rows_and_columns(length):
    """Query indices `(n, 1)` and key indices `(1, n)`."""
    index = torch.arange(length)
    return index[:, None], index[None, :]


def _draw(shape, count, seed):
    """Bool tensor of `shape` with exactly `count` True at random along the last dimension."""
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return torch.zeros(shape, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, True)


def _table(keep, length, **fields):
    """Mask of a table `(n, n)` or of one table per head `(H, n, n)`."""
    return SparseMask(keep.view(1, -1, length, length), length, form="table", **fields)


def _cycle(sets, length):
    """Mask of one head whose p layers are the given tables `(n, n)`."""
    return SparseMask(torch.stack(sets)[:, None], length, form="table")  # (p, 1, n, n)


def _offsets(keep, length, length_policy, **fields):
    """Mask of one head with the given bit per offset `(K,)`."""
    return SparseMask(keep.view(1, 1, -1), length, form="offsets", length_policy=length_policy, **fields)


def dense(length):
    """Every position, at any length."""
    return _offsets(torch.ones(length, dtype=torch.bool), length, "dense")


def no_diag(length):
    """
    Every position but the n diagonal entries, at any length.

    Source: SparseBERT (arXiv 2102.12871), Section 3.3.
    """
    return dense(length).without_diagonal()


def random_drop(length, num_heads, seed):
    """
    Every position but n entries per head, drawn at random: the control of [`no_diag`].

    Source: SparseBERT (arXiv 2102.12871), Section 3.3.
    """
    return _table(~_draw((num_heads, length * length), length, seed), length)


def random(length, num_heads, seed, *, sparsity=0.9):
    """
    Entries drawn uniformly, as many in every head as `sparsity` (fraction removed) leaves.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5.1; 0.9 is the level of its Table 1.
    """
    check_range("sparsity", sparsity, 0, 1, kinds=(int, float))
    return _table(_draw((num_heads, length * length), round((1 - sparsity) * length**2), seed), length)


def window(length, *, window_size=5, num_global_tokens=0):
    """
    The nearest keys, `abs(i - j) <= window_size`, at any length. The first (1) or the first and the last token (2) may
    be global: they attend to and are attended by all.
    """
    check_range("window_size", window_size, 0, length - 1)
    check_range("num_global_tokens", num_global_tokens, 0, 2)
    keep = torch.ones(window_size + 1, dtype=torch.bool)
    return _offsets(keep, length, "extend", special_tokens=SPECIAL_TOKENS[num_global_tokens])


def strided(length, *, stride=4):
    """
    `abs(i - j) < stride` or `abs(i - j)` a multiple of `stride`.

    Source: Sparse Transformer (arXiv 1904.10509) as in SparseBERT (arXiv 2102.12871), Figure 1c.
    """
    check_range("stride", stride, 1)
    offset = torch.arange(length)
    return _offsets((offset < stride) | (offset % stride == 0), length, "error")


def fixed(length, *, stride=4, num_summary_tokens=1):
    """
    The query's own segment of `stride` tokens, and the last `num_summary_tokens` keys of every segment.

    Source: Sparse Transformer (arXiv 1904.10509) as in SparseBERT (arXiv 2102.12871), Figure 1d.
    """
    check_range("stride", stride, 1)
    check_range("num_summary_tokens", num_summary_tokens, 0, stride)
    i, j = _rows_and_columns(length)
    return _table((i // stride == j // stride) | (j % stride >= stride - num_summary_tokens), length)


def logsparse(length):
    """
    `abs(i - j)` is 0 or a power of two.

    Source: LogSparse Transformer (arXiv 1907.00235) as in SparseBERT (arXiv 2102.12871), Figure 1b.
    """
    offset = torch.arange(length)
    return _offsets(offset & (offset - 1) == 0, length, "error")


def star(length, *, window_size=1):
    """
    Token 0 is the relay, which attends to and is attended by all; the others form a ring, in which each attends to
    `window_size` neighbours on both sides.

    Source: Star-Transformer (arXiv 1902.09113) as in SparseBERT (arXiv 2102.12871), Figure 1a.
    """
    check_range("window_size", window_size, 1)
    # Tokens 1..n-1 are a ring of n - 1: offset d is also n - 1 - d steps the other way round. Row and column 0, where
    # this does not hold, are on anyway, so that the offset alone decides.
    offset = torch.arange(length)
    keep = (offset <= window_size) | (offset >= length - 1 - window_size)
    return _offsets(keep, length, "error", special_tokens="first")


def bigbird(length, num_heads, seed, *, window_size=1, num_global_tokens=2, num_random_keys=2):
    """
    `abs(i - j) <= window_size`, no global token (0), the first (1) or the first and the last (2), and
    `num_random_keys` different keys per query, drawn among all keys, so that some are in the window already.

    Source: BigBird (arXiv 2007.14062) without its blocks, as in SparseBERT (arXiv 2102.12871), Section 4.2.
    """
    check_range("window_size", window_size, 0)
    check_range("num_global_tokens", num_global_tokens, 0, 2)
    check_range("num_random_keys", num_random_keys, 0, length)
    i, j = _rows_and_columns(length)
    keep = _draw((num_heads, length, length), num_random_keys, seed) | ((i - j).abs() <= window_size)
    return _table(keep, length, special_tokens=SPECIAL_TOKENS[num_global_tokens])


def longformer(length, num_heads, seed, *, window_size=3, num_global_tokens=4):
    """
    `abs(i - j) <= window_size`, and `num_global_tokens` random positions per head that attend to and are attended by
    all. The defaults give the sparsity of SparseBERT's Tables 3 and 4; its Section 4.2 says 2 and 2, which removes
    more.

    Source: Longformer (arXiv 2004.05150) as in SparseBERT (arXiv 2102.12871), Section 4.2 and Figure 1e.
    """
    check_range("window_size", window_size, 0)
    check_range("num_global_tokens", num_global_tokens, 0, length)
    i, j = _rows_and_columns(length)
    is_global = _draw((num_heads, length), num_global_tokens, seed)
    return _table(is_global[:, :, None] | is_global[:, None, :] | ((i - j).abs() <= window_size), length)


def strided_cycle(length, *, stride=16):
    """
    First the nearest keys, from `ceil(stride / 2)` before to `floor(stride / 2)` after, then every `stride`-th key.
    The union of both is not [`strided`], whose window reaches `stride - 1` to both sides.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Eq. 4, w = `stride`.
    """
    check_range("stride", stride, 1)
    i, j = _rows_and_columns(length)
    near = (j - i >= -((stride + 1) // 2)) & (j - i <= stride // 2)
    return _cycle([near, (j - i) % stride == 0], length)


def fixed_cycle(length, *, stride=16):
    """
    First the query's own segment of `stride` tokens, then itself and the last token of every complete segment.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Eq. 5, w = `stride`.
    """
    check_range("stride", stride, 1)
    i, j = _rows_and_columns(length)
    return _cycle([i // stride == j // stride, (i == j) | (j % stride == stride - 1)], length)


def star_cycle(length, *, window_size=16):
    """
    One pattern only: the last token is the relay, which attends to and is attended by all; the others form a ring, in
    which each attends to `window_size` neighbours on both sides. [`star`] is the same with the first token as relay.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Eq. 6, w = `window_size`.
    """
    check_range("window_size", window_size, 1)
    i, j = _rows_and_columns(length)
    offset = (i - j).abs()
    ring = (offset <= window_size) | (offset >= length - 1 - window_size)
    return _cycle([ring | (i == length - 1) | (j == length - 1)], length)


PATTERNS = {
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

# The patterns that take a head configuration; p = 2, 2, 1.
CYCLES = {name: PATTERNS[name] for name in ("strided_cycle", "fixed_cycle", "star_cycle")}


def _nearest(what, name, allowed):
    """`ValueError` for a name outside `allowed`, with the nearest of them."""
    nearest = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ValueError(f"unknown {what} {name!r}; {hint}allowed: {', '.join(allowed) or 'none'}")


def _arrange(sets, head_configuration, num_layers, num_heads):
    """
    Lay the p patterns of a cycle out over layers and heads.

    Args:
        sets (`torch.Tensor`): `(p, 1, n, n)`.
    Returns:
        `torch.Tensor` of shape `(num_layers or 1, num_heads or 1, n, n)`.
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


def build_pattern(
    name,
    length,
    num_heads,
    num_layers=1,
    diagonal=True,
    seed=0,
    head_configuration=None,
    **parameters,
):
    """
    The mask of a model from the name of a pattern.

    Args:
        name (`str`): A key of `PATTERNS`.
        length (`int`): n. Longer inputs are masked by the same definition (window, dense, no_diag) or refused.
        num_heads (`int`): H.
        num_layers (`int`, *optional*, defaults to 1): Layers of the model. Matters to a cycle laid out sequentially
            only; other masks are shared by all layers.
        diagonal (`bool`, *optional*, defaults to `True`): `True` leaves the diagonal as the pattern defines it,
            `False` removes all its n entries.
        seed (`int`, *optional*, defaults to 0): Of the patterns drawn at random, each head anew.
        head_configuration (`str`, *optional*): For the p patterns of a cycle: `"sequential"` (default; layer l uses
            pattern `l mod p`), `"union"` (all of them everywhere) or `"multihead"` (each in an equal share of the
            heads).
        parameters: The pattern's own, such as `window_size=3`.

    Returns:
        [`SparseMask`], with the pattern's name and parameters as metadata.
    Raises:
        ValueError: If the name or a parameter is unknown, or a value is out of its range.
    """
    if name not in PATTERNS:
        raise _nearest("pattern", name, list(PATTERNS))
    check_range("length", length, 1)
    check_range("num_heads", num_heads, 1)
    check_range("num_layers", num_layers, 1)
    check_range("seed", seed, 0, 2**63 - 1)
    check_choice("diagonal", diagonal, (True, False))
    if head_configuration is not None:
        if name not in CYCLES:
            raise ValueError(
                f"head_configuration is for {', '.join(CYCLES)} only, got {head_configuration!r} with {name!r}"
            )
        check_choice("head_configuration", head_configuration, HEAD_CONFIGURATIONS)

    function = PATTERNS[name]
    signature = inspect.signature(function).parameters
    own = {key: field.default for key, field in signature.items() if field.kind is field.KEYWORD_ONLY}
    for key in parameters:
        if key not in own:
            raise _nearest(f"parameter of pattern {name!r}:", key, list(own))
    metadata = {"pattern": name, "pattern_parameters": own | parameters}
    drawn = {}
    if "seed" in signature:
        drawn = {"num_heads": num_heads, "seed": seed}
        metadata["pattern_seed"] = seed
    mask = function(length, **drawn, **parameters)
    keep = mask.keep
    if name in CYCLES:
        head_configuration = head_configuration or "sequential"
        metadata["head_configuration"] = head_configuration
        keep = _arrange(keep, head_configuration, num_layers, num_heads)
    keep = keep.expand(-1, num_heads, *keep.shape[2:])
    return mask.replace(keep=keep, diagonal=mask.diagonal if diagonal else False, metadata=metadata)
