"""`python -m monitor.trackio_feed RUN` logs a run to trackio, a local tracker, from its `metrics.jsonl`.

Decision: no trainer logs to it. kohya's trainers pin versions of accelerate that do not know trackio; a file that all
trainers write serves them all, and a tracker that fails or hangs costs the training nothing. The monitor starts this
process with each attempt; one that still runs keeps its lock, and the new one ends at once.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from guards.checkpoint import atomic_write
from monitor.process.locks import LOCK, Lock, is_held
from monitor.run_folder import METRICS, RunFolder, read_json
from runs.metrics_lines import count_of, json_object

STATE, OWN_LOCK = ".trackio.json", ".trackio.lock"  # the last step that was logged; one process a run
POLL_S = 2.0
END_S = 30.0  # without a monitor for so long, the run has ended; a killed monitor is replaced sooner
READ_BYTES = 1 << 20
FINISH_S = 60.0  # for trackio to write its last entries
VALUES = {"step": ("loss", "lr", "step_s"), "gpu": ("utilization", "memory_used", "power_w", "temperature")}


def entries(lines: Iterable[bytes], logged: int, gpus: dict[str, float]) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, values) of each new step; the newest values of the GPUs, kept in `gpus`, are logged with the next step."""
    for line in filter(None, map(json_object, lines)):
        known: dict[str, Any] = {key: line.get(key) for key in VALUES.get(str(line.get("kind")), ())}
        values = {key: float(v) for key, v in known.items() if type(v) in (int, float) and abs(v) < 1e30}
        if line.get("kind") == "gpu":
            gpus |= {f"gpu{count_of(line.get('gpu'))}/{key}": value for key, value in values.items()}
        elif values and count_of(line.get("step")) > logged:
            logged = count_of(line["step"])
            yield logged, values | gpus
            gpus.clear()


def feed(folder: Path, tracker: Any, poll_s: float = POLL_S, end_s: float = END_S) -> None:
    """Log what the run's file holds and gains to `tracker`, until the run has had no monitor for `end_s` seconds."""
    logged, gpus = count_of((read_json(folder / STATE) or {}).get("step")), dict[str, float]()
    seen_s = time.monotonic()
    with open(folder / METRICS, "ab+") as file:
        file.seek(0)
        while time.monotonic() - seen_s < end_s:
            begin, text = file.tell(), file.read(READ_BYTES)
            complete = text[: text.rfind(b"\n") + 1]
            file.seek(begin + len(complete))
            for logged, values in entries(complete.splitlines(), logged, gpus):  # noqa: B020 - the last step that was logged
                tracker.log(values, step=logged)
            if complete:
                atomic_write(folder / STATE, json.dumps({"step": logged}))
                continue
            if is_held(folder / LOCK):
                seen_s = time.monotonic()
            time.sleep(poll_s)


def main(folder: RunFolder) -> str:
    """Log a run; "" or why that is impossible: trackio is missing or failed. The run goes on."""
    lock = Lock(folder.folder / OWN_LOCK)
    if not lock.acquire():
        return ""  # one logs already
    try:
        import trackio

        config = {k: v for k, v in folder.spec.items() if isinstance(v, int | float | str | bool)}
        tracker = trackio.init(project="hangproof", name=folder.folder.name, config=config, resume="allow", embed=False)
        feed(folder.folder, tracker)
        threading.Timer(FINISH_S, os._exit, [1]).start()
        tracker.finish()
    except ImportError as error:
        return f"trackio cannot be imported ({error}); install it: {sys.executable} -m pip install trackio"
    except Exception as error:  # noqa: BLE001 - top of the process: any error of a tracker is reported, and the run goes on
        return f"trackio: {type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    run = RunFolder(Path(sys.argv[1]))
    if problem := main(run):
        run.event("tracker", f"{problem}. The run continues without it")
    sys.stdout.flush()
    os._exit(bool(problem))
