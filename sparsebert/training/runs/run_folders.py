"""The output folder of a run, and where the run resumes: nothing in the folder is lost before the run is finished."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ...data.tasks.glue import GLUE
from ...files import (
    CHECKPOINT,
    EXPERIMENT_NAME,
    LOCK_NAMES,
    METRICS_NAME,
    RECIPE_NAME,
    RESULT_FILES,
    RUN_FOLDER,
    SUBMISSION_NAME,
    TASK_FILES,
    UNFINISHED_NAME,
    FinishedRunError,
    check_output_dir,
    is_damaged,
    is_empty,
)
from ...masks.mask_cards import CARD_NAME, own_card
from ...masks.mask_files import MASK_STATE
from ...masks.pushing import WEIGHTS
from .checkpoint_manifests import MANIFEST_NAME, check_whole, newest_whole


logger = logging.get_logger(__name__)

# A run that is to replace another works in this folder of the output folder. Trainer pushes nothing with such a name.
ASIDE_NAME = "_unfinished"
# Patterns of what every run leaves that must not stay beside the files of another.
_REPLACED = (*MASK_STATE, *RESULT_FILES)
# What a run of some kinds leaves as well, by a key of its metrics.
_REPLACED_OF_KIND = {
    "score": TASK_FILES,
    "seeds": (EXPERIMENT_NAME,),
    "glue": (EXPERIMENT_NAME, SUBMISSION_NAME),
    "bleu": ("translations.txt",),
}
_LOGS_NAME = "runs"


def resume_from(resume: bool, checkpoint: Any) -> bool | str | None:
    """
    The checkpoint that a run is asked to resume from.

    Args:
        resume (`bool`): The field `resume`.
        checkpoint (`str` or `bool`, *optional*): The field `resume_from_checkpoint` of `TrainingArguments`.

    Returns:
        `bool` or `str`: `True` for the newest complete checkpoint, the path of one, or `None`.
    """
    text = str(checkpoint).lower()
    if checkpoint is None or text in ("false", ""):
        return True if resume else None
    return True if text == "true" else str(checkpoint)


@contextmanager
def run_folder(
    output: str | os.PathLike,
    overwrite: bool = False,
    resume: bool | str | None = None,
    allow_partial: bool = False,
    unfinished: bool = False,
    whole: bool = False,
) -> Iterator[tuple[Path, str | None]]:
    """
    Context manager that gives a run its folder. A run that replaces what is in `output` works aside, in a folder
    within it; at the end of the block its files take the place of the others, and what else the other run had written
    is removed.

    Args:
        output (`str` or `os.PathLike`): The output folder.
        overwrite (`bool`, *optional*, defaults to `False`): Whether the run may replace what is there.
        resume (`bool` or `str`, *optional*): See [`resume_from`].
        allow_partial (`bool`, *optional*, defaults to `False`): See [`check_whole`].
        unfinished (`bool`, *optional*, defaults to `False`): Whether what is there was left by a run of this kind.
        whole (`bool`, *optional*, defaults to `False`): Work aside also in an empty folder: for runs without
            checkpoints, of which all files are to be there or none.

    Returns:
        `tuple[Path, str | None]`: Where to write, and the checkpoint to resume from.
    Raises:
        FileExistsError: If the run would replace something without `overwrite`; a [`FinishedRunError`] if that is a
            finished run.
        FileNotFoundError: If the checkpoint does not exist.
        NotADirectoryError: If `output` is a file.
        OSError: If the block could not write the weights of the model.
        ValueError: If the checkpoint is not complete, or `output` is the root of the file system.
    """
    output, state = Path(output), PartialState()
    finish_move(output)
    folder, checkpoint = choose_folder(output, overwrite, resume, allow_partial, unfinished)
    if whole:
        folder = _aside(output)
    if checkpoint is not None:
        logger.warning(f"Resuming from {checkpoint}.")
    elif resume:
        logger.warning(f"{output} has no complete checkpoint to resume from: the run starts at the beginning.")
    state.wait_for_everyone()
    if folder != output and checkpoint is None and folder.is_dir() and state.is_main_process:
        _keep_older(folder)
    older = _changed_at(output)
    try:
        yield folder, checkpoint
    except BaseException as error:
        if state.is_main_process:
            _tidy(folder, output, older)
        if isinstance(error, SafetensorError):
            raise OSError(f"{folder}: the model could not be saved: {error}") from error
        raise
    state.wait_for_everyone()
    if state.is_main_process:
        if folder == output:
            _tidy(_aside(output), output, older)
        else:
            _swap(folder, output)
    state.wait_for_everyone()


def choose_folder(
    output: Path, overwrite: bool, resume: bool | str | None, allow_partial: bool, unfinished: bool
) -> tuple[Path, str | None]:
    """
    What [`run_folder`] would give, with the same arguments and errors; nothing is changed.

    Raises:
        FileExistsError: If the run would replace something without `overwrite`; a [`FinishedRunError`] if that is a
            finished run.
        FileNotFoundError: If the checkpoint does not exist.
        NotADirectoryError: If `output` is a file.
        ValueError: If the checkpoint is not complete, or `output` is the root of the file system.
    """
    if output.resolve() == output.resolve().parent:
        raise ValueError(f"output_dir {output} is the root of the file system: choose a folder in it")
    aside, finished = _aside(output), (output / METRICS_NAME).is_file()
    if resume is True:
        home = aside if aside.is_dir() else output
        if home == output and finished:
            if not overwrite:
                raise FinishedRunError(
                    f"output_dir {output} holds a finished run, there is nothing to resume: choose another, or pass "
                    "--overwrite to replace it"
                )
            return aside, None
        problems = []
        # A run that started over may have been stopped before its first checkpoint.
        for place in (home,) if finished or overwrite else dict.fromkeys((home, output)):
            try:
                checkpoint = newest_whole(place, allow_partial, interrupted=unfinished or place == aside)
            except ValueError as error:
                problems.append(error)
                continue
            if checkpoint is not None:
                return place, str(checkpoint)
        if problems:
            raise problems[0]
        if home == output and not (unfinished or overwrite):
            check_output_dir(output)
        return home, None
    if resume:
        check_whole(resume, allow_partial)
        home = Path(resume).resolve().parent
        if home == aside.resolve():
            return aside, resume
        if is_empty(output) or (home == output.resolve() and not finished):
            return output, resume
        if not overwrite:
            raise FileExistsError(
                f"output_dir {output} is not empty, and resuming from {resume} would replace what is there: choose "
                "another, or pass --overwrite"
            )
        return aside, resume
    if is_empty(output):
        return output, None
    if overwrite:
        return aside, None
    check_unfinished(output)
    if finished and not aside.is_dir():
        raise FinishedRunError(
            f"output_dir {output} is not empty, it holds a finished run: choose another, or pass --overwrite true"
        )
    check_output_dir(output)
    raise AssertionError  # it is not empty


def check_unfinished(output: Path) -> None:
    """
    Check that a run which starts over leaves no checkpoint behind.

    Raises:
        FileExistsError: If the folder holds a run that can be resumed, or one whose files are to be moved.
    """
    finished = (output / METRICS_NAME).is_file()
    if is_half_moved(output):
        raise FileExistsError(
            f"output_dir {output} holds a finished run that was stopped while its files were moved: add --resume to "
            "move the rest, or --overwrite to start over"
        )
    for home in (_aside(output),) if finished else (_aside(output), output):
        try:
            checkpoint = newest_whole(home)
        except ValueError:
            continue
        if checkpoint is not None:
            raise FileExistsError(
                f"output_dir {output} holds an unfinished run, complete up to {checkpoint.name}: add --resume to "
                "continue it, or --overwrite to start over"
            )


def is_half_written(output: Path) -> bool:
    """Whether a folder holds nothing but what a run without checkpoints left when it was killed before its end."""
    names = {path.name for path in output.glob("*")}
    if not (output / UNFINISHED_NAME).is_file() or len(list((output / ASIDE_NAME).glob("*"))) != len(_asides(output)):
        return False  # files of the user
    kept = (path for pattern in (f"{PREFIX_CHECKPOINT_DIR}-*", METRICS_NAME) for path in output.rglob(pattern))
    return ASIDE_NAME in names <= {ASIDE_NAME, *LOCK_NAMES} and not any(kept)


def is_half_moved(output: Path) -> bool:
    """Whether a folder holds a finished run whose process was killed while its files were moved."""
    return not (output / METRICS_NAME).is_file() and (_aside(output) / METRICS_NAME).is_file()


def _aside(output):
    return output / ASIDE_NAME / output.resolve().name  # "." has no name


def _asides(output):
    """The folders aside of this and of earlier runs."""
    name = re.escape(_aside(output).name)
    return [path for path in (output / ASIDE_NAME).glob("*") if re.fullmatch(rf"{name}(-\d+)?", path.name)]


def _remove_asides(output):
    for path in _asides(output):
        remove(path)
    if not any((output / ASIDE_NAME).iterdir()):
        (output / ASIDE_NAME).rmdir()


def weights_and_checkpoints(folder: Path) -> set[Path]:
    """The weights of a model and the checkpoints of a run in a folder, by the exact names that they have."""
    return {path for path in folder.glob("*") if WEIGHTS.fullmatch(path.name) or CHECKPOINT.fullmatch(path.name)}


def _keep_older(aside):
    """Make way for a new run, which replaces this one in the end too."""
    number = 1
    while (older := aside.with_name(f"{aside.name}-{number}")).exists():
        number += 1
    aside.rename(older)


def _changed_at(folder):
    """When each file of a folder was changed last, in ns."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file()}


