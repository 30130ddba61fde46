"""What outlives the folders of finished cells, and the pictures that are drawn from it."""

import json
import shutil
from dataclasses import dataclass, field, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsebert.analysis.importance import sketch
from sparsebert.commands import parse
from sparsebert.masks.patterns import build_pattern
from sparsebert.masks.sparse_mask import SparseMask
from studies.experiments import EXPERIMENTS, Experiment
from studies.harness.reproduction import ReproductionArguments, plan_cells, result_files, run_experiment
from studies.harness.result_charts import plot_importance
from studies.sparsebert_paper.sparsebert_table3 import SHOWN


@dataclass
class Settings:
    """
    Settings of the experiment below.

    Args:
        names (`list[str]`): Names.
        text (`str`): What the cells write.
    """

    names: list[str] = field(default_factory=lambda: ["a", "b"])
    text: str = "kept"


def write(cell, folder):
    if cell["name"] == "stopped":
        raise KeyboardInterrupt
    (folder / "large").write_text(cell["text"])
    return {"length": len(cell["text"]), "other": float("nan")}


def keep(cell, folder):
    large = folder / "large"
    return {"small": f"{cell['name']} {large.read_text()}".encode()} if large.is_file() else {}


def draw(finished, kept, path):
    found = [(kept / name / "small").read_text() for name in finished if (kept / name / "small").is_file()]
    if found:
        path.write_text("\n".join(found))


@pytest.fixture
def ran(monkeypatch):
    """The experiment "words", whose cells each keep a file; which of them were run."""
    cells = []
    row = Experiment(
        title="Words",
        arguments=Settings,
        scales={"tiny": {}},
        cells=lambda settings: {name: {"name": name, "text": settings.text} for name in settings.names},
        check=lambda cell: None,
        run=lambda cell, folder: cells.append(cell["name"]) or write(cell, folder),
        columns={"length": ("length", "{:.0f}")},
        plot=("length", "length", "name"),
        keep=keep,
        pictures={"figure": draw},
    )
    monkeypatch.setitem(EXPERIMENTS, "words", row)
    return cells


@pytest.fixture
def reproduce(tmp_path):
    """`reproduce(*flags)`: the command, with its folders in `tmp_path`; what it writes about its files."""

    def command(*flags):
        folders = ["--output", tmp_path / "results", "--runs", tmp_path / "runs"]
        parsed, values = parse(list(map(str, ["reproduce", "words", *flags, *folders])))
        return parsed.run(values).notes

    return command


@pytest.fixture
def picture(tmp_path):
    return tmp_path / "results/words_tiny_figure.png"


def test_files_and_picture_outlive_the_cells(ran, reproduce, picture, tmp_path):
    written = reproduce()
    kept = tmp_path / "results/words_tiny/a/small"
    assert kept.read_text() == "a kept" and picture.read_text() == "a kept\nb kept"
    assert f"written: {picture}" in written and f"written: {kept}" in written
    shutil.rmtree(tmp_path / "runs")
    picture.unlink()
    reproduce()
    assert ran == ["a", "b"] and picture.read_text() == "a kept\nb kept"
    shutil.rmtree(kept.parents[1])  # nothing to draw: the picture stays
    reproduce()
    assert ran == ["a", "b"] and picture.read_text() == "a kept\nb kept"


