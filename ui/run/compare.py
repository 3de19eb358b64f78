"""Two to six runs side by side: the settings that differ, their losses, their last samples, time, memory and cost."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runs.files import RunError
from ui import scripts
from ui.dataset.images import OUT_OF_DATE, file_url
from ui.html import duration, number, per_step
from ui.new import form
from ui.run import calls, cards, view
from ui.run.charts import points
from ui.run.metrics import Metrics

if TYPE_CHECKING:
    import gradio as gr

FEWEST, MOST = 2, 6
LISTED = 500
MOST_UPDATES = 40  # parts of a long metrics.jsonl
MOST_TEXT = 300  # characters of a setting
MOST_PROMPTS = 12
# Of run.toml: what names a run, what may hold a secret, and what is the same as another line.
LEFT_OUT = ("name", "environment", "prompts", "version", "created")


def value(shown: "view.View | None") -> dict[str, Any]:
    """What the script gets each second: the selected run."""
    return {"run": shown.folder.name if shown is not None and shown.status.get("state") else ""}


def compare_list(data: dict[str, Any]) -> dict[str, Any]:
    """The runs that can be compared with the one of `data`, newest first: {"ok", "runs": [{"run", "name", "state"}]}."""

    def action(folder: Path, _data: dict[str, Any]) -> dict[str, Any]:
        everything = [one for one in view.read_all() if one.status.get("state")]
        listed = [{"run": one.folder.name, "name": one.name, "state": cards.describe_run(one)[1]} for one in everything]
        return {"runs": listed[:LISTED]}

    return calls.answer(action, data)


def compare_runs(data: dict[str, Any]) -> dict[str, Any]:
    """Two to six runs side by side.

    Args:
        data: {"run": one of them, "runs": the folder names of all}.

    Returns:
        {"ok", "runs": [{"run", "name"}], "facts": [[label, value of each run]], "settings": [[name, value of each run]],
        "lines": [{"name", "x", "mean", "low", "high"}], "range": [from, to],
        "samples": [{"prompt", "images": [{"url", "at"} or None for each run]}]}.
    """

    def action(_folder: Path, data: dict[str, Any]) -> dict[str, Any]:
        names = data.get("runs")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RunError(OUT_OF_DATE)
        if not FEWEST <= len(set(names)) <= MOST:
            raise RunError(f"Choose {FEWEST} to {MOST} runs.")
        views = [view.read(calls.folder_of(name)) for name in dict.fromkeys(names)]
        lines: list[dict[str, Any]] = [{"name": one.name, **_line(one.folder)} for one in views]
        ends = [line["x"][-1] for line in lines if line["x"]]
        return {
            "runs": [{"run": one.folder.name, "name": one.name} for one in views],
            "facts": facts(views),
            "settings": differences([settings(one) for one in views]),
            "lines": lines,
            "range": [min((line["x"][0] for line in lines if line["x"]), default=0), max(ends, default=0)],
            "samples": samples(views),
        }

    return calls.answer(action, data)


def _line(folder: Path) -> dict[str, list[float]]:
    def read(metrics: Metrics) -> dict[str, list[float]]:
        x = metrics.steps["step"]
        return points(x, metrics.steps["loss"], float(x[0]) if len(x) else 0.0, float(x[-1]) if len(x) else 0.0, 200)

    for _ in range(MOST_UPDATES):
        if view.with_metrics(folder, lambda metrics: metrics.share) >= 1:
            break
    return view.with_metrics(folder, read)


def settings(one: "view.View") -> dict[str, str]:
    """The settings of a run as text, by name; those of `extra` with the trainer's own names."""
    spec = {**{key: v for key, v in one.spec.items() if key != "extra"}, **(one.spec.get("extra") or {})}
    return {key: _text(v)[:MOST_TEXT] for key, v in spec.items() if key not in LEFT_OUT}


def _text(found: Any) -> str:
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, float):
        return f"{found:g}"
    if isinstance(found, str | int):
        return str(found)
    return json.dumps(found, ensure_ascii=False, default=str)


def differences(found: list[dict[str, str]]) -> list[list[str]]:
    """[name, value of each run] of the settings that are not the same in all; "–" where a run does not set it."""
    names = dict.fromkeys(key for one in found for key in one)
    rows = [[form.LABELS.get(name, name), *(one.get(name, "–") for one in found)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def facts(views: list["view.View"]) -> list[list[str]]:
    """[label, value of each run]: state, steps, loss, time, speed, memory, restarts, cost."""
    rows: list[list[str]] = [
        ["State"],
        ["Steps"],
        ["Last loss"],
        ["Time"],
        ["Speed"],
        ["Peak GPU memory"],
        ["Restarts"],
        ["Cost"],
    ]
    for one in views:
        ledger = view.ledger(one)
        peak = view.with_metrics(one.folder, peak_memory)
        values = [
            cards.describe_run(one)[1],
            f"{int(one.number('step') or 0):,} of {int(one.number('planned_steps') or 0):,}",
            number(one.number("loss"), 3),
            duration(ledger.wall_s),
            per_step(one.number("step_s")),
            f"{peak / 1e9:.1f} GB" if peak else "–",
            f"{int(one.number('restarts') or 0)}",
            f"{ledger.cost:,.2f}" if ledger.cost is not None else "–",
        ]
        for row, text in zip(rows, values, strict=True):
            row.append(text)
    return rows


def peak_memory(metrics: Metrics) -> float:
    """The most memory in bytes that a GPU had in use in any sample; 0 without samples."""
    peaks = [float(np.nanmax(t["memory_used"])) for t in metrics.gpus.values() if np.isfinite(t["memory_used"]).any()]
    return max((peak for peak in peaks if math.isfinite(peak)), default=0.0)


def samples(views: list["view.View"]) -> list[dict[str, Any]]:
    """The last sample of each prompt that at least two runs have: {"prompt", "images": [{"url", "at"} or None]}."""
    last = [{prompt: row[-1] for prompt, row in view.samples(one.folder).rows if row} for one in views]
    out = []
    for prompt in dict.fromkeys(prompt for one in last for prompt in one):
        images = [one.get(prompt) for one in last]
        if sum(image is not None for image in images) >= FEWEST:
            shown = [None if image is None else {"url": file_url(image.path), "at": image.at} for image in images]
            out.append({"prompt": prompt, "images": shown})
    return out[:MOST_PROMPTS]


def build() -> "gr.HTML":
    """The component; its value is that of `value`."""
    return scripts.component("compare", "run-compare", compare_list, compare_runs)
