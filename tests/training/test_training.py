"""Trainer, accelerate and a plain loop all train the mask; accumulation and resumption change nothing."""

import copy
import itertools
import json
import math
import re
import shutil
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import TINY, covering
from safetensors.torch import load_file
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseBertForPreTraining, sparsity, sparsity_loss
from sparsebert.commands import main
from sparsebert.learning.search_schedule import SearchSchedule
from sparsebert.training.pretraining.evaluation_metrics import pretraining_metrics, reduce_logits
from sparsebert.training.pretraining.pretraining_arguments import PretrainingArguments
from sparsebert.training.pretraining.pretraining_inputs import make_inputs
from sparsebert.training.runs.checkpoint_manifests import MANIFEST_NAME, check_whole
from sparsebert.training.runs.run_checks import warn_of_slow_bfloat16
from sparsebert.training.runs.stopping import StopOnSignal, TrainingStopped
from sparsebert.training.trainer import SparseBertTrainer


pytestmark = pytest.mark.usefixtures("without_matplotlib")


LENGTH = 12
SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
LOGITS, QUERY = "bert.sparse_attention.mask_logits", "bert.encoder.layer.1.attention.self.query.weight"


def rows(count, masked=3):
    """Examples with the same number of tokens to predict in each."""
    generator = torch.Generator().manual_seed(4)
    examples = []
    for _ in range(count):
        ids = torch.randint(5, 100, (LENGTH,), generator=generator)
        labels = torch.full((LENGTH,), -100)
        chosen = torch.randperm(LENGTH, generator=generator)[:masked]
        labels[chosen] = ids[chosen]
        ids[chosen] = 4
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def make_trainer(model, folder, dataset=None, trainer_class=SparseBertTrainer, callbacks=(), **arguments):
    defaults = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    defaults |= {"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
    options = TrainingArguments(str(folder), **defaults | {"lr_scheduler_type": "constant"} | arguments)
    dataset = rows(32) if dataset is None else dataset
    return trainer_class(model, options, train_dataset=dataset, eval_dataset=dataset, callbacks=list(callbacks))


def history(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Accumulation and resumption


@pytest.mark.parametrize("trainer_class", [SparseBertTrainer, Trainer], ids=lambda value: value.__name__)
def test_one_by_eight_equals_eight_by_one(tiny_config, tmp_path, trainer_class):
    """With SGD and no clipping the parameters show any factor in loss or gradient; the penalty is a large share."""
    results = []
    for batch, accumulation in ((8, 1), (1, 8), (2, 4)):
        torch.manual_seed(0)
        model = SparseBertForMaskedLM(tiny_config(search="soft", mask_length=LENGTH, sparsity_weight=0.01))
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        descent = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0}
        trainer = make_trainer(model, tmp_path, trainer_class=trainer_class, **sizes, **descent)
        start = weights(model)
        trainer.train()
        results.append((history(trainer, "loss"), weights(model)))
    losses, expected = results[0]
    assert len(losses) == 3 and losses[0] > 4.6 + 1.0  # ln(100) and the penalty
    assert all((expected[name] != start[name]).any() for name in start if "pooler" not in name)
    for other_losses, got in results[1:]:
        assert other_losses == pytest.approx(losses, rel=1e-4)
        for name, parameter in got.items():
            torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=1e-4, msg=name)