def test_cells_of_before_are_kept_while_their_folders_are_there(ran, reproduce, picture, tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setitem(EXPERIMENTS, "words", replace(EXPERIMENTS["words"], keep=None, pictures={}))
        reproduce()
    assert not picture.exists()
    reproduce()
    assert ran == ["a", "b"] and picture.read_text() == "a kept\nb kept"


def test_an_interrupted_run_keeps_what_is_finished(ran, reproduce, picture, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        reproduce("--names", "[a, stopped, b]")
    assert picture.read_text() == "a kept" and not (tmp_path / "results/words_tiny/stopped").exists()
    reproduce()
    assert ran == ["a", "stopped", "b"] and picture.read_text() == "a kept\nb kept"


def test_a_run_that_is_killed_before_it_keeps_a_cell_keeps_it_later(ran, reproduce, picture, tmp_path, monkeypatch):
    def killed(cell, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setitem(EXPERIMENTS, "words", replace(EXPERIMENTS["words"], keep=killed))
        reproduce()
    assert list(json.loads((tmp_path / "results/words_tiny.json").read_text())["cells"]) == ["a"]
    assert not picture.exists()
    reproduce()
    assert ran == ["a", "b"] and picture.read_text() == "a kept\nb kept"


def test_processes_that_share_the_cells_keep_all(ran, reproduce, picture, monkeypatch):
    own = EXPERIMENTS["words"]

    def run_beside(cell, folder):
        if cell["name"] == "a":
            monkeypatch.setitem(EXPERIMENTS, "words", own)
            reproduce()  # runs b, while a is being run
            assert picture.read_text() == "b kept"
        return own.run(cell, folder)

    monkeypatch.setitem(EXPERIMENTS, "words", replace(own, run=run_beside))
    reproduce()
    assert ran == ["b", "a"] and sorted(picture.read_text().split("\n")) == ["a kept", "b kept"]


def test_a_cell_that_is_run_again_replaces_its_files(ran, reproduce, picture):
    reproduce()
    reproduce("--text", "new", "--only", "b", "--overwrite")
    assert picture.read_text() == "a kept\nb new"


def test_folders_of_other_results_are_not_kept(ran, reproduce, picture, tmp_path):
    reproduce()
    made = tmp_path / "runs/words_tiny/a/cell.json"
    made.write_text(json.dumps(json.loads(made.read_text()) | {"metrics": {"length": 9}}))
    (made.parent / "large").write_text("another")
    reproduce()
    assert picture.read_text() == "a kept\nb kept"


def test_listing_writes_nothing(ran, reproduce, tmp_path):
    reproduce("--list_cells")
    assert ran == [] and not list(tmp_path.iterdir())


def test_pictures_are_drawn_again_from_the_results_alone(ran, reproduce, picture, tmp_path, monkeypatch):
    reproduce()
    table = picture.with_name("words_tiny.md")
    for path in (picture, table, picture.with_name("words_tiny.png")):
        path.unlink()
    shutil.rmtree(tmp_path / "runs")

    def check(cell):
        raise OSError("no data")

    monkeypatch.setitem(EXPERIMENTS, "words", replace(EXPERIMENTS["words"], check=check))
    written = reproduce("--redraw")
    assert ran == ["a", "b"] and picture.read_text() == "a kept\nb kept" and "| a | 4 |" in table.read_text()
    assert f"written: {picture.with_name('words_tiny.png')}" in written


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--only", "a"], "--redraw runs no cells: leave out --only"),
        (["--list_cells"], "--redraw runs no cells: leave out --list_cells"),
        (["--overwrite", "--text", "new"], "--redraw runs no cells: leave out --overwrite, --text"),
        (["--scale", "tinny"], "unknown scale 'tinny'"),
        ([], "words_tiny.json has no finished cells to draw"),
    ],
)
def test_bad_input_of_redraw(ran, reproduce, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        reproduce("--redraw", *flags)
    assert ran == [] and not list(tmp_path.iterdir())


_CELL = {"settings": {}, "metrics": {}}
_OWN = {"experiment": "words", "scale": "tiny"}


@pytest.mark.parametrize(
    "content",
    [
        *('{"cells": []}', '{"cells": {"a": {}}}', '{"cells": {"a": 1}}', "[]", "{"),
        *(json.dumps(_OWN | {"cells": cells}) for cells in ([], {"a": {}}, {"a": 1}, {"../a": _CELL})),
        *(json.dumps(_OWN | {"cells": {"a": _CELL}} | other) for other in ({"experiment": "x"}, {"scale": "paper"})),
    ],
)
def test_redrawing_of_no_results_is_refused(ran, reproduce, tmp_path, content):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/words_tiny.json").write_text(content)
    with pytest.raises(ValueError, match="words_tiny.json holds no results of this experiment"):
        reproduce("--redraw")


def test_redrawing_of_a_damaged_cell_is_refused(ran, reproduce, tmp_path):
    reproduce()
    results, table = (tmp_path / f"results/words_tiny.{kind}" for kind in ("json", "md"))
    content = json.loads(results.read_text())
    content["cells"]["b"]["metrics"] = {"length": "four"}
    results.write_text(json.dumps(content))
    before = table.read_text()
    with pytest.raises(ValueError, match=r"words_tiny.json: there is no table of the cell b \(ValueError.*mend or"):
        reproduce("--redraw")
    assert table.read_text() == before


def test_redrawing_without_matplotlib_is_refused(ran, reproduce, monkeypatch):
    reproduce()
    monkeypatch.setattr("studies.harness.reproduction.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--redraw needs matplotlib: pip install"):
        reproduce("--redraw")


# The figures of SparseBERT.


@pytest.fixture
def run_smallest(checkpoints, tmp_path):
    """`run_smallest(name, cell, **settings)`: one cell of an experiment on a tiny model; its folder and files."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(f"w{(i * j) % 90}" for j in range(1, 30)) for i in range(1, 80)))
    settings = {"base_model": checkpoints["stock"], "text": str(text), "validation": str(text), "max_length": 16}
    settings |= {"checkpoint_steps": 2, "max_steps": 2, "batch_size": 4, "max_validation_tokens": 200}

    def run(name, cell, **own):
        options = ReproductionArguments(output=str(tmp_path / "out"), runs=str(tmp_path / "runs"), only=cell)
        run_experiment(name, options, settings | own)
        return tmp_path / f"runs/{name}_tiny/{cell}", result_files(name, options)

    return run


def test_p_of_a_search_is_kept_and_drawn(run_smallest, tmp_path):
    folder, files = run_smallest("sparsebert_table1", "soft_seed_1", search_steps=2)
    kept = tmp_path / "out/sparsebert_table1_tiny/soft_seed_1/mean_probs.safetensors"
    figure = tmp_path / "out/sparsebert_table1_tiny_figure2.png"
    assert files[-2:] == [figure, kept]
    probs = load_file(folder / "mask_probs.safetensors")["probs"]
    assert probs.shape == (4, 16, 16)
    mean = load_file(kept)["probs"]
    assert mean.dtype == torch.float16 and torch.allclose(mean.float(), probs.mean(0), atol=1e-3)
    before = figure.read_bytes()
    shutil.rmtree(tmp_path / "runs")
    figure.unlink()
    options = ReproductionArguments(output=str(tmp_path / "out"), runs=str(tmp_path / "runs"), redraw=True)
    run_experiment("sparsebert_table1", options, {})
    assert figure.read_bytes() == before


def test_dense_cells_keep_nothing(run_smallest):
    _, files = run_smallest("sparsebert_table1", "dense_seed_1")
    assert [path.suffix for path in files] == [".json", ".md", ".png"]


def test_seeds_of_other_lengths_are_not_averaged(tmp_path):
    experiment, finished = EXPERIMENTS["sparsebert_table1"], {}
    for seed, length in enumerate((20, 20, 24)):
        (tmp_path / f"soft_{seed}").mkdir()
        save_file({"probs": torch.rand(length, length).half()}, tmp_path / f"soft_{seed}/mean_probs.safetensors")
        finished[f"soft_{seed}"] = {"settings": {"system": "soft", "seed": seed}, "metrics": {}}
    experiment.pictures["figure2"](finished, tmp_path, tmp_path / "all.png")
    del finished["soft_2"]
    experiment.pictures["figure2"](finished, tmp_path, tmp_path / "same.png")
    assert (tmp_path / "all.png").read_bytes() == (tmp_path / "same.png").read_bytes()


def drawn(figure, monkeypatch):
    """The arrays of the heat maps of a figure that a function draws."""
    images = []
    monkeypatch.setattr("studies.harness.result_charts.save_figure", lambda f, path: images.extend(
        image.get_array() for axis in f.axes[:2] for image in axis.get_images()
    ))  # fmt: skip
    figure()
    return images


def test_figure_2_has_the_mean_over_seeds_and_its_sketch(monkeypatch):
    probs = torch.rand(3, 32, 32)
    heat_map, pooled = drawn(lambda: plot_importance(probs, "any.png"), monkeypatch)
    mean = probs.mean(0)
    assert torch.allclose(torch.tensor(heat_map), mean)
    assert torch.allclose(torch.tensor(pooled), sketch(mean))


def test_few_tokens_have_no_sketch(monkeypatch):
    assert len(drawn(lambda: plot_importance(torch.rand(1, 8, 8), "any.png"), monkeypatch)) == 1
    with pytest.raises(ValueError, match=r"probs must have shape \(S, n, n\), got \(8, 8\)"):
        plot_importance(torch.rand(8, 8), "any.png")


def test_the_mask_of_a_search_is_kept_and_drawn(run_smallest, tmp_path):
    folder, files = run_smallest("sparsebert_table3", "dam_u_target_0.86_seed_2", targets=[0.86])
    kept = tmp_path / "out/sparsebert_table3_tiny/dam_u_target_0.86_seed_2"
    assert files[-3:] == [
        tmp_path / "out/sparsebert_table3_tiny_figure5.png", kept / "mask.safetensors", kept / "mask_config.json",
    ]  # fmt: skip
    found, there = SparseMask.from_pretrained(kept), SparseMask.from_pretrained(folder)
    assert torch.equal(found.to_table(), there.to_table()) and found.metadata == {"search": "dam_u"}
    assert str(tmp_path) not in (kept / "mask_config.json").read_text()


def test_the_figures_show_the_first_seed_at_the_papers_sparsities(tmp_path, monkeypatch):
    experiment = EXPERIMENTS["sparsebert_table3"]
    cells = experiment.cells(experiment.arguments())
    build_pattern("window", 16, 2).save_pretrained(tmp_path / "run")
    shown = [name for name, cell in cells.items() if experiment.keep(cell, tmp_path / "run")]
    masks = {}
    for figure, (search, target) in SHOWN.items():
        assert f"{search}_target_{target:g}_seed_1" in shown and not any("_diag" in name for name in shown)
        for seed in (2, 3):
            masks[figure, seed] = build_pattern("random", 16, 2, sparsity=0.8, seed=seed)
            masks[figure, seed].save_pretrained(tmp_path / f"{search}_target_{target:g}_seed_{seed}")
    finished = {name: {"settings": cell, "metrics": {}} for name, cell in cells.items()}
    drawings = []
    monkeypatch.setattr(
        "studies.sparsebert_paper.sparsebert_table3.plot_heads", lambda *arguments: drawings.append(arguments)
    )
    for figure in SHOWN:
        experiment.pictures[figure](finished, tmp_path, tmp_path / f"{figure}.png")
        mask, path, title = drawings[-1]
        assert torch.equal(mask.to_table(), masks[figure, 2].to_table()) and path.name == f"{figure}.png"
        assert title.endswith("seed 2")


def test_nothing_is_drawn_of_cells_that_kept_nothing(tmp_path):
    for name in ("sparsebert_table1", "sparsebert_table3"):
        experiment = EXPERIMENTS[name]
        cells = plan_cells(replace(experiment, check=lambda cell: None), ReproductionArguments(), {})
        finished = {cell: {"settings": settings, "metrics": {}} for cell, settings in cells.items()}
        for figure, picture in experiment.pictures.items():
            picture(finished, tmp_path, tmp_path / f"{figure}.png")
    assert not list(tmp_path.iterdir())
