"""
The comparison of `make demo`: MiniLM reads documents of 1024 tokens, dense, through its mask, in halves or only the
first half, and is asked which document a later passage comes from. Time and quality in a table and a picture.

    python demo.py MINILM MASKED [ENGINE] OUTPUT

MINILM is the folder of the stock model, MASKED that of the model with a mask for 1024 tokens, and ENGINE the same in
OpenVINO. OUTPUT gets comparison.json and comparison.png.
"""

import json
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

import sparsebert
from sparsebert.analysis.tables import Table, print_tables
from sparsebert.data.builtin_corpus import builtin_documents


ENGINES = ("PyTorch", "OpenVINO")
LENGTH, HALF, QUERY, DOCUMENTS, PER_PACKAGE, BATCH = 1024, 512, 64, 40, 12, 4
# Tokens between a document and its passage, which otherwise goes on in the same sentence.
GAP = 64


def choose_documents(tokenizer):
    """Documents as ids, and for each a passage that follows later, in the same documentation of a module."""
    documents = [each for each in builtin_documents() if sum(len(text.split()) for text in each.paragraphs) > 900]
    random.Random(0).shuffle(documents)
    rows, queries, packages = [], [], []
    for document in documents:
        if packages.count(document.package) < PER_PACKAGE and len(rows) < DOCUMENTS:
            ids = tokenizer(" ".join(document.paragraphs), add_special_tokens=False, verbose=False).input_ids
            start = LENGTH - 2 + GAP
            if len(ids) >= start + QUERY:
                rows.append(ids[: LENGTH - 2])
                queries.append(ids[start : start + QUERY])
                packages.append(document.package)
    return rows, queries


def embed(model, tokenizer, rows):
    """Normalized means of the last hidden states, and the seconds that they took."""
    ids = [[tokenizer.cls_token_id, *row, tokenizer.sep_token_id] for row in rows]
    batches = torch.tensor(ids).split(BATCH * LENGTH // len(ids[0]))
    with torch.no_grad():
        model(input_ids=batches[0])  # what is prepared once
        begin = time.perf_counter()
        means = [model(input_ids=batch).last_hidden_state.mean(1) for batch in batches]
    return normalize(torch.cat(means).float()), time.perf_counter() - begin


def reciprocal_ranks(queries, documents):
    """Of the right document, among all by their similarity to a passage."""
    similarity = queries @ documents.T
    return 1 / (similarity >= similarity.diag()[:, None]).sum(1).float()


def compare(minilm, masked, engine):
    """For each way to read the documents its seconds, by engine, and its reciprocal ranks."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    rows, passages = choose_documents(tokenizer)
    if len(rows) < 2:
        sys.exit(f"the installed packages have no documentation of more than {LENGTH + GAP + QUERY} tokens")
    short = AutoModel.from_pretrained(minilm).eval()
    asked, _ = embed(short, tokenizer, passages)
    halves = [[row[: HALF - 2] for row in rows], [row[HALF - 2 :][: HALF - 2] for row in rows]]
    results = {name: {"seconds": {}} for name in ("dense", "masked", "dense, two halves", "dense, first half only")}

    def run(name, engine_name, model, texts, queries=asked):
        found, seconds = zip(*(embed(model, tokenizer, part) for part in texts), strict=True)
        results[name]["seconds"][engine_name] = sum(seconds)
        if engine_name == "PyTorch":
            results[name]["ranks"] = reciprocal_ranks(queries, normalize(sum(found)))

    long = sparsebert.extend_positions(AutoModel.from_pretrained(minilm).eval(), LENGTH)
    sparse = sparsebert.load(masked).eval()
    for engine_name in ("PyTorch", *(["OpenVINO"] if engine else [])):
        if engine_name == "OpenVINO":
            precision = json.loads(Path(engine, "metrics.json").read_text())["precision"]
            sparse = sparsebert.load(engine)
            long, short = (sparsebert.compile(model, precision=precision) for model in (long, short))
        run("dense", engine_name, long, [rows])
        run("masked", engine_name, sparse, [rows], embed(sparse, tokenizer, passages)[0])
        run("dense, two halves", engine_name, short, halves)
        run("dense, first half only", engine_name, short, halves[:1])
    begin = time.perf_counter()
    texts, queries = ([tokenizer.decode(ids) for ids in part] for part in (rows, passages))
    words = TfidfVectorizer(sublinear_tf=True, min_df=2)  # as the simple baseline of the built-in task
    matrices = [torch.tensor(matrix.toarray()) for matrix in (words.fit_transform(texts), words.transform(queries))]
    ranks = reciprocal_ranks(matrices[1], matrices[0])
    results["bag of words"] = {"seconds": {"PyTorch": time.perf_counter() - begin}, "ranks": ranks}
    return results, len(rows)


def table_of(results, count):
    """The table that the demo prints."""
    lines = []
    for name, result in results.items():
        seconds, ranks = result["seconds"], result["ranks"]
        times = {f"{engine}, s": f"{seconds[engine]:.1f}" if engine in seconds else "" for engine in ENGINES}
        found = {"found first": f"{(ranks == 1).float().mean():.0%}", "mean reciprocal rank": f"{ranks.mean():.2f}"}
        lines.append({"reading": name} | times | found)
    gap = results["masked"]["ranks"] - results["dense"]["ranks"]
    error = 1.96 * gap.std() / count**0.5
    return Table.of(
        f"Which of {count} documents of {LENGTH} tokens does a passage of {QUERY} tokens continue?",
        lines,
        (
            f"time: to embed all documents; masked minus dense: {gap.mean():+.2f} in reciprocal rank, 95 % interval "
            f"[{gap.mean() - error:+.2f}, {gap.mean() + error:+.2f}]. The documents are documentation of "
            "installed packages, of which words alone say much: hence the bag of words",
        ),
    )


def draw(results, path):
    """Bars: how long each way of reading takes, and how often it finds the document first."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    names = list(results)[::-1]
    shown = [engine for engine in ENGINES if any(engine in result["seconds"] for result in results.values())]
    width = 0.8 / len(shown)
    for index, engine in enumerate(shown):
        for place, name in enumerate(names):
            seconds = results[name]["seconds"].get(engine)
            if seconds is not None:
                label = engine if name == "dense" else None
                y = place + width * ((len(shown) - 1) / 2 - index)
                left.barh(y, seconds, 0.9 * width, color=f"C{index}", label=label)
                left.text(seconds, y, f" {seconds:.1f}", va="center", fontsize=8)
    quality = [float((results[name]["ranks"] == 1).float().mean()) * 100 for name in names]
    right.barh(range(len(names)), quality, 0.7, color="C2")
    for place, value in enumerate(quality):
        right.text(value, place, f" {value:.0f}", va="center", fontsize=8)
    left.set_yticks(range(len(names)), names)
    left.set_xlabel("seconds for all documents: less is better")
    right.set_xlabel("document found first, %: more is better")
    right.set_xlim(0, 100)
    left.margins(x=0.12)
    if len(shown) > 1:
        left.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(minilm, masked, *rest):
    """Compare, print, and write table and picture."""
    *engine, output = rest
    results, count = compare(minilm, masked, engine[0] if engine and Path(engine[0]).is_dir() else None)
    table = table_of(results, count)
    print_tables([table])
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: result | {"ranks": result["ranks"].tolist()} for name, result in results.items()}
    (folder / "comparison.json").write_text(json.dumps(numbers, indent=2) + "\n")
    if find_spec("matplotlib"):
        draw(results, folder / "comparison.png")
        print(f"The picture: {folder / 'comparison.png'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
