"""
Run the queue of GPU measurements (see README.md beside this file).

    python benchmarks/gpu/run.py              # all entries, in order
    python benchmarks/gpu/run.py 1 4          # these
    python benchmarks/gpu/run.py --prepare    # run entries 2 to 5 and 13 once, at the same time, to fill caches
    python benchmarks/gpu/run.py --list

Each entry runs in processes of its own under a time limit; a failure does not stop the next one. Writes N.json (what
ran where, how it ended, and the reports of the benchmarks), N.log and plots.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
LIMIT = 590


@dataclass(frozen=True)
class Entry:
    """
    One entry of the queue.

    Args:
        title (`str`): The question that it answers.
        commands (`tuple[str, ...]`): Arguments of Python, run one after the other; `{output}` stands for the path of
            the results, `{folder}` for their folder.
        environment (`dict`): Variables added to the environment of the process.
    """

    title: str
    commands: tuple
    environment: dict = field(default_factory=dict)


def _gpu_tests():
    """The test files that have GPU tests: others may need packages that a bare machine lacks."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return " ".join(f"tests/{path.name}" for path in paths if "mark.gpu" in path.read_text())


ATTENTION = "-m benchmarks.attention --device cuda --output {output} --no_auto --seconds 3"
ONCE = "--rounds 1 --seconds 0"
# The model stays in runs/; the mask goes to the results, with its live tiles, and is timed.
SEARCH = (
    "pretrain.py recipes/tiles.yaml --hidden_size 768 --num_hidden_layers 12 --num_attention_heads 12 "
    "--intermediate_size 3072 --learning_rate 1e-4 --bf16 true --max_tokens 20000000 --overwrite true "
    "--output_dir runs/gpu_{length} --mask_length {length} --max_length {length} --max_position_embeddings {length} "
)
KEEP = (
    "-c \"from sparsebert import SparseMask, plan; mask = SparseMask.from_pretrained('runs/gpu_{length}'); "
    "mask.save_pretrained('{output}_mask'); plan(mask, device='cuda')\""
)


def _search(length, arguments):
    timed = f"{ATTENTION} --masks learned:runs/gpu_{length} --lengths {length}"
    search = (SEARCH + arguments).replace("{length}", str(length))
    return search, KEEP.replace("{length}", str(length)), timed


ENTRIES = {
    1: Entry("are the kernels right", (f"-m pytest -q -n 8 -m 'gpu and not slow' {_gpu_tests()}",)),
    2: Entry(
        "forward under block-Toeplitz and window masks",
        (
            f"{ATTENTION} --phases forward --masks toeplitz64 --lengths 128 512 1024 2048 4096",
            f"{ATTENTION} --phases forward --masks window --lengths 512 1024 2048 4096",
        ),
    ),
    3: Entry(
        "forward and backward, and dropout, under block-Toeplitz masks",
        (
            f"{ATTENTION} --phases training 'training with dropout' --masks toeplitz64 "
            "--lengths 128 512 1024 2048 4096",
        ),
    ),
    4: Entry(
        "scattered masks against SDPA with a mask and FlexAttention",
        (
            f"{ATTENTION} --masks dam_s --lengths 128 512 1024 2048",
            f"{ATTENTION} --phases forward training --masks dam_u --lengths 512 2048",
        ),
    ),
    5: Entry(
        "BERT-base, tokens per second",
        (
            "-m benchmarks.model --device cuda --output {output} --backend sparse_triton --masks toeplitz64 "
            "--lengths 128 512 1024 2048 4096",
        ),
    ),
    6: Entry(
        "memory of masks and calls", (f"{ATTENTION} --memory {ONCE} --masks toeplitz64 dam_s --lengths 1024 4096",)
    ),
    7: Entry(
        "which launch configurations are chosen (in the log)",
        tuple(
            f"{ATTENTION} --dtype {dtype} {ONCE} --systems sparse_triton --masks toeplitz64 dam_s "
            "--lengths 128 512 1024 2048 4096"
            for dtype in ("bfloat16", "float16", "float32")
        ),
        {"TRITON_PRINT_AUTOTUNING": "1"},
    ),
    8: Entry("search on tiles at 512 tokens", _search(512, "--max_steps 2000 --per_device_train_batch_size 32")),
    9: Entry(
        "search on tiles at 1024 tokens",
        _search(1024, "--max_steps 1000 --per_device_train_batch_size 16 --freeze_sparsity 0.81"),
    ),
    10: Entry(
        "a step of pre-training: stock, dense, searches, frozen",
        (
            "-m benchmarks.pretrain --device cuda --output {output} --sizes mini --tokens 16384",
            # All systems are in memory at the same time; at 2048 tokens those that search need 25 GB each.
            "-m benchmarks.pretrain --device cuda --output {output} --sizes base --tokens 8192 --lengths 128 512",
        ),
    ),
    11: Entry(
        "what bf16, torch.compile, ... do for that step",
        ("-m benchmarks.pretrain --device cuda --output {output} --options --sizes base --lengths 128 2048",),
    ),
    12: Entry("the predictions of the model against entries 2 to 4", ("-m benchmarks.gpu.model --compare {folder}",)),
    13: Entry(
        "an encoder layer, tokens per second",
        (
            "-m benchmarks.layer --device cuda --output {output} --backend sparse_triton --masks toeplitz64 "
            "--lengths 128 512 1024 2048 4096",
        ),
    ),
    14: Entry("the whole grid of tests", (f"-m pytest -q -n 8 -m 'gpu and slow' {_gpu_tests()}",)),
    15: Entry(
        "copying 63 symbols",
        (
            "-m sparsebert reproduce copying --scale paper --source_length 63 --stride 8 --window_size 8 "
            "--max_steps 10000 --warmup_steps 500 --learning_rate 1e-3 --batch_size 512 --bf16 true --depths '[4]' "
            "--output {folder} --runs runs/gpu_copying",
        ),
    ),
}


