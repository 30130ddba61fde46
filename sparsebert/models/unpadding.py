"""
Packed rows, whose documents attend to themselves only, and padded batches that run as one packed row.

Letters: B rows, n tokens per row, T tokens in all documents, D hidden size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..attention.packed_batches import DocumentSpans, packed_documents, row_documents
from ..masks.exported import exporting
from .architectures import MIXES_TOKENS, cached_length, first_position


# Heads whose output is that of a row's first token, or is normalized over the row: they know no documents.
HEADS_OF_ROWS = ("ForSequenceClassification", "ForNextSentencePrediction", "ForMultipleChoice", "ForQuestionAnswering")
# Labels of a head on the first token beside one on all tokens.
LABELS_OF_ROWS = ("next_sentence_label", "sentence_order_label")

Restore = Callable[[Any], Any]


def find_documents(given: Mapping[str, Any], batch: int, length: int, device: torch.device) -> DocumentSpans | None:
    """
    The documents of a batch whose `position_ids` restart within a row, see [`packed_documents`]. A 4-D mask already
    says what attends to what, and in an exported graph the question would depend on data.
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None or exporting() or (mask is not None and mask.dim() > 2) or cached_length(given):
        return None
    real = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask.to(device).bool()
    return packed_documents(positions.to(device).expand(batch, length), real)


def check_head(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse packed rows for a head that knows no documents."""
    positions = given.get("position_ids")
    if positions is None or torch.compiler.is_compiling():
        return
    names = [cls.__name__ for cls in type(model).__mro__]
    labels = [name for name in LABELS_OF_ROWS if given.get(name) is not None]
    if not labels and not any(name.endswith(HEADS_OF_ROWS) for name in names):
        return
    flat = {
        name: value.reshape(-1, value.shape[-1]) if name == "position_ids" or value.dim() == 3 else value
        for name, value in given.items()
        if name in ("position_ids", "attention_mask") and value is not None
    }
    batch, length = flat["position_ids"].shape
    if batch == 1 and "attention_mask" in flat:
        batch = len(flat["attention_mask"])  # the same positions in every row
    if find_documents(flat, batch, length, positions.device) is not None:
        what = labels[0] if labels else f"{type(model).__name__}"
        raise ValueError(
            f"position_ids restart within a row, but {what} is about whole rows: pass one document per row, padded "
            "(skip_padding leaves out what padding costs)"
        )


def mixes_tokens(config: PreTrainedConfig) -> str | None:
    """What in a base model mixes the tokens of a row other than attention, or `None`."""
    mixers = set(getattr(config, "token_mixers", None) or ()) - {"attention"}
    if mixers:
        return f"the token mixer {min(mixers)!r}"
    return f"a model of type {config.model_type!r}" if config.model_type in MIXES_TOKENS else None


def check_documents(model: Any) -> None:
    """Refuse packed rows if a part of a base model other than attention mixes the tokens of a row."""
    if part := mixes_tokens(model.config):
        raise ValueError(
            f"position_ids restart within a row, but {part} mixes the tokens of a row outside attention: "
            "pass one document per row"
        )


def removable(
    model: Any, padding: torch.Tensor, documents: DocumentSpans | None, needs: set[str]
) -> DocumentSpans | None:
    """
    The documents of a padded batch that a base model can run without its padding `(B, n)`, or `None` if it cannot:
    attention probabilities (`needs`) are those of the padded batch.
    """
    sparse_attention = model.sparse_attention
    if needs or sparse_attention.weights_wanted or torch.compiler.is_compiling() or exporting():
        return None
    rules = sparse_attention.search or sparse_attention.mask
    if documents is None and rules and rules.special_tokens == "first_last" and rules.last_token == "position":
        return None  # position n - 1, be it padding or not
    documents = documents or row_documents(padding)
    return documents if documents is not None and documents.contiguous else None


def without_padding(
    model: Any, names: list[str], given: Mapping[str, Any], documents: DocumentSpans, padding: torch.Tensor
) -> tuple[dict[str, Any], Restore]:
    """
    The arguments of a base model for a single row that holds the tokens of its documents alone, and a function that
    makes of its output that of the padded batch, where the hidden states of padding are 0.
    """
    batch, length = padding.shape
    packed = dict(given)
    if "token_type_ids" in names and packed.get("token_type_ids") is None:
        packed["token_type_ids"] = torch.zeros_like(padding, dtype=torch.long)
    if packed.get("position_ids") is None:
        packed["position_ids"] = default_positions(model.config, packed.get("input_ids"), padding)
    for name in ("input_ids", "inputs_embeds", "token_type_ids", "task_type_ids", "position_ids", "bbox", "lang_ids"):
        if (values := packed.get(name)) is not None:
            values = values[:, None] if name == "lang_ids" and values.dim() == 1 else values
            values = values.expand(batch, length, *values.shape[2:])
            packed[name] = values.flatten(0, 1)[documents.tokens.to(values.device)][None]
    packed["attention_mask"] = None
    packed["return_dict"] = True
    wanted = given.get("return_dict")
    as_dict = model.config.return_dict if wanted is None else wanted

    def padded(states):
        flat = states.new_zeros(batch * length, states.shape[-1])
        return flat.index_copy(0, documents.tokens.to(states.device), states[0]).view(batch, length, -1)

    def restore(output):
        output["last_hidden_state"] = padded(output.last_hidden_state)
        if output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(map(padded, output.hidden_states))
        if output.get("pooler_output") is not None:
            output["pooler_output"] = pooled(model, output.last_hidden_state[:, :1])
        if as_dict:
            return output
        first, *others = output.to_tuple()
        # The tuple of an MPNet has a place for what it does not pool.
        return (first, None, *others) if model.config.model_type == "mpnet" and not model.pooler else (first, *others)

    return packed, restore


def default_positions(config: PreTrainedConfig, input_ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The positions `(B, n)` that a base model gives the tokens of a batch itself, for a tensor of that shape."""
    first = first_position(config)
    if first and input_ids is not None:
        # RoBERTa counts the tokens that are not its padding token, which all others have the position of.
        words = (input_ids != first - 1).long()
        return words.cumsum(-1) * words + first - 1
    return (first + torch.arange(like.shape[1], device=like.device)).expand(like.shape)


def pooled(model: Any, first: torch.Tensor) -> torch.Tensor:
    """What a base model makes of the first tokens `(B, 1, D)`."""
    if isinstance(model.pooler, nn.Linear):  # ALBERT
        return model.pooler_activation(model.pooler(first[:, 0]))
    return model.pooler(first)
