"""Two to six runs side by side: the settings that differ, their losses, their last samples, time, memory and cost."""

import json
import math
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from runs.evolution import Sample
from runs.files import RunError
from ui.dataset.images import file_url
from ui.html import duration, esc, number, per_step
from ui.new import form
from ui.run import calls, cards, fold, view
from ui.run.charts import points
from ui.run.fold import QUIET
from ui.run.metrics import Metrics
from ui.run.samples import GALLERY, sent

FEWEST, MOST = 2, 6
LISTED = 500
MOST_UPDATES = 40  # parts of a long metrics.jsonl
MOST_TEXT = 300  # characters of a setting
MOST_PROMPTS = 12
# Of run.toml: what names a run, what may hold a secret, and what is the same as another line.
LEFT_OUT = ("name", "environment", "prompts", "version", "created")


def compare(names: list[str]) -> dict[str, Any]:
    """Two to six runs side by side, by the names of their folders.

    Returns:
        {"runs": [{"run", "name"}], "facts": [[label, value of each run]], "settings": [[name, value of each run]],
        "lines": [{"name", "x", "mean", "low", "high"}],
        "samples": [{"prompt", "images": [{"url", "at"} or None for each run]}]}.

    Raises:
        RunError: too few or too many runs, or one that does not exist.
    """
    if not FEWEST <= len(set(names)) <= MOST:
        raise RunError(f"Choose {FEWEST} to {MOST} runs.")
    views = [view.read(calls.folder_of(name)) for name in dict.fromkeys(names)]
    return {
        "runs": [{"run": one.folder.name, "name": one.name} for one in views],
        "facts": facts(views),
        "settings": differences([settings(one) for one in views]),
        "lines": [{"name": one.name, **_line(one.folder)} for one in views],
        "samples": samples(views),
    }


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


def last_samples(views: list["view.View"]) -> list[tuple[str, list[Sample | None]]]:
    """(prompt, the last sample of each run or None) of each prompt that at least two runs have."""
    last = [{prompt: row[-1] for prompt, row in view.samples(one.folder).rows if row} for one in views]
    rows = [(prompt, [one.get(prompt) for one in last]) for prompt in dict.fromkeys(p for one in last for p in one)]
    return [(prompt, row) for prompt, row in rows if sum(one is not None for one in row) >= FEWEST][:MOST_PROMPTS]


def samples(views: list["view.View"]) -> list[dict[str, Any]]:
    """`last_samples` as plain values: {"prompt", "images": [{"url", "at"} or None]}."""
    return [
        {"prompt": prompt, "images": [one and {"url": file_url(one.path), "at": one.at} for one in row]}
        for prompt, row in last_samples(views)
    ]


# The part of the page -------------------------------------------------------------------------------------------------


def build(selected: gr.State) -> None:
    """Build the part; `selected` has the name of the run."""
    fold.build("Compare runs", "compare-fold", selected, _draw)


def _draw(folder: Path) -> None:
    name = folder.name
    everything = [one for one in view.read_all() if one.status.get("state")]
    chosen = gr.Dropdown(
        [(f"{one.name} ({cards.describe_run(one)[1]})", one.folder.name) for one in everything[:LISTED]],
        value=[name] if name in (one.folder.name for one in everything) else [],
        multiselect=True,
        max_choices=MOST,
        label="Runs to compare",
        info=f"{FEWEST} to {MOST}; type to search",
        interactive=True,
        elem_id="compare-runs",
    )
    tables = gr.HTML(elem_id="compare-tables", apply_default_css=False)
    losses = gr.LinePlot(
        x="step", y="loss", color="run", title="Loss of the runs", height=280, visible=False, elem_id="compare-loss"
    )
    pictures = gr.Gallery(visible=False, elem_id="compare-samples", object_fit="contain", **GALLERY)

    def on_choice(names: list[str]) -> list[Any]:
        try:
            found = compare(names or [])
            return [_tables(found), _plot(found), _pictures(names)]
        except RunError as error:
            return [f'<p class="hp-say">{esc(error)}</p>', gr.update(visible=False), gr.update(visible=False)]

    chosen.input(on_choice, chosen, [tables, losses, pictures], trigger_mode="always_last", **QUIET)


def _tables(found: dict[str, Any]) -> str:
    names = "".join(f"<th scope='col'>{esc(one['name'])}</th>" for one in found["runs"])
    parts = []
    for title, rows in (("Result", found["facts"]), ("Settings that differ", found["settings"])):
        lines = "".join(
            f"<tr><th scope='row'>{esc(label)}</th>{''.join(f'<td>{esc(value)}</td>' for value in values)}</tr>"
            for label, *values in rows
        )
        table = f"<table><thead><tr><td></td>{names}</tr></thead><tbody>{lines}</tbody></table>"
        none = '<p class="hp-none">All settings are the same.</p>'
        parts.append(
            f'<h4>{title}</h4><div class="hp-table-scroll" role="region" tabindex="0" aria-label="{title}">{table}</div>'
            if rows
            else f"<h4>{title}</h4>{none}"
        )
    return "".join(parts)


def _plot(found: dict[str, Any]) -> Any:
    import pandas  # type: ignore[import-untyped]

    rows = [
        (line["name"], x, y)
        for line in found["lines"]
        for x, y in zip(line["x"], line["mean"], strict=True)
        if y is not None
    ]
    return gr.update(visible=bool(rows), value=pandas.DataFrame(rows, columns=["run", "step", "loss"]))


def _pictures(names: list[str]) -> Any:
    views = [view.read(calls.folder_of(name)) for name in dict.fromkeys(names)]
    shown = [
        (path, f"{one.name}, {image.at}: {prompt}")
        for prompt, row in last_samples(views)
        for one, image in zip(views, row, strict=True)
        if image is not None and (path := sent(image.path))
    ]
    return gr.update(visible=bool(shown), value=shown, columns=len(views))
