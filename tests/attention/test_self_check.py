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
from sparsebert.attention.choosing.choice import CHOICES, by_earlier_measurement, by_measurement, by_table
from sparsebert.attention.choosing.self_check import examine, near_tiles, request_of, times
from sparsebert.attention.choosing.self_check_process import found_out, known_outcome, program, run_self_checks
from sparsebert.attention.choosing.self_check_results import (
    FINISHED,
    TRUSTED,
    Finding,
    Order,
    Outcome,
    Setting,
    read_check,
    result_file,
    setting_for,
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
ORDER = Order("cpu", SETTING, ("sparse_cpu",), lengths=(7, 70))
# Padding, dropout and gradients.
PHASES = ((False, False, False), (True, False, True), (False, True, True), (True, True, True))


# What is compared


@pytest.mark.parametrize("phase", PHASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["sparse_cpu", "sparse_sdpa", "sparse_eager"])
def test_right_backends_pass(name, dtype, phase):
    finding = examine(name, replace(ORDER, setting=Setting(dtype, 16, *phase)))
    assert finding.right and finding.reason is None
    compared = {"output", "output without a key"}
    compared |= {f"gradient of the {which}" for which in ("query", "key", "value")} if phase[2] else set()
    compared |= {"dropout factor", "dropout rate", "dropout outside of the mask"} if phase[1] else set()
    assert set(finding.errors) == compared
    assert all(each["error"] <= each["allowed"] and each["tokens"] in (7, 70) for each in finding.errors.values())


def changed(**fields):
    return lambda run, query, key, value, inputs, scaling, dropout: run(
        query, key, value, replace(inputs, **fields), scaling, dropout
    )


def output(change):
    def function(run, *arguments):
        result, weights = run(*arguments)
        return change(result, arguments[-1]), weights

    return function


def one_nan(result, dropout):
    result = result.clone()
    result[0, -1, 0, 0] = torch.nan
    return result


def raising(run, *arguments):
    raise RuntimeError("no such kernel\nCUDA error: an illegal memory access was encountered")


# Ways to be wrong, and what is then found wrong.
FAULTS = {
    "a special token forgotten": (changed(last_token=None), "output"),
    "padding forgotten": (changed(padding=None), "output"),
    "the future seen": (changed(causal=False), "output"),
    "wrong by a thousandth": (output(lambda result, dropout: 1.001 * result), "output"),
    "one number missing": (output(one_nan), "output"),
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
}


def examined(monkeypatch, function):
    backend = BACKENDS["sparse_cpu"]
    faulty = replace(backend, function=functools.partial(function, backend.function))
    monkeypatch.setitem(BACKENDS, "sparse_cpu", faulty)
    return examine("sparse_cpu", ORDER)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, monkeypatch):
    function, what = FAULTS[fault]
    finding = examined(monkeypatch, function)
    worst = finding.errors[what]
    assert not finding.right and not worst["error"] <= worst["allowed"]
    assert re.match(r"[a-z ]+ at (7|70) tokens is off by (nan|[\d.e+-]+), allowed [\d.e+-]+$", finding.reason)


def test_an_error_is_a_fault(monkeypatch):
    finding = examined(monkeypatch, raising)
    assert not finding.right
    assert finding.reason == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_what_is_about_to_be_done_is_said():
    said = []
    examine("sparse_cpu", ORDER, said.append)
    assert said == ["sparse_cpu at 7 tokens", "sparse_cpu at 70 tokens"]


def test_times_of_a_mask_of_its_own_and_of_one_given(tmp_path):
    build_pattern("window", 64, 3).save_pretrained(tmp_path)
    for order in (replace(ORDER, num_heads=2), replace(ORDER, mask=str(tmp_path))):
        found, reasons = times(["sparse_cpu", "sparse_flex"], order)
        assert set(found) == {"sparse_cpu"} and found["sparse_cpu"] > 0
        assert list(reasons) == ["sparse_flex"] and "dropout" in reasons["sparse_flex"]


