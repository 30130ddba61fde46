"""The runner of experiments: what is run, what is taken over, what is refused, what is written and kept."""

import errno
import gc
import json
import os
import shutil
import sys
import weakref
from dataclasses import dataclass, field, replace
from threading import Thread

import pytest
import transformers

from sparsebert.commands import main, parse
from sparsebert.files import replace_files
from studies.experiments import EXPERIMENTS
from studies.harness import reproduction
from studies.harness.experiment import Experiment, shared_settings, unseeded
from studies.harness.reproduction import CellsFailed, ReproductionArguments, run_experiment
from studies.harness.result_tables import experiment_tables, plot_cells
from studies.harness.time_estimates import duration, estimate_seconds


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
def change(monkeypatch):
    """`change(**fields)`: change the row "products"."""

    def changed(**fields):
        monkeypatch.setitem(EXPERIMENTS, "products", replace(EXPERIMENTS["products"], **fields))

    return changed


@pytest.fixture
def ran(monkeypatch, without_matplotlib):
    """The experiment "products", whose cells keep a file each; which of them were run."""
    cells = []

    def run(cell, folder):
        cells.append(cell["name"])
        (folder / "large").write_text(f"factor {cell['factor']}")
        if cell["name"] == "broken":
            raise RuntimeError("no result")
        if cell["name"] == "stopped":
            raise KeyboardInterrupt
        return {"product": cell["factor"] * len(cell["name"]), "secret": float("nan")}

    def check(cell):
        if cell["factor"] < 0:
            raise ValueError(f"factor must be at least 0, got {cell['factor']}")

    def keep(cell, folder):
        large = folder / "large"
        return {"small": f"{cell['name']} {large.read_text()}".encode()} if large.is_file() else {}

    def draw(finished, kept, path):
        found = [(kept / name / "small").read_text() for name in finished if (kept / name / "small").is_file()]
        if found:
            path.write_text("\n".join(sorted(found)))

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
        keep=keep,
        pictures={"figure": draw},
    )
    monkeypatch.setitem(EXPERIMENTS, "products", row)
    return cells


@pytest.fixture
def drawing(ran, monkeypatch):
    """`ran`, with pictures, of which those that need matplotlib are empty."""
    monkeypatch.setattr(reproduction, "find_spec", lambda name: True)
    monkeypatch.setattr(reproduction, "plot_cells", lambda *arguments: arguments[-1].touch())
    return ran


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results/products_tiny.json"


@pytest.fixture
def figure(tmp_path):
    return tmp_path / "results/products_tiny_figure.png"


def read(path):
    return json.loads(path.read_text())["cells"]


def edit(path, function):
    """Change the cells of results."""
    content = json.loads(path.read_text())
    function(content["cells"])
    path.write_text(json.dumps(content))


@pytest.fixture
def beside(ran, monkeypatch):
    """`beside(action, cell)`: do something, another process's work, while a cell is run."""
    own = EXPERIMENTS["products"]

    def run_beside(action, name="a"):
        def run(cell, folder):
            if cell["name"] == name:
                monkeypatch.setitem(EXPERIMENTS, "products", own)
                action()
            return own.run(cell, folder)

        monkeypatch.setitem(EXPERIMENTS, "products", replace(own, run=run))

    return run_beside


# What is run


def test_results_and_table(ran, reproduce, results, tmp_path):
    tables = json.loads(reproduce("products", "--json"))
    assert [table["rows"][0] for table in tables] == [
        {"name": "a", "factor 3": "3.0 / 7.0"},
        {"cell": "a", "product": "3.0", "product, paper": "7.0", "seconds": "0"},
    ]
    names = {path.name for path in results.parent.iterdir() if not path.name.startswith(".")}
    assert names == {"products_tiny.json", "products_tiny.md", "products_tiny"}  # the plot needs matplotlib
    cell = read(results)["a"]
    assert cell["settings"] == {"name": "a", "factor": 3} and cell["metrics"]["product"] == 3
    assert {"sparsebert", "torch", "device", "threads"} == set(cell["made_with"])
    text = results.with_suffix(".md").read_text()
    assert "| b | 3.0 |  | 0 |" in text and "a note" in text and "share" not in text
    reproduce("products", "--scale", "paper")
    assert read(tmp_path / "results/products_paper.json")["a"]["metrics"]["product"] == 2
    assert read(results)["a"]["metrics"]["product"] == 3


