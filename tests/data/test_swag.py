import csv
import io
import json
import logging
from types import SimpleNamespace

import datasets
import pytest
from conftest import covering, tokenizer_of

from sparsebert.data.tasks import swag, task_files


COLUMNS = "video-id fold-ind startphrase sent1 sent2 gold-source ending0 ending1 ending2 ending3 label".split()
ROWS = [
    ["v1", "17", "He sits. She", "He sits.", "She", "gold", "runs, fast.", 'says "no".', "sits.", "eats.", "2"],
    ["v1", "18", "A dog. It", "A dog.", "It", "gen", "barks.", "sings.", "sits.", "reads.", "0"],
]
CLS, SEP = 2, 3
A, B, C, D = range(5, 9)


@pytest.fixture
def write_table(write_data):
    """`write_table(name, columns, rows)`: a csv file with the running numbers of pandas; returns its folder."""

    def make(name, columns, rows):
        csv.writer(file := io.StringIO()).writerows([["", *columns], *([i, *row] for i, row in enumerate(rows))])
        return write_data(name, file.getvalue())

    return make


@pytest.fixture
def write_lines(write_data):
    """`write_lines(name, rows)`: a file with a JSON object a line; returns its folder."""
    return lambda name, rows: write_data(name, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("[PAD] [UNK] [CLS] [SEP] [MASK] a b c d".split())


class TestLoad:
    def test_original_table(self, write_table):
        data = write_table("train.csv", COLUMNS, ROWS)
        write_table("test.csv", COLUMNS[:-1], [row[:-1] for row in ROWS])
        loaded = swag.load(data)
        endings = ["runs, fast.", 'says "no".', "sits.", "eats."]
        first = {"id": "17", "context": "He sits.", "start": "She", "endings": endings, "label": 2}
        assert loaded["train"][0] == first
        assert loaded["train"]["label"][:] == [2, 0]
        assert loaded["test"].column_names == ["id", "context", "start", "endings"]

    @pytest.mark.parametrize(
        ("layout", "endings", "label"),
        covering(
            [
                ({"startphrase": "He sits. She"}, "He sits. She", ""),
                ({"context": "He sits. She"}, "He sits. She", ""),
                ({"ctx": "He sits. She", "ctx_a": "He sits.", "ctx_b": "She"}, "He sits.", "She"),
                ({"ctx": "He sits.", "ctx_a": "He sits.", "ctx_b": ""}, "He sits.", ""),
                ({"sent1": "He sits.", "sent2": "She", "startphrase": "He sits. She"}, "He sits.", "She"),
            ],
            [{"endings": ["x", "y", "z"]}, {"choices": ["x", "y", "z"]}, dict(ending0="x", ending1="y", ending2="z")],
            [{"label": 2}, {"answer": 2}, {"label": "2"}],
        ),
    )
    def test_layouts_of_json(self, write_lines, layout, endings, label):
        row, context, start = layout
        (found,) = swag.load(write_lines("val.jsonl.gz", [row | endings | label]))["validation"]
        assert found == {"id": "0", "context": context, "start": start, "endings": ["x", "y", "z"], "label": 2}

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [
            ([{"ind": 4}, {"ind": 9}], ["4", "9"]),
            ([{"ind": 4, "id": "a"}, {"ind": 9, "id": "b"}], ["a", "b"]),
            ([{"fold-ind": 5, "ind": 4}, {"fold-ind": 6, "ind": 4}], ["5", "6"]),
            ([{"video-id": "v"}, {"video-id": "v"}], ["0", "1"]),
        ],
    )
    def test_ids(self, write_lines, ids, expected):
        rows = [row | {"context": "A", "endings": ["x", "y"], "label": 0} for row in ids]
        assert swag.load(write_lines("dev.jsonl", rows))["validation"]["id"][:] == expected

    @pytest.mark.parametrize("label", [{}, {"label": ""}, {"label": -1}, {"label": None}])
    def test_unlabeled_test_file(self, write_lines, label):
        data = write_lines("test.jsonl", [{"context": "A", "endings": ["x", "y"]} | label])
        assert "label" not in swag.load(data)["test"].column_names

    def test_labeled_test_file(self, write_lines):
        data = write_lines("test_5.jsonl", [{"context": "A", "endings": ["x", "y"], "label": 1}])
        assert swag.load(data, ["test_5"])["test_5"]["label"][:] == [1]


class TestSplits:
    def test_names(self, write_table):
        assert swag.splits() == ["train", "validation", "test"]
        for name in ("val_full.csv", "test.csv", "val.csv", "train_full.csv"):
            data = write_table(name, COLUMNS, ROWS)
        assert swag.splits(data) == ["validation", "test", "train_full", "val_full"]
        assert set(swag.load(data)) == {"validation", "test"}

    def test_missing(self, write_table):
        data = write_table("odd.csv", COLUMNS, ROWS)
        for place, splits, message in (
            (data, None, "no file named train, dev, val, .*; available splits: odd"),
            (data, ["train"], "split 'train' is missing in .*; available: odd"),
            (None, ["test"], "cannot load split 'test' of allenai/swag .*--data DIR"),
        ):
            with pytest.raises((ValueError, OSError), match=message):
                swag.load(place, splits)

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            (COLUMNS[:-1], "row 1: no column label or answer; available: "),
            (["sent1", "sent2", "label"], "no column endings or choices; available: .*sent1, sent2, label"),
            (["sent1", "ending0", "ending1", "label"], "no column startphrase or context or ctx; available"),
        ],
    )
    def test_columns(self, write_table, columns, message):
        data = write_table("train.csv", columns, [["x"] * len(columns)])
        with pytest.raises(ValueError, match=message):
            swag.load(data)


