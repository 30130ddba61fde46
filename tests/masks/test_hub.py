"""Masks and models through a Hub: a real client, in a process of its own, against a local server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_client import Client
from hub_server import HubServer
from huggingface_hub.errors import LocalEntryNotFoundError

from sparsebert import build_pattern
from sparsebert.hub import HubArguments, check_available, check_path
from sparsebert.training.runs.checkpoint_manifests import MANIFEST_NAME


PUSH_AND_PULL_MASK = """
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from sparsebert import SparseMask

keep = torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.5
mask = SparseMask(keep, length=16, special_tokens="first_last", metadata={"base_model": "user/base"})
mask.push_to_hub("user/mask")

loaded = SparseMask.from_pretrained("user/mask")
assert loaded == mask
assert loaded.metadata == {"base_model": "user/base"}
assert SparseMask.from_pretrained(snapshot_download("user/mask")) == mask

changed = mask.without_diagonal()
changed.push_to_hub("user/mask")
assert SparseMask.from_pretrained("user/mask") == changed != mask

for call in (
    lambda: SparseMask.from_pretrained("user/missing"),
    lambda: SparseMask.from_pretrained("user/mask", revision="missing"),
    lambda: mask.push_to_hub("user/mask", token="hf_wrong"),
):
    try:
        call()
    except HfHubHTTPError as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    else:
        raise AssertionError("the call succeeded")
"""

PUSH_MODELS = """
import sys
import torch
from safetensors.torch import save_file
from sparsebert import SparseBertConfig, SparseBertForMaskedLM

torch.manual_seed(0)
for name, how in ("pattern", {"pattern": "bigbird"}), ("searched", {"search": "dam_s"}):
    config = SparseBertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        **how,
    )
    model = SparseBertForMaskedLM(config).eval()
    if name == "searched":
        model.freeze(sparsity=0.5)
    input_ids = torch.randint(100, (2, 24))
    with torch.no_grad():
        logits = model(input_ids).logits
    if name == "pattern":
        model.push_to_hub(f"user/{name}")
    else:
        model.save_pretrained(f"{sys.argv[1]}/pushed", push_to_hub=True, repo_id=f"user/{name}")
    model.sparse_attention.mask.save_pretrained(f"{sys.argv[1]}/{name}")
    save_file({"input_ids": input_ids, "logits": logits}, f"{sys.argv[1]}/{name}/run.safetensors")
"""

PULL_MODELS = """
import sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM
import sparsebert
from sparsebert.analysis.saved_runs import read_run

for name in "pattern", "searched":
    model, report = AutoModelForMaskedLM.from_pretrained(f"user/{name}", output_loading_info=True)
    assert type(model) is sparsebert.SparseBertForMaskedLM
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    mask = sparsebert.SparseMask.from_pretrained(f"{sys.argv[1]}/{name}")
    assert 0.1 < mask.sparsity < 0.95
    assert model.sparse_attention.mask == mask
    assert sparsebert.SparseMask.from_pretrained(f"user/{name}") == mask
    assert read_run(f"user/{name}").mask == mask
    run = load_file(f"{sys.argv[1]}/{name}/run.safetensors")
    with torch.no_grad():
        logits = model.eval()(run["input_ids"]).logits
    torch.testing.assert_close(logits, run["logits"])
"""


PUSH_ONE_OVER_THE_OTHER = """
import sys
import torch
from transformers import DistilBertConfig, DistilBertModel
from sparsebert import MaskFileError, SparseBertConfig, SparseBertModel, attach, detach, load

ids = torch.randint(10, (2, 24))
sizes = {"vocab_size": 10, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32}
own = {"hidden_size": 32, "intermediate_size": 8}

def model_of(kind, name):
    if kind == "own":
        return SparseBertModel(SparseBertConfig(**sizes, **own, **{"search" if name == "dam_s" else "pattern": name}))
    stock = DistilBertConfig(vocab_size=10, dim=32, n_layers=1, n_heads=4, hidden_dim=8, max_position_embeddings=32)
    return attach(DistilBertModel(stock), name, mask_length=32)

