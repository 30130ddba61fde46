"""Compiled models: equal to what they were made of, in every family and precision; saved, loaded and refused."""

import copy
import functools
import hashlib
import json
import os
import pickle
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.utils.sha import sha_fileobj
from test_attach import (
    IDS,
    IMAGES,
    LENGTH,
    MODELS,
    PADDING,
    REAL,
    base_model,
    head_model,
    inputs_of,
    random_mask,
    row,
)

import sparsebert
from sparsebert import SparseBertForMaskedLM, SparseBertModel, SparseMask, attach, load
from sparsebert.commands import main
from sparsebert.models.inference import compiled_files, compiling


openvino = pytest.importorskip("openvino")

# Of models with and without a mask.
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["dense", "sparse"])
BATCHES = [{"input_ids": IDS, "attention_mask": PADDING}, {"input_ids": IDS[:1, :7]}]


def a_mask(layers=1):
    return random_mask(layers, length_policy="dense", special_tokens="first")


def a_model(name="bert", masked=True, make=base_model, layers=1):
    layers = len(MODELS[name][1].get("layer_types", range(layers)))
    model = make(name, num_hidden_layers=layers)
    return attach(model, a_mask(1 if name == "albert" else layers)) if masked else model


def compiled(model, precision="float32", **arguments):
    return sparsebert.compile(copy.deepcopy(model), precision=precision, **arguments)


@pytest.fixture(scope="module")
def engines():
    """`engines(masked)`: a compiled BERT. To be called, not changed."""
    return functools.cache(lambda masked: compiled(a_model(masked=masked)))


def outputs(model, given):
    with torch.no_grad():
        return model(**given)


def assert_same(one, other, given, atol=1e-5):
    """Outputs are the same at real tokens."""
    ours, theirs = outputs(one, given), outputs(other, given)
    assert type(ours) is type(theirs) or set(ours) == set(theirs)
    real = given.get("attention_mask")
    for name, tensor in theirs.items():
        got = ours[name] if torch.is_tensor(tensor) else torch.stack(ours[name])
        want = tensor if torch.is_tensor(tensor) else torch.stack(tensor)
        per_token = real is not None and want.dim() > 2
        if per_token:
            got, want = got[..., real.bool(), :], want[..., real.bool(), :]
        torch.testing.assert_close(got, want, atol=atol, rtol=1e-4)


def text_inputs(ids=IDS, padding=PADDING):
    """By name: padding right, left, in between and none; lengths of one, odd, and beyond the mask's."""
    longer = ids.repeat(1, 3)[:, :31]
    between = torch.ones(3, 31, dtype=torch.long)
    between[0, 3:9] = between[1, 20:] = between[2, :5] = 0
    return {
        "right": {"input_ids": ids, "attention_mask": padding},
        "left": {"input_ids": ids, "attention_mask": padding.flip(-1)},
        "between": {"input_ids": longer, "attention_mask": between},
        "none": {"input_ids": longer},
        "one": {"input_ids": ids[:1, :1]},
    }


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        *(row(name, True) for name in MODELS),
        *((name, False) for name in ("modernbert", "mpnet", "roberta", "vit")),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("t5", "umt5")),
    ],
)
def test_families(name, masked):
    model = a_model(name, masked, layers=2)
    engine = compiled(model)
    if name in IMAGES:
        given = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "dinov2" else inputs_of(name)
        assert_same(engine, model, given)
        return
    ids = IDS.clone()
    ids[:, 2] = 4  # the masked tokens of ESM, which scales by their share
    for kind, given in text_inputs(ids).items():
        if kind == "left" and name == "mobilebert":
            continue  # its embeddings of trigrams mix in what is padding
        assert_same(engine, model, given)
    assert_same(engine, model, text_inputs()["right"] | {"output_hidden_states": True})


@pytest.mark.parametrize("name", ["bert", "modernbert", "distilbert", "vit"])
def test_eager_attention_becomes_that_of_the_engine(name):
    model = a_model(name, masked=False)
    model.set_attn_implementation("eager")
    engine = compiled(model)
    kinds = [node.get_type_name() for node in engine.graph._model.get_ops()]
    assert kinds.count("ScaledDotProductAttention") == model.config.num_hidden_layers and "Softmax" not in kinds
    assert engine.config._attn_implementation == "eager"
    assert_same(engine, model, inputs_of(name, padded=name != "vit"))


