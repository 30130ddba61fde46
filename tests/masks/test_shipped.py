"""Masks that come with the package: for one model, known by its weights."""

import pytest
import torch
from transformers import BertConfig, BertModel

import sparsebert
from sparsebert.analysis.plans import saved_plan
from sparsebert.analysis.saved_runs import find_mask, read_saved_mask
from sparsebert.masks.shipped import QUERY_NORMS, SHIPPED
from sparsebert.models.attaching import read_mask
from sparsebert.training.runs.sources import check_source


def model_with(norms, length):
    """A small model whose query weights have these norms, as those of the model that a mask is for."""
    sizes = {"hidden_size": 48, "num_hidden_layers": len(norms), "num_attention_heads": 12, "intermediate_size": 8}
    model = BertModel(BertConfig(**sizes, vocab_size=50, max_position_embeddings=length)).eval()
    with torch.no_grad():
        for layer, norm in zip(model.encoder.layer, norms, strict=True):
            weight = layer.attention.self.query.weight
            weight *= norm / weight.norm()
    return model


@pytest.mark.parametrize("name", ["minilm-l6-128-90", "minilm-l6-512-90", "minilm-l6-512-tiles-80"])
def test_a_shipped_mask_is_attached_to_its_model_alone(name, tmp_path, caplog):
    mask = sparsebert.SparseMask.from_pretrained(name)
    assert mask.sparsity == pytest.approx(int(name[-2:]) / 100, abs=0.001) and mask.rest == "mean"
    assert str(mask.length) in name and (mask.form == "blocks") == ("tiles" in name)
    norms = mask.metadata[QUERY_NORMS]
    model = sparsebert.attach(model_with(norms, mask.length).to(torch.bfloat16), name)  # which changes norms little
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        model = sparsebert.load(folder)
        assert model.sparse_attention.mask == mask
        assert model.sparse_attention.mask.metadata[QUERY_NORMS] == norms
    assert not caplog.records
    others = [model_with(changed, mask.length) for changed in ([1.05 * norm for norm in norms], norms[:5])]
    for other in (*others, sparsebert.quantize(model_with(norms, mask.length))):
        with pytest.raises(ValueError, match="was found for sentence-transformers/all-MiniLM-L6-v2, and the queries"):
            sparsebert.attach(other, name)
        assert not hasattr(other, "sparse_attention")
    with torch.device("meta"):  # as for checks before weights are read
        sparsebert.attach(model_with(norms, mask.length), name)
    sparsebert.attach(others[0], "window", mask_length=mask.length)
    with pytest.raises(ValueError, match="was found for"):
        others[0].set_mask(mask)
    assert others[0].sparse_attention.mask != mask


def test_a_shipped_mask_is_known_by_its_name_wherever_a_mask_is_read(tmp_path, monkeypatch):
    name = min(SHIPPED)
    mask = sparsebert.SparseMask.from_pretrained(name)
    check_source("mask", name)
    assert read_saved_mask(name).mask == mask and saved_plan(name).length == mask.length
    for read in (sparsebert.SparseMask.from_pretrained, read_saved_mask, saved_plan):
        with pytest.raises(ValueError, match=f"did you mean '{name}'"):
            read(name[:-1])
    other = model_with(mask.metadata[QUERY_NORMS], mask.length)
    with pytest.raises(ValueError, match=f"did you mean '{name}'"):
        sparsebert.attach(other, name[:-1])
    with pytest.raises(ValueError, match="revision 'main' has no meaning"):
        sparsebert.attach(other, name, revision="main")
    monkeypatch.chdir(tmp_path)  # where a folder of this name comes first
    own = sparsebert.build_pattern("window", 16, 12)
    own.save_pretrained(tmp_path / name)
    assert sparsebert.SparseMask.from_pretrained(name) == own


@pytest.mark.parametrize("name", SHIPPED)
def test_commands_about_masks_find_them(name):
    assert find_mask(name) == read_mask(name)
