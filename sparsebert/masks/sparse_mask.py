"""
The frozen attention mask.

Letters: L layers (1 when all layers share the masks), H heads, n length, K parameters of a Toeplitz form, B tile size
or batch.

A query i may attend to a key j where the mask is True. No entry, not even one of the diagonal, is on unless the
structure or the special tokens turn it on.
"""

import copy
import itertools
import os
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from transformers.utils import CONFIG_NAME

from ..checks import check_range, printable
from .expansion import SPECIAL_TOKENS, check_length, expand, fill_fixed_entries, kept_by_head, num_empty_rows
from .mask_cards import bare_mask_card, bridges, save_card
from .mask_files import (
    MAX_MASK_LENGTH,
    OPTIONAL,
    SEARCH_CONFIG_NAME,
    SPARSITY_TOLERANCE,
    MaskFileError,
    check_metadata,
    check_takes_mask,
    enough_memory,
    read_mask_files,
    write_mask_files,
)
from .mask_sources import check_subfolder, find_mask_files
from .mask_tensors import check_special_rows, checked_keep, checked_length_policy, checked_rest_bias
from .pushing import push_folder


# What a mask has beside its tensors.
_FIELDS = ("length", "form", "block_size", "special_tokens", "last_token", "diagonal", "length_policy", *OPTIONAL)
_TENSORS = ("keep", "rest_bias")


