"""The section `data` of a pre-training recipe, and what a recipe may say together, before text or weights are read."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import validated_field
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ...checks import (
    CheckedFields,
    Effects,
    check_allowed,
    check_choice,
    check_effects,
    interval,
    nearest,
    no_effect,
    number,
)
from ...files import check_makeable
from ...hub import HubArguments, mask_arguments, read_config
from ...learning.mask_description import MODEL_FIELDS, OWN_FIELDS, allowed_fields, fields_of_search
from ...learning.searches import SEARCHES
from ...masks.patterns import PATTERNS
from ...models.architectures import num_positions
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ..runs.run_checks import check_model_fields, check_seeds, check_sizes_of
from ..runs.sources import check_kept, check_source, check_text_files
from ..time_budget import SCHEDULES, counts_steps


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass
class PretrainingArguments(CheckedFields, HubArguments):
    """
    Section `data` of a pre-training recipe. `revision` and `subfolder` are those of `base_model`.

    Args:
        text (`str` or `list`): Training text: `"builtin"`, files, or `"hub:owner/name"`, see [`load_documents`].
        streaming (`bool`): Read the training text during the training instead of tokenizing all of it first, for text
            of any size. `text` and `validation` are then files, URLs, patterns such as `"data/*.parquet"`, or
            `"hub:owner/name"`, see [`open_documents`]; `training.max_steps` is needed.
        shuffle_buffer (`int`): With `streaming`, number of examples that are shuffled at once.
        validation (`str` or `list`, *optional*): Held-out text, in the same form; by default 1 document in 100.
        tokenizer (`str`, *optional*): Folder or Hub id of a tokenizer; by default that of `base_model`, and without
            one a WordPiece tokenizer of `model.vocab_size` tokens, trained on the text.
        base_model (`str`, *optional*): Folder or Hub id of weights to start from.
        mask (`str`, *optional*): Folder or Hub id of a [`SparseMask`] to train with.
        mask_revision (`str`, *optional*): Branch, tag or commit of the mask, if it is a Hub id.
        mask_subfolder (`str`, *optional*): Folder of the mask within its repository or folder.
        nsp (`bool`): Train on next-sentence pairs with MLM and NSP loss, like BERT; otherwise on packed text with MLM
            only, or with `model.is_decoder` to predict the next token.
        pack_documents (`bool`): Whether the documents of a row of packed text attend to themselves only, with
            positions that restart in each; otherwise a row is one text, with a `[SEP]` between documents. Not with
            `nsp`.
        max_length (`int`): Maximum number of tokens per example.
        max_tokens (`int`, *optional*): Maximum number of tokens of training text to read.
        max_validation_tokens (`int`): Maximum number of tokens of held-out text to read.
        cache_dir (`str`, *optional*): Folder for the tokenized text, which later runs and all processes of a machine
            reuse; by default that of `datasets` (`HF_DATASETS_CACHE`).
        mlm_probability (`float`): Fraction of the tokens to predict.
        freeze_threshold (`float`, *optional*): Freeze by keeping entries with P above this; 0.5 if neither a
            threshold nor a sparsity is given.
        freeze_sparsity (`float`, *optional*): Freeze by keeping the entries with the highest P, down to this sparsity;
            by default the model's `target_sparsity`.
        start_from_attention (`bool`): Start the search from what `base_model` attends to, instead of a start at which
            all positions are alike, or near ones likelier.
        search_end (`float`): Fraction of the training at which the mask is frozen; the rest trains with the frozen
            mask.
        pruning (`dict`, *optional*): Arguments of [`ProgressivePruning`], such as `{"final_sparsity": 0.9}`, to prune
            the mask by a schedule during training.
        max_minutes (`float`, *optional*): Minutes of training, including saving and evaluation during the training.
            The learning rate and the search follow the clock, `warmup_steps` is a fraction, and `max_steps` and
            `num_train_epochs` may end the training sooner.
        batch_ramp (`float`): Fraction of the training during which the batch grows to its full size; until then, the
            weights are updated several times in each step. Needs `gradient_accumulation_steps`.
        attn_implementation (`str`): Attention backend, `"sparse_auto"` or a name of `BACKENDS`.
        seeds (`int` or `list`): Number of runs, counted up from `training.seed`, or a list of seeds. Several run one
            after the other, each in a folder `seed-N` of the output folder; with `resume`, those that are finished are
            kept.
        pictures (`bool`): Draw the mask at the end, if matplotlib is installed and the model is not dense.
        resume (`bool`): Continue from the newest complete checkpoint in the output folder, if there is one.
        allow_partial_resume (`bool`): Resume also from a checkpoint that lacks parts, such as the optimizer's state.
        overwrite (`bool`): Replace what is in the output folder, once the new run is finished.
    """

    text: str | list = "builtin"
    streaming: bool = False
    shuffle_buffer: int = validated_field(number(1), default=10_000)
    validation: str | list | None = None
    tokenizer: str | None = None
    base_model: str | None = None
    mask: str | None = None
    mask_revision: str | None = None
    mask_subfolder: str | None = None
    nsp: bool = True
    pack_documents: bool = False
    max_length: int = validated_field(number(8), default=128)
    max_tokens: int | None = None
    max_validation_tokens: int = 200_000
    cache_dir: str | None = None
    mlm_probability: float = validated_field(interval(0, 1, low_open=True, high_open=True), default=0.15)
    freeze_threshold: float | None = validated_field(interval(0, 1, high_open=True), default=None)
    freeze_sparsity: float | None = validated_field(interval(0, 1, high_open=True), default=None)
    start_from_attention: bool = False
    search_end: float = 1.0
    pruning: dict | None = None
    max_minutes: float | None = validated_field(interval(0, math.inf, low_open=True, high_open=True), default=None)
    batch_ramp: float = validated_field(number(0, 1, (int, float)), default=0.0)
    attn_implementation: str = "sparse_auto"
    seeds: int | list = validated_field(check_seeds, default=1)
    pictures: bool = True
    resume: bool = False
    allow_partial_resume: bool = False
    overwrite: bool = False


_OF_TARGET = ("initial_sparsity", "sparsity_warmup", "sparsity_ramp")
_END_OF_SEARCH = ("freeze_threshold", "freeze_sparsity", "search_end")
_NEXT_TOKEN = "with is_decoder true, which predicts the next token"
# Fields that have no effect, by section `data` and `model`.
_NO_EFFECT: Effects = (
    (("shuffle_buffer",), lambda data, model: not data.streaming and "without streaming true"),
    (
        ("max_tokens",),
        lambda data, model: data.streaming and "with streaming true: set it to null, and max_steps instead",
    ),
    (("mlm_probability",), lambda data, model: model.get("is_decoder") and _NEXT_TOKEN),
    (
        ("pack_documents",),
        lambda data, model: data.nsp and "with nsp true, whose rows are pairs of two documents: set nsp to false",
    ),
    (
        ("pruning",),
        lambda data, model: data.max_minutes and "with max_minutes: its schedule needs the number of steps",
    ),
    (_END_OF_SEARCH, lambda data, model: data.pruning and "with pruning, which freezes the mask itself"),
)


def _metric_names(data: PretrainingArguments, model: dict[str, Any]) -> list[str]:
    """Names of the values that a model may be evaluated by; one to go on from may be causal."""
    causal, masked = ("lm_loss", "perplexity"), ("mlm_loss", "mlm_accuracy", *(["nsp_accuracy"] if data.nsp else []))
    names = causal if model.get("is_decoder") else masked if data.base_model is None else (*masked, *causal)
    return ["loss", *names]


def check_pretraining(data: PretrainingArguments, model: dict[str, Any], training: TrainingArguments) -> None:
    """Check a recipe: `data` has checked its own fields, and `training` is from [`read_training`]."""
    check_effects(_NO_EFFECT, data, model)
    _check_text(data, training.max_steps)
    if data.freeze_threshold is not None and data.freeze_sparsity is not None:
        raise ValueError(
            f"freeze_threshold {data.freeze_threshold} and freeze_sparsity {data.freeze_sparsity} exclude each other: "
            "give one of them"
        )
    if data.nsp and model.get("is_decoder"):
        raise no_effect("nsp", True, f"{_NEXT_TOKEN}: set nsp to false")
    if data.nsp and training.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor must be 0 with nsp true, whose two losses only the model can compute, got "
            f"{training.label_smoothing_factor}: set nsp to false"
        )
    if training.label_names is not None:
        raise no_effect("label_names", training.label_names, "here: pre-training makes its labels itself")
    best = (training.metric_for_best_model or "loss").removeprefix("eval_")
    if best not in (known := _metric_names(data, model)):
        raise nearest("metric_for_best_model of pre-training", best, known)
    if data.pack_documents and (data.pruning or {}).get("score") == "attention":
        raise no_effect("pruning.score", "attention", "with pack_documents true: set it to false")
    if data.batch_ramp and training.gradient_accumulation_steps == 1:
        raise ValueError(
            f"batch_ramp {data.batch_ramp} needs gradient_accumulation_steps of 2 and more, got 1: nothing to ramp"
        )
    check_source("base_model", data.base_model, **data.hub_arguments(data.base_model))
    check_source("tokenizer", data.tokenizer, **HubArguments(token=data.token).hub_arguments())
    check_source("mask", data.mask, **mask_arguments(data))
    check_kept(training.output_dir or "", "base_model", data)
    _check_given_mask(data, model)
    check_model_fields(model)
    _check_positions(data, model)
    _check_start(data, model)


def check_not_searched(data: PretrainingArguments, kind: str) -> None:
    """Check that nothing is said about the end of a search where there is none, but another `kind` of mask."""
    check_effects([(_END_OF_SEARCH, lambda _: f"with {kind}, which is not searched")], data)


def check_no_decay(model: dict[str, Any]) -> None:
    """Check that a search that starts from attention is not told to start elsewhere."""
    if (decay := model.get("initial_decay")) is not None:
        raise ValueError(f"initial_decay {decay} excludes start_from_attention, which says where the search starts")


def check_clock(data: PretrainingArguments, training: dict[str, Any]) -> None:
    """Check that the section `training` of a recipe with `max_minutes` counts no steps, whose number is not known."""
    if data.max_minutes is None:
        return
    if training.get("restore_callback_states_from_checkpoint"):
        raise ValueError(
            "restore_callback_states_from_checkpoint must be false with max_minutes, which restores its own state"
        )
    check_choice("lr_scheduler_type with max_minutes", training.get("lr_scheduler_type", "linear"), SCHEDULES)
    if (warmup := training.get("warmup_steps", 0)) >= 1:
        raise ValueError(f"warmup_steps must be a fraction of max_minutes, in [0, 1), got {warmup!r}")
    for name in () if counts_steps(training) else ("logging_steps", "save_steps", "eval_steps"):
        if 0 < (training.get(name) or 1) < 1:
            raise ValueError(f"{name} must be a number of steps with max_minutes, got {training[name]!r}")


def _check_text(data, max_steps):
    """Check the text, and how much of it is read."""
    if data.streaming and max_steps < 1:
        raise ValueError(f"streaming true needs max_steps, since the text has no known length, got {max_steps}")
    for name in ("text", "validation"):
        if data.streaming and getattr(data, name) == "builtin":
            raise ValueError(f"{name} 'builtin' cannot be streamed: set streaming to false, or name files")
        check_text_files(name, getattr(data, name), data.streaming)
    if data.cache_dir is not None:
        check_makeable(data.cache_dir, "cache_dir")
    for name in ("max_tokens", "max_validation_tokens"):
        if getattr(data, name) is not None and getattr(data, name) < data.max_length:
            raise ValueError(f"{name} must be at least max_length {data.max_length}, got {getattr(data, name)!r}")


def _check_given_mask(data, model):
    """Fields about another mask than the one that the recipe asks for would have no effect."""
    pattern, search = model.get("pattern"), model.get("search")
    unknown = pattern not in (None, *PATTERNS) or search not in (None, *SEARCHES)
    if not data.mask and (unknown or (pattern and search)):
        return  # the configuration says that there is no such pattern or search, or that they exclude each other
    whose = ""
    if not (data.mask or pattern or search):
        # The weights to start from may have a pattern or search of their own.
        start = read_config(data.base_model, **data.hub_arguments(data.base_model)) if data.base_model else None
        if getattr(start, "frozen", False):
            return  # the model says what may change
        pattern, search = getattr(start, "pattern", None), getattr(start, "search", None)
        whose = f" of base_model {data.base_model}" if pattern or search else ""
    if data.mask:
        kind, fits = f"the mask {data.mask}", set(allowed_fields(None))
    elif pattern:
        kind, fits = f"the pattern {pattern!r}{whose}", {"pattern", *allowed_fields(pattern)}
    else:
        kind, fits = f"the search {search or 'dam_s'!r}{whose}", {"search", *fields_of_search(search or "dam_s")}
        _check_target(data, model)
    if data.pruning:
        fits.add("share_layers")
    of_mask = set(OWN_FIELDS) - {*MODEL_FIELDS, "mask_length"}
    given = {name: value for name, value in model.items() if name in of_mask and value is not None}
    check_allowed("model", given, fits, f"with {kind}")
    if data.mask or pattern:
        check_not_searched(data, kind)


def _check_target(data, model):
    """A search has a target or the weight of a penalty; a target alone has a ramp, and pruning removes by itself."""
    given = [name for name in (*_OF_TARGET, "hard", "sparsity_scope") if model.get(name)]
    if data.pruning and given:
        raise no_effect(f"model.{given[0]}", model[given[0]], "with pruning, which removes entries by itself")
    target, weight = model.get("target_sparsity"), model.get("sparsity_weight")
    if target is not None and weight:
        raise no_effect("model.sparsity_weight", weight, f"with target_sparsity {target}: set one of them to null")
    for name in _OF_TARGET if target is None and not data.base_model else ():
        if model.get(name):
            raise no_effect(f"model.{name}", model[name], "without target_sparsity")


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


def _check_start(data, model):
    """Check that a search can start from what the weights attend to."""
    if not data.start_from_attention:
        return
    if model.get("search") is None:
        raise ValueError("start_from_attention needs model.search, the mask that is learned")
    if data.base_model is None:
        raise ValueError("start_from_attention needs base_model, weights whose attention means something")
    if is_deepspeed_zero3_enabled():
        raise ValueError("start_from_attention needs whole weights, which no process of ZeRO-3 has: use ZeRO-2")
    if data.streaming:
        raise ValueError("start_from_attention needs the text before the training: set streaming to false")
    check_no_decay(model)
