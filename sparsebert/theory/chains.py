"""
Hamiltonian chains: an order of all tokens in which each attends to the one before it.

Letters: n length, k query (row), j key (column). A table `(n, n)` is bool, True = k may attend to j. A link j -> k is
an entry `[k, j]` off the diagonal; a chain is a Hamiltonian path of these links.

A chain that is found is always verified. That there is none is claimed only with a proof: exhaustive search, an
obstruction, or the circuit constraint of OR-tools (the extra `theory`). Otherwise the answer is "unknown".
"""

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching


# Up to this length all 2^n sets of tokens are searched, which takes about a second.
EXACT_LENGTH = 20
# Number of strides tried as a chain, the shortest first.
MAX_STRIDES = 64
# Most connections that are visited to find tokens whose removal disconnects the others.
MAX_CUT_WORK = 10**9
# Up to this length pairs of tokens are removed too.
PAIRS_LENGTH = 64
# The solver: most links that it is given, and its limit in deterministic time, about half a minute.
MAX_LINKS = 200_000
SOLVER_TIME = 20.0
# Heuristic search: steps per token, and attempts.
STEPS_PER_TOKEN = 30
RESTARTS = 4


@dataclass(frozen=True)
class Chain:
    """
    The answer to whether there is a chain.

    Attributes:
        exists (`bool`, *optional*): Whether there is a chain; `None` if unknown.
        order (`tuple[int, ...]`, *optional*): The chain gamma as positions counted from 0; `None` unless it exists.
        reason (`str`): What the chain is, why there is none, or what was tried.
    """

    exists: bool | None
    order: tuple[int, ...] | None
    reason: str


def is_chain(table: np.ndarray, order: Sequence[int] | np.ndarray) -> bool:
    """Whether `order` holds every token once, and each token attends to the one before it."""
    places = np.asarray(order)
    is_permutation = places.shape == (len(table),) and np.array_equal(np.sort(places), np.arange(len(table)))
    return bool(is_permutation and table[places[1:], places[:-1]].all())


def find_chain(table: np.ndarray) -> Chain:
    """
    Find a chain, prove that there is none, or do neither.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Assumption 1.2.
    """
    table = np.array(table, dtype=bool)
    np.fill_diagonal(table, False)
    for name, order in _structural(table):
        if is_chain(table, order):
            return _found(table, order, name)
    if obstruction := _obstruction(table):
        return Chain(False, None, obstruction)
    if len(table) <= EXACT_LENGTH:
        order = _exhaustive(table)
        if order is None:
            return Chain(False, None, "exhaustive search finds none")
        return _found(table, order, "by exhaustive search")
    if len(table) <= PAIRS_LENGTH and (cut := _cut(table)):
        return Chain(False, None, cut)
    undecided = "the extra 'theory' adds a solver"
    if importlib.util.find_spec("ortools") is not None:
        undecided = "the solver has not decided it in its time"
        if np.count_nonzero(table) > MAX_LINKS:
            undecided = f"its {np.count_nonzero(table)} links are too many for the solver"
        else:
            exists, order = _solve(table)
            if exists is False:
                return Chain(False, None, "proved by OR-tools' solver CP-SAT")
            if exists:
                return _found(table, order, "by OR-tools")
    rng = np.random.default_rng(0)
    for _ in range(RESTARTS):
        order = _grow(table, rng)
        if is_chain(table, order):
            return _found(table, order, "by heuristic search")
    if len(table) > PAIRS_LENGTH and (cut := _cut(table)):
        return Chain(False, None, cut)
    tried = f"heuristic search finds none in {RESTARTS} attempts, and nothing excludes one"
    return Chain(None, None, f"{tried}; {undecided}")


def _found(table, order, reason):
    assert is_chain(table, order)
    return Chain(True, tuple(int(token) for token in order), reason)


