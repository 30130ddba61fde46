"""Patterns, backends and masks of a program that uses the package."""

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from conftest import TINY
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, BertConfig, BertModel

from sparsebert import (
    PATTERNS,
    SEARCHES,
    SparseBertConfig,
    attach,
    build_pattern,
    load,
    register_backend,
    register_pattern,
    register_search,
)
from sparsebert.attention.backends import BACKENDS
from sparsebert.attention.choosing.choice import ATTENTION_NAMES
from sparsebert.learning.attach_fields import AttachFields, PatternConfig, SearchConfig
from sparsebert.learning.mask_description import MASK_FIELDS, PATTERN_FIELDS, MaskFields, allowed_fields


IDS = torch.arange(5, 17)[None]


def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**TINY)).eval()


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for registry in (PATTERNS, BACKENDS, SEARCHES):
        for name in (known := dict(registry)):
            monkeypatch.setitem(registry, name, known[name])
    yield
    for registry in (PATTERNS, BACKENDS, SEARCHES):
        for name in ("every_other", "plain", "mine", "soft_offsets"):
            registry.pop(name, None)


def test_the_example_of_the_documentation():
    page = (Path(__file__).parents[1] / "docs/extending.md").read_text(encoding="utf-8")
    code = re.search(r"^## In a program of your own$.*?^```python\n(.*?)^```$", page, re.M | re.S)[1]
    exec(code.replace("num_hidden_layers=1", f"**{TINY}"), names := {})
    assert "plain" in ATTENTION_NAMES and "plain" in AttentionInterface._global_mapping
    found = names["model"].eval()(IDS).last_hidden_state
    names["model"].set_attn_implementation("sparse_eager")
    torch.testing.assert_close(found, names["model"](IDS).last_hidden_state)
    register_pattern("every_other", lambda length: torch.ones(length, length) > 0)  # again, in a notebook
    assert build_pattern("every_other", 8, 2).sparsity == 0


@pytest.mark.parametrize(
    ("register", "arguments", "fields", "said"),
    [
        (register_pattern, ("window", lambda length: None), {}, "name must be an identifier, and none of strided"),
        (register_pattern, ("a/b", lambda length: None), {}, "name must be an identifier"),
        (register_pattern, ("mine", lambda length, size: None), {}, "keyword-only parameters with defaults"),
        (register_pattern, ("mine", 3), {}, "must be a function of the length"),
        (register_pattern, ("mine", lambda: None), {}, "must be a function of the length"),
        (register_backend, ("sparse_cpu", print), {}, "none of sparse_eager, .*, got 'sparse_cpu'"),
        (register_backend, ("sdpa", print), {}, "got 'sdpa'"),
        (register_backend, (["mine"], print), {}, "name must be an identifier"),
        (register_backend, ("flash_attention_2", print), {}, "attention of transformers"),
        (register_backend, ("mine", 3), {}, "function must be a function, got int"),
        (register_backend, ("mine", print), {"supports": ["weigths"]}, "did you mean 'weights'"),
        (register_backend, ("mine", print), {"probability_maps": ["softmin"]}, "did you mean 'softmax'"),
        (register_search, ("dam_s", "offsets"), {}, "none of soft, .*, got 'dam_s'"),
        (register_search, ("window", "offsets"), {}, "got 'window'"),
        (register_search, ("a b", "offsets"), {}, "name must be an identifier"),
        (register_search, ("mine", "rows"), {}, "form must be one of 'table', 'offsets'"),
        (register_search, ("mine", "table"), {"stochastic": "no"}, "stochastic must be"),
        (register_search, ("mine", "table"), {"special_tokens": "last"}, "special_tokens must be"),
        (register_search, ("mine", "table"), {"mask_constant": 0}, "mask_constant must be in"),
    ],
)
def test_what_cannot_be_registered(register, arguments, fields, said):
    with pytest.raises(ValueError, match=said):
        register(*arguments, **fields)
    assert "mine" not in {**PATTERNS, **BACKENDS, **SEARCHES}


