"""The proofs as programs: layers against their formulas, lemmas on all inputs, scales of maps, and their page."""

import doctest
import io
import itertools
import json
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from sparsebert.attention.probability_maps import PROBABILITY_MAPS, MapFunction
from sparsebert.theory.verdicts import check_cases, details, pattern_case, verdict_table
from studies.proofs.contextual_layers import (
    Head,
    Layer,
    dense_mapping,
    global_shift,
    grid,
    no_diagonal_mapping,
    positional_embedding,
    run_layers,
    selective_shift,
    sparse_mapping,
)
from studies.proofs.contextual_mappings import (
    COUNTER_EXAMPLES,
    as_fractions,
    check_dense,
    check_no_diagonal,
    check_sparse,
    find_collision,
    mappings_table,
    pattern_tables,
    plot_shifts,
    standard_checks,
)
from studies.proofs.hardmax_scales import (
    SCALE_FORMULAS,
    check_scale,
    hardmax_scale,
    least_probability,
    scales_table,
    standard_scales,
)


DOCS = Path(__file__).parents[2] / "docs"
PAGE = next(page for page in DOCS.rglob("*.md") if "selective_shifts.png" in page.read_text(encoding="utf-8"))


def integers(values):
    return np.array(values, dtype=object)


def fractions(*texts):
    return [Fraction(text) for text in texts]


def test_hardmax_head_attends_to_one_key_of_its_pattern():
    """By hand: keys 3, 1, 2 and values 30, 10, 20; queries -1, 2 and 5, of which the second sees keys 1 and 2."""
    pattern = np.array([[1, 1, 1], [0, 1, 1], [0, 0, 0]], dtype=bool)
    hidden = integers([[[-1, 2, 5], [3, 1, 2], [30, 10, 20]]])
    first, second, third = (integers(row) for row in np.eye(3, dtype=int))
    layer = Layer(pattern, (Head(first, second, third, 0, 2 * second),))
    assert layer(hidden).tolist() == [[[-1, 2, 5], [3 + 2 * 10, 1 + 2 * 20, 2], [30, 10, 20]]]
    # A bias of 3 turns the second query round.
    layer = Layer(pattern, (Head(first, second, third, 3, 2 * second),))
    assert layer(hidden).tolist() == [[[-1, 2, 5], [3 + 2 * 10, 1 + 2 * 10, 2], [30, 10, 20]]]
    assert Layer(pattern)(hidden).tolist() == hidden.tolist()
    ties = integers([[[1, 1, 1], [7, 7, 7], [30, 10, 20]]])
    layer = Layer(np.ones((3, 3), dtype=bool), (Head(first, second, third, 0, first),))
    assert layer(ties)[0, 0].tolist() == [31, 31, 31]


@pytest.mark.parametrize("num_rows, grid_size", [(1, 4), (2, 3)])
def test_shifts_against_their_formulas(num_rows, grid_size):
    rng = np.random.default_rng(0)
    pattern = rng.random((5, 5)) < 0.5
    pattern[:, 2] = True
    hidden = integers(2 * rng.integers(0, grid_size, (20, num_rows, 5)))
    ids = run_layers([], hidden, grid_size)  # u . Z, in units of delta / 2
    column_id = 1
    selective = selective_shift(pattern, column_id, num_rows, grid_size)(hidden)
    everywhere = global_shift(pattern, 7, num_rows, grid_size)(hidden)
    for number, token in itertools.product(range(20), range(5)):
        seen = [ids[number, key] for key in range(5) if pattern[token, key]]
        lifted = grid_size**num_rows * (max(seen) - min(seen)) if ids[number, token] == 2 * column_id else 0
        assert selective[number, 0, token] - hidden[number, 0, token] == lifted
        if ids[number, token] > 0:
            assert everywhere[number, 0, token] - hidden[number, 0, token] == 7 * max(seen)
    assert (selective[:, 1:] == hidden[:, 1:]).all()


def test_inputs():
    assert len(grid(3, 2, 2)) == 4**3 and len(grid(3, 2, 2, distinct=True)) == 4 * 3 * 2
    assert len(grid(2, 1, 3, outside=True)) == 4**2
    assert sorted(set(as_fractions(grid(2, 1, 3, outside=True), 3).flat)) == fractions("-9", "0", "1/3", "2/3")
    assert isinstance(grid(2, 1, 3)[0, 0, 0], int)  # not a number of numpy, which would overflow
    embedding = as_fractions(positional_embedding([2, 0, 1], 2, 4), 4)
    assert embedding.tolist() == [[0, 1, 2]] * 2


