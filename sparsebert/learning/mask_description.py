"""
The description of a mask and of its search. Every field is declared here, once, with its range and what it is about:
all lists of fields are derived from that.
"""

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, TypeVar

from huggingface_hub.dataclasses import strict
from transformers.utils import logging

from ..attention.biases.bias_entries import MAX_MASK_CONSTANT
from ..attention.probability_maps import PROBABILITY_MAPS, check_probability_map
from ..checks import check_choice, interval, one_of
from ..masks.expansion import LENGTH_POLICIES, SPECIAL_TOKENS, default_length_policy
from ..masks.mask_files import MAX_MASK_LENGTH
from ..masks.mask_tensors import DIAGONALS, LAST_TOKENS, RESTS, check_query_block_size
from ..masks.patterns import HEAD_CONFIGURATIONS, PATTERNS, build_pattern
from ..masks.sparse_mask import SparseMask
from .searches import SEARCHES
from .selection import SCOPES


logger = logging.get_logger(__name__)

Description = TypeVar("Description", bound="MaskFields")

MASK_FORMS = ("additive", "log", "multiplicative")

# What a field is about: the pattern; the search; what a frozen mask holds itself; how a mask is used, where `None`
# leaves it to the pattern, the search or the frozen mask; how it is run; what only a BERT can have; and how far the
# search is, which saving sets.
PATTERN, SEARCH, SHAPE, USE, RUN, MODEL, STATE = "pattern", "search", "shape", "use", "run", "model", "state"


def _field(about: str, default: Any = None, check: Callable[[Any], None] | None = None) -> Any:
    return field(default=default, metadata={"about": about} | ({"validator": check} if check else {}))


