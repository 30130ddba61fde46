"""Pushing folders of masks and models to the Hub, each in one commit."""

import json
import os
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HTTPError
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..files import ADAPTER_FILES, METRICS_NAME, PICTURE_NAME, RESULT_FILES, TASK_FILES, UNFINISHED_NAME
from .listing import list_masks, listed
from .mask_cards import (
    CARD_NAME,
    bare_mask_card,
    card_sections,
    collection_card,
    hub_id,
    make_card,
    own_card,
    renamed,
    signed,
)
from .mask_files import (
    CODE_NAME,
    MASK_CONFIG_NAME,
    MASK_STATE,
    MASK_WEIGHTS_NAME,
    SEARCH_CONFIG_NAME,
    check_undamaged,
    folder_of_part,
    has_other_content,
    parts_named_in,
    read_description,
    read_mask_files,
)
from .mask_sources import check_subfolder, find_mask_files, mask_paths


# What a run leaves in its folder that is of no use to others, or is pickled.
_NOT_PUSHED = ("checkpoint-*", "runs", ".*", "_*", "*.bin", "*.pt", "*.pth", "*.lock", "*.tmp", UNFINISHED_NAME)
# Files with weights, and with those that are not pushed because they are pickled.
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
# The files in the folder of a model that are about its mask.
_OF_MASK = (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME, CARD_NAME, PICTURE_NAME)
# The files that say that there is a mask or a search.
DESCRIPTIONS = (MASK_CONFIG_NAME, SEARCH_CONFIG_NAME)


def own_descriptions(api: HfApi, repo_id: str, paths: Collection[str], revision: str | None) -> set[str]:
    """Those of the paths in a repository that describe a mask or search, and are not files of another tool."""
    found = {path for path in paths if PurePosixPath(path).name in DESCRIPTIONS}
    return {p for p in found if not has_other_content(Path(api.hf_hub_download(repo_id, p, revision=revision)))}


def files_of_parts(
    api: HfApi, repo_id: str, names: Collection[str], revision: str | None, place: str = ""
) -> set[str]:
    """Names that the files of masks of parts may have in a place of a repository, in which the files `names` are."""
    if CONFIG_NAME not in names or not any(name.startswith(folder_of_part("")) for name in names):
        return set()
    parts = parts_named_in(Path(api.hf_hub_download(repo_id, place + CONFIG_NAME, revision=revision)))
    return {f"{folder_of_part(part)}/{name}" for part in parts for name in (*MASK_STATE, CARD_NAME)}


