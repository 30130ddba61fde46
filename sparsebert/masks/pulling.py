"""Pulling folders of masks and models from the Hub."""

import glob
import os
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, snapshot_download
from transformers.utils import CONFIG_NAME

from ..file_kinds import check_own, json_object, kind_of
from ..files import (
    ADAPTER_FILES,
    LOCK_NAME,
    LOCK_NAMES,
    METRICS_NAME,
    RESULT_FILES,
    TASK_FILES,
    TOKENIZER_FILES,
    check_output_dir,
    is_empty,
    make_folder,
    take_lock,
)
from .mask_cards import CARD_NAME, own_card
from .mask_files import MASK_CONFIG_NAME, MASK_STATE, MaskFileError, check_undamaged, is_of_another_tool
from .mask_sources import check_subfolder, mask_paths
from .pushing import PICKLED_WEIGHTS, WEIGHTS
from .sparse_mask import SparseMask


# The folder of the commit that is downloaded.
_COMMIT = re.compile("[0-9a-f]{40}")
# Where a pull keeps the folder that it replaces until all files are in their places.
_REPLACED_NAME = "replaced"


def pull_folder(
    repo_id: str,
    output_dir: str | os.PathLike,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    overwrite: bool = False,
) -> list[str]:
    """
    Download a mask or model into a folder, which is there when all of it is, with the right checksums and masks that
    can be read. What an interrupted download has is kept next to the folder, and the next one continues with it.
    Returns the names of the files.

    The files of a `subfolder` go to `output_dir` itself. `overwrite` replaces the mask or model that is there; files
    of other names that do not belong to it stay, and so does a `README.md` that this package did not write.
    """
    output = Path(output_dir).resolve()
    if output in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(
            f"output_dir {output} is the current folder, or contains it, and cannot be replaced: choose another"
        )
    check_output_dir(output, overwrite)
    subfolder = check_subfolder(subfolder)
    api = HfApi(token=token)
    # The commit: the branch may move on meanwhile.
    commit = api.model_info(repo_id, revision=revision).sha
    within = f"{subfolder}/" if subfolder else ""
    wanted = sorted(name for name in api.list_repo_files(repo_id, revision=commit) if name.startswith(within))
    if not wanted:
        names = ", ".join(path for path in mask_paths(repo_id, revision=commit, token=token) if path)
        raise FileNotFoundError(
            f"{repo_id}: there is nothing in subfolder {subfolder!r}"
            + (f"; there are masks in {names}" if names else "")
        )
    _check_replaceable(output, repo_id, [name.removeprefix(within) for name in wanted])
    aside = output.parent / f".{output.name}.unfinished"
    check_own(aside, "folder")
    check_own(aside / LOCK_NAME, "file")
    make_folder(aside)
    try:
        with take_lock(FileLock(aside / LOCK_NAME), timeout=0):
            _check_aside(aside)
            _finish_swap(aside, output)
            check_output_dir(output, overwrite)
            for path in aside.iterdir():
                if _COMMIT.fullmatch(path.name) and path.name != commit:
                    shutil.rmtree(path)  # of another commit or repository
            place = aside / str(commit)
            pattern = [f"{glob.escape(within)}*"] if within else None
            snapshot_download(repo_id, revision=commit, local_dir=place, token=token, allow_patterns=pattern)
            found = api.verify_repo_checksums(repo_id, revision=commit, local_dir=place)
            wrong = [mismatch["path"] for mismatch in found.mismatches] + sorted({*wanted} & {*found.missing_paths})
            if wrong:
                for name in wrong:
                    (place / name).unlink(missing_ok=True)
                raise OSError(
                    f"{repo_id}: {', '.join(wrong)} did not arrive whole; nothing was written to {output}: run the "
                    "same command again"
                )
            shutil.rmtree(place / ".cache", ignore_errors=True)
            try:
                check_undamaged(place / within)
                for inner in mask_paths(place / within):
                    if not is_of_another_tool(place / within / inner / MASK_CONFIG_NAME):
                        SparseMask.from_pretrained(place / within / inner)
            except ValueError as error:
                shutil.rmtree(aside)
                said = str(error).replace(f"{place}{os.sep}", "")
                raise MaskFileError(f"{repo_id}: {said}; nothing was written to {output}") from error
            if output.exists():
                os.replace(output, aside / _REPLACED_NAME)
            os.replace(place / within, output)
            _finish_swap(aside, output)
            shutil.rmtree(aside)
    except Timeout:
        raise FileExistsError(
            f"output_dir {output} is being pulled by another process: choose another, or wait"
        ) from None
    return [name.removeprefix(within) for name in wanted]


