"""
The bias of the rest: from what the dense model attends to, and trained.

Letters: B batch, L layers, H heads, n length.
"""

import copy
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from transformers.utils import logging

from ...attention.model_masks import without_adapters
from ...masks.expansion import SPECIAL_TOKENS
from ...masks.sparse_mask import SparseMask
from ...models.architectures import attention_modules
from ...models.sparse_attention import SparseAttention, get_sparse_attention
from .matching import carrier, decay, matched_objective, running_through
from .matching_trainer import say_tenth
from .objectives import Batch, inputs_of, recorded


if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)

# The bias is kept within this: in a head that pays nothing to what is removed it would be the logarithm of 0.
_LARGEST = 10.0
_LEAST = 1e-30
# Of its training, in units of a score.
_LEARNING_RATE = 0.1


def calibrate_rest(model: "PreTrainedModel", batches: Iterable[Batch]) -> None:
    """
    Set the `rest_bias` of the mask that a model carries, so that the rest gets, on average, the attention that the
    model without the mask pays to what is removed. No weight is changed.

    Args:
        model (`PreTrainedModel`): A model whose frozen mask has a rest, with the weights that it had without the mask.
        batches (`Iterable`): Token ids `(B, n)`, or arguments of the base model by name, without padding: a few dozen
            rows of ordinary text are enough.

    Raises:
        ValueError: If the model carries no such mask, or a batch has padding, or there is none.
    """
    model = without_adapters(model)
    sparse_attention = get_sparse_attention(model)
    mask = sparse_attention.mask
    if mask is None or mask.rest == "none":
        raise ValueError("calibrate_rest needs a model whose mask is frozen and has a rest: mask.replace(rest='mean')")
    training = model.training
    try:
        found = calibrated(model.eval(), carrier(model), {"": mask}, batches)
    finally:
        model.train(training)
    sparse_attention.set_mask(found[""], search=mask.metadata.get("search"))


def calibrated(
    model: "PreTrainedModel", dense: SparseAttention, masks: Mapping[str, SparseMask], batches: Iterable[Batch]
) -> dict[str, SparseMask]:
    """
    Masks, by name, with a `rest_bias` that makes up for what the expansion around the mean query misses: with it, the
    logarithm of the attention that the rest gets is, in the mean over queries, that of what the dense model pays to
    the removed keys. Masks without a rest are returned as they are. The batches have no padding.
    """
    rested = {name: mask for name, mask in masks.items() if mask.rest != "none"}
    if not rested:
        return dict(masks)
    if model.dtype == torch.float16:  # in which small probabilities are 0
        model = copy.deepcopy(model).float()
    modules = list(attention_modules(model).values())
    batch_sums: list[torch.Tensor] = []
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sparse_eager")  # the backend that returns probabilities
    with ExitStack() as stack:
        stack.callback(model.set_attn_implementation, implementation)
        stack.enter_context(torch.no_grad())
        stack.enter_context(running_through(model, dense))
        for batch in batches:
            padding = inputs_of(batch).get("attention_mask")
            if padding is not None and not bool(padding.all()):
                raise ValueError("the batches that a rest is calibrated with must have no padding")
            found: list[torch.Tensor] = []
            distances: list[tuple[torch.Tensor | None, ...]] = []

            def missing(output, found=found, distances=distances):
                layer, (added,) = len(found), distances
                return _missing(output[-1].float(), layer, added[layer % len(added)], rested.values())

            with recorded(modules, found, missing), recorded([dense], distances, lambda made: made.distance_bias):
                model.base_model(**inputs_of(batch))
            batch_sums.append(torch.stack(found, 1))
    if not batch_sums:
        raise ValueError("a rest is calibrated with at least one batch")
    sums = torch.stack(batch_sums).sum(0)  # (number of masks, L, H, 2)
    if dense.carrier.one_layer:  # it has one bias for all its calls
        sums = sums.sum(1, keepdim=True)
    total, count = sums.unbind(-1)
    biases = (total / count.clamp(min=1)).clamp(-_LARGEST, _LARGEST)
    return dict(masks) | {
        name: mask.replace(rest_bias=bias) for (name, mask), bias in zip(rested.items(), biases, strict=True)
    }


