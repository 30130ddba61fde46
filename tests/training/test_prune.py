"""Two-stage pruning: masks from a saved P, their random controls, and fine-tuning through them."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
import yaml
from conftest import TINY
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

from sparsebert import SearchSchedule, SparseBertConfig, SparseBertForMaskedLM, SparseMask, attach, build_pattern
from sparsebert.analysis.importance import KEPT
from sparsebert.analysis.saved_runs import Run, read_run
from sparsebert.commands import main
from sparsebert.learning.learned_mask import save_probs
from sparsebert.masks.expansion import fixed_entries
from sparsebert.masks.mask_files import MASK_PROBS_NAME, MaskFileError
from sparsebert.training.pruning.pruned_masks import make_masks, prune_by_probs, random_control
from sparsebert.training.pruning.pruning_run import PruningArguments, curves, prune_run, pruning_table
from sparsebert.training.runs.stopping import StopOnSignal


def search(folder, frozen=True, **fields):
    """A run as pretrain.py leaves it, or a searching checkpoint."""
    torch.manual_seed(0)
    model = SparseBertForMaskedLM(SparseBertConfig(**TINY | {"search": "dam_s", "mask_length": 32} | fields))
    with torch.no_grad():
        model.sparse_attention.mask_logits.normal_(std=0.1)
    probs = model.sparse_attention.mask_probs()
    if frozen:
        model.freeze(sparsity=0.5)
    model.save_pretrained(folder)
    if frozen:
        save_file({"probs": probs.flatten(0, 1)}, folder / MASK_PROBS_NAME)
    return folder


SEARCHES = {
    "dam_s": {},
    "dam_u": {"search": "dam_u"},
    "not symmetric": {"search": "dam_u", "symmetric": False},
    "soft per layer": {"search": "soft", "share_layers": False, "diagonal": "keep"},
    "dam_b": {"search": "dam_b", "block_size": 16, "mask_length": 40},
    "signed": {"symmetric": False, "special_rows": False},
    "signed tiles": {"search": "dam_b", "symmetric": False, "block_size": 16, "mask_length": 40},
    "slabs": {
        **{"search": "dam_b", "symmetric": False, "block_size": 16, "query_block_size": 32, "mask_length": 40},
    },
    "vertical_slash": {"search": "vertical_slash", "rest": "mean"},
}


@pytest.mark.parametrize("frozen", [True, False], ids=["run", "checkpoint"])
@pytest.mark.parametrize("fields", SEARCHES.values(), ids=list(SEARCHES))
def test_the_lowest_p_goes(fields, frozen, tmp_path):
    run = read_run(search(tmp_path / "run", frozen, **fields))
    rules = (run.mask.special_tokens, run.mask.diagonal, run.mask.special_rows)
    learned = fixed_entries(run.mask.length, *rules) == -1
    for sparsity in (0.3, 0.6):
        mask = prune_by_probs(run, sparsity)
        table = mask.to_table()
        assert (mask.form, mask.rest) == (run.mask.form, run.mask.rest) and table.shape == run.probs.shape
        assert mask.sparsity == pytest.approx(sparsity, abs=0.3 if "block_size" in fields else 0.03)
        assert torch.equal(table[..., ~learned], run.mask.to_table()[..., ~learned])
        for kept, probs in zip(table.flatten(0, 1)[:, learned], run.probs.flatten(0, 1)[:, learned], strict=True):
            if kept.any() and not kept.all():
                assert probs[kept].min() >= probs[~kept].max()
        # What one search says of its own choice by sparsity, unless it keeps whole lines that cross.
        if not frozen and fields.get("search") != "vertical_slash":
            model = SparseBertForMaskedLM.from_pretrained(run.source)
            model.config.allow_empty_rows = True
            assert torch.equal(model.freeze(sparsity=sparsity).to_table(), table)


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@pytest.mark.parametrize("form", ["dam_s", "dam_u", "dam_b"])
def test_heads_keep_their_shares_of_one_budget(form, attached, tmp_path):
    fields = {"mask_length": 40, "target_sparsity": 0.8, "hard": True, "noise_scale": 0.0, "sparsity_scope": "global"}
    fields |= {"share_layers": False, "block_size": 16, "allow_empty_rows": True}
    torch.manual_seed(0)
    if attached:
        model = attach(BertModel(BertConfig(**TINY)), form, **fields)
    else:
        model = SparseBertForMaskedLM(SparseBertConfig(**TINY, search=form, **fields))
    with torch.no_grad():
        logits = model.sparse_attention.mask_logits
        logits.normal_(std=0.1).add_(0.1 * torch.randn(*logits.shape[:2], 1))
    probs, mask = model.sparse_attention.mask_probs(), model.freeze()
    model.save_pretrained(tmp_path)
    save_file({"probs": probs.flatten(0, 1)}, tmp_path / MASK_PROBS_NAME)
    run = read_run(tmp_path)
    assert torch.equal(prune_by_probs(run, mask.sparsity).to_table(), mask.to_table())
    sparser = prune_by_probs(run, 0.87)
    assert sparser.sparsity == pytest.approx(0.87, abs=0.04 if form == "dam_b" else 0.01)
    assert form == "dam_b" or not (sparser.to_table() & ~mask.to_table()).any()  # its tiles are too coarse for that
    removed = torch.tensor(sparser.head_sparsities())
    assert removed.max() - removed.min() > 0.05


@pytest.mark.parametrize("frozen", [True, False], ids=["run", "checkpoint"])
@pytest.mark.parametrize("form", ["dam_s", "dam_u", "dam_b", "vertical_slash"])
def test_the_order_where_p_is_0_or_1(form, frozen, tmp_path):
    """At the end of a search with a target P is 0 or 1 for most entries."""
    fields = {"mask_length": 40, "target_sparsity": 0.8, "block_size": 16, "allow_empty_rows": True}
    torch.manual_seed(0)
    model = SparseBertForMaskedLM(SparseBertConfig(**TINY, search=form, **fields))
    with torch.no_grad():
        model.sparse_attention.mask_logits.normal_(std=2.0)
    learned = model.sparse_attention.learned
    assert (learned.probs() == 0).any()
    masks = {sparsity: learned.thresholded_mask(sparsity=sparsity) for sparsity in (0.3, 0.8, 0.9)}
    if frozen:
        schedule = SearchSchedule()
        schedule.freeze(model.sparse_attention)
        schedule.save(tmp_path)
    model.save_pretrained(tmp_path)
    run = read_run(tmp_path)
    for sparsity, mask in masks.items():
        found = prune_by_probs(run, sparsity).to_table()
        if form != "vertical_slash":  # whose search keeps whole lines
            assert torch.equal(found, mask.to_table())
        assert found.float().mean() == pytest.approx(1 - sparsity, abs=0.3 if form == "dam_b" else 0.05)


@pytest.mark.parametrize("form", ["dam_s", "dam_u", "vertical_slash"])
def test_what_a_run_has_pruned_does_not_come_back(form, tmp_path):
    model = SparseBertForMaskedLM(SparseBertConfig(**TINY, search=form, mask_length=40, allow_empty_rows=True))
    learned = model.sparse_attention.learned
    learned.prune(torch.randn(learned.logits.shape), 0.6)
    model.sparse_attention.start_pruning()
    found = model.sparse_attention.mask_probs(), learned.log_odds()
    save_probs(tmp_path, *found, model.freeze())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sparsities must be at least that of the run"):
        prune_by_probs(read_run(tmp_path), 0.3)


def test_random_control_removes_as_many(tmp_path):
    mask = prune_by_probs(read_run(search(tmp_path / "run")), 0.6)
    first, again, other = (random_control(mask, seed) for seed in (0, 0, 1))
    learned = fixed_entries(mask.length, mask.special_tokens, mask.diagonal) == -1
    assert first == again and not torch.equal(first.keep, other.keep)
    policies = [random_control(mask.replace(length_policy=policy), 0).length_policy for policy in ("extend", "dense")]
    assert policies == ["error", "dense"]
    for control in (first, other):
        assert torch.equal(control.to_table().sum((-1, -2)), mask.to_table().sum((-1, -2)))
        assert control.to_table()[..., ~learned].all() and control.special_tokens == "first_last"
        assert control.metadata["pattern"] == "random" and control.metadata["asked_sparsity"] == 0.6
        assert control.metadata["search"] is None  # which did not find it
    # Anywhere: the share kept in the upper half is about that in the lower.
    kept = first.to_table().float()
    assert kept[..., 1:16, 1:31].mean() == pytest.approx(kept[..., 16:31, 1:31].mean().item(), abs=0.06)


def prune(run, output, sparsities, recipe=None, **fields):
    return prune_run(PruningArguments(str(run), str(output), sparsities, **fields), recipe)


def test_masks_are_written_once(tmp_path):
    run, output = search(tmp_path / "run"), tmp_path / "masks"
    result = prune(run, output, [0.8, 0.4], random_controls=2)
    names = {"p_0.4", "random_0.4_seed0", "random_0.4_seed1", "p_0.8", "random_0.8_seed0", "random_0.8_seed1"}
    assert {path.name for path in output.iterdir()} == names | {"pruning.json"}
    table = json.loads((output / "pruning.json").read_text())["masks"]
    assert table.keys() == names and result["scores"] is None
    for name, row in table.items():
        mask = SparseMask.from_pretrained(output / name)
        assert mask.sparsity == pytest.approx(row["got"], abs=1e-5) and row["empty_rows"] == 0
        assert row["asked"] == float(name.split("_")[1]) == pytest.approx(row["got"], abs=0.03)
    printed = {row[0]: row[1:] for row in pruning_table(result).rows}
    assert printed == {name: [f"{row['asked']:.3f}", f"{row['got']:.4f}", "0"] for name, row in table.items()}
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    prune(run, output, [0.4, 0.8], random_controls=2)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    with pytest.raises(FileExistsError, match="is not empty"):
        prune(run, output, [0.7])
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    table = {"masks": dict.fromkeys([*json.loads((output / "pruning.json").read_text())["masks"], "../mine", "other"])}
    (output / "pruning.json").write_text(json.dumps(table))
    for folder in (tmp_path / "mine", output / "other"):
        folder.mkdir()
    prune(run, output, [0.7], overwrite=True)
    assert {path.name for path in output.iterdir() if path.is_dir()} == {"p_0.7", "other"}
    assert (tmp_path / "mine").is_dir()


def test_masks_that_were_half_written_are_completed(tmp_path):
    run, output = search(tmp_path / "run"), tmp_path / "masks"
    prune(run, output, [0.4, 0.8])
    (output / "pruning.json").unlink()
    (output / "p_0.8" / "mask.safetensors").unlink()
    (output / "p_0.4" / "README.md").unlink()
    for folder in (output, output / "p_0.4"):
        (folder / ".name.json.0123456789abcdef.tmp").write_text("{")
    (output / "_unfinished.json").write_text("{}")
    assert main(["prune", str(run), "--sparsities", "0.4", "0.8", "--output_dir", str(output)]) == 0
    assert json.loads((output / "pruning.json").read_text())["masks"].keys() == {"p_0.4", "p_0.8"}
    assert (output / "p_0.4" / "README.md").is_file() and not list(output.rglob("*.tmp"))
    (output / "pruning.json").unlink()
    with pytest.raises(FileExistsError, match="is not empty"):
        prune(run, output, [0.4])


def test_what_was_damaged_is_named(tmp_path):
    run, output = search(tmp_path / "run"), tmp_path / "masks"
    prune(run, output, [0.4, 0.8])
    (damaged := output / "p_0.8/mask.safetensors").write_bytes(b"damaged")
    with pytest.raises(MaskFileError, match=r"p_0\.8"):
        prune(run, output, [0.4, 0.8])
    assert damaged.read_bytes() == b"damaged"
    for content in ("{", "{}", "[]", '{"masks": 3}'):
        (output / "pruning.json").write_text(content)
        with pytest.raises(ValueError, match=r"pruning\.json is damaged or of something else"):
            prune(run, output, [0.4, 0.8])
    prune(run, output, [0.4, 0.8], overwrite=True)
    assert json.loads((output / "pruning.json").read_text())["masks"].keys() == {"p_0.4", "p_0.8"}
    assert SparseMask.from_pretrained(output / "p_0.8").sparsity == pytest.approx(0.8, abs=0.02)


def test_rows_that_keep_nothing_are_counted(tmp_path):
    run, output = search(tmp_path / "run", search="soft"), tmp_path / "masks"
    masks = make_masks(read_run(run), [0.95], [0])
    counts = [masks[name].num_empty_rows() for name in ("p_0.95", "random_0.95_seed0")]
    assert min(counts) > 0
    said = rf"of 128 mask rows .* {counts[0]} in p_0.95, {counts[1]} in random_0.95_seed0; .* --allow_empty_rows"
    with pytest.raises(ValueError, match=said):
        prune(run, output, [0.5, 0.95], random_controls=1)
    assert not output.exists()
    result = prune(run, output, [0.5, 0.95], random_controls=1, allow_empty_rows=True)
    assert result["masks"]["p_0.95"]["empty_rows"] == counts[0]


def test_sparsities_of_one_name_are_refused(tmp_path):
    run = search(tmp_path / "run")
    with pytest.raises(ValueError, match=r"more than one is p_0\.5"):
        prune(run, tmp_path / "masks", [0.50000001, 0.50000002])
    assert not (tmp_path / "masks").exists()


def test_a_rest_is_kept_by_every_row(tmp_path):
    run, output = search(tmp_path / "run", search="soft", rest="mean"), tmp_path / "masks"
    assert prune(run, output, [0.95])["masks"]["p_0.95"]["empty_rows"] > 0


def finetuning(checkpoints, glue_folder, **data):
    """A recipe of one step."""
    data = {"task": "rte", "model": checkpoints["stock"], "data": str(glue_folder), "max_length": 32} | data
    training = {"max_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return {"data": data, "model": {}, "training": training}


def test_fine_tuning_through_each(checkpoints, glue_folder, tmp_path):
    """Two masks and dense, one step each; the second time nothing is run again."""
    run, output = search(tmp_path / "run"), tmp_path / "figure"
    recipe = finetuning(checkpoints, glue_folder)
    result = prune(run, output, [0.4, 0.7], recipe, random_controls=1)
    scores = json.loads((output / "scores.json").read_text())
    assert scores == result["scores"] and scores["task"] == "rte" and scores["metric"] == "accuracy"
    assert scores["masks"].keys() == {"p_0.4", "p_0.7", "random_0.4_seed0", "random_0.7_seed0"}
    for name, score in scores["masks"].items():
        metrics = json.loads((output / "finetuned" / name / "metrics.json").read_text())
        assert metrics["score"] == score["score"] and metrics["mask"] == name
        assert metrics["sparsity"] == pytest.approx(float(name.split("_")[1]), abs=0.03)
    assert (output / "scores.png").stat().st_size > 5000 and (output / "scores.svg").is_file()
    table = pruning_table(result)
    printed = {row[0]: row[table.columns.index("accuracy")] for row in table.rows}
    every = scores["masks"] | {"dense": scores["dense"]}
    assert printed == {name: f"{score['score']:.4f}" for name, score in every.items()}
    weights = (output / "finetuned/p_0.4/model.safetensors").stat().st_mtime_ns
    prune(run, output, [0.4, 0.7], recipe, random_controls=1)
    assert (output / "finetuned/p_0.4/model.safetensors").stat().st_mtime_ns == weights


def test_curves_show_the_deviation_over_seeds_or_over_draws():
    sparsities = {"p_0.5": 0.5, "p_0.75": 0.75, "random_0.5_seed0": 0.5, "random_0.5_seed1": 0.5}
    masks = {
        name: build_pattern("random", 8, 2, sparsity=sparsity).replace(metadata={"asked_sparsity": sparsity})
        for name, sparsity in sparsities.items()
    }
    values = zip((0.9, 0.8, 0.7, 0.6), (0.02, None, 0.03, 0), strict=True)
    scores = {name: {"score": score, "score_std": std} for name, (score, std) in zip(sparsities, values, strict=True)}
    assert curves(masks, scores) == {
        "lowest P removed": ([0.5, 0.75], [0.9, 0.8], [0.02, None]),
        "random control": ([0.5], [pytest.approx(0.65)], [pytest.approx(0.1 / 2**0.5)]),
    }


def test_other_masks_replace_scores_too(checkpoints, glue_folder, tmp_path):
    """But not before everything about their fine-tuning was checked."""
    run, output = search(tmp_path / "run"), tmp_path / "figure"
    recipe = finetuning(checkpoints, glue_folder)
    prune(run, output, [0.4], recipe)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    with pytest.raises(OSError, match="data: there is no folder 'nothing'"):
        prune(run, output, [0.7], finetuning(checkpoints, glue_folder, data="nothing"), overwrite=True)
    with pytest.raises(ValueError, match="learning_rate must be"):
        prune(run, output, [0.7], recipe | {"training": {"learning_rate": -1.0}}, overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    prune(run, output, [0.7], overwrite=True)
    assert {path.name for path in output.iterdir()} == {"p_0.7", "pruning.json", "finetuned"}
    assert [path.name for path in (output / "finetuned").iterdir()] == ["dense"]


def test_an_interrupted_fine_tuning_goes_on(checkpoints, glue_folder, tmp_path, monkeypatch, capsys, caplog):
    recipe, output = finetuning(checkpoints, glue_folder, overwrite=True), tmp_path / "out"  # is not for prune
    recipe["training"] |= {"max_steps": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["prune", str(search(tmp_path / "run")), "--sparsities", "0.4", "--output_dir", str(output)]
    words += ["--finetune", str(tmp_path / "recipe.yaml")]

    def terminate(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as once:
        once.setattr(StopOnSignal, "on_step_begin", terminate)
        assert main(words) == 143
    assert capsys.readouterr().err.endswith("sparsebert prune: stopped by SIGTERM: the same command continues\n")
    assert main(words) == 0
    assert f"Resuming from {output / 'finetuned/dense/checkpoint-1'}" in caplog.text
    weights = (output / "finetuned/dense/model.safetensors").stat().st_mtime_ns
    assert main(words) == 0
    assert (output / "finetuned/dense/model.safetensors").stat().st_mtime_ns == weights


@pytest.mark.parametrize(
    "fields, data, said",
    [
        ({"sparsities": [1.5]}, None, r"sparsities must be in \(0, 1\) and, since special .* at most 0.8789, got 1.5"),
        ({"sparsities": [0.9]}, None, "at most 0.8789, got 0.9"),
        ({"random_controls": -1}, None, "random_controls must be an integer of at least 0, got -1"),
        ({}, {"task": "rtee"}, "did you mean 'rte'"),
        ({}, {"mask": "window"}, "mask .*has no meaning here"),
        ({}, {"all": True}, "all .*has no meaning here"),
        ({"finetune": "finetune_smal"}, None, "finetune_smal"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input(fields, data, said, checkpoints, glue_folder, tmp_path):
    options = {"run": str(search(tmp_path / "run")), "sparsities": [0.5], "output_dir": str(tmp_path / "masks")}
    recipe = None if data is None else finetuning(checkpoints, glue_folder, **data)
    with pytest.raises((ValueError, OSError), match=said):
        prune_run(PruningArguments(**options | fields), recipe)
    assert not (tmp_path / "masks").exists()


def test_runs_without_a_ranking(tmp_path):
    build_pattern("bigbird", 20, 4).save_pretrained(tmp_path / "mask")
    with pytest.raises(ValueError, match="holds a mask without P"):
        prune(tmp_path / "mask", tmp_path / "masks", [0.95])
    probs = (torch.rand(4, 20, 20) > 0.5).float().triu() * 0.7
    mask = SparseMask(probs > 0, 20, metadata={"search": "dam_u"})
    run = Run("run", mask, None, KEPT, probs[None], {"symmetric": False})
    assert prune_by_probs(run, 0.9).sparsity == pytest.approx(0.9)
    with pytest.raises(ValueError, match="at least that of the run, 0.7.*, got 0.3: the run was pruned"):
        prune_by_probs(run, 0.3)
    with pytest.raises(ValueError, match="no such folder"):
        prune("nowhere at all", tmp_path / "masks", [0.5])


@pytest.mark.parametrize("name", ["p_0.5", "finetuned"])
def test_folders_elsewhere_are_neither_written_to_nor_emptied(tmp_path, name):
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    options = PruningArguments(str(search(tmp_path / "run")), str(output), sparsities=[0.5], overwrite=True)
    prune_run(options)
    assert name == "finetuned" or (output / name).rename(tmp_path / "old")
    (elsewhere / "p_0.5").mkdir(parents=True)
    (output / name).symlink_to(elsewhere)
    with pytest.raises(FileExistsError, match=f"{name} is a link"):
        prune_run(replace(options, sparsities=[0.5, 0.6]))
    assert [path.name for path in elsewhere.rglob("*")] == ["p_0.5"]
