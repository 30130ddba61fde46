"""
The algorithm of the post-hoc search: learn the mask of a trained model by matching what the model without the mask
computes, and train the weights through it in the same way.

Nothing here reads or writes files, but for the checkpoints of the Trainer;
[`~sparsebert.training.searching.search_run`] has the run around it.

Letters: B batch, N rows of text, L layers (1 when the mask is shared), H heads, n length, D hidden size, K learned
parameters per head.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...checks import check_choice, no_effect
from ...learning.mask_search import MaskSearch
from ...masks.patterns import build_pattern
from ...models.architectures import attention_modules
from ...models.attaching import make_sparse_attention
from ...models.sparse_attention import SparseAttention, get_sparse_attention
from ..runs.run_life import TrainingRun
from .matching_trainer import MatchingTrainer, without_checkpoints
from .objectives import OBJECTIVES, Batch, Objective, inputs_of, recorded


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...masks.sparse_mask import SparseMask

# Number of batches over which the attention is averaged that a search starts from.
START_BATCHES = 8
# Lower bound of the attention that logits start from, so that the search can still bring every entry back.
_LEAST_ATTENTION = 1e-6


@contextmanager
def running_through(model: "PreTrainedModel", sparse_attention: "SparseAttention") -> Iterator[None]:
    """Inside the block, `model` runs with the mask of another [`SparseAttention`], made by [`carrier`]."""
    own = get_sparse_attention(model)
    model.base_model.sparse_attention = sparse_attention
    try:
        yield
    finally:
        model.base_model.sparse_attention = own


def carrier(model: "PreTrainedModel", mask: "SparseMask | None" = None) -> "SparseAttention":
    """A [`SparseAttention`] for [`running_through`] with the given mask, or by default with the dense one."""
    if mask is None:
        mask = build_pattern("dense", 1, model.config.num_attention_heads)
    fields = {"frozen": True, "mask_length": max(mask.length, 3), "allow_empty_rows": True}
    return make_sparse_attention(model, mask, **fields).to(model.device).eval()


def random_batches(
    rows: torch.Tensor, batch_size: int, steps: int, seed: int = 0, shortest: int | None = None
) -> Iterator[torch.Tensor]:
    """
    Yield random batches of rows `(N, n)`. Every row is used once before any is used again. Every other batch is cut to
    a length from `shortest` to n, drawn log-uniformly, with the last token of each row.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat(
        [torch.randperm(len(rows), generator=generator) for _ in range(1 + steps * batch_size // len(rows))]
    )
    for step in range(steps):
        ids = rows[order[step * batch_size : (step + 1) * batch_size]]
        if shortest is not None and step % 2 and shortest < ids.shape[1]:
            drawn = float(torch.rand((), generator=generator))
            length = round(shortest * (ids.shape[1] / shortest) ** drawn)
            ids = torch.cat([ids[:, : length - 1], ids[:, -1:]], 1)
        yield ids


def start_from_attention(model: "PreTrainedModel", dense: "SparseAttention", batches: Iterable[Batch]) -> None:
    """
    Initialize the mask logits with what the dense model attends to: alpha is the logarithm of the mean attention
    probability over the entries that share a parameter, up to a constant per head. With a target, all heads start with
    the same number of entries. In shorter inputs the probabilities count in proportion to the length, since those of a
    row sum to 1. Parameters of entries that no input has start lowest.
    """
    sparse_attention = get_sparse_attention(model)
    config, implementation = sparse_attention.config, model.config._attn_implementation
    search, logits = _searched(sparse_attention)
    totals = counts = torch.zeros((), device=model.device)
    model.set_attn_implementation("sparse_eager")  # the backend that returns probabilities
    modules = list(attention_modules(model).values())
    with torch.no_grad(), running_through(model, dense):
        for batch in batches:
            inputs = inputs_of(batch)
            length = inputs["input_ids"].shape[1]
            sums: list[torch.Tensor] = []
            # The probabilities of one layer at a time: those of all would take L * H * n * n numbers.
            with recorded(modules, sums, lambda output: _sums(search, output[-1].float().mean(0)[None])):
                model.base_model(**inputs)
            totals = totals + torch.cat(sums) * (length / search.length)  # (L, H, K)
            counts = counts + _sums(search, totals.new_ones(1, 1, length, length))  # (1, 1, K)
    model.set_attn_implementation(implementation)
    # Under DeepSpeed and FSDP they are on the accelerator before the weights are.
    totals, counts = totals.to(logits.device), counts.to(logits.device)
    if config.share_layers:
        totals = totals.mean(0, keepdim=True)
    density = totals / counts.clamp(min=1)  # each of the n rows of probabilities sums to 1
    alpha = density.clamp(min=_LEAST_ATTENTION).log()
    with torch.no_grad():
        logits.copy_((alpha - alpha.mean(-1, keepdim=True)) / search.mask_logit_scale)


def _sums(search: MaskSearch, table: torch.Tensor) -> torch.Tensor:
    """The sum of the values `(L, H, m, m)` of an input of m tokens over the entries of each parameter: `(L, H, K)`."""
    missing = search.length - table.shape[-1]
    if missing and search.special_tokens == "first_last":  # the last token is that of the mask
        tokens = torch.arange(table.shape[-1], device=table.device)
        tokens[-1] = search.length - 1
        whole = table.new_zeros(*table.shape[:2], search.length, search.length)
        whole[..., tokens[:, None], tokens] = table
        table = whole
    elif missing:
        table = torch.nn.functional.pad(table, (0, missing, 0, missing))
    return search.sums(table)


def _searched(sparse_attention: SparseAttention) -> tuple[MaskSearch, torch.nn.Parameter]:
    """The rules and the logits of a search."""
    if sparse_attention.search is None or sparse_attention.mask_logits is None:
        raise ValueError("the mask of this model is frozen: there is no search to run")
    return sparse_attention.search, sparse_attention.mask_logits


def learn_mask(
    model: "PreTrainedModel",
    batches: Iterable[Batch],
    steps: int,
    learning_rate: float,
    dense: "SparseAttention | None" = None,
    train_norms: bool = False,
    objective: str = "pooled",
    bf16: bool = False,
    run: TrainingRun | None = None,
) -> float:
    """
    Learn the mask so that the masked model computes the same as the dense model on the same text. The weights do not
    change, except those of the normalization layers if `train_norms`. With a run, there are checkpoints, and the run
    may go on from one. Returns the seconds it took.
    """
    compared = matched_objective(objective, model, bf16)
    sparse_attention, dense = get_sparse_attention(model), dense or carrier(model)
    search, logits = _searched(sparse_attention)
    model.requires_grad_(False)
    logits.requires_grad_(True)
    parts = _HeadLevels(logits) if search.has_budget and search.sparsity_scope == "global" else None
    learned = [logits] if parts is None else [parts.within, parts.levels]
    groups = [{"params": learned, "lr": learning_rate / search.mask_logit_scale}]
    norms: list[torch.nn.Parameter] = []
    if train_norms:
        modules = (module for module in model.base_model.modules() if "Norm" in type(module).__name__)
        norms = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        groups.append({"params": norms, "lr": learning_rate / 100})
    originals = [parameter.detach().clone() for parameter in norms]
    for parameter in norms:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    if parts is not None:
        optimizer.register_step_pre_hook(parts.split)
        optimizer.register_step_post_hook(parts.join)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay(steps))

    def targets(batch):
        with running_through(model, dense), _swapped(norms, originals):
            return compared.record(model, batch)

    seconds = _train(model, batches, steps, compared, targets, (optimizer, schedule), 0.0, run)
    sparse_attention.set_progress(1.0)
    return seconds


def decay(steps: int) -> Callable[[int], float]:
    """A schedule that falls linearly to a tenth."""
    return lambda step: max(1 - step / max(steps, 1), 0.1)


def _train(model, batches, steps, compared, targets, optimizers, max_grad_norm, run, masks=None):
    """Train for so many steps, or what is left of them, and return the seconds of all."""
    with ExitStack() as stack:
        run = run or stack.enter_context(without_checkpoints(model))
        if steps:
            training = copy.copy(run.training)
            training.max_steps, training.max_grad_norm = steps, max_grad_norm
            trainer = MatchingTrainer(model, training, batches, compared, targets, optimizers, masks)
            run.train(trainer)
    model.eval()
    return trainer.train_seconds if steps else 0.0


class _HeadLevels:
    """
    Mask logits as the mean of each head, which says what share of a common budget it gets (see [`head_budgets`]), and
    the differences from it. Adam, which divides every gradient by its size, would otherwise move the mean by what all
    parameters of a head happen to have in common. Before each step of the optimizer, the logits are split into the two
    parts, and then joined.
    """

    def __init__(self, logits: torch.nn.Parameter) -> None:
        self.logits = logits
        self.levels = logits.detach().mean(-1, keepdim=True).requires_grad_(True)
        self.within = torch.empty_like(logits).requires_grad_(True)

    @torch.no_grad()
    def split(self, *_: object) -> None:
        """Split logits and gradient into the two parts."""
        gradient = self.logits.grad
        assert gradient is not None
        self.levels.copy_(self.logits.mean(-1, keepdim=True))
        self.within.copy_(self.logits - self.levels)
        self.levels.grad = gradient.sum(-1, keepdim=True)
        self.within.grad = gradient - gradient.mean(-1, keepdim=True)

    @torch.no_grad()
    def join(self, *_: object) -> None:
        """Set the logits to the sum of the two parts."""
        self.logits.copy_(self.within - self.within.mean(-1, keepdim=True) + self.levels)


@contextmanager
def _swapped(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> Iterator[None]:
    """Inside the block, the parameters have other values."""
    own = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, value in zip(parameters, own, strict=True):
            parameter.data = value


def recover(
    model: "PreTrainedModel",
    teacher: "PreTrainedModel",
    batches: Iterable[Batch],
    steps: int,
    learning_rate: float,
    objective: str = "pooled",
    masks: "Mapping[int, SparseMask] | None" = None,
    bf16: bool = False,
    run: TrainingRun | None = None,
) -> float:
    """
    Train the weights through the frozen mask, without dropout, to compute the same as the dense model. The run and
    what is returned are those of [`learn_mask`].
    """
    compared = matched_objective(objective, model, bf16)
    model.requires_grad_(True)
    trained = model if compared.of_head else model.base_model
    # Unfused, the update takes a tenth of a step's time on a CPU, mostly for the embeddings.
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    warmup = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
    )

    def targets(batch):
        return compared.record(teacher, batch)

    return _train(model, batches, steps, compared, targets, (optimizer, schedule), 1.0, run, masks)


def matched_objective(name: str, model: "PreTrainedModel", bf16: bool) -> Objective:
    """An objective, checked to have a meaning for the model, that computes in bfloat16 if it is to."""
    check_choice("objective", name, tuple(OBJECTIVES))
    objective = OBJECTIVES[name]
    if reason := objective.refuse(model):
        raise no_effect("objective", name, f"here: {reason}")

    def record(model, batch):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            return objective.record(model, batch)

    return replace(objective, record=record)
