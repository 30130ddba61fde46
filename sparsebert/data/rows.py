"""Rows of token ids for pre-training, made of documents one part at a time: packed text and sentence pairs."""

import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging


if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)


# A corpus with a larger share of repeated paragraphs than this is probably a mistake.
_DUPLICATE_WARNING = 0.2
# Repeated paragraphs are looked for among this many, which bounds the memory that it takes.
_DUPLICATES_AMONG = 500_000
# With a larger share of unknown tokens than this, the tokenizer is probably that of another language.
_UNKNOWN_WARNING = 0.2
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z])")
# Units of text that are tokenized at once, and pairs that are handed on at once.
_UNITS = 2000
_PAIRS = 10_000


class Piece(NamedTuple):
    """A part of a tokenized text, whose units are sentences or paragraphs."""

    ids: np.ndarray  # the tokens, (num_tokens,)
    sizes: np.ndarray  # number of tokens of each unit, (num_units,)
    ends: list[int]  # for each document that ends in this part, the number of units before its end


class TokenizedText:
    """
    Token ids of a corpus as an iterable of [`Piece`]s, up to a number of tokens. Units are sentences or paragraphs;
    units and documents without a token are left out.
    """

    def __init__(
        self,
        documents: Iterable[list[str]],
        tokenizer: "PreTrainedTokenizerBase",
        sentences: bool,
        max_tokens: int | None = None,
        quiet: bool = False,
    ):
        self._documents = documents
        self._tokenizer = tokenizer
        self._sentences = sentences
        self._max_tokens = max_tokens
        self._quiet = quiet
        self._reserved = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")}
        self._seen: set[int] = set()
        self._paragraphs = self._compared = self._duplicates = self._empty = self._tokens = self._unknown = 0

    def __iter__(self) -> Iterator[Piece]:
        stream = self._units()
        begun, documents = False, 0  # whether the present document has a token, and how many have ended
        progress = tqdm(
            desc="Tokenizing", total=self._max_tokens, unit="token", unit_scale=True,
            disable=True if self._quiet else None,
        )  # fmt: skip
        with progress:
            while batch := list(islice(stream, _UNITS)):
                texts = [unit for unit in batch if unit is not None]
                encoded = iter(self._encode(texts) if texts else ())
                tokens, sizes, ends = array("i"), array("i"), []
                for unit in batch:
                    if unit is None:
                        if begun:
                            ends.append(len(sizes))
                        begun = False
                    elif found := next(encoded):
                        tokens.extend(found)
                        sizes.append(len(found))
                        begun = True
                    else:
                        self._empty += 1
                ids = np.frombuffer(tokens, dtype=np.int32)
                self._tokens += len(ids)
                self._unknown += int(np.count_nonzero(ids == self._tokenizer.unk_token_id))
                progress.update(len(ids))
                yield Piece(ids, np.frombuffer(sizes, dtype=np.int32), ends)
                documents += len(ends)
                enough = documents + begun > 1 or not self._sentences  # pairs of sentences need a second document
                if enough and self._max_tokens is not None and self._tokens >= self._max_tokens:
                    break

    def _encode(self, texts: list[str]) -> list[list[int]]:
        settings = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        encoded = self._tokenizer(texts, verbose=False, **settings)["input_ids"]
        # A text may speak of "[MASK]" or "[CLS]", which then is a word: rows tell by the tokens where documents begin.
        for index, ids in enumerate(encoded):
            if not self._reserved.isdisjoint(ids):
                encoded[index] = self._tokenizer(texts[index], verbose=False, split_special_tokens=True, **settings)[
                    "input_ids"
                ]
        return encoded

    def _units(self) -> Iterator[str | None]:
        """Yield the units of the documents, and `None` at the end of each document."""
        for document in self._documents:
            for paragraph in document:
                self._paragraphs += 1
                if self._compared < _DUPLICATES_AMONG:
                    digest = hash(paragraph)
                    self._compared += 1
                    self._duplicates += digest in self._seen
                    self._seen.add(digest)
                yield from _SENTENCE_END.split(paragraph) if self._sentences else (paragraph,)
            yield None

    def check(self) -> None:
        """Warn of what is odd about the text that was read; a `ValueError` if all tokens are unknown."""
        if self._empty:
            logger.warning(f"Skipped {self._empty} pieces of text without any token in {self._paragraphs} paragraphs.")
        if self._duplicates > _DUPLICATE_WARNING * self._compared:
            logger.warning(
                f"{self._duplicates} of {self._compared} paragraphs ({self._duplicates / self._compared:.0%}) repeat "
                "an earlier one; consider removing duplicates from the corpus."
            )
        unknown = self._unknown / max(self._tokens, 1)
        if unknown > _UNKNOWN_WARNING:
            name = self._tokenizer.name_or_path or type(self._tokenizer).__name__
            message = f"{unknown:.0%} of the tokens are {self._tokenizer.unk_token}"
            if unknown == 1:
                raise ValueError(f"{message}: tokenizer {name!r} does not fit this text")
            logger.warning(f"{message}: tokenizer {name!r} may not fit this text.")
        logger.info(f"Read {self._paragraphs} paragraphs, {self._tokens} tokens.")


