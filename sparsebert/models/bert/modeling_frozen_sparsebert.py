"""
BERT with a frozen sparse attention mask, for an environment without the package sparsebert, which saved this file with
the model. It needs nothing but transformers, and runs the mask through dense attention: right, but slow. For kernels
that skip what the mask removes, install the package sparsebert from its source and import it.

Letters: B batch, L layers (1 when shared), H heads, n queries (the last n of the m positions), m keys.
"""

import hashlib
import json
import math
from pathlib import Path

import safetensors.torch
import torch
import transformers
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.utils import cached_file, logging


# One logger for all copies of this file, so that a message is logged only once.
logger = logging.get_logger("transformers.sparsebert")

FILES = ("mask_config.json", "mask.safetensors")
# Arguments of `save_pretrained` that are for a push alone.
HUB_UPLOAD_ARGUMENTS = ("repo_id", "commit_message", "private", "revision", "create_pr", "commit_description", "tags")
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
DIAGONALS = {"learned": None, "keep": True, "remove": False}
REMOVED = -1e9
# In the configuration file. It keeps the stock classes of transformers from loading the model without its mask.
ATTENTION = "sparse_auto (of the package sparsebert)"


class SparseBertConfig(transformers.BertConfig):
    """BERT's configuration. What it says about the mask is kept for sparsebert, except what only a search needs."""

    model_type = "sparsebert"


def read_mask(config, contents):
    """The bits of a mask and what describes them, from the contents of its two files."""
    mask = json.loads(contents[0])
    if mask["format_version"] not in (1, 2) or mask.get("rest") not in (None, "none", "mean"):
        what = {name: mask.get(name) for name in ("format_version", "rest")}
        raise ValueError(f"{FILES[0]}: this code does not know {what}: update it")
    if mask.get("weights_sha256") not in (None, hashlib.sha256(contents[1]).hexdigest()):
        raise ValueError(f"{FILES[1]} is not the file that {FILES[0]} was written with: download both again")
    # What the configuration asks for comes first. A pattern was saved with that.
    asked = {} if getattr(config, "pattern", None) else {"diagonal": getattr(config, "diagonal", None)}
    asked |= {name: getattr(config, name, None) for name in ("length_policy", "last_token", "rest", "special_rows")}
    mask |= {name: DIAGONALS.get(value, value) for name, value in asked.items() if value is not None}
    if mask["length_policy"] == "extend" and mask["form"] == "table":
        raise ValueError("length_policy 'extend' has no meaning for this mask: use 'dense' or 'error'")
    layers, heads, size = (mask[name] for name in ("num_layers", "num_heads", "num_parameters"))
    if layers not in (1, config.num_hidden_layers) or heads != config.num_attention_heads:
        raise ValueError(f"{FILES[0]}: the mask is for {layers} layer(s) and {heads} heads, which this model lacks")
    shape = (layers, heads, size, size) if mask["form"] == "table" else (layers, heads, size)
    stored = safetensors.torch.load(contents[1])
    bits = stored["keep"][:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8) & 1
    mask["rest_bias"] = stored.get("rest_bias", torch.zeros(1, heads))
    return bits.flatten()[: math.prod(shape)].bool().view(shape), mask


def expand(keep, mask, length):
    """
    The bits of a mask as a table `(L, H, m, m)`, before special tokens and the diagonal. In an exported graph the
    length may be a symbol, so nothing but the length policy "error" asks how long it is.
    """
    known, policy = mask["length"], mask["length_policy"]
    bounded = policy == "error"
    if bounded and not torch.jit.is_tracing() and length > known:
        raise ValueError(
            f"input of {length} tokens is longer than the mask ({known}): shorten it or set length_policy"
        )
    position = (
        torch.arange(known, device=keep.device)[:length] if bounded else torch.arange(length, device=keep.device)
    )
    last = keep.shape[-1] - 1
    if mask["form"] == "table":
        inside = position if bounded else position.clamp(max=last)
        table = keep.index_select(2, inside).index_select(3, inside)
    else:
        block = position // (mask["block_size"] or 1)
        rows = mask.get("query_block_size")
        first = block if rows is None else position // rows * rows // mask["block_size"]
        offset = first[:, None] - block
        offset = offset.abs() if mask.get("symmetric", True) else offset + last // 2  # the parameters of signed ones
        table = keep[..., offset.clamp(0, last)] & (offset >= 0) & (offset <= last)
    is_new = position >= known
    return table | (is_new[:, None] | is_new) if policy == "dense" else table


