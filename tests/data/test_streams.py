"""Text that is streamed: who reads what, and runs that go on where they stopped."""

import http.server
import io
import itertools
import json
import os
import signal
import threading
from collections import Counter
from functools import partial

import datasets
import fsspec
import pytest
import torch
from conftest import tokenizer_of, write_compressed
from processes import start
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from sparsebert.data.documents import file_documents, load_documents
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.data.streams import RowStream, find_shards, open_documents, stream_documents
from sparsebert.training.pretraining import pretraining_run
from sparsebert.training.pretraining.pretraining_run import pretrain
from sparsebert.training.stream_loading import StreamLoader
from sparsebert.training.trainer import SparseBertTrainer


SHARDS, DOCUMENTS = 4, 30


def document(number):
    """Four sentences; every word says which document it is from."""
    length = 4 + number % 3
    return [" ".join([f"d{number}"] * length) + ". " + " ".join([f"D{number}"] * length) + "." for _ in range(2)]


def write_shards(folder, ending):
    """120 documents in four files."""
    folder.mkdir()
    for shard in range(SHARDS):
        texts = ["\n".join(document(shard * DOCUMENTS + index)) for index in range(DOCUMENTS)]
        path = folder / f"part-{shard}{ending}"
        if ending == ".parquet":
            datasets.Dataset.from_dict({"other": range(DOCUMENTS), "text": texts}).to_parquet(path, batch_size=7)
            continue
        content = "\n\n".join(texts) if ".txt" in ending else "\n".join(json.dumps({"text": text}) for text in texts)
        write_compressed(path, content)
    return f"{folder}/*{ending}"


@pytest.fixture(scope="module")
def text_shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards") / "text", ".txt")


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *(f"d{i}" for i in range(SHARDS * DOCUMENTS))]
    return tokenizer_of(words)


def unmasked(rows):
    return rows


def loader_of(source, tokenizer, workers=0, rank=0, world_size=1, nsp=False, **settings):
    common = {"split": "all", "collator": unmasked, "batch_size": 4, "max_length": 16, "shuffle_buffer": 40, "seed": 1}
    settings = common | {"nsp": nsp, "rank": rank, "world_size": world_size} | settings
    stream = RowStream(open_documents(source), tokenizer, **settings)
    arguments = TrainingArguments("unused", use_cpu=True, dataloader_num_workers=workers)
    return StreamLoader(stream, arguments, torch.Generator())


def take(loader, number):
    """The tokens of the rows of the next batches."""
    iterator = iter(loader)
    return [[tuple(row["input_ids"]) for row in next(iterator)] for _ in range(number)]


@pytest.mark.parametrize("ending", [".txt", ".jsonl.gz", ".txt.xz", ".parquet"])
def test_documents_are_those_of_files_in_memory(tmp_path, ending):
    pattern = write_shards(tmp_path / "text", ending)
    expected = [document(number) for number in range(SHARDS * DOCUMENTS)]
    assert list(stream_documents(pattern, "all")) == expected
    urls = find_shards(pattern)
    assert urls[0].startswith("file://") and list(stream_documents(urls, "all")) == expected
    if ending != ".parquet":
        assert list(load_documents([url.removeprefix("file://") for url in urls], "all")) == expected


@pytest.mark.parametrize(
    ("ending", "workers", "nsp", "processes", "stops"),
    [
        (".txt", 0, False, 2, ((1, 2), (7, 31), (20, 33))),
        (".txt", 0, True, 3, ((5, 6), (17, 39))),
        (".txt", 2, True, 3, ((9, 30),)),
        (".jsonl.gz", 0, False, 2, ((7, 31),)),
        (".parquet", 0, False, 3, ((9, 10), (20, 33))),
    ],
)
def test_resumed_twice_the_ledger_is_that_of_an_uninterrupted_run(
    tokenizer, tmp_path, ending, workers, nsp, processes, stops
):
    """Over the end of an epoch, on one of several processes, from anywhere in what is shuffled at once."""
    source = write_shards(tmp_path / "text", ending)
    whole = take(loader_of(source, tokenizer, workers, 1, processes, nsp), 40)
    assert len(set(map(tuple, whole))) == 40
    for each in stops:
        found, given = [], 0
        for stop in (*each, 40):
            loader = loader_of(source, tokenizer, workers, 1, processes, nsp)
            if given:
                loader.load(tmp_path)
            found += take(loader, stop - given)
            loader.save(tmp_path)
            given = stop
        assert found == whole, each


