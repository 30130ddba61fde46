"""
The CPU backend: a C++ operator over compressed rows (CSR) that only visits the live entries of the mask.

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size, E live entries of all heads.
"""

import functools
import hashlib
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from ..masks.compiled import compiled
from ..masks.sparse_mask import SparseMask
from .mask_inputs import MaskInputs, compiled_length, per_sequence


if TYPE_CHECKING:
    from .capabilities import Request


logger = logging.get_logger(__name__)

SOURCE = Path(__file__).with_name("csr_attention.cpp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
MAX_LENGTH = 2**16
# Compiler flags, by the vector instructions that PyTorch finds on this machine.
FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}

library = torch.library.Library("sparsebert", "FRAGMENT")
_MASK = (
    "Tensor begin, Tensor end, Tensor columns, Tensor? padding, Tensor? last, Tensor seed, bool first, "
    "bool self_attention, bool causal, float dropout, float scale, Tensor? starts=None, int longest=0"
)
library.define(f"csr_attention(Tensor query, Tensor key, Tensor value, {_MASK}) -> Tensor")
library.define(
    f"csr_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, {_MASK}) -> (Tensor, Tensor, Tensor)"
)


def _rows(tensor):
    """Empty, like `tensor` `(B, H, n, d)`, in the memory order `(B, n, H, d)`."""
    return torch.empty_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@torch.library.register_fake("sparsebert::csr_attention", lib=library)
def _forward_shape(query, key, value, *mask):
    return _rows(query)


@torch.library.register_fake("sparsebert::csr_attention_backward", lib=library)
def _backward_shapes(grad, query, key, value, *mask):
    return _rows(query), _rows(key), _rows(value)


def _remember(ctx, inputs, output):
    *tensors, first, self_attention, causal, dropout, scale, starts, longest = inputs
    ctx.options, ctx.longest = (first, self_attention, causal, dropout, scale), longest
    ctx.save_for_backward(*tensors, starts)


def _differentiate(ctx, grad):
    *tensors, starts = ctx.saved_tensors
    gradients = torch.ops.sparsebert.csr_attention_backward(grad, *tensors, *ctx.options, starts, ctx.longest)
    return *gradients, *[None] * 13


def _no_second_derivatives(ctx, *grads):
    raise RuntimeError("sparse_cpu has no second derivatives: use sparse_eager")


torch.library.register_autograd("sparsebert::csr_attention_backward", _no_second_derivatives, lib=library)
torch.library.register_autograd("sparsebert::csr_attention", _differentiate, setup_context=_remember, lib=library)


def compressed_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The live entries of a mask, row by row.

    Args:
        table (`torch.Tensor` of shape `(H, m, m)`): Bool, True = may attend.

    Returns:
        `tuple` of `torch.Tensor`: `begin` and `end` of shape `(H, m)`, int32, and `columns` of shape `(E,)`, uint16.
        The keys of query i of head h are `columns[begin[h, i] : end[h, i]]`, in ascending order.
    Raises:
        ValueError: If there are 2^31 live entries or more.
    """
    counts = table.sum(-1)  # (H, m)
    end = counts.flatten().cumsum(0).view_as(counts)
    if end[-1, -1] >= 2**31:
        raise ValueError(f"sparse_cpu: the mask must keep fewer than 2^31 entries, got {end[-1, -1]}")
    columns = torch.cat([head.nonzero()[:, 1].to(torch.uint16) for head in table])
    return (end - counts).int(), end.int(), columns


@functools.cache
def unavailable() -> str | None:
    """
    The reason why the operator cannot be used on this machine, or `None` if it can.

    Compiles the operator if this machine has no build of this version yet.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        return f"there is no C++ compiler {compiler!r}; install one (Debian, Ubuntu: apt install g++)"
    from torch.utils import cpp_extension

    # OpenMP resolves to the runtime that PyTorch has loaded: a second one would start threads of its own.
    flags = ["-O3", "-fopenmp", *FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())]
    made_of = [source.read_text() for source in sorted(SOURCE.parent.glob("*.h"))] + [SOURCE.read_text()]
    digest = hashlib.sha256("\0".join([*made_of, *flags, compiler, torch.__version__]).encode()).hexdigest()[:16]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    built = root / f"sparsebert_{digest}.so"
    path = os.environ.get("PATH", "")
    try:
        if not built.is_file():
            logger.warning_once("sparse_cpu compiles its operator (once; this takes up to a minute).")
            root.mkdir(parents=True, exist_ok=True)
            # The builder calls ninja, which is beside the interpreter even if its environment is not activated.
            os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
            # In a new folder: in a shared one the builder waits forever for the lock of a build that was killed.
            with tempfile.TemporaryDirectory(dir=root) as folder:
                cpp_extension.load(
                    built.stem, [str(SOURCE)], extra_cflags=flags, build_directory=folder, is_python_module=False
                )
                os.replace(Path(folder) / built.name, built)
        else:
            torch.ops.load_library(built)
    except (RuntimeError, OSError, ImportError) as error:
        return f"its operator could not be compiled: {str(error).strip().splitlines()[-1]}"
    finally:
        os.environ["PATH"] = path
    return None


def refuse(request: "Request") -> str | None:
    """The reason why this backend cannot serve a request, or `None` if it can."""
    if request.device != "cpu":
        return f"it runs on CPUs, got device {request.device!r}"
    if request.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(map(str, DTYPES))}, got {request.dtype}"
    if request.head_size > MAX_HEAD_SIZE:
        return f"head size must be at most {MAX_HEAD_SIZE}, got {request.head_size}"
    if request.num_keys > MAX_LENGTH:
        return f"inputs must have at most {MAX_LENGTH} tokens, got {request.num_keys}"
    return unavailable()


def prepare(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """The compressed rows of every layer's mask, and the last token of each sequence."""
    length = compiled_length(mask, inputs)
    rows = compiled(mask, compressed_rows, length, inputs.causal, inputs.device, special="first")
    return {"compiled": rows, "last_token": inputs.last()}


def csr_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: MaskInputs,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, None]:
    """
    A C++ operator on CPU that only visits the live entries of the mask. See [`Backend`] for the shapes; returns no
    probabilities.
    """
    mask = inputs.sparse_mask
    assert mask is not None
    seed = (
        torch.randint(-(2**63), 2**63 - 1, (1,), device="cpu")
        if dropout
        else torch.zeros(1, dtype=torch.int64, device="cpu")
    )
    documents = inputs.documents
    output = torch.ops.sparsebert.csr_attention(
        query,
        key,
        value,
        *inputs.compiled[0],
        None if inputs.padding is None else inputs.padding.contiguous(),
        per_sequence(inputs.last_token, query.shape[0] if documents is None else documents.shape[0]),
        seed,
        mask.special_tokens != "none",
        mask.diagonal is not False,
        inputs.causal,
        dropout,
        scaling,
        None if documents is None else documents.starts,
        inputs.num_keys,
    )
    return output.transpose(1, 2), None
