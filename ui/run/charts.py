"""The charts of a run: loss and learning rate as one line across restarts, seconds a step, and what the GPUs did.

The server puts at most BUCKETS points of each line into the component, with the smallest and largest value around each
point, and the browser draws them with uPlot (plot.js). So a run of 100,000 steps opens as quickly as one of 100, and no
answer of the server can be missed. Gradio's own gr.LinePlot was compared: it loads a plotting library of 0.9 MB, sends
all points to the browser, and gives a screen reader no values. So only the part "Compare runs", which is opened when it
is needed, uses it.
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from ui.html import duration, number, table
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
X = dict[str, np.ndarray]  # where points are, by axis: "step" and "time"
_made: dict[Path, tuple[float, dict[str, Any]]] = {}  # run's folder -> when (monotonic), its value


def value(shown: "view.View | None") -> dict[str, Any]:
    """What the script draws of a run: {"run", "revision": another text when anything is another, and what `lines_of` returns}.

    It is at most EVERY_S old while steps are added: nobody watches these lines by the second.
    """
    if shown is None or not shown.status.get("state"):
        return {"run": "", "revision": ""}
    folder, now_s = shown.folder, time.monotonic()
    made_s, known = _made.get(folder, (-math.inf, {"revision": ""}))
    if now_s - made_s < EVERY_S and shown.running:
        return known
    planned, found = shown.number("planned_steps") or 0.0, view.incidents(folder)

    def make(metrics: Metrics) -> dict[str, Any]:
        revision = f"{folder.name} {metrics.revision} {metrics.share:.2f} {planned} {len(found)}"
        if revision == known["revision"]:
            return known
        return {"run": folder.name, "revision": revision, **lines_of(metrics, planned, found)}

    made = view.with_metrics(folder, make)
    if len(_made) > view.READ_RUNS:
        _made.clear()
    _made[folder] = now_s, made
    return made


def lines_of(metrics: Metrics, planned: float, incidents: list["view.Incident"]) -> dict[str, Any]:
    """The lines of `metrics`, each over the steps and over the seconds since the first one.

    Returns:
        {"all": {axis: [from, to]}, "data": the same without the steps still to come, "lines": [{"key", "label", "unit",
        "name", "step", "time", "mean", "low", "high"}], "marks": [{"step", "time", "label", "incident"}], "table":
        markup, "share": how much of the file was read}; low and high are [] where every point is shown.
    """
    steps, began_s = metrics.steps, float(metrics.steps["t_s"][np.isfinite(metrics.steps["t_s"])][:1].sum())
    seconds = rising(steps["t_s"]) - began_s
    x = {
        "step": steps["step"],
        "time": seconds if np.isfinite(seconds).all() else steps["step"],
    }  # a file without times
    data = {axis: [float(at[0]), float(at[-1])] if len(at) else [0.0, 0.0] for axis, at in x.items()}
    held_out = [(step, *values) for step, values in sorted(metrics.validation.items())]
    held_step, held_t_s, held_loss = np.array(held_out, np.float64).reshape(-1, 3).T
    held_x = {"step": held_step, "time": rising(held_t_s) - began_s}
    lines: list[dict[str, Any]] = [
        {"key": key, "label": label, "unit": unit, **points(x, steps[key])} for key, (label, unit) in STEP_LINES.items()
    ]
    lines.insert(1, {"key": "val_loss", "label": "Validation loss", "unit": "", **points(held_x, held_loss)})
    for index, samples in sorted(metrics.gpus.items()):
        t = rising(samples["t_s"])
        at_step = np.interp(t - began_s, x["time"], x["step"]) if len(seconds) else np.full(len(t), math.nan)
        gpu_x = {"step": at_step, "time": t - began_s}
        name = f"{index}: {metrics.gpu_names[index]}" if len(metrics.gpus) > 1 else metrics.gpu_names[index]
        for key, (label, unit, divisor) in GPU_LINES.items():
            top = metrics.gpu_memory[index] / divisor if key == "memory_used" else math.nan
            more: dict[str, Any] = {"top": round(top, 1)} if math.isfinite(top) else {}
            line = {"key": key, "label": label, "unit": unit, "name": name, **more}
            lines.append({**line, **points(gpu_x, samples[key] / divisor)})
    return {
        "all": {**data, "step": [data["step"][0], max(data["step"][1], planned)]},
        "data": data,
        "lines": [line for line in lines if len(line["mean"]) > 1],
        "marks": marks(metrics, x, incidents),
        "table": table_of(metrics, x),
        "share": round(metrics.share, 2),
    }


def rising(t_s: np.ndarray) -> np.ndarray:
    """Times that never go back, as a changed clock would make them; a missing one is the one before it."""
    return np.maximum.accumulate(np.where(np.isfinite(t_s), t_s, -np.inf)) if len(t_s) else t_s


def points(x: X, y: np.ndarray, buckets: int = BUCKETS) -> dict[str, list[float]]:
    """At most `buckets` points of a line: {"step", "time", "mean", "low", "high"}.

    x must not fall. Each point is the mean of its bucket; low and high are the extremes, and [] where no bucket has two values.
    """
    kept = np.isfinite(y) & np.isfinite(x["step"]) & np.isfinite(x["time"])
    y, x = y[kept], {axis: at[kept] for axis, at in x.items()}
    if len(y) <= buckets:
        return {**{axis: rounded(at) for axis, at in x.items()}, "mean": rounded(y), "low": [], "high": []}
    starts = np.linspace(0, len(y), buckets, endpoint=False).astype(int)
    counts: np.ndarray = np.diff(np.append(starts, len(y)))
    return {
        **{axis: rounded(np.add.reduceat(at, starts) / counts) for axis, at in x.items()},
        "mean": rounded(np.add.reduceat(y, starts) / counts),
        "low": rounded(np.minimum.reduceat(y, starts)),
        "high": rounded(np.maximum.reduceat(y, starts)),
    }


def rounded(values: np.ndarray) -> list[float]:
    """Numbers with 7 significant digits, which no chart exceeds and which makes the answer a third as long."""
    return [float(f"{value:.7g}") for value in values.tolist()]


def marks(metrics: Metrics, x: X, incidents: list["view.Incident"]) -> list[dict[str, Any]]:
    """Each restart and each incident: {"step", "time", "label", "incident": its number or ""}."""

    def mark(step: int, label: str, incident: str = "") -> dict[str, Any]:
        at = float(np.interp(step, x["step"], x["time"])) if len(x["step"]) else float(step)
        return {"step": float(step), "time": at, "label": label, "incident": incident}

    out, known = [], set()
    for one in incidents:
        step = one.fields.get("step")
        if type(step) is not int or not 0 <= step <= FAR:
            continue
        known.add(one.fields.get("resumed_from"))
        kind = {"hang": "hung", "crash": "crashed"}.get(str(one.fields.get("kind")), "failed")
        out.append(mark(step, f"{kind} after step {step:,}", one.number))
    for step in metrics.restarts[-MOST_MARKS:]:
        if step - 1 not in known:
            out.append(mark(step, f"continued at step {step:,}"))
    return sorted(out, key=lambda one: one["step"])[-MOST_MARKS:]


def table_of(metrics: Metrics, x: X) -> str:
    """At most TABLE_ROWS steps, evenly spread, as markup."""
    steps, count = metrics.steps, len(x["step"])
    rows = np.unique(np.linspace(0, count - 1, TABLE_ROWS).astype(int)) if count else []
    cells = [
        (f"{steps['step'][n]:,.0f}", duration(x["time"][n]), *(number(steps[key][n]) for key in STEP_LINES))
        for n in rows
    ]
    return table("Values of the charts", ["Step", "Time", "Loss", "Learning rate", "Seconds a step"], cells)
