"""Files that every part writes: output folders, metrics, compressed text."""

import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from accelerate import PartialState


# Functions that open a compressed file, by its suffix.
COMPRESSIONS = {".gz": gzip.open, ".xz": lzma.open}
# What reading a damaged compressed file raises.
DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


def check_output_dir(path, overwrite=False, resume=False):
    """
    Raises:
        FileExistsError: If the folder holds anything, unless told to overwrite or resume.
    """
    if not (overwrite or resume) and Path(path).is_dir() and any(Path(path).iterdir()):
        raise FileExistsError(f"output_dir {path} is not empty: choose another, or pass --overwrite true")


def write_metrics(path, metrics):
    """Write a metrics file (JSON, 6 significant digits), whole or not at all, and return what a reader gets."""
    text = json.dumps(_rounded(metrics), indent=2) + "\n"
    state = PartialState()
    if state.is_main_process:
        temporary = Path(f"{path}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
    state.wait_for_everyone()
    return json.loads(text)


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def open_binary(path: str | Path) -> IO[bytes]:
    """Open a file for reading, decompressed if its name ends in `.gz` or `.xz`."""
    opener: Any = COMPRESSIONS.get(Path(path).suffix, open)
    return opener(path, "rb")


@contextmanager
def open_text(path: str | Path, newline: str | None = "\n") -> Iterator[TextIO]:
    """
    Open a text file in UTF-8, with or without a byte order mark, for a `with` statement.

    Args:
        path (`str` or `Path`): The file, decompressed if its name ends in `.gz` or `.xz`.
        newline (`str`, *optional*, defaults to `"\\n"`): See `open`. By default only a line feed ends a line.

    Raises:
        ValueError: If, while it is read, the file turns out not to be UTF-8 or not to be compressed as its name says.
    """
    with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline=newline) as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error.reason}") from error
        except DECOMPRESSION_ERRORS as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}") from error
