"""Sampling, parameters of each form, freezing, the penalty, and the mask as the attention layers receive it."""

import itertools
import math

import pytest
import torch

from sparsebert import SEARCHES, SparseAttention, SparseBertModel
from sparsebert.learning.decided_entries import TiedEntries
from sparsebert.learning.searches import mask_bias, sample_mask, to_sparse_mask
from sparsebert.learning.selection import select
from sparsebert.masks.expansion import parameter_index, special_entries


SPECIAL = ("none", "first", "first_last")


def searching(config, std=3.0, decided=False):
    """A [`SparseAttention`] in training with alpha ~ N(0, std^2), or +-1000, which no noise can turn."""
    sparse_attention = SparseAttention(config).train()
    with torch.no_grad():
        logits = sparse_attention.mask_logits.normal_(std=std / config.mask_logit_scale)
        if decided:
            logits.copy_(logits.sign() * 1000.0 / config.mask_logit_scale)
    return sparse_attention


def prepare(sparse_attention, length, padding=None, name="sparse_eager"):
    """What the layers receive in a forward at `length`."""
    return sparse_attention(name, 2, length, length, padding, device=torch.device("cpu"))


def drawn_matrices(sparse_attention, length):
    """The drawn masks `(L, H, n, n)`, read back from the additive bias."""
    bias = torch.stack(prepare(sparse_attention, length).bias)[:, 0]
    return 1.0 + bias / sparse_attention.search.mask_constant


# Sampling


