import gzip
import json
import logging
import lzma
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertTokenizerFast, CanineTokenizer, PreTrainedTokenizerFast

from sparsebert.data.tasks.squad import decode, encode, from_hub, load, splits, write_submission
from sparsebert.data.tasks.squad_metrics import metrics


CONTEXT = "The red fox ran. Then a blue cat, which was old, slept near the warm river; nobody saw the old dog."
FIELDS = {
    "max_length": 16,
    "doc_stride": 4,
    "max_question_length": 4,
    "n_best_size": 20,
    "max_answer_length": 8,
    "no_answer_threshold": 0.0,
}


@pytest.fixture(scope="module")
def tokenizer():
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the red fox ran then a blue cat which was old slept near warm river nobody"
    words += " saw dog . , ; ? who where did it ri ##ver ##s"
    return BertTokenizerFast(vocab={word: index for index, word in enumerate(words.split())})


def options(**fields):
    return SimpleNamespace(**FIELDS | fields)


def answer(text, context=CONTEXT):
    return {"text": text, "answer_start": context.index(text)}


def qa(identifier, question="Who ran?", **fields):
    return {"id": identifier, "question": question} | fields


def squad_file(*questions, context=CONTEXT, **article):
    return {"version": "x", "data": [article | {"paragraphs": [{"context": context, "qas": list(questions)}]}]}


def write(path, content):
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(content if isinstance(content, str) else json.dumps(content))


def load_one(folder, *questions, name="squad", skip_bad=False, **fields):
    write(folder / "dev.json", squad_file(*questions, **fields))
    return load(name, str(folder), skip_bad=skip_bad)["validation"]


def examples_of(folder, *answers, name="squad_v2", **fields):
    questions = [qa(f"q{index}", answers=[answer(text)] if text else []) for index, text in enumerate(answers)]
    return load_one(folder, *questions, name=name, **fields)


def logits_of(features, spans, cls=0.0):
    """Logits that are highest, with the values given, at the characters given: `{window: (start, end, value)}`."""
    lengths = [len(ids) for ids in features["input_ids"]]
    start = np.full((len(lengths), max(lengths)), -100.0, dtype=np.float32)
    for row, length in zip(start, lengths, strict=True):
        row[:length] = -5.0
        row[0] = cls
    end = start.copy()
    for window, (first, last, value) in spans.items():
        offsets = np.array(features[window]["offset_mapping"])
        start[window, offsets[:, 0].tolist().index(first)] = value
        end[window, offsets[:, 1].tolist().index(last)] = value
    return start, end


def test_splits_of_a_folder_and_of_the_hub(tmp_path):
    for file in ("dev-v1.1.json", "train-v1.1.json.gz", "train_part7.json.xz", "dev-v2.0.json"):
        write(tmp_path / file, squad_file(qa("1", answers=[answer("fox")])))
    assert splits("squad", str(tmp_path)) == ["train", "validation", "dev-v2.0", "train_part7"]
    assert splits("squad_v2", str(tmp_path)) == ["validation", "dev-v1.1", "train-v1.1", "train_part7"]
    assert splits("squad") == splits("squad_v2", None) == ["train", "validation"]


def test_only_the_splits_asked_for_are_opened(tmp_path):
    write(tmp_path / "train.json", "broken")
    write(tmp_path / "dev.json.xz", squad_file(qa("1", answers=[answer("fox")])))
    write(tmp_path / "small.json.gz", squad_file(qa("1", answers=[answer("cat")])))
    loaded = load("squad", str(tmp_path), ["small", "validation"])
    assert {split: rows["answers"][0][0]["text"] for split, rows in loaded.items()} == {
        "small": "cat",
        "validation": "fox",
    }
    with pytest.raises(ValueError, match="split 'other' is missing in .*; available: train, validation, small"):
        load("squad", str(tmp_path), ["other"])
    with pytest.raises(ValueError, match="split 'test' is missing in rajpurkar/squad; available: train, validation"):
        load("squad", splits=["test"])


def test_folder_with_parts_only_needs_the_names(tmp_path):
    write(tmp_path / "part.json", squad_file(qa("1", answers=[answer("fox")])))
    with pytest.raises(ValueError, match="none of train, validation, test is in .*; available: part"):
        load("squad", str(tmp_path))


def test_columns(tmp_path):
    (row,) = load_one(tmp_path, qa("1", answers=[answer("red fox"), answer("fox")]), title="Foxes")
    assert row == {
        "id": "1",
        "title": "Foxes",
        "question": "Who ran?",
        "context": CONTEXT,
        "answers": [{"text": "red fox", "answer_start": 4}, {"text": "fox", "answer_start": 8}],
    }


