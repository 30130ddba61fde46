"""
Draw the heads of patterns and masks, or without names a gallery of all patterns.

Masks are read from folders or the Hub; for a run or a model, its mask is drawn. Needs the extra `viz`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from ..analysis.pictures.mask_pictures import plot_gallery, plot_heads
from ..analysis.saved_runs import find_mask, is_pattern
from ..files import make_folder
from ..hub import HubArguments
from ._command import Command, Results


@dataclass
class DrawingArguments(HubArguments):
    """
    What to draw.

    Args:
        sources (`list[str]`, *optional*): Names of patterns; folders or Hub ids of masks, runs or models.
        output_dir (`str`): Folder to write, created if missing.
        length (`int`): Tokens of a pattern.
        num_heads (`int`): Heads of a pattern.
        seed (`int`): Seed of random patterns.
        overwrite (`bool`): Replace pictures that exist.
    """

    sources: list[str] | None = None
    output_dir: str = field(kw_only=True)
    length: int = 64
    num_heads: int = 4
    seed: int = 0
    overwrite: bool = False


def command(words):
    examples = ("--output_dir DIR", "bigbird runs/demo/dam_s --output_dir DIR")
    return Command(run, {"drawing": DrawingArguments}, examples, "[PATTERN_OR_MASK ...]")


def run(values):
    options = DrawingArguments(**values["drawing"])
    of_pattern = sorted(values["drawing"].keys() & {"length", "num_heads", "seed"})
    if of_pattern and not any(map(is_pattern, options.sources or ())):
        raise ValueError(f"--{of_pattern[0]} needs the name of a pattern")
    sources = [source for source in options.sources or () if not is_pattern(source)]
    hub_arguments = options.hub_arguments(*sources)
    output = Path(options.output_dir)
    if not options.sources:
        paths = [output / "patterns.png"]
        _make_place(paths, output, options.overwrite)
        plot_gallery(paths[0])
    else:
        masks = {
            name: find_mask(name, options.length, options.num_heads, hub_arguments, seed=options.seed)
            for name in options.sources
        }
        names = [options.subfolder or name if name in sources else name for name in masks]
        paths = [output / f"{Path(name).resolve().name}.png" for name in names]
        if len(set(paths)) < len(paths):
            raise ValueError(f"two of {', '.join(masks)} would be drawn to one file: draw them one by one")
        _make_place(paths, output, options.overwrite)
        for path, (name, mask) in zip(paths, masks.items(), strict=True):
            plot_heads(mask, path, name)
    return Results([str(path) for path in paths], notes=[f"written: {path}" for path in paths])


def _make_place(paths, output, overwrite):
    """Make the folder of the pictures, unless one of them would be lost."""
    if not overwrite and (there := [path for path in paths if path.exists()]):
        raise FileExistsError(f"{there[0]} exists: choose another --output_dir, or pass --overwrite")
    make_folder(output)
