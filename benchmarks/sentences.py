"""
Sentence embeddings of a masked encoder against the dense one, without any fine-tuning.

    python -m benchmarks.sentences --model DIR_OR_HUB_ID --data STSB_DIR --masks DIR ... [--sparsities 0.8 0.9]

Embeddings are the mean of the last hidden states over the tokens. For each mask: the fraction that it removes at its
own length and from these sentences, the cosine of its embeddings with the dense model's, and Spearman's correlation of
the cosines of STS-B pairs with their scores. A model's folder comes with its own weights; a mask alone runs with those
of `--model`.
"""

import argparse
from pathlib import Path

from transformers import AutoModel, AutoTokenizer
from transformers.utils import CONFIG_NAME

from sparsebert import attach, load
from sparsebert.analysis.tables import Table
from sparsebert.data.tasks import glue
from sparsebert.files import write_metrics
from sparsebert.masks.matched import matched_patterns
from sparsebert.models.attaching import read_mask
from sparsebert.models.loading import find_file
from studies.shared.sentence_similarity import similarity

from ._report import explained


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sentences", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR_OR_HUB_ID", help="the dense encoder")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder of STS-B, with the file of the split")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--masks", nargs="*", default=[], metavar="DIR", help="folders or Hub ids of models or masks")
    parser.add_argument(
        "--sparsities",
        nargs="*",
        type=float,
        default=[],
        help="compare random and manual masks of these sparsities, at 128 tokens",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file to write")
    options = parser.parse_args(arguments)
    with explained(parser, options.output):
        pairs = glue.load("stsb", options.data, [options.split])[options.split]
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModel.from_pretrained(options.model).eval()
    rows = {}
    rows["dense"], dense = similarity(model, tokenizer, pairs)
    for source in options.masks:
        if find_file(source, CONFIG_NAME):
            masked = load(source, AutoModel).eval()
        else:
            masked = attach(AutoModel.from_pretrained(options.model).eval(), read_mask(source))
        name = Path(source).name
        rows[source if name in rows else name], _ = similarity(masked, tokenizer, pairs, dense)
    for sparsity in options.sparsities:
        heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
        for name, mask in matched_patterns(sparsity, 128, heads, layers).items():
            masked = attach(AutoModel.from_pretrained(options.model).eval(), mask, allow_empty_rows=True)
            rows[f"{name} for {sparsity}"], _ = similarity(masked, tokenizer, pairs, dense)
    if options.output:
        write_metrics(options.output, rows)
    texts = [
        {
            "mask": name,
            "removed": f"{row['sparsity']:.1%}",
            "on sentences": f"{row['input_sparsity']:.1%}",
            "cosine to dense": f"{row['cosine']:.3f}",
            "5 % quantile": f"{row['cosine_5']:.3f}",
            "STS-B Spearman": f"{100 * row['spearman']:.1f}",
        }
        for name, row in rows.items()
    ]
    print(Table.of("Sentence embeddings", texts).markdown(), end="")


if __name__ == "__main__":
    main()
