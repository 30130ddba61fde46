"""Cards: what they say about masks, models and runs, and that a README.md of the user stays."""

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import sparsebert
from sparsebert import SparseMask, build_pattern
from sparsebert.commands import main
from sparsebert.masks.expansion import SPECIAL_TOKENS
from sparsebert.masks.listing import list_masks
from sparsebert.masks.mask_cards import bridges, collection_card, own_card, save_card, unbridged_distances
from sparsebert.training.runs.run_cards import add_finetuning, add_pretraining
from sparsebert.training.runs.run_folders import run_folder
from sparsebert.training.trainer import SparseBertTrainer


def card_of(folder):
    """The card of a folder, which is complete, and of this package."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "more information needed" not in text.lower() and own_card(folder / "README.md") is not None
    return ModelCard(text)


def distilbert():
    config = DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32)
    return DistilBertForSequenceClassification(config)


def rows_of(card, column):
    """The rows of the table whose first heading is `column`, as texts by first cell."""
    lines = card.text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {column} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first] = rest


def test_bare_mask(tmp_path):
    keep = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    mask = sparsebert.SparseMask(
        keep, length=16, metadata={"search": "dam_u", "base_model": "user/base", "base_model_revision": "abc"}
    )
    mask.save_pretrained(tmp_path / "mine")
    card = card_of(tmp_path / "mine")
    assert (card.data.base_model, card.data.base_model_revision) == ("user/base", "abc")
    assert card.data.library_name == "sparsebert" and {"dam_u", "attention-mask"} <= set(card.data.tags)
    removed = [[100 * (1 - head.float().mean().item()) for head in layer] for layer in mask.to_table()]
    for layer, (mean, *heads) in enumerate(rows_of(card, "layer").values()):
        assert [float(value) for value in heads] == pytest.approx(removed[layer], abs=0.051)
        assert float(mean) == pytest.approx(sum(removed[layer]) / 3, abs=0.051)
    assert 'sparsebert.attach(AutoModel.from_pretrained("user/base"), "mine")' in card.text


@pytest.mark.parametrize("name", ["x\ny", "\ud800", "`x`", "<b>", "a | z"])
def test_names_that_are_none_do_not_reach_a_card(tmp_path, name):
    metadata = {"search": name, "base_model": name, "base_model_revision": name}
    sparsebert.build_pattern("star", 16, 2).replace(metadata=metadata).save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert card.data.base_model is None and name not in card.text
    (found,) = list_masks(tmp_path)
    assert found["base_model"] is None and found["made_by"] is None
    assert name not in collection_card("user/masks", [found]).text


def test_cards_of_masks_name_no_local_folder(tmp_path):
    """And a mask stands beside the model that it was found for."""
    keep = torch.ones(1, 2, 16, 16, dtype=torch.bool)
    found = []
    for name, base in (("a", str(tmp_path)), ("b", "user/base"), ("c", None)):
        metadata = {} if base is None else {"base_model": base}
        sparsebert.SparseMask(keep, length=16, metadata=metadata).save_pretrained(tmp_path / "masks" / name)
        found.append(list_masks(tmp_path / "masks" / name)[0] | {"name": name})
    card = ModelCard.load(tmp_path / "masks" / "a" / "README.md")
    assert card.data.base_model is None and str(tmp_path) not in card.text.replace(str(tmp_path / "masks"), "")
    assert "It was found for a model in a local folder." in card.text
    card = collection_card("user/masks", found)
    assert card.data.base_model == "user/base" and str(tmp_path) not in card.text
    assert 'AutoModel.from_pretrained("user/base")\nsparsebert.attach(model, "user/masks", subfolder="b")' in card.text


def test_parameters_of_a_pattern_are_shown_as_code(tmp_path):
    """Anybody may have written them."""
    parameters = {"x": "</td><img src=x> | `z`" * 30}
    mask = sparsebert.build_pattern("star", 16, 2)
    mask.replace(metadata={"pattern": "star", "pattern_parameters": parameters}).save_pretrained(tmp_path)
    (row,) = [line for line in card_of(tmp_path).text.splitlines() if "the pattern `star`" in line]
    assert re.fullmatch(r"\| made by \| the pattern `star` with `[^`|]{100,320}` \|", row)


def test_head_sparsities_are_those_of_the_table():
    for name in ("bigbird", "window", "star"):
        for mask in (sparsebert.build_pattern(name, 20, 3), sparsebert.build_pattern(name, 20, 3).without_diagonal()):
            expected = 1 - mask.to_table().double().mean((-1, -2))
            torch.testing.assert_close(torch.tensor(mask.head_sparsities(), dtype=torch.float64), expected)


def test_many_heads_are_summarized(tmp_path):
    mask = sparsebert.SparseMask(torch.rand(40, 16, 16) < torch.linspace(0.2, 0.8, 40)[:, None, None], 16)
    mask.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    (shown,) = rows_of(card, "layer").values()
    assert "| layer | mean | lowest | highest |" in card.text
    heads = [100 * value for value in mask.head_sparsities()[0]]
    assert list(map(float, shown)) == pytest.approx([sum(heads) / 40, min(heads), max(heads)], abs=0.051)


def test_attached_model(tmp_path):
    model = sparsebert.attach(distilbert(), "window", mask_length=32)
    model.config.name_or_path, model.config._commit_hash = "user/base", "f" * 40
    model.save_pretrained(tmp_path / "mine")
    card = card_of(tmp_path / "mine")
    assert card.data.pipeline_tag == "text-classification" and card.data.library_name == "sparsebert"
    assert (card.data.base_model, card.data.base_model_revision) == ("user/base", "f" * 40)
    assert 'sparsebert.load("mine")' in card.text and "trust_remote_code" not in card.text
    assert "transformers refuses to load the model" in card.text
    model.config.output_attentions = True  # which the stock attention alone is read with
    model.save_pretrained(tmp_path / "mine")
    assert "without the mask and without a warning" in card_of(tmp_path / "mine").text


def test_own_architecture_and_remote_code(tmp_path, tiny_config):
    model = sparsebert.SparseBertForMaskedLM(tiny_config(search="dam_s"))
    model.save_pretrained(tmp_path / "mine")
    card = card_of(tmp_path / "mine")
    assert "still being learned" in card.text and "trust_remote_code" not in card.text
    assert card.data.library_name == "sparsebert"
    model.freeze(sparsity=0.5)
    model.save_pretrained(tmp_path / "mine")
    card = card_of(tmp_path / "mine")
    assert card.data.pipeline_tag == "fill-mask" and "dam_s" in card.data.tags
    assert "still being learned" not in card.text
    assert card.data.library_name == "transformers"
    assert 'AutoModelForMaskedLM.from_pretrained("mine", trust_remote_code=True)' in card.text


def test_base_and_license_come_from_the_card_of_the_base(tmp_path):
    """A base model that is a folder has no name that others could use."""
    base = tmp_path / "base"
    distilbert().save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: mit\nlanguage: en\nbase_model: user/old\n---\nMine.\n")
    model = sparsebert.attach(DistilBertForSequenceClassification.from_pretrained(base), "window", mask_length=32)
    model.save_pretrained(tmp_path / "out")
    card = card_of(tmp_path / "out")
    assert (card.data.license, card.data.language, card.data.base_model) == ("mit", "en", "user/old")
    assert str(tmp_path) not in str(card)


@pytest.mark.parametrize("text", ["# Mine\n", "---\nlicense: [\n---\n", "", "---\nlicense: mit\n---\n"])
def test_a_readme_of_the_user_stays(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    sparsebert.build_pattern("window", 16, 2).save_pretrained(tmp_path)
    sparsebert.attach(distilbert(), "window", mask_length=32).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == text


def test_a_card_that_was_changed_is_the_users(tmp_path):
    mask, path = sparsebert.build_pattern("window", 16, 2), tmp_path / "README.md"
    mask.save_pretrained(tmp_path)
    written = path.read_text()
    sparsebert.build_pattern("star", 16, 2).save_pretrained(tmp_path)
    assert "`star`" in path.read_text()
    for changed in (written.replace("## Mask", "## My mask"), written.replace("---\n\n#", "license: mit\n---\n\n#")):
        assert changed != written
        path.write_text(changed)
        mask.save_pretrained(tmp_path)
        assert path.read_text() == changed


def test_a_client_that_writes_the_card_again_leaves_it_ours(tmp_path):
    """As `push_to_hub` of a tokenizer does."""
    sparsebert.build_pattern("window", 16, 2).save_pretrained(tmp_path)
    ModelCard.load(tmp_path / "README.md").save(tmp_path / "README.md")
    assert save_card(tmp_path, card_of(tmp_path))


@pytest.mark.parametrize("has_card", [True, False])
def test_a_run_replaces_our_card_alone(tmp_path, has_card):
    def run():
        with run_folder(tmp_path, overwrite=True) as (folder, _):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.json").write_text("{}")
            if has_card:
                sparsebert.build_pattern("star", 16, 2).save_pretrained(folder)

    path = tmp_path / "README.md"
    sparsebert.build_pattern("window", 16, 2).save_pretrained(tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    run()
    assert ("`star`" in path.read_text()) if has_card else not path.exists()
    path.write_text("# Mine\n")
    run()
    assert path.read_text() == "# Mine\n"


# Runs


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, checkpoints, glue_folder):
    """Two seeds of a fine-tuning."""
    output = tmp_path_factory.mktemp("runs") / "rte"
    words = ["finetune", "--task", "rte", "--data", glue_folder, "--model", checkpoints["window"], "--seeds", 2]
    words += ["--output_dir", output, "--max_length", 32, "--max_steps", 2, "--use_cpu", "--disable_tqdm"]
    assert main(list(map(str, words))) == 0
    return output


def test_finetuning(finetuned):
    metrics = json.loads((finetuned / "metrics.json").read_text())
    for seed in metrics["seeds"].values():
        card = card_of(finetuned / seed["folder"])
        results = {result.metric_type: result for result in card.data.eval_results}
        value = metrics["splits"]["validation"]["accuracy"]
        assert results["accuracy"].metric_value == f"{value['mean']:.4g} ± {value['std']:.2g}"
        assert (results["accuracy"].task_type, results["accuracy"].dataset_name) == ("text-classification", "rte")
        assert card.data.metrics == ["accuracy"] and card.data.pipeline_tag == "text-classification"
        assert card.data.datasets is None  # files of one's own
        assert "## Plan" in card.text and "| means over | 2 seeds |" in card.text
        own = json.loads((finetuned / seed["folder"] / "metrics.json").read_text())
        assert own["hardware"] in card.text and own["hardware"]
        assert "![" in card.text and (finetuned / seed["folder"] / "heads.png").is_file()


def test_data_of_the_hub_is_named(tmp_path, finetuned):
    run = finetuned / "seed-42"
    sparsebert.load(run).save_pretrained(tmp_path)
    assert card_of(tmp_path).data.eval_results is None  # the results were those of the run
    add_finetuning(tmp_path, json.loads((run / "metrics.json").read_text()))
    card = card_of(tmp_path)
    (result,) = (result for result in card.data.eval_results if result.metric_type == "accuracy")
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("nyu-mll/glue", "rte", "validation")
    assert isinstance(result.metric_value, float) and card.data.datasets == ["nyu-mll/glue"]


def test_a_dense_model_has_no_pictures_of_its_mask(tmp_path, pretraining_flags):
    output = tmp_path / "run"
    assert main(pretraining_flags(output, "--pattern", "dense", "--pictures", "--max_steps", 1)) == 0
    assert not list(output.glob("*.png")) and "![" not in card_of(output).text


def test_pretraining_and_a_readme_of_the_user(tmp_path, pretraining_flags):
    output = tmp_path / "run"
    flags = pretraining_flags(output, "--search", "dam_s", "--target_sparsity", 0.5, "--pictures", "--max_steps", 2)
    assert main(flags) == 0
    card, metrics = card_of(output), json.loads((output / "metrics.json").read_text())
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results["Loss of masked tokens"] == pytest.approx(metrics["mlm_loss"], rel=1e-3)
    assert "![" in card.text and "(heads.png)" in card.text and (output / "heads.png").is_file()
    assert metrics["hardware"] in card.text and f"{metrics['sparsity']:.1%}" in card.text
    model = sparsebert.load(output)
    texts = [("hub:owner/name:", None), (["hub:owner/name:part", "hub:owner/name:other", "FILE"], "part")]
    for text, part in texts:
        model.save_pretrained(tmp_path / "saved")
        add_pretraining(tmp_path / "saved", metrics, model, text)
        data = card_of(tmp_path / "saved").data
        assert {(result.dataset_type, result.dataset_config) for result in data.eval_results} == {("owner/name", part)}
        assert data.datasets == ["owner/name"]
    (output / "README.md").write_text("# Mine\n")
    assert main([*flags, "--overwrite"]) == 0
    assert (output / "README.md").read_text() == "# Mine\n"


def test_trainer_keeps_the_card(tmp_path):
    def arguments(name):
        return TrainingArguments(str(tmp_path / name), use_cpu=True, report_to="none")

    model = sparsebert.attach(distilbert(), "window", mask_length=32)
    trainer = SparseBertTrainer(model, arguments("ours"))
    trainer.save_model()
    trainer.create_model_card(license="mit", tags="mine", dataset_tags="user/data")
    card = card_of(tmp_path / "ours")
    assert card.data.license == "mit" and "mine" in card.data.tags and card.data.datasets == ["user/data"]
    assert 'sparsebert.load("ours")' in card.text
    (tmp_path / "ours" / "README.md").write_text("# Mine\n")
    trainer.create_model_card()
    assert (tmp_path / "ours" / "README.md").read_text() == "# Mine\n"
    dense = BertForMaskedLM(BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    for kind in (Trainer, SparseBertTrainer):
        kind(dense, arguments(kind.__name__)).create_model_card()
    texts = [(tmp_path / name / "README.md").read_text() for name in ("Trainer", "SparseBertTrainer")]
    assert texts[0].replace("Trainer", "") == texts[1].replace("SparseBertTrainer", "").replace("Trainer", "")


@pytest.mark.parametrize("special_tokens", SPECIAL_TOKENS)
@pytest.mark.parametrize(
    ("form", "sizes", "fields"),
    [
        ("offsets", "m", {}),
        ("offsets", "2m-1", {"symmetric": False}),
        ("blocks", "7", {"block_size": 3}),
        ("blocks", "13", {"block_size": 3, "symmetric": False}),
        ("table", "n,n", {}),
    ],
)
def test_distances_that_layers_cannot_bridge(form, sizes, fields, special_tokens):
    number = SPECIAL_TOKENS.index(special_tokens)
    n, m, some = 19, 19 - number, slice(min(number, 1), 19 - number + min(number, 1))
    size = {"m": [m], "2m-1": [2 * m - 1], "7": [7], "13": [13], "n,n": [n, n]}[sizes]
    keep = torch.rand(2, 2, *size, generator=torch.Generator().manual_seed(0)) < (0.03 if form == "table" else 0.12)
    mask = SparseMask(keep, n, form=form, special_tokens=special_tokens, **fields)
    reached, tokens = torch.eye(m), torch.arange(m)
    apart = (tokens[:, None] - tokens).abs()
    for layers, table in enumerate(mask.to_table()[..., some, some].any(1), start=1):
        reached = ((table + torch.eye(m)) @ reached > 0).float()
        missing = {distance for distance in range(1, m) if not reached[apart == distance].any()}
        named = {d for low, high in unbridged_distances(mask, layers) for d in range(low, high + 1)}
        assert named <= missing and (layers > 1 or form == "blocks" or named == missing)


@pytest.mark.parametrize(("length", "tokens"), [(1, "first"), (1, "first_last"), (2, "first_last")])
def test_a_mask_of_special_tokens_alone(length, tokens, tmp_path):
    mask = SparseMask(torch.ones(2, length, length, dtype=torch.bool), length, special_tokens=tokens)
    mask.save_pretrained(tmp_path)
    assert unbridged_distances(mask, 2) == [] and SparseMask.from_pretrained(tmp_path) == mask


def test_the_card_names_distances_that_are_not_bridged(tmp_path):
    window = build_pattern("window", 32, 4, window_size=2, num_global_tokens=0)
    sparsebert.attach(distilbert(), window).save_pretrained(tmp_path / "model")
    missing = "2 layers cannot bridge distances of 5 to 31 tokens"
    assert f"| distances | {missing} |" in card_of(tmp_path / "model").text
    both = "the special tokens or the rest"
    special = SparseMask(window.keep, 32, form="offsets", special_tokens="first_last", rest="mean")
    assert bridges(special, 2) == f"{missing.replace('31', '29')}, but through {both}"
    assert bridges(special.replace(rest="none"), 1) == "1 layer cannot bridge distances of 3 to 29 tokens"
    bridged = "15 layers bridge all distances of two tokens, also without"
    assert bridges(special, 15) == f"{bridged} the special tokens and the rest"