@dataclass(kw_only=True, repr=False)
class MaskFields:
    """
    The fields of a [`MaskDescription`] and, as it can be changed, of a [`SparseBertConfig`].

    Args:
        pattern (`str`, *optional*): Name of a fixed mask, a key of `PATTERNS`: `"bigbird"`, `"window"`, `"dense"`, ...
        pattern_kwargs (`dict`, *optional*): Parameters of the pattern, such as `{"window_size": 3}`.
        head_configuration (`str`, *optional*): How a cycle of patterns is laid out: `"sequential"`, `"union"` or
            `"multihead"`.
        mask_seed (`int`, *optional*, defaults to 0): Seed of random patterns.
        search (`str`, *optional*): Name of a search, a key of `SEARCHES`: `"dam_s"` (one logit per offset), `"dam_u"`
            (one per entry), `"dam_b"` (one per tile diagonal), `"vertical_slash"` (one per offset and one per token,
            which decides whether it is global) or `"soft"` (one per entry, not sampled). Defaults to `"dam_s"` without
            a pattern.
        frozen (`bool`, *optional*, defaults to `False`): Whether the mask is a file beside the weights. Set when a
            mask is frozen.
        pruned (`bool`, *optional*, defaults to `False`): Whether the searched mask is being pruned: what has not been
            removed is on, and nothing is sampled. Set by [`ProgressivePruning`].
        allow_empty_rows (`bool`, *optional*, defaults to `False`): Whether to accept a mask in which a query keeps no
            key (its output is 0).
        block_size (`int`, *optional*, defaults to 64): Tile size of `"dam_b"`: 16, 32, 64 or 128.
        query_block_size (`int`, *optional*): Queries of a tile of `"dam_b"`, for tiles of more queries than keys: 32,
            64 or 128, a multiple of `block_size`. They have signed distances: `symmetric` must be `False`.
        mask_form (`str`, *optional*): How the searched mask M enters attention: `"additive"` for
            `softmax(S - c (1 - M))`, `"log"` for `softmax(S + log M)`, `"multiplicative"` for `M softmax(S)`, which is
            not normalized (the frozen mask always is) and meant for study. Defaults to `"additive"`, or to `"log"`
            with a target. Source: SparseBERT (arXiv 2102.12871), Eq. 4-6.
        mask_constant (`float`, *optional*): How much the additive form, and a hard sample in the form `"log"`, lower
            the score of a removed entry: c, in (0, 1e4]. Defaults to 1e4, to 10 for `"soft"`, or to 7 for hard samples
            with a target, which leaves removed entries a thousandth of their attention, and with it a gradient.
        mask_logit_scale (`float`, *optional*, defaults to 10.0): How much faster the logits of the mask move than
            weights of the same learning rate: alpha is the stored logit times this.
        temperature (`float`, *optional*, defaults to 1.0): How soft the mask is at the start of the search: tau of the
            (Gumbel-)sigmoid, in (0, 1e3].
        temperature_end (`float`, *optional*): How soft the mask is at the end of the search: tau, in (0, 1e3].
            Defaults to `temperature`, or to 0.1 with a target unless samples are hard.
        noise_scale (`float`, *optional*): How much random noise the samples of the mask have: factor of the Gumbel
            noise, at least 0. Defaults to 1, or to 0 for `"soft"` and with a target.
        share_noise (`bool`, *optional*, defaults to `False`): Whether the processes of a distributed training share
            the Gumbel noise, and so one sample of the mask. By default each process draws its own noise, so that a
            step averages over more samples.
        hard (`bool`, *optional*): Whether the search rounds the mask to 0 or 1 (straight-through samples). Defaults to
            `True`, or to `False` for `"soft"` and with a target. With a target and without noise, the entries with the
            largest P are kept, as near to the budget as the form of the mask allows.
        symmetric (`bool`, *optional*, defaults to `True`): Whether alpha_ij = alpha_ji in masks learned per entry, per
            offset or per tile diagonal, and whether a token in `"vertical_slash"` has a single logit for its column
            and its row instead of two. `False` for `"dam_s"` and `"dam_b"` learns signed distances: what a token
            attends to before it and after it, apart.
        share_layers (`bool`, *optional*, defaults to `True`): Whether all layers share one mask per head.
        diagonal (`str`, *optional*): Self-attention of every token, special tokens included: `"keep"` turns it on,
            `"remove"` turns it off, and `"learned"` leaves it to the search or the pattern, or undoes what was fixed
            in a frozen mask. Reset to `None` once a mask is frozen, because the mask then stores it.
        special_tokens (`str`, *optional*): Tokens whose rows and columns are always on in a search: `"none"`,
            `"first"` (each sequence's first token that is not padding) or `"first_last"`. Defaults to `"first_last"`
            for `dam_s`, `dam_b` and `vertical_slash` (`"first"` in a decoder) and to `"none"` for the others.
        special_rows (`bool`, *optional*, defaults to `True`): Whether special tokens attend to all tokens. `False`
            turns only their columns on: all tokens attend to them, and what they attend to is learned like the rest.
        last_token (`str`, *optional*): What the last token is: `"real"` for the last one that is not padding, the
            default, or `"position"` for the last position of the input. Reset to `None` once a mask is frozen.
        sparsity_weight (`float`, *optional*, defaults to 1e-4): lambda >= 0, the weight of the penalty on the L1 norm
            of the mask. Not used with a target.
        target_sparsity (`float`, *optional*): Fraction of entries to remove, in (0, 1). The search is
            then annealed instead of penalized: by default it uses P itself instead of samples, with a temperature that
            falls.
        sparsity_scope (`str`, *optional*, defaults to `"head"`): Where the target sparsity is met: `"head"` in every
            head, `"global"` over all heads and layers together, so that some heads keep more than others: their shares
            are proportional to `exp(mean(alpha))` over the parameters of a head.
        initial_decay (`float`, *optional*): How local a search starts: the odds of keeping an entry are proportional
            to `max(distance, 1)^-d`, d in [0, 100]. The distance is counted in tokens, or for `"dam_b"` in tiles; a
            global token of `"vertical_slash"` has the mean distance, a third of the length. Defaults to 0, where all
            entries start alike, or with a target to 3, a local start.
        initial_sparsity (`float`, *optional*): Sparsity at the start of a search with a target: in [0, 1), 0 is a
            dense warm-up. Defaults to the target.
        sparsity_warmup (`float`, *optional*, defaults to 0.0): Fraction of the search after which sparsity starts to
            grow.
        sparsity_ramp (`float`, *optional*, defaults to 0.4): Fraction of the search after which it has reached the
            target.
        search_progress (`float`, *optional*): Fraction of the search that was done when the model was saved, in
            [0, 1]. Saving sets it; `None` means that the search was at its end.
        base_model (`str`, *optional*): The model that a saved search began with: its Hub id or the path of its folder,
            `""` for a new one. Saving sets it; `None` means the model that the configuration is of.
        base_model_revision (`str`, *optional*): Its commit on the Hub. Saving sets it.
        rest (`str`, *optional*): How the keys that the mask removes count: `"none"` not at all, the default, or
            `"mean"` by one more key that stands for them, see [`SparseMask`]. Reset to `None` once a mask is frozen.
        mask_length (`int`, *optional*): Number of tokens that the mask is made for. Defaults to
            `max_position_embeddings`, at most 512.
        length_policy (`str`, *optional*): What happens to longer inputs: `"extend"` (default of `"dam_s"`, `"dam_b"`
            and the pattern `"window"`), `"dense"` (of the patterns `"dense"` and `"no_diag"`), or `"error"` (of all
            others). Reset to `None` once a mask is frozen.
        skip_padding (`bool`, *optional*, defaults to `False`): Whether an encoder takes the padding out of a batch
            before its layers and puts it back, as zeros, after them. The result is the same, but padding takes no
            time. Padding stays in if a row begins with it or has gaps, in compiled and exported graphs, if attentions
            are returned, and if the last special token is the last position.
        probability_map (`str`, *optional*, defaults to `"softmax"`): What turns scores into probabilities, a key of
            `PROBABILITY_MAPS`: `"softmax"`, `"topk"`, `"sparsegen_lin"`, `"sparsemax"`, `"entmax15"`, `"entmax"`.
            Cross-attention keeps softmax.
        probability_map_kwargs (`dict`, *optional*): Parameters of the map: `{"k": 8}` for topk, `{"lam": 0.5}` for
            sparsegen_lin, `{"alpha": 1.3}` or `{"alpha": "learned"}` (per layer and head) for entmax.
        token_mixers (`list`, *optional*): What mixes the tokens in each layer, a key of `MIXERS` per layer:
            `"attention"`, `"sepconv"`, `"bproj"` or `"average"`. Defaults to attention in all layers. The mask belongs
            to the layers with attention: layer l of a mask per layer is the l-th of them. Without any such layer the
            pattern is `"dense"`.
    """

    pattern: str | None = _field(PATTERN, None, one_of(PATTERNS))
    pattern_kwargs: dict | None = _field(PATTERN)
    head_configuration: str | None = _field(PATTERN, None, one_of(HEAD_CONFIGURATIONS))
    mask_seed: int = _field(PATTERN, 0, interval(0, 2**63 - 1))
    search: str | None = _field(SEARCH, None, one_of(SEARCHES))
    frozen: bool = _field(STATE, False)
    pruned: bool = _field(STATE, False)
    allow_empty_rows: bool = _field(RUN, False)
    block_size: int = _field(SHAPE, 64, one_of((16, 32, 64, 128)))
    query_block_size: int | None = _field(SHAPE, None, one_of((32, 64, 128)))
    mask_form: str | None = _field(SEARCH, None, one_of(MASK_FORMS))
    mask_constant: float | int | None = _field(SEARCH, None, interval(0, MAX_MASK_CONSTANT, low_open=True))
    mask_logit_scale: float | int = _field(SEARCH, 10.0, interval(0, 1e6, low_open=True))
    temperature: float | int = _field(SEARCH, 1.0, interval(0, 1e3, low_open=True))
    temperature_end: float | int | None = _field(SEARCH, None, interval(0, 1e3, low_open=True))
    noise_scale: float | int | None = _field(SEARCH, None, interval(0, 1e3))
    share_noise: bool = _field(SEARCH, False)
    hard: bool | None = _field(SEARCH)
    symmetric: bool = _field(SEARCH, True)
    share_layers: bool = _field(SEARCH, True)
    diagonal: str | None = _field(USE, None, one_of(DIAGONALS))
    special_tokens: str | None = _field(SHAPE, None, one_of(SPECIAL_TOKENS))
    special_rows: bool | None = _field(USE)
    last_token: str | None = _field(USE, None, one_of(LAST_TOKENS))
    rest: str | None = _field(USE, None, one_of(RESTS))
    sparsity_weight: float | int = _field(SEARCH, 1e-4, interval(0, 1e9))
    target_sparsity: float | int | None = _field(SEARCH, None, interval(0, 1, low_open=True, high_open=True))
    sparsity_scope: str = _field(SEARCH, "head", one_of(SCOPES))
    initial_decay: float | int | None = _field(SEARCH, None, interval(0, 100))
    initial_sparsity: float | int | None = _field(SEARCH, None, interval(0, 1, high_open=True))
    sparsity_warmup: float | int = _field(SEARCH, 0.0, interval(0, 1))
    sparsity_ramp: float | int = _field(SEARCH, 0.4, interval(0, 1))
    search_progress: float | int | None = _field(STATE, None, interval(0, 1))
    base_model: str | None = _field(STATE)
    base_model_revision: str | None = _field(STATE)
    mask_length: int | None = _field(SHAPE, None, interval(1, MAX_MASK_LENGTH))
    length_policy: str | None = _field(USE, None, one_of(LENGTH_POLICIES))
    skip_padding: bool = _field(RUN, False)
    probability_map: str = _field(MODEL, "softmax", one_of(PROBABILITY_MAPS))
    probability_map_kwargs: dict | None = _field(MODEL)
    token_mixers: list | None = _field(MODEL)

    def changed(self: Description, **changes: Any) -> Description:
        """This description with other values: itself where it can be changed, otherwise a copy."""
        for name, value in changes.items():
            setattr(self, name, value)
        return self

    def used(self, mask: SparseMask) -> SparseMask:
        """A mask, used as the description asks."""
        return with_changes(mask, **{name: getattr(self, name) for name in REQUESTS})

    def validate_mask(self) -> None:
        """Check fields that exclude each other."""
        if self.pattern is not None and self.search is not None:
            raise ValueError(
                f"pattern {self.pattern!r} and search {self.search!r} exclude each other: set only one of them"
            )
        if self.pattern is None and (self.pattern_kwargs or self.head_configuration):
            raise ValueError("pattern_kwargs and head_configuration need a pattern")
        if self.special_rows is False and self.special_tokens == "none":
            raise ValueError("special_rows false needs special tokens, got special_tokens 'none'")
        if self.hard and self.search and not SEARCHES[self.search].stochastic:
            raise ValueError(f"hard true has no meaning with search {self.search!r}, which draws no samples")
        if self.length_policy == "extend" and self.search and SEARCHES[self.search].frozen_form == "table":
            raise ValueError(
                f"length_policy 'extend' needs a Toeplitz search (dam_s, dam_b), got search {self.search!r}"
            )
        if self.search and SEARCHES[self.search].form != "blocks" and self.query_block_size is not None:
            raise ValueError(f"query_block_size needs a search of tiles (dam_b), got search {self.search!r}")
        if self.search:
            check_query_block_size(self.query_block_size, self.block_size, self.symmetric)
        if self.sparsity_warmup > self.sparsity_ramp:
            raise ValueError(
                f"sparsity_warmup must be at most sparsity_ramp ({self.sparsity_ramp}), got {self.sparsity_warmup}"
            )
        if self.mask_length is not None and self.mask_length < 3:
            raise ValueError(f"mask_length must be at least 3 (special tokens and one more), got {self.mask_length}")
        if self.mask_form == "multiplicative" and self.probability_map != "softmax":
            raise ValueError(
                f"mask_form 'multiplicative' needs the probability_map 'softmax', got {self.probability_map!r}: use "
                "'additive' or 'log', which change the scores"
            )
        if self.rest not in (None, "none"):
            if self.mask_form == "multiplicative":
                raise ValueError(f"rest {self.rest!r} has no meaning with mask_form 'multiplicative': use 'log'")
            if self.probability_map != "softmax":
                raise ValueError(
                    f"rest {self.rest!r} needs the probability_map 'softmax', got {self.probability_map!r}"
                )

    def check_carrier(self, is_decoder: bool, num_positions: int) -> None:
        """Check fields that the model excludes."""
        if is_decoder and self.special_tokens == "first_last":
            raise ValueError(
                "special_tokens 'first_last' is undefined in a decoder, whose last token changes as it generates: "
                "use 'first' or 'none'"
            )
        check_probability_map(self.probability_map, self.probability_map_kwargs or {}, num_positions)
        if self.mask_length is not None and self.mask_length > num_positions:
            logger.warning_once(
                f"mask_length {self.mask_length} is longer than any input that the model takes: it has "
                f"{num_positions} positions"
            )
        if is_decoder and self.rest not in (None, "none"):
            raise ValueError(f"rest {self.rest!r} is undefined in a decoder, whose tokens do not see the whole input")
        if self.skip_padding and is_decoder:
            raise ValueError("skip_padding true has no meaning with is_decoder true: set it to false")


