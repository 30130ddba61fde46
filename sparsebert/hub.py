"""Access to the Hub: reading without running code, checking whether files are available, and errors in one line."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

from .checks import MAX_HEADS, MAX_LAYERS, in_short, nearest


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


# Fields of recipes that hold a token.
SECRETS = ("token", "hub_token")
# Seconds to wait for the Hub's answer. A network that is only slow is left to the client and its retries.
PROBE_SECONDS = 1.5
# Repository, and file or folder in it, of the addresses that the client asks for.
_ADDRESSES = (
    r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/(?P<file>.+))?",
    r"/api/models/(?P<repo>[^/]+(?:/[^/]+)?)(?:/(?:revision|preupload|commit|branch|refs)\w*(?:/(?P<revision>.+))?)?",
    r"/(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)",
    r"/(?P<repo>[^/]+/[^/]+)\.git/.*",
)
# Fields of a configuration, by the names that all models know them by, and the most of what a model is built of.
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size")),
    **dict.fromkeys(("num_hidden_layers", "num_hidden_groups", "inner_group_num"), MAX_LAYERS),
    **{"num_feedforward_networks": MAX_LAYERS, "num_attention_heads": MAX_HEADS},
}
_ACTIVATIONS = ("hidden_act", "activation", "hidden_activation")


@dataclass(kw_only=True)
class HubArguments:
    """
    Which version of a model or mask to read from the Hub, and with which token.

    Args:
        revision (`str`, *optional*): Branch, tag or commit of a Hub repository; by default `main`.
        subfolder (`str`, *optional*): Folder within a Hub repository or a folder on disk.
        token (`str`, *optional*): Token for the Hub; by default that of `hf auth login` or of `HF_TOKEN`. It is not
            written anywhere.
    """

    revision: str | None = None
    subfolder: str | None = None
    token: str | None = field(default=None, repr=False)

    def hub_arguments(self, *sources: str | None) -> dict[str, Any]:
        """
        What was set, as arguments of `from_pretrained` for these folders and Hub ids; refused if it has no meaning for
        any.
        """
        named = [source for source in sources if source is not None]
        if (self.revision or self.subfolder) is not None and not named:
            name = "revision" if self.revision is not None else "subfolder"
            raise ValueError(f"{name} {getattr(self, name)!r} has no meaning here: no folder and no Hub id is read")
        check_revision(self.revision, *named)
        given = {"revision": self.revision, "subfolder": self.subfolder, "token": self.token}
        return {name: value for name, value in given.items() if value is not None}


def check_revision(revision: str | None, *sources: str | os.PathLike) -> None:
    """Refuse a revision if all that it is given for are folders."""
    if revision is not None and all(Path(source).exists() for source in sources):
        raise ValueError(
            f"revision {revision!r} has no meaning for the folder {sources[0]}, only for a Hub id: leave it out"
        )


def without_secrets(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe as they may be written or shown: without tokens for the Hub."""
    return {name: value for name, value in fields.items() if name not in SECRETS}


def mask_arguments(options: Any) -> dict[str, Any]:
    """
    What options with `mask`, `mask_revision` and `mask_subfolder` say about the mask, as arguments of
    `from_pretrained`.
    """
    given = {"mask_revision": options.mask_revision, "mask_subfolder": options.mask_subfolder}
    for name, value in given.items():
        if value is not None and options.mask is None:
            raise ValueError(f"{name} {value!r} has no meaning without mask")
    own = HubArguments(revision=options.mask_revision, subfolder=options.mask_subfolder, token=options.token)
    try:
        return own.hub_arguments(options.mask)
    except ValueError as error:
        raise ValueError(f"mask_{error}") from error


def explained(error: HTTPError) -> str:
    """What went wrong with the Hub after the client's own retries, in one line: repository, file, and what to do."""
    url = ""
    with suppress(RuntimeError):  # of an error without a request
        url = str((error.response if isinstance(error, HfHubHTTPError) else error).request.url)
    matches = (re.fullmatch(pattern, unquote(urlsplit(url).path)) for pattern in _ADDRESSES)
    found = next((match.groupdict() for match in matches if match), {})
    place = ": ".join(name for name in (found.get("repo"), found.get("file")) if name) or url or constants.ENDPOINT
    if place.endswith("/api/repos/create"):
        place = "the new repository"
    if not isinstance(error, HfHubHTTPError):
        said = " ".join(str(error).split()) or type(error).__name__
        return f"{place}: the connection to {constants.ENDPOINT} failed ({said}): run the same command again"
    status = error.response.status_code
    said = " ".join(str(error.server_message or f"status {status}").split())
    if isinstance(error, RevisionNotFoundError):
        return f"{found.get('repo')}: there is no revision {found.get('revision')!r}"
    if isinstance(error, RemoteEntryNotFoundError):
        return f"{place}: there is no such file in the repository: check --subfolder and --revision"
    if status in (401, 403):
        return (
            f"{place}: not allowed ({said}), or there is no such repository: check the name, log in with hf auth "
            "login, or give a --token with the right to read, and to write in a push"
        )
    if status == 404:
        return f"{place}: there is no such repository, or it is private: check the name, or give --token"
    if status >= 500 or status in (408, 429):
        return f"{place}: the Hub failed with status {status} ({said}): run the same command again later"
    return f"{place}: the Hub refused with status {status} ({said})"


