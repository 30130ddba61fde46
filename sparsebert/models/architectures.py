"""
The stock encoders that can carry a mask, and what has to be known about them. A new one is a row here and a row in the
tests.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.interface import ARCHITECTURES
from ..hub import commit_of
from ..learning.mask_description import Carrier, MaskDescription, default_mask_length
from .families import layoutlm, mpnet, t5


# Model type to the class of its self-attention. It passes the keyword arguments of the base model on to the attention
# function of transformers, which is how a mask reaches it, unless `FAMILIES` say otherwise.
ARCHITECTURES |= {
    "albert": "AlbertAttention",
    "bert": "BertSelfAttention",
    "camembert": "CamembertSelfAttention",
    "deit": "DeiTAttention",
    "dinov2": "Dinov2Attention",
    "distilbert": "DistilBertSelfAttention",
    "electra": "ElectraSelfAttention",
    "ernie": "ErnieSelfAttention",
    "esm": "EsmSelfAttention",
    "eurobert": "EuroBertAttention",
    "gte": "GteAttention",
    "jina_embeddings_v3": "JinaEmbeddingsV3Attention",
    "layoutlm": "LayoutLMSelfAttention",
    "mobilebert": "MobileBertSelfAttention",
    "modernbert": "ModernBertAttention",
    "mpnet": "MPNetSelfAttention",
    "mt5": "MT5Attention",
    "nomic_bert": "NomicBertAttention",
    "roberta": "RobertaSelfAttention",
    "roberta-prelayernorm": "RobertaPreLayerNormSelfAttention",
    "sparsebert": "BertSelfAttention",
    "t5": "T5Attention",
    "ultrabert": "UltrabertAttention",
    "umt5": "UMT5Attention",
    "vit": "ViTAttention",
    "xlm-roberta": "XLMRobertaSelfAttention",
    "xmod": "XmodSelfAttention",
}

# Model types of which parts are ours while they carry a mask, and the modules with these.
FAMILIES: dict[str, Any] = {"layoutlm": layoutlm, "mpnet": mpnet, **dict.fromkeys(t5.MODEL_TYPES, t5)}
# Those whose scores have a bias per distance.
DISTANCE_BIASED = tuple(name for name, family in FAMILIES.items() if hasattr(family, "bias_by_distance"))
# Why a mask has no meaning for the attention of some types.
_DISENTANGLED = "Its scores depend on what a token is and on where another one is, which no bias per distance can say"
_SPARSE = "Its attention does not compute the scores of all pairs of tokens, from which a mask could take some"
_OTHER_ATTENTION = dict.fromkeys(("deberta", "deberta-v2"), _DISENTANGLED) | dict.fromkeys(
    ("big_bird", "fnet", "longformer", "nystromformer", "reformer", "yoso"), _SPARSE
)
# Classes of models that are parts of others, and none by themselves.
INNER = ("Dinov2Encoder", "MT5Stack", "T5Stack", "UMT5Stack")
# Model types whose embeddings mix the tokens of a row: those of MobileBERT are of trigrams, ESM scales by the share of
# masked ones.
MIXES_TOKENS = ("esm", "mobilebert")
# Model types that count positions from the one after that of the padding token.
_AFTER_PADDING = ("camembert", "esm", "roberta", "roberta-prelayernorm", "xlm-roberta", "xmod")
# Longer than any input: a model with relative positions alone has no longest one.
_NO_END = 2**20


def check_architecture(model_type: str) -> None:
    """Check that models of a type can carry a mask, that is, that it is one of the `ARCHITECTURES`."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"a model of type {model_type!r} cannot carry a mask: use one of "
            f"{', '.join(name for name in ARCHITECTURES if name != 'sparsebert')}{_what_is_missing(model_type)}"
        )


