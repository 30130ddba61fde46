"""
Translation with sparse attention.

The model is an [`~transformers.EncoderDecoderModel`] of a SparseBERT encoder and a causal SparseBERT decoder with the
same pattern; cross-attention is dense. The tokenizer is a cased WordPiece trained on both languages. A saved model is
loaded by `EncoderDecoderModel.from_pretrained(folder, attn_implementation="sparse_auto")`: without the backend's name
one is chosen that does not apply the masks.

Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5 and Appendix G.3.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import (
    DataCollatorForSeq2Seq,
    EncoderDecoderModel,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from transformers.utils import logging

from sparsebert.checks import check_allowed, check_range, no_effect
from sparsebert.data.tokenization import check_tokenizer, train_tokenizer
from sparsebert.files import open_text
from sparsebert.hub import read_tokenizer
from sparsebert.learning.mask_description import MODEL_FIELDS, OWN_FIELDS, allowed_fields
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.models.bert.modeling_sparsebert import SparseBertLMHeadModel, SparseBertModel
from sparsebert.training.runs.resuming import rows_record
from sparsebert.training.runs.run_checks import check_model_fields, read_training
from sparsebert.training.runs.run_life import TrainingRun, training_run
from sparsebert.training.runs.sources import check_source
from sparsebert.training.trainer import SparseBertTrainer


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

# Punctuation without a space before it, after it, and on both sides, to join the words of a WordPiece tokenizer.
_JOIN = (
    (re.compile(" ([.,!?:;%)\\]}\u201c\u2026])"), r"\1"),
    (re.compile("([(\\[{\u201e]) "), r"\1"),
    (re.compile(" ([-'\u2019/]) "), r"\1"),
)


@dataclass
class TranslationArguments:
    """
    Section `data` of a translation recipe.

    Args:
        train (`str` or `list`): Sentence pairs to train on: a `.tsv` file with two columns, source and target, or two
            files with a sentence per line. Files may be compressed (`.gz`, `.xz`).
        test (`str` or `list`): Sentence pairs to translate, in the same form.
        tokenizer (`str`, *optional*): Folder or Hub id of a tokenizer; by default a cased WordPiece tokenizer of
            `model.vocab_size` tokens is trained on both languages.
        max_length (`int`): Maximum number of tokens per sentence; longer sentences are truncated.
        max_train_pairs (`int`, *optional*): Maximum number of pairs to train on.
        max_test_pairs (`int`, *optional*): Maximum number of pairs to translate.
        num_beams (`int`): Number of beams of the beam search.
        resume (`bool`): Continue from the newest complete checkpoint in the output folder, if there is one.
        allow_partial_resume (`bool`): Resume also from a checkpoint that lacks parts, such as the optimizer's state.
        overwrite (`bool`): Replace what is in the output folder, once the new run is finished.
    """

    train: str | list | None = None
    test: str | list | None = None
    tokenizer: str | None = None
    max_length: int = 128
    max_train_pairs: int | None = None
    max_test_pairs: int | None = None
    num_beams: int = 4
    resume: bool = False
    allow_partial_resume: bool = False
    overwrite: bool = False


SECTIONS = {"data": TranslationArguments, "model": SparseBertConfig, "training": Seq2SeqTrainingArguments}


def read_pairs(source: str | list[str] | None, max_pairs: int | None = None) -> list[tuple[str, str]]:
    """Read sentence pairs. Pairs with an empty side are skipped."""
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
        logger.warning(f"{source}: skipped {empty} pairs with an empty side.")
    return found


def _read_lines(path: str) -> list[str]:
    with open_text(path) as file:
        return [" ".join(line.split()) for line in file]


def _read_table(path: str) -> list[tuple[str, str]]:
    pairs = []
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            columns = line.rstrip("\r\n").split("\t")
            if len(columns) != 2:
                raise ValueError(
                    f"{path}:{number}: expected source and target separated by one tab, got {len(columns)} columns"
                )
            source, target = (" ".join(column.split()) for column in columns)
            pairs.append((source, target))
    return pairs


def check_model(model: dict[str, Any], max_length: int) -> tuple[SparseBertConfig, SparseBertConfig]:
    """Make the configurations of encoder and decoder."""
    if model.get("pattern") is None or model.get("search") is not None:
        raise ValueError(
            f"translation needs a pattern ('dense' for none) and no search, got pattern {model.get('pattern')!r} and "
            f"search {model.get('search')!r}"
        )
    for name in ("is_decoder", "add_cross_attention"):
        if model.get(name):
            raise no_effect(f"model.{name}", True, "here: the second half of the model is the decoder")
    of_mask = {name: value for name, value in model.items() if name in OWN_FIELDS and value is not None}
    fits = {"pattern", *MODEL_FIELDS, *allowed_fields(model["pattern"])}
    check_allowed("model", of_mask, fits, f"with the pattern {model['pattern']!r}")
    encoder = SparseBertConfig(**model)
    if max_length > min(encoder.max_position_embeddings, encoder.mask_length or max_length):
        raise ValueError(
            f"max_length must be at most max_position_embeddings {encoder.max_position_embeddings} and mask_length "
            f"{encoder.mask_length}, got {max_length}"
        )
    return encoder, SparseBertConfig(**model | {"is_decoder": True, "add_cross_attention": True})


def build_model(
    model: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", max_length: int, num_beams: int = 4
) -> EncoderDecoderModel:
    """Build a sparse encoder with a sparse causal decoder."""
    encoder, decoder = check_model(model, max_length)
    parts: tuple[Any, Any] = SparseBertModel._from_config(encoder), SparseBertLMHeadModel._from_config(decoder)
    result = EncoderDecoderModel(encoder=parts[0], decoder=parts[1])
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


def encode(
    pairs: Sequence[tuple[str, str]], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> "datasets.Dataset":
    """Tokenize sentence pairs."""
    import datasets

    sources, targets = zip(*pairs, strict=True)
    features = tokenizer(list(sources), truncation=True, max_length=max_length, return_token_type_ids=False)
    labels = tokenizer(list(targets), truncation=True, max_length=max_length)["input_ids"]
    return datasets.Dataset.from_dict({**features, "labels": [ids[1:] for ids in labels]})


def decode(ids: np.ndarray, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Turn predicted tokens into texts."""
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for pattern, replacement in _JOIN:
        texts = [pattern.sub(replacement, text) for text in texts]
    return [text.strip() for text in texts]


def bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Compute cased corpus BLEU."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    return metric.corpus_score(list(translations), [list(references)]).score, str(metric.get_signature())


class TranslationTrainer(SparseBertTrainer, Seq2SeqTrainer):
    """[`SparseBertTrainer`] that evaluates by generating."""


def train_translation(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """
    Train and test a translation model as a recipe says.

    Writes to `output_dir` the model, the tokenizer, `translations.txt` (of the test pairs) and `metrics.json`.
    """
    if recipe["training"].get("predict_with_generate") is False:
        raise no_effect("predict_with_generate", False, "here: translations are generated to be scored")
    fields = recipe["training"] | {"predict_with_generate": True}
    training = read_training(fields, Seq2SeqTrainingArguments)
    check_model_fields(recipe["model"])
    data = TranslationArguments(**recipe["data"])
    check_data(data)
    check_model(recipe["model"], data.max_length)
    with training_run(fields | {"output_dir": str(training.output_dir)}, data, Seq2SeqTrainingArguments) as run:
        return _train_translation(run, data, recipe["model"])


def _train_translation(run: TrainingRun, data: TranslationArguments, fields: dict[str, Any]) -> dict[str, Any]:
    train = read_pairs(data.train, data.max_train_pairs)
    test = read_pairs(data.test, data.max_test_pairs)
    vocab_size = SparseBertConfig(**fields).vocab_size
    tokenizer: PreTrainedTokenizerBase
    if data.tokenizer:
        tokenizer = read_tokenizer(data.tokenizer)
    else:
        tokenizer = train_tokenizer(map(list, train), vocab_size, lowercase=False)
        tokenizer.model_max_length = data.max_length
    check_tokenizer(tokenizer, vocab_size)
    model: Any = build_model(fields, tokenizer, data.max_length, data.num_beams)
    train_set, test_set = (encode(pairs, tokenizer, data.max_length) for pairs in (train, test))
    # The decoder has the same fields.
    run.define(data, model.encoder.config, **rows_record(train_set))
    trainer = TranslationTrainer(
        model,
        run.training,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),  # label smoothing removes the labels
        processing_class=tokenizer,
    )
    trained = run.train(trainer)
    trainer.save_model()
    prediction = trainer.predict(test_set)
    translations = decode(np.asarray(prediction.predictions), tokenizer)
    references = [target for _, target in test]
    score, signature = bleu(translations, references)
    round_trip = tokenizer(references, truncation=True, max_length=data.max_length)["input_ids"]
    ceiling = bleu([decode(np.array([ids]), tokenizer)[0] for ids in round_trip], references)[0]
    (run.folder / "translations.txt").write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    metrics = {
        "bleu": score,
        "bleu_signature": signature,
        "bleu_of_references": ceiling,
        "loss": (prediction.metrics or {})["test_loss"],
        "sparsity": model.encoder.sparse_attention.sparsity(),
        "pattern": model.encoder.config.pattern,
        "num_parameters": model.num_parameters(),
        "train_pairs": len(train),
        "test_pairs": len(test),
        "steps": trained.global_step,
    }
    return run.finish(trainer, metrics)


def check_data(data: TranslationArguments) -> None:
    """Check the data of a recipe without reading it."""
    for name in ("train", "test"):
        source = getattr(data, name)
        if source is None:
            raise ValueError(f"--{name} must be a .tsv file of pairs, or two text files with a sentence per line")
        for path in [source] if isinstance(source, str) else source:
            if not Path(path).is_file():
                raise FileNotFoundError(f"{name}: there is no file {str(path)!r}")
    for name, low in (("max_length", 3), ("num_beams", 1), ("max_train_pairs", 1), ("max_test_pairs", 1)):
        if getattr(data, name) is not None:
            check_range(name, getattr(data, name), low)
    check_source("tokenizer", data.tokenizer)
    if find_spec("sacrebleu") is None:
        raise ValueError("translation needs sacreBLEU: pip install 'sparsebert[translation]'")
