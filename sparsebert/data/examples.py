"""Pre-training examples for masked-language modeling and next-sentence prediction, and their collators."""

import copy
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from ..checks import check_range
from .row_cache import cached_rows, fingerprint_of
from .rows import StoredText, TokenizedText, packed_rows, pair_rows
from .tokenization import check_tokenizer


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


def pretraining_dataset(
    documents: Iterable[list[str]],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    nsp: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    short_seq_prob: float = 0.1,
    cache_dir: str | os.PathLike | None = None,
    pack_documents: bool = False,
) -> "datasets.Dataset":
    """
    Turn documents into pre-training examples. They are masked later, by [`pretraining_collator`].

    With `nsp=False` the text is packed: every row is `[CLS] tokens [SEP]` with exactly `max_length` tokens of
    contiguous text, and a `[SEP]` between the end of a document and the beginning of the next. With `nsp=True` a row
    is `[CLS] A [SEP] B [SEP]` with at most `max_length` tokens, as in the original BERT: whole sentences up to a
    target length or beyond, cut to fit the row. In half of the rows B follows A, where the document is long enough; in
    the others it comes from another document.

    The text is read and tokenized one part at a time, and the rows are written to files that are mapped into memory:
    the corpus can be larger than the memory. Rows made from [`load_documents`] are kept, and the next call with the
    same text, tokenizer and arguments finds them; other rows are deleted when the process ends.

    Args:
        documents (`Iterable[list[str]]`):
            Documents as lists of paragraphs, e.g. from [`load_documents`].
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            A BERT tokenizer.
        max_length (`int`):
            Length of a row in tokens, special tokens included. At least 8.
        nsp (`bool`, *optional*, defaults to `False`):
            Whether to make next-sentence pairs.
        seed (`int`, *optional*, defaults to 0):
            Seed of the choice of pairs. Not used without `nsp`.
        max_tokens (`int`, *optional*):
            Maximum number of tokens in all rows, special tokens included. Reading stops once there is enough text.
        short_seq_prob (`float`, *optional*, defaults to 0.1):
            Fraction of pairs with a random, smaller target length. Only used with `nsp`.
        pack_documents (`bool`, *optional*, defaults to `False`):
            Whether a document that begins within a row begins with a `[CLS]`, for [`PackedCollator`]. Not with `nsp`.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder for the rows; by default that of `datasets` (`HF_DATASETS_CACHE`).

    Returns:
        `datasets.Dataset`: Rows with `input_ids`, `token_type_ids` and `special_tokens_mask` and, with `nsp`,
        `next_sentence_label`: 0 if B follows A, 1 if it is random, as in [`~transformers.BertForPreTraining`].
    """
    check_tokenizer(tokenizer, len(tokenizer))
    check_range("max_length", max_length, 8)
    if max_tokens is not None and max_tokens < max_length:
        raise ValueError(f"max_tokens must be at least max_length={max_length}, got {max_tokens}")
    check_range("short_seq_prob", short_seq_prob, 0, 1, (int, float))
    if nsp and pack_documents:
        raise ValueError("pack_documents true has no meaning with nsp true, whose rows are pairs of two documents")

    settings: dict[str, Any] = {"max_length": max_length, "nsp": nsp, "max_tokens": max_tokens}
    if nsp:
        settings |= {"seed": seed, "short_seq_prob": short_seq_prob}
    if pack_documents:
        settings["pack_documents"] = True

    def tables(folder: Path) -> "Iterator[pa.Table]":
        text = TokenizedText(documents, tokenizer, nsp, max_tokens)
        special = tokenizer.cls_token_id, tokenizer.sep_token_id
        if nsp:
            generator = np.random.default_rng(seed)
            stored = StoredText(text, folder)
            text.check()
            yield from pair_rows(stored, *special, max_length, max_tokens, short_seq_prob, generator)
        else:
            yield from packed_rows(text, *special, max_length, max_tokens, pack_documents)
            text.check()

    return cached_rows(tables, fingerprint_of(documents), tokenizer, settings, cache_dir)


