"""The models: equal to stock BERT where they must be, the mask in effect everywhere, nothing leaked or left behind."""

import copy
import pickle

import pytest
import torch
import transformers
from bert_batch import CLASSES, HEADS, IDS, LENGTH, PADDING, gradients, inputs_of
from conftest import covering
from transformers import BertConfig, BertModel, EncoderDecoderModel, GenerationConfig

import sparsebert
from sparsebert import (
    SEARCHES,
    SparseBertConfig,
    SparseBertForMaskedLM,
    SparseBertForSequenceClassification,
    SparseBertLMHeadModel,
    SparseBertModel,
    build_pattern,
    sparsity,
    sparsity_loss,
)


REAL = PADDING.bool()


def head_class(name):
    return getattr(sparsebert, f"SparseBert{name}")


def head_config(tiny_config, name, **fields):
    return tiny_config(is_decoder=name == "LMHeadModel", **fields)


def tensors(output):
    """Every tensor of an output, flat; those of tokens keep their `(B, n, ...)` shape."""
    return [value for value in output.to_tuple() if torch.is_tensor(value)]


def set_logits(model, std=2.0):
    with torch.no_grad():
        model.sparse_attention.mask_logits.normal_(std=std / model.config.mask_logit_scale)
    return model


def decide(model):
    """Logits so large that no noise turns them: the drawn mask is the thresholded one."""
    with torch.no_grad():
        model.sparse_attention.mask_logits.copy_(torch.randn_like(model.sparse_attention.mask_logits).sign() * 100.0)
    return model


# Heads


@pytest.mark.parametrize("name, mask", covering([*HEADS], ["dam_s", "dam_u", "vertical_slash", "bigbird"]))
def test_head_runs_trains_and_reloads(tiny_config, assert_same_model, tmp_path, name, mask):
    fields = {"search": mask} if mask in SEARCHES else {"pattern": mask}
    model = head_class(name)(head_config(tiny_config, name, **fields))
    output = model.train()(**inputs_of(name, labels=True))
    loss = output.last_hidden_state.square().mean() if name == "Model" else output.loss
    loss.backward()
    grads = gradients(model)
    assert all(grad.isfinite().all() for grad in grads.values())
    logits = [key for key in grads if "mask_logits" in key]
    prefix = "" if name == "Model" else "bert."
    assert logits == ([f"{prefix}sparse_attention.mask_logits"] if mask in SEARCHES else [])
    assert all(grads[key].abs().sum() > 0 for key in logits)

    model.eval().save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert_same_model(loaded, model, **inputs_of(name))


@pytest.mark.parametrize("name", HEADS)
def test_frozen_search_reloads_through_the_auto_classes(tiny_config, assert_same_model, tmp_path, name):
    model = set_logits(head_class(name)(head_config(tiny_config, name, share_layers=False))).eval()
    inputs = inputs_of(name)
    with torch.no_grad():
        before = model(**inputs)
        mask = model.freeze()
        expected = model(**inputs)
    for a, b in zip(tensors(before), tensors(expected), strict=True):
        if b.shape[:2] == REAL.shape:
            a, b = a[REAL], b[REAL]
        torch.testing.assert_close(a, b, msg="freezing changed what evaluation computes")
    names = {*model.state_dict(), *dict(model.named_parameters())}
    assert not any("mask_logits" in key for key in names) and sparsity_loss(model) == 0
    assert model.config.frozen and sparsity(model) == mask.sparsity
    model.save_pretrained(tmp_path)
    auto = {"LMHeadModel": "AutoModelForCausalLM", "Model": "AutoModel"}.get(name, f"AutoModel{name}")
    loaded = getattr(transformers, auto).from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert loaded.sparse_attention.mask == mask and not loaded.sparse_attention.searching
    assert_same_model(loaded, model, **inputs)


