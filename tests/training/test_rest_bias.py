import copy
from dataclasses import replace

import pytest
import torch
from transformers import AlbertModel, BertModel, MPNetModel

from sparsebert import SparseMask, attach, calibrate_rest
from sparsebert.attention.distance_bias import distance_table
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.rest import keys_of_rest, pooled_rest
from sparsebert.models.families.mpnet import bias_by_distance
from sparsebert.training.searching.matching import carrier, running_through
from sparsebert.training.searching.rest_bias import calibrated, train_rest


HEADS, LENGTH = 4, 24


def a_model(made=BertModel, initializer_range=0.3):
    config = made.config_class(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64, vocab_size=50,
        max_position_embeddings=LENGTH + 2, initializer_range=initializer_range,
    )  # fmt: skip
    return made(config).eval()


@pytest.mark.parametrize(
    ("made", "special_tokens"),
    [(BertModel, "none"), (BertModel, "first"), (BertModel, "first_last"), (MPNetModel, "first_last")],
)
def test_calibrated_rest_gets_the_attention_of_what_is_removed(made, special_tokens):
    """Of an MPNet, whose bias per distance the rest has not, too."""
    torch.manual_seed(0)
    model = a_model(made)
    keep = torch.arange(LENGTH).expand(2, HEADS, -1) % 5 == 0
    mask = SparseMask(keep, LENGTH, "offsets", special_tokens=special_tokens, rest="mean")
    attach(model, mask)
    ids = torch.randint(5, 50, (6, LENGTH))
    other = mask.replace(keep=keep[:1].roll(1, -1), special_tokens="none")
    masks = {"own": mask, "other": other, "none": mask.replace(rest="none")}
    together = calibrated(model, carrier(model), masks, ids.split(2))
    found = together["own"]
    assert list(together) == list(masks) and together["none"] is masks["none"]
    assert together["other"] == calibrated(model, carrier(model), {"other": other}, ids.split(2))["other"]
    assert found.keep.equal(mask.keep) and found.rest_bias.shape == (2, HEADS)
    assert model.sparse_attention.mask is mask
    implementation = model.config._attn_implementation
    calibrate_rest(model.train(), [{"input_ids": batch} for batch in ids.split(2)])
    assert (
        model.training and model.sparse_attention.mask == found and model.config._attn_implementation == implementation
    )
    # Every query from which something is removed counts alike; rows of special tokens have no rest.
    unlike = [ids[:1], ids[1:], torch.tensor([[5], [6]]), torch.tensor([[5, 6]])]
    bias = calibrated(model, carrier(model.eval()), {"own": mask}, unlike[: 2 if special_tokens == "none" else None])
    torch.testing.assert_close(bias["own"].rest_bias, found.rest_bias, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="no padding"):
        calibrate_rest(model, [{"input_ids": ids, "attention_mask": (ids > 10).long()}])
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate_rest(model, [])
    with pytest.raises(ValueError, match="a batch must be token ids or arguments by name, as tensors, got str"):
        calibrate_rest(model.eval(), ["text"])
    assert model.sparse_attention.mask == found and model.config._attn_implementation == implementation
    model.set_mask(mask.replace(rest="none"))
    with pytest.raises(ValueError, match="needs a model whose mask is frozen and has a rest"):
        calibrate_rest(model, [ids])

    # The first layer, from its own queries and keys.
    attention, biased = model.encoder.layer[0].attention, made is MPNetModel
    parts = (attention.attn.q, attention.attn.k) if biased else (attention.self.query, attention.self.key)
    query, key = (part(model.embeddings(ids)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    scale = query.shape[-1] ** -0.5
    scores, removed = query @ key.mT * scale, ~mask.to_table()[0]
    if biased:
        scores = scores + distance_table(*bias_by_distance(model, LENGTH), LENGTH, LENGTH)
    inputs = MaskInputs("sparse_eager", LENGTH, LENGTH, rest=(torch.zeros(HEADS),))
    keys = keys_of_rest(inputs, special_tokens, "real")
    rest = pooled_rest(query, key, key, replace(inputs, rest_keys=keys), scale)
    ours = torch.einsum("bhnd,bhd->bhn", query, rest.key) * scale + rest.score[..., None] + removed.sum(-1).log()
    theirs = scores.masked_fill(~removed, -torch.inf).logsumexp(-1)
    lacking = (removed.sum(-1) > 0).expand(6, -1, -1)
    want = [(theirs - ours)[:, head][lacking[:, head]].mean() for head in range(HEADS)]
    torch.testing.assert_close(found.rest_bias[0], torch.stack(want), atol=1e-4, rtol=1e-4)


def test_one_bias_where_layers_share_their_weights():
    """For the first layer it would not be that of the others, which attend to other states."""
    torch.manual_seed(0)
    model, rows = a_model(AlbertModel, 0.1), torch.randint(5, 50, (8, LENGTH))
    mask = SparseMask((torch.arange(LENGTH) % 5 == 0).expand(1, HEADS, -1), LENGTH, "offsets", rest="mean")
    attach(model, mask)
    calibrate_rest(model, [rows])
    found = model.sparse_attention.mask.rest_bias
    model.config.num_hidden_layers = 1
    calibrate_rest(model, [rows])
    first = model.sparse_attention.mask.rest_bias
    assert found.shape == first.shape == (1, HEADS) and (found - first).abs().min() > 0.01


def test_calibration_in_half_precision_and_through_an_adapter():
    """In float16 small probabilities are 0."""
    torch.manual_seed(0)
    model, rows = a_model(), torch.randint(5, 50, (8, LENGTH))
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight *= 8
    attach(model, SparseMask(torch.arange(LENGTH).expand(2, HEADS, -1) < 3, LENGTH, "offsets", rest="mean"))
    calibrate_rest(model, [rows])
    expected = model.sparse_attention.mask.rest_bias
    calibrate_rest(model.half(), [rows])
    torch.testing.assert_close(model.sparse_attention.mask.rest_bias, expected, atol=0.05, rtol=0)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model.float(), peft.LoraConfig(target_modules=["query"], r=2))
    calibrate_rest(adapted, [rows])
    torch.testing.assert_close(adapted.sparse_attention.mask.rest_bias, expected, atol=1e-2, rtol=0)


@pytest.mark.parametrize(("made", "bf16"), [(BertModel, False), (MPNetModel, True)])
def test_trained_rest_brings_the_model_closer_to_the_dense_one(made, bf16, caplog):
    """No weight, nor the mask of the model itself, changes."""
    torch.manual_seed(0)
    model, rows = a_model(made), torch.randint(5, 50, (8, LENGTH))
    other = a_model(made)
    attach(model, SparseMask(torch.arange(LENGTH).expand(2, HEADS, -1) < 3, LENGTH, "offsets", rest="mean"))
    calibrate_rest(model, [rows])
    mask, weights = model.sparse_attention.mask, copy.deepcopy(model.state_dict())

    def error(states):
        with torch.no_grad():
            return torch.nn.functional.mse_loss(model(rows).last_hidden_state, states).item()

    with torch.no_grad():
        states = other(rows).last_hidden_state
        with running_through(model, carrier(model)):
            own = model(rows).last_hidden_state
    before = error(own), error(states)
    found = train_rest(model, None, [rows] * 20, 20, "last", bf16)
    by_other = train_rest(model, other, [rows] * 20, 20, "last", bf16)
    assert model.sparse_attention.mask is mask and (error(own), error(states)) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert found == mask.replace(rest_bias=found.rest_bias) and found.rest_bias.shape == mask.rest_bias.shape
    with torch.no_grad():
        broken = copy.deepcopy(other)
        broken.get_input_embeddings().weight.fill_(torch.nan)
    assert train_rest(model, broken, [rows] * 2, 2, "last", bf16) is mask
    assert "stays as it was calibrated: at step 1 of its training the loss is nan" in caplog.text
    model.set_mask(found)
    assert error(own) < 0.95 * before[0]
    model.set_mask(by_other)
    assert error(states) < before[1] and not torch.equal(by_other.rest_bias, found.rest_bias)


def test_mask_without_a_rest_stays_as_it_is():
    mask = SparseMask(torch.ones(HEADS, 4).bool(), 4, "offsets")
    assert calibrated(None, None, {"own": mask}, [])["own"] is mask
