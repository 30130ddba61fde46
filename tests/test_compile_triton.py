"""The offline compilation of the Triton kernels, in a process without the interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_short_kernels_compile_without_spilling():
    arguments = ["--arch", "90", "--head_size", "32", "--kernel", "short_forward"]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_triton", *arguments],
        cwd=Path(__file__).parents[1],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    header, *lines = (line.split() for line in result.stdout.splitlines())
    assert header[0] == "kernel" and len(lines) == 2
    for line in lines:
        found = dict(zip(header, line, strict=True))
        assert found["kernel"] == "short_forward" and found["arch"] == "sm_90" and found["spill"] == "0/0"
        assert 0 < int(found["regs"]) <= 255 and int(found["cp.async"]) > 0 and int(found["wgmma"]) > 0
    assert [line[header.index("drop")] for line in lines] == ["no", "yes"]
