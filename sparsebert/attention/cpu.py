"""
The CPU backend: a C++ operator that only visits the live entries of the mask. It reads a table as compressed rows
(CSR), and a Toeplitz form as a list of offsets per head, which is the same for inputs of any length.

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size, E live entries of all heads,
K parameters of a Toeplitz form.
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

from ..masks.compiled import compiled, compiled_parameters
from ..masks.sparse_mask import SparseMask
from .mask_inputs import MaskInputs, compiled_length, per_sequence


if TYPE_CHECKING:
    from .capabilities import Request


logger = logging.get_logger(__name__)

SOURCE = Path(__file__).with_name("csr_attention.cpp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
# Compiler flags, by the vector instructions that PyTorch finds on this machine.
FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}

library = torch.library.Library("sparsebert", "FRAGMENT")
_MASK = (
    "Tensor begin, Tensor end, Tensor columns, Tensor? padding, Tensor? last, Tensor seed, bool first, "
    "bool self_attention, bool causal, float dropout, float scale, Tensor? starts=None, int longest=0, int block=0, "
    "int known=0, bool keep_self=False, int window=-1"
)
_NUM_LAST = 5  # arguments after `starts`
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
    *tensors, first, self_attention, causal, dropout, scale, starts = inputs[:-_NUM_LAST]
    ctx.options, ctx.last_options = (first, self_attention, causal, dropout, scale), inputs[-_NUM_LAST:]
    ctx.save_for_backward(*tensors, starts)


def _differentiate(ctx, grad):
    *tensors, starts = ctx.saved_tensors
    gradients = torch.ops.sparsebert.csr_attention_backward(grad, *tensors, *ctx.options, starts, *ctx.last_options)
    return *gradients, *[None] * (len(tensors) - 3 + len(ctx.options) + 1 + _NUM_LAST)


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


def signed_offsets(
    keep: torch.Tensor, block_size: int, diagonal: bool | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The live keys of a query under a Toeplitz mask, as offsets from the first token of the query's block.

    Args:
        keep (`torch.Tensor` of shape `(H, K)`): Bool, the parameters of one layer, see [`SparseMask`].
        block_size (`int`): Size of a block, B; 1 for form `"offsets"`.
        diagonal (`bool`, *optional*): See [`SparseMask`]. Only blocks of one token can express it; for others the
            operator applies it itself.

    Returns:
        `tuple` of `torch.Tensor`: `begin` and `end` of shape `(H, 1)` and `offsets` of shape `(E,)`, int32. Query i of
        head h attends to `i - i % B + offsets[begin[h, 0] : end[h, 0]]`, in ascending order, as far as there are such
        positions.
    """
    if block_size == 1 and diagonal is not None:
        keep = keep.clone()
        keep[:, 0] = diagonal
    both = torch.cat([keep.flip(-1)[:, :-1], keep], dim=-1)  # (H, 2K - 1), from -(K - 1) to K - 1
    counts = both.sum(-1, keepdim=True) * block_size
    end = counts.cumsum(0)
    blocks = both.nonzero()[:, 1] - (keep.shape[-1] - 1)
    offsets = blocks[:, None] * block_size + torch.arange(block_size)
    return (end - counts).int(), end.int(), offsets.flatten().int()


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
    return unavailable()


def prepare(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """The compressed rows or offsets of every layer's mask, and the last token of each sequence."""
    if mask.form == "table":
        length = compiled_length(mask, inputs)
        form = compiled(mask, compressed_rows, length, inputs.causal, inputs.device, special="first")
    else:
        form = compiled_parameters(mask, signed_offsets, inputs.num_keys, inputs.device)
    return {"compiled": form, "last_token": inputs.last()}


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
        0 if mask.form == "table" else mask.block_size or 1,
        mask.length if mask.length_policy == "dense" else inputs.num_keys,
        mask.diagonal is True,
        -1 if inputs.window is None else inputs.window,
    )
    return output.transpose(1, 2), None
