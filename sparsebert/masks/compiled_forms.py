"""
The forms of a frozen mask that kernels read. Each is made once per mask, length and device, and kept for as long as
the mask lives.

Letters: L layers (1 when shared), H heads, m length.
"""

import threading
import weakref
from collections.abc import Callable, Hashable

import torch

from .expansion import fill_fixed_entries, signed_parameters
from .exported import captured
from .sparse_mask import SparseMask


# Bytes of cached forms per mask beside the largest of them; beyond this the least recently used are dropped. Padded
# batches vary in length.
MAX_BYTES = 2**28
_COMPILED: "weakref.WeakKeyDictionary[SparseMask, dict[Hashable, tuple]]" = weakref.WeakKeyDictionary()
# Forms that a CUDA graph reads, which knows their addresses only.
_CAPTURED: "weakref.WeakKeyDictionary[SparseMask, dict[Hashable, tuple]]" = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()  # replicas of DataParallel share a mask


def base_table(mask: SparseMask, length: int, causal: bool = False, special: str = "none") -> torch.Tensor:
    """
    The entries of a mask that are the same for every sequence, bool `(L, H, m, m)` on the CPU.

    `special`: the special tokens whose rows (unless the mask leaves them to its parameters) and columns are on,
    `"none"`, `"first"` (the last one may differ between sequences) or `"all"` (of unpadded sequences).
    """
    if special == "all" or mask.special_tokens == "none":
        special = mask.special_tokens
    table = fill_fixed_entries(mask.structure(length), special, mask.diagonal, mask.special_rows)
    return table.tril() if causal else table


def _tensors_in(values):
    """The tensors among some tensors, masks and block masks, and in the latter."""
    parts = [part for value in values for part in (value.as_tuple() if hasattr(value, "as_tuple") else (value,))]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _size(values):
    return sum(tensor.nbytes for tensor in _tensors_in(values))


def _others(forms):
    """Bytes of all forms but the largest, which smaller ones are not to drive out in turns."""
    sizes = sorted(map(_size, forms))
    return sum(sizes[:-1])


def remember(mask: SparseMask, key: Hashable, make: Callable[[], tuple]) -> tuple:
    """
    The result of `make()`, a tuple of tensors, masks or block masks, kept by `key` for as long as the mask lives.
    """
    with _LOCK:
        cache = _COMPILED.setdefault(mask, {})
        values = cache.pop(key, None)
        if values is None:
            # Tensors made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                values = make()
            if any(type(tensor) is not torch.Tensor for tensor in _tensors_in(values)):
                return values  # without data, as under FakeTensorMode: it means nothing outside
            while cache and _others([values, *cache.values()]) > MAX_BYTES:
                cache.pop(next(iter(cache)))
        cache[key] = values  # the end of a dict is the most recently used
        if captured():
            _CAPTURED.setdefault(mask, {})[key] = values
    return values


# A compiled graph holds the tensors as constants, since they depend on the mask and the length alone.
@torch.compiler.assume_constant_result
def _tensors(handle, make, length, causal, special, device, options):
    mask = SparseMask.instances[handle]

    def compile_mask():
        with torch.device("cpu"):
            tables = base_table(mask, length, causal, special)
            return tuple(tensor.to(device) for table in tables for tensor in make(table, *options))

    return remember(mask, (make, length, causal, special, device, *options), compile_mask)


