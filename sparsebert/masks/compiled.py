"""
What kernels read of a frozen mask, made once per mask, length and device, and kept as long as the mask lives.

Letters: L layers (1 when shared), H heads, m length.
"""

import threading
import weakref

import torch

from .sparse_mask import SparseMask, special_entries


# Lengths of padded batches vary; of one mask the forms used last are kept, up to this.
MAX_BYTES = 2**28
_COMPILED = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()  # replicas of DataParallel share a mask


def base_table(mask, length, causal=False, special="none"):
    """
    The entries of a mask that are the same for every sequence.

    Args:
        mask ([`SparseMask`]): Its `diagonal` override applies.
        length (`int`): m.
        causal (`bool`, *optional*, defaults to `False`): Cut keys j > query i.
        special (`str`, *optional*, defaults to `"none"`): Rows and columns of which special tokens belong: `"none"`,
            `"first"` (those of the last token depend on the sequence), or `"all"` (of an unpadded one).

    Returns:
        `torch.Tensor` of shape `(L, H, m, m)`, bool, on the CPU.
    Raises:
        ValueError: As [`SparseMask.structure`].
    """
    table = mask.structure(length)
    if special != "none" and mask.special_tokens != "none":
        table = table | special_entries(length, "first" if special == "first" else mask.special_tokens)
    if mask.diagonal is not None:
        table = table.clone()
        table.diagonal(dim1=-2, dim2=-1).fill_(mask.diagonal)
    return table.tril() if causal else table


def _size(values):
    """Bytes of tensors, and of the tensors that block masks hold."""
    parts = [part for value in values for part in (value.as_tuple() if hasattr(value, "as_tuple") else (value,))]
    return sum(getattr(part, "nbytes", 0) for part in parts)


def remember(mask, key, make):
    """The tuple that `make()` gave for this mask and key, from the cache if it is there."""
    with _LOCK:
        cache = _COMPILED.setdefault(mask, {})
        values = cache.pop(key, None)
        if values is None:
            # What is made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                values = make()
            room = MAX_BYTES - _size(values)
            while cache and sum(map(_size, cache.values())) > room:
                cache.pop(next(iter(cache)))
        cache[key] = values  # the end of a dict is what was used last
    return values


# A graph compiled around a model holds the tensors as constants: they depend on the mask and the length alone.
@torch.compiler.assume_constant_result
def _tensors(handle, make, length, causal, special, device):
    mask = SparseMask.instances[handle]

    def compile_mask():
        with torch.device("cpu"):
            tables = base_table(mask, length, causal, special)
            return tuple(tensor.to(device) for table in tables for tensor in make(table))

    return remember(mask, (make, length, causal, special, device), compile_mask)


def compiled(mask, make, length, causal, device, special="none"):
    """
    A form of the mask's layers, from the cache or made now.

    Args:
        mask ([`SparseMask`])
        make (`Callable`): A function of a module, `(H, m, m) bool on the CPU -> tuple of torch.Tensor`.
        length (`int`): m.
        causal, special: As in [`base_table`].
        device (`torch.device`): Where the tensors go.

    Returns:
        `tuple`: For each layer (one when shared), what `make` returned.
    Raises:
        ValueError: As [`SparseMask.structure`].
    """
    tensors = _tensors(mask.handle, make, length, causal, special, str(device))
    size = len(tensors) // mask.num_layers
    return tuple(tensors[start : start + size] for start in range(0, len(tensors), size))


@torch.compiler.assume_constant_result
def _windowed(handle, window, length):
    mask = SparseMask.instances[handle]

    def cut():
        with torch.device("cpu"):
            near = torch.ones(length, length, dtype=torch.bool).triu(-window).tril(window)
            return (SparseMask(base_table(mask, length, special="all") & near, length),)

    return remember(mask, ("window", window, length), cut)[0]


def windowed(mask, window, length):
    """
    A mask without the entries farther than `window` from the diagonal, at one length: a table that holds the special
    tokens, the last one at the end.

    Raises:
        ValueError: As [`SparseMask.structure`].
    """
    return _windowed(mask.handle, window, length)
