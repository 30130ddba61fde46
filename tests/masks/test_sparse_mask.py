"""The frozen mask: its three forms, lengths, special tokens, and valid and invalid files."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from sparsebert.masks.expansion import FORMS, LENGTH_POLICIES, signed_parameters, toeplitz_index
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
    sizes = {"offsets": length, "blocks": -(-length // 4)}
    if not fields.get("symmetric", True):
        sizes = {name: 2 * size - 1 for name, size in sizes.items()}
    shape = {name: (num_layers, 3, size) for name, size in sizes.items()}
    shape = shape.get(form, (num_layers, 3, length, length))
    return SparseMask(bits(*shape), length, form, block_size=4 if form == "blocks" else None, **fields)


def entry(mask, layer, head, i, j):
    """One entry by the definition of the form."""
    keep = mask.keep[layer, head]
    if mask.form == "table":
        return keep[i, j]
    block_size = mask.block_size or 1
    distance = i // block_size - j // block_size
    parameter = abs(distance) if mask.symmetric else distance + len(keep) // 2
    return keep[parameter] if 0 <= parameter < len(keep) else torch.tensor(False)


@pytest.mark.parametrize("diagonal", [None, False, True])
@pytest.mark.parametrize(
    "form, policy, symmetric",
    [
        each
        for each in itertools.product(FORMS, LENGTH_POLICIES, [True, False])
        if each[0] != "table" or each[1:] in (("dense", True), ("error", True))
    ],
)
def test_entries_by_their_definition(form, policy, diagonal, symmetric):
    """Structure, then special tokens, then the diagonal, at the mask's own length and others."""
    mask = make_mask(form, 2, length_policy=policy, diagonal=diagonal, symmetric=symmetric)
    assert (mask.num_layers, mask.num_heads, make_mask(form).num_layers) == (2, 3, 1)
    for length in (1, 2, 5, 11, 14):
        if length > 11 and policy == "error":
            with pytest.raises(ValueError, match=r"input of 14 tokens is longer than the mask \(11\)"):
                mask.to_table(length)
            continue
        expected = torch.ones(2, 3, length, length, dtype=torch.bool)
        for layer, head, i, j in itertools.product(range(2), range(3), range(length), range(length)):
            if max(i, j) < 11 or policy == "extend":
                expected[layer, head, i, j] = entry(mask, layer, head, i, j)
        assert torch.equal(mask.structure(length), expected)
        for special_tokens, special in (("none", []), ("first", [0]), ("first_last", [0, length - 1])):
            for rows in {True, not special}:
                table = expected.clone()
                table[..., :, special] = True
                table[..., special if rows else [], :] = True
                if diagonal is not None:
                    table.diagonal(dim1=-2, dim2=-1).fill_(diagonal)
                changed = mask.replace(special_tokens=special_tokens, special_rows=rows)
                assert torch.equal(changed.to_table(length), table)


def test_defaults_of_forms():
    assert [make_mask(form).length_policy for form in FORMS] == ["extend", "extend", "error"]
    assert torch.equal(make_mask("table").without_diagonal().replace(diagonal=None).keep, make_mask("table").keep)
    few = SparseMask(torch.ones(1, 2, dtype=torch.bool), 5, "offsets")
    assert torch.equal(few.to_table()[0, 0], toeplitz_index(5) < 2)


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


def test_empty_rows():
    keep = torch.zeros(2, 3, 4, dtype=torch.bool)
    keep[1, :, 1] = True
    mask = SparseMask(keep, 4, "offsets")
    assert mask.num_empty_rows() == 3 * 4
    with pytest.raises(ValueError, match="12 of 24 mask rows"):
        mask.check_rows()
    mask.replace(special_tokens="first").check_rows()
    mask.replace(diagonal=True).check_rows()
    # A single token loses its only key with the diagonal.
    assert mask.replace(special_tokens="first").without_diagonal().num_empty_rows(1) == 6


