"""What a frozen mask costs to run: sparsity, live tiles, and which backend `sparse_auto` would choose."""

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import CONFIG_NAME

from ..attention.backends import BACKENDS
from ..attention.capabilities import Request
from ..attention.choosing.choice import automatic
from ..attention.model_masks import without_adapters
from ..checks import check_range
from ..hub import check_available, check_path
from ..masks.mask_files import MASK_CONFIG_NAME, MAX_MASK_LENGTH
from ..masks.shipped import shipped_folder
from ..masks.sparse_mask import SparseMask
from ..masks.tiles import mask_tile_shares
from ..models.loading import find_file, load
from ..models.sparse_attention import get_sparse_attention
from .tables import Table


if TYPE_CHECKING:
    from transformers import PreTrainedModel


TILE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, repr=False)
class Plan:
    """
    What a frozen mask costs to run at one length, on one device, in one dtype.

    Attributes:
        length (`int`):
            Number of tokens, n.
        device (`str`):
            Device type, such as `"cpu"` or `"cuda"`.
        dtype (`torch.dtype`):
            Dtype of query, key and value.
        sparsity (`float`):
            Fraction of entries removed at this length, averaged over heads and layers.
        live_tiles (`dict[int, float]`):
            By tile size, the fraction of tiles that hold an entry: mean over heads and layers, without the rows
            and columns of special tokens, which kernels handle separately.
        choices (`dict[str, tuple[str, str]]`):
            Name of the backend that `sparse_auto` would choose, or that is set in the model, and why, for
            `"inference"`, `"training"` and `"training with dropout"`.
    """

    length: int
    device: str
    dtype: torch.dtype
    sparsity: float
    live_tiles: dict[int, float]
    choices: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        width = max(map(len, self.choices))
        lines = [f"{phase:<{width}}  {name}: {reason}" for phase, (name, reason) in self.choices.items()]
        return "\n".join([self._head(), f"live tiles by tile size  {self._tiles()}", *lines])

    __repr__ = __str__  # an interactive session shows it so

    def _head(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.length} tokens, {self.device}, {dtype}: {100 * self.sparsity:.1f} % of the entries removed"

    def _tiles(self) -> str:
        return ", ".join(f"{size}: {100 * share:.1f} %" for size, share in self.live_tiles.items())

    def table(self) -> Table:
        """The choices as a [`Table`], with sparsity as its title and live tiles below."""
        rows = [{"phase": phase, "backend": name, "reason": reason} for phase, (name, reason) in self.choices.items()]
        return Table.of(self._head(), rows, [f"live tiles by tile size: {self._tiles()}"])

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values; a choice is `{"backend": ..., "reason": ...}`."""
        choices = {phase: {"backend": name, "reason": reason} for phase, (name, reason) in self.choices.items()}
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch."), "choices": choices}


def plan(
    model_or_mask: "SparseMask | PreTrainedModel",
    length: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    head_size: int = 64,
) -> Plan:
    """
    How a frozen mask would run: print it, or read its fields.

    Args:
        model_or_mask ([`SparseMask`], `PreTrainedModel`, `PeftModel` or `SentenceTransformer`): A mask, or a model
            with a frozen mask.
        length (`int`, *optional*): Number of tokens, n. Defaults to the mask's own length.
        device (`str` or `torch.device`, *optional*): Device to run on. Defaults to the model's, or the CPU for a mask.
        dtype (`torch.dtype`, *optional*): Dtype of query, key and value. Defaults to the model's, or float32 for a
            mask.
        head_size (`int`, *optional*, defaults to 64): Head size d, used for a mask only.

    Returns:
        [`Plan`]
    Raises:
        ValueError: If the model's mask is still being searched, or the mask is undefined at this length.
    """
    causal, probability_map, needs, fixed = False, "softmax", frozenset[str](), None
    if isinstance(model_or_mask, SparseMask):
        mask = model_or_mask
        needs = frozenset(["rest"] if mask.rest != "none" else [])
    else:
        model: Any = without_adapters(model_or_mask)
        sparse_attention = get_sparse_attention(model)
        if sparse_attention.mask is None:
            raise ValueError("plan needs a frozen mask, but this model is still searching: freeze it first")
        mask, causal = sparse_attention.mask, sparse_attention.carrier.is_decoder
        head_size, probability_map = sparse_attention.head_size, sparse_attention.config.probability_map
        needs = frozenset(sparse_attention.wanted())
        fixed = model.base_model.config._attn_implementation
        device, dtype = device or model.device, dtype or model.dtype
    length = mask.length if length is None else length
    check_range("length", length, 1, MAX_MASK_LENGTH)
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(f"dtype must be a dtype of torch, got {dtype!r}")
    try:
        device_type, dtype = torch.device(device or "cpu").type, dtype or torch.float32
    except RuntimeError as error:
        raise ValueError(f"device must be a device of torch, such as cpu or cuda, got {device!r}") from error
    sparsity = 1.0 - mask.density_at(length, causal)
    choices = {}
    for phase, dropout in (("inference", False), ("training", False), ("training with dropout", True)):
        shape = (1, mask.num_heads, length, length, head_size)
        flags = (dropout, phase != "inference", False, causal)
        request = Request(device_type, dtype, *shape, *flags, needs, probability_map)
        name, reason = automatic(mask, request, may_run=False)
        if fixed in BACKENDS:
            name, reason = fixed, f"set in the model; sparse_auto would take {name}: {reason}"
        choices[phase] = name, reason
    return Plan(
        length,
        device_type,
        dtype,
        sparsity,
        {size: mask_tile_shares(mask, length, size, causal)[0] for size in TILE_SIZES},
        choices,
    )


def saved_plan(
    source: str | os.PathLike,
    length: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **hub_arguments: Any,
) -> Plan:
    """How the mask in a folder or Hub repository would run, see [`plan`]."""
    check_path(source := shipped_folder(source))
    check_available(source, CONFIG_NAME, MASK_CONFIG_NAME, **hub_arguments)
    is_model = find_file(source, CONFIG_NAME, **hub_arguments) is not None
    reader: Any = load if is_model else SparseMask.from_pretrained
    return plan(reader(source, **hub_arguments), length, device, dtype)
