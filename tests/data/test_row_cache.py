"""Text that is tokenized once: the rows, their cache, and the memory that it takes."""

import json
import os
import random
import re
import signal
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from processes import SERVER, start
from transformers import BertTokenizerFast
from transformers.utils import logging

from sparsebert.commands import main
from sparsebert.data.documents import Documents, load_documents
from sparsebert.data.examples import pretraining_dataset
from sparsebert.data.row_cache import cached_file
from sparsebert.data.tokenization import train_tokenizer


def make_documents(number, seed=0):
    """Documents of sentences; some have no token at all."""
    rng = random.Random(seed)
    for index in range(number):
        words = [f"w{rng.randrange(94)}" for _ in range(rng.randrange(1, 90))]
        sentences = (" ".join(words[start : start + 7]).capitalize() + "." for start in range(0, len(words), 7))
        yield ["\u200b"] if index % 17 == 3 else list(sentences)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("\n\n".join("\n".join(document) for document in make_documents(120)))
    return path


def files(folder):
    kept = (path for path in Path(folder).rglob("*") if path.is_file() and path.suffix not in (".lock", ".sha256"))
    return sorted(path.name for path in kept)


def checksum(rows):
    return zlib.crc32(json.dumps([rows[name][:] for name in sorted(rows.column_names)]).encode())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (686, 3988765625)),
        ({"max_tokens": 3000}, (93, 2745233023)),
        ({"nsp": True, "seed": 3}, (1178, 3937881636)),
        ({"nsp": True, "max_tokens": 3000}, (106, 3187889112)),
    ],
    ids=["packed", "packed-some", "pairs", "pairs-some"],
)
def test_rows_are_those_of_former_versions(word_tokenizer, settings, expected):
    rows = pretraining_dataset(make_documents(400), word_tokenizer, 32, **settings)
    assert (len(rows), checksum(rows)) == expected


@pytest.mark.parametrize("nsp", [False, True], ids=["packed", "pairs"])
def test_rows_are_mapped_into_memory(word_tokenizer, nsp):
    before = pa.total_allocated_bytes()
    rows = pretraining_dataset(make_documents(200), word_tokenizer, 32, nsp)
    assert rows.data.nbytes > 4e4 and pa.total_allocated_bytes() - before < 1e4


