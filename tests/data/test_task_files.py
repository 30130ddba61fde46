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
    check_splits,
    find_columns,
    find_files,
    load_hub,
    make_dataset,
    parse_rows,
    read_header,
    read_rows,
    text_field,
)
from sparsebert.files import open_text


NAMES = {"train": "train", "dev": "validation", "test": "test"}
TABLE = "a\tb\nx\ty\n"


@pytest.fixture
def write(tmp_path):
    """`write(name, text)`: a file of these bytes or this text, compressed as its name says; returns its path."""

    def make(name, text):
        return write_compressed(tmp_path / name, text)

    return make


class TestFindFiles:
    def test_canonical_names_come_first(self, tmp_path):
        for name in ("b.jsonl", "test.tsv.gz", "train_part7.tsv.gz", "dev.tsv.xz", "train.csv", "notes.txt", ".x.tsv"):
            (tmp_path / name).touch()
        (tmp_path / "folder.tsv").mkdir()
        files = find_files(str(tmp_path), NAMES)
        assert list(files) == ["train", "validation", "test", "b", "train_part7"]
        assert files["validation"] == tmp_path / "dev.tsv.xz"

    @pytest.mark.parametrize("other", ["dev.tsv.gz", "dev.json", "validation.csv"])
    def test_two_files_for_a_split(self, tmp_path, other):
        for name in ("dev.tsv", other):
            (tmp_path / name).touch()
        names = NAMES | {"validation": "validation"}
        first, second = sorted(("dev.tsv", other))
        with pytest.raises(ValueError, match=f"{first} and {second} are both for the split 'validation'"):
            find_files(tmp_path, names)

    def test_missing_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no folder .*nothing"):
            find_files(tmp_path / "nothing", NAMES)


def test_check_splits():
    check_splits(["test"], iter(["train", "test"]), "DIR")
    with pytest.raises(ValueError, match="split 'dev' is missing in DIR; available: train, test"):
        check_splits(["train", "dev"], ["train", "test"], "DIR")
    with pytest.raises(ValueError, match="available: none"):
        check_splits(["dev"], [], "DIR")


class TestOpenText:
    @pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.tsv.xz"])
    @pytest.mark.parametrize("mark", ["", "\ufeff"])
    def test_compression_and_byte_order_mark(self, write, name, mark):
        with open_text(write(name, f"{mark}\u00e9\r\nb")) as file:
            assert file.read() == "\u00e9\r\nb"

    @pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.tsv.xz"])
    def test_not_utf8(self, write, name):
        path = write(name, b"a\tb\nx\t\xff\n")
        with pytest.raises(ValueError, match=f"{name}: not UTF-8 text"):
            list(read_rows(path))

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("a.tsv.gz", TABLE.encode()),
            ("a.tsv.xz", TABLE.encode()),
            ("a.tsv.gz", gzip.compress(TABLE.encode() * 99)[:-20]),
            ("a.tsv.xz", lzma.compress(TABLE.encode() * 99)[:-20]),
        ],
        ids=["gz, text", "xz, text", "gz, cut", "xz, cut"],
    )
    def test_damaged(self, tmp_path, name, data):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}: cannot be decompressed"):
            list(read_rows(tmp_path / name))


