"""What `import sparsebert` brings in and offers."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparsebert


ROOT = Path(__file__).parents[2]
OPTIONAL = ("datasets", "deepspeed", "evaluate", "matplotlib", "sklearn", "tensorboard")


def test_import_is_light():
    """In a new process: what only some functions need is not imported by the package."""
    code = "import sys, sparsebert, sparsebert.analysis.pictures.charts; "
    code += f"print(*[name for name in {OPTIONAL} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize("name", sparsebert.__all__)
def test_public_name_exists(name):
    assert getattr(sparsebert, name) is not None and name in dir(sparsebert)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'sparsebert' has no attribute 'Trainer'"):
        _ = sparsebert.Trainer


def test_public_names_are_unique():
    assert len(sparsebert.__all__) == len(set(sparsebert.__all__))


def test_version_is_the_distribution_version():
    """`setup.cfg` reads the version from the file, without importing the package."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["metadata"]["version"] == "attr: sparsebert.version.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", sparsebert.__version__)