class SparseMask:
    """
    A frozen attention mask: for each head, which keys every query may attend to. It does not change, nor may the
    tensor `keep` be written to: `replace` gives another mask. Patterns, finished searches and mask files all give a
    mask of this type.

    Args:
        keep (`torch.Tensor`): Bool, True = may attend. L = 1 means that all layers share the masks, and this leading
            dimension may be omitted. The shape depends on the form:

            - `"offsets"`: `(L, H, K)`, one bit per `abs(i - j)`; offsets from K <= n on are off.
            - `"blocks"`: `(L, H, ceil(n / block_size))`, one bit per tile diagonal `abs(i // B - j // B)`.
            - `"table"`: `(L, H, n, n)`.
        length (`int`): n, the length that the mask was made for.
        form (`str`, *optional*, defaults to `"table"`): `"offsets"`, `"blocks"` or `"table"`.
        block_size (`int`, *optional*): B, required for form `"blocks"` and not allowed for the others.
        special_tokens (`str`, *optional*, defaults to `"none"`): Tokens that attend to all tokens and are attended by
            all, regardless of `keep`: `"none"`, `"first"` (the first non-padding token of each sequence, which is
            position 0 unless padding is on the left) or `"first_last"`.
        last_token (`str`, *optional*, defaults to `"real"`): The token meant by "last": `"real"`, the last
            non-padding token of each sequence, or `"position"`, the last position of the input.
        diagonal (`bool`, *optional*): `False` removes and `True` keeps all n diagonal entries, those of special
            tokens included. `None` leaves them unchanged.
        length_policy (`str`, *optional*): How inputs longer than n are masked: `"extend"` (new offsets are off;
            default for `"offsets"` and `"blocks"`), `"dense"` (positions from n on attend to all tokens and are
            attended by all) or `"error"` (longer inputs are refused; default for `"table"`).
        rest (`str`, *optional*, defaults to `"none"`): How the keys that the mask removes count. `"mean"` gives every
            query one more key that stands for them, with the attention that the mean query of the sequence pays. A
            query without another key then returns the value of that one instead of 0. Attention must be a softmax over
            whole inputs, not causal; layers with a sliding window have no such key.
        rest_bias (`torch.Tensor` of shape `(1 or more, H)`, *optional*): Added to the scores of these keys, by layer
            and head; defaults to 0. See [`calibrate_rest`].
        metadata (`dict`, *optional*): Provenance stored in the mask's files, such as base model, revision and run.
        symmetric (`bool`, *optional*, defaults to `True`): `False` for a Toeplitz form with a bit per signed distance,
            `i - j` for `"offsets"` and `i // B - j // B` for `"blocks"`, in ascending order. Where a symmetric form
            has K bits, this one has 2K - 1, that of the distance d at the index `d + K - 1`.
        special_rows (`bool`, *optional*, defaults to `True`): Whether the special tokens attend to all tokens.
            `False` leaves what they attend to, apart from the special tokens, to `keep`.
        query_block_size (`int`, *optional*): Q, for form `"blocks"` that is not symmetric: tiles of Q queries, a
            multiple of B, and B keys. The signed distance is then `i // Q * Q // B - j // B`.

    Raises:
        ValueError: If a field is out of its range or `keep` does not fit the form.
    """

    # Masks by `handle`, which stands for the mask where an object cannot: in constants of a compiled graph. It is a
    # text, since a graph may take a number for a variable.
    instances: "weakref.WeakValueDictionary[str, SparseMask]" = weakref.WeakValueDictionary()
    _handles = itertools.count()
    handle: str

    def __init__(
        self,
        keep: torch.Tensor,
        length: int,
        form: str = "table",
        block_size: int | None = None,
        special_tokens: str = "none",
        last_token: str = "real",
        diagonal: bool | None = None,
        length_policy: str | None = None,
        rest: str = "none",
        rest_bias: torch.Tensor | None = None,
        metadata: dict[str, Any] | None = None,
        symmetric: bool = True,
        special_rows: bool = True,
        query_block_size: int | None = None,
    ):
        length_policy = checked_length_policy(form, special_tokens, last_token, diagonal, rest, length_policy)
        check_range("length", length, 1)
        check_metadata({} if metadata is None else metadata)
        check_special_rows(special_rows, special_tokens)
        self.keep = checked_keep(keep, form, length, block_size, symmetric, query_block_size)
        self.rest = rest
        self.rest_bias = checked_rest_bias(rest_bias, rest, self.num_heads)
        self.length = length
        self.form = form
        self.block_size = block_size
        self.query_block_size = query_block_size
        self.special_tokens = special_tokens
        self.last_token = last_token
        self.diagonal = None if diagonal is None else bool(diagonal)
        self.length_policy = length_policy
        self.symmetric = bool(symmetric)
        self.special_rows = bool(special_rows)
        self.metadata = copy.deepcopy(metadata or {})
        self._register()

    # What was made of its fields is kept, here and for the kernels.
    def __setattr__(self, name, value):
        if "handle" in vars(self):
            raise AttributeError(f"a SparseMask does not change: mask.replace({name}=...) is one with another {name}")
        super().__setattr__(name, value)

    def _register(self):
        vars(self)["handle"] = str(next(self._handles))
        self.instances[self.handle] = self

    # Without what is cached, so that equal masks have equal pickles: datasets.map knows a function by its pickle.
    def __getstate__(self):
        return {name: vars(self)[name] for name in (*_TENSORS, *_FIELDS, "metadata")}

    def __setstate__(self, state):
        self.__dict__.update({"rest_bias": None} | OPTIONAL | state)
        self._register()

    @property
    def num_layers(self) -> int:
        """Number of different layers; 1 when all layers share the masks."""
        return self.keep.shape[0]

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.keep.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.keep.nbytes

    def __repr__(self):
        return (
            f"SparseMask({self.form}, layers={self.num_layers}, heads={self.num_heads}, length={self.length}, "
            f"special_tokens={self.special_tokens!r}, sparsity={self.sparsity:.4f})"
        )

    def __eq__(self, other):
        return self is other or (
            isinstance(other, SparseMask)
            and self.description() == other.description()
            and torch.equal(self.keep, other.keep)
            and torch.equal(self.rest_biases(), other.rest_biases())
        )

    __hash__ = object.__hash__  # by identity, for caches, which do not compare entries

    def structure(self, length: int | None = None) -> torch.Tensor:
        """
        The mask at `length`, by default its own, before special tokens and `diagonal` are applied: bool `(L, H,
        length, length)`.
        """
        length = self.length if length is None else length
        if not (hasattr(length, "__index__") and 1 <= length <= MAX_MASK_LENGTH):
            raise ValueError(f"length must be an integer from 1 to {MAX_MASK_LENGTH}, got {length!r}")
        self.check_length(length)
        sizes, rows = (length, self.length, self.block_size), self.query_block_size
        return expand(self.keep, self.form, *sizes, self.length_policy, self.symmetric, query_block_size=rows)

    def to_table(self, length: int | None = None) -> torch.Tensor:
        """
        The whole mask of one unpadded sequence of `length` tokens, by default its own: bool `(L, H, length, length)`.
        """
        return fill_fixed_entries(self.structure(length), self.special_tokens, self.diagonal, self.special_rows)

    def to_block_mask(self, length: int | None = None, layer: int = 0, device: Any = "cpu") -> Any:
        """One layer of [`~SparseMask.to_table`] as the `BlockMask` that `flex_attention` takes, which has no rest."""
        from torch.nn.attention.flex_attention import create_block_mask

        if self.rest != "none":
            raise ValueError(f"a block mask has no rest, got rest {self.rest!r}: take mask.replace(rest='none')")
        check_range("layer", layer, 0, self.num_layers - 1 if self.num_layers > 1 else None)
        table = self.to_table(length)[layer if self.num_layers > 1 else 0].to(device)
        heads, n, _ = table.shape
        return create_block_mask(lambda b, h, i, j: table[h, i, j], None, heads, n, n, device)

    def check_length(self, length: int) -> None:
        """Refuse a length that the mask says nothing about."""
        if not (hasattr(length, "__index__") and length >= 1):
            raise ValueError(f"length must be an integer of at least 1, got {length!r}")
        if self.length_policy == "error":
            check_length(length, self.length, self.form)

    def density_at(self, length: int, causal: bool = False) -> float:
        """
        Fraction of entries kept at a length, averaged over heads and layers. `causal`: keys j > query i are removed.
        """
        self.check_length(length)
        kept = int(kept_by_head(self.keep, *self._shape(length), self._known, causal, self.query_block_size).sum())
        return kept / (self.num_layers * self.num_heads * length**2)

    @property
    def _known(self):
        """Number of tokens after which all rows and columns are on."""
        return self.length if self.length_policy == "dense" else None

    def _shape(self, length: int) -> tuple[str, int, int | None, int, bool | None, bool, bool]:
        num_special = SPECIAL_TOKENS.index(self.special_tokens)
        return self.form, length, self.block_size, num_special, self.diagonal, self.symmetric, self.special_rows

    @cached_property
    def density(self) -> float:
        """Fraction of entries kept at the mask's own length, averaged over heads and layers."""
        return self.density_at(self.length)

    @property
    def sparsity(self) -> float:
        """Fraction of entries removed, `1 - density`."""
        return 1.0 - self.density

    def head_sparsities(self) -> list[list[float]]:
        """Fraction of entries removed at the mask's own length, by layer and head."""
        kept = kept_by_head(self.keep, *self._shape(self.length), query_block_size=self.query_block_size)
        return (1 - kept.double() / self.length**2).tolist()

    def num_empty_rows(self, length: int | None = None, window: int | None = None) -> int:
        """
        Number of (layer, head, query) rows that keep no key at a length, by default its own. Keys farther than
        `window` from the query do not count, even special tokens.
        """
        length = self.length if length is None else length
        if self.form == "table" or self.query_block_size or (window is not None and length > self.length):
            table = self.to_table(length)
            return int((~(table if window is None else table.triu(-window).tril(window)).any(-1)).sum())
        self.check_length(length)
        if self.length_policy == "dense" and length > self.length and window is None:
            return 0  # every query has a new key
        return num_empty_rows(self.keep, *self._shape(length)[1:], window)

    def check_fits(self, num_layers: int, num_heads: int) -> None:
        """Refuse a mask of other sizes than those of a model, whose layers with attention count."""
        rests = len(self.rest_biases())
        if not {self.num_layers, rests} - {0, 1, num_layers} and self.num_heads == num_heads:
            return
        base = self.metadata.get("base_model")
        found = f" (found for {printable(base)})" if base else ""
        biases = f", its rest_bias for {rests}" if rests not in (0, self.num_layers) else ""
        raise ValueError(
            f"the mask{found} is for {self.num_layers} layer(s){biases} and {self.num_heads} heads of length "
            f"{self.length}; the model has {num_layers} layers with attention and {num_heads} heads (1 layer fits all)"
        )

    def rest_biases(self) -> torch.Tensor:
        """What is added to the scores of the rest, float32 `(1 or more, H)`; without a rest `(0, H)`."""
        if self.rest_bias is not None:
            return self.rest_bias
        return torch.zeros(int(self.rest != "none"), self.num_heads)

    def check_rows(self, window: int | None = None) -> None:
        """Refuse a mask in which a query keeps no key within `window`, unless the rest is one."""
        if self.rest != "none" and window is None:
            return
        if count := self.num_empty_rows(window=window):
            raise ValueError(
                f"{count} of {self.num_layers * self.num_heads * self.length} mask rows keep nothing; such queries "
                "would output 0. Keep special tokens or the diagonal, or set allow_empty_rows"
            )

    def without_diagonal(self) -> "SparseMask":
        """The same mask with all n diagonal entries removed, those of special tokens included."""
        return self.replace(diagonal=False)

    def replace(self, **changes: Any) -> "SparseMask":
        """A copy with some constructor arguments changed. Without a rest it has no bias of it either."""
        if changes.get("rest") == "none":
            changes = {"rest_bias": None} | changes
        return SparseMask(**{name: getattr(self, name) for name in (*_TENSORS, *_FIELDS, "metadata")} | changes)

    def description(self) -> dict[str, Any]:
        """The fields that `mask_config.json` holds about the mask itself, without provenance."""
        return {
            "form": self.form,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "length": self.length,
            "num_parameters": self.keep.shape[-1],
            **{name: value for name in _FIELDS if (value := getattr(self, name)) != OPTIONAL.get(name, ...)},
        }

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """
        Write `mask_config.json` and `mask.safetensors` (one bit per parameter, and the bias of a rest) and, in a
        folder without a model, a card. A `README.md` that you wrote or changed is kept. In the folder of an attached
        model that is still searching, the mask ends that search: its `search_config.json` is removed.

        Args:
            save_directory (`str` or `os.PathLike`): Folder to write to, created if missing.
            push_to_hub (`bool`, *optional*, defaults to `False`): Whether to upload the files as well.
            kwargs: Arguments of [`SparseMask.push_to_hub`] (`repo_id`, `subfolder`, `private`, `token`, ...).

        Raises:
            TypeError: If `kwargs` are given, and nothing is to be pushed.
            ValueError: If the `config.json` in the folder is that of a SparseBERT with a search or a pattern.
        """
        if kwargs and not push_to_hub:
            raise TypeError(f"{sorted(kwargs)[0]} has no meaning without push_to_hub=True")
        folder = Path(save_directory)
        check_takes_mask(folder)
        self.write_beside_model(folder)
        if not (folder / CONFIG_NAME).is_file():
            about = self.description(), self.head_sparsities(), self.metadata, bridges(self, self.num_layers)
            save_card(folder, bare_mask_card(folder.resolve().name, *about))
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.resolve().name), **kwargs)

    def write_beside_model(self, folder: Path) -> None:
        """Write the two files into the folder of the model that this mask is that of. A search there is removed."""
        write_mask_files(folder, self.keep, self.rest_bias, self.description(), self.sparsity, self.metadata)
        (folder / SEARCH_CONFIG_NAME).unlink(missing_ok=True)

    def push_to_hub(self, repo_id: str, *, subfolder: str | None = None, **kwargs: Any) -> CommitInfo:
        """
        Push the mask to a Hub repository, with its card. A repository can hold several masks, in subfolders.

        Args:
            repo_id (`str`): Name of the repository, created if missing.
            subfolder (`str`, *optional*): Folder within the repository: the name of the mask there.
            kwargs: `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr` and `tags` of
                `PushToHubMixin.push_to_hub`.
        """
        check_subfolder(subfolder)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit, _ = push_folder(
                folder, repo_id, subfolder=subfolder, **{"commit_message": "Upload SparseMask"} | kwargs
            )
            return commit

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> "SparseMask":
        """
        Read a mask from a folder (its own or a model's) or from a Hub repository. Nothing is unpickled.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub id.
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `subfolder`.

        Raises:
            TypeError: If an argument is unknown.
            MaskFileError: If a file is missing, damaged, pickled, or of another format version.
        """
        config_path, weights_path = find_mask_files(pretrained_model_name_or_path, **kwargs)
        with enough_memory(weights_path):
            return cls._read(config_path, weights_path)

    @classmethod
    def _read(cls, config_path: Path, weights_path: Path) -> "SparseMask":
        keep, fields, sparsity = read_mask_files(config_path, weights_path)
        try:
            mask = cls(keep, **fields)
        except (ValueError, TypeError) as error:
            raise MaskFileError(f"{config_path}: {error}") from error
        for name in sorted(fields.keys() & {*_FIELDS}):
            if (type(fields[name]), fields[name]) != (type(value := getattr(mask, name)), value):
                raise MaskFileError(f"{config_path}: {name} must be {value!r}, got {fields[name]!r}")
        if sparsity is not None and not abs(mask.sparsity - sparsity) <= SPARSITY_TOLERANCE:
            raise MaskFileError(
                f"{config_path}: the sparsity is described as {sparsity!r}, but {weights_path.name} has "
                f"{mask.sparsity:.6f}: one of the two is damaged; write or download both again"
            )
        return mask
