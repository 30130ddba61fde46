"""The copying task: its sequences, its model, what can be reached, and that it can be learned."""

import dataclasses
import json

import pytest
import torch
from torch.testing import assert_close

from sparsebert.masks.patterns import build_pattern
from studies.other_papers.copying_task import (
    CopyingArguments,
    CopyingModel,
    copying_metrics,
    copying_sequences,
    reachable,
    run_copying,
)


SMALL = {
    "source_length": 7,
    "num_symbols": 8,
    "hidden_size": 32,
    "head_size": 8,
    "intermediate_size": 32,
    "train_size": 4000,
    "test_size": 200,
    "max_steps": 3,
    "batch_size": 64,
    "learning_rate": 1e-2,
    "warmup_steps": 10,
}
PATTERNS = [
    ("dense", None, None),
    ("strided_cycle", {"stride": 4}, "sequential"),
    ("strided_cycle", {"stride": 4}, "union"),
    ("fixed_cycle", {"stride": 4}, "multihead"),
    ("star_cycle", {"window_size": 2}, None),
    ("random", {"sparsity": 0.8}, None),
]


def test_sequences():
    sequences = copying_sequences(500, 7, 8, seed=3)
    assert torch.equal(sequences[:, :8], sequences[:, 8:]) and not sequences[:, 0].any()
    assert sequences[:, 1:8].unique().tolist() == list(range(8))
    assert torch.equal(sequences, copying_sequences(500, 7, 8, seed=3))
    assert not torch.equal(sequences, copying_sequences(500, 7, 8, seed=4))


@pytest.mark.parametrize("pattern, kwargs, configuration", PATTERNS)
def test_model_cannot_see_the_future(pattern, kwargs, configuration):
    arguments = CopyingArguments(
        **SMALL, depth=3, pattern=pattern, pattern_kwargs=kwargs, head_configuration=configuration
    )
    torch.manual_seed(0)
    model = CopyingModel(arguments)
    sequences = copying_sequences(4, 7, 8, seed=0)
    changed = sequences.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 8
    before, after = (model(ids)["logits"] for ids in (sequences, changed))
    assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-2)


def test_layers_run_through_their_own_pattern():
    """What a position depends on is what its layers' patterns connect."""
    arguments = CopyingArguments(
        **SMALL, depth=2, pattern="fixed_cycle", pattern_kwargs={"stride": 4}, head_configuration="sequential"
    )
    torch.manual_seed(0)
    model = CopyingModel(arguments)
    states = torch.randn(1, 16, 32, requires_grad=True)
    first, second = (layer.mask.to_table()[layer.layer, 0].tril() for layer in model.attention)
    for layer, table in zip(model.attention, (first, second), strict=True):
        (gradient,) = torch.autograd.grad(layer(states)[0, 14].sum(), states)
        assert (gradient[0].abs().sum(-1) > 0).tolist() == table[14].tolist()
    assert not torch.equal(first, second)


def brute_force_reachable(mask, depth, source_length):
    tables = mask.to_table().any(1)
    found = []
    for position in range(source_length + 1, 2 * source_length + 1):
        seen = {position}
        for layer in reversed(range(depth)):
            table = tables[layer % len(tables)]
            seen |= {j for i in seen for j in range(i + 1) if table[i, j]}
        found.append(position - source_length in seen)
    return sum(found) / len(found)