@pytest.mark.parametrize(
    ("form", "stochastic"),
    [("table", True), ("offsets", False), ("blocks", False), ("vertical_slash", False)],
)
def test_a_search_of_ones_own(form, stochastic, tmp_path):
    """It learns, and is saved and read back, while it searches and frozen."""
    register_search("mine", form, stochastic=stochastic, special_tokens="first")
    assert SparseBertConfig(search="mine").search == "mine"
    blocks = {"block_size": 16} if form == "blocks" else {}
    model = attach(bert(), "mine", mask_length=36, target_sparsity=0.5, **blocks).train()
    model(IDS.repeat(1, 3)).last_hidden_state.square().sum().backward()
    assert model.sparse_attention.learned.logits.grad.abs().sum() > 0
    model.save_pretrained(tmp_path / "searching")
    assert load(tmp_path / "searching").sparse_attention.config.search == "mine"
    mask = model.freeze()
    model.save_pretrained(tmp_path / "frozen")
    assert load(tmp_path / "frozen").sparse_attention.mask == mask


@pytest.mark.parametrize("made", [torch.ones(3, 3) > 0, 3])
def test_a_pattern_that_gives_something_else(made):
    register_pattern("mine", lambda length: made)
    with pytest.raises(ValueError, match="pattern 'mine'"):
        build_pattern("mine", 8, 2)


def test_a_pattern_with_the_name_of_a_search(monkeypatch):
    monkeypatch.setitem(PATTERNS, "soft", PATTERNS["window"])
    with pytest.raises(ValueError, match="'soft' is a search and a registered pattern"):
        attach(bert(), "soft")


@pytest.mark.parametrize("leading", [(), (4,), (2, 4)])
def test_a_table_is_a_mask(leading):
    """For the model and for FlexAttention."""
    keep = torch.rand(*leading, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.5
    keep = keep | torch.eye(12, dtype=torch.bool)
    model, other = attach(bert(), keep), attach(bert(), "dense", mask_length=12)
    assert torch.equal(model.sparse_attention.mask.keep, keep.expand(len(keep) if len(leading) == 2 else 1, 4, 12, 12))
    other.set_mask(keep)
    torch.testing.assert_close(model(IDS).last_hidden_state, other(IDS).last_hidden_state)
    mask, layer = model.sparse_attention.mask, model.sparse_attention.mask.num_layers - 1
    states = torch.randn(3, 1, 4, 12, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask.to_table()[layer])
    torch.testing.assert_close(flex_attention(*states, block_mask=mask.to_block_mask(layer=layer)), expected)
    with pytest.raises(ValueError, match="layer must be"):
        mask.to_block_mask(layer=-1)


@pytest.mark.parametrize(
    ("given", "fields", "said"),
    [
        (3, {}, "mask_or_search must be a SparseMask, or a bool tensor"),
        (torch.ones(12, 12), {}, "keep must be a bool tensor"),
        (torch.ones(2, 12) > 0, {}, r"must have shape \(L, H, 12, 12\)"),
    ],
)
def test_what_is_refused(given, fields, said):
    with pytest.raises(ValueError, match=said):
        attach(bert(), given, **fields)


def test_editors_know_the_fields_of_attach():
    """Those that `attach` takes, with the types of the configuration."""
    hints = get_type_hints(MaskFields)
    of_patterns, of_searches, of_all = map(get_type_hints, (PatternConfig, SearchConfig, AttachFields))
    assert of_patterns == {name: hints[name] for name in (*MASK_FIELDS, *PATTERN_FIELDS)}
    assert of_searches == {name: hints[name] for name in allowed_fields("dam_b")}
    assert of_all == of_patterns | of_searches | dict.fromkeys(("revision", "subfolder", "token"), str | None)
