"""Masks on stock encoders: equal to the stock model where they must be, in effect everywhere, off without a trace."""

import copy
import inspect
import json
import pickle

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers.utils import logging

import sparsebert
from sparsebert import (
    ARCHITECTURES,
    MaskFileError,
    SparseBertForMaskedLM,
    SparseMask,
    attach,
    build_pattern,
    detach,
    load,
)
from sparsebert.masks.patterns import PATTERNS
from sparsebert.models.architectures import attention_modules, check_architecture, configs_of, sliding_window
from sparsebert.models.loading import check_folder
from sparsebert.models.model_classes import encoder_class_of


LENGTH, LAYERS, HEADS, WINDOW = 12, 3, 4, 2
IDS = torch.randint(5, 100, (3, LENGTH), generator=torch.Generator().manual_seed(1))
PADDING = (torch.arange(LENGTH) < torch.tensor([12, 9, 5])[:, None]).long()
REAL = PADDING.bool()
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
KINDS = ("full_attention", "sliding_attention")
# What is special in the configuration of a model type.
SPECIAL = {
    "modernbert": (
        {"local_attention": 2 * WINDOW, "layer_types": [*KINDS, "sliding_attention"]}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    ),
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
    "eurobert": {"num_key_value_heads": 2},
    "vit": {"image_size": (44, 4), "patch_size": 4},  # 11 patches
    "deit": {"image_size": (40, 4), "patch_size": 4},  # 10
    "dinov2": {"image_size": 16, "patch_size": 4},  # whose positions are interpolated
    "esm": {"mask_token_id": 4, "token_dropout": True, "position_embedding_type": "rotary"},
    "ultrabert": {"sliding_window": WINDOW, "layer_types": [*KINDS, "sliding_attention"], "num_key_value_heads": 2},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"},
    "roc_bert": {"shape_vocab_size": 100},  # which docs/extending.md adds
    **dict.fromkeys(("mt5", "t5", "umt5"), {"d_kv": 8, "d_ff": 48, "max_position_embeddings": None}),
}
# Model type to the beginning of its class names, and what is special. Older transformers lack the newest ones.
MODELS = {
    name: (transformers.CONFIG_MAPPING[name].__name__.removesuffix("Config"), SPECIAL.get(name, {}))
    for name in ARCHITECTURES
    if name != "sparsebert" and name in transformers.CONFIG_MAPPING
}
# Those whose code differs from that of another one by little more than names: slow tests.
SAME = (
    *("camembert", "deit", "dinov2", "electra", "ernie", "esm", "gte", "jina_embeddings_v3", "mt5", "nomic_bert"),
    *("roberta-prelayernorm", "umt5", "xlm-roberta", "xmod"),
)
SHARED = ("albert",)
IMAGES = ("deit", "dinov2", "vit")
TEXTS = [name for name in MODELS if name not in IMAGES]
T5 = ("mt5", "t5", "umt5")
BACKENDS = ["sparse_eager", "sparse_sdpa", "sparse_cpu", "sparse_auto"]
DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout", "embedding_dropout"),
    "dropout_rate",
)


def row(name, *more):
    """The parameters of a test for a model type."""
    return pytest.param(name, *more, marks=pytest.mark.slow if name in SAME else ())


every_model = pytest.mark.parametrize("name", [row(name) for name in MODELS])


def config_of(name, dropout=0.0, **fields):
    prefix, special = MODELS[name]
    given = {key: value for key, value in (TEXT | special | fields).items() if value is not None}
    config = getattr(transformers, f"{prefix}Config")(**given)
    for field in DROPOUT:
        if hasattr(config, field):
            setattr(config, field, dropout)
    config._attn_implementation = "eager"
    return config


def base_model(name, **fields):
    torch.manual_seed(3)
    made = transformers.AutoModelForTextEncoding if name in T5 else transformers.AutoModel
    return made.from_config(config_of(name, **fields)).eval()


def head_model(name, **fields):
    torch.manual_seed(3)
    kinds = ("ImageClassification", IMAGES), ("TokenClassification", T5), ("MaskedLM", MODELS)
    head = next(f"For{kind}" for kind, names in kinds if name in names)
    return getattr(transformers, MODELS[name][0] + head)(config_of(name, **fields)).eval()


def inputs_of(name, padded=False, labels=False):
    if name in IMAGES:
        pixels = torch.randn(3, 3, 40 if name == "deit" else 44, 4, generator=torch.Generator().manual_seed(2))
        return {"pixel_values": pixels} | ({"labels": torch.tensor([0, 1, 0])} if labels else {})
    given = {"input_ids": IDS} | ({"attention_mask": PADDING} if padded else {})
    return given | ({"labels": IDS % 2 if name in T5 else IDS} if labels else {})


def states(model, name, padded=False):
    with torch.no_grad():
        return model(**inputs_of(name, padded)).last_hidden_state


