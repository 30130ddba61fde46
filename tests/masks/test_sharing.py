"""Masks and models shared by name: commands and functions in a process with the real client, against a local Hub."""

import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from hub_client import Client
from hub_server import Fault, HubServer

from sparsebert import build_pattern, plan
from sparsebert.training.runs.checkpoint_manifests import MANIFEST_NAME


ROOT = Path(__file__).parents[2]

SETUP = """
def mask_of(name, **metadata):
    mask = sparsebert.build_pattern(name, 16, 4)
    return mask.replace(metadata=mask.metadata | metadata)

def tiny(kind="DistilBertForMaskedLM"):
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32
    )
    return getattr(transformers, kind)(config).eval()

def refused(call, error, *said):
    try:
        call()
    except error as found:
        assert all(part in str(found) for part in said), found
    else:
        raise AssertionError("the call succeeded")

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8,
    "max_position_embeddings": 32,
}

def own(name, kind="SparseBertModel"):
    how = {"search" if name == "dam_s" else "pattern": name}
    return getattr(sparsebert, kind)(sparsebert.SparseBertConfig(**SIZES, **how)).eval()
"""
FROZEN = {"mask_config.json", "mask.safetensors"}
SEARCHES = {"own": set(), "attached": {"search_config.json"}}  # what says that a mask is still searched


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(autouse=True)
def sound(hub):
    """No fault of one test is left for the next."""
    yield
    hub.faults.clear()


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    client = Client(hub, tmp_path_factory.mktemp("hf_home"))
    client.run(SETUP)
    yield client
    client.close()


@pytest.fixture(scope="module")
def masks(client):
    """Two masks of one base in a repository, and another one on a branch."""
    client.run("""
mask_of("bigbird", base_model="user/base").push_to_hub("user/masks", subfolder="bigbird-87")
mask_of("window", base_model="user/base").push_to_hub("user/masks", subfolder="window-80")
mask_of("star").push_to_hub("user/masks", subfolder="bigbird-87", revision="v2")
""")
    return "user/masks"


# By name


def test_masks_of_a_repository_by_name(hub, client, masks):
    repo = hub.repos[masks]
    names = {f"{name}/{file}" for name in ("bigbird-87", "window-80") for file in ("mask_config.json", "README.md")}
    assert names <= set(repo.files) and "mask_config.json" not in repo.files
    client.run("""
for arguments, name in (
    ({"subfolder": "bigbird-87"}, "bigbird"),
    ({"subfolder": "window-80"}, "window"),
    ({"subfolder": "bigbird-87", "revision": "v2"}, "star"),
):
    assert sparsebert.SparseMask.from_pretrained("user/masks", **arguments) == mask_of(name)
    model = sparsebert.attach(tiny(), "user/masks", **arguments)
    assert model.sparse_attention.mask == mask_of(name)
call = lambda: sparsebert.attach(tiny(), "bigbird", subfolder="bigbird-87")
refused(call, ValueError, "subfolder has meaning only for")
""")


def test_masks_lists_them(client, masks, tmp_path):
    entries = json.loads(client.done("masks", masks, "--json"))
    names = [(entry["name"], entry["made_by"]) for entry in entries]
    assert names == [("bigbird-87", "bigbird"), ("window-80", "window")]
    assert {entry["base_model"] for entry in entries} == {"user/base"}
    assert all(entry["length"] == 16 and entry["num_heads"] == 4 for entry in entries)
    table = client.done("masks", masks)
    assert "window-80" in table and f"{entries[0]['sparsity']:.1%}" in table and "1 x 4" in table
    only = json.loads(client.done("masks", masks, "--subfolder", "bigbird-87", "--revision", "v2", "--json"))
    assert [entry["made_by"] for entry in only] == ["star"]
    client.done("pull", masks, "--output_dir", tmp_path / "copy")
    assert json.loads(client.done("masks", tmp_path / "copy", "--json")) == entries
    assert "copy/bigbird-87" in client.done("masks", tmp_path)


def test_readme_of_a_repository_of_masks_lists_them(hub, masks):
    text = hub.read(masks, "README.md").decode()
    assert "[bigbird-87](bigbird-87)" in text and "[window-80](window-80)" in text
    assert 'sparsebert.attach(model, "user/masks", subfolder="bigbird-87")' in text
    card = hub.read(masks, "window-80/README.md").decode()
    assert 'AutoModel.from_pretrained("user/base"), "user/masks", subfolder="window-80")' in card


def test_a_mask_that_is_not_there_names_those_that_are(client, masks, tmp_path):
    client.done("pull", masks, "--output_dir", tmp_path / "copy")
    for words in ([masks], [masks, "--subfolder", "bigbird"], [tmp_path / "copy"]):
        assert "bigbird-87, window-80" in client.refused("plan", *words, code=2)


def test_verbs_take_revision_and_subfolder(client, masks, tmp_path):
    star = ["--subfolder", "bigbird-87", "--revision", "v2"]
    shown = json.loads(client.done("plan", masks, *star, "--json"))
    assert shown["sparsity"] == plan(build_pattern("star", 16, 4)).as_json()["sparsity"]
    verdict = json.loads(client.done("theory", masks, *star, "--json"))
    assert [case["universal"] for case in verdict] == ["yes"]  # of bigbird on main it says that no theorem applies
    client.done("draw", masks, *star, "--output_dir", tmp_path / "pictures")
    client.done("draw", masks, "--subfolder", "bigbird-87", "--output_dir", tmp_path / "main")
    pictures = [(tmp_path / folder / "bigbird-87.png").read_bytes() for folder in ("pictures", "main")]
    assert pictures[0] != pictures[1]
    client.done("analyze", masks, *star, "--output_dir", tmp_path / "analysis")
    assert json.loads((tmp_path / "analysis" / "importance.json").read_text())["pattern"] == "star"