@pytest.mark.parametrize("name", ["bert", "mpnet", pytest.param("umt5", marks=pytest.mark.slow)])
def test_a_mask_with_a_rest(tmp_path, name):
    model = a_model(name, layers=2)
    mask = model.sparse_attention.mask
    model.set_mask(mask.replace(rest="mean", rest_bias=torch.randn(2, mask.num_heads)))
    engine = compiled(model)
    for given in text_inputs().values():
        assert_same(engine, model, given)
    engine.save_pretrained(tmp_path)
    assert_same(sparsebert.load(tmp_path), model, text_inputs()["between"])


@pytest.mark.parametrize("name", ["bert", "modernbert", "vit"])
def test_heads_with_labels(name):
    model = a_model(name, make=head_model)
    given = inputs_of(name, padded=name != "vit", labels=True)
    if name != "vit":
        given["labels"] = IDS.masked_fill(~REAL, -100)
    assert_same(compiled(model), model, given)


@MASKED
def test_arguments_of_the_base_model(engines, masked):
    model, engine = a_model(masked=masked), engines(masked)
    types = (torch.arange(LENGTH) > 4).long().expand(3, -1)
    assert_same(engine, model, BATCHES[0] | {"token_type_ids": types})
    as_tuple = outputs(engine, BATCHES[0] | {"return_dict": False})
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], outputs(engine, BATCHES[0]).last_hidden_state)
    assert engine(IDS, PADDING)[0].shape == (3, LENGTH, 32)
    assert_same(engine, model, {"input_ids": IDS, "position_ids": torch.arange(LENGTH).expand(3, -1) + 3})
    if masked:
        packed = {"input_ids": IDS[:1], "position_ids": torch.tensor([[*range(5), *range(7)]])}
        assert_same(engine, model, packed)


@MASKED
def test_rows_without_a_token(engines, masked):
    """They are no NaN, as in the stock model, and change no other row."""
    padding = PADDING.clone()
    padding[1] = 0
    found = outputs(engines(masked), {"input_ids": IDS, "attention_mask": padding}).last_hidden_state
    want = outputs(a_model(masked=masked), {"input_ids": IDS, "attention_mask": padding}).last_hidden_state
    torch.testing.assert_close(found[padding.bool()], want[padding.bool()], atol=1e-5, rtol=1e-4)
    assert found.isfinite().all() and want.isfinite().all()


def test_padding_costs_nothing(engines, monkeypatch):
    engine, shapes = engines(True), []
    call = type(engine.graph).__call__
    monkeypatch.setattr(
        type(engine.graph),
        "__call__",
        lambda self, tensors, *rest: shapes.append(tensors["input_ids"].shape) or call(self, tensors, *rest),
    )
    outputs(engine, BATCHES[0])
    assert shapes == [(1, PADDING.sum())]


def test_low_precisions(tmp_path):
    model = a_model()
    want = outputs(model, BATCHES[0]).last_hidden_state[REAL]
    for precision in ("bfloat16", "int8"):
        if precision in compiling.engine_module("openvino").precisions():
            engine = compiled(model, precision, calibration=BATCHES)
            assert engine.compiled_as["precision"] == precision and engine.compiled_as["cosine"] > 0.99
            got = outputs(engine, BATCHES[0]).last_hidden_state[REAL]
            assert not torch.equal(got, want) and torch.cosine_similarity(got, want, dim=-1).min() > 0.98
            engine.save_pretrained(tmp_path)
            assert torch.equal(outputs(load(tmp_path), BATCHES[0]).last_hidden_state[REAL], got)


@pytest.mark.parametrize("backend", ["sparse_cpu", "sparse_sdpa"])
def test_autocast_changes_nothing(backend):
    engine = compiled(a_model())
    engine.set_attn_implementation(backend)
    want = outputs(engine, BATCHES[0])
    with torch.autocast("cpu", torch.bfloat16):
        for call in (engine, engine.forward):
            assert torch.equal(outputs(call, BATCHES[0]).last_hidden_state, want.last_hidden_state)


