"""The command line: one dialect, help that fits two screens, exit codes."""

import dataclasses
import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import sparsebert
from sparsebert import _import_path
from sparsebert.analysis.pictures.mask_pictures import plot_heads
from sparsebert.commands import VERBS, main, parse
from sparsebert.commands._help import CHOICES, WIDTH, choices, explanations
from sparsebert.recipe_files import recipe_names
from sparsebert.theory.verdicts import as_json, pattern_case
from studies.experiments import EXPERIMENTS


ROOT = Path(__file__).parents[2]
SCREEN = 50  # lines


def command_of(verb):
    return importlib.import_module(f"sparsebert.commands.{verb}").command([])


def help_text(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


# Help


def test_overview_lists_the_verbs(capsys):
    printed = help_text(capsys, "--help")
    assert all(verb in printed and summary in printed for verb, summary in VERBS.items())
    assert len(printed.splitlines()) <= SCREEN


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_two_screens_and_shows_every_field_of_ours(verb, capsys):
    command = command_of(verb)
    short, long = help_text(capsys, verb, "--help"), help_text(capsys, verb, "--help-all")
    lines = short.splitlines()
    assert len(lines) <= 2 * SCREEN and max(map(len, lines)) <= WIDTH
    assert lines[0].startswith(f"usage: sparsebert {verb}")
    assert sum(line.startswith(f"  sparsebert {verb} ") for line in lines) in (2, 3)
    for section, cls in command.sections.items():
        kinds = [vars(kind) for kind in cls.__mro__ if kind.__module__.startswith("sparsebert")]
        ours = {name for kind in kinds for name in kind.get("__annotations__", {})}
        names = {field.name for field in dataclasses.fields(cls) if field.init} - {*command.excluded.get(section, ())}
        for name in names & ours:
            assert name in explanations(cls), f"{cls.__name__}.{name} is not explained"
            assert f"--{name}" in short and name in long


def test_help_shows_the_keys_of_registries(capsys):
    verbs = ("pretrain", "finetune", "search", "lengthen")
    printed = " ".join(" ".join(help_text(capsys, verb, "--help").split()) for verb in verbs)
    assert all(choices(field) and " | ".join(choices(field)) in printed for field in CHOICES)
    assert " | ".join(EXPERIMENTS) in " ".join(help_text(capsys, "reproduce", "--help").split())


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_help_of_an_experiment_has_its_settings(experiment, capsys):
    printed = help_text(capsys, "reproduce", experiment, "--help")
    assert all(f"--{name}" in printed for name in explanations(EXPERIMENTS[experiment].arguments))


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_the_help_parse(verb):
    for example in command_of(verb).examples:
        parse([verb, *shlex.split(example)])


def test_recipes_are_listed_for_the_verb_that_takes_them(capsys):
    homes = {name: [] for name in recipe_names()}
    for verb, flag in itertools.product(VERBS, ("--help", "--help-all")):
        printed = " ".join(help_text(capsys, verb, flag).split())
        for names in re.findall(r"recipes: (.*?), or the path of one", printed):
            for name in names.split(", "):
                homes[name].append((verb, flag))
    verbs = {name: found[0][0] for name, found in homes.items()}
    assert homes == {name: [(verb, "--help"), (verb, "--help-all")] for name, verb in verbs.items()}


# Exit codes


def test_no_verb_prints_the_verbs_and_exits_2(capsys):
    assert main([]) == 2
    assert "pretrain" in capsys.readouterr().out


def test_failure_on_the_way_exits_1(monkeypatch, capsys):
    def fail(values):
        raise OSError("No space left on device")

    monkeypatch.setattr("sparsebert.commands.report.run", fail)
    assert main(["report", "a"]) == 1
    assert capsys.readouterr().err == "sparsebert report: No space left on device\n"


def test_sizes_beyond_the_memory_are_one_line(pretraining_flags, tmp_path, capsys):
    sizes = ("--vocab_size", 10**9, "--hidden_size", 2**20)  # more than a process can address
    assert main(pretraining_flags(tmp_path / "run", *sizes)) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sparsebert ")]
    assert line.startswith("sparsebert pretrain: there is not enough memory for these sizes: ")


# Programs


@pytest.mark.parametrize("program", ["pretrain.py", "finetune.py", "-m sparsebert"])
def test_programs_refuse_in_one_line(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, *["pretrain"] * program.startswith("-m"), "--serach", "soft"])
    with pytest.raises(SystemExit) as ended:
        if program.startswith("-m"):
            runpy.run_module("sparsebert", run_name="__main__")
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert len(said.err.splitlines()) == 1 and "'--serach'" in said.err


