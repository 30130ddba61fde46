"""What results say about the papers' claims, on numbers that are known."""

import json
import random

import pytest

from sparsebert.masks.patterns import build_pattern
from studies.claims import _AS_SPARSE, CLAIMS, _as_sparse, table
from studies.experiments import EXPERIMENTS
from studies.harness.claim_tests import Comparison, status, weakest
from studies.sparsebert_paper.sparsebert_table3 import MasksStudy


class Numbers(dict):
    """Any metric, drawn when it is asked for."""

    def __missing__(self, name):
        return self.setdefault(name, random.random())

    def __contains__(self, name):
        return True


def removed(cell):
    """What a pattern removes, of the cells that have one."""
    if "pattern_kwargs" not in cell or "max_length" not in cell:
        return {}
    arguments = cell["pattern_kwargs"] or {}
    if cell["head_configuration"]:
        arguments = arguments | {"head_configuration": cell["head_configuration"]}
    mask = build_pattern(cell["pattern"], cell["max_length"], cell["num_heads"], cell["num_layers"], **arguments)
    return {"sparsity": mask.sparsity}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_every_claim_finds_its_cells(claim):
    experiment = EXPERIMENTS[claim.experiment]
    settings = experiment.cells(experiment.arguments(**experiment.scales["tiny"]))
    cells = {name: {"settings": cell, "metrics": Numbers(removed(cell))} for name, cell in settings.items()}
    comparisons = claim.compare(cells)
    assert comparisons and len({comparison.label for comparison in comparisons}) == len(comparisons)
    seeds = {cell["seed"] for cell in settings.values()}
    assert all(set(comparison.seeds()) == seeds for comparison in comparisons)
    one_seed = {name: cell for name, cell in cells.items() if cell["settings"]["seed"] == min(seeds)}
    assert status(claim.compare(one_seed)) == "open"


@pytest.mark.parametrize("name", _AS_SPARSE)
def test_learned_and_manual_masks_keep_as_much(name):
    model = EXPERIMENTS["sparsebert_table3"].cells(MasksStudy(seeds=[1]))[f"{name}_seed_1"]["model"]
    manual = build_pattern(model["pattern"], 128, 12, **model["pattern_kwargs"])
    assert _AS_SPARSE[name] == pytest.approx(manual.sparsity, abs=0.011)


def compared(*differences):
    """A comparison with these differences, by seed."""
    return Comparison("one - other", dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))


def test_status():
    greater, unclear, smaller = compared(1.0, 1.1, 0.9), compared(1.0, -1.0, 0.5), compared(-1.0, -1.1, -0.9)
    assert status([greater]) == status([greater, greater]) == "confirmed"
    assert status([unclear]) == status([greater, unclear]) == "open"
    assert status([smaller]) == status([greater, unclear, smaller]) == "refuted"
    assert status([]) == status([compared(1.0)]) == status([greater, compared()]) == "open"
    assert status([smaller, compared()]) == status([smaller, compared(1.0)]) == "refuted"
    # p = 0.04: significant alone, not as one of three.
    near = compared(1.0, 1.5, 1.5, 0.2)
    assert near.test()["p"] == pytest.approx(0.04, abs=0.005) and status([near]) == "confirmed"
    assert status([near, near, near]) == "open"
    close = compared(-1.0, -1.5, -1.5, -0.2)
    assert status([close]) == "refuted" and status([close, compared()]) == "open"  # two are to be tested


def test_the_weakest_comparison_is_shown():
    assert weakest([compared(2.0), Comparison("a - b", {0: 1.5}, {0: 1.25})], 2) == "a - b = +0.25 (weakest of 2)"
    assert weakest([compared(1.0, 1.5)], 1) == "one - other = +1.2 [-1.9, +4.4], p = 0.13"
    assert weakest([compared()], 1) == "no cells that can be compared"
    assert weakest([compared(2.0), compared()], 1) == "one - other = +2.0 (1 not run)"
    single = Comparison("a - b", {0: 1.5}, {0: 1.75})
    found = "one - other = +1.2 [-1.9, +4.4], p = 0.38 (weakest of 2, 1 with one seed, 1 not run)"
    assert weakest([compared(1.0, 1.5), single, compared()], 1) == found


def level(series, number, sparsity, perplexity, seed):
    settings = {"series": series, "pattern_kwargs": {"stride": number}, "seed": seed}
    return {"settings": settings, "metrics": {"sparsity": sparsity, "perplexity": perplexity}}


