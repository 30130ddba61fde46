"""Pre-training examples for masked-language modelling and next-sentence prediction, and their collators."""

import copy
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import DataCollatorForLanguageModeling
from transformers.data.data_collator import pad_without_fast_tokenizer_warning
from transformers.utils import logging

from ..checks import check_range
from .tokenization import check_tokenizer


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)


# A corpus with a larger share of repeated paragraphs than this is probably a mistake.
_DUPLICATE_WARNING = 0.2
# With a larger share of unknown tokens than this, the tokenizer is probably that of another language.
_UNKNOWN_WARNING = 0.2
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z])")


def pretraining_dataset(
    documents: Iterable[list[str]],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    nsp: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    short_seq_prob: float = 0.1,
    pack_documents: bool = False,
) -> "datasets.Dataset":
    """
    Turn documents into pre-training examples. They are masked later, by [`pretraining_collator`].

    With `nsp=False` the text is packed: every row is `[CLS] tokens [SEP]` with exactly `max_length` tokens of
    contiguous text, and a `[SEP]` between the end of a document and the beginning of the next. With `nsp=True` a row
    is `[CLS] A [SEP] B [SEP]` with at most `max_length` tokens, as in the original BERT: A and B are whole sentences,
    cut at the target length. In half of the rows B follows A, where the document is long enough; in the others it
    comes from another document.

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

    Returns:
        `datasets.Dataset`: Rows with `input_ids`, `token_type_ids` and `special_tokens_mask` and, with `nsp`,
        `next_sentence_label`: 0 if B follows A, 1 if it is random, as in [`~transformers.BertForPreTraining`].

    Raises:
        ValueError: If an argument is out of range, the tokenizer lacks a special token, or there is too little text.
    """
    import datasets

    check_tokenizer(tokenizer, len(tokenizer))
    check_range("max_length", max_length, 8)
    if max_tokens is not None and max_tokens < max_length:
        raise ValueError(f"max_tokens must be at least max_length={max_length}, got {max_tokens}")
    check_range("short_seq_prob", short_seq_prob, 0, 1, (int, float))
    if nsp and pack_documents:
        raise ValueError("pack_documents true has no meaning with nsp true, whose rows are pairs of two documents")

    text = _TokenizedText(documents, tokenizer, nsp, max_tokens)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    labels = None
    if nsp:
        ids, lengths, first_lengths, labels = _next_sentence_rows(
            text, cls, sep, max_length, max_tokens, short_seq_prob, np.random.default_rng(seed)
        )
    else:
        ids, lengths = _packed_rows(text, cls, sep, max_length, max_tokens, pack_documents)
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
        unit_offsets (`np.ndarray` of shape `(num_units + 1,)`): Where each unit (a sentence or paragraph) starts in
            `ids`.
        document_offsets (`np.ndarray` of shape `(num_documents + 1,)`): Where each document starts among the units.
    """

    def __init__(
        self,
        documents: Iterable[list[str]],
        tokenizer: "PreTrainedTokenizerBase",
        sentences: bool,
        max_tokens: int | None,
    ):
        ids, unit_offsets, document_offsets = array("i"), array("q", [0]), array("q", [0])
        seen: set[int] = set()
        paragraphs = duplicates = empty = 0

        def units() -> Iterator[str | None]:
            """Yield the units of the documents, and `None` at the end of each document."""
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
        progress = tqdm(desc="Tokenizing", total=max_tokens, unit="token", unit_scale=True, disable=None)
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
            progress.update(len(ids) - progress.n)
            if max_tokens is not None and len(ids) >= max_tokens:
                break
        progress.close()
        if len(unit_offsets) - 1 > document_offsets[-1]:  # reading stopped inside a document
            document_offsets.append(len(unit_offsets) - 1)

        if empty:
            logger.warning(f"Skipped {empty} pieces of text without any token in {paragraphs} paragraphs.")
        if paragraphs and duplicates > _DUPLICATE_WARNING * paragraphs:
            logger.warning(
                f"{duplicates} of {paragraphs} paragraphs ({duplicates / paragraphs:.0%}) repeat an earlier one; "
                "consider removing duplicates from the corpus."
            )
        self.ids = np.frombuffer(ids, dtype=np.int32)
        unknown = np.count_nonzero(self.ids == tokenizer.unk_token_id) / max(len(self.ids), 1)
        if unknown > _UNKNOWN_WARNING:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            message = f"{unknown:.0%} of the tokens are {tokenizer.unk_token}"
            if unknown == 1:
                raise ValueError(f"{message}: tokenizer {name!r} is not one for this text")
            logger.warning(f"{message}: tokenizer {name!r} may not be one for this text.")
        self.unit_offsets = np.frombuffer(unit_offsets, dtype=np.int64)
        self.document_offsets = np.frombuffer(document_offsets, dtype=np.int64)
        logger.info(f"Read {len(self.document_offsets) - 1} documents, {paragraphs} paragraphs, {len(ids)} tokens.")


def _packed_rows(
    text: _TokenizedText, cls: int, sep: int, max_length: int, max_tokens: int | None, pack_documents: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated rows, and their lengths."""
    boundaries = text.unit_offsets[text.document_offsets[1:-1]]
    between = [sep, cls] if pack_documents else [sep]
    stream = np.insert(text.ids, np.repeat(boundaries, len(between)), np.tile(between, len(boundaries)))
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