def test_collisions():
    inputs = integers([[[0, 2]], [[2, 0]], [[0, 4]]])
    assert find_collision(inputs, integers([[1, 2], [2, 1], [3, 4]]), up_to_permutation=True) is None
    assert find_collision(inputs, integers([[1, 2], [2, 1], [3, 4]]), up_to_permutation=False) == (0, 1)
    assert find_collision(inputs, integers([[1, 2], [2, 1], [4, 2]]), up_to_permutation=True) == (0, 2)
    assert find_collision(inputs, integers([[1, 2], [5, 5], [3, 4]]), up_to_permutation=True) == (1, 1)


SIZES = [(2, 1, 2), (2, 2, 2), (2, 1, 7), (3, 1, 4), (3, 2, 2), (4, 1, 6), (4, 2, 2)]
SLOW_SIZES = [(3, 1, 12), (3, 2, 3), (4, 1, 9), (3, 3, 2), (5, 1, 7), (6, 1, 6)]


def sizes(least=2):
    slow = (pytest.param(*size, marks=pytest.mark.slow) for size in SLOW_SIZES)
    return [*(size for size in SIZES if size[0] >= least), *slow]


@pytest.mark.parametrize("num_columns, num_rows, grid_size", sizes())
def test_full_attention(num_columns, num_rows, grid_size):
    """Are Transformers Universal Approximators, Lemma 6."""
    check = check_dense(num_columns, num_rows, grid_size)
    assert check.collision is None and check.note.endswith("others apart")
    assert check.num_layers == grid_size**num_rows + 1
    assert check.num_inputs == len(list(itertools.permutations(range(grid_size**num_rows), num_columns)))


@pytest.mark.parametrize("num_columns, num_rows, grid_size", sizes(least=3))
def test_no_diagonal(num_columns, num_rows, grid_size):
    """SparseBERT, Lemma 4, with the two global shifts of its proof."""
    check = check_no_diagonal(num_columns, num_rows, grid_size)
    assert check.collision is None and check.num_layers == grid_size**num_rows + 2


def test_no_diagonal_needs_a_second_global_shift():
    check = check_no_diagonal(4, 1, 6, num_global_shifts=1)
    assert check.num_layers == 6 + 1  # as the lemma is stated
    first, second = (columns.tolist() for columns in check.collision)
    assert first == [fractions("0", "1/3", "1/2", "5/6")] and second == [fractions("1/6", "1/3", "2/3", "5/6")]
    # They are no permutations of each other, and the number that they share is the last token's.
    inputs = integers([[[0, 4, 6, 10]], [[2, 4, 8, 10]]])
    once = run_layers(no_diagonal_mapping(4, 1, 6, num_global_shifts=1), inputs, 6)
    assert set(once[0]) & set(once[1])
    twice = run_layers(no_diagonal_mapping(4, 1, 6), inputs, 6)
    assert not set(twice[0]) & set(twice[1])


@pytest.mark.parametrize("name", ["dense", "window", "star", "star_cycle", "strided_cycle", "fixed_cycle", "strided"])
@pytest.mark.parametrize("length, num_rows, grid_size", [(2, 1, 3), (4, 1, 3), (4, 2, 2), (6, 1, 2)])
def test_sparse_patterns(name, length, num_rows, grid_size):
    """O(n) Connections, Lemma 7."""
    key = {"strided": "stride", "strided_cycle": "stride", "fixed_cycle": "stride"}.get(name, "window_size")
    parameters = {} if name == "dense" else {key: 2 if key == "stride" else 1}
    patterns = pattern_tables(name, length, **parameters)
    check = check_sparse(patterns, num_rows, grid_size, name)
    assert check.collision is None and check.num_inputs == grid_size ** (length * num_rows)
    hops = int(check.note.rpartition(" ")[2])
    assert check.num_layers == len(patterns) * (length - 1) * grid_size**num_rows + hops


def test_sparse_patterns_along_a_chain_that_is_not_the_identity():
    index = np.arange(5)
    patterns = ((index[:, None] - index) % 5 == np.array([0, 2])[:, None, None]).any(0)[None]
    check = check_sparse(patterns, 1, 3, "circle")
    assert check.collision is None and check.note == "p = 1, s = 4"
    assert check_sparse(patterns, 1, 2, "circle", chain=range(5), hops=4).collision is not None


@pytest.mark.parametrize("name, assumption", [("relay only", "1.2"), ("causal", "1.3")])
def test_counter_examples_fail_the_check_and_the_construction(name, assumption):
    pattern = COUNTER_EXAMPLES[name](4)[None]
    with pytest.raises(ValueError, match=f"{name} violates Assumption {assumption}"):
        check_sparse(pattern, 1, 2, name)
    for chain in itertools.permutations(range(4)):
        assert check_sparse(pattern, 1, 2, name, chain=chain, hops=4).collision is not None


def test_too_few_global_shifts_collide():
    window = pattern_tables("window", 4, window_size=1)
    assert [check_sparse(window, 1, 2, hops=hops).collision is None for hops in (1, 2, 3)] == [False, False, True]


