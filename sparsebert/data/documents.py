"""Text for pre-training: files, Hub datasets or the built-in corpus as a stream of documents."""

import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers.utils import logging

from ..files import COMPRESSIONS


logger = logging.get_logger(__name__)

SPLITS = ("train", "validation", "all")

_WIKITEXT = (".tokens", ".raw")
_FORMATS = (".txt", ".jsonl", *_WIKITEXT)
# Of a WikiText article; its sections have more signs.
_TITLE = re.compile("= [^=].* =")


def load_documents(
    source: str | os.PathLike | Iterable[str | os.PathLike], split: str = "train", holdout_every: int = 100
) -> Iterator[list[str]]:
    """
    Stream the documents of a pre-training corpus.

    About one document in `holdout_every` belongs to the split `"validation"`, by a hash of its text: the split
    depends neither on the order of the documents nor on the run, and equal documents never fall on both sides. Call
    the function once per split.

    Args:
        source (`str`, `os.PathLike` or a list of them):
            `"builtin"` for the documentation of the installed packages (see
            [`builtin_documents`], shuffled), one or more files as in [`read_documents`], or
            `"hub:owner/name"` or `"hub:owner/name:config"` for the column `text` of the `train` split of a dataset of
            the Hub, streamed.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"validation"` or `"all"`.
        holdout_every (`int`, *optional*, defaults to 100):
            Share of the documents held out, as one in this many; at least 2.

    Returns:
        `Iterator[list[str]]`: Documents as lists of one-line paragraphs.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If an argument is not one of the above. Raised by the iterator: if the contents of a file are
            malformed, or the split is empty.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(map(repr, SPLITS))}, got {split!r}")
    if holdout_every < 2:
        raise ValueError(f"holdout_every must be at least 2, got {holdout_every}")
    if source == "builtin":
        documents = _builtin_documents()
    elif isinstance(source, str) and source.startswith("hub:"):
        documents = _hub_documents(source)
    else:
        documents = read_documents(source)

    def select():
        selected = 0
        for document in documents:
            held_out = split != "all" and zlib.crc32("\n".join(document).encode()) % holdout_every == 0
            if split == "all" or held_out == (split == "validation"):
                selected += 1
                yield document
        if not selected:
            raise ValueError(
                f"no document of {source!r} is in the split {split!r} with holdout_every={holdout_every}; "
                "use another holdout_every or a corpus of its own for validation"
            )

    return select()


def read_documents(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> Iterator[list[str]]:
    """
    Stream documents from files, without holding a file in memory.

    `.txt` files have one paragraph a line and a blank line between documents; `.jsonl` files have one object a line,
    whose field `text` is a document with one paragraph a line; in WikiText's `.tokens` and `.raw` files an article is
    a document. All may be compressed (`.txt.gz`, `.jsonl.xz`, ...). The text is UTF-8, with or without a byte order
    mark. Whitespace is folded and NUL characters are removed.

    Args:
        paths (`str`, `os.PathLike` or an iterable of them): The files, read in this order.

    Returns:
        `Iterator[list[str]]`: Documents as non-empty lists of non-empty one-line paragraphs.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If there is no file, or the ending of one is not supported. Raised by the iterator, with the file
            and the line: for text that is not UTF-8, rows that are not JSON objects with a string `text`, and corrupt
            compressed files; and if there is not a single paragraph in the files.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not files:
        raise ValueError("paths is empty: name at least one text file")
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"no such file: {str(file)!r}")
        _file_format(file)
    return _read_files(files)


def _file_format(file: Path) -> tuple[str, str]:
    """Return the format (one of `_FORMATS`) and the compression (`""`, `.gz` or `.xz`) of a file, from its name."""
    compression = file.suffix if file.suffix in COMPRESSIONS else ""
    kind = Path(file.name.removesuffix(compression)).suffix
    if kind not in _FORMATS or file.is_dir():
        allowed = ", ".join(kind + compression for kind in _FORMATS for compression in ("", *COMPRESSIONS))
        raise ValueError(f"{str(file)!r} is not a supported text file; allowed are files ending in {allowed}")
    return kind, compression


def _read_files(files: list[Path]) -> Iterator[list[str]]:
    documents = empty = 0
    for file in files:
        kind, _ = _file_format(file)
        for document in _jsonl_documents(file) if kind == ".jsonl" else _text_documents(file, kind in _WIKITEXT):
            if document:
                documents += 1
                yield document
            else:
                empty += 1
    if empty:
        logger.warning(f"Skipped {empty} documents without text among {documents + empty}.")
    if not documents:
        raise ValueError(f"no paragraph of text in {', '.join(repr(str(file)) for file in files)}")


def _decoded_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield `(number from 1, text)` for the lines of a file."""
    _, compression = _file_format(file)
    number = 0
    try:
        with COMPRESSIONS.get(compression, open)(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                # Decoded line by line, for the line number in the error.
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\0", "")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}:{number}: not UTF-8 text ({error.reason} at byte {error.start} of the line)"
        ) from error
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{file}: corrupt {compression} file after line {number} ({error})") from error


def _text_documents(file: Path, wikitext: bool) -> Iterator[list[str]]:
    document: list[str] = []
    for _, line in _decoded_lines(file):
        paragraph = " ".join(line.split())
        ends = _TITLE.fullmatch(paragraph) if wikitext else not paragraph
        if ends and document:
            yield document
            document = []
        if paragraph:
            document.append(paragraph)
    if document:
        yield document


def _jsonl_documents(file: Path) -> Iterator[list[str]]:
    for number, line in _decoded_lines(file):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{number}: not a JSON object ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            found = f"fields {sorted(row)}" if isinstance(row, dict) else type(row).__name__
            raise ValueError(f'{file}:{number}: expected a JSON object with a string field "text", got {found}')
        yield _paragraphs(row["text"])


def _paragraphs(text: str) -> list[str]:
    folded = (" ".join(line.split()) for line in text.replace("\0", "").splitlines())
    return [paragraph for paragraph in folded if paragraph]


def _builtin_documents() -> Iterator[list[str]]:
    from .builtin_corpus import builtin_documents

    # The corpus is sorted by package; a run that reads only the beginning should see all of them.
    documents = sorted(builtin_documents(), key=lambda document: zlib.crc32(document.module.encode()))
    return (document.paragraphs for document in documents)


def _hub_documents(source: str) -> Iterator[list[str]]:
    _, name, *config = source.split(":")
    if not name or len(config) > 1:
        raise ValueError(f"source must be 'hub:owner/name' or 'hub:owner/name:config', got {source!r}")

    import datasets

    rows = datasets.load_dataset(name, *config, split="train", streaming=True)

    def read():
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise ValueError(f"{source!r} has no text column 'text'; its columns are {sorted(row)}")
            document = _paragraphs(row["text"])
            if document:
                yield document

    return read()
