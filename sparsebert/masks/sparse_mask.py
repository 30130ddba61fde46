"""
The frozen attention mask and its file format.

Letters: L layers (1 when all layers share the masks), H heads, n length, K parameters of a Toeplitz form.
A query i may attend to a key j where the mask is True. Nothing is added behind the user's back: no entry, not even
the diagonal, is on unless the structure or the special tokens say so.
"""

import itertools
import json
import math
import os
import weakref
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import PushToHubMixin

from ..checks import check_choice


# What the field says as the `diagonal` of a SparseMask.
DIAGONALS = {"learned": None, "keep": True, "remove": False}


MASK_CONFIG_NAME = "mask_config.json"
MASK_WEIGHTS_NAME = "mask.safetensors"
MASK_FORMAT_VERSION = 1

FORMS = ("offsets", "blocks", "table")
SPECIAL_TOKENS = ("none", "first", "first_last")
LAST_TOKENS = ("real", "position")
LENGTH_POLICIES = ("extend", "dense", "error")

# Arguments of `from_pretrained` that say where a Hub file comes from.
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")


class MaskFileError(ValueError):
    """A mask file that is missing, damaged or of the wrong kind."""


def toeplitz_index(length, block_size=1, device=None):
    """Index of the parameter of each entry, `abs(i // B - j // B)`: a long tensor of shape `(n, n)`."""
    block = torch.arange(length, device=device) // block_size
    return (block[:, None] - block[None, :]).abs()


def special_entries(length, special_tokens, last=None, device=None):
    """
    Rows and columns of the special tokens.

    Args:
        length (`int`): n.
        special_tokens (`str`): `"none"`, `"first"` or `"first_last"`.
        last (`torch.Tensor` of shape `(B,)`, *optional*): Position of each sequence's last token; `n - 1` by default.

    Returns:
        `torch.Tensor` of shape `(n, n)`, or `(B, n, n)` with `last`, bool.
    """
    check_choice("special_tokens", special_tokens, SPECIAL_TOKENS)
    position = torch.arange(length, device=device)
    special = torch.zeros(length, dtype=torch.bool, device=device)
    if special_tokens != "none":
        special = position == 0
    if special_tokens == "first_last":
        special = special | (position == (length - 1 if last is None else last[:, None]))
    elif last is not None:
        special = special.expand(len(last), length)
    return special[..., :, None] | special[..., None, :]


def default_length_policy(form):
    """Toeplitz forms extend to unseen lengths (unseen offsets off); a table says nothing beyond its length."""
    return "error" if form == "table" else "extend"


