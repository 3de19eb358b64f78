"""Run a small module, or sd-scripts itself, under the patches, and say how it ended and how long it took."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_sd_scripts as tiny

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ended:
    """code: exit code. log: both streams. took_s: from start to exit. ended_s: when it was gone, `time.monotonic()`.
    folder: where it may have left something."""

    code: int
    log: str
    took_s: float
    ended_s: float
    folder: Path | None = None

    def hung_s(self) -> float:
        """Seconds from where the process said `HANG` and its clock (the first that did) until it was gone: start-up does
        not count. One clock: `time.monotonic()` is the machine's."""
        assert "HANG " in self.log, f"ended with {self.code} before it came to its hang:\n{self.log[-3000:]}"
        return self.ended_s - float(self.log.split("HANG ")[1].split()[0])


def watch(command: list[str], env: dict[str, str], cwd: Path, timeout_s: float) -> Ended:
    """Run to the end. A process that is still there after `timeout_s` is killed and fails the test."""
    begun = time.monotonic()
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        try:
            log, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            log, _ = process.communicate()
            raise AssertionError(f"still running after {timeout_s} s:\n{log[-3000:]}") from None
    now = time.monotonic()
    return Ended(process.returncode, log, now - begun, now)


@contextlib.contextmanager
def ahead(
    request, fixture: str, jobs: dict[str, Callable[[], object]], at_once: int = 2
) -> Iterator[dict[str, Future]]:
    """Start those jobs that the selected tests of this module ask `fixture` for, `at_once` at a time; name → Future.

    A test asks by `asks(fixture, name)`. Most of a job is starting up and waiting: side by side they take half the time.
    """
    here = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    names = dict.fromkeys(item.callspec.params[fixture] for item in here if fixture in item.callspec.params)
    pool = ThreadPoolExecutor(at_once)
    try:
        yield {name: pool.submit(jobs[name]) for name in names if name in jobs}
    finally:  # who ends the tests early does not wait for jobs that have not begun
        pool.shutdown(cancel_futures=True)


def asks(fixture: str, *names: str):
    """The test is run once for each name, and gets what `fixture` makes of it."""
    return pytest.mark.parametrize(fixture, names, indirect=True)


def python() -> str:
    """The interpreter of sd-scripts' environment where it is here, else ours."""
    return str(tiny.python() if tiny.python().is_file() else sys.executable)


def module(folder: Path, source: str, *args: str, timeout_s: float = 240, **env: str) -> Ended:
    """Run `source` as `python -m sd_scripts_patches -m probe ARGS`, in the checkout's folder where there is one.

    In sd-scripts' environment where it is here, else in ours.
    """
    (folder / "probe.py").write_text(source, encoding="utf-8")
    base = tiny.environment(folder if tiny.why_not() else tiny.site(), **env)
    base["PYTHONPATH"] = (
        f"{folder}:{base['PYTHONPATH']}" if sys.platform != "win32" else f"{folder};{base['PYTHONPATH']}"
    )
    cwd = tiny.checkout() if (tiny.checkout() / "train_network.py").is_file() else folder
    return watch([python(), "-m", "sd_scripts_patches", "-m", "probe", *args], base, cwd, timeout_s)


def train(work: Path, args: list[str], timeout_s: float = 300, patched: bool = True, **env: str) -> Ended:
    """Run flux_train_network.py on the tiny models."""
    return watch(tiny.command(*args, patched=patched), tiny.environment(work, **env), tiny.checkout(), timeout_s)
