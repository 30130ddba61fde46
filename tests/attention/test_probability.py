"""Probability maps: as functions of scores, as the attention of a model, as fields of a configuration."""

import copy
import inspect
import itertools
import json
import math
import re
import sys
from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from torch.autograd import gradcheck
from transformers import BertConfig, BertModel, EncoderDecoderModel, TrainingArguments

from sparsebert import (
    PROBABILITY_MAPS,
    SparseBertForMaskedLM,
    SparseBertLMHeadModel,
    SparseBertModel,
    SparseMask,
    attach,
    build_pattern,
    plan,
    sparse_dot_product_attention,
)
from sparsebert.attention.backends import BACKENDS, refusal
from sparsebert.attention.capabilities import Request
from sparsebert.attention.choosing.choice import automatic, by_measurement
from sparsebert.attention.probability_maps import LEARNED_ALPHA, ProbabilityMap, check_probability_map
from sparsebert.commands import main
from sparsebert.training.trainer import SparseBertTrainer


# By map, a value of every parameter, for scores of size 1.
VALUES = {"topk": {"k": 3}, "sparsegen_lin": {"lam": 0.3}, "entmax": {"alpha": 1.3}}


def sample(row):
    """Values of the parameters of any map: defaults or numbers that its checks accept, other than those of softmax."""
    fields, accepted = inspect.signature(row.function).parameters, []
    scores = torch.linspace(-1, 2, 40)
    choices = [
        [value for value in (fields[key].default, 1, 0.5, 2, 0.7, 0, -1) if value is not inspect.Parameter.empty]
        for key in row.parameters
    ]
    for values in itertools.product(*choices):
        parameters = dict(zip(row.parameters, values, strict=True))
        try:
            for length in (1, 4, 40):
                row.check(parameters, length)
            accepted.append(parameters)
            if not torch.allclose(row(scores, **parameters), torch.softmax(scores, -1)):
                return parameters
        except (ValueError, TypeError, RuntimeError):  # out of range, of another type, or entmax is missing
            continue
    assert accepted, f"VALUES lacks {row.function.__name__}: its checks refuse all usual numbers"
    return accepted[0]


MAPS = {name: VALUES[name] if name in VALUES else sample(row) for name, row in PROBABILITY_MAPS.items()}
OTHERS = {name: parameters for name, parameters in MAPS.items() if name != "softmax"}
EVERY = pytest.mark.parametrize("name", MAPS)
EVERY_OTHER = pytest.mark.parametrize("name", OTHERS)
INSTALL = re.escape("pip install 'sparsebert[maps]'")
IDS = torch.arange(5, 25).view(2, 10)
PADDING = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])


def probabilities(name, scores):
    return PROBABILITY_MAPS[name](scores, **MAPS[name])


def fitting(name, length):
    """The parameters of a map for rows of `length` keys."""
    return {key: min(value, length) if key == "k" else value for key, value in MAPS[name].items()}


def scores_of(*shape):
    """Random float64 scores without ties, and which of them are absent: in the last row, all."""
    scores = torch.randn(shape, dtype=torch.float64)
    absent = torch.rand(shape) < 0.4
    absent[..., 0] = False
    absent[..., -1, :] = True
    return scores, absent


# Functions


@EVERY
def test_rows_are_probabilities_in_the_order_of_the_scores(name):
    scores = torch.randn(50, 12, dtype=torch.float64)
    probs = probabilities(name, scores)
    torch.testing.assert_close(probs.sum(-1), torch.ones(50, dtype=torch.float64))
    assert (probs >= 0).all()
    assert (probs.gather(-1, scores.argsort(-1)).diff() >= 0).all()
    torch.testing.assert_close(probabilities(name, scores + 7.0), probs)
    if name in ("softmax", "topk", "sparsemax", "entmax15"):
        assert (probs == 0).any() == (name != "softmax")


