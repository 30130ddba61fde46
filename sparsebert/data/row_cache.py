"""A cache of what is made from a text: rows of token ids and trained tokenizers, in files that processes share."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from filelock import FileLock, Timeout
from huggingface_hub.utils.sha import sha_fileobj
from transformers.utils import logging

from ..files import NO_ROOM, make_folder, take_lock


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

# Part of every key: increase it whenever the same text and settings give other files.
FORMAT = 2


def fingerprint_of(documents: object) -> str | None:
    """What identifies the text of documents from [`load_documents`]; `None` for others, whose text is not kept."""
    find: Callable[[], str | None] | None = getattr(documents, "fingerprint", None)
    return None if find is None else find()


def key_of(*parts: Any) -> str:
    """A hash of values that JSON can express."""
    text = json.dumps([FORMAT, tokenizers.__version__, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cached_file(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """
    A file that is made once: by the first process that asks, while others on the machine wait for it. Its name says
    all that its content depends on. `write` writes it aside, in a folder of its own, of which nothing stays. A file
    beside it holds its hash: one that is damaged is made again, with a warning. If nothing can be written to the
    folder of `datasets`, the file is made for this process alone, with a warning.
    """
    path = folder / name
    if _is_whole(path):
        return path
    try:
        if str(folder).startswith("~"):
            raise FileNotFoundError(f"cache_dir {folder} needs a home folder, and there is none")
        make_folder(folder, "cache_dir")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"cache_dir {folder} cannot be written to: name another folder")
    except OSError as error:
        if folder != cache_folder(None):
            raise
        logger.warning_once(f"{error}; what is made from texts is not kept: set HF_DATASETS_CACHE or cache_dir.")
        folder = cache_folder(None, kept=False)
        path = folder / name
    lock = FileLock(f"{path}.lock")
    try:
        take_lock(lock, timeout=0)
    except Timeout:
        logger.info(f"Waiting for another process, which is making {path}.")
        take_lock(lock)
    aside = folder / f"{name}.incomplete"
    try:
        if not _is_whole(path):
            if path.exists():
                logger.warning(f"{path} is damaged, or of another version, and is made again.")
            shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed: nobody else has the lock
            aside.mkdir()
            write(aside / name)
            for made in (_hash_file(aside / name), aside / name):  # the file itself says that both are there
                os.replace(made, folder / made.name)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise OSError(
            error.errno,
            f"cache_dir {folder} has no room for the tokenized text ({os.strerror(error.errno)}), and what there was "
            "of it is removed: make room, or name another folder",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        lock.release()
    return path


def _hash_file(path: Path) -> Path:
    """The file beside another one, written anew, that holds its hash."""
    with path.open("rb") as file:
        content = sha_fileobj(file).hex()
    path = path.with_name(f"{path.name}.sha256")
    path.write_text(content, encoding="utf-8")
    return path


def _is_whole(path):
    """Whether a file is there, and the one that was written."""
    try:
        said = path.with_name(f"{path.name}.sha256").read_text(encoding="utf-8")
        with path.open("rb") as file:
            return sha_fileobj(file).hex() == said
    except (OSError, ValueError):
        return False


def cache_folder(cache_dir: str | os.PathLike | None, kept: bool = True) -> Path:
    """
    The folder that rows are kept in, in the one that a user named or that of `datasets`; or, if they are not for other
    processes too, a folder that is deleted when this process ends.
    """
    import datasets
    from datasets.fingerprint import get_temporary_cache_files_directory

    if not kept:
        return Path(get_temporary_cache_files_directory())
    folder = os.path.expanduser(datasets.config.HF_DATASETS_CACHE if cache_dir is None else cache_dir)
    return Path(folder, "sparsebert")


def cached_rows(
    tables: "Callable[[Path], Iterator[pa.Table]]",
    fingerprint: str | None,
    tokenizer: "PreTrainedTokenizerBase",
    settings: Mapping[str, Any],
    cache_dir: str | os.PathLike | None = None,
) -> "datasets.Dataset":
    """
    A dataset whose rows are written to one Arrow file the first time, and mapped into memory. They depend on the text,
    the tokenizer and the settings; without a fingerprint of the text they are not kept.

    `tables(folder)` makes the rows, with a folder for files that it needs meanwhile.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    kept = fingerprint is not None
    key = key_of(fingerprint, _tokenizer_key(tokenizer), dict(settings)) if kept else os.urandom(16).hex()

    def write(path: Path) -> None:
        (path.parent / "text").mkdir()
        with ArrowWriter(path=str(path), fingerprint=key) as writer:
            for table in tables(path.parent / "text"):
                writer.write_table(table)
            writer.finalize()

    return datasets.Dataset.from_file(str(cached_file(cache_folder(cache_dir, kept), f"rows-{key}.arrow", write)))


def _tokenizer_key(tokenizer: "PreTrainedTokenizerBase") -> list[Any]:
    """What the ids of a tokenizer depend on."""
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        from datasets.fingerprint import Hasher

        return [*special, Hasher.hash(tokenizer)]
    state = json.loads(backend.to_str())
    # Every call of the tokenizer sets these two.
    return [*special, {name: value for name, value in state.items() if name not in ("truncation", "padding")}]


def cached_json(
    make: Callable[[], Any], fingerprint: str | None, settings: Iterable[Any], cache_dir: str | os.PathLike | None
) -> Any:
    """What `make` returns, as JSON can express it: kept in a file if the text has a fingerprint."""
    if fingerprint is None:
        return make()

    def write(path: Path) -> None:
        path.write_text(json.dumps(make()), encoding="utf-8")

    path = cached_file(cache_folder(cache_dir), f"vocabulary-{key_of(fingerprint, *settings)}.json", write)
    return json.loads(path.read_text(encoding="utf-8"))