def test_auto_takes_what_is_fastest_within_the_loss(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(compiling.logger, "warning", said.append)
    model, times = a_model(layers=2), {"float32": 3.0, "bfloat16": 2.0, "int8": 1.0}
    monkeypatch.setattr(compiling, "_seconds", lambda model, graphs, batches: {name: times[name] for name in graphs})
    assert compiled(model, "auto", calibration=BATCHES, min_cosine=0.9).compiled_as["precision"] == "int8"
    assert compiled(model, "auto", calibration=BATCHES, min_cosine=1 - 1e-6).compiled_as["precision"] == "float32"
    made = compiled(model, "auto").compiled_as  # compared on random tokens, without int8
    assert made["precision"] == "bfloat16" or "bfloat16" not in compiling.engine_module("openvino").precisions()
    times["float32"] = 0.5
    assert compiled(model, "auto", min_cosine=1.0).compiled_as["precision"] == "float32"
    assert "may take minutes" in said[0] and "int8 1000 ms" in said[1]
    assert "takes float32" in said[3] and "There is no calibration data: int8 is not tried" in said[4]


def test_texts_calibrate(word_tokenizer):
    engine = compiled(a_model(), "int8", calibration=["w1 w2 w3", "w4 " * 80], tokenizer=word_tokenizer)
    assert engine.compiled_as["cosine"] > 0.99


@pytest.mark.parametrize(("make", "masked"), [(base_model, True), (head_model, False)])
def test_round_trip(make, masked, tmp_path):
    """Saved, loaded in every way, saved again; pickled and copied."""
    engine = compiled(a_model(masked=masked, make=make))
    want = outputs(engine, BATCHES[0])[0]
    for folder in ("one", "two", "two"):  # the last one in the place of the second
        engine.save_pretrained(tmp_path / folder)
        ours = load(tmp_path / folder)
        auto = transformers.AutoModel if make is base_model else transformers.AutoModelForMaskedLM
        for again in (
            ours,
            auto.from_pretrained(tmp_path / folder),
            pickle.loads(pickle.dumps(ours)),
            copy.deepcopy(ours),
        ):
            assert torch.equal(outputs(again, BATCHES[0])[0][REAL], want[REAL])
            assert type(again).__name__ == type(engine).__name__ and again.compiled_as == engine.compiled_as
        engine = ours
    if masked:
        assert not load(tmp_path / "two", skip_padding=False).sparse_attention.config.skip_padding
        assert ours.sparse_attention.mask == a_mask()
        assert SparseMask.from_pretrained(tmp_path / "two") == a_mask()
        assert load(tmp_path / "two", length_policy="error").sparse_attention.mask.length_policy == "error"
    base = transformers.AutoModel.from_pretrained(tmp_path / "two")
    assert type(base).__name__ == "BertModel"
    assert outputs(base, BATCHES[0]).last_hidden_state.shape == (3, LENGTH, 32)


def test_a_dense_model_replaces_the_mask_of_another(tmp_path):
    compiled(a_model()).save_pretrained(tmp_path)
    compiled(a_model(masked=False)).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("mask*")) and not hasattr(load(tmp_path), "sparse_attention")


@pytest.mark.parametrize("made", [SparseBertModel, SparseBertForMaskedLM])
def test_a_saved_sparsebert(tiny_config, made, tmp_path):
    model = made(tiny_config(pattern="window", num_hidden_layers=1)).eval()
    compiled(model).save_pretrained(tmp_path)
    assert_same(load(tmp_path), model, BATCHES[0])