@pytest.mark.parametrize(
    ("workers", "processes", "nsp"), [(0, 1, False), (2, 1, False), (0, 2, True), (2, 2, False), (0, 3, False)]
)
def test_readers_are_disjoint_and_complete(text_shards, tokenizer, workers, processes, nsp):
    """In an epoch every document is read once, by one worker of one process."""
    seen = Counter()
    for rank in range(processes):
        settings = {"nsp": nsp, "batch_size": 1, "rank": rank, "world_size": processes, "split": "all"}
        stream = RowStream(open_documents(text_shards), tokenizer, 16, collator=unmasked, **settings)
        owned = {worker: set() for worker in range(max(workers, 1))}
        unfinished = set(owned)
        for worker, place, rows in DataLoader(stream, batch_size=None, collate_fn=unmasked, num_workers=workers):
            if place["epoch"]:
                unfinished.discard(worker)
            else:
                owned[worker].update(token for token in rows[0]["input_ids"] if token > 5)
            if not unfinished:
                break
        for words in owned.values():
            seen.update(words)
    assert set(seen.values()) == {1} and len(seen) > 0.95 * SHARDS * DOCUMENTS


def test_epochs_have_other_orders(text_shards, tokenizer):
    """Shards, rows and masked tokens have one of their own in each; nothing is masked anew by resuming."""
    settings = {"batch_size": 10_000, "shuffle_buffer": 40, "split": "all"}
    collator = pretraining_collator(tokenizer, seed=0)
    stream = RowStream(open_documents(text_shards), tokenizer, 16, collator=collator, **settings)
    (_, place, first), (_, _, second) = itertools.islice(stream, 2)
    texts = [torch.where(each["labels"] < 0, each["input_ids"], each["labels"]).tolist() for each in (first, second)]
    assert texts[0] != texts[1] and abs(len(texts[0]) - len(texts[1])) < 5
    words = [Counter(itertools.chain(*rows)) for rows in texts]
    assert sum((words[0] - words[1]).values()) < 0.1 * words[0].total()
    stream.start_from(1, {0: place})
    _, _, again = next(iter(stream))
    assert torch.equal(again["input_ids"], second["input_ids"]) and torch.equal(again["labels"], second["labels"])


def test_the_seed_decides_the_order_of_shards_and_of_rows(text_shards, tokenizer):
    def epoch(source, seed):
        stream = RowStream(open_documents(source), tokenizer, 16, 10_000, unmasked, seed=seed, split="all")
        return [tuple(row["input_ids"]) for row in next(iter(stream))[2]]

    one = text_shards.replace("*", "part-0")
    first, again, other = (epoch(one, seed) for seed in (1, 1, 2))
    assert first == again != other and sorted(first) == sorted(other)
    # Where the order of the shards is another, other documents share a row.
    assert sorted(epoch(text_shards, 1)) != sorted(epoch(text_shards, 2))


def test_the_batch_at_the_end_of_an_epoch_may_be_left_out(text_shards, tokenizer):
    stream = RowStream(open_documents(text_shards), tokenizer, 16, 50, unmasked, split="all", drop_last=True)
    assert {len(batch) for _, _, batch in itertools.islice(stream, 40)} == {50}
    stream.drop_last = False
    assert {len(batch) for _, _, batch in itertools.islice(stream, 40)} > {50}


def test_pairs_are_those_of_the_dataset(tokenizer, tmp_path):
    """Half of them random, from another document of the same part; the others follow."""
    source = write_shards(tmp_path / "text", ".txt")
    loader = loader_of(source, tokenizer, nsp=True, max_length=24, shuffle_buffer=60)
    rows = [row for batch in itertools.islice(loader, 100) for row in batch]
    words = []
    for row in rows:
        ids = row["input_ids"]
        middle = row["token_type_ids"].index(1)
        words.append([{token for token in part if token > 5} for part in (ids[:middle], ids[middle:])])
    labels = [row["next_sentence_label"] for row in rows]
    assert [int(first != second) for first, second in words] == labels
    assert 0.3 < sum(labels) / len(labels) < 0.75


