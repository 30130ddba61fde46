"""
The one home of a model's attention mask: learned while searching, frozen afterwards.

Letters: B batch, L layers with attention (1 when shared), H heads, n queries, m keys, K learned parameters per head.
"""

import operator
from dataclasses import replace

import torch
from transformers.utils import logging

from ..attention.backends import BACKENDS, check_backend, choose_backend
from ..attention.mask_inputs import MaskInputs
from ..attention.probability_maps import ProbabilityMap
from ..attention.windows import local_inputs
from ..masks.compiled import windowed
from ..masks.sparse_mask import DIAGONALS
from ..search.learned_mask import LearnedMask
from .configuration_sparsebert import pattern_mask


logger = logging.get_logger(__name__)

ONE_LAYER = "the model runs the same weights in every layer, so there is one mask for all"


class SparseAttention(LearnedMask):
    """
    Owns everything about a model's mask: the learned logits while searching, the frozen [`SparseMask`] afterwards.

    Registered once on the base model as `sparse_attention`; its parameters are `mask_logits` while searching, see
    [`LearnedMask`], and that of a learned probability map, see [`ProbabilityMap`].

    Args:
        config ([`SparseBertConfig`]): Says what is searched, or which pattern is fixed.
        window (`int`, *optional*): In the model's sliding-window layers a token attends up to this offset, whatever
            the mask says.
        local_layers (`tuple`): Indices of those layers.
        one_layer (`bool`): Whether all layers are the same module, which has one mask.
    """

    def __init__(self, config, window=None, local_layers=(), one_layer=False):
        if one_layer and not config.share_layers:
            raise ValueError(f"share_layers must be true: {ONE_LAYER}")
        super().__init__(config)
        self.window = window
        self.local_layers = local_layers
        self.one_layer = one_layer
        self.argument_names = ()
        # What an observer of the attention asks of the backend: keys of `WANTED`.
        self.needs = frozenset()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.num_layers = config.num_attention_layers
        self.probability_map = ProbabilityMap(
            config.probability_map, config.probability_map_kwargs, self.num_layers, config.num_attention_heads
        )
        self._mask = None
        if config.pattern is not None:
            # The host builds models on the meta device; a mask is data, not a weight.
            with torch.device("cpu"):
                self._set_mask(pattern_mask(config))

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
                `allow_empty_rows`), or is undefined in a decoder; and if no layer of the model has attention.
        """
        if not self.num_layers:
            raise ValueError("no layer of this model has attention (token_mixers): it cannot carry a mask")
        self._set_mask(mask)
        config = self.config
        config.frozen = True
        config.pattern = config.pattern_kwargs = config.head_configuration = None
        config.pruned = False
        config.search = search
        config.mask_length = mask.length
        config.last_token = mask.last_token
        config.length_policy = mask.length_policy
        config.diagonal = {value: name for name, value in DIAGONALS.items()}[mask.diagonal]

    def _set_mask(self, mask):
        config = self.config
        expected = (self.num_layers, config.num_attention_heads)
        if mask.num_layers not in (1, expected[0]) or mask.num_heads != expected[1]:
            raise ValueError(
                f"the mask is for {mask.num_layers} layer(s) and {mask.num_heads} heads of length {mask.length}; "
                f"the model has {expected[0]} layers with attention (or 1 mask for all) and {expected[1]} heads"
            )
        if self.one_layer and mask.num_layers > 1:
            raise ValueError(f"the mask is for {mask.num_layers} layers, but {ONE_LAYER}")
        if config.is_decoder and mask.special_tokens == "first_last":
            raise ValueError("special_tokens 'first_last' is undefined in a decoder: use 'first' or 'none'")
        if not config.allow_empty_rows:
            mask.check_rows()
            if self.window is not None:
                windowed(mask, self.window, mask.length).check_rows()
        self._mask = mask
        self._cache = {}
        self._drawn = None
        self.mask_logits = None

    def mask_probs(self):
        """
        P of every entry at the mask's length, special tokens and a fixed diagonal included.

        Returns:
            `torch.Tensor` of shape `(L, H, n, n)`, float32, on the CPU, without gradient.
        """
        length = self.config.mask_length
        if not self.searching:
            return self._loaded_mask().to_table(length).float()
        with torch.no_grad():
            probs = self._expand(self.probs(), length, off=0.0, on=1.0).cpu()
            return torch.where(self._fixed(length) >= 0, self._fixed(length).float(), probs)

    def freeze(self, threshold=None, sparsity=None, metadata=None):
        """
        End the search: keep the parameters with P above `threshold`, or the most probable ones up to a sparsity. By
        default that is the target sparsity, and without one the threshold 1/2.

        Args:
            threshold (`float`, *optional*): In [0, 1).
            sparsity (`float`, *optional*): Fraction of entries to remove per head, met as nearly as the form allows.
            metadata (`dict`, *optional*): Provenance to store with the mask.

        Returns:
            [`SparseMask`]: What the model now runs through.
        Raises:
            ValueError: On a frozen model, for a value out of range, or if a row would keep nothing.
        """
        config = self.config
        self.alpha()  # raises on a frozen model
        self.progress.fill_(1.0)
        for problem in self.outcome(threshold, sparsity)["warnings"]:
            logger.warning(problem)
        provenance = {
            "search": config.search,
            "base_model": config.name_or_path or None,
            "base_model_revision": getattr(config, "_commit_hash", None),
        }
        mask = self.thresholded_mask(threshold, sparsity).replace(metadata=provenance | (metadata or {}))
        self.set_mask(mask, search=config.search)
        return mask

    def sparsity(self):
        """Fraction of entries that the frozen, or now thresholded, mask removes at its own length."""
        return (self.thresholded_mask() if self.searching else self._loaded_mask()).sparsity

    def forward(
        self,
        name,
        batch,
        num_queries,
        num_keys,
        padding=None,
        dropout=0.0,
        *,
        device,
        dtype=torch.float32,
        needs=frozenset(),
    ):
        """
        Prepare one forward of the base model: draw the mask (training search), threshold it (evaluation), or look the
        frozen one up, and bring it into the form that the backend reads.

        Args:
            name (`str`): The model's attention implementation.
            batch (`int`): B.
            num_queries (`int`): n; the queries are the last n of the m positions.
            num_keys (`int`): m.
            padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token.
            dropout (`float`): Probability of attention dropout, 0 in evaluation.
            device (`torch.device`): Of the activations.
            dtype (`torch.dtype`): Of query, key and value.
            needs (`frozenset`): `"weights"` where the probabilities are asked for, `"additive"` where a 4-D mask of
                the caller comes on top.

        Returns:
            [`MaskInputs`]
        Raises:
            ValueError: If the backend cannot serve this.
        """
        config = self.config
        learning = self.searching and self.training and not config.pruned
        needs = needs | self.needs
        if learning and self.window is not None:
            needs = needs | {"additive"}  # the windows come on top
        merged = "additive" in needs
        if self.searching:
            needs = needs | {"learned" if learning else "additive"}
        if learning and self.mask_form == "multiplicative":
            needs = needs | {"gate"}
        mask = None if self.searching else self._loaded_mask()
        causal = bool(config.is_decoder)
        # Only a measurement depends on these; a compiled graph should not.
        batch = operator.index(batch) if name == "sparse_measure" else 1
        dropout = dropout if name == "sparse_measure" or not dropout else 0.5
        if not self.num_layers:
            check_backend(name)
            return MaskInputs(name, num_queries, num_keys, device, mask, padding)
        shape = (batch, config.num_attention_heads, num_queries, num_keys, self.head_size)
        request = (device.type, dtype, *shape, dropout, torch.is_grad_enabled(), padding is not None, causal)
        backend = choose_backend(name, mask, *request, frozenset(needs), config.probability_map)
        maps = self.probability_map(num_keys)
        inputs = MaskInputs(backend, num_queries, num_keys, device, mask, padding, causal, probability_map=maps)
        if learning:
            if config.target_sparsity is not None and not self._is_scheduled and not torch.compiler.is_compiling():
                logger.warning_once(
                    "target_sparsity: nothing tells the mask how far the training is, so its search is as at the end "
                    "from the first step on; pass callbacks=[SearchSchedule()] to the Trainer, or call "
                    "sparse_attention.set_progress in a loop of your own"
                )
            prepared = self._drawn_inputs(inputs, merged=merged or backend != "sparse_sdpa")
        else:
            self._drawn = None
            if not self.searching:
                prepared = BACKENDS[backend].prepare(mask, inputs)
            else:
                prepared = self._pruned_inputs(inputs) if config.pruned else self._thresholded_inputs(inputs)
        inputs = replace(inputs, **prepared)
        if self.window is None:
            return inputs
        local = local_inputs(inputs, self.window, name, request, needs)
        return replace(inputs, local=local, local_layers=self.local_layers)

    def _loaded_mask(self):
        if self._mask is None:
            raise ValueError("this model is frozen but its mask is not loaded: use from_pretrained or set_mask")
        return self._mask