@pytest.mark.parametrize("alpha", [-3.0, -0.5, 0.0, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_share_of_ones_is_sigmoid_of_the_logit(alpha, temperature):
    draws = 200_000
    mask, _ = sample_mask(torch.full((draws,), alpha), temperature)
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    expected = 1.0 / (1.0 + math.exp(-alpha))
    assert mask.mean().item() == pytest.approx(expected, abs=4.5 * math.sqrt(expected * (1 - expected) / draws))


def test_draws_differ_and_follow_the_global_generator():
    logits = torch.zeros(1000)
    first, second = sample_mask(logits)[0], sample_mask(logits)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    again = sample_mask(logits)[0]
    torch.manual_seed(7)
    assert torch.equal(sample_mask(logits)[0], again)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_straight_through_gradient_is_that_of_the_soft_sample(temperature):
    logits, noise, weight = torch.randn(3, 50).unbind(0)
    gradients, samples = [], []
    for hard in (True, False):
        leaf = logits.clone().requires_grad_()
        mask, _ = sample_mask(leaf, temperature, hard, noise)
        (mask * weight).sum().backward()
        gradients.append(leaf.grad)
        samples.append(mask.detach())
    soft = torch.sigmoid((logits + noise) / temperature)
    torch.testing.assert_close(samples[1], soft)
    assert torch.equal(samples[0], (soft > 0.5).float())
    assert torch.equal(*gradients)
    torch.testing.assert_close(gradients[0], weight * soft * (1 - soft) / temperature)


@pytest.mark.parametrize("form", ["additive", "log"])
def test_gradcheck_of_soft_samples(form):
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(2, 5, dtype=torch.float64)

    def bias(logits):
        return mask_bias(*sample_mask(logits, 0.7, hard=False, noise=noise), form, 10.0, hard=False)

    assert torch.autograd.gradcheck(bias, (logits,))


# Bias


def test_bias_is_the_formula():
    noisy = torch.tensor([-30.0, -1.0, 0.0, 0.5, 30.0], dtype=torch.float64)
    soft = torch.sigmoid(noisy)
    hard = (soft > 0.5).double()
    torch.testing.assert_close(mask_bias(soft, noisy, "additive", 10.0, False), -10.0 * (1 - soft))
    torch.testing.assert_close(mask_bias(soft, noisy, "log", 10.0, False), soft.log())
    assert mask_bias(hard, noisy, "additive", 10.0, True).tolist() == [-10.0, -10.0, -10.0, 0.0, 0.0]
    torch.testing.assert_close(mask_bias(hard, noisy, "log", 10.0, True), -10.0 * (1 - hard))


def test_log_form_is_the_renormalized_product():
    """softmax(S + log P) = P softmax(S) / sum."""
    scores, noisy = torch.randn(2, 6, 6, dtype=torch.float64).unbind(0)
    probs = torch.sigmoid(noisy)
    product = probs * scores.softmax(-1)
    result = (scores + mask_bias(probs, noisy, "log", 1e4, False)).softmax(-1)
    torch.testing.assert_close(result, product / product.sum(-1, keepdim=True))


@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
@pytest.mark.parametrize("logit", [-100.0, -3.0, 0.0, 3.0, 100.0])
def test_gradient_of_the_log_form_is_bounded(logit, hard):
    alpha = torch.tensor([logit], requires_grad=True)
    mask, noisy = sample_mask(alpha, 1.0, hard, noise=torch.zeros(1))
    mask_bias(mask, noisy, "log", 1e4, hard).sum().backward()
    slope = math.exp(-abs(logit)) / (1 + math.exp(-abs(logit))) ** 2
    assert alpha.grad.item() == pytest.approx(slope if hard else 1.0 / (1.0 + math.exp(logit)), abs=1e-6)


@pytest.mark.parametrize("removed", [2, 5])
def test_hard_log_form_tells_what_a_removed_entry_would_change(removed):
    """Its gradient is the change of the output per P, whether the entry is kept or removed."""
    torch.manual_seed(0)
    scores, values = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    scores[removed], values[removed] = 1.0, 3.0

    def output(kept):
        return (scores.masked_fill(~kept, -math.inf).softmax(-1) * values).sum()

    noisy = torch.ones(8, dtype=torch.float64)
    noisy[removed] = -1.0
    alpha = noisy.clone().requires_grad_()
    sample, noisy = sample_mask(alpha, 1.0, True, noise=torch.zeros(8))
    bias = mask_bias(sample, noisy, "log", 7.0, True)
    assert bias.unique().tolist() == [-7.0, 0.0]
    ((scores + bias).softmax(-1) * values).sum().backward()
    slope = torch.sigmoid(noisy.detach()) * torch.sigmoid(-noisy.detach())
    kept = sample.detach() > 0.5
    weights = scores.exp() * kept
    expected = scores.exp() / weights.sum() * (values - output(kept)) * slope
    torch.testing.assert_close(alpha.grad, expected, atol=2e-3, rtol=1e-2)
    assert alpha.grad[removed].abs() > 1e-2  # which exact zeros of attention would not give


# Parameters


@pytest.mark.parametrize(
    "search, fields, size",
    [
        ("dam_s", {}, 10),
        ("dam_s", {"special_tokens": "first"}, 11),
        ("dam_s", {"special_tokens": "none"}, 12),
        ("dam_s", {"symmetric": False}, 19),
        ("dam_s", {"symmetric": False, "special_rows": False}, 21),
        ("dam_s", {"special_tokens": "first", "special_rows": False}, 12),
        ("dam_u", {}, 78),
        ("soft", {}, 78),
        ("soft", {"symmetric": False}, 144),
        ("dam_b", {"block_size": 16, "mask_length": 40}, 3),
        ("dam_b", {"block_size": 16, "mask_length": 40, "symmetric": False}, 5),
        ("vertical_slash", {}, 20),
        ("vertical_slash", {"symmetric": False, "special_tokens": "first"}, 33),
    ],
    ids=str,
)
@pytest.mark.parametrize("share_layers", [True, False], ids=["shared", "per layer"])
def test_number_of_logits(tiny_config, search, fields, size, share_layers):
    config = tiny_config(**{"search": search, "mask_length": 12, "share_layers": share_layers} | fields)
    model = SparseBertModel(config)
    logits = model.state_dict()["sparse_attention.mask_logits"]
    assert logits.shape == (1 if share_layers else 2, 4, size)
    alpha = model.sparse_attention.learned.alpha()
    assert torch.equal(alpha, 10.0 * logits)
    if alpha.numel() > 100:
        assert alpha.std().item() == pytest.approx(1e-3, rel=0.25)


# Penalty


RULES = [("none", True), *itertools.product(("first", "first_last"), (True, False))]


@pytest.mark.parametrize("share_layers", [True, False], ids=["shared", "per layer"])
@pytest.mark.parametrize("search", SEARCHES)
def test_penalty_is_the_norm_of_the_drawn_matrices(tiny_config, search, share_layers):
    cases = itertools.product((True, False), RULES, ("learned", "keep", "remove"))
    # Layers share their logits in every other case.
    for symmetric, (special_tokens, special_rows), diagonal in itertools.islice(cases, int(share_layers), None, 2):
        if search == "vertical_slash" and not special_rows:
            continue
        fields = {"search": search, "symmetric": symmetric, "special_tokens": special_tokens, "diagonal": diagonal}
        fields |= {"special_rows": special_rows, "share_layers": share_layers}
        sizes = {"block_size": 16, "mask_length": 20, "mask_constant": 10.0}
        sparse_attention = searching(tiny_config(**fields, **sizes, sparsity_weight=0.5))
        matrices = drawn_matrices(sparse_attention, 20)
        assert matrices.shape == (1 if share_layers else 2, 4, 20, 20), fields
        penalty = sparse_attention.sparsity_loss()
        norm = matrices.abs().double().sum().item() / len(matrices)
        assert penalty.item() == pytest.approx(0.5 * norm, rel=1e-5), fields
        penalty.backward()
        assert sparse_attention.mask_logits.grad.abs().sum() > 0, fields


def test_penalty_counts_the_whole_mask_whatever_the_input(tiny_config):
    sparse_attention = searching(tiny_config(mask_length=20), decided=True)
    drawn_matrices(sparse_attention, 20)
    whole = sparse_attention.sparsity_loss()
    prepare(sparse_attention, 7)
    torch.testing.assert_close(sparse_attention.sparsity_loss(), whole)


# The matrices that the layers receive


@pytest.mark.parametrize(
    "search, special_rows", [*[(name, True) for name in SEARCHES], ("dam_s", False), ("soft", False)]
)
def test_special_tokens_and_diagonal_override_what_is_learned(tiny_config, search, special_rows):
    cases = itertools.product(SPECIAL, ("learned", "keep", "remove"), (-30.0, 30.0))
    for special_tokens, diagonal, alpha in cases:
        fields = {"diagonal": diagonal, "special_tokens": special_tokens, "hard": SEARCHES[search].stochastic}
        fields["special_rows"] = special_rows or special_tokens == "none"
        config = tiny_config(search=search, mask_length=12, block_size=16, **fields)
        sparse_attention = searching(config)
        with torch.no_grad():
            sparse_attention.mask_logits.fill_(alpha / config.mask_logit_scale)
        expected = torch.full((12, 12), alpha > 0)
        special = {"none": [], "first": [0], "first_last": [0, 11]}[special_tokens]
        expected[special if special_rows else []] = True
        expected[:, special] = True
        if diagonal != "learned":
            expected.fill_diagonal_(diagonal == "keep")
        assert torch.equal(drawn_matrices(sparse_attention, 12)[0, 0] > 0.5, expected), (fields, alpha)
        assert torch.equal(sparse_attention.mask_probs()[0, 0] > 0.5, expected), (fields, alpha)
        assert torch.equal(sparse_attention.thresholded_mask().to_table()[0, 0], expected), (fields, alpha)


@pytest.mark.parametrize("search", ["dam_u", "soft"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "free"])
def test_symmetry_of_masks_per_entry(tiny_config, search, symmetric):
    matrices = drawn_matrices(searching(tiny_config(search=search, symmetric=symmetric, mask_length=12)), 12)
    assert torch.equal(matrices, matrices.mT) == symmetric


def test_structured_masks_share_the_noise_along_a_diagonal(tiny_config):
    """With alpha = 0 only the noise decides, so that a diagonal is constant only if it shares its noise."""
    sparse_attention = searching(tiny_config(mask_length=16), std=0.0)
    matrices = drawn_matrices(sparse_attention, 16)[0]
    assert 0.2 < matrices[:, 1:-1, 1:-1].mean() < 0.8
    for offset in range(14):
        diagonals = matrices[:, 1:-1, 1:-1].diagonal(offset, dim1=-2, dim2=-1)
        assert torch.equal(diagonals, diagonals[:, :1].expand_as(diagonals))
    assert (matrices[:, [0, -1]] == 1).all() and (matrices[:, :, [0, -1]] == 1).all()


@pytest.mark.parametrize("symmetric, special_rows", [(True, True), (False, True), (True, False), (False, False)])
def test_structured_equals_unstructured_with_tied_logits(tiny_config, symmetric, special_rows):
    length = 12
    fields = {"special_tokens": "first_last", "special_rows": special_rows, "mask_length": length}
    structured = searching(tiny_config(search="dam_s", symmetric=symmetric, **fields), decided=True)
    tied = searching(tiny_config(search="dam_u", symmetric=symmetric, **fields))
    size = structured.search.num_parameters
    offset = parameter_index("offsets", length, length, symmetric, size=size)
    pair = parameter_index("table", length, length, symmetric)
    with torch.no_grad():
        values = torch.nn.functional.pad(structured.mask_logits, (0, 2), value=-100.0)
        tied.mask_logits[..., pair.flatten()] = values[..., offset.flatten()]
    # Logits this large leave nothing to the noise.
    assert torch.equal(prepare(structured, length).bias[0], prepare(tied, length).bias[0])
    torch.testing.assert_close(structured.sparsity_loss(), tied.sparsity_loss())
    with torch.no_grad():
        for sparse_attention in (structured, tied):
            sparse_attention.mask_logits.div_(1000.0)
    torch.testing.assert_close(structured.mask_probs()[..., 1:-1, 1:-1], tied.mask_probs()[..., 1:-1, 1:-1])
    inner = prepare(structured, length).bias[0][..., 1:-1, 1:-1]
    assert torch.equal(inner, inner.mT) == symmetric
    assert torch.equal(structured.thresholded_mask().to_table(), tied.thresholded_mask().to_table())
    assert structured.sparsity() == tied.sparsity()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"special_tokens": "none"}, "special_rows [Ff]alse needs special tokens, got special_tokens 'none'"),
        ({"search": "dam_u"}, "special_rows False needs special tokens, got special_tokens 'none'"),
        ({"search": "vertical_slash"}, "special_rows False is not supported by search 'vertical_slash'"),
    ],
)
def test_columns_alone_need_special_tokens(tiny_config, fields, message):
    with pytest.raises(Exception, match=message):
        SparseAttention(tiny_config(special_rows=False, **fields))


