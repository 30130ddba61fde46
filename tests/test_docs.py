"""README and docs: commands that parse, links that lead somewhere, examples that run, messages that exist."""

import ast
import configparser
import contextlib
import functools
import importlib
import importlib.util
import io
import random
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import sparsebert
from sparsebert.commands import VERBS, main, parse
from sparsebert.data.tasks.glue import GLUE
from studies.experiments import EXPERIMENTS
from studies.harness.reproduction import ReproductionArguments, plan_cells, plan_text


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md"]
# The verb, script or program of a command in running text, after which it has arguments.
PROGRAMS = r"(?:sparsebert|python|pip|make) "


def blocks(page, *languages):
    """Fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        body for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if language in languages
    ]


def commands(page):
    """Every command of a page: in its blocks, one or more lines each, and in its text."""
    found = []
    for body in blocks(page, "sh"):
        found += body.replace("\\\n", " ").splitlines()
    for body in blocks(page, "console"):
        found += [line[2:] for line in body.splitlines() if line.startswith("$ ")]
    text = re.sub(r"^```.*?^```$|<!-- table.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found += re.findall(rf"`({PROGRAMS}[^`]+)`", text)
    words = [shlex.split(command, comments=True) for command in found]
    return [command for command in words if command]


COMMANDS = {
    f"{page.name}: {shlex.join(command)}": command
    for page in PAGES
    for command in commands(page)
    if command[:2] != ["sparsebert", "VERB"]
}


def test_tables_are_those_of_the_package(capsys):
    specification = importlib.util.spec_from_file_location("generated", ROOT / "docs/generated.py")
    generated = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generated)
    assert generated.main(["--check"]) == 0, "run python docs/generated.py"
    written = generated.written("<!-- table: mixers -->\nold\n<!-- end -->\n")
    assert "| `sepconv` |" in written and "old" not in written


def test_commands_are_found():
    verbs = {command[1] for command in COMMANDS.values() if command[0] == "sparsebert"}
    assert len(COMMANDS) > 80 and {"pretrain", "finetune", "search", "prune", "reproduce"} <= verbs


def test_commands_parse():
    wrong = {}
    for name, command in COMMANDS.items():
        try:
            check_command(*command)
        except (Exception, SystemExit) as error:
            wrong[name] = repr(error)
    assert not wrong


def check_command(program, *arguments):
    if [program, *arguments[:2]] == ["python", "-m", "sparsebert"]:
        program, arguments = "sparsebert", arguments[2:]
    if program == "sparsebert" and len(arguments) < 2:
        assert set(arguments) <= {*VERBS, "--help", "--version"}
    elif program == "sparsebert":
        parse(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in arguments if "=" not in word} <= {*targets}
    elif program == "pip":
        config = configparser.ConfigParser()
        config.read(ROOT / "setup.cfg")
        groups = [group for word in arguments for group in re.findall(r"^\.\[(.*)\]$", word)]
        assert arguments[0] in ("install", "wheel")
        assert {name for group in groups for name in group.split(",")} <= {*config["options.extras_require"]}
    elif program == "python" and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).is_file()
    else:
        assert [program, arguments[0]] == ["python", "-m"] and arguments[1].startswith("benchmarks.")
        assert {word for word in arguments if word.startswith("--")} <= benchmark_flags(arguments[1])


@functools.cache
def benchmark_flags(module):
    """Flags in the help of a benchmark."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        patch.setattr(sys, "argv", [module, "--help"])
        patch.delitem(sys.modules, module, raising=False)
        runpy.run_module(module, run_name="__main__")
    return set(re.findall(r"--[\w-]+", printed.getvalue()))


EXPERIMENT_COMMANDS = {
    name: command[1:]
    for name, command in COMMANDS.items()
    if command[:2] == ["sparsebert", "reproduce"] and len(command) > 2 and not command[2].startswith("-")
}


# Settings that name the reader's models, or layers of a model that has more than the one here.
_MODELS = ("model", "masked", "replaced", "continue_from")


