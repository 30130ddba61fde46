"""Configuration of a BERT whose attention runs through a learned or fixed sparse mask."""

import math
from dataclasses import fields

from huggingface_hub.dataclasses import strict, validated_field
from transformers import BertConfig

from ..attention.mask_inputs import MAX_MASK_CONSTANT
from ..attention.probability_maps import PROBABILITY_MAPS, check_probability_map
from ..masks.patterns import HEAD_CONFIGURATIONS, PATTERNS, build_pattern
from ..masks.sparse_mask import DIAGONALS, LAST_TOKENS, LENGTH_POLICIES, SPECIAL_TOKENS, default_length_policy
from ..search.searches import SEARCHES
from .token_mixers import MIXERS, check_token_mixers


MASK_FORMS = ("additive", "log", "multiplicative")


def _choice(allowed):
    def one_of(value):
        if value is not None and value not in allowed:
            raise ValueError(f"must be one of {', '.join(map(repr, allowed))}, got {value!r}")

    return one_of


def _names(allowed):
    def all_of(values):
        for value in values or ():
            if value not in allowed:
                raise ValueError(f"must hold names out of {', '.join(map(repr, allowed))}, got {value!r}")

    return all_of


def _between(low, high, low_open=False, high_open=False):
    def in_range(value):
        if value is None:
            return
        above = value > low if low_open else value >= low
        below = value < high if high_open else value <= high
        if not (math.isfinite(value) and above and below):
            interval = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
            raise ValueError(f"must be in {interval}, got {value!r}")

    return in_range