def train_rest(
    model: "PreTrainedModel",
    teacher: "PreTrainedModel | None",
    batches: Iterable[Batch],
    steps: int,
    objective: str = "pooled",
    bf16: bool = False,
) -> "SparseMask":
    """
    Train the `rest_bias` of the frozen mask that a model carries so that the masked model computes the same as the
    dense model, by default the model itself without its mask. No weight changes. Returns the mask with this bias, or,
    if the training diverges, the mask as it is, with a warning: it must not cost the search that found the mask.
    """
    compared, dense = matched_objective(objective, model, bf16), carrier(model)
    sparse_attention = get_sparse_attention(model)
    mask = sparse_attention.mask
    assert mask is not None
    model.eval().requires_grad_(False)
    bias = mask.rest_biases().to(model.device, copy=True).requires_grad_(True)
    optimizer = torch.optim.Adam([bias], lr=_LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay(steps))
    with ExitStack() as stack:
        hook = sparse_attention.register_forward_hook(lambda _, __, inputs: replace(inputs, rest=tuple(bias)))
        stack.callback(hook.remove)
        began = time.perf_counter()
        for step, batch in enumerate(batches, 1):
            with torch.no_grad(), running_through(model, dense):
                targets = compared.record(teacher or model, batch)
            loss = compared.loss(compared.record(model, batch), targets)
            loss.backward()
            optimizer.step()
            if not bias.isfinite().all():
                why = f"the loss is {loss.item()}" if not loss.isfinite() else "a gradient is not finite"
                logger.warning(
                    f"The bias of the rest stays as it was calibrated: at step {step} of its training {why}."
                )
                return mask
            optimizer.zero_grad()
            schedule.step()
            if PartialState().is_main_process:
                say_tenth("rest", step, steps, began)
    return mask.replace(rest_bias=bias.detach().cpu())


def _missing(probs, layer, added, masks):
    """
    By how much the logarithm of the attention `(B, H, n, n)` that a layer pays to what each mask removes differs from
    that of the rest, summed over the queries from which it removes something, and their number: `(number of masks, H,
    2)`. The scores that the rest is made of are the logarithms of these probabilities without what is added by
    distance, `(H, n, n)` or `None`, up to a constant per query which cancels out. Without a token that is not special,
    there is no rest.
    """
    scores = probs.clamp(min=_LEAST).log()
    scores = scores if added is None else scores - added
    rests: dict[str, torch.Tensor] = {}
    found = []
    for mask in masks:
        if mask.special_tokens not in rests:
            rests[mask.special_tokens] = _rest_scores(scores, mask.special_tokens)
        own = mask.replace(keep=mask.keep[layer % mask.num_layers][None], rest_bias=None)
        removed = ~own.to_table(probs.shape[-1])[0].to(probs.device)  # (H, n, n)
        count = removed.sum(-1)
        missing = (probs * removed).sum(-1).clamp(min=_LEAST).log() - rests[mask.special_tokens]
        used = (count > 0) & (probs.shape[-1] > SPECIAL_TOKENS.index(mask.special_tokens))
        missing = torch.where(used, missing - count.clamp(min=1).log(), 0.0)
        found.append(torch.stack([missing.sum((0, 2)), used.sum(-1) * len(probs)], -1))
    return torch.stack(found)


def _rest_scores(scores, special_tokens):
    """What each query `(B, H, n)` gives a key of the rest, from its scores with all keys `(B, H, n, n)`."""
    number, length = SPECIAL_TOKENS.index(special_tokens), scores.shape[-1]
    others = slice(min(number, 1), length - (number == 2))
    scores = scores[..., others]
    mean = scores[:, :, others].mean(2)
    weights = mean.softmax(-1)
    constant = mean.logsumexp(-1) - (weights * mean).sum(-1) - torch.tensor(float(scores.shape[-1])).log()
    return torch.einsum("bhm,bhnm->bhn", weights, scores) + constant[..., None]
