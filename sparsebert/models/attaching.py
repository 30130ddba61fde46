"""How a mask is attached to a model: one module, one reference per layer, two hooks; and taken off again."""

import inspect
import json
import operator
from dataclasses import fields as dataclass_fields
from difflib import get_close_matches
from functools import cache
from os import PathLike
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig, PreTrainedModel
from transformers.utils import logging

from ..attention.backends import check_backend
from ..checks import check_choice
from ..masks.mask_files import MASK_CONFIG_NAME, MASK_WEIGHTS_NAME
from ..masks.patterns import PATTERNS
from ..masks.sparse_mask import DIAGONALS, SparseMask
from ..search.searches import SEARCHES
from .architectures import attention_modules, check_architecture, describe, input_shape, sliding_window
from .configuration_sparsebert import SparseBertConfig
from .sparse_attention import SparseAttention


logger = logging.get_logger(__name__)

SEARCH_CONFIG_NAME = "search_config.json"
HUB_UPLOAD_ARGUMENTS = ("repo_id", "commit_message", "private", "revision", "create_pr", "commit_description", "tags")

# Fields of the configuration that say how a fixed mask is used, those that define one by its pattern, those about the
# model that a stock one cannot have, and all of our own.
MASK_FIELDS = ("length_policy", "last_token", "diagonal", "allow_empty_rows")
PATTERN_FIELDS = ("pattern_kwargs", "head_configuration", "mask_seed", "mask_length")
MODEL_FIELDS = ("probability_map", "probability_map_kwargs", "token_mixers")
OWN_FIELDS = tuple(
    field.name
    for field in dataclass_fields(SparseBertConfig)
    if field.name not in {field.name for field in dataclass_fields(BertConfig)}
)


def allowed_fields(mask_or_search):
    """Names of the fields that have a meaning for a mask, a pattern or a search, by the name of the latter two."""
    if mask_or_search in SEARCHES:
        refused = ("search", "pattern", "frozen", "pruned", "pattern_kwargs", "head_configuration", "mask_seed")
        return tuple(name for name in OWN_FIELDS if name not in (*refused, *MODEL_FIELDS))
    return MASK_FIELDS + (PATTERN_FIELDS if mask_or_search in PATTERNS else ())


def _prepare_forward(model, args, kwargs):
    """Forward pre-hook of the base model: hands every attention layer the same [`MaskInputs`]."""
    sparse_attention = model.sparse_attention
    given = dict(zip(sparse_attention.argument_names, args, strict=False)) | kwargs
    config = model.config
    shape = input_shape(config, given)
    if shape is None:
        return None  # the host says what is missing
    batch, length, device = shape
    past = given.get("past_key_values")
    # What is made of the mask depends on the length: a graph is compiled for each, never for a symbolic one.
    num_queries = operator.index(length)
    num_keys = operator.index(num_queries + (past.get_seq_length() if past is not None else 0))
    padding, needs = given.get("attention_mask"), set()
    if padding is not None:
        if padding.dim() == 4:
            needs.add("additive")
        padding = padding.to(device).bool() if padding.dim() == 2 else None
    # As the host does: a mask without padding is no mask. Under compilation the question would depend on data.
    if padding is not None and not torch.compiler.is_compiling() and bool(padding.all()):
        padding = None
    if given.get("output_attentions"):
        needs.add("weights")
    autocast = torch.is_autocast_enabled(device.type)
    mask_inputs = sparse_attention(
        config._attn_implementation,
        batch,
        num_queries,
        num_keys,
        padding,
        dropout=sparse_attention.config.attention_probs_dropout_prob if model.training else 0.0,
        device=device,
        dtype=torch.get_autocast_dtype(device.type) if autocast else next(model.parameters()).dtype,
        needs=frozenset(needs),
    )
    if sparse_attention.window is None:
        return args, kwargs | {"mask_inputs": mask_inputs}
    # The windows are part of the mask: the host, which takes its masks by the kind of layer, need not make them.
    masks = dict.fromkeys(config.layer_types, given.get("attention_mask") if "additive" in needs else None)
    return (), given | {"attention_mask": masks, "mask_inputs": mask_inputs}


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