def test_models_in_subfolders(hub, client, tmp_path):
    """Pushed by the command, read by verbs and by `load`."""
    folder = tmp_path / "model"
    client.run(f"""
from sparsebert.data.tokenization import train_tokenizer
model = sparsebert.attach(tiny(), "bigbird", mask_length=16)
model.save_pretrained({str(folder)!r})
train_tokenizer([["a text of some words"]], 100).save_pretrained({str(folder)!r})
""")
    client.done("push", folder, "--repo_id", "user/models", "--subfolder", "first", "--revision", "v1")
    assert hub.repos["user/models"].files.keys() & {"first/config.json"} == set()
    assert "first/model.safetensors" in hub.repos["user/models"].branches["v1"].files
    client.run("""
loaded = sparsebert.load("user/models", subfolder="first", revision="v1").eval()
ids = torch.arange(12)[None]
torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)
""")
    at = ["--subfolder", "first", "--revision", "v1"]
    client.done(
        "lengthen", "user/models", *at, "--length", 48, "--length_policy", "dense", "--output_dir", tmp_path / "longer"
    )
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["max_position_embeddings"] == 48
    words = ["lengthen", folder, "--revision", "v1", "--length", 48, "--output_dir", tmp_path / "no"]
    assert "revision 'v1' has no meaning for the folder" in client.refused(*words, code=2)


# Push and pull


def test_pushed_folder_comes_back_as_it_was(hub, client, tmp_path):
    folder, back = tmp_path / "run", tmp_path / "back"
    client.run(f"""
model = sparsebert.attach(tiny(), "window", mask_length=16)
model.save_pretrained({str(folder)!r})
""")
    for name in ("training_args.bin", "checkpoint-1/config.json", "runs/log", "_lock", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    printed = client.done("push", folder, "--repo_id", "user/run", "--private", "--commit_message", "First")
    pushed = {"config.json", "model.safetensors", "mask_config.json", "mask.safetensors", "README.md", "notes.txt"}
    assert set(hub.repos["user/run"].files) == pushed and hub.repos["user/run"].private
    assert "/user/run/commit/" in printed
    client.done("pull", "user/run", "--output_dir", back)
    assert {path.name for path in back.iterdir()} == pushed
    assert {path.name for path in tmp_path.iterdir()} == {"run", "back"}
    for name in pushed - {"README.md"}:
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    assert 'sparsebert.load("user/run")' in (back / "README.md").read_text()
    assert "is not empty" in client.refused("pull", "user/run", "--output_dir", back, code=2)
    client.done("pull", "user/run", "--output_dir", back, "--overwrite")
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    client.done("pull", "user/run", "--output_dir", tmp_path / "link")
    (tmp_path / "here/mine").mkdir()
    stale = ("metrics.json", "trainer_state.json", "mask_logits.safetensors", "model-00001-of-00002.safetensors")
    for name in ("old.txt", "mine/a.py", "recipe.yaml", *stale):
        (tmp_path / "here" / name).write_text("{}")
    (tmp_path / "here/empty").mkdir()
    (tmp_path / "here").chmod(0o700)
    client.done("pull", "user/run", "--output_dir", tmp_path / "link", "--overwrite")
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700
    kept = {"old.txt", "mine", "empty", "recipe.yaml"}  # results, logits and weights would be those of another model
    assert {path.name for path in (tmp_path / "here").iterdir()} == pushed | kept and not list(tmp_path.glob(".*"))
    assert (tmp_path / "here/mine/a.py").is_file()
    for place in (".", ".."):
        said = client.refused("pull", "user/run", "--output_dir", place, code=2)
        assert "is the current folder, or contains it, and cannot be replaced" in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    (tmp_path / "other" / "config.json").write_text('{"of": "a program"}')
    said = client.refused("pull", "user/run", "--output_dir", tmp_path / "other", "--overwrite", code=2)
    assert "holds neither model nor mask" in said and (tmp_path / "other" / "letter.txt").is_file()


def test_mask_alone_and_pull_request(hub, client, tmp_path):
    folder = tmp_path / "run"
    client.run(f'sparsebert.attach(tiny(), "window", mask_length=16).save_pretrained({str(folder)!r})')
    client.done("push", folder, "--repo_id", "user/alone", "--subfolder", "window-80", "--mask_only")
    files = {"mask_config.json", "mask.safetensors", "README.md"}
    assert set(hub.repos["user/alone"].files) == {"README.md", *(f"window-80/{name}" for name in files)}
    card = hub.read("user/alone", "window-80/README.md").decode()
    assert "without a model" in card and "sparsebert.attach(" in card and "pipeline_tag" not in card
    assert "sparsebert.load" not in card and "trust_remote_code" not in card
    printed = client.done("push", folder, "--repo_id", "user/alone", "--create_pr")
    assert printed.strip().endswith("/user/alone/discussions/1")
    assert "config.json" not in hub.repos["user/alone"].files
    assert "config.json" in hub.repos["user/alone"].branches["refs/pr/1"].files


def test_card_of_a_model_in_a_subfolder(hub, client, tmp_path):
    client.run(f'own("window", "SparseBertForMaskedLM").save_pretrained({str(tmp_path)!r})')
    client.done("push", tmp_path, "--repo_id", "user/top")
    assert "trust_remote_code=True" in hub.read("user/top", "README.md").decode()
    client.done("push", tmp_path, "--repo_id", "user/below", "--subfolder", "a")
    card = hub.read("user/below", "a/README.md").decode()
    assert "needs the package" in card and "trust_remote_code" not in card and "library_name: sparsebert" in card


def test_what_is_not_pushed(hub, client, tmp_path):
    (tmp_path / "_unfinished.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pickled").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "pickled" / name).write_text("{}")
    before = len(hub.requests)
    for folder, said in (
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path, "has not finished"),
        (ROOT / "docs", "holds no config.json and no mask_config.json"),
        (ROOT / "benchmarks" / "masks", "dam_s_512"),
        (tmp_path / "pickled", "has its weights in pytorch_model.bin alone, which is pickled"),
    ):
        assert said in client.refused("push", folder, "--repo_id", "user/none", code=2)
    assert len(hub.requests) == before