class At(TrainerCallback):
    """Does something at an event, told the state and the model."""

    def __init__(self, event, do):
        setattr(self, event, lambda args, state, control, model=None, **kwargs: do(state, model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a search with checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(SparseBertForMaskedLM(SparseBertConfig(**TINY)), folder, **SAVING).train()
    return folder


@pytest.mark.parametrize("damage", ["incomplete", "truncated", "stock", "stateless"])
def test_the_newest_complete_checkpoint_is_resumed_from(tiny_config, saved, tmp_path, damage, caplog):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    newest, begun = tmp_path / "checkpoint-6", []
    if damage == "truncated":
        with open(newest / "model.safetensors", "r+b") as file:
            file.truncate(20)
    else:
        for folder in (newest,) if damage == "incomplete" else tmp_path.glob("checkpoint-*"):
            (folder / MANIFEST_NAME).unlink()
        if damage == "stateless":
            (newest / "trainer_state.json").unlink()

    def resume(checkpoint):
        begin = At("on_train_begin", lambda state, _: begun.append(state.global_step))
        model = SparseBertForMaskedLM(tiny_config())
        make_trainer(model, tmp_path, callbacks=[begin], **SAVING).train(resume_from_checkpoint=checkpoint)

    if damage == "truncated":
        with pytest.raises(ValueError, match="model.safetensors is damaged: it has 20 bytes"):
            resume(str(newest))
    resume(True)
    # A stock Trainer writes no manifests.
    assert begun == [6 if damage == "stock" else 4]
    said = {"stock": "has no checkpoint_manifest.json", "stateless": "checkpoint-6 lacks trainer_state.json"}
    assert said.get(damage, "Skipped a newer checkpoint") in caplog.text


def terminate(state, _):
    if state.global_step >= 2:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "fields", [{"save_strategy": "best", "load_best_model_at_end": True}, {"save_only_model": True}]
)
def test_a_signal_saves_what_can_be_resumed(tiny_config, tmp_path, fields):
    arguments = {"max_steps": 5, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1, "save_steps": 9}
    if "load_best_model_at_end" in fields:
        arguments |= {"metric_for_best_model": "loss", "greater_is_better": True}  # worse with every step
    model = SparseBertForMaskedLM(tiny_config())
    trainer = make_trainer(model, tmp_path, callbacks=[At("on_step_begin", terminate)], **arguments | fields)
    with pytest.raises(TrainingStopped, match="with a checkpoint"), StopOnSignal(trainer):
        trainer.train()
    check_whole(tmp_path / "checkpoint-3")
    assert trainer.args.save_only_model == ("save_only_model" in fields)


def test_a_signal_after_the_last_step_is_not_lost(tiny_config, tmp_path):
    """There is no step to stop at: whoever had the signal before gets it."""
    end = At("on_train_end", terminate)
    trainer = make_trainer(SparseBertForMaskedLM(tiny_config()), tmp_path, callbacks=[end])
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with StopOnSignal(trainer):
            trainer.train()
        assert received == [signal.SIGTERM] and trainer.state.global_step == 3
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_closed_terminal_saves_a_checkpoint_unless_it_is_ignored(tiny_config, tmp_path):
    """The shell and the terminal both send the signal, and `nohup` has it ignored."""
    hang_up, before = (
        At("on_step_begin", lambda *_: signal.raise_signal(signal.SIGHUP)),
        signal.getsignal(signal.SIGHUP),
    )
    for handler, steps in ((signal.SIG_DFL, 1), (signal.SIG_IGN, 3)):
        signal.signal(signal.SIGHUP, handler)
        twice = make_trainer(SparseBertForMaskedLM(tiny_config()), tmp_path / str(steps), callbacks=[hang_up, hang_up])
        try:
            with pytest.raises(TrainingStopped) if steps == 1 else nullcontext() as stopped, StopOnSignal(twice):
                twice.train()
            assert signal.getsignal(signal.SIGHUP) == handler and twice.state.global_step == steps
        finally:
            signal.signal(signal.SIGHUP, before)
        if steps == 1:
            assert stopped.value.exit_code == 129
            check_whole(tmp_path / "1" / "checkpoint-1")


def test_the_limit_of_checkpoints_spares_the_best(tiny_config, tmp_path):
    arguments = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    arguments |= {"save_total_limit": 2, "metric_for_best_model": "loss", "greater_is_better": False}
    arguments |= {"learning_rate": 5.0, "optim": "sgd"}  # steps so large make it worse
    model = SparseBertForMaskedLM(tiny_config(pattern="window", search=None))
    trainer = make_trainer(model, tmp_path, **arguments)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint).name
    assert best not in ("checkpoint-4", "checkpoint-5")
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {best, "checkpoint-5"}


