"""The search for offsets and global tokens: entries by the definition, budget, freezing, pruning, post-hoc search."""

import copy
import itertools

import pytest
import torch
from conftest import growth
from test_attach import base_model
from test_posthoc import ROWS, searching

from sparsebert import SparseAttention, SparseBertForMaskedLM, build_pattern
from sparsebert.learning.budget import budget_shift, collapsed, disagreement, head_budgets
from sparsebert.learning.decided_entries import VerticalSlash
from sparsebert.learning.searches import gumbel_noise, parameter_distance, sample_mask
from sparsebert.learning.selection import keep_largest
from sparsebert.training.searching.dense_agreement import agreement
from sparsebert.training.searching.matching import carrier, learn_mask, random_batches, start_from_attention


SPECIAL = ("none", "first", "first_last")
N = 8
UNIONS = [
    VerticalSlash(N, special, symmetric, diagonal)
    for special, symmetric, diagonal in itertools.product(SPECIAL, (True, False), (True, False))
]
unions = pytest.mark.parametrize("union", UNIONS, ids=str)


def parameters(union, i, j):
    """The parameters of an entry, by the definition."""
    size, first = union.size, union.first
    found = {abs(i - j)} if abs(i - j) < size else set()
    for token, start in ((j, size), (i, size if union.symmetric else 2 * size)):
        if first <= token < first + size:
            found.add(start + token - first)
    return sorted(found)


def is_learned(union, i, j):
    inside = all(union.first <= token < union.first + union.size for token in (i, j))
    return inside and (union.learned_diagonal or i != j)


def learned_entries(union):
    return [(i, j) for i in range(union.length) for j in range(union.length) if is_learned(union, i, j)]


def num_parameters(union):
    return (2 if union.symmetric else 3) * union.size


def by_definition(union, probs, length=N):
    """P of every entry `(L, H, m, m)`: that any of its parameters is drawn."""
    table = torch.zeros(*probs.shape[:2], length, length, dtype=probs.dtype)
    for i, j in itertools.product(range(length), repeat=2):
        table[..., i, j] = 1 - (1 - probs[..., parameters(union, i, j)]).prod(-1)
    return table


def random_probs(union, dtype=torch.float64):
    return torch.rand(2, 3, num_parameters(union), dtype=dtype)


@unions
def test_entry_by_entry(union):
    probs = random_probs(union)
    for length in (1, 5, N):
        expected = by_definition(union, probs, length)
        torch.testing.assert_close(union.expand(probs, length), expected)
        log = union.log_probs(torch.logit(probs), length)
        torch.testing.assert_close(log.exp(), expected)
        drawn = probs > 0.7
        assert torch.equal(union.expand(drawn, length), by_definition(union, drawn.double(), length) > 0)
    index = union.parameters_of_entries()
    for i, j in itertools.product(range(N), repeat=2):
        assert sorted(set(index[i, j][index[i, j] < num_parameters(union)].tolist())) == parameters(union, i, j)


@unions
def test_entries_are_counted_without_their_table(union):
    probs = random_probs(union).requires_grad_()
    learned = torch.zeros(N, N, dtype=torch.bool)
    for i, j in learned_entries(union):
        learned[i, j] = True
    expected = (by_definition(union, probs) * learned).sum((-2, -1))
    assert union.total == learned.sum()
    torch.testing.assert_close(union.kept(probs), expected)
    (wanted,) = torch.autograd.grad(expected.sum(), probs, retain_graph=True)
    (gradient,) = torch.autograd.grad(union.kept(probs).sum(), probs)
    torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(union.decided(probs.detach()), wanted)
    drawn = probs.detach() > 0.7
    assert torch.equal(union.kept(drawn), (union.expand(drawn, N) & learned).sum((-2, -1)))
    # Number and sum of the entries that each parameter is one of.
    counts, table = torch.zeros(num_parameters(union)), torch.randn(2, 3, N, N)
    sums = torch.zeros(2, 3, num_parameters(union))
    for i, j in learned_entries(union):
        for parameter in parameters(union, i, j):
            counts[parameter] += 1
            sums[..., parameter] += table[..., i, j]
    assert torch.equal(union.counts(), counts)
    torch.testing.assert_close(union.sums(table), sums)


