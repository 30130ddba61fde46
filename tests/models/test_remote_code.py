"""
Saved models where sparsebert is not installed: by the code beside them, in a process that cannot import the package.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import TINY
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

import sparsebert
from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseBertModel, SparseMask, attach, load
from sparsebert.models.model_configs import AUTO_CLASSES, CODE_PATH


LENGTH = 24
# Weights with which heads and generated text depend on the mask.
LARGE = {"initializer_range": 0.3}
# A keep table and everything about it that a file can say.
DRAW = torch.Generator().manual_seed(0)
FORMS = {
    "offsets": {"keep": torch.rand(2, 4, 9, generator=DRAW) < 0.4, "special_tokens": "first_last", "length": LENGTH},
    "offsets_extended": {"keep": torch.rand(4, 16, generator=DRAW) < 0.4, "special_tokens": "first", "length": 16},
    "blocks": {
        **{"keep": torch.rand(4, 4, generator=DRAW) < 0.5, "form": "blocks", "block_size": 4, "length": 16},
        **{"length_policy": "dense", "special_tokens": "first_last", "last_token": "position"},
    },
    "table": {"keep": torch.rand(2, 4, LENGTH, LENGTH, generator=DRAW) < 0.2, "length": LENGTH, "diagonal": True},
    "table_dense": {"keep": torch.rand(4, 16, 16, generator=DRAW) < 0.2, "length": 16, "length_policy": "dense"},
    "empty_rows": {"keep": torch.rand(4, LENGTH, LENGTH, generator=DRAW) < 0.1, "length": LENGTH, "diagonal": False},
}
FORMS["offsets_position"] = FORMS["offsets"] | {"last_token": "position"}
FORMS["offsets_diagonal"] = FORMS["offsets"] | {"diagonal": False}
FORMS["offsets_rest"] = FORMS["offsets"] | {"rest": "mean", "rest_bias": torch.randn(2, 4, generator=DRAW)}
FORMS["table_rest"] = FORMS["empty_rows"] | {"rest": "mean"}
FORMS["offsets_signed"] = FORMS["offsets"] | {"keep": torch.rand(4, 17, generator=DRAW) < 0.4, "symmetric": False}
FORMS["offsets_columns"] = FORMS["offsets_signed"] | {"special_rows": False, "rest": "mean"}
FORMS["blocks_signed"] = FORMS["blocks"] | {"keep": torch.rand(4, 7, generator=DRAW) < 0.4, "symmetric": False}
FORMS["blocks_slabs"] = FORMS["blocks_signed"] | {"query_block_size": 2 * FORMS["blocks"]["block_size"]}
FORMS["table_columns"] = FORMS["table"] | {"special_tokens": "first", "special_rows": False}
for name, mask_fields in FORMS.items():
    FORMS[name] = {"form": "offsets" if "offsets" in name else "table"} | mask_fields


def inputs(length=LENGTH):
    """Four sequences: padded on the left, on the right, whole, and one real token."""
    real = torch.ones(4, length, dtype=torch.long)
    real[0, :7] = real[1, -5:] = real[3, 1:] = 0
    return {"input_ids": torch.randint(1, 100, (4, length)), "attention_mask": real}


def save(model, folder, auto, **given):
    """A folder with the model, an input and what the model makes of it."""
    given = given or inputs()
    with torch.no_grad():
        output = model.eval()(**given)
    expected = [value for value in output.to_tuple() if torch.is_tensor(value)]
    model.save_pretrained(folder)
    tensors = {f"in.{name}": value for name, value in given.items()}
    tensors |= {f"out.{index}": value.contiguous() for index, value in enumerate(expected)}
    save_file(tensors, folder / "expected.safetensors")
    (folder / "auto").write_text(auto)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny models: `served`, one for each form of a mask and each head, and `refused`."""
    root = tmp_path_factory.mktemp("models")
    served, refused = root / "served", root / "refused"
    torch.manual_seed(0)
    for name, fields in FORMS.items():
        model = SparseBertModel(SparseBertConfig(**TINY, **LARGE, pattern="window", allow_empty_rows=True))
        model.set_mask(SparseMask(**fields))
        save(model, served / name, "AutoModel")
    given = inputs()
    given["attention_mask"] = torch.rand(4, 1, LENGTH, LENGTH) < 0.5
    for name in ("offsets", "empty_rows"):
        save(load(served / name), served / f"{name}_and_mask_of_the_caller", "AutoModel", **given)
    for auto in AUTO_CLASSES:
        decoder = {"is_decoder": True} if auto == "AutoModelForCausalLM" else {}
        search = {"mask_length": LENGTH, "search": "dam_s", "sparsity_weight": 0.0, "share_layers": False}
        config = SparseBertConfig(**TINY, **LARGE, **search, **decoder)
        model = getattr(transformers, auto).from_config(config)
        with torch.no_grad():
            model.sparse_attention.mask_logits.normal_()
        model.freeze()
        given = inputs()
        if auto == "AutoModelForMultipleChoice":
            given = {key: value[None] for key, value in given.items()}
        save(model, served / auto, auto, **given)
    pattern = {"pattern": "strided_cycle", "head_configuration": "sequential", "mask_length": 16}
    save(SparseBertModel(SparseBertConfig(**TINY, **pattern, length_policy="dense")), served / "pattern", "AutoModel")
    # What was a stock BERT, as a model and as the fields of a configuration.
    BertModel(BertConfig(**TINY)).save_pretrained(root / "stock")
    window = {"pattern": "window", "mask_length": LENGTH}
    save(SparseBertModel.from_pretrained(root / "stock", **window), served / "from_bert", "AutoModel")
    fields = BertConfig(**TINY).to_dict()
    save(SparseBertModel(SparseBertConfig(**fields, **window)), served / "from_fields", "AutoModel")
    attached = attach(BertForSequenceClassification(BertConfig(**TINY, **LARGE)), "bigbird", mask_length=LENGTH)
    save(attached, served / "attached", "AutoModelForSequenceClassification")
    SparseBertModel(SparseBertConfig(**TINY, search="dam_s")).save_pretrained(refused / "searching")
    mixers = SparseBertConfig(**TINY, pattern="window", token_mixers=["average", "attention"])
    SparseBertModel(mixers).save_pretrained(refused / "mixers")
    mapped = SparseBertConfig(**TINY, pattern="window", probability_map="sparsemax")
    SparseBertModel(mapped).save_pretrained(refused / "mapped")
    attach(BertModel(BertConfig(**TINY)), "dam_s").save_pretrained(refused / "attached_search")
    SparseBertModel.from_pretrained(served / "table").save_pretrained(refused / "other_mask")
    bits = (served / "empty_rows" / "mask.safetensors").read_bytes()
    (refused / "other_mask" / "mask.safetensors").write_bytes(bits)
    return root


