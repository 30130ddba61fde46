"""
Masks at given sparsities from the P that a search found, and their random controls.

In every head the entries with the lowest P are removed, the same number in each, or with one budget for all heads
(`sparsity_scope`) in the shares that the search found; random controls remove as many learned entries at random.

Letters: L layers (1 when shared), H heads, n length, K parameters of the mask per head, P the probability that a
position is kept.
"""

from collections.abc import Iterable

import torch
from tqdm.auto import tqdm

from ...analysis.saved_runs import MASK_ONLY, Run
from ...learning.budget import head_budgets
from ...learning.decided_entries import TiedEntries
from ...learning.searches import to_sparse_mask
from ...learning.selection import keep_shares, prune
from ...masks.expansion import fixed_entries, parameter_index, table_policy
from ...masks.sparse_mask import SparseMask


def prune_by_probs(run: Run, sparsity: float) -> SparseMask:
    """
    The mask that keeps the entries with the highest P in each head. Entries that share a parameter are kept or removed
    together. After a search with one budget for all heads, the mask of the run says what share each head gets.
    """
    mask, length = run.mask, run.mask.length
    if run.quantity == MASK_ONLY:
        raise ValueError(
            f"{run.source}: holds a mask without P: give the folder of a search, or a checkpoint that is searching"
        )
    fixed = fixed_entries(length, mask.special_tokens, mask.diagonal, mask.special_rows)
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
    # The bias of the rest is that of the run: one of its own would have to be calibrated with the model.
    same = ("special_tokens", "special_rows", "last_token", "diagonal", "length_policy", "rest", "rest_bias")
    fields = (*same, "query_block_size")
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
    symmetric, odds = mask.symmetric if mask.form != "table" else bool(run.setup.get("symmetric")), run.log_odds
    of_parameters = odds is not None and odds.ndim == 3
    if of_parameters and mask.form == "table":
        symmetric = odds.shape[-1] != length**2
    signed = mask.form != "table" and not symmetric
    size = 2 * -(-length // (mask.block_size or 1)) - 1 if signed else None
    rows = mask.query_block_size
    index = parameter_index(mask.form, length, length, symmetric, mask.block_size, size=size, query_block_size=rows)
    scores = torch.full((mask.num_layers, mask.num_heads, size or int(index.max()) + 1), -torch.inf)
    if of_parameters:
        start = (size - odds.shape[-1]) // 2 if signed else 0
        scores[..., start : start + odds.shape[-1]] = odds
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
    """
    learned = fixed_entries(mask.length, mask.special_tokens, mask.diagonal, mask.special_rows) == -1
    places = learned.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    keep = mask.to_table() & learned
    for head in keep.view(-1, mask.length**2):
        count = int(head.count_nonzero())
        head.zero_()
        head[places[torch.randperm(len(places), generator=generator)[:count]]] = True
    return mask.replace(
        keep=keep,
        form="table",
        block_size=None,
        query_block_size=None,
        symmetric=True,
        length_policy=table_policy(mask.length_policy),
        metadata=mask.metadata | {"pattern": "random", "pattern_seed": seed, "search": None},
    )


def make_masks(run: Run, sparsities: Iterable[float], seeds: Iterable[int] = ()) -> dict[str, SparseMask]:
    """The masks of all sparsities with their random controls."""
    masks = {}
    for sparsity in tqdm(sparsities, "Making masks", disable=None):
        if f"p_{sparsity:g}" in masks:
            raise ValueError(f"sparsities: more than one is p_{sparsity:g}, the name of its folder")
        masks[f"p_{sparsity:g}"] = mask = prune_by_probs(run, sparsity)
        masks |= {f"random_{sparsity:g}_seed{seed}": random_control(mask, seed) for seed in seeds}
    return masks
