"""Two-stage pruning: from the P that a search found, one mask per sparsity, and fine-tuning through each of them."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import validated_field
from tqdm.auto import tqdm

from ...analysis.pictures.charts import plot_scores
from ...analysis.saved_runs import read_run
from ...analysis.statistics import summarize
from ...analysis.tables import Table
from ...checks import CheckedFields, check_allowed, number
from ...file_kinds import check_own
from ...files import LOCK_NAMES, METRICS_NAME, check_output_dir, write_metrics
from ...hub import HubArguments
from ...masks.mask_files import MASK_CONFIG_NAME, MaskFileError
from ...masks.sparse_mask import SparseMask
from ...recipe_files import load_recipe
from ..finetuning.finetuning_runs import SECTIONS, check_finetuning, finetune
from .pruned_masks import make_masks


TABLE_NAME, SCORES_NAME = "pruning.json", "scores"
# The folder of the fine-tuning runs.
RUNS_NAME = "finetuned"
# Names of the folders of masks.
_MASK_FOLDER = re.compile(r"p_[\de.+-]+|random_[\de.+-]+_seed\d+")
# Kinds of masks, by the beginning of the names of their folders.
KINDS = {"p": "lowest P removed", "random": "random control"}
# Fields of the fine-tuning recipe that pruning sets, or that mean several tasks.
_OURS = ("mask", "pruning", "all")


def _not_empty(sparsities: list[float]) -> None:
    if not sparsities:
        raise ValueError("must name at least one fraction to remove, got []")


@dataclass
class PruningArguments(CheckedFields, HubArguments):
    """
    Section `pruning`: which masks to make of a search; `revision` and `subfolder` are those of `run`.

    Args:
        run (`str`): Output folder of `pretrain` or `search` with its P, or a checkpoint that is being searched.
        output_dir (`str`): Output folder. A repeated command resumes there.
        sparsities (`list`): Fractions of the attention to remove, one mask each.
        random_controls (`int`): Number of random controls per sparsity.
        finetune (`str`, *optional*): Recipe of a fine-tuning through each mask, and through none.
        allow_empty_rows (`bool`): Accept masks in which a query keeps no key.
        overwrite (`bool`): Accept an output folder with other contents, and repeat finished fine-tuning runs.
    """

    run: str
    output_dir: str
    sparsities: list[float] = validated_field(
        _not_empty, default_factory=lambda: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    )
    random_controls: int = validated_field(number(0), default=0)
    finetune: str | None = None
    allow_empty_rows: bool = False
    overwrite: bool = False


def prune_run(options: PruningArguments, finetuning_recipe: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """
    Make the masks of a run at several sparsities, and optionally fine-tune a model through each of them.

    Writes to `output_dir` a folder per mask and `pruning.json`; with fine-tuning also the runs, `scores.json` and, if
    matplotlib is installed, a picture. What is finished is not repeated.
    """
    if finetuning_recipe is None and options.finetune is not None:
        finetuning_recipe = load_recipe(options.finetune, SECTIONS)
    run = read_run(str(options.run), **options.hub_arguments(options.run))
    masks = make_masks(run, sorted(set(options.sparsities)), range(options.random_controls))
    if not options.allow_empty_rows:
        _check_rows(masks)
    output = Path(str(options.output_dir))
    if finetuning_recipe is not None:
        given = {name: value for name, value in finetuning_recipe["data"].items() if name in _OURS and value}
        check_allowed("data", given, (), "here: one task is fine-tuned through each of the masks")
        check_finetuning(_through(None, finetuning_recipe, output))
    write_masks(masks, output, options.overwrite)
    result: dict[str, Any] = {"masks": describe(masks), "scores": None}
    if finetuning_recipe is not None:
        scores = finetune_masks(masks, finetuning_recipe, output, options.allow_empty_rows, options.overwrite)
        result["scores"] = write_metrics(output / f"{SCORES_NAME}.json", scores)
        if find_spec("matplotlib"):
            title = f"Pruning by P: {scores['task']}"
            points = curves(masks, scores["masks"])
            plot_scores(points, output / SCORES_NAME, scores["metric"], title, scores["dense"]["score"])
    return result


def pruning_table(result: dict[str, Any]) -> Table:
    """A row per mask: what was asked for, what is removed, and the score."""
    rows = []
    for name, mask in result["masks"].items():
        row = {"mask": name, "asked": f"{mask['asked']:.3f}", "removed": f"{mask['got']:.4f}"}
        rows.append(row | {"empty rows": str(mask["empty_rows"])})
    title, scores = "Masks", result["scores"]
    if scores is not None:
        title = f"Fine-tuning through the masks: {scores['task']}"
        rows.append({"mask": "dense", "removed": "0.0000", "empty rows": "0"})
        for row, score in zip(rows, (*scores["masks"].values(), scores["dense"]), strict=True):
            deviation = "" if score["score_std"] is None else f" \u00b1 {score['score_std']:.4f}"
            row[scores["metric"]] = f"{score['score']:.4f}{deviation}"
    return Table.of(title, rows)


def describe(masks: Mapping[str, SparseMask]) -> dict[str, dict[str, float]]:
    """For each mask the sparsity that was asked for and the one it has, and the number of rows that keep nothing."""
    return {
        name: {
            "asked": mask.metadata["asked_sparsity"],
            "got": mask.sparsity,
            "empty_rows": mask.num_empty_rows(),
        }
        for name, mask in masks.items()
    }


def _check_rows(masks: Mapping[str, SparseMask]) -> None:
    """Refuse masks in which a query keeps no key and no rest, with all of them in one message."""
    empty = {name: mask.num_empty_rows() for name, mask in masks.items() if mask.rest == "none"}
    if any(empty.values()):
        first = next(iter(masks.values()))
        rows = first.num_layers * first.num_heads * first.length
        found = ", ".join(f"{count} in {name}" for name, count in empty.items() if count)
        raise ValueError(
            f"some of {rows} mask rows keep nothing: {found}; such queries would output 0: leave these sparsities "
            "out, or pass --allow_empty_rows"
        )


def write_masks(masks: Mapping[str, SparseMask], output: Path, overwrite: bool = False) -> None:
    """
    Write a folder for each mask, and `pruning.json`, as far as they are not there. Masks of an older table that is
    replaced are removed.
    """
    table = {"masks": describe(masks)}
    listed = _listed(output / TABLE_NAME, overwrite)
    saved = {}
    for name in masks:
        if (output / name / MASK_CONFIG_NAME).is_file():
            try:
                saved[name] = SparseMask.from_pretrained(output / name)
            except MaskFileError:
                if listed is not None and not overwrite:
                    raise
                # Else it is half written, or to be replaced.
    same = all(mask == masks[name] for name, mask in saved.items())
    if same and saved.keys() == masks.keys() == listed:
        return
    # What else is in a folder without a table is of another command.
    begun = listed is None and same and {path.name for path in output.glob("*")} <= {*masks, *LOCK_NAMES}
    if not begun:
        check_output_dir(output, overwrite)
    for name in (RUNS_NAME, *masks, *(listed or ())):
        check_own(output / name, "folder")
    if listed is not None:  # scores of masks that will not be there
        for suffix in (".json", ".png", ".svg"):
            (output / SCORES_NAME).with_suffix(suffix).unlink(missing_ok=True)
        for name in listed:
            if _MASK_FOLDER.fullmatch(name):  # a table may be a stranger's
                shutil.rmtree(output / RUNS_NAME / name, ignore_errors=True)
    for name, mask in masks.items():
        mask.save_pretrained(output / name)
    write_metrics(output / TABLE_NAME, table)
    for name in (listed or set()) - masks.keys():
        if _MASK_FOLDER.fullmatch(name):
            shutil.rmtree(output / name, ignore_errors=True)


def _listed(path, overwrite):
    """Names of the masks in a table that was written before; `None` if there is none, or it is to be replaced."""
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["masks"]).keys()
    except (ValueError, KeyError, TypeError) as error:
        if overwrite:
            return None
        raise ValueError(
            f"{path} is damaged or of something else: choose another output_dir, or pass --overwrite"
        ) from error


def finetune_masks(
    masks: Mapping[str, SparseMask],
    recipe: dict[str, dict[str, Any]],
    output: Path,
    allow_empty_rows: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Fine-tune through each mask and densely. Finished runs are not repeated, and interrupted ones are continued."""
    scores = {}
    for name in tqdm(("dense", *masks), "Fine-tuning", disable=None):
        place = output / RUNS_NAME / name
        changed = _through(None if name == "dense" else name, recipe, output)
        changed["data"] |= {"overwrite": overwrite, "resume": not overwrite and place.is_dir()}
        if allow_empty_rows and name != "dense":
            changed["model"]["allow_empty_rows"] = True
        folder = finetune(changed)
        metrics = json.loads((folder / METRICS_NAME).read_text())
        scores[name] = {"score": metrics["score"], "score_std": metrics.get("score_std")}
    return {"metric": metrics["main_metric"], "task": metrics["task"], "dense": scores.pop("dense"), "masks": scores}


