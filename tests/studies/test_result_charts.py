"""Charts of an experiment's cells."""

from collections import Counter

import pytest

from studies.harness import result_charts
from studies.harness.result_charts import plot_lines, plot_values


pytest.importorskip("matplotlib")


@pytest.mark.parametrize("published", [None, 0.5])
def test_lines_and_values(tmp_path, published):
    lines = {"dense": [(0, 0.9, None)], "star": [(2, 0.5, None), (1, 0.25, published)], "band": [(1, 0.3, published)]}
    plot_lines(lines, tmp_path / "lines.png", "Title", "depth", "accuracy", percent="y")
    panels = {"before": {"long": [0.5, 0.7], "short": [0.9]}, "after": {"long": [0.95]}}
    plot_values(panels, tmp_path / "values.png", "Title", "short")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("lines.png", "values.png"))


@pytest.mark.parametrize("number, places", [(1, {0: 1}), (3, {0: 3}), (4, {0: 2, 1: 2}), (5, {0: 3, 1: 2})])
def test_at_most_three_panels_stand_beside_each_other(tmp_path, monkeypatch, number, places):
    drawn = []
    monkeypatch.setattr(result_charts, "save_figure", lambda figure, path: drawn.append(figure.axes))
    plot_values({f"panel {i}": {"a": [0.5]} for i in range(number)}, tmp_path / "values.png", "Title", "a")
    (axes,) = drawn
    assert [axis.get_xlabel() for axis in axes] == [f"panel {i}" for i in range(number)]
    assert Counter(axis.get_subplotspec().rowspan.start for axis in axes) == places


def test_lines_that_share_points_are_drawn_beside_each_other(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(result_charts, "save_figure", lambda figure, path: drawn.append(figure.axes[0].lines))
    shared = {name: [(1, 0.5, None), (2, 1.0, None)] for name in ("a", "b", "c")}
    plot_lines(shared, tmp_path / "lines.png", "Title", "depth", "accuracy")
    plot_lines({"a": [(1, 0.5, None)], "b": [(1, 0.6, None)]}, tmp_path / "lines.png", "Title", "depth", "")
    together, apart = ([line.get_xdata().tolist() for line in lines] for lines in drawn)
    assert len({xs[0] for xs in together}) == 3 and all(abs(x - round(x)) < 0.2 for xs in together for x in xs)
    assert apart == [[1.0], [1.0]]