def packed_rows(
    text: Iterable[Piece],
    cls: int,
    sep: int,
    max_length: int,
    max_tokens: int | None = None,
    pack_documents: bool = False,
) -> Iterator["pa.Table"]:
    """
    Rows of exactly `max_length` tokens: contiguous text, with a `[SEP]` between documents, and with `pack_documents`
    a `[CLS]` after it.
    """
    room, most = max_length - 2, None if max_tokens is None else max_tokens // max_length
    left, between, count = np.empty(0, dtype=np.int32), False, 0
    boundary = [sep, cls] if pack_documents else [sep]
    for ids, sizes, ends in text:
        # Where a document begins: before the token that follows the end of another one.
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)[ends].tolist()
        if len(ids):
            places = [0] * between + [start for start in starts if start < len(ids)]
            between = bool(starts) and starts[-1] == len(ids)
            where = np.repeat(np.array(places, dtype=np.int64), len(boundary))
            left = np.concatenate([left, np.insert(ids, where, boundary * len(places))])
        else:
            between = between or bool(starts)
        rows = len(left) // room
        if most is not None:
            rows = min(rows, most - count)
        if rows:
            packed = np.empty((rows, max_length), dtype=np.int32)
            packed[:, 0], packed[:, -1] = cls, sep
            packed[:, 1:-1] = left[: rows * room].reshape(rows, room)
            left = left[rows * room :]
            count += rows
            lengths = np.full(rows, max_length)
            yield as_table(packed.reshape(-1), lengths, lengths, cls, sep)
        if count == most:
            return
    if not count:
        raise ValueError(f"the text has only {len(left)} tokens, too few for one row of max_length={max_length}")


class StoredText:
    """
    Token ids of a corpus in files of an empty folder, from which any document can be read without the others being in
    memory: `ids` `(num_tokens,)`; `unit_offsets` `(num_units + 1,)`, where each unit starts in `ids`; and
    `document_offsets` `(num_documents + 1,)`, where each document starts among the units.
    """

    def __init__(self, text: Iterable[Piece], folder: Path):
        paths = [folder / name for name in ("ids", "unit_offsets", "document_offsets")]
        tokens = units = last = 0
        with open(paths[0], "wb") as ids_file, open(paths[1], "wb") as units_file, open(paths[2], "wb") as documents:
            units_file.write(np.int64(0).tobytes())
            documents.write(np.int64(0).tobytes())
            for ids, sizes, ends in text:
                ids_file.write(ids.tobytes())
                units_file.write((tokens + np.cumsum(sizes, dtype=np.int64)).tobytes())
                if ends:
                    documents.write((units + np.array(ends, dtype=np.int64)).tobytes())
                    last = units + ends[-1]
                tokens, units = tokens + len(ids), units + len(sizes)
            if units > last:  # reading stopped inside a document
                documents.write(np.int64(units).tobytes())
        kinds = (np.int32, np.int64, np.int64)
        self.ids, self.unit_offsets, self.document_offsets = (
            np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
            for path, dtype in zip(paths, kinds, strict=True)
        )


class TextInMemory:
    """A [`StoredText`] in memory, for a text of bounded size whose last document ends."""

    def __init__(self, text: Iterable[Piece]):
        pieces = list(text)
        self.ids = np.concatenate([np.empty(0, dtype=np.int32), *(piece.ids for piece in pieces)])
        sizes = np.concatenate([np.zeros(1, dtype=np.int64), *(piece.sizes for piece in pieces)])
        self.unit_offsets = np.cumsum(sizes)
        units = np.cumsum([0, *(len(piece.sizes) for piece in pieces)])
        ends = [before + end for before, piece in zip(units, pieces, strict=False) for end in piece.ends]
        self.document_offsets = np.array([0, *ends], dtype=np.int64)