class ReproducibleCollator(DataCollatorForLanguageModeling):
    """
    The collator of transformers for masked-language modeling, with a masking that is a function of seed, epoch and
    example: the same in whatever order, process or batch an example comes.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        probability: float,
        seed: int,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        super().__init__(tokenizer, mlm_probability=probability, pad_to_multiple_of=pad_to_multiple_of)
        self._probability = probability
        self._key = seed % 2**64 << 64
        # Shared, so that workers that live longer than an epoch see it change.
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, before its first batch is asked for. [`SparseBertTrainer`] does so itself."""
        self._epoch.fill_(epoch)

    def for_evaluation(self) -> "ReproducibleCollator":
        """A collator that masks an example the same way in all epochs."""
        return self.for_epoch(-1)

    def for_epoch(self, epoch: int) -> "ReproducibleCollator":
        """A collator that masks as in this epoch, whatever [`set_epoch`] says later."""
        other = copy.copy(self)
        other._epoch = torch.tensor(epoch)
        return other

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        batch = dict(
            pad_without_fast_tokenizer_warning(
                self.tokenizer, examples, return_tensors="pt", pad_to_multiple_of=self.pad_to_multiple_of
            )
        )
        ids = batch["input_ids"]
        special = batch.pop("special_tokens_mask", None)
        if special is None:
            special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids))
        draws = np.zeros((3, *ids.shape), dtype=np.float32)
        # For evaluations, whose epoch is -1, this gives 0.
        stream, from_left = int(self._epoch) + 1, self.tokenizer.padding_side == "right"
        for row, example in enumerate(examples):
            tokens = array("i", example["input_ids"])
            # A generator per example, which draws no more for padding.
            key = self._key + (stream << 32) + zlib.crc32(tokens)
            generator = np.random.Generator(np.random.Philox(key=key))
            begin = 0 if from_left else ids.shape[1] - len(tokens)
            draws[:, row, begin : begin + len(tokens)] = generator.random((3, len(tokens)), dtype=np.float32)
        chosen, replaced, words = torch.from_numpy(draws).unbind()
        predicted = (chosen < self._probability) & ~special.bool()
        batch["labels"] = ids.masked_fill(~predicted, -100)
        batch["input_ids"] = torch.where(predicted & (replaced < 0.8), self.tokenizer.mask_token_id, ids)
        random = predicted & (replaced >= 0.8) & (replaced < 0.9)
        batch["input_ids"][random] = (words[random] * len(self.tokenizer)).long()
        return batch


def pretraining_collator(
    tokenizer: "PreTrainedTokenizerBase",
    mlm_probability: float = 0.15,
    pad_to_multiple_of: int | None = None,
    seed: int | None = None,
) -> DataCollatorForLanguageModeling:
    """
    Return the collator for the rows of [`pretraining_dataset`].

    It pads the rows and chooses new tokens to predict in each epoch: 80 % of them become `[MASK]`, 10 % a random
    token, and 10 % stay.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer of the rows.
        mlm_probability (`float`, *optional*, defaults to 0.15):
            Fraction of the tokens to predict; more than 0 and less than 1.
        pad_to_multiple_of (`int`, *optional*):
            Pad batches to a multiple of this length. With the `max_length` of the rows, all batches have one shape.
        seed (`int`, *optional*):
            Seed of the masking, which is then a function of seed, epoch and example: see [`ReproducibleCollator`],
            whose `set_epoch` a Trainer other than [`SparseBertTrainer`] must call in every epoch. By default the
            masking uses torch's global generator, and a run that is resumed sees other batches.

    Returns:
        [`~transformers.DataCollatorForLanguageModeling`]: A collator that returns `input_ids`, `token_type_ids`,
        `attention_mask` and `labels` (-100 for tokens that are not predicted), each of shape
        `(batch_size, sequence_length)`, and `next_sentence_label` of shape `(batch_size,)` if the rows have it.
    """
    check_tokenizer(tokenizer, len(tokenizer))
    if not 0 < mlm_probability < 1:
        raise ValueError(f"mlm_probability must be greater than 0 and less than 1, got {mlm_probability}")
    if seed is not None:
        return ReproducibleCollator(tokenizer, mlm_probability, seed, pad_to_multiple_of)
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=mlm_probability, pad_to_multiple_of=pad_to_multiple_of
    )


def causal_collator(rows: list[dict]) -> dict[str, torch.Tensor]:
    """
    Collate packed rows of [`pretraining_dataset`] to predict the next token: `input_ids` and `labels` of shape
    `(batch_size, sequence_length)`. The last token of a row, a `[SEP]` that its position gives away, is not predicted
    (-100). The model shifts the labels.
    """
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    labels = input_ids.clone()
    labels[:, -1] = -100
    return {"input_ids": input_ids, "labels": labels}
