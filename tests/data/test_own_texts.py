"""Tasks of one's own texts, in files and on the Hub, and the mistakes that they may have."""

import json
import logging

import datasets
import pytest

from sparsebert.commands import main
from sparsebert.data.tasks import TASKS, own_texts, task_files
from sparsebert.data.tasks.task_files import HubSplit


CLASSES = TASKS["text_classification"]
NUMBERS = TASKS["text_regression"]


def lines(*rows):
    return "".join(json.dumps(dict(zip(("text", "label"), row, strict=True))) + "\n" for row in rows)


class TestFiles:
    def test_quotes_newlines_byte_order_mark_and_carriage_returns(self, write_data):
        data = write_data("train.csv", '\ufeffid,text,label\r\n7,"two\r\nlines, ""so""",good\r\n9,x,bad\r\n')
        write_data("dev.csv.gz", "text,label\nx, good \n")
        loaded = CLASSES.load(data)
        assert loaded["train"][:] == {"id": ["7", "9"], "text": ['two\r\nlines, "so"', "x"], "label": [1, 0]}
        assert loaded["validation"]["label"][:] == [1] and loaded["train"].features["label"].names == ["bad", "good"]

    def test_pairs_in_parquet(self, tmp_path):
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "text_pair": ["c", "d"], "label": [10, 9]})
        for split in ("train", "validation"):
            rows.to_parquet(tmp_path / f"{split}.parquet")
        loaded = CLASSES.load(str(tmp_path))
        assert loaded["validation"][0] == {"id": "0", "text": "a", "text_pair": "c", "label": 1}
        assert loaded["train"].features["label"].names == ["9", "10"]  # sorted as numbers
        (tmp_path / "train.parquet").write_text("text")
        with pytest.raises(ValueError, match="train.parquet: not a Parquet file"):
            CLASSES.load(str(tmp_path))

    def test_other_columns_and_numbers(self, write_data):
        data = write_data("train.tsv", "review\treply\tstars\tlabel\na\tc\t1.5\tx\nb\td\t-2\tx\n")
        write_data("val.jsonl.xz", '{"review": "a", "reply": "c", "stars": 3}\n')
        write_data("test.jsonl", '{"review": "a", "reply": "c"}\n')
        columns = {"text_column": "review", "text_pair_column": "reply", "label_column": "stars"}
        loaded = NUMBERS.load(data, **columns)
        assert loaded["train"]["text_pair"][:] == ["c", "d"] and loaded["train"]["label"][:] == [1.5, -2.0]
        assert loaded["validation"]["label"][:] == [3.0] and "label" not in loaded["test"].column_names
        with pytest.raises(ValueError, match="no column reviw; did you mean 'review'.*--text_column"):
            NUMBERS.load(data, **columns | {"text_column": "reviw"})

    def test_minus_one_may_be_a_label(self, write_data):
        data = write_data("train.jsonl", lines(("x", -1), ("y", 0), ("z", 1)))
        write_data("test.jsonl", lines(("x", -1), ("y", 0)))
        assert CLASSES.load(data)["test"]["label"][:] == [0, 1]
        assert NUMBERS.load(data)["test"]["label"][:] == [-1.0, 0.0]
        write_data("train.jsonl", lines(("y", 0), ("z", 1), ("u", 1)))
        assert "label" not in CLASSES.load(data)["test"].column_names

    def test_splits(self, write_data):
        data = write_data("reviews.csv", "text,label\n")
        assert CLASSES.splits(data) == CLASSES.splits(f"{data}/reviews.csv") == ["train", "validation"]
        write_data("test.csv", "text,label\n")
        assert CLASSES.splits(data) == ["test", "reviews", "validation"]
        write_data("valid.csv", "text,label\n")
        assert CLASSES.splits(data) == ["validation", "test", "reviews"]

    def test_the_classes_are_those_of_the_split_to_train_on(self, write_data):
        data = write_data("a.jsonl", lines(("x", "b"), ("y", "c")))
        write_data("b.jsonl", lines(("x", "a"), ("y", "b")))
        loaded = CLASSES.load(data, ["b"], train_split="b")["b"]
        assert loaded.features["label"].names == ["a", "b"]
        with pytest.raises(ValueError, match="b.jsonl: row 1, field 'label': unknown label 'a'"):
            CLASSES.load(data, ["b"], train_split="a")

    def test_a_part_of_each_class_is_held_out(self, write_data, caplog):
        data = write_data("train.jsonl", lines(*((f"t{i}", "rare" if i % 5 else "common") for i in range(50))))
        with caplog.at_level(logging.WARNING):
            loaded, again = CLASSES.load(data), CLASSES.load(data)
        assert "5 of 50 examples of 'train', drawn with seed 0, are held out" in caplog.text
        assert [len(split) for split in loaded.values()] == [45, 5] and loaded["validation"]["label"][:].count(0) == 1
        assert not set(loaded["train"]["text"][:]) & set(loaded["validation"]["text"][:])
        assert loaded["validation"]["text"][:] == again["validation"]["text"][:]
        assert loaded["validation"]["text"][:] != CLASSES.load(data, split_seed=1)["validation"]["text"][:]
        # Another split to evaluate on: none is needed.
        write_data("other.jsonl", lines(("x", "rare")))
        sizes = {name: len(rows) for name, rows in CLASSES.load(data, ["train", "other"]).items()}
        assert sizes == {"train": 50, "other": 1}
        write_data("dev.jsonl", lines(("x", "rare")))
        with pytest.raises(ValueError, match="split_seed 1 has no meaning for .*, which has a split 'validation'"):
            CLASSES.load(data, split_seed=1)


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "label", "message"),
        [
            (" ", "bad", "field 'text': is empty"),
            (4, "bad", "field 'text': 4 is not a text"),
            ("z", "", "field 'label': is empty"),
            ("z", None, "field 'label': is missing"),
            ("z", ["good"], r"field 'label': \['good'\] is not a label"),
        ],
    )
    def test_rows(self, write_data, caplog, text, label, message):
        data = write_data("train.jsonl", lines(("x", "good"), ("y", "bad"), (text, label)))
        write_data("dev.jsonl", lines(("x", "good"), ("y", "goood")))
        with pytest.raises(ValueError, match=f"train.jsonl: row 3, {message}"):
            CLASSES.load(data)
        with caplog.at_level(logging.WARNING):
            loaded = CLASSES.load(data, skip_bad=True)
        assert [len(loaded[split]) for split in ("train", "validation")] == [2, 1]
        assert "row 2, field 'label': unknown label 'goood'; did you mean 'good'?" in caplog.text

    @pytest.mark.parametrize("label", ["high", "nan", "inf", "1e39", None, True])
    def test_numbers(self, write_data, label):
        with pytest.raises(ValueError, match="train.jsonl: row 2, field 'label': .* is not a finite number"):
            NUMBERS.load(write_data("train.jsonl", lines(("x", 1), ("y", label))))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "no rows"),
            ("text,label\n", "no usable rows"),
            ("text\tlabel\nx\ta\n", r"separated by tabs in a .tsv and by commas in a .csv, here by '\\t'"),
            ("Text,label\nx,a\n", "row 1: no column text; did you mean 'Text'"),
            ("text,text,label\nx,y,a\n", "row 1: the column 'text' comes 2 times"),
            ("text,label\nx,a\ny,a\n", "has only the label 'a'"),
            ("text,label\nx,a,b\n", "row 2: 3 fields, expected 2"),
            ("text,label\n" + "".join(f"t,{i}.5\n" for i in range(30)), "30 different labels in 30 rows"),
            (b"text,label\ncaf\xe9,a\n", "not UTF-8"),
        ],
    )
    def test_files(self, write_data, content, message):
        with pytest.raises(ValueError, match=f"train.csv: .*{message}"):
            CLASSES.load(write_data("train.csv", content))

    def test_places(self, write_data):
        for place, message in (
            (None, "--data FILE"),
            ("nothing", "no file or folder 'nothing'.*hub:owner/name"),
            (write_data("train.txt", "") + "/train.txt", "its name must end in .tsv"),
            (write_data("test.csv", "text,label\n"), "'train' is missing in .*; available: test"),
            ("hub:nobody/nothing", "nobody/nothing from the Hub"),
        ):
            with pytest.raises((ValueError, OSError), match=message):
                CLASSES.load(place)


