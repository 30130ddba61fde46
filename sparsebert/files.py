"""Output folders, metrics files and compressed text, for all parts of the package."""

import errno
import gzip
import io
import json
import lzma
import math
import os
import re
import secrets
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError, safe_open

from .file_kinds import check_own, check_readable, kind_of, read_plain


# The function that opens a compressed file, by the file's suffix.
COMPRESSIONS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
# What reading a damaged compressed file raises.
DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
# In an output folder: the lock of the process that writes there, and who that is. The second file stays behind if the
# run does not finish. Trainer pushes nothing whose name begins like these.
LOCK_NAME = "_lock"
UNFINISHED_NAME = "_unfinished.json"
LOCK_NAMES = (LOCK_NAME, UNFINISHED_NAME)
# What replaces the content of a folder is written in this folder of it. Trainer pushes nothing with such a name.
ASIDE_NAME = "_unfinished"
# What [`locked_output`] says of a folder that a run left without finishing: that held something before, or nothing.
UNFINISHED, UNFINISHED_ALONE = "unfinished", "unfinished and alone"
# Fields of that second file: whose run it is, whether the folder was empty before it, and what stopped it.
_MARK_FIELDS = {"pid", "host", "alone", "stopped"}
# The results of a run, and the picture of its mask.
METRICS_NAME, PICTURE_NAME = "metrics.json", "heads.png"
# The pictures of P before freezing.
PROBS_PICTURES = ("mean_probs.png", "offset_profile.png")
# What a fine-tuning run was asked for, and several; their tables; and the archive for GLUE's server.
RECIPE_NAME, EXPERIMENT_NAME, TABLES_NAME = "recipe.yaml", "experiment.yaml", "results.md"
SUBMISSION_NAME = "submission.zip"
# Patterns of the results of a run, which say something false beside the model of another: those of every run, and what
# a fine-tuning adds.
RESULT_FILES = (METRICS_NAME, "trainer_state.json", PICTURE_NAME, *PROBS_PICTURES)
TASK_FILES = (
    *(RECIPE_NAME, TABLES_NAME, "predictions_*.json*"),
    *("nbest_predictions_*.json", "null_odds_*.json"),
    *("AX.tsv", "CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "MRPC.tsv", "QNLI.tsv", "QQP.tsv"),
    *("RTE.tsv", "SST-2.tsv", "STS-B.tsv", "WNLI.tsv"),
)
# What a compiled model was made with, its head, and its graph.
ENGINE_NAME, HEAD_NAME, GRAPH_FILES = "engine.json", "head.safetensors", ("openvino_model.xml", "openvino_model.bin")
# The adapter that is applied to the model in its folder, and what a tokenizer is read from.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spm.model"),
)
# Folders that are written in an output folder: checkpoints, and the runs of a seed or of the settings in a grid.
CHECKPOINT, RUN_FOLDER = re.compile(r"checkpoint-\d+"), re.compile(r"seed-\d+|\w+=[^/]*")
# The name of a file that is being written, until it takes its place.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
# Errors of a system that has no place left for a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def runs_in(names: Iterable[str | os.PathLike]) -> list[str]:
    """
    Names of runs, with a folder that holds nothing but the runs of several seeds replaced by these, in order, also by
    those that are not finished.
    """
    found: list[str] = []
    for name in map(str, names):
        seeds = sorted(Path(name).glob("seed-*/"), key=lambda path: (len(path.name), path.name))
        whole = Path(name, METRICS_NAME).exists() or not any(Path(seed, METRICS_NAME).exists() for seed in seeds)
        found += [name] if whole else map(str, seeds)
    return found


class FinishedRunError(FileExistsError):
    """Raised when an output folder holds a finished run, of which nothing is left to do."""


class OneProcess:
    """What `accelerate.PartialState` says of a process that is alone."""

    is_main_process, num_processes = True, 1

    def wait_for_everyone(self) -> None:
        """There is nobody to wait for."""


def process_state() -> Any:
    """`accelerate.PartialState`, or without accelerate, which training in several processes needs, [`OneProcess`]."""
    try:
        from accelerate import PartialState
    except ModuleNotFoundError:
        return OneProcess()
    return PartialState()


def check_working_names(folder: Path) -> None:
    """Refuse an output folder in which something that no run left is at a name that runs work with."""
    for name, kind in ((LOCK_NAME, "file"), (UNFINISHED_NAME, "file"), (ASIDE_NAME, "folder")):
        check_own(folder / name, kind)
    for path in (folder / ASIDE_NAME).glob("*"):
        if path.name.startswith(folder.resolve().name):
            check_own(path, "folder")
    mark = folder / UNFINISHED_NAME
    if mark.is_file() and (content := read_plain(mark)):  # an empty one is of a full disk
        with suppress(ValueError, RecursionError, AttributeError):
            if json.loads(content).keys() <= _MARK_FIELDS:
                return
        raise FileExistsError(f"{mark} is not a file of sparsebert, which keeps one there: move it elsewhere")


