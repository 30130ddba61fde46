"""Causal language models: no leak through any pattern, generation, and pre-training to a perplexity."""

import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sparsebert import PATTERNS, SparseBertLMHeadModel
from sparsebert.data.examples import causal_collator, pretraining_dataset
from sparsebert.masks.patterns import CYCLES, HEAD_CONFIGURATIONS
from sparsebert.training.pretraining.evaluation_metrics import causal_metrics, reduce_causal_logits
from sparsebert.training.pretraining.pretraining_run import pretrain


SETTINGS = [(name, None) for name in PATTERNS if name not in CYCLES]
SETTINGS += [(name, configuration) for name in CYCLES for configuration in HEAD_CONFIGURATIONS]
# The cycles' defaults are made for 256 tokens.
KWARGS = {"strided_cycle": {"stride": 4}, "fixed_cycle": {"stride": 4}, "star_cycle": {"window_size": 2}}
LENGTH = 20


@pytest.fixture
def ids():
    return torch.randint(100, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def make(tiny_config, pattern, configuration):
    torch.manual_seed(0)
    return SparseBertLMHeadModel(
        tiny_config(
            is_decoder=True,
            initializer_range=0.3,
            mask_length=LENGTH,
            allow_empty_rows=True,
            pattern=pattern,
            pattern_kwargs=KWARGS.get(pattern),
            head_configuration=configuration,
        )
    ).eval()


@pytest.mark.parametrize("pattern, configuration", SETTINGS)
def test_no_future_leak(tiny_config, ids, pattern, configuration):
    """Whatever is changed from a position on, no earlier logit changes."""
    model = make(tiny_config, pattern, configuration)
    with torch.no_grad():
        before = model(ids).logits
        for start in (1, 7, LENGTH - 1):
            changed = ids.clone()
            changed[:, start:] = (changed[:, start:] + 1) % 100
            after = model(changed).logits
            torch.testing.assert_close(before[:, :start], after[:, :start])
            assert not torch.allclose(before[:, start:], after[:, start:], atol=1e-2)


@pytest.mark.parametrize("pattern, configuration", SETTINGS[::4])
def test_generation(tiny_config, ids, pattern, configuration):
    """Greedy generation with the cache is what the argmax of whole forwards gives."""
    model = make(tiny_config, pattern, configuration)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    generated = model.generate(ids[:, :5], attention_mask=torch.ones(3, 5), generation_config=config)
    expected = ids[:, :5]
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, expected)


def test_metrics_are_the_models_loss(tiny_config, ids):
    model = make(tiny_config, "window", None)
    batch = causal_collator([{"input_ids": row.tolist()} for row in ids])
    assert (batch["labels"][:, -1] == -100).all() and torch.equal(batch["labels"][:, :-1], ids[:, :-1])
    with torch.no_grad():
        output = model(**batch)
    losses = reduce_causal_logits(output.logits, batch["labels"])
    prediction = type("Prediction", (), {"predictions": losses.numpy(), "label_ids": batch["labels"].numpy()})
    metrics = causal_metrics(prediction)
    assert metrics["lm_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["lm_loss"]))


def test_a_loss_whose_perplexity_overflows():
    prediction = type("Prediction", (), {"predictions": [[800.0]], "label_ids": [[3, 4]]})
    assert causal_metrics(prediction) == {"lm_loss": 800.0, "perplexity": math.inf}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text in which each word is followed by the same other one."""
    rng, lines = random.Random(0), []
    for _ in range(120):
        start = rng.randrange(26)
        lines.append(" ".join(f"w{chr(97 + (start + k) % 26)}" for k in range(30)))
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n\n".join(lines) + "\n")
    return str(path)


def recipe(corpus, folder, **fields):
    sizes = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 32, "mask_length": 32, "is_decoder": True}
    training = {"output_dir": str(folder), "max_steps": 60, "learning_rate": 1e-2, "save_strategy": "no"}
    return {
        "data": {"text": corpus, "validation": corpus, "nsp": False, "max_length": 32, "pictures": False},
        "model": sizes | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | fields,
        "training": training | {"per_device_train_batch_size": 8, "disable_tqdm": True},
    }


def test_pretraining_learns_to_predict(corpus, tmp_path):
    metrics = pretrain(recipe(corpus, tmp_path / "run", search="dam_s"))
    # The pairs of letters are certain; only the first of a document and its end are not.
    assert 1 < metrics["perplexity"] < 8
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == metrics
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert isinstance(model, SparseBertLMHeadModel) and model.sparse_attention.mask is not None
    prompt = tokenizer("wa wb wc wd", return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    length = prompt["input_ids"].shape[1]
    generated = model.generate(**prompt, max_new_tokens=length, do_sample=False, pad_token_id=0, eos_token_id=None)
    text = tokenizer.decode(generated[0, length:])
    assert text == "we wf wg wh"


def test_packed_rows_end_with_a_token_that_is_not_predicted(corpus, word_tokenizer):
    rows = pretraining_dataset([["w1 w2 w3 w4 w5 w6 w7 w8 w9"] * 4], word_tokenizer, max_length=10)
    batch = causal_collator(list(rows))
    assert (batch["input_ids"][:, -1] == word_tokenizer.sep_token_id).all() and (batch["labels"][:, -1] == -100).all()


def test_bad_recipes(corpus, tmp_path):
    wrong = recipe(corpus, tmp_path / "run", pattern="window")
    wrong["data"]["nsp"] = True
    with pytest.raises(ValueError, match="nsp true has no meaning with is_decoder"):
        pretrain(wrong)
    with pytest.raises(ValueError, match="stride must be an integer of at least 1, got 0"):
        pretrain(recipe(corpus, tmp_path / "run", pattern="strided", pattern_kwargs={"stride": 0}))
    assert not (tmp_path / "run").exists()
