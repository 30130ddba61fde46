"""The runner of the papers' tables and figures: what is run, what is taken over, what is refused, what is written."""

import errno
import gc
import json
import math
import os
import random
import sys
import weakref
from dataclasses import dataclass, field, fields, replace
from threading import Thread

import matplotlib
import pytest
import torch
import transformers
import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseMask
from sparsebert.analysis.reporting.reports import RECOVERED, own_mask
from sparsebert.analysis.saved_runs import read_run
from sparsebert.commands import main, parse
from sparsebert.commands._help import explanations
from sparsebert.data.documents import in_split
from sparsebert.data.tasks import glue
from sparsebert.files import replace_files
from sparsebert.masks.patterns import build_pattern
from sparsebert.training.pruning.pruned_masks import prune_by_probs, random_control
from sparsebert.training.searching.search_arguments import PostHocArguments
from sparsebert.training.trainer import SparseBertTrainer
from studies.experiments import EXPERIMENTS, Experiment
from studies.harness import reproduction
from studies.harness.experiment import shared_settings, unseeded
from studies.harness.reproduction import CellsFailed, ReproductionArguments, plan_cells, result_files, run_experiment
from studies.harness.result_tables import experiment_tables, plot_cells
from studies.harness.seed_comparisons import holm, paired_difference
from studies.harness.time_estimates import duration, estimate_seconds
from studies.shared.review_classifiers import classify
from studies.shared.sentence_similarity import similarity
from studies.sparsebert_paper import sparsebert_figure7
from studies.trained_models import minilm_mixers


pytestmark = pytest.mark.usefixtures("without_matplotlib")


SMALL_COPYING = (
    "--source_length 7 --num_symbols 8 --hidden_size 16 --head_size 4 --intermediate_size 16 --train_size 200 "
    "--test_size 20 --max_steps 2 --batch_size 8 --stride 4 --window_size 2"
).split()
SMALL_TEXT = (
    "--vocab_size 150 --max_length 16 --hidden_size 16 --num_layers 2 --num_heads 4 --intermediate_size 16 "
    "--max_steps 2 --batch_size 4"
).split()


@dataclass
class Settings:
    """
    Settings of the experiment below.

    Args:
        factor (`int`): Factor.
        names (`list[str]`): Names.
    """

    factor: int = 2
    names: list[str] = field(default_factory=lambda: ["a", "b"])


@pytest.fixture
def experiment(monkeypatch):
    """An experiment named "products" that counts how often each of its cells was run."""
    ran = []

    def run(cell, folder):
        ran.append(cell["name"])
        (folder / "file").write_text("")
        if cell["name"] == "broken":
            raise RuntimeError("no result")
        if cell["name"] == "stopped":
            raise KeyboardInterrupt
        return {"product": cell["factor"] * len(cell["name"]), "secret": 1}

    def check(cell):
        if cell["factor"] < 0:
            raise ValueError(f"factor must be at least 0, got {cell['factor']}")

    row = Experiment(
        title="Products",
        arguments=Settings,
        scales={"tiny": {"factor": 3}, "paper": {}},
        cells=lambda settings: {n: {"name": unseeded(n), "factor": settings.factor} for n in settings.names},
        check=check,
        run=run,
        columns={"product": ("product", "{:.1f}"), "share": ("share", "{:.1%}"), "seconds": ("seconds", "{:.0f}")},
        plot=("factor", "product", "name"),
        published={"a": {"product": 7.0}},
        layout=("name", "factor", "product"),
        notes=("a note",),
    )
    monkeypatch.setitem(EXPERIMENTS, "products", row)
    return ran


def reproduce(*arguments):
    """The command, with its errors as exceptions."""
    command, values = parse(["reproduce", *map(str, arguments)])
    command.run(values).show(values["print"].get("json", False))


