"""Models made of several: the masks of their parts are saved, loaded and trained with the whole."""

import copy
import json

import pytest
import torch
import transformers
from conftest import TINY
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    Data2VecVisionConfig,
    Data2VecVisionModel,
    EncoderDecoderModel,
    GroundingDinoConfig,
    GroundingDinoModel,
    PreTrainedModel,
    RemBertConfig,
    RemBertModel,
    SplinterConfig,
    SplinterModel,
    SwinConfig,
    Trainer,
    TrainingArguments,
    TrOCRConfig,
    TrOCRForCausalLM,
    VisionEncoderDecoderModel,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTModel,
)

import sparsebert
from sparsebert import MaskFileError, SparseBertConfig, SparseBertModel, attach, build_pattern, detach, load, plugin


LENGTH = 10
IDS = torch.randint(5, 100, (4, LENGTH), generator=torch.Generator().manual_seed(1))
PIXELS = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
WINDOW = {"mask_length": LENGTH, "pattern_kwargs": {"window_size": 1}}
SIZES = TINY | {"initializer_range": 0.3}


def bert(model_class=BertModel, config_class=BertConfig, **fields):
    torch.manual_seed(0)
    return model_class(config_class(**SIZES, **fields)).eval()


def decoder():
    return bert(BertLMHeadModel, is_decoder=True, add_cross_attention=True)


def vit():
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "max_position_embeddings")}
    return ViTModel(ViTConfig(**sizes, image_size=6, patch_size=2)).eval()


class Towers(PreTrainedModel):
    config_class = BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.towers = nn.ModuleDict({"left": BertModel(config), "right": BertModel(config)})
        self.post_init()

    def forward(self, input_ids):
        return tuple(tower(input_ids)[0] for tower in self.towers.values())


