"""
Learned position embeddings for inputs longer than a model was trained on.

Letters: n positions before, m after, o rows before the first position (RoBERTa starts after its padding token), D size
of an embedding.
"""

from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.model_masks import without_adapters
from ..checks import check_choice
from .architectures import first_position
from .bert.token_mixers import fixed_length
from .inference.compiled_models import check_not_compiled


METHODS = ("tile", "interpolate")
# More than any encoder takes: a slip of the keyboard must not ask for all memory.
MAX_POSITIONS = 2**20

Model = TypeVar("Model", bound=PreTrainedModel)


def _position_embeddings(model):
    """The module with the position embeddings, their table, and o."""
    check_not_compiled(model, "extend_positions")
    embeddings = getattr(model.base_model, "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    if not isinstance(table, nn.Embedding):
        raise ValueError(
            f"a model of type {model.config.model_type!r} has no learned embeddings of absolute positions to extend"
        )
    return embeddings, table, first_position(model.config)


def extend_positions(model: Model, length: int, method: str = "tile") -> Model:
    """
    Extend the position embeddings of a model for longer inputs, starting from those that it has. To be as good at the
    new length as at the old one, the model needs some training at the new length.

    Args:
        model (`PreTrainedModel`): A base model or head with learned absolute positions, with or without a mask. The
            configuration's `max_position_embeddings` changes too; a tokenizer's `model_max_length` does not.
        length (`int`): m, the new number of tokens of the longest input, more than n.
        method (`str`, *optional*, defaults to `"tile"`): `"tile"` repeats the table: nothing changes for inputs of up
            to n tokens. `"interpolate"` interpolates linearly between neighbors: the first and the last position stay
            the same, and the distance between any two tokens shrinks, also in short inputs.

    Returns:
        `model`, changed in place.
    Raises:
        ValueError: If the model has no such embeddings, its inputs have a fixed length (the token mixer bproj),
            `length` is not above n or beyond `MAX_POSITIONS`, or `method` is unknown.

    Source: Longformer (arXiv 2004.05150), Section 5 (tile); An Image is Worth 16x16 Words (arXiv 2010.11929), Section
    3.2 (interpolate, there in two dimensions).
    """
    check_choice("method", method, METHODS)
    if not hasattr(model, "base_model"):
        raise ValueError(f"expected a model of transformers, got {type(model).__name__}")
    embeddings, table, offset = _position_embeddings(without_adapters(model))
    if fixed_length(model.config) is not None:
        raise ValueError("the token mixer 'bproj' takes inputs of one length: its positions cannot be extended")
    old = table.weight.detach()
    known = len(old) - offset
    if isinstance(length, bool) or not isinstance(length, int) or not known < length <= MAX_POSITIONS:
        raise ValueError(
            f"length must be an integer above the model's {known} positions, at most {MAX_POSITIONS}, got {length!r}"
        )
    positions = old[offset:]  # (n, D)
    if method == "tile":
        positions = positions.repeat(-(-length // known), 1)[:length]
    else:
        positions = nn.functional.interpolate(
            positions.float().T[None], size=length, mode="linear", align_corners=True
        )[0].T.to(old.dtype)
    table.weight = nn.Parameter(torch.cat([old[:offset], positions]), requires_grad=table.weight.requires_grad)
    table.num_embeddings = offset + length
    model.config.max_position_embeddings = offset + length
    for name in ("position_ids", "token_type_ids"):
        buffer = getattr(embeddings, name, None)
        if buffer is not None:
            row = torch.arange(offset + length) if name == "position_ids" else torch.zeros(offset + length)
            setattr(embeddings, name, row[None].to(buffer))
    return model


__all__ = ["extend_positions"]
