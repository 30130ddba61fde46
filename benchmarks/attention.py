"""
Attention alone: every system on the same inputs, checked against float64 first, then timed in turns. A system that is
wrong or fails is not timed; the exit code is then 1, and its cells say why.

    python -m benchmarks.attention            # the table of docs/kernels.md
    python -m benchmarks.attention --sweep    # sparse_cpu against the best dense by density, for sparse_auto

Letters: H heads, n length. A cell is a mask, a length and a phase: forward, training (forward and backward), or
training with dropout.
"""

import sys

import torch

from .shared.masks_by_name import HELP, build_mask
from .shared.measure import cpu_seconds, cuda_seconds, interleaved, peak_bytes, speed_up, summary
from .shared.report import (
    DROPOUT,
    FORWARD,
    TRAINING,
    argument_parser,
    hardware_line,
    make_table,
    prepare,
    ratio_text,
    write_json,
)
from .shared.systems import DENSE, SYSTEMS, UNMASKED, Gate, auto_choice, chosen_kernel, make_case


BEST_DENSE = "best dense"
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
SWEEP_LENGTHS = (128, 512, 1024)
# What is measured unless the command line says otherwise: mask, lengths, phases.
TABLES = {
    "cpu": [
        ("dam_s", (128, 512, 1024, 2048), (FORWARD, TRAINING)),
        ("dam_s", (128, 512, 1024), (DROPOUT,)),
        ("dam_u", (128, 512, 1024), (FORWARD, TRAINING)),
    ],
    "cuda": [
        ("toeplitz64", (512, 1024, 2048, 4096), (FORWARD, TRAINING, DROPOUT)),
        ("dam_s", (128, 512, 1024, 2048), (FORWARD, TRAINING, DROPOUT)),
        ("dam_u", (512, 1024), (FORWARD, TRAINING)),
    ],
}
SYSTEMS_OF = {
    "cpu": ("eager", "sdpa", "sdpa_float", "sdpa_unmasked", "sparse_cpu"),
    "cuda": ("eager", "sdpa", "sdpa_float", "flash", "cudnn", "sparse_flex", "flex_flash", "sparse_triton"),
}
OURS = {"cpu": "sparse_cpu", "cuda": "sparse_triton"}
# Those that leave the kernel to PyTorch.
PYTORCH = ("sdpa", "sdpa_float", "sdpa_unmasked", "sparse_sdpa")


def checked(cases, names, options):
    """
    Pass every system through the gate, and whatever `sparse_auto` chooses in one of the phases: errors by number of
    the case and system, and what is wrong with those that must not be timed.
    """
    errors, wrong = {}, {}
    for index, case in enumerate(cases):
        gate = Gate(case)
        choices = [choose(case, phase, options)[0] for phase in options.phases]
        for name in dict.fromkeys((*names, *choices)):
            if index and name in DENSE:
                continue  # timed on the first case only
            for gradients in sorted({of_phase(phase, options)[0] for phase in options.phases}):
                try:
                    errors[index, name] = gate.check(name, gradients)
                except ValueError:
                    pass  # said again, and kept, when the cell is built
                except RuntimeError as error:
                    wrong[index, name] = str(error)
    return errors, wrong


def choose(case, phase, options):
    """What `sparse_auto` chooses and why; with `--no_auto` our kernel, and no reason."""
    if options.auto:
        return auto_choice(case, *of_phase(phase, options))
    return OURS[options.device], None


def of_phase(phase, options):
    """Whether there are gradients, and the probability of dropout."""
    return phase != FORWARD, options.dropout if phase == DROPOUT else 0.0


def runner(case, name, phase, options):
    """Function without arguments that runs a cell once, and the tensors of the mask's form."""
    gradients, dropout = of_phase(phase, options)
    if dropout:
        Gate(case.first_sequence()).check(name, dropout=dropout)
    function, tensors = SYSTEMS[name](case, gradients, dropout)

    def run():
        with torch.set_grad_enabled(gradients):
            output = function(*case.inputs)
        if gradients:
            torch.autograd.grad(output, case.inputs, case.grad)

    return run, tensors


