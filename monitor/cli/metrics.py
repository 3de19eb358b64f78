"""`python -m monitor metrics`: every run's status as Prometheus text at http://127.0.0.1:PORT/metrics.

One server reads the status files of all runs, instead of a port in every monitor: the monitors stay small, a scrape cannot
delay one, and a run whose monitor is dead is reported too.
"""

from __future__ import annotations

import http.server
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from monitor.run_folder import MonitorError, all_folders
from monitor.state import State, read_status

STATES = [state.value for state in State if state is not State.OPENING]
GAUGES = {
    "step": ("step", "Optimizer steps completed."),
    "planned_steps": ("planned_steps", "Optimizer steps of the whole run."),
    "step_seconds": ("step_s", "Median duration of a step."),
    "loss": ("loss", "Loss of the last step."),
    "eta_seconds": ("eta_s", "Estimated seconds until the run ends."),
    "attempt": ("attempt", "The current attempt; 1 is the first."),
    "restarts_total": ("restarts", "Restarts since the run began."),
    "incidents_total": ("incidents", "Hangs and crashes since the run began."),
}
TIMES = {
    "last_progress_timestamp_seconds": ("last_progress_at", "When the run last made progress."),
    "updated_timestamp_seconds": ("updated_at", "When the monitor last wrote the status."),
}


def text(runs: list[dict[str, Any]]) -> str:
    """The page (Prometheus text format 0.0.4) for statuses as `monitor.state.read_status` returns them."""
    lines: list[str] = []

    def metric(name: str, help_text: str, values: Sequence[tuple[str, float]], kind: str = "gauge") -> None:
        if values:
            lines.append(f"# HELP hangproof_{name} {help_text}\n# TYPE hangproof_{name} {kind}")
            lines.extend(f"hangproof_{name}{{{labels}}} {value:.15g}" for labels, value in values)

    named = [(f'run="{_escape(run["name"])}"', run) for run in runs]
    metric("watched", "1 when a monitor watches the run now.", [(label, int(run["alive"])) for label, run in named])
    states = [(f'{label},state="{s}"', int(run["state"] == s)) for label, run in named for s in STATES]
    metric("state", "1 for the state that the run is in.", states)
    for name, (key, help_text) in GAUGES.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        metric(name, help_text, [(label, run[key]) for label, run in named if run.get(key) is not None], kind)
    for name, (key, help_text) in TIMES.items():
        metric(name, help_text, [(label, _unix(run[key])) for label, run in named if run.get(key)])
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _unix(utc: str) -> float:
    return datetime.fromisoformat(utc.replace("Z", "+00:00")).timestamp()


def statuses_of(folders: list[Path]) -> list[dict[str, Any]]:
    """The statuses of those runs that were started."""
    return [values for folder in folders if (values := read_status(folder)) is not None]


class Handler(http.server.BaseHTTPRequestHandler):
    """/metrics, and a 404 that says so for anything else."""

    def do_GET(self) -> None:
        found = self.path.split("?")[0] == "/metrics"
        body = text(statuses_of(all_folders())) if found else "not found; this server has only /metrics\n"
        data = body.encode("utf-8")
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8" if found else "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


def server(port: int) -> http.server.ThreadingHTTPServer:
    """A server on 127.0.0.1; port 0 picks a free one.

    Raises:
        MonitorError: the port is in use.
    """
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise MonitorError(f"port {port} cannot be used: {error.strerror}; choose another with --port") from error