def test_patterns_are_compared_where_they_are_as_sparse():
    cells = {
        f"{series}_{number}_seed_{seed}": level(series, number, sparsity, 10 * number + seed, seed)
        for series, levels in {"a": {1: 0.5, 2: 0.7, 3: 0.9}, "b": {4: 0.52, 5: 0.74, 6: 0.89, 7: 0.905}}.items()
        for number, sparsity in levels.items()
        for seed in (0, 1)
    }
    found = _as_sparse(cells, "perplexity", [("a", "b"), ("b", "a")])
    # 0.7 and 0.74 are too far apart, and 0.905 is nearer to 0.9 than 0.89.
    assert [comparison.label for comparison in found] == [
        "perplexity: a_1 - b_4", "perplexity: a_3 - b_7", "perplexity: b_4 - a_1", "perplexity: b_7 - a_3",
    ]  # fmt: skip
    assert found[0].greater == {0: 10, 1: 11} and found[0].smaller == {0: 40, 1: 41}
    (missing,) = _as_sparse(cells, "perplexity", [("a", "c")])
    assert missing.label == "perplexity: a - c, equally sparse" and status([missing]) == "open"


def test_results_fill_the_table_in(tmp_path):
    assert {(row["status"], row["found"]) for row in table(tmp_path).as_json()["rows"]} == {("open", "not run")}
    losses = {"dense": 2.0, "no_diag": 2.001, "random_drop, draw 0": 2.1, "random_drop, draw 1": 2.2}
    cells = {
        f"{system}_seed_{seed}": {
            "settings": {"system": system, "seed": seed},
            "metrics": {"mlm_loss": loss + 0.1 * seed + 0.001 * order * seed},
        }
        for seed in range(3)
        for order, (system, loss) in enumerate(losses.items())
    }
    path = tmp_path / "sparsebert_table1_tiny.json"
    for changed, found in ((0.0, "confirmed"), (0.3, "refuted")):
        for seed in range(3):
            cells[f"no_diag_seed_{seed}"]["metrics"]["mlm_loss"] += changed
        path.write_text(json.dumps({"cells": {**cells, "soft_seed_0": soft(0), "soft_seed_1": soft(1)}}))
        rows = table(tmp_path).as_json()["rows"]
        (row,) = [row for row in rows if row["paper"] == "[S] Table 1"]
        assert (row["status"], row["seeds"], row["from"]) == (found, "3", "`sparsebert_table1_tiny.json`")
        assert row["found"].startswith("loss: dense + 0.02 - no_diag = ")
    (diagonal, neighbors) = [row["status"] for row in rows if row["paper"] == "[S] Figure 2"]
    assert (diagonal, neighbors) == ("confirmed", "open")


def test_results_of_several_folders_are_read_together(tmp_path):
    (tmp_path / "float32").mkdir()

    def write(folder, targets, seeds, shift=0.0):
        cells = {
            f"{stage}_{target}_seed_{seed}": {
                "settings": {"stage": stage, "target": target, "seed": seed, "system": stage},
                "metrics": {"mlm_loss": loss + 0.1 * seed + shift},
            }
            for stage, loss in (("one_stage", 3.0), ("two_stage", 4.0), ("random", 5.0))
            for target in targets
            for seed in seeds
        }
        (tmp_path / folder / "sparsebert_figure7_tiny.json").write_text(json.dumps({"cells": cells}))

    def found():
        return [row for row in table(tmp_path).as_json()["rows"] if row["paper"] == "[S] Figure 3"][0]

    write("", (0.8, 0.9), (1, 2))
    assert "weakest of 2, 4 not run" in found()["found"]
    write("float32", (0.1, 0.3), (1,))
    assert found()["found"].endswith("(weakest of 4, 2 with one seed, 2 not run)") and found()["seeds"] == "1 to 2"
    assert found()["from"] == "`sparsebert_figure7_tiny.json`, `float32/sparsebert_figure7_tiny.json`"
    in_one_file = found()["found"]
    write("float32", (0.1, 0.3, 0.8), (1,))  # a seed that both have: that of the first
    assert found()["found"] == in_one_file
    results = json.loads((tmp_path / "sparsebert_figure7_tiny.json").read_text())
    del results["cells"]["random_0.8_seed_1"]
    (tmp_path / "sparsebert_figure7_tiny.json").write_text(json.dumps(results))
    write("float32", (0.8,), (1,), shift=1.0)  # both sides of a pair come from the same file
    assert found()["found"].startswith("loss at 80%: random - two_stage = +1.000 [")


def soft(seed):
    groups = {"diagonal": 0.1, "offset_1": 0.8, "offsets_2_3": 0.7, "offsets_4_8": 0.5, "beyond_8": 0.5}
    metrics = {f"p_{name}": value + 0.0001 * seed * place for place, (name, value) in enumerate(groups.items())}
    metrics |= {"p_special_tokens": 0.5 - 0.01 * seed}
    return {"settings": {"system": "soft", "seed": seed}, "metrics": metrics}
