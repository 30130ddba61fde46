"""
The rules of a search: what is learned about a mask, how it is sampled, and what follows from that alone.

Letters: L layers (1 when shared), H heads, n mask length, m input length, K learned parameters per head, P the keep
probability.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import initialization as init

from ..masks.expansion import (
    SPECIAL_TOKENS,
    check_length,
    default_length_policy,
    expand,
    fixed_entries,
    kept_by_head,
    learned_ranges,
    num_distances,
    num_empty_rows,
    parameter_index,
    rectangular_pairs,
    token_pairs,
)
from ..masks.mask_files import check_sizes
from ..masks.mask_tensors import DIAGONALS, check_special_rows
from ..masks.sparse_mask import SparseMask
from .decided_entries import DecidedEntries, TiedEntries, VerticalSlash
from .mask_description import OWN_FIELDS, Carrier, MaskDescription, MaskFields
from .searches import SEARCHES, hard_log_bias, mask_bias, num_parameters, parameter_distance, to_sparse_mask


# Standard deviation of alpha at the start, so that P starts near 1/2. Source: arXiv 2102.12871, Algorithm 1.
INITIAL_STD = 1e-3

# Attribute of a sample: what happened to it, whether its penalty was taken and whether a gradient reached it.
PENALIZED = "_sparsebert_penalized"


@dataclass(kw_only=True, eq=False)
class MaskSearch(MaskDescription):
    """
    The description of a search with all its defaults, made once for a model by [`described_search`]: `form` says what
    has a parameter, see [`Search`], of which there are K per head, `num_parameters`; a head has `num_fixed` entries
    that are always on, and `num_learned` that parameters decide, `counts` `(K,)` each. The logits are not part of it:
    [`LearnedMask`] combines the two.
    """

    num_layers: int
    num_heads: int
    # What a description may leave open.
    search: str
    mask_length: int
    special_tokens: str
    last_token: str
    rest: str
    special_rows: bool
    diagonal: str
    length_policy: str
    mask_form: str
    mask_constant: float
    hard: bool
    noise_scale: float
    temperature_end: float
    initial_decay: float

    def __post_init__(self) -> None:
        self.form = SEARCHES[self.search].form
        check_special_rows(self.special_rows, self.special_tokens)
        if not self.special_rows and self.form == "vertical_slash":
            raise ValueError(
                "special_rows False is not supported by search 'vertical_slash', in which other tokens may have rows: "
                "set special_tokens to 'none', or take another search"
            )
        self.fixed_diagonal = DIAGONALS[self.diagonal]
        self._cache: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.num_parameters = num_parameters(
            self.form, self.length, self.symmetric, self.special_tokens, self.block_size, self.special_rows
        )
        self.union: VerticalSlash | None = None
        if self.form == "vertical_slash":
            learned_diagonal = self.fixed_diagonal is None
            self.union = VerticalSlash(self.length, self.special_tokens, self.symmetric, learned_diagonal)
        frozen = {
            "form": SEARCHES[self.search].frozen_form,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "length": self.length,
            "block_size": self.block_size if self.form == "blocks" else None,
        }
        stored = self.length if frozen["form"] == "table" else max(self.num_parameters, 1)
        check_sizes(frozen | {"num_parameters": stored, "symmetric": self.toeplitz_symmetric})
        queries, keys = learned_ranges(self.length, SPECIAL_TOKENS.index(self.special_tokens), self.special_rows)
        self.num_learned = len(queries) * len(keys) - len(keys) * (self.fixed_diagonal is not None)
        # Transformers builds models on the meta device; these are data, not weights.
        with torch.device("cpu"):
            nothing = torch.zeros(1, 1, 1, dtype=torch.bool)
            self.num_fixed = int(kept_by_head(nothing, "offsets", *self._sizes()))
            self.counts = self._counts()
        if self.target_sparsity is not None and self.target_sparsity > self.most_sparsity:
            raise ValueError(
                f"target_sparsity must be at most {self.most_sparsity:.4f}, got {self.target_sparsity}: special "
                f"tokens and a kept diagonal are {self.num_fixed} of the {self.length**2} entries of a mask for "
                f"{self.length} tokens"
            )
        super().__post_init__()

    @property
    def name(self) -> str:
        """A key of `SEARCHES`."""
        return self.search

    @property
    def length(self) -> int:
        """n."""
        return self.mask_length

    @property
    def toeplitz_symmetric(self) -> bool:
        """`symmetric` of the frozen [`SparseMask`], which is about Toeplitz forms alone."""
        return self.symmetric or not SEARCHES[self.search].toeplitz

    def _sizes(self):
        """The arguments of [`kept_by_head`] from `length` on, for blocks of one token and one parameter."""
        num_special = SPECIAL_TOKENS.index(self.special_tokens)
        return self.length, None, num_special, self.fixed_diagonal, True, self.special_rows

    def _counts(self):
        if self.union is not None:
            return self.union.counts()
        if self.form == "table":
            index = parameter_index(self.form, self.length, self.length, self.symmetric)
            return index[self.fixed == -1].bincount(minlength=self.num_parameters).float()
        queries, keys = learned_ranges(self.length, SPECIAL_TOKENS.index(self.special_tokens), self.special_rows)
        if self.query_block_size is not None:
            pairs, own = rectangular_pairs(queries, keys, self.tile, self.query_block_size, self.num_parameters)
            return (pairs + own * (self.fixed_diagonal is None)).float()
        counts = token_pairs(queries, keys, self.tile, max(self.num_parameters, 1), self.symmetric).float()
        if self.fixed_diagonal is None:
            counts[0 if self.symmetric else len(counts) // 2] += len(keys)
        return counts[: self.num_parameters]

    @functools.cached_property
    def fixed(self) -> torch.Tensor:
        """Which entries are learned, see [`fixed_entries`]."""
        return fixed_entries(self.length, self.special_tokens, self.fixed_diagonal, self.special_rows)

    # Copies and pickles make their own cache.
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": {}}

    @property
    def has_budget(self) -> bool:
        """Whether P is shifted to meet a target. What has been pruned has alpha = -inf, and needs no budget."""
        return self.target_sparsity is not None and not self.pruned

    @property
    def most_sparsity(self) -> float:
        """The sparsity of a mask that keeps nothing but the fixed entries."""
        return 1 - self.num_fixed / self.length**2

    @property
    def least_kept(self) -> int:
        """Number of entries per head that pruning cannot remove: the fixed ones, and one key for every query."""
        if self.allow_empty_rows:
            return self.num_fixed
        return self.num_fixed + num_empty_rows(torch.zeros(1, 1, 1, dtype=torch.bool), *self._sizes())

    def initialize(self, logits: torch.Tensor) -> None:
        """Initialize the stored logits `(L, H, K)` in place, unless they were read from a checkpoint."""
        if getattr(logits, "_is_hf_initialized", False):
            return
        init.normal_(logits, mean=0.0, std=INITIAL_STD / self.mask_logit_scale)
        if self.initial_decay:
            distance = parameter_distance(self.form, self.num_parameters, self.length, self.symmetric)
            decay = self.initial_decay / self.mask_logit_scale * distance.clamp(min=1).log()
            with torch.no_grad():
                logits.sub_(decay.to(logits))

    def index(self, length: int, device: torch.device) -> torch.Tensor:
        """The parameter of each entry `(m, m)`, see [`parameter_index`]. In `"vertical_slash"` that of its offset."""

        def make() -> torch.Tensor:
            form, symmetric = ("offsets", True) if self.union is not None else (self.form, self.symmetric)
            sizes = (self.block_size, None, self.num_parameters, self.query_block_size)
            return parameter_index(form, length, self.length, symmetric, *sizes)

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

    def entries(self, device: torch.device) -> DecidedEntries:
        """The learned entries, to be counted on a device."""
        return TiedEntries(self.counts_on(device)) if self.union is None else self.union

    def sums(self, table: torch.Tensor) -> torch.Tensor:
        """The sum of the values `(L, H, n, n)` of the learned entries of each parameter: `(L, H, K)`."""
        if self.union is not None:
            return self.union.sums(table)
        learned_entries = (self.fixed == -1).to(table.device)
        index = self.index(self.length, table.device)[learned_entries]
        sums = table.new_zeros(*table.shape[:2], self.num_parameters)
        return sums.index_add_(-1, index, table[..., learned_entries])

    def expand(self, values: torch.Tensor, length: int, off: float, on: float) -> torch.Tensor:
        """
        Values of the parameters `(L, H, K)` as those of the entries `(L, H, m, m)`, see [`expand`]; for a union in [0,
        1].
        """
        if (union := self.union) is not None:
            return self._grown(length, on, lambda known, index: union.expand(values, known, index), values.device)
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

    def bias(self, sample: torch.Tensor, noisy: torch.Tensor, length: int) -> torch.Tensor:
        """The term `(L, H, m, m)` that a sample from [`sample_mask`] adds to the scores, see [`mask_bias`]."""
        union, constant, hard = self.union, self.mask_constant, self.hard
        if union is None:
            bias = mask_bias(sample, noisy, self.mask_form, constant, hard)
            return self.expand(bias, length, off=-constant, on=0.0)

        def make(known: int, index: torch.Tensor) -> torch.Tensor:
            if self.mask_form == "additive":
                return -constant * (1.0 - union.expand(sample, known, index))
            if hard:
                return hard_log_bias(union.expand(sample, known, index), constant)
            return union.log_probs(noisy, known, index)

        return self._grown(length, 0.0, make, sample.device)

    @property
    def tile(self) -> int:
        """Tokens of a tile in a Toeplitz form; 1 for `"offsets"`."""
        return self.block_size if self.form == "blocks" else 1

    def by_distance(self, length: int) -> bool:
        """Whether all learned entries at some input length that are as far apart, in tiles, share their parameter."""
        if not SEARCHES[self.search].toeplitz or self.query_block_size is not None:
            return False
        return length <= self.length or self.length_policy != "dense"

    def at_distances(self, values: torch.Tensor, length: int, off: float) -> torch.Tensor:
        """
        Values of the parameters as values of each distance in tiles, `(L, H, T)`, or `(L, H, 2T - 1)` if it is signed;
        `off` where there is no parameter.
        """
        if self.length_policy == "error":
            check_length(length, self.length, self.form)
        beyond = -(-length // self.tile) - num_distances(self.num_parameters, self.symmetric)
        return torch.nn.functional.pad(values, (0 if self.symmetric else beyond, beyond), value=off)

    def zeros(self, probs: torch.Tensor, length: int) -> torch.Tensor:
        """Zeros `(L, H, m, m)` with the gradient of c times the P of the entries, from that of the parameters."""
        if self.union is None:
            return self.expand(self.mask_constant * (probs - probs.detach()), length, off=0.0, on=0.0)
        probs = self.mask_constant * self.expand(probs, length, off=0.0, on=0.0)
        return probs - probs.detach()

    def _grown(
        self, length: int, on: float, make: Callable[[int, torch.Tensor], torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        """`make(m, index)` for the tokens of the mask, with `on` for those beyond."""
        if self.length_policy == "error":
            check_length(length, self.length, "table")
        known = min(length, self.length)
        new = length - known
        table = make(known, self.index(known, device))
        return torch.nn.functional.pad(table, (0, new, 0, new), value=on) if new else table

    def log_odds(self, noisy: torch.Tensor) -> torch.Tensor:
        """See [`LearnedMask.log_odds`]; `noisy` are the logits of P `(L, H, K)`."""
        if (union := self.union) is None:
            return noisy
        return self._grown(self.length, 0.0, lambda known, index: union.log_odds(noisy, known, index), noisy.device)

    def penalty(self, sample: torch.Tensor) -> torch.Tensor:
        """
        lambda * ||M||_1 of a sample `(L, H, K)`: the sum over the entries of all heads at the mask's own length, mean
        over layers.

        Source: SparseBERT (arXiv 2102.12871), Eq. 7.
        """
        if (watch := getattr(sample, PENALIZED, None)) is not None:
            watch.penalized = True
        norm = self.entries(sample.device).kept(sample).sum(1) + self.num_fixed * self.num_heads
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
            rest=self.rest,
            special_rows=self.special_rows,
            diagonal=self.fixed_diagonal,
            length_policy=self.length_policy,
            query_block_size=self.query_block_size,
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


# Defaults of a search with a target: the temperature at its end, when P is 0 or 1 for nearly all entries; c, if its
# samples are hard; and the decay of its initial odds with the distance.
ANNEALED_TEMPERATURE = 0.1
HARD_CONSTANT = 7.0
LOCAL_DECAY = 3.0


def described_search(description: MaskFields, carrier: Carrier) -> MaskSearch:
    """The search of a description in a model, with all its defaults."""
    given = {name: getattr(description, name) for name in OWN_FIELDS}
    search = SEARCHES[given["search"]]
    # A search with a target is annealed by default. With a penalty it samples, as in the paper.
    targeted = description.target_sparsity is not None
    sampled = search.stochastic and not targeted
    hard = search.stochastic and (sampled if description.hard is None else description.hard)
    # In a decoder the last token changes as it generates.
    first_alone = carrier.is_decoder and search.special_tokens != "none"
    defaults = {
        "special_tokens": "first" if first_alone else search.special_tokens,
        "last_token": "real",
        "rest": "none",
        "special_rows": True,
        "diagonal": "learned",
        "length_policy": default_length_policy(search.frozen_form),
        "mask_form": "log" if targeted else "additive",
        "mask_constant": HARD_CONSTANT if targeted and hard else search.mask_constant,
        "noise_scale": float(sampled),
        "temperature_end": ANNEALED_TEMPERATURE if targeted and not hard else description.temperature,
        "initial_decay": LOCAL_DECAY if targeted else 0.0,
    }
    given |= {name: default for name, default in defaults.items() if given[name] is None}
    given |= {"hard": hard, "mask_constant": float(given["mask_constant"])}
    num_layers = 1 if description.share_layers else carrier.num_layers
    return MaskSearch(**given, num_layers=num_layers, num_heads=carrier.num_heads)
