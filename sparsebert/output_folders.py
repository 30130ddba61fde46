"""
Output folders that hold something already. What replaces it is written aside, in a folder within, and takes its place
at the end: at any moment the older or the newer state is complete, and files of the user stay.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .data.tasks.glue import GLUE
from .file_kinds import json_object, kind_of
from .files import (
    ASIDE_NAME,
    CHECKPOINT,
    ENGINE_NAME,
    EXPERIMENT_NAME,
    GRAPH_FILES,
    HEAD_NAME,
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
    check_working_names,
    failed_to_write,
    is_damaged,
    locked_output,
    process_state,
)
from .masks.mask_cards import CARD_NAME, own_card
from .masks.mask_files import MASK_STATE
from .masks.pushing import WEIGHTS


# A checkpoint with this file is complete.
MANIFEST_NAME = "checkpoint_manifest.json"
# Patterns of what every run leaves that must not stay beside the files of another.
_REPLACED = (*MASK_STATE, *RESULT_FILES)
# What a run of some kinds leaves as well, by a key of its metrics.
_REPLACED_OF_KIND = {
    "score": TASK_FILES,
    "seeds": (EXPERIMENT_NAME,),
    "glue": (EXPERIMENT_NAME, SUBMISSION_NAME),
    "bleu": ("translations.txt",),
    "engine": (ENGINE_NAME, HEAD_NAME, *GRAPH_FILES),
}
_LOGS_NAME = "runs"
# In a folder aside: the metrics of what it replaces, as long as that was not removed.
_OLDER_NAME = "_older"
# What it is called once what the new files replace is gone.
_MOVING_NAME = "_moving"


def aside_of(output: Path) -> Path:
    """Where in an output folder the files are written that will replace its own."""
    return output / ASIDE_NAME / output.resolve().name  # "." has no name


def check_not_root(output: Path) -> None:
    """Refuse the root of the file system, which is nobody's output folder."""
    if output.resolve() == output.resolve().parent:
        raise ValueError(f"output_dir {output} is the root of the file system: choose a folder in it")


def check_free(output: str | os.PathLike, overwrite: bool = False) -> None:
    """Check, before any work, that [`written_whole`] will not refuse the folder."""
    folder = Path(output)
    check_not_root(folder)
    check_output_dir(folder, overwrite or is_half_written(folder) or is_half_moved(folder))


