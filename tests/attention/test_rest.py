"""
Masks with a rest, on every backend that has one: against softmax with one more key in float64.

Letters: B batch, H heads, n tokens, d head size.
"""

import json
from functools import partial

import pytest
import torch
from exactness import assert_as_good_as_plain, with_gradients
from test_attention import kept, serving
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

from sparsebert import MaskFileError, SparseMask, attach, load, sparse_dot_product_attention


HEADS = 4
NAMES = serving(needs=frozenset({"rest"}), gradients=False)
TRAINED = serving(needs=frozenset({"rest"}))
PADDINGS = {
    "none": None,
    "right and left": [(0, 33), (0, 20), (5, 33)],
    "with holes": [(0, 33), (3, 9, 12, 30), (1, 2)],
}
MASKS = {
    "offsets": {"keep": torch.arange(9).expand(HEADS, -1) % 4 == 0, "special_tokens": "first_last"},
    "per head": {"keep": torch.eye(HEADS, 7).bool(), "special_tokens": "first"},
    "blocks": {"keep": torch.tensor([1, 0, 1]).bool().expand(HEADS, -1), "form": "blocks", "block_size": 16},
    "table": {"keep": torch.rand(HEADS, 33, 33, generator=torch.Generator().manual_seed(0)) < 0.1, "form": "table"},
    "no diagonal": {"keep": torch.arange(5).expand(HEADS, -1) < 1, "diagonal": False},  # keeps nothing
    "columns": {
        **{"keep": torch.arange(17).expand(HEADS, -1) % 5 == 0, "symmetric": False, "special_tokens": "first_last"},
        **{"special_rows": False},
    },
    "special": {"keep": torch.zeros(HEADS, 3).bool(), "special_tokens": "first_last", "diagonal": False},
    "dense": {"keep": torch.ones(HEADS, 33).bool()},  # removes nothing
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def padding_of(name):
    if (spans := PADDINGS[name]) is None:
        return None
    padding = torch.zeros(len(spans), 33, dtype=torch.bool)
    for row, ends in zip(padding, spans, strict=True):
        for start, stop in zip(ends[::2], ends[1::2], strict=True):
            row[start:stop] = True
    return padding


def formula(query, key, value, bias=None, *, keep, padding, mask):
    """Softmax over the kept keys and the one that stands for all but special tokens, in the inputs' dtype."""
    batch, _, length, size = query.shape
    output = torch.zeros_like(value)
    for row in range(batch):
        real = torch.arange(length) if padding is None else padding[row].nonzero()[:, 0]
        others = real[int(mask.special_tokens != "none") : len(real) - int(mask.special_tokens == "first_last")]
        for head in range(HEADS):
            q, k, v = (states[row, head, real] for states in (query, key, value))
            table = keep[row, head][real][:, real]
            scores = q @ k.mT * size**-0.5
            if bias is not None:  # per distance
                scores = scores + bias[head][real[:, None] - real + length - 1].to(scores.dtype)
            scores = scores.masked_fill(~table, -torch.inf)
            removed = (~table).sum(-1)
            if mask.rest != "none" and removed.any() and len(others):
                mean, k, v = (states[row, head, others] for states in (query, key, value))
                shares = (mean.mean(0) @ k.mT * size**-0.5).softmax(-1)
                entropy = -(shares * shares.log()).sum()
                rest = (
                    q @ (shares @ k) * size**-0.5 + (removed / len(others)).log() + entropy + mask.rest_bias[0, head]
                )
                scores, v = (
                    torch.cat([scores, rest[:, None]], -1),
                    torch.cat([value[row, head, real], (shares @ v)[None]]),
                )
            output[row, head, real] = scores.softmax(-1).nan_to_num(0).to(v.dtype) @ v
    return output


@pytest.mark.parametrize(
    ("name", "mask", "padding", "turn"),
    [
        (name, mask, padding, (number + turn) % 3)
        for name in NAMES
        for number, mask in enumerate(MASKS)
        for turn, padding in enumerate(PADDINGS)
        # Flex takes long, and sparse_cpu has a file of its own.
        if name not in ("sparse_flex", "sparse_cpu") or number % 3 == turn
    ],
)
def test_rest_equals_one_more_key(name, mask, padding, turn):
    torch.manual_seed(0)
    keep = {"length": 33, "form": "offsets"} | MASKS[mask]
    mask = SparseMask(**keep, rest="mean", rest_bias=torch.randn(1, HEADS))
    padding = padding_of(padding)
    size, dtype = (8, 32, 64)[turn], DTYPES[turn]
    query, key, value, grad = torch.randn(4, 3, HEADS, 33, size).to(dtype)
    table = kept(mask, 33, padding, batch=3)
    truth = partial(formula, keep=table, padding=padding, mask=mask)
    plain, want = (with_gradients(truth, (query, key, value), grad, wide) for wide in (None, torch.float64))

    attention = partial(sparse_dot_product_attention, mask=mask, padding=padding, backend=name)
    if name in TRAINED:
        got = with_gradients(attention, (query, key, value), grad)
    else:
        with torch.no_grad():
            got = [attention(query, key, value)]
    assert_as_good_as_plain(got, plain, want)


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "sparse_sdpa"])
def test_dropout_never_drops_the_rest(name):
    mask = SparseMask(torch.tensor([True]).expand(HEADS, -1), 16, "offsets", rest="mean")
    value = torch.randn(2, HEADS, 16, 16, requires_grad=True)
    zeros = torch.zeros_like(value)
    output = sparse_dot_product_attention(zeros, zeros, value, mask, dropout_p=0.9, backend=name)
    own = output - 15 / 16 * value.mean(2, keepdim=True)  # a token pays 1 / 16 of its attention to itself
    factors = 10.0 * ((own / value * 16).detach() > 5)
    torch.testing.assert_close(own, factors / 16 * value, atol=1e-5, rtol=0)
    assert factors.unique().tolist() == [0, 10]
    output.sum().backward()
    torch.testing.assert_close(value.grad, factors / 16 + 15 / 16)


