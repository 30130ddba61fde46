"""
Attention through the tile form of a mask, by Triton kernels: CUDA devices, or any device under Triton's interpreter.

Letters: B batch, H heads, n length (queries and keys), d head size.

Up to `SHORT_LENGTH` tokens a program looks at all keys of its queries, and one backward kernel keeps a whole head on
the chip; beyond, kernels follow the tile lists.
"""

import functools
import math
from collections.abc import Sequence

import torch

from ..masks.compiled import compiled
from ..masks.tiles import TileForm, tile_form


HEAD_SIZES = (32, 64, 128)
# Queries and keys of a tile: what a block of `dam_b` holds, and what fits on the chip twice.
TILE = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Longest n of the forward without lists.
SHORT_LENGTH = 256
# Longest n of the one-kernel backward of 16-bit numbers, by head size, on GPUs of compute capability 9 and later: what
# stays on the chip without spilling.
SHORT_BACKWARD = {32: 128, 64: 128, 128: 64}
# Warps, pipeline stages, and keys (columns: queries) at a time of 16-bit kernels on 64 x 64 tiles, by head size; the
# autotuner chooses where there are two. `benchmarks/compile_triton.py` lists what each of them takes.
HOPPER = {
    "forward": {32: [(4, 3, 64)], 64: [(4, 3, 64), (4, 2, 64)], 128: [(4, 2, 64), (4, 2, 32)]},
    "short_forward": {32: [(4, 2, 64)], 64: [(4, 2, 64)], 128: [(4, 2, 64)]},
    "query_grad": {32: [(4, 3, 64)], 64: [(4, 3, 64), (4, 2, 64)], 128: [(4, 2, 32), (8, 2, 32)]},
    "column": {32: [(4, 2, 64), (4, 2, 32)], 64: [(4, 2, 32), (4, 3, 32)], 128: [(4, 2, 16), (8, 2, 16)]},
    "short_backward": {32: [(8, 2, 64)], 64: [(8, 2, 64), (8, 2, 32)], 128: [(8, 2, 32)]},
}
# Heads of 128 are not here: whatever was tried spills kilobytes of registers.
AMPERE = {
    "forward": {32: [(4, 3, 64)], 64: [(4, 2, 64), (4, 3, 32)]},
    "short_forward": {32: [(4, 2, 16)], 64: [(4, 2, 32)]},
    "query_grad": {32: [(4, 3, 64)], 64: [(4, 3, 32), (4, 2, 32)]},
    "column": {32: [(4, 2, 32)], 64: [(4, 2, 16)]},
}
# float32 has no matrix units that would keep its precision.
FLOAT32 = [(8, 2, 16)]


def tile_attention(query, key, value, tiles, padding, last, first, diagonal, causal, seed, dropout, scaling):
    """
    Attention under a mask in tile form. Queries without a key, and padded queries, give 0.

    Args:
        query, key, value (`torch.Tensor` of shape `(B, H, n, d)`): bfloat16, float16 or float32, any strides.
        tiles ([`TileForm`] or `tuple` of `torch.Tensor`): What [`tile_form`] made of the mask, its diagonal and
            causality included, special tokens not, in tiles of 64 by 64 on the device.
        padding (`torch.Tensor` of shape `(B, n)`, *optional*): Bool, True = real token.
        last (`torch.Tensor` of shape `(B,)`, *optional*): int32, position of each sequence's last token, whose row
            and column are on.
        first (`bool`): Whether row and column 0 are on.
        diagonal (`bool`, *optional*): `False` turns off the diagonal entries of the special tokens too.
        causal (`bool`): Whether special tokens are cut at key j > query i.
        seed (`torch.Tensor` of shape `(2,)`, *optional*): int64, on the device; `None` without dropout.
        dropout (`float`): Probability of dropping an attention probability, in [0, 1); rounded to 1/65536.
        scaling (`float`): Positive factor of the scores.

    Returns:
        `torch.Tensor` of shape `(B, n, H, d)`: Contiguous.
    Raises:
        ValueError: If the kernels cannot serve the request: head size, dtype, device, lengths, tiles,
            dropout or scaling.
    """
    check(query, key, value, tiles, seed, dropout, scaling)
    threshold = min(max(round((1 - dropout) * 65536), 1), 65536)
    padding = None if padding is None else padding.contiguous().view(torch.int8)
    seed = None if threshold == 65536 else seed
    tensors = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value)]
    output, _ = torch.ops.sparsebert.tile_attention(
        *tensors, list(tiles), padding, last, seed, first, diagonal is False, causal, threshold, scaling
    )
    return output