@EVERY
def test_absent_scores_are_as_if_they_were_not_there(name):
    scores, absent = scores_of(40, 12)
    probs = probabilities(name, scores.masked_fill(absent, -torch.inf))
    assert (probs[absent] == 0).all() and probs[-1].sum() == 0
    for row, removed, got in zip(scores[:-1], absent[:-1], probs[:-1], strict=True):
        parameters = fitting(name, int((~removed).sum()))
        torch.testing.assert_close(got[~removed], PROBABILITY_MAPS[name](row[~removed], **parameters))


@EVERY
def test_gradients(name):
    scores, absent = scores_of(4, 7)
    scores.requires_grad_()

    def of_present(scores):
        return probabilities(name, scores.masked_fill(absent, -torch.inf))

    assert gradcheck(of_present, scores)
    (of_present(scores) * torch.randn(7)).sum().backward()
    assert scores.grad.isfinite().all() and (scores.grad[absent] == 0).all()
    # The gradient of the scores themselves, where some are -inf.
    removed = scores.detach().masked_fill(absent, -torch.inf).requires_grad_()
    (probabilities(name, removed) * torch.randn(7)).sum().backward()
    assert removed.grad.isfinite().all() and (removed.grad[absent] == 0).all()


def test_gradients_of_a_learned_alpha():
    scores = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)  # (B, H, n, m)
    alpha = torch.tensor([1.1, 1.5, 1.9], dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda *given: PROBABILITY_MAPS["entmax"](given[0], alpha=given[1][:, None, None]), (scores, alpha)
    )


