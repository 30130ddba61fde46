"""
The registry of attention backends, what each can serve, and how one is run.

To add a backend, write a function and give it a row in `BACKENDS`. A backend that is named explicitly either serves a
request or raises; `choice.py` has the names that choose one.
"""

from dataclasses import replace

import torch

from .biases.mask_biases import prepare_bias
from .capabilities import WANTED, Backend, Request
from .distance_bias import merged_distances
from .kernels import cpu, flex, sdpa, triton, triton_limits
from .kernels.eager import eager_attention
from .mask_inputs import MaskInputs, autocast_dtype
from .packed_batches import in_one_row
from .padded_tokens import clear_output, clear_padding
from .probability_maps import PROBABILITY_MAPS
from .rest import pooled_rest, with_rest


_KERNEL = frozenset({"distance_bias", "rest"})
BACKENDS: dict[str, Backend] = {
    "sparse_eager": Backend(
        eager_attention, prepare_bias, supports=frozenset(WANTED), probability_maps=tuple(PROBABILITY_MAPS)
    ),
    "sparse_sdpa": Backend(sdpa.sdpa_attention, sdpa.prepare, supports=frozenset(WANTED) - {"gate", "weights"}),
    "sparse_cpu": Backend(cpu.csr_backend, cpu.prepare, cpu.refuse, supports=_KERNEL | {"window"}, raw=True),
    "sparse_triton": Backend(triton.triton_backend, triton.prepare, triton_limits.refuse, supports=_KERNEL),
    "sparse_flex": Backend(flex.flex_backend, flex.prepare, flex.refuse, supports=_KERNEL),
}


def refusal(name: str, request: Request) -> str | None:
    """The reason why backend `name` cannot serve `request`, or `None` if it can."""
    backend = BACKENDS[name]
    if lacking := request.needs - backend.supports:
        return f"it does not support {WANTED[min(lacking)]}"
    if request.probability_map not in backend.probability_maps:
        return f"it does not support probability_map {request.probability_map!r}"
    return backend.refuse(request)


def check_request(name: str, request: Request) -> None:
    """Check that backend `name` serves `request`; the error names those that do."""
    if reason := refusal(name, request):
        able = [other for other in BACKENDS if refusal(other, request) is None]
        raise ValueError(f"{name} cannot run here: {reason}. Use {', '.join(able)} or sparse_auto")


def check_returns_attentions(name: str | None) -> None:
    """Check that a backend, if one is named, can return attention probabilities."""
    if name in BACKENDS and "weights" not in BACKENDS[name].supports:
        able = [other for other, backend in BACKENDS.items() if "weights" in backend.supports]
        raise ValueError(f"output_attentions: {name} does not return attentions, use {', '.join(able)} or sparse_auto")


def prepared(inputs: MaskInputs) -> MaskInputs:
    """The same with what its backend reads of the frozen mask."""
    assert inputs.sparse_mask is not None
    return replace(inputs, **BACKENDS[inputs.backend].prepare(inputs.sparse_mask, inputs))


def run_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float, dropout: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Attention under the mask of one layer, on the backend that `inputs` names, for queries `(B, H, n, d)`, the last n
    of the m positions of key and value `(B, H, m, d)`: the output `(B, n, H, d)`, and the probabilities `(B, H, n, m)`
    or `None`. Padded tokens affect no other ones, whatever they hold.
    """
    if inputs.compiled[0] is not None or inputs.learned[0] is not None:
        # PyTorch's operators cast their inputs under autocast, ours do not.
        dtype = autocast_dtype(query.device.type, query.dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    backend, documents, rows = BACKENDS[inputs.backend], inputs.documents, query.shape[0]
    if documents is not None:
        query, key, value = map(in_one_row if backend.raw else documents.unpack, (query, key, value))
    if backend.raw:
        output, weights = backend.function(query, key, value, inputs, scaling, dropout)
        return output if documents is None else output.view(rows, -1, *output.shape[2:]), weights
    rest = None
    if inputs.rest[0] is not None:
        rest = pooled_rest(query, key, value, inputs, scaling)
        inputs = replace(inputs, rest=(rest,))
    query, key, value = clear_padding(inputs, scaling, query, key, value)
    size = value.shape[-1]
    if rest is not None and inputs.compiled[0] is None:
        query, key, value, inputs = with_rest(query, key, value, inputs, rest, scaling)
    if inputs.compiled[0] is None:
        inputs = merged_distances(inputs)
    output, weights = backend.function(query, key, value, inputs, scaling, dropout)
    if output.shape[-1] > size:
        output = output[..., :size].contiguous()
    output = clear_output(inputs, output)
    if documents is None:
        return output, weights
    return documents.pack(output, rows), None if weights is None else documents.pack_weights(weights, rows)
