"""Masks that come with the package, each for one trained model, which is known by the norms of its weights."""

import difflib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..checks import nearest, printable


# Folders of the masks, by name.
SHIPPED = {path.name: path for path in sorted((Path(__file__).parent / "shipped_masks").glob("*-*"))}
# Metadata of a mask that fits one model only: the norms of its query weights, layer by layer.
QUERY_NORMS = "query_norms"
# Half precision, and a recovery, change norms by less; another model has others.
_TOLERANCE = 0.01
_QUERY = re.compile(r"query\.(base_layer\.)?weight$")


def shipped_folder(source: str | os.PathLike) -> str:
    """
    The folder of a mask that comes with the package, by its name; any other folder or Hub id as it is. A folder of
    that name comes first; a name that is nearly one of these is refused.
    """
    name = str(source)
    if name in SHIPPED and not Path(name).is_dir():
        return str(SHIPPED[name])
    # A Hub id has a slash.
    if not {"/", "\\"} & {*name} and difflib.get_close_matches(name, SHIPPED, cutoff=0.8) and not Path(name).exists():
        raise nearest("mask", name, SHIPPED)
    return name


def query_norms(model: nn.Module) -> list[float] | None:
    """The norms of the query weights of a model, layer by layer; `None` if they have no values yet."""
    weights = [weight.detach() for name, weight in model.named_parameters() if _QUERY.search(name)]
    if any(weight.is_meta for weight in weights):
        return None
    return [round(float(weight.float().norm()), 4) for weight in weights]


def is_for(metadata: Mapping[str, Any], model: nn.Module) -> bool:
    """
    Whether the metadata of a mask say that it was found for the weights of this model, or may say so of weights that
    have no values yet. A `ValueError` if it was found for others; `False` if nothing is said.
    """
    expected = metadata.get(QUERY_NORMS)
    if not expected or not isinstance(expected, list) or not all(isinstance(norm, float) for norm in expected):
        return False
    if (found := query_norms(model)) is None:
        return True
    if len(found) != len(expected) or not all(
        math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(found, expected, strict=True)
    ):
        raise ValueError(
            f"the mask was found for {printable(str(metadata.get('base_model')))}, and the queries of this "
            f"{type(model).__name__} have other weights, or none to compare (in int8): sparsebert search "
            "finds a mask for another model"
        )
    return True
