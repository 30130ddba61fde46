"""The configuration of a BERT with a learned or fixed sparse attention mask."""

import difflib
import json
from collections.abc import Callable, Collection
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig

from ...attention.biases.bias_entries import MAX_MASK_CONSTANT
from ...attention.probability_maps import PROBABILITY_MAPS, check_probability_map
from ...learning.searches import SEARCHES
from ...learning.selection import SCOPES
from ...masks.expansion import LENGTH_POLICIES, SPECIAL_TOKENS
from ...masks.mask_files import MAX_MASK_LENGTH, MaskFileError, read_description
from ...masks.mask_sources import find_descriptions, hub_arguments_in
from ...masks.patterns import HEAD_CONFIGURATIONS, PATTERNS
from ...masks.sparse_mask import DIAGONALS, LAST_TOKENS
from ..masked_configs import MaskedConfigMixin
from .remote_code import NOTE_FIELD, forget_saved_fields, saved_with_code, warn_of_missing_mask
from .token_mixers import MIXERS, check_token_mixers


MASK_FORMS = ("additive", "log", "multiplicative")

# Fields that say how a mask is used. `None` leaves it to the pattern, the search or the frozen mask.
REQUESTS = ("length_policy", "last_token", "diagonal")
# Attribute of a configuration, which is not saved: whether its search replaces what the checkpoint says of one.
NEW_SEARCH = "_new_search"
# Fields that are not about the mask itself, and its length.
_OF_MODEL = ("allow_empty_rows", "skip_padding", "probability_map", "probability_map_kwargs", "token_mixers")
_KEPT = {*_OF_MODEL, "mask_length"}
# How far a search is, and where it began: saving sets them.
STATE_FIELDS = ("frozen", "pruned", "search_progress", "base_model", "base_model_revision")


def _choice(allowed: Collection[Any]) -> Callable[[Any], None]:
    def one_of(value: Any) -> None:
        if value is not None and value not in allowed:
            raise ValueError(f"must be one of {', '.join(map(repr, allowed))}, got {value!r}")

    return one_of


def _names(allowed: Collection[str]) -> Callable[[Any], None]:
    def all_of(values: Any) -> None:
        for value in values or ():
            if value not in allowed:
                raise ValueError(f"must hold names out of {', '.join(map(repr, allowed))}, got {value!r}")

    return all_of


def _between(low: float, high: float, low_open: bool = False, high_open: bool = False) -> Callable[[Any], None]:
    def in_range(value: Any) -> None:
        if value is None:
            return
        above = value > low if low_open else value >= low
        below = value < high if high_open else value <= high
        if not (above and below):  # NaN is neither
            interval = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
            raise ValueError(f"must be in {interval}, got {value!r}")

    return in_range