@pytest.mark.parametrize("name, backend, padded", covering([*HEADS], ["eager", "sdpa"], [False, True]))
def test_all_ones_mask_is_stock_bert(tiny_config, name, backend, padded):
    config = head_config(tiny_config, name, pattern="dense", attn_implementation=f"sparse_{backend}")
    model = head_class(name)(config).eval()
    stock_class = getattr(transformers, f"Bert{name}")
    stock_config = head_config(tiny_config, name, config_class=BertConfig, attn_implementation=backend)
    stock = stock_class(stock_config).eval()
    stock.load_state_dict(model.state_dict())
    inputs = inputs_of(name, padded)
    with torch.no_grad():
        for a, b in zip(tensors(model(**inputs)), tensors(stock(**inputs)), strict=True):
            if padded and b.shape[:2] == REAL.shape:
                a, b = a[REAL], b[REAL]
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", HEADS)
def test_stock_checkpoint_loads_with_only_the_logits_missing(tiny_config, tmp_path, name):
    stock_config = head_config(tiny_config, name, config_class=BertConfig)
    stock = getattr(transformers, f"Bert{name}")(stock_config).eval()
    stock.save_pretrained(tmp_path)
    model, info = head_class(name).from_pretrained(tmp_path, output_loading_info=True)
    prefix = "" if name == "Model" else "bert."
    assert set(info["missing_keys"]) == {f"{prefix}sparse_attention.mask_logits"}
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    alpha = model.sparse_attention.learned.alpha().detach()
    assert alpha.std().item() == pytest.approx(1e-3, rel=0.4) and alpha.abs().max() > 0
    dense, info = head_class(name).from_pretrained(tmp_path, pattern="dense", output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        outputs = (tensors(model(**inputs_of(name, False))) for model in (dense.eval(), stock))
        for a, b in zip(*outputs, strict=True):
            torch.testing.assert_close(a, b)


# Checkpointing, precision, batches


@pytest.mark.parametrize("form", ["additive", "log"])
def test_activation_checkpointing_of_two_forwards(tiny_config, assert_same_gradients, form):
    """Each draws its own mask and dropout, and their backward pass the same ones again."""
    config = tiny_config(mask_form=form, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    model, results = SparseBertForMaskedLM(config).train(), []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(11)
        losses = [model(**inputs_of("ForMaskedLM", labels=True)).loss for _ in range(2)]
        sum(losses).backward()
        results.append(([loss.item() for loss in losses], gradients(model)))
    (losses, expected), (again, grads) = results
    assert losses[0] != pytest.approx(losses[1], rel=1e-5) and again == pytest.approx(losses, rel=1e-6)
    assert any("mask_logits" in key for key in grads)
    assert_same_gradients(grads, expected)


@pytest.mark.parametrize("mask", ["dam_s", "dam_u", "vertical_slash", "soft", "window"])
def test_bf16_autocast(tiny_config, mask):
    model = SparseBertForMaskedLM(tiny_config(**{"search" if mask in SEARCHES else "pattern": mask})).train()
    results = []
    for enabled in (False, True):
        model.zero_grad()
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(**inputs_of("ForMaskedLM", labels=True)).loss
        loss.backward()
        results.append((loss.item(), gradients(model)))
    (full, expected), (half, grads) = results
    assert half == pytest.approx(full, rel=0.01)
    if mask in SEARCHES:
        logits, wanted = (g["bert.sparse_attention.mask_logits"] for g in (grads, expected))
        assert logits.dtype == torch.float32 and logits.isfinite().all()
        assert torch.nn.functional.cosine_similarity(logits.flatten(), wanted.flatten(), dim=0) > 0.9


RELATIVE = {
    "dam_s": {},
    "dam_s, first": {"special_tokens": "first"},
    "dam_s, none": {"special_tokens": "none"},
    "dam_s, decoder": {"is_decoder": True},
    "dam_s, log": {"mask_form": "log", "share_layers": False},
    "dam_s, multiplicative": {"mask_form": "multiplicative", "diagonal": "remove"},
    "dam_b": {"search": "dam_b", "block_size": 16},
    "star": {"pattern": "star"},
    "window": {"pattern": "window", "pattern_kwargs": {"num_global_tokens": 2}},
}


SEARCHED = [what for what, fields in RELATIVE.items() if "pattern" not in fields]


@pytest.mark.parametrize(
    "what, phase, backend",
    [
        *(
            (what, "frozen", name)
            for what, name in covering([*RELATIVE], ["sparse_cpu", "sparse_sdpa", "sparse_auto"])
        ),
        *((what, "train", "sparse_eager" if "multiplicative" in what else "sparse_sdpa") for what in SEARCHED),
        *((what, "eval", name) for what, name in covering(SEARCHED, ["sparse_auto", "sparse_sdpa", "sparse_eager"])),
        *(pytest.param(what, "frozen", "sparse_flex", marks=pytest.mark.slow) for what in RELATIVE),
    ],
)
def test_left_padding_changes_no_logits(tiny_config, backend, what, phase):
    """Offsets do not depend on where a sequence starts, and the first token is the first real one."""
    fields = {"mask_length": 40, "initializer_range": 0.3} | RELATIVE[what]
    model = SparseBertForMaskedLM if not fields.get("is_decoder") else SparseBertLMHeadModel
    model = model(tiny_config(**fields))
    if "pattern" not in fields:
        set_logits(model.bert)
        model.train(phase == "train")
        if phase == "frozen":
            model.freeze()
    model.train(phase == "train")
    model.set_attn_implementation(backend)
    ids, padding = torch.randint(5, 100, (4, 40)), torch.ones(4, 40, dtype=torch.bool)
    padding[0, 27:] = padding[1, :16] = padding[2, :32] = padding[3, 35:] = padding[3, :16] = False

    def logits(**inputs):
        torch.manual_seed(2)  # the same draw
        with torch.no_grad():
            return model(**inputs).logits

    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    batch = logits(input_ids=ids, attention_mask=padding.long(), position_ids=positions)
    model.set_attn_implementation("sparse_eager")
    for row, real in enumerate(padding):
        torch.testing.assert_close(
            batch[row, real], logits(input_ids=ids[row : row + 1, real])[0], atol=1e-4, rtol=1e-4
        )


def test_last_token_by_position_does_depend_on_them(tiny_config):
    """What `last_token='real'` is for: with `'position'` a shorter sequence loses its last token."""
    model = SparseBertModel(tiny_config(last_token="position"))
    with torch.no_grad():
        model.sparse_attention.mask_logits.fill_(-3.0)
        model.eval().freeze()
        batch = model(IDS, attention_mask=PADDING).last_hidden_state[2, :5]
        alone = model(IDS[2:, :5]).last_hidden_state[0]
    assert (batch - alone).abs().max() > 1e-3


# Causal models


@pytest.mark.parametrize("mask", ["dam_s", "dam_u", "vertical_slash"])
@pytest.mark.parametrize("backend", ["sparse_eager", "sparse_sdpa", "sparse_auto"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_no_future_leak(tiny_config, backend, mask, train):
    """While searching; for patterns see test_causal_models.py."""
    config = tiny_config(is_decoder=True, attn_implementation=backend, search=mask, mask_constant=5.0)
    model = SparseBertLMHeadModel(config).train(train)
    changed = IDS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 100
    outputs = []
    for ids in (IDS, changed):
        torch.manual_seed(2)
        outputs.append(model(ids).logits)
    # To rounding, of which a key that shows through is a hundred times as much.
    torch.testing.assert_close(outputs[0][:, :7], outputs[1][:, :7])
    assert not torch.allclose(outputs[0][:, 7:], outputs[1][:, 7:], atol=1e-2)


@pytest.mark.parametrize(
    "mask, phase",
    [*((mask, phase) for mask in ("dam_s", "dam_u", "vertical_slash") for phase in ("eval", "frozen"))]
    + [("window", "frozen")],
)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "left padded"])
def test_generation_with_cache_equals_full_recomputation(tiny_config, mask, phase, padded):
    fields = {"search": mask} if mask in SEARCHES else {"pattern": mask}
    model = SparseBertLMHeadModel(tiny_config(is_decoder=True, initializer_range=0.5, **fields)).eval()
    if mask in SEARCHES:
        set_logits(model)
        if phase == "frozen":
            model.config.allow_empty_rows = True
            model.freeze()
    prompt = IDS[:2, :6]
    padding = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]) if padded else torch.ones_like(prompt)
    texts = [
        model.generate(
            prompt,
            attention_mask=padding,
            generation_config=GenerationConfig(
                max_new_tokens=12, do_sample=False, use_cache=use_cache, pad_token_id=0, eos_token_id=None
            ),
        )
        for use_cache in (True, False)
    ]
    assert texts[0].shape == (2, 18) and torch.equal(*texts)
    with torch.no_grad():
        whole = model(IDS[:, :10]).logits
        first = model(IDS[:, :4], use_cache=True)
        chunk = model(IDS[:, 4:7], past_key_values=first.past_key_values, use_cache=True)
        steps = [first.logits, chunk.logits]
        for i in range(7, 10):
            steps.append(model(IDS[:, i : i + 1], past_key_values=chunk.past_key_values, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)


def test_encoder_decoder(tiny_config, caplog):
    encoder = SparseBertModel(tiny_config())
    decoder = SparseBertLMHeadModel(tiny_config(is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).train()
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    transformers.utils.logging.get_logger("sparsebert").warning_once.cache_clear()
    model(input_ids=IDS, attention_mask=PADDING, labels=IDS[:, :7].contiguous()).loss.backward()
    for part in (model.encoder, model.decoder):
        assert part.sparse_attention.mask_logits.grad.abs().sum() > 0
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    model.eval()
    with torch.no_grad():
        a, b = IDS[:, :7], IDS[:, :7].clone()
        b[:, 5:] = 3
        logits = [model(input_ids=IDS, attention_mask=PADDING, decoder_input_ids=ids).logits for ids in (a, b)]
    torch.testing.assert_close(logits[0][:, :5], logits[1][:, :5])
    assert "runs dense" not in caplog.text  # cross-attention does


@torch.no_grad()
def test_cross_attention_runs_dense_beside_a_mask_in_compressed_rows(tiny_config):
    fields = {"is_decoder": True, "add_cross_attention": True, "pattern": "logsparse"}
    model = SparseBertLMHeadModel(tiny_config(**fields)).eval()
    states, logits = torch.randn(*IDS.shape, model.config.hidden_size), []
    for name in ("sparse_eager", "sparse_cpu"):
        model.set_attn_implementation(name)
        logits.append(model(IDS, encoder_hidden_states=states, encoder_attention_mask=PADDING).logits)
    torch.testing.assert_close(*logits)


# Compilation


def compiled_steps(model, inputs, backend):
    """Losses and gradients of steps under `torch.compile`, an error if any step after the first compiles again."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            model.zero_grad()
            loss = compiled(**inputs[step % len(inputs)]).loss
            loss.backward()
            results.append((loss.item(), gradients(model)))
    torch._dynamo.reset()
    return results


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "pattern, attention, backend, padded",
    [
        ("bigbird", "sparse_auto", "aot_eager", False),
        ("strided_cycle", "sparse_sdpa", "aot_eager", True),
        *(pytest.param("bigbird", f"sparse_{name}", "aot_eager", True, marks=SLOW) for name in ("auto", "cpu")),
        *(pytest.param("bigbird", f"sparse_{name}", "aot_eager", False, marks=SLOW) for name in ("sdpa", "cpu")),
        *(pytest.param("bigbird", "sparse_eager", "aot_eager", padded, marks=SLOW) for padded in (False, True)),
        pytest.param("window", "sparse_auto", "inductor", True, marks=SLOW),
    ],
)
def test_frozen_model_compiles_once_as_one_graph(tiny_config, pattern, attention, backend, padded):
    layers = 2 if pattern == "strided_cycle" else 1  # one mask for all, or each with its own
    fields = {"num_hidden_layers": layers, "attn_implementation": attention}
    model = SparseBertForMaskedLM(tiny_config(pattern=pattern, **fields)).train()
    inputs = []
    for shift in range(2):
        ids = (IDS + shift) % 100
        padding = {"attention_mask": PADDING.roll(shift, 0)} if padded else {}
        inputs.append({"input_ids": ids, "labels": ids} | padding)
    for step, (loss, grads) in enumerate(compiled_steps(model, inputs, backend)):
        model.zero_grad()
        expected = model(**inputs[step % 2]).loss
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grads[name], grad, atol=1e-5, rtol=1e-3)


def test_compiled_model_follows_a_new_mask(tiny_config):
    torch._dynamo.reset()
    model = SparseBertModel(tiny_config(pattern="window", num_hidden_layers=1)).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        before = compiled(IDS).last_hidden_state
        model.set_mask(build_pattern("bigbird", 40, 4))
        after = compiled(IDS).last_hidden_state
        assert (before - after).abs().max() > 1e-3
        torch.testing.assert_close(after, model(IDS).last_hidden_state)
    torch._dynamo.reset()


# State


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("mask", ["dam_s", "window"])
def test_copies_after_a_training_forward(tiny_config, assert_same_model, mask, copied):
    model = SparseBertForMaskedLM(tiny_config(**{"search" if mask in SEARCHES else "pattern": mask})).train()
    loss = model(IDS, labels=IDS).loss
    twin = copied(model)
    loss.backward()
    assert_same_model(twin.eval(), model.eval(), input_ids=IDS)
    assert twin.sparse_attention is not model.sparse_attention
    layer = twin.bert.encoder.layer[1].attention.self
    assert layer.sparse_attention is twin.sparse_attention
    if mask in SEARCHES:
        with torch.no_grad():
            twin.sparse_attention.mask_logits.fill_(-3.0)
            assert not torch.allclose(model(IDS).logits, twin(IDS).logits, atol=1e-4)
        twin.freeze()
        assert model.sparse_attention.searching


def test_the_configuration_of_a_stock_bert_is_refused(tiny_config):
    stock = tiny_config(BertConfig)
    with pytest.raises(TypeError, match="config of a SparseBertForMaskedLM must be a SparseBertConfig, got a BertC"):
        SparseBertForMaskedLM(stock)
    model = SparseBertForMaskedLM(SparseBertConfig(**stock.to_dict(), pattern="window"))
    assert model.sparse_attention.mask.metadata["pattern"] == "window"


def test_frozen_model_without_its_mask_says_so(tiny_config, tmp_path):
    with pytest.raises(ValueError, match="mask is not loaded"):
        SparseBertModel(tiny_config(frozen=True))(IDS)
    model = SparseBertModel(tiny_config())
    model.freeze(threshold=0.0)
    model.save_pretrained(tmp_path)
    (tmp_path / "mask.safetensors").unlink()
    with pytest.raises(sparsebert.MaskFileError, match="mask.safetensors"):
        SparseBertModel.from_pretrained(tmp_path)


# Loss


@pytest.mark.parametrize("name", [name for name in HEADS if name != "Model"])
@pytest.mark.parametrize("return_dict", [True, False], ids=["dict", "tuple"])
def test_penalty_is_in_the_training_loss_only(tiny_config, name, return_dict):
    model = decide(head_class(name)(head_config(tiny_config, name, sparsity_weight=0.01)))
    inputs = inputs_of(name, padded=False, labels=True) | {"return_dict": return_dict}
    losses, outputs = {}, {}
    for phase in ("train", "eval"):
        output = model.train(phase == "train")(**inputs)
        outputs[phase] = output
        losses[phase] = (output.loss if return_dict else output[0]).item()
        if phase == "train":
            penalty = sparsity_loss(model).item()
    entries = model.sparse_attention.thresholded_mask().to_table().sum().item()
    assert penalty == pytest.approx(0.01 * entries, rel=1e-5)
    assert losses["train"] == pytest.approx(losses["eval"] + penalty, rel=1e-5)
    if return_dict:
        assert outputs["train"].keys() == outputs["eval"].keys()  # no field is added
        assert outputs["train"].to_tuple()[0] is outputs["train"].loss
    else:
        assert isinstance(outputs["train"], tuple) and len(outputs["train"]) == len(outputs["eval"])


def test_without_labels_nothing_is_added(tiny_config):
    model = SparseBertForSequenceClassification(tiny_config(sparsity_weight=1.0)).train()
    logits = model(IDS, return_dict=False)[0]
    assert logits.shape == (3, 2) and logits.abs().max() < 10
    assert model(IDS).loss is None
    model.freeze(threshold=0.0)
    frozen = model(IDS, labels=CLASSES).loss
    assert frozen.item() == pytest.approx(model.eval()(IDS, labels=CLASSES).loss.item(), rel=1e-6)


def test_a_model_without_a_mask_says_so(tiny_config):
    with pytest.raises(ValueError, match="BertModel carries no sparse attention"):
        sparsity(BertModel(tiny_config(BertConfig)))


# Layers and lengths


@pytest.mark.parametrize("backend", ["sparse_eager", "sparse_sdpa"])
def test_each_layer_has_its_own_searched_mask(tiny_config, backend):
    """Layer 0 dense and layer 1 restricted equals, layer by layer, models that share the one mask or the other."""
    model = SparseBertModel(tiny_config(share_layers=False, attn_implementation=backend)).eval()
    with torch.no_grad():
        model.sparse_attention.mask_logits[0].fill_(3.0)
        model.sparse_attention.mask_logits[1].fill_(-3.0)
    searched = model(IDS, output_hidden_states=True).hidden_states
    mask = model.freeze()
    assert mask.num_layers == 2
    frozen = model(IDS, output_hidden_states=True).hidden_states
    torch.testing.assert_close(searched[2], frozen[2])
    model.set_mask(mask.replace(keep=mask.keep[:1]))
    torch.testing.assert_close(model(IDS, output_hidden_states=True).hidden_states[1], frozen[1])
    assert not torch.allclose(model(IDS).last_hidden_state, frozen[2], atol=1e-4)


def test_sequential_cycle_alternates_over_layers(tiny_config):
    config = tiny_config(
        pattern="strided_cycle",
        pattern_kwargs={"stride": 4},
        num_hidden_layers=3,
        mask_length=LENGTH,
        attn_implementation="sparse_eager",
    )
    model = SparseBertModel(config).eval()
    tables = build_pattern("strided_cycle", LENGTH, 4, num_layers=3, stride=4).to_table()
    assert not torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    for table, weights in zip(tables, model(IDS, output_attentions=True).attentions, strict=True):
        assert torch.equal(weights > 0, table.expand_as(weights))


@pytest.mark.parametrize("policy, runs", [(None, True), ("extend", True), ("dense", True), ("error", False)])
def test_longer_inputs_follow_the_length_policy(tiny_config, policy, runs):
    model = set_logits(SparseBertModel(tiny_config(mask_length=8, length_policy=policy))).eval()
    before = model.sparse_attention.thresholded_mask()
    for phase in ("eval", "frozen"):
        if phase == "frozen":
            model.freeze()
        if not runs:
            with pytest.raises(ValueError, match="12 tokens is longer than"):
                model(IDS)
            continue
        weights = model(IDS, output_attentions=True).attentions[0]
        assert torch.equal(weights > 0, before.to_table(LENGTH).expand_as(weights))
    assert model.config.mask_length == 8


def test_models_of_one_configuration_are_independent(tiny_config, tmp_path):
    config = tiny_config(search="dam_s")
    first, second = SparseBertForMaskedLM(config), SparseBertForMaskedLM(config)
    assert first.config is first.bert.config is first.bert.encoder.config
    first.freeze(sparsity=0.5)
    second.save_pretrained(tmp_path)
    assert sparsebert.load(tmp_path).sparse_attention.searching
    assert SparseBertModel(config).sparse_attention.searching
