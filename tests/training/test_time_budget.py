"""Training by the clock: the end, what follows the clock, and what is left after a stop."""

import json
import os
import random
import signal

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from sparsebert import SparseMask
from sparsebert.training.pretraining import pretraining_run
from sparsebert.training.runs.stopping import TrainingStopped
from sparsebert.training.time_budget import POSITIONS, TimeBudget


MINUTES = 0.03


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng, path = random.Random(0), tmp_path_factory.mktemp("text") / "text.txt"
    sentences = (" ".join(f"word{rng.randrange(60)}" for _ in range(8)) for _ in range(300))
    path.write_text("\n\n".join(f"{sentence.capitalize()}." for sentence in sentences))
    return path


def recipe_of(text, folder, data=(), **training):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    arguments = {
        "output_dir": str(folder), "per_device_train_batch_size": 16, "learning_rate": 1e-2, "warmup_steps": 0.2,
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    fields = {"text": str(text), "nsp": False, "max_length": 32, "max_tokens": 3000, "pictures": False}
    return {
        "data": fields | {"max_minutes": MINUTES, "search_end": 0.5} | dict(data),
        "model": sizes | {"vocab_size": 120, "max_position_embeddings": 32, "mask_length": 32, "target_sparsity": 0.6},
        "training": arguments | training,
    }


def history_of(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def test_a_run_ends_by_the_clock_with_its_schedules_at_their_ends(text, tmp_path):
    metrics = pretraining_run.pretrain(recipe_of(text, tmp_path / "run"))
    history = history_of(tmp_path / "run")
    assert metrics["minutes"] >= MINUTES and metrics["steps"] == len(history) > 3
    rates = [entry["learning_rate"] for entry in history]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[0] == 0 and rates[-1] < 0.3 * max(rates)
    searching = ["sparsity" in entry for entry in history]
    assert searching[0] and not searching[-1]  # frozen half way
    assert SparseMask.from_pretrained(tmp_path / "run").sparsity == pytest.approx(metrics["sparsity"])
    assert metrics["tokens_per_second"] < 16 * 32 * metrics["steps"] / (60 * MINUTES) * 1.01


def test_steps_may_end_it_sooner(text, tmp_path):
    metrics = pretraining_run.pretrain(recipe_of(text, tmp_path / "run", {"max_minutes": 60}, max_steps=4))
    rates = [entry["learning_rate"] for entry in history_of(tmp_path / "run")]
    assert metrics["steps"] == 4 and metrics["minutes"] < 60
    assert rates == pytest.approx([0.0, 0.75 / 0.8 * 1e-2, 0.5 / 0.8 * 1e-2, 0.25 / 0.8 * 1e-2], rel=1e-2)


class Watch(TrainerCallback):
    """What was used up when the training began; SIGTERM to this process in its third step."""

    def __init__(self, budget, terminate):
        self.budget, self.terminate, self.at_begin = budget, terminate, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.at_begin = self.budget.elapsed

    def on_step_begin(self, args, state, control, **kwargs):
        if self.terminate and state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_resumed_run_has_the_minutes_that_were_left(text, tmp_path, monkeypatch):
    watches = []

    class Watched(pretraining_run.SparseBertTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            watches.append(Watch(self._callback(TimeBudget), terminate=not watches))
            self.add_callback(watches[-1])

    monkeypatch.setattr(pretraining_run, "SparseBertTrainer", Watched)
    recipe = recipe_of(text, tmp_path / "run", {"max_minutes": 2 * MINUTES}, save_strategy="steps", save_steps=1000)
    with pytest.raises(TrainingStopped):
        pretraining_run.pretrain(recipe)
    used = watches[0].budget.elapsed
    assert 0 < used < 120 * MINUTES and watches[0].at_begin == 0
    metrics = pretraining_run.pretrain(recipe | {"data": recipe["data"] | {"resume": True}})
    assert watches[1].at_begin == pytest.approx(used) and metrics["minutes"] >= 2 * MINUTES
    assert metrics["train_seconds"] == pytest.approx(60 * metrics["minutes"], rel=1e-5)  # both have 6 digits
    assert metrics["steps"] > 3 and [entry["step"] for entry in history_of(tmp_path / "run")][:4] == [1, 2, 3, 4]
    assert (tmp_path / "run" / f"checkpoint-{metrics['steps']}").is_dir()  # as at max_steps


def test_a_run_whose_time_is_over_trains_no_step():
    budget, control = TimeBudget(1.0), TrainerControl()
    stored = {"TimeBudget": {"args": {"minutes": 1.0}, "attributes": {"elapsed": 60.5}}}
    state = TrainerState(global_step=7, max_steps=10**9, stateful_callbacks=stored)
    budget.on_train_begin(None, state, control)
    assert control.should_training_stop and budget.position(state) == (POSITIONS, POSITIONS)


@pytest.mark.parametrize(
    ("data", "training", "message"),
    [
        ({"max_minutes": 0}, {}, "max_minutes must be in .*got 0"),
        ({"max_minutes": float("inf")}, {}, "max_minutes must be in .*got inf"),
        ({}, {"warmup_steps": 10}, r"warmup_steps must be a fraction of max_minutes, in \[0, 1\), got 10"),
        ({}, {"warmup_steps": 1}, "warmup_steps must be a fraction of max_minutes"),
        ({}, {"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type with max_minutes must be one of 'linear'"),
        ({}, {"save_steps": 0.1}, "save_steps must be a number of steps with max_minutes, got 0.1"),
        ({"pruning": {"final_sparsity": 0.5}}, {}, "pruning .*has no meaning with max_minutes"),
    ],
)
def test_what_counts_steps_is_refused(text, tmp_path, data, training, message):
    with pytest.raises(ValueError, match=message):
        pretraining_run.pretrain(recipe_of(text, tmp_path / "run", {"search_end": 1.0} | data, **training))
    assert not (tmp_path / "run").exists()
