"""The examples of docs/extending.md, added to a copy of the package: they run and pass the tests of every row."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest


ROOT = Path(__file__).parents[1]
# The text of each example, what it adds, and how that is used.
EXAMPLES = re.findall(
    r"^## An? [^\n]*\n(.*?)^```python\n(.*?)^```$(?:.*?)^```python\n(.*?)^```$",
    (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"),
    re.M | re.S,
)
SMALLER = {"num_hidden_layers=": "hidden_size=48, intermediate_size=48, num_hidden_layers=", "768": "48"}
# By the name of the new row: its registry, and the use, of smaller models.
ROWS = {}
for _, addition, use in EXAMPLES:
    registry, name = re.search(r'^([A-Z_]+)\["(\w+)"\]', addition, re.M).groups()
    for written, smaller in SMALLER.items():
        use = use.replace(written, smaller)
    ROWS[name] = (registry, use)
REGISTRIES = {registry for registry, _ in ROWS.values()}
# In the copy: the uses as tests, and of each test the first case that a new row has.
USES = f"""
import pytest

USES = { {name: use for name, (_, use) in ROWS.items()} }

@pytest.mark.parametrize("name", USES)
def test_use(name):
    exec(USES[name], {{"__name__": name}})
"""
SELECTION = f"""
from collections import Counter

def pytest_collection_modifyitems(items):
    seen, selected = Counter(), []
    for item in items:
        values = getattr(getattr(item, "callspec", None), "id", "").split("-")
        cases = [(item.originalname, row) for row in { {*ROWS} } & {{*values}}]
        if any(not seen[case] for case in cases):
            selected.append(item)
        seen.update(cases)
    items[:] = selected
"""


def test_every_registry_has_an_example():
    assert REGISTRIES == {
        *("PATTERNS", "BACKENDS", "SEARCHES", "PROBABILITY_MAPS", "TASKS", "MIXERS", "ARCHITECTURES", "EXPERIMENTS")
    }


@pytest.fixture
def extended(tmp_path):
    """A copy of the package and its tests with all examples added."""
    for folder in ("sparsebert", "studies", "benchmarks", "recipes", "docs", "tests"):
        # With what was compiled of the modules, which holds for those that stay as they are.
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results"))
    for file in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    for text, addition, _ in EXAMPLES:
        file, registry = re.search(r"`((?:sparsebert|studies)/[\w/]+\.py)`,\s+below\s+`(\w+)`", text).groups()
        source = (tmp_path / file).read_text(encoding="utf-8")
        ends = [node.end_lineno for node in ast.parse(source).body if registry in assigned(node)]
        assert len(ends) == 1, f"{file} has {len(ends)} assignments to {registry}"
        lines = source.splitlines(keepends=True)
        (tmp_path / file).write_text("".join([*lines[: ends[0]], "\n\n", addition, "\n", *lines[ends[0] :]]))
    (tmp_path / "conftest.py").write_text(SELECTION)
    (tmp_path / "tests/test_uses.py").write_text(USES)
    return tmp_path


def assigned(node):
    """Names that a statement assigns to."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def has_cases(path):
    """Whether a file reads a registry outside of the bodies of its functions, and so may have a case for each row."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    parts = [part for node in module.body for part in getattr(node, "decorator_list", [node])]
    return any(getattr(node, "id", None) in REGISTRIES for part in parts for node in ast.walk(part))


def test_examples_run_and_pass_the_tests_of_every_row(extended):
    files = [path for path in sorted((extended / "tests").glob("*/test_*.py")) if has_cases(path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--junit-xml=done.xml"]
        + ["tests/test_uses.py", *map(str, files)],
        cwd=extended,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (extended / "done.xml").is_file(), done.stderr or done.stdout
    cases = list(ElementTree.parse(extended / "done.xml").iter("testcase"))
    for name in ROWS:
        own = [case for case in cases if name in re.split(r"[\[\]-]", case.get("name"))]
        failed = [case for case in own if case.find("failure") is not None or case.find("error") is not None]
        assert len(own) > 2, f"too few tests of {name}: {done.stdout}"
        assert not failed, "\n".join(f"{case.get('classname')}::{case.get('name')}" for case in failed) + done.stdout
