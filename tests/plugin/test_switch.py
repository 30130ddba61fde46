"""Other libraries before, while and after the plugin extends them."""

import importlib
import importlib.util
import os
import pickle
import sys
from contextlib import nullcontext

import pytest
import torch
from conftest import TINY
from huggingface_hub import HfApi
from processes import run_fresh
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    EncoderDecoderModel,
    PreTrainedModel,
)

import sparsebert
from sparsebert import SparseBertConfig, SparseBertForMaskedLM, attach, load, plugin
from sparsebert.plugin.replacements import AfterImport


IDS = torch.arange(5, 17)[None]


@pytest.fixture(autouse=True)
def enabled_afterwards():
    yield
    plugin.enable()


@pytest.mark.parametrize("state", ["frozen", "searching"])
def test_explicit_functions_work_while_it_is_disabled(state, tmp_path):
    plugin.disable()
    model = BertForMaskedLM(BertConfig(**TINY)).eval()
    attach(model, "window" if state == "frozen" else "dam_s", mask_length=12)
    model.save_pretrained(tmp_path / "attached")
    model.bert.save_pretrained(tmp_path / "encoder")
    fields = {"pattern": "window"} if state == "frozen" else {"search": "dam_s"}
    own = SparseBertForMaskedLM(SparseBertConfig(**TINY, mask_length=12, **fields)).eval()
    own.save_pretrained(tmp_path / "own")
    plugin.disable()  # what these have entered in tables
    for saved, folder in ((model, "attached"), (own, "own")):
        loaded = load(tmp_path / folder)
        assert type(loaded) is type(saved) and loaded.sparse_attention.searching == (state == "searching")
        torch.testing.assert_close(loaded(IDS).logits, saved(IDS).logits)
        encoder = load(tmp_path / folder, AutoModel, last_token="position")
        assert (encoder.sparse_attention.mask or encoder.sparse_attention.config).last_token == "position"
    if state == "frozen":
        assert load(tmp_path / "encoder").sparse_attention.mask == model.sparse_attention.mask
    stock = BertForMaskedLM.from_pretrained(tmp_path / "attached")
    assert type(stock) is BertForMaskedLM is type(AutoModelForMaskedLM.from_pretrained(tmp_path / "attached"))
    with pytest.raises(RuntimeError, match="saved with a mask, and loaded without it"):
        stock(IDS)


def test_models_with_a_mask_still_run_once_it_is_disabled(tmp_path):
    model = attach(BertForMaskedLM(BertConfig(**TINY)).eval(), "window", mask_length=12)
    expected, content = model(IDS).logits, pickle.dumps(model)
    plugin.disable()
    for each in (model, pickle.loads(content)):
        torch.testing.assert_close(each(IDS).logits, expected)
        plugin.disable()


def test_classes_with_a_from_pretrained_of_their_own(tmp_path):
    class Own(BertForMaskedLM):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            model = super().from_pretrained(*args, **kwargs)
            model.note = "own"
            return model

    attach(Own(BertConfig(**TINY)), "window", mask_length=12).save_pretrained(tmp_path)
    for switch in (plugin.disable, plugin.enable):
        switch()
        model = load(tmp_path, Own)
        assert isinstance(model, Own) and model.note == "own" and model.sparse_attention.mask.length == 12
    assert hasattr(Own.from_pretrained(pretrained_model_name_or_path=tmp_path), "sparse_attention")


def test_methods_that_others_replaced_since(monkeypatch, tmp_path):
    """Theirs stay, and call the stock ones."""
    attach(BertForMaskedLM(BertConfig(**TINY)), "window", mask_length=12).save_pretrained(tmp_path)
    ours = vars(PreTrainedModel)["from_pretrained"].__func__
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", classmethod(lambda cls, *args, **kw: ours(cls, *args, **kw))
    )
    assert hasattr(BertForMaskedLM.from_pretrained(tmp_path), "sparse_attention")
    plugin.disable()
    with pytest.raises(ValueError, match="of the package sparsebert"):  # of transformers
        BertForMaskedLM.from_pretrained(tmp_path)
    assert load(tmp_path).sparse_attention.mask.length == 12


def test_a_second_import_changes_nothing():
    methods = [PreTrainedModel.from_pretrained.__func__, HfApi._prepare_upload_folder_additions]
    importlib.reload(sparsebert)
    assert [PreTrainedModel.from_pretrained.__func__, HfApi._prepare_upload_folder_additions] == methods


LATER = """
import sys
import sparsebert
from sparsebert.commands import main

assert main(["--help"]) == main(["search", "--help"]) == 0 and main(["serch"]) == 2
assert not {"torch", "transformers"} & {*sys.modules}
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

assert AutoConfig.for_model("sparsebert").search == "dam_s" and "sparse_auto" in ALL_ATTENTION_FUNCTIONS
method = PreTrainedModel.from_pretrained
assert method.__code__ is not method.__wrapped__.__code__
"""


def test_the_import_is_light_and_extends_transformers_once_that_is_imported():
    out, error = run_fresh(LATER)
    assert "--target_sparsity" in out and "did you mean 'search'" in error


def test_functions_after_an_import(tmp_path, monkeypatch):
    """They run when all that is being imported is whole, also if a part of it cannot be."""
    files = {
        "host_a/__init__": "",
        "host_a/wanted": "import host_a.rest",
        "host_a/rest": "",
        "host_a/outer": "import host_a.wanted; done = True",
        "host_b": "import host_a.outer; done = True",
        "host_a/broken": "import host_a.wanted, nothing_of_this_name",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    def look():
        seen.append([name for name in ("host_a.outer", "host_b") if getattr(sys.modules.get(name), "done", False)])

    for name, expected in (("host_a.wanted", []), ("host_b", ["host_a.outer", "host_b"]), ("host_a.broken", [])):
        for module in [module for module in sys.modules if module.startswith("host_")]:
            monkeypatch.delitem(sys.modules, module)
        waiting = AfterImport(look, "host_a.wanted", packages=("host_a", "host_b"))
        assert importlib.util.find_spec("host_b") and not seen
        with nullcontext() if name != "host_a.broken" else pytest.raises(ImportError):
            importlib.import_module(name)
        assert seen == [expected] and waiting not in sys.meta_path
        AfterImport(look, "host_a.wanted")
        assert seen.pop() == seen.pop()


def test_stock_models_and_pickles_stay_as_they_are(tmp_path):
    model = BertForMaskedLM(BertConfig(**TINY))
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is BertForMaskedLM and isinstance(again, PreTrainedModel)
    for function in (PreTrainedModel.save_pretrained, PreTrainedModel.from_pretrained, BertForMaskedLM.load_adapter):
        assert pickle.loads(pickle.dumps(function)) == function
    assert BertForMaskedLM.from_pretrained.__doc__ and "from_pretrained" in vars(PreTrainedModel)
    both = EncoderDecoderModel(encoder=model.bert, decoder=BertForMaskedLM(BertConfig(**TINY, is_decoder=True)))
    assert type(both) is EncoderDecoderModel


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_processes_are_extended(tmp_path):
    SparseBertConfig(**TINY).save_pretrained(tmp_path)
    method = PreTrainedModel.from_pretrained.__func__
    if (process := os.fork()) == 0:
        found = type(AutoConfig.from_pretrained(tmp_path)) is SparseBertConfig
        plugin.disable()
        os._exit(0 if found and PreTrainedModel.from_pretrained.__func__ is not method else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert PreTrainedModel.from_pretrained.__func__ is method
