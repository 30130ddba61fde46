"""The arguments of a post-hoc search, and the checks that are made before weights and text are read."""

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import validated_field

from ...checks import (
    LARGEST_SEED,
    CheckedFields,
    Effects,
    check_allowed,
    check_choice,
    check_effects,
    check_range,
    nearest,
    no_effect,
    number,
    one_of,
)
from ...data.tasks import TASKS
from ...hub import HubArguments, mask_arguments, read_config
from ...learning.mask_description import MASK_FIELDS, fields_of_search
from ...learning.searches import SEARCHES
from ...masks.matched import VARIED, matched_pattern
from ...masks.patterns import PATTERNS, build_pattern
from ...models.architectures import check_architecture, num_positions, reads_images, shares_weights
from ...models.attaching import attach, read_mask
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ...models.coverage import check_layers
from ...models.loading import carries_mask
from ...models.model_classes import model_class_of
from ...models.sentence_files import check_not_a_module
from ..finetuning.finetuning_arguments import FinetuningArguments
from ..finetuning.task_data import MissingSplitError, choose_splits
from ..finetuning.task_models import model_and_mask_arguments
from ..runs.sources import check_kept, check_source, check_text_files
from .objectives import ANSWERING, OBJECTIVES


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ...masks.sparse_mask import SparseMask

# Defaults of SparseBertConfig that differ after training: every step keeps the entries of the largest P, with a budget
# for all heads together, distances have a sign, and what is removed leaves a rest.
FIELDS: dict[str, Any] = {
    "search": "dam_s",
    "share_layers": False,
    "special_tokens": "first_last",
    "sparsity_scope": "global",
    "mask_form": "log",
    "hard": True,
    "noise_scale": 0.0,
    "mask_logit_scale": 1.0,
    "symmetric": False,
    "rest": "mean",
}
# Defaults of the search, by the kind of device that the mask is for. A GPU skips tiles that are off as a whole.
TARGETS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {"search": "dam_b", "target_sparsity": 0.8},
}
# For a search that is not hard, which trains P itself, ever steeper.
SOFT_FIELDS: dict[str, Any] = {"temperature_end": 0.05}


