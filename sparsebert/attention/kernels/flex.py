"""
PyTorch's FlexAttention under a block mask: forward on CPU and CUDA, gradients on CUDA only, no attention dropout.

Letters: B batch, H heads, n queries, m keys (n = m here), d head size, t tiles per side, t = ceil(m / block).
"""

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers.utils import logging

from ...masks.compiled_forms import compiled, remember
from ...masks.sparse_mask import SparseMask
from ..mask_inputs import MaskInputs
from ..rest import removed_keys


if TYPE_CHECKING:
    from ..capabilities import Request


logger = logging.get_logger(__name__)

# Side of the square tiles. On CPU, 32 lets most of a window mask be skipped; on CUDA the kernels are tuned for 128.
BLOCK_SIZES = {"cpu": 32, "cuda": 128}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CUDA_HEAD_SIZE = 16
# A warning is logged when this many kinds of inputs have been compiled.
MANY_COMPILED = 64


def refuse(request: "Request") -> str | None:
    """The reason why this backend cannot serve a request, or `None` if it can."""
    if request.dropout:
        return "it has no attention dropout; set attention_probs_dropout_prob to 0 and rebuild the model"
    if request.device not in BLOCK_SIZES:
        return f"it runs on {' or '.join(BLOCK_SIZES)}, got device {request.device!r}"
    if request.device == "cpu" and request.gradients:
        return "it has no gradients on device 'cpu'; run under torch.no_grad()"
    if "distance_bias" in request.needs and request.gradients and torch.are_deterministic_algorithms_enabled():
        return "its gradient of a bias per distance is not deterministic"
    if request.device == "cpu" and "rest" in request.needs and torch.compiler.is_compiling():
        return "inside torch.compile it has no rest on device 'cpu'"
    if request.num_queries != request.num_keys:
        return f"it needs as many queries as keys, got {request.num_queries} and {request.num_keys}; use_cache=False"
    if request.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(map(str, DTYPES))}, got {request.dtype}"
    if request.device == "cuda" and request.head_size < MIN_CUDA_HEAD_SIZE:
        return f"head size must be at least {MIN_CUDA_HEAD_SIZE} on CUDA, got {request.head_size}"
    return None