def check(query, key, value, tiles, seed, dropout, scaling):
    """
    Raises:
        ValueError: As [`tile_attention`].
    """
    _, num_heads, length, head_size = query.shape
    tiles = TileForm(*tiles)
    if key.shape[2] != length:
        raise ValueError(
            f"sparse_triton needs as many keys as queries, got {key.shape[2]} keys and {length} queries: "
            "key/value caches are not supported, use sparse_sdpa"
        )
    if head_size not in HEAD_SIZES:
        raise ValueError(
            f"head size must be one of {', '.join(map(str, HEAD_SIZES))} in sparse_triton, got {head_size}"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in DTYPES or tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} must be bfloat16, float16 or float32 in sparse_triton, and all three the same, got "
                f"{tensor.dtype}"
            )
        if abs(tensor.stride(2)) * length >= 2**31:
            raise ValueError(f"a sequence of {name} must span less than 2^31 numbers in sparse_triton")
    if query.device.type != "cuda" and not interpreted():
        raise ValueError(f"sparse_triton needs a CUDA device, got query on {query.device.type}: use sparse_sdpa")
    shape = (num_heads, -(-length // TILE), -(-length // TILE))
    if tuple(tiles.tiles.shape) != shape or tiles.pool.shape[1] != TILE or tiles.pool.dtype != torch.int64:
        raise ValueError(
            f"tiles must be {TILE} queries by {TILE} keys and of shape {shape} for {num_heads} heads and {length} "
            f"tokens, got {tiles.pool.shape[1]} queries, {tiles.pool.dtype} and {tuple(tiles.tiles.shape)}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    if dropout and seed is None:
        raise ValueError(f"dropout {dropout} needs a seed, got None")
    if not scaling > 0:
        raise ValueError(f"scaling must be positive in sparse_triton, got {scaling}")


def interpreted():
    """Whether Triton runs its interpreter (`TRITON_INTERPRET=1` when Triton was imported)."""
    try:
        from . import triton_kernels
    except ImportError as error:
        raise ValueError("sparse_triton needs Triton: pip install sparsebert[gpu]") from error
    return type(triton_kernels.row_kernel).__name__ == "InterpretedFunction"


def configurations(kernel, head_size, dtype, capability):
    """
    Launch configurations that the autotuner may choose from, best guess first.

    Args:
        kernel (`str`): `"forward"`, `"short_forward"`, `"query_grad"`, `"column"` or `"short_backward"`.
        head_size (`int`): d.
        dtype (`torch.dtype`): Of the inputs.
        capability (`int`): Compute capability of the GPU, 80 or 90.

    Returns:
        `list` of `tuple`: Warps, pipeline stages, and keys (columns: queries) at a time.
    """
    if dtype == torch.float32:
        return FLOAT32
    return (AMPERE if capability < 90 else HOPPER)[kernel][head_size]


def head_sizes(capability):
    """Head sizes that run on GPUs of this compute capability, 80 or 90, without spilling registers."""
    return tuple((AMPERE if capability < 90 else HOPPER)["forward"])


def _capability():
    """Compute capability of the current GPU; the newest known where there is none."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def short_backward_limit(head_size, dtype, capability):
    """Longest n of the one-kernel backward."""
    return SHORT_BACKWARD[head_size] if capability >= 90 and dtype != torch.float32 else 0


def _hardware(query):
    """dtype and compute capability to look configurations up by; the interpreter runs float32 like 16-bit numbers."""
    if interpreted():
        return torch.bfloat16, 90
    return query.dtype, _capability()


def launch(kernel, grid, arguments, constants, choices):
    """Run a kernel on `grid` programs; the autotuner measures where there is a choice."""
    from . import triton_kernels

    if interpreted():
        getattr(triton_kernels, kernel)[(grid,)](*arguments, **constants, STEP=choices[0][2])
    else:
        with torch.cuda.device(arguments[0].device):
            _tuned(kernel, tuple(choices))[(grid,)](*arguments, **constants)


@functools.cache
def _tuned(kernel, choices):
    """The kernel under the autotuner, which measures once per bucket of lengths, set of constants and dtypes."""
    import triton

    from . import triton_kernels

    configs = [triton.Config({"STEP": step}, num_warps=warps, num_stages=stages) for warps, stages, step in choices]
    function = getattr(triton_kernels, kernel)
    key = [name for name in function.arg_names if name == "bucket" or (name.isupper() and name != "STEP")]
    return triton.autotune(configs=configs, key=key)(function)


def _bucket(length):
    """Lengths that share what the autotuner found: up to a power of two."""
    return 1 << (length - 1).bit_length()


def _sizes(query, key, value, tiles, threshold, scaling):
    """The scalar arguments that all kernels have in common."""
    strides = [tensor.stride(dim) for tensor in (query, key, value) for dim in range(3)]
    sizes = [query.shape[1], query.shape[2], *tiles.tiles.shape[1:]]
    return [*strides, *sizes, scaling / math.log(2), scaling, threshold, 65536 / threshold]


def _constants(query, first, diagonal_off, causal):
    """The compile-time arguments that all kernels have in common."""
    mask = {"FIRST": first, "DIAGONAL_OFF": diagonal_off, "CAUSAL": causal}
    return {"HEAD": query.shape[3], "BLOCK_Q": TILE, "BLOCK_K": TILE, **mask}


@torch.library.custom_op("sparsebert::tile_attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    padding: torch.Tensor | None,
    last: torch.Tensor | None,
    seed: torch.Tensor | None,
    first: bool,
    diagonal_off: bool,
    causal: bool,
    threshold: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, n, H, d) and base-2 log of the normaliser (B, H, n); `threshold`: of 65536, how often one is kept."""
    output, lse = _attention_shapes(
        query, key, value, tiles, padding, last, seed, first, diagonal_off, causal, threshold, scaling
    )
    tiles, (batch, num_heads, length, head_size) = TileForm(*tiles), query.shape
    short = length <= SHORT_LENGTH
    constants = _constants(query, first, diagonal_off, causal)
    programs = tiles.tiles.shape[1] + (not short and (first or last is not None))
    kernel = "short_forward" if short else "forward"
    launch(
        "row_kernel",
        batch * num_heads * programs,
        [query, key, value, output, lse, None, None, None, *tiles[:6], padding, last, seed]
        + [*_sizes(query, key, value, tiles, threshold, scaling), max(_bucket(length), SHORT_LENGTH)],
        constants | {"SHORT": short, "GRADIENT": False},
        configurations(kernel, head_size, *_hardware(query)),
    )
    return output, lse


@_attention.register_fake
def _attention_shapes(query, key, value, tiles, padding, last, seed, first, diagonal_off, causal, threshold, scaling):
    batch, num_heads, length, head_size = query.shape
    output = query.new_empty(batch, length, num_heads, head_size)
    return output, query.new_empty(batch, num_heads, length, dtype=torch.float32)


@torch.library.custom_op("sparsebert::tile_attention_backward", mutates_args=())
def _attention_backward(
    output_grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    padding: torch.Tensor | None,
    last: torch.Tensor | None,
    seed: torch.Tensor | None,
    first: bool,
    diagonal_off: bool,
    causal: bool,
    threshold: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, `(B, H, n, d)` in the memory order `(B, n, H, d)`."""
    gradients = [torch.empty_like(output) for _ in range(3)]
    tiles, (batch, num_heads, length, head_size) = TileForm(*tiles), query.shape
    constants = _constants(query, first, diagonal_off, causal)
    sizes = _sizes(query, key, value, tiles, threshold, scaling)
    rest = [padding, last, seed, *sizes]

    def choices(kernel):
        return configurations(kernel, head_size, *_hardware(query))

    if length <= short_backward_limit(head_size, *_hardware(query)):
        launch(
            "short_backward_kernel",
            batch * num_heads,
            [query, key, value, output, lse, output_grad, *gradients, *tiles[:2], *rest],
            constants | {"ROWS": max(_bucket(length), TILE)},
            choices("short_backward"),
        )
    else:
        special = first or last is not None
        delta = torch.empty_like(lse)
        rest.append(max(_bucket(length), SHORT_LENGTH))
        launch(
            "row_kernel",
            batch * num_heads * (tiles.tiles.shape[1] + special),
            [query, key, value, output, lse, output_grad, delta, gradients[0], *tiles[:6], *rest],
            constants | {"SHORT": False, "GRADIENT": True},
            choices("query_grad"),
        )
        launch(
            "column_kernel",
            batch * num_heads * (tiles.tiles.shape[2] + special),
            [query, key, value, lse, output_grad, delta, *gradients[1:], *tiles[:2], *tiles[6:], *rest],
            constants,
            choices("column"),
        )
    query_grad, key_grad, value_grad = (gradient.transpose(1, 2) for gradient in gradients)
    return query_grad, key_grad, value_grad


@_attention_backward.register_fake
def _attention_backward_shapes(output_grad, query, key, value, output, lse, tiles, *rest):
    query_grad, key_grad, value_grad = (torch.empty_like(output).transpose(1, 2) for _ in range(3))
    return query_grad, key_grad, value_grad


def _remember(ctx, inputs, output):
    query, key, value, tiles, padding, last, seed, *ctx.options = inputs
    ctx.num_tiles = len(tiles)
    ctx.save_for_backward(query, key, value, *output, padding, last, seed, *tiles)


def _differentiate(ctx, output_grad, lse_grad):
    query, key, value, output, lse, padding, last, seed, *tiles = ctx.saved_tensors
    gradients = torch.ops.sparsebert.tile_attention_backward(
        output_grad.contiguous(), query, key, value, output, lse, tiles, padding, last, seed, *ctx.options
    )
    return *gradients, [None] * ctx.num_tiles, *[None] * (3 + len(ctx.options))


_attention.register_autograd(_differentiate, setup_context=_remember)


def refuse(request):
    """Why this backend cannot serve a [`Request`], or `None`."""
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
    if request.head_size not in head_sizes(_capability()):
        return f"head size {request.head_size} needs a GPU of compute capability 9.0 or later"
    if request.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(map(str, DTYPES))}, got {request.dtype}"
    return None


def prepare(mask, inputs):
    """The tiles of every layer's mask."""
    return {"compiled": compiled(mask, tile_form, inputs.num_keys, inputs.causal, inputs.device)}


def triton_backend(query, key, value, inputs, scaling, dropout):
    """Attention through tiles. Shapes: see [`Backend`]; returns no probabilities."""
    mask = inputs.sparse_mask
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), device=query.device) if dropout else None
    output = tile_attention(
        query,
        key,
        value,
        inputs.compiled[0],
        inputs.padding,
        inputs.last_of(query.shape[0]),
        mask.special_tokens != "none",
        mask.diagonal,
        inputs.causal,
        seed,
        dropout,
        scaling,
    )
    return output, None
