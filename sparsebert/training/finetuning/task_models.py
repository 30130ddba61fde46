"""The model of a fine-tuning run, with its mask and the head of its task: checked without its weights, and loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import transformers
from huggingface_hub.errors import HTTPError

from ...attention.choosing.choice import ATTENTION_NAMES, check_backend
from ...attention.model_masks import sparse_attention_of
from ...checks import check_allowed, no_effect
from ...hub import mask_arguments, read_config
from ...learning.mask_description import MODEL_FIELDS, OWN_FIELDS, allowed_fields, with_changes
from ...learning.progressive_pruning import ProgressivePruning
from ...masks.patterns import PATTERNS
from ...models.architectures import check_architecture, num_positions
from ...models.attaching import attach, detach, read_mask
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ...models.loading import carries_mask, load, misfit, read_model
from ...models.saving import AttachedModel
from ...models.sparse_attention import get_sparse_attention
from ..runs.run_checks import check_model_fields, check_sizes_of
from ..runs.sources import check_source
from .finetuning_arguments import FinetuningArguments
from .task_data import TaskData


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...masks.sparse_mask import SparseMask

# Fields that a SparseBERT model may change after pre-training.
PROBABILITY_FIELDS = ("probability_map", "probability_map_kwargs")


def model_and_mask_arguments(options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `from_pretrained` for the model, and for the mask."""
    for name in ("mask_revision", "mask_subfolder") if options.mask in PATTERNS else ():
        if (value := getattr(options, name)) is not None:
            raise no_effect(name, value, f"for the pattern {options.mask!r}")
    return options.hub_arguments(options.model), mask_arguments(options)


def check_model(options: FinetuningArguments, config: dict[str, Any], max_length: int) -> None:
    """Check model, mask and section `model` of a recipe without reading weights, for inputs of at most this length."""
    for name, arguments in zip(("model", "mask"), model_and_mask_arguments(options), strict=True):
        check_source(name, getattr(options, name), **arguments)
    pruning = ProgressivePruning.from_settings(options.pruning)
    if pruning is not None and (pruning.score != "attention" or options.mask != "dense"):
        raise ValueError(
            "pruning during fine-tuning needs the score 'attention' and --mask dense, got score "
            f"{pruning.score!r} and mask {options.mask!r}"
        )
    try:
        _check_without_weights(options, config, max_length)
    except HTTPError as error:
        named = f"model {options.model!r}" + (f" or mask {options.mask!r}" if options.mask else "")
        raise ValueError(f"{named} could not be downloaded ({type(error).__name__}: {error})") from error


def _check_without_weights(options: FinetuningArguments, config: dict[str, Any], max_length: int) -> None:
    hub_arguments, of_mask = model_and_mask_arguments(options)
    model = read_config(str(options.model), **hub_arguments)
    check_model_fields({"vocab_size": getattr(model, "vocab_size", None)} | config)
    check_sizes_of(f"model {options.model}", model, config)
    positions = num_positions(model) if hasattr(model, "max_position_embeddings") else max_length
    if max_length > positions:
        raise ValueError(
            f"max_length {max_length} is more than the {positions} positions of {options.model}: "
            f"--max_length must be at most {positions}"
        )
    if options.mask is None and not carries_mask(str(options.model), **hub_arguments):
        if options.attn_implementation in ATTENTION_NAMES:
            raise ValueError(
                f"attn_implementation {options.attn_implementation!r} applies a mask, and {options.model} has none: "
                "give it one with --mask, or leave the field out"
            )
        meaningful: tuple[str, ...] = ()
        why = "there is no mask"
    else:
        check_architecture(model.model_type)
        probability_map = str(config.get("probability_map") or getattr(model, "probability_map", "softmax"))
        check_backend(options.attn_implementation or "sparse_auto", probability_map)
        meaningful = allowed_fields(options.mask)
        if model.model_type == SparseBertConfig.model_type:
            meaningful += PROBABILITY_FIELDS
        why = f"only {', '.join(meaningful)} of a frozen mask can be changed"
    given = {name: value for name, value in config.items() if name in OWN_FIELDS}
    check_allowed("model", given, meaningful, f"here: {why}; choose another mask with --mask")
    if unknown := sorted(name for name in config.keys() - set(OWN_FIELDS) if not hasattr(model, name)):
        why = f"here: a configuration of type {model.model_type!r} has no such field"
        raise no_effect(f"model.{unknown[0]}", config[unknown[0]], why)
    if options.mask is not None and options.mask not in PATTERNS:
        mask = read_mask(options.mask, **of_mask)
        if "num_hidden_layers" in config:
            model.num_hidden_layers = config["num_hidden_layers"]
        layers = model.num_attention_layers if hasattr(model, "num_attention_layers") else model.num_hidden_layers
        try:
            mask.check_fits(layers, model.num_attention_heads)
        except ValueError as error:
            raise _does_not_fit(options, error) from error


def _does_not_fit(options: FinetuningArguments, error: ValueError) -> ValueError:
    """The error of a mask that is not for this model, from that of the mask."""
    return ValueError(f"mask {options.mask} does not fit {options.model}: {error}")