def random_mask(layers=1, density=0.4, **fields):
    keep = torch.rand(layers, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < density
    return SparseMask(keep | torch.eye(LENGTH, dtype=torch.bool), LENGTH, **fields)


def reference(model, name, mask, padded=False, layer=0):
    """The stock model under the mask of one layer as an additive one, and its window where it has one."""
    return stock_states(model, inputs_of(name, padded), entries(mask, padded, layer))


def entries(mask, padded, layer=0):
    """Which keys each query may see, bool `(3, H, n, n)`."""
    keep = mask.to_table()[layer].expand(3, -1, -1, -1).clone()
    if padded:
        for row, size in enumerate(PADDING.sum(-1).tolist()):
            # Special tokens are those of the sequence itself.
            keep[row, :, :size, :size] = mask.to_table(size)[layer]
            keep[row, :, :, size:] = False
    return keep


def stock_states(model, inputs, keep, grad=False):
    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-WINDOW).tril(WINDOW)
    handles = []
    for layer, module in enumerate(attention_modules(model).values()):
        kept = keep & near if layer in sliding_window(model.config)[1] else keep
        parameters = inspect.signature(module.forward)
        name = "mask" if "mask" in parameters.parameters else "attention_mask"

        def give(_, args, kwargs, parameters=parameters, name=name, kept=kept):
            bound = parameters.bind(*args, **kwargs)
            bound.arguments[name] = torch.zeros(kept.shape).masked_fill(~kept, -1e9)
            return bound.args, bound.kwargs

        handles.append(module.register_forward_pre_hook(give, with_kwargs=True))
    try:
        with torch.set_grad_enabled(grad):
            return model(**inputs).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()


# Equal to the stock model


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@every_model
def test_dense_mask_is_the_stock_model(name, padded):
    model = base_model(name)
    padded = padded and name not in IMAGES
    expected = states(model, name, padded)
    attach(model, "dense", attn_implementation="sparse_eager")
    got = states(model, name, padded)
    rows = REAL if padded else torch.ones_like(REAL)
    torch.testing.assert_close(got[rows], expected[rows])


@pytest.mark.parametrize("special_tokens, padded", [("none", False), ("first", True), ("first_last", True)])
@every_model
def test_sparse_mask_is_an_additive_one_on_the_stock_model(name, padded, special_tokens):
    model, mask = base_model(name), random_mask(special_tokens=special_tokens)
    padded = padded and name not in IMAGES
    rows = REAL if padded else torch.ones_like(REAL)
    expected = reference(model, name, mask, padded)[rows]
    assert (states(model, name, padded)[rows] - expected).abs().max() > 1e-3
    for backend in BACKENDS:
        attach(model, mask, attn_implementation=backend)
        got = states(model, name, padded)[rows]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        detach(model)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("form, block_size", [("offsets", None), ("blocks", 2), ("blocks", 5)])
def test_masks_by_distance_reach_to_the_end_of_a_window(form, block_size, padded):
    """Kernels get no more parameters of such a mask than the window needs, and no fewer."""
    keep = torch.ones(1, HEADS, -(-LENGTH // (block_size or 1)), dtype=torch.bool)
    mask = SparseMask(keep, LENGTH, form, block_size, special_tokens="first_last")
    model = base_model("modernbert")
    rows = REAL if padded else torch.ones_like(REAL)
    expected = reference(model, "modernbert", mask, padded)[rows]
    for backend in BACKENDS:
        attach(model, mask, attn_implementation=backend)
        torch.testing.assert_close(states(model, "modernbert", padded)[rows], expected, atol=1e-5, rtol=1e-5)
        detach(model)


@pytest.mark.parametrize(
    "name, special_tokens, last_token",
    [
        *((name, "first_last", last_token) for name in ("bert", "modernbert") for last_token in ("real", "position")),
        *((name, "first", "real") for name in ("bert", "modernbert")),
        # MobileBERT's embeddings of trigrams mix in what is padding.
        *(
            pytest.param(name, "first", "real", marks=pytest.mark.slow)
            for name in TEXTS
            if name not in ("bert", "mobilebert", "modernbert")
        ),
    ],
)
def test_first_token_of_left_padded_sequences(name, special_tokens, last_token):
    """It is the first real one, also in layers with a sliding window."""
    model, mask = base_model(name), random_mask(special_tokens=special_tokens, last_token=last_token)
    sizes = PADDING.sum(-1).tolist()
    padding = PADDING.flip(1)
    padding[0, -2:] = 0
    keep = mask.structure().expand(3, -1, -1, -1).clone()
    for row, size in enumerate(sizes):
        keep[row, :, LENGTH - size] = keep[row, :, :, LENGTH - size] = True
        if special_tokens == "first_last":
            last = LENGTH - 1 if row or last_token == "position" else LENGTH - 3
            keep[row, :, last] = keep[row, :, :, last] = True
    rows = padding.bool()
    inputs = inputs_of(name) | {"attention_mask": padding}
    expected = stock_states(model, inputs, keep & rows[:, None, None])[rows]
    for backend in BACKENDS:
        attach(model, mask, attn_implementation=backend)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).last_hidden_state[rows], expected, atol=1e-5, rtol=1e-5)
        detach(model)


