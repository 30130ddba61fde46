"""
Checks of what all runs have in common, before any text or weights are read: the arguments of the Trainer and the sizes
of a model. Each error names field, value and bounds.
"""

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
from ...checks import LARGEST_SEED, MAX_HEADS, MAX_LAYERS, check_choice, check_range, nearest, no_effect
from ...models.bert.configuration_sparsebert import SparseBertConfig


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.get_logger(__name__)
_NUMBER = (int, float)
_MOST_RUNS = 10_000
# What `TrainingArguments` takes without a look, and a run would fail of later: low, high and kind.
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
# Fields that would switch off at 0 what was asked for, and what they are left out for.
_NOT_ZERO = {
    "save_steps": "for the default",
    "eval_steps": "for the value of logging_steps",
    "save_total_limit": "to keep all checkpoints",
}
# Fields with which there would be no predictions of the whole split to compute metrics from.
_EVALUATION = {"prediction_loss_only": False, "batch_eval_metrics": False, "eval_do_concat_batches": True}
# Bounds of the sizes and shares of a model.
_MODEL_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size"),
)
_MOST = {"num_hidden_layers": MAX_LAYERS, "num_attention_heads": MAX_HEADS}
_FROM_0_TO_1 = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps")


def read_training(fields: dict[str, Any], arguments_class: Any = TrainingArguments) -> Any:
    """Check the section `training` of a recipe, and make the arguments of the Trainer."""
    check_training(fields)
    training = arguments_class(**fields)
    _check_schedule(training)
    for name, wanted in _EVALUATION.items():
        if getattr(training, name) != wanted:
            raise ValueError(
                f"{name} must be {str(wanted).lower()}, since metrics are computed from all predictions of a split, "
                f"got {str(not wanted).lower()}"
            )
    return training


def check_training(fields: dict[str, Any]) -> None:
    """Check the values of the section `training`."""
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
    if fields.get("eval_steps") is not None and "eval_strategy" not in fields:
        raise no_effect("eval_steps", fields["eval_steps"], "without --eval_strategy steps")
    for name in ("adam_beta1", "adam_beta2"):
        if fields.get(name) == 1:
            raise ValueError(f"{name} must be less than 1, got 1")
    steps, epochs = fields.get("max_steps"), fields.get("num_train_epochs")
    if steps is not None and steps != -1:
        check_range("max_steps", steps, 1)
    if epochs is not None and not 0 < epochs < math.inf:
        raise ValueError(f"num_train_epochs must be more than 0, got {epochs!r}")


def _check_schedule(training):
    """Check that the schedule of the learning rate can be made."""
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


def check_model_fields(fields: dict[str, Any]) -> None:
    """Check the values of the section `model` of a recipe."""
    for name in _MODEL_SIZES:
        if fields.get(name) is not None:
            check_range(name, fields[name], 1, _MOST.get(name))
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


def check_sizes_of(what: str, config: "PreTrainedConfig", model: dict[str, Any]) -> None:
    """
    Check that the section `model` of a recipe asks for no other sizes than those of the weights that are loaded.
    Layers may be left out, all else would begin with random weights.
    """
    for name in _MODEL_SIZES:
        asked, there = model.get(name), getattr(config, name, None)
        fewer = name == "num_hidden_layers" and asked is not None and there is not None and asked < there
        if None not in (asked, there) and asked != there and not fewer:
            raise ValueError(f"{name} must be {there}, as in {what}, got {asked}: leave the field out")


def warn_of_slow_bfloat16(bf16: bool, device: str) -> None:
    """Warn where bfloat16 costs time instead of saving it: on a CPU for which PyTorch has to emulate it."""
    if not bf16 or device != "cpu" or not torch.backends.mkldnn.is_available():
        return
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning_once(
            "bf16 is true, but this CPU has no instructions for bfloat16: PyTorch emulates it, which takes several "
            "times as long as float32"
        )


def check_served(model: "PreTrainedModel", training: TrainingArguments, length: int) -> None:
    """Check that the attention backend of a model can serve its training and evaluation."""
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
    for trains in (True, False):
        request = Request(
            training.device.type, dtype, 1, carrier.num_heads, length, length, sparse_attention.head_size,
            trains and carrier.dropout > 0, trains, True, carrier.is_decoder,
            frozenset(sparse_attention.wanted(sampling=search is not None and trains and not search.pruned)),
            sparse_attention.config.probability_map, training.device.index,
        )  # fmt: skip
        check_request(name, request)


def check_seeds(value: Any) -> None:
    """A validator for `validated_field`: a number of runs, or a list of different seeds."""
    listed = value if isinstance(value, list) else [value]
    if not listed or any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in listed):
        raise ValueError(f"must be a number of runs or a list of seeds, got {value!r}")
    if value == 0 or len(set(listed)) < len(listed):
        raise ValueError(f"must be at least 1, or a list of different seeds, got {value!r}")
    if isinstance(value, int) and value > _MOST_RUNS:
        raise ValueError(f"must be at most {_MOST_RUNS} runs, got {value}")


def read_seeds(seeds: int | list, first: int, given: int | None = None) -> list[int]:
    """The seeds of the runs; a number of runs counts up from `first`, which may be `given` in the recipe."""
    if isinstance(seeds, list) and given is not None:
        raise no_effect("seed", given, f"with the list of seeds {seeds}")
    found = seeds if isinstance(seeds, list) else list(range(first, first + seeds))
    if max(found) > LARGEST_SEED:
        raise ValueError(f"seeds must be at most {LARGEST_SEED}, got {max(found)}")
    return found