@strict
class SparseBertConfig(BertConfig):
    """
    A [`BertConfig`] plus the attention mask: either a fixed `pattern` or a `search` that learns it.

    Args:
        pattern (`str`, *optional*): Fixed mask, a name of `PATTERNS` (`"bigbird"`, `"window"`, `"dense"`, ...).
        pattern_kwargs (`dict`, *optional*): Parameters of the pattern, such as `{"window_size": 3}`.
        head_configuration (`str`, *optional*): How a cycle of patterns is laid out: `"sequential"`, `"union"` or
            `"multihead"`.
        mask_seed (`int`, *optional*, defaults to 0): Seed of random patterns.
        search (`str`, *optional*): Learned mask: `"dam_s"` (one logit per offset), `"dam_u"` (per entry), `"dam_b"`
            (per tile diagonal) or `"soft"` (per entry, no sampling). `"dam_s"` when neither this nor `pattern` is set.
        frozen (`bool`, *optional*, defaults to `False`): Whether the mask is a file beside the weights. Set by
            freezing.
        pruned (`bool`, *optional*, defaults to `False`): Whether a search is being pruned: what has not been removed
            is on, nothing is sampled. Set by [`ProgressivePruning`].
        allow_empty_rows (`bool`, *optional*, defaults to `False`): Accept a mask in which a query keeps no key (its
            output is 0).
        block_size (`int`, *optional*, defaults to 64): Tile size of `"dam_b"`: 16, 32, 64 or 128.
        mask_form (`str`, *optional*): How the searched mask M enters: `"additive"` `softmax(S - c (1 - M))`, `"log"`
            `softmax(S + log M)`, or `"multiplicative"` `M softmax(S)`, which is not normalised (the frozen mask always
            is) and kept for study. `"additive"`, or `"log"` under a target. SparseBERT (arXiv 2102.12871), Eq. 4-6.
        mask_constant (`float`, *optional*): 0 < c <= 1e4; 1e4, or 10 for `"soft"`.
        mask_logit_scale (`float`, *optional*, defaults to 10.0): The stored logits times this are alpha: with the
            weights' learning rate, alpha moves this much faster.
        temperature (`float`, *optional*, defaults to 1.0): tau > 0 of the Gumbel-sigmoid.
        temperature_end (`float`, *optional*): tau at the end of the search: as `temperature`, or 0.1 under a target.
        noise_scale (`float`, *optional*): Factor >= 0 of the Gumbel noise: 1, or 0 for `"soft"` and under a target.
        noise_scale_end (`float`, *optional*): The factor at the end of the search: as `noise_scale`.
        hard (`bool`, *optional*): Straight-through samples of 0 and 1: true, or false for `"soft"` and under a target.
        symmetric (`bool`, *optional*, defaults to `True`): alpha_ij = alpha_ji for masks learned per entry.
        share_layers (`bool`, *optional*, defaults to `True`): One set of head masks for all layers.
        diagonal (`str`, *optional*, defaults to `"learned"`): Self-attention of every token, special ones included:
            as learned or defined, `"keep"` or `"remove"`.
        special_tokens (`str`, *optional*): Rows and columns always on in a search: `"none"`, `"first"` or
            `"first_last"`. Default: `"first_last"` for `dam_s` and `dam_b` (`"first"` in a decoder), else `"none"`.
        last_token (`str`, *optional*, defaults to `"real"`): The last token is each sequence's last non-padding token,
            or with `"position"` the last position of the input.
        sparsity_weight (`float`, *optional*, defaults to 1e-4): lambda >= 0 of the penalty on the L1 norm.
        target_sparsity (`float`, *optional*): Fraction in (0, 1) of entries to remove in every head, instead of a
            penalty (`sparsity_weight` has no effect then), by an annealed search: P itself, not samples of it, with
            a temperature that falls.
        initial_decay (`float`, *optional*): d >= 0: the odds of keeping a position start proportional to
            `max(distance, 1)^-d`, the distance in tokens (`"dam_b"`: tiles). 0, all alike; 3 under a target, where a
            search that starts local learns much faster.
        initial_sparsity (`float`, *optional*): In [0, 1): what the sparsity under a target starts from: the target;
            0 is a dense warm-up.
        sparsity_warmup (`float`, *optional*, defaults to 0.0): Fraction of the search before sparsity grows.
        sparsity_ramp (`float`, *optional*, defaults to 0.4): Fraction of the search at which the target is reached.
        mask_length (`int`, *optional*): Length the mask is made for; `max_position_embeddings`, at most 512.
        length_policy (`str`, *optional*): Inputs longer than that: `"extend"` (Toeplitz forms; their default),
            `"dense"`, or `"error"` (default of tables).
        probability_map (`str`, *optional*, defaults to `"softmax"`): What turns scores into probabilities, a name of
            `PROBABILITY_MAPS`: `"softmax"`, `"topk"`, `"sparsegen_lin"`, `"sparsemax"`, `"entmax15"`, `"entmax"`.
            Cross-attention keeps softmax.
        probability_map_kwargs (`dict`, *optional*): Its parameters: `{"k": 8}` of topk, `{"lam": 0.5}` of
            sparsegen_lin, `{"alpha": 1.3}` or `{"alpha": "learned"}` (per layer and head) of entmax.
        token_mixers (`list`, *optional*): What stands in each layer, a name of `MIXERS` for each: `"attention"`,
            `"sepconv"`, `"bproj"` or `"average"`; attention everywhere by default. The mask is that of the layers
            with attention: layer l of a mask per layer is the l-th of them. Without any, the pattern is `"dense"`.

    Raises:
        StrictDataclassFieldValidationError: A field of the wrong type or out of its range.
        StrictDataclassClassValidationError: Fields that exclude each other.
    """

    model_type = "sparsebert"

    pattern: str | None = validated_field(_choice(tuple(PATTERNS)), default=None)
    pattern_kwargs: dict | None = None
    head_configuration: str | None = validated_field(_choice(HEAD_CONFIGURATIONS), default=None)
    mask_seed: int = validated_field(_between(0, 2**63 - 1), default=0)
    search: str | None = validated_field(_choice(tuple(SEARCHES)), default=None)
    frozen: bool = False
    pruned: bool = False
    allow_empty_rows: bool = False
    block_size: int = validated_field(_choice((16, 32, 64, 128)), default=64)
    mask_form: str | None = validated_field(_choice(MASK_FORMS), default=None)
    mask_constant: float | int | None = validated_field(_between(0, MAX_MASK_CONSTANT, low_open=True), default=None)
    mask_logit_scale: float | int = validated_field(_between(0, 1e6, low_open=True), default=10.0)
    temperature: float | int = validated_field(_between(0, 1e3, low_open=True), default=1.0)
    temperature_end: float | int | None = validated_field(_between(0, 1e3, low_open=True), default=None)
    noise_scale: float | int | None = validated_field(_between(0, 1e3), default=None)
    noise_scale_end: float | int | None = validated_field(_between(0, 1e3), default=None)
    hard: bool | None = None
    symmetric: bool = True
    share_layers: bool = True
    diagonal: str = validated_field(_choice(tuple(DIAGONALS)), default="learned")
    special_tokens: str | None = validated_field(_choice(SPECIAL_TOKENS), default=None)
    last_token: str = validated_field(_choice(LAST_TOKENS), default="real")
    sparsity_weight: float | int = validated_field(_between(0, 1e9), default=1e-4)
    target_sparsity: float | None = validated_field(_between(0, 1, low_open=True, high_open=True), default=None)
    initial_decay: float | int | None = validated_field(_between(0, 100), default=None)
    initial_sparsity: float | int | None = validated_field(_between(0, 1, high_open=True), default=None)
    sparsity_warmup: float | int = validated_field(_between(0, 1), default=0.0)
    sparsity_ramp: float | int = validated_field(_between(0, 1), default=0.4)
    mask_length: int | None = validated_field(_between(1, 2**20), default=None)
    length_policy: str | None = validated_field(_choice(LENGTH_POLICIES), default=None)
    probability_map: str = validated_field(_choice(tuple(PROBABILITY_MAPS)), default="softmax")
    probability_map_kwargs: dict | None = None
    token_mixers: list | None = validated_field(_names(tuple(MIXERS)), default=None)

    def __post_init__(self, **kwargs):
        if self.pattern is None and self.search is None and not self.frozen:
            if self.num_attention_layers:
                self.search = "dam_s"
            else:
                self.pattern = "dense"
        if self.mask_length is None:
            self.mask_length = min(self.max_position_embeddings, 512)
        # Not stored in config.json, so a reloaded model would otherwise run the host's default and be refused.
        if kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = "sparse_auto"
        super().__post_init__(**kwargs)

    @property
    def num_attention_layers(self):
        """Layers with attention, which the mask is for."""
        return self.num_hidden_layers if self.token_mixers is None else self.token_mixers.count("attention")

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # The host sets keyword arguments after construction, when defaults that depend on them are already chosen.
        own = {field.name: kwargs.pop(field.name) for field in fields(cls) if field.name in kwargs}
        if own.get("search") or own.get("pattern"):
            # A new search or pattern takes the place of whatever the checkpoint was made with.
            replaced = ("search", "pattern", "pattern_kwargs", "head_configuration", "special_tokens", "mask_constant")
            own = (
                dict.fromkeys((*replaced, "length_policy"))
                | {"frozen": False, "pruned": False, "diagonal": "learned"}
                | own
            )
        if own.get("probability_map"):
            own = {"probability_map_kwargs": None} | own
        return super().from_dict({**config_dict, **own}, **kwargs)

    def validate_sparse_attention(self):
        """Fields that exclude each other; called by the host after construction and before saving."""
        if self.pattern is not None and self.search is not None:
            raise ValueError(
                f"pattern {self.pattern!r} and search {self.search!r} exclude each other: set one of them"
            )
        if self.pattern is None and (self.pattern_kwargs or self.head_configuration):
            raise ValueError("pattern_kwargs and head_configuration need a pattern")
        if self.is_decoder and self.special_tokens == "first_last":
            raise ValueError(
                "special_tokens 'first_last' is undefined in a decoder, whose last token changes as it generates: "
                "use 'first' or 'none'"
            )
        if self.length_policy == "extend" and self.search and SEARCHES[self.search].form == "table":
            raise ValueError(
                f"length_policy 'extend' needs a Toeplitz search (dam_s, dam_b), got search {self.search!r}"
            )
        if self.sparsity_warmup > self.sparsity_ramp:
            raise ValueError(
                f"sparsity_warmup must be at most sparsity_ramp ({self.sparsity_ramp}), got {self.sparsity_warmup}"
            )
        if self.mask_length < 3:
            raise ValueError(f"mask_length must be at least 3 (special tokens and one more), got {self.mask_length}")
        check_probability_map(self.probability_map, self.probability_map_kwargs or {}, self.max_position_embeddings)
        if self.mask_form == "multiplicative" and self.probability_map != "softmax":
            raise ValueError(
                f"mask_form 'multiplicative' is defined for softmax, got probability_map {self.probability_map!r}: "
                "use 'additive' or 'log', which change the scores"
            )
        check_token_mixers(self)


def pattern_mask(config):
    """The [`SparseMask`] of a configuration with a pattern, under its choices on diagonal, last token and length."""
    mask = build_pattern(
        config.pattern,
        config.mask_length,
        config.num_attention_heads,
        num_layers=max(config.num_attention_layers, 1),
        seed=config.mask_seed,
        head_configuration=config.head_configuration,
        **(config.pattern_kwargs or {}),
    )
    changes = {"last_token": config.last_token}
    if DIAGONALS[config.diagonal] is not None:
        changes["diagonal"] = DIAGONALS[config.diagonal]
    if config.is_decoder and mask.special_tokens == "first_last":
        # A global last token is the one at the end of the mask, whatever has been generated so far.
        changes |= {"keep": mask.to_table(), "form": "table", "block_size": None, "special_tokens": "none"}
        changes["length_policy"] = default_length_policy("table")
    if config.length_policy is not None:
        changes["length_policy"] = config.length_policy
    return mask.replace(**changes)


__all__ = ["SparseBertConfig"]