def test_layers_in_turn():
    patterns = pattern_tables("fixed_cycle", 4, stride=2)
    layers = sparse_mapping(patterns, range(4), 2, 1, 2)
    for number, layer in enumerate(layers):
        assert (layer.pattern == patterns[number % 2]).all()
    assert sum(not layer.heads for layer in layers) == 3 * 2  # the pattern that is not needed is the identity
    assert all(layer.pattern.all() for layer in dense_mapping(3, 1, 2))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: check_dense(1, 1, 2), "num_columns must be an integer from 2 to 2, got 1"),
        (lambda: check_dense(5, 1, 4), "num_columns must be an integer from 2 to 4, got 5"),
        (lambda: check_dense(2, 0, 2), "num_rows must be an integer of at least 1, got 0"),
        (lambda: check_no_diagonal(2, 1, 4), "num_columns must be an integer from 3 to 4, got 2"),
        (lambda: check_no_diagonal(3, 1, 4, -1), "num_global_shifts must be an integer of at least 0"),
        (lambda: check_sparse(np.ones((1, 3, 3), dtype=bool), 1, 1), "grid_size must be an integer of at least 2"),
        (lambda: check_sparse(~np.eye(3, dtype=bool)[None], 1, 2, "bare"), "bare violates Assumption 1.1: 3 rows"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    plot_shifts(tmp_path / "new" / "shifts.png")
    assert (tmp_path / "new" / "shifts.png").read_bytes().startswith(b"\x89PNG")


def test_standard_checks(capsys):
    checks = standard_checks()
    assert capsys.readouterr() == ("", "")  # no progress bar where stderr is no terminal
    table = mappings_table(checks)
    assert len(table.rows) == len(checks) and set(COUNTER_EXAMPLES) <= {row[1] for row in table.rows}
    assert sum(check.collision is not None for check in checks) == len(table.notes) == 3
    assert "no diagonal, 1 shift, n = 4: (0, 1/3, 1/2, 5/6) and (1/6, 1/3, 2/3, 5/6) share a number" in table.notes
    saved = json.loads(json.dumps([check.as_json() for check in checks]))
    by_attention = {(check["attention"], check["num_columns"]): check for check in saved}
    assert by_attention["full", 4]["collision"] is None and by_attention["full", 4]["num_inputs"] == 360
    assert by_attention["no diagonal, 1 shift", 4]["collision"][0] == [["0", "1/3", "1/2", "5/6"]]
    for check in checks:
        fails = any(word in check.attention for word in ("1 shift", *COUNTER_EXAMPLES))
        fails = fails and check.num_columns > 3
        assert (check.collision is not None) == fails


def test_page_examples():
    """Its Python blocks are one session."""
    result = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 10 and result.failed == 0


def table_lines(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table.rich())
    return [line for line in console.file.getvalue().splitlines() if line.startswith("│")]


def test_page_shows_what_is_found():
    """The tables and facts on the page are those of today's code, whichever command prints them."""
    lines = {line.rstrip() for line in PAGE.read_text().splitlines()}
    cases = [pattern_case(name, 32, 4) for name in ("star", "strided_cycle", "no_diag", "bigbird")]
    found = check_cases(cases)
    shown = table_lines(verdict_table(cases, found)) + table_lines(mappings_table(standard_checks()))
    for case, verdict in zip(cases, found, strict=True):
        shown += details(case, verdict).splitlines()
    assert len(shown) > 50 and [line for line in shown if line.rstrip() not in lines] == []


def test_page_has_its_figure():
    pictures = re.findall(r"\]\((\S+\.png)\)", PAGE.read_text())
    assert pictures and all((PAGE.parent / picture).is_file() for picture in pictures)


# Assumption 2 of O(n) Connections are Expressive Enough: a scaled map approaches the hardmax.

MAPS = {"topk": {"k": 3}, "sparsegen_lin": {"lam": 0.3}, "entmax": {"alpha": 1.3}}
SCALES = [
    *((name, MAPS.get(name, {})) for name in SCALE_FORMULAS),
    ("topk", {"k": 1}),
    ("sparsegen_lin", {"lam": 0.9}),
    ("sparsegen_lin", {"lam": -2.0}),
    ("entmax", {"alpha": 1}),
    ("entmax", {"alpha": 1.05}),
    ("entmax", {"alpha": 4.0}),
]


def needs_package(name):
    if PROBABILITY_MAPS[name].needs_entmax:
        pytest.importorskip("entmax")


@pytest.mark.parametrize("name, parameters", SCALES, ids=str)
def test_assumption_2(name, parameters):
    needs_package(name)
    length = 9
    for margin in (1e-2, 0.5, 3.0):
        others = torch.cat([torch.zeros(1, length - 1), -5 * torch.rand(50, length - 1)]).double()
        scores = torch.cat([others.amax(-1, keepdim=True) + margin, others], dim=-1)  # all equal is the worst case
        for error in (1e-4, 0.1, 0.9, 1.0):
            t = hardmax_scale(name, margin, error, length, **parameters)
            assert t > 0
            probs = PROBABILITY_MAPS[name](t * scores, **parameters)
            assert (probs[:, 0] >= 1 - error - 1e-9).all()
            assert (probs[:, 1:].sum(-1) <= error + 1e-9).all()
            checked = check_scale(name, margin, error, length, **parameters)
            assert checked.scale == t and checked.verdict == "holds"


def test_closed_forms_of_the_scale():
    """O(n) Connections are Expressive Enough, Section B."""
    assert hardmax_scale("softmax", 0.5, 0.1, 8) == pytest.approx(math.log(7 * 9) / 0.5)
    assert hardmax_scale("topk", 0.5, 0.1, 8, k=3) == pytest.approx(math.log(2 * 9) / 0.5)
    assert hardmax_scale("sparsemax", 0.5, 0.1, 8) == hardmax_scale("sparsegen_lin", 0.5, 0.1, 8, lam=0.7) == 1.8
    assert hardmax_scale("entmax", 0.5, 0.1, 8, alpha=1.5) == hardmax_scale("entmax15", 0.5, 0.1, 8) == 4.0


@pytest.mark.parametrize("name", SCALE_FORMULAS)
def test_the_check_finds_a_scale_that_is_too_small(name):
    """An eighth of the scale is too little for some scores: the forms are not trivial."""
    needs_package(name)
    t = hardmax_scale(name, 0.5, 0.1, 8, **MAPS.get(name, {}))
    assert least_probability(name, t, 0.5, 8, MAPS.get(name, {})) >= 0.9 - 1e-9
    assert least_probability(name, t / 8, 0.5, 8, MAPS.get(name, {})) < 0.9


def test_every_map_is_in_the_table():
    table = scales_table(standard_scales())
    assert {row[0] for row in table.rows} == set(PROBABILITY_MAPS)
    assert {row[-1] for row in table.rows} <= {"holds", "unknown"}
    json.dumps([scale.as_json() for scale in standard_scales()])


def test_a_map_without_a_formula_is_unknown(monkeypatch):
    def powers(scores, *, power):
        return scores.abs() ** power / (scores.abs() ** power).sum(-1, keepdim=True)

    monkeypatch.setitem(PROBABILITY_MAPS, "squares", MapFunction(powers))
    (found,) = (scale for scale in standard_scales() if scale.name == "squares")
    assert found.verdict == "unknown" and found.scale is None and found.as_json()["verdict"] == "unknown"
    table = scales_table(standard_scales())
    assert ["squares", "unknown"] in [[row[0], row[-1]] for row in table.rows]
    assert "squares: no scale is known for this map" in table.notes
    with pytest.raises(ValueError, match="no scale is known for the probability map 'squares'"):
        hardmax_scale("squares", 1.0, 0.1, 8, power=2)


def test_a_map_whose_package_is_missing_is_unknown(monkeypatch):
    def missing(scores):
        raise ValueError("needs the package entmax")

    monkeypatch.setitem(PROBABILITY_MAPS, "sparsemax", MapFunction(missing, needs_entmax=True))
    found = check_scale("sparsemax", 0.5, 0.1, 8)
    assert found.scale == 1.8 and found.verdict == "unknown" and "entmax" in found.reason


def test_a_formula_that_is_wrong_fails(monkeypatch):
    monkeypatch.setitem(SCALE_FORMULAS, "softmax", lambda error, length: 1.0)
    assert check_scale("softmax", 1.0, 0.1, 8).verdict == "fails"


@pytest.mark.parametrize(
    "arguments, parameters, said",
    [
        (("softmax", 0.0, 0.1, 8), {}, "margin must be more than 0, got 0.0"),
        (("softmax", math.inf, 0.1, 8), {}, "margin must be more than 0, got inf"),
        (("softmax", 1.0, 0.0, 8), {}, r"error must be in \(0, 1\], got 0.0"),
        (("softmax", 1.0, 1.5, 8), {}, r"error must be in \(0, 1\], got 1.5"),
        (("entmax", 1.0, 0.1, 8), {"alpha": "learned"}, "must be numbers here, got 'learned'"),
        (("softmaks", 1.0, 0.1, 8), {}, "'softmaks'"),
        (("topk", 1.0, 0.1, 8), {"k": 9}, "k"),
    ],
)
def test_bad_scales(arguments, parameters, said):
    for function in (hardmax_scale, check_scale):
        with pytest.raises(ValueError, match=said):
            function(*arguments, **parameters)