@dataclass
class PostHocArguments(CheckedFields, HubArguments):
    """
    Section `data` of a post-hoc search; `revision` and `subfolder` are those of `model`. Section `model` describes
    the mask: `target_sparsity` (required, but for the device target `"gpu"` or a saved mask), `search`,
    `share_layers`, `block_size`, ...

    Args:
        model (`str`): Folder or Hub id of a text encoder without a mask.
        data (`str` or `list`): Unlabeled text: `"builtin"`, files, or `"hub:owner/name"`, see [`load_documents`]. With
            `task`, the folder with its files in their original formats; by default the Hub.
        validation (`str` or `list`, *optional*): Held-out text, in the same form; by default 1 document in 100.
        task (`str`, *optional*): Task that the model was fine-tuned on, a key of `TASKS`, to search on its inputs
            instead of text. Masks are then also compared by their score on the validation split.
        text_column, text_pair_column, label_column (`str`, *optional*): Columns of your own texts, as for
            `sparsebert finetune`.
        skip_bad (`bool`): Skip malformed rows of the task instead of stopping at the first one.
        output_dir (`str`): Output folder.
        mask (`str`, *optional*): Mask to recover with instead of a search: a folder or Hub id, or the name of a
            pattern or of a mask that comes with the package. Parameters of a pattern that vary its sparsity are chosen
            to come closest to `target_sparsity`. `"dense"` trains without a mask.
        mask_revision (`str`, *optional*): Branch, tag or commit of the mask, if it is a Hub id.
        mask_subfolder (`str`, *optional*): Folder of the mask within its repository or folder.
        pack (`bool`): Pack the text into rows of `max_length` tokens; `false` to take each document as an input, cut
            to `max_length`, as a classifier of documents gets them.
        device_target (`str`): The device that the mask is for: `"cpu"`, or `"gpu"` to search for whole tiles, `dam_b`
            with a `target_sparsity` of 0.8 unless another is given; other searches are refused.
        max_length (`int`): Tokens per row of text, or at most per input of the task, and length of the mask.
        max_tokens (`int`): Maximum number of tokens of text, or inputs, to search on.
        max_validation_tokens (`int`): Maximum number of tokens of held-out text, or inputs, to compare masks on. The
            score of a task takes all inputs.
        steps (`int`, *optional*): Number of steps of the search, by default 60, with a task 300. With 0, the mask
            keeps what the dense model attends to most.
        batch_size (`int`, *optional*): Rows of text per step, by default 8, or inputs of the task, by default 32.
        learning_rate (`float`): Learning rate of the mask logits.
        shortest (`int`, *optional*): Cut every other batch of text to a random length from here to `max_length`, for
            a mask that also serves short inputs; `null` to keep all batches whole. Only packed text is cut.
        train (`str`, *optional*): `"norms"` to train the weights of the normalization layers along with the mask.
        rest_steps (`int`): Number of steps that train the bias of the rest; with 0, it is only calibrated.
        recover (`int`): Number of steps that train the weights through the frozen mask, after the search.
        recover_learning_rate (`float`): Learning rate of these steps.
        objective (`str`, *optional*): What the search and the training of the rest compare between the masked and the
            dense model, a key of `OBJECTIVES`; by default `"pooled"`, with a task `"answers"`.
        recover_objective (`str`, *optional*): What the recovery compares; by default `"answers"` with `task` or if
            `objective` is `"answers"`, and else `"pooled"`.
        recover_from (`float`, *optional*): Sparsity at the start of the recovery; the mask becomes sparser during the
            first half of it. By default the recovery begins with the final mask.
        bf16 (`bool`): Compute all steps in bfloat16 (autocast); the weights keep their dtype. Faster on a GPU, or on a
            CPU with instructions for it.
        patterns (`bool`): Compare with random and manual masks.
        timed (`bool`): Time inference with the mask and without it.
        seed (`int`): Random seed.
        save_steps (`int`): Number of steps of search or recovery from one checkpoint to the next; there is also one at
            the end of each. They are removed when the run is finished.
        resume (`bool`): Continue from the newest complete checkpoint.
        allow_partial_resume (`bool`): Resume also from a checkpoint that lacks parts, such as the optimizer's state.
        overwrite (`bool`): Replace what is in the output folder, once the search is finished.
    """

    model: str | None = None
    data: str | list | None = None
    validation: str | list | None = None
    task: str | None = None
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | None = None
    skip_bad: bool = False
    output_dir: str | None = None
    mask: str | None = None
    mask_revision: str | None = None
    mask_subfolder: str | None = None
    pack: bool = True
    device_target: str = validated_field(one_of(tuple(TARGETS)), default="cpu")
    max_length: int = validated_field(number(8), default=128)
    max_tokens: int = 1_000_000
    max_validation_tokens: int = 8192
    steps: int | None = validated_field(number(0), default=None)
    batch_size: int | None = validated_field(number(1), default=None)
    learning_rate: float = validated_field(number(0, 1e6, (int, float)), default=0.05)
    shortest: int | None = 8
    train: str | None = validated_field(one_of(("norms",)), default=None)
    rest_steps: int = validated_field(number(0), default=40)
    recover: int = validated_field(number(0), default=0)
    recover_learning_rate: float = validated_field(number(0, 1e6, (int, float)), default=3e-5)
    objective: str | None = validated_field(one_of(OBJECTIVES), default=None)
    recover_objective: str | None = validated_field(one_of(OBJECTIVES), default=None)
    recover_from: float | None = None
    bf16: bool = False
    patterns: bool = True
    timed: bool = True
    seed: int = validated_field(number(0, LARGEST_SEED), default=0)
    save_steps: int = validated_field(number(1), default=500)
    resume: bool = False
    allow_partial_resume: bool = False
    overwrite: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of steps of the search, and the batch size."""
        steps, batch_size = (60, 8) if self.task is None else (300, 32)  # the inputs of a task are short
        steps = steps if self.steps is None else self.steps
        return steps, batch_size if self.batch_size is None else self.batch_size

    @property
    def objectives(self) -> tuple[str, str]:
        """What the search and the recovery compare: keys of `OBJECTIVES`."""
        search = self.objective or ("pooled" if self.task is None else "answers")
        # A recovery by other measures would leave the head as it is.
        answers = self.task is not None or search == "answers"
        return search, self.recover_objective or ("answers" if answers else "pooled")


SECTIONS = {"data": PostHocArguments, "model": SparseBertConfig}

_NO_SEARCH = "with mask: there is no search then"


def _trains(options):
    return bool(options.rest_steps or options.recover or (options.mask is None and options.steps != 0))


# Fields that have no effect, by the options.
_NO_EFFECT: Effects = (
    (
        ("skip_bad", "text_column", "text_pair_column", "label_column"),
        lambda options: not options.task and "without task",
    ),
    (("pack",), lambda options: options.task and f"with task: the inputs of {options.task} are not packed"),
    (("validation",), lambda options: options.task and f"with task: {options.task} has its own validation split"),
    (
        ("recover_from", "train", "steps", "learning_rate", "device_target"),
        lambda options: options.mask and _NO_SEARCH,
    ),
    (
        ("objective",),  # "answers" is then that of the recovery
        lambda options: (
            ((options.mask or options.steps == 0) and not options.rest_steps and options.objective != "answers")
            and "without a search, and without a rest that is trained; set recover_objective"
        ),
    ),
    (("train", "learning_rate"), lambda options: options.steps == 0 and "with steps 0: nothing is trained"),
    (("bf16",), lambda options: not _trains(options) and "without steps of a search, a rest or a recovery"),
    (
        ("recover_learning_rate", "recover_objective", "recover_from"),
        lambda options: not options.recover and "without recover, the number of steps of the recovery",
    ),
    (
        ("shortest",),
        lambda options: (
            (options.shortest is not None and (options.task or not options.pack or not _trains(options)))
            and "but for packed text in steps of a search, a rest or a recovery"
        ),
    ),
)
# Fields of the section `model` that have none, and why.
_SET_HERE = {
    "mask_length": "here: the mask is as long as the rows, set max_length",
    "initial_decay": "here: the search starts from what the dense model attends to",
    "sparsity_weight": "here: the search has a target, set target_sparsity",
}


def given_mask(options: PostHocArguments, fields: dict[str, Any], config: "PreTrainedConfig") -> "SparseMask | None":
    """The mask to recover through, if there is one: that of a folder, or a pattern of the target sparsity."""
    if options.mask is None:
        return None
    sizes = options.max_length, config.num_attention_heads, config.num_hidden_layers
    if options.mask in VARIED:
        return matched_pattern(options.mask, fields["target_sparsity"], *sizes, options.seed)
    if options.mask in PATTERNS:
        return build_pattern(options.mask, *sizes, seed=options.seed)
    return read_mask(options.mask, **mask_arguments(options))


def check_arguments(options: PostHocArguments, given: dict[str, Any]) -> "tuple[PreTrainedConfig, dict[str, Any]]":
    """
    Check a recipe before weights and text are read.

    Args:
        options ([`PostHocArguments`]): Section `data` of the recipe.
        given (`dict`): Section `model` of the recipe.

    Returns:
        `tuple`: The model's configuration, and the fields of the search.
    """
    if options.mask is None:
        target = TARGETS[options.device_target]
        if "search" in target and given.get("search", target["search"]) != target["search"]:
            why = f"with search {given['search']!r}, which learns no tiles"
            raise no_effect("device_target", options.device_target, why)
        given = target | given
    fields = given
    if options.mask is None:
        search = given.get("search", FIELDS["search"])
        check_choice("search", search, tuple(SEARCHES))
        stochastic = SEARCHES[search].stochastic
        fields = FIELDS | ({} if stochastic else {"hard": False}) | given
        if not (stochastic and fields["hard"]):
            fields = SOFT_FIELDS | fields
    for name in ("model", "output_dir") if options.task else ("model", "data", "output_dir"):
        if getattr(options, name) is None:
            raise ValueError(f"--{name} is needed")
    check_effects(_NO_EFFECT, options)
    _check_text(options)
    check_kept(str(options.output_dir), "model", options)
    _check_mask(options, fields, given)
    config = _check_model(options)
    if "rest" in fields.keys() - given.keys() and (
        getattr(config, "is_decoder", False) or fields.get("mask_form") == "multiplicative"
    ):
        fields = fields | {"rest": "none"}
    model = _model_without_weights(config)
    if shares_weights(config):
        fields = {**fields, "share_layers": True} | given  # the same weights in every layer
    mask = given_mask(options, fields, config)
    if (fields.get("rest") or getattr(mask, "rest", "none")) == "none":
        if mask is not None and not options.recover:
            raise ValueError("recover must be at least 1 if mask is given without a rest to calibrate, got 0")
        if options.rest_steps != PostHocArguments.rest_steps:
            raise no_effect("rest_steps", options.rest_steps, "without a rest")
        options = replace(options, rest_steps=0)
        check_effects(_NO_EFFECT, options)
    # Rejects wrong fields, such as a target out of reach.
    attach_mask(model, options, fields, mask)
    return config, fields


def _check_text(options: PostHocArguments) -> None:
    """Check the text, or the task with its data."""
    if options.shortest is not None and not 8 <= options.shortest <= options.max_length:
        raise ValueError(f"shortest must be from 8 to max_length ({options.max_length}), got {options.shortest}")
    for name in ("max_tokens", "max_validation_tokens"):
        check_range(name, getattr(options, name), options.max_length)
    if options.task is None:
        for name in ("data", "validation"):
            check_text_files(name, getattr(options, name))
        return
    if options.task not in TASKS:
        raise nearest("task", options.task, list(TASKS))
    if not TASKS[options.task].head.endswith(ANSWERING):
        able = ", ".join(name for name, task in TASKS.items() if task.head.endswith(ANSWERING))
        raise ValueError(f"task {options.task} has several inputs per example: the search takes {able}")
    if not isinstance(options.data, str | None):
        raise ValueError(f"data must be the folder of task {options.task}, got {options.data!r}")
    available = TASKS[options.task].splits(options.data)
    try:
        choose_splits(available, FinetuningArguments(task=options.task, data=options.data, test_split=[]))
    except MissingSplitError as error:  # its advice is for other commands
        raise ValueError(
            f"task {options.task}: data {options.data!r} must hold inputs to search on (train...) and to compare "
            f"masks on (val... or dev...), got {', '.join(available) or 'none'}"
        ) from error


def _check_mask(options: PostHocArguments, fields: dict[str, Any], given: dict[str, Any]) -> None:
    """Check what is searched for, or the mask that is given instead."""
    target = fields.get("target_sparsity")
    if target is None and options.mask in (None, *VARIED):
        raise ValueError("--target_sparsity is needed: the fraction of the attention to remove, such as 0.9")
    for name, why in _SET_HERE.items():
        if given.get(name) is not None:
            raise no_effect(f"--model.{name}", given[name], why)
    allowed = MASK_FIELDS if options.mask else (*fields_of_search(fields["search"]), "search")
    why = "here: the mask is given"
    if not options.mask:
        why = f"with the search {fields['search']!r}, and the model keeps its own configuration"
    check_allowed("--model", fields, {*allowed, "target_sparsity"}, why)
    _, of_mask = model_and_mask_arguments(options)
    if options.mask not in (None, *PATTERNS):
        check_source("mask", options.mask, **of_mask)
    if target is not None and options.mask not in (None, *VARIED):
        raise no_effect("--target_sparsity", target, f"with mask {options.mask!r}, whose sparsity is given")
    if options.recover_from is not None and not 0 <= options.recover_from < fields["target_sparsity"]:
        raise ValueError(
            f"recover_from must be at least 0 and below target_sparsity ({fields['target_sparsity']}), got "
            f"{options.recover_from!r}"
        )


def _check_model(options: PostHocArguments) -> "PreTrainedConfig":
    """Check that the model can be searched, with these objectives."""
    compared = dict(zip(("objective", "recover_objective"), options.objectives, strict=True))
    hub_arguments = options.hub_arguments(options.model)
    check_source("model", options.model, **hub_arguments)
    check_not_a_module(str(options.model), **hub_arguments)
    config = read_config(str(options.model), **hub_arguments)
    check_architecture(config.model_type)
    if reads_images(config):
        raise ValueError(f"{options.model} reads images: this search is for text encoders")
    if carries_mask(str(options.model), **hub_arguments):
        advice = "sparsebert.detach removes its mask"
        if config.model_type == SparseBertConfig.model_type:
            advice = "sparsebert pretrain continue --base_model learns another one, together with its MLM head"
        raise ValueError(f"{options.model} already has a mask: the search starts from a model without one; {advice}")
    if options.max_length > (positions := num_positions(config)):
        raise ValueError(f"max_length must be at most the model's {positions} positions, got {options.max_length}")
    check_layers(model := _model_without_weights(config))
    head = "" if options.task is None else TASKS[options.task].head.removeprefix("AutoModel")
    if not type(model).__name__.endswith(head):
        raise ValueError(
            f"task {options.task} needs a model that was fine-tuned on it (...{head}), {options.model} is a "
            f"{type(model).__name__}"
        )
    for name, objective in compared.items():
        if reason := OBJECTIVES[objective].refuse(model):
            raise no_effect(name, objective, f"here: {reason}")
    return config


def _model_without_weights(config: "PreTrainedConfig") -> Any:
    with torch.device("meta"):
        model_class: Any = model_class_of(config)
        # The class of a checkpoint that does not name one is an Auto class.
        return getattr(model_class, "from_config", model_class)(copy.deepcopy(config))


def attach_mask(
    model: "PreTrainedModel", options: PostHocArguments, fields: dict[str, Any], given: "SparseMask | None"
) -> "PreTrainedModel":
    """Attach the search of a checked recipe to a model, or the given mask."""
    if given is not None:
        others = {name: value for name, value in fields.items() if name in MASK_FIELDS}
        try:
            return attach(model, given, **others)
        except ValueError as error:
            raise ValueError(f"mask {options.mask} does not fit {options.model}: {error}") from error
    others = {name: value for name, value in fields.items() if name != "search"}
    backend = "sparse_eager" if fields.get("mask_form") == "multiplicative" else "sparse_sdpa"
    return attach(model, fields["search"], mask_length=options.max_length, attn_implementation=backend, **others)
