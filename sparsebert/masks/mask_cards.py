"""
Cards: the README.md of a folder or repository with a mask. One that the user wrote or changed is never overwritten.

A card ends in a signature, a hash of all that it says. One without it, or changed since, belongs to the user.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..checks import shortened
from ..files import replace_files
from ..version import __version__
from .expansion import SPECIAL_TOKENS


CARD_NAME = "README.md"
_SIGNATURE = re.compile(r"\n<!-- sparsebert wrote this card (\w+): once changed, it is never written again -->\s*\Z")
# Sections in the order in which a card has them; the text before the first one is under "".
SECTIONS = ("", "Masks", "Mask", "Results", "Cost", "Plan", "Load", "Limits")
# Begins what a card says about loading.
PACKAGE = "With the package `sparsebert`, installed from its source (`pip install .` in its folder, or a wheel of it):"
# The table of a mask has a column per head up to this many.
MOST_COLUMNS = 16
# So many ranges of distances are named.
_MOST_RANGES = 5
_LENGTH_POLICIES = {
    "extend": "longer inputs are masked by the same distances, and larger distances are removed",
    "dense": "tokens beyond that attend to all tokens and are attended by all",
    "error": "longer inputs are refused",
}
_SPECIAL_TOKENS = {
    "first": "the first token attends to all tokens and is attended by all",
    "first_last": "the first and the last token attend to all tokens and are attended by all",
}
_SPECIAL_COLUMNS = {
    "first": "the first token is attended by all tokens",
    "first_last": "the first and the last token are attended by all tokens",
}


def make_card(data: ModelCardData, sections: Mapping[str, str]) -> ModelCard:
    """A model card with these sections of Markdown, in the order of `SECTIONS` and without empty ones."""
    parts = [f"## {name}\n\n{text}" if name else text for name in SECTIONS if (text := sections.get(name, "").strip())]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def card_sections(card: ModelCard) -> dict[str, str]:
    """The sections of a card of [`make_card`]."""
    start, *rest = re.split(r"^## (.+)\n", _SIGNATURE.sub("", card.text), flags=re.M)
    return {"": start.strip()} | {name: text.strip() for name, text in zip(rest[::2], rest[1::2], strict=True)}


def _hash(card):
    text = " ".join(_SIGNATURE.sub("", card.text).split())
    content = json.dumps([card.data.to_dict(), text], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def own_card(path: Path) -> ModelCard | None:
    """The card in a file; `None` if there is none, or it is not one that this package wrote and nobody changed."""
    try:
        card = ModelCard(path.read_text(encoding="utf-8")) if path.is_file() else None
        found = _SIGNATURE.search(card.text) if card is not None else None
        return card if card is not None and found and found[1] == _hash(card) else None
    except Exception:
        return None  # whatever a user wrote there; a YAML library has errors of its own


def signed(card: ModelCard) -> bytes:
    """The content of a card's file, with the signature."""
    card = ModelCard(_SIGNATURE.sub("", str(card)).rstrip() + "\n")
    signature = f"\n<!-- sparsebert wrote this card {_hash(card)}: once changed, it is never written again -->\n"
    return (str(card) + signature).encode()


def save_card(folder: Path, card: ModelCard) -> bool:
    """
    Write the card of a folder, with its signature, unless there is a README.md of the user. Whether it was written.
    """
    path = folder / CARD_NAME
    if path.exists() and own_card(path) is None:
        return False
    content = signed(card)
    if not path.exists() or path.read_bytes() != content:
        replace_files({path: content})
    return True


