"""
What runs found: P and masks read from folders or the Hub, and the importance analysis of several seeds of one search.

Letters: S runs, L layers (1 when shared), H heads, n length, P the probability that a position is kept.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModel
from transformers.utils import CONFIG_NAME, logging

from ..checks import nearest
from ..files import write_metrics
from ..hub import check_available
from ..masks.mask_files import MASK_CONFIG_NAME, SEARCH_CONFIG_NAME
from ..masks.patterns import PATTERNS, build_pattern
from ..masks.sparse_mask import SparseMask
from ..models.configuration_sparsebert import SparseBertConfig
from ..models.loading import load
from ..models.modeling_sparsebert import SparseBertModel
from ..search.learned_mask import MASK_PROBS_NAME
from .importance import CONFIDENCE, IMPORTANCE_GROUPS, SKETCH_LENGTH, estimate, head_groups, offset_profile, sketch
from .pictures import KEPT, plot_groups, plot_heads, plot_mean_probs, plot_offset_profile, plot_sketch
from .tables import Table


MASK_ONLY = "M, 1 where the position is kept, else 0"
# What must agree for runs to be seeds of one search.
SEARCH_FIELDS = (
    "search", "mask_form", "mask_constant", "mask_logit_scale", "temperature", "temperature_end", "noise_scale",
    "hard", "symmetric", "share_layers", "sparsity_weight", "target_sparsity", "initial_decay",
    "initial_sparsity", "sparsity_warmup", "sparsity_ramp",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """
    What one run found.

    Attributes:
        source (`str`):
            Folder or Hub id.
        quantity (`str`):
            What `probs` holds: P, or the frozen mask where P was not saved.
        probs (`torch.Tensor`):
            P or mask, `(L, H, n, n)`, float32.
        mask ([`SparseMask`]):
            The frozen mask, or what a search would freeze to now.
        setup (`dict`):
            Settings that all seeds of one search share.
        config ([`SparseBertConfig`], *optional*):
            Configuration of the model; `None` for a mask alone, or one beside a model of another architecture.
    """

    source: str
    quantity: str
    probs: torch.Tensor
    mask: SparseMask
    setup: dict[str, Any]
    config: SparseBertConfig | None = None

    @property
    def is_decoder(self) -> bool:
        """Whether the model is a decoder, which removes future keys as well."""
        return self.config is not None and bool(self.config.is_decoder)

    @property
    def token_mixers(self) -> tuple[str, ...]:
        """The token mixers that some layers have instead of attention."""
        mixers = () if self.config is None else self.config.token_mixers or ()
        return tuple(sorted(set(mixers) - {"attention"}))


def _find(source, name):
    """Path of a file in a folder or Hub repository, or `None` if there is none."""
    if Path(source).is_dir():
        return path if (path := Path(source) / name).is_file() else None
    try:
        return Path(hf_hub_download(source, name))
    except EntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ValueError(f"{source}: no such folder, and not a Hub id") from error


def _read_config(source):
    """The [`SparseBertConfig`] of a run, or `None` for a mask alone or beside a model of another architecture."""
    path = _find(source, CONFIG_NAME)
    if path is None:
        return None
    try:
        is_ours = json.loads(path.read_text(encoding="utf-8")).get("model_type") == SparseBertConfig.model_type
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path}: not a configuration ({error!r})") from error
    return SparseBertConfig.from_pretrained(path.parent) if is_ours else None


def _is_searching(source, config):
    if config is None:
        return _find(source, SEARCH_CONFIG_NAME) is not None
    return bool(config.search) and not config.frozen


def _read_search(source, config):
    """The [`SparseAttention`] of a model that is still searching."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the weights of the model's heads are not read
    try:
        if config is None:
            return load(source, AutoModel).sparse_attention
        model, report = SparseBertModel.from_pretrained(source, output_loading_info=True)
    finally:
        logging.set_verbosity(verbosity)
    if any(name.endswith("mask_logits") for name in report["missing_keys"]):
        raise ValueError(
            f"{source}: the checkpoint holds no mask logits, although its configuration says that it is searching"
        )
    return model.sparse_attention


def _read_probs(path, mask):
    """P before freezing, `(L, H, n, n)`, checked against the mask that it was frozen to."""
    try:
        probs = load_file(path).get("probs")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from error
    shape = (mask.num_layers, mask.num_heads, mask.length, mask.length)
    expected = (shape[0] * shape[1], *shape[2:])
    if probs is None or tuple(probs.shape) != expected:
        got = "nothing" if probs is None else str(tuple(probs.shape))
        raise ValueError(f"{path}: probs must have shape {expected}, as the mask beside it, got {got}")
    probs = probs.float()
    if not ((probs >= 0) & (probs <= 1)).all():
        raise ValueError(f"{path}: probs must be in [0, 1], got {probs.min().item()} to {probs.max().item()}")
    return probs.view(shape)


