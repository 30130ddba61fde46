"""
One encoder layer of BERT-base: stock attention against a sparse mask under `sparse_auto`.

    python -m benchmarks.layer

Forward, and a training step (forward and backward) with dropout. Masks are prepared beforehand, as a model does once
for all its layers.
"""

import torch
from transformers import BertModel

from sparsebert import SparseBertModel

from .shared.model_timing import Subject, main, make_models, make_parser
from .shared.report import DROPOUT, FORWARD


def make_subject(mask_name, length, batch, options):
    """A [`Subject`] of one layer on random activations `(B, n, 64 H)`."""
    models, keep = make_models(
        BertModel, SparseBertModel, mask_name, length, options, num_hidden_layers=1, vocab_size=8
    )
    hidden = torch.randn(batch, length, 64 * options.heads, device=options.device, requires_grad=True)
    grad = torch.randn_like(hidden)
    prepared = {}
    for training in (False, True):
        with torch.set_grad_enabled(training):
            prepared[training] = models[options.backend].sparse_attention(
                options.backend,
                batch,
                length,
                length,
                dropout=options.dropout if training else 0.0,
                device=hidden.device,
                dtype=options.dtype,
            )

    def forward(model, name, keep):
        states = hidden.to(next(model.parameters()).dtype)
        kwargs = {"mask_inputs": prepared[torch.is_grad_enabled()]} if name == options.backend else {}
        return model.encoder.layer[0](states, keep, **kwargs), states

    def step(model, name, keep):
        output, _ = forward(model, name, keep)
        output.backward(grad.to(output.dtype))
        model.zero_grad()
        hidden.grad = None

    auto = {FORWARD: prepared[False].backend, DROPOUT: prepared[True].backend}
    return Subject(models, keep, forward, forward, step, auto)


def command_line():
    return make_parser("benchmarks.layer", "An encoder layer of BERT-base, stock against a sparse mask.")


def run(arguments=None):
    main(arguments, command_line(), make_subject, "Encoder layer of BERT-base")


if __name__ == "__main__":
    run()
