"""The assumptions of the universality theorems, against brute force, and the verdicts drawn from them."""

import importlib.util
import itertools
import json
import math

import numpy as np
import pytest
import torch

from sparsebert.analysis.saved_runs import read_run
from sparsebert.masks.patterns import CYCLES, HEAD_CONFIGURATIONS, PATTERNS, build_pattern
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.theory import chains
from sparsebert.theory.chains import Chain, find_chain, is_chain
from sparsebert.theory.conditions import GROWTHS as ORDERS, NO_THEOREM, check_universality, find_reach, fit_growth
from sparsebert.theory.verdicts import (
    OF_REST,
    as_json,
    check_cases,
    details,
    pattern_case,
    pattern_cases,
    saved_case,
    verdict_table,
)


def offsets(length, kept):
    index = np.arange(length)
    return np.isin(np.abs(index[:, None] - index), kept)


def mask_of(*layers):
    """A mask of two equal heads with the given tables `(n, n)` as layers."""
    keep = torch.from_numpy(np.stack(layers))[:, None].expand(-1, 2, -1, -1)
    return SparseMask(keep, keep.shape[-1])


def cliques(sizes, num_joints):
    """Cliques that only meet in `num_joints` tokens, which are the last."""
    length = sum(sizes) + num_joints
    table = np.zeros((length, length), dtype=bool)
    start = 0
    for size in sizes:
        table[start : start + size, start : start + size] = True
        start += size
    table[start:], table[:, start:] = True, True
    return table


def brute_chain(table):
    return any(is_chain(table, order) for order in itertools.permutations(range(len(table))))


def brute_hops(tables, limit=300):
    reached = tables[0]
    for layer in range(1, limit):
        if reached.all():
            return layer
        reached = tables[layer % len(tables)].astype(int) @ reached > 0
    return None


def test_is_chain():
    table = offsets(4, [1])
    assert is_chain(table, [0, 1, 2, 3]) and is_chain(table, [3, 2, 1, 0])
    assert not is_chain(table, [0, 2, 1, 3])
    assert not is_chain(table, [0, 1, 2]) and not is_chain(table, [0, 1, 2, 2])
    assert is_chain(np.tri(4, dtype=bool), [0, 1, 2, 3]) and not is_chain(np.tri(4, dtype=bool), [3, 2, 1, 0])


def test_chain_against_all_permutations():
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(150):
        length = int(rng.integers(2, 7))
        table = rng.random((length, length)) < rng.uniform(0.15, 0.6)
        chain = find_chain(table)
        assert chain.exists is brute_chain(table)
        assert chain.order is None or is_chain(table, chain.order)
        answers.append((chain.exists, chain.reason))
    assert {exists for exists, _ in answers} == {True, False}
    assert {"by exhaustive search", "exhaustive search finds none"} <= {reason for _, reason in answers}


@pytest.mark.parametrize(
    "length, kept, reason",
    [
        (128, [0, 1], "identity"),
        (31, [7, 24], "stride 7 modulo 31"),
        (128, [0, 3, 5], "by heuristic search"),
        (129, [7, 12], "by heuristic search"),
    ],
)
def test_chain_of_offsets(length, kept, reason):
    table = offsets(length, kept)
    chain = find_chain(table)
    searched = ("by heuristic search", "by OR-tools")
    assert chain.exists and (chain.reason == reason or {chain.reason, reason} <= set(searched))
    assert is_chain(table, chain.order)


def test_chain_of_strides_joined_by_special_tokens():
    """Every second token, and the last one that sees all."""
    table = offsets(40, [0, 2])
    table[-1], table[:, -1] = True, True
    chain = find_chain(table)
    assert chain.reason == "2 interleaved strides" and is_chain(table, chain.order)


def test_hidden_chains_are_found():
    for length in (40, 150):
        table = planted(length, 3 / length, 0)
        chain = find_chain(table)
        # Without the solver "unknown" may be all that is said.
        assert chain.exists or (chain.exists is None and importlib.util.find_spec("ortools") is None)
        if chain.exists:
            assert is_chain(table, chain.order)
    random = find_chain(np.random.default_rng(0).random((200, 200)) < 0.05)
    assert random.exists and random.reason in ("by heuristic search", "by OR-tools")


