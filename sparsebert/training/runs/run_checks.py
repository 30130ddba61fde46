"""Checks of a recipe before any text or weights are read: each error names field, value and bounds."""

import math
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments
from transformers.activations import ACT2FN
from transformers.integrations import get_available_reporting_integrations
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from ...analysis.doctor import DTYPES
from ...attention.backends import BACKENDS, check_request
from ...attention.capabilities import Request
from ...attention.model_masks import sparse_attention_of
from ...checks import LARGEST_SEED, check_choice, check_range, nearest
from ...files import check_makeable
from ...hub import HubArguments, mask_arguments, read_config
from ...learning.mask_description import MODEL_FIELDS, OWN_FIELDS, allowed_fields
from ...learning.searches import SEARCHES
from ...masks.patterns import PATTERNS
from ...models.architectures import num_positions
from ...models.bert.configuration_sparsebert import SparseBertConfig
from .sources import check_source, check_text_files


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ...data.tasks import Task

logger = logging.get_logger(__name__)
_NUMBER = (int, float)
# Bounds of `TrainingArguments`, which has few itself: low, high and kind.
_TRAINING_BOUNDS: dict[str, tuple[float, float | None, Any]] = {
    "gradient_accumulation_steps": (1, None, int),
    "per_device_train_batch_size": (1, None, int),
    "per_device_eval_batch_size": (1, None, int),
    "learning_rate": (0, None, _NUMBER),
    "weight_decay": (0, None, _NUMBER),
    "max_grad_norm": (0, None, _NUMBER),
    "adam_beta1": (0, 1, _NUMBER),
    "adam_beta2": (0, 1, _NUMBER),
    "adam_epsilon": (0, None, _NUMBER),
    "warmup_steps": (0, None, _NUMBER),
    "label_smoothing_factor": (0, 1, _NUMBER),
    "seed": (0, LARGEST_SEED, int),
    "data_seed": (0, LARGEST_SEED, int),
    "save_steps": (0, None, _NUMBER),
    "eval_steps": (0, None, _NUMBER),
    "save_total_limit": (0, None, int),
    "logging_steps": (0, None, _NUMBER),
    "dataloader_num_workers": (0, None, int),
}
# Fields of `TrainingArguments` that would switch off what was asked for at 0, or what it is left out for.
_NOT_ZERO = {
    "save_steps": "for the default",
    "eval_steps": "for the value of logging_steps",
    "save_total_limit": "to keep all checkpoints",
}
# Fields of `TrainingArguments` with which there would be no predictions of the whole split to compute metrics from.
_EVALUATION = {"prediction_loss_only": False, "batch_eval_metrics": False, "eval_do_concat_batches": True}
# Fields about the end of a search, and their defaults.
_END_OF_SEARCH = {"freeze_threshold": None, "freeze_sparsity": None, "search_end": 1.0}
# Lower bounds of the sizes of a model.
_MODEL_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size"),
)
_FROM_0_TO_1 = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps")


def check_training(fields: dict[str, Any]) -> None:
    """
    Check the section `training` of a recipe.

    Raises:
        ValueError: If a field is out of its range.
    """
    for name, (low, high, kinds) in _TRAINING_BOUNDS.items():
        if fields.get(name) is not None:
            check_range(name, fields[name], low, high, kinds)
            if math.isinf(fields[name]):
                raise ValueError(f"{name} must be finite, got {fields[name]!r}")
    for name, meaning in _NOT_ZERO.items():
        if fields.get(name) == 0:
            raise ValueError(f"{name} must be more than 0, or left out {meaning}, got 0")
    reports = fields.get("report_to") or ()
    for name in [reports] if isinstance(reports, str) else reports:
        if name not in ("all", "none", *(installed := get_available_reporting_integrations())):
            raise ValueError(
                f"report_to must be all, none or what is installed ({', '.join(installed) or 'nothing'}), got {name!r}"
            )
    steps, epochs = fields.get("max_steps"), fields.get("num_train_epochs")
    if steps is not None and steps != -1:
        check_range("max_steps", steps, 1)
    if epochs is not None and not 0 < epochs < math.inf:
        raise ValueError(f"num_train_epochs must be more than 0, got {epochs!r}")


