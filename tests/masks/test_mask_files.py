"""The files of a mask: bound together, written whole or not at all, and safe to read whoever wrote them."""

import hashlib
import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import save
from transformers import BertConfig, BertModel

from sparsebert import SparseBertConfig, SparseBertModel, attach, load
from sparsebert.commands import main
from sparsebert.files import replace_files, write_metrics
from sparsebert.learning.mask_search import described_search
from sparsebert.masks.listing import list_masks
from sparsebert.masks.mask_files import MaskFileError, check_sizes, sample_weights, weights_changed
from sparsebert.masks.sparse_mask import SparseMask


CONFIG = "mask_config.json"
WEIGHTS = "mask.safetensors"
FORMS = ("offsets", "blocks", "table")


def make_mask(form="table", seed=0, **fields):
    shape = {"offsets": (2, 3, 11), "blocks": (2, 3, 3), "table": (2, 3, 11, 11)}[form]
    shape = shape if fields.get("symmetric", True) else (2, 3, 2 * shape[-1] - 1)
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    return SparseMask(keep, 11, form, 4 if form == "blocks" else None, **fields)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def edit_config(folder, **changes):
    path = folder / CONFIG
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


# Writing


@pytest.mark.parametrize("form", FORMS)
def test_the_reader_of_the_documentation(form, tmp_path):
    page = (Path(__file__).parents[2] / "docs/sharing.md").read_text(encoding="utf-8")
    code = re.search(r"^## The files of a mask$.*?^```python\n(.*?)^```$", page, re.M | re.S)[1]
    exec(code, names_in_it := {})
    mask = make_mask(form, rest="mean", rest_bias=torch.ones(3, 2).T)  # not contiguous
    mask.save_pretrained(tmp_path)
    assert (names_in_it["read_keep"](tmp_path) == mask.keep.numpy()).all()


def test_files_of_two_masks_do_not_mix(tmp_path):
    """As after a kill between the two replacements, in either order."""
    for seed in (0, 1):
        make_mask(seed=seed).save_pretrained(tmp_path / str(seed))
    for config, weights in ((0, 1), (1, 0)):
        folder = tmp_path / f"{config}{weights}"
        folder.mkdir()
        shutil.copy(tmp_path / str(config) / CONFIG, folder)
        shutil.copy(tmp_path / str(weights) / WEIGHTS, folder)
        with pytest.raises(MaskFileError, match="not the file that mask_config.json was written with"):
            SparseMask.from_pretrained(folder)


def test_new_description_never_passes_with_old_weights(tmp_path, monkeypatch):
    """A kill between the replacements, over a mask that was written without a hash."""
    make_mask(seed=1).save_pretrained(tmp_path)
    edit_config(tmp_path, weights_sha256=...)
    replace, done = os.replace, []

    def replace_once(source, target):
        if done:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        make_mask(seed=2).save_pretrained(tmp_path)
    assert names(tmp_path) == ["README.md", WEIGHTS, CONFIG]
    with pytest.raises(MaskFileError, match="weights_sha256"):
        SparseMask.from_pretrained(tmp_path)


