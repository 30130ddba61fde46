"""
What a masked model is trained to have in common with the dense model, in the search for its mask and in the recovery
of its weights. A new objective is a function that records, a function that compares, and a row in `OBJECTIVES`.

Letters: B batch, n length, L layers, H heads, d head size, D hidden size, V vocabulary, C classes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity, kl_div, mse_loss

from ...learning.rank_agreement import average_over_processes
from ...models.architectures import attention_modules


if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Token ids `(B, n)`, or the arguments of a model by name, among them `"input_ids"`. None has padding.
Batch = torch.Tensor | Mapping[str, torch.Tensor]
# Weight of the cosine in "pooled" and "layers_pooled", against the relative error.
POOLED_WEIGHT = 4.0
# Ends of the names of the models that "answers" is for: one input per example, and logits.
ANSWERING = ("ForSequenceClassification", "ForQuestionAnswering")
# What the projections of self-attention are called.
_PROJECTIONS = [("query", "key", "value"), *(tuple(f"{name}{end}" for name in "qkv") for end in ("", "_lin", "_proj"))]


@dataclass(frozen=True)
class Objective:
    """
    A quantity in which the masked model should match the dense one.

    Args:
        record (`Callable`): `(model, batch) -> tensors`: runs the model on a `Batch` and returns what is compared.
        loss (`Callable`): `(ours, theirs) -> scalar`: how far the tensors of the masked model are from those of the
            dense model, 0 if they are equal. The mean over processes that have equal parts of a batch is that of the
            batch.
        refuse (`Callable`, *optional*): `(model) -> str or None`: the reason why a model has no such quantity.
        of_head (`bool`): Whether the head of the model takes part in it, and is trained in a recovery.
    """

    record: Callable[["PreTrainedModel", Batch], Sequence[torch.Tensor]]
    loss: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
    refuse: Callable[["PreTrainedModel"], str | None] = lambda model: None
    of_head: bool = False


def inputs_of(batch: Batch) -> dict[str, torch.Tensor]:
    """The arguments of a model for a batch, by name."""
    if not isinstance(batch, (torch.Tensor, Mapping)):
        raise ValueError(f"a batch must be token ids or arguments by name, as tensors, got {type(batch).__name__}")
    return {"input_ids": batch} if isinstance(batch, torch.Tensor) else dict(batch)


def hidden_states(model: "PreTrainedModel", batch: Batch) -> tuple[torch.Tensor, ...]:
    """The output of every layer for a batch: tensors of shape `(B, n, D)`."""
    return model.base_model(**inputs_of(batch), output_hidden_states=True).hidden_states[1:]


def squared_errors(
    states: Iterable[torch.Tensor],
    targets: Iterable[torch.Tensor],
    averaged: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> torch.Tensor:
    """
    Relative squared error of every layer: `||s - t||^2 / ||t - mean(t)||^2`, with the mean over the batch's tokens.
    Replacing every state by the mean would give 1. Where this is a part of a batch, `averaged` gives the mean of a
    value over all parts.
    """

    def error(state: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        state, target = state.float(), target.float()
        spread = (target - averaged(target.mean((0, 1)))).square().sum()
        return (state - target).square().sum() / averaged(spread).clamp(min=1e-12)

    return torch.stack([error(*pair) for pair in zip(states, targets, strict=True)])


@contextmanager
def recorded(
    modules: Iterable[torch.nn.Module], outputs: list, part: Callable[[Any], Any] = lambda output: output
) -> Iterator[None]:
    """Inside the block, the outputs of the modules, or what `part` takes of them, are appended to `outputs`."""

    def record(module: torch.nn.Module, args: Any, output: Any) -> None:
        outputs.append(part(output))

    handles = [module.register_forward_hook(record) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mean_error(ours, theirs):
    return squared_errors(ours, theirs, average_over_processes).mean()


def _last_state(model, batch):
    return hidden_states(model, batch)[-1:]


def _pooled_loss(ours, theirs):
    cosine = cosine_similarity(ours[-1].float().mean(1), theirs[-1].float().mean(1))
    return _mean_error(ours, theirs) + POOLED_WEIGHT * (1 - cosine).mean()


def _attention_outputs(model, batch):
    outputs: list = []
    with recorded(list(attention_modules(model).values()), outputs):
        model.base_model(**inputs_of(batch))
    return [output[0] for output in outputs]


def _projections(model):
    """Query, key and value projection of the last layer, or `None` if they are not modules of their own."""
    module = list(attention_modules(model).values())[-1]
    for names in _PROJECTIONS:
        found = [getattr(module, name, None) for name in names]
        if all(isinstance(projection, torch.nn.Linear) for projection in found):
            return found
    return None


def _relations(model, batch):
    """Queries with queries, keys with keys and values with values of the last layer: `(B, H, n, n)` each, log P."""
    outputs: list = []
    with recorded(_projections(model), outputs):
        model.base_model(**inputs_of(batch))
    relations = []
    with torch.autocast(model.device.type, enabled=False):
        for output in outputs:
            heads = (
                output.float().unflatten(-1, (model.config.num_attention_heads, -1)).transpose(1, 2)
            )  # (B, H, n, d)
            relations.append((heads @ heads.mT * heads.shape[-1] ** -0.5).log_softmax(-1))
    return relations


def _divergence(ours, theirs):
    """Kullback-Leibler divergence from theirs, mean over the rows and the tensors."""
    terms = [
        kl_div(mine.flatten(0, -2), other.flatten(0, -2), reduction="batchmean", log_target=True)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return torch.stack(terms).mean()


def token_logits(model: "PreTrainedModel", batch: Batch) -> torch.Tensor:
    """What the head for masked tokens says of every token: `(B, n, V)`."""
    output = model(**inputs_of(batch))
    return output.prediction_logits if "prediction_logits" in output else output.logits


def _token_probs(model, batch):
    return (token_logits(model, batch).float().log_softmax(-1),)


def _answers(model, batch):
    """The output of every layer, and the logits: `(B, C)`, or `(B, n, 2)` for start and end of a span."""
    output = model(**inputs_of(batch), output_hidden_states=True)
    spans = "start_logits" in output
    logits = torch.stack([output.start_logits, output.end_logits], -1) if spans else output.logits
    return *output.hidden_states[1:], logits


def _answers_loss(ours, theirs):
    return mse_loss(ours[-1].float(), theirs[-1].float()) + _mean_error(ours[:-1], theirs[:-1])


def _no_relations(model):
    if _projections(model) is None:
        return f"a model of type {model.config.model_type!r} has no query, key and value projections of its own"
    if model.config.num_hidden_layers == 1:
        return "the projections of the only layer come before its mask"
    return None


def _no_tokens(model):
    if predicts_tokens(model):
        return None
    return f"{type(model).__name__} does not predict masked tokens"


def _no_answers(model):
    if type(model).__name__.endswith(ANSWERING):
        return None
    return f"{type(model).__name__} has no head for a task ({', '.join(ANSWERING)})"


def predicts_tokens(model: "PreTrainedModel") -> bool:
    """Whether a model has a head for masked tokens. ELECTRA is not pre-trained to predict them."""
    heads = ("ForMaskedLM",) if model.config.model_type == "electra" else ("ForMaskedLM", "ForPreTraining")
    return type(model).__name__.endswith(heads)


# Sources: "relations" from MiniLMv2 (arXiv 2012.15828), Section 3.1, with the heads of the model.
OBJECTIVES = {
    "layers": Objective(hidden_states, _mean_error),
    "last": Objective(_last_state, _mean_error),
    "pooled": Objective(_last_state, _pooled_loss),
    "layers_pooled": Objective(hidden_states, _pooled_loss),
    "attention": Objective(_attention_outputs, _mean_error),
    "relations": Objective(_relations, _divergence, _no_relations),
    "tokens": Objective(_token_probs, _divergence, _no_tokens, of_head=True),
    "answers": Objective(_answers, _answers_loss, _no_answers, of_head=True),
}