@pytest.fixture
def run(tmp_path, capsys):
    """`run(*arguments)`: the command, with its folders in `tmp_path`; what it printed."""

    def command(*arguments):
        folders = ["--output", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
        reproduce(*arguments, *folders)
        return capsys.readouterr().out

    return command


def read(path):
    return json.loads(path.read_text())["cells"]


def test_results_and_table(experiment, run, tmp_path):
    run("products")
    results = tmp_path / "results"
    names = {path.name for path in results.iterdir() if not path.name.startswith(".")}
    assert names == {"products_tiny.json", "products_tiny.md"}  # the plot needs matplotlib
    cells = read(results / "products_tiny.json")
    assert cells["a"]["settings"] == {"name": "a", "factor": 3}
    assert cells["a"]["metrics"]["product"] == 3 and cells["a"]["metrics"]["seconds"] >= 0
    assert {"sparsebert", "torch", "device", "threads"} == set(cells["a"]["made_with"])
    text = (results / "products_tiny.md").read_text()
    assert "| a | 3.0 | 7.0 | 0 |" in text and "| b | 3.0 |  | 0 |" in text and "a note" in text
    assert "| a | 3.0 / 7.0 |" in text and "share" not in text


def test_a_plot_has_the_mean_over_seeds_beside_the_papers_point(experiment, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("studies.harness.result_tables.plot_lines", lambda *arguments: drawn.append(arguments))
    cells = {
        f"{name}_seed_{seed}": {"settings": {"name": name, "factor": 3, "seed": seed}, "metrics": {"product": product}}
        for name, products in {"a": (4.0, 6.0), "b": (1.0,)}.items()
        for seed, product in enumerate(products)
    }
    plot_cells(EXPERIMENTS["products"], "tiny", cells, tmp_path / "plot.png")
    ((lines, _, title, *labels),) = drawn
    assert lines == {"a": [(3, 5, 7)], "b": [(3, 1, None)]} and title == "Products, scale tiny"
    assert labels == ["factor", "product", ""]


def test_finished_cells_are_not_run_again(experiment, run, tmp_path):
    run("products", "--only", "a")
    assert experiment == ["a"]
    printed = run("products")
    assert experiment == ["a", "b"] and "3.0 / 7.0" in printed
    run("products", "--names", "[c]")
    assert experiment == ["a", "b", "c"] and set(read(tmp_path / "results/products_tiny.json")) == {"a", "b", "c"}
    run("products", "--only", "[a, c]", "--names", "[a, c]", "--overwrite")
    assert experiment[3:] == ["a", "c"] and set(read(tmp_path / "results/products_tiny.json")) == {"a", "b", "c"}


def test_what_cells_share_is_not_their_own_time(experiment, run, tmp_path, monkeypatch):
    metrics = {"product": 1.0, "shared_seconds": 60.0, "shared_cpu_seconds": 50.0}
    monkeypatch.setitem(
        EXPERIMENTS, "products", replace(EXPERIMENTS["products"], run=lambda cell, folder: dict(metrics))
    )
    run("products", "--only", "a")
    found = read(tmp_path / "results/products_tiny.json")["a"]["metrics"]
    assert found["cpu_seconds"] == pytest.approx(-50, abs=5) and 0 <= found["seconds"] < 50


def test_scales_have_files_of_their_own(experiment, run, tmp_path):
    run("products")
    run("products", "--scale", "paper")
    assert read(tmp_path / "results/products_paper.json")["a"]["metrics"]["product"] == 2
    assert read(tmp_path / "results/products_tiny.json")["a"]["metrics"]["product"] == 3


def test_cells_of_other_settings_are_refused_or_made_anew(experiment, run, tmp_path):
    run("products")
    with pytest.raises(ValueError, match="cell a made with factor 3, not 4: .*--overwrite"):
        run("products", "--factor", "4", "--names", "[a, c]")
    assert experiment == ["a", "b"]
    run("products", "--factor", "4", "--names", "[a, c]", "--overwrite")
    cells = read(tmp_path / "results/products_tiny.json")
    assert experiment[2:] == ["a", "c"] and cells["a"]["metrics"]["product"] == 4
    assert cells["b"]["settings"]["factor"] == 3
    assert "factor: 4; in b: 3" in (tmp_path / "results/products_tiny.md").read_text()


def test_seeds_of_a_cell_share_their_settings(experiment, run, tmp_path):
    run("products", "--names", "[a_seed_1]")
    before = (tmp_path / "results/products_tiny.json").read_bytes()
    with pytest.raises(ValueError, match="cell a_seed_1 made with factor 3, not 4 as for a_seed_2, .*--output"):
        run("products", "--factor", "4", "--names", "[a_seed_2, b_seed_1]")
    assert experiment == ["a"] and (tmp_path / "results/products_tiny.json").read_bytes() == before
    run("products", "--factor", "4", "--names", "[b_seed_1]")
    run("products", "--names", "[a_seed_2]")
    run("products", "--factor", "4", "--names", "[a_seed_1, a_seed_2]", "--overwrite")
    cells = read(tmp_path / "results/products_tiny.json")
    assert {name: cell["settings"]["factor"] for name, cell in cells.items()} == dict.fromkeys(cells, 4)
    assert shared_settings({"seed": 1, "n": 2, "model": {"mask_seed": 3, "m": 4}}) == {"n": 2, "model": {"m": 4}}


def test_new_attention_has_the_weights_of_a_new_model(tiny_config, tmp_path):
    torch.manual_seed(0)
    model = SparseBertForMaskedLM(tiny_config(SparseBertConfig, pattern="dense"))
    model.save_pretrained(tmp_path / "checkpoint")
    cell = {"replaced_layers": 1, "seed": 3}
    for name in ("one", "two"):
        minilm_mixers.save_with_new_attention(cell, tmp_path / "checkpoint", tmp_path / name)
    one, two = (SparseBertForMaskedLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, one[name])}
    first = "bert.encoder.layer.0.attention.self"
    assert changed == {f"{first}.{part}.weight" for part in ("query", "key", "value")}  # biases were 0 before
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one[f"{first}.query.weight"].std().item() == pytest.approx(model.config.initializer_range, rel=0.1)


def test_folders_of_other_results_are_kept(experiment, run, tmp_path):
    run("products")
    kept = tmp_path / "runs/products_tiny/a/file"
    kept.write_text("mine")
    with pytest.raises(FileExistsError, match="choose another --runs, or pass --overwrite"):
        reproduce("products", "--output", tmp_path / "others", "--runs", tmp_path / "runs")
    assert kept.read_text() == "mine" and experiment == ["a", "b"] and not (tmp_path / "others").exists()
    reproduce("products", "--output", tmp_path / "others", "--runs", tmp_path / "runs", "--overwrite")
    assert experiment == ["a", "b", "a", "b"]


def test_cells_of_two_processes_are_all_kept(experiment, run, tmp_path, monkeypatch):
    own = EXPERIMENTS["products"]

    def run_beside(cell, folder):
        if cell["name"] == "a":
            monkeypatch.setitem(EXPERIMENTS, "products", own)
            run("products", "--only", "b")
        return own.run(cell, folder)

    monkeypatch.setitem(EXPERIMENTS, "products", replace(own, run=run_beside))
    run("products", "--only", "a")
    assert set(read(tmp_path / "results/products_tiny.json")) == {"a", "b"}


def test_cells_with_other_folders_of_runs_are_all_kept(experiment, tmp_path, monkeypatch):
    def other():
        reproduce("products", "--only", "b", "--output", tmp_path / "results", "--runs", tmp_path / "other")

    beside = Thread(target=other)

    def write(contents):
        monkeypatch.setattr(reproduction, "replace_files", replace_files)
        beside.start()
        beside.join(1)  # waits for these results to be written
        replace_files(contents)

    monkeypatch.setattr(reproduction, "replace_files", write)
    reproduce("products", "--only", "a", "--output", tmp_path / "results", "--runs", tmp_path / "runs")
    beside.join()
    assert set(read(tmp_path / "results/products_tiny.json")) == {"a", "b"}


def test_results_that_cannot_be_written_are_printed(experiment, run, tmp_path, monkeypatch, caplog):
    def write(contents):
        monkeypatch.setattr(reproduction, "replace_files", replace_files)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(reproduction, "replace_files", write)
    run("products")
    assert set(read(tmp_path / "results/products_tiny.json")) == {"b"} and '"product": 3' in caplog.text
    run("products")
    assert experiment == ["a", "b", "a"]


def test_processes_share_the_cells(experiment, run, tmp_path, monkeypatch):
    own = EXPERIMENTS["products"]

    def run_beside(cell, folder):
        if cell["name"] == "a":
            monkeypatch.setitem(EXPERIMENTS, "products", own)
            run("products")  # leaves a, which is being run, and runs b
            assert experiment == ["b"] and folder.is_dir()
        return own.run(cell, folder)

    monkeypatch.setitem(EXPERIMENTS, "products", replace(own, run=run_beside))
    run("products")
    assert experiment == ["b", "a"] and set(read(tmp_path / "results/products_tiny.json")) == {"a", "b"}
    run("products", "--overwrite")
    assert experiment == ["b", "a", "a", "b"]


def test_a_cell_of_other_results_is_kept(experiment, run, tmp_path, monkeypatch):
    """It was finished, after these cells were planned, by a process with another output and the same runs."""
    own, others = EXPERIMENTS["products"], tmp_path / "runs/products_tiny/b"
    options = ReproductionArguments(output=str(tmp_path / "results"), runs=str(tmp_path / "runs"))

    def run_beside(cell, folder):
        if cell["name"] == "a":
            monkeypatch.setitem(EXPERIMENTS, "products", own)
            reproduce("products", "--output", tmp_path / "elsewhere", "--runs", tmp_path / "runs")
            (others / "file").write_text("theirs")
        return own.run(cell, folder)

    monkeypatch.setitem(EXPERIMENTS, "products", replace(own, run=run_beside))
    with pytest.raises(CellsFailed, match="1 of 2 cells failed, .*b .*holds a finished cell that .* does not"):
        run_experiment("products", options, {})
    assert experiment == ["b", "a"] and (others / "file").read_text() == "theirs"
    assert set(read(tmp_path / "results/products_tiny.json")) == {"a"}


def test_nothing_is_reported_while_another_process_runs_the_only_cell(experiment, run, tmp_path, monkeypatch):
    own = replace(EXPERIMENTS["products"], summary=lambda cells: [] if cells else 1 / 0)

    def run_beside(cell, folder):
        monkeypatch.setitem(EXPERIMENTS, "products", own)
        assert run("products", "--only", "a") == ""
        return own.run(cell, folder)

    monkeypatch.setitem(EXPERIMENTS, "products", replace(own, run=run_beside))
    run("products", "--only", "a")
    assert experiment == ["a"]


@pytest.fixture
def said(caplog, monkeypatch):
    """`said()`: the messages of the package since the last call."""
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(transformers.utils.logging.get_logger("sparsebert"), "propagate", True)

    def messages():
        found = [record.getMessage() for record in caplog.records if record.name.startswith("sparsebert")]
        caplog.clear()
        return found

    return messages


def test_what_is_to_do_is_said_first(experiment, run, said):
    run("products", "--list_cells")
    assert said() == [
        "products: 0 of 2 cells are done, 2 to do; no cell is finished yet to judge the time by, so the estimate "
        "follows after the first"
    ]
    run("products")
    first, a, b = said()
    assert first.startswith("products: 0 of 2 cells are done, 2 to do; no cell") and a == "products: a (1 of 2)"
    assert b == "products: b (2 of 2, about 0 s left)"
    run("products", "--names", "[a, b, c]", "--list_cells")
    assert said() == ["products: 2 of 3 cells are done, 1 to do, about 0 s, judged by 2 finished"]
    run("products")
    assert said() == ["products: 2 of 2 cells are done, 0 to do"]
    run("products", "--factor", "4", "--list_cells")
    assert said() == ["products: 0 of 2 cells are done, 2 to do, about 0 s, judged by 2 finished"]


def test_the_time_that_is_left_is_that_of_this_cell_and_those_after_it(experiment, run, said, tmp_path):
    run("products", "--only", "a")
    path = tmp_path / "results/products_tiny.json"
    written = json.loads(path.read_text())
    written["cells"]["a"]["metrics"]["seconds"] = 600.0
    path.write_text(json.dumps(written))
    said()
    run("products", "--names", "[a, b, c]")
    assert said() == [
        "products: 1 of 3 cells are done, 2 to do, about 20 min, judged by 1 finished",
        "products: b (1 of 2, about 20 min left)",
        "products: c (2 of 2, about 5 min left)",  # the median of 10 min and nothing
    ]


def test_the_time_is_judged_by_the_cells_that_are_most_alike():
    cell = {"series": "dam_s", "target": 0.8, "max_steps": 100, "seed": 1}
    finished = {
        str(number): {"settings": cell | changes, "metrics": {"seconds": seconds}}
        for number, (changes, seconds) in enumerate(
            [({}, 60.0), ({"seed": 2}, 80.0), ({"target": 0.9}, 10.0), ({"series": "dense"}, 20.0)]
        )
    }
    estimate = lambda **changes: estimate_seconds({"new": cell | {"seed": 3} | changes}, finished, "series")  # noqa: E731
    assert estimate() == 70  # two seeds of it
    assert estimate(max_steps=200) == 140
    assert estimate(target=0.9) == 10
    assert estimate(series="dense", target=0.9) == 20  # of its series, whatever else differs
    assert estimate(series="random") == 60  # the median of all that differ in nothing else: 60, 80 and 20
    finished["0"]["metrics"]["shared_seconds"] = 50.0  # a checkpoint, which the others have found there
    assert estimate() == 45
    assert estimate_seconds({"new": cell}, {}, "series") is None
    assert [duration(seconds) for seconds in (0.4, 89, 600, 9000)] == ["0 s", "89 s", "10 min", "2.5 h"]


def test_an_interrupted_run_goes_on(experiment, run, tmp_path):
    with pytest.raises(KeyboardInterrupt, match="^interrupted: finished cells are kept, the same command"):
        run("products", "--names", "[a, stopped, b]")
    assert set(read(tmp_path / "results/products_tiny.json")) == {"a"}
    assert (tmp_path / "runs/products_tiny/stopped/file").is_file()
    assert "| a | 3.0 |" in (tmp_path / "results/products_tiny.md").read_text()
    (tmp_path / "runs/products_tiny/b.lock").touch()  # of a process that was killed
    run("products")
    assert experiment == ["a", "stopped", "b"]


def test_a_cell_that_fails_does_not_stop_the_others(experiment, run, tmp_path):
    printed = run("products", "--names", "[a, broken, b]")
    assert "1 of 3 cells failed, the same command runs them again: broken (RuntimeError: no result)" in printed
    assert set(read(tmp_path / "results/products_tiny.json")) == {"a", "b"}
    folders = ["--output", tmp_path / "results", "--runs", tmp_path / "runs"]
    command, values = parse(list(map(str, ["reproduce", "products", "--names", "[a, broken, b]", *folders])))
    assert command.run(values).exit_code == 1
    assert experiment == ["a", "broken", "b", "broken"]
    options = ReproductionArguments(output=str(tmp_path / "results"), runs=str(tmp_path / "runs"))
    with pytest.raises(CellsFailed, match="broken") as error:
        run_experiment("products", options, {"names": ["a", "broken"]})
    assert all([row[0] for row in table.rows] == ["a", "b"] for table in error.value.tables)
    again = "1 of 1 cells failed, run them again with --only: broken"
    with pytest.raises(CellsFailed, match=again):
        run_experiment("products", replace(options, overwrite=True), {"names": ["broken"]})


def test_a_picture_that_fails_does_not_stop_the_cells(experiment, run, tmp_path, monkeypatch):
    pictures = {"bars": lambda finished, kept, path: path.write_bytes(b"drawn") if len(finished) == 3 else 1 / 0}
    monkeypatch.setitem(EXPERIMENTS, "products", replace(EXPERIMENTS["products"], pictures=pictures))
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    run("products", "--names", "[a, b, c]")
    assert set(read(tmp_path / "results/products_tiny.json")) == {"a", "b", "c"}
    assert (tmp_path / "results/products_tiny_bars.png").read_bytes() == b"drawn"
    with pytest.raises(ZeroDivisionError):
        run("products", "--names", "[d]")
    assert set(read(tmp_path / "results/products_tiny.json")) == {"a", "b", "c", "d"}


def test_a_cell_that_fails_leaves_nothing_in_memory(experiment, run, monkeypatch):
    class Large:
        pass

    made, alive = [], []

    def fail(cell, folder):
        gc.collect()
        alive.append([reference() is not None for reference in made])
        large = Large()
        made.append(weakref.ref(large))
        raise RuntimeError("no room")

    monkeypatch.setitem(EXPERIMENTS, "products", replace(EXPERIMENTS["products"], run=fail))
    run("products", "--names", "[a, b]")
    assert alive == [[], [False]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["product"], "unknown experiment 'product'; did you mean 'products'"),
        (["products", "--scale", "tinny"], "unknown scale 'tinny'; did you mean 'tiny'"),
        (["products", "--only", "z*"], "unknown cell in --only 'z\\*'; allowed: a, b"),
        (["products", "--fctor", "1"], "unknown field '--fctor'; did you mean '--factor'"),
        (["products", "--factor", "x"], "--factor must be a whole number, got 'x'"),
        (["products", "--only", "5"], "unknown cell in --only '5'"),
        (["products", "--factor", "-1"], "factor must be at least 0, got -1"),
    ],
)
def test_bad_input(experiment, run, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)
    assert experiment == [] and not (tmp_path / "results").exists()


