"""
Pictures of masks and of mask probabilities, and the mean probability of each group of positions.

    python -m sparsebert.visualization MASK_FOLDER OUT_DIR
    python -m sparsebert.visualization --gallery OUT_DIR

Letters: L layers, H heads, n length, P the probability that a position is kept (a mask is the case of 0 and 1).
"""

import argparse
import json
import math
from pathlib import Path

import torch

from .masks.patterns import CYCLES, PATTERNS, build_pattern
from .masks.sparse_mask import SparseMask, special_entries, toeplitz_index


WHITE_ATTENDS = "white: may attend, black: removed"
KEPT = "P, probability that the position is kept"

# At a few tokens the cycles' own defaults, made for 256, would be all but dense.
GALLERY_PARAMETERS = {
    "strided_cycle": {"stride": 4},
    "fixed_cycle": {"stride": 4},
    "star_cycle": {"window_size": 1},
}

# First and last offset of each group; None is the longest.
OFFSET_GROUPS = {
    "diagonal": (0, 0),
    "offset_1": (1, 1),
    "offsets_2_3": (2, 3),
    "offsets_4_8": (4, 8),
    "beyond_8": (9, None),
}


def _as_probs(probs):
    """P in float32 on the CPU, checked to be `(H, n, n)`."""
    probs = torch.as_tensor(probs).detach().cpu().float()
    if probs.dim() != 3 or probs.shape[1] != probs.shape[2] or 0 in probs.shape:
        raise ValueError(f"probs must have shape (H, n, n), got {tuple(probs.shape)}")
    return probs


def position_groups(probs, special_tokens="first_last"):
    """
    Mean P of the diagonal, of near and far offsets `abs(i - j)`, and of the special tokens.

    Args:
        probs (`torch.Tensor`): `(H, n, n)`.
        special_tokens (`str`, *optional*, defaults to `"first_last"`): `"none"`, `"first"` or `"first_last"`; their
            rows and columns are a group of their own and are left out of the others.

    Returns:
        `dict[str, float]` with `diagonal`, `offset_1`, `offsets_2_3`, `offsets_4_8`, `beyond_8` and `special_tokens`;
        a group without positions is left out.
    Raises:
        ValueError: If `probs` has another shape or `special_tokens` is unknown.
    Source: SparseBERT (arXiv 2102.12871), Section 3.1.2 and Figure 2.
    """
    probs = _as_probs(probs)
    length = probs.shape[-1]
    special = special_entries(length, special_tokens)
    offset = toeplitz_index(length)
    members = {
        name: ~special & (first <= offset) & (offset <= (length if last is None else last))
        for name, (first, last) in OFFSET_GROUPS.items()
    }
    members["special_tokens"] = special
    # In double precision: n^2 entries of many heads.
    return {name: probs[:, where].double().mean().item() for name, where in members.items() if where.any()}