class Pair(BertForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.second = BertModel(config)
        self.post_init()

    def forward(self, input_ids):
        return super().forward(input_ids).logits, self.second(input_ids)[0]


TEXTS = {"input_ids": IDS, "decoder_input_ids": IDS}
# Models, the names of their parts, and inputs.
COMPOSITES = {
    "texts": (lambda: EncoderDecoderModel(encoder=bert(), decoder=decoder()), ("encoder", "decoder"), TEXTS),
    "captions": (
        lambda: VisionEncoderDecoderModel(encoder=vit(), decoder=decoder()),
        ("encoder", "decoder"),
        {"pixel_values": PIXELS, "decoder_input_ids": IDS},
    ),
    "dual": (
        lambda: VisionTextDualEncoderModel(vision_model=vit(), text_model=bert()),
        ("vision_model", "text_model"),
        {"pixel_values": PIXELS, "input_ids": IDS},
    ),
    "towers": (lambda: bert(Towers), ("towers.left", "towers.right"), {"input_ids": IDS}),
    "pair": (lambda: bert(Pair), ("second",), {"input_ids": IDS}),
}


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(transformers.utils.logging.get_logger("sparsebert"), "propagate", True)
    return caplog


def outputs(model, inputs):
    with torch.no_grad():
        found = model.eval()(**inputs)
    return [each for each in (found.to_tuple() if hasattr(found, "to_tuple") else found) if torch.is_tensor(each)]


@pytest.mark.parametrize("mask", ["window", build_pattern("window", 16, 4)], ids=["name", "mask"])
def test_a_whole_names_the_parts_that_can_carry_a_mask(mask):
    with pytest.raises(ValueError, match="cannot carry a mask itself: attach one to its parts, encoder, decoder"):
        sparsebert.attach(COMPOSITES["texts"][0](), mask)


@pytest.fixture
def saved(tmp_path):
    """An encoder-decoder whose encoder and decoder have masks, and its folder."""
    model = COMPOSITES["texts"][0]()
    for part in (model.encoder, model.decoder):
        attach(part, "window", **WINDOW)
    model.save_pretrained(tmp_path / "saved")
    return model, tmp_path / "saved"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", COMPOSITES)
def test_masks_of_parts_come_back(kind, tmp_path):
    make, parts, inputs = COMPOSITES[kind]
    model = make().eval()
    dense = outputs(model, inputs)
    if kind == "pair":
        attach(model, "window", **WINDOW)
    for name in parts:
        attach(model.get_submodule(name), "window", **WINDOW)
    expected = outputs(model, inputs)
    assert not any(torch.equal(*pair) for pair in zip(dense, expected, strict=True))
    for folder in ("once", "twice"):
        model.save_pretrained(tmp_path / folder)
        assert config_of(tmp_path / folder)["parts_with_mask"] == list(parts)
        model, info = getattr(type(model), "stock_class", type(model)).from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert not any(info.values())
        torch.testing.assert_close(outputs(model, inputs), expected)
    for name in parts:
        detach(model.get_submodule(name))
    if kind == "pair":
        detach(model)
    torch.testing.assert_close(outputs(model, inputs), dense)
    names = {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
    assert names == {"sdpa"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_dense_mask_for_a_decoder_leaves_its_cross_attention(attention, batch):
    """A model put together in Python gives its decoder another configuration than the layers have."""
    sizes = TINY | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    decoder = BertLMHeadModel(BertConfig(**sizes, is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=BertModel(BertConfig(**sizes)), decoder=decoder).eval()
    model.set_attn_implementation(attention)
    ids = torch.arange(10 * batch).view(batch, 10) % 90 + 5
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(10) < 7).expand(batch, 10).long()}
    inputs["decoder_input_ids"] = ids[:, :8]
    with torch.no_grad():
        expected = model(**inputs).logits
        attach(model.decoder, "dense", mask_length=10)
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
        detach(model.decoder)
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["captions", "dual"])
def test_attach_names_the_parts(kind):
    make, parts, _ = COMPOSITES[kind]
    with pytest.raises(ValueError, match=f"attach one to its parts, {', '.join(parts)}"):
        attach(make(), "window", **WINDOW)


def test_the_encoder_of_a_head_as_a_part(tmp_path):
    """The head that its mask was attached to is not saved."""
    model = EncoderDecoderModel(encoder=attach(bert(BertForMaskedLM), "window", **WINDOW).bert, decoder=decoder())
    model.save_pretrained(tmp_path)
    loaded = EncoderDecoderModel.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded, TEXTS), outputs(model, TEXTS))


def test_a_model_put_together_from_loaded_parts(tmp_path):
    attach(bert(), "window", **WINDOW).save_pretrained(tmp_path / "part")
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "part", tmp_path / "part").eval()
    model.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(outputs(loaded, TEXTS), outputs(model, TEXTS))
    for part in (model.encoder, model.decoder):
        detach(part)
    stock = EncoderDecoderModel(encoder=bert(), decoder=decoder())
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(outputs(model, TEXTS), outputs(stock, TEXTS))


def test_parts_return_attentions_under_names_of_transformers(saved):
    """As whole models do: the reference runs instead. Named itself, the backend is refused."""
    _, folder = saved
    parts = [attach(part, "window", attn_implementation="sdpa", **WINDOW) for part in (bert(), decoder())]
    later = EncoderDecoderModel(encoder=attach(bert(BertForMaskedLM), "window", **WINDOW).bert, decoder=decoder())
    later.set_attn_implementation("sdpa")
    own = bert(SparseBertModel, SparseBertConfig, mask_length=LENGTH, pattern="window")
    own.set_attn_implementation("sdpa")
    models = {
        "before": EncoderDecoderModel(encoder=parts[0], decoder=parts[1]),
        "after": later,
        "copied": copy.deepcopy(later),
        "loaded": EncoderDecoderModel.from_pretrained(folder, attn_implementation="sdpa"),
        "own": EncoderDecoderModel(encoder=own, decoder=decoder()),
    }
    for name, model in models.items():
        found = model.eval()(**TEXTS, output_attentions=True).encoder_attentions
        assert len(found) == 2 and not found[0][..., 0, -1].any(), name
        model.encoder.set_attn_implementation("sparse_sdpa")
        with pytest.raises(ValueError, match="does not support output_attentions=True"):
            model(**TEXTS, output_attentions=True)


