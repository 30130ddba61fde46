"""The web page of a report: its data are the masks, texts stay texts, and a reader without a mouse gets around."""

import base64
import hashlib
import itertools
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebert import SparseMask, build_pattern
from sparsebert.analysis.importance import offset_profile
from sparsebert.analysis.reporting import page_charts, page_masks
from sparsebert.analysis.reporting.page_charts import WIDTH, score_figures, scores
from sparsebert.analysis.reporting.page_gains import gains
from sparsebert.analysis.reporting.page_masks import TILES, mask_data
from sparsebert.analysis.reporting.web_page import PageMask, make_page
from sparsebert.analysis.saved_runs import SavedMask
from sparsebert.commands import main
from sparsebert.files import replace_files, write_metrics
from sparsebert.masks.compiled_forms import base_table
from sparsebert.masks.tiles import tile_shares


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;"
FINETUNED = {
    **{"task": "mrpc", "mask": "window", "sparsity": 0.9, "input_sparsity": 0.8, "is_part": False},
    **{"main_metric": "f1", "train_seconds": 240.0},
    "seeds": {"0": {"folder": "seed-0"}, "1": {"folder": "seed-1"}},
    "splits": {"validation": {"f1": {"mean": 0.8, "std": 0.02}}},
}
VOID = {"meta", "img", "br", "input", "link", "hr"}


