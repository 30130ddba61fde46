"""Folders of compiled models are whole at any moment: where a process is killed, and where two write at once."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import contents
from processes import die_at, start, start_command, wait_for
from test_compiled_models import a_model, compiled

from sparsebert import load
from sparsebert.commands import main
from sparsebert.files import LOCK_NAMES, UNFINISHED_NAME
from sparsebert.models.inference.compiled_files import is_compiled, read_compiled


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Folders of compiled models with a mask and without, and one that is empty."""
    folder = tmp_path_factory.mktemp("engines")
    (folder / "nothing").mkdir()
    for name in ("sparse", "dense"):
        compiled(a_model(masked=name == "sparse")).save_pretrained(folder / name)
    return folder


@pytest.fixture
def words(tmp_path, word_tokenizer):
    """A command that compiles a model into the folder `out`."""
    for saved in (a_model(), word_tokenizer):
        saved.save_pretrained(tmp_path / "model")
    return f"compile {tmp_path / 'model'} --precision float32 --output_dir {tmp_path / 'out'}".split()


def found_in(folder):
    """Every file of a folder but the lock of a process that was stopped."""
    return {path: content for path, content in contents(folder).items() if path.name not in LOCK_NAMES}


def save_and_die(older, newer, folder):
    """Save a compiled model over another one again and again, each time killed at another write."""
    torch.set_num_threads(1)  # a process with threads must not be forked
    model, outcomes = load(newer), []
    files = model.graph.files()
    vars(model.graph)["files"] = lambda: files  # OpenVINO does not run in a forked process
    while not outcomes or outcomes[-1][0]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(older, folder)
        Path(folder, "notes.txt").write_text("mine")
        child = os.fork()
        if not child:
            die_at(len(outcomes), folder)
            model.save_pretrained(folder)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found = "nothing"
        if is_compiled(folder):
            found = "sparse" if "mask.safetensors" in read_compiled(Path(folder))[0]["files"] else "dense"
        outcomes.append((killed, found, Path(folder, "notes.txt").read_text()))
    Path(folder, "outcomes.json").write_text(json.dumps(outcomes))


@pytest.mark.slow
@pytest.mark.parametrize(("older", "newer"), [("sparse", "dense"), ("dense", "sparse"), ("nothing", "dense")])
def test_killed_while_saving(engines, tmp_path, older, newer):
    """At every write, the older or the newer model is whole and found."""
    folder = tmp_path / "out"
    process = start(save_and_die, *map(str, (engines / older, engines / newer, folder)))
    process.join(120)
    assert process.exitcode == 0
    killed, found, notes = zip(*json.loads((folder / "outcomes.json").read_text()), strict=True)
    first = found.index(newer)
    assert len(found) > 20 and all(killed[:-1]) and 10 < first < len(found) - 5
    assert set(found[:first]) == {older} and set(found[first:]) == {newer} and set(notes) == {"mine"}
    assert hasattr(load(folder), "sparse_attention") == (newer == "sparse")


STAGES = {
    "reading": "sparsebert.commands.compile.load_any",
    "tracing": "sparsebert.models.inference.compiling._Traced.forward",
    "writing the graph": "openvino.save_model",
    "writing": "sparsebert.models.inference.compiled_files.replace_files",
    "copying": "sparsebert.commands.compile.copy_sentence_files",
    "the end": "sparsebert.commands.compile.write_metrics",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_while_compiling(stage, words, engines, monkeypatch, tmp_path, capsys):
    """What was there stays, and nothing else."""
    shutil.copytree(engines / "dense", tmp_path / "out")
    before = contents(tmp_path / "out")

    def stop(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(STAGES[stage], stop)
    assert main([*words, "--overwrite", "true"]) == 143
    assert capsys.readouterr().err.endswith("sparsebert compile: stopped by SIGTERM\n")
    assert found_in(tmp_path / "out") == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("over", ["dense", "nothing"])
def test_a_process_that_is_stopped(number, over, words, engines, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(engines / over, folder)
    before = contents(folder)
    process = start_command([*words, "--overwrite", "true"], tmp_path / "errors")
    wait_for(process, (folder / UNFINISHED_NAME).exists)
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode == (143 if number == signal.SIGTERM else -number)
    assert found_in(folder) == before
    assert main([*words, *["--overwrite", "true"] * (over == "dense")]) == 0
    assert load(folder).sparse_attention.mask == load(tmp_path / "model").sparse_attention.mask


@pytest.mark.slow
def test_two_processes_compile_into_one_folder(words, tmp_path):
    processes = [start_command(words, tmp_path / f"errors-{number}") for number in range(2)]
    for process in processes:
        process.join(120)
    refused, done = sorted(range(2), key=lambda number: processes[number].exitcode, reverse=True)
    assert [processes[number].exitcode for number in (refused, done)] == [2, 0]
    last = (tmp_path / f"errors-{refused}").read_text().strip().splitlines()[-1]
    assert f"is in use by process {processes[done].pid} on" in last
    assert load(tmp_path / "out").compiled_as["precision"] == "float32"