def test_equality():
    mask, offsets = make_mask("table"), make_mask("offsets")
    first = mask.replace(special_tokens="first")
    assert first != first.replace(special_rows=False)
    signed = offsets.replace(keep=signed_parameters(offsets.keep, True), symmetric=False)
    assert torch.equal(signed.to_table(), offsets.to_table()) and signed != offsets
    assert mask == make_mask("table") and mask == mask.replace(metadata={"run": "another"})
    for name, value in (
        ("keep", ~mask.keep),
        ("length_policy", "dense"),
        ("special_tokens", "first"),
        ("diagonal", 0),
    ):
        assert mask != mask.replace(**{name: value})
    assert mask != mask.without_diagonal()
    assert mask != "mask" and offsets != SparseMask(offsets.to_table(), 11)  # which masks longer inputs differently


def test_a_mask_shares_its_metadata_with_no_one():
    given = {"notes": ["first"]}
    mask = make_mask("table").replace(metadata=given)
    given["notes"].append("second")
    mask.replace().metadata["notes"].append("third")
    assert mask.metadata == {"notes": ["first"]}


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
        ({"symmetric": False}, "symmetric False needs a Toeplitz form"),
        ({"symmetric": "no"}, "symmetric must be one of True, False"),
        ({"symmetric": False, "keep": bits(1, 2, 6), "form": "offsets"}, r"not symmetric must have shape \(L, H, 5\)"),
        ({"symmetric": False, "keep": bits(1, 2, 9), "form": "offsets"}, "must have shape"),
        ({"symmetric": False, "keep": bits(1, 2, 2), "form": "blocks", "block_size": 2}, r"shape \(L, H, 3\)"),
        ({"rest": "mean", "rest_bias": torch.zeros(2, 3)}, r"rest_bias must be finite and of shape \(layers, 2\)"),
        ({"rest": "mean", "rest_bias": torch.full((1, 2), 1e300, dtype=torch.float64)}, "rest_bias must be finite"),
        ({"rest": "mean", "rest_bias": torch.zeros(0, 2).to(torch.float8_e4m3fn)}, "rest_bias must be finite and"),
        ({"rest_bias": torch.zeros(1, 2)}, "rest_bias has no meaning with rest 'none'"),
        ({"special_rows": None}, "special_rows must be one of True, False"),
        ({"special_rows": False}, "special_rows False needs special tokens, got special_tokens 'none'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SparseMask(**{"keep": bits(1, 2, 4, 4), "length": 4} | arguments)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("form, symmetric", [*[(form, True) for form in FORMS], ("offsets", False), ("blocks", False)])
@pytest.mark.parametrize("special_rows", [True, False])
def test_round_trip(tmp_path, form, num_layers, symmetric, special_rows):
    mask = make_mask(
        form,
        num_layers,
        symmetric=symmetric,
        special_rows=special_rows,
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
    described = json.loads((tmp_path / "new" / "folder" / CONFIG).read_text())
    assert described["sparsity"] == round(mask.sparsity, 6)
    # What an older version would read and not apply, it refuses; all else it reads.
    optional = {"symmetric": symmetric, "special_rows": special_rows}
    assert {name: described[name] for name in optional if name in described} == {
        name: value for name, value in optional.items() if not value
    }
    assert described["format_version"] == (1 if symmetric and special_rows else 2)
    again.save_pretrained(tmp_path / "again")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "new" / "folder" / name).read_bytes()


@pytest.fixture
def saved(tmp_path):
    make_mask("table").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_file(saved, name):
    (saved / name).unlink()
    with pytest.raises(MaskFileError, match=f"{name}: no such file"):
        SparseMask.from_pretrained(saved)


@pytest.mark.parametrize("name", ["absent.pt", "mask.bin", WEIGHTS])
def test_files_are_not_read_as_folders(saved, name):
    """Pickles above all, whether or not there are any."""
    (saved / "mask.bin").write_bytes(b"")
    with pytest.raises(MaskFileError, match="pickled files are never read"):
        SparseMask.from_pretrained(saved / name)


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
