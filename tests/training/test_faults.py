"""
The table of faults: each is provoked for real, and what happens then is asserted.

The number in a test's name is the row of docs/faults.md, which says in words what is asserted here. Details are tested
where the code in question is.
"""

import copy
import errno
import inspect
import io
import json
import os
import pickle
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bert_batch import check_sequence_of_padding
from conftest import SEARCH, TINY, WORDS, contents, growth, tokenizer_of
from processes import SERVER, die_at, start, start_command, wait_for
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast, TrainingArguments

from sparsebert import (
    MaskFileError,
    SparseBertConfig,
    SparseBertForMaskedLM,
    SparseBertModel,
    SparseMask,
    attach,
    build_pattern,
    load,
    sparse_dot_product_attention,
)
from sparsebert.attention.choosing import choice
from sparsebert.attention.kernels import cpu
from sparsebert.commands import main
from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.data.tasks import TASKS
from sparsebert.data.tokenization import train_tokenizer
from sparsebert.files import UNFINISHED_NAME, locked_output
from sparsebert.learning.searches import gumbel_noise
from sparsebert.training.runs import run_life
from sparsebert.training.runs.checkpoint_manifests import MANIFEST_NAME, check_whole, newest_whole
from sparsebert.training.runs.resuming import RecipeRecord, check_recipe
from sparsebert.training.trainer import SparseBertTrainer


ROWS = []
CPU_BACKENDS = ("sparse_eager", "sparse_sdpa", "sparse_cpu")
CONFIG, WEIGHTS = "mask_config.json", "mask.safetensors"


def row(number, fault, *marks):
    """Decorator: a function that provokes a fault of the table, with fixtures as its arguments."""

    def add(function):
        ROWS.append(pytest.param(function, id=f"row{number:02}-{fault}", marks=marks))
        return function

    return add


def save_mask(folder, **fields):
    mask = build_pattern("window", 16, 4)
    mask = SparseMask(mask.keep, 16, mask.form, metadata={"base_model": "user/base"}, **fields)
    mask.save_pretrained(folder)
    return mask


