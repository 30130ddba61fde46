"""Progressive pruning: what is removed when, that freezing changes nothing, resumption, bad input."""

import copy
import json
import shutil

import pytest
import torch
from conftest import TINY, covering
from safetensors.torch import load_file
from test_training import LENGTH, history, make_trainer, rows, weights
from transformers import Trainer, TrainerCallback, TrainingArguments

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseMask
from sparsebert.learning.attention_scores import AttentionScores
from sparsebert.learning.learned_mask import expand_probs
from sparsebert.learning.progressive_pruning import PRUNING_NAME, SCHEDULES, ProgressivePruning
from sparsebert.learning.search_schedule import SearchSchedule
from sparsebert.learning.selection import best_of_rows, prune
from sparsebert.masks.expansion import parameter_index, special_entries
from sparsebert.masks.mask_files import MASK_PROBS_NAME
from sparsebert.training.finetuning.finetuning_runs import finetune
from sparsebert.training.runs.checkpoint_manifests import check_whole


pytestmark = pytest.mark.usefixtures("without_matplotlib")


def model_of(search="dam_s", **fields):
    fields = {"mask_length": LENGTH, "mask_constant": 10.0} | fields
    fields |= {"pattern": search} if search == "dense" else {"search": search}
    torch.manual_seed(0)
    return SparseBertForMaskedLM(SparseBertConfig(**TINY | fields))


def pruned(model, sparsity=0.7):
    """The model of a search with random scores, pruned to a sparsity, before it freezes."""
    sparse_attention = model.sparse_attention
    sparse_attention.start_pruning()
    with torch.no_grad():
        sparse_attention.mask_logits.normal_()
    learned = sparse_attention.learned
    learned.prune(learned.probs(), sparsity)
    return model


def batch():
    """Four sequences, two of them padded."""
    examples = rows(4)
    inputs = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    inputs["attention_mask"] = torch.ones(4, LENGTH, dtype=torch.long)
    inputs["attention_mask"][1, 9:] = inputs["attention_mask"][3, 5:] = 0
    inputs["labels"][inputs["attention_mask"] == 0] = -100
    return inputs


# What is removed


def test_schedules():
    for schedule in SCHEDULES.values():
        values = [schedule(i / 50, 0.9) for i in range(51)]
        assert values[-1] == pytest.approx(0.9) and values == sorted(values)
    assert SCHEDULES["cubic"](0.5, 0.8) == pytest.approx(0.8 * (1 - 0.125))
    assert SCHEDULES["linear"](0.25, 0.8) == pytest.approx(0.2)
    tenths = sorted({round(SCHEDULES["step"](i / 100, 0.9), 6) for i in range(101)})
    assert tenths == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert sorted({SCHEDULES["step"](i / 10, 0.25) for i in range(11)}) == pytest.approx([0.1, 0.2, 0.25])
    assert SCHEDULES["step"](0.0, 0.05) == 0.05


def entries(kept, index):
    return torch.nn.functional.pad(kept, (0, 1))[..., index.clamp(max=kept.shape[-1])]


def test_prune_per_head_and_global():
    """Against sorting by hand: a table of 6 x 6 entries in which the scores of head 1 are higher."""
    index = torch.arange(36).view(6, 6)
    fixed = torch.full((6, 6), -1)
    scores = torch.rand(1, 2, 36) + torch.tensor([0.0, 0.5])[:, None]
    everything = torch.ones(1, 2, 36, dtype=torch.bool)
    kept = prune(everything, scores, index, fixed, 0.75, empty_rows=True)
    assert kept.sum(-1).tolist() == [[9, 9]]
    for head in range(2):
        assert set(scores[0, head].topk(9).indices.tolist()) == set(kept[0, head].nonzero().flatten().tolist())
    kept = prune(everything, scores, index, fixed, 0.75, scope="global", empty_rows=True)
    assert kept.sum() == 18 and scores[kept].min() >= scores[~kept].max()
    assert kept[0, 1].sum() > kept[0, 0].sum()


