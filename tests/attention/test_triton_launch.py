"""How a launch configuration is chosen. The timing and the launch itself, which need a GPU, are stubs."""

import contextlib
import importlib.util
import itertools
import os
import sys
import threading

import pytest
import torch

from sparsebert.attention.kernels import triton_launch
from sparsebert.attention.kernels.triton_launch import launch


pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no configurations"),
]
CHOICES = [(4, 3, 64), (8, 2, 32, 168), (4, 2, 16)]
FASTEST = CHOICES[1]
CONSTANTS = {"HEAD": 64, "GRADIENT": False}


class Gpu:
    """Records launches and timings; `milliseconds` by configuration."""

    def __init__(self, monkeypatch):
        from triton import testing
        from triton.runtime.jit import JITFunction

        self.launched, self.timed, self.capturing = [], [], False
        self.milliseconds = {(4, 3, 64): 2.0, FASTEST: 1.0, (4, 2, 16): 3.0}
        monkeypatch.setattr(JITFunction, "run", self.run)
        monkeypatch.setattr(testing, "do_bench", self.do_bench)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(triton_launch, "_CHOSEN", {})

    def run(self, *arguments, grid, warmup, num_warps, num_stages, STEP, maxnreg=None, **constants):
        assert constants == CONSTANTS and not warmup
        self.grid = grid
        self.launched.append((num_warps, num_stages, STEP, *([] if maxnreg is None else [maxnreg])))

    def do_bench(self, function, **options):
        (choice,) = function.args  # another thread may launch meanwhile
        for _ in range(20):
            function()
        self.timed.append(choice)
        return self.milliseconds[choice]


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def run(length=512, dtype=torch.bfloat16, choices=CHOICES, seed=None, programs=6):
    launch("row_kernel", programs, [torch.empty(1, dtype=dtype), seed], CONSTANTS, choices, length)


def test_the_fastest_is_timed_once_and_launched(gpu):
    run()
    assert gpu.timed == CHOICES and gpu.launched[-1] == FASTEST
    launches = len(gpu.launched)
    run()
    assert gpu.timed == CHOICES and gpu.launched[launches:] == [FASTEST]


@pytest.mark.parametrize("other", [{"length": 1024}, {"dtype": torch.float16}, {"seed": torch.empty(2)}])
def test_what_the_choice_depends_on(gpu, other):
    run()
    gpu.milliseconds = {(4, 3, 64): 1.0, FASTEST: 2.0, (4, 2, 16): 3.0}
    run(**other)
    assert gpu.timed == 2 * CHOICES and gpu.launched[-1] == (4, 3, 64)
    run()
    assert gpu.timed == 2 * CHOICES and gpu.launched[-1] == FASTEST


def test_threads_choose_once(gpu):
    """As those of DataParallel and of autograd, which launch the same kernels at the same time."""
    interval, errors, start = sys.getswitchinterval(), [], threading.Barrier(8)

    def work():
        try:
            start.wait()
            for length in (512, 1024, 512):
                run(length)
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert sorted(gpu.timed) == sorted(2 * CHOICES)
    assert len(gpu.launched) == 20 * len(gpu.timed) + 24 and gpu.launched.count(FASTEST) == 2 * 20 + 24


def test_nothing_is_timed_while_a_graph_is_captured(gpu):
    gpu.capturing = True
    run()
    assert not gpu.timed and gpu.launched == CHOICES[:1]
    gpu.capturing = False
    run()
    assert gpu.timed == CHOICES
    gpu.capturing = True
    run()
    assert gpu.launched[-1] == FASTEST and gpu.timed == CHOICES


def test_nothing_is_timed_in_deterministic_mode_or_without_a_choice(gpu):
    run(choices=CHOICES[2:])
    assert not gpu.timed and gpu.launched == CHOICES[2:]
    run()
    torch.use_deterministic_algorithms(True)
    try:
        run()
        run(1024)
    finally:
        torch.use_deterministic_algorithms(False)
    assert gpu.timed == CHOICES and gpu.launched[-2:] == 2 * CHOICES[:1]


def test_each_configuration_can_be_launched(gpu):
    for number in range(4):
        with triton_launch.launching(number):
            run()
        assert gpu.launched[-1] == CHOICES[number % 3]
    assert not gpu.timed
    run()
    assert gpu.launched[-1] == FASTEST


def test_what_does_not_fit_is_not_chosen(gpu, monkeypatch):
    """A configuration may ask for more shared memory than the GPU has; timing may find no memory for its buffer."""
    from triton import testing
    from triton.runtime.errors import OutOfResources

    def do_bench(function, **options):
        if not gpu.timed:
            gpu.timed.append(CHOICES[0])
            raise OutOfResources(200000, 100000, "shared memory")
        return gpu.do_bench(function)

    gpu.milliseconds[CHOICES[0]] = 0.1
    monkeypatch.setattr(testing, "do_bench", do_bench)
    run()
    assert gpu.timed == CHOICES and gpu.launched[-1] == FASTEST

    def no_memory(function, **options):
        gpu.timed.append(None)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(testing, "do_bench", no_memory)
    for _ in range(2):
        run(1024)
        assert gpu.launched[-1] == CHOICES[0]
    assert gpu.timed.count(None) == 1


def test_kernels_on_lists_have_stages_to_load_ahead():
    for capability, dropout in itertools.product((80, 90), (False, True)):
        for head_size in (32, 64, 128) if capability == 90 else (32, 64):
            for kernel in ("forward", "query_grad", "column"):
                found = triton_launch.configurations(kernel, head_size, torch.bfloat16, capability, dropout)
                assert 1 <= len(found) <= triton_launch.MOST_CONFIGURATIONS
                assert all(stages >= 3 for _, stages, *_ in found)


def test_a_full_gpu_may_have_another_configuration(gpu):
    for programs in (6, 200, 300, 600, 5000, 50000):
        run(programs=programs)
    assert gpu.timed == 3 * CHOICES and gpu.grid == (50000,)
