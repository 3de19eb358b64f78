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
    """The failed tests of a run, as `nodeid → {when, seconds, worker, load, log}`."""

    def __init__(self, path: Path):
        self.path = path
        self.before: dict[str, dict] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self.failed: dict[str, dict] = {}
        self.passed: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note each failure, and how long each passed test took."""
        if report.failed:
            self.failed[report.nodeid] = {
                "when": report.when,
                "seconds": round(report.duration, 1),
                "worker": getattr(report, "worker_id", "alone"),
                "at": time.strftime("%H:%M:%S"),
                "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
                "log": "\n".join([report.longreprtext, *(f"{title}\n{text}" for title, text in report.sections)]),
            }
        elif report.when == "call" and report.passed:
            self.passed[report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        """The full run's failures are kept for the second run."""
        if not self.before and self.failed:
            self.path.write_text(json.dumps(self.failed), encoding="utf-8")

    def flaky(self) -> list[str]:
        """The tests that failed before and passed now."""
        return [name for name in self.before if name in self.passed and name not in self.failed]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One issue for each flaky test."""
        for name in self.flaky():
            terminalreporter.write_line(issue(name, self.before[name], self.passed[name]), yellow=True)


def issue(name: str, failure: dict, alone_s: float) -> str:
    """The text of an issue about a flaky test."""
    log = failure["log"].strip().splitlines()
    seeds = [line.strip() for line in log if "seed" in line.lower()]
    return "\n".join(
        [
            f"FLAKY {name}",
            f"  It failed in the full run ({failure['when']}, after {failure['seconds']} s, at {failure['at']}, worker "
            f"{failure['worker']}, load {failure['load']}) and passed alone in {alone_s:.1f} s.",
            f"  Seed: {seeds[-1] if seeds else 'none printed; Hypothesis draws the same examples each time'}",
            f"  Once more alone: ./test.sh '{name}'",
            *(f"  | {line}" for line in log[-SHOWN_LINES:]),
        ]
    )


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that prints the report keeps the failures."""
    path = os.environ.get("HANGPROOF_FAILURES")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)), "hangproof-failures")
