"""Pictures are written without a display; the groups of positions hold the right means."""

import json
import subprocess
import sys

import pytest
import torch

from sparsebert.masks.patterns import build_pattern
from sparsebert.masks.sparse_mask import toeplitz_index
from sparsebert.visualization import (
    main,
    plot_gallery,
    plot_heads,
    plot_mean_probs,
    plot_offset_profile,
    position_groups,
)


pytest.importorskip("matplotlib")

PNG = b"\x89PNG"


def is_picture(path):
    return path.read_bytes().startswith(PNG)


def test_groups_by_hand():
    """P is a hundredth of the offset, 1 in the rows and columns of the special tokens."""
    probs = toeplitz_index(12).float().div(100).repeat(2, 1, 1)
    probs[:, [0, -1]] = 1.0
    probs[:, :, [0, -1]] = 1.0
    # Offset d occurs 2 (10 - d) times among the 10 inner tokens, the diagonal 10 times.
    expected = {
        "diagonal": 0.0,
        "offset_1": 0.01,
        "offsets_2_3": (8 * 0.02 + 7 * 0.03) / 15,
        "offsets_4_8": (6 * 0.04 + 5 * 0.05 + 4 * 0.06 + 3 * 0.07 + 2 * 0.08) / 20,
        "beyond_8": 0.09,
        "special_tokens": 1.0,
    }
    assert position_groups(probs, "first_last") == pytest.approx(expected)
    # A head more, all zero, halves the means of one.
    assert position_groups(torch.stack([probs[0], 0 * probs[0]]))["special_tokens"] == pytest.approx(0.5)
    json.dumps(position_groups(probs))


def test_groups_partition_the_matrix():
    probs = torch.rand(3, 15, 15, generator=torch.Generator().manual_seed(0))
    probs[:, 0] = probs[:, :, 0] = 0.25
    groups = position_groups(probs, "first")
    assert groups["special_tokens"] == pytest.approx(0.25)
    sizes = {"diagonal": 14, "offset_1": 26, "offsets_2_3": 46, "offsets_4_8": 80, "beyond_8": 30}
    total = sum(size * groups[name] for name, size in sizes.items()) + (15 * 15 - sum(sizes.values())) * 0.25
    assert total == pytest.approx(probs.sum(dtype=torch.float64).item() / 3)


def test_groups_without_positions_are_left_out():
    assert list(position_groups(torch.ones(1, 4, 4), "none")) == ["diagonal", "offset_1", "offsets_2_3"]
    assert list(position_groups(torch.ones(1, 2, 2), "first_last")) == ["special_tokens"]


def test_plots(tmp_path):
    probs = torch.rand(3, 20, 20)
    plot_heads(build_pattern("bigbird", 20, 3), tmp_path / "new" / "heads.png")
    plot_heads(probs > 0.5, tmp_path / "table.png")
    plot_heads(build_pattern("fixed_cycle", 20, 2, num_layers=3), tmp_path / "layers.png")
    plot_mean_probs(probs.bfloat16().requires_grad_(), tmp_path / "mean.png")
    plot_offset_profile(probs, tmp_path / "offsets.png")
    plot_offset_profile(probs[:1, :5, :5], tmp_path / "short.pdf", "none")
    plot_gallery(tmp_path / "gallery.png")
    assert all(map(is_picture, tmp_path.rglob("*.png")))
    assert len(list(tmp_path.rglob("*.png"))) == 6
    assert (tmp_path / "short.pdf").read_bytes().startswith(b"%PDF")


def test_bad_shapes(tmp_path):
    for plot in (plot_mean_probs, plot_offset_profile):
        with pytest.raises(ValueError, match="probs must have shape \\(H, n, n\\), got \\(4, 4\\)"):
            plot(torch.rand(4, 4), tmp_path / "bad.png")
    with pytest.raises(ValueError, match="mask_or_table must have shape"):
        plot_heads(torch.ones(4, 4, dtype=torch.bool), tmp_path / "bad.png")
    with pytest.raises(ValueError, match="special_tokens must be one of"):
        position_groups(torch.rand(1, 4, 4), "last")
    with pytest.raises(ValueError, match="no position outside special_tokens"):
        plot_offset_profile(torch.rand(1, 2, 2), tmp_path / "bad.png")
    assert not (tmp_path / "bad.png").exists()


def test_command(tmp_path, capsys):
    build_pattern("window", 16, 2, num_global_tokens=2).save_pretrained(tmp_path / "mask")
    main([str(tmp_path / "mask"), str(tmp_path / "out"), "--gallery"])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["heads.png", "mean.png", "offsets.png", "patterns.png", "position_groups.json"]
    assert json.loads((tmp_path / "out" / "position_groups.json").read_text())["offset_1"] == 1.0

    main(["--gallery", str(tmp_path / "gallery")])
    assert [path.name for path in (tmp_path / "gallery").iterdir()] == ["patterns.png"]

    with pytest.raises(SystemExit):
        main([str(tmp_path / "out")])
    assert "give MASK_FOLDER OUT_DIR, or --gallery OUT_DIR" in capsys.readouterr().err


def test_import_does_not_load_matplotlib():
    code = "import sys, sparsebert.visualization; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