def test_every_row_keeps_its_best_entry():
    index, fixed = torch.arange(36).view(6, 6), torch.full((6, 6), -1)
    scores = torch.rand(1, 2, 36)
    scores[..., :6] -= 10  # row 0 would go first
    kept = prune(torch.ones(1, 2, 36, dtype=torch.bool), scores, index, fixed, 0.8)
    table = kept.view(1, 2, 6, 6)
    assert table.any(-1).all() and kept.sum(-1).tolist() == [[7, 7]]
    assert table[0, 0, 0].nonzero().item() == scores[0, 0, :6].argmax()
    without = prune(torch.ones(1, 2, 36, dtype=torch.bool), scores, index, fixed, 0.8, empty_rows=True)
    assert not without.view(1, 2, 6, 6)[:, :, 0].any()


@pytest.mark.parametrize("form, size", [("offsets", 10), ("blocks", 3), ("table", 78)])
def test_special_rows_need_nothing_else(form, size):
    index = parameter_index(form, 12, 12, block_size=4)
    fixed = torch.where(special_entries(12, "first_last"), 1, -1)
    assert not best_of_rows(torch.rand(1, 2, size), index, fixed).any()
    best = best_of_rows(torch.rand(1, 2, 12 if form == "offsets" else size), index, torch.full((12, 12), -1))
    assert entries(best, index).any(-1).all()


@pytest.mark.parametrize("score, scope", [("probs", "head"), ("logits", "global")])
@pytest.mark.parametrize("search", ["dam_s", "dam_u", "soft", "vertical_slash"])
def test_what_is_removed_stays_removed(search, score, scope):
    model = pruned(model_of(search), 0.3)
    sparse_attention = model.sparse_attention
    learned = sparse_attention.learned
    first = learned.kept
    with torch.no_grad():
        sparse_attention.mask_logits.copy_(torch.where(first, torch.randn(first.shape), -torch.inf))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(**batch()).loss.backward()
        assert sparse_attention.mask_logits.grad[first].abs().sum() > 0
        optimizer.step()
    assert torch.equal(learned.kept, first) and not sparse_attention.mask_logits.isnan().any()
    learned.prune(learned.probs() if score == "probs" else learned.alpha(), 0.6, scope)
    assert not (learned.kept & ~first).any()
    mask = sparse_attention.thresholded_mask()
    assert mask.sparsity == pytest.approx(0.6, abs=0.06)
    assert torch.equal(mask.to_table().float(), (sparse_attention.mask_probs() > 0).float())


def test_a_pruned_search_does_not_freeze_to_less():
    model = pruned(model_of("dam_u", allow_empty_rows=True), 0.7)
    kept = model.sparse_attention.thresholded_mask().keep
    with pytest.raises(ValueError, match=r"sparsity must be at least 0\.\d+, what pruning has removed, got 0.3"):
        model.freeze(sparsity=0.3)
    assert model.sparse_attention.searching
    assert not (model.freeze(sparsity=0.8).keep & ~kept).any()


# Freezing


@pytest.mark.parametrize(
    "search, training, backend",
    [
        (search, training, backend)
        for training in (True, False)
        for search, backend in covering(
            ["dam_s", "dam_b", "dam_u", "soft", "vertical_slash"], ["sparse_auto", "sparse_eager", "sparse_sdpa"]
        )
    ],
)
def test_freezing_changes_no_result(search, training, backend):
    """Loss and gradients of one batch, padded, before and after, through whatever kernel a frozen mask gets."""
    fields = {"block_size": 16, "mask_length": 40} if search == "dam_b" else {}
    model = pruned(model_of(search, **fields), 0.2 if fields else 0.7).train(training)
    model.set_attn_implementation(backend)
    results = []
    for freeze in (False, True):
        if freeze:
            model.freeze()
            assert not model.sparse_attention.searching and not model.config.pruned
        model.zero_grad()
        output = model(**batch())
        output.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        gradients.pop("bert.sparse_attention.mask_logits", None)
        results.append((output.loss.detach(), output.logits.detach(), gradients))
    real = batch()["attention_mask"].bool()
    (loss, logits, gradients), (other_loss, other_logits, other_gradients) = results
    torch.testing.assert_close(other_loss, loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(other_logits[real], logits[real], atol=1e-5, rtol=1e-5)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_an_empty_row_gives_what_it_gives_frozen():
    model = pruned(model_of("dam_u", allow_empty_rows=True, symmetric=False), 0.95).eval()
    with torch.no_grad():
        before = model(**batch()).logits
        assert model.freeze().num_empty_rows() > 0
        torch.testing.assert_close(model(**batch()).logits, before, atol=1e-5, rtol=1e-5)


# Training


SETTINGS = {"final_sparsity": 0.65, "start": 0.2, "end": 0.7, "every": 1}


def train(folder, model, settings, checkpoint=None, **arguments):
    arguments = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "linear"} | arguments
    trainer = make_trainer(model, folder, **arguments)
    pruning = ProgressivePruning(**SETTINGS | settings)
    trainer.add_callback(pruning)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