def test_windows_that_differ_by_sequence_are_refused_by_name():
    model = base_model("modernbert")
    attach(model, random_mask(special_tokens="first_last"), attn_implementation="sparse_flex")
    with pytest.raises(ValueError, match="^sparse_flex cannot run here: it does not support sliding windows around"):
        states(model, "modernbert", padded=True)


@pytest.mark.parametrize("name", [row(name) for name in MODELS if name not in SHARED])
def test_per_layer_masks_reach_their_layers(name):
    """Each layer attends where its own mask says: its probabilities vanish elsewhere."""
    model, mask = base_model(name), random_mask(LAYERS)
    attach(model, mask, attn_implementation="sparse_eager")
    with torch.no_grad():
        attentions = model(**inputs_of(name), output_attentions=True).attentions
    assert len(attentions) == LAYERS
    for layer, weights in enumerate(attentions):
        table = mask.to_table()[layer]
        if layer in sliding_window(model.config)[1]:
            table = table.triu(-WINDOW).tril(WINDOW)
        assert torch.equal(weights > 0, table.expand_as(weights))


def test_shared_layers_refuse_per_layer_masks():
    model = base_model("albert")
    for mask, fields in ((random_mask(LAYERS), {}), ("dam_s", {"share_layers": False})):
        with pytest.raises(ValueError, match="the same weights in every layer"):
            attach(model, mask, **fields)
    with pytest.raises(ValueError, match="the same weights in every layer"):
        attach(model, random_mask()).set_mask(random_mask(LAYERS))
    assert base_model("albert", num_hidden_groups=LAYERS).encoder is not None
    attach(base_model("albert", num_hidden_groups=LAYERS), random_mask(LAYERS))


@every_model
def test_gradients_are_those_of_the_reference(name):
    gradients, mask = [], random_mask()
    for backend in (None, "sparse_eager", "sparse_sdpa", "sparse_cpu"):
        model = base_model(name).train()
        if backend is None:
            states = stock_states(model, inputs_of(name), entries(mask, False), grad=True)
        else:
            states = attach(model, mask, attn_implementation=backend)(**inputs_of(name)).last_hidden_state
        (states * torch.linspace(-1, 1, states.shape[-1])).sum().backward()
        gradients.append({key: value.grad for key, value in model.named_parameters() if value.grad is not None})
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-4, rtol=1e-3)
    assert len(gradients[0]) > 10


# Searching


@every_model
def test_a_step_moves_the_logits(name):
    model = attach(head_model(name), "dam_s", mask_length=LENGTH, sparsity_weight=0.01).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.sparse_attention.mask_logits.detach().clone()
    loss = model(**inputs_of(name, labels=True)).loss
    penalty = sparsebert.sparsity_loss(model)
    assert 0 < penalty < loss
    loss.backward()
    optimizer.step()
    assert (model.sparse_attention.mask_logits - before).abs().min() > 0.01


@every_model
def test_freezing_changes_nothing_in_evaluation(name):
    model = attach(base_model(name), "dam_s", mask_length=LENGTH, diagonal="keep")
    with torch.no_grad():
        model.sparse_attention.mask_logits.normal_()
    searched = states(model, name)
    mask = model.freeze()
    assert 0 < sparsebert.sparsity(model) == mask.sparsity < 1
    torch.testing.assert_close(states(model, name), searched, atol=1e-5, rtol=1e-5)
    assert not any("sparse_attention" in key for key in model.state_dict())
    assert sparsebert.plan(model).sparsity == pytest.approx(mask.sparsity)


@pytest.mark.parametrize("mask", ["dam_s", "window"])
@every_model
def test_activation_checkpointing_changes_nothing(assert_same_gradients, name, mask):
    results = []
    for checkpointing in (False, True):
        model = attach(head_model(name, dropout=0.1), mask, mask_length=LENGTH).train()
        if checkpointing:
            if not model.supports_gradient_checkpointing:
                pytest.skip(f"{name} has no activation checkpointing")
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        loss = model(**inputs_of(name, labels=True)).loss
        loss.backward()
        gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
        results.append((loss.detach(), gradients))
    (loss, expected), (other_loss, gradients) = results
    torch.testing.assert_close(other_loss, loss)
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize(
    "name, padded",
    [
        ("modernbert", True),
        pytest.param("modernbert", False, marks=pytest.mark.slow),
        *(pytest.param(name, name in TEXTS, marks=pytest.mark.slow) for name in MODELS if name != "modernbert"),
    ],
)
def test_compiles_as_one_graph(name, padded):
    torch._dynamo.reset()
    model = attach(base_model(name), "window", mask_length=LENGTH)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    rows = REAL if padded else torch.ones_like(REAL)
    torch.testing.assert_close(states(compiled, name, padded)[rows], states(model, name, padded)[rows])
    torch._dynamo.reset()


# Files


