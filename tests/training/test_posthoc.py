"""Post-hoc search: what is learned, against what, on which models; recovery; the run; bad input."""

import copy
import dataclasses
import importlib.metadata
import json
import math
import random
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import pytest
import torch
import transformers
from conftest import WORDS, contents, tokenizer_of
from huggingface_hub.errors import StrictDataclassError
from processes import run_ranks
from test_attach import base_model, config_of, head_model
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from sparsebert import attach, build_pattern, load
from sparsebert.commands import main
from sparsebert.training.finetuning.finetuning_runs import finetune
from sparsebert.training.searching.dense_agreement import agreement
from sparsebert.training.searching.matching import (
    carrier,
    learn_mask,
    random_batches,
    recover,
    running_through,
    start_from_attention,
)
from sparsebert.training.searching.matching_trainer import MatchingTrainer
from sparsebert.training.searching.objectives import OBJECTIVES, Objective, hidden_states, recorded, squared_errors
from sparsebert.training.searching.search_arguments import (
    FIELDS,
    PostHocArguments,
    check_arguments,
    given_mask,
)
from sparsebert.training.searching.search_inputs import read_inputs, read_text
from sparsebert.training.searching.search_run import agreement_table, search_post_hoc


pytestmark = pytest.mark.usefixtures("without_matplotlib", "short_times")


LENGTH, HEADS = 16, 4
ROWS = torch.randint(5, 100, (24, LENGTH), generator=torch.Generator().manual_seed(7))
DATA_FIELDS = {field.name for field in dataclasses.fields(PostHocArguments)}


def searching(name, model=None, **fields):
    fields = FIELDS | {"mask_length": LENGTH, "target_sparsity": 0.6} | fields
    return attach(model or base_model(name), fields.pop("search"), attn_implementation="sparse_sdpa", **fields)


def masked(model, mask):
    return attach(copy.deepcopy(model), mask, attn_implementation="sparse_eager")


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "albert", "t5"])
def test_running_through_is_the_model_with_that_mask(name):
    stock, model = base_model(name), searching(name, share_layers=name == "albert")
    mask = build_pattern("window", LENGTH, HEADS, window_size=2, num_global_tokens=1)
    with torch.no_grad():
        for expected, given in ((stock, None), (masked(stock, mask), mask)):
            with running_through(model, carrier(model, given)):
                states = hidden_states(model, ROWS[:2])
            torch.testing.assert_close(states[-1], expected(ROWS[:2]).last_hidden_state, atol=1e-5, rtol=1e-4)
    assert model.sparse_attention.searching


def test_batches_use_every_row_and_keep_the_last_token():
    batches = list(random_batches(ROWS, 6, 8, seed=3, shortest=8))
    first, again, other = (torch.cat(list(random_batches(ROWS, 6, 8, seed=seed))) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[: len(ROWS)], first[len(ROWS) :])
    whole = torch.cat(list(random_batches(ROWS, 6, 4, seed=3)))
    assert sorted(whole.tolist()) == sorted(ROWS.tolist())
    lengths = {batch.shape[1] for batch in batches[1::2]}
    assert all(batch.shape == (6, LENGTH) for batch in batches[::2]) and min(lengths) >= 8 and len(lengths) > 1
    ends = {tuple(row[[0, -1]].tolist()) for row in ROWS}
    assert all(tuple(row[[0, -1]].tolist()) in ends for batch in batches for row in batch)


def mean_attention(stock, batch, over):
    """Of every layer and head, over the dimensions of `(L, batch, H, n, n)` that are named."""
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(stock(batch, output_attentions=True).attentions).mean(over)


@pytest.mark.parametrize("search", ["dam_s", "signed dam_s", "dam_u", "soft"])
def test_start_is_the_mean_attention(search):
    fields = {"search": search.split()[-1], "symmetric": search == "dam_s"}
    model = searching("bert", **fields, special_tokens="none", hard=search != "soft", mask_logit_scale=10.0)
    start_from_attention(model, carrier(model), [ROWS[:8], {"input_ids": ROWS[8:16]}])
    attention = mean_attention(base_model("bert"), ROWS[:16], 1)  # (L, H, n, n)
    if search == "dam_s":
        sides = [[attention.diagonal(sign * k, -2, -1).mean(-1) for k in range(LENGTH)] for sign in (1, -1)]
        expected = sum(torch.stack(side, -1) for side in sides) / 2
    elif search == "signed dam_s":  # of i - j, the offset of a diagonal is j - i
        expected = [attention.diagonal(-distance, -2, -1).mean(-1) for distance in range(1 - LENGTH, LENGTH)]
        expected = torch.stack(expected, -1)
    else:
        expected = attention.flatten(-2)
    expected = expected.log()
    alpha = model.sparse_attention.learned.alpha().detach()
    torch.testing.assert_close(alpha, expected - expected.mean(-1, keepdim=True), atol=1e-3, rtol=1e-3)
    assert model.config._attn_implementation == "sparse_sdpa"  # as before


def test_start_from_short_inputs():
    """An offset starts with its mean attention times the length, without the special tokens at both ends."""
    model = searching("bert", special_tokens="first_last", share_layers=True, symmetric=True)
    stock = base_model("bert")
    batches = [ROWS[:4, :9], ROWS[4:8, :6]]
    start_from_attention(model, carrier(model), batches)
    totals, counts = 0, torch.zeros(LENGTH)
    for batch in batches:
        n = batch.shape[1]
        inner = n * mean_attention(stock, batch, (0, 1))[:, 1:-1, 1:-1]  # (H, n - 2, n - 2)
        sides = [[inner.diagonal(sign * k, -2, -1).sum(-1) for k in range(n - 2)] for sign in (1, -1)]
        totals = totals + torch.nn.functional.pad(sum(torch.stack(side, -1) for side in sides), (0, LENGTH - n + 2))
        counts += torch.tensor([2 * max(n - 2 - k, 0) for k in range(LENGTH)])
    alpha, seen = model.sparse_attention.learned.alpha().detach()[0], slice(0, 7)
    expected = (totals / counts)[:, seen].log()
    torch.testing.assert_close(alpha[:, seen].diff(), expected.diff(), atol=1e-3, rtol=1e-3)
    assert (alpha[:, 7:] < alpha[:, seen].amin(1, keepdim=True)).all()  # distances that no input has


def test_start_of_special_tokens_that_have_no_rows():
    """What they attend to counts like that of other tokens, and their columns do not count."""
    fields = {"special_tokens": "first_last", "special_rows": False, "symmetric": False}
    model = searching("bert", **fields, share_layers=True)
    start_from_attention(model, carrier(model), [ROWS[:8]])
    learned = mean_attention(base_model("bert"), ROWS[:8], (0, 1))[..., 1:-1]  # (H, n, n - 2), key 1 first
    expected = [learned.diagonal(-distance - 1, -2, -1) for distance in range(2 - LENGTH, LENGTH - 1)]
    expected = torch.stack([line.mean(-1) for line in expected], -1).log()
    alpha = model.sparse_attention.learned.alpha().detach()[0]
    torch.testing.assert_close(alpha, expected - expected.mean(-1, keepdim=True), atol=1e-3, rtol=1e-3)


