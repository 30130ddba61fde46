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
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Longest n of the forward without lists.
SHORT_LENGTH = 256
# Longest n of the one-kernel backward, by head size and bytes of a number: what stays on the chip without spilling.
SHORT_BACKWARD = {(32, 2): 256, (64, 2): 256, (128, 2): 128, (32, 4): 128, (64, 4): 64, (128, 4): 0}


def tile_attention(query, key, value, tiles, padding, last, first, diagonal, causal, seed, dropout, scaling):
    """
    Attention under a mask in tile form. Queries without a key, and padded queries, give 0.

    Args:
        query, key, value (`torch.Tensor` of shape `(B, H, n, d)`): bfloat16, float16 or float32, any strides.
        tiles ([`TileForm`] or `tuple` of `torch.Tensor`): What [`tile_form`] made of the mask, its diagonal and
            causality included, special tokens not, on the device.
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
        ValueError: If the kernels cannot serve the request: head size, dtype, device, lengths, dropout or scaling.
    """
    check(query, key, value, tiles, dropout, scaling)
    threshold = min(max(round((1 - dropout) * 65536), 1), 65536)
    padding = None if padding is None else padding.contiguous().view(torch.int8)
    seed = None if threshold == 65536 else seed
    tensors = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value)]
    output, _ = torch.ops.sparsebert.tile_attention(
        *tensors, list(tiles), padding, last, seed, first, diagonal is False, causal, threshold, scaling
    )
    return output


def check(query, key, value, tiles, dropout, scaling):
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
    covered = (tiles.tiles.shape[0], tiles.tiles.shape[1] * tiles.pool.shape[1], tiles.tiles.shape[2] * word(tiles))
    expected = (num_heads, _aligned(length, tiles.pool.shape[1]), _aligned(length, word(tiles)))
    if covered != expected:
        raise ValueError(f"tiles must cover {num_heads} heads of {length} tokens, got {covered} (aligned to tiles)")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    if not scaling > 0:
        raise ValueError(f"scaling must be positive in sparse_triton, got {scaling}")


def word(tiles):
    """Keys of a tile: the bits of a number in the pool."""
    return 8 * tiles.pool.element_size()


def _aligned(length, block):
    return -(-length // block) * block


@functools.cache
def interpreted():
    """Whether Triton runs its interpreter (`TRITON_INTERPRET=1` when Triton was imported)."""
    try:
        from . import triton_kernels
    except ImportError as error:
        raise ValueError("sparse_triton needs Triton: pip install sparsebert[gpu]") from error
    return type(triton_kernels.row_kernel).__name__ == "InterpretedFunction"


def configurations(kernel, head_size, dtype, block_q, length):
    """
    Launch configurations that the autotuner may choose from, best guess first. All of them compile without spilling.

    Args:
        kernel (`str`): `"forward"`, `"query_grad"`, `"column"` or `"short_backward"`.
        head_size (`int`): d.
        dtype (`torch.dtype`): Of the inputs.
        block_q (`int`): Queries of a tile.
        length (`int`): n.

    Returns:
        `list` of `tuple`: Warps and pipeline stages.
    """
    return [(4, 2)]


def launch(kernel, grid, arguments, constants, configurations):
    """Run a kernel on `grid` programs; the autotuner measures on CUDA when there is a choice."""
    from . import triton_kernels

    function = getattr(triton_kernels, f"{kernel}_kernel")
    if interpreted():
        function[(grid,)](*arguments, **constants)
    elif len(configurations) == 1:
        ((warps, stages),) = configurations
        function[(grid,)](*arguments, **constants, num_warps=warps, num_stages=stages)
    else:
        tuned(kernel, tuple(configurations), tuple(constants))[(grid,)](*arguments, **constants)


@functools.cache
def tuned(kernel, configurations, key):
    """The kernel under the autotuner, which measures once per value of the constants `key` and dtypes."""
    import triton

    from . import triton_kernels

    choices = [triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in configurations]
    return triton.autotune(configs=choices, key=list(key))(getattr(triton_kernels, f"{kernel}_kernel"))


def _bucket(length):
    """Lengths that share what the autotuner found: up to a power of two."""
    return 1 << (length - 1).bit_length()


def _sizes(query, key, value, tiles, threshold, scaling):
    """The scalar arguments that all kernels have in common."""
    strides = [tensor.stride(dim) for tensor in (query, key, value) for dim in range(3)]
    sizes = [query.shape[1], query.shape[2], *tiles.tiles.shape[1:]]
    return [*strides, *sizes, scaling / math.log(2), scaling, threshold, 65536 / threshold]


def _constants(query, tiles, first, diagonal_off, causal):
    """The compile-time arguments that all kernels have in common."""
    blocks = {"BLOCK_Q": tiles.pool.shape[1], "BLOCK_K": word(tiles)}
    return {"HEAD": query.shape[3], **blocks, "FIRST": first, "DIAGONAL_OFF": diagonal_off, "CAUSAL": causal}


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
    constants = _constants(query, tiles, first, diagonal_off, causal)
    programs = tiles.tiles.shape[1] + (not short and (first or last is not None))
    launch(
        "row",
        batch * num_heads * programs,
        [query, key, value, output, lse, None, None, None, *tiles[:6], padding, last, seed]
        + _sizes(query, key, value, tiles, threshold, scaling),
        constants | {"SHORT": short, "GRADIENT": False, "BUCKET": _bucket(length)},
        configurations("forward", head_size, query.dtype, constants["BLOCK_Q"], length),
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
    constants = _constants(query, tiles, first, diagonal_off, causal)
    sizes = _sizes(query, key, value, tiles, threshold, scaling)
    rest = [padding, last, seed, *sizes]

    def choices(kernel):
        return configurations(kernel, head_size, query.dtype, constants["BLOCK_Q"], length)

    if length <= SHORT_BACKWARD[head_size, query.element_size()]:
        launch(
            "short_backward",
            batch * num_heads,
            [query, key, value, output, lse, output_grad, *gradients, *tiles[:2], *rest],
            constants | {"ROWS": max(_bucket(length), 16)},
            choices("short_backward"),
        )
    else:
        special = first or last is not None
        delta = torch.empty_like(lse)
        constants["BUCKET"] = _bucket(length)
        launch(
            "row",
            batch * num_heads * (tiles.tiles.shape[1] + special),
            [query, key, value, output, lse, output_grad, delta, gradients[0], *tiles[:6], *rest],
            constants | {"SHORT": False, "GRADIENT": True},
            choices("query_grad"),
        )
        launch(
            "column",
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