def test_v2_without_titles(tmp_path):
    questions = (
        qa("1", answers=[answer("fox")], is_impossible=False),
        qa("2", answers=[], is_impossible=True, plausible_answers=[answer("cat")]),
    )
    rows = load_one(tmp_path, *questions, name="squad_v2")
    assert rows["title"][:] == ["", ""]
    assert [len(answers) for answers in rows["answers"]] == [1, 0]


def test_unlabelled_file_has_no_answers(tmp_path, tokenizer):
    write(tmp_path / "test-v1.1.json", squad_file(qa("1"), qa("2")))
    rows = load("squad", str(tmp_path))["test"]
    assert rows.column_names == ["id", "title", "question", "context"]
    features = encode(rows, tokenizer, options())
    assert "start_positions" not in features.column_names
    predictions = decode("squad", logits_of(features, {0: (4, 11, 5.0)}), features, rows, options())
    assert predictions[0]["prediction"] == "red fox"


def test_answers_lose_surrounding_whitespace(tmp_path):
    start = CONTEXT.index("red")
    answers = [{"text": " red fox", "answer_start": start - 1}, {"text": "red ", "answer_start": start}]
    (row,) = load_one(tmp_path, qa("1", answers=answers))
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
def test_bad_rows(tmp_path, question, field, message, caplog):
    questions = (qa("1", answers=[answer("fox")]), question, qa("9", answers=[answer("cat")]))
    with pytest.raises(ValueError, match=rf"dev.json: row 2, field '{field}': .*{message}"):
        load_one(tmp_path, *questions)
    with caplog.at_level(logging.WARNING):
        assert load_one(tmp_path, *questions, skip_bad=True)["id"][:] == ["1", "9"]
    assert f"skipped 1 of 3 rows, the first: row 2, field '{field}'" in caplog.text


def test_repeated_ids_are_replaced_by_numbers(tmp_path, caplog):
    questions = [qa("1", answers=[answer("fox")]), qa("1", answers=[answer("cat")])]
    with caplog.at_level(logging.WARNING):
        assert load_one(tmp_path, *questions)["id"][:] == ["0", "1"]
    assert "ids occur more than once" in caplog.text


def test_answers_that_are_all_empty_are_no_labels(tmp_path):
    secret = [{"text": "", "answer_start": 0}]
    assert "answers" not in load_one(tmp_path, qa("1", answers=secret), qa("2", answers=secret)).column_names
    with pytest.raises(ValueError, match="row 1, field 'answers': question '1' has an empty answer"):
        load_one(tmp_path, qa("1", answers=secret), qa("2", answers=[answer("fox")]))


def test_bad_rows_of_v2_and_of_the_context(tmp_path):
    contradiction = qa("7", answers=[], is_impossible=False)
    with pytest.raises(ValueError, match="row 1, field 'is_impossible': question '7' has 0 answers, but False"):
        load_one(tmp_path, contradiction, name="squad_v2")
    with pytest.raises(ValueError, match="row 1, field 'context': question '7' has an empty context"):
        load_one(tmp_path, qa("7", answers=[]), name="squad_v2", context="\n")
    with pytest.raises(ValueError, match="no usable rows, 1 bad"):
        load_one(tmp_path, contradiction, name="squad_v2", skip_bad=True)


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
def test_files_in_another_layout(tmp_path, content, message):
    write(tmp_path / "train.json", content)
    for skip_bad in (False, True):
        with pytest.raises(ValueError, match=rf"train.json: .*{message}"):
            load("squad", str(tmp_path), skip_bad=skip_bad)


def test_layout_of_the_hub():
    text, integer = datasets.Value("string"), datasets.Value("int32")
    rows = [
        qa("1", title="Foxes", context=CONTEXT, answers={"text": ["red fox", "fox"], "answer_start": [4, 8]}),
        qa("2", title="Foxes", context=CONTEXT, answers={"text": [], "answer_start": []}),
    ]
    columns = dict.fromkeys(("id", "title", "context", "question"), text)
    columns["answers"] = {"text": [text], "answer_start": [integer]}
    dataset = datasets.Dataset.from_list(rows, features=datasets.Features(columns))
    normalised = from_hub("squad_v2", dataset)
    assert normalised["answers"][:] == [[answer("red fox"), answer("fox")], []]
    assert normalised["context"][0] == CONTEXT
    with pytest.raises(ValueError, match="rajpurkar/squad: row 2, field 'answers': question '2' has no answer"):
        from_hub("squad", dataset)
    assert from_hub("squad", dataset, skip_bad=True)["id"][:] == ["1"]