def numbered_rows(count):
    """Examples of 8 tokens, of which the second tells which one it is."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, (count, 8), generator=generator)
    ids[:, 1] = torch.arange(5, 5 + count)
    return [{"input_ids": each, "labels": each} for each in ids]


def trainer_of(folder, trainer_class=SparseBertTrainer, model=None, rows=32, **arguments):
    arguments = {"max_steps": 10, "per_device_train_batch_size": 8, "logging_steps": 1, "save_steps": 3} | arguments
    options = TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **arguments)
    model = model or SparseBertForMaskedLM(SparseBertConfig(**TINY, search="dam_s", mask_length=8))
    return trainer_class(model, options, train_dataset=numbered_rows(rows))


# Mask files


@row(1, "mask file truncated")
def truncated_mask(tmp_path):
    save_mask(tmp_path)
    before = contents(tmp_path)
    for name, most in ((WEIGHTS, None), (CONFIG, -2)):  # without its last newline, JSON is complete
        whole = before[Path(name)]
        for size in range(len(whole[:most])):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(MaskFileError, match=name) as error:
                SparseMask.from_pretrained(tmp_path)
            if name == WEIGHTS:
                assert f"truncated: it has {size} of " in str(error.value) and "force_download" in str(error.value)
        (tmp_path / name).write_bytes(whole)
    model = SparseBertModel(SparseBertConfig(**TINY, search="dam_s", mask_length=8))
    model.freeze()
    model.save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-1])
    for loader in (load, SparseBertModel.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(MaskFileError, match="truncated: it has .* force_download"):
            loader(tmp_path)


@row(2, "mask file random or a bomb")
def random_mask(tmp_path):
    save_mask(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()

    def read():
        for header in (2**63, 2**64 - 1, 10**8, 2**40):
            for rest in (whole[8:], b"{" * 100_000, torch.randint(256, (1000,)).byte().numpy().tobytes()):
                (tmp_path / WEIGHTS).write_bytes(header.to_bytes(8, "little") + rest)
                with pytest.raises(MaskFileError, match=WEIGHTS):
                    SparseMask.from_pretrained(tmp_path)

    began = time.perf_counter()
    assert growth(read) < 50e6
    assert (time.perf_counter() - began) / 24 < 1


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@row(3, "pickle offered as a mask")
def pickled_mask(tmp_path, tiny_config):
    proof = tmp_path / "executed"
    with pytest.raises(OSError):
        pickle.loads(pickle.dumps(Malicious(str(tmp_path))))  # it would
    for name in ("mask.bin", "mask.pt"):
        torch.save(Malicious(str(proof)), tmp_path / name)
        with pytest.raises(MaskFileError, match=r"never read.*save_pretrained"):
            SparseMask.from_pretrained(tmp_path / name)
    save_mask(tmp_path)
    shutil.copy(tmp_path / "mask.bin", tmp_path / WEIGHTS)
    with pytest.raises(MaskFileError, match=WEIGHTS):
        SparseMask.from_pretrained(tmp_path)
    tiny_config(pattern="window").save_pretrained(tmp_path / "model")
    shutil.copy(tmp_path / "mask.bin", tmp_path / "model/pytorch_model.bin")
    with pytest.raises((pickle.UnpicklingError, OSError, ValueError)):
        SparseBertModel.from_pretrained(tmp_path / "model")
    assert not proof.exists()


@row(4, "mask for other layers or heads")
def mask_of_another_shape(tiny_config):
    """A `ValueError`, as for any mask that does not fit; the model stays as it was."""
    keep = torch.ones(3, 8, 16, 16, dtype=torch.bool)
    mask = SparseMask(keep, 16, metadata={"base_model": "user/base"})
    said = r"\(found for user/base\) is for 3 layer\(s\) and 8 heads of length 16; the model has 2 layers .* 4 heads"
    model, stock = SparseBertModel(tiny_config(pattern="window")), BertModel(BertConfig(**TINY))
    before = model.sparse_attention.mask
    with pytest.raises(ValueError, match=said):
        model.set_mask(mask)
    assert model.sparse_attention.mask is before
    with pytest.raises(ValueError, match=said):
        attach(stock, mask)
    assert type(stock) is BertModel


@row(5, "other base model")
def other_base_model(tiny_config, finetuning_flags, checkpoints, caplog, tmp_path):
    model = BertModel(BertConfig(**TINY))
    model.config.name_or_path = "user/other"
    mask = SparseMask(torch.ones(4, 16, 16, dtype=torch.bool), 16, metadata={"base_model": "user/base"})
    with pytest.raises(ValueError, match="user/base .*user/other .*strict=True"):
        attach(model, mask, strict=True)
    attach(model, mask)
    said = "found for user/base (revision unknown), this model is user/other"
    assert caplog.text.count(said) == 1
    for other in (attach(BertModel(BertConfig(**TINY)), "dense", mask_length=16), SparseBertModel(tiny_config())):
        other.config.name_or_path = "user/other"
        caplog.clear()
        for _ in range(2):  # once, since then it has a mask of that model
            other.set_mask(mask)
        assert caplog.text.count(said) == 1
    mask.save_pretrained(tmp_path / "mask")
    assert main(finetuning_flags(tmp_path / "run", "--mask", tmp_path / "mask", "--max_steps", "1")) == 0
    assert f"user/base (revision unknown), this model is {checkpoints['window']}" in caplog.text


# Inputs


@row(8, "empty row in the mask")
def empty_row(tiny_config, tmp_path):
    keep = torch.ones(4, 16, 16, dtype=torch.bool)
    keep[1, 3] = keep[2, 5] = False
    mask = SparseMask(keep, 16)
    with pytest.raises(ValueError, match=r"\b2 .*keep nothing"):
        SparseBertModel(tiny_config(pattern="window")).set_mask(mask)
    searching = SparseBertModel(tiny_config(search="dam_u", mask_length=16, special_tokens="none"))
    with torch.no_grad():
        searching.sparse_attention.mask_logits.fill_(-1.0)
    with pytest.raises(ValueError, match="keep nothing"):
        searching.freeze()
    assert searching.sparse_attention.searching
    for backend in CPU_BACKENDS:
        model = SparseBertModel(tiny_config(pattern="window", allow_empty_rows=True, attn_implementation=backend))
        model.set_mask(mask)
        state = model(torch.randint(5, 100, (2, 16))).last_hidden_state
        state.square().sum().backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        assert state.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@row(10, "sample of padding only")
def sample_of_padding(tiny_config, caplog):
    check_sequence_of_padding(tiny_config, caplog, CPU_BACKENDS, "cpu")


@row(11, "mask not binary")
def mask_not_binary(tmp_path):
    """No type but bool is taken, so there is no layer or head to name."""
    for keep in (torch.full((4, 16, 16), torch.nan), torch.rand(4, 16, 16), torch.ones(4, 16, 16, dtype=torch.int8)):
        with pytest.raises(ValueError, match=f"keep must be a bool tensor.*got {keep.dtype}"):
            SparseMask(keep, 16)
    save_mask(tmp_path)
    save_file({"keep": torch.full((64,), torch.nan)}, tmp_path / WEIGHTS)
    with pytest.raises(MaskFileError, match="torch.float32"):
        SparseMask.from_pretrained(tmp_path)


# Training


@row(12, "NaN in a search")
def nan_in_a_search(pretraining_flags, said, tmp_path):
    flags = ("--learning_rate", "1e30", "--max_grad_norm", "0", "--save_steps", "1")
    line = said(pretraining_flags(tmp_path / "run", *SEARCH, *flags), code=1)
    assert re.search(r"step 2: .*\b(is not finite|gradient that is not finite is that of) ?\S*", line)
    assert str(tmp_path / "run/checkpoint-1") in line
    check_whole(tmp_path / "run/checkpoint-1")
    assert not (tmp_path / "run" / WEIGHTS).exists() and not (tmp_path / "run/metrics.json").exists()


def check_noise(draws):
    smallest = torch.logit(torch.tensor([0.0, 1.0]), eps=1e-6).abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(draws // 10**6):
            noise = gumbel_noise((10**6,), "cpu")
            assert noise.dtype == torch.float32 and noise.abs().max() <= smallest < 14


@row(14, "noise in half precision")
def noise(tiny_config):
    check_noise(2 * 10**6)
    for dtype in (torch.bfloat16, torch.float16):
        model = SparseBertModel(tiny_config(search="dam_s")).to(dtype).train()
        sample, noisy = model.sparse_attention.learned.draw()
        assert sample.isfinite().all() and noisy.isfinite().all() and noisy.dtype == torch.float32


@row(14, "noise of 1e8 draws", pytest.mark.slow)
def noise_of_many_draws():
    check_noise(10**8)


# Saving


def save_and_die(folder):
    """Save a checkpoint and a mask over older ones again and again, each time killed at another write."""
    torch.set_num_threads(1)  # a process with threads must not be forked
    trainer = trainer_of(folder, max_steps=1, save_steps=1)
    trainer.train()
    saved = Path(folder) / "checkpoint-2"
    mask, other = build_pattern("window", 16, 4), build_pattern("bigbird", 16, 4)
    outcomes = []
    while not outcomes or outcomes[-1][0]:
        shutil.rmtree(saved, ignore_errors=True)
        mask.save_pretrained(folder)
        child, left = os.fork(), len(outcomes)
        if not child:
            die_at(left, str(folder))
            trainer.state.global_step = 2
            trainer._save_checkpoint(trainer.model, None)
            other.save_pretrained(folder)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        whole = newest_whole(folder).name
        check_whole(Path(folder) / whole)
        with_parts = whole == "checkpoint-1" and saved.is_dir() and any(saved.iterdir())
        try:
            found = "old" if SparseMask.from_pretrained(folder) == mask else "new"
            assert found == "old" or SparseMask.from_pretrained(folder) == other
        except MaskFileError:
            found = "refused"
        outcomes.append((killed, whole, with_parts, found))
    Path(folder, "outcomes.json").write_text(json.dumps(outcomes))


@row(17, "killed while saving")
def killed_while_saving(tmp_path):
    process = start(save_and_die, str(tmp_path))
    process.join(120)
    assert process.exitcode == 0
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    killed, whole, parts, found = zip(*outcomes, strict=True)
    assert len(outcomes) > 10 and all(killed[:-1]) and any(parts)
    # In this order, and no mixture of two masks is ever read.
    assert list(whole) == sorted(whole) and set(whole) == {"checkpoint-1", "checkpoint-2"}
    assert found[0] == "old" and found[-1] == "new" and found.count("refused") <= 1


@row(18, "disk full while saving")
def full_disk(saved_run, pretraining_flags, said, small_files, monkeypatch, tmp_path):
    """The run ends in any case: what it would do without its checkpoints could be lost, `--resume` loses nothing."""
    folder = tmp_path / "run"
    shutil.copytree(saved_run / "checkpoint-2", folder / "checkpoint-2")
    mask = save_mask(tmp_path / "mask")
    before = contents(folder)
    size = (folder / "checkpoint-2/optimizer.pt").stat().st_size
    small_files(size - 1000)  # the weights fit, the state of the optimizer does not
    line = said(pretraining_flags(folder, *SEARCH, "--resume"), code=1)
    small_files(20)
    with pytest.raises(OSError):
        build_pattern("bigbird", 16, 4).save_pretrained(tmp_path / "mask")
    small_files(None)
    assert str(folder / "checkpoint-4") in line and "could not be saved" in line
    assert not (folder / "checkpoint-4").exists() and not list(tmp_path.rglob("*.tmp"))
    assert contents(folder / "checkpoint-2").items() == contents(saved_run / "checkpoint-2").items()
    assert before.items() <= contents(folder).items()
    assert SparseMask.from_pretrained(tmp_path / "mask") == mask
    check_whole(folder / "checkpoint-2")
    assert main(pretraining_flags(folder, *SEARCH, "--resume")) == 0
    # Without a checkpoint, the same command starts again in what it left: before its weights, and after them.
    opened = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # that of a file that is open, which is not named
    of_tokenizers = Exception("No space left on device (os error 28)")
    torch_says = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    for name, place, error in (
        ("model.safetensors", None, None),
        ("tokenizer.json", (PreTrainedTokenizerFast, "save_pretrained"), of_tokenizers),
        ("training_args.bin", (torch, "save"), torch_says),
        ("metrics.json", (run_life, "write_metrics"), opened),
    ):
        flags = (*SEARCH, "--save_strategy", "no", "--max_steps", 1)
        words = pretraining_flags(output := tmp_path / Path(name).stem, *flags)
        with monkeypatch.context() as patch:
            if place is None:
                small_files(20_000)
            else:
                patch.setattr(*place, Mock(side_effect=error))
            line = said(words, code=1)
        small_files(None)
        assert str(output) in line and re.search("too large|is the disk full|No space left", line)
        assert (output / "config.json").is_file() and not (output / name).exists()
        assert main(words) == 0 and (output / name).is_file() and not (output / UNFINISHED_NAME).exists()


# Resuming


@row(19, "part of a checkpoint missing")
def part_missing(saved_run, pretraining_flags, said, tmp_path):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        checkpoint = tmp_path / name / "checkpoint-4"
        shutil.copytree(saved_run / "checkpoint-4", checkpoint)
        (checkpoint / name).unlink()
        words = pretraining_flags(tmp_path / name, *SEARCH, "--resume_from_checkpoint", checkpoint)
        line = said(words)
        assert str(checkpoint / name) in line and "--allow_partial_resume" in line
        # Without the state of the training, nobody knows where the run was.
        assert main([*words, "--allow_partial_resume"]) == (2 if name == "trainer_state.json" else 0)


def hold(folder, line):
    with locked_output(folder):
        line.send(os.getpid())
        line.recv()


@row(20, "two processes in one folder")
def two_processes(pretraining_flags, finetuning_flags, said, tmp_path):
    here, there = SERVER.Pipe()
    process = start(hold, str(tmp_path / "run"), there)
    pid = here.recv()
    for flags in (pretraining_flags, finetuning_flags):
        line = said(flags(tmp_path / "run", "--overwrite"))
        assert f"is in use by process {pid} on {os.uname().nodename}" in line and pid != os.getpid()
    here.send("done")
    process.join(60)
    assert process.exitcode == 0 and not (tmp_path / "run").exists()


@row(21, "resumed with another recipe")
def another_recipe(saved_run, pretraining_flags, said, caplog, tmp_path):
    """Refused before the text is read, with all that changed."""
    checkpoint = shutil.copytree(saved_run / "checkpoint-4", tmp_path / "run/checkpoint-4")
    changes = {
        **{"data.max_length": (16, 12), "data.mlm_probability": (0.15, 0.2), "data.search_end": (1.0, 0.5)},
        **{"model.hidden_act": ("gelu", "relu"), "model.sparsity_weight": (1e-4, 1e-3)},
        **{"training.learning_rate": (1e-3, 0.1), "training.max_steps": (6, 30)},
        **{"training.per_device_train_batch_size": (4, 2), "training.seed": (42, 7)},
    }
    flags = [word for name, (_, new) in changes.items() for word in (f"--{name.partition('.')[2]}", str(new))]
    line = said(pretraining_flags(tmp_path / "run", *SEARCH, *flags, "--resume"))
    changed = " ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in changes.items())
    assert line.endswith(f"What changed: {changed}")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    recipe = state["stateful_callbacks"][RecipeRecord.__name__]["args"]["recipe"]
    check_recipe(checkpoint, recipe | {"inputs": recipe["inputs"] | {"processes": 2}})
    assert "was trained by 1 processes, now by 2: the batches will be different" in caplog.text


class Ledger(SparseBertTrainer):
    """Notes which examples are trained on."""

    def training_step(self, model, inputs, *args, **kwargs):
        vars(self).setdefault("ledger", []).append(inputs["input_ids"][:, 1].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def check_resumed_twice(make, folder):
    """The second time from a checkpoint of the first; returns what the uninterrupted run was trained on."""
    (whole := make()).train()
    assert len(whole.ledger) == 10
    for step in (3, 6):
        shutil.rmtree(folder / f"checkpoint-{step + 3}")
        (resumed := make()).train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert resumed.ledger == whole.ledger[step:]
    return whole.ledger


@row(22, "resumed twice within an epoch")
def resumed_twice(tmp_path):
    """The data are in memory."""
    ledger = check_resumed_twice(lambda: trainer_of(tmp_path, Ledger), tmp_path)
    assert sorted(sum(ledger[:4], [])) == list(range(5, 37)) and sorted(ledger[0]) != sorted(ledger[4])


def signal_and_resume(number, code, pretraining_flags, said, tmp_path):
    folder, errors = tmp_path / "run", tmp_path / "errors"
    words = pretraining_flags(folder, *SEARCH, "--max_steps", "100", "--save_steps", "20", "--enable_jit_checkpoint")
    process = start_command(words, errors)
    wait_for(process, (folder / "checkpoint-20" / MANIFEST_NAME).exists)
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode == code, errors.read_text()
    line, name = errors.read_text().strip().splitlines()[-1], signal.Signals(number).name
    assert name in line and "--resume" in line
    mark = json.loads((folder / UNFINISHED_NAME).read_text())
    assert name in mark["stopped"] and mark["pid"] == process.pid
    assert not (folder / "metrics.json").exists() and not (folder / WEIGHTS).exists()
    checkpoint = newest_whole(folder)
    assert 20 < int(checkpoint.name.partition("-")[2]) < 100
    assert "mask_logits" in " ".join(load_file(checkpoint / "model.safetensors"))
    # The same command again offers to go on, and does.
    assert f"complete up to {checkpoint.name}: add --resume" in said(words)
    assert main([*words, "--resume"]) == 0
    assert json.loads((folder / "metrics.json").read_text())["steps"] == 100
    assert not (folder / UNFINISHED_NAME).exists()


@row(23, "SIGTERM")
def sigterm(pretraining_flags, said, tmp_path):
    signal_and_resume(signal.SIGTERM, 143, pretraining_flags, said, tmp_path)


@row(23, "SIGINT", pytest.mark.slow)
def sigint(pretraining_flags, said, tmp_path):
    signal_and_resume(signal.SIGINT, 130, pretraining_flags, said, tmp_path)


@row(23, "SIGHUP", pytest.mark.slow)
def sighup(pretraining_flags, said, tmp_path):
    signal_and_resume(signal.SIGHUP, 129, pretraining_flags, said, tmp_path)


@row(23, "second SIGTERM")
def second_sigterm(pretraining_flags, tmp_path):
    """In the first step, which is a whole epoch and lasts many seconds."""
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7\n" * 8_000)
    flags = ("--text", tmp_path / "text.txt", "--gradient_accumulation_steps", "100000")
    errors = tmp_path / "errors"
    process = start_command(pretraining_flags(tmp_path / "run", *SEARCH, *flags), errors)
    for said in ("sparse_auto runs", "a second signal ends"):  # the first is said in the first batch
        wait_for(process, lambda said=said: said in errors.read_text())
        process.terminate()
    process.join(20)
    assert process.exitcode == -signal.SIGTERM


# Text


ODD_LINES = (
    ("Plain words here.", "plain words here."),
    ("\tblanks \u00a0 and\u3000tabs  ", "blanks and tabs"),
    ("CRLF\r", "CRLF"),
    ("N\0UL", "NUL"),
    ("\U0001f600 emoji \U0001f468\u200d\U0001f469\u200d\U0001f467", None),
    ("\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd", None),
    ("e\u0301 and \ufffd", None),
)


def check_rows(documents, max_length=16, vocab_size=300):
    tokenizer = train_tokenizer(documents, vocab_size)
    rows = pretraining_dataset(documents, tokenizer, max_length)
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id}
    assert all(set(ids) - special for ids in rows["input_ids"][:])
    batch = pretraining_collator(tokenizer, seed=0)([rows[index] for index in range(min(len(rows), 8))])
    assert (batch["labels"] != -100).any()
    return rows


@row(24, "odd text")
def odd_text(tmp_path, caplog):
    path = tmp_path / "text.txt"
    lines = "\n".join(line for line, _ in ODD_LINES)
    path.write_bytes(b"\xef\xbb\xbf" + f"{lines}\n\n \t\n\0\n\n".encode() + lines.encode() * 5)
    documents = list(load_documents(path, "all"))
    assert len(documents) == 2 and [line for line in documents[0][1:4]] == ["blanks and tabs", "CRLF", "NUL"]
    assert documents[0][0] == "Plain words here."  # no byte order mark
    check_rows(documents)
    path = tmp_path / "text.jsonl"
    texts = [lines, "", " \n\0\n", "\u200b", *(line for line, _ in ODD_LINES)]
    path.write_text("".join(json.dumps({"text": text}) + "\r\n\r\n" for text in texts))
    documents = list(load_documents(path, "all"))
    assert len(documents) == len(texts) - 2
    assert f"Skipped 2 documents without text among {len(texts)}" in caplog.text
    check_rows(documents)
    assert "pieces of text without any token" in caplog.text  # a space of no width
    for content, where in ((b"good\nb\xffd", ":2: not UTF-8"), ("one\r\ntwo".encode("utf-16"), ":1: not UTF-8")):
        (tmp_path / "bad.txt").write_bytes(content)
        with pytest.raises(ValueError, match=f"bad.txt{where}"):
            list(load_documents(tmp_path / "bad.txt", "all"))
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": "half \\ud800"}\n')
    with pytest.raises(ValueError, match="bad.jsonl:2: .*surrogate"):
        list(load_documents(tmp_path / "bad.jsonl", "all"))


def check_long_line(folder, size):
    (folder / "text.txt").write_text("many words in one line " * (size // 23))
    rows = check_rows(list(load_documents(folder / "text.txt", "all")), 128)
    assert len(rows) > size / 23 * 5 / 128


@row(24, "long line")
def long_line(tmp_path):
    check_long_line(tmp_path, 300_000)


@row(24, "line of 10 MB", pytest.mark.slow)
def line_of_10_mb(tmp_path):
    check_long_line(tmp_path, 10_000_000)


@row(25, "text repeated, too short or unknown")
def useless_text(pretraining_flags, said, word_tokenizer, caplog, tmp_path):
    def refused(text, *flags):
        (tmp_path / "own.txt").write_text(text)
        return said(pretraining_flags(tmp_path / "run", *SEARCH, "--text", tmp_path / "own.txt", *flags))

    assert "no paragraph of text" in refused(" \n\n\t\n")
    assert "too few for one row of max_length=16" in refused("w1 w2 w3")
    assert "too few for one row" in refused("\u200b\n" * 50)
    assert "100% of the tokens are [UNK]" in refused("Other words than it knows. " * 50)
    assert "1 examples, fewer than a batch of 4" in refused("w1 w2 " * 10, "--dataloader_drop_last", "true")
    caplog.clear()
    trainer_of(tmp_path / "few", rows=5, max_steps=1).train()
    assert "5 examples, fewer than a batch of 8" in caplog.text
    pretraining_dataset([["w1 w2 w3"]] * 40, word_tokenizer, 16)
    assert "39 of 40 paragraphs (98%) repeat" in caplog.text
    pretraining_dataset([[f"w{i} w1 unheard"] for i in range(40)], word_tokenizer, 16)
    assert "33% of the tokens are [UNK]" in caplog.text


@row(26, "tokenizer of another model")
def another_tokenizer(pretraining_flags, finetuning_flags, said, checkpoints, tmp_path):
    line = said(pretraining_flags(tmp_path / "run", *SEARCH, "--vocab_size", "50"))
    assert "words' has 100 tokens but the model has vocab_size=50" in line
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path / "maskless")
    line = said(pretraining_flags(tmp_path / "run", *SEARCH, "--tokenizer", tmp_path / "maskless"))
    assert f"tokenizer '{tmp_path / 'maskless'}' has no mask_token" in line
    model = shutil.copytree(checkpoints["window"], tmp_path / "model")
    tokenizer_of([*WORDS, "more"]).save_pretrained(model)
    line = said(finetuning_flags(tmp_path / "run", "--model", model))
    assert f"tokenizer of {model} has 101 tokens, the model 100" in line
    assert not (tmp_path / "run").exists()


PAIR = {"sentence1": "a b", "sentence2": "b c"}
SWAG_ROW = {"startphrase": "a b", "choices": ["a", "b", "c", "d"]}
BAD_ROWS = {
    "rte": (PAIR | {"label": "entailment"}, PAIR | {"label": "maybe"}, "field 'label': 'maybe' is not one of"),
    "sst2": ({"sentence": "a", "label": 1}, {"sentence": "a", "label": 2}, "field 'label': 2 is not one of 0, 1"),
    "stsb": (PAIR | {"score": "2.5"}, PAIR | {"score": "high"}, "field 'score': 'high' is not a number from 0 to 5"),
    "swag": (SWAG_ROW | {"answer": 1}, SWAG_ROW | {"answer": 4}, "field 'answer': 4 is not one of 0 to 3"),
    "swag, 3 endings": (
        SWAG_ROW | {"answer": 1},
        SWAG_ROW | {"answer": 1, "choices": ["a", "b", "c"]},
        "field 'choices': 3 endings, but the first row has 4",
    ),
}


@row(27, "labels that cannot be")
def bad_labels(tmp_path, caplog):
    folders = {}
    for name, (good, bad, said) in BAD_ROWS.items():
        (folder := tmp_path / name).mkdir()
        (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (good, bad, good)))
        folders[name] = (folder, "row 2, " + said)
    places = {"a": 0, "b": 3, "c": 0}
    questions = [
        {"id": name, "question": "Who?", "answers": [{"text": "Ann", "answer_start": place}]}
        for name, place in places.items()
    ]
    content = {"data": [{"title": "t", "paragraphs": [{"context": "Ann ran.", "qas": questions}]}]}
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad/train-v1.1.json").write_text(json.dumps(content))
    folders["squad"] = (tmp_path / "squad", "row 2, field 'answers': question 'b' has 'Ann' at 3, but its context has")
    for name, (folder, said) in folders.items():
        task = TASKS[name.partition(",")[0]]
        with pytest.raises(ValueError, match=re.escape(said)):
            task.load(data=str(folder), splits=["train"])
        loaded = task.load(data=str(folder), splits=["train"], skip_bad=True)["train"]
        assert len(loaded) == 2 and loaded.info.description.startswith("skipped 1 of 3 rows, the first: row 2")
    assert caplog.text.count("skipped 1 of 3 rows") == len(folders)


# Configuration


@row(28, "wrong key or value")
def wrong_key(said, tmp_path):
    def refused(content, *flags):
        (tmp_path / "recipe.yaml").write_text(content)
        return said(["pretrain", tmp_path / "recipe.yaml", "--output_dir", tmp_path / "run", *flags])

    for content, word in (
        ("model:\n  sparsity_wieght: 1.0\n", "did you mean 'sparsity_weight'"),
        ("modle:\n  search: dam_s\n", "did you mean 'model'"),
        ("model:\n  num_hidden_layers: two\n", "num_hidden_layers"),
        ("model:\n  search: dam_s\n  sparsity_weight: -1.0\n", "sparsity_weight"),
        ("model:\n  search: dam_s\n  target_sparsity: 1.0\n", "target_sparsity"),
        ("data:\n  freeze_sparsity: 1.0\n", "freeze_sparsity must be in [0, 1), got 1.0"),
    ):
        assert word in refused(content), content
    assert "got -1" in refused("model:\n  search: dam_s\n  sparsity_weight: -1.0\n")
    assert "(0, 1)" in refused("model:\n  search: dam_s\n  target_sparsity: 1.0\n")
    assert "did you mean '--learning_rate'" in refused("", "--learning_rat", "1")


@row(29, "backend missing")
def backend_missing(tiny_config, caplog, monkeypatch, request, tmp_path):
    def forget():
        cpu._operator.cache_clear()
        cpu.unavailable.cache_clear()

    request.addfinalizer(forget)
    ids = torch.randint(5, 100, (2, 32))
    config = tiny_config(pattern="window", mask_length=32)
    model = SparseBertModel(config).eval()
    with monkeypatch.context() as patch:
        patch.setattr(choice, "_SAID", set())
        patch.setenv("CXX", "no-such-compiler")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        patch.setattr(cpu, "FOLDER", tmp_path)  # installed without the operator
        forget()
        assert model(ids).last_hidden_state.isfinite().all()
        lines = [record.getMessage() for record in caplog.records if "sparse_auto runs" in record.getMessage()]
        assert len(lines) == 1 and "\n" not in lines[0]
        assert "sparse_auto runs sparse_sdpa: sparse_cpu cannot run: there is no C++ compiler" in lines[0]
        model.set_attn_implementation("sparse_cpu")
        with pytest.raises(ValueError, match=r"sparse_cpu cannot run here: there is no C\+\+ compiler.*sparse_auto"):
            model(ids)
    forget()  # with the operator that there is
    wide = torch.randn(1, 4, 16, 520)
    with pytest.raises(ValueError, match="head size must be at most"):
        sparse_dot_product_attention(wide, wide, wide, build_pattern("window", 16, 4), backend="sparse_cpu")
    model.set_attn_implementation("sparse_triton")
    with pytest.raises(ValueError, match="sparse_triton cannot run here"):
        model(ids)


@row(30, "hostile path or repository")
def hostile(pretraining_flags, finetuning_flags, said, checkpoints, monkeypatch, tmp_path):
    save_mask(tmp_path / "outside")
    (tmp_path / "mask").mkdir()
    with pytest.raises(MaskFileError, match="must lie inside"):
        SparseMask.from_pretrained(tmp_path / "mask", subfolder="../outside")
    for name in ("../x/y", "user/../x", "user/a/b"):
        with pytest.raises(MaskFileError, match="neither an existing folder nor a valid Hub id"):
            SparseMask.from_pretrained(name)
    (victim := tmp_path / "victim").write_text("precious")
    (tmp_path / "mask" / CONFIG).symlink_to(victim)
    save_mask(tmp_path / "mask")
    for name in (CONFIG, "config.json", "model.safetensors"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).symlink_to(victim)
    load(checkpoints["window"]).save_pretrained(tmp_path / "model")
    assert victim.read_text() == "precious"
    with open(tmp_path / "mask" / CONFIG, "ab") as file:
        file.truncate(2**40)
    with pytest.raises(MaskFileError, match="too large"):
        SparseMask.from_pretrained(tmp_path / "mask")
    # Code of a repository, even if the user would agree.
    proof, code = tmp_path / "executed", tmp_path / "code"
    shutil.copytree(checkpoints["window"], code)
    for kind in ("Config", "Model", "Tokenizer"):
        (code / f"{kind.lower()}.py").write_text(f"import os\nos.mkdir({str(proof)!r})\nclass Evil{kind}: pass\n")
    auto_map = {"AutoConfig": "config.EvilConfig", "AutoModel": "model.EvilModel"}
    config = json.loads((code / "config.json").read_text())
    (code / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": auto_map}))
    tokens = json.loads((code / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["tokenizer.EvilTokenizer", None]}}
    (code / "tokenizer_config.json").write_text(json.dumps(tokens))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    for words in (
        pretraining_flags(tmp_path / "run", *SEARCH, "--base_model", code),
        pretraining_flags(tmp_path / "run", *SEARCH, "--tokenizer", code),
        finetuning_flags(tmp_path / "run", "--model", code),
        ["lengthen", code, "--length", "64", "--output_dir", tmp_path / "run"],
    ):
        line = said(words)
        assert str(code) in line and "Python code, which is never run" in line and not proof.exists()
    with pytest.raises(ValueError, match="never run"):
        load(code)
    assert not proof.exists() and not (tmp_path / "run").exists()


@row(31, "offline without a cache")
def offline(finetuning_flags, said, tmp_path):
    fetch = "hf download user/absent"
    words = finetuning_flags(tmp_path / "run", "--mask", "user/absent")
    for call, filename in (
        (lambda: SparseMask.from_pretrained("user/absent"), CONFIG),
        (lambda: load("user/absent"), "config.json"),
        (lambda: said(words), CONFIG),
    ):
        began = time.perf_counter()
        try:
            message = call()
        except OSError as error:
            message = str(error)
        assert time.perf_counter() - began < 2
        assert filename in message and fetch in message


@row(32, "evaluation repeated")
def evaluation_repeated(tiny_config):
    ids, padding = torch.randint(5, 100, (2, 16)), torch.ones(2, 16)
    padding[1, 9:] = 0
    searched = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_length=16, hidden_dropout_prob=0.1))
    frozen = copy.deepcopy(searched)
    frozen.freeze(sparsity=0.5)
    for model, names in ((searched.eval(), CPU_BACKENDS[:2]), (frozen.eval(), CPU_BACKENDS)):
        for backend in names:
            model.set_attn_implementation(backend)
            state = torch.get_rng_state()
            with torch.no_grad():
                first, second = (model(ids, padding).logits for _ in range(2))
            assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("provoke", ROWS)
def test_fault(provoke, request):
    names = inspect.signature(provoke).parameters
    provoke(**{name: request.getfixturevalue(name) for name in names})


def test_page():
    """It has all rows of the table, each with its tests, here or in a file, of which none is expected to fail."""
    root = Path(__file__).parents[2]
    page = (root / "docs/faults.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d", line)]
    listed = [(int(number), test) for number, *_, tests in cells for test in tests.split("; ")]
    assert [int(number) for number, *_ in cells] == list(range(1, 33))
    assert {f"row{number:02}-{test}" for number, test in listed if test[0] != "`"} == {param.id for param in ROWS}
    assert all((root / test.strip("`")).is_file() for _, test in listed if test[0] == "`")
    assert not any(mark.name == "xfail" for param in ROWS for mark in param.marks)