@pytest.mark.parametrize("noisy", [-1e4, -200.0, -20.0, 0.0, 20.0, 1e4])
def test_logarithm_and_its_gradient_are_finite(noisy):
    union = VerticalSlash(N, "first_last", True)
    values = torch.full((1, 1, 2 * union.size), noisy, requires_grad=True)
    log = union.log_probs(values, N)
    log.sum().backward()
    assert log.isfinite().all() and (log <= 0).all() and values.grad.isfinite().all()
    assert (log[0, 0, 1, 2].item() > -1e-3) == (noisy >= 20) and (values.grad > 0).all() == (-60 < noisy < 16)


def test_logarithm_of_entries_with_one_parameter_is_that_of_the_parameter():
    """No token is global: what is left is the search per offset, whose bias it then has."""
    union, noisy = VerticalSlash(N, "none", True), torch.full((1, 1, 2 * N), -torch.inf)
    noisy[..., :N] = torch.linspace(-40, 10, N)
    log = union.log_probs(noisy, N)[0, 0, 0]
    torch.testing.assert_close(log, torch.nn.functional.logsigmoid(noisy[0, 0, :N]))


def test_hard_samples_are_the_union_of_the_draws():
    """Share of the samples that keep an entry, and noise that offsets, columns and rows share."""
    draws, union = 40_000, VerticalSlash(6, "none", False)
    probs = torch.rand(1, 1, 18)
    sample, _ = sample_mask(torch.logit(probs).expand(draws, 1, 18), noise=gumbel_noise((draws, 1, 18), "cpu"))
    table = union.expand(sample, 6)
    assert set(table.unique().tolist()) == {0.0, 1.0}
    expected = union.expand(probs, 6)[0, 0]
    error = 4.5 * (expected * (1 - expected) / draws).sqrt()
    assert ((table.mean((0, 1)) - expected).abs() <= error).all()
    offsets, columns, rows = (part[0, 0] > 0 for part in union.parts(sample[:1]))
    for i, j in itertools.product(range(6), repeat=2):
        assert bool(table[0, 0, i, j]) == bool(offsets[abs(i - j)] | columns[j] | rows[i])


def vertical_slash(tiny_config, **fields):
    return SparseAttention(tiny_config(**{"search": "vertical_slash", "mask_length": 20} | fields))


@pytest.mark.parametrize("symmetric", [True, False])
def test_longformer_is_in_its_space(tiny_config, symmetric):
    """A window, and global tokens that each head has elsewhere."""
    pattern = build_pattern("longformer", 20, 4, seed=1, window_size=2, num_global_tokens=3).to_table()
    attention = vertical_slash(tiny_config, symmetric=symmetric, special_tokens="none")
    is_global = pattern[0].all(-1)  # (H, n)
    assert (is_global.sum(-1) == 3).all() and not torch.equal(is_global[0], is_global[1])
    window = (torch.arange(20) <= 2).expand(4, 20)
    chosen = torch.cat([window, *[is_global] * (1 if symmetric else 2)], -1)
    with torch.no_grad():
        attention.mask_logits.copy_(chosen.float() - 0.5)
    assert torch.equal(attention.freeze().to_table(), pattern)


def test_vertical_and_slash_lines_are_in_its_space(tiny_config):
    """Columns without their rows, and offsets that are no window."""
    attention = vertical_slash(tiny_config, symmetric=False)
    with torch.no_grad():
        attention.mask_logits.fill_(-1.0)[0, 1, [5, 9, 18 + 3, 18 + 7]] = 1.0  # columns of the tokens 4 and 8
    expected = torch.isin((torch.arange(20)[:, None] - torch.arange(20)).abs(), torch.tensor([5, 9]))
    expected[:, [0, 4, 8, 19]] = expected[[0, 19]] = True
    assert torch.equal(attention.freeze().to_table()[0, 1], expected)