def renamed(card: ModelCard, repo_id: str, subfolder: str | None = None, tags: Sequence[str] = ()) -> ModelCard:
    """The card of a folder as it is in the repository, and the folder there, that it is pushed to, with more tags."""
    data: Any = card.data
    sections = card_sections(card)
    title, _, rest = sections[""].partition("\n")
    here = f'"{repo_id}"' + (f', subfolder="{subfolder}"' if subfolder else "")
    sections["Load"] = sections.get("Load", "").replace(f'"{title.removeprefix("# ")}"', here)
    if subfolder and "trust_remote_code" in sections["Load"]:
        # Transformers looks for code at the top of a repository only.
        with_package = sections["Load"].partition("\n\nWithout it")[0]
        sections["Load"] = f"{with_package}\n\nA model in a subfolder needs the package."
        data.library_name = "sparsebert"
    name = subfolder or repo_id.split("/")[-1]
    sections[""] = f"# {name}\n{rest}"
    if data.base_model == repo_id:  # loaded from where it goes again
        data.base_model = None
        data.pop("base_model_revision")
    if data.eval_results:
        data.model_name = name
    data.tags = list(dict.fromkeys([*(data.tags or ()), *tags]))
    return make_card(data, sections)


def name_in(metadata, name):
    """A name in the metadata of a mask, which anybody may have written; `None` if it is not a name."""
    value = metadata.get(name)
    return value if isinstance(value, str) and re.fullmatch(r"[\w./-]{1,200}", value, re.ASCII) else None


def describe_mask(
    description: Mapping[str, Any],
    sparsities: Sequence[Sequence[float]],
    metadata: Mapping[str, Any],
    distances: str = "",
) -> str:
    """
    What a mask is, and its sparsity per layer and head, in Markdown: from [`SparseMask.description`],
    [`SparseMask.head_sparsities`], the metadata, and what [`bridges`] says.
    """
    heads = [value for layer in sparsities for value in layer]
    made = {"search": "learned by the search", "pattern": "the pattern"}
    origin = next((f"{text} `{value}`" for name, text in made.items() if (value := name_in(metadata, name))), "")
    if metadata.get("pattern_parameters"):
        # Anybody may have written them: as code, which neither ends itself nor its cell.
        parameters = shortened(json.dumps(metadata["pattern_parameters"]))
        origin += f" with `{parameters.replace('|', '/').replace('`', '/')}`"
    layers = "one for all layers" if len(sparsities) == 1 else f"one for each of {len(sparsities)} layers"
    length = f"{description['length']} tokens; {_LENGTH_POLICIES[description['length_policy']]}"
    diagonal = {True: "kept", False: "removed"}.get(description["diagonal"])
    signed = "" if description.get("symmetric", True) else "signed "
    tiles = f"of two blocks of {description['block_size']} tokens"
    if rows := description.get("query_block_size"):
        tiles = f"of a block of {rows} queries and one of {description['block_size']} keys"
    special = _SPECIAL_TOKENS if description.get("special_rows", True) else _SPECIAL_COLUMNS
    rows = {
        "made by": origin,
        "removed": f"{sum(heads) / len(heads):.1%} of the pairs of tokens",
        "form": {"offsets": f"a bit per {signed}distance of two tokens", "table": "a bit per pair of tokens"}.get(
            description["form"], f"a bit per {signed}distance {tiles}"
        ),
        "made for": length,
        "masks": f"{layers}, {len(sparsities[0])} heads",
        "special tokens": special.get(description["special_tokens"], ""),
        "a token's attention to itself": diagonal or "",
        "what is removed": "enters as the mean query sees it" if description.get("rest") == "mean" else "",
        "distances": distances,
    }
    table = ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items() if text)]
    lines = ["Removed, in percent, by layer and head:", ""]
    many = len(sparsities[0]) > MOST_COLUMNS
    columns = ["lowest", "highest"] if many else [str(head) for head in range(len(sparsities[0]))]
    lines += [f"| layer | mean | {' | '.join(columns)} |", "|" + "---:|" * (len(columns) + 2)]
    for index, layer in enumerate(sparsities):
        values = [sum(layer) / len(layer), *([min(layer), max(layer)] if many else layer)]
        name = "all" if len(sparsities) == 1 else index
        lines.append(f"| {name} | {' | '.join(f'{100 * value:.1f}' for value in values)} |")
    return "\n".join([*table, "", *lines])


