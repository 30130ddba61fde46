"""Pre-training: data, model, mask and Trainer of one recipe."""

from collections.abc import Sized
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from safetensors.torch import load_file
from transformers import TrainingArguments
from transformers.trainer_pt_utils import get_model_param_count

from ...analysis.importance import analyzed_special_tokens, position_groups
from ...analysis.reporting.repeated_runs import check_intervals, check_one_recipe
from ...analysis.reporting.reports import read_metrics
from ...files import METRICS_NAME, FinishedRunError
from ...learning.learned_mask import expand_probs, read_outcome
from ...learning.progressive_pruning import ProgressivePruning
from ...learning.search_schedule import SearchSchedule
from ...masks.mask_files import MASK_PROBS_NAME
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ..batch_ramp import BatchRamp
from ..runs.resuming import check_checkpoint, check_recipe, recipe_record
from ..runs.run_cards import add_pretraining, draw_run
from ..runs.run_checks import read_seeds, read_training
from ..runs.run_folders import check_unfinished
from ..runs.run_life import TrainingRun, training_run
from ..time_budget import ENDLESS, TimeBudget, counts_steps
from ..trainer import SparseBertTrainer
from .evaluation_metrics import causal_metrics, pretraining_metrics, reduce_causal_logits, reduce_logits
from .pretraining_arguments import PretrainingArguments, check_clock, check_pretraining
from .pretraining_inputs import make_inputs, make_model
from .search_start import check_rows_fill_mask, start_search


if TYPE_CHECKING:
    import torch


SECTIONS = {"data": PretrainingArguments, "model": SparseBertConfig, "training": TrainingArguments}


