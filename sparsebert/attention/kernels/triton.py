"""
The Triton backend: attention through the tile form of a mask, on CUDA devices, or on any device in Triton's
interpreter.

Up to `SHORT_LENGTH` tokens a program visits all keys of its queries, and for the shortest inputs a single backward
kernel keeps a whole head on the chip. For longer inputs the kernels follow the tile lists.

Letters: B batch, H heads, n length (queries and keys), d head size.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...masks.compiled_forms import compiled
from ...masks.sparse_mask import SparseMask
from ...masks.tiles import TILE, TileForm, tile_form
from ..mask_inputs import MaskInputs, per_sequence
from ..rest import Rest, removed_keys
from .triton_launch import configurations, interpreted, launch
from .triton_limits import capability, check


# Largest n of the forward without tile lists.
SHORT_LENGTH = 256
# Largest n of the single-kernel backward for 16-bit dtypes, by head size, on GPUs of compute capability 9.0 and later.
# Beyond it, registers would spill.
SHORT_BACKWARD = {32: 128, 64: 128, 128: 64}


def tile_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    padding: torch.Tensor | None,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    diagonal: bool | None,
    causal: bool,
    seed: torch.Tensor | None,
    dropout: float,
    scaling: float,
    spans: torch.Tensor | None = None,
    rest: Rest | None = None,
    removed: torch.Tensor | None = None,
    special_rows: bool = True,
    distances: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention `(B, n, H, d)` under a mask in tile form; queries without a key give 0.

    `tiles` is a [`TileForm`] on the device of the query, with the mask's diagonal and causality but not its special
    tokens: `first` and `last` are their positions, int32 `(B,)` or `(1,)`, whose rows and columns are on, without
    their diagonal entries if `diagonal` is false, and cut if `causal`; without `special_rows` their columns alone.
    `padding` is bool `(B, n)`, `spans` its
    [`real_spans`] if they are at hand. `dropout` needs a `seed`, int64 `(2,)`, and is rounded to multiples of 1/65536;
    `scaling` is positive. Query, key and value `(B, H, n, d)` have any strides and the same dtype: bfloat16, float16
    or float32.

    `rest` is one more key, which dropout never drops. `removed` is then the number of keys that the mask removes for
    each query, int32 `(H, n)`; with padding it is counted. `distances`, float32 `(H, 2n - 1)` and contiguous, is added
    to the scores, that of query i and key j at `i - j + n - 1`; its gradient is a sum in an order that varies.
    """
    check(query, key, value, tiles, seed, dropout, scaling)
    threshold = min(max(round((1 - dropout) * 65536), 1), 65536)
    if padding is not None:
        spans = real_spans(padding) if spans is None else spans
        padding = padding.contiguous().view(torch.int8)
    seed = None if threshold == 65536 else seed
    tensors = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value)]
    rests: list[Any] = [] if rest is None else [tensor.float().contiguous() for tensor in rest]
    sources = [*tensors, *rests, *([] if distances is None else [distances])]
    options = (diagonal is False, causal, special_rows, threshold, scaling)
    optional = (padding, spans, first, last, seed, *(rests or [None] * 3), removed, distances)
    arguments = (*tensors, list(tiles), *optional, *options)
    if _observed(*sources):
        output, _ = torch.ops.sparsebert.tile_attention(*arguments)
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources):
        output, _ = _TileAttention.apply(*arguments)
    else:
        output, _ = _forward(*arguments)
    return output


