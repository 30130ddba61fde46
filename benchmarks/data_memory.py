"""
Memory and time until the first step, against the size of the corpus, and how long a training step waits for its data.

    python -m benchmarks.data_memory --text corpus.txt.xz

Cuts the text to several sizes and measures, each in a process of its own: the first start, which tokenizes, and the
second, which finds the rows; packed rows and next-sentence pairs; and a stream of shards of 20 GB, links to one file,
of which a part is read. What is in the results already is not measured again. `--plot` writes the picture of the docs.
"""

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sparsebert.analysis.pictures.figures import BLUE, GREEN, PURPLE, VERMILION, new_figure, save_figure
from sparsebert.files import open_binary, replace_files

from .shared.measure import resident
from .shared.report import RESULTS, ROOT, hardware, make_table


MEGABYTE = 1e6
LENGTH, BATCH, VOCABULARY = 128, 32, 8000
STREAM_BYTES = 20e9


class PeakMemory:
    """
    Context manager: the most memory that this process had of its own, in bytes, sampled. Files that are mapped into
    memory are not part of it; the system takes their pages back when others need them.
    """

    def __enter__(self):
        self._stop, self.peak = threading.Event(), resident()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, resident())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def measure_start(path, cache, nsp):
    """Tokenizer and rows of a text: seconds and peak memory of a start, and what it found or made."""
    from sparsebert.data.documents import load_documents
    from sparsebert.data.examples import pretraining_dataset
    from sparsebert.data.tokenization import train_tokenizer

    with PeakMemory() as memory:
        start = time.perf_counter()
        tokenizer = train_tokenizer(load_documents(path), VOCABULARY, cache_dir=cache)
        trained = time.perf_counter() - start
        rows = pretraining_dataset(load_documents(path), tokenizer, LENGTH, nsp, cache_dir=cache)
        rows[0]
        seconds = time.perf_counter() - start
    size = sum(Path(file["filename"]).stat().st_size for file in rows.cache_files)
    return {
        "seconds": seconds, "tokenizer_seconds": trained, "peak_bytes": memory.peak, "rows": len(rows),
        "file_bytes": size,
    }  # fmt: skip


def measure_stream(pattern, tokenizer_text, cache, batches):
    """The first batch of a stream, and the memory and tokens per second of some more."""
    from sparsebert.data.documents import load_documents
    from sparsebert.data.examples import pretraining_collator
    from sparsebert.data.streams import RowStream, open_documents
    from sparsebert.data.tokenization import train_tokenizer

    with PeakMemory() as memory:
        start = time.perf_counter()
        tokenizer = train_tokenizer(load_documents(tokenizer_text), VOCABULARY, cache_dir=cache)
        collator = pretraining_collator(tokenizer, seed=0)
        stream = iter(RowStream(open_documents(pattern), tokenizer, LENGTH, BATCH, collator))
        next(stream)
        first = time.perf_counter() - start
        read = itertools.islice(stream, batches)
        tokens = sum(int(batch["attention_mask"].sum()) for _, _, batch in read)
        seconds = time.perf_counter() - start - first
    return {
        "seconds": first, "peak_bytes": memory.peak, "tokens": tokens, "tokens_per_second": tokens / seconds,
    }  # fmt: skip


