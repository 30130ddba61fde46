"""Which stock encoders can carry a mask, and what is read off them. Adding one is a row, and its row in the tests."""

import torch

from .configuration_sparsebert import SparseBertConfig


# Model type to the class of its self-attention. All hand the keyword arguments of their base model on to the host's
# attention function, which is how a mask reaches it.
ARCHITECTURES = {
    "albert": "AlbertAttention",
    "bert": "BertSelfAttention",
    "camembert": "CamembertSelfAttention",
    "distilbert": "DistilBertSelfAttention",
    "electra": "ElectraSelfAttention",
    "eurobert": "EuroBertAttention",
    "mobilebert": "MobileBertSelfAttention",
    "modernbert": "ModernBertAttention",
    "roberta": "RobertaSelfAttention",
    "sparsebert": "BertSelfAttention",
    "vit": "ViTAttention",
    "xlm-roberta": "XLMRobertaSelfAttention",
}


def check_architecture(model_type):
    """
    Raises:
        ValueError: If models of this type cannot carry a mask.
    """
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"a model of type {model_type!r} cannot carry a mask: use one of "
            f"{', '.join(name for name in ARCHITECTURES if name != 'sparsebert')}"
        )


def attention_modules(model):
    """Self-attention modules of a model of one of the `ARCHITECTURES`, in the order of their layers."""
    name = ARCHITECTURES[model.config.model_type]
    return [
        module for module in model.base_model.modules() if any(base.__name__ == name for base in type(module).__mro__)
    ]


def describe(model, **fields):
    """
    The mask of a stock model as a configuration of ours.

    Args:
        model (`PreTrainedModel`): Gives heads, layers, sizes and name.
        fields: Of [`SparseBertConfig`], about the mask.

    Returns:
        [`SparseBertConfig`]
    """
    config = model.config
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or getattr(config, "true_hidden_size", config.hidden_size) // heads
    dropout = "attention_dropout" if hasattr(config, "attention_dropout") else "attention_probs_dropout_prob"
    description = SparseBertConfig(
        hidden_size=heads * head_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        max_position_embeddings=num_positions(config),
        is_decoder=bool(getattr(config, "is_decoder", False)),
        attention_probs_dropout_prob=getattr(config, dropout),
        **fields,
    )
    description.name_or_path = config.name_or_path
    description._commit_hash = getattr(config, "_commit_hash", None)
    return description


def sliding_window(config):
    """
    Layers of a model in which a token attends to its neighbourhood only.

    Returns:
        `tuple`: The farthest offset that they attend to, or `None`, and a `tuple` of their indices.
    """
    kinds = getattr(config, "layer_types", None) or ()
    local = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    return (config.sliding_window, local) if local else (None, ())


def num_positions(config):
    """Tokens of the longest input that a model takes."""
    if config.model_type in ("camembert", "roberta", "xlm-roberta"):
        return config.max_position_embeddings - config.pad_token_id - 1  # positions are counted from there
    if hasattr(config, "max_position_embeddings"):
        return config.max_position_embeddings
    return _num_patches(config, *_pair(config.image_size)) + 1


def _pair(size):
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def _num_patches(config, height, width):
    rows, columns = _pair(config.patch_size)
    return (height // rows) * (width // columns)


def input_shape(config, given):
    """
    Of the arguments of a forward: batch B, length n (with the class token of an image), and the device.

    Returns:
        `tuple`, or `None` when there is no input.
    """
    pixels = given.get("pixel_values")
    if torch.is_tensor(pixels):
        return pixels.shape[0], _num_patches(config, *pixels.shape[-2:]) + 1, pixels.device
    states = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    return None if states is None else (states.shape[0], states.shape[1], states.device)
