"""Patterns against published sparsities, against plain loops over their definitions, and against written-out masks."""

import inspect
import math

import pytest
import torch

from sparsebert.masks.patterns import CYCLES, HEAD_CONFIGURATIONS, PATTERNS, build_pattern


RANDOM_PATTERNS = [name for name, function in PATTERNS.items() if "seed" in inspect.signature(function).parameters]


def matrix(text):
    """A mask drawn with `1` for attend and `.` for removed."""
    return torch.tensor([[mark == "1" for mark in row] for row in text.split()])


@pytest.mark.parametrize("relay", [0, 5, 12, -4])
def test_the_relay_of_a_star_may_be_any_token(relay):
    table = head_table("star_cycle", 13, window_size=2, relay=relay)
    ring = [place for place in range(13) if place != relay % 13]
    for step, place in enumerate(ring):
        near = {ring[(step + distance) % 12] for distance in range(-2, 3)}
        assert set(table[place].nonzero()[:, 0].tolist()) == near | {relay % 13}
    assert table[relay].all()


def by_loops(length, definition):
    table = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            table[i, j] = definition(i, j)
    return table


def head_table(name, length, **parameters):
    """The only mask `(n, n)` of a pattern whose heads are all equal."""
    table = build_pattern(name, length, num_heads=2, **parameters).to_table()
    assert table.shape == (1, 2, length, length)
    assert torch.equal(table[0, 0], table[0, 1])
    return table[0, 0]


@pytest.mark.parametrize(
    "name, with_diagonal, without_diagonal",
    [
        ("strided", 70.4, 71.2),
        ("fixed", 72.7, 73.4),
        ("logsparse", 89.8, 90.6),
        ("star", 96.1, 96.9),
        ("bigbird", 93.15, 93.9),
        ("longformer", 88.8, 89.5),
        ("random", 90.0, 90.1),
        ("dense", 0.0, 0.8),
        ("no_diag", 0.8, 0.8),
        ("random_drop", 0.8, 1.6),
    ],
)
def test_sparsity_is_the_published_one(name, with_diagonal, without_diagonal):
    """SparseBERT, Tables 3 and 4, n = 128."""
    assert 100 * build_pattern(name, 128, 12).sparsity == pytest.approx(with_diagonal, abs=0.1)
    assert 100 * build_pattern(name, 128, 12, diagonal=False).sparsity == pytest.approx(without_diagonal, abs=0.1)


def test_longformer_as_in_the_text():
    assert 100 * build_pattern("longformer", 128, 12, window_size=2, num_global_tokens=2).sparsity == pytest.approx(
        93.1, abs=0.1
    )


@pytest.mark.parametrize(
    "name, sparsities", [("strided_cycle", (93, 87, 93)), ("fixed_cycle", (93, 87, 93)), ("star_cycle", (87, 87, 87))]
)
def test_sparsity_of_cycles(name, sparsities):
    """O(n) Connections, Table 1, n = 256, in whole percent."""
    for configuration, sparsity in zip(HEAD_CONFIGURATIONS, sparsities, strict=True):
        mask = build_pattern(name, 256, 4, num_layers=2, head_configuration=configuration)
        assert 100 * mask.sparsity == pytest.approx(sparsity, abs=1)


