"""`sparsebert doctor`, and the form that asks for it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from sparsebert import build_pattern
from sparsebert.analysis import doctor
from sparsebert.analysis.doctor import Diagnosis, diagnose
from sparsebert.attention.backends import BACKENDS
from sparsebert.attention.choosing.self_check_results import FINISHED, Outcome, Setting, finding_of
from sparsebert.attention.kernels import cpu
from sparsebert.commands import main
from sparsebert.version import __version__


ROOT = Path(__file__).parents[2]
OUTCOME = Outcome(
    Setting("float32", 64, padded=True),
    {
        "sparse_cpu": finding_of(False, "output at 77 tokens is off by 1", {"output": {"error": 2.0, "allowed": 1.0}}),
        "sparse_sdpa": finding_of(True, milliseconds=0.5),
    },
)


def test_doctor_on_a_cpu(tmp_path, capsys):
    """Every backend that `sparse_auto` may choose on a CPU is compared and timed, in a real process."""
    build_pattern("window", 32, 2).save_pretrained(tmp_path)
    arguments = ["cpu", "--dtypes", "float32", "--head_sizes", "16", "--mask", str(tmp_path), "--length", "32"]
    assert main(["doctor", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["sparsebert"] == __version__ and found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cpu"] and found["machine"]["cores"] == os.cpu_count()
    assert set(found["backends"]) == set(BACKENDS) and found["device"] == "cpu" and found["problems"] == []
    assert found["backends"]["sparse_cpu"] is None and "CUDA" in found["backends"]["sparse_triton"]
    for phase, check in zip(doctor.PHASES, found["outcomes"], strict=True):
        expected = {"dtype": "float32", "head_size": 16, "length": 32, "padded": False, "dropout": False}
        assert check["setting"].items() >= (expected | {"gradients": False} | phase).items()
        assert check["ended"] == FINISHED and set(check["backends"]) == {"sparse_cpu", "sparse_sdpa"}
        for finding in check["backends"].values():
            assert finding["right"] and finding["milliseconds"] > 0
            assert all(each["error"] <= each["allowed"] for each in finding["errors"].values())


@pytest.fixture
def checked(monkeypatch):
    """`checked(outcome)`: the outcome of every self-check."""

    def make(outcome=OUTCOME):
        def run(device, asked, timeout, **options):
            return [replace(outcome, setting=setting) for setting, _ in asked]

        monkeypatch.setattr(doctor, "run_self_checks", run)

    return make


@pytest.mark.parametrize(
    "outcome, said",
    [
        (
            OUTCOME,
            ["2.00", "0.500", "problem: float32, heads of 64, padded: sparse_cpu: output at 77 tokens is off by 1"],
        ),
        (replace(OUTCOME, backends={}, ended="it was ended by SIGSEGV (at: x)"), ["it was ended by SIGSEGV (at: x)"]),
    ],
    ids=["wrong", "crash"],
)
def test_what_is_wrong_is_said_and_exits_1(checked, capsys, outcome, said):
    checked(outcome)
    assert main(["doctor", "cpu", "--dtypes", "float32"]) == 1
    printed = capsys.readouterr().out
    assert all(words in printed for words in said)


def test_a_missing_compiler_is_a_problem(checked, monkeypatch, tmp_path):
    """Where no library was installed either."""
    checked(replace(OUTCOME, backends={"sparse_sdpa": finding_of(True)}))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    caches = cpu.unavailable, cpu._operator
    for cache in caches:
        cache.cache_clear()
    try:
        found = diagnose("cpu", ("float32",))
    finally:
        for cache in caches:
            cache.cache_clear()
    assert found.problems == [f"sparse_cpu: {found.backends['sparse_cpu']}"]
    assert "there is no C++ compiler 'no-such-compiler'" in found.problems[0] and found.machine["compiler"] is None


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["mps"], "device must be one of 'cpu', 'cuda', got 'mps'"),
        (["gpu"], "device must be a device of torch, such as cpu or cuda:0, got 'gpu'"),
        (["cuda:99"], "CUDA devices or cpu, got 'cuda:99'"),
        (["--dtypes", "float64"], "dtypes must be one of 'float32', 'bfloat16', 'float16', got 'float64'"),
        (["--dtypes", "[]"], "dtypes must name at least one, got []"),
        (["--head_sizes", "[]"], "head_sizes must name at least one, got []"),
        (["--head_sizes", "0"], "head_sizes must be an integer from 1 to 1024, got 0"),
        (["--length", "0"], "length must be an integer from 1"),
        (["--timeout", "0"], "timeout must be a number of at least 1, got 0"),
    ],
)
def test_doctor_refuses(arguments, line, said):
    assert line in said(["doctor", *arguments])


def test_gpus_are_shown():
    gpu = {"name": "NVIDIA X", "capability": "9.0", "memory_bytes": 1, "driver": None}
    found = Diagnosis({"torch": None}, {"gpus": [gpu, gpu], "cpu features": ["avx2"]}, "cuda:1", {}, [OUTCOME], [])
    text = "\n".join(table.markdown() for table in found.tables())
    assert "| cuda:1 | name NVIDIA X, capability 9.0, memory_bytes 1, driver none |" in text


def test_the_form_for_reports_asks_for_it():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text())
    asked = {part["id"]: part for part in form["body"] if "id" in part}
    assert "sparsebert doctor --json" in asked["doctor"]["attributes"]["description"]
    assert asked["doctor"]["validations"]["required"] and asked["doctor"]["attributes"]["render"] == "json"
    assert form["name"] and form["description"]