def test_threads_call_it_at_once(engines):
    model, engine, results = a_model(), engines(True), {}

    def run(number):
        results[number] = [outputs(engine, {"input_ids": IDS[:, : number + 3]}).last_hidden_state for _ in range(5)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, found in results.items():
        want = outputs(model, {"input_ids": IDS[:, : number + 3]}).last_hidden_state
        for got in found:
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_mask_can_be_exchanged():
    model, other = a_model(), random_mask(density=0.2, length_policy="dense")
    engine = compiled(model)
    engine.set_mask(other)
    model.set_mask(other)
    assert_same(engine, model, BATCHES[0])
    engine.set_attn_implementation("sparse_eager")
    assert_same(engine, model, BATCHES[0])


def searching():
    return attach(base_model("bert"), "dam_s")


def decoder(**fields):
    return transformers.BertLMHeadModel(
        transformers.BertConfig(**MODELS["bert"][1], is_decoder=True, num_hidden_layers=1, **fields)
    )


def with_nan():
    model = a_model()
    model.encoder.layer[0].output.dense.weight.data[0, 0] = float("nan")
    return model


REFUSED = {
    "a module": (lambda: torch.nn.Linear(2, 2), {}, "needs a model of transformers, got Linear"),
    "a search": (searching, {}, "is not frozen: call freeze"),
    "compiled already": (lambda: compiled(a_model()), {}, "is compiled already"),
    "half precision": (lambda: a_model().bfloat16(), {}, "float32 on the CPU: .* is torch.bfloat16"),
    "NaN": (with_nan, {}, "holds infinity or NaN"),
    "engine": (a_model, {"engine": "openvine"}, "engine must be one of 'openvino', got 'openvine'"),
    "precision": (
        a_model,
        {"precision": "int4"},
        "precision must be one of 'auto', 'float32', 'bfloat16', 'int8', got 'int4'",
    ),
    "no calibration": (a_model, {"precision": "int8"}, "'int8' needs calibration"),
    "no tokenizer": (a_model, {"calibration": ["text"]}, "give the model's tokenizer"),
    "numbers": (a_model, {"calibration": [1]}, "texts or dicts of tensors, got int"),
    "one text": (a_model, {"calibration": "text"}, "must be a list of texts or of dicts of tensors, got a str"),
    "one batch": (a_model, {"calibration": BATCHES[0]}, "must be a list of texts or of dicts of tensors, got a dict"),
    "quantized": (lambda: sparsebert.quantize(a_model()), {}, "is quantized: compile the model as it was before"),
    "min_cosine": (a_model, {"min_cosine": 90}, "min_cosine must be a number from 0 to 1, got 90"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, arguments, message = REFUSED[case]
    model = make()
    before = type(model)
    with pytest.raises(ValueError, match=message):
        sparsebert.compile(model, **arguments)
    assert type(model) is before


def test_a_failure_leaves_the_model(monkeypatch):
    model = a_model()
    want = outputs(model, BATCHES[0]).last_hidden_state

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "_chosen", fail)
    with pytest.raises(KeyboardInterrupt):
        sparsebert.compile(model)
    assert torch.equal(outputs(model, BATCHES[0]).last_hidden_state, want)


def test_the_engine_is_not_installed(monkeypatch):
    monkeypatch.setitem(compiling.ENGINES, "openvino", ("._missing", "openvino"))
    with pytest.raises(ImportError, match=r"pip install 'sparsebert\[openvino\]'"):
        sparsebert.compile(a_model())


@MASKED
def test_calls_that_are_refused(engines, masked):
    engine = engines(masked)
    for given, message in (
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "needs input_ids"),
        (BATCHES[0] | {"output_attentions": True}, "output_attentions"),
        (
            BATCHES[0] | {"encoder_hidden_states": torch.zeros(1, 4, 32)},
            "encoder_hidden_states: a compiled",
        ),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool)}, "dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(**given)
    with pytest.raises(ValueError, match="is for inference"):
        engine.train()(**BATCHES[0])
    engine.eval()
    with pytest.raises(ValueError, match="made for one machine"):
        engine.push_to_hub("user/model")