def test_a_file_of_something_else_is_not_overwritten(experiment, run, tmp_path):
    path = tmp_path / "results/products_tiny.json"
    path.parent.mkdir()
    path.write_text('{"other": 1}')
    with pytest.raises(ValueError, match="holds no results of this experiment"):
        run("products")
    assert path.read_text() == '{"other": 1}' and experiment == []


@pytest.mark.parametrize("value, reason", [(None, "KeyError"), ("six", "ValueError")])
def test_damaged_cells_are_named(experiment, run, tmp_path, value, reason):
    run("products", "--only", "a")
    path = tmp_path / "results/products_tiny.json"
    content = json.loads(path.read_text())
    content["cells"]["a"]["metrics"] = {} if value is None else {"product": value}
    before = json.dumps(content)
    path.write_text(before)
    with pytest.raises(ValueError, match=rf"products_tiny.json: there is no table of the cell a \({reason}.*mend or"):
        run("products")
    assert experiment == ["a"] and path.read_text() == before


def test_runs_that_diverged_have_tables(experiment, run, tmp_path):
    run("products", "--only", "a")
    path = tmp_path / "results/products_tiny.json"
    content = json.loads(path.read_text())
    cell = content["cells"].pop("a")
    for seed, product in enumerate((1.0, float("nan"), 2.0)):
        own = {"settings": cell["settings"] | {"seed": seed}, "metrics": cell["metrics"] | {"product": product}}
        content["cells"][f"a_seed_{seed}"] = cell | own
    path.write_text(json.dumps(content))
    assert "nan ± nan" in run("products", "--only", "b")


def test_a_file_in_place_of_the_output_is_named_first(experiment, run, tmp_path):
    run("products")
    (tmp_path / "file").write_text("")
    for output in ("file", "file/x"):
        with pytest.raises(NotADirectoryError, match="output .*/file.* cannot be made: .*/file is a file"):
            reproduce("products", "--output", tmp_path / output, "--runs", tmp_path / "runs")
    assert experiment == ["a", "b"]


def test_cells_are_listed(experiment, run, tmp_path):
    assert run("products", "--list_cells").split() == ["a", "b"]
    assert experiment == [] and not (tmp_path / "results").exists()


def test_results_as_json(experiment, run):
    tables = json.loads(run("products", "--json"))
    assert [table["rows"][0] for table in tables] == [
        {"name": "a", "factor 3": "3.0 / 7.0"},
        {"cell": "a", "product": "3.0", "product, paper": "7.0", "seconds": "0"},
    ]


def test_help_explains_fields(capsys):
    assert main(["reproduce", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS) and "--overwrite" in printed
    assert main(["reproduce", "copying", "--help-all"]) == 0
    printed = capsys.readouterr().out
    assert "scale (`str`)" in printed and "source_length (`int`)" in printed and "window_size (`int`)" in printed


def test_run_experiment_refuses_unknown_names(tmp_path):
    with pytest.raises(ValueError, match="unknown experiment 'copyng'; did you mean 'copying'?"):
        run_experiment("copyng", ReproductionArguments(output=str(tmp_path / "results")), {})
    assert not (tmp_path / "results").exists()


# The experiments


def cells_of(name, scale="tiny", **settings):
    return plan_cells(EXPERIMENTS[name], ReproductionArguments(scale=scale), settings)


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"The house is red {i}.\tDům je červený {i}.\n" for i in range(40)), encoding="utf-8")
    return str(path)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"here is sentence {i} of a very short text about nothing" for i in range(80)))
    return str(path)


@pytest.fixture
def words(tmp_path):
    """A file in the words of the tokenizer of `checkpoints`."""
    path = tmp_path / "words.txt"
    path.write_text("\n\n".join(" ".join(f"w{(i * j) % 90}" for j in range(1, 30)) for i in range(1, 80)))
    return str(path)


# Each row of EXPERIMENTS, whatever it is; fields are given by their names.

# Sizes that make any experiment run in seconds.
SMALLEST = {
    "source_length": 7, "num_symbols": 8, "vocab_size": 150, "max_length": 16, "max_validation_tokens": 1000,
    "max_test_pairs": 4, "num_beams": 1, "hidden_size": 16, "head_size": 4, "intermediate_size": 16, "num_layers": 2,
    "train_size": 200, "test_size": 20, "max_steps": 2, "batch_size": 8, "stride": 4, "window_size": 2,
    "strides": [4], "windows": [2], "sparsities": [0.5], "depths": [1], "masks": ["dam_s", "window"], "lengths": [16],
    "steps": 2, "recover": 2, "batch_tokens": 64, "checkpoint_steps": 2, "targets": [0.5], "max_train_examples": 8,
    "max_validation_examples": 4, "num_train_epochs": 1.0, "search_steps": 2,
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", EXPERIMENTS)


def known_fields(name, values):
    """Those of the values that are settings of the experiment."""
    return {field.name: values[field.name] for field in fields(EXPERIMENTS[name].arguments) if field.name in values}


@pytest.fixture
def inputs(text, words, pairs, checkpoints, glue_folder, squad_folder, swag_folder, tmp_path):
    """`inputs(name)`: settings that name the data of an experiment, and the model that it starts from."""
    (tmp_path / "cells/stock").mkdir(parents=True)
    (tmp_path / "cells/stock/model").symlink_to(checkpoints["stock"])
    values = {"text": text, "validation": text, "train": pairs, "test": pairs, "model": checkpoints["stock"]}
    values["base_model"] = checkpoints["long"]
    tasks = {"models": str(tmp_path / "cells"), "systems": ["stock"], "data": str(glue_folder), "tasks": ["rte"]}
    own = {"minilm_tasks": tasks | {"max_length": 32}}
    own["minilm_task_masks"] = {"data": str(glue_folder), "tasks": ["rte"], "max_length": 32, "sparsity": 0.5}
    reviews = tmp_path / "reviews"
    reviews.mkdir()
    for split, words_of in {"train": ("w1", "w2"), "test": ("w3", "w4")}.items():
        rows = [{"text": " ".join([words_of[i % 2]] * (4 + 3 * i)), "label": i % 2} for i in range(12)]
        (reviews / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own["long_reviews"] = {"reviews": str(reviews), "masked": [checkpoints["window"]], "lengths": [16, 48]}
    own["long_reviews"]["longer_than"] = 16
    own["long_review_masks"] = {"reviews": str(reviews), "max_length": 16, "longer_than": 16, "sparsity": 0.5}
    own["long_review_masks"]["train_examples"] = 4
    # These start from a model that has its words already.
    for name in (
        "minilm",
        "minilm_mixers",
        "minilm_settings",
        "sparsebert_table1",
        "sparsebert_table2",
        "sparsebert_table3",
        "sparsebert_figure7",
    ):
        own[name] = {"text": words, "validation": words}
    own["minilm_settings"] |= {"masks": ["dam_s"], "sparsities": [0.6]}
    own["sparsebert_table2"] |= {"squad": str(squad_folder), "squad2": str(squad_folder), "swag": str(swag_folder)}
    own["minilm_mixers"] |= {"replaced": [0, 1, 2]}
    return lambda name: known_fields(name, values | own.get(name, {}))


@EVERY
def test_cells_of_every_scale_can_run(name, inputs):
    experiment, named = EXPERIMENTS[name], set()
    assert {"tiny", "paper"} <= experiment.scales.keys()
    for scale, own in experiment.scales.items():
        assert own.keys() <= {field.name for field in fields(experiment.arguments)}
        cells = cells_of(name, scale, **inputs(name))  # checks each of them
        assert cells and json.loads(json.dumps(cells)) == cells
        assert len({json.dumps(cell, sort_keys=True) for cell in cells.values()}) == len(cells)
        named |= {unseeded(cell) for cell in cells}
    assert experiment.published.keys() <= named
    assert {metric for values in experiment.published.values() for metric in values} <= experiment.columns.keys()


@EVERY
def test_cells_are_counted_before_there_is_a_model(name):
    experiment = EXPERIMENTS[name]
    absent = known_fields(name, {"model": "absent", "base_model": "absent"})
    for own in experiment.scales.values():
        assert experiment.cells(experiment.arguments(**{**own, **absent}))


@EVERY
def test_every_setting_is_explained_and_plain(name):
    arguments = EXPERIMENTS[name].arguments
    assert {field.name for field in fields(arguments)} <= explanations(arguments).keys()
    assert all(field.init and not isinstance(field.type, str) for field in fields(arguments))
    assert not {field.name for field in fields(arguments)} & {field.name for field in fields(ReproductionArguments)}
    arguments()


@EVERY
def test_smallest_run(name, inputs, tmp_path, monkeypatch):
    experiment = EXPERIMENTS[name]
    settings = known_fields(name, SMALLEST) | inputs(name) | {"seeds": [5]}
    cell = next(iter(cells_of(name, **settings)))
    options = ReproductionArguments(output=str(tmp_path / "results"), runs=str(tmp_path / "runs"), only=cell)
    seeds, seed = set(), random.seed
    with monkeypatch.context() as recording:
        recording.setattr(random, "seed", lambda value: seeds.add(value) or seed(value))
        tables = run_experiment(name, options, settings)
    # 0 is that of what all seeds share, and 42 that of a Trainer which only evaluates.
    assert {5} <= seeds <= {0, 5} | ({42} if name == "minilm_task_masks" else set())
    files = result_files(name, options)
    assert [path.suffix for path in files][:2] == [".json", ".md"] and all(path.stat().st_size for path in files)
    (made,) = read(files[0]).values()
    values = made["settings"] | made["metrics"]
    assert set(experiment.plot) | set(experiment.layout or ()) <= values.keys()
    assert experiment.layout is None or experiment.layout[2] in experiment.columns
    # What only some settings give, such as the score of a task, may be missing; headings are of what is there.
    there = [heading for metric, (heading, _) in experiment.columns.items() if metric in made["metrics"]]
    assert there and set(there) <= set(tables[-1].columns)
    assert {"seconds", "cpu_seconds"} < made["metrics"].keys()
    assert all(isinstance(value, (int, float, str)) for value in made["metrics"].values())
    for path in (tmp_path / "runs").rglob("recipe.yaml"):  # of a fine-tuning
        recipe = yaml.safe_load(path.read_text())
        trained = recipe["data"] | recipe["training"]
        own = {"seed", "max_length"}
        if name != "sparsebert_table2":  # whose rates are those of the pre-training, and its data a part of the task's
            own |= {"learning_rate", "num_train_epochs", "warmup_steps", "max_train_examples"}
        own &= made["settings"].keys()
        assert {each: trained.get(each) for each in own} == {each: made["settings"][each] for each in own}
    # A finished cell is reused.
    run_experiment(name, options, settings)
    assert read(files[0])[cell] == made


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if known_fields(name, {"bf16": True})])
def test_models_are_trained_in_bfloat16(name, inputs, tmp_path):
    settings = known_fields(name, SMALLEST) | inputs(name) | {"bf16": True}
    cell = next(iter(cells_of(name, **settings).values()))
    folder = tmp_path / "runs/cells/cell"
    folder.mkdir(parents=True)
    computed = set()

    def record(module, args, output):
        if isinstance(module, torch.nn.Linear) and output.requires_grad:
            computed.add(output.dtype)

    handle = torch.nn.modules.module.register_module_forward_hook(record)
    try:
        EXPERIMENTS[name].run(cell, folder)
    finally:
        handle.remove()
    assert computed == {torch.bfloat16}


