"""The tensors of a mask and the choices it has, checked before a [`SparseMask`] is made of them."""

from typing import Any

import torch

from ..checks import check_choice, check_range
from .expansion import FORMS, LENGTH_POLICIES, SPECIAL_TOKENS, default_length_policy, num_distances


# A configuration's `diagonal` to that of a SparseMask.
DIAGONALS = {"learned": None, "keep": True, "remove": False}
LAST_TOKENS = ("real", "position")
# How the keys that a mask removes count: not at all, or as the mean query sees them.
RESTS = ("none", "mean")


def checked_length_policy(
    form: Any, special_tokens: Any, last_token: Any, diagonal: Any, rest: Any, length_policy: str | None
) -> str:
    """Check the choices that a mask has; returns its length policy."""
    check_choice("form", form, FORMS)
    check_choice("special_tokens", special_tokens, SPECIAL_TOKENS)
    check_choice("last_token", last_token, LAST_TOKENS)
    check_choice("diagonal", diagonal, (None, True, False))
    check_choice("rest", rest, RESTS)
    length_policy = length_policy or default_length_policy(form)
    check_choice("length_policy", length_policy, LENGTH_POLICIES)
    if form == "table" and length_policy == "extend":
        raise ValueError("length_policy 'extend' needs a Toeplitz form (offsets or blocks), got form 'table'")
    return length_policy


def check_query_block_size(size: Any, block_size: int | None, symmetric: Any) -> None:
    """Check the number of queries of a tile, which only a mask of signed distances may have apart."""
    if size is None:
        return
    check_range("query_block_size", size, 1)
    if block_size is None or size == block_size or size % block_size:
        raise ValueError(
            f"query_block_size must be a larger multiple of block_size, got {size!r} with block_size {block_size!r}"
        )
    if symmetric:
        raise ValueError(f"query_block_size {size!r} needs symmetric False, as such tiles have no mirror image")


def checked_keep(
    keep: Any, form: str, length: int, block_size: int | None, symmetric: Any, query_block_size: Any = None
) -> torch.Tensor:
    """A copy of the parameters of a mask, bool `(L, H, K)` or `(L, H, n, n)`, on the CPU."""
    if (form == "blocks") != (block_size is not None):
        raise ValueError(
            f"block_size must be given with form 'blocks' and with no other, got {block_size!r} with form {form!r}"
        )
    if block_size is not None:
        check_range("block_size", block_size, 1)
    check_choice("symmetric", symmetric, (True, False))
    check_query_block_size(query_block_size, block_size, symmetric)
    if form == "table" and not symmetric:
        raise ValueError("symmetric False needs a Toeplitz form (offsets or blocks), got form 'table'")
    if not isinstance(keep, torch.Tensor):
        raise ValueError(f"keep must be a bool tensor, got {type(keep).__name__}")
    if keep.dtype != torch.bool or keep.layout != torch.strided or keep.is_meta:
        raise ValueError(f"keep must be a bool tensor with data, got {keep.dtype} {keep.layout} on {keep.device}")
    num_dims = 4 if form == "table" else 3
    keep = keep.detach().cpu().clone()  # never the caller's memory: a mask does not change
    keep = keep[None] if keep.dim() == num_dims - 1 else keep
    if keep.dim() != num_dims:
        raise ValueError(f"keep of form {form!r} must have {num_dims} dimensions (L, H, ...), got {keep.dim()}")
    distances = num_distances(keep.shape[-1], symmetric) if form == "offsets" else -(-length // (block_size or 1))
    size = distances if symmetric else 2 * distances - 1
    expected = (length, length) if form == "table" else (size,)
    if tuple(keep.shape[2:]) != expected or distances > length or 0 in keep.shape:
        signed = "" if symmetric else " that is not symmetric"
        raise ValueError(
            f"keep of form {form!r}{signed} must have shape (L, H, {', '.join(map(str, expected))}), got "
            f"{tuple(keep.shape)} at length {length}"
        )
    return keep


def check_special_rows(special_rows: Any, special_tokens: str) -> None:
    """Check whether special tokens attend to all tokens, which only they can do without."""
    check_choice("special_rows", special_rows, (True, False))
    if not special_rows and special_tokens == "none":
        raise ValueError("special_rows False needs special tokens, got special_tokens 'none'")


def checked_rest_bias(bias: Any, rest: str, num_heads: int) -> torch.Tensor | None:
    """A copy of the bias of a rest, float32 `(1 or more, H)`, on the CPU."""
    if bias is None:
        return None
    if rest == "none":
        raise ValueError("rest_bias has no meaning with rest 'none'")
    found = f"{bias.dtype} {tuple(bias.shape)}" if isinstance(bias, torch.Tensor) else type(bias).__name__
    if not isinstance(bias, torch.Tensor) or bias.is_meta or not bias.is_floating_point():
        raise ValueError(f"rest_bias must be a tensor of floats, got {found}")
    bias = bias.detach().to("cpu", torch.float32, copy=True).contiguous()
    if bias.dim() != 2 or bias.shape[1] != num_heads or not len(bias) or not bias.isfinite().all():
        raise ValueError(f"rest_bias must be finite and of shape (layers, {num_heads}), got {found}")
    return bias
