"""
Contextual mappings as stacks of hardmax attention layers, in exact arithmetic.

Three papers build one from attention alone: with full attention (Are Transformers Universal Approximators, arXiv
1912.10077, Lemma 6), with sparse patterns (O(n) Connections are Expressive Enough, arXiv 2006.04862, Lemma 7) and
without the diagonal (SparseBERT, arXiv 2102.12871, Lemma 4).

Letters: N inputs, d rows (the papers' hidden size), n columns (tokens), g = 1 / delta values per entry, p patterns,
s hops, k query, j key. Every number is a multiple of delta / 2 (thresholds lie between the values), so arrays hold
Python integers in that unit. Arrays `(N, d, n)` follow the papers: tokens are columns.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Head:
    """
    One attention head of size 1. Its score of query k and key j is `(query . Z_k - threshold) (key . Z_j)`; it adds
    `output` times `value . Z_j` of the key with the highest score.

    Attributes:
        query, key, value (`np.ndarray` of shape `(d,)`):
            W_Q, W_K and W_V, Python integers.
        threshold (`int`):
            Minus the bias of the query, in units of delta / 2.
        output (`np.ndarray` of shape `(d,)`):
            W_O, Python integers.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    threshold: int
    output: np.ndarray


@dataclass(frozen=True)
class Layer:
    """
    One attention layer with a skip connection; without heads it is the identity.

    Attributes:
        pattern (`np.ndarray` of shape `(n, n)`):
            Bool table, True = query k may attend to key j.
        heads (`tuple[Head, ...]`):
            The heads, whose outputs are added up.
    """

    pattern: np.ndarray
    heads: tuple[Head, ...] = ()

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Map `(N, d, n)` to `(N, d, n)`. Among equal scores the first key wins."""
        result = hidden.copy()
        for head in self.heads:
            query = _project(head.query, hidden) - head.threshold  # (N, n)
            key, value = _project(head.key, hidden), _project(head.value, hidden)
            for token, keys in enumerate(self.pattern):
                keys = np.flatnonzero(keys)
                if not len(keys):
                    continue  # a query without a key gets nothing
                best = keys[(query[:, token, None] * key[:, keys]).argmax(1)]  # hardmax
                attended = value[np.arange(len(hidden)), best]
                result[:, :, token] += attended[:, None] * head.output
        return result


def _project(weights, hidden):
    return (weights[:, None] * hidden).sum(1)


def _selectors(num_rows, grid_size):
    """u = (1, 1 / delta, 1 / delta^2, ...), which distinguishes all columns, and e = (1, 0, ...)."""
    u = np.array([grid_size**row for row in range(num_rows)], dtype=object)
    return u, np.array([int(row == 0) for row in range(num_rows)], dtype=object)


def selective_shift(pattern: np.ndarray, column_id: int, num_rows: int, grid_size: int) -> Layer:
    """
    The layer that changes only columns with u . Z_k = `column_id`: it adds 1 / delta^d times the difference of the
    greatest and the smallest u . Z_j that they attend to.

    Source: arXiv 1912.10077, B.5; arXiv 2006.04862, E.2.1; arXiv 2102.12871, A.2.2.
    """
    u, first = _selectors(num_rows, grid_size)
    scale = grid_size**num_rows
    low = Head(u, u, u, 2 * column_id - 1, scale * first)
    high = Head(u, u, u, 2 * column_id + 1, -scale * first)
    return Layer(pattern, (low, high))


def global_shift(pattern: np.ndarray, scale: int, num_rows: int, grid_size: int) -> Layer:
    """The layer that adds `scale` times the greatest u . Z_j that a column attends to, where u . Z_k > 0."""
    u, first = _selectors(num_rows, grid_size)
    return Layer(pattern, (Head(u, u, u, 0, scale * first),))


def dense_mapping(num_columns: int, num_rows: int, grid_size: int) -> list[Layer]:
    """
    The mapping with full attention: g^d selective shifts and one global shift.

    Source: arXiv 1912.10077, Lemma 6.
    """
    pattern = np.ones((num_columns, num_columns), dtype=bool)
    ids = range(grid_size**num_rows)
    return [
        *(selective_shift(pattern, column_id, num_rows, grid_size) for column_id in ids),
        global_shift(pattern, grid_size ** ((num_columns + 1) * num_rows), num_rows, grid_size),
    ]


def no_diagonal_mapping(num_columns: int, num_rows: int, grid_size: int, num_global_shifts: int = 2) -> list[Layer]:
    """
    The mapping with full attention without its diagonal: g^d selective shifts and two global shifts, as in the proof
    of the lemma. Its statement counts one, which leads to collisions.

    Source: arXiv 2102.12871, Lemma 4.
    """
    pattern = ~np.eye(num_columns, dtype=bool)
    num_ids = grid_size**num_rows
    scale = (num_ids - 1) * (num_ids**num_columns + num_ids + 1)
    return [
        *(selective_shift(pattern, column_id, num_rows, grid_size) for column_id in range(num_ids)),
        *(global_shift(pattern, scale, num_rows, grid_size) for _ in range(num_global_shifts)),
    ]


def sparse_mapping(
    patterns: np.ndarray, chain: Sequence[int], hops: int, num_rows: int, grid_size: int
) -> list[Layer]:
    """
    The mapping with a cycle of sparse patterns: along the chain, g^d selective shifts for each token but the first,
    then `hops` global shifts. The layers use the patterns in turn; layers that are not needed are the identity.

    Source: arXiv 2006.04862, Lemma 7 and E.2.
    """
    period, num_columns = patterns.shape[:2]
    num_ids = grid_size**num_rows
    # u . Z of a column of ones, in units of delta.
    ones = grid_size * sum(grid_size**row for row in range(num_rows))
    layers: list[Layer] = []
    for index in range(1, num_columns):
        chosen = int(patterns[:, chain[index], chain[index - 1]].argmax())
        for column_id in range((index - 1) * ones, (index - 1) * ones + num_ids):
            layers += [
                selective_shift(pattern, column_id, num_rows, grid_size) if number == chosen else Layer(pattern)
                for number, pattern in enumerate(patterns)
            ]
    scale = 2 * hops * num_columns * grid_size ** (num_columns * num_rows + 1)
    return layers + [global_shift(patterns[number % period], scale, num_rows, grid_size) for number in range(hops)]


def grid(num_columns: int, num_rows: int, grid_size: int, distinct: bool = False, outside: bool = False) -> np.ndarray:
    """Every input of a lemma."""
    values = [2 * value for value in range(grid_size)]
    if outside:
        values.insert(0, -2 * grid_size ** (num_columns * num_rows + 1))
    columns = list(itertools.product(values, repeat=num_rows))
    if distinct:
        sequences = list(itertools.permutations(columns, num_columns))
    else:
        sequences = list(itertools.product(columns, repeat=num_columns))
    return np.array(sequences, dtype=object).swapaxes(1, 2)


def positional_embedding(chain: Sequence[int], num_rows: int, grid_size: int) -> np.ndarray:
    """
    The positional embedding E, which moves the first token of the chain to [n - 1, n) and the following ones to [0,
    1), [1, 2), ...

    Source: arXiv 2006.04862, D.1.
    """
    place = np.empty(len(chain), dtype=object)
    for index, token in enumerate(chain):
        place[token] = 2 * grid_size * (index - 1 if index else len(chain) - 1)
    return np.broadcast_to(place, (num_rows, len(chain)))


def run_layers(layers: Sequence[Layer], inputs: np.ndarray, grid_size: int) -> np.ndarray:
    """The numbers q = u . g_c(Z) that a stack of layers assigns to the columns."""
    for layer in layers:
        inputs = layer(inputs)
    return _project(_selectors(inputs.shape[1], grid_size)[0], inputs)