class FrozenSelfAttention(BertSelfAttention):
    """Stock self-attention with a 4-D mask of its own."""

    def forward(self, hidden_states, attention_mask=None, *args, keep=None, **kwargs):
        table, special, diagonal, cut, rest = keep
        live = table[self.mask_layer if len(table) > 1 else 0] | special  # (B or 1, H, n, m)
        if diagonal is not None:
            own = torch.ones_like(cut[0, 0]).tril(cut.shape[-1] - cut.shape[-2]).triu(cut.shape[-1] - cut.shape[-2])
            live = live | own if diagonal else live & ~own
        live = live & cut
        if rest is not None:
            real, others, bias = rest
            states = [
                layer(hidden_states).unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2).float()
                for layer in (self.query, self.key, self.value)
            ]  # (B, H, n, d)
            with torch.autocast(hidden_states.device.type, enabled=False):
                bias = bias[self.mask_layer % len(bias)]
                output, weights = self.attend_with_rest(*states, live, real, others, bias)
            return output.to(hidden_states.dtype), weights
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        removed = max(REMOVED, torch.finfo(dtype).min / 2)  # finite, also where two are added
        bias = torch.zeros(live.shape, dtype=dtype, device=live.device).masked_fill(~live, removed)
        if attention_mask is not None:
            if attention_mask.dtype == torch.bool:
                attention_mask = torch.zeros_like(bias[:, :1]).masked_fill(~attention_mask, removed)
            bias = (bias + attention_mask.to(dtype)).clamp(min=removed)
            live = bias > torch.finfo(torch.float16).min / 4
        output, weights = super().forward(hidden_states, bias, *args, **kwargs)
        live = live.any(-1, keepdim=True)  # a query without a key gives 0
        heads = output.unflatten(-1, (self.num_attention_heads, -1)) * live.transpose(1, 2)
        return heads.flatten(-2), None if weights is None else weights * live

    def attend_with_rest(self, query, key, value, live, real, others, bias):
        """Attention with one more key, which stands for all that are removed, see `rest.py` of sparsebert."""
        scale, others = self.attention_head_size**-0.5, others[:, None, :, None]
        count = others.sum(2, keepdim=True).clamp(min=1)
        mean = torch.where(others, query, 0).sum(2, keepdim=True) / count
        scores = (mean @ key.mT * scale).masked_fill(~others.mT, REMOVED)
        weights = scores.softmax(-1)  # (B, H, 1, n)
        own_key, own_value = (weights @ torch.where(others, states, 0) for states in (key, value))
        constant = scores.logsumexp(-1, keepdim=True) - scale * (mean @ own_key.mT) - count.log() + bias[:, None, None]
        removed = real.sum(-1)[:, None, None, None] - live.sum(-1, keepdim=True)  # (B or 1, H, n, 1)
        rest = query @ own_key.mT * scale + constant + removed.clamp(min=1).log()
        scores = (query @ key.mT * scale).masked_fill(~live, REMOVED)
        scores = torch.cat([scores, rest.masked_fill(removed < 1, REMOVED)], -1)
        weights = scores.softmax(-1) * (real[:, None, :, None] & (scores.amax(-1, keepdim=True) > REMOVED / 2))
        weights, last = self.dropout(weights[..., :-1]), weights[..., -1:]
        output = weights @ torch.where(real[:, None, :, None], value, 0) + last * own_value
        return output.transpose(1, 2).flatten(-2), weights