# In Python


def test_masks_and_errors(hub, client):
    client.run("""
from huggingface_hub import errors, snapshot_download

keep = torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.5
mask = sparsebert.SparseMask(keep, 16, special_tokens="first_last", metadata={"base_model": "user/base"})
for pushed in (mask, mask.without_diagonal()):
    pushed.push_to_hub("user/mask")
    loaded = sparsebert.SparseMask.from_pretrained("user/mask")
    assert loaded == pushed and loaded.metadata == {"base_model": "user/base"}
    assert sparsebert.SparseMask.from_pretrained(snapshot_download("user/mask")) == pushed

load = sparsebert.SparseMask.from_pretrained
refused(lambda: load("user/missing"), errors.RepositoryNotFoundError, "user/missing")
refused(lambda: load("user/mask", revision="missing"), errors.RevisionNotFoundError, "user/mask")
refused(lambda: mask.push_to_hub("user/mask", token="hf_wrong"), errors.HfHubHTTPError, "401")
""")
    assert set(hub.repos["user/mask"].files) >= FROZEN and hub.repos["user/mask"].lfs == {"mask.safetensors"}


@pytest.fixture
def online(client):
    yield
    client.run("huggingface_hub.constants.HF_HUB_OFFLINE = False")


def test_models_come_back(hub, client, online, tmp_path):
    """Also from the cache, and a searched mask that only the pushed file knows."""
    client.run(f"""
made = {{name: own(how, "SparseBertForMaskedLM") for name, how in (("pattern", "bigbird"), ("searched", "dam_s"))}}
made["searched"].freeze(sparsity=0.5)
made |= {{"frozen": sparsebert.attach(tiny(), "window", mask_length=16), "stock": tiny()}}
made["searching"] = sparsebert.attach(tiny(), "dam_s", mask_length=16)
for name, model in made.items():
    if name == "searched":
        model.save_pretrained({str(tmp_path)!r}, push_to_hub=True, repo_id=f"user/{{name}}")
    else:
        model.push_to_hub(f"user/{{name}}")
""")
    for name in ("pattern", "searched", "frozen"):
        assert {"config.json", "model.safetensors", *FROZEN} <= set(hub.repos[f"user/{name}"].files)
        assert hub.repos[f"user/{name}"].lfs == {"model.safetensors", "mask.safetensors"}
    check = """
from sparsebert.analysis.saved_runs import read_run
ids = torch.arange(5, 17)[None]
for name, model in made.items():
    stock = sparsebert.SparseBertForMaskedLM if name in ("pattern", "searched") else transformers.DistilBertForMaskedLM
    for loader in (transformers.AutoModelForMaskedLM, stock):
        fields = {"token": "hf_local", "revision": "main", "output_loading_info": True}
        loaded, report = loader.from_pretrained(f"user/{name}", **fields)
        assert type(loaded) is type(model) and not report["missing_keys"] and not report["unexpected_keys"], report
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        mask = loaded.sparse_attention.mask if name != "stock" else None
        assert (mask is None) == (name in ("stock", "searching"))
        if mask is not None:
            assert model.sparse_attention.mask == mask and 0.1 < mask.sparsity < 0.95
            assert sparsebert.SparseMask.from_pretrained(f"user/{name}") == read_run(f"user/{name}").mask == mask
"""
    client.run(check)
    requests = len(hub.requests)
    client.run(f"import huggingface_hub.constants\nhuggingface_hub.constants.HF_HUB_OFFLINE = True\n{check}")
    assert len(hub.requests) == requests


def test_masks_of_parts_come_back(hub, client, online, tmp_path):
    """Those of parts that carry none anymore are deleted by a push of the folder."""
    client.run(f"""
sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
encoder = transformers.BertModel(transformers.BertConfig(**sizes))
decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
both = transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(decoder)).eval()
for part in (both.encoder, both.decoder):
    sparsebert.attach(part, "window", mask_length=8)
both.push_to_hub("user/pushed")
both.save_pretrained({str(tmp_path)!r}, push_to_hub=True, repo_id="user/parts", private=True, commit_message="Mine")
""")
    assert hub.repos["user/parts"].files.keys() - {"README.md"} == hub.repos["user/pushed"].files.keys() - {
        "README.md"
    }
    assert {f"mask-{part}/{name}" for part in ("encoder", "decoder") for name in FROZEN} <= set(
        hub.repos["user/parts"].files
    )
    check = """
ids = torch.arange(5, 13)[None]
for name in ("pushed", "parts"):
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(f"user/{name}", token="hf_local")
    torch.testing.assert_close(loaded(ids, decoder_input_ids=ids).logits, both(ids, decoder_input_ids=ids).logits)
    assert loaded.encoder.sparse_attention.mask == loaded.decoder.sparse_attention.mask
"""
    client.run(check)
    requests = len(hub.requests)
    client.run(f"import huggingface_hub.constants\nhuggingface_hub.constants.HF_HUB_OFFLINE = True\n{check}")
    assert len(hub.requests) == requests
    client.run("huggingface_hub.constants.HF_HUB_OFFLINE = False")
    client.run(f"sparsebert.detach(both.decoder)\nboth.save_pretrained({str(tmp_path)!r})")
    assert client(["push", tmp_path, "--repo_id", "user/parts"])[0] == 0
    files = set(hub.repos["user/parts"].files)
    assert {f"mask-encoder/{name}" for name in FROZEN} <= files and not any("mask-decoder" in name for name in files)
    for part, left in ((None, True), ("both.encoder", False)):
        client.run(f"sparsebert.detach({part})" if part else "")
        client.run("both.push_to_hub('user/pushed')")
        files = set(hub.repos["user/pushed"].files)
        assert any("mask-encoder" in name for name in files) == left and not any("mask-decoder" in n for n in files)


