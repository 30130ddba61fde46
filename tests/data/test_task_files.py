import csv
import gzip
import json
import logging
import lzma

import datasets
import pytest
from conftest import write_compressed

from sparsebert.data.tasks.task_files import (
    BadRow,
    HubSplit,
    Table,
    choose_sources,
    find_files,
    load_hub,
    make_dataset,
    open_table,
    parse_rows,
    text_field,
)
from sparsebert.files import open_text


NAMES = {"train": "train", "dev": "validation", "test": "test", "validation": "validation"}
TABLE = b"a\tb\nx\ty\n"


@pytest.fixture
def read(tmp_path):
    """`read(name, text)`: header and rows of a file of this text or these bytes, compressed as its name says."""

    def make(name, text):
        table = open_table(write_compressed(tmp_path / name, text))
        return table.header, list(table.rows)

    return make


def test_canonical_names_come_first(tmp_path):
    for name in ("b.jsonl", "test.tsv.gz", "train_part7.tsv.gz", "dev.tsv.xz", "train.csv", "notes.txt", ".x.tsv"):
        (tmp_path / name).touch()
    (tmp_path / "folder.tsv").mkdir()
    files = find_files(str(tmp_path), NAMES)
    assert list(files) == ["train", "validation", "test", "b", "train_part7"]
    assert files["validation"] == tmp_path / "dev.tsv.xz"
    (tmp_path / "validation.json").touch()
    with pytest.raises(ValueError, match="dev.tsv.xz and validation.json are both for the split 'validation'"):
        find_files(tmp_path, NAMES)
    with pytest.raises(FileNotFoundError, match="no folder .*nothing"):
        find_files(tmp_path / "nothing", NAMES)


def test_choose_sources(tmp_path):
    sources = {"train": tmp_path / "train.csv", "odd": tmp_path / "odd.csv"}
    assert list(choose_sources(sources, None, ("test", "train"), "DIR", "")) == ["train"]
    assert choose_sources(sources, ["odd"], (), "DIR", "") == {"odd": sources["odd"]}
    with pytest.raises(ValueError, match="split 'dev' is missing in DIR; available: train, odd"):
        choose_sources(sources, ["train", "dev"], (), "DIR", "")
    with pytest.raises(ValueError, match="DIR: no file; available splits: none"):
        choose_sources({}, None, ("train",), "DIR", "no file")


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_encoding(tmp_path, read, suffix):
    for mark in ("", "\ufeff"):
        with open_text(write_compressed(tmp_path / f"a.tsv{suffix}", f"{mark}\u00e9\r\nb")) as file:
            assert file.read() == "\u00e9\r\nb"
    with pytest.raises(ValueError, match=f"b.tsv{suffix}: not UTF-8 text"):
        read(f"b.tsv{suffix}", b"a\tb\nx\t\xff\n")


@pytest.mark.parametrize(("name", "pack"), [("a.tsv.gz", gzip.compress), ("a.tsv.xz", lzma.compress)])
def test_damaged(tmp_path, name, pack):
    for content in (TABLE, pack(TABLE * 99)[:-20]):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: cannot be decompressed"):
            list(open_table(tmp_path / name).rows)


class TestRows:
    def test_tab_separated_text_is_not_interpreted(self, read):
        header, rows = read("a.tsv", 'id\ttext\r\n1\t"open, \rand\u2028 on\x85\r\n\n2\tclose"\n3\t\n')
        assert header == ["id", "text"]
        assert rows == [
            (2, {"id": "1", "text": '"open, \rand\u2028 on\x85'}),
            (4, {"id": "2", "text": 'close"'}),
            (5, {"id": "3", "text": ""}),
        ]

    def test_without_header(self, tmp_path):
        path = write_compressed(tmp_path / "a.tsv.gz", "x\ty")
        assert list(open_table(path, ["a", "b"]).rows) == [(1, {"a": "x", "b": "y"})]

    def test_comma_separated_text_is_quoted(self, read):
        header, rows = read("a.csv", 'id,text\n1,"two\nlines, ""so"""\n2,x\ty\n')
        assert header == ["id", "text"]
        assert rows == [(2, {"id": "1", "text": 'two\nlines, "so"'}), (4, {"id": "2", "text": "x\ty"})]

    def test_open_quote_does_not_swallow_the_rest(self, read):
        with pytest.raises(ValueError, match="a.csv: row 3: unexpected end of data"):
            read("a.csv", 'id,text\n1,x\n2,"y\n3,z\n')

    @pytest.mark.parametrize(("name", "separator"), [("a.tsv", "\t"), ("a.csv", ",")])
    def test_long_fields_and_number_of_fields(self, read, name, separator):
        csv.field_size_limit(100)
        text = f"a,b\nx\nx,{'y' * 300_000}\nx,y,z\n".replace(",", separator)
        _, ((first, short), (_, good), (last, long)) = read(name, text)
        assert (first, last) == (2, 4) and len(good["b"]) == 300_000
        assert str(short) == "1 fields, expected 2: a, b" and str(long) == "3 fields, expected 2: a, b"
        assert isinstance(short, BadRow) and short.field is None

    def test_json_lines(self, read):
        deep = "[" * 100_000
        header, rows = read("a.jsonl.xz", f'{{"a": "\u2028"}}\n\n{{"a"\n[1]\n{{"b": 2}}\n{deep}')
        assert header == ["a", "b"] and rows[0] == (1, {"a": "\u2028"}) and rows[3] == (5, {"b": 2})
        assert rows[1][0] == 3 and "not valid JSON" in str(rows[1][1])
        assert rows[2][0] == 4 and str(rows[2][1]) == "not a JSON object but list"
        assert rows[4][0] == 6 and str(rows[4][1]) == "nested too deeply"

    def test_json_list(self, read):
        _, ((number, row), (_, bad)) = read("a.json.gz", json.dumps([{"a": 1}, 2], indent=1))
        assert (number, row) == (1, {"a": 1}) and str(bad) == "not a JSON object but int"
        with pytest.raises(ValueError, match="a.json: expected a JSON list of objects, got dict"):
            read("a.json", '{"a": 1}')
        with pytest.raises(ValueError, match="a.json: not valid JSON.*must be named .jsonl"):
            read("a.json", '{"a": 1}\n{}')

    def test_parquet(self, tmp_path):
        datasets.Dataset.from_dict({"a": ["x", None], "b": [1, 2]}).to_parquet(tmp_path / "a.parquet")
        table = open_table(tmp_path / "a.parquet")
        assert table.header == ["a", "b"] and list(table.rows) == [(1, {"a": "x", "b": 1}), (2, {"a": None, "b": 2})]

    @pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
    def test_empty(self, read, name):
        with pytest.raises(ValueError, match=f"{name}: no rows"):
            read(name, "")