@pytest.mark.parametrize("name, model_of", [*(row(name, head_model) for name in MODELS), ("modernbert", base_model)])
def test_frozen_model_saves_stock_files_and_loads(assert_same_model, name, model_of, tmp_path):
    stock = model_of(name)
    stock.save_pretrained(tmp_path / "stock")
    model = attach(copy.deepcopy(stock), "bigbird", mask_length=LENGTH, allow_empty_rows=True)
    model.save_pretrained(tmp_path / "sparse")
    files = [{path.name: path for path in (tmp_path / kind).iterdir()} for kind in ("stock", "sparse")]
    code = {"modeling_frozen_sparsebert.py"} if name == "bert" else set()
    assert files[1].keys() - files[0].keys() == {"mask_config.json", "mask.safetensors", "README.md"} | code
    config, saved = (json.loads(each["config.json"].read_text()) for each in files)
    assert "sparsebert.load" in saved.pop("how_to_load") and "sparsebert" in saved.pop("attn_implementation")
    assert bool(saved.pop("auto_map", None)) == bool(code)
    assert config == saved
    torch.testing.assert_close(*(load_file(f["model.safetensors"]) for f in files), atol=0.0, rtol=0.0)

    again, info = type(stock).from_pretrained(
        tmp_path / "sparse", output_loading_info=True, attn_implementation="eager"
    )
    detach(again)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded = load(tmp_path / "sparse").eval()
    assert type(loaded).__name__ == type(stock).__name__ and isinstance(loaded, type(stock))
    assert loaded.sparse_attention.mask == model.sparse_attention.mask
    assert_same_model(loaded, model.eval(), **inputs_of(name))
    assert_same_model(again.eval(), stock.eval(), **inputs_of(name))
    with torch.no_grad():
        assert not torch.allclose(model(**inputs_of(name))[0], stock(**inputs_of(name))[0], atol=1e-4)


@pytest.mark.parametrize("name", ["modernbert", "vit"])
def test_search_survives_saving(assert_same_model, name, tmp_path):
    model = attach(head_model(name), "dam_u", mask_length=LENGTH, share_layers=False, target_sparsity=0.5)
    with torch.no_grad():
        model.sparse_attention.mask_logits.normal_()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name
    for loaded in (load(tmp_path), load(tmp_path, type(head_model(name))), load(tmp_path, dtype=torch.bfloat16)):
        attention = loaded.sparse_attention
        assert attention.searching and attention.config.target_sparsity == 0.5
        assert torch.equal(attention.mask_logits, model.sparse_attention.mask_logits)
        assert type(loaded) is type(model)
    assert_same_model(load(tmp_path).eval(), model, **inputs_of(name))
    model.sparse_attention.config = model.sparse_attention.config.changed(allow_empty_rows=True)
    model.freeze()
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "search_config.json").exists()
    assert load(tmp_path).sparse_attention.mask == model.sparse_attention.mask


def test_load_takes_sparsebert_models_and_other_heads(tiny_config, tmp_path):
    SparseBertForMaskedLM(tiny_config(pattern="window")).save_pretrained(tmp_path / "sparsebert")
    assert type(load(tmp_path / "sparsebert")) is SparseBertForMaskedLM
    attach(head_model("roberta"), "window", mask_length=LENGTH).save_pretrained(tmp_path / "roberta")
    model = load(
        tmp_path / "roberta", transformers.AutoModelForSequenceClassification, diagonal="remove", num_labels=5
    )
    assert isinstance(model, transformers.RobertaForSequenceClassification) and model.num_labels == 5
    assert model.sparse_attention.mask == build_pattern("window", LENGTH, HEADS).replace(diagonal=False)
    model = load(tmp_path / "roberta", attn_implementation="sparse_sdpa")
    assert model.config._attn_implementation == "sparse_sdpa"


def test_load_of_a_folder_without_a_mask(tmp_path):
    build_pattern("window", length=16, num_heads=2).save_pretrained(tmp_path / "mask")
    (tmp_path / "mask" / "adapter_config.json").write_text("{}")
    with pytest.raises(MaskFileError, match="holds an adapter: load it with peft"):
        load(tmp_path / "mask")
    base_model("bert").save_pretrained(tmp_path)
    with pytest.raises(MaskFileError, match="no mask_config.json and no search_config.json"):
        load(tmp_path)
    attach(base_model("bert"), "dam_s").save_pretrained(tmp_path)
    (tmp_path / "search_config.json").write_text("[")
    with pytest.raises(MaskFileError, match="not a search"):
        load(tmp_path)
    base_model("bert").save_pretrained(tmp_path)  # without the search, which is removed
    (tmp_path / "search_config.json").write_text('{"search": "dam_s"}')
    with pytest.raises(MaskFileError, match="lack sparse_attention.mask_logits"):
        load(tmp_path)


# Off again, copies


@every_model
def test_model_made_from_the_configuration_of_another_says_that_it_has_no_mask(name, caplog):
    stock = base_model(name)
    model = attach(copy.deepcopy(stock), "window", mask_length=LENGTH)
    made = type(stock)._from_config(model.config).eval()
    made.load_state_dict(stock.state_dict())
    transformers.utils.logging.get_logger("sparsebert").warning_once.cache_clear()
    model(**inputs_of(name))
    assert "runs dense" not in caplog.text
    torch.testing.assert_close(states(made, name), states(stock, name), atol=1e-5, rtol=1e-5)
    assert "Attention runs dense, since its model carries no mask: pass one to sparsebert.attach" in caplog.text


