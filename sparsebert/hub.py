"""The Hub: asked before a client retries for half a minute, uploads that also delete, and no code run from there."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


# Seconds to wait for the Hub's answer. A network that is only slow is left to the client and its retries.
PROBE_SECONDS = 1.5


def check_available(
    source: str | os.PathLike,
    *filenames: str,
    fetch: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    subfolder: str | None = None,
) -> None:
    """
    Check that files of a repository are in the cache or can be asked for.

    Args:
        source (`str` or `os.PathLike`): Hub id. Nothing is checked for a path that exists.
        filenames (`str`): Names of files, of which one in the cache is enough.
        fetch (`str`, *optional*, defaults to `""`): Names of the files to download, for the message. Defaults to all.
        revision, token, cache_dir, local_files_only, force_download, subfolder: See `hf_hub_download`.

    Raises:
        LocalEntryNotFoundError: If none is in the cache and the Hub cannot be reached. Whether the Hub has them is
            left to the download.
    """
    if Path(source).exists():
        return
    name = str(source)
    paths = [f"{subfolder}/{filename}" if subfolder else filename for filename in filenames]
    if any(try_to_load_from_cache(name, path, cache_dir=cache_dir, revision=revision) for path in paths):
        return  # also where the cache knows that there is no such file
    reason = "local_files_only" if local_files_only else "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else None
    if reason is None:
        try:
            url = hf_hub_url(name, paths[0], revision=revision)
            get_hf_file_metadata(url, token=token, timeout=PROBE_SECONDS)
            return
        except HfHubHTTPError:
            return  # it has answered
        except Exception as error:
            # By name, since the client's package for HTTP has changed.
            if type(error).__name__ not in ("ConnectError", "ProxyError"):
                return
            reason = f"{constants.ENDPOINT} cannot be reached: {error}"
    options = [name, *fetch.split()] + (["--revision", revision] if revision else [])
    raise LocalEntryNotFoundError(
        f"{name}: {' or '.join(paths)} is not in the cache, and the Hub is not asked ({reason}). Where there is a "
        f"connection, fetch it with: hf download {' '.join(options)}"
    )


def upload_and_delete(
    folder: str | os.PathLike,
    repo_id: str,
    deleted: Iterable[str],
    commit_message: str | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
    revision: str | None = None,
    commit_description: str | None = None,
) -> Any:
    """
    The last step of `PushToHubMixin.push_to_hub`, in one commit that also deletes files.

    Args:
        folder (`str` or `os.PathLike`): Folder to upload.
        repo_id (`str`): Repository.
        deleted (`Iterable[str]`): Names of files to delete from it, where it has them and the folder does not.
        commit_message, token, create_pr, revision, commit_description: See `HfApi.upload_folder`.
    """
    api = HfApi()
    if revision is not None and not revision.startswith("refs/pr") and not create_pr:
        api.create_branch(repo_id=repo_id, branch=revision, token=token, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        token=token,
        create_pr=create_pr,
        revision=revision,
        delete_patterns=list(deleted),
    )


def read_config(source: str | os.PathLike, **hub_arguments: Any) -> "PreTrainedConfig":
    """
    The configuration of a model in a folder or on the Hub.

    Raises:
        ValueError: If it is defined by code in that folder or repository, which is never run.
        OSError: If there is none.
    """
    from transformers import AutoConfig

    return _without_code(AutoConfig.from_pretrained, source, hub_arguments)


def read_tokenizer(source: str | os.PathLike, **hub_arguments: Any) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder or on the Hub. Raises what [`read_config`] does."""
    from transformers import AutoTokenizer

    return _without_code(AutoTokenizer.from_pretrained, source, hub_arguments)


def _without_code(read: Callable, source: Any, hub_arguments: dict[str, Any]) -> Any:
    try:
        # By default transformers would ask on the terminal whether to run it.
        return read(source, trust_remote_code=False, **hub_arguments)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{source} comes with Python code, which is never run: it must be of a type that transformers knows"
        ) from error
