"""The self-check of backends: what it notices, how its process may end, what is kept, what sparse_auto makes of it."""

import functools
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from sparsebert import SparseMask, build_pattern, sparse_dot_product_attention
from sparsebert.attention.backends import BACKENDS
from sparsebert.attention.capabilities import Request
from sparsebert.attention.choosing import choice, self_check_process, self_check_results
from sparsebert.attention.choosing.choice import CHOICES, automatic, by_measurement
from sparsebert.attention.choosing.self_check import check, examine, near_tiles, times
from sparsebert.attention.choosing.self_check_process import known_outcome, outcome_of, program, run_self_checks
from sparsebert.attention.choosing.self_check_results import (
    FINISHED,
    TRUSTED,
    Outcome,
    Setting,
    finding_of,
    read_check,
    result_file,
    write_check,
)
from sparsebert.attention.kernels import flex
from sparsebert.masks.tiles import tile_shares


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled():
    """Other tests in this process may have compiled so many kinds of inputs that `sparse_flex` is left out."""
    flex._compiled.cache_clear()


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
SETTING = Setting("float32", 16, padded=True, dropout=True, gradients=True, length=64)
ASKED = [(SETTING, ("sparse_cpu",))]
LENGTHS = (7, 70)


# What is compared


@pytest.mark.parametrize(
    "name, dtype, flags",
    [
        *(("sparse_cpu", dtype, (True, True, True)) for dtype in ("float32", "bfloat16", "float16")),
        *(("sparse_cpu", "float32", flags) for flags in ((False,) * 3, (True, False, True), (False, True, True))),
        *((name, "bfloat16", (True, True, True)) for name in ("sparse_sdpa", "sparse_eager")),
        *((name, "bfloat16", (True, True, True, False, 512, 2, 0, True)) for name in ("sparse_cpu", "sparse_sdpa")),
        *(
            (name, "bfloat16", (padded, True, True, False, 512, 2, 0, False, True))
            for name in ("sparse_cpu", "sparse_eager")
            for padded in (False, True)
        ),
    ],
    ids=str,
)
def test_right_backends_pass(name, dtype, flags):
    setting = Setting(dtype, 16, *flags)
    finding = examine(name, "cpu", setting, LENGTHS)
    assert finding["right"] and finding["reason"] is None
    compared = {"output", "output without a key"}
    compared |= {f"gradient of the {which}" for which in ("query", "key", "value")} if flags[2] else set()
    compared |= {"gradient of the bias per distance"} if setting.distances else set()
    compared |= {"dropout factor", "dropout rate", "dropout outside of the mask"} if flags[1] else set()
    assert set(finding["errors"]) == compared
    for each in finding["errors"].values():
        assert each["error"] <= each["allowed"] and each["tokens"] in LENGTHS


def changed(**fields):
    return lambda run, query, key, value, inputs, scaling, dropout: run(
        query, key, value, replace(inputs, **fields), scaling, dropout
    )


def output(change):
    def function(run, *arguments):
        result, weights = run(*arguments)
        return change(result, arguments[-1]), weights

    return function


# Ways to be wrong, and what is then found wrong.
FAULTS = {
    "a special token forgotten": (changed(last_token=None), "output"),
    "padding forgotten": (changed(padding=None), "output"),
    "the future seen": (changed(causal=False), "output"),
    "wrong by a thousandth": (output(lambda result, dropout: 1.001 * result), "output"),
    "one number missing": (
        output(lambda result, dropout: result.index_put([torch.tensor(0)] * 4, torch.tensor(torch.nan))),
        "output",
    ),
    "something where nothing is seen": (output(lambda result, dropout: result + 1e-7), "output without a key"),
    "no dropout": (lambda run, *arguments: run(*arguments[:-1], 0.0), "dropout factor"),
    "dropout not made up for": (output(lambda result, dropout: result * (1 - dropout)), "dropout factor"),
    "too much dropout": (
        lambda run, *arguments: output(lambda result, dropout: result * (1 - 0.5) / (1 - dropout))(
            lambda *inner: run(*inner[:-1], 0.5), *arguments
        ),
        "dropout rate",
    ),
    "a wrong gradient": (
        output(lambda result, dropout: 1.01 * result - 0.01 * result.detach()),
        "gradient of the value",
    ),
    "half of the distances": (
        lambda run, *arguments: changed(
            distance_bias=tuple(one if one is None else one / 2 for one in arguments[3].distance_bias)
        )(run, *arguments),
        "gradient of the bias per distance",
    ),
    "a heavier rest": (
        lambda run, *arguments: changed(rest=tuple(one if one is None else one + 0.1 for one in arguments[3].rest))(
            run, *arguments
        ),
        "output",
    ),
}


