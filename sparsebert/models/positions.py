"""
Learned position embeddings for inputs longer than a model was trained on.

Letters: n positions before, m after, o rows before the first position (RoBERTa counts from its padding token on), D
size of an embedding.
"""

import torch
from torch import nn

from ..checks import check_choice
from .token_mixers import fixed_length


METHODS = ("interpolate", "tile")


def _position_embeddings(model):
    """The module that holds them, their table, and o."""
    embeddings = getattr(model.base_model, "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    if not isinstance(table, nn.Embedding):
        raise ValueError(
            f"a model of type {model.config.model_type!r} has no learned embeddings of absolute positions in a text: "
            "there is nothing to extend"
        )
    return embeddings, table, 0 if table.padding_idx is None else table.padding_idx + 1


def extend_positions(model, length, method="interpolate"):
    """
    Give a model position embeddings for longer inputs, made of those that it has. It needs training at the new length
    to be as good there as it was before.

    Args:
        model (`PreTrainedModel`): Base model or head with learned absolute positions, with a mask or without. The
            configuration's `max_position_embeddings` changes too; a tokenizer's `model_max_length` is the caller's.
        length (`int`): m, tokens of the longest input from now on; more than n.
        method (`str`, *optional*, defaults to `"interpolate"`): `"interpolate"`: linearly between neighbours, the
            first and the last position stay what they are, the distance between any two tokens shrinks. `"tile"`: the
            table again from its beginning, the first n positions stay what they are.

    Returns:
        `model`, changed in place.
    Raises:
        ValueError: If the model has no such embeddings, its inputs have a fixed length (the token mixer bproj),
            `length` is not more than it has, or `method` is unknown.

    Source: An Image is Worth 16x16 Words (arXiv 2010.11929), Section 3.2 (interpolate, there in two dimensions);
    Longformer (arXiv 2004.05150), Section 5 (tile).
    """
    check_choice("method", method, METHODS)
    embeddings, table, offset = _position_embeddings(model)
    if fixed_length(model.config) is not None:
        raise ValueError("the token mixer 'bproj' has one length for all inputs: its positions cannot be extended")
    old = table.weight.detach()
    known = len(old) - offset
    if isinstance(length, bool) or not isinstance(length, int) or length <= known:
        raise ValueError(f"length must be a whole number above the {known} positions that there are, got {length!r}")
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