def check_schedule(training: TrainingArguments) -> None:
    """
    Check that the schedule of the learning rate can be made.

    Raises:
        ValueError: If it cannot, for example because `lr_scheduler_kwargs` are not those of the `lr_scheduler_type`.
    """
    kwargs: Any = training.lr_scheduler_kwargs  # a text has been read as JSON by now
    steps = max(training.max_steps, 1)
    # As many groups as the Trainer makes, since some arguments may be a list of one value per group.
    groups = [{"params": [torch.zeros(1)]} for _ in ("weight decay", "none")]
    optimizer = torch.optim.SGD(groups, lr=training.learning_rate)
    try:
        get_scheduler(training.lr_scheduler_type, optimizer, training.get_warmup_steps(steps), steps, kwargs)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        kind = SchedulerType(training.lr_scheduler_type).value
        given = f" with lr_scheduler_kwargs {kwargs}" if kwargs else ""
        raise ValueError(f"lr_scheduler_type {kind!r}{given} cannot be used: {error}") from error


def check_evaluation(training: TrainingArguments) -> None:
    """
    Check that metrics can be computed from what the evaluation returns.

    Raises:
        ValueError: If a field says that the predictions are not kept as a whole.
    """
    for name, needed in _EVALUATION.items():
        if getattr(training, name) != needed:
            raise ValueError(
                f"{name} must be {str(needed).lower()}, since metrics are computed from all predictions of a split, "
                f"got {str(not needed).lower()}"
            )


def check_training_of_task(task: "Task", training: TrainingArguments) -> None:
    """
    Check the arguments of fine-tuning on a task.

    Raises:
        ValueError: If a field has no meaning for the task.
    """
    if training.label_smoothing_factor and not task.classifies:
        raise ValueError(
            f"label_smoothing_factor must be 0 for task {task.name}, whose labels are not classes, got "
            f"{training.label_smoothing_factor}"
        )
    best = training.metric_for_best_model
    if best is not None and best.removeprefix("eval_") not in (known := ("loss", *task.metric_names())):
        raise nearest(f"metric_for_best_model of task {task.name}", best, known)


def check_model_fields(fields: dict[str, Any]) -> None:
    """
    Check the values of the section `model` of a recipe.

    Raises:
        ValueError: If a field is out of its range.
    """
    for name in _MODEL_SIZES:
        if fields.get(name) is not None:
            check_range(name, fields[name], 1)
    for name in _FROM_0_TO_1:
        if fields.get(name) is not None:
            check_range(name, fields[name], 0, 1, _NUMBER)
    if fields.get("pad_token_id") is not None:
        num_tokens = fields.get("vocab_size") or SparseBertConfig.vocab_size
        check_range("pad_token_id", fields["pad_token_id"], 0, num_tokens - 1)
    activation = fields.get("hidden_act")
    if isinstance(activation, str) and activation not in ACT2FN:
        raise nearest("hidden_act", activation, ACT2FN)
    if fields.get("dtype") is not None:
        check_choice("dtype", fields["dtype"], DTYPES)


def check_pretraining(data: Any, model: dict[str, Any], max_steps: int = -1) -> None:
    """
    Check a pre-training recipe.

    Args:
        data ([`PretrainingArguments`]): Section `data`.
        model (`dict`): Section `model`.
        max_steps (`int`, *optional*, defaults to -1): Number of training steps, if it is given.

    Raises:
        ValueError: If a field is out of its range, or fields exclude each other.
        FileNotFoundError: If a file or folder does not exist.
        NotADirectoryError: If `cache_dir` is a file, or below one.
    """
    _check_streaming(data, max_steps)
    _check_text(data)
    if model.get("is_decoder") and data.mlm_probability != type(data).mlm_probability:
        raise ValueError("mlm_probability has no meaning with is_decoder true, which predicts the next token")
    if not 0 < data.mlm_probability < 1:
        raise ValueError(f"mlm_probability must be in (0, 1), got {data.mlm_probability!r}")
    _check_end_of_search(data)
    if data.nsp and model.get("is_decoder"):
        raise ValueError(
            "nsp true has no meaning with is_decoder true, which predicts the next token: set nsp to false"
        )
    if data.nsp and data.pack_documents:
        raise ValueError(
            "pack_documents true has no meaning with nsp true, whose rows are pairs of two documents: set nsp to false"
        )
    if data.pack_documents and (data.pruning or {}).get("score") == "attention":
        raise ValueError("pruning.score 'attention' has no meaning with pack_documents true: set it to false")
    check_source("base_model", data.base_model, **data.hub_arguments(data.base_model))
    check_source("tokenizer", data.tokenizer, **HubArguments(token=data.token).hub_arguments())
    check_source("mask", data.mask, **mask_arguments(data))
    _check_given_mask(data, model)
    check_model_fields(model)
    _check_positions(data, model)


