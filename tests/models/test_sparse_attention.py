"""The home of the mask: what set, frozen and cached masks do to the model that carries them."""

import json

import pytest
import torch
from transformers import AutoModelForMaskedLM

from sparsebert import SparseBertForMaskedLM, SparseMask, build_pattern


IDS = torch.arange(5, 25)[None]


@pytest.mark.parametrize("change", ["freeze", "set_mask"])
@pytest.mark.parametrize("owner", ["model", "sparse_attention"])
def test_a_new_mask_is_saved_with_the_model(change, owner, tiny_config, assert_same_model, tmp_path):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s")).eval()
    target = model if owner == "model" else model.sparse_attention
    if change == "freeze":
        target.freeze(sparsity=0.6, metadata={"run": "a"})
    else:
        target.set_mask(SparseMask(torch.rand(4, 40, 40) < 0.5, 40, special_tokens="first"))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.sparse_attention.mask == model.sparse_attention.mask
    assert loaded.config.search == ("dam_s" if change == "freeze" else None)
    assert_same_model(loaded, model, input_ids=IDS)
    if change == "freeze":
        assert loaded.sparse_attention.mask.metadata["run"] == "a"
        assert loaded.sparse_attention.mask.metadata["search"] == "dam_s"


def test_one_state_at_a_time(tiny_config):
    sparse_attention = SparseBertForMaskedLM(tiny_config(search="dam_s")).sparse_attention
    assert sparse_attention.searching and sparse_attention.mask is None
    assert sparse_attention.learned.logits is sparse_attention.mask_logits
    mask, outcome = sparse_attention.end_search(sparsity=0.6)
    assert not sparse_attention.searching and sparse_attention.mask is mask
    assert sparse_attention.search is sparse_attention.learned is sparse_attention.mask_logits is None
    assert outcome["asked"] == 0.6 and outcome["got"] == mask.sparsity
    for ended in (sparse_attention.freeze, sparse_attention.start_pruning, sparse_attention.outcome):
        with pytest.raises(ValueError, match="mask of this model is frozen"):
            ended()


def test_a_compiled_search_needs_one_graph(tiny_config):
    """However far the search is, and with forwards that are not compiled in between."""
    torch._dynamo.reset()
    model = SparseBertForMaskedLM(tiny_config(num_hidden_layers=1, search="dam_s", target_sparsity=0.5)).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):
        model.sparse_attention.set_progress(step / 3)
        losses = []
        for forward in (compiled, model):
            torch.manual_seed(step)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                losses.append(forward(IDS, labels=IDS).loss)
        torch.testing.assert_close(*losses)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["freeze", "set_mask"])
def test_a_frozen_mask_owns_how_it_is_used(how, tiny_config):
    """What the configuration asked for is a request, which the mask answers."""
    asked = {"diagonal": "keep", "last_token": "position", "length_policy": "dense"}
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", **asked))
    if how == "freeze":
        mask = model.freeze(sparsity=0.6)
        assert (mask.diagonal, mask.last_token, mask.length_policy) == (True, "position", "dense")
    else:
        mask = build_pattern("window", 40, 4)
        model.set_mask(mask)
        assert model.sparse_attention.mask == mask, "a mask is set as it is"
    assert [getattr(model.config, name) for name in asked] == [None] * 3


@pytest.mark.parametrize("stated", [{}, {"diagonal": "keep"}, {"last_token": "position", "length_policy": "dense"}])
def test_a_configuration_that_repeats_the_mask(stated, tiny_config, tmp_path):
    """As configurations were once written."""
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", **stated))
    mask = model.freeze(sparsity=0.6)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    repeated = {"diagonal": "learned", "last_token": "real", "length_policy": "extend"}
    path.write_text(json.dumps(json.loads(path.read_text()) | repeated | stated))
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).sparse_attention.mask == mask
    changed = AutoModelForMaskedLM.from_pretrained(tmp_path, diagonal="remove").sparse_attention.mask
    assert changed == mask.without_diagonal()


@pytest.mark.parametrize("pattern, diagonal", [("no_diag", False), ("window", None)])
def test_a_pattern_keeps_the_diagonal_that_it_defines(pattern, diagonal, tiny_config):
    for asked in (None, "learned"):
        model = SparseBertForMaskedLM(tiny_config(pattern=pattern, diagonal=asked))
        assert model.sparse_attention.mask.diagonal is diagonal


def test_overrides_apply_to_a_loaded_mask(tiny_config, tmp_path):
    model = SparseBertForMaskedLM(tiny_config(search="dam_u", mask_length=16, diagonal="keep"))
    model.freeze()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="length_policy"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)(IDS)
    longer = AutoModelForMaskedLM.from_pretrained(tmp_path, length_policy="dense")
    assert longer(IDS).logits.isfinite().all()
    assert longer.sparse_attention.mask.length_policy == "dense"
    removed = AutoModelForMaskedLM.from_pretrained(tmp_path, diagonal="remove", allow_empty_rows=True)
    assert not removed.sparse_attention.mask.to_table().diagonal(dim1=-2, dim2=-1).any()


@pytest.mark.parametrize("field, value", [("search", "soft"), ("pattern", "bigbird")])
def test_a_new_search_or_pattern_replaces_a_frozen_mask(field, value, tiny_config, tmp_path):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s"))
    model.freeze(sparsity=0.6)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, **{field: value})
    assert getattr(loaded.config, field) == value and not loaded.config.frozen
    assert loaded.sparse_attention.searching == (field == "search")
    assert loaded.sparse_attention.mask != model.sparse_attention.mask


@pytest.mark.parametrize("search", ["dam_s", "dam_u", "dam_b", "vertical_slash"])
def test_cache_does_not_grow_with_the_number_of_lengths(tiny_config, search):
    """While searching; forms of a frozen mask are kept by the mask, see test_compiled.py."""
    model = SparseBertForMaskedLM(tiny_config(search=search)).train()
    reference = {}
    for length in (20, 3, 17, 8, 19, 1, 20, 3):
        torch.manual_seed(length)
        logits = model(IDS[:, :length]).logits
        torch.testing.assert_close(logits, reference.setdefault(length, logits))
    assert 0 < len(model.sparse_attention.search._cache) <= 3


def test_training_after_inference_mode(tiny_config):
    model = SparseBertForMaskedLM(tiny_config(pattern="window"))
    with torch.inference_mode():
        model(IDS)
    model(IDS, labels=IDS).loss.backward()
    assert model.bert.embeddings.word_embeddings.weight.grad.isfinite().all()


def test_no_sampled_mask_outweighs_causality(tiny_config):
    """Even when every live key is sampled off, nothing of the future shows."""
    model = SparseBertForMaskedLM(tiny_config(search="dam_u", is_decoder=True, mask_constant=1e4)).train()
    with torch.no_grad():
        model.sparse_attention.mask_logits.fill_(-5.0)
    changed = IDS.clone()
    changed[0, 12:] = 50
    outputs = []
    for ids in (IDS, changed):
        torch.manual_seed(1)
        outputs.append(model(ids).logits[0, :12])
    torch.testing.assert_close(*outputs)
