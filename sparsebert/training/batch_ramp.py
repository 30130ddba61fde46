"""A batch that grows during the training: several updates in an early step, one in each later one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainerState


if TYPE_CHECKING:
    from .trainer import SparseBertTrainer


class BatchRamp(TrainerCallback):
    """
    Lets the batch grow with the training. A step of the Trainer always takes `gradient_accumulation_steps` batches, so
    that schedules, checkpoints and the place in the data are as without a ramp; in the ramp the weights are updated
    several times in a step, each time from a divisor of that number that is at least the share of the ramp that is
    done.
    """

    # `end`: the fraction of the training at which the batch is whole; `position`: see [`SearchSchedule`].
    def __init__(
        self,
        trainer: "SparseBertTrainer",
        end: float,
        position: Callable[[TrainerState], tuple[float, int]] | None = None,
    ) -> None:
        self._trainer, self._end, self._position = trainer, end, position
        self._due = self._waiting = 0
        trainer.add_callback(self)

    def due(self, state: TrainerState, batches: int) -> int:
        """Number of batches per update in a step of so many batches."""
        step, last = (state.global_step, state.max_steps) if self._position is None else self._position(state)
        wanted = min(step / (self._end * last), 1.0) * self._trainer.args.gradient_accumulation_steps
        return next(count for count in range(1, batches + 1) if batches % count == 0 and count >= min(wanted, batches))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        accelerator = self._trainer.accelerator
        averaged = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if accelerator.distributed_type == DistributedType.DEEPSPEED or (args.world_size > 1 and not averaged):
            raise ValueError(
                f"batch_ramp {self._end} needs one process, or accelerator_config with gradient_accumulation_kwargs "
                "sync_each_batch true (and no DeepSpeed)"
            )
        if self._trainer.updates_logits_apart:
            raise ValueError(f"batch_ramp {self._end} has no meaning while a search runs under FSDP: leave it out")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer divides the loss of each batch by this number, which is smaller at the end of an epoch.
        batches = self._trainer.current_gradient_accumulation_steps
        self._due, self._waiting = self.due(state, batches), 0
        self._trainer.updates_in_step = batches // self._due
        self._trainer.current_gradient_accumulation_steps = self._due

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._waiting += 1
        if self._waiting == self._due:
            self._waiting = 0
            self._trainer.update_within_step()