@pytest.mark.parametrize("at", range(4))
def test_two_writers_and_a_reader_never_mix_masks(tmp_path, monkeypatch, at):
    """The second saves while the first does, and a reader reads at every step: one of the masks, or an error."""
    masks, replace, done, seen = [make_mask(seed=seed) for seed in (0, 1, 2)], os.replace, [], set()
    masks[0].save_pretrained(tmp_path)

    def read():
        try:
            seen.add(masks.index(SparseMask.from_pretrained(tmp_path)))
        except MaskFileError as error:
            assert f"{tmp_path / WEIGHTS}: not the file that mask_config.json" in str(error)
            seen.add("error")

    def replace_and_more(source, target):
        done.append(target)
        if len(done) == at:
            masks[2].save_pretrained(tmp_path)
        replace(source, target)
        read()

    monkeypatch.setattr(os, "replace", replace_and_more)
    masks[1].save_pretrained(tmp_path)
    assert seen <= {0, 1, 2, "error"} and {"error", 1} & seen
    make_mask().save_pretrained(tmp_path)
    assert SparseMask.from_pretrained(tmp_path) == make_mask()


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_failed_write_leaves_what_was_there(tmp_path, monkeypatch, call):
    old = make_mask(seed=1)
    old.save_pretrained(tmp_path)
    write_metrics(tmp_path / "metrics.json", {"loss": 1.0})
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.open" if call == "open" else f"os.{call}", full)
    for write in (
        lambda: make_mask(seed=2).save_pretrained(tmp_path),
        lambda: write_metrics(tmp_path / "metrics.json", {"loss": 2.0}),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
    monkeypatch.undo()
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
    assert SparseMask.from_pretrained(tmp_path) == old


def test_links_are_not_followed(tmp_path):
    """Neither at names that could be guessed for the files in the making, nor at those of the files themselves."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (CONFIG, WEIGHTS, "metrics.json"):
        for link in (name, f"{name}.tmp", f".{name}.tmp"):
            (folder / link).symlink_to(victim)
    make_mask().save_pretrained(folder)
    write_metrics(folder / "metrics.json", {"loss": 1.0})
    assert victim.read_text() == "precious"
    assert SparseMask.from_pretrained(folder) == make_mask()
    assert not (folder / CONFIG).is_symlink()


def test_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    replace_files({tmp_path / "written": b""})
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "usual").stat().st_mode


# Reading


@pytest.mark.parametrize("form", FORMS)
def test_masks_written_without_a_hash(tmp_path, form):
    mask = make_mask(form, metadata={"run": "r"})
    mask.save_pretrained(tmp_path)
    edit_config(tmp_path, weights_sha256=...)
    again = SparseMask.from_pretrained(tmp_path)
    assert again == mask and again.metadata == {"run": "r"}
    edit_config(tmp_path, sparsity=...)
    assert SparseMask.from_pretrained(tmp_path) == mask


@pytest.mark.parametrize("field", ["format_version", "num_heads", "form"])
def test_descriptions_that_lack_a_field(tmp_path, field):
    make_mask().save_pretrained(tmp_path)
    edit_config(tmp_path, **{field: ...})
    with pytest.raises(MaskFileError, match="not a mask description"):
        SparseMask.from_pretrained(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_is_caught_in_every_byte(tmp_path, form):
    mask = make_mask(form)
    mask.save_pretrained(tmp_path)
    weights = (tmp_path / WEIGHTS).read_bytes()
    for position in range(len(weights)):
        damaged = bytearray(weights)
        damaged[position] ^= 1 << position % 8
        (tmp_path / WEIGHTS).write_bytes(damaged)
        with pytest.raises(MaskFileError, match=WEIGHTS):
            SparseMask.from_pretrained(tmp_path)
    # Without the hash, those of the mask's entries are, by the sparsity.
    edit_config(tmp_path, weights_sha256=...)
    damaged = bytearray(weights)
    damaged[-2] ^= 1
    (tmp_path / WEIGHTS).write_bytes(damaged)
    with pytest.raises(MaskFileError, match="the sparsity is described as"):
        SparseMask.from_pretrained(tmp_path)


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("length", "1048575", "length at most 65536"),
        ("num_layers", "1000000", "num_layers at most 1024"),
        ("num_heads", "65536", "num_heads at most 1024"),
        ("num_heads", "true", "sizes must be positive integers"),
        ("num_parameters", "1e3", "sizes must be positive integers"),
        ("block_size", "1" + "0" * 4000, "block_size at most"),
        ("length", "1" * 5000, "not a mask description"),
        ("sparsity", "1" * 5000, "not a mask description"),
        ("metadata", NESTED, "not a mask description"),
        ("metadata", "[" * 450 + "]" * 450, "metadata: metadata must not be nested more than 64 levels deep"),
        ("metadata", '{"a":' * 450 + "0" + "}" * 450, "metadata: metadata must not be nested more than 64 levels"),
        ("sparsity", "NaN", "sparsity must be a number from 0 to 1"),
        ("sparsity", '"high"', "sparsity must be a number"),
        ("sparsity", "9" * 4000, "sparsity must be a number"),
        ("sparsity", "0.25", "the sparsity is described as 0.25"),
        ("weights_sha256", "null", None),
        ("weights_sha256", '"00"', "weights_sha256"),
        ("weights_sha256", "[]", "weights_sha256"),
        ("diagonal", "0", "diagonal must be False, got 0"),
        ("length_policy", "null", "length_policy must be 'extend', got None"),
        ("form", "[]", "form must be one of"),
        ("form", '"rows"', "form must be one of 'offsets', 'blocks', 'table', got 'rows'"),
        ("special_tokens", "{}", "special_tokens must be one of"),
        ("search", "[1]", "search must be a name or null"),
        ("base_model", '{"a": 1}', "base_model must be a name or null"),
        ("format_version", "3", "format_version must be 1 or 2, got 3"),
        ("format_version", '"1"', "format_version must be 1 or 2, got '1'"),
        ("num_heads", "4", "bytes for shape"),
        ("num_heads", "-3", "sizes must be positive integers"),
        ("num_heads", '"3"', "sizes must be positive integers"),
        ("length", "11.0", "sizes must be positive integers"),
        ("length", "10", "must have shape"),
        ("special_tokens", '"all"', "special_tokens must be one of"),
        ("block_size", "4", "block_size"),
        ("diagonal", '"off"', "diagonal must be one of"),
        ("padding", '"' + "x" * 2**20 + '"', "too large, expected at most 1048576 bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_hostile_description(tmp_path, field, value, message):
    mask = make_mask("offsets")
    mask.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text()) | {field: "HERE"}
    (tmp_path / CONFIG).write_text(json.dumps(config).replace('"HERE"', value))
    began = time.perf_counter()
    if message is None:
        assert SparseMask.from_pretrained(tmp_path) == mask
        return
    with pytest.raises(MaskFileError, match=message) as caught:
        SparseMask.from_pretrained(tmp_path)
    assert time.perf_counter() - began < 1 and len(str(caught.value)) <= 2000


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"query_block_size": 4}, "query_block_size must be a larger multiple of block_size, got 4 with block_size 4"),
        ({"query_block_size": 10}, "query_block_size must be a larger multiple of block_size, got 10"),
        ({"query_block_size": "8"}, "query_block_size must be an integer of at least 1, got '8'"),
        ({"query_block_size": None}, "the sparsity is described as"),
        ({"format_version": 1}, "metadata: the names must be text, and not those of a mask's own fields"),
        ({"symmetric": True}, "query_block_size 8 needs symmetric False"),
    ],
    ids=str,
)
def test_files_of_tiles_of_more_queries_than_keys(tmp_path, changes, message):
    mask = make_mask("blocks", symmetric=False, query_block_size=8)
    mask.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["format_version"] == 2
    edit_config(tmp_path, **changes)
    if message is None:
        assert SparseMask.from_pretrained(tmp_path) == mask != mask.replace(query_block_size=None)
    else:
        with pytest.raises(MaskFileError, match=message):
            SparseMask.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"special_rows": True}, "the sparsity is described as"),
        ({"symmetric": 0}, "symmetric must be False, got 0"),
        ({"symmetric": "no"}, "symmetric must be one of True, False, got 'no'"),
        ({"symmetric": None}, "symmetric must be one of True, False, got None"),
        ({"symmetric": True}, "keep of form 'offsets' must have shape"),
        ({"special_rows": []}, "special_rows must be one of True, False"),
        ({"special_tokens": "none"}, "special_rows False needs special tokens"),
        ({"form": "table"}, "bytes for shape"),
        ({"num_parameters": 19}, "bytes for shape"),
        ({"num_parameters": 2**17}, "num_parameters at most 131071"),
        ({"format_version": 1}, "metadata: the names must be text, and not those of a mask's own fields"),
    ],
    ids=str,
)
def test_damaged_description_of_a_signed_mask(tmp_path, changes, message):
    mask = make_mask("offsets", symmetric=False, special_tokens="first", special_rows=False)
    mask.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    if message is None:
        assert SparseMask.from_pretrained(tmp_path) == mask
        return
    with pytest.raises(MaskFileError, match=message):
        SparseMask.from_pretrained(tmp_path)


def test_version_2_without_its_fields(tmp_path):
    mask = make_mask("offsets")
    mask.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"format_version": 2}))
    assert SparseMask.from_pretrained(tmp_path) == mask


@pytest.mark.parametrize("name", [CONFIG, "search_config.json", "config.json"])
def test_files_that_are_not_text_are_named_in_short(tiny_config, tmp_path, name):
    attach(BertModel(tiny_config(BertConfig)), "dam_s" if "search" in name else "window").save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"\xff" * 900_000)
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    assert name in str(caught.value) and len(str(caught.value)) < 500


def test_the_most_layers_and_heads_are_written_at_once(tmp_path):
    began = time.perf_counter()
    SparseMask(torch.ones(1024, 1024, 1, dtype=torch.bool), 128, "offsets").save_pretrained(tmp_path)
    (listed,) = list_masks(tmp_path)
    assert listed["num_layers"] == listed["num_heads"] == 1024
    assert "| 1023 |" in (tmp_path / "README.md").read_text()
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("place", ["numpy.unpackbits", "torch.Tensor.clone", "safetensors.torch.load"])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 5 bytes")], ids=["py", "torch"])
def test_memory_that_is_missing(tmp_path, monkeypatch, place, error):
    def fail(*args, **kwargs):
        raise error

    make_mask("table").save_pretrained(tmp_path)
    monkeypatch.setattr(place, fail)
    with pytest.raises(MaskFileError, match="mask.safetensors: there is not enough memory for the entries"):
        SparseMask.from_pretrained(tmp_path)


def test_control_characters_do_not_reach_the_terminal(tiny_config, capsys, tmp_path):
    evil = "owner/\x1b]0;evil\x07\x9b31m"
    make_mask("offsets").replace(metadata={"base_model": evil, "search": evil}).save_pretrained(tmp_path / "mask")
    with pytest.raises(ValueError, match="found for owner/") as caught:
        attach(BertModel(tiny_config(BertConfig)), tmp_path / "mask")
    said = str(caught.value)
    for verb in ("plan", "masks", "report"):
        main([verb, str(tmp_path / "mask")])
    said += "".join(capsys.readouterr())
    assert not {"\x1b", "\x07", "\x9b"} & set(said)


def test_long_masks_of_few_bytes(tmp_path):
    """The longest mask that is read costs neither reading nor a model n x n entries; longer ones are not written."""
    keep = torch.ones(1, 4, 1, dtype=torch.bool)
    SparseMask(keep, 2**16, "offsets").save_pretrained(tmp_path)
    mask = SparseMask.from_pretrained(tmp_path)
    config = SparseBertConfig(
        vocab_size=9,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    model = SparseBertModel(config)
    model.set_mask(mask)
    assert model.eval()(torch.ones(1, 8, dtype=torch.long)).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match="length at most 65536, got 65537"):
        SparseMask(keep, 2**16 + 1, "offsets").save_pretrained(tmp_path / "new")
    with pytest.raises(ValueError, match="may have 17179869184 bits"):
        check_sizes(mask.description() | {"num_layers": 1024, "num_heads": 1024, "num_parameters": 2**16})
    assert not (tmp_path / "new").exists()
    with pytest.raises(StrictDataclassFieldValidationError, match="mask_length"):
        SparseBertConfig(mask_length=2**20 - 1)


def test_masks_per_layer_at_great_length(tmp_path):
    """Only bits that are stored count; a search whose mask could not be saved is refused before it starts."""
    keep = torch.rand(24, 16, 8192) < 0.1
    mask = SparseMask(keep, 8192, "offsets", special_tokens="first_last")
    mask.save_pretrained(tmp_path)
    assert SparseMask.from_pretrained(tmp_path) == mask
    config = SparseBertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mask_length=2**16, search="vertical_slash",
        share_layers=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="may have 17179869184 bits, .* got 34359738368"):
        described_search(config, config.carrier)


def test_large_weights_file(tmp_path):
    """A sparse file of a terabyte beside a small description is refused, not read."""
    make_mask().save_pretrained(tmp_path)
    with open(tmp_path / WEIGHTS, "ab") as file:
        file.truncate(2**40)
    with pytest.raises(MaskFileError, match=f"{WEIGHTS}: too large"):
        SparseMask.from_pretrained(tmp_path)


@pytest.mark.parametrize("subfolder", ["../other", "a/../../other", "/tmp", "..", "a\\..\\..\\other", "C:\\other"])
def test_subfolder_stays_inside(tmp_path, subfolder):
    make_mask().save_pretrained(tmp_path / "other")
    (tmp_path / "folder" / "a").mkdir(parents=True)
    for source in (tmp_path / "folder", "user/mask"):
        with pytest.raises(MaskFileError, match="subfolder must lie inside"):
            SparseMask.from_pretrained(source, subfolder=subfolder)


# Mutations


VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "3", "4", "11", "12", "65536", "65537", "1048575", "9" * 4000),
    *("9" * 4400, "1e308", "1e400", "NaN", "-Infinity", "0.5", "11.0", '""', '"offsets"', '"blocks"', '"table"'),
    *('"none"', '"first"', '"first_last"', '"real"', '"position"', '"extend"', '"dense"', '"error"', '"\\ud800"'),
    *("[]", "{}", "[[[[]]]]", "[" * 3000 + "]" * 3000, '{"a":' * 30000 + "1" + "}" * 30000, '"../../x"', '"\\u0000"'),
)


def mutate_bytes(rng, content):
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(content) + 1)
        kind = rng.randrange(5)
        if kind == 0 and place < len(content):
            content[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[place:place] = rng.randbytes(rng.choice((1, 2, 8, 300)))
        elif kind == 2:
            del content[place : place + rng.choice((1, 2, 8, 300))]
        elif kind == 3:
            del content[place:]
        else:
            content[place : place + 8] = rng.choice((0, 1, 2**16, 2**40, 2**63)).to_bytes(8, "little")
    return bytes(content)


def mutate(rng, folder):
    """Change the files of a mask at random, as a clever or a clumsy writer would."""
    config = {name: json.dumps(value) for name, value in json.loads((folder / CONFIG).read_text()).items()}
    weights = (folder / WEIGHTS).read_bytes()
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        name = rng.choice(sorted(config)) if config else "form"
        if rng.random() < 0.15:
            config.pop(name, None)
        else:
            config[name] = rng.choice(VALUES)
    kind = rng.randrange(6)
    if kind == 0:
        weights = mutate_bytes(rng, weights)
    elif kind == 1:
        dtype = rng.choice((torch.uint8, torch.uint8, torch.int8, torch.float16, torch.bool, torch.float8_e4m3fn))
        tensor = torch.zeros(rng.choice(((91,), (5,), (3,), (0,), (7, 13), ())), dtype=dtype)
        weights = save({rng.choice(("keep", "keep", "mask")): tensor})
    elif kind == 2:  # bits of one's own, well described
        size = len(weights) - 8 - int.from_bytes(weights[:8], "little")
        weights = save({"keep": torch.frombuffer(bytearray(rng.randbytes(max(size, 1))), dtype=torch.uint8)})
    if rng.random() < 0.6:
        config["weights_sha256"] = json.dumps(hashlib.sha256(weights).hexdigest())
    if rng.random() < 0.5:
        config.pop("sparsity", None)
    text = ("{" + ", ".join(f'"{name}": {value}' for name, value in config.items()) + "}").encode()
    (folder / CONFIG).write_bytes(mutate_bytes(rng, text) if kind == 3 else text)
    (folder / WEIGHTS).write_bytes(weights)


def check_reading(folder):
    """Whether a mask was read. It then is as described, and its files say the same again."""
    try:
        mask = SparseMask.from_pretrained(folder)
    except MaskFileError as error:
        assert str(error)
        return False
    config = json.loads((folder / CONFIG).read_text())
    for name, value in mask.description().items():
        assert (type(config[name]), config[name]) == (type(value), value)
    assert mask.length <= 2**16
    if mask.length <= 64:
        assert mask.sparsity == pytest.approx(1 - mask.to_table().double().mean().item(), abs=1e-12)
        if config.get("sparsity") is not None:
            assert mask.sparsity == pytest.approx(config["sparsity"], abs=2e-6)
    mask.save_pretrained(folder / "again")
    again = SparseMask.from_pretrained(folder / "again")
    assert again == mask and again.metadata == mask.metadata
    return True


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_folders(tmp_path, count):
    rng, read = random.Random(count), 0
    for index in range(count):
        folder = tmp_path / str(index % 3)
        mask = make_mask(
            FORMS[index % 3],
            seed=index,
            special_tokens=rng.choice(("none", "first", "first_last")),
            diagonal=rng.choice((None, True, False)),
            metadata={"search": "dam_s", "base_model": "user/base"},
        )
        mask.save_pretrained(folder)
        mutate(rng, folder)
        read += check_reading(folder)
    assert count / 50 < read < count / 2


# The weights beside a mask


def test_weights_that_differ_at_either_end_are_told_apart(tmp_path):
    path, content = tmp_path / "model.safetensors", bytearray(2**20)
    path.write_bytes(content)
    before = sample_weights(tmp_path)
    for place in (0, -1):
        path.write_bytes(content)
        assert sample_weights(tmp_path) == before
        changed = content.copy()
        changed[place] = 1
        path.write_bytes(changed)
        assert sample_weights(tmp_path) != before


def test_weights_that_are_not_there_have_not_changed(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    make_mask().save_pretrained(tmp_path)
    assert not weights_changed(tmp_path / CONFIG, tmp_path)
    path.write_bytes(b"changed")
    assert weights_changed(tmp_path / CONFIG, tmp_path)
    path.rename(tmp_path / "model.fp16.safetensors")  # as in the cache of the Hub, which fetches one of them
    assert not weights_changed(tmp_path / CONFIG, tmp_path)