def test_tied_samples_give_the_sum_of_the_gradients():
    length, inner = 9, 7
    alpha, noise = torch.randn(2, inner, dtype=torch.float64).unbind(0)
    weight = torch.randn(length, length, dtype=torch.float64)
    weight[special_entries(length, "first_last")] = 0.0
    offset = parameter_index("offsets", length, length).clamp(max=inner - 1)
    structured = alpha.clone().requires_grad_()
    (mask_bias(*sample_mask(structured, noise=noise), "additive", 1e4, True)[offset] * weight).sum().backward()
    entries = alpha[offset].requires_grad_()
    (mask_bias(*sample_mask(entries, noise=noise[offset]), "additive", 1e4, True) * weight).sum().backward()
    expected = torch.stack([entries.grad[offset == k].sum() for k in range(inner)])
    torch.testing.assert_close(structured.grad, expected)


@pytest.mark.parametrize("last_token", ["real", "position"])
@pytest.mark.parametrize("phase", ["train", "eval", "frozen"])
def test_special_tokens_of_padded_sequences(tiny_config, last_token, phase):
    """`real`: the last non-padding token of each sequence; `position`: the last one of the input."""
    length = 12
    config = tiny_config(mask_length=length, last_token=last_token)
    sparse_attention = searching(config)
    with torch.no_grad():
        sparse_attention.mask_logits.fill_(-30.0)
    if phase == "frozen":
        sparse_attention.freeze()
    sparse_attention.train(phase == "train")
    sizes = [12, 9, 4]
    padding = torch.tensor([[1] * size + [0] * (length - size) for size in sizes]).bool()
    bias = prepare(sparse_attention, length, padding).bias[0].expand(len(sizes), 4, -1, -1)
    for row, size in enumerate(sizes):
        last = size - 1 if last_token == "real" else length - 1
        for i in range(size):
            for j in range(length):
                on = j < size and (0 in (i, j) or last in (i, j))
                assert bool((bias[row, :, i, j] == 0).all()) == on, (row, i, j)


