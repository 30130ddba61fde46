"""The Trainer of a post-hoc search and of its recovery, with the checkpoints, signals and checks of all runs."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from ...learning.rank_agreement import average_over_processes
from ...learning.search_schedule import SearchSchedule
from ...masks.sparse_mask import SparseMask
from ...models.sparse_attention import get_sparse_attention
from ..runs.run_life import TrainingRun
from ..trainer import SparseBertTrainer
from .objectives import Batch, Objective, inputs_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def matching_arguments(device: str, output_dir: Any, **fields: Any) -> dict[str, Any]:
    """The arguments of a Trainer that matches, on one device."""
    quiet = {"report_to": "none", "logging_strategy": "no", "disable_tqdm": not sys.stderr.isatty()}
    return {"output_dir": str(output_dir), "use_cpu": device == "cpu", "save_total_limit": 1} | quiet | fields


@contextmanager
def without_checkpoints(model: "PreTrainedModel") -> Iterator[TrainingRun]:
    """Context manager for a training whose caller keeps no folder."""
    with tempfile.TemporaryDirectory() as folder:
        fields = {"save_strategy": "no", "seed": torch.initial_seed() % 2**32}
        yield TrainingRun(TrainingArguments(**matching_arguments(model.device.type, folder, **fields)))


class _InOrder(IterableDataset):
    """The batches, of each the part of one of several processes; the whole if it cannot be cut into equal parts."""

    def __init__(self, batches: Iterable[Batch], process: int, processes: int) -> None:
        self._batches, self._process, self._processes = batches, process, processes

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for inputs in map(inputs_of, self._batches):
            whole = len(inputs["input_ids"]) % self._processes
            yield {
                name: values if whole else values.chunk(self._processes)[self._process]
                for name, values in inputs.items()
            }


def say_tenth(name: str, step: int, steps: int, began: float, first: int = 0) -> None:
    """Say how far a training is that began at the time `began` with step `first`, if a tenth of its steps is done."""
    if 10 * step // steps > 10 * (step - 1) // steps:
        seconds = time.perf_counter() - began
        left = seconds * (steps - step) / (step - first)
        said = f"{name}: step {step} of {steps}, {seconds:.0f} s, about {left:.0f} s left"
        print(said, file=sys.stderr, flush=True)


class _Tenths(TrainerCallback):
    """A line after each tenth of the steps, where no progress bar is drawn since nobody looks at a terminal."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first, self.began = state.global_step, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.disable_tqdm and state.is_world_process_zero:
            say_tenth(self.name, state.global_step, state.max_steps, self.began, self.first)


class MatchingTrainer(SparseBertTrainer):
    """
    Trains a model, without dropout, to compute what another one computes on given batches. Several processes share
    each batch, and have the same gradients as one that has all of it.

    Args:
        model (`PreTrainedModel`): The model, with a mask or a search.
        run ([`TrainingRun`]): Its arguments, `max_steps` among them.
        batches (`Iterable`): A batch per step, always the same ones.
        objective ([`Objective`]): What is compared.
        targets (`Callable`): `(batch) -> tensors`: what the other model computes.
        optimizers (`tuple`): Optimizer and schedule.
        masks (`Mapping`, *optional*): Masks to change to, by the step that they begin with.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        training: TrainingArguments,
        batches: Iterable[Batch],
        objective: Objective,
        targets: Callable[[Batch], Sequence[torch.Tensor]],
        optimizers: tuple[Any, Any],
        masks: Mapping[int, SparseMask] | None = None,
    ) -> None:
        if training.n_gpu > 1:
            training._n_gpu = 1  # otherwise it would split each batch
        # The progress is that at the end of a step.
        schedule = SearchSchedule(position=lambda state: (state.global_step + 1, state.max_steps))
        tenths = _Tenths("search" if get_sparse_attention(model).searching else "recovery")
        super().__init__(model, training, optimizers=optimizers, callbacks=[schedule, tenths])
        self.remove_callback(PrinterCallback)
        # Not in DDP, which sees only what passes through the forward of the whole model: see `training_step`.
        accelerator: Any = self.accelerator
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                broadcast(parameter.data)
        self._batches, self._objective, self._targets, self._masks = batches, objective, targets, masks or {}

    def get_train_dataloader(self) -> Any:
        batches = _InOrder(self._batches, self.args.process_index, self.args.world_size)
        return DataLoader(batches, batch_size=None)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss, trained = super().training_step(*args, **kwargs), self._inner_model()
        for parameter in trained.parameters():
            if parameter.grad is not None:
                average_over_processes(parameter.grad)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        sparse_attention = get_sparse_attention(model.eval())
        if self.state.global_step in self._masks:
            self._use(self._masks[self.state.global_step])
        with torch.no_grad():
            targets = self._targets(inputs)
        sparse_attention.train(sparse_attention.searching)  # draws the mask that is learned
        return self._objective.loss(self._objective.record(model, inputs), targets)

    def _restore_mask(self, resume_from_checkpoint):
        if self._masks:
            self._use(SparseMask.from_pretrained(resume_from_checkpoint))
        super()._restore_mask(resume_from_checkpoint)

    def _use(self, mask):
        sparse_attention = get_sparse_attention(self.model)
        sparse_attention.set_mask(mask, search=sparse_attention.config.search)
