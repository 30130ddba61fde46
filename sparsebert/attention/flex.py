"""
FlexAttention of PyTorch under a block mask: forward on CPU and CUDA, gradients on CUDA, no attention dropout.

Letters: B batch, H heads, n queries, m keys (n = m here), d head size, t tiles, t = ceil(m / block).
"""

import functools
import types

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.utils import logging

from ..masks.compiled import compiled, remember


logger = logging.get_logger(__name__)

# Edge of the square tiles. On CPU 32 skips most of a window mask; on CUDA the kernels are tuned for 128.
BLOCK_SIZES = {"cpu": 32, "cuda": 128}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CUDA_HEAD_SIZE = 16
MANY_SHAPES = 16


def refuse(request):
    """Why this backend cannot serve a [`Request`], or `None`."""
    if request.dropout:
        return "it has no attention dropout; set attention_probs_dropout_prob to 0 and build the model anew"
    if request.device not in BLOCK_SIZES:
        return f"it runs on {' or '.join(BLOCK_SIZES)}, got device {request.device!r}"
    if request.device == "cpu" and request.gradients:
        return "it has no gradients on device 'cpu'; run under torch.no_grad()"
    if request.num_queries != request.num_keys:
        return f"it needs as many queries as keys, got {request.num_queries} and {request.num_keys}; use_cache=False"
    if request.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(map(str, DTYPES))}, got {request.dtype}"
    if request.device == "cuda" and request.head_size < MIN_CUDA_HEAD_SIZE:
        return f"head size must be at least {MIN_CUDA_HEAD_SIZE} on CUDA, got {request.head_size}"
    return None


