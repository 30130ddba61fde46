"""Tables of the documentation from the results of the queue in `benchmarks/gpu/`."""

import json
from pathlib import Path

from ._report import make_table, ratio_text


FOLDER = Path(__file__).parent / "gpu" / "results"
OURS = "sparse_triton"
BASELINES = {
    "flash": "flash, no mask",
    "cudnn": "cuDNN, no mask",
    "sdpa_float": "`sdpa` with the mask",
    "sparse_flex": "`sparse_flex`",
}


def read(folder=FOLDER):
    """The results of the queue, by the number of the entry."""
    return {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def attention(results, phase):
    """Times of `sparse_triton` and how much faster it is than other attention, by mask and length."""
    cells = [
        cell
        for number in sorted(results)
        for report in results[number].get("reports", {}).values()
        for cell in report["cells"]
        if cell["phase"] == phase
    ]
    rows = []
    for cell in cells:
        time, ratios = cell["systems"][OURS], cell["speed_up"][OURS]
        texts = [ratio_text(ratios[name]) if name in ratios else "-" for name in BASELINES]
        rows.append([f"`{cell['mask']}`", f"{cell['density']:.0%}", cell["n"], f"{time['median_ms']:.3f}", *texts])
    header = ("mask", "live", "n", "ms", *(f"against {text}" for text in BASELINES.values()))
    machine = next(iter(results.values()))["machine"]
    return make_table(f"{phase.capitalize()}, {machine['gpu']}", header, rows)


def configurations(results):
    """Median microseconds of each kernel without dropout, by its launch configuration."""
    rows = {}
    for choice in results[7]["choices"]:
        if not choice["dropout"]:
            for configuration, time in choice["microseconds"].items():
                # Of the entries, the first that timed it.
                rows.setdefault((choice["kernel"], f"({configuration})"), {}).setdefault(choice["bucket"], time)
    lengths = sorted({length for row in rows.values() for length in row})
    body = [[*key, *(f"{row[n]:.0f}" if n in row else "" for n in lengths)] for key, row in rows.items()]
    header = ("kernel", "warps, stages, step, registers at most", *(f"n to {n}" for n in lengths))
    return make_table("Launch configurations, microseconds", header, body)
