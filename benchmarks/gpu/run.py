"""
Run the queue of GPU measurements (see README.md beside this file).

    python benchmarks/gpu/run.py              # all entries, in order
    python benchmarks/gpu/run.py 1 4          # these
    python benchmarks/gpu/run.py --list
    python benchmarks/gpu/run.py --lease      # what matters most in 9 minutes; writes lease.json and lease.log

Each entry runs in processes of its own under a time limit; a failure does not stop the next one. Writes N.json (what
ran where, how it ended, and the reports of the benchmarks) and N.log.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
LIMIT = 590


@dataclass(frozen=True)
class Entry:
    """
    A question, and the arguments of Python that answer it, one command after the other; `{output}` stands for the path
    of the results, `{folder}` for their folder.
    """

    title: str
    commands: tuple
    environment: dict = field(default_factory=dict)


def _gpu_tests():
    """The test files that have GPU tests: others may need packages that a bare machine lacks."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return " ".join(str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text())


ATTENTION = "-m benchmarks.attention --device cuda --output {output} --no_auto --seconds 3"
ONCE = "--rounds 1 --seconds 0"


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
        "memory of masks and calls (in the report)",
        (f"{ATTENTION} {ONCE} --masks toeplitz64 dam_s --lengths 1024 4096",),
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


def run_entry(number, entry, folder, limit=LIMIT):
    """Run one entry within `limit` seconds and write its results, N.json; returns its content without the reports."""
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


_LEASE = "-m benchmarks.gpu.lease"


def _layers(mask, *layers):
    masks = " ".join(f"learned:{mask}@{layer}" for layer in layers)
    systems = "sdpa_unmasked flash cudnn sdpa_float sparse_triton"
    return f"{ATTENTION} --seconds 0.2 --masks {masks} --lengths 512 1024 2048 4096 --systems {systems}"


_WARM = {
    f"caches {size}, {phase}": f"{_LEASE} models --once --lengths 512 --sizes {size} --phases '{phase}' "
    "--masks dam_s dam_b rest"
    for size in ("BERT-base", "MiniLM")
    for phase in ("inference", "padded inference", "fine-tuning with dropout", "fine-tuning")
}
# What is thrown away but for the caches of the compilers: times of the self-check, taken while others run.
_CHECKS = {f"caches self-check {index}": f"{_LEASE} auto --questions {index}" for index in (1, 2, 3, 5, 9)}
# The lease: stages one after the other, each with its seconds and parts (name and command) that run at the same time.
LEASE = (
    (
        100,
        {
            "finite": f"{_LEASE} finite --backends sparse_sdpa --output {{output}}",
            "finite_triton": f"{_LEASE} finite --backends sparse_triton --output {{output}}",
            **_WARM,
            **_CHECKS,
        },
    ),
    (145, {"models": f"{_LEASE} models --output {{output}}"}),
    (70, {"auto": f"{_LEASE} auto --output {{output}} --measured {{folder}}/lease.json"}),
    (50, {"layers_dam_b": _layers("minilm_dam_b64_512", 0, 5, 4)}),
    (50, {"layers_dam_s": _layers("minilm_dam_s_512", 0, 5, 3)}),
    (
        130,
        {
            "tests": f"-m pytest -q -n 8 --continue-on-collection-errors -m 'gpu and not slow' "
            "-p benchmarks.gpu.outcomes --outcomes {output}.json "
            f"--deselect 'tests/attention/test_attention.py::test_grid_on_cuda[sparse_flex]' {_gpu_tests()}"
        },
    ),
    # By itself: its kernels are the newest, and a fault of one leaves the GPU unusable for its process.
    (30, {"rest": f"{_LEASE} models --masks rest --sizes BERT-base --lengths 512 1024 --output {{output}}"}),
    (
        LIMIT,
        {
            "toeplitz64": f"{ATTENTION} --seconds 0.3 --phases training 'training with dropout' --masks toeplitz64 "
            "--lengths 512 1024 2048 4096 --systems sdpa_unmasked flash cudnn sparse_triton"
        },
    ),
)
LEASE_LIMIT = 520
# Less than this is not enough to start anything.
LEASE_LEAST = 15


