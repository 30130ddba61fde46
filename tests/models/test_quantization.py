"""Linear layers in int8: which, how well, under which mask, and that such a model is not saved."""

import copy
import pickle
import warnings

import pytest
import torch
from test_attach import HEADS, IMAGES, LENGTH, REAL, base_model, every_model, head_model, inputs_of
from torch.ao.nn.quantized import dynamic

import sparsebert
from sparsebert import SparseBertModel, attach, build_pattern, detach, quantize


def states(model, name, padded=False):
    with torch.no_grad():
        return model(**inputs_of(name, padded)).last_hidden_state


def cosine(one, other):
    return torch.cosine_similarity(one.double(), other.double(), dim=-1).min().item()


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "sparse"])
@every_model
def test_every_architecture(name, masked):
    model = base_model(name)
    if masked:
        attach(model, build_pattern("window", LENGTH, HEADS, window_size=2), attn_implementation="sparse_cpu")
    padded = name not in IMAGES
    real = REAL if padded else torch.ones_like(REAL)
    stock = detach(copy.deepcopy(model)) if masked else model
    before, other = (states(each, name, padded)[real] for each in (model, stock))
    layers = sum(type(module) is torch.nn.Linear for module in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantize(model.train()) is model
    assert not any(module.training for module in model.modules())
    assert layers == sum(isinstance(module, dynamic.Linear) for module in model.modules()) > 0
    got = states(model, name, padded)[real]
    assert got.dtype == torch.float32 and not torch.equal(got, before)
    assert cosine(got, before) > 0.99
    if masked:  # as far from the dense model as before
        assert (got - before).norm() < 0.3 * (before - other).norm()


def test_the_head_stays_in_float32():
    model = head_model("bert")
    head = copy.deepcopy(model.cls)
    quantize(model)
    assert all(torch.equal(a, b) for a, b in zip(model.cls.parameters(), head.parameters(), strict=True))
    assert not any(isinstance(module, dynamic.Linear) for module in model.cls.modules())
    with pytest.raises(ValueError, match="are in int8"):
        model.save_pretrained("never written")


@pytest.mark.parametrize("backend", ["sparse_eager", "sparse_sdpa", "sparse_cpu"])
def test_attention_sees_the_mask(tiny_config, backend):
    """What a token does not attend to does not change its hidden state."""
    config = tiny_config(pattern="window", num_hidden_layers=1, initializer_range=0.5, attn_implementation=backend)
    model = quantize(SparseBertModel(config))
    ids = torch.randint(5, 100, (1, 20))
    changed = ids.clone()
    changed[0, 15] = 3
    with torch.no_grad():
        moved = (model(ids).last_hidden_state - model(changed).last_hidden_state).abs().amax(-1)[0]
    reach = sparsebert.build_pattern("window", 20, 4).to_table()[0, 0, :, 15]
    # The range of activations, by which they are rounded, is that of the whole batch.
    assert moved[reach].median() > 5 * moved[~reach].median(), moved


def test_copies_run():
    model = quantize(attach(base_model("bert"), "window", mask_length=LENGTH))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(states(other, "bert"), states(model, "bert"))
        with pytest.raises(ValueError, match="are in int8"):
            other.save_pretrained("never written")


def test_a_quantized_model_is_not_saved(tmp_path):
    model = attach(head_model("bert"), "window", mask_length=LENGTH)
    model.save_pretrained(tmp_path / "before")
    written = {path: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    quantize(model)
    for save in (
        lambda: model.save_pretrained(tmp_path / "after"),
        lambda: model.save_pretrained(tmp_path / "before"),
        lambda: model.base_model.save_pretrained(tmp_path / "after"),
        lambda: torch.save(model.state_dict(), tmp_path / "after.bin"),
        lambda: model.load_state_dict({}),
    ):
        with pytest.raises(ValueError, match="are in int8.*save the model before quantize"):
            save()
    assert not list(tmp_path.glob("after*"))
    assert written == {path: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    again = quantize(sparsebert.load(tmp_path / "before").eval())
    assert again.base_model.sparse_attention.mask == model.base_model.sparse_attention.mask
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs_of("bert")).logits, model(**inputs_of("bert")).logits)


def _with_nan(config):
    model = SparseBertModel(config)
    model.embeddings.LayerNorm.weight.data[3] = torch.nan
    return model


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda config: torch.nn.Linear(2, 2), "quantize needs a model of transformers, got Linear"),
        (lambda config: quantize(SparseBertModel(config)), "this SparseBertModel is quantized already"),
        (lambda config: SparseBertModel(config).bfloat16(), "float32 on the CPU, got torch.bfloat16 on cpu"),
        (_with_nan, "finite weights: embeddings.LayerNorm.weight holds infinity or NaN"),
        (lambda config: SparseBertModel(config).to("meta"), "float32 on the CPU, got torch.float32 on meta"),
    ],
)
def test_what_cannot_be_quantized(tiny_config, make, message):
    model = make(tiny_config(pattern="window"))
    with pytest.raises(ValueError, match=message):
        quantize(model)


def test_bfloat16_runs_the_same_mask(tiny_config):
    # Weights with which the output depends on the mask.
    config = tiny_config(pattern="window", attn_implementation="sparse_cpu", initializer_range=0.3)
    model = SparseBertModel(config).eval()
    dense, low = copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)
    dense.set_mask(build_pattern("dense", 40, config.num_attention_heads))
    ids = torch.randint(5, 100, (2, 20))
    with torch.no_grad():
        got, want, other = (each(ids).last_hidden_state for each in (low, model, dense))
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() < 0.1 * (other - want).norm()
