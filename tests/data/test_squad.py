import json
import logging

import datasets
import pytest

from sparsebert.data.tasks import squad
from sparsebert.data.tasks.squad import load, splits, write_submission


CONTEXT = "The red fox ran. Then a blue cat, which was old, slept near the warm river; nobody saw the old dog."


def answer(text, context=CONTEXT):
    return {"text": text, "answer_start": context.index(text)}


def qa(identifier, question="Who ran?", **fields):
    return {"id": identifier, "question": question} | fields


def squad_file(*questions, context=CONTEXT, **article):
    return {"version": "x", "data": [article | {"paragraphs": [{"context": context, "qas": list(questions)}]}]}


@pytest.fixture
def write(write_data):
    """`write(name, content)`: a file with a JSON value, or with this text; returns its folder."""
    return lambda name, content: write_data(name, content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def load_one(write):
    """`load_one(*questions)`: the rows of a file with these questions, as the development set of a task."""

    def make(*questions, name="squad", skip_bad=False, **fields):
        return load(name, write("dev.json", squad_file(*questions, **fields)), skip_bad=skip_bad)["validation"]

    return make


def test_splits_of_a_folder_and_of_the_hub(write, tmp_path):
    for file in ("dev-v1.1.json", "train-v1.1.json.gz", "train_part7.json.xz", "dev-v2.0.json"):
        write(file, squad_file(qa("1", answers=[answer("fox")])))
    assert splits("squad", str(tmp_path)) == ["train", "validation", "dev-v2.0", "train_part7"]
    assert splits("squad_v2", str(tmp_path)) == ["validation", "dev-v1.1", "train-v1.1", "train_part7"]
    assert splits("squad") == splits("squad_v2", None) == ["train", "validation"]


def test_only_the_splits_asked_for_are_opened(write, tmp_path):
    write("train.json", "broken")
    write("dev.json.xz", squad_file(qa("1", answers=[answer("fox")])))
    write("small.json.gz", squad_file(qa("1", answers=[answer("cat")])))
    loaded = load("squad", str(tmp_path), ["small", "validation"])
    texts = {split: rows["answers"][0][0]["text"] for split, rows in loaded.items()}
    assert texts == {"small": "cat", "validation": "fox"}
    with pytest.raises(ValueError, match="split 'other' is missing in .*; available: train, validation, small"):
        load("squad", str(tmp_path), ["other"])
    with pytest.raises(ValueError, match="split 'test' is missing in rajpurkar/squad; available: train, validation"):
        load("squad", splits=["test"])


def test_folder_with_parts_only_needs_the_names(write, tmp_path):
    write("part.json", squad_file(qa("1", answers=[answer("fox")])))
    with pytest.raises(ValueError, match="none of train, validation, test is there; available splits: part"):
        load("squad", str(tmp_path))


def test_columns(load_one):
    (row,) = load_one(qa("1", answers=[answer("red fox"), answer("fox")]), title="Foxes")
    answers = [{"text": "red fox", "answer_start": 4}, {"text": "fox", "answer_start": 8}]
    assert row == qa("1", title="Foxes", context=CONTEXT, answers=answers)


def test_v2_without_titles(load_one):
    questions = (
        qa("1", answers=[answer("fox")], is_impossible=False),
        qa("2", answers=[], is_impossible=True, plausible_answers=[answer("cat")]),
    )
    rows = load_one(*questions, name="squad_v2")
    assert rows["title"][:] == ["", ""]
    assert [len(answers) for answers in rows["answers"]] == [1, 0]


def test_unlabeled_file_has_no_answers(write, tmp_path):
    write("test-v1.1.json", squad_file(qa("1"), qa("2")))
    rows = load("squad", str(tmp_path))["test"]
    assert rows.column_names == ["id", "title", "question", "context"]


def test_answers_lose_surrounding_whitespace(load_one):
    start = CONTEXT.index("red")
    answers = [{"text": " red fox", "answer_start": start - 1}, {"text": "red ", "answer_start": start}]
    (row,) = load_one(qa("1", answers=answers))
    assert row["answers"] == [{"text": "red fox", "answer_start": start}, {"text": "red", "answer_start": start}]


BAD_ROWS = {
    "other text": (qa("7", answers=[{"text": "fox", "answer_start": 4}]), "answers", "'7' has 'fox' at 4.*has 'red'"),
    "negative": (qa("7", answers=[{"text": "fox", "answer_start": -2}]), "answers", "has answer_start -2, expected 0"),
    "beyond": (qa("7", answers=[{"text": "fox", "answer_start": 400}]), "answers", "has answer_start 400.* to 98"),
    "over the end": (qa("7", answers=[{"text": "dog. ran", "answer_start": 95}]), "answers", "its context has 'dog.'"),
    "empty answer": (qa("7", answers=[{"text": " ", "answer_start": 3}]), "answers", "'7' has an empty answer"),
    "no answer": (qa("7", answers=[]), "answers", "'7' has no answer, which only squad_v2 allows"),
    "no list": (qa("7"), "answers", "'7' has no list of answers, unlike others in the file"),
    "no text": (qa("7", answers=[{"answer_start": 3}]), "answers", "expected a 'text' and an integer 'answer_start'"),
    "no offset": (qa("7", answers=[{"text": "fox", "answer_start": "8"}]), "answers", "an integer 'answer_start'"),
    "impossible": (qa("7", answers=[answer("fox")], is_impossible=True), "is_impossible", "1 answers, but True"),
    "half of a character": (qa("7", "Who \ud800?", answers=[answer("fox")]), "question", "half of a surrogate pair"),
    "empty question": (qa("7", " ", answers=[answer("fox")]), "question", "'7' has an empty question"),
}


@pytest.mark.parametrize(("question", "field", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_bad_rows(load_one, question, field, message, caplog):
    questions = (qa("1", answers=[answer("fox")]), question, qa("9", answers=[answer("cat")]))
    with pytest.raises(ValueError, match=rf"dev.json: row 2, field '{field}': .*{message}"):
        load_one(*questions)
    with caplog.at_level(logging.WARNING):
        assert load_one(*questions, skip_bad=True)["id"][:] == ["1", "9"]
    assert f"skipped 1 of 3 rows, the first: row 2, field '{field}'" in caplog.text


def test_repeated_ids_are_replaced_by_numbers(load_one, caplog):
    with caplog.at_level(logging.WARNING):
        assert load_one(*(qa("1", answers=[answer(text)]) for text in ("fox", "cat")))["id"][:] == ["0", "1"]
    assert "ids occur more than once" in caplog.text


def test_answers_that_are_all_empty_are_no_labels(load_one):
    secret = [{"text": "", "answer_start": 0}]
    assert "answers" not in load_one(qa("1", answers=secret), qa("2", answers=secret)).column_names
    with pytest.raises(ValueError, match="row 1, field 'answers': question '1' has an empty answer"):
        load_one(qa("1", answers=secret), qa("2", answers=[answer("fox")]))


def test_bad_rows_of_v2_and_of_the_context(load_one):
    contradiction = qa("7", answers=[], is_impossible=False)
    with pytest.raises(ValueError, match="row 1, field 'is_impossible': question '7' has 0 answers, but False"):
        load_one(contradiction, name="squad_v2")
    with pytest.raises(ValueError, match="row 1, field 'context': question '7' has an empty context"):
        load_one(qa("7", answers=[]), name="squad_v2", context="\n")
    with pytest.raises(ValueError, match="no usable rows, 1 bad"):
        load_one(contradiction, name="squad_v2", skip_bad=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ([], "the file has no list 'data'"),
        ({"version": "1.1"}, "the file has no list 'data'"),
        ({"data": [{}]}, r"data\[0\] has no list 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\].paragraphs\[0\] has no str 'context'"),
        ({"data": [{"paragraphs": [{"context": "x"}]}]}, r"data\[0\].paragraphs\[0\] has no list 'qas'"),
        (squad_file({"question": "x"}), r"paragraphs\[0\].qas\[0\] has no str 'id'"),
        (squad_file({"id": "1", "answers": []}), r"paragraphs\[0\].qas\[0\] has no str 'question'"),
        ({"data": []}, "no usable rows"),
    ],
)
def test_files_in_another_layout(write, tmp_path, content, message):
    write("train.json", content)
    for skip_bad in (False, True):
        with pytest.raises(ValueError, match=rf"train.json: .*{message}"):
            load("squad", str(tmp_path), skip_bad=skip_bad)


def test_layout_of_the_hub(monkeypatch):
    text, integer = datasets.Value("string"), datasets.Value("int32")
    rows = [
        qa("1", title="Foxes", context=CONTEXT, answers={"text": ["red fox", "fox"], "answer_start": [4, 8]}),
        qa("2", title="Foxes", context=CONTEXT, answers={"text": [], "answer_start": []}),
    ]
    columns = dict.fromkeys(("id", "title", "context", "question"), text)
    columns["answers"] = {"text": [text], "answer_start": [integer]}
    dataset = datasets.Dataset.from_list(rows, features=datasets.Features(columns))
    monkeypatch.setattr(squad, "load_hub", lambda source: dataset)
    loaded = load("squad_v2", None, ["train"])["train"]
    assert loaded["answers"][:] == [[answer("red fox"), answer("fox")], []]
    assert loaded["context"][0] == CONTEXT
    with pytest.raises(ValueError, match="rajpurkar/squad train: row 2, field 'answers': question '2' has no answer"):
        load("squad", None, ["train"])
    assert load("squad", None, ["train"], skip_bad=True)["train"]["id"][:] == ["1"]


def test_submission(tmp_path):
    nbest = [{"text": "caf\u00e9", "probability": 1.0, "start_logit": 0.5, "end_logit": 0.5}]
    values = {"1": ("caf\u00e9", -1.5), "2": ("", 2.0)}
    rows = [{"id": key, "prediction": text, "null_odds": odds, "nbest": nbest} for key, (text, odds) in values.items()]
    file = write_submission("squad_v2", "validation", rows, tmp_path / "new")
    assert file == tmp_path / "new" / "predictions_validation.json"
    assert file.read_text(encoding="utf-8") == '{"1": "caf\u00e9", "2": ""}\n'
    assert json.loads((tmp_path / "new" / "null_odds_validation.json").read_text()) == {"1": -1.5, "2": 2.0}
    assert json.loads((tmp_path / "new" / "nbest_predictions_validation.json").read_text()) == {"1": nbest, "2": nbest}
    write_submission("squad", "test", rows, tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {"predictions_test.json", "nbest_predictions_test.json"}
