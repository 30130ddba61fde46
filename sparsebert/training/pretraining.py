"""Pre-training: data, model, mask and Trainer of one recipe."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from transformers import TrainingArguments, set_seed
from transformers.trainer_pt_utils import get_model_param_count

from ..analysis.importance import position_groups
from ..analysis.pictures import plot_heads, plot_mean_probs, plot_offset_profile
from ..attention.backends import check_backend
from ..data.documents import load_documents
from ..data.examples import causal_collator, pretraining_collator, pretraining_dataset
from ..data.packing import PackedCollator
from ..data.streams import RowStream, open_documents, stream_documents
from ..data.tokenization import check_tokenizer, train_tokenizer
from ..files import locked_output, write_metrics
from ..hub import HubArguments, mask_arguments, read_tokenizer
from ..models.configuration_sparsebert import SparseBertConfig
from ..models.modeling_sparsebert import SparseBertForMaskedLM, SparseBertForPreTraining, SparseBertLMHeadModel
from ..models.token_mixers import fixed_length
from ..search.learned_mask import MASK_PROBS_NAME
from ..search.progressive_pruning import ProgressivePruning
from ..search.search_schedule import SearchSchedule
from .batch_ramp import BatchRamp, check_batch_ramp
from .divergence import check_weights
from .engines import check_engine, warn_of_ignored_engine
from .evaluation_metrics import causal_metrics, pretraining_metrics, reduce_causal_logits, reduce_logits
from .pretraining_arguments import PretrainingArguments
from .resuming import RecipeRecord, check_checkpoint, check_recipe, recipe_record, rows_record
from .run_cards import add_pretraining, hardware
from .run_checks import check_pretraining, check_served, check_training, read_given_mask
from .run_folders import resume_from, run_folder
from .stopping import StopOnSignal
from .time_budget import ENDLESS, TimeBudget, check_time_budget, counts_steps
from .trainer import SparseBertTrainer


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import datasets
    from transformers import PreTrainedTokenizerBase


# What a run writes, apart from the configuration, the tokenizer, checkpoints and logs.
_WRITTEN = (
    *("model*.safetensors*", "mask*.safetensors", "mask_config.json", "metrics.json", "heads.png", "mean_probs.png"),
    "offset_profile.png",
)

SECTIONS = {"data": PretrainingArguments, "model": SparseBertConfig, "training": TrainingArguments}


def pretrain(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """
    Train a model as a recipe says: on masked tokens and sentence pairs (BERT), on masked tokens only, or with
    `model.is_decoder` on the next token. The mask is given or learned with the weights; at the end it is frozen.

    Writes to `output_dir` the model with its mask, the tokenizer, `metrics.json`, `trainer_state.json` (what was
    logged), `mask_probs.safetensors` (P before freezing) and, if matplotlib is installed, pictures.

    Args:
        recipe (`dict[str, dict]`): Sections `data`, `model` and `training`, as [`load_recipe`] returns them.

    Returns:
        `dict`: The metrics.
    Raises:
        ValueError, OSError: If something is wrong in the recipe or the data.
    """
    data = PretrainingArguments(**recipe["data"])
    check_training(recipe["training"])
    training = TrainingArguments(**recipe["training"])
    model = dict(recipe["model"])
    check_pretraining(data, model, training.max_steps)
    check_batch_ramp(data.batch_ramp, training.gradient_accumulation_steps)
    check_time_budget(data.max_minutes, data.pruning, recipe["training"])
    if model.get("pattern") is not None:
        model.setdefault("mask_seed", training.seed)
    warn_of_ignored_engine(training)
    output = Path(str(training.output_dir))
    resume = resume_from(data.resume, training.resume_from_checkpoint)
    with (
        locked_output(output) as unfinished,
        run_folder(output, data.overwrite, resume, data.allow_partial_resume, unfinished, _WRITTEN) as place,
    ):
        # Whatever the recipe says of signals, they save a checkpoint.
        changed: dict[str, Any] = {
            "output_dir": str(place[0]),
            "resume_from_checkpoint": place[1],
            "enable_jit_checkpoint": False,
        }
        if data.max_minutes is not None and not counts_steps(recipe["training"]):
            changed["max_steps"] = ENDLESS
        return _pretrain({"data": recipe["data"], "model": model, "training": recipe["training"] | changed})


def _pretrain(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    data = PretrainingArguments(**recipe["data"])
    training = TrainingArguments(**recipe["training"])
    output = Path(str(training.output_dir))
    pruning = ProgressivePruning.from_settings(data.pruning)
    for name, unset in (("freeze_threshold", None), ("freeze_sparsity", None), ("search_end", 1.0)):
        if pruning is not None and getattr(data, name) != unset:
            raise ValueError(
                f"{name} {getattr(data, name)} has no meaning with pruning, which freezes the mask itself"
            )
    budget = None if data.max_minutes is None else TimeBudget(data.max_minutes)
    schedule = SearchSchedule(
        data.search_end, data.freeze_threshold, data.freeze_sparsity, {"run": output.name},
        position=None if budget is None else budget.position,
    )  # fmt: skip
    causal = bool(recipe["model"].get("is_decoder"))
    if causal and data.nsp:
        raise ValueError(
            "nsp true has no meaning with is_decoder true, which predicts the next token: set nsp to false"
        )
    if training.resume_from_checkpoint:
        check_engine(training.resume_from_checkpoint, training)
    if data.pack_documents and data.nsp:
        raise ValueError(
            "pack_documents true has no meaning with nsp true, whose rows are pairs of two documents: set nsp to false"
        )
    set_seed(training.seed)

    model_class: Any = SparseBertForPreTraining if data.nsp else SparseBertForMaskedLM
    if causal:
        model_class = SparseBertLMHeadModel
    if data.base_model:
        model = model_class.from_pretrained(data.base_model, **data.hub_arguments(data.base_model), **recipe["model"])
        check_weights(model, f"base_model {data.base_model}")
    else:
        model = model_class(SparseBertConfig(**recipe["model"]))
    if data.mask:
        model.set_mask(read_given_mask(data.mask, **mask_arguments(data)))
    check_backend(data.attn_implementation, model.config.probability_map)
    model.set_attn_implementation(data.attn_implementation)
    if fixed_length(model.config) not in (None, data.max_length):
        raise ValueError(
            f"max_length must be {model.config.max_position_embeddings}, the max_position_embeddings of a model with "
            f"the token mixer 'bproj', got {data.max_length}"
        )
    sparse_attention = model.sparse_attention
    if data.pack_documents and sparse_attention.num_layers < model.config.num_hidden_layers:
        raise ValueError(
            "pack_documents true needs attention in all layers, since the other token_mixers mix neighbouring tokens, "
            f"got {model.config.token_mixers!r}"
        )
    if pruning is not None:
        pruning.check(model)
    check_served(model, training, data.max_length)
    search = sparse_attention.search
    if search is not None and data.freeze_sparsity is not None and data.freeze_sparsity > search.most_sparsity:
        raise ValueError(
            f"freeze_sparsity must be at most {search.most_sparsity:.4f}, got {data.freeze_sparsity}: special tokens "
            "and a kept diagonal stay"
        )
    if training.resume_from_checkpoint:
        check_checkpoint(training.resume_from_checkpoint, model, pruning, data.search_end < 1)
    record = recipe_record(data, model.config, training)
    if training.resume_from_checkpoint:
        check_recipe(training.resume_from_checkpoint, record)

    def documents(split: str) -> "Iterator[list[str]]":
        load = stream_documents if data.streaming else load_documents
        if data.validation is None:
            return load(data.text, split)
        return load(data.text if split == "train" else data.validation, "all")

    tokenizer: PreTrainedTokenizerBase
    if data.tokenizer:
        tokenizer = read_tokenizer(data.tokenizer, **HubArguments(token=data.token).hub_arguments())
    else:
        tokenizer = train_tokenizer(documents("train"), model.config.vocab_size, cache_dir=data.cache_dir)
        tokenizer.model_max_length = model.config.max_position_embeddings
    check_tokenizer(tokenizer, model.config.vocab_size)

    def rows(split: str, max_tokens: int | None) -> "datasets.Dataset":
        return pretraining_dataset(
            documents(split), tokenizer, data.max_length, data.nsp, training.seed, max_tokens,
            cache_dir=data.cache_dir, pack_documents=data.pack_documents,
        )  # fmt: skip

    collator: Callable = causal_collator
    if not causal:
        masking_seed = training.seed if training.data_seed is None else training.data_seed
        collator = pretraining_collator(tokenizer, data.mlm_probability, data.max_length, masking_seed)
    if data.pack_documents:
        collator = PackedCollator(collator, tokenizer.cls_token_id)
    train_set: RowStream | datasets.Dataset
    if data.streaming:
        text = open_documents(data.text)
        record["inputs"]["shards"] = text.num_shards
        train_set = RowStream(
            text, tokenizer, data.max_length, training.train_batch_size, collator, data.nsp, training.seed,
            data.shuffle_buffer, "train" if data.validation is None else "all", training.dataloader_drop_last,
            training.process_index, training.world_size, pack_documents=data.pack_documents,
        )  # fmt: skip
    else:
        train_set = rows("train", data.max_tokens)
        record["inputs"] |= rows_record(train_set)
    validation_set = rows("validation", data.max_validation_tokens)
    if training.resume_from_checkpoint:
        check_recipe(training.resume_from_checkpoint, record)

    trainer = SparseBertTrainer(
        model,
        training,
        train_dataset=train_set,
        eval_dataset=validation_set,
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=causal_metrics if causal else pretraining_metrics,
        preprocess_logits_for_metrics=reduce_causal_logits if causal else reduce_logits,
        callbacks=[
            RecipeRecord(record),
            schedule,
            *(callback for callback in (pruning, budget) if callback is not None),
        ],
    )
    if data.batch_ramp:
        BatchRamp(trainer, data.batch_ramp, None if budget is None else budget.position)
    with StopOnSignal(trainer):
        trained = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics

    output.mkdir(parents=True, exist_ok=True)
    metrics = {name: getattr(model.config, name) for name in ("search", "pattern", "probability_map", "token_mixers")}
    searched = sparse_attention.searching or schedule.probs is not None
    probs = sparse_attention.mask_probs() if schedule.probs is None else schedule.probs  # (L, H, n, n)
    if sparse_attention.searching:
        trainer.save_model()  # freezing may refuse the mask; then the search is not lost
        schedule.freeze(sparse_attention)
    main_process = trainer.is_world_process_zero()
    if searched and main_process:
        # Not before the search is saved, which removes the P of another run.
        save_file({"probs": probs.flatten(0, 1)}, output / MASK_PROBS_NAME)
    if searched:
        metrics["search_outcome"] = schedule.outcome
    if pruning is not None:
        metrics["pruning"] = pruning.settings
    trainer.save_model()
    evaluation = trainer.evaluate()
    metrics |= {"sparsity": sparse_attention.sparsity(), "positions": position_groups(probs)}
    names = ("lm_loss", "perplexity") if causal else ("mlm_loss", "mlm_accuracy")
    metrics |= {name: evaluation[f"eval_{name}"] for name in names}
    metrics["nsp_accuracy"] = evaluation.get("eval_nsp_accuracy")
    if model.config.pattern is not None:
        metrics["mask_seed"] = model.config.mask_seed
    metrics["steps"] = trainer.state.global_step
    metrics["num_parameters"] = get_model_param_count(model)
    metrics["tokens_per_second"] = trained["train_samples_per_second"] * data.max_length
    metrics["train_seconds"] = trained["train_runtime"]
    if budget is not None:
        # The Trainer counts the steps that it was allowed.
        examples = (
            budget.steps * training.train_batch_size * training.gradient_accumulation_steps * training.world_size
        )
        metrics["tokens_per_second"] = examples * data.max_length / trained["train_runtime"]
        metrics["minutes"] = budget.elapsed / 60
    metrics["seconds"] = time.perf_counter() - start
    metrics["hardware"] = hardware()
    if data.pictures and main_process and find_spec("matplotlib"):
        plot_heads(sparse_attention.mask, output / "heads.png")
        plot_mean_probs(probs, output / "mean_probs.png")
        plot_offset_profile(probs, output / "offset_profile.png")
    trainer.save_state()
    if main_process:
        add_pretraining(output, metrics, model, data.text)
    return write_metrics(output / "metrics.json", metrics)
