"""Two to six runs side by side: the settings that differ, their losses, their last samples, time, memory and cost."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from monitor.ledger import Ledger
from runs.files import RunError
from ui.html import duration, esc, number, per_step, table
from ui.new import form
from ui.run import cards, view
from ui.run.charts import points
from ui.run.fold import QUIET
from ui.run.metrics import Metrics
from ui.run.samples import GALLERY, prompts, sent

FEWEST, MOST = 2, 6
LISTED = 500
MOST_TEXT = 300  # characters of a setting
MOST_PROMPTS = 12
MOST_POINTS = 200
# Of run.toml: what names a run, what may hold a secret, and what is the same as another line.
LEFT_OUT = ("name", "environment", "prompts", "version", "created")


def chosen_runs(names: list[str]) -> list["view.View"]:
    """Two to six runs by the names of their folders. RunError: too few or too many runs, or one that does not exist."""
    if not FEWEST <= len(set(names)) <= MOST:
        raise RunError(f"Choose {FEWEST} to {MOST} runs.")
    return told_apart([view.read(view.folder_of(name)) for name in dict.fromkeys(names)])


def told_apart(views: list["view.View"]) -> list["view.View"]:
    """The runs, each with a name of its own: a label can be given twice, and the folder's name follows it then."""
    seen = Counter(one.name for one in views)
    return [one if seen[one.name] == 1 else replace(one, name=f"{one.name} ({one.folder.name})") for one in views]


def losses(one: "view.View") -> list[tuple[str, float, float]]:
    """(name of the run, step, loss) of at most MOST_POINTS steps."""
    found = view.with_metrics(one.folder, lambda its: points(its.steps["step"], its.steps["loss"], MOST_POINTS))
    return [(one.name, step, loss) for step, loss in zip(found["x"], found["mean"], strict=True)]


def settings(one: "view.View") -> dict[str, str]:
    """The settings of a run as text, by label; those of `extra` with the trainer's own names."""
    extra = one.spec.get("extra")
    spec = {key: v for key, v in one.spec.items() if key != "extra"} | (extra if isinstance(extra, dict) else {})
    return {form.LABELS.get(key, key): _text(v)[:MOST_TEXT] for key, v in spec.items() if key not in LEFT_OUT}


def _text(found: Any) -> str:
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


def facts(one: "view.View") -> dict[str, str]:
    """What came out of a run."""
    ledger = Ledger.of(one.status)
    peak = view.with_metrics(one.folder, peak_memory)
    return {
        "State": cards.describe(one)[1],
        "Steps": cards.steps(one) or "–",
        "Last loss": number(one.number("loss"), 3),
        "Time": duration(ledger.wall_s or one.number("elapsed_s") or 0.0),  # an earlier version kept no ledger
        "Speed": per_step(one.number("step_s")),
        "Peak GPU memory": f"{peak / 1e9:.1f} GB" if peak else "–",
        "Restarts": f"{one.number('restarts') or 0:.0f}",
        "Cost": f"{ledger.cost:,.2f}" if ledger.cost is not None else "–",
    }


def rows(found: list[dict[str, str]]) -> list[list[str]]:
    """[name, value of each run] for all names; "–" where a run has none."""
    names = dict.fromkeys(name for one in found for name in one)
    return [[name, *(one.get(name, "–") for one in found)] for name in names]


def peak_memory(metrics: Metrics) -> float:
    """The most memory in bytes that a GPU had in use in any sample; 0 without samples."""
    return float(np.nanmax(np.concatenate([[0.0], *(gpu["memory_used"] for gpu in metrics.gpus.values())])))


def samples(views: list["view.View"]) -> list[tuple[str, str]]:
    """(path, caption), prompt by prompt, of the last sample of each run, for prompts that at least two runs have."""
    last = []
    for one in views:
        found = view.evolution(one.folder)
        texts = prompts(found)
        last.append({texts[each.prompt]: each for step in found.snapshots for each in step.samples})
    shared = [p for p in dict.fromkeys(p for one in last for p in one) if sum(p in one for one in last) >= FEWEST]
    return [
        (path, f"{one.name}, {drawn[prompt].at}: {prompt}")
        for prompt in shared[:MOST_PROMPTS]
        for one, drawn in zip(views, last, strict=True)
        if prompt in drawn and (path := sent(drawn[prompt].path))
    ]


# The part of the page -------------------------------------------------------------------------------------------------


def known() -> list[tuple[str, str]]:
    """(label, folder's name) of each run that has started."""
    started = told_apart([one for one in view.read_all() if one.status.get("state")])
    return [(f"{one.name} ({cards.describe(one)[1]})", one.folder.name) for one in started[:LISTED]]


def draw(folder: Path) -> None:
    """Make the components of the part."""
    choices = known()
    chosen = gr.Dropdown(
        choices,
        value=[folder.name] if folder.name in (name for _, name in choices) else [],
        multiselect=True,
        max_choices=MOST,
        label="Runs to compare",
        info=f"{FEWEST} to {MOST}; type to search",
        interactive=True,
        elem_id="compare-runs",
    )
    shown = gr.HTML(elem_id="compare-tables", apply_default_css=False)
    plot = gr.LinePlot(x="step", y="loss", color="run", title="Loss", height=280, visible=False, elem_id="compare-loss")
    pictures = gr.Gallery(visible=False, elem_id="compare-samples", object_fit="contain", **GALLERY)

    def on_choice(names: list[str]) -> list[Any]:
        import pandas  # type: ignore[import-untyped]

        try:
            views = chosen_runs(names or [])
        except RunError as error:
            return [f'<p class="hp-say">{esc(error)}</p>', gr.update(visible=False), gr.update(visible=False)]
        points, drawn = [point for one in views for point in losses(one)], samples(views)
        plot = pandas.DataFrame(points, columns=["run", "step", "loss"])
        return [
            tables(views),
            gr.update(visible=bool(points), value=plot),
            gr.update(visible=bool(drawn), value=drawn, columns=len(views)),
        ]

    chosen.focus(lambda: gr.update(choices=known()), None, chosen, **QUIET)
    chosen.input(on_choice, chosen, [shown, plot, pictures], trigger_mode="always_last", **QUIET)


def tables(views: list["view.View"]) -> str:
    """The figures and the settings that differ, as markup."""
    none, heads = '<p class="hp-none">All settings are the same.</p>', ["", *(one.name for one in views)]
    differ = [row for row in rows([settings(one) for one in views]) if len(set(row[1:])) > 1]
    parts = (("Result", rows([facts(one) for one in views])), ("Settings that differ", differ))
    return "".join(f"<h4>{title}</h4>{table(title, heads, found) or none}" for title, found in parts)
