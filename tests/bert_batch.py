"""A batch of three sequences, and the labels of each head of BERT."""

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