def measure_waiting(path, pattern, cache, steps):
    """Share of the time of a training step of a small BERT that waits for the batch, median over the steps."""
    import statistics

    import torch
    from torch.utils.data import DataLoader
    from transformers import BertForMaskedLM, TrainingArguments

    from sparsebert import SparseBertConfig
    from sparsebert.data.documents import load_documents
    from sparsebert.data.examples import pretraining_collator, pretraining_dataset
    from sparsebert.data.streams import RowStream, open_documents
    from sparsebert.data.tokenization import train_tokenizer
    from sparsebert.training.stream_loading import StreamLoader

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForMaskedLM(SparseBertConfig(vocab_size=VOCABULARY, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokenizer = train_tokenizer(load_documents(path), VOCABULARY, cache_dir=cache)
    collator = pretraining_collator(tokenizer, seed=0)
    rows = pretraining_dataset(load_documents(path), tokenizer, LENGTH, cache_dir=cache)
    found = {}
    for workers in (0, 1):
        arguments = TrainingArguments("unused", use_cpu=True, dataloader_num_workers=workers)
        stream = RowStream(open_documents(pattern), tokenizer, LENGTH, BATCH, collator)
        loaders = {
            "rows": DataLoader(rows, BATCH, shuffle=True, collate_fn=collator, num_workers=workers),
            "stream": StreamLoader(stream, arguments, torch.Generator()),
        }
        for name, loader in loaders.items():
            batches, waited, lasted = iter(loader), [], []
            for step in range(steps + 2):
                start = time.perf_counter()
                batch = next(batches)
                ready = time.perf_counter()
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= 2:  # the first ones start the workers and fill the buffer
                    waited.append(ready - start)
                    lasted.append(time.perf_counter() - start)
            found[f"{name}, workers {workers}"] = {
                "share": sum(waited) / sum(lasted),
                "median_share": statistics.median(w / t for w, t in zip(waited, lasted, strict=True)),
                "wait_ms": 1000 * sum(waited) / len(waited),
                "step_ms": 1000 * sum(lasted) / len(lasted),
            }
    return found


def cut(text, size, path):
    """The first `size` bytes of a text, to the end of a document."""
    left = size
    with open_binary(text) as source, open(path, "wb") as target:
        for line in source:
            target.write(line)
            left -= len(line)
            if left <= 0 and not line.strip():
                break
    return path


def projected(results, size):
    """What the largest measured corpus says of one of `size` bytes of text."""
    largest = max(results["packed"].values(), key=lambda cell: cell["text_bytes"])
    factor = size / largest["text_bytes"]
    return {
        "text_bytes": size,
        "file_bytes": largest["file_bytes"] * factor,
        "first_start_hours": largest["first"]["seconds"] * factor / 3600,
        "peak_bytes": largest["first"]["peak_bytes"],
        "stream_peak_bytes": results["stream"]["peak_bytes"],
        "in_memory_before_bytes": BEFORE_BYTES / BEFORE_TEXT_BYTES * size,
    }


# What was measured of 184 MB when all rows were lists in memory: 2.74 GB.
BEFORE_TEXT_BYTES, BEFORE_BYTES = 184e6, 2.74e9


def plot(results, path):
    """Peak memory and seconds of a start against the size of the corpus."""
    figure = new_figure(9, 3.8, "constrained")
    memory, seconds = figure.subplots(1, 2)
    styles = {"packed": (BLUE, "o", "packed rows"), "pairs": (VERMILION, "s", "sentence pairs")}
    for kind, (color, marker, label) in styles.items():
        cells = sorted(results[kind].values(), key=lambda cell: cell["text_bytes"])
        sizes = [cell["text_bytes"] / MEGABYTE for cell in cells]
        memory.plot(sizes, [cell["first"]["peak_bytes"] / MEGABYTE for cell in cells], color=color, marker=marker,
                    label=label)  # fmt: skip
        for start, style in (("first", "-"), ("second", ":")):
            seconds.plot(sizes, [cell[start]["seconds"] for cell in cells], style, color=color, marker=marker,
                         label=f"{label}, {start} start")  # fmt: skip
    stream = results["stream"]
    size = stream["text_bytes"] / MEGABYTE
    memory.plot([size], [stream["peak_bytes"] / MEGABYTE], "D", color=GREEN, label="streaming")
    seconds.plot([size], [stream["seconds"]], "D", color=GREEN, label="streaming, any start")
    sizes = [10, size]
    before = [BEFORE_BYTES / BEFORE_TEXT_BYTES * size for size in sizes]
    memory.plot(sizes, before, "--", color=PURPLE, lw=1, label="all rows in memory (from 184 MB)")
    memory.set(title="Peak memory until the first step", ylabel="MB", ylim=(50, None))
    seconds.set(title="Time until the first step", ylabel="seconds")
    for axis in (memory, seconds):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("text in MB")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    save_figure(figure, path)


def tables(results):
    """Starts by size of the text, and how long a training step waits."""
    rows = []
    for kind, label in (("packed", "packed rows"), ("pairs", "sentence pairs")):
        for cell in sorted(results[kind].values(), key=lambda cell: cell["text_bytes"]):
            starts = [(cell[start]["seconds"], cell[start]["peak_bytes"]) for start in ("first", "second")]
            rows.append(
                [label, f"{cell['text_bytes'] / MEGABYTE:,.0f}", f"{cell['file_bytes'] / MEGABYTE:,.0f}"]
                + [f"{value:.1f}" if index == 0 else f"{value / MEGABYTE:,.0f}" for start in starts
                   for index, value in enumerate(start)]
            )  # fmt: skip
    stream = results["stream"]
    size, peak = stream["text_bytes"] / MEGABYTE, stream["peak_bytes"] / MEGABYTE
    rows.append(["streaming", f"{size:,.0f}", "0", f"{stream['seconds']:.1f}", f"{peak:,.0f}", "the same", "the same"])
    large = results["projected"]["1 TB"]
    rows.append(
        ["packed rows, by calculation", "1,000,000", f"{large['file_bytes'] / MEGABYTE:,.0f}"]
        + [f"{large['first_start_hours']:.0f} h", f"{large['peak_bytes'] / MEGABYTE:,.0f}", "", ""]
    )
    head = ("", "text, MB", "on disk, MB", "first start, s", "memory, MB", "second start, s", "memory, MB")
    waits = [
        [name, f"{cell['wait_ms']:.2f}", f"{cell['step_ms']:.0f}", f"{cell['share']:.2%}"]
        for name, cell in results["waiting"].items()
    ]
    return {
        "starts": make_table("Until the first step", head, rows),
        "waiting": make_table("Waiting for the batch", ("", "wait, ms", "step, ms", "share"), waits),
    }


def alone(function, *arguments):
    """The result of a function, run in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # which may have children of its own
        return pool.submit(function, *arguments).result()


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_memory", description=__doc__.split("\n\n")[0])
    parser.add_argument("--text", type=Path, help="a corpus as .txt or .txt.xz, as large as the largest size")
    parser.add_argument("--sizes", type=float, nargs="+", default=[10, 50, 184], help="sizes of the text in MB")
    parser.add_argument("--batches", type=int, default=300, help="batches to read of the stream")
    parser.add_argument("--steps", type=int, default=60, help="training steps in which the waiting is measured")
    parser.add_argument("--output", type=Path, default=RESULTS / "data_memory.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "data_memory.png")
    options = parser.parse_args(arguments)
    results = {"packed": {}, "pairs": {}}
    if options.output.exists():
        results = json.loads(options.output.read_text())
    whole = {f"{size:g} MB" for size in options.sizes} <= results["packed"].keys() & results["pairs"].keys()
    if not (whole and {"stream", "waiting"} <= results.keys()) and results.get("hardware", hardware()) != hardware():
        parser.error(f"{options.output} was measured with other hardware or versions: choose another --output")

    def measured():
        results.update(hardware=hardware(), date=datetime.datetime.now(datetime.timezone.utc).isoformat())
        keep()

    def keep():
        replace_files({options.output: (json.dumps(results, indent=1) + "\n").encode()})

    folder = Path(tempfile.mkdtemp(prefix="data_memory-"))
    try:
        for size in options.sizes:
            name = f"{size:g} MB"
            for kind in ("packed", "pairs"):
                if name in results[kind]:
                    continue
                path = cut(options.text, size * MEGABYTE, folder / "text.txt")
                cache = folder / f"cache-{kind}-{size:g}"
                cell = {"text_bytes": path.stat().st_size}
                for start in ("first", "second"):
                    cell[start] = alone(measure_start, path, cache, kind == "pairs")
                cell["file_bytes"] = cell["first"]["file_bytes"]
                results[kind][name] = cell
                print(name, kind, cell, flush=True)
                shutil.rmtree(cache)
                measured()
        if not {"stream", "waiting"} <= results.keys():
            path = cut(options.text, max(options.sizes) * MEGABYTE, folder / "text.txt")
            small = cut(options.text, min(options.sizes) * MEGABYTE, folder / "small.txt")
            (folder / "shards").mkdir()
            for number in range(int(STREAM_BYTES // path.stat().st_size) + 1):
                os.symlink(path, folder / f"shards/part-{number:04}.txt")
            size = sum(shard.stat().st_size for shard in (folder / "shards").iterdir())
            pattern, cache = str(folder / "shards/*.txt"), folder / "cache"
            results["stream"] = {"text_bytes": size} | alone(measure_stream, pattern, path, cache, options.batches)
            measured()
            results["waiting"] = alone(measure_waiting, small, pattern, cache, options.steps)
            measured()
    finally:
        shutil.rmtree(folder)
    results["projected"] = {"1 TB": projected(results, 1e12)}
    keep()
    for table in tables(results).values():
        print(f"\n{table.markdown()}", end="")
    plot(results, options.plot)


if __name__ == "__main__":
    main()
