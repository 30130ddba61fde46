"""Training for a given time instead of a given number of steps."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..checks import check_choice, check_range
from .training_clock import TrainingClock


# Schedules of the learning rate that depend on nothing but how much of the training is done.
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant", "constant_with_warmup",
)  # fmt: skip
# The whole budget, in steps of the schedules.
POSITIONS = 1_000_000
# More steps than any clock allows.
ENDLESS = 10**9


class TimeBudget(TrainingClock):
    """
    Ends a training after a number of minutes: the step is finished, and a checkpoint saved if the run saves any. A run
    that is resumed has the minutes that were left. Processes follow the clock of the first.

    Args:
        minutes (`float`): The budget, more than 0.

    Raises:
        ValueError: If `minutes` is out of its range.
    """

    def __init__(self, minutes: float) -> None:
        check_range("max_minutes", minutes, 0, None, (int, float))
        if not 0 < minutes < float("inf"):
            raise ValueError(f"max_minutes must be more than 0 and finite, got {minutes!r}")
        super().__init__()
        self.minutes = minutes

    def state(self) -> dict[str, Any]:
        return super().state() | {"args": {"minutes": self.minutes}}

    def position(self, state: TrainerState) -> tuple[float, int]:
        """How far a training is on the scale of its schedules, and the end of that scale: `POSITIONS`."""
        return self._position(state.global_step, state.max_steps), POSITIONS

    def _position(self, step, max_steps):
        done = max(self.elapsed / (60 * self.minutes), step / max(max_steps, 1))
        return min(done, 1.0) * POSITIONS

    def pace(self, scheduler: LRScheduler, state: TrainerState) -> None:
        """
        Let a schedule of `POSITIONS` steps follow the clock.

        Raises:
            ValueError: If it has steps of its own, see `SCHEDULES`.
        """
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(f"{type(scheduler).__name__} cannot follow the clock: use {', '.join(SCHEDULES)}")

        def paced(schedule):
            return lambda step: schedule(self._position(step, state.max_steps))

        scheduler.lr_lambdas = [paced(schedule) for schedule in scheduler.lr_lambdas]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._stop(state, control)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_optimizer_step(args, state, control, **kwargs)  # before the schedule of the learning rate goes on
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            seconds = torch.tensor(self.elapsed, device=args.device)
            torch.distributed.broadcast(seconds, 0)
            self.elapsed = seconds.item()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._stop(state, control) and args.save_strategy == SaveStrategy.STEPS:
            control.should_save = True  # as at `max_steps`

    def _stop(self, state, control):
        ended = self.elapsed >= 60 * self.minutes
        control.should_training_stop = control.should_training_stop or ended
        return ended


def check_time_budget(minutes: float | None, pruning: Any, training: dict[str, Any]) -> None:
    """
    Check what a recipe with `max_minutes` may say.

    Args:
        minutes (`float`, *optional*): `max_minutes`; `None` for a training by steps.
        pruning (`dict`, *optional*): `pruning` of the recipe.
        training (`dict`): Section `training`.

    Raises:
        ValueError: If a field counts steps, whose number is not known.
    """
    if minutes is None:
        return
    TimeBudget(minutes)
    if pruning is not None:
        raise ValueError(f"pruning has no meaning with max_minutes {minutes}: its schedule needs the number of steps")
    if training.get("restore_callback_states_from_checkpoint"):
        raise ValueError(
            "restore_callback_states_from_checkpoint must be false with max_minutes, which restores its own state"
        )
    check_choice("lr_scheduler_type with max_minutes", training.get("lr_scheduler_type", "linear"), SCHEDULES)
    warmup = training.get("warmup_steps", 0)
    if warmup >= 1:
        raise ValueError(f"warmup_steps must be a fraction of max_minutes, in [0, 1), got {warmup!r}")
    if not counts_steps(training):
        for name in ("logging_steps", "save_steps", "eval_steps"):
            if 0 < (training.get(name) or 1) < 1:
                raise ValueError(f"{name} must be a number of steps with max_minutes, got {training[name]!r}")


def counts_steps(training: dict[str, Any]) -> bool:
    """Whether the section `training` of a recipe says after how many steps or epochs it ends."""
    return training.get("max_steps", -1) > 0 or training.get("num_train_epochs") is not None