def failed_to_write(error: BaseException) -> str | None:
    """What to say of an error by which a library reports that a file could not be written; `None` for another one."""
    if isinstance(error, RuntimeError) and re.search("inline_container|PytorchStreamWriter|basic_ios", str(error)):
        return "a file could not be written whole: is the disk full?"  # torch does not know more
    of_tokenizers = type(error) is Exception and "(os error " in str(error)
    return str(error) if of_tokenizers or isinstance(error, SafetensorError) else None


def check_output_dir(path: str | os.PathLike, overwrite: bool = False, resume: bool = False) -> None:
    """Refuse a folder that is not empty, unless `overwrite` or `resume` is set, or that is a file or below one."""
    check_makeable(path)
    check_working_names(Path(path))
    if not (overwrite or resume) and not is_empty(path):
        raise FileExistsError(f"output_dir {path} is not empty: choose another, or pass --overwrite true")


def check_makeable(path: str | os.PathLike, field: str = "output_dir") -> None:
    """
    Check that neither an output folder, which `field` names in the message, nor one that it is to lie in is a file.
    """
    for folder in (Path(path), *Path(path).parents):
        if folder.is_file():
            raise NotADirectoryError(f"{field} {path} cannot be made: {folder} is a file")


def check_other_folder(output: str | os.PathLike, **sources: str | None) -> None:
    """Check that a run does not replace what it starts from: folders or Hub ids, by the fields that name them."""
    place = Path(os.path.realpath(output))  # unlike resolve, it takes links in a circle
    for field, source in sources.items():
        if source is None or not Path(source).is_dir():
            continue
        folder = Path(os.path.realpath(source))
        if folder == place or (place.is_dir() and folder.samefile(place)):
            raise ValueError(f"output_dir {output} is the folder of {field}, which would be replaced: choose another")
        name = folder.relative_to(place).parts[0] if place in folder.parents else ""
        if CHECKPOINT.fullmatch(name) or RUN_FOLDER.fullmatch(name):
            raise ValueError(f"output_dir {output} holds {field} {source}, which would be replaced: choose another")


def within(source: str | None, subfolder: str | None) -> str | None:
    """The folder of a model or mask that lies in a subfolder; of a Hub id, a path that does not exist."""
    return source if source is None or subfolder is None else os.path.join(source, subfolder)


def is_empty(path: str | os.PathLike) -> bool:
    """Whether there is no such folder, or nothing in it but what [`locked_output`] leaves."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"output_dir {path} is a file, expected a folder")
    return not folder.exists() or not _entries(folder)


def make_folder(path: str | os.PathLike, field: str = "output_dir") -> None:
    """Create an output folder with its parents. An error names the field, the folder and what is in the way."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        file = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
        kind = "a file" if file.is_file() else "a broken link" if file.is_symlink() else None
        reason = f"{file} is {kind}" if kind else error.strerror
        raise NotADirectoryError(f"{field} {folder} cannot be made: {reason}") from error


def take_lock(lock: BaseFileLock, timeout: float = -1) -> Any:
    """[`FileLock.acquire`], with an error that says what to do about a lock file that another user left."""
    try:
        return lock.acquire(timeout=timeout)
    except PermissionError as error:
        raise PermissionError(
            f"{lock.lock_file}: this lock file cannot be opened, it may be that of another user: have it deleted, or "
            "name another folder"
        ) from error


