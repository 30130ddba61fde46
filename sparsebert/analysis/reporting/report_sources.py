"""The sources of a report: finished runs and masks, from folders and the Hub."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...files import METRICS_NAME
from ..saved_runs import NoMaskError, SavedMask, read_saved_mask
from .reports import read_metrics


@dataclass(frozen=True)
class Source:
    """A run, a mask, or both: the metrics of a finished run, and its masks, one or one per seed that has another."""

    name: str
    metrics: dict[str, Any] | None
    masks: tuple[SavedMask, ...]

    def as_json(self) -> dict[str, Any]:
        """The metrics, or for a mask alone its description."""
        if self.metrics is not None:
            return self.metrics
        (saved,) = self.masks
        return saved.mask.description() | {"sparsity": saved.mask.sparsity, "metadata": saved.mask.metadata}


def read_sources(names: Sequence[str | os.PathLike], with_masks: bool = True) -> list[Source]:
    """Read runs and masks; one that is given twice counts once. `with_masks`: the masks of finished runs, too."""
    sources = []
    for name in dict.fromkeys(str(Path(name)) if Path(name).exists() else str(name) for name in names):
        is_run = (Path(name) / METRICS_NAME).is_file()
        metrics = read_metrics([name])[Path(name)] if is_run else None
        masks: tuple[SavedMask, ...] = ()
        if with_masks or not is_run:
            masks = tuple(_masks(name, metrics or {}))
        if not (is_run or masks):
            raise FileNotFoundError(
                f"{name}: holds neither {METRICS_NAME} nor a mask; expected the output folder of a finished run, or "
                "the folder or Hub id of a mask"
            )
        sources.append(Source(name, metrics, masks))
    return sources


def _masks(name: str, metrics: dict[str, Any]) -> Iterator[SavedMask]:
    """The mask of a source, or those of the seeds of a run that differ."""
    try:
        yield read_saved_mask(name)
        return
    except NoMaskError:
        seeds = metrics.get("seeds")
    found: list[SavedMask] = []
    for seed in seeds.values() if isinstance(seeds, dict) else ():
        # A stranger may have written the metrics: read nothing outside the folder.
        inner = PurePosixPath(str(seed.get("folder", "")) if isinstance(seed, dict) else "")
        if inner.is_absolute() or ".." in inner.parts:
            continue
        folder = Path(name) / inner
        try:
            saved = read_saved_mask(folder) if folder.is_dir() else None
        except NoMaskError:
            continue
        if saved is not None and all(saved.mask != other.mask for other in found):
            found.append(saved)
            yield saved