@MASKED
def test_what_the_stock_model_refuses_is_refused(engines, masked):
    """The engine itself would answer with zeros, or with the result of an earlier call."""
    engine = engines(masked)
    size = engine.config.max_position_embeddings
    outputs(engine, BATCHES[0])
    for given, message in (
        ({"input_ids": IDS.repeat(1, 9)[:, : size + 1]}, f"{size} tokens|takes {size}"),
        ({"input_ids": IDS + 1000}, "input_ids must be from 0 to 99 .* got 10"),
        ({"input_ids": -IDS - 1}, "input_ids must be from 0 to 99 .* got -"),
        ({"input_ids": IDS, "token_type_ids": IDS * 0 + 2}, "token_type_ids must be from 0 to 1"),
        ({"input_ids": IDS.float()}, "input_ids must hold integers, got torch.float32"),
        ({"input_ids": IDS[:, :0]}, "must have two dimensions and a token|from 1"),
        ({"input_ids": IDS[0]}, "must have two dimensions|must be a tensor of a batch .* got shape"),
        ({"input_ids": IDS.numpy()}, "must be a tensor.* got ndarray"),
        ({"input_ids": IDS, "attention_mask": PADDING[:, :5]}, r"attention_mask must .*\(3, 12\)"),
        ({"input_ids": IDS.to("meta")}, "runs on the CPU, got a tensor on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            outputs(engine, given)
    same = outputs(engine, BATCHES[0]).last_hidden_state
    for given in (
        {"input_ids": IDS.int(), "attention_mask": PADDING.bool()},
        {"input_ids": IDS.t().contiguous().t(), "attention_mask": PADDING.float() / 2},
    ):
        assert torch.equal(outputs(engine, given).last_hidden_state, same)
    assert outputs(engine, {"input_ids": IDS[:0]}).last_hidden_state.shape == (0, LENGTH, 32)


def test_images_of_another_size_are_refused():
    engine = compiled(a_model("vit"))
    for images in (torch.zeros(1, 3, 5, 5), torch.zeros(1, *inputs_of("vit")["pixel_values"].shape[1:]).long()):
        with pytest.raises(ValueError, match="pixel_values must be floating-point, of shape"):
            engine(pixel_values=images)


def test_a_model_without_parameters_of_its_own():
    """It stays where it is and what it is."""
    engine = compiled(a_model("distilbert"))
    assert not list(engine.parameters()) and (engine.device.type, engine.dtype) == ("cpu", torch.float32)
    assert engine.to("cpu").float().eval().num_parameters() == 0
    for change in (engine.half, lambda: torch.nn.Sequential(engine).to("meta"), lambda: engine.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="stays on the CPU, and its outputs in float32"):
            change()


def test_a_part_of_another_model(tmp_path):
    """It runs there, and is saved alone only."""
    model = transformers.EncoderDecoderModel(encoder=base_model("bert"), decoder=decoder(add_cross_attention=True))
    given = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    want = outputs(model.eval(), given).logits
    sparsebert.compile(model.encoder, precision="float32")
    torch.testing.assert_close(outputs(model, given).logits, want, atol=1e-5, rtol=1e-4)
    model.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="encoder of this EncoderDecoderModel is compiled, and would be"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("basic_ios::clear: iostream error")  # what OpenVINO says of it

    monkeypatch.setattr(openvino, "save_model", fail)
    with pytest.raises(OSError, match="could not be written whole: is the disk full"):
        compiled(a_model())


def test_without_nncf_there_is_no_int8(monkeypatch):
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ValueError, match="'int8' needs nncf, which the extra has: here there are float32"):
        compiled(a_model(), "int8", calibration=BATCHES)
    monkeypatch.setattr(compiling, "_ROUNDS", 1)
    assert compiled(a_model(), "auto", calibration=BATCHES).compiled_as["precision"] != "int8"


def test_a_forked_process_is_told(engines, monkeypatch):
    engine = engines(True)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    for use in (lambda: engine(IDS), lambda: copy.deepcopy(engine)):
        with pytest.raises(RuntimeError, match="forked from one that used it: use the start method 'spawn'"):
            use()


def test_an_error_of_the_mask_is_its_own():
    engine = compiled(attach(base_model("bert"), random_mask(length_policy="error")))
    with pytest.raises(ValueError, match="length_policy|longer than"):
        engine(IDS.repeat(1, 2))
    assert outputs(engine, BATCHES[0]).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_an_error_of_the_operator_is_not_lost(engines, error, monkeypatch):
    engine = engines(True)
    want = outputs(engine, BATCHES[0]).last_hidden_state

    def fail(*args):
        raise error("in the operator")

    with monkeypatch.context() as patch:
        patch.setattr(compiling.engine_module("openvino"), "run_backend", fail)
        for _ in range(2):
            with pytest.raises(error, match="in the operator"):
                outputs(engine, BATCHES[0])
    for _ in range(20):  # an engine that was left in the middle of a graph would crash in one of them
        assert torch.equal(outputs(engine, BATCHES[0]).last_hidden_state[REAL], want[REAL])
        with monkeypatch.context() as patch, pytest.raises(error, match="in the operator"):
            patch.setattr(compiling.engine_module("openvino"), "run_backend", fail)
            outputs(engine, BATCHES[0])


def damage(name, content):
    def apply(folder):
        (folder / name).write_bytes(content)

    return apply


def other_version(folder):
    described = json.loads((folder / "engine.json").read_text())
    described["versions"]["openvino"] = "2099.1.0"
    (folder / "openvino_model.xml").write_text("<net/>")
    described["files"]["openvino_model.xml"] = hashlib.sha256(b"<net/>").hexdigest()
    (folder / "engine.json").write_text(json.dumps(described))


def described(**fields):
    def apply(folder):
        old = json.loads((folder / "engine.json").read_text())
        (folder / "engine.json").write_text(json.dumps(old | fields))

    return apply


def with_hash(name, content):
    def apply(folder):
        damage(name, content)(folder)
        files = json.loads((folder / "engine.json").read_text())["files"]
        described(files=files | {name: hashlib.sha256(content).hexdigest()})(folder)

    return apply


def piped(folder):
    (folder / "openvino_model.bin").unlink()
    os.mkfifo(folder / "openvino_model.bin")


DAMAGED = {
    "graph": (damage("openvino_model.xml", b"<net>"), "openvino_model.xml is not the file that was saved"),
    "weights": (damage("openvino_model.bin", b""), "openvino_model.bin is not the file"),
    "mask": (damage("mask.safetensors", b"x"), "mask.safetensors is not the file"),
    "missing": (lambda folder: (folder / "head.safetensors").unlink(), "head.safetensors is missing"),
    "description": (damage("engine.json", b"{"), "engine.json is damaged"),
    "wrong types": (damage("engine.json", b'{"engine": 5, "files": {}}'), "engine.json is damaged"),
    "a dense model beside it": (
        damage("model.safetensors", b"x"),
        "holds model.safetensors, of a model that is not compiled",
    ),
    "an adapter": (damage("adapter_config.json", b"{}"), "holds adapter_config.json"),
    "a search": (damage("search_config.json", b'{"search": "dam_s"}'), "search_config.json is not of the compiled"),
    "a pipe": (piped, "openvino_model.bin is a pipe"),
    "deep": (damage("engine.json", b"[" * 100_000), "engine.json is damaged"),
    "huge": (damage("engine.json", b" " * 2_000_000), "has more than 1048576 bytes"),
    "paths": (described(files={"../x": "0"}), "engine.json is damaged"),
    "files": (described(files=["config.json"]), "engine.json is damaged"),
    "precision": (described(precision="int4"), "engine.json: precision must be one of"),
    "head": (with_hash("head.safetensors", b"x"), "head.safetensors does not fit the model"),
    "class": (with_hash("config.json", b'{"model_type": "bert"}'), "config.json is damaged: it has no architectures"),
    "another version": (other_version, "was compiled with openvino 2099.1.0, which openvino .* cannot read"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders(case, tmp_path_factory, saved_engine):
    folder = tmp_path_factory.mktemp("engine")
    for path in saved_engine.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    apply, message = DAMAGED[case]
    apply(folder)
    for read in (load, transformers.AutoModel.from_pretrained):
        with pytest.raises((ValueError, OSError), match=message):
            read(folder)


@pytest.fixture(scope="module")
def saved_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    compiled(a_model()).save_pretrained(folder)
    return folder


def test_loadings_that_are_refused(saved_engine, tmp_path):
    for arguments, message in (
        ({"dtype": torch.bfloat16}, "dtype torch.bfloat16 has no meaning"),
        ({"attn_implementation": "sparse_cpu"}, "attn_implementation 'sparse_cpu' has no meaning"),
        ({"device_map": "cuda"}, "device_map 'cuda' has no meaning"),
        ({"model_class": transformers.BertForMaskedLM}, "compiled BertModel: it cannot be loaded as BertForMaskedLM"),
    ):
        with pytest.raises(ValueError, match=message):
            load(saved_engine, **arguments)
    assert transformers.AutoModel.from_pretrained(saved_engine, device_map="auto").compiled_as


@MASKED
def test_what_changes_a_model_refuses_a_compiled_one(engines, masked):
    engine = engines(masked)
    for use, message in (
        (lambda: attach(engine, a_mask()), "attach: this BertModel is compiled"),
        (lambda: sparsebert.detach(engine), "detach: this BertModel is compiled"),
        (lambda: sparsebert.quantize(engine), "quantize: this BertModel is compiled"),
        (lambda: sparsebert.extend_positions(engine, 80), "extend_positions: this BertModel is compiled"),
        (lambda: engine.resize_token_embeddings(200), "'embeddings': it is compiled, and what its graph holds"),
        (lambda: torch.export.export(engine, (IDS,)), "cannot be exported or traced"),
        (lambda: torch.jit.trace(engine, (IDS,), strict=False), "cannot be exported or traced"),
    ):
        with pytest.raises((ValueError, AttributeError), match=message):
            use()
    assert outputs(engine, BATCHES[0]).last_hidden_state.isfinite().all()


def test_commands_that_refuse_its_folder(saved_engine, tmp_path, capsys):
    out = f"--output_dir {tmp_path / 'out'}"
    (tmp_path / "texts.txt").write_text("w1 w2")
    for words in (
        f"push {saved_engine} --repo_id user/name",
        f"compile {saved_engine} {out}",
        f"lengthen {saved_engine} --length 80 {out}",
        f"finetune --model {saved_engine} --task sst2 {out}",
        f"search --model {saved_engine} --data {tmp_path / 'texts.txt'} --target_sparsity 0.9 {out}",
    ):
        assert main(words.split()) == 2
        assert "holds a compiled model, for inference alone: use the model it is made of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    base_model("bert").save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/adapter_config.json").write_text("{}")
    assert main(f"compile {tmp_path / 'model'} {out} --overwrite true".split()) == 2
    assert "holds adapter_config.json, of a model that is not" in capsys.readouterr().err


def test_what_is_in_a_folder_is_not_lost(saved_engine, tmp_path):
    for name, save, message in (
        ("model", base_model("bert").save_pretrained, "holds model.safetensors, of a model that is not compiled"),
        ("mask", a_mask().save_pretrained, "holds mask.safetensors, which would be lost"),
        ("pipe", lambda folder: folder.mkdir() or os.mkfifo(folder / "config.json"), "config.json is a pipe"),
    ):
        save(tmp_path / name)
        before = sorted(path.name for path in (tmp_path / name).iterdir())
        with pytest.raises((ValueError, OSError), match=message):
            load(saved_engine).save_pretrained(tmp_path / name)
        assert sorted(path.name for path in (tmp_path / name).iterdir() if path.name[0] != "_") == before


def test_a_file_of_another_tool_is_left_alone(saved_engine, tmp_path):
    model = base_model("bert")
    model.save_pretrained(tmp_path)
    (tmp_path / "engine.json").write_text('{"version": 1}')
    assert_same(transformers.BertModel.from_pretrained(tmp_path), model, BATCHES[0])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds engine.json, which would be lost"):
        load(saved_engine).save_pretrained(tmp_path)


def test_a_folder_that_changes_while_its_model_is_used(saved_engine, tmp_path, monkeypatch):
    shutil.copytree(saved_engine, tmp_path / "one")
    engine = load(tmp_path / "one")
    want = outputs(engine, BATCHES[0]).last_hidden_state
    torch.manual_seed(9)
    compiled(a_model("roberta")).save_pretrained(tmp_path / "one")
    engine.save_pretrained(tmp_path / "two")
    for again in (load(tmp_path / "two"), copy.deepcopy(engine)):
        assert torch.equal(outputs(again, BATCHES[0]).last_hidden_state[REAL], want[REAL])
    graphs, hashed = compiling.engine_module("openvino"), []
    monkeypatch.setattr(compiled_files, "sha_fileobj", lambda file: hashed.append(file.name) or sha_fileobj(file))
    load(tmp_path / "one")
    assert len(hashed) == len(set(hashed)) > 4  # each file once
    monkeypatch.setattr(graphs, "open_graph", lambda folder, _: engine.save_pretrained(folder) or engine.graph)
    with pytest.raises(ValueError, match="was replaced while it was read"):
        load(tmp_path / "one")


def test_without_the_plugin_it_is_refused(saved_engine):
    sparsebert.plugin.disable()
    try:
        with pytest.raises((OSError, ValueError)):
            transformers.AutoModel.from_pretrained(saved_engine)
        assert load(saved_engine).compiled_as["precision"] == "float32"
    finally:
        sparsebert.plugin.enable()


def test_the_command(word_tokenizer, tmp_path, capsys):
    """A folder of sentence-transformers in, a folder of sentence-transformers out."""
    for saved in (a_model(), word_tokenizer):
        saved.save_pretrained(tmp_path / "model")
    (tmp_path / "model/modules.json").write_text('[{"idx": 0, "path": ""}]')
    (tmp_path / "texts.txt").write_text("\n\n".join(f"w{number} w2 w3" for number in range(20)))
    words = ["compile", str(tmp_path / "model"), "--data", str(tmp_path / "texts.txt"), "--num_texts", "8"]
    words += ["--output_dir", str(tmp_path / "out"), "--precision", "int8"]
    assert main(words) == 0
    assert re.search(r"written to .*out: openvino, int8, cosine with float32 0\.99|1\.0000", capsys.readouterr().out)
    assert (tmp_path / "out/modules.json").is_file()
    engine = load(tmp_path / "out")
    assert hasattr(engine, "sparse_attention")
    assert_same(engine, load(tmp_path / "out"), BATCHES[0])
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == len(word_tokenizer)
    assert main(words) == 2 and "is not empty" in capsys.readouterr().err
    (tmp_path / "out/_unfinished/out").mkdir(parents=True)
    for name in ("engine.json", "metrics.json"):  # as if it had been killed while the files were moved
        (tmp_path / "out" / name).rename(tmp_path / "out/_unfinished/out" / name)
    assert main(words) == 2 and "holds a finished run" in capsys.readouterr().err
    assert load(tmp_path / "out").compiled_as["precision"] == "int8"
    words = f"lengthen {tmp_path / 'model'} --length 80 --output_dir {tmp_path / 'out'} --overwrite true"
    assert main(words.split()) == 0  # another model replaces it
    assert not (tmp_path / "out/engine.json").exists() and (tmp_path / "out/model.safetensors").exists()


def test_a_page_of_sentence_transformers(word_tokenizer, monkeypatch, tmp_path):
    pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    a_model(masked=False).save_pretrained("model")
    word_tokenizer.save_pretrained("model")
    a_mask().save_pretrained("my-mask")
    page = Path(__file__).parents[2] / "docs/engines.md"
    (block,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    names = {"documents": ["w1 w2 w3", "w4 w5"]}
    exec(block.replace("sentence-transformers/all-MiniLM-L6-v2", "./model"), names)
    assert names["model"].encode(names["documents"]) == pytest.approx(names["embeddings"], abs=1e-6)
    assert names["model"].transformers_model.sparse_attention.mask == a_mask()


def test_a_cpu_without_bfloat16_is_said(saved_engine, monkeypatch):
    graphs, said = compiling.engine_module("openvino"), []
    monkeypatch.setattr(graphs, "precisions", lambda: ("float32", "int8"))
    monkeypatch.setattr(graphs.logger, "warning_once", said.append)
    graph = graphs.open_graph(saved_engine, "bfloat16")
    assert "runs in float32" in said[0] and graph.precision == "bfloat16"
