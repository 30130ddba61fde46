"""The tile form of masks."""

import pytest
import torch

from sparsebert.masks.tiles import TILE, tile_form, tile_shares


def random_base(length, density, heads=3):
    return torch.rand(heads, length, length) < density


def block_base(length, heads=3, block=16):
    """A random mask of whole blocks, cut off at its edge."""
    table = random_base(-(-length // block), 0.5, heads)
    return table.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :length].clone()


def from_tiles(form, length):
    """Every entry looked up through the tile map and the pool."""
    i = torch.arange(length)
    words = form.pool[form.tiles[:, i // TILE][:, :, i // TILE].long(), (i % TILE)[:, None]]
    return (words >> (i % TILE)) & 1 == 1


CASES = {
    "random": lambda length: random_base(length, 0.3),
    "blocks": block_base,
    "empty": lambda length: random_base(length, 0.0),
    "full": lambda length: random_base(length, 1.1),
}


@pytest.mark.parametrize("length", [1, 16, 63, 64, 100, 129])
@pytest.mark.parametrize("case", CASES)
def test_lists_and_bits(case, length):
    """Against a loop over the tiles: the map, the bits, and both kinds of lists along both directions."""
    base = CASES[case](length)
    form = tile_form(base)
    assert torch.equal(from_tiles(form, length), base)
    count = -(-length // TILE)
    padded = torch.zeros(len(base), count * TILE, count * TILE, dtype=torch.bool)
    padded[:, :length, :length] = base
    cut = padded.view(len(base), count, TILE, count, TILE).transpose(2, 3)
    full, some = cut.all(-1).all(-1), cut.any(-1).any(-1)
    assert torch.equal(form.tiles == 1, full) and torch.equal(form.tiles > 0, some)
    lines = (
        (form.full_start, form.full, full, False),
        (form.full_start_t, form.full_t, full.mT, False),
        (form.partial_start, form.partial, some & ~full, False),
        (form.partial_start_t, form.partial_t, some & ~full, True),
    )
    for start, listed, chosen, transposed in lines:
        chosen = chosen.mT if transposed else chosen
        position = 0
        for head in range(len(base)):
            for one in range(chosen.shape[1]):
                for other in range(chosen.shape[2] + 1):
                    assert start[head, one, other] == position + chosen[head, one, :other].sum()
                tiles = chosen[head, one].nonzero()[:, 0]
                mine = listed[position : position + len(tiles)]
                if listed.dim() == 1:
                    assert mine.tolist() == tiles.tolist()
                else:
                    index = form.tiles[head].mT[one] if transposed else form.tiles[head, one]
                    assert mine.tolist() == [[tile, index[tile]] for tile in tiles.tolist()]
                position += len(tiles)
        assert position == len(listed)


def test_memory():
    """A scattered mask takes one bit per entry; a Toeplitz mask takes a few tiles at any length."""
    scattered = tile_form(random_base(512, 0.1))
    assert scattered.pool.nbytes <= 3 * 512 * 512 // 8 + 2 * 64 * 8
    offset = torch.arange(1024)
    toeplitz = tile_form((torch.rand(3, 1024) < 0.1)[:, (offset[:, None] - offset).abs()])
    assert len(toeplitz.pool) <= 2 + 3 * (2 * 16 - 1)


@pytest.mark.parametrize("length", [1, 63, 64, 200])
@pytest.mark.parametrize("density", [0.0005, 0.9995])
def test_shares_of_tiles(length, density):
    """Tiles that hold an entry, and full ones; at the edge those all whose entries within the mask are on."""
    base = random_base(length, density)
    parts = [part.flatten(1) for row in base.split(64, 1) for part in row.split(64, 2)]
    live = torch.stack([part.any(1) for part in parts]).float().mean().item()
    full = torch.stack([part.all(1) for part in parts]).float().mean().item()
    assert tile_shares(base, 64) == pytest.approx((live, full))
    assert (tile_form(base).tiles > 0).float().mean().item() == pytest.approx(live)
