"""
Check the assumptions of the universality theorems, which say how expressive a mask is.

Letters: L layers, H heads, n length, p patterns of a cycle (the layers use pattern `l mod p`), k query (row), j key
(column), s hops.

Two theorems say that Transformers with a mask approximate every continuous sequence-to-sequence function:
Theorem 1 of O(n) Connections are Expressive Enough (arXiv 2006.04862), for layers whose heads share one pattern that
satisfies its Assumption 1, and Theorem 1 of SparseBERT (arXiv 2102.12871), for full attention without its diagonal.
Their conditions are sufficient, not necessary: where neither applies, nothing is proved against the mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from .chains import Chain, find_chain


if TYPE_CHECKING:
    from ..masks.sparse_mask import SparseMask


YES, UNKNOWN, NO_THEOREM = "yes", "unknown", "no theorem applies"

# Orders of growth that are distinguished, the slowest first.
GROWTHS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "O(n)": lambda n: 0 * n,
    "O(n log n)": np.log2,
    "O(n sqrt n)": np.sqrt,
    "O(n^2)": lambda n: n,
}
# The relative error of an accepted fit is at most the tolerance, and at most the ratio times the error of the best
# fit; below the noise, differences do not count.
GROWTH_TOLERANCE = 0.02
GROWTH_RATIO = 8
GROWTH_NOISE = 0.002
# Without self-attention s has no useful bound; at least this many rounds of the cycle are tried.
MIN_MAX_HOPS = 1024
# Rows that fit into the processor's cache, and after how many keys they are checked for being full.
_ROWS_AT_ONCE = 256
_KEYS_AT_ONCE = 8


@dataclass(frozen=True)
class Reach:
    """
    Assumption 1.3: whether every token reaches all tokens.

    Attributes:
        hops (`int`, *optional*): The smallest number of layers, s; `None` if there is none or it is unknown.
        never (`bool`): Whether it is proved that no number of layers suffices.
        curve (`tuple[tuple[float, float], ...]`): After 1, 2, ... layers, the fraction of tokens that a token has
            reached: minimum and mean over tokens.
        reason (`str`): Why there is no s, or why it is unknown.
    """

    hops: int | None
    never: bool
    curve: tuple[tuple[float, float], ...]
    reason: str = ""


@dataclass(frozen=True)
class Facts:
    """
    What was found about one cycle of patterns.

    Attributes:
        without_self (`int`): Number of rows without self-attention, over all p patterns (Assumption 1.1 asks for 0).
        chain ([`Chain`]): Assumption 1.2, for the union of the p patterns.
        reach ([`Reach`]): Assumption 1.3.
        full_but_diagonal (`bool`): Whether every pattern is full attention without the diagonal.
        connections (`float`): Entries kept per layer, mean over the p patterns.
    """

    without_self: int
    chain: Chain
    reach: Reach
    full_but_diagonal: bool
    connections: float


@dataclass(frozen=True)
class Universality:
    """
    The verdict on a mask.

    Attributes:
        universal (`str`): `"yes"`, `"unknown"` or `"no theorem applies"`.
        reason (`str`): Which theorem applies, or why none does.
        length (`int`): Number of tokens, n.
        num_heads (`int`): Number of heads, H.
        num_patterns (`int`): Number of patterns of the cycle, p.
        sparsity (`float`): Fraction of entries removed, mean over heads and patterns.
        facts (`dict[str, Facts]`): Facts of `"one pattern"` if all heads of a layer share it, else of the `"union"`
            and the `"intersection"` of the heads.
    """

    universal: str
    reason: str
    length: int
    num_heads: int
    num_patterns: int
    sparsity: float
    facts: dict[str, Facts]


def check_universality(mask: "SparseMask", length: int | None = None, causal: bool = False) -> Universality:
    """
    Check the assumptions of the theorems for a mask at a length, by default its own, on inputs without padding. Its L
    layers are read as a cycle with the smallest p that fits; `causal` removes the keys after the query.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Assumption 1 and Theorem 1; SparseBERT (arXiv
    2102.12871), Theorem 1.
    """
    length = mask.length if length is None else length
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")
    keep = mask.keep
    # Equal heads and layers need only one table.
    if bool((keep == keep[:, :1]).all()):
        keep = keep[:, :1]
    keep = keep[: _period(keep)]
    tables = mask.replace(keep=keep, rest_bias=None).to_table(length).numpy()  # (p, H or 1, n, n)
    if causal:
        tables = np.tril(tables)
    sparsity = 1.0 - float(np.count_nonzero(tables)) / tables.size
    tables = tables[: _period(tables)]
    kinds = {"one pattern": tables[:, 0]}
    if not (tables == tables[:, :1]).all():
        kinds = {"union": np.any(tables, axis=1), "intersection": np.all(tables, axis=1)}
    facts = {kind: check_patterns(patterns) for kind, patterns in kinds.items()}
    universal, reason = _verdict(facts, length, mask.num_heads)
    return Universality(universal, reason, length, mask.num_heads, len(tables), sparsity, facts)


def _period(layers):
    """The smallest p with layer l equal to layer l mod p."""
    return next(
        period
        for period in range(1, len(layers) + 1)
        if all(bool((layers[index] == layers[index % period]).all()) for index in range(period, len(layers)))
    )


def _verdict(facts, length, num_heads):
    if num_heads < 2:
        return NO_THEOREM, "the theorems need two heads"
    found = facts.get("one pattern")
    if found is None:
        return NO_THEOREM, "heads differ, the theorems have one pattern in all heads of a layer"
    if found.full_but_diagonal and length > 2:
        return YES, "SparseBERT, Theorem 1: full attention without its diagonal, n > 2"
    failures = []
    if found.without_self:
        failures.append(f"1.1 fails: {found.without_self} rows without self-attention")
    if found.chain.exists is False:
        failures.append(f"1.2 fails: {found.chain.reason}")
    if found.reach.hops is None:
        failures.append(f"1.3 {'fails' if found.reach.never else 'is unknown'}: {found.reach.reason}")
    if failures:
        return NO_THEOREM, "; ".join(failures)
    if found.chain.exists is None:
        return UNKNOWN, f"1.1 and 1.3 hold, 1.2 is open: {found.chain.reason}"
    return YES, "O(n) Connections, Theorem 1: 1.1, 1.2 and 1.3 hold"


def check_patterns(tables: np.ndarray) -> Facts:
    """Find the facts of a cycle of patterns."""
    length = tables.shape[-1]
    without_self = int((~tables.diagonal(axis1=1, axis2=2)).sum())
    return Facts(
        without_self,
        find_chain(np.any(tables, axis=0)),
        find_reach(tables),
        bool((tables != np.eye(length, dtype=bool)).all()),
        float(np.count_nonzero(tables)) / len(tables),
    )


def find_reach(tables: np.ndarray) -> Reach:
    """
    Count the layers until every token has reached all tokens: S_k^1 = A_k^1, and S_k^t is the union of S_j^(t-1) over
    the keys j of k in pattern `(t - 1) mod p`.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Assumption 1.3.
    """
    period, length = tables.shape[:2]
    patterns = [csr_array(table) for table in tables]
    reached = _pack(tables[0])
    curve = [_coverage(reached, length)]
    if curve[0][0] == 1:
        return Reach(1, False, tuple(curve))
    always_self = bool(tables.diagonal(axis1=1, axis2=2).all())
    obstruction = _unreachable(tables, always_self)
    # With self-attention nothing is forgotten, so every link takes effect once in p layers.
    max_hops = period * (length - 1 if always_self else max(2 * length, MIN_MAX_HOPS))
    seen: set[tuple[int, bytes]] = set()
    while not obstruction and len(curve) < max_hops:
        phase = len(curve) % period
        reached = _hop(patterns[phase], reached)
        curve.append(_coverage(reached, length))
        if curve[-1][0] == 1:
            return Reach(len(curve), False, tuple(curve))
        if not always_self:
            state = phase, sha256(reached).digest()
            if state in seen:
                obstruction = f"from layer {len(curve)} on the reached sets repeat"
            seen.add(state)
    assert obstruction or not always_self
    return Reach(None, bool(obstruction), tuple(curve), obstruction or f"not within {max_hops} layers")


def _unreachable(tables, always_self):
    """A reason why some token never reaches another, or `""`."""
    union = tables.any(0)
    num_groups, group = connected_components(csr_array(union), connection="strong")
    if num_groups > 1:
        start = 0
        reachable = breadth_first_order(csr_array(union), start, return_predecessors=False)
        if len(reachable) == len(union):
            # Token 0 reaches all, so some token does not reach it.
            start = int(np.flatnonzero(group != group[0])[0])
            reachable = breadth_first_order(csr_array(union), start, return_predecessors=False)
        missing = np.setdiff1d(np.arange(len(union)), reachable)
        return f"token {start} never reaches {len(missing)} tokens, for instance {missing[0]}"
    if len(tables) == 1 and not always_self:
        # Strongly connected: the tokens t layers away form one class modulo the common divisor of all cycle lengths.
        order, predecessors = breadth_first_order(csr_array(union), 0)
        level = np.zeros(len(union), dtype=int)
        for token in order[1:]:
            level[token] = level[predecessors[token]] + 1
        query, key = union.nonzero()
        divisor = int(np.gcd.reduce(level[query] + 1 - level[key]))
        if divisor != 1:
            return f"links join {divisor} classes of tokens in a circle, and only one class is reached at a time"
    return ""


def _pack(table):
    """Bool `(n, m)` as words of 64 bits, `(n, ceil(m / 64))`."""
    table = np.pad(table, ((0, 0), (0, -table.shape[1] % 64)))
    return np.packbits(table, axis=-1, bitorder="little").view(np.uint64)


def _coverage(reached, length):
    """The smallest and the mean fraction of tokens that a token has reached."""
    counts = np.bitwise_count(reached).sum(-1, dtype=np.int64)
    return float(counts.min()) / length, float(counts.mean()) / length


def _hop(pattern, reached):
    """The union of the rows of `reached` over the keys of each row of a sparse pattern."""
    degree = np.diff(pattern.indptr)
    full = np.bitwise_or.reduce(reached, axis=0)
    result = np.zeros_like(reached)
    rows = np.flatnonzero(degree)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        left, first = rows[start : start + _ROWS_AT_ONCE], 0
        while len(left):
            part, keys = result[left], pattern.indptr[left]
            for key in range(first, min(first + _KEYS_AT_ONCE, degree[left].max())):
                # Rows with fewer keys take their last one again.
                part |= reached[pattern.indices[keys + np.minimum(key, degree[left] - 1)]]
            result[left] = part
            first += _KEYS_AT_ONCE
            left = left[(degree[left] > first) & (part != full).any(-1)]
    return result


@dataclass(frozen=True)
class Growth:
    """
    Connections per layer as a function of the length.

    Attributes:
        order (`str`, *optional*): A key of `GROWTHS`, or `None` if none of them explains the numbers.
        lengths (`tuple[int, ...]`): The lengths n.
        connections (`tuple[float, ...]`): Connections per layer at each length.
        error (`float`): Greatest relative error of the fit.
    """

    order: str | None
    lengths: tuple[int, ...]
    connections: tuple[float, ...]
    error: float


def fit_growth(lengths: Sequence[int], connections: Sequence[float]) -> Growth:
    """
    Find the slowest growth g for which connections = n (a g(n) + b + c / n) with a > 0 explains the numbers to 2 %,
    and about as well as the faster ones do.
    """
    if len(set(lengths)) < 4:
        raise ValueError(f"a growth needs four different lengths, got {len(set(lengths))}")
    n, counts = np.asarray(lengths, dtype=float), np.asarray(connections, dtype=float)
    errors = {}
    for order, growth in GROWTHS.items():
        terms = np.stack([growth(n), np.ones_like(n), 1 / n], 1) * (n / counts)[:, None]
        factors = np.linalg.lstsq(terms, np.ones_like(n), rcond=None)[0]
        if factors[0] >= 0:
            errors[order] = float(np.abs(terms @ factors - 1).max())
    best = min(errors.values())
    limit = min(GROWTH_TOLERANCE, max(GROWTH_RATIO * best, GROWTH_NOISE))
    slowest = next((order for order, error in errors.items() if error <= limit), None)
    return Growth(slowest, tuple(lengths), tuple(connections), errors[slowest] if slowest else best)
