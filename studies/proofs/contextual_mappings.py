"""
Contextual mappings, the core of the universality proofs, built and checked on every input.

A contextual mapping gives every token of every sequence a unique number, so that token-wise layers can turn it into
any output. [U] is Are Transformers Universal Approximators (arXiv 1912.10077), [O] O(n) Connections are
Expressive Enough (arXiv 2006.04862), [S] SparseBERT (arXiv 2102.12871).

Letters: N inputs, d rows, n columns (tokens), g = 1 / delta, p patterns, s hops; units as in `contextual_layers`.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from sparsebert.analysis.pictures.figures import BLUE, GREEN, VERMILION, new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.masks.patterns import build_pattern
from sparsebert.theory.conditions import check_patterns

from .contextual_layers import (
    dense_mapping,
    grid,
    no_diagonal_mapping,
    positional_embedding,
    run_layers,
    sparse_mapping,
)


def find_collision(inputs: np.ndarray, ids: np.ndarray, up_to_permutation: bool) -> tuple[int, int] | None:
    """
    Find two inputs that keep a mapping from being contextual.

    Source: arXiv 1912.10077, Definition 3.1.
    """
    owner: dict[int, tuple[int, str]] = {}
    for number, (columns, values) in enumerate(zip(inputs, ids.tolist(), strict=True)):
        if len(set(values)) < len(values):
            return number, number
        sequence = columns.T.tolist()
        key = repr(sorted(sequence) if up_to_permutation else sequence)
        for value in values:
            other, other_key = owner.setdefault(value, (number, key))
            if other_key != key:
                return other, number
    return None


@dataclass(frozen=True)
class Check:
    """
    A lemma, checked on every input of one size that it covers. `collision` has two inputs `(d, n)` that share a
    number, as fractions; `None` if the mapping is contextual.
    """

    lemma: str
    attention: str
    num_columns: int
    num_rows: int
    grid_size: int
    num_layers: int
    num_inputs: int
    collision: tuple[np.ndarray, ...] | None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values, fractions as text."""
        collision = self.collision
        texts = None if collision is None else [[[*map(str, row)] for row in columns] for columns in collision]
        return asdict(replace(self, collision=None)) | {"collision": texts}


def check_dense(num_columns: int, num_rows: int, grid_size: int) -> Check:
    """
    Check Lemma 6 of arXiv 1912.10077 on every input with different columns, and its properties 3 and 4: their numbers
    lie in [t_l, t_r], and those of all other inputs, including entries outside [0, 1), do not.
    """
    _check_sizes(num_columns, num_rows, grid_size, least_columns=2, distinct=True)
    layers = dense_mapping(num_columns, num_rows, grid_size)
    inputs = grid(num_columns, num_rows, grid_size, distinct=True)
    check, ids = _check("[U] Lemma 6", "full", layers, inputs, grid_size, up_to_permutation=True)
    num_ids = grid_size**num_rows
    low, high = (2 * num_ids ** (2 * num_columns + more) * (num_ids - 1) for more in (0, 1))  # t_l and t_r
    every = grid(num_columns, num_rows, grid_size, outside=True)
    known = {repr(columns.tolist()) for columns in inputs}
    others = every[[repr(columns.tolist()) not in known for columns in every]]
    outside = run_layers(layers, others, grid_size)
    inside = (low <= ids) & (ids <= high)
    holds = inside.all() and not ((low <= outside) & (outside <= high)).any()
    note = f"{len(others)} others {'apart' if holds else 'not apart'}"
    return replace(check, note=note)


def check_no_diagonal(num_columns: int, num_rows: int, grid_size: int, num_global_shifts: int = 2) -> Check:
    """Check Lemma 4 of arXiv 2102.12871 on every input with different columns."""
    _check_sizes(num_columns, num_rows, grid_size, least_columns=3, distinct=True)
    check_range("num_global_shifts", num_global_shifts, 0)
    layers = no_diagonal_mapping(num_columns, num_rows, grid_size, num_global_shifts)
    inputs = grid(num_columns, num_rows, grid_size, distinct=True)
    attention = f"no diagonal, {num_global_shifts} shift" + "s" * (num_global_shifts != 1)
    return _check("[S] Lemma 4", attention, layers, inputs, grid_size, up_to_permutation=True)[0]