def test_with_one_budget_all_heads_start_alike():
    stock = positional("bert")
    with torch.no_grad():  # one that attends almost evenly
        stock.encoder.layer[0].attention.self.query.weight[: stock.config.hidden_size // HEADS].mul_(0.1)
        stock.encoder.layer[0].attention.self.query.bias.zero_()
    model = searching("bert", stock, search="dam_u", sparsity_scope="global")
    start_from_attention(model, carrier(model), [ROWS[:8], ROWS[8:16]])
    removed = torch.tensor(model.sparse_attention.thresholded_mask(sparsity=0.6).head_sparsities())
    torch.testing.assert_close(removed, torch.full_like(removed, 0.6), atol=0.05, rtol=0)


def test_heads_learn_their_share_of_one_budget():
    """A head that says nothing loses entries to the others; with a budget per head it cannot."""
    stock = positional("bert")
    with torch.no_grad():
        for layer in stock.encoder.layer:
            layer.attention.self.value.weight[: stock.config.hidden_size // HEADS].zero_()
            layer.attention.self.value.bias[: stock.config.hidden_size // HEADS].zero_()
    kept = {}
    for scope in ("head", "global"):
        model = searching("bert", copy.deepcopy(stock), search="dam_u", sparsity_scope=scope, rest="none")
        dense = carrier(model)
        start_from_attention(model, dense, random_batches(ROWS, 8, 2))
        learn_mask(model, random_batches(ROWS, 8, 20), 20, 0.1, dense)
        mask = model.freeze()
        assert mask.sparsity == pytest.approx(0.6, abs=0.01)
        always = 4 * (LENGTH - 1) / LENGTH**2  # first and last token
        kept[scope] = 1 - torch.tensor(mask.head_sparsities()) - always
    torch.testing.assert_close(kept["head"], torch.full_like(kept["head"], 0.4 - always), atol=0.02, rtol=0)
    assert (kept["global"][:, 0] < 0.6 * kept["global"][:, 1:].mean(-1)).all()


def test_what_was_pruned_stays_removed():
    model = searching("bert")
    with torch.no_grad():
        logits = model.sparse_attention.mask_logits
        model.sparse_attention.learned.prune(logits, 0.5)
    model.sparse_attention.start_pruning()
    removed = logits.isinf()
    learn_mask(model, random_batches(ROWS, 8, 2), 2, 0.1)
    assert removed.any() and torch.equal(logits.isinf(), removed) and not logits.isnan().any()


def positional(name):
    """A model whose attention depends on positions more than on the text."""
    model = base_model(name)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.mul_(8)
    return model


@contextmanager
def computed_dtypes(model):
    """The dtypes in which the linear layers of a model compute inside the block."""
    with recorded((m for m in model.modules() if isinstance(m, torch.nn.Linear)), outputs := []):
        yield (found := set())
    found.update(output.dtype for output in outputs)


@pytest.mark.parametrize(("name", "shared", "bf16"), [("roberta", False, True), ("distilbert", True, False)])
def test_search_beats_random(name, shared, bf16):
    stock = positional(name)
    model = searching(name, copy.deepcopy(stock), search="dam_u", share_layers=shared)
    dense = carrier(model)
    start_from_attention(model, dense, random_batches(ROWS, 8, 2))
    with computed_dtypes(model) as computed:
        learn_mask(model, random_batches(ROWS, 8, 25), 25, 0.1, dense, bf16=bf16)
    assert computed == {torch.bfloat16 if bf16 else torch.float32}
    mask = model.freeze()
    assert mask.num_layers == (1 if shared else 3) and abs(mask.sparsity - 0.6) < 0.005
    masks = {seed: build_pattern("random", LENGTH, HEADS, seed=seed, sparsity=0.6) for seed in range(4)}
    report = agreement(model, {"learned": None} | masks, ROWS, stock)
    errors = [numbers["layer_error"][-1] for numbers in report.values()]
    assert errors[0] < 0.8 * min(errors[1:])
    weights = model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in stock.state_dict().items())


def test_norms_are_learned_only_when_asked():
    stock, model = base_model("bert"), searching("bert")
    learn_mask(model, random_batches(ROWS, 8, 3), 3, 0.1, train_norms=True)
    changed = {name for name, value in stock.named_parameters() if not torch.equal(model.get_parameter(name), value)}
    assert changed and all("LayerNorm" in name for name in changed)
    # Adam moves by no more than the learning rate, which is a hundredth of that of the mask.
    steps = [(value - model.get_parameter(name)).abs().max().item() for name, value in stock.named_parameters()]
    assert max(steps) < 3 * 0.1 / 100 * 1.01


def test_norms_of_the_dense_model_stay(monkeypatch):
    """What is to be matched does not move with the norms that are learned."""
    model, layers, targets = searching("bert"), OBJECTIVES["layers"], []

    def record(model, batch):
        states = layers.record(model, batch)
        if not torch.is_grad_enabled():
            targets.append(states[-1])
        return states

    monkeypatch.setitem(OBJECTIVES, "layers", Objective(record, layers.loss))
    learn_mask(model, [ROWS[:4]] * 3, 3, 0.1, train_norms=True, objective="layers")
    assert len(targets) == 3 and torch.equal(targets[0], targets[-1])


def test_rates_and_progress_of_a_search(monkeypatch):
    """With a gradient that does not change, Adam moves alpha by the learning rate, whatever its scale."""
    model, seen = searching("bert", mask_logit_scale=10.0), []
    sparse_attention = model.sparse_attention

    def record(_, batch):
        if torch.is_grad_enabled():
            seen.append((sparse_attention.progress.item(), sparse_attention.learned.alpha().mean().item()))
        return (sparse_attention.mask_logits,)

    monkeypatch.setitem(OBJECTIVES, "logits", Objective(record, lambda ours, theirs: ours[0].sum()))
    learn_mask(model, [ROWS[:1]] * 20, 20, 0.1, objective="logits")
    progress, alpha = torch.tensor(seen, dtype=torch.float64).unbind(1)
    assert progress.tolist() == pytest.approx([step / 20 for step in range(1, 21)])
    rates = [0.1 * max(1 - step / 20, 0.1) for step in range(19)]  # to a tenth
    assert (-alpha.diff()).tolist() == pytest.approx(rates, rel=1e-3)


def test_rates_of_a_recovery(monkeypatch):
    model, seen = masked(base_model("bert"), build_pattern("window", LENGTH, HEADS)), []
    bias = model.encoder.layer[0].output.dense.bias

    def record(*_):
        if torch.is_grad_enabled():
            seen.append(bias.mean().item())
        return (bias,)

    monkeypatch.setitem(OBJECTIVES, "bias", Objective(record, lambda ours, theirs: ours[0].sum()))
    recover(model, model, [ROWS[:1]] * 20, 20, 0.1, "bias")
    rates = [0.05, *(0.1 * (20 - step) / 18 for step in range(1, 20))]  # after a tenth the highest, at the end 0
    rates[1] = 0.1
    seen = torch.tensor([*seen, bias.mean().item()], dtype=torch.float64)
    assert (-seen.diff()).tolist() == pytest.approx(rates, rel=1e-3)


def test_agreement():
    stock = head_model("bert")
    model = attach(copy.deepcopy(stock), "dense", mask_length=LENGTH)
    tokenizer = tokenizer_of(WORDS)
    window = build_pattern("window", LENGTH, HEADS, window_size=1)
    report = agreement(model, {"own": None, "window": window}, ROWS, stock, tokenizer)
    assert report["own"]["cosine"] == pytest.approx(1, abs=1e-5) and max(report["own"]["layer_error"]) < 1e-3
    assert report["own"]["mlm_loss"] > 0 and report["window"]["mlm_loss"] != report["own"]["mlm_loss"]
    assert report["window"]["cosine_5"] < report["window"]["cosine"] < 1
    states, targets = hidden_states(masked(stock, window), ROWS[:16]), hidden_states(stock, ROWS[:16])
    errors = agreement(model, {"window": window}, ROWS[:16], stock)["window"]["layer_error"]
    torch.testing.assert_close(torch.tensor(errors), squared_errors(states, targets).sqrt())
    again, other = (
        agreement(model, {"own": None}, ROWS, stock, tokenizer, seed)["own"]["mlm_loss"] for seed in (0, 1)
    )
    assert again == pytest.approx(report["own"]["mlm_loss"], rel=1e-6) and abs(other - again) > 1e-4
    special = torch.full((1, LENGTH), tokenizer.cls_token_id)  # which is never masked
    assert "mlm_loss" not in agreement(model, {"own": None}, special, stock, tokenizer)["own"]


def test_rows_count_alike_in_batches_of_any_size():
    """Also where the dense model has other weights."""
    stock = base_model("bert")
    model = masked(stock, build_pattern("window", LENGTH, HEADS, window_size=1))
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(2)
    batches, cosines, errors = [ROWS[:3], ROWS[3:20], ROWS[20:]], [], torch.zeros(3)
    found = agreement(model, {"own": None}, batches, stock)["own"]
    with torch.no_grad():
        for batch in batches:
            states, targets = hidden_states(model, batch), hidden_states(stock, batch)
            cosines += torch.cosine_similarity(states[-1].mean(1), targets[-1].mean(1))
            errors += len(batch) * squared_errors(states, targets)
    cosines = torch.stack(cosines)
    assert found["cosine"] == pytest.approx(cosines.mean().item(), abs=1e-5)
    assert found["cosine_5"] == pytest.approx(cosines.quantile(0.05).item(), abs=1e-5)
    assert found["layer_error"] == pytest.approx((errors / len(ROWS)).sqrt().tolist(), rel=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_recovery(bf16):
    stock = base_model("bert")
    model = masked(stock, build_pattern("window", LENGTH, HEADS, window_size=1))
    before = agreement(model, {"own": None}, ROWS, stock)["own"]
    with computed_dtypes(model) as computed:
        recover(model, stock, random_batches(ROWS, 8, 30), 30, 1e-3, bf16=bf16)
    assert computed == {torch.bfloat16 if bf16 else torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    after = agreement(model, {"own": None}, ROWS, stock)["own"]
    assert after["layer_error"][-1] < 0.7 * before["layer_error"][-1]


def test_recovery_through_masks_that_grow_sparser(monkeypatch):
    stock = base_model("bert")
    model = masked(stock, build_pattern("dense", LENGTH, HEADS))
    last = build_pattern("window", LENGTH, HEADS, window_size=1)
    seen, masks = [], {2: build_pattern("window", LENGTH, HEADS, window_size=3), 4: last}
    loss = lambda *_: seen.append(model.sparse_attention.mask.sparsity) or OBJECTIVES["last"].loss(*_)  # noqa: E731
    monkeypatch.setitem(OBJECTIVES, "seen", Objective(OBJECTIVES["last"].record, loss))
    recover(model, stock, random_batches(ROWS, 8, 6), 6, 1e-3, "seen", masks)
    assert seen == [0, 0, *[masks[2].sparsity] * 2, *[last.sparsity] * 2] and model.sparse_attention.mask == last


def test_library_errors():
    with pytest.raises(ValueError, match="frozen"):
        learn_mask(masked(base_model("bert"), "window"), [], 0, 0.1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, word_tokenizer):
    """A RoBERTa with an MLM head, of 39 tokens."""
    folder = tmp_path_factory.mktemp("model")
    head_model("roberta").save_pretrained(folder)
    word_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = torch.randint(0, 90, (300, 24), generator=torch.Generator().manual_seed(1)).tolist()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(" ".join(f"w{word}" for word in row) for row in words))
    return path


@pytest.fixture
def short_times(monkeypatch):
    """Inference is timed on few tokens."""
    monkeypatch.setattr("sparsebert.training.searching.dense_agreement.TIMED_TOKENS", 256)


def recipe_of(model, text, output, **fields):
    """A recipe of these fields; those of `data` are told by their names."""
    usual = {"max_length": 32, "target_sparsity": 0.7, "max_validation_tokens": 256, "patterns": False, "timed": False}
    if fields.get("rest", "none" if fields.get("mask") else "mean") != "none":
        usual |= {"rest_steps": 2}
    fields = usual | ({} if fields.get("mask") else {"steps": 3}) | fields
    recipe = {"data": {"model": str(model), "data": str(text), "validation": str(text), "output_dir": str(output)}}
    recipe["data"] |= {name: value for name, value in fields.items() if name in DATA_FIELDS}
    return recipe | {"model": {name: value for name, value in fields.items() if name not in DATA_FIELDS}}


def search(*places, **fields):
    return search_post_hoc(recipe_of(*places, **fields))


def refuse(message, model, text, output, **fields):
    with pytest.raises((ValueError, OSError, StrictDataclassError), match=message):
        search(model, text, output, **fields)
    assert not output.exists()


def test_run(model_folder, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    fields = {"bf16": True, "search": "dam_b", "block_size": 16, "patterns": True, "timed": True}
    metrics = search(model_folder, text, tmp_path / "out", recover=2, **fields)
    assert metrics == json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["search_outcome"]["asked"] == 0.7 and metrics["seconds"]["search"] > 0
    assert metrics["inference_seconds"].keys() == {"dense", "masked"}
    names = ["dense", "learned", "dense model's attention", "strided", "random", "window", "learned, recovered"]
    assert set(names) <= set(metrics["agreement"]) == set(metrics["sparsity"])
    assert metrics["agreement"]["dense"]["cosine"] == pytest.approx(1, abs=1e-5)
    assert all(numbers["mlm_loss"] > 0 for numbers in metrics["agreement"].values())
    assert abs(metrics["sparsity"]["window"] - metrics["sparsity"]["learned"]) < 0.03
    said = capsys.readouterr().err
    assert (
        "search: step 3 of 3, " in said
        and "rest: step 2 of 2, " in said
        and "recovery: step 2 of 2, " in said
        and "about 0 s left" in said
    )
    assert main(["report", str(tmp_path / "out")]) == 0  # of the mask
    assert "Masks" in capsys.readouterr().out
    table = agreement_table(metrics)
    assert [row[0] for row in table.rows] == list(metrics["agreement"]) and "MLM loss" in table.columns
    assert "| learned, recovered |" in table.markdown() and "manual masks" in table.markdown()
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"heads.png", "mean_probs.png", "offset_profile.png"}
    model = load(tmp_path / "out")
    assert type(model).__name__ == "RobertaForMaskedLM" and not model.sparse_attention.searching
    assert model.sparse_attention.mask.metadata["search"] == "dam_b"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").mask_token == "[MASK]"
    assert AutoModel.from_pretrained(tmp_path / "out").sparse_attention.mask == model.sparse_attention.mask


def test_a_mask_for_a_gpu(model_folder, text, tmp_path):
    """Whole tiles, of another size or sparsity if these are named."""
    quick = {"device_target": "gpu", "target_sparsity": 0.5}
    metrics = search(model_folder, text, tmp_path / "out", **quick, block_size=16, steps=1)
    mask = load(tmp_path / "out").sparse_attention.mask
    assert (mask.form, mask.symmetric, mask.block_size) == ("blocks", False, 16) and metrics["live_tiles"] == 1.0
    plan = metrics["plan"]
    assert (plan["device"], plan["dtype"], plan["length"]) == ("cuda", "bfloat16", 32) and len(plan["choices"]) == 3
    options = {"model": str(model_folder), "data": str(text), "output_dir": str(tmp_path / "out2"), "max_length": 32}
    options = PostHocArguments(**options, device_target="gpu")
    assert check_arguments(options, {"block_size": 16})[1]["target_sparsity"] == 0.8
    with pytest.raises(ValueError, match="device_target 'gpu' has no meaning with search 'dam_s'"):
        check_arguments(options, {"search": "dam_s", "target_sparsity": 0.7})


def test_a_checkpoint_that_does_not_name_its_class(model_folder, text, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    del config["architectures"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    search(tmp_path / "model", text, tmp_path / "out", steps=1)
    assert type(load(tmp_path / "out")).__name__ == "RobertaModel"


def test_the_recipe_of_the_demo(model_folder, text, tmp_path, capsys):
    flags = {"model": model_folder, "data": text, "output_dir": tmp_path / "out", "max_length": 32}
    flags |= {"steps": 2, "max_validation_tokens": 256, "target_sparsity": 0.7}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert main(["search", "demo_minilm", *words]) == 0
    shown = capsys.readouterr().out
    assert "times as fast" in shown and "inference by sparse_auto (32 tokens, cpu, float32): sparse_" in shown


def test_recovery_from_a_lower_sparsity_and_one_budget_for_all_heads(model_folder, text, tmp_path, monkeypatch):
    begun = {}

    def recover_and_record(*arguments, masks, **fields):
        begun.update({step: mask.sparsity for step, mask in masks.items()})
        return recover(*arguments, masks=masks, **fields)

    monkeypatch.setattr("sparsebert.training.searching.search_run.recover", recover_and_record)
    fields = {"recover": 16, "recover_from": 0.3, "recover_objective": "tokens", "sparsity_scope": "global"}
    metrics = search(model_folder, text, tmp_path / "out", objective="attention", **fields)
    mask = load(tmp_path / "out").sparse_attention.mask
    assert metrics["sparsity"]["learned, recovered"] == pytest.approx(mask.sparsity, abs=1e-6)
    assert mask.sparsity == pytest.approx(0.7, abs=0.01)
    assert len({sparsity for layer in mask.head_sparsities() for sparsity in layer}) > 1
    assert mask.metadata["search"] == "dam_s" and metrics["objectives"] == ["attention", "tokens"]
    grown = {step: 0.7 - 0.4 * (1 - step / 8) ** 3 for step in range(9)}  # in the first half
    assert begun == pytest.approx(grown, abs=0.01)


class Killed(BaseException):
    pass


# What is searched, with the steps before which a run is killed: of the search, and 100 later of the recovery.
KILLED = [
    (
        {"recover": 8, "recover_from": 0.3, "train": "norms", "noise_scale": 1.0, "hard": False, "rest": "mean"},
        (3, 102, 107),
    ),
    pytest.param({"sparsity_scope": "head", "steps": 4, "recover": 0}, (3,), marks=pytest.mark.slow),
    pytest.param({"steps": 0, "recover": 5, "recover_objective": "tokens"}, (103,), marks=pytest.mark.slow),
    ({"mask": "random", "recover": 5, "bf16": True, "rest": "mean"}, (104,)),
]


@pytest.mark.parametrize(("fields", "places"), KILLED, ids=["both", "search", "no steps", "given"])
def test_a_search_goes_on_where_it_was_killed(model_folder, text, tmp_path, monkeypatch, fields, places):
    """At the end all is equal to the bit, and no checkpoint is left."""
    fields = {"save_steps": 2} | ({} if "mask" in fields else {"steps": 6}) | fields
    whole, killed = tmp_path / "whole/run", tmp_path / "killed/run"
    expected = search(model_folder, text, whole, **fields)
    step = MatchingTrainer.training_step
    for number, place in enumerate(places):

        def training_step(trainer, *args, place=place):
            if trainer.state.global_step + 100 * (trainer.args.max_grad_norm > 0) == place:
                raise Killed
            return step(trainer, *args)

        monkeypatch.setattr(MatchingTrainer, "training_step", training_step)
        with pytest.raises(Killed):
            search(model_folder, text, killed, resume=number > 0, **fields)
    with pytest.raises(FileExistsError, match="holds an unfinished run, complete up to checkpoint-.*: add --resume"):
        search(model_folder, text, killed, **fields)
    begun = []
    if places[-1] > 100:  # the rest is not trained anew
        monkeypatch.setattr("sparsebert.training.searching.search_run.train_rest", None)

    def first(trainer, *args):
        begun.append(trainer.state.global_step + 100 * (trainer.args.max_grad_norm > 0))
        return step(trainer, *args)

    monkeypatch.setattr(MatchingTrainer, "training_step", first)
    found = search(model_folder, text, killed, resume=True, **fields)
    assert begun[0] == places[-1] // 2 * 2
    assert found.pop("seconds").keys() == expected.pop("seconds").keys() and found == expected
    files, others = (contents(folder) for folder in (killed, whole))
    timed = {Path("metrics.json"), Path("README.md")}
    assert files.keys() == others.keys() and {path for path in files if files[path] != others[path]} <= timed


@pytest.mark.parametrize("phase", ["search", "recovery"])
def test_a_search_that_diverges_stops(model_folder, text, tmp_path, monkeypatch, capsys, phase):
    objective = OBJECTIVES["pooled"]
    loss = lambda *tensors: objective.loss(*tensors) * (math.nan if phase == "search" else 1)  # noqa: E731
    monkeypatch.setitem(OBJECTIVES, "pooled", dataclasses.replace(objective, loss=loss))
    words = ["search", "--model", model_folder, "--data", text, "--max_length", 32, "--target_sparsity", 0.7]
    words += ["--steps", 2, "--recover", 8, "--recover_learning_rate", 1e6, "--max_validation_tokens", 256]
    assert main([*map(str, words), "--save_steps", "1", "--output_dir", str(tmp_path / "out")]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"step \d: .*(is not finite|is that of|is nan)", line) and "the training stops before" in line
    assert ("checkpoint-" in line) == (phase == "recovery")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_recovery_that_diverged_is_done_anew_after_its_search(model_folder, text, tmp_path, monkeypatch):
    """With another learning rate, until it has a checkpoint of its own."""
    fields, output = {"steps": 2, "recover": 8, "save_steps": 100}, tmp_path / "out"
    with pytest.raises(FloatingPointError, match=r"the last checkpoint is \S*out/checkpoint-2$"):
        search(model_folder, text, output, recover_learning_rate=1e6, **fields)
    step = MatchingTrainer.training_step

    def training_step(trainer, *args):
        assert trainer.args.max_grad_norm > 0, "the search is not done anew"
        if trainer.state.global_step == 5:
            raise Killed
        return step(trainer, *args)

    monkeypatch.setattr(MatchingTrainer, "training_step", training_step)
    with pytest.raises(Killed):
        search(model_folder, text, output, resume=True, recover_learning_rate=1e-4, **fields | {"save_steps": 4})
    with pytest.raises(ValueError, match=r"another recipe:.*\n  data.recover_learning_rate: 0.0001 -> 1e-05$"):
        search(model_folder, text, output, resume=True, recover_learning_rate=1e-5, **fields)
    with pytest.raises(ValueError, match=r"another recipe:.*\n  data.recover: 8 -> 0\n"):
        search(model_folder, text, output, resume=True, **fields | {"recover": 0})


def test_a_model_that_diverged_is_refused(model_folder, text, tmp_path, word_tokenizer):
    """Also without steps, in which it would be found."""
    model = head_model("roberta")
    with torch.no_grad():
        model.lm_head.bias[3] = math.inf
    model.save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(FloatingPointError, match="model: lm_head.bias is not finite"):
        search(tmp_path / "model", text, tmp_path / "out", steps=0)
    assert not (tmp_path / "out").exists()


def test_recovery_through_a_given_mask(model_folder, text, tmp_path):
    metrics = search(model_folder, text, tmp_path / "window", mask="window", recover=3)
    assert list(metrics["agreement"]) == ["dense", "given", "given, recovered"]
    assert metrics["recover_learning_rate"] == 3e-5
    model = load(tmp_path / "window")
    mask = model.sparse_attention.mask
    assert mask.metadata["pattern"] == "window" and mask.sparsity == pytest.approx(0.7, abs=0.03)
    assert not (tmp_path / "window/mask_probs.safetensors").exists() and metrics["search_outcome"] is None
    fields = {"mask": str(tmp_path / "window"), "target_sparsity": None}
    fields |= {"mask": str(tmp_path), "mask_subfolder": "window"}
    search(model_folder, text, tmp_path / "again", recover=3, **fields)
    again = load(tmp_path / "again")
    assert again.sparse_attention.mask == mask
    fields["recover"] = 3
    refuse("rest_steps 7 has no meaning without a rest", model_folder, text, tmp_path / "new", rest_steps=7, **fields)
    refuse("objective 'last' has no meaning", model_folder, text, tmp_path / "new", objective="last", **fields)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_given_mask_with_a_rest_needs_no_recovery(model_folder, text, tmp_path):
    fields = {"mask": "window", "rest": "mean"}
    metrics = search(model_folder, text, tmp_path / "out", patterns=True, **fields)
    model, dense = load(tmp_path / "out"), AutoModel.from_pretrained(model_folder)
    mask = model.sparse_attention.mask
    assert (
        mask.rest == "mean"
        and mask.rest_bias.abs().max() > 0
        and len(mask.rest_bias) == dense.config.num_hidden_layers
    )
    weights = model.base_model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in dense.state_dict().items() if name in weights)
    assert {"dense", "given", "bigbird"} <= metrics["agreement"].keys() and metrics["rest_steps"] == 2
    assert "trained for the given mask alone" in agreement_table(metrics).markdown()
    own = {"mask": str(tmp_path / "out"), "target_sparsity": None, "rest_steps": 2, "objective": "pooled"}
    search(model_folder, text, tmp_path / "again", **own)
    assert load(tmp_path / "again").sparse_attention.mask == mask
    metrics = search(model_folder, text, tmp_path / "calibrated", rest_steps=0, **fields)
    calibrated = load(tmp_path / "calibrated").sparse_attention.mask
    assert 0.01 < (mask.rest_bias - calibrated.rest_bias).abs().max() < 0.5
    assert "alone" not in agreement_table(metrics).markdown()


def test_a_mask_of_another_length_than_the_inputs(model_folder, text, tmp_path):
    """What is reported, and what other masks are matched to, is what it removes from inputs of that length."""
    search(model_folder, text, tmp_path / "one", steps=0, rest="none")
    mask = load(tmp_path / "one").sparse_attention.mask
    fields = {"mask": str(tmp_path / "one"), "target_sparsity": None, "max_length": 16, "patterns": True, "recover": 1}
    metrics = search(model_folder, text, tmp_path / "other", **fields)
    removed = metrics["sparsity"]
    assert removed["given"] == pytest.approx(1 - mask.density_at(16), abs=1e-5)
    assert removed["given"] == pytest.approx(metrics["plan"]["sparsity"], abs=1e-5)
    assert abs(removed["given"] - mask.sparsity) > 0.02 > abs(removed["given"] - removed["random"])


def test_half_precision_is_trained_in_float32(model_folder, text, tmp_path):
    for name, dtype in (("half", torch.float16), ("full", torch.float32)):
        model = AutoModelForMaskedLM.from_pretrained(model_folder).half().to(dtype)
        model.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / name)
        search(tmp_path / name, text, tmp_path / f"{name} out", steps=2, recover=3)
    half, full = (load(tmp_path / f"{name} out") for name in ("half", "full"))
    assert half.dtype == torch.float32
    assert all(torch.equal(value, full.state_dict()[name]) for name, value in half.state_dict().items())


def test_rows_that_keep_nothing_do_not_cost_the_search(model_folder, text, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("sparsebert.training.searching.search_run.logger.warning", said.append)
    fields = {"special_tokens": "none", "rest": "none", "target_sparsity": 0.95, "steps": 3}
    search(model_folder, text, tmp_path / "out", **fields)
    mask = load(tmp_path / "out").sparse_attention.mask
    assert "keep nothing" in said[0] and mask.sparsity == pytest.approx(0.95, abs=0.01)
    assert f"{mask.num_empty_rows()} mask rows keep nothing" in said[-1]


def test_what_changes_no_mask_may_change_when_a_search_goes_on(model_folder, text, tmp_path, monkeypatch):
    step = MatchingTrainer.training_step

    def training_step(trainer, *args):
        if trainer.state.global_step == 3:
            raise Killed
        return step(trainer, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MatchingTrainer, "training_step", training_step)
        search(model_folder, text, tmp_path / "out", steps=4, save_steps=2)
    fields = {"resume": True, "allow_empty_rows": True, "skip_padding": True}
    search(model_folder, text, tmp_path / "out", steps=4, save_steps=2, **fields)


def test_the_dense_model_has_no_picture_of_its_mask(model_folder, text, tmp_path):
    fields = {"mask": "dense", "target_sparsity": None}
    search(model_folder, text, tmp_path / "dense", recover=1, **fields)
    assert not list((tmp_path / "dense").glob("*.png"))
    assert "![" not in (tmp_path / "dense/README.md").read_text()


def test_a_search_that_multiplies(model_folder, text, tmp_path):
    """By another backend than other searches, and without a rest."""
    search(model_folder, text, tmp_path / "out", mask_form="multiplicative", rest_steps=40, steps=1)
    assert load(tmp_path / "out").sparse_attention.mask.rest == "none"


def test_given_random_masks_differ_by_seed(model_folder):
    config = transformers.AutoConfig.from_pretrained(model_folder)
    options = [PostHocArguments(mask="random_drop", max_length=32, seed=seed) for seed in (0, 0, 1)]
    masks = [given_mask(each, {}, config) for each in options]
    assert masks[0] == masks[1] != masks[2]


def test_one_mask_where_layers_share_their_weights(word_tokenizer, text, tmp_path):
    base_model("albert").save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    metrics = search(tmp_path / "model", text, tmp_path / "out", train="norms")
    assert "MLM loss" not in agreement_table(metrics).columns
    mask = load(tmp_path / "out").sparse_attention.mask
    assert mask.num_layers == len(mask.rest_bias) == 1
    with pytest.raises(ValueError, match="share_layers must be true"):
        search(tmp_path / "model", text, tmp_path / "new", share_layers=False)


@pytest.mark.parametrize(
    ("fields", "rest"),
    [
        ({"search": "dam_s"}, "mean"),
        ({"search": "dam_s", "mask_form": "multiplicative", "rest_steps": 40}, "none"),
        ({"search": "vertical_slash", "rest": "none"}, "none"),
    ],
)
def test_no_steps_keep_what_the_dense_model_attends_to(model_folder, text, tmp_path, fields, rest):
    """With a rest, unless it is told otherwise or the rest has no meaning."""
    if rest != "none":
        fields |= {"rest_steps": 0}
    metrics = search(model_folder, text, tmp_path / "out", steps=0, **fields)
    found = metrics["agreement"]
    assert found["learned"]["layer_error"] == pytest.approx(found["dense model's attention"]["layer_error"])
    mask = load(tmp_path / "out").sparse_attention.mask
    assert metrics["search_outcome"]["warnings"] == [] and (mask.num_layers, mask.rest) == (3, rest)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_sparsity": 0.99}, "target_sparsity must be at most .* got 0.99"),
        ({"target_sparsity": None}, "--target_sparsity is needed"),
        ({"search": "dam_x"}, "dam_x"),
        ({"pattern": "window"}, "pattern .*has no meaning"),
        ({"train": "bias"}, "train must be one of"),
        ({"max_length": 40}, "at most the model's 39 positions, got 40"),
        ({"batch_size": 100_000}, "too few for a batch of 100000"),
        ({"validation": "text.pdf"}, "validation: .*'text.pdf'"),
        ({"shortest": 64}, "shortest must be from 8 to max_length"),
        ({"mask": "window"}, "recover must be at least 1 if mask is given"),
        ({"mask": "window", "recover": 2, "search": "dam_s"}, "model.search .*has no meaning here: the mask is given"),
        ({"objective": "answers"}, "objective 'answers' has no meaning here: RobertaForMaskedLM has no head"),
        ({"mask": "window", "recover": 2, "mask_revision": "v1"}, "no meaning for the pattern 'window'"),
        ({"mask_subfolder": "dam_s-90"}, "mask_subfolder 'dam_s-90' has no meaning without mask"),
        ({"mask": "no_diag", "recover": 2}, "target_sparsity .*has no meaning with mask 'no_diag'"),
        ({"recover_from": 0.3}, "recover_from .*has no meaning without recover"),
        ({"mask": "window", "recover": 2, "learning_rate": 0.1}, "learning_rate .*has no meaning with mask"),
        ({"mask": "window", "recover": 2, "device_target": "gpu"}, "device_target .*has no meaning with mask"),
        ({"device_target": "tpu"}, "device_target must be one of .cpu., .gpu., got .tpu."),
        ({"pack": False, "shortest": 16}, "shortest 16 has no meaning but for packed text"),
        ({"rest": "none", "rest_steps": 3}, "rest_steps 3 has no meaning without a rest"),
        ({"mask": "window", "recover": 2, "rest_steps": 3}, "rest_steps 3 has no meaning without a rest"),
        ({"mask": "window", "recover": 2, "objective": "layers"}, "objective 'layers' has no meaning without a sea"),
        ({"steps": 0, "rest": "none", "objective": "last"}, "objective 'last' has no meaning without a search"),
        ({"mask_form": "multiplicative", "rest_steps": 3}, "rest_steps 3 has no meaning without a rest"),
        ({"rest_steps": -1}, "rest_steps must be .*at least 0"),
        ({"steps": 0, "rest": "none", "shortest": 16}, "shortest 16 has no meaning but for packed text in steps"),
        ({"steps": 0, "rest_steps": 0, "bf16": True}, "bf16 true has no meaning without steps of"),
        ({"mask": "window", "rest": "mean", "rest_steps": 0, "bf16": True}, "bf16 true has no meaning without steps"),
        ({"recover": 2, "recover_from": 0.7}, "recover_from must be at least 0 and below target_sparsity .*got 0.7"),
        ({"mask": "no/such/mask", "recover": 2}, "mask: there is no folder 'no/such/mask'"),
        ({"data": None}, "--data is needed"),
        ({"output_dir": None}, "--output_dir is needed"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors(model_folder, text, tmp_path, fields, message):
    refuse(message, model_folder, text, tmp_path / "out", **fields)


# Each of two processes runs a search, and is killed before the step of the recovery that the folder is named after.
RANKS = """
import signal
from pathlib import Path
sys.modules["matplotlib"] = None
from sparsebert.training.searching.matching_trainer import MatchingTrainer
from sparsebert.training.searching.search_run import search_post_hoc

recipe, compute_loss = json.loads(Path(folder, "recipe.json").read_text()), MatchingTrainer.compute_loss
found |= {"rows": [], "written": []}


def counted(trainer, model, inputs, *args, **kwargs):
    if trainer.args.max_grad_norm and str(trainer.state.global_step) == Path(folder).name:
        os.kill(os.getpid(), signal.SIGKILL)
    found["rows"].append(len(inputs["input_ids"]))
    return compute_loss(trainer, model, inputs, *args, **kwargs)


MatchingTrainer.compute_loss = counted
try:
    search_post_hoc(recipe | {"data": recipe["data"] | {"batch_size": 3}})
except ValueError as error:
    found["error"] = str(error)
sys.addaudithook(lambda event, values: found["written"].append(str(values[0])) if event == "os.rename" else None)
found["metrics"] = search_post_hoc(recipe)
"""


def test_two_processes_are_one_and_go_on_where_they_were_killed(model_folder, text, tmp_path):
    """To rounding, with the same batches: also an error that is relative to all of a batch."""
    fields = {"steps": 4, "batch_size": 4, "recover": 6, "recover_objective": "layers", "save_steps": 2}
    fields |= {"train": "norms", "recover_learning_rate": 1e-3}
    expected = search(model_folder, text, tmp_path / "one/run", **fields)
    recipe = recipe_of(model_folder, text, tmp_path / "two/run", **fields)
    for folder in (tmp_path / "3", tmp_path / "none"):  # killed, resumed
        folder.mkdir()
        (folder / "recipe.json").write_text(json.dumps(recipe))
        recipe["data"]["resume"] = True
        if folder.name == "3":
            with pytest.raises(AssertionError):
                run_ranks(RANKS, folder)
            assert list(tmp_path.glob("two/run/checkpoint-4/recovery/checkpoint-2"))
    ranks = run_ranks(RANKS, folder)
    assert [rank["rows"] for rank in ranks] == [[2] * 4] * 2  # the last steps of the recovery, half of the batches
    assert all(rank["error"] == "batch_size must be a multiple of the 2 processes, got 3" for rank in ranks)
    assert ranks[0]["written"] and not ranks[1]["written"]
    metrics = [rank["metrics"] for rank in ranks]
    assert metrics[0] == metrics[1] == json.loads((tmp_path / "two/run/metrics.json").read_text())
    for name, numbers in expected["agreement"].items():
        found = metrics[0]["agreement"][name]
        assert found == {key: pytest.approx(value, abs=1e-4) for key, value in numbers.items()}
    runs = [tmp_path / name / "run" for name in ("one", "two")]
    assert contents(runs[0]).keys() == contents(runs[1]).keys()
    first, second = map(load, runs)
    assert first.sparse_attention.mask.replace(rest_bias=None) == second.sparse_attention.mask.replace(rest_bias=None)
    state = second.state_dict()
    for name, weight in first.state_dict().items():
        torch.testing.assert_close(state[name], weight, atol=1e-4, rtol=1e-4)


def test_engines_that_shard_are_refused(model_folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsebert.training.searching.search_run.engine_of", lambda training: "FSDP2")
    refuse("a search cannot run under FSDP2, which shards the model", model_folder, text, tmp_path / "out")


def test_errors_of_model_and_folder(checkpoints, model_folder, text, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        search(model_folder, text, tmp_path / "out")
    stock = transformers.BertForMaskedLM.from_pretrained(checkpoints["stock"])
    attach(stock, "dense", mask_length=32).save_pretrained(tmp_path / "attached")
    gpt2 = transformers.GPT2Config(vocab_size=100, n_embd=8, n_head=2, n_layer=1)
    gpt2.save_pretrained(tmp_path / "weightless")
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    for model, message in (
        (checkpoints["window"], "already has a mask.*pretrain continue --base_model"),
        (tmp_path / "attached", "already has a mask.*detach"),
        (tmp_path / "weightless", "model: there is no model.safetensors or .* in the folder '.*weightless'"),
        (tmp_path / "gpt2", "'gpt2' cannot carry a mask"),
    ):
        refuse(message, model, text, tmp_path / "new")
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    refuse("too few for one row", model_folder, tmp_path / "short.txt", tmp_path / "new")


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """RTE: which of two words is in a pair of texts of different lengths."""
    folder = tmp_path_factory.mktemp("rte")
    draw = random.Random(0)
    for split, count in (("train", 80), ("dev", 30)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for row in range(count):
            label = draw.choice(("entailment", "not_entailment"))
            words = [f"w{draw.randrange(2, 90)}" for _ in range(draw.randrange(2, 8))]
            words.insert(draw.randrange(len(words)), "w0" if label == "entailment" else "w1")
            lines.append(f"{row}\t{' '.join(words)}\tw5 w6\t{label}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def task_model(tmp_path_factory, model_folder, task_folder):
    folder = tmp_path_factory.mktemp("fine-tuned")
    training = {"output_dir": str(folder), "num_train_epochs": 4, "learning_rate": 3e-3, "disable_tqdm": True}
    training |= {"report_to": "none", "per_device_train_batch_size": 8}
    data = {"task": "rte", "model": str(model_folder), "data": str(task_folder), "max_length": 32, "overwrite": True}
    finetune({"data": data, "model": {}, "training": training})
    return folder


def test_on_the_inputs_of_a_task(task_model, task_folder, tmp_path, capsys):
    fields = {"task": "rte", "validation": None, "target_sparsity": 0.6, "steps": 6, "patterns": True, "timed": True}
    metrics = search(task_model, task_folder, tmp_path / "out", recover=3, **fields)
    found, expected = metrics["agreement"], json.loads((task_model / "metrics.json").read_text())["score"]
    assert found["dense"]["score"] == pytest.approx(expected) and found["dense"]["input_sparsity"] == 0
    assert set(found) > {"learned", "dense model's attention", "window", "learned, recovered"}
    assert all(0 <= numbers["score"] <= 1 for numbers in found.values())
    assert 0 < found["learned"]["input_sparsity"] < 0.6  # short inputs keep more than the mask at its length
    assert metrics["objectives"] == ["answers", "answers"] and metrics["inference_seconds"]["masked"] > 0
    table = agreement_table(metrics)
    assert {"score", "removed on inputs"} <= set(table.columns) and "task rte" in table.markdown()
    model = load(tmp_path / "out")
    assert type(model).__name__ == "RobertaForSequenceClassification" and model.sparse_attention.mask.length == 32
    assert "text-classification" in (tmp_path / "out/README.md").read_text()
    capsys.readouterr()
    # The stock client scores the folder as the search did.
    words = ["finetune", "--task", "rte", "--model", str(tmp_path / "out"), "--data", str(task_folder)]
    words += ["--num_train_epochs", "0.01", "--learning_rate", "0", "--max_length", "32"]
    assert main([*words, "--output_dir", str(tmp_path / "tuned")]) == 0
    score = json.loads((tmp_path / "tuned/metrics.json").read_text())["score"]
    assert score == pytest.approx(found["learned, recovered"]["score"])


def test_the_seed_draws_the_inputs_of_a_task(task_model, task_folder):
    fields = {"task": "rte", "data": str(task_folder), "model": str(task_model), "max_length": 32, "max_tokens": 100}
    config, found = transformers.AutoConfig.from_pretrained(task_model), []
    for seed in (0, 0, 1):
        inputs = read_inputs(PostHocArguments(**fields, seed=seed), config, "cpu")
        found.append([batch["input_ids"].tolist() for batch in inputs.train.values()])
    assert found[0] == found[1] != found[2]


def test_on_whole_documents(task_model, text, tmp_path):
    fields = {"pack": False, "objective": "answers", "max_length": 16, "batch_size": 4}
    metrics = search(task_model, text, tmp_path / "out", **fields)
    assert metrics["objectives"] == ["answers", "answers"] and "score" not in metrics["agreement"]["learned"]
    assert load(tmp_path / "out").sparse_attention.mask.length == 16
    again = search(task_model, text, tmp_path / "again", validation=None, recover=2, **fields)
    assert again["agreement"]["learned, recovered"]["cosine"] > 0.5


def test_documents_are_not_joined(text, word_tokenizer):
    options = PostHocArguments(data=str(text), pack=False, max_length=16, max_tokens=100, max_validation_tokens=40)
    inputs = read_text(options, word_tokenizer, "cpu")
    (batch,) = inputs.train.values()
    first = text.read_text().split("\n\n")[:8]
    assert len(batch["input_ids"]) == 6 and len(inputs.held_out[0]["input_ids"]) == 2  # 100 and 40 tokens
    assert batch["input_ids"].tolist()[0] in word_tokenizer(first, truncation=True, max_length=16)["input_ids"]
    assert {row["input_ids"].shape for row in inputs.batches(4, 3, 0)} == {(4, 16)}


def test_on_squad(word_tokenizer, squad_folder, tmp_path):
    model = transformers.BertForQuestionAnswering(config_of("bert", max_position_embeddings=48))
    model.save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    fields = {"task": "squad_v2", "validation": None, "max_length": 48, "mask": "window", "recover": 3}
    metrics = search(tmp_path / "model", squad_folder, tmp_path / "out", **fields)
    assert 0 <= metrics["agreement"]["given, recovered"]["score"] <= 1
    fields |= {"mask": None, "recover": 0}
    metrics = search(tmp_path / "model", squad_folder, tmp_path / "out2", search="vertical_slash", **fields)
    assert metrics["agreement"]["learned"]["input_sparsity"] > 0.5
    assert type(load(tmp_path / "out2")).__name__ == "BertForQuestionAnswering"


def test_weights_and_scores_stay_without_recovery(task_model, task_folder, tmp_path):
    fields = {"task": "rte", "validation": None}
    runs = [search(task_model, task_folder, tmp_path / name, **fields) for name in ("first", "second")]
    assert runs[0]["agreement"] == runs[1]["agreement"]
    read = transformers.RobertaForSequenceClassification.from_pretrained
    before, after = (read(folder).state_dict() for folder in (task_model, tmp_path / "first"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert set(runs[0]["agreement"]) == {"dense", "learned", "dense model's attention"}
    assert "manual masks" not in agreement_table(runs[0]).markdown()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "rtx"}, "unknown task 'rtx'"),
        ({"task": "swag"}, "task swag has several inputs per example: the search takes"),
        ({"task": "squad"}, "task squad needs a model that was fine-tuned on it"),
        ({"pack": False}, "pack .*has no meaning with task"),
        ({"validation": "FILE"}, "validation .*has no meaning with task"),
        ({"task": None, "skip_bad": True, "validation": "FILE"}, "skip_bad .*has no meaning without task"),
        ({"task": "mnli", "data": "."}, "task mnli: data '.' must hold inputs to search on .* got"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_of_tasks(task_model, task_folder, tmp_path, fields, message):
    refuse(message, task_model, task_folder, tmp_path / "out", **{"task": "rte", "validation": None} | fields)


def test_models_that_do_not_answer_the_task(model_folder, task_model, task_folder, tmp_path):
    fields = {"task": "rte", "validation": None}
    message = "needs a model that was fine-tuned on it .*RobertaForMaskedLM"
    refuse(message, model_folder, task_folder, tmp_path / "out", **fields)
    config = json.loads((task_model / "config.json").read_text())
    swapped = dict(enumerate(reversed(config["id2label"].values())))
    shutil.copytree(task_model, tmp_path / "model")
    for changed, message in (
        ({"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}, "3 labels, the task has 2"),
        ({"id2label": swapped}, "labels in the order not_entailment, entailment"),
        ({"problem_type": "multi_label_classification"}, "multi_label_classification, .* is a single_label_classif"),
        ({"type_vocab_size": 1}, "tells 2 parts of an input apart, the model 1"),
    ):
        (tmp_path / "model/config.json").write_text(json.dumps(config | changed))
        refuse(message, tmp_path / "model", task_folder, tmp_path / "out", **fields)


@pytest.mark.parametrize("source", ["packed", "documents", "task"])
def test_tokenizers_that_do_not_fit_the_model(task_model, task_folder, text, tmp_path, word_tokenizer, source):
    data = task_folder if source == "task" else text
    fields = {"task": "rte", "validation": None} if source == "task" else {"pack": source == "packed"}
    shutil.copytree(task_model, tmp_path / "none", ignore=shutil.ignore_patterns("*token*"))
    refuse("there is no tokenizer in", tmp_path / "none", data, tmp_path / "out", **fields)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    small = transformers.RobertaConfig(vocab_size=len(word_tokenizer) - 1, max_position_embeddings=40, **sizes)
    transformers.RobertaForSequenceClassification(small).save_pretrained(tmp_path / "small")
    word_tokenizer.save_pretrained(tmp_path / "small")
    message = rf"has {len(word_tokenizer)} tokens, the model {small.vocab_size}"
    refuse(message, tmp_path / "small", data, tmp_path / "out", **fields)


@pytest.mark.slow
def test_real_weights(tmp_path, real_bert):
    """At 0.8 the mask of a real sentence encoder is nearer to it than a window."""
    text = tmp_path / "text.txt"
    files = [file for each in importlib.metadata.distributions() for file in each.files or []]
    paths = [Path(file.locate()) for file in files if file.name == "LICENSE"]
    licenses = [path.read_text() for path in paths if path.is_file()]
    text.write_text("\n\n".join(" ".join(license.split()) for license in licenses))
    report = search(real_bert, text, tmp_path / "out", max_length=128, steps=5, target_sparsity=0.8)["agreement"]
    assert report["learned"]["cosine"] > report["window"]["cosine"]