def test_a_repository_holds_one_state_of_a_mask(hub, client, tmp_path):
    """A search pushed over a frozen mask, a mask over a search: each in one commit."""
    client.run(f"""
for kind in ("own", "attached"):
    for index, name in enumerate(("window", "dam_s", "bigbird")):
        model = own(name) if kind == "own" else sparsebert.attach(tiny("DistilBertModel"), name, mask_length=32)
        if index == 2:
            model.save_pretrained({str(tmp_path)!r} + f"/{{kind}}", push_to_hub=True, repo_id=f"user/turns_{{kind}}")
        else:
            model.push_to_hub(f"user/turns_{{kind}}")
        loaded = sparsebert.load(f"user/turns_{{kind}}")
        assert type(loaded) is type(model) and loaded.sparse_attention.searching == (name == "dam_s"), (kind, name)
        assert loaded.sparse_attention.mask == model.sparse_attention.mask
        weights = model.state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in loaded.state_dict().items())
sparsebert.detach(model).push_to_hub("user/dense")
refused(lambda: sparsebert.load("user/dense"), sparsebert.MaskFileError, "user/dense: there is no mask_config.json")
""")
    state = FROZEN | {"search_config.json"}
    for kind, search in SEARCHES.items():
        commits = hub.repos[f"user/turns_{kind}"].commits
        assert [files & state for files in commits] == [FROZEN, search, FROZEN]


CLAIMS = {*FROZEN, "README.md", "modeling_frozen_sparsebert.py"}


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained", "command"])
def test_a_dense_model_replaces_one_with_a_mask(hub, client, tmp_path, how):
    """In one commit: mask, card and code go, notes and the file of another tool stay; the next push asks no more."""
    repo, folder = f"user/dense_{how}", tmp_path / "model"
    client.run(f"""
from huggingface_hub import HfApi
torch.manual_seed(0)
bert = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
sparsebert.attach(bert, "window", mask_length=16).push_to_hub({repo!r})
for name, content in (("notes.txt", b"mine"), ("search_config.json", b'{{"of": "a tuner"}}')):
    HfApi().upload_file(path_or_fileobj=content, path_in_repo=name, repo_id={repo!r})
""")
    assert CLAIMS <= hub.repos[repo].files.keys()
    commits = len(hub.repos[repo].commits)
    client.run("sparsebert.detach(bert)")
    for _ in range(2):
        if how == "push_to_hub":
            client.run(f'bert.push_to_hub({repo!r}, commit_message="Dense", tags=["mine"])')
        elif how == "save_pretrained":
            folder.mkdir(exist_ok=True)
            (folder / "letter.txt").write_text("not asked for")
            client.run(f"bert.save_pretrained({str(folder)!r}, push_to_hub=True, repo_id={repo!r})")
        else:
            client.run(f"bert.save_pretrained({str(folder)!r})")
            client.done("push", folder, "--repo_id", repo)
    first, second = hub.repos[repo].commits[commits:]
    kept = {"config.json", "model.safetensors", "notes.txt", "search_config.json"}
    assert first - {".gitattributes"} == kept and second - {"README.md", ".gitattributes"} == kept
    client.run(f"""
assert type(transformers.AutoModel.from_pretrained({repo!r})) is transformers.BertModel
bert.push_to_hub("user/no_mask_{how}", revision="v1")
""")
    assert "config.json" in hub.repos[f"user/no_mask_{how}"].branches["v1"].files


def test_an_adapter_replaces_one_with_a_mask(hub, client):
    pytest.importorskip("peft")
    client.run("""
import peft
def adapter(mask):
    model = tiny() if mask is None else sparsebert.attach(tiny(), mask, mask_length=16)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_lin"], r=2))
for mask in ("window", "dam_s", None):
    adapter(mask).push_to_hub("user/adapter")
""")
    state = FROZEN | {"search_config.json", "mask_logits.safetensors"}
    commits = [files & state for files in hub.repos["user/adapter"].commits]
    assert commits == [FROZEN, {"search_config.json", "mask_logits.safetensors"}, set()]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= hub.repos["user/adapter"].files.keys()


def test_no_path_of_this_machine_is_pushed(hub, client, tmp_path):
    """The model of a mask is named by its folder where that is used, and not at all in a repository."""
    pytest.importorskip("peft")
    client.run(f"""
import peft
tiny().save_pretrained({str(tmp_path / "base")!r})
read = lambda: transformers.AutoModelForMaskedLM.from_pretrained({str(tmp_path / "base")!r})
made = sparsebert.attach(read(), "dam_s", mask_length=16)
made.push_to_hub("user/paths_search")
mask = made.freeze(sparsity=0.5)
mask.save_pretrained({str(tmp_path / "mask")!r})
made.save_pretrained({str(tmp_path / "model")!r})
made.push_to_hub("user/paths")
mask.push_to_hub("user/paths_mask")
loaded = sparsebert.SparseMask.from_pretrained("user/paths_mask")
assert loaded == mask and loaded.metadata["base_model"] is None
assert sparsebert.load("user/paths_search").sparse_attention.searching
sparsebert.attach(read(), {str(tmp_path / "mask")!r}, strict=True)
lora = peft.LoraConfig(target_modules=["q_lin"], r=2)
peft.get_peft_model(sparsebert.attach(read(), mask), lora).push_to_hub("user/paths_adapter")
""")
    client.done("push", tmp_path / "model", "--repo_id", "user/paths_run")
    for repo in ("paths_search", "paths", "paths_mask", "paths_run", "paths_adapter"):
        for name in ("mask_config.json", "search_config.json"):
            if name in hub.repos[f"user/{repo}"].files:
                assert str(tmp_path).encode() not in hub.read(f"user/{repo}", name), (repo, name)
    assert str(tmp_path / "base") in (tmp_path / "model" / "mask_config.json").read_text()


