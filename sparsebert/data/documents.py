"""Text for pre-training: files, Hub datasets or the built-in corpus as a stream of documents."""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from huggingface_hub.errors import HTTPError
from transformers.utils import logging

from ..checks import check_choice, check_range, shortened
from ..file_kinds import check_readable
from ..files import COMPRESSIONS, DECOMPRESSION_ERRORS, is_unicode, open_binary


logger = logging.get_logger(__name__)

SPLITS = ("train", "validation", "all")

_WIKITEXT = (".tokens", ".raw")
FORMATS = (".txt", ".jsonl", *_WIKITEXT)
# Title of a WikiText article. The titles of its sections have more signs.
_TITLE = re.compile("= [^=].* =")


class Documents(Iterator[list[str]]):
    """The documents of a corpus, to be read once, and what finds the fingerprint of their text."""

    def __init__(self, documents: Iterator[list[str]], find_fingerprint: Callable[[], str | None]):
        self._documents = documents
        self._find_fingerprint = find_fingerprint
        self._begun = False

    def __next__(self) -> list[str]:
        self._begun = True
        return next(self._documents)

    def fingerprint(self) -> str | None:
        """A hash that changes with the text; `None` if it cannot be had without reading the text."""
        if self._begun:
            raise ValueError("documents were read before, at least some of them: load them again for each use")
        return self._find_fingerprint()


def load_documents(
    source: str | os.PathLike | Iterable[str | os.PathLike], split: str = "train", holdout_every: int = 100
) -> Documents:
    """
    Stream the documents of a pre-training corpus.

    About one document in `holdout_every` belongs to the split `"validation"`, chosen by a hash of its text: the split
    does not depend on the order of the documents or on the run, and copies of a document are in the same split. Call
    this function once per split.

    `.txt` files have one paragraph per line and a blank line between documents. `.jsonl` files have one object per
    line, whose field `text` is a document with one paragraph per line. In WikiText's `.tokens` and `.raw` files every
    article is a document. All may be compressed (`.txt.gz`, `.jsonl.xz`, ...). The text is UTF-8, with or without a
    byte order mark. Runs of whitespace become one space, and NUL characters are removed. No file is loaded into memory
    as a whole.

    Args:
        source (`str`, `os.PathLike` or a list of them):
            `"builtin"` for the documentation of the installed packages in random order (see [`builtin_documents`]);
            one or more files, in the order to read them; or `"hub:owner/name"` or `"hub:owner/name:config"` to stream
            the column `text` of the `train` split of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"validation"` or `"all"`.
        holdout_every (`int`, *optional*, defaults to 100):
            Hold out one document in this many; at least 2.

    Returns:
        [`Documents`]: The documents as non-empty lists of non-empty one-line paragraphs. Its `fingerprint` is a hash
        of the text. What is wrong with the text is a `ValueError` of the iterator that names file and line.
    """
    check_choice("split", split, SPLITS)
    check_range("holdout_every", holdout_every, 2)
    if source == "builtin":
        corpus = _builtin_documents()
        documents: Iterator[list[str]] = iter(corpus)
        text: Callable[[], str | None] = lambda: _hash(json.dumps(document).encode() for document in corpus)  # noqa: E731
    elif isinstance(source, str) and source.startswith("hub:"):
        documents, text = _hub_documents(source)
    else:
        files = _text_files(source)
        documents, text = _read_files(files), lambda: _files_hash(files)

    def fingerprint() -> str | None:
        found = text()
        return found if found is None or split == "all" else f"{found}-{split}-{holdout_every}"

    return Documents(documents_of(documents, source, split, holdout_every), fingerprint)


def first_texts(source: str, number: int) -> list[str]:
    """The first documents of a source, see [`load_documents`], each as a text."""
    return ["\n".join(document) for document in islice(load_documents(source, "all"), number)]


def documents_of(documents: Iterable[list[str]], source: Any, split: str, holdout_every: int) -> Iterator[list[str]]:
    """Yield the documents of a split of a source; raises a `ValueError` if there is none."""
    empty = True
    for document in documents:
        if in_split(document, split, holdout_every):
            empty = False
            yield document
    if empty:
        raise ValueError(
            f"the split {split!r} of {source!r} is empty, since about one document in {holdout_every} is held out: "
            "give more documents (in a text file, a blank line separates them), or a separate corpus as validation"
        )


def in_split(document: list[str], split: str, holdout_every: int = 100) -> bool:
    """Whether a document belongs to a split, see [`load_documents`]."""
    if split == "all":
        return True
    return (zlib.crc32("\n".join(document).encode()) % holdout_every == 0) == (split == "validation")


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _files_hash(files: list[Path]) -> str:
    """A hash of the contents of files, as they are stored, and of how they are read."""

    def parts() -> Iterator[bytes]:
        for file in files:
            kind = text_format(file, COMPRESSIONS)
            yield f"\0{kind}\0{file.suffix in COMPRESSIONS}\0{file.stat().st_size}\0".encode()
            with open(file, "rb") as stream:
                while part := stream.read(2**20):
                    yield part

    return _hash(parts())


def _text_files(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Path]:
    files = [Path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not files:
        raise ValueError("paths is empty: give at least one text file")
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"no such file: {str(file)!r}")
        if file.is_dir():
            raise ValueError(f"{str(file)!r} is a folder; name its files")
        check_readable(file)
        text_format(file, COMPRESSIONS)
    return files