@pytest.mark.parametrize("length", [1, 2, 7, 19, 33])
def test_definitions_by_loops(length):
    last = length - 1
    powers = [2**k for k in range(10)]

    def on_ring(i, j, relay, size):
        """Whether two tokens are neighbors on the ring of all tokens but the relay, counted along the ring."""
        position = [k - (k > relay) for k in (i, j)]
        steps = (position[0] - position[1]) % last
        return min(steps, last - steps) <= size

    definitions = (
        ("strided", {"stride": 3}, lambda i, j: abs(i - j) < 3 or abs(i - j) % 3 == 0),
        ("fixed", {"stride": 5}, lambda i, j: i // 5 == j // 5 or j % 5 == 4),
        ("fixed", {"stride": 5, "num_summary_tokens": 2}, lambda i, j: i // 5 == j // 5 or j % 5 >= 3),
        ("logsparse", {}, lambda i, j: i == j or abs(i - j) in powers),
        ("star", {"window_size": 1}, lambda i, j: 0 in (i, j) or on_ring(i, j, 0, 1)),
        ("star", {"window_size": 2}, lambda i, j: 0 in (i, j) or on_ring(i, j, 0, 2)),
        ("star_cycle", {"window_size": 2}, lambda i, j: last in (i, j) or on_ring(i, j, last, 2)),
        ("window", {"window_size": 0}, lambda i, j: i == j),
        ("dense", {}, lambda i, j: True),
        ("no_diag", {}, lambda i, j: i != j),
    )
    for name, parameters, definition in definitions:
        expected = by_loops(length, definition)
        assert torch.equal(head_table(name, length, **parameters), expected), name
        without = expected & ~torch.eye(length, dtype=torch.bool)
        assert torch.equal(head_table(name, length, diagonal=False, **parameters), without), name


@pytest.mark.parametrize("num_global_tokens", [0, 1, 2])
def test_window_and_bigbird_globals(num_global_tokens):
    special = (0, 18)[:num_global_tokens]
    expected = by_loops(19, lambda i, j: abs(i - j) <= 2 or i in special or j in special)
    parameters = {"window_size": 2, "num_global_tokens": num_global_tokens}
    assert torch.equal(head_table("window", 19, **parameters), expected)
    assert torch.equal(head_table("bigbird", 19, num_random_keys=0, **parameters), expected)


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("length", [1, 9, 19])
def test_cycles_by_the_paper_from_one(length, stride):
    """The sets of Eq. 4 and 5 exactly as printed, tokens counted from 1."""
    strided, fixed = ([torch.zeros(length, length, dtype=torch.bool) for _ in range(2)] for _ in range(2))
    for k in range(1, length + 1):
        segment = math.ceil(k / stride) * stride
        sets = (
            (strided[0], range(k - math.ceil(stride / 2), k + stride // 2 + 1)),
            (strided[1], range(k - length * stride, k + length * stride + 1, stride)),
            (fixed[0], range(segment - stride + 1, segment + 1)),
            (fixed[1], {k} | set(range(stride, length + 1, stride))),
        )
        for table, keys in sets:
            for key in keys:
                if 1 <= key <= length:
                    table[k - 1, key - 1] = True
    for name, expected in (("strided_cycle", strided), ("fixed_cycle", fixed)):
        table = CYCLES[name](length, stride=stride).to_table()
        assert torch.equal(table[:, 0], torch.stack(expected))


@pytest.mark.parametrize(
    "name, parameter, value, sets",
    [
        ("strided_cycle", "stride", 2, ["11... 111.. .111. ..111 ...11", "1.1.1 .1.1. 1.1.1 .1.1. 1.1.1"]),
        ("strided_cycle", "stride", 3, ["11... 111.. 1111. .1111 ..111", "1..1. .1..1 ..1.. 1..1. .1..1"]),
        ("fixed_cycle", "stride", 2, ["11... 11... ..11. ..11. ....1", "11.1. .1.1. .111. .1.1. .1.11"]),
        ("star_cycle", "window_size", 1, ["11.11 111.1 .1111 1.111 11111"]),
    ],
)
def test_head_configurations_written_out(name, parameter, value, sets):
    sets = torch.stack([matrix(text) for text in sets])
    num_sets = len(sets)

    def table(**arguments):
        return build_pattern(name, 5, 4, **arguments, **{parameter: value}).to_table()

    sequential = table(num_layers=3)
    assert torch.equal(sequential, table(num_layers=3, head_configuration="sequential"))
    for layer in range(len(sequential)):
        for head in range(4):
            assert torch.equal(sequential[layer, head], sets[layer % num_sets])
    # A single pattern is the same in all layers, so the mask is shared.
    assert len(sequential) == (3 if num_sets > 1 else 1)

    union = table(num_layers=3, head_configuration="union")
    assert torch.equal(union, sets.any(0).expand(1, 4, 5, 5))

    multihead = table(num_layers=3, head_configuration="multihead")
    assert torch.equal(multihead[0], sets.repeat_interleave(4 // num_sets, dim=0))


@pytest.mark.parametrize("name", PATTERNS)
def test_diagonal_is_never_forced(name):
    mask = build_pattern(name, 21, 4, num_layers=2)
    bare = build_pattern(name, 21, 4, num_layers=2, diagonal=False)
    eye = torch.eye(21, dtype=torch.bool)
    assert not (bare.to_table() & eye).any()
    assert torch.equal(bare.to_table() | eye, mask.to_table() | eye)


@pytest.mark.parametrize("name", RANDOM_PATTERNS)
def test_random_patterns(name):
    mask = build_pattern(name, 40, 3, seed=5)
    table = mask.to_table()[0]
    assert mask == build_pattern(name, 40, 3, seed=5)
    assert mask != build_pattern(name, 40, 3, seed=6)
    assert not any(torch.equal(table[a], table[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    state = torch.get_rng_state()
    build_pattern(name, 40, 3, seed=5)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_counts():
    length = 40
    for sparsity in (0, 0.25, 0.9, 1):
        counts = build_pattern("random", length, 3, sparsity=sparsity).to_table().sum((-1, -2))
        assert counts.eq(round((1 - sparsity) * length**2)).all()
    assert build_pattern("random_drop", length, 3).to_table().sum((-1, -2)).eq(length**2 - length).all()
    # Four different keys per query, of which one may be the query itself, where the window is.
    bigbird = build_pattern("bigbird", length, 3, window_size=0, num_global_tokens=0, num_random_keys=4)
    counts = bigbird.without_diagonal().to_table().sum(-1)
    assert set(counts.flatten().tolist()) == {3, 4}


def test_longformer_globals():
    length, size = 31, 2
    for head in build_pattern("longformer", length, 4, window_size=size, num_global_tokens=3).to_table()[0]:
        is_global = head.all(-1)
        assert is_global.sum() == 3
        positions = is_global.nonzero().flatten().tolist()
        for i in range(length):
            for j in range(length):
                assert head[i, j] == (abs(i - j) <= size or i in positions or j in positions)


@pytest.mark.parametrize("name", PATTERNS)
def test_longer_input_is_masked_by_the_definition_or_refused(name):
    short = build_pattern(name, 16, 2, num_layers=2)
    if short.length_policy == "error":
        with pytest.raises(ValueError, match="longer than the mask"):
            short.to_table(32)
    else:
        assert torch.equal(short.to_table(32), build_pattern(name, 32, 2, num_layers=2).to_table())


def test_metadata_says_where_the_mask_comes_from():
    assert build_pattern("bigbird", 16, 2, seed=3, window_size=2).metadata == {
        "pattern": "bigbird",
        "pattern_parameters": {"window_size": 2, "num_global_tokens": 2, "num_random_keys": 2},
        "pattern_seed": 3,
    }
    assert build_pattern("star_cycle", 16, 2).metadata["head_configuration"] == "sequential"


# Pattern (any will do for an argument of them all), field, value and what is allowed.
OUT_OF_RANGE = """
window window_size -1 from 0 to 15
window window_size 16 from 0 to 15
window window_size True from 0 to 15
window num_global_tokens 3 from 0 to 2
bigbird num_global_tokens 3 from 0 to 2
bigbird num_random_keys 17 from 0 to 16
bigbird window_size -1 of at least 0
longformer num_global_tokens 17 from 0 to 16
longformer window_size -1 of at least 0
strided stride 0 of at least 1
fixed stride 0 of at least 1
fixed num_summary_tokens 5 from 0 to 4
star window_size 0 of at least 1
strided_cycle stride 0 of at least 1
fixed_cycle stride 0 of at least 1
star_cycle window_size 0 of at least 1
star_cycle relay 16 from -16 to 15
random sparsity 1.01 from 0 to 1
random sparsity nan from 0 to 1
random sparsity high from 0 to 1
random seed -1 from 0
dense length 0 from 1 to 65536
dense num_heads 0 from 1 to 1024
dense num_layers 0 from 1 to 1024
"""


@pytest.mark.parametrize("case", OUT_OF_RANGE.split("\n")[1:-1])
def test_values_out_of_range(case):
    name, field, text, allowed = case.split(maxsplit=3)
    value = {"nan": math.nan, "True": True, "high": "high", "1.01": 1.01}.get(text)
    value = int(text) if value is None else value
    with pytest.raises(ValueError, match=f"{field} must be an? .* {allowed}.*, got {value!r}"):
        build_pattern(**{"name": name, "length": 16, "num_heads": 2} | {field: value})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "bigbrid"}, "did you mean 'bigbird'"),
        ({"name": "window", "window_sise": 3}, "did you mean 'window_size'"),
        ({"name": "dense", "window_size": 3}, "allowed: none"),
        ({"name": "dense", "diagonal": None}, "diagonal must be one of True, False, got None"),
        ({"name": "dense", "head_configuration": "union"}, "needs one of the patterns strided_cycle"),
        ({"name": "fixed_cycle", "head_configuration": "unoin"}, "'sequential', 'union', 'multihead', got 'unoin'"),
        ({"name": "fixed_cycle", "head_configuration": "multihead", "num_heads": 3}, "multiple of 2"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_pattern(**{"length": 16, "num_heads": 2} | arguments)
