"""The benchmarks that compare many runs of pretrain.py: what they run, what they do not run again, their tables."""

import json

import pytest
import yaml

from benchmarks import search_study, sparsity_weight
from benchmarks._pretraining import folder_name


RECIPE = {
    "data": {"nsp": False, "max_length": 128, "max_tokens": 4000, "max_validation_tokens": 1000},
    "model": {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "mask_length": 128,
        "intermediate_size": 32, "max_position_embeddings": 128,
    },
    "training": {"per_device_train_batch_size": 2, "save_strategy": "no", "report_to": "none", "logging_steps": 1},
}  # fmt: skip


@pytest.fixture
def arguments(tmp_path):
    """Options of both: a tiny recipe and text."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    lines = [" ".join(f"word{(7 * line + place) % 50}" for place in range(30)) for line in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    paths = [str(tmp_path / name) for name in ("text.txt", "text.txt", "recipe.yaml", "runs")]
    return [
        word for pair in zip(("--text", "--validation", "--recipe", "--output"), paths, strict=True) for word in pair
    ]


def finish(folder, loss):
    """What a run that has ended leaves."""
    folder.mkdir(parents=True)
    outcome = {"asked": 0.92, "got": 0.917, "undecided": 0.02, "warnings": []}
    (folder / "metrics.json").write_text(json.dumps({"mlm_loss": loss, "sparsity": 0.917, "search_outcome": outcome}))
    history = [{"step": step, "loss": loss + 1 / step} for step in (1, 2)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_finished_runs_are_not_run_again(tmp_path, arguments, capsys):
    pytest.importorskip("matplotlib")
    settings = ["no penalty", "annealed"]
    for seed in (0, 1):
        for index, name in enumerate(settings):
            folder = tmp_path / "runs" / "9" / str(seed)
            finish(folder / folder_name(name), 6 - index + seed)
            finish(folder / f"frozen_{folder_name(name)}", 5 - index)
    search_study.main([*arguments, "--manual", "--settings", *settings, "--seeds", "0", "1", "--steps", "9"])
    printed = capsys.readouterr().out
    assert printed.index(settings[1]) < printed.index(settings[0])  # best first
    assert "5.500 ± 0.707 (2)" in printed and "4.000 ± 0.000 (2)" in printed and "91.7 %" in printed
    assert (tmp_path / "runs" / "study.png").stat().st_size > 0
    written = json.loads((tmp_path / "runs" / "study.json").read_text())
    assert [(entry["name"], len(entry["search"]), len(entry["mask"])) for entry in written] == [
        (name, 2, 2) for name in settings
    ]


def test_what_is_not_finished_is_left_out(tmp_path, arguments, capsys):
    pytest.importorskip("matplotlib")
    finish(tmp_path / "runs" / "9" / "0" / "manual_dense", 5)
    search_study.main([*arguments, "--finished", "--steps", "9"])
    printed = capsys.readouterr().out
    assert "| dense " in printed and "| window " not in printed


@pytest.mark.slow
def test_study_runs_searches_and_manual_masks(tmp_path, arguments, capsys):
    pytest.importorskip("matplotlib")
    settings = ["penalty 1e-4 (paper)", "annealed, frozen at 40 %"]
    search_study.main(
        [*arguments, "--settings", *settings, "--manual", "dense", "window", "--seeds", "0", "--steps", "4"]
    )
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in (*settings, "dense", "window"))
    frozen = tmp_path / "runs" / "4" / "0" / f"frozen_{folder_name(settings[1])}" / "metrics.json"
    assert json.loads(frozen.read_text())["sparsity"] == pytest.approx(0.92, abs=0.01)


@pytest.mark.slow
def test_sparsity_against_the_penalty(tmp_path, arguments, capsys):
    pytest.importorskip("matplotlib")
    recipe = tmp_path / "recipe.yaml"
    fields = yaml.safe_load(recipe.read_text())
    fields["model"]["search"] = "dam_s"
    recipe.write_text(yaml.safe_dump(fields))
    sparsity_weight.main([*arguments, "--steps", "2", "--weights", "0", "0.01"])
    results = json.loads((tmp_path / "runs" / "sparsity_weight.json").read_text())
    for result in results.values():
        assert set(result["runs"]) == {"0.0", "0.01"} and result["gradients"]["balance"] > 0
    assert (tmp_path / "runs" / "sparsity_weight.png").stat().st_size > 0
    assert "| log " in capsys.readouterr().out


@pytest.mark.slow
def test_failed_runs_say_where_to_look(tmp_path, arguments):
    (tmp_path / "text.txt").unlink()
    with pytest.raises(RuntimeError, match="a run failed, see .*no_penalty.log"):
        search_study.main([*arguments, "--manual", "--settings", "no penalty", "--seeds", "0", "--steps", "2"])
    assert "text.txt" in (tmp_path / "runs" / "2" / "0" / "no_penalty.log").read_text()