@contextmanager
def locked_output(path: str | os.PathLike) -> Iterator[str | None]:
    """
    Context manager that keeps an output folder for this run: another one that asks for it is refused, with the process
    and host of the first. It gives `UNFINISHED` if the folder was left by a run that did not finish, and
    `UNFINISHED_ALONE` if only such runs wrote there. Until the block ends without an error, or with
    [`FinishedRunError`], a file `_unfinished.json` in the folder says whose run it is. What [`replace_files`] was
    writing there when a run was killed is removed, and a folder to which nothing was written.
    """
    folder, state = Path(path), process_state()
    check_working_names(folder)
    mark = folder / UNFINISHED_NAME
    left = mark.read_bytes() if mark.is_file() else None
    alone = json.loads(left or b"{}").get("alone") is True
    unfinished = None if left is None else UNFINISHED_ALONE if alone else UNFINISHED
    state.wait_for_everyone()
    if not state.is_main_process:
        yield unfinished
        return
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    make_folder(folder)
    lock = FileLock(folder / LOCK_NAME)
    owner: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname()}
    before = None
    try:
        try:
            take_lock(lock, timeout=0)  # in here, since a signal may end this process as soon as it has the lock
        except Timeout:
            raise FileExistsError(
                f"output_dir {folder} is in use by {_owner(mark)}: choose another, or wait"
            ) from None
        before = _entries(folder)
        owner["alone"] = alone or not before
        _write_mark(mark, owner)
        for file in folder.rglob(".*.tmp") if unfinished or not before else folder.glob(f".{mark.name}.*.tmp"):
            if _TEMPORARY.fullmatch(file.name) and kind_of(file) == "file":
                file.unlink()
        yield unfinished
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.strerror == os.strerror(error.errno):
            error.filename = error.filename or str(folder)  # writing to an open file does not name it
        if not lock.is_locked:
            raise
        if isinstance(error, FinishedRunError):
            mark.unlink(missing_ok=True)
        elif before in (None, _entries(folder)):  # it was refused
            mark.unlink(missing_ok=True) if left is None else replace_files({mark: left})
        elif str(error):
            with suppress(OSError):  # a full disk must not hide the error
                _write_mark(mark, owner | {"stopped": str(error)})
        raise
    else:
        mark.unlink(missing_ok=True)
    finally:
        if lock.is_locked:
            if kind_of(folder / LOCK_NAME) == "file" and not (folder / LOCK_NAME).stat().st_size:  # not of a user
                (folder / LOCK_NAME).unlink()  # while it is held: nobody else can have it
            lock.release()
            for parent in created:
                if any(parent.iterdir()):
                    break
                parent.rmdir()


def _write_mark(mark, content):
    replace_files({mark: (json.dumps(content) + "\n").encode()})


def _entries(folder):
    """What is in an output folder, with the times of its changes, without lock and mark, also one half written."""
    names = [name for name in os.listdir(folder) if not (name in LOCK_NAMES or _TEMPORARY.fullmatch(name))]
    return {name: (folder / name).lstat().st_mtime_ns for name in names}


def _owner(mark):
    try:
        owner = json.loads(mark.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, TypeError, KeyError):  # it has just begun
        return "another process"


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """
    Write files whole or not at all, in the order in which they take their places; folders must exist. All are written
    beside their places and reach the disk before the first takes its place. What was there stays if anything fails,
    and nothing else is left behind. A link at one of the paths is replaced, not followed.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
            try:
                with open(temporary, "xb") as file:  # fails if the name exists, be it as a link
                    written[temporary] = path
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                error.filename = str(path)  # the name that was asked for
                raise
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
    Write metrics as JSON, in the main process alone and whole or not at all, with floats of 6 significant digits, and
    null for those that are not finite. Returns what is read back from the file.
    """
    text, state = json.dumps(_rounded(metrics), indent=2) + "\n", process_state()
    if state.is_main_process:
        replace_files({Path(path): text.encode()})
    state.wait_for_everyone()
    return json.loads(text)


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def open_binary(path: str | os.PathLike) -> IO[bytes]:
    """Open a file for reading, decompressed if its name ends in `.gz` or `.xz`."""
    check_readable(path)
    opener = COMPRESSIONS.get(Path(path).suffix, open)
    return opener(path, "rb")


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON may write half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def open_text(path: str | os.PathLike, newline: str | None = "\n") -> Iterator[TextIO]:
    """
    Context manager that opens a UTF-8 text file for reading, with or without a byte order mark, compressed or not.
    Only a line feed ends a line, unless `newline`, that of `open`, says otherwise. One that is no such text is a
    `ValueError`.
    """
    with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline=newline) as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error.reason}") from error
        except DECOMPRESSION_ERRORS as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}") from error


def is_index(path: Path) -> bool:
    """Whether a file is named as the list of the parts that weights are saved in."""
    return path.name.endswith(".safetensors.index.json")


def is_damaged(path: Path) -> bool:
    """Whether a file of weights, of PyTorch or of JSON cannot be what its name says. Others are not looked at."""
    if kind_of(path, follow=True) != "file" or not os.access(path, os.R_OK):
        return False
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return False
        if path.suffix in (".pt", ".pth", ".bin"):
            # TrainingArguments are stored as a pickle of the same format.
            return path.is_file() and not zipfile.is_zipfile(path)
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            # A part with a path would be read from outside the folder.
            return is_index(path) and not all(Path(name).name == name for name in content["weight_map"].values())
    except (SafetensorError, ValueError, RecursionError, OSError, AttributeError, KeyError, TypeError):
        return True
    return False
