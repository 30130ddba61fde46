"""
Translation with sparse attention: `python -m sparsebert.translation RECIPE [--field value ...]`.

An [`EncoderDecoderModel`] of a SparseBERT encoder and a causal SparseBERT decoder under the same pattern, with a cased
WordPiece trained on both languages; the attention of the decoder to the encoder is dense. Writes to `output_dir`: the
model, the tokenizer, `translations.txt` (of the test set), `metrics.json`.

Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5 and Appendix G.3.
"""

import re
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EncoderDecoderModel,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.utils import logging

from ..checks import check_range
from ..data.tokenization import check_tokenizer, train_tokenizer
from ..files import check_output_dir, open_text, write_metrics
from ..models.configuration_sparsebert import SparseBertConfig
from ..models.modeling_sparsebert import SparseBertLMHeadModel, SparseBertModel
from .trainer import SparseBertTrainer


logger = logging.get_logger(__name__)

# How a WordPiece's words are joined again: no space before these, after those, and around the last.
_JOIN = (
    (re.compile(r" ([.,!?:;%)\]}“…])"), r"\1"),
    (re.compile(r"([(\[{„]) "), r"\1"),
    (re.compile(r" ([-'’/]) "), r"\1"),
)


@dataclass
class TranslationArguments:
    """
    Section `data` of a translation recipe.

    Args:
        train (`str` or `list`): A `.tsv` file with source and target in two columns, or two files, source and target,
            with a sentence a line; any of them may be compressed (`.gz`, `.xz`).
        test (`str` or `list`): The same, to translate.
        tokenizer (`str`, *optional*): Folder or Hub id; by default a cased WordPiece of `model.vocab_size` is trained
            on both languages.
        max_length (`int`): Tokens per sentence, longer ones are cut.
        max_train_pairs, max_test_pairs (`int`, *optional*): Read so many.
        num_beams (`int`): Of the beam search.
        overwrite (`bool`): Accept an output folder that is not empty.
    """

    train: str | list | None = None
    test: str | list | None = None
    tokenizer: str | None = None
    max_length: int = 128
    max_train_pairs: int | None = None
    max_test_pairs: int | None = None
    num_beams: int = 4
    overwrite: bool = False


SECTIONS = {"data": TranslationArguments, "model": SparseBertConfig, "training": Seq2SeqTrainingArguments}


def read_pairs(source, max_pairs=None):
    """
    Sentences and their translations. Pairs of which a side is empty are left out.

    Args:
        source (`str` or `list`): As `train` of [`TranslationArguments`].
        max_pairs (`int`, *optional*): Read so many.

    Returns:
        `list[tuple[str, str]]`
    Raises:
        OSError: If a file cannot be read.
        ValueError: If two files have different numbers of lines, a line of a table has not two columns, or there is
            no pair.
    """
    if isinstance(source, str):
        pairs = _read_table(source)
    elif isinstance(source, list) and len(source) == 2:
        sides = [_read_lines(path) for path in source]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{source[0]} has {len(sides[0])} lines and {source[1]} has {len(sides[1])}: line i of one must be "
                "the translation of line i of the other"
            )
        pairs = list(zip(*sides, strict=True))
    else:
        raise ValueError(f"pairs must be one .tsv file or a list of two text files, got {source!r}")
    found = [pair for pair in pairs if all(pair)][:max_pairs]
    if not found:
        raise ValueError(f"no pair of sentences in {source!r}")
    if empty := sum(not all(pair) for pair in pairs):
        logger.warning(f"{source}: {empty} pairs with an empty side are left out")
    return found


def _read_lines(path):
    with open_text(path) as file:
        return [" ".join(line.split()) for line in file]


def _read_table(path):
    pairs = []
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            columns = line.rstrip("\r\n").split("\t")
            if len(columns) != 2:
                raise ValueError(f"{path}:{number}: expected source and target between one tab, got {len(columns)} "
                                 "columns")  # fmt: skip
            pairs.append(tuple(" ".join(column.split()) for column in columns))
    return pairs


def check_model(model, max_length):
    """
    The configurations of encoder and decoder.

    Args:
        model (`dict`): Section `model` of the recipe, with a `pattern`.
        max_length (`int`): Tokens per sentence.

    Returns:
        `tuple` of [`SparseBertConfig`]
    Raises:
        ValueError: If the fields are wrong.
    """
    if model.get("pattern") is None or model.get("search") is not None:
        raise ValueError(
            f"translation needs a pattern ('dense' for none) and no search, got pattern {model.get('pattern')!r} and "
            f"search {model.get('search')!r}"
        )
    encoder = SparseBertConfig(**model)
    if max_length > min(encoder.max_position_embeddings, encoder.mask_length):
        raise ValueError(
            f"max_length must be at most max_position_embeddings {encoder.max_position_embeddings} and mask_length "
            f"{encoder.mask_length}, got {max_length}"
        )
    return encoder, SparseBertConfig(**model | {"is_decoder": True, "add_cross_attention": True})


