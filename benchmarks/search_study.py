"""
Which mask search learns fastest and best.

For each setting and seed: a search, and a fresh model trained through the mask that it found; beside them dense, and
every manual mask at the same sparsity. All at one budget of tokens.

    python -m benchmarks.search_study --text FILE --validation FILE --output runs/study

Runs `pretrain.py recipes/demo_dam_s.yaml` for each; what is finished is not run again. Prints a table; writes it, a
plot of the loss along the searches and `study.json` to the output folder.
"""

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor

from sparsebert.masks.matched import VARIED, matched_patterns
from sparsebert.report import Table

from ._pretraining import add_options, folder_name, run
from ._report import ROOT, STYLES


SPARSITY = 0.92
LENGTH, HEADS = 128, 4
MANUAL = ("dense", *VARIED)
PAPER = {"mask_form": "additive", "hard": "true", "noise_scale": 1, "temperature_end": 1}
ANNEALED = {"mask_form": "log", "hard": "false", "noise_scale": 0, "temperature_end": 0.1}
BUDGET = {"target_sparsity": SPARSITY, "initial_sparsity": 0.5, "sparsity_warmup": 0, "sparsity_ramp": 0.4}
# Name to the flags of pretrain.py. Those without a target are frozen at the same sparsity.
SETTINGS = {
    "penalty 1e-4 (paper)": PAPER | {"sparsity_weight": 1e-4},
    "no penalty": PAPER | {"sparsity_weight": 0},
    "hard samples, additive": PAPER | BUDGET,
    "hard samples, log, noise to 0.1": PAPER | BUDGET | {"mask_form": "log", "noise_scale_end": 0.1},
    "annealed": ANNEALED | BUDGET,
    "annealed, frozen at 40 %": ANNEALED | BUDGET | {"search_end": 0.4},
    "annealed, frozen at 20 %": ANNEALED | BUDGET | {"search_end": 0.2},
    "annealed, additive c = 10": ANNEALED | BUDGET | {"mask_form": "additive", "mask_constant": 10},
    "annealed, constant temperature": ANNEALED | BUDGET | {"temperature_end": 1},
    "annealed, dense warm-up": ANNEALED | BUDGET | {"initial_sparsity": 0, "sparsity_warmup": 0.1},
    "annealed, sparse at once": ANNEALED | BUDGET | {"initial_sparsity": SPARSITY},
    "annealed, slow ramp": ANNEALED | BUDGET | {"sparsity_ramp": 0.8},
    "annealed, logit scale 3": ANNEALED | BUDGET | {"mask_logit_scale": 3},
    "annealed, logit scale 30": ANNEALED | BUDGET | {"mask_logit_scale": 30},
    "annealed, mask per layer": ANNEALED | BUDGET | {"share_layers": "false"},
}


def study(options):
    """All runs: `{(steps, kind, name): [metrics of a seed]}`; kind is `"search"`, `"frozen"` or `"manual"`."""
    cells, output = {}, options.output.absolute()
    for name, mask in matched_patterns(SPARSITY, LENGTH, HEADS).items():
        mask.save_pretrained(output / "masks" / folder_name(name))

    def common(steps, seed):
        return {"max_steps": steps, "seed": seed, "max_tokens": options.tokens * steps}

    def searched(name, steps, seed):
        where, flags = output / f"{steps}" / f"{seed}", common(steps, seed)
        freeze = {"freeze_sparsity": "null" if "target_sparsity" in SETTINGS[name] else SPARSITY}
        search = run(where / folder_name(name), flags | {"search": "dam_s"} | freeze | SETTINGS[name], options)
        mask = {"mask": where / folder_name(name)}
        return search, run(where / f"frozen_{folder_name(name)}", flags | mask, options)

    def fixed(name, steps, seed):
        mask = {"pattern": "dense"} if name == "dense" else {"mask": output / "masks" / folder_name(name)}
        where = output / f"{steps}" / f"{seed}" / f"manual_{folder_name(name)}"
        return run(where, common(steps, seed) | {"search": "null"} | mask, options)

    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = []
        for steps in options.steps:
            for seed in options.seeds:
                tasks += [
                    ((steps, "search", name), pool.submit(searched, name, steps, seed)) for name in options.settings
                ]
                tasks += [((steps, "manual", name), pool.submit(fixed, name, steps, seed)) for name in options.manual]
        for (steps, kind, name), task in tasks:
            results = task.result()
            if kind == "search":
                cells.setdefault((steps, "search", name), []).append(results[0])
                cells.setdefault((steps, "frozen", name), []).append(results[1])
            else:
                cells.setdefault((steps, kind, name), []).append(results)
    return cells


