"""`python -m monitor.trackio_feed RUN` logs a run to trackio, a local tracker, from its `metrics.jsonl`.

Decision: no trainer logs to it, because kohya's pin versions of accelerate that do not know it, and a tracker that
fails must cost the training nothing. The monitor starts this process with each attempt; a running one keeps its lock.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from guards.checkpoint import atomic_write
from monitor.process.platform import LOCK, Lock, is_held
from monitor.run_folder import METRICS, RunFolder, read_json
from runs.growing import Added, count_of, entries

STATE, OWN_LOCK = ".trackio.json", ".trackio.lock"  # the last step that was logged; one process a run
START_S = 300.0  # for trackio to begin; the stacks of one that hangs are in trackio.log
NUMBERS = ("loss", "lr", "step_s")


def feed(folder: Path, tracker: Any, poll_s: float = 2.0, end_s: float = 30.0) -> None:
    """Log each new step to `tracker`, until the run has had no monitor for `end_s` seconds (a killed one returns)."""
    logged, seen_s = count_of((read_json(folder / STATE) or {}).get("step")), time.monotonic()
    metrics, lines = Added(folder / METRICS), [b"the first"]
    while lines or time.monotonic() - seen_s < end_s:
        lines = metrics.lines(1 << 20)[0]
        for line in entries(lines):
            known = {key: line[key] for key in NUMBERS if type(line.get(key)) in (int, float) and abs(line[key]) < 1e30}
            if line.get("kind") == "step" and known and count_of(line.get("step")) > logged:
                logged = count_of(line["step"])
                tracker.log({key: float(value) for key, value in known.items()}, step=logged)
        if lines:
            atomic_write(folder / STATE, json.dumps({"step": logged}))
        seen_s = time.monotonic() if lines or is_held(folder / LOCK) else seen_s
        time.sleep(poll_s * (not lines))


def main(run: RunFolder) -> None:
    """Log a run. Where trackio is missing or fails, an event says why, and the run goes on."""
    try:
        if not Lock(run.folder / OWN_LOCK).acquire():  # held until this process ends
            return
        faulthandler.dump_traceback_later(START_S, exit=True)
        import trackio

        config = {k: v for k, v in run.spec.items() if isinstance(v, int | float | str)}
        tracker = trackio.init(project="hangproof", name=run.folder.name, config=config, resume="allow", embed=False)
        faulthandler.cancel_dump_traceback_later()
        feed(run.folder, tracker)
        faulthandler.dump_traceback_later(60, exit=True)  # for its last entries
        tracker.finish()
    except Exception as error:  # noqa: BLE001 - top of the process: a tracker's error is reported, and the run goes on
        how = f"; install it: {sys.executable} -m pip install trackio" if isinstance(error, ImportError) else ""
        run.event("tracker", f"trackio: {type(error).__name__}: {error}{how}. The run continues without it")
    os._exit(0)


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))