@pytest.fixture
def named(checkpoints, tmp_path):
    """`named(arguments, given)`: the settings of an experiment, with files in place of the names on the pages."""
    (tmp_path / "text.txt").write_text("Some text.\n")
    (tmp_path / "pairs.tsv").write_text("A house.\tDum.\n")
    for task in GLUE.values():
        (tmp_path / "glue" / task.folder).mkdir(parents=True)
        for split in ("train", "dev"):
            (tmp_path / "glue" / task.folder / f"{split}.tsv").touch()
    (tmp_path / "reviews").mkdir()
    for split in ("train", "test"):
        (tmp_path / "reviews" / f"{split}.jsonl").touch()
    (tmp_path / "examples").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "examples" / f"{split}.json").touch()

    def settings(arguments, given):
        places = {"text": "text.txt", "validation": "text.txt", "train": "pairs.tsv", "test": "pairs.tsv"}
        places |= {"data": "glue", "stsb": "glue", "reviews": "reviews"}
        given = {name: value for name, value in given.items() if name not in _MODELS}
        places |= dict.fromkeys(("squad", "squad2", "swag"), "examples")
        found = given | {name: str(tmp_path / place) for name, place in places.items() if name in given}
        models = {"model": checkpoints["stock"], "base_model": checkpoints["long"], "original": checkpoints["stock"]}
        models |= {"models": str(tmp_path / "cells"), "masked": [checkpoints["window"]], "replaced": [0, 2]}
        models |= {"continue_from": checkpoints["stock"], "lengths": [40, 80]}
        known = {field.name for field in fields(arguments)}
        if "depths" in known:
            models["masks"] = ["window"]  # of those of needles, one is for MiniLM alone
        found = {name: models[name] for name in models.keys() & known} | found
        for system in getattr(arguments(**found), "systems", ()):
            shutil.copytree(checkpoints["stock"], tmp_path / "cells" / system / "model")
        return found

    return settings


@pytest.mark.parametrize("command", EXPERIMENT_COMMANDS.values(), ids=EXPERIMENT_COMMANDS.keys())
def test_experiments_can_be_planned(command, named, tmp_path):
    """Files and models apart, which are the reader's."""
    _, values = parse(command)
    options = ReproductionArguments(**values["run"] | {"output": str(tmp_path / "results")})
    experiment = EXPERIMENTS[options.experiment]
    cells = plan_cells(experiment, options, named(experiment.arguments, values["settings"]))
    assert f"{options.experiment}: 0 of {len(cells)} cells are done" in plan_text(options.experiment, options, cells)


CONSOLE = [body for page in PAGES for body in blocks(page, "console")]


@pytest.mark.parametrize("body", CONSOLE, ids=[body.partition("\n")[0] for body in CONSOLE])
def test_console_blocks_run(body, capsys, monkeypatch):
    """Their output, where the page shows one, is what they print, but for space at the end of lines."""
    monkeypatch.chdir(ROOT)
    command, _, expected = body.partition("\n")
    prompt, program, *arguments = shlex.split(command)
    assert (prompt, program, main(arguments)) == ("$", "sparsebert", 0)
    printed = capsys.readouterr().out
    assert printed
    if expected:
        assert [line.rstrip() for line in printed.splitlines()] == [line.rstrip() for line in expected.splitlines()]


def test_links_lead_somewhere():
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(
            r"\]\(([^)\s]+)\)",
            re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S),
        )
        if not re.match(r"https?://", target)
    ]
    for page, target in links:
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.is_file(), (page, target)
        if page.parent.name == "docs" and linked.suffix == ".md":
            assert linked.parent.name == "docs", f"{page}: {target} is no page of the built documentation"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M) if anchor else ()
        anchors = {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}
        assert not anchor or anchor in anchors, (page, target)


def test_python_blocks_name_what_exists():
    for body in (body for page in PAGES for body in blocks(page, "python")):
        if body.startswith(">>>"):
            continue  # run as doctests
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("sparsebert"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), body
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "sparsebert":
                assert hasattr(sparsebert, node.attr), body


def test_front_page_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_the_complete_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    lines = [" ".join(f"word{rng.randrange(50)}" for _ in range(40)) for _ in range(200)]
    Path("text.txt").write_text("\n\n".join(lines))
    (example,) = (body for body in blocks(ROOT / "docs" / "use.md", "python") if "train_tokenizer(" in body)
    for written, smaller in (('"builtin"', '"text.txt"'), ("max_steps=100", 'max_steps=2, report_to="none"')):
        assert written in example
        example = example.replace(written, smaller)
    exec(example, {"__name__": "example"})
    assert sparsebert.load("my-model").base_model.sparse_attention.mask.sparsity > 0.8


def test_messages_of_troubleshooting_exist():
    """Their fixed parts are texts of the package."""
    texts = {
        node.value
        for path in (ROOT / "sparsebert").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.*)`$", page, re.M)
    assert len(messages) > 10
    for message in messages:
        for part in filter(None, map(str.strip, message.split("..."))):
            assert any(part in text for text in texts), f"{message}: no text of the package holds {part!r}"