def _figure(width, height):
    """A figure that belongs to no window system and to no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="compressed", dpi=150)


def _save(figure, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_mask(axis, table):
    """One mask `(n, n)`, white where a query may attend."""
    axis.imshow(table.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])


def plot_heads(mask_or_table, path):
    """
    The mask of every head, one row of panels per layer if the layers differ.

    Args:
        mask_or_table ([`SparseMask`] or `torch.Tensor`): Bool `(H, n, n)` or `(L, H, n, n)`.
        path (`str` or `os.PathLike`): Image to write, its folder is created.
    Raises:
        ValueError: If the table has another shape.
    """
    table = mask_or_table.to_table() if isinstance(mask_or_table, SparseMask) else mask_or_table
    table = torch.as_tensor(table).detach().cpu()
    table = table[None] if table.dim() == 3 else table
    if table.dim() != 4 or table.shape[2] != table.shape[3] or 0 in table.shape:
        raise ValueError(f"mask_or_table must have shape (H, n, n) or (L, H, n, n), got {tuple(table.shape)}")
    num_layers, num_heads, length, _ = table.shape
    num_columns = num_heads if num_layers > 1 else min(num_heads, 4 if num_heads <= 12 else 6)
    num_rows = num_layers if num_layers > 1 else math.ceil(num_heads / num_columns)
    # Small enough for a dozen layers; never narrower than the title.
    panel = 1.3 if num_layers > 1 else 1.9
    figure = _figure(max(panel * num_columns + 0.5, 4.6), max((panel + 0.35) * num_rows + 0.9, 3.2))
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axis in axes[num_layers * num_heads :]:
        axis.set_axis_off()
    for index, (axis, head) in enumerate(zip(axes, table.flatten(0, 1), strict=False)):
        _draw_mask(axis, head)
        name = f"layer {index // num_heads} head {index % num_heads}" if num_layers > 1 else f"head {index}"
        axis.set_title(f"{name}\n{1 - head.float().mean():.1%} removed", fontsize=7 if num_layers > 1 else 8)
    heads = (f"{num_layers} layers x " if num_layers > 1 else "") + f"{num_heads} head{'s' * (num_heads > 1)}"
    figure.suptitle(
        f"Attention masks: {heads}, {length} tokens, {1 - table.float().mean():.1%} removed\n({WHITE_ATTENDS})",
        fontsize=10,
    )
    figure.supxlabel("key position j", fontsize=9)
    figure.supylabel("query position i", fontsize=9)
    _save(figure, path)


def plot_mean_probs(probs, path, quantity=KEPT):
    """
    P averaged over heads as a heat map.

    Args:
        probs (`torch.Tensor`): `(H, n, n)`.
        path (`str` or `os.PathLike`): Image to write, its folder is created.
        quantity (`str`, *optional*): What the numbers are, for the colour bar.
    Raises:
        ValueError: If `probs` has another shape.
    Source: SparseBERT (arXiv 2102.12871), Figure 2a.
    """
    probs = _as_probs(probs)
    num_heads, length, _ = probs.shape
    figure = _figure(5.6, 4.9)
    axis = figure.subplots()
    mean = probs.mean(0).numpy()
    # A constant, as of a dense mask, would get a scale from below to beyond it.
    limits = {"vmin": 0, "vmax": 1} if mean.min() == mean.max() else {}
    image = axis.imshow(mean, cmap="cividis", interpolation="nearest", **limits)
    figure.colorbar(image, ax=axis, label=f"mean over heads of\n{quantity}")
    heads = f"{num_heads} head{'s' * (num_heads > 1)}"
    axis.set_title(f"What is kept by position\n({heads}, {length} tokens; yellow: kept most)", fontsize=11)
    axis.set_xlabel("key position j")
    axis.set_ylabel("query position i")
    _save(figure, path)


def plot_offset_profile(probs, path, special_tokens="first_last", quantity=KEPT):
    """
    P against the offset `abs(i - j)`: mean over heads, and the range of the heads as a band.

    Args:
        probs (`torch.Tensor`): `(H, n, n)`.
        path (`str` or `os.PathLike`): Image to write, its folder is created.
        special_tokens (`str`, *optional*, defaults to `"first_last"`): Tokens whose rows and columns are left out.
        quantity (`str`, *optional*): What the numbers are, for the axis.
    Raises:
        ValueError: If `probs` has another shape, `special_tokens` is unknown, or these tokens are all there is.
    """
    probs = _as_probs(probs)
    num_heads, length, _ = probs.shape
    others = ~special_entries(length, special_tokens)
    if not others.any():
        raise ValueError(f"probs of {length} tokens have no position outside special_tokens {special_tokens!r}")
    offset = toeplitz_index(length)[others]
    sums = torch.zeros(num_heads, length).index_add_(1, offset, probs[:, others])
    counts = offset.bincount(minlength=length)
    seen = counts.nonzero().flatten()
    profile = (sums[:, seen] / counts[seen]).numpy()  # (H, offsets)
    seen = seen.numpy()

    figure = _figure(6.4, 4.2)
    axis = figure.subplots()
    axis.fill_between(
        seen, profile.min(0), profile.max(0), color="#56B4E9", alpha=0.4, lw=0, label="lowest to highest head"
    )
    marker = "o" if len(seen) <= 160 else None
    axis.plot(seen, profile.mean(0), color="#0072B2", lw=1.5, marker=marker, ms=2.5, label="mean over heads")
    # Logarithmic, because what matters is near the diagonal; linear up to 1, to show offset 0.
    if seen[-1] > 16:
        ticks = [0] + [2**k for k in range(int(seen[-1]).bit_length())]
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set_xticks(ticks, labels=map(str, ticks))
        axis.set_xticks([], minor=True)
    left_out = {"none": "", "first": ", first token left out", "first_last": ", first and last token left out"}
    heads = f"{num_heads} head{'s' * (num_heads > 1)}"
    axis.set_title(f"What is kept by distance\n({heads}, {length} tokens{left_out[special_tokens]})", fontsize=11)
    axis.set_xlabel("offset |i - j| between query and key (0 is the diagonal)")
    axis.set_ylabel(f"mean at each offset of\n{quantity}")
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.3)
    axis.legend()
    _save(figure, path)


def plot_gallery(path, length=16):
    """
    One head of every pattern under its default parameters (cycles: shorter strides), cycles as the union of their
    patterns.

    Args:
        path (`str` or `os.PathLike`): Image to write, its folder is created.
        length (`int`, *optional*, defaults to 16): n.
    Source: SparseBERT (arXiv 2102.12871), Figure 1.
    """
    num_columns = 5
    num_rows = math.ceil(len(PATTERNS) / num_columns)
    figure = _figure(2.1 * num_columns + 0.5, 2.85 * num_rows + 0.6)
    axes = figure.subplots(num_rows, num_columns).ravel()
    for axis in axes[len(PATTERNS) :]:
        axis.set_axis_off()
    for axis, name in zip(axes, PATTERNS, strict=False):
        layout = "union" if name in CYCLES else None
        mask = build_pattern(name, length, 1, head_configuration=layout, **GALLERY_PARAMETERS.get(name, {}))
        _draw_mask(axis, mask.to_table()[0, 0])
        parameters = [f"{key}={value}" for key, value in mask.metadata["pattern_parameters"].items()]
        axis.set_title(f"{name}{' (union)' if layout else ''}\n{mask.sparsity:.1%} removed", fontsize=10)
        axis.set_xlabel("\n".join(parameters), fontsize=7)
    figure.suptitle(f"Attention patterns at {length} tokens ({WHITE_ATTENDS})", fontsize=12)
    figure.supxlabel("key position j", fontsize=9)
    figure.supylabel("query position i", fontsize=9)
    _save(figure, path)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m sparsebert.visualization",
        description="Draw a saved mask: heads.png, mean.png, offsets.png and position_groups.json.",
    )
    parser.add_argument("mask_folder", nargs="?", help="folder or Hub id with mask_config.json and mask.safetensors")
    parser.add_argument("out_dir", type=Path, help="created if missing")
    parser.add_argument("--gallery", action="store_true", help="draw every known pattern as well: patterns.png")
    options = parser.parse_args(arguments)
    if options.mask_folder is None and not options.gallery:
        parser.error("give MASK_FOLDER OUT_DIR, or --gallery OUT_DIR")
    if options.gallery:
        plot_gallery(options.out_dir / "patterns.png")
    if options.mask_folder is not None:
        mask = SparseMask.from_pretrained(options.mask_folder)
        kept = mask.to_table().flatten(0, 1).float()  # (L * H, n, n)
        quantity = "M, 1 where the position is kept, else 0"
        plot_heads(mask, options.out_dir / "heads.png")
        plot_mean_probs(kept, options.out_dir / "mean.png", quantity)
        plot_offset_profile(kept, options.out_dir / "offsets.png", mask.special_tokens, quantity)
        groups = json.dumps(position_groups(kept, mask.special_tokens), indent=2)
        (options.out_dir / "position_groups.json").write_text(groups + "\n")


if __name__ == "__main__":
    main()