def test_finished_cells_are_not_run_again(ran, reproduce, results):
    reproduce("products", "--only", "a")
    assert "3.0 / 7.0" in reproduce("products") and ran == ["a", "b"]
    reproduce("products", "--names", "[c]")
    reproduce("products", "--only", "[a, c]", "--names", "[a, c]", "--overwrite")
    assert ran == ["a", "b", "c", "a", "c"] and set(read(results)) == {"a", "b", "c"}
    assert reproduce("products", "--list_cells").split() == ["a", "b"] and len(ran) == 5


def test_cells_of_other_settings_are_refused_or_made_anew(ran, reproduce, results):
    reproduce("products")
    with pytest.raises(ValueError, match="cell a made with factor 3, not 4: .*--overwrite"):
        reproduce("products", "--factor", "4", "--names", "[a, c]")
    assert ran == ["a", "b"]
    reproduce("products", "--factor", "4", "--names", "[a, c]", "--overwrite")
    assert {name: cell["settings"]["factor"] for name, cell in read(results).items()} == {"a": 4, "b": 3, "c": 4}
    assert "factor: 4; in b: 3" in results.with_suffix(".md").read_text()


def test_seeds_of_a_cell_share_their_settings(ran, reproduce, results):
    reproduce("products", "--names", "[a_seed_1]")
    before = results.read_bytes()
    with pytest.raises(ValueError, match="cell a_seed_1 made with factor 3, not 4 as for a_seed_2, .*--output"):
        reproduce("products", "--factor", "4", "--names", "[a_seed_2, b_seed_1]")
    assert ran == ["a"] and results.read_bytes() == before
    reproduce("products", "--factor", "4", "--names", "[b_seed_1]")
    reproduce("products", "--factor", "4", "--names", "[a_seed_1, a_seed_2]", "--overwrite")
    assert {cell["settings"]["factor"] for cell in read(results).values()} == {4}
    assert shared_settings({"seed": 1, "n": 2, "model": {"mask_seed": 3, "m": 4}}) == {"n": 2, "model": {"m": 4}}


def test_what_cells_share_is_not_their_own_time(ran, reproduce, results, change):
    change(run=lambda cell, folder: {"product": 1.0, "shared_seconds": 60.0, "shared_cpu_seconds": 50.0})
    reproduce("products", "--only", "a")
    found = read(results)["a"]["metrics"]
    assert found["cpu_seconds"] == pytest.approx(-50, abs=5) and 0 <= found["seconds"] < 50


def test_what_is_interrupted_or_fails_is_run_again(ran, reproduce, results, tmp_path):
    with pytest.raises(KeyboardInterrupt, match="^interrupted: finished cells are kept, the same command"):
        reproduce("products", "--names", "[a, stopped, b]")
    assert set(read(results)) == {"a"} and "| a | 3.0 |" in results.with_suffix(".md").read_text()
    (tmp_path / "runs/products_tiny/b.lock").touch()  # of a process that was killed
    printed = reproduce("products", "--names", "[a, broken, b]")
    assert "1 of 2 cells failed, the same command runs them again: broken (RuntimeError: no result)" in printed
    assert set(read(results)) == {"a", "b"} and ran == ["a", "stopped", "broken", "b"]
    folders = ["--output", tmp_path / "results", "--runs", tmp_path / "runs"]
    command, values = parse(list(map(str, ["reproduce", "products", "--names", "[a, broken]", *folders])))
    assert command.run(values).exit_code == 1
    options = ReproductionArguments(output=str(tmp_path / "results"), runs=str(tmp_path / "runs"), overwrite=True)
    with pytest.raises(CellsFailed, match="1 of 1 cells failed, run them again with --only: broken") as error:
        run_experiment("products", options, {"names": ["broken"]})
    assert all([row[0] for row in table.rows] == ["a", "b"] for table in error.value.tables)


def test_a_cell_that_fails_leaves_nothing_in_memory(ran, reproduce, change):
    made, alive = [], []

    class Large:
        pass

    def fail(cell, folder):
        gc.collect()
        alive.append([reference() is not None for reference in made])
        large = Large()
        made.append(weakref.ref(large))
        raise RuntimeError("no room")

    change(run=fail)
    reproduce("products")
    assert alive == [[], [False]]


def test_results_that_cannot_be_written_are_printed(ran, reproduce, results, monkeypatch, caplog):
    def write(contents):
        monkeypatch.setattr(reproduction, "replace_files", replace_files)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(reproduction, "replace_files", write)
    reproduce("products")
    assert set(read(results)) == {"b"} and '"product": 3' in caplog.text
    reproduce("products")
    assert ran == ["a", "b", "a"]


# Several processes