@pytest.mark.parametrize("form", ["additive", "log", "multiplicative"])
def test_eval_is_the_thresholded_mask_and_draws_nothing(tiny_config, form):
    sparse_attention = searching(tiny_config(search="dam_u", mask_form=form, mask_length=12)).eval()
    before = torch.get_rng_state()
    first, second = prepare(sparse_attention, 12), prepare(sparse_attention, 12)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.bias[0], second.bias[0])
    assert torch.equal(first.bias[0][0] == 0, sparse_attention.mask_probs()[0] > 0.5)
    sparse_attention.train()
    prepare(sparse_attention, 12)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("policy", ["extend", "dense", "error"])
@pytest.mark.parametrize("phase", ["train", "eval", "frozen"])
def test_inputs_longer_than_the_mask(tiny_config, policy, phase):
    sparse_attention = searching(tiny_config(mask_length=10, length_policy=policy), decided=True)
    inner = sparse_attention.mask_probs()[0, :, 1, 1:9] > 0.5  # by offset, 0..7
    if phase == "frozen":
        sparse_attention.freeze()
    sparse_attention.train(phase == "train")
    if policy == "error":
        with pytest.raises(ValueError, match="15 tokens.*length_policy"):
            prepare(sparse_attention, 15)
        return
    on = prepare(sparse_attention, 15).bias[0][0] == 0
    for i in range(15):
        for j in range(15):
            offset = abs(i - j)
            if {i, j} & {0, 14} or (policy == "dense" and max(i, j) >= 10):
                assert on[:, i, j].all()
            elif offset < 8:
                assert torch.equal(on[:, i, j], inner[:, offset])
            else:
                assert not on[:, i, j].any()


