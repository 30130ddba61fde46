"""Pre-training data: the WordPiece tokenizer, masked-LM and next-sentence examples, and their collator."""

import re
from array import array
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from transformers.utils import logging

from .tokenization import check_tokenizer


if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

logger = logging.get_logger(__name__)


# Above this share of repeated paragraphs a corpus is more likely to be badly put together than repetitive.
_DUPLICATE_WARNING = 0.2
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z])")


def pretraining_dataset(
    documents: Iterable[list[str]],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    nsp: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    short_seq_prob: float = 0.1,
) -> "datasets.Dataset":
    """
    Turn documents into pre-training examples; the masking is left to [`pretraining_collator`].

    With `nsp=False` the text is packed: every row is `[CLS] tokens [SEP]` of exactly `max_length` tokens of contiguous
    text, with a `[SEP]` in between where one document ends and the next begins. With `nsp=True` a row is
    `[CLS] A [SEP] B [SEP]` of at most `max_length` tokens, made as for the original BERT: A and B are runs of whole
    sentences, cut at the target length, and B follows A in half of the rows where the document allows it and comes
    from another document in the others.

    Args:
        documents (`Iterable[list[str]]`):
            Documents as lists of paragraphs, e.g. of [`load_documents`].
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            A BERT tokenizer.
        max_length (`int`):
            Length of a row in tokens, special tokens included; at least 8.
        nsp (`bool`, *optional*, defaults to `False`):
            Whether to make next-sentence pairs.
        seed (`int`, *optional*, defaults to 0):
            Seed of the choice of pairs. Without `nsp` nothing is random.
        max_tokens (`int`, *optional*):
            Upper bound on the tokens of all rows, special tokens included. Reading stops once there is enough text.
        short_seq_prob (`float`, *optional*, defaults to 0.1):
            Share of the pairs with a random, smaller target length. Only used with `nsp`.

    Returns:
        `datasets.Dataset`: Rows with `input_ids`, `token_type_ids` and `special_tokens_mask` and, with `nsp`,
        `next_sentence_label`: 0 if B follows A, 1 if it is random, as in [`~transformers.BertForPreTraining`].

    Raises:
        ValueError: If an argument is out of range, the tokenizer lacks a special token, or there is too little text.
    """
    import datasets

    check_tokenizer(tokenizer, len(tokenizer))
    if max_length < 8:
        raise ValueError(f"max_length must be at least 8, got {max_length}")
    if max_tokens is not None and max_tokens < max_length:
        raise ValueError(f"max_tokens must be at least max_length={max_length}, got {max_tokens}")
    if not 0 <= short_seq_prob <= 1:
        raise ValueError(f"short_seq_prob must be between 0 and 1, got {short_seq_prob}")

    text = _TokenizedText(documents, tokenizer, nsp, max_tokens)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    labels = None
    if nsp:
        ids, lengths, first_lengths, labels = _next_sentence_rows(
            text, cls, sep, max_length, max_tokens, short_seq_prob, np.random.default_rng(seed)
        )
    else:
        ids, lengths = _packed_rows(text, cls, sep, max_length, max_tokens)
        first_lengths = lengths

    import pyarrow as pa

    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = np.concatenate([[0], ends])
    positions = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    columns = {
        "input_ids": ids,
        "token_type_ids": (positions >= np.repeat(first_lengths, lengths)).astype(np.int8),
        "special_tokens_mask": ((ids == cls) | (ids == sep)).astype(np.int8),
    }
    # Large lists have 64-bit offsets, for corpora of 2**31 tokens and more.
    columns = {name: pa.LargeListArray.from_arrays(offsets, values) for name, values in columns.items()}
    if labels is not None:
        columns["next_sentence_label"] = pa.array(labels)
        logger.info(f"Next-sentence pairs: {np.mean(labels):.1%} of {len(labels)} are random.")
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns))


