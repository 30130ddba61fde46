"""Configurations of models with a mask: stock names of attention stand for sparse ones, and can return attentions."""

from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..attention.backends import check_returns_attentions
from ..attention.choosing.choice import sparse_name
from ..files import replace_files
from .bert.remote_code import AUTO_MAP_FIELD, CODE_PATH, forget_saved_fields, saved_fields
from .derived import Derived


if TYPE_CHECKING:
    _ConfigBase = PreTrainedConfig
else:
    _ConfigBase = object


class MaskedConfigMixin(_ConfigBase):
    """What the configuration of every model with a mask does differently."""

    def save_pretrained(self, save_directory: str | PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """
        Save the configuration as transformers does, with a note how the model is loaded. That of a BERT also names the
        code for environments without this package, which is written beside it.
        """
        saved = saved_fields(type(self).model_type)
        if AUTO_MAP_FIELD in saved:
            # Code of the user's that transformers saves for a class derived from ours comes first.
            saved[AUTO_MAP_FIELD] |= getattr(self, AUTO_MAP_FIELD, None) or {}
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            replace_files({folder / CODE_PATH.name: CODE_PATH.read_bytes()})
        attributes = vars(self)
        attributes.update(saved)
        try:
            super().save_pretrained(save_directory, push_to_hub, **kwargs)
        finally:
            forget_saved_fields(self)

    @property
    def _attn_implementation(self) -> str | None:
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | dict | None) -> None:
        if isinstance(value, dict):
            value = value.get("", getattr(self, "_attn_implementation", None))
        self._attn_implementation_internal = sparse_name(value)

    @property
    def output_attentions(self) -> bool | None:
        """Whether the model returns the attention probabilities of all layers."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        if value:
            check_returns_attentions(self._attn_implementation)
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        """Check whether the attention implementation returns attentions if they are asked for."""
        if self.output_attentions:
            check_returns_attentions(self._attn_implementation)


class AttachedConfig(Derived, MaskedConfigMixin):
    """
    The configuration of a stock model with a mask from [`attach`]. The file that it saves stays that of a stock model,
    with fields that say where its mask is.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        strict(cls)  # collects the validators again
        # Transformers makes a dataclass of every configuration, which equals none of its stock class.
        made: Any = cls
        made.__eq__ = AttachedConfig.__eq__

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, self.stock_class):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self))
