"""
Two-stage pruning: from the P that a search found, one mask per sparsity, and fine-tuning through each of them.

In every head the entries with the lowest P are removed, the same number in each, or with one budget for all heads
(`sparsity_scope`) in the shares that the search found; random controls remove as many learned entries at random.

Letters: L layers (1 when shared), H heads, n length, K parameters of the mask per head, P the probability that a
position is kept.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..analysis.charts import plot_scores
from ..analysis.runs import MASK_ONLY, Run, read_run
from ..analysis.statistics import summarize
from ..analysis.tables import Table
from ..checks import check_range
from ..files import LOCK_NAMES, check_output_dir, write_metrics
from ..hub import HubArguments
from ..masks.expansion import fill_fixed_entries, parameter_index
from ..masks.mask_files import MASK_CONFIG_NAME, MaskFileError
from ..masks.sparse_mask import SparseMask
from ..search.budget import head_budgets
from ..search.decided_entries import TiedEntries
from ..search.searches import keep_shares, prune, to_sparse_mask
from .finetuning import SECTIONS, check_arguments, finetune
from .finetuning_arguments import FinetuningArguments
from .recipes import load_recipe


TABLE_NAME = "pruning.json"
# Names of the folders of masks.
_MASK_FOLDER = re.compile(r"p_[\de.+-]+|random_[\de.+-]+_seed\d+")
# Kinds of masks, by the beginning of the names of their folders.
KINDS = {"p": "lowest P removed", "random": "random control"}
# Fields of the fine-tuning recipe that pruning sets, or that mean several tasks.
_OURS = ("mask", "pruning", "all")


@dataclass
class PruningArguments(HubArguments):
    """
    Section `pruning`: which masks to make of a search; `revision` and `subfolder` are those of `run`.

    Args:
        run (`str`): Output folder of `pretrain` or `search` with its P, or a checkpoint that is being searched.
        sparsities (`list`): Fractions of the attention to remove, one mask each.
        random_controls (`int`): Number of random controls per sparsity.
        output_dir (`str`): Output folder. A repeated command resumes there.
        finetune (`str`, *optional*): Recipe of a fine-tuning through each mask, and through none.
        allow_empty_rows (`bool`): Accept masks in which a query keeps no key.
        overwrite (`bool`): Accept an output folder with other contents, and repeat finished fine-tuning runs.
    """

    run: str | None = None
    sparsities: list[float] = field(default_factory=lambda: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    random_controls: int = 0
    output_dir: str | None = None
    finetune: str | None = None
    allow_empty_rows: bool = False
    overwrite: bool = False


def prune_run(options: PruningArguments, finetuning_recipe: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """
    Make the masks of a run at several sparsities, and optionally fine-tune a model through each of them.

    Writes to `output_dir` a folder per mask and `pruning.json`; with fine-tuning also the runs, `scores.json` and, if
    matplotlib is installed, a picture. What is finished is not repeated.

    Args:
        options ([`PruningArguments`]): Run, sparsities and output folder.
        finetuning_recipe (`dict[str, dict]`, *optional*): Sections `data`, `model` and `training` of the fine-tuning;
            by default the recipe that `options.finetune` names, if any.

    Returns:
        `dict`: `"masks"`, see [`describe`], and `"scores"`, see [`finetune_masks`] (`None` without fine-tuning).
        [`pruning_table`] makes a table of them.
    Raises:
        ValueError, OSError: If something is wrong with the options, the run or the recipe.
    """
    for name in ("run", "output_dir"):
        if getattr(options, name) is None:
            raise ValueError(f"--{name} is needed")
    check_range("random_controls", options.random_controls, 0)
    if not options.sparsities:
        raise ValueError("sparsities must name at least one fraction to remove, got []")
    if finetuning_recipe is None and options.finetune is not None:
        finetuning_recipe = load_recipe([options.finetune], SECTIONS)
    run = read_run(str(options.run), **options.hub_arguments(options.run))
    masks = make_masks(run, sorted(set(options.sparsities)), range(options.random_controls))
    if not options.allow_empty_rows:
        _check_rows(masks)
    if finetuning_recipe is not None:
        if given := [name for name in _OURS if finetuning_recipe["data"].get(name)]:
            raise ValueError(f"{given[0]} has no meaning here: one task is fine-tuned through each of the masks")
        check_arguments(
            FinetuningArguments(**finetuning_recipe["data"] | {"mask": "dense"}), finetuning_recipe["model"]
        )
    output = Path(str(options.output_dir))
    write_masks(masks, output, options.overwrite)
    result: dict[str, Any] = {"masks": describe(masks), "scores": None}
    if finetuning_recipe is not None:
        scores = finetune_masks(masks, finetuning_recipe, output, options.allow_empty_rows, options.overwrite)
        result["scores"] = write_metrics(output / "scores.json", scores)
        if find_spec("matplotlib"):
            title = f"Pruning by P: {scores['task']}"
            points = curves(masks, scores["masks"])
            plot_scores(points, output / "scores", scores["metric"], title, scores["dense"]["score"])
    return result


def pruning_table(result: dict[str, Any]) -> Table:
    """
    A row per mask: what was asked for, what is removed, and the score.

    Args:
        result (`dict`): Result of [`prune_run`].

    Returns:
        [`~sparsebert.analysis.tables.Table`]
    """
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


def fixed_entries(mask: SparseMask) -> torch.Tensor:
    """Which entries a search did not learn: int8 `(n, n)`, 1 always kept, 0 always removed, -1 learned."""
    fixed = torch.full((mask.length, mask.length), -1, dtype=torch.int8)
    return fill_fixed_entries(fixed, mask.special_tokens, mask.diagonal)


def prune_by_probs(run: Run, sparsity: float) -> SparseMask:
    """
    The mask that keeps the entries with the highest P in each head. Entries that share a parameter are kept or
    removed together. After a search with one budget for all heads, the mask of the run says what share each head gets.

    Args:
        run ([`~sparsebert.analysis.runs.Run`]): A run with its P.
        sparsity (`float`): Fraction of entries to remove, per head or of all together; the mask comes as close as its
            form allows.

    Returns:
        [`SparseMask`]: A mask of the form that was searched.
    Raises:
        ValueError: If the run has no P, the sparsity is out of reach, or the run itself was pruned further.
    """
    mask, length = run.mask, run.mask.length
    if run.quantity == MASK_ONLY:
        raise ValueError(
            f"{run.source}: holds a mask without P: give the folder of a search, or a checkpoint that is searching"
        )
    fixed = fixed_entries(mask)
    most = 1 - (fixed == 1).float().mean().item()
    if not 0 < sparsity < 1 or sparsity > most:
        bound = "" if most == 1 else f" and, since special tokens and a kept diagonal stay, at most {most:.4f}"
        raise ValueError(f"sparsities must be in (0, 1){bound}, got {sparsity}")
    scores, index, symmetric = _scores(run, fixed)
    entries = TiedEntries(index[fixed == -1].bincount(minlength=scores.shape[-1]))
    if run.setup.get("sparsity_scope") == "global":
        kept = keep_shares(scores, entries, _shares(mask, fixed, sparsity))
    else:
        kept = prune(torch.ones_like(scores, dtype=torch.bool), scores, index, fixed, sparsity, empty_rows=True)
    if (kept & (entries.counts > 0) & (scores == -torch.inf)).any():
        raise ValueError(
            f"{run.source}: sparsities must be at least that of the run, {mask.sparsity:.4f}, got {sparsity}: the run "
            "was pruned, or its P is 0, which does not rank what was removed"
        )
    fields = ("special_tokens", "last_token", "diagonal", "length_policy")
    metadata = mask.metadata | {"pruned_from": run.source, "asked_sparsity": sparsity}
    return to_sparse_mask(
        kept,
        mask.form,
        length,
        symmetric,
        mask.block_size,
        metadata=metadata,
        **{name: getattr(mask, name) for name in fields},
    )


def _scores(run, fixed):
    """
    What ranks the parameters of a run `(L, H, K)`, -inf where nothing is known; the parameter of each entry; and
    whether pairs of entries share one.
    """
    mask, length = run.mask, run.mask.length
    symmetric, odds = bool(run.setup.get("symmetric")), run.log_odds
    of_parameters = odds is not None and odds.ndim == 3
    if of_parameters and mask.form == "table":
        symmetric = odds.shape[-1] != length**2
    index = parameter_index(mask.form, length, length, symmetric, mask.block_size)
    scores = torch.full((mask.num_layers, mask.num_heads, int(index.max()) + 1), -torch.inf)
    if of_parameters:
        scores[..., : odds.shape[-1]] = odds
    else:
        of_entries = run.probs.masked_fill(run.probs == 0, -torch.inf) if odds is None else odds
        scores[..., index[fixed == -1]] = of_entries[..., fixed == -1]  # equal where entries share a parameter
    return scores, index, symmetric


def _shares(mask, fixed, sparsity):
    """Learned entries that each head keeps at a sparsity, in the proportions of a mask: `(L, H, 1)`."""
    learned = fixed == -1
    counts = (mask.to_table() & learned).count_nonzero((-2, -1))[..., None].float()
    budget = (1 - sparsity) * fixed.numel() - int((fixed == 1).sum())
    return head_budgets(counts.clamp(min=1).log(), budget, 0, int(learned.sum()), "global")


def random_control(mask: SparseMask, seed: int) -> SparseMask:
    """
    A mask that keeps, in each head, as many learned entries as another one, drawn at random. Special tokens and a
    fixed diagonal stay as they are.

    Args:
        mask ([`SparseMask`]): A mask from [`prune_by_probs`].
        seed (`int`): Random seed.

    Returns:
        [`SparseMask`]: A mask of the form `"table"`.
    """
    learned = fixed_entries(mask) == -1
    places = learned.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    keep = mask.to_table() & learned
    for head in keep.view(-1, mask.length**2):
        count = int(head.count_nonzero())
        head.zero_()
        head[places[torch.randperm(len(places), generator=generator)[:count]]] = True
    policy = "error" if mask.length_policy == "extend" else mask.length_policy
    return mask.replace(
        keep=keep,
        form="table",
        block_size=None,
        length_policy=policy,
        metadata=mask.metadata | {"pattern": "random", "pattern_seed": seed, "search": None},
    )


def make_masks(run: Run, sparsities: Iterable[float], seeds: Iterable[int] = ()) -> dict[str, SparseMask]:
    """
    The masks of all sparsities with their random controls.

    Args:
        run ([`~sparsebert.analysis.runs.Run`]): A run with its P.
        sparsities (`Iterable[float]`): Fractions of entries to remove.
        seeds (`Iterable[int]`, *optional*): Seeds of the random controls.

    Returns:
        `dict[str, SparseMask]`: By name of the folder, such as `"p_0.9"` and `"random_0.9_seed0"`.
    """
    masks = {}
    for sparsity in tqdm(sparsities, "Making masks", disable=None):
        masks[f"p_{sparsity:g}"] = mask = prune_by_probs(run, sparsity)
        masks |= {f"random_{sparsity:g}_seed{seed}": random_control(mask, seed) for seed in seeds}
    return masks


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
    """Refuse masks in which a query keeps no key, with all of them in one message."""
    empty = {name: mask.num_empty_rows() for name, mask in masks.items()}
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

    Raises:
        FileExistsError: If `output` holds other masks or anything else, unless `overwrite`.
        MaskFileError: If a mask was damaged after all were written, unless `overwrite`.
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
    for name, mask in masks.items():
        mask.save_pretrained(output / name)
    write_metrics(output / TABLE_NAME, table)
    for name in (listed or set()) - masks.keys():
        if _MASK_FOLDER.fullmatch(name):  # a table may be a stranger's
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
    """
    Fine-tune through each mask and densely. Finished runs are not repeated, and interrupted ones are continued.

    Args:
        masks (`Mapping[str, SparseMask]`): Masks that [`write_masks`] wrote to `output`.
        recipe (`dict[str, dict]`): Sections `data`, `model` and `training` of the fine-tuning.
        output (`Path`): Output folder; the runs are in `finetuned/NAME`.
        allow_empty_rows (`bool`, *optional*, defaults to `False`): Accept masks with rows that keep nothing.
        overwrite (`bool`, *optional*, defaults to `False`): Repeat finished runs.

    Returns:
        `dict`: `"metric"`, `"task"`, `"dense"` with `"score"` and `"score_std"`, and `"masks"` with both by name.
    """
    scores = {}
    for name in tqdm(("dense", *masks), "Fine-tuning", disable=None):
        place = output / "finetuned" / name
        changes: dict[str, dict[str, Any]] = {
            "data": {"mask": "dense" if name == "dense" else str(output / name), "overwrite": overwrite},
            "model": {},
            "training": {"output_dir": str(place)},
        }
        changes["data"]["resume"] = not overwrite and place.is_dir()
        if allow_empty_rows and name != "dense":
            changes["model"]["allow_empty_rows"] = True
        folder = finetune({section: recipe[section] | values for section, values in changes.items()})
        metrics = json.loads((folder / "metrics.json").read_text())
        scores[name] = {"score": metrics["score"], "score_std": metrics.get("score_std")}
    return {"metric": metrics["main_metric"], "task": metrics["task"], "dense": scores.pop("dense"), "masks": scores}


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