def test_seeds_of_a_cell_are_compared_with_those_of_the_baseline():
    losses = {"dense": [90.0, 91.0, 89.0], "star_2": [80.0, 81.5, 80.5]}
    settings = {"series": "any", "sparsity": 0.0}
    cells = {
        f"{name}_seed_{seed}": {
            "settings": settings | {"seed": seed},
            "metrics": {"perplexity": value, "seconds": 1.0},
        }
        for name, values in losses.items()
        for seed, value in enumerate(values)
    }
    means, every = experiment_tables(EXPERIMENTS["language_modelling"], "tiny", cells)
    rows = {row["cell"]: row for row in means.as_json()["rows"]}
    assert rows["star_2"]["perplexity"] == "80.67 ± 0.76" and rows["star_2"]["seeds"] == "3"
    test = paired_difference(losses["star_2"], losses["dense"])
    assert rows["star_2"]["p (Holm)"] == f"{test['p']:.3g}" and rows["dense"]["minus dense"] == ""
    assert len(every.rows) == 6


def test_an_accuracy_of_the_paper_stands_beside_the_mean_over_seeds():
    cells = {
        f"star_depth_1_seed_{seed}": {
            "settings": {"series": "star", "depth": 1, "seed": seed}, "metrics": {"second_half_accuracy": value},
        }
        for seed, value in enumerate((0.1, 0.3))
    }  # fmt: skip
    pivot, means, _ = experiment_tables(EXPERIMENTS["copying"], "tiny", cells)
    assert pivot.rows == [["star", "20.0% ± 14.1% / 0.8%"]]
    assert means.as_json()["rows"][0]["accuracy, second half"] == "20.0% ± 14.1%"


def finished(settings, metrics):
    """Cells as the runner keeps them, from `(settings, metrics)`."""
    return {str(i): {"settings": s, "metrics": m} for i, (s, m) in enumerate(zip(settings, metrics, strict=True))}


def test_masks_of_a_trained_model_are_compared_over_seeds():
    cosines = {"dam_s": [0.95, 0.96, 0.955], "window": [0.93, 0.935, 0.934], "random": [0.5, 0.7, 0.6]}
    settings, metrics = [], []
    for mask, values in (cosines | {"dense": [0.999, 0.999, 0.999]}).items():
        for seed, cosine in enumerate(values):
            sparsity = 0.0 if mask == "dense" else 0.9
            settings.append({"mask": mask, "length": 128, "sparsity": sparsity, "seed": seed})
            numbers = {"removed": sparsity, "cosine_before": cosine - 0.1, "cosine": cosine}
            metrics.append(numbers | {"spearman": 0.86, "stsb_removed": 0.25, "speed_up": 1.5})
    (table,) = EXPERIMENTS["minilm"].summary(finished(settings, metrics))
    metrics[-1]["spearman_original"] = 0.867
    (same,) = EXPERIMENTS["minilm"].summary(finished(settings, metrics))
    *others, original = same.as_json()["rows"]
    assert others == table.as_json()["rows"] and original["mask"] == "none, no recovery"
    assert original["STS-B Spearman"] == "86.7"
    rows = {row["mask"]: row for row in table.as_json()["rows"]}
    assert table.title == "128 tokens, 90% to remove" and list(rows) == ["dense", "dam_s", "window", "random"]
    assert rows["dam_s"]["cosine after"] == "0.9550 ± 0.0050" and rows["dam_s"]["p (Holm)"] == ""
    found = paired_difference(cosines["dam_s"], cosines["window"])
    text = f"{found['difference']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]"
    assert rows["window"]["dam_s minus this"] == text and rows["dense"]["removed"] == "0.0%"
    assert rows["dam_s"]["STS-B Spearman"] == "86.0 ± 0.0" and rows["dam_s"]["removed on STS-B"] == "25.0%"
    tests = [paired_difference(cosines["dam_s"], values)["p"] for values in ([0.999] * 3, *list(cosines.values())[1:])]
    assert [rows[name]["p (Holm)"] for name in ("dense", "window", "random")] == [f"{p:.3g}" for p in holm(tests)]


def test_changed_settings_are_cells_with_a_seed():
    experiment = EXPERIMENTS["minilm_settings"]
    cells = experiment.cells(experiment.arguments(seeds=[0, 1], lengths=[128], changes=["unchanged", "steps_20"]))
    assert {unseeded(name) for name in cells} == {"dam_s_128_0.9_unchanged", "dam_s_128_0.9_steps_20"}
    assert cells["dam_s_128_0.9_steps_20_seed_1"] == cells["dam_s_128_0.9_unchanged_seed_1"] | {
        "steps": 20,
        "recover": 0,
        "change": "steps_20",
    }


def test_cells_have_only_the_settings_that_their_masks_depend_on():
    """So that other settings of the search leave the results of the other masks as they are."""
    experiment = EXPERIMENTS["minilm"]
    cells = experiment.cells(experiment.arguments(seeds=[0], lengths=[128], masks=["dam_s", "attention", "window"]))
    assert [("objective" in cell, "recover_from" in cell) for cell in cells.values()] == [
        (True, True),
        (False, True),
        (False, False),
    ]


@pytest.mark.parametrize("masks", [["window"], ["dam_s", "dam_u"], []], ids=str)
def test_settings_are_those_of_one_searched_mask(masks):
    with pytest.raises(ValueError, match="masks must hold one of dam_s, dam_u, dam_b, vertical_slash, got"):
        cells_of("minilm_settings", masks=masks)


@pytest.mark.parametrize("field", [{"objective": "all"}, {"steps": 0}, {"sparsity_scope": "layer"}], ids=str)
def test_settings_that_no_cell_has_are_checked_too(field):
    experiment = EXPERIMENTS["minilm"]
    with pytest.raises(ValueError, match=next(iter(field))):
        experiment.cells(experiment.arguments(masks=["window"], **field))


def test_settings_are_compared_with_the_unchanged_ones():
    before = {"unchanged": [0.84, 0.85, 0.845], "dam_u": [0.85, 0.855, 0.857]}
    after = {"unchanged": [0.94, 0.95, 0.945], "recover_last": [0.93, 0.935, 0.937]}
    settings, metrics = [], []
    for change in ("unchanged", "dam_u", "recover_last"):
        for seed in range(3):
            settings.append({"length": 128, "sparsity": 0.9, "seed": seed, "change": change})
            low = before.get(change, before["unchanged"])[seed]
            numbers = {"removed": 0.9, "cosine_before": low, "cosine": after.get(change, before["dam_u"])[seed]}
            metrics.append(numbers | {"cpu_seconds": 80.0})
    found = EXPERIMENTS["minilm_settings"].summary(finished(settings, metrics))
    for table, values, changed in zip(found, (before, after), ("dam_u", "recover_last"), strict=True):
        rows = {row["change"]: row for row in table.as_json()["rows"]}
        assert list(rows) == ["unchanged", changed]
        test = paired_difference(values[changed], values["unchanged"])
        assert rows[changed]["p (Holm)"] == f"{test['p']:.3g}" and rows["unchanged"]["minus unchanged"] == ""
        heading = "cosine before recovery" if changed == "dam_u" else "cosine after recovery"
        assert rows[changed][heading].startswith(f"{sum(values[changed]) / 3:.4f}")