def test_a_damaged_p_does_not_end_the_training(tiny_config, tmp_path):
    (tmp_path / "mask_probs.safetensors").write_bytes(b"{}")
    model = SparseBertForMaskedLM(tiny_config(pattern="window", search=None))
    make_trainer(model, tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    check_whole(tmp_path / "checkpoint-2")
    assert not (tmp_path / "checkpoint-2/mask_probs.safetensors").exists()


def test_a_token_is_not_saved(tiny_config, tmp_path):
    trainer = make_trainer(SparseBertForMaskedLM(tiny_config()), tmp_path, hub_token="hf_secret")
    trainer.save_model()
    assert b"hf_secret" not in (tmp_path / "training_args.bin").read_bytes()
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).hub_token is None
    assert trainer.args.hub_token == copy.deepcopy(trainer.args).hub_token == "hf_secret"


@pytest.mark.parametrize("step", [2, 4])
def test_search_that_ends_within_the_training(tiny_config, tmp_path, step):
    """It freezes at half the steps, trains on, and goes on from a checkpoint before or after that."""
    config = tiny_config(search="dam_s", target_sparsity=0.6, mask_length=16)
    arguments = SAVING | {"lr_scheduler_type": "linear"}

    def run(resume=None):
        torch.manual_seed(7)
        # Freezing writes into the configuration.
        model, schedule = SparseBertForMaskedLM(copy.deepcopy(config)), SearchSchedule(end=0.5)
        trainer = make_trainer(model, tmp_path, callbacks=[schedule], **arguments)
        trainer.train(resume_from_checkpoint=resume)
        return model, schedule, trainer

    model, schedule, trainer = run()
    assert not model.sparse_attention.searching and schedule.outcome["asked"] == 0.6
    assert model.sparse_attention.mask.sparsity == pytest.approx(schedule.outcome["got"])
    assert schedule.probs.shape == (1, 4, 14)  # of each distance between tokens that are not special
    groups = trainer.optimizer.param_groups
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}
    resumed, _, second = run(str(tmp_path / f"checkpoint-{step}"))
    assert history(second, "loss") == pytest.approx(history(trainer, "loss"), rel=1e-6)
    assert resumed.sparse_attention.mask == model.sparse_attention.mask
    for name, parameter in weights(resumed).items():
        torch.testing.assert_close(parameter, weights(model)[name], atol=1e-7, rtol=1e-6, msg=name)


