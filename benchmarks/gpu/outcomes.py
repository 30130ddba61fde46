"""
A plugin of pytest that writes the outcome of every test as soon as it is known, for runs that may be stopped:

    python -m pytest -p benchmarks.gpu.outcomes --outcomes PATH ...
"""

import json
from pathlib import Path

from sparsebert.files import replace_files


TEXTS, CHARACTERS = 10, 1500


class Outcomes:
    """Number of tests by outcome, the failed with the end of the first texts, and the tests that were not reached."""

    def __init__(self, path):
        self.path, self.waiting, self.counts, self.failed = Path(path), {}, {}, {}

    def pytest_xdist_node_collection_finished(self, ids):
        self.waiting |= dict.fromkeys(ids)

    def pytest_collection_finish(self, session):
        self.waiting |= dict.fromkeys(item.nodeid for item in session.items)

    def pytest_runtest_logreport(self, report):
        if report.outcome == "passed" and report.when != "call":
            return
        self.waiting.pop(report.nodeid, None)
        self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-CHARACTERS:] if len(self.failed) < TEXTS else ""
        found = {"counts": self.counts, "failed": self.failed, "not_reached": [*self.waiting]}
        replace_files({self.path: (json.dumps(found, indent=1) + "\n").encode()})  # never half, when it is stopped


def pytest_addoption(parser):
    parser.addoption("--outcomes", help="path of the outcomes")


def pytest_configure(config):
    path = config.getoption("outcomes")
    if path and not hasattr(config, "workerinput"):  # not in the workers of xdist
        config.pluginmanager.register(Outcomes(path))