def test_long_texts_are_compared_with_truncated_ones():
    settings, metrics = [], []
    for length, accuracy in ((512, 0.80), (2048, 0.85)):
        for seed in (1, 2):
            settings.append({"system": f"dense, {length} tokens", "split": length == 512, "seed": seed})
            numbers = {"accuracy": accuracy + 0.01 * seed, "ms_per_text": length / 10, "input_sparsity": 0.5}
            metrics.append(numbers | ({"split_accuracy": 0.82, "split_ms_per_text": 99.0} if length == 512 else {}))
    (table,) = EXPERIMENTS["long_reviews"].summary(finished(settings, metrics))
    rows = {row["system"]: row for row in table.as_json()["rows"]}
    assert list(rows) == ["dense, 512 tokens, truncated", "dense, 512 tokens, split", "dense, 2048 tokens"]
    assert rows["dense, 2048 tokens"]["minus truncated"].startswith("+5.0 [")
    assert rows["dense, 512 tokens, truncated"]["accuracy"] == "81.5 ± 0.7"
    assert rows["dense, 2048 tokens"]["removed on inputs"] == "50.0%"


@pytest.fixture
def split_is_one(monkeypatch):
    """Classifiers that say 1 of texts that are split, and 0 of others."""

    def classify(model, tokenizer, texts, max_length, split=False):
        return [int(split)] * len(texts)

    monkeypatch.setattr("studies.shared.review_classifiers.classify", classify)


def test_only_long_texts_are_used(inputs, split_is_one, tmp_path):
    settings = known_fields("long_reviews", SMALLEST) | inputs("long_reviews")
    cell = next(iter(cells_of("long_reviews", **settings).values()))
    with pytest.raises(ValueError, match="no text of train has more than 39 tokens"):
        EXPERIMENTS["long_reviews"].run(cell | {"longer_than": 39}, tmp_path)
    metrics = EXPERIMENTS["long_reviews"].run(cell | {"longer_than": 18, "bf16": True}, tmp_path)
    assert metrics["test_examples"] == 7  # of 12, and 4 of them have the label 1
    assert (metrics["accuracy"], metrics["split_accuracy"]) == pytest.approx((3 / 7, 4 / 7))


def test_masks_are_searched_on_further_texts(inputs, split_is_one, tmp_path):
    settings = known_fields("long_review_masks", SMALLEST) | inputs("long_review_masks")
    (cell,) = cells_of("long_review_masks", **settings, seeds=[1]).values()
    metrics = EXPERIMENTS["long_review_masks"].run(cell | {"longer_than": 18}, tmp_path)
    for way, share in (("truncated", 3 / 7), ("split", 4 / 7)):
        assert [metrics[f"accuracy_{name}_{way}"] for name in ("dense", "window_recovered")] == [share] * 2
    labeled, unlabeled = ((tmp_path / name).read_text() for name in ("data/train.jsonl", "unlabeled.jsonl"))
    assert len(labeled.splitlines()) == 4 and len(unlabeled.splitlines()) > 1
    texts = [
        {json.loads(line)[name] for line in file.splitlines()}
        for file, name in ((labeled, "sentence"), (unlabeled, "text"))
    ]
    assert not texts[0] & texts[1]
    for names, words in {
        ("data/train.jsonl", "unlabeled.jsonl"): {"w1", "w2"},  # of the split train
        ("data/dev.jsonl", "test.jsonl"): {"w3", "w4"},
    }.items():
        text = "".join((tmp_path / name).read_text() for name in names)
        assert {word for word in ("w1", "w2", "w3", "w4") if word in text} == words
    masks = {path.parent.name: SparseMask.from_pretrained(path.parent) for path in tmp_path.glob("*/mask_config.json")}
    assert masks.keys() == {"learned", "learned_recovered", "window_recovered"}
    assert torch.equal(masks["learned"].to_table(), masks["learned_recovered"].to_table())
    assert masks["window_recovered"].metadata["pattern"] == "window" and masks["learned"].metadata["search"] == "dam_s"
    with pytest.raises(ValueError, match=r"unlabeled_examples: all \d+ long texts are used"):
        EXPERIMENTS["long_review_masks"].run(cell | {"train_examples": 100}, tmp_path)


def test_systems_of_long_texts_have_names_of_their_own():
    experiment = EXPERIMENTS["long_reviews"]
    with pytest.raises(ValueError, match="masked: runs/two/dam_s/model would be the second system .* 'dam_s'"):
        experiment.cells(experiment.arguments(masked=["runs/one/dam_s/model", "runs/two/dam_s/model"]))


def test_parts_of_a_text_are_averaged(checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["stock"])
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoints["stock"], num_labels=3).eval()
    texts = [" ".join(f"w{(7 * i + j) % 90}" for j in range(5 * i + 1)) for i in range(6)]
    expected = []
    for text in texts:
        words = text.split()
        parts = [" ".join(words[start : start + 6]) for start in range(0, len(words), 6)]
        with torch.no_grad():
            probs = [model(**tokenizer(part, return_tensors="pt")).logits.softmax(-1) for part in parts]
        expected.append(int(torch.cat(probs).mean(0).argmax()))
    assert classify(model, tokenizer, texts, 8, split=True) == expected
    with torch.no_grad():
        first = [model(**tokenizer(" ".join(text.split()[:6]), return_tensors="pt")).logits.argmax() for text in texts]
    assert classify(model, tokenizer, texts, 8) == first


def test_tasks_are_compared_over_seeds():
    scores = {("rte", "dense"): [0.6, 0.62], ("rte", "mask"): [0.58, 0.61]}
    scores |= {("cola", "dense"): [0.4, 0.44], ("cola", "mask"): [0.43, 0.44]}
    settings, metrics = [], []
    for (task, system), values in scores.items():
        for seed, value in enumerate(values):
            settings.append({"task": task, "system": system, "seed": seed, "baseline": "dense"})
            metrics.append({"score": value, "train_examples": 100, "input_sparsity": 0.3 * (system == "mask")})
    (table,) = EXPERIMENTS["minilm_tasks"].summary(finished(settings, metrics))
    rows = {(row["task"], row["system"]): row for row in table.as_json()["rows"]}
    assert len(rows) == 6 and rows["mean", "mask"]["score"] == "51.5 ± 1.4"
    assert rows["rte", "mask"]["minus the first"].startswith("-1.5 [") and rows["rte", "dense"]["p (Holm)"] == ""
    assert rows["rte", "mask"]["removed on inputs"] == "30.0%" and rows["mean", "mask"]["removed on inputs"] == ""
    assert [system for task, system in rows if task == "mean"] == ["dense", "mask"]
    # A task with a single seed is not in the mean, unless no task has several.
    single = [{"task": "sst2", "system": system, "seed": 0, "baseline": "dense"} for system in ("dense", "mask")]
    (table,) = EXPERIMENTS["minilm_tasks"].summary(finished(settings + single, metrics + metrics[:2]))
    mean = {row["system"]: row for row in table.as_json()["rows"] if row["task"] == "mean"}
    assert mean["mask"] == rows["mean", "mask"] and mean["dense"] == rows["mean", "dense"]
    of_first = [index for index, each in enumerate(settings) if each["seed"] == 0]
    (table,) = EXPERIMENTS["minilm_tasks"].summary(
        finished(*([values[index] for index in of_first] for values in (settings, metrics)))
    )
    mean = {row["system"]: row["score"] for row in table.as_json()["rows"] if row["task"] == "mean"}
    assert mean == {"dense": "50.0", "mask": "50.5"}
    # Without a seed that has all tasks, there is no mean.
    settings[-1]["seed"], settings[-2]["seed"] = 7, 8
    (table,) = EXPERIMENTS["minilm_tasks"].summary(finished(settings, metrics))
    assert [row["system"] for row in table.as_json()["rows"] if row["task"] == "mean"] == ["dense"]


def test_masks_of_tasks_are_compared_with_the_learned_one():
    scores = {"dense": [0.84, 0.83], "learned": [0.83, 0.83], "window": [0.1, 0.2], "window_recovered": [0.2, 0.3]}
    removed = {"dense": 0.0, "learned": 0.6, "window": 0.62, "window_recovered": 0.62}

    def tables(tasks=("stsb",)):
        metrics = [
            {f"score_{name}": values[seed] for name, values in scores.items()}
            | {f"removed_{name}": removed.get(name, 0.6) for name in scores}
            for seed in (0, 1)
        ]
        half = [{name: value / 2 for name, value in each.items()} for each in metrics]
        metrics += half * (len(tasks) - 1)
        settings = [{"task": task, "seed": seed} for task in tasks for seed in (0, 1)]
        return EXPERIMENTS["minilm_task_masks"].summary(finished(settings, metrics))

    means, differences = tables()
    rows = {row["mask"]: row for row in means.as_json()["rows"]}
    assert list(rows) == ["dense", "learned", "window, recovered", "window", "seeds"] and rows["seeds"]["stsb"] == "2"
    assert rows["window"]["removed on inputs"] == "62.0%" and rows["window"]["stsb"] == "15.0 ± 7.1"
    found = {(row["mask"], row["than"]): row["more"] for row in differences.as_json()["rows"]}
    assert found.keys() == {("learned", "dense"), ("learned", "window, recovered")}
    assert found["learned", "dense"].startswith("-0.5 [")
    # A mask whose weights were not adapted is compared with one for which they were not, either.
    scores |= {"attention": [0.5, 0.4], "learned_recovered": [0.84, 0.84]}
    found = {(row["mask"], row["than"]): row["more"] for row in tables()[1].as_json()["rows"]}
    others = {("learned, recovered", other) for other in ("dense", "learned", "window, recovered")}
    assert found.keys() == {("learned", "attention"), *others}
    assert found["learned", "attention"].startswith("+38.0 [")
    # The mean over tasks is a further task.
    means, differences = tables(("stsb", "rte"))
    assert {row["mask"]: row["mean"] for row in means.as_json()["rows"]}["attention"] == "33.8 ± 5.3"
    assert [row["task"] for row in differences.as_json()["rows"]][::4] == ["stsb", "rte", "mean"]


