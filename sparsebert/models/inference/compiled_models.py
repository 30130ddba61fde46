"""Models whose base model is a graph of an inference engine; what is before it and after it stays PyTorch."""

import inspect
import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from ...attention.mask_inputs import MaskInPlace
from ...masks.exported import exporting
from ..model_configs import Derived
from ..unpadding import default_positions, pooled
from .compiled_files import save_compiled


# What stays PyTorch of a base model: what its output needs, and the mask.
_KEPT = ("pooler", "pooler_activation", "sparse_attention")
# And in a model with a mask, whose graph does not have it, the bias per distance.
_BIAS = "relative_attention_bias"
# Arguments of base models without a meaning in inference without a cache.
_WITHOUT_MEANING = ("use_cache", "return_dict", "output_hidden_states", "output_attentions")
IMAGES = ("pixel_values",)


class CompiledModel(Derived):
    """
    A model that [`compile`] changed: a head on a compiled base model, or that base model.

    Attributes:
        compiled_as (`dict`): The precision, what it costs, and the versions of what made it.
    """

    compiled_as: dict[str, Any]

    def save_pretrained(self, save_directory: str | PathLike, **kwargs: Any) -> None:
        """
        Save the compiled model, for [`load`] or `from_pretrained` while the plugin is enabled.

        Args:
            save_directory (`str` or `os.PathLike`): Folder to write, created if missing. It may hold another compiled
                model, which is replaced, but no weights.

        Raises:
            ValueError: If there are weights of a model in the folder, or if the model is to be pushed.
        """
        if kwargs.get("push_to_hub"):
            self.push_to_hub()
        if kwargs.get("is_main_process", True):
            save_compiled(self, save_directory)

    @property
    def device(self) -> torch.device:
        """The CPU; there may be no parameters that would say so."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the outputs."""
        return torch.float32

    def __getattr__(self, name: str) -> Any:
        stock: Any = super()
        try:
            return stock.__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: it is compiled, and what its graph holds is no part of it") from None

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        moved = fn(torch.zeros(1))
        if moved.dtype != torch.float32 or moved.device.type != "cpu":
            raise ValueError(
                f"a compiled model stays on the CPU, and its outputs in float32: it cannot become {moved.dtype} on "
                f"{moved.device} (for device, give 'cpu'; for precision, compile again)"
            )
        stock: Any = super()
        return stock._apply(fn, *args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Compiled models are not shared."""
        raise ValueError("push_to_hub: a compiled model is made for one machine; push the model that it is made of")


class CompiledBase(CompiledModel):
    """A base model that runs as a graph, which is its attribute `graph`."""

    graph: Any
    limits: dict[str, int]  # by argument: how many ids it has

    def __init_subclass__(cls, **kwargs: Any) -> None:
        stock: Any = super()
        signature = inspect.signature(stock.forward)
        _, *names = signature.parameters

        def forward(self, *args, **kwargs):
            return _run(self, dict(zip(names, args, strict=False)) | kwargs)

        made: Any = cls
        made.forward, made.forward.__signature__ = forward, signature
        super().__init_subclass__(**kwargs)
        with_mask = made.forward

        def in_its_precision(self, *args, **kwargs):
            with torch.autocast("cpu", enabled=False):  # also for what is made of the mask
                return with_mask(self, *args, **kwargs)

        made.forward, made.forward.__signature__ = in_its_precision, signature


def check_not_compiled(model: Any, use: str) -> None:
    """Refuse a compiled model, or a head on one, for a use that changes what is in its graph."""
    if isinstance(model, CompiledModel) or isinstance(getattr(model, "base_model", None), CompiledModel):
        raise ValueError(f"{use}: this {type(model).__name__} is compiled: use the model that it is made of")


def traced_names(base: PreTrainedModel) -> tuple[str, ...]:
    """Names of the arguments that the graph of a base model takes."""
    names = inspect.signature(type(base).forward).parameters
    if IMAGES[0] in names:
        return IMAGES
    # Under a mask, rows may hold several documents, and padding is the graph's affair only for the embeddings of ESM.
    masked = "sparse_attention" in base._modules
    padding = ("attention_mask",) if not masked or base.config.model_type == "esm" else ()
    return tuple(name for name in ("input_ids", "token_type_ids", "position_ids", *padding) if name in names)


def _run(base, given):
    given = {name: value for name, value in given.items() if value is not None}
    if exporting():
        raise ValueError("a compiled model cannot be exported or traced: export the model that it is made of")
    mask_inputs, padding = given.pop("mask_inputs", None), given.get("attention_mask")
    if isinstance(padding, MaskInPlace):
        mask_inputs, padding = padding.mask_inputs, padding.attention_mask
    if base.training:
        raise ValueError("a compiled model is for inference: call eval() before it, or train the model it is made of")
    if given.get("output_attentions", base.config.output_attentions):
        raise ValueError("output_attentions: a compiled model returns none; ask the model that it is made of")
    all_states = bool(given.get("output_hidden_states", base.config.output_hidden_states))
    if torch.is_tensor(padding) and padding.dim() != 2:
        raise ValueError(f"attention_mask must have two dimensions in a compiled model, got {tuple(padding.shape)}")
    tensors = _filled(base, given)
    # Those that say where documents are; a model without positions reads them for its mask alone.
    of_mask = {"attention_mask"} if mask_inputs is None else {"attention_mask", "position_ids"}
    others = given.keys() - tensors.keys() - {*_WITHOUT_MEANING} - of_mask
    wrong = [name for name in others if given[name] is not False]
    if wrong:
        raise ValueError(f"{min(wrong)}: a compiled model takes {', '.join(sorted(base.graph.inputs))}")
    last, *states = base.graph(tensors, mask_inputs, all_states)
    output: Any = BaseModelOutput(last_hidden_state=last, hidden_states=tuple(states) if all_states else None)
    if getattr(base, "pooler", None) is not None:
        output = BaseModelOutputWithPooling(**output, pooler_output=pooled(base, last[:, :1]))
    elif base.config.model_type == "dinov2":  # whose first token is what it pools
        output = BaseModelOutputWithPooling(**output, pooler_output=last[:, 0])
    as_dict = given.get("return_dict", base.config.return_dict)
    return output if as_dict else output.to_tuple()


def _filled(base, given) -> dict[str, torch.Tensor]:
    """The tensors that the graph of a base model takes, with the defaults of those that are not given."""
    main = "pixel_values" if "pixel_values" in base.graph.inputs else "input_ids"
    if main not in given:
        raise ValueError(f"a compiled {type(base).__name__} needs {main}")
    tensors = {name: given[name] for name in base.graph.inputs if name in given}
    for name, tensor in tensors.items():
        if not torch.is_tensor(tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: a compiled model runs on the CPU, got a tensor on {tensor.device}")
    if main == "pixel_values":
        _check_images(base.config, tensors[main])
        return tensors
    ids = tensors[main]
    defaults: Mapping[str, Any] = {
        "token_type_ids": torch.zeros_like,
        "attention_mask": torch.ones_like,
        "position_ids": lambda ids: default_positions(base.config, ids, ids),
    }
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.shape[1] == 0:
            raise ValueError(
                f"{name} must have two dimensions and a token in a compiled model, got {tuple(tensor.shape)}"
            )
        if tensor.shape[1] != ids.shape[1] or tensor.shape[0] not in (1, ids.shape[0]):
            raise ValueError(f"{name} must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(tensor.shape)}")
        if name == "attention_mask":
            # A row without a token would become NaN. What it becomes instead has no meaning, in any model.
            tensor = tensor.bool() | ~tensor.bool().any(-1, keepdim=True)
        elif tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(f"{name} must hold integers, got {tensor.dtype}")
        tensors[name] = tensor.long().expand(ids.shape)
    for name in base.graph.inputs - tensors.keys():
        tensors[name] = defaults[name](tensors[main])
    _check_ids(base, tensors)
    return tensors


def _check_images(config, images):
    if images.dim() != 4 or tuple(images.shape[1:]) != image_shape(config) or not images.is_floating_point():
        raise ValueError(
            f"pixel_values must be floating-point, of shape (batch, {', '.join(map(str, image_shape(config)))}), got "
            f"{images.dtype} of {tuple(images.shape)}"
        )


def _check_ids(base, tensors):
    """Refuse what the stock model refuses, and the engine would take for zeros or answer with an earlier result."""
    length, longest = tensors["input_ids"].shape[1], base.limits.get("tokens", math.inf)
    if "position_ids" not in tensors and length > longest:
        raise ValueError(f"input_ids has {length} tokens, this {type(base).__name__} takes {longest}")
    for name in base.limits.keys() & tensors.keys():
        if tensors[name].numel():
            least, most = map(int, tensors[name].aminmax())
            if least < 0 or most >= base.limits[name]:
                hint = f" (it takes inputs of {longest} tokens)" if name == "position_ids" else ""
                raise ValueError(
                    f"{name} must be from 0 to {base.limits[name] - 1} in this {type(base).__name__}, got "
                    f"{least if least < 0 else most}{hint}"
                )


def image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
    return config.num_channels, *size


def limits_of(base: PreTrainedModel) -> dict[str, int]:
    """How many ids the tables of a base model have by the argument that holds them, and how many `tokens` it takes."""
    tables = {name: part for name, part in base.named_modules() if isinstance(part, nn.Embedding)}
    words = base.get_input_embeddings()
    limits = {"input_ids": words.num_embeddings} if isinstance(words, nn.Embedding) else {}
    for name, table in tables.items():
        if name.endswith("token_type_embeddings"):
            limits["token_type_ids"] = table.num_embeddings
        elif name.endswith("position_embeddings"):
            limits["position_ids"] = table.num_embeddings
            # Those that have one begin after the position of padding.
            limits["tokens"] = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    return limits


def _keep_bias(part):
    """Whether a module holds a bias per distance, which is for the mask inputs. All else in it is removed, if so."""
    holding = []
    for name, inner in [*part._modules.items()]:
        if name == _BIAS:
            holding.append(inner.requires_grad_(False))
        elif _keep_bias(inner):
            holding.append(inner)
    if holding:
        for name in [name for name, inner in part._modules.items() if inner not in holding]:
            del part._modules[name]
    return bool(holding)


def strip(model: PreTrainedModel) -> None:
    """Remove what the graph of a model does instead."""
    base: Any = model.base_model
    sparse_attention = base._modules.get("sparse_attention")
    for name, part in [*base._modules.items()]:
        if name not in _KEPT and (sparse_attention is None or not _keep_bias(part)):
            del base._modules[name]
    for name in list(base._parameters):
        del base._parameters[name]
    if sparse_attention is not None:
        sparse_attention.places, sparse_attention.lists = (), {}
