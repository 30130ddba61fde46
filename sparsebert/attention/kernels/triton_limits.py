"""
What the Triton kernels can serve: which GPUs, head sizes, dtypes and arguments.

Letters: B batch, H heads, n length (queries and keys), d head size.
"""

from collections.abc import Sequence

import torch

from ...masks.tiles import TILE, TileForm
from ..capabilities import NO_FUNC_GRADIENTS, Request, in_func_grad
from .triton_launch import interpreted


HEAD_SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Head sizes of the GPUs for which the kernels were compiled, by compute capability times 10. Others are refused: on
# 12.0, for one, most configurations spill registers.
GPUS = {80: (32, 64), 86: (32, 64), 89: (32, 64), 90: HEAD_SIZES, 100: HEAD_SIZES}


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    seed: torch.Tensor | None,
    dropout: float,
    scaling: float,
) -> None:
    """Refuse arguments of [`tile_attention`] that do not fit, or of which a [`Request`] says nothing."""
    num_heads, length = query.shape[1:3]
    form = TileForm(*tiles)
    if key.shape[2] != length:
        raise ValueError(
            f"sparse_triton needs as many keys as queries, got {key.shape[2]} keys and {length} queries: "
            "key/value caches are not supported, use sparse_sdpa"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in DTYPES or tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} must be bfloat16, float16 or float32 in sparse_triton, and all three the same, got "
                f"{tensor.dtype}"
            )
        if abs(tensor.stride(2)) * length >= 2**31:
            raise ValueError(
                f"a sequence of {name} must span fewer than 2^31 numbers in sparse_triton, got "
                f"{abs(tensor.stride(2)) * length}"
            )
    shape = (num_heads, -(-length // TILE), -(-length // TILE))
    if tuple(form.tiles.shape) != shape or form.pool.shape[1] != TILE or form.pool.dtype != torch.int64:
        raise ValueError(
            f"tiles must be {TILE} queries by {TILE} keys and of shape {shape} for {num_heads} heads and {length} "
            f"tokens, got {form.pool.shape[1]} queries, {form.pool.dtype} and {tuple(form.tiles.shape)}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    if dropout and seed is None:
        raise ValueError(f"dropout {dropout} needs a seed, got None")
    if not scaling > 0:
        raise ValueError(f"scaling must be positive in sparse_triton, got {scaling}")


def capability(index: int | None = None) -> int:
    """The compute capability of a GPU (by default the current one), or that of Hopper if there is none."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def unsupported_gpu(head_size: int, index: int | None = None) -> str | None:
    """The reason why the kernels do not run on a GPU (by default the current one), or `None` if they do."""
    if torch.version.hip is not None:
        return "it runs on NVIDIA GPUs, and this PyTorch is built for ROCm"
    found = capability(index)
    able = [known for known, sizes in GPUS.items() if head_size in sizes]
    if found in able:
        return None
    listed = ", ".join(f"{known / 10:.1f}" for known in able)
    return f"with heads of {head_size} it needs a GPU of compute capability {listed}, got {found / 10:.1f}"


def refuse(request: Request) -> str | None:
    """The reason why this backend cannot serve a request, or `None` if it can."""
    try:
        on_cpu = interpreted()
    except ValueError as error:
        return str(error)
    if request.device != "cuda" and not on_cpu:
        return f"it needs a CUDA device, got {request.device!r}"
    if request.num_queries != request.num_keys:
        return f"it needs as many queries as keys, got {request.num_queries} and {request.num_keys}; use_cache=False"
    if request.head_size not in HEAD_SIZES:
        return f"head size must be one of {', '.join(map(str, HEAD_SIZES))}, got {request.head_size}"
    if not on_cpu and (reason := unsupported_gpu(request.head_size, request.index)):
        return reason
    if request.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(map(str, DTYPES))}, got {request.dtype}"
    if on_cpu and request.dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong numbers in torch.bfloat16; use float16 or float32"
    if "distance_bias" in request.needs and request.gradients and torch.are_deterministic_algorithms_enabled():
        return "its gradient of a bias per distance is not deterministic"
    if in_func_grad():
        return NO_FUNC_GRADIENTS
    return None
