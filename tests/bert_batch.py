"""A batch of three sequences, the labels of each head of BERT, and what both test modules of these models do."""

import torch
from transformers.utils import logging

from sparsebert import SparseBertForMaskedLM


LENGTH = 12
IDS = torch.randint(5, 100, (3, LENGTH), generator=torch.Generator().manual_seed(1))
SIZES = (12, 9, 5)
PADDING = (torch.arange(LENGTH) < torch.tensor(SIZES)[:, None]).long()
CLASSES = torch.tensor([0, 1, 0])
# Labels of each head.
HEADS = {
    "Model": {},
    "ForPreTraining": {"labels": IDS, "next_sentence_label": CLASSES},
    "ForMaskedLM": {"labels": IDS},
    "LMHeadModel": {"labels": IDS},
    "ForNextSentencePrediction": {"labels": CLASSES},
    "ForSequenceClassification": {"labels": CLASSES},
    "ForTokenClassification": {"labels": IDS % 2},
    "ForQuestionAnswering": {"start_positions": CLASSES, "end_positions": CLASSES + 1},
    "ForMultipleChoice": {"labels": torch.tensor([2])},
}


def inputs_of(name, padded=True, labels=False):
    """Arguments of the forward of a head."""
    inputs = {"input_ids": IDS} | ({"attention_mask": PADDING} if padded else {})
    if name == "ForMultipleChoice":
        inputs = {key: value[None] for key, value in inputs.items()}
    return inputs | (HEADS[name] if labels else {})


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def check_sequence_of_padding(tiny_config, caplog, backends, device):
    """A sequence without a real token changes no loss or gradient, and is said once."""
    ids, padding = torch.randint(5, 100, (3, 12), device=device), torch.ones(3, 12, dtype=torch.long, device=device)
    padding[1], padding[2, 7:] = 0, 0
    labels = ids.masked_fill(padding == 0, -100)
    logging.warning_once.cache_clear()
    states = []
    for backend in backends:
        torch.manual_seed(0)
        # Heads of 32, since sparse_triton has no smaller ones.
        config = tiny_config(pattern="window", hidden_size=128, attn_implementation=backend)
        model = SparseBertForMaskedLM(config).to(device)
        for _ in range(2):
            output = model(ids, padding, labels=labels, output_hidden_states=True)
        output.loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        assert output.loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
        states.append(output.hidden_states[-1].detach())
        torch.testing.assert_close(states[-1], states[0], atol=1e-5, rtol=1e-5)
    assert caplog.text.count("padding only") == 1
