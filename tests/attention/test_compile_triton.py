"""The offline compilation of the Triton kernels, in a process without the interpreter."""

import importlib.util
import json
import os
from dataclasses import asdict

import pytest
import torch


pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"),
]


@pytest.fixture
def compiled(capsys):
    """`compiled(*arguments)`: the lines of the table as dicts; fails if a configuration does."""
    from benchmarks.compile_triton import main

    def run(*arguments):
        assert main(arguments) == 0, capsys.readouterr().err
        header, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
        return [dict(zip(header, line, strict=True)) for line in lines]

    return run


@pytest.mark.slow
def test_the_short_kernel(compiled):
    lines = compiled("--arch", "90", "--head_size", "32", "--kernel", "short_forward")
    assert [line["drop"] + line["rest"] for line in lines] == ["nono"] * 2 + ["noyes"] * 2 + ["yesno"] * 2 + [
        "yesyes"
    ] * 2
    for line in lines:
        assert line["kernel"] == "short_forward" and line["arch"] == "sm_90" and line["spill"] == "0/0"
        assert 0 < int(line["regs"]) <= 255 and int(line["wgmma"]) > 0


def test_kernels_on_lists_neither_spill_nor_wait(compiled, monkeypatch, tmp_path):
    """One of them: with all that takes registers. `--output` writes the same table."""
    from benchmarks import compile_triton
    from benchmarks.shared import report

    monkeypatch.setattr(report, "hardware", dict)

    every = compile_triton.variants

    def fullest(*args):
        return [variant for variant in every(*args) if variant.dropout and variant.rest and variant.distances]

    monkeypatch.setattr(compile_triton, "variants", fullest)
    words = ("--arch", "80", "--head_size", "32", "--kernel", "forward", "--output", str(tmp_path / "table"))
    (line,) = compiled(*words)
    assert line["spill"] == "0/0" and float(line["ahead"]) >= 1
    (cell,) = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert cell["registers"] == int(line["regs"]) and cell["spills"] == [0, 0] and cell["dropout"] and cell["rest"]


def test_the_committed_table_is_of_these_configurations():
    from benchmarks.compile_triton import ARCHS, HEAD_SIZES, variants
    from benchmarks.shared.report import RESULTS

    names = ("kernel", "arch", "head_size", "dropout", "rest", "distances", "rows", "warps", "stages", "step", "limit")
    wanted = [[asdict(variant)[name] for name in names] for variant in variants(ARCHS, [torch.bfloat16], HEAD_SIZES)]
    cells = json.loads((RESULTS / "compile_triton.json").read_text())["cells"]
    assert [[cell[name] for name in names] for cell in cells] == wanted, "see docs/kernels.md for the command"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100"])
def test_all_that_may_be_chosen(compiled, arch, dtype):
    assert len(compiled("--arch", arch, "--dtype", dtype)) > 10


def test_faults_are_named():
    from benchmarks.compile_triton import Compiled, Variant, faults
    from benchmarks.shared.ptx import Loop

    body = ("cp.async.wait_group {}", "mma.sync.m16n8k16", "cp.async.cg.shared.global", "cp.async.commit_group")
    late, early = (Loop(tuple(part.format(waiting) for part in body)) for waiting in (0, 1))
    forward = Variant("forward", 80, torch.bfloat16, 64, False, 4, 3, 64)
    short = Variant("short_forward", 80, torch.bfloat16, 64, False, 4, 3, 64)
    assert not faults(forward, Compiled(255, (0, 0), 163 * 1024, 0, (early,)))
    assert faults(forward, Compiled(255, (4, 8), 0, 0, (early,))) == ["spills registers to memory"]
    assert "shared memory" in faults(forward, Compiled(255, (0, 0), 163 * 1024 + 1, 0, (early,)))[0]
    waits = "waits for copies that it has only just started"
    assert faults(forward, Compiled(255, (0, 0), 0, 0, (early, late))) == [waits]
    assert faults(forward, Compiled(255, (0, 0), 0, 0, ())) == [waits]
    blackwell = Variant("forward", 100, torch.bfloat16, 64, False, 4, 3, 64)
    assert not faults(blackwell, Compiled(255, (0, 0), 0, 0, (early,)))
    assert faults(blackwell, Compiled(255, (0, 0), 0, 0, (early, late))) == [waits]
    assert not faults(short, Compiled(255, (0, 0), 0, 0, ()))