@pytest.mark.parametrize(
    "words, expected",
    [
        ("python -m sparsebert plan", True), ("python -X dev -um sparsebert", True), ("python -msparsebert", True),
        ("python -m sparsebert.__main__", True), ("python -m other -m sparsebert", False), ("python -m", False),
        ("python run.py -m sparsebert", True), ("python -m sparseberts", False), ("python", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["elsewhere", "checkout", "safe"])
def test_the_current_folder_is_no_place_for_modules(words, expected, place, monkeypatch, tmp_path):
    """Where a file of the name of a package would run. The package itself may lie there."""
    monkeypatch.chdir(ROOT if place == "checkout" else tmp_path)
    here = "/bin" if place == "safe" else os.getcwd()
    monkeypatch.setattr(sys, "orig_argv", words.split())
    for argument, left in (("-m", expected and place == "elsewhere"), ("run.py", False)):
        monkeypatch.setattr(sys, "path", [here, "/lib"])
        monkeypatch.setattr(sys, "argv", [argument])
        _import_path.leave_current_folder()
        assert sys.path == (["/lib"] if left else [here, "/lib"])


def test_the_command_runs_beside_planted_modules(tmp_path):
    for name in ("torch", "transformers", "typing_extensions", "studies"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')")
    words = [sys.executable, "-m", "sparsebert", "--version"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, sparsebert.__version__), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables, line, code, said",
    [
        ({"PYTHONIOENCODING": "ascii"}, "{} theory bigbird --length 8", 0, "Universality"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "{} theory bigbird --length 8", 0, "Univ"),
        ({}, "{} theory --all --length 8 | head -1", 1, "Universality"),
        ({}, "{} --version >&-", 0, ""),
        ({}, "{} theory windw 2>&-", 2, ""),
        ({"OMP_NUM_THREADS": "abc"}, "{} theory window --length 8", 0, "Universality"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "{} theory window --length 8", 0, "Universality"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "{} theory window --length 8", 2, "MASTER_ADDR"),
        ({"HOME": "/nowhere"}, "{} theory window --length 8", 0, "Universality"),
    ],
)  # fmt: skip
def test_environments(variables, line, code, said):
    command = line.format(f"{sys.executable} -m sparsebert")
    if "|" in command:
        command = f"{command}; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_version(capsys):
    assert help_text(capsys, "--version").strip() == sparsebert.__version__


# Verbs without a test file of their own


def test_plan_and_draw_of_a_saved_mask(tmp_path, capsys):
    sparsebert.build_pattern("bigbird", 64, 2).save_pretrained(tmp_path / "mask")
    assert main(["plan", str(tmp_path / "mask"), "--length", "64", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert 0 < content["sparsity"] < 1 and content["length"] == 64
    assert main(["plan", str(tmp_path / "mask")]) == 0
    assert "sparse_" in capsys.readouterr().out
    assert main(["draw", str(tmp_path / "mask"), "window", "--output_dir", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"mask.png", "window.png"}
    capsys.readouterr()
    assert main(["draw", "window", "--length", "32", "--output_dir", str(tmp_path / "out")]) == 2
    assert "window.png exists: choose another --output_dir, or pass --overwrite" in capsys.readouterr().err
    assert main(["draw", "window", "--length", "32", "--overwrite", "--output_dir", str(tmp_path / "out")]) == 0
    assert main(["draw", "--output_dir", str(tmp_path / "gallery")]) == 0
    assert (tmp_path / "gallery/patterns.png").stat().st_size > 10_000


def test_theory_as_json(capsys):
    assert main(["theory", "window", "star", "--length", "16", "--num_heads", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in content] == ["window", "star"]
    assert main(["theory", "--maps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_flags_of_patterns_reach_them(tmp_path, capsys):
    flags = ["bigbird", "--length", "16", "--num_heads", "3", "--seed", "5"]
    assert main(["theory", *flags, "--without_diagonal", "--parameters", "{window_size: 2}", "--json"]) == 0
    case = pattern_case("bigbird", 16, 3, {"window_size": 2}, diagonal=False, seed=5)
    assert json.loads(capsys.readouterr().out) == [json.loads(json.dumps(as_json(case, case.check())))]
    assert main(["draw", *flags, "--output_dir", str(tmp_path / "out")]) == 0
    plot_heads(sparsebert.build_pattern("bigbird", 16, 3, seed=5), tmp_path / "expected.png", "bigbird")
    assert (tmp_path / "out" / "bigbird.png").read_bytes() == (tmp_path / "expected.png").read_bytes()


def test_analyze_and_report_of_a_run(tmp_path, capsys, undrawn):
    run, output = tmp_path / "run", tmp_path / "out"
    sparsebert.build_pattern("window", 32, 2).save_pretrained(run)
    assert main(["analyze", str(run), "--output_dir", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "diagonal" in printed and f"written to {output}" in printed
    assert main(["analyze", str(run), "--output_dir", str(output)]) == 2
    assert "is not empty" in capsys.readouterr().err
    words = ["analyze", str(run), "--output_dir", str(output), "--overwrite", "--special_tokens", "none", "--json"]
    assert main(words) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((output / "importance.json").read_text())
    assert content["analyzed_special_tokens"] == "none"
    metrics = {"sparsity": 0.9, "positions": {"diagonal": 0.5}, "mlm_loss": 5.0, "seconds": 1.0}
    (run / "metrics.json").write_text(json.dumps(metrics))
    (run / "heads.png").write_bytes(b"")
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "90.0 %" in printed and f"picture: {run / 'heads.png'}" in printed
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {str(run): metrics}
