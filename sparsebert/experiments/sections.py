"""What the recipes of cells have in common, whatever they train."""

import torch

from ..checks import check_range


_TRAINING = (
    "max_steps",
    "gradient_accumulation_steps",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "label_smoothing_factor",
    "optim",
    "bf16",
    "seed",
)


def model_section(cell, model):
    """
    Section `model` of a recipe.

    Args:
        cell (`dict`): Settings of the cell.
        model (`dict`): More fields of [`SparseBertConfig`].

    Returns:
        `dict`
    """
    return {
        "vocab_size": cell["vocab_size"],
        "hidden_size": cell["hidden_size"],
        "num_hidden_layers": cell["num_layers"],
        "num_attention_heads": cell["num_heads"],
        "intermediate_size": cell["intermediate_size"],
        "max_position_embeddings": cell["max_length"],
        "mask_length": cell["max_length"],
        "hidden_dropout_prob": cell["dropout"],
        "attention_probs_dropout_prob": cell["dropout"],
        # A row of a random pattern may have no key, or none in an input shorter than the mask.
        "allow_empty_rows": True,
        **model,
    }


def training_section(cell, folder):
    """
    Section `training` of a recipe.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`Path`): Output of the run.

    Returns:
        `dict`
    """
    return {name: cell[name] for name in _TRAINING if name in cell} | {
        "output_dir": str(folder),
        "per_device_train_batch_size": cell["batch_size"],
        "per_device_eval_batch_size": cell["batch_size"],
        "logging_steps": max(cell["max_steps"] // 20, 1),
        "save_strategy": "no",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "disable_tqdm": True,
    }


def check_training(cell):
    """
    Raises:
        ValueError: If there is nothing to train on.
    """
    for name in ("max_steps", "batch_size", "gradient_accumulation_steps"):
        check_range(name, cell[name], 1)
