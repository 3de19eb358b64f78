"""The charts of a run: loss and learning rate as one line across restarts, seconds a step, and what the GPUs did.

The server sends at most BUCKETS points of each line, with the smallest and largest value around each point, and the
browser draws them with uPlot (plot.js). So a run of 100,000 steps opens as quickly as one of 100, and zooming in asks
for the points of that range. Gradio's own gr.LinePlot was compared: it loads a plotting library of 0.9 MB, sends all
points to the browser, and gives a screen reader no values. So only the part "Compare runs", which is opened when it is
needed, uses it.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runs.files import RunError
from ui import scripts
from ui.dataset.images import OUT_OF_DATE
from ui.html import duration, number, table
from ui.run import calls, view
from ui.run.metrics import Metrics

if TYPE_CHECKING:
    import gradio as gr

BUCKETS = 300
TABLE_ROWS = 20
FAR = 1e12
AXES = ("step", "time")
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


def value(shown: "view.View | None") -> dict[str, Any]:
    """What the script gets each second: the run, and a text that changes when there are other values."""
    if shown is None or not shown.status.get("state"):
        return {"run": "", "revision": "", "share": 1.0}
    revision, share = view.with_metrics(shown.folder, lambda found: (found.revision, round(found.share, 2)))
    return {"run": shown.folder.name, "revision": revision, "share": share}


def chart_data(data: object) -> dict[str, Any]:
    """Call of the page's script for the run that `data` names: {"ok": True, …} as `lines_of`, or {"ok": False, "error"}."""
    try:
        if not isinstance(data, dict):
            raise RunError(OUT_OF_DATE)
        low, high = (_number(data.get(key)) for key in ("from", "to"))
        return {"ok": True, **lines_of_run(calls.folder_of(data.get("run")), data.get("axis", "step"), low, high)}
    except RunError as error:
        return {"ok": False, "error": str(error)}


def _number(value: object) -> float | None:
    """A number that the browser sent, or None. RunError: anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -FAR <= value <= FAR:
        raise RunError(OUT_OF_DATE)
    return float(value)


def lines_of_run(folder: Path, axis: object, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """The lines of a run, as `lines_of`. RunError: axis is none of AXES."""
    if axis not in AXES:
        raise RunError(f"axis: use one of {', '.join(AXES)}")
    found, planned = view.incidents(folder), view.read(folder).number("planned_steps") or 0.0
    return view.with_metrics(folder, lambda metrics: lines_of(metrics, str(axis), low, high, planned, found))


def lines_of(
    metrics: Metrics, axis: str, low: float | None, high: float | None, planned: float, incidents: list["view.Incident"]
) -> dict[str, Any]:
    """The lines of `metrics`.

    Args:
        axis: "step" or "time". low, high: the range in steps or seconds, None for all.

    Returns:
        {"revision", "axis", "range": [from, to], "all": [from, to], "data": those with values, "lines": [{"key", "label",
        "unit", "x", "mean", "low", "high"}], "marks": [{"x", "label", "incident"}], "table": markup}; low and high are []
        where every point is shown.
    """
    steps, began_s = metrics.steps, _began(metrics)
    x = steps["step"] if axis == "step" else rising(steps["t_s"]) - began_s
    x = x if len(x) == 0 or math.isfinite(x[0]) else steps["step"]  # without times, steps are the only axis
    last = float(x[-1]) if len(x) else 0.0
    everything = [float(x[0]) if len(x) else 0.0, max(last, planned) if axis == "step" else last]
    begin, end = (everything[0] if low is None else low), (everything[1] if high is None else high)
    end = max(end, begin)
    lines: list[dict[str, Any]] = [
        {"key": key, "label": label, "unit": unit, **points(x, steps[key], begin, end)}
        for key, (label, unit) in STEP_LINES.items()
    ]
    held_out = metrics.validation()
    held_x = held_out["step"] if axis == "step" else rising(held_out["t_s"]) - began_s
    shown = points(held_x, held_out["val_loss"], begin, end)
    lines.insert(1, {"key": "val_loss", "label": "Validation loss", "unit": "", **shown})
    for index, samples in sorted(metrics.gpus.items()):
        t = rising(samples["t_s"])
        gpu_x = t - began_s if axis == "time" else _steps_at(t, metrics)
        name = f"{index}: {metrics.gpu_names[index]}" if len(metrics.gpus) > 1 else metrics.gpu_names[index]
        for key, (label, unit, divisor) in GPU_LINES.items():
            shown = points(gpu_x, samples[key] / divisor, begin, end)
            top = metrics.gpu_memory[index] / divisor if key == "memory_used" else math.nan
            more: dict[str, Any] = {"top": round(top, 1)} if math.isfinite(top) else {}
            lines.append({"key": key, "label": label, "unit": unit, "name": name, **shown, **more})
    return {
        "revision": metrics.revision,
        "axis": axis,
        "range": [begin, end],
        "all": everything,
        "data": [max(begin, everything[0]), min(end, last)],
        "lines": [line for line in lines if len(line["x"]) > 1],
        "marks": marks(metrics, axis, x, incidents),
        "table": table_of(metrics, x, begin, end),
        "share": round(metrics.share, 2),
    }


def _began(metrics: Metrics) -> float:
    known = metrics.steps["t_s"]
    finite = known[np.isfinite(known)]
    return float(finite[0]) if len(finite) else 0.0


def rising(t_s: np.ndarray) -> np.ndarray:
    """Times that never go back, as a changed clock would make them; a missing one is the one before it."""
    return np.maximum.accumulate(np.where(np.isfinite(t_s), t_s, -np.inf)) if len(t_s) else t_s


def _steps_at(t_s: np.ndarray, metrics: Metrics) -> np.ndarray:
    """The step that was trained at each time; NaN while steps were trained that a restart repeated."""
    known = rising(metrics.steps["t_s"])
    if len(known) == 0 or not math.isfinite(known[0]):
        return np.full(len(t_s), math.nan)
    found = np.interp(t_s, known, metrics.steps["step"])
    for restart in metrics.restarts:
        after = int(np.searchsorted(metrics.steps["step"], restart.step))
        if 0 < after < len(known):
            found[(t_s > known[after - 1]) & (t_s < known[after])] = math.nan
    return found


def points(x: np.ndarray, y: np.ndarray, begin: float, end: float, buckets: int = BUCKETS) -> dict[str, list[float]]:
    """At most `buckets` points of a line within a range: {"x", "mean", "low", "high"}.

    x must not fall. Each point is the mean of its bucket; low and high are the extremes, and [] where no bucket has two values.
    """
    first, last = np.searchsorted(x, begin, "left"), np.searchsorted(x, end, "right")
    x, y = x[first:last], y[first:last]
    kept = np.isfinite(y) & np.isfinite(x)
    x, y = x[kept], y[kept]
    if len(x) <= buckets:
        return {"x": rounded(x), "mean": rounded(y), "low": [], "high": []}
    starts = np.unique(np.searchsorted(x, np.linspace(begin, end, buckets, endpoint=False)))
    starts = starts[starts < len(x)]
    counts: np.ndarray = np.diff(np.append(starts, len(x)))
    return {
        "x": rounded(np.add.reduceat(x, starts) / counts),
        "mean": rounded(np.add.reduceat(y, starts) / counts),
        "low": rounded(np.minimum.reduceat(y, starts)),
        "high": rounded(np.maximum.reduceat(y, starts)),
    }


def rounded(values: np.ndarray) -> list[float]:
    """Numbers with 7 significant digits, which no chart exceeds and which makes the answer a third as long."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        power = 10.0 ** (6 - np.floor(np.log10(np.abs(values))))
        short = np.round(values * power) / power
    return np.where(np.isfinite(short), short, values).tolist()


