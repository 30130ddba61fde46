"""
The run of a post-hoc search: learn the mask of a trained model, freeze it, and compare it with other masks.

This module reads model and text and writes the results; [`~sparsebert.training.searching.matching`] has the algorithm.
"""

import copy
import dataclasses
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments
from transformers.utils import logging

from ...analysis.plans import plan
from ...analysis.reporting.reports import GIVEN, LEARNED, RECOVERED, own_mask
from ...analysis.tables import Table
from ...files import CHECKPOINT, METRICS_NAME, write_metrics
from ...finite_weights import check_weights
from ...hub import read_tokenizer
from ...learning.budget import scheduled
from ...learning.learned_mask import LearnedMask, expand_probs, save_probs
from ...learning.mask_description import MAY_CHANGE
from ...masks.matched import MATCHED, VARIED, matched_patterns
from ...masks.patterns import build_pattern
from ...masks.sparse_mask import SparseMask
from ...masks.tiles import TILE
from ...models.loading import read_model
from ...models.model_classes import model_class_of
from ...models.sentence_files import copy_sentence_files
from ..runs.checkpoint_manifests import newest_whole
from ..runs.engines import WHOLE, engine_of
from ..runs.resuming import check_recipe
from ..runs.run_cards import add_search, draw_run, hardware
from ..runs.run_checks import warn_of_slow_bfloat16
from ..runs.run_life import TrainingRun, training_run
from .dense_agreement import agreement, inference_seconds
from .matching import carrier, learn_mask, recover, running_through, start_from_attention
from .matching_trainer import matching_arguments
from .objectives import predicts_tokens
from .rest_bias import calibrated, train_rest
from .search_arguments import PostHocArguments, attach_mask, check_arguments, given_mask
from .search_inputs import Inputs, TaskInputs, TextRows, read_inputs, read_text


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


logger = logging.get_logger(__name__)

_Found = TypeVar("_Found")

# Share of a recovery in which a mask that begins with `recover_from` grows sparser, and in how many stages.
GROWTH, GROWTH_STAGES = 0.5, 8
STARTED_FROM = "dense model's attention"


