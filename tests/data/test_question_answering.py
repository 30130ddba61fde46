import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from conftest import tokenizer_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertTokenizerFast, ByT5Tokenizer, PreTrainedTokenizerFast

from sparsebert.data.tasks.question_answering import decode, encode
from sparsebert.data.tasks.squad_metrics import metrics


CONTEXT = "The red fox ran. Then a blue cat, which was old, slept near the warm river; nobody saw the old dog."
FIELDS = {"max_length": 16, "doc_stride": 4, "max_question_length": 4}
FIELDS |= {"n_best_size": 20, "max_answer_length": 8, "no_answer_threshold": 0.0}


@pytest.fixture(scope="module")
def tokenizer():
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the red fox ran then a blue cat which was old slept near warm river nobody"
    words += " saw dog . , ; ? who where did it ri ##ver ##s"
    return tokenizer_of(words.split())


def options(**fields):
    return SimpleNamespace(**FIELDS | fields)


def examples_of(*answers, questions=(), context=CONTEXT):
    """Questions `q0`, `q1`, ... with these answers, `""` for none."""
    rows = [
        {
            "id": f"q{index}",
            "question": questions[index] if questions else "Who ran?",
            "context": context,
            "answers": [{"text": text, "answer_start": context.index(text)}] if text else [],
        }
        for index, text in enumerate(answers)
    ]
    text, number = datasets.Value("string"), datasets.Value("int32")
    columns = {"id": text, "question": text, "context": text, "answers": [{"text": text, "answer_start": number}]}
    return datasets.Dataset.from_list(rows, features=datasets.Features(columns))


@pytest.fixture(scope="module")
def windows_of(tokenizer):
    """`windows_of(*answers, **fields)`: questions with these answers, and their windows with these options."""

    def make(*answers, context=CONTEXT, **fields):
        examples = examples_of(*answers, context=context)
        return examples, encode(examples, tokenizer, options(**fields))

    return make


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


def test_windows_cover_the_context_and_overlap(windows_of, tokenizer):
    examples, features = windows_of("red fox")
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
def test_labels_point_at_the_answer(tokenizer, text):
    examples = examples_of(text, "")
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


def test_answer_over_the_border_of_a_window_is_labeled_in_the_other(tokenizer):
    first = encode(examples_of("red fox"), tokenizer, options())[0]["offset_mapping"][-2]
    text = CONTEXT[first[0] : CONTEXT.index("which was") + len("which was")]
    features = encode(examples_of(text), tokenizer, options())
    positions = [(row["start_positions"], row["end_positions"]) for row in features]
    assert positions[0] == (0, 0)
    assert positions[1][0] > 0


def test_answer_inside_a_token_takes_the_whole_token(tokenizer):
    (row,) = encode(examples_of("ox"), tokenizer, options(max_length=64))
    assert row["offset_mapping"][row["start_positions"]] == [8, 11]
    assert row["start_positions"] == row["end_positions"]


def test_questions_are_stripped_and_cut(tokenizer):
    examples = examples_of("", "", questions=["   who saw \n", "where did it ran rivers near the old dog"])
    rows = encode(examples, tokenizer, options(max_length=64, max_question_length=5))
    texts = [tokenizer.decode(row["input_ids"]).split(" [SEP]")[0] for row in rows]
    assert texts == ["[CLS] who saw", "[CLS] where did it ran river"]


def test_indices_go_on_over_batches_of_encoding(windows_of):
    examples, features = windows_of(*["fox"] * 1001, context="The red fox")
    assert features["example_index"][:] == list(range(1001))


def test_max_length_must_leave_room(tokenizer):
    assert len(encode(examples_of("fox"), tokenizer, options(max_length=12))) > 5
    with pytest.raises(ValueError, match=r"max_length must be greater than .*, got 11 <= 4 \+ 3 \+ 4"):
        encode(examples_of("fox"), tokenizer, options(max_length=11))