MODELS = {
    "probs": lambda: model_of("dam_s", hidden_dropout_prob=0.1),
    "attention": lambda: model_of("dense", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
    "attention per layer": lambda: model_of("dense", share_layers=False),
}


@pytest.fixture(scope="module", params=list(MODELS))
def finished(request, tmp_path_factory):
    """A run of 10 steps with a checkpoint after each: score, folder, model, trainer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    model = MODELS[request.param]()
    settings = {"score": request.param.split()[0], "schedule": "linear"}
    return settings, MODELS[request.param], folder, model, train(folder, model, settings)


def test_run(finished):
    settings, make, folder, model, trainer = finished
    sparse_attention = model.sparse_attention
    assert not sparse_attention.searching
    assert sparse_attention.mask.sparsity == pytest.approx(0.65, abs=0.06)
    assert sparse_attention.mask.metadata["pruning"] == SETTINGS | settings | {"scope": "head"}
    assert sparse_attention.mask.num_layers == (1 if model.config.share_layers else 2)
    if settings["score"] == "probs":
        mask, probs = sparse_attention.mask, load_file(folder / MASK_PROBS_NAME)["probs"]
        probs = expand_probs(probs.unflatten(0, (mask.num_layers, mask.num_heads)), mask)
        assert torch.equal(probs > 0, mask.to_table())
    # Sparsity by step: nothing up to step 2, all from step 7 on.
    found = {}
    for step in range(1, 11):
        path = folder / f"checkpoint-{step}"
        loaded = SparseBertForMaskedLM.from_pretrained(path).sparse_attention
        found[step] = loaded.thresholded_mask() if loaded.searching else loaded.mask
        assert loaded.searching == (step < 8 and settings["score"] == "probs")
    sparsities = [found[step].sparsity for step in range(1, 11)]
    assert sparsities[:3] == [0.0] * 3 and sparsities[7:] == [sparsities[-1]] * 3
    assert all(not (found[step + 1].to_table(LENGTH) & ~found[step].to_table(LENGTH)).any() for step in range(1, 10))
    assert sparsities[4] == pytest.approx(0.26, abs=0.08)


def test_entries_are_removed_every_so_many_steps(tmp_path):
    settings = {"every": 3, "schedule": "linear", "end": 0.9}
    found = history(train(tmp_path, model_of("dam_u"), settings, save_strategy="no"), "sparsity")
    assert found[:5] == [0.0] * 5 and 0 < found[5] == found[6] == found[7] < found[8] < 0.65


@pytest.mark.parametrize("score", ["probs", "attention"])
def test_one_budget_for_all_heads(score, tmp_path):
    model = model_of(*(["dam_u"] if score == "probs" else ["dense"]), symmetric=False)
    train(tmp_path, model, {"score": score, "scope": "global"}, save_strategy="no", max_steps=4)
    mask = model.sparse_attention.mask
    removed = [sparsity for layer in mask.head_sparsities() for sparsity in layer]
    assert mask.sparsity == pytest.approx(0.65, abs=0.01) and max(removed) - min(removed) > 0.03


def test_pruning_by_attention_keeps_what_else_the_mask_says(tmp_path):
    """A kept diagonal, and a rest with its bias."""
    model = model_of("dense", diagonal="keep", rest="mean", share_layers=False, allow_empty_rows=True)
    model.set_mask(model.sparse_attention.mask.replace(rest_bias=torch.ones(1, 4)))
    train(tmp_path, model, {"score": "attention"}, max_steps=4)
    mask = SparseMask.from_pretrained(tmp_path / "checkpoint-4")
    assert mask == model.sparse_attention.mask and mask.sparsity == pytest.approx(0.65, abs=0.01)
    assert (mask.diagonal, mask.rest) == (True, "mean") and mask.rest_bias.equal(torch.ones(2, 4))
    assert mask.to_table().diagonal(dim1=-2, dim2=-1).all()


def negate_queries(model):
    """Let every query attend least to what it has attended to most."""
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight.neg_()


class Negate(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            negate_queries(model)


def test_attention_since_the_last_step_ranks_the_entries(tmp_path):
    """The mean over examples and layers, through the mask of the last step; the learning rate is 0."""
    model, examples = model_of("dense"), rows(8)
    other = copy.deepcopy(model).eval()
    settings = {"score": "attention", "schedule": "step", "end": 0.4}
    arguments = {"dataset": examples, "learning_rate": 0.0, "save_strategy": "no", "callbacks": [Negate()]}
    train(tmp_path, model, settings, **arguments)
    other.set_attn_implementation("sparse_eager")
    ids = torch.stack([example["input_ids"] for example in examples])
    index, kept = torch.arange(LENGTH**2).view(LENGTH, LENGTH), torch.ones(1, 4, LENGTH**2, dtype=torch.bool)
    for sparsity in (0.1, 0.4, 0.65):  # at steps 2, 3 and 4
        if sparsity == 0.65:
            negate_queries(other)
        with torch.no_grad():
            scores = torch.stack(other(ids, output_attentions=True).attentions).mean((0, 1)).view(kept.shape)
        kept = prune(kept, scores, index, torch.full_like(index, -1), sparsity)
        other.set_mask(SparseMask(kept.view(1, 4, LENGTH, LENGTH), LENGTH))
    assert torch.equal(model.sparse_attention.mask.to_table(), other.sparse_attention.mask.to_table())
    assert model.sparse_attention.mask.length_policy == "dense"  # that of the pattern


def test_attention_is_averaged_over_the_examples_that_have_both_tokens():
    model, inputs, scores = model_of("dense", share_layers=False).train(), batch(), AttentionScores()
    scores.watch(model)
    model(**inputs)
    found = scores.mean()
    scores.unwatch(model)
    model.eval().set_attn_implementation("sparse_eager")
    with torch.no_grad():
        attention = torch.stack(model(**inputs, output_attentions=True).attentions)  # (L, B, H, n, n)
    real = inputs["attention_mask"].float()
    both = real[:, :, None] * real[:, None, :]
    torch.testing.assert_close(found, (attention * both[:, None]).sum(1) / both.sum(0))


def test_optimizer_after_freezing(finished):
    """The weights' state goes on; the logits are gone."""
    *_, model, trainer = finished
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    state = trainer.optimizer.state
    assert {id(parameter) for parameter in state} <= held
    query = model.bert.encoder.layer[0].attention.self.query.weight
    assert state[query]["step"] == 10
    assert trainer.lr_scheduler.last_epoch == 10


@pytest.mark.parametrize(("finished", "step"), covering([*MODELS], [2, 5, 8]), indirect=["finished"])
def test_resumed_run_equals_the_uninterrupted_one(finished, step, tmp_path):
    settings, make, folder, model, trainer = finished
    resumed = make()
    torch.manual_seed(99)
    second = train(tmp_path, resumed, settings, str(folder / f"checkpoint-{step}"))
    assert second.state.global_step == 10
    assert history(second, "loss") == pytest.approx(history(trainer, "loss"), rel=1e-6)
    assert resumed.sparse_attention.mask == model.sparse_attention.mask
    for name, parameter in weights(resumed).items():
        torch.testing.assert_close(parameter, weights(model)[name], atol=1e-7, rtol=1e-6, msg=name)


def plain_trainer(folder, model, *callbacks):
    fields = {"max_steps": 4, "learning_rate": 0.0, "save_strategy": "no", "report_to": [], "use_cpu": True}
    return Trainer(model, TrainingArguments(folder, **fields), train_dataset=rows(32), callbacks=list(callbacks))


class Interrupt(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        raise KeyboardInterrupt


def test_an_interrupted_training_leaves_nothing_on_the_model(tmp_path):
    model = model_of("dense")
    with pytest.raises(KeyboardInterrupt):
        plain_trainer(tmp_path, model, ProgressivePruning(0.4, 0.0, 0.7, score="attention"), Interrupt()).train()
    assert not model.sparse_attention.weights_wanted and not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("kind", ["schedule", "attention"])
def test_a_callback_serves_a_second_training(kind, tmp_path):
    """Also after one that was interrupted, or whose mask could not be frozen."""
    callback = SearchSchedule(end=0.5) if kind == "schedule" else ProgressivePruning(0.4, 0.0, 0.7, score=kind)
    first = model_of("dense" if kind == "attention" else "dam_u")
    if kind == "schedule":
        with torch.no_grad():
            first.sparse_attention.mask_logits.fill_(-5)
        plain_trainer(tmp_path, first, callback).train()
        assert first.sparse_attention.searching
    else:
        with pytest.raises(KeyboardInterrupt):
            plain_trainer(tmp_path, first, callback, Interrupt()).train()
    second = model_of("dense" if kind == "attention" else "dam_u")
    plain_trainer(tmp_path, second, callback).train()
    assert second.sparse_attention.mask.sparsity > 0.1 if kind != "schedule" else second.sparse_attention.mask


def test_a_checkpoint_without_the_state_of_pruning_is_not_complete(finished, tmp_path):
    checkpoint = shutil.copytree(finished[2] / "checkpoint-5", tmp_path / "checkpoint-5")
    check_whole(checkpoint)
    (checkpoint / PRUNING_NAME).unlink()
    with pytest.raises(ValueError, match=f"{PRUNING_NAME} is missing: this checkpoint is not complete"):
        check_whole(checkpoint)


@pytest.mark.parametrize(
    "search, fields, settings, said",
    [
        ("soft", {}, {}, "search was 'dam_s', is 'soft'"),
        ("dam_s", {"symmetric": False}, {}, "symmetric was True, is False"),
        ("dam_s", {}, {"final_sparsity": 0.6}, "pruning.final_sparsity was 0.65, is 0.6"),
        ("dam_s", {}, {"schedule": "cubic"}, "pruning.schedule was 'linear', is 'cubic'"),
        ("dam_s", {}, None, "pruning was {.*}, is None"),
        ("dam_s", {"target_sparsity": 0.5}, None, "target_sparsity was None, is 0.5"),
        ("dense", {}, None, "search was 'dam_s', is None"),
    ],
)
@pytest.mark.parametrize("finished", ["probs"], indirect=True)
def test_another_mode_is_not_resumed(finished, search, fields, settings, said, tmp_path):
    folder = finished[2]
    with pytest.raises(ValueError, match=said):
        checkpoint = str(folder / "checkpoint-5")
        if settings is None:
            make_trainer(model_of(search, **fields), tmp_path / "new").train(resume_from_checkpoint=checkpoint)
        else:
            train(tmp_path / "new", model_of(search, **fields), finished[0] | settings, checkpoint)
    assert not any(tmp_path.rglob("*.*")), "something was written before the error"


def test_a_run_without_pruning_is_not_resumed_with_it_or_with_another_mask(tmp_path):
    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(model_of("dam_s"), tmp_path, **arguments).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="the checkpoint is not of a SparseBertTrainer that pruned"):
        train(tmp_path / "new", model_of("dam_s"), {}, checkpoint)
    make_trainer(model_of("dense"), tmp_path / "dense", **arguments).train()
    model = model_of("dense")
    model.set_mask(model.sparse_attention.mask.without_diagonal())
    with pytest.raises(ValueError, match="cannot resume with other settings"):
        make_trainer(model, tmp_path, **arguments).train(resume_from_checkpoint=str(tmp_path / "dense/checkpoint-1"))


def test_in_fine_tuning(checkpoints, glue_folder, tmp_path):
    pruning = {"final_sparsity": 0.5, "score": "attention", "every": 1}
    recipe = {
        "data": {"task": "rte", "model": checkpoints["stock"], "mask": "dense", "pruning": pruning, "max_length": 32}
        | {"data": str(glue_folder), "simple_baseline": False},
        "model": {},
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 4, "report_to": "none", "use_cpu": True},
    }
    finetune(recipe)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["mask"] == "pruned" and metrics["sparsity"] == pytest.approx(0.5, abs=0.01)
    assert SparseMask.from_pretrained(tmp_path / "run").sparsity == pytest.approx(0.5, abs=0.01)
    recipe["data"] |= {"mask": "window"}
    with pytest.raises(ValueError, match="pruning during fine-tuning needs the score 'attention' and --mask dense"):
        finetune(recipe)