def _tidy(folder, output, older):
    """Leave no file that this run has only half written, and no folder aside without a checkpoint."""
    if folder == output:
        for path, changed in _changed_at(folder).items():
            if changed != older.get(path) and is_damaged(path):
                path.unlink()
    elif not any(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{MANIFEST_NAME}")):
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def _swap(folder, output):
    """Replace what is in the output folder with the files of a run from its folder aside."""
    names = {path.name for path in folder.iterdir()}
    older = stored_metrics(output)
    replaced = {path for pattern in (*_REPLACED, *_of_kind(older)) for path in output.glob(pattern)}
    replaced |= weights_and_checkpoints(output)
    for path in replaced | _run_folders(output, older):
        if path.name not in names:
            remove(path)
    if CARD_NAME not in names and own_card(output / CARD_NAME) is not None:
        remove(output / CARD_NAME)
    (output / METRICS_NAME).unlink(missing_ok=True)  # from now on the folder holds parts of two runs
    _move(folder, output)


def _move(folder, output):
    """Move the files of a run from its folder aside into the output folder, its results last."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == METRICS_NAME):
        target = output / path.name
        if path.name == CARD_NAME and target.exists() and own_card(target) is None:
            continue  # a text of the user
        if path.name == _LOGS_NAME and target.is_dir():
            for log in path.iterdir():
                os.replace(log, target / log.name)
            continue
        if target.is_dir():
            remove(target)
        os.replace(path, target)
    _remove_asides(output)


def finish_move(output: Path) -> None:
    """Move the rest of a finished run: see [`is_half_moved`]."""
    state = PartialState()
    if state.is_main_process:
        aside = _aside(output)
        if is_half_moved(output):
            _move(aside, output)
        elif (output / METRICS_NAME).is_file() and aside.is_dir() and not any(aside.iterdir()):
            _remove_asides(output)
    state.wait_for_everyone()


def stored_metrics(folder: Path) -> dict[str, Any]:
    """The metrics of the run, or of several, in a folder; empty if there are none."""
    try:
        metrics = json.loads((folder / METRICS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return metrics if isinstance(metrics, dict) else {}


def remove_replaced(output: Path, older: dict[str, Any], newer: dict[str, Any]) -> None:
    """
    Remove what is not of the several runs that replace others: the folders of runs that are not among them, and the
    files of a single run. Files of the user stay. Nothing is done for a single run, which [`run_folder`] is for.

    Args:
        output (`Path`): The output folder.
        older (`dict`): The metrics that are there, or were before.
        newer (`dict`): The metrics of the new runs.
    """
    before, now = _run_folders(output, older), _run_folders(output, newer)
    if not now:
        return
    paths = before - now
    if not before:
        # A run writes the same files wherever it is.
        runs = {recipe.parent for folder in now for recipe in folder.rglob(RECIPE_NAME)}
        names = {path.name for run in runs for path in run.iterdir() if path.is_file()}
        if own_card(output / CARD_NAME) is None:
            names.discard(CARD_NAME)
        paths = {output / name for name in names}.union(
            weights_and_checkpoints(output), *map(output.glob, (*_REPLACED, *_of_kind(older)))
        )
        paths.discard(output / METRICS_NAME)
    if "glue" in older and "glue" not in newer:
        paths.add(output / SUBMISSION_NAME)
    for path in paths:
        remove(path)


def _run_folders(output, metrics):
    """
    The folders in an output folder that hold the runs of these metrics. Metrics may be those of a stranger: only names
    that fine-tuning gives are accepted.
    """
    seeds, sweep, tasks = (metrics.get(name) for name in ("seeds", "sweep", "glue"))
    runs = list(seeds.values()) if isinstance(seeds, dict) else []
    cells = sweep.get("cells") if isinstance(sweep, dict) else None
    runs += cells if isinstance(cells, list) else []
    places = [str(run.get("folder")) for run in runs if isinstance(run, dict)]
    names = {name for place in places if RUN_FOLDER.fullmatch(name := place.split("/")[0])}
    return {output / name for name in names.union(GLUE.keys() & tasks if isinstance(tasks, dict) else ())}


def _of_kind(metrics):
    """Patterns of what a run with these metrics has written besides `_REPLACED`."""
    return tuple(pattern for key in metrics for pattern in _REPLACED_OF_KIND.get(key, ()))


def remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