def test_what_needs_one_mask_names_the_parts(saved):
    model, _ = saved
    with pytest.raises(ValueError, match="give one of its parts that do, encoder, decoder.bert"):
        sparsebert.sparsity(model)
    assert sparsebert.sparsity(model.encoder) == sparsebert.sparsity(model.decoder) > 0.5


def test_configurations_that_were_used_before(saved):
    """Whichever configuration is given, the folder says which parts have a mask."""
    model, folder = saved
    loaded = EncoderDecoderModel.from_pretrained(folder)
    for config in (model.config, loaded.config):
        again = EncoderDecoderModel.from_pretrained(folder, config=config)
        torch.testing.assert_close(outputs(again, TEXTS), outputs(model, TEXTS))
    detach(loaded.encoder)
    loaded.save_pretrained(folder)
    again = EncoderDecoderModel.from_pretrained(folder, config=model.config)
    torch.testing.assert_close(outputs(again, TEXTS), outputs(loaded, TEXTS))
    new = EncoderDecoderModel(config=loaded.config)
    new.save_pretrained(folder)
    assert "parts_with_mask" not in config_of(folder)
    torch.testing.assert_close(outputs(EncoderDecoderModel.from_pretrained(folder), TEXTS), outputs(new, TEXTS))


def test_arguments_of_loading(saved, tmp_path):
    model, folder = saved
    expected = outputs(model, TEXTS)
    folder.rename(tmp_path / "inner")
    places = {"encoder": "cpu", "decoder": "disk"}
    other = copy.deepcopy(EncoderDecoderModel(encoder=bert(), decoder=decoder()).config)
    for arguments, backend in (
        ({}, "sparse_auto"),
        ({"config": other}, "sparse_auto"),
        ({"attn_implementation": "eager"}, "sparse_eager"),
        ({"attn_implementation": {"encoder": "sparse_sdpa"}}, "sparse_sdpa"),
        ({"device_map": places, "offload_folder": tmp_path / "offload"}, "sparse_auto"),
    ):
        loaded = EncoderDecoderModel.from_pretrained(tmp_path, subfolder="inner", **arguments)
        assert loaded.encoder.config._attn_implementation == backend
        torch.testing.assert_close(outputs(loaded, TEXTS), expected)
        assert detach(loaded.encoder).config._attn_implementation == ("eager" if backend == "sparse_eager" else "sdpa")
    torch.testing.assert_close(outputs(load(tmp_path, subfolder="inner"), TEXTS), expected)


def test_parts_without_a_mask_anymore(saved):
    model, folder = saved
    (folder / "mask-decoder" / "notes.txt").write_text("mine")
    (folder / "mask-mine").mkdir()
    build_pattern("window", LENGTH, 4).save_pretrained(folder / "mask-mine")
    detach(model.encoder)
    model.save_pretrained(folder)
    assert config_of(folder)["parts_with_mask"] == ["decoder"] and not (folder / "mask-encoder").exists()
    loaded = EncoderDecoderModel.from_pretrained(folder)
    assert not hasattr(loaded.encoder, "sparse_attention") and hasattr(loaded.decoder, "set_mask")
    detach(model.decoder)
    model.save_pretrained(folder)
    assert not {"parts_with_mask", "attn_implementation", "how_to_load"} & config_of(folder).keys()
    assert [path.name for path in (folder / "mask-decoder").iterdir()] == ["notes.txt"]
    assert (folder / "mask-mine" / "mask_config.json").is_file()
    assert outputs(EncoderDecoderModel.from_pretrained(folder), TEXTS)[0].equal(outputs(model, TEXTS)[0])


