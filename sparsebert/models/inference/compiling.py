"""Compiling a model for an inference engine, in the precision that is fastest within a stated loss."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...attention.choosing.timing import measure
from ...attention.distance_bias import with_distance_forms
from ...attention.mask_inputs import MaskInputs
from ...attention.model_masks import without_adapters
from ...checks import check_choice, check_range
from ...version import __version__
from ..architectures import bias_by_distance, has_decoder, input_shape, num_positions, sliding_window
from ..forward_with_mask import mask_arguments
from ..model_configs import derived_class
from ..unpadding import mixes_tokens
from .compiled_models import IMAGES, CompiledBase, CompiledModel, image_shape, limits_of, strip, traced_names


logger = logging.get_logger(__name__)

# By name: the module that runs graphs in the engine, and the extra that installs what it needs.
ENGINES = {"openvino": (".openvino_graph", "openvino")}
PRECISIONS = ("float32", "bfloat16", "int8")
# Least cosine of hidden states with those in float32 that a precision must reach to be chosen by itself.
MIN_COSINE = 0.99
_BATCH = 8
# Tokens of a row of random ones, to compare precisions where there is no text.
_RANDOM_LENGTH = 128
_ROUNDS = 3
# Batches that the precisions are timed on; more would tell no more of them.
_TIMED = 8

Model = TypeVar("Model", bound=nn.Module)


def engine_module(engine: str) -> ModuleType:
    """The module that runs graphs in an engine."""
    check_choice("engine", engine, ENGINES)
    name, extra = ENGINES[engine]
    try:
        return importlib.import_module(name, __package__)
    except ImportError as error:
        raise ImportError(
            f"engine {engine!r} is not installed: pip install 'sparsebert[{extra}]' ({error})"
        ) from error


def compile(
    model: Model,
    engine: str = "openvino",
    precision: str = "auto",
    calibration: Sequence[str] | Iterable[Mapping[str, torch.Tensor]] | None = None,
    tokenizer: Any = None,
    min_cosine: float = MIN_COSINE,
) -> Model:
    """
    Compile an encoder, with or without a mask, for inference in another engine than PyTorch. It is called as before,
    with inputs of any length and with padding anywhere; under a mask, padding costs nothing where the model can skip
    it (`skip_padding`). The base model becomes a graph of the engine, without gradients; heads stay PyTorch.

    Args:
        model (`PreTrainedModel` or `SentenceTransformer`): An encoder, with or without a head, in float32 on the CPU.
            A mask must be frozen, and adapters must be merged.
        engine (`str`, *optional*, defaults to `"openvino"`): A key of `ENGINES`.
        precision (`str`, *optional*, defaults to `"auto"`): `"float32"`, `"bfloat16"`, `"int8"` (linear layers, with
            the rest in bfloat16 if the CPU has it), or `"auto"`: what is fastest on this CPU for the calibration data
            among those whose hidden states have a mean cosine of `min_cosine` with those in float32.
        calibration (`Sequence[str]` or batches, *optional*): Texts, or arguments of the model as dicts of tensors,
            like those that the model is for: some hundred sequences. `"int8"` needs it, `"auto"` tries int8 only with
            it.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): What makes batches of texts. Defaults to that of a
            `SentenceTransformer`.
        min_cosine (`float`, *optional*, defaults to 0.99): The loss that `"auto"` accepts, in [0, 1].

    Returns:
        `model`, changed in place and in evaluation mode. Its `compiled_as` says in what precision.
    Raises:
        ImportError: If the engine is not installed.
        ValueError: If the model, its mask or an argument is not of this kind, or if the engine cannot run the model.
    """
    module, inner = engine_module(engine), without_adapters(model)
    check_choice("precision", precision, ("auto", *PRECISIONS))
    check_range("min_cosine", min_cosine, 0, 1, (int, float))
    _check_model(inner)
    if precision not in ("auto", *module.precisions()):
        needs = "nncf, which the extra has" if precision == "int8" else "a CPU that computes in it"
        raise ValueError(f"precision {precision!r} needs {needs}: here there are {', '.join(module.precisions())}")
    batches = _batches(inner, calibration, tokenizer or getattr(model, "tokenizer", None))
    if precision == "int8" and not batches:
        raise ValueError("precision 'int8' needs calibration: some hundred texts like those that the model is for")
    inner.eval()
    base: Any = inner.base_model
    former = type(base)
    base.__class__ = derived_class(CompiledBase, former)
    vars(base)["limits"] = limits_of(base)
    try:
        graph, found = _chosen(inner, module, precision, batches, min_cosine)
    except BaseException:
        base.__class__ = former
        for name in ("graph", "limits"):
            vars(base).pop(name, None)
        raise
    versions = {"sparsebert": __version__, engine: module.VERSION}
    finish(inner, graph, {"engine": engine, "precision": graph.precision, **found, "versions": versions})
    return model


def finish(model: Any, graph: Any, compiled_as: dict[str, Any], skip_padding: bool = True) -> None:
    """Give a model its graph, and remove what that does instead. Padding is taken out where it can be."""
    base = model.base_model
    if not isinstance(base, CompiledBase):
        base.__class__ = derived_class(CompiledBase, type(base))
        vars(base)["limits"] = limits_of(base)
    if base is not model:
        model.__class__ = derived_class(CompiledModel, type(model))
    for part in {base, model}:
        vars(part).update(graph=graph, compiled_as=compiled_as)
    strip(model)
    sparse_attention = base._modules.get("sparse_attention")
    if sparse_attention is not None and mixes_tokens(model.config) is None:
        sparse_attention.config = sparse_attention.config.changed(skip_padding=skip_padding)
    model.eval()


def _check_model(model):
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"compile needs a model of transformers, got {type(model).__name__}")
    name, base = type(model).__name__, model.base_model
    if isinstance(model, CompiledModel) or isinstance(base, CompiledModel):
        raise ValueError(f"this {name} is compiled already")
    if getattr(model, "_hf_peft_config_loaded", False) or any(hasattr(part, "lora_A") for part in model.modules()):
        raise ValueError(f"this {name} has adapters: merge them first, with merge_and_unload of PEFT")
    if has_decoder(model):
        raise ValueError(f"compile needs an encoder, got a {name} with a decoder")
    sparse_attention: Any = base._modules.get("sparse_attention")
    if sparse_attention is not None and sparse_attention.mask is None:
        raise ValueError("the mask of this model is not frozen: call freeze() before compile")
    for weight_name, weight in model.named_parameters():
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(
                f"compile needs a model in float32 on the CPU: {weight_name} is {weight.dtype} on {weight.device}"
            )
        if not weight.isfinite().all():
            raise ValueError(f"compile needs finite weights: {weight_name} holds infinity or NaN")
    if any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in base.modules()):
        raise ValueError(f"this {name} is quantized: compile the model as it was before quantize")
    if not any(isinstance(module, nn.Linear) for module in base.modules()):
        raise ValueError(f"this {name} has no linear layers: there is nothing to compile")


def _batches(model, calibration, tokenizer) -> list[dict[str, torch.Tensor]]:
    """The arguments of a model in calibration."""
    if isinstance(calibration, (str, Mapping)):
        raise ValueError(
            f"calibration must be a list of texts or of dicts of tensors, got a {type(calibration).__name__}"
        )
    items = list(calibration or ())
    texts = [item for item in items if isinstance(item, str)]
    if not texts:
        wrong = next((item for item in items if not isinstance(item, Mapping)), None)
        if wrong is not None:
            raise ValueError(f"calibration must hold texts or dicts of tensors, got {type(wrong).__name__}")
        return [dict(item) for item in items]
    if len(texts) < len(items):
        raise ValueError("calibration must hold texts or dicts of tensors, got both")
    if tokenizer is None:
        raise ValueError("calibration holds texts: give the model's tokenizer, too")
    longest = min(num_positions(model.config), tokenizer.model_max_length)
    return [
        dict(
            tokenizer(texts[at : at + _BATCH], padding=True, truncation=True, max_length=longest, return_tensors="pt")
        )
        for at in range(0, len(texts), _BATCH)
    ]


class _Traced(nn.Module):
    """The base model below its mask: the inputs of the graph as tensors, hidden states as a tuple."""

    def __init__(self, base: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.base, self.names = base, names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base: Any = self.base
        given: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        if "sparse_attention" in base._modules:
            shape: Any = input_shape(base.config, given)
            inputs = MaskInputs("sparse_sdpa", shape[1], shape[1], shape[2])
            if (biases := bias_by_distance(base, shape[1])) is not None:  # which the operator takes from the call
                inputs = with_distance_forms(replace(inputs, distance_bias=biases))
            given |= mask_arguments(base, inputs)
        with _engine_attention(base):
            output = super(type(base), base).forward(**given, output_hidden_states=True, return_dict=True)
        return output.last_hidden_state, *output.hidden_states


@contextmanager
def _engine_attention(base):
    """Eager attention without a mask as the one that the engine has an operator for: the same, and faster."""
    config, eager = base.config, base.config._attn_implementation == "eager" and base._supports_sdpa
    if eager:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        if eager:
            config._attn_implementation = "eager"


def _example(base, names):
    """Tensors of the right kind: batches of more than one, since sizes of 1 would be taken for constants."""
    config = base.config
    if names == IMAGES:
        return {names[0]: torch.zeros(2, *image_shape(config))}
    ids = torch.full((2, 7), 1 if config.pad_token_id == 0 else 0, dtype=torch.long)
    example = {name: torch.zeros_like(ids) for name in names} | {"input_ids": ids}
    if "attention_mask" in names:
        example["attention_mask"] = torch.ones_like(ids)
        example["attention_mask"][0, 5:] = 0
    return example


def _random_batch(base, names):
    """Random tokens or images, to compare precisions that need no calibration."""
    config, generator = base.config, torch.Generator().manual_seed(0)
    if names == IMAGES:
        return {names[0]: torch.randn(2, *image_shape(config), generator=generator)}
    shape = (_BATCH, min(num_positions(config), _RANDOM_LENGTH))
    return {"input_ids": torch.randint(config.vocab_size, shape, generator=generator)}


def _chosen(model, module, precision, batches, min_cosine):
    """The graph of a model in the precision that is asked for, and what was found about it."""
    base = model.base_model
    names = traced_names(base)
    sparse_attention = base._modules.get("sparse_attention")
    layers = 0 if sparse_attention is None else sparse_attention.num_layers
    windows = sliding_window(base.config)[0] is not None
    exact = vars(base)["graph"] = module.convert(_Traced(base, names), _example(base, names), layers, windows)
    if precision != "auto" and not batches:
        return exact.in_precision(precision), {}
    wanted = [precision] if precision != "auto" else list(module.precisions())
    if not batches:
        wanted, batches = [name for name in wanted if name != "int8"], [_random_batch(base, names)]
        logger.warning(
            "There is no calibration data: int8 is not tried, and the others are compared on random inputs."
        )
    logger.warning(f"Compiling in {', '.join(wanted)} (batches to compare on: {len(batches)}): this may take minutes.")
    exact.recorded = []
    try:
        want = _states(model, batches)
        graphs = {name: exact.quantized() if name == "int8" else exact.in_precision(name) for name in wanted}
    finally:
        exact.forget_recorded()
    cosines = {}
    for name, graph in graphs.items():
        vars(base)["graph"] = graph
        cosines[name] = _cosine(_states(model, batches), want, batches)
    if precision != "auto":
        return graphs[precision], {"cosine": cosines[precision]}
    seconds = _seconds(model, graphs, batches[:: -(-len(batches) // _TIMED)])
    able = [name for name in graphs if name == "float32" or cosines[name] >= min_cosine]
    chosen = min(able, key=lambda name: seconds[name])
    compared = ", ".join(f"{name} {1e3 * seconds[name]:.0f} ms (cosine {cosines[name]:.4f})" for name in graphs)
    logger.warning(
        f"precision auto takes {chosen}: {compared}; the cosine with float32 must be at least {min_cosine}."
    )
    return graphs[chosen], {"cosine": cosines[chosen]}


def _states(model, batches):
    with torch.no_grad():
        return [model.base_model(**_of_base(model, batch)).last_hidden_state for batch in batches]


def _of_base(model, batch):
    """Arguments of the base model among those of a head."""
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", *IMAGES)
    return {name: batch[name] for name in names if name in batch}


def _cosine(states, want, batches):
    """Mean cosine of the hidden states of real tokens."""
    same = []
    for ours, theirs, batch in zip(states, want, batches, strict=True):
        each = torch.cosine_similarity(ours, theirs, dim=-1)
        mask = batch.get("attention_mask")
        same.append(each.flatten() if mask is None else each[mask.bool()])
    return torch.cat(same).mean().item()


def _seconds(model, graphs, batches):
    """Median time of some batches by the name of a graph, measured in turns."""

    def run(graph):
        vars(model.base_model)["graph"] = graph
        _states(model, batches)

    return measure({name: partial(run, graph) for name, graph in graphs.items()}, "cpu", _ROUNDS)


__all__ = ["ENGINES", "MIN_COSINE", "PRECISIONS", "compile"]