def test_scores_through_adapted_weights_are_those_after_the_recovery(inputs, tmp_path, monkeypatch):
    def search(recipe):
        mask = recipe["data"].get("mask")
        names = ("dense", "given", "given, recovered") if mask else ("dense", "learned", "learned, recovered")
        scores = {name: {"score": i + 10 * bool(mask), "input_sparsity": i / 10} for i, name in enumerate(names)}
        return {"seconds": {"search": 1.0}, "agreement": scores}

    monkeypatch.setattr("studies.trained_models.minilm_task_masks.search_post_hoc", search)
    trained = {"train_examples": 8, "train_seconds": 1.0, "main_metric": "accuracy"}
    monkeypatch.setattr("studies.trained_models.minilm_task_masks.finetuned_cell", lambda *_: dict(trained))
    cell = next(iter(cells_of("minilm_task_masks", **inputs("minilm_task_masks")).values()))
    metrics = EXPERIMENTS["minilm_task_masks"].run(cell, tmp_path)
    expected = {"dense": (0, 0.0), "learned": (1, 0.1), "learned_recovered": (2, 0.2), "window_recovered": (12, 0.2)}
    for prefix, index in (("score_", 0), ("removed_", 1)):
        found = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        assert found == {name: values[index] for name, values in expected.items()}
    metrics = EXPERIMENTS["minilm_task_masks"].run(cell | {"recover": 0}, tmp_path)
    assert "score_window_recovered" not in metrics and "score_learned" in metrics


def test_split_texts_through_a_mask_are_compared_with_truncated_ones():
    accuracy = {"dense_truncated": 0.80, "dense_split": 0.82, "learned_recovered_split": 0.83}
    times = {"dense_truncated": 100.0, "dense_split": 150.0, "learned_recovered_split": 99.0}
    metrics = [
        {f"accuracy_{name}": value + 0.01 * seed for name, value in accuracy.items()}
        | {f"ms_per_text_{name}": value for name, value in times.items()}
        | {"removed": 0.9}
        for seed in (0, 1)
    ]
    (table,) = EXPERIMENTS["long_review_masks"].summary(finished([{"seed": 0}, {"seed": 1}], metrics))
    rows = {row["system"]: row for row in table.as_json()["rows"]}
    assert list(rows) == ["learned, recovered, split", "dense, truncated", "dense, split"]  # the fastest first
    assert rows["learned, recovered, split"]["minus dense, truncated"].startswith("+3.0 [")
    assert rows["learned, recovered, split"]["minus dense, split"].startswith("+1.0 [")
    assert (
        rows["dense, truncated"]["minus dense, truncated"] == "" and rows["dense, split"]["accuracy"] == "82.5 ± 0.7"
    )


def test_the_original_model_is_a_system(inputs, checkpoints, tmp_path):
    settings = inputs("minilm_tasks") | {"systems": ["stock", "original"], "original": checkpoints["stock"]}
    cells = cells_of("minilm_tasks", **settings)
    assert cells["rte_original_seed_1"]["model"] == checkpoints["stock"] != cells["rte_stock_seed_1"]["model"]


def test_draws_of_a_seed_are_one_system():
    losses = {"dense": [2.0, 2.1, 2.2], "random_drop, draw 0": [2.1, 2.3, 2.3], "random_drop, draw 1": [2.3, 2.5, 2.5]}
    settings, metrics = [], []
    for system, values in losses.items():
        for seed, loss in enumerate(values):
            settings.append({"system": system, "seed": seed})
            metrics.append({"mlm_loss": loss, "sparsity": 0.01})
    for seed, p in enumerate((0.5, 0.6)):
        settings.append({"system": "soft", "seed": seed})
        metrics.append({"p_diagonal": p, "p_diagonal_low": 0.4, "p_diagonal_high": 0.7})
    importance, table = EXPERIMENTS["sparsebert_table1"].summary(finished(settings, metrics))
    (dense, random_drop) = table.as_json()["rows"]
    assert (dense["system"], random_drop["system"]) == ("dense", "random_drop") and random_drop["seeds"] == "3"
    test = paired_difference([2.2, 2.4, 2.4], losses["dense"])
    assert random_drop["MLM loss"] == "2.333 ± 0.115" and random_drop["p (Holm)"] == f"{test['p']:.3g}"
    assert importance.rows == [
        ["0", "0.500 [0.400, 0.700]"], ["1", "0.600 [0.400, 0.700]"], ["all", "0.550 [0.000, 1.000]"],
    ]  # fmt: skip


def test_losses_are_drawn_above_those_of_dense_attention(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("studies.sparsebert_paper.sparsebert_table1.plot_values", lambda *all: drawn.append(all))
    losses = {"dense": [2.0, 2.5], "random_drop, draw 0": [2.25, 2.75], "random_drop, draw 1": [2.75, 2.75]}
    cells = [
        ({"system": name, "seed": seed}, {"mlm_loss": loss, "sparsity": 0.0})
        for name, values in (losses | {"no_diag": [0.0, 0.0, 1.0], "soft": [9.0]}).items()
        for seed, loss in enumerate(values)
    ]
    EXPERIMENTS["sparsebert_table1"].draw(finished(*zip(*cells, strict=True)), tmp_path / "plot.png", "title")
    ((panels, *_),) = drawn
    assert list(panels.values()) == [{"dense": [0, 0], "random_drop": [0.5, 0.25], "no_diag": [-2, -2.5]}]


def test_masks_are_compared_with_those_without_their_diagonal():
    losses = {
        "dense": [3.7],
        "star": [4.0, 4.1, 4.2],
        "star_no_diag": [4.01, 4.13, 4.22, 4.9],
        "fixed_no_diag": [3.8],
        "fixed": [3.9],
        "strided": [3.9],
        "dam_s_keep_diag_target_0.912": [3.8],
        "dam_s_no_diag_target_0.912": [3.85],
        "dam_s_target_0.912": [3.84],
    }
    cells = [
        ({"system": name, "seed": seed}, loss) for name, values in losses.items() for seed, loss in enumerate(values)
    ]
    settings, values = zip(*cells, strict=True)
    metrics = [{"mlm_loss": loss, "sparsity": 0.9} for loss in values]
    _, table = EXPERIMENTS["sparsebert_table3"].summary(finished(settings, metrics))
    fixed, star, dam_s = table.as_json()["rows"]
    assert (fixed["mask"], star["mask"], dam_s["mask"]) == ("fixed", "star", "dam_s, target 0.912")
    test = paired_difference([4.01, 4.13, 4.22], losses["star"])
    assert star["difference"] == "+0.020 [{:+.3f}, {:+.3f}]".format(test["low"], test["high"])
    assert star["without the diagonal"] == "4.120 ± 0.105" and star["p (Holm)"] == f"{test['p']:.3g}"
    assert fixed["difference"] == "-0.100" and not fixed["p (Holm)"] and dam_s["difference"] == "+0.050"
    assert (dam_s["GLUE, paper"], dam_s["without, paper"]) == ("80.5", "80.9") and star["seeds"] == "3"


@pytest.mark.parametrize("name", ["minilm_tasks", "minilm_task_masks", "minilm_mixers", "mixers"])
def test_tasks_without_data_are_refused_first(name, inputs):
    settings = inputs(name) | ({"tasks": ["rte", "mrpc"]} if name.startswith("minilm_task") else {"task": "mrpc"})
    settings["data"] = inputs("minilm_tasks")["data"]
    with pytest.raises(ValueError, match="task mrpc: split 'train' is missing"):
        cells_of(name, **settings)


@pytest.mark.parametrize(
    "name, field", [("minilm", "stsb"), ("long_reviews", "reviews"), ("long_review_masks", "reviews")]
)
def test_folders_that_are_missing_or_empty_are_named(name, field, inputs, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{field}: there is no folder 'nowhere'"):
        cells_of(name, **inputs(name) | {field: "nowhere"})
    with pytest.raises(ValueError, match=f"{field} .* lacks the file"):
        cells_of(name, **inputs(name) | {field: str(tmp_path)})


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("sparsebert_table3", {"targets": [0.99]}, "target_sparsity must be at most 0.9690, got 0.99"),
        ("minilm_task_masks", {"sparsity": 0.98}, "target_sparsity must be at most 0.8789, got 0.98"),
        ("long_review_masks", {"controls": ["wndow"]}, "controls"),
        ("minilm", {"masks": ["dam_u"], "sparsities": [0.98]}, "target_sparsity must be at most 0.9690, got 0.98"),
        ("sparsebert_table3", {"search_end": 2}, "search_end must be a number from 0 to 1, got 2"),
        ("sparsebert_figure7", {"initial_decay": -1}, "initial_decay"),
        ("sparsebert_table1", {"mask_logit_scale": 0}, "mask_logit_scale"),
    ],
)
def test_masks_that_cannot_be_are_refused_first(name, settings, message, inputs):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        cells_of(name, **inputs(name) | settings)


@pytest.mark.parametrize("name", ["sparsebert_table3", "sparsebert_figure7"])
def test_searches_with_a_target_can_start_elsewhere(name, inputs):
    with pytest.raises(ValueError, match="initial_decay 0.0 excludes start_from_attention"):
        cells_of(name, **inputs(name), initial_decay=0.0)
    start = {"start_from_attention": False, "initial_decay": 0.0, "initial_sparsity": 0.0}
    cells = cells_of(name, **inputs(name), **start, target_logit_scale=70.0)
    models = [cell["model"] if "model" in cell else cell for cell in cells.values()]
    searched = [model for model in models if "target_sparsity" in model or model.get("stage") == "one_stage"]
    assert searched and all(model["initial_decay"] == model["initial_sparsity"] == 0 for model in searched)
    own = "mask_logit_scale" if name == "sparsebert_table3" else "target_logit_scale"
    assert {model[own] for model in searched} == {70.0}
    if name == "sparsebert_figure7":
        searched = [sparsebert_figure7._one_stage(model) for model in searched]
    of_mask = [model for model in searched if "hard" in model]  # the others train P
    assert of_mask and all(model["hard"] and model["noise_scale"] == 0 for model in of_mask)


