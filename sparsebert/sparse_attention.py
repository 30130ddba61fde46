"""
The one home of a model's attention mask: learned while searching, frozen afterwards.

Letters: B batch, L layers (1 when shared), H heads, n queries, m keys, K learned parameters per head.
"""

import torch
from torch import nn
from transformers import initialization as init

from .attention import BACKENDS, choose_backend
from .attention.mask_inputs import REMOVED, MaskInputs, additive
from .configuration_sparsebert import DIAGONALS, MAX_MASK_CONSTANT
from .masks.patterns import build_pattern
from .masks.search import (
    SEARCHES,
    mask_bias,
    num_parameters,
    parameter_index,
    sample_mask,
    select,
    to_sparse_mask,
)
from .masks.sparse_mask import default_length_policy, special_entries


class SparseAttention(nn.Module):
    """
    Owns everything about a model's mask: the learned logits while searching, the frozen [`SparseMask`] afterwards.

    Registered once on the base model as `sparse_attention`. While searching it has one parameter, `mask_logits` of
    shape `(L, H, K)`, theta with alpha = `mask_logit_scale` * theta; a frozen one has none.

    Args:
        config ([`SparseBertConfig`]): Says what is searched, or which pattern is fixed.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.argument_names = ()
        self.diagonal = DIAGONALS[config.diagonal]
        self._mask = None
        self._drawn = None
        self._cache = {}
        self.register_parameter("mask_logits", None)
        self.search = None if config.search is None else SEARCHES[config.search]
        if self.search is not None:
            # In a decoder the last token changes as it generates.
            special_tokens = "first" if config.is_decoder and self.search.special_tokens != "none" else None
            self.special_tokens = config.special_tokens or special_tokens or self.search.special_tokens
            self.mask_constant = float(config.mask_constant or self.search.mask_constant)
        if config.pattern is not None:
            # The host builds models on the meta device; a mask is data, not a weight.
            with torch.device("cpu"):
                mask = build_pattern(
                    config.pattern,
                    config.mask_length,
                    config.num_attention_heads,
                    num_layers=config.num_hidden_layers,
                    seed=config.mask_seed,
                    head_configuration=config.head_configuration,
                    **(config.pattern_kwargs or {}),
                )
                self._set_mask(self._configured(mask))
        elif not config.frozen:
            size = num_parameters(
                self.search.form, config.mask_length, config.symmetric, self.special_tokens, config.block_size
            )
            num_layers = 1 if config.share_layers else config.num_hidden_layers
            self.mask_logits = nn.Parameter(torch.empty(num_layers, config.num_attention_heads, size))
            self.reset_parameters()

    def _configured(self, mask):
        """A pattern under the configuration's choices on diagonal, last token and length."""
        config = self.config
        changes = {"last_token": config.last_token}
        if self.diagonal is not None:
            changes["diagonal"] = self.diagonal
        if config.is_decoder and mask.special_tokens == "first_last":
            # A global last token is the one at the end of the mask, whatever has been generated so far.
            changes |= {"keep": mask.to_table(), "form": "table", "block_size": None, "special_tokens": "none"}
            changes["length_policy"] = default_length_policy("table")
        if config.length_policy is not None:
            changes["length_policy"] = config.length_policy
        return mask.replace(**changes)

    def reset_parameters(self):
        """alpha ~ 1e-3 N(0, 1), so that P starts at 1/2 (SparseBERT, Algorithm 1)."""
        if self.mask_logits is not None:
            init.normal_(self.mask_logits, mean=0.0, std=1e-3 / self.config.mask_logit_scale)

    # deepcopy and pickle: a drawn mask has a graph, which neither can take; the cache is made anew.
    def __getstate__(self):
        return self.__dict__ | {"_drawn": None, "_cache": {}}

    @property
    def mask(self):
        """The frozen [`SparseMask`], or `None` while searching."""
        return self._mask

    @property
    def searching(self):
        """Whether the mask is being learned."""
        return self.mask_logits is not None

    def set_mask(self, mask, search=None):
        """
        Run through this mask from now on; a search ends, and its logits are dropped. The configuration then says that
        the mask is a file beside the weights.

        Args:
            mask ([`SparseMask`]): For the model's heads and layers.
            search (`str`, *optional*): The search that found it, for the record.

        Raises:
            ValueError: If it is for other heads or layers, has a row that keeps nothing (unless the configuration's
                `allow_empty_rows`), or is undefined in a decoder.
        """
        self._set_mask(mask)
        config = self.config
        config.frozen = True
        config.pattern = config.pattern_kwargs = config.head_configuration = None
        config.search = search
        config.mask_length = mask.length
        config.last_token = mask.last_token
        config.length_policy = mask.length_policy
        config.diagonal = {value: name for name, value in DIAGONALS.items()}[mask.diagonal]

    def _set_mask(self, mask):
        config = self.config
        expected = (config.num_hidden_layers, config.num_attention_heads)
        if mask.num_layers not in (1, expected[0]) or mask.num_heads != expected[1]:
            raise ValueError(
                f"the mask is for {mask.num_layers} layer(s) and {mask.num_heads} heads of length {mask.length}; "
                f"the model has {expected[0]} layers (or 1 mask for all) and {expected[1]} heads"
            )
        if config.is_decoder and mask.special_tokens == "first_last":
            raise ValueError("special_tokens 'first_last' is undefined in a decoder: use 'first' or 'none'")
        if not config.allow_empty_rows:
            mask.check_rows()
        self._mask = mask
        self._cache = {}
        self._drawn = None
        self.mask_logits = None

    def alpha(self):
        """Mask logits `(L, H, K)`, float32. Raises `ValueError` on a frozen model."""
        if self.mask_logits is None:
            raise ValueError("the mask is frozen (or not loaded): there are no mask logits")
        return self.config.mask_logit_scale * self.mask_logits.float()

    def mask_probs(self):
        """
        P = sigmoid(alpha) of every entry at the mask's length, special tokens and a fixed diagonal included.

        Returns:
            `torch.Tensor` of shape `(L, H, n, n)`, float32, on the CPU, without gradient.
        """
        length = self.config.mask_length
        if not self.searching:
            return self._loaded_mask().to_table(length).float()
        with torch.no_grad():
            probs = self._expand(torch.sigmoid(self.alpha()), length, off=0.0, on=1.0).cpu()
            return torch.where(self._fixed(length) >= 0, self._fixed(length).float(), probs)

    def freeze(self, threshold=0.5, sparsity=None, metadata=None):
        """
        End the search: keep the parameters with P above `threshold`, or the most probable ones up to a sparsity.

        Args:
            threshold (`float`, *optional*, defaults to 0.5): In [0, 1).
            sparsity (`float`, *optional*): Fraction of entries to remove per head, met as nearly as the form allows.
            metadata (`dict`, *optional*): Provenance to store with the mask.

        Returns:
            [`SparseMask`]: What the model now runs through.
        Raises:
            ValueError: On a frozen model, for a value out of range, or if a row would keep nothing.
        """
        config = self.config
        provenance = {
            "search": config.search,
            "base_model": config.name_or_path or None,
            "base_model_revision": getattr(config, "_commit_hash", None),
        }
        mask = self.thresholded_mask(threshold, sparsity).replace(metadata=provenance | (metadata or {}))
        self.set_mask(mask, search=config.search)
        return mask

    @torch.no_grad()
    def thresholded_mask(self, threshold=0.5, sparsity=None):
        """The [`SparseMask`] that [`~SparseAttention.freeze`] would set."""
        config = self.config
        fixed = self._fixed(config.mask_length)
        selected = select(
            torch.sigmoid(self.alpha()).cpu(),
            self._counts(),
            int((fixed == 1).sum()),
            threshold=threshold,
            sparsity=sparsity,
            length=config.mask_length,
        )
        return to_sparse_mask(
            selected,
            self.search.form,
            config.mask_length,
            symmetric=config.symmetric,
            block_size=config.block_size,
            special_tokens=self.special_tokens,
            last_token=config.last_token,
            diagonal=self.diagonal,
            length_policy=config.length_policy,
        )

    def sparsity(self):
        """Fraction of entries that the frozen, or now thresholded, mask removes at its own length."""
        return (self.thresholded_mask() if self.searching else self._loaded_mask()).sparsity

    def sparsity_loss(self):
        """
        lambda * ||M||_1 of the mask drawn in the last training forward: a sum over the entries of one layer's masks
        at the mask's length, all heads (mean over layers). 0 when nothing was drawn.

        Source: SparseBERT (arXiv 2102.12871), Eq. 7.
        """
        if self._drawn is None:
            return torch.zeros(())
        device = self._drawn.device
        fixed = self._cached("fixed", device, lambda: (self._fixed(self.config.mask_length) == 1).sum())
        counts = self._cached("counts", device, self._counts)
        norm = (self._drawn * counts).sum(dim=(1, 2)) + fixed * self._drawn.shape[1]
        return self.config.sparsity_weight * norm.mean()

    def forward(self, name, num_queries, num_keys, padding, dropout, device, output_attentions):
        """
        Prepare one forward of the base model: draw the mask (training search), threshold it (evaluation), or look the
        frozen one up, and merge it with padding and causality.

        Args:
            name (`str`): The model's attention implementation.
            num_queries (`int`): n; the queries are the last n of the m positions.
            num_keys (`int`): m.
            padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
            dropout (`bool`): Whether attention dropout is active.
            device (`torch.device`): Of the activations.
            output_attentions (`bool`): Whether probabilities are asked for.

        Returns:
            [`MaskInputs`]
        """
        config = self.config
        learning = self.searching and self.training
        gated = learning and config.mask_form == "multiplicative"
        required = ({"gate"} if gated else set()) | ({"weights"} if output_attentions else set())
        backend = choose_backend(name, required, learning, dropout, num_keys, device.type)
        inputs = {"backend": backend, "num_keys": num_keys, "padding": padding, "causal": bool(config.is_decoder)}
        if learning:
            inputs |= self._drawn_inputs(num_queries, num_keys, padding, device)
        else:
            self._drawn = None
            mask = self.thresholded_mask() if self.searching else self._loaded_mask()
            inputs["sparse_mask"] = mask
            if BACKENDS[backend].needs_bias:
                inputs |= self._frozen_inputs(mask, num_queries, num_keys, padding, device)
        return MaskInputs(**inputs)

    def _loaded_mask(self):
        if self._mask is None:
            raise ValueError("this model is frozen but its mask is not loaded: use from_pretrained or set_mask")
        return self._mask

    def _cached(self, key, device, make):
        if torch.compiler.is_compiling():
            return make().to(device)  # a cache that changes would have every step compiled again
        key = (key, device)
        if key not in self._cache:
            # What is made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                self._cache[key] = make().to(device)
        return self._cache[key]

    def _corner(self, key, length, device, make):
        """
        What `make(length)` gives, `(..., n, n)`, from the cache; that of a shorter length is the corner of a longer.
        """
        cached = self._cache.get((key, device))
        if cached is None or cached.shape[-1] < length:
            self._cache.pop((key, device), None)
            cached = self._cached(key, device, lambda: make(length))
        return cached[..., :length, :length]

    def _index(self, length, device):
        config = self.config
        return self._corner(
            "index",
            length,
            device,
            lambda n: parameter_index(self.search.form, n, config.mask_length, config.symmetric, config.block_size),
        )

    def _fixed(self, length):
        """int8 `(n, n)`: 1 on, 0 off, -1 learned."""
        fixed = torch.full((length, length), -1, dtype=torch.int8)
        fixed[special_entries(length, self.special_tokens)] = 1
        if self.diagonal is not None:
            fixed.fill_diagonal_(int(self.diagonal))
        return fixed

    def _counts(self):
        """Learned entries per parameter at the mask's length: float `(K,)`."""
        length = self.config.mask_length
        learned = self._index(length, torch.device("cpu"))[self._fixed(length) == -1]
        return learned.bincount(minlength=self.mask_logits.shape[-1]).float()

    def _expand(self, values, length, off, on):
        """`(L, H, K)` values of parameters as `(L, H, n, n)` of entries."""
        config = self.config
        policy = config.length_policy or default_length_policy(self.search.form)
        if length > config.mask_length and policy == "error":
            raise ValueError(
                f"input of {length} tokens is longer than mask_length ({config.mask_length}): shorten it, or set "
                "length_policy to 'dense'"
            )
        values = nn.functional.pad(values, (0, 1), value=off)
        index = self._index(length, values.device).clamp(max=values.shape[-1] - 1)
        table = values.flatten(0, 1).index_select(1, index.flatten()).view(*values.shape[:2], length, length)
        if length > config.mask_length and policy == "dense":
            beyond = torch.arange(length, device=values.device) >= config.mask_length
            table = table.masked_fill(beyond[:, None] | beyond[None, :], on)
        return table

    def _drawn_inputs(self, num_queries, num_keys, padding, device):
        config = self.config
        alpha = self.alpha()
        if self.search.stochastic:
            mask, noisy = sample_mask(alpha, config.temperature, config.hard)
            hard = config.hard
        else:
            mask, noisy, hard = torch.sigmoid(alpha), alpha, False
        self._drawn = mask
        special = self._special(num_queries, num_keys, padding, device, self.special_tokens, config.last_token)
        if config.mask_form == "multiplicative":
            gate = self._expand(mask, num_keys, off=0.0, on=1.0)[:, None, :, num_keys - num_queries :]
            gate = _set_entries(gate, special, self.diagonal, on=1.0, off=0.0)
            bias = self._with_cuts(torch.zeros(1, 1, num_queries, num_keys, device=device), padding)
            return {"gate": gate.unbind(0), "bias": (bias,)}
        constant = self.mask_constant
        bias = mask_bias(mask, noisy, config.mask_form, constant, hard)
        bias = self._expand(bias, num_keys, off=-constant, on=0.0)[:, None, :, num_keys - num_queries :]
        bias = _set_entries(bias, special, self.diagonal, on=0.0, off=-constant)  # (L, B or 1, H, n, m)
        return {"bias": self._with_cuts(bias, padding).unbind(0)}

    def _frozen_inputs(self, mask, num_queries, num_keys, padding, device):
        # One padded batch differs from the next; without padding the last additive mask is kept.
        key = (num_queries, num_keys, device)
        reusable = padding is None and not (
            self.searching or torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        )
        if reusable and self._cache.get("key") == key:
            return self._cache["bias"]
        if self.searching:
            structure = mask.structure(num_keys).to(device)
        else:
            structure = self._corner("structure", num_keys, device, mask.structure)
        keep = structure[:, None, :, num_keys - num_queries :]
        special = self._special(num_queries, num_keys, padding, device, mask.special_tokens, mask.last_token)
        keep = _set_entries(keep, special, mask.diagonal, on=True, off=False)  # (L, B or 1, H, n, m)
        if self.searching:
            # As in training: a query whose mask row is empty attends as if it were full.
            bias = torch.zeros(keep.shape, device=device).masked_fill_(~keep, -MAX_MASK_CONSTANT)
            return {"bias": self._with_cuts(bias, padding).unbind(0)}
        if padding is not None:
            keep = keep & padding[:, None, None, :]
            keep = keep & padding[:, None, num_keys - num_queries :, None]
        if self.config.is_decoder:
            keep = keep & _causal(num_queries, num_keys, device)
        live = keep.any(-1, keepdim=True)
        inputs = {"bias": additive(keep).unbind(0)}
        if padding is not None or torch.compiler.is_compiling() or not live.all():
            inputs["live"] = live.unbind(0)
        if reusable:
            self._cache |= {"key": key, "bias": inputs}
        return inputs

    def _special(self, num_queries, num_keys, padding, device, special_tokens, last_token):
        """Bool `(B or 1, 1, n, m)`: rows and columns of the special tokens."""
        last = None
        if padding is not None and last_token == "real":
            last = (padding * torch.arange(num_keys, device=device)).argmax(-1)
        special = special_entries(num_keys, special_tokens, last, device).view(-1, 1, num_keys, num_keys)
        return special[:, :, num_keys - num_queries :]

    def _with_cuts(self, bias, padding):
        """Padded keys and, in a decoder, future keys removed from a bias `(..., n, m)`."""
        if padding is not None:
            bias = bias.masked_fill(~padding[:, None, None, :], REMOVED)
        if self.config.is_decoder:
            bias = bias.masked_fill(~_causal(bias.shape[-2], bias.shape[-1], bias.device), REMOVED)
        return bias


def _set_entries(values, special, diagonal, on, off):
    """Special tokens and a fixed diagonal over `(L, 1, H, n, m)` values; the batch dimension may grow."""
    on, off = (torch.as_tensor(value, dtype=values.dtype, device=values.device) for value in (on, off))
    values = torch.where(special, on, values)
    if diagonal is None:
        return values
    num_queries, num_keys = values.shape[-2:]
    position = torch.arange(num_keys, device=values.device)
    on_diagonal = position[num_keys - num_queries :, None] == position
    return torch.where(on_diagonal, on if diagonal else off, values)


def _causal(num_queries, num_keys, device):
    position = torch.arange(num_keys, device=device)
    return position[num_keys - num_queries :, None] >= position[None, :]