def test_folders_that_say_something_else(saved, tmp_path):
    _, folder = saved
    config = config_of(folder)
    for names, message in (
        (["../encoder"], "must be a list of parts"),
        ("encoder", "must be a list of parts"),
        (["enc_to_dec"], "names 'enc_to_dec', no model inside this EncoderDecoderModel"),
        (["encoder", "decoder.bert"], "no mask in its folder mask-decoder.bert"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"parts_with_mask": names}))
        with pytest.raises(MaskFileError, match=message):
            EncoderDecoderModel.from_pretrained(folder)


def test_without_the_plugin(saved, said):
    model, folder = saved
    plugin.disable()
    try:
        with pytest.raises(ValueError, match="of the package sparsebert"):  # of transformers
            EncoderDecoderModel.from_pretrained(folder)
        with pytest.raises(ValueError, match="only sparsebert.plugin attaches masks of parts"):
            load(folder)
        assert "save_pretrained" not in said.text
        model.save_pretrained(folder.with_name("unplugged"))
        assert "contains a BertModel with a mask do not hold that mask" in said.text
    finally:
        plugin.enable()
    with pytest.raises(MaskFileError, match="no mask in its folder mask-encoder"):
        EncoderDecoderModel.from_pretrained(folder.with_name("unplugged"))
    model.set_attn_implementation("eager")
    model.config.output_attentions = True  # with which the file could not be read
    model.save_pretrained(folder)
    assert "attn_implementation" not in config_of(folder)
    assert hasattr(EncoderDecoderModel.from_pretrained(folder, attn_implementation="eager").encoder, "set_mask")


def test_parts_that_are_being_searched(tmp_path):
    model = EncoderDecoderModel(encoder=bert(), decoder=decoder())
    attach(model.encoder, "dam_s", mask_length=LENGTH, target_sparsity=0.5)
    attach(model.decoder, "window", **WINDOW)
    with torch.no_grad():
        model.encoder.sparse_attention.mask_logits.normal_()
    model.encoder.sparse_attention.set_progress(0.5)
    model.save_pretrained(tmp_path)
    loaded = EncoderDecoderModel.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded, TEXTS), outputs(model, TEXTS))
    found = loaded.encoder.sparse_attention
    assert found.mask_logits.requires_grad and found.progress == 0.5 and found.config.target_sparsity == 0.5
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    loaded.encoder.freeze()
    loaded.save_pretrained(tmp_path)
    again = EncoderDecoderModel.from_pretrained(tmp_path)
    assert again.encoder.sparse_attention.mask == loaded.encoder.sparse_attention.mask
    assert {path.name for path in (tmp_path / "mask-encoder").iterdir()} == {
        *("README.md", "mask.safetensors", "mask_config.json")
    }


def test_a_sparsebert_as_a_part(tmp_path):
    """Its pattern or search is in its configuration, which a mask that was found or set since is not."""
    for step in ("pattern", "set", "searching", "searched"):
        fields = {"search": "dam_s"} if step.startswith("search") else {"pattern": "window"}
        encoder = bert(SparseBertModel, SparseBertConfig, mask_length=LENGTH, **fields)
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder()).eval()
        if step == "set":
            encoder.set_mask(build_pattern("strided", LENGTH, 4, stride=3))
        elif step == "searched":
            encoder.freeze(sparsity=0.5)
        elif step == "searching":
            encoder.sparse_attention.set_progress(0.5)
        model.save_pretrained(tmp_path)
        assert (tmp_path / "mask-encoder").is_dir() == (step in ("set", "searched"))
        loaded, info = EncoderDecoderModel.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()) and loaded.encoder.config._attn_implementation == "sparse_auto"
        torch.testing.assert_close(outputs(loaded, TEXTS), outputs(model, TEXTS))


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": IDS[index % 4], "labels": IDS[-index % 4]}


