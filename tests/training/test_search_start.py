"""A search that starts from what the weights attend to already."""

import copy
import random

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from scipy.stats import spearmanr
from transformers import BertConfig, BertForMaskedLM, BertModel, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig

from sparsebert import SparseBertForMaskedLM
from sparsebert.analysis.saved_runs import read_run
from sparsebert.training.pretraining import pretraining_run
from sparsebert.training.pretraining.pretraining_run import pretrain
from sparsebert.training.pretraining.search_start import START_ROWS, start_search
from sparsebert.training.searching.matching import random_batches


LENGTH = 24
DENSE = {"search": None, "target_sparsity": None, "share_layers": None, "pattern": "dense"}


@pytest.fixture
def base(tmp_path, tiny_config, word_tokenizer):
    """A stock BERT whose heads prefer certain distances, since its position embeddings are periodic."""
    torch.manual_seed(0)
    model = BertForMaskedLM(tiny_config(BertConfig, max_position_embeddings=LENGTH))
    angles = torch.arange(LENGTH)[:, None] * torch.pi / torch.tensor([2.0, 3.0, 5.0, 7.0])
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    with torch.no_grad():
        positions = model.bert.embeddings.position_embeddings.weight
        positions.copy_(4 * waves @ torch.randn(waves.shape[1], positions.shape[1]))
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight.mul_(8)
            layer.attention.self.key.weight.mul_(8)
    model.save_pretrained(tmp_path / "base")
    word_tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def recipe(base, tmp_path):
    """`recipe(folder, **fields)`: a search that hardly moves."""
    rng = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(f"w{rng.randrange(90)}" for _ in range(120)) for _ in range(20)))

    def make(folder, data=(), model=(), training=()):
        section = {"text": str(text), "validation": str(text), "tokenizer": str(base), "base_model": str(base)}
        section |= {"nsp": False, "max_length": LENGTH, "pictures": False, "start_from_attention": True}
        fields = {"search": "dam_s", "mask_length": LENGTH, "target_sparsity": 0.6, "share_layers": False}
        arguments = {"output_dir": str(tmp_path / folder), "max_steps": 1, "learning_rate": 1e-12, "use_cpu": True}
        arguments |= {"per_device_train_batch_size": 8, "report_to": "none", "disable_tqdm": True}
        return {"data": section | dict(data), "model": fields | dict(model), "training": arguments | dict(training)}

    return make


def attention_by_offset(base, text, words):
    """What the stock model gives to every distance between inner tokens: `(L, H, n - 2)`."""
    model = BertModel.from_pretrained(base, attn_implementation="eager").eval()
    tokens = words(text.read_text().split("\n\n"), truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        probs = torch.stack(model(tokens["input_ids"], output_attentions=True).attentions).mean(1)  # (L, H, n, n)
    inner = probs[..., 1:-1, 1:-1]
    sums = [(inner.diagonal(k, -2, -1).mean(-1) + inner.diagonal(-k, -2, -1).mean(-1)) for k in range(LENGTH - 2)]
    return torch.stack(sums, -1)


def test_the_search_starts_from_the_attention_of_the_base_model(recipe, base, tmp_path, word_tokenizer):
    pretrain(recipe("run", training={"save_steps": 1}))
    started = read_run(tmp_path / "run").probs
    found = torch.stack([started[..., 1, 1 + k] for k in range(LENGTH - 2)], -1).flatten(0, 1)
    expected = attention_by_offset(base, tmp_path / "text.txt", word_tokenizer).flatten(0, 1)
    for ours, theirs in zip(found, expected, strict=True):
        assert spearmanr(ours, theirs).statistic > 0.9
    pretrain(recipe("local", data={"start_from_attention": False}))
    local = read_run(tmp_path / "local").probs
    near = torch.stack([local[..., 1, 1 + k] for k in range(LENGTH - 2)], -1)
    assert (near.diff(dim=-1) < 1e-3).all() and (found.diff(dim=-1) > 0.02).any(-1).all()
    mask = SparseBertForMaskedLM.from_pretrained(tmp_path / "run").sparse_attention.mask
    assert mask.sparsity == pytest.approx(0.6, abs=0.05)


def test_the_start_takes_no_more_memory_with_a_large_batch(recipe, tmp_path, monkeypatch):
    sizes = []

    def batches(rows, size, *arguments):
        sizes.append(size)
        return random_batches(rows, size, *arguments)

    monkeypatch.setattr("sparsebert.training.pretraining.search_start.random_batches", batches)
    pretrain(recipe("large", training={"per_device_train_batch_size": 64}))
    pretrain(recipe("small", training={"per_device_train_batch_size": 4}))
    assert sizes == [START_ROWS, 4]


def test_the_start_is_from_rows_of_the_whole_text_that_the_seed_draws(tiny_config, tmp_path):
    """Without dropout, so that the same rows give the same start."""
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_length=LENGTH, initializer_range=0.5, **dropout))
    rows = torch.randint(5, 100, (600, LENGTH)).tolist()

    def started(seed, rows=rows):
        training = TrainingArguments(str(tmp_path), seed=seed, per_device_train_batch_size=8, use_cpu=True)
        started = copy.deepcopy(model).train()
        start_search(started, Dataset.from_dict({"input_ids": rows}), training)
        return started.sparse_attention.mask_logits.detach()

    first = started(1)
    assert torch.equal(first, started(1)) and not torch.equal(first, started(2))
    assert not torch.equal(first, started(1, rows[:300] + rows[:300]))  # also of the second half


def test_a_resumed_run_keeps_its_logits(recipe, tmp_path, monkeypatch):
    training = {"max_steps": 4, "learning_rate": 1e-2, "save_steps": 2}
    pretrain(recipe("whole", training=training))
    pretrain(recipe("resumed", training=training))
    (tmp_path / "resumed/metrics.json").unlink()
    checkpoint = str(tmp_path / "resumed/checkpoint-2")
    monkeypatch.setattr(pretraining_run, "start_search", lambda *_: pytest.fail("starts again"))
    pretrain(recipe("resumed", training=training | {"resume_from_checkpoint": checkpoint}, data={"overwrite": True}))
    whole, resumed = (load_file(tmp_path / name / "mask_probs.safetensors")["probs"] for name in ("whole", "resumed"))
    assert torch.equal(whole, resumed)


def test_weights_that_are_partitioned_are_refused_first(recipe):
    pytest.importorskip("deepspeed")
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # seen while it lives
    with pytest.raises(ValueError, match="start_from_attention needs whole weights, .* use ZeRO-2"):
        pretrain(recipe("run"))
    assert config.is_zero3()


@pytest.mark.parametrize(
    "data, model, message",
    [
        ({"base_model": None}, {}, "start_from_attention needs base_model"),
        (
            {},
            dict.fromkeys(("search", "target_sparsity", "share_layers")) | {"pattern": "dense"},
            "needs model.search",
        ),
        ({}, {"initial_decay": 1.0}, "initial_decay 1.0 excludes start_from_attention"),
        ({"streaming": True}, {}, "start_from_attention .* set streaming to false"),
        ({}, {"mask_length": 20}, "none of .* rows of the text has 20 tokens"),
        ({"max_length": 20}, {}, "max_length must be at least 24, the mask_length, got 20"),
        ({"max_length": 20}, {"mask_length": None}, "max_length must be at least 24"),
    ],
)
def test_a_start_that_cannot_be_is_refused(recipe, tmp_path, data, model, message):
    with pytest.raises(ValueError, match=message):
        pretrain(recipe("run", data, model))
    assert not (tmp_path / "run/model.safetensors").exists()
