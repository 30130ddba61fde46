"""
Post-hoc search: the mask of a model that is trained already, learned by matching the model's own dense states.

Letters: B batch, N rows of text, L layers (1 when the mask is shared), H heads, n length, D hidden size, K learned
parameters per head.
"""

from contextlib import contextmanager

import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import DataCollatorForLanguageModeling

from ..masks.patterns import build_pattern
from ..models.architectures import attention_modules, describe
from ..models.attaching import get_sparse_attention, make_sparse_attention


# Nothing is attended to so little that its logit is out of reach of the others.
_LEAST_ATTENTION = 1e-6


@contextmanager
def running_through(model, sparse_attention):
    """Inside the block, `model` runs through another [`SparseAttention`] than its own, as of [`carrier`]."""
    own = get_sparse_attention(model)
    model.base_model.sparse_attention = sparse_attention
    try:
        yield
    finally:
        model.base_model.sparse_attention = own


def carrier(model, mask=None):
    """A [`SparseAttention`] for [`running_through`], with a [`SparseMask`] or, without one, with all entries on."""
    if mask is None:
        mask = build_pattern("dense", 1, model.config.num_attention_heads)
    description = describe(model, frozen=True, mask_length=max(mask.length, 3), allow_empty_rows=True)
    return make_sparse_attention(model, description, mask).to(model.device).eval()


def hidden_states(model, ids):
    """Output of every layer: `tuple` of `(B, n, D)`."""
    return model.base_model(input_ids=ids, output_hidden_states=True).hidden_states[1:]


def squared_errors(states, targets):
    """
    Per layer `||s - t||^2 / ||t - mean(t)||^2`, the mean over the batch's tokens: 1 is what the mean token would give.

    Args:
        states, targets (`tuple` of `torch.Tensor` of shape `(B, n, D)`)

    Returns:
        `torch.Tensor` of shape `(L,)`, float32.
    """

    def one(state, target):
        state, target = state.float(), target.float()
        return (state - target).square().sum() / (target - target.mean((0, 1))).square().sum().clamp(min=1e-12)

    return torch.stack([one(*pair) for pair in zip(states, targets, strict=True)])


