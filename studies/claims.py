"""
The main claims of the papers, and what the committed results of `sparsebert reproduce` say about them.

    python -m studies.claims    # prints the table of results/README.md

A claim is a list of comparisons: what should be greater, and than what, by seed. It is refuted if one of them is
significant the other way (paired t test, Holm's correction for all comparisons of the claim, also those that are still
to be run), confirmed if all are significant that way, and open otherwise.
"""

import json
import statistics
from pathlib import Path

from sparsebert.analysis.importance import OFFSET_GROUPS
from sparsebert.analysis.tables import Table

from .harness.claim_tests import Claim, Comparison, status, weakest
from .harness.comparisons import by_seed, of_system
from .sparsebert_paper.sparsebert_table2 import NAMES
from .sparsebert_paper.sparsebert_table3 import MANUAL, window_losses


# The committed results.
REPRODUCED = Path(__file__).resolve().parents[1] / "results"
# What counts as no harm: nats of MLM loss, BLEU, points of a task's score.
LOSS_MARGIN, BLEU_MARGIN, SCORE_MARGIN = 0.02, 0.5, 1.0
CONFIGURATIONS = ("union", "sequential", "multihead")
# [O]'s patterns in all head configurations.
_PATTERNS = [f"{pattern}_{configuration}" for pattern in ("strided", "fixed") for configuration in CONFIGURATIONS]
# How far apart the shares may be that two masks remove which count as equally sparse.
SAME_SPARSITY = 0.03


def _shifted(numbers, by):
    return {seed: number + by for seed, number in numbers.items()}


def _percent(numbers):
    return {seed: 100 * number for seed, number in numbers.items()}


def _importance(cells, better, worse):
    groups = {name: of_system(cells, f"p_{name}", system="soft") for name in (*OFFSET_GROUPS, "special_tokens")}
    return [
        Comparison(f"P {one.replace('_', ' ')} - P {other.replace('_', ' ')}", groups[one], groups[other])
        for one in better or groups
        for other in worse
        if one != other
    ]


def _without_diagonal(cells):
    dense = of_system(cells, "mlm_loss", system="dense")
    no_diag = of_system(cells, "mlm_loss", system="no_diag")
    drawn = by_seed(cells, "mlm_loss", "system").get("random_drop", {})
    return [
        Comparison(f"loss: dense + {LOSS_MARGIN} - no_diag", _shifted(dense, LOSS_MARGIN), no_diag),
        Comparison("loss: random_drop - dense", drawn, dense),
        Comparison("loss: random_drop - no_diag", drawn, no_diag),
    ]


def _tasks_without_diagonal(cells):
    scores = by_seed(cells, "score", "task", "system", times=100)

    def comparison(task, better, margin, worse):
        more = f" + {margin:g}" if margin else ""
        greater = _shifted(scores.get((task, better), {}), margin)
        return Comparison(f"{NAMES[task]}: {better}{more} - {worse}", greater, scores.get((task, worse), {}))

    return [
        comparison(task, *parts)
        for task in NAMES
        for parts in (
            ("no_diag", SCORE_MARGIN, "dense"),
            ("dense", 0.0, "random_drop"),
            ("no_diag", 0.0, "random_drop"),
        )
    ]


def _manual_without_diagonal(cells):
    return [
        Comparison(
            f"loss: {manual} + {LOSS_MARGIN} - {manual}_no_diag",
            _shifted(of_system(cells, "mlm_loss", system=manual), LOSS_MARGIN),
            of_system(cells, "mlm_loss", system=f"{manual}_no_diag"),
        )
        for manual in MANUAL
    ]


# Manual masks, and the target of the learned ones that keep as much to a point. The others have none: strided and
# fixed masks keep far more, and a star about as little as dam_s can.
_AS_SPARSE = {"longformer": 0.898, "logsparse": 0.898, "bigbird": 0.935}


# Searches with a target whose mask all layers share, as in the paper: of the mask itself, and of P.
_SEARCHES = ("dam_s", "dam_u", "dam_s_probs", "dam_u_probs")


def _learned_above_manual(cells):
    return [
        _learned(cells, search, target, name, of_system(cells, "mlm_loss", system=name))
        for search in _SEARCHES
        for name, target in _AS_SPARSE.items()
    ]


def _learned_above_windows(cells):
    return [
        _learned(cells, search, target, "window", window_losses(cells, f"{search}_target_{target:g}"))
        for search in _SEARCHES
        for target in dict.fromkeys(_AS_SPARSE.values())
    ]


def _learned(cells, search, target, manual, losses):
    own = of_system(cells, "mlm_loss", system=f"{search}_target_{target:g}")
    return Comparison(f"loss: {manual} - {search} at {target:.1%}", losses, own)


