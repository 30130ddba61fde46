"""Pre-training: data, model, mask and Trainer of one recipe."""

import time
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainingArguments, set_seed

from .attention import check_backend
from .checkpoints import check_checkpoint
from .configuration_sparsebert import SparseBertConfig
from .data import causal_collator, check_tokenizer, pretraining_collator, pretraining_dataset, train_tokenizer
from .documents import load_documents
from .importance import MASK_PROBS_NAME, position_groups
from .masks.sparse_mask import SparseMask
from .mixers import fixed_length
from .modeling_sparsebert import SparseBertForMaskedLM, SparseBertForPreTraining, SparseBertLMHeadModel
from .pruning import ProgressivePruning
from .training import (
    PretrainingArguments,
    SearchSchedule,
    SparseBertTrainer,
    causal_metrics,
    check_output_dir,
    pretraining_metrics,
    reduce_causal_logits,
    reduce_logits,
    write_metrics,
)
from .visualization import plot_heads, plot_mean_probs, plot_offset_profile


SECTIONS = {"data": PretrainingArguments, "model": SparseBertConfig, "training": TrainingArguments}


def pretrain(recipe):
    """
    Train a model as a recipe says: masked tokens and sentence pairs (BERT), masked tokens only, or with
    `model.is_decoder` the next token. The mask is learned with the weights, or given; in the end it is frozen.

    Writes to `output_dir` what `pretrain.py` promises.

    Args:
        recipe (`dict`): Sections `data`, `model`, `training` as [`load_recipe`] gives them.

    Returns:
        `dict`: The metrics.
    Raises:
        ValueError, OSError: For what is wrong in the recipe or the data.
    """
    start = time.perf_counter()
    data = PretrainingArguments(**recipe["data"])
    training = TrainingArguments(**recipe["training"])
    output = Path(training.output_dir)
    check_backend(data.attn_implementation)
    check_output_dir(output, data.overwrite, training.resume_from_checkpoint)
    pruning = ProgressivePruning.from_settings(data.pruning)
    for name, unset in (("freeze_threshold", None), ("freeze_sparsity", None), ("search_end", 1.0)):
        if pruning is not None and getattr(data, name) != unset:
            raise ValueError(f"{name} {getattr(data, name)} has no meaning with pruning, which freezes the mask")
    schedule = SearchSchedule(data.search_end, data.freeze_threshold, data.freeze_sparsity, {"run": output.name})
    causal = bool(recipe["model"].get("is_decoder"))
    if causal and data.nsp:
        raise ValueError("nsp true has no meaning with is_decoder true, which predicts the next token: set nsp false")
    set_seed(training.seed)

    model_class = SparseBertForPreTraining if data.nsp else SparseBertForMaskedLM
    if causal:
        model_class = SparseBertLMHeadModel
    if data.base_model:
        model = model_class.from_pretrained(data.base_model, **recipe["model"])
    else:
        model = model_class(SparseBertConfig(**recipe["model"]))
    if data.mask:
        model.set_mask(SparseMask.from_pretrained(data.mask))
    check_backend(data.attn_implementation, model.config.probability_map)
    model.set_attn_implementation(data.attn_implementation)
    if fixed_length(model.config) not in (None, data.max_length):
        raise ValueError(
            f"max_length must be {model.config.max_position_embeddings}, the max_position_embeddings of a model with "
            f"the token mixer 'bproj', got {data.max_length}"
        )
    sparse_attention = model.sparse_attention
    if pruning is not None:
        pruning.check(model)
    if training.resume_from_checkpoint:
        check_checkpoint(training.resume_from_checkpoint, model, pruning, data.search_end < 1)

    def documents(split):
        if data.validation is None:
            return load_documents(data.text, split)
        return load_documents(data.text if split == "train" else data.validation, "all")

    if data.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(data.tokenizer)
    else:
        tokenizer = train_tokenizer(documents("train"), model.config.vocab_size)
        tokenizer.model_max_length = model.config.max_position_embeddings
    check_tokenizer(tokenizer, model.config.vocab_size)
    train_set, validation_set = (
        pretraining_dataset(documents(split), tokenizer, data.max_length, data.nsp, training.seed, max_tokens)
        for split, max_tokens in (("train", data.max_tokens), ("validation", data.max_validation_tokens))
    )
    if causal:
        collator = causal_collator
    else:
        collator = pretraining_collator(tokenizer, data.mlm_probability, pad_to_multiple_of=data.max_length)

    trainer = SparseBertTrainer(
        model,
        training,
        train_dataset=train_set,
        eval_dataset=validation_set,
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=causal_metrics if causal else pretraining_metrics,
        preprocess_logits_for_metrics=reduce_causal_logits if causal else reduce_logits,
        callbacks=[schedule] if pruning is None else [schedule, pruning],
    )
    trained = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics

    output.mkdir(parents=True, exist_ok=True)
    metrics = {name: getattr(model.config, name) for name in ("search", "pattern", "probability_map", "token_mixers")}
    searched = sparse_attention.searching or schedule.probs is not None
    probs = sparse_attention.mask_probs() if schedule.probs is None else schedule.probs  # (L, H, n, n)
    if searched:
        save_file({"probs": probs.flatten(0, 1)}, output / MASK_PROBS_NAME)
    if sparse_attention.searching:
        trainer.save_model()  # freezing may refuse the mask; the search is not lost with it
        schedule.freeze(sparse_attention)
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
    metrics["steps"] = trainer.state.global_step
    metrics["num_parameters"] = model.num_parameters()
    metrics["tokens_per_second"] = trained["train_samples_per_second"] * data.max_length
    metrics["train_seconds"] = trained["train_runtime"]
    metrics["seconds"] = time.perf_counter() - start
    if data.pictures and find_spec("matplotlib"):
        plot_heads(sparse_attention.mask, output / "heads.png")
        plot_mean_probs(probs, output / "mean_probs.png")
        plot_offset_profile(probs, output / "offset_profile.png")
    trainer.save_state()
    return write_metrics(output / "metrics.json", metrics)