def test_processes_share_the_cells(ran, reproduce, results, beside, tmp_path):
    def other():
        reproduce("products")  # leaves a, which is being run, and runs b
        assert ran == ["b"] and (tmp_path / "runs/products_tiny/a").is_dir()

    beside(other)
    reproduce("products")
    assert ran == ["b", "a"] and set(read(results)) == {"a", "b"}
    reproduce("products", "--overwrite")
    assert ran[2:] == ["a", "b"]


def test_cells_with_other_folders_of_runs_are_all_kept(ran, reproduce, results, monkeypatch):
    other = Thread(target=lambda: reproduce("products", "--only", "b", runs="other"))

    def write(contents):
        monkeypatch.setattr(reproduction, "replace_files", replace_files)
        other.start()
        other.join(0.3)  # waits for these results to be written
        replace_files(contents)

    monkeypatch.setattr(reproduction, "replace_files", write)
    reproduce("products", "--only", "a")
    other.join()
    assert set(read(results)) == {"a", "b"}


def test_folders_of_other_results_are_kept(ran, reproduce, results, beside, tmp_path):
    reproduce("products", "--only", "a")
    kept = tmp_path / "runs/products_tiny/a/large"
    kept.write_text("mine")
    with pytest.raises(FileExistsError, match="choose another --runs, or pass --overwrite"):
        reproduce("products", output="others")
    assert kept.read_text() == "mine" and ran == ["a"] and not (tmp_path / "others").exists()
    reproduce("products", "--overwrite", output="others")
    assert ran == ["a", "a", "b"]


def test_a_cell_of_other_results_that_was_finished_meanwhile_is_kept(ran, reproduce, results, beside, tmp_path):
    others = tmp_path / "runs/products_tiny/b/large"

    def other():
        reproduce("products", output="elsewhere")
        others.write_text("theirs")

    beside(other)
    assert "1 of 2 cells failed" in (printed := reproduce("products")) and "holds a finished cell that" in printed
    assert ran == ["b", "a"] and others.read_text() == "theirs" and set(read(results)) == {"a"}


def test_nothing_is_reported_while_another_process_runs_the_only_cell(ran, reproduce, beside, change):
    def other():
        change(summary=lambda cells: [] if cells else 1 / 0)
        assert reproduce("products", "--only", "a") == ""

    beside(other)
    reproduce("products", "--only", "a")
    assert ran == ["a"]


# What is said


@pytest.fixture
def said(caplog, monkeypatch):
    """`said()`: the messages of the runner since the last call."""
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(transformers.utils.logging.get_logger("sparsebert"), "propagate", True)

    def messages():
        found = [r.getMessage() for r in caplog.records if r.name.startswith(("sparsebert", "studies"))]
        caplog.clear()
        return found

    return messages


def test_what_is_to_do_is_said_first(ran, reproduce, said, results):
    reproduce("products", "--list_cells")
    none = "no cell is finished yet to judge the time by, so the estimate follows after the first"
    assert said() == [f"products: 0 of 2 cells are done, 2 to do; {none}"]
    reproduce("products")
    first, a, b = said()
    assert none in first and a == "products: a (1 of 2)" and b == "products: b (2 of 2, about 0 s left)"
    edit(results, lambda cells: cells.pop("b") and cells["a"]["metrics"].update(seconds=600.0))
    shutil.rmtree(results.parents[1] / "runs")
    reproduce("products", "--names", "[a, b, c]")
    assert said() == [
        "products: 1 of 3 cells are done, 2 to do, about 20 min, judged by 1 finished",
        "products: b (1 of 2, about 20 min left)",
        "products: c (2 of 2, about 5 min left)",  # the median of 10 min and nothing
    ]
    reproduce("products", "--factor", "4", "--list_cells")
    assert said()[0].startswith("products: 0 of 2 cells are done, 2 to do, about ")


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
    assert estimate(max_steps=200) == 140 and estimate(target=0.9) == 10
    assert estimate(series="dense", target=0.9) == 20  # of its series, whatever else differs
    assert estimate(series="random") == 60  # the median of all that differ in nothing else: 60, 80 and 20
    finished["0"]["metrics"]["shared_seconds"] = 50.0  # a checkpoint, which the others have found there
    assert estimate() == 45 and estimate_seconds({"new": cell}, {}, "series") is None
    assert [duration(seconds) for seconds in (0.4, 89, 600, 9000)] == ["0 s", "89 s", "10 min", "2.5 h"]