def pretrain_seeds(recipe: dict[str, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """
    [`pretrain`] with each of `data.seeds`, and the metrics by output folder: that of the recipe, or if there are
    several seeds, one for each in it. If the run of a seed is interrupted, `resume` goes on with it and keeps those
    that are finished.
    """
    data, training = PretrainingArguments(**recipe["data"]), read_training(recipe["training"])
    seeds = read_seeds(data.seeds, training.seed, recipe["training"].get("seed"))
    output = Path(str(training.output_dir))
    folders = {seed: output / f"seed-{seed}" for seed in seeds} if len(seeds) > 1 else {seeds[0]: output}
    if len(seeds) > 1:
        check_intervals()
        for name in ("resume_from_checkpoint", "push_to_hub", "data_seed"):
            if (value := recipe["training"].get(name)) is not None and value is not False:
                raise ValueError(f"{name} has no meaning with several seeds, got {value!r}")
        for folder in folders.values() if not (data.resume or data.overwrite) else ():
            check_unfinished(folder)
            if (folder / METRICS_NAME).is_file():
                raise FinishedRunError(f"{folder} holds a finished run: add --resume to keep it, or --overwrite true")
    recipes = {
        folder: {
            "data": recipe["data"] | {"seeds": 1},
            "model": recipe["model"],
            "training": recipe["training"] | {"seed": seed, "output_dir": str(folder)},
        }
        for seed, folder in folders.items()
    }
    for folder, own in recipes.items() if data.resume and len(seeds) > 1 else ():
        if (folder / METRICS_NAME).is_file():
            check_recipe(folder, _given(own))
    found: dict[Path, dict[str, Any]] = {}
    for folder, own in recipes.items():
        try:
            found[folder] = pretrain(own)
        except FinishedRunError:
            if not data.resume or len(seeds) == 1:
                raise
            found |= read_metrics([folder])
        if len(seeds) > 1:
            PartialState().wait_for_everyone()  # until the main process has written all of it
            check_one_recipe(found)
    return found


def _given(recipe: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What defines a run, as far as a recipe says it."""
    arguments = PretrainingArguments(**recipe["data"]), SparseBertConfig(**recipe["model"])
    record = recipe_record(*arguments, read_training(recipe["training"]))
    return {
        section: {name: record[section][name] for name in fields if name in record[section]}
        for section, fields in recipe.items()
    }


def pretrain(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """
    Train a model as a recipe says: on masked tokens and sentence pairs (BERT), on masked tokens only, or with
    `model.is_decoder` on the next token. The mask is given or learned with the weights; at the end it is frozen.

    Writes to `output_dir` the model with its mask, the tokenizer, `metrics.json`, `trainer_state.json` (what was
    logged), `mask_probs.safetensors` (P before freezing) and, if matplotlib is installed and the model is not dense,
    pictures. `data.seeds` is for [`pretrain_seeds`].
    """
    data, model = PretrainingArguments(**recipe["data"]), dict(recipe["model"])
    if data.seeds != 1:
        raise ValueError(f"seeds must be 1 in pretrain, got {data.seeds!r}: pretrain_seeds runs several")
    training = read_training(recipe["training"])
    check_pretraining(data, model, training)
    check_clock(data, recipe["training"])
    if model.get("pattern") is not None:
        model.setdefault("mask_seed", training.seed)
    fields = recipe["training"] | {"output_dir": str(training.output_dir)}
    if data.max_minutes is not None and not counts_steps(fields):
        fields["max_steps"] = ENDLESS
    with training_run(fields, data) as run:
        return _pretrain(run, data, model)


def _pretrain(run: TrainingRun, data: PretrainingArguments, fields: dict[str, Any]) -> dict[str, Any]:
    training = run.training
    pruning = ProgressivePruning.from_settings(data.pruning)
    budget = None if data.max_minutes is None else TimeBudget(data.max_minutes)
    position = None if budget is None else budget.position
    schedule = SearchSchedule(
        data.search_end, data.freeze_threshold, data.freeze_sparsity, {"run": run.folder.resolve().name}, position
    )
    model = make_model(data, training, fields)
    if pruning is not None:
        pruning.check(model)
    if data.start_from_attention:
        check_rows_fill_mask(data.max_length, model.config.mask_length)
    run.define(data, model.config)  # now, and again when the text is known, which takes longer
    if run.checkpoint:
        check_checkpoint(run.checkpoint, model, pruning, data.search_end < 1)
    inputs = make_inputs(data, training, model.config)
    run.define(data, model.config, **inputs.record)

    causal = model.config.is_decoder
    trainer = SparseBertTrainer(
        model,
        training,
        train_dataset=inputs.train_set,
        eval_dataset=inputs.validation_set,
        data_collator=inputs.collator,
        processing_class=inputs.tokenizer,
        compute_metrics=causal_metrics if causal else pretraining_metrics,
        preprocess_logits_for_metrics=reduce_causal_logits if causal else reduce_logits,
        callbacks=[schedule, *(callback for callback in (pruning, budget) if callback is not None)],
    )
    if data.batch_ramp:
        BatchRamp(trainer, data.batch_ramp, position)
    if data.start_from_attention and not run.checkpoint:
        start_search(model, inputs.train_set, training)
    run.train(trainer)

    run.folder.mkdir(parents=True, exist_ok=True)
    probs, outcome = _end_search(trainer, schedule)
    trainer.save_model()
    metrics = _measurements(trainer, probs, causal) | outcome
    metrics["tokens_per_second"] = _rows_seen(trainer) * data.max_length / trainer.train_seconds
    if pruning is not None:
        metrics["pruning"] = pruning.settings
    if budget is not None:
        metrics["minutes"] = budget.elapsed / 60
    trainer.save_state()

    def complete(metrics: dict[str, Any]) -> None:
        masked = model.config.search is not None or metrics["sparsity"] > 0  # a dense one would be all white
        if data.pictures and masked and find_spec("matplotlib"):
            draw_run(run.folder, model.sparse_attention.mask, probs)
        add_pretraining(run.folder, metrics, model, data.text)

    return run.finish(trainer, metrics, complete)


def _end_search(trainer: SparseBertTrainer, schedule: SearchSchedule) -> tuple["torch.Tensor", dict[str, Any]]:
    """Freeze a mask that is still being learned: P `(L, H, n, n)` before that, and how a search ended."""
    model: Any = trainer.model
    sparse_attention, output = model.sparse_attention, Path(str(trainer.args.output_dir))
    if sparse_attention.searching:
        trainer.save_model()  # freezing may refuse the mask; then the search is not lost
        schedule.freeze(sparse_attention)
        if trainer.is_world_process_zero():
            schedule.save(output)  # not before the search is saved, which removes the P of another run
    mask = sparse_attention.mask
    if schedule.probs is not None:
        return expand_probs(schedule.probs, mask), {"search_outcome": schedule.outcome}
    outcome = None if model.config.search is None else read_outcome(output)
    if outcome is None:
        return sparse_attention.mask_probs(), {}
    # The mask was frozen before the run was interrupted.
    probs = load_file(output / MASK_PROBS_NAME)["probs"].unflatten(0, (mask.num_layers, mask.num_heads))
    return expand_probs(probs, mask), {"search_outcome": outcome}


def _rows_seen(trainer: SparseBertTrainer) -> float:
    """Number of rows that the training has read, repetitions included; the last batch of an epoch may be small."""
    rows, state, training = trainer.train_dataset, trainer.state, trainer.args
    if isinstance(rows, Sized) and not training.dataloader_drop_last:
        return len(rows) * (state.epoch or 0)
    return state.global_step * training.train_batch_size * training.gradient_accumulation_steps * training.world_size


def _measurements(trainer: SparseBertTrainer, probs: "torch.Tensor", causal: bool) -> dict[str, Any]:
    """What the run made, and how well it does on the held-out text."""
    model: Any = trainer.model
    metrics = {name: getattr(model.config, name) for name in ("search", "pattern", "probability_map", "token_mixers")}
    evaluation = trainer.evaluate()
    special_tokens = analyzed_special_tokens(model.sparse_attention.mask)
    metrics |= {"sparsity": model.sparse_attention.sparsity(), "positions": position_groups(probs, special_tokens)}
    names = ("lm_loss", "perplexity") if causal else ("mlm_loss", "mlm_accuracy")
    metrics |= {name: evaluation[f"eval_{name}"] for name in names}
    metrics["nsp_accuracy"] = evaluation.get("eval_nsp_accuracy")
    if model.config.pattern is not None:
        metrics["mask_seed"] = model.config.mask_seed
    return metrics | {"steps": trainer.state.global_step, "num_parameters": get_model_param_count(model)}
