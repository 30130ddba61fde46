"""The head on predicted tokens alone: the loss and the gradients of the full head, whatever trains the model."""

import copy
import subprocess
import sys

import pytest
import torch
from transformers import Trainer, TrainingArguments

from sparsebert import SparseBertForMaskedLM, SparseBertForPreTraining, SparseBertTrainer
from sparsebert.training.pretraining.evaluation_metrics import pretraining_metrics, reduce_logits


LENGTH, ROWS = 12, 4
CLASSES = [SparseBertForMaskedLM, SparseBertForPreTraining]


def inputs_of(model_class, share=0.2, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 100, (rows, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) >= share, -100)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    pairs = {"next_sentence_label": torch.arange(rows) % 2}
    return inputs | (pairs if model_class is SparseBertForPreTraining else {})


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def tokens_seen(model):
    """Number of tokens in each call of the head from here on."""
    seen = []
    model.cls.predictions.register_forward_pre_hook(lambda module, given: seen.append(given[0][..., 0].numel()))
    return seen


@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_loss_and_gradients_are_those_of_the_full_head(model_class, checkpointing, tiny_config, assert_same_gradients):
    model = model_class(tiny_config(search="soft", noise_scale=0.0, sparsity_weight=1e-3)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs, seen = inputs_of(model_class), tokens_seen(model)
    full, alone = model(**inputs), model(**inputs, skip_logits=True)
    assert seen == [ROWS * LENGTH, (inputs["labels"] != -100).sum()]
    torch.testing.assert_close(alone.loss, full.loss)
    assert_same_gradients(gradients_of(model, alone.loss), gradients_of(model, full.loss))
    if model_class is SparseBertForPreTraining:
        torch.testing.assert_close(alone.seq_relationship_logits, full.seq_relationship_logits)
    assert alone.to_tuple()[0] is alone.loss and full.to_tuple()[1].shape == (ROWS, LENGTH, model.config.vocab_size)
    assert not any(torch.is_tensor(value) and value.dim() == 3 for value in alone.to_tuple())
    by_position = [inputs.pop(name) for name in ("input_ids", "attention_mask")]
    *_, states = model(*by_position, **inputs, skip_logits=True, output_hidden_states=True, return_dict=False)
    assert len(states) == 3


@pytest.mark.parametrize("model_class", CLASSES)
def test_a_batch_without_a_token_to_predict_gives_every_weight_a_gradient(model_class, tiny_config):
    model = model_class(tiny_config())
    inputs = inputs_of(model_class, share=0.0)
    gradients = gradients_of(model, model(**inputs, skip_logits=True).loss)  # fails for a weight without one
    assert all(gradient.isfinite().all() for gradient in gradients.values())


# The second of two processes has nothing to predict.
CHILD = """
import os, sys
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from sparsebert import SparseBertConfig, SparseBertForMaskedLM

child, folder = os.fork(), sys.argv[1]
rank = int(child == 0)
distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
model = SparseBertForMaskedLM.from_pretrained(folder)
parallel = DistributedDataParallel(model)
inputs = torch.load(f"{folder}/inputs.pt")
if rank:
    inputs["labels"].fill_(-100)
for step in range(2):  # a weight that took no part in the first is an error in the second
    model.zero_grad()
    parallel(**inputs, skip_logits=True).loss.backward()
torch.save({name: weight.grad for name, weight in model.named_parameters()}, f"{folder}/{rank}.pt")
if rank == 0:
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.slow
def test_processes_may_have_nothing_to_predict(tiny_config, tmp_path, assert_same_gradients):
    model, inputs = SparseBertForMaskedLM(tiny_config(pattern="window")), inputs_of(SparseBertForMaskedLM)
    model.save_pretrained(tmp_path)
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    want = gradients_of(model.train(), model(**inputs).loss / 2)
    for rank in range(2):
        assert_same_gradients(torch.load(tmp_path / f"{rank}.pt"), want)


def test_missing_labels_are_named(tiny_config):
    model, inputs = SparseBertForPreTraining(tiny_config()), inputs_of(SparseBertForPreTraining)
    for name in ("labels", "next_sentence_label"):
        with pytest.raises(ValueError, match=f"skip_logits needs {name}"):
            model(**{key: value for key, value in inputs.items() if key != name}, skip_logits=True)


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(tiny_config, assert_same_gradients):
    model = SparseBertForMaskedLM(tiny_config(pattern="window", num_hidden_layers=1))
    compiled = torch.compile(model, backend="eager")
    for share in (0.2, 0.4, 0.0):  # the head is compiled for numbers of tokens that it has not seen
        inputs = inputs_of(SparseBertForMaskedLM, share)
        want, got = model(**inputs, skip_logits=True).loss, compiled(**inputs, skip_logits=True).loss
        torch.testing.assert_close(got, want)
        assert_same_gradients(gradients_of(model, got), gradients_of(model, want))


def trained(trainer_class, model, tmp_path, **fields):
    """The Trainer after three steps of two accumulated batches, and the metrics of its evaluation."""
    inputs = inputs_of(type(model), rows=3 * 2 * ROWS)
    rows = [{name: values[row] for name, values in inputs.items()} for row in range(len(inputs["input_ids"]))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=ROWS, gradient_accumulation_steps=2,
        label_names=[name for name in inputs if "label" in name], use_cpu=True, save_strategy="no", **fields,
    )  # fmt: skip
    metrics = {"compute_metrics": pretraining_metrics, "preprocess_logits_for_metrics": reduce_logits}
    trainer = trainer_class(model, arguments, train_dataset=rows, eval_dataset=rows[:5], **metrics)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return trainer, trainer.evaluate()


def test_the_trainer_uses_it_in_training_alone(tiny_config, tmp_path):
    model = SparseBertForPreTraining(tiny_config(pattern="window"))
    stock, seen = copy.deepcopy(model), tokens_seen(model)
    _, got = trained(SparseBertTrainer, model, tmp_path)
    _, want = trained(Trainer, stock, tmp_path)
    assert max(seen[:6]) < ROWS * LENGTH / 2 and seen[6:] == [5 * LENGTH]
    assert got["eval_mlm_loss"] == pytest.approx(want["eval_mlm_loss"], rel=1e-5)
    for name, weight in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-4, atol=1e-6)


def test_outputs_that_are_wanted_have_their_logits(tiny_config, tmp_path):
    model = SparseBertForMaskedLM(tiny_config(pattern="window"))
    seen = tokens_seen(model)
    trainer, _ = trained(SparseBertTrainer, model, tmp_path, label_smoothing_factor=0.1)
    assert set(seen[:6]) == {ROWS * LENGTH}
    loss, outputs = trainer.compute_loss(model.train(), inputs_of(type(model)), return_outputs=True)
    assert outputs.logits.shape == (ROWS, LENGTH, model.config.vocab_size)
