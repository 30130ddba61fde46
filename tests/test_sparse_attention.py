"""The home of the mask: what set, frozen and cached masks do to the model that carries them."""

import pytest
import torch
from transformers import AutoModelForMaskedLM

from sparsebert import SparseBertForMaskedLM, SparseMask


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


@pytest.mark.parametrize("search", ["dam_s", "dam_u", "dam_b"])
def test_cache_does_not_grow_with_the_number_of_lengths(tiny_config, search):
    """While searching; forms of a frozen mask are kept by the mask, see test_compiled.py."""
    model = SparseBertForMaskedLM(tiny_config(search=search)).train()
    reference = {}
    for length in (20, 3, 17, 8, 19, 1, 20, 3):
        torch.manual_seed(length)
        logits = model(IDS[:, :length]).logits
        torch.testing.assert_close(logits, reference.setdefault(length, logits))
    assert 0 < len(model.sparse_attention._cache) <= 3


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


def test_logits_stay_float32(tiny_config, tmp_path):
    SparseBertForMaskedLM(tiny_config(search="dam_s")).save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.sparse_attention.mask_logits.dtype == torch.float32


def test_mask_for_another_model_is_refused(tiny_config):
    model = SparseBertForMaskedLM(tiny_config())
    with pytest.raises(ValueError, match="3 heads.*the model has 2 layers.*4 heads"):
        model.set_mask(SparseMask(torch.ones(3, 40, 40, dtype=torch.bool), 40))
    with pytest.raises(ValueError, match="5 layer"):
        model.set_mask(SparseMask(torch.ones(5, 4, 40, 40, dtype=torch.bool), 40))
    with pytest.raises(ValueError, match="keep nothing"):
        model.set_mask(SparseMask(torch.zeros(4, 40, 40, dtype=torch.bool), 40))
    assert model.sparse_attention.searching