class _TokenizedText:
    """
    Token ids of a corpus in flat arrays.

    Attributes:
        ids (`np.ndarray` of shape `(num_tokens,)`): The tokens.
        unit_offsets (`np.ndarray` of shape `(num_units + 1,)`): Where the units (sentences or paragraphs) start in
            `ids`.
        document_offsets (`np.ndarray` of shape `(num_documents + 1,)`): Where the documents start among the units.
    """

    def __init__(self, documents, tokenizer, sentences: bool, max_tokens: int | None):
        ids, unit_offsets, document_offsets = array("i"), array("q", [0]), array("q", [0])
        seen: set[int] = set()
        paragraphs = duplicates = empty = 0

        def units():
            """Yield the units of the documents, and None at the end of a document."""
            nonlocal paragraphs, duplicates
            for document in documents:
                for paragraph in document:
                    digest = hash(paragraph)
                    paragraphs += 1
                    duplicates += digest in seen
                    seen.add(digest)
                    yield from _SENTENCE_END.split(paragraph) if sentences else (paragraph,)
                yield None

        stream = units()
        while batch := list(islice(stream, 2000)):
            texts = [unit for unit in batch if unit is not None]
            encoded = iter(
                tokenizer(
                    texts,
                    add_special_tokens=False,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    verbose=False,
                )["input_ids"]
                if texts
                else ()
            )
            for unit in batch:
                if unit is not None:
                    tokens = next(encoded)
                    if tokens:
                        ids.extend(tokens)
                        unit_offsets.append(len(ids))
                    else:
                        empty += 1
                elif len(unit_offsets) - 1 > document_offsets[-1]:
                    document_offsets.append(len(unit_offsets) - 1)
            if max_tokens is not None and len(ids) >= max_tokens:
                break
        if len(unit_offsets) - 1 > document_offsets[-1]:  # reading stopped within a document
            document_offsets.append(len(unit_offsets) - 1)

        if empty:
            logger.warning(f"Skipped {empty} pieces of text without a token among {paragraphs} paragraphs.")
        if paragraphs and duplicates > _DUPLICATE_WARNING * paragraphs:
            logger.warning(
                f"{duplicates} of {paragraphs} paragraphs ({duplicates / paragraphs:.0%}) repeat an earlier one; "
                "consider removing duplicates from the corpus."
            )
        self.ids = np.frombuffer(ids, dtype=np.int32)
        self.unit_offsets = np.frombuffer(unit_offsets, dtype=np.int64)
        self.document_offsets = np.frombuffer(document_offsets, dtype=np.int64)
        logger.info(f"Read {len(self.document_offsets) - 1} documents, {paragraphs} paragraphs, {len(ids)} tokens.")


