"""Searches that keep a given share of the entries: the multiplier, schedules, the outcome."""

import logging
import math

import pytest
import torch
from transformers.utils import logging as transformers_logging

from sparsebert import SparseAttention, SparseBertConfig, SparseBertForMaskedLM, SparseBertModel
from sparsebert.learning.budget import budget_shift, collapsed, disagreement, geometric, head_budgets, scheduled
from sparsebert.learning.decided_entries import TiedEntries, VerticalSlash
from sparsebert.learning.learned_mask import LearnedMask
from sparsebert.learning.mask_search import described_search


logger = transformers_logging.get_logger("sparsebert")
SEARCHED = ["soft", "dam_u", "dam_s", "dam_b"]


@pytest.mark.parametrize("width", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_the_budget_is_met_in_every_head(share, width):
    logits, counts = 4 * torch.randn(2, 3, 50), torch.randint(0, 9, (50,))
    budget = share * counts.sum()
    shift = budget_shift(logits, TiedEntries(counts), budget, width)
    kept = (torch.sigmoid((logits - shift) / width) * counts).sum(-1)
    torch.testing.assert_close(kept, budget.expand(2, 3), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "entries, scope",
    [
        (TiedEntries(torch.arange(12.0)), "head"),
        (VerticalSlash(6, "none", True), "head"),
        (VerticalSlash(6, "none", True), "global"),
    ],
    ids=["tied", "union", "union, one budget"],
)
def test_gradient_passes_through_the_multiplier(entries, scope):
    logits, weights = torch.randn(1, 2, 12, requires_grad=True), torch.randn(1, 2, 12)

    def probs(logits):
        budgets = head_budgets(logits, 12.0, 0.0, entries.total, scope)
        return torch.sigmoid((logits - budget_shift(logits, entries, budgets, 0.7)) / 0.7)

    (gradient,) = torch.autograd.grad((probs(logits) * weights).sum(), logits)
    with torch.no_grad():
        for index in range(12):
            step = torch.zeros_like(logits)
            step[0, 1, index] = 1e-2
            difference = ((probs(logits + step) - probs(logits - step)) * weights).sum().item() / 2e-2
            assert gradient[0, 1, index].item() == pytest.approx(difference, abs=2e-3)
    torch.testing.assert_close(probs(logits + 3), probs(logits))  # nothing but a constant


def test_gradient_passes_to_the_budget():
    logits, entries = torch.randn(1, 2, 7), TiedEntries(torch.arange(7.0))
    weights, budgets = torch.randn(1, 2, 7), torch.tensor([8.0, 5.0]).view(1, 2, 1)

    def value(budgets):
        return (torch.sigmoid((logits - budget_shift(logits, entries, budgets, 0.7)) / 0.7) * weights).sum((0, 2))

    (gradient,) = torch.autograd.grad(value(budgets.requires_grad_()).sum(), budgets)
    difference = (value(budgets.detach() + 0.05) - value(budgets.detach() - 0.05)) / 0.1
    torch.testing.assert_close(gradient.flatten(), difference, atol=2e-3, rtol=1e-2)


def test_shares_of_one_budget():
    logits = torch.zeros(2, 3, 5, dtype=torch.float64)
    logits[0, 0] = math.log(4)
    spread = torch.randn(2, 3, 5, dtype=torch.float64)
    spread = logits + spread - spread.mean(-1, keepdim=True)  # only the mean of a head counts
    expected = torch.tensor([4.0, 1, 1, 1, 1, 1], dtype=torch.float64)

    def shares(budget, least, most):
        return head_budgets(spread, budget, least, most, "global").flatten()

    torch.testing.assert_close(shares(10.0, 0.0, 100.0), 60 * expected / 9)
    assert head_budgets(spread, 10.0, 0.0, 100.0).tolist() == [[[10.0]]]
    assert head_budgets(spread, 1.0, 2.0, 100.0).item() == 2.0
    # What does not fit into a head goes to the others, and what a head must keep comes from them.
    torch.testing.assert_close(shares(10.0, 0.0, 15.0), torch.tensor([15.0, 9, 9, 9, 9, 9], dtype=torch.float64))
    torch.testing.assert_close(shares(10.0, 8.0, 100.0), torch.tensor([20.0, 8, 8, 8, 8, 8], dtype=torch.float64))
    assert shares(15.0, 0.0, 15.0).tolist() == [15.0] * 6 and shares(0.0, 0.0, 15.0).max() < 0.01


@pytest.mark.parametrize("spread", [0.5, 10.0, 200.0])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_one_budget_is_met_however_far_the_heads_are_apart(share, spread):
    most = 126.0**2
    logits = torch.linspace(-spread / 2, spread / 2, 72).view(6, 12, 1).repeat(1, 1, 8).requires_grad_()
    for least in (0.0, 1e-3 * most):
        budgets = head_budgets(logits, share * most, least, most - least, "global")
        asked = min(max(share * most, least), most - least)
        assert budgets.mean().item() == pytest.approx(asked, rel=1e-3, abs=1e-2)
        assert budgets.min() >= least and budgets.max() <= most - least
        (gradient,) = torch.autograd.grad(budgets[-1, -1].sum(), logits)
        assert gradient.sum(-1).abs().max() <= most and gradient[-1, -1].sum() >= 0 >= gradient[:-1].max()


def test_gradient_of_a_share():
    levels = 0.3 * torch.randn(6, dtype=torch.float64)

    def budgets(levels):
        return head_budgets(levels.view(2, 3, 1).expand(2, 3, 5), 10.0, 0.0, 100.0, "global").flatten()

    jacobian = torch.autograd.functional.jacobian(budgets, levels)
    steps = 1e-4 * torch.eye(6, dtype=torch.float64)
    for column, step in enumerate(steps):
        difference = (budgets(levels + step) - budgets(levels - step)) / 2e-4
        torch.testing.assert_close(jacobian[:, column], difference, atol=1e-5, rtol=1e-4)


def test_hard_search_without_noise_trains_the_mask_it_freezes_to(tiny_config):
    """As near to the budget as the form allows in every step, for all heads together."""
    for search in ("dam_u", "dam_s", "dam_b", "vertical_slash"):
        fields = {"hard": True, "noise_scale": 0.0}
        fields |= {"sparsity_scope": "global", "share_layers": False, "num_hidden_layers": 2, "allow_empty_rows": True}
        attention = searching(tiny_config, 0.7, search, **fields).sparse_attention.train()
        torch.manual_seed(1)
        with torch.no_grad():
            attention.mask_logits.normal_(std=0.2).add_(0.05 * torch.randn(2, attention.mask_logits.shape[1], 1))
        attention.set_progress(0.5)
        sample, _ = attention.learned.draw()
        again, _ = attention.learned.draw()
        assert torch.equal(sample, again) and set(sample.unique().tolist()) == {0.0, 1.0}
        mask, outcome = attention.learned.to_mask()
        assert torch.equal(attention.search.to_mask(sample.detach() > 0.5).to_table(), mask.to_table())
        assert outcome["undecided"] == 0.0
        assert mask.sparsity == pytest.approx(0.7, abs=0.04 if search == "dam_b" else 0.01)
        sparsities = [sparsity for layer in mask.head_sparsities() for sparsity in layer]
        assert search == "dam_b" or max(sparsities) - min(sparsities) > 0.1
        assert attention.learned.thresholded_mask(sparsity=0.0).sparsity == 0


def test_schedules():
    at = [scheduled(progress, 0.2, 0.6, 0.0, 0.9).item() for progress in (0.0, 0.2, 0.3, 0.4, 0.6, 1.0)]
    assert at == pytest.approx([0.0, 0.0, 0.9 * (1 - 0.75**3), 0.9 * (1 - 0.5**3), 0.9, 0.9])
    assert scheduled(0.5, 0.5, 0.5, 0.1, 0.9).item() == pytest.approx(0.1)
    assert geometric(0.5, 4.0, 1.0) == pytest.approx(2.0)


def test_disagreement_and_collapse():
    entries = TiedEntries(torch.tensor([4.0, 2.0, 2.0, 0.0]))
    chosen = torch.tensor([[[True, True, True, False], [False, False, False, True], [True, False, False, True]]])
    assert collapsed(chosen, entries) == (1, 1)
    assert disagreement(chosen, chosen.roll(1, 1), entries) == pytest.approx((4 + 8 + 4) / 24)


def searching(tiny_config, target, search="dam_s", **fields):
    config = tiny_config(search=search, target_sparsity=target, mask_length=32, block_size=16, **fields)
    return SparseBertForMaskedLM(config)


@pytest.mark.parametrize("target", [0.3, 0.8, 0.91])
@pytest.mark.parametrize("search", SEARCHED)
def test_target_is_met_as_nearly_as_the_form_can(tiny_config, search, target):
    if search in ("dam_s", "dam_b"):  # special tokens are an eighth of a mask for 32 tokens
        target = min(target, 0.87)
    for seed in range(3):
        torch.manual_seed(seed)
        model = searching(tiny_config, target, search, allow_empty_rows=True)
        attention = model.sparse_attention
        with torch.no_grad():
            attention.mask_logits.normal_(std=(0.1, 1.0, 10.0)[seed])
        outcome = attention.outcome()
        mask = model.freeze()
        assert mask.sparsity == outcome["got"] and outcome["asked"] == target
        # No head can come nearer by one parameter more or less.
        table = mask.to_table().float()
        step = attention_step(search)
        assert all(abs(1 - head.mean().item() - target) <= step / 2 + 1e-6 for head in table[0])
        if search in ("soft", "dam_u"):
            assert abs(mask.sparsity - target) <= 0.005


def attention_step(search):
    """Greatest share of the 32 x 32 entries that one parameter decides."""
    return {"soft": 2, "dam_u": 2, "dam_s": 2 * 31, "dam_b": 2 * 16 * 16}[search] / 32**2


def test_training_reaches_the_target_and_decides_it(tiny_config):
    """Whatever the learning rate: the budget does not depend on the size of a penalty's gradient."""
    for rate in (1e-3, 1e-1):
        torch.manual_seed(0)
        model = searching(tiny_config, 0.8).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        ids = torch.randint(5, 100, (4, 32))
        for step in range(30):
            model.sparse_attention.set_progress(step / 30)
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = model.sparse_attention.mask_probs().mean().item()
        assert 1 - expected == pytest.approx(0.8, abs=0.02)
        assert model.freeze().sparsity == pytest.approx(0.8, abs=0.5 * attention_step("dam_s"))


@pytest.mark.parametrize("search", SEARCHED)
def test_search_starts_local_and_sparse(tiny_config, search):
    def start(**fields):
        fields |= {"search": search, "mask_length": 40, "block_size": 16, "target_sparsity": 0.6}
        sparse_attention = SparseBertModel(tiny_config(**fields)).sparse_attention
        sparse_attention.set_progress(0.0)
        return sparse_attention.mask_probs()[0, 0], sparse_attention

    probs, sparse_attention = start()
    odds = probs / (1 - probs)
    near, far = odds[20, 3], odds[36, 2]  # offsets 17 and 34, tile offsets 1 and 2
    assert (near / far).item() == pytest.approx(8, rel=0.02)
    assert sparse_attention.learned.current_sparsity() == pytest.approx(0.6)
    probs, _ = start(initial_decay=0)
    assert (probs[20, 3] / probs[36, 2]).item() == pytest.approx(1, abs=0.01)


def test_sparsity_grows_on_schedule(tiny_config):
    attention = searching(
        tiny_config, 0.8, initial_sparsity=0.2, sparsity_warmup=0.25, sparsity_ramp=0.75
    ).sparse_attention
    found = []
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        attention.set_progress(progress)
        due = attention.learned.current_sparsity().item()
        assert 1 - attention.mask_probs().mean().item() == pytest.approx(due, abs=0.01)
        found.append(attention.thresholded_mask().sparsity)
    assert found[0] == found[1] < found[2] < found[3] == found[4]


def test_a_search_starts_no_sparser_than_its_target(tiny_config):
    attention = searching(tiny_config, 0.5, initial_sparsity=0.8).sparse_attention
    for progress in (0.0, 1.0):
        attention.set_progress(progress)
        assert attention.learned.current_sparsity().item() == pytest.approx(0.5)


def test_one_budget_for_all_heads(tiny_config):
    fields = {"sparsity_scope": "global", "share_layers": False, "num_hidden_layers": 2}
    attention = searching(tiny_config, 0.7, **fields).sparse_attention
    with torch.no_grad():
        attention.mask_logits[0, 0] += 0.3  # this head keeps more than the others
    attention.set_progress(1.0)
    probs = attention.mask_probs()
    assert 1 - probs.mean().item() == pytest.approx(0.7, abs=0.01)
    kept = probs.mean((-2, -1))
    assert kept[0, 0] > 1.5 * kept.flatten()[1:].max()
    loss = (probs_of := attention.learned.probs())[0, 0].sum()
    loss.backward()
    assert probs_of.shape == attention.mask_logits.shape
    gradient = attention.mask_logits.grad
    assert (gradient[0, 0] > 0).any() and (gradient[1] < 0).any()  # what one head gains, the others lose
    mask = attention.freeze()
    assert mask.sparsity == pytest.approx(0.7, abs=0.01)
    sparsities = [sparsity for layer in mask.head_sparsities() for sparsity in layer]
    assert sparsities[0] == min(sparsities) < max(sparsities)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("search", ["dam_s", "dam_u", "dam_b", "vertical_slash"])
def test_one_budget_is_met_by_all_heads_together(search, spread):
    """To within half of what one parameter keeps in one head, while each head stays near its share."""
    torch.manual_seed(0)
    fields = {"hard": True, "noise_scale": 0.0, "sparsity_scope": "global", "share_layers": False}
    fields |= {"mask_length": 64, "block_size": 32, "allow_empty_rows": True, "target_sparsity": 0.8}
    config = SparseBertConfig(num_hidden_layers=6, num_attention_heads=12, hidden_size=24, search=search, **fields)
    rules = described_search(config, config.carrier)
    logits = torch.randn(6, 12, rules.num_parameters)
    logits += spread * torch.randn(6, 12, 1) - logits.mean(-1, keepdim=True)
    learned = LearnedMask(rules, logits / rules.mask_logit_scale, torch.tensor(1.0))
    mask = learned.thresholded_mask()
    step = {"dam_s": 2 * 62, "dam_u": 2, "dam_b": 2 * 32 * 32, "vertical_slash": 2 * 62}[search] / 64**2
    assert abs(mask.sparsity - 0.8) <= step / 2 / 72 + 1e-9
    kept = 1 - torch.tensor(mask.head_sparsities())
    budget = (1 - 0.8) * 64**2 - rules.num_fixed
    budgets = head_budgets(learned.alpha(), budget, 0, rules.num_learned, "global")[..., 0] + rules.num_fixed
    assert (kept - budgets / 64**2).abs().max() <= 1.5 * step


def test_defaults_of_hard_samples(tiny_config):
    """What they remove keeps a gradient; their temperature need not fall."""
    rules = {hard: searching(tiny_config, 0.8, hard=hard).sparse_attention.search for hard in (True, False)}
    assert (rules[True].mask_constant, rules[True].temperature_end) == (7.0, 1.0)
    assert (rules[False].mask_constant, rules[False].temperature_end) == (1e4, 0.1)
    penalized = SparseBertModel(tiny_config(search="dam_s")).sparse_attention.search
    assert (penalized.hard, penalized.mask_constant, penalized.temperature_end) == (True, 1e4, 1.0)


def test_no_penalty_under_a_target(tiny_config):
    model = searching(tiny_config, 0.8, sparsity_weight=1e3).train()
    ids = torch.randint(5, 100, (2, 32))
    assert model(ids, labels=ids).loss < 100
    assert model.sparse_attention.sparsity_loss() == 0


def test_unreachable_target_says_the_bound(tiny_config):
    with pytest.raises(ValueError, match=r"target_sparsity must be at most 0.8789, got 0.95.*124 of the 1024"):
        searching(tiny_config, 0.95)
    with pytest.raises(ValueError, match=r"at most 0.8496"):
        SparseAttention(tiny_config(search="dam_s", target_sparsity=0.87, mask_length=32, diagonal="keep"))


def test_outcome_warns_of_what_is_wrong(tiny_config, caplog):
    attention = searching(tiny_config, 0.5, "dam_b").sparse_attention
    outcome = attention.outcome()
    assert any("asked for a sparsity of 0.500, got" in text and "2 parameters" in text for text in outcome["warnings"])
    attention = SparseBertModel(tiny_config(search="dam_s", mask_length=32)).sparse_attention
    with torch.no_grad():
        attention.mask_logits.fill_(-1.0)
    assert attention.outcome()["empty_heads"] == 4
    assert "4 remove everything" in attention.outcome()["warnings"][0]


def test_heads_may_be_empty_with_one_budget_for_all(tiny_config):
    for scope in ("head", "global"):
        attention = searching(tiny_config, 0.8, "dam_u", sparsity_scope=scope, allow_empty_rows=True).sparse_attention
        with torch.no_grad():
            attention.mask_logits[:, 0] = -100.0
        outcome = attention.outcome()
        assert outcome["empty_heads"] == (scope == "global") and outcome["warnings"] == []


def test_undecided_share_falls_as_the_search_hardens(tiny_config):
    torch.manual_seed(0)
    attention = searching(tiny_config, 0.8, "dam_u").sparse_attention
    with torch.no_grad():
        attention.mask_logits.normal_(std=0.01)
    before, narrow = (attention.outcome()[name] for name in ("undecided", "range_of_p"))
    with torch.no_grad():
        attention.mask_logits.mul_(1000)
    assert attention.outcome()["undecided"] < 0.05 < before
    wide = attention.outcome()["range_of_p"]
    assert wide[0] < narrow[0] < narrow[1] < wide[1] and narrow[1] - narrow[0] < 0.6 and wide[1] - wide[0] > 0.9


def test_progress_survives_copies_and_is_no_weight(tiny_config):
    import copy

    model = searching(tiny_config, 0.8)
    model.sparse_attention.set_progress(0.3)
    assert copy.deepcopy(model).sparse_attention.progress.item() == pytest.approx(0.3)
    assert "progress" not in " ".join(model.state_dict())


def test_a_target_without_a_schedule_is_warned_of(tiny_config, caplog):
    logger.warning_once.cache_clear()
    model = searching(tiny_config, 0.8).train()
    ids = torch.randint(5, 100, (2, 40))
    with caplog.at_level(logging.WARNING, logger="sparsebert"):
        model.sparse_attention.set_progress(0.0)
        model(ids)
        assert "SearchSchedule" not in caplog.text
        searching(tiny_config, 0.8).train()(ids)
    assert "target_sparsity: nothing tells the mask" in caplog.text and "SearchSchedule" in caplog.text


def test_logits_that_are_not_trained_are_warned_of(tiny_config, caplog):
    logger.warning_once.cache_clear()
    model = searching(tiny_config, 0.8).train()
    ids = torch.randint(5, 100, (2, 40))
    with caplog.at_level(logging.WARNING, logger="sparsebert"):
        model(ids)
        model.requires_grad_(False)
        with torch.no_grad():
            model(ids)
        assert "mask_logits" not in caplog.text
        model(ids)
    assert "mask_logits: their requires_grad is False" in caplog.text
