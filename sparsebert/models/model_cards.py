"""The card of a model with a mask: where it comes from, what the mask is, how to load it."""

import json
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from transformers.utils import CONFIG_NAME

from ..file_kinds import read_plain
from ..hub import commit_of, commits_of
from ..masks.mask_cards import CARD_NAME, PACKAGE, bridges, describe_mask, make_card, mask_limits, mask_tags, save_card
from ..version import __version__
from .bert.configuration_sparsebert import SparseBertConfig
from .model_configs import ATTENTION_FIELD, runs_without_package


# The Hub's task of a model, by the end of the name of its class.
PIPELINE_TAGS = {
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "Model": "feature-extraction",
}


def save_model_card(model: Any, folder: Path) -> None:
    """Write the card of a model with a mask that was saved to a folder. A README.md of the user stays."""
    config, sparse_attention = model.config, model.sparse_attention
    name, class_name = folder.resolve().name, getattr(model, "stock_class", type(model)).__name__
    base = _base(config)
    saved = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    without_package = runs_without_package(saved, frozen=sparse_attention.mask is not None)
    data = ModelCardData(
        # What loads the model with its mask.
        library_name="transformers" if without_package else "sparsebert",
        pipeline_tag=next((tag for end, tag in PIPELINE_TAGS.items() if class_name.endswith(end)), None),
        **base,
    )
    mask = sparse_attention.mask
    if mask is None:
        search = f"`{sparse_attention.config.search}`" if sparse_attention.config.search else "a search"
        what, description = "with an attention mask that is still being learned", f"It is being learned by {search}."
        limits = ["The mask is not frozen: `model.freeze()` freezes it."]
        metadata = {"search": sparse_attention.config.search}
    else:
        what = f"with sparse attention: its mask removes {mask.sparsity:.1%} of the pairs of tokens"
        metadata = mask.metadata
        distances = bridges(mask, sparse_attention.num_layers)
        description = describe_mask(mask.description(), mask.head_sparsities(), metadata, distances)
        limits = mask_limits(mask.description())
    data.tags = mask_tags(metadata)
    came = f" It comes from `{base['base_model']}`." if base.get("base_model") else ""
    sections = {
        "": f"# {name}\n\nA `{class_name}` {what}. sparsebert {__version__} wrote it.{came}",
        "Mask": description,
        "Load": _how_to_load(name, class_name, saved, without_package),
        "Limits": "\n".join(f"- {line}" for line in limits),
    }
    save_card(folder, make_card(data, sections))


def _base(config):
    """Metadata about the model that this one was loaded from: its Hub id, or what the card of its folder says."""
    source = config.name_or_path or ""
    found, path = {}, None
    if source and Path(source).is_dir():
        path = Path(source, CARD_NAME)
    elif commits_of(config):
        commit = commit_of(config)
        found = {"base_model": source, "base_model_revision": commit}
        path = try_to_load_from_cache(source, CARD_NAME, revision=commit)
    try:
        card = ModelCard(read_plain(path).decode()).data
    except Exception:
        return found  # no card, or one that anybody may have written
    names = ("license", "license_name", "license_link", "language", "base_model", "base_model_revision")
    return {name: card.get(name) for name in names if card.get(name)} | found


def _how_to_load(name, class_name, saved, without_package):
    auto = "AutoModel" + class_name.removeprefix("Sparse").partition("For")[2].join(("For", ""))
    auto = auto if "For" in class_name and hasattr(transformers, auto) else "AutoModel"
    if class_name.endswith("LMHeadModel"):
        auto = "AutoModelForCausalLM"
    with_it = f"""{PACKAGE}

```python
import sparsebert  # first, also before from_pretrained, pipeline or SentenceTransformer

model = sparsebert.load("{name}")
```"""
    ours = saved.get("model_type") == SparseBertConfig.model_type
    otherwise = (
        "transformers refuses to load the model. Programs that read the weights alone would run it without the mask, "
        "which gives other outputs."
    )
    if ATTENTION_FIELD not in saved:  # it was saved with output_attentions
        otherwise = (
            "transformers loads the same weights without the mask and without a warning: the model then attends to "
            "all tokens, and its outputs are different."
        )
    if without_package:
        without = f"""Without it, with the code in this repository, which is slower:

```python
from transformers import {auto}

model = {auto}.from_pretrained("{name}", trust_remote_code=True)
```"""
        refused = "transformers refuses to load the model and asks for it."
        without += f"\n\nWithout `trust_remote_code=True` {refused if ours else otherwise}"
    elif ours:
        without = "Without it this model cannot be run: install the package."
    else:
        without = f"Without it, {otherwise}"
    return f"{with_it}\n\n{without}"
