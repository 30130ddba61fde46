"""What cells share, where they start, and what they measure: the parts of experiments, on tiny models."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from study_inputs import finished, rows_by
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
)
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from sparsebert import SparseMask, attach
from sparsebert.analysis.reporting.reports import RECOVERED, own_mask
from sparsebert.analysis.saved_runs import read_run
from sparsebert.data.documents import in_split
from sparsebert.data.tasks import TASKS
from sparsebert.masks.matched import matched_pattern
from sparsebert.masks.patterns import build_pattern
from sparsebert.models.lengthening import METHODS
from sparsebert.training.pruning.pruned_masks import prune_by_probs, random_control
from sparsebert.training.trainer import SparseBertTrainer
from studies.experiments import EXPERIMENTS
from studies.harness.comparisons import by_seed, with_task_mean
from studies.long_texts import long_embeddings, needles, positions
from studies.long_texts.review_classifiers import classify
from studies.shared.sentence_similarity import embed, similarity
from studies.shared.task_parts import find_splits, write_parts
from studies.sparsebert_paper.sparsebert_table3 import SHOWN, window_losses
from studies.trained_models import offsets, separators
from studies.trained_models.minilm import TILED


pytestmark = pytest.mark.usefixtures("without_matplotlib")


# A checkpoint that several systems go on from


@pytest.mark.slow
def test_systems_of_a_seed_go_on_from_one_checkpoint_with_the_same_batches(run_cells, tmp_path, monkeypatch):
    seen, step = {}, SparseBertTrainer.training_step

    def record(self, model, batch, *args, **kwargs):
        folder = self.args.output_dir.rpartition("/")[2]
        seen.setdefault(folder, []).append(torch.cat([batch["input_ids"], batch["labels"]]))
        return step(self, model, batch, *args, **kwargs)

    monkeypatch.setattr(SparseBertTrainer, "training_step", record)
    only = ["dense_seed_1", "dam_u_lambda_0.001_seed_1", "dense_seed_2"]
    _, cells = run_cells("sparsebert_table3", only, seeds=[1, 2])
    one, other, another_seed = (torch.stack(seen[name]) for name in only if name in seen)
    assert torch.equal(one, other) and not torch.equal(one, another_seed)
    (metrics,) = tmp_path.glob("runs/checkpoint_*/metrics.json")
    first = cells["dense_seed_1"]["metrics"]
    assert 0 < first["shared_seconds"] < first["seconds"]
    # As if it had been killed at the end; the cell that goes on with it trains for longer.
    weights = metrics.with_name("model.safetensors").read_bytes()
    metrics.unlink()
    run_cells("sparsebert_table1", "no_diag_seed_1", seeds=[1], max_steps=3)
    assert metrics.is_file() and metrics.with_name("model.safetensors").read_bytes() == weights
    # Other settings of its own make it another.
    run_cells("sparsebert_table1", "dense_seed_1", seeds=[1], max_steps=3, checkpoint_learning_rate=1e-3)
    assert len(list(tmp_path.glob("runs/checkpoint_*/metrics.json"))) == 2


@pytest.mark.slow
def test_masks_of_a_seed_come_from_one_soft_search(run_cells, tmp_path):
    found, folder = {}, tmp_path / "runs/sparsebert_figure7_tiny"
    for seed, only in {1: ["two_stage_0.3_seed_1", "random_0.7_seed_1"], 2: ["random_0.7_seed_2"]}.items():
        _, cells = run_cells("sparsebert_figure7", only, sparsities=[0.3, 0.7], seeds=[1, 2])
        (found[seed],) = set(folder.glob("soft_*/metrics.json")) - set(found.values())
    assert [cell["metrics"]["sparsity"] for cell in cells.values()] == pytest.approx([0.3, 0.7, 0.7], abs=0.01)
    for seed, metrics in found.items():
        expected = random_control(prune_by_probs(read_run(metrics.parent), 0.7), seed).to_table()
        assert torch.equal(SparseMask.from_pretrained(folder / f"random_0.7_seed_{seed}").to_table(), expected)


@pytest.mark.slow
def test_replaced_layers_start_anew_and_the_others_from_the_checkpoint(run_cells, tmp_path):
    _, cells = run_cells("minilm_mixers", replaced=[1], learning_rate=0.0, task="rte", task_epochs=1.0)
    assert all(0 <= cell["metrics"]["task_score"] <= 1 for cell in cells.values())
    (path,) = tmp_path.glob("runs/checkpoint_*/model.safetensors")
    checkpoint, first = load_file(path), "bert.encoder.layer.0.attention.self."
    for cell in cells.values():
        series = cell["settings"]["series"]
        found = load_file(tmp_path / f"runs/minilm_mixers_tiny/{series}_1_seed_5/model.safetensors")
        assert all(name.startswith(first) for name in checkpoint.keys() ^ found.keys()), series
        changed = {name for name in checkpoint.keys() & found.keys() if not torch.equal(checkpoint[name], found[name])}
        if series == "attention":
            assert {f"{first}{part}.weight" for part in ("query", "key", "value")} <= changed
            assert found[f"{first}query.weight"].std().item() == pytest.approx(0.02, rel=0.15)
        assert all(name.startswith(first) for name in changed), series


def test_the_tokenizer_of_all_cells_has_not_seen_the_held_out_text(run_cells, tmp_path):
    def documents(word, split):
        numbered = (f"{word} is the first of many words of text {i}" for i in range(2000))
        return [document for document in numbered if in_split([document], split)]

    text = tmp_path / "numbered.txt"
    text.write_text("\n\n".join(documents("ours", "train")[:80] + documents("ж", "validation")))
    own = {"text": str(text), "validation": None, "task": "rte", "nsp": True}
    _, cells = run_cells("mixers", "[ab]*_seed_5", **own)
    first, second, *_ = (cell["metrics"] for cell in cells.values())
    assert 0 <= first["task_score"] <= 1 and first["shared_cpu_seconds"] > second["shared_cpu_seconds"]
    (file,) = tmp_path.glob("runs/mixers_tiny/tokenizer_*/tokenizer.json")  # for all cells
    known = AutoTokenizer.from_pretrained(file.parent).get_vocab()
    assert "ours" in known and "ж" not in known


def test_causal_sparsity_counts_what_is_left_of_the_future(run_cells):
    _, cells = run_cells("language_modelling", ["dense_*", "random_0.5_*"], seeds=[3])
    dense, drawn = (cell["metrics"] for cell in cells.values())
    assert 50 < dense["perplexity"] < 200 and dense["causal_sparsity"] == 0
    mask = build_pattern("random", 16, 4, num_layers=2, seed=3, sparsity=0.5)
    removed = 1 - 16 * 16 / (16 * 17 / 2) * mask.to_table().tril().float().mean().item()
    assert drawn["causal_sparsity"] == pytest.approx(removed)


# Parts of tasks


@pytest.fixture
def folders(squad_folder, swag_folder):
    return {"squad": squad_folder, "squad_v2": squad_folder, "swag": swag_folder}


def task_rows(task, folder):
    loaded = TASKS[task].load(data=str(folder), splits=["train", "validation"])
    return [loaded[split].to_list() for split in ("train", "validation")]


def without_id(row):
    return json.dumps({name: value for name, value in row.items() if name not in ("id", "title")}, sort_keys=True)


@pytest.mark.parametrize("task", ["squad", "squad_v2", "swag"])
def test_a_part_has_rows_of_the_whole(task, folders, tmp_path):
    whole = task_rows(task, folders[task])
    for place in ("a", "b"):
        assert write_parts(task, str(folders[task]), tmp_path / place, 6, 5) == (6, 5)
    for part, again, rows in zip(task_rows(task, tmp_path / "a"), task_rows(task, tmp_path / "b"), whole, strict=True):
        assert part == again and {without_id(row) for row in part} < {without_id(row) for row in rows}
    assert write_parts(task, str(folders[task]), tmp_path / "c", 10**9, 10**9) == tuple(map(len, whole))
    # A single file is divided by contexts.
    (tmp_path / "one").mkdir()
    name = {"squad": "train-v1.1.json", "squad_v2": "dev-v2.0.json", "swag": "val.jsonl"}[task]
    shutil.copy(folders[task] / name, tmp_path / "one" / name)
    assert len(set(find_splits(task, str(tmp_path / "one")))) == 1
    sizes = write_parts(task, str(tmp_path / "one"), tmp_path / "part", 10**9, 10**9)
    train, validation = task_rows(task, tmp_path / "part")
    assert (len(train), len(validation)) == sizes and len(validation) < len(train)
    assert not {row["context"] for row in train} & {row["context"] for row in validation}


def test_folders_that_do_not_serve_are_refused(folders, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        find_splits("squad", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="task swag: folder .* must hold one file, .* got none; files end in .*jsonl"):
        find_splits("swag", str(tmp_path))
    (tmp_path / "one").mkdir()
    row = (folders["swag"] / "val.jsonl").read_text().splitlines()[0]
    (tmp_path / "one/val.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match="one context, too few to divide"):
        write_parts("swag", str(tmp_path / "one"), tmp_path / "part", 5, 5)


def test_tasks_share_the_model_that_went_on(run_cells, tmp_path):
    (table, _), cells = run_cells("sparsebert_table2", "*_random_drop_0_seed_5", draws=1, squad2=None)
    squad, swag = (cell["metrics"] for cell in cells.values())
    assert squad["shared_seconds"] > 10 * swag["shared_seconds"] and squad["mlm_loss"] == swag["mlm_loss"]
    assert len(list(tmp_path.glob("runs/sparsebert_table2_tiny/model_*/metrics.json"))) == 1
    assert squad["sparsity"] == swag["sparsity"] == pytest.approx(1 / 32)
    assert (squad["train_examples"], squad["validation_examples"]) == (8, 4)
    assert "exact_match" in squad and "exact_match" not in swag
    assert [row["task"] for row in table.as_json()["rows"] if row["score"] == "not run"] == ["SQuAD v2.0"]


def test_models_of_table_1_serve(run_cells, cells_of, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("studies.sparsebert_paper.sparsebert_table2.continue_training", lambda *_: 1 / 0)
    own = cells_of("sparsebert_table1", max_length=32)["no_diag_seed_5"]
    model = tmp_path / "runs/sparsebert_table1_tiny/no_diag_seed_5"
    shutil.copytree(checkpoints["window"], model)
    (model / "cell.json").write_text(json.dumps({"settings": own}))
    (model / "metrics.json").write_text(json.dumps({"mlm_loss": 1.25}))
    _, cells = run_cells("sparsebert_table2", "swag_no_diag_seed_5")
    assert cells["swag_no_diag_seed_5"]["metrics"]["mlm_loss"] == 1.25
    for only, changed in {"squad_dense_seed_5": {}, "squad_no_diag_seed_5": {"learning_rate": 1e-3}}.items():
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):  # another model, or after another training
            run_cells("sparsebert_table2", only, **changed)


# Kept files and pictures of the papers' figures


@pytest.mark.slow
def test_p_and_masks_of_searches_are_kept_and_drawn(with_matplotlib, run_cells, tmp_path):
    run_cells("sparsebert_table1", "soft_seed_5")
    kept = load_file(tmp_path / "out/sparsebert_table1_tiny/soft_seed_5/mean_probs.safetensors")["probs"]
    probs = load_file(tmp_path / "runs/sparsebert_table1_tiny/soft_seed_5/mask_probs.safetensors")["probs"]
    assert kept.dtype == torch.float16 and torch.allclose(kept.float(), probs.mean(0), atol=1e-3)
    assert (tmp_path / "out/sparsebert_table1_tiny_figure2.png").is_file()
    name = "dam_u_target_0.86_seed_5"
    run_cells("sparsebert_table3", name, targets=[0.86], searches=["dam_u"])
    kept, there = (SparseMask.from_pretrained(tmp_path / place / "sparsebert_table3_tiny" / name)
                   for place in ("out", "runs"))  # fmt: skip
    assert torch.equal(kept.to_table(), there.to_table()) and kept.metadata == {"search": "dam_u"}
    assert (tmp_path / "out/sparsebert_table3_tiny_figure5.png").is_file()


def test_seeds_of_other_lengths_are_not_averaged(with_matplotlib, tmp_path):
    experiment, cells = EXPERIMENTS["sparsebert_table1"], {}
    for seed, length in enumerate((20, 20, 24)):
        (tmp_path / f"soft_{seed}").mkdir()
        save_file({"probs": torch.rand(length, length).half()}, tmp_path / f"soft_{seed}/mean_probs.safetensors")
        cells[f"soft_{seed}"] = {"settings": {"system": "soft", "seed": seed}, "metrics": {}}
    experiment.pictures["figure2"](cells, tmp_path, tmp_path / "all.png")
    del cells["soft_2"]
    experiment.pictures["figure2"](cells, tmp_path, tmp_path / "same.png")
    assert (tmp_path / "all.png").read_bytes() == (tmp_path / "same.png").read_bytes()
    experiment.pictures["figure2"](cells, tmp_path / "nowhere", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_figures_show_the_first_seed_at_the_papers_sparsities(with_matplotlib, tmp_path, monkeypatch):
    experiment = EXPERIMENTS["sparsebert_table3"]
    cells = experiment.cells(experiment.arguments())
    build_pattern("window", 16, 2).save_pretrained(tmp_path / "run")
    shown, drawn, masks = [name for name, cell in cells.items() if experiment.keep(cell, tmp_path / "run")], [], {}
    plot = "studies.sparsebert_paper.sparsebert_table3.plot_heads"
    monkeypatch.setattr(plot, lambda *arguments: drawn.append(arguments))
    done = {name: {"settings": cell, "metrics": {}} for name, cell in cells.items()}
    for figure, (search, target) in SHOWN.items():
        assert f"{search}_target_{target:g}_seed_1" in shown and not any("_diag" in name for name in shown)
        for seed in (2, 3):
            masks[seed] = build_pattern("random", 16, 2, sparsity=0.8, seed=seed)
            masks[seed].save_pretrained(tmp_path / f"{search}_target_{target:g}_seed_{seed}")
        experiment.pictures[figure](done, tmp_path, tmp_path / f"{figure}.png")
        mask, path, title = drawn[-1]
        assert torch.equal(mask.to_table(), masks[2].to_table()) and title.endswith("seed 2")


# Trained encoders and sentences


@pytest.mark.parametrize("mask", ["window", "dense"])
def test_cells_of_a_trained_model_have_what_was_found(mask, run_cells, checkpoints, glue_folder, tmp_path):
    _, cells = run_cells("minilm", masks=[mask])
    ((name, cell),) = cells.items()
    metrics, folder = cell["metrics"], tmp_path / "runs/minilm_tiny" / name / "model"
    found = json.loads((folder / "metrics.json").read_text())
    before, after = (found["agreement"][name] for name in (own_mask(mask), RECOVERED.format(own_mask(mask))))
    assert (metrics["cosine_before"], metrics["cosine"]) == (before["cosine"], after["cosine"])
    assert metrics["removed"] == pytest.approx(cell["settings"]["sparsity"], abs=0.1)
    seconds = found["inference_seconds"]
    assert metrics["speed_up"] == pytest.approx(seconds["dense"] / seconds["masked"])
    pairs = TASKS["stsb"].load(data=str(glue_folder), splits=["validation"])["validation"]
    for score, place in {"spearman": folder, "spearman_original": checkpoints["stock"]}.items():
        if score in metrics:
            model, tokenizer = AutoModel.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
            assert metrics[score] == pytest.approx(similarity(model, tokenizer, pairs)["spearman"])
    assert ("spearman_original" in metrics) == (mask == "dense")


@pytest.mark.parametrize("name", TILED)
def test_patterns_of_whole_tiles(name):
    mask = TILED[name]({"length": 1000, "sparsity": 0.8, "seed": 0}, 2)
    assert mask.sparsity == pytest.approx(0.75, abs=0.1)
    table = mask.to_table()[..., 64:-64, 64:-64]  # without the special tokens
    first_of_tile = torch.arange(1000 - 128) // 64 * 64
    assert torch.equal(table, table[..., first_of_tile[:, None], first_of_tile])


def test_scores_through_adapted_weights_are_those_after_the_recovery(cells_of, tmp_path, monkeypatch):
    def search(recipe):
        mask = recipe["data"].get("mask")
        names = ("dense", "given", "given, recovered") if mask else ("dense", "learned", "learned, recovered")
        scores = {name: {"score": i + 10 * bool(mask), "input_sparsity": i / 10} for i, name in enumerate(names)}
        return {"seconds": {"search": 1.0}, "agreement": scores}

    module = "studies.trained_models.minilm_task_masks"
    monkeypatch.setattr(f"{module}.search_post_hoc", search)
    trained = {"train_examples": 8, "train_seconds": 1.0, "main_metric": "accuracy"}
    monkeypatch.setattr(f"{module}.finetuned_cell", lambda *_: dict(trained))
    cell = next(iter(cells_of("minilm_task_masks").values()))
    metrics = EXPERIMENTS["minilm_task_masks"].run(cell, tmp_path)
    scores = {name.removeprefix("score_"): value for name, value in metrics.items() if name.startswith("score_")}
    assert scores == {"dense": 0, "learned": 1, "learned_recovered": 2, "window_recovered": 12}
    metrics = EXPERIMENTS["minilm_task_masks"].run(cell | {"recover": 0}, tmp_path)
    assert "score_window_recovered" not in metrics and "score_learned" in metrics


def test_the_original_model_is_a_system(cells_of, checkpoints):
    cells = cells_of("minilm_tasks", systems=["stock", "original"])
    assert cells["rte_original_seed_5"]["model"] == checkpoints["stock"] != cells["rte_stock_seed_5"]["model"]


def test_embeddings_do_not_depend_on_the_batch(checkpoints):
    model = AutoModel.from_pretrained(checkpoints["stock"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["stock"])
    sentences = ["w1 w2 w3 w4", "w5", "w6 w7 w8", "w1 w1"]
    together = embed(model, tokenizer, sentences, batch_size=3)
    alone = torch.cat([embed(model, tokenizer, [sentence]) for sentence in sentences])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    states = model(**tokenizer("w5", return_tensors="pt")).last_hidden_state[0].mean(0)
    torch.testing.assert_close(together[1], states / states.norm(), atol=1e-5, rtol=1e-4)
    pairs = {"text": sentences[:2], "text_pair": sentences[2:]}
    cosines = (together[:2] * together[2:]).sum(-1)
    dense = torch.nn.functional.normalize(together + 0.2 * torch.randn(together.shape), dim=-1)
    found = similarity(model, tokenizer, Dataset.from_dict(pairs | {"label": (-cosines).tolist()}), dense)
    assert found["spearman"] == pytest.approx(-1) and found["sparsity"] == 0
    assert found["cosine"] == pytest.approx((together * dense).sum(-1).mean().item(), abs=1e-5)


def test_sentences_through_masks_and_models(run_cells, checkpoints, tmp_path):
    mask = build_pattern("window", 32, 4, window_size=2)
    mask.save_pretrained(tmp_path / "mask")
    attach(AutoModel.from_pretrained(checkpoints["stock"]), mask).save_pretrained(tmp_path / "whole")
    masked = [str(tmp_path / "mask"), str(tmp_path / "whole")]
    _, cells = run_cells(
        "sentences", [f"stsb_{name}" for name in ("dense", "mask", "whole", "random_0.9")], masked=masked
    )
    rows = {name.removeprefix("stsb_"): cell["metrics"] for name, cell in cells.items()}
    assert rows["dense"]["cosine"] == 1 and rows["dense"]["input_sparsity"] == 0
    for name in ("sparsity", "input_sparsity", "cosine", "spearman"):
        assert rows["mask"][name] == pytest.approx(rows["whole"][name], abs=1e-5)
    assert rows["mask"]["sparsity"] > rows["mask"]["input_sparsity"] > 0.1 and rows["mask"]["cosine"] < 1
    assert rows["random_0.9"]["sparsity"] == pytest.approx(0.9, abs=1e-3)


def test_distances_at_which_positions_are_alike():
    angles = torch.arange(12) * torch.pi / 3  # a period of 6
    alike = offsets.similarity_by_distance(torch.stack([angles.sin(), angles.cos()], 1))
    assert alike[:7].tolist() == pytest.approx([1, 0.5, -0.5, -1, -0.5, 0.5, 1], abs=1e-5)
    kept = [0.0] * 100
    kept[50], kept[52], kept[80] = 0.5, 0.4, 0.3
    table = offsets.recurring({"kept": kept, "similarity": [0.1] * 100, "correlation": -0.2}, "any")
    assert table.rows[0] == ["50 to 52", "30%", "+0.10"] and table.rows[1][0] == "all from 40 on"
    assert table.rows[2][-1] == "-0.20"


@pytest.mark.parametrize("name", separators.MASKS[1:])
@pytest.mark.parametrize("sparsity", [0.9, 0.8])
def test_masks_have_as_many_entries_with_the_separators(name, sparsity):
    length = 128
    extra = separators.added_by_separators(name, length)
    sparsities = (sparsity, sparsity + extra)
    last, every = (matched_pattern(name, own, length, 4, 1, 0).to_table(length) for own in sparsities)
    counts = []
    for place in range(20, length - 20, 8):
        kept = every.clone()
        kept[..., [place, -1], :] = kept[..., [place, -1]] = True
        counts.append(kept.sum().item())
    assert sum(counts) / len(counts) == pytest.approx(last.sum().item(), rel=0.03)


def test_separators_are_kept_in_every_row(tiny_config):
    torch.manual_seed(0)
    stock = BertModel(tiny_config(BertConfig, attn_implementation="eager")).eval()
    rows = torch.randint(5, stock.config.vocab_size, (3, 16))
    rows[0, 5] = rows[1, 9] = 4
    nothing = torch.zeros(1, stock.config.num_attention_heads, 16, 16, dtype=torch.bool)
    found = separators.pooled(stock, rows, nothing, separator=4)
    for row, place in ((0, 5), (1, 9)):  # as the library's own mask, for rows of one kind
        keep = nothing.clone()
        keep[..., place, :] = keep[..., :, place] = True
        copied = BertModel(stock.config).eval()
        copied.load_state_dict(stock.state_dict())
        attached = attach(copied, SparseMask(keep, 16), attn_implementation="sparse_eager")
        with torch.no_grad():
            want = attached(rows[row : row + 1]).last_hidden_state.mean(1)
        torch.testing.assert_close(found[row : row + 1], want)


# Long texts


def test_parts_of_a_text_are_averaged(checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["stock"])
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoints["stock"], num_labels=3).eval()
    texts = [" ".join(f"w{(7 * i + j) % 90}" for j in range(5 * i + 1)) for i in range(6)]

    def probs(words):
        with torch.no_grad():
            return model(**tokenizer(" ".join(words), return_tensors="pt")).logits.softmax(-1)

    parts = [[text.split()[start : start + 6] for start in range(0, len(text.split()), 6)] for text in texts]
    expected = [int(torch.cat([probs(words) for words in part]).mean(0).argmax()) for part in parts]
    assert classify(model, tokenizer, texts, 8, split=True) == expected
    assert classify(model, tokenizer, texts, 8) == [int(probs(part[0]).argmax()) for part in parts]


@pytest.fixture
def split_is_one(monkeypatch):
    """Classifiers that say 1 of texts that are split, and 0 of others."""

    def classify(model, tokenizer, texts, max_length, split=False):
        return [int(split)] * len(texts)

    monkeypatch.setattr("studies.long_texts.review_classifiers.classify", classify)


def test_only_long_texts_are_used(cells_of, split_is_one, tmp_path):
    cell = next(iter(cells_of("long_reviews").values()))
    with pytest.raises(ValueError, match="no text of train has more than 99 tokens"):
        EXPERIMENTS["long_reviews"].run(cell | {"longer_than": 99}, tmp_path)
    metrics = EXPERIMENTS["long_reviews"].run(cell | {"longer_than": 66, "bf16": True}, tmp_path)
    assert metrics["test_examples"] == 7  # of 24, and 4 of them have the label 1
    assert (metrics["accuracy"], metrics["split_accuracy"]) == pytest.approx((3 / 7, 4 / 7))


def test_masks_are_searched_on_further_texts(cells_of, split_is_one, tmp_path):
    (cell,) = cells_of("long_review_masks").values()
    metrics = EXPERIMENTS["long_review_masks"].run(cell | {"longer_than": 54}, tmp_path)
    labels = [json.loads(line)["label"] for line in (tmp_path / "data/dev.jsonl").read_text().splitlines()]
    for way, share in (("truncated", 1 - sum(labels) / len(labels)), ("split", sum(labels) / len(labels))):
        assert [metrics[f"accuracy_{name}_{way}"] for name in ("dense", "window_recovered")] == pytest.approx(
            [share] * 2
        )
    labeled, unlabeled = ((tmp_path / name).read_text() for name in ("data/train.jsonl", "unlabeled.jsonl"))
    texts = [{json.loads(line)[name] for line in file.splitlines()}
             for file, name in ((labeled, "sentence"), (unlabeled, "text"))]  # fmt: skip
    assert len(texts[0]) == 4 and len(texts[1]) > 1 and not texts[0] & texts[1]
    assert "w3" not in labeled + unlabeled and "w1" not in (tmp_path / "test.jsonl").read_text()
    masks = {path.parent.name: SparseMask.from_pretrained(path.parent) for path in tmp_path.glob("*/mask_config.json")}
    assert masks.keys() == {"learned", "learned_recovered", "window_recovered"}
    assert torch.equal(masks["learned"].to_table(), masks["learned_recovered"].to_table())
    assert masks["window_recovered"].metadata["pattern"] == "window" and masks["learned"].metadata["search"] == "dam_s"
    with pytest.raises(ValueError, match=r"unlabeled_examples: all \d+ long texts are used"):
        EXPERIMENTS["long_review_masks"].run(cell | {"train_examples": 100}, tmp_path)


def test_positions_are_compared_on_short_and_long_texts(run_cells):
    (table, _), cells = run_cells("positions")
    scores = {cell["settings"]["system"]: cell["metrics"].get("spearman") for cell in cells.values()}
    assert list(scores) == ["truncated", "mean of two halves", *METHODS] and scores["mean of two halves"] is None
    assert scores["tile"] == scores["truncated"] != scores["interpolate"]
    assert all(cell["metrics"]["texts"] == 4 for cell in cells.values()) and len(table.rows) == len(scores)
    # The end of the first is nearer to the second, that of the second to itself.
    ends, beginnings = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert positions.reciprocal_ranks(ends, beginnings) == [0.5, 1.0]


def test_needles_are_hidden_after_a_sentence(run_cells):
    (table, _), cells = run_cells("needles", lengths=[40, 80], documents=4, depths=[0.0, 1.0])
    names = ["dense, whole", "window, whole", "dense, whole", "dense, truncated", "dense, split", "window, whole"]
    assert [row["system"] for row in table.as_json()["rows"]] == names and len(cells) == 6
    text, full_stop, needle = [1, 2, 0, 3, 4, 0, 5], 0, [9, 9]
    places = [needles.hidden(text, needle, depth, full_stop).index(9) for depth in (0, 0.3, 0.5, 0.9, 1)]
    assert places == [0, 2, 3, 6, 6]


def test_needles_are_answered_by_readers(run_cells, checkpoints, tmp_path):
    for kind in ("stock", "window"):
        AutoModelForQuestionAnswering.from_pretrained(checkpoints[kind]).save_pretrained(tmp_path / kind)
        AutoTokenizer.from_pretrained(checkpoints[kind]).save_pretrained(tmp_path / kind)
    readers = [str(tmp_path / "stock"), str(tmp_path / "window")]
    fields = {"readers": readers, "masks": [], "lengths": [40, 80], "documents": 4, "precision": "bfloat16"}
    (_, table, _), cells = run_cells("needles", **fields)
    systems = [
        f"{kind}, {way}" for ways in (["whole"], ["whole", "split"]) for kind in ("stock", "window") for way in ways
    ]
    assert [row["system"] for row in table.as_json()["rows"]] == systems
    metrics = {name: cell["metrics"] for name, cell in cells.items() if "answers" in cell["settings"]}
    assert metrics["stock_answers_whole_40"]["removed"] == 0 < metrics["window_answers_whole_40"]["removed"]
    assert metrics["window_answers_split_80"]["removed"] == metrics["window_answers_whole_40"]["removed"]
    assert not any("mrr" in found for found in metrics.values())
    with pytest.raises(ValueError, match="readers must be models for question answering, got a BertForMaskedLM in"):
        run_cells("needles", **fields | {"readers": [checkpoints["stock"]]})


@pytest.mark.parametrize("length", [40, 12])
def test_an_answer_is_found_in_the_window_that_has_it(word_tokenizer, length):
    class Reader(torch.nn.Module):
        def forward(self, input_ids, **inputs):
            logits = (input_ids == word_tokenizer.convert_tokens_to_ids("yes")).float()
            return QuestionAnsweringModelOutput(start_logits=logits, end_logits=logits)

    documents = [word_tokenizer.convert_tokens_to_ids([*(f"w{i}" for i in range(20)), "yes", "w3"]), [7, 8, 9]]
    found, _ = needles.answered(Reader(), word_tokenizer, ["w1 w2", "w1"], documents, length, 2)
    assert found[0] == "yes" and found[1] in word_tokenizer.decode([7, 8, 9])


def test_long_texts_are_read_truncated_split_and_whole(run_cells, checkpoints, tmp_path):
    (table, _), cells = run_cells("document_embeddings", lengths=[40, 80], precisions=["float32", "int8"], texts=4)
    names = ["dense, truncated", "dense, whole", "dense, split", "window, truncated"]
    folder = checkpoints["window"].rpartition("/")[2]
    assert [cell["settings"]["system"].replace(folder, "window") for cell in cells.values()] == [
        name for name in names for _ in range(2)
    ]
    assert all(len(cell["metrics"]["scores"]) == 4 and cell["metrics"]["cpu_ms"] > 0 for cell in cells.values())
    assert [cell["metrics"]["removed"] > 0 for cell in cells.values()] == [False] * 6 + [True] * 2
    assert len(table.rows) == 8
    _, cells = run_cells("review_embeddings", ["dense_truncated*"], texts=20)  # words tell the labels apart
    assert all(20 < cell["metrics"]["number"] < 40 for cell in cells.values())


def test_parts_of_documents_are_weighted_by_their_tokens(tiny_config, word_tokenizer):
    torch.manual_seed(0)
    model = BertModel(tiny_config(BertConfig, max_position_embeddings=64)).eval()
    words = [[f"w{(7 * i + d) % 90}" for i in range(124)] for d in range(3)]
    ids = [word_tokenizer.convert_tokens_to_ids(document) for document in words]

    def found(texts, length=64):
        return long_embeddings.embedded(model, word_tokenizer, texts, length, 64)[0]

    halves = [found([part[at : at + 62] for part in ids]) for at in (0, 62)]
    torch.testing.assert_close(found(ids, 128), torch.nn.functional.normalize(sum(halves), dim=-1))
    second = found([part[62:93] for part in ids])
    expected = torch.nn.functional.normalize(halves[0] + second / 2, dim=-1)
    torch.testing.assert_close(found([part[:93] for part in ids], 128), expected)


def test_what_long_texts_are_compared_with():
    ranks = {"dense, truncated": [0.1, 0.2, 0.3], "dense, whole": [0.4, 0.5, 0.9]}
    ranks |= {"dense, split": [0.3, 0.5, 0.4], "a, whole": [0.6, 0.6, 0.9]}
    cells = [
        (
            {"system": name, "length": 1024 if "truncated" not in name else 512, "precision": precision},
            {"cpu_ms": 1.0, "removed": 0.0, "score": 0.0, "scores": [rank + shift for rank in own]},
        )
        for precision, shift in (("float32", 0.0), ("int8", 0.05))
        for name, own in ranks.items()
    ]
    (table,) = long_embeddings.DOCUMENTS.summary(finished(*cells))
    rows = table.as_json()["rows"]
    for own in (rows[:4], rows[4:]):
        differences = [
            [row.get(f"minus {name}", "").split(" [")[0] for row in own] for name in ("truncated", "whole", "split")
        ]
        assert differences == [
            ["", "+0.400", "+0.200", "+0.500"],
            ["", "", "-0.200", "+0.100"],
            ["", "", "", "+0.300"],
        ]


# Tables


def test_numbers_by_system_and_seed():
    cells = finished(
        ({"task": "a", "system": "dense", "seed": 1}, {"score": 0.5}),
        ({"task": "a", "system": "random_drop, draw 0", "seed": 1}, {"score": 0.25}),
        ({"task": "a", "system": "random_drop, draw 1", "seed": 1}, {"score": 0.75}),
        ({"task": "b", "system": "dense", "seed": 2}, {"other": 1.0}),
    )
    assert by_seed(cells, "score", "system", times=100) == {"dense": {1: 50.0}, "random_drop": {1: 50.0}}
    assert by_seed(cells, "score", "task", "system").keys() == {("a", "dense"), ("a", "random_drop")}


def test_the_mean_over_tasks_is_of_the_seeds_that_have_all():
    scores = {"rte": {"dense": {0: 60.0, 1: 62.0}, "mask": {0: 58.0, 1: 61.0}}}
    scores |= {"cola": {"dense": {0: 40.0, 1: 44.0}, "mask": {0: 43.0, 1: 44.0}}}
    mean = {"dense": {0: 50.0, 1: 53.0}, "mask": {0: 50.5, 1: 52.5}}
    assert with_task_mean(scores)["mean"] == mean
    # A task with a single seed is not in the mean, unless fewer than two have several.
    single = {"sst2": {"dense": {0: 90.0}, "mask": {0: 80.0}}}
    assert with_task_mean(scores | single)["mean"] == mean
    assert with_task_mean({"rte": scores["rte"]} | single)["mean"] == {"dense": {0: 75.0}, "mask": {0: 69.0}}
    one = {task: {system: {0: numbers[0]} for system, numbers in own.items()} for task, own in scores.items()}
    assert with_task_mean(one)["mean"] == {"dense": {0: 50.0}, "mask": {0: 50.5}}
    scores["cola"]["mask"] = {7: 44.0, 8: 43.0}  # without a seed that has all tasks
    assert with_task_mean(scores)["mean"].keys() == {"dense"}


def test_masks_of_tasks_are_compared_with_the_learned_one():
    scores = {"dense": [0.84, 0.83], "learned": [0.83, 0.83], "window": [0.1, 0.2], "window_recovered": [0.2, 0.3]}

    def differences():
        cells = [
            (
                {"task": "stsb", "seed": seed},
                {f"{kind}_{name}": values[seed] for name, values in scores.items() for kind in ("score", "removed")},
            )
            for seed in (0, 1)
        ]
        means, compared = EXPERIMENTS["minilm_task_masks"].summary(finished(*cells))
        return rows_by(means, "mask"), rows_by(compared, "mask", "than")

    rows, found = differences()
    assert list(rows) == ["dense", "learned", "window, recovered", "window", "seeds"] and rows["seeds"]["stsb"] == "2"
    assert rows["window"]["stsb"] == "15.0 ± 7.1"
    assert found.keys() == {("learned", "dense"), ("learned", "window, recovered")}
    assert found["learned", "dense"]["more"].startswith("-0.5 [")
    # A mask whose weights were not adapted is compared with one for which they were not, either.
    scores |= {"attention": [0.5, 0.4], "learned_recovered": [0.84, 0.84]}
    _, found = differences()
    others = {("learned, recovered", other) for other in ("dense", "learned", "window, recovered")}
    assert found.keys() == {("learned", "attention"), *others}


def test_windows_are_compared_at_the_sparsity_of_the_learned_mask():
    """On the line through the two nearest, seed by seed; with one window its own loss, without one nothing."""
    systems = {"window_0.8": (0.8, 3.0), "window_0.9": (0.9, 3.2), "window_0.5": (0.5, 1.0), "dam_s": (0.92, 3.1)}
    systems["window_0.91"] = systems["window_0.9"]  # a near target, which the same window meets
    cells = finished(
        *(
            ({"system": name, "seed": seed}, {"sparsity": systems[name][0], "mlm_loss": systems[name][1] + seed})
            for seed, names in {1: systems, 2: ("window_0.9", "dam_s"), 3: ("dam_s",)}.items()
            for name in names
        )
    )
    assert window_losses(cells, "dam_s") == {1: pytest.approx(4.24), 2: pytest.approx(5.2)}


def test_masks_are_compared_with_those_without_their_diagonal():
    losses = {"dense": [3.7], "star": [4.0, 4.1, 4.2], "star_no_diag": [4.01, 4.13, 4.22, 4.9]}
    losses |= {"fixed_no_diag": [3.8], "fixed": [3.9], "strided": [3.9], "dam_s_target_0.912": [3.84]}
    losses |= {"dam_s_keep_diag_target_0.912": [3.8], "dam_s_no_diag_target_0.912": [3.85]}
    cells = [
        ({"system": name, "seed": seed}, {"mlm_loss": loss, "sparsity": 0.9})
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    _, table = EXPERIMENTS["sparsebert_table3"].summary(finished(*cells))
    rows = rows_by(table, "mask")
    assert list(rows) == ["fixed", "star", "dam_s, target 0.912"]
    assert rows["star"]["difference"].startswith("+0.020 [") and rows["star"]["seeds"] == "3"
    assert rows["fixed"]["difference"] == "-0.100" and not rows["fixed"]["p (Holm)"]
    dam_s = rows["dam_s, target 0.912"]
    assert (dam_s["difference"], dam_s["GLUE, paper"], dam_s["without, paper"]) == ("+0.050", "80.5", "80.9")
