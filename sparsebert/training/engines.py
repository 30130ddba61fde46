"""
Engines that shard a model over processes, DeepSpeed and FSDP: which one a run has, which checkpoints it can resume
from, and the mask logits, which stay outside the engine.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import distributed, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..files import replace_files


if TYPE_CHECKING:
    from ..models.sparse_attention import SparseAttention


logger = logging.get_logger(__name__)

SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)

# In a checkpoint of an engine that shards: the engine, and the logits with the state of their optimizer.
ENGINE_NAME = "engine.json"
LOGITS_NAME = "mask_optimizer.pt"
# The engine of a checkpoint without such a file.
WHOLE = "one process or DDP"
# How the names of files begin that only these engines write.
_WRITTEN = {"DeepSpeed": "global_step", "FSDP": "pytorch_model_fsdp"}
# Those that read each other's checkpoints.
_FAMILY = {"DeepSpeed ZeRO-1": "DeepSpeed ZeRO-2"}
_FULL_STATE = "pytorch_model_fsdp.bin"
_STATE_FIELDS = ("state_dict_type", "state_dict_config", "optim_state_dict_config")


def engine_of(training: TrainingArguments) -> str:
    """
    Name of the engine of a run: `"DeepSpeed ZeRO-2"`, `"FSDP2"`, or [`WHOLE`] where every process has all weights.

    Args:
        training ([`~transformers.TrainingArguments`]): The arguments of the run.
    """
    kind = training.distributed_state.distributed_type if training.distributed_state else DistributedType.NO
    if kind == DistributedType.DEEPSPEED and training.deepspeed_plugin is not None:
        return f"DeepSpeed ZeRO-{training.deepspeed_plugin.zero_stage}"
    if _asks_for_fsdp(training) and kind not in (DistributedType.NO, DistributedType.MULTI_CPU):
        version = (training.fsdp_plugin_args or {}).get("fsdp_version") or os.environ.get("FSDP_VERSION", "2")
        return f"FSDP{version}"
    return WHOLE


def _is_on(name):
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def _asks_for_fsdp(training):
    return training.fsdp_plugin_args is not None or _is_on("ACCELERATE_USE_FSDP")


def warn_of_ignored_engine(training: TrainingArguments) -> None:
    """Warn where accelerate does not start what was asked for: DeepSpeed or FSDP on the CPU, processes on the CPU."""
    if engine_of(training) == WHOLE:
        asked = {
            "deepspeed": training.deepspeed or _is_on("ACCELERATE_USE_DEEPSPEED"),
            "fsdp": _asks_for_fsdp(training),
        }
        runs = "DDP" if training.world_size > 1 else "one process"
        for name in (name for name, value in asked.items() if value):
            logger.warning_once(
                f"{name} is ignored here, {runs} runs instead: accelerate supports it only on accelerators such as "
                "GPUs, and only in processes of a launcher (torchrun, accelerate launch, deepspeed)"
            )
    if _is_on("ACCELERATE_USE_CPU") and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        logger.warning_once(
            "accelerate launch --cpu has started one process and ignored --num_processes: start several with "
            "torchrun --nproc_per_node, or with accelerate launch --multi_gpu --num_processes, and set use_cpu"
        )


def engine_of_checkpoint(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """
    What wrote a checkpoint: `"engine"`, a name that [`engine_of`] returns, and `"processes"`, their number, or `None`
    if it is not recorded.

    Args:
        checkpoint (`str` or `os.PathLike`): Folder written by a Trainer.
    """
    folder = Path(checkpoint)
    if (folder / ENGINE_NAME).is_file():
        return json.loads((folder / ENGINE_NAME).read_text(encoding="utf-8"))
    found = [name for name, begin in _WRITTEN.items() if any(folder.glob(f"{begin}*"))]
    return {"engine": found[0] if found else WHOLE, "processes": None}


def check_engine(checkpoint: str | os.PathLike, training: TrainingArguments) -> None:
    """
    Check that a run can resume from a checkpoint under its engine. One process and DDP read each other's, FSDP reads
    full and sharded ones with any number of processes, DeepSpeed those of its own stage and number of processes.

    Args:
        checkpoint (`str` or `os.PathLike`): Folder written by a Trainer.
        training ([`~transformers.TrainingArguments`]): The arguments of the run.

    Raises:
        ValueError: If it cannot. The message names both engines.
    """
    if not Path(checkpoint).is_dir():
        return
    stored, here = engine_of_checkpoint(checkpoint), engine_of(training)
    then, processes = stored["engine"], stored["processes"]
    way = "resume under the engine of the checkpoint, or start a new run from its weights (base_model)"
    if _FAMILY.get(then, then) != _FAMILY.get(here, here) and not (processes is None and here.startswith(then)):
        raise ValueError(f"{checkpoint} was written under {then} and cannot be resumed under {here}: {way}")
    if here.startswith("DeepSpeed") and processes not in (None, training.world_size):
        raise ValueError(
            f"{checkpoint} was written under {then} by {processes} processes, and cannot be resumed under {here} by "
            f"{training.world_size}: start as many, or start a new run from its weights (base_model)"
        )


def record_engine(checkpoint: str | os.PathLike, training: TrainingArguments) -> None:
    """Write into a checkpoint which engine it is of. That of [`WHOLE`] needs no such file."""
    if (engine := engine_of(training)) != WHOLE:
        content = {"engine": engine, "processes": training.world_size}
        replace_files({Path(checkpoint) / ENGINE_NAME: json.dumps(content).encode()})


@contextmanager
def stored_state_type(plugin: Any, checkpoint: str | os.PathLike) -> Iterator[None]:
    """
    Context manager in which FSDP reads the kind of state, full or sharded, that a checkpoint has.

    Args:
        plugin (`FullyShardedDataParallelPlugin`, *optional*): That of accelerate; `None` changes nothing.
        checkpoint (`str` or `os.PathLike`): Folder written by a Trainer under FSDP.
    """
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
    """
    Check that DeepSpeed saves models with their weights.

    Args:
        config (`HfDeepSpeedConfig`): The configuration of DeepSpeed.

    Raises:
        ValueError: If ZeRO-3 would save a model without its weights.
    """
    name = "stage3_gather_16bit_weights_on_model_save"
    if config.is_zero3() and not config.is_true(f"zero_optimization.{name}"):
        raise ValueError(f"deepspeed: zero_optimization.{name} must be true, or no model could be saved under ZeRO-3")


def wrap_layers(plugin: Any, model: Any) -> None:
    """
    Have FSDP shard each layer, unless the user has named other classes. By default accelerate would shard the block of
    the embeddings as well, and then the word embeddings in it, which are shared with the decoder, a second time.

    Args:
        plugin (`FullyShardedDataParallelPlugin`): That of accelerate.
        model (`PreTrainedModel`): The model, not sharded yet.
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

    Args:
        sparse_attention ([`SparseAttention`]): The mask.
        device (`torch.device`): Device of the training.
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

    Args:
        sparse_attention ([`SparseAttention`]): The mask, in search, with logits from [`keep_outside`].
        optimizer_class (`type`), kwargs (`dict`): How the optimizer is made, without weight decay.
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
        """
        Average the gradient over the processes. Call it before the update, once.

        Args:
            scale (`float`, *optional*, defaults to 1.0): The factor of the loss under fp16.

        Returns:
            `list[torch.Tensor]`: The gradient, or nothing if there is none.
        """
        if self.logits is None or self.logits.grad is None:
            return []
        gradient = self.logits.grad
        if distributed.is_initialized():
            gradient.div_(distributed.get_world_size())
            distributed.all_reduce(gradient)
        if scale != 1:
            gradient.div_(scale)
        return [gradient]

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
        """
        Read what [`~ReplicatedLogits.save`] wrote.

        Raises:
            ValueError: If it is not there.
        """
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
