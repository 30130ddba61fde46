"""Translation: parallel files, the sparse encoder-decoder, beam search, sacreBLEU."""

import gzip
import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, EncoderDecoderModel, GenerationConfig

from sparsebert import SparseBertLMHeadModel, SparseBertModel
from sparsebert.commands import parse
from sparsebert.data.tokenization import train_tokenizer
from studies.other_papers.translating import bleu, build_model, decode, encode, read_pairs, train_translation


WORDS = {"one": "jedna", "two": "dvě", "three": "tři", "red": "červená", "blue": "modrá", "house": "dům"}
MODEL = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "mask_length": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
STRIDED = {"pattern": "strided_cycle", "pattern_kwargs": {"stride": 4}, "head_configuration": "union"}


def sentences(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        words = [rng.choice(list(WORDS)) for _ in range(rng.randint(2, 5))]
        yield " ".join(words).capitalize() + ".", " ".join(WORDS[word] for word in words).capitalize() + "."


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """`train.tsv.gz`, and `test.en` and `test.cs`."""
    root = tmp_path_factory.mktemp("pairs")
    with gzip.open(root / "train.tsv.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"{source}\t{target}\n" for source, target in sentences(600, 0))
    for side, name in enumerate(("test.en", "test.cs")):
        (root / name).write_text("".join(f"{pair[side]}\n" for pair in sentences(20, 1)), encoding="utf-8")
    return {"train": str(root / "train.tsv.gz"), "test": [str(root / "test.en"), str(root / "test.cs")]}


@pytest.fixture(scope="module")
def tokenizer(files):
    return train_tokenizer(map(list, read_pairs(files["train"])), 200, lowercase=False)


def test_both_kinds_of_files(files):
    train, test = read_pairs(files["train"]), read_pairs(files["test"])
    assert len(train) == 600 and train == list(sentences(600, 0))
    assert test == list(sentences(20, 1)) and read_pairs(files["test"], 5) == test[:5]


@pytest.mark.parametrize(
    "text, message",
    [("a\tb\nc\n", r"pairs.tsv:2: .* got 1"), ("a\tb\tc\n", "got 3"), ("\n", "got 1"), ("\t\n", "no pair")],
)
def test_bad_tables(tmp_path, text, message):
    path = tmp_path / "pairs.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_pairs(str(path))
    path.write_text("a\tb\n\tc\nd\t \n e  f \tg\n")  # empty sides are left out
    assert read_pairs(str(path)) == [("a", "b"), ("e f", "g")]
    with pytest.raises(ValueError, match=r"pairs.tsv has 4 lines and .*one has 1"):
        (tmp_path / "one").write_text("jedna\n")
        read_pairs([str(path), str(tmp_path / "one")])


def test_features(files, tokenizer):
    pairs = read_pairs(files["test"])
    features = encode(pairs, tokenizer, 16)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    for row in features:
        assert row["input_ids"][0] == cls and row["input_ids"][-1] == row["labels"][-1] == sep
        assert cls not in row["labels"]
    padded = np.full((len(pairs), 16), -100)
    for row, labels in zip(padded, features["labels"], strict=True):
        row[: len(labels)] = labels
    assert decode(padded, tokenizer) == [target for _, target in pairs]


def test_words_are_joined_as_they_were(tokenizer):
    class Spaced:
        pad_token_id = 0

        def batch_decode(self, ids, **options):
            return ["„ Je to tak “ , řekl ( asi ) k - tému ; co ?"]

    assert decode(np.zeros((1, 1)), Spaced()) == ["„Je to tak“, řekl (asi) k-tému; co?"]


def test_bleu_is_cased():
    references = ["Dva muži jdou po ulici s velkým psem .", "Žena čte knihu u okna v kavárně ."]
    score, signature = bleu(references, references)
    assert score == pytest.approx(100) and "case:mixed" in signature
    assert bleu([text.lower() for text in references], references)[0] < 90


@pytest.mark.parametrize(
    "mask",
    [{"pattern": "dense"}, STRIDED, {"pattern": "star"}, {"pattern": "random", "allow_empty_rows": True}],
    ids=lambda mask: mask["pattern"],
)
def test_model_is_sparse_and_causal(files, tokenizer, assert_same_model, mask, tmp_path):
    torch.manual_seed(0)
    model = build_model(MODEL | mask | {"initializer_range": 0.3}, tokenizer, 16).eval()
    assert isinstance(model.encoder, SparseBertModel) and isinstance(model.decoder, SparseBertLMHeadModel)
    assert model.encoder.sparse_attention.mask == model.decoder.sparse_attention.mask
    sources = tokenizer([source for source, _ in read_pairs(files["test"])[:3]], return_tensors="pt", padding=True)
    inputs = {name: sources[name] for name in ("input_ids", "attention_mask")}
    a = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[:, 5:] = 3
    with torch.no_grad():
        logits = [model(**inputs, decoder_input_ids=ids).logits for ids in (a, b)]
        torch.testing.assert_close(logits[0][:, :5], logits[1][:, :5])
        assert not torch.allclose(logits[0][:, 5:], logits[1][:, 5:], atol=1e-2)
        # A sentence's translation does not depend on the sentences beside it.
        alone = {name: tensor[:1, : int(inputs["attention_mask"][0].sum())] for name, tensor in inputs.items()}
        torch.testing.assert_close(model(**alone, decoder_input_ids=a[:1]).logits, logits[0][:1], atol=1e-4, rtol=1e-4)
    texts = []
    for use_cache in (True, False):
        config = GenerationConfig(**model.generation_config.to_diff_dict() | {"num_beams": 3, "use_cache": use_cache})
        texts.append(model.generate(**inputs, generation_config=config))
    assert torch.equal(*texts)
    model.save_pretrained(tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.encoder.sparse_attention.mask == model.encoder.sparse_attention.mask
    assert_same_model(again, model, **inputs, decoder_input_ids=a)


def load(folder):
    return EncoderDecoderModel.from_pretrained(folder, attn_implementation="sparse_auto").eval()


def recipe(files, folder, steps=2, **model):
    training = {"output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 16}
    training |= {"learning_rate": 5e-3, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    return {"data": files | {"max_length": 16, "num_beams": 2}, "model": MODEL | STRIDED | model, "training": training}


def test_translation_is_learned(files, tmp_path):
    metrics = train_translation(recipe(files, tmp_path / "run", steps=100))
    assert metrics["bleu"] > 15 and "case:mixed" in metrics["bleu_signature"]
    assert metrics["bleu_of_references"] == pytest.approx(100)
    assert 0 < metrics["sparsity"] < 0.6 and metrics["train_pairs"] == 600 and metrics["test_pairs"] == 20
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == metrics
    lines = (tmp_path / "run" / "translations.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 20 and any(line in {target for _, target in read_pairs(files["test"])} for line in lines)
    model = load(tmp_path / "run")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "run")
    source = loaded(read_pairs(files["test"])[0][0], return_tensors="pt", return_token_type_ids=False)
    assert decode(model.generate(**source).numpy(), loaded) == lines[:1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": {"pattern": None}}, "translation needs a pattern"),
        ({"model": {"search": "dam_s", "pattern": None}}, "no search"),
        ({"model": {"pattern_kwargs": {"stride": 0}}}, "stride must be an integer of at least 1, got 0"),
        ({"model": {"mask_length": 8}}, "max_length must be at most .* mask_length 8, got 16"),
        ({"model": {"target_sparsity": 0.9}}, "target_sparsity 0.9 has no meaning with the pattern"),
        ({"model": {"is_decoder": True}}, "is_decoder true has no meaning here"),
        ({"training": {"predict_with_generate": False}}, "predict_with_generate false has no meaning here"),
        ({"data": {"train": None}}, "--train must be"),
        ({"data": {"num_beams": 0}}, "num_beams must be an integer of at least 1, got 0"),
        ({"data": {"train": ["one.en"]}}, "there is no file 'one.en'"),
        ({"data": {"test": "missing.tsv"}}, "there is no file 'missing.tsv'"),
    ],
)
def test_bad_recipes(files, tmp_path, changes, message):
    wrong = recipe(files, tmp_path / "run")
    wrong = {section: values | changes.get(section, {}) for section, values in wrong.items()}
    with pytest.raises((ValueError, OSError), match=message):
        train_translation(wrong)
    assert not (tmp_path / "run").exists()


def test_recipe_file(files, tmp_path):
    flags = [f"--{name}={value}" for name, value in MODEL.items()]
    flags += ["--train", files["train"], "--test", json.dumps(files["test"]), "--max_length", "16", "--max_steps", "2"]
    _, recipe = parse(["translate", "translation", *flags, "--output_dir", str(tmp_path / "run")])
    assert train_translation(recipe)["steps"] == 2