# Bad input


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"final_sparsity": 1.0}, r"final_sparsity must be in \(0, 1\), got 1.0"),
        ({"final_sparsity": 0}, r"final_sparsity must be in \(0, 1\), got 0"),
        ({"final_sparsity": "much"}, "final_sparsity must be a number, got 'much'"),
        ({"final_sparsity": float("nan")}, "final_sparsity must be in"),
        ({"start": 0.7}, "start and end must be 0 <= start <= end < 1, got 0.7 and 0.6"),
        ({"end": 1.0}, "end < 1, got 0.1 and 1.0"),
        ({"schedule": "cubical"}, "schedule must be one of 'cubic', 'linear', 'step', got 'cubical'"),
        ({"score": "prob"}, "score must be one of 'probs', 'logits', 'attention', got 'prob'"),
        ({"scope": "layer"}, "scope must be one of 'head', 'global', got 'layer'"),
        ({"every": 0}, "every must be an integer of at least 1, got 0"),
        ({"finl": 1}, "unknown field of pruning 'finl'"),
        (None, "final_sparsity is missing"),
    ],
)
def test_bad_settings(settings, said):
    with pytest.raises(ValueError, match=said):
        ProgressivePruning.from_settings({} if settings is None else {"final_sparsity": 0.9} | settings)