def test_a_run_replaces_the_files_of_another(hub, client, tmp_path):
    """But not those of a user. Weights are never beside other weights, one of which would be loaded."""
    client.run(f"""
from pathlib import Path
from huggingface_hub import HfApi
from sparsebert.masks.pushing import push_folder

model, runs = own("window"), Path({str(tmp_path)!r})
for number, written in enumerate((
    ("metrics.json", "predictions_test.jsonl", "MNLI-m.tsv", "heads.png"), ("metrics.json",), ("vocab.txt",)
)):
    folder = runs / f"run{{number}}"
    model.save_pretrained(folder, max_shard_size="200KB" if number else "2KB")
    for name in (*written, "notes.txt"):
        (folder / name).write_text("{{}}")
    for place in (None, "small"):
        push_folder(folder, "user/runs", subfolder=place)
    if number < 2:
        if not number:
            (folder / "README.md").write_text("# Mine")
        push_folder(folder, "user/others")
push_folder(runs / "run0", "user/others")  # whole weights, then shards
api = HfApi()
api.create_repo("user/new")
for name in ("adapter_config.json", "results.md", "metrics.json", "model_notes.safetensors"):
    api.upload_file(path_or_fileobj=b"{{}}", path_in_repo=name, repo_id="user/new")
push_folder(runs / "run2", "user/new")
""")
    code = "modeling_frozen_sparsebert.py"
    last = hub.repos["user/runs"].commits[-1]
    own = {"config.json", "model.safetensors", *FROZEN, "README.md", "notes.txt", "vocab.txt", code}
    assert last - {".gitattributes"} == own | {f"small/{name}" for name in own}
    whole, sharded = hub.repos["user/others"].commits[-2:]
    kept = {"metrics.json", "predictions_test.jsonl", "MNLI-m.tsv", "heads.png"}
    assert kept < whole and {name for name in whole if name.startswith("model")} == {"model.safetensors", code}
    assert kept < sharded and "model.safetensors" not in sharded and "model.safetensors.index.json" in sharded
    new = hub.repos["user/new"].files.keys()
    assert not any(name.startswith("adapter") for name in new)  # it would be applied to the model
    output = tmp_path / "out"
    client.done("pull", "user/runs", "--output_dir", output)
    others = ("adapter_config.json", "tokenizer.json")  # which would be read with the model, or in place of its own
    for name in others:
        (output / name).write_text("{}")
    client.done("pull", "user/runs", "--output_dir", output, "--overwrite")
    assert (output / "config.json").is_file() and not any((output / name).exists() for name in others)
    assert {"results.md", "metrics.json", "model_notes.safetensors", "model.safetensors"} < new


def test_pushes_of_a_trainer_hold_one_state_of_a_mask(hub, client, tmp_path):
    """At no commit there is the mask of another model, and those of checkpoints contain theirs."""
    client.run(f"""
from transformers import TrainingArguments
from sparsebert.training.trainer import SparseBertTrainer

rows = [{{"input_ids": [1, 2, 3, 4] * 8, "labels": [1, 2, 3, 4] * 8}}] * 8

def trained(kind, name, strategy=None, end=1.0):
    attached = kind == "attached"
    model = sparsebert.attach(tiny(), name, mask_length=32) if attached else own(name, "SparseBertForMaskedLM")
    arguments = TrainingArguments({str(tmp_path)!r} + f"/{{kind}}", max_steps=2, save_steps=1, use_cpu=True,
        push_to_hub=strategy is not None, hub_model_id=f"user/trained_{{kind}}", hub_strategy=strategy or "end",
        hub_always_push=True, report_to="none", disable_tqdm=True)
    schedule = sparsebert.SearchSchedule(end)
    trainer = SparseBertTrainer(model, arguments, train_dataset=rows, callbacks=[schedule])
    if strategy is not None:
        trainer.train()
    return trainer

def write(name):
    with open(f"{{trainer.args.output_dir}}/{{name}}", "w") as file:
        file.write("{{}}")

for kind in ("own", "attached"):
    for name in ("window", "dam_s", "bigbird")[kind == "attached" :]:
        trainer = trained(kind, name)
        trainer.push_to_hub()
        loaded = sparsebert.load(f"user/trained_{{kind}}").sparse_attention
        assert loaded.searching == (name == "dam_s"), (kind, name)
        assert loaded.mask == trainer.model.sparse_attention.mask
    trainer = trained(kind, "dam_s", "all_checkpoints", 0.5)  # frozen after the first of two checkpoints
    loaded = sparsebert.load(f"user/trained_{{kind}}").sparse_attention
    assert loaded.mask == trainer.model.sparse_attention.mask is not None, kind

write("metrics.json")
trainer.push_results()
trainer.args.hub_token = "hf_wrong"
write("later.json")
trainer.push_results()  # a finished run does not fail for it
""")
    for kind, search in SEARCHES.items():
        commits = hub.repos[f"user/trained_{kind}"].commits
        states = [files & (FROZEN | {"search_config.json"}) for files in commits]
        assert states[-1] == FROZEN and search in states
        assert all(state in (FROZEN, search, set()) for state in states), states
        last = commits[-1]
        assert {f"checkpoint-2/{name}" for name in (MANIFEST_NAME, "mask_probs.safetensors")} <= last
        assert f"checkpoint-1/{MANIFEST_NAME}" in last
    assert "metrics.json" in last and "later.json" not in last


