"""The configuration of a BERT with a learned or fixed sparse attention mask."""

import difflib
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from ...checks import nearest
from ...hub import commit_of
from ...learning.mask_description import (
    MODEL_FIELDS,
    OWN_FIELDS,
    REQUESTS,
    STATE_FIELDS,
    Carrier,
    MaskFields,
    default_mask_length,
)
from ...learning.search_files import read_search, with_meaning
from ...learning.searches import SEARCHES
from ...masks.mask_files import NOTE_FIELD, MaskFileError, read_description
from ...masks.mask_sources import find_descriptions, hub_arguments_in
from ..model_configs import MaskedConfigMixin, forget_saved_fields, saved_with_code, without_mask
from .token_mixers import check_token_mixers


logger = logging.get_logger(__name__)

# Attribute of a configuration, which is not saved: whether its search replaces what the checkpoint says of one.
NEW_SEARCH = "_new_search"
# Fields that are not about the mask itself, and its length.
_OF_MODEL = ("allow_empty_rows", "skip_padding", *MODEL_FIELDS)
_KEPT = {*_OF_MODEL, "mask_length"}


@strict
class SparseBertConfig(MaskedConfigMixin, MaskFields, BertConfig):
    """
    A [`BertConfig`] with an attention mask: either a fixed `pattern`, or a `search` that learns it. Its own fields are
    those of [`MaskFields`].

    Raises:
        StrictDataclassFieldValidationError: If a field has the wrong type or is out of its range.
        StrictDataclassClassValidationError: If fields exclude each other.
    """

    model_type = "sparsebert"

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("model_type") == BertConfig.model_type:
            del kwargs["model_type"]  # these are the fields of a BERT
        if self.pattern is None and self.search is None and not self.frozen:
            if self.num_attention_layers:
                self.search = "dam_s"
            else:
                self.pattern = "dense"
        search = SEARCHES.get(self.search) if isinstance(self.search, str) else None
        if search and search.toeplitz and (self.symmetric, self.special_rows, self.frozen) == (False, None, False):
            self.special_rows = True  # so that it is written, which tells what symmetric means, see `with_meaning`
        if self.mask_length is None:
            self.mask_length = default_mask_length(self.max_position_embeddings)
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

    @property
    def carrier(self) -> Carrier:
        """What the mask has to know about a model of this configuration."""
        return Carrier(
            num_layers=self.num_attention_layers,
            num_heads=self.num_attention_heads,
            head_size=self.hidden_size // self.num_attention_heads,
            num_positions=self.max_position_embeddings,
            is_decoder=bool(self.is_decoder),
            dropout=self.attention_probs_dropout_prob,
            name=self.name_or_path or "",
            revision=commit_of(self),
        )

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
        config_dict = with_meaning(config_dict)
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

    def validate_hidden_act(self) -> None:
        """Check the name of the activation, which transformers looks up only when it makes a model."""
        if self.hidden_act not in ACT2FN:
            raise nearest("hidden_act", self.hidden_act, ACT2FN)

    def validate_sparse_attention(self) -> None:
        """Check fields that exclude each other. Transformers calls this after construction and before saving."""
        self.check_carrier(bool(self.is_decoder), self.max_position_embeddings)
        check_token_mixers(self)
        if self.skip_padding and set(self.token_mixers or ()) - {"attention"}:
            raise ValueError(
                "skip_padding true needs attention in all layers, since the other token_mixers mix neighboring "
                f"tokens, got {self.token_mixers!r}: set it to false"
            )


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
        logger.warning(f"{without_mask(source)}: a new search begins")
    return found


__all__ = ["SparseBertConfig"]
