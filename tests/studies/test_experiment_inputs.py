"""What cells are refused before they run, and what the recipes of those that run say."""

import math
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from sparsebert import SparseBertConfig
from sparsebert.masks.patterns import build_pattern
from sparsebert.training.searching.search_arguments import PostHocArguments
from studies.experiments import EXPERIMENTS
from studies.harness.experiment import unseeded
from studies.harness.reproduction import ReproductionArguments, plan_cells


pytestmark = pytest.mark.usefixtures("without_matplotlib")


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("copying", {"stride": 0}, "stride must be an integer of at least 1, got 0"),
        ("copying", {"sparsity": 2}, "sparsity must be a number from 0 to 1, got 2"),
        ("copying", {"learning_rate": math.nan}, "learning_rate must be a number of at least 0, got nan"),
        ("copying", {"seeds": [0, 0]}, r"seeds must be different, got \[0, 0\]"),
        ("copying", {"depths": [0]}, "depth must be an integer of at least 1, got 0"),
        ("copying", {"num_symbols": 1}, "num_symbols"),
        ("copying", {"attn_implementation": "flash_attention_2"}, "would ignore the mask"),
        ("language_modelling", {"windows": [0]}, "window_size must be an integer of at least 1, got 0"),
        ("language_modelling", {"hidden_size": 30}, "hidden_size must be a multiple of num_heads 4, got 30"),
        ("language_modelling", {"text": "none.txt"}, "no such file: 'none.txt'"),
        ("translation", {"train": None}, "--train must be a .tsv file of pairs"),
        ("translation", {"train": ["a", "b"]}, "there is no file 'a'"),
        ("mixers", {"table_max_steps": 0}, "max_steps must be an integer of at least 1, got 0"),
        ("mixers", {"task": "mnl"}, "unknown task 'mnl'; did you mean 'mnli'"),
        ("mixers", {"task": "mrpc"}, "task mrpc: split 'train' is missing"),
        ("minilm", {"sparsity_scope": "layer", "masks": ["window"]}, "sparsity_scope must be one of"),
        ("minilm", {"objective": "all", "masks": ["window"]}, "objective"),
        ("minilm", {"masks": ["bigbird_tiles"], "lengths": [256]}, "lengths must be an integer of at least 512"),
        ("minilm", {"masks": ["window"], "sparsities": [1.5]}, "sparsities must be a number from 0 to 1, got 1.5"),
        ("minilm", {"masks": ["dam_u"], "sparsities": [0.98]}, "target_sparsity must be at most 0.7656, got 0.98"),
        ("minilm", {"recover_from": 0.95, "sparsities": [0.5]}, "recover_from must be a number from 0 to 0.5"),
        ("minilm", {"recover_from": 0.5, "sparsities": [0.5]}, "recover_from must be below the sparsity .0.5."),
        ("minilm", {"recover_from": 0.25, "recover": 0}, "with recover at least 1, got 0.25 with recover 0"),
        ("minilm_settings", {"masks": ["window"]}, "masks must hold one of dam_s, dam_u, dam_b, vertical_slash, got"),
        ("minilm_settings", {"changes": ["steps_21"]}, "unknown changes 'steps_21'; did you mean 'steps_20'"),
        ("minilm_mixers", {"checkpoint_learning_rate": -1}, "checkpoint_learning_rate must be a number of at least 0"),
        ("minilm_mixers", {"replaced": [9]}, "replaced"),
        ("minilm_tasks", {"tasks": ["rte", "mrpc"]}, "task mrpc: split 'train' is missing"),
        ("minilm_task_masks", {"sparsity": 0.98}, "target_sparsity must be at most 0.8789, got 0.98"),
        ("long_reviews", {"masked": ["one/dam_s/model", "two/dam_s/model"]}, "second system with the name 'dam_s'"),
        ("long_review_masks", {"controls": ["wndow"]}, "controls"),
        ("document_embeddings", {"lengths": [64, 100]}, "lengths must begin with the 40 tokens"),
        ("document_embeddings", {"lengths": [40, 100]}, "before multiples of it, got 40 and 100"),
        ("needles", {"documents": 33}, "documents must be an integer from 2 to 32, got 33"),
        ("needles", {"depths": [1.5]}, "depths must be a number from 0 to 1, got 1.5"),
        ("needles", {"masks": ["wndow"]}, "wndow"),
        (
            "needles",
            {"readers": ["one/qa", "two/qa"]},
            "readers: two/qa would be the second system with the name 'qa'",
        ),
        ("separators", {"masks": ["dam_u"]}, "masks must be one of 'dam_s'"),
        ("separators", {"text": None}, "there is no file None"),
        ("offsets", {"masked": ["nowhere"]}, "nowhere"),
        ("sentences", {"data": None}, "--data is needed"),
        ("positions", {"documents": 1}, "documents must be an integer of at least 2"),
        ("cramming", {"recipes": ["small"]}, "recipes must be one of 'cramming', 'paper'"),
        ("cramming", {"fields": {"hiden_size": 4}}, "hiden_size"),
        ("sparsebert_table1", {"mask_logit_scale": 0}, "mask_logit_scale"),
        ("sparsebert_table1", {"max_length": 1000}, "max_length must be at most the 512 positions of base_model"),
        ("sparsebert_table2", {"squad2": "absent"}, "squad2: there is no folder 'absent'"),
        ("sparsebert_table2", {"seeds": []}, "the settings make no cells"),
        ("sparsebert_table2", {"draws": -1}, "draws must be an integer of at least 0, got -1"),
        ("sparsebert_table2", {"max_train_examples": 0}, "max_train_examples must be an integer of at least 1"),
        ("sparsebert_table2", {"num_train_epochs": 0.0}, "num_train_epochs must be more than 0, got 0.0"),
        ("sparsebert_table2", {"task_learning_rate": -1.0}, "task_learning_rate must be a number of at least 0"),
        ("sparsebert_table2", {"task_batch_size": 0}, "task_batch_size must be an integer of at least 1, got 0"),
        ("sparsebert_table3", {"targets": [0.99]}, "target_sparsity must be at most 0.7656, got 0.99"),
        ("sparsebert_table3", {"search_end": 2}, "search_end must be a number from 0 to 1, got 2"),
        ("sparsebert_table3", {"initial_decay": 0.0}, "initial_decay 0.0 excludes start_from_attention"),
        ("sparsebert_figure7", {"initial_decay": 0.0}, "initial_decay 0.0 excludes start_from_attention"),
    ],
)
def test_cells_that_cannot_run(name, settings, message, cells_of):
    with pytest.raises((ValueError, OSError, StrictDataclassError), match=message):
        cells_of(name, **settings)