@pytest.mark.parametrize("live", [1, 2, 6, 10])
def test_near_tiles_have_about_the_share_that_is_asked_for(live):
    mask = near_tiles(1024, live, 2)
    share = mask.structure(1024)[0].float().mean().item()
    assert share == pytest.approx(live / 10, abs=0.11)


# How a process may end

MESSAGES = """
import json, os, signal, sys
orders = json.loads(sys.argv[1])
def say(**message):
    print(json.dumps(message), flush=True)
RIGHT = {"right": True, "reason": None, "errors": {}, "milliseconds": 0.5}
"""
PASSES = MESSAGES + 'for order in orders: say(doing="x"); say(backend="sparse_cpu", finding=RIGHT); say(done=True)\n'


def ending(code, timeout=60.0, orders=(ORDER,)):
    return run_self_checks(orders, timeout, [sys.executable, "-c", MESSAGES + code])


def test_a_process_that_passes():
    (outcome,) = run_self_checks([ORDER], 60.0, [sys.executable, "-c", "print('a library says hello')\n" + PASSES])
    assert outcome == Outcome(SETTING, {"sparse_cpu": Finding(True, milliseconds=0.5)})
    assert not outcome.problems() and outcome.fastest()[0] == "sparse_cpu"


@pytest.mark.parametrize(
    "code, ended, lasting",
    [
        ('say(doing="x at 7 tokens"); os.kill(os.getpid(), signal.SIGSEGV)', "ended by SIGSEGV (at: x at 7 t", True),
        ('say(doing="x"); os.kill(os.getpid(), signal.SIGKILL)', "it was ended by SIGKILL (at: x)", False),
        ('say(doing="x"); raise ValueError("one thing")', "exit code 1 (at: x): ValueError: one thing", True),
        ("import nothing_of_this_name", "exit code 1: ModuleNotFoundError", False),
        ('say(doing="x")', "it ended with exit code 0 (at: x)", True),
    ],
    ids=["crash", "killed", "error", "import", "silence"],
)
def test_a_process_that_ends_early(code, ended, lasting):
    (outcome,) = ending(code)
    assert ended in outcome.ended and outcome.lasting == lasting and outcome.problems() == [outcome.ended]
    assert outcome.fastest() == (TRUSTED, f"the self-check failed ({outcome.ended})")


def test_a_process_that_hangs_is_ended():
    (outcome,) = ending("say(doing=str(os.getpid())); signal.pause()", timeout=1.0)
    assert outcome.ended.startswith("it was not done after 1 s (at: ") and outcome.lasting
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.ended.split()[-1].rstrip(")")), 0)


def test_a_process_that_reports_wrong_numbers():
    wrong = {"right": False, "reason": "output at 7 tokens is off by 1"}
    (outcome,) = ending(
        f'say(backend="sparse_triton", finding={wrong}); say(backend="sparse_sdpa", finding=RIGHT); say(done=True)'
    )
    assert outcome.problems() == ["sparse_triton: output at 7 tokens is off by 1"]
    assert outcome.ended == FINISHED and outcome.fastest()[0] == TRUSTED


def test_too_little_memory_is_not_for_ever():
    wrong = {"right": False, "reason": "OutOfMemoryError: CUDA out of memory"}
    (outcome,) = ending(f'say(backend="sparse_triton", finding={wrong}); say(done=True)')
    assert not outcome.lasting


def test_all_that_a_process_started_is_ended(tmp_path):
    """Such as its compilers. A pipe ends when nobody holds it any more."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = f"""
held = open({str(pipe)!r}, "w")
if not os.fork():
    os.close(1)
    signal.pause()