def _without_adapters(model):
    """The model inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def get_sparse_attention(model):
    """
    The [`SparseAttention`] of a model or head.

    Raises:
        ValueError: If the model carries none.
    """
    model = _without_adapters(model)
    sparse_attention = model.base_model._modules.get("sparse_attention")
    if sparse_attention is None:
        raise ValueError(f"{type(model).__name__} carries no sparse attention: attach it first")
    return sparse_attention


class SparseModelMixin:
    """
    What every model that carries a mask has: [`SparseAttention`] as `sparse_attention`, `freeze`, `set_mask`, and a
    `save_pretrained` that writes the frozen mask beside the weights.
    """

    # Otherwise Trainer believes that the loss is divided by the number of accumulation steps already.
    accepts_loss_kwargs = False

    @property
    def sparse_attention(self):
        return get_sparse_attention(self)

    def set_mask(self, mask):
        """Run through a [`SparseMask`] from now on, see [`SparseAttention.set_mask`]."""
        self.sparse_attention.set_mask(mask)

    def freeze(self, threshold=None, sparsity=None, metadata=None):
        """End the search and return the [`SparseMask`], see [`SparseAttention.freeze`]."""
        return self.sparse_attention.freeze(threshold, sparsity, metadata)

    def save_pretrained(self, save_directory, *args, is_main_process=True, push_to_hub=False, **kwargs):
        """As the host's, plus the frozen mask as `mask_config.json` and `mask.safetensors`."""
        hub = {name: kwargs.pop(name) for name in HUB_UPLOAD_ARGUMENTS if name in kwargs}
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            self._save_mask(Path(save_directory))
        if push_to_hub:
            # Not by the host within its save, which would upload what it has written itself, without the mask.
            hub.setdefault("repo_id", Path(save_directory).name)
            self.push_to_hub(**hub, token=kwargs.get("token"))

    def _save_mask(self, folder):
        if self.sparse_attention.mask is not None:
            self.sparse_attention.mask.save_pretrained(folder)


class AttachedModel(SparseModelMixin):
    """
    A stock model that [`attach`] gave a mask: its class is one with the same name, made of this and the stock class.
    All its own files stay stock. While searching, the weights' file holds the mask logits as well, and
    `search_config.json` says what is searched.
    """

    def __reduce__(self):
        return _new_attached, (self.stock_class,), self.__dict__

    def _save_mask(self, folder):
        super()._save_mask(folder)
        sparse_attention = self.sparse_attention
        path = folder / SEARCH_CONFIG_NAME
        # A folder holds a mask or a search: what another save left would contradict this one.
        for name in (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME) if sparse_attention.searching else (SEARCH_CONFIG_NAME,):
            (folder / name).unlink(missing_ok=True)
        if sparse_attention.searching:
            fields = {name: getattr(sparse_attention.config, name) for name in OWN_FIELDS}
            path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@cache