class Page(HTMLParser):
    """The elements of a page, each with its attributes and text, and whether all that was opened was closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag not in VOID:
            self.open.append((tag, self.elements[-1][2]))

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, texts in self.open:
            texts.append(data)

    def all(self, tag):
        return [(attributes, "".join(texts)) for name, attributes, texts in self.elements if name == tag]

    @property
    def data(self):
        (text,) = (text for attributes, text in self.all("script") if attributes.get("type") == "application/json")
        return json.loads(text)


def some_masks():
    """Masks of every form, with heads that differ, special tokens and diagonals."""
    keep = torch.rand(2, 3, 37) < 0.3
    table = torch.rand(2, 3, 37, 37) < 0.2
    table[1, 2] = table[0, 0]
    return {
        "offsets": SparseMask(keep[..., :20], 37, form="offsets", special_tokens="first_last"),
        "blocks": SparseMask(keep[..., :5], 37, form="blocks", block_size=8, special_tokens="first", diagonal=False),
        "signed": SparseMask(
            keep[..., :19], 37, form="offsets", symmetric=False, special_tokens="first_last", special_rows=False
        ),
        "signed blocks": SparseMask(keep[..., :9], 37, form="blocks", block_size=8, symmetric=False),
        "table": SparseMask(table, 37, diagonal=True, rest="mean", rest_bias=torch.rand(2, 3)),
        "shared": build_pattern("bigbird", 64, 4),
    }


def page_mask(name, mask, **fields):
    return PageMask(name, SavedMask(name, mask, None), **fields)


def unpacked(text):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def decoded(data):
    """The mask of each head, `(L, H, n, n)`, from what a page holds."""
    size, keep = data["size"], unpacked(data["picture"]).reshape(len(data["removed"]), -1)
    bits = np.unpackbits(keep, axis=1, bitorder="little")
    if data["kind"] == "entries":
        tables = bits[:, : size**2].reshape(-1, size, size)
    else:
        place = np.arange(size) // (data["block_size"] or 1)
        distance = place[:, None] - place
        parameter = abs(distance) if data["symmetric"] else distance + data["middle"]
        padded = np.pad(bits, ((0, 0), (size, size)))
        tables = padded[:, parameter + size]
    tables = tables.astype(bool)
    for token in {"none": [], "first": [0], "first_last": [0, -1]}[data["special_tokens"]]:
        tables[:, :, token] = True
        if data["special_rows"]:
            tables[:, token] = True
    if data["diagonal"] is not None:
        tables[:, range(size), range(size)] = data["diagonal"]
    return tables[np.array(data["heads"])]


@pytest.mark.parametrize("name, mask", some_masks().items(), ids=list(some_masks()))
def test_the_data_of_a_page_are_the_mask(name, mask):
    (data,) = Page(make_page([page_mask(name, mask)], {})).data
    table = mask.to_table()
    # Equal heads are stored once.
    assert data["heads"] == {"table": [[0, 1, 2], [3, 4, 0]]}.get(name, data["heads"])
    assert (data["name"], data["kind"], data["step"]) == (name, "entries" if mask.form == "table" else "toeplitz", 1)
    assert np.array_equal(decoded(data), table.numpy())
    profiles = unpacked(data["profile"]).reshape(len(data["removed"]), -1)
    expected = offset_profile(table, mask.special_tokens)[1][0]
    for layer, heads in enumerate(data["heads"]):
        for head, which in enumerate(heads):
            assert data["removed"][which] == pytest.approx(1 - table[layer, head].float().mean().item())
            assert profiles[which] / 255 == pytest.approx(expected[layer, head], abs=1 / 255)
            base = base_table(mask, mask.length)[layer, head][None]
            for side in TILES:
                assert data["tiles"][str(side)][which] == tile_shares(base, side)[0]


@pytest.mark.parametrize(
    "mask, room",
    [
        (SparseMask(torch.rand(1, 4, 100, 100) < 0.3, 100, special_tokens="first"), 2000),
        (SparseMask(torch.rand(1, 1, 1100) < 0.1, 1100, form="offsets"), 2**20),
    ],
    ids=["no room", "long"],
)
def test_what_is_too_large_is_drawn_in_cells(mask, room):
    data = mask_data("mask", mask, room)
    cells = unpacked(data["picture"])
    assert data["kind"] == "cells" and data["step"] > 1 and len(cells) <= room
    cells = cells.reshape(-1, data["size"], data["size"])
    places = itertools.product((0, 1, data["size"] - 1), (0, 3, data["size"] - 1))
    for place, (head, table) in itertools.product(places, zip(cells, mask.to_table()[0].numpy(), strict=True)):
        share = table[tuple(slice(index * data["step"], (index + 1) * data["step"]) for index in place)].mean()
        assert head[place] / 255 == pytest.approx(share, abs=1 / 255)
        assert (head[place] == 0) == (share == 0) and (head[place] == 255) == (share == 1)


def test_numbers_of_a_mask_that_is_longer_than_its_picture_are_those_of_the_mask(monkeypatch):
    monkeypatch.setattr(page_masks, "DRAWN_LENGTH", 1100)
    mask = build_pattern("window", 1300, 1, window_size=64)
    data = mask_data("long", mask)
    assert data["drawn"] == 1100 and data["removed"] == [mask.sparsity]
    table = base_table(mask, 1300)[0]
    for side in TILES:
        assert data["tiles"][side] == [tile_shares(table, side)[0]]


def test_a_page_is_sound_and_asks_for_nothing():
    masks = [page_mask(name, mask, verdict="yes: it does", facts="all") for name, mask in some_masks().items()]
    page = Page(text := make_page(masks, {Path("a"): FINETUNED, Path("b"): FINETUNED}))
    assert not page.open
    names = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for attribute in ("for", "aria-labelledby"):
        assert {value[attribute] for _, value, _ in page.elements if attribute in value} <= set(names)
    fields = {attributes["id"] for tag in ("select", "input") for attributes, _ in page.all(tag)}
    assert fields == {attributes["for"] for attributes, _ in page.all("label")}
    headings = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(headings, headings[1:], strict=False))
    tables = [attributes for attributes, _ in page.all("table")]
    assert len(page.all("caption")) == sum("aria-labelledby" not in attributes for attributes in tables)
    assert all(attributes.get("scope") in ("col", "row") for attributes, _ in page.all("th"))
    assert not [attributes for _, attributes, _ in page.elements if {"src", "href", "style"} & set(attributes)]
    assert not re.search(r"url\(|@import|fetch\(|import\s*\(|eval\(|innerHTML", text)
    (policy,) = (value["content"] for value, _ in page.all("meta") if "http-equiv" in value)
    parts = {tag: page.all(tag)[-1][1] for tag in ("style", "script")}
    digests = {tag: base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for tag, part in parts.items()}
    assert policy == "; ".join(["default-src 'none'", *(f"{tag}-src 'sha256-{digests[tag]}'" for tag in digests)])


def test_texts_stay_texts():
    mask = build_pattern("window", 16, 2).replace(metadata={"pattern": HOSTILE})
    metrics = FINETUNED | {"task": HOSTILE, "mask": HOSTILE, "main_metric": "f1"}
    plain = Page(make_page([page_mask("mask", mask)], {Path("a"): FINETUNED, Path("b"): FINETUNED}))
    runs = {Path(HOSTILE): metrics, Path(f"{HOSTILE}2"): metrics}
    hostile = Page(make_page([page_mask(HOSTILE, mask, verdict=HOSTILE, facts=HOSTILE)], runs))
    assert hostile.data[0]["name"] == HOSTILE
    assert len(hostile.all("script")) == 2 and not hostile.all("img")
    assert not [name for _, value, _ in hostile.elements for name in value if name.startswith("on")]
    # A verdict and facts give a column and nothing else.
    extra = [tag for tag, _, _ in hostile.elements if tag not in ("th", "td")]
    assert extra == [tag for tag, _, _ in plain.elements if tag not in ("th", "td")]


def test_a_page_of_runs_alone():
    page = Page(make_page([], {Path("a/run"): FINETUNED, Path("b/run"): FINETUNED}))
    assert [entry.split(":")[0].strip() for _, entry in page.all("li")] == 2 * ["a/run", "b/run"]  # gains, and a chart
    assert page.data == [] and "zoom" not in [attributes.get("id") for _, attributes, _ in page.elements]


def test_scores_are_grouped_by_what_was_measured():
    pretrained = {"mlm_loss": 5.5, "sparsity": 0.5, "seconds": 60.0}
    glue = {"glue": {"mrpc": FINETUNED, "rte": FINETUNED | {"task": "rte"}}}
    bad = FINETUNED | {"splits": {"validation": {"f1": {"mean": float("nan")}}}}
    found = scores({"one": FINETUNED, "all": glue, "first": pretrained, "diverged": bad})
    assert {what: [score.run for score in group] for what, group in found.items()} == {
        "mrpc, validation: f1 in %": ["one", "all"],
        "rte, validation: f1 in %": ["all"],
        "pre-training: loss on masked words (lower is better)": ["first"],
    }
    score = found["mrpc, validation: f1 in %"][0]
    assert (score.value, score.deviation, score.sparsity, score.seconds) == (80.0, 2.0, 0.9, 240.0)


def test_a_chart_has_axes_units_and_bars():
    other = FINETUNED | {"sparsity": 0.0, "splits": {"validation": {"f1": 0.7}}, "train_seconds": 900.0}
    ((what, found),) = scores({"sparse": FINETUNED, "dense": other}).items()
    text = score_figures(what, found)
    page = Page(text)
    against_sparsity, against_time = (text for attributes, text in page.all("svg") if "aria-label" in attributes)
    assert "sparsity: entries of the mask removed, in %" in against_sparsity and "f1 in %" in against_sparsity
    assert "time of the training or search in minutes" in against_time
    assert text.count('class="bar"') == 2  # one of the two has several seeds, in two charts
    numbers = [attributes for attributes, _ in page.all("text") if attributes.get("class") == "number"]
    # The last mark of the second chart is at its right end, where there is no room beside it.
    assert [attributes["text-anchor"] for attributes in numbers] == ["start", "start", "start", "end"]
    assert all(0 < float(attributes["x"]) < WIDTH for attributes in numbers)
    assert [entry.strip() for _, entry in page.all("li")] == [
        "sparse: 80 ± 2, 90.0 % removed, 4 minutes",
        "dense: 70, 0.0 % removed, 15 minutes",
    ]
    # A single time gives no chart.
    pretrained = {"mlm_loss": 5.5, "sparsity": 0.5}
    ((what, found),) = scores({"one": pretrained | {"seconds": 60.0}, "other": pretrained}).items()
    page = Page(score_figures(what, found))
    assert len([attributes for attributes, _ in page.all("svg") if "aria-label" in attributes]) == 1
    entries = [entry.strip() for _, entry in page.all("li")]
    assert entries == [f"{name}: 5.5, 50.0 % removed" for name in ("one", "other")]


@pytest.mark.parametrize(
    "values, most",
    [((4.5, 4.5125), 4.9), ((0.97, 0.98), 1), ((99.5, 99.6), 100), ((0, 0), 1), ((-3, 8), 10), ((60, 1e6), 1e6)],
)
def test_a_small_difference_looks_small(values, most):
    ticks = page_charts._ticks(*values)
    assert ticks[0] <= values[0] and values[1] <= ticks[-1] <= most and 4 <= len(ticks) <= 9
    assert ticks[-1] - ticks[0] >= max(map(abs, values)) / 10


def test_numbers_along_the_axis_end_beside_its_label():
    """A digit takes 8 of the chart's units at most, and the label ends at 21."""
    found = [page_charts.Score(name, value, None, 0.5, None) for name, value in (("a", 9.87e5), ("b", 1.2e6))]
    page = Page(score_figures("loss", found))
    ends = [
        (float(each["x"]), text)
        for each, text in page.all("text")
        if each.get("text-anchor") == "end" and "dy" in each
    ]
    assert ends and all(x - 8 * len(text) > 21 for x, text in ends)


