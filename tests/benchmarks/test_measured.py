"""The measured tables of the pages are those of the committed results."""

import itertools
import json
import re
from statistics import fmean

import pytest

from benchmarks.attention import auto_slower
from benchmarks.measured import BLOCK, NOT_RUN, TABLES, main, pages, reproduced, written
from benchmarks.shared import cpu_tables
from benchmarks.shared.report import RESULTS, ROOT
from studies.claims import REPRODUCED
from studies.experiments import EXPERIMENTS
from studies.harness.result_tables import experiment_tables
from studies.harness.seed_comparisons import holm, paired_difference


def _words(page):
    """The text of a page, without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


def _cells(path):
    return json.loads(path.read_text())["cells"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert written(text) == text, "run python -m benchmarks.measured"


def test_every_table_is_shown():
    shown = {match["name"] for page in pages() for match in BLOCK.finditer(page.read_text())}
    not_run = {f"reproduce.{name}" for name in EXPERIMENTS if not (REPRODUCED / f"{name}_tiny.json").is_file()}
    assert shown == TABLES.keys() - not_run


@pytest.mark.parametrize("page", pages(), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_deviations_and_intervals_stand_in_measured_tables(page):
    text = re.sub(r"^```.*?^```$", "", BLOCK.sub("", page.read_text()), flags=re.M | re.S)
    assert not re.findall(r".*\d ± ?\d.*|.*\d \[[+-]?\d.*", text)


def test_a_changed_number_is_found():
    text = next(page.read_text() for page in pages() if page.name == "distributed.md")
    assert "| DDP | 5e-07 |" in text
    changed = text.replace("| DDP | 5e-07 |", "| DDP | 4e-07 |", 1)
    assert written(changed) == text != changed
    assert main(["--check"]) == 0


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match=r"no measured table 'speed'; there are kernels\.attention"):
        written("<!-- measured speed -->\n<!-- end -->")


def test_what_was_not_run_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(TABLES, "reproduce.minilm", lambda: reproduced("minilm", tmp_path))
    page = "<!-- measured reproduce.minilm -->\nold\n<!-- end -->\n"
    assert written(page) == page.replace("old\n", NOT_RUN)


@pytest.mark.parametrize(
    "path", sorted([*REPRODUCED.glob("*.json"), *REPRODUCED.glob("*/*.json")]), ids=lambda path: path.stem
)
def test_reports_are_those_of_the_results(path):
    found = json.loads(path.read_text())
    tables = experiment_tables(EXPERIMENTS[found["experiment"]], found["scale"], found["cells"])
    assert path.with_suffix(".md").read_text() == "\n".join(table.markdown() for table in tables)


def test_what_the_front_page_says_of_training():
    ratio = cpu_tables.models({"BERT-base": json.loads((RESULTS / "model_cpu.json").read_text())}).rows[-1][-1]
    assert f"is {float(ratio.partition(' ')[0]):.1f} times as fast" in _words("docs/results.md")


def test_what_the_results_say_of_reviews():
    cells = _cells(REPRODUCED / "review_embeddings_tiny.json").values()
    scores = {cell["settings"]["system"]: [100 * score for score in cell["metrics"]["scores"]] for cell in cells}
    text = _words("docs/results.md")
    pairs = [(f"dam_s_512_long, {way}", f"window_512_long, {way}") for way in ("split", "whole")]
    pairs += [(f"{name}, split", f"{name}, whole") for name in ("dam_s_512_long", "window_512_long", "dense")]
    for ours, theirs in pairs:
        said = "{difference:+.1f} points [{low:+.1f}, {high:+.1f}]".format(
            **paired_difference(scores[ours], scores[theirs])
        )
        assert said in text, (ours, theirs)


def test_what_the_results_say_of_long_texts_at_base_size():
    text = _words("docs/results.md")
    documents, reviews = (
        {name: cell["metrics"] for name, cell in _cells(REPRODUCED / f"mpnet/{study}_embeddings_tiny.json").items()}
        for study in ("document", "review")
    )
    whole, split = (f"mpnet_dam_s_512_long_{way}_1024_bfloat16" for way in ("whole", "split"))
    milliseconds = {name: metrics["cpu_ms"] for name, metrics in documents.items()}
    assert milliseconds[whole] < milliseconds["dense_truncated_512_bfloat16"]
    more = [milliseconds[f"dense_{way}_1024_bfloat16"] / milliseconds[whole] for way in ("whole", "split")]
    assert "takes {:.1f} times as long on whole texts and {:.1f} times on split ones".format(*more) in text
    dense, others = reviews["dense_truncated_512_bfloat16"], reviews["dense_split_1024_bfloat16"]
    assert f"which take {dense['cpu_ms'] / reviews[split]['cpu_ms']:.0%}".replace("%", " %") in text
    assert f"which takes {others['cpu_ms'] / reviews[split]['cpu_ms']:.1f} times the time" in text
    assert 5 * paired_difference(reviews[split]["scores"], dense["scores"])["p"] < 0.001 and "(P < 0.001)" in text
    cells = _cells(REPRODUCED / "mpnet/minilm_tiny.json")
    close = [cells[f"dam_s_{length}_0.9_seed_0"]["metrics"]["cosine"] for length in (128, 512)]
    assert "it is {:.3f} and {:.3f} (one seed)".format(*close) in text
    (speed,) = (cell["speed_up"] for cell in _cells(RESULTS / "encoders_mpnet_cpu.json") if cell["n"] == 512)
    best, limit = (f"{speed[name]['ratio']:.2f}" for name in ("best", "limit"))
    assert f"it is [{best}](kernels.md#cheaper-linear-layers), and would be {limit} if" in text


def test_what_the_results_say_of_one_stage_and_dense_attention():
    stages, dense = (_cells(REPRODUCED / "float32" / f"sparsebert_{name}_tiny.json") for name in ("figure7", "table3"))
    seeds = (1, 2, 3)
    losses = [dense[f"dense_seed_{seed}"]["metrics"]["mlm_loss"] for seed in seeds]
    tests = [
        paired_difference([stages[f"one_stage_{target}_seed_{seed}"]["metrics"]["mlm_loss"] for seed in seeds], losses)
        for target in (0.1, 0.3, 0.5, 0.7)
    ]
    more = [f"{test['difference']:.3f}" for test in tests]
    text = _words("docs/results.md")
    assert f"({fmean(losses):.3f} in float32, in the table above)" in text
    assert "by {} with 10 % removed, {} with 30 %, {} with 50 % and {} with 70 %".format(*more) in text
    assert f"P at most {max(holm([test['p'] for test in tests])):.3f}" in text


def test_what_the_results_say_of_a_longer_recovery():
    short, long = (_cells(REPRODUCED / folder / "minilm_task_masks_tiny.json") for folder in (".", "longer_recovery"))
    names = [f"qnli_seed_{seed}" for seed in (1, 2, 3)]
    assert sorted(long) == names
    for name in names:  # the same models and masks
        assert {"score_dense", "score_learned", "removed_learned"} <= {
            key for key, value in long[name]["metrics"].items() if value == short[name]["metrics"].get(key)
        }
        assert short[name]["settings"] | {"recover": 1200, "controls": []} == long[name]["settings"]
    dense, shorter, longer = (
        [100 * cells[name]["metrics"][f"score_{score}"] for name in names]
        for cells, score in ((long, "dense"), (short, "learned_recovered"), (long, "learned_recovered"))
    )
    less, more = paired_difference(dense, longer), paired_difference(longer, shorter)
    text = _words("docs/results.md")
    said = "the accuracy is {:.1f}, {difference:.1f} points below that of the dense model [{low:.1f}, {high:.1f}]"
    assert said.format(fmean(longer), **less) in text
    said = "{difference:.1f} points above that of the shorter recovery [{low:.1f}, {high:.1f}]"
    assert said.format(**more) in text
    assert "P = {:.2g} and {:.2g}".format(*holm([less["p"], more["p"]])) in text


def test_what_the_pages_say_of_the_tables():
    assert not any(auto_slower(cell) for cell in _cells(RESULTS / "attention_cpu.json"))  # kernels.md


def test_what_the_front_page_says_of_quality():
    cells = _cells(REPRODUCED / "minilm_tiny.json")

    def means(mask, metric, form, lengths=(128, 512, 1024)):
        found = (fmean(cells[f"{mask}_{n}_0.9_seed_{i}"]["metrics"][metric] for i in range(3)) for n in lengths)
        return [form.format(value) for value in found]

    before, after = (means("dam_s", metric, "{:.3f}") for metric in ("cosine_before", "cosine"))
    text = _words("docs/results.md")
    assert "With 128, 512 and 1024 tokens it is {}, {} and {}.".format(*before) in text
    assert "raises it to {}, {} and {}.".format(*after) in text
    assert "it reaches {}, {} and {}".format(*means("attention", "cosine", "{:.3f}")) in text
    scores = [means(mask, "spearman", "{:.1%}", (128,))[0].rstrip("%") for mask in ("dam_s", "attention")]
    assert "the learned mask has {}, that other mask {}.".format(*scores) in text
    cells = _cells(REPRODUCED / "rest/minilm_tiny.json")
    found = [means(mask, "cosine", "{:.3f}", (128, 512)) for mask in ("dam_s", "attention", "window")]
    said = "{} and {} at 128 and 512 tokens, the dense model's attention {} and {}, a window {} and {} ([three seeds]"
    assert said.format(*itertools.chain(*found)) in text
    assert f"STS-B stays at {means('dam_s', 'spearman', '{:.1%}', (128,))[0].rstrip('%')}" in text
    cells = _cells(REPRODUCED / "lower_rate/minilm_tiny.json")
    found = [means("dam_s", metric, "{:.3f}") for metric in ("cosine_before", "cosine")]
    said = "reaches {}, {} and {} at 128, 512 and 1024 tokens without any recovery, and {}, {} and {} with it"
    assert said.format(*itertools.chain(*found)) in text


def test_what_the_front_page_says_of_tasks():
    short, long = (_cells(REPRODUCED / folder / "minilm_task_masks_tiny.json") for folder in (".", "longer_recovery"))
    names, seeds = ("cola", "sst2", "mrpc", "stsb", "rte", "qnli"), (1, 2, 3)
    masked, dense = (
        [fmean(100 * short[f"{name}_seed_{seed}"]["metrics"][f"score_{score}"] for name in names) for seed in seeds]
        for score in ("learned_recovered", "dense")
    )
    test = paired_difference(masked, dense)
    text = _words("docs/results.md")
    front = "lose {:.1f} points in the mean (95 % interval {:.1f} to {:.1f})"
    assert front.format(-test["difference"], -test["high"], -test["low"]) in _words("README.md")
    said = "is {:.1f}, dense {:.1f} (three seeds; interval [{low:.1f}, {high:.1f}], P = {p:.2f},"
    assert said.format(fmean(masked), fmean(dense), **test) in text
    rested = _cells(REPRODUCED / "rest" / "minilm_task_masks_tiny.json")
    whole = [seed for seed in seeds if all(f"{name}_seed_{seed}" in rested for name in names)]
    ours, theirs = (
        [fmean(100 * rested[f"{name}_seed_{seed}"]["metrics"][f"score_{score}"] for name in names) for seed in whole]
        for score in ("learned_recovered", "dense")
    )
    test, number = paired_difference(ours, theirs), ("one", "two", "three")[len(whole) - 1]
    said = "is {:.1f}, dense {:.1f} ({} seeds; interval [{low:.1f}, {high:.1f}])"
    assert said.format(fmean(ours), fmean(theirs), number, **test) in text
    front = "with one](docs/results.md#tasks-through-the-mask) {:.1f} ({} seeds, interval {:.1f} to {:.1f})"
    assert front.format(-test["difference"], number, -test["high"], -test["low"]) in _words("README.md")
    longer, shorter, before = (
        [100 * cells[f"qnli_seed_{seed}"]["metrics"][f"score_{score}"] for seed in seeds]
        for cells, score in ((long, "learned_recovered"), (short, "learned_recovered"), (long, "dense"))
    )
    less, more = paired_difference(before, longer), paired_difference(longer, shorter)
    p = holm([less["p"], more["p"]])[0]
    said = "narrows the loss on QNLI to {difference:.1f} points [{low:.1f}, {high:.1f}] (P = {holm:.2f})"
    assert said.format(holm=p, **less) in text


def test_what_the_front_page_says_of_pretraining():
    cells = _cells(RESULTS / "pretrain_cpu.json")
    (ratios,) = [
        cell["speed_up"]["stock"]
        for cell in cells
        if (cell["size"], cell["n"]) == ("base", 2048) and "stock" in cell["speed_up"]
    ]
    said = "is {:.1f} times as fast as stock BERT's, {:.1f} times without a mask"
    assert said.format(ratios["frozen"]["ratio"], ratios["dense"]["ratio"]) in _words("docs/results.md")


def test_what_the_results_say_of_questions():
    def lost(name, mask):
        found = json.loads((RESULTS / f"questions/{name}.json").read_text())["agreement"]
        return 100 * (found["dense"]["score"] - found[mask]["score"])

    masks = ("learned", "learned, recovered")
    numbers = [lost(name, mask) for name in ("learned_384", "learned_512") for mask in masks]
    said = "at the length of the fine-tuning, 384 tokens, and by {1:.1f} after recovery; at 512 tokens by {2:.1f} and"
    text = _words("docs/results.md")
    assert f"Its F1 falls by {numbers[0]:.1f} points through a mask" in text
    assert f"{said} {{3:.1f}}.".format(*numbers) in text
    others = [lost(name, "given, recovered") for name in ("minilm-l6-512-90", "window")]
    assert min(others) > 2 * numbers[3]
    front = "[falls by {:.1f} points](docs/results.md#answering-questions) then, and through a mask from other text by"
    assert f"{front} {{:.0f}};".format(numbers[3], others[0]) in _words("README.md")
