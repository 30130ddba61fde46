"""
The measured and the predicted tables of README.md, docs/ and results/README.md, made from the committed results.

    python -m benchmarks.measured            # writes the tables anew
    python -m benchmarks.measured --check    # changes nothing; ends with 1 if a table is not that of the results

In a page a table stands between `<!-- measured NAME -->` and `<!-- end -->`, where NAME is a key of `TABLES`. Where an
experiment has no results yet, the page says so there.
"""

import argparse
import json
import re
import sys
from statistics import fmean

from sparsebert.analysis.reporting.reports import GIVEN, RECOVERED, own_mask
from sparsebert.analysis.tables import Table
from sparsebert.masks.shipped import SHIPPED
from studies import claims
from studies.claims import REPRODUCED
from studies.experiments import EXPERIMENTS
from studies.harness.result_tables import experiment_tables
from studies.harness.seed_comparisons import compare_seeds, mean_text

from . import cost_model, data_memory, encoders, engines, long_inputs, padding, pretrain, rest, search
from .gpu import model as gpu_model
from .shared import cpu_tables, gpu_tables
from .shared.report import PHASES, RESULTS, ROOT


BLOCK = re.compile(r"(<!-- measured (?P<name>[\w.:-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
NOT_RUN = "*Not run yet.*\n"


def _read(name, folder=RESULTS):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def _pretrain(kind):
    """The tables of the systems, or of their options, as in "dense+bf16"."""
    groups = pretrain.groups(_read("pretrain_cpu")["cells"])
    make = pretrain.option_tables if kind.startswith("options") else pretrain.tables
    return [make(group)[kind] for (of_options, *_), group in groups.items() if of_options == (make != pretrain.tables)]


def reproduced(name, folder=REPRODUCED, scale="tiny"):
    """
    The tables of an experiment: one laid out like the paper's, or its summary, or means over seeds, or all cells.
    """
    if not (folder / f"{name}_{scale}.json").is_file():
        return []
    experiment = EXPERIMENTS[name]
    found = experiment_tables(experiment, scale, _read(f"{name}_{scale}", folder)["cells"])
    return found[:1] if experiment.layout else found[:-1] or found


def front_page():
    """By length: how much faster a mask makes the fastest dense MiniLM, and how close it keeps the embeddings."""
    tables, *others = (encoders.tables(_read(f"encoders{which}_cpu")["cells"]) for which in ("", "_xeon", "_amx"))
    on_xeon, with_amx = (
        {row["n"]: row["best against best"] for row in found["ratios"].as_json()["rows"]} for found in others
    )
    plain, rested = (_read("minilm_tiny", folder)["cells"] for folder in (REPRODUCED, REPRODUCED / "lower_rate"))
    columns = (
        ("cosine", rested, "cosine_before"),
        ("after recovery", rested, "cosine"),
        ("after recovery without a rest", plain, "cosine"),
    )
    lines = []
    for ratios, rates in zip(*(tables[kind].as_json()["rows"] for kind in ("ratios", "rates")), strict=True):
        line = {"tokens": ratios["n"]}
        line |= {"dense, tokens/s": rates[ratios["best dense"]], "masked, tokens/s": rates[ratios["best sparse"]]}
        line |= {"faster, EPYC": ratios["best against best"], "faster, Xeon": on_xeon[ratios["n"]]}
        line |= {"faster, Xeon with AMX": with_amx[ratios["n"]]}
        for name, cells, metric in columns:
            found = [cells.get(f"dam_s_{ratios['n']}_0.9_seed_{seed}") for seed in range(3)]
            values = [cell["metrics"][metric] for cell in found if cell is not None]
            line[name] = f"{fmean(values):.3f}" if values else ""
        lines.append(line)
    return [Table.of("MiniLM", lines)]


def questions():
    """What a reader scores through masks: from the `metrics.json` of searches and recoveries for one model."""
    rows = {}
    for name in ("learned_384", "learned_512", "minilm-l6-512-90", "window"):
        found = _read(name, RESULTS / "questions")
        length = found["plan"]["length"]
        for mask, numbers in found["agreement"].items():
            shown = mask.replace(GIVEN, name)
            row = {"mask": shown, "tokens": str(length), "removed on inputs": f"{numbers['input_sparsity']:.1%}"}
            row |= {"F1": f"{100 * numbers['score']:.1f}", "cosine": f"{numbers['cosine']:.3f}"}
            rows[shown, length] = row
    return [Table.of("SQuAD", list(rows.values()))]


def recovery_rates():
    """What the learning rate of the recovery matters: from the `metrics.json` of runs, each row of one mask."""
    rows = []
    for path in (RESULTS / "recovery_rates").glob("*.json"):
        found = _read(path.stem, path.parent)
        before, after = (found["agreement"][name.format(own_mask(found["mask"]))] for name in ("{}", RECOVERED))
        model = {"mpnet": "MPNet", "stsb": "MiniLM, task STS-B"}.get(path.stem.partition("_")[0], "MiniLM")
        row = {"model": model, "tokens": str(found["plan"]["length"])}
        row |= {"learning rate": f"{found['recover_learning_rate']:.0e}".replace("e-0", "e-")}
        row |= {"cosine before recovery": f"{before['cosine']:.4f}", "cosine after": f"{after['cosine']:.4f}"}
        row |= {"5 % quantile": f"{after['cosine_5']:.4f}", "error, last layer": f"{after['layer_error'][-1]:.2f}"}
        row |= {"score": f"{100 * after['score']:.1f}"} if "score" in after else {}
        rows.append((row["model"], int(row["tokens"]), -found["recover_learning_rate"], row))
    return [Table.of("Rates", [row for *_, row in sorted(rows, key=lambda found: found[:3])])]


def shipped():
    """How close the masks of the package keep their model: from the `metrics.json` of searches for their rests."""
    rows = []
    for name in SHIPPED:
        found = _read(name, RESULTS / "shipped")
        agreement = found["agreement"][GIVEN]
        row = {"mask": f"`{name}`", "tokens": str(found["plan"]["length"])}
        row |= {"removed": f"{found['sparsity'][GIVEN]:.0%}", "live tiles of 64": f"{found['live_tiles']:.0%}"}
        row |= {"cosine": f"{agreement['cosine']:.3f}", "5 % quantile": f"{agreement['cosine_5']:.3f}"}
        rows.append(row)
    return [Table.of("Masks", rows)]


def _paired_studies(title, studies, names, measures):
    """Cells of two studies with other settings, by the seeds that both have: `studies` has their folders by model."""
    pairs = {}
    for model, folders in studies.items():
        both = [_read("minilm_tiny", REPRODUCED / folder)["cells"] for folder in folders]
        for cell in sorted(both[0].keys() & both[1].keys()):
            settings = both[0][cell]["settings"]
            for measure, metric in measures.items():
                found = pairs.setdefault((model, settings["length"], settings["mask"], measure), ({}, {}))
                for values, cells in zip(found, both, strict=True):
                    values[settings["seed"]] = cells[cell]["metrics"][metric]
    compared, rows = compare_seeds(pairs, 4), []
    for key, both in sorted(pairs.items(), key=lambda pair: pair[0][:3]):
        row = dict(zip(("model", "tokens", "mask", "measure"), map(str, key), strict=True))
        row |= {name: mean_text(values.values(), 4) for name, values in zip(names, both, strict=True)}
        row["seeds"] = str(len(both[0]))
        row["difference"], row["p (Holm)"] = compared.get(key, ("", ""))
        rows.append(row)
    return [Table.of(title, rows)]


def trained_rests():
    """What training the bias of the rest gains over calibrating it."""
    studies = {"MiniLM": ("trained_rest", "rest"), "MPNet": ("mpnet_trained_rest", "mpnet_calibrated")}
    measures = {"cosine before recovery": "cosine_before", "cosine after": "cosine"}
    return _paired_studies("The bias of the rest", studies, ("trained", "calibrated"), measures)


def lower_rate():
    """What a lower learning rate of the recovery gains."""
    studies = {"MiniLM": ("lower_rate", "trained_rest")}
    return _paired_studies("Rates", studies, ("3e-5", "1e-4"), {"cosine": "cosine", "STS-B": "spearman"})


# Functions that return a list of [`Table`].
TABLES = {
    "kernels.attention": lambda: [cpu_tables.attention(_read("attention_cpu"))],
    "kernels.densities": lambda: [cpu_tables.densities(_read("sweep_1024_cpu"))],
    "kernels.densities_amx": lambda: [cpu_tables.densities(_read("sweep_amx_cpu"), ("phase", "n"), dtype="bfloat16")],
    "kernels.models": lambda: [
        cpu_tables.models({"a layer of BERT-base": _read("layer_cpu"), "BERT-base": _read("model_cpu")})
    ],
    "kernels.rest": lambda: [rest.table(_read("rest_cpu")["cells"])],
    "kernels.masks": lambda: [cpu_tables.masks()],
    "kernels.learned": lambda: [cpu_tables.extended_masks()],
    "search.step": lambda: [search.table(_read("search_cpu"))],
    **{
        f"pretrain.{kind}": lambda kind=kind: _pretrain(kind)
        for kind in ("speed", "ratios", "memory", "options.ratios", "options.memory")
    },
    **{
        f"encoders.{kind}": lambda kind=kind: [encoders.tables(_read("encoders_cpu")["cells"])[kind]]
        for kind in ("rates", "ratios", "cosines", "operator")
    },
    "encoders_encode.ratios": lambda: [encoders.tables(_read("encoders_encode_cpu")["cells"])["ratios"]],
    **{
        f"encoders_{name}.ratios": lambda name=name: [
            encoders.tables(_read(f"encoders_{name}_cpu")["cells"])["ratios"]
        ]
        for name in ("learned", "xeon_learned", "amx_learned")
    },
    "encoders_base.ratios": lambda: [
        encoders.tables([cell for tail in ("", "_8192") for cell in _read(f"encoders_base{tail}_cpu")["cells"]])[
            "ratios"
        ]
    ],
    **{
        f"encoders_{name}.{kind}": lambda name=name, kind=kind: [
            encoders.tables(_read(f"encoders_{name}_cpu")["cells"])[kind]
        ]
        for name in ("mpnet", "zen3", "xeon", "amx")
        for kind in ("ratios", "cosines" if name in ("mpnet", "zen3") else "rates", "operator")
    },
    "long_inputs": lambda: [long_inputs.table(_read("long_inputs_cpu")["cells"])],
    "long_inputs.offsets": lambda: [
        long_inputs.table(_read("long_inputs_cpu")["cells"], ("dense", "same offsets"), with_memory=False)
    ],
    "padding.speed": lambda: [padding.tables(_read("padding")["cells"])["speed"]],
    "padding.ratios": lambda: [padding.tables(_read("padding")["cells"])["ratios"]],
    "data_memory.starts": lambda: [data_memory.tables(_read("data_memory"))["starts"]],
    "data_memory.waiting": lambda: [data_memory.tables(_read("data_memory"))["waiting"]],
    "engines.jobs": lambda: [engines.tables(_read("engines")["cells"])["jobs"]],
    "engines.crossed": lambda: [engines.tables(_read("engines")["cells"])["crossed"]],
    **{
        f"gpu.{kind}": lambda kind=kind: [gpu_model.tables(_read("gpu_model"))[kind]]
        for kind in ("check", "forward", "training")
    },
    **{
        f"gpu.measured.{phase.replace(' ', '_')}": lambda phase=phase: [gpu_tables.attention(phase)]
        for phase in PHASES
    },
    "gpu.tiles": lambda: [gpu_tables.tile_quality(length) for length in (512, 1024, 2048)],
    "gpu.configurations": lambda: [gpu_tables.configurations()],
    "gpu.compiled": lambda: [gpu_tables.compiled()],
    "gpu.compared": lambda: [gpu_model.comparison(gpu_tables.FOLDER, _read("gpu_model"))],
    **{f"cost.{kind}": lambda kind=kind: [cost_model.tables()[kind]] for kind in ("measured", "work", "sent", "plan")},
    **{f"reproduce.{name}": lambda name=name: reproduced(name) for name in EXPERIMENTS},
    **{
        f"reproduce.{name}.paper": lambda name=name: reproduced(name, scale="paper")
        for name in ("minilm", "minilm_settings")
    },
    **{
        f"reproduce.{name}.rest": lambda name=name: reproduced(name, REPRODUCED / "rest")
        for name in ("minilm", "minilm_settings", "minilm_task_masks", "minilm_tasks", "sentences")
    },
    "reproduce.minilm.rest.paper": lambda: reproduced("minilm", REPRODUCED / "rest", scale="paper"),
    **{
        f"reproduce.{name}.mpnet": lambda name=name: reproduced(name, REPRODUCED / "mpnet")
        for name in ("document_embeddings", "review_embeddings")
    },
    **{
        f"reproduce.minilm.{folder}": lambda folder=folder: reproduced("minilm", REPRODUCED / folder)
        for folder in ("mpnet", "mpnet_calibrated")
    },
    **{
        f"reproduce.{name}.float32": lambda name=name: reproduced(name, REPRODUCED / "float32")
        for name in ("sparsebert_table3", "sparsebert_figure7")
    },
    "trained_rests": trained_rests,
    "lower_rate": lower_rate,
    "questions": questions,
    "recovery_rates": recovery_rates,
    "shipped": shipped,
    "claims": lambda: [claims.table()],
    "front_page": front_page,
}


def body(table: Table) -> str:
    """A table without its title, which the page gives in its own words, and without notes."""
    return Table("", table.columns, table.rows).markdown().partition("\n\n")[2]


def written(text):
    """A page with its tables made anew."""

    def made(match):
        if match["name"] not in TABLES:
            raise ValueError(f"no measured table {match['name']!r}; there are {', '.join(TABLES)}")
        found = TABLES[match["name"]]()
        if len(found) == 1:
            return f"{match[1]}{body(found[0])}{match[4]}"
        texts = [f"**{table.title}**\n\n{body(table)}" for table in found] or [NOT_RUN]
        return match[1] + "\n".join(texts) + match[4]

    return BLOCK.sub(made, text)


def pages():
    """README.md, the pages of the documentation, and that of the results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), REPRODUCED / "README.md"]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description="Write the measured tables.")
    parser.add_argument("--check", action="store_true", help="change nothing, end with 1 if a page is out of date")
    options = parser.parse_args(arguments)
    stale = [page for page in pages() if written(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
        if not options.check:
            page.write_text(written(page.read_text()))
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())
