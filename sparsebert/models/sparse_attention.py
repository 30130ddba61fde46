"""
The attention mask of a model: a search while it is learned, a frozen mask afterwards.

Letters: B batch, L layers with attention (1 when shared), H heads, n queries, m keys, K learned parameters per head.
"""

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention.backends import BACKENDS
from ..attention.choosing.choice import check_backend, choose_backend
from ..attention.distance_bias import with_distance_forms
from ..attention.mask_inputs import MaskInputs
from ..attention.model_masks import sparse_attention_of, without_adapters
from ..attention.packed_batches import DocumentSpans
from ..attention.probability_maps import Float32Module, ProbabilityMap
from ..attention.rest import check_rest, rest_fields
from ..attention.windows import local_inputs
from ..learning.learned_inputs import drawn_inputs, pruned_inputs, thresholded_inputs
from ..learning.learned_mask import LearnedMask
from ..learning.mask_description import HELD_BY_MASK, STATE_FIELDS, Carrier, MaskFields, pattern_mask
from ..learning.mask_search import MaskSearch, described_search
from ..learning.searches import SEARCHES
from ..masks.compiled_forms import with_real_last
from ..masks.exported import exporting
from ..masks.mask_files import check_metadata
from ..masks.patterns import as_mask
from ..masks.sparse_mask import SparseMask


logger = logging.get_logger(__name__)

ONE_LAYER = "the model runs the same weights in every layer, so there is one mask for all"
SEARCHING = (
    "a mask that is being learned cannot be exported or traced: end the search first, with sparse_attention.freeze()"
)
NOT_LOADED = "this model is frozen but its mask is not loaded: use from_pretrained or set_mask"