def _stages(cells, better, worse):
    return [
        Comparison(
            f"loss at {target:.0%}: {worse} - {better}",
            of_system(cells, "mlm_loss", stage=worse, target=target),
            of_system(cells, "mlm_loss", stage=better, target=target),
        )
        for target in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
    ]


def _copying(cells):
    def accuracy(series):
        return _percent(of_system(cells, "second_half_accuracy", series=series, depth=4))

    return [
        Comparison(f"accuracy, %: {pattern} - {other}", accuracy(pattern), accuracy(other))
        for pattern in _PATTERNS
        for other in ("random", "star")
    ]


def _convolutions(cells):
    def loss(kind, count):
        return of_system(cells, "mlm_loss", series=kind, replaced_layers=count)

    better = {count: ("attention", "sepconv") if count <= 2 else ("sepconv", "attention") for count in range(1, 7)}
    return [
        Comparison(f"loss, {count} layers: {one} - {other}", loss(one, count), loss(other, count))
        for count, (one, other) in better.items()
    ]


def _levels(cells, metric):
    """By pattern, and then by the name of a level: the share that it removes, and a metric by seed."""
    levels = {}
    for cell in cells.values():
        settings = cell["settings"]
        name = "_".join([settings["series"], *(f"{level:g}" for level in (settings["pattern_kwargs"] or {}).values())])
        removed, numbers = levels.setdefault(settings["series"], {}).setdefault(name, ([], {}))
        removed.append(cell["metrics"]["sparsity"])
        numbers[settings["seed"]] = cell["metrics"][metric]
    return {
        series: {name: (statistics.fmean(removed), numbers) for name, (removed, numbers) in found.items()}
        for series, found in levels.items()
    }


def _nearest(levels, removed):
    """The name of the level that removes most nearly this share."""
    return min(levels, key=lambda name: abs(levels[name][0] - removed))


def _as_sparse(cells, metric, pairs):
    """
    For pairs of patterns, of which the first should have the greater numbers: their levels that remove about as much,
    each compared with the nearest. There is a comparison without numbers for a pair that has no such levels.
    """
    levels = _levels(cells, metric)
    label = "BLEU" if metric == "bleu" else metric
    result = []
    for greater, smaller in pairs:
        ours, theirs = levels.get(greater, {}), levels.get(smaller, {})
        matched = (
            [
                Comparison(f"{label}: {name} - {other}", numbers, theirs[other][1])
                for name, (removed, numbers) in ours.items()
                if abs(theirs[other := _nearest(theirs, removed)][0] - removed) <= SAME_SPARSITY
                and _nearest(ours, theirs[other][0]) == name
            ]
            if theirs
            else []
        )
        result += matched or [Comparison(f"{label}: {greater} - {smaller}, equally sparse", {}, {})]
    return result


def _strided_and_star(cells):
    pairs = [(f"fixed_{configuration}", f"strided_{configuration}") for configuration in CONFIGURATIONS]
    pairs += [(f"fixed_{configuration}", "star") for configuration in CONFIGURATIONS]
    return _as_sparse(cells, "perplexity", pairs)


def _union(cells):
    pairs = [
        (f"{pattern}_{other}", f"{pattern}_union") for pattern in ("strided", "fixed") for other in CONFIGURATIONS[1:]
    ]
    return _as_sparse(cells, "perplexity", pairs)


def _union_as_dense(cells):
    levels = _levels(cells, "bleu")
    (dense,) = [numbers for _, numbers in levels.get("dense", {}).values()] or [{}]
    names = {name: numbers for series in ("strided_union", "fixed_union")
             for name, (_, numbers) in (levels.get(series) or {series: (0, {})}).items()}  # fmt: skip
    return [
        Comparison(f"BLEU: {name} + {BLEU_MARGIN} - dense", _shifted(numbers, BLEU_MARGIN), dense)
        for name, numbers in names.items()
    ]


def _mixers(cells, pairs):
    def accuracy(name):
        named = {key: cell for key, cell in cells.items() if key == name or key.startswith(f"{name}_seed_")}
        return _percent(of_system(named, "mlm_accuracy"))

    return [Comparison(f"MLM accuracy, %: {one} - {other}", accuracy(one), accuracy(other)) for one, other in pairs]


