"""
The compiled libraries of the CPU operator, one per level of vector instructions.

They need neither Python nor PyTorch, at build time and after. `setup.py` runs this file on its own, so it imports the
standard library only. As a script it compiles them beside the sources, with its arguments as further flags.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


FOLDER = Path(__file__).parent
SOURCE = FOLDER / "csr_attention.cpp"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
# Compiler flags, by the vector instructions that PyTorch finds on a machine. Elsewhere than on x86 the compiler's own
# baseline holds vectors already (NEON on arm64).
LEVELS: dict[str, tuple[str, ...]] = {"default": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ("-mavx2", "-mfma")
    LEVELS["avx512"] = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
    LEVELS["avx512_bf16"] = (*LEVELS["avx512"], "-mavx512bf16")


class CompilationError(RuntimeError):
    """The operator was not compiled; the message is the reason."""


def library_name(level: str) -> str:
    """File name of the library for one of `LEVELS`. It changes with the sources, so that no outdated one is loaded."""
    sources = [path.read_text(encoding="utf-8") for path in (*sorted(FOLDER.glob("*.h")), SOURCE)]
    made_of = "\0".join([*sources, *FLAGS, *LEVELS[level], platform.machine()])
    return f"csr_attention_{level}_{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"


def find_compiler() -> list[str]:
    """The command of the C++ compiler: the environment variable `CXX`, or `c++`."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        raise CompilationError(
            f"there is no C++ compiler {command[0]!r}; install one (Debian, Ubuntu: apt install g++)"
        )
    return command


def compile_library(level: str, target: Path, flags: Sequence[str] = ()) -> None:
    """Compile the operator for one of `LEVELS`, which takes some seconds; `flags` are further ones of the compiler."""
    command = [*find_compiler(), *FLAGS, *LEVELS[level], *flags, str(SOURCE), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"the compiler ended with {result.returncode}"]
        raise CompilationError(
            f"its operator could not be compiled: {next((line for line in lines if 'error' in line), lines[-1])}"
        )


if __name__ == "__main__":
    for each in LEVELS:
        compile_library(each, FOLDER / library_name(each), sys.argv[1:])