def marks(metrics: Metrics, axis: str, x: np.ndarray, incidents: list["view.Incident"]) -> list[dict[str, Any]]:
    """Each restart and each incident on the axis: {"x", "label", "incident": its number or ""}."""
    steps = metrics.steps["step"]

    def at(step: float) -> float:
        if axis == "step" or not len(steps):
            return float(step)
        return float(np.interp(step, steps, x))

    out: list[dict[str, Any]] = []
    known = set()
    for one in incidents:
        step = one.fields.get("step")
        if type(step) is not int or not 0 <= step <= FAR:
            continue
        known.add(one.fields.get("resumed_from"))
        kind = {"hang": "hung", "crash": "crashed"}.get(str(one.fields.get("kind")), "failed")
        out.append({"x": at(step), "label": f"{kind} after step {step:,}", "incident": one.number})
    for restart in metrics.restarts:
        if restart.step - 1 not in known:
            out.append({"x": at(restart.step), "label": f"continued at step {restart.step:,}", "incident": ""})
    return sorted(out, key=lambda mark: mark["x"])[-MOST_MARKS:]


def table_of(metrics: Metrics, x: np.ndarray, begin: float, end: float) -> str:
    """At most TABLE_ROWS steps of the range, evenly spread, as markup."""
    first, last = int(np.searchsorted(x, begin, "left")), int(np.searchsorted(x, end, "right"))
    rows = np.unique(np.linspace(first, last - 1, TABLE_ROWS).astype(int)) if first < last else []
    seconds, steps = rising(metrics.steps["t_s"]) - _began(metrics), metrics.steps
    cells = [
        (f"{steps['step'][n]:,.0f}", duration(seconds[n]), *(number(steps[key][n]) for key in STEP_LINES)) for n in rows
    ]
    return table("Values of the charts", ["Step", "Time", "Loss", "Learning rate", "Seconds a step"], cells)


def build() -> "gr.HTML":
    """The component; its value is that of `value`."""
    return scripts.component("charts", "run-charts", chart_data)
