"""Two encoders on the same texts, and long texts by their parts."""

import json

import numpy as np
import pytest
import torch
from conftest import TINY
from transformers import BertConfig, BertModel

from sparsebert import attach, encode_long
from sparsebert.analysis import encoder_comparison
from sparsebert.analysis.encoder_comparison import beginning, closeness, compare_encoders, verdict
from sparsebert.commands import main
from sparsebert.models.inference.text_encoders import TextEncoder, pooling_of


TEXTS = [" ".join(f"w{(7 * row + 3 * word) % 90}" for word in range(6 + 5 * row)) for row in range(6)]


@pytest.fixture
def folders(tmp_path, word_tokenizer):
    """A dense model and the same with a mask, both with the mean, normalized."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY)).eval()
    for name in ("dense", "sparse"):
        folder = tmp_path / name
        (folder / "1_Pooling").mkdir(parents=True)
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        prefix = "sentence_transformers.models."
        modules = [{"name": kind, "path": path, "type": f"{prefix}{kind}"} for path, kind in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        model.save_pretrained(folder)
        word_tokenizer.save_pretrained(folder)
        if name == "dense":
            attach(model, "window", mask_length=32, length_policy="extend")
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    return tmp_path


def test_compare(folders, capsys):
    words = ["compare", folders / "dense", folders / "sparse", "--data", folders / "texts.txt", "--length", 32]
    words += ["--split", 12, "--rounds", 2, "--precisions", "float32", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    systems = found["systems"]
    assert {name.split()[0] for name in systems} == {"dense", "split", "sparse"}
    assert systems["dense pytorch float32"]["cosine"] == pytest.approx(1, abs=1e-5)
    assert all(row["norm"] == pytest.approx(1, abs=1e-5) for name, row in systems.items() if "split" not in name)
    assert systems["sparse pytorch float32"]["cosine"] < 1 > systems["split pytorch float32"]["cosine"]
    for name in systems:  # in every engine the same
        same = systems[f"{name.split()[0]} pytorch float32"]
        assert systems[name]["cosine"] == pytest.approx(same["cosine"], abs=1e-4)
        rate = systems[name]["texts_per_second"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
    assert found["encoders"]["sparse"] == {"length": 32, "pooling": "mean", "normalized": True}
    assert any(name in found["verdict"] for name in found["best"]) and "eploy" in found["verdict"]
    assert found["remarks"] == []
    words[1:3] = reversed(words[1:3])
    assert main(words) == 0
    first, second = json.loads(capsys.readouterr().out)["remarks"]
    assert first.endswith("sparse, given as the dense model, has a mask.")
    assert second.endswith("dense, given as the sparse model, has no mask.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "dense", "--data", "texts.txt"], "models must be two, a dense and a sparse one"),
        (["compare", "dense", "sparse", "--data", "texts.txt", "--precisions", "int4"], "precisions must be one of"),
        (
            ["compare", "dense", "sparse", "--data", "texts.txt", "--length", "4"],
            "length must be an integer of at least 8",
        ),
    ],
)
def test_what_cannot_be_compared(folders, monkeypatch, capsys, words, said):
    monkeypatch.chdir(folders)
    assert main(words) == 2 and said in capsys.readouterr().err


def outcome(low=1.5, kept=0.9, texts=64, **sparse):
    encoders = {name: {"length": 512, "pooling": "mean", "normalized": True} for name in ("dense", "sparse")}
    encoders["sparse"] |= sparse
    speed = {"median": low + 0.1, "low": low, "high": low + 0.2}
    return {"encoders": encoders, "best": ["dense a", "sparse a"], "speed_up": speed, "num_texts": texts} | {
        "systems": {"sparse a": {} if kept is None else {"neighbors": kept}}
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "Deploy: sparse a is 1.60 times as fast [1.50, 1.70] as dense a, and 90% of the 10"),
        ({"kept": 0.5}, "Do not deploy yet"),
        ({"kept": 1.0, "texts": 11}, "Do not deploy on this alone"),
        ({"low": 0.95}, "Do not deploy here"),
        ({"kept": None}, "embeddings of different sizes"),
        ({"pooling": "cls"}, "Do not deploy: pooling is mean for the dense, cls for the sparse"),
        ({"length": 1024}, "Decide by the score of your task"),
    ],
)
def test_verdict(given, said):
    assert said in verdict(outcome(**given))


def test_closeness():
    """The second and the third of four points change places as neighbors of the first."""
    points = np.array([[1, 0.0], [1, 0.1], [1, 0.3], [1, 0.7]])
    assert closeness(points, 5 * points) == {"cosine": pytest.approx(1), "neighbors": 1.0}
    assert closeness(points, points[:, :1]) == {}


def test_parts_of_what_the_sparse_model_reads(word_tokenizer):
    """What follows in a text changes no embedding; two parts of 12 tokens hold 20 besides their special tokens."""
    torch.manual_seed(0)
    sizes = {"dense": 12, "sparse": 24}
    models = {kind: BertModel(BertConfig(**TINY)).eval() for kind in sizes}
    encoders = {kind: TextEncoder(model, word_tokenizer, sizes[kind]) for kind, model in models.items()}
    texts = [" ".join(TEXTS[index:] + TEXTS[:index]) for index in range(len(TEXTS))]
    short = [beginning(word_tokenizer, text, 20) for text in texts]
    assert all(len(word_tokenizer(text)["input_ids"]) == 22 for text in short) and short[0] != texts[0]
    found = [compare_encoders(encoders, given, ["float32"], 512, 1)["systems"] for given in (texts, short)]
    names = [name for name in found[0] if "split" in name]
    assert names and all(found[0][name]["cosine"] == found[1][name]["cosine"] for name in names)


def test_long_texts_are_the_mean_of_their_parts(word_tokenizer):
    torch.manual_seed(0)
    encoder = TextEncoder(BertModel(BertConfig(**TINY)).eval(), word_tokenizer, 12)
    long, short = TEXTS[3], TEXTS[0]
    words = long.split()
    parts = [" ".join(words[begin : begin + 10]) for begin in range(0, len(words), 10)]
    found = encode_long(encoder, [long, short, ""], split=12)
    assert found.shape == (3, 32) and encode_long(encoder, []).shape == (0, 32)
    np.testing.assert_allclose(found[0], encoder.encode(parts).mean(0), atol=1e-5)
    np.testing.assert_allclose(found[1], encoder.encode([short])[0], atol=1e-5)
    for split in (2, 13):
        with pytest.raises(ValueError, match="split must be an integer from 3 to 12"):
            encode_long(encoder, [long], split=split)
    with pytest.raises(ValueError, match="got one text"):
        encode_long(encoder, long, split=12)


def test_what_an_engine_cannot_run_is_left_out(word_tokenizer, monkeypatch, capsys):
    """As a processor without bfloat16 does, or a model whose mask no graph can hold."""

    def compiled(*arguments):
        raise ValueError("needs a CPU that computes in it")

    monkeypatch.setattr(encoder_comparison, "compile", compiled)
    monkeypatch.setattr(encoder_comparison, "ENGINES", {"engine": (None, "json")})
    encoder = TextEncoder(BertModel(BertConfig(**TINY)).eval(), word_tokenizer, 12)
    assert [*encoder_comparison.systems_of(encoder, ["float32"], TEXTS)] == ["pytorch float32"]
    assert "left out: engine float32: needs a CPU" in capsys.readouterr().err


@pytest.mark.parametrize("mask", ["window", "dam_u"])
def test_a_mask_that_ends_cuts_the_texts(folders, mask):
    model = attach(BertModel(BertConfig(**TINY)), mask, mask_length=16, length_policy="error")
    model.save_pretrained(folders / "sparse")
    encoder = encoder_comparison.read_encoder(str(folders / "sparse"), 40)
    assert encoder.length == 16 and np.isfinite(encoder.encode(["w1 " * 40])).all()


def test_precisions_that_nothing_here_can_run(word_tokenizer):
    model = BertModel(BertConfig(**TINY)).to("meta")  # as on a GPU, where no int8 is
    with pytest.raises(ValueError, match="precisions: nothing runs int8 on a model on meta"):
        encoder_comparison.systems_of(TextEncoder(model, word_tokenizer, 12), ["int8"], TEXTS)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_embeddings_are_those_of_sentence_transformers(folders, mode):
    st = pytest.importorskip("sentence_transformers")
    (folders / "dense/1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": mode}))
    theirs = st.SentenceTransformer(str(folders / "dense"), device="cpu")
    ours = TextEncoder(theirs[0].model, theirs.tokenizer, 40, *pooling_of(folders / "dense"))
    np.testing.assert_allclose(ours.encode(TEXTS, batch_size=4), theirs.encode(TEXTS), atol=1e-5)
    np.testing.assert_allclose(encode_long(ours, TEXTS, 12), encode_long(theirs, TEXTS, 12), atol=1e-5)


def test_other_modules_and_poolings_are_refused(folders):
    (folders / "dense/1_Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="the pooling must be one of"):
        pooling_of(folders / "dense")
    modules = json.loads((folders / "sparse/modules.json").read_text())
    (folders / "sparse/modules.json").write_text(json.dumps(modules + [{"path": "3_Dense", "type": "a.Dense"}]))
    with pytest.raises(ValueError, match="has a Dense"):
        pooling_of(folders / "sparse")
    outside = '[{"type": "Pooling", "path": "../other"}]'
    for content, said in (
        ("{", "modules.json is not valid JSON"),
        ('{"a": 1}', "must be a list of objects"),
        (outside, "subfolder must lie inside"),
    ):
        (folders / "sparse/modules.json").write_text(content)
        with pytest.raises(ValueError, match=said):
            pooling_of(folders / "sparse")
