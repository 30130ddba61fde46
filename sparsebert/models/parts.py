"""
Models made of several: each part that carries a mask has a folder of its own for it beside the whole model, whose
configuration names the parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, logging

from ..attention.choosing.choice import SAVED_NAME
from ..attention.model_masks import sparse_attention_of
from ..file_kinds import kind_of
from ..masks.mask_cards import CARD_NAME, own_card
from ..masks.mask_files import MASK_STATE, NOTE_FIELD, PARTS_FIELD, MaskFileError, are_parts, folder_of_part
from .coverage import is_inside
from .model_configs import ATTENTION_FIELD, CONFIGS_BEFORE, WITH_PACKAGE, MaskedConfigMixin, forget_saved_fields
from .saving import SparseModelMixin, save_with_adapter


logger = logging.get_logger(__name__)


def parts_with_mask(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The outermost models inside a model, by name, whose masks are not saved with the model itself."""
    own = sparse_attention_of(model) if isinstance(model, SparseModelMixin) else None
    own = model._modules.get("sparse_attention", own)
    parts: dict[str, PreTrainedModel] = {}
    for name, part in model.named_modules():
        found = sparse_attention_of(part) if name and isinstance(part, PreTrainedModel) else None
        if found is None or found is own or any(is_inside(name, other) for other in parts):
            continue
        # A SparseBERT has its search or pattern in its configuration, and the logits in the weights.
        in_config = found.searching or found.config.pattern is not None
        if (found.mask is None and not found.searching) or (part.config.model_type == "sparsebert" and in_config):
            continue
        parts[name] = part
    return parts


def check_names(names: Any, source: str | PathLike) -> None:
    """Check that the configuration of a model from `source` names its parts with a mask, and not other folders."""
    if not are_parts(names):
        raise MaskFileError(f"{source}: {PARTS_FIELD} in {CONFIG_NAME} must be a list of parts, got {names!r}")


@contextmanager
def named_in_config(config: PreTrainedConfig, names: list[str]) -> Iterator[None]:
    """
    A configuration that names the parts with a mask and, meanwhile, says how the model is loaded. It goes on to name
    them: a model that is then saved without the plugin cannot be loaded without its masks.
    """
    attributes = vars(config)
    attributes.pop(PARTS_FIELD, None)
    saved: dict[str, Any] = {}
    if names:
        attributes[PARTS_FIELD] = names
    if names and not isinstance(config, MaskedConfigMixin):  # which says it itself
        note = f"Parts of this model have sparse attention masks, in folders of their own: {WITH_PACKAGE}"
        saved[NOTE_FIELD] = f"{note}. Without it transformers refuses to load the model."
        if not any(each.output_attentions for each in _configs(config)):
            saved[ATTENTION_FIELD] = SAVED_NAME
    attributes.update(saved)
    try:
        yield
    finally:
        for name in saved:
            attributes.pop(name, None)


def take_over_configs(model: PreTrainedModel) -> None:
    """Have the configuration of a whole hold the current ones of its parts, which attaching a mask has copied."""
    now = {
        id(before): vars(module)["config"]
        for module in model.modules()
        for before in vars(module).get(CONFIGS_BEFORE, ())
    }
    for config in list(_configs(model.config)):
        for name in config.sub_configs:
            if (replaced := now.get(id(getattr(config, name, None)))) is not None:
                setattr(config, name, replaced)


def _configs(config):
    """A configuration and those of its parts."""
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from _configs(part)


def save_parts(parts: dict[str, PreTrainedModel], folder: Path) -> None:
    """Write the masks of the parts of a model that was saved in a folder, and the logits of those being searched."""
    for name, part in parts.items():
        path = folder / folder_of_part(name)
        if kind_of(path) == "link":
            path.unlink()
        path.mkdir(exist_ok=True)
        save_with_adapter(sparse_attention_of(part), path)


def remove_parts(names: list[str], folder: Path) -> None:
    """Remove the masks of parts from the folder of a model, and their folders if nothing else is in them."""
    for name in names:
        path = folder / folder_of_part(name)
        if kind_of(path) != "folder":
            continue
        card = CARD_NAME if own_card(path / CARD_NAME) else MASK_STATE[0]
        for each in (*MASK_STATE, card):
            (path / each).unlink(missing_ok=True)
        if not any(path.iterdir()):
            path.rmdir()


def forget_in_parts(model: PreTrainedModel) -> None:
    """Give a model that was loaded with the attention implementation of [`named_in_config`] that of a stock one."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)][::-1]  # inner ones first
    for part in models:  # each by its own rule, before the parts of a configuration by the rule of who has it
        forget_saved_fields(part.config)
        if part.config._attn_implementation is None:
            part.config._attn_implementation_internal = part.get_correct_attn_implementation(None)
    for part in models:
        for module in part.modules():
            if not isinstance(found := vars(module).get("config"), PreTrainedConfig):
                continue
            for config in _configs(found):
                forget_saved_fields(config)
                if config._attn_implementation is None:
                    config._attn_implementation_internal = part.get_correct_attn_implementation(None)


def warn_of_parts(model: PreTrainedModel) -> None:
    """Say that an adapter is saved without the masks of the parts of its model."""
    if parts := parts_with_mask(model):
        logger.warning(
            f"the adapter is saved without the masks of {', '.join(parts)} in its {type(model).__name__}: they come "
            "back with the base model if that was saved with them"
        )