@pytest.mark.parametrize("model_of, mask", [(base_model, "window"), (head_model, "dam_s")], ids=["base", "head"])
@every_model
def test_detached_model_is_what_it_was(assert_same_model, name, model_of, mask):
    model = model_of(name)
    inputs = inputs_of(name, padded=True)
    stock, keys, before = copy.deepcopy(model), list(model.state_dict()), _attributes(model)
    attach(model, mask, mask_length=LENGTH)
    assert not torch.allclose(model(**inputs)[0], stock(**inputs)[0], atol=1e-4)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for attached in (model, *copies):
        assert attached.sparse_attention.searching == (mask == "dam_s")
        assert detach(attached) is attached
        assert_same_model(attached, stock, **inputs)
        assert list(attached.state_dict()) == keys and _attributes(attached) == before
        assert attached.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="nothing to detach"):
        detach(model)


def _attributes(model):
    """Class, names of attributes and number of hooks of every module."""
    return [
        (type(module), sorted(vars(module)), len(module._forward_pre_hooks) + len(module._forward_hooks))
        for module in model.modules()
    ]


# Refusals


def test_models_of_one_configuration_are_independent(tmp_path):
    config = config_of("bert")
    first, second, dense = (transformers.BertModel(config).eval() for _ in range(3))
    for model in (first, second):
        attach(model, "window", mask_length=16)
        assert model.config is model.encoder.config is not config
    detach(first)
    ids = torch.randint(5, 100, (1, 8))
    assert second(ids).last_hidden_state.isfinite().all() and first(ids).last_hidden_state.isfinite().all()
    dense.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_a_search_stay_float32(dtype):
    """At 0.6, bfloat16 would round away every step of 1e-3."""
    model = attach(head_model("bert"), "dam_s", mask_length=16).to(dtype)
    config = sparsebert.SparseBertConfig(**TEXT, search="dam_s", mask_length=LENGTH)
    for made in (model, transformers.AutoModelForMaskedLM.from_config(config, dtype=dtype)):
        assert (made.dtype, made.sparse_attention.mask_logits.dtype) == (dtype, torch.float32)
        assert made(IDS).logits.dtype == dtype


@pytest.fixture
def in_mixed_precision(tmp_path):
    """Trains a model as a stock Trainer does."""

    def train(model, *callbacks):
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        fields = {"max_steps": 2, "bf16": True, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
        arguments = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **fields)
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks)).train()
        return model.eval()

    return train


def test_detached_after_a_training_in_mixed_precision(in_mixed_precision):
    """Accelerate keeps the forward of the model that it was given."""
    model = in_mixed_precision(attach(head_model("bert"), "window", mask_length=LENGTH))
    detach(model)
    stock = head_model("bert")
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(states_of_head(model), states_of_head(stock), rtol=0.05, atol=0.05)
    assert in_mixed_precision(model)(IDS).logits.isfinite().all()


def states_of_head(model):
    with torch.no_grad():
        return model(IDS).logits.float()


@pytest.mark.parametrize("make", [base_model, head_model])
def test_a_model_prepared_for_mixed_precision_is_refused(make):
    """Its forward would not know of the mask."""
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(make("bert"))
    with pytest.raises(ValueError, match="was prepared by accelerate for mixed precision"):
        attach(model, "window", mask_length=LENGTH)
    assert not hasattr(model, "sparse_attention")


def test_a_schedule_reaches_the_search_in_a_part_of_a_model(in_mixed_precision):
    class Pair(torch.nn.Module):
        def __init__(self, *heads):
            super().__init__()
            self.heads = torch.nn.ModuleList(heads)

        def forward(self, input_ids, labels):
            outputs = [head(input_ids, labels=labels) for head in self.heads]
            return {"loss": sum(output.loss for output in outputs), "logits": outputs[0].logits}

    searching, frozen = (attach(head_model("bert"), mask, mask_length=LENGTH) for mask in ("dam_s", "window"))
    in_mixed_precision(Pair(searching, frozen), sparsebert.SearchSchedule(0.5))
    assert searching.sparse_attention.mask is not None
    pair = Pair(*(attach(head_model("bert"), "dam_s", mask_length=LENGTH) for _ in range(2)))
    with pytest.raises(ValueError, match="SearchSchedule is for one search, not 2"):
        in_mixed_precision(pair, sparsebert.SearchSchedule(0.5))