def test_held_out_documents_are_not_streamed(text_shards, tokenizer):
    held_out = {text for document in stream_documents(text_shards, "validation", 100) for text in document}
    assert held_out
    loader = loader_of(text_shards, tokenizer, split="train", batch_size=1000)
    ids = {token for batch in itertools.islice(loader, 2) for row in batch for token in row["input_ids"]}
    words = {word.lower() for text in held_out for word in text.replace(".", "").split()}
    assert len(ids) > 100 and not words & set(tokenizer.convert_ids_to_tokens(sorted(ids)))


@pytest.mark.parametrize(
    ("names", "source", "error", "message"),
    [
        (["a.txt"], "*.jsonl", FileNotFoundError, r"no such file: '.*\*.jsonl'"),
        (["a.txt"], "b.txt", FileNotFoundError, "no such file: '.*b.txt'"),
        (["a.txt"], [], ValueError, "no files: name at least one"),
        (["a.pdf"], "*", ValueError, r"a.pdf' is not a supported text file; its name must end in .txt, .*.parquet"),
        (["a.parquet.gz"], "*", ValueError, "a.parquet.gz' is not a supported"),
        (["a.txt", "b.parquet"], "*", ValueError, "Parquet and other files cannot be mixed, got '.*a.txt'"),
    ],
)
def test_names_are_checked_before_reading(tmp_path, names, source, error, message):
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(error, match=message):
        open_documents(source and f"{tmp_path}/{source}")


