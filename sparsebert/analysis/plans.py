"""What a frozen mask costs to run: sparsity, live tiles, and which backend `sparse_auto` would choose."""

from dataclasses import dataclass

import torch

from ..attention import choice
from ..attention.backends import BACKENDS
from ..masks.compiled import base_table
from ..masks.sparse_mask import SparseMask
from ..masks.tiles import live_tiles
from ..models.attaching import get_sparse_attention


TILE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Plan:
    """
    Args:
        length (`int`): n.
        device (`str`): `"cpu"`, `"cuda"`.
        dtype (`torch.dtype`): Of query, key and value.
        sparsity (`float`): Fraction of entries removed at this length, mean over heads and layers.
        live_tiles (`dict`): Tile size to the fraction of tiles that hold an entry, without the special tokens' rows
            and columns (which kernels handle apart), mean over heads, of the first layer's mask.
        choices (`dict`): `"inference"`, `"training"` and `"training with dropout"` to the name of the backend and why
            `sparse_auto` chooses it.
    """

    length: int
    device: str
    dtype: torch.dtype
    sparsity: float
    live_tiles: dict
    choices: dict

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        tiles = ", ".join(f"{size}: {100 * share:.1f} %" for size, share in self.live_tiles.items())
        width = max(map(len, self.choices))
        lines = [f"{phase:<{width}}  {name}: {reason}" for phase, (name, reason) in self.choices.items()]
        head = f"{self.length} tokens, {self.device}, {dtype}: {100 * self.sparsity:.1f} % of the entries removed"
        return "\n".join([head, f"live tiles by tile size  {tiles}", *lines])


def plan(model_or_mask, length=None, device=None, dtype=None, head_size=64):
    """
    Print and return how a frozen mask would run.

    Args:
        model_or_mask ([`SparseMask`] or a model that carries one)
        length (`int`, *optional*): n; the mask's own by default.
        device (`str` or `torch.device`, *optional*): The model's by default, else the CPU.
        dtype (`torch.dtype`, *optional*): The model's by default, else float32.
        head_size (`int`): d, where only a mask is given.

    Returns:
        [`Plan`]
    Raises:
        ValueError: If the model's mask is still being searched, or is undefined at this length.
    """
    mask, causal, probability_map = model_or_mask, False, "softmax"
    if not isinstance(mask, SparseMask):
        sparse_attention = get_sparse_attention(model_or_mask)
        if sparse_attention.mask is None:
            raise ValueError("plan needs a frozen mask, this model's is being searched or not loaded: freeze it first")
        mask, causal = sparse_attention.mask, bool(sparse_attention.config.is_decoder)
        head_size, probability_map = sparse_attention.head_size, sparse_attention.config.probability_map
        device, dtype = device or model_or_mask.device, dtype or model_or_mask.dtype
    length = mask.length if length is None else length
    device, dtype = torch.device(device or "cpu").type, dtype or torch.float32
    whole = base_table(mask, length, causal, special="all")
    base = base_table(mask, length, causal)[0]
    choices = {}
    for phase, dropout in (("inference", 0.0), ("training", 0.0), ("training with dropout", 0.1)):
        shape = (1, mask.num_heads, length, length, head_size)
        request = choice.Request(
            device, dtype, *shape, dropout, phase != "inference", causal=causal, probability_map=probability_map
        )
        choices[phase] = choice.by_table(BACKENDS, mask, request)
    result = Plan(
        length,
        device,
        dtype,
        1.0 - whole.float().mean().item(),
        {size: live_tiles(base, size) for size in TILE_SIZES},
        choices,
    )
    print(result)
    return result