def test_trainer_keeps_the_masks_of_parts(tmp_path):
    def make():
        model = EncoderDecoderModel(encoder=bert(), decoder=decoder())
        model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
        attach(model.encoder, "dam_s", mask_length=LENGTH, sparsity_weight=1e-3)
        return model

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    steps = {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "learning_rate": 0.05, "report_to": "none"}
    arguments = TrainingArguments(tmp_path, use_cpu=True, disable_tqdm=True, **best, **steps)

    def trainer():
        return Trainer(make(), arguments, train_dataset=Pairs(), eval_dataset=Pairs())

    run = trainer()
    run.train()
    loaded = EncoderDecoderModel.from_pretrained(run.state.best_model_checkpoint)
    torch.testing.assert_close(loaded.state_dict(), run.model.state_dict())
    torch.testing.assert_close(outputs(loaded, TEXTS), outputs(run.model, TEXTS))
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(resumed.model.state_dict(), run.model.state_dict())


def test_adapters_of_a_model_with_masks_in_its_parts(saved, said, tmp_path):
    peft = pytest.importorskip("peft")
    _, folder = saved
    config = peft.LoraConfig(target_modules=["query"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(EncoderDecoderModel.from_pretrained(folder), config)
    model.save_pretrained(tmp_path / "adapter")
    assert "without the masks of encoder, decoder in its EncoderDecoderModel" in said.text
    loaded = peft.PeftModel.from_pretrained(EncoderDecoderModel.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(outputs(loaded, TEXTS), outputs(model, TEXTS))
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(outputs(loaded, TEXTS), outputs(model, TEXTS))


def test_other_models_cost_nothing(tmp_path, monkeypatch):
    """No file is looked for beside a model that is not made of parts with a mask."""
    EncoderDecoderModel(encoder=bert(), decoder=decoder()).save_pretrained(tmp_path)
    stock_models = sparsebert.plugin.stock_models

    def never(*args, **kwargs):
        raise AssertionError

    for name in ("cached_file", "find_descriptions"):
        monkeypatch.setattr(stock_models, name, never)
    for loader in (EncoderDecoderModel, AutoModelForSeq2SeqLM):
        loader.from_pretrained(tmp_path)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (TrOCRForCausalLM, TrOCRConfig(vocab_size=100, d_model=32, decoder_layers=1, decoder_attention_heads=2)),
        (RemBertModel, RemBertConfig(**SIZES, input_embedding_size=16)),
        (SplinterModel, SplinterConfig(**SIZES)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parts_that_cannot_carry_a_mask_run_as_they_do_without_us(model_class, config, padded):
    """Such as decoders that do not say that they are causal, and encoders that add the padding to their scores."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    padding = {"attention_mask": torch.arange(LENGTH) < torch.tensor([LENGTH, 7, 5, 3])[:, None]} if padded else {}
    with torch.no_grad():
        expected = model(IDS, **padding)[0]
        model.config._attn_implementation = "sparse_auto"
        found = model(IDS, **padding)[0]
    real = padding.get("attention_mask", torch.ones_like(IDS)).bool()
    torch.testing.assert_close(found[real], expected[real])


def test_a_part_saved_alone_says_that_it_has_a_mask(tmp_path):
    whole = EncoderDecoderModel(encoder=attach(bert(), "window", **WINDOW), decoder=decoder())
    whole.encoder.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"].startswith("sparse_auto (")
    torch.testing.assert_close(AutoModel.from_pretrained(tmp_path)(IDS)[0], whole.encoder(IDS)[0])


def test_a_part_without_a_mask_has_a_class_for_each_attention(tmp_path):
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    vision = Data2VecVisionModel(Data2VecVisionConfig(**sizes, image_size=6, patch_size=2, use_mean_pooling=True))
    whole = VisionEncoderDecoderModel(encoder=vision, decoder=attach(decoder(), "window", **WINDOW)).eval()
    whole.save_pretrained(tmp_path)
    inputs = {"pixel_values": PIXELS, "decoder_input_ids": IDS}
    loaded = VisionEncoderDecoderModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).logits, whole(**inputs).logits)


def test_the_encoder_of_a_head_is_loaded_alone(tmp_path):
    head = bert(BertForSequenceClassification)
    attach(head.bert, "window", **WINDOW)
    head.save_pretrained(tmp_path)
    for loaded in (AutoModel.from_pretrained(tmp_path), load(tmp_path, AutoModel)):
        torch.testing.assert_close(loaded.eval()(IDS)[0], head.bert(IDS)[0])


def test_models_of_several_encoders(said):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.document = bert(), bert()

        @property
        def transformers_model(self):
            return self.query

    pair = Pair()
    attach(pair, "dam_s", mask_length=LENGTH, target_sparsity=0.5)
    assert "BertModel stay dense unless a mask is attached to them too" in said.text
    schedule = sparsebert.SearchSchedule(end=0.5)
    arguments = TrainingArguments("unused", report_to=[])
    state = transformers.TrainerState(global_step=40, max_steps=100)
    schedule.on_step_begin(arguments, state, None, model=pair)
    attach(pair.document, "dam_s", mask_length=LENGTH, target_sparsity=0.5)
    with pytest.raises(ValueError, match="SearchSchedule is for one search, not 2"):
        schedule.on_step_begin(arguments, state, None, model=pair)


def test_parts_without_a_mask_keep_their_attention(tmp_path):
    """Grounding DINO's own encoder, which has the configuration of the whole, knows eager attention alone."""
    sizes = {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 1], "window_size": 4, "image_size": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_feature_levels": 1}
    whole = GroundingDinoModel(
        GroundingDinoConfig(
            backbone_config=SwinConfig(**sizes, out_features=["stage2"]),
            text_config=BertConfig(**SIZES),
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            **heads,
        )
    )
    attach(whole.text_backbone, "window", **WINDOW)
    whole.save_pretrained(tmp_path)
    loaded = GroundingDinoModel.from_pretrained(tmp_path)
    for model in (whole, loaded):
        assert model.backbone.conv_encoder.model.config._attn_implementation == "sdpa"
        assert model.text_backbone.config._attn_implementation == "sparse_auto"


def test_a_part_with_a_mask_that_changes_its_size_is_saved_with_the_whole(tmp_path):
    whole = EncoderDecoderModel(encoder=bert(), decoder=decoder()).eval()
    attach(whole.encoder, "window", **WINDOW)
    whole.encoder.resize_token_embeddings(120)
    for folder in (tmp_path / "first", tmp_path / "second"):
        whole.save_pretrained(folder)
        loaded = EncoderDecoderModel.from_pretrained(folder).eval()
        assert loaded.config.encoder.vocab_size == 120 and loaded.encoder.sparse_attention.mask is not None
        torch.testing.assert_close(outputs(loaded, TEXTS), outputs(whole, TEXTS))
        whole = loaded


def test_a_part_that_changed_its_size_and_lost_its_mask_is_saved_with_the_whole(tmp_path):
    whole = EncoderDecoderModel(encoder=bert(), decoder=decoder()).eval()
    for size in (120, 130):  # detached before the first save, and attached again after it
        attach(whole.encoder, "window", **WINDOW)
        whole.encoder.resize_token_embeddings(size)
        detach(whole.encoder)
        whole.save_pretrained(tmp_path)
        loaded = EncoderDecoderModel.from_pretrained(tmp_path).eval()
        assert loaded.config.encoder.vocab_size == size and not hasattr(loaded.encoder, "sparse_attention")
        torch.testing.assert_close(outputs(loaded, TEXTS), outputs(whole, TEXTS))
