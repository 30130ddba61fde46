"""
What a post-hoc search reads: unlabeled text, or the inputs of a task. Both give the batches to learn from and those to
compare masks on.
"""

import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from ...data.documents import load_documents
from ...data.examples import pretraining_dataset
from ..finetuning.finetuning_arguments import FinetuningArguments
from ..finetuning.task_data import TaskData, prepare
from ..finetuning.task_models import input_sparsity
from .dense_agreement import TIMED_TOKENS
from .matching import START_BATCHES, random_batches
from .objectives import Batch
from .search_arguments import PostHocArguments


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ...masks.sparse_mask import SparseMask

# Columns of the encoded examples that the model reads.
_READ = ("input_ids", "token_type_ids")
_HELD_OUT_BATCH = 16


@dataclass
class TextRows:
    """Packed text: token ids to learn from, and to compare masks on."""

    rows: torch.Tensor  # (N, n)
    held_out: torch.Tensor  # (M, n)
    shortest: int | None  # see `PostHocArguments`

    def record(self) -> dict[str, int]:
        """What tells other text apart."""
        return _record([self.rows])

    def batches(self, batch_size: int, steps: int, seed: int) -> Iterator[Batch]:
        """Yield random batches, see [`random_batches`]."""
        return random_batches(self.rows, batch_size, steps, seed, self.shortest)

    def start(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Yield the whole rows that a search starts from."""
        return random_batches(self.rows, batch_size, START_BATCHES, seed)

    def timed(self) -> Batch:
        """What inference is timed on."""
        return self.held_out


@dataclass
class Inputs:
    """Inputs of different lengths. All inputs of a batch have the same length, so that there is no padding."""

    train: dict[int, dict[str, torch.Tensor]]  # by length
    held_out: list[dict[str, torch.Tensor]]

    def record(self) -> dict[str, int]:
        """What tells other inputs apart."""
        return _record([values for inputs in self.train.values() for values in inputs.values()])

    def batches(self, batch_size: int, steps: int, seed: int) -> Iterator[Batch]:
        """
        Yield random batches. A length is drawn in proportion to the number of its inputs; the batch has as many of
        these as there are, up to a maximum.
        """
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.cat([torch.full((len(inputs["input_ids"]),), length) for length, inputs in self.train.items()])
        for place in torch.randint(len(lengths), (steps,), generator=generator).tolist():
            inputs = self.train[int(lengths[place])]
            chosen = torch.randperm(len(inputs["input_ids"]), generator=generator)[:batch_size]
            yield {name: values[chosen] for name, values in inputs.items()}

    def start(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Yield the inputs that a search starts from."""
        return self.batches(batch_size, START_BATCHES, seed)

    def timed(self) -> Batch:
        """What inference is timed on: inputs of the median length, repeated."""
        lengths = [batch["input_ids"].shape[1] for batch in self.held_out for _ in batch["input_ids"]]
        median = sorted(lengths)[len(lengths) // 2]
        batch = next(batch for batch in self.held_out if batch["input_ids"].shape[1] == median)
        times = -(-TIMED_TOKENS // batch["input_ids"].numel())
        return {name: values.repeat(times, 1) for name, values in batch.items()}


@dataclass
class TaskInputs(Inputs):
    """The inputs of a task, held out those of the first validation split."""

    data: TaskData

    def removed(self, mask: "SparseMask") -> float:
        """The share of the attention that a mask removes on the first validation split."""
        return input_sparsity(mask, self.data.lengths[self.data.evaluation_splits[0]])

    def score(self, model: "PreTrainedModel") -> float:
        """The main metric of a model, with its current mask, on the first validation split; in float32."""
        split, task = self.data.evaluation_splits[0], self.data.task
        # By length, for less padding. The Trainer can group inputs too, but gives the predictions in that order.
        order = np.argsort(self.data.lengths[split], kind="stable")
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, per_device_eval_batch_size=32, report_to="none", disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            )  # fmt: skip
            collator = task.collator(self.data.tokenizer)
            trainer = Trainer(model, arguments, collator, processing_class=self.data.tokenizer)
            outputs: Any = trainer.predict(self.data.features[split].select(order)).predictions
        back = np.argsort(order)
        outputs = tuple(part[back] for part in outputs) if isinstance(outputs, tuple) else outputs[back]
        return self.data.evaluate(split, outputs)[1][task.main_metric]


def _record(tensors):
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.cpu().numpy(), checksum)
    return {"rows": sum(map(len, tensors)), "checksum of the rows": checksum}


def read_text(options: PostHocArguments, tokenizer: "PreTrainedTokenizerBase", device: str) -> TextRows | Inputs:
    """Read text: as packed rows, or each document as an input."""
    text: Any = options.data
    documents = [load_documents(text, "all" if options.validation else "train")]
    documents.append(load_documents(options.validation or text, "all" if options.validation else "validation"))
    sizes = options.max_tokens, options.max_validation_tokens
    if not options.pack:
        train, held_out = (
            _by_length(_encoded(part, tokenizer, options.max_length), size, device)
            for part, size in zip(documents, sizes, strict=True)
        )
        return Inputs(train, _batches(held_out))
    rows = []
    fields = "data", "validation" if options.validation else "data"
    for part, size, field in zip(documents, sizes, fields, strict=True):
        try:
            packed = pretraining_dataset(part, tokenizer, options.max_length, max_tokens=size)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
        rows.append(torch.tensor(packed.with_format("numpy")["input_ids"][:], device=device))
    batch_size = options.sizes[1]
    if len(rows[0]) < batch_size:
        raise ValueError(
            f"data: the text gives {len(rows[0])} rows of {options.max_length} tokens, too few for a batch of "
            f"{batch_size}: use more text, or a smaller batch_size or max_length"
        )
    return TextRows(rows[0], rows[1], options.shortest)


def _encoded(
    documents: Iterable[list[str]], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> Iterator[dict[str, Any]]:
    """The documents as inputs, cut to a maximum length."""
    for paragraphs in documents:
        yield tokenizer(" ".join(paragraphs), truncation=True, max_length=max_length)


def read_inputs(options: PostHocArguments, config: "PreTrainedConfig", device: str) -> TaskInputs:
    """Read and tokenize the examples of a task."""
    names = (
        *("task", "data", "text_column", "text_pair_column", "label_column"),
        *("model", "max_length", "skip_bad", "revision", "subfolder", "token"),
    )
    fields = {name: getattr(options, name) for name in names}
    # For SQuAD, the defaults at 384 tokens.
    fields |= {
        "doc_stride": min(128, options.max_length // 3),
        "max_question_length": min(64, options.max_length // 4),
    }
    data = prepare(FinetuningArguments(**fields, test_split=[]))
    _check_classes(data, config)
    train = _by_length(data.features[data.train_split].shuffle(seed=options.seed), options.max_tokens, device)
    held_out = data.features[data.evaluation_splits[0]].shuffle(seed=0)
    return TaskInputs(train, _batches(_by_length(held_out, options.max_validation_tokens, device)), data)


def _by_length(rows: Iterable[dict[str, Any]], max_tokens: int, device: str) -> dict[int, dict[str, torch.Tensor]]:
    """The first inputs, of at most this many tokens together, but at least one, by their length."""
    by_length: dict[int, list[dict[str, Any]]] = {}
    total = 0
    for row in rows:
        length = len(row["input_ids"])
        total += length
        if by_length and total > max_tokens:
            break
        by_length.setdefault(length, []).append(row)
    return {
        length: {name: torch.tensor([row[name] for row in rows], device=device) for name in _READ if name in rows[0]}
        for length, rows in sorted(by_length.items())
    }


def _batches(by_length: dict[int, dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    batches: list[dict[str, torch.Tensor]] = []
    for inputs in by_length.values():
        parts = {name: values.split(_HELD_OUT_BATCH) for name, values in inputs.items()}
        batches += [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return batches


def _check_classes(data: TaskData, config: "PreTrainedConfig") -> None:
    """Refuse a model whose logits do not stand for the classes of the task."""
    import datasets

    if not data.task.head.endswith("ForSequenceClassification"):
        return
    label = data.examples[data.train_split].features["label"]
    names = label.names if isinstance(label, datasets.ClassLabel) else None
    expected = 1 if names is None else len(names)
    described = f"task {data.task.name}: the model {data.options.model}"
    if config.num_labels != expected:
        raise ValueError(
            f"{described} has {config.num_labels} labels, the task has {expected}: fine-tune a model on it first"
        )
    problem = "regression" if names is None else "single_label_classification"
    if config.problem_type not in (None, problem):
        raise ValueError(f"{described} has the problem_type {config.problem_type}, the task is a {problem}")
    own = [str(name) for name in (config.id2label or {}).values()]
    lower, ordered = [name.lower() for name in own], [name.lower() for name in names or own]
    if lower != ordered and set(lower) == set(ordered):
        raise ValueError(f"{described} has the labels in the order {', '.join(own)}, the task in {', '.join(ordered)}")