def _check_streaming(data, max_steps):
    check_range("shuffle_buffer", data.shuffle_buffer, 1)
    if not data.streaming:
        if data.shuffle_buffer != type(data).shuffle_buffer:
            raise ValueError(f"shuffle_buffer {data.shuffle_buffer} has no meaning without streaming true")
        return
    if max_steps < 1:
        raise ValueError(f"streaming true needs max_steps, since the text has no known length, got {max_steps}")
    if data.max_tokens is not None:
        raise ValueError(
            f"max_tokens {data.max_tokens} has no meaning with streaming true: set it to null, and max_steps instead"
        )
    for name in ("text", "validation"):
        if getattr(data, name) == "builtin":
            raise ValueError(f"{name} 'builtin' cannot be streamed: set streaming to false, or name files")


def _check_text(data):
    """Check the text, and how much of it is read."""
    for name in ("text", "validation"):
        check_text_files(name, getattr(data, name), data.streaming)
    if data.cache_dir is not None:
        check_makeable(data.cache_dir, "cache_dir")
    check_range("max_length", data.max_length, 8)
    for name in ("max_tokens", "max_validation_tokens"):
        if getattr(data, name) is not None and getattr(data, name) < data.max_length:
            raise ValueError(f"{name} must be at least max_length {data.max_length}, got {getattr(data, name)!r}")


def _check_end_of_search(data):
    """Check when the mask is frozen, and what it keeps."""
    for name in ("freeze_threshold", "freeze_sparsity"):
        value = getattr(data, name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    if data.freeze_threshold is not None and data.freeze_sparsity is not None:
        raise ValueError(
            f"freeze_threshold {data.freeze_threshold} and freeze_sparsity {data.freeze_sparsity} exclude each other: "
            "give one of them"
        )
    for name, unset in _END_OF_SEARCH.items():
        if data.pruning is not None and getattr(data, name) != unset:
            raise ValueError(
                f"{name} {getattr(data, name)} has no meaning with pruning, which freezes the mask itself"
            )


def _check_positions(data, model):
    """Check the sizes of the model, and that it takes inputs of `max_length` tokens."""
    config: PreTrainedConfig
    if data.base_model:
        config = read_config(data.base_model, **data.hub_arguments(data.base_model))
        check_sizes_of(f"base_model {data.base_model}", config, model)
        positions = model.get("max_position_embeddings") or num_positions(config)
    else:
        config = SparseBertConfig(**model)
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads {config.num_attention_heads}, got "
                f"{config.hidden_size}"
            )
        positions = config.max_position_embeddings
    if data.max_length > positions:
        raise ValueError(
            f"max_length must be at most the model's {positions} positions (max_position_embeddings), got "
            f"{data.max_length}"
        )


def check_sizes_of(what: str, config: "PreTrainedConfig", model: dict[str, Any]) -> None:
    """
    Check that the section `model` of a recipe asks for no other sizes than those of the weights that are loaded.
    Layers may be left out, all else would begin with random weights.

    Args:
        what (`str`): The field and value that name the weights, for the message.
        config ([`~transformers.PreTrainedConfig`]): Their configuration.
        model (`dict`): Section `model`.

    Raises:
        ValueError: If a size differs.
    """
    for name in _MODEL_SIZES:
        asked, there = model.get(name), getattr(config, name, None)
        fewer = name == "num_hidden_layers" and asked is not None and there is not None and asked < there
        if None not in (asked, there) and asked != there and not fewer:
            raise ValueError(f"{name} must be {there}, as in {what}, got {asked}: leave the field out")


