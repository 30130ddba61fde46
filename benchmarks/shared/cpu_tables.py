"""Tables of the documentation from the results on CPUs: attention, layers, models, and the learned masks."""

from pathlib import Path

from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.masks.tiles import mask_tile_shares

from .report import DROPOUT, FORWARD, make_table, ratio_text


MASKS = Path(__file__).parents[1] / "masks"
OURS, BEST_DENSE = "sparse_cpu", "best dense"
BASELINES = {"sdpa": "`sdpa`, bool mask", "sdpa_unmasked": "`sdpa`, no mask", BEST_DENSE: "the best with a mask"}
TILES = (64, 32)


def attention(report):
    """How much faster `sparse_cpu` is, by mask, phase and what it is compared with."""
    rows = {}
    for cell in report["cells"]:
        for name, text in BASELINES.items():
            if name in cell["speed_up"][OURS]:
                key = (f"`{cell['mask']}`", f"{cell['density']:.0%}", cell["phase"], text)
                rows.setdefault(key, {})[cell["n"]] = ratio_text(cell["speed_up"][OURS][name])
    return _by_length("Attention", ("mask", "live", "phase", "against"), rows)


def models(reports):
    """How much faster a layer or a model with a mask is than with `sdpa`, by phase; reports by title."""
    phases = {FORWARD: "inference", DROPOUT: "training step, with dropout"}
    rows = {}
    for title, report in reports.items():
        for cell in report["cells"]:
            key = (title, phases[cell["phase"]])
            rows.setdefault(key, {})[cell["n"]] = ratio_text(cell["speed_up"]["sdpa"])
    return _by_length("Models", ("", "phase"), rows)


def _by_length(title, header, rows):
    lengths = sorted({length for row in rows.values() for length in row})
    body = [[*key, *(row.get(length, "") for length in lengths)] for key, row in rows.items()]
    return make_table(title, (*header, *(f"n = {length}" for length in lengths)), body)


def densities(report, fields=("dtype", "phase"), **only):
    """
    How much faster `sparse_cpu` is than the best dense attention with a mask, by the share of live entries. A column
    for all values of the `fields` of those cells that have the values `only`.
    """
    rows = {}
    for cell in report["cells"]:
        if all(cell[name] == value for name, value in only.items()):
            entry = ratio_text(cell["speed_up"][OURS][BEST_DENSE])
            rows.setdefault(f"{cell['density']:.0%}", {})[tuple(cell[name] for name in fields)] = entry
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    header = ("live", *(", ".join(map(str, key)) for key in columns))
    return make_table("By density", header, [[live, *(row[key] for key in columns)] for live, row in rows.items()])


def masks():
    """What the learned masks of the benchmarks remove, and their live tiles."""
    rows = []
    for folder in sorted(path for path in MASKS.iterdir() if path.is_dir()):
        mask = SparseMask.from_pretrained(folder)
        live = [f"{mask_tile_shares(mask, mask.length, side)[0]:.1%}" for side in TILES]
        rows.append([f"`{folder.name}`", mask.length, f"{mask.sparsity:.1%}", *live])
    return make_table("Masks", ("mask", "n", "removed", *(f"live tiles of {side}" for side in TILES)), rows)


def extended_masks():
    """The live tiles of the masks learned for a trained model, extended to longer inputs."""
    lengths, rows = (512, 1024, 2048, 4096), []
    for folder in sorted(MASKS.glob("minilm_*")):
        mask = SparseMask.from_pretrained(folder)
        rows.append([f"`{folder.name}`", *(f"{mask_tile_shares(mask, length, 64)[0]:.0%}" for length in lengths)])
    return make_table("Live tiles of 64", ("mask", *(f"n = {length}" for length in lengths)), rows)