@pytest.mark.parametrize(
    "name, field", [(n, f) for n in EXPERIMENTS for f in ("stsb", "reviews") if f in {
        item.name for item in fields(EXPERIMENTS[n].arguments)
    }],
)  # fmt: skip
def test_folders_that_are_missing_or_empty_are_named(name, field, cells_of, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{field}: there is no folder 'nowhere'"):
        cells_of(name, **{field: "nowhere"})
    with pytest.raises(ValueError, match=f"{field} .* lacks the file"):
        cells_of(name, **{field: str(tmp_path)})


def test_a_text_without_words_is_refused_first(cells_of, tmp_path):
    (tmp_path / "empty.txt").touch()
    for name in ("sparsebert_table1", "cramming"):
        with pytest.raises(ValueError, match="text: no paragraph of text in "):
            cells_of(name, text=str(tmp_path / "empty.txt"))


# What the papers' tables and figures hold


def planned(name, scale="tiny", **settings):
    return plan_cells(EXPERIMENTS[name], ReproductionArguments(scale=scale), settings)


def test_copying_has_the_cells_of_the_table_and_removes_what_the_paper_removes():
    for scale in ("tiny", "paper"):
        assert set(map(unseeded, planned("copying", scale))) == EXPERIMENTS["copying"].published.keys()
    expected = {"union": 87, "multihead": 93, "sequential": 93, "star": 87, "random": 90}  # [O] Table 1
    for cell in planned("copying", "paper").values():
        parts = {"head_configuration": cell["head_configuration"]} | cell["pattern_kwargs"]
        mask = build_pattern(cell["pattern"], 256, 4, 4, **parts)
        assert 100 * mask.sparsity == pytest.approx(expected[cell["series"].split("_")[-1]], abs=1)


@pytest.mark.parametrize("name", ["language_modelling", "translation"])
def test_sweeps_have_every_pattern(name):
    experiment = EXPERIMENTS[name]
    families = {f"{p}_{layout}" for p in ("strided", "fixed") for layout in ("union", "multihead", "sequential")}
    families |= {"star_relay"} if name == "language_modelling" else set()
    for scale in experiment.scales.values():
        cells = experiment.cells(experiment.arguments(**scale))
        assert {cell["series"] for cell in cells.values()} == families | {"dense", "star", "random"}


def test_mixers_are_the_tables_and_the_figures():
    tiny, paper = ({unseeded(n): c for n, c in planned("mixers", scale).items()} for scale in ("tiny", "paper"))
    assert {"attention", "sepconv", "bproj", "average", "hybrid_1", "hybrid_3"} <= tiny.keys()
    assert {f"hybrid_{k}" for k in range(13)} <= paper.keys()
    assert paper["hybrid_2"]["token_mixers"] == ["sepconv"] * 2 + ["attention"] * 10
    assert paper["attention"]["max_steps"] == 60_000 and paper["hybrid_0"]["max_steps"] == 250_000


def test_cells_have_only_the_settings_that_their_masks_depend_on():
    """So that other settings of the search leave the results of the other masks as they are."""
    experiment = EXPERIMENTS["minilm"]
    cells = experiment.cells(experiment.arguments(seeds=[0], lengths=[128], masks=["dam_s", "attention", "window"]))
    assert [("objective" in cell, "recover_from" in cell) for cell in cells.values()] == [
        (True, True), (False, True), (False, False),
    ]  # fmt: skip
    changed = EXPERIMENTS["minilm_settings"]
    cells = changed.cells(changed.arguments(seeds=[1], lengths=[128], changes=["unchanged", "steps_20"]))
    own = {"steps": 20, "recover": 0, "change": "steps_20"}
    assert cells["dam_s_128_0.9_steps_20_seed_1"] == cells["dam_s_128_0.9_unchanged_seed_1"] | own


def test_tasks_without_a_folder_are_left_out_unless_none_has_one(cells_of):
    cells = cells_of("sparsebert_table2", squad2=None)
    assert {cell["task"] for cell in cells.values()} == {"squad", "swag"}
    cells = cells_of("sparsebert_table2", squad=None, squad2=None, swag=None)
    assert {(cell["task"], cell["data"]) for cell in cells.values()} == {
        ("squad", None), ("squad_v2", None), ("swag", None),
    }  # fmt: skip


# What the recipes say


@pytest.fixture
def recipe_of(cells_of, monkeypatch, tmp_path):
    """`recipe_of(name, cell, function, **settings)`: the recipe that a cell gives to a function of the package."""

    def found(name, cell, function, **settings):
        recipes = []

        def stop(recipe):
            recipes.append(recipe)
            raise KeyboardInterrupt

        monkeypatch.setattr(function, stop)
        folder = tmp_path / "runs/cells/cell"
        folder.mkdir(parents=True, exist_ok=True)
        with pytest.raises(KeyboardInterrupt):
            EXPERIMENTS[name].run(cells_of(name, **settings)[cell], folder)
        return {field: value for section in recipes[0].values() for field, value in section.items()}

    return found


@pytest.mark.parametrize(
    "name, cell, own",
    [
        ("sparsebert_table1", "no_diag_seed_3", {"pattern": "no_diag"}),
        ("sparsebert_table1", "random_drop_1_seed_3", {"pattern": "random_drop", "mask_seed": 3001}),
        (
            "sparsebert_table1",
            "soft_seed_3",
            {"search": "soft", "mask_logit_scale": 7.0, "sparsity_weight": 0.0, "max_steps": 5},
        ),
        ("sparsebert_table3", "random_0.5_seed_3", {"pattern": "random", "mask_seed": 3}),
        ("sparsebert_table3", "dam_s_lambda_0.001_seed_3", {"search_end": 0.3, "mask_logit_scale": 7.0}),
        (
            "sparsebert_table3",
            "dam_u_layers_target_0.5_seed_3",
            {"search_end": 0.3, "mask_logit_scale": 9.0, "start_from_attention": True, "share_layers": False},
        ),
        (
            "sparsebert_figure7",
            "one_stage_0.5_seed_3",
            {"search_end": 0.3, "mask_logit_scale": 9.0, "start_from_attention": True, "target_sparsity": 0.5}
            | {"hard": True, "noise_scale": 0.0},
        ),
    ],
)
def test_cells_go_on_from_the_checkpoint_with_their_settings(name, cell, own, recipe_of, tmp_path, monkeypatch):
    monkeypatch.setattr("studies.shared.continued_pretraining.shared_checkpoint", lambda *_: tmp_path)
    given = {"search_end": 0.3, "mask_logit_scale": 7.0, "target_logit_scale": 9.0, "search_steps": 5}
    given = {field: given[field] for field in given.keys() & {f.name for f in fields(EXPERIMENTS[name].arguments)}}
    function = "studies.shared.continued_pretraining.pretrain"
    found = recipe_of(name, cell, function, seeds=[3], learning_rate=1e-5, **given)
    # As much text in all systems: that of the checkpoint, and then their own.
    expected = {"base_model": str(tmp_path), "learning_rate": 1e-5, "max_steps": 2, "seed": 3} | own
    expected["max_tokens"] = (2 + expected["max_steps"]) * 4 * 16
    assert expected.items() <= found.items()
    assert ("start_from_attention" in found) == ("start_from_attention" in own)


@pytest.mark.parametrize("name", ["sparsebert_table3", "sparsebert_figure7"])
def test_searches_with_a_target_can_start_elsewhere(name, cells_of):
    start = {"start_from_attention": False, "initial_decay": 0.0, "initial_sparsity": 0.0}
    cells = [cell.get("model", cell) for cell in cells_of(name, **start, target_logit_scale=70.0).values()]
    searched = [cell for cell in cells if "target_sparsity" in cell or cell.get("stage") == "one_stage"]
    assert searched and all(cell["initial_decay"] == cell["initial_sparsity"] == 0 for cell in searched)


@pytest.mark.parametrize("mask", ["dam_s", "attention", "window", "dense"])
def test_searches_have_the_settings_of_their_cells(mask, recipe_of, cells_of):
    settings = {"masks": [mask], "recover_from": 0.25, "shortest": 12, "seeds": [5]}
    ((name, cell),) = cells_of("minilm", **settings).items()
    given = recipe_of("minilm", name, "studies.trained_models.minilm.search_post_hoc", **settings)
    shared = {item.name for kind in (PostHocArguments, SparseBertConfig) for item in fields(kind)} - {"model", "mask"}
    own = shared & cell.keys() - ({"steps"} if mask == "attention" else set())
    assert {each: given.get(each) for each in own} == {each: cell[each] for each in own}
    assert given.get("target_sparsity", 0.0) == cell["sparsity"]
    assert (given["data"], given["max_length"], given["batch_size"]) == (cell["text"], 16, 4)
    assert given["mask"] == mask if "mask" in given else given["search"] == "dam_s"


def test_the_papers_settings_of_tasks_are_those_of_the_tasks(recipe_of, cells_of, tmp_path, monkeypatch):
    monkeypatch.setattr("studies.sparsebert_paper.sparsebert_table2._continued", lambda *_: tmp_path)
    paper = {"num_train_epochs": None, "task_learning_rate": None, "task_batch_size": None, "seeds": [1]}
    function = "studies.shared.recipe_sections.finetune"
    found = recipe_of("sparsebert_table2", "swag_dense_seed_1", function, **paper)
    assert not {"learning_rate", "num_train_epochs", "per_device_train_batch_size"} & found.keys()


@pytest.mark.parametrize("name", ["copying", "minilm", "minilm_tasks", "sparsebert_table1"])
def test_models_are_trained_in_bfloat16(name, cells_of, tmp_path):
    cell = next(iter(cells_of(name, bf16=True).values()))
    folder = tmp_path / "runs/cells/cell"
    folder.mkdir(parents=True)
    computed = set()

    def record(module, args, output):
        if isinstance(module, torch.nn.Linear) and output.requires_grad:
            computed.add(output.dtype)

    handle = torch.nn.modules.module.register_module_forward_hook(record)
    try:
        EXPERIMENTS[name].run(cell, folder)
    finally:
        handle.remove()
    assert computed == {torch.bfloat16}
