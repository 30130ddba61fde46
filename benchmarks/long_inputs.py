"""
Time and memory of one long sequence in inference, against length: an encoder of MiniLM's size, dense and masked.

    python -m benchmarks.long_inputs [--lengths 4096 8192 16384 32768]

`dense` is PyTorch's fused attention; `same share` removes 91 % at every length; `same offsets` is a mask that removes
91 % at 512 tokens and goes on at its offsets. Every run has a process and a peak of its own, and the systems take
turns. Memory is that beside the weights. What is in the results already is not measured again.

Letters: n tokens of the sequence.
"""

import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from transformers import BertConfig, BertModel

from sparsebert import attach

from .data_memory import PeakMemory
from .encoders import check
from .padding import MODELS, VOCABULARY
from .shared.masks_by_name import build_mask
from .shared.measure import resident
from .shared.report import FORWARD, argument_parser, earlier_cells, hardware_line, make_table, prepare, write_json


# Length that a mask is made for, if not the input's.
SYSTEMS = {"dense": None, "same share": None, "same offsets": 512}
MASK = "dam_s"
SHORT = 128


def measured(system, length, threads, seed, sizes):
    """Seconds and peak memory of one sequence in a process that has seen a short one."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    config = BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=length, attn_implementation="sdpa")
    model = BertModel(config).eval()
    ids = torch.randint(5, VOCABULARY, (1, length))
    if system != "dense":
        mask = build_mask(MASK, SYSTEMS[system] or length, config.num_attention_heads, seed)
        attach(model, mask, allow_empty_rows=True)
        check(model, ids[:, :SHORT])
    with torch.no_grad():
        model(ids[:, :SHORT])
        before = resident()
        with PeakMemory() as memory:
            start = time.perf_counter()
            model(ids)
            seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": memory.peak - before}


def table(cells, systems=tuple(SYSTEMS), with_memory=True):
    """Seconds by length, what the masks gain, and memory."""
    header = ["n", *(f"{name}, s" for name in systems), *(f"dense / {name}" for name in systems[1:])]
    header += [f"{name}, MiB" for name in systems] if with_memory else []
    rows = []
    for cell in cells:
        runs = [cell["systems"][name] for name in systems]
        seconds = [statistics.median(run["seconds"] for run in of_one) for of_one in runs]
        row = [
            cell["n"],
            *(f"{value:.1f}" for value in seconds),
            *(f"{seconds[0] / value:.1f}" for value in seconds[1:]),
        ]
        if with_memory:
            row += [f"{statistics.median(run['peak_bytes'] for run in of_one) / 2**20:,.0f}" for of_one in runs]
        rows.append(row)
    return make_table("One sequence, medians", header, rows)


def run(arguments=None):
    parser = argument_parser("benchmarks.long_inputs", "One long sequence: time and memory.", (FORWARD,))
    parser.set_defaults(device="cpu", rounds=3)
    options = prepare(parser, arguments)
    sizes = MODELS["MiniLM"] | ({"num_hidden_layers": 1} if options.quick else {})
    options.lengths = options.lengths or ((256,) if options.quick else (4096, 8192, 16384, 32768))
    path = options.output.with_name(options.output.name + ".json")
    cells = earlier_cells(parser, options)
    context = multiprocessing.get_context("spawn")
    for length in options.lengths:
        if any(cell["n"] == length for cell in cells):
            continue
        runs = {name: [] for name in SYSTEMS}
        for _ in range(options.rounds):
            for name, of_one in runs.items():
                with ProcessPoolExecutor(1, mp_context=context) as pool:
                    job = pool.submit(measured, name, length, options.threads, options.seed, sizes)
                    of_one.append(job.result())
        cells.append({"n": length, "systems": runs})
        write_json(options, sorted(cells, key=lambda cell: cell["n"]), mask=MASK, mask_lengths=SYSTEMS)
        print(f"{length} tokens: done", flush=True)
    result = json.loads(path.read_text())
    print(f"\n{table(result['cells']).markdown()}\n{hardware_line(result['hardware'])}")


if __name__ == "__main__":
    run()