class SparseMask(PushToHubMixin):
    """
    A frozen boolean mask per head: which keys each query may attend to. Immutable; classical patterns, frozen searches
    and files all end as this type.

    Args:
        keep (`torch.Tensor`): Bool, True = may attend. Form `"offsets"`: `(L, H, K)`, one bit per `abs(i - j)`,
            offsets from K <= n on are off. Form `"blocks"`: `(L, H, ceil(n / block_size))`, one bit per tile diagonal
            `abs(i // B - j // B)`. Form `"table"`: `(L, H, n, n)`. L = 1 means that all layers share the masks. The
            leading L may be left out.
        length (`int`): n, the length that the mask was made for.
        form (`str`, *optional*, defaults to `"table"`): `"offsets"`, `"blocks"` or `"table"`.
        block_size (`int`, *optional*): B of form `"blocks"`.
        special_tokens (`str`, *optional*, defaults to `"none"`): Tokens whose row and column are on whatever `keep`
            says: `"none"`, `"first"` (position 0) or `"first_last"`.
        last_token (`str`, *optional*, defaults to `"real"`): What "last" is: `"real"`, the last non-padding token of
            each sequence, or `"position"`, the last position of the input.
        diagonal (`bool`, *optional*): `False` removes and `True` keeps all n diagonal entries, special tokens
            included; `None` leaves them as they are.
        length_policy (`str`, *optional*): Inputs longer than n: `"extend"` (Toeplitz forms; their default),
            `"dense"` (positions from n on attend and are attended freely) or `"error"` (default of tables).
        metadata (`dict`, *optional*): Provenance to store: base model, revision, run.

    Raises:
        ValueError: If a field is out of its range or `keep` does not fit the form.
    """

    # By `handle`, a number that stands for a mask where only numbers can: constants of a compiled graph.
    instances = weakref.WeakValueDictionary()
    _handles = itertools.count()

    def __init__(
        self,
        keep,
        length,
        form="table",
        block_size=None,
        special_tokens="none",
        last_token="real",
        diagonal=None,
        length_policy=None,
        metadata=None,
    ):
        check_choice("form", form, FORMS)
        check_choice("special_tokens", special_tokens, SPECIAL_TOKENS)
        check_choice("last_token", last_token, LAST_TOKENS)
        check_choice("diagonal", diagonal, (None, True, False))
        length_policy = length_policy or default_length_policy(form)
        check_choice("length_policy", length_policy, LENGTH_POLICIES)
        if form == "table" and length_policy == "extend":
            raise ValueError("length_policy 'extend' needs a Toeplitz form (offsets or blocks), got form 'table'")
        if (form == "blocks") != (block_size is not None):
            raise ValueError(f"block_size goes with form 'blocks' only, got {block_size!r} with form {form!r}")
        for field, value in (("length", length), ("block_size", block_size)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool:
            raise ValueError(f"keep must be a bool tensor, got {getattr(keep, 'dtype', type(keep).__name__)}")
        num_dims = 4 if form == "table" else 3
        keep = keep.detach().cpu().clone()  # never the caller's memory: a mask does not change
        keep = keep[None] if keep.dim() == num_dims - 1 else keep
        if keep.dim() != num_dims:
            raise ValueError(f"keep of form {form!r} must have {num_dims} dimensions (L, H, ...), got {keep.dim()}")
        size = {"offsets": keep.shape[-1], "blocks": -(-length // (block_size or 1)), "table": length}[form]
        expected = {"offsets": (size,), "blocks": (size,), "table": (length, length)}[form]
        if tuple(keep.shape[2:]) != expected or size > length or 0 in keep.shape:
            raise ValueError(f"keep of form {form!r} must have shape (L, H, {', '.join(map(str, expected))}), "
                             f"got {tuple(keep.shape)} at length {length}")  # fmt: skip
        self.keep = keep
        self.length = length
        self.form = form
        self.block_size = block_size
        self.special_tokens = special_tokens
        self.last_token = last_token
        self.diagonal = diagonal
        self.length_policy = length_policy
        self.metadata = dict(metadata or {})
        self._register()

    def _register(self):
        self.handle = next(self._handles)
        self.instances[self.handle] = self

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._register()

    @property
    def num_layers(self):
        """Number of different layers; 1 when all layers share the masks."""
        return self.keep.shape[0]

    @property
    def num_heads(self):
        return self.keep.shape[1]

    @property
    def nbytes(self):
        """Memory in bytes."""
        return self.keep.nbytes

    def __repr__(self):
        return (
            f"SparseMask({self.form}, layers={self.num_layers}, heads={self.num_heads}, length={self.length}, "
            f"special_tokens={self.special_tokens!r}, sparsity={self.sparsity:.4f})"
        )

    def __eq__(self, other):
        return (
            isinstance(other, SparseMask)
            and self.description() == other.description()
            and torch.equal(self.keep, other.keep)
        )

    __hash__ = object.__hash__

    def structure(self, length=None):
        """
        The mask at `length` without special tokens and without the `diagonal` override.

        Returns:
            `torch.Tensor` of shape `(L, H, length, length)`, bool.
        Raises:
            ValueError: If `length` exceeds the mask's and `length_policy` is `"error"`.
        """
        length = self.length if length is None else length
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        known = min(length, self.length)
        if length > self.length and self.length_policy == "error":
            raise ValueError(
                f"input of {length} tokens is longer than the mask ({self.length}); shorten it, or set "
                f"length_policy to 'dense'{'' if self.form == 'table' else ' or extend'}"
            )
        if self.form == "table":
            table = self.keep[..., :known, :known]
        else:
            # One parameter beyond the last, always off, stands for every unseen offset.
            keep = torch.nn.functional.pad(self.keep, (0, 1))
            index = toeplitz_index(length, self.block_size or 1).clamp_(max=keep.shape[-1] - 1)
            table = keep[..., index]
            if length == known or self.length_policy == "extend":
                return table
            table = table[..., :known, :known]
        # Policy "dense": rows and columns beyond the mask are on.
        return torch.nn.functional.pad(table, (0, length - known, 0, length - known), value=True)

    def to_table(self, length=None):
        """
        The whole mask of one unpadded sequence of `length` tokens (default: the mask's own length).

        Returns:
            `torch.Tensor` of shape `(L, H, length, length)`, bool, True = may attend.
        Raises:
            ValueError: As [`SparseMask.structure`].
        """
        table = self.structure(length)
        table = table | special_entries(table.shape[-1], self.special_tokens)
        if self.diagonal is not None:
            table.diagonal(dim1=-2, dim2=-1).fill_(self.diagonal)
        return table

    def mask_mod(self, layer=0, length=None, device=None):
        """
        The mask of one layer as a FlexAttention `mask_mod(b, h, q_idx, kv_idx)`, for unpadded sequences.

        Raises:
            ValueError: As [`SparseMask.structure`].
        """
        table = self.to_table(length)[0 if self.num_layers == 1 else layer].to(device)

        def sparse_mask_mod(b, h, q_idx, kv_idx):
            return table[h, q_idx, kv_idx]

        return sparse_mask_mod

    @cached_property
    def density(self):
        """Fraction of entries kept at the mask's own length, averaged over heads and layers."""
        return self.to_table().float().mean().item()

    @property
    def sparsity(self):
        """Fraction of entries removed, `1 - density`."""
        return 1.0 - self.density

    def num_empty_rows(self, length=None):
        """Number of (layer, head, query) rows that keep no key."""
        return int((~self.to_table(length).any(-1)).sum())

    def check_rows(self):
        """
        Raises:
            ValueError: If a query keeps no key.
        """
        if count := self.num_empty_rows():
            raise ValueError(
                f"{count} of {self.num_layers * self.num_heads * self.length} mask rows keep nothing; such queries "
                "would output 0. Keep special tokens or the diagonal, or set allow_empty_rows"
            )

    def without_diagonal(self):
        """The same mask with all n diagonal entries removed, those of special tokens included."""
        return self.replace(diagonal=False)

    def replace(self, **changes):
        """A copy with some constructor arguments changed."""
        fields = ("keep", "length", "form", "block_size", "special_tokens", "last_token", "diagonal", "length_policy")
        return SparseMask(**{name: getattr(self, name) for name in fields + ("metadata",)} | changes)

    def description(self):
        """What `mask_config.json` holds about the mask itself, without provenance."""
        return {
            "form": self.form,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "length": self.length,
            "num_parameters": self.keep.shape[-1],
            "block_size": self.block_size,
            "special_tokens": self.special_tokens,
            "last_token": self.last_token,
            "diagonal": self.diagonal,
            "length_policy": self.length_policy,
        }

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """
        Write `mask_config.json` and `mask.safetensors` (one bit per parameter), and upload them if asked.

        Args:
            save_directory (`str` or `os.PathLike`): Created if missing.
            push_to_hub (`bool`, *optional*, defaults to `False`): Upload as well; `kwargs` as in
                `PushToHubMixin.push_to_hub` (`repo_id`, `private`, `token`, `commit_message`, ...).
        """
        from ..version import __version__

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            **self.metadata,
            "format_version": MASK_FORMAT_VERSION,
            "library_version": __version__,
            **self.description(),
            "sparsity": round(self.sparsity, 6),
        }
        bits = torch.from_numpy(np.packbits(self.keep.flatten().numpy()))
        # The old pair stays until both new files are complete.
        temporary = {name: folder / f"{name}.tmp" for name in (MASK_WEIGHTS_NAME, MASK_CONFIG_NAME)}
        save_file({"keep": bits}, temporary[MASK_WEIGHTS_NAME])
        temporary[MASK_CONFIG_NAME].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, path in temporary.items():
            os.replace(path, folder / name)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """
        Read a mask from a folder (its own, or a model's) or from a Hub repository. Nothing is unpickled.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub id.
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `subfolder`.

        Raises:
            MaskFileError: If a file is missing, damaged, pickled, or of a newer format.
        """
        unknown = set(kwargs) - set(HUB_ARGUMENTS)
        if unknown:
            raise TypeError(f"unknown arguments {sorted(unknown)}; allowed: {', '.join(HUB_ARGUMENTS)}")
        source = Path(pretrained_model_name_or_path)
        if source.is_dir():
            folder = source / (kwargs.get("subfolder") or "")
            paths = [folder / name for name in (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME)]
        elif source.is_file() or source.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
            raise MaskFileError(
                f"{source}: expected a folder or Hub id with {MASK_CONFIG_NAME} and {MASK_WEIGHTS_NAME}; "
                "pickled files are never read"
            )
        else:
            name = str(pretrained_model_name_or_path)
            try:
                paths = [Path(hf_hub_download(name, file, **kwargs)) for file in (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME)]
            except HFValidationError as error:
                raise MaskFileError(f"{name}: no such folder, and not a Hub id") from error
        return cls._read(*paths)

    @classmethod
    def _read(cls, config_path, weights_path):
        for path in (config_path, weights_path):
            if not path.is_file():
                raise MaskFileError(f"{path}: no such file")
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
            version = config.pop("format_version")
            if version != MASK_FORMAT_VERSION:
                raise MaskFileError(
                    f"{config_path}: format_version must be {MASK_FORMAT_VERSION}, got {version!r}; update sparsebert"
                )
            shape = [config.pop("num_layers"), config.pop("num_heads"), config.pop("num_parameters")]
            fields = {name: config.pop(name) for name in ("length", "form", "block_size", "special_tokens")}
            fields |= {name: config.pop(name) for name in ("last_token", "diagonal", "length_policy")}
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
            raise MaskFileError(f"{config_path}: not a mask description ({error!r})") from error
        if not all(isinstance(size, int) and 0 < size < 2**20 for size in (*shape, fields["length"])):
            raise MaskFileError(f"{config_path}: sizes must be positive integers, got {shape}, {fields['length']}")
        if fields["form"] == "table":
            shape.append(shape[-1])
        for name in ("library_version", "sparsity"):
            config.pop(name, None)
        try:
            bits = load_file(weights_path).get("keep")
        except (SafetensorError, OSError) as error:
            raise MaskFileError(
                f"{weights_path}: damaged or not a safetensors file ({error}); write or download it again"
            ) from error
        num_bits = math.prod(shape)
        if bits is None or bits.dtype != torch.uint8 or bits.dim() != 1 or len(bits) != -(-num_bits // 8):
            got = "nothing" if bits is None else f"{bits.dtype} {tuple(bits.shape)}"
            raise MaskFileError(f"{weights_path}: expected {-(-num_bits // 8)} bytes for shape {shape}, got {got}")
        keep = torch.from_numpy(np.unpackbits(bits.numpy(), count=num_bits)).bool().view(shape)
        try:
            return cls(keep, metadata=config, **fields)
        except (ValueError, TypeError) as error:
            raise MaskFileError(f"{config_path}: {error}") from error