class TestParseRows:
    ROWS = [(2, {"a": "x"}), (5, {"a": ""}), (6, BadRow(None, "3 fields")), (9, {"a": "z"})]

    @staticmethod
    def parse(row):
        return {"text": text_field(row, "a")}

    def test_first_bad_row(self):
        with pytest.raises(ValueError, match="^FILE: row 5, field 'a': is empty$"):
            parse_rows("FILE", iter(self.ROWS), self.parse)
        with pytest.raises(ValueError, match="^FILE: row 6: 3 fields$"):
            parse_rows("FILE", self.ROWS[2:], self.parse)

    def test_skip_bad(self, caplog):
        with caplog.at_level(logging.WARNING):
            assert parse_rows("FILE", self.ROWS[:1], self.parse, skip_bad=True) == ([{"text": "x"}], "")
            examples, skipped = parse_rows("FILE", self.ROWS, self.parse, skip_bad=True)
        assert examples == [{"text": "x"}, {"text": "z"}]
        assert skipped == "skipped 2 of 4 rows, the first: row 5, field 'a': is empty"
        assert [record.message for record in caplog.records] == [f"FILE: {skipped}"]

    def test_nothing_left(self):
        with pytest.raises(ValueError, match="FILE: no usable rows, 2 bad ones, the first: row 5, field 'a'"):
            parse_rows("FILE", self.ROWS[1:3], self.parse, skip_bad=True)
        with pytest.raises(ValueError, match="FILE: no usable rows$"):
            parse_rows("FILE", [], self.parse)

    def test_other_errors_pass(self):
        with pytest.raises(KeyError):
            parse_rows("FILE", [(1, {})], lambda row: row["a"], skip_bad=True)


def test_find_columns():
    accepted = {"text": ("sentence", "text"), "label": ("gold", "label")}

    def find(header, split="train", *rows):
        return Table("FILE", header, iter(rows)).find_columns(accepted, split)

    assert find(["label", "text", "gold"]) == {"text": "text", "label": "gold"}
    with pytest.raises(ValueError, match="FILE: row 1: no column gold or label; did you mean 'lable'.*: text, lable"):
        find(["text", "lable"])
    with pytest.raises(ValueError, match="FILE: row 1: the column 'text' comes 2 times"):
        find(["text", "label", "text"])
    # A test split may have no labels, or an empty column, but labels that are there are used.
    assert find(["text"], "test") == find(["text", "label"], "test_a", (1, {"label": -1})) == {"text": "text"}
    bad = (1, BadRow(None, "bad"))
    assert "label" in find(["text", "label"], "test", bad, (2, {"label": 0}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *[({}, "is missing"), ({"a": None}, "is missing"), ({"a": " "}, "is empty"), ({"a": 1}, "1 is")],
        ({"a": "\ud800"}, "half of a surrogate pair"),
        ({"a": ["x" * 10**6]}, r"\['xxx.{,300}xxx'\] is not a text$"),  # no more of it than needed
    ],
)
def test_text_field(row, message):
    with pytest.raises(BadRow, match=f"field 'a': .*{message}"):
        text_field(row, "a")


@pytest.mark.parametrize(
    ("candidates", "ids"),
    [
        ([("a", "c"), ("b", "d")], ["a", "b"]),
        ([("a", " c"), ("a", 4)], ["c", "4"]),
        ([(None, "c"), ("a", "c")], ["0", "1"]),
        ([("", None), ("a", None)], ["0", "1"]),
        ([("\ud800", "c"), ("a", "d")], ["c", "d"]),
    ],
)
def test_ids(candidates, ids):
    dataset = make_dataset([{"id": values} for values in candidates], {}, "skipped 1")
    assert dataset["id"][:] == ids and dataset.info.description == "skipped 1"


def test_hub_out_of_reach():
    with pytest.raises(OSError, match="cannot load split 'train' of nobody/nothing .*--data DIR"):
        load_hub(HubSplit("nobody/nothing", None, "train"))