@strict
@dataclass(kw_only=True)
class MaskDescription(MaskFields):
    """A mask and its search as they are described for a model. It cannot be changed, only replaced."""

    def __post_init__(self) -> None:
        vars(self)["_made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in vars(self):
            raise FrozenInstanceError(f"{name} cannot be changed: take dataclasses.replace(description, {name}=...)")
        super().__setattr__(name, value)

    def changed(self: Description, **changes: Any) -> Description:
        made = copy.copy(self)
        vars(made).update(changes)
        return made


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """
    What a mask has to know about the model that carries it: its sizes, the tokens of its longest input, whether it is
    causal, its attention dropout, its Hub id or folder (`""` for a new one) and commit. In the layers `local_layers` a
    token attends to offsets of at most `window`; with `one_layer` all layers are the same module, with one mask; with
    `distance_bias` its scores have a bias per distance.
    """

    num_layers: int
    num_heads: int
    head_size: int
    num_positions: int
    is_decoder: bool
    dropout: float
    name: str = ""
    revision: str | None = None
    window: int | None = None
    local_layers: tuple[int, ...] = ()
    one_layer: bool = False
    distance_bias: bool = False


def _about(*kinds: str) -> tuple[str, ...]:
    return tuple(item.name for item in fields(MaskFields) if item.metadata["about"] in kinds)


OWN_FIELDS = _about(PATTERN, SEARCH, SHAPE, USE, RUN, MODEL, STATE)
STATE_FIELDS = _about(STATE)
MODEL_FIELDS = _about(MODEL)
# How a mask is used.
REQUESTS = _about(USE)
MASK_FIELDS = _about(USE, RUN)
# What defines a mask by its pattern, besides its name.
PATTERN_FIELDS = (*(name for name in _about(PATTERN) if name != "pattern"), "mask_length")
# What defines a search, besides what its frozen mask holds itself.
SEARCH_FIELDS = _about(SEARCH)
# What only a search of tiles has.
TILES = ("block_size", "query_block_size")
# What a description no longer says once its mask is frozen, which then holds it.
HELD_BY_MASK = ("pattern", "pattern_kwargs", "head_configuration", *REQUESTS)
# What a run that resumes may have otherwise than its checkpoint, and why. It must have all other fields alike.
MAY_CHANGE = {
    "allow_empty_rows": "it says which masks are accepted, and changes none of them",
    "skip_padding": "it says what padding costs, and not what comes out",
    "frozen": "the mask becomes frozen on the way",
    "pruned": "the pruning begins on the way",
    "search_progress": "it tells how far the search is",
    "base_model": "it tells where the search began",
    "base_model_revision": "it tells where the search began",
}
RESUMED_FIELDS = ("search", *(name for name in OWN_FIELDS if name not in ("search", *MAY_CHANGE)))


def allowed_fields(mask_or_search: str | None) -> tuple[str, ...]:
    """
    Names of the fields that have a meaning for a key of `PATTERNS` or `SEARCHES`; anything else is a given mask.
    """
    if mask_or_search in SEARCHES:
        return tuple(name for name in _about(SEARCH, SHAPE, USE, RUN) if name != "search")
    return MASK_FIELDS + (PATTERN_FIELDS if mask_or_search in PATTERNS else ())


def fields_of_search(search: str) -> tuple[str, ...]:
    """Those of [`allowed_fields`] that a recipe may set for this search: a tile size is only for a search of tiles."""
    return tuple(name for name in allowed_fields(search) if name not in TILES or SEARCHES[search].form == "blocks")


def default_mask_length(num_positions: int) -> int:
    """Number of tokens that a mask is made for, in a model that takes inputs of this length."""
    return min(num_positions, 512)


def with_changes(
    mask: SparseMask,
    length_policy: str | None = None,
    last_token: str | None = None,
    diagonal: str | None = None,
    rest: str | None = None,
    special_rows: bool | None = None,
) -> SparseMask:
    """A mask that is used in another way; `None` leaves it as it is."""
    changes: dict[str, Any] = {"length_policy": length_policy, "last_token": last_token}
    changes |= {"rest": rest, "special_rows": special_rows}
    changes = {name: value for name, value in changes.items() if value is not None}
    if diagonal is not None:
        check_choice("diagonal", diagonal, tuple(DIAGONALS))
        changes["diagonal"] = DIAGONALS[diagonal]
    return mask.replace(**changes) if changes else mask


def pattern_mask(description: MaskFields, carrier: Carrier) -> SparseMask:
    """The mask of a description with a pattern."""
    name, length = description.pattern, description.mask_length
    assert name is not None and length is not None
    mask = build_pattern(
        name,
        length,
        carrier.num_heads,
        num_layers=max(carrier.num_layers, 1),
        seed=description.mask_seed,
        head_configuration=description.head_configuration,
        **(description.pattern_kwargs or {}),
    )
    if carrier.is_decoder and mask.special_tokens == "first_last":
        # A global last token is the one at the end of the mask, whatever has been generated so far.
        mask = mask.replace(
            keep=mask.to_table(),
            form="table",
            block_size=None,
            query_block_size=None,
            special_tokens="none",
            symmetric=True,
            special_rows=True,
            length_policy=default_length_policy("table"),
        )
    diagonal = None if description.diagonal == "learned" else description.diagonal  # as the pattern defines it
    asked = {name: getattr(description, name) for name in REQUESTS}
    return with_changes(mask, **asked | {"diagonal": diagonal})
