"""What a masked model shall have in common with the dense one: zero where it is equal, and what each row compares."""

import dataclasses

import pytest
import torch
import transformers
from test_attach import MODELS, base_model, config_of, head_model

from sparsebert import attach, build_pattern
from sparsebert.training.searching.dense_agreement import agreement
from sparsebert.training.searching.matching import random_batches, recover
from sparsebert.training.searching.objectives import OBJECTIVES, POOLED_WEIGHT, hidden_states, squared_errors


LENGTH, HEADS = 16, 4
ROWS = torch.randint(5, 100, (16, LENGTH), generator=torch.Generator().manual_seed(7))


def masked(model, window_size=1):
    return attach(model, build_pattern("window", LENGTH, HEADS, window_size=window_size), attn_implementation="sdpa")


def model_for(objective, architecture="bert"):
    """A model that has what the objective compares."""
    if objective != "answers":
        return head_model(architecture)
    torch.manual_seed(3)
    return getattr(transformers, f"{MODELS[architecture][0]}ForSequenceClassification")(config_of(architecture)).eval()


def test_squared_errors():
    target = torch.randn(2, 3, 5)
    mean = target.mean((0, 1)).expand_as(target)
    torch.testing.assert_close(squared_errors((target, mean), (target, target)), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_nothing_is_lost_without_a_mask(name, architecture):
    objective, teacher = OBJECTIVES[name], model_for(name, architecture)
    assert objective.refuse(teacher) is None
    with torch.no_grad():
        wanted = objective.record(teacher, ROWS[:4])
        assert objective.loss(objective.record(teacher, ROWS[:4]), wanted).abs() < 1e-5
    model = masked(model_for(name, architecture))
    loss = objective.loss(objective.record(model, ROWS[:4]), wanted)
    loss.backward()
    assert loss > 1e-4
    gradients = [weight.grad for weight in model.base_model.parameters() if weight.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


def test_pooled():
    state, target = torch.randn(2, 3, 5, 8).unbind()
    cosine = torch.nn.functional.cosine_similarity(state.mean(1), target.mean(1)).mean()
    expected = squared_errors([state], [target])[0] + POOLED_WEIGHT * (1 - cosine)
    torch.testing.assert_close(OBJECTIVES["pooled"].loss([state], [target]), expected)


def test_relations_are_those_of_queries_keys_and_values():
    model = base_model("bert")
    layer = model.encoder.layer[-1].attention.self
    states = hidden_states(model, ROWS[:2])[-2]
    for projection, found in zip(
        (layer.query, layer.key, layer.value), OBJECTIVES["relations"].record(model, ROWS[:2]), strict=True
    ):
        heads = projection(states).view(2, LENGTH, HEADS, -1).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) / heads.shape[-1] ** 0.5
        torch.testing.assert_close(found.exp(), scores.softmax(-1))


def test_tokens_is_the_divergence_of_the_predictions():
    objective, model, other = OBJECTIVES["tokens"], head_model("bert"), masked(head_model("bert"))
    with torch.no_grad():
        ours, theirs = (each(ROWS[:2]).logits.log_softmax(-1) for each in (other, model))
        expected = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        found = objective.loss(objective.record(other, ROWS[:2]), objective.record(model, ROWS[:2]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering"])
def test_answers_are_the_logits_and_the_output_of_every_layer(head):
    torch.manual_seed(3)
    model = getattr(transformers, f"Bert{head}")(config_of("bert")).eval()
    batch = {"input_ids": ROWS[:4, :9], "token_type_ids": torch.ones(4, 9, dtype=torch.long)}
    *states, logits = OBJECTIVES["answers"].record(model, batch)
    output = model(**batch, output_hidden_states=True)
    torch.testing.assert_close(states, list(output.hidden_states[1:]))
    expected = output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)
    torch.testing.assert_close(logits, expected)
    loss = OBJECTIVES["answers"].loss([*states, logits + 2], [*states, logits])
    torch.testing.assert_close(loss, torch.tensor(4.0))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_in_bfloat16(name):
    stock, model, objective = model_for(name), masked(model_for(name)), OBJECTIVES[name]
    exact = objective.loss(objective.record(model, ROWS[:8]), objective.record(stock, ROWS[:8]))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (objective.record(each, ROWS[:8]) for each in (model, stock))
    found = objective.loss(ours, theirs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_recovery_with_each(name, monkeypatch):
    stock, model = model_for(name), masked(model_for(name))
    losses, objective = [], OBJECTIVES[name]

    def loss(*tensors):
        losses.append(objective.loss(*tensors))
        return losses[-1]

    monkeypatch.setitem(OBJECTIVES, name, dataclasses.replace(objective, loss=loss))
    recover(model, stock, random_batches(ROWS, 16, 12), 12, 2e-3, name)
    assert losses[-1] < 0.9 * losses[0]
    head = [each for each, _ in model.named_parameters() if not each.startswith(f"{model.base_model_prefix}.")]
    assert any(not torch.equal(model.get_parameter(each), stock.get_parameter(each)) for each in head) == (
        OBJECTIVES[name].of_head
    )
    if name == "pooled":
        assert agreement(model, {"own": None}, ROWS, stock)["own"]["cosine"] > 0.9


def test_models_without_what_is_compared():
    model = masked(base_model("modernbert"))
    with pytest.raises(ValueError, match="objective 'relations' has no meaning here: .* 'modernbert' has no query"):
        recover(model, model, [], 0, 1e-3, objective="relations")
    with pytest.raises(ValueError, match="objective 'tokens' has no meaning here: ModernBertModel does not predict"):
        recover(model, model, [], 0, 1e-3, objective="tokens")
    with pytest.raises(ValueError, match="objective 'answers' has no meaning here: ModernBertModel has no head"):
        recover(model, model, [], 0, 1e-3, objective="answers")
    # It is pre-trained to tell replaced tokens, and has no logits of a vocabulary.
    electra = masked(transformers.ElectraForPreTraining(config_of("electra")))
    with pytest.raises(ValueError, match="objective 'tokens' has no meaning here: ElectraForPreTraining does not"):
        recover(electra, electra, [], 0, 1e-3, objective="tokens")
    assert OBJECTIVES["tokens"].refuse(transformers.BertForPreTraining(config_of("bert"))) is None
    one_layer = config_of("bert")
    one_layer.num_hidden_layers = 1
    reason = OBJECTIVES["relations"].refuse(transformers.BertModel(one_layer))
    assert reason == "the projections of the only layer come before its mask"
    with pytest.raises(ValueError, match="objective must be one of"):
        recover(model, model, [], 0, 1e-3, objective="cosine")