def test_the_best_model_of_two_states_is_refused(tiny_config, tmp_path, caplog):
    arguments = {"max_steps": 4, "eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    model = SparseBertForMaskedLM(tiny_config(search="dam_s"))
    with pytest.raises(ValueError, match="load_best_model_at_end has no meaning with search_end 0.5"):
        make_trainer(model, tmp_path, callbacks=[SearchSchedule(end=0.5)], **arguments)
    make_trainer(model, tmp_path, callbacks=[SearchSchedule()], **arguments)
    assert "the best checkpoint of a search may be an early one" in caplog.text


@pytest.mark.parametrize("end, steps", [(0.95, 4), (0.5, 1)])
def test_a_search_that_ends_with_the_last_step_is_frozen(tiny_config, tmp_path, end, steps):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", target_sparsity=0.6, mask_length=16))
    make_trainer(model, tmp_path, callbacks=[SearchSchedule(end)], max_steps=steps).train()
    assert not model.sparse_attention.searching


def test_a_stock_trainer_does_not_search_again_after_the_freeze(tiny_config, tmp_path):
    config = tiny_config(search="dam_s", target_sparsity=0.6, mask_length=16)
    arguments = {"trainer_class": Trainer, "save_strategy": "steps", "save_steps": 3, "save_only_model": True}

    def trainer(model, steps):
        return make_trainer(model, tmp_path, callbacks=[SearchSchedule(0.3)], max_steps=steps, **arguments)

    trainer(SparseBertForMaskedLM(copy.deepcopy(config)), 3).train()
    again = SparseBertForMaskedLM(copy.deepcopy(config))
    with pytest.raises(ValueError, match="checkpoint-3 has a frozen mask, and the model .* is searching"):
        trainer(again, 6).train(resume_from_checkpoint=True)
    assert again.sparse_attention.searching
    frozen = SparseBertForMaskedLM.from_pretrained(tmp_path / "checkpoint-3")
    mask = frozen.sparse_attention.mask
    trainer(frozen, 6).train(resume_from_checkpoint=True)
    assert frozen.sparse_attention.mask == mask


def test_a_search_goes_on_if_its_mask_cannot_be_frozen(tiny_config, tmp_path, caplog):
    """A mask with empty rows is said once, and costs no training."""
    model = SparseBertForMaskedLM(tiny_config(search="dam_u", mask_length=LENGTH))
    with torch.no_grad():
        model.sparse_attention.mask_logits.fill_(-3.0)
    trainer = make_trainer(model, tmp_path, callbacks=[SearchSchedule(0.5)], max_steps=6)
    trainer.train()
    assert trainer.state.global_step == 6 and model.sparse_attention.searching
    assert caplog.text.count("cannot be frozen yet") == 1


# The mask is trained


def test_logits_get_no_weight_decay(tiny_config, tmp_path):
    model = SparseBertForMaskedLM(tiny_config())
    optimizer = make_trainer(model, tmp_path, weight_decay=0.1).create_optimizer()
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(model.sparse_attention.mask_logits)] == 0.0
    assert decay[id(model.bert.encoder.layer[0].attention.self.query.weight)] == 0.1
    assert len(decay) == len(list(model.parameters()))


def train_with_trainer(model, steps, folder, trainer_class=SparseBertTrainer):
    make_trainer(model, folder, trainer_class=trainer_class, max_steps=steps).train()


def train_in_a_loop(model, steps, folder, accelerator=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(rows(8 * steps), batch_size=8)
    if accelerator:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss) if accelerator else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {
    "SparseBertTrainer": train_with_trainer,
    "Trainer": partial(train_with_trainer, trainer_class=Trainer),
    "accelerate": lambda *arguments: train_in_a_loop(*arguments, Accelerator(cpu=True)),
    "plain loop": train_in_a_loop,
}


@pytest.mark.parametrize(("train", "search"), covering([*LOOPS.values()], ["dam_s", "soft"]))
def test_any_loop_moves_the_logits(tiny_config, tmp_path, search, train):
    """The penalty outweighs the task here: after 10 steps of 1e-3, ten times enlarged, alpha is near -0.1."""
    config = tiny_config(search=search, mask_length=LENGTH, sparsity_weight=1.0, mask_constant=10.0)
    model = SparseBertForMaskedLM(config).train()
    before = weights(model)
    train(model, 10, tmp_path)
    alpha = model.sparse_attention.learned.alpha().detach()
    assert alpha.mean().item() == pytest.approx(-0.1, abs=0.03)
    assert not torch.equal(before[QUERY], weights(model)[QUERY])


def test_loss_falls_and_the_mask_becomes_sparse(tiny_config, tmp_path):
    """The whole path: search, train, freeze, train on through the frozen mask."""
    model = SparseBertForMaskedLM(tiny_config(mask_length=LENGTH, sparsity_weight=0.01))
    trainer = make_trainer(model, tmp_path, rows(8), max_steps=30, learning_rate=5e-3)
    trainer.train()
    losses = history(trainer, "loss")
    assert losses[-1] < losses[0] - 1.0
    logged = history(trainer, "sparsity")
    assert len(logged) == 30 and logged[-1] > 0.5
    model.freeze()
    assert sparsity(model) == pytest.approx(logged[-1], abs=1e-4)
    second = make_trainer(model, tmp_path, rows(8), max_steps=10, learning_rate=5e-3)
    second.train()
    assert history(second, "loss")[-1] < history(second, "loss")[0] and not history(second, "sparsity")


