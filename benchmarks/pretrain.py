"""
A step of pre-training: stock BERT (sdpa), ours dense, with each search, and through a frozen mask.

    python -m benchmarks.pretrain              # the systems
    python -m benchmarks.pretrain --options    # what bf16, torch.compile, ... do for dense and frozen

Forward, backward, clipping and fused AdamW of `BertForPreTraining` on random tokens, 15 % of them predicted. A row is
a size and a length. Its systems run in a process each and take their steps in turns. Rows that the results have
already are not measured again.
"""

import json

from .shared.measure import WrongResult, interleaved, speed_up, summary
from .shared.report import (
    argument_parser,
    earlier_cells,
    hardware,
    hardware_line,
    make_table,
    prepare,
    ratio_text,
    write_json,
)
from .shared.training_steps import OPTIONS, SIZES, SYSTEMS, Worker


# Tokens of a step on CPUs.
TOKENS = {"mini": 4096, "small": 4096, "base": 2048, "tiny": 64}
VARIANTS = tuple(name for base in ("dense", "frozen") for name in (base, *(f"{base}+{option}" for option in OPTIONS)))
KEY = ("size", "n", "batch", "dtype", "dropout", "threads", "systems")


def row_of(size, length, options):
    """What defines a row: settings that must be the same for its results to be used again."""
    tokens = options.tokens or (32768 if options.device == "cuda" else TOKENS[size])
    return {
        "size": size,
        "n": length,
        "batch": max(1, tokens // length),
        "dtype": str(options.dtype).removeprefix("torch."),
        "dropout": options.dropout,
        "threads": options.threads,
        "systems": list(options.systems),
    }


def measured(row, options):
    """Time and peak memory of every system of a row."""
    spec = {name: value for name, value in row.items() if name != "systems"}
    spec |= {"device": options.device, "seed": options.seed}
    workers = {}
    try:
        for name in row["systems"]:
            workers[name] = Worker(spec | {"system": name})
        for worker in workers.values():
            worker.wait()
        check({name: worker.loss for name, worker in workers.items()}, row["dtype"])
        functions = {name: worker.step for name, worker in workers.items()}
        times = interleaved(functions, lambda step: step(), options.seconds, options.rounds)
    finally:
        for worker in workers.values():
            worker.close()
    tokens, results = row["batch"] * row["n"], {}
    for name, values in times.items():
        results[name] = summary(values) | {"peak_bytes": workers[name].peak_bytes}
        results[name]["tokens_per_second"] = tokens / results[name]["median_ms"] * 1e3
    pairs = [(name, other) for name in times for other in ("stock", "dense", name.partition("+")[0])]
    ratios = {}
    for name, other in dict.fromkeys(pairs):
        if other in times and other != name:
            ratios.setdefault(other, {})[name] = speed_up(times[other], times[name])
    return row | {"results": results, "speed_up": ratios}


def check(losses, dtype):
    """The gate: dense and stock have one loss, and so has each option of a system but bfloat16."""
    for name, loss in losses.items():
        base, *extras = name.split("+")
        other = "stock" if base == "dense" and not extras else base
        exact = dtype == "float32" and "bf16" not in extras
        if other in losses and abs(loss - losses[other]) > (1e-4 if exact else 0.05) * losses[other]:
            raise WrongResult(f"{name} has the loss {loss}, {other} {losses[other]}")


def tables(cells):
    """Speed, ratios, times and memory of the rows of a group."""
    cells = sorted(cells, key=lambda cell: (list(SIZES).index(cell["size"]), cell["n"]))
    head, keys = ("model", "n", "batch"), ("size", "n", "batch")

    def rows(text):
        return [
            [*(cell[key] for key in keys), *(text(cell, name) if name in cell["results"] else "" for name in names)]
            for cell in cells
        ]

    def ratio(cell, name):
        entry = cell["speed_up"].get("stock" if name == "dense" else "dense", {}).get(name)
        return "" if entry is None else ratio_text(entry)

    names = [name for name in SYSTEMS if any(name in cell["results"] for cell in cells)]
    step = f"{cells[0]['dtype']}, dropout {cells[0]['dropout']}"
    return {
        "speed": make_table(
            f"Tokens per second, {step}", (*head, *names),
            rows(lambda cell, name: _speed(cell["results"][name])),
        ),
        "ratios": make_table(
            "Speed-up of medians [95 % interval]: dense to stock, others to dense",
            (*head, *names[1:]), [row[:3] + row[4:] for row in rows(ratio)],
        ),
        "memory": make_table(
            "Peak memory, MiB", (*head, *names),
            rows(lambda cell, name: f"{cell['results'][name]['peak_bytes'] / 2**20:,.0f}"),
        ),
    }  # fmt: skip


def _speed(result):
    return f"{result['tokens_per_second']:,.0f}" if "tokens_per_second" in result else ""


def option_tables(cells):
    """What each option does to the speed and the memory of a system, for the rows of a group."""
    cells = sorted(cells, key=lambda cell: (list(SIZES).index(cell["size"]), cell["n"]))
    ratios, memory = [], []
    for cell in cells:
        for base in ("dense", "frozen"):
            for rows, text in ((ratios, _option_ratio), (memory, _option_memory)):
                if base in cell["results"]:
                    rows.append([cell["size"], cell["n"], base, *(text(cell, base, name) for name in OPTIONS)])
    head = ("model", "n", "system", *OPTIONS)
    return {
        "options.ratios": make_table("Speed-up by an option [95 % interval]", head, ratios),
        "options.memory": make_table("Peak memory with an option, of that without", head, memory),
    }


def _option_ratio(cell, base, option):
    entry = cell["speed_up"].get(base, {}).get(f"{base}+{option}")
    return "" if entry is None else ratio_text(entry)


def _option_memory(cell, base, option):
    entry = cell["results"].get(f"{base}+{option}")
    return "" if entry is None else f"{entry['peak_bytes'] / cell['results'][base]['peak_bytes']:.2f}"


def groups(cells):
    """
    Rows by what makes a table: whether systems have options, dtype and dropout. Parts of a row that were measured one
    after the other, each with its own systems, become one: ratios are of one part each, memory is that of the first
    part with the system, and speed that of the first part alone, since the machine's speed changes.
    """
    found = {}
    for cell in cells:
        options = any("+" in name for name in cell["systems"])
        rows = found.setdefault((options, cell["dtype"], cell["dropout"]), {})
        place = tuple(cell[name] for name in ("size", "n", "batch", "threads"))
        results = cell["results"]
        if place in rows:
            results = {name: {"peak_bytes": entry["peak_bytes"]} for name, entry in results.items()}
        before = rows.get(place, {"results": {}, "speed_up": {}})
        ratios = {
            other: cell["speed_up"].get(other, {}) | before["speed_up"].get(other, {})
            for other in cell["speed_up"] | before["speed_up"]
        }
        rows[place] = cell | {"results": results | before["results"], "speed_up": ratios}
    return {key: list(rows.values()) for key, rows in found.items()}


def command_line():
    parser = argument_parser("benchmarks.pretrain", "A step of pre-training.", ())
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=("mini", "small", "base"))
    parser.add_argument("--systems", nargs="+", help=f"of {', '.join(SYSTEMS)}, with options as in dense+bf16+compile")
    parser.add_argument("--options", action="store_true", help="dense and frozen with each option")
    parser.add_argument("--finished", action="store_true", help="measure nothing, show the results")
    return parser


