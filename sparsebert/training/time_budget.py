"""How long a run trains: the clock of every run, and training for a given time instead of a number of steps."""

import time
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy


# Schedules of the learning rate that depend on nothing but how much of the training is done.
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant", "constant_with_warmup",
)  # fmt: skip
# The whole budget, in steps of the schedules.
POSITIONS = 1_000_000
# More steps than any clock allows.
ENDLESS = 10**9


class TrainingClock(TrainerCallback, ExportableState):
    """
    Counts the seconds in `train`, with evaluations and checkpoints. Checkpoints hold the count, and a run that is
    resumed continues it.
    """

    def __init__(self) -> None:
        self.elapsed = 0.0
        self._began: float | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"elapsed": self.elapsed}}

    def _read_clock(self):
        now = time.perf_counter()
        assert self._began is not None
        self.elapsed, self._began = self.elapsed + now - self._began, now

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.elapsed = 0.0
        if state.global_step:  # resumed
            stored: Any = state.stateful_callbacks
            self.elapsed = stored.get(type(self).__name__, self.state())["attributes"]["elapsed"]
        self._began = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read_clock()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read_clock()


class TimeBudget(TrainingClock):
    """
    Ends a training after a number of minutes: the step is finished, and a checkpoint saved if the run saves any. A run
    that is resumed has the minutes that were left. Processes follow the clock of the first.
    """

    def __init__(self, minutes: float) -> None:
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
        """Let a schedule of `POSITIONS` steps follow the clock."""
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(f"{type(scheduler).__name__} cannot follow the clock: use {', '.join(SCHEDULES)}")

        def paced(schedule):
            return lambda step: schedule(self._position(step, state.max_steps))

        scheduler.lr_lambdas = [paced(schedule) for schedule in scheduler.lr_lambdas]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._stop(state, control)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_optimizer_step(args, state, control, **kwargs)  # before the schedule of the learning rate goes on
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            seconds = torch.tensor(self.elapsed, device=args.device)
            torch.distributed.broadcast(seconds, 0)
            self.elapsed = seconds.item()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stop(state, control) and args.save_strategy == SaveStrategy.STEPS:
            control.should_save = True  # as at `max_steps`

    def _stop(self, state, control):
        ended = self.elapsed >= 60 * self.minutes
        control.should_training_stop = control.should_training_stop or ended
        return ended


def counts_steps(training: dict[str, Any]) -> bool:
    """Whether the section `training` of a recipe says after how many steps or epochs it ends."""
    return training.get("max_steps", -1) > 0 or training.get("num_train_epochs") is not None
