"""
BERT-base with random weights: stock attention against a sparse mask under `sparse_auto`.

    python -m benchmarks.model

Inference, and a step of fine-tuning (classification, dropout, AdamW), in tokens per second.
"""

import torch
from transformers import BertForSequenceClassification

from sparsebert import SparseBertForSequenceClassification

from .shared.model_timing import OURS, Subject, main, make_models, make_parser
from .shared.report import DROPOUT, FORWARD


VOCABULARY = 30522


def make_subject(mask_name, length, batch, options):
    """A [`Subject`] of a classifier on random tokens `(B, n)`; the gate sees the first sequence."""
    models, keep = make_models(
        BertForSequenceClassification,
        SparseBertForSequenceClassification,
        mask_name,
        length,
        options,
        num_hidden_layers=2 if options.quick else options.layers,
        vocab_size=VOCABULARY,
    )
    tokens = torch.randint(VOCABULARY, (batch, length), device=options.device)
    labels = torch.randint(2, (batch,), device=options.device)
    # Stock models share their parameters.
    stock, ours = (torch.optim.AdamW(models[name].parameters(), lr=2e-5) for name in ("sdpa", options.backend))

    def sample(model, name, keep):
        states = model.base_model(tokens[:1], attention_mask=keep).last_hidden_state
        return states, model.get_input_embeddings().weight

    def forward(model, name, keep):
        mask = None if keep is None else keep.expand(batch, -1, -1, -1)
        return model(tokens, attention_mask=mask, labels=labels).loss

    def step(model, name, keep):
        optimizer = ours if name == options.backend else stock
        forward(model, name, keep).backward()
        optimizer.step()
        optimizer.zero_grad()

    auto = {}
    for phase, dropout in ((FORWARD, 0.0), (DROPOUT, options.dropout)):
        with torch.set_grad_enabled(phase != FORWARD):
            attention = models[options.backend].base_model.sparse_attention
            shape = (batch, length, length)
            inputs = attention(options.backend, *shape, dropout=dropout, device=tokens.device, dtype=options.dtype)
            auto[phase] = inputs.backend
    return Subject(models, keep, sample, forward, step, auto)


def command_line():
    parser = make_parser("benchmarks.model", "BERT-base, stock against a sparse mask.", systems=("sdpa", OURS))
    parser.add_argument("--layers", type=int, default=12)
    parser.set_defaults(rounds=3)
    return parser


def run(arguments=None):
    main(arguments, command_line(), make_subject, "BERT-base", tokens=2048)


if __name__ == "__main__":
    run()
