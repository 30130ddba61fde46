"""
BERT's head for masked tokens: its decoder without a bias parameter of its own, and its loss without the logits of the
tokens that are not predicted.

In the stock classes the decoder and the head around it hold the same parameter. Engines that shard modules apart, such
as FSDP2, cannot have a parameter in two places.

Letters: B batch, n length, D hidden size, K predicted tokens of the batch.
"""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils import can_return_tuple


IGNORED = -100  # label of a token that is not predicted
_LABELS = ("labels", "next_sentence_label")


class TiedDecoder(nn.Linear):
    """A linear layer that adds the bias of the head it is in: made of a stock decoder by [`share_bias`]."""

    @property
    def bias(self) -> torch.Tensor:  # type: ignore[override]
        """The bias of the head, as the head has it at this moment: whole, sharded or cast."""
        return vars(self)["head"].bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(f"{prefix}bias", None)  # that of a stock model, which holds it twice
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def share_bias(model: Any) -> None:
    """
    Let the decoder of a head for masked tokens use the bias of the head, under the key that it has in files. Other
    models, and decoders with a bias of their own, stay as they are.
    """
    head: Any = getattr(getattr(model, "cls", None), "predictions", None)
    decoder = getattr(head, "decoder", None)
    if type(decoder) is not nn.Linear or decoder.bias is not head.bias:
        return
    del decoder.bias
    vars(decoder)["head"] = head  # not through Module.__setattr__, which would register it within itself
    decoder.__class__ = TiedDecoder
    ties = model._tied_weights_keys or {}
    model._tied_weights_keys = {name: source for name, source in ties.items() if not name.endswith("decoder.bias")}
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def with_skip_logits(stock: Callable[..., Any]) -> Callable[..., Any]:
    """
    The `forward` of a BERT head for masked tokens with one argument more. `skip_logits=True` computes the loss alone:
    the head, most of the work of a small model with a large vocabulary, sees only the tokens that are predicted. Loss
    and gradients are the same to rounding; the logits of the tokens are `None` in the output. A batch without any
    token to predict has the MLM loss 0, where the stock loss is not a number.
    """
    signature = inspect.signature(stock)
    _, *names = signature.parameters
    labeled = tuple(name for name in _LABELS if name in names)
    *positional, rest = signature.parameters.values()
    extra = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)

    def forward(self, *args, skip_logits=False, **kwargs):
        if not skip_logits:
            return stock(self, *args, **kwargs)
        return _loss_alone(self, labeled, **dict(zip(names, args, strict=False)), **kwargs)

    made: Any = update_wrapper(forward, stock)
    made.__signature__ = signature.replace(parameters=[*positional, extra, rest])
    del made.__wrapped__
    return made


@can_return_tuple
def _loss_alone(self, labeled, **inputs):
    labels, *next_sentence = (inputs.pop(name, None) for name in labeled)
    for name, values in zip(labeled, (labels, *next_sentence), strict=True):
        if values is None:
            raise ValueError(f"skip_logits needs {name}: without logits there is only the loss")
    # Before the encoder: on a GPU the host waits here for what was launched, which is little at this point.
    index = (labels.flatten() != IGNORED).nonzero().squeeze(1)  # (K,)
    outputs = self.bert(**inputs, return_dict=True)
    predicted = outputs[0].flatten(0, 1).index_select(0, index)  # (B, n, D) -> (K, D)
    # By the module itself, whose hooks gather its weights if they are sharded.
    logits = self.cls(predicted, outputs[1]) if next_sentence else self.cls(predicted)
    logits, *relation = logits if next_sentence else (logits,)  # (K, vocab_size), (B, 2)
    # The mean over no token is not a number; the sum of no logits is 0, and has gradients.
    loss = cross_entropy(logits, labels.flatten().index_select(0, index)) if len(index) else logits.sum()
    states = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
    if not next_sentence:
        return MaskedLMOutput(loss=loss, **states)
    loss = loss + cross_entropy(relation[0].view(-1, 2), next_sentence[0].view(-1))
    return BertForPreTrainingOutput(loss=loss, seq_relationship_logits=relation[0], **states)


def skips_logits(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether a model can compute its loss from these inputs with `skip_logits`."""
    parameters = inspect.signature(model.forward).parameters
    return "skip_logits" in parameters and all(inputs.get(name) is not None for name in _LABELS if name in parameters)
