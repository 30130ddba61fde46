"""
Contextual mappings, the core of the universality proofs, built and checked on every input:
`python -m sparsebert.contextual_mappings`; `--figure FILE` draws the selective shifts.

A contextual mapping gives every token of every sequence a number of its own, so that token-wise layers can turn it
into any output. [U] is Are Transformers Universal Approximators (arXiv 1912.10077), [O] O(n) Connections are
Expressive Enough (arXiv 2006.04862), [S] SparseBERT (arXiv 2102.12871).

Letters: N inputs, d rows, n columns (tokens), g = 1 / delta, p patterns, s hops; units as in `contextual_layers`.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ..analysis.tables import Table
from ..checks import check_range
from ..masks.patterns import build_pattern
from .conditions import check_patterns
from .contextual_layers import (
    dense_mapping,
    grid,
    no_diagonal_mapping,
    positional_embedding,
    run_layers,
    sparse_mapping,
)


def find_collision(inputs, ids, up_to_permutation):
    """
    What keeps a mapping from being contextual.

    Args:
        inputs (`np.ndarray` of shape `(N, d, n)`)
        ids (`np.ndarray` of shape `(N, n)`): As [`run_layers`].
        up_to_permutation (`bool`): Whether two inputs with the same columns in another order count as one.

    Returns:
        `tuple[int, int]`, *optional*: Two inputs that share a number, twice the same one if two of its own columns
        share it; `None` if the mapping is contextual.
    Source: arXiv 1912.10077, Definition 3.1.
    """
    owner = {}
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
    Args:
        lemma, attention (`str`): What was built.
        num_columns, num_rows, grid_size (`int`): n, d and g.
        num_layers (`int`)
        num_inputs (`int`): All that the lemma covers.
        collision (`tuple[np.ndarray]`, *optional*): Two inputs `(d, n)` with a number in common, as fractions.
        note (`str`): What else was found.
    """

    lemma: str
    attention: str
    num_columns: int
    num_rows: int
    grid_size: int
    num_layers: int
    num_inputs: int
    collision: tuple | None
    note: str = ""