def test_a_loss_of_several_forwards_needs_the_penalty_once(caplog):
    logging.get_logger("sparsebert").warning_once.cache_clear()
    model = attach(base_model("bert"), "dam_s", mask_length=LENGTH, sparsity_weight=0.01).train()
    for _ in range(2):
        first, second = model(IDS).last_hidden_state, model(IDS).last_hidden_state
        ((first * second).sum() + sparsebert.sparsity_loss(model)).backward()
    loss = model(IDS).last_hidden_state.sum()
    states(model.eval(), "bert")
    penalty = sparsebert.sparsity_loss(model.train())  # of the sample before the evaluation
    (loss + penalty).backward()
    assert penalty > 0 and "without the penalty" not in caplog.text
    model(IDS).last_hidden_state.sum().backward()
    assert "without the penalty" in caplog.text


def test_a_bias_of_the_caller_keeps_its_precision():
    stock, bias = base_model("bert").double(), torch.randn(3, 1, LENGTH, LENGTH, dtype=torch.float64)
    model = attach(copy.deepcopy(stock), "dense", mask_length=LENGTH, attn_implementation="sparse_eager")
    with torch.no_grad():
        got, want = (each(**inputs_of("bert") | {"attention_mask": bias})[0] for each in (model, stock))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_a_mask_of_an_unknown_search(tmp_path):
    mask = build_pattern("window", 16, 4).replace(metadata={"search": "of_a_newer_version"})
    model = attach(head_model("bert"), mask)
    assert model.sparse_attention.mask.metadata["search"] == "of_a_newer_version"
    model.save_pretrained(tmp_path)
    assert load(tmp_path).sparse_attention.mask == mask


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deberta-v2", r"\. Its scores depend on what a token is and on where another one is"),
        ("longformer", r"\. Its attention does not compute the scores of all pairs"),
        (
            "data2vec-text",
            r"\. The attention of Data2VecTextModel takes an attention function: if it is an encoder, .* a row",
        ),
        ("rembert", r"\. The attention of RemBertModel takes no attention function: it would need a forward of its"),
        ("of_the_user", "$"),
    ],
)
def test_other_architectures_are_refused_with_what_they_lack(name, why):
    with pytest.raises(ValueError, match=f"{name!r} cannot carry a mask: use one of albert, bert, .*, xmod{why}"):
        check_architecture(name)


@pytest.mark.parametrize("kind", ["Model", "ForConditionalGeneration", "ForSequenceClassification"])
def test_a_model_with_a_decoder_is_refused(kind):
    model = getattr(transformers, f"T5{kind}")(config_of("t5"))
    with pytest.raises(ValueError, match=f"T5{kind} has a decoder, .* load that, with AutoModelForTextEncoding"):
        attach(model, "window", mask_length=LENGTH)


