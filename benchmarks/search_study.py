"""
Which mask search learns fastest and best.

For each setting and seed: a search, and a fresh model trained through the mask that it found; beside them dense, and
every manual mask at the same sparsity. All at one budget of tokens.

    python -m benchmarks.search_study --text FILE --validation FILE --output runs/study

Runs `pretrain.py recipes/demo_dam_s.yaml` for each; finished runs are not repeated. Prints a table; writes it, a plot
of the loss along the searches and `study.json` to the output folder.
"""

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor

from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.masks.matched import VARIED, matched_patterns

from ._pretraining import add_options, folder_name, run
from ._report import ROOT, STYLES


SPARSITY = 0.92
LENGTH, HEADS = 128, 4
MANUAL = ("dense", *VARIED, "window without diagonal")
PAPER = {"initial_decay": 0, "mask_form": "additive", "hard": "true", "noise_scale": 1, "temperature_end": 1}
TARGET = {
    "target_sparsity": SPARSITY,
    "initial_decay": 0,
    "initial_sparsity": 0.5,
    "sparsity_warmup": 0,
    "sparsity_ramp": 0.4,
}
ANNEALED = TARGET | {"mask_form": "log", "hard": "false", "noise_scale": 0, "temperature_end": 0.1}
SOFT = ANNEALED | {"mask_form": "additive", "mask_constant": 10}
LOCAL = ANNEALED | {"initial_decay": 2, "initial_sparsity": SPARSITY}
EARLY = {"search_end": 0.4}
NO_DIAGONAL_30 = {"diagonal": "remove", "mask_logit_scale": 30}
# Name to the flags of pretrain.py. Those without a target are frozen at the same sparsity.
SETTINGS = {
    "penalty 1e-4 (paper)": PAPER | {"sparsity_weight": 1e-4},
    "no penalty": PAPER | {"sparsity_weight": 0},
    "hard samples, additive": PAPER | TARGET,
    "annealed": ANNEALED,
    "annealed, frozen at 40 %": ANNEALED | EARLY,
    "annealed, frozen at 20 %": ANNEALED | {"search_end": 0.2},
    "annealed, additive c = 10": SOFT,
    "annealed, additive c = 10, frozen at 40 %": SOFT | EARLY,
    "annealed, additive c = 10, frozen at 70 %": SOFT | {"search_end": 0.7},
    "annealed, constant temperature": ANNEALED | {"temperature_end": 1},
    "annealed, dense warm-up": ANNEALED | {"initial_sparsity": 0, "sparsity_warmup": 0.1},
    "annealed, sparse at once": ANNEALED | {"initial_sparsity": SPARSITY},
    "annealed, slow ramp": ANNEALED | {"sparsity_ramp": 0.8},
    "annealed, logit scale 3": ANNEALED | {"mask_logit_scale": 3},
    "annealed, logit scale 30": ANNEALED | {"mask_logit_scale": 30},
    "local start": LOCAL,
    "local start, frozen at 40 %": LOCAL | EARLY,
    "local start, frozen at 70 %": LOCAL | {"search_end": 0.7},
    "local start, decay 3, frozen at 40 %": LOCAL | EARLY | {"initial_decay": 3},
    "local start, decay 5, frozen at 40 %": LOCAL | EARLY | {"initial_decay": 5},
    "local start, decay 8, frozen at 40 %": LOCAL | EARLY | {"initial_decay": 8},
    "local start, no diagonal, frozen at 40 %": LOCAL | EARLY | {"diagonal": "remove"},
    "local start, logit scale 30, frozen at 40 %": LOCAL | EARLY | {"mask_logit_scale": 30},
    "local start, no diagonal, logit scale 30, frozen at 40 %": LOCAL | EARLY | NO_DIAGONAL_30,
    "local start, decay 1, no diagonal, logit scale 30, frozen at 40 %": LOCAL
    | EARLY
    | NO_DIAGONAL_30
    | {"initial_decay": 1},
    "local start, mask per layer, frozen at 40 %": LOCAL | EARLY | {"share_layers": "false"},
}


