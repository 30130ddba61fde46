"""Mistakes in calls of the library: each ends in an error that names what is wrong, and nothing is written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import covering
from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig, BertForMaskedLM, TrainingArguments

from sparsebert import (
    ProgressivePruning,
    SearchSchedule,
    SparseBertConfig,
    SparseBertTrainer,
    SparseMask,
    attach,
    build_pattern,
    extend_positions,
    load,
    plan,
    quantize,
    sparse_dot_product_attention,
    sparsity,
)
from sparsebert.commands import main


def window(heads=4, **fields):
    return build_pattern("window", 32, heads, **fields)


def saved(**metadata):
    keep = torch.ones(1, 4, 8, dtype=torch.bool)
    SparseMask(keep, 8, "offsets", metadata=metadata).save_pretrained("mask")


def attention(mask, **arguments):
    return sparse_dot_product_attention(*torch.rand(3, 1, 4, 8, 4), mask, **arguments)


MISTAKES = {
    "progress in percent": (lambda m: m("dam_s").sparse_attention.set_progress(50), "must be in [0, 1], got 50"),
    "progress NaN": (lambda m: m("dam_s").sparse_attention.set_progress(float("nan")), "progress must be in [0, 1]"),
    "set nothing": (lambda m: m().set_mask(None), "mask must be a SparseMask, or a bool tensor"),
    "freeze text": (lambda m: m("dam_s").freeze(sparsity="0.9"), "sparsity must be in [0, 1), got '0.9'"),
    "freeze twice said": (lambda m: m("dam_s").freeze(0.5, 0.5), "threshold 0.5 and sparsity 0.5 exclude each other"),
    "schedule text": (lambda m: SearchSchedule("0.5"), "search_end must be a number from 0 to 1, got '0.5'"),
    "schedule steps": (lambda m: SearchSchedule(1000), "search_end must be a number from 0 to 1, got 1000"),
    "schedule threshold": (lambda m: SearchSchedule(0.5, threshold=2), "threshold must be in [0, 1), got 2"),
    "schedule percent": (lambda m: SearchSchedule(0.5, sparsity=90), "sparsity must be in [0, 1), got 90"),
    "schedule metadata": (
        lambda m: SearchSchedule(0.5, metadata={"sparsity": 0.5}),
        "metadata: the names must be text, and not those of a mask's own fields, got 'sparsity'",
    ),
    "freeze metadata": (lambda m: m("dam_s").freeze(metadata={"length": 5}), "metadata: the names must be text"),
    "metadata tuple": (lambda m: saved(run=(1, 2)), "metadata: run must hold JSON values, such as lists instead of"),
    "metadata keys": (lambda m: saved(run={1: 2}), "metadata: run must hold JSON values, such as lists instead of"),
    "schedule both": (lambda m: SearchSchedule(0.5, 0.4, 0.5), "threshold 0.4 and sparsity 0.5 exclude each other"),
    "config typo": (lambda m: SparseBertConfig(target_sparsty=0.9), "'target_sparsty'; did you mean 'target_sp"),
    "config search": (lambda m: SparseBertConfig(serach="dam_u"), "unknown field 'serach'; did you mean 'search'?"),
    "load nothing": (lambda m: load("runs/nothing/here"), "there is no folder 'runs/nothing/here'"),
    "load file": (lambda m: (saved(), load("mask/mask_config.json")), "is a file, expected a folder or Hub id"),
    "load mask": (lambda m: (saved(), load("mask")), "mask holds a mask without a model: give it to"),
    "load name of class": (lambda m: load("x", "BertModel"), "model_class must be a class of transformers"),
    "mask of numpy": (lambda m: SparseMask(np.ones((4, 8, 8), bool), 8), "keep must be a bool tensor, got ndarray"),
    "mask without data": (lambda m: SparseMask(torch.ones(4, 8, 8, dtype=torch.bool, device="meta"), 8), "on meta"),
    "mask sparse": (lambda m: SparseMask(torch.ones(4, 8, 8, dtype=torch.bool).to_sparse(), 8), "torch.sparse_coo"),
    "metadata text": (lambda m: window().replace(metadata="mine"), "metadata must be a dict, got str"),
    "metadata tensor": (lambda m: saved(loss=torch.tensor(1.0)), "metadata: loss must hold JSON values"),
    "metadata search": (lambda m: saved(search=5), "metadata: search must be a name or null, got 5"),
    "metadata form": (lambda m: saved(form="mine"), "metadata: the names must be text, and not those of a mask's own"),
    "metadata sample": (lambda m: saved(model_weights_sample=""), "not those of a mask's own fields, got 'model_w"),
    "length text": (lambda m: window().to_table("8"), "length must be an integer from 1 to 65536, got '8'"),
    "density of no token": (lambda m: window().density_at(0), "length must be an integer of at least 1, got 0"),
    "empty rows of fewer": (lambda m: window().num_empty_rows(-3), "length must be an integer of at least 1, got -3"),
    "pattern huge": (lambda m: build_pattern("random", 10**6, 12), "length must be an integer from 1 to 65536"),
    "plan name": (lambda m: plan("window"), "expected a model of transformers, got str"),
    "plan dtype": (lambda m: plan(window(), 32, dtype="bfloat16"), "dtype must be a dtype of torch, got 'bfloat16'"),
    "plan device": (lambda m: plan(window(), 32, device="gpu"), "device must be a device of torch"),
    "sparsity of nothing": (lambda m: sparsity(None), "expected a model of transformers, got NoneType"),
    "extend nothing": (lambda m: extend_positions(None, 80), "expected a model of transformers, got NoneType"),
    "attention table": (lambda m: attention(window().to_table(8)), "mask must be a SparseMask, got Tensor"),
    "attention layer": (
        lambda m: attention(SparseMask(torch.ones(2, 4, 8, 8, dtype=torch.bool), 8)),
        "layer must say which of the mask's 2 layers to apply, got None",
    ),
    "revision of a folder": (
        lambda m: (saved(), load("mask", revision="main")),
        "revision 'main' has no meaning for the folder mask, only for a Hub id",
    ),
    "revision of a mask's folder": (
        lambda m: (saved(), m("./mask", revision="main")),
        "revision 'main' has no meaning for the folder ./mask",
    ),
    "train in int8": (lambda m: quantize(m()).train(), "are in int8, and cannot be trained: train the model before"),
    "train in int8 inside": (lambda m: torch.nn.Sequential(quantize(m())).train(), "in int8, and cannot be trained"),
    "attention backend": (lambda m: attention(window(), backend="cpu"), "backend must be one of sparse_eager"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tiny_config, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)

    def make(mask="window", **fields):
        return attach(BertForMaskedLM(tiny_config(BertConfig)), mask, **fields)

    mistake, said = MISTAKES[name]
    with pytest.raises((ValueError, FileNotFoundError, StrictDataclassError)) as caught:
        mistake(make)
    assert said in str(caught.value)
    assert not Path("mask/mask_config.json").exists() or "load" in name or "revision" in name


def test_a_class_that_would_ignore_the_mask(checkpoints):
    with pytest.raises(ValueError, match="model_class BertForMaskedLM would ignore the mask of"):
        load(checkpoints["window"], BertForMaskedLM)


def test_pruning_and_a_search_that_ends(tiny_config, tmp_path):
    model = attach(BertForMaskedLM(tiny_config(BertConfig)), "dam_s")
    rows = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.ones(8, dtype=torch.long)}] * 4
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True)
    callbacks = [ProgressivePruning(0.5), SearchSchedule(0.5)]
    trainer = SparseBertTrainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    with pytest.raises(ValueError, match="search_end 0.5 has no meaning with pruning"):
        trainer.train()
    assert trainer.state.global_step == 0


def forged(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def pickled(content):
    def change(folder):
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return change


def indexed(content):
    def change(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


# What is wrong in the folder of a model, and what is said of it.
FORGED = {
    "vocab_size": (forged(vocab_size=99), "word_embeddings.weight has shape (100, 32), expected (99, 32)"),
    "hidden_act": (forged(hidden_act="gelo"), "unknown hidden_act in the config.json of MODEL 'gelo'; did you mean"),
    "architectures": (forged(architectures=5), "architectures: 5 is not a model of transformers"),
    "architectures as a dict": (forged(architectures={"a": 1}), "architectures: {'a': 1} is not a model"),
    "other architecture": (forged(architectures=["GPT2Model"]), "a model of type 'gpt2' cannot carry a mask"),
    "dtype": (forged(dtype=5), "dtype in the config.json of MODEL must be a floating-point type of torch, got 5"),
    "dtype of integers": (forged(dtype="int8"), "must be a floating-point type of torch, got torch.int8"),
    "pad_token_id": (forged(pad_token_id=1000), "MODEL: the model cannot be loaded (AssertionError: Padding_idx"),
    "intermediate_size": (forged(intermediate_size=-1), "MODEL: the model cannot be loaded (RuntimeError: "),
    "layers": (forged(num_hidden_layers=10**6), "num_hidden_layers in the config.json of MODEL must be at most 1024"),
    "pickled object": (pickled([Path("x")]), "MODEL: its pickled weights hold other things than tensors"),
    "part elsewhere": (indexed({"weight_map": {"a": "../stock/model.safetensors"}}), "index.json is damaged"),
    "parts null": (indexed(None), "model.safetensors.index.json is damaged"),
    "parts without names": (indexed({"weight_map": {"a": [1]}}), "model.safetensors.index.json is damaged"),
}
VERBS = {"plan": [], "report": [], "lengthen": ["--length", "64", "--output_dir", "out"]}


@pytest.mark.parametrize("fault, kind", covering([*FORGED], ["frozen", "searching"]))
def test_forged_models(tiny_config, said, monkeypatch, tmp_path, kind, fault):
    monkeypatch.chdir(tmp_path)
    model = BertForMaskedLM(tiny_config(BertConfig))
    attach(model, "window" if kind == "frozen" else "dam_s", mask_length=32).save_pretrained("MODEL")
    change, message = FORGED[fault]
    change(Path("MODEL"))
    with pytest.raises(ValueError) as caught:
        load("MODEL")
    assert message in str(caught.value)
    for verb, flags in VERBS.items():
        if verb == "report" and (kind == "frozen" or "architecture" in fault):
            continue  # it reads the mask alone, and takes no head
        assert message in said([verb, "MODEL", *flags])
    assert not Path("out").exists()


@pytest.mark.parametrize("kind", ["frozen", "stock"])
def test_no_kernel_of_a_configuration_is_fetched(checkpoints, tiny_config, monkeypatch, tmp_path, kind):
    def fetch(name, *args, **kwargs):
        raise AssertionError(f"the Hub is asked for {name}")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoints["stock"], "MODEL")
    if kind == "frozen":
        attach(BertForMaskedLM(tiny_config(BertConfig)), "window", mask_length=32).save_pretrained("MODEL")
    forged(attn_implementation="evil/kernel")(Path("MODEL"))
    assert main(["lengthen", "MODEL", "--length", "64", "--output_dir", "out"]) == 0
    if kind == "frozen":
        assert load("MODEL").config._attn_implementation == "sparse_auto"
        assert main(["plan", "MODEL"]) == 0


@pytest.mark.parametrize("name", ["logging", "set_seed", "__file__", "Trainer", ["BertModel"], 5, ""], ids=str)
def test_forged_architectures_are_not_called(checkpoints, tmp_path, name):
    model = Path(shutil.copytree(checkpoints["window"], tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    with pytest.raises(ValueError, match="architectures"):
        load(model)