def _what_is_missing(model_type):
    """What would have to be written for models of another type, for a message."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found = getattr(transformers, str(MODEL_MAPPING_NAMES.get(model_type)), None)
    if found is None:
        return ""
    if model_type in _OTHER_ATTENTION:
        return f". {_OTHER_ATTENTION[model_type]}"
    if hasattr(sys.modules[found.__module__], "ALL_ATTENTION_FUNCTIONS"):
        how = "takes an attention function: if it is an encoder, it may need no more than a row in ARCHITECTURES"
    else:
        how = "takes no attention function: it would need a forward of its own, as MPNet has one"
    return f". The attention of {found.__name__} {how} (docs/extending.md, An architecture)"


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """
    The self-attention modules of a model of one of the `ARCHITECTURES` by their names in its base model, in the order
    of their layers.
    """
    name, modules = ARCHITECTURES[model.config.model_type], model.base_model.named_modules()
    return {place: module for place, module in modules if any(base.__name__ == name for base in type(module).__mro__)}


def has_decoder(model: PreTrainedModel) -> bool:
    """Whether a model has a decoder, which the configuration of a T5 does not tell: its encoder may share it."""
    if model.config.model_type in t5.MODEL_TYPES:
        return any(getattr(part, "is_decoder", False) for part in model.modules())
    return any(getattr(model.config, name, False) for name in ("is_decoder", "is_encoder_decoder"))


def configs_of(model: PreTrainedModel) -> list[Any]:
    """The configurations of a model, of its base model, and of the stack of a UMT5, which has one of its own."""
    parts = (part for part in (model, *model.base_model.modules()) if isinstance(part, PreTrainedModel))
    own = {id(part.config): part.config for part in parts if part.config.model_type == model.config.model_type}
    return list(own.values())


def carrier_of(model: PreTrainedModel) -> Carrier:
    """What the mask of a stock model has to know about it."""
    config = model.config
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or getattr(config, "true_hidden_size", config.hidden_size) // heads
    names = ("attention_dropout", "attention_probs_dropout_prob", "dropout_rate")
    window, local_layers = sliding_window(config)
    return Carrier(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        head_size=head_size,
        num_positions=num_positions(config),
        is_decoder=bool(getattr(config, "is_decoder", False)),
        dropout=next(getattr(config, name) for name in names if hasattr(config, name)),
        name=config.name_or_path or "",
        revision=commit_of(config),
        window=window,
        local_layers=local_layers,
        one_layer=shares_weights(config),
        distance_bias=config.model_type in DISTANCE_BIASED,
    )


def bias_by_distance(model: PreTrainedModel, length: int) -> tuple[torch.Tensor, ...] | None:
    """
    What a base model adds to all scores by distance, of all layers or of each: `(H, 2n - 1)`, that of i - j in column
    i - j + n - 1. `None`, if it adds nothing.
    """
    model_type = model.config.model_type
    return FAMILIES[model_type].bias_by_distance(model, length) if model_type in DISTANCE_BIASED else None


def shares_weights(config: PreTrainedConfig) -> bool:
    """Whether several layers have the same weights, as in ALBERT, so that an attention module is not one layer's."""
    groups = getattr(config, "num_hidden_groups", config.num_hidden_layers)
    return groups != config.num_hidden_layers or getattr(config, "inner_group_num", 1) > 1


def describe(model: PreTrainedModel, **fields: Any) -> MaskDescription:
    """The description of a mask for a stock model; a `ValueError` if a field is out of its range or has no meaning."""
    config = model.config
    if fields.get("skip_padding") and config.model_type in MIXES_TOKENS:
        raise ValueError(
            f"skip_padding true has no meaning for a model of type {config.model_type!r}, which mixes the tokens of a "
            "row outside attention: set it to false"
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
    return config.pad_token_id + 1 if config.model_type in _AFTER_PADDING else 0


def num_positions(config: PreTrainedConfig) -> int:
    """Number of tokens of the longest input that a model takes."""
    if hasattr(config, "max_position_embeddings"):
        return config.max_position_embeddings - first_position(config)
    return _num_patches(config, *_pair(config.image_size)) + _class_tokens(config) if reads_images(config) else _NO_END


def reads_images(config: PreTrainedConfig) -> bool:
    """Whether the tokens of a model are the patches of an image."""
    return hasattr(config, "patch_size")


def _class_tokens(config):
    return 2 if config.model_type == "deit" else 1  # which also has one that is distilled


def _pair(size):
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def _num_patches(config, height, width):
    rows, columns = _pair(config.patch_size)
    return (height // rows) * (width // columns)


def input_shape(config: PreTrainedConfig, given: Mapping[str, Any]) -> tuple[int, int, torch.device] | None:
    """Batch size, length (with the class tokens of an image) and device of the input in the arguments of a forward."""
    pixels = given.get("pixel_values")
    if torch.is_tensor(pixels):
        return pixels.shape[0], _num_patches(config, *pixels.shape[-2:]) + _class_tokens(config), pixels.device
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    states = given.get(name)
    if states is None:
        return None
    if not torch.is_tensor(states) or states.dim() < 2:
        got = f"shape {tuple(states.shape)}" if torch.is_tensor(states) else type(states).__name__
        raise ValueError(f"{name} must be a tensor of a batch of sequences, with a dimension for each, got {got}")
    return states.shape[0], states.shape[1], states.device


def cached_length(given: Mapping[str, Any]) -> int:
    """Number of tokens in the key/value cache among the arguments of a forward, 0 without one."""
    # Since transformers 5.24 the argument is `cache`; `past_key_values` is still accepted.
    caches = (given.get(name) for name in ("cache", "past_key_values"))
    return next((cache.get_seq_length() for cache in caches if cache is not None), 0)
