"""What a fine-tuning recipe may say about task, model and mask, checked before data or weights are read."""

from typing import Any

from huggingface_hub.errors import HTTPError

from ...attention.choosing.choice import ATTENTION_NAMES, check_backend
from ...checks import check_allowed, nearest, no_effect
from ...data.tasks import TASKS
from ...data.tasks.glue import GLUE
from ...hub import read_config
from ...learning.mask_description import OWN_FIELDS, allowed_fields
from ...learning.progressive_pruning import ProgressivePruning
from ...masks.patterns import PATTERNS
from ...models.architectures import check_architecture, num_positions
from ...models.attaching import read_mask
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ...models.loading import carries_mask
from ..runs.run_checks import check_model_fields, check_sizes_of
from ..runs.sources import check_source
from .finetuning_arguments import FinetuningArguments
from .task_models import does_not_fit, model_and_mask_arguments


# Fields that a SparseBERT model may change after pre-training.
PROBABILITY_FIELDS = ("probability_map", "probability_map_kwargs")


def check_arguments(options: FinetuningArguments, model: dict[str, Any]) -> None:
    """Check whatever can be checked without reading data or weights."""
    if options.all == (options.task is not None):
        raise ValueError("choose --task NAME or --all; the tasks are " + ", ".join(TASKS))
    if options.task is not None and options.task not in TASKS:
        raise nearest("task", str(options.task), list(TASKS))
    tasks = list(GLUE) if options.task is None else [options.task]
    for length in sorted({options.max_length or TASKS[name].max_length for name in tasks}):
        if options.pad_to_multiple_of is not None and length % options.pad_to_multiple_of:
            raise ValueError(f"pad_to_multiple_of must divide max_length {length}, got {options.pad_to_multiple_of}")
    if options.model is None:
        raise ValueError("--model must be the folder or Hub id of a pre-trained model")
    for name, arguments in zip(("model", "mask"), model_and_mask_arguments(options), strict=True):
        check_source(name, getattr(options, name), **arguments)
    pruning = ProgressivePruning.from_settings(options.pruning)
    if pruning is not None and (pruning.score != "attention" or options.mask != "dense"):
        raise ValueError(
            "pruning during fine-tuning needs the score 'attention' and --mask dense, got score "
            f"{pruning.score!r} and mask {options.mask!r}"
        )
    try:
        _check_model(options, model, options.max_length or max(TASKS[name].max_length for name in tasks))
    except HTTPError as error:
        named = f"model {options.model!r}" + (f" or mask {options.mask!r}" if options.mask else "")
        raise ValueError(f"{named} could not be downloaded ({type(error).__name__}: {error})") from error


def _check_model(options: FinetuningArguments, config: dict[str, Any], max_length: int) -> None:
    """Check model and mask without reading weights."""
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
            raise does_not_fit(options, error) from error