def check_dense(num_columns, num_rows, grid_size):
    """
    Lemma 6 of arXiv 1912.10077 on every input with different columns, and its properties 3 and 4: their numbers lie in
    [t_l, t_r], those of all other inputs, entries outside [0, 1) included, do not.

    Returns:
        [`Check`]
    Raises:
        ValueError: If n < 2, g < 2, or there are fewer than n different columns.
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


def check_no_diagonal(num_columns, num_rows, grid_size, num_global_shifts=2):
    """
    Lemma 4 of arXiv 2102.12871 on every input with different columns.

    Returns:
        [`Check`]
    Raises:
        ValueError: If n < 3, g < 2, or there are fewer than n different columns.
    """
    _check_sizes(num_columns, num_rows, grid_size, least_columns=3, distinct=True)
    check_range("num_global_shifts", num_global_shifts, 0)
    layers = no_diagonal_mapping(num_columns, num_rows, grid_size, num_global_shifts)
    inputs = grid(num_columns, num_rows, grid_size, distinct=True)
    attention = f"no diagonal, {num_global_shifts} shift" + "s" * (num_global_shifts != 1)
    return _check("[S] Lemma 4", attention, layers, inputs, grid_size, up_to_permutation=True)[0]


def check_sparse(patterns, num_rows, grid_size, name="patterns", chain=None, hops=None):
    """
    Lemma 7 of arXiv 2006.04862 on the whole grid.

    Args:
        patterns (`np.ndarray` of shape `(p, n, n)`): Bool.
        num_rows, grid_size (`int`): d and g.
        name (`str`, *optional*): Of the patterns.
        chain (`Sequence[int]`, *optional*): gamma; by default one is searched.
        hops (`int`, *optional*): s; by default the smallest.

    Returns:
        [`Check`]
    Raises:
        ValueError: If n < 2 or g < 2; or if the patterns violate Assumption 1 and `chain` or `hops` are not given.
    """
    num_columns = patterns.shape[-1]
    _check_sizes(num_columns, num_rows, grid_size, least_columns=2, distinct=False)
    if chain is None or hops is None:
        facts = check_patterns(patterns)
        if facts.without_self:
            raise ValueError(f"{name} violates Assumption 1.1: {facts.without_self} rows without self-attention")
        if chain is None and facts.chain.order is None:
            raise ValueError(f"{name} violates Assumption 1.2: {facts.chain.reason}")
        if hops is None and facts.reach.hops is None:
            raise ValueError(f"{name} violates Assumption 1.3: {facts.reach.reason}")
        chain = facts.chain.order if chain is None else chain
        hops = facts.reach.hops if hops is None else hops
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


def as_fractions(columns, grid_size):
    """Numbers in units of delta / 2 as `Fraction`s, an array of the same shape."""
    return np.vectorize(lambda value: Fraction(int(value), 2 * grid_size), otypes=[object])(columns)


# Each violates one assumption: among tokens that see only a relay no chain gets through; the past never sees the
# future.
COUNTER_EXAMPLES = {
    "relay only": lambda n: np.eye(n, dtype=bool) | (np.arange(n) == 0) | (np.arange(n) == 0)[:, None],
    "causal": lambda n: np.tri(n, dtype=bool),
}


def pattern_tables(name, length, **parameters):
    """The patterns of a cycle, or the one pattern, of [`build_pattern`] as an array `(p, n, n)`."""
    return build_pattern(name, length, 1, num_layers=2, **parameters).to_table()[:, 0].numpy()


def standard_checks():
    """
    Every lemma at a few sizes, and what goes wrong where an assumption is violated.

    Returns:
        `list[Check]`
    """
    checks = [check_dense(*sizes) for sizes in ((2, 2, 2), (3, 1, 4), (3, 2, 2), (4, 1, 6))]
    checks += [check_no_diagonal(*sizes) for sizes in ((3, 1, 4), (3, 2, 2), (4, 1, 6))]
    checks += [check_no_diagonal(*sizes, num_global_shifts=1) for sizes in ((3, 1, 4), (3, 2, 2), (4, 1, 6))]
    for name, length, grid_size in (("window", 4, 3), ("star_cycle", 5, 2)):
        checks.append(check_sparse(pattern_tables(name, length, window_size=1), 1, grid_size, name))
    for name in ("strided_cycle", "fixed_cycle"):
        for length, num_rows, grid_size in ((4, 1, 3), (4, 2, 2), (6, 1, 2)):
            checks.append(check_sparse(pattern_tables(name, length, stride=2), num_rows, grid_size, name))
    for name, make in COUNTER_EXAMPLES.items():
        pattern = make(4)[None]
        try:
            check_sparse(pattern, 1, 2, name)
        except ValueError as error:
            check = check_sparse(pattern, 1, 2, name, chain=range(4), hops=4)
            checks.append(replace(check, note=str(error).removeprefix(f"{name} ")))
    return checks


def plot_shifts(path):
    """
    How the numbers u . Z_k of three tokens move from layer to layer, at d = 1 and delta = 1/4, in all three lemmas.

    Args:
        path (`str` or `os.PathLike`): Image to write, its folder is created.
    """
    from ..analysis.pictures import new_figure, save_figure

    window = pattern_tables("window", 3, window_size=1)
    facts = check_patterns(window)
    chain, hops = facts.chain.order, facts.reach.hops
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
        # Okabe and Ito's colours; markers of different size, as the numbers come close in the end.
        styles = (("#0072B2", "o", 9), ("#D55E00", "s", 6), ("#009E73", "^", 4))
        for token, (colour, marker, size) in enumerate(styles):
            values = [float(as_fractions(step, 4)[0, token]) for step in steps]
            style = {"color": colour, "marker": marker, "ms": size, "fillstyle": "none", "drawstyle": "steps-post"}
            axis.plot(values, label=f"token {token}", **style)
        axis.axvspan(len(layers) - num_global + 0.5, len(layers) + 0.5, color="0.9", lw=0, label="global shifts")
        axis.set_yscale("symlog", linthresh=1, linscale=1.2)
        axis.set(title=title, xlabel="layers passed", xticks=range(0, len(layers) + 1, 1 if len(layers) < 8 else 2))
        axis.set_xlim(-0.5, len(layers) + 0.5)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("u . Z of the token (symlog)")
    axes[0].legend(loc="upper left")
    figure.suptitle("Selective shifts lift one token after the other above all that it attends to")
    save_figure(figure, path)


def _sequence(columns):
    """(0, 1/4) with one row, (0 1, 1/2 0) with two: column after column."""
    return f"({', '.join(' '.join(map(str, column)) for column in columns.T.tolist())})"


def mappings_table(checks):
    rows, notes = [], []
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