# Entries that compile much, fit into one GPU together, and leave nothing but compiled kernels.
PREPARED = (2, 3, 4, 5, 13)


def _run(command, log, seconds, environment):
    """Exit status of `python COMMAND`, or "timed out"; ends all processes that it started."""
    words = [sys.executable, *shlex.split(command)]
    log.write(f"$ {shlex.join(['python', *words[1:]])}\n")
    log.flush()
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(entry):
    """Variables of the processes of an entry."""
    fixed = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return os.environ | fixed | entry.environment


def prepare(numbers, limit=LIMIT):
    """
    Run the benchmarks of entries once, all at the same time: the compilers, which take most of the time, then find
    their results in their caches. The times of such a run mean nothing and are not kept.

    Args:
        numbers (`Iterable` of `int`): Some of `PREPARED`.
        limit (`float`): Seconds for each command.

    Returns:
        `dict`: Exit status and log by number of the entry and of the command.
    """
    commands = {
        (number, part): command for number in numbers for part, command in enumerate(ENTRIES[number].commands, 1)
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(commands)) as pool:

        def run(key):
            output = Path(folder) / "_".join(map(str, key))
            command = f"{commands[key].replace('{output}', str(output))} {ONCE}"
            with open(output.with_suffix(".log"), "w+") as log:
                status = _run(command, log, limit, _environment(ENTRIES[key[0]]))
                log.seek(0)
                return status, log.read()

        return dict(zip(commands, pool.map(run, commands), strict=True))


def run_entry(number, entry, folder, limit=LIMIT):
    """
    Run one entry and write its results.

    Args:
        number (`int`): Number of the entry, N in the names of its files.
        entry ([`Entry`]): The entry.
        folder (`Path`): Folder of the results.
        limit (`float`): Seconds for all commands of the entry.

    Returns:
        `dict`: Content of N.json without the reports.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = _environment(entry)
    start, statuses, reports = time.monotonic(), [], {}
    with open(folder / f"{number}.log", "w") as log:
        for part, command in enumerate(entry.commands, 1):
            output = folder / f"{number}_{part}"
            left = max(limit - (time.monotonic() - start), 1)
            command = command.replace("{output}", str(output)).replace("{folder}", str(folder))
            statuses.append(_run(command, log, left, environment))
            path = output.with_name(output.name + ".json")
            if path.exists():
                reports[part] = json.loads(path.read_text())
                path.unlink()
    result = {
        "entry": number,
        "title": entry.title,
        "commands": entry.commands,
        "status": "ok" if not any(statuses) else f"failed: {', '.join(map(str, statuses))}",
        "seconds": round(time.monotonic() - start, 1),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    (folder / f"{number}.json").write_text(json.dumps(result | {"reports": reports}, indent=1) + "\n")
    return result


def machine():
    """GPU, driver, versions and git commit, read in a new process; `{"error": ...}` if that fails."""
    run = subprocess.run([sys.executable, "-m", "benchmarks._report"], cwd=ROOT, capture_output=True, text=True)
    return json.loads(run.stdout) if run.returncode == 0 else {"error": run.stderr.strip()[-500:]}


def row(result):
    """The line of the table in README.md."""
    where = result["machine"]
    versions = f"torch {where.get('torch')}, triton {where.get('triton')}, driver {where.get('driver')}"
    ended = f"{result['status']}, {result['seconds']:.0f} s"
    return f"| {result['entry']} | {ended} | {where.get('gpu')}, {versions} | {where.get('commit')} |"


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Run the queue of GPU measurements.")
    parser.add_argument("entries", nargs="*", type=int, metavar="N", help="default: all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for an entry")
    parser.add_argument(
        "--prepare", action="store_true", help="run the entries once, at the same time, and keep nothing"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.entries) - set(ENTRIES):
        parser.error(f"entries must be from 1 to {max(ENTRIES)}, got {min(unknown)}")
    if not options.list and not (where := machine()).get("gpu"):
        parser.error(f"there is no GPU that PyTorch can use here. {where.get('error', '')}")
    if options.prepare:
        if unfit := set(options.entries) - set(PREPARED):
            parser.error(f"--prepare is for entries {', '.join(map(str, PREPARED))}, got {min(unfit)}")
        found = prepare(options.entries or PREPARED, options.limit)
        for (number, part), (status, log) in found.items():
            print(f"{number}, command {part}: {'ok' if status == 0 else f'failed: {status}'}")
            print(log[-3000:] if status else "", end="", flush=True)
        return int(any(status for status, _ in found.values()))
    results = []
    for number in options.entries or ENTRIES:
        entry = ENTRIES[number]
        print(f"{number}. {entry.title}", flush=True)
        if options.list:
            print(*(f"   python {command}" for command in entry.commands), sep="\n")
            continue
        results.append(run_entry(number, entry, options.output, options.limit))
        print((options.output / f"{number}.log").read_text()[-6000:], flush=True)
    if results:
        print("For the table in benchmarks/gpu/README.md:", *map(row, results), sep="\n")
    return int(any(result["status"] != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
