"""Pushing folders of masks and models to the Hub, pulling them, and listing masks. A push is one commit."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import HFValidationError, HTTPError, RemoteEntryNotFoundError
from transformers.utils import CONFIG_NAME

from ..files import (
    LOCK_NAME,
    LOCK_NAMES,
    PICTURE_NAME,
    RESULT_FILES,
    RESULTS_NAME,
    TASK_FILES,
    UNFINISHED_NAME,
    check_output_dir,
    check_undamaged,
    is_empty,
    make_folder,
)
from ..hub import check_available, check_path
from .mask_cards import (
    CARD_NAME,
    bare_mask_card,
    card_sections,
    collection_card,
    make_card,
    name_in,
    own_card,
    renamed,
    signed,
)
from .mask_files import (
    MASK_CONFIG_NAME,
    MASK_STATE,
    MASK_WEIGHTS_NAME,
    MaskFileError,
    check_subfolder,
    find_mask_files,
    mask_paths,
    read_description,
    read_mask_files,
)


# What a run leaves in its folder that is of no use to others, or is pickled.
_NOT_PUSHED = ("checkpoint-*", "runs", ".*", "_*", "*.bin", "*.pt", "*.pth", "*.lock", "*.tmp", UNFINISHED_NAME)
# Files with weights, and with those that are not pushed because they are pickled.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
# Where a pull keeps the folder that it replaces until all files are in their places.
_REPLACED_NAME = "replaced"
# The files in the folder of a model that are about its mask.
_OF_MASK = (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME, CARD_NAME, PICTURE_NAME)


def list_masks(source: str | os.PathLike, **hub_arguments: Any) -> list[dict[str, Any]]:
    """
    The masks in a folder or Hub repository. Their weights are not read.

    Args:
        source (`str` or `os.PathLike`): Folder or Hub id.
        hub_arguments: `revision`, `subfolder` and `token`.

    Returns:
        `list[dict]`: For each mask `name` (its subfolder), `made_by`, `form`, `sparsity` (`None` if it was not
        stored), `length`, `num_layers`, `num_heads`, `base_model` and `scores`, those of its card by their names.
    Raises:
        MaskFileError: If the source cannot be a Hub id, or a description is damaged.
        OSError: If there is no such folder or repository, or the Hub cannot be reached.
    """
    within = check_subfolder(hub_arguments.pop("subfolder", None))
    check_path(source)
    try:
        check_available(source, MASK_CONFIG_NAME, **hub_arguments)
        paths = mask_paths(source, **hub_arguments)
    except HFValidationError as error:
        raise MaskFileError(f"{source}: neither an existing folder nor a valid Hub id") from error
    if within:
        paths = [path for path in paths if path == within or path.startswith(f"{within}/")]
    return [_entry(source, path, hub_arguments) for path in paths]


def _entry(source, path, hub_arguments):
    def find(name):
        if Path(source).is_dir():
            return Path(source, path, name)
        try:
            return Path(hf_hub_download(str(source), name, subfolder=path or None, **hub_arguments))
        except RemoteEntryNotFoundError:
            return None

    fields, metadata, sparsity, _ = read_description(find(MASK_CONFIG_NAME))
    return {
        "name": path,
        "made_by": name_in(metadata, "search") or name_in(metadata, "pattern"),
        "form": str(fields["form"]),
        "sparsity": sparsity,
        **{name: fields[name] for name in ("length", "num_layers", "num_heads")},
        "base_model": name_in(metadata, "base_model"),
        "scores": _scores(find(CARD_NAME)),
    }


def _scores(path):
    """The results in the card of a mask, by data set and metric."""
    try:
        results = ModelCard(path.read_text(encoding="utf-8")).data.eval_results or [] if path else []
        return {
            f"{result.dataset_name} {result.metric_name or result.metric_type}": result.metric_value
            for result in results
        }
    except Exception:
        return {}  # a card that anybody may have written, or none


def _card_of_mask(folder, card):
    """The card of a mask without its model, with what the card of the model says of the mask and of results."""
    fields, metadata, _, _ = read_description(folder / MASK_CONFIG_NAME)
    no_sparsities = [[0.0] * fields["num_heads"]] * fields["num_layers"]  # those are in the card of the model
    bare = bare_mask_card(folder.resolve().name, fields, no_sparsities, metadata)
    about = {name: text for name, text in card_sections(bare).items() if name in ("", "Load", "Limits")}
    data: Any = bare.data
    data.eval_results, data.model_name = card.data.eval_results, card.data.model_name
    return make_card(data, card_sections(card) | about)


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    subfolder: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: Sequence[str] | None = None,
    mask_only: bool = False,
    replaced: Sequence[str] | None = None,
) -> tuple[CommitInfo, list[str]]:
    """
    Push the folder of a mask or model, in one commit that also deletes what contradicts it there: another state of the
    mask and, with a model, other weights and the results of another run that was pushed there with its card.

    Checkpoints, logs, hidden and pickled files are not pushed, and a README.md in the repository that this package
    did not write stays. Beside masks in subfolders, the README.md of the repository lists them.

    Args:
        folder (`str` or `os.PathLike`): The folder. Its card will name the repository.
        repo_id (`str`): Name of the repository, created if missing.
        subfolder (`str`, *optional*): Folder within the repository.
        private, token, revision, create_pr, commit_message, commit_description: See `HfApi.create_commit`.
        tags (`list[str]`, *optional*): Tags to add to the card.
        mask_only (`bool`, *optional*, defaults to `False`): Whether to push the mask of a model without the model.
        replaced (`list[str]`, *optional*): Files to delete that the folder lacks, besides weights; by default those of
            another state of the mask or another run.

    Returns:
        `tuple[CommitInfo, list[str]]`: The commit, and the names of the pushed files of the folder.
    Raises:
        ValueError: If the folder holds no mask and no model, an unfinished run or damaged files.
        OSError: If the Hub cannot be reached or refuses.
    """
    folder = Path(folder)
    names = check_pushable(folder, mask_only)
    subfolder = check_subfolder(subfolder)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr") and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = set(api.list_repo_files(repo_id, revision=revision))
    place = f"{subfolder}/" if subfolder else ""

    def is_theirs(path):
        """Whether the repository has a README.md that this package did not write."""
        return path in there and own_card(Path(api.hf_hub_download(repo_id, path, revision=revision))) is None

    theirs = is_theirs(place + CARD_NAME)
    ours = not theirs and place + CARD_NAME in there
    if CARD_NAME in names and theirs:
        names.remove(CARD_NAME)
    contents: dict[str, Any] = {name: folder / name for name in names}
    if CARD_NAME in names and (card := own_card(folder / CARD_NAME)) is not None:
        if mask_only and (folder / CONFIG_NAME).is_file():
            card = _card_of_mask(folder, card)
        contents[CARD_NAME] = signed(renamed(card, repo_id, subfolder, tags or ()))
    operations: list[Any] = [CommitOperationAdd(place + name, content) for name, content in contents.items()]
    stale = set(MASK_STATE if replaced is None else replaced)
    here = {path.removeprefix(place) for path in there if path.startswith(place)}
    if any(map(_WEIGHTS.fullmatch, names)):
        stale |= set(filter(_WEIGHTS.fullmatch, here))
    if replaced is None and ours:
        stale.add(PICTURE_NAME)
    if replaced is None and CONFIG_NAME in names and ours and RESULTS_NAME in here:
        results = (*RESULT_FILES, *TASK_FILES)
        stale |= {name for name in here if "/" not in name and any(fnmatch(name, each) for each in results)}
    stale = {place + name for name in stale - set(names)}
    operations += [CommitOperationDelete(path) for path in sorted(stale & there)]
    if subfolder and CONFIG_NAME not in there and not is_theirs(CARD_NAME):
        operations.append(CommitOperationAdd(CARD_NAME, _collection(api, repo_id, revision, folder, subfolder)))
    try:
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message or f"Upload {subfolder or folder.resolve().name}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
        return commit, names
    except RuntimeError as error:
        # How the client reports that a large file could not be sent.
        if not isinstance(error.__cause__, HTTPError):
            raise
        raise OSError(
            f"{repo_id}: {error} ({' '.join(str(error.__cause__).split())}) The repository is as it was: run the same "
            "command again"
        ) from error


def check_pushable(folder: Path, mask_only: bool = False) -> list[str]:
    """
    Names of the files of a folder that are pushed.

    Raises:
        ValueError: See [`push_folder`].
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if (folder / UNFINISHED_NAME).exists():
        raise ValueError(f"{folder} holds a run that has not finished: finish it first")
    kinds = (MASK_CONFIG_NAME,) if mask_only else (CONFIG_NAME, MASK_CONFIG_NAME)
    if not any((folder / name).is_file() for name in kinds):
        inner = [path for path in mask_paths(folder) if path]
        hint = f": push one of {', '.join(inner)}" if inner else ""
        raise ValueError(f"{folder} holds no {' and no '.join(kinds)}{hint}")
    if (folder / MASK_CONFIG_NAME).is_file():
        read_mask_files(*find_mask_files(folder))
    if not mask_only:
        check_undamaged(folder)
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    pickled = list(filter(_PICKLED_WEIGHTS.fullmatch, files))
    if pickled and not mask_only and not any(map(_WEIGHTS.fullmatch, files)):
        raise ValueError(
            f"{folder} has its weights in {pickled[0]} alone, which is pickled and so not pushed: load the model and "
            "save it with save_pretrained"
        )
    if mask_only:
        return [name for name in files if name in _OF_MASK]
    return [name for name in files if not any(fnmatch(part, p) for part in name.split("/") for p in _NOT_PUSHED)]


