"""The folder of a training, and the checkpoint where it resumes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.utils import logging

from ...file_kinds import ENDLESS, kind_of
from ...files import CHECKPOINT, METRICS_NAME, UNFINISHED_ALONE, FinishedRunError, check_output_dir, is_empty
from ...output_folders import aside_of, check_not_root, finish_move, is_half_moved, replacing
from .checkpoint_manifests import check_whole, newest_whole


logger = logging.get_logger(__name__)


def resume_from(resume: bool, checkpoint: Any) -> bool | str | None:
    """What the fields `resume` and `resume_from_checkpoint` ask for: `True` is the newest complete checkpoint."""
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
    unfinished: bool | str | None = None,
) -> Iterator[tuple[Path, str | None]]:
    """
    Context manager that gives a training its folder, and the checkpoint to resume from. A run that replaces what is in
    `output` works aside, see [`replacing`]. The arguments are those of [`choose_folder`].
    """
    output = Path(output)
    finish_move(output)
    folder, checkpoint = choose_folder(output, overwrite, resume, allow_partial, unfinished)
    if checkpoint is not None:
        logger.warning(f"Resuming from {checkpoint}.")
    elif resume:
        logger.warning(f"{output} has no complete checkpoint to resume from: the run starts at the beginning.")
    _check_no_way_out(folder)
    PartialState().wait_for_everyone()
    with replacing(output, folder, new=checkpoint is None):
        yield folder, checkpoint


def _check_no_way_out(folder):
    """Refuse a folder to go on in, with a pipe or a link out of it to which a file or checkpoint would be written."""
    place = os.path.realpath(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        kind = kind_of(path)
        outside = Path(place) not in Path(os.path.realpath(path)).parents
        leads_out = kind == "link" and (CHECKPOINT.fullmatch(path.name) or (outside and not path.is_dir()))
        if kind in ENDLESS or leads_out:
            raise FileExistsError(f"{path} is a {kind}, and the run might write to it: move it elsewhere")


def choose_folder(
    output: Path, overwrite: bool, resume: bool | str | None, allow_partial: bool, unfinished: bool | str | None
) -> tuple[Path, str | None]:
    """
    Where a run writes, and the checkpoint that it resumes from; nothing is changed.

    Args:
        output (`Path`): The output folder.
        overwrite (`bool`): Whether the run may replace what is there.
        resume (`bool` or `str`, *optional*): See [`resume_from`].
        allow_partial (`bool`): See [`check_whole`].
        unfinished (`bool` or `str`, *optional*): Whether what is there was left by a run of this kind, see
            [`locked_output`].
    """
    check_not_root(output)
    aside, finished = aside_of(output), (output / METRICS_NAME).is_file()
    if resume is True:
        home = aside if aside.is_dir() else output
        if home == output and finished:
            if overwrite:
                return aside, None
            raise FinishedRunError(
                f"output_dir {output} holds a finished run, there is nothing to resume: choose another, or pass "
                "--overwrite to replace it"
            )
        problems = []
        # A run that started over may have been stopped before its first checkpoint.
        for place in (home,) if finished or overwrite else dict.fromkeys((home, output)):
            try:
                checkpoint = newest_whole(place, allow_partial, interrupted=bool(unfinished) or place == aside)
            except ValueError as error:
                problems.append(error)
                continue
            if checkpoint is not None:
                return place, str(checkpoint)
        if problems:
            raise problems[0]
        if home == output:
            check_output_dir(output, bool(unfinished) or overwrite)
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
    if not overwrite and not is_empty(output):
        check_unfinished(output)
        if finished and not aside.is_dir():
            raise FinishedRunError(
                f"output_dir {output} is not empty, it holds a finished run: choose another, or pass --overwrite true"
            )
        check_output_dir(output, unfinished == UNFINISHED_ALONE and not finished)
    return (output if is_empty(output) else aside), None


def check_unfinished(output: Path) -> None:
    """Refuse to start over in a folder with a run that can be resumed, or one whose files are to be moved."""
    if is_half_moved(output):
        raise FileExistsError(
            f"output_dir {output} holds a finished run that was stopped while its files were moved: add --resume to "
            "move the rest, or --overwrite to start over"
        )
    finished = (output / METRICS_NAME).is_file()
    for home in (aside_of(output), *(() if finished else (output,))):
        try:
            checkpoint = newest_whole(home)
        except ValueError:
            continue
        if checkpoint is not None:
            raise FileExistsError(
                f"output_dir {output} holds an unfinished run, complete up to {checkpoint.name}: add --resume to "
                "continue it, or --overwrite to start over"
            )
