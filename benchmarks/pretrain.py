"""
A step of pre-training: stock BERT (sdpa), ours dense, with each search, and through a frozen mask.

    python -m benchmarks.pretrain              # the systems
    python -m benchmarks.pretrain --options    # what bf16, torch.compile, ... do for dense and frozen

Forward, backward, clipping and fused AdamW of `BertForPreTraining` on random tokens, 15 % of them predicted. A row is
a size and a length. Its systems run in a process each and take their steps in turns. Rows that the results have
already are not measured again.
"""

import json

from ._measure import WrongResult, interleaved, speed_up, summary
from ._report import argument_parser, hardware, hardware_line, make_table, milliseconds, prepare, write_json
from ._training_steps import OPTIONS, SEARCHES, SIZES, SYSTEMS, Worker


# Tokens of a step on CPUs.
TOKENS = {"mini": 4096, "small": 4096, "base": 2048, "tiny": 64}
VARIANTS = tuple(name for base in ("dense", "frozen") for name in (base, *(f"{base}+{option}" for option in OPTIONS)))
KEY = ("size", "n", "batch", "dtype", "dropout", "threads", "systems")
# Least ratio of tokens per second: name, system, what it is compared with, ratio by row.
GOALS = (
    ("dense", "stock", lambda size, n: 1.1 if size == "base" else 1.3 if SIZES[size][1] <= 384 else None),
    *((search, "dense", lambda size, n: 0.9) for search in SEARCHES),
    ("frozen", "dense", lambda size, n: 2.0 if n >= 2048 else 1.3 if n >= 512 else 1.0),
)


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


def missed(cells):
    """The goals that a row misses, as texts."""
    for cell in cells:
        for name, other, least in GOALS:
            entry, goal = cell["speed_up"].get(other, {}).get(name), least(cell["size"], cell["n"])
            if entry is not None and goal is not None and entry["ratio"] < goal:
                yield f"{cell['size']}, n = {cell['n']}: {name} is {entry['ratio']:.2f}x {other}, the goal is {goal}x"


def tables(cells):
    """Speed, ratios, times and memory of rows with the same systems."""
    cells = sorted(cells, key=lambda cell: (list(SIZES).index(cell["size"]), cell["n"]))
    head = ("model", "n", "batch")

    def rows(text):
        return [[cell["size"], cell["n"], cell["batch"], *(text(cell, name) for name in names)] for cell in cells]

    def ratio(cell, name):
        base = name.partition("+")[0]
        other = base if base != name else "stock" if name == "dense" else "dense"
        entry = cell["speed_up"].get(other, {}).get(name)
        return "" if entry is None else f"{entry['ratio']:.2f} [{entry['low']:.2f}, {entry['high']:.2f}]"

    names = cells[0]["systems"]
    step = f"{cells[0]['dtype']}, dropout {cells[0]['dropout']}"
    return {
        "speed": make_table(
            f"Tokens per second, {step}", (*head, *names),
            rows(lambda cell, name: f"{cell['results'][name]['tokens_per_second']:,.0f}"),
        ),
        "ratios": make_table(
            "Speed-up of medians [95 % interval]: dense to stock, others to dense, options to the system without",
            (*head, *names[1:]), [row[:3] + row[4:] for row in rows(ratio)],
        ),
        "times": make_table(
            "Step, ms, median (quartiles)", (*head, *names), rows(lambda c, name: milliseconds(c["results"][name]))
        ),
        "memory": make_table(
            "Peak memory, MiB", (*head, *names),
            rows(lambda cell, name: f"{cell['results'][name]['peak_bytes'] / 2**20:,.0f}"),
        ),
    }  # fmt: skip


def groups(cells):
    """Rows by what makes a table: systems, dtype and dropout."""
    found = {}
    for cell in cells:
        found.setdefault((tuple(cell["systems"]), cell["dtype"], cell["dropout"]), []).append(cell)
    return found


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
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    for size in options.sizes:
        for length in options.lengths:
            row = row_of(size, length, options)
            if not options.finished and all(any(cell[name] != row[name] for name in KEY) for cell in cells):
                cells.append(measured(row, options))
                write_json(options, cells, seed=options.seed)
                print(f"{size}, {length} tokens: done", flush=True)
    print(f"\n{hardware_line(hardware())}")
    for group in groups(cells).values():
        for table in tables(group).values():
            print(f"\n{table.markdown()}", end="")
    for goal in missed(cells):
        print(f"\nmissed: {goal}", end="")
    print()


if __name__ == "__main__":
    run()
