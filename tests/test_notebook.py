"""The notebook of the docs: it was run from top to bottom, its commands parse, and it runs."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from sparsebert.commands import parse


NOTEBOOK = Path(__file__).parents[1] / "docs" / "first_steps.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_those_of_one_run():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert len(outputs) >= len(CELLS) and not any(output["output_type"] == "error" for output in outputs)
    assert not re.search(r"Traceback|Error: |site-packages", json.dumps(outputs))


def test_commands_parse():
    text = "\n".join("".join(cell["source"]) for cell in CELLS).replace("\\\n", " ")
    found = [shlex.split(line) for line in re.findall("^!(.*)", text, re.M)]
    assert [verb for _, verb, *_ in found] == ["search", "lengthen", "compile"]
    for program, *arguments in found:
        assert program == "sparsebert" and parse(arguments)


@pytest.mark.slow
def test_it_runs(tmp_path, real_bert, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for its commands
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("openvino")
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