def measured(cases, phase, names, options, errors, wrong):
    """
    Time a phase of cases that differ in their mask alone, in turns. Dense systems, whose time does not depend on what
    the mask keeps, run on the first.
    """
    _, dropout = of_phase(phase, options)
    choices = [choose(case, phase, options) for case in cases]
    functions, forms, refused, wrong = {}, {}, {}, dict(wrong)
    for index, (case, (choice, _)) in enumerate(zip(cases, choices, strict=True)):
        for name in dict.fromkeys((*names, choice)):
            if (index and name in DENSE) or (name == "sdpa_unmasked" and dropout) or (index, name) in wrong:
                continue
            try:
                functions[index, name], forms[index, name] = runner(case, name, phase, options)
            except ValueError as error:
                refused[index, name] = str(error)
            except RuntimeError as error:
                wrong[index, name] = str(error)
    timer = cuda_seconds if options.device == "cuda" else cpu_seconds
    times = interleaved(functions, timer, options.seconds, options.rounds) if functions else {}
    records = []
    for index, (case, (choice, reason)) in enumerate(zip(cases, choices, strict=True)):
        own = {name: (number, name) for number, name in functions if number == index or name in DENSE}
        systems = {}
        for name, key in own.items():
            size = sum(tensor.numel() * tensor.element_size() for tensor in forms[key])
            systems[name] = summary(times[key]) | {
                "error": errors.get(key),
                "mask_bytes_per_head": size / options.heads,
            }
            if options.device == "cuda":
                systems[name]["peak_bytes"] = peak_bytes(functions[key])
                if name in PYTORCH:
                    systems[name]["kernel"] = chosen_kernel(*case.inputs, *(forms[key] or [None]), dropout)
        dense = [name for name in DENSE if name in own]
        best = min(dense, key=lambda name: systems[name]["median_ms"], default=None)
        baselines = {name: own[name] for name in own if name in (*DENSE, *UNMASKED, "sparse_flex", "flex_flash")}
        if best:
            baselines[BEST_DENSE] = own[best]
        ratios = {
            ours: {name: speed_up(times[key], times[own[ours]]) for name, key in baselines.items() if name != ours}
            for ours in dict.fromkeys((OURS[options.device], choice))
            if ours in own
        }
        _, _, length, _ = case.query.shape
        records.append(
            {
                "mask": case.mask_name,
                "density": case.mask.to_table(length).float().mean().item(),
                "n": length,
                "batch": case.query.shape[0],
                "heads": options.heads,
                "dtype": str(case.query.dtype).removeprefix("torch."),
                "phase": phase,
                "padded": case.padding is not None,
                "systems": systems,
                "refused": {name: why for (number, name), why in refused.items() if number == index},
                "wrong": {name: why for (number, name), why in wrong.items() if number == index},
                "best_dense": best,
                "auto": {"choice": choice, "reason": reason} if options.auto else None,
                "speed_up": ratios,
            }
        )
    return records


def table_cells(options):
    """The cells of the table: lists, one mask, length and phase after the other."""
    table = TABLES[options.device]
    if options.masks or options.lengths:
        masks, lengths = options.masks or ("dam_s",), options.lengths or (128, 512, 1024)
        table = [(mask, lengths, options.phases) for mask in masks]
    for mask_name, lengths, phases in table:
        phases = [phase for phase in phases if phase in options.phases]
        for length in lengths if phases else ():
            case = make_case(mask_name, length, options, options.padded)
            found = checked([case], options.systems, options)
            for phase in phases:
                yield measured([case], phase, options.systems, options, *found)


def sweep_cells(options):
    """`sparse_cpu` at all densities against dense attention: lists, one dtype, length and phase after the other."""
    names = (*DENSE, OURS[options.device])
    for dtype in (torch.float32, torch.bfloat16):
        options.dtype = dtype
        for length in options.lengths or SWEEP_LENGTHS:
            cases = [make_case(f"dam_s:{density}", length, options, options.padded) for density in DENSITIES]
            found = checked(cases, names, options)
            for phase in options.phases:
                yield measured(cases, phase, names, options, *found)