def _observed(*tensors):
    """
    Whether a call is traced, transformed or recorded, and must be that of an operator. Other calls skip the operator,
    because the autograd of an operator in Python takes the host longer than the kernels of 512 tokens take the GPU.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or torch._C._are_functorch_transforms_active()
        or any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    )


def real_spans(padding: torch.Tensor) -> torch.Tensor:
    """
    Where the real tokens of each sequence are, int64 `(B, 3 + n / 64)`: the position of the first one, one past that
    of the last, and whether there is padding between them, `(n, 0, 0)` if there is none; then a word for each 64
    tokens, whose bits are on for real ones.
    """
    length = padding.shape[1]
    position = torch.arange(length, device=padding.device)
    begin = torch.where(padding, position, length).amin(1)
    end = torch.where(padding, position + 1, 0).amax(1)
    bits = torch.nn.functional.pad(padding, (0, -length % TILE)).unflatten(1, (-1, TILE)).long()
    words = (bits << torch.arange(TILE, device=padding.device)).sum(-1)
    holes = padding.sum(1) < end - begin
    return torch.cat([torch.stack([begin, end, holes.long()], 1), words], 1)


def short_backward_limit(head_size: int, dtype: torch.dtype, capability: int) -> int:
    """The largest n of the single-kernel backward; 0 if it is not used."""
    return SHORT_BACKWARD[head_size] if capability >= 90 and dtype != torch.float32 else 0


def _hardware(query):
    """The dtype and compute capability that select configurations; the interpreter treats float32 like 16 bits."""
    if interpreted():
        return torch.bfloat16, 90
    return query.dtype, capability(query.device.index)


def _bucket(length):
    """The next power of two. Lengths of the same bucket share a configuration."""
    return 1 << (length - 1).bit_length()


# The operators' arguments after query, key and value. `threshold`: how often of 65536 times an entry is kept.
_MASK = (
    "Tensor[] tiles, Tensor? padding, Tensor? spans, Tensor? first, Tensor? last, Tensor? seed, Tensor? rest_key, "
    "Tensor? rest_value, Tensor? rest_score, Tensor? removed, Tensor? distances, bool diagonal_off, bool causal, "
    "bool special_rows, int threshold, float scaling"
)
# Where among them those of the rest and the bias per distance are.
_REST, _DISTANCES = slice(6, 10), 10


def _kernel_arguments(query, key, value, tiles, padding, spans, first, last, seed, *more):
    """
    What the kernels have in common: the tile form, the run-time arguments after the tile form, in two parts between
    which those of the rest are, the compile-time arguments, whether there are special columns and special rows, and
    the configurations of a kernel by its name.
    """
    tiles, (diagonal_off, causal, special_rows, threshold, scaling) = TileForm(*tiles), more[5:]
    strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:3]]
    # 0 where a position is the same in all sequences.
    token_strides = [int(positions is not None and len(positions) > 1) for positions in (first, last)]
    sizes = [query.shape[1], query.shape[2], *tiles.tiles.shape[1:]]
    factors = [scaling / math.log(2), scaling, threshold, 65536 / threshold]
    mask = {"DIAGONAL_OFF": diagonal_off, "CAUSAL": causal, "SPECIAL_ROWS": special_rows}
    constants = {"HEAD": query.shape[3], "BLOCK_Q": TILE, "BLOCK_K": TILE, **mask}
    special = first is not None or last is not None
    sequences, numbers = [padding, spans, first, last, seed], [*strides, *token_strides, *sizes, *factors]

    def choices(kernel):
        given = [tensor is not None for tensor in (seed, more[0], more[_DISTANCES - _REST.start])]
        return configurations(kernel, query.shape[3], *_hardware(query), *given)

    return tiles, sequences, numbers, constants, (special, special and special_rows), choices


def _forward(query, key, value, *mask):
    """
    Output `(B, n, H, d)` and base-2 logarithm of the normalizer `(B, H, n)`; with a rest `(2, B, H, n)`, where its
    scores are the second.
    """
    output, lse = _attention_shapes(query, key, value, *mask)
    tiles, sequences, numbers, constants, (_, special_rows), choices = _kernel_arguments(query, key, value, *mask)
    batch, num_heads, length, head_size = query.shape
    short = length <= SHORT_LENGTH
    constants["PARTIAL"] = not short and len(tiles.partial) > 0
    programs = tiles.tiles.shape[1] + (special_rows and not short)
    launch(
        "row_kernel",
        batch * num_heads * programs,
        [query, key, value, output, lse, None, None, None, *tiles[:6], *sequences, *mask[_REST], None]
        + [mask[_DISTANCES], None, *numbers],
        constants | {"SHORT": short, "GRADIENT": False},
        choices("short_forward" if short else "forward"),
        max(_bucket(length), SHORT_LENGTH),
    )
    return output, lse


def _attention_shapes(query, key, value, *mask):
    batch, num_heads, length, head_size = query.shape
    output = query.new_empty(batch, length, num_heads, head_size)
    rows = (batch, num_heads, length) if mask[_REST][0] is None else (2, batch, num_heads, length)
    return output, query.new_empty(rows, dtype=torch.float32)


def _backward(output_grad, learned, query, key, value, output, lse, *mask):
    """
    Gradients of query, key and value, `(B, H, n, d)` in the memory order `(B, n, H, d)`, with a rest those of its
    key, value and score, and of the bias per distance if that is `learned`: a list.
    """
    gradients = [torch.empty_like(output) for _ in range(3)]
    tiles, sequences, numbers, constants, (special, special_rows), choices = _kernel_arguments(
        query, key, value, *mask
    )
    batch, num_heads, length, head_size = query.shape
    rest_key, rest_value, *_ = mask[_REST]
    distances = mask[_DISTANCES]
    distance_grad = torch.zeros_like(distances) if learned else None
    # To choose among several, a kernel is run again and again, which would add as often to this gradient.
    most = 1 if learned else None

    def sums_over(programs):
        return None if rest_key is None else lse.new_empty(batch, num_heads, programs, 2 * head_size + 1)

    if length <= short_backward_limit(head_size, *_hardware(query)):
        sums = sums_over(1)
        launch(
            "short_backward_kernel",
            batch * num_heads,
            [query, key, value, output, lse, output_grad, *gradients, *tiles[:2], *sequences, rest_key, rest_value]
            + [sums, distances, distance_grad, *numbers],
            constants | {"ROWS": max(_bucket(length), TILE)},
            choices("short_backward")[:most],
            max(_bucket(length), TILE),
        )
    else:
        constants["PARTIAL"] = len(tiles.partial) > 0
        delta = lse.new_empty(batch, num_heads, length)
        programs = tiles.tiles.shape[1] + special_rows
        sums = sums_over(programs)
        bucket = max(_bucket(length), SHORT_LENGTH)
        launch(
            "row_kernel",
            batch * num_heads * programs,
            [query, key, value, output, lse, output_grad, delta, gradients[0], *tiles[:6], *sequences]
            + [rest_key, rest_value, None, None, sums, distances, distance_grad, *numbers],
            constants | {"SHORT": False, "GRADIENT": True},
            choices("query_grad")[:most],
            bucket,
        )
        launch(
            "column_kernel",
            batch * num_heads * (tiles.tiles.shape[2] + special),
            [query, key, value, lse, output_grad, delta, *gradients[1:], *tiles[:2], *tiles[6:], *sequences]
            + [distances, *numbers],
            constants,
            choices("column"),
            bucket,
        )
    gradients = [gradient.transpose(1, 2) for gradient in gradients]
    if sums is not None:
        gradients += [part.sum(2) for part in (sums[..., :head_size], sums[..., head_size:-1], sums[..., -1])]
    return gradients if distance_grad is None else [*gradients, distance_grad]


def _backward_shapes(output_grad, learned, query, key, value, output, lse, *mask):
    gradients = [torch.empty_like(output).transpose(1, 2) for _ in range(3)]
    more = [] if mask[_REST][0] is None else mask[_REST][:3]
    return [*gradients, *map(torch.empty_like, [*more, *([mask[_DISTANCES]] if learned else [])])]


def _no_second_derivatives(ctx, *grads):
    raise RuntimeError("sparse_triton has no second derivatives: use sparse_eager")


def _remember(ctx, inputs, output):
    query, key, value, tiles, padding, spans, first, last, seed, *more = inputs
    *rest, _, distances = more[:5]
    ctx.num_tiles, ctx.has_rest, ctx.options = len(tiles), rest[0] is not None, more[5:]
    ctx.save_for_backward(query, key, value, *output, padding, spans, first, last, seed, *rest, distances, *tiles)


def _learned(ctx):
    """Whether the bias per distance gets a gradient."""
    return ctx.needs_input_grad[3 + _DISTANCES]


def _saved(ctx, output_grad):
    """The arguments of the backward."""
    # Activation checkpointing lets `ctx.saved_tensors` be read once only.
    query, key, value, output, lse, padding, spans, first, last, seed, *more = ctx.saved_tensors
    tensors = (output_grad.contiguous(), _learned(ctx), query, key, value, output, lse)
    return *tensors, more[4:], padding, spans, first, last, seed, *more[:3], None, more[3], *ctx.options


def _by_argument(ctx, tiles, query_grad=None, key_grad=None, value_grad=None, *more):
    """The gradients of all arguments, of which `tiles` is that of the tiles."""
    rest = more[:3] if ctx.has_rest and more else [None] * 3
    distances = more[-1] if _learned(ctx) and more else None
    return query_grad, key_grad, value_grad, tiles, *[None] * 5, *rest, None, distances, *[None] * len(ctx.options)


def _differentiate(ctx, output_grad, lse_grad):
    gradients = torch.ops.sparsebert.tile_attention_backward(*_saved(ctx, output_grad))
    return _by_argument(ctx, [None] * ctx.num_tiles, *gradients)


_TENSORS = "Tensor query, Tensor key, Tensor value"
_attention = torch.library.custom_op(
    "sparsebert::tile_attention", _forward, mutates_args=(), schema=f"({_TENSORS}, {_MASK}) -> (Tensor, Tensor)"
)
_attention.register_fake(_attention_shapes)
_attention.register_autograd(_differentiate, setup_context=_remember)
_attention_backward = torch.library.custom_op(
    "sparsebert::tile_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor output_grad, bool learned, {_TENSORS}, Tensor output, Tensor lse, {_MASK}) -> Tensor[]",
)
_attention_backward.register_fake(_backward_shapes)
_attention_backward.register_autograd(_no_second_derivatives)


class _TileAttention(torch.autograd.Function):
    """The operator `sparsebert::tile_attention` and its gradients, without PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx, *arguments):
        output, lse = _forward(*arguments)
        _remember(ctx, arguments, (output, lse))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx, output_grad, _):
        if output_grad is None:
            return _by_argument(ctx, None)
        # With a graph of the backward, the operator says that it has no second derivatives.
        operator = torch.is_grad_enabled() or _observed(output_grad)
        function = torch.ops.sparsebert.tile_attention_backward if operator else _backward
        return _by_argument(ctx, None, *function(*_saved(ctx, output_grad)))


