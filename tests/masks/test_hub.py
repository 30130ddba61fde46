"""Masks and models of the Hub without a connection, and what of them is in the cache."""

import pytest
from conftest import TINY
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from processes import run_code
from transformers import BertConfig, BertModel
from transformers.utils import logging

from sparsebert import SparseBertModel, SparseMask, attach, build_pattern, load
from sparsebert.analysis.saved_runs import read_run
from sparsebert.hub import HubArguments, check_available, check_path


READERS = (SparseMask.from_pretrained, SparseBertModel.from_pretrained, load, read_run)
UNREACHABLE = """
import os, sys, time
from huggingface_hub import constants
from sparsebert import SparseBertModel, SparseMask, load
from sparsebert.analysis.saved_runs import read_run
from sparsebert.commands import main

folder = sys.argv[1]
constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = False, folder
os.environ |= {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}  # where nothing listens

for call in (SparseMask.from_pretrained, SparseBertModel.from_pretrained, load, read_run):
    began = time.perf_counter()
    try:
        call("user/absent")
    except OSError as error:
        seconds = time.perf_counter() - began
        assert seconds < 2, seconds
        print(error)
    else:
        raise AssertionError("the call succeeded")

common = ["--output_dir", f"{folder}/run", "--use_cpu"]
for words in (
    ["pretrain", "--base_model", "user/absent", *common],
    ["pretrain", "--tokenizer", "user/absent", *common],
    ["finetune", "--task", "rte", "--model", "user/absent", "--data", folder, *common],
    ["search", "--model", "user/absent", "--data", f"{folder}/a.txt", "--target_sparsity", "0.5", *common[:2]],
    ["translate", "--train", f"{folder}/a.tsv", "--test", f"{folder}/a.tsv", "--pattern", "window",
     "--tokenizer", "user/absent", *common],
):
    began = time.perf_counter()
    assert main(words) == 2, words
    seconds = time.perf_counter() - began
    assert seconds < 20, (words, seconds)  # retries would take half a minute
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, as `cache_dir` of the client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def check_said(mask, *models):
    """The name of the file and what would fetch it."""
    assert "user/absent: there is no such folder, mask_config.json is not in the cache" in mask
    assert mask.endswith("hf download user/absent mask_config.json mask.safetensors")
    assert len(models) == 3
    for message in models:
        assert "user/absent: there is no such folder, config.json" in message and message.endswith(
            "hf download user/absent"
        )


def test_offline_mode(cache):
    said = []
    for call in READERS:
        with pytest.raises(OSError) as raised:
            call("user/absent")
        said.append(str(raised.value))
    check_said(*said)


def test_without_a_connection(tmp_path):
    """Refused at once, also every field of a verb that names a model or tokenizer."""
    (tmp_path / "a.txt").write_text("Some words.\n")
    (tmp_path / "a.tsv").write_text("a\tb\n")
    done = run_code(UNREACHABLE, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_said(*done.stdout.splitlines())
    lines = [line for line in done.stderr.splitlines() if line.startswith("sparsebert ")]
    assert len(lines) == 5 and all("user/absent: " in line and "hf download user/absent" in line for line in lines)
    assert not (tmp_path / "run").exists()


def cached_mask(cache, subfolder=""):
    """A repository of the cache that holds a mask."""
    repository = cache / "models--user--cached"
    build_pattern("window", 16, 2).save_pretrained(repository / "snapshots" / "abc" / subfolder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return repository


def test_a_run_of_which_only_the_mask_is_cached(cache, caplog, monkeypatch):
    """Its P is not replaced by its mask without a word, unless the Hub is known to have no P."""
    monkeypatch.setattr(logging.get_logger("sparsebert"), "propagate", True)
    repository = cached_mask(cache)
    for said in (True, False):
        caplog.clear()
        assert read_run("user/cached").quantity == "M, 1 where the position is kept, else 0"
        assert ("user/cached: mask_probs.safetensors is not in the cache" in caplog.text) is said
        (repository / ".no_exist" / "abc").mkdir(parents=True, exist_ok=True)
        (repository / ".no_exist" / "abc" / "mask_probs.safetensors").touch()


def test_what_is_cached_of_another_revision_does_not_count(cache):
    cached_mask(cache, "small")
    fields = {"cache_dir": cache, "subfolder": "small"}
    check_available("user/cached", "mask_config.json", **fields)
    with pytest.raises(LocalEntryNotFoundError, match="hf download user/cached small/mask.json --revision v2$"):
        check_available("user/cached", "mask_config.json", fetch="mask.json", revision="v2", **fields)


def test_a_revision_is_that_of_the_sources_on_the_hub(tmp_path):
    given = HubArguments(revision="v2")
    assert given.hub_arguments(str(tmp_path), "user/model") == {"revision": "v2"}
    with pytest.raises(ValueError, match="revision 'v2' has no meaning for the folder"):
        given.hub_arguments(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing/", "C:\\models\\x", "..\\x", "models\\x", "D:/models"])
def test_a_name_that_no_repository_can_have_is_a_path(name):
    with pytest.raises(FileNotFoundError, match="there is no folder .*[gx/s]'$"):
        check_path(name)
    if "\\" in name:
        with pytest.raises(ValueError, match="there is no folder"):
            attach(BertModel(BertConfig(**TINY)), name)
