"""How sparse_auto and sparse_measure choose a backend."""

import functools
import itertools
import logging
from dataclasses import replace

import pytest
import torch

from sparsebert import SparseBertModel, SparseMask, build_pattern, sparse_dot_product_attention
from sparsebert.attention.backends import BACKENDS, check_request, refusal
from sparsebert.attention.capabilities import WANTED, Request
from sparsebert.attention.choosing import choice, timing
from sparsebert.attention.choosing.choice import CHOICES, automatic, by_measurement


HEADS = 2
REQUEST = Request("cpu", torch.float32, 2, HEADS, 128, 128, 64)


def mask_of(density, length=128):
    """A mask with exactly this share of the entries, scattered."""
    order = torch.rand(HEADS, length**2).argsort(-1)
    return SparseMask((order < round(density * length**2)).view(HEADS, length, length), length)


shared_mask = functools.cache(mask_of)


def auto(density, **fields):
    request = replace(REQUEST, **fields)
    return automatic(shared_mask(density, request.num_keys), request)[0]


@pytest.mark.parametrize(
    "fields, limit, otherwise",
    [
        ({}, 0.5, "sparse_sdpa"),
        ({"gradients": True, "padded": True}, 0.5, "sparse_sdpa"),
        ({"num_keys": 129, "num_queries": 129}, 0.3, "sparse_sdpa"),
        ({"num_keys": 512, "num_queries": 512}, 0.3, "sparse_sdpa"),
        ({"dropout": True, "gradients": True}, 0.7, "sparse_eager"),
        ({"dtype": torch.bfloat16}, 0.3, "sparse_eager"),
        ({"dtype": torch.float16}, 0.3, "sparse_sdpa"),
        ({"dtype": torch.bfloat16, "num_keys": 512, "num_queries": 512}, 0.3, "sparse_sdpa"),
        ({"dtype": torch.bfloat16, "dropout": True}, 0.3, "sparse_eager"),
        ({"num_keys": 129, "num_queries": 129, "dropout": True}, 0.7, "sparse_sdpa"),
    ],
    ids=str,
)
def test_auto_by_density(fields, limit, otherwise, monkeypatch):
    monkeypatch.setattr(choice, "_has_amx", lambda: False)
    assert auto(limit - 0.02, **fields) == "sparse_cpu"
    assert auto(limit + 0.02, **fields) == otherwise


@pytest.mark.parametrize(
    "fields, limit",
    [
        ({}, 0.5),
        ({"dtype": torch.bfloat16}, 0.15),
        ({"dtype": torch.float16, "num_keys": 512, "num_queries": 512}, 0.15),
        ({"dtype": torch.bfloat16, "gradients": True}, 0.25),
        ({"dtype": torch.bfloat16, "dropout": True}, 0.3),
    ],
    ids=str,
)
def test_auto_with_amx(fields, limit, monkeypatch):
    monkeypatch.setattr(choice, "_has_amx", lambda: True)
    assert auto(limit - 0.02, **fields) == "sparse_cpu"
    assert auto(limit + 0.02, **fields) != "sparse_cpu"


@pytest.mark.parametrize(
    "policy, length, causal, expected",
    [
        ("dense", 256, False, "sparse_sdpa"),  # three quarters of the entries are not of the mask
        ("extend", 1024, False, "sparse_cpu"),  # what the mask has not learned is removed
        ("error", 128, True, "sparse_cpu"),
        ("error", 128, False, "sparse_sdpa"),
    ],
)
def test_auto_by_the_density_of_the_input(policy, length, causal, expected):
    keep = torch.zeros(HEADS, 128, dtype=torch.bool)
    keep[:, : 10 if policy == "dense" else 90] = True
    mask = SparseMask(keep, 128, form="offsets", length_policy=policy, special_tokens="none")
    request = replace(REQUEST, num_keys=length, num_queries=length, causal=causal)
    name, reason = automatic(mask, request)
    assert name == expected and f"density {mask.density_at(length, causal):.3f} is" in reason


def test_auto_by_the_dtype_of_autocast(monkeypatch, caplog):
    """In bfloat16 dense attention is faster at a lower density."""
    mask, states = mask_of(0.45), torch.randn(3, 2, HEADS, 128, 64)
    monkeypatch.setattr(choice, "_SAID", set())
    with caplog.at_level(logging.WARNING, logger="sparsebert"), torch.autocast("cpu", torch.bfloat16):
        sparse_dot_product_attention(*states, mask)
    assert "sparse_auto runs sparse_eager: " in caplog.text