def test_maps_that_are_the_same():
    scores, absent = scores_of(30, 12)
    scores = scores.masked_fill(absent, -torch.inf)
    maps = PROBABILITY_MAPS
    for one, other in (
        (maps["entmax"](scores, alpha=1), maps["softmax"](scores)),
        (maps["entmax"](scores, alpha=1.5), maps["entmax15"](scores)),
        (maps["entmax"](scores, alpha=2.0), maps["sparsemax"](scores)),
        (maps["sparsegen_lin"](scores, lam=0), maps["sparsemax"](scores)),
        (maps["topk"](scores, k=12), maps["softmax"](scores)),
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(maps["entmax"](scores, alpha=1.001), maps["softmax"](scores), atol=1e-2, rtol=0)


@pytest.mark.parametrize("lam", [-3.0, 0.0, 0.5, 0.99])
def test_sparsegen_lin_by_its_definition(lam):
    """`max(0, (s - tau) / (1 - lambda))`, with the same tau for all keys that are left."""
    scores = torch.randn(20, 9, dtype=torch.float64)
    probs = PROBABILITY_MAPS["sparsegen_lin"](scores, lam=lam)
    for row, got in zip(scores, probs, strict=True):
        tau = row - (1 - lam) * got
        torch.testing.assert_close(tau[got > 0], tau[got > 0].mean().expand(int((got > 0).sum())))
        assert (row[got == 0] <= tau[got > 0].mean() + 1e-9).all()


def test_topk_keeps_k_even_among_equal_scores():
    probs = PROBABILITY_MAPS["topk"](torch.zeros(5, 8), k=3)
    assert (probs > 0).sum(-1).tolist() == [3] * 5
    torch.testing.assert_close(probs.sum(-1), torch.ones(5))


@pytest.mark.parametrize("alpha", [1.001, 1.01, 1.1, 1.9, 3.0])
def test_entmax_in_float32(alpha):
    scores = 10 * torch.randn(100, 64, dtype=torch.float64)
    exact = PROBABILITY_MAPS["entmax"](scores, alpha=alpha)
    got = PROBABILITY_MAPS["entmax"](scores.float(), alpha=alpha)
    torch.testing.assert_close(got.double(), exact, atol=2e-3, rtol=0)


# Bad input


@pytest.mark.parametrize(
    "name, parameters, said",
    [
        ("softmx", {}, "'softmax'.*'topk'.*'softmx'"),
        ("topk", {}, "'topk' needs the parameter 'k'"),
        ("topk", {"k": 0}, "k of topk must be a whole number from 1 to the 40 keys, got 0"),
        ("topk", {"k": 41}, "from 1 to the 40 keys, got 41"),
        ("topk", {"k": 2.0}, "got 2.0"),
        ("topk", {"k": True}, "got True"),
        ("topk", {"kk": 3}, "unknown parameter of probability map 'topk': 'kk'; did you mean 'k'"),
        ("sparsegen_lin", {"lam": 1}, "lam of sparsegen_lin must be less than 1, got 1"),
        ("sparsegen_lin", {"lam": math.nan}, "got nan"),
        ("sparsegen_lin", {"lambda": 0.5}, "unknown parameter .*'sparsegen_lin': 'lambda'; did you mean 'lam'"),
        ("sparsemax", {"k": 3}, "unknown parameter of probability map 'sparsemax': 'k'; allowed: none"),
        ("entmax", {"alpha": 0.99}, r"alpha of entmax must be 1 \(softmax\) or at least 1.001, got 0.99"),
        ("entmax", {"alpha": 1.0001}, "or at least 1.001, got 1.0001"),
        ("entmax", {"alpha": "lerned"}, "got 'lerned'"),
        ("entmax", {"alpha": math.inf}, "got inf"),
        ("entmax", {}, "'entmax' needs the parameter 'alpha'"),
    ],
    ids=str,
)
def test_bad_parameters(tiny_config, name, parameters, said):
    with pytest.raises(ValueError, match=said):
        check_probability_map(name, parameters, 40)
    errors = (StrictDataclassClassValidationError, StrictDataclassFieldValidationError)
    with pytest.raises(errors, match=said):
        tiny_config(probability_map=name, probability_map_kwargs=parameters)
    arguments = {"mask": build_pattern("window", 40, 4), "probability_map": name, "probability_map_kwargs": parameters}
    with pytest.raises(ValueError, match=said):
        sparse_dot_product_attention(*torch.randn(3, 1, 4, 40, 8), **arguments)


def test_functions_check_their_parameters():
    for name, bad in (("topk", {"k": 9}), ("sparsegen_lin", {"lam": 1.0}), ("entmax", {"alpha": 0.5})):
        with pytest.raises(ValueError, match=f"of {name} must be"):
            PROBABILITY_MAPS[name](torch.zeros(2, 8), **bad)


def test_the_multiplicative_form_is_for_softmax(tiny_config):
    with pytest.raises(
        StrictDataclassClassValidationError, match="'multiplicative' needs the probability_map 'softmax', got 'topk'"
    ):
        tiny_config(mask_form="multiplicative", probability_map="topk", probability_map_kwargs={"k": 3})


def test_a_stock_model_keeps_softmax(tiny_config):
    for mask in ("window", "dam_s"):
        with pytest.raises(ValueError, match="probability_map has no meaning"):
            attach(BertModel(tiny_config(BertConfig)), mask, probability_map="sparsemax")


# Attention


@EVERY
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_under_a_mask_is_attention_to_its_keys_alone(name, is_causal):
    query, key, value = torch.randn(3, 2, 4, 10, 8, dtype=torch.float64).unbind(0)
    table = torch.rand(4, 10, 10) < 0.5
    table[:, 3] = False
    mask, padding = SparseMask(table, 10), PADDING.bool()
    options = {"backend": "sparse_eager", "is_causal": is_causal, "probability_map": name}
    query.requires_grad_()
    output = sparse_dot_product_attention(
        query, key, value, mask, padding=padding, probability_map_kwargs=MAPS[name], **options
    )
    output.square().sum().backward()
    assert query.grad.isfinite().all()
    for sequence in range(2):
        for head in range(4):
            for row in range(10):
                keep = table[head, row] & padding[sequence] & padding[sequence, row]
                if is_causal:
                    keep = keep & (torch.arange(10) <= row)
                got = output[sequence, head, row]
                if not keep.any():
                    assert not got.any() and not query.grad[sequence, head, row].any()
                    continue
                scores = key[sequence, head, keep] @ query[sequence, head, row] * 8**-0.5
                expected = PROBABILITY_MAPS[name](scores, **fitting(name, len(scores))) @ value[sequence, head, keep]
                torch.testing.assert_close(got, expected)


@EVERY_OTHER
def test_the_choosing_backends_take_the_one_that_can(name):
    mask = build_pattern("window", 16, 4)
    request = Request("cpu", torch.float32, 2, 4, 16, 16, 8, probability_map=name)
    for needs in (frozenset(), frozenset({"learned"}), frozenset({"weights"})):
        for choose in (automatic, by_measurement):
            chosen, reason = choose(mask, replace(request, needs=needs))
            assert refusal(chosen, replace(request, needs=needs)) is None and reason


def test_the_plan_knows_the_map(tiny_config):
    model = SparseBertModel(tiny_config(pattern="window", probability_map="sparsemax"))
    assert {name for name, _ in plan(model).choices.values()} == {"sparse_eager"}


def test_learned_alpha_needs_a_model():
    states = torch.randn(1, 4, 10, 8)
    mask = build_pattern("window", 10, 4)
    with pytest.raises(ValueError, match="alpha of entmax must be a number outside a model"):
        sparse_dot_product_attention(
            states, states, states, mask, probability_map="entmax", probability_map_kwargs={"alpha": "learned"}
        )


# Models


def model_with(tiny_config, name, model_class=SparseBertForMaskedLM, **fields):
    fields = fields if fields.keys() & {"search", "pattern"} else {"pattern": "window"} | fields
    kwargs = fields.pop("probability_map_kwargs", OTHERS[name])
    return model_class(tiny_config(probability_map=name, probability_map_kwargs=kwargs, **fields))


@EVERY_OTHER
@pytest.mark.parametrize("fields", [{"pattern": "bigbird"}, {"search": "dam_s"}], ids=str)
def test_models_train_and_reload(tiny_config, assert_same_model, tmp_path, name, fields):
    fields = fields | {"attention_probs_dropout_prob": 0.1, "initializer_range": 0.3}  # where maps make a difference
    model = model_with(tiny_config, name, **fields).train()
    model(IDS, attention_mask=PADDING, labels=IDS).loss.backward()
    grads = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert all(grad.isfinite().all() for grad in grads.values())
    assert grads["bert.encoder.layer.0.attention.self.query.weight"].abs().sum() > 0
    if "search" in fields:
        assert grads["bert.sparse_attention.mask_logits"].abs().sum() > 0
        model.freeze(sparsity=0.5)
    model.eval().save_pretrained(tmp_path)
    loaded = SparseBertForMaskedLM.from_pretrained(tmp_path)
    assert (loaded.config.probability_map, loaded.config.probability_map_kwargs) == (name, OTHERS[name])
    inputs = {"input_ids": IDS, "attention_mask": PADDING}
    assert_same_model(loaded, model, **inputs)
    dense = SparseBertForMaskedLM.from_pretrained(tmp_path, probability_map="softmax")
    with torch.no_grad():
        assert not torch.allclose(dense(**inputs).logits, model(**inputs).logits, atol=1e-2)


@EVERY_OTHER
def test_probabilities_that_a_model_returns(tiny_config, name):
    model = model_with(tiny_config, name, SparseBertModel, pattern="dense", initializer_range=0.5).eval()
    with torch.no_grad():
        attentions = model(IDS, attention_mask=PADDING, output_attentions=True).attentions
    assert len(attentions) == 2 and (name != "sparsemax" or (torch.stack(attentions) == 0).any())
    for weights in attentions:
        torch.testing.assert_close(weights.sum(-1)[PADDING.bool()[:, None].expand(2, 4, 10)].sum(), torch.tensor(64.0))


@pytest.mark.parametrize(
    "name, backend",
    [(name, backend) for name in MAPS for backend, row in BACKENDS.items() if name not in row.probability_maps],
)
def test_a_model_says_which_backend_can(tiny_config, name, backend):
    model = model_with(tiny_config, name, attn_implementation=backend).eval()
    with pytest.raises(ValueError, match=f"{backend} cannot run here.*'{name}'. Use sparse_eager"):
        model(IDS)


def test_inputs_shorter_than_k(tiny_config, assert_same_model):
    model = model_with(tiny_config, "topk", pattern="dense", probability_map_kwargs={"k": 20}).eval()
    same = SparseBertForMaskedLM(tiny_config(pattern="dense")).eval()
    same.load_state_dict(model.state_dict())
    assert_same_model(model, same, input_ids=IDS)


@EVERY_OTHER
def test_a_decoder_sees_no_future_and_generates(tiny_config, name):
    model = model_with(tiny_config, name, SparseBertLMHeadModel, is_decoder=True, initializer_range=0.3).eval()
    changed = IDS.clone()
    changed[:, 6:] = 50
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits[:, :6], model(changed).logits[:, :6])
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        cached, anew = (model.generate(IDS[:, :4], use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.shape == (2, 10) and torch.equal(cached, anew)


def test_cross_attention_keeps_softmax(tiny_config):
    encoder = model_with(tiny_config, "sparsemax", SparseBertModel)
    decoder = model_with(tiny_config, "sparsemax", SparseBertLMHeadModel, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    with torch.no_grad():
        output = model(input_ids=IDS, decoder_input_ids=IDS, output_attentions=True)
    assert all((weights > 0).all() for weights in output.cross_attentions)


def test_dropout_falls_on_the_probabilities(tiny_config):
    model = model_with(tiny_config, "sparsemax", SparseBertModel, attention_probs_dropout_prob=0.5).train()
    first, second = model(IDS).last_hidden_state, model(IDS).last_hidden_state
    assert not torch.equal(first, second)


# A learned alpha

LEARNED = {"probability_map_kwargs": {"alpha": "learned"}}


def test_learned_alpha_starts_as_entmax15(tiny_config):
    model = model_with(tiny_config, "entmax", pattern="bigbird", **LEARNED).eval()
    fixed = SparseBertForMaskedLM(tiny_config(pattern="bigbird", probability_map="entmax15")).eval()
    fixed.load_state_dict(model.state_dict(), strict=False)
    alpha = model.sparse_attention.probability_map.alpha()
    assert alpha.shape == (2, 4)
    torch.testing.assert_close(alpha, torch.full((2, 4), 1.5))
    with torch.no_grad():
        got, expected = (each(IDS, attention_mask=PADDING).logits for each in (model, fixed))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fields", [{"pattern": "bigbird"}, {"search": "dam_s"}], ids=str)
def test_learned_alpha_is_trained_per_layer_and_head_and_saved(tiny_config, assert_same_model, tmp_path, fields):
    model = model_with(tiny_config, "entmax", **fields, initializer_range=0.3, **LEARNED)
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=3, learning_rate=0.1, weight_decay=0.1, report_to="none", save_strategy="no"
    )
    trainer = SparseBertTrainer(model, arguments, train_dataset=rows)
    assert not any("alpha_logits" in name for name in trainer.get_decay_parameter_names(model))
    trainer.train()
    alpha = model.sparse_attention.probability_map.alpha().detach()
    assert len(alpha.unique()) == 8 and (alpha != 1.5).all()
    assert (alpha > LEARNED_ALPHA[0]).all() and (alpha < LEARNED_ALPHA[1]).all()
    if model.sparse_attention.searching:
        model.freeze(sparsity=0.5)
    model.eval().save_pretrained(tmp_path / "model")
    loaded, info = SparseBertForMaskedLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(loaded.sparse_attention.probability_map.alpha(), alpha)
    low = SparseBertForMaskedLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert low.sparse_attention.probability_map.alpha_logits.dtype == torch.float32
    assert_same_model(loaded, model, input_ids=IDS)
    with torch.no_grad():
        # Each head of each layer has its own alpha.
        other = copy.deepcopy(model)
        other.sparse_attention.probability_map.alpha_logits[1, 2] += 1.0
        before, after = (torch.stack(m(IDS, output_attentions=True).attentions) for m in (model, other))
    changed = ((before - after).abs() > 1e-4).flatten(3).any(-1).any(1)
    assert changed.nonzero().tolist() == [[1, 2]]


def test_gradient_checkpointing_gives_the_same_alpha_gradient(tiny_config):
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = model_with(tiny_config, "entmax", initializer_range=0.3, **LEARNED).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(IDS, labels=IDS).loss.backward()
        grads.append(model.sparse_attention.probability_map.alpha_logits.grad)
    torch.testing.assert_close(*grads)


def test_a_stock_checkpoint_takes_a_learned_alpha(checkpoints):
    fields = {"pattern": "window", "probability_map": "entmax"} | LEARNED
    model = SparseBertForMaskedLM.from_pretrained(checkpoints["stock"], **fields)
    torch.testing.assert_close(model.sparse_attention.probability_map.alpha(), torch.full((2, 4), 1.5))


def test_another_map_forgets_the_parameters_of_the_last(tiny_config, tmp_path):
    model_with(tiny_config, "entmax", **LEARNED).save_pretrained(tmp_path)
    assert SparseBertForMaskedLM.from_pretrained(tmp_path, probability_map="sparsemax")(IDS).logits.isfinite().all()
    with pytest.raises(StrictDataclassClassValidationError, match="'topk' needs the parameter 'k'"):
        SparseBertForMaskedLM.from_pretrained(tmp_path, probability_map="topk")


# Without the package entmax


@EVERY
def test_only_maps_that_need_entmax_are_refused_without_it(tiny_config, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "entmax", None)
    if PROBABILITY_MAPS[name].needs_entmax:
        said = f"the probability maps .*{name}.* need the package entmax: {INSTALL}"
        with pytest.raises(ValueError, match=said):
            probabilities(name, torch.randn(2, 5))
        with pytest.raises(ValueError, match=said):
            ProbabilityMap(name, MAPS[name], 2, 4)
        return
    assert probabilities(name, torch.randn(2, 5)).isfinite().all()
    config = tiny_config(pattern="window", probability_map=name, probability_map_kwargs=MAPS[name])
    assert SparseBertForMaskedLM(config)(IDS, attention_mask=PADDING).logits.isfinite().all()


# Commands


def test_finetuning_with_another_map(checkpoints, glue_folder, tmp_path, capsys):
    arguments = ["finetune", "--task", "rte", "--data", str(glue_folder), "--max_length", "32", "--max_steps", "2"]
    arguments += ["--report_to", "none", "--seeds", "1", "--output_dir", str(tmp_path / "run")]
    arguments += ["--probability_map", "topk", "--probability_map_kwargs", "{k: 3}", "--model"]
    assert main([*arguments, checkpoints["window"], "--attn_implementation", "sparse_sdpa"]) == 2
    assert "sparse_sdpa does not support probability_map 'topk': use sparse_eager" in capsys.readouterr().err
    assert main([*arguments, checkpoints["stock"], "--mask", checkpoints["window"]]) == 2
    assert "model.probability_map 'topk' has no meaning here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*arguments, checkpoints["window"]]) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["probability_map"], config["probability_map_kwargs"]) == ("topk", {"k": 3})


def test_pretraining_on_a_backend_that_lacks_the_map(tmp_path, capsys):
    arguments = ["pretrain", "small", "--probability_map", "sparsemax", "--output_dir", str(tmp_path / "run")]
    assert main([*arguments, "--attn_implementation", "sparse_sdpa"]) == 2
    assert "sparse_sdpa does not support probability_map 'sparsemax'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
