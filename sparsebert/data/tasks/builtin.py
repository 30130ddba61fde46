"""The built-in task: tell which package a piece of documentation comes from."""

import functools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from transformers.utils import logging

from ...checks import LARGEST_SEED, check_range
from ..builtin_corpus import Document, builtin_documents
from .classification import accuracy_and_macro_f1
from .task_files import choose_sources


if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

# The packages of the built-in corpus with enough prose to be a class.
LABELS = ("stdlib", "numpy", "torch", "transformers", "scipy", "sklearn", "pandas", "sympy", "networkx")
# An ordinary word: a new token would have an untrained embedding.
PLACEHOLDER = "package"
MIN_WORDS, MAX_WORDS = 60, 200

_HELD_OUT_MODULES = 0.2
_ALIASES = {
    "stdlib": ("python", "cpython"),
    "numpy": ("np",),
    "torch": ("pytorch", "aten"),
    "transformers": ("transformer", "huggingface"),
    "datasets": ("dataset", "huggingface"),
    "scipy": ("sp",),
    "sklearn": ("scikit",),
    "pandas": ("pd",),
    "networkx": ("nx",),
    "huggingface_hub": ("huggingface", "hf"),
}
_SPELLINGS = re.compile(r"scikit-learn|hugging[ -]face", re.IGNORECASE)
_TOKEN = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")


def splits(data: str | None = None) -> list[str]:
    """Names of the splits."""
    if data is not None:
        raise ValueError(f"task builtin is made from the installed packages and takes no --data, got {data!r}")
    return ["train", "validation"]


def load(
    data: str | None = None,
    splits: Sequence[str] | None = None,
    skip_bad: bool = False,
    train_size: int = 6000,
    validation_size: int = 1000,
    seed: int = 0,
    labels: Sequence[str] = LABELS,
    documents: Sequence[Document] | None = None,
) -> "datasets.DatasetDict":
    """
    Load the built-in task.

    The examples are pieces of 60 to 200 words of the built-in corpus. Dotted names (import paths), the names of the
    packages, their usual abbreviations and identifiers that contain them are replaced by the word "package". All
    pieces of a module are in the same split. Every class gets an equal share of a split; a split is smaller than asked
    for if a package has less text than its share.

    The text is that of the installed versions, so results can only be compared within one environment.

    `train_size` and `validation_size` are the most examples of a split, `seed` that of the split and of the order,
    `labels` the packages to tell apart, and `documents` come in place of the built-in corpus. The columns are `id`,
    `text`, `label` (a `ClassLabel`) and `module`; `data` and `skip_bad` are not used.
    """
    import datasets

    rows: dict[str, list[dict]] = {"train": [], "validation": []}
    splits = list(choose_sources(rows, splits, rows, "builtin", ""))
    check_range("seed", seed, 0, LARGEST_SEED)
    labels = tuple(labels) if isinstance(labels, (list, tuple)) else (str(labels),)
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise ValueError(f"labels must be at least two different packages, got {labels}")
    for name, size in (("train_size", train_size), ("validation_size", validation_size)):
        check_range(name, size, len(labels))
    if documents is None:
        documents = builtin_documents()

    pieces: dict[str, dict[str, list[str]]] = {label: {} for label in labels}
    mask_names = _name_masker(labels)
    for document in documents:
        if document.package in pieces:
            texts = _pieces(map(mask_names, document.paragraphs))
            if texts:
                pieces[document.package][document.module] = texts

    rng = random.Random(seed)
    for index, label in enumerate(labels):
        modules = sorted(pieces[label])
        rng.shuffle(modules)
        held_out = max(1, round(_HELD_OUT_MODULES * len(modules)))
        if len(modules) < 2:
            raise ValueError(
                f"labels: package {label!r} has {len(modules)} modules with at least {MIN_WORDS} words of prose; "
                "2 are needed for a training and a validation split"
            )
        for split, members, size in (
            ("train", modules[held_out:], train_size),
            ("validation", modules[:held_out], validation_size),
        ):
            examples = [
                {"id": f"{module}:{number}", "text": text, "label": index, "module": module}
                for module in members
                for number, text in enumerate(pieces[label][module])
            ]
            rng.shuffle(examples)
            rows[split].extend(examples[: size // len(labels)])

    features = datasets.Features(
        id=datasets.Value("string"),
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=list(labels)),
        module=datasets.Value("string"),
    )
    result = datasets.DatasetDict()
    for split, examples in rows.items():
        rng.shuffle(examples)
        result[split] = datasets.Dataset.from_list(examples, features=features)
        logger.info(f"builtin {split}: {len(examples)} examples, majority class {majority_share(result[split]):.1%}.")
    return datasets.DatasetDict({split: result[split] for split in splits})


def _name_masker(labels: Sequence[str]) -> Callable[[str], str]:
    """Return a function that replaces dotted names, and all words that reveal a package, in a text."""
    names = {name for label in labels for name in (label, *_ALIASES.get(label, ()))}
    # Longer names are also found inside identifiers such as "is_torch_available"; short ones would match other words.
    inside = [name for name in names if len(name) > 4]

    @functools.cache
    def mask(token: str) -> str:
        first, dot, _ = token.partition(".")
        is_path = dot and (len(first) > 1 or first.isupper())  # but not "e.g"
        lowered = token.lower()
        is_name = lowered in names or any(name in lowered for name in inside)
        return PLACEHOLDER if is_path or is_name else token

    def mask_names(text: str) -> str:
        return _TOKEN.sub(lambda match: mask(match[0]), _SPELLINGS.sub(PLACEHOLDER, text))

    return mask_names


def _pieces(paragraphs: Iterable[str]) -> list[str]:
    """Cut the text of a module into pieces of 60 to 200 words, at the end of a paragraph where possible."""
    pieces: list[str] = []
    words: list[str] = []
    for paragraph in paragraphs:
        words.extend(paragraph.split())
        while len(words) >= MIN_WORDS:
            pieces.append(" ".join(words[:MAX_WORDS]))
            words = words[MAX_WORDS:]
    return pieces


def majority_share(dataset: "datasets.Dataset") -> float:
    """Accuracy of always answering the most frequent class of a split, between 0 and 1."""
    labels = dataset["label"][:]
    return max(map(labels.count, set(labels))) / len(labels)


def bag_of_words_baseline(splits: "datasets.DatasetDict") -> dict[str, float]:
    """
    Metrics of a logistic regression on TF-IDF word counts, and the share of the largest class. Packages have different
    topics, so words alone say a lot about the package: judge a model by how much better it is than this.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(sublinear_tf=True, min_df=2), LogisticRegression(C=10.0, max_iter=1000))
    model.fit(splits["train"]["text"][:], splits["train"]["label"][:])
    validation = splits["validation"]
    scores = accuracy_and_macro_f1(model.predict(validation["text"][:]), validation["label"][:])
    return scores | {"majority_share": majority_share(validation)}