def _tiles(values, block):
    """Bool `(..., m)` split into tiles of `block`, False beyond m: `(..., t, block)`."""
    length = values.shape[-1]
    num_tiles = -(-length // block)
    return torch.nn.functional.pad(values, (0, num_tiles * block - length)).unflatten(-1, (num_tiles, block))


def live_tiles(base: torch.Tensor, block: int) -> torch.Tensor:
    """The tiles of a mask `(H, m, m)` that have any entry on: bool `(H, t, t)`."""
    rows = _tiles(base.mT, block).any(-1).mT  # (H, t, m)
    return _tiles(rows, block).any(-1)


def full_tiles(base: torch.Tensor, block: int) -> torch.Tensor:
    """
    The tiles of a mask `(H, m, m)` whose entries are all on: bool `(H, t, t)`. One that reaches beyond the mask is
    never full.
    """
    rows = _tiles(base.mT, block).all(-1).mT  # (H, t, m)
    return _tiles(rows, block).all(-1)


def _listed(live):
    """For each row of tiles `(..., t, t)`: the number of live tiles `(..., t)` and all columns, live first; int32."""
    order = torch.argsort(live.to(torch.int32), dim=-1, descending=True, stable=True)
    return live.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _materialized(tensor):
    """
    The same tensor, stored in memory of its own in a compiled graph. If `mask_mod` captured an expression that the
    compiler has yet to evaluate, it would find no kernel for it on CPU.
    """
    return None if tensor is None else tensor.as_strided(tensor.size(), tensor.stride())


def make_block_mask(
    base: torch.Tensor,
    live_map: torch.Tensor,
    full_map: torch.Tensor,
    block: int,
    padding: torch.Tensor | None,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    diagonal: bool | None,
    causal: bool,
    special_rows: bool = True,
) -> BlockMask:
    """
    The block mask of one layer, `(B or 1, H, m, m)`, made from the cached maps of its tiles.

    `base` `(H, m, m)` is the mask with its `diagonal` override and, in a decoder, without future keys, but without
    special tokens: `first` and `last` are their positions, int32 `(B,)`, or `(1,)` if they are the same for all
    sequences, whose columns are on, and their rows if `special_rows`. `live_map` and `full_map` are the results of
    [`live_tiles`] and [`full_tiles`]; full tiles are not masked entry by entry unless they contain a padded token,
    which is faster and changes no result. `padding` is bool `(B, m)`; without it the block mask serves a batch of any
    size.
    """
    length, num_tiles = base.shape[-1], live_map.shape[-1]
    tile = torch.arange(num_tiles, device=base.device)
    special = torch.zeros(1, num_tiles, dtype=torch.bool, device=base.device)
    for token in (first, last):
        if token is not None:
            special = special | (tile == token[:, None] // block)
    live = live_map | special[:, None, None, :]  # (B or 1, H, t, t)
    if special_rows:
        live = live | special[:, None, :, None]
    if causal:
        live = live & (tile[:, None] >= tile)
    full = full_map
    if padding is not None:
        real = _tiles(padding, block)
        some, every = real.any(-1), real.all(-1)  # (B, t)
        live = live & some[:, None, :, None] & some[:, None, None, :]
        full = full & every[:, None, :, None] & every[:, None, None, :]
    full = full.expand(live.shape)
    shared_first, shared_last = (token is not None and len(token) == 1 for token in (first, last))
    first = first[0] if first is not None and shared_first else first
    last = last[0] if last is not None and shared_last else last
    if torch.compiler.is_compiling():
        base, padding, first, last = map(_materialized, (base, padding, first, last))

    def mask_mod(b, h, i, j):
        keep = base[h, i, j]
        if first is not None:
            start = first if shared_first else first[b]
            keep = keep | (j == start)
            if special_rows:
                keep = keep | (i == start)
        if last is not None:
            end = last if shared_last else last[b]
            keep = keep | (j == end)
            if special_rows:
                keep = keep | (i == end)
        if diagonal is False:
            keep = keep & (i != j)
        if causal:
            keep = keep & (i >= j)
        if padding is not None:
            keep = keep & padding[b, i] & padding[b, j]
        return keep

    number, columns = _listed(live & ~full)
    full_number, full_columns = _listed(full)
    return BlockMask.from_kv_blocks(
        number,
        columns,
        full_number,
        full_columns,
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        seq_lengths=(length, length),
        # Only gradients use the transposed lists, which take longer to make than the others.
        compute_q_blocks=base.device.type != "cpu",
    )


def _removed_with_padding(table, padding, tokens, diagonal, special_rows):
    """[`removed_keys`] of each sequence `(B, H, m)`, for the arguments of [`make_block_mask`]."""
    position, special = torch.arange(table.shape[-1], device=table.device), torch.zeros_like(padding)
    for token in tokens:
        if token is not None:
            special = special | (position == token[:, None])
    number = padding.sum(-1)[:, None, None]
    with torch.autocast(table.device.type, enabled=False):
        others = (padding & ~special).float().T
        kept = torch.stack([head.float() @ others for head in table]).permute(2, 0, 1)
    kept = kept + (padding & special).sum(-1)[:, None, None]
    if not special_rows:  # whose own entries are among those of the columns
        return number - kept + (special & padding)[:, None] * int(diagonal is False)
    return number - torch.where(special[:, None], number - int(diagonal is False), kept)


def _attention(query, key, value, block_mask, scaling, with_lse, distances):
    """The output `(B, H, m, d)`, `with_lse` and the logarithm of the normalizer `(B, H, m)`."""
    add = None
    if distances is not None:  # (H, 2m - 1)
        middle = key.shape[2] - 1

        def add(score, b, h, i, j):
            return score + distances[h, i - j + middle]

    if with_lse:
        aux = AuxRequest(lse=True)
        output, found = flex_attention(query, key, value, add, block_mask, scaling, return_aux=aux)
        return output, found.lse
    return flex_attention(query, key, value, add, block_mask, scaling)


@functools.cache
def _compiled(backend, *kind):
    """
    `_attention` compiled for inputs of one kind: a shape, and all else that PyTorch compiles again for. It refuses to
    compile a code object more than `recompile_limit` times, so each kind gets its own.
    """
    if _compiled.cache_info().currsize == MANY_COMPILED:
        logger.warning_once(
            f"sparse_flex has been compiled for {MANY_COMPILED} kinds of inputs (shapes, masks with and without "
            "padding, with and without gradients), which takes seconds each. Pad to fewer lengths and batch sizes."
        )
    code = _attention.__code__.replace(co_name="_".join(["flex", *map(str, kind)]))
    return torch.compile(types.FunctionType(code, globals()), backend=backend, fullgraph=True, dynamic=False)


def num_compiled() -> int:
    """Number of kinds of inputs for which this process has compiled the attention, which takes seconds each."""
    return _compiled.cache_info().currsize


def _forms(table, block):
    return table, live_tiles(table, block), full_tiles(table, block)


def prepare(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """The block mask of every layer, with a rest in a pair with [`removed_keys`]."""
    device, block = inputs.device, BLOCK_SIZES[inputs.device.type]

    def forms():
        return compiled(mask, _forms, inputs.num_keys, inputs.causal, device, options=(block,))

    def make():
        tokens = (inputs.first(), inputs.last())
        return tuple(
            make_block_mask(*form, block, inputs.padding, *tokens, mask.diagonal, inputs.causal, mask.special_rows)
            for form in forms()
        )

    if inputs.padding is not None or torch.compiler.is_compiling():
        masks = make()
    else:
        masks = remember(mask, ("block mask", inputs.num_keys, inputs.causal, str(device)), make)
    if all(bias is None for bias in inputs.rest):
        return {"compiled": masks}
    if inputs.padding is None:
        removed = [
            form[0] for form in compiled(mask, removed_keys, inputs.num_keys, inputs.causal, device, special="all")
        ]
    else:
        tokens = (inputs.first(), inputs.last())
        rules = (inputs.padding, tokens, mask.diagonal, mask.special_rows)
        removed = [_removed_with_padding(form[0], *rules) for form in forms()]
    return {"compiled": tuple(zip(masks, removed, strict=True))}


def flex_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float, dropout: float
) -> tuple[torch.Tensor, None]:
    """PyTorch's FlexAttention under a block mask: gradients on CUDA only, no attention dropout."""
    if dropout:
        raise ValueError(f"sparse_flex has no attention dropout, got a layer with dropout {dropout}")
    rest, distances = inputs.rest[0], inputs.distance_bias[0]
    if rest is None:
        output = block_attention(query, key, value, inputs.compiled[0], scaling, distances=distances)
    else:
        block_mask, removed = inputs.compiled[0]
        output, lse = block_attention(query, key, value, block_mask, scaling, True, distances)
        scores = (query * rest.key[:, :, None]).sum(-1) * scaling + rest.score[..., None] + removed.clamp(min=1).log()
        stands = removed > 0 if inputs.padding is None else (removed > 0) & inputs.padding[:, None]
        share = torch.where(stands, torch.sigmoid(scores - lse), 0.0)[..., None]  # (B, H, m, 1)
        output = (output + share * (rest.value[:, :, None] - output)).to(query.dtype)
    return output.transpose(1, 2).contiguous(), None


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask,
    scaling: float,
    with_lse: bool = False,
    distances: torch.Tensor | None = None,
) -> Any:
    """
    Attention `(B, H, m, d)` under a block mask, compiled on first use for each kind of inputs: a shape, a dtype, a
    scale, a mask with or without padding, and so on. Queries without a live key give exactly 0 and get no gradient.
    `with_lse`: and the logarithm of each query's normalizer, `(B, H, m)`. PyTorch's kernel for CPUs has none, so on
    CPUs the scores are then stored. `distances` `(H, 2m - 1)` are added to the scores, see [`distance_bias`].
    """
    if not torch.is_grad_enabled():
        # On CPU the operator refuses inputs that require a gradient, even if none is computed.
        query, key, value = query.detach(), key.detach(), value.detach()
        distances = None if distances is None else distances.detach()
    if torch.compiler.is_compiling():
        function, distances = _attention, _materialized(distances)
        if query.device.type == "cpu":
            # The kernel reads its shapes from the memory layout, and a projection's output lies as (B * m, H * d).
            query, key = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key))
    else:
        # The mask is a constant of the graph up to the values of its tensors.
        parts = (cell.cell_contents for cell in block_mask.mask_mod.__closure__ or ())
        mask = (part.shape if isinstance(part, torch.Tensor) else part for part in parts)
        kind = (
            *query.shape,
            query.dtype,
            query.device,
            scaling,
            torch.is_grad_enabled(),
            with_lse,
            distances is None,
            *mask,
        )
        function = _compiled("eager" if with_lse and query.device.type == "cpu" else "inductor", *kind)
    return function(query, key, value, block_mask, scaling, with_lse, distances)
