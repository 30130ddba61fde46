"""
Masks in graphs that are exported or traced: made of tensor operations that are the same at every length, from one
constant.

Letters: L layers (1 when shared), H heads, n tokens, K parameters of a Toeplitz form.
"""

import torch

from .expansion import check_length, query_blocks
from .sparse_mask import SparseMask


def exporting() -> bool:
    """
    Whether a graph is being made that runs without this package: by `torch.export`, `torch.onnx.export` or
    `torch.jit.trace`. The sizes in it may be symbols, and its tensors may have no values.
    """
    # What `torch.compiler.is_exporting` returns, except in a graph of `torch.compile`, where torch 2.11 says True.
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()


def captured() -> bool:
    """Whether a CUDA graph records what runs."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def recorded() -> bool:
    """Whether what runs is compiled or [`captured`], where no question about data can be answered."""
    return torch.compiler.is_compiling() or captured()


def exported_structure(mask: SparseMask, length: int, device: torch.device) -> torch.Tensor:
    """
    [`SparseMask.structure`] for a length that may be a symbol; the graph holds `keep` as a constant. What the length
    policy `"error"` refuses is refused here if the length is known, by the guards of an exported program, or by
    operands that do not fit.
    """
    bounded = mask.length_policy == "error"
    if bounded and not torch.jit.is_tracing():  # where a size is a tensor, of which one may not ask this
        check_length(length, mask.length, mask.form)
    keep = mask.keep.to(device)
    position = torch.arange(mask.length, device=device)[:length] if bounded else torch.arange(length, device=device)
    last = keep.shape[-1] - 1
    if mask.form == "table":
        # A slice would bring a guard on whether it is contiguous, which depends on the length.
        known = position if bounded else position.clamp(max=last)
        table = keep.index_select(2, known).index_select(3, known)
    else:
        size = mask.block_size or 1
        block = position if size == 1 else position // size
        first = block if mask.query_block_size is None else query_blocks(position, size, mask.query_block_size)
        index = first[:, None] - block
        index = index.abs() if mask.symmetric else index + last // 2
        table = keep.index_select(2, index.clamp(0, last).flatten()).view(*keep.shape[:2], *index.shape)
        table = table & (index >= 0) & (index <= last)
    if mask.length_policy == "dense":
        new = position >= mask.length
        table = table | new[:, None] | new
    return table
