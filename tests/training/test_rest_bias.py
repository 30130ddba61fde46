from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel

from sparsebert import SparseMask, attach, calibrate_rest
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.rest import keys_of_rest, pooled_rest
from sparsebert.training.searching.matching import carrier
from sparsebert.training.searching.rest_bias import calibrated


HEADS, LENGTH = 4, 24


@pytest.mark.parametrize("special_tokens", ["none", "first", "first_last"])
def test_calibrated_rest_gets_the_attention_of_what_is_removed(special_tokens):
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64, vocab_size=50,
        max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    model = BertModel(config).eval()
    keep = torch.arange(LENGTH).expand(2, HEADS, -1) % 5 == 0
    mask = SparseMask(keep, LENGTH, "offsets", special_tokens=special_tokens, rest="mean")
    attach(model, mask)
    ids = torch.randint(5, 50, (6, LENGTH))
    found = calibrated(model, carrier(model), mask, ids.split(2))
    assert found.keep.equal(mask.keep) and found.rest_bias.shape == (2, HEADS)
    assert model.sparse_attention.mask is mask
    implementation = model.config._attn_implementation
    calibrate_rest(model, [{"input_ids": batch} for batch in ids.split(2)])
    assert model.sparse_attention.mask == found and model.config._attn_implementation == implementation
    with pytest.raises(ValueError, match="no padding"):
        calibrate_rest(model, [{"input_ids": ids, "attention_mask": (ids > 10).long()}])
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate_rest(model, [])
    assert model.sparse_attention.mask == found and model.config._attn_implementation == implementation
    model.set_mask(mask.replace(rest="none"))
    with pytest.raises(ValueError, match="needs a model whose mask is frozen and has a rest"):
        calibrate_rest(model, [ids])

    # The first layer, from its own queries and keys.
    attention = model.encoder.layer[0].attention.self
    states = model.embeddings(ids)
    query, key = (
        layer(states).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (attention.query, attention.key)
    )
    scale = query.shape[-1] ** -0.5
    scores, removed = query @ key.mT * scale, ~mask.to_table()[0]
    inputs = MaskInputs("sparse_eager", LENGTH, LENGTH, rest=(torch.zeros(HEADS),))
    keys = keys_of_rest(inputs, special_tokens, "real")
    rest = pooled_rest(query, key, key, replace(inputs, rest_keys=keys), scale)
    ours = torch.einsum("bhnd,bhd->bhn", query, rest.key) * scale + rest.score[..., None] + removed.sum(-1).log()
    theirs = scores.masked_fill(~removed, -torch.inf).logsumexp(-1)
    lacking = (removed.sum(-1) > 0).expand(6, -1, -1)
    want = [(theirs - ours)[:, head][lacking[:, head]].mean() for head in range(HEADS)]
    torch.testing.assert_close(found.rest_bias[0], torch.stack(want), atol=1e-4, rtol=1e-4)


def test_mask_without_a_rest_stays_as_it_is():
    mask = SparseMask(torch.ones(HEADS, 4).bool(), 4, "offsets")
    assert calibrated(None, None, mask, []) is mask