def run(arguments=None):
    parser = command_line()
    options = prepare(parser, arguments)
    if options.quick:
        options.sizes, options.lengths = ("tiny",), options.lengths or (64,)
    options.lengths = options.lengths or (128, 512, 2048)
    options.systems = options.systems or (VARIANTS if options.options else SYSTEMS)
    for name in options.systems:
        system, *extras = name.split("+")
        if system not in SYSTEMS or not set(extras) <= OPTIONS.keys():
            parser.error(f"--systems must hold {', '.join(SYSTEMS)} with any of {', '.join(OPTIONS)}, got {name!r}")
    path = options.output.with_name(options.output.name + ".json")
    if options.finished:
        cells = json.loads(path.read_text())["cells"] if path.exists() else []
    else:
        cells = earlier_cells(parser, options, KEY)
    for size in options.sizes:
        for length in options.lengths:
            row = row_of(size, length, options)
            if not options.finished and all(any(cell[name] != row[name] for name in KEY) for cell in cells):
                cells.append(measured(row, options))
                write_json(options, cells, seed=options.seed)
                print(f"{size}, {length} tokens: done", flush=True)
    print(f"\n{hardware_line(hardware())}")
    for (of_options, *_), group in groups(cells).items():
        for table in (option_tables(group) if of_options else tables(group)).values():
            print(f"\n{table.markdown()}", end="")


if __name__ == "__main__":
    run()