class SparseAttention(Float32Module):
    """
    The attention mask of a model, attached once to the base model as `sparse_attention`.

    It is in one of two states. While the mask is being learned, `search` is a [`MaskSearch`] and `mask_logits` a
    parameter; `learned` combines them into a [`LearnedMask`]. Once the mask is frozen, `mask` is a [`SparseMask`] and
    there are no logits. A model whose mask has not been read from its file yet has neither.

    Args:
        config ([`SparseBertConfig`] or [`MaskDescription`]): Describes the search, or the fixed pattern, and what has
            become of it. That of a SparseBERT is its configuration.
        mask ([`SparseMask`], *optional*): The frozen mask, used as the configuration says.
        carrier ([`Carrier`], *optional*): What has to be known about the model. Defaults to that of the configuration
            of a SparseBERT.

    Attributes:
        mask_logits (`torch.nn.Parameter` of shape `(L, H, K)`): The stored logits, or `None`.
        search ([`MaskSearch`]): The rules of the search, or `None`.
        progress (`torch.Tensor`): Fraction of the search that is done. It is a tensor so that a compiled training step
            is not compiled again when it changes.
        probability_map ([`ProbabilityMap`]): What turns scores into probabilities.
        head_size (`int`): Size of a head.
        num_layers (`int`): Number of layers with attention.
        weights_wanted (`bool`): Whether training runs on a backend that returns attention probabilities.
        places (`tuple` of `str`): Names of the attention modules in the base model, once it is attached.
        lists (`dict`): Lengths of the lists of layers in the base model by name, likewise.
        masks_of_adapters (`dict`): Frozen masks by the name of PEFT's adapters that were loaded with them.
        stock_named (`str`, *optional*): The backend that was asked for by the name that transformers has for it.
    """

    mask_logits: nn.Parameter | None
    probability_map: ProbabilityMap

    def __init__(self, config: MaskFields, mask: SparseMask | None = None, carrier: Carrier | None = None) -> None:
        if carrier is None:
            carrier = config.carrier  # type: ignore[attr-defined]  # of a SparseBertConfig
        assert carrier is not None
        if carrier.one_layer and not config.share_layers:
            raise ValueError(f"share_layers must be true: {ONE_LAYER}")
        super().__init__()
        self.config = config
        self.carrier = carrier
        self.head_size = carrier.head_size
        self.num_layers = carrier.num_layers
        self.probability_map = ProbabilityMap(
            config.probability_map, config.probability_map_kwargs, self.num_layers, carrier.num_heads
        )
        self.search: MaskSearch | None = None
        done = 1.0 if config.search_progress is None else config.search_progress
        # Models are loaded under the dtype of their weights.
        self.progress = torch.tensor(float(done), dtype=torch.float32, device="cpu")
        self._mask: SparseMask | None = None
        self._scheduled = self.weights_wanted = False
        self.places: tuple[str, ...] = ()
        self.lists: dict[str, int] = {}
        self.masks_of_adapters: dict[str, SparseMask] = {}
        self.stock_named: str | None = None
        self._sample: torch.Tensor | None = None
        self.register_parameter("mask_logits", None)
        if mask is not None:
            self.set_mask(config.used(mask), search=mask.metadata.get("search"))
        elif config.pattern is not None:
            # Transformers builds models on the meta device; a mask is data, not a weight.
            with torch.device("cpu"):
                self._use_mask(pattern_mask(config, carrier))
        elif not config.frozen:
            self.search = described_search(config, carrier)
            shape = (self.search.num_layers, self.search.num_heads, self.search.num_parameters)
            # Whatever the dtype of the model: steps of a search are too small for half precision.
            self.mask_logits = nn.Parameter(torch.empty(shape, dtype=torch.float32))
            self.reset_parameters()

    # For deepcopy and pickle, which cannot take a tensor with a graph.
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sample": None}

    def reset_parameters(self) -> None:
        """Initialize the mask logits, unless they were read from a checkpoint."""
        if self.search is not None and self.mask_logits is not None:
            self.search.initialize(self.mask_logits)

    @property
    def mask(self) -> SparseMask | None:
        """The frozen [`SparseMask`], or `None` while searching."""
        return self._mask

    @property
    def learned(self) -> LearnedMask | None:
        """The [`LearnedMask`] at this moment of the search, or `None` if the mask is frozen."""
        if self.search is None or self.mask_logits is None:
            return None
        return LearnedMask(self.search, self.mask_logits, self.progress)

    @property
    def searching(self) -> bool:
        """Whether the mask is being learned."""
        return self.search is not None

    def _learned_mask(self) -> LearnedMask:
        if (learned := self.learned) is None:
            raise ValueError("the mask of this model is frozen: there is no search to read or to end")
        return learned

    def _frozen_mask(self) -> SparseMask:
        if self._mask is None:
            raise ValueError(NOT_LOADED)
        return self._mask

    def set_progress(self, done: float) -> None:
        """
        Set the fraction of the search that is done, in [0, 1], which the schedules of temperature and sparsity follow.
        A new search whose progress is never set runs as at its end.
        """
        if not 0 <= done <= 1:
            raise ValueError(f"progress must be in [0, 1], got {done!r}")
        self.progress.fill_(done)
        self._scheduled = True

    def record_progress(self) -> None:
        """Describe how much of the search is done, and on which model, before the model is saved."""
        done = self.progress.item() if self.searching else 1.0
        base_model, revision = self._base() if self.searching else (None, None)
        self.config = self.config.changed(
            search_progress=None if done == 1.0 else done, base_model=base_model, base_model_revision=revision
        )

    def _base(self) -> tuple[str, str | None]:
        """The model that the search began with, `""` for a new one, and its revision."""
        config = self.config
        if config.base_model is not None:  # the search was saved and loaded since
            return config.base_model, config.base_model_revision
        return self.carrier.name, self.carrier.revision

    def start_pruning(self) -> None:
        """Stop sampling the searched mask: from now on all that [`LearnedMask.prune`] has not removed is on."""
        self.search, self._sample = self._learned_mask().search.changed(pruned=True), None
        self.config = self.config.changed(pruned=True)

    def set_mask(self, mask: SparseMask | torch.Tensor, search: str | None = None) -> None:
        """
        Use this mask from now on. If the model is searching, the search ends and its logits are dropped. The
        configuration then says that the mask is a file next to the weights.

        Args:
            mask ([`SparseMask`] or `torch.Tensor`): A mask for the heads and layers of the model, see [`attach`].
            search (`str`, *optional*): The search that found it, for the record.

        Raises:
            ValueError: If it does not fit the model, or has a row that keeps nothing, without `allow_empty_rows`.
        """
        mask = as_mask(mask, self.carrier.num_heads)
        if not self.num_layers:
            raise ValueError("no layer of this model has attention (token_mixers): it cannot carry a mask")
        self._use_mask(mask)
        state: dict[str, Any] = dict.fromkeys((*STATE_FIELDS, *HELD_BY_MASK))
        state |= {"frozen": True, "pruned": False, "search": search if search in SEARCHES else None}
        self.config = self.config.changed(**state, mask_length=mask.length)

    def _use_mask(self, mask: SparseMask) -> None:
        carrier = self.carrier
        mask.check_fits(self.num_layers, carrier.num_heads)
        if carrier.one_layer and mask.num_layers > 1:
            raise ValueError(f"the mask is for {mask.num_layers} layers, but {ONE_LAYER}")
        if carrier.is_decoder and mask.special_tokens == "first_last":
            raise ValueError("special_tokens 'first_last' is undefined in a decoder: use 'first' or 'none'")
        check_rest(mask, carrier.is_decoder, self.config.probability_map)
        if not self.config.allow_empty_rows:
            mask.check_rows()
            if carrier.window is not None:
                mask.check_rows(carrier.window)
        self._mask = mask
        self.search = self.mask_logits = self._sample = None

    def end_search(
        self, threshold: float | None = None, sparsity: float | None = None, metadata: dict[str, Any] | None = None
    ) -> tuple[SparseMask, dict[str, Any]]:
        """
        Like [`~SparseAttention.freeze`], but also returns the outcome of the search, see [`LearnedMask.to_mask`].
        """
        learned, config, progress = self._learned_mask(), self.config, self.progress.clone()
        check_metadata(metadata or {})
        if self.mask_logits is not None and self.mask_logits.is_meta:
            raise ValueError("mask_logits are offloaded: load the model without a device_map to freeze its mask")
        self.progress.fill_(1.0)
        base_model, base_model_revision = self._base()
        provenance = {
            "search": config.search,
            "sparsity_scope": config.sparsity_scope if learned.search.has_budget else None,
            "base_model": base_model or None,
            "base_model_revision": base_model_revision,
        }
        try:
            mask, outcome = learned.to_mask(threshold, sparsity, provenance | (metadata or {}))
            self.set_mask(mask, search=config.search)
        except (ValueError, FloatingPointError):
            self.progress.copy_(progress)  # the search goes on
            raise
        for problem in outcome["warnings"]:
            logger.warning(problem)
        return mask, outcome

    def freeze(
        self, threshold: float | None = None, sparsity: float | None = None, metadata: dict[str, Any] | None = None
    ) -> SparseMask:
        """
        End the search: keep the parameters with P above `threshold`, or the most probable ones at a given sparsity.
        Defaults to the target sparsity, or without a target to the threshold 1/2.

        Args:
            threshold (`float`, *optional*): In [0, 1).
            sparsity (`float`, *optional*): Fraction of entries to remove per head, met as nearly as the form allows.
            metadata (`dict`, *optional*): Provenance to store with the mask.

        Returns:
            [`SparseMask`]: The mask that the model uses from now on.
        Raises:
            ValueError: If the mask is already frozen, a value is out of its range, a row would keep nothing, or
                pruning has removed more than `sparsity`.
            FloatingPointError: If a probability is NaN.
        """
        return self.end_search(threshold, sparsity, metadata)[0]

    def mask_probs(self) -> torch.Tensor:
        """P of every entry at the mask's own length, fixed ones included: `(L, H, n, n)`, float32, on the CPU."""
        learned = self.learned
        return self._frozen_mask().to_table().float() if learned is None else learned.entry_probs()

    def thresholded_mask(self, threshold: float | None = None, sparsity: float | None = None) -> SparseMask:
        """The mask that a search would freeze to now, see [`LearnedMask.thresholded_mask`]."""
        return self._learned_mask().thresholded_mask(threshold, sparsity)

    def outcome(self, sparsity: float | None = None) -> dict[str, Any]:
        """What freezing would give now, and how clearly the search has decided it, see [`LearnedMask.to_mask`]."""
        return self._learned_mask().to_mask(sparsity=sparsity)[1]

    def sparsity(self) -> float:
        """Fraction of entries that the frozen mask, or the thresholded one, removes at its own length."""
        learned = self.learned
        return (self._frozen_mask() if learned is None else learned.thresholded_mask()).sparsity

    def sparsity_loss(self) -> torch.Tensor:
        """See [`sparsity_loss`]."""
        if self._sample is None or self.search is None or self.search.target_sparsity is not None:
            return torch.zeros(())
        return self.search.penalty(self._sample)

    def forward(
        self,
        name: str,
        batch: int,
        num_queries: int,
        num_keys: int,
        padding: torch.Tensor | None = None,
        dropout: float = 0.0,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        needs: Collection[str] = (),
        documents: DocumentSpans | None = None,
        distance_bias: tuple[torch.Tensor | None, ...] = (None,),
    ) -> MaskInputs:
        """
        Prepare one forward of the base model: sample the mask (a search in training), threshold it (a search in
        evaluation) or take the frozen mask, and bring it into the form that the backend `name` reads.

        The `num_queries` queries are the last of the `num_keys` positions; `padding` `(B, m)` is True for real tokens;
        `needs` are `"weights"` if the probabilities are asked for, `"additive"` if the caller adds a 4-D mask;
        `distance_bias` is that of the model, of each layer or all;
        `documents` says where the B sequences are in the batch, each of which has the mask of an input of its own
        length.
        """
        config, carrier, learned = self.config, self.carrier, self.learned
        sampling = learned is not None and self.training and not learned.search.pruned
        mask = self._frozen_mask() if learned is None else None
        if documents is not None:  # whose position n - 1 is that of their last token
            learned = learned and learned.with_real_last()
            mask = mask and with_real_last(mask)
        exported = exporting()
        if exported and learned is not None:
            raise ValueError(SEARCHING)
        wanted = self.wanted(needs, sampling) | ({"export"} if exported else set())
        causal = carrier.is_decoder
        # Only a measurement depends on it; a compiled graph should not.
        batch = operator.index(batch) if name == "sparse_measure" and not exported else 1
        if not self.num_layers:
            check_backend(name)
            return MaskInputs(name, num_queries, num_keys, device, mask, padding)
        sizes = (0, 0) if exported else (num_queries, num_keys)  # symbols say nothing
        drops = True if dropout > 0 else False  # a branch, since a compiled graph takes `bool` for a variable
        shape = (batch, carrier.num_heads, *sizes, self.head_size)
        request = (device.type, dtype, *shape, drops, torch.is_grad_enabled(), padding is not None, causal)
        backend = choose_backend(name, mask, *request, frozenset(wanted), config.probability_map, device.index)
        maps = self.probability_map(num_keys)
        inputs = MaskInputs(backend, num_queries, num_keys, device, mask, padding, causal, probability_map=maps)
        seeded = self.num_layers if dropout and not carrier.one_layer else 0
        inputs = replace(inputs, dtype=dtype, dropout_layers=seeded, documents=documents, distance_bias=distance_bias)
        inputs = replace(inputs, **rest_fields(mask if learned is None else learned.search, inputs))
        if learned is None:
            assert mask is not None
            prepared = BACKENDS[backend].prepare(mask, inputs)
        elif learned.search.pruned:
            prepared = pruned_inputs(learned, inputs, self.training)
        else:
            merged = backend != "sparse_sdpa" or "additive" in needs or carrier.window is not None
            # What padding removes differs by sequence, and entries of special tokens are no longer 0.
            merged = merged or ((carrier.distance_bias or inputs.rest[0] is not None) and padding is not None)
            if sampling:
                prepared = self._sampled(learned, inputs, merged)
            else:
                prepared = thresholded_inputs(learned, inputs, merged)
        inputs = replace(inputs, **prepared)
        local = None if carrier.window is None else local_inputs(inputs, carrier.window, name, request, wanted)
        return replace(with_distance_forms(inputs), local=local, local_layers=carrier.local_layers)

    def wanted(self, needs: Collection[str] = (), sampling: bool = False) -> set[str]:
        """What the backend must be able to do, in a forward that samples the mask or not: keys of `WANTED`."""
        wanted = {*needs, "distance_bias"} if self.carrier.distance_bias else set(needs)
        found = self._mask or self.search
        if found is not None and found.rest != "none":
            wanted.add("rest")
        if self.weights_wanted and self.training:
            wanted.add("weights")
        if self.search is None:
            return wanted
        if not sampling or self.carrier.window is not None:
            wanted.add("additive")  # a window comes on top of the sampled mask
        if sampling:
            wanted.add("learned")
            if self.search.mask_form == "multiplicative":
                wanted.add("gate")
        return wanted

    def _sampled(self, learned: LearnedMask, inputs: MaskInputs, merged: bool) -> dict[str, Any]:
        search = learned.search
        if search.target_sparsity is not None and not self._scheduled and not torch.compiler.is_compiling():
            logger.warning_once(
                "target_sparsity: nothing tells the mask how far the training is, so its search stays where it is (a "
                "new one at its end); pass callbacks=[SearchSchedule()] to the Trainer, or call "
                "sparse_attention.set_progress in a loop of your own"
            )
        previous = None if torch.compiler.is_compiling() else self._sample
        self._sample, noisy = learned.draw(previous)
        return drawn_inputs(search, self._sample, noisy, inputs, merged)


def get_sparse_attention(model: nn.Module) -> SparseAttention:
    """The [`SparseAttention`] of a base model or head; a `ValueError` if it carries no mask."""
    sparse_attention, inner = sparse_attention_of(model), without_adapters(model)
    if not hasattr(inner, "base_model"):
        raise ValueError(f"expected a model of transformers, got {type(inner).__name__}")
    if sparse_attention is None:
        parts = [name for name, part in inner.named_modules() if "sparse_attention" in part._modules]
        hint = f"give one of its parts that do, {', '.join(parts)}" if parts else "attach a mask first"
        raise ValueError(f"{type(inner).__name__} carries no sparse attention: {hint}")
    return sparse_attention