def test_what_was_gained_and_against_what():
    searched = {"model": "m", "mask": None, "task": None, "seconds": {"total": 9.0}, "hardware": "two cores"}
    searched |= {"sparsity": {"dense": 0.0, "learned": 0.9}, "inference_seconds": {"dense": 3.0, "masked": 2.0}}
    cosines = {"dense": 1.0, "learned": 0.94, "window": 0.91, "random": 0.5, "learned, recovered": 0.96}
    searched["agreement"] = {name: {"cosine": cosine} for name, cosine in cosines.items()}
    pretrained = {"mlm_loss": 5.5, "sparsity": 0.5, "seconds": 60.0, "positions": {}}
    compared = {"baseline": "dense", "validation": {"difference": -0.011, "interval": [-0.03, 0.004]}}
    runs = {
        "found": searched,
        "trained": pretrained,
        "dense": pretrained | {"mlm_loss": 5.25, "sparsity": 0.0},
        "tuned": FINETUNED | {"comparison": compared},
        "alone": FINETUNED,
        "none": {"sparsity": 0.0},
    }
    loss = "pre-training: loss on masked words (lower is better)"
    assert gains(runs) == [
        "found: 90.0 % of the attention removed, cosine 0.960 with the dense model's mean hidden states, 0.940 before "
        "the recovery; against 0.910 with the best of 2 other masks (window). A batch is 1.50 times as fast as dense "
        "(two cores).",
        f"trained: {loss}: 5.5 with 50.0 % of the attention removed; against 5.25 without a mask (dense).",
        f"dense: {loss}: 5.25 with 0.0 % of the attention removed.",
        "tuned: mrpc, validation: f1 in %: 80 ± 2 with 90.0 % of the attention removed, -1.1 [-3.0, +0.4] against "
        "dense.",
        "alone: mrpc, validation: f1 in %: 80 ± 2 with 90.0 % of the attention removed. Give the same run without a "
        "mask as well, to see what that costs.",
        "none: no score.",
    ]
    ((what, found),) = scores({"found": searched, "again": searched}).items()
    names = ["found", "found, recovered", "found: window", "again", "again, recovered", "again: window"]
    assert what == "m: cosine with the dense model" and [score.run for score in found] == ["dense", *names]