def build_model(model, tokenizer, max_length, num_beams=4):
    """
    A sparse encoder with a sparse causal decoder.

    Args:
        model (`dict`): Fields of [`SparseBertConfig`] of both.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Of both languages.
        max_length (`int`): Tokens per sentence.
        num_beams (`int`): Of the beam search.

    Returns:
        [`~transformers.EncoderDecoderModel`]: It begins with `[CLS]` and ends with `[SEP]`.
    Raises:
        ValueError: As [`check_model`].
    """
    encoder, decoder = check_model(model, max_length)
    result = EncoderDecoderModel(encoder=SparseBertModel(encoder), decoder=SparseBertLMHeadModel(decoder))
    special = {
        "decoder_start_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, value in special.items():
        setattr(result.config, name, value)
    result.generation_config = GenerationConfig(
        **special, max_length=max_length, num_beams=num_beams, do_sample=False, early_stopping=num_beams > 1
    )
    return result


def load_model(folder):
    """
    A model that was saved: its masks come back with it, but the host would run it with attention that ignores them.

    Args:
        folder (`str` or `os.PathLike`): Folder or Hub id.

    Returns:
        [`~transformers.EncoderDecoderModel`]
    """
    return EncoderDecoderModel.from_pretrained(folder, attn_implementation="sparse_auto")


def encode(pairs, tokenizer, max_length):
    """
    Features of pairs of sentences.

    Args:
        pairs (`list[tuple[str, str]]`): Sources and targets.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Of both languages.
        max_length (`int`): Tokens per sentence, special ones included.

    Returns:
        `datasets.Dataset`: `input_ids`, `attention_mask` and `labels`; the latter end with `[SEP]` and begin without
        `[CLS]`, with which the decoder begins.
    """
    import datasets

    sources, targets = zip(*pairs, strict=True)
    features = tokenizer(list(sources), truncation=True, max_length=max_length, return_token_type_ids=False)
    labels = tokenizer(list(targets), truncation=True, max_length=max_length)["input_ids"]
    return datasets.Dataset.from_dict({**features, "labels": [ids[1:] for ids in labels]})


def decode(ids, tokenizer):
    """
    Texts of predicted tokens.

    Args:
        ids (`np.ndarray` of shape `(N, n)`): Tokens; those below 0 are padding.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`])

    Returns:
        `list[str]`
    """
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for pattern, replacement in _JOIN:
        texts = [pattern.sub(replacement, text) for text in texts]
    return [text.strip() for text in texts]


def bleu(translations, references):
    """
    Cased corpus BLEU.

    Args:
        translations, references (`list[str]`)

    Returns:
        `tuple[float, str]`: From 0 to 100, and sacreBLEU's signature.
    """
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    return metric.corpus_score(translations, [references]).score, str(metric.get_signature())


class TranslationTrainer(SparseBertTrainer, Seq2SeqTrainer):
    """[`SparseBertTrainer`] that evaluates by generating."""


def translate(recipe):
    """
    Train and test a translation model as a recipe says.

    Args:
        recipe (`dict`): Sections `data`, `model`, `training` as [`load_recipe`] gives them.

    Returns:
        `dict`: The metrics: `"bleu"`, `"bleu_signature"`, `"bleu_of_references"` (through the tokenizer and back),
        `"loss"`, `"sparsity"` of the mask before causality, and more.
    Raises:
        ValueError, OSError: For what is wrong in the recipe or the data.
    """
    start = time.perf_counter()
    data, training = TranslationArguments(**recipe["data"]), Seq2SeqTrainingArguments(**recipe["training"])
    training.predict_with_generate = True
    output = Path(training.output_dir)
    check_data(data)
    check_model(recipe["model"], data.max_length)
    check_output_dir(output, data.overwrite, training.resume_from_checkpoint)
    train = read_pairs(data.train, data.max_train_pairs)
    test = read_pairs(data.test, data.max_test_pairs)
    set_seed(training.seed)
    vocab_size = SparseBertConfig(**recipe["model"]).vocab_size
    if data.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(data.tokenizer)
    else:
        tokenizer = train_tokenizer(map(list, train), vocab_size, lowercase=False)
        tokenizer.model_max_length = data.max_length
    check_tokenizer(tokenizer, vocab_size)
    model = build_model(recipe["model"], tokenizer, data.max_length, data.num_beams)
    train_set, test_set = (encode(pairs, tokenizer, data.max_length) for pairs in (train, test))
    trainer = TranslationTrainer(
        model,
        training,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),  # label smoothing takes the labels away
        processing_class=tokenizer,
    )
    trained = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    prediction = trainer.predict(test_set)
    translations = decode(prediction.predictions, tokenizer)
    references = [target for _, target in test]
    score, signature = bleu(translations, references)
    round_trip = tokenizer(references, truncation=True, max_length=data.max_length)["input_ids"]
    ceiling = bleu([decode(np.array([ids]), tokenizer)[0] for ids in round_trip], references)[0]
    (output / "translations.txt").write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    metrics = {
        "bleu": score,
        "bleu_signature": signature,
        "bleu_of_references": ceiling,
        "loss": prediction.metrics["test_loss"],
        "sparsity": model.encoder.sparse_attention.sparsity(),
        "pattern": model.encoder.config.pattern,
        "num_parameters": model.num_parameters(),
        "train_pairs": len(train),
        "test_pairs": len(test),
        "steps": trained.global_step,
        "train_seconds": trained.metrics["train_runtime"],
        "seconds": time.perf_counter() - start,
    }
    return write_metrics(output / "metrics.json", metrics)


def check_data(data):
    """
    Raises:
        ValueError: If a field of [`TranslationArguments`] is missing or out of its range, or sacreBLEU is not there.
        OSError: If there is no such file.
    """
    for name in ("train", "test"):
        source = getattr(data, name)
        if source is None:
            raise ValueError(f"--{name} must name a .tsv file of pairs, or two text files with a sentence a line")
        for path in [source] if isinstance(source, str) else source:
            if not Path(path).is_file():
                raise FileNotFoundError(f"{name}: there is no file {str(path)!r}")
    for name, low in (("max_length", 3), ("num_beams", 1), ("max_train_pairs", 1), ("max_test_pairs", 1)):
        if getattr(data, name) is not None:
            check_range(name, getattr(data, name), low)
    if find_spec("sacrebleu") is None:
        raise ValueError("translation needs sacreBLEU: pip install 'sparsebert[translation]'")
