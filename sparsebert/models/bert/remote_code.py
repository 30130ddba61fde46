"""
What a saved model needs to run where this package is not installed: a file of code, which `trust_remote_code=True`
runs, the fields of its configuration that name it, and the warning when its mask is missing.
"""

from os import PathLike
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...masks.mask_files import MASK_CONFIG_NAME, SEARCH_CONFIG_NAME


logger = logging.get_logger(__name__)

CODE_PATH = Path(__file__).with_name("modeling_frozen_sparsebert.py")

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
NOTE_FIELD = "how_to_load"
AUTO_MAP_FIELD = "auto_map"
_WITH_PACKAGE = "pip install sparsebert, then sparsebert.load"


def saved_fields(model_type: str) -> dict[str, Any]:
    """
    The fields that the configuration of a model with a mask is saved with.

    Args:
        model_type (`str`): Type of the model. Those other than BERT have no code, only a note.
    """
    note = f"This model has a sparse attention mask, in files of its own: {_WITH_PACKAGE}"
    if model_type not in ("bert", "sparsebert"):
        return {NOTE_FIELD: f"{note}. Without it transformers loads the model without the mask."}
    prefix = "Sparse" if model_type == "sparsebert" else ""
    auto_map = {auto: f"{CODE_PATH.stem}.{prefix}Bert{suffix}" for auto, suffix in AUTO_CLASSES.items()}
    if prefix:
        auto_map["AutoConfig"] = f"{CODE_PATH.stem}.SparseBertConfig"
    note += ". Once the mask is frozen, also an Auto class of transformers with trust_remote_code=True, but slower"
    if not prefix:
        note += "; without that transformers loads the model without the mask"
    return {NOTE_FIELD: f"{note}.", AUTO_MAP_FIELD: auto_map}


def without_saved_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """
    Fields of a configuration without those of [`saved_fields`]. What `auto_map` says about other code stays.
    """
    kept = {name: value for name, value in fields.items() if name not in (NOTE_FIELD, AUTO_MAP_FIELD)}
    auto_map = fields.get(AUTO_MAP_FIELD)
    if not isinstance(auto_map, dict):
        return kept if auto_map is None else kept | {AUTO_MAP_FIELD: auto_map}
    # A reference is "module.Class" or "user/repository--module.Class".
    ours = f"{CODE_PATH.stem}."
    others = {auto: ref for auto, ref in auto_map.items() if not str(ref).rpartition("--")[2].startswith(ours)}
    return kept | {AUTO_MAP_FIELD: others} if others else kept


def forget_saved_fields(config: Any) -> None:
    """
    Leave out of a configuration in memory what only its file has, see [`saved_fields`].

    Args:
        config (`PreTrainedConfig`): Changed in place.
    """
    attributes = vars(config)
    kept = without_saved_fields(attributes)
    for name in attributes.keys() - kept.keys():
        del attributes[name]
    attributes.update(kept)


def warn_of_missing_mask(source: str | PathLike, outcome: str) -> None:
    """
    Say that a configuration with the note of [`saved_fields`] has no mask beside it.

    Args:
        source (`str` or `os.PathLike`): Folder or Hub id of the model.
        outcome (`str`): What happens instead.
    """
    logger.warning(
        f"{source}: its configuration was saved with a mask, but beside it (without a connection: in the cache) there "
        f"is neither {MASK_CONFIG_NAME} nor {SEARCH_CONFIG_NAME}: {outcome}"
    )


def runs_without_package(saved: dict[str, Any], frozen: bool) -> bool:
    """
    Whether the code that is saved with a model can run it.

    Args:
        saved (`dict`): What the file of its configuration says.
        frozen (`bool`): Whether its mask is.
    """
    mixers = set(saved.get("token_mixers") or ()) - {"attention"}
    softmax = saved.get("probability_map", "softmax") == "softmax"
    return frozen and AUTO_MAP_FIELD in saved and not mixers and softmax


def saved_with_code(cls: type, auto_class: str | type) -> bool:
    """
    Whether a class is one that is always saved with the code above, so that nothing has to be registered.

    Args:
        cls (`type`): A configuration or model of this package, or a class derived from one.
        auto_class (`str` or `type`): The class of transformers that is to load it.

    Raises:
        ValueError: If it is always saved for another one.
    """
    if not cls.__module__.startswith(f"{__package__}."):
        return False
    saved = saved_fields("sparsebert")[AUTO_MAP_FIELD]
    own = [auto for auto, reference in saved.items() if reference == f"{CODE_PATH.stem}.{cls.__name__}"]
    name = auto_class if isinstance(auto_class, str) else auto_class.__name__
    if name not in own:
        raise ValueError(f"auto_class: {cls.__name__} is loaded by {' or '.join(own) or 'none'}, got {name!r}")
    return True