def mask_limits(description: Mapping[str, Any]) -> list[str]:
    """What to know before a mask is used, a line each."""
    return [
        f"The mask was made for {description['length']} tokens; {_LENGTH_POLICIES[description['length_policy']]}.",
        "Removing attention does not always save time: `sparsebert plan` says what a kernel can skip, and at a few "
        "hundred tokens attention is a small part of a model's time.",
    ]


def unbridged_distances(mask: Any, num_layers: int) -> list[tuple[int, int]]:
    """
    Distances of two tokens, each range as its first and last, that a mask cannot bridge within so many layers: those
    that are no sum of a distance per layer that one of its heads keeps, or of 0, since a token also keeps itself. Some
    others may be out of reach, near the ends or in a table. Special tokens, through which two layers bridge every
    distance, and the rest are left out.
    """
    if mask.length <= SPECIAL_TOKENS.index(mask.special_tokens):
        return []
    kept = _kept_distances(mask)
    middle = kept.shape[1] // 2
    steps = [(row.nonzero().flatten() - middle).tolist() for row in kept]
    reached = 1 << middle  # bit `middle + d` is distance d
    for layer in range(num_layers):
        before = reached
        for step in steps[layer % len(steps)]:
            reached |= before << step if step > 0 else before >> -step
        reached &= (1 << kept.shape[1]) - 1
    missing = [d for d in range(1, middle + 1) if not (reached >> (middle + d) | reached >> (middle - d)) & 1]
    ranges: list[tuple[int, int]] = []
    for distance in missing:
        begin = ranges.pop()[0] if ranges and ranges[-1][1] == distance - 1 else distance
        ranges.append((begin, distance))
    return ranges


def _kept_distances(mask):
    """
    Whether a head of each layer keeps the distance i - j of a query i and a key j among the m tokens that are not
    special, from 1 - m to m - 1: `(L, 2m - 1)`.
    """
    num_special = SPECIAL_TOKENS.index(mask.special_tokens)
    m = mask.length - num_special
    if mask.form == "table" or mask.query_block_size:
        others = slice(min(num_special, 1), min(num_special, 1) + m)
        table = mask.structure()[..., others, others].any(1).flip(-1)
        # In rows that are one shorter, each distance is a column.
        rows = torch.nn.functional.pad(table, (0, m)).flatten(1)[:, : m * (2 * m - 1)]
        return rows.unflatten(1, (m, 2 * m - 1)).any(1)
    keep, size, distances = mask.keep.any(1), mask.block_size or 1, torch.arange(1 - m, m)
    first = 0 if mask.symmetric else keep.shape[1] // 2
    distances = distances.abs() if mask.symmetric else distances
    tiles = distances.div(size, rounding_mode="floor"), -((-distances).div(size, rounding_mode="floor"))
    on_either_side = torch.zeros(len(keep), len(distances), dtype=torch.bool)
    for places in (tile + first for tile in tiles):
        known = (places >= 0) & (places < keep.shape[1])  # what is farther apart is removed
        on_either_side[:, known] |= keep[:, places[known]]
    return on_either_side


def bridges(mask: Any, num_layers: int) -> str:
    """Which distances a mask bridges within so many layers, in words: see [`unbridged_distances`]."""
    ranges = [str(low) if low == high else f"{low} to {high}" for low, high in unbridged_distances(mask, num_layers)]
    # From one token to a special one, and from there to the other, are two layers.
    around = ["the special tokens"] if num_layers > 1 and mask.special_tokens != "none" and mask.special_rows else []
    around += ["the rest"] if mask.rest != "none" else []
    layers = f"{num_layers} layer" + ("s" if num_layers > 1 else "")
    if not ranges:
        bridged = f"{layers} bridge{'s' if num_layers == 1 else ''} all distances of two tokens"
        return f"{bridged}, also without {' and '.join(around)}" if around else bridged
    shown = ", ".join(ranges[:_MOST_RANGES]) + (", ..." if len(ranges) > _MOST_RANGES else "")
    missing = f"{layers} cannot bridge distances of {shown} tokens"
    return f"{missing}, but through {' or '.join(around)}" if around else missing


