"""The file that describes a search, beside the weights of a stock model or of an adapter."""

import json
from pathlib import Path
from typing import Any

from ..checks import in_short
from ..masks.mask_files import MaskFileError
from .mask_description import OWN_FIELDS, MaskFields
from .searches import SEARCHES


def search_file(description: MaskFields) -> bytes:
    """The contents of a file that describes a search."""
    return (json.dumps({name: getattr(description, name) for name in OWN_FIELDS}, indent=2) + "\n").encode()


def read_search(path: Path) -> dict[str, Any]:
    """The fields in a file that describes a search; a [`MaskFileError`] if it does not."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = found.keys() <= set(OWN_FIELDS)
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise MaskFileError(f"{path}: not a search ({in_short(error)})") from error
    if not known or "search" not in found:
        raise MaskFileError(f"{path}: not a search (its fields are {', '.join(map(str, found)) or 'none'})")
    return with_meaning(found)


def with_meaning(found: dict[str, Any]) -> dict[str, Any]:
    """
    The fields in a file about a search. One that does not know of `special_rows` was written before `symmetric` had a
    meaning for Toeplitz searches: its logits are those of a symmetric one.
    """
    search = SEARCHES.get(str(found.get("search")))
    known = "special_rows" in found or found.get("frozen") or not (search and search.toeplitz)
    return found if known else found | {"symmetric": True}