def test_pushes_of_any_trainer(hub, client, tmp_path):
    """No path of this machine is in them. One of a model without a mask deletes that of the model before."""
    client.run(f"""
from transformers import EncoderDecoderModel, Trainer, TrainingArguments
from sparsebert.training.trainer import SparseBertTrainer

tiny().save_pretrained({str(tmp_path / "base")!r})
rows = [{{"input_ids": [1, 2, 3, 4] * 8, "labels": [1, 2, 3, 4] * 8}}] * 8

def pushed(kind, repo, model, how="end"):
    arguments = TrainingArguments({str(tmp_path)!r} + f"/{{repo}}", max_steps=2, save_steps=1, use_cpu=True,
        push_to_hub=True, hub_model_id=f"user/{{repo}}", hub_strategy=how, hub_always_push=True, report_to="none",
        disable_tqdm=True)
    trainer = kind(model, arguments, train_dataset=rows)
    if how != "end":
        trainer.train()
    if kind is Trainer or how == "end":
        trainer.push_to_hub()

def read(mask=None):
    model = transformers.AutoModelForMaskedLM.from_pretrained({str(tmp_path / "base")!r})
    return model if mask is None else sparsebert.attach(model, mask, mask_length=32)

def both():
    part = lambda kind, **fields: getattr(transformers, kind)(transformers.BertConfig(**SIZES, **fields))
    decoder = part("BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=part("BertModel"), decoder=decoder)
    model.config.decoder_start_token_id = model.config.pad_token_id = 0
    return model

for kind, repo in ((Trainer, "stock"), (SparseBertTrainer, "ours")):
    pushed(kind, repo, read("dam_s"), "all_checkpoints")
pushed(SparseBertTrainer, "dense", read("window"))
pushed(SparseBertTrainer, "dense", read())
bert = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
sparsebert.attach(bert, "window", mask_length=32).push_to_hub("user/code")
pushed(SparseBertTrainer, "code", read("dam_s"))
model = both()
sparsebert.attach(model.encoder, "window", mask_length=32)
pushed(SparseBertTrainer, "parts", model, "every_save")
assert EncoderDecoderModel.from_pretrained("user/parts").encoder.sparse_attention.mask is not None
sparsebert.detach(model.encoder)
pushed(SparseBertTrainer, "parts", model)
""")
    for repo in ("stock", "ours"):
        names = [name for name in hub.repos[f"user/{repo}"].files if name.endswith("search_config.json")]
        assert "search_config.json" in names and "checkpoint-1/search_config.json" in names
        assert not any(str(tmp_path).encode() in hub.read(f"user/{repo}", name) for name in names)
        assert str(tmp_path / "base") in (tmp_path / repo / "search_config.json").read_text()
    for repo in ("dense", "code", "parts"):
        names = {name.split("/")[-1] for name in hub.repos[f"user/{repo}"].files}
        assert "model.safetensors" in names and not names & FROZEN and "modeling_frozen_sparsebert.py" not in names
    commits = [{name for name in files if name.startswith("mask-")} for files in hub.repos["user/parts"].commits]
    assert all(FROZEN <= {name.split("/")[1] for name in files} or not files for files in commits) and any(commits)


# Faults


@pytest.fixture
def shared(hub, client, tmp_path):
    client.run(f"""
mask_of("bigbird").push_to_hub("user/shared")
mask_of("bigbird").save_pretrained({str(tmp_path / "mask")!r})
""")
    return "user/shared"


def test_cut_connections_are_tried_again(hub, client, shared, tmp_path):
    """A download goes on within the file, an upload sends it again."""
    hub.faults += [Fault(r"GET .*/resolve/.*/mask\.safetensors", "cut", 2), Fault("PUT /lfs", 500, 2)]
    client.done("pull", shared, "--output_dir", tmp_path / "out")
    assert (tmp_path / "out" / "mask.safetensors").read_bytes() == hub.read(shared, "mask.safetensors")
    client.run('mask_of("logsparse").save_pretrained(' + repr(str(tmp_path / "new")) + ")")
    client.done("push", tmp_path / "new", "--repo_id", shared)
    assert [fault.times for fault in hub.faults] == [0, 0]
    assert hub.read(shared, "mask.safetensors") == (tmp_path / "new" / "mask.safetensors").read_bytes()


@pytest.mark.parametrize("what", ["cut", 503, "flip"])
def test_a_pull_that_fails_never_looks_complete(hub, client, shared, tmp_path, what):
    """Repeated once the Hub is well again, it succeeds."""
    output = tmp_path / "out"
    hub.faults.append(Fault(r"GET .*/resolve/.*/mask\.safetensors", what))
    said = client.refused("pull", shared, "--output_dir", output)
    assert "user/shared" in said and "mask.safetensors" in said and "run the same command again" in said
    assert not output.exists()
    hub.faults.clear()
    client.done("pull", shared, "--output_dir", output)
    assert (output / "mask.safetensors").read_bytes() == hub.read(shared, "mask.safetensors")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("subfolder", [None, "star-80"])
def test_a_pull_refuses_a_mask_that_cannot_be_read(hub, client, tmp_path, subfolder):
    """What arrived is what the Hub has, of which a byte was changed there."""
    repo, output = f"user/changed_{subfolder}", tmp_path / "out"
    path = f"{subfolder}/mask.safetensors" if subfolder else "mask.safetensors"
    client.run(f"""
mask_of("star").push_to_hub({repo!r}, subfolder={subfolder!r})
from huggingface_hub import HfApi, hf_hub_download
content = bytearray(open(hf_hub_download({repo!r}, {path!r}), "rb").read())
content[-1] ^= 1
HfApi().upload_file(path_or_fileobj=bytes(content), path_in_repo={path!r}, repo_id={repo!r})
""")
    for words in ([], ["--subfolder", subfolder] if subfolder else []):
        said = client.refused("pull", repo, "--output_dir", output, *words, code=2)
        assert f"{repo}: {path}: not the file that" in said and f"nothing was written to {output}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what, error", [(500, "sparsebert.MaskFileError"), ("drop", "ConnectionError")])
