"""
Two-stage pruning: `python -m sparsebert.prune RUN --sparsities 0.5 0.9 --output_dir DIR [--random] [--finetune ...]`.

From the P that a search has found, one mask per sparsity: in every head the entries of lowest P are removed. With
`--random`, controls in which as many of the learned entries are removed at random. With `--finetune RECIPE [--field
value ...]` (last), what `finetune.py` takes, a model is fine-tuned through each of them. Writes a folder per mask,
`pruning.json`, and with `--finetune` the runs, `scores.json` and a picture. The same command goes on where it was.

Letters: L layers (1 when shared), H heads, n length, K parameters of the mask per head, P the probability that a
position is kept.
"""

import json

import torch

from ..analysis.runs import MASK_ONLY
from ..analysis.statistics import summarize
from ..files import check_output_dir, write_metrics
from ..masks.expansion import parameter_index
from ..masks.sparse_mask import MASK_CONFIG_NAME, SparseMask, special_entries
from ..search.searches import prune, to_sparse_mask
from .repetitions import run as run_experiment


TABLE_NAME = "pruning.json"


KINDS = {"p": "lowest P removed", "random": "random control"}


def fixed_entries(mask):
    """int8 `(n, n)`: 1 on, 0 off, -1 learned, for a [`SparseMask`] that a search has found."""
    fixed = torch.full((mask.length, mask.length), -1, dtype=torch.int8)
    fixed[special_entries(mask.length, mask.special_tokens)] = 1
    if mask.diagonal is not None:
        fixed.fill_diagonal_(int(mask.diagonal))
    return fixed


