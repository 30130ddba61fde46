"""A batch that grows: the updates are those of smaller batches, and the steps those of the Trainer."""

import copy

import pytest
import torch
from transformers import TrainerState, TrainingArguments

from sparsebert import SparseBertForMaskedLM, SparseBertTrainer
from sparsebert.training.batch_ramp import BatchRamp


ROWS = [{"input_ids": [(7 * i + j) % 90 + 5 for j in range(12)]} for i in range(64)]
ROWS = [row | {"labels": row["input_ids"]} for row in ROWS]


def trainer_of(model, folder, accumulated, steps, **fields):
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        gradient_accumulation_steps=accumulated, lr_scheduler_type="constant", logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="no", **fields,
    )  # fmt: skip
    return SparseBertTrainer(model, arguments, train_dataset=ROWS)


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_the_first_updates_are_those_of_single_batches(tiny_config, tmp_path):
    model = SparseBertForMaskedLM(tiny_config(pattern="window"))
    other = copy.deepcopy(model)
    ramped = trainer_of(model, tmp_path, accumulated=4, steps=1)
    BatchRamp(ramped, 1.0)
    ramped.train()
    single = trainer_of(other, tmp_path, accumulated=1, steps=4)
    single.train()
    for name, weight in weights_of(other).items():
        torch.testing.assert_close(weights_of(model)[name], weight, msg=name)
    losses = [entry["loss"] for entry in single.state.log_history if "loss" in entry]
    assert ramped.state.log_history[0]["loss"] == pytest.approx(sum(losses) / 4, rel=1e-3)
    assert ramped.state.global_step == 1


def test_after_the_ramp_the_batch_is_whole(tiny_config, tmp_path):
    model = SparseBertForMaskedLM(tiny_config(pattern="window"))
    trainer, updates = trainer_of(model, tmp_path, accumulated=6, steps=8, max_grad_norm=0.0), []
    BatchRamp(trainer, 0.5)
    before = trainer.create_optimizer()
    before.register_step_post_hook(lambda *_: updates.append(trainer.state.global_step))
    trainer.train()
    # Due are 0, 1.5, 3, 4.5 and 6 of 6 batches; the last step of an epoch has 2 batches.
    counts = [updates.count(step) for step in range(8)]
    assert counts == [6, 3, 2, 1, 1, 1, 1, 1]


def test_due_divides_what_there_is(tiny_config, tmp_path):
    trainer = trainer_of(SparseBertForMaskedLM(tiny_config(pattern="window")), tmp_path, accumulated=8, steps=100)
    ramp = BatchRamp(trainer, 0.4, lambda state: (state.global_step, 100))
    due = [ramp.due(TrainerState(global_step=step), 8) for step in (0, 5, 6, 11, 21, 40, 99)]
    assert due == [1, 1, 2, 4, 8, 8, 8]
    assert ramp.due(TrainerState(global_step=11), 3) == 3  # at the end of an epoch


@pytest.mark.parametrize("flags, said", [("--batch_ramp 0.5", "2 and more, got 1"), ("--batch_ramp 1.5", "got 1.5")])
def test_a_ramp_without_accumulation_is_refused(refused, pretraining_flags, tmp_path, flags, said):
    line = refused(pretraining_flags(tmp_path / "run", *flags.split()))
    assert "batch_ramp" in line and said in line