def test_a_mask_that_the_hub_does_not_give_is_missed(hub, client, tmp_path, what, error):
    """Though the weights arrive: a model that was saved with a mask is never loaded without it."""
    client.run('sparsebert.attach(tiny(), "window", mask_length=16).push_to_hub("user/given")')
    hub.faults.append(Fault("mask_config", what))
    client.run(f"""
for number, loader in enumerate((transformers.AutoModel, transformers.DistilBertForMaskedLM, sparsebert)):
    load = getattr(loader, "from_pretrained", None) or loader.load
    place = {str(tmp_path)!r} + f"/{{number}}"
    refused(lambda: load("user/given", cache_dir=place), {error}, "user/given: ", "mask_config.json")
""")


def test_errors_of_the_connection_name_the_file_in_python(hub, client, shared):
    """One of the Hub about a revision names that, too."""
    check = """
for call in (sparsebert.SparseMask.from_pretrained, sparsebert.load):
    refused(lambda: call("user/shared", **{fields}), OSError, *{parts})
"""
    client.run(check.format(fields={"revision": "v9"}, parts=["user/shared: there is no revision 'v9'"]))
    hub.faults.append(Fault("GET .*/resolve/.*", "cut"))
    client.run(check.format(fields={"force_download": True}, parts=["user/shared: ", "the connection to", "again"]))


@pytest.mark.parametrize("killed", ["before the new folder", "after it"])
def test_a_pull_that_was_killed_while_it_replaced_goes_on(client, shared, tmp_path, killed):
    output, aside = tmp_path / "out", tmp_path / ".out.unfinished"
    client.done("pull", shared, "--output_dir", output)
    (output / "mine.txt").write_text("mine")
    if killed == "after it":
        shutil.copytree(output, aside / "replaced")
        (output / "mine.txt").unlink()
    else:
        aside.mkdir()
        output.rename(aside / "replaced")
        assert "is not empty" in client.refused("pull", shared, "--output_dir", output, code=2)
    client.done("pull", shared, "--output_dir", output, "--overwrite")
    assert (output / "mine.txt").read_text() == "mine" and not aside.exists()


def test_a_pull_keeps_what_it_does_not_replace(hub, client, shared, tmp_path):
    """The user's README.md, the weights of a model, and folders with masks, also with brackets in their names."""
    output = tmp_path / "out"
    client.done("pull", shared, "--output_dir", output)
    (output / "README.md").write_text("# mine")
    client.done("pull", shared, "--output_dir", output, "--overwrite")
    assert (output / "README.md").read_text() == "# mine" and (output / "mask.safetensors").is_file()
    for name in ("adapter_config.json", "tokenizer.json"):
        (output / name).write_text("{}")
    client.done("pull", shared, "--output_dir", output, "--overwrite")  # a mask alone replaces neither
    assert (output / "adapter_config.json").is_file() and (output / "tokenizer.json").is_file()
    (output / "model.safetensors").write_bytes(b"weights")
    said = client.refused("pull", shared, "--output_dir", output, "--overwrite", code=2)
    assert "holds the weights of a model (model.safetensors), and user/shared has none" in said
    assert (output / "model.safetensors").read_bytes() == b"weights"
    for name in ("a[1]", "b*"):
        client.done("push", tmp_path / "mask", "--repo_id", "user/many", "--subfolder", name)
        client.done("pull", "user/many", "--subfolder", name, "--output_dir", tmp_path / name)
        assert (tmp_path / name / "mask.safetensors").is_file() and not (tmp_path / name / name).exists()
    for overwrite in ((), ("--overwrite",)):
        client.done("pull", "user/many", "--output_dir", tmp_path / "all", *overwrite)
    assert (tmp_path / "all/a[1]/mask.safetensors").is_file() and (tmp_path / "all/b*/mask.safetensors").is_file()