@pytest.mark.parametrize("name", ["minilm", "minilm_task_masks"])
def test_searches_have_the_settings_of_their_cells(name, inputs, tmp_path, monkeypatch):
    recipes = []

    def search(recipe):
        recipes.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"studies.{name}.search_post_hoc", search)
    settings = known_fields(name, SMALLEST) | inputs(name)
    if name == "minilm":
        settings |= {"masks": ["dam_s", "attention", "window", "dense"], "recover_from": 0.25, "shortest": 12}
    else:
        monkeypatch.setattr("studies.trained_models.minilm_task_masks.finetuned_cell", lambda *_: {})
    shared = {item.name for kind in (PostHocArguments, SparseBertConfig) for item in fields(kind)} - {"model", "mask"}
    shared -= {"learning_rate"} if name == "minilm_task_masks" else set()  # that of its fine-tuning
    for cell in cells_of(name, **settings).values():
        with pytest.raises(KeyboardInterrupt):
            EXPERIMENTS[name].run(cell, tmp_path)
        recipe = recipes.pop()
        given, own = recipe["data"] | recipe["model"], shared & cell.keys()
        assert {each: given.get(each) for each in own} == {each: cell[each] for each in own}
        assert given.get("target_sparsity", 0.0) == cell["sparsity"]
        if name == "minilm":
            assert (given["data"], given["max_length"], given["batch_size"]) == (cell["text"], 16, 4)
            assert given["mask"] == cell["mask"] if "mask" in given else given["search"] == "dam_s"


@pytest.mark.parametrize("mask", ["window", "dense"])
def test_cells_of_a_trained_model_have_what_was_found(mask, inputs, checkpoints, glue_folder, tmp_path):
    settings = known_fields("minilm", SMALLEST) | inputs("minilm") | {"masks": [mask], "stsb": str(glue_folder)}
    (cell,) = cells_of("minilm", **settings, seeds=[1]).values()
    metrics = EXPERIMENTS["minilm"].run(cell, tmp_path)
    found = json.loads((tmp_path / "model/metrics.json").read_text())
    before, after = (found["agreement"][name] for name in (own_mask(mask), RECOVERED.format(own_mask(mask))))
    assert before["cosine"] != after["cosine"]
    assert (metrics["cosine_before"], metrics["cosine"]) == (before["cosine"], after["cosine"])
    assert metrics["removed"] == found["sparsity"][own_mask(mask)] == pytest.approx(cell["sparsity"], abs=0.1)
    seconds = found["inference_seconds"]
    assert metrics["speed_up"] == pytest.approx(seconds["dense"] / seconds["masked"])
    pairs = glue.load("stsb", glue_folder, ["validation"])["validation"]
    for name, folder in {"spearman": tmp_path / "model", "spearman_original": checkpoints["stock"]}.items():
        model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        if name == "spearman" or mask == "dense":
            assert metrics[name] == pytest.approx(similarity(model, tokenizer, pairs)[0]["spearman"])


def test_replaced_layers_start_anew_and_the_others_from_the_checkpoint(inputs, tmp_path):
    settings = known_fields("minilm_mixers", SMALLEST) | inputs("minilm_mixers") | {"replaced": [1]}
    cells = cells_of("minilm_mixers", **settings, learning_rate=0.0, seeds=[1])
    weights = {}
    for name, cell in cells.items():
        (folder := tmp_path / "runs/cells" / name).mkdir(parents=True)
        EXPERIMENTS["minilm_mixers"].run(cell, folder)
        weights[cell["series"]] = load_file(folder / "model.safetensors")
    (path,) = tmp_path.glob("runs/checkpoint_*/model.safetensors")
    checkpoint, first = load_file(path), "bert.encoder.layer.0.attention.self."
    for series, found in weights.items():
        assert all(name.startswith(first) for name in checkpoint.keys() ^ found.keys()), series
        changed = {name for name in checkpoint.keys() & found.keys() if not torch.equal(checkpoint[name], found[name])}
        if series == "attention":
            assert {f"{first}{part}.weight" for part in ("query", "key", "value")} <= changed
        assert all(name.startswith(first) for name in changed), series


@pytest.mark.parametrize(
    "name, cell, own",
    [
        ("sparsebert_table1", "no_diag_seed_3", {"pattern": "no_diag"}),
        ("sparsebert_table1", "random_drop_1_seed_3", {"pattern": "random_drop", "mask_seed": 3001}),
        (
            "sparsebert_table1",
            "soft_seed_3",
            {"search": "soft", "mask_logit_scale": 7.0, "sparsity_weight": 0.0, "max_steps": 5},
        ),
        ("sparsebert_table3", "random_0.5_seed_3", {"pattern": "random", "mask_seed": 3}),
        ("sparsebert_table3", "dam_s_lambda_0.001_seed_3", {"search_end": 0.3, "mask_logit_scale": 7.0}),
        (
            "sparsebert_table3",
            "dam_u_layers_target_0.5_seed_3",
            {"search_end": 0.3, "mask_logit_scale": 9.0, "start_from_attention": True, "share_layers": False},
        ),
        (
            "sparsebert_figure7",
            "one_stage_0.5_seed_3",
            {"search_end": 0.3, "mask_logit_scale": 9.0, "start_from_attention": True, "target_sparsity": 0.5},
        ),
    ],
)
def test_cells_go_on_from_the_checkpoint_with_their_settings(name, cell, own, inputs, tmp_path, monkeypatch):
    recipes = []

    def pretrain(recipe):
        recipes.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("studies.shared.continued_pretraining.pretrain", pretrain)
    monkeypatch.setattr("studies.shared.continued_pretraining.shared_checkpoint", lambda *_: tmp_path)
    given = {"search_end": 0.3, "mask_logit_scale": 7.0, "target_logit_scale": 9.0, "search_steps": 5}
    settings = known_fields(name, SMALLEST | given) | inputs(name) | {"seeds": [3], "learning_rate": 1e-5}
    with pytest.raises(KeyboardInterrupt):
        EXPERIMENTS[name].run(cells_of(name, **settings)[cell], tmp_path / "runs/cells/cell")
    (recipe,) = recipes
    found = recipe["data"] | recipe["model"] | recipe["training"]
    # As much text in all systems: that of the checkpoint, and then their own.
    expected = {"base_model": str(tmp_path), "learning_rate": 1e-5, "max_steps": 2, "seed": 3} | own
    expected["max_tokens"] = (2 + expected["max_steps"]) * 8 * 16
    assert expected.items() <= found.items()
    assert ("start_from_attention" in found) == ("start_from_attention" in own)


def test_masks_of_a_seed_come_from_one_soft_search(inputs, tmp_path):
    settings = known_fields("sparsebert_figure7", SMALLEST) | inputs("sparsebert_figure7") | {"sparsities": [0.3, 0.7]}
    options = ReproductionArguments(output=str(tmp_path / "results"), runs=str(tmp_path / "runs"))
    found = {}
    for seed, only in {1: ["two_stage_0.3_seed_1", "random_0.7_seed_1"], 2: ["random_0.7_seed_2"]}.items():
        run_experiment("sparsebert_figure7", replace(options, only=only), settings)
        searches = set(tmp_path.glob("runs/sparsebert_figure7_tiny/soft_*/metrics.json"))
        (found[seed],) = searches - set(found.values())
    cells = read(tmp_path / "results/sparsebert_figure7_tiny.json")
    assert [cell["metrics"]["sparsity"] for cell in cells.values()] == pytest.approx([0.3, 0.7, 0.7], abs=0.01)
    for seed, metrics in found.items():
        expected = random_control(prune_by_probs(read_run(metrics.parent), 0.7), seed).to_table()
        made = SparseMask.from_pretrained(tmp_path / f"runs/sparsebert_figure7_tiny/random_0.7_seed_{seed}").to_table()
        assert torch.equal(made, expected)


def test_systems_of_a_seed_see_the_same_batches(inputs, tmp_path, monkeypatch):
    seen, step = [], SparseBertTrainer.training_step

    def record(self, model, batch, *args, **kwargs):
        seen.append(torch.cat([batch["input_ids"], batch["labels"]]))
        return step(self, model, batch, *args, **kwargs)

    monkeypatch.setattr(SparseBertTrainer, "training_step", record)
    settings = known_fields("sparsebert_table3", SMALLEST) | inputs("sparsebert_table3")
    cells = cells_of("sparsebert_table3", **settings)
    batches = {}
    for name in ("dense_seed_1", "dam_u_lambda_0.001_seed_1", "dense_seed_2"):
        folder = tmp_path / "runs/cells" / name
        folder.mkdir(parents=True)
        EXPERIMENTS["sparsebert_table3"].run(cells[name], folder)
        batches[name] = torch.stack(seen[-2:])  # those before are the checkpoint's
    one, other, another_seed = batches.values()
    assert torch.equal(one, other) and not torch.equal(one, another_seed)


def test_the_checkpoint_is_that_of_all_cells(inputs, tmp_path):
    settings = known_fields("sparsebert_table1", SMALLEST) | inputs("sparsebert_table1")
    options = ReproductionArguments(output=str(tmp_path / "results"), runs=str(tmp_path / "runs"))
    options.only = "dense_seed_1"
    run_experiment("sparsebert_table1", options, settings)
    (metrics,) = tmp_path.glob("runs/checkpoint_*/metrics.json")
    weights = metrics.with_name("model.safetensors").read_bytes()
    (first,) = read(tmp_path / "results/sparsebert_table1_tiny.json").values()
    assert 0 < first["metrics"]["shared_seconds"] < first["metrics"]["seconds"]
    # As if it had been killed at the end; the cell that goes on with it trains for longer.
    metrics.unlink()
    options.only = "no_diag_seed_1"
    run_experiment("sparsebert_table1", options, settings | {"max_steps": 3})
    assert metrics.is_file() and metrics.with_name("model.safetensors").read_bytes() == weights
    # Other settings of its own make it another.
    options.only = "random_drop_0_seed_1"
    run_experiment("sparsebert_table1", options, settings | {"checkpoint_learning_rate": 1e-3})
    assert len(list(tmp_path.glob("runs/checkpoint_*/metrics.json"))) == 2


# What the papers' tables and figures hold.


