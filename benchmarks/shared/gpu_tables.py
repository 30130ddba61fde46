"""Tables of the documentation from the results of the queue in `benchmarks/gpu/`."""

import json
from pathlib import Path
from statistics import fmean

from sparsebert.masks.matched import matched_pattern
from sparsebert.masks.shipped import shipped_folder
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.masks.tiles import TILE, mask_tile_shares
from studies.claims import REPRODUCED
from studies.harness.comparisons import against
from studies.harness.seed_comparisons import mean_text

from ..attention import tables as attention_tables
from .report import RESULTS, make_table


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
    (table,) = attention_tables(cells, OURS, BASELINES)
    return table


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


def compiled():
    """What each kernel takes in its first configuration, without and with dropout, by compute capability."""
    rows, archs = {}, {}
    for cell in json.loads((RESULTS / "compile_triton.json").read_text(encoding="utf-8"))["cells"]:
        archs[cell["arch"]] = f"sm_{cell['arch']}"
        if cell["distances"]:  # whose configurations are others
            continue
        found = rows.setdefault((cell["kernel"], str(cell["head_size"])), {})
        configuration = tuple(cell[name] for name in ("warps", "stages", "step", "limit"))
        chosen, most = found.setdefault((cell["arch"], cell["dropout"]), (configuration, (0, 0)))
        if configuration == chosen:  # with a rest or without, for 64 tokens or 128: the worst
            found[cell["arch"], cell["dropout"]] = chosen, max(most, (cell["registers"], cell["spills"][0]))

    def text(entry):
        if entry is None:
            return "-"
        (*_, step, _), (registers, spilled) = entry
        return f"{registers} ({step})" + f", {spilled} B spilled" * bool(spilled)

    body = [
        [*key, "yes" if dropout else "no", *(text(found.get((arch, dropout))) for arch in archs)]
        for key, found in rows.items()
        for dropout in (False, True)
    ]
    return make_table("Registers of a thread (step)", ("kernel", "head size", "dropout", *archs.values()), body)


def tile_quality(length):
    """How close masks of tiles, and others, keep a trained MiniLM to the dense model, and which tiles are live."""
    counted, rows = {}, {}
    if length == 512:  # of which some cells are older than the count
        learned = SparseMask.from_pretrained(shipped_folder("minilm-l6-512-90"))
        counted = {"window": matched_pattern("window", 0.9, length, 1), "dam_s": learned}
    for folder in ("rest", "tiles"):
        for cell in read("minilm_tiny", REPRODUCED / folder)["cells"].values():
            settings = cell["settings"]
            if settings["length"] == length:
                name = settings["mask"] if settings.get("symmetric", True) else f"{settings['mask']}, signed"
                row = name, settings["mask"], settings["sparsity"], bool(settings["recover"])
                rows.setdefault(row, {})[settings["seed"]] = cell["metrics"]
    after = {
        row: {seed: metrics["cosine"] for seed, metrics in found.items()} for row, found in rows.items() if row[3]
    }
    own = next(row for row in after if row[1:3] == ("dam_s", 0.9))
    compared = against(after, 4, lambda row: own)
    body = []
    for row, by_seed in sorted(rows.items(), key=lambda row: -fmean(_before(row[1]))):
        (name, mask, sparsity, _), found = row, by_seed.values()
        live = [metrics["live_tiles"] for metrics in found if "live_tiles" in metrics]
        if not live and mask in counted and sparsity == 0.9:
            live = [mask_tile_shares(counted[mask], length, TILE)[0]]
        removed, share = fmean(metrics["removed"] for metrics in found), f"{fmean(live):.0%}" if live else ""
        recovered = mean_text(after[row].values(), 4) if row in after else ""
        cosines = mean_text(_before(by_seed), 4), recovered, str(len(found)), *compared.get(row, ("", ""))
        body.append([name, f"{removed:.0%}", share, *cosines])
    header = (
        *("mask", "removed", "live tiles of 64", "cosine before recovery", "cosine after", "seeds"),
        *("minus dam_s with 90 %", "p (Holm)"),
    )
    return make_table(f"{length} tokens, MiniLM", header, body)


def _before(by_seed):
    return [metrics["cosine_before"] for metrics in by_seed.values()]