@pytest.mark.parametrize("fields", [{"dtype": torch.float64}, {"head_size": 300}], ids=str)
def test_auto_goes_round_what_cannot_run(fields):
    name, reason = automatic(mask_of(0.1), replace(REQUEST, **fields))
    assert name == "sparse_sdpa" and reason.startswith("sparse_cpu cannot run: ")


@pytest.mark.parametrize("need", WANTED)
def test_auto_serves_every_need(need):
    request = replace(REQUEST, needs=frozenset({need}))
    for mask in (mask_of(0.1), None):
        name, _ = automatic(mask, request)
        assert need in BACKENDS[name].supports


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"needs": ["learned"], "dropout": True}, "sparse_sdpa"),
        ({"needs": ["learned"], "num_keys": 129}, "sparse_sdpa"),
        ({"needs": ["learned"]}, "sparse_eager"),
        ({"needs": ["learned"], "dropout": True, "num_keys": 512, "padded": True}, "sparse_sdpa"),
        ({"dropout": True, "needs": ["learned", "additive"]}, "sparse_eager"),
        ({"dropout": True, "needs": ["learned", "gate"]}, "sparse_eager"),
        ({"dropout": True, "needs": ["learned"], "gradients": False}, "sparse_eager"),
        ({"dropout": True, "needs": ["learned"], "device": "cuda"}, "sparse_eager"),
        ({"needs": ["additive"], "gradients": False}, "sparse_eager"),
        ({"needs": ["additive"], "gradients": False, "num_keys": 512}, "sparse_eager"),
        ({"needs": ["additive"], "gradients": False, "num_keys": 513}, "sparse_sdpa"),
        ({"needs": ["additive"], "num_keys": 513}, "sparse_eager"),
        ({"needs": ["additive"], "gradients": False, "num_keys": 513, "device": "cuda"}, "sparse_eager"),
    ],
    ids=str,
)
def test_auto_while_searching(fields, expected):
    fields = fields | {"needs": frozenset(fields["needs"])}
    assert automatic(None, replace(REQUEST, **{"gradients": True} | fields))[0] == expected


@pytest.mark.parametrize("length", [128, 512])
def test_auto_never_chooses_what_refuses(length):
    devices, dtypes, flags = ("cpu", "cuda", "mps"), (torch.float32, torch.bfloat16, torch.float64), (False, True)
    for device, dtype, padded, dropout in itertools.product(devices, dtypes, flags, flags):
        fields = {"num_keys": length, "num_queries": length, "padded": padded, "dropout": dropout}
        request = replace(REQUEST, device=device, dtype=dtype, **fields)
        for mask in (shared_mask(0.1, length), shared_mask(0.9, length), build_pattern("window", length, HEADS)):
            name, reason = automatic(mask, request)
            assert refusal(name, request) is None and reason


def test_errors_name_what_can_run():
    request = replace(REQUEST, dtype=torch.float64)
    able = [other for other in BACKENDS if refusal(other, request) is None]
    assert "sparse_eager" in able and "sparse_cpu" not in able
    with pytest.raises(ValueError) as error:
        check_request("sparse_cpu", request)
    said = str(error.value)
    assert said.startswith("sparse_cpu cannot run here: dtype must be one of ") and "got torch.float64" in said
    assert said.endswith(f"Use {', '.join(able)} or sparse_auto")


# sparse_measure. With gradients, since without them sparse_flex would be compiled for every shape.

TRAINED = replace(REQUEST, num_queries=16, num_keys=16, head_size=8, gradients=True)


@pytest.fixture
def calls(monkeypatch):
    """The names of the backends that run, in order."""
    found = []

    def noted(name, function):
        def wrapped(*arguments):
            found.append(name)
            return function(*arguments)

        return wrapped

    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, replace(backend, function=noted(name, backend.function)))
    return found