class TestReadRows:
    def test_tab_separated_text_is_not_interpreted(self, write):
        text = 'id\ttext\r\n1\t"open, \rand\u2028 on\x85\r\n\n2\tclose"\n3\t\n'
        path = write("a.tsv", text)
        assert read_header(path) == ["id", "text"]
        assert list(read_rows(path)) == [
            (2, {"id": "1", "text": '"open, \rand\u2028 on\x85'}),
            (4, {"id": "2", "text": 'close"'}),
            (5, {"id": "3", "text": ""}),
        ]

    def test_without_header(self, write):
        path = write("a.tsv.gz", "x\ty")
        assert list(read_rows(path, ["a", "b"])) == [(1, {"a": "x", "b": "y"})]

    def test_comma_separated_text_is_quoted(self, write):
        path = write("a.csv", 'id,text\n1,"two\nlines, ""so"""\n2,x\ty\n')
        assert read_header(path) == ["id", "text"]
        rows = [(2, {"id": "1", "text": 'two\nlines, "so"'}), (4, {"id": "2", "text": "x\ty"})]
        assert list(read_rows(path)) == rows

    def test_open_quote_does_not_swallow_the_rest(self, write):
        path = write("a.csv", 'id,text\n1,x\n2,"y\n3,z\n')
        with pytest.raises(ValueError, match="a.csv: row 3: unexpected end of data"):
            list(read_rows(path))

    @pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
    def test_long_field(self, write, name):
        csv.field_size_limit(100)
        [(_, row)] = read_rows(write(name, "text\n" + "x" * 300_000))
        assert len(row["text"]) == 300_000

    @pytest.mark.parametrize(("name", "separator"), [("a.tsv", "\t"), ("a.csv", ",")])
    def test_number_of_fields(self, write, name, separator):
        text = "a,b\nx\nx,y\nx,y,z\n".replace(",", separator)
        (first, short), (_, good), (last, long) = read_rows(write(name, text))
        assert (first, last) == (2, 4) and good == {"a": "x", "b": "y"}
        assert str(short) == "1 fields, expected 2: a, b" and str(long) == "3 fields, expected 2: a, b"
        assert isinstance(short, BadRow) and short.field is None

    def test_json_lines(self, write):
        path = write("a.jsonl.xz", '{"a": "\u2028"}\n\n{"a"\n[1]\n{"b": 2}')
        rows = list(read_rows(path))
        assert rows[0] == (1, {"a": "\u2028"}) and rows[3] == (5, {"b": 2})
        assert rows[1][0] == 3 and "not valid JSON" in str(rows[1][1])
        assert rows[2][0] == 4 and str(rows[2][1]) == "not a JSON object but list"
        assert read_header(path) == ["a", "b"]

    def test_json_list(self, write):
        path = write("a.json.gz", json.dumps([{"a": 1}, 2], indent=1))
        (number, row), (_, bad) = read_rows(path)
        assert (number, row) == (1, {"a": 1}) and str(bad) == "not a JSON object but int"

    @pytest.mark.parametrize(
        ("text", "message"),
        [('{"a": 1}', "a.json: expected a JSON list of objects, got dict"), ('{"a": 1}\n{}', "not valid JSON")],
    )
    def test_json_of_another_form(self, write, text, message):
        with pytest.raises(ValueError, match=message):
            list(read_rows(write("a.json", text)))

    @pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
    def test_empty(self, write, name):
        with pytest.raises(ValueError, match=f"{name}: no rows"):
            read_header(write(name, ""))


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
            examples, skipped = parse_rows("FILE", self.ROWS, self.parse, skip_bad=True)
        assert examples == [{"text": "x"}, {"text": "z"}]
        assert skipped == "skipped 2 of 4 rows, the first: row 5, field 'a': is empty"
        assert [record.message for record in caplog.records] == [f"FILE: {skipped}"]

    def test_nothing_skipped_nothing_said(self, caplog):
        assert parse_rows("FILE", self.ROWS[:1], self.parse, skip_bad=True) == ([{"text": "x"}], "")
        assert not caplog.records

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
    assert find_columns("FILE", ["label", "text", "gold"], accepted) == {"text": "text", "label": "gold"}
    assert find_columns("FILE", ["text"], accepted, optional=("label",)) == {"text": "text"}
    message = "FILE: row 1: no column gold or label; available: text, x"
    with pytest.raises(ValueError, match=message):
        find_columns("FILE", ["text", "x"], accepted)


@pytest.mark.parametrize(
    ("row", "message"), [({}, "is missing"), ({"a": None}, "is missing"), ({"a": " "}, "is empty"), ({"a": 1}, "1 is")]
)
def test_text_field(row, message):
    with pytest.raises(BadRow, match=f"field 'a': {message}"):
        text_field(row, "a")


def test_messages_quote_no_more_than_needed():
    with pytest.raises(BadRow, match=r"field 'a': \['xxx.*xxx'\] is not a text$") as error:
        text_field({"a": ["x" * 10**6]}, "a")
    assert len(str(error.value)) < 400


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
    features = datasets.Features(id=datasets.Value("string"))
    dataset = make_dataset([{"id": values} for values in candidates], features, "skipped 1")
    assert dataset["id"][:] == ids and dataset.info.description == "skipped 1"


def test_hub_out_of_reach():
    with pytest.raises(OSError, match="cannot load split 'train' of nobody/nothing .*--data DIR"):
        load_hub("nobody/nothing", None, "train")