# The penalty


def one_update(config, folder, weight, **arguments):
    """The change of every weight in one step of SGD, and the logged norm of the gradient."""
    torch.manual_seed(0)
    model = SparseBertForMaskedLM(config(search="dam_s", mask_length=LENGTH, sparsity_weight=weight))
    trainer = make_trainer(model, folder, max_steps=1, optim="sgd", learning_rate=1.0, **arguments)
    start = weights(model)
    torch.manual_seed(1)
    trainer.train()
    return {name: value - start[name] for name, value in weights(model).items()}, history(trainer, "grad_norm")


def test_update_of_the_weights_does_not_depend_on_the_penalty(tiny_config, tmp_path):
    """Clipped together, the penalty's gradient leaves a hundredth of the update of the weights."""
    (small, norm), (large, other) = (one_update(tiny_config, tmp_path, weight) for weight in (0.0, 10.0))
    assert norm == other
    assert not torch.equal(small.pop(LOGITS), large[LOGITS])
    assert large.pop(LOGITS).norm() == pytest.approx(1.0, rel=1e-3)  # max_grad_norm
    assert all(torch.equal(update, large[name]) for name, update in small.items())
    total = torch.stack([update.norm() for update in small.values()]).norm()
    assert total == pytest.approx(min(norm[0], 1.0), rel=1e-3)


def smoothed(output, labels, num_items_in_batch=None):
    """A loss outside the model, summed over the batches of a step as the Trainer asks."""
    logits = output.logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.1)
    return loss / num_items_in_batch


@pytest.mark.parametrize(("outside", "accumulation"), [("smoother", 4), ("function", 1)])
def test_loss_outside_the_model_contains_the_penalty(tiny_config, tmp_path, outside, accumulation, caplog):
    losses, options = [], {"label_smoothing_factor": 0.1} if outside == "smoother" else {}
    options |= {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        config = tiny_config(search="soft", mask_length=LENGTH, sparsity_weight=weight)
        trainer = make_trainer(SparseBertForMaskedLM(config), tmp_path, max_steps=1, **options)
        trainer.compute_loss_func = smoothed if outside == "function" else None
        penalty = weight * trainer.model.sparse_attention.mask_probs().sum().item()
        trainer.train()
        losses.append(history(trainer, "loss")[0] - penalty)
    assert penalty > 100 and losses[1] == pytest.approx(losses[0], abs=0.01)
    assert "without the penalty" not in caplog.text


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="not x86-64 with AVX2")
def test_bfloat16_without_instructions_is_warned_of(tiny_config, tmp_path, caplog):
    logging.warning_once.cache_clear()
    model = SparseBertForMaskedLM(tiny_config(pattern="window"))
    warn_of_slow_bfloat16(True, "cuda")
    make_trainer(model, tmp_path)
    assert "emulates" not in caplog.text
    for _ in range(2):
        make_trainer(model, tmp_path, bf16=True)
    assert caplog.text.count("emulates") == (torch.backends.cpu.get_cpu_capability() == "AVX2")


def test_loss_without_the_penalty_is_warned_of_once(tiny_config, tmp_path, caplog):
    logging.warning_once.cache_clear()
    ids = torch.randint(5, 100, (2, LENGTH))
    for fields, train, warned in (
        ({"sparsity_weight": 0.0}, True, 0),
        ({"target_sparsity": 0.5}, True, 0),
        ({"pattern": "window", "search": None}, True, 0),
        ({}, False, 0),
        ({}, True, 1),
    ):
        model = SparseBertForMaskedLM(tiny_config(**{"search": "dam_s", "mask_length": LENGTH} | fields)).train(train)
        for _ in range(2):
            model(ids).logits.logsumexp(-1).mean().backward()
        assert caplog.text.count("without the penalty") == warned, fields
    model(ids, labels=ids).loss.backward()
    (model(ids).logits.mean() + sparsity_loss(model)).backward()
    assert caplog.text.count("without the penalty") == 1
    logging.warning_once.cache_clear()
    stock = make_trainer(model, tmp_path, trainer_class=Trainer, label_smoothing_factor=0.1)
    stock.train()
    assert caplog.text.count("without the penalty") == 2


