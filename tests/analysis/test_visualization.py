"""Pictures are written without a display."""

import pytest
import torch

from sparsebert.analysis.importance import as_runs, head_groups, offset_profile, sketch
from sparsebert.analysis.pictures import importance_pictures, mask_pictures
from sparsebert.analysis.pictures.charts import plot_scores
from sparsebert.analysis.pictures.importance_pictures import (
    plot_groups,
    plot_mean_probs,
    plot_offset_profile,
    plot_sketch,
)
from sparsebert.analysis.pictures.mask_pictures import plot_heads
from sparsebert.masks.patterns import build_pattern


pytest.importorskip("matplotlib")


def test_special_tokens_do_not_set_the_colors(tmp_path, monkeypatch):
    """And a picture of P does not say that it is one of a mask."""
    drawn, titles, stock = [], [], importance_pictures.draw_table

    def draw(*arguments, vmin, vmax, **fields):
        drawn.append((vmin, vmax))
        return stock(*arguments, vmin=vmin, vmax=vmax, **fields)

    monkeypatch.setattr(importance_pictures, "draw_table", draw)
    monkeypatch.setattr(importance_pictures, "save_figure", lambda figure, path: titles.append(figure.get_suptitle()))
    probs = torch.rand(1, 8, 8) / 100 + 0.5
    probs[:, 0] = probs[..., -1] = 1
    plot_mean_probs(probs, tmp_path / "p.png")
    plot_mean_probs(probs, tmp_path / "mask.png", "M")
    inner = probs[0, 1:-1, 1:-1]
    assert drawn == [pytest.approx((float(inner.min()), float(inner.max())))] * 2
    assert titles[0].startswith("P before freezing") and titles[1].startswith("What is kept")


def test_plots(tmp_path):
    probs = torch.rand(3, 20, 20)
    plot_heads(build_pattern("bigbird", 20, 3), tmp_path / "new" / "heads.png")
    plot_heads(probs > 0.5, tmp_path / "table.png")
    plot_heads(build_pattern("fixed_cycle", 20, 2, num_layers=3), tmp_path / "layers.png")
    plot_mean_probs(probs.bfloat16().requires_grad_(), tmp_path / "mean.png")
    plot_offset_profile(probs, tmp_path / "offsets.png")
    plot_offset_profile(probs[:1, :5, :5], tmp_path / "short.pdf", "none")
    curves = {"learned": ([0.5, 0.9], [0.8, 0.7], [None, 0.01]), "random": ([0.5], [0.6], [None])}
    for dense in (None, 0.5):
        plot_scores(curves, tmp_path / f"scores_{dense}.png", "accuracy", "Title", dense=dense)
    assert [path.read_bytes()[:4] for path in tmp_path.rglob("*.png")] == 7 * [b"\x89PNG"]
    assert (tmp_path / "short.pdf").read_bytes().startswith(b"%PDF")


@pytest.fixture
def figures(monkeypatch):
    """The figures of importance, which are not written."""
    made = []
    monkeypatch.setattr(importance_pictures, "save_figure", lambda figure, path: made.append(figure))
    return made


def test_what_the_pictures_show(figures):
    probs = torch.rand(3, 20, 20)
    for plot in (plot_mean_probs, plot_sketch, plot_offset_profile, plot_groups):
        plot(probs, "any")
    image, pooled = (torch.tensor(figure.axes[0].get_images()[0].get_array()) for figure in figures[:2])
    torch.testing.assert_close(image, probs.mean(0))
    torch.testing.assert_close(pooled, sketch(probs.mean(0)), check_dtype=False)
    (line,) = (line for line in figures[2].axes[0].lines if line.get_label() == "mean over heads")
    assert line.get_ydata() == pytest.approx(offset_profile(as_runs(probs), "first_last")[1].mean((0, 1, 2)))
    plot_offset_profile(probs, "any", signed=True)
    (axis,) = figures.pop().axes
    (line,) = (line for line in axis.lines if line.get_label() == "mean over heads")
    assert line.get_xdata().tolist() == list(range(-17, 18)) and "i - j" in axis.get_xlabel()
    means = [line.get_ydata()[0] for line in figures[3].axes[0].lines if line.get_marker() == "D"]
    assert means == pytest.approx([values.mean() for values in head_groups(as_runs(probs), "first_last").values()])


@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 2, 3, 20, 20)])
def test_runs_and_layers(figures, shape):
    for plot in (plot_mean_probs, plot_sketch, plot_groups, plot_offset_profile):
        plot(torch.rand(shape), "any")
    assert len(figures) == 4 and all(len(figure.axes) > 0 for figure in figures)
    assert sum(len(axis.get_images()) for axis in figures[0].axes) == (1 if len(shape) == 3 else 3)  # and each layer


def test_a_mask_longer_than_its_panel_keeps_thin_lines(tmp_path):
    """One diagonal of 1024 tokens on some 300 pixels: no row of them may be all black."""
    image = pytest.importorskip("matplotlib.image")
    plot_heads(torch.eye(1024, dtype=torch.bool)[None], tmp_path / "eye.png")
    pixels = image.imread(tmp_path / "eye.png")[..., 0]
    black = (pixels < 0.5).mean(1) > 0.4  # rows within the panel
    inside = pixels[black.nonzero()[0][3] : black.nonzero()[0][-3]]
    columns = (inside < 0.5).mean(0) > 0.9
    assert (inside[:, columns.nonzero()[0][3] : columns.nonzero()[0][-3]].max(1) > 0.02).mean() > 0.95


def test_layers_and_heads_are_named_once(monkeypatch):
    made = []
    monkeypatch.setattr(mask_pictures, "save_figure", lambda figure, path: made.append(figure))
    plot_heads(build_pattern("fixed_cycle", 20, 3, num_layers=2), "any")
    texts = [text for axis in made[0].axes for text in (axis.get_ylabel(), axis.get_title().split("\n")[0])]
    assert [text for text in texts if "layer" in text] == ["layer 0", "layer 1"]
    assert [text for text in texts if "head" in text] == ["head 0", "head 1", "head 2"]


def test_bad_shapes(tmp_path):
    for plot in (plot_mean_probs, plot_sketch, plot_groups, plot_offset_profile):
        with pytest.raises(ValueError, match="probs must have shape \\(H, n, n\\).*got \\(4, 4\\)"):
            plot(torch.rand(4, 4), tmp_path / "bad.png")
    with pytest.raises(ValueError, match="mask_or_table must have shape"):
        plot_heads(torch.ones(4, 4, dtype=torch.bool), tmp_path / "bad.png")
    with pytest.raises(ValueError, match="no position outside special_tokens"):
        plot_offset_profile(torch.rand(1, 2, 2), tmp_path / "bad.png")
    with pytest.raises(ValueError, match="a sketch needs at least 16 tokens, got 10"):
        plot_sketch(torch.rand(1, 10, 10), tmp_path / "bad.png")
    assert not (tmp_path / "bad.png").exists()