@strict
class SparseBertConfig(MaskedConfigMixin, BertConfig):
    """
    A [`BertConfig`] with an attention mask: either a fixed `pattern`, or a `search` that learns it.

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
        symmetric (`bool`, *optional*, defaults to `True`): Whether alpha_ij = alpha_ji in masks learned per entry, and
            whether a token in `"vertical_slash"` has a single logit for its column and its row instead of two.
        share_layers (`bool`, *optional*, defaults to `True`): Whether all layers share one mask per head.
        diagonal (`str`, *optional*): Self-attention of every token, special tokens included: `"keep"` turns it on,
            `"remove"` turns it off, and `"learned"` leaves it to the search or the pattern, or undoes what was fixed
            in a frozen mask. Reset to `None` once a mask is frozen, because the mask then stores it.
        special_tokens (`str`, *optional*): Tokens whose rows and columns are always on in a search: `"none"`,
            `"first"` (each sequence's first token that is not padding) or `"first_last"`. Defaults to `"first_last"`
            for `dam_s`, `dam_b` and `vertical_slash` (`"first"` in a decoder) and to `"none"` for the others.
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

    Raises:
        StrictDataclassFieldValidationError: If a field has the wrong type or is out of its range.
        StrictDataclassClassValidationError: If fields exclude each other.
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
    share_noise: bool = False
    hard: bool | None = None
    symmetric: bool = True
    share_layers: bool = True
    diagonal: str | None = validated_field(_choice(tuple(DIAGONALS)), default=None)
    special_tokens: str | None = validated_field(_choice(SPECIAL_TOKENS), default=None)
    last_token: str | None = validated_field(_choice(LAST_TOKENS), default=None)
    sparsity_weight: float | int = validated_field(_between(0, 1e9), default=1e-4)
    target_sparsity: float | None = validated_field(_between(0, 1, low_open=True, high_open=True), default=None)
    sparsity_scope: str = validated_field(_choice(SCOPES), default="head")
    initial_decay: float | int | None = validated_field(_between(0, 100), default=None)
    initial_sparsity: float | int | None = validated_field(_between(0, 1, high_open=True), default=None)
    sparsity_warmup: float | int = validated_field(_between(0, 1), default=0.0)
    sparsity_ramp: float | int = validated_field(_between(0, 1), default=0.4)
    search_progress: float | int | None = validated_field(_between(0, 1), default=None)
    base_model: str | None = None
    base_model_revision: str | None = None
    mask_length: int | None = validated_field(_between(1, MAX_MASK_LENGTH), default=None)
    length_policy: str | None = validated_field(_choice(LENGTH_POLICIES), default=None)
    skip_padding: bool = False
    probability_map: str = validated_field(_choice(tuple(PROBABILITY_MAPS)), default="softmax")
    probability_map_kwargs: dict | None = None
    token_mixers: list | None = validated_field(_names(tuple(MIXERS)), default=None)

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("model_type") == BertConfig.model_type:
            del kwargs["model_type"]  # these are the fields of a BERT
        if self.pattern is None and self.search is None and not self.frozen:
            if self.num_attention_layers:
                self.search = "dam_s"
            else:
                self.pattern = "dense"
        if self.mask_length is None:
            self.mask_length = min(self.max_position_embeddings, 512)
        for name in kwargs:
            # Transformers keeps unknown fields, which would let a search run without the one that was meant.
            if match := difflib.get_close_matches(name, OWN_FIELDS, n=1, cutoff=0.8):
                raise ValueError(f"unknown field {name!r}; did you mean {match[0]!r}?")
        super().__post_init__(**kwargs)
        forget_saved_fields(self)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """As in transformers, for a class derived from this one, which is always saved with its code."""
        if not saved_with_code(cls, auto_class):
            super().register_for_auto_class(auto_class)

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention, which the mask belongs to."""
        return self.num_hidden_layers if self.token_mixers is None else self.token_mixers.count("attention")

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        As in transformers. A stock BERT is read as a SparseBERT: with the mask or search that is saved beside it,
        unless another search or pattern is given.
        """
        source = pretrained_model_name_or_path
        hub_arguments = hub_arguments_in(kwargs)
        replaced = kwargs.get("search") or kwargs.get("pattern")
        found, unused = super().get_config_dict(source, **kwargs)
        if found.get("model_type") == BertConfig.model_type:
            # Otherwise transformers warns that models of two types may not fit.
            found = found | {"model_type": cls.model_type}
            if not replaced:
                found = _with_mask_beside(found, source, hub_arguments)
        return found, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        # Transformers sets keyword arguments after construction, when defaults that depend on them are already chosen.
        own = {field.name: kwargs.pop(field.name) for field in fields(cls) if field.name in kwargs}
        of_mask = set(OWN_FIELDS)
        if own.get("search") or own.get("pattern"):
            # A new search or pattern replaces all that the checkpoint says about its mask.
            config_dict = {name: value for name, value in config_dict.items() if name not in of_mask - _KEPT}
        elif config_dict.get("frozen") is True:
            allowed = {*_OF_MODEL, *REQUESTS, *STATE_FIELDS}
            for name in own.keys() & of_mask - allowed:
                if own[name] not in (None, config_dict.get(name, cls.__dataclass_fields__[name].default)):
                    raise ValueError(
                        f"{name} {own[name]!r} has no meaning for a frozen mask: give a search or a pattern as well, "
                        "which replaces it"
                    )
        if own.get("probability_map"):
            own = {"probability_map_kwargs": None} | own
        made = super().from_dict({**config_dict, **own}, **kwargs)
        if own.get("search"):
            vars(made[0] if isinstance(made, tuple) else made)[NEW_SEARCH] = True
        return made

    def to_dict(self) -> dict[str, Any]:
        """The fields that are saved."""
        return {name: value for name, value in super().to_dict().items() if name != NEW_SEARCH}

    def validate_sparse_attention(self) -> None:
        """
        Check fields that exclude each other. Transformers calls this after construction and before saving.

        Raises:
            ValueError: If they do, or `mask_length`, the parameters of the probability map or the token mixers are out
                of their range.
        """
        if self.pattern is not None and self.search is not None:
            raise ValueError(
                f"pattern {self.pattern!r} and search {self.search!r} exclude each other: set only one of them"
            )
        if self.pattern is None and (self.pattern_kwargs or self.head_configuration):
            raise ValueError("pattern_kwargs and head_configuration need a pattern")
        if self.is_decoder and self.special_tokens == "first_last":
            raise ValueError(
                "special_tokens 'first_last' is undefined in a decoder, whose last token changes as it generates: "
                "use 'first' or 'none'"
            )
        if self.hard and self.search and not SEARCHES[self.search].stochastic:
            raise ValueError(f"hard true has no meaning with search {self.search!r}, which draws no samples")
        if self.length_policy == "extend" and self.search and SEARCHES[self.search].frozen_form == "table":
            raise ValueError(
                f"length_policy 'extend' needs a Toeplitz search (dam_s, dam_b), got search {self.search!r}"
            )
        if self.sparsity_warmup > self.sparsity_ramp:
            raise ValueError(
                f"sparsity_warmup must be at most sparsity_ramp ({self.sparsity_ramp}), got {self.sparsity_warmup}"
            )
        if self.mask_length is not None and self.mask_length < 3:
            raise ValueError(f"mask_length must be at least 3 (special tokens and one more), got {self.mask_length}")
        check_probability_map(self.probability_map, self.probability_map_kwargs or {}, self.max_position_embeddings)
        if self.mask_form == "multiplicative" and self.probability_map != "softmax":
            raise ValueError(
                f"mask_form 'multiplicative' needs the probability_map 'softmax', got {self.probability_map!r}: use "
                "'additive' or 'log', which change the scores"
            )
        check_token_mixers(self)
        if self.skip_padding and self.is_decoder:
            raise ValueError("skip_padding true has no meaning with is_decoder true: set it to false")
        if self.skip_padding and set(self.token_mixers or ()) - {"attention"}:
            raise ValueError(
                "skip_padding true needs attention in all layers, since the other token_mixers mix neighboring "
                f"tokens, got {self.token_mixers!r}: set it to false"
            )


# Fields that the configuration of BERT does not have.
OWN_FIELDS = tuple(
    name for name in SparseBertConfig.__dataclass_fields__ if name not in BertConfig.__dataclass_fields__
)


def read_search(path: Path) -> dict[str, Any]:
    """
    Fields of a [`SparseBertConfig`] from the description of a search.

    Raises:
        MaskFileError: If the file is damaged, or describes something else.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        known = fields.keys() <= set(OWN_FIELDS)
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise MaskFileError(f"{path}: not a search ({error!r})") from error
    if not known or "search" not in fields:
        raise MaskFileError(f"{path}: not a search (its fields are {', '.join(map(str, fields)) or 'none'})")
    return fields


def _with_mask_beside(found, source, hub_arguments):
    """The fields of a BERT, and those of the mask or search that is described beside it."""
    place = Path(source).parent if Path(source).is_file() else source
    beside = find_descriptions(place, **hub_arguments)
    if beside.search is not None:
        searching = found | read_search(beside.search)
        try:
            SparseBertConfig(**searching)
        except (ValueError, StrictDataclassError) as error:
            raise MaskFileError(f"{beside.search}: {' '.join(str(error).split())}") from error
        return searching
    if beside.mask is not None:
        described, metadata, _, _ = read_description(beside.mask)
        search = metadata.get("search")
        # Empty rows were accepted when the mask was frozen.
        frozen = {"frozen": True, "allow_empty_rows": True, "mask_length": described["length"]}
        return found | frozen | {"search": search if search in SEARCHES else None}
    if NOTE_FIELD in found:
        warn_of_missing_mask(source, "a new search begins")
    return found


__all__ = ["SparseBertConfig"]