def _packed_rows(text: _TokenizedText, cls: int, sep: int, max_length: int, max_tokens: int | None):
    """Return the concatenated rows and the lengths of the rows."""
    boundaries = text.unit_offsets[text.document_offsets[1:-1]]
    stream = np.insert(text.ids, boundaries, sep)
    rows = len(stream) // (max_length - 2)
    if not rows:
        raise ValueError(f"the text has only {len(stream)} tokens, too few for one row of max_length={max_length}")
    if max_tokens is not None:
        rows = min(rows, max_tokens // max_length)
    ids = np.empty((rows, max_length), dtype=np.int32)
    ids[:, 0] = cls
    ids[:, 1:-1] = stream[: rows * (max_length - 2)].reshape(rows, -1)
    ids[:, -1] = sep
    return ids.reshape(-1), np.full(rows, max_length)


def _next_sentence_rows(text, cls, sep, max_length, max_tokens, short_seq_prob, rng):
    """Return the concatenated rows, the lengths of the rows and of their first segments, and the labels."""
    offsets, documents = text.unit_offsets.tolist(), text.document_offsets.tolist()
    num_documents = len(documents) - 1
    if num_documents < 2:
        raise ValueError(f"next-sentence pairs need at least 2 documents, got {num_documents}")
    room = max_length - 3
    ids, lengths, first_lengths, labels = array("i"), array("i"), array("i"), array("b")

    def run(start, end, target):
        """Return the end of the shortest run of units from `start` that has `target` tokens, if there are as many."""
        stop = start + 1
        while stop < end and offsets[stop] - offsets[start] < target:
            stop += 1
        return stop

    def segment(start, stop, keep):
        """Return `keep` tokens of the units, after cutting at random at the front and at the back."""
        front = rng.binomial(offsets[stop] - offsets[start] - keep, 0.5)
        return text.ids[offsets[start] + front : offsets[start] + front + keep].tolist()

    for document in range(num_documents):
        start, end = documents[document], documents[document + 1]
        while start < end:
            target = int(rng.integers(2, room + 1)) if rng.random() < short_seq_prob else room
            stop = run(start, end, target)
            middle = int(rng.integers(start + 1, stop)) if stop - start > 1 else stop
            is_random = middle == stop or rng.random() < 0.5
            if is_random:
                other = int(rng.integers(num_documents - 1))
                other += other >= document
                b_start = int(rng.integers(documents[other], documents[other + 1]))
                b_stop = run(b_start, documents[other + 1], target - (offsets[middle] - offsets[start]))
            else:
                b_start, b_stop = middle, stop
            a_length = offsets[middle] - offsets[start]
            b_length = offsets[b_stop] - offsets[b_start]
            # What is left when the longer segment loses tokens one by one until both fit.
            a_keep = min(a_length, max((room + 1) // 2, room - b_length))
            b_keep = min(b_length, room - a_keep)
            if max_tokens is not None and len(ids) + a_keep + b_keep + 3 > max_tokens:
                return _rows(ids, lengths, first_lengths, labels)
            ids.extend([cls, *segment(start, middle, a_keep), sep, *segment(b_start, b_stop, b_keep), sep])
            lengths.append(a_keep + b_keep + 3)
            first_lengths.append(a_keep + 2)
            labels.append(is_random)
            # The units after A were not used by a random pair; they start the next one.
            start = middle if is_random else stop
    return _rows(ids, lengths, first_lengths, labels)


def _rows(*columns: array) -> list[np.ndarray]:
    return [np.frombuffer(column, dtype=np.dtype(column.typecode)) for column in columns]


def pretraining_collator(
    tokenizer: "PreTrainedTokenizerBase",
    mlm_probability: float = 0.15,
    pad_to_multiple_of: int | None = None,
    seed: int | None = None,
) -> "DataCollatorForLanguageModeling":
    """
    Return the collator for the rows of [`pretraining_dataset`].

    It pads, and masks anew each time a row is drawn: of the tokens to predict, 80 % become `[MASK]`, 10 % a random
    token and 10 % stay.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer that made the rows.
        mlm_probability (`float`, *optional*, defaults to 0.15):
            Share of the tokens to predict; more than 0 and less than 1.
        pad_to_multiple_of (`int`, *optional*):
            Pad batches to a multiple of this length; with the `max_length` of the rows, all batches have one shape.
        seed (`int`, *optional*):
            Seed of the masking. By default it follows the global generator of torch, which `Trainer` seeds.

    Returns:
        [`~transformers.DataCollatorForLanguageModeling`]: A collator giving `input_ids`, `token_type_ids`,
        `attention_mask` and `labels` (-100 where nothing is to be predicted), each of shape
        `(batch_size, sequence_length)`, and `next_sentence_label` of shape `(batch_size,)` if the rows have it.

    Raises:
        ValueError: If the tokenizer has no mask or padding token, or `mlm_probability` is out of range.
    """
    from transformers import DataCollatorForLanguageModeling

    check_tokenizer(tokenizer, len(tokenizer))
    if not 0 < mlm_probability < 1:
        raise ValueError(f"mlm_probability must be more than 0 and less than 1, got {mlm_probability}")
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=mlm_probability, pad_to_multiple_of=pad_to_multiple_of, seed=seed
    )


def causal_collator(rows: "list[dict]") -> "dict[str, torch.Tensor]":
    """
    Collate packed rows of [`pretraining_dataset`] to predict the next token.

    Args:
        rows (`list[dict]`): With `input_ids`, all of one length.

    Returns:
        `dict`: `input_ids` and `labels` of shape `(batch_size, sequence_length)`; the row's last token, a `[SEP]` that
        its position gives away, is not to be predicted (-100). The model shifts the labels.
    """
    import torch

    input_ids = torch.tensor([row["input_ids"] for row in rows])
    labels = input_ids.clone()
    labels[:, -1] = -100
    return {"input_ids": input_ids, "labels": labels}