def study(options):
    """
    `{(steps, kind, name): {"search": [metrics of a seed], "mask": [...]}}`; kind is `"search"` or `"manual"`,
    `"mask"` are fresh models through the mask.
    """
    cells, output = {}, options.output.absolute()
    masks = matched_patterns(SPARSITY, LENGTH, HEADS)
    masks["window without diagonal"] = masks["window"].without_diagonal()
    for name, mask in masks.items():
        mask.save_pretrained(output / "masks" / folder_name(name))

    def common(steps, seed):
        return {"max_steps": steps, "seed": seed, "max_tokens": options.tokens * steps}

    def searched(name, steps, seed):
        where, flags = output / f"{steps}" / f"{seed}", common(steps, seed)
        fields = {"search": "dam_s", "target_sparsity": "null", "search_end": 1} | SETTINGS[name]
        fields["freeze_sparsity"] = SPARSITY if fields["target_sparsity"] == "null" else "null"
        search = run(where / folder_name(name), flags | fields, options)
        return search, fixed(f"frozen_{folder_name(name)}", {"mask": where / folder_name(name)}, steps, seed)

    def manual(name, steps, seed):
        mask = {"pattern": "dense"} if name == "dense" else {"mask": output / "masks" / folder_name(name)}
        return fixed(f"manual_{folder_name(name)}", mask, steps, seed)

    def fixed(folder, mask, steps, seed):
        nothing_learned = {"search": "null", "target_sparsity": "null", "search_end": 1, "freeze_sparsity": "null"}
        return run(output / f"{steps}" / f"{seed}" / folder, common(steps, seed) | nothing_learned | mask, options)

    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = []
        for steps in options.steps:
            for seed in options.seeds:
                for kind, function, names in (
                    ("search", searched, options.settings),
                    ("manual", manual, options.manual),
                ):
                    tasks += [((steps, kind, name), pool.submit(function, name, steps, seed)) for name in names]
        for (steps, kind, name), task in tasks:
            search, through_mask = task.result() if kind == "search" else (None, task.result())
            cell = cells.setdefault((steps, kind, name), {"search": [], "mask": []})
            cell["search"] += [search] if search else []
            cell["mask"] += [through_mask] if through_mask else []
    return {key: cell for key, cell in cells.items() if any(cell.values())}


def _mean(values):
    values = list(values)
    if not values:
        return ""
    text = f"{statistics.mean(values):.3f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.3f} ({len(values)})"


def tables(cells, options):
    """A [`Table`] for each budget."""
    result = []
    for steps in options.steps:
        rows = []
        for (at, _, name), cell in cells.items():
            if at != steps:
                continue
            runs = cell["search"] or cell["mask"]
            losses = [[run["mlm_loss"] for run in cell[which]] for which in ("search", "mask")]
            row = {
                "mask": name,
                "removed": f"{100 * statistics.mean(run['sparsity'] for run in runs):.1f} %",
                "search, then through its mask": _mean(losses[0]),
                "from scratch through the mask": _mean(losses[1]),
            }
            if cell["search"]:
                undecided = statistics.mean(run["search_outcome"]["undecided"] for run in runs)
                row["undecided"] = f"{100 * undecided:.1f} %"
            rows.append((min(statistics.mean(values) for values in losses if values), row))
        notes = ("Deviation and number of seeds where there are several.",)
        title = f"{steps} steps: held-out MLM loss, best first"
        result.append(Table.of(title, [row for _, row in sorted(rows, key=lambda item: item[0])], notes))
    return result


def plot(cells, options, path):
    """Training loss along the searches at the longest budget, first seed."""
    steps = max(options.steps)
    figure = new_figure(10, 5, "constrained")
    axis = figure.subplots()
    names = [f"manual_{name}" for name in ("dense", "window", "bigbird", "longformer")]
    # A loss with a penalty in it is no loss to compare.
    names += [name for at, _, name in cells if at == steps and "target_sparsity" in SETTINGS.get(name, ())]
    highest = None
    for index, name in enumerate(names):
        state = options.output / f"{steps}" / f"{options.seeds[0]}" / folder_name(name) / "trainer_state.json"
        if not state.is_file():
            continue
        logs = [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
        if highest is None:  # after the first tenth all are alike
            highest = next((entry["loss"] for entry in logs if entry["step"] >= steps / 10), None)
        color, marker = STYLES[index % len(STYLES)]
        axis.plot(
            [entry["step"] for entry in logs], [entry["loss"] for entry in logs],
            "--" if index >= len(STYLES) else "-", color=color, marker=marker, ms=3, lw=1.2,
            label=name.removeprefix("manual_"),
        )  # fmt: skip
    axis.set_ylim(top=highest)
    subject = f"{SPARSITY:.0%} removed in the end, {steps} steps, seed {options.seeds[0]}"
    axis.set_title(f"MLM loss while the mask is learned ({subject})")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss (nats per masked token)")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_study", description=__doc__.split("\n\n")[0])
    add_options(parser, ROOT / "recipes" / "demo_dam_s.yaml")
    parser.add_argument("--tokens", type=int, default=2100, help="tokens to read per step, so that none is seen twice")
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 900], help="training steps of each budget")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=SETTINGS, help="all by default")
    parser.add_argument(
        "--manual", nargs="*", choices=MANUAL, default=MANUAL, help="dense and manual masks, all by default"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    options = parser.parse_args(arguments)
    cells = study(options)
    found = tables(cells, options)
    for table in found:
        print(table.markdown())
    (options.output / "study.md").write_text("\n".join(table.markdown() for table in found), encoding="utf-8")
    entries = [{"steps": steps, "kind": kind, "name": name} | cell for (steps, kind, name), cell in cells.items()]
    (options.output / "study.json").write_text(json.dumps(entries, indent=2), encoding="utf-8")
    plot(cells, options, options.output / "study.png")


if __name__ == "__main__":
    main()
