"""Engines that shard a model over processes, DeepSpeed and FSDP: which one a run or a checkpoint has."""

import json
import os
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from transformers import TrainingArguments
from transformers.utils import logging

from ...files import replace_files


logger = logging.get_logger(__name__)

# In a checkpoint of an engine that shards.
ENGINE_NAME = "engine.json"
# The engine of a checkpoint without such a file.
WHOLE = "one process or DDP"
# How the names of files begin that only these engines write.
_WRITTEN = {"DeepSpeed": "global_step", "FSDP": "pytorch_model_fsdp"}
# Those that read each other's checkpoints.
_FAMILY = {"DeepSpeed ZeRO-1": "DeepSpeed ZeRO-2"}


def engine_of(training: TrainingArguments) -> str:
    """
    Name of the engine of a run: `"DeepSpeed ZeRO-2"`, `"FSDP2"`, or [`WHOLE`] where every process has all weights.
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
