"""The frozen mask: its three forms, lengths, special tokens, and valid and invalid files."""

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparsebert.masks.expansion import toeplitz_index
from sparsebert.masks.listing import list_masks
from sparsebert.masks.mask_files import MaskFileError
from sparsebert.masks.mask_sources import check_subfolder
from sparsebert.masks.patterns import build_pattern
from sparsebert.masks.sparse_mask import SparseMask


CONFIG = "mask_config.json"
WEIGHTS = "mask.safetensors"


def bits(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5


def make_mask(form, num_layers=1, length=11, **fields):
    shape = {"offsets": (num_layers, 3, length), "blocks": (num_layers, 3, -(-length // 4))}
    shape = shape.get(form, (num_layers, 3, length, length))
    return SparseMask(bits(*shape), length, form, block_size=4 if form == "blocks" else None, **fields)


def entry(mask, layer, head, i, j):
    """One entry by the definition of the form."""
    keep = mask.keep[layer, head]
    if mask.form == "table":
        return keep[i, j]
    block_size = mask.block_size or 1
    parameter = abs(i // block_size - j // block_size)
    return keep[parameter] if parameter < len(keep) else torch.tensor(False)


FORMS = ("offsets", "blocks", "table")


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_forms_entry_by_entry(form, num_layers):
    mask = make_mask(form, num_layers)
    assert (mask.num_layers, mask.num_heads) == (num_layers, 3)
    for length in (1, 5, 11):
        table = mask.to_table(length)
        assert table.shape == (num_layers, 3, length, length)
        assert table.dtype == torch.bool
        for layer in range(num_layers):
            for head in range(3):
                for i in range(length):
                    for j in range(length):
                        assert table[layer, head, i, j] == entry(mask, layer, head, i, j)


def test_few_offsets_leave_the_others_off():
    mask = SparseMask(torch.ones(1, 2, dtype=torch.bool), 5, "offsets")
    assert torch.equal(mask.to_table()[0, 0], toeplitz_index(5) < 2)


def test_leading_layer_may_be_left_out():
    for mask in map(make_mask, FORMS):
        assert mask.replace(keep=mask.keep[0]) == mask


def test_mask_is_a_snapshot():
    """Writing to the tensors that a mask returns does not change the mask."""
    mask = make_mask("table")
    before = mask.keep.clone()
    mask.to_table().fill_(True)
    mask.to_table(4).fill_(True)
    assert torch.equal(mask.keep, before)
    with pytest.raises(AttributeError, match=r"a SparseMask does not change: mask.replace\(diagonal=...\)"):
        mask.diagonal = False


@pytest.mark.parametrize("form", ["offsets", "blocks"])
def test_extend_leaves_unseen_offsets_off(form):
    mask = make_mask(form)
    assert mask.length_policy == "extend"
    table = mask.to_table(20)
    for i in range(20):
        for j in range(20):
            assert table[0, 1, i, j] == entry(mask, 0, 1, i, j)


@pytest.mark.parametrize("form", FORMS)
def test_dense_beyond_the_mask(form):
    mask = make_mask(form, length_policy="dense")
    table = mask.to_table(14)
    assert torch.equal(table[..., :11, :11], mask.to_table())
    assert table[..., 11:, :].all() and table[..., :, 11:].all()


@pytest.mark.parametrize("form", FORMS)
def test_error_beyond_the_mask(form):
    mask = make_mask(form, length_policy="error")
    mask.to_table(11)
    with pytest.raises(ValueError, match="input of 12 tokens is longer than the mask \\(11\\)"):
        mask.to_table(12)
    assert make_mask("table").length_policy == "error"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 6, 11])
def test_special_tokens(form, length):
    mask = make_mask(form)
    structure = mask.structure(length)
    for special_tokens, special in (("none", []), ("first", [0]), ("first_last", [0, length - 1])):
        expected = structure.clone()
        expected[..., special, :] = True
        expected[..., :, special] = True
        assert torch.equal(mask.replace(special_tokens=special_tokens).to_table(length), expected)
    assert torch.equal(mask.structure(length), structure)


@pytest.mark.parametrize("form", FORMS)
def test_diagonal_override(form):
    mask = make_mask(form, special_tokens="first_last")
    eye = torch.eye(11, dtype=torch.bool)
    assert torch.equal(mask.without_diagonal().to_table(), mask.to_table() & ~eye)
    assert torch.equal(mask.replace(diagonal=True).to_table(), mask.to_table() | eye)
    assert torch.equal(mask.without_diagonal().replace(diagonal=None).to_table(), mask.to_table())
    longer = mask.replace(diagonal=False, length_policy="dense").to_table(15)
    assert not (longer & torch.eye(15, dtype=torch.bool)).any()


def test_density_and_sparsity():
    keep = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    keep[0, 0, 0, :2] = True
    mask = SparseMask(keep, 4)
    assert mask.density == pytest.approx(2 / 32)
    assert mask.sparsity == pytest.approx(30 / 32)
    assert SparseMask(keep, 4, special_tokens="first").density == pytest.approx(14 / 32)


def test_empty_rows():
    keep = torch.zeros(2, 3, 4, dtype=torch.bool)
    keep[1, :, 1] = True
    mask = SparseMask(keep, 4, "offsets")
    assert mask.num_empty_rows() == 3 * 4
    with pytest.raises(ValueError, match="12 of 24 mask rows keep nothing"):
        mask.check_rows()
    mask.replace(special_tokens="first").check_rows()
    mask.replace(diagonal=True).check_rows()
    # A single token loses its only key with the diagonal.
    assert mask.replace(special_tokens="first").without_diagonal().num_empty_rows(1) == 6


@pytest.mark.parametrize("diagonal", [None, True, False])
@pytest.mark.parametrize("special_tokens", ["none", "first", "first_last"])
@pytest.mark.parametrize("form", FORMS)
def test_counts_are_those_of_the_table(form, special_tokens, diagonal):
    """Density and empty rows, which are counted without making the table."""
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 4, 5, 8, 9, 11):
        for density in (0.0, 0.15, 0.5, 1.0):
            for num_parameters in {1, (length + 1) // 2, length} if form == "offsets" else {0}:
                shape = {"offsets": (num_parameters,), "blocks": (-(-length // 4),), "table": (length, length)}[form]
                keep = torch.rand(2, 3, *shape, generator=generator) < density
                block_size = 4 if form == "blocks" else None
                mask = SparseMask(keep, length, form, block_size, special_tokens, diagonal=diagonal)
                table = mask.to_table()
                assert mask.density == table.sum().item() / table.numel()
                assert mask.num_empty_rows() == (~table.any(-1)).sum().item()


def test_equality():
    mask = make_mask("table")
    assert mask == make_mask("table")
    assert mask == mask.replace(metadata={"run": "another"})
    assert mask != mask.replace(keep=~mask.keep)
    assert mask != mask.replace(length_policy="dense")
    assert mask != mask.replace(special_tokens="first")
    assert mask != mask.without_diagonal()


def test_a_mask_shares_its_metadata_with_no_one():
    given = {"notes": ["first"]}
    mask = make_mask("table").replace(metadata=given)
    given["notes"].append("second")
    mask.replace().metadata["notes"].append("third")
    assert mask.metadata == {"notes": ["first"]}
    # The same entries in another form mask longer inputs differently.
    offsets = make_mask("offsets")
    assert offsets != SparseMask(offsets.to_table(), 11)
    assert mask != "mask"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"form": "blokcs"}, "form must be one of"),
        ({"special_tokens": "last"}, "special_tokens must be one of"),
        ({"last_token": "end"}, "last_token must be one of"),
        ({"diagonal": "off"}, "diagonal must be one of"),
        ({"length_policy": "pad"}, "length_policy must be one of"),
        ({"length_policy": "extend"}, "length_policy 'extend' needs a Toeplitz form"),
        ({"block_size": 4}, "block_size"),
        ({"form": "blocks"}, "block_size"),
        ({"form": "blocks", "block_size": 0}, "block_size"),
        ({"keep": bits(1, 2, 4, 4).float()}, "keep must be a bool tensor"),
        ({"keep": [[True]]}, "keep must be a bool tensor"),
        ({"keep": bits(1, 2, 4, 5)}, "must have shape"),
        ({"keep": bits(4, 4)}, "must have 4 dimensions"),
        ({"length": 4.0}, "length must be an integer of at least 1"),
        ({"keep": bits(1, 0, 4, 4)}, "must have shape"),
        ({"keep": bits(1, 2, 5), "form": "offsets"}, "must have shape"),
        ({"keep": bits(1, 2, 3), "form": "blocks", "block_size": 2}, "must have shape"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SparseMask(**{"keep": bits(1, 2, 4, 4), "length": 4} | arguments)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_round_trip(tmp_path, form, num_layers):
    mask = make_mask(
        form,
        num_layers,
        special_tokens="first_last",
        last_token="position",
        diagonal=False,
        length_policy="dense",
        metadata={"base_model": "base", "pattern_parameters": {"window_size": 2}},
    )
    mask.save_pretrained(tmp_path / "new" / "folder")
    again = SparseMask.from_pretrained(tmp_path / "new" / "folder")
    assert again == mask
    assert again.metadata == mask.metadata
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["README.md", WEIGHTS, CONFIG]
    assert SparseMask.from_pretrained(tmp_path, subfolder="new/folder") == mask
    assert json.loads((tmp_path / "new" / "folder" / CONFIG).read_text())["sparsity"] == round(mask.sparsity, 6)


def test_saving_over_another_mask(tmp_path):
    make_mask("table").save_pretrained(tmp_path)
    make_mask("offsets").save_pretrained(tmp_path)
    assert SparseMask.from_pretrained(tmp_path) == make_mask("offsets")


@pytest.fixture
def saved(tmp_path):
    make_mask("table").save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / CONFIG
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_file(saved, name):
    (saved / name).unlink()
    with pytest.raises(MaskFileError, match=f"{name}: no such file"):
        SparseMask.from_pretrained(saved)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_truncated_file(saved, name):
    content = (saved / name).read_bytes()
    for size in (0, 1, 7, 8, 9, 20, len(content) // 2, len(content) - 2):
        (saved / name).write_bytes(content[:size])
        with pytest.raises(MaskFileError, match=name):
            SparseMask.from_pretrained(saved)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_random_bytes(saved, name):
    generator = torch.Generator().manual_seed(0)
    for size in (1, 8, 100, 5000):
        content = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        (saved / name).write_bytes(bytes(content.tolist()))
        with pytest.raises(MaskFileError, match=name):
            SparseMask.from_pretrained(saved)


def test_header_that_promises_too_much(saved):
    """A safetensors header of 2^40 bytes must be refused, not allocated."""
    (saved / WEIGHTS).write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(MaskFileError, match=WEIGHTS):
        SparseMask.from_pretrained(saved)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_pickles_are_never_executed(saved):
    target = saved / "executed"
    pickled = pickle.dumps(Malicious(target))
    pickle.loads(pickled)
    assert target.exists(), "the pickle of this test does nothing"
    target.unlink()

    torch.save(Malicious(target), saved / "mask.bin")
    for content in (pickled, (saved / "mask.bin").read_bytes()):
        for name in (WEIGHTS, CONFIG):
            good = (saved / name).read_bytes()
            (saved / name).write_bytes(content)
            with pytest.raises(MaskFileError, match=name):
                SparseMask.from_pretrained(saved)
            (saved / name).write_bytes(good)
    # Given as the path itself, whether or not the file exists.
    for path in (saved / "mask.bin", saved / "absent.pt", saved / WEIGHTS):
        with pytest.raises(MaskFileError, match="pickled files are never read"):
            SparseMask.from_pretrained(path)
    assert not target.exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format_version": 2}, "format_version must be 1, got 2"),
        ({"format_version": "1"}, "format_version must be 1, got '1'"),
        ({"format_version": ...}, "not a mask description"),
        ({"num_heads": ...}, "not a mask description"),
        ({"num_heads": 4}, "bytes for shape"),
        ({"num_heads": -3}, "sizes must be positive integers"),
        ({"num_heads": "3"}, "sizes must be positive integers"),
        ({"num_layers": 2**30}, "sizes must be positive integers"),
        ({"length": 12}, "must have shape"),
        ({"length": 11.0}, "sizes must be positive integers"),
        ({"form": "rows"}, "form must be one of|bytes for shape"),
        ({"special_tokens": "all"}, "special_tokens must be one of"),
        ({"length_policy": "extend"}, "needs a Toeplitz form"),
        ({"block_size": 4}, "block_size"),
        ({"diagonal": "off"}, "diagonal must be one of"),
    ],
)
def test_bad_description(saved, changes, message):
    edit_config(saved, **changes)
    with pytest.raises(MaskFileError, match=message):
        SparseMask.from_pretrained(saved)


@pytest.mark.parametrize(
    "tensors",
    [
        {"keep": torch.zeros(45, dtype=torch.uint8)},
        {"keep": torch.zeros(47, dtype=torch.uint8)},
        {"keep": torch.zeros(46, dtype=torch.int8)},
        {"keep": torch.zeros(46, 1, dtype=torch.uint8)},
        {"mask": torch.zeros(46, dtype=torch.uint8)},
    ],
)
def test_bits_of_the_wrong_size(saved, tensors):
    """3 heads x 11 x 11 entries are 46 bytes."""
    save_file(tensors, saved / WEIGHTS)
    with pytest.raises(
        MaskFileError, match=r"expected 46 bytes.*; not the file that mask_config.json was written with"
    ):
        SparseMask.from_pretrained(saved)


def test_arguments_of_a_push_need_one(tmp_path):
    with pytest.raises(TypeError, match="subfolder has no meaning without push_to_hub=True"):
        build_pattern("window", 8, 1).save_pretrained(tmp_path, subfolder="a")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("subfolder", ["a/b", "a/b/", "./a/b", "a//b"])
def test_spellings_of_a_subfolder(tmp_path, subfolder):
    build_pattern("window", 8, 1).save_pretrained(tmp_path / "a/b")
    assert check_subfolder(subfolder) == "a/b" and check_subfolder(".") is check_subfolder("") is None
    assert [found["name"] for found in list_masks(tmp_path, subfolder=subfolder)] == ["a/b"]


def test_masks_of_checkpoints_and_unfinished_runs_are_not_listed(tmp_path):
    for name in ("a", "a/b", "ab", "a/checkpoint-5", "_unfinished", ".c.unfinished/d"):
        build_pattern("window", 8, 1).save_pretrained(tmp_path / name)
    assert [found["name"] for found in list_masks(tmp_path)] == ["a", "a/b", "ab"]
    # Not "ab", whose name only begins like the folder's.
    assert [found["name"] for found in list_masks(tmp_path, subfolder="a")] == ["a", "a/b"]


def test_unknown_argument(saved):
    with pytest.raises(TypeError, match="revison"):
        SparseMask.from_pretrained(saved, revison="main")