def examined(monkeypatch, function):
    backend = BACKENDS["sparse_cpu"]
    faulty = replace(backend, function=functools.partial(function, backend.function))
    monkeypatch.setitem(BACKENDS, "sparse_cpu", faulty)
    return examine("sparse_cpu", "cpu", replace(SETTING, distances=True, rest=True), LENGTHS)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, monkeypatch):
    function, what = FAULTS[fault]
    finding = examined(monkeypatch, function)
    worst = finding["errors"][what]
    assert not finding["right"] and not worst["error"] <= worst["allowed"]
    assert re.match(r"[a-z ]+ at (7|70) tokens is off by (nan|[\d.e+-]+), allowed [\d.e+-]+$", finding["reason"])


def test_an_error_is_a_fault(monkeypatch):
    def raising(run, *arguments):
        raise RuntimeError("no such kernel\nCUDA error: an illegal memory access was encountered")

    finding = examined(monkeypatch, raising)
    assert not finding["right"]
    assert finding["reason"] == "RuntimeError: no such kernel ... CUDA error: an illegal memory access was encountered"


def test_every_step_is_said_and_the_outcome_at_the_end():
    said = []
    check(
        "cpu",
        SETTING,
        ("sparse_cpu", TRUSTED),
        lambda outcome: said.append(json.dumps(outcome.as_json())),
        lengths=(5,),
    )
    outcomes = [Outcome.from_json(json.loads(line)) for line in said]
    steps = ["sparse_cpu at 5 tokens", "sparse_sdpa at 5 tokens", "taking times", FINISHED]
    assert [outcome.ended for outcome in outcomes] == steps
    assert [len(outcome.backends) for outcome in outcomes] == [0, 1, 2, 2]
    assert set(outcomes[-1].passed()) == {"sparse_cpu", TRUSTED} and not outcomes[-2].passed()


def test_times_of_a_mask_of_its_own_and_of_one_given(tmp_path):
    build_pattern("window", 64, 3).save_pretrained(tmp_path)
    for mask in (None, str(tmp_path)):
        found, reasons = times(["sparse_cpu", "sparse_flex"], "cpu", SETTING, mask, num_heads=2)
        assert set(found) == {"sparse_cpu"} and found["sparse_cpu"] > 0
        assert list(reasons) == ["sparse_flex"] and "dropout" in reasons["sparse_flex"]


# How a process may end

MESSAGES = """
import json, os, signal, sys
asked = json.loads(sys.argv[1])["asked"]
def say(ended="finished", right=True, reason=None, milliseconds=0.5, setting=asked[0][0], name="sparse_cpu"):
    finding = {"right": right, "reason": reason, "errors": {}, "milliseconds": milliseconds}
    content = {"setting": setting, "backends": {name: finding}, "ended": ended, "lasting": True}
    print(json.dumps(content), flush=True)
"""
PASSES = 'for setting, _ in asked: say("x", setting=setting); say(setting=setting)\n'


def ending(code, timeout=60.0, asked=ASKED):
    return run_self_checks("cpu", asked, timeout, [sys.executable, "-c", MESSAGES + code])


def test_a_process_that_passes():
    (outcome,) = ending("print('a library says hello')\n" + PASSES)
    assert outcome == Outcome(SETTING, {"sparse_cpu": finding_of(True, milliseconds=0.5)})
    assert not outcome.problems() and outcome.fastest()[0] == "sparse_cpu"


