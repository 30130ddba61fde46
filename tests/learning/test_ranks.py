"""The processes of a distributed training: their noise, the same logits after every step, the same frozen mask."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from processes import run_ranks

from sparsebert.files import UNFINISHED_NAME
from sparsebert.training.runs.checkpoint_manifests import MANIFEST_NAME, newest_whole


# Two processes train two models: with logits that one of them changes, and with different masks; and some more with
# noise of their own or shared, with seeds that are alike, as a Trainer sets them, or not.
CHILD = """
import torch
from transformers import TrainerCallback, TrainingArguments
from sparsebert import SparseBertConfig, SparseBertForMaskedLM
from sparsebert.learning.rank_agreement import MaskMismatchError
from sparsebert.learning.search_schedule import SearchSchedule
from sparsebert.training.trainer import SparseBertTrainer

sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
         "intermediate_size": 16, "max_position_embeddings": 24}
rows = [{"input_ids": [(7 * i + j) % 50 for j in range(24)]} for i in range(32)]
rows = [row | {"labels": row["input_ids"]} for row in rows]


class Watch(TrainerCallback):
    def __init__(self, attention, tamper):
        self.attention, self.tamper, self.steps = attention, tamper, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps = state.global_step
        if self.tamper and rank == 1 and state.global_step == 2:
            self.attention.mask_logits.data.neg_()


for name in ("changed logits", "other masks"):
    mask = {"search": "dam_s", "sparsity_weight": 0.01}
    if name == "other masks":
        mask = {"pattern": "random", "pattern_kwargs": {"sparsity": 0.7}, "mask_seed": rank}
    model = SparseBertForMaskedLM(SparseBertConfig(**sizes, **mask))
    watch = Watch(model.sparse_attention, name == "changed logits")
    arguments = TrainingArguments(f"{folder}/{rank}", max_steps=6, per_device_train_batch_size=4, learning_rate=0.05,
                                  use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
    trainer = SparseBertTrainer(model, arguments, train_dataset=rows, callbacks=[SearchSchedule(0.5), watch])
    error = None
    try:
        trainer.train()
    except MaskMismatchError as raised:
        error = str(raised)
    frozen = model.sparse_attention.mask
    found[name] = {"error": error, "steps": watch.steps, "world_size": arguments.world_size,
                   "mask": None if frozen is None else frozen.keep.flatten().tolist()}

for share_noise in (False, True):
    for seeds_differ in (False, True):
        torch.manual_seed(0)
        config = SparseBertConfig(**sizes, search="dam_u", share_noise=share_noise, sparsity_weight=0.01)
        model = SparseBertForMaskedLM(config).train()
        attention = model.sparse_attention
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5 + rank * seeds_differ)
        samples = []
        for step in range(3):
            ids = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            parallel(input_ids=ids, labels=ids).loss.backward()
            samples.append(attention._sample.detach().flatten().tolist())
            optimizer.step()
        weights = {name: weight for name, weight in model.named_parameters()}
        found[f"noise {share_noise} {seeds_differ}"] = {
            "samples": samples,
            "gradients": {name: weight.grad.double().sum().item() for name, weight in weights.items()},
            "logits": attention.mask_logits.flatten().tolist(),
        }
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found, by the name of the training."""
    return run_ranks(CHILD, tmp_path_factory.mktemp("ranks"))


def test_different_masks_at_the_end_of_a_search_stop_the_run(ranks):
    first, second = (rank["changed logits"] for rank in ranks)
    assert first["error"] == second["error"]
    assert "rank 1 has SparseMask(" in first["error"] and "; rank 0 has SparseMask(" in first["error"]
    assert first["steps"] == second["steps"] == 3 and first["world_size"] == 2


def test_different_masks_stop_the_run_before_its_first_step(ranks):
    first, second = (rank["other masks"] for rank in ranks)
    assert first["error"] == second["error"] and "rank 1 has SparseMask(" in first["error"]
    assert first["steps"] == second["steps"] == 0 and first["mask"] != second["mask"]


@pytest.mark.parametrize("seeds_differ", [False, True], ids=["same seeds", "other seeds"])
@pytest.mark.parametrize("share_noise", [False, True], ids=["own", "shared"])
def test_noise_of_two_processes(ranks, share_noise, seeds_differ):
    first, second = (rank[f"noise {share_noise} {seeds_differ}"] for rank in ranks)
    assert first["logits"] == second["logits"] and first["gradients"] == second["gradients"]
    drawn, other = (torch.tensor(rank["samples"]) for rank in (first, second))
    assert not torch.equal(drawn[0], drawn[1])
    if share_noise:
        assert torch.equal(drawn, other)
        return
    # P is near 1/2: half a turn takes nearly every entry to the other side, another seed half of them.
    apart = (drawn != other).float().mean().item()
    assert apart == pytest.approx(0.5, abs=0.05) if seeds_differ else apart > 0.95
    assert drawn.mean() == pytest.approx(0.5, abs=0.05) and other.mean() == pytest.approx(0.5, abs=0.05)


# Two processes run the same command, as torchrun starts them. Each writes its number, and in the end its exit code.
COMMAND = """
import os, sys
from torch import distributed
from sparsebert.commands import main
from sparsebert.training import pretraining

child, folder = os.fork(), sys.argv[1]
rank = int(child == 0)
with open(f"{folder}/pid{rank}", "w") as file:
    file.write(str(os.getpid()))
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
code = main(sys.argv[2:])
with open(f"{folder}/code{rank}", "w") as file:
    file.write(str(code))
if rank == 0:
    os.waitpid(child, 0)
"""


def start(folder, words):
    folder.mkdir()
    command = [sys.executable, "-c", COMMAND, str(folder), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def codes(folder):
    return [int((folder / f"code{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_signal_to_all_processes_saves_one_checkpoint(pretraining_flags, tmp_path):
    run = tmp_path / "run"
    flags = ("--search", "dam_s", "--sparsity_weight", "1e-4", "--max_steps", "60", "--save_steps", "20")
    words = pretraining_flags(run, *flags)
    process = start(tmp_path / "first", words)
    end = time.monotonic() + 200
    while process.poll() is None and not (run / "checkpoint-20" / MANIFEST_NAME).exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    for rank in range(2):
        os.kill(int((tmp_path / f"first/pid{rank}").read_text()), signal.SIGTERM)
    errors = process.communicate(timeout=200)[1]
    assert codes(tmp_path / "first") == [143, 143], errors
    checkpoint = newest_whole(run)
    step = int(checkpoint.name.partition("-")[2])
    assert 20 < step < 60 and step % 10 == 0, errors  # the processes agree at every tenth step
    regular = {f"checkpoint-{each}" for each in range(20, step + 1, 20)}
    assert {path.name for path in run.glob("checkpoint-*")} == regular | {checkpoint.name}
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in checkpoint.iterdir()}
    assert "SIGTERM" in json.loads((run / UNFINISHED_NAME).read_text())["stopped"]
    assert not (run / "metrics.json").exists() and not (run / "mask.safetensors").exists()
    again = start(tmp_path / "second", [*words, "--resume"])
    errors = again.communicate(timeout=200)[1]
    assert codes(tmp_path / "second") == [0, 0] and f"Resuming from {checkpoint}" in errors, errors
    assert json.loads((run / "metrics.json").read_text())["steps"] == 60
    assert (run / "mask.safetensors").exists() and not (run / UNFINISHED_NAME).exists()
