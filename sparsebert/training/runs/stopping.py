"""Stopping on a signal: SIGTERM, SIGINT and SIGHUP save a checkpoint and end the run as unfinished."""

import signal
import threading
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ...signals import ending_signals, next_one_ends


logger = logging.get_logger(__name__)

# Of the training arguments: whatever the recipe says of signals, they save a checkpoint.
STOPPING_FIELDS = {"enable_jit_checkpoint": False}
# Processes of a distributed run agree at every so many steps, since asking each other costs time.
AGREEMENT_STEPS = 10


class TrainingStopped(KeyboardInterrupt):
    """The training ended on a signal, with a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        self.reason = f"stopped by {signal.Signals(number).name}"
        super().__init__(f"{self.reason} at step {step}, with a checkpoint: add --resume to continue")
        self.exit_code = 128 + number


class StopOnSignal(TrainerCallback):
    """
    A callback that is also the context manager of a training: on SIGTERM, SIGINT or SIGHUP, the step is finished, a
    checkpoint saved and [`TrainingStopped`] raised. A second signal ends the process at once. A SIGHUP that is ignored
    stays so. Without effect outside the main thread.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._trainer, self._only_model = trainer, trainer.args.save_only_model
        trainer.add_callback(self)

    def _receive(self, number, frame):
        self._received = number
        next_one_ends(self._previous, number)
        logger.warning(f"{signal.Signals(number).name}: saving a checkpoint; a second signal ends the run at once.")

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            handled = (signal.SIGINT, *ending_signals())
            self._previous = {number: signal.getsignal(number) for number in handled}
            for number in handled:
                signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._trainer.args.save_only_model = self._only_model
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._received and kind is None:
            signal.raise_signal(self._received)  # it came after the last step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1 and torch.distributed.is_initialized():
            if state.global_step % AGREEMENT_STEPS:
                return
            received = torch.tensor(self._received, device=args.device)
            torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX)
            self._received = int(received)
        if self._received:
            control.should_save = control.should_training_stop = True
            args.save_only_model = False  # the run continues from this checkpoint
            # An evaluation may take longer than the time that is left, unless it decides which checkpoint is best. If
            # only the best are saved, it would decide against this one.
            decides = args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST
            control.should_evaluate = control.should_evaluate and decides

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._received and control.should_training_stop:
            raise TrainingStopped(self._received, state.global_step)
