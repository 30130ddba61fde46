"""
What a step of pre-training costs, counted: work, memory, communication and checkpoints of BERT with a mask.

    python -m benchmarks.cost_model    # the tables of docs/scale.md

Letters: n length, D hidden size, F intermediate size, L layers, H heads, V vocabulary.
"""

import argparse
import json
from dataclasses import dataclass

import numpy as np
from transformers import BertConfig

from .shared.report import DROPOUT, FORWARD, RESULTS, make_table


FLOAT, HALF = 4, 2  # bytes
# Backward multiplies by the weights and by the inputs.
STEP = 3
TOKENS, LIVE = 32768, 0.11
MODELS = {
    "base": BertConfig(vocab_size=30522),
    "large": BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}


@dataclass(frozen=True)
class Machine:
    """
    What the times of the plan assume of a GPU. None of it was measured here.

    Args:
        flops (`float`): Peak of its matrix units in bfloat16, per second.
        bandwidth (`float`): Memory bandwidth, bytes per second.
        links (`float`): Bytes per second that it sends within a node of 8, and that it receives at the same time.
        network (`float`): The same between nodes.
        linear, attention (`float`): Share of the peak that large matrix products and dense fused attention reach.
    """

    flops: float = 790e12
    bandwidth: float = 4.3e12
    links: float = 450e9
    network: float = 50e9
    linear: float = 0.8
    attention: float = 0.6


def num_parameters(config):
    """Parameters of `BertForPreTraining`, without those of a mask."""
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    embeddings = (vocabulary + config.max_position_embeddings + config.type_vocab_size + 2) * hidden
    layer = 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 4 * hidden
    heads = 2 * (hidden + 1) * hidden + 2 * hidden + vocabulary + 2 * (hidden + 1)
    return embeddings + config.num_hidden_layers * layer + heads


