"""How the mask is attached to a model: one module, one reference per layer, two hooks."""

import inspect
import operator

import torch
from transformers.models.bert.modeling_bert import BertSelfAttention

from .configuration_sparsebert import SparseBertConfig
from .sparse_attention import SparseAttention


def _prepare_forward(model, args, kwargs):
    """Forward pre-hook of the base model: hands every attention layer the same [`MaskInputs`]."""
    sparse_attention = model.sparse_attention
    given = dict(zip(sparse_attention.argument_names, args, strict=False)) | kwargs
    states = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if states is None:
        return None  # the host says what is missing
    past = given.get("past_key_values")
    # What is made of the mask depends on the length: a graph is compiled for each, never for a symbolic one.
    num_queries = operator.index(states.shape[1])
    num_keys = operator.index(num_queries + (past.get_seq_length() if past is not None else 0))
    padding, needs = given.get("attention_mask"), set()
    if padding is not None:
        if padding.dim() == 4:
            needs.add("additive")
        padding = padding.to(states.device).bool() if padding.dim() == 2 else None
    # As the host does: a mask without padding is no mask. Under compilation the question would depend on data.
    if padding is not None and not torch.compiler.is_compiling() and bool(padding.all()):
        padding = None
    if given.get("output_attentions"):
        needs.add("weights")
    config, device = model.config, states.device
    autocast = torch.is_autocast_enabled(device.type)
    kwargs["mask_inputs"] = sparse_attention(
        config._attn_implementation,
        states.shape[0],
        num_queries,
        num_keys,
        padding,
        dropout=getattr(config, "attention_probs_dropout_prob", 0.0) if model.training else 0.0,
        device=device,
        dtype=torch.get_autocast_dtype(device.type) if autocast else model.get_input_embeddings().weight.dtype,
        needs=frozenset(needs),
    )
    return args, kwargs


def _add_sparsity_loss(model, args, kwargs, output):
    """Forward hook: `loss` gains lambda * ||M||_1 in training, so that any loop trains the mask."""
    sparse_attention = get_sparse_attention(model)
    if not (model.training and sparse_attention.searching and sparse_attention.config.sparsity_weight):
        return None
    if isinstance(output, tuple):
        # A tuple begins with the loss only when there were labels; logits are never 0-dimensional.
        if torch.is_tensor(output[0]) and output[0].dim() == 0:
            return (output[0] + sparse_attention.sparsity_loss(), *output[1:])
    elif output.get("loss") is not None:
        output["loss"] = output["loss"] + sparse_attention.sparsity_loss()
    return output


def get_sparse_attention(model):
    """
    The [`SparseAttention`] of a model or head.

    Raises:
        ValueError: If the model carries none.
    """
    sparse_attention = model.base_model._modules.get("sparse_attention")
    if sparse_attention is None:
        raise ValueError(f"{type(model).__name__} carries no sparse attention: attach it first")
    return sparse_attention


def attach(model):
    """
    Give a model the mask that its configuration describes: register [`SparseAttention`] on the base model, hand its
    self-attention modules a reference, and add the sparsity penalty to the loss of `model`.

    Raises:
        ValueError: If the model's configuration is not a [`SparseBertConfig`].
    """
    base = model.base_model
    if not isinstance(model.config, SparseBertConfig):
        raise ValueError(f"attach needs a model with a SparseBertConfig, got {type(model.config).__name__}")
    sparse_attention = SparseAttention(model.config)
    sparse_attention.argument_names = tuple(inspect.signature(base.forward).parameters)
    base.sparse_attention = sparse_attention
    for module in base.modules():
        if isinstance(module, BertSelfAttention):
            # Not through Module.__setattr__, which would register it again under every layer.
            module.__dict__["sparse_attention"] = sparse_attention
    base.register_forward_pre_hook(_prepare_forward, with_kwargs=True)
    model.register_forward_hook(_add_sparsity_loss, with_kwargs=True)
    return model


def sparsity_loss(model):
    """lambda * ||M||_1 of the mask drawn in the model's last training forward, for loops with a loss of their own."""
    return get_sparse_attention(model).sparsity_loss()


def sparsity(model):
    """Fraction of attention entries removed by the model's frozen, or now thresholded, mask."""
    return get_sparse_attention(model).sparsity()
