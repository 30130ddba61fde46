"""What the experiments that pre-train on text share: their settings, a tokenizer for all cells, a run of a cell."""

import zlib
from dataclasses import dataclass, fields

from ..checks import check_range
from ..data.documents import load_documents
from ..data.tokenization import train_tokenizer
from ..models.configuration_sparsebert import SparseBertConfig, pattern_mask
from ..training.pretraining import pretrain
from .sections import check_training, model_section, training_section


TOKENIZER_CHARACTERS = 5_000_000


@dataclass
class TextSettings:
    """
    Text, model and training.

    Args:
        text (`str` or `list`): Training text, as of `pretrain.py`.
        validation (`str` or `list`, *optional*): Held-out text; by default 1 document in 100.
        tokenizer (`str`, *optional*): Folder or Hub id; by default one WordPiece of `vocab_size` for all cells.
        vocab_size (`int`): Tokens.
        max_length (`int`): n.
        max_validation_tokens (`int`): Stop reading the held-out text here.
        hidden_size, num_layers, num_heads, intermediate_size (`int`): Of the model.
        dropout (`float`): Of states and attention.
        max_steps (`int`): Training steps; the text is read once, as far as they need it.
        batch_size (`int`): Sequences per device.
        gradient_accumulation_steps (`int`): Batches per step.
        learning_rate, warmup_steps, weight_decay, optim, bf16, seed: As of `TrainingArguments`.
    """

    text: str | list = "builtin"
    validation: str | list | None = None
    tokenizer: str | None = None
    vocab_size: int = 30522
    max_length: int = 512
    max_validation_tokens: int = 200_000
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    dropout: float = 0.1
    max_steps: int = 1000
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.01
    optim: str = "adamw_torch_fused"
    bf16: bool = False
    seed: int = 0


def text_fields(settings):
    """The fields of [`TextSettings`], as a dictionary, of one that may have more."""
    return {field.name: getattr(settings, field.name) for field in fields(TextSettings)}


def fixed_mask(cell, model):
    """
    The mask of a cell with a pattern.

    Args:
        cell (`dict`): Fields of [`TextSettings`].
        model (`dict`): More fields of [`SparseBertConfig`], with a pattern.

    Returns:
        [`SparseMask`]
    Raises:
        ValueError: If there is no such model.
    """
    config = SparseBertConfig(**model_section(cell, model))
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(f"hidden_size must be a multiple of num_heads {cell['num_heads']}, got {cell['hidden_size']}")
    return pattern_mask(config)


def check_text(cell, model):
    """
    Raises:
        ValueError, OSError: If a field is out of its range, there is no such model, or no such file of text.
    """
    check_training(cell)
    check_range("max_validation_tokens", cell["max_validation_tokens"], 1)
    fixed_mask(cell, model)
    for source in (cell["text"], cell["validation"]):
        if source not in (None, "builtin") and not str(source).startswith("hub:"):
            load_documents(source, "all")


def run_text(cell, folder, model, nsp=False):
    """
    Pre-train the model of a cell.

    Args:
        cell (`dict`): Fields of [`TextSettings`].
        folder (`Path`): Output of the run; the tokenizer goes beside it.
        model (`dict`): More fields of [`SparseBertConfig`].
        nsp (`bool`): Next-sentence pairs.

    Returns:
        `dict`: The metrics of [`pretrain`].
    """
    tokenizer = cell["tokenizer"]
    if tokenizer is None:
        key = zlib.crc32(repr((cell["text"], cell["validation"], cell["vocab_size"])).encode())
        tokenizer = folder.parent / f"tokenizer_{key:08x}"
        if not (tokenizer / "tokenizer.json").is_file():
            documents = load_documents(cell["text"], "train" if cell["validation"] is None else "all")
            train_tokenizer(documents, cell["vocab_size"], max_characters=TOKENIZER_CHARACTERS).save_pretrained(
                tokenizer
            )
    sequences = cell["max_steps"] * cell["batch_size"] * cell["gradient_accumulation_steps"]
    data = {name: cell[name] for name in ("text", "validation", "max_length", "max_validation_tokens")}
    data |= {"tokenizer": str(tokenizer), "nsp": nsp, "max_tokens": sequences * cell["max_length"], "pictures": False}
    return pretrain({"data": data, "model": model_section(cell, model), "training": training_section(cell, folder)})
