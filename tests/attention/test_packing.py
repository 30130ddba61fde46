"""
Packed rows against each document alone, and padded batches that run without their padding.

Letters: B rows, n tokens per row.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from test_attention import serving
from transformers import BertConfig, BertModel, DataCollatorWithFlattening

import sparsebert
from sparsebert import PATTERNS, SEARCHES, SparseBertConfig, SparseBertModel, SparseMask, attach
from sparsebert.attention.packed_batches import packed_documents
from sparsebert.commands import main
from sparsebert.data.examples import causal_collator, pretraining_collator, pretraining_dataset
from sparsebert.data.packing import PackedCollator
from sparsebert.data.tasks.classification import collator
from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments
from sparsebert.training.finetuning.finetuning_plan import check_arguments
from sparsebert.training.finetuning.single_run import run_once
from sparsebert.training.finetuning.task_data import prepare


HEADS, LENGTH = 2, 23
# Row, first token and length of each document; what is left of a row is padding.
PLACES = [(0, 0, 9), (0, 9, 1), (0, 10, 13), (1, 0, 5), (1, 5, 12), (2, 0, 22)]
IDS = torch.randint(5, 100, (3, LENGTH), generator=torch.Generator().manual_seed(1))
FROZEN, LEARNING = serving(), serving(needs=frozenset({"additive", "learned"}))


def packed(places=PLACES, rows=3, length=LENGTH):
    """`position_ids` and `attention_mask` `(B, n)`."""
    positions, real = torch.zeros(2, rows, length, dtype=torch.long)
    for row, start, size in places:
        positions[row, start : start + size] = torch.arange(size)
        real[row, start : start + size] = 1
    return {"position_ids": positions, "attention_mask": real}


def states_and_gradients(model, inputs, grad):
    """Hidden states of some inputs, and the gradients of all parameters given those of the states."""
    model.zero_grad()
    states = []
    for each, of_each in zip(inputs, grad, strict=True):
        torch.manual_seed(7)  # one sample of a mask that is being learned, for all
        out = model(**each).last_hidden_state
        states.append(out.detach())
        out.backward(of_each.to(out.dtype))
    return states, {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_equals_alone(model, backends, tolerance=2e-5):
    """Packed rows on each backend, against every document alone on the reference in float64."""
    grad = torch.randn(3, LENGTH, model.config.hidden_size, dtype=torch.float64)
    alone = [{"input_ids": IDS[row : row + 1, start : start + size]} for row, start, size in PLACES]
    parts = [grad[row : row + 1, start : start + size] for row, start, size in PLACES]
    inputs = packed()
    grad = grad * inputs["attention_mask"][..., None]
    model.double().set_attn_implementation("sparse_eager")
    want, expected = states_and_gradients(model, alone, parts)
    model.float()
    for backend in backends:
        model.set_attn_implementation(backend)
        (got,), gradients = states_and_gradients(model, [{"input_ids": IDS} | inputs], [grad])
        for (row, start, size), states in zip(PLACES, want, strict=True):
            part = got[row, start : start + size].double()
            torch.testing.assert_close(part, states[0], atol=tolerance, rtol=tolerance)
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            error, allowed = (gradients[name] - value).abs().max(), tolerance * (1 + value.abs().max())
            assert error <= allowed, (backend, name, error, allowed)


def model_of(tiny_config, head_size=32, **fields):
    sizes = {"num_attention_heads": HEADS, "hidden_size": HEADS * head_size, "mask_length": 30}
    return SparseBertModel(tiny_config(**sizes | {"allow_empty_rows": True} | fields))


LAST = {"last_token": "position", "special_tokens": "first_last"}
DECODER = {"is_decoder": True, "use_cache": False}
PACKED = [
    *({"pattern": name} for name in PATTERNS),
    *({"search": name, "block_size": 16} | fields for name in SEARCHES for fields in ({}, LAST)),
    *(DECODER | fields for fields in ({"pattern": "dense"}, {"search": "dam_s"})),
]


@pytest.mark.parametrize("fields", PACKED, ids=str)
def test_packed_documents_are_alone(tiny_config, fields):
    searching = "search" in fields
    for training in {True, not searching}:
        model = model_of(tiny_config, **fields).train(training)
        if searching:
            with torch.no_grad():
                model.sparse_attention.mask_logits.normal_()
        assert_equals_alone(model, LEARNING if searching else FROZEN)
        assert not (searching and training) or model.sparse_attention.mask_logits.grad.abs().max() > 0


@pytest.mark.parametrize("head_size, last_token", [(32, "real"), (64, "position"), (128, "real")])
def test_packed_documents_are_alone_under_masks_per_head_and_layer(tiny_config, head_size, last_token):
    for special, diagonal in (("none", None), ("first_last", False)):
        model = model_of(tiny_config, head_size, pattern="dense")
        keep = torch.rand(2, HEADS, 30, 30) < 0.3
        model.set_mask(SparseMask(keep, 30, special_tokens=special, last_token=last_token, diagonal=diagonal))
        assert_equals_alone(model, FROZEN)


@pytest.mark.parametrize(
    "places, masked",
    [([(0, 3, 9), (0, 14, 6), (1, 1, 22)], [5]), ([(0, 3, 6), (0, 14, 6), (1, 1, 6)], [])],
    ids=["a masked token", "equal lengths"],
)
def test_padding_between_documents_and_inside(tiny_config, places, masked):
    """Rows as other collators make them: left padding, gaps, a token of the first document that is masked."""
    model = model_of(tiny_config, pattern="bigbird").eval()
    inputs = packed(places)
    inputs["attention_mask"][0, masked] = 0
    for backend in FROZEN:
        model.set_attn_implementation(backend)
        with torch.no_grad():
            got = model(IDS, **inputs).last_hidden_state
            for row, start, size in places:
                part = slice(start, start + size)
                alone = model(IDS[row : row + 1, part], attention_mask=inputs["attention_mask"][row : row + 1, part])
                real = inputs["attention_mask"][row, part].bool()
                torch.testing.assert_close(got[row, part][real], alone.last_hidden_state[0][real])


@pytest.mark.parametrize(
    ("positions", "real", "expected"),
    [
        ([0, 1, 2, 0, 1], [1, 1, 1, 1, 1], [3, 2]),
        ([2, 3, 4, 2, 3], [1, 1, 1, 1, 1], [3, 2]),  # RoBERTa
        ([0, 1, 2, 0, 0], [1, 1, 1, 1, 1], [3, 1, 1]),
        ([0, 1, 0, 1, 2], [1, 1, 1, 1, 0], [2, 2]),
        ([0, 1, 2, 3, 4], [1, 1, 1, 1, 1], None),
        ([0, 1, 2, 0, 0], [1, 1, 1, 0, 0], None),  # only padding restarts
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], None),  # left padding
        ([0, 1, 2, 3, 4], [1, 1, 0, 1, 1], None),
        ([2, 0, 3, 1, 4], [1, 1, 1, 1, 1], None),  # a permutation is no packing
        ([0, 2, 4, 6, 8], [1, 1, 1, 1, 1], None),
        ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1], None),
        ([0, 2, 1, 0, 1], [1, 1, 1, 1, 1], None),
    ],
)
def test_where_documents_begin(positions, real, expected):
    documents = packed_documents(torch.tensor([positions]), torch.tensor([real]).bool())
    assert expected == (None if documents is None else documents.padding.sum(-1).tolist())


def test_rows_of_the_collator_of_transformers(tiny_config):
    model = model_of(tiny_config, pattern="window").eval()
    rows = [{"input_ids": IDS[0, :size].tolist(), "labels": [1] * size} for size in (7, 12, 3)]
    batch = DataCollatorWithFlattening()(rows)
    with torch.no_grad():
        got = model(batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state
        alone = [model(torch.tensor([row["input_ids"]])).last_hidden_state for row in rows]
    torch.testing.assert_close(got, torch.cat(alone, dim=1))


def test_documents_are_alone_in_a_stock_bert_with_a_mask(tiny_config):
    model = attach(BertModel(tiny_config(BertConfig)).eval(), "dense", mask_length=LENGTH)
    positions, other = packed()["position_ids"][:1], torch.where(torch.arange(LENGTH) < 10, IDS[:1], 7)
    with torch.no_grad():
        before, after = (model(ids, position_ids=positions)[0] for ids in (IDS[:1], other))
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0.0, atol=0.0)


def test_attentions_of_packed_rows_lie_in_their_documents(tiny_config):
    model = model_of(tiny_config, pattern="window").eval()
    inputs = packed()
    with torch.no_grad():
        attentions = model(IDS, **inputs, output_attentions=True).attentions[0]  # (B, H, n, n)
        alone = model(IDS[:1, 10:], output_attentions=True).attentions[0]
    assert attentions.shape == (3, HEADS, LENGTH, LENGTH)
    torch.testing.assert_close(attentions[:1, :, 10:, 10:], alone)
    assert attentions[0, :, :9, 9:].eq(0).all() and attentions[1, :, 17:].eq(0).all()


def test_a_named_backend_that_cannot_is_refused(tiny_config):
    model = model_of(tiny_config, pattern="window")
    model.set_attn_implementation("sparse_flex")
    with pytest.raises(ValueError, match="sparse_flex cannot run here: .* Use sparse_eager, sparse_sdpa, sparse_cpu"):
        model(IDS, **packed())


@pytest.mark.slow
def test_packed_documents_in_flex_attention(tiny_config):
    model, inputs = model_of(tiny_config, pattern="bigbird").eval(), packed()
    model.config.attention_probs_dropout_prob = 0.0
    with torch.no_grad():
        want = model(IDS, **inputs).last_hidden_state
        model.set_attn_implementation("sparse_flex")
        got = model(IDS, **inputs).last_hidden_state
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["ForSequenceClassification", "ForQuestionAnswering", "ForNextSentencePrediction", "ForPreTraining"]
)
def test_heads_of_whole_rows_refuse_packed_rows(tiny_config, name):
    model = getattr(sparsebert, f"SparseBert{name}")(tiny_config(pattern="window"))
    labels = {"labels": IDS, "next_sentence_label": torch.tensor([0, 1, 0])} if name == "ForPreTraining" else {}
    with pytest.raises(ValueError, match="position_ids restart within a row, but .* whole rows.*skip_padding"):
        model(IDS, **packed(), **labels)
    # One document in each row is what they are for.
    model(IDS, position_ids=torch.arange(LENGTH).expand(3, -1), **labels)


@pytest.mark.parametrize("name", ["ForSequenceClassification", "ForQuestionAnswering", "ForMaskedLM"])
def test_positions_of_one_row_are_those_of_all(tiny_config, name):
    """As in stock models, also with padding."""
    model = getattr(sparsebert, f"SparseBert{name}")(tiny_config(pattern="window")).eval()
    padding = (torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 9])[:, None]).long()
    one, each = (
        model(IDS, attention_mask=padding, position_ids=positions)[0]
        for positions in (torch.arange(LENGTH)[None], torch.arange(LENGTH).expand(3, -1))
    )
    assert torch.equal(one, each)


def test_parts_that_mix_neighbors_refuse_packed_rows(tiny_config):
    model = SparseBertModel(tiny_config(pattern="window", token_mixers=["attention", "average"]))
    with pytest.raises(ValueError, match="token mixer 'average' mixes the tokens of a row"):
        model(IDS, **packed())


# Without padding

SIZES = torch.tensor([17, 4, 23])
PADDING = (torch.arange(LENGTH) < SIZES[:, None]).long()
TEXT = {
    **{"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 64, "max_position_embeddings": 40, "pad_token_id": 1},
}
ENCODERS = {
    **{"Bert": {}, "Roberta": {}, "Camembert": {}, "XLMRoberta": {}, "DistilBert": {}, "EuroBert": {}, "MPNet": {}},
    **{"Electra": {"embedding_size": 16}, "Albert": {"embedding_size": 16}},
    "ModernBert": {"local_attention": 6, "layer_types": ["full_attention", "sliding_attention"]},
    "LayoutLM": {},
    "Xmod": {"languages": ["en_XX", "de_DE"]},
    "T5": {"d_kv": 8, "d_ff": 64, "num_labels": 100},
}
# Others of the same code.
SAME = {
    **{"Ernie": {"use_task_id": True}, "Gte": {}, "JinaEmbeddingsV3": {}, "NomicBert": {}, "RobertaPreLayerNorm": {}},
    "UMT5": ENCODERS["T5"],
    "Ultrabert": {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
}
# Arguments of some of them that tell something about every token or sequence.
MORE_INPUTS = {
    "Ernie": {"task_type_ids": torch.arange(LENGTH).expand(3, -1) % 3},
    "LayoutLM": {"bbox": torch.arange(LENGTH)[None, :, None].expand(3, -1, 4)},
    "Xmod": {"lang_ids": torch.tensor([0, 1, 0])},
}
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout", "dropout_rate")


def rows_in_layers(model):
    """Appends the shape of what the linear layers of attention are given to the list that it returns."""
    shapes: list = []
    layer = next(module for module in model.modules() if "sparse_attention" in vars(module))
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple((args or [kwargs["hidden_states"]])[0].shape[:2])),
        with_kwargs=True,
    )
    return shapes


def skip_padding(model, skip):
    if isinstance(model.config, SparseBertConfig):
        model.config.skip_padding = skip
    else:
        model.sparse_attention.config = model.sparse_attention.config.changed(skip_padding=skip)


def with_and_without_padding(model, inputs):
    """Loss, hidden states of real tokens and gradients of a model that skips padding and of one that does not."""
    results = []
    for skip in (True, False):
        skip_padding(model, skip)
        model.zero_grad()
        torch.manual_seed(5)
        out = model(**inputs, output_hidden_states=True)
        out.loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        values = (*out.hidden_states, *([out.logits] if "logits" in out else []))
        states = [each * PADDING[..., None] for each in values if each.shape[:2] == PADDING.shape]
        results.append((out.loss.detach(), states, gradients))
    return results


@pytest.mark.parametrize("name", [*ENCODERS, *(pytest.param(name, marks=pytest.mark.slow) for name in SAME)])
def test_encoders_skip_padding(name):
    config = getattr(transformers, f"{name}Config")(**TEXT | (ENCODERS | SAME)[name])
    for field in DROPOUT:
        if hasattr(config, field):
            setattr(config, field, 0.0)
    model = getattr(transformers, f"{name}For{'TokenClassification' if 'T5' in name else 'MaskedLM'}")(config)
    attach(model, "bigbird", mask_length=LENGTH, attn_implementation="sparse_eager", skip_padding=True)
    ids = torch.where(PADDING.bool(), IDS, 1)
    inputs = {"input_ids": ids, "attention_mask": PADDING, "labels": torch.where(PADDING.bool(), ids, -100)}
    inputs |= MORE_INPUTS.get(name, {})
    shapes = rows_in_layers(model)
    results = with_and_without_padding(model, inputs)
    assert results[0][1]
    torch.testing.assert_close(*results, atol=2e-6, rtol=1e-4)
    assert set(shapes) == {(1, int(SIZES.sum())), (3, LENGTH)}
    base = model.base_model.eval()
    outputs = []
    for skip in (True, False):
        skip_padding(model, skip)
        output = base(input_ids=ids, attention_mask=PADDING, **MORE_INPUTS.get(name, {}), return_dict=False)
        outputs.append([output[0] * PADDING[..., None], *output[1:2]])
        assert not skip or output[0][1, 4:].eq(0).all()
    torch.testing.assert_close(*outputs, atol=2e-6, rtol=1e-4)


CLASSES = torch.tensor([0, 1, 0])
LABELS = {
    "ForPreTraining": {"labels": torch.where(PADDING.bool(), IDS, -100), "next_sentence_label": CLASSES},
    "ForNextSentencePrediction": {"labels": CLASSES},
    "ForSequenceClassification": {"labels": CLASSES},
    "ForTokenClassification": {"labels": torch.where(PADDING.bool(), IDS % 2, -100)},
    "ForMultipleChoice": {"labels": torch.tensor([2])},
}


@pytest.mark.parametrize("state", [{"pattern": "window"}, {"search": "dam_s"}], ids=["frozen", "searching"])
@pytest.mark.parametrize("name", LABELS)
def test_every_head_skips_padding(tiny_config, name, state):
    model = getattr(sparsebert, f"SparseBert{name}")(tiny_config(mask_length=LENGTH, skip_padding=True, **state))
    inputs = {"input_ids": IDS, "attention_mask": PADDING}
    if name == "ForMultipleChoice":
        inputs = {key: value[None] for key, value in inputs.items()}
    shapes = rows_in_layers(model)
    results = with_and_without_padding(model, inputs | LABELS[name])
    torch.testing.assert_close(*((loss, gradients) for loss, _, gradients in results), atol=2e-6, rtol=1e-4)
    assert shapes[0] == (1, int(SIZES.sum())) and (3, LENGTH) in shapes


def test_packed_rows_skip_their_padding(tiny_config):
    model = model_of(tiny_config, pattern="bigbird", skip_padding=True).eval()
    shapes, inputs = rows_in_layers(model), packed()
    with torch.no_grad():
        got = model(IDS, **inputs).last_hidden_state
        model.config.skip_padding = False
        want = model(IDS, **inputs).last_hidden_state
    torch.testing.assert_close(got, want * inputs["attention_mask"][..., None])
    assert shapes == [(1, sum(size for _, _, size in PLACES)), (3, LENGTH)]


@pytest.mark.parametrize(
    ("padding", "kwargs", "last_token"),
    [
        (PADDING.flip(-1), {}, "real"),
        (PADDING * (torch.arange(LENGTH) != 2), {}, "real"),
        (PADDING, {"output_attentions": True}, "real"),
        (PADDING, {}, "position"),
        (torch.ones_like(PADDING), {}, "real"),
        (PADDING * torch.tensor([1, 0, 1])[:, None], {}, "real"),
    ],
    ids=["left", "holes", "attentions", "position", "none", "nothing real"],
)
def test_padding_that_stays(tiny_config, padding, kwargs, last_token):
    model = model_of(tiny_config, pattern="dense", skip_padding=True).eval()
    keep = torch.rand(1, HEADS, 30, 30) < 0.3
    model.set_mask(SparseMask(keep, 30, special_tokens="first_last", last_token=last_token))
    shapes = rows_in_layers(model)
    with torch.no_grad():
        got = model(IDS, padding, **kwargs)
        model.config.skip_padding = False
        want = model(IDS, padding, **kwargs)
    torch.testing.assert_close(got.to_tuple(), want.to_tuple(), rtol=0.0, atol=0.0)
    assert shapes == [(3, LENGTH)] * 2


def test_positions_that_all_sequences_share(tiny_config):
    """As a stock BERT takes them: `(n,)`."""
    model = model_of(tiny_config, pattern="window", skip_padding=True).eval()
    position = torch.arange(LENGTH).flip(0)
    with torch.no_grad():
        got, want = (model(IDS, PADDING, position_ids=each) for each in (position, position.expand(3, LENGTH)))
    assert torch.equal(got.last_hidden_state, want.last_hidden_state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_decoder": True}, "skip_padding true has no meaning with is_decoder true"),
        ({"token_mixers": ["average", "attention"]}, "skip_padding true needs attention in all layers"),
        ({"skip_padding": "yes"}, "skip_padding"),
    ],
)
def test_skip_padding_is_checked(tiny_config, fields, message):
    with pytest.raises(Exception, match=message) as error:
        tiny_config(**{"pattern": "window", "skip_padding": True} | fields)
    assert "StrictDataclass" in type(error.value).__name__


def test_a_model_of_trigrams_refuses_both():
    config = transformers.MobileBertConfig(
        **TEXT, embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2, true_hidden_size=16
    )
    model = transformers.MobileBertModel(config)
    with pytest.raises(ValueError, match="skip_padding true has no meaning for a model of type 'mobilebert'"):
        attach(model, "window", mask_length=LENGTH, skip_padding=True)
    attach(model, "window", mask_length=LENGTH)
    with pytest.raises(ValueError, match="type 'mobilebert' mixes the tokens of a row"):
        model(IDS, **packed())


@pytest.mark.slow
def test_packed_rows_in_a_compiled_model(tiny_config):
    model = model_of(tiny_config, pattern="bigbird").eval()
    model.set_attn_implementation("sparse_sdpa")
    inputs = packed()
    with torch.no_grad():
        want = model(IDS, **inputs).last_hidden_state
        got = torch.compile(model, backend="eager")(IDS, **inputs).last_hidden_state
    torch.testing.assert_close(got, want)


# Rows of several documents

# The words of document i are those of its own.
DOCUMENTS = [[f"w{i} w{i} w{i}"] * (1 + 3 * i % 7) for i in range(60)]


def rows_of(tokenizer, pack_documents):
    return pretraining_dataset(DOCUMENTS, tokenizer, 16, pack_documents=pack_documents)


def test_documents_within_rows_begin_with_cls(word_tokenizer):
    ids, before = (np.array(rows_of(word_tokenizer, pack)["input_ids"]) for pack in (True, False))
    special = word_tokenizer.all_special_ids
    words, old = (each[~np.isin(each, special)] for each in (ids, before))
    # The text is the same; what does not fill a row is left out.
    assert ids.shape[1] == 16 and (words == old[: len(words)]).all() and len(words) > 0.8 * len(old)
    documents = np.split(ids.ravel(), np.flatnonzero(ids.ravel() == word_tokenizer.cls_token_id))[1:]
    assert all(len(set(document.tolist()) - set(special)) <= 1 for document in documents)
    assert len(documents) > len(ids) > 0
    assert (ids[:, -1] == word_tokenizer.sep_token_id).all()


@pytest.mark.parametrize("kind", ["seeded", "unseeded", "causal"])
def test_positions_restart_with_each_document(word_tokenizer, kind):
    rows = rows_of(word_tokenizer, True)
    made = {
        "seeded": lambda: pretraining_collator(word_tokenizer, 0.9, seed=1),
        "unseeded": lambda: pretraining_collator(word_tokenizer, 0.9),
        "causal": lambda: causal_collator,
    }
    packed = PackedCollator(made[kind](), word_tokenizer.cls_token_id)
    examples = [rows[i] for i in range(len(rows))]
    torch.manual_seed(3)
    batch = packed(examples)
    ids = torch.tensor(rows["input_ids"])
    starts = ids == word_tokenizer.cls_token_id
    assert torch.equal(batch["position_ids"] == 0, starts)
    follows = batch["position_ids"][:, 1:] == batch["position_ids"][:, :-1] + 1
    assert (follows | starts[:, 1:]).all()
    assert (batch["labels"][starts] == -100).all()
    torch.manual_seed(3)
    plain = made[kind]()(examples)
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    assert torch.equal(batch["labels"], plain["labels"].masked_fill(starts, -100))


def test_the_epoch_reaches_the_masking(word_tokenizer):
    rows = [rows_of(word_tokenizer, True)[i] for i in range(8)]
    packed = PackedCollator(pretraining_collator(word_tokenizer, seed=1), word_tokenizer.cls_token_id)
    fixed = packed.for_evaluation()
    first, evaluated = packed(rows)["labels"], fixed(rows)["labels"]
    packed.set_epoch(1)
    assert not torch.equal(packed(rows)["labels"], first) and torch.equal(fixed(rows)["labels"], evaluated)


def test_pretraining_on_packed_documents(pretraining_flags, tmp_path):
    losses = []
    for pack, *flags in (
        ("true", "--pattern", "window"),
        ("false", "--pattern", "window"),
        ("true", "--search", "dam_s"),
        ("true", "--is_decoder", "true"),
    ):
        run = tmp_path / str(len(losses))
        assert main(pretraining_flags(run, *flags, "--pack_documents", pack, "--max_steps", "2")) == 0
        metrics = json.loads((run / "metrics.json").read_text())
        losses.append(metrics["lm_loss" if "--is_decoder" in flags else "mlm_loss"])
    assert all(np.isfinite(losses)) and losses[0] != losses[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nsp", "true"), "pack_documents true has no meaning with nsp true"),
        (
            ("--pattern", "dense", "--pruning", '{"final_sparsity": 0.5, "score": "attention"}'),
            "pruning.score 'attention' has no meaning with pack_documents true",
        ),
        (("--token_mixers", '["average", "attention"]'), "pack_documents true needs attention in all layers"),
    ],
)
def test_what_cannot_be_packed_is_refused(pretraining_flags, refused, tmp_path, flags, message):
    assert message in refused([*pretraining_flags(tmp_path / "run", "--pack_documents", "true"), *flags])


# Lengths of batches


@pytest.fixture
def task(checkpoints, glue_folder):
    """`task(**fields)`: data of RTE."""

    def make(**fields):
        options = {"task": "rte", "model": checkpoints["window"], "data": str(glue_folder), "max_length": 32}
        return FinetuningArguments(**options | fields)

    return make


TRAINING = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


def test_finetuning_without_padding_gives_the_same_model(task, tmp_path):
    weights = []
    for name, fields in (("plain", {}), ("skipped", {"skip_padding": True})):
        data = prepare(task(pad_to_multiple_of=8, max_train_examples=8))
        settings = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        run_once(data, settings | fields, TRAINING, tmp_path / name)
        model = sparsebert.SparseBertForSequenceClassification.from_pretrained(tmp_path / name)
        assert model.config.skip_padding == bool(fields)
        weights.append(model.state_dict())
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-4)


def test_pad_to_multiple_of_is_checked(task):
    for value, message in ((0, "must be an integer of at least 1, got 0"), (5, "must divide max_length 32, got 5")):
        with pytest.raises(ValueError, match=f"pad_to_multiple_of {message}"):
            check_arguments(task(pad_to_multiple_of=value), {})


@pytest.fixture
def batches(word_tokenizer):
    """Batches of neighboring lengths, padded to a multiple of 8."""
    lengths = np.sort(np.random.default_rng(0).integers(3, 33, 96))
    rows = [{"input_ids": [5] * size, "attention_mask": [1] * size, "labels": size % 2} for size in lengths]
    return [collator(word_tokenizer, 8)(rows[start : start + 8]) for start in range(0, 96, 8)]


def test_batches_have_a_few_lengths(batches):
    for batch in batches:
        longest = batch["attention_mask"].sum(1).max().item()
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, -(-longest // 8) * 8)


@pytest.mark.slow
def test_each_length_is_compiled_once(tiny_config, batches):
    fields, graphs = {"pattern": "window", "mask_length": 32, "num_hidden_layers": 1}, []
    model = sparsebert.SparseBertForSequenceClassification(tiny_config(**fields)).eval()

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for batch in batches:
            compiled(**batch)
    assert len(graphs) == len({batch["input_ids"].shape for batch in batches}) <= 4


def test_skip_padding_is_saved(tiny_config, tmp_path):
    SparseBertModel(tiny_config(pattern="window", skip_padding=True)).save_pretrained(tmp_path)
    assert SparseBertModel.from_pretrained(tmp_path).config.skip_padding
    assert not SparseBertModel.from_pretrained(tmp_path, skip_padding=False).config.skip_padding