def forward_flops(config, length, density=1.0, predicted=0.15):
    """Operations of a forward of `BertForPreTraining` on one sequence: two for a multiplication and its addition."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    linear = 2 * layers * length * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    head = 2 * predicted * length * (hidden**2 + hidden * config.vocab_size) + 2 * (hidden**2 + 2 * hidden)
    return {"linear": linear, "attention": 4 * layers * density * length**2 * hidden, "head": head}


def activation_bytes(config, length, checkpointing=False):
    """
    What the encoder keeps of a sequence for backward under bfloat16, with fused attention: 34 bytes per token, layer
    and hidden unit, or with checkpointing the input of each layer and what one layer keeps.

    Source: Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), Eq. 2 without scores.
    """
    layer = 34 * length * config.hidden_size
    inputs = HALF * length * config.hidden_size
    return layer + config.num_hidden_layers * inputs if checkpointing else config.num_hidden_layers * layer


def checkpoint_bytes(config, length, search="dam_s"):
    """Weights and moments of AdamW, with the logits of the search and theirs."""
    return 3 * FLOAT * (num_parameters(config) + num_logits(config, length, search))


def num_logits(config, length, search):
    """Learned parameters of a mask that all layers share."""
    tiles = -(-length // 64)
    per_head = {"dam_s": length - 2, "dam_b": tiles, "dam_u": length * (length + 1) // 2}[search]
    return config.num_attention_heads * per_head


def bias_bytes(config, length):
    """The bias of the scores that a searching step makes once for all layers, and its gradient: (H, n, n) each."""
    return 2 * FLOAT * config.num_attention_heads * length**2


def all_reduce_seconds(size, gpus, machine):
    """Ring all-reduce: each GPU sends and receives its data twice, at the speed of the slowest link."""
    if gpus == 1:
        return 0.0
    return 2 * (gpus - 1) / gpus * size / (machine.links if gpus <= 8 else machine.network)


def step_seconds(config, length, tokens, machine, density=1.0):
    """
    Seconds of forward and backward on one GPU, by part: matrix products at their share of the peak, attention on the
    live tiles, and one pass over what is kept for backward in each direction.
    """
    batch = tokens / length
    flops = {part: STEP * batch * count for part, count in forward_flops(config, length, density).items()}
    return {
        "products": (flops["linear"] + flops["head"]) / (machine.flops * machine.linear),
        "attention": flops["attention"] / (machine.flops * machine.attention),
        "memory": 4 * batch * activation_bytes(config, length) / machine.bandwidth,
    }


def _times(name, phase, systems):
    """`{n: {system: seconds}}` of a report in `results/`."""
    report = json.loads((RESULTS / f"{name}_cpu.json").read_text())
    cells = [cell for cell in report["cells"] if cell["mask"] == "dam_s" and cell["phase"] == phase]
    return {cell["n"]: {name: cell["systems"][name]["median_ms"] / 1e3 for name in systems} for cell in cells}


def compared():
    """
    The model against the CPU measurements. The times of one layer, at three lengths, dense and sparse, give three
    rates per phase: seconds per token of the linear layers, and per pair of tokens of dense and of sparse attention.
    BERT-base, in another report, is predicted by counting its layers and tokens.
    """
    rows, systems = [], ("sdpa", "sparse_auto")
    scale = {"layer": 1.0, "model": MODELS["base"].num_hidden_layers / 2}  # half of the tokens
    for phase in (FORWARD, DROPOUT):
        times = {name: _times(name, phase, systems) for name in scale}
        points = [(n, system, seconds[system]) for n, seconds in times["layer"].items() for system in systems]
        counted = np.array([[1.0, n * (system == "sdpa"), n * (system != "sdpa")] for n, system, _ in points])
        measured = np.array([seconds for *_, seconds in points])
        # Relative errors count alike.
        rates, *_ = np.linalg.lstsq(counted / measured[:, None], np.ones(len(points)), rcond=None)
        for name, factor in scale.items():
            for length, seconds in times[name].items():
                for system in systems:
                    predicted = factor * (rates[0] + rates[1 + systems.index(system)] * length)
                    row = {"report": name, "phase": phase, "n": length, "system": system}
                    rows.append(row | {"measured": seconds[system], "predicted": float(predicted)})
    return rows


def tables(machine=Machine(), tokens=TOKENS, live=LIVE):
    """The tables of docs/scale.md: `"measured"`, `"work"`, `"sent"` and `"plan"`."""
    found = {}
    rows = [
        [*(row[name] for name in ("report", "phase", "n", "system")), f"{1e3 * row['measured']:.0f}",
         f"{1e3 * row['predicted']:.0f}", f"{row['predicted'] / row['measured']:.2f}"]
        for row in compared()
    ]  # fmt: skip
    header = ("report", "phase", "n", "system", "measured, ms", "counted, ms", "ratio")
    found["measured"] = make_table("Counted against measured, CPU", header, rows)
    rows = []
    for name, config in MODELS.items():
        for length in (512, 4096, 8192, 16384, 32768):
            dense = {part: 3 * count for part, count in forward_flops(config, length).items()}
            total = sum(dense.values())
            kept = total - (1 - live) * dense["attention"]
            rows.append(
                [name, length, f"{total / length / 1e9:.2f}", f"{dense['attention'] / total:.0%}",
                 f"{total / kept:.1f}", f"{activation_bytes(config, length) / 2**30:.1f}",
                 f"{activation_bytes(config, length, True) / 2**30:.1f}",
                 f"{bias_bytes(config, length) / 2**30:.1f}"]
            )  # fmt: skip
    header = ("model", "n", "GFLOP per token", "attention, dense", "dense / frozen", "kept for backward, GiB",
              "with checkpointing", "bias of a search, GiB")  # fmt: skip
    found["work"] = make_table(f"Work and memory of a step; frozen: {live:.0%} of the tiles live", header, rows)
    rows = []
    for name, config in MODELS.items():
        size = FLOAT * num_parameters(config)
        for length in (512, 4096, 32768):
            logits = [f"{FLOAT * num_logits(config, length, search) / 2**20:,.3f}" for search in
                      ("dam_s", "dam_b", "dam_u")]  # fmt: skip
            rows.append([name, length, f"{size / 2**20:,.0f}", *logits,
                         f"{checkpoint_bytes(config, length) / 2**30:.2f}",
                         f"{checkpoint_bytes(config, length, 'dam_u') / 2**30:.1f}"])  # fmt: skip
    header = ("model", "n", "gradient of the weights, MiB", "of dam_s", "of dam_b", "of dam_u", "checkpoint, GiB",
              "with dam_u")  # fmt: skip
    found["sent"] = make_table("Sent by each step, and written", header, rows)
    rows = []
    for name, config in MODELS.items():
        for length in (4096, 8192, 16384, 32768):
            for gpus in (8, 64, 512):
                send = all_reduce_seconds(FLOAT * num_parameters(config), gpus, machine)
                cells = []
                for density in (1.0, live):
                    compute = sum(step_seconds(config, length, tokens, machine, density).values())
                    # Sent while backward computes, two thirds of the step.
                    seconds = compute + max(send - compute * 2 / 3, 0.0)
                    cells += [1e3 * seconds, gpus * tokens / seconds / 1e6]
                rows.append([name, length, gpus, f"{cells[0]:.0f}", f"{cells[2]:.0f}", f"{1e3 * send:.0f}",
                             f"{cells[1]:.1f}", f"{cells[3]:.1f}", f"{1e6 / cells[1] / 3600:.1f}",
                             f"{1e6 / cells[3] / 3600:.1f}"])  # fmt: skip
    header = ("model", "n", "GPUs", "step, dense, ms", "frozen", "all-reduce", "M tokens/s, dense", "frozen",
              "hours for 1 T tokens, dense", "frozen")  # fmt: skip
    title = f"Plan: {tokens} tokens per GPU and step, bfloat16, data parallel"
    return found | {"plan": make_table(title, header, rows)}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description="What pre-training costs.")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens per GPU and step")
    parser.add_argument("--live", type=float, default=LIVE, help="share of live tiles in the frozen mask")
    options = parser.parse_args(arguments)
    for table in tables(tokens=options.tokens, live=options.live).values():
        print(f"\n{table.markdown()}", end="")


if __name__ == "__main__":
    main()
