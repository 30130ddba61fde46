"""The mask or the search that a configuration describes."""

from typing import Any

from ..checks import check_choice
from ..learning.mask_search import MaskSearch
from ..learning.searches import SEARCHES
from ..masks.expansion import default_length_policy
from ..masks.patterns import build_pattern
from ..masks.sparse_mask import DIAGONALS, SparseMask
from .bert.configuration_sparsebert import REQUESTS, SparseBertConfig


# Defaults of a search with a target: the temperature at its end, when P is 0 or 1 for nearly all entries; c, if its
# samples are hard; and the decay of its initial odds with the distance.
ANNEALED_TEMPERATURE = 0.1
HARD_CONSTANT = 7.0
LOCAL_DECAY = 3.0


def with_changes(
    mask: SparseMask, length_policy: str | None = None, last_token: str | None = None, diagonal: str | None = None
) -> SparseMask:
    """
    A mask that is used in another way.

    Args:
        mask ([`SparseMask`]): The mask. It does not change.
        length_policy, last_token, diagonal (`str`, *optional*): Fields of [`SparseBertConfig`]. `None` leaves the mask
            as it is.

    Raises:
        ValueError: If a field is out of its range.
    """
    changes: dict[str, Any] = {"length_policy": length_policy, "last_token": last_token}
    changes = {name: value for name, value in changes.items() if value is not None}
    if diagonal is not None:
        check_choice("diagonal", diagonal, tuple(DIAGONALS))
        changes["diagonal"] = DIAGONALS[diagonal]
    return mask.replace(**changes) if changes else mask


def requests(config: SparseBertConfig) -> dict[str, str | None]:
    """The arguments of [`with_changes`] that a configuration asks for."""
    return {name: getattr(config, name) for name in REQUESTS}


def pattern_mask(config: SparseBertConfig) -> SparseMask:
    """The mask of a configuration with a pattern."""
    name, length = config.pattern, config.mask_length
    assert name is not None and length is not None
    mask = build_pattern(
        name,
        length,
        config.num_attention_heads,
        num_layers=max(config.num_attention_layers, 1),
        seed=config.mask_seed,
        head_configuration=config.head_configuration,
        **(config.pattern_kwargs or {}),
    )
    if config.is_decoder and mask.special_tokens == "first_last":
        # A global last token is the one at the end of the mask, whatever has been generated so far.
        mask = mask.replace(
            keep=mask.to_table(),
            form="table",
            block_size=None,
            special_tokens="none",
            length_policy=default_length_policy("table"),
        )
    asked = requests(config)
    if asked["diagonal"] == "learned":
        asked["diagonal"] = None  # as the pattern defines it
    return with_changes(mask, **asked)


def described_search(config: SparseBertConfig) -> MaskSearch:
    """
    The search of a configuration, with all its defaults.

    Raises:
        ValueError: If `target_sparsity` is out of reach.
    """
    name, length = config.search, config.mask_length
    assert name is not None and length is not None
    search = SEARCHES[name]
    # A search with a target is annealed by default. With a penalty it samples, as in the paper.
    targeted = config.target_sparsity is not None
    sampled = search.stochastic and not targeted
    hard = search.stochastic and (sampled if config.hard is None else config.hard)
    # In a decoder the last token changes as it generates.
    special_tokens = "first" if config.is_decoder and search.special_tokens != "none" else search.special_tokens
    decay = config.initial_decay
    if decay is None:
        decay = LOCAL_DECAY if targeted else 0.0
    return MaskSearch(
        name=name,
        num_layers=1 if config.share_layers else config.num_attention_layers,
        num_heads=config.num_attention_heads,
        length=length,
        special_tokens=config.special_tokens or special_tokens,
        last_token=config.last_token or "real",
        diagonal=DIAGONALS[config.diagonal or "learned"],
        length_policy=config.length_policy or default_length_policy(search.frozen_form),
        symmetric=config.symmetric,
        block_size=config.block_size if search.form == "blocks" else None,
        mask_form=config.mask_form or ("log" if targeted else "additive"),
        mask_constant=float(config.mask_constant or (HARD_CONSTANT if targeted and hard else search.mask_constant)),
        logit_scale=config.mask_logit_scale,
        hard=hard,
        noise_scale=float(sampled) if config.noise_scale is None else config.noise_scale,
        share_noise=config.share_noise,
        temperature=config.temperature,
        temperature_end=config.temperature_end
        or (ANNEALED_TEMPERATURE if targeted and not hard else config.temperature),
        initial_decay=decay,
        sparsity_weight=config.sparsity_weight,
        target_sparsity=config.target_sparsity,
        sparsity_scope=config.sparsity_scope,
        initial_sparsity=config.initial_sparsity,
        sparsity_warmup=config.sparsity_warmup,
        sparsity_ramp=config.sparsity_ramp,
        allow_empty_rows=config.allow_empty_rows,
        pruning=config.pruned,
    )
