"""A test that failed in the full run and passes alone is reported as FLAKY, ready to be filed as it is printed.

./test.sh names a file in HANGPROOF_FAILURES. The full run writes its failures there; the second run, of these tests
alone, reads them and prints an issue for each that passed.
"""

import json
import os
import time
from pathlib import Path

import pytest

SHOWN_LINES = 40


class Failures:
    """The failed tests of a run, as `nodeid → what is said of it`."""

    def __init__(self, path: Path):
        self.path = path
        self.before: dict[str, dict] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self.failed: dict[str, dict] = {}
        self.passed: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note each failure, and how long each passed test took."""
        if report.failed:
            load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
            about = f"{report.when}, after {report.duration:.1f} s, at {time.strftime('%H:%M:%S')}, load {load}"
            log = "\n".join([report.longreprtext, *(f"{title}\n{text}" for title, text in report.sections)])
            self.failed[report.nodeid] = {"about": about, "log": log}
        elif report.when == "call" and report.passed:
            self.passed[report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        """The full run's failures are kept for the second run."""
        if not self.before and self.failed:
            self.path.write_text(json.dumps(self.failed), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One issue for each test that failed before and passed now."""
        for name, failure in self.before.items():
            if name in self.passed and name not in self.failed:
                terminalreporter.write_line(issue(name, failure, self.passed[name]), yellow=True)


def issue(name: str, failure: dict, alone_s: float) -> str:
    """The text of an issue about a flaky test."""
    log = failure["log"].strip().splitlines()
    seeds = [line.strip() for line in log if "seed" in line.lower()]
    shown = "\n".join(f"  | {line}" for line in log[-SHOWN_LINES:])
    return f"""FLAKY {name}
  It failed in the full run ({failure["about"]}) and passed alone in {alone_s:.1f} s.
  Seed: {seeds[-1] if seeds else "none printed; Hypothesis draws the same examples each time"}
  Once more alone: ./test.sh '{name}'
{shown}"""


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that prints the report keeps the failures."""
    path = os.environ.get("HANGPROOF_FAILURES")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)), "hangproof-failures")