def _check_given_mask(data, model):
    """Fields about another mask than the one that the recipe asks for would have no effect."""
    pattern, search = model.get("pattern"), model.get("search")
    unknown = pattern not in (None, *PATTERNS) or search not in (None, *SEARCHES)
    if not data.mask and (unknown or (pattern and search)):
        return  # the configuration says that there is no such pattern or search, or that they exclude each other
    given = {name for name in model if name in OWN_FIELDS and model[name] is not None} - set(MODEL_FIELDS)
    if data.mask:
        kind, fits = f"the mask {data.mask}", set(allowed_fields(None))
    elif pattern:
        kind, fits = f"the pattern {pattern!r}", {"pattern", *allowed_fields(pattern)}
    elif search or not data.base_model:
        kind, fits = f"the search {search or 'dam_s'!r}", {"search", *allowed_fields(search or "dam_s")}
    else:
        return  # the weights to start from have a mask or search of their own
    if data.pruning:
        fits.add("share_layers")
    if refused := sorted(given - fits - {"mask_length"}):
        raise ValueError(f"model.{refused[0]} has no meaning with {kind}")
    if data.mask or pattern:
        check_not_searched(data, kind)


def check_not_searched(data: Any, kind: str) -> None:
    """
    Check that nothing is said about the end of a search where there is none.

    Args:
        data ([`PretrainingArguments`]): Section `data` of a recipe.
        kind (`str`): The mask that the model runs through instead, for the message.

    Raises:
        ValueError: If a field of the search is set.
    """
    for name, default in _END_OF_SEARCH.items():
        if getattr(data, name) != default:
            raise ValueError(f"{name} {getattr(data, name)} has no meaning with {kind}, which is not searched")


def warn_of_slow_bfloat16(bf16: bool, device: str) -> None:
    """
    Warn where bfloat16 costs time instead of saving it: on a CPU for which PyTorch has to emulate it.

    Args:
        bf16 (`bool`): Whether a run computes in bfloat16.
        device (`str`): Type of its device.
    """
    if not bf16 or device != "cpu" or not torch.backends.mkldnn.is_available():
        return
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning_once(
            "bf16 is true, but this CPU has no instructions for bfloat16: PyTorch emulates it, which takes several "
            "times as long as float32"
        )


def check_served(model: "PreTrainedModel", training: TrainingArguments, length: int) -> None:
    """
    Check that the attention backend of a model can serve its training and evaluation.

    Args:
        model (`PreTrainedModel`): The model, with its attention implementation set.
        training ([`~transformers.TrainingArguments`]): The arguments of the run.
        length (`int`): Number of tokens of an input.

    Raises:
        ValueError: If it cannot (the message names those that can), or if the mask does not cover the length.
    """
    sparse_attention = sparse_attention_of(model)
    name = model.config._attn_implementation
    if sparse_attention is None or not sparse_attention.num_layers:
        return
    mask = sparse_attention.search or sparse_attention.mask
    if mask is not None and mask.length_policy == "error" and length > mask.length:
        raise ValueError(
            f"max_length must be at most the mask's length {mask.length} (mask_length), since its length_policy is "
            f"'error', got {length}"
        )
    if name not in BACKENDS:
        return
    carrier, search = sparse_attention.carrier, sparse_attention.search
    dtype = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else model.dtype
    device, heads, causal = training.device.type, carrier.num_heads, carrier.is_decoder
    for trains in (True, False):
        wanted = set()
        if search is not None:
            wanted = {"learned"} if trains and not search.pruned else {"additive"}
            if wanted == {"learned"} and search.mask_form == "multiplicative":
                wanted.add("gate")
        shape = (1, heads, length, length, sparse_attention.head_size)
        request = Request(
            *(device, dtype, *shape, trains and carrier.dropout > 0, trains, True, causal, frozenset(wanted)),
            probability_map=sparse_attention.config.probability_map,
            index=training.device.index,
        )
        check_request(name, request)
