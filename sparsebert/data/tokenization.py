"""Train a WordPiece tokenizer, and check that a tokenizer fits a model."""

import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from .row_cache import cached_json, fingerprint_of


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_tokenizer(
    documents: Iterable[list[str]],
    vocab_size: int,
    lowercase: bool = True,
    max_characters: int = 20_000_000,
    cache_dir: str | os.PathLike | None = None,
) -> "PreTrainedTokenizerBase":
    """
    Train a BERT tokenizer (WordPiece) on the beginning of a corpus. The same text always gives the same tokenizer;
    that of documents from [`load_documents`] is kept, and the next call with the same text and arguments finds it.

    Args:
        documents (`Iterable[list[str]]`):
            Documents as lists of paragraphs, e.g. from [`load_documents`].
        vocab_size (`int`):
            Maximum size of the vocabulary, including the five special tokens. At most a sixteenth of it (but at least
            100 entries) is used for single characters; rarer characters become `[UNK]`.
        lowercase (`bool`, *optional*, defaults to `True`):
            Whether to lowercase the text and strip accents, like uncased BERT.
        max_characters (`int`, *optional*, defaults to 20 million):
            Stop reading after this many characters. More would take time and memory and hardly change the vocabulary.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder for the vocabulary; by default that of `datasets` (`HF_DATASETS_CACHE`).

    Returns:
        [`~transformers.BertTokenizer`]: The tokenizer. Its `model_max_length` is not set.
    """
    from transformers import BertTokenizer

    def make() -> dict[str, int]:
        return _train_vocabulary(documents, vocab_size, lowercase, max_characters)

    settings = (vocab_size, lowercase, max_characters)
    vocabulary = cached_json(make, fingerprint_of(documents), settings, cache_dir)
    return BertTokenizer(vocab=vocabulary, do_lower_case=lowercase)


def _train_vocabulary(
    documents: Iterable[list[str]], vocab_size: int, lowercase: bool, max_characters: int
) -> dict[str, int]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    paragraphs = []
    characters: Counter = Counter()
    read = 0
    progress = tqdm(desc="Reading text", total=max_characters, unit="character", unit_scale=True, disable=None)
    for document in documents:
        for paragraph in document:
            normalized = normalizer.normalize_str(paragraph)
            characters.update(normalized)
            paragraphs.append(normalized)
            read += len(paragraph)
        progress.update(read - progress.n)
        if read >= max_characters:
            break
    progress.close()
    del characters[" "]
    if not characters:
        raise ValueError("no text to train a tokenizer on")

    most = max(100, vocab_size // 16)
    alphabet = sorted(sorted(characters, key=lambda character: (-characters[character], character))[:most])
    continuations = [f"##{character}" for character in alphabet if not _is_punctuation(character)]
    smallest = len(SPECIAL_TOKENS) + len(alphabet) + len(continuations)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} for the characters of this text, got {vocab_size}")
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        # The trainer would number the "##c" in the random order of a hash map, and break ties between merges by these
        # numbers. As special tokens they have fixed numbers; outside this trainer they are not special.
        special_tokens=[*SPECIAL_TOKENS, *continuations],
        show_progress=sys.stderr.isatty(),
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(paragraphs, trainer)
    return tokenizer.get_vocab()


def _is_punctuation(character: str) -> bool:
    # As in BERT, whose pre-tokenizer splits these off as words.
    return (character.isascii() and not character.isalnum()) or unicodedata.category(character).startswith("P")


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Refuse a tokenizer that lacks a special token of BERT, or has more tokens than the model has embeddings."""
    name = tokenizer.name_or_path or type(tokenizer).__name__
    roles = ("pad_token", "cls_token", "sep_token", "mask_token")
    missing = [role for role in roles if getattr(tokenizer, role) is None]
    if missing:
        raise ValueError(f"tokenizer {name!r} has no {', '.join(missing)}; pre-training needs {', '.join(roles)}")
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"tokenizer {name!r} has {len(tokenizer)} tokens but the model has vocab_size={vocab_size}; "
            "vocab_size must be at least the number of tokens"
        )
