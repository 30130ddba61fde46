"""Token mixers: what each computes, models with them, parameter counts, the scripts."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError
from transformers import BertConfig, BertForMaskedLM

from sparsebert import (
    MIXERS,
    SparseBertConfig,
    SparseBertForMaskedLM,
    SparseBertForSequenceClassification,
    SparseBertModel,
    SparseMask,
    extend_positions,
    load,
)
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.commands import parse
from sparsebert.models.bert.token_mixers import FILTER_LENGTH, NUM_FILTERS, AverageAttention, BProj, SepConv


ROOT = Path(__file__).parents[2]
LENGTH = 40  # of the tiny models, and so of bproj
OTHERS = [name for name in MIXERS if name != "attention"]
EVERY_OTHER = pytest.mark.parametrize("name", OTHERS)
IDS = torch.randint(5, 100, (3, LENGTH), generator=torch.Generator().manual_seed(1))
SIZES = torch.tensor([LENGTH, 25, 9])
PADDING = (torch.arange(LENGTH) < SIZES[:, None]).long()
REAL = PADDING.bool()


def run(verb, *arguments):
    command, values = parse([verb, *arguments])
    return command.run(values)


def mixed(tiny_config, names, model_class=SparseBertForMaskedLM, **fields):
    return model_class(tiny_config(token_mixers=list(names), **fields))


def outputs(mixer, states, padding=None):
    return mixer(states, mask_inputs=MaskInputs("sparse_auto", padding=padding))[0]


def states_of(length=LENGTH):
    return torch.randn(3, length, 32)


# What each computes, by its definition


def test_average(tiny_config):
    states = states_of()
    got = outputs(AverageAttention(tiny_config()), states, REAL)
    for sequence, size in enumerate(SIZES):
        expected = states[sequence, :size].mean(0)
        torch.testing.assert_close(got[sequence], expected.expand(LENGTH, 32))


def test_bproj(tiny_config):
    states, mixer = states_of(), BProj(tiny_config())
    weight = mixer.positions.weight  # (n, n)
    got = outputs(mixer, states, REAL)
    for sequence, size in enumerate(SIZES):
        torch.testing.assert_close(got[sequence], weight[:, :size] @ states[sequence, :size])


def test_sepconv(tiny_config):
    """Filter f of 16 serves the channels 2 f and 2 f + 1 of 32, over positions i - 64 to i + 63."""
    states, mixer = states_of(), SepConv(tiny_config())
    got = outputs(mixer, states, REAL)
    values, gate = (states @ mixer.gated.weight.T + mixer.gated.bias).chunk(2, dim=-1)
    values = values * torch.sigmoid(gate)
    filters = mixer.filters.weight[:, 0]  # (F, k)
    assert filters.shape == (NUM_FILTERS, FILTER_LENGTH) == (16, 128)
    offset = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]  # j - i
    for channel in range(32):
        toeplitz = filters[channel // 2][offset + 64]  # (n, n)
        for sequence, size in enumerate(SIZES):
            expected = toeplitz[:, :size] @ values[sequence, :size, channel]
            torch.testing.assert_close(got[sequence, :, channel], expected, atol=1e-5, rtol=1e-4)


def test_sepconv_reaches_no_further_than_its_filter(tiny_config):
    mixer, states = SepConv(tiny_config()), states_of(300).requires_grad_()
    outputs(mixer, states)[0, 150].sum().backward()
    read = states.grad[0].abs().sum(-1).nonzero().flatten()
    assert (read.min(), read.max()) == (150 - 64, 150 + 63)


@EVERY_OTHER
def test_mixers_take_bfloat16_and_autocast(tiny_config, name):
    mixer, states = MIXERS[name](tiny_config()), states_of()
    with torch.autocast("cpu", torch.bfloat16):
        got = outputs(mixer, states, REAL)
    torch.testing.assert_close(got.float(), outputs(mixer, states, REAL), atol=0.05, rtol=0.05)
    assert outputs(mixer.bfloat16(), states.bfloat16(), REAL).dtype == torch.bfloat16


# Models


@EVERY_OTHER
def test_only_the_named_layers_change(tiny_config, name):
    model = mixed(tiny_config, [name, "attention"], SparseBertModel, pattern="dense")
    layers = [layer.attention.self for layer in model.encoder.layer]
    assert [type(layer) for layer in layers] == [MIXERS[name], MIXERS["attention"]]
    assert model.encoder.layer[0].attention.output.dense.weight.shape == (32, 32)  # W_O stays


@EVERY_OTHER
@pytest.mark.parametrize("layers", ["all", "first"])
def test_padding_contributes_nothing(tiny_config, name, layers):
    names = [name, name if layers == "all" else "attention"]
    model = mixed(tiny_config, names, pattern="dense", initializer_range=0.3).eval()
    changed = torch.where(REAL, IDS, 7)
    with torch.no_grad():
        got = model(IDS, attention_mask=PADDING).logits
        torch.testing.assert_close(got[REAL], model(changed, attention_mask=PADDING).logits[REAL])
        assert not torch.allclose(got[REAL], model(changed).logits[REAL], atol=1e-2)
        if name != "bproj":
            for row, size in enumerate(SIZES):
                alone = model(IDS[row : row + 1, :size]).logits[0]
                torch.testing.assert_close(got[row, :size], alone, atol=1e-4, rtol=1e-4)


@EVERY_OTHER
@pytest.mark.parametrize("fields", [{"pattern": "bigbird"}, {"search": "dam_s", "share_layers": False}], ids=str)
def test_hybrids_train_and_reload(tiny_config, assert_same_model, tmp_path, name, fields):
    model = mixed(tiny_config, [name, "attention"], **fields).train()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(IDS, attention_mask=PADDING, labels=IDS).loss.backward()
    optimizer.step()
    unchanged = [key for key, value in model.named_parameters() if torch.equal(value, before[key])]
    assert not [key for key in unchanged if "encoder.layer.0" in key or "mask_logits" in key]
    if "search" in fields:
        model.freeze(sparsity=0.5)
    model.eval().save_pretrained(tmp_path)
    for loaded in (SparseBertForMaskedLM.from_pretrained(tmp_path), load(tmp_path)):
        assert loaded.config.token_mixers == [name, "attention"]
        assert_same_model(loaded, model, input_ids=IDS, attention_mask=PADDING)


@EVERY_OTHER
def test_gradient_checkpointing(tiny_config, name):
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = mixed(tiny_config, [name, "attention"], pattern="dense").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(IDS, attention_mask=PADDING, labels=IDS).loss.backward()
        grads.append(model.bert.encoder.layer[0].attention.output.dense.weight.grad)
    torch.testing.assert_close(*grads)


@EVERY_OTHER
def test_a_head_starts_from_pretrained_mixers(tiny_config, tmp_path, name):
    model = mixed(tiny_config, [name, "attention"], pattern="window")
    model.save_pretrained(tmp_path)
    head, info = SparseBertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert all(key.startswith(("classifier", "bert.pooler")) for key in info["missing_keys"])
    for key, value in model.bert.encoder.state_dict().items():
        assert torch.equal(head.bert.encoder.state_dict()[key], value)


def test_the_hybrid_of_a_stock_checkpoint_keeps_the_rest(tiny_config, tmp_path):
    stock = BertForMaskedLM(tiny_config(BertConfig))
    stock.save_pretrained(tmp_path)
    model = SparseBertForMaskedLM.from_pretrained(tmp_path, token_mixers=["sepconv", "attention"], pattern="dense")
    for key, value in model.bert.encoder.state_dict().items():
        if "layer.0.attention.self" not in key:
            assert torch.equal(value, stock.bert.encoder.state_dict()[key]), key
    filters = model.bert.encoder.layer[0].attention.self.filters.weight
    assert filters.std().item() == pytest.approx(0.02, rel=0.1)


# The mask of the layers that keep attention


def test_a_mask_per_layer_is_for_the_layers_with_attention(tiny_config):
    names = ["attention", "sepconv", "attention", "average"]
    model = mixed(tiny_config, names, num_hidden_layers=4, search="dam_u", share_layers=False)
    assert model.sparse_attention.mask_logits.shape[:2] == (2, 4)
    mask = model.freeze(sparsity=0.5)
    assert mask.num_layers == 2
    with torch.no_grad():
        attentions = model.eval()(IDS, output_attentions=True).attentions
    assert len(attentions) == 2  # of the layers with attention, in their order
    for layer, weights in enumerate(attentions):
        assert torch.equal(weights[0] > 0, mask.to_table(LENGTH)[layer])
    with pytest.raises(ValueError, match="the model has 2 layers with attention"):
        model.set_mask(SparseMask(torch.ones(4, 4, LENGTH, LENGTH, dtype=torch.bool), LENGTH))


def test_a_cycle_alternates_over_the_layers_with_attention(tiny_config):
    fields = {"pattern": "strided_cycle", "head_configuration": "sequential", "num_hidden_layers": 4}
    hybrid = mixed(tiny_config, ["attention", "sepconv", "attention", "attention"], **fields).sparse_attention.mask
    assert hybrid.num_layers == 3
    whole = SparseBertModel(tiny_config(**fields)).sparse_attention.mask
    assert torch.equal(hybrid.to_table(), whole.to_table()[:3])


def test_learned_alpha_is_for_the_layers_with_attention(tiny_config):
    fields = {"probability_map": "entmax", "probability_map_kwargs": {"alpha": "learned"}}
    model = mixed(tiny_config, ["sepconv", "attention"], pattern="dense", initializer_range=0.3, **fields)
    model(IDS, labels=IDS).loss.backward()
    grad = model.sparse_attention.probability_map.alpha_logits.grad
    assert grad.shape == (1, 4) and (grad != 0).all()


@EVERY_OTHER
def test_a_model_without_attention_has_no_mask(tiny_config, name):
    model = mixed(tiny_config, [name] * 2).eval()
    assert (model.config.pattern, model.config.search) == ("dense", None)
    assert not list(model.sparse_attention.parameters())
    with torch.no_grad():
        assert model(IDS, output_attentions=True).attentions in (None, ())
    for fields in ({"search": "dam_s"}, {"pattern": "bigbird"}, {"frozen": True}):
        with pytest.raises(StrictDataclassClassValidationError, match="token_mixers leave no layer with attention"):
            mixed(tiny_config, [name] * 2, **fields)
    with pytest.raises(ValueError, match="no layer of this model has attention"):
        model.set_mask(SparseMask(torch.ones(4, LENGTH, LENGTH, dtype=torch.bool), LENGTH))


# Bad input


@pytest.mark.parametrize(
    "names, fields, said",
    [
        *((["sepconv"] * number, {}, f"got {number} names for num_hidden_layers 2") for number in (0, 1, 3)),
        *((names, {}, "token_mixers") for names in (["sepconv", "convolution"], [None, "average"], "sepconv")),
        ([["sepconv"], "average"], {}, "token_mixers"),
        *(([name, "attention"], {"is_decoder": True}, f"attention' in a decoder: '{name}'") for name in OTHERS),
        (["sepconv", "attention"], {"hidden_size": 40}, "hidden_size must be a multiple of 16, got 40"),
    ],
    ids=str,
)
def test_mixers_that_a_model_cannot_have(tiny_config, names, fields, said):
    with pytest.raises(StrictDataclassError, match=said):
        tiny_config(token_mixers=names, **fields)


@pytest.mark.parametrize("length", [LENGTH - 1, 1])
def test_bproj_refuses_other_lengths(tiny_config, length):
    model = mixed(tiny_config, ["bproj", "attention"], pattern="dense").eval()
    with pytest.raises(ValueError, match=f"'bproj' takes inputs of exactly 40 tokens .*, got {length}: pad"):
        model(IDS[:, :length])
    with pytest.raises(ValueError, match="cannot be extended"):
        extend_positions(model, 80)


@EVERY_OTHER
def test_masks_that_only_attention_can_apply(tiny_config, name):
    model = mixed(tiny_config, [name, "attention"], pattern="dense").eval()
    with pytest.raises(ValueError, match="do not support a 4-D attention_mask"):
        model(IDS, attention_mask=torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool))


@pytest.mark.parametrize("names", [["average", "attention"], ["average", "average"]], ids=str)
def test_stock_attention_names(tiny_config, names):
    model = mixed(tiny_config, names, pattern="dense").eval()
    expected = model(IDS).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="'flash_attention_2' would ignore the mask.*sparse_sdpa"):
        model.set_attn_implementation("flash_attention_2")


# Parameters at the size of BERT-base


@pytest.mark.parametrize(
    "name, positions, millions, published",
    [
        ("average", 512, 88.253, 88.3),
        ("bproj", 512, 91.399, None),
        ("bproj", 384, 89.924, 90),
        ("sepconv", 512, 102.452, 102.5),
        ("attention", 512, 109.514, 110),
    ],
)
def test_parameter_counts(name, positions, millions, published):
    """Are Transformers Universal Approximators, Table 1: an MLM head without the pooler; its BProj fits n = 384."""
    with torch.device("meta"):
        model = SparseBertForMaskedLM(
            SparseBertConfig(token_mixers=[name] * 12, pattern="dense", max_position_embeddings=positions)
        )
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert count == pytest.approx(millions, abs=5e-4)
    if published is not None:
        assert abs(count - published) < (0.06 if published % 1 else 0.5)


# Scripts

TINY_RUN = (
    "--max_steps 2 --per_device_train_batch_size 2 --hidden_size 32 --intermediate_size 32 --num_hidden_layers 2 "
    "--vocab_size 600 --report_to none"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = (ROOT / "LICENSE").read_text().split()
    path.write_text("\n\n".join(" ".join(words[i * 20 : i * 20 + 60]) for i in range(60)))
    return str(path)


@pytest.mark.parametrize("names", ["[sepconv, average]", pytest.param("[bproj, bproj]", marks=pytest.mark.slow)])
def test_pretraining_and_finetuning(names, text, glue_folder, tmp_path):
    arguments = [str(ROOT / "recipes/mixers.yaml"), "--text", text, "--validation", text, *TINY_RUN]
    run("pretrain", *arguments, "--token_mixers", names, "--output_dir", str(tmp_path / "model"))
    metrics = json.loads((tmp_path / "model/metrics.json").read_text())
    assert metrics["sparsity"] == 0 and 4 < metrics["mlm_loss"] < 9
    arguments = "--task rte --seeds 1 --sweep false --report_to none --max_steps 2 --max_length 64".split()
    arguments += ["--data", str(glue_folder), "--model", str(tmp_path / "model")]
    run("finetune", *arguments, "--output_dir", str(tmp_path / "task"))
    metrics = json.loads((tmp_path / "task/metrics.json").read_text())
    assert metrics["steps"] == 2 and metrics["mask"] == "dense"
    assert json.loads((tmp_path / "task/config.json").read_text())["token_mixers"] == names[1:-1].split(", ")


def test_pretraining_at_a_length_that_bproj_refuses(text, tmp_path):
    arguments = [str(ROOT / "recipes/mixers.yaml"), "--text", text, *TINY_RUN, "--token_mixers", "[bproj, attention]"]
    with pytest.raises(ValueError, match="max_length must be 128.*'bproj', got 64"):
        run("pretrain", *arguments, "--max_length", "64", "--output_dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
