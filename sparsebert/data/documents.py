"""Text for pre-training: files, Hub datasets or the built-in corpus as a stream of documents."""

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers.utils import logging

from ..checks import check_choice, check_range
from ..files import COMPRESSIONS, DECOMPRESSION_ERRORS, is_unicode, open_binary


logger = logging.get_logger(__name__)

SPLITS = ("train", "validation", "all")

_WIKITEXT = (".tokens", ".raw")
_FORMATS = (".txt", ".jsonl", *_WIKITEXT)
# Title of a WikiText article. The titles of its sections have more signs.
_TITLE = re.compile("= [^=].* =")


def load_documents(
    source: str | os.PathLike | Iterable[str | os.PathLike], split: str = "train", holdout_every: int = 100
) -> Iterator[list[str]]:
    """
    Stream the documents of a pre-training corpus.

    About one document in `holdout_every` belongs to the split `"validation"`, chosen by a hash of its text: the split
    does not depend on the order of the documents or on the run, and copies of a document are in the same split. Call
    this function once per split.

    Args:
        source (`str`, `os.PathLike` or a list of them):
            `"builtin"` for the documentation of the installed packages in random order (see [`builtin_documents`]);
            one or more files (see [`read_documents`]); or `"hub:owner/name"` or `"hub:owner/name:config"` to stream
            the column `text` of the `train` split of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"validation"` or `"all"`.
        holdout_every (`int`, *optional*, defaults to 100):
            Hold out one document in this many; at least 2.

    Returns:
        `Iterator[list[str]]`: Documents as lists of one-line paragraphs.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If an argument has another value. Raised by the iterator: if a file is malformed, or the split is
            empty.
    """
    check_choice("split", split, SPLITS)
    check_range("holdout_every", holdout_every, 2)
    if source == "builtin":
        documents = _builtin_documents()
    elif isinstance(source, str) and source.startswith("hub:"):
        documents = _hub_documents(source)
    else:
        documents = read_documents(source)

    def select() -> Iterator[list[str]]:
        selected = 0
        for document in documents:
            held_out = split != "all" and zlib.crc32("\n".join(document).encode()) % holdout_every == 0
            if split == "all" or held_out == (split == "validation"):
                selected += 1
                yield document
        if not selected:
            raise ValueError(
                f"the split {split!r} of {source!r} is empty with holdout_every={holdout_every}; use another "
                "holdout_every, or a separate corpus for validation"
            )

    return select()


def read_documents(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> Iterator[list[str]]:
    """
    Stream documents from files, without loading a whole file into memory.

    `.txt` files have one paragraph per line and a blank line between documents. `.jsonl` files have one object per
    line, whose field `text` is a document with one paragraph per line. In WikiText's `.tokens` and `.raw` files every
    article is a document. All may be compressed (`.txt.gz`, `.jsonl.xz`, ...). The text is UTF-8, with or without a
    byte order mark. Runs of whitespace become one space, and NUL characters are removed.

    Args:
        paths (`str`, `os.PathLike` or an iterable of them): The files, in the order to read them.

    Returns:
        `Iterator[list[str]]`: Documents as non-empty lists of non-empty one-line paragraphs.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If no file is given, or one has an unsupported suffix. Raised by the iterator, with the file and
            the line: if text is not UTF-8, a row is not a JSON object with a string `text`, or a compressed file is
            corrupt; and if the files have no paragraph at all.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not files:
        raise ValueError("paths is empty: give at least one text file")
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"no such file: {str(file)!r}")
        _file_format(file)
    return _read_files(files)


def _file_format(file: Path) -> str:
    """The format of a file (one of `_FORMATS`), from its name."""
    compression = file.suffix if file.suffix in COMPRESSIONS else ""
    kind = Path(file.name.removesuffix(compression)).suffix
    if kind not in _FORMATS or file.is_dir():
        allowed = ", ".join(kind + compression for kind in _FORMATS for compression in ("", *COMPRESSIONS))
        raise ValueError(f"{str(file)!r} is not a supported text file; its name must end in {allowed}")
    return kind


def _read_files(files: list[Path]) -> Iterator[list[str]]:
    def read() -> Iterator[list[str]]:
        for file in files:
            kind = _file_format(file)
            yield from _jsonl_documents(file) if kind == ".jsonl" else _text_documents(file, kind in _WIKITEXT)

    return _with_text(read(), ", ".join(repr(str(file)) for file in files))


def _with_text(documents: Iterable[list[str]], where: str) -> Iterator[list[str]]:
    """The documents that are not empty; the others are counted."""
    used = empty = 0
    for document in documents:
        if document:
            used += 1
            yield document
        else:
            empty += 1
    if empty:
        logger.warning(f"Skipped {empty} documents without text among {used + empty}.")
    if not used:
        raise ValueError(f"no paragraph of text in {where}")


def _decoded_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, counted from 1."""
    number = 0
    try:
        with open_binary(file) as stream:
            for number, line in enumerate(stream, start=1):
                # Decoded line by line, so that an error can name the line.
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\0", "")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}:{number}: not UTF-8 text ({error.reason} at byte {error.start} of the line)"
        ) from error
    except DECOMPRESSION_ERRORS as error:
        raise ValueError(f"{file}: corrupt {file.suffix} file after line {number} ({error})") from error


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
        except RecursionError:
            raise ValueError(f"{file}:{number}: nested too deeply") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            found = f"fields {sorted(row)}" if isinstance(row, dict) else type(row).__name__
            raise ValueError(f'{file}:{number}: expected a JSON object with a string field "text", got {found}')
        if not row["text"].isascii() and not is_unicode(row["text"]):
            raise ValueError(f"{file}:{number}: the text has half of a surrogate pair, which is no character")
        yield _paragraphs(row["text"])


def _paragraphs(text: str) -> list[str]:
    folded = (" ".join(line.split()) for line in text.replace("\0", "").splitlines())
    return [paragraph for paragraph in folded if paragraph]


def _builtin_documents() -> Iterator[list[str]]:
    from .builtin_corpus import builtin_documents

    # The corpus is sorted by package; a run that reads only its beginning should see all packages.
    documents = sorted(builtin_documents(), key=lambda document: zlib.crc32(document.module.encode()))
    return (document.paragraphs for document in documents)


def _hub_documents(source: str) -> Iterator[list[str]]:
    _, name, *config = source.split(":")
    if not name or len(config) > 1:
        raise ValueError(f"source must be 'hub:owner/name' or 'hub:owner/name:config', got {source!r}")

    import datasets

    rows = datasets.load_dataset(name, *config, split="train", streaming=True)

    def read() -> Iterator[list[str]]:
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise ValueError(f"{source!r} has no text column 'text'; its columns are {sorted(row)}")
            yield _paragraphs(row["text"])

    return _with_text(read(), repr(source))
