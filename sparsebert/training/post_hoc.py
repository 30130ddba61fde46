"""
The run of a post-hoc search: learn the mask of a trained model, freeze it, and compare it with other masks.

This module reads model and text and writes the results; [`~sparsebert.training.matching`] has the algorithm.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import set_seed

from ..analysis.pictures import plot_heads, plot_mean_probs, plot_offset_profile
from ..analysis.tables import Table
from ..checks import check_choice, check_range
from ..data.documents import load_documents
from ..data.examples import pretraining_dataset
from ..files import check_output_dir, locked_output, write_metrics
from ..hub import HubArguments, read_config, read_tokenizer
from ..masks.matched import MATCHED, VARIED, matched_pattern, matched_patterns
from ..masks.patterns import PATTERNS, build_pattern
from ..masks.sparse_mask import SparseMask
from ..models.architectures import attention_modules, check_architecture, num_positions
from ..models.attaching import MASK_FIELDS, allowed_fields, attach
from ..models.configuration_sparsebert import SparseBertConfig
from ..models.loading import carries_mask, model_class_of
from ..search.budget import scheduled
from ..search.learned_mask import MASK_PROBS_NAME, LearnedMask
from ..search.searches import SEARCHES
from .matching import agreement, carrier, learn_mask, random_batches, recover, start_from_attention
from .objectives import OBJECTIVES, predicts_tokens
from .run_cards import add_search, hardware
from .run_checks import check_source, read_given_mask
from .run_folders import run_folder


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Share of a recovery in which a mask that begins with `recover_from` grows sparser, and in how many stages.
GROWTH, GROWTH_STAGES = 0.5, 8
LEARNED, STARTED_FROM, GIVEN, RECOVERED = "learned", "dense model's attention", "given", "{}, recovered"
# Number of batches over which the attention probabilities that the search starts from are averaged.
START_BATCHES = 8
# Defaults of SparseBertConfig that differ after training: the search uses P itself instead of samples of it, ever
# steeper, and adds log P to the scores, whose gradient still reaches entries that are nearly removed.
FIELDS: dict[str, Any] = {
    "search": "dam_s",
    "share_layers": False,
    "special_tokens": "first_last",
    "symmetric": False,
    "mask_form": "log",
    "hard": False,
    "noise_scale": 0.0,
    "temperature": 1.0,
    "temperature_end": 0.05,
    "mask_logit_scale": 1.0,
}


@dataclass
class PostHocArguments(HubArguments):
    """
    Section `data` of a post-hoc search; `revision` and `subfolder` are those of `model`. Section `model` describes
    the mask: `target_sparsity` (required), `search`, `share_layers`, `block_size`, ...

    Args:
        model (`str`): Folder or Hub id of a text encoder without a mask.
        data (`str` or `list`): Unlabelled text: `"builtin"`, files, or `"hub:owner/name"`, see [`load_documents`].
        validation (`str` or `list`, *optional*): Held-out text, in the same form; by default 1 document in 100.
        output_dir (`str`): Output folder.
        mask (`str`, *optional*): Instead of a search: a mask to recover through, as a folder or Hub id, or the name of
            a pattern, which gets the parameters that come nearest to `target_sparsity`. `"dense"` trains without one.
        max_length (`int`): Tokens per row of text, and length of the mask.
        max_tokens (`int`): Maximum number of tokens of text to read.
        max_validation_tokens (`int`): Maximum number of tokens of held-out text to read.
        steps (`int`): Steps of the search; with 0 the mask keeps what the dense model attends to most.
        batch_size (`int`): Rows of text per step.
        learning_rate (`float`): Learning rate of the mask logits.
        shortest (`int`, *optional*): Cut every other batch to a random length from here to `max_length`, for a mask
            that also serves short inputs; `null` to keep all batches whole.
        train (`str`, *optional*): `"norms"` to train the weights of the normalization layers along with the mask.
        recover (`int`): Steps of training the weights through the frozen mask, after the search.
        recover_learning_rate (`float`): Learning rate of these steps.
        objective (`str`): What the search compares of the masked and the dense model, a key of `OBJECTIVES`.
        recover_objective (`str`): What the recovery compares.
        recover_from (`float`, *optional*): Sparsity at which the recovery begins; the mask then becomes sparser in
            its first half. By default it has its final sparsity all along.
        patterns (`bool`): Compare with random and manual masks.
        seed (`int`): Random seed.
        overwrite (`bool`): Replace what is in the output folder, once the search is finished.
    """

    model: str | None = None
    data: str | list | None = None
    validation: str | list | None = None
    output_dir: str | None = None
    mask: str | None = None
    max_length: int = 128
    max_tokens: int = 1_000_000
    max_validation_tokens: int = 8192
    steps: int = 60
    batch_size: int = 8
    learning_rate: float = 0.05
    shortest: int | None = 8
    train: str | None = None
    recover: int = 0
    recover_learning_rate: float = 1e-4
    objective: str = "layers"
    recover_objective: str = "pooled"
    recover_from: float | None = None
    patterns: bool = True
    seed: int = 0
    overwrite: bool = False


# What a search writes, apart from the configuration and the tokenizer.
_WRITTEN = (
    *("model*.safetensors*", "mask*.safetensors", "mask_config.json", "metrics.json", "heads.png", "mean_probs.png"),
    "offset_profile.png",
)

SECTIONS = {"data": PostHocArguments, "model": SparseBertConfig}


def search_post_hoc(
    recipe: dict[str, dict[str, Any]], log: Callable[[int, float], None] | None = None
) -> dict[str, Any]:
    """
    Learn the mask of a trained model as a recipe says, freeze it, and compare it with other masks.

    Writes to `output_dir` the model with its mask, the tokenizer, `metrics.json`, `mask_probs.safetensors` and, if
    matplotlib is installed, pictures: all in the end, or nothing.

    Args:
        recipe (`dict[str, dict]`): Sections `data` and `model`, as [`load_recipe`] returns them.
        log (`Callable`, *optional*): Called with the step and the error after every step of search and recovery.

    Returns:
        `dict`: The metrics. [`agreement_table`] makes a table of them.
    Raises:
        ValueError, OSError: If something is wrong in the recipe, the model or the text.
    """
    options = PostHocArguments(**recipe["data"])
    config, fields = check_arguments(options, recipe["model"])
    output = Path(str(options.output_dir))
    with locked_output(output), run_folder(output, options.overwrite, written=_WRITTEN, whole=True) as (folder, _):
        return _search(options, config, fields, folder, log)


def _search(
    options: PostHocArguments,
    config: "PreTrainedConfig",
    fields: dict[str, Any],
    output: Path,
    log: Callable[[int, float], None] | None,
) -> dict[str, Any]:
    start = time.perf_counter()
    set_seed(options.seed)
    hub_arguments = options.hub_arguments(options.model)
    tokenizer = read_tokenizer(str(options.model), **hub_arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, held_out = (part.to(device) for part in read_rows(options, tokenizer))
    seconds = {"prepare": time.perf_counter() - start}

    model: Any = model_class_of(config).from_pretrained(options.model, **hub_arguments)
    model = model.to(device).eval()
    # Until its weights change, the model itself serves as the dense one.
    teacher = copy.deepcopy(model).requires_grad_(False) if options.recover or options.train else None
    begin = time.perf_counter()
    given = _given_mask(options, fields, config)
    _attach(model, options, fields, given)
    outcome, probs, learned = None, None, None
    masks = {} if given is None else {GIVEN: given}
    if given is None:
        started_from, outcome, learned = _learn(model, options, fields, rows, log)
        probs = learned.entry_probs()
        masks = {LEARNED: model.freeze(metadata={"run": output.name}), STARTED_FROM: started_from}
        seconds["search"] = time.perf_counter() - begin
    mask = model.sparse_attention.mask

    mlm_tokenizer = tokenizer if predicts_tokens(model) else None
    if options.patterns:
        masks |= matched_patterns(
            mask.sparsity, options.max_length, config.num_attention_heads, config.num_hidden_layers, options.seed
        )
    begin = time.perf_counter()
    compared = {"dense": carrier(model).mask} | masks
    report = agreement(model, compared, held_out, teacher, mlm_tokenizer, seed=options.seed)
    seconds["report"] = time.perf_counter() - begin
    if options.recover and teacher is not None:
        begin = time.perf_counter()
        model.set_attn_implementation("sparse_auto")
        batches = random_batches(rows, options.batch_size, options.recover, options.seed + 1, options.shortest)
        growing = None
        if options.recover_from is not None and learned is not None:
            growing = _growing_masks(learned, mask, options.recover_from, options.recover)
        recover(
            model, teacher, batches, options.recover, options.recover_learning_rate, log, options.recover_objective,
            growing,
        )  # fmt: skip
        seconds["recover"] = time.perf_counter() - begin
        recovered = RECOVERED.format(LEARNED if given is None else GIVEN)
        report |= agreement(model, {recovered: mask}, held_out, teacher, mlm_tokenizer, seed=options.seed)
        masks[recovered] = mask
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if find_spec("matplotlib"):
        plot_heads(mask, output / "heads.png")
    if probs is not None:
        save_file({"probs": probs.flatten(0, 1)}, output / MASK_PROBS_NAME)
        if find_spec("matplotlib"):
            plot_mean_probs(probs, output / "mean_probs.png")
            plot_offset_profile(probs, output / "offset_profile.png", mask.special_tokens)
    parameters = {name: value.metadata.get("pattern_parameters") for name, value in masks.items()}
    seconds["total"] = time.perf_counter() - start
    metrics = {
        "model": options.model,
        "mask": options.mask,
        "search": fields.get("search"),
        "share_layers": fields.get("share_layers"),
        "steps": options.steps,
        "recover": options.recover,
        "objectives": [options.objective, options.recover_objective],
        "search_outcome": outcome,
        "sparsity": {"dense": 0.0} | {name: value.sparsity for name, value in masks.items()},
        "pattern_parameters": {name: value for name, value in parameters.items() if value is not None},
        "agreement": report,
        "seconds": seconds,
    }
    metrics["hardware"] = hardware()
    add_search(output, metrics, model, options.data or "", [agreement_table(metrics)])
    return write_metrics(output / "metrics.json", metrics)


def _given_mask(options: PostHocArguments, fields: dict[str, Any], config: "PreTrainedConfig") -> SparseMask | None:
    if options.mask is None:
        return None
    sizes = options.max_length, config.num_attention_heads, config.num_hidden_layers
    if options.mask in VARIED:
        return matched_pattern(options.mask, fields["target_sparsity"], *sizes, options.seed)
    if options.mask in PATTERNS:
        return build_pattern(options.mask, *sizes)
    return read_given_mask(options.mask)


def _learn(
    model: Any,
    options: PostHocArguments,
    fields: dict[str, Any],
    rows: torch.Tensor,
    log: Callable[[int, float], None] | None,
) -> tuple[SparseMask, dict[str, Any], LearnedMask]:
    """Run the search: the mask that it starts from, how well it decides, and what it learned."""
    sparse_attention, dense = model.sparse_attention, carrier(model)
    start_from_attention(model, dense, random_batches(rows, options.batch_size, START_BATCHES, options.seed))
    started_from = sparse_attention.thresholded_mask(sparsity=fields["target_sparsity"])
    batches = random_batches(rows, options.batch_size, options.steps, options.seed, options.shortest)
    learn_mask(
        model, batches, options.steps, options.learning_rate, dense, options.train == "norms", log, options.objective
    )
    return started_from, sparse_attention.outcome(), sparse_attention.learned


def _growing_masks(learned: LearnedMask, last: SparseMask, initial: float, steps: int) -> dict[int, SparseMask]:
    """The masks of a recovery that begins with `initial` sparsity, by the step that they begin with."""
    ends = steps * GROWTH
    masks = {}
    for stage in range(GROWTH_STAGES):
        done = stage / GROWTH_STAGES
        sparsity = scheduled(done, 0.0, 1.0, initial, last.sparsity).item()
        masks[round(done * ends)] = learned.thresholded_mask(sparsity=sparsity)
    return masks | {round(ends): last}


def check_arguments(options: PostHocArguments, given: dict[str, Any]) -> "tuple[PreTrainedConfig, dict[str, Any]]":
    """
    Check everything that can be checked before weights and text are read.

    Args:
        options ([`PostHocArguments`]): Section `data` of the recipe.
        given (`dict`): Section `model` of the recipe.

    Returns:
        `tuple`: The model's configuration, and the fields of the search.
    Raises:
        ValueError: If a field is missing, wrong or has no effect here, or the model cannot be searched.
        OSError: If the model does not exist, or the output folder is not empty.
    """
    fields = given if options.mask else FIELDS | given
    if options.mask is None:
        check_choice("search", fields["search"], tuple(SEARCHES))
    for name in ("model", "data", "output_dir"):
        if getattr(options, name) is None:
            raise ValueError(f"--{name} is needed")
    check_output_dir(str(options.output_dir), options.overwrite)
    if fields.get("target_sparsity") is None and options.mask in (None, *VARIED):
        raise ValueError("--target_sparsity is needed: the fraction of the attention to remove, such as 0.9")
    allowed = MASK_FIELDS if options.mask else (*allowed_fields(fields["search"]), "search")
    if refused := sorted(fields.keys() - {*allowed, "target_sparsity"}):
        why = "the mask is given" if options.mask else "the model keeps its own configuration"
        raise ValueError(f"--model.{refused[0]} has no meaning here: {why}")
    if options.mask and not options.recover:
        raise ValueError("recover must be at least 1 with mask, which is not searched, got 0")
    if options.mask not in (None, *PATTERNS):
        check_source("mask", options.mask)
    check_choice("train", options.train, (None, "norms"))
    for name in ("objective", "recover_objective"):
        check_choice(name, getattr(options, name), tuple(OBJECTIVES))
    if options.recover_from is not None and options.mask:
        raise ValueError("recover_from has no meaning with mask, of which there are no sparser and denser ones")
    if options.recover_from is not None and not 0 <= options.recover_from < fields["target_sparsity"]:
        raise ValueError(
            f"recover_from must be at least 0 and below target_sparsity ({fields['target_sparsity']}), got "
            f"{options.recover_from!r}"
        )
    for name in ("learning_rate", "recover_learning_rate"):
        check_range(name, getattr(options, name), 0, 1e6, (int, float))
    check_range("seed", options.seed, 0, 2**32 - 1)
    for name, least in (("steps", 0), ("recover", 0), ("batch_size", 1), ("max_length", 8)):
        check_range(name, getattr(options, name), least)
    if options.shortest is not None and not 8 <= options.shortest <= options.max_length:
        raise ValueError(f"shortest must be from 8 to max_length ({options.max_length}), got {options.shortest}")
    for name in ("max_tokens", "max_validation_tokens"):
        check_range(name, getattr(options, name), options.max_length)
    hub_arguments = options.hub_arguments(options.model)
    check_source("model", options.model, **hub_arguments)
    config = read_config(str(options.model), **hub_arguments)
    check_architecture(config.model_type)
    if config.model_type == "vit":
        raise ValueError(f"{options.model} reads images: this search is for text encoders")
    if carries_mask(str(options.model), **hub_arguments):
        raise ValueError(f"{options.model} already has a mask: the search starts from a dense model")
    if options.max_length > (positions := num_positions(config)):
        raise ValueError(f"max_length must be at most the model's {positions} positions, got {options.max_length}")
    # Rejects wrong fields, such as a target out of reach, without loading weights.
    with torch.device("meta"):
        model = model_class_of(config)(copy.deepcopy(config))
    for name in ("objective", "recover_objective"):
        if reason := OBJECTIVES[getattr(options, name)].refuse(model):
            raise ValueError(f"{name} {getattr(options, name)!r} has no meaning here: {reason}")
    if len(attention_modules(model)) < config.num_hidden_layers:
        fields = {**fields, "share_layers": True} | given  # the same weights in every layer
    _attach(model, options, fields, _given_mask(options, fields, config))
    return config, fields


def _attach(
    model: "PreTrainedModel", options: PostHocArguments, fields: dict[str, Any], given: SparseMask | None
) -> "PreTrainedModel":
    if given is not None:
        others = {name: value for name, value in fields.items() if name in MASK_FIELDS}
        return attach(model, given, **others)
    others = {name: value for name, value in fields.items() if name != "search"}
    return attach(model, fields["search"], mask_length=options.max_length, attn_implementation="sparse_sdpa", **others)


def read_rows(options: PostHocArguments, tokenizer: "PreTrainedTokenizerBase") -> tuple[torch.Tensor, torch.Tensor]:
    """
    Packed text for the search, and held-out text: two tensors of token ids of shape `(N, n)`.

    Raises:
        ValueError: If there is too little text for one batch.
    """
    rows = []
    text: Any = options.data
    for split, source, max_tokens in (
        ("train", text, options.max_tokens),
        ("validation", options.validation or text, options.max_validation_tokens),
    ):
        documents = load_documents(source, "all" if options.validation else split)
        packed = pretraining_dataset(documents, tokenizer, options.max_length, max_tokens=max_tokens)
        rows.append(torch.tensor(packed.with_format("numpy")["input_ids"][:]))
    if len(rows[0]) < options.batch_size:
        raise ValueError(
            f"data: the text gives {len(rows[0])} rows of {options.max_length} tokens, too few for a batch of "
            f"{options.batch_size}: use more text, or a smaller batch_size or max_length"
        )
    return rows[0], rows[1]


def agreement_table(metrics: dict[str, Any]) -> Table:
    """
    How close each mask keeps the model to the dense one.

    Args:
        metrics (`dict`): Result of [`search_post_hoc`].

    Returns:
        [`~sparsebert.analysis.tables.Table`]
    """
    rows = []
    for name, numbers in metrics["agreement"].items():
        row = {
            "mask": name,
            "removed": f"{metrics['sparsity'][name]:.1%}",
            "cosine": f"{numbers['cosine']:.3f}",
            "5 % quantile": f"{numbers['cosine_5']:.3f}",
            "error of the layers": " ".join(f"{error:.2f}" for error in numbers["layer_error"]),
        }
        rows.append(row | ({"MLM loss": f"{numbers['mlm_loss']:.3f}"} if "mlm_loss" in numbers else {}))
    notes = (
        "cosine: between the mean last hidden states of a row, averaged over held-out rows; error: distance of the "
        "hidden states from the dense model's, relative to that of their mean",
        MATCHED,
    )
    return Table.of("Agreement with the dense model", rows, notes)