def test_measure_times_all_that_can_run_once_per_shape(calls):
    mask = mask_of(0.2, 16)
    name, reason = by_measurement(mask, TRAINED)
    assert set(calls) == {name for name in BACKENDS if refusal(name, TRAINED) is None}
    assert len(set(calls)) > 2 and refusal(name, TRAINED) is None
    assert reason.startswith("the fastest of ") and f"{name} " in reason and " ms" in reason
    number = len(calls)
    assert by_measurement(mask, TRAINED) == (name, reason) and len(calls) == number
    by_measurement(mask, replace(TRAINED, num_queries=15, num_keys=15))
    by_measurement(mask_of(0.2, 16), TRAINED)
    assert len(calls) == 3 * number


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_trial_is_what_a_model_does(num_layers, monkeypatch):
    """The mask is prepared once, for layers that differ; its time counts."""
    done = []
    backend = BACKENDS["sparse_sdpa"]

    def prepare(mask, inputs):
        done.append("prepare")
        return backend.prepare(mask, inputs)

    def function(query, key, value, inputs, *arguments):
        done.append(int((inputs.bias[0][0, 0, :, 0] == 0).sum()))
        return backend.function(query, key, value, inputs, *arguments)

    monkeypatch.setitem(BACKENDS, "sparse_sdpa", replace(backend, prepare=prepare, function=function))
    tables = torch.ones(num_layers, HEADS, 16, 16).tril_().bool()
    for layer in range(num_layers):
        tables[layer, :, 10 + layer :] = False
    timing.trial("sparse_sdpa", SparseMask(tables, 16), replace(TRAINED, padded=True))()
    assert done == ["prepare", 10, 12 if num_layers == 3 else 10]


def test_measure_serves_every_shape():
    shapes = {"padded": True, "dropout": True, "causal": True, "num_queries": 3, "dtype": torch.bfloat16}
    for field, value in shapes.items():
        request = replace(TRAINED, **{field: value})
        assert refusal(by_measurement(mask_of(0.2, 16), request)[0], request) is None


def test_measure_only_what_is_able(calls):
    mask = mask_of(0.2, 16)
    request = replace(TRAINED, needs=frozenset({"weights"}))
    able = {name for name in BACKENDS if refusal(name, request) is None}
    assert by_measurement(mask, request)[0] in able and set(calls) <= able
    calls.clear()
    assert by_measurement(None, replace(TRAINED, needs=frozenset({"additive"})))[0] == "sparse_eager"
    assert not calls


def test_measuring_leaves_random_numbers_alone():
    query, key, value = torch.randn(3, 2, HEADS, 16, 8).requires_grad_().unbind(0)
    mask, before = mask_of(0.2, 16), torch.get_rng_state()
    by_measurement(mask, replace(TRAINED, dropout=True))
    assert torch.equal(torch.get_rng_state(), before)
    chosen = by_measurement(mask, replace(TRAINED, dropout=True))[0]
    outputs = []
    for name in (chosen, "sparse_measure"):
        torch.manual_seed(4)
        outputs.append(sparse_dot_product_attention(query, key, value, mask, dropout_p=0.1, backend=name))
    torch.testing.assert_close(*outputs)


def test_measuring_in_inference_mode_leaves_a_mask_that_can_be_trained():
    mask = mask_of(0.2, 16)
    with torch.inference_mode():
        by_measurement(mask, replace(TRAINED, gradients=False, dtype=torch.float64))
    query, key, value = torch.randn(3, 2, HEADS, 16, 8).unbind(0)
    query.requires_grad_()
    sparse_dot_product_attention(query, key, value, mask, backend="sparse_eager").sum().backward()
    assert query.grad.isfinite().all()


def test_under_vmap_nothing_is_measured():
    states, mask = torch.randn(3, 5, 2, HEADS, 16, 8), mask_of(0.2, 16)

    def attention(*states):
        return sparse_dot_product_attention(*states, mask, backend="sparse_measure")

    got = torch.vmap(attention)(*states)
    # What is chosen then does not stand for a measurement.
    assert by_measurement(mask, replace(TRAINED, gradients=False))[1].startswith("the fastest of ")
    torch.testing.assert_close(got, torch.stack([attention(*each) for each in states.unbind(1)]))


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_is_logged_once(tiny_config, name, monkeypatch, caplog):
    monkeypatch.setattr(choice, "_SAID", set())
    model = SparseBertModel(tiny_config(pattern="window", attn_implementation=name))
    with caplog.at_level(logging.WARNING, logger="sparsebert"):
        for length in (11, 11, 13):  # the mask has another density there
            model(torch.randint(100, (3, length)))
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"{name} runs ")]
    chosen, reason = line.removeprefix(f"{name} runs ").split(": ", 1)
    assert chosen in BACKENDS and reason