def read_run(source: str | os.PathLike) -> Run:
    """
    Read P and the mask of a pre-training run, a searching checkpoint, a mask, or a model with a mask or a search.

    Args:
        source (`str` or `os.PathLike`): Folder or Hub id.

    Returns:
        [`Run`]
    Raises:
        ValueError: If there is no mask, or a file is damaged or does not fit the mask.
        OSError: If the Hub has no such repository.
    """
    source = str(source)
    try:
        check_available(source, CONFIG_NAME, MASK_CONFIG_NAME)
    except HFValidationError as error:
        raise ValueError(f"{source}: no such folder, and not a Hub id") from error
    config = _read_config(source)
    if _is_searching(source, config):
        searching = _read_search(source, config)
        probs, mask, config = searching.mask_probs(), searching.thresholded_mask(), searching.config
        quantity = KEPT
    elif _find(source, MASK_CONFIG_NAME) is None:
        raise ValueError(
            f"{source}: holds no mask (or cannot be reached): expected a pre-training run, a searching checkpoint, or "
            f"a folder or Hub repository with {MASK_CONFIG_NAME}"
        )
    else:
        mask = SparseMask.from_pretrained(source)
        # A run with a given mask may lie where a search ended before, whose P is not this mask's.
        path = _find(source, MASK_PROBS_NAME) if config is None or config.search else None
        quantity = MASK_ONLY if path is None else KEPT
        probs = mask.to_table().float() if path is None else _read_probs(path, mask)
    setup = {name: mask.metadata.get(name) for name in ("search", "pattern", "pattern_parameters")}
    if config is not None and config.search:
        setup |= {name: getattr(config, name) for name in SEARCH_FIELDS}
    setup |= {"quantity": quantity} | {
        name: getattr(mask, name)
        for name in ("num_layers", "num_heads", "length", "form", "block_size", "special_tokens", "diagonal")
    }
    return Run(source, quantity, probs, mask, setup, config)


def read_runs(sources: Sequence[str | os.PathLike]) -> list[Run]:
    """
    Read several runs as seeds of one search.

    Args:
        sources (`list` of `str` or `os.PathLike`): Folders or Hub ids, see [`read_run`].

    Returns:
        `list[Run]`
    Raises:
        ValueError: If there is no source, one is given twice, one holds no mask or is damaged, or the runs differ in
            anything but the seed.
        OSError: If the Hub has no such repository.
    """
    if not sources:
        raise ValueError("expected at least one run or mask")
    places = [Path(source).resolve() for source in sources]
    for place in places:
        if places.count(place) > 1:
            source = sources[places.index(place)]
            raise ValueError(f"{source}: given more than once; a run is not a second seed of itself")
    runs: list[Run] = []
    for source in sources:
        run = read_run(source)
        for name, value in runs[0].setup.items() if runs else ():
            if name not in run.setup or run.setup[name] != value:
                raise ValueError(
                    f"{run.source}: {name} is {run.setup.get(name)!r}, but {value!r} in {runs[0].source}; runs "
                    "analysed together must be seeds of one search"
                )
        runs.append(run)
    return runs


def is_pattern(source: str) -> bool:
    """
    Tell the name of a pattern from the folder or Hub id of a mask.

    Args:
        source (`str`): Name of a pattern, a folder or a Hub id.

    Returns:
        `bool`: Whether it is the name of a pattern.
    Raises:
        ValueError: If it is none of these; suggests the nearest pattern.
    """
    if source in PATTERNS:
        return True
    if Path(source).is_dir() or "/" in source:
        return False
    raise nearest("pattern, folder or Hub id (owner/name)", source, list(PATTERNS))


def find_mask(source: str, length: int = 128, num_heads: int = 12, **pattern_arguments: Any) -> SparseMask:
    """
    The mask that a name stands for.

    Args:
        source (`str`): Name of a pattern, or a folder or Hub id that [`read_run`] understands.
        length (`int`, *optional*, defaults to 128): Number of tokens of a pattern, n.
        num_heads (`int`, *optional*, defaults to 12): Number of heads of a pattern, H.
        pattern_arguments: Further arguments of [`build_pattern`].

    Returns:
        [`SparseMask`]
    Raises:
        ValueError: If `source` is unknown, holds no mask or is damaged, or an argument of the pattern is out of range.
        OSError: If the Hub has no such repository.
    """
    if is_pattern(source):
        return build_pattern(source, length, num_heads, **pattern_arguments)
    return read_run(source).mask