for kind in ("own", "attached"):
    for index, name in enumerate(("window", "dam_s", "bigbird", "dam_s")):
        model = model_of(kind, name)
        if index == 2:
            model.save_pretrained(f"{sys.argv[1]}/{kind}{index}", push_to_hub=True, repo_id=f"user/turns_{kind}")
        else:
            model.push_to_hub(f"user/turns_{kind}")
        loaded = load(f"user/turns_{kind}")
        assert type(loaded) is type(model) and loaded.sparse_attention.searching == (name == "dam_s"), (kind, name)
        assert loaded.sparse_attention.mask == model.sparse_attention.mask
        weights = model.state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in loaded.state_dict().items())
        torch.testing.assert_close(loaded.eval()(ids)[0], model.eval()(ids)[0])
detach(model).push_to_hub("user/dense")
try:
    load("user/dense")
except MaskFileError as error:
    print(error)
"""


PUSH_BY_TRAINER = """
import sys
from transformers import BertConfig, BertForMaskedLM, TrainingArguments
from sparsebert import SparseBertConfig, SparseBertForMaskedLM, attach, load
from sparsebert.learning.search_schedule import SearchSchedule
from sparsebert.training.trainer import SparseBertTrainer

sizes = {"vocab_size": 10, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32,
         "hidden_size": 32, "intermediate_size": 8}
rows = [{"input_ids": [1, 2, 3, 4] * 8, "labels": [1, 2, 3, 4] * 8}] * 8

def train(kind, name, strategy, end=1.0):
    if kind == "own":
        model = SparseBertForMaskedLM(SparseBertConfig(**sizes, **{"search" if name == "dam_s" else "pattern": name}))
    else:
        model = attach(BertForMaskedLM(BertConfig(**sizes)), name, mask_length=32)
    arguments = TrainingArguments(f"{sys.argv[1]}/{kind}", max_steps=2, save_steps=1, push_to_hub=strategy != "none",
        hub_model_id=f"user/trained_{kind}", hub_strategy=strategy if strategy != "none" else "end", use_cpu=True,
        hub_always_push=True, report_to="none", disable_tqdm=True)
    trainer = SparseBertTrainer(model, arguments, train_dataset=rows, callbacks=[SearchSchedule(end)])
    trainer.train()
    return trainer

for kind in ("own", "attached"):
    for name in ("window", "dam_s", "bigbird")[kind == "attached" :]:
        trainer = train(kind, name, "none")
        trainer.push_to_hub()
        loaded = load(f"user/trained_{kind}").sparse_attention
        assert loaded.searching == (name == "dam_s"), (kind, name)
        assert loaded.mask == trainer.model.sparse_attention.mask
    trainer = train(kind, "dam_s", "all_checkpoints", 0.5)  # frozen after the first of two checkpoints
    loaded = load(f"user/trained_{kind}").sparse_attention
    assert loaded.mask == trainer.model.sparse_attention.mask is not None, kind

with open(f"{trainer.args.output_dir}/metrics.json", "w") as file:
    file.write("{}")
trainer.push_results()
trainer.args.hub_token = "hf_wrong"
with open(f"{trainer.args.output_dir}/later.json", "w") as file:
    file.write("{}")
trainer.push_results()  # a finished run does not fail for it
"""


UNREACHABLE_VERBS = """
import sys, time
from sparsebert.commands import main

folder = sys.argv[1]
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


UNREACHABLE = """
import time
from sparsebert import SparseBertModel, SparseMask, attach, load
from sparsebert.analysis.saved_runs import read_run

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
"""


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def run_client(hub, tmp_path_factory):
    """Runs code in another process and returns what it printed."""
    client = Client(hub, tmp_path_factory.mktemp("hf_home"))
    yield lambda code, *arguments: client.run(f"import sys\nsys.argv[1:] = {[*map(str, arguments)]}\n{code}")
    client.close()


def test_mask_round_trip(hub, run_client):
    missing_repo, missing_revision, wrong_token = run_client(PUSH_AND_PULL_MASK).splitlines()
    assert missing_repo.startswith("RepositoryNotFoundError") and "user/missing" in missing_repo
    assert missing_revision.startswith("RevisionNotFoundError") and "user/mask" in missing_revision
    assert "401" in wrong_token
    assert set(hub.repos["user/mask"].files) >= {"mask_config.json", "mask.safetensors"}
    assert hub.repos["user/mask"].lfs == {"mask.safetensors"}