def _mean(values):
    values = list(values)
    text = f"{statistics.mean(values):.3f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.3f}"


def tables(cells, options):
    """A [`Table`] for each budget."""
    result = []
    for steps in options.steps:
        rows = []
        for (at, kind, name), runs in cells.items():
            if at != steps or kind == "frozen":
                continue
            row = {"mask": name, "removed": f"{100 * statistics.mean(run['sparsity'] for run in runs):.1f} %"}
            if kind == "search":
                row["MLM loss of the search"] = _mean(run["mlm_loss"] for run in runs)
                row["undecided"] = f"{100 * statistics.mean(run['search_outcome']['undecided'] for run in runs):.1f} %"
                runs = cells[steps, "frozen", name]
            row["MLM loss through the mask"] = _mean(run["mlm_loss"] for run in runs)
            rows.append((statistics.mean(run["mlm_loss"] for run in runs), row))
        seeds = f"{len(options.seeds)} seed{'s' * (len(options.seeds) > 1)}"
        title = f"{steps} steps, {seeds}: held-out loss, best first"
        result.append(Table.of(title, [row for _, row in sorted(rows, key=lambda item: item[0])]))
    return result


def plot(cells, options, path):
    """Training loss along the searches at the longest budget, first seed."""
    from matplotlib.figure import Figure

    steps = max(options.steps)
    figure = Figure(figsize=(8, 6), layout="constrained", dpi=150)
    axis = figure.subplots()
    names = [name for at, kind, name in cells if at == steps and kind == "search"]
    for index, name in enumerate(["dense", *names]):
        prefix = "manual_" if name == "dense" else ""
        state = (
            options.output / f"{steps}" / f"{options.seeds[0]}" / (prefix + folder_name(name)) / "trainer_state.json"
        )
        if not state.is_file():
            continue
        logs = [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
        color, marker = STYLES[index % len(STYLES)]
        line = "--" if index >= len(STYLES) else "-"
        axis.plot(
            [entry["step"] for entry in logs], [entry["loss"] for entry in logs], line, color=color, marker=marker,
            ms=3, lw=1.2, label=name,
        )  # fmt: skip
    axis.set_title(f"MLM loss while the mask is learned ({SPARSITY:.0%} removed in the end, {steps} steps, seed 0)")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss (nats per masked token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_study", description=__doc__.split("\n\n")[0])
    add_options(parser, ROOT / "recipes" / "demo_dam_s.yaml")
    parser.add_argument("--tokens", type=int, default=2100, help="to read per step, so that none is seen twice")
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 900], help="budgets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=SETTINGS, help="all by default")
    parser.add_argument(
        "--manual", nargs="*", choices=MANUAL, default=MANUAL, help="dense and manual masks, all by default"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options = parser.parse_args(arguments)
    cells = study(options)
    found = tables(cells, options)
    for table in found:
        print(table.markdown())
    (options.output / "study.md").write_text("\n".join(table.markdown() for table in found), encoding="utf-8")
    entries = [
        {"steps": steps, "kind": kind, "name": name, "runs": runs} for (steps, kind, name), runs in cells.items()
    ]
    (options.output / "study.json").write_text(json.dumps(entries, indent=2), encoding="utf-8")
    plot(cells, options, options.output / "study.png")


if __name__ == "__main__":
    main()