@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_copying_has_the_cells_of_the_table(scale):
    cells = cells_of("copying", scale)
    assert len(cells) == 32 and set(map(unseeded, cells)) == EXPERIMENTS["copying"].published.keys()


def test_copying_at_the_papers_size_removes_what_the_paper_removes():
    """Percentages in the head of [O] Table 1."""
    expected = {"union": 87, "multihead": 93, "sequential": 93, "star": 87, "random": 90}
    for cell in cells_of("copying", "paper").values():
        mask = build_pattern(
            cell["pattern"], 256, 4, 4, head_configuration=cell["head_configuration"], **cell["pattern_kwargs"]
        )
        assert 100 * mask.sparsity == pytest.approx(expected[cell["series"].split("_")[-1]], abs=1)


@pytest.mark.parametrize("scale", ["tiny", "paper"])
@pytest.mark.parametrize("name", ["language_modelling", "translation"])
def test_sweeps_have_every_pattern(name, scale, pairs):
    cells = cells_of(name, scale, **({"train": pairs, "test": pairs} if name == "translation" else {}))
    families = {
        f"{pattern}_{layout}" for pattern in ("strided", "fixed") for layout in ("union", "multihead", "sequential")
    }
    families |= {"star_relay"} if name == "language_modelling" else set()
    assert {cell["series"] for cell in cells.values()} == families | {"dense", "star", "random"}


def test_mixers_are_the_tables_and_the_figures():
    tiny, paper = ({unseeded(n): c for n, c in cells_of("mixers", scale).items()} for scale in ("tiny", "paper"))
    assert {"attention", "sepconv", "bproj", "average", "hybrid_1", "hybrid_3"} <= tiny.keys()
    assert {f"hybrid_{k}" for k in range(13)} <= paper.keys()
    assert paper["hybrid_2"]["token_mixers"] == ["sepconv"] * 2 + ["attention"] * 10
    assert paper["attention"]["max_steps"] == 60_000 and paper["hybrid_0"]["max_steps"] == 250_000


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("copying", {"stride": 0}, "stride must be an integer of at least 1, got 0"),
        ("copying", {"sparsity": 2}, "sparsity must be a number from 0 to 1, got 2"),
        ("copying", {"learning_rate": math.nan}, "learning_rate must be a number of at least 0, got nan"),
        ("copying", {"seeds": [0, 0]}, r"seeds must be different, got \[0, 0\]"),
        ("minilm_mixers", {"checkpoint_learning_rate": -1}, "checkpoint_learning_rate must be a number of at least 0"),
        ("copying", {"depths": [0]}, "depth must be an integer of at least 1, got 0"),
        ("language_modelling", {"windows": [0]}, "window_size must be an integer of at least 1, got 0"),
        ("language_modelling", {"hidden_size": 30}, "hidden_size must be a multiple of num_heads 4, got 30"),
        ("language_modelling", {"text": "none.txt"}, "no such file: 'none.txt'"),
        ("translation", {}, "--train must be a .tsv file of pairs"),
        ("translation", {"train": ["a", "b"]}, "there is no file 'a'"),
        ("language_modelling", {"max_steps": 0}, "max_steps must be an integer of at least 1, got 0"),
        ("minilm", {"sparsity_scope": "layer"}, "sparsity_scope must be one of 'head', 'global', got 'layer'"),
        ("minilm", {"masks": ["window"], "sparsities": [1.5]}, "sparsities must be a number from 0 to 1, got 1.5"),
        ("minilm", {"recover_from": 0.95}, "recover_from must be a number from 0 to 0.9, got 0.95"),
        (
            "minilm",
            {"recover_from": 0.9},
            "recover_from must be below the sparsity .0.9., .* got 0.9 with",
        ),
        ("minilm", {"recover_from": 0.5, "recover": 0}, "with recover at least 1, got 0.5 with recover 0"),
        ("mixers", {"table_max_steps": 0}, "max_steps must be an integer of at least 1, got 0"),
        ("mixers", {"task": "mnl"}, "unknown task 'mnl'; did you mean 'mnli'"),
        ("mixers", {"task": "mnli", "data": "nowhere"}, "nowhere"),
    ],
)
def test_cells_that_cannot_run(name, settings, message):
    with pytest.raises((ValueError, OSError), match=message):
        cells_of(name, **settings)


def test_a_text_without_words_is_refused_first(checkpoints, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="text: no paragraph of text in "):
        cells_of("sparsebert_table1", base_model=checkpoints["stock"], text=str(tmp_path / "empty.txt"), max_length=16)


def test_rows_longer_than_the_positions_are_refused_first(checkpoints, words):
    with pytest.raises(ValueError, match="max_length must be at most the 40 positions of base_model, got 48"):
        cells_of("sparsebert_table1", base_model=checkpoints["stock"], text=words, max_length=48)


def test_copying_runs(run, tmp_path):
    printed = run("copying", *SMALL_COPYING, "--only", "[fixed_union_depth_*, random_depth_1_seed_0]")
    cells = read(tmp_path / "results/copying_tiny.json")
    assert len(cells) == 5 and all(0 <= cell["metrics"]["reachable"] <= 1 for cell in cells.values())
    assert "/ 7.0%" in printed and "/ 33.1%" in printed


def test_language_modelling_runs(run, tmp_path, text):
    sizes = ("--strides", "[4]", "--windows", "[2]", "--sparsities", "[0.5]")
    files = ("--text", text, "--validation", text)
    run("language_modelling", *SMALL_TEXT, *sizes, *files, "--seeds", "[3]", "--only", "[dense_*, random_0.5_*]")
    cells = {unseeded(name): cell for name, cell in read(tmp_path / "results/language_modelling_tiny.json").items()}
    assert 100 < cells["dense"]["metrics"]["perplexity"] < 200
    mask = build_pattern("random", 16, 4, num_layers=2, seed=3, sparsity=0.5)
    removed = 1 - 16 * 16 / (16 * 17 / 2) * mask.to_table().tril().float().mean().item()
    assert cells["random_0.5"]["metrics"]["causal_sparsity"] == pytest.approx(removed)
    assert cells["dense"]["metrics"]["causal_sparsity"] == 0


def test_the_tokenizer_has_not_seen_the_held_out_text(run, tmp_path):
    def documents(word, split):
        numbered = (f"{word} is the first of many words of text {i}" for i in range(2000))
        return [document for document in numbered if in_split([document], split)]

    (tmp_path / "text.txt").write_text("\n\n".join(documents("ours", "train")[:80] + documents("ж", "validation")))
    run("language_modelling", *SMALL_TEXT, "--text", tmp_path / "text.txt", "--only", "dense_*")
    (folder,) = tmp_path.glob("runs/language_modelling_tiny/tokenizer_*/")
    known = AutoTokenizer.from_pretrained(folder).get_vocab()
    assert "ours" in known and "ж" not in known


def test_translation_runs(run, tmp_path, pairs):
    sizes = "--max_length 12 --vocab_size 150 --hidden_size 16 --intermediate_size 16 --max_steps 2 --batch_size 4"
    sizes += " --label_smoothing_factor 0.1"
    run("translation", *sizes.split(), "--train", pairs, "--test", pairs, "--max_test_pairs", 4, "--only", "star_1_*")
    (cell,) = read(tmp_path / "results/translation_tiny.json").values()
    assert cell["metrics"]["bleu"] >= 0 and "case:mixed" in cell["metrics"]["bleu_signature"]
    (tmp_path / "short.cs").write_text("Dům.\n")
    (tmp_path / "long.en").write_text("House.\nRed.\n")
    unequal = f"[{tmp_path / 'long.en'}, {tmp_path / 'short.cs'}]"
    with pytest.raises(ValueError, match="has 2 lines and .* has 1"):
        run("translation", *sizes.split(), "--train", unequal, "--test", pairs, "--only", "star_1_*", "--overwrite")
    assert (tmp_path / "runs/translation_tiny/star_1_seed_0/model.safetensors").is_file()


def test_mixers_run(run, tmp_path, text):
    flags = [*SMALL_TEXT, "--text", text, "--validation", text, "--nsp", "true"]
    run("mixers", *flags, "--only", "[average_*, hybrid_1_*]")
    cells = {unseeded(name): cell for name, cell in read(tmp_path / "results/mixers_tiny.json").items()}
    assert {name: cell["settings"]["token_mixers"] for name, cell in cells.items()} == {
        "average": ["average", "average"],
        "hybrid_1": ["sepconv", "attention"],
    }
    metrics = [json.loads(path.read_text()) for path in tmp_path.glob("runs/mixers_tiny/*/metrics.json")]
    assert len(metrics) == 2 and all(found["nsp_accuracy"] is not None for found in metrics)
    assert all(0 <= cell["metrics"]["mlm_accuracy"] <= 1 for cell in cells.values())


def test_mixers_are_fine_tuned(run, tmp_path, text, glue_folder):
    flags = [*SMALL_TEXT, "--text", text, "--validation", text, "--task", "rte", "--data", glue_folder]
    run("mixers", *flags, "--seeds", "[4]", "--only", "[average_*, bproj_*]")
    first, second = (cell["metrics"] for cell in read(tmp_path / "results/mixers_tiny.json").values())
    assert 0 <= first["task_score"] <= 1 and 0 <= second["task_score"] <= 1
    assert first["shared_cpu_seconds"] > second["shared_cpu_seconds"]  # has trained the tokenizer
    assert len(list((tmp_path / "runs/mixers_tiny").glob("tokenizer_*/tokenizer.json"))) == 1  # for all cells
    recipes = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/mixers_tiny/*/finetuned/recipe.yaml")]
    assert [(recipe["training"]["seed"], recipe["data"]["max_length"]) for recipe in recipes] == [(4, 16)] * 2


def test_run_experiment_returns_the_tables(experiment, tmp_path):
    options = ReproductionArguments(output=str(tmp_path / "results"), runs=str(tmp_path / "runs"))
    pivot, table = run_experiment("products", options, {})
    assert pivot.columns == ["name", "factor 3"] and table.columns == ["cell", "product", "product, paper", "seconds"]
