"""A batch of three sequences, the labels of each head of BERT, and what both test modules of these models do."""

import torch


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