def _next_sentence_rows(
    text: _TokenizedText,
    cls: int,
    sep: int,
    max_length: int,
    max_tokens: int | None,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """The concatenated rows, the lengths of the rows and of their first segments, and the labels."""
    offsets, documents = text.unit_offsets.tolist(), text.document_offsets.tolist()
    num_documents = len(documents) - 1
    if num_documents < 2:
        raise ValueError(f"next-sentence pairs need at least 2 documents, got {num_documents}")
    room = max_length - 3
    ids, lengths, first_lengths, labels = array("i"), array("i"), array("i"), array("b")

    def run(start: int, end: int, target: int) -> int:
        """End of the shortest run of units from `start` with at least `target` tokens, or `end`."""
        stop = start + 1
        while stop < end and offsets[stop] - offsets[start] < target:
            stop += 1
        return stop

    def segment(start: int, stop: int, keep: int) -> list[int]:
        """`keep` tokens of the units, the rest being cut off at the front and at the back at random."""
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
            # As if the longer segment lost one token at a time until both fit.
            a_keep = min(a_length, max((room + 1) // 2, room - b_length))
            b_keep = min(b_length, room - a_keep)
            if max_tokens is not None and len(ids) + a_keep + b_keep + 3 > max_tokens:
                return _rows(ids, lengths, first_lengths, labels)
            ids.extend([cls, *segment(start, middle, a_keep), sep, *segment(b_start, b_stop, b_keep), sep])
            lengths.append(a_keep + b_keep + 3)
            first_lengths.append(a_keep + 2)
            labels.append(is_random)
            # A random pair has not used the units after A: the next pair starts with them.
            start = middle if is_random else stop
    return _rows(ids, lengths, first_lengths, labels)


def _rows(*columns: array) -> list[np.ndarray]:
    """The columns as arrays that share their memory."""
    return [np.frombuffer(column, dtype=np.dtype(column.typecode)) for column in columns]


class ReproducibleCollator(DataCollatorForLanguageModeling):
    """
    The collator of transformers for masked-language modelling, with a masking that is a function of seed, epoch and
    example: the same in whatever order, process or batch an example comes.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer of the rows.
        probability (`float`): Fraction of the tokens to predict.
        seed (`int`): Seed of the masking.
        pad_to_multiple_of (`int`, *optional*): Pad batches to a multiple of this length.
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
        other = copy.copy(self)
        other._epoch = torch.tensor(-1)
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
        # Of evaluations, whose epoch is -1, this makes 0.
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

    It pads the rows and chooses the tokens to predict anew in each epoch: 80 % of them become `[MASK]`, 10 % a random
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

    Raises:
        ValueError: If the tokenizer has no mask or padding token, or `mlm_probability` is out of range.
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
    Collate packed rows of [`pretraining_dataset`] to predict the next token.

    Args:
        rows (`list[dict]`): Rows of equal length with `input_ids`.

    Returns:
        `dict`: `input_ids` and `labels` of shape `(batch_size, sequence_length)`. The last token of a row, a `[SEP]`
        that its position gives away, is not predicted (-100). The model shifts the labels.
    """
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    labels = input_ids.clone()
    labels[:, -1] = -100
    return {"input_ids": input_ids, "labels": labels}
