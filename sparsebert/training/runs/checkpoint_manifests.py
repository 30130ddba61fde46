"""Which checkpoints are complete: each has a manifest, written last, with the size and hash of every file."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub.utils.sha import sha_fileobj
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, logging

from ...file_kinds import check_readable, drop_links, kind_of
from ...files import failed_to_write, is_damaged, replace_files
from ...output_folders import MANIFEST_NAME


logger = logging.get_logger(__name__)

# What a run needs to go on as if it had not stopped: how the names of these files begin. DeepSpeed and FSDP name the
# optimizer otherwise, see `_missing`.
_STATE_NAME = "trainer_state.json"
_PARTS = ("optimizer.pt", "scheduler.pt", "rng_state", _STATE_NAME, CONFIG_NAME)


@contextmanager
def whole_checkpoint(folder: str | os.PathLike) -> Iterator[None]:
    """
    Context manager for the saving of a checkpoint: at the end it gets its manifest; if saving fails, for example
    because the disk is full, its incomplete files are removed.
    """
    path, state = Path(folder), PartialState()
    if state.is_main_process:
        if kind_of(path) == "link":
            path.unlink()
        (path / MANIFEST_NAME).unlink(missing_ok=True)  # a checkpoint that is replaced is not complete meanwhile
        drop_links([inner for inner in path.rglob("*") if kind_of(inner) != "folder"])
    try:
        yield
        state.wait_for_everyone()
        if state.is_main_process:
            _write_manifest(path)
        state.wait_for_everyone()
    except Exception as error:
        if state.is_main_process:
            shutil.rmtree(path, ignore_errors=True)
        reason = failed_to_write(error)
        if reason is None and not isinstance(error, (OSError, RuntimeError)):
            raise
        reason = reason or (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"{path} could not be saved, and its incomplete files were removed: {reason}") from error


def _write_manifest(folder):
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            digest = sha_fileobj(file).hex()
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest}
    content = json.dumps({"files": files}, indent=1).encode()
    replace_files({folder / MANIFEST_NAME: content})


def check_whole(checkpoint: str | os.PathLike, allow_partial: bool = False, contents: bool = True) -> None:
    """Check that nothing of a checkpoint is missing or damaged."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint: there is no folder {str(checkpoint)!r}")
    for path in folder.rglob("*"):
        check_readable(path)
    manifest = _read_manifest(folder)
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            if not allow_partial:
                raise ValueError(f"{path} is missing: this checkpoint is not complete; {_ADVICE}")
            continue
        if (size := path.stat().st_size) != expected["size"]:
            raise ValueError(
                f"{path} is damaged: it has {size} bytes, not {expected['size']}; take another checkpoint"
            )
        with open(path, "rb") as file:
            if contents and sha_fileobj(file).hex() != expected["sha256"]:
                raise ValueError(f"{path} is damaged: its contents changed since; take another checkpoint")
    for path in folder.iterdir():
        if path.name not in manifest and is_damaged(path):
            raise ValueError(f"{path} is damaged or truncated: take another checkpoint")
    if not manifest:
        _refuse(f"{folder} has no {MANIFEST_NAME}: saving it was interrupted, or another program did", allow_partial)
    if missing := _missing({path.name for path in folder.rglob("*")}):
        if _STATE_NAME in missing:  # without it, nobody knows where the run was
            raise ValueError(f"{folder} lacks {', '.join(missing)}; take another checkpoint")
        _refuse(f"{folder} lacks {', '.join(missing)}", allow_partial)


_ADVICE = "take another checkpoint, or pass --allow_partial_resume to continue with what is there"


def _refuse(problem, allow_partial):
    if not allow_partial:
        raise ValueError(f"{problem}; {_ADVICE}")
    logger.warning_once(f"{problem}: the run will not continue exactly as it would have without the stop.")


def _missing(names):
    missing = [part for part in _PARTS if not any(name.startswith(part) for name in names)]
    others = ("optimizer.pt",) * any("optim" in name for name in names)
    others += ("scheduler.pt",) * any("optim_states" in name for name in names)  # a scheduler of DeepSpeed
    return [part for part in missing if part not in others]


def _read_manifest(folder) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {str(name): {"size": int(value["size"]), "sha256": value["sha256"]} for name, value in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): take another checkpoint") from error


def newest_whole(folder: str | os.PathLike, allow_partial: bool = False, interrupted: bool = False) -> Path | None:
    """The newest complete checkpoint of a run. Newer ones that are not complete are skipped with a warning."""
    steps = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.rpartition("-")[2]
        if path.is_dir() and step.isdecimal():
            steps[int(step)] = path
    problems = []
    for path in (steps[number] for number in sorted(steps, reverse=True)):
        try:
            check_whole(path, allow_partial)
        except ValueError as error:
            problems.append(str(error).partition(";")[0].partition(": take")[0])
            continue
        for problem in problems:
            logger.warning(f"Skipped a newer checkpoint: {problem}.")
        return path
    first = interrupted and len(steps) == 1 and not (path / MANIFEST_NAME).is_file()
    if problems and not first:
        raise ValueError(
            f"{folder} has no complete checkpoint to resume from: {'; '.join(problems)}. Start over with --overwrite, "
            "or pass --allow_partial_resume to continue with what is there"
        )
    return None