@pytest.mark.parametrize(
    "table, reason",
    [
        (offsets(40, [0, 2]), "2 groups of tokens have no connection"),
        (offsets(40, [0]) | (np.arange(40) == 0) | (np.arange(40) == 0)[:, None], "at most 2 tokens"),
        (cliques([7, 7, 7], 1), "without token 21 there are 3 groups"),
        (cliques([6, 6, 6, 6], 2), "without tokens 24 and 25 there are 4 groups"),
        (np.kron([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.ones((10, 10))).astype(bool), "2 groups of tokens are not"),
    ],
)
def test_no_chain_is_proved(table, reason):
    chain = find_chain(table)
    assert chain.exists is False and chain.order is None and chain.reason.startswith(reason)


def planted(length, density, seed, broken=False):
    """A sparse graph with a chain, of which one link is taken out if `broken`."""
    rng = np.random.default_rng(seed)
    table, order = rng.random((length, length)) < density, rng.permutation(length)
    table[order[1:], order[:-1]] = True
    if broken:
        place = rng.integers(1, length)
        table[order[place], order[place - 1]] = False
    return table


def test_the_solver_proves_that_there_is_no_chain():
    pytest.importorskip("ortools")
    chain = find_chain(planted(30, 0.04, 9, broken=True))
    assert chain.exists is False and chain.order is None and chain.reason == "proved by OR-tools' solver CP-SAT"


@pytest.mark.parametrize("length, density", [(26, 0.04), (200, 0.005)])
def test_the_solver_finds_planted_chains(length, density):
    pytest.importorskip("ortools")
    reasons = set()
    for seed in range(4):
        table = planted(length, density, seed)
        chain = find_chain(table)
        assert chain.exists and is_chain(table, chain.order)
        reasons.add(chain.reason)
    assert "by OR-tools" in reasons


def test_unknown_is_said(monkeypatch):
    table = cliques([6, 6, 6, 6], 2)
    monkeypatch.setattr(chains, "_cut", lambda table: None)
    monkeypatch.setattr(chains, "_solve", lambda table: (None, None))
    assert find_chain(table).reason.endswith(("not decided it in its time", "adds a solver"))
    monkeypatch.setattr(chains, "MAX_LINKS", 10)
    assert find_chain(table).reason.endswith(("links are too many for the solver", "adds a solver"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    chain = find_chain(table)
    assert chain.exists is None and chain.order is None and chain.reason.startswith("heuristic search finds none")
    assert chain.reason.endswith("the extra 'theory' adds a solver")
    found = check_universality(mask_of(table))
    assert found.universal == "unknown" and "1.2 is open" in found.reason
    assert isinstance(found.facts["one pattern"].chain, Chain)
    case = saved_case("cliques", mask_of(table))
    assert "1.2 chain: unknown (heuristic search finds none" in details(case, found)
    table = verdict_table([case], [found])
    assert table.rows[0][table.columns.index("chain")] == "unknown"


@pytest.mark.parametrize("self_attention", [True, False])
@pytest.mark.parametrize("period", [1, 2, 3])
def test_hops_against_matrix_powers(period, self_attention):
    rng = np.random.default_rng(period)
    answers = set()
    for _ in range(60):
        length = int(rng.integers(2, 8))
        tables = rng.random((period, length, length)) < rng.uniform(0.1, 0.6)
        tables[:, range(length), range(length)] = self_attention
        reach = find_reach(tables)
        expected = brute_hops(tables)
        assert reach.hops == expected
        assert reach.never == (expected is None) and bool(reach.reason) == reach.never
        answers.add(expected is None)
    assert answers == {True, False}


def test_reach_curve():
    length = 9
    reach = find_reach(offsets(length, [0, 1])[None])
    assert reach.hops == 8 and not reach.never
    for layer, (least, mean) in enumerate(reach.curve, start=1):
        index = np.arange(length)
        counts = np.minimum(index + layer, length - 1) - np.maximum(index - layer, 0) + 1
        assert (least, mean) == pytest.approx((counts.min() / length, counts.mean() / length))


@pytest.mark.parametrize(
    "name, arguments, hops",
    [
        ("dense", {}, 1),
        ("no_diag", {}, 2),
        ("star", {}, 2),
        ("fixed", {}, 2),
        ("window", {"window_size": 5}, math.ceil(99 / 5)),
        ("window", {"window_size": 1, "num_global_tokens": 1}, 2),
        ("window", {"window_size": 1, "diagonal": False}, None),  # odd and even tokens in turn
        ("star_cycle", {}, 2),
        ("fixed_cycle", {"stride": 10}, 2),
        ("fixed_cycle", {"stride": 16}, None),  # nothing sees the 4 tokens of the last segment from outside
        ("strided_cycle", {"stride": 2}, 2),
        ("strided_cycle", {"stride": 10}, 3),  # near the ends two hops do not suffice
    ],
)
def test_hops_of_patterns(name, arguments, hops):
    reach = check_universality(build_pattern(name, 100, 2, num_layers=2, **arguments)).facts["one pattern"].reach
    assert reach.hops == hops and reach.never == (hops is None)


# Known by hand: verdict and growth. The verdicts on other patterns are only checked to follow from their facts.
BY_HAND = {
    **dict.fromkeys(("dense", "no_diag", "strided", "fixed", "strided_cycle", "fixed_cycle"), ("yes", "O(n^2)")),
    **dict.fromkeys(("star", "window", "star_cycle"), ("yes", "O(n)")),
    "logsparse": ("yes", "O(n log n)"),
    **dict.fromkeys(("bigbird", "longformer"), ("no theorem applies", "O(n)")),
    **dict.fromkeys(("random", "random_drop"), ("no theorem applies", "O(n^2)")),
}
assert BY_HAND.keys() <= PATTERNS.keys()


def verdict_of(facts):
    """The verdict that follows from the facts about a mask of several heads and more than two tokens."""
    facts = facts.get("one pattern")
    if facts is None:
        return "no theorem applies"
    if facts.full_but_diagonal:
        return "yes"
    if facts.without_self or facts.chain.exists is False or facts.reach.hops is None:
        return "no theorem applies"
    return "unknown" if facts.chain.exists is None else "yes"


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_verdicts_follow_from_the_facts(name, diagonal):
    mask = build_pattern(name, 64, 4, num_layers=4, diagonal=diagonal)
    found, tables = check_universality(mask), mask.to_table(64).numpy()
    assert found.universal == verdict_of(found.facts)
    if name in BY_HAND:
        bare = not diagonal and name not in ("dense", "no_diag")
        assert found.universal == ("no theorem applies" if bare else BY_HAND[name][0])
    same = bool((tables == tables[:, :1]).all())
    assert set(found.facts) == ({"one pattern"} if same else {"union", "intersection"})
    assert ("heads differ" in found.reason) != same
    full = bool((tables != np.eye(64, dtype=bool)).all())
    assert full == ("SparseBERT, Theorem 1" in found.reason)
    for kind, facts in found.facts.items():
        heads = tables.all(1) if kind == "intersection" else tables.any(1)
        heads = heads[: found.num_patterns]
        assert facts.without_self == (~heads.diagonal(axis1=1, axis2=2)).sum()
        assert facts.chain.order is None or is_chain(heads.any(0), facts.chain.order)


def test_sparsebert_theorem_needs_every_pattern_and_three_tokens():
    for length, verdict in ((3, "yes"), (2, "no theorem applies")):
        assert check_universality(build_pattern("no_diag", length, 2)).universal == verdict
    full, bare = np.ones((5, 5), dtype=bool), ~np.eye(5, dtype=bool)
    assert check_universality(mask_of(bare, bare)).universal == "yes"
    found = check_universality(mask_of(full, bare))
    assert found.universal == "no theorem applies" and "1.1 fails: 5 rows" in found.reason
    heads = SparseMask(torch.from_numpy(np.stack([full, bare])), 5)
    assert "heads differ" in check_universality(heads).reason
    almost = bare.copy()
    almost[0, 1] = False
    assert check_universality(mask_of(almost)).universal == "no theorem applies"


def test_heads():
    assert "two heads" in check_universality(build_pattern("dense", 8, 1)).reason
    for layout, universal in (("sequential", "yes"), ("union", "yes"), ("multihead", "no theorem applies")):
        mask = build_pattern("fixed_cycle", 32, 4, num_layers=2, head_configuration=layout)
        found = check_universality(mask)
        assert found.universal == universal and found.num_patterns == (2 if layout == "sequential" else 1)
    assert found.facts["union"].reach.hops == 2 and found.facts["intersection"].reach.never
    # Heads that are equal at this length have one pattern.
    table = torch.ones(2, 12, 12, dtype=torch.bool)
    table[0, 8:] = False
    mask = SparseMask(table, 12)
    assert check_universality(mask).universal == "no theorem applies"
    assert check_universality(mask, 8).universal == "yes"


def test_layers_are_a_cycle():
    near, far = offsets(12, [0, 1]), offsets(12, [0, 4, 8])
    for layers, period in (([near] * 3, 1), ([near, far, near, far, near], 2), ([near, near, far], 3)):
        found = check_universality(mask_of(*layers))
        assert found.num_patterns == period and found.universal == "yes"
        assert found.facts["one pattern"].reach.hops == brute_hops(np.stack(layers[:period]))
    # The chain may use the links of all patterns, one alone does not do.
    found = check_universality(mask_of(offsets(12, [0, 2]), offsets(12, [0, 3])))
    assert found.universal == "yes" and found.facts["one pattern"].chain.exists


def test_reasons_name_what_fails():
    parts = mask_of(np.kron(np.eye(2), np.ones((4, 4))).astype(bool))
    reason = check_universality(parts).reason
    assert "1.2 fails: 2 groups" in reason and "1.3 fails: token 0 never reaches 4 tokens, for instance 4" in reason
    causal = check_universality(mask_of(np.tri(6, dtype=bool)))
    assert causal.universal == "no theorem applies" and causal.facts["one pattern"].chain.exists
    assert causal.reason == "1.3 fails: token 0 never reaches 5 tokens, for instance 1"


@pytest.mark.parametrize("length, message", [(1, "length must be at least 2, got 1"), (65, "longer than the mask")])
def test_bad_length(length, message):
    mask = build_pattern("star", 64, 2)
    with pytest.raises(ValueError, match=message):
        check_universality(mask, length)
    if length > 64:
        with pytest.raises(ValueError, match=message):
            saved_case("mask", mask, length)


@pytest.mark.parametrize(
    "order, connections",
    [
        ("O(n)", lambda n: 11 * n - 30),
        ("O(n log n)", lambda n: 2 * n * math.log2(n) - n + 2),
        ("O(n sqrt n)", lambda n: 2 * n * round(math.sqrt(n))),
        ("O(n^2)", lambda n: n * n / 50 + 8 * n),
        (None, lambda n: n**3),
    ],
)
def test_growth(order, connections):
    lengths = [128, 256, 512, 1024, 2048]
    growth = fit_growth(lengths, [connections(n) for n in lengths])
    assert growth.order == order and growth.lengths == tuple(lengths)
    assert (growth.error <= 0.02) == (order is not None)


def test_growth_of_a_decoder_counts_the_keys_that_it_sees():
    mask = build_pattern("window", 32, 2, window_size=3)
    case, encoder = saved_case("mask", mask, causal=True), saved_case("mask", mask)
    assert case.growth.lengths == encoder.growth.lengths
    seen = [int(np.tril(mask.to_table(n)[0, 0].numpy()).sum()) for n in case.growth.lengths]
    assert [round(count) for count in case.growth.connections] == seen != encoder.growth.connections


def test_growth_needs_four_lengths():
    with pytest.raises(ValueError, match="four different lengths, got 2"):
        fit_growth([8, 16, 16], [1, 2, 2])


@pytest.mark.parametrize("name", PATTERNS)
def test_growth_of_patterns(name):
    order = pattern_case(name, 64).growth.order
    assert order in (None, *ORDERS)
    assert name not in BY_HAND or order == BY_HAND[name][1]


def test_growth_of_long_strides():
    """Few of the connections grow with the square of the length."""
    assert pattern_case("strided", 128, 2, parameters={"stride": 64}).growth.order == "O(n^2)"


@pytest.mark.parametrize("name", ["strided_cycle", "fixed_cycle"])
def test_growth_with_the_square_root_of_the_length(name):
    """O(n) Connections, Section 3.4."""
    case = pattern_case(name, 64, parameters={"stride": "sqrt"})
    assert case.setup["stride"] == 8 and case.growth.order == "O(n sqrt n)"


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_long(name):
    found = check_universality(build_pattern(name, 4096, 2, num_layers=2))
    assert found.universal == (BY_HAND[name][0] if name in BY_HAND else verdict_of(found.facts))


def test_everything_about_a_case(tmp_path):
    build_pattern("fixed", 24, 2).save_pretrained(tmp_path / "mask")
    cases = [pattern_case("star", 24, 3), saved_case(str(tmp_path / "mask"), read_run(tmp_path / "mask").mask)]
    found = check_cases(cases)
    text = details(cases[0], found[0])
    assert "1.2 chain: identity: 0 1 2 ... 21 22 23" in text
    assert "1.3 hops: 2; reached at least (on average) after 1: 16.7 %" in text
    saved = json.loads(json.dumps([as_json(*pair) for pair in zip(cases, found, strict=True)]))
    assert [case["name"] for case in saved] == ["star", str(tmp_path / "mask")]
    assert [case["universal"] for case in saved] == ["yes"] * 2
    assert saved[0]["facts"]["one pattern"]["chain"]["order"] == list(range(24))
    assert saved[0]["setup"] == {"window_size": 1} and saved[0]["num_heads"] == 3
    assert saved[0]["growth"]["order"] == "O(n)"
    assert saved[1]["growth"] is None  # a table is defined at its own length
    table = verdict_table(cases, found)
    assert [row[0] for row in table.rows] == ["star", "mask"] and "universal" in table.columns


def test_saved_models_that_no_theorem_speaks_of(tiny_config, tmp_path):
    from sparsebert import SparseBertForMaskedLM, SparseBertLMHeadModel

    window = {"pattern": "window", "mask_length": 24}
    decoder = SparseBertLMHeadModel(tiny_config(is_decoder=True, **window))
    mixed = SparseBertForMaskedLM(tiny_config(token_mixers=["average", "attention"], **window))
    for name, model in (("decoder", decoder), ("mixed", mixed)):
        model.save_pretrained(tmp_path / name)
    runs = {name: read_run(tmp_path / name) for name in ("decoder", "mixed")}
    found = check_cases(
        [saved_case(name, run.mask, None, run.is_decoder, run.token_mixers) for name, run in runs.items()]
    )
    assert [case.universal for case in found] == ["no theorem applies"] * 2
    assert "1.3 fails" in found[0].reason and "average" in found[1].reason


@pytest.mark.parametrize("name, order", [("dense", "O(n^2)"), ("no_diag", "O(n^2)"), ("window", "O(n)")])
def test_growth_of_saved_masks(tmp_path, name, order):
    build_pattern(name, 32, 2).save_pretrained(tmp_path / name)
    case = saved_case(name, SparseMask.from_pretrained(tmp_path / name))
    assert case.growth.order == order and case.length == 32


def test_text_of_a_pattern_without_a_chain():
    case = saved_case("apart", mask_of(cliques([6, 6], 0)))
    found = case.check()
    text = details(case, found)
    assert f"1.2 chain: no ({found.facts['one pattern'].chain.reason})" in text
    assert "1.3 hops: never (token 0 never reaches 6 tokens" in text
    table = verdict_table([case], [found])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["chain"], row["s"], row["universal"]) == ("no", "never", "no theorem applies")


def test_cases_of_all_patterns(capsys):
    cases = pattern_cases(16, 2)
    found = check_cases(cases)
    assert capsys.readouterr() == ("", "")  # no progress bar where stderr is no terminal
    assert {case.name for case in cases} == set(PATTERNS) and [case.length for case in cases] == [16] * len(cases)
    layouts = {name: [case.setup.get("head_configuration") for case in cases if case.name == name] for name in CYCLES}
    for name, given in layouts.items():
        several = CYCLES[name](2).num_layers > 1
        assert given == list(HEAD_CONFIGURATIONS)[: None if several else 1]
    assert all(verdict.universal in ("yes", "unknown", "no theorem applies") for verdict in found)
    assert len(verdict_table(cases, found).rows) >= len(cases)


@pytest.mark.parametrize(
    "arguments, fields, message",
    [
        (("star", 16), {"parameters": {"stride": 3}}, "unknown parameter of pattern 'star': 'stride'"),
        (("strided_cycle", 16), {"parameters": {"stride": "cube"}}, "stride must be an integer"),
        (("star", 16, 0), {}, "num_heads must be an integer from 1 to 1024, got 0"),
        (("star", 16), {"head_configuration": "union"}, "head_configuration needs one of the patterns"),
        (("fixed_cycle", 16), {"head_configuration": "unoin"}, "'sequential', 'union', 'multihead', got 'unoin'"),
    ],
)
def test_bad_patterns(arguments, fields, message):
    with pytest.raises(ValueError, match=message):
        pattern_case(*arguments, **fields)


def test_rest_proves_nothing_more():
    mask = mask_of(cliques([6, 6], 0))
    rest = mask.replace(rest="mean", rest_bias=torch.ones(1, mask.num_heads))
    alone, with_rest = (saved_case("apart", each) for each in (mask, rest))
    found = with_rest.check()
    assert found.universal == NO_THEOREM and f"without it: {alone.check().universal}" in found.reason
    assert found.facts == alone.check().facts
    assert OF_REST in details(with_rest, with_rest.check())
    assert OF_REST not in details(alone, alone.check())