def check_sparse(
    patterns: np.ndarray,
    num_rows: int,
    grid_size: int,
    name: str = "patterns",
    chain: Sequence[int] | None = None,
    hops: int | None = None,
) -> Check:
    """Check Lemma 7 of arXiv 2006.04862 on the whole grid."""
    num_columns = patterns.shape[-1]
    _check_sizes(num_columns, num_rows, grid_size, least_columns=2, distinct=False)
    if chain is None or hops is None:
        facts = check_patterns(patterns)
        if facts.without_self:
            raise ValueError(f"{name} violates Assumption 1.1: {facts.without_self} rows without self-attention")
        chain = facts.chain.order if chain is None else chain
        if chain is None:
            raise ValueError(f"{name} violates Assumption 1.2: {facts.chain.reason}")
        hops = facts.reach.hops if hops is None else hops
        if hops is None:
            raise ValueError(f"{name} violates Assumption 1.3: {facts.reach.reason}")
    layers = sparse_mapping(patterns, chain, hops, num_rows, grid_size)
    inputs, embedding = grid(num_columns, num_rows, grid_size), positional_embedding(chain, num_rows, grid_size)
    check, _ = _check("[O] Lemma 7", name, layers, inputs, grid_size, up_to_permutation=False, embedding=embedding)
    return replace(check, note=f"p = {len(patterns)}, s = {hops}")


def _check_sizes(num_columns, num_rows, grid_size, least_columns, distinct):
    check_range("num_rows", num_rows, 1)
    check_range("grid_size", grid_size, 2)
    check_range("num_columns", num_columns, least_columns, grid_size**num_rows if distinct else None)


def _check(lemma, attention, layers, inputs, grid_size, up_to_permutation, embedding=0):
    ids = run_layers(layers, inputs + embedding, grid_size)
    collision = find_collision(inputs, ids, up_to_permutation)
    if collision:
        collision = tuple(as_fractions(inputs[number], grid_size) for number in collision)
    num_inputs, num_rows, num_columns = inputs.shape
    return Check(lemma, attention, num_columns, num_rows, grid_size, len(layers), num_inputs, collision), ids


def as_fractions(columns: np.ndarray, grid_size: int) -> np.ndarray:
    """Convert numbers in units of delta / 2 to an array of `Fraction`s of the same shape."""
    return np.vectorize(lambda value: Fraction(int(value), 2 * grid_size), otypes=[object])(columns)


# Each violates one assumption: there is no chain through tokens that see only a relay; the past never sees the future.
COUNTER_EXAMPLES: dict[str, Callable[[int], np.ndarray]] = {
    "relay only": lambda n: np.eye(n, dtype=bool) | (np.arange(n) == 0) | (np.arange(n) == 0)[:, None],
    "causal": lambda n: np.tri(n, dtype=bool),
}


def pattern_tables(name: str, length: int, **parameters: Any) -> np.ndarray:
    """The patterns of a cycle, or a single pattern, as tables."""
    return build_pattern(name, length, 1, num_layers=2, **parameters).to_table()[:, 0].numpy()


def standard_checks() -> list[Check]:
    """Check every lemma at a few sizes, and what goes wrong where an assumption is violated."""
    calls: list[Callable[[], Check]] = []
    calls += [partial(check_dense, *sizes) for sizes in ((2, 2, 2), (3, 1, 4), (3, 2, 2), (4, 1, 6))]
    for num_global_shifts in (2, 1):
        for sizes in ((3, 1, 4), (3, 2, 2), (4, 1, 6)):
            calls.append(partial(check_no_diagonal, *sizes, num_global_shifts=num_global_shifts))
    for name, length, grid_size in (("window", 4, 3), ("star_cycle", 5, 2)):
        calls.append(partial(check_sparse, pattern_tables(name, length, window_size=1), 1, grid_size, name))
    for name in ("strided_cycle", "fixed_cycle"):
        for length, num_rows, grid_size in ((4, 1, 3), (4, 2, 2), (6, 1, 2)):
            calls.append(partial(check_sparse, pattern_tables(name, length, stride=2), num_rows, grid_size, name))
    calls += [partial(_check_counter_example, name) for name in COUNTER_EXAMPLES]
    return [call() for call in tqdm(calls, desc="lemmas", disable=None)]


