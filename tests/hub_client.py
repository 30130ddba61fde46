"""A process with the real client of the Hub, which reads its environment when it is imported."""

import json
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]

# Runs what it is told, a line of JSON each: a command line of sparsebert, or code. Commands are told by their lists.
CLIENT = """
import contextlib, io, json, sys, time, traceback
time.sleep = lambda seconds: None  # the pauses of the client before it tries again, for which it has no setting
import torch, transformers, sparsebert
from sparsebert.commands import main
answers, names = sys.stdout, {"torch": torch, "transformers": transformers, "sparsebert": sparsebert}
for line in sys.stdin:
    task = json.loads(line)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(task) if isinstance(task, list) else exec(task, names)
        except BaseException:
            code = traceback.format_exc()
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""


class Client:
    """A process with the real client of the Hub, for commands and code."""

    def __init__(self, hub, home):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=hub.environment(home) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def close(self):
        self.process.kill()  # its own end would take seconds
        self.process.communicate()

    def __call__(self, task):
        """Exit code, output and error output of a command line."""
        words = [str(word) for word in task] if isinstance(task, list) else task
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, code):
        """Run code; what it prints."""
        failed, out, _ = self(code)
        assert not failed, failed
        return out

    def done(self, *words):
        """What a command prints that succeeds."""
        code, out, err = self(list(words))
        assert code == 0, err or code
        return out

    def refused(self, *words, code=1):
        """The one line of a command that fails on the way, or with the code 2 before it."""
        found, out, err = self(list(words))
        said = [line for line in err.splitlines() if line.startswith("sparsebert ")]
        assert found == code and out == "" and len(said) == 1, (found, out, err)
        assert err.splitlines()[-1] == said[0]
        return said[0]
