"""
The rules of a search: what is learned about a mask, how it is sampled, and what follows from that alone.

Letters: L layers (1 when shared), H heads, n mask length, m input length, K learned parameters per head, P the keep
probability.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import initialization as init

from ..masks.expansion import expand, parameter_index
from ..masks.sparse_mask import SparseMask, special_entries
from .searches import SEARCHES, num_parameters, parameter_distance, to_sparse_mask


# Standard deviation of alpha at the start, so that P starts near 1/2. Source: arXiv 2102.12871, Algorithm 1.
INITIAL_STD = 1e-3

# Attribute of a sample: a list, empty until its penalty is taken.
PENALIZED = "_sparsebert_penalized"


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskSearch:
    """
    The settings of a search, made once from a configuration. The logits are not part of it: [`LearnedMask`] combines
    the two.

    Args:
        name (`str`): A key of `SEARCHES`.
        num_layers (`int`): L.
        num_heads (`int`): H.
        length (`int`): n.
        special_tokens (`str`): Tokens whose rows and columns are always on: `"none"`, `"first"` or `"first_last"`.
        last_token (`str`): `"real"` or `"position"`, see [`SparseMask`].
        diagonal (`bool`, *optional*): Whether the diagonal is always on or always off. `None` learns it.
        length_policy (`str`): What happens to longer inputs: `"extend"`, `"dense"` or `"error"`.
        symmetric (`bool`): Whether alpha_ij = alpha_ji in a table.
        block_size (`int`, *optional*): Tile size of the form `"blocks"`.
        mask_form (`str`): How the mask enters attention: `"additive"`, `"log"` or `"multiplicative"`.
        mask_constant (`float`): c of the additive form.
        logit_scale (`float`): alpha is this times the stored logits.
        hard (`bool`): Whether samples are rounded to 0 and 1 (straight-through).
        noise_scale (`float`): Factor of the Gumbel noise. 0 uses P itself.
        share_noise (`bool`): Whether the processes of a distributed training sample one mask, see [`gumbel_noise`].
        temperature (`float`): tau at the start of the search.
        temperature_end (`float`): tau at its end.
        initial_decay (`float`): How fast the initial logits fall with the logarithm of the distance.
        sparsity_weight (`float`): lambda of the penalty. Not used with a target.
        target_sparsity (`float`, *optional*): Fraction of entries to remove, instead of a penalty.
        sparsity_scope (`str`): Whether the target is that of every head (`"head"`) or of all together (`"global"`).
        initial_sparsity (`float`, *optional*): Sparsity that the search starts from. Defaults to the target.
        sparsity_warmup (`float`): Fraction of the search after which sparsity starts to grow.
        sparsity_ramp (`float`): Fraction of the search after which it has reached the target.
        allow_empty_rows (`bool`): Whether pruning may remove the last entry of a row.
        pruning (`bool`): Whether the mask is being pruned: what has not been removed is on, nothing is sampled.

    Attributes:
        form (`str`): Form of the mask, see [`SparseMask`].
        num_parameters (`int`): K.
        fixed (`torch.Tensor` of shape `(n, n)`): int8: 1 always on, 0 always off, -1 learned.
        num_fixed (`int`): Number of entries per head that are always on.
        counts (`torch.Tensor` of shape `(K,)`): Number of learned entries that each parameter decides, float32.

    Raises:
        ValueError: If `target_sparsity` is out of reach.
    """

    name: str
    num_layers: int
    num_heads: int
    length: int
    special_tokens: str
    last_token: str
    diagonal: bool | None
    length_policy: str
    symmetric: bool
    block_size: int | None
    mask_form: str
    mask_constant: float
    logit_scale: float
    hard: bool
    noise_scale: float
    temperature: float
    temperature_end: float
    initial_decay: float
    sparsity_weight: float
    target_sparsity: float | None
    sparsity_scope: str
    initial_sparsity: float | None
    sparsity_warmup: float
    sparsity_ramp: float
    allow_empty_rows: bool
    pruning: bool = False
    share_noise: bool = False
    form: str = field(init=False)
    num_parameters: int = field(init=False)
    fixed: torch.Tensor = field(init=False, repr=False)
    num_fixed: int = field(init=False)
    counts: torch.Tensor = field(init=False, repr=False)
    _cache: dict[tuple[str, torch.device], torch.Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        form = SEARCHES[self.name].form
        size = num_parameters(form, self.length, self.symmetric, self.special_tokens, self.block_size)
        # Transformers builds models on the meta device; these are data, not weights.
        with torch.device("cpu"):
            fixed = torch.full((self.length, self.length), -1, dtype=torch.int8)
            fixed[special_entries(self.length, self.special_tokens)] = 1
            if self.diagonal is not None:
                fixed.fill_diagonal_(int(self.diagonal))
            index = parameter_index(form, self.length, self.length, self.symmetric, self.block_size)
            counts = index[fixed == -1].bincount(minlength=size).float()
        derived = {"form": form, "num_parameters": size, "fixed": fixed, "counts": counts}
        derived["num_fixed"] = int((fixed == 1).sum())
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.target_sparsity is not None and self.target_sparsity > self.most_sparsity:
            raise ValueError(
                f"target_sparsity must be at most {self.most_sparsity:.4f}, got {self.target_sparsity}: special "
                f"tokens and a kept diagonal are {self.num_fixed} of the {self.length**2} entries of a mask for "
                f"{self.length} tokens"
            )

    # Copies and pickles make their own cache.
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": {}}

    @property
    def most_sparsity(self) -> float:
        """The sparsity of a mask that keeps nothing but the fixed entries."""
        return 1 - self.num_fixed / self.length**2

    @property
    def least_kept(self) -> int:
        """Number of entries per head that pruning cannot remove: the fixed ones, and one key for every query."""
        rows = 0 if self.allow_empty_rows else int((self.fixed != 1).all(-1).sum())
        return self.num_fixed + rows

    def initialize(self, logits: torch.Tensor) -> None:
        """
        Initialize the stored logits `(L, H, K)` in place: alpha ~ N(0, `INITIAL_STD`), less the decay with distance.
        Logits that were read from a checkpoint stay as they are.
        """
        if getattr(logits, "_is_hf_initialized", False):
            return
        init.normal_(logits, mean=0.0, std=INITIAL_STD / self.logit_scale)
        if self.initial_decay:
            distance = parameter_distance(self.form, self.num_parameters, self.length, self.symmetric)
            decay = self.initial_decay / self.logit_scale * distance.clamp(min=1).log()
            with torch.no_grad():
                logits.sub_(decay.to(logits))

    def index(self, length: int, device: torch.device) -> torch.Tensor:
        """The parameter of each entry at some input length, `(m, m)`, see [`parameter_index`]."""

        def make() -> torch.Tensor:
            return parameter_index(self.form, length, self.length, self.symmetric, self.block_size)

        if torch.compiler.is_compiling():
            return make().to(device)
        cached = self._cache.get(("index", device))
        if cached is not None and cached.shape[-1] < length:
            del self._cache["index", device]
        # The index of a shorter input is a corner of that of a longer one.
        return self._cached("index", device, make)[:length, :length]

    def counts_on(self, device: torch.device) -> torch.Tensor:
        """`counts` on a device."""
        return self._cached("counts", device, lambda: self.counts)

    def expand(self, values: torch.Tensor, length: int, off: float, on: float) -> torch.Tensor:
        """Values of the parameters `(L, H, K)` as values of the entries `(L, H, m, m)`, see [`expand`]."""
        index = self.index(length, values.device)
        return expand(
            values,
            self.form,
            length,
            self.length,
            self.block_size,
            self.length_policy,
            self.symmetric,
            off=off,
            on=on,
            index=index,
        )

    def penalty(self, sample: torch.Tensor) -> torch.Tensor:
        """
        lambda * ||M||_1 of a sample `(L, H, K)`: the sum over the entries of all heads at the mask's own length, mean
        over layers.

        Source: SparseBERT (arXiv 2102.12871), Eq. 7.
        """
        if (penalized := getattr(sample, PENALIZED, None)) is not None:
            penalized.append(True)
        norm = (sample * self.counts_on(sample.device)).sum(dim=(1, 2)) + self.num_fixed * self.num_heads
        return self.sparsity_weight * norm.mean()

    def to_mask(self, selected: torch.Tensor, metadata: dict[str, Any] | None = None) -> SparseMask:
        """The [`SparseMask`] that keeps the selected parameters `(L, H, K)`."""
        return to_sparse_mask(
            selected,
            self.form,
            self.length,
            self.symmetric,
            self.block_size,
            special_tokens=self.special_tokens,
            last_token=self.last_token,
            diagonal=self.diagonal,
            length_policy=self.length_policy,
            metadata=metadata,
        )

    def _cached(self, key: str, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return make().to(device)  # a cache that changes would recompile every step
        if (key, device) not in self._cache:
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                self._cache[key, device] = make().to(device)
        return self._cache[key, device]
