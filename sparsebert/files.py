"""Output folders, metrics files and compressed text, for all parts of the package."""

import gzip
import io
import json
import lzma
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from accelerate import PartialState


# The function that opens a compressed file, by the file's suffix.
COMPRESSIONS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
# What reading a damaged compressed file raises.
DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


def check_output_dir(path: str | os.PathLike, overwrite: bool = False, resume: bool = False) -> None:
    """
    Raises:
        FileExistsError: If the folder is not empty and neither `overwrite` nor `resume` is set.
    """
    if not (overwrite or resume) and Path(path).is_dir() and any(Path(path).iterdir()):
        raise FileExistsError(f"output_dir {path} is not empty: choose another, or pass --overwrite true")


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """
    Write files whole or not at all. All are written beside their places and reach the disk before the first takes its
    place. What was there stays if anything fails, and nothing else is left behind.

    Args:
        contents (`dict[Path, bytes]`): Content of each file, in the order in which they take their places. Folders
            must exist. A link at one of the paths is replaced, not followed.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
            with open(temporary, "xb") as file:  # fails if the name exists, be it as a link
                written[temporary] = path
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in written.items():
            os.replace(temporary, path)
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def _sync_folder(folder):
    """Have the names in a folder reach the disk, on systems that can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_metrics(path: str | os.PathLike, metrics: Any) -> Any:
    """
    Write metrics as JSON, with floats rounded to 6 significant digits. An interrupted write leaves no partial file.

    Args:
        path (`str` or `os.PathLike`): File to write. Only the main process of a distributed run writes it.
        metrics (`dict` or `list`): Values that JSON can express.

    Returns:
        `dict` or `list`: The metrics as read back from the file.
    """
    text = json.dumps(_rounded(metrics), indent=2) + "\n"
    state = PartialState()
    if state.is_main_process:
        replace_files({Path(path): text.encode()})
    state.wait_for_everyone()
    return json.loads(text)


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def open_binary(path: str | os.PathLike) -> IO[bytes]:
    """Open a file for reading, decompressed if its name ends in `.gz` or `.xz`."""
    opener = COMPRESSIONS.get(Path(path).suffix, open)
    return opener(path, "rb")


@contextmanager
def open_text(path: str | os.PathLike, newline: str | None = "\n") -> Iterator[TextIO]:
    """
    Context manager that opens a UTF-8 text file, with or without a byte order mark.

    Args:
        path (`str` or `os.PathLike`): File to read, decompressed if its name ends in `.gz` or `.xz`.
        newline (`str`, *optional*, defaults to `"\\n"`): The argument of `open`. By default only a line feed ends a
            line.

    Raises:
        ValueError: On reading, if the file is not UTF-8 or cannot be decompressed.
    """
    with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline=newline) as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error.reason}") from error
        except DECOMPRESSION_ERRORS as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}") from error
