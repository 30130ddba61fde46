"""
Learn a mask for a trained model, from unlabeled text and without changing the weights.

The mask is learned by matching the dense model, see `--objective`. With `--task`, a model that was fine-tuned on the
task gets a mask from the inputs of the task, without their labels. `--recover STEPS` then trains the weights through
the frozen mask; with `--mask` there is no search, and the weights are trained through the given mask. The result is
compared with random and manual masks of the same sparsity. Writes to `output_dir` the model with its mask (stock
files, read back by `sparsebert.load`), the tokenizer, `metrics.json` and pictures (with the extra `viz`), and after a
search `mask_probs.safetensors`.
"""

import dataclasses

from ..learning.mask_description import allowed_fields
from ..learning.searches import SEARCHES
from ..models.sentence_files import IMPORT_FIRST, sentence_length
from ..training.searching.search_arguments import FIELDS, SECTIONS, PostHocArguments
from ..training.searching.search_run import agreement_table, search_post_hoc
from ._command import Command, Results


def command(words):
    meaningful = {"search", *(name for search in SEARCHES for name in allowed_fields(search))} - {"mask_length"}
    fields = {item.name for item in dataclasses.fields(SECTIONS["model"])}
    examples = (
        "--model DIR --data FILE --max_length 512 --target_sparsity 0.9 --output_dir DIR2",
        "--model DIR --data FILE --max_length 1024 --device_target gpu --output_dir DIR2",
        "--model DIR --task mrpc --data GLUE_DIR --target_sparsity 0.9 --output_dir DIR3",
    )
    # The model keeps its own configuration, and the mask is as long as the rows.
    excluded = {"model": tuple(sorted(fields - meaningful))}
    return Command(run, SECTIONS, examples, excluded=excluded, defaults={"model": FIELDS})


def run(values):
    metrics = search_post_hoc(values)
    lines = []
    if outcome := metrics["search_outcome"]:
        found = f"asked for {outcome['asked']:.1%}, got {outcome['got']:.1%}"
        lines.append(f"{found}; the search took {metrics['seconds']['search']:.0f} s")
    lines.append(f"live tiles, which a GPU kernel computes: {metrics['live_tiles']:.1%} of those of 64 x 64 tokens")
    plan = metrics["plan"]
    choice, where = plan["choices"]["inference"], f"{plan['length']} tokens, {plan['device']}, {plan['dtype']}"
    lines.append(f"inference by sparse_auto ({where}): {choice['backend']}, {choice['reason']}")
    if seconds := metrics["inference_seconds"]:
        times = f"{1000 * seconds['dense']:.0f} ms dense, {1000 * seconds['masked']:.0f} ms through the mask"
        lines.append(f"inference of a batch: {times}, {seconds['dense'] / seconds['masked']:.2f} times as fast")
    output = values["data"]["output_dir"]
    if (cut := sentence_length(output)) and cut < values["data"].get("max_length", PostHocArguments.max_length):
        lines.append(f"sentence-transformers cuts texts to {cut} tokens, as before: max_seq_length raises that")
    lines.append(f"written to {output}: {IMPORT_FIRST}")
    return Results(metrics, [agreement_table(metrics)], lines)