def test_column_text_is_needed(tokenizer, tmp_path):
    datasets.Dataset.from_dict({"body": ["d1"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no column 'text'; its columns are \['body'\]"):
        next(iter(loader_of(f"{tmp_path}/a.parquet", tokenizer)))
    with pytest.raises(ValueError, match=r"row 0 of '.*a.parquet' has no column 'text'"):
        next(stream_documents(f"{tmp_path}/a.parquet"))
    datasets.Dataset.from_dict({"text": ["d1", None]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"row 1 of '.*b.parquet' has no text in the column 'text', but None"):
        list(stream_documents(f"{tmp_path}/b.parquet", "all"))


def test_shards_without_rows_and_too_little_text(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("d1 d2")
    with pytest.raises(ValueError, match="too little text for reader 1 of 1 .* fewer dataloader_num_workers"):
        next(iter(loader_of(str(tmp_path / "a.txt"), tokenizer)))
    for name, texts in (("a", ["d1"]), ("b", []), ("c", ["d2"])):
        rows = datasets.Dataset.from_dict({"text": texts}, datasets.Features(text=datasets.Value("string")))
        rows.to_parquet(tmp_path / f"{name}.parquet")
    assert list(stream_documents(f"{tmp_path}/*.parquet", "all")) == [["d1"], ["d2"]]
    with pytest.raises(ValueError, match="the split 'all' of '.*b.parquet' is empty"):
        list(stream_documents(f"{tmp_path}/b.parquet", "all"))


def test_errors_while_reading(tmp_path):
    """A corrupt file is named; what is no fault of the file, such as a timeout of the network, is raised as it is."""
    (tmp_path / "a.txt.bz2").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"a.txt.bz2: corrupt .bz2 file after line 0"):
        list(stream_documents(f"{tmp_path}/a.txt.bz2", "all"))

    class Broken(io.BytesIO):
        def __next__(self):
            raise TimeoutError("too slow")

    for name in ("a.txt", "a.txt.bz2"):
        with pytest.raises(TimeoutError, match="too slow"):
            list(file_documents(name, ".txt", lambda _: Broken()))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and says nothing; without dates if `dated` is false."""

    dated = True

    def log_message(self, *arguments):
        pass

    def send_header(self, keyword, value):
        if self.dated or keyword != "Last-Modified":
            super().send_header(keyword, value)


def test_text_of_a_url_that_changed_is_read_again(tokenizer, tmp_path, monkeypatch):
    (folder := tmp_path / "www").mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/a.txt"
    # What fsspec has read it may keep in its instances.
    monkeypatch.setattr(fsspec.get_filesystem_class("http"), "cachable", False)

    def first_word():
        return tokenizer.decode(pretraining_dataset(documents(), tokenizer, 8, cache_dir=tmp_path)["input_ids"][0][1])

    def documents():
        return stream_documents(url, "all")

    try:
        for time, word in enumerate(("d1", "d2", "d1")):
            (folder / "a.txt").write_text(f"{word} " * 20)
            os.utime(folder / "a.txt", (1e9 + time, 1e9 + time))
            assert first_word() == word and documents().fingerprint() == documents().fingerprint() is not None
        monkeypatch.setattr(Quiet, "dated", False)
        assert documents().fingerprint() is None  # nothing says which text it is
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(FileNotFoundError, match=rf"no such file: '{url}' \(.*[Cc]onnect"):
        documents()


def recipe_of(source, folder, workers=0, **data):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = {"vocab_size": 200, "max_position_embeddings": 16, "search": "dam_s", "sparsity_weight": 1e-4, **sizes}
    training = {
        "output_dir": str(folder), "max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 3, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "dataloader_num_workers": workers,
    }  # fmt: skip
    common = {"text": source, "streaming": True, "shuffle_buffer": 30, "max_length": 16, "pictures": False}
    common |= {"validation": source, "max_validation_tokens": 500}
    return {"data": common | data, "model": model, "training": training}


def run_with_ledger(recipe, path, kill_at=None):
    """Write the rows of every batch that the model is trained on to a file; the process may be killed at a step."""

    class Trainer(SparseBertTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if self.state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with open(path, "a") as file:
                file.write(json.dumps([self.state.global_step, inputs["input_ids"].tolist()]) + "\n")
            return super().training_step(model, inputs, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining_run, "SparseBertTrainer", Trainer)
        pretrain(recipe)


def ledger_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses_of(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"], entry["grad_norm"], entry["epoch"]) for entry in history if "loss" in entry]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed_equals_the_uninterrupted_run(text_shards, tmp_path, workers):
    """Killed twice, the second time after it was resumed: ledger, losses and gradients."""
    run_with_ledger(recipe_of(text_shards, tmp_path / "whole", workers), tmp_path / "ledger")
    whole = ledger_of(tmp_path / "ledger")
    recipe = recipe_of(text_shards, tmp_path / "killed", workers)
    begun, found = 0, []
    for kill_at in (4, 8):
        path = tmp_path / f"ledger-{kill_at}"
        process = start(run_with_ledger, recipe, path, kill_at)
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        recipe["data"]["resume"] = True
        assert [step for step, _ in ledger_of(path)] == [step for step in range(begun, kill_at) for _ in range(2)]
        begun = kill_at // 3 * 3
        found += [entry for entry in ledger_of(path) if entry[0] < begun]
    run_with_ledger(recipe, tmp_path / "ledger-last")
    assert found + ledger_of(tmp_path / "ledger-last") == whole and len(whole) == 24
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")


def test_resuming_with_other_readers_is_refused(text_shards, tmp_path):
    recipe = recipe_of(text_shards, tmp_path / "run", nsp=False)
    recipe["training"] |= {"max_steps": 3, "save_steps": 2}
    pretrain(recipe)
    training = {"resume_from_checkpoint": str(tmp_path / "run/checkpoint-2"), "output_dir": str(tmp_path / "new")}
    training |= {"dataloader_num_workers": 2}
    with pytest.raises(ValueError, match="that was read with dataloader_num_workers 1: .* Resume with 1"):
        pretrain(recipe | {"training": recipe["training"] | training})


def test_wrong_fields_are_refused(text_shards, tmp_path):
    for section, changed, message in (
        ("training", {"max_steps": -1}, "streaming true needs max_steps, .* got -1"),
        ("data", {"max_tokens": 1000}, "max_tokens 1000 has no meaning with streaming true"),
        ("data", {"text": "builtin"}, "text 'builtin' cannot be streamed"),
        ("data", {"shuffle_buffer": 0}, "shuffle_buffer must be an integer of at least 1, got 0"),
        ("data", {"streaming": False, "text": "builtin"}, "shuffle_buffer 30 has no meaning without streaming"),
        ("data", {"text": "nowhere/*.txt"}, r"no such file: 'nowhere/\*.txt'"),
    ):
        recipe = recipe_of(text_shards, tmp_path / "run")
        recipe[section] |= changed
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            pretrain(recipe)
    assert not (tmp_path / "run").exists()