def measure_importance(runs: Sequence[Run], special_tokens: str = "first_last") -> dict[str, Any]:
    """
    Which positions the runs of one search kept, as the numbers of `importance.json`.

    Args:
        runs (`list[Run]`): Seeds of one search, from [`read_runs`].
        special_tokens (`str`, *optional*, defaults to `"first_last"`): Which tokens are special: `"none"`, `"first"`
            or `"first_last"`.

    Returns:
        `dict`: What was read and, under `"all_layers"` (and `"layers"`, if the layers differ), mean and intervals of
        the groups and of the profile over offsets, and the sketch (for 16 tokens or more).
    Raises:
        ValueError: If every token is a special token, or `special_tokens` is unknown.
    """
    probs = torch.stack([run.probs for run in runs])
    groups = head_groups(probs, special_tokens)
    offsets, profile = offset_profile(probs, special_tokens)
    pooled = None
    if probs.shape[-1] >= SKETCH_LENGTH:
        pooled = sketch(probs.mean((0, 2)), special_tokens)  # (L, 16, 16)

    def numbers(layers):
        def of(values):
            values = values[:, layers]
            estimated = estimate(values.reshape(len(runs), -1, *values.shape[3:]))
            return {name: value.tolist() for name, value in estimated.items()}

        result = {"groups": {name: of(values) for name, values in groups.items()}}
        result["profile"] = {"offsets": offsets.tolist()} | of(profile)
        return result | ({} if pooled is None else {"sketch": pooled[layers].mean(0).tolist()})

    result = {
        "runs": [{"source": run.source, "sparsity": run.mask.sparsity} for run in runs],
        **runs[0].setup,
        "analysed_special_tokens": special_tokens,
        "fixed_groups": _fixed_groups(runs[0], special_tokens),
        "offset_groups": IMPORTANCE_GROUPS,
        "confidence": CONFIDENCE,
        "intervals": "Student's t of the mean, [lows, highs], clipped to [0, 1]. over_heads: every head (of every "
        "layer and run) is one observation. over_seeds: the mean of every run is one observation.",
        "all_layers": numbers(slice(None)),
    }
    if probs.shape[1] > 1:
        result["layers"] = [numbers(slice(layer, layer + 1)) for layer in range(probs.shape[1])]
    return result


def _fixed_groups(run, special_tokens):
    """Groups that the configuration fixed, so that the search did not decide on them."""
    groups = []
    if run.setup["search"] and run.mask.special_tokens == special_tokens != "none":
        groups.append("special_tokens")
    if run.setup["search"] and run.mask.diagonal is not None:
        groups.append("diagonal")
    return groups


def importance_table(numbers: dict[str, Any]) -> Table:
    """
    The groups of all layers as a table: mean and intervals.

    Args:
        numbers (`dict`): From [`analyze`] or [`measure_importance`].

    Returns:
        [`Table`]
    """
    quantity = "mean of M" if numbers["quantity"] == MASK_ONLY else "mean P"
    rows = []
    for name, group in numbers["all_layers"]["groups"].items():
        row = {"group": name, quantity: f"{group['mean']:.3f}"}
        for kind in ("over_heads", "over_seeds"):
            if kind in group:
                low, high = group[kind]
                row[f"95 % {kind}"] = f"[{low:.3f}, {high:.3f}]"
        rows.append(row)
    return Table.of("Positions kept", rows)


def analyze(
    sources: Sequence[str | os.PathLike], output_dir: str | os.PathLike, special_tokens: str | None = None
) -> dict[str, Any]:
    """
    Read runs of one search, write `importance.json` and pictures (PNG and SVG), and return the numbers.

    Args:
        sources (`list` of `str` or `os.PathLike`): Folders or Hub ids, see [`read_runs`].
        output_dir (`str` or `os.PathLike`): Folder to write to; created if missing.
        special_tokens (`str`, *optional*): Which tokens are special: `"none"`, `"first"` or `"first_last"`. Defaults
            to `"first"` if the search keeps the first token alone, as in a decoder, else to `"first_last"`.

    Returns:
        `dict`: See [`measure_importance`].
    Raises:
        ValueError: If matplotlib is missing, the runs cannot be read or are no seeds of one search, every token is a
            special token, or `special_tokens` is unknown.
        OSError: If the Hub has no such repository.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("the pictures need matplotlib: pip install 'sparsebert[viz]'")
    output = Path(output_dir)
    runs = read_runs(sources)
    if special_tokens is None:
        special_tokens = "first" if runs[0].mask.special_tokens == "first" else "first_last"
    numbers = measure_importance(runs, special_tokens)
    probs, quantity = torch.stack([run.probs for run in runs]), runs[0].quantity
    output.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, start=1):
        name = Path(run.source).name if len(runs) == 1 else f"run {number}, {Path(run.source).name}"
        plot_heads(run.mask, output / ("heads" if len(runs) == 1 else f"heads_{number}"), name)
    plot_mean_probs(probs, output / "mean_probs", quantity)
    if probs.shape[-1] >= SKETCH_LENGTH:
        plot_sketch(probs, output / "sketch", special_tokens, quantity)
    plot_groups(probs, output / "groups", special_tokens, tuple(numbers["fixed_groups"]), quantity)
    plot_offset_profile(probs, output / "offset_profile", special_tokens, quantity)
    return write_metrics(output / "importance.json", numbers)