say(doing="x")
"""
    (outcome,) = ending(code)
    assert outcome.ended == "it ended with exit code 0 (at: x)"
    assert select.select([reading], [], [], 30)[0] and os.read(reading, 1) == b""
    os.close(reading)


def test_what_was_not_begun_may_be_done_later():
    orders = [ORDER, replace(ORDER, setting=replace(SETTING, head_size=32))]
    code = 'say(doing="x"); say(backend="sparse_cpu", finding=RIGHT); say(done=True)'
    first, second = ending(code, orders=orders)
    assert first.ended == FINISHED and first.lasting
    assert second == Outcome(orders[1].setting, {}, "it ended with exit code 0", lasting=False)


@pytest.mark.parametrize("program", ["/no/such/program", None], ids=str)  # `sys.executable` may be `None`
def test_a_process_that_cannot_start(program):
    (outcome,) = run_self_checks([ORDER], 60.0, [program])
    assert outcome.ended.startswith("its process could not be started: ") and not outcome.lasting


@pytest.mark.slow
def test_the_program_ends_with_the_process_that_asked():
    orders = json.dumps([asdict(replace(ORDER, lengths=(1000,) * 1000))])
    with subprocess.Popen([*program(), orders], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert b"sparse_cpu at 1000 tokens" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(60) == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_program_on_a_device_that_is_not_there():
    (outcome,) = run_self_checks([replace(ORDER, device="cuda:0")], 300.0)
    assert "it ended with exit code 1: " in outcome.ended and not outcome.lasting


def test_another_process_goes_on_after_a_crash():
    orders = [replace(ORDER, setting=replace(SETTING, head_size=size)) for size in (8, 16, 32)]
    code = """
for order in orders:
    say(doing="x")
    if order["setting"]["head_size"] == 16:
        os.kill(os.getpid(), signal.SIGSEGV)
    say(backend="sparse_cpu", finding=RIGHT)
    say(done=True)
"""
    outcomes = ending(code, orders=orders)
    assert [outcome.setting for outcome in outcomes] == [order.setting for order in orders]
    assert [outcome.ended == FINISHED for outcome in outcomes] == [True, False, True]
    assert [bool(outcome.backends) for outcome in outcomes] == [True, False, True]


# What is kept


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, on disk and in this process."""
    place = functools.partial(self_check_results.cached_assets_path, assets_dir=tmp_path / "assets")
    monkeypatch.setattr(self_check_results, "cached_assets_path", place)
    monkeypatch.setattr(self_check_process, "_KNOWN", {})
    return tmp_path


ERRORS = {"output": {"tokens": 7, "error": 0.1, "allowed": 1.0}}
OUTCOME = Outcome(SETTING, {"sparse_cpu": Finding(True, None, ERRORS, 2.0)})


def test_an_outcome_is_read_back(cache):
    assert read_check("cpu", SETTING) is None
    write_check("cpu", OUTCOME)
    assert read_check("cpu", SETTING) == OUTCOME == known_outcome("cpu", SETTING)
    assert read_check("cpu", replace(SETTING, head_size=32)) is None
    assert Outcome.from_json(json.loads(json.dumps(OUTCOME.as_json()))) == OUTCOME


def test_an_outcome_is_of_its_versions(cache, monkeypatch):
    write_check("cpu", OUTCOME)
    path = result_file("cpu", SETTING)
    other = self_check_results.surroundings("cpu") | {"driver": "555.1"}
    monkeypatch.setattr(self_check_results, "surroundings", lambda device: other)
    assert read_check("cpu", SETTING) is None and result_file("cpu", SETTING) != path
    result_file("cpu", SETTING).write_bytes(path.read_bytes())
    assert read_check("cpu", SETTING) is None