@pytest.mark.parametrize("mask", ["window", "dam_s"])
def test_the_encoder_of_a_t5_is_loaded_without_a_decoder(mask, tmp_path):
    model = attach(base_model("t5"), mask, mask_length=LENGTH)
    model.save_pretrained(tmp_path)
    for loaded in (load(tmp_path), encoder_class_of(model.config).from_pretrained(tmp_path)):
        assert isinstance(loaded, transformers.T5EncoderModel)
        assert loaded.sparse_attention.searching == (mask == "dam_s")
    with pytest.raises(MaskFileError, match="T5Model has a decoder"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_layoutlm_takes_no_mask_of_four_dimensions():
    model = attach(base_model("layoutlm"), "window", mask_length=LENGTH, attn_implementation="sparse_eager")
    with pytest.raises(ValueError, match="attention_mask must be of shape .batch, tokens.: a LayoutLM takes no 4-D"):
        model(IDS, attention_mask=torch.zeros(3, 1, LENGTH, LENGTH))


@pytest.mark.parametrize(
    "mask, fields, message",
    [
        (
            build_pattern("window", LENGTH, 5),
            {},
            "1 layer.s. and 5 heads of length 12; the model has 3 layers.*4 heads",
        ),
        (random_mask(2), {}, "for 2 layer.s. and 4 heads.*the model has 3 layers"),
        ("bigbrid", {}, "unknown mask 'bigbrid'; did you mean 'bigbird'"),
        ("dams", {}, "did you mean 'dam_s'"),
        (
            "owner/nothing",
            {},
            "mask 'owner/nothing' cannot be read as a folder or Hub id: owner/nothing: there is no such f",
        ),
        (None, {}, "attach: mask_or_search must be a SparseMask, or .* got None"),
        (random_mask(), {"diagonal": "off"}, "diagonal.*must be one of 'learned', 'keep', 'remove', got 'off'"),
        ("window", {"attn_implementation": "flash_attention_2"}, "'flash_attention_2' would ignore the mask"),
        ("window", {"sparsity_weight": 1.0}, "sparsity_weight has no meaning for a pattern: the fields may be"),
        (random_mask(), {"mask_length": 8}, "mask_length has no meaning for a given mask"),
        ("dam_s", {"pattern_kwargs": {}}, "pattern_kwargs has no meaning for a search"),
        ("window", {"token_mixers": ["sepconv", "attention"]}, "token_mixers has no meaning"),
        ("dam_s", {"temprature": 1.0}, "unknown field 'temprature'; did you mean 'temperature'"),
        ("dam_s", {"temperature": -1.0}, "temperature.*must be in .0, 1000.0., got -1.0"),
        ("dam_s", {"special_tokens": "last"}, "special_tokens.*must be one of 'none', 'first', 'first_last'"),
    ],
)
def test_what_is_refused_leaves_the_model_alone(mask, fields, message):
    model = base_model("bert")
    before = _attributes(model)
    with pytest.raises(ValueError, match=message):
        attach(model, mask, **fields)
    assert _attributes(model) == before and model.config._attn_implementation == "eager"


def test_the_stack_of_an_encoder_keeps_its_own_fields():
    """Which may differ from those of the whole: `use_cache` of a UMT5, whose stack refuses to have one."""
    model = base_model("umt5", use_cache=True)
    want = states(model, "umt5")
    attach(model, "dense", mask_length=LENGTH)
    torch.testing.assert_close(states(model, "umt5"), want)
    assert torch.equal(states(detach(model), "umt5"), want)


def test_a_head_that_returns_a_tensor_is_trained_with_a_search():
    class Score(transformers.BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = transformers.BertModel(config)
            self.post_init()

        def forward(self, input_ids):
            return self.bert(input_ids)[0].mean()

    model = attach(Score(config_of("bert")), "dam_s", mask_length=LENGTH, sparsity_weight=0.01).train()
    model(IDS).backward()
    assert model.base_model.sparse_attention.mask_logits.grad is not None


def test_attaching_twice(tiny_config):
    model = attach(head_model("bert"), "window")
    for attached in (model, model.bert, SparseBertForMaskedLM(tiny_config())):
        with pytest.raises(ValueError, match="carries a mask already"):
            attach(attached, "bigbird")
    with pytest.raises(ValueError, match="needs a model of transformers, got Linear"):
        attach(torch.nn.Linear(2, 2), "window")
    with pytest.raises(ValueError, match="nothing to detach"):
        detach(SparseBertForMaskedLM(tiny_config()))
    with pytest.raises(ValueError, match="attached to a model with a head that contains this one"):
        detach(model.bert)
    model = head_model("bert")
    attach(model.bert, "window")
    with pytest.raises(ValueError, match="it was attached to its .*BertModel, which is to be given"):
        detach(model)
    assert detach(model.bert) is model.bert


def test_a_mask_that_is_still_being_searched_is_no_mask(tmp_path):
    attach(base_model("bert"), "dam_s", mask_length=LENGTH).save_pretrained(tmp_path)
    with pytest.raises(MaskFileError, match="its mask is still being searched: load the model, and freeze it first"):
        attach(base_model("bert"), tmp_path)
    with pytest.raises(FileNotFoundError, match="mask: .* whose mask is still being searched"):
        check_folder(tmp_path, "mask", ("mask_config.json",))


def test_mask_of_the_same_base_model(tmp_path, caplog, monkeypatch):
    """However its folder is spelled."""
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.get_logger("sparsebert"), "propagate", True)
    monkeypatch.chdir(tmp_path)
    base_model("bert").save_pretrained("one")
    made, *others = (transformers.AutoModel.from_pretrained(name) for name in (tmp_path / "one", "one", "./one/"))
    mask = attach(made, "dam_s", mask_length=LENGTH).freeze(threshold=0.0)
    assert mask.metadata["base_model"] == str(tmp_path / "one")
    for model in others:
        attach(model, mask, strict=True)
    assert "was found for" not in caplog.text


@every_model
def test_names_and_attentions_of_transformers_while_attached(name):
    stock = base_model(name)
    expected = states(attach(stock, "window", mask_length=LENGTH), name)
    for implementation in ("eager", "sdpa"):
        stock.set_attn_implementation(implementation)
        assert stock.config._attn_implementation == f"sparse_{implementation}"
        torch.testing.assert_close(states(stock, name), expected, atol=1e-5, rtol=1e-5)
    stock.set_attn_implementation("eager")
    for config in configs_of(stock):
        config.output_attentions = True
    with torch.no_grad():
        assert len(stock.forward(**inputs_of(name)).attentions) == LAYERS
    assert detach(stock).config._attn_implementation == "eager"
    assert type(stock.config) is type(base_model(name).config)


@pytest.mark.parametrize("mask", ["window", "dam_s"])
@every_model
def test_forward_is_the_call(name, mask):
    head = attach(head_model(name), mask, mask_length=LENGTH).train()
    for model in (head, head.base_model):
        results = []
        for run in (model, model.forward):
            torch.manual_seed(5)
            results.append(run(**inputs_of(name, labels=model is head)).to_tuple())
        torch.testing.assert_close(*results, rtol=0.0, atol=0.0)
    assert inspect.signature(head.forward) == inspect.signature(head_model(name).forward)


@pytest.mark.parametrize("pattern", ["bigbird", "strided_cycle"])
def test_patterns_and_their_fields(pattern):
    fields = {"mask_seed": 3, "mask_length": LENGTH, "diagonal": "keep"}
    model = attach(base_model("electra"), pattern, **fields)
    expected = build_pattern(pattern, LENGTH, HEADS, num_layers=LAYERS, **{"seed": 3})
    assert model.sparse_attention.mask == expected.replace(diagonal=True) and pattern in PATTERNS


def test_windows_refuse_masks_that_leave_them_empty():
    far = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() > WINDOW
    mask = SparseMask(far.expand(HEADS, -1, -1), LENGTH)
    attach(base_model("bert"), mask)
    with pytest.raises(ValueError, match="mask rows keep nothing"):
        attach(base_model("modernbert"), mask)
    model = attach(base_model("modernbert"), mask, allow_empty_rows=True)
    assert states(model, "modernbert").isfinite().all()


# Together with the host


@pytest.mark.parametrize(
    "name", ["distilbert", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "distilbert")]
)
def test_a_mask_attached_before_and_after_an_adapter(name):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    outputs = []
    for adapted in (False, True):
        torch.manual_seed(4)
        model = head_model(name)
        model = attach(peft.get_peft_model(model, config) if adapted else model, "window", mask_length=LENGTH)
        model = model if adapted else peft.get_peft_model(model, config)
        assert sparsebert.sparsity(model) > 0.2
        outputs.append(model.eval()(**inputs_of(name)).logits)
        assert not hasattr(detach(model).get_base_model(), "freeze")
    torch.testing.assert_close(*outputs)