class TestBadRows:
    GOOD = {"context": "A", "endings": ["x", "y", "z"], "label": 1}

    @pytest.mark.parametrize(
        ("change", "field", "message"),
        [
            ({"context": ""}, "context", "is empty"),
            ({"context": None}, "context", "is missing"),
            ({"endings": None}, "endings", "is missing"),
            ({"endings": "xyz"}, "endings", "'xyz' is not a list of texts"),
            ({"endings": ["x"]}, "endings", "at least 2 endings are needed, got 1"),
            ({"endings": ["x", "y"]}, "endings", "2 endings, but the first row has 3"),
            ({"endings": ["x", " ", "z"]}, "endings[1]", "is empty"),
            ({"endings": ["x", "y", None]}, "endings[2]", "is missing"),
            ({"label": 3}, "label", "3 is not one of 0 to 2"),
            ({"label": -1}, "label", "-1 is not one of 0 to 2"),
            ({"label": "B"}, "label", "'B' is not one of 0 to 2"),
            ({"label": True}, "label", "True is not one of 0 to 2"),
            ({"label": None}, "label", "None is not one of 0 to 2"),
        ],
    )
    def test_json(self, write_lines, caplog, change, field, message):
        data = write_lines("train.jsonl", [self.GOOD, self.GOOD | change, self.GOOD])
        with pytest.raises(ValueError) as error:
            swag.load(data)
        assert str(error.value).endswith(f"train.jsonl: row 2, field '{field}': {message}")
        with caplog.at_level(logging.WARNING):
            assert len(swag.load(data, skip_bad=True)["train"]) == 2
        assert "skipped 1 of 3 rows, the first: row 2" in caplog.text

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("ending2", "", "row 3, field 'ending2': is empty"),
            ("sent1", " ", "row 3, field 'sent1': is empty"),
            ("label", "4", "row 3, field 'label': '4' is not one of 0 to 3"),
        ],
    )
    def test_table(self, write_table, column, value, message):
        bad = list(ROWS[1])
        bad[COLUMNS.index(column)] = value
        with pytest.raises(ValueError, match=f"train.csv: {message}"):
            swag.load(write_table("train.csv", COLUMNS, [ROWS[0], bad]))

    def test_endings_in_keys(self, write_lines):
        for endings, message in (
            ({"ending0": "x"}, "field 'ending0': at least 2 endings are needed, got 1"),
            ({"ending0": "x", "ending2": "z"}, "field 'ending1': is missing"),
        ):
            with pytest.raises(ValueError, match=f"row 1, {message}"):
                swag.load(write_lines("train.jsonl", [{"context": "A", "label": 0} | endings]))


def test_the_hub(monkeypatch):
    def load(labels, split):
        rows = {name: [row[index] for row in ROWS] for index, name in enumerate(COLUMNS)} | {"label": labels}
        monkeypatch.setattr(task_files, "load_hub", lambda source: datasets.Dataset.from_dict(rows))
        return swag.load(None, [split])[split]

    result = load([3, 0], "train")
    assert result["id"][:] == ["17", "18"] and result["label"][:] == [3, 0]
    assert result[1]["start"] == "It" and result[1]["endings"] == ["barks.", "sings.", "sits.", "reads."]
    assert "label" not in load([-1, -1], "test").column_names
    with pytest.raises(ValueError, match="swag regular train: row 2, field 'label': -1 is not one of 0 to 3"):
        load([1, -1], "train")


def examples(**columns):
    rows = {"id": ["r", "s"], "context": ["a b", "c"], "start": ["c", ""], "endings": [["d", "a b"], ["a", "d"]]}
    return datasets.Dataset.from_dict(rows | columns)


class TestFeatures:
    def test_encode(self, tokenizer):
        features = encode_all(tokenizer, examples(label=[1, 0]))
        assert features["input_ids"][:] == [
            [[CLS, A, B, SEP, C, D, SEP], [CLS, A, B, SEP, C, A, B, SEP]],
            [[CLS, C, SEP, A, SEP], [CLS, C, SEP, D, SEP]],
        ]
        assert features["token_type_ids"][1] == [[0, 0, 0, 1, 1]] * 2
        assert features["labels"][:] == [1, 0]
        assert set(features.column_names) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
        features = encode_all(tokenizer, examples(), max_length=6)
        assert max(len(ids) for row in features["input_ids"] for ids in row) == 6

    @pytest.mark.parametrize("labels", [{"label": [1, 0]}, {}], ids=["labels", "none"])
    def test_batch(self, tokenizer, labels):
        batch = swag.collator(tokenizer)(list(encode_all(tokenizer, examples(**labels))))
        assert batch["input_ids"].shape == (2, 2, 8)
        assert batch["input_ids"][1, 0].tolist() == [CLS, C, SEP, A, SEP, 0, 0, 0]
        assert batch["attention_mask"][1, 0].tolist() == [1] * 5 + [0] * 3
        assert ("labels" in batch) == bool(labels) and (not labels or batch["labels"].tolist() == [1, 0])


def encode_all(tokenizer, rows, max_length=16):
    return swag.encode(rows, tokenizer, SimpleNamespace(max_length=max_length))
