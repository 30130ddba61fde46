"""Two processes under DDP, DeepSpeed and FSDP: the losses and the mask of one process, saved and resumed."""

import copy
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from conftest import TINY
from processes import run_code, run_ranks
from transformers import BertForMaskedLM, TrainingArguments

from benchmarks.engines import OTHERS, OWN, loaded_loss, results_of
from benchmarks.shared.engine_jobs import EARLY, ENGINES, LATE, ONE
from sparsebert import SparseBertConfig, SparseBertForMaskedLM
from sparsebert.models.bert.masked_token_head import TiedDecoder, share_bias
from sparsebert.training.replicated_logits import (
    LOGITS_NAME,
    ReplicatedLogits,
    check_weights_are_gathered,
    keep_outside,
)
from sparsebert.training.runs import engines
from sparsebert.training.runs.engines import check_engine, engine_of_checkpoint


ROOT = Path(__file__).parents[2]
SHARDED = [engine for engine in ENGINES if engine not in (ONE, "DDP")]
FAST = ["search", f"resume {LATE}"]
# In the fast tests, besides DDP.
DAILY = ["ZeRO-3", "FSDP2 sharded"]


def needs(engine):
    if engine.startswith("ZeRO"):
        pytest.importorskip("deepspeed")


def installed(plan):
    """The plan without the engines that are not there."""
    return {engine: jobs for engine, jobs in plan.items() if find_spec("deepspeed") or not engine.startswith("ZeRO")}


def train_all(folder, plan):
    code = "import sys; from benchmarks.shared.engine_jobs import main; sys.exit(main())"
    done = run_code(code, folder, json.dumps(plan), folder=folder, timeout=1200)
    assert done.returncode == 0, done.stderr[-6000:]
    return results_of(folder, plan)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder, and what the processes of each engine found."""
    folder = tmp_path_factory.mktemp("engines")
    plan = dict.fromkeys((ONE, "DDP"), ["search"]) | dict.fromkeys(DAILY, FAST)
    return folder, train_all(folder, installed(plan))


@pytest.fixture(scope="module")
def trained_at_length(tmp_path_factory):
    """The same for all jobs, and then those that go on from the checkpoints of another engine."""
    folder = tmp_path_factory.mktemp("engines")
    plan = {engine: list(OWN) for engine in ENGINES}
    plan["DDP"].append("checkpointed")
    found = train_all(folder, installed(plan))
    crossed = {
        engine: [f"resume {EARLY} of {other}" for other in others if other in found]
        for engine, others in installed(OTHERS).items()
    }
    for engine, results in train_all(folder, crossed).items():
        for mine, other in zip(found[engine], results, strict=True):
            mine |= other
    return folder, found


def check_like_one_process(found, engine, job, of=None):
    """A job ran under the engine, and every process found what one process does."""
    needs(engine)
    reference = found[ONE][0][of or job]
    for mine in (results[job] for results in found[engine]):
        assert "error" not in mine, mine
        assert mine["wrapped"].startswith(ENGINES[engine]) and mine["world_size"] == (1 if engine == ONE else 2)
        assert mine["loss"] == pytest.approx(reference["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        assert mine["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-5)
        assert mine["mask"] == reference["mask"] and 0 < mine["sparsity"] < 1
        assert mine["hashes"] == found[engine][0][job]["hashes"]  # of the logits after every step


@pytest.mark.parametrize("engine", ["DDP", *DAILY])
def test_a_search_and_its_freeze_are_those_of_one_process(trained, engine):
    _, found = trained
    check_like_one_process(found, engine, "search")
    mine, reference = found[engine][0]["search"], found[ONE][0]["search"]
    assert len(set(mine["hashes"])) == 4 and len(mine["loss"]) == 8  # the mask is frozen half way
    assert mine["gradient"] == pytest.approx(reference["gradient"], rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("engine", DAILY)
def test_a_run_goes_on_after_the_freeze(trained, engine):
    _, found = trained
    check_like_one_process(found, engine, FAST[1], of="search")


@pytest.mark.parametrize("engine", ["DDP", *DAILY])
def test_what_is_saved_loads_in_one_process(trained, engine):
    needs(engine)
    folder, found = trained
    assert loaded_loss(folder / engine / "search") == pytest.approx(found[ONE][0]["search"]["eval_loss"], abs=1e-5)


@pytest.mark.slow
def test_a_mask_is_frozen_while_activations_are_checkpointed(trained_at_length):
    check_like_one_process(trained_at_length[1], "DDP", "checkpointed", of="search")


IGNORED = f"""
import logging
from transformers import TrainingArguments
from sparsebert import SparseBertConfig, SparseBertForMaskedLM
from sparsebert.training.runs import engines
from sparsebert.training.trainer import SparseBertTrainer

