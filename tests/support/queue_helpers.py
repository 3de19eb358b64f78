"""Toy runs that wait for a GPU in the queue of a data root of their own."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from monitor_helpers import events, toy_run
from run_facts import status
from runs_helpers import python

from jobs import queue
from monitor.process.platform import LOCK, is_held


@pytest.fixture(name="data")
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data root with one GPU. At the end nothing of it is alive."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("HANGPROOF_GPUS", "test")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in [key for key in os.environ if key in ("HANGPROOF_RUN", "HANGPROOF_LIMITS")]:
        monkeypatch.delenv(name)
    yield tmp_path
    (tmp_path / "outputs" / queue.FILE).unlink(missing_ok=True)
    for process in processes(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def processes(data: Path, *words: str) -> list[psutil.Process]:
    """The living processes that work in this data root, and whose command line has all `words`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            places = [process.environ().get(name, "") for name in ("HANGPROOF_DATA", "HANGPROOF_RUN")]
            own = any(place.startswith(str(data)) for place in places) and process.pid != os.getpid()
            if own and process.status() != psutil.STATUS_ZOMBIE and set(words) <= {*process.cmdline()}:
                found.append(process)
    return found


command = partial(python, "-m")


def made(data: Path, *names: str, steps: int = 12, **more) -> list[Path]:
    return [toy_run(data / "outputs" / name, steps=steps, **more) for name in names]


def ended(folder: Path, state: str = "completed") -> bool:
    return status(folder)["state"] == state and not is_held(folder / LOCK)


def starts(folder: Path) -> list[str]:
    """When attempts of this run were started."""
    return [event["t"] for event in events(folder) if event["kind"] in ("started", "restarted")]