@contextmanager
def naming_the_file() -> Iterator[None]:
    """Context manager, also a decorator, in which an error of the connection says what was asked for."""
    try:
        yield
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError):  # an answer, which names it
            raise
        raise ConnectionError(explained(error)) from error


def check_path(source: str | os.PathLike, field: str = "") -> None:
    """
    Check that what can only be the path of a folder is one. Whether a Hub id exists is not asked. `field` is for the
    message.
    """
    name, folder = str(source), Path(source)
    field = f"{field}: " if field else ""
    if folder.is_file():
        raise FileNotFoundError(f"{field}{name!r} is a file, expected a folder or Hub id: give {str(folder.parent)!r}")
    # A Hub id has one slash at most, and no folder of the owner's name is here.
    like_path = bool(re.match(r"[/.~]|[A-Za-z]:", name)) or name.endswith("/") or "\\" in name or name.count("/") > 1
    hidden = not like_path and "/" in name and folder.parent.is_dir()
    if (like_path or hidden) and not folder.is_dir():
        hint = f"; if it is a Hub id, the folder {folder.parent} hides it: run this elsewhere" if hidden else ""
        raise FileNotFoundError(f"{field}there is no folder {name!r}{hint}")


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
    Check that one of these files of a repository is in the cache, or that the Hub can be asked for it. Whether the Hub
    has them is left to the download, and nothing is checked for a path that exists. `fetch`: names of the files to
    download, for the message, by default all.
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
        except RevisionNotFoundError as error:
            raise RevisionNotFoundError(explained(error), response=error.response) from error
        except HfHubHTTPError:
            return  # it has answered
        except Exception as error:
            # By name, since the client's package for HTTP has changed.
            if type(error).__name__ not in ("ConnectError", "ProxyError"):
                return
            reason = f"{constants.ENDPOINT} cannot be reached: {error}"
    within = f"{subfolder}/" if subfolder else ""
    options = [name, *(within + file for file in fetch.split())] + (["--revision", revision] if revision else [])
    raise LocalEntryNotFoundError(
        f"{name}: there is no such folder, {' or '.join(paths)} is not in the cache, and the Hub is not asked "
        f"({reason}). Where there is a connection, fetch it with: hf download {' '.join(options)}"
    )


def commits_of(config: "PreTrainedConfig") -> list[str]:
    """Commits of a model of the Hub that it may have been loaded from; none if it cannot have been."""
    source, commit = config.name_or_path or "", getattr(config, "_commit_hash", None)
    try:
        validate_repo_id(source)
    except HFValidationError:
        return []
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=source, repo_type="model"), "snapshots")
    return [commit] if commit else sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def commit_of(config: "PreTrainedConfig") -> str | None:
    """
    The commit on the Hub that a model was loaded from, as far as it is known: newer transformers do not say which, and
    if several are cached, it could be any.
    """
    commits = [] if Path(config.name_or_path or "").is_dir() else commits_of(config)
    return commits[0] if len(commits) == 1 else None


def read_config(source: str | os.PathLike, **hub_arguments: Any) -> "PreTrainedConfig":
    """
    The configuration of a model in a folder or on the Hub; code there is never run, and wrong values are refused.
    """
    from transformers import AutoConfig

    config = _without_code(AutoConfig.from_pretrained, source, hub_arguments)
    _check_config(config, source)
    return config


def _check_config(config, source):
    """Refuse what transformers fails of, or builds without an end, when it makes a model of a configuration."""
    from torch import dtype
    from transformers import PreTrainedConfig
    from transformers.activations import ACT2FN

    within = f"in the config.json of {source}"
    for name, most in _SIZES.items():
        size = getattr(config, name, None)
        if isinstance(size, int) and not 1 <= size <= (most or size):
            raise ValueError(f"{name} {within} must be at {'least 1' if size < 1 else f'most {most}'}, got {size}")
    for name in _ACTIVATIONS:
        if isinstance(given := getattr(config, name, None), str) and given not in ACT2FN:
            raise nearest(f"{name} {within}", given, ACT2FN)
    if (given := config.dtype) is not None and not (isinstance(given, dtype) and given.is_floating_point):
        raise ValueError(f"dtype {within} must be a floating-point type of torch, got {given!r}")
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            _check_config(part, source)


def read_tokenizer(
    source: str | os.PathLike, config: "PreTrainedConfig | None" = None, **hub_arguments: Any
) -> "PreTrainedTokenizerBase":
    """
    The tokenizer in a folder or on the Hub, whose code is never run; refused if it has no tokens but special ones, or
    more than the model of `config`.
    """
    from transformers import AutoTokenizer

    tokenizer = _without_code(AutoTokenizer.from_pretrained, source, hub_arguments)
    # What transformers makes of a folder without a vocabulary.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(f"there is no tokenizer in {source}: save that of the model there, with save_pretrained")
    if config is not None and len(tokenizer) > config.vocab_size:
        raise ValueError(f"the tokenizer of {source} has {len(tokenizer)} tokens, the model {config.vocab_size}")
    return tokenizer


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
    except StrictDataclassError as error:  # such as a pattern that is not registered in this process
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    except (AttributeError, TypeError) as error:  # JSON of another kind, such as null
        raise ValueError(
            f"{source}: the files of its configuration or tokenizer are not what transformers writes "
            f"({in_short(error)})"
        ) from error