def _cell_names(cell):
    density = f"{100 * cell['density']:.1f} %"
    return cell["mask"], density, cell["n"], cell["dtype"], cell["phase"]


def tables(cells, ours, baselines):
    """Times of our kernel and how much faster it is than other attention, by phase and dtype; a row per cell."""
    groups = {}
    for cell in cells:
        groups.setdefault((cell["phase"], cell["dtype"]), []).append(cell)
    header = ("mask", "live", "n", "ms", *(f"against {text}" for text in baselines.values()))
    for (phase, dtype), group in groups.items():
        rows = []
        for cell in group:
            time, ratios = cell["systems"][ours]["median_ms"], cell["speed_up"][ours]
            texts = [ratio_text(ratios[name]) if name in ratios else "-" for name in baselines]
            rows.append([f"`{cell['mask']}`", f"{cell['density']:.0%}", cell["n"], f"{time:.3f}", *texts])
        yield make_table(f"{phase.capitalize()}, {ours}, {dtype}", header, rows)


def print_choices(cells):
    """Where what `sparse_auto` chose is slower than the best dense attention."""
    slower = [cell for cell in cells if auto_slower(cell)]
    print(f"sparse_auto is slower than the {BEST_DENSE}, beyond the interval, in {len(slower)} of {len(cells)}")
    for cell in slower:
        print(" ", *_cell_names(cell), cell["auto"]["choice"])


def auto_slower(cell):
    """Whether what `sparse_auto` chose is slower than the best dense attention, beyond the interval."""
    entry = cell["speed_up"].get(cell["auto"]["choice"], {}).get(BEST_DENSE)
    return entry is not None and entry["high"] < 1


def command_line():
    parser = argument_parser("benchmarks.attention", "Attention systems, checked and timed in turns.")
    parser.add_argument("--masks", nargs="+", help=HELP)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: dense ones and ours for the device")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--padded", action="store_true", help="sequences of n/2 to n tokens, padded on the right")
    parser.add_argument("--sweep", action="store_true", help="dam_s at several densities, in float32 and bfloat16")
    parser.add_argument(
        "--no_auto",
        dest="auto",
        action="store_false",
        help="without what sparse_auto chooses, which on a GPU takes a self-check",
    )
    return parser


def main(arguments=None):
    parser = command_line()
    options = prepare(parser, arguments)
    if options.quick:
        options.masks, options.lengths = options.masks or ("dam_s", "toeplitz64"), options.lengths or (64, 100)
        options.tokens, options.heads = options.tokens or 200, 2
    options.tokens = options.tokens or (16384 if options.device == "cuda" else 4096)
    options.systems = options.systems or SYSTEMS_OF[options.device]
    if options.sweep:
        options.output = options.output.with_name(options.output.name.replace("attention", "sweep"))
    try:
        for mask_name in options.masks or ():
            build_mask(mask_name, 64, options.heads)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    cells = []
    for measured_cells in sweep_cells(options) if options.sweep else table_cells(options):
        cells += measured_cells
        report = write_json(options, cells, tokens=options.tokens)  # already now: a long run may be stopped
        print(*_cell_names(cells[-1]), "done", flush=True)
    print(f"\n{hardware_line(report['hardware'])}; commit {report['commit']}\n{report['command']}")
    ours = OURS[options.device]
    baselines = dict.fromkeys(name for cell in cells for name in cell["speed_up"].get(ours, ()))
    measured_cells = [cell for cell in cells if ours in cell["speed_up"]]
    for table in tables(measured_cells, ours, {name: name for name in baselines}):
        print(f"\n{table.markdown()}", end="")
    if options.auto:
        print_choices(cells)
    wrong = {name: why for cell in cells for name, why in cell["wrong"].items()}
    for name, why in wrong.items():
        print(f"not timed: {name}: {why}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