def test_frozen_models_round_trip(hub, run_client, tmp_path):
    """A model with a classical pattern, and one whose searched mask only the pushed file knows."""
    run_client(PUSH_MODELS, tmp_path)
    for name in ("user/pattern", "user/searched"):
        assert {"config.json", "model.safetensors", "mask_config.json"} <= set(hub.repos[name].files)
        assert hub.repos[name].lfs == {"model.safetensors", "mask.safetensors"}
    run_client(PULL_MODELS, tmp_path)


def test_repository_holds_one_state_of_a_mask(hub, run_client, tmp_path):
    """A search pushed over a frozen mask, a mask over a search: each in one commit."""
    assert "user/dense: there is no mask_config.json" in run_client(PUSH_ONE_OVER_THE_OTHER, tmp_path)
    state = {"mask_config.json", "mask.safetensors", "search_config.json"}
    frozen = {"mask_config.json", "mask.safetensors"}
    for kind, search in (("own", set()), ("attached", {"search_config.json"})):
        commits = hub.repos[f"user/turns_{kind}"].commits
        assert [files & state for files in commits] == [frozen, search, frozen, search]


CODE = "modeling_frozen_sparsebert.py"
PUSH_RUNS = """
import sys
from pathlib import Path
from huggingface_hub import HfApi
from sparsebert import SparseBertConfig, SparseBertModel
from sparsebert.masks.pushing import push_folder

RUN = ("metrics.json", "predictions_test.jsonl", "MNLI-m.tsv", "heads.png")
sizes = {"vocab_size": 10, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32}
model = SparseBertModel(SparseBertConfig(**sizes, hidden_size=32, intermediate_size=8, pattern="window"))
for number, written in enumerate((RUN, ("metrics.json",), ())):
    folder = Path(sys.argv[1], f"run{number}")
    model.save_pretrained(folder, max_shard_size="200KB" if number else "2KB")
    for name in (*written, "notes.txt"):
        (folder / name).write_text("{}")
    for place in (None, "small"):
        push_folder(folder, "user/runs", subfolder=place)
    if number < 2:
        if not number:
            (folder / "README.md").write_text("# Mine")
        push_folder(folder, "user/others")
    if number == 2:
        push_folder(Path(sys.argv[1], "run0"), "user/others")  # whole weights, then shards
api = HfApi()
api.create_repo("user/new")
for name in ("results.md", "metrics.json", "model_notes.safetensors"):
    api.upload_file(path_or_fileobj=b"{}", path_in_repo=name, repo_id="user/new")
push_folder(Path(sys.argv[1], "run2"), "user/new")
"""


def test_a_run_replaces_the_files_of_another(hub, run_client, tmp_path):
    """But not those of a user. Weights are never beside other weights, one of which would be loaded."""
    run_client(PUSH_RUNS, tmp_path)
    last = hub.repos["user/runs"].commits[-1]
    own = {"config.json", "model.safetensors", "mask_config.json", "mask.safetensors", "README.md", "notes.txt"}
    own.add(CODE)
    assert last - {".gitattributes"} == own | {f"small/{name}" for name in own}
    whole, sharded = hub.repos["user/others"].commits[-2:]
    kept = {"metrics.json", "predictions_test.jsonl", "MNLI-m.tsv", "heads.png"}
    assert kept < whole and {name for name in whole if name.startswith("model")} == {"model.safetensors", CODE}
    assert kept < sharded and "model.safetensors" not in sharded and "model.safetensors.index.json" in sharded
    assert {"results.md", "metrics.json", "model_notes.safetensors", "model.safetensors"} < hub.repos[
        "user/new"
    ].files.keys()