def mask_tags(metadata: Mapping[str, Any]) -> list[str]:
    """Tags of a card."""
    kind = name_in(metadata, "search") or name_in(metadata, "pattern")
    return ["sparsebert", "sparse-attention", *([kind] if kind else [])]


def bare_mask_card(
    name: str,
    description: Mapping[str, Any],
    sparsities: Sequence[Sequence[float]],
    metadata: Mapping[str, Any],
    distances: str = "",
) -> ModelCard:
    """The card of a mask without a model, see [`describe_mask`]; `name` is that of its folder."""
    recorded = name_in(metadata, "base_model")
    base = hub_id(recorded)
    data = ModelCardData(
        library_name="sparsebert",
        base_model=base,
        base_model_revision=name_in(metadata, "base_model_revision") if base else None,
        tags=[*mask_tags(metadata), "attention-mask"],
    )
    intro = (
        f"# {name}\n\nAn attention mask for a Transformer encoder, without a model: two small files that sparsebert "
    )
    intro += f"{__version__} wrote."
    found = f" It was found for `{base}`." if base else ""
    load = f"""{PACKAGE}

```python
import sparsebert
from transformers import AutoModel

model = sparsebert.attach(AutoModel.from_pretrained("{base or "MODEL"}"), "{name}")
```

Without it, `mask_config.json` describes the mask and `mask.safetensors` holds its bits; transformers does not use
them."""
    fits = f"It fits encoders with {len(sparsities[0])} heads"
    fits += f" and {len(sparsities)} layers." if len(sparsities) > 1 else "."
    limits = [fits, *mask_limits(description)]
    if not base:
        known = "It was found for a model in a local folder."
        limits.insert(1, known if recorded else "Which model it was found for is not recorded.")
    sections = {
        "": intro + found,
        "Mask": describe_mask(description, sparsities, metadata, distances),
        "Load": load,
        "Limits": "\n".join(f"- {line}" for line in limits),
    }
    return make_card(data, sections)


def hub_id(name: str | None) -> str | None:
    """A name that may be one of the Hub, `None` for that of a local folder."""
    if name is None:
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return None if Path(name).is_dir() else name


def collection_card(repo_id: str, masks: Sequence[Mapping[str, Any]]) -> ModelCard:
    """The card of a repository with several masks, from [`list_masks`]."""
    named = {mask["name"]: base for mask in masks if (base := hub_id(mask["base_model"]))}
    bases = sorted({*named.values()})
    tags = sorted({mask["made_by"] for mask in masks if mask["made_by"]})
    data = ModelCardData(
        library_name="sparsebert",
        base_model=bases[0] if len(bases) == 1 else bases or None,
        tags=["sparsebert", "sparse-attention", *tags, "attention-mask"],
    )
    lines = ["| name | made by | removed | form | tokens | layers | heads |", "|---|---|---:|---|---:|---:|---:|"]
    for mask in masks:
        removed = "" if mask["sparsity"] is None else f"{mask['sparsity']:.1%}"
        cells = (mask["made_by"] or "", removed, mask["form"], mask["length"], mask["num_layers"], mask["num_heads"])
        lines.append(f"| [{mask['name'] or '.'}]({mask['name'] or '.'}) | {' | '.join(map(str, cells))} |")
    # A mask with the model that it was found for, if there is one.
    ordered = sorted((mask["name"] for mask in masks if mask["name"]), key=lambda name: name not in named)
    first = ordered[0] if ordered else "NAME"
    load = f"""{PACKAGE}

```python
import sparsebert
from transformers import AutoModel

model = AutoModel.from_pretrained("{named.get(first, "MODEL")}")
sparsebert.attach(model, "{repo_id}", subfolder="{first}")
```"""
    intro = f"# {repo_id.split('/')[-1]}\n\nAttention masks for Transformer encoders, without models."
    return make_card(data, {"": intro, "Masks": "\n".join(lines), "Load": load})