def prepare(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """
    The tile form of every layer's mask with the spans of the real tokens of each sequence or, without padding, the
    numbers of keys that a rest stands for; the special tokens of each sequence; and the seeds of dropout. What depends
    on the batch is made here, once for all layers, since each operation of a layer is a launch.
    """
    tiles = compiled(mask, tile_form, inputs.num_keys, inputs.causal, inputs.device)
    first, last, spans = inputs.first(), inputs.last(), None
    removed: tuple[tuple[torch.Tensor | None, ...], ...] = ((None,),) * len(tiles)
    if inputs.padding is not None:
        batch, spans = len(inputs.padding), real_spans(inputs.padding)
        first, last = per_sequence(first, batch), per_sequence(last, batch)
    elif any(bias is not None for bias in inputs.rest):
        removed = compiled(mask, removed_keys, inputs.num_keys, inputs.causal, inputs.device, "all")
    forms = tuple((*form, spans, *number) for form, number in zip(tiles, removed, strict=True))
    seeds = draw_seeds(inputs.dropout_layers, inputs.device) if inputs.dropout_layers else (None,)
    return {"compiled": forms, "first_token": first, "last_token": last, "seeds": seeds}


def draw_seeds(number: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Seeds of [`tile_attention`] from PyTorch's random numbers, drawn by one launch."""
    return torch.randint(-(2**63), 2**63 - 1, (number, 2), device=device).unbind(0)


def triton_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float, dropout: float
) -> tuple[torch.Tensor, None]:
    """Triton kernels on the tile form of the mask, on CUDA devices, or on any device in Triton's interpreter."""
    mask = inputs.sparse_mask
    assert mask is not None
    seed = inputs.seeds[0]
    if dropout and seed is None:
        (seed,) = draw_seeds(1, query.device)
    *tiles, spans, removed = inputs.compiled[0]
    output = tile_attention(
        query,
        key,
        value,
        tiles,
        inputs.padding,
        inputs.first_token,
        inputs.last_token,
        mask.diagonal,
        inputs.causal,
        seed,
        dropout,
        scaling,
        spans,
        inputs.rest[0],
        removed,
        mask.special_rows,
        inputs.distance_bias[0],
    )
    return output, None