# Numbers that are not finite


def breaker(name, what):
    """Spoils a tensor of the model once two steps are done: its weight, or its gradient."""

    def spoil(state, model):
        if state.global_step == 2 and what == "weight":
            model.get_parameter(name).data.view(-1)[3] = torch.nan
        if state.global_step == 2 and what == "gradient":
            spoiled = torch.tensor([1])
            model.get_parameter(name).register_hook(lambda gradient: gradient.index_fill(-1, spoiled, torch.nan))

    return At("on_step_begin", spoil)


@pytest.mark.parametrize(
    ("name", "what", "clip", "message"),
    [
        (QUERY, "weight", 1.0, f"the loss is nan, {QUERY} is not finite"),
        (QUERY, "gradient", 0.0, f"the first gradient that is not finite is that of {QUERY}"),
        (LOGITS, "weight", 0.0, f"{LOGITS} is not finite"),
        (LOGITS, "gradient", 1.0, f"the first gradient that is not finite is that of {LOGITS}"),
    ],
    ids=["weight", "gradient", "P", "gradient of P"],
)
def test_nan_stops_within_one_step(tiny_config, tmp_path, name, what, message, clip):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_length=LENGTH))
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "max_grad_norm": clip}
    trainer = make_trainer(model, tmp_path, callbacks=[breaker(name, what)], **arguments)
    with pytest.raises(FloatingPointError, match=re.escape(message)) as error:
        trainer.train()
    assert "step 3: " in str(error.value) and str(tmp_path / "checkpoint-2") in str(error.value)
    assert trainer.state.global_step == 2 and len(history(trainer, "loss")) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    reloaded = SparseBertForMaskedLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(weight.isfinite().all() for weight in reloaded.parameters())
    if what == "weight":
        with pytest.raises(FloatingPointError, match=f"not saved after step 2: {name} is not finite"):
            trainer.save_model()
        with pytest.raises(FloatingPointError, match=f"the model to train: {name} is not finite"):
            make_trainer(model, tmp_path / "again").train()
        assert not any((tmp_path / "again").iterdir())


def test_nan_in_the_base_weights_ends_the_command(tiny_config, tmp_path, capsys):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_length=LENGTH))
    model.get_parameter(QUERY).data[0, 0] = torch.inf
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("Some words stand here.\n")
    flags = {"text": tmp_path / "text.txt", "base_model": tmp_path / "base", "nsp": "false", "max_length": LENGTH}
    flags["output_dir"] = tmp_path / "out"
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    assert main(["pretrain", *words, "--use_cpu"]) == 1
    assert f"base_model {tmp_path / 'base'}: {QUERY} is not finite" in capsys.readouterr().err
    assert not any((tmp_path / "out").glob("*"))


def test_infinite_loss_and_last_step(tiny_config, tmp_path):
    """Weights that the last update spoils are seen before anything is frozen or saved."""
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_length=LENGTH))
    trainer = make_trainer(model, tmp_path, max_steps=1, learning_rate=1e38, optim="sgd", max_grad_norm=0.0)
    trainer.model.bert.embeddings.word_embeddings.weight.data *= 1e10
    with pytest.raises(FloatingPointError, match="is not finite"):
        trainer.train()
    assert not any(tmp_path.iterdir())