def test_a_second_pull_into_a_folder_is_refused(client, shared, tmp_path):
    (tmp_path / ".out.unfinished").mkdir()
    with FileLock(tmp_path / ".out.unfinished/_lock"):
        said = client.refused("pull", shared, "--output_dir", tmp_path / "out", code=2)
    assert "out is being pulled by another process: choose another, or wait" in said
    client.done("pull", shared, "--output_dir", tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("request_, what", [("PUT /lfs", 500), ("POST .*/commit/", 500), ("PUT /lfs", "drop")])
def test_a_push_that_fails_changes_nothing(hub, client, tmp_path, request_, what):
    # At a length of its own: the Hub would not ask for a file again that it has.
    length = 20 + len(f"{request_}{what}")
    client.run(f'sparsebert.build_pattern("star", {length}, 4).save_pretrained({str(tmp_path / "mask")!r})')
    client.run('mask_of("window").push_to_hub("user/kept")')
    before = dict(hub.repos["user/kept"].files)
    hub.faults.append(Fault(request_, what))
    said = client.refused("push", tmp_path / "mask", "--repo_id", "user/kept")
    assert "run the same command again" in said
    assert hub.repos["user/kept"].files == before


def test_wrong_names_and_tokens_are_one_line(hub, client, shared, tmp_path):
    out = tmp_path / "out"
    mask = tmp_path / "mask"
    for words, parts in (
        (["pull", "user/nowhere", "--output_dir", out], ["user/nowhere: there is no such repository"]),
        (["pull", shared, "--revision", "v9", "--output_dir", out], ["user/shared: there is no revision 'v9'"]),
        (["pull", shared, "--token", "hf_no", "--output_dir", out], ["user/shared: not allowed", "hf auth login"]),
        (["push", mask, "--repo_id", "user/x", "--token", "hf_no"], ["the new repository: not allowed", "auth login"]),
        (["plan", shared, "--revision", "v9"], ["user/shared: there is no revision 'v9'"]),
        (["masks", "user/nowhere"], ["user/nowhere: there is no such repository"]),
        (["masks", shared, "--token", "hf_no"], ["user/shared: not allowed"]),
    ):
        said = client.refused(*words)
        assert all(part in said for part in parts), said
    said = client.refused("pull", shared, "--subfolder", "no", "--output_dir", out, code=2)
    assert "there is nothing in subfolder 'no'" in said
    assert not out.exists()
    hub.faults.append(Fault("", 503))
    assert "the Hub failed with status 503" in client.refused("masks", shared)


def test_no_token_is_written(client, tmp_path, checkpoints, finetuning_flags):
    """A run on a model of the Hub: its recipe and checkpoints know the model's revision, not the token."""
    run = tmp_path / "run"
    client.run('mask_of("star").push_to_hub("user/stars", subfolder="star-80")')
    client.done("push", checkpoints["stock"], "--repo_id", "user/model", "--revision", "v1")
    words = ["--model", "user/model", "--revision", "v1", "--token", "hf_local", "--mask", "user/stars"]
    words += ["--mask_subfolder", "star-80", "--max_length", 16, "--save_strategy", "steps", "--save_steps", 1]
    client.done(*finetuning_flags(run, *words))
    assert "revision: v1" in (run / "recipe.yaml").read_text()
    written = [path for path in run.rglob("*") if path.is_file()]
    assert len(written) > 10 and not [path for path in written if b"hf_local" in path.read_bytes()]
    assert json.loads((run / "metrics.json").read_text())["mask"] == "star-80"
    assert "base_model: user/model" in (run / "README.md").read_text()


def test_a_run_pushed_by_its_trainer_is_whole_elsewhere(hub, client, tmp_path, finetuning_flags):
    """Without the lock and the mark of a run that goes on, which are in the folder while it is pushed."""
    for flags in ((), ("--overwrite",)):
        words = finetuning_flags(tmp_path / "run", "--push_to_hub", "--hub_model_id", "user/pushed", *flags)
        client.done(*words)
        files = set(hub.repos["user/pushed"].files)
        assert "mask.safetensors" in files and not [name for name in files if "lock" in name or "unfinished" in name]
        for name in ("metrics.json", "recipe.yaml", "heads.png", "README.md"):
            assert hub.read("user/pushed", name) == (tmp_path / "run" / name).read_bytes(), name
        assert b"model-index" in hub.read("user/pushed", "README.md")
    client.done("pull", "user/pushed", "--output_dir", tmp_path / "pulled")
    client.done("push", tmp_path / "pulled", "--repo_id", "user/again")


# Cards


def test_card_of_a_repository_is_ours_or_stays(hub, client, tmp_path):
    """A model's names the repository and has the tags that were asked for; one that a user wrote stays."""
    client.run("""
model = sparsebert.attach(tiny(), "window", mask_length=16)
model.push_to_hub("user/card", tags=["mine"])
model.push_to_hub("user/card")
""")
    card = hub.read("user/card", "README.md").decode()
    assert "More Information Needed" not in card and card.count("\n- mine\n") == 1
    assert card.startswith("---\nlibrary_name: sparsebert\n") and 'sparsebert.load("user/card")' in card
    client.run("""
from huggingface_hub import HfApi
HfApi().upload_file(path_or_fileobj=b"# Mine", path_in_repo="README.md", repo_id="user/card")
model.push_to_hub("user/card")
mask_of("star").push_to_hub("user/card")
mask_of("star").push_to_hub("user/card", subfolder="star-80")
""")
    client.run(f'mask_of("star").save_pretrained({str(tmp_path)!r})')
    assert "pushed mask.safetensors, mask_config.json\n" in client.done("push", tmp_path, "--repo_id", "user/card")
    assert hub.read("user/card", "README.md") == b"# Mine"
    assert b'"user/card", subfolder="star-80"' in hub.read("user/card", "star-80/README.md")


def test_base_model_on_the_hub_is_named_with_its_revision(hub, client, tmp_path):
    client.run(f"""
tiny().push_to_hub("user/tiny")
base = transformers.AutoModelForMaskedLM.from_pretrained("user/tiny")
sparsebert.attach(base, "window", mask_length=16).save_pretrained({str(tmp_path)!r})
searched = transformers.AutoModelForMaskedLM.from_pretrained("user/tiny")
sparsebert.attach(searched, "dam_s", mask_length=16).save_pretrained({str(tmp_path / "search")!r})
searched.freeze().save_pretrained({str(tmp_path / "mask")!r})
""")
    revision = hub.repos["user/tiny"].sha
    card = (tmp_path / "README.md").read_text()
    assert "\nbase_model: user/tiny\n" in card
    assert f"\nbase_model_revision: {revision}\n" in card
    for name in ("search/search_config.json", "mask/mask_config.json"):
        found = json.loads((tmp_path / name).read_text())
        assert (found["base_model"], found["base_model_revision"]) == ("user/tiny", revision)
    client.run(f"""
with torch.no_grad():
    base.get_input_embeddings().weight.add_(1)
sparsebert.detach(base).push_to_hub("user/tiny")
new = transformers.AutoModelForMaskedLM.from_pretrained("user/tiny")
refused(lambda: sparsebert.attach(new, {str(tmp_path / "mask")!r}, strict=True), ValueError, "{revision}")
""")
