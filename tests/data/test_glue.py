import json
import logging

import datasets
import pytest
from conftest import covering

from sparsebert.data.tasks import glue, task_files
from sparsebert.data.tasks.glue import GLUE, GLUE_COLUMNS, SUBMISSIONS, averages, write_submission
from sparsebert.files import TASK_FILES


# Train files in the layout of GLUE's download: the folder of the task, the file, and the labels.
ORIGINALS = {
    "cola": ("CoLA", "gj04\t1\t\tIt is so.\ngj04\t0\t*\tIs so it.\n", [1, 0]),
    "sst2": ("SST-2", 'sentence\tlabel\n"good \t1\nbad\t0\n', [1, 0]),
    "mrpc": (
        "MRPC",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tSo " it is .\tIt is so .\r\n'
        "0\t7\t9\tA .\tB .\r\n",
        [1, 0],
    ),
    "stsb": (
        "STS-B",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tg\tf\t2012\t0001\tnone\tnone\tA.\tB.\t5.000\n1\tg\tf\t2012\t0001\tnone\tnone\tC.\tD.\t0.25\n",
        [5.0, 0.25],
    ),
    "qqp": ("QQP", "id\tqid1\tquestion1\tquestion2\tis_duplicate\n133\t1\tA.\tB.\t0\n77\t3\tC.\tD.\t1\n", [0, 1]),
    "mnli": (
        "MNLI",
        "index\tpairID\tsentence1\tsentence2\tlabel\tgold_label\n"
        "0\t63735n\tA.\tB.\tneutral\tcontradiction\n1\t91383c\tC.\tD.\tneutral\tentailment\n",
        [2, 0],
    ),
    "qnli": ("QNLI", "index\tquestion\tsentence\tlabel\n0\tA.\tB.\tentailment\n1\tC.\tD.\tnot_entailment\n", [0, 1]),
    "rte": ("RTE", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n1\tC.\tD.\tentailment\n", [1, 0]),
    "wnli": ("WNLI", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n1\tC.\tD.\t0\n", [1, 0]),
}
# Their texts, and those that they are paired with.
TEXTS = dict.fromkeys(ORIGINALS, (["A.", "C."], ["B.", "D."])) | {
    "cola": (["It is so.", "Is so it."], None),
    "sst2": (['"good ', "bad"], None),
    "mrpc": (['So " it is .', "A ."], ["It is so .", "B ."]),
}


@pytest.mark.parametrize("name, inside, suffix", covering([*GLUE], [False, True], ["", ".gz"]))
def test_original_files(write_data, name, inside, suffix):
    (folder, text, labels), (texts, pairs) = ORIGINALS[name], TEXTS[name]
    data = write_data(f"{folder}/train.tsv{suffix}", text)
    loaded = glue.load(name, f"{data}/{folder}" if inside else data)
    assert set(loaded) == {"train"}
    train = loaded["train"]
    assert train["text"][:] == texts
    assert train["label"][:] == labels
    if pairs is None:
        assert train.column_names == ["id", "text", "label"]
    else:
        assert train["text_pair"][:] == pairs
    if name == "stsb":
        assert train.features["label"] == datasets.Value("float32")
    else:
        assert train.features["label"].names == list(GLUE[name].names)
    assert train["id"][:] == (["133", "77"] if name == "qqp" else ["0", "1"])


@pytest.mark.parametrize("name", GLUE)
def test_plain_header_and_missing_test_labels(write_data, name):
    pairs = len(GLUE[name].texts) == 2
    header, texts = ("sentence1\tsentence2", "A\tB") if pairs else ("sentence", "A")
    label = GLUE[name].names[1] if GLUE[name].named else "1"
    for stem in ("part7", "test_labeled"):
        write_data(f"{stem}.tsv", f"{header}\tlabel\n{texts}\t{label}\n")
    write_data("test_blank.tsv", f"{header}\tlabel\n{texts}\t-1\n")
    data = write_data("test.tsv", f"index\t{header}\n12\t{texts}\n9\t{texts}\n")
    loaded = glue.load(name, data, ["test", "part7", "test_labeled", "test_blank"])
    assert loaded["part7"]["label"][:] == loaded["test_labeled"]["label"][:] == [1]
    assert "label" not in loaded["test"].column_names and "label" not in loaded["test_blank"].column_names
    assert loaded["test"]["id"][:] == ["12", "9"] and loaded["test"]["text"][:] == ["A", "A"]


def test_cola_test_file_has_a_header(write_data):
    data = write_data("CoLA/test.tsv", "index\tsentence\n0\tBill whistled.\n1\tSo.\n")
    assert glue.load("cola", data)["test"][:] == {"id": ["0", "1"], "text": ["Bill whistled.", "So."]}


def test_sentiment_in_json_lines(write_data):
    rows = [{"id": "0_9", "text": "Fine.\nReally.", "label": 1, "x": 9}, {"id": "1_2", "text": "Bad.", "label": 0}]
    for split in ("train", "test"):
        data = write_data(f"{split}.jsonl.xz", "".join(json.dumps(row) + "\n" for row in rows))
    loaded = glue.load("sst2", data)
    assert set(loaded) == {"train", "test"}
    for split in loaded.values():
        assert split[:] == {"id": ["0_9", "1_2"], "text": ["Fine.\nReally.", "Bad."], "label": [1, 0]}


def test_repeated_ids_are_replaced(write_data):
    data = write_data("train.tsv", "id\tsentence\tlabel\n4\tA\t1\n4\tB\t1\n")
    assert glue.load("sst2", data)["train"]["id"][:] == ["0", "1"]


class TestSplits:
    def test_on_the_hub(self):
        assert glue.splits("rte") == ["train", "validation", "test"]
        both = [f"{split}_{kind}" for split in ("validation", "test") for kind in ("matched", "mismatched")]
        assert glue.splits("mnli") == ["train", *both, "test_ax"]

    def test_in_a_folder(self, write_data):
        text = ORIGINALS["mnli"][1]
        for stem in ("test_matched", "dev_mismatched", "odd", "dev_matched", "train"):
            data = write_data(f"MNLI/{stem}.tsv", text)
        write_data("RTE/train.tsv", text)
        found = ["train", "validation_matched", "validation_mismatched", "test_matched", "odd"]
        assert glue.splits("mnli", data) == found
        assert "odd" not in glue.load("mnli", data)

    @pytest.mark.parametrize("place", ["diagnostic/diagnostic.tsv", "AX/AX.tsv", "AX/other.tsv.gz"])
    def test_diagnostics(self, write_data, place):
        write_data("MNLI/train.tsv", ORIGINALS["mnli"][1])
        data = write_data(place, "index\tsentence1\tsentence2\n0\tA.\tB.\n1\tC.\tD.\n")
        assert glue.splits("mnli", data) == ["train", "test_ax"]
        assert glue.load("mnli", data)["test_ax"]["text_pair"][:] == ["B.", "D."]

    def test_other_files_are_not_opened(self, write_data):
        write_data("RTE/train.tsv", "broken")
        data = write_data("RTE/dev.tsv", ORIGINALS["rte"][1])
        assert set(glue.load("rte", data, ["validation"])) == {"validation"}

    def test_missing(self, write_data):
        data = write_data("RTE/odd.tsv", ORIGINALS["rte"][1])
        write_data("dev.tsv", "index\tsentence\n0\tA\n")
        for name, place, splits, message in (
            ("rte", data, ["test"], "split 'test' is missing in .*; available: odd"),
            ("rte", data, None, "in a folder RTE; .* train, dev, .*; available splits: odd"),
            ("cola", f"{data}/RTE", None, "in a folder CoLA; .*; available splits: odd"),
            ("rte", f"{data}/nowhere", None, "no folder .*nowhere"),
            ("rte", None, ["dev"], "split 'dev' is missing in nyu-mll/glue; available: train"),
            ("rte", None, ["train"], "cannot load split 'train' of nyu-mll/glue .*--data DIR"),
            ("sst2", data, None, "dev.tsv: row 1: no column label; available: index, sentence"),
        ):
            with pytest.raises((ValueError, OSError), match=message):
                glue.load(name, place, splits)


class TestBadRows:
    @pytest.mark.parametrize(
        ("name", "label", "field", "message"),
        [
            ("cola", "2", "label", "'2' is not one of 0, 1"),
            ("sst2", "positive", "label", "'positive' is not one of 0, 1"),
            ("mrpc", "", "Quality", "'' is not one of 0, 1"),
            ("qqp", "-1", "is_duplicate", "'-1' is not one of 0, 1"),
            ("wnli", "1.0", "label", "'1.0' is not one of 0, 1"),
            ("mnli", "-", "gold_label", "'-' is not one of entailment, neutral, contradiction"),
            ("qnli", "0", "label", "'0' is not one of entailment, not_entailment"),
            ("rte", "neutral", "label", "'neutral' is not one of entailment, not_entailment"),
            ("stsb", "high", "score", "'high' is not a number from 0 to 5"),
            ("stsb", "5.001", "score", "'5.001' is not a number from 0 to 5"),
            ("stsb", "-0.1", "score", "'-0.1' is not a number from 0 to 5"),
            ("stsb", "nan", "score", "'nan' is not a number from 0 to 5"),
        ],
    )
    def test_label(self, write_data, caplog, name, label, field, message):
        folder, text, _ = ORIGINALS[name]
        *lines, last = text.splitlines()
        fields = last.split("\t")
        fields[{"cola": 1, "mrpc": 0}.get(name, -1)] = label
        lines.append("\t".join(fields))
        data = write_data(f"{folder}/train.tsv", "\n".join(lines))
        with pytest.raises(ValueError, match=f"train.tsv: row {len(lines)}, field '{field}': {message}"):
            glue.load(name, data)
        with caplog.at_level(logging.WARNING):
            train = glue.load(name, data, skip_bad=True)["train"]
        assert train["text"][:] == TEXTS[name][0][:1]
        assert f"skipped 1 of 2 rows, the first: row {len(lines)}, field '{field}'" in caplog.text

    def test_one_text_of_a_pair_may_be_empty(self, write_data):
        folder = write_data("dev.tsv", "id\tquestion1\tquestion2\tis_duplicate\n4\tA\t\t0\n5\t\tB\t0\n")
        assert glue.load("qqp", folder)["validation"]["text_pair"][:] == ["", "B"]

    def test_rows(self, write_data):
        pair = "sentence1\tsentence2\tlabel\n"
        for name, file, content, message in (
            ("rte", "dev.tsv", f"{pair}\t \tentailment\n", "dev.tsv: row 2, field 'sentence1': is empty"),
            ("rte", "dev.tsv", f"{pair}A\tB\tentailment\n\nA\tentailment\n", "row 4: 2 fields, expected 3: sentence1"),
            ("sst2", "test.tsv", "sentence\tlabel\nA\t1\nB\t-1\n", "row 3, field 'label': '-1' is not one of 0, 1"),
        ):
            data = write_data(file, content)
            with pytest.raises(ValueError, match=message):
                glue.load(name, data, ["test" if file == "test.tsv" else "validation"])

    def test_json(self, write_data):
        data = write_data("train.jsonl", '{"text": "A", "label": true}\n{"text": 3, "label": 1}\n{"label": 1}\n')
        with pytest.raises(ValueError, match="train.jsonl: row 1, field 'label': True is not one of 0, 1"):
            glue.load("sst2", data)
        with pytest.raises(ValueError, match="no usable rows, 3 bad ones"):
            glue.load("sst2", data, skip_bad=True)


@pytest.fixture
def on_the_hub(monkeypatch):
    """`on_the_hub(name, split, **columns)`: a split as it is loaded when the Hub has these columns."""

    def make(name, split, skip_bad=False, **columns):
        monkeypatch.setattr(task_files, "load_hub", lambda source: datasets.Dataset.from_dict(columns))
        return glue.load(name, None, [split], skip_bad)[split]

    return make


class TestHub:
    def test_pairs(self, on_the_hub):
        columns = {"premise": ["A", "B"], "hypothesis": ["C", "D"], "label": [2, 0], "idx": [10, 7]}
        result = on_the_hub("mnli", "train", **columns)
        assert result[:] == {"id": ["10", "7"], "text": ["A", "B"], "text_pair": ["C", "D"], "label": [2, 0]}
        assert result.features["label"].names == list(GLUE["mnli"].names)

    @pytest.mark.parametrize(("name", "label"), [("wnli", -1), ("stsb", -1.0)])
    def test_unlabeled(self, on_the_hub, name, label):
        assert "label" not in on_the_hub(name, "test", sentence1=["A"], sentence2=["B"], label=[label]).column_names

    @pytest.mark.parametrize(
        ("name", "label", "message"),
        [("rte", -1, "-1 is not one of 0, 1"), ("stsb", 7.5, "'7.5' is not"), ("stsb", float("nan"), "'nan' is not")],
    )
    def test_bad_labels(self, on_the_hub, name, label, message):
        columns = {"sentence1": ["A", "B"], "sentence2": ["C", "D"], "label": [1, label]}
        with pytest.raises(ValueError, match=f"nyu-mll/glue {name} train: row 2, field 'label': {message}"):
            on_the_hub(name, "train", **columns)
        assert len(on_the_hub(name, "train", skip_bad=True, **columns)) == 1

    def test_regression(self, on_the_hub):
        result = on_the_hub("stsb", "train", sentence1=["A"], sentence2=["B"], label=[2.5])
        assert result["label"][:] == [2.5] and result.features["label"] == datasets.Value("float32")


class TestSubmission:
    def test_rows_of_test_sets_are_never_skipped(self, write_data):
        folder = write_data("test.tsv", "index\tsentence1\tsentence2\n0\tA\tB\n1\tA\n")
        with pytest.raises(ValueError, match="test.tsv: row 3: 2 fields, expected 3"):
            glue.load("rte", folder, skip_bad=True)

    @pytest.mark.parametrize(
        ("name", "split", "file", "predictions", "lines"),
        [
            ("cola", "test", "CoLA.tsv", [1, 0], "0\t1\n1\t0\n"),
            ("sst2", "test", "SST-2.tsv", [1, 0], "0\t1\n1\t0\n"),
            ("mrpc", "test", "MRPC.tsv", [1, 0], "0\t1\n1\t0\n"),
            ("stsb", "test", "STS-B.tsv", [-0.2, 5.7, 2.71828], "0\t0.000\n1\t5.000\n2\t2.718\n"),
            ("qqp", "test", "QQP.tsv", [1, 0], "0\t1\n1\t0\n"),
            ("mnli", "test_matched", "MNLI-m.tsv", [2, 1], "0\tcontradiction\n1\tneutral\n"),
            ("mnli", "test_mismatched", "MNLI-mm.tsv", [0], "0\tentailment\n"),
            ("mnli", "test_ax", "AX.tsv", [0], "0\tentailment\n"),
            ("qnli", "test", "QNLI.tsv", [1, 0], "0\tnot_entailment\n1\tentailment\n"),
            ("rte", "test", "RTE.tsv", [1, 0], "0\tnot_entailment\n1\tentailment\n"),
            ("wnli", "test", "WNLI.tsv", [1, 0], "0\t1\n1\t0\n"),
        ],
    )
    def test_bytes(self, tmp_path, name, split, file, predictions, lines):
        rows = [{"id": f"x{value}", "prediction": value} for value in predictions]
        path = write_submission(name, split, rows, tmp_path / "new" / "folder")
        assert path == tmp_path / "new" / "folder" / file
        assert path.read_bytes() == b"index\tprediction\n" + lines.encode()

    def test_they_are_among_the_files_that_the_next_run_replaces(self):
        assert {f"{name}.tsv" for name in SUBMISSIONS.values()} < set(TASK_FILES)

    def test_other_splits(self, tmp_path):
        assert write_submission("mnli", "test", [], tmp_path) is None
        assert not list(tmp_path.iterdir())


COLUMNS = ["MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({title: index / 10 for index, title in enumerate([*COLUMNS, "WNLI"])}, (3.6 / 9, (0.05 + 3.5) / 8, 9, 8)),
        ({"MNLI-m": 0.8, "MNLI-mm": 0.6, "RTE": 0.5, "QQP": None}, (1.9 / 3, 0.6, 3, 2)),
        ({"MNLI-mm": 0.6, "CoLA": -0.2}, (0.2, -0.2, 2, 1)),
        ({}, (None, None, 0, 0)),
    ],
)
def test_averages(scores, expected):
    assert [title for title, *_ in GLUE_COLUMNS] == COLUMNS
    assert all(split in glue.splits(task) for _, task, split, _ in GLUE_COLUMNS)
    names = ("average_9", "average_8", "num_columns_9", "num_columns_8")
    want = dict(zip(names, expected, strict=True))
    assert averages(scores) == (pytest.approx(want) if scores else want)