lines, handler = [], logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger(engines.__name__).addHandler(handler)
model = SparseBertForMaskedLM(SparseBertConfig(**{TINY}, search="dam_s", mask_length=8))
SparseBertTrainer(model, TrainingArguments(folder, fsdp=True, use_cpu=True, report_to="none"))
found["log"] = lines
"""


def test_an_engine_that_accelerate_ignores_is_warned_of(tmp_path):
    for found in run_ranks(IGNORED, tmp_path):
        assert any("fsdp is ignored here, DDP runs instead" in line for line in found["log"])


def test_processes_that_accelerate_does_not_start_are_warned_of(tmp_path, monkeypatch, caplog):
    for name, value in {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    engines.warn_of_ignored_engine(TrainingArguments(str(tmp_path), use_cpu=True))
    assert caplog.text.count("accelerate launch --cpu has started one process") == 1


@pytest.mark.slow
@pytest.mark.parametrize("job", OWN)
@pytest.mark.parametrize("engine", ["DDP", *SHARDED])
def test_every_job_is_that_of_one_process(trained_at_length, engine, job):
    folder, found = trained_at_length
    if job not in ("target", "continued"):
        check_like_one_process(found, engine, job)
        if job == "search":
            loss = loaded_loss(folder / engine / job)
            assert loss == pytest.approx(found[ONE][0][job]["eval_loss"], abs=1e-5)
        return
    needs(engine)
    # Here each process draws its own noise: compared with DDP.
    for mine in (results[job] for results in found[engine]):
        assert mine["loss"] == pytest.approx(found["DDP"][0][job]["loss"], abs=1e-4)
        assert mine["hashes"] == found[engine][0][job]["hashes"] and len(set(mine["hashes"])) == len(mine["loss"])
        assert mine["mask"] == found["DDP"][0][job]["mask"]


# Engine, and engine of a checkpoint that it cannot read.
REFUSED = [("DDP", "ZeRO-2"), ("ZeRO-2", "ZeRO-3"), ("ZeRO-2", "DDP"), ("ZeRO-3", "ZeRO-2"), ("ZeRO-3", "FSDP2 full")]
REFUSED += [("FSDP2 full", "DDP"), ("FSDP2 sharded", "ZeRO-3")]


@pytest.mark.slow
@pytest.mark.parametrize("engine, other", [(engine, other) for engine in OTHERS for other in OTHERS[engine]])
def test_a_checkpoint_of_another_engine_is_read_or_refused(trained_at_length, engine, other):
    needs(engine)
    needs(other)
    _, found = trained_at_length
    job = f"resume {EARLY} of {other}"
    if (engine, other) not in REFUSED:
        check_like_one_process(found, engine, job, of="search")
        return
    names = {"DDP": "one process or DDP", "FSDP2 full": "FSDP2", "FSDP2 sharded": "FSDP2"}
    here, there = (names.get(name, f"DeepSpeed {name}") for name in (engine, other))
    for mine in (results[job] for results in found[engine]):
        assert f"was written under {there} and cannot be resumed under {here}" in mine["error"]


@pytest.mark.parametrize("engine, processes", [("DeepSpeed ZeRO-2", 4), ("FSDP2", 2)])
def test_one_process_refuses_the_checkpoint_of_an_engine_that_shards(tmp_path, engine, processes):
    (tmp_path / engines.ENGINE_NAME).write_text(json.dumps({"engine": engine, "processes": processes}))
    here = TrainingArguments(str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(ValueError, match=f"{engine} and cannot be resumed under one process or DDP"):
        check_engine(tmp_path, here)


@pytest.mark.parametrize("name, engine", [("global_step3", "DeepSpeed"), ("pytorch_model_fsdp_0", "FSDP"), ("a", ONE)])
def test_the_engine_of_a_checkpoint_that_does_not_say_is_found_by_its_files(tmp_path, name, engine):
    (tmp_path / name).mkdir()
    said = "one process or DDP" if engine == ONE else engine
    assert engine_of_checkpoint(tmp_path) == {"engine": said, "processes": None}
    if engine == ONE:
        check_engine(tmp_path, TrainingArguments(str(tmp_path / "run"), use_cpu=True))


def test_zero_3_without_gathered_weights_is_refused():
    pytest.importorskip("deepspeed")
    from transformers.integrations import HfDeepSpeedConfig

    shipped = json.loads((ROOT / "recipes/deepspeed/zero3.json").read_text())
    check_weights_are_gathered(HfDeepSpeedConfig(copy.deepcopy(shipped)))
    del shipped["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save must be true"):
        check_weights_are_gathered(HfDeepSpeedConfig(shipped))


def test_logits_outside_the_parameters_are_trained_saved_and_frozen(tmp_path):
    model = SparseBertForMaskedLM(SparseBertConfig(**TINY, search="dam_s", mask_length=8))
    attention, before = model.sparse_attention, model.sparse_attention.mask_logits.detach().clone()
    keep_outside(attention, torch.device("cpu"))
    outside = ReplicatedLogits(attention, torch.optim.AdamW, {"lr": 0.1})
    assert not any(name.endswith("mask_logits") for name, _ in model.named_parameters())
    ids = torch.arange(16).view(2, 8)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert outside.reduce()[0] is attention.mask_logits.grad
    outside.on_optimizer_step(None, None, None)
    assert not torch.equal(attention.mask_logits, before) and attention.mask_logits.grad is None
    model.save_pretrained(tmp_path / "model")
    loaded = SparseBertForMaskedLM.from_pretrained(tmp_path / "model").sparse_attention.mask_logits
    assert torch.equal(loaded, attention.mask_logits)
    outside.save(tmp_path)
    with torch.no_grad():
        attention.mask_logits.zero_()
    outside.load(tmp_path)
    assert torch.equal(loaded, attention.mask_logits)
    with pytest.raises(ValueError, match=f"has no {LOGITS_NAME}"):
        outside.load(tmp_path / "model")
    model.freeze()
    assert outside.logits is None and attention.mask_logits is None and outside.reduce() == []
    outside.save(tmp_path / "nowhere")  # nothing is left to save


def test_the_decoder_can_do_without_a_bias_of_its_own(tmp_path):
    model = SparseBertForMaskedLM(SparseBertConfig(**TINY, pattern="window")).eval()
    torch.nn.init.normal_(model.cls.predictions.bias)
    ids = torch.arange(20).view(2, 10)
    stock, expected = copy.deepcopy(model.state_dict()), model(ids).logits
    share_bias(model)
    share_bias(model)
    decoder = model.cls.predictions.decoder
    assert isinstance(decoder, TiedDecoder) and "bias" not in dict(decoder.named_parameters())
    assert torch.equal(model(ids).logits, expected)
    model.tie_weights()
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.cls.predictions.bias)
    assert torch.equal(model(ids).logits, expected) and not torch.equal(other(ids).logits, expected)
    other.load_state_dict(stock)
    assert torch.equal(other(ids).logits, expected)
    model.save_pretrained(tmp_path)
    plain, report = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and torch.equal(plain.cls.predictions.decoder.bias, decoder.bias)
    share_bias(plain.bert)  # no head
    assert type(plain.cls.predictions.decoder) is torch.nn.Linear


def test_accelerate_reads_its_recipes():
    for path in sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")):
        config = load_config_from_file(str(path))
        assert config.num_processes >= 1 and (config.num_machines > 1) == path.stem.startswith("several_nodes")
        assert bool(config.fsdp_config) == path.stem.endswith("_fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ("torch.distributed.run", "--nproc_per_node", "2", "-m", "sparsebert"),
        ("accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu.yaml", "-m", "sparsebert"),
        ("deepspeed.launcher.runner", "--no_local_rank", "--num_gpus", "2", "--module", "sparsebert"),
    ],
    ids=["torchrun", "accelerate", "deepspeed"],
)
def test_launchers_start_two_processes(pretraining_flags, tmp_path, launcher):
    if launcher[0].startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    words = pretraining_flags(tmp_path / "run", "--search", "dam_s", "--sparsity_weight", "1e-4")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (tmp_path / "run" / "metrics.json").is_file(), done.stderr[-3000:]
    checkpoint = tmp_path / "run" / "checkpoint-6"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in checkpoint.iterdir()}