def test_pushes_of_a_trainer_hold_one_state_of_a_mask(hub, run_client, tmp_path):
    """At no commit there is the mask of another model, and those of checkpoints contain theirs."""
    run_client(PUSH_BY_TRAINER, tmp_path)
    frozen = {"mask_config.json", "mask.safetensors"}
    for kind, search in (("own", set()), ("attached", {"search_config.json"})):
        states = [files & (frozen | {"search_config.json"}) for files in hub.repos[f"user/trained_{kind}"].commits]
        assert states[-1] == frozen and search in states
        assert all(state in (frozen, search, set()) for state in states), states
        last = hub.repos[f"user/trained_{kind}"].commits[-1]
        assert {f"checkpoint-2/{name}" for name in (MANIFEST_NAME, "mask_probs.safetensors")} <= last
        assert f"checkpoint-1/{MANIFEST_NAME}" in last
    assert "metrics.json" in last and "later.json" not in last


def run_without_connection(code, offline, home, *arguments):
    environment = os.environ | {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment["NO_PROXY"] = "127.0.0.1"
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def without_connection(tmp_path_factory):
    """A process without a connection, and one in offline mode: functions, and in the first one also verbs."""
    folder = tmp_path_factory.mktemp("unreachable")
    (folder / "a.txt").write_text("Some words.\n")
    (folder / "a.tsv").write_text("a\tb\n")
    results = {
        "no connection": run_without_connection(UNREACHABLE + UNREACHABLE_VERBS, "0", folder / "home", folder),
        "offline mode": run_without_connection(UNREACHABLE, "1", folder / "home"),
    }
    for result in results.values():
        assert result.returncode == 0, result.stderr
    assert not (folder / "run").exists()
    return results


def test_verbs_without_a_connection(without_connection):
    """Every field that names a model or tokenizer is refused at once."""
    result = without_connection["no connection"]
    lines = [line for line in result.stderr.splitlines() if line.startswith("sparsebert ")]
    assert len(lines) == 5 and all("user/absent: " in line and "hf download user/absent" in line for line in lines)


@pytest.mark.parametrize("state", ["no connection", "offline mode"])
def test_without_a_connection(without_connection, state):
    """At once, with the name of the file and what would fetch it."""
    mask, *models = without_connection[state].stdout.splitlines()
    assert "user/absent: mask_config.json is not in the cache" in mask
    assert mask.endswith("hf download user/absent mask_config.json mask.safetensors")
    assert len(models) == 3
    for message in models:
        assert "user/absent: config.json" in message and message.endswith("hf download user/absent")


READ_RUN = """
from sparsebert.analysis.saved_runs import read_run
print(read_run("user/cached").quantity)
"""


def test_a_run_of_which_only_the_mask_is_cached(tmp_path):
    """Its P is not replaced by its mask without a word, unless the Hub is known to have no P."""
    repository = tmp_path / "hub" / "models--user--cached"
    build_pattern("window", 16, 2).save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    unknown = run_without_connection(READ_RUN, "1", tmp_path)
    (repository / ".no_exist" / "abc").mkdir(parents=True)
    (repository / ".no_exist" / "abc" / "mask_probs.safetensors").touch()
    known = run_without_connection(READ_RUN, "1", tmp_path)
    for result, said in ((unknown, True), (known, False)):
        assert result.stdout == "M, 1 where the position is kept, else 0\n", result.stderr
        assert ("user/cached: mask_probs.safetensors is not in the cache" in result.stderr) is said


def test_what_is_cached_of_another_revision_does_not_count(tmp_path):
    repository = tmp_path / "models--user--cached"
    build_pattern("window", 16, 2).save_pretrained(repository / "snapshots" / "abc" / "small")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    check_available("user/cached", "mask_config.json", cache_dir=tmp_path, subfolder="small")
    with pytest.raises(LocalEntryNotFoundError, match="hf download user/cached small/mask.json --revision v2$"):
        check_available(
            *("user/cached", "mask_config.json"),
            fetch="mask.json",
            revision="v2",
            cache_dir=tmp_path,
            subfolder="small",
        )


def test_a_revision_is_that_of_the_sources_on_the_hub(tmp_path):
    given = HubArguments(revision="v2")
    assert given.hub_arguments(str(tmp_path), "user/model") == {"revision": "v2"}
    with pytest.raises(ValueError, match="revision 'v2' has no meaning for the folder"):
        given.hub_arguments(str(tmp_path))


def test_a_name_with_a_slash_at_its_end_is_a_path():
    with pytest.raises(FileNotFoundError, match="there is no folder 'nothing/'$"):
        check_path("nothing/")
