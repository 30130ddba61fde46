"""
What the rest of a mask costs on CPUs: attention of `sparse_cpu` without and with it, pooling included, in turns.

    python -m benchmarks.rest

Both under the same mask, checked against float64 first; CPU time of one thread.

Letters: H heads, n length, d head size.
"""

from dataclasses import replace

import torch

from sparsebert.attention.backends import prepared, run_backend
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.rest import rest_fields

from .search import cost
from .shared.masks_by_name import HELP, build_mask
from .shared.measure import WrongResult, interleaved, process_seconds, speed_up, summary
from .shared.report import FORWARD, TRAINING, argument_parser, hardware_line, make_table, prepare, write_json


SYSTEMS = ("none", "mean")
CHECKED_HEADS = 2


def results_of(mask, rest, states, backend, gradients=True):
    """Function of the output, and gradients of query, key and value; the last of `states` is that of the output."""
    *tensors, grad = states
    batch, _, length, size = tensors[0].shape
    mask = mask.replace(rest=rest)
    inputs = MaskInputs(backend, length, length, tensors[0].device, mask)
    inputs = prepared(replace(inputs, **rest_fields(mask, inputs))).for_layer(0)

    def run():
        with torch.set_grad_enabled(gradients):
            output, _ = run_backend(*tensors, inputs, size**-0.5, 0.0)
        return [output, *torch.autograd.grad(output, tensors, grad)] if gradients else [output]

    return run


def check(mask, rest, states):
    """The gate: float64, on some heads of the first sequence. The largest error, relative to the largest number."""
    mask = mask.replace(keep=mask.keep[:, :CHECKED_HEADS])
    *tensors, grad = states
    few = [*(each.detach()[:1, :CHECKED_HEADS] for each in tensors), grad[:1, :, :CHECKED_HEADS]]
    found = []
    for dtype, backend in ((torch.float64, "sparse_eager"), (grad.dtype, "sparse_cpu")):
        *leaves, of_output = (each.to(dtype) for each in few)
        found.append(results_of(mask, rest, [*(each.requires_grad_() for each in leaves), of_output], backend)())
    worst = max(((got - want).abs().max() / want.abs().max()).item() for want, got in zip(*found, strict=True))
    if not worst <= 16 * torch.finfo(grad.dtype).eps:
        raise WrongResult(f"sparse_cpu, rest {rest}: off by {worst:.2e}")
    return worst


def cell(length, head_size, dtype, options):
    """Rows of the report, one for each phase."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (max(1, options.tokens // length), length, options.heads, head_size)
    mask = build_mask(options.mask, length, options.heads, options.seed)
    *drawn, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    states = [*(each.transpose(1, 2).requires_grad_() for each in drawn), grad]
    errors = {rest: check(mask, rest, states) for rest in SYSTEMS}
    for phase in options.phases:
        functions = {rest: results_of(mask, rest, states, "sparse_cpu", phase == TRAINING) for rest in SYSTEMS}
        times = interleaved(functions, process_seconds, options.seconds, options.rounds, max_rounds=400)
        yield {
            "mask": options.mask,
            "density": mask.to_table(length).float().mean().item(),
            "n": length,
            "batch": shape[0],
            "head_size": head_size,
            "dtype": str(dtype).removeprefix("torch."),
            "phase": phase,
            "systems": {rest: summary(values) | {"error": errors[rest]} for rest, values in times.items()},
            "speed_up": speed_up(times["none"], times["mean"]),
        }


def table(cells):
    """Time with a rest, for 1 without."""
    rows = {}
    for each in cells:
        key = (each["dtype"], each["head_size"], each["phase"])
        rows.setdefault(key, {})[each["n"]] = cost(each["speed_up"])
    lengths = sorted({length for row in rows.values() for length in row})
    body = [[*key, *(row.get(length, "") for length in lengths)] for key, row in rows.items()]
    return make_table("Time with a rest / without", ("dtype", "d", "phase", *(f"n = {n}" for n in lengths)), body)


def command_line():
    parser = argument_parser("benchmarks.rest", "What the rest of a mask costs on CPUs.", (FORWARD, TRAINING))
    parser.add_argument("--mask", default="dam_s", help=HELP)
    parser.add_argument("--head_sizes", type=int, nargs="+", default=(32, 64))
    parser.add_argument("--heads", type=int, default=12)
    parser.set_defaults(device="cpu", threads=1, seconds=2.5, lengths=(128, 256, 512, 1024, 2048), tokens=2048)
    return parser


def main(arguments=None):
    options = prepare(command_line(), arguments)
    if options.quick:
        options.lengths, options.head_sizes, options.tokens, options.heads = (64,), (32,), 128, 2
    cells = []
    for dtype in (torch.float32, torch.bfloat16):
        for head_size in options.head_sizes:
            for length in options.lengths:
                cells += cell(length, head_size, dtype, options)
                report = write_json(options, cells, tokens=options.tokens, heads=options.heads)
    print(f"{hardware_line(report['hardware'])}; commit {report['commit']}\n{report['command']}")
    print(table(cells).markdown())


if __name__ == "__main__":
    main()