def test_windows_cover_the_context_and_overlap(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "red fox")
    features = encode(examples, tokenizer, options())
    all_offsets = tokenizer(CONTEXT, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    seen, previous = set(), []
    assert len(features) > 2
    for row in features:
        assert row["input_ids"][0] == tokenizer.cls_token_id
        assert len(row["input_ids"]) == len(row["offset_mapping"]) == len(row["attention_mask"]) <= 16
        assert tokenizer.decode(row["input_ids"]).startswith("[CLS] who ran? [SEP]")
        inside = [tuple(offsets) for offsets in row["offset_mapping"] if offsets != [-1, -1]]
        assert row["token_type_ids"].index(1) == row["offset_mapping"].index(list(inside[0]))
        assert not previous or previous[-4:] == inside[:4]
        seen |= set(inside)
        previous = inside
    assert seen == set(all_offsets)


@pytest.mark.parametrize("text", ["The red fox", "cat", "which was old", "slept near the warm river", "dog."])
def test_labels_point_at_the_answer(tmp_path, tokenizer, text):
    examples = examples_of(tmp_path, text, "")
    found = 0
    for row in encode(examples, tokenizer, options(doc_stride=8)):
        start, end = row["start_positions"], row["end_positions"]
        begin = CONTEXT.index(text)
        inside = [offsets for offsets in row["offset_mapping"] if offsets != [-1, -1]]
        whole = inside[0][0] <= begin and begin + len(text) <= inside[-1][1]
        if row["example_index"] == 1 or not whole:
            assert (start, end) == (0, 0)
        else:
            found += 1
            assert CONTEXT[row["offset_mapping"][start][0] : row["offset_mapping"][end][1]] == text
    assert found


def test_answer_over_the_border_of_a_window_is_labelled_in_the_other(tmp_path, tokenizer):
    first = encode(examples_of(tmp_path, "red fox"), tokenizer, options())[0]["offset_mapping"][-2]
    text = CONTEXT[first[0] : CONTEXT.index("which was") + len("which was")]
    features = encode(examples_of(tmp_path, text), tokenizer, options())
    positions = [(row["start_positions"], row["end_positions"]) for row in features]
    assert positions[0] == (0, 0)
    assert positions[1][0] > 0


def test_answer_inside_a_token_takes_the_whole_token(tmp_path, tokenizer):
    (row,) = encode(examples_of(tmp_path, "ox"), tokenizer, options(max_length=64))
    assert row["offset_mapping"][row["start_positions"]] == [8, 11]
    assert row["start_positions"] == row["end_positions"]


def test_questions_are_stripped_and_cut(tmp_path, tokenizer):
    questions = (qa("1", "   who saw \n"), qa("2", "where did it ran rivers near the old dog"))
    rows = encode(load_one(tmp_path, *questions), tokenizer, options(max_length=64, max_question_length=5))
    texts = [tokenizer.decode(row["input_ids"]).split(" [SEP]")[0] for row in rows]
    assert texts == ["[CLS] who saw", "[CLS] where did it ran river"]


def test_indices_go_on_over_batches_of_encoding(tmp_path, tokenizer):
    examples = examples_of(tmp_path, *["fox"] * 1001, context="The red fox")
    features = encode(examples, tokenizer, options())
    assert features["example_index"][:] == list(range(1001))


@pytest.mark.parametrize(("fields", "fits"), [({"max_length": 11}, False), ({"max_length": 12}, True)])
def test_max_length_must_leave_room(tmp_path, tokenizer, fields, fits):
    examples = examples_of(tmp_path, "fox")
    if fits:
        assert len(encode(examples, tokenizer, options(**fields))) > 5
        return
    with pytest.raises(ValueError, match=r"max_length must be greater than .*, got 11 <= 4 \+ 3 \+ 4"):
        encode(examples, tokenizer, options(**fields))


def test_tokenizers_that_do_not_fit(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "fox")
    without_cls = Tokenizer(WordLevel({"fox": 0, "[UNK]": 1, "[CLS]": 2}, unk_token="[UNK]"))
    for bad, message in (
        (CanineTokenizer(), "tokenizer must be a fast one, .* got CanineTokenizer"),
        (PreTrainedTokenizerFast(tokenizer_object=without_cls), "tokenizer must begin its texts with a CLS token"),
        (PreTrainedTokenizerFast(tokenizer_object=without_cls, cls_token="[CLS]"), "must begin its texts with a CLS"),
        (BertTokenizerFast(vocab=tokenizer.get_vocab(), padding_side="left"), "must be 'right', got 'left'"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(examples, bad, options())


@pytest.mark.parametrize("text", ["red fox", "blue cat", "slept near", "the old dog."])
def test_decode_finds_the_text_in_whichever_window(tmp_path, tokenizer, text):
    examples = examples_of(tmp_path, "fox", text, "cat")
    begin = CONTEXT.index(text)
    features = encode(examples, tokenizer, options())
    windows = [
        index
        for index, row in enumerate(features)
        if row["example_index"] == 1
        and {begin, begin + len(text)} <= {place for pair in row["offset_mapping"] for place in pair}
    ]
    outputs = logits_of(features, {windows[0]: (begin, begin + len(text), 9.0)})
    for name in ("squad", "squad_v2"):
        rows = decode(name, outputs, features, examples, options())
        assert [row["id"] for row in rows] == ["q0", "q1", "q2"]
        assert rows[1]["prediction"] == rows[1]["nbest"][0]["text"] == text
        assert rows[1]["nbest"][0]["start_logit"] == rows[1]["nbest"][0]["end_logit"] == 9.0
        assert rows[1]["nbest"][0]["probability"] > 0.99


def test_one_hot_labels_decode_to_the_answers(tmp_path, tokenizer):
    texts = ["The red fox ran.", "", "cat", "near the warm river", "dog"]
    examples = examples_of(tmp_path, *texts)
    features = encode(examples, tokenizer, options(doc_stride=8))
    start, end = (np.zeros((len(features), 16)) for _ in range(2))
    start[np.arange(len(features)), features["start_positions"][:]] = 10.0
    end[np.arange(len(features)), features["end_positions"][:]] = 10.0
    predictions = [row["prediction"] for row in decode("squad_v2", (start, end), features, examples, options())]
    assert predictions == texts
    assert metrics("squad_v2", predictions, examples["answers"][:])["exact_match"] == 1.0


def test_decode_agrees_with_trying_all_spans(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "fox", "cat")
    features = encode(examples, tokenizer, options())
    generator = np.random.default_rng(0)
    start, end = generator.normal(size=(2, len(features), 16))
    for length in (1, 3, 8):
        best = {}
        for window, row in enumerate(features):
            context = [token for token, pair in enumerate(row["offset_mapping"]) if pair[0] >= 0]
            for i in context:
                for j in context:
                    if 0 <= j - i < length:
                        score = start[window, i] + end[window, j]
                        text = CONTEXT[row["offset_mapping"][i][0] : row["offset_mapping"][j][1]]
                        best[row["example_index"]] = max(best.get(row["example_index"], (-np.inf, "")), (score, text))
        rows = decode("squad", (start, end), features, examples, options(max_answer_length=length))
        assert [row["prediction"] for row in rows] == [best[0][1], best[1][1]]


def test_max_answer_length(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "fox")
    features = encode(examples, tokenizer, options(max_length=64))
    outputs = logits_of(features, {0: (0, CONTEXT.index(" Then"), 5.0)})
    (row,) = decode("squad", outputs, features, examples, options(max_answer_length=5))
    assert row["prediction"] == "The red fox ran."
    (row,) = decode("squad", outputs, features, examples, options(max_answer_length=4))
    assert row["prediction"] in ("The", "The red", "The red fox", "red fox ran.", "fox ran.", "ran.", ".")


def test_padding_and_tokens_outside_the_context_are_never_predicted(tmp_path, tokenizer):
    examples = load_one(tmp_path, qa("1"), context="The red fox")
    features = encode(examples, tokenizer, options())
    start, end = np.full((2, 1, 30), -300.0)
    start[:, :6] = end[:, :6] = 50.0  # CLS and the question
    start[:, len(features[0]["input_ids"]) :] = end[:, len(features[0]["input_ids"]) :] = -100.0
    (row,) = decode("squad", (start, end), features, examples, options())
    assert row["prediction"]
    assert all(entry["text"] in "The red fox" for entry in row["nbest"])


def test_nbest(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "fox")
    features = encode(examples, tokenizer, options(doc_stride=8))
    generator = np.random.default_rng(0)
    outputs = tuple(generator.normal(size=(2, len(features), 16)))
    for name in ("squad", "squad_v2"):
        (row,) = decode(name, outputs, features, examples, options(n_best_size=5))
        entries = row["nbest"]
        totals = [entry["start_logit"] + entry["end_logit"] for entry in entries]
        assert totals == sorted(totals, reverse=True)
        assert [entry["probability"] for entry in entries] == pytest.approx(np.exp(totals) / np.exp(totals).sum())
        assert [entry["text"] for entry in entries].count("") == (name == "squad_v2")
        assert len(entries) == 5 + (name == "squad_v2")


def test_a_span_of_two_windows_counts_once(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "fox")
    features = encode(examples, tokenizer, options(doc_stride=8))
    shared = next(
        pair for pair in features[1]["offset_mapping"] if pair in features[0]["offset_mapping"] and pair[0] > 0
    )
    outputs = logits_of(features, {0: (*shared, 3.0), 1: (*shared, 4.0)})
    (row,) = decode("squad", outputs, features, examples, options())
    assert [entry["text"] for entry in row["nbest"]].count(CONTEXT[slice(*shared)]) == 1
    assert row["nbest"][0]["start_logit"] == 4.0


def test_no_answer_has_the_lowest_score_over_the_windows(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "fox", "fox")
    features = encode(examples, tokenizer, options())
    start, end = logits_of(features, {0: (4, 11, 3.0)}, cls=8.0)
    start[0, 0] = end[0, 0] = 2.0
    rows = decode("squad_v2", (start, end), features, examples, options())
    assert [row["prediction"] for row in rows] == ["red fox", ""]
    assert rows[0]["best_non_null"] == "red fox"
    assert rows[0]["null_odds"] == pytest.approx(4.0 - 6.0)
    assert rows[1]["null_odds"] == pytest.approx(16.0 + 10.0)
    assert rows[1]["nbest"][0]["text"] == "" != rows[1]["best_non_null"]
    rows = decode("squad", (start, end), features, examples, options())
    assert rows[0]["prediction"] == "red fox" and rows[1]["prediction"]
    assert not {"null_odds", "best_non_null"} & set(rows[0])


@pytest.mark.parametrize(("threshold", "text"), [(-2.5, ""), (-2.0, "red fox"), (0.0, "red fox")])
def test_threshold_must_be_exceeded(tmp_path, tokenizer, threshold, text):
    examples = examples_of(tmp_path, "fox")
    features = encode(examples, tokenizer, options(max_length=64))
    outputs = logits_of(features, {0: (4, 11, 3.0)}, cls=2.0)
    (row,) = decode("squad_v2", outputs, features, examples, options(no_answer_threshold=threshold))
    assert (row["null_odds"], row["prediction"]) == (-2.0, text)


def test_context_without_a_token_has_no_answer(tmp_path, tokenizer):
    examples = load_one(tmp_path, qa("1", answers=[]), name="squad_v2", context="\x00")
    features = encode(examples, tokenizer, options())
    outputs = logits_of(features, {})
    (row,) = decode("squad_v2", outputs, features, examples, options())
    assert row["prediction"] == row["best_non_null"] == ""
    json.loads(json.dumps(row, allow_nan=False))
    (row,) = decode("squad", outputs, features, examples, options())
    assert row == {"id": "1", "prediction": "", "nbest": []}


def test_outputs_must_fit_the_windows(tmp_path, tokenizer):
    examples = examples_of(tmp_path, "fox", "cat")
    features = encode(examples, tokenizer, options())
    start, end = logits_of(features, {})
    with pytest.raises(ValueError, match="outputs has .* rows for .* windows"):
        decode("squad", (start[1:], end[1:]), features, examples, options())
    of_first = features.filter(lambda row: row["example_index"] == 0)
    with pytest.raises(ValueError, match="features has no window of question 'q1'"):
        decode("squad", (start[: len(of_first)], end[: len(of_first)]), of_first, examples, options())


def test_submission(tmp_path):
    nbest = [{"text": "caf\u00e9", "probability": 1.0, "start_logit": 0.5, "end_logit": 0.5}]
    rows = [
        {"id": "1", "prediction": "caf\u00e9", "null_odds": -1.5, "nbest": nbest},
        {"id": "2", "prediction": "", "null_odds": 2.0, "nbest": nbest},
    ]
    file = write_submission("squad_v2", "validation", rows, tmp_path / "new")
    assert file == tmp_path / "new" / "predictions_validation.json"
    assert file.read_text(encoding="utf-8") == '{"1": "caf\u00e9", "2": ""}\n'
    assert json.loads((tmp_path / "new" / "null_odds_validation.json").read_text()) == {"1": -1.5, "2": 2.0}
    assert json.loads((tmp_path / "new" / "nbest_predictions_validation.json").read_text()) == {"1": nbest, "2": nbest}
    write_submission("squad", "test", rows, tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {"predictions_test.json", "nbest_predictions_test.json"}
