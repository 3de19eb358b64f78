"""`python -m monitor.trackio_feed RUN` logs a run to trackio, a local tracker, from its `metrics.jsonl`.

Decision: no trainer logs to it, because kohya's pin versions of accelerate that do not know it, and a tracker that fails
must cost the training nothing. The monitor starts this process with each attempt; one that still runs keeps its lock.
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


def entries(lines: Iterable[bytes], logged: int) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, values) of each step after `logged`. trackio itself logs what the GPUs do."""
    for line in filter(None, map(json_object, lines)):
        known: dict[str, Any] = {key: line.get(key) for key in ("loss", "lr", "step_s")}
        values = {key: float(v) for key, v in known.items() if type(v) in (int, float) and abs(v) < 1e30}
        if line.get("kind") == "step" and values and count_of(line.get("step")) > logged:
            logged = count_of(line["step"])
            yield logged, values


def feed(folder: Path, tracker: Any, poll_s: float = POLL_S, end_s: float = END_S) -> None:
    """Log what the run's file holds and gains to `tracker`, until the run has had no monitor for `end_s` seconds."""
    logged, seen_s = count_of((read_json(folder / STATE) or {}).get("step")), time.monotonic()
    with open(folder / METRICS, "ab+") as file:
        file.seek(0)
        while time.monotonic() - seen_s < end_s:
            begin, text = file.tell(), file.read(READ_BYTES)
            complete = text[: text.rfind(b"\n") + 1]
            file.seek(begin + len(complete))
            for logged, values in entries(complete.splitlines(), logged):  # noqa: B020 - the last step that was logged
                tracker.log(values, step=logged)
            if complete:
                atomic_write(folder / STATE, json.dumps({"step": logged}))
                continue
            if is_held(folder / LOCK):
                seen_s = time.monotonic()
            time.sleep(poll_s)


def main(run: RunFolder) -> None:
    """Log a run. Where trackio is missing or fails, an event says why, and the run goes on."""
    lock, problem = Lock(run.folder / OWN_LOCK), ""
    if not lock.acquire():
        return  # one logs already
    try:
        import trackio

        config = {k: v for k, v in run.spec.items() if isinstance(v, int | float | str | bool)}
        tracker = trackio.init(project="hangproof", name=run.folder.name, config=config, resume="allow", embed=False)
        feed(run.folder, tracker)
        threading.Timer(FINISH_S, os._exit, [1]).start()
        tracker.finish()
    except ImportError as error:
        problem = f"trackio cannot be imported ({error}); install it: {sys.executable} -m pip install trackio"
    except Exception as error:  # noqa: BLE001 - top of the process: any error of a tracker is reported, and the run goes on
        problem = f"trackio: {type(error).__name__}: {error}"
    if problem:
        run.event("tracker", f"{problem}. The run continues without it")
    os._exit(bool(problem))


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))
