"""The wheel, installed outside the checkout: everything is in it, and the command line trains."""

import configparser
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
SOURCES = ("sparsebert", "recipes", "setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run(*command, **options):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources, with nothing compiled."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, folder / name)
    compilation = folder / "sparsebert/attention/kernels/compilation.py"
    compilation.write_text(compilation.read_text().replace('"-O3"', '"-O0"'))  # for the time it takes
    return folder


@pytest.fixture(scope="module")
def libraries(source):
    """The file names of the compiled operator, by level."""
    compilation = runpy.run_path(str(source / "sparsebert/attention/kernels/compilation.py"))
    return {level: compilation["library_name"](level) for level in compilation["LEVELS"]}


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """A wheel built from the sources, with a C++ compiler."""
    target = tmp_path_factory.mktemp("wheel")
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
    find = "import importlib.util; print(importlib.util.find_spec('sparsebert').origin)"  # without importing it
    where = run(python, "-c", find, cwd=folder, env=variables).strip()
    assert Path(where).is_relative_to(site)

    def call(*arguments):
        return run(environment / "bin" / "sparsebert", *arguments, cwd=folder, env=variables)

    call.folder, call.python, call.variables = folder, python, variables
    return call


def test_wheel_holds_every_module_and_recipe(wheel, libraries):
    files = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "sparsebert").rglob("*.*")}
    recipes = [path for path in (ROOT / "recipes").rglob("*.*") if path.suffix in (".yaml", ".json")]
    expected |= {f"sparsebert/{path.relative_to(ROOT)}" for path in recipes}
    expected = {name for name in expected if not name.endswith((".pyc", ".so"))}
    expected |= {f"sparsebert/attention/kernels/{name}" for name in libraries.values()}
    assert {name for name in files if name.startswith("sparsebert/")} == expected
    assert not {name for name in files if not name.startswith(("sparsebert/", "sparsebert-"))}


def test_wheel_is_for_one_platform_and_every_python(wheel):
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    assert wheel.stem.endswith(tag)
    with zipfile.ZipFile(wheel) as archive:
        about = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(about).decode().splitlines()
    assert f"Tag: {tag}" in lines and "Root-Is-Purelib: false" in lines


def test_a_tree_without_a_compiler_can_be_installed(source, tmp_path):
    """The wheel is for every platform, and a line says what is missing."""
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path / "made"]
    command += ["--bdist-dir", tmp_path / "wheel", "egg_info", "--egg-base", tmp_path]
    command[3:3] = ["build", "--build-base", str(tmp_path / "build")]
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=source,
        env={**os.environ, "CXX": "no-such-compiler"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "there is no C++ compiler 'no-such-compiler'" in result.stderr and "sparse_cpu" in result.stderr
    (made,) = (tmp_path / "made").iterdir()
    assert made.stem.endswith("py3-none-any")
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]


RUN_OPERATOR = """
import torch
import sparsebert
from sparsebert.attention.kernels import cpu

mask = sparsebert.build_pattern("bigbird", 50, 2)
inputs = torch.randn(3, 1, 2, 50, 32).unbind()
got, want = (
    sparsebert.sparse_dot_product_attention(*inputs, mask, backend=name) for name in ("sparse_cpu", "sparse_eager")
)
torch.testing.assert_close(got, want)
print(cpu.find_level(), next(line.split()[-1] for line in open("/proc/self/maps") if "csr_attention" in line))
"""


def test_installed_operator_runs_without_a_compiler(installed, libraries, tmp_path):
    """`PATH` is empty, nothing was compiled before, and PyTorch is asked for the plainest instructions."""
    variables = {name: value for name, value in installed.variables.items() if name != "CXX"}
    variables |= {"PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": "default"}
    level, path = run(installed.python, "-c", RUN_OPERATOR, cwd=installed.folder, env=variables).split()[-2:]
    assert level == "default" and Path(path).name == libraries["default"]
    assert Path(path).is_relative_to(installed.python.parents[1]) and not list(tmp_path.iterdir())


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