def _tiles(values, block):
    """Bool `(..., m)` in tiles of `block`, False beyond m: `(..., t, block)`."""
    length = values.shape[-1]
    num_tiles = -(-length // block)
    return torch.nn.functional.pad(values, (0, num_tiles * block - length)).unflatten(-1, (num_tiles, block))


def block_map(base, block):
    """
    Tiles of a mask that hold any entry.

    Args:
        base (`torch.Tensor` of shape `(H, m, m)`): Bool, True = may attend.
        block (`int`): Edge of a tile.

    Returns:
        `torch.Tensor` of shape `(H, t, t)`, bool.
    """
    rows = _tiles(base.mT, block).any(-1).mT  # (H, t, m)
    return _tiles(rows, block).any(-1)


def full_map(base, block):
    """
    Tiles whose entries are all on, for [`make_block_mask`]; a tile that crosses the edge of the mask never is.

    Args:
        base (`torch.Tensor` of shape `(H, m, m)`): Bool, True = may attend.
        block (`int`): Edge of a tile.

    Returns:
        `torch.Tensor` of shape `(H, t, t)`, bool.
    """
    rows = _tiles(base.mT, block).all(-1).mT  # (H, t, m)
    return _tiles(rows, block).all(-1)


def _listed(live):
    """Per row of bool `(..., t, t)` tiles: how many are on `(..., t)`, and their columns, these first; int32."""
    order = torch.argsort(live.to(torch.int32), dim=-1, descending=True, stable=True)
    return live.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _materialized(tensor):
    """
    The same tensor, as memory of its own in a compiled graph: what `mask_mod` captures must not be an expression that
    the compiler has yet to evaluate, for which it finds no kernel on CPU.
    """
    return None if tensor is None else tensor.as_strided(tensor.size(), tensor.stride())


def make_block_mask(base, block_map, block, padding, last, first, diagonal, causal, full_map=None):
    """
    The mask of one layer and batch, from the cached maps of its tiles. Without `padding` it serves any batch.

    Args:
        base (`torch.Tensor` of shape `(H, m, m)`): Bool, True = may attend: the structure with its `diagonal`
            override and, in a decoder, without future keys; without special tokens.
        block_map (`torch.Tensor` of shape `(H, t, t)`): Of [`block_map`].
        block (`int`): Edge of a tile.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
        last (`torch.Tensor` of shape `(B,)`, *optional*): int32, position of each sequence's last token, whose row
            and column are on; of shape `(1,)` when it is the same for all.
        first (`bool`): Whether row and column 0 are on.
        diagonal (`bool`, *optional*): `False` keeps the diagonal entries of special tokens off.
        causal (`bool`): Whether keys j > i are off.
        full_map (`torch.Tensor` of shape `(H, t, t)`, *optional*): Of [`full_map`]; these tiles are not masked entry
            by entry unless they hold a padded token, which is faster and changes no result.

    Returns:
        `BlockMask` of shape `(B or 1, H, m, m)`.
    """
    length, num_tiles = base.shape[-1], block_map.shape[-1]
    tile = torch.arange(num_tiles, device=base.device)
    special = torch.zeros(1, num_tiles, dtype=torch.bool, device=base.device)
    if first:
        special = special | (tile == 0)
    if last is not None:
        special = special | (tile == last[:, None] // block)
    live = block_map | special[:, None, :, None] | special[:, None, None, :]  # (B or 1, H, t, t)
    if causal:
        live = live & (tile[:, None] >= tile)
    full = full_map
    if padding is not None:
        real = _tiles(padding, block)
        some, every = real.any(-1), real.all(-1)  # (B, t)
        live = live & some[:, None, :, None] & some[:, None, None, :]
        if full is not None:
            full = full & every[:, None, :, None] & every[:, None, None, :]
    if full is None:
        lists = _listed(live)
    else:
        full = full.expand(live.shape)
        lists = (*_listed(live & ~full), *_listed(full))
    shared_last = last is not None and len(last) == 1
    if shared_last:
        last = last[0]
    if torch.compiler.is_compiling():
        base, padding, last = _materialized(base), _materialized(padding), _materialized(last)

    def mask_mod(b, h, i, j):
        keep = base[h, i, j]
        if first:
            keep = keep | (i == 0) | (j == 0)
        if last is not None:
            end = last if shared_last else last[b]
            keep = keep | (i == end) | (j == end)
        if diagonal is False:
            keep = keep & (i != j)
        if causal:
            keep = keep & (i >= j)
        if padding is not None:
            keep = keep & padding[b, i] & padding[b, j]
        return keep

    return BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        seq_lengths=(length, length),
        # Only gradients read the transposed lists, which cost more than the others.
        compute_q_blocks=base.device.type != "cpu",
    )


def _attention(query, key, value, block_mask, scaling):
    return flex_attention(query, key, value, block_mask=block_mask, scale=scaling)


@functools.cache
def _compiled(*shape):
    """
    `_attention` compiled for one shape. PyTorch counts recompilations per code object and refuses after
    `recompile_limit` of them, so each shape has a code object of its own.
    """
    if _compiled.cache_info().currsize == MANY_SHAPES:
        logger.warning_once(
            f"sparse_flex is compiled, which takes seconds, for each shape of its inputs: {MANY_SHAPES} so far. Pad "
            "to fewer lengths and batch sizes."
        )
    code = _attention.__code__.replace(co_name="_".join(["flex", *map(str, shape)]))
    return torch.compile(types.FunctionType(code, globals()), fullgraph=True, dynamic=False)


def _cpu_forms(table):
    block = BLOCK_SIZES["cpu"]
    return table, block_map(table, block), full_map(table, block)


def _cuda_forms(table):
    block = BLOCK_SIZES["cuda"]
    return table, block_map(table, block), full_map(table, block)


def prepare(mask, inputs):
    """The block mask of every layer."""
    device = inputs.device
    tables = compiled(
        mask, _cuda_forms if device.type == "cuda" else _cpu_forms, inputs.num_keys, inputs.causal, device
    )

    def make():
        return tuple(
            make_block_mask(
                table,
                live,
                BLOCK_SIZES[device.type],
                inputs.padding,
                inputs.last(),
                mask.special_tokens != "none",
                mask.diagonal,
                inputs.causal,
                full_map=full,
            )
            for table, live, full in tables
        )

    if inputs.padding is not None or torch.compiler.is_compiling():
        return {"compiled": make()}
    return {"compiled": remember(mask, ("block mask", inputs.num_keys, inputs.causal, str(device)), make)}


def flex_backend(query, key, value, inputs, scaling, dropout):
    """Attention under a block mask. Shapes: see [`Backend`]; returns no probabilities."""
    if dropout:
        raise ValueError(f"sparse_flex has no attention dropout, got a layer with {dropout}")
    return block_attention(query, key, value, inputs.compiled[0], scaling), None


def block_attention(query, key, value, block_mask, scaling):
    """
    Attention under a block mask, compiled for each shape on its first use.

    Queries without a live key, and padded ones, give exactly 0 and no gradient.

    Args:
        query, key, value (`torch.Tensor` of shape `(B, H, m, d)`): Any strides; see [`refuse`] for the limits.
        block_mask (`BlockMask`): Of [`make_block_mask`].
        scaling (`float`): Factor of the scores.

    Returns:
        `torch.Tensor` of shape `(B, m, H, d)`, contiguous.
    """
    if not torch.is_grad_enabled():
        # On CPU the operator refuses inputs that require a gradient even where none is computed.
        query, key, value = query.detach(), key.detach(), value.detach()
    if torch.compiler.is_compiling():
        function = _attention
        if query.device.type == "cpu":
            # The kernel takes its shapes from memory, where the output of a projection lies as (B * m, H * d).
            query, key = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key))
    else:
        function = _compiled(*query.shape, query.dtype, query.device)
    return function(query, key, value, block_mask, scaling).transpose(1, 2).contiguous()
