"""What the processes of a distributed training have in common: averages, and the same frozen mask."""

import hashlib
import json

import numpy as np
import torch
from torch import distributed

from ..masks.sparse_mask import SparseMask


class MaskMismatchError(RuntimeError):
    """The processes of a distributed training do not have the same frozen mask."""


def average_over_processes(tensor: torch.Tensor) -> torch.Tensor:
    """Replace a tensor by its mean over the processes of a distributed training, which must all call this."""
    if distributed.is_available() and distributed.is_initialized():
        tensor.div_(distributed.get_world_size())
        distributed.all_reduce(tensor)
    return tensor


def check_same_mask(mask: SparseMask | None, otherwise: str = "none") -> None:
    """
    Compare the frozen mask over all processes of a distributed training, which must all call this. `otherwise` is
    compared if there is no mask: why there is none. A [`MaskMismatchError`] on all of them names the ranks that
    differ.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    found: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(found, otherwise if mask is None else _fingerprint(mask))
    ranks = {state: [rank for rank, other in enumerate(found) if other == state] for state in found}
    if len(ranks) == 1:
        return
    most = max(ranks, key=lambda state: len(ranks[state]))
    others = "; ".join(f"rank {', '.join(map(str, ranks[state]))} has {state}" for state in ranks if state != most)
    raise MaskMismatchError(
        f"the processes do not have the same frozen mask: {others}; rank {', '.join(map(str, ranks[most]))} has {most}"
    )


def _fingerprint(mask):
    bits = np.packbits(mask.keep.flatten().numpy())
    digest = hashlib.sha256(json.dumps(mask.description(), sort_keys=True).encode() + bits.tobytes()).hexdigest()
    return f"{mask!r} with sha256 {digest[:16]}"