def compiled(
    mask: SparseMask,
    make: Callable[..., tuple[torch.Tensor, ...]],
    length: int,
    causal: bool,
    device: torch.device,
    special: str = "none",
    options: tuple[Hashable, ...] = (),
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """
    A form of every layer of a mask (of one, if they share it), from the cache or made now.

    `make`: a module-level function that turns the table of one layer, bool `(H, m, m)` on the CPU, and `options` into
    a tuple of tensors. `special`: see [`base_table`].
    """
    return _by_layer(_tensors(mask.handle, make, length, causal, special, str(device), options), mask.handle)


@torch.compiler.assume_constant_result
def _tensors_of_parameters(handle, make, length, device):
    mask = SparseMask.instances[handle]
    mask.check_length(length)

    def compile_mask():
        with torch.device("cpu"):
            signed = signed_parameters(mask.keep, mask.symmetric)
            # The parameter of distance 0 is not the diagonal of all queries of a tile that is higher than wide.
            diagonal = None if mask.query_block_size else mask.diagonal
            made = (make(layer, mask.block_size or 1, diagonal) for layer in signed)
            return tuple(tensor.to(device) for tensors in made for tensor in tensors)

    return remember(mask, (make, device), compile_mask)


def compiled_parameters(
    mask: SparseMask, make: Callable[..., tuple[torch.Tensor, ...]], length: int, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """
    [`compiled`] for a Toeplitz mask, where the form is the same for inputs of any length, which is checked alone.

    `make`: as there, of the parameters of one layer by their signed distance, bool `(H, 2K - 1)` on the CPU, see
    [`signed_parameters`], the block size (1 for offsets) and the mask's `diagonal`.
    """
    return _by_layer(_tensors_of_parameters(mask.handle, make, length, str(device)), mask.handle)


# A property of a mask that the graph itself makes cannot be read in a graph of torch 2.11.
@torch.compiler.assume_constant_result
def _num_layers(handle):
    return SparseMask.instances[handle].num_layers


def _by_layer(tensors, handle):
    size = len(tensors) // _num_layers(handle)
    return tuple(tensors[start : start + size] for start in range(0, len(tensors), size))


@torch.compiler.assume_constant_result
def _rest_biases(handle, device):
    mask = SparseMask.instances[handle]

    def make():
        return mask.rest_biases().to(device).unbind()

    # `torch.jit.trace` traces twice and compares what it recorded, of which a second call would lack this.
    return (make() if torch.jit.is_tracing() else remember(mask, ("rest", device), make)) or (None,)


def rest_biases(mask: SparseMask, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """What is added to the scores of the rest, `(H,)` for each layer or for all; `(None,)` without a rest."""
    return _rest_biases(mask.handle, str(device))


@torch.compiler.assume_constant_result
def _windowed(handle, window, length):
    mask = SparseMask.instances[handle]

    def cut():
        with torch.device("cpu"):
            near = torch.ones(length, length, dtype=torch.bool).triu(-window).tril(window)
            return (SparseMask(base_table(mask, length, special="all") & near, length),)

    return remember(mask, ("window", window, length), cut)[0]


@torch.compiler.assume_constant_result
def _narrowed(handle, window):
    mask = SparseMask.instances[handle]

    def cut():
        with torch.device("cpu"):
            size = mask.block_size or 1
            reached = (window + (mask.query_block_size or size) - 1) // size + 1
            distance = torch.arange(mask.keep.shape[-1])
            if not mask.symmetric:
                distance = (distance - len(distance) // 2).abs()
            return (mask.replace(keep=mask.keep & (distance < reached)),)

    return remember(mask, ("narrow", window), cut)[0]


def narrowed(mask: SparseMask, window: int) -> SparseMask:
    """
    A Toeplitz mask without the parameters that decide no entry within `window` of the diagonal. Its special tokens,
    and in form `"blocks"` its farthest tiles, still reach beyond.
    """
    return _narrowed(mask.handle, window)


def with_real_last(mask: SparseMask) -> SparseMask:
    """The mask whose last special token is each sequence's last one that is not padding, see [`SparseMask`]."""
    if mask.special_tokens != "first_last" or mask.last_token == "real":
        return mask
    return remember(mask, "real last token", lambda: (mask.replace(last_token="real"),))[0]


def windowed(mask: SparseMask, window: int, length: int) -> SparseMask:
    """
    A mask of form `"table"` without the entries farther than `window` from the diagonal, for this length alone. Its
    last special token is taken to be at position `length - 1`.
    """
    return _windowed(mask.handle, window, length)
