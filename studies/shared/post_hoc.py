"""Checks of masks that are searched for a trained model, and of manual ones at the same sparsity."""

from typing import Any

from sparsebert.checks import check_choice, check_range
from sparsebert.hub import read_config
from sparsebert.learning.mask_search import described_search
from sparsebert.learning.searches import SEARCHES
from sparsebert.masks.matched import VARIED
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.models.loading import check_folder
from sparsebert.training.searching.search_arguments import FIELDS

from .base_models import located


def check_search(model: str, length: int, **fields: Any) -> None:
    """Check a search with a target for a model; a sparsity that is out of its reach is refused."""
    config = read_config(located(model))
    sizes = {name: getattr(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    asked = SparseBertConfig(**(FIELDS | sizes | {"mask_length": length} | fields))
    described_search(asked, asked.carrier)


def paper_form(search: str) -> dict[str, Any]:
    """The fields of a search in which distances have no sign, as in the paper."""
    return {"search": search, "symmetric": SEARCHES[search].toeplitz}


def check_masks(cell: dict[str, Any]) -> None:
    """Check `model`, `search`, `sparsity`, `max_length` and the manual masks in `controls`."""
    check_choice("search", cell["search"], tuple(SEARCHES))
    check_range("sparsity", cell["sparsity"], 0, 1, (int, float))
    for name in cell["controls"]:
        check_choice("controls", name, tuple(VARIED))
    check_folder(located(cell["model"]), "model")
    check_search(
        cell["model"],
        cell["max_length"],
        search=cell["search"],
        target_sparsity=cell["sparsity"],
        rest=cell.get("rest", "none"),
    )
