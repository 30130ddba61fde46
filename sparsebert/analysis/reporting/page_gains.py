"""What the runs of a web page gained and against what, in a sentence each."""

from collections.abc import Mapping
from typing import Any

from .page_charts import Score, scores, scores_of
from .reports import RECOVERED, other_masks, own_mask


def gains(runs: Mapping[str, dict[str, Any]]) -> list[str]:
    """A sentence per run, from the metrics of finished runs by their names."""
    found = {what: [score for score in group if score.sparsity == 0] for what, group in scores(runs).items()}
    dense = {what: group[0] for what, group in found.items() if group}
    return [
        _of_search(run, metrics) if "agreement" in metrics else _of_training(run, metrics, dense)
        for run, metrics in runs.items()
    ]


def _of_search(run, metrics):
    own = own_mask(metrics.get("mask"))
    agreement, recovered = metrics["agreement"], metrics["agreement"].get(RECOVERED.format(own))
    numbers = recovered or agreement[own]
    text = (
        f"{run}: {100 * metrics['sparsity'][own]:.1f} % of the attention removed, cosine {numbers['cosine']:.3f} with "
        "the dense model's mean hidden states"
    )
    if recovered:
        text += f", {agreement[own]['cosine']:.3f} before the recovery"
    if others := other_masks(metrics):
        best = max(others, key=lambda name: others[name]["cosine"])
        which = f"the best of {len(others)} other masks" if len(others) > 1 else "another mask"
        text += f"; against {others[best]['cosine']:.3f} with {which} ({best})"
    if "score" in numbers:
        text += f". {metrics['task']}: {100 * numbers['score']:.1f}"
        text += f", dense {100 * agreement['dense']['score']:.1f}" if "score" in agreement.get("dense", ()) else ""
    times = metrics.get("inference_seconds") or {}
    if times.get("masked"):
        where = f" ({metrics['hardware']})" if "hardware" in metrics else ""
        text += f". A batch is {times['dense'] / times['masked']:.2f} times as fast as dense{where}"
    return f"{text}."


def _of_training(run: str, metrics: dict[str, Any], dense: dict[str, Score]) -> str:
    what, score = next(scores_of(run, metrics), (None, None))
    if what is None or score is None:
        return f"{run}: no score."
    text = f"{run}: {what}: {score.text()} with {100 * score.sparsity:.1f} % of the attention removed"
    compared, split = metrics.get("comparison", {}), next(iter(metrics.get("splits", ())), None)
    if isinstance(compared.get(split), Mapping):
        low, high = (100 * end for end in compared[split]["interval"])
        difference = 100 * compared[split]["difference"]
        return f"{text}, {difference:+.1f} [{low:+.1f}, {high:+.1f}] against {compared['baseline']}."
    if score.sparsity == 0:
        return f"{text}."
    if what in dense:
        return f"{text}; against {dense[what].text()} without a mask ({dense[what].run})."
    return f"{text}. Give the same run without a mask as well, to see what that costs."