@pytest.mark.parametrize("scope", ["head", "global"])
@unions
def test_the_budget_is_met(union, scope):
    logits = 4 * torch.randn(2, 3, num_parameters(union))
    for share, width in itertools.product((0.02, 0.3, 0.95), (0.1, 1.0)):
        budget = share * union.total
        shift = budget_shift(logits, union, head_budgets(logits, budget, 0.0, union.total, scope), width)
        kept = union.kept(torch.sigmoid((logits - shift) / width))
        kept = kept if scope == "head" else kept.mean()
        torch.testing.assert_close(kept, torch.tensor(budget).expand(kept.shape), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("scope", ["head", "global"])
@unions
def test_as_many_parameters_as_come_nearest_to_the_budget(union, scope):
    scores = torch.randn(2, 3, num_parameters(union))
    scores[..., 3] = scores[..., 5]
    order = scores.argsort(dim=-1, descending=True, stable=True) if scope == "head" else None
    flat = scores.flatten().argsort(dim=-1, descending=True, stable=True)
    for share in (0.0, 0.1, 0.37, 0.8, 1.0):
        chosen = keep_largest(scores, union, share * union.total, scope)
        kept = union.kept(chosen)
        reachable = []
        for number in range((scores.shape[-1] if scope == "head" else scores.numel()) + 1):
            first = torch.zeros_like(chosen)
            if scope == "head":
                first.scatter_(-1, order[..., :number], True)
            else:
                first.view(-1)[flat[:number]] = True
            reachable.append(union.kept(first))
        reachable = torch.stack(reachable)
        if scope == "global":
            kept, reachable = kept.mean(), reachable.mean((1, 2))
        best = (reachable - share * union.total).abs().amin(0)
        torch.testing.assert_close((kept - share * union.total).abs(), best, atol=1e-9, rtol=0)
        ranked = scores if scope == "head" else scores.view(1, 1, -1)
        for row, mine in zip(ranked.flatten(0, 1), chosen.view(ranked.shape).flatten(0, 1), strict=True):
            assert not mine.any() or mine.all() or row[mine].min() >= row[~mine].max()


@unions
def test_what_two_choices_differ_in(union):
    first, second = (random_probs(union) > 0.8 for _ in range(2))
    first[0, 0], first[0, 1] = True, False
    tables = [union.expand(chosen, N) for chosen in (first, second)]
    rows, columns = zip(*learned_entries(union), strict=True)
    differing = (tables[0] != tables[1])[..., rows, columns].double().mean().item()
    assert disagreement(first, second, union) == pytest.approx(differing)
    kept = tables[0][..., rows, columns]
    assert collapsed(first, union) == (int(kept.all(-1).sum()), int((~kept.any(-1)).sum()))


FIELDS = [{}, {"symmetric": False}, {"diagonal": "keep"}, {"special_tokens": "none"}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_freezing(tiny_config, fields):
    attention = vertical_slash(tiny_config, share_layers=False, allow_empty_rows=True, **fields)
    with torch.no_grad():
        attention.mask_logits.normal_(-0.3, 0.2)
    union, probs = attention.search.union, attention.learned.probs().detach()
    fixed = attention.search.fixed
    for threshold in (0.02, 0.3, 0.5):
        expected = torch.where(fixed == -1, union.expand(probs > threshold, 20), fixed == 1)
        assert torch.equal(attention.thresholded_mask(threshold).to_table(), expected)
    outcome = attention.outcome(sparsity=0.6)
    assert outcome["asked"] == 0.6 and outcome["got"] == attention.thresholded_mask(sparsity=0.6).sparsity
    assert abs(outcome["got"] - 0.6) < 0.03  # half a column with its row are 5 % of a head
    mask = attention.freeze(sparsity=0.6)
    assert (mask.form, mask.length_policy, mask.num_layers) == ("table", "error", 2)
    assert mask.special_tokens == fields.get("special_tokens", "first_last")
    if fields.get("symmetric", True):
        assert torch.equal(mask.to_table(), mask.to_table().mT)


def test_a_target_is_reached_and_decided(tiny_config):
    for scope in ("head", "global"):
        torch.manual_seed(0)
        fields = {"search": "vertical_slash", "target_sparsity": 0.7, "mask_length": 32, "sparsity_scope": scope}
        model = SparseBertForMaskedLM(tiny_config(**fields)).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        ids = torch.randint(5, 100, (4, 32))
        before = model.sparse_attention.mask_logits.detach().clone()
        for step in range(20):
            model.sparse_attention.set_progress(step / 20)
            assert 1 - model.sparse_attention.mask_probs().mean().item() == pytest.approx(0.7, abs=0.002)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (model.sparse_attention.mask_logits - before).abs().min() > 0
        assert model.sparse_attention.outcome()["undecided"] < 0.3
        assert model.freeze().sparsity == pytest.approx(0.7, abs=0.04 if scope == "head" else 0.01)


def test_a_search_starts_local(tiny_config):
    """A token starts as the offset of a third of the length, the mean one."""
    attention = vertical_slash(tiny_config, mask_length=38, target_sparsity=0.6)
    attention.set_progress(0.0)
    logits = attention.learned.alpha()[0, 0]
    assert (logits[12] - logits[36:]).abs().max() < 0.05 and logits[1] > logits[12] + 7
    assert parameter_distance("vertical_slash", 9, 5, symmetric=False).tolist() == [0, 1, 2, *[1] * 6]


@pytest.mark.parametrize("fields", [{}, {"symmetric": False}, {"diagonal": "remove"}], ids=str)
@pytest.mark.parametrize("scope", ["head", "global"])
def test_pruning_leaves_every_row_a_key(tiny_config, scope, fields):
    attention = vertical_slash(tiny_config, special_tokens="none", share_layers=False, **fields)
    attention.start_pruning()
    with torch.no_grad():
        attention.mask_logits.normal_()
        attention.mask_logits[..., : attention.search.union.size] -= 100.0  # no offset: rows hang on tokens
    before = attention.learned.kept
    for sparsity in (0.3, 0.8):
        attention.learned.prune(attention.learned.alpha(), sparsity, scope)
        mask = attention.thresholded_mask()
        assert mask.num_empty_rows() == 0 and not (attention.learned.kept & ~before).any()
        assert mask.sparsity == pytest.approx(sparsity, abs=0.05)
        before = attention.learned.kept
    # In a row that would be empty, what is left is its best entry.
    attention.learned.prune(attention.learned.alpha(), 0.999 - 1 / 20, scope)
    assert attention.thresholded_mask().num_empty_rows() == 0


@pytest.mark.parametrize("phase", ["train", "eval", "frozen"])
@pytest.mark.parametrize("policy", ["dense", "error"])
def test_inputs_longer_than_the_mask(tiny_config, policy, phase):
    attention = vertical_slash(tiny_config, mask_length=10, length_policy=policy, mask_form="log")
    with torch.no_grad():
        attention.mask_logits.normal_().sign_().mul_(100.0)
    inner = attention.thresholded_mask().to_table()[0]
    if phase == "frozen":
        attention.freeze()
    attention.train(phase == "train")

    def prepare(length):
        return attention("sparse_eager", 1, length, length, device=torch.device("cpu")).bias[0][0]

    assert torch.equal(prepare(10) > -1, inner)
    if policy == "error":
        with pytest.raises(ValueError, match="15 tokens.*length_policy to 'dense'"):
            prepare(15)
        return
    on = prepare(15) > -1
    assert on[:, 10:].all() and on[:, :, 10:].all() and on[:, 0].all()
    assert torch.equal(on[:, 1:9, 1:9], inner[:, 1:9, 1:9])


def test_penalty_and_budget_make_no_table(tiny_config):
    def step():
        fields = {"mask_length": 16384, "max_position_embeddings": 16384, "target_sparsity": 0.9}
        learned = vertical_slash(tiny_config, **fields).learned
        learned.probs().sum().backward()
        learned.search.penalty(learned.probs()).backward()

    assert growth(step) < 16384**2 / 4


@pytest.mark.parametrize(
    "fields",
    [{"mask_form": "log"}, pytest.param({"target_sparsity": 0.6}, marks=pytest.mark.slow)],
    ids=["sampled", "target"],
)
def test_compiles_as_one_graph(tiny_config, fields):
    torch._dynamo.reset()
    attention = vertical_slash(tiny_config, **fields).train()
    attention.set_progress(0.5)

    def run(logits):
        with torch.no_grad():
            attention.mask_logits.copy_(logits)
        bias = attention("sparse_eager", 1, 20, 20, device=torch.device("cpu")).bias[0]
        return bias.sigmoid().sum() + attention.sparsity_loss()

    logits, results = torch.randn_like(attention.mask_logits), []
    for step in (run, torch.compile(run, fullgraph=True, backend="eager")):
        attention.zero_grad()
        torch.manual_seed(1)
        value = step(logits)
        value.backward()
        results.append((value.detach(), attention.mask_logits.grad.clone()))
    torch.testing.assert_close(results[1], results[0])
    assert results[0][1].abs().sum() > 0
    torch._dynamo.reset()


# Post-hoc search


@pytest.mark.parametrize("symmetric", [True, False])
def test_start_is_the_mean_attention_of_each_line(symmetric):
    model = searching("bert", search="vertical_slash", symmetric=symmetric, special_tokens="none")
    stock = base_model("bert")
    stock.set_attn_implementation("eager")
    start_from_attention(model, carrier(model), [ROWS[:8], ROWS[8:16]])
    with torch.no_grad():
        attention = torch.stack(stock(ROWS[:16], output_attentions=True).attentions).mean(1)  # (L, H, n, n)
    union = model.sparse_attention.search.union
    expected = (union.sums(attention) / union.counts()).log()
    alpha = model.sparse_attention.learned.alpha().detach()
    torch.testing.assert_close(alpha, expected - expected.mean(-1, keepdim=True), atol=1e-3, rtol=1e-3)


def test_a_global_column_is_found():
    """A model that looks at one position: the search keeps that column in most heads."""
    stock, place = base_model("bert"), 6
    signs = torch.tensor([1.0, -1.0]).repeat(stock.config.hidden_size // 2)
    with torch.no_grad():
        stock.embeddings.position_embeddings.weight[place] = 3 * signs
        for layer in stock.encoder.layer:
            attention = layer.attention.self
            attention.query.weight.zero_()
            attention.query.bias.copy_(signs)
            attention.key.weight.copy_(2 * torch.eye(stock.config.hidden_size))
    model = searching("bert", copy.deepcopy(stock), search="vertical_slash", target_sparsity=0.7)
    dense = carrier(model)
    start_from_attention(model, dense, random_batches(ROWS, 8, 2))
    cut = model.sparse_attention.thresholded_mask(sparsity=0.7)
    learn_mask(model, random_batches(ROWS, 8, 10), 10, 0.1, dense)
    mask = model.freeze()
    for found in (cut, mask):
        assert found.sparsity == pytest.approx(0.7, abs=0.03)
        assert found.to_table()[..., place].all(-1).float().mean() > 0.7
    window = build_pattern("window", ROWS.shape[1], 4, window_size=1, num_global_tokens=1)
    report = agreement(model, {"learned": None, "window": window}, ROWS, stock)
    assert report["learned"]["layer_error"][-1] < report["window"]["layer_error"][-1]
