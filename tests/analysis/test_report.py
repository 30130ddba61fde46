"""Tables of runs, as texts."""

import json
from pathlib import Path

import pytest

from sparsebert.analysis.reporting.page_charts import scores
from sparsebert.analysis.reporting.page_gains import gains
from sparsebert.analysis.reporting.repeated_runs import penalty_tables, seeds_table
from sparsebert.analysis.reporting.reports import read_metrics, report_tables
from sparsebert.analysis.tables import Table, print_tables
from sparsebert.commands import main
from sparsebert.files import write_metrics


PRETRAINED = {"search": "dam_s", "sparsity": 0.9, "positions": {"diagonal": 0.25, "offset_1": 0.75}}
PRETRAINED |= {"mlm_loss": 5.5, "mlm_accuracy": 0.125, "seconds": 60.0}
FINETUNED = {
    **{"task": "mrpc", "mask": "bigbird", "sparsity": 0.9, "input_sparsity": 0.5, "is_part": True},
    **{"train_split": "train_part9", "train_examples": 9, "main_metric": "f1", "seeds": {"0": {}, "1": {}}},
    "skipped": {"validation": "skipped 1 of 3 rows, the first: row 2"},
    "splits": {
        "validation": {
            "accuracy": {"mean": 0.7, "std": 0.01},
            "f1": {"mean": 0.8, "std": 0.02},
            "best_f1_threshold": {"mean": -1.5, "std": 0.25},
            "loss": {"mean": 1.0},
        },
        "test": {"seconds": {"mean": 1.0}},
    },
    "comparison": {"baseline": "runs/dense", "seeds": [0, 1]}
    | {"validation": {"difference": -0.011, "interval": [-0.03, 0.004]}},
    "train_seconds": 12.0,
}


def cells(table, row=0):
    return dict(zip(table.columns, table.rows[row], strict=True))


@pytest.fixture
def read(tmp_path):
    """`read(name=metrics)`: the metrics of finished runs, by their folders."""

    def make(**runs):
        for name, metrics in runs.items():
            (tmp_path / name).mkdir()
            write_metrics(tmp_path / name / "metrics.json", metrics)
        return read_metrics([tmp_path / name for name in runs])

    return make


def test_pretraining_and_finetuning_are_two_tables(read):
    pretraining, finetuning = report_tables(read(model=PRETRAINED, tuned=FINETUNED))
    assert cells(pretraining) == {
        "run": "model", "removed": "90.0 %", "P diag.": "0.25", "P 1": "0.75",
        "MLM loss": "5.500", "MLM acc.": "12.5 %", "seconds": "60",
    }  # fmt: skip
    assert cells(finetuning) == {
        "run": "tuned", "task": "mrpc*", "split": "validation", "mask": "bigbird", "removed": "90.0 %",
        "on inputs": "50.0 %", "metric": "f1", "score": "80.0 ± 2.0", "seeds": "2", "train s": "12",
        "others": "accuracy 70.0 ± 1.0, best_f1_threshold -1.5 ± 0.2", "difference [95 %]": "-1.1 [-3.0, +0.4]",
    }  # fmt: skip
    assert finetuning.notes[1:] == (
        "* tuned: trained on a part, 9 examples of train_part9",
        "tuned, validation: skipped 1 of 3 rows, the first: row 2",
        "tuned: difference from runs/dense, paired by example and seed (0, 1)",
    )


def test_searches_in_trained_models_are_compared(read):
    numbers = {"cosine": 0.94, "score": 0.84, "input_sparsity": 0.7}
    learned = {"model": "m", "mask": None, "search": "dam_s", "task": "stsb", "seconds": {"total": 60.0}}
    learned |= {"sparsity": {"dense": 0.0, "learned": 0.9}, "inference_seconds": {"dense": 3.0, "masked": 2.0}}
    learned["agreement"] = {"dense": {"cosine": 1.0, "score": 0.86}, "learned": numbers}
    learned["agreement"]["learned, recovered"] = numbers | {"cosine": 0.98, "score": 0.85}
    given = {"model": "m", "mask": "window", "search": None, "task": None, "seconds": {"total": 9.0}}
    given |= {"inference_seconds": None}
    given |= {"sparsity": {"dense": 0.0, "given": 0.92}, "agreement": {"given": {"cosine": 0.9}}}
    found = read(learned=learned, given=given)
    (table,) = report_tables(found)
    assert cells(table) == {
        "run": "learned", "mask": "dam_s", "task": "stsb", "removed": "90.0 %", "on inputs": "70.0 %",
        "cosine": "0.940", "cosine, recovered": "0.980", "score, dense": "86.0", "score": "84.0",
        "score, recovered": "85.0", "speed-up": "1.50", "seconds": "60",
    }  # fmt: skip
    other = {name: value for name, value in cells(table, 1).items() if value}
    assert other == {"run": "given", "mask": "window", "removed": "92.0 %", "cosine": "0.900", "seconds": "9"}
    assert [text.split(":")[0] for text in table.notes[0].split("; ")] == ["cosine", "score", "speed-up"]
    (alone,) = report_tables({path: run for path, run in found.items() if path.name == "given"})
    assert alone.notes[0].startswith("cosine: ") and ";" not in alone.notes[0]
    charted = scores({path.name: run for path, run in found.items()})["m: cosine with the dense model"]
    assert [score.value for score in charted] == [1.0, 0.94, 0.98, 0.9]