def attached_class(stock_class):
    """The class of an attached `stock_class`."""
    names = {name: getattr(stock_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(stock_class.__name__, (AttachedModel, stock_class), names | {"stock_class": stock_class})


def _new_attached(stock_class):
    return object.__new__(attached_class(stock_class))


def make_sparse_attention(model, description):
    """The [`SparseAttention`] that `description`, a [`SparseBertConfig`], asks for in `model`, not yet registered."""
    window, local_layers = sliding_window(model.config)
    shared = len(attention_modules(model)) < description.num_attention_layers
    return SparseAttention(description, window=window, local_layers=local_layers, one_layer=shared)


def register(model, sparse_attention):
    """
    Register [`SparseAttention`] on the base model, hand its self-attention modules a reference, and add the sparsity
    penalty to the loss of `model`.
    """
    base = model.base_model
    sparse_attention.argument_names = tuple(inspect.signature(base.forward).parameters)
    base.sparse_attention = sparse_attention
    for index, module in enumerate(attention_modules(model)):
        # Not through Module.__setattr__, which would register it again under every layer.
        module.__dict__["sparse_attention"] = sparse_attention
        module.mask_layer = index
    sparse_attention.handles = (
        base.register_forward_pre_hook(_prepare_forward, with_kwargs=True),
        model.register_forward_hook(_add_sparsity_loss, with_kwargs=True),
    )


def read_mask(name, **hub_arguments):
    """
    The [`SparseMask`] of a folder or Hub id.

    Raises:
        ValueError: If there is none.
    """
    name = str(name)
    if "/" not in name and not Path(name).is_dir() and (near := get_close_matches(name, (*PATTERNS, *SEARCHES), 1)):
        raise ValueError(f"unknown mask {name!r}; did you mean {near[0]!r}?")
    try:
        return SparseMask.from_pretrained(name, **hub_arguments)
    except OSError as error:
        raise ValueError(
            f"mask {name!r} is no pattern ({', '.join(PATTERNS)}), no search ({', '.join(SEARCHES)}) and cannot be "
            f"read as a folder or Hub id: {error}"
        ) from error


def with_changes(mask, length_policy=None, last_token=None, diagonal=None):
    """A [`SparseMask`] used in another way: fields of [`SparseBertConfig`], of which `None` changes nothing."""
    changes = {"length_policy": length_policy, "last_token": last_token}
    if diagonal is not None:
        check_choice("diagonal", diagonal, tuple(DIAGONALS))
    changes = {name: value for name, value in changes.items() if value is not None}
    return mask.replace(**changes | ({} if diagonal is None else {"diagonal": DIAGONALS[diagonal]}))


def _check_base(model, mask, strict):
    """Whether a mask was found for the weights that it is to be used with."""
    found = tuple(mask.metadata.get(name) for name in ("base_model", "base_model_revision"))
    here = (model.config.name_or_path or None, getattr(model.config, "_commit_hash", None))
    if all(None in pair or pair[0] == pair[1] for pair in zip(found, here, strict=True)):
        return
    found, here = (f"{name} (revision {revision or 'unknown'})" for name, revision in (found, here))
    message = f"the mask was found for {found}, this model is {here}"
    if strict:
        raise ValueError(f"{message}: with strict=True both must be the same")
    logger.warning(f"{message}.")


def attach(model, mask_or_search, *, strict=False, attn_implementation="sparse_auto", **fields):
    """
    Give a stock model a mask, fixed or to be learned. Its configuration and weights stay as they are.

    Args:
        model (`PreTrainedModel`): Base model or head of one of the `ARCHITECTURES`, also inside a PEFT model.
        mask_or_search ([`SparseMask`], `str` or `os.PathLike`): A mask, the folder or Hub id of one, a name of
            `PATTERNS` or a name of `SEARCHES`.
        strict (`bool`): Refuse a mask that was found for another base model or revision, instead of a warning.
        attn_implementation (`str`): Backend.
        fields: Of [`SparseBertConfig`]: `mask_length`, `sparsity_weight`, `share_layers`, ... of a search,
            `mask_length`, `pattern_kwargs`, `head_configuration`, `mask_seed` of a pattern, `length_policy`,
            `last_token`, `diagonal`, `allow_empty_rows` of any.

    Returns:
        `model`, changed in place: it has `sparse_attention`, `freeze`, `set_mask` and a `save_pretrained` that saves
        the mask too; [`load`] reads that back and [`detach`] takes the mask off again.
    Raises:
        ValueError: If the architecture is not supported, the model carries a mask already, the mask does not fit it,
            or a field is wrong or has no meaning here. The model is unchanged then.
    """
    inner = _without_adapters(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"attach needs a model of transformers, got {type(inner).__name__}")
    if "sparse_attention" in inner.base_model._modules:
        raise ValueError(
            f"{type(inner).__name__} carries a mask already: change it by set_mask, or detach the model first"
        )
    check_architecture(inner.config.model_type)
    check_backend(attn_implementation)
    if not isinstance(mask_or_search, (SparseMask, str, PathLike)):
        raise ValueError(f"attach needs a SparseMask or the name of one, got {mask_or_search!r}")
    given = mask_or_search if isinstance(mask_or_search, str) else None
    if refused := sorted(fields.keys() - set(allowed_fields(given))):
        kind = "search" if given in SEARCHES else "pattern" if given in PATTERNS else "given mask"
        raise ValueError(
            f"{refused[0]} has no meaning for a {kind}: the fields may be {', '.join(allowed_fields(given))}"
        )
    mask = None
    if given in SEARCHES or given in PATTERNS:
        fields["search" if given in SEARCHES else "pattern"] = given
    else:
        mask = mask_or_search if isinstance(mask_or_search, SparseMask) else read_mask(mask_or_search)
        _check_base(inner, mask, strict)
    put_on(inner, mask, attn_implementation, **fields)
    return model


def put_on(model, mask, attn_implementation, **fields):
    """[`attach`] without its checks: a [`SparseMask`], or `None` where `fields` name a search or a pattern."""
    if mask is not None:
        mask = with_changes(mask, **{name: fields[name] for name in fields.keys() - {"allow_empty_rows"}})
        fields |= {"frozen": True, "mask_length": mask.length}
    try:
        sparse_attention = make_sparse_attention(model, describe(model, **fields))
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if mask is not None:
        sparse_attention.set_mask(mask, search=mask.metadata.get("search"))
    register(model, sparse_attention.to(model.device).train(model.training))
    become_attached(model, attn_implementation)


def become_attached(model, attn_implementation):
    """Change the class of a model with [`SparseAttention`], and its attention."""
    get_sparse_attention(model).former_attention = model.config._attn_implementation
    model.__class__ = attached_class(type(model))
    model.set_attn_implementation(attn_implementation)


def detach(model):
    """
    Take the mask off again: the model is what it was before [`attach`], with the weights that it has now.

    Returns:
        `model`, changed in place.
    Raises:
        ValueError: If no mask was attached to it.
    """
    inner = _without_adapters(model)
    if not isinstance(inner, AttachedModel):
        raise ValueError(f"no mask was attached to this {type(inner).__name__}: there is nothing to detach")
    sparse_attention = inner.sparse_attention
    for handle in sparse_attention.handles:
        handle.remove()
    for module in attention_modules(inner):
        del module.__dict__["sparse_attention"], module.mask_layer
    inner.__class__ = inner.stock_class
    del inner.base_model.sparse_attention
    inner.set_attn_implementation(sparse_attention.former_attention)
    return model


def sparsity_loss(model):
    """lambda * ||M||_1 of the mask drawn in the model's last training forward, for loops with a loss of their own."""
    return get_sparse_attention(model).sparsity_loss()


def sparsity(model):
    """Fraction of attention entries removed by the model's frozen, or now thresholded, mask."""
    return get_sparse_attention(model).sparsity()