def _collection(api, repo_id, revision, folder, subfolder):
    """The README.md of a repository of masks, once this one is there."""
    hub_arguments = {
        name: value for name, value in (("revision", revision), ("token", api.token)) if value is not None
    }
    masks = {mask["name"]: mask for mask in list_masks(repo_id, **hub_arguments)}
    if (folder / MASK_CONFIG_NAME).is_file():
        masks[subfolder] = _entry(folder, "", {}) | {"name": subfolder}
    return signed(collection_card(repo_id, [masks[name] for name in sorted(masks)]))


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
    Download a mask or model into a folder, which is there when all of it is, with the right checksums. What an
    interrupted download has is kept next to the folder, and the next one continues with it.

    Args:
        repo_id (`str`): Name of the repository.
        output_dir (`str` or `os.PathLike`): The folder, created if missing.
        revision, token: See `snapshot_download`.
        subfolder (`str`, *optional*): Folder within the repository. Its files go to `output_dir` itself.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to replace the mask or model in a folder. Files of
            other names that do not belong to it stay.

    Returns:
        `list[str]`: Names of the files.
    Raises:
        FileExistsError: If the folder is not empty and `overwrite` is not set, or holds neither model nor mask, or if
            another process is pulling into it.
        ValueError: If it is the current folder.
        OSError: If the Hub cannot be reached or refuses, or a file is not the one that the Hub has.
    """
    output = Path(output_dir).resolve()
    if output == Path.cwd():
        raise ValueError(f"output_dir {output} is the current folder, which cannot be replaced: choose another")
    check_output_dir(output, overwrite)
    if not is_empty(output) and not _holds_model(output):
        raise FileExistsError(f"output_dir {output} holds neither model nor mask, and is not replaced: choose another")
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
    aside = output.parent / f".{output.name}.unfinished"
    make_folder(aside)
    try:
        with FileLock(aside / LOCK_NAME).acquire(timeout=0):
            _finish_swap(aside, output)
            check_output_dir(output, overwrite)
            for path in aside.iterdir():
                if path.is_dir() and path.name != commit:
                    shutil.rmtree(path)  # of another commit or repository
            place = aside / str(commit)
            pattern = [f"{within}*"] if within else None
            snapshot_download(repo_id, revision=commit, local_dir=place, token=token, allow_patterns=pattern)
            found = api.verify_repo_checksums(repo_id, revision=commit, local_dir=place)
            wrong = [mismatch["path"] for mismatch in found.mismatches] + sorted({*wanted} & {*found.missing_paths})
            if wrong:
                for name in wrong:
                    (place / name).unlink(missing_ok=True)
                raise OSError(
                    f"{repo_id}: {', '.join(wrong)} came with a wrong checksum and was discarded; nothing was written "
                    f"to {output}: run the same command again"
                )
            shutil.rmtree(place / ".cache", ignore_errors=True)
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


def _holds_model(folder):
    """Whether a folder holds a mask or the model of a library, not just any config.json."""
    if (folder / MASK_CONFIG_NAME).is_file():
        return True
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


def _finish_swap(aside, output):
    """Give the files of the user back to a folder that was replaced, or the folder itself if nothing replaced it."""
    replaced = aside / _REPLACED_NAME
    if replaced.is_dir() and not output.exists():
        os.replace(replaced, output)
    if not replaced.is_dir():
        return
    for root, folders, names in os.walk(replaced):
        links = [name for name in folders if Path(root, name).is_symlink()]
        for path in (Path(root, name) for name in (*names, *links)):
            target = output / path.relative_to(replaced)
            if _is_of_model(path, replaced) or os.path.lexists(target):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    shutil.rmtree(replaced)


def _is_of_model(path, folder):
    """Whether a file in the folder of a model or mask says something false beside another."""
    if path.parent != folder:
        return False
    if path.name == CARD_NAME:
        return own_card(path) is not None
    weights = _WEIGHTS.fullmatch(path.name) or _PICKLED_WEIGHTS.fullmatch(path.name)
    return bool(weights) or any(
        fnmatch(path.name, each) for each in (*MASK_STATE, *RESULT_FILES, *TASK_FILES, *LOCK_NAMES)
    )
