"""
Compare a dense encoder with one that has a mask on texts of your own: texts per second in every engine and precision,
how many nearest neighbors stay, and whether to deploy.

Texts are pooled as the files of sentence-transformers beside the models say, otherwise by the mean. Where the sparse
model reads longer texts, the lines "split" show what is done without a mask: the mean of what a text's parts give.
"""

from dataclasses import dataclass, field

from ..analysis.encoder_comparison import (
    KINDS,
    ROUNDS,
    compare_encoders,
    comparison_table,
    read_encoder,
    verdict,
)
from ..attention.model_masks import sparse_attention_of
from ..checks import check_choice, check_range
from ..data.documents import first_texts
from ..hub import HubArguments
from ..models.inference.compiling import PRECISIONS
from ._command import Command, Results


@dataclass
class ComparingArguments(HubArguments):
    """
    What to compare, and on what.

    Args:
        models (`list[str]`): Folders or Hub ids of the dense and of the sparse model, which may be compiled.
        data (`str`): Text like that which the models are for, see [`load_documents`]; every document is a text.
        length (`int`): Tokens that texts are cut to, or fewer if a model takes fewer.
        num_texts (`int`): Number of documents.
        precisions (`list[str]`): Precisions to try in PyTorch and, where it is installed, in OpenVINO: `float32`,
            `bfloat16`, `int8`.
        split (`int`): Tokens of a part of a text, for the lines "split".
        rounds (`int`): Number of times that the first 16 documents are encoded by each system, which are timed.
    """

    models: list[str]
    data: str
    length: int = 512
    num_texts: int = 64
    precisions: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    split: int = 512
    rounds: int = ROUNDS


def command(words):
    examples = (
        "DENSE SPARSE --data FILE --length 1024",
        "DENSE SPARSE --data FILE --precisions bfloat16 int8",
    )
    return Command(run, {"comparing": ComparingArguments}, examples, "DENSE SPARSE")


def run(values):
    options = ComparingArguments(**values["comparing"])
    if len(options.models) != len(KINDS):
        raise ValueError(f"models must be two, a dense and a sparse one, got {options.models}")
    for precision in options.precisions:
        check_choice("precisions", precision, PRECISIONS)
    for name, least in (("length", 8), ("num_texts", 2), ("split", 8), ("rounds", 1)):
        check_range(name, getattr(options, name), least)
    hub_arguments = options.hub_arguments(*options.models)
    texts = first_texts(options.data, options.num_texts)
    if len(texts) < 2:
        raise ValueError(
            f"data {options.data!r} must have at least 2 documents (in a text file, a blank line separates them), "
            f"got {len(texts)}"
        )
    encoders = {
        kind: read_encoder(source, options.length, **hub_arguments)
        for kind, source in zip(KINDS, options.models, strict=True)
    }
    found = compare_encoders(encoders, texts, options.precisions, options.split, options.rounds)
    found["verdict"] = verdict(found)
    found["remarks"] = [
        f"{source}, given as the {kind} model, has {'a' if kind == 'dense' else 'no'} mask."
        for kind, source in zip(KINDS, options.models, strict=True)
        if (sparse_attention_of(encoders[kind].model) is None) == (kind == "sparse")
    ]
    return Results(found, [comparison_table(found)], [*found["remarks"], found["verdict"]])
