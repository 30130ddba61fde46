"""
Fine-tune through a frozen mask: `python finetune.py RECIPE --task TASK --model DIR_OR_HUB_ID [--field value ...]`.

Writes to `output_dir`: the model with its mask, the tokenizer, `metrics.json`, TensorBoard logs.
"""

import time
from pathlib import Path

import transformers
from transformers import AutoTokenizer, DataCollatorWithPadding, TrainingArguments, set_seed

from sparsebert import SparseBertConfig
from sparsebert.attach import get_sparse_attention
from sparsebert.recipes import load_recipe, nearest, run_script
from sparsebert.tasks import TASKS
from sparsebert.training import FinetuningArguments, SparseBertTrainer, check_backend, check_output_dir, write_metrics


def main(arguments):
    start = time.perf_counter()
    recipe = load_recipe(
        arguments, {"data": FinetuningArguments, "model": SparseBertConfig, "training": TrainingArguments}
    )
    data = FinetuningArguments(**recipe["data"])
    training = TrainingArguments(**recipe["training"])
    output = Path(training.output_dir)
    if data.task not in TASKS:
        raise nearest("task", str(data.task), list(TASKS))
    if data.model is None:
        raise ValueError("--model must name the folder or Hub id of a pre-trained model")
    check_backend(data.attn_implementation)
    check_output_dir(output, data.overwrite, training.resume_from_checkpoint)
    set_seed(training.seed)

    task = TASKS[data.task]
    splits = task.load(**(data.task_kwargs or {}))
    labels = splits["train"].features["label"].names
    tokenizer = AutoTokenizer.from_pretrained(data.model)
    model = getattr(transformers, task.head).from_pretrained(
        data.model,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        attn_implementation=data.attn_implementation,
        **recipe["model"],
    )
    if get_sparse_attention(model).searching:
        raise ValueError(f"the mask of {data.model} is still being searched: freeze it first, as pretrain.py does")

    def tokenize(rows):
        return tokenizer(*(rows[name] for name in task.text_columns), truncation=True, max_length=data.max_length)

    tokenized = splits.map(tokenize, batched=True)
    trainer = SparseBertTrainer(
        model,
        training,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda prediction: task.metrics(prediction.predictions, prediction.label_ids),
    )
    trained = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics
    trainer.save_model()
    evaluation = trainer.evaluate()
    metrics = {"task": task.name, "model": data.model, "sparsity": model.sparse_attention.sparsity()}
    metrics |= {name.removeprefix("eval_"): value for name, value in evaluation.items() if name != "epoch"}
    if data.baseline and task.baseline is not None:
        metrics["baseline"] = task.baseline(splits)
    metrics |= {"train_seconds": trained["train_runtime"], "seconds": time.perf_counter() - start}
    print(write_metrics(output / "metrics.json", metrics))


if __name__ == "__main__":
    run_script(main)