def random_batches(rows, batch_size, steps, seed=0, shortest=None):
    """
    Batches of rows `(N, n)`, every row once before any comes again.

    Args:
        rows (`torch.Tensor` of shape `(N, n)`): Token ids.
        batch_size, steps (`int`)
        seed (`int`): Of the order.
        shortest (`int`, *optional*): Every other batch is cut to a length from here to n, its last token kept; the
            logarithm of the length is uniform.
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


@contextmanager
def _recorded(model, calls):
    """Inside the block, calls of the self-attention modules are appended to `calls`: module, arguments, output."""

    def record(module, args, kwargs, output):
        calls.append((module, args, kwargs, output))

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def start_from_attention(model, dense, batches):
    """
    Set the mask logits to the logarithm of what the dense model attends to: alpha is the mean attention probability
    per entry of each parameter.

    Args:
        model (`PreTrainedModel`): With a mask that is being searched.
        dense ([`SparseAttention`]): Of [`carrier`].
        batches (`Iterable` of `torch.Tensor` of shape `(B, n)`): Token ids; rows shorter than the mask are left out.
    """
    sparse_attention = get_sparse_attention(model)
    config, implementation = sparse_attention.config, model.config._attn_implementation
    length, total = config.mask_length, 0
    model.set_attn_implementation("sparse_eager")  # the one that returns probabilities
    with torch.no_grad(), running_through(model, dense):
        for ids in batches:
            if ids.shape[1] == length:
                calls = []
                with _recorded(model, calls):
                    model.base_model(input_ids=ids)
                total = total + torch.stack([output[1].float().mean(0) for *_, output in calls])  # (L, H, n, n)
    model.set_attn_implementation(implementation)
    if config.share_layers:
        total = total.mean(0, keepdim=True)
    search, logits = sparse_attention.search, sparse_attention.mask_logits
    learned = (search.fixed == -1).to(logits.device)
    index = search.index(length, logits.device)[learned]
    counts = index.bincount(minlength=logits.shape[-1])
    sums = torch.zeros_like(logits).index_add_(-1, index, total[..., learned])
    density = sums / counts.clamp(min=1) / total.sum((-2, -1))[..., None] * length
    alpha = density.clamp(min=_LEAST_ATTENTION).log()
    with torch.no_grad():
        logits.copy_((alpha - alpha.mean(-1, keepdim=True)) / config.mask_logit_scale)


def learn_mask(model, batches, steps, learning_rate, dense=None, train_norms=False, log=None):
    """
    Learn the mask logits, and nothing else of the model unless `train_norms`, so that the outputs of the masked
    model's layers are those of the dense one on the same text.

    Args:
        model (`PreTrainedModel`): With a mask that is being searched, as of [`attach`].
        batches (`Iterable` of `torch.Tensor` of shape `(B, n)`): Token ids, `steps` of them.
        steps (`int`): Everything that is scheduled about the mask runs from the first to the last.
        learning_rate (`float`): Of the logits alpha (Adam), falling to a tenth.
        dense ([`SparseAttention`], *optional*): Of [`carrier`], when there is one already.
        train_norms (`bool`): Learn the weights of the norms too, with a hundredth of the rate.
        log (`Callable`, *optional*): Called with step and loss.

    Raises:
        ValueError: If the mask is not being searched.
    """
    sparse_attention, dense = get_sparse_attention(model), dense or carrier(model)
    if not sparse_attention.searching:
        raise ValueError("the mask of this model is frozen: there is nothing to learn")
    model.eval().requires_grad_(False)
    sparse_attention.train()  # draws the mask that is learned
    groups = [
        {"params": [sparse_attention.mask_logits], "lr": learning_rate / sparse_attention.config.mask_logit_scale}
    ]
    norms = []
    if train_norms:
        modules = (module for module in model.base_model.modules() if "Norm" in type(module).__name__)
        norms = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        groups.append({"params": norms, "lr": learning_rate / 100})
    originals = [parameter.detach().clone() for parameter in norms]
    for parameter in (sparse_attention.mask_logits, *norms):
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.1))
    for step, ids in enumerate(batches):
        sparse_attention.set_progress((step + 1) / steps)
        with torch.no_grad(), running_through(model, dense), _swapped(norms, originals):
            targets = hidden_states(model, ids)
        loss = squared_errors(hidden_states(model, ids), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if log is not None:
            log(step, loss.item())
    sparse_attention.set_progress(1.0)
    model.eval()


@contextmanager
def _swapped(parameters, values):
    """Inside the block, parameters hold other values."""
    own = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, value in zip(parameters, own, strict=True):
            parameter.data = value


def recover(model, teacher, batches, steps, learning_rate, log=None):
    """
    Train the weights through the frozen mask until they do what the dense teacher does, without dropout.

    Args:
        model (`PreTrainedModel`): With a frozen mask.
        teacher (`PreTrainedModel`): The dense model.
        batches, steps, log: As [`learn_mask`].
        learning_rate (`float`): Of AdamW, after a tenth of the steps; then falling to 0.
    """
    model.eval().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.base_model.parameters(), lr=learning_rate, weight_decay=0.0)
    warmup = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
    )
    for step, ids in enumerate(batches):
        with torch.no_grad():
            targets = hidden_states(teacher, ids)
        loss = squared_errors(hidden_states(model, ids), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.base_model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if log is not None:
            log(step, loss.item())


def _mlm_logits(model, ids):
    output = model(input_ids=ids)
    return output.prediction_logits if "prediction_logits" in output else output.logits


def agreement(model, masks, rows, teacher=None, tokenizer=None, batch_size=16, seed=0):
    """
    How near masked models are to the dense one, on text.

    Args:
        model (`PreTrainedModel`): With a mask, of any kind.
        masks (`dict`): By name, a [`SparseMask`], or `None` for the model's own.
        rows (`torch.Tensor` of shape `(N, n)`): Token ids, without padding.
        teacher (`PreTrainedModel`, *optional*): The dense model, where `model` has other weights.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For the MLM loss, of a model with that head.
        batch_size, seed (`int`): The seed is that of the tokens to predict.

    Returns:
        `dict`: By name: `"cosine"` (mean over the rows, of the mean last hidden state), `"cosine_5"` (5 % quantile),
        `"layer_error"` (`list`, the root of [`squared_errors`] over all rows), `"mlm_loss"` with a tokenizer.
    """
    carriers = {
        name: get_sparse_attention(model) if mask is None else carrier(model, mask) for name, mask in masks.items()
    }
    dense = carrier(model)
    cosines, errors, losses = ({name: [] for name in masks} for _ in range(3))
    collator = None if tokenizer is None else DataCollatorForLanguageModeling(tokenizer, seed=seed)
    model.eval()
    with torch.no_grad():
        for ids in rows.split(batch_size):
            with running_through(model, dense):
                targets = hidden_states(teacher or model, ids)
            if collator is not None:
                batch = collator([{"input_ids": row} for row in ids.cpu()])
                masked, labels = batch["input_ids"].to(ids.device), batch["labels"].to(ids.device)
            for name, sparse_attention in carriers.items():
                with running_through(model, sparse_attention):
                    states = hidden_states(model, ids)
                    if collator is not None:
                        logits = _mlm_logits(model, masked).flatten(0, 1).float()
                        losses[name].append(
                            cross_entropy(logits, labels.flatten(), reduction="none")[labels.flatten() != -100]
                        )
                cosines[name].append(cosine_similarity(states[-1].float().mean(1), targets[-1].float().mean(1)))
                errors[name].append(squared_errors(states, targets) * len(ids))
    report = {}
    for name in masks:
        cosine = torch.cat(cosines[name])
        report[name] = {
            "cosine": cosine.mean().item(),
            "cosine_5": cosine.quantile(0.05).item(),
            "layer_error": (sum(errors[name]) / len(rows)).sqrt().tolist(),
        }
        if collator is not None:
            report[name]["mlm_loss"] = torch.cat(losses[name]).mean().item()
    return report


__all__ = ["agreement", "carrier", "learn_mask", "recover", "running_through", "start_from_attention"]