@pytest.mark.parametrize(
    "fields, settings, said",
    [
        ({"search": "window"}, {"score": "attention"}, "pattern 'window', which removes .* already"),
        ({"search": "dense"}, {}, "score 'probs' needs a search, got pattern 'dense'"),
        ({}, {"score": "attention"}, "score 'attention' needs the pattern 'dense' instead of a search, got search"),
        ({"target_sparsity": 0.5}, {}, "target_sparsity must be unset beside final_sparsity, got 0.5"),
        ({"mask_form": "multiplicative"}, {}, "mask_form must be 'additive' or 'log'"),
        ({}, {"final_sparsity": 0.7}, "are 44 of the 144 entries .* at most 0.6944"),
        ({"search": "soft"}, {"final_sparsity": 0.92}, "are 12 of the 144 entries .* at most 0.9167"),
    ],
)
def test_model_that_cannot_be_pruned_so(fields, settings, said, tmp_path):
    fields = dict(fields)
    name = fields.pop("search", "dam_s")
    if name == "window":
        model = SparseBertForMaskedLM(SparseBertConfig(**TINY, pattern="window", mask_length=LENGTH))
    else:
        model = model_of(name, **fields)
    with pytest.raises(ValueError, match=said):
        train(tmp_path / "new", model, {"final_sparsity": 0.6} | settings)
    assert not any(tmp_path.rglob("*.*")) and not model.config.pruned


BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    "search, settings, arguments, said",
    [
        ("dense", {"score": "attention"}, {}, "which sparse_sdpa does not give: use sparse_eager or sparse_auto"),
        ("dam_s", {}, BEST, "load_best_model_at_end must be false"),
        ("dam_u", {}, {"max_steps": 1}, "at least 2 steps, got max_steps 1"),
    ],
)
def test_training_that_cannot_prune(search, settings, arguments, said, tmp_path):
    model = model_of(search)
    model.set_attn_implementation("sparse_sdpa")
    with pytest.raises(ValueError, match=said):
        train(tmp_path, model, settings, **arguments)


def test_a_model_can_be_pruned_again_after_an_interruption(tmp_path):
    model = model_of("dense")
    arguments = {"max_steps": 4}
    pruning = lambda: ProgressivePruning(0.5, score="attention", end=0.5)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        make_trainer(model, tmp_path, callbacks=[pruning(), Interrupt()], **arguments).train()
    make_trainer(model, tmp_path / "again", callbacks=[pruning()], **arguments).train()
    assert model.sparse_attention.mask.sparsity == pytest.approx(0.5, abs=0.02)
