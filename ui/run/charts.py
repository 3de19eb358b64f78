"""The charts of a run: loss and learning rate as one line across restarts, seconds a step, and what the GPUs did.

The server puts at most BUCKETS points of each line into the component, with the smallest and largest value around each
point, and the browser draws them with uPlot (charts.js). So a run of 100,000 steps opens as quickly as one of 100, and
no answer of the server can be missed. Gradio's own gr.LinePlot was compared: it loads a plotting library of 0.9 MB,
sends all points to the browser, and gives a screen reader no values. So only the part "Compare runs", which is opened
when it is needed, uses it.
"""

import functools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from ui.html import number, table
from ui.run import view
from ui.run.metrics import Metrics

BUCKETS = 500
TABLE_ROWS = 20
FAR = 1e12
# Column of a step: (label, unit)
STEP_LINES = {"loss": ("Loss", ""), "lr": ("Learning rate", ""), "step_s": ("Time of a step", "s")}
# Column of a GPU's sample: (label, unit, divisor)
GPU_LINES = {
    "utilization": ("GPU use", "%", 1.0),
    "memory_used": ("GPU memory", "GB", 1e9),
    "power_w": ("GPU power", "W", 1.0),
    "temperature": ("GPU temperature", "°C", 1.0),
}
MOST_MARKS = 200
EVERY_S = 5.0


def value(shown: "view.View | None") -> dict[str, Any]:
    """What the script draws of a run: {"run", "revision": another text after a change, and what `lines_of` returns}.

    It is at most EVERY_S old while the run trains: nobody watches these lines by the second.
    """
    if shown is None or not shown.status.get("state"):
        return {"run": "", "revision": ""}
    planned, count = shown.number("planned_steps") or 0.0, len(view.incidents(shown.folder))
    read = (
        f"{time.monotonic() // EVERY_S}" if shown.running else view.with_metrics(shown.folder, lambda one: one.revision)
    )
    return _value(shown.folder, planned, count, read)


@functools.lru_cache(view.READ_RUNS)
def _value(folder: Path, planned: float, incidents: int, read: str) -> dict[str, Any]:
    """`value` of a run with so many incidents. read: what was read of its numbers."""

    def make(metrics: Metrics) -> dict[str, Any]:
        revision = f"{folder.name} {metrics.revision} {planned} {incidents}"
        return {"run": folder.name, "revision": revision, **lines_of(metrics, planned, view.incidents(folder))}

    return view.with_metrics(folder, make)


def lines_of(metrics: Metrics, planned: float, incidents: list["view.Incident"]) -> dict[str, Any]:
    """The lines of `metrics` over the steps.

    Returns:
        {"all": [from, to], "data": the same without the steps still to come, "lines": [{"key", "label", "unit", "name",
        "x", "mean", "low", "high"}], "marks": [{"x", "label", "incident"}], "table": markup}; low and high are [] where
        every point is shown.
    """
    steps = metrics.steps
    data = [float(steps["step"][0]), float(steps["step"][-1])] if len(steps["step"]) else [0.0, 0.0]
    lines: list[dict[str, Any]] = [
        {"key": key, "label": label, "unit": unit, **points(steps["step"], steps[key])}
        for key, (label, unit) in STEP_LINES.items()
    ]
    held_step, held_loss = np.array(sorted(metrics.validation.items()), np.float64).reshape(-1, 2).T
    lines.insert(1, {"key": "val_loss", "label": "Validation loss", "unit": "", **points(held_step, held_loss)})
    for index, samples in sorted(metrics.gpus.items()):
        name = f"{index}: {metrics.gpu_names[index]}" if len(metrics.gpus) > 1 else metrics.gpu_names[index]
        for key, (label, unit, divisor) in GPU_LINES.items():
            top = metrics.gpu_memory[index] / divisor if key == "memory_used" else math.nan
            more: dict[str, Any] = {"top": round(top, 1)} if math.isfinite(top) else {}
            line = {"key": key, "label": label, "unit": unit, "name": name, **more}
            lines.append({**line, **points(samples["step"], samples[key] / divisor)})
    return {
        "all": [data[0], max(data[1], planned)],
        "data": data,
        "lines": [line for line in lines if len(line["mean"]) > 1],
        "marks": marks(metrics, incidents),
        "table": table_of(metrics),
    }


def points(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> dict[str, list[float]]:
    """At most `buckets` points of a line, each of another step: {"x", "mean", "low", "high"}.

    x must not fall. Each point is its bucket's mean; low and high are the extremes, [] where no bucket has two values.
    """
    kept = np.isfinite(y) & np.isfinite(x)
    x, y = x[kept], y[kept]
    starts = np.unique(x, return_index=True)[1]
    if len(starts) > buckets:
        starts = starts[np.linspace(0, len(starts), buckets, endpoint=False).astype(int)]
    if not len(starts):
        return {"x": [], "mean": [], "low": [], "high": []}
    counts: np.ndarray = np.diff(np.append(starts, len(y)))
    x, mean = (np.add.reduceat(one, starts) / counts for one in (x, y))
    low: list[float] = []
    high: list[float] = []
    if counts.max() > 1:
        low, high = rounded(np.minimum.reduceat(y, starts)), rounded(np.maximum.reduceat(y, starts))
    return {"x": rounded(x), "mean": rounded(mean), "low": low, "high": high}


def rounded(values: np.ndarray) -> list[float]:
    """Numbers with 7 significant digits, which no chart exceeds and which makes the answer a third as long."""
    return [float(f"{value:.7g}") for value in values.tolist()]


def marks(metrics: Metrics, incidents: list["view.Incident"]) -> list[dict[str, Any]]:
    """Each restart and each incident: {"x": its step, "label", "incident": its number or ""}."""
    out: list[dict[str, Any]] = []
    known = list[Any]()
    for one in incidents:
        step = one.fields.get("step")
        if type(step) is not int or not 0 <= step <= FAR:
            continue
        known.append(one.fields.get("resumed_from"))
        kind = {"hang": "hung", "crash": "crashed"}.get(str(one.fields.get("kind")), "failed")
        out.append({"x": float(step), "label": f"{kind} after step {step:,}", "incident": one.number})
    for step in metrics.restarts[-MOST_MARKS:]:
        if step - 1 not in known:
            out.append({"x": float(step), "label": f"continued at step {step:,}", "incident": ""})
    return sorted(out, key=lambda one: one["x"])[-MOST_MARKS:]


def table_of(metrics: Metrics) -> str:
    """At most TABLE_ROWS steps, evenly spread, as markup."""
    steps, count = metrics.steps, len(metrics.steps["step"])
    rows = np.unique(np.linspace(0, count - 1, TABLE_ROWS).astype(int)) if count else []
    cells = [(f"{steps['step'][n]:,.0f}", *(number(steps[key][n]) for key in STEP_LINES)) for n in rows]
    return table("Values of the charts", ["Step", "Loss", "Learning rate", "Seconds per step"], cells)