def pair_rows(
    text: StoredText | TextInMemory,
    cls: int,
    sep: int,
    max_length: int,
    max_tokens: int | None,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Iterator["pa.Table"]:
    """Rows of next-sentence pairs, of whole units up to the target length or beyond, cut at the length of a row."""
    documents, num_documents = text.document_offsets, len(text.document_offsets) - 1
    if num_documents < 2:
        raise ValueError(f"next-sentence pairs need at least 2 documents, got {num_documents}")
    room, used = max_length - 3, 0
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    first_lengths: list[int] = []
    labels: list[bool] = []

    def run(start: int, end: int, target: int) -> list[int]:
        """Where each unit starts of the shortest run from `start` with at least `target` tokens, or up to `end`."""
        # Every unit has a token, so that the run has at most `target` of them.
        offsets = text.unit_offsets[start : min(start + max(target, 1), end) + 1]
        stop = 1 + int(np.searchsorted(offsets[1:], offsets[0] + target))
        return offsets[: stop + 1].tolist()

    def segment(first: int, last: int, keep: int) -> np.ndarray:
        """`keep` of these tokens, the rest being cut off at the front and at the back at random."""
        front = first + rng.binomial(last - first - keep, 0.5)
        return text.ids[front : front + keep]

    def flush() -> "pa.Table":
        table = as_table(np.concatenate(ids), np.array(lengths), np.array(first_lengths), cls, sep, np.array(labels))
        for column in (ids, lengths, first_lengths, labels):
            column.clear()
        return table

    for document in range(num_documents):
        start, end = documents[document : document + 2].tolist()
        while start < end:
            target = int(rng.integers(2, room + 1)) if rng.random() < short_seq_prob else room
            offsets = run(start, end, target)
            units = len(offsets) - 1
            middle = int(rng.integers(1, units)) if units > 1 else units
            is_random = middle == units or rng.random() < 0.5
            a_first, a_last = offsets[0], offsets[middle]
            if is_random:
                other = int(rng.integers(num_documents - 1))
                other += other >= document
                b_end = int(documents[other + 1])
                b_offsets = run(int(rng.integers(documents[other], b_end)), b_end, target - (a_last - a_first))
                b_first, b_last = b_offsets[0], b_offsets[-1]
            else:
                b_first, b_last = a_last, offsets[-1]
            # As if the longer segment lost one token at a time until both fit.
            a_keep = min(a_last - a_first, max((room + 1) // 2, room - (b_last - b_first)))
            b_keep = min(b_last - b_first, room - a_keep)
            length = a_keep + b_keep + 3
            if max_tokens is not None and used + length > max_tokens:
                if labels:
                    yield flush()
                return
            used += length
            row = np.empty(length, dtype=np.int32)
            row[0], row[a_keep + 1], row[-1] = cls, sep, sep
            row[1 : a_keep + 1] = segment(a_first, a_last, a_keep)
            row[a_keep + 2 : -1] = segment(b_first, b_last, b_keep)
            ids.append(row)
            lengths.append(length)
            first_lengths.append(a_keep + 2)
            labels.append(is_random)
            # A random pair has not used the units after A: the next pair starts with them.
            start += middle if is_random else units
            if len(labels) == _PAIRS:
                yield flush()
    if labels:
        yield flush()


def as_table(
    ids: np.ndarray,
    lengths: np.ndarray,
    first_lengths: np.ndarray,
    cls: int,
    sep: int,
    labels: np.ndarray | None = None,
) -> "pa.Table":
    """
    A table of rows, concatenated in `ids` `(num_tokens,)`. `(num_rows,)` each are their lengths, those of segment A
    with its special tokens, and as labels whether B is random.
    """
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    positions = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    columns = {
        "input_ids": ids,
        "token_type_ids": (positions >= np.repeat(first_lengths, lengths)).astype(np.int8),
        "special_tokens_mask": ((ids == cls) | (ids == sep)).astype(np.int8),
    }
    # Large lists have 64-bit offsets, for corpora of 2**31 tokens and more.
    columns = {name: pa.LargeListArray.from_arrays(offsets, values) for name, values in columns.items()}
    if labels is not None:
        columns["next_sentence_label"] = pa.array(labels.astype(np.int8))
    return pa.Table.from_pydict(columns)
