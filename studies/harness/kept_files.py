"""Small files that outlive the folders of finished cells, and the pictures that are drawn from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsebert.files import make_folder, replace_files

from .experiment import Cells


# In the folder of a finished cell: its settings, metrics and versions, as in the results.
FINISHED_NAME = "cell.json"


def kept_folder(path: Path) -> Path:
    """The folder with what is kept of the cells, a folder each, for the JSON file of results."""
    return path.with_suffix("")


def picture_path(path: Path, name: str) -> Path:
    """The file of a picture, for the JSON file of results."""
    return path.with_name(f"{path.stem}_{name}.png")


def keep_files(
    keep: Callable[[dict[str, Any], Path], dict[str, bytes]], finished: Cells, runs: Path, path: Path
) -> None:
    """
    Copy what is to be kept from the folders of finished cells, which lie in `runs`, beside the results in `path`. What
    was kept of cells whose folders are gone stays.
    """
    for name, cell in finished.items():
        made = runs / name / FINISHED_NAME
        # The folder may be that of another run of the cell, for other results. As text, since NaN is not equal to NaN.
        if not made.is_file() or json.dumps(json.loads(made.read_text(encoding="utf-8"))) != json.dumps(cell):
            continue
        for file, content in keep(cell["settings"], made.parent).items():
            kept = kept_folder(path) / name / file
            if not kept.is_file() or kept.read_bytes() != content:
                make_folder(kept.parent, "output")
                replace_files({kept: content})