@contextmanager
def written_whole(output: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """
    Context manager for an output folder of which all files are to be there, or none: they are written to the folder
    that it gives. What a process left that was killed on the way is moved if it was complete, and else replaced.
    """
    folder = Path(output)
    with locked_output(folder):
        moved = is_half_moved(folder)
        finish_move(folder)
        if (moved or (folder / METRICS_NAME).is_file()) and not overwrite:
            raise FinishedRunError(
                f"output_dir {folder} is not empty, it holds a finished run: choose another, or pass --overwrite true"
            )
        check_free(folder, overwrite)
        with replacing(folder, aside_of(folder), new=True):
            yield aside_of(folder)


@contextmanager
def replacing(output: Path, folder: Path, new: bool) -> Iterator[None]:
    """
    Context manager for writing to `folder`, the output folder or the one aside, whose files then replace the others.
    After an error, nothing is left that is only half written, and complete checkpoints are kept. If the run is `new`,
    what was aside before makes way and goes at the end.
    """
    state = process_state()
    if new and folder != output and folder.is_dir() and state.is_main_process:
        folder.rename(next(path for path in _numbered(folder) if not path.exists()))
    older = _changed_at(output)
    try:
        yield
    except BaseException as error:
        if state.is_main_process:
            _tidy(folder, output, older)
        if (reason := failed_to_write(error)) is not None:
            raise OSError(f"{folder}: the model could not be saved: {reason}") from error
        raise
    state.wait_for_everyone()
    if state.is_main_process:
        if folder == output:
            _tidy(aside_of(output), output, older)
        else:
            _swap(folder, output)
    state.wait_for_everyone()


def is_half_written(output: Path) -> bool:
    """Whether a folder holds nothing but what a run without checkpoints left when it was killed before its end."""
    names = {path.name for path in output.glob("*")}
    if not (output / UNFINISHED_NAME).is_file() or len(list((output / ASIDE_NAME).glob("*"))) != len(_asides(output)):
        return False  # files of the user
    kept = (path for pattern in ("checkpoint-*", METRICS_NAME) for path in output.rglob(pattern))
    return ASIDE_NAME in names <= {ASIDE_NAME, *LOCK_NAMES} and not any(kept)


def is_half_moved(output: Path) -> bool:
    """Whether a folder holds what was finished by a process that was killed while it moved the files."""
    aside = aside_of(output)
    return not (output / METRICS_NAME).is_file() and (
        (aside / METRICS_NAME).is_file() or (aside / _MOVING_NAME).is_dir()
    )


def finish_move(output: Path) -> None:
    """Move the rest of a finished run: see [`is_half_moved`]."""
    check_working_names(output)
    state = process_state()
    if state.is_main_process:
        aside = aside_of(output)
        if is_half_moved(output):
            _move(aside, output)
        elif (output / METRICS_NAME).is_file() and aside.is_dir():
            if {path.name for path in aside.iterdir()} <= {_MOVING_NAME}:
                _remove_asides(output)
    state.wait_for_everyone()


def stored_metrics(folder: Path) -> dict[str, Any]:
    """The metrics of the run, or of several, in a folder; empty if there are none."""
    return json_object(folder / METRICS_NAME)


def weights_and_checkpoints(folder: Path) -> set[Path]:
    """The weights of a model and the checkpoints of a run in a folder, by the exact names that they have."""
    return {path for path in folder.glob("*") if WEIGHTS.fullmatch(path.name) or CHECKPOINT.fullmatch(path.name)}


def remove_replaced(output: Path, older: dict[str, Any], newer: dict[str, Any]) -> None:
    """
    Remove what is not of the several runs that replace others, by the metrics of both: the folders of runs that are
    not among them, and the files of a single run. Nothing is done for a single run, which [`replacing`] is for.
    """
    before, now = _run_folders(output, older), _run_folders(output, newer)
    if not now:
        return
    paths = before - now
    if not before:
        # A run writes the same files wherever it is.
        runs = {recipe.parent for folder in now for recipe in folder.rglob(RECIPE_NAME)}
        names = {path.name for run in runs for path in run.iterdir() if path.is_file()} - {CARD_NAME}
        paths = {output / name for name in names} | _results(output, older)
        paths.discard(output / METRICS_NAME)
    if "glue" in older and "glue" not in newer:
        paths.add(output / SUBMISSION_NAME)
    for path in paths:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _numbered(folder):
    number = 1
    while True:
        yield folder.with_name(f"{folder.name}-{number}")
        number += 1


def _asides(output):
    """The folders aside of this and of earlier runs."""
    name = re.escape(aside_of(output).name)
    return [path for path in (output / ASIDE_NAME).glob("*") if re.fullmatch(rf"{name}(-\d+)?", path.name)]


def _remove_asides(output):
    for path in _asides(output):
        remove(path)
    if not any((output / ASIDE_NAME).iterdir()):
        (output / ASIDE_NAME).rmdir()


def _changed_at(folder):
    """When each file of a folder was changed last, in ns."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file()}


def _tidy(folder, output, older):
    """Leave no file that was only half written, and no folder aside without a checkpoint."""
    if folder == output:
        for path, changed in _changed_at(folder).items():
            if changed != older.get(path) and is_damaged(path):
                path.unlink()
    elif not any(folder.glob(f"checkpoint-*/{MANIFEST_NAME}")):
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def _swap(folder, output):
    """Replace what is in the output folder with the files from the folder aside."""
    (folder / _OLDER_NAME).mkdir(exist_ok=True)
    if (output / METRICS_NAME).is_file():
        # From now on the folder holds parts of two runs, and is half moved.
        os.replace(output / METRICS_NAME, folder / _OLDER_NAME / METRICS_NAME)
    _move(folder, output)


def _move(folder, output):
    """Move the files from the folder aside into the other, the results last, once what they replace is gone."""
    if (folder / _OLDER_NAME).is_dir():
        names = {path.name for path in folder.iterdir()}
        older = stored_metrics(folder / _OLDER_NAME)
        for path in _results(output, older) | _run_folders(output, older):
            if path.name not in names:
                remove(path)
        os.replace(folder / _OLDER_NAME, folder / _MOVING_NAME)
    moved = (path for path in folder.iterdir() if path.name != _MOVING_NAME)
    for path in sorted(moved, key=lambda path: path.name == METRICS_NAME):
        target = output / path.name
        if path.name == CARD_NAME and target.exists() and own_card(target) is None:
            continue  # a text of the user
        if path.name == _LOGS_NAME and kind_of(path) == kind_of(target) == "folder":
            for log in path.iterdir():
                os.replace(log, target / log.name)
            continue
        if target.is_dir():
            remove(target)
        os.replace(path, target)
    _remove_asides(output)


def _results(output, metrics):
    """What a run with these metrics has left in its folder, without the folders of several."""
    kinds = (pattern for key in metrics for pattern in _REPLACED_OF_KIND.get(key, ()))
    paths = {path for pattern in (*_REPLACED, *kinds) for path in output.glob(pattern)}
    card = {output / CARD_NAME} if own_card(output / CARD_NAME) is not None else set()
    return paths | card | weights_and_checkpoints(output)


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
