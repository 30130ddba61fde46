"""
The CPU backend: a C++ operator that only visits the live entries of the mask. It reads a table as compressed rows
(CSR), and a Toeplitz form as a list of offsets per head, which is the same for inputs of any length.

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size, E live entries of all heads,
K parameters of a Toeplitz form.
"""

import ctypes
import functools
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ...masks.compiled_forms import compiled, compiled_parameters
from ...masks.sparse_mask import SparseMask
from ..capabilities import NO_FUNC_GRADIENTS, Request, in_func_grad
from ..mask_inputs import MaskInputs, per_sequence
from .compilation import FOLDER, LEVELS, CompilationError, compile_library, library_name


logger = logging.get_logger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the operator knows them by their place
MAX_HEAD_SIZE = 256

library = torch.library.Library("sparsebert", "FRAGMENT")
_MASK = (
    "Tensor begin, Tensor end, Tensor columns, Tensor? padding, Tensor? last, Tensor? starts, Tensor? rest_bias, "
    "Tensor? rest_keys, Tensor? distances, Tensor seed, bool first, bool rows, bool self_attention, bool causal, "
    "int block, int known, bool keep_self, int window, int longest, float dropout, float scale"
)
_NUM_TENSORS, _DISTANCES = 13, 11
# The second output and the second input are what is kept of the rest, `Problem::rest` of problem.h.
library.define(f"csr_attention(Tensor query, Tensor key, Tensor value, {_MASK}) -> (Tensor, Tensor)")
library.define(
    f"csr_attention_backward(Tensor grad, Tensor rest, bool learned, Tensor query, Tensor key, Tensor value, {_MASK}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


_FUNCTIONS = ("csr_attention", "csr_attention_backward")
# `Arguments` of arguments.h: four numbers for each of seven arrays, then pointers, integers and floats. As bytes: the
# fields of a `ctypes.Structure` would take as long as a short attention.
_pack = struct.Struct("=28q13q18q2d").pack
_NO_ARRAYS = (0,) * 12


def empty_rows(tensor, dtype=None):
    """Empty, like `tensor` `(B, H, n, d)`, in the memory order `(B, n, H, d)`, which the host's next layer reads."""
    _, heads, rows, size = tensor.shape
    # Not a view, of which autograd would refuse changes in place.
    return tensor.new_empty_strided(tensor.shape, (rows * heads * size, size, heads * size, 1), dtype=dtype)


def fits(tensor, dtype, shape):
    """Whether `tensor` is `None` or can be read as a plain array of that shape."""
    return tensor is None or (tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous())


def _run(function, arrays, rest, grads, begin, end, columns, padding, last, starts, bias, keys, distances, *options):
    """
    Call a function of the compiled library on `arrays`: query, key, value, output and gradients. What is checked here
    keeps the library within its memory; callers have checked the same with better messages.
    """
    seed, *flags, longest, dropout, scale = options
    causal, block, window = flags[3], flags[4], flags[7]
    output = arrays[3]
    sizes = _checked_sizes(function, *arrays[:3], padding, keys, starts, longest)
    batch, heads, _, num_keys, _ = sizes
    if output.shape != arrays[0].shape or output.dtype != arrays[0].dtype:
        raise RuntimeError(
            f"{function}: the output or its gradient does not fit: {output.dtype} {tuple(output.shape)}"
        )
    table = begin.shape
    if not (
        len(table) == 2
        and table[0] == heads
        and (table[1] == 1 if block else table[1] >= num_keys)
        and fits(begin, torch.int32, table)
        and fits(end, torch.int32, table)
        and fits(columns, torch.int32 if block else torch.uint16, (columns.numel(),))
    ):
        raise RuntimeError(f"{function}: the mask {tuple(table)} does not go with {heads} heads and {num_keys} keys")
    if not fits(last, torch.int32, (batch,)):
        raise RuntimeError(f"{function}: last must have a row for each of {batch} sequences")
    if bias is not None and (causal or window >= 0 or not fits(bias, torch.float32, (heads,))):
        raise RuntimeError(f"{function}: rest_bias must be float32 of shape ({heads},), without causality or window")
    if not fits(rest, torch.float32, _rest_shape(sizes, bias)):
        raise RuntimeError(f"{function}: the rest does not fit: {rest.dtype} {tuple(rest.shape)}")
    if not fits(distances, torch.float32, (heads, 2 * num_keys - 1)):
        raise RuntimeError(f"{function}: distances must be float32 of shape ({heads}, {2 * num_keys - 1})")
    # Copies must live until the call has ended.
    arrays = [array if array.stride(-1) == 1 or array.shape[-1] == 1 else array.contiguous() for array in arrays]
    places = [number for array in arrays for number in (array.data_ptr(), *array.stride()[:3])]
    grad_rest, grad_distances = grads
    pointers = (begin, end, columns, padding, last, starts, bias, keys, rest, grad_rest, distances, grad_distances)
    operator, loops = _operator()
    parallel_for = loops["sleeping_parallel_for" if hasattr(_engine, "output") else "torch_parallel_for"]
    query = arrays[0]
    error = operator[function](
        _pack(
            *(places if len(places) == 28 else (*places, *_NO_ARRAYS)),
            *(0 if each is None else each.data_ptr() for each in pointers),
            *(parallel_for, table[1], *sizes, query.shape[2], DTYPES.index(query.dtype), torch.get_num_threads()),
            *(seed.item(), *flags, dropout, scale),
        )
    )
    if error is not None:
        raise RuntimeError(f"{function}: {error.decode()}")


def _checked_sizes(function, query, key, value, padding, rest_keys, starts, longest):
    """B, H, n, m and d of a call, after a check of its states, padding and starts."""
    rows, heads, tokens, head_size = query.shape
    batch, num_queries, num_keys = rows, tokens, key.shape[2]
    if starts is not None:
        batch, num_queries, num_keys = len(starts), longest, longest
    if not (
        batch
        and 0 < num_queries <= num_keys
        and 0 < head_size <= MAX_HEAD_SIZE
        and key.shape == value.shape == (rows, heads, tokens if starts is not None else num_keys, head_size)
        and key.dtype == value.dtype == query.dtype
        and query.dtype in DTYPES
    ):
        got = ", ".join(f"{array.dtype} {tuple(array.shape)}" for array in (query, key, value))
        raise RuntimeError(f"{function}: query, key and value do not fit: {got}")
    if not (
        fits(padding, torch.bool, (batch, num_keys))
        and fits(rest_keys, torch.bool, (batch, num_keys))
        and fits(starts, torch.int64, (batch,))
        and (starts is None or rows == 1)
    ):
        raise RuntimeError(f"{function}: padding, rest_keys and starts must have a row for each of {batch} sequences")
    return batch, heads, num_queries, num_keys, head_size


def _rest_shape(sizes, bias):
    batch, heads, _, num_keys, head_size = sizes
    return (0,) if bias is None else (batch, heads, 3 * head_size + 1 + num_keys)


def _forward(query, key, value, *mask):
    output, rest = _forward_shapes(query, key, value, *mask)
    if hasattr(_engine, "output"):
        output = _engine.output.view(output.transpose(1, 2).shape).transpose(1, 2)
    _run("csr_attention", (query, key, value, output), rest, (None, None), *mask)
    return output, rest


def _backward(grad, rest, learned, query, key, value, *mask):
    *gradients, grad_rest, grad_distances = _backward_shapes(grad, rest, learned, query, key, value, *mask)
    grads = grad_rest, grad_distances if learned else None
    _run("csr_attention_backward", (query, key, value, grad, *gradients), rest, grads, *mask)
    return *gradients, grad_rest, grad_distances


library.impl("csr_attention", _forward, "CPU")
library.impl("csr_attention_backward", _backward, "CPU")


@torch.library.register_fake("sparsebert::csr_attention", lib=library)
def _forward_shapes(query, key, value, *mask):
    starts, bias, longest = mask[5], mask[6], mask[-3]
    rows, heads, _, size = query.shape
    sizes = (rows, heads, 0, key.shape[2], size) if starts is None else (len(starts), heads, 0, longest, size)
    return empty_rows(query), query.new_empty(_rest_shape(sizes, bias), dtype=torch.float32)


@torch.library.register_fake("sparsebert::csr_attention_backward", lib=library)
def _backward_shapes(grad, rest, learned, query, key, value, *mask):
    grad_rest = query.new_zeros(rest.shape[:-1], dtype=torch.float32)  # an operator returns no `None`
    grad_distances = query.new_zeros(mask[8].shape if learned else 0, dtype=torch.float32)
    return empty_rows(query), empty_rows(key), empty_rows(value), grad_rest, grad_distances


def _remember(ctx, inputs, output):
    ctx.save_for_backward(output[1], *inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _):
    saved = ctx.saved_tensors  # activation checkpointing lets them be read once only
    learned = ctx.needs_input_grad[_DISTANCES]
    *gradients, grad_rest, grad_distances = torch.ops.sparsebert.csr_attention_backward(
        grad, saved[0], learned, *saved[1:], *ctx.options
    )
    *others, bias, _, _, _ = saved[4:]
    grad_bias = None if bias is None else grad_rest.sum(0)
    more = grad_bias, None, grad_distances if learned else None, None
    return *gradients, *[None] * len(others), *more, *[None] * len(ctx.options)


def _no_second_derivatives(ctx, *grads):
    raise RuntimeError("sparse_cpu has no second derivatives: use sparse_eager")


torch.library.register_autograd("sparsebert::csr_attention_backward", _no_second_derivatives, lib=library)
torch.library.register_autograd("sparsebert::csr_attention", _differentiate, setup_context=_remember, lib=library)


def compressed_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The live entries of a mask `(H, m, m)`, row by row: `begin` and `end` `(H, m)`, int32, and `columns` `(E,)`,
    uint16. The keys of query i of head h are `columns[begin[h, i] : end[h, i]]`, in ascending order.
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
    The live keys of a query under the parameters `(H, 2K - 1)` of a Toeplitz mask by their signed distance, see
    [`signed_parameters`], as offsets from the first token of its block: `begin` and `end` `(H, 1)` and `offsets`
    `(E,)`, int32. Query i of head h attends to `i - i % Q + offsets[begin[h, 0] : end[h, 0]]`, Q being the queries of
    a tile, in ascending order, as far as there are such positions. Only blocks of one token can express a fixed
    diagonal; for others the operator applies it itself.
    """
    if block_size == 1 and diagonal is not None:
        keep = keep.clone()
        keep[:, keep.shape[-1] // 2] = diagonal
    counts = keep.sum(-1, keepdim=True) * block_size
    end = counts.cumsum(0)
    # By the block of the key less the query's, in ascending order.
    blocks = keep.flip(-1).nonzero()[:, 1] - keep.shape[-1] // 2
    offsets = blocks[:, None] * block_size + torch.arange(block_size)
    return (end - counts).int(), end.int(), offsets.flatten().int()


def find_level() -> str:
    """The one of `LEVELS` that PyTorch finds on this machine; the variable `ATEN_CPU_CAPABILITY` lowers it."""
    found = torch.backends.cpu.get_cpu_capability().lower()
    if found.startswith("avx512") and torch.cpu._is_avx512_bf16_supported():
        found = "avx512_bf16"
    return next((level for level in reversed(LEVELS) if found.startswith(level)), "default")


def load_library(level: str) -> ctypes.CDLL:
    """
    The compiled operator for one of `LEVELS`: as it was installed, or else compiled on this machine, once. One that
    another user may have written is compiled again.
    """
    path = FOLDER / library_name(level)
    if path.is_file():
        return ctypes.CDLL(str(path))
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    path = root / path.name
    if not (path.is_file() and _is_only_ours(path)):
        logger.warning_once("sparse_cpu compiles its operator, as none was installed (once; this takes some seconds).")
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            target = Path(folder) / path.name
            compile_library(level, target)
            target.chmod(0o755)
            os.replace(target, path)
    return ctypes.CDLL(str(path))


def _is_only_ours(path):
    """Whether no user but this one and root may have written a file."""
    status = path.stat()
    return not hasattr(os, "geteuid") or (status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022)


@functools.cache
def _operator():
    """The functions of the compiled operator by name, and addresses of the loops over threads for them to call."""
    loaded = load_library(find_level())
    functions = {name: getattr(loaded, name) for name in _FUNCTIONS}
    for function in functions.values():
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
    loops = {"torch_parallel_for": ctypes.CDLL(str(torch._C.__file__)), "sleeping_parallel_for": loaded}
    return functions, {name: ctypes.cast(getattr(home, name), ctypes.c_void_p).value for name, home in loops.items()}


# The memory for the output of calls on a thread, if they are those of an inference engine.
_engine = threading.local()


@contextmanager
def in_engine(output: torch.Tensor) -> Iterator[None]:
    """
    Inside, a call on this thread writes to `output`, which is contiguous with shape `(B, n, H, d)`, and uses threads
    that sleep between calls, see `sleeping_threads.h`.
    """
    _engine.output = output
    try:
        yield
    finally:
        del _engine.output


@functools.cache
def unavailable() -> str | None:
    """Why the operator cannot be used on this machine, `None` if it can. Compiles it if that was not done yet."""
    try:
        _operator()
    except CompilationError as error:
        return str(error)
    except OSError as error:
        return f"its operator cannot be loaded: {error}"
    return None


def refuse(request: Request) -> str | None:
    """The reason why this backend cannot serve a request, or `None` if it can."""
    if request.device != "cpu":
        return f"it runs on CPUs, got device {request.device!r}"
    if request.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(map(str, DTYPES))}, got {request.dtype}"
    if request.head_size > MAX_HEAD_SIZE:
        return f"head size must be at most {MAX_HEAD_SIZE}, got {request.head_size}"
    if in_func_grad():
        return NO_FUNC_GRADIENTS
    return unavailable()


def prepare(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """The compressed rows or offsets of every layer's mask, and the last token of each sequence."""
    if mask.form == "table":
        length = inputs.compiled_length(mask)
        form = compiled(mask, compressed_rows, length, inputs.causal, inputs.device, special="first")
    else:
        form = compiled_parameters(mask, signed_offsets, inputs.num_keys, inputs.device)
    return {"compiled": form, "last_token": inputs.last()}


def csr_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float, dropout: float
) -> tuple[torch.Tensor, None]:
    """A C++ operator on CPU that only visits the live entries of the mask."""
    mask, documents = inputs.sparse_mask, inputs.documents
    assert mask is not None
    seed = torch.zeros(1, dtype=torch.int64, device="cpu")
    if dropout:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device="cpu")
    batch = query.shape[0] if documents is None else documents.shape[0]
    # An engine has no use for PyTorch's dispatcher, which short calls would wait for.
    attention = _forward if hasattr(_engine, "output") else torch.ops.sparsebert.csr_attention
    output, _ = attention(
        query,
        key,
        value,
        *inputs.compiled[0],
        None if inputs.padding is None else inputs.padding.contiguous(),
        per_sequence(inputs.last_token, batch),
        None if documents is None else documents.starts,
        inputs.rest[0],
        per_sequence(inputs.rest_keys, batch),
        inputs.distance_bias[0],
        seed,
        mask.special_tokens != "none",
        mask.special_rows,
        mask.diagonal is not False,
        inputs.causal,
        0 if mask.form == "table" else mask.query_block_size or mask.block_size or 1,
        mask.length if mask.length_policy == "dense" else inputs.num_keys,
        mask.diagonal is True,
        -1 if inputs.window is None else inputs.window,
        inputs.num_keys,
        dropout,
        scaling,
    )
    return output.transpose(1, 2), None