# Freezing


def test_freeze_by_threshold(tiny_config):
    sparse_attention = searching(tiny_config(search="dam_u", mask_length=12))
    probs = sparse_attention.mask_probs()
    for threshold in (0.0, 0.3, 0.5):
        expected = probs > threshold
        assert torch.equal(sparse_attention.thresholded_mask(threshold).to_table(), expected)
    again = sparse_attention.thresholded_mask()
    mask = sparse_attention.freeze()
    assert mask == again and sparse_attention.mask is mask
    assert not sparse_attention.searching and not dict(sparse_attention.named_parameters())
    assert torch.equal(sparse_attention.mask_probs(), (probs > 0.5).float())
    with pytest.raises(ValueError, match="frozen"):
        sparse_attention.freeze()


@pytest.mark.parametrize("fields", [{"threshold": 1.0}, {"threshold": -0.1}, {"sparsity": 1.0}, {"sparsity": -0.5}])
def test_freeze_refuses_values_out_of_range(tiny_config, fields):
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"{name} must be in.*{value}"):
        searching(tiny_config(mask_length=12)).freeze(**fields)


@pytest.mark.parametrize("diagonal", ["learned", "keep", "remove"])
@pytest.mark.parametrize("search", SEARCHES)
def test_freeze_by_sparsity_is_the_nearest_reachable(tiny_config, search, diagonal):
    """Per head, against all ways to keep the k most probable parameters."""
    length = 20
    config = tiny_config(search=search, mask_length=length, diagonal=diagonal, block_size=16, share_layers=False)
    sparse_attention = searching(config)
    probs = torch.sigmoid(sparse_attention.learned.alpha()).detach()
    size = probs.shape[-1]
    fields = {
        "special_tokens": sparse_attention.search.special_tokens,
        "diagonal": {"learned": None, "keep": True, "remove": False}[diagonal],
    }
    reachable = []
    for kept in range(size + 1):
        selected = torch.zeros_like(probs, dtype=torch.bool)
        selected.scatter_(-1, probs.topk(kept, dim=-1).indices, True)
        mask = to_sparse_mask(selected, sparse_attention.search.form, length, block_size=config.block_size, **fields)
        reachable.append(1.0 - mask.to_table().float().mean((-2, -1)))
    reachable = torch.stack(reachable)  # (K + 1, L, H)
    for asked in (0.0, 0.33, 0.8, 0.97):
        table = sparse_attention.thresholded_mask(sparsity=asked).to_table()
        got = 1.0 - table.float().mean((-2, -1))
        best = (reachable - asked).abs().amin(0)
        torch.testing.assert_close((got - asked).abs(), best, atol=1e-6, rtol=0.0)
        if search == "vertical_slash":
            continue  # an entry that no single parameter keeps may be more probable than one that is kept
        # What is kept is more probable than what is removed, and parameters go as a whole.
        learned = ~special_entries(length, sparse_attention.search.special_tokens)
        if diagonal != "learned":
            learned.fill_diagonal_(False)
        values = sparse_attention.mask_probs()
        for layer in range(2):
            for head in range(4):
                kept, value = table[layer, head][learned], values[layer, head][learned]
                if kept.any() and not kept.all():
                    assert value[kept].min() > value[~kept].max()


