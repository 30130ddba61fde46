"""
The life of a training, the same for all kinds of runs: arguments, lock, folder, checkpoint to resume from, recipe
record, signals and results.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainingArguments, set_seed

from ...files import METRICS_NAME, locked_output, write_metrics
from .engines import check_engine, warn_of_ignored_engine
from .resuming import RecipeRecord, check_recipe, recipe_record
from .run_cards import hardware
from .run_folders import check_unfinished, resume_from, run_folder
from .stopping import STOPPING_FIELDS, StopOnSignal


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass
class TrainingRun:
    """A training that has its folder, from [`training_run`]. `training` says where it writes and resumes."""

    training: Any
    began: float = field(default_factory=time.perf_counter)
    record: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the run writes: the output folder, or one aside in it."""
        return Path(str(self.training.output_dir))

    @property
    def checkpoint(self) -> str | None:
        """What the run resumes from."""
        return self.training.resume_from_checkpoint

    def define(self, data: Any, config: "PreTrainedConfig", **inputs: Any) -> None:
        """Record what defines the run, as far as it is known, and compare it with that of the checkpoint."""
        self.record = recipe_record(data, config, self.training)
        self.record["inputs"] |= inputs
        if self.checkpoint:
            check_recipe(self.checkpoint, self.record)

    def train(self, trainer: Trainer) -> Any:
        """Train, or go on from the checkpoint. A signal saves a checkpoint and ends the run."""
        trainer.add_callback(RecipeRecord(self.record))
        with StopOnSignal(trainer):
            return trainer.train(resume_from_checkpoint=self.checkpoint)

    def finish(
        self, trainer: Any, metrics: dict[str, Any], complete: Callable[[dict[str, Any]], None] = lambda metrics: None
    ) -> dict[str, Any]:
        """Add what the run cost, let the main process `complete` the folder, write the metrics last and push them."""
        seconds = {"train_seconds": trainer.train_seconds, "seconds": time.perf_counter() - self.began}
        metrics |= seconds | {"hardware": hardware()}
        if trainer.is_world_process_zero():
            complete(metrics)
        metrics = write_metrics(self.folder / METRICS_NAME, metrics)
        trainer.push_results()
        return metrics


@contextmanager
def training_run(
    fields: dict[str, Any],
    options: Any,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    *,
    one_of_several: bool = False,
) -> Iterator[TrainingRun]:
    """
    Context manager for a training, from its folder to its results.

    Args:
        fields (`dict`): Section `training` of the recipe, checked.
        options (dataclass): Section `data`, with `resume`, `allow_partial_resume` and `overwrite`.
        arguments_class (`type`, *optional*): Class of `training`.
        one_of_several (`bool`, *optional*, defaults to `False`): Whether a command that has the lock has checked what
            is in the folder. A run without a checkpoint to resume from then replaces it.
    """
    output = Path(fields["output_dir"])
    resume, overwrite = resume_from(options.resume, fields.get("resume_from_checkpoint")), options.overwrite
    if one_of_several:
        if not (resume or overwrite):
            check_unfinished(output)
        overwrite = overwrite or not resume or (output / METRICS_NAME).is_file()
    with ExitStack() as stack:
        unfinished = one_of_several or stack.enter_context(locked_output(output))
        place = run_folder(output, overwrite, resume, options.allow_partial_resume, unfinished)
        folder, checkpoint = stack.enter_context(place)
        changed: dict[str, Any] = {"output_dir": str(folder), "resume_from_checkpoint": checkpoint}
        run = TrainingRun(arguments_class(**fields | changed | STOPPING_FIELDS))
        warn_of_ignored_engine(run.training)
        if checkpoint:
            check_engine(checkpoint, run.training)
        set_seed(run.training.seed)
        yield run