# The command


@pytest.fixture
def mask_folder(tmp_path):
    build_pattern("window", 32, 2).save_pretrained(tmp_path / "mask")
    return tmp_path / "mask"


def test_a_mask_and_a_run(mask_folder, tmp_path, capsys):
    (tmp_path / "dense").mkdir()
    write_metrics(tmp_path / "dense/metrics.json", FINETUNED)
    output = tmp_path / "new" / "report.html"
    assert main(["report", str(mask_folder), str(tmp_path / "dense"), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert f"written: {output}" in printed and "offsets" in printed
    page = Page(output.read_text(encoding="utf-8"))
    assert [mask["name"] for mask in page.data] == ["mask"]
    text = page.all("main")[0][1]
    assert "O(n) Connections, Theorem 1" in text and "80.0 ± 2.0" in text
    assert main(["report", str(mask_folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)[str(mask_folder)]
    assert content["form"] == "offsets" and content["metadata"]["pattern"] == "window"


def test_masks_of_one_name_and_of_seeds(tmp_path):
    """Those of seeds in a folder of their settings, too, but none outside the folder of the run."""
    folders = ("seed-0", "seed-1", "rate=1/seed-2", "../elsewhere", str(tmp_path / "elsewhere"))
    for name, seed in zip(folders, (0, 0, 1, 2, 2), strict=True):
        build_pattern("random", 16, 2, seed=seed).save_pretrained(tmp_path / "run" / name)
    seeds = {str(number): {"folder": folder} for number, folder in enumerate(folders)}
    write_metrics(tmp_path / "run/metrics.json", FINETUNED | {"seeds": seeds})
    build_pattern("window", 16, 2).save_pretrained(tmp_path / "seed-0")
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), str(tmp_path / "seed-0"), "-o", str(output)]) == 0
    names = [mask["name"] for mask in Page(output.read_text(encoding="utf-8")).data]
    assert names == [str(tmp_path / "run/seed-0"), "seed-2", str(tmp_path / "seed-0")]


@pytest.mark.parametrize(
    "flags, line",
    [
        (["-o", "mine.html"], "exists: choose another, or pass --overwrite"),
        (["-o", "report.txt"], "output must be the name of an .html file, got '"),
        (["-o", "folder.html"], "is a folder: name a file in it"),
        (["-o", "file/report.html"], "is not a folder"),
        (["--overwrite"], "--overwrite needs --output"),
    ],
)
def test_where_no_page_can_be_written(mask_folder, tmp_path, said, monkeypatch, flags, line):
    monkeypatch.chdir(tmp_path)
    Path("folder.html").mkdir()
    for name in ("file", "mine.html"):
        Path(name).write_text("mine")
    assert line in said(["report", mask_folder, *flags]) and Path("mine.html").read_text() == "mine"
    assert main(["report", str(mask_folder), "-o", "mine.html", "--overwrite"]) == 0
    assert Path("mine.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(OSError, match=r"'nothing/a\.html'$"):
        replace_files({Path("nothing/a.html"): b""})


@pytest.mark.parametrize(
    "files, line",
    [
        ({}, "holds neither metrics.json nor a mask"),
        ({"metrics.json": "{"}, "metrics.json: damaged or not JSON"),
        ({"metrics.json": "[]"}, "metrics.json: not the metrics of a pre-training"),
        ({"metrics.json": '{"rouge": 30.0, "sparsity": 0.5}'}, "metrics.json: not the metrics of a pre-training"),
        ({"metrics.json": '{"sparsity": "x", "positions": {}, "seconds": 1}'}, "its metrics are incomplete"),
        ({"mask_config.json": "{}", "mask.safetensors": ""}, "mask_config.json"),
    ],
)
def test_what_cannot_be_reported(tmp_path, said, files, line):
    (tmp_path / "given").mkdir()
    for name, text in files.items():
        (tmp_path / "given" / name).write_text(text)
    for flags in ([], ["-o", tmp_path / "report.html"]):
        assert line in said(["report", tmp_path / "given", *flags]) and not (tmp_path / "report.html").exists()
