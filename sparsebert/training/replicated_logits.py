"""What DeepSpeed and FSDP, which shard a model over processes, need: above all mask logits outside of the engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import distributed, nn
from transformers import TrainerCallback

from ..learning.rank_agreement import average_over_processes


if TYPE_CHECKING:
    from ..models.sparse_attention import SparseAttention


SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
# In a checkpoint: the logits with the state of their optimizer.
LOGITS_NAME = "mask_optimizer.pt"
_FULL_STATE = "pytorch_model_fsdp.bin"
_STATE_FIELDS = ("state_dict_type", "state_dict_config", "optim_state_dict_config")


@contextmanager
def stored_state_type(plugin: Any, checkpoint: str | os.PathLike) -> Iterator[None]:
    """Context manager in which FSDP reads the kind of state, full or sharded, that a checkpoint has."""
    if plugin is None:
        yield
        return
    before = {name: getattr(plugin, name) for name in _STATE_FIELDS}
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type(f"{'FULL' if (Path(checkpoint) / _FULL_STATE).is_file() else 'SHARDED'}_STATE_DICT")
    try:
        yield
    finally:
        vars(plugin).update(before)


def check_weights_are_gathered(config: Any) -> None:
    """Check that DeepSpeed saves models with their weights."""
    name = "stage3_gather_16bit_weights_on_model_save"
    if config.is_zero3() and not config.is_true(f"zero_optimization.{name}"):
        raise ValueError(f"deepspeed: zero_optimization.{name} must be true, or no model could be saved under ZeRO-3")


def wrap_layers(plugin: Any, model: Any) -> None:
    """
    Have FSDP shard each layer, unless the user has named other classes. By default accelerate would shard the block of
    the embeddings as well, and then the word embeddings in it, which are shared with the decoder, a second time.
    """
    if plugin.transformer_cls_names_to_wrap is None and model._no_split_modules:
        words = model.get_input_embeddings()
        holders = {
            type(module).__name__ for module in model.modules() if any(part is words for part in module.modules())
        }
        plugin.transformer_cls_names_to_wrap = [name for name in model._no_split_modules if name not in holders]


def keep_outside(sparse_attention: "SparseAttention", device: torch.device) -> None:
    """
    Take the mask logits out of the parameters of the model, so that no engine shards them. The attribute `mask_logits`
    stays, and `save_pretrained` saves them nevertheless. A frozen mask has none.
    """
    logits = sparse_attention._parameters.get("mask_logits")
    if logits is not None:
        del sparse_attention._parameters["mask_logits"]
        vars(sparse_attention)["mask_logits"] = nn.Parameter(_whole(logits).to(device, torch.float32))


class ReplicatedLogits(TrainerCallback):
    """
    The mask logits of a model that an engine shards. Every process has all of them, outside of the parameters that the
    engine sees, with an optimizer of their own: they can be read at any time, and the engine keeps its parameters when
    the search ends. Once the mask is frozen this does nothing.
    """

    def __init__(self, sparse_attention: "SparseAttention", optimizer_class: Any, kwargs: dict[str, Any]) -> None:
        self._attention = sparse_attention
        self._logits: Any = vars(sparse_attention)["mask_logits"]
        if distributed.is_initialized():
            distributed.broadcast(self._logits.data, 0)
        self._optimizer = optimizer_class([self._logits], **kwargs | {"weight_decay": 0.0})
        self.learning_rate: float | torch.Tensor = kwargs["lr"]

    @property
    def logits(self) -> Any:
        """The logits, or `None` once the mask is frozen."""
        return self._logits if self._attention.mask_logits is self._logits else None

    def reduce(self, scale: float = 1.0) -> list[torch.Tensor]:
        """Average the gradient over the processes. Call it before the update, once."""
        if self.logits is None or self.logits.grad is None:
            return []
        gradient = self.logits.grad
        average_over_processes(gradient)
        if scale != 1:
            gradient.div_(scale)
        return [gradient]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.logits is None or self.logits.grad is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        if bool(self.logits.grad.isfinite().all()):  # else a step that fp16 skips
            self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, checkpoint: str | os.PathLike) -> None:
        """Write logits and optimizer into a checkpoint, by one process."""
        if self.logits is not None:
            content = {"mask_logits": self.logits.detach().cpu(), "optimizer": self._optimizer.state_dict()}
            torch.save(content, Path(checkpoint) / LOGITS_NAME)

    def load(self, checkpoint: str | os.PathLike) -> None:
        """Read what [`~ReplicatedLogits.save`] wrote."""
        if self.logits is None:
            return
        path = Path(checkpoint) / LOGITS_NAME
        if not path.is_file():
            raise ValueError(f"{checkpoint} has no {LOGITS_NAME}, the logits of its search: take another checkpoint")
        content = torch.load(path, map_location=self._logits.device, weights_only=True)
        with torch.no_grad():
            self._logits.copy_(content["mask_logits"])
        self._optimizer.load_state_dict(content["optimizer"])


def _whole(parameter):
    """A copy of a parameter; ZeRO-3 has partitioned it already if the model was loaded under it."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
