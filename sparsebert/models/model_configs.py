"""
Configurations of models with a mask: what they do differently, and what their files say besides. That is how the model
is loaded and, for a BERT, which code runs it where this package is not installed.
"""

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, logging

from ..attention.backends import check_returns_attentions
from ..attention.choosing.choice import SAVED_NAME, SAVED_NAMES, TWINS, sparse_name
from ..file_kinds import drop_links
from ..files import replace_files
from ..masks.mask_files import CODE_NAME, MASK_CONFIG_NAME, NOTE_FIELD, SEARCH_CONFIG_NAME


if TYPE_CHECKING:
    _ConfigBase = PreTrainedConfig
else:
    _ConfigBase = object

logger = logging.get_logger(__name__)

# The attribute of a module with the configurations that its own ones replaced whenever a mask was attached.
CONFIGS_BEFORE = "_configs_before"
CODE_PATH = Path(__file__).parent / "bert" / CODE_NAME

# The classes of transformers that load a BERT, and what follows "Bert" or "SparseBert" in the name of what they load.
AUTO_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForPreTraining": "ForPreTraining",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForCausalLM": "LMHeadModel",
    "AutoModelForNextSentencePrediction": "ForNextSentencePrediction",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForMultipleChoice": "ForMultipleChoice",
}
# Fields of the file of a configuration. In memory it has none of them: with this package no code of a folder is run.
AUTO_MAP_FIELD = "auto_map"
ATTENTION_FIELD = "attn_implementation"
# Attribute, which is not saved: whether the attention implementation was asked for by the name of transformers.
STOCK_NAMED = "_stock_named"
WITH_PACKAGE = "install the package sparsebert from its source, then sparsebert.load"


class Derived:
    """
    Base of the mixins that [`derived_class`] takes. Instances can be pickled and copied, and setting their `__class__`
    to `stock_class` makes them stock again.
    """

    mixin: type
    stock_class: type

    def __reduce__(self) -> tuple:
        stock_class, mixins = type(self), []
        while issubclass(stock_class, Derived):
            mixins.append(stock_class.mixin)
            stock_class = stock_class.stock_class
        return _new, (stock_class, *mixins), self.__dict__


def derived_class(mixin: type, stock_class: Any) -> Any:
    """The class that derives from a mixin (a [`Derived`]) and a stock class, with the name of the stock class."""
    return _made(mixin, stock_class)


# Apart from derived_class, as to mypy a class is no hashable argument.
@cache
def _made(mixin, stock_class):
    # Transformers looks up what it knows about a class by its names.
    names = {name: getattr(stock_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(stock_class.__name__, (mixin, stock_class), names | {"mixin": mixin, "stock_class": stock_class})


def _new(stock_class, *mixins):
    for mixin in reversed(mixins):
        stock_class = derived_class(mixin, stock_class)
    return object.__new__(stock_class)


class MaskedConfigMixin(_ConfigBase):
    """What the configuration of every model with a mask does differently."""

    def save_pretrained(self, save_directory: str | PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """
        Save the configuration as transformers does, with a note how the model is loaded. That of a BERT also names the
        code for environments without this package, which is written beside it.
        """
        drop_links([Path(save_directory, CONFIG_NAME)])
        saved = saved_fields(type(self).model_type)
        if self.output_attentions:
            del saved[ATTENTION_FIELD]  # with which transformers would not even read the configuration
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
        vars(self)[STOCK_NAMED] = value in TWINS

    def _remove_keys_not_serialized(self, d: dict[str, Any]) -> None:
        d.pop(STOCK_NAMED, None)
        super()._remove_keys_not_serialized(d)

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


def derive_configs(configs: Iterable[PreTrainedConfig]) -> None:
    """
    Have the configurations of a model with a mask say so when they are saved, also those that another model, of which
    it became a part, has given it.
    """
    for config in configs:
        if not isinstance(config, MaskedConfigMixin):
            config.__class__ = derived_class(AttachedConfig, type(config))
            forget_saved_fields(config)


def saved_fields(model_type: str) -> dict[str, Any]:
    """What is saved with the configuration of a model with a mask. Types other than BERT have no code, only a note."""
    note = f"This model has a sparse attention mask, in files of its own: {WITH_PACKAGE}"
    fields = {ATTENTION_FIELD: SAVED_NAME}
    if model_type not in ("bert", "sparsebert"):
        return fields | {NOTE_FIELD: f"{note}. Without it transformers refuses to load the model."}
    prefix = "Sparse" if model_type == "sparsebert" else ""
    auto_map = {auto: f"{CODE_PATH.stem}.{prefix}Bert{suffix}" for auto, suffix in AUTO_CLASSES.items()}
    if prefix:
        auto_map["AutoConfig"] = f"{CODE_PATH.stem}.SparseBertConfig"
    note += ". Once the mask is frozen, also an Auto class of transformers with trust_remote_code=True, but slower"
    return fields | {NOTE_FIELD: f"{note}.", AUTO_MAP_FIELD: auto_map}


def forget_saved_fields(config: Any) -> None:
    """Leave out of a configuration in memory the [`saved_fields`]. What `auto_map` says about other code stays."""
    attributes = vars(config)
    for name in (NOTE_FIELD, ATTENTION_FIELD):
        attributes.pop(name, None)
    if attributes.get("_attn_implementation_internal") in SAVED_NAMES:
        attributes["_attn_implementation_internal"] = None
    auto_map = attributes.pop(AUTO_MAP_FIELD, None)
    if isinstance(auto_map, dict):
        # A reference is "module.Class" or "user/repository--module.Class".
        ours = f"{CODE_PATH.stem}."
        auto_map = {auto: ref for auto, ref in auto_map.items() if not str(ref).rpartition("--")[2].startswith(ours)}
    if auto_map:
        attributes[AUTO_MAP_FIELD] = auto_map


def without_mask(source: str | PathLike) -> str:
    """That a configuration with the note of [`saved_fields`] has no mask beside it, for a message."""
    return (
        f"{source}: its configuration was saved with a mask, but beside it (without a connection: in the cache) there "
        f"is neither {MASK_CONFIG_NAME} nor {SEARCH_CONFIG_NAME}"
    )


def runs_without_package(saved: dict[str, Any], frozen: bool) -> bool:
    """Whether the saved code can run a model, given the file of its configuration and whether its mask is frozen."""
    mixers = set(saved.get("token_mixers") or ()) - {"attention"}
    softmax = saved.get("probability_map", "softmax") == "softmax"
    return frozen and AUTO_MAP_FIELD in saved and not mixers and softmax


def saved_with_code(cls: type, auto_class: str | type) -> bool:
    """
    Whether a class is one of this package, which is always saved with the code, so that nothing has to be registered.
    A `ValueError` says so if it is saved for another class than `auto_class`.
    """
    if not cls.__module__.startswith(f"{__package__}.bert."):
        return False
    saved = saved_fields("sparsebert")[AUTO_MAP_FIELD]
    own = [auto for auto, reference in saved.items() if reference == f"{CODE_PATH.stem}.{cls.__name__}"]
    name = auto_class if isinstance(auto_class, str) else auto_class.__name__
    if name not in own:
        raise ValueError(f"auto_class: {cls.__name__} is loaded by {' or '.join(own) or 'none'}, got {name!r}")
    return True
