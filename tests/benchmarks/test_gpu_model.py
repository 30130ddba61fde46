"""The model of the GPU kernels: what it counts, and what its file holds."""

import json

import pytest
import torch

from benchmarks.gpu import model
from benchmarks.gpu.model import GPUS, Gpu, Kernel, Step, compared, duration, makespan, mask_counts, predicted


GPU = Gpu(90, 4, 1e9, 4096, 128, 64, 16, 227 * 1024, 1e15, 1e15)
STEP = Step({"matrix": 100.0, "issue": 40.0}, 250.0, 16384)


def test_programs_follow_each_other():
    assert makespan([3.0, 1.0, 1.0, 1.0], 2) == 3
    assert makespan([1.0, 1.0, 1.0, 3.0], 2) == 4
    assert makespan([2.0], 8) == 2


def test_a_step_waits_for_itself_or_for_the_others():
    assert duration(STEP, 1) == (250, "latency")
    assert duration(STEP, 4) == (400, "matrix")


def test_what_decides():
    kernel = Kernel(4, STEP, STEP)
    blocks = [10] * 64
    seconds, bound = predicted(kernel, blocks, [0] * 64, 0, 2, GPU, 0)
    assert bound == "matrix" and seconds > 8 * 10 * 400e-9
    assert predicted(kernel, blocks, [0] * 64, 0, 2, GPU, 1e15)[1] == "memory"
    slow = Gpu(90, 4, 1e9, 4096, 128, 64, 16, 227 * 1024, 1e15, 1e9)
    assert predicted(kernel, blocks, [0] * 64, 0, 2, slow, 0)[1] == "cache"
    half, _ = predicted(kernel, [5] * 64, [0] * 64, 0, 2, GPU, 0)
    assert seconds / 2 < half < seconds
    special, _ = predicted(Kernel(4, STEP, STEP, STEP), blocks, [0] * 64, 16, 2, GPU, 0)
    assert special > seconds


def test_tiles_are_those_of_the_mask():
    found, live = mask_counts("toeplitz64:0.2", 1024)
    mask = model.build_mask("toeplitz64:0.2", 1024, 12)
    table = mask.structure(1024)[0]
    tiles = table.view(12, 16, 64, 16, 64).any(4).any(2)
    assert torch.equal(torch.tensor(found["rows"][0]).view(12, 16), tiles.sum(-1))
    assert torch.equal(torch.tensor(found["columns"][0]).view(12, 16), tiles.sum(-2))
    assert not any(found["rows"][1]) and live == pytest.approx(tiles.float().mean().item()) and 0.15 < live <= 0.2
    # FlexAttention also visits the first and the last row and column.
    tiles[:, 0] = tiles[:, -1] = tiles[:, :, 0] = tiles[:, :, -1] = True
    full, partial = (torch.tensor(counts).view(12, 16) for counts in found[64])
    assert torch.equal(full + partial, tiles.sum(-1)) and partial.sum() > 12 * 16


def test_the_file_holds_what_the_program_assumes():
    report = json.loads(model.PATH.read_text())
    assert report["assumptions"] == model.ASSUMPTIONS and set(report["gpus"]) == set(GPUS)
    wanted = {(gpu, name, n) for gpu in GPUS for name, lengths in model.MASKS.items() for n in lengths}
    assert {(cell["gpu"], cell["mask"], cell["n"]) for cell in report["cells"]} == wanted
    # Where the factor is set the model is right by definition; elsewhere it must be near.
    for n, (published, modeled) in report["check"].items():
        assert modeled == pytest.approx(published, rel=1e-6 if int(n) == model.FITTED else 0.15)


def test_prediction_against_truth(tmp_path, capsys):
    report = json.loads(model.PATH.read_text())
    cell = next(cell for cell in report["cells"] if cell["gpu"] == "H200" and cell["mask"] == "toeplitz64")
    measured = {
        "mask": "toeplitz64", "n": cell["n"], "phase": cell["phase"], "dtype": "bfloat16", "padded": False,
        "heads": 12, "batch": 2 * 16384 // cell["n"],
        "systems": {"sparse_triton": {"median_ms": 4e3 * cell["seconds"]}, "eager": {"median_ms": 1.0}},
    }  # fmt: skip
    other = measured | {"dtype": "float16"}
    result = {"machine": {"gpu": "NVIDIA H200"}, "reports": {"1": {"cells": [measured, other]}}}
    (tmp_path / "2.json").write_text(json.dumps(result))
    (row,) = compared(tmp_path, report)
    assert row[:5] == ["H200", "sparse_triton", "toeplitz64", cell["n"], cell["phase"]] and row[-1] == "0.50"
    assert model.main(["--compare", str(tmp_path)]) == 0 and "| 0.50 |" in capsys.readouterr().out
    result["machine"]["gpu"] = "NVIDIA T4"
    (tmp_path / "2.json").write_text(json.dumps(result))
    assert compared(tmp_path, report) == [] and model.main(["--compare", str(tmp_path)]) == 1