def text_format(file: str | Path, compressions: Collection[str], uncompressed: tuple[str, ...] = ()) -> str:
    """
    The format of a file, from its name: one of `FORMATS`, to which the name of a compression may be added, or another
    that is accepted without one.
    """
    path = Path(file)
    if path.suffix in uncompressed:
        return path.suffix
    kind = Path(path.stem if path.suffix in compressions else path.name).suffix
    if kind not in FORMATS:
        raise ValueError(
            f"{str(file)!r} is not a supported text file; its name must end in {', '.join(FORMATS)} (also with "
            f"{', '.join([*compressions])} after it)" + "".join(f" or {other}" for other in uncompressed)
        )
    return kind


def _read_files(files: list[Path]) -> Iterator[list[str]]:
    documents = (file_documents(file, text_format(file, COMPRESSIONS), open_binary) for file in files)
    return _with_text(chain.from_iterable(documents), ", ".join(repr(str(file)) for file in files))


def file_documents(file: str | Path, kind: str, open_file: Callable[[Any], IO[bytes]]) -> Iterator[list[str]]:
    """The documents, some of which may be empty, of a file or URL of a format that `open_file` opens decompressed."""
    lines = _decoded_lines(file, open_file)
    return _jsonl_documents(file, lines) if kind == ".jsonl" else _text_documents(lines, kind in _WIKITEXT)


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


def _decoded_lines(file: str | Path, open_file: Callable[[Any], IO[bytes]]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, counted from 1."""
    number = 0
    try:
        with open_file(file) as stream:
            for number, line in enumerate(stream, start=1):
                # Decoded line by line, so that an error can name the line.
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\0", "")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}:{number}: not UTF-8 text ({error.reason} at byte {error.start} of the line)"
        ) from error
    except (*DECOMPRESSION_ERRORS, OSError) as error:
        # What bz2 raises is an OSError without a number.
        of_bz2 = type(error) is OSError and error.errno is None and Path(file).suffix == ".bz2"
        if isinstance(error, OSError) and not isinstance(error, DECOMPRESSION_ERRORS) and not of_bz2:
            raise
        raise ValueError(f"{file}: corrupt {Path(file).suffix} file after line {number} ({error})") from error


def _text_documents(lines: Iterable[tuple[int, str]], wikitext: bool) -> Iterator[list[str]]:
    document: list[str] = []
    for _, line in lines:
        paragraph = " ".join(line.split())
        ends = _TITLE.fullmatch(paragraph) if wikitext else not paragraph
        if ends and document:
            yield document
            document = []
        if paragraph:
            document.append(paragraph)
    if document:
        yield document


def _jsonl_documents(file: str | Path, lines: Iterable[tuple[int, str]]) -> Iterator[list[str]]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # also a number with too many digits
            raise ValueError(f"{file}:{number}: not a JSON object ({error})") from error
        except RecursionError:
            raise ValueError(f"{file}:{number}: nested too deeply") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            found = f"fields {sorted(row)}" if isinstance(row, dict) else type(row).__name__
            raise ValueError(f'{file}:{number}: expected a JSON object with a string field "text", got {found}')
        if not row["text"].isascii() and not is_unicode(row["text"]):
            raise ValueError(f"{file}:{number}: the text has half of a surrogate pair, which is not a character")
        yield _paragraphs(row["text"])


def _paragraphs(text: str) -> list[str]:
    folded = (" ".join(line.split()) for line in text.replace("\0", "").splitlines())
    return [paragraph for paragraph in folded if paragraph]


def _builtin_documents() -> list[list[str]]:
    from .builtin_corpus import builtin_documents

    # The corpus is sorted by package; a run that reads only its beginning should see all packages.
    documents = sorted(builtin_documents(), key=lambda document: zlib.crc32(document.module.encode()))
    return [document.paragraphs for document in documents]


def _hub_documents(source: str) -> tuple[Iterator[list[str]], Callable[[], str | None]]:
    """The documents of a dataset on the Hub, and what finds its commit."""
    name, config = hub_source(source)

    import datasets

    rows = datasets.load_dataset(name, *config, split="train", streaming=True)

    documents = (document_of(row, f"row {number} of {source!r}") for number, row in enumerate(rows))

    def find_commit() -> str | None:
        from huggingface_hub import HfApi

        try:
            commit = HfApi().dataset_info(name).sha
        except (OSError, HTTPError):  # then nothing says whether it is the same text as before
            return None
        return None if commit is None else _hash([repr((name, config, commit)).encode()])

    return _with_text(documents, repr(source)), find_commit


def hub_source(source: str) -> tuple[str, list[str]]:
    """Id and configuration, if there is one, of a source `hub:owner/name` or `hub:owner/name:config`."""
    _, name, *config = source.split(":")
    if not name or len(config) > 1:
        raise ValueError(f"source must be 'hub:owner/name' or 'hub:owner/name:config', got {source!r}")
    return name, config


def document_of(row: Mapping[str, Any], place: str) -> list[str]:
    """The document of a row of a dataset; raises a `ValueError` that names the place of the row if it has none."""
    if "text" not in row:
        raise ValueError(f"{place} has no column 'text'; its columns are {sorted(row)}")
    if not isinstance(row["text"], str):
        raise ValueError(f"{place} has no text in the column 'text', but {shortened(repr(row['text']))}")
    return _paragraphs(row["text"])
