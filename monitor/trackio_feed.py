"""Logs a run to trackio, from its `metrics.jsonl`, in a process of its own.

trackio is a local tracker of Hugging Face: it writes to a database on this machine, and `trackio show --project hangproof` shows it.
Decision: no trainer logs to it. accelerate knows trackio only from 1.11 on, and kohya's trainers pin older ones; a file that all
trainers write anyway serves them all, and a tracker that fails or hangs costs the training nothing. The monitor starts
`python -m monitor.trackio_feed RUN` with each attempt; one that still runs keeps its lock, and the new one ends at once. What was
logged is noted in `.trackio.json`, so a restart logs no step twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monitor.metrics_lines import count_of, json_object
from monitor.process import platform
from monitor.process.locks import LOCK, Lock, is_held
from monitor.process.subjob import ROOT, helper_environment, python
from monitor.run_folder import METRICS, RunFolder

TRACKER = "trackio"
PROJECT = "hangproof"
STATE, OWN_LOCK, LOG = ".trackio.json", ".trackio.lock", "trackio.log"
POLL_S = 2.0
END_S = 30.0  # without a monitor for so long, the run has ended; a killed monitor is replaced sooner
FINISH_S = 60.0  # for trackio to write its last entries
READ_BYTES = 1 << 20
VALUES = ("loss", "lr", "step_s")
GPU_VALUES = ("utilization", "memory_used", "power_w", "temperature")

_children: list[subprocess.Popen[bytes]] = []


def start(folder: RunFolder) -> None:
    """Start the process where the run's settings ask for it. Never raises: a tracker cannot stop a run."""
    _children[:] = [child for child in _children if child.poll() is None]
    if folder.spec.get("trackers") != TRACKER:
        return
    try:
        with (folder.folder / LOG).open("ab") as log:
            child = platform.popen(
                python("monitor.trackio_feed", str(folder.folder)),
                cwd=ROOT,
                env=helper_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **platform.detached(),
            )
        _children.append(child)
    except OSError as error:
        folder.log(f"trackio could not be started: {error.strerror or error}; the run continues without it")


def lines_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """(the complete lines after byte `offset`, at most READ_BYTES; where they end). A file that became shorter starts anew."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = offset if offset <= size else 0
            file.seek(offset)
            data = file.read(READ_BYTES)
    except OSError:
        return [], offset
    complete = data.rfind(b"\n") + 1
    if not complete and len(data) == READ_BYTES:
        complete = len(data)  # not a line of ours
    found = [json_object(line) for line in data[:complete].splitlines()]
    return [one for one in found if one is not None], offset + complete


def entries(lines: list[dict[str, Any]], logged: int, gpus: dict[str, float]) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, values) of each new step; the newest values of the GPUs, kept in `gpus`, are logged with the next step."""
    for line in lines:
        if line.get("kind") == "gpu":
            index = count_of(line.get("gpu"))
            gpus |= {f"gpu{index}/{key}": float(line[key]) for key in GPU_VALUES if _is_number(line.get(key))}
        elif line.get("kind") == "step" and count_of(line.get("step")) > logged:
            logged = count_of(line["step"])
            yield logged, {**{key: float(line[key]) for key in VALUES if _is_number(line.get(key))}, **gpus}
            gpus.clear()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _state(path: Path) -> tuple[int, int]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return count_of(known.get("offset")), count_of(known.get("step"))
    except (OSError, ValueError, AttributeError):
        return 0, 0


def feed(folder: Path, tracker: Any, poll_s: float = POLL_S, end_s: float = END_S) -> None:
    """Log what the run's file holds and gains to `tracker`, until the run has had no monitor for `end_s` seconds."""
    state, gpus = folder / STATE, dict[str, float]()
    offset, logged = _state(state)
    seen_s = time.monotonic()
    while True:
        lines, end = lines_after(folder / METRICS, offset)
        for logged, values in entries(lines, logged, gpus):  # noqa: B020 - the last step that was logged
            tracker.log(values, step=logged)
        if end != offset:
            offset = end
            new = state.with_name(f"{STATE}.new")
            new.write_text(json.dumps({"offset": offset, "step": logged}), encoding="utf-8")
            new.replace(state)
            continue
        now_s = time.monotonic()
        seen_s = now_s if is_held(folder / LOCK) else seen_s
        if now_s - seen_s >= end_s:
            return
        time.sleep(poll_s)


def main(argv: list[str]) -> int:
    """Log the run in the folder that the argument names. Exit code 1: trackio is missing or failed; the run goes on."""
    folder = RunFolder(Path(argv[0]))
    lock = Lock(folder.folder / OWN_LOCK)
    if not lock.acquire():
        return 0  # one logs already
    try:
        import trackio
    except ImportError as error:
        where = f"{sys.executable} -m pip install trackio"
        folder.event(
            "tracker", f"trackio cannot be imported ({error}); install it: {where}. The run continues without it"
        )
        return 1
    settings = {k: v for k, v in folder.spec.items() if isinstance(v, int | float | str | bool)}
    try:
        tracker = trackio.init(project=PROJECT, name=folder.folder.name, config=settings, resume="allow", embed=False)
        feed(folder.folder, tracker)
        threading.Thread(target=_give_up, daemon=True).start()
        tracker.finish()
    except Exception as error:  # noqa: BLE001 - top of the process: any error of a tracker is reported, and the run goes on
        folder.event("tracker", f"trackio: {type(error).__name__}: {error}; the run continues without it")
        return 1
    return 0


def _give_up() -> None:
    time.sleep(FINISH_S)
    print(f"trackio did not finish within {FINISH_S:.0f} s", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
