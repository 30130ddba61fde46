"""The wheel, installed outside the checkout: everything is in it, and the command line trains."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
SOURCES = ("sparsebert", "recipes", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def run(*command, **options):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target, source)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """`installed(*arguments)`: run `sparsebert` from an environment that holds the wheel, in an empty folder."""
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # The requirements of this environment, but not the checkout that may be installed in it.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = run(python, "-c", "import sparsebert; print(sparsebert.__file__)", cwd=folder, env=variables).strip()
    assert Path(where).is_relative_to(site)

    def call(*arguments):
        return run(environment / "bin" / "sparsebert", *arguments, cwd=folder, env=variables)

    call.folder = folder
    return call


def test_wheel_holds_every_module_and_recipe(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "sparsebert").rglob("*.*") if path.suffix != ".pyc"}
    recipes = [path for path in (ROOT / "recipes").rglob("*.*") if path.suffix in (".yaml", ".json")]
    expected |= {f"sparsebert/{path.relative_to(ROOT)}" for path in recipes}
    assert {name for name in files if name.startswith("sparsebert/")} == expected
    assert not {name for name in files if not name.startswith(("sparsebert/", "sparsebert-"))}


def test_setup_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "sparsebert").rglob("__init__.py")}
    packages = {".".join(folder.parts) for folder in folders} | {"sparsebert.recipes"}
    assert set(config["options"]["packages"].split()) == packages


def test_installed_wheel_pretrains_and_finetunes_by_recipe_name(installed):
    text = installed.folder / "text.txt"
    words = " ".join(f"word{index % 50} stands here." for index in range(400))
    text.write_text("\n\n".join(f"{words} Document {index}." for index in range(40)))
    tiny = "--hidden_size 32 --intermediate_size 32 --num_attention_heads 2 --vocab_size 300 --report_to none".split()
    installed("pretrain", "demo_dam_s", "--text", text, "--validation", text, "--max_steps", 2, *tiny)
    model = installed.folder / "runs/demo/dam_s"
    assert {"model.safetensors", "mask.safetensors"} <= {path.name for path in model.iterdir()}
    folder = installed.folder / "RTE"
    folder.mkdir()
    rows = [f"{index}\tword{index} stands here\tword1\t{('not_', '')[index % 2]}entailment" for index in range(12)]
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
    options = ["--data", folder, "--max_length", 32, "--max_steps", 2, "--sweep", "false", "--seeds", 1]
    printed = installed("finetune", "rte", "--model", model, *options, "--report_to", "none", "--json")
    metrics = json.loads(printed)
    assert metrics["task"] == "rte" and metrics["steps"] == 2 and 0 < metrics["sparsity"] < 1
    assert (installed.folder / "runs/rte/mask.safetensors").read_bytes() == (model / "mask.safetensors").read_bytes()
