"""
How a mask enters a model: through the `forward` of its class, so that the mask is applied whether the model is called,
its `forward` is called, or it is traced.
"""

import inspect
import operator
from collections.abc import Callable, Mapping
from functools import update_wrapper
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..attention.choosing.choice import ATTENTION_NAMES, TWINS, sparse_name, with_attentions
from ..attention.interface import WITHOUT_INTERFACE, register_names
from ..attention.mask_inputs import MaskInPlace, MaskInputs, autocast_dtype
from ..attention.model_masks import sparse_attention_of
from ..masks.exported import exporting, recorded
from .architectures import bias_by_distance, cached_length, configs_of, input_shape
from .coverage import check_reached
from .model_configs import STOCK_NAMED, Derived, derive_configs
from .unpadding import check_documents, check_head, find_documents, removable, without_padding


if TYPE_CHECKING:
    _ModelBase = PreTrainedModel
else:
    _ModelBase = object

logger = logging.get_logger(__name__)


class MaskedForward(_ModelBase):
    """
    Mixin of all models with a mask. Every class that derives from it gets a `forward` around its own or inherited one,
    with the same signature: it prepares the inputs of the mask of a base model, and adds the sparsity penalty to the
    loss of any model in training.
    """

    # Our attention runs in every model that carries a mask, also where transformers has the eager one only.
    _supports_sdpa = _can_set_attn_implementation_cached_value = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = getattr(cls, "forward", None)
        if forward is not None and forward is not nn.Module.forward:
            made: Any = cls
            made.forward = _masked_forward(cls, forward)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        # Before transformers looks for a kernel of a name that is refused.
        register_names()
        sparse_name(attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False, *args: Any, **kwargs: Any
    ) -> str:
        register_names()
        name = sparse_name(requested_attention)
        correct = super().get_correct_attn_implementation(name, is_init_check, *args, **kwargs)
        if not is_init_check:
            # Callers write past the setter, which keeps whether the name was one of transformers.
            self.config._attn_implementation = requested_attention
            self._keep_kind_of_name(requested_attention)
        return correct

    def set_attn_implementation(self, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        """As in transformers, whose names mean the backends of the same kind."""
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        for config in configs_of(self):
            config._attn_implementation = attn_implementation  # also where only the kind of name is another
        self._keep_kind_of_name(attn_implementation)

    def _keep_kind_of_name(self, name: str | dict | None) -> None:
        # Not in the configuration alone, which a model that this one is made a part of replaces.
        sparse_attention = sparse_attention_of(self)
        if sparse_attention is not None and not isinstance(name, dict):
            sparse_attention.stock_named = sparse_name(name) if name in TWINS else None


class MaskedBase(Derived, MaskedForward):
    """The stock base model inside a head, once the head carries a mask."""

    def save_pretrained(
        self, save_directory: str | PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save this model alone, without its head, and its frozen mask beside it."""
        sparse_attention: Any = self.sparse_attention
        derive_configs(configs_of(self))
        sparse_attention.record_progress()
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if sparse_attention.mask is not None and is_main_process:
            sparse_attention.mask.write_beside_model(Path(save_directory))
        elif sparse_attention.searching and isinstance(self.config, Derived):
            logger.warning(
                f"{type(self).__name__} is saved without its search: save the model that it is part of, from which "
                "load(folder, AutoModel) reads the encoder"
            )


def _masked_forward(cls: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    own = vars(cls).get("forward")
    signature = inspect.signature(stock)
    _, *names = signature.parameters

    def forward(self, *args, **kwargs):
        if not isinstance(self, cls):  # accelerate still calls the forward of a model that was detached since
            return type(self).forward(self, *args, **kwargs)
        # If several of these classes derive from each other, only the class of the model itself does its part.
        outermost, finish = type(self) is cls, None
        if outermost and "sparse_attention" in self._modules:
            args, kwargs, finish = _with_mask_inputs(self, names, args, kwargs)
        elif outermost:
            check_head(self, dict(zip(names, args, strict=False)) | kwargs)
        output = super(cls, self).forward(*args, **kwargs) if own is None else own(self, *args, **kwargs)
        output = output if finish is None else finish(output)
        return _with_sparsity_loss(self, output) if outermost else output

    masked: Any = update_wrapper(forward, stock)
    # Trainer drops the columns that the signature does not name. Nothing may unwrap the forward to one without a mask.
    masked.__signature__ = signature
    del masked.__wrapped__
    return masked


def _with_mask_inputs(model, names, args, kwargs):
    """
    The arguments of a base model with the [`MaskInputs`] that its attention layers need, and a function of its output
    or `None`, which also checks whether they all ran with them.
    """
    sparse_attention = model.sparse_attention
    given = dict(zip(names, args, strict=False)) | kwargs
    config = model.config
    if not torch.compiler.is_compiling():
        register_names()  # that of a model from a pickle, for example
    shape = input_shape(config, given)
    if shape is None:
        return args, kwargs, None  # the model itself says what is missing
    batch, length, device = shape
    num_queries, num_keys = length, length + cached_length(given)
    exported = exporting()
    if not exported:
        # The form of the mask depends on the length: a graph is compiled for each one, never for a symbolic one.
        num_queries, num_keys = operator.index(num_queries), operator.index(num_keys)
    padding, needs = given.get("attention_mask"), set()
    if padding is not None:
        is_tensor = isinstance(padding, torch.Tensor)
        dimensions = padding.dim() if is_tensor else 0
        if dimensions == 4 and (padding.is_floating_point() or padding.dtype == torch.bool):
            needs.add("additive")
        elif dimensions != 2 or not exported and padding.shape != (batch, num_keys):
            found = f"{padding.dtype} {tuple(padding.shape)}" if is_tensor else type(padding).__name__
            raise ValueError(
                f"attention_mask must be a tensor of shape (batch, tokens), here ({batch}, {num_keys}), or of four "
                f"dimensions and bool or, to be added to the scores, floating-point, got {found}"
            )
        padding = padding.to(device).bool() if dimensions == 2 else None
    # As in transformers, a mask without padding is no mask. In a graph the question would depend on data.
    if padding is not None and not exported and not recorded():
        if bool(padding.all()):
            padding = None
        elif not bool(padding.any(-1).all()):
            logger.warning_once(
                "attention_mask: a sequence of the batch is padding only; its attention is 0, and its output has no "
                "meaning."
            )
    if config._attn_implementation not in ATTENTION_NAMES:
        config._attn_implementation = config._attn_implementation  # written past the setter, which knows the twins
    name = config._attn_implementation
    if given.get("output_attentions", config.output_attentions):
        needs.add("weights")
        stock_named = getattr(config, STOCK_NAMED, False) or sparse_attention.stock_named == name
        name = with_attentions(name) if stock_named else name
    documents, restore = find_documents(given, batch, length, device), None
    if documents is not None:
        check_documents(model)
    if sparse_attention.config.skip_padding and padding is not None:
        kept = removable(model, padding, documents, needs)
        if kept is not None:
            given, restore = without_padding(model, names, given, kept, padding)
            args, kwargs, documents = (), given, kept.compact()
    if documents is not None:
        batch, num_queries = documents.shape
        num_keys, padding = num_queries, None if documents.uniform else documents.padding
    biases = bias_by_distance(model, num_keys)
    mask_inputs = sparse_attention(
        name,
        batch,
        num_queries,
        num_keys,
        padding,
        dropout=sparse_attention.carrier.dropout if model.training else 0.0,
        device=device,
        dtype=autocast_dtype(device.type, _dtype(model)),
        needs=needs,
        documents=documents,
        distance_bias=(None,) if biases is None else tuple(bias.to(device) for bias in biases),
    )

    def finish(output):
        if not (exported or torch.compiler.is_compiling()):
            check_reached(model, mask_inputs.reached)
        return output if restore is None else restore(output)

    own_mask = given.get("attention_mask") if "additive" in needs else None
    added = mask_arguments(model, mask_inputs, own_mask)
    return (args, kwargs | added, finish) if "attention_mask" not in added else ((), given | added, finish)


def mask_arguments(model: Any, inputs: MaskInputs, own_mask: torch.Tensor | None = None) -> dict[str, Any]:
    """The arguments of a stock base model with which its attention gets the inputs of a mask."""
    reads_names = model.config.model_type not in WITHOUT_INTERFACE
    named = {"mask_inputs": inputs} if reads_names else {}
    if reads_names and model.sparse_attention.carrier.window is None:
        return named
    # The windows are part of the mask: the model need not make them.
    return named | {"attention_mask": MaskInPlace(inputs, own_mask)}


def _dtype(model):
    """The dtype of the weights, also of a replica of DataParallel, which has no parameters."""
    for module in model.modules():
        for weights in (module._parameters, vars(module).get("_former_parameters", {})):
            for weight in weights.values():
                if weight is not None:
                    return weight.dtype
    return torch.get_default_dtype()


def _with_sparsity_loss(model, output):
    """The output of a model with lambda * ||M||_1 in `loss` in training, so that any loop trains the mask."""
    sparse_attention = model.base_model._modules.get("sparse_attention")
    search = None if sparse_attention is None else sparse_attention.search
    if not model.training or search is None or not search.sparsity_weight:
        return output
    if isinstance(output, tuple):
        # A tuple begins with the loss only when there were labels; logits are never 0-dimensional.
        if torch.is_tensor(output[0]) and output[0].dim() == 0:
            return (output[0] + sparse_attention.sparsity_loss().to(output[0].device), *output[1:])
    elif isinstance(output, Mapping) and output.get("loss") is not None:
        output["loss"] = output["loss"] + sparse_attention.sparsity_loss().to(output["loss"].device)
    return output