def test_no_mask_is_frozen_from_nan(tiny_config, tmp_path):
    """Neither by a call, nor by a schedule, which else goes on when a mask is refused."""
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_length=LENGTH))
    model.sparse_attention.mask_logits.data[0, 1, 2] = torch.nan
    for freeze in (model.freeze, lambda: SearchSchedule().freeze(model.sparse_attention)):
        with pytest.raises(FloatingPointError, match="mask_logits.*NaN"):
            freeze()
    assert model.sparse_attention.searching


# Overflow under fp16


@pytest.fixture
def half_trainer(tiny_config, tmp_path, monkeypatch):
    """
    `half_trainer(scale, **arguments)`: a Trainer under fp16 on the CPU, with this initial factor of the loss.
    Accelerate offers fp16 on accelerators only, so it is given what it would make there.
    """

    def make(scale, **arguments):
        model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_length=LENGTH))
        trainer = make_trainer(model, tmp_path, **arguments)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.accelerator.native_amp = True
        monkeypatch.setitem(trainer.accelerator.state.__dict__, "_mixed_precision", "fp16")
        return trainer

    return make


def test_steps_that_overflow_are_skipped_and_counted(half_trainer):
    trainer = half_trainer(2.0**30, max_steps=24)
    before = weights(trainer.model)
    trainer.train()
    skipped, overflows = (
        history(trainer, "skipped_steps"),
        [not math.isfinite(n) for n in history(trainer, "grad_norm")],
    )
    assert len(skipped) == 24 and 5 < skipped[-1] < 20
    assert skipped == list(itertools.accumulate(overflows))
    assert trainer.accelerator.scaler.get_scale() == 2.0 ** (30 - skipped[-1])
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(trainer.model).items())


def test_overflow_in_every_step_stops_the_training(half_trainer, tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 20, "max_steps": 60, "max_grad_norm": 0.0}
    trainer = half_trainer(1.0, callbacks=[breaker(QUERY, "gradient")], **arguments)
    with pytest.raises(FloatingPointError, match="20 steps in a row overflowed under fp16: use bf16") as error:
        trainer.train()
    assert "step 22: " in str(error.value) and str(tmp_path / "checkpoint-20") in str(error.value)
    assert history(trainer, "skipped_steps") == [0, 0, *range(1, 20)]
    reloaded = SparseBertForMaskedLM.from_pretrained(tmp_path / "checkpoint-20")
    assert all(weight.isfinite().all() for weight in reloaded.parameters())


def test_overflows_now_and_then_do_not_stop_the_training(half_trainer):
    def overflow_in_two_of_three(state, model):
        if state.global_step == 0:
            model.get_parameter(QUERY).register_hook(lambda g: g * (torch.nan if state.global_step % 3 else 1.0))

    trainer = half_trainer(1.0, callbacks=[At("on_step_begin", overflow_in_two_of_three)], max_steps=12)
    trainer.most_skipped_steps = 3
    trainer.train()
    assert history(trainer, "skipped_steps")[-1] == 8


def test_a_weight_that_is_not_finite_is_no_overflow(half_trainer):
    trainer = half_trainer(1.0, callbacks=[breaker(QUERY, "weight")], max_steps=60)
    with pytest.raises(FloatingPointError, match=f"step 3: .*{QUERY} is not finite"):
        trainer.train()


def test_without_fp16_nothing_is_counted(tiny_config, tmp_path):
    trainer = make_trainer(SparseBertForMaskedLM(tiny_config(pattern="window")), tmp_path)
    trainer.train()
    assert history(trainer, "loss") and not history(trainer, "skipped_steps")


# Evaluation


def test_evaluation_is_the_task_loss_repeats_and_leaves_the_generator_alone(tiny_config, tmp_path):
    def collate(examples):
        """Chooses the tokens to predict anew each time, as the MLM collator does."""
        ids = torch.stack([example["input_ids"] for example in examples])
        return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)}

    model = SparseBertForMaskedLM(tiny_config(sparsity_weight=1.0))
    trainer = make_trainer(model, tmp_path)
    trainer.data_collator = collate
    torch.manual_seed(8)
    state = torch.get_rng_state()
    first = trainer.evaluate()["eval_loss"]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-6)
    assert first == pytest.approx(4.6, abs=0.4)  # ln(100): no penalty, which is in the thousands