def _check_counter_example(name: str) -> Check:
    """The construction in spite of a violated assumption, which the note names."""
    pattern = COUNTER_EXAMPLES[name](4)[None]
    try:
        return check_sparse(pattern, 1, 2, name)
    except ValueError as error:
        check = check_sparse(pattern, 1, 2, name, chain=range(4), hops=4)
        return replace(check, note=str(error).removeprefix(f"{name} "))


def plot_shifts(path: str | os.PathLike) -> None:
    """
    Plot how the numbers u . Z_k of three tokens move from layer to layer in all three lemmas, at d = 1 and delta =
    1/4.
    """
    window = pattern_tables("window", 3, window_size=1)
    facts = check_patterns(window)
    chain, hops = facts.chain.order, facts.reach.hops
    assert chain is not None and hops is not None
    start = 2 * np.array([[0, 1, 3]], dtype=object)
    panels = {
        "full attention ([U])": (dense_mapping(3, 1, 4), start),
        "without the diagonal ([S])": (no_diagonal_mapping(3, 1, 4), start),
        "window of 1 on both sides ([O])": (
            sparse_mapping(window, chain, hops, 1, 4),
            start + positional_embedding(chain, 1, 4),
        ),
    }
    figure = new_figure(11, 4.2)
    axes = figure.subplots(1, 3, gridspec_kw={"width_ratios": [len(layers) + 2 for layers, _ in panels.values()]})
    for axis, (title, (layers, hidden)) in zip(axes, panels.items(), strict=True):
        steps = [hidden]
        for layer in layers:
            steps.append(layer(steps[-1][None])[0])
        num_global = sum(len(layer.heads) == 1 for layer in layers)
        # Markers of different sizes, because the numbers nearly coincide in the end.
        styles = ((BLUE, "o", 9), (VERMILION, "s", 6), (GREEN, "^", 4))
        for token, (color, marker, size) in enumerate(styles):
            values = [float(as_fractions(step, 4)[0, token]) for step in steps]
            axis.plot(
                values, color=color, marker=marker, ms=size, fillstyle="none", drawstyle="steps-post",
                label=f"token {token}",
            )  # fmt: skip
        axis.axvspan(len(layers) - num_global + 0.5, len(layers) + 0.5, color="0.9", lw=0, label="global shifts")
        axis.set_yscale("symlog", linthresh=1, linscale=1.2)
        axis.set(title=title, xlabel="layers passed", xticks=range(0, len(layers) + 1, 1 if len(layers) < 8 else 2))
        axis.set_xlim(-0.5, len(layers) + 0.5)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("u . Z of the token (symlog)")
    axes[0].legend(loc="upper left")
    figure.suptitle("Selective shifts lift one token after another above all that it attends to")
    save_figure(figure, path)


def _sequence(columns):
    """The columns as text: (0, 1/4) with one row, (0 1, 1/2 0) with two."""
    return f"({', '.join(' '.join(map(str, column)) for column in columns.T.tolist())})"


def mappings_table(checks: Sequence[Check]) -> Table:
    """Checks as a table, with the collisions below."""
    rows: list[dict[str, str]] = []
    notes: list[str] = []
    for check in checks:
        row = {
            "lemma": check.lemma,
            "attention": check.attention,
            "n": str(check.num_columns),
            "d": str(check.num_rows),
            "1/delta": str(check.grid_size),
            "layers": str(check.num_layers),
            "inputs": str(check.num_inputs),
            "contextual": "no" if check.collision else "yes",
        }
        if check.collision:
            shared = " and ".join(dict.fromkeys(map(_sequence, check.collision)))
            reason = f" ({check.note})" * bool(check.note)
            notes.append(f"{check.attention}, n = {check.num_columns}{reason}: {shared} share a number")
        rows.append(row | {"": "" if check.collision else check.note})
    return Table.of("Contextual mappings", rows, notes)