def anonymous_memory():
    """Memory of this process in bytes, without what is mapped from files."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.slow
@pytest.mark.parametrize("nsp", [False, True], ids=["packed", "pairs"])
def test_memory_does_not_grow_with_the_corpus(word_tokenizer, nsp):
    """The corpus has 10 million tokens, which as ids and columns would take 100 MB."""
    measured = []

    def documents():
        for index in range(100_000):
            if index % 500 == 0:
                measured.append(anonymous_memory())
            yield [f"w{index % 94} " * 50 + f"x{index}.", "w1 w2 w3. " * 10]

    rows = pretraining_dataset(documents(), word_tokenizer, 128, nsp)
    measured.append(anonymous_memory())
    assert rows.data.nbytes > 5e7 and max(measured) - measured[10] < 3e7, measured


def test_second_call_reads_nothing(text, word_tokenizer, tmp_path):
    first = pretraining_dataset(load_documents(text), word_tokenizer, 32, cache_dir=tmp_path)
    assert len(files(tmp_path)) == 1

    def fail():
        pytest.fail("it reads the text")
        yield

    again = Documents(fail(), load_documents(text).fingerprint)
    assert pretraining_dataset(again, word_tokenizer, 32, cache_dir=tmp_path)[:] == first[:]
    assert len(files(tmp_path)) == 1 and first.cache_files[0]["filename"].startswith(str(tmp_path))


def test_vocabulary_is_trained_once(text, tmp_path):
    first = train_tokenizer(load_documents(text), 150, cache_dir=tmp_path)
    again = Documents(iter([["other text"]]), load_documents(text).fingerprint)
    assert train_tokenizer(again, 150, cache_dir=tmp_path).get_vocab() == first.get_vocab()
    assert train_tokenizer(load_documents(text), 110, cache_dir=tmp_path).get_vocab() != first.get_vocab()
    assert len(files(tmp_path)) == 2


def test_what_the_key_depends_on(text, word_tokenizer, tmp_path):
    """All that changes the rows, and nothing else."""

    def count(path=text, tokenizer=word_tokenizer, split="train", length=32, **settings):
        pretraining_dataset(load_documents(path, split), tokenizer, length, cache_dir=tmp_path / "cache", **settings)
        return len(files(tmp_path / "cache"))

    (copy := tmp_path / "copy-1.0.txt").write_bytes(text.read_bytes())
    word_tokenizer("one two", truncation=True, max_length=3, padding="max_length")  # changes its state
    assert [count(), count(copy), count(seed=1), count(short_seq_prob=0.5)] == [1, 1, 1, 1]
    (other := tmp_path / "other.txt").write_text(text.read_text().replace("w1", "w2", 1))
    vocabulary = word_tokenizer.get_vocab()
    cased = BertTokenizerFast(vocab=vocabulary | {"w1": vocabulary["w2"], "w2": vocabulary["w1"]})
    changes = [{"path": other}, {"tokenizer": cased}, {"split": "all"}, {"length": 16}, {"max_tokens": 400}]
    changes += [{"nsp": True}, {"nsp": True, "seed": 1}, {"nsp": True, "short_seq_prob": 0.5}]
    assert [count(**change) for change in changes] == list(range(2, 10))


def test_documents_that_were_partly_read_are_refused(text, word_tokenizer, tmp_path):
    """Their rest would be kept as the rows of the whole text."""
    documents = load_documents(text)
    next(documents)
    with pytest.raises(ValueError, match="documents were read before, .* load them again"):
        pretraining_dataset(documents, word_tokenizer, 32, cache_dir=tmp_path)
    train_tokenizer(documents := load_documents(text), 150, max_characters=100, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="documents were read before"):
        pretraining_dataset(documents, word_tokenizer, 32, cache_dir=tmp_path)
    rows = pretraining_dataset(load_documents(text), word_tokenizer, 32, cache_dir=tmp_path)
    assert len(rows) == len(pretraining_dataset(load_documents(text), word_tokenizer, 32, cache_dir=tmp_path / "b"))


def test_documents_without_a_fingerprint_are_not_kept(word_tokenizer, tmp_path):
    rows = pretraining_dataset(make_documents(100), word_tokenizer, 32, cache_dir=tmp_path)
    assert len(rows) and not files(tmp_path)


def slow_documents(path, log, kill_after=None):
    """The documents of a file. It is written down that they are read, which may end with the death of the process."""
    with open(log, "a") as file:
        file.write("read\n")
    for index, document in enumerate(load_documents(path, "all")):
        if index == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield document


def build(path, cache, log, kill_after=None, start=None):
    if start is not None:
        start.wait()
    tokenizer = BertTokenizerFast(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "w1": 5})
    documents = Documents(slow_documents(path, log, kill_after), load_documents(path, "all").fingerprint)
    return pretraining_dataset(documents, tokenizer, 16, nsp=True, cache_dir=cache)


def test_killed_while_it_is_written(text, tmp_path):
    process = start(build, text, tmp_path / "cache", tmp_path / "log", 60)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and not list((tmp_path / "cache/sparsebert").glob("*.arrow"))
    found = build(text, tmp_path / "cache", tmp_path / "log")
    assert found[:] == build(text, tmp_path / "other", tmp_path / "log")[:]
    assert len(files(tmp_path / "cache")) == 1 and not list(tmp_path.rglob("*.incomplete"))


def test_processes_that_start_together_build_it_once(text, tmp_path):
    barrier = SERVER.Barrier(3)
    arguments = (text, tmp_path / "cache", tmp_path / "log", None, barrier)
    processes = [start(build, *arguments) for _ in range(3)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "read\n" and len(files(tmp_path / "cache")) == 1


@pytest.mark.parametrize("nsp", [False, True], ids=["packed", "pairs"])
def test_disk_full(text, word_tokenizer, tmp_path, small_files, nsp):
    small_files(2000)
    with pytest.raises(OSError, match=f"cache_dir {tmp_path}/cache/sparsebert has no room .*make room"):
        pretraining_dataset(load_documents(text), word_tokenizer, 32, nsp, cache_dir=tmp_path / "cache")
    small_files(None)
    assert not files(tmp_path / "cache")
    assert len(pretraining_dataset(load_documents(text), word_tokenizer, 32, nsp, cache_dir=tmp_path / "cache"))


def test_other_errors_are_not_blamed_on_the_cache(word_tokenizer, tmp_path):
    (bad := tmp_path / "bad.txt").write_bytes(b"w1 w2\n\xff\n")
    with pytest.raises(ValueError, match="bad.txt:2: not UTF-8"):
        pretraining_dataset(load_documents(bad, "all"), word_tokenizer, 16, cache_dir=tmp_path / "cache")

    def fail(path):
        raise PermissionError("something else")

    with pytest.raises(PermissionError, match="something else"):
        cached_file(tmp_path / "cache", "name", fail)
    assert not files(tmp_path / "cache") and not list(tmp_path.rglob("*.incomplete"))


def flipped(content):
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGE = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "another kind": lambda content: b"5",
    "a bit flipped": flipped,
    "end missing": lambda content: content[:-8],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(word_tokenizer, text, tmp_path, caplog, monkeypatch, damage):
    def read():
        vocabulary = train_tokenizer(load_documents(text), 150, cache_dir=tmp_path).get_vocab()
        return vocabulary, pretraining_dataset(load_documents(text), word_tokenizer, 32, cache_dir=tmp_path)[:]

    monkeypatch.setattr(logging.get_logger("sparsebert"), "propagate", True)
    want = read()
    made = [path for path in (tmp_path / "sparsebert").iterdir() if path.suffix != ".lock"]
    assert len(made) == 4  # each with its hash
    for path in made:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
        caplog.clear()
        assert read() == want
        assert f"{path.with_name(path.name.removesuffix('.sha256'))} is damaged" in caplog.text


@pytest.mark.skipif(os.name == "nt", reason="files have no such modes there")
@pytest.mark.parametrize("umask, modes", [(0o022, {0o644, 0o755}), (0o002, {0o664, 0o775})])
def test_others_may_read_the_cache(word_tokenizer, text, tmp_path, umask, modes):
    """As far as the umask says: files that are written aside first would often be for their owner alone."""
    before = os.umask(umask)
    try:
        train_tokenizer(load_documents(text), 150, cache_dir=tmp_path)
        pretraining_dataset(load_documents(text), word_tokenizer, 32, cache_dir=tmp_path)
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o777 for path in (tmp_path / "sparsebert", *tmp_path.glob("sparsebert/*"))}
    assert found == modes


def test_cache_dir_of_a_recipe(pretraining_flags, said, tmp_path):
    """Where a run leaves its rows, and one that cannot be made, which is refused before any work."""
    (tmp_path / "file").write_text("")
    words = pretraining_flags(tmp_path / "run", "--pattern", "dense", "--max_steps", 1, "--cache_dir")
    line = said([*words, tmp_path / "file/a"])
    assert f"cache_dir {tmp_path}/file/a cannot be made: {tmp_path}/file is a" in line
    assert not (tmp_path / "run").exists()
    assert main([*words, str(tmp_path / "cache")]) == 0
    assert [name[:5] for name in files(tmp_path / "cache")] == ["rows-", "rows-"]
