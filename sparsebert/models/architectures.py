"""
The stock encoders that can carry a mask, and what has to be known about them. A new one is a row here and a row in the
tests.
"""

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..hub import commit_of
from ..learning.mask_description import Carrier, MaskDescription, default_mask_length
from .families import mpnet


# Model type to the class of its self-attention. All but those in `FAMILIES` pass the keyword arguments of the base
# model on to the attention function of transformers, which is how a mask reaches it.
ARCHITECTURES = {
    "albert": "AlbertAttention",
    "bert": "BertSelfAttention",
    "camembert": "CamembertSelfAttention",
    "distilbert": "DistilBertSelfAttention",
    "electra": "ElectraSelfAttention",
    "eurobert": "EuroBertAttention",
    "mobilebert": "MobileBertSelfAttention",
    "modernbert": "ModernBertAttention",
    "mpnet": "MPNetSelfAttention",
    "roberta": "RobertaSelfAttention",
    "sparsebert": "BertSelfAttention",
    "vit": "ViTAttention",
    "xlm-roberta": "XLMRobertaSelfAttention",
}

# Model types whose attention transformers runs without its interface, and the modules with what is ours in them.
FAMILIES = {"mpnet": mpnet}
# Model types whose layers other than attention mix neighboring tokens: the embeddings of MobileBERT are of trigrams.
MIXES_NEIGHBORS = ("mobilebert",)


def check_architecture(model_type: str) -> None:
    """Check that models of a type can carry a mask, that is, that it is one of the `ARCHITECTURES`."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"a model of type {model_type!r} cannot carry a mask: use one of "
            f"{', '.join(name for name in ARCHITECTURES if name != 'sparsebert')}"
        )


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """
    The self-attention modules of a model of one of the `ARCHITECTURES` by their names in its base model, in the order
    of their layers.
    """
    name, modules = ARCHITECTURES[model.config.model_type], model.base_model.named_modules()
    return {place: module for place, module in modules if any(base.__name__ == name for base in type(module).__mro__)}


def carrier_of(model: PreTrainedModel) -> Carrier:
    """What the mask of a stock model has to know about it."""
    config = model.config
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or getattr(config, "true_hidden_size", config.hidden_size) // heads
    dropout = "attention_dropout" if hasattr(config, "attention_dropout") else "attention_probs_dropout_prob"
    window, local_layers = sliding_window(config)
    return Carrier(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        head_size=head_size,
        num_positions=num_positions(config),
        is_decoder=bool(getattr(config, "is_decoder", False)),
        dropout=getattr(config, dropout),
        name=config.name_or_path or "",
        revision=commit_of(config),
        window=window,
        local_layers=local_layers,
        one_layer=shares_weights(config),
        distance_bias=config.model_type in FAMILIES,
    )


def shares_weights(config: PreTrainedConfig) -> bool:
    """Whether several layers have the same weights, as in ALBERT, so that an attention module is not one layer's."""
    groups = getattr(config, "num_hidden_groups", config.num_hidden_layers)
    return groups != config.num_hidden_layers or getattr(config, "inner_group_num", 1) > 1


def describe(model: PreTrainedModel, **fields: Any) -> MaskDescription:
    """The description of a mask for a stock model; a `ValueError` if a field is out of its range or has no meaning."""
    config = model.config
    if fields.get("skip_padding") and config.model_type in MIXES_NEIGHBORS:
        raise ValueError(
            f"skip_padding true has no meaning for a model of type {config.model_type!r}, which mixes neighboring "
            "tokens outside attention: set it to false"
        )
    longest = num_positions(config)
    if fields.get("mask_length") is None:
        fields["mask_length"] = default_mask_length(longest)
    try:
        description = MaskDescription(**fields)
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error
    description.check_carrier(bool(getattr(config, "is_decoder", False)), longest)
    return description


def sliding_window(config: PreTrainedConfig) -> tuple[int | None, tuple[int, ...]]:
    """The largest offset that a token attends to in layers with a sliding window, and the indices of these layers."""
    kinds = getattr(config, "layer_types", None) or ()
    local = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    return (config.sliding_window, local) if local else (None, ())


def first_position(config: PreTrainedConfig) -> int:
    """Position of the first token: 0, or in a RoBERTa the one after that of its padding token."""
    if config.model_type == "mpnet":
        return 2  # whatever its padding token
    return config.pad_token_id + 1 if config.model_type in ("camembert", "roberta", "xlm-roberta") else 0


def num_positions(config: PreTrainedConfig) -> int:
    """Number of tokens of the longest input that a model takes."""
    if hasattr(config, "max_position_embeddings"):
        return config.max_position_embeddings - first_position(config)
    return _num_patches(config, *_pair(config.image_size)) + 1


def _pair(size):
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def _num_patches(config, height, width):
    rows, columns = _pair(config.patch_size)
    return (height // rows) * (width // columns)


def input_shape(config: PreTrainedConfig, given: Mapping[str, Any]) -> tuple[int, int, torch.device] | None:
    """Batch size, length (with the class token of an image) and device of the input in the arguments of a forward."""
    pixels = given.get("pixel_values")
    if torch.is_tensor(pixels):
        return pixels.shape[0], _num_patches(config, *pixels.shape[-2:]) + 1, pixels.device
    states = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    return None if states is None else (states.shape[0], states.shape[1], states.device)


def cached_length(given: Mapping[str, Any]) -> int:
    """Number of tokens in the key/value cache among the arguments of a forward, 0 without one."""
    # Since transformers 5.24 the argument is `cache`; `past_key_values` is still accepted.
    caches = (given.get(name) for name in ("cache", "past_key_values"))
    return next((cache.get_seq_length() for cache in caches if cache is not None), 0)
