"""What the importance analysis reads, what it refuses, and what it writes."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseBertLMHeadModel, attach
from sparsebert.analysis import importance_analysis
from sparsebert.analysis.importance_analysis import analyze, importance_table, measure_importance
from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.saved_runs import find_mask, is_pattern, read_run, read_runs
from sparsebert.commands import main
from sparsebert.files import UNFINISHED_NAME
from sparsebert.learning.learned_mask import save_probs
from sparsebert.masks.mask_files import MASK_PROBS_NAME
from sparsebert.masks.patterns import build_pattern


def search(folder, seed=0, probs=False, **fields):
    """A searching checkpoint with logits of its own, or frozen with P beside it; returns P."""
    config = SparseBertConfig(**TINY | {"search": "dam_s", "mask_length": 20} | fields)
    torch.manual_seed(seed)
    model = SparseBertForMaskedLM(config)
    with torch.no_grad():
        model.sparse_attention.mask_logits.normal_(std=0.1)
    found, learned = model.sparse_attention.mask_probs(), model.sparse_attention.learned
    saved = learned.found_probs(), learned.log_odds()
    if probs:
        model.freeze(sparsity=0.5)
    model.save_pretrained(folder)
    if probs:
        save_probs(folder, *saved, model.sparse_attention.mask)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds, frozen, as pretrain.py leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        search(folder / f"seed{seed}", seed, probs=True)
    return [folder / f"seed{seed}" for seed in (0, 1)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"share_layers": False, "special_tokens": "first", "diagonal": "remove"},
        {"search": "dam_b", "block_size": 16, "diagonal": "keep"},
        {"search": "soft", "share_layers": False},
        {"search": "vertical_slash", "share_layers": False},
    ],
)
def test_reads_p_before_freezing(tmp_path, fields):
    probs = search(tmp_path / "run", probs=True, **fields)
    run = read_run(tmp_path / "run")
    assert run.quantity.startswith("P, probability") and torch.equal(run.probs, probs)
    assert run.mask.sparsity == pytest.approx(0.5, abs=0.3 if run.mask.form == "blocks" else 0.06)


def test_reads_what_is_still_searching(tmp_path):
    probs = search(tmp_path / "run", share_layers=False)
    run = read_run(tmp_path / "run")
    assert run.quantity.startswith("P, probability") and torch.equal(run.probs, probs)
    assert torch.equal(run.mask.to_table(), probs > 0.5)
    model = attach(BertModel(BertConfig(**TINY)), "dam_s", mask_length=20)
    model.sparse_attention.mask_logits.data.normal_()
    model.save_pretrained(tmp_path / "attached")
    run = read_run(tmp_path / "attached")
    assert torch.equal(run.probs, model.sparse_attention.mask_probs()) and run.setup["search"] == "dam_s"


@pytest.mark.parametrize(
    "model, fields, is_decoder, mixers",
    [
        (SparseBertForMaskedLM, {"token_mixers": ["average", "attention"]}, False, ("average",)),
        (SparseBertLMHeadModel, {"is_decoder": True}, True, ()),
    ],
)
def test_runs_of_decoders_and_mixers_say_so(tmp_path, tiny_config, model, fields, is_decoder, mixers):
    model(tiny_config(pattern="window", mask_length=20, **fields)).save_pretrained(tmp_path)
    run = read_run(tmp_path)
    assert (run.is_decoder, run.token_mixers) == (is_decoder, mixers)


def test_reads_masks(tmp_path, runs):
    mask = build_pattern("bigbird", 20, 4)
    mask.save_pretrained(tmp_path / "mask")
    run = read_run(tmp_path / "mask")
    assert run.quantity.startswith("M, 1 where") and torch.equal(run.probs, mask.to_table().float())
    assert not run.is_decoder and run.token_mixers == ()
    numbers = measure_importance([run])
    assert numbers["fixed_groups"] == [] and " layer" in numbers["runs"][0]["bridges"]
    assert importance_table(numbers).columns == ["group", "mean of M", "95 % over_heads"]
    # A mask of other origin in a folder where a search ended before: its P does not count.
    shutil.copytree(runs[0], tmp_path / "run")
    model = SparseBertForMaskedLM.from_pretrained(tmp_path / "run")
    model.set_mask(mask)
    model.save_pretrained(tmp_path / "run")
    assert torch.equal(read_run(tmp_path / "run").probs, mask.to_table().float())


def test_names_of_patterns_and_masks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_pattern("window", 12, 2).save_pretrained(tmp_path / "mask")
    assert is_pattern("bigbird") and not is_pattern("mask") and not is_pattern("owner/name")
    with pytest.raises(ValueError, match="unknown pattern, folder .* 'bigbrid'; did you mean 'bigbird'"):
        is_pattern("bigbrid")
    build_pattern("window", 16, 2).save_pretrained("strided")
    with pytest.raises(ValueError, match="strided is a pattern, and a folder with a mask here: write ./strided"):
        is_pattern("strided")
    assert not is_pattern("./strided")
    assert torch.equal(find_mask("mask").to_table(), build_pattern("window", 12, 2).to_table())
    star = find_mask("star", 20, 3, window_size=2)
    assert (star.length, star.num_heads) == (20, 3)
    assert torch.equal(star.to_table(), build_pattern("star", 20, 3, window_size=2).to_table())


def test_numbers(runs):
    probs = torch.stack([read_run(run).probs for run in runs])  # (2, 1, 4, 20, 20)
    numbers = measure_importance(read_runs(runs))
    group = numbers["all_layers"]["groups"]["offset_1"]
    near = probs[..., 1:-1, 1:-1].diagonal(1, -2, -1).mean((1, 2, 3)).double()
    assert group["mean"] == pytest.approx(near.mean().item())
    half = 12.7062 * near.std() / 2**0.5  # t of one degree of freedom
    ends = torch.stack([near.mean() - half, near.mean() + half]).clamp(0, 1)
    assert group["over_seeds"] == pytest.approx(ends.tolist(), rel=1e-4)
    assert numbers["fixed_groups"] == ["special_tokens"]
    assert numbers["all_layers"]["profile"]["offsets"] == list(range(18))
    assert len(numbers["all_layers"]["sketch"]) == 16
    assert "layers" not in numbers
    assert "over_seeds" not in measure_importance(read_runs(runs[:1]))["all_layers"]["groups"]["others"]


def test_layers_apart(tmp_path):
    probs = search(tmp_path / "run", share_layers=False, diagonal="remove")
    numbers = measure_importance(read_runs([tmp_path / "run"]))
    means = [layer["groups"]["others"]["mean"] for layer in numbers["layers"]]
    assert len(means) == 2 and means[0] != means[1]
    assert sum(means) / 2 == pytest.approx(numbers["all_layers"]["groups"]["others"]["mean"])
    at_3 = probs[1, :, 1:-1, 1:-1].diagonal(3, -2, -1).mean().item()
    assert numbers["layers"][1]["groups"]["offset_3"]["mean"] == pytest.approx(at_3)
    assert numbers["fixed_groups"] == ["special_tokens", "diagonal"]


def test_groups_that_the_search_did_not_decide_are_named(tmp_path):
    search(tmp_path / "run", probs=True, special_tokens="first", diagonal="keep")
    run = read_run(tmp_path / "run")
    assert measure_importance([run], "first")["fixed_groups"] == ["special_tokens", "diagonal"]
    # The search decided on the last token.
    assert measure_importance([run], "first_last")["fixed_groups"] == ["diagonal"]


def test_analyze_writes_numbers_and_pictures(tmp_path, runs):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    returned = analyze([*map(str, runs)], out)
    names = ["groups", "heads_1", "heads_2", "mean_probs", "offset_profile", "sketch"]
    for kind in ("png", "svg"):
        assert sorted(path.stem for path in out.glob(f"*.{kind}")) == names
    assert all("</svg>" in path.read_text() for path in out.glob("*.svg"))
    numbers = json.loads((out / "importance.json").read_text())
    assert [run["source"] for run in numbers["runs"]] == list(map(str, runs))
    assert numbers["search"] == "dam_s" and numbers["num_heads"] == 4 and numbers == returned
    table = importance_table(numbers)
    assert table.columns == ["group", "mean P", "95 % over_heads", "95 % over_seeds"]
    low, high = numbers["all_layers"]["groups"]["offset_1"]["over_seeds"]
    mean = numbers["all_layers"]["groups"]["offset_1"]["mean"]
    assert table.rows[1][::3] == ["offset_1", f"[{low:.3f}, {high:.3f}]"] and table.rows[1][1] == f"{mean:.3f}"
    assert ["special_tokens", "1.000"] == table.rows[-1][:2]


def test_an_analysis_that_failed_is_repeated_by_the_same_command(tmp_path, runs, undrawn, monkeypatch):
    """As on a full disk; without one, pictures do not go through links."""
    words = ["analyze", str(runs[0]), "--output_dir", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(importance_analysis, "write_metrics", Mock(side_effect=OSError(28, "No space left on device")))
        patch.setattr(importance_analysis, "plot_groups", lambda *args: (tmp_path / "out/groups.png").touch())
        assert main(words) == 1
    assert (tmp_path / "out/groups.png").is_file() and main(words) == 0
    assert main(words) == 2 and not (tmp_path / "out" / UNFINISHED_NAME).exists()
    (tmp_path / "picture.png").symlink_to(tmp_path / "precious")
    save_figure(new_figure(1, 1), tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").is_symlink() and not (tmp_path / "precious").exists()


def test_a_folder_of_seeds_is_their_runs(tmp_path, runs, undrawn):
    for seed, run in enumerate(runs):
        shutil.copytree(run, tmp_path / f"runs/seed-{seed}")
        (tmp_path / f"runs/seed-{seed}/metrics.json").touch()
    assert main(["analyze", str(tmp_path / "runs"), "--output_dir", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/importance.json").read_text())
    assert [Path(run["source"]).name for run in found["runs"]] == ["seed-0", "seed-1"]


def test_short_mask_has_no_sketch(tmp_path, undrawn):
    build_pattern("window", 8, 2).save_pretrained(tmp_path / "mask")
    numbers = analyze([tmp_path / "mask"], tmp_path / "out", "none")
    assert "sketch" not in numbers["all_layers"]
    assert "special_tokens" not in numbers["all_layers"]["groups"] and numbers["fixed_groups"] == []


@pytest.fixture
def check_refused(tmp_path):
    """`check_refused(sources, match)`: they cannot be analyzed, and nothing is written."""

    def check(sources, match):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            analyze(sources, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    return check


def test_folders_without_a_mask(tmp_path, tiny_config, check_refused):
    (tmp_path / "empty").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    BertModel(tiny_config(BertConfig)).save_pretrained(tmp_path / "bert")
    build_pattern("dense", 2, 1).save_pretrained(tmp_path / "two")
    check_refused([], "at least one run")
    for name, said in (
        ("empty", "holds no mask"), ("missing folder", "there is no folder .*missing folder"),
        ("bert", "holds no mask"), ("list", "not a configuration"), ("two", "no position outside special_tokens"),
    ):  # fmt: skip
        check_refused([tmp_path / name], said)


def test_damaged_runs(tmp_path, check_refused):
    run = tmp_path / "run"
    probs = search(run, probs=True)[0]
    save_file({"probs": probs[:, :10, :10].contiguous()}, run / MASK_PROBS_NAME)
    check_refused([run], r"must have shape \(4, 20, 20\) or \(4, 18\), as the mask beside it, got \(4, 10, 10\)")
    save_file({"probs": probs * 2}, run / MASK_PROBS_NAME)
    check_refused([run], r"probs must be in \[0, 1\]")
    save_file({"p": probs}, run / MASK_PROBS_NAME)
    check_refused([run], "got nothing")
    search(run, seed=1, probs=True)
    build_pattern("window", 20, 4, num_layers=1).save_pretrained(run)
    check_refused([run], "P of another mask than the one beside it")
    (run / MASK_PROBS_NAME).write_bytes(b"damaged")
    check_refused([run], "damaged or not a safetensors file")

    search(tmp_path / "searching")
    weights = load_file(tmp_path / "searching" / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "mask_logits" not in name}
    save_file(kept, tmp_path / "searching" / "model.safetensors", {"format": "pt"})
    check_refused([tmp_path / "searching"], "holds no mask logits")


def test_runs_that_are_no_seeds_of_one_search(tmp_path, runs, check_refused):
    check_refused([runs[0], runs[1], f"{runs[0].parent}/../{runs[0].parent.name}/seed0"], "given more than once")
    for name, fields, match in (
        ("length", {"mask_length": 24}, "length is 24, but 20 in .*seed0"),
        ("search", {"search": "dam_u"}, "search is 'dam_u', but 'dam_s' in"),
        ("lambda", {"sparsity_weight": 1e-2}, "sparsity_weight is 0.01, but 0.0001 in"),
        ("heads", {"num_attention_heads": 2}, "num_heads is 2, but 4 in"),
    ):
        search(tmp_path / name, probs=True, **fields)
        check_refused([runs[0], tmp_path / name], match)
    (tmp_path / "heads" / MASK_PROBS_NAME).unlink()
    check_refused([runs[0], tmp_path / "heads"], "quantity is 'M, 1 where")


# Settings of a search, with values that are not the defaults. Whether distances are signed, the mask says.
OTHERS = {
    "mask_form": "log", "mask_constant": 0.25, "mask_logit_scale": 0.25, "temperature": 0.25, "temperature_end": 0.25,
    "noise_scale": 0.25, "share_noise": True, "hard": True, "share_layers": False,
    "sparsity_weight": 0.25, "target_sparsity": 0.25, "sparsity_scope": "global", "initial_decay": 0.25,
    "initial_sparsity": 0.25, "sparsity_warmup": 0.25, "sparsity_ramp": 0.25,
}  # fmt: skip


def test_seeds_of_one_search_have_all_its_settings(tmp_path, runs):
    shutil.copytree(runs[1], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    saved = json.loads(path.read_text())
    for name, value in OTHERS.items():
        path.write_text(json.dumps(saved | {name: value}))
        with pytest.raises(ValueError, match=f"{name} is {value!r}, but .* in .*seed0; runs analyzed together must"):
            read_runs([runs[0], tmp_path / "run"])
