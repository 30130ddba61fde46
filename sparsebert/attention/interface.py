"""
The link to transformers: the functions that its tables of attention and of masks have under all our names.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask
from transformers.utils import logging

from ..checks import nearest
from ..masks.sparse_mask import SparseMask
from .backends import BACKENDS, prepared, run_backend
from .biases.mask_biases import prepare_bias
from .capabilities import WANTED, Backend, Request
from .choosing.choice import ATTENTION_NAMES, CHOICES, SAVED_NAMES, TWINS
from .mask_inputs import MaskInPlace, MaskInputs, check_arguments
from .probability_maps import PROBABILITY_MAPS


logger = logging.get_logger(__name__)

_OWN = tuple(BACKENDS)
# The stock encoders that can carry a mask, see `models.architectures`, which has the rows.
ARCHITECTURES: dict[str, str] = {}
# Model types whose stock attention adds the mask to the scores, under whatever name: it has no interface.
WITHOUT_INTERFACE = ("mpnet",)
_RUNS_DENSE = (
    "%s runs dense, since its model carries no mask: pass one to sparsebert.attach. A model that is made from the "
    "configuration of another does not get the mask of that model."
)


def sparse_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskInPlace | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    mask_inputs: MaskInputs | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The attention function registered under all our names, for the last n of m positions.

    Key and value may have fewer heads than the query, several of which then share one. `mask_inputs` are those that
    [`SparseAttention`] prepared for this forward, `attention_mask` the result of [`sparse_attention_mask`]. Modules
    that carry no mask, such as cross-attention, run dense, and causal if `is_causal` or else the module's attribute of
    that name says so; if the whole model carries none, a warning says so once. A `position_bias` is added to their
    scores; under a mask the mask inputs have it. Returns the output `(B, n, H, d)`, and the probabilities `(B, H, n,
    m)` or `None`.
    """
    check_arguments(module, kwargs)
    if isinstance(attention_mask, MaskInPlace):
        mask_inputs = attention_mask.mask_inputs
        attention_mask = attention_mask.attention_mask
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    carries_mask = getattr(module, "sparse_attention", None) is not None
    if carries_mask and (mask_inputs is None or mask_inputs.distance_bias[0] is None):
        check_arguments(module, {"position_bias": position_bias})
    if not carries_mask:
        if getattr(getattr(module, "config", None), "_attn_implementation", None) in SAVED_NAMES:
            raise RuntimeError(
                f"{type(module).__name__}: the model was saved with a mask, and loaded without it while "
                "sparsebert.plugin was disabled: load it with sparsebert.load"
            )
        if mask_inputs is None and not torch.compiler.is_compiling():
            logger.warning_once(_RUNS_DENSE % type(module).__name__)
        backend = mask_inputs.backend if mask_inputs and mask_inputs.compiled[0] is None else "sparse_sdpa"
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and (attention_mask is None or attention_mask.dim() == 2):
            rows, columns = query.shape[2], key.shape[2]
            keep = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)[None, None]
            attention_mask = keep if attention_mask is None else keep & attention_mask.bool()[:, None, None, :]
        mask_inputs = MaskInputs.dense(attention_mask, backend, position_bias)
    elif mask_inputs is None:
        raise RuntimeError(
            f"{type(module).__name__} carries a sparse mask but was called without its base model, which prepares it"
        )
    else:
        documents = mask_inputs.documents
        expected = mask_inputs.num_keys if documents is None else documents.num_tokens // key.shape[0]
        if key.shape[2] != expected:
            raise ValueError(
                f"sparse attention expects {expected} keys, got {key.shape[2]}: static key/value caches "
                "are not supported, use a DynamicCache or use_cache=False"
            )
        if not torch.compiler.is_compiling():
            mask_inputs.reached.add(id(module))
        layer: Any = module.mask_layer
        mask_inputs = _on_device(mask_inputs, query.device).for_layer(layer, attention_mask)
    if key.shape[1] != query.shape[1]:
        # Several query heads share a key head.
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    return run_backend(query, key, value, mask_inputs, scaling, dropout)


def _on_device(inputs, device):
    """The inputs on the device of a layer, which differs in a model that is split: moved once per forward."""
    if inputs.device == device:
        return inputs
    if device not in inputs.moved:
        moved = inputs.on_device(device)
        if moved.local is not None:
            moved = replace(moved, local=_on_device(moved.local, device))
        inputs.moved[device] = moved if moved.sparse_mask is None else prepared(moved)
    return inputs.moved[device]