def _through(name, recipe, output):
    """The recipe of the fine-tuning through a mask in `output`, or a dense one without a name."""
    changes = {
        "data": {"mask": "dense" if name is None else str(output / name)},
        "model": {},
        "training": {"output_dir": str(output / RUNS_NAME / (name or "dense"))},
    }
    return {section: recipe[section] | values for section, values in changes.items()}


def curves(
    masks: Mapping[str, SparseMask], scores: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[list, list, list]]:
    """
    Sparsities, scores and their sample deviations, by kind of mask. The deviation is over the seeds of the runs, or
    over the draws if there are several random controls per sparsity.
    """
    result = {}
    for kind, title in KINDS.items():
        rows: dict[float, list] = {}
        for name, mask in masks.items():
            if name.startswith(f"{kind}_"):
                rows.setdefault(mask.metadata["asked_sparsity"], []).append((mask.sparsity, scores[name]))
        if not rows:
            continue
        points = []
        for draws in rows.values():
            summary = summarize([score["score"] for _, score in draws])
            deviation = summary.get("std") if len(draws) > 1 else draws[0][1]["score_std"]
            points.append((draws[0][0], summary["mean"], deviation))
        sparsities, means, deviations = map(list, zip(*points, strict=True))
        result[title] = (sparsities, means, deviations)
    return result