CLIENT = """
import json
import sys
from pathlib import Path

sys.modules["sparsebert"] = None  # so that importing it fails

import torch
import transformers
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

root, saved, report = Path(sys.argv[1]), Path(sys.argv[2]), {}


def inputs_of(folder):
    tensors = load_file(folder / "expected.safetensors")
    return {name[3:]: value for name, value in tensors.items() if name.startswith("in.")}, tensors


def error_of(model, folder):
    given, tensors = inputs_of(folder)
    with torch.no_grad():
        output = [value for value in model.eval()(**given).to_tuple() if torch.is_tensor(value)]
    expected = [tensors[f"out.{index}"] for index in range(sum(name.startswith("out.") for name in tensors))]
    return max((value - want).abs().max().item() for value, want in zip(output, expected, strict=True))


def said(call):
    try:
        call()
    except Exception as error:
        return str(error)


def load(folder, auto="AutoModel", **arguments):
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **arguments)


for folder in sorted((root / "served").iterdir()):
    auto = (folder / "auto").read_text()
    model, info = load(folder, auto, attn_implementation="eager", output_loading_info=True)
    report[f"{folder.name} eager"] = [error_of(model, folder), *map(list, list(info.values())[:2])]
    with torch.no_grad():
        output = model(**inputs_of(folder)[0], output_hidden_states=True, output_attentions=True)
    inside = {name: torch.stack(output.get(name) or ()) for name in ("hidden_states", "attentions")}
    save_file(inside, saved / f"{folder.name}.safetensors")
    model = load(folder, auto, attn_implementation="sdpa")
    report[f"{folder.name} sdpa"] = [error_of(model, folder)]
    if folder.name in ("AutoModelForMaskedLM", "attached"):
        model.save_pretrained(saved / folder.name)
        again = load(saved / folder.name, auto)(**inputs_of(folder)[0], output_hidden_states=True)
        report[f"{folder.name} again"] = len(again.hidden_states)
    if folder.name == "AutoModelForCausalLM":
        report["generated"] = model.generate(torch.arange(1, 6)[None], max_new_tokens=6, do_sample=False).tolist()
    if folder.name == "offsets_rest":
        dtypes = set()
        model.base_model.encoder.layer[0].attention.self.query.register_forward_hook(
            lambda module, args, output: dtypes.add(str(output.dtype))
        )
        with torch.autocast("cpu", torch.float16):
            report["autocast"] = error_of(model, folder), *dtypes
    if folder.name.startswith("empty_rows"):
        half = torch.float16, torch.bfloat16
        report[f"{folder.name} halves"] = [error_of(model.to(dtype), folder) for dtype in half]

folder = root / "served" / "offsets"
given, _ = inputs_of(folder)
model = load(folder, attn_implementation="eager").eval()
exported = torch.export.export(model, (), given).module()
report["exported"] = (exported(**given)[0] - model(**given)[0]).abs().max().item()
report["fields"] = [getattr(model.config, name) for name in ("model_type", "mask_length", "frozen")]
long = torch.ones(1, 30, dtype=torch.long)
report["changed"] = list(load(root / "served" / "table", length_policy="dense")(long)[0].shape)

positions = torch.arange(3).repeat(2)[None]
report["constant"] = list(model(torch.ones_like(positions), position_ids=0 * positions)[0].shape)
report["packed"] = said(lambda: model(torch.ones_like(positions), position_ids=positions))
model.set_attn_implementation("flex_attention")
report["flex"] = said(lambda: model(**given))
for refused in sorted((root / "refused").iterdir()):
    report[refused.name] = said(lambda: load(refused))
report["untrusted"] = said(lambda: transformers.AutoModel.from_pretrained(folder))
report["long"] = said(lambda: load(root / "served" / "table")(long))

HfApi().create_repo("user/model")
HfApi().upload_folder(repo_id="user/model", folder_path=folder)
model = load("user/model")
report["from the hub"] = error_of(model, folder)
model.push_to_hub("user/again")
report["pushed"] = torch.equal(load("user/again").keep, model.keep)
model.save_pretrained(saved / "secret", push_to_hub=True, repo_id="user/secret", private=True, commit_message="Mine")
report["secret"] = HfApi(token="hf_local").model_info("user/secret").private
(saved / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    """What a process without sparsebert reports about the folders, what it said, and a folder of what it saved."""
    saved = tmp_path_factory.mktemp("saved")
    options = {"capture_output": True, "text": True, "timeout": 300}
    with HubServer() as hub:
        options["env"] = hub.environment(saved / "home") | {"OMP_NUM_THREADS": "1"}
        # No terminal on which it could be asked whether to trust code.
        command = [sys.executable, "-c", CLIENT, str(folders), str(saved)]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, **options)
    assert result.returncode == 0, result.stderr
    return json.loads((saved / "report.json").read_text()), result.stderr, saved


def test_every_form_and_head_equals_the_package(client, folders):
    report = client[0]
    given = [f"{name}_and_mask_of_the_caller" for name in ("offsets", "empty_rows")]
    for name in (*FORMS, *AUTO_CLASSES, "pattern", "attached", *given, "from_bert", "from_fields"):
        for kind in ("eager", "sdpa"):
            error, *wrong = report[f"{name} {kind}"]
            assert error <= 1e-5 and not any(wrong), (name, kind, error, wrong)
    assert report["exported"] <= 1e-5 and report["from the hub"] <= 1e-5
    for name in ("empty_rows", "empty_rows_and_mask_of_the_caller"):
        halves = report[f"{name} halves"]
        assert halves[0] <= 0.1 and halves[1] <= 0.3, (name, halves)
    error, *dtypes = report["autocast"]
    assert error <= 0.1 and dtypes == ["torch.float16"], report["autocast"]
    assert report["pushed"] and report["secret"]
    assert report["AutoModelForMaskedLM again"] == report["attached again"] == TINY["num_hidden_layers"] + 1
    assert report["fields"] == ["sparsebert", LENGTH, True] and report["changed"] == [1, 30, 32]


def test_generates_what_the_package_generates(client, folders):
    model = load(folders / "served" / "AutoModelForCausalLM").eval()
    expected = model.generate(torch.arange(1, 6)[None], max_new_tokens=6, do_sample=False)
    assert client[0]["generated"] == expected.tolist()


def test_hidden_states_and_attentions_are_those_under_the_mask(client, folders):
    for name in ("offsets", *AUTO_CLASSES, "attached"):
        folder = folders / "served" / name
        tensors = load_file(folder / "expected.safetensors")
        given = {key[3:]: value for key, value in tensors.items() if key.startswith("in.")}
        model = load(folder, output_attentions=True, output_hidden_states=True).eval()
        with torch.no_grad():
            expected = model(**given)
        for kind, got in load_file(client[2] / f"{name}.safetensors").items():
            want = torch.stack(expected[kind])
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0, msg=lambda text, at=(name, kind): f"{at}: {text}")


def test_what_it_cannot_do_is_refused_in_a_line(client):
    report = client[0]
    assert "attn_implementation 'flex_attention' cannot apply the mask" in report["flex"]
    assert report["constant"][:2] == [1, 6]
    assert "position_ids restart within a row: packed rows" in report["packed"]
    assert "this model needs the package sparsebert" in report["searching"]
    assert "still being searched" in report["searching"] and "\n" not in report["searching"]
    assert "it has token mixers or a probability map" in report["mixers"] and report["mixers"] == report["mapped"]
    assert "there is no frozen mask" in report["attached_search"]
    assert "input of 30 tokens is longer than the mask (24)" in report["long"]
    assert "is not the file that mask_config.json was written with" in report["other_mask"]
    assert "trust_remote_code=True" in report["untrusted"]
    assert client[1].count("install the package sparsebert") == 1  # how to get the fast one


@pytest.mark.parametrize("name", ["AutoModelForMaskedLM", "attached"])
def test_what_it_saves_is_read_by_the_package(client, folders, name):
    saved = client[2] / name
    tensors = load_file(folders / "served" / name / "expected.safetensors")
    model = load(saved).eval()
    assert type(model).__name__ == type(load(folders / "served" / name)).__name__
    assert model.sparse_attention.mask == load(folders / "served" / name).sparse_attention.mask
    with torch.no_grad():
        output = model(**{key[3:]: value for key, value in tensors.items() if key.startswith("in.")})
    torch.testing.assert_close(output.logits, tensors["out.0"])
    assert "model_weights_sample" not in (saved / "mask_config.json").read_text()  # they may have been trained
    config = json.loads((saved / "config.json").read_text())
    assert config["auto_map"][(folders / "served" / name / "auto").read_text()].startswith(CODE_PATH.stem)
    assert (saved / CODE_PATH.name).read_bytes() == CODE_PATH.read_bytes()


@pytest.mark.parametrize("name", ["from_bert", "from_fields", "attached"])
def test_saved_again_a_configuration_is_the_same(folders, name, tmp_path):
    load(folders / "served" / name).save_pretrained(tmp_path)
    first, second = (
        json.loads((folder / "config.json").read_text()) for folder in (folders / "served" / name, tmp_path)
    )
    assert second == first


def test_code_names_what_the_package_registers(folders):
    saved = json.loads((folders / "served" / "pattern" / "config.json").read_text())["auto_map"]
    assert saved.pop("AutoConfig") == f"{CODE_PATH.stem}.SparseBertConfig"
    registered = {}
    for auto in (name for name in dir(transformers) if name.startswith("AutoModel")):
        mapping = getattr(getattr(transformers, auto), "_model_mapping", None)
        if mapping is not None and SparseBertConfig in mapping:
            registered[auto] = f"{CODE_PATH.stem}.{mapping[SparseBertConfig].__name__}"
    assert saved == registered


def test_with_the_package_its_own_classes_win(folders):
    for arguments in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
        model = AutoModel.from_pretrained(folders / "served" / "offsets", **arguments)
        assert type(model) is SparseBertModel and type(model.config) is SparseBertConfig
        assert not hasattr(model.config, "auto_map") and not hasattr(model.config, "how_to_load")
    model = load(folders / "served" / "attached", AutoModelForSequenceClassification, trust_remote_code=True)
    assert model.stock_class is BertForSequenceClassification


def test_a_configuration_in_memory_stays_as_it_was(tiny_config, tmp_path):
    stock = BertModel(tiny_config(BertConfig))
    before = dict(vars(stock.config))
    model = attach(stock, "window", mask_length=16)
    model.save_pretrained(tmp_path)
    assert "auto_map" in json.loads((tmp_path / "config.json").read_text())
    loaded = load(tmp_path)
    for each in (model, loaded):
        assert {"auto_map", "how_to_load"}.isdisjoint(vars(sparsebert.detach(each).config))
    assert vars(stock.config).keys() - before.keys() <= {"architectures", "dtype"}
    loaded.save_pretrained(tmp_path / "stock")
    assert not {"auto_map", "how_to_load"} & json.loads((tmp_path / "stock" / "config.json").read_text()).keys()


def test_register_for_auto_class(tiny_config, tmp_path):
    SparseBertConfig.register_for_auto_class()
    SparseBertModel.register_for_auto_class("AutoModel")
    SparseBertForMaskedLM.register_for_auto_class(transformers.AutoModelForMaskedLM)
    with pytest.raises(ValueError, match="SparseBertForMaskedLM is loaded by AutoModelForMaskedLM, got 'AutoModel'"):
        SparseBertForMaskedLM.register_for_auto_class()
    SparseBertModel(tiny_config(pattern="window")).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {CODE_PATH.name}


def test_a_class_of_the_user_is_saved_by_transformers(tiny_config, tmp_path):
    class Own(SparseBertModel):
        """Defined here, so that this file is what is copied."""

    Own.register_for_auto_class("AutoModel")
    Own(tiny_config(pattern="window")).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == "test_remote_code.Own"
    assert auto_map["AutoModelForMaskedLM"] == f"{CODE_PATH.stem}.SparseBertForMaskedLM"
    assert {path.name for path in tmp_path.glob("*.py")} >= {CODE_PATH.name, Path(__file__).name}