@pytest.mark.parametrize("pattern, kwargs, configuration", PATTERNS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reachable(pattern, kwargs, configuration, depth):
    mask = build_pattern(pattern, 16, 4, num_layers=depth, head_configuration=configuration, **(kwargs or {}))
    assert reachable(mask, depth, 7) == pytest.approx(brute_force_reachable(mask, depth, 7))


def test_reachable_at_the_papers_size():
    """What a single layer can do of [O] Table 1: 7 % with the fixed pattern, nothing with the strided one."""
    fixed = build_pattern("fixed_cycle", 256, 4, head_configuration="union", stride=16)
    strided = build_pattern("strided_cycle", 256, 4, head_configuration="union", stride=16)
    share = reachable(fixed, 1, 127)
    assert share + (1 - share) / 128 == pytest.approx(0.0702, abs=2e-3)
    assert reachable(strided, 1, 127) == 0 and reachable(strided, 3, 127) == 1


def test_metrics_tell_the_halves_apart():
    labels = copying_sequences(100, 7, 8, seed=0).numpy()
    guesses = labels.copy()
    guesses[:, :-1] = labels[:, 1:]
    guesses[:, :7] = 9  # the first half cannot be known
    prediction = type("Prediction", (), {"predictions": guesses, "label_ids": labels})
    assert copying_metrics(prediction) == {"accuracy": 8 / 15, "second_half_accuracy": 1.0}


@pytest.mark.slow
def test_copying_is_learned_where_it_can_be(tmp_path):
    learned = run_copying(CopyingArguments(**SMALL | {"max_steps": 150}), tmp_path / "dense")
    assert learned["reachable"] == 1 and learned["second_half_accuracy"] > 0.9
    assert learned["accuracy"] < 0.65
    assert json.loads((tmp_path / "dense" / "metrics.json").read_text()) == learned
    blind = CopyingArguments(**SMALL | {"max_steps": 60}, pattern="window", pattern_kwargs={"window_size": 2})
    blind = run_copying(blind, tmp_path / "window")
    assert blind["reachable"] == 0 and blind["second_half_accuracy"] < 0.25


def test_runs_are_repeatable(tmp_path):
    arguments = CopyingArguments(**SMALL, pattern="random", pattern_kwargs={"sparsity": 0.5})
    runs = [run_copying(arguments, tmp_path / str(i)) for i in range(2)]
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], abs=1e-4)
    other = run_copying(dataclasses.replace(arguments, seed=1), tmp_path / "2")
    assert other["loss"] != pytest.approx(runs[0]["loss"], abs=1e-3)
    assert dataclasses.replace(arguments, seed=1).mask() != arguments.mask() == arguments.mask()


def test_no_sequence_is_trained_on_and_tested(tmp_path, monkeypatch):
    drawn = []

    def draw(*sizes):
        drawn.append(copying_sequences(*sizes))
        return drawn[-1]

    monkeypatch.setattr("studies.other_papers.copying_task.copying_sequences", draw)
    for seed in (0, 1):
        run_copying(CopyingArguments(**SMALL | {"num_symbols": 64, "max_steps": 1}, seed=seed), tmp_path / str(seed))
    assert [len(sequences) for sequences in drawn] == [4000, 200] * 2
    assert len({tuple(row) for sequences in drawn for row in sequences.tolist()}) == 2 * 4200


def test_the_first_half_is_predicted_on_request():
    torch.manual_seed(0)
    halves = []
    for whole in (False, True):
        model = CopyingModel(CopyingArguments(**SMALL, predict_first_half=whole))
        sequences = copying_sequences(4, 7, 8, seed=0)
        output = model(sequences, sequences)
        logits, following = output["logits"][:, :-1], sequences[:, 1:]
        first = 0 if whole else 8  # the second 0, from which the second s is predicted
        expected = torch.nn.functional.cross_entropy(logits[:, first:].flatten(0, 1), following[:, first:].flatten())
        assert_close(output["loss"], expected)
        halves.append(output["loss"].item())
    assert halves[0] != halves[1]


def test_backends_agree():
    arguments = CopyingArguments(**SMALL, depth=2, pattern="star_cycle", pattern_kwargs={"window_size": 2})
    outputs = []
    for backend in ("sparse_eager", "sparse_cpu"):
        torch.manual_seed(0)
        model = CopyingModel(dataclasses.replace(arguments, attn_implementation=backend))
        outputs.append(model(copying_sequences(2, 7, 8, seed=0))["logits"])
    assert_close(*outputs)
