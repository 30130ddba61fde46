"""
Pre-train a SparseBERT from a recipe: `python pretrain.py RECIPE [--field value ...]`.

Learns the mask with the weights (or runs through a given one), freezes it, and writes to `output_dir`: the model with
its mask, the tokenizer, `metrics.json`, `trainer_state.json` (what was logged), `mask_probs.safetensors` (P before
freezing), pictures (with the extra `viz`), TensorBoard logs.
"""

import time
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainingArguments, set_seed

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseBertForPreTraining, SparseMask
from sparsebert.attention import check_backend
from sparsebert.checkpoints import check_checkpoint
from sparsebert.data import check_tokenizer, pretraining_collator, pretraining_dataset, train_tokenizer
from sparsebert.documents import load_documents
from sparsebert.importance import MASK_PROBS_NAME, position_groups
from sparsebert.mixers import fixed_length
from sparsebert.pruning import ProgressivePruning
from sparsebert.recipes import load_recipe, run_script
from sparsebert.training import (
    PretrainingArguments,
    SearchSchedule,
    SparseBertTrainer,
    check_output_dir,
    pretraining_metrics,
    reduce_logits,
    write_metrics,
)
from sparsebert.visualization import plot_heads, plot_mean_probs, plot_offset_profile


def main(arguments):
    start = time.perf_counter()
    recipe = load_recipe(
        arguments, {"data": PretrainingArguments, "model": SparseBertConfig, "training": TrainingArguments}
    )
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
    set_seed(training.seed)

    model_class = SparseBertForPreTraining if data.nsp else SparseBertForMaskedLM
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

    trainer = SparseBertTrainer(
        model,
        training,
        train_dataset=train_set,
        eval_dataset=validation_set,
        data_collator=pretraining_collator(tokenizer, data.mlm_probability, pad_to_multiple_of=data.max_length),
        processing_class=tokenizer,
        compute_metrics=pretraining_metrics,
        preprocess_logits_for_metrics=reduce_logits,
        callbacks=[schedule] if pruning is None else [schedule, pruning],
    )
    trained = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics

    output.mkdir(parents=True, exist_ok=True)
    metrics = {"search": model.config.search, "pattern": model.config.pattern}
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
    metrics |= {name: evaluation[f"eval_{name}"] for name in ("mlm_loss", "mlm_accuracy")}
    metrics["nsp_accuracy"] = evaluation.get("eval_nsp_accuracy")
    metrics["steps"] = trainer.state.global_step
    metrics["tokens_per_second"] = trained["train_samples_per_second"] * data.max_length
    metrics["train_seconds"] = trained["train_runtime"]
    metrics["seconds"] = time.perf_counter() - start
    if find_spec("matplotlib"):
        plot_heads(sparse_attention.mask, output / "heads.png")
        plot_mean_probs(probs, output / "mean_probs.png")
        plot_offset_profile(probs, output / "offset_profile.png")
    trainer.save_state()
    print(write_metrics(output / "metrics.json", metrics))
    print("pictures:", *sorted(map(str, output.glob("*.png"))))


if __name__ == "__main__":
    run_script(main)