def test_tokenizers_that_do_not_fit(tokenizer):
    examples = examples_of("fox")
    without_cls = Tokenizer(WordLevel({"fox": 0, "[UNK]": 1, "[CLS]": 2}, unk_token="[UNK]"))
    for bad, message in (
        (ByT5Tokenizer(), "tokenizer must be a fast one, .* got ByT5Tokenizer"),
        (PreTrainedTokenizerFast(tokenizer_object=without_cls), "tokenizer must begin its texts with a CLS token"),
        (PreTrainedTokenizerFast(tokenizer_object=without_cls, cls_token="[CLS]"), "must begin its texts with a CLS"),
        (BertTokenizerFast(vocab=tokenizer.get_vocab(), padding_side="left"), "must be 'right', got 'left'"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(examples, bad, options())


def test_examples_without_answers_have_no_labels(tokenizer):
    examples = examples_of("").remove_columns("answers")
    features = encode(examples, tokenizer, options())
    assert "start_positions" not in features.column_names
    (row,) = decode("squad", logits_of(features, {0: (4, 11, 5.0)}), features, examples, options())
    assert row["prediction"] == "red fox"


@pytest.mark.parametrize("text", ["red fox", "blue cat", "slept near", "the old dog."])
def test_decode_finds_the_text_in_whichever_window(tokenizer, text):
    examples = examples_of("fox", text, "cat")
    begin = CONTEXT.index(text)
    features = encode(examples, tokenizer, options())
    window = next(
        index
        for index, row in enumerate(features)
        if row["example_index"] == 1 and {begin, begin + len(text)} <= set(sum(row["offset_mapping"], []))
    )
    outputs = logits_of(features, {window: (begin, begin + len(text), 9.0)})
    for name in ("squad", "squad_v2"):
        rows = decode(name, outputs, features, examples, options())
        assert [row["id"] for row in rows] == ["q0", "q1", "q2"]
        best = rows[1]["nbest"][0]
        assert rows[1]["prediction"] == best["text"] == text and best["probability"] > 0.99
        assert best["start_logit"] == best["end_logit"] == 9.0


def test_one_hot_labels_decode_to_the_answers(windows_of):
    texts = ["The red fox ran.", "", "cat", "near the warm river", "dog"]
    examples, features = windows_of(*texts, doc_stride=8)
    start, end = (np.zeros((len(features), 16)) for _ in range(2))
    start[np.arange(len(features)), features["start_positions"][:]] = 10.0
    end[np.arange(len(features)), features["end_positions"][:]] = 10.0
    predictions = [row["prediction"] for row in decode("squad_v2", (start, end), features, examples, options())]
    assert predictions == texts
    assert metrics("squad_v2", predictions, examples["answers"][:])["exact_match"] == 1.0


def test_decode_agrees_with_trying_all_spans(windows_of):
    examples, features = windows_of("fox", "cat")
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


def test_max_answer_length(windows_of):
    examples, features = windows_of("fox", max_length=64)
    outputs = logits_of(features, {0: (0, CONTEXT.index(" Then"), 5.0)})
    (row,) = decode("squad", outputs, features, examples, options(max_answer_length=5))
    assert row["prediction"] == "The red fox ran."
    (row,) = decode("squad", outputs, features, examples, options(max_answer_length=4))
    assert row["prediction"] in ("The", "The red", "The red fox", "red fox ran.", "fox ran.", "ran.", ".")


def test_padding_and_tokens_outside_the_context_are_never_predicted(windows_of):
    examples, features = windows_of("", context="The red fox")
    start, end = np.full((2, 1, 30), -300.0)
    start[:, :6] = end[:, :6] = 50.0  # CLS and the question
    start[:, len(features[0]["input_ids"]) :] = end[:, len(features[0]["input_ids"]) :] = -100.0
    (row,) = decode("squad", (start, end), features, examples, options())
    assert row["prediction"]
    assert all(entry["text"] in "The red fox" for entry in row["nbest"])


def test_nbest(windows_of):
    examples, features = windows_of("fox", doc_stride=8)
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


def test_a_span_of_two_windows_counts_once(windows_of):
    examples, features = windows_of("fox", doc_stride=8)
    first, second = features["offset_mapping"][:2]
    shared = next(pair for pair in second if pair in first and pair[0] > 0)
    outputs = logits_of(features, {0: (*shared, 3.0), 1: (*shared, 4.0)})
    (row,) = decode("squad", outputs, features, examples, options())
    assert [entry["text"] for entry in row["nbest"]].count(CONTEXT[slice(*shared)]) == 1
    assert row["nbest"][0]["start_logit"] == 4.0


def test_no_answer_has_the_lowest_score_over_the_windows(windows_of):
    examples, features = windows_of("fox", "fox")
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
def test_threshold_must_be_exceeded(windows_of, threshold, text):
    examples, features = windows_of("fox", max_length=64)
    outputs = logits_of(features, {0: (4, 11, 3.0)}, cls=2.0)
    (row,) = decode("squad_v2", outputs, features, examples, options(no_answer_threshold=threshold))
    assert (row["null_odds"], row["prediction"]) == (-2.0, text)


def test_context_without_a_token_has_no_answer(windows_of):
    examples, features = windows_of("", context="\x00")
    outputs = logits_of(features, {})
    (row,) = decode("squad_v2", outputs, features, examples, options())
    assert row["prediction"] == row["best_non_null"] == ""
    json.loads(json.dumps(row, allow_nan=False))
    (row,) = decode("squad", outputs, features, examples, options())
    assert row == {"id": "q0", "prediction": "", "nbest": []}


def test_outputs_must_fit_the_windows(windows_of):
    examples, features = windows_of("fox", "cat")
    start, end = logits_of(features, {})
    with pytest.raises(ValueError, match="outputs has .* rows for .* windows"):
        decode("squad", (start[1:], end[1:]), features, examples, options())
    of_first = features.filter(lambda row: row["example_index"] == 0)
    with pytest.raises(ValueError, match="features has no window of question 'q1'"):
        decode("squad", (start[: len(of_first)], end[: len(of_first)]), of_first, examples, options())