def _tiny(command):
    """The command of a part at tiny size on the CPU."""
    if _LEASE in command:
        return f"{command} --tiny --device cpu".replace("sparse_triton", "sparse_cpu")
    if ATTENTION in command:
        rest = "--device cpu --lengths 64 --tokens 128 --seconds 0 --rounds 2 --systems sdpa_unmasked sdpa_float"
        return f"{command} {rest}"
    return command.replace("-n 8", "-n 0")  # no process per test for what is skipped


def run_lease(folder, limit=LEASE_LIMIT, tiny=False):
    """
    Run the stages of `LEASE` within `limit` seconds, and write lease.json after each, which is returned. Before, what
    a part writes is in lease_PART.json. `tiny` is for the CPU, where the parts of a stage wait for each other.
    """
    begin, folder = time.monotonic(), folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    result = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "parts": {}}
    with (
        tempfile.TemporaryDirectory() as logs,
        open(folder / "lease.log", "w") as whole,
        ThreadPoolExecutor(1) as reader,
    ):
        where = reader.submit(machine)  # beside the first stage

        def run(name, command, seconds, parts):
            output, start = folder / f"lease_{name}", time.monotonic()
            command = (
                (_tiny(command) if tiny else command).replace("{output}", str(output)).replace("{folder}", str(folder))
            )
            environment = _environment(ENTRIES[1]) | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
            if len(parts) > 1:
                environment["OMP_NUM_THREADS"] = "1"
            if name.startswith("caches"):
                environment["HF_ASSETS_CACHE"] = logs
            with open(Path(logs) / f"{name}.log", "w+") as log:
                status = _run(command, log, seconds, environment)
                log.seek(0)
                text = log.read()
            part = {"status": status, "seconds": round(time.monotonic() - start, 1)}
            path = output.with_name(output.name + ".json")
            if path.exists():
                with suppress(ValueError):  # stopped while it was written
                    part["report"] = json.loads(path.read_text())
            if status:
                part["log"] = text[-1500:]
            return name, part, text

        for seconds, parts in LEASE:
            left = min(seconds, limit - (time.monotonic() - begin))
            if left < LEASE_LEAST:
                result["parts"] |= dict.fromkeys(parts, {"status": "not started"})
            else:
                with ThreadPoolExecutor(1 if tiny else len(parts)) as pool:
                    for name, part, text in pool.map(
                        lambda item, left=left, parts=parts: run(*item, left, parts), parts.items()
                    ):
                        result["parts"][name] = part
                        whole.write(f"## {name}: {part['status']}, {part['seconds']} s\n{text}\n")
                        print(f"{name}: {part['status']}, {part['seconds']} s", flush=True)
                        print(part.get("log", ""), end="", flush=True)
            whole.flush()
            result["machine"] = where.result()
            result["seconds"] = round(time.monotonic() - begin, 1)
            (folder / "lease.json").write_text(json.dumps(result, indent=1) + "\n")
            for path in folder.glob("lease_*"):
                path.unlink()
    return result


def machine():
    """GPU, driver, versions and git commit, read in a new process; `{"error": ...}` if that fails."""
    command = [sys.executable, "-m", "benchmarks.shared.report"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)}
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
    parser.add_argument("--limit", type=float, help=f"seconds for an entry ({LIMIT}) or the lease ({LEASE_LIMIT})")
    parser.add_argument("--lease", action="store_true", help="run what matters most, and no entries")
    parser.add_argument("--tiny", action="store_true", help="with --lease: at tiny size on the CPU, to try it out")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args(arguments)
    if options.lease:
        parts = run_lease(options.output, options.limit or LEASE_LIMIT, options.tiny)["parts"]
        return int(any(part["status"] for part in parts.values()))
    options.limit = options.limit or LIMIT
    if unknown := set(options.entries) - set(ENTRIES):
        parser.error(f"there is no entry {min(unknown)}, only {', '.join(map(str, ENTRIES))}")
    if not options.list and not (where := machine()).get("gpu"):
        parser.error(f"there is no GPU that PyTorch can use here. {where.get('error', '')}")
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
