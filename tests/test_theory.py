"""The assumptions of the universality theorems, against brute force, and the verdicts drawn from them."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from sparsebert.commands.theory import main
from sparsebert.masks.patterns import PATTERNS, build_pattern
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.theory.chains import Chain, find_chain, is_chain
from sparsebert.theory.conditions import check_universality, find_reach, fit_growth
from sparsebert.theory.verdicts import pattern_case, saved_case


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
    assert (chain.exists, chain.reason) == (True, reason)
    assert is_chain(table, chain.order)


def test_chain_of_strides_joined_by_special_tokens():
    """Every second token, and the last one that sees all."""
    table = offsets(40, [0, 2])
    table[-1], table[:, -1] = True, True
    chain = find_chain(table)
    assert chain.reason == "2 interleaved strides" and is_chain(table, chain.order)


def test_hidden_chains_are_found():
    rng = np.random.default_rng(0)
    for length in (40, 150):
        table = rng.random((length, length)) < 3 / length
        order = rng.permutation(length)
        table[order[1:], order[:-1]] = True
        chain = find_chain(table)
        assert chain.exists is not False  # never a false "no"
        if chain.exists:
            assert is_chain(table, chain.order)
    random = find_chain(rng.random((200, 200)) < 0.05)
    assert random.exists and random.reason == "by heuristic search"


@pytest.mark.parametrize(
    "table, reason",
    [
        (offsets(40, [0, 2]), "2 groups of tokens have no connection"),
        (offsets(40, [0]) | (np.arange(40) == 0) | (np.arange(40) == 0)[:, None], "at most 2 tokens"),
        (cliques([7, 7, 7], 1), "without token 21 there are 3 groups"),
        (np.kron([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.ones((10, 10))).astype(bool), "2 groups of tokens are not"),
    ],
)
def test_no_chain_is_proved(table, reason):
    chain = find_chain(table)
    assert chain.exists is False and chain.order is None and chain.reason.startswith(reason)


def test_unknown_is_said():
    """Four cliques that meet in two tokens: no chain, but neither too large to try all nor simple to exclude."""
    table = cliques([6, 6, 6, 6], 2)
    chain = find_chain(table)
    assert chain.exists is None and chain.order is None and chain.reason.startswith("heuristic search finds none")
    found = check_universality(mask_of(table))
    assert found.universal == "unknown" and "1.2 is open" in found.reason
    assert isinstance(found.facts["one pattern"].chain, Chain)


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


UNIVERSAL = {
    "dense": "yes",
    "no_diag": "yes",
    "star": "yes",
    "strided": "yes",
    "fixed": "yes",
    "logsparse": "yes",
    "window": "yes",
    "strided_cycle": "yes",
    "fixed_cycle": "yes",
    "star_cycle": "yes",
    "bigbird": "no theorem applies",
    "longformer": "no theorem applies",
    "random": "no theorem applies",
    "random_drop": "no theorem applies",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_verdicts(name):
    found = check_universality(build_pattern(name, 64, 4, num_layers=4))
    assert found.universal == UNIVERSAL[name]
    assert set(found.facts) == ({"one pattern"} if found.universal == "yes" else {"union", "intersection"})
    assert ("heads differ" in found.reason) == (found.universal != "yes")
    for facts in found.facts.values():
        assert facts.chain.order is None or len(facts.chain.order) == 64
    bare = check_universality(build_pattern(name, 64, 4, num_layers=4, diagonal=False))
    theorem = name in ("dense", "no_diag")  # without its diagonal the same
    assert bare.universal == ("yes" if theorem else "no theorem applies")
    assert theorem == ("SparseBERT, Theorem 1" in bare.reason)


def test_sparsebert_theorem_needs_every_pattern_and_three_tokens():
    assert check_universality(build_pattern("no_diag", 3, 2)).universal == "yes"
    assert check_universality(build_pattern("no_diag", 2, 2)).universal == "no theorem applies"
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
    with pytest.raises(ValueError, match=message):
        check_universality(build_pattern("star", 64, 2), length)


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


def test_growth_needs_four_lengths():
    with pytest.raises(ValueError, match="four different lengths, got 2"):
        fit_growth([8, 16, 16], [1, 2, 2])


GROWTHS = {
    "star": "O(n)",
    "bigbird": "O(n)",
    "longformer": "O(n)",
    "window": "O(n)",
    "star_cycle": "O(n)",
    "logsparse": "O(n log n)",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_growth_of_patterns(name):
    assert pattern_case(name, 64).growth.order == GROWTHS.get(name, "O(n^2)")


def test_growth_of_long_strides():
    """Few of the connections grow with the square of the length."""
    for stride in (8, 32, 64):
        assert pattern_case("strided", 128, 2, parameters={"stride": stride}).growth.order == "O(n^2)"


@pytest.mark.parametrize("name", ["strided_cycle", "fixed_cycle"])
def test_growth_with_the_square_root_of_the_length(name):
    """O(n) Connections, Section 3.4."""
    case = pattern_case(name, 64, parameters={"stride": "sqrt"})
    assert case.setup["stride"] == 8 and case.growth.order == "O(n sqrt n)"


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_long(name):
    found = check_universality(build_pattern(name, 4096, 2, num_layers=2))
    assert found.universal == UNIVERSAL[name]


def test_command(capsys, tmp_path, checkpoints):
    build_pattern("fixed", 24, 2).save_pretrained(tmp_path / "mask")
    output = tmp_path / "new" / "theory.json"
    sources = ["star", str(tmp_path / "mask"), checkpoints["window"], checkpoints["searching"]]
    main([*sources, "--length", "24", "--num_heads", "3", "--output", str(output)])
    text = capsys.readouterr().out
    assert "1.2 chain: identity: 0 1 2 ... 21 22 23" in text
    assert "1.3 hops: 2; reached at least (on average) after 1: 16.7 %" in text
    saved = json.loads(output.read_text())
    assert [case["name"] for case in saved] == sources
    assert [case["universal"] for case in saved[:3]] == ["yes"] * 3
    assert saved[0]["facts"]["one pattern"]["chain"]["order"] == list(range(24))
    assert saved[0]["setup"] == {"window_size": 1} and saved[0]["num_heads"] == 3
    assert saved[0]["growth"]["order"] == saved[2]["growth"]["order"] == "O(n)"
    assert saved[1]["growth"] is None  # a table is defined at its own length


def test_saved_models_that_no_theorem_speaks_of(tiny_config, tmp_path):
    from sparsebert import SparseBertForMaskedLM, SparseBertLMHeadModel

    window = {"pattern": "window", "mask_length": 24}
    decoder = SparseBertLMHeadModel(tiny_config(is_decoder=True, **window))
    mixed = SparseBertForMaskedLM(tiny_config(token_mixers=["average", "attention"], **window))
    for name, model in (("decoder", decoder), ("mixed", mixed)):
        model.save_pretrained(tmp_path / name)
    found = [saved_case(str(tmp_path / name)).check() for name in ("decoder", "mixed")]
    assert [case.universal for case in found] == ["no theorem applies"] * 2
    assert "1.3 fails" in found[0].reason and "average" in found[1].reason


@pytest.mark.parametrize("name, order", [("dense", "O(n^2)"), ("no_diag", "O(n^2)"), ("window", "O(n)")])
def test_growth_of_saved_masks(tmp_path, name, order):
    build_pattern(name, 32, 2).save_pretrained(tmp_path / name)
    assert saved_case(str(tmp_path / name)).growth.order == order


def test_command_with_parameters(capsys):
    main(["strided_cycle", "--parameters", "{stride: 3}", "--head_configuration", "union", "--length", "20"])
    text = capsys.readouterr().out
    assert "strided_cycle, union" in text and "stride=3" in text
    main(["star", "--diagonal", "false", "--length", "20"])
    text = capsys.readouterr().out
    assert "star, no diagonal" in text and "1.1 self-attention: no, 20 of 20 rows lack it" in text


def test_command_all(capsys, tmp_path):
    main(["--all", "--length", "16", "--num_heads", "2", "--output", str(tmp_path / "all.json")])
    saved = json.loads((tmp_path / "all.json").read_text())
    assert {case["name"] for case in saved} == set(PATTERNS)
    assert len(saved) == len(PATTERNS) + 2 + 2  # two cycles of two patterns, in three head configurations
    assert all(case["universal"] in ("yes", "unknown", "no theorem applies") for case in saved)
    assert "Universality" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected a pattern"),
        (["bigbrid"], "did you mean 'bigbird'"),
        (["star", "--parameters", "{stride: 3}"], "unknown parameter of pattern 'star': 'stride'"),
        (["star", "--parameters", "3"], "--parameters must be like"),
        (["star", "--parameters", "{"], "is not YAML"),
        (["strided_cycle", "--parameters", "{stride: cube}"], "stride must be an integer"),
        (["star", "--length", "1"], "--length must be at least 2, got 1"),
        (["star", "--num_heads", "0"], "num_heads must be an integer of at least 1, got 0"),
        (["star", "--head_configuration", "union"], "head_configuration is for"),
        (["fixed_cycle", "--head_configuration", "unoin"], "'sequential', 'union', 'multihead', got 'unoin'"),
        (["--all", "--parameters", "{stride: 3}"], "--parameters goes with the name of a pattern, not with --all"),
        (["--all", "--head_configuration", "union"], "--head_configuration goes with"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        main(arguments)


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="holds no mask"):
        main([str(tmp_path)])
    build_pattern("fixed", 24, 2).save_pretrained(tmp_path / "mask")
    with pytest.raises(ValueError, match="longer than the mask"):
        main([str(tmp_path / "mask"), "--length", "25"])
    with pytest.raises(ValueError, match="is a saved mask"):
        main([str(tmp_path / "mask"), "--parameters", "{stride: 3}"])
    output = tmp_path / "theory.json"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="exists: choose another"):
        main(["star", "--output", str(output)])
    assert output.read_text() == "mine"