def public_content(path: Path) -> bytes:
    """A file as it is pushed: a description of a mask or search without the path of the model it was found for."""
    content = path.read_bytes()
    try:
        fields = json.loads(content)
        local = hub_id(fields["base_model"]) is None and fields["base_model"] is not None
    except (ValueError, RecursionError, KeyError, TypeError):
        return content  # no such field, or not for us to judge
    without = fields | {"base_model": None, "base_model_revision": None}
    return (json.dumps(without, indent=2) + "\n").encode() if local else content


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
    names: Collection[str] | None = None,
) -> tuple[CommitInfo, list[str]]:
    """
    Push the folder of a mask or model, in one commit that also deletes what contradicts it there: another state of the
    mask and, with a model, other weights, the card and code of another model, and the results of another run that was
    pushed there with its card. Returns the commit, and the names of the pushed files.

    Checkpoints, logs, hidden and pickled files are not pushed, and a README.md in the repository that this package did
    not write stays. Beside masks in subfolders, the README.md of the repository lists them. `mask_only` leaves out the
    model of a mask; `replaced` names the files to delete that the folder lacks, besides weights, by default those of
    another state of the mask or another run. `names` are the entries of the folder to push, by default all.
    """
    folder, chosen = Path(folder), names
    names = [n for n in check_pushable(folder, mask_only) if chosen is None or n.split("/")[0] in chosen]
    subfolder = check_subfolder(subfolder)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr") and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = set(api.list_repo_files(repo_id, revision=revision))
    place = f"{subfolder}/" if subfolder else ""

    def card_at(path):
        """The README.md of the repository, if this package wrote it."""
        return own_card(Path(api.hf_hub_download(repo_id, path, revision=revision))) if path in there else None

    former = card_at(place + CARD_NAME)
    if CARD_NAME in names and former is None and place + CARD_NAME in there:
        names.remove(CARD_NAME)
    contents: dict[str, Any] = {name: folder / name for name in names}
    for name in names:
        if PurePosixPath(name).name in (*DESCRIPTIONS, CONFIG_NAME):
            contents[name] = public_content(folder / name)
    if CARD_NAME in names and (card := own_card(folder / CARD_NAME)) is not None:
        if mask_only and (folder / CONFIG_NAME).is_file():
            card = _card_of_mask(folder, card)
        contents[CARD_NAME] = signed(renamed(card, repo_id, subfolder, tags or ()))
    operations: list[Any] = [CommitOperationAdd(place + name, content) for name, content in contents.items()]
    stale = set(MASK_STATE if replaced is None else replaced)
    here = {path.removeprefix(place) for path in there if path.startswith(place)}
    if any(map(WEIGHTS.fullmatch, names)):
        stale |= set(filter(WEIGHTS.fullmatch, here))
    if CONFIG_NAME in names:
        stale |= {CODE_NAME, *ADAPTER_FILES}
        if former is not None and "Masks" not in card_sections(former):  # which lists those in subfolders
            stale.add(CARD_NAME)
    if replaced is None and former is not None:
        stale.add(PICTURE_NAME)
    if replaced is None and CONFIG_NAME in names and former is not None and METRICS_NAME in here:
        results = (*RESULT_FILES, *TASK_FILES)
        stale |= {name for name in here if "/" not in name and any(fnmatch(name, each) for each in results)}
    if CONFIG_NAME in names:
        stale |= files_of_parts(api, repo_id, here, revision, place)
    stale = {place + name for name in stale - set(names)} & there
    described = {place + name for name in DESCRIPTIONS} & stale
    stale -= described - own_descriptions(api, repo_id, described, revision)
    operations += [CommitOperationDelete(path) for path in sorted(stale)]
    if subfolder and CONFIG_NAME not in there and (CARD_NAME not in there or card_at(CARD_NAME) is not None):
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
    """Names of the files of a folder that are pushed. One without mask and model, unfinished or damaged is refused."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if (folder / UNFINISHED_NAME).exists():
        raise ValueError(f"{folder} holds a run that has not finished: finish it first")
    kinds = (MASK_CONFIG_NAME,) if mask_only else (CONFIG_NAME, MASK_CONFIG_NAME, ADAPTER_CONFIG_NAME)
    if not any((folder / name).is_file() for name in kinds):
        inner = [path for path in mask_paths(folder) if path]
        hint = f": push one of {', '.join(inner)}" if inner else ""
        raise ValueError(f"{folder} holds no {' and no '.join(kinds[:2])}{hint}")
    if mask_only:
        read_mask_files(*find_mask_files(folder))
    else:
        check_undamaged(folder)
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    pickled = list(filter(PICKLED_WEIGHTS.fullmatch, files))
    if pickled and not mask_only and not any(map(WEIGHTS.fullmatch, files)):
        raise ValueError(
            f"{folder} has its weights in {pickled[0]} alone, which is pickled and so not pushed: load the model and "
            "save it with save_pretrained"
        )
    if mask_only:
        return [name for name in files if name in _OF_MASK]
    return [name for name in files if not any(fnmatch(part, p) for part in name.split("/") for p in _NOT_PUSHED)]


def _collection(api, repo_id, revision, folder, subfolder):
    """The README.md of a repository of masks, once this one is there."""
    masks = {mask["name"]: mask for mask in list_masks(repo_id, revision=revision, token=api.token)}
    if (folder / MASK_CONFIG_NAME).is_file():
        masks[subfolder] = listed(folder, "") | {"name": subfolder}
    return signed(collection_card(repo_id, [masks[name] for name in sorted(masks)]))
