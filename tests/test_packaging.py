"""The wheel, installed outside the checkout: everything is in it, and the command line trains."""

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
    return result


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


def test_wheel_holds_every_module_and_recipe_for_one_platform_and_every_python(wheel, libraries):
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        about = next(name for name in files if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(about).decode().splitlines()
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "sparsebert").rglob("*.*")}
    recipes = [path for path in (ROOT / "recipes").rglob("*.*") if path.suffix in (".yaml", ".json")]
    expected |= {f"sparsebert/{path.relative_to(ROOT)}" for path in recipes}
    expected = {name for name in expected if not name.endswith((".pyc", ".so"))}
    expected |= {f"sparsebert/attention/kernels/{name}" for name in libraries.values()}
    assert {name for name in files if name.startswith("sparsebert/")} == expected
    assert not {name for name in files if not name.startswith(("sparsebert/", "sparsebert-"))}
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    assert wheel.stem.endswith(tag) and f"Tag: {tag}" in lines and "Root-Is-Purelib: false" in lines


def test_a_tree_without_a_compiler_can_be_installed(source, tmp_path):
    """The wheel is for every platform, and a line says what is missing."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path / "build"]
    command += ["bdist_wheel", "--dist-dir", tmp_path / "made", "--bdist-dir", tmp_path / "wheel"]
    result = run(
        *command, "egg_info", "--egg-base", tmp_path, cwd=source, env={**os.environ, "CXX": "no-such-compiler"}
    )
    assert "there is no C++ compiler 'no-such-compiler'" in result.stderr and "sparse_cpu" in result.stderr
    (made,) = (tmp_path / "made").iterdir()
    assert made.stem.endswith("py3-none-any")
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]


# Runs the operator, and then each line of its input as the words of the command.
INSTALLED = """
import runpy, shlex, sys
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

for line in sys.stdin:
    script, *_ = sys.argv = shlex.split(line)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, line
"""


def test_the_installed_wheel_runs_its_operator_and_trains_by_recipe_name(wheel, libraries, tmp_path):
    """`PATH` is empty, nothing was compiled before, and PyTorch is asked for the plainest instructions."""
    environment, folder = tmp_path / "environment", tmp_path / "elsewhere"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python, program = environment / "bin" / "python", environment / "bin" / "sparsebert"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    # The requirements of this environment, but not the checkout that may be installed in it.
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "RTE").mkdir(parents=True)
    words = " ".join(f"word{index % 50} stands here." for index in range(200))
    (folder / "text.txt").write_text("\n\n".join(f"{words} Document {index}." for index in range(20)))
    rows = [f"{index}\tword{index} stands here\tword1\t{('not_', '')[index % 2]}entailment" for index in range(12)]
    for split in ("train", "dev"):
        (folder / f"RTE/{split}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
    tiny = "--hidden_size 32 --intermediate_size 32 --num_attention_heads 2 --vocab_size 300"
    commands = (
        f"{program} pretrain demo_dam_s --text text.txt --validation text.txt {tiny}\n"
        f"{program} finetune rte --model runs/demo/dam_s --data RTE --max_length 32 --sweep false --seeds 1\n"
    )
    commands = commands.replace("\n", " --max_steps 2 --report_to none\n")
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    variables |= {"PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "ATEN_CPU_CAPABILITY": "default"}
    done = run(python, "-c", INSTALLED, cwd=folder, env=variables, input=commands)
    level, path = done.stdout.splitlines()[0].split()
    assert level == "default" and Path(path).name == libraries["default"]
    assert Path(path).is_relative_to(site) and not (tmp_path / "built").exists()
    metrics = json.loads((folder / "runs/rte/metrics.json").read_text())
    assert metrics["task"] == "rte" and metrics["steps"] == 2 and 0 < metrics["sparsity"] < 1
    assert (folder / "runs/demo/dam_s/model.safetensors").is_file()
    masks = [(folder / f"runs/{run}/mask.safetensors").read_bytes() for run in ("demo/dam_s", "rte")]
    assert masks[0] == masks[1]