@pytest.mark.parametrize(
    "code, ended, lasting",
    [
        ('say("x at 7 tokens"); os.kill(os.getpid(), signal.SIGSEGV)', "ended by SIGSEGV (at: x at 7 t", True),
        ('say("x"); os.kill(os.getpid(), signal.SIGKILL)', "it was ended by SIGKILL (at: x)", False),
        ('say("x"); raise ValueError("one thing")', "exit code 1 (at: x): ValueError: one thing", True),
        ("import nothing_of_this_name", "exit code 1: ModuleNotFoundError", False),
        ('say("x")', "it ended with exit code 0 (at: x)", True),
    ],
    ids=["crash", "killed", "error", "import", "silence"],
)
def test_a_process_that_ends_early(code, ended, lasting):
    (outcome,) = ending(code)
    assert ended in outcome.ended and outcome.lasting == lasting and outcome.problems() == [outcome.ended]
    assert outcome.fastest() == (TRUSTED, f"the self-check failed ({outcome.ended})")


def test_a_process_that_hangs_is_ended():
    (outcome,) = ending("say(str(os.getpid())); signal.pause()", timeout=1.0)
    assert outcome.ended.startswith("it was not done after 1 s (at: ") and outcome.lasting
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.ended.split()[-1].rstrip(")")), 0)


@pytest.mark.parametrize(
    "reason, lasting", [("output at 7 tokens is off by 1", True), ("OutOfMemoryError: CUDA out of memory", False)]
)
def test_a_process_that_finds_a_fault(reason, lasting):
    """Too little memory is not for ever."""
    (outcome,) = ending(f'say(right=False, reason="{reason}", milliseconds=None)')
    assert outcome.problems() == [f"sparse_cpu: {reason}"] and outcome.lasting == lasting
    assert outcome.ended == FINISHED and outcome.fastest()[0] == TRUSTED


def test_all_that_a_process_started_is_ended(tmp_path):
    """Such as its compilers. A pipe ends when nobody holds it any more."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = f"""
held = open({str(pipe)!r}, "w")
if not os.fork():
    os.close(1)
    signal.pause()
say("x")
"""
    (outcome,) = ending(code)
    assert outcome.ended == "it ended with exit code 0 (at: x)"
    assert select.select([reading], [], [], 30)[0] and os.read(reading, 1) == b""
    os.close(reading)


@pytest.mark.parametrize("command", ["/no/such/program", None], ids=str)  # `sys.executable` may be `None`
def test_a_process_that_cannot_start(command):
    (outcome,) = run_self_checks("cpu", ASKED, 60.0, [command])
    assert outcome.ended.startswith("its process could not be started: ") and not outcome.lasting


@pytest.mark.slow
def test_the_program_ends_with_the_process_that_asked():
    text = json.dumps({"device": "cpu", "asked": [[asdict(SETTING), ["sparse_cpu"]]], "lengths": [1000] * 1000})
    with subprocess.Popen([*program(), text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert b"sparse_cpu at 1000 tokens" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(60) == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_program_on_a_device_that_is_not_there():
    (outcome,) = run_self_checks("cuda:0", ASKED, 300.0)
    assert "it ended with exit code 1: " in outcome.ended and not outcome.lasting


def test_another_process_goes_on_after_a_crash():
    """What was not begun may be done later."""
    asked = [(replace(SETTING, head_size=size), ("sparse_cpu",)) for size in (8, 16, 32, 64)]
    code = """
for setting, _ in asked:
    if setting["head_size"] == 64:
        break
    say("x", setting=setting)
    if setting["head_size"] == 16:
        os.kill(os.getpid(), signal.SIGSEGV)
    say(setting=setting)
"""
    outcomes = ending(code, asked=asked)
    assert [outcome.setting for outcome in outcomes] == [setting for setting, _ in asked]
    assert [outcome.ended == FINISHED for outcome in outcomes] == [True, False, True, False]
    assert [outcome.lasting for outcome in outcomes] == [True, True, True, False]
    assert outcomes[3].ended == "it ended with exit code 0" and not outcomes[3].backends


# What is kept


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, on disk and in this process."""
    place = functools.partial(self_check_results.cached_assets_path, assets_dir=tmp_path / "assets")
    monkeypatch.setattr(self_check_results, "cached_assets_path", place)
    monkeypatch.setattr(self_check_process, "_KNOWN", {})
    return tmp_path


ERRORS = {"output": {"tokens": 7, "error": 0.1, "allowed": 1.0}}
OUTCOME = Outcome(SETTING, {"sparse_cpu": finding_of(True, None, ERRORS, 2.0)})