def test_metrics_of_pretraining(tiny_config):
    """Reduced batch by batch, equal to the definitions over all masked tokens."""
    model = SparseBertForPreTraining(tiny_config(pattern="window")).eval()
    ids = torch.randint(100, (4, LENGTH))
    labels = ids.masked_fill(torch.rand(4, LENGTH) > 0.4, -100)
    pairs = torch.tensor([0, 1, 1, 0])
    with torch.no_grad():
        output = model(ids)
    logits = (output.prediction_logits, output.seq_relationship_logits)
    halves = [
        reduce_logits(tuple(part[half] for part in logits), (labels[half], pairs[half]))
        for half in (slice(0, 2), slice(2, 4))
    ]
    predictions = tuple(torch.cat(parts).numpy() for parts in zip(*halves, strict=True))
    metrics = pretraining_metrics(EvalPrediction(predictions, (labels.numpy(), pairs.numpy())))
    masked = labels != -100
    loss = torch.nn.functional.cross_entropy(logits[0][masked], labels[masked])
    assert metrics["mlm_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["mlm_accuracy"] == pytest.approx((logits[0].argmax(-1) == labels)[masked].float().mean().item())
    assert metrics["nsp_accuracy"] == pytest.approx((logits[1].argmax(-1) == pairs).float().mean().item())
    guesses, losses = reduce_logits(logits[0], labels)
    alone = pretraining_metrics(EvalPrediction((guesses.numpy(), losses.numpy()), labels.numpy()))
    assert alone == {name: pytest.approx(value) for name, value in metrics.items() if name != "nsp_accuracy"}
    assert (losses[~masked] == 0).all()


# Recipes


@pytest.mark.parametrize("name, value, removed", [("freeze_sparsity", 0.75, 0.75), ("freeze_threshold", 0.0, 0.0)])
def test_a_recipe_says_the_dtype_and_what_the_mask_is_frozen_by(pretraining_flags, tmp_path, name, value, removed):
    flags = ("--search", "dam_u", "--allow_empty_rows", "true", f"--{name}", value, "--dtype", "bfloat16")
    assert main(pretraining_flags(tmp_path, *flags)) == 0
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["sparsity"] == pytest.approx(removed, abs=0.005)
    tokens = metrics["steps"] * 4 * 16
    assert metrics["tokens_per_second"] * metrics["train_seconds"] == pytest.approx(tokens, rel=1e-3)


def test_a_recipe_says_which_tokens_are_predicted(word_tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"w{i % 90} w{i % 7} w{i % 11}" for i in range(400)))
    word_tokenizer.save_pretrained(tmp_path / "words")
    text = {"text": str(tmp_path / "text.txt"), "validation": str(tmp_path / "text.txt")}
    sizes = {"nsp": False, "max_length": 16, "max_validation_tokens": 320}

    def labels_of(seed, data_seed, share=0.15):
        data = PretrainingArguments(**text, **sizes, tokenizer=str(tmp_path / "words"), mlm_probability=share)
        training = TrainingArguments(str(tmp_path), seed=seed, data_seed=data_seed, use_cpu=True)
        inputs = make_inputs(data, training, SparseBertConfig(vocab_size=100))
        assert len(inputs.validation_set) == 320 / 16
        return inputs.collator(list(inputs.train_set))["labels"]

    assert torch.equal(labels_of(1, 5), labels_of(2, 5)) and torch.equal(labels_of(5, None), labels_of(2, 5))
    assert not torch.equal(labels_of(1, 5), labels_of(1, 6))
    for share in (0.15, 0.5):
        assert (labels_of(1, 5, share) != -100).float().mean().item() == pytest.approx(share * 14 / 16, abs=0.04)
