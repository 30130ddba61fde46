"""Models whose base model is a graph of an inference engine; what is before it and after it stays PyTorch."""

import inspect
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from ..model_configs import Derived
from ..unpadding import default_positions, pooled
from .compiled_files import save_compiled


# What stays PyTorch of a base model: what its output needs, and the mask.
_KEPT = ("pooler", "pooler_activation", "sparse_attention")
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
            raise ValueError(
                "push_to_hub: a compiled model is made for one machine: push the model that it is made of"
            )
        if kwargs.get("is_main_process", True):
            save_compiled(self, save_directory)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Compiled models are not shared."""
        raise ValueError("push_to_hub: a compiled model is made for one machine; push the model that it is made of")


class CompiledBase(CompiledModel):
    """A base model that runs as a graph, which is its attribute `graph`."""

    graph: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        stock: Any = super()
        signature = inspect.signature(stock.forward)
        _, *names = signature.parameters

        def forward(self, *args, **kwargs):
            return _run(self, dict(zip(names, args, strict=False)) | kwargs)

        made: Any = cls
        made.forward, made.forward.__signature__ = forward, signature
        super().__init_subclass__(**kwargs)


def traced_names(base: PreTrainedModel) -> tuple[str, ...]:
    """Names of the arguments that the graph of a base model takes."""
    names = inspect.signature(type(base).forward).parameters
    if IMAGES[0] in names:
        return IMAGES
    # Under a mask, padding is not the graph's affair, and rows may hold several documents.
    others = "position_ids" if "sparse_attention" in base._modules else "attention_mask"
    return tuple(name for name in ("input_ids", "token_type_ids", others) if name in names)


def _run(base, given):
    given = {name: value for name, value in given.items() if value is not None}
    mask_inputs = given.pop("mask_inputs", None)
    if base.training:
        raise ValueError("a compiled model is for inference: call eval() before it, or train the model it is made of")
    if given.get("output_attentions", base.config.output_attentions):
        raise ValueError("output_attentions: a compiled model returns none; ask the model that it is made of")
    all_states = bool(given.get("output_hidden_states", base.config.output_hidden_states))
    if torch.is_tensor(padding := given.get("attention_mask")) and padding.dim() != 2:
        raise ValueError(f"attention_mask must have two dimensions in a compiled model, got {tuple(padding.shape)}")
    tensors = _filled(base, given)
    others = given.keys() - tensors.keys() - {*_WITHOUT_MEANING} - {"attention_mask"}
    wrong = [name for name in others if given[name] is not False]
    if wrong:
        raise ValueError(f"{min(wrong)}: a compiled model takes {', '.join(sorted(base.graph.inputs))}")
    last, *states = base.graph(tensors, mask_inputs, all_states)
    output: Any = BaseModelOutput(last_hidden_state=last, hidden_states=tuple(states) if all_states else None)
    if getattr(base, "pooler", None) is not None:
        output = BaseModelOutputWithPooling(**output, pooler_output=pooled(base, last[:, :1]))
    as_dict = given.get("return_dict", base.config.return_dict)
    return output if as_dict else output.to_tuple()


def _filled(base, given) -> dict[str, torch.Tensor]:
    """The tensors that the graph of a base model takes, with the defaults of those that are not given."""
    main = "pixel_values" if "pixel_values" in base.graph.inputs else "input_ids"
    if main not in given:
        raise ValueError(f"a compiled {type(base).__name__} needs {main}")
    tensors = {name: given[name] for name in base.graph.inputs if name in given}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: a compiled model runs on the CPU, got a tensor on {tensor.device}")
    if main == "input_ids":
        ids = tensors[main]
        defaults: Mapping[str, Any] = {
            "token_type_ids": torch.zeros_like,
            "attention_mask": torch.ones_like,
            "position_ids": lambda ids: default_positions(base.config, ids, ids),
        }
        for name in base.graph.inputs - tensors.keys():
            tensors[name] = defaults[name](ids)
        for name, tensor in tensors.items():
            if tensor.dim() != 2:
                raise ValueError(f"{name} must have two dimensions in a compiled model, got {tuple(tensor.shape)}")
            tensors[name] = tensor.long().expand(ids.shape)
    return tensors


def strip(model: PreTrainedModel) -> None:
    """Remove what the graph of a model does instead."""
    base: Any = model.base_model
    for name in [name for name in base._modules if name not in _KEPT]:
        del base._modules[name]
    for name in list(base._parameters):
        del base._parameters[name]
    sparse_attention = base._modules.get("sparse_attention")
    if sparse_attention is not None:
        sparse_attention.places, sparse_attention.lists = (), {}