@pytest.mark.parametrize("change", [{"sparsity": None}, {"mlm_loss": "low"}, {"seconds": 10**400}])
def test_damaged_metrics_are_refused(read, change):
    with pytest.raises(ValueError, match="damaged"):
        scores({path.name: metrics for path, metrics in read(run=PRETRAINED | change).items()})


@pytest.mark.parametrize("metric", [None, 5, ["f1"], {}])
def test_a_main_metric_that_is_no_name(read, metric):
    grid = {"best": {"lr": 1.0}, "cells": [{"settings": {"lr": 1.0}, "score": 0.5}]}
    with pytest.raises(ValueError, match="metrics.json: damaged"):
        read(run=FINETUNED | {"main_metric": metric, "sweep": grid})


def test_runs_without_what_a_page_compares(read):
    runs = read(run=FINETUNED | {"comparison": {"baseline": "b", "seeds": [1], "validation": None}})
    runs |= read(
        glue={"glue": {}, "missing": {}, "average_9": 0.5, "num_columns_9": 1, "average_8": 0.5, "num_columns_8": 1}
    )
    named = {path.name: metrics for path, metrics in runs.items()}
    assert gains(named)[0].startswith("run: ") and gains(named)[1] == "glue: no score."


def test_control_characters_in_names_are_not_printed(read, tmp_path, capsys):
    evil = "\x1b[31mf1\x9b"
    values = {**FINETUNED["splits"]["validation"], evil: {"mean": 0.5}}
    grid = {"best": {evil: 1.0}, "cells": [{"settings": {evil: 1.0}, "score": 0.5}]}
    read(run=FINETUNED | {"main_metric": evil, "splits": {"validation": values}, "sweep": grid})
    (tmp_path / "run" / f"{evil}.png").write_bytes(b"")
    assert main(["report", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "f1" in out and "picture: " in out and not {"\x1b", "\x9b"} & set(out)


def test_map_and_mixers_are_named_where_they_are_not_plain_attention(read):
    plain = {"probability_map": "softmax", "token_mixers": None}
    other = {"probability_map": "topk", "token_mixers": ["sepconv", "sepconv", "attention"]}
    (table,) = report_tables(read(plain=PRETRAINED | plain, other=PRETRAINED | other))
    found = [(row["map"], row["mixers"]) for row in (cells(table, 0), cells(table, 1))]
    assert found == [("", ""), ("topk", "2 sepconv, 1 attention")]


def test_runs_are_called_by_what_tells_them_apart(read, tmp_path, monkeypatch):
    (found,) = read(model=PRETRAINED).values()
    (table,) = report_tables({Path("a/dense"): found, Path("b/dense"): found})
    assert {row[0] for row in table.rows} == {"a/dense", "b/dense"}
    monkeypatch.chdir(tmp_path / "model")
    (table,) = report_tables(read_metrics(["."]))
    assert table.rows[0][0] == "model"
    with pytest.raises(FileNotFoundError, match="metrics.json: no such file"):
        read_metrics([tmp_path])


def test_tables_as_markdown_and_json():
    table = Table.of("Title", [{"run": "a", "x": "1", "empty": ""}, {"run": "b", "y": "2"}], ["note"])
    assert table.markdown() == (
        "**Title**\n\n| run | x | y |\n| --- | --- | --- |\n| a | 1 |  |\n| b |  | 2 |\n\nnote\n"
    )
    rows = [{"run": "a", "x": "1", "y": ""}, {"run": "b", "x": "", "y": "2"}]
    assert table.as_json() == {"title": "Title", "rows": rows, "notes": ["note"]}
    # Names that look like Markdown.
    table = Table("<b>", ["run"], [["a|b <img src=x>"], ["c\nd"]], ("R&D <i> | x",))
    assert table.markdown() == (
        "**&lt;b>**\n\n| run |\n| --- |\n| a\\|b &lt;img src=x> |\n| c d |\n\nR&amp;D &lt;i> \\| x\n"
    )


def test_means_over_seeds(read, tmp_path, capsys):
    losses = {"a": 3.0, "b": 3.2, "c": 3.4}
    read(**{name: PRETRAINED | {"mlm_loss": loss} for name, loss in losses.items()}, tuned=FINETUNED)
    words = ["report", "--seeds", "--runs", *(str(tmp_path / name) for name in losses)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Mean of 3 runs" in out and "[2.703, 3.697]" in out  # 3.2 +- 4.303 * 0.2 / sqrt(3)
    for others in (["a"], ["a", "tuned"]):
        assert main(["report", "--seeds", "--runs", *(str(tmp_path / name) for name in others)]) == 2
        assert "--seeds needs two or more" in capsys.readouterr().err


def with_recipe(folder, seed, **model):
    """Write the state of a training with this seed and these fields of the model."""
    recipe = {
        "model": {"search": "dam_s", "target_sparsity": None} | model,
        "training": {"seed": seed, "max_steps": 9},
    }
    state = {"stateful_callbacks": {"RecipeRecord": {"args": {"recipe": recipe}}}}
    (folder / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("seed", "fields", "metrics", "said"),
    [
        (1, {"share_layers": True}, {}, "model.share_layers is True, but False in"),
        (0, {"share_layers": False}, {}, "seed 0 is also that of"),
        (None, {}, {"search": "dam_u"}, "search is 'dam_u', but 'dam_s' in"),
        (1, {"share_layers": False}, {"mlm_loss": 4.0}, None),
    ],
)
def test_runs_of_several_recipes_are_not_averaged(read, tmp_path, seed, fields, metrics, said):
    runs = read(a=PRETRAINED, b=PRETRAINED | metrics)
    if seed is not None:
        with_recipe(tmp_path / "a", 0, share_layers=False)
        with_recipe(tmp_path / "b", seed, **fields)
    if said is None:
        assert cells(seeds_table(runs), 1)["mean"] == "4.75"
        return
    with pytest.raises(ValueError, match=said):
        seeds_table(runs)


def test_lambdas_are_compared(read, tmp_path, capsys):
    runs = {"a": (0, 1e-4, 0.5, 5.0), "b": (1, 1e-4, 0.6, 5.2), "c": (0, 1e-2, 0.9, 6.0), "d": (0, None, 0.8, 5.0)}
    read(**{name: PRETRAINED | {"sparsity": run[2], "mlm_loss": run[3]} for name, run in runs.items()})
    for name, (seed, penalty, *_) in runs.items():
        target = {"target_sparsity": 0.8} if penalty is None else {}
        with_recipe(tmp_path / name, seed, **target, sparsity_weight=penalty or 1e-3)
    assert main(["report", *(str(tmp_path / name) for name in runs), "--format", "csv"]) == 0
    *_, table = capsys.readouterr().out.rstrip().split("\n\n")
    assert table.splitlines() == [
        "lambda,runs,sparsity,mlm_loss,mlm_accuracy",
        "0.0001,2,55 ± 7.1 %,5.1 ± 0.14,0.125 ± 0",
        "0.01,1,90 %,6,0.125",
    ]
    assert penalty_tables(read_metrics([tmp_path / "a", tmp_path / "b"])) == []


def test_tables_for_papers(read, tmp_path, capsys):
    table = Table("R&D", ["run_1", "x"], [["a,b", "50 % ± 1"], ["\\c", "{^}"]], ("n < 2",))
    assert table.csv() == 'run_1,x\n"a,b",50 % ± 1\n\\c,{^}\n'
    assert table.latex().splitlines() == [
        r"\begin{table}",
        r"\caption{R\&D}",
        r"\begin{tabular}{ll}",
        r"\toprule",
        r"run\_1 & x \\",
        r"\midrule",
        r"a,b & 50 \% $\pm$ 1 \\",
        r"\textbackslash{}c & \{\textasciicircum{}\} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par n $<$ 2",
        r"\end{table}",
    ]
    read(model=PRETRAINED)
    for form, begin in (("latex", r"\begin{table}"), ("csv", "run,"), ("markdown", "**Pre-training**")):
        assert main(["report", str(tmp_path / "model"), "--format", form]) == 0
        assert capsys.readouterr().out.startswith(begin)
    assert main(["report", str(tmp_path / "model"), "--format", "html"]) == 2


def test_tables_are_printed_as_text(read, capsys):
    """Neither markup nor a terminal's control characters are obeyed."""
    print_tables(report_tables(read(model=PRETRAINED, tuned=FINETUNED)))
    printed = capsys.readouterr().out
    assert "Pre-training" in printed and "80.0 ± 2.0" in printed and "difference from runs/dense" in printed
    print_tables([Table("Runs in [exp]", ["run"], [["[lr_1]/x :smile:"], ["[/usr] bad"]], ("from [a]",))])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Runs in [exp]", "[lr_1]/x :smile:", "[/usr] bad", "from [a]"))
    table = Table.of("Title", [{"run": "\x1b[31mred\x1b]0;title\x07"}], ["a\x1bb"])
    assert table.rows == [["\ufffd[31mred\ufffd]0;title\ufffd"]] and table.notes == ("a\ufffdb",)