def test_an_outcome_is_read_back_if_it_lasts_and_the_versions_are_the_same(cache, monkeypatch):
    write_check("cpu", replace(OUTCOME, lasting=False))
    assert read_check("cpu", SETTING) is None and not (path := result_file("cpu", SETTING)).exists()
    write_check("cpu", OUTCOME)
    assert read_check("cpu", SETTING) == OUTCOME == known_outcome("cpu", SETTING)
    assert read_check("cpu", replace(SETTING, head_size=32)) is None
    other = self_check_results.surroundings("cpu") | {"driver": "555.1"}
    monkeypatch.setattr(self_check_results, "surroundings", lambda device: other)
    assert read_check("cpu", SETTING) is None and result_file("cpu", SETTING) != path
    result_file("cpu", SETTING).write_bytes(path.read_bytes())
    assert read_check("cpu", SETTING) is None


def test_an_outcome_is_of_its_sources(tmp_path, monkeypatch):
    """In a checkout these change without a version."""
    own = Path(self_check_results.__file__)
    package = own.parents[2]
    for name in ("attention", "masks"):
        shutil.copytree(package / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(self_check_results, "__file__", str(tmp_path / own.relative_to(package)))
    kernels = "attention/kernels/"
    files = (f"{kernels}triton_steps.py", f"{kernels}csr_attention.cpp", f"{kernels}vectors.h", "masks/tiles.py")
    hashes = {self_check_results._sources.__wrapped__()}
    for number, name in enumerate(files, 2):
        with open(tmp_path / name, "a") as file:
            file.write("\n")
        hashes.add(self_check_results._sources.__wrapped__())
        assert len(hashes) == number, name


def damaged(content):
    """Contents of a file that must not be used."""
    text = json.dumps(content)
    yield from (text[: len(text) * part // 7] for part in range(7))
    yield from ("[]", "null", '"text"', "\x00\xff", "{}", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    for path, value in (
        (("outcome", "backends"), []),
        (("outcome", "backends", "sparse_cpu"), {"right": "yes"}),
        (("outcome", "backends", "sparse_cpu", "milliseconds"), "fast"),
        (("outcome", "backends", "sparse_cpu", "milliseconds"), -1.0),
        (("outcome", "backends", "sparse_cpu", "other"), 1),
        (("outcome", "ended"), None),
        (("outcome", "lasting"), "no"),
        (("outcome", "setting", "head_size"), 17),
        (("outcome", "setting"), {}),
        (("surroundings", "torch"), "1.0"),
    ):
        copy = json.loads(text)
        place = copy
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        yield json.dumps(copy)


def test_damaged_files_are_as_none(cache):
    write_check("cpu", OUTCOME)
    path = result_file("cpu", SETTING)
    content = json.loads(path.read_text())
    for text in damaged(content):
        path.write_text(text, encoding="latin-1")
        assert read_check("cpu", SETTING) is None, text
    path.unlink()
    path.mkdir()
    assert read_check("cpu", SETTING) is None
    write_check("cpu", OUTCOME)
    assert known_outcome("cpu", SETTING) is None


def checked(cache, code=PASSES, setting=SETTING, mask=None):
    """The outcome of a check, and how many have been run in all."""
    count = f"open({str(cache / 'runs')!r}, 'a').write('x')\n"
    command = [sys.executable, "-c", count + MESSAGES + code]
    outcome = outcome_of("cpu", setting, ("sparse_cpu",), mask, True, 60.0, command)
    return outcome, (cache / "runs").stat().st_size if (cache / "runs").exists() else 0


def test_a_check_is_run_once(cache, monkeypatch):
    """Also in a process that has no place to keep it."""
    assert outcome_of("cpu", SETTING, ("sparse_cpu",), may_run=False) is None
    first = checked(cache)
    assert first[1] == 1 and first[0].fastest()[0] == "sparse_cpu"
    assert checked(cache) == first
    monkeypatch.setattr(self_check_process, "_KNOWN", {})  # as in another process
    assert outcome_of("cpu", SETTING, ("sparse_cpu",), may_run=False) == first[0]
    assert checked(cache) == first
    assert checked(cache, setting=replace(SETTING, padded=False))[1] == 2
    shutil.rmtree(cache / "assets")
    (cache / "assets").write_text("in the way")
    monkeypatch.setattr(self_check_process, "_KNOWN", {})
    assert result_file("cpu", SETTING) is None
    assert checked(cache) == checked(cache) == (first[0], 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_check_of_a_gpu_that_is_not_there(cache):
    assert outcome_of("cuda:0", SETTING, ("sparse_flex",)) is None


def test_two_processes_run_one_check(cache):
    """One waits for the other and takes what it found."""
    both = multiprocessing.get_context("fork").Barrier(2)

    def run():
        both.wait(30)
        assert checked(cache)[0].fastest()[0] == "sparse_cpu"

    other = multiprocessing.get_context("fork").Process(target=run)
    other.start()
    run()
    other.join(30)
    assert other.exitcode == 0 and (cache / "runs").read_text() == "x"


def test_times_are_taken_with_the_mask(cache, monkeypatch):
    mask, copy = build_pattern("window", 64, 3), cache / "copy"
    code = f"import json, shutil, sys; shutil.copytree(json.loads(sys.argv[1])['mask'], {str(copy)!r})\n"
    assert checked(cache, code + PASSES, mask=mask)[0].ended == FINISHED and SparseMask.from_pretrained(copy) == mask
    monkeypatch.setattr(tempfile, "tempdir", str(cache / "missing"))  # as on a full disk
    outcome, _ = checked(cache, PASSES, replace(SETTING, padded=False), mask)
    assert outcome.ended.startswith("it could not be started: ") and not outcome.lasting


def test_a_failure_is_said_once_and_names_the_doctor(cache, caplog):
    self_check_process.logger.warning_once.cache_clear()
    crash = 'say("x"); os.kill(os.getpid(), signal.SIGSEGV)'
    with caplog.at_level(logging.WARNING, logger="sparsebert"):
        for _ in range(3):
            assert checked(cache, crash)[0].fastest()[0] == TRUSTED
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "SIGSEGV" in line and "`sparsebert doctor`" in line] == lines[1:2]
    assert len(lines) == 2 and lines[0].startswith("checking sparse_cpu on cpu (float32, heads of 16, padded")
    assert (cache / "runs").read_text() == "x"


# What sparse_auto makes of it

HEADS = 2
REQUEST = Request("cuda", torch.bfloat16, 1, HEADS, 500, 500, 64, index=1)
TILES = near_tiles(512, 2, HEADS)


@pytest.fixture
def finds(monkeypatch):
    """`finds(**milliseconds)`: what self-checks find, `None` for what is wrong. Returns what they are asked for."""

    def answer(outcome=Outcome, **milliseconds):
        asked = []
        findings = {name: finding_of(ms is not None, "off", milliseconds=ms) for name, ms in milliseconds.items()}

        def answer_of(device, setting, backends, mask, may_run):
            asked.append((device, setting, backends))
            return outcome(setting, findings)

        monkeypatch.setattr(choice, "outcome_of", answer_of)
        return asked

    return answer


def crashed(setting, findings):
    return Outcome(setting, findings, "it was ended by SIGSEGV")


def unknown(setting, findings):
    return None


def auto(mask=TILES, **fields):
    return automatic(mask, replace(REQUEST, **fields))


@needs_triton
@pytest.mark.parametrize(
    "triton, flex, sdpa, expected",
    [
        (1.0, 2.0, 3.0, "sparse_triton"),
        (2.0, 1.0, 3.0, "sparse_flex"),
        (2.0, 3.0, 1.0, "sparse_sdpa"),
        (None, 2.0, 3.0, "sparse_flex"),
        (None, None, 3.0, "sparse_sdpa"),
        (None, None, None, "sparse_sdpa"),
    ],
)
def test_the_fastest_right_one_wins(finds, triton, flex, sdpa, expected):
    found = {"sparse_triton": triton, "sparse_flex": flex, "sparse_sdpa": sdpa}
    finds(**found)
    name, reason = auto()
    assert name == expected
    assert all(f"{other} {ms:.3f} ms" in reason for other, ms in found.items() if ms is not None)
    assert all(other not in reason for other, ms in found.items() if ms is None)


@needs_triton
def test_many_shapes_are_not_compiled(finds):
    """What is fastest once it is compiled is not if every batch needs a compilation."""
    finds(sparse_triton=2.0, sparse_flex=1.0, sparse_sdpa=3.0)
    flex._compiled.cache_clear()
    chosen = []
    for number in range(18):
        chosen.append(auto()[0])
        flex._compiled(1, 2, 500 + number, 64)
    flex._compiled.cache_clear()
    assert chosen == ["sparse_flex"] * 17 + ["sparse_triton"]


@needs_triton
def test_nothing_is_chosen_before_its_check(finds):
    finds(unknown)
    name, reason = auto()
    assert name == "sparse_sdpa" and "no self-check of sparse_triton and sparse_flex has passed on that GPU" in reason
    finds(crashed)
    name, reason = auto()
    assert name == "sparse_sdpa" and "the self-check failed (it was ended by SIGSEGV)" in reason


@needs_triton
@pytest.mark.parametrize(
    "fields, names",
    [
        ({}, ["sparse_triton", "sparse_flex"]),
        ({"dropout": True}, ["sparse_triton"]),
        ({"dtype": torch.float32}, ["sparse_flex"]),
        ({"dtype": torch.float32, "dropout": True}, []),
        ({"head_size": 48}, ["sparse_flex"]),
        ({"num_queries": 3}, []),
        ({"num_queries": 256, "num_keys": 256}, []),
        ({"num_queries": 256, "num_keys": 256, "padded": True}, ["sparse_triton", "sparse_flex"]),
        ({"needs": frozenset({"export"})}, []),
        ({"needs": frozenset({"additive"})}, []),
    ],
    ids=str,
)
def test_what_is_asked_for(finds, fields, names):
    asked = finds(sparse_triton=1.0, sparse_flex=1.5, sparse_sdpa=2.0)
    assert auto(**fields)[0] == (names[0] if names else "sparse_sdpa")
    assert [backends for _, _, backends in asked] == [(*names, TRUSTED)] * bool(names)


@needs_triton
def test_a_mask_without_empty_tiles_is_timed_only_where_a_kernel_fuses_more(finds):
    scattered = SparseMask(torch.rand(HEADS, 512, 512) < 0.1, 512, special_tokens="first")
    asked = finds(sparse_triton=1.0, sparse_sdpa=2.0)
    for mask in (scattered, near_tiles(512, 6, HEADS)):  # of which it has 69 %
        assert auto(mask)[0] == "sparse_sdpa" and not asked
    assert auto(scattered, dropout=True)[0] == auto(scattered, padded=True)[0] == "sparse_triton"
    assert [(setting.live, setting.partial) for _, setting, _ in asked] == 2 * [(10, 10)]
    finds(sparse_triton=2.0, sparse_sdpa=1.0)
    assert auto(scattered, dropout=True)[0] == "sparse_sdpa"


@needs_triton
def test_the_setting_is_that_of_the_request(finds):
    """Times of whole tiles say nothing of partial ones, for which a kernel takes twice as long."""
    asked = finds()
    auto(dropout=True, gradients=True, padded=True)
    live = tile_shares(TILES.structure(500)[0], 64)[0]
    expected = Setting("bfloat16", 64, True, True, True, False, 512, math.ceil(10 * live))
    assert asked[0][:2] == ("cuda:1", expected)
    auto(near_tiles(505, 2, HEADS))  # which takes no longer inputs
    assert asked[1][1].length == 505
    whole = near_tiles(512, 10, HEADS)
    table = whole.structure(512)[0].clone()
    table[:, :256] &= torch.rand(256, 512) < 0.5
    for mask in (whole, SparseMask(table, 512, special_tokens="first")):
        auto(mask, num_keys=512, num_queries=512, dropout=True)
    assert [(setting.live, setting.partial) for _, setting, _ in asked[2:]] == [(10, 0), (10, 5)]
    assert Setting.of(REQUEST, 505, 0.21, 0.19) == Setting("bfloat16", 64, length=505, live=3, partial=1)
    assert Setting.of(replace(REQUEST, num_keys=77), None, 0.21, 0.19).length == 256  # each check takes a minute
    assert Setting.of(REQUEST, 505, 0.0, 0.0) == Setting("bfloat16", 64, length=505, live=0)
    request = expected.request("cuda:1", 512, 1, HEADS)
    fields = {"num_queries": 512, "num_keys": 512, "dropout": True, "gradients": True, "padded": True}
    assert request == replace(REQUEST, **fields)


@pytest.mark.parametrize("name", CHOICES)
def test_no_check_while_a_graph_is_made(name, monkeypatch):
    """An ordinary call may run one; a call that is compiled or captured may not."""
    calls = []

    def noted(mask, request, may_run):
        calls.append(may_run)
        return "sparse_eager", "asked"

    monkeypatch.setitem(CHOICES, name, noted)
    query, key, value = torch.randn(3, 2, HEADS, 12, 8).unbind(0)
    mask = SparseMask(torch.rand(HEADS, 12, 12) < 0.5, 12)

    def attention():
        return sparse_dot_product_attention(query, key, value, mask, backend=name)

    torch.compiler.reset()  # a graph made for another name would be made again, for any name
    attention()
    assert calls == [True]
    torch.compile(attention, backend="eager", fullgraph=True)()
    assert not choice._capturing("cpu") and not any(calls[1:])
    number = len(calls)
    monkeypatch.setattr(choice, "_capturing", lambda device: True)
    attention()
    assert calls[number:] == [False]


# What sparse_measure makes of it


@pytest.fixture
def timed(monkeypatch):
    """The names that are timed, each twice as fast as the one before, instead of runs on a GPU."""
    names = []

    def times_of(these, mask, request):
        names.append(tuple(these))
        return {name: 0.5**place for place, name in enumerate(these)}

    monkeypatch.setattr(choice, "_times", times_of)
    monkeypatch.setattr(choice, "_MEASURED", {})
    return names


PLAIN = ("sparse_eager", "sparse_sdpa")


@needs_triton
@pytest.mark.parametrize("right", [("sparse_triton", "sparse_flex"), ("sparse_flex",), ()], ids=str)
@pytest.mark.parametrize("length", [77, 500])
def test_only_what_has_passed_is_timed(finds, right, length, timed):
    kernels = ("sparse_triton", "sparse_flex")
    asked = finds(sparse_sdpa=3.0, **{name: 1.0 if name in right else None for name in kernels})
    request = replace(REQUEST, num_queries=length, num_keys=length)
    name, reason = by_measurement(TILES, request)
    assert timed == [(*PLAIN, *right)] and name == timed[0][-1]
    for other in set(kernels) - set(right):
        assert f"not {other}: it has not passed the self-check on that GPU" in reason
    assert [(device, backends) for device, _, backends in asked] == [("cuda:1", (*kernels, TRUSTED))]
    assert by_measurement(TILES, request) == (name, reason) and len(asked) == 1


@needs_triton
def test_what_has_not_been_checked_is_not_timed(finds, timed):
    """In float32 no check is about `sparse_triton`; with dropout none is needed."""
    for outcome in (unknown, crashed):
        finds(outcome, sparse_triton=1.0)  # as it was before the crash
        name, reason = by_measurement(TILES, replace(REQUEST, batch=len(timed) + 1))
        assert name == PLAIN[-1] and "not sparse_triton: " in reason and "not sparse_flex: " in reason
    for fields, names in (({}, ["sparse_flex"]), ({"dropout": True}, [])):
        asked = finds(sparse_flex=1.0)
        by_measurement(TILES, replace(REQUEST, dtype=torch.float32, **fields))
        assert [backends for _, _, backends in asked] == [(*names, TRUSTED)] * len(names)
    assert timed == [PLAIN, PLAIN, (*PLAIN, "sparse_flex"), PLAIN]


@needs_triton
def test_in_a_graph_only_earlier_measurements_count(finds, timed):
    """Nothing is timed, and what was chosen then does not stand for a measurement."""
    finds(unknown)
    assert by_measurement(TILES, REQUEST, may_run=False)[0] == TRUSTED and not timed
    finds(sparse_triton=1.0, sparse_flex=2.0)
    name, reason = by_measurement(TILES, REQUEST)
    assert len(timed) == 1 and name != TRUSTED
    assert by_measurement(TILES, REQUEST, may_run=False) == (name, reason) and len(timed) == 1