def damaged(content):
    """Contents of a file that must not be used."""
    text = json.dumps(content)
    yield from (text[: len(text) * part // 7] for part in range(7))
    yield from ("[]", "null", '"text"', "\x00\xff", "{}")
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


def test_what_does_not_last_is_not_kept(cache):
    write_check("cpu", replace(OUTCOME, lasting=False))
    assert not result_file("cpu", SETTING).exists()


def checked(cache, code=PASSES, order=ORDER):
    """The result of `found_out`, and how many checks have been run in all."""
    count = f"open({str(cache / 'runs')!r}, 'a').write('x')\n"
    outcome = found_out(order, timeout=60.0, command=[sys.executable, "-c", count + code])
    return outcome, (cache / "runs").stat().st_size


def test_a_check_is_run_once(cache, monkeypatch):
    first = checked(cache)
    assert first[1] == 1 and first[0].fastest()[0] == "sparse_cpu"
    assert checked(cache) == first
    monkeypatch.setattr(self_check_process, "_KNOWN", {})  # as in another process
    assert checked(cache) == first
    assert checked(cache, order=replace(ORDER, setting=replace(SETTING, padded=False)))[1] == 2


def test_a_check_is_run_once_in_a_process_without_a_cache(cache):
    (cache / "assets").write_text("in the way")
    assert result_file("cpu", SETTING) is None
    first = checked(cache)
    assert first[1] == 1 and checked(cache) == first


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


def test_times_are_taken_with_the_mask(cache):
    mask, copy = build_pattern("window", 64, 3), cache / "copy"
    code = f"import json, shutil, sys; shutil.copytree(json.loads(sys.argv[1])[0]['mask'], {str(copy)!r})\n"
    outcome = found_out(ORDER, mask, 60.0, [sys.executable, "-c", code + PASSES])
    assert outcome.ended == FINISHED and SparseMask.from_pretrained(copy) == mask


def test_a_mask_that_cannot_be_written_is_no_error(cache, monkeypatch):
    """As on a full disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(cache / "missing"))
    outcome = found_out(ORDER, TILES, 60.0, [sys.executable, "-c", PASSES])
    assert outcome.ended.startswith("it could not be started: ") and not outcome.lasting


def test_a_failure_is_said_once_and_names_the_doctor(cache, caplog):
    self_check_process.logger.warning_once.cache_clear()
    crash = MESSAGES + 'say(doing="x"); os.kill(os.getpid(), signal.SIGSEGV)'
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


def outcome_of(asked=(), **milliseconds):
    """A function that answers with these times and notes what it is asked."""
    findings = {name: Finding(ms is not None, "off", milliseconds=ms) for name, ms in milliseconds.items()}

    def ask(order, mask):
        asked.append(order)
        return Outcome(order.setting, findings)

    return ask


def auto(ask, mask=TILES, **fields):
    return by_table(mask, replace(REQUEST, **fields), ask)


@needs_triton
@pytest.mark.parametrize(
    "found, expected",
    [
        ({"sparse_triton": 1.0, "sparse_flex": 2.0, "sparse_sdpa": 3.0}, "sparse_triton"),
        ({"sparse_triton": 2.0, "sparse_flex": 1.0, "sparse_sdpa": 3.0}, "sparse_flex"),
        ({"sparse_triton": 2.0, "sparse_flex": 3.0, "sparse_sdpa": 1.0}, "sparse_sdpa"),
        ({"sparse_triton": None, "sparse_flex": 2.0, "sparse_sdpa": 3.0}, "sparse_flex"),
        ({"sparse_triton": None, "sparse_flex": None, "sparse_sdpa": 3.0}, "sparse_sdpa"),
        ({"sparse_triton": None, "sparse_flex": None, "sparse_sdpa": None}, "sparse_sdpa"),
    ],
    ids=str,
)
def test_the_fastest_right_one_wins(found, expected):
    name, reason = auto(outcome_of([], **found))
    assert name == expected
    assert all(f"{other} {ms:.3f} ms" in reason for other, ms in found.items() if ms is not None)
    assert all(other not in reason for other, ms in found.items() if ms is None)


@needs_triton
def test_many_shapes_are_not_compiled():
    """What is fastest once it is compiled is not if every batch needs a compilation."""
    found = {"sparse_triton": 2.0, "sparse_flex": 1.0, "sparse_sdpa": 3.0}
    flex._compiled.cache_clear()
    chosen = []
    for number in range(18):
        chosen.append(auto(outcome_of([], **found))[0])
        flex._compiled(1, 2, 500 + number, 64)
    flex._compiled.cache_clear()
    assert chosen == ["sparse_flex"] * 17 + ["sparse_triton"]


@needs_triton
def test_nothing_is_chosen_before_its_check():
    name, reason = auto(lambda order, mask: None)
    assert name == "sparse_sdpa" and "no self-check of sparse_triton and sparse_flex has passed on that GPU" in reason
    name, reason = auto(lambda order, mask: Outcome(order.setting, {}, "it was ended by SIGSEGV"))
    assert name == "sparse_sdpa" and "the self-check failed (it was ended by SIGSEGV)" in reason


@needs_triton
@pytest.mark.parametrize(
    "fields, asked",
    [
        ({}, ["sparse_triton", "sparse_flex"]),
        ({"dropout": True}, ["sparse_triton"]),
        ({"dtype": torch.float32}, ["sparse_flex"]),
        ({"dtype": torch.float32, "dropout": True}, []),
        ({"head_size": 48}, ["sparse_flex"]),
        ({"num_queries": 3}, []),
        ({"num_queries": 256, "num_keys": 256, "padded": True}, []),
        ({"needs": frozenset({"export"})}, []),
        ({"needs": frozenset({"additive"})}, []),
    ],
    ids=str,
)
def test_what_is_asked_for(fields, asked):
    orders = []
    name, _ = auto(outcome_of(orders, sparse_triton=1.0, sparse_flex=1.5, sparse_sdpa=2.0), **fields)
    assert [order.backends for order in orders] == [(*asked, TRUSTED)] * bool(asked)
    assert name == (asked[0] if asked else "sparse_sdpa")


@needs_triton
def test_a_mask_without_empty_tiles_is_timed_only_where_a_kernel_fuses_more():
    scattered = SparseMask(torch.rand(HEADS, 512, 512) < 0.1, 512, special_tokens="first")
    orders = []
    ask = outcome_of(orders, sparse_triton=1.0, sparse_sdpa=2.0)
    for mask in (scattered, near_tiles(512, 6, HEADS)):  # of which it has 69 %
        assert auto(ask, mask)[0] == "sparse_sdpa" and not orders
    assert auto(ask, scattered, dropout=True)[0] == auto(ask, scattered, padded=True)[0] == "sparse_triton"
    slow = outcome_of(orders, sparse_triton=2.0, sparse_sdpa=1.0)
    assert auto(slow, scattered, dropout=True)[0] == "sparse_sdpa"
    assert [(order.setting.live, order.setting.partial) for order in orders] == 3 * [(10, 10)]


@needs_triton
def test_times_of_whole_tiles_say_nothing_of_partial_ones():
    """A kernel takes twice as long for those. `sparsebert doctor` takes times with whole tiles."""
    whole = near_tiles(512, 10, HEADS)
    table = whole.structure(512)[0].clone()
    table[:, :256] &= torch.rand(256, 512) < 0.5
    fields, orders, known = {"num_keys": 512, "num_queries": 512, "dropout": True}, [], {}

    def ask(order, mask):
        orders.append(order)
        return known.get(order.setting)

    auto(ask, whole, **fields)
    setting = orders[0].setting
    known[setting] = Outcome(setting, {"sparse_triton": Finding(True, milliseconds=1.0)})
    assert auto(ask, whole, **fields)[0] == "sparse_triton"
    assert auto(ask, SparseMask(table, 512, special_tokens="first"), **fields)[0] == "sparse_sdpa"
    assert [(order.setting.live, order.setting.partial) for order in orders] == [(10, 0), (10, 0), (10, 5)]


@needs_triton
def test_the_setting_is_that_of_the_request():
    orders = []
    auto(outcome_of(orders), dropout=True, gradients=True, padded=True)
    assert orders[0].device == "cuda:1"
    live = tile_shares(TILES.structure(500)[0], 64)[0]
    assert orders[0].setting == Setting("bfloat16", 64, True, True, True, False, 512, math.ceil(10 * live))
    auto(outcome_of(orders), near_tiles(505, 2, HEADS))  # which takes no longer inputs
    assert orders[1].setting.length == 505
    assert setting_for(REQUEST, 505, 0.21, 0.19) == Setting("bfloat16", 64, length=505, live=3, partial=1)
    assert setting_for(REQUEST, 505, 0.0, 0.0) == Setting("bfloat16", 64, length=505, live=0)
    request = request_of("cuda:1", orders[0].setting, 512)
    assert request.on_device() == torch.device("cuda:1") and request.dtype == torch.bfloat16 and request.padded


@pytest.mark.parametrize("name", CHOICES)
def test_no_check_while_a_graph_is_made(name, monkeypatch):
    """An ordinary call may run one; a call that is compiled or captured may not."""
    calls = []

    def noted(mask, request):
        calls.append(request)
        return "sparse_eager", "asked"

    monkeypatch.setitem(CHOICES, name, noted)
    query, key, value = torch.randn(3, 2, HEADS, 12, 8).unbind(0)
    mask = SparseMask(torch.rand(HEADS, 12, 12) < 0.5, 12)

    def attention():
        return sparse_dot_product_attention(query, key, value, mask, backend=name)

    torch.compiler.reset()  # a graph made for another name would be made again, for any name
    attention()
    assert len(calls) == 1
    torch.compile(attention, backend="eager", fullgraph=True)()
    assert len(calls) == 1
    assert not choice._capturing("cpu")
    monkeypatch.setattr(choice, "_capturing", lambda device: True)
    attention()
    assert len(calls) == 1


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
@pytest.mark.parametrize(
    "found, right",
    [
        ({"sparse_triton": 1.0, "sparse_flex": 2.0, "sparse_sdpa": 3.0}, ("sparse_triton", "sparse_flex")),
        ({"sparse_triton": None, "sparse_flex": 2.0, "sparse_sdpa": 3.0}, ("sparse_flex",)),
        ({"sparse_triton": None, "sparse_flex": None, "sparse_sdpa": 3.0}, ()),
        ({}, ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [77, 500])
def test_only_what_has_passed_is_timed(found, right, length, timed):
    orders = []
    request = replace(REQUEST, num_queries=length, num_keys=length)
    name, reason = by_measurement(TILES, request, outcome_of(orders, **found))
    assert timed == [(*PLAIN, *right)] and name == timed[0][-1]
    for other in {"sparse_triton", "sparse_flex"} - set(right):
        assert f"not {other}: it has not passed the self-check on that GPU" in reason
    (order,) = orders
    assert order.backends == ("sparse_triton", "sparse_flex", TRUSTED) and order.device == "cuda:1"
    assert by_measurement(TILES, request, outcome_of(orders)) == (name, reason) and len(orders) == 1


@needs_triton
def test_nothing_is_timed_before_its_check(timed):
    passed = {"sparse_triton": Finding(True, milliseconds=1.0)}  # before the check crashed
    for ask in (
        lambda order, mask: None,
        lambda order, mask: Outcome(order.setting, passed, "it was ended by SIGSEGV"),
    ):
        name, reason = by_measurement(TILES, REQUEST, ask)
        assert name == PLAIN[-1] and "not sparse_triton: " in reason and "not sparse_flex: " in reason
        choice._MEASURED.clear()
    assert timed == [PLAIN, PLAIN]


@needs_triton
def test_what_sparse_auto_does_not_check_is_not_timed(timed):
    """In float32 no check is about `sparse_triton`; with dropout none is needed."""
    orders = []
    by_measurement(TILES, replace(REQUEST, dtype=torch.float32), outcome_of(orders, sparse_flex=1.0))
    assert timed == [(*PLAIN, "sparse_flex")] and orders[0].backends == ("sparse_flex", TRUSTED)
    by_measurement(TILES, replace(REQUEST, dtype=torch.float32, dropout=True), outcome_of(orders))
    assert timed[1:] == [PLAIN] and len(orders) == 1


@needs_triton
def test_in_a_graph_only_earlier_measurements_count(timed):
    """Nothing is timed, and what was chosen then does not stand for a measurement."""
    assert by_earlier_measurement(TILES, REQUEST)[0] == TRUSTED and not timed
    name, reason = by_measurement(TILES, REQUEST, outcome_of([], sparse_triton=1.0, sparse_flex=2.0))
    assert len(timed) == 1 and name != TRUSTED
    assert by_earlier_measurement(TILES, REQUEST) == (name, reason) and len(timed) == 1