def _check_aside(aside):
    """Refuse a folder aside with what no pull left there, which would be removed with it, or followed."""
    for path in aside.iterdir():
        if not (path.name in (LOCK_NAME, _REPLACED_NAME) or _COMMIT.fullmatch(path.name)):
            raise FileExistsError(f"{path} is not of a pull, whose folder {aside} may be removed: move it elsewhere")
        check_own(path, "file" if path.name == LOCK_NAME else "folder")
        for inner in path.rglob("*") if _COMMIT.fullmatch(path.name) else ():
            check_own(inner, "folder" if kind_of(inner) == "folder" else "file")


def _check_replaceable(output, repo_id, names):
    """Check that what is in the folder, if anything, is of the same kind as the files that are to replace it."""
    if is_empty(output):
        return
    masks = [name for name in names if Path(name).name == MASK_CONFIG_NAME]
    if not _holds_model(output) and not any((output / name).is_file() for name in masks):
        raise FileExistsError(f"output_dir {output} holds neither model nor mask, and is not replaced: choose another")
    weights = sorted(path.name for path in output.iterdir() if _is_weights(path.name))
    if weights and not any(map(_is_weights, names)):
        raise FileExistsError(
            f"output_dir {output} holds the weights of a model ({weights[0]}), and {repo_id} has none to replace "
            "them: choose another"
        )


def _is_weights(name):
    return bool(WEIGHTS.fullmatch(name) or PICKLED_WEIGHTS.fullmatch(name))


def _holds_model(folder):
    """Whether a folder holds a mask or the model of a library, not just any config.json."""
    return (folder / MASK_CONFIG_NAME).is_file() or "model_type" in json_object(folder / CONFIG_NAME)


def _finish_swap(aside, output):
    """Give the files of the user back to a folder that was replaced, or the folder itself if nothing replaced it."""
    replaced = aside / _REPLACED_NAME
    if replaced.is_dir() and not output.exists():
        os.replace(replaced, output)
    if not replaced.is_dir():
        return
    shutil.copymode(replaced, output)
    for root, folders, names in os.walk(replaced):
        for name in folders:
            if not any(Path(root, name).iterdir()) and not Path(root, name).is_symlink():
                _make_inside(output, output / Path(root, name).relative_to(replaced))
        links = [name for name in folders if Path(root, name).is_symlink()]
        for path in (Path(root, name) for name in (*names, *links)):
            target = output / path.relative_to(replaced)
            is_own = path == replaced / CARD_NAME and own_card(path) is None
            if _is_of_model(path, replaced, output) or (os.path.lexists(target) and not is_own):
                continue
            _make_inside(output, target.parent)
            os.replace(path, target)
    shutil.rmtree(replaced)


def _make_inside(output, folder):
    """Make a folder in another one, of which no link leads out."""
    if os.path.realpath(folder) != str(folder):
        raise FileExistsError(f"{folder} leads out of {output} through a link: move the link elsewhere")
    folder.mkdir(parents=True, exist_ok=True)


def _is_of_model(path, folder, newer):
    """Whether a file in the folder of a model or mask says something false beside the one in the folder `newer`."""
    if path.parent != folder:
        return False
    if path.name in ADAPTER_FILES:
        return (newer / CONFIG_NAME).is_file()
    if path.name in TOKENIZER_FILES:
        return any((newer / name).is_file() for name in TOKENIZER_FILES)
    if path.name == CARD_NAME:
        return own_card(path) is not None
    is_fine_tuning = "score" in json_object(folder / METRICS_NAME)
    results = (*RESULT_FILES, *TASK_FILES) if is_fine_tuning else RESULT_FILES
    return _is_weights(path.name) or any(fnmatch(path.name, each) for each in (*MASK_STATE, *results, *LOCK_NAMES))