def is_packed(position_ids, padding):
    """Whether positions restart at 0 within a row, and count up by one otherwise. In a graph it depends on data."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    real = padding[:, 1:] & padding[:, :-1]
    restarts = (position_ids[:, 1:] == 0) & real
    counts = position_ids[:, 1:] == position_ids[:, :-1] + 1
    return bool(restarts.any() and (counts & real).any() and (restarts | counts | ~real).all())


class FrozenMask:
    """Mixin of the stock models: reads the mask from the folder or repository of the weights, and saves it again."""

    mask_files = None

    def __init__(self, config, *args, **kwargs):
        fixed = getattr(config, "frozen", False) or getattr(config, "pattern", None)
        searched = config.model_type == "sparsebert" and not fixed
        mixers = set(getattr(config, "token_mixers", None) or ()) - {"attention"}
        if searched or mixers or getattr(config, "probability_map", "softmax") != "softmax":
            reason = "its mask is still being searched" if searched else "it has token mixers or a probability map"
            raise ValueError(f"this model needs the package sparsebert, since {reason}")
        config.attn_implementation = ATTENTION
        if config._attn_implementation == ATTENTION:
            config._attn_implementation = None
        super().__init__(config, *args, **kwargs)
        base = self.base_model
        if base is not self:
            base.__class__ = SparseBertModel
            # By the first model of a class transformers learns which hidden states and attentions it can return.
            with torch.device("meta"):
                SparseBertModel(base.config)
        for index, layer in enumerate(base.encoder.layer):
            layer.attention.self.__class__ = FrozenSelfAttention
            layer.attention.self.mask_layer = index

    @classmethod
    def from_pretrained(cls, source, *args, **kwargs):
        loaded = super().from_pretrained(source, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        paths = [cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub) for name in FILES]
        if None in paths:
            raise ValueError(f"{source}: there is no frozen mask ({', '.join(FILES)}); a search needs sparsebert")
        model.set_mask_files([Path(path).read_bytes() for path in paths])
        logger.warning_once(
            "This model runs its sparse attention mask through dense attention, which is slow. For the fast kernels "
            "install the package sparsebert from its source, `import sparsebert` and load the model with "
            "`sparsebert.load`."
        )
        return loaded

    def set_mask_files(self, contents):
        """Use the mask in the contents of `mask_config.json` and `mask.safetensors`."""
        keep, mask = read_mask(self.config, contents)
        base = self.base_model
        base.mask_files, base.mask = contents, mask
        base.register_buffer("keep", keep.to(self.device), persistent=False)
        rest = mask["rest_bias"].to(self.device) if mask.get("rest", "none") != "none" else None
        base.register_buffer("rest_bias", rest, persistent=False)

    def save_pretrained(self, save_directory, is_main_process=True, *args, push_to_hub=False, **kwargs):
        upload = {name: kwargs.pop(name) for name in HUB_UPLOAD_ARGUMENTS if name in kwargs}
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process and self.base_model.mask_files is not None:
            # Without what it says about the weights beside it, which may have been trained.
            description = json.loads(self.base_model.mask_files[0])
            description.pop("model_weights_sample", None)
            (Path(save_directory) / FILES[0]).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
            (Path(save_directory) / FILES[1]).write_bytes(self.base_model.mask_files[1])
        if push_to_hub:
            upload.setdefault("repo_id", Path(save_directory).name)
            self.push_to_hub(**upload, token=kwargs.get("token"))


class SparseBertModel(FrozenMask, transformers.BertModel):
    """The base model, which prepares what its attention layers need for their masks."""

    config_class = SparseBertConfig

    def forward(
        self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None, **kwargs
    ):
        if self.config._attn_implementation not in ("eager", "sdpa"):
            raise ValueError(
                f"attn_implementation {self.config._attn_implementation!r} cannot apply the mask of this model: use "
                "'sdpa' or 'eager', or the kernels of the package sparsebert"
            )
        if self.mask_files is None:
            raise ValueError("this model has no mask yet: load it with from_pretrained")
        states = input_ids if input_ids is not None else inputs_embeds
        queries = states.shape[1]
        caches = (kwargs.get(name) for name in ("cache", "past_key_values"))  # before transformers 5.24 the latter
        keys = queries + next((cache.get_seq_length() for cache in caches if cache is not None), 0)
        padding = torch.ones(1, keys, dtype=torch.bool, device=states.device)
        if attention_mask is not None and attention_mask.dim() not in (2, 4):
            raise ValueError(f"attention_mask must have two or four dimensions, got {tuple(attention_mask.shape)}")
        if attention_mask is not None and attention_mask.dim() == 2:
            padding, attention_mask = attention_mask.to(states.device).bool(), None
        if self.rest_bias is not None and (attention_mask is not None or self.config.is_decoder):
            raise ValueError("a mask with rest 'mean' supports neither a 4-D attention_mask nor a decoder")
        if (
            position_ids is not None
            and keys == queries
            and attention_mask is None
            and is_packed(position_ids, padding)
        ):
            raise ValueError(
                "position_ids restart within a row: packed rows, whose documents attend to themselves only, need "
                "the package sparsebert"
            )
        position = torch.arange(keys, device=states.device)
        special = torch.zeros_like(padding)
        if self.mask["special_tokens"] != "none":
            special = position == padding.int().argmax(-1, keepdim=True)
        if self.mask["special_tokens"] == "first_last":
            real = self.mask["last_token"] == "real"
            special = special | (position == ((padding * position).argmax(-1, keepdim=True) if real else keys - 1))
        rows = slice(keys - queries, keys)
        cut = padding[:, None, rows, None] & padding[:, None, None, :]
        if self.config.is_decoder:
            cut = cut & (position[rows, None] >= position)
        table = expand(self.keep.to(states.device), self.mask, keys)[:, :, rows]
        columns = special[:, None, None, :]
        with_rows = self.mask.get("special_rows", True)
        special_entries = special[:, None, rows, None] | columns if with_rows else columns
        rest = None if self.rest_bias is None else (padding, padding & ~special, self.rest_bias)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            keep=(table, special_entries, self.mask["diagonal"], cut, rest),
            **kwargs,
        )


class BertModel(SparseBertModel):
    """What `sparsebert.attach` gave a mask, whose configuration stays stock."""

    config_class = transformers.BertConfig


HEADS = ("PreTraining", "MaskedLM", "NextSentencePrediction", "SequenceClassification")
HEADS += ("TokenClassification", "QuestionAnswering", "MultipleChoice")
for _stock in ("BertLMHeadModel", *(f"BertFor{head}" for head in HEADS)):
    for _name, _config in ((_stock, transformers.BertConfig), (f"Sparse{_stock}", SparseBertConfig)):
        _fields = {"__module__": __name__, "config_class": _config}
        globals()[_name] = type(_name, (FrozenMask, getattr(transformers, _stock)), _fields)