def prune_by_probs(run, sparsity):
    """
    The mask that keeps the highest P of each head; entries that share a parameter go together.

    Args:
        run ([`~sparsebert.analysis.runs.Run`]): With P.
        sparsity (`float`): Fraction of entries to remove per head, met as nearly as the form allows.

    Returns:
        [`SparseMask`], of the form that was searched.
    Raises:
        ValueError: If the run holds no P, the sparsity is out of reach, or the run was pruned further.
    """
    mask, length = run.mask, run.mask.length
    if run.quantity == MASK_ONLY:
        raise ValueError(f"{run.source}: holds a mask without P: give a run of pretrain.py or a searching checkpoint")
    fixed = fixed_entries(mask)
    most = 1 - (fixed == 1).float().mean().item()
    if not 0 < sparsity < 1 or sparsity > most:
        bound = "" if most == 1 else f" and, as special tokens and a kept diagonal stay on, at most {most:.4f}"
        raise ValueError(f"sparsities must be in (0, 1){bound}, got {sparsity}")
    symmetric = bool(run.setup.get("symmetric"))
    index = parameter_index(mask.form, length, length, symmetric, mask.block_size)
    probs = run.probs.new_zeros(*run.probs.shape[:2], int(index.max()) + 1)
    probs[..., index[fixed == -1]] = run.probs[..., fixed == -1]  # equal where entries share a parameter
    kept = prune(torch.ones_like(probs, dtype=torch.bool), probs, index, fixed, sparsity, empty_rows=True)
    counted = torch.zeros(probs.shape[-1], dtype=torch.bool).index_fill_(0, index[fixed == -1], True)
    if (kept & counted & (probs == 0)).any():
        raise ValueError(
            f"{run.source}: sparsities must be at least that of the run, {mask.sparsity:.4f}, got {sparsity}: the run "
            "was pruned, and P no longer ranks what it removed"
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


def random_control(mask, seed):
    """
    As many learned entries as a mask keeps, in each head, drawn at random; special tokens and a fixed diagonal stay.

    Args:
        mask ([`SparseMask`]): From [`prune_by_probs`].
        seed (`int`): Of the draw.

    Returns:
        [`SparseMask`] of form `"table"`.
    """
    learned = fixed_entries(mask) == -1
    counts = mask.to_table()[..., learned].sum(-1, keepdim=True)  # (L, H, 1)
    drawn = torch.rand(*counts.shape[:2], int(learned.sum()), generator=torch.Generator().manual_seed(seed))
    keep = torch.zeros(*counts.shape[:2], mask.length, mask.length, dtype=torch.bool)
    keep[..., learned] = drawn.argsort(-1).argsort(-1) < counts
    policy = "error" if mask.length_policy == "extend" else mask.length_policy
    return mask.replace(
        keep=keep,
        form="table",
        block_size=None,
        length_policy=policy,
        metadata=mask.metadata | {"pattern": "random", "pattern_seed": seed, "search": None},
    )


def make_masks(run, sparsities, seeds=()):
    """
    Masks by folder name, `p_0.9`, and their controls, `random_0.9_seed0`.

    Args:
        run ([`~sparsebert.analysis.runs.Run`]): With P.
        sparsities (`list[float]`): As [`prune_by_probs`].
        seeds (`list[int]`): Of the controls.

    Returns:
        `dict[str, SparseMask]`
    """
    masks = {}
    for sparsity in sparsities:
        masks[f"p_{sparsity:g}"] = mask = prune_by_probs(run, sparsity)
        masks |= {f"random_{sparsity:g}_seed{seed}": random_control(mask, seed) for seed in seeds}
    return masks


def describe(masks):
    """Per mask what was asked, what is removed, and the rows that keep nothing."""
    return {
        name: {
            "asked": mask.metadata["asked_sparsity"],
            "got": mask.sparsity,
            "empty_rows": mask.num_empty_rows(),
        }
        for name, mask in masks.items()
    }


def _check_rows(masks):
    """Masks in which a query keeps no key, all in one message."""
    empty = {name: mask.num_empty_rows() for name, mask in masks.items()}
    if any(empty.values()):
        first = next(iter(masks.values()))
        rows = first.num_layers * first.num_heads * first.length
        found = ", ".join(f"{count} in {name}" for name, count in empty.items() if count)
        raise ValueError(
            f"of {rows} mask rows some keep nothing: {found}; such queries would output 0: leave these sparsities "
            "out, or pass --allow_empty_rows"
        )


def write_masks(masks, output):
    """
    A folder for each mask and the table `pruning.json`; what the same command wrote before stays.

    Raises:
        FileExistsError: If `output` holds anything else.
    """
    table = {"masks": describe(masks)}
    goes_on = all(
        (output / name / MASK_CONFIG_NAME).is_file() and SparseMask.from_pretrained(output / name) == mask
        for name, mask in masks.items()
    )
    listed = (output / TABLE_NAME).is_file() and json.loads((output / TABLE_NAME).read_text())["masks"].keys()
    if goes_on and listed == masks.keys():
        return
    check_output_dir(output)
    for name, mask in masks.items():
        mask.save_pretrained(output / name)
    write_metrics(output / TABLE_NAME, table)


def finetune_masks(masks, recipe, output, allow_empty_rows=False):
    """
    Fine-tune through each mask, and dense; what is finished is not run again.

    Args:
        masks (`dict[str, SparseMask]`): Written to `output` by [`write_masks`].
        recipe (`dict`): Sections `data`, `model` and `training` of `finetune.py`.
        output (`Path`): Runs go to `finetuned/NAME` in it.
        allow_empty_rows (`bool`): Whether masks have rows that keep nothing.

    Returns:
        `dict`: `"metric"`, `"dense"` (score), and by name of the mask `"score"` and `"score_std"`.
    """
    scores = {}
    for name in ("dense", *masks):
        changes = {"data": {"mask": "dense" if name == "dense" else str(output / name)}, "model": {}}
        changes["training"] = {"output_dir": str(output / "finetuned" / name)}
        if allow_empty_rows and name != "dense":
            changes["model"]["allow_empty_rows"] = True
        folder = run_experiment({section: recipe[section] | values for section, values in changes.items()})
        metrics = json.loads((folder / "metrics.json").read_text())
        scores[name] = {"score": metrics["score"], "score_std": metrics.get("score_std")}
    return {"metric": metrics["main_metric"], "task": metrics["task"], "dense": scores.pop("dense"), "masks": scores}


def curves(masks, scores):
    """Sparsities, scores and their sample deviations by kind of mask; those of a control are over its draws."""
    result = {}
    for kind, title in KINDS.items():
        rows = {}
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
        result[title] = tuple(map(list, zip(*points, strict=True)))
    return result
