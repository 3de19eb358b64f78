"""`python -m monitor metrics`: every run's status as Prometheus text at http://127.0.0.1:PORT/metrics.

One server reads the status files of all runs, instead of a port in every monitor: a scrape cannot delay a monitor, and
a run whose monitor is dead is reported too.
"""

import contextlib
import http.server
import re
from datetime import datetime
from typing import Any

from monitor.run_folder import all_folders
from monitor.state import State, read_status

METRICS = {  # name: (key of the status, what it is)
    "watched": ("alive", "1 when a monitor watches the run now."),
    "state": ("state", "1 for the state that the run is in."),
    "step": ("step", "Optimizer steps completed."),
    "planned_steps": ("planned_steps", "Optimizer steps of the whole run."),
    "step_seconds": ("step_s", "Median duration of a step."),
    "loss": ("loss", "Loss of the last step."),
    "eta_seconds": ("eta_s", "Estimated seconds until the run ends."),
    "attempt": ("attempt", "The current attempt; 1 is the first."),
    "restarts_total": ("restarts", "Restarts since the run began."),
    "incidents_total": ("incidents", "Hangs and crashes since the run began."),
    "last_progress_timestamp_seconds": ("last_progress_at", "When the run last made progress."),
    "updated_timestamp_seconds": ("updated_at", "When the monitor last wrote the status."),
}
# The Host header: an address, because a website can let a name of its own lead to this machine.
OWN = re.compile(r"(localhost|[\d.]+|\[[\da-fA-F:.]+\])(:\d+)?")
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})  # of a label; another escape ends a scrape


def text(runs: list[dict[str, Any]]) -> str:
    """The page (Prometheus text format 0.0.4) for statuses as `monitor.state.read_status` returns them."""
    lines: list[str] = []
    for name, (key, about) in METRICS.items():
        samples = [f"hangproof_{name}{s}" for run in runs if run.get(key) is not None for s in _samples(key, run)]
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP hangproof_{name} {about}", f"# TYPE hangproof_{name} {kind}", *samples] if samples else []
    return "\n".join(lines) + "\n"


def _samples(key: str, run: dict[str, Any]) -> list[str]:
    """The samples of one value; none where it is damaged, which `monitor status` says."""
    label, value = f'run="{str(run.get("name")).translate(ESCAPED)}"', run[key]
    if key == "state":
        return [f'{{{label},state="{s}"}} {int(value == s)}' for s in State if s is not State.OPENING]
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return [f"{{{label}}} {datetime.fromisoformat(value).timestamp() if isinstance(value, str) else value:.15g}"]
    return []


class Handler(http.server.BaseHTTPRequestHandler):
    """/metrics, and an error for anything else. Scrapes are not logged."""

    timeout = 30.0  # seconds: of a client that sends nothing, each would keep a thread

    def do_GET(self) -> None:
        """Answer a scrape."""
        own = OWN.fullmatch(self.headers.get("Host", "localhost"))
        if not own or self.path.split("?")[0] != "/metrics":
            self.send_error(404 if own else 403, "this server has only /metrics, and only as 127.0.0.1 or localhost")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.end_headers()
        self.wfile.write(text([*filter(None, map(read_status, all_folders()))]).encode("utf-8", "replace"))

    def log_message(self, *_: object) -> None:
        """Log nothing."""
