"""
Post-hoc search: `python -m sparsebert.search --model DIR --data TEXT --target_sparsity 0.9 --output_dir OUT`.

Learns the mask of a model that is trained already, and nothing else of it, by matching the dense model on text without
labels; with `--recover STEPS` trains the weights through the frozen mask after that. Compares with random and manual
masks at the same sparsity. Writes to `OUT`: the model with its mask (stock files, read back by
`sparsebert.load`), the tokenizer, `metrics.json`, `mask_probs.safetensors`, pictures (with the extra `viz`).
"""

import copy
from dataclasses import dataclass

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from ..checks import check_choice
from ..data.documents import load_documents
from ..data.examples import pretraining_dataset
from ..files import check_output_dir
from ..models.architectures import attention_modules, check_architecture, num_positions
from ..models.attaching import allowed_fields, attach
from ..models.loading import carries_mask, model_class_of
from ..search.searches import SEARCHES


LEARNED, RECOVERED = "learned", "learned, recovered"
# Batches whose attention probabilities the search starts from.
START_BATCHES = 8
# Of SparseBertConfig, where a search after training does better with other values than one during it: P itself instead
# of samples, ever steeper; log P, which lets what is removed be missed.
FIELDS = {
    "search": "dam_s",
    "share_layers": False,
    "special_tokens": "first_last",
    "symmetric": False,
    "mask_form": "log",
    "hard": False,
    "noise_scale": 0.0,
    "temperature": 1.0,
    "temperature_end": 0.05,
    "mask_logit_scale": 1.0,
}


@dataclass
class PosthocArguments:
    """
    Section `data` of a post-hoc search. Section `model` is about the mask: `target_sparsity` (needed), `search`,
    `share_layers`, `block_size`, ...

    Args:
        model (`str`): Folder or Hub id of a text encoder without a mask.
        data (`str` or `list`): Text without labels: `"builtin"`, files, or `"hub:owner/name"`, see
            [`load_documents`].
        validation (`str` or `list`, *optional*): The same for the held-out text; by default 1 document in 100.
        output_dir (`str`): Where everything goes.
        max_length (`int`): n, tokens per row and length of the mask.
        max_tokens (`int`): Stop reading the text here.
        max_validation_tokens (`int`): Stop reading the held-out text here.
        steps (`int`): Of the search; 0 keeps what it starts from, the dense model's attention.
        batch_size (`int`): Rows.
        learning_rate (`float`): Of alpha.
        shortest (`int`, *optional*): Every other batch is cut to a length from here to `max_length`, for a mask that
            serves short inputs too; `null` for none.
        train (`str`, *optional*): `"norms"` to learn the norms' weights along with the mask.
        recover (`int`): Steps of training the weights through the frozen mask.
        recover_learning_rate (`float`)
        patterns (`bool`): Compare with random and manual masks.
        seed (`int`)
        overwrite (`bool`): Accept an output folder that is not empty.
    """

    model: str | None = None
    data: str | list | None = None
    validation: str | list | None = None
    output_dir: str | None = None
    max_length: int = 128
    max_tokens: int = 1_000_000
    max_validation_tokens: int = 8192
    steps: int = 60
    batch_size: int = 8
    learning_rate: float = 0.05
    shortest: int | None = 8
    train: str | None = None
    recover: int = 0
    recover_learning_rate: float = 1e-4
    patterns: bool = True
    seed: int = 0
    overwrite: bool = False


def check(options, given):
    """
    Everything that can be refused before weights and text are read.

    Args:
        options ([`PosthocArguments`])
        given (`dict`): Section `model`.

    Returns:
        `tuple`: The model's configuration, and the fields of the search.
    Raises:
        ValueError: If a field is missing, wrong or without a meaning here, or the model cannot be searched.
        OSError: If there is no such model, or the output folder is not empty.
    """
    fields = FIELDS | given
    check_choice("search", fields["search"], tuple(SEARCHES))
    for name in ("model", "data", "output_dir"):
        if getattr(options, name) is None:
            raise ValueError(f"--{name} is needed")
    check_output_dir(options.output_dir, options.overwrite)
    if fields.get("target_sparsity") is None:
        raise ValueError("--target_sparsity is needed: the fraction of the attention to remove, such as 0.9")
    if refused := sorted(fields.keys() - set(allowed_fields(fields["search"])) - {"search"}):
        raise ValueError(f"--model.{refused[0]} has no meaning here: the model keeps its configuration")
    check_choice("train", options.train, (None, "norms"))
    for name, least in (("steps", 0), ("recover", 0), ("batch_size", 1), ("max_length", 8)):
        if getattr(options, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(options, name)}")
    if options.shortest is not None and not 8 <= options.shortest <= options.max_length:
        raise ValueError(f"shortest must be from 8 to max_length ({options.max_length}), got {options.shortest}")
    config = AutoConfig.from_pretrained(options.model)
    check_architecture(config.model_type)
    if config.model_type == "vit":
        raise ValueError(f"{options.model} reads images: this search is for models of text")
    if carries_mask(options.model):
        raise ValueError(f"{options.model} carries a mask already: the search starts from a dense model")
    if options.max_length > (positions := num_positions(config)):
        raise ValueError(f"max_length must be at most the model's {positions} positions, got {options.max_length}")
    # Refuses wrong fields, such as a target out of reach, without the weights.
    with torch.device("meta"):
        model = model_class_of(config)(copy.deepcopy(config))
    if len(attention_modules(model)) < config.num_hidden_layers:
        fields = {**fields, "share_layers": True} | given  # the same weights in every layer
    _attach(model, options, fields)
    return config, fields


def _attach(model, options, fields):
    others = {name: value for name, value in fields.items() if name != "search"}
    return attach(model, fields["search"], mask_length=options.max_length, attn_implementation="sparse_sdpa", **others)


def read_rows(options, tokenizer):
    """Rows of packed text for the search and held out: two tensors `(N, n)` of token ids."""
    rows = []
    for split, source, max_tokens in (
        ("train", options.data, options.max_tokens),
        ("validation", options.validation or options.data, options.max_validation_tokens),
    ):
        documents = load_documents(source, "all" if options.validation else split)
        packed = pretraining_dataset(documents, tokenizer, options.max_length, max_tokens=max_tokens)
        rows.append(torch.tensor(packed.with_format("numpy")["input_ids"][:]))
    if len(rows[0]) < options.batch_size:
        raise ValueError(
            f"data: the text gives {len(rows[0])} rows of {options.max_length} tokens, too few for a batch of "
            f"{options.batch_size}: use more text, or a smaller batch_size or max_length"
        )
    return rows


def report_table(report, sparsities):
    """The agreement of all masks as a Markdown table."""
    with_mlm = any("mlm_loss" in numbers for numbers in report.values())
    table = Table(box=MARKDOWN)
    for column in ("mask", "removed", "cosine", "5 % quantile", "error of the layers", *(["MLM loss"] * with_mlm)):
        table.add_column(column)
    for name, numbers in report.items():
        errors = " ".join(f"{error:.2f}" for error in numbers["layer_error"])
        cells = [name, f"{sparsities[name]:.1%}", f"{numbers['cosine']:.3f}", f"{numbers['cosine_5']:.3f}", errors]
        table.add_row(*cells, *([f"{numbers['mlm_loss']:.3f}"] if with_mlm else []))
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get().strip()