def tiny_model(**fields):
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64, vocab_size=50,
        max_position_embeddings=64, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    return BertModel(config).eval()


def test_model_is_saved_and_loaded_with_its_rest(tmp_path):
    model = attach(tiny_model(), "window", mask_length=32, rest="mean", pattern_kwargs={"window_size": 3})
    bias = torch.randn(2, HEADS)
    model.set_mask(model.sparse_attention.mask.replace(rest_bias=bias))
    ids, real = torch.randint(5, 50, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    real[1, :11] = 0
    states = model(ids, attention_mask=real).last_hidden_state
    model.save_pretrained(tmp_path / "one")
    again = load(tmp_path / "one")
    assert again.sparse_attention.mask.rest_biases().equal(bias)
    assert again(ids, attention_mask=real).last_hidden_state.equal(states)
    assert again.sparse_attention.mask.replace(rest="none").rest_bias is None
    again.save_pretrained(tmp_path / "two")
    for name in ("mask_config.json", "mask.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    outputs = again(ids, attention_mask=real, output_attentions=True)
    attentions = outputs.attentions[0]
    attentions.retain_grad()
    outputs.last_hidden_state[..., ::2].sum().backward()
    assert attentions.grad.abs().max() > 0
    assert attentions.shape == (2, HEADS, 40, 40) and attentions[0].sum(-1).max() < 0.9
    assert not torch.allclose(load(tmp_path / "one", rest="none")(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("hard", [False, True])
def test_search_counts_what_it_removes(hard):
    model = tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    attach(model, "dam_s", mask_length=32, rest="mean", target_sparsity=0.8, hard=hard)
    model.train().sparse_attention.set_progress(0.1)
    ids, weights = torch.randint(5, 50, (2, 32)), torch.randn(32)
    for real in (None, torch.ones(2, 32).long().index_fill(1, torch.tensor([31]), 0)):
        gradients = []
        for name in ("sparse_eager", "sparse_sdpa"):
            model.set_attn_implementation(name)
            (model(ids, attention_mask=real).last_hidden_state[:, :31] @ weights).sum().backward()
            gradients.append(model.sparse_attention.mask_logits.grad.clone())
            model.zero_grad()
        assert gradients[0].abs().max() > 0
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        model.sparse_attention.mask_logits[..., 3:] = -9.0
    model.eval().sparse_attention.set_progress(1.0)
    searching = model(ids).last_hidden_state
    assert model.freeze().rest == "mean"
    torch.testing.assert_close(model(ids).last_hidden_state, searching)


def test_layers_with_a_sliding_window_have_no_rest():
    config = ModernBertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64, vocab_size=50,
        global_attn_every_n_layers=3, local_attention=8, pad_token_id=0, bos_token_id=1, cls_token_id=1,
        sep_token_id=2, eos_token_id=2,
    )  # fmt: skip
    config.layer_types = ["sliding_attention"] * 2
    model = ModernBertModel(config).eval()
    ids = torch.randint(5, 50, (2, 24))
    mask = SparseMask(torch.ones(HEADS, 3).bool(), 24, "offsets", special_tokens="first", rest="mean")
    states = attach(model, mask)(ids).last_hidden_state
    model.set_mask(mask.replace(rest="none"))
    assert states.equal(model(ids).last_hidden_state)


CANNOT = {
    "causal": (lambda: attach(tiny_model(is_decoder=True), "window", rest="mean", mask_length=8), "undefined"),
    "a search": (lambda: attach(tiny_model(is_decoder=True), "dam_s", rest="mean", mask_length=8), "undefined"),
    "product": (lambda: attach(tiny_model(), "dam_s", rest="mean", mask_form="multiplicative"), "multiplicative"),
    "what": (lambda: attach(tiny_model(), "window", rest="average"), "must be one of 'none', 'mean', got 'average'"),
    "4-D": (
        lambda: attach(tiny_model(), "window", rest="mean", mask_length=8)(
            torch.ones(1, 8).long(), attention_mask=torch.ones(1, 1, 8, 8).bool()
        ),
        "4-D attention_mask",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_has_no_rest_is_refused(case):
    run, words = CANNOT[case]
    with pytest.raises(ValueError, match=words):
        run()


def test_only_masks_with_a_rest_need_a_newer_reader(tmp_path):
    mask = SparseMask(torch.ones(HEADS, 8).bool(), 8, "offsets")
    for rest, version in (("none", 1), ("mean", 2)):
        mask.replace(rest=rest).save_pretrained(tmp_path / rest)
        described = json.loads((tmp_path / rest / "mask_config.json").read_text())
        assert described["format_version"] == version and described.get("rest", "none") == rest
        assert SparseMask.from_pretrained(tmp_path / rest) == mask.replace(rest=rest)
    assert (tmp_path / "none/mask.safetensors").read_bytes() == (tmp_path / "mean/mask.safetensors").read_bytes()
    path = tmp_path / "mean/mask_config.json"
    path.write_text(path.read_text().replace('"mean"', '"median"'))
    with pytest.raises(MaskFileError, match="rest must be one of 'none', 'mean', got 'median'"):
        SparseMask.from_pretrained(tmp_path / "mean")