def test_help_explains_fields(capsys):
    assert main(["reproduce", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS) and "--overwrite" in printed
    assert main(["reproduce", "copying", "--help-all"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("scale", "source_length", "window_size"))


# What is refused


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["product"], "unknown experiment 'product'; did you mean 'products'"),
        (["products", "--scale", "tinny"], "unknown scale 'tinny'; did you mean 'tiny'"),
        (["products", "--only", "z*"], "unknown cell in --only 'z\\*'; allowed: a, b"),
        (["products", "--only", "5"], "unknown cell in --only '5'"),
        (["products", "--fctor", "1"], "--fctor"),
        (["products", "--factor", "x"], "factor"),
        (["products", "--factor", "-1"], "factor must be at least 0, got -1"),
        (["products", "--names", "[]"], "the settings make no cells"),
        (["products", "--redraw", "--only", "a"], "--redraw runs no cells: leave out --only"),
        (["products", "--redraw", "--list_cells"], "--redraw runs no cells: leave out --list_cells"),
        (["products", "--redraw", "--overwrite", "--factor", "1"], "leave out --overwrite, --factor"),
        (["products", "--redraw", "--scale", "tinny"], "unknown scale 'tinny'"),
        (["products", "--redraw"], "products_tiny.json has no finished cells to draw"),
    ],
)
def test_bad_input(drawing, reproduce, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        reproduce(*arguments)
    assert drawing == [] and not list(tmp_path.iterdir())


_CELL, _OWN = {"settings": {}, "metrics": {}}, {"experiment": "products", "scale": "tiny"}


@pytest.mark.parametrize("redraw", [[], ["--redraw"]], ids=["run", "redraw"])
@pytest.mark.parametrize(
    "content",
    [
        *('{"other": 1}', '{"cells": {"a": 1}}', "[]", "{"),
        *(json.dumps(_OWN | {"cells": cells}) for cells in ([], {"a": {}}, {"a": 1}, {"../a": _CELL})),
        *(json.dumps(_OWN | {"cells": {"a": _CELL}} | other) for other in ({"experiment": "x"}, {"scale": "paper"})),
    ],
)
def test_a_file_of_something_else_is_not_overwritten(drawing, reproduce, results, content, redraw):
    results.parent.mkdir()
    results.write_text(content)
    with pytest.raises(ValueError, match="products_tiny.json holds no results of this experiment"):
        reproduce("products", *redraw)
    assert results.read_text() == content and drawing == []


@pytest.mark.parametrize("redraw", [[], ["--redraw"]], ids=["run", "redraw"])
@pytest.mark.parametrize("metrics, reason", [({}, "KeyError"), ({"product": "six"}, "ValueError")])
def test_damaged_cells_are_named(drawing, reproduce, results, metrics, reason, redraw):
    reproduce("products", "--only", "a")
    edit(results, lambda cells: cells["a"].update(metrics=metrics))
    before = results.read_text()
    with pytest.raises(ValueError, match=rf"products_tiny.json: there is no table of the cell a \({reason}.*mend or"):
        reproduce("products", *redraw)
    assert drawing == ["a"] and results.read_text() == before


@pytest.mark.parametrize(
    "part, value", [("seconds", None), ("seconds", 10**400), ("shared_seconds", "x"), ("max_steps", [])]
)
@pytest.mark.parametrize("flags", [[], ["--list_cells"]], ids=["run", "list"])
def test_times_that_are_no_numbers(ran, reproduce, results, part, value, flags):
    reproduce("products", "--only", "a")
    place = "settings" if part == "max_steps" else "metrics"
    edit(results, lambda cells: cells["a"][place].update({part: value}))
    with pytest.raises(ValueError, match="products_tiny.json holds no results of this experiment"):
        reproduce("products", *flags)
    assert ran == ["a"]


def test_a_file_in_place_of_the_output_is_named_first(ran, reproduce, tmp_path):
    (tmp_path / "file").write_text("")
    for output in ("file", "file/x"):
        with pytest.raises(NotADirectoryError, match="output .*/file.* cannot be made: .*/file is a file"):
            reproduce("products", output=output)
    assert ran == []


# Tables and pictures


def cells(**losses):
    """Cells of the products, by name and seed."""
    return {
        f"{name}_seed_{seed}": {"settings": {"name": name, "factor": 3, "seed": seed}, "metrics": {"product": value}}
        for name, values in losses.items()
        for seed, value in enumerate(values)
    }


def test_means_over_seeds_stand_beside_the_papers_and_the_baseline(ran, change, monkeypatch, tmp_path):
    change(baseline="b")
    found = cells(a=[4.0, 6.0, 5.0], b=[1.0, 1.0, 2.0])
    pivot, means, every = experiment_tables(EXPERIMENTS["products"], "tiny", found)
    assert pivot.rows == [["a", "5.0 ± 1.0 / 7.0"], ["b", "1.3 ± 0.6 / "]] and len(every.rows) == 6
    a, b = means.as_json()["rows"]
    assert (a["product"], a["product, paper"], a["seeds"]) == ("5.0 ± 1.0", "7.0", "3")
    assert a["minus b"].startswith("+3.667 [") and float(a["p (Holm)"]) < 0.05 and b["minus b"] == ""
    drawn = []
    monkeypatch.setattr("studies.harness.result_tables.plot_lines", lambda *arguments: drawn.append(arguments))
    plot_cells(EXPERIMENTS["products"], "tiny", cells(a=[4.0, 6.0], b=[1.0]), tmp_path / "plot.png")
    ((lines, _, title, *labels),) = drawn
    assert lines == {"a": [(3, 5, 7)], "b": [(3, 1, None)]} and title == "Products, scale tiny"
    assert labels == ["factor", "product", ""]
    # A run that diverged has a table, too.
    assert (
        "nan ± nan" in experiment_tables(EXPERIMENTS["products"], "tiny", cells(a=[4.0, float("nan")]))[1].markdown()
    )


def test_a_picture_that_fails_does_not_stop_the_cells(drawing, reproduce, results, figure, change):
    def draw(finished, kept, path):
        path.write_bytes(b"drawn") if len(finished) == 3 else 1 / 0

    change(pictures={"figure": draw})
    reproduce("products", "--names", "[a, b, c]")
    assert set(read(results)) == {"a", "b", "c"} and figure.read_bytes() == b"drawn"
    with pytest.raises(ZeroDivisionError):
        reproduce("products", "--names", "[d]")
    assert set(read(results)) == {"a", "b", "c", "d"}


def test_files_and_pictures_outlive_the_cells(drawing, reproduce, results, figure, tmp_path, change):
    printed = reproduce("products")
    kept = tmp_path / "results/products_tiny/a/small"
    assert kept.read_text() == "a factor 3" and figure.read_text() == "a factor 3\nb factor 3"
    assert f"written: {figure}" in printed and f"written: {kept}" in printed
    shutil.rmtree(tmp_path / "runs")
    for path in (figure, results.with_suffix(".md"), results.with_suffix(".png")):
        path.unlink()

    def check(cell):
        raise OSError("no data")

    change(check=check)
    printed = reproduce("products", "--redraw")  # from the results alone
    assert drawing == ["a", "b"] and figure.read_text() == "a factor 3\nb factor 3"
    assert "| a | 3.0" in results.with_suffix(".md").read_text()
    assert f"written: {results.with_suffix('.png')}" in printed
    shutil.rmtree(kept.parents[1])  # nothing to draw: the picture stays
    reproduce("products", "--redraw")
    assert figure.is_file()


def test_files_are_kept_of_each_cell_as_it_is_in_the_results(drawing, reproduce, results, figure, tmp_path, change):
    keep = EXPERIMENTS["products"].keep

    def killed(cell, folder):
        raise KeyboardInterrupt

    change(keep=killed)
    with pytest.raises(KeyboardInterrupt):
        reproduce("products")
    assert list(read(results)) == ["a"] and not figure.exists()
    change(keep=keep)  # cells of before are kept while their folders are there
    reproduce("products")
    assert drawing == ["a", "b"] and figure.read_text() == "a factor 3\nb factor 3"
    reproduce("products", "--factor", "4", "--only", "b", "--overwrite")
    assert figure.read_text() == "a factor 3\nb factor 4"
    made = tmp_path / "runs/products_tiny/a/cell.json"  # of other results
    made.write_text(json.dumps(json.loads(made.read_text()) | {"metrics": {"product": 9}}))
    (made.parent / "large").write_text("another")
    reproduce("products", "--names", "[a]")
    assert figure.read_text() == "a factor 3\nb factor 4"


def test_redrawing_without_matplotlib_is_refused(ran, reproduce, monkeypatch):
    reproduce("products")
    monkeypatch.setattr("studies.harness.reproduction.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--redraw needs matplotlib: pip install"):
        reproduce("products", "--redraw")


def test_a_wheel_says_that_it_has_no_studies(monkeypatch, capsys, tmp_path):
    """`--mappings`, `reproduce` and `translate` need a checkout; the verdicts do not."""
    for name in [name for name in sys.modules if name == "studies" or name.startswith("studies.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sparsebert.commands._checkout.STUDIES", tmp_path / "studies")
    for words in ("reproduce copying", "translate translation --train a.tsv", "theory --mappings", "theory --maps"):
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert "studies/" in error and "pip install --editable" in error and error.count("\n") == 1
    assert main("theory star --length 16".split()) == 0
