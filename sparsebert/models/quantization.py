"""Linear layers in int8, for inference on CPUs, of encoders with or without a mask."""

import warnings
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .inference.compiled_models import check_not_compiled


Model = TypeVar("Model", bound=PreTrainedModel)


def _refuse_to_save(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"the linear layers of this {type(model).__name__} are in int8, and its weights cannot be saved or read: save "
        "the model before quantize, and call quantize again after loading it"
    )


def _switch(part: nn.Module, mode: bool = True) -> nn.Module:
    """`nn.Module.train` of what may only be evaluated."""
    if mode:
        raise ValueError(
            f"the linear layers of this {type(part).__name__} are in int8, and cannot be trained: train the model "
            "before quantize"
        )
    return type(part).train(part, mode)


def quantize(model: Model) -> Model:
    """
    Run the linear layers of an encoder in int8, with PyTorch's dynamic quantization: weights are rounded once, per
    output channel, and activations in every call, by their range in the whole batch. Embeddings, attention with its
    mask, normalization and heads stay in float32. How much the outputs change depends on the model, so compare them.
    The quantized model is for inference on CPUs: it can neither be trained nor saved.

    Args:
        model (`PreTrainedModel`): A base model or head in float32 on the CPU, dense or with a mask.

    Returns:
        `model`, changed in place and in evaluation mode.
    Raises:
        ValueError: If the model is not of this kind, is already quantized or has weights that are not finite, or if
            this build of PyTorch has no int8 kernels.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"quantize needs a model of transformers, got {type(model).__name__}")
    check_not_compiled(model, "quantize")
    try:
        from torch.ao.nn.quantized import dynamic
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
    except ImportError as error:
        raise ValueError(f"quantize needs the dynamic quantization of PyTorch: {error}") from error
    if any(isinstance(module, dynamic.Linear) for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is quantized already")
    layers = [module for module in model.base_model.modules() if type(module) is nn.Linear]
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no linear layers to quantize")
    for name, weight in model.base_model.named_parameters():
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(f"quantize needs a model in float32 on the CPU, got {weight.dtype} on {weight.device}")
        if not weight.isfinite().all():  # rounding would turn it into a number
            raise ValueError(f"quantize needs finite weights: {name} holds infinity or NaN")
    if torch.backends.quantized.engine == "none":
        raise ValueError("quantize needs a build of PyTorch with int8 kernels: torch.backends.quantized has no engine")
    with warnings.catch_warnings():
        # It recommends torchao, whose dynamic int8 layers were 15 times as slow as those in float32 on a CPU.
        warnings.filterwarnings("ignore", message="(?s).*deprecated")
        quantize_dynamic(model.base_model, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
    model.eval()
    parts: set[nn.Module] = {model, model.base_model}
    for part in parts:
        part.register_state_dict_pre_hook(_refuse_to_save)
        part.register_load_state_dict_pre_hook(_refuse_to_save)
        vars(part)["train"] = partial(_switch, part)
        vars(part)["save_pretrained"] = partial(_refuse_to_save, part)  # before it writes the configuration
    return model


__all__ = ["quantize"]
