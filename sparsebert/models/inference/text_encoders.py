"""
Embeddings of texts: by a model as sentence-transformers would run it, and of long texts by their parts.

Letters: N texts, B batch, n tokens of a sequence, D hidden size.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import cached_file

from ...checks import check_range, shortened
from ...masks.mask_sources import IF_THERE, check_subfolder
from ..sentence_files import check_not_a_module


# By the names in files of sentence-transformers, old and new.
_POOLINGS = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
_PLAIN = ("Transformer", "Pooling", "Normalize")


@dataclass
class TextEncoder:
    """
    A model that makes one embedding of a text.

    Args:
        model (`PreTrainedModel`): An encoder, also a compiled one.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        length (`int`): Number of tokens that texts are cut to.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` of the hidden states of the tokens, or `"cls"`.
        normalized (`bool`, *optional*, defaults to `False`): Whether embeddings have the norm 1.
    """

    model: Any
    tokenizer: Any
    length: int
    pooling: str = "mean"
    normalized: bool = False

    @torch.no_grad()
    def encode(self, texts: Sequence[str], batch_size: int = 16) -> np.ndarray:
        """Embeddings `(N, D)`, float32. Texts of similar lengths share a batch."""
        if not len(texts):
            return np.zeros((0, self.model.config.hidden_size), np.float32)
        ids = self.tokenizer(list(texts), truncation=True, max_length=self.length, verbose=False)["input_ids"]
        order, found = sorted(range(len(ids)), key=lambda index: len(ids[index])), []
        for begin in range(0, len(ids), batch_size):
            rows = [ids[index] for index in order[begin : begin + batch_size]]
            batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt", verbose=False)
            mask = batch["attention_mask"].to(self.model.device)
            inputs = {"input_ids": batch["input_ids"].to(self.model.device), "attention_mask": mask}
            states = self.model.base_model(**inputs).last_hidden_state.float()  # (B, n, D)
            real = mask[..., None].to(states.dtype)
            mean = self.pooling == "mean"
            found.append((states * real).sum(1) / real.sum(1).clamp(min=1) if mean else states[:, 0])
        embeddings = torch.cat(found)[np.argsort(order)]
        if self.normalized:
            embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
        return embeddings.cpu().numpy()


def pooling_of(source: Any, **hub_arguments: Any) -> tuple[str, bool]:
    """How sentence-transformers pools with a model, and whether it normalizes; the mean where it has no say."""

    def read(name):
        path = cached_file(source, name, **hub_arguments, **IF_THERE)
        try:
            return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source}: {name} is not valid JSON: {error}") from error

    check_not_a_module(source, **hub_arguments)
    modules = read("modules.json") or []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{source}: modules.json must be a list of objects, got {shortened(repr(modules))}")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if others := [kind for kind in kinds if kind not in _PLAIN]:
        raise ValueError(f"{source}: modules.json has a {others[0]}, expected {', '.join(_PLAIN)}")
    if "Pooling" not in kinds:
        return "mean", "Normalize" in kinds
    folder = check_subfolder(str(modules[kinds.index("Pooling")].get("path", "1_Pooling")))
    config = read(f"{folder or '.'}/config.json")
    config = config if isinstance(config, dict) else {}
    on = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True and "mode" in name]
    mode = str(config.get("pooling_mode") or " and ".join(on))
    if mode not in _POOLINGS:
        raise ValueError(f"{source}: the pooling must be one of {', '.join(_POOLINGS)}, got {mode!r}")
    return _POOLINGS[mode], "Normalize" in kinds


def encode_long(encoder: Any, texts: Sequence[str], split: int | None = None, batch_size: int = 16) -> np.ndarray:
    """
    Embeddings of long texts by a model for short ones, as is usual without sparse attention: a text is split into
    parts of at most `split` tokens, and its embedding is the mean of theirs.

    Args:
        encoder (`SentenceTransformer` or [`TextEncoder`]): Has a `tokenizer`, which must be a fast one, and `encode`.
        texts (`Sequence[str]`): N texts.
        split (`int`, *optional*): Most tokens of a part, special tokens included, but not more than the encoder takes,
            which would cut the parts. By default 512, or what it takes.
        batch_size (`int`, *optional*, defaults to 16): Parts of a batch.

    Returns:
        `numpy.ndarray` of shape `(N, D)`: float32, not normalized.

    Raises:
        ValueError: If the encoder cuts parts of so many tokens, or `texts` is one text.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of texts, got one text")
    tokenizer = encoder.tokenizer
    least = tokenizer.num_special_tokens_to_add() + 1
    most = getattr(encoder, "max_seq_length", getattr(encoder, "length", None))
    split = min(512, most or 512) if split is None else split
    check_range("split", split, least, most)
    size = split - least + 1
    parts, counts = [], []
    for text in texts:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = found["offset_mapping"]
        pieces = [places[begin : begin + size] for begin in range(0, len(places), size)]
        parts += [text[piece[0][0] : piece[-1][1]] for piece in pieces] or [text]
        counts.append(max(len(pieces), 1))
    if not parts:
        return encoder.encode([""], batch_size=batch_size)[:0]
    rows = encoder.encode(parts, batch_size=batch_size)
    return np.stack([each.mean(0) for each in np.split(rows, np.cumsum(counts)[:-1])])