def test_select_keeps_ties_deterministic_and_counts_groups():
    probs = torch.tensor([[[0.9, 0.2, 0.9, 0.5]]])
    entries = TiedEntries(torch.tensor([4.0, 2.0, 6.0, 3.0]))  # of 16 entries per head, 1 fixed
    chosen = select(probs, entries, 1, sparsity=0.3, length=4)
    assert chosen.tolist() == [[[True, False, True, False]]]  # 1 + 4 + 6 = 11 kept, 11.2 asked
    assert torch.equal(chosen, select(probs, entries, 1, sparsity=0.3, length=4))
    assert select(probs, entries, 1, threshold=0.9, length=4).sum() == 0  # P > threshold, not >=


def test_freeze_refuses_empty_rows_unless_allowed(tiny_config):
    for allowed in (False, True):
        sparse_attention = searching(tiny_config(search="dam_u", mask_length=12, allow_empty_rows=allowed))
        with torch.no_grad():
            sparse_attention.mask_logits.fill_(-30.0)
        if allowed:
            assert sparse_attention.freeze().sparsity == 1.0
        else:
            sparse_attention.set_progress(0.25)
            with pytest.raises(ValueError, match="48 of 48 mask rows keep nothing.*allow_empty_rows"):
                sparse_attention.freeze()
            assert sparse_attention.searching and sparse_attention.progress == 0.25


def test_freeze_of_a_damaged_search_leaves_it_as_it_was(tiny_config):
    sparse_attention = searching(tiny_config(search="dam_u", mask_length=12))
    sparse_attention.set_progress(0.25)
    with torch.no_grad():
        sparse_attention.mask_logits[0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="mask_logits"):
        sparse_attention.freeze(sparsity=0.5)
    assert sparse_attention.searching and sparse_attention.progress == 0.25