def _structural(table: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Name and order of chains that known patterns have."""
    length = len(table)
    identity = np.arange(length)
    yield "identity", identity
    yield "identity reversed", identity[::-1]
    strides = np.flatnonzero(table[:, 0])
    for stride in strides[np.gcd(strides, length) == 1][:MAX_STRIDES]:
        yield f"stride {stride} modulo {length}", identity * stride % length
    # Up one residue class and down the next.
    for stride in np.flatnonzero(table[:, 0] | table[0])[:MAX_STRIDES]:
        classes = [np.arange(first, length, stride)[:: -1 if first % 2 else 1] for first in range(stride)]
        yield f"{stride} interleaved strides", np.concatenate(classes)


def _obstruction(table):
    """A reason why no chain can exist, or `None`."""
    length = len(table)
    links = csr_array(table)
    num_groups = connected_components(links, connection="weak", return_labels=False)
    if num_groups > 1:
        return f"{num_groups} groups of tokens have no connection with each other"
    # A chain gives n - 1 tokens a predecessor each, all different.
    num_links = int((maximum_bipartite_matching(links, perm_type="column") >= 0).sum())
    if num_links < length - 1:
        return f"at most {num_links} tokens can have predecessors of their own, a chain needs {length - 1}"
    num_groups, group = connected_components(links, connection="strong")
    if num_groups > 1:
        query, key = group[links.nonzero()[0]], group[links.nonzero()[1]]
        predecessors = {label: set() for label in range(num_groups)}
        for later, earlier in np.unique(np.stack([query, key], 1)[query != key], axis=0).tolist():
            predecessors[later].add(earlier)
        sorter = TopologicalSorter(predecessors)
        sorter.prepare()
        while sorter.is_active():
            ready = sorter.get_ready()
            if len(ready) > 1:
                return f"{len(ready)} groups of tokens are not reachable from each other in either direction"
            sorter.done(*ready)
    return None


def _cut(table):
    """A reason: one or two tokens whose removal leaves more parts than a chain would leave, one more than tokens."""
    for number in (1, 2) if len(table) <= PAIRS_LENGTH else (1,):
        if len(table) ** number * np.count_nonzero(table) > MAX_CUT_WORK:
            return None
        for removed in itertools.combinations(range(len(table)), number):
            others = np.delete(np.arange(len(table)), removed)
            rest = csr_array(table[np.ix_(others, others)])
            num_groups = connected_components(rest, connection="weak", return_labels=False)
            if num_groups > number + 1:
                tokens = f"token {removed[0]}" if number == 1 else f"tokens {removed[0]} and {removed[1]}"
                return f"without {tokens} there are {num_groups} groups that have no connection with each other"
    return None


def _solve(table):
    """Whether there is a chain, `None` if undecided, and the chain: a circuit through one more token, with CP-SAT."""
    from ortools.sat.python import cp_model

    model, length = cp_model.CpModel(), len(table)
    links = [(int(earlier), int(later)) for later, earlier in zip(*table.nonzero(), strict=True)]
    ends = [pair for token in range(length) for pair in ((length, token), (token, length))]
    arcs = [(*pair, model.new_bool_var("")) for pair in (*links, *ends)]
    model.add_circuit(arcs)
    solver = cp_model.CpSolver()
    # One worker and deterministic time: the same answer on every machine.
    solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, SOLVER_TIME
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return False, None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, None
    following = {earlier: later for earlier, later, used in arcs if solver.value(used)}
    order = [following[length]]
    while len(order) < length:
        order.append(following[order[-1]])
    return True, np.array(order)


def _exhaustive(table):
    """Held and Karp's dynamic program over sets of tokens, each set the bits of an integer."""
    length = len(table)
    bits = 1 << np.arange(length, dtype=np.int64)
    predecessors = table @ bits  # of each token, as a set
    # By set: the tokens that a chain of exactly this set can end with.
    ends = np.zeros(1 << length, dtype=np.int32)
    ends[bits] = bits
    sizes = np.bitwise_count(np.arange(1 << length))
    by_size = np.split(np.argsort(sizes, kind="stable"), np.cumsum(np.bincount(sizes))[:-1])
    for sets in by_size[1:-1]:
        for bit, before in zip(bits, predecessors, strict=True):
            extended = sets[(sets & bit == 0) & (ends[sets] & before != 0)]
            ends[extended | bit] |= np.int32(bit)
    rest, order = (1 << length) - 1, []
    last = int(ends[rest])
    while last:
        token = last.bit_length() - 1
        order.append(token)
        rest ^= 1 << token
        last = int(ends[rest]) & int(predecessors[token])
    return order[::-1] if len(order) == length else None


def _grow(table, rng):
    """
    Grow a long chain: at both ends towards the tokens with the fewest ways on (Warnsdorff), by insertion and, where
    it is stuck, by rotation (Posa: a link back into the chain makes a cycle, which is opened elsewhere).
    """
    length = len(table)
    symmetric = np.array_equal(table, table.T)
    free = np.ones(length, dtype=bool)
    ways_on = table.sum(0)  # to free tokens

    def take(token):
        free[token] = False
        ways_on[table[token]] -= 1
        return token

    chain = np.array([take(rng.integers(length))])
    for _ in range(STEPS_PER_TOKEN * length):
        if len(chain) == length:
            break
        after = np.flatnonzero(table[:, chain[-1]] & free)
        before = np.flatnonzero(table[chain[0]] & free)
        if len(after):
            chain = np.append(chain, take(_fewest(after, ways_on, rng)))
        elif len(before):
            chain = np.insert(chain, 0, take(_fewest(before, ways_on, rng)))
        elif (place := _insertion(table, chain, np.flatnonzero(free), rng)) is not None:
            chain = np.insert(chain, place[0], take(place[1]))
        else:
            chain = _rotate(table, chain, symmetric, rng)
            if symmetric and rng.random() < 0.5:
                chain = chain[::-1]
    return chain


def _fewest(tokens, ways_on, rng):
    fewest = tokens[ways_on[tokens] == ways_on[tokens].min()]
    return int(fewest[rng.integers(len(fewest))])


def _insertion(table, chain, tokens, rng):
    """Where one of a few free tokens fits into the chain, as `(place, token)`, or `None`."""
    for token in rng.permutation(tokens)[:4]:
        places = np.flatnonzero(table[token, chain[:-1]] & table[chain[1:], token])
        if len(places):
            return places[rng.integers(len(places))] + 1, int(token)
    return None


def _rotate(table, chain, symmetric, rng):
    """The same tokens in an order with another end."""
    joined = np.flatnonzero(table[chain, chain[-1]][:-1])
    if not len(joined):
        return chain
    first = joined[rng.integers(len(joined))]
    if symmetric and (first == len(chain) - 2 or rng.random() < 0.5):
        return np.concatenate([chain[: first + 1], chain[:first:-1]])
    # The cycle from `first` to the end is opened before a token that may follow the part before the cycle.
    openings = np.arange(first + 1, len(chain))
    if first:
        openings = openings[table[chain[first + 1 :], chain[first - 1]]]
    if not len(openings):
        return chain
    opening = openings[rng.integers(len(openings))]
    return np.concatenate([chain[:first], chain[opening:], chain[first:opening]])
