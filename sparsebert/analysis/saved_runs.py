"""
What runs found: P and masks, read from folders or the Hub.

Letters: S runs, L layers (1 when shared), H heads, n length, P the probability that a position is kept.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RemoteEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import CONFIG_NAME, logging

from ..checks import in_short, nearest
from ..hub import check_available, check_path, read_config
from ..learning.learned_mask import expand_probs, is_of_mask
from ..learning.mask_description import SEARCH_FIELDS, MaskFields
from ..masks.mask_files import MASK_CONFIG_NAME, MASK_PROBS_NAME, SEARCH_CONFIG_NAME, MaskFileError, check_undamaged
from ..masks.mask_sources import check_subfolder, find_mask_files
from ..masks.patterns import PATTERNS, build_pattern
from ..masks.shipped import SHIPPED, shipped_folder
from ..masks.sparse_mask import SparseMask
from ..models.bert.configuration_sparsebert import SparseBertConfig
from ..models.bert.modeling_sparsebert import SparseBertModel
from ..models.loading import load, read_model
from ..models.model_classes import encoder_class_of
from .importance import KEPT


logger = logging.get_logger(__name__)

MASK_ONLY = "M, 1 where the position is kept, else 0"


class NoMaskError(ValueError):
    """A folder or Hub repository holds no mask."""


@dataclass(frozen=True)
class SavedMask:
    """
    A mask that a folder or Hub repository holds: the frozen one, or what a search would freeze to now.

    `config` is `None` for a mask alone, or one beside a model of another architecture.
    """

    source: str
    mask: SparseMask
    config: MaskFields | None

    @property
    def is_decoder(self) -> bool:
        """Whether the model is a decoder, which removes future keys as well."""
        return bool(getattr(self.config, "is_decoder", False))

    @property
    def token_mixers(self) -> tuple[str, ...]:
        """The token mixers that some layers have instead of attention."""
        mixers = () if self.config is None else self.config.token_mixers or ()
        return tuple(sorted(set(mixers) - {"attention"}))


@dataclass(frozen=True)
class Run(SavedMask):
    """
    What one run found.

    `quantity` says what `found_probs` holds, P or the frozen mask where P was not saved: float32, of the entries
    `(L, H, n, n)` or the parameters `(L, H, K)`, see [`LearnedMask.found_probs`]. `log_odds`, if they were saved,
    order the positions where P is 0 or 1. `setup` holds the settings that all seeds of one search share.
    """

    quantity: str
    found_probs: torch.Tensor
    setup: dict[str, Any]
    log_odds: torch.Tensor | None = None

    @cached_property
    def probs(self) -> torch.Tensor:
        """P or mask of every entry, `(L, H, n, n)`, float32."""
        return expand_probs(self.found_probs, self.mask)


def _find(source, name, hub_arguments, warn=False):
    """Path of a file in a folder or Hub repository, or `None` if there is none or, maybe with a warning, no answer."""
    if Path(source).is_dir():
        return path if (path := Path(source, hub_arguments.get("subfolder") or "", name)).is_file() else None
    try:
        return Path(hf_hub_download(source, name, **hub_arguments))
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError:
        folder = f"{subfolder}/" if (subfolder := hub_arguments.get("subfolder")) else ""
        known = try_to_load_from_cache(source, folder + name, revision=hub_arguments.get("revision"))
        if warn and known is not _CACHED_NO_EXIST:
            logger.warning(f"{source}: {name} is not in the cache, and without the Hub it is left out.")
        return None


def _read_config(source, hub_arguments):
    """The [`SparseBertConfig`] of a run, or `None` for a mask alone or beside a model of another architecture."""
    path = _find(source, CONFIG_NAME, hub_arguments)
    if path is None:
        return None
    try:
        is_ours = json.loads(path.read_text(encoding="utf-8")).get("model_type") == SparseBertConfig.model_type
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{path}: not a configuration ({in_short(error)})") from error
    return read_config(path.parent) if is_ours else None


def _read_search(source, config, hub_arguments):
    """The [`SparseAttention`] of a model that is still searching, else `None`."""
    if config is None and _find(source, SEARCH_CONFIG_NAME, hub_arguments) is None:
        return None
    if config is not None and (config.frozen or not config.search):
        return None
    if _find(source, CONFIG_NAME, hub_arguments) is None:
        raise ValueError(f"{source}: its mask is still being searched, without the model: load both, and freeze it")
    check_undamaged(Path(source, hub_arguments.get("subfolder") or ""))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the weights of the model's heads are not read
    try:
        if config is None:
            made = encoder_class_of(read_config(source, **hub_arguments))
            return load(source, made, **hub_arguments).sparse_attention
        read = SparseBertModel.from_pretrained
        model, report = read_model(read, source, output_loading_info=True, **hub_arguments)
    finally:
        logging.set_verbosity(verbosity)
    if any(name.endswith("mask_logits") for name in report["missing_keys"]):
        raise ValueError(
            f"{source}: the checkpoint holds no mask logits, although its configuration says that it is searching"
        )
    return model.sparse_attention


def _read_probs(path, mask):
    """P before freezing, checked against the mask that it was frozen to, and the log-odds or `None`."""
    try:
        found, matches = load_file(path), is_of_mask(path, mask)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from error
    if not matches:
        raise ValueError(f"{path}: P of another mask than the one beside it; without this file the mask alone is read")
    probs, log_odds, n = found.get("probs"), found.get("log_odds"), mask.length
    heads = (mask.num_layers, mask.num_heads)
    expected = [(n, n)] if mask.form == "table" else [(n, n), (mask.keep.shape[-1],)]
    expected = [(heads[0] * heads[1], *size) for size in expected]
    if probs is None or tuple(probs.shape) not in expected:
        got = "nothing" if probs is None else str(tuple(probs.shape))
        shapes = " or ".join(map(str, expected))
        raise ValueError(f"{path}: probs must have shape {shapes}, as the mask beside it, got {got}")
    probs = probs.float()
    if not ((probs >= 0) & (probs <= 1)).all():
        raise ValueError(f"{path}: probs must be in [0, 1], got {probs.min().item()} to {probs.max().item()}")
    if log_odds is not None:
        sizes = [(n, n), *([(n**2,), (n * (n + 1) // 2,)] if mask.form == "table" else [(mask.keep.shape[-1],)])]
        if log_odds.shape not in [(heads[0] * heads[1], *size) for size in sizes] or log_odds.isnan().any():
            raise ValueError(f"{path}: log_odds of shape {tuple(log_odds.shape)} are not those of the mask beside it")
        log_odds = log_odds.float().unflatten(0, heads)
    return probs.unflatten(0, heads), log_odds


def _check_source(source, hub_arguments):
    """The source as text, its name with the subfolder, and its configuration."""
    source = shipped_folder(source)
    check_subfolder(subfolder := hub_arguments.get("subfolder"))
    check_path(source)
    try:
        check_available(source, CONFIG_NAME, MASK_CONFIG_NAME, **hub_arguments)
    except HFValidationError as error:
        raise ValueError(f"{source}: no such folder, and not a Hub id") from error
    name = f"{source}/{subfolder}" if subfolder else source
    return source, name, _read_config(source, hub_arguments)


def _read_frozen(source, hub_arguments):
    if _find(source, MASK_CONFIG_NAME, hub_arguments) is None:
        try:
            find_mask_files(source, **hub_arguments)  # says where there are masks instead
        except MaskFileError as error:
            raise NoMaskError(str(error)) from error
        raise NoMaskError(
            f"{source}: holds no mask (or cannot be reached): expected a pre-training run, a searching checkpoint, or "
            f"a folder or Hub repository with {MASK_CONFIG_NAME}"
        )
    return SparseMask.from_pretrained(source, **hub_arguments)


def read_saved_mask(source: str | os.PathLike, **hub_arguments: Any) -> SavedMask:
    """
    Read the mask of a pre-training run, a searching checkpoint, a mask, or a model with a mask or a search.
    `hub_arguments` are `revision`, `subfolder` and `token`.
    """
    source, name, config = _check_source(source, hub_arguments)
    if (searching := _read_search(source, config, hub_arguments)) is not None:
        return SavedMask(name, searching.thresholded_mask(), searching.config)
    return SavedMask(name, _read_frozen(source, hub_arguments), config)


def read_run(source: str | os.PathLike, **hub_arguments: Any) -> Run:
    """Read P as well, where it was saved. Sources and errors are those of [`read_saved_mask`]."""
    source, name, config = _check_source(source, hub_arguments)
    if (searching := _read_search(source, config, hub_arguments)) is not None:
        probs, log_odds = searching.learned.found_probs(), searching.learned.log_odds()
        quantity, mask, config = KEPT, searching.thresholded_mask(), searching.config
    else:
        mask = _read_frozen(source, hub_arguments)
        # A run with a given mask may lie where a search ended before, whose P is not this mask's.
        has_probs = config is None or config.search
        path = _find(source, MASK_PROBS_NAME, hub_arguments, warn=True) if has_probs else None
        quantity = MASK_ONLY if path is None else KEPT
        probs, log_odds = (mask.to_table().float(), None) if path is None else _read_probs(path, mask)
    setup = {key: mask.metadata.get(key) for key in ("search", "pattern", "pattern_parameters", "sparsity_scope")}
    if config is not None and config.search:
        setup |= {key: getattr(config, key) for key in SEARCH_FIELDS}
    setup |= {"quantity": quantity} | {
        key: getattr(mask, key)
        for key in (
            *("num_layers", "num_heads", "length", "form", "block_size", "special_tokens", "special_rows", "diagonal"),
            *(() if mask.query_block_size is None else ("query_block_size",)),
            *(() if mask.form == "table" else ("symmetric",)),
        )
    }
    return Run(name, mask, config, quantity, probs, setup, log_odds)


def read_runs(sources: Sequence[str | os.PathLike], **hub_arguments: Any) -> list[Run]:
    """Read several runs as seeds of one search, which differ in nothing but the seed."""
    if not sources:
        raise ValueError("expected at least one run or mask")
    places = [Path(source).resolve() for source in sources]
    for place in places:
        if places.count(place) > 1:
            source = sources[places.index(place)]
            raise ValueError(f"{source}: given more than once; a run is not a second seed of itself")
    runs: list[Run] = []
    for source in sources:
        run = read_run(source, **hub_arguments)
        for name, value in runs[0].setup.items() if runs else ():
            if name not in run.setup or run.setup[name] != value:
                raise ValueError(
                    f"{run.source}: {name} is {run.setup.get(name)!r}, but {value!r} in {runs[0].source}; runs "
                    "analyzed together must be seeds of one search"
                )
        runs.append(run)
    return runs


def is_pattern(source: str) -> bool:
    """Tell the name of a pattern from the folder or Hub id of a mask."""
    if source in PATTERNS:
        if Path(source, MASK_CONFIG_NAME).is_file():
            raise ValueError(f"{source} is a pattern, and a folder with a mask here: write ./{source} for the folder")
        return True
    if Path(source).is_dir() or "/" in source or source in SHIPPED:
        return False
    raise nearest("pattern, folder or Hub id (owner/name)", source, [*PATTERNS, *SHIPPED])


def find_mask(
    source: str,
    length: int = 128,
    num_heads: int = 12,
    hub_arguments: Mapping[str, Any] | None = None,
    **pattern_arguments: Any,
) -> SparseMask:
    """
    The mask that the name of a pattern, or a folder or Hub id, stands for. `pattern_arguments` are those of
    [`build_pattern`].
    """
    if is_pattern(source):
        return build_pattern(source, length, num_heads, **pattern_arguments)
    return read_saved_mask(source, **(hub_arguments or {})).mask
