"""
What works under which engine, on two processes of the CPU: search, freeze, fine-tune, save, load and resume.

    python -m benchmarks.engines

Losses are compared with one process at the same batch. DeepSpeed must be installed. It times nothing.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from sparsebert import SparseBertForMaskedLM

from .shared.engine_jobs import BATCH, EARLY, ENGINES, LATE, ONE, rows
from .shared.report import RESULTS, argument_parser, hardware_line, make_table, prepare, write_json


RESUMED = (f"resume {EARLY}", f"resume {LATE}")
OWN = ("search", "target", "continued", "accumulate", "finetune", *RESUMED)
# Engine to the engines of the checkpoints that it is to go on from.
OTHERS = {
    ONE: ("DDP",),
    "DDP": (ONE, "ZeRO-2"),
    "ZeRO-1": ("ZeRO-2",),
    "ZeRO-2": ("ZeRO-1", "ZeRO-3", "DDP"),
    "ZeRO-3": ("ZeRO-2", "FSDP2 full"),
    "FSDP2 full": ("FSDP2 sharded", "DDP"),
    "FSDP2 sharded": ("FSDP2 full", "ZeRO-3"),
}
HEADER = (
    *("engine", "search, penalty", "search, target", "mask at the freeze", "saved, loaded by one process"),
    *("fine-tuning", "accumulation", "resumed before the freeze", "after it"),
)


def train_all(folder, plan):
    """Run jobs in processes of their own."""
    command = [sys.executable, "-m", "benchmarks.shared.engine_jobs", str(folder), json.dumps(plan)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
    return results_of(folder, plan)


def results_of(folder, plan):
    """Engine to what each of its processes found, by job."""
    return {
        engine: [
            json.loads((folder / f"{engine}-{rank}.json").read_text()) for rank in range(1 if engine == ONE else 2)
        ]
        for engine in plan
    }


def gap(found, reference):
    """Largest difference of the losses of two runs, or the error of the first."""
    if "error" in found:
        return "refused"
    assert len(found["loss"]) == len(reference["loss"])
    return max(abs(one - other) for one, other in zip(found["loss"], reference["loss"], strict=True))


def loaded_loss(folder):
    """The loss of a saved model in this process, on the rows of the evaluation."""
    model = SparseBertForMaskedLM.from_pretrained(folder).eval()
    batch = {name: torch.tensor([row[name] for row in rows("tokens")[:BATCH]]) for name in ("input_ids", "labels")}
    with torch.inference_mode():
        return model(**batch).loss.item()


def cell_of(engine, found, reference, folder):
    """What the jobs of an engine found, compared with one process."""
    for job, mine in found[0].items():
        for other in found[1:]:  # every process has the same logits in every step, and the same mask
            assert all(mine.get(name) == other[job].get(name) for name in ("hashes", "mask", "error")), (engine, job)
    mine, first = found[0], found[0]["search"]
    assert first["wrapped"].startswith(ENGINES[engine]), first["wrapped"]
    cell = {"engine": engine, "wrapped": first["wrapped"], "losses": first["loss"], "mask": first["mask"]}
    cell["same_mask"] = first["mask"] == reference["search"]["mask"]
    cell["load"] = abs(loaded_loss(folder / engine / "search") - reference["search"]["eval_loss"])
    cell["gaps"] = {job: gap(mine[job], reference[job]) for job in ("search", "finetune", "accumulate", *RESUMED)}
    cell["target"] = {"losses": mine["target"]["loss"], "sparsity": mine["target"]["sparsity"]}
    cell["continued"] = mine["continued"]["loss"]
    cell["others"] = {job: gap(result, reference["search"]) for job, result in mine.items() if " of " in job}
    return cell


def tables(cells):
    """What each engine did, compared with one process, and what it resumed of others."""
    table = []
    for cell in cells:
        gaps = {job: f"{value:.0e}" for job, value in cell["gaps"].items()}
        table.append(
            [cell["engine"], gaps["search"], f"loss {cell['target']['losses'][-1]:.4f}"]
            + ["the same" if cell["same_mask"] else "another", f"{cell['load']:.0e}", gaps["finetune"]]
            + [gaps["accumulate"], *(gaps[job] for job in RESUMED)]
        )
    lines = []
    for cell in cells:
        for job, value in cell["others"].items():
            step, other = job.removeprefix("resume ").split(" of ")
            lines.append([cell["engine"], other, step, value if isinstance(value, str) else f"{value:.0e}"])
    return {
        "jobs": make_table("Largest difference of a loss from one process", HEADER, table),
        "crossed": make_table(
            "Resumed from a checkpoint of another engine", ("engine", "checkpoint of", "step", "difference"), lines
        ),
    }


def main(arguments=None):
    parser = argument_parser("benchmarks.engines", "Two processes of the CPU under every engine.")
    parser.set_defaults(output=RESULTS / "engines")
    options = prepare(parser, arguments)
    plan = {engine: list(OWN) for engine in ENGINES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = train_all(folder, plan)
        crossed = {
            engine: [f"resume {step} of {other}" for other in others for step in (EARLY, LATE)]
            for engine, others in OTHERS.items()
        }
        for engine, results in train_all(folder, crossed).items():
            for mine, other in zip(found[engine], results, strict=True):
                mine |= other
        reference = found[ONE][0]
        cells = [cell_of(engine, found[engine], reference, folder) for engine in ENGINES]
    report = write_json(options, cells)
    print(hardware_line(report["hardware"]))
    for table in tables(cells).values():
        print(f"\n{table.markdown()}", end="")


if __name__ == "__main__":
    main()
