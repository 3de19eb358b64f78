"""`python -m monitor.trackio_feed RUN` logs a run to trackio, a local tracker, from its `metrics.jsonl`.

Decision: no trainer logs to it, because kohya's pin versions of accelerate that do not know it, and a tracker that fails
must cost the training nothing. The monitor starts this process with each attempt; one that still runs keeps its lock.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from guards.checkpoint import atomic_write
from monitor.process.locks import LOCK, Lock, is_held
from monitor.run_folder import METRICS, RunFolder, read_json
from runs.metrics_lines import count_of, json_object

STATE, OWN_LOCK = ".trackio.json", ".trackio.lock"  # the last step that was logged; one process a run
POLL_S = 2.0
END_S = 30.0  # without a monitor for so long, the run has ended; a killed monitor is replaced sooner
FINISH_S = 60.0  # for trackio to write its last entries


def feed(folder: Path, tracker: Any, poll_s: float = POLL_S, end_s: float = END_S) -> None:
    """Log each new step to `tracker`, until the run has had no monitor for `end_s` seconds. trackio itself logs the GPUs."""
    logged, seen_s = count_of((read_json(folder / STATE) or {}).get("step")), time.monotonic()
    with open(folder / METRICS, "ab+") as file:
        file.seek(0)
        while True:
            begin, text = file.tell(), file.readline()
            if text.endswith(b"\n"):
                line = json_object(text) or {}
                known: dict[str, Any] = {key: line.get(key) for key in ("loss", "lr", "step_s")}
                values = {key: float(v) for key, v in known.items() if type(v) in (int, float) and abs(v) < 1e30}
                if line.get("kind") == "step" and values and count_of(line.get("step")) > logged:
                    logged = count_of(line["step"])
                    tracker.log(values, step=logged)
                continue
            file.seek(begin)  # the rest of this line is not written yet
            atomic_write(folder / STATE, json.dumps({"step": logged}))
            seen_s = time.monotonic() if is_held(folder / LOCK) else seen_s
            if time.monotonic() - seen_s >= end_s:
                return
            time.sleep(poll_s)


def main(run: RunFolder) -> None:
    """Log a run. Where trackio is missing or fails, an event says why, and the run goes on."""
    lock = Lock(run.folder / OWN_LOCK)
    if not lock.acquire():
        return  # one logs already
    try:
        import trackio

        config = {k: v for k, v in run.spec.items() if isinstance(v, int | float | str | bool)}
        tracker = trackio.init(project="hangproof", name=run.folder.name, config=config, resume="allow", embed=False)
        feed(run.folder, tracker)
        threading.Timer(FINISH_S, os._exit, [1]).start()
        tracker.finish()
    except Exception as error:  # noqa: BLE001 - top of the process: any error of a tracker is reported, and the run goes on
        how = f"; install it: {sys.executable} -m pip install trackio" if isinstance(error, ImportError) else ""
        run.event("tracker", f"trackio: {type(error).__name__}: {error}{how}. The run continues without it")
    os._exit(0)


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))
