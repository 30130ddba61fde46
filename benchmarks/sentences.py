"""
Sentence embeddings of a masked encoder against the dense one, without any fine-tuning.

    python -m benchmarks.sentences --model DIR_OR_HUB_ID --data STSB_DIR --masks DIR ... [--sparsities 0.8 0.9]

Embeddings are the mean of the last hidden states over the tokens. For each mask: the fraction that it removes at its
own length and from these sentences, the cosine of its embeddings with the dense model's, and Spearman's correlation of
the cosines of STS-B pairs with their scores. A model's folder comes with its own weights; a mask alone runs with those
of `--model`.

Letters: N sentences, B batch, n length, D hidden size.
"""

import argparse
from pathlib import Path

import torch
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer
from transformers.utils import CONFIG_NAME

from sparsebert import attach, load
from sparsebert.analysis.tables import Table
from sparsebert.data.tasks import glue
from sparsebert.files import write_metrics
from sparsebert.masks.matched import matched_patterns
from sparsebert.models.attaching import read_mask
from sparsebert.models.loading import find_file
from sparsebert.training.task_models import input_sparsity


def embed(model, tokenizer, sentences, max_length=128, batch_size=64):
    """
    Embed sentences as vectors of length 1.

    Args:
        model (`PreTrainedModel`): Base model.
        tokenizer (`PreTrainedTokenizer`): Its tokenizer.
        sentences (`list[str]`): N sentences.
        max_length (`int`, *optional*, defaults to 128): Length in tokens to which sentences are truncated.
        batch_size (`int`, *optional*, defaults to 64): Number of sentences per batch, B.

    Returns:
        `tuple`: `torch.Tensor` of shape `(N, D)`, float32 on the CPU, and the `list` of N lengths in tokens.
    """
    encoded = tokenizer(sentences, truncation=True, max_length=max_length, return_token_type_ids=False)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    order = sorted(range(len(sentences)), key=lengths.__getitem__)
    result = torch.empty(len(sentences), model.config.hidden_size)
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        inputs = {name: [values[place] for place in places] for name, values in encoded.items()}
        inputs = tokenizer.pad(inputs, return_tensors="pt").to(model.device)
        with torch.no_grad():
            states = model(**inputs).last_hidden_state.float()  # (B, n, D)
        weights = inputs["attention_mask"][..., None]
        mean = (states * weights).sum(1) / weights.sum(1)
        result[places] = torch.nn.functional.normalize(mean, dim=-1).cpu()
    return result, lengths


def measure(model, tokenizer, pairs, dense=None):
    """
    Measure one row of the table.

    Args:
        model (`PreTrainedModel`): Base model.
        tokenizer (`PreTrainedTokenizer`): Its tokenizer.
        pairs (`datasets.Dataset`): Sentence pairs in the columns `text`, `text_pair` and `label`.
        dense (`torch.Tensor`, *optional*): Embeddings of the dense model.

    Returns:
        `tuple`: The row as a `dict`, and the embeddings.
    """
    count = len(pairs)
    embeddings, lengths = embed(model, tokenizer, [*pairs["text"], *pairs["text_pair"]])
    cosines = (embeddings[:count] * embeddings[count:]).sum(-1)
    sparse_attention = getattr(model, "sparse_attention", None)
    mask = None if sparse_attention is None else sparse_attention.mask
    agreement = torch.ones(2 * count) if dense is None else (embeddings * dense).sum(-1)
    return {
        "sparsity": 0.0 if mask is None else mask.sparsity,
        "input_sparsity": 0.0 if mask is None else input_sparsity(mask, lengths),
        "cosine": agreement.mean().item(),
        "cosine_5": agreement.quantile(0.05).item(),
        "spearman": float(spearmanr(cosines, pairs["label"]).statistic),
    }, embeddings


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
    pairs = glue.load("stsb", options.data, [options.split])[options.split]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model).eval()
    rows = {}
    rows["dense"], dense = measure(model, tokenizer, pairs)
    for source in options.masks:
        if find_file(source, CONFIG_NAME):
            masked = load(source, AutoModel).eval()
        else:
            masked = attach(AutoModel.from_pretrained(options.model).eval(), read_mask(source))
        rows[Path(source).name], _ = measure(masked, tokenizer, pairs, dense)
    for sparsity in options.sparsities:
        heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
        for name, mask in matched_patterns(sparsity, 128, heads, layers).items():
            masked = attach(AutoModel.from_pretrained(options.model).eval(), mask, allow_empty_rows=True)
            rows[f"{name} for {sparsity}"], _ = measure(masked, tokenizer, pairs, dense)
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