@pytest.fixture
def on_the_hub(monkeypatch):
    """`hub:owner/name` with a split of two texts to train on and an unlabeled test split."""

    def load(source):
        label = datasets.ClassLabel(names=["no", "yes"])
        features = datasets.Features(text=datasets.Value("string"), label=label)
        labels = [-1, -1] if source.split == "test" else [1, 0]
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": labels}, features=features)

    monkeypatch.setattr(task_files, "load_hub", load)
    splits = [HubSplit("owner/name", None, split) for split in ("train", "test")]
    monkeypatch.setattr(own_texts, "hub_splits", lambda name, config: splits)
    return "hub:owner/name"


def test_a_dataset_of_the_hub(on_the_hub):
    assert CLASSES.splits(on_the_hub) == ["train", "test", "validation"]
    loaded = CLASSES.load(on_the_hub, ["train", "test"])
    assert loaded["train"]["label"][:] == [1, 0] and loaded["train"].features["label"].names == ["no", "yes"]
    assert "label" not in loaded["test"].column_names


def test_finetuning_and_search(write_data, checkpoints, task_data, tmp_path, said):
    """The commands of docs/finetune.md, with classes that can be told apart by a word."""
    rows = [f"w{i % 7} w2 {'yes' if i % 2 else 'w3'},{'good' if i % 2 else 'bad'}\n" for i in range(60)]
    data = write_data("reviews.csv", "review,verdict\n" + "".join(rows)) + "/reviews.csv"
    columns = f"--task text_classification --data {data} --text_column review --label_column verdict --max_length 32"
    training = "--max_steps 30 --learning_rate 3e-3 --use_cpu true --report_to none"
    run, found = tmp_path / "run", tmp_path / "found"
    assert main(f"finetune {columns} {training} --model {checkpoints['stock']} --output_dir {run}".split()) == 0
    assert json.loads((run / "metrics.json").read_text())["splits"]["validation"]["macro_f1"] == 1
    config = json.loads((run / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    predictions = [json.loads(line) for line in (run / "predictions_validation.jsonl").read_text().splitlines()]
    assert len(predictions) == 6 and all(row["prediction"] == row["reference"] for row in predictions)
    search = f"search {columns} --model {run} --output_dir {found} --target_sparsity 0.5 --steps 2"
    assert main([*search.split(), "--timed", "false", "--patterns", "false"]) == 0
    rest = ["--model", checkpoints["stock"], "--output_dir", tmp_path / "other", "--max_length", 32]
    line = said(["finetune", "--task", "mrpc", "--data", task_data("mrpc"), "--text_column", "review", *rest])
    assert "text_column" in line
