""""""

import copy
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, set_seed

from ..analysis.pictures import plot_heads, plot_mean_probs, plot_offset_profile
from ..files import write_metrics
from ..masks.matched import matched_patterns
from ..models.configuration_sparsebert import SparseBertConfig
from ..models.loading import model_class_of
from ..search.learned_mask import MASK_PROBS_NAME
from ..training.matching import agreement, carrier, learn_mask, random_batches, recover, start_from_attention
from ..training.post_hoc import (
    LEARNED,
    RECOVERED,
    START_BATCHES,
    PosthocArguments,
    _attach,
    check,
    read_rows,
    report_table,
)
from ..training.recipes import load_recipe


def main(arguments):
    start = time.perf_counter()
    recipe = load_recipe(arguments, {"data": PosthocArguments, "model": SparseBertConfig})
    options = PosthocArguments(**recipe["data"])
    config, fields = check(options, recipe["model"])
    output = Path(options.output_dir)
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows, held_out = read_rows(options, tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, held_out = rows.to(device), held_out.to(device)
    seconds = {"prepare": time.perf_counter() - start}

    model = model_class_of(config).from_pretrained(options.model).to(device).eval()
    # Until its weights change, the model itself is the dense one.
    teacher = copy.deepcopy(model).requires_grad_(False) if options.recover or options.train else None
    _attach(model, options, fields)
    sparse_attention, dense = model.sparse_attention, carrier(model)
    begin = time.perf_counter()
    start_from_attention(model, dense, random_batches(rows, options.batch_size, START_BATCHES, options.seed))
    started_from = sparse_attention.thresholded_mask(sparsity=fields["target_sparsity"])
    batches = random_batches(rows, options.batch_size, options.steps, options.seed, options.shortest)
    learn_mask(model, batches, options.steps, options.learning_rate, dense, options.train == "norms", _log)
    outcome, probs = sparse_attention.outcome(), sparse_attention.mask_probs()
    mask = model.freeze(metadata={"run": output.name})
    seconds["search"] = time.perf_counter() - begin

    # What ELECTRA is pre-trained for is not to predict tokens.
    heads = ("ForMaskedLM",) if config.model_type == "electra" else ("ForMaskedLM", "ForPreTraining")
    has_mlm = type(model).__name__.endswith(heads)
    held_out = (held_out, teacher, tokenizer if has_mlm else None)
    masks = {LEARNED: mask, "dense model's attention": started_from}
    if options.patterns:
        masks |= matched_patterns(
            mask.sparsity, options.max_length, config.num_attention_heads, config.num_hidden_layers, options.seed
        )
    begin = time.perf_counter()
    report = agreement(model, {"dense": carrier(model).mask} | masks, *held_out, seed=options.seed)
    seconds["report"] = time.perf_counter() - begin
    if options.recover:
        begin = time.perf_counter()
        model.set_attn_implementation("sparse_auto")
        batches = random_batches(rows, options.batch_size, options.recover, options.seed + 1, options.shortest)
        recover(model, teacher, batches, options.recover, options.recover_learning_rate, _log)
        seconds["recover"] = time.perf_counter() - begin
        report |= agreement(model, {RECOVERED: mask}, *held_out, seed=options.seed)
        masks[RECOVERED] = mask
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    save_file({"probs": probs.flatten(0, 1)}, output / MASK_PROBS_NAME)
    if find_spec("matplotlib"):
        plot_heads(mask, output / "heads.png")
        plot_mean_probs(probs, output / "mean_probs.png")
        plot_offset_profile(probs, output / "offset_profile.png", mask.special_tokens)
    sparsities = {"dense": 0.0} | {name: value.sparsity for name, value in masks.items()}
    parameters = {name: value.metadata.get("pattern_parameters") for name, value in masks.items()}
    seconds["total"] = time.perf_counter() - start
    metrics = {
        "model": options.model,
        "search": fields["search"],
        "share_layers": fields["share_layers"],
        "steps": options.steps,
        "recover": options.recover,
        "search_outcome": outcome,
        "sparsity": sparsities,
        "pattern_parameters": {name: value for name, value in parameters.items() if value is not None},
        "agreement": report,
        "seconds": seconds,
    }
    write_metrics(output / "metrics.json", metrics)
    print(report_table(report, sparsities))
    print(f"asked {outcome['asked']:.1%}, got {mask.sparsity:.1%}; search {seconds['search']:.0f} s")


def _log(step, loss):
    if step % 20 == 0:
        print(f"step {step}: error {loss:.4f}", flush=True)
