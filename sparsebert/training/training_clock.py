"""How long a run has trained, over all times that it was resumed."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class TrainingClock(TrainerCallback, ExportableState):
    """
    Counts the seconds in `train`, with evaluations and checkpoints. Checkpoints hold the count, and a run that is
    resumed continues it.

    Attributes:
        elapsed (`float`): Seconds of training as of the last step.
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.elapsed = 0.0
        if state.global_step:  # resumed
            stored: Any = state.stateful_callbacks
            self.elapsed = stored.get(type(self).__name__, self.state())["attributes"]["elapsed"]
        self._began = time.perf_counter()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._read_clock()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._read_clock()
