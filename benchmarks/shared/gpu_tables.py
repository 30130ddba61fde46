"""Tables of the documentation from the results of the queue in `benchmarks/gpu/`."""

import json
from pathlib import Path

from .report import make_table, ratio_text


FOLDER = Path(__file__).parents[1] / "gpu" / "results"
OURS = "sparse_triton"
BASELINES = {
    "flash": "flash, no mask",
    "cudnn": "cuDNN, no mask",
    "sdpa_float": "`sdpa` with the mask",
    "sparse_flex": "`sparse_flex`",
}


# The entries that time attention alone under masks of tiles.
ENTRIES = (2, 3)


def read(name, folder=FOLDER):
    """The results of an entry of the queue, or another file beside them."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def attention(phase):
    """Times of `sparse_triton` and how much faster it is than other attention, by mask and length."""
    results = [read(number) for number in ENTRIES]
    cells = [
        cell
        for result in results
        for report in result["reports"].values()
        for cell in report["cells"]
        if cell["phase"] == phase
    ]
    rows = []
    for cell in cells:
        time, ratios = cell["systems"][OURS], cell["speed_up"][OURS]
        texts = [ratio_text(ratios[name]) if name in ratios else "-" for name in BASELINES]
        rows.append([f"`{cell['mask']}`", f"{cell['density']:.0%}", cell["n"], f"{time['median_ms']:.3f}", *texts])
    header = ("mask", "live", "n", "ms", *(f"against {text}" for text in BASELINES.values()))
    gpus = {result["machine"]["gpu"] for result in results}
    return make_table(f"{phase.capitalize()}, {', '.join(sorted(gpus))}", header, rows)


def configurations():
    """Median microseconds of each kernel without dropout, by its launch configuration."""
    rows = {}
    for choice in read("launch_configurations")["choices"]:
        if not choice["dropout"]:
            for configuration, time in choice["microseconds"].items():
                # The time of the first entry that has it.
                rows.setdefault((choice["kernel"], f"({configuration})"), {}).setdefault(choice["bucket"], time)
    lengths = sorted({length for row in rows.values() for length in row})
    body = [[*key, *(f"{row[n]:.0f}" if n in row else "" for n in lengths)] for key, row in rows.items()]
    header = ("kernel", "warps, stages, step, registers at most", *(f"n to {n}" for n in lengths))
    return make_table("Launch configurations, microseconds", header, body)