CLAIMS = (
    Claim(
        "[S] Figure 2", "The diagonal is the least important of all positions", "sparsebert_table1",
        lambda cells: _importance(cells, None, ["diagonal"]),
    ),
    Claim(
        "[S] Figure 2", "Neighbors and special tokens are more important than the rest", "sparsebert_table1",
        lambda cells: _importance(cells, ["offset_1", "special_tokens"], ["offsets_4_8", "beyond_8"]),
    ),
    Claim(
        "[S] Table 1",
        "Without the diagonal a model is as good; without as many random positions it is worse than both",
        "sparsebert_table1", _without_diagonal,
    ),
    Claim(
        "[S] Table 2", "The same on SQuAD and SWAG", "sparsebert_table2", _tasks_without_diagonal, 1,
    ),
    Claim(
        "[S] Table 4", "Manual masks are as good without their diagonal", "sparsebert_table3",
        _manual_without_diagonal, folders=("float32",),
    ),
    Claim(
        "[S] Figure 3", "Pruning by P is better than pruning at random", "sparsebert_figure7",
        lambda cells: _stages(cells, "two_stage", "random"), folders=("", "float32"),
    ),
    Claim(
        "[S] Table 3, Figure 4",
        "Learned masks (by searches with a target) are better than the paper's manual ones that are as sparse",
        "sparsebert_table3", _learned_above_manual, folders=("", "float32"),
    ),
    Claim(
        "[S] Table 3, Figure 4", "They are better than windows, which the paper does not have",
        "sparsebert_table3", _learned_above_windows, folders=("", "float32"),
    ),
    Claim(
        "[S] Figure 7",
        "Learning a mask in one stage (by a search with a target) is better than pruning in two",
        "sparsebert_figure7",
        lambda cells: _stages(cells, "one_stage", "two_stage"), folders=("", "float32"),
    ),
    Claim(
        "[O] Table 1", "With four layers, strided and fixed patterns copy better than star and random ones",
        "copying", _copying, 1,
    ),
    Claim(
        "[O] Figure 1a", "Language modeling: random patterns are the worst", "language_modelling",
        lambda cells: _as_sparse(cells, "perplexity", [("random", name) for name in (*_PATTERNS, "star")]), 1,
    ),
    Claim(
        "[O] Figure 1a", "Language modeling: strided and star are better than fixed", "language_modelling",
        _strided_and_star, 1,
    ),
    Claim(
        "[O] Figure 1a", "Language modeling: union is the best head configuration", "language_modelling", _union, 1,
    ),
    Claim(
        "[O] Figure 1b", "Translation: strided and fixed patterns in union are as good as dense attention",
        "translation", _union_as_dense, 1,
    ),
    Claim(
        "[O] Figure 1b", "Translation: random and star are worse than these", "translation",
        lambda cells: _as_sparse(
            cells, "bleu", [(one, other) for one in ("strided_union", "fixed_union") for other in ("random", "star")]
        ), 1,
    ),
    Claim(
        "[U] Table 1", "Attention is better than convolutions and projections, and these than an average", "mixers",
        lambda cells: _mixers(
            cells, [("attention", "sepconv"), ("attention", "bproj"), ("sepconv", "average"), ("bproj", "average")]
        ), 1,
    ),
    Claim(
        "[U] Figure 1", "Convolutions in the first one or two layers are better than attention alone, in more worse",
        "mixers",
        lambda cells: _mixers(
            cells, [("hybrid_1", "attention"), ("hybrid_2", "attention"), ("attention", "hybrid_3")]
        ), 1,
    ),
    Claim(
        "[U] Figure 1",
        "In 1 or 2 first layers of a trained model, new convolutions are better than new attention; in more, worse",
        "minilm_mixers", _convolutions,
    ),
)  # fmt: skip


def _comparisons(claim: Claim, folder: Path, paths: list[Path]) -> list[Comparison]:
    """The comparisons of several files: each seed within one file, the first that has both sides."""
    merged: dict[str, Comparison] = {}
    for path in paths:
        for found in claim.compare(json.loads((folder / path).read_text(encoding="utf-8"))["cells"]):
            comparison = merged.setdefault(found.label, Comparison(found.label, {}, {}))
            for seed in found.seeds():
                if seed not in comparison.greater:
                    comparison.greater[seed], comparison.smaller[seed] = found.greater[seed], found.smaller[seed]
    return list(merged.values())


def table(folder: Path = REPRODUCED) -> Table:
    """All claims, a row each."""
    rows = []
    for claim in CLAIMS:
        paths = [path for path in claim.paths if (folder / path).is_file()]
        row = {"paper": claim.source, "claim": claim.text, "status": "open"}
        row |= {"found": "not run", "seeds": "", "from": f"`sparsebert reproduce {claim.experiment}`"}
        if paths:
            comparisons = _comparisons(claim, folder, paths)
            seeds = [len(comparison.seeds()) for comparison in comparisons if comparison.seeds()]
            row |= {"status": status(comparisons), "found": weakest(comparisons, claim.digits)}
            fewest, most = min(seeds, default=0), max(seeds, default=0)
            row |= {"seeds": str(fewest) if fewest == most else f"{fewest} to {most}"}
            row |= {"from": ", ".join(f"`{path}`" for path in paths)}
        rows.append(row)
    return Table.of("Claims of the papers", rows)


if __name__ == "__main__":
    print(table().markdown(), end="")