def load_model(data: TaskData, config: dict[str, Any]) -> "PreTrainedModel":
    """Load the model of a run with the head of its task: with its own mask, with another mask, or dense."""
    options, model_class = data.options, getattr(transformers, data.task.head)
    hub_arguments, _ = model_and_mask_arguments(options)
    of_mask = set(OWN_FIELDS) - set(MODEL_FIELDS)
    fields = {name: value for name, value in config.items() if name in of_mask}
    arguments = {name: value for name, value in config.items() if name not in of_mask}
    arguments |= _labels(data.examples[data.train_split].features.get("label"))
    arguments["trust_remote_code"] = False  # a head that transformers lacks is not taken from the repository
    arguments["ignore_mismatched_sizes"] = True  # a model fine-tuned on another task has another head
    arguments |= {"output_hidden_states": False, "output_attentions": False}  # predictions are the logits alone
    backend = options.attn_implementation or "sparse_auto"
    if options.mask is None and not carries_mask(str(options.model), **hub_arguments):
        arguments |= hub_arguments
        arguments["attn_implementation"] = options.attn_implementation
        model = _fitting(options, model_class.from_pretrained, **arguments)
    else:
        if options.mask is None:
            arguments |= hub_arguments | {"attn_implementation": backend}
            model = _fitting(options, load, model_class=model_class, **arguments, **fields)
        else:
            model = _with_mask(options, model_class, arguments, backend, fields)
        mask = get_sparse_attention(model).mask
        if mask is None:
            raise ValueError(
                f"the mask of {options.model} is still being searched: freeze it first, or choose another with --mask"
            )
        longest, multiple = data.longest, options.pad_to_multiple_of or 1
        mask.check_length(-(-longest // multiple) * multiple)
    return model


def _with_mask(
    options: FinetuningArguments,
    model_class: Any,
    arguments: dict[str, Any],
    backend: str,
    fields: dict[str, Any],
) -> "PreTrainedModel":
    """Load the model with the mask of the options in place of its own."""
    name = str(options.mask)
    pattern = name in PATTERNS
    if pattern:
        fields = {"mask_length": options.max_length} | fields
    hub_arguments, of_mask = model_and_mask_arguments(options)
    sparse = read_config(str(options.model), **hub_arguments).model_type == SparseBertConfig.model_type
    arguments |= hub_arguments
    if sparse and pattern:
        arguments |= {"pattern": name, "attn_implementation": backend}
        return _fitting(options, model_class.from_pretrained, **arguments, **fields)
    if sparse:
        arguments |= {"pattern": "dense", "attn_implementation": backend}  # until the mask is set
        arguments["allow_empty_rows"] = fields.pop("allow_empty_rows", False)
        if "skip_padding" in fields:
            arguments["skip_padding"] = fields.pop("skip_padding")
    model: Any = _fitting(options, model_class.from_pretrained, **arguments)
    if isinstance(model, AttachedModel):
        detach(model)
    try:
        if sparse:
            model.set_mask(with_changes(read_mask(name, **of_mask), **fields))
            return model
        return attach(model, name, attn_implementation=backend, **({} if pattern else of_mask), **fields)
    except ValueError as error:
        raise _does_not_fit(options, error) from error


def _fitting(options: FinetuningArguments, from_source: Callable[..., Any], **arguments: Any) -> "PreTrainedModel":
    """Load the model with a function such as `from_pretrained`. Only its head may differ in size from the weights."""
    model, info = read_model(from_source, str(options.model), output_loading_info=True, **arguments)
    prefix = f"{model.base_model_prefix}."
    for name, stored, expected in sorted(info["mismatched_keys"]):
        if name.startswith(prefix):
            raise misfit(f"model {options.model}", name, stored, expected)
    return model


def _labels(label: Any) -> dict[str, Any]:
    """The fields of the configuration about the classes."""
    if isinstance(label, datasets.ClassLabel):
        names = dict(enumerate(label.names))
        return {
            "id2label": names,
            "label2id": {name: index for index, name in names.items()},
            # A model fine-tuned on a regression carries that in its configuration.
            "problem_type": "single_label_classification",
        }
    if label is not None and label.dtype.startswith("float"):
        return {"id2label": {0: "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
    return {}


def input_sparsity(mask: "SparseMask", lengths: np.ndarray | list[int]) -> float:
    """Fraction of the attention that a mask removes on inputs of these lengths, in tokens."""
    lengths, counts = np.unique(lengths, return_counts=True)
    squares = lengths.astype(float) ** 2 * counts
    kept = sum(mask.density_at(int(n)) * size for n, size in zip(lengths, squares, strict=True))
    return 1 - float(kept / squares.sum())


def mask_metrics(model: "PreTrainedModel", data: TaskData) -> dict[str, Any]:
    """Name of the model's mask, its sparsity at its own length, and its sparsity on the evaluated inputs."""
    sparse_attention = sparse_attention_of(model)
    if sparse_attention is None:
        return {"mask": "dense", "sparsity": 0.0, "input_sparsity": 0.0}
    mask = sparse_attention.mask
    removed = input_sparsity(mask, data.lengths[data.evaluation_splits[0]])
    given = data.options.mask_subfolder or data.options.mask
    name = Path(given).name if given and not data.options.pruning else None
    name = name or mask.metadata.get("pattern") or mask.metadata.get("search")
    name = name or ("pruned" if "pruning" in mask.metadata else "mask")
    return {"mask": name, "sparsity": mask.sparsity, "input_sparsity": removed}