def sparse_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """
    The mask function registered under all our names.

    A [`MaskInPlace`] stays what it is. For bidirectional and causal attention it returns the padding mask `(B, m)` or
    `None` unchanged, since [`SparseAttention`] applies padding and causality itself, and [`sparse_attention_forward`]
    where there is none. For anything else, and for a cache with room for later keys, it returns a bool mask `(B, 1, n,
    m)`. A stock model `WITHOUT_INTERFACE`, or one that is none of the `ARCHITECTURES`, gets what is to be added to its
    scores: it may do so itself, or not say whether it is causal.
    """
    if isinstance(attention_mask, MaskInPlace):
        return attention_mask  # type: ignore[return-value]
    model_type = getattr(kwargs.get("config"), "model_type", None)
    if model_type in WITHOUT_INTERFACE and not torch.compiler.is_compiling():
        logger.warning_once(_RUNS_DENSE % "MPNetSelfAttention")
    if model_type is not None and (model_type in WITHOUT_INTERFACE or model_type not in ARCHITECTURES):
        functions: Any = {"mask_function": mask_function, "attention_mask": attention_mask}
        if model_type not in ARCHITECTURES:
            kwargs["allow_is_bidirectional_skip"] = False
        return eager_mask(batch_size, q_length, kv_length, **functions, **kwargs)
    q_offset = kwargs.get("q_offset", 0)  # a tensor in a cache of fixed size
    has_room = isinstance(q_offset, torch.Tensor) or kwargs.get("kv_offset", 0) + kv_length > q_offset + q_length
    if mask_function is bidirectional_mask_function or (mask_function is causal_mask_function and not has_room):
        return attention_mask
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


def register_names() -> None:
    """Enter our names in both tables. One that is missing in that of masks would make transformers drop padding."""
    for name in {*ATTENTION_NAMES, *SAVED_NAMES} - AttentionMaskInterface._global_mapping.keys():
        AttentionInterface.register(name, sparse_attention_forward)
        AttentionMaskInterface.register(name, sparse_attention_mask)


def register_backend(
    name: str,
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    prepare: Callable[[SparseMask, MaskInputs], dict[str, Any]] = prepare_bias,
    *,
    refuse: Callable[[Request], str | None] = lambda request: None,
    supports: Iterable[str] = (),
    probability_maps: Iterable[str] = ("softmax",),
    raw: bool = False,
) -> None:
    """
    Have an attention of your own run masks in this process, under a name that `attn_implementation` and
    [`sparse_dot_product_attention`] take. `sparse_measure` tries it too, `sparse_auto` does not.

    Args:
        name (`str`): Its name, which must not be one of this package or of transformers. A backend that was registered
            under it is replaced.
        function (`Callable`): What runs, see [`Backend`].
        prepare (`Callable`, *optional*): What it reads of a mask, see [`Backend`]; by default an additive bias in
            `inputs.bias[0]`.
        refuse (`Callable`, *optional*): Why it cannot run here, see [`Backend`].
        supports (`Iterable[str]`, *optional*): What it can do beyond a frozen mask with padding, see [`Backend`].
        probability_maps (`Iterable[str]`, *optional*): Keys of `PROBABILITY_MAPS` that it applies.
        raw (`bool`, *optional*, defaults to `False`): Whether it takes its inputs as they are, see [`Backend`].

    Raises:
        ValueError: If the name is taken or no name, or one of the other values is unknown.
    """
    if not (isinstance(name, str) and name.isidentifier()) or name in (*_OWN, *CHOICES, *TWINS):
        raise ValueError(
            f"name must be an identifier, and none of {', '.join((*_OWN, *CHOICES, *TWINS))}, got {name!r}"
        )
    if name not in BACKENDS and name in AttentionInterface._global_mapping:
        raise ValueError(f"name {name!r} is that of an attention of transformers: choose another one")
    given: dict[str, Any] = {"function": function, "prepare": prepare, "refuse": refuse}
    for argument, value in given.items():
        if not callable(value):
            raise ValueError(f"{argument} must be a function, got {type(value).__name__}")
    for argument, values, known in (
        ("supports", frozenset(supports), WANTED),
        ("probability_maps", tuple(probability_maps), PROBABILITY_MAPS),
    ):
        for value in values:
            if value not in known:
                raise nearest(argument, value, known)
        given[argument] = values
    BACKENDS[name] = Backend(**given, raw=raw)
    register_names()


def unregister_names() -> None:
    """Remove our names from both tables, for which transformers has no function."""
    for name in (*ATTENTION_NAMES, *SAVED_NAMES):
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
