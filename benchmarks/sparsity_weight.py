"""
How sparse the raw penalty makes a mask, over many sizes of its weight lambda, and why.

    python -m benchmarks.sparsity_weight --output runs/sparsity_weight

For each form of the mask: a search of `recipes/demo_dam_s.yaml` at each lambda (finished runs are not repeated) and,
during a search without penalty, the size of the two gradients that meet in the logits: that of the task and that of
the penalty at lambda 1. Prints a table; writes it, a plot and `sparsity_weight.json` to the output folder.
"""

import argparse
import json
import statistics

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from sparsebert import SparseBertConfig, SparseBertForMaskedLM
from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.commands import parse
from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.data.tokenization import train_tokenizer
from sparsebert.training.pretraining.pretraining_arguments import PretrainingArguments
from sparsebert.training.trainer import SparseBertTrainer

from ._pretraining import add_options, folder_name, run
from ._report import ROOT, STYLES


# Name to the flags of pretrain.py.
RAW = {"target_sparsity": "null", "search_end": 1, "freeze_sparsity": "null", "allow_empty_rows": "true"}
FORMS = {
    "additive, c = 10000": RAW | {"mask_form": "additive", "mask_constant": 1e4},
    "additive, c = 10": RAW | {"mask_form": "additive", "mask_constant": 10},
    "log": RAW | {"mask_form": "log"},
}
WEIGHTS = (0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


class Gradients(TrainerCallback):
    """Root mean square over the logits of the task's gradient and of the penalty's at lambda 1, every step."""

    def __init__(self):
        self.task, self.penalty = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        learned = model.sparse_attention.learned
        probs = torch.sigmoid(learned.alpha())
        (penalty,) = torch.autograd.grad((probs * learned.search.counts).sum(), learned.logits)
        for values, gradient in ((self.task, learned.logits.grad), (self.penalty, penalty)):
            values.append(gradient.square().mean().sqrt().item())


def gradients(flags, options):
    """Medians of both along the search, and lambda at which they are alike."""
    arguments = [str(options.recipe), "--sparsity_weight", "0", "--max_grad_norm", "0"]
    for name, value in flags.items():
        arguments += [f"--{name}", str(value)]
    _, recipe = parse(["pretrain", *arguments])
    data = PretrainingArguments(**recipe["data"])
    training = TrainingArguments(**recipe["training"] | {"max_steps": options.steps, "report_to": "none"})
    set_seed(training.seed)
    model = SparseBertForMaskedLM(SparseBertConfig(**recipe["model"]))
    tokenizer = train_tokenizer(load_documents(options.text, "train"), model.config.vocab_size)
    documents = load_documents(options.text, "train")
    rows = pretraining_dataset(documents, tokenizer, data.max_length, data.nsp, training.seed, data.max_tokens)
    recorded = Gradients()
    SparseBertTrainer(
        model, training, train_dataset=rows, callbacks=[recorded],
        data_collator=pretraining_collator(tokenizer, data.mlm_probability, pad_to_multiple_of=data.max_length),
    ).train()  # fmt: skip
    task, penalty = statistics.median(recorded.task), statistics.median(recorded.penalty)
    return {"task": task, "penalty": penalty, "balance": task / penalty}


def measure(options):
    """All runs, or without the gradients those that are finished: `{form: {"gradients": ..., "runs": {...}}}`."""
    results = {}
    for name, flags in FORMS.items():
        runs = {}
        for weight in options.weights:
            fields = flags | {"max_steps": options.steps, "sparsity_weight": weight}
            folder = options.output.absolute() / folder_name(f"{name} {weight:g}")
            if (metrics := run(folder, fields, options)) is not None:
                runs[weight] = metrics
        results[name] = {"gradients": None if options.finished else gradients(flags, options), "runs": runs}
    return results


def table(results):
    """A row per form and lambda."""
    rows = []
    for name, result in results.items():
        for weight, metrics in result["runs"].items():
            rows.append(
                {
                    "form": name,
                    "lambda": f"{weight:g}",
                    "removed": f"{metrics['sparsity']:.1%}",
                    "MLM loss": f"{metrics['mlm_loss']:.3f}",
                    "gradients alike at lambda": f"{result['gradients']['balance']:.1g}"
                    if result["gradients"]
                    else "",
                }
            )
    return Table.of("Sparsity against the weight of the penalty", rows)


def plot(results, path):
    """Sparsity against lambda, and where the penalty's gradient is as large as the task's."""
    figure = new_figure(7, 4.5, "constrained")
    axis = figure.subplots()
    for (name, result), (color, marker) in zip(results.items(), STYLES, strict=False):
        runs = {weight: metrics for weight, metrics in result["runs"].items() if weight > 0}
        axis.plot(
            list(runs), [metrics["sparsity"] for metrics in runs.values()], color=color, marker=marker, label=name
        )
        if result["gradients"]:
            axis.axvline(result["gradients"]["balance"], color=color, ls=":", lw=1)
    axis.set_xscale("log")
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("lambda, weight of the penalty (dotted: its gradient is as large as the task's)")
    axis.set_ylabel("fraction of entries removed (P > 1/2 kept)")
    axis.set_title("Sparsity of the mask against the weight of the penalty")
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, path)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparsity_weight", description=__doc__.split("\n\n")[0])
    add_options(parser, ROOT / "recipes" / "demo_dam_s.yaml")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a search")
    parser.add_argument("--weights", type=float, nargs="+", default=list(WEIGHTS), help="values of lambda")
    options = parser.parse_args(arguments)
    results = measure(options)
    found = table(results)
    print(found.markdown())
    (options.output / "sparsity_weight.md").write_text(found.markdown(), encoding="utf-8")
    (options.output / "sparsity_weight.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    plot(results, options.output / "sparsity_weight.png")


if __name__ == "__main__":
    main()