def search_post_hoc(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """
    Learn the mask of a trained model as a recipe says, freeze it, and compare it with other masks.

    Writes to `output_dir` the model with its mask, the tokenizer, `metrics.json`, `mask_probs.safetensors` and, if
    matplotlib is installed, pictures. Until then there are checkpoints, from which `resume` continues.
    """
    options = PostHocArguments(**recipe["data"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    saving = {"save_steps": options.save_steps, "seed": options.seed}
    training = matching_arguments(device, options.output_dir, **saving)
    # First of all: without such arguments, accelerate does not see the processes of torchrun on a CPU.
    _check_processes(TrainingArguments(**training), options.sizes[1])
    config, fields = check_arguments(options, recipe["model"])
    with training_run(training, options) as run:
        metrics = _search(run, options, config, fields)
        for path in run.folder.iterdir() if PartialState().is_main_process else ():
            if CHECKPOINT.fullmatch(path.name):
                shutil.rmtree(path)
        return metrics


def _check_processes(training: TrainingArguments, batch_size: int) -> None:
    """Check that the processes can share the batches, and that each of them has the whole model."""
    if (engine := engine_of(training)) != WHOLE:
        raise ValueError(
            f"a search cannot run under {engine}, which shards the model whose layers it compares with those of the "
            "dense one: start it with torchrun, or with accelerate launch for DDP"
        )
    if batch_size % training.world_size:
        raise ValueError(f"batch_size must be a multiple of the {training.world_size} processes, got {batch_size}")


def _on_main(compute: Callable[[], _Found]) -> _Found:
    """What the main process computes, for all of them."""
    found: list[Any] = [compute() if PartialState().is_main_process else None]
    return broadcast_object_list(found)[0]


def _search(
    run: TrainingRun,
    options: PostHocArguments,
    config: "PreTrainedConfig",
    fields: dict[str, Any],
) -> dict[str, Any]:
    # A checkpoint of a version whose searches had no rest by default says nothing of it.
    search = {
        name: value for name, value in fields.items() if name not in MAY_CHANGE and (name, value) != ("rest", "none")
    }
    # The batches do not depend on the number of processes, with which others are resumed with a warning.
    record = {"search": search, "processes": None}
    run.define(options, config, **record)  # now, and again when the text is known, which takes longer
    if run.checkpoint:
        _recovery(run, options)  # also without one now, which would leave out what has been recovered
    hub_arguments = options.hub_arguments(options.model)
    tokenizer = read_tokenizer(str(options.model), config, **hub_arguments)
    device = str(run.training.device)
    warn_of_slow_bfloat16(options.bf16, run.training.device.type)
    source = read_text(options, tokenizer, device) if options.task is None else read_inputs(options, config, device)
    run.define(options, config, **record, **source.record())
    seconds = {"prepare": time.perf_counter() - run.began}

    model: Any = read_model(model_class_of(config).from_pretrained, str(options.model), **hub_arguments)
    check_weights(model, f"model {options.model}")
    if (options.recover or options.train) and model.dtype != torch.float32:
        logger.warning(f"model {options.model} is in {model.dtype}: it is trained, and saved, in float32.")
        model = model.float()
    model = model.to(device).eval()
    # Until its weights change, the model itself serves as the dense one.
    teacher = copy.deepcopy(model).requires_grad_(False) if options.recover or options.train else None
    given = given_mask(options, fields, config)
    attach_mask(model, options, fields, given)
    outcome, learned = None, None
    masks = {} if given is None else {GIVEN: model.sparse_attention.mask}
    if given is None:
        started_from, outcome, learned, seconds["search"] = _learn(run, model, options, fields, source)
        found = _freeze(model, learned, {"run": run.folder.resolve().name})
        masks = {LEARNED: found, STARTED_FROM: started_from}
    mask = model.sparse_attention.mask

    mlm_tokenizer = tokenizer if predicts_tokens(model) else None
    if options.patterns:
        sparsity = 1 - mask.density_at(options.max_length)
        masks |= matched_patterns(
            sparsity, options.max_length, config.num_attention_heads, config.num_hidden_layers, options.seed
        )
    # The weights are still those of the dense model, but for normalization layers that were trained with the mask.
    dense, own = carrier(model), LEARNED if given is None else GIVEN
    masks = {name: each.replace(rest=mask.rest) for name, each in masks.items()}
    masks = _on_main(lambda: calibrated(model, dense, masks, source.start(options.sizes[1], options.seed)))
    model.set_attn_implementation("sparse_auto")  # some backends would keep a table of scores for every mask
    recovery = _recovery(run, options) if options.recover else None
    if mask.rest != "none":
        begin, mask = time.perf_counter(), masks[own]
        model.sparse_attention.set_mask(mask, search=fields.get("search"))
        if recovery is not None and recovery.checkpoint:  # another kind of CPU would train it to another bias
            mask = mask.replace(rest_bias=SparseMask.from_pretrained(recovery.checkpoint).rest_bias)
        else:
            batches = source.batches(options.sizes[1], options.rest_steps, options.seed + 2)
            # In all processes, which an objective may need, with the same batches.
            found = train_rest(model, teacher, batches, options.rest_steps, options.objectives[0], options.bf16)
            mask = _on_main(lambda: found)
        masks[own] = mask
        model.sparse_attention.set_mask(mask, search=fields.get("search"))
        seconds["rest"] = time.perf_counter() - begin
    begin = time.perf_counter()
    compared = {"dense": build_pattern("dense", 1, config.num_attention_heads)} | masks
    report = _compare(model, compared, source, teacher, mlm_tokenizer, options.seed)
    seconds["report"] = time.perf_counter() - begin
    if recovery is not None and teacher is not None:
        seconds["recover"] = _recover(recovery, model, teacher, options, source, learned)
        recovered = RECOVERED.format(own_mask(options.mask))
        report |= _compare(model, {recovered: mask}, source, teacher, mlm_tokenizer, options.seed)
        masks[recovered] = mask
    output, parameters = run.folder, {name: value.metadata.get("pattern_parameters") for name, value in masks.items()}

    def save() -> dict[str, Any]:
        """Write everything but the metrics, which are returned."""
        inference = None
        if options.timed:
            stock: Any = read_model(model_class_of(config).from_pretrained, str(options.model), **hub_arguments)
            inference = inference_seconds({"dense": stock.to(device, model.dtype), "masked": model}, source.timed())
        output.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        copy_sentence_files(str(options.model), output, **hub_arguments)
        probs = None
        if learned is not None:
            probs = learned.found_probs()
            save_probs(output, probs, learned.log_odds(), mask, outcome)
        if find_spec("matplotlib") and (mask.sparsity or probs is not None):
            draw_run(output, mask, None if probs is None else expand_probs(probs, mask))
        seconds["total"] = time.perf_counter() - run.began
        target = ("cuda", torch.bfloat16) if options.device_target == "gpu" else (None, None)
        planned = plan(model, options.max_length, *target)
        metrics = {
            "model": options.model,
            "task": options.task,
            "mask": options.mask,
            "search": fields.get("search"),
            "share_layers": fields.get("share_layers"),
            "steps": options.sizes[0] if options.mask is None else None,
            "rest_steps": options.rest_steps if mask.rest != "none" else None,
            "recover": options.recover,
            "recover_learning_rate": options.recover_learning_rate,
            "objectives": list(options.objectives),
            "bf16": options.bf16,
            "search_outcome": outcome,
            "live_tiles": planned.live_tiles[TILE],
            "plan": planned.as_json(),
            "sparsity": {"dense": 0.0}
            | {name: 1 - value.density_at(options.max_length) for name, value in masks.items()},
            "pattern_parameters": {name: value for name, value in parameters.items() if value is not None},
            "agreement": report,
            "inference_seconds": inference,
            "seconds": seconds,
        }
        metrics["hardware"] = hardware()
        add_search(output, metrics, model, options.data, [agreement_table(metrics)])
        return metrics

    return write_metrics(output / METRICS_NAME, _on_main(save))


def _learn(
    run: TrainingRun,
    model: Any,
    options: PostHocArguments,
    fields: dict[str, Any],
    source: TextRows | Inputs,
) -> tuple[SparseMask, dict[str, Any], LearnedMask, float]:
    """Run the search: the mask that it starts from, how well it decides, what it learned, and its seconds."""
    begin = time.perf_counter()
    sparse_attention, dense = model.sparse_attention, carrier(model)
    steps, batch_size = options.sizes
    start_from_attention(model, dense, source.start(batch_size, options.seed))
    started_from = sparse_attention.thresholded_mask(sparsity=fields["target_sparsity"])
    seconds, batches = time.perf_counter() - begin, source.batches(batch_size, steps, options.seed)
    seconds += learn_mask(
        model, batches, steps, options.learning_rate, dense, options.train == "norms", options.objectives[0],
        options.bf16, run,
    )  # fmt: skip
    return started_from, sparse_attention.outcome(), sparse_attention.learned, seconds


def _freeze(model: Any, learned: LearnedMask, metadata: dict[str, Any]) -> SparseMask:
    """
    The mask that was found. If rows may not be empty, one that it leaves so keeps its best entry, as far as the
    sparsity allows that.
    """
    try:
        return model.freeze(metadata=metadata)
    except ValueError as error:  # it must not cost the search
        logger.warning(f"{error}. Now each of them keeps its best entry, as far as the sparsity allows it.")
        learned.keep_best_of_rows()
        sparse_attention = model.sparse_attention
        sparse_attention.config = sparse_attention.config.changed(allow_empty_rows=True)
        mask = model.freeze(metadata=metadata)
        if count := mask.num_empty_rows():
            logger.warning(f"{count} mask rows keep nothing at a sparsity of {mask.sparsity:.3f}: they output 0.")
        return mask


def _compare(
    model: Any,
    masks: dict[str, SparseMask],
    source: TextRows | Inputs,
    teacher: "PreTrainedModel | None",
    mlm_tokenizer: "PreTrainedTokenizerBase | None",
    seed: int,
) -> dict[str, dict[str, Any]]:
    """How close the masks keep the model to the dense one and, with a task, the score that it has through each."""
    report = _on_main(lambda: agreement(model, masks, source.held_out, teacher, mlm_tokenizer, seed=seed))
    if isinstance(source, TaskInputs):
        for name, mask in masks.items():
            with running_through(model, carrier(model, mask)):
                report[name] |= {"score": source.score(model), "input_sparsity": source.removed(mask)}
    return report


def _recovery(run: TrainingRun, options: PostHocArguments) -> TrainingRun:
    """
    The run of a recovery, whose fields are compared with those of its checkpoint. After a search, its checkpoints lie
    in the last one of that, with which others resume.
    """
    training = copy.copy(run.training)
    if options.mask is None and options.sizes[0]:
        training.output_dir = str(run.folder / f"checkpoint-{options.sizes[0]}" / "recovery")
        found = newest_whole(training.output_dir, options.allow_partial_resume, interrupted=True)
        training.resume_from_checkpoint = found and str(found)
    fields = {name: value for name, value in dataclasses.asdict(options).items() if name.startswith("recover")}
    record = run.record | {"data": run.record["data"] | fields}
    if training.resume_from_checkpoint:
        check_recipe(training.resume_from_checkpoint, record)
    return dataclasses.replace(run, training=training, record=record)


def _recover(
    run: TrainingRun,
    model: Any,
    teacher: "PreTrainedModel",
    options: PostHocArguments,
    source: TextRows | Inputs,
    learned: LearnedMask | None,
) -> float:
    """
    Train the weights through the mask or, if it was learned, maybe through sparser and sparser ones up to it. Returns
    the seconds it took.
    """
    masks = None
    if options.recover_from is not None and learned is not None:
        masks = _growing_masks(learned, model.sparse_attention.mask, options.recover_from, options.recover)
    return recover(
        model,
        teacher,
        source.batches(options.sizes[1], options.recover, options.seed + 1),
        options.recover,
        options.recover_learning_rate,
        objective=options.objectives[1],
        masks=masks,
        bf16=options.bf16,
        run=run,
    )


def _growing_masks(learned: LearnedMask, last: SparseMask, initial: float, steps: int) -> dict[int, SparseMask]:
    """The masks of a recovery that begins with `initial` sparsity, by the step that they begin with."""
    ends = steps * GROWTH
    masks = {}
    for stage in range(GROWTH_STAGES):
        done = stage / GROWTH_STAGES
        sparsity = scheduled(done, 0.0, 1.0, initial, last.sparsity).item()
        masks[round(done * ends)] = learned.thresholded_mask(sparsity=sparsity).replace(rest_bias=last.rest_bias)
    return masks | {round(ends): last}


def agreement_table(metrics: dict[str, Any]) -> Table:
    """How close each mask keeps the model to the dense one."""
    rows = []
    for name, numbers in metrics["agreement"].items():
        row = {"mask": name, "removed": f"{metrics['sparsity'][name]:.1%}"}
        if "score" in numbers:
            row |= {"removed on inputs": f"{numbers['input_sparsity']:.1%}", "score": f"{100 * numbers['score']:.1f}"}
        row |= {
            "cosine": f"{numbers['cosine']:.3f}",
            "5 % quantile": f"{numbers['cosine_5']:.3f}",
            "error of the layers": " ".join(f"{error:.2f}" for error in numbers["layer_error"]),
        }
        rows.append(row | ({"MLM loss": f"{numbers['mlm_loss']:.3f}"} if "mlm_loss" in numbers else {}))
    notes: tuple[str, ...] = (
        "cosine: between the mean last hidden states of a row, averaged over held-out rows; error: distance of the "
        "hidden states from the dense model's, relative to that of their mean",
    )
    if metrics.get("rest_steps"):
        notes = (*notes, f"the bias of the rest is trained for the {own_mask(metrics['mask'])} mask alone")
    if metrics["agreement"].keys() & set(VARIED):
        notes = (*notes, MATCHED)
    if metrics["task"] is not None:
        notes = (
            f"score: the main metric of task {metrics['task']} on its validation split, times 100; removed on inputs: "
            "of the attention between the tokens that they have",
            *notes,
        )
    return Table.of("Agreement with the dense model", rows, notes)