def test_real_weights(tmp_path, real_bert):
    extract = transformers.pipeline("feature-extraction", str(real_bert), return_tensors=True)
    texts = ["A cat sits on the mat.", "The feline is resting on a rug.", "Interest rates rose again."]
    dense = torch.stack([extract(text)[0].mean(0) for text in texts])
    model = extract.model
    attach(model, "dense")
    torch.testing.assert_close(torch.stack([extract(text)[0].mean(0) for text in texts]), dense, atol=1e-5, rtol=1e-4)
    detach(model)
    attach(model, "window", mask_length=32, pattern_kwargs={"window_size": 4})
    sparse = torch.stack([extract(text)[0].mean(0) for text in texts])
    near, far = torch.nn.functional.cosine_similarity(sparse[:1], sparse[1:])
    assert near > far + 0.1
    model.save_pretrained(tmp_path)
    extract.model = load(tmp_path).eval()
    torch.testing.assert_close(torch.stack([extract(text)[0].mean(0) for text in texts]), sparse)


@pytest.mark.parametrize("search", ["dense", "dam_s"])
@pytest.mark.parametrize(
    "given, found",
    [
        (torch.ones(LENGTH), r"torch.float32 \(12,\)"),
        (torch.ones(3, LENGTH, LENGTH), r"torch.float32 \(3, 12, 12\)"),
        (torch.ones(1, LENGTH), r"torch.float32 \(1, 12\)"),
        (torch.ones(3, 1, LENGTH, LENGTH).long(), r"torch.int64 \(3, 1, 12, 12\)"),  # 0 and 1 would remove nothing
        ({"full_attention": None}, "dict"),
    ],
)
def test_attention_masks_of_other_shapes_are_refused(search, given, found):
    torch.manual_seed(0)
    model = attach(transformers.BertModel(transformers.BertConfig(**TEXT)), search, mask_length=LENGTH)
    with pytest.raises(ValueError, match=rf"attention_mask must be .* here \(3, 12\), .* got {found}"):
        model(IDS, attention_mask=given)


@pytest.mark.parametrize("stock", [True, False])
def test_the_encoder_of_a_head_is_saved_with_its_mask(stock, tmp_path, caplog):
    torch.manual_seed(0)
    fields = {"mask_length": LENGTH, "target_sparsity": 0.6}
    if stock:
        model = attach(transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)), "dam_s", **fields)
    else:
        model = SparseBertForMaskedLM(sparsebert.SparseBertConfig(**TEXT, search="dam_s", **fields))
    model.sparse_attention.set_progress(0.2)
    model.bert.save_pretrained(tmp_path / "searching")
    assert ("BertModel is saved without its search" in caplog.text) == stock
    for read in () if stock else (load, transformers.AutoModel.from_pretrained):
        loaded = read(tmp_path / "searching")
        assert isinstance(loaded, sparsebert.SparseBertModel)
        assert loaded.sparse_attention.progress == model.sparse_attention.progress
        assert loaded.sparse_attention.sparsity() == model.sparse_attention.sparsity()
    model.freeze()
    model.eval().bert.save_pretrained(tmp_path / "frozen")
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "frozen").eval()
    assert encoder.sparse_attention.mask == model.sparse_attention.mask
    assert torch.equal(encoder(IDS).last_hidden_state, model.bert(IDS).last_hidden_state)


def test_a_model_that_runs_by_its_own_code_takes_no_other_mask():
    model = transformers.BertModel(transformers.BertConfig(**TEXT))
    model.mask_files = ("config", "weights")
    with pytest.raises(ValueError, match="BertModel applies a mask by the code that is saved with it"):
        attach(model, "window", mask_length=LENGTH)
    assert "sparse_attention" not in model._modules
