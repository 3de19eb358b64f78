"""The tab "Doctor": is this machine ready, what is left over, what does a process wait for, and is a script known to hang?

The lines are those of `./start.sh doctor`, from the same command. It runs in the background (ui/jobs.py), so the server
imports no torch, waits for no driver, and a reload shows what was found. The components are made when the tab is opened
and not with the page, so that they cost a visit nothing.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import gradio as gr

import doctor_tools
from runs.files import RunError
from runs.paths import data_root
from ui import jobs
from ui.html import duration, esc
from ui.run import drill, fold
from ui.run.fold import DRAWN, QUIET

FOLDER, JOB = ".doctor", "doctor"  # the folder, in the data folder, has what the command printed
QUICK_S, FULL_S, EXPLAIN_S = 600.0, 3600.0, 60.0
VERDICTS = {"ok": "OK", "note": "Warning", "failed": "Problem"}
CLASSES = {"ok": "done", "note": "warn", "failed": "bad"}
SHELLS = [("bash (Linux, macOS)", "train.sh"), ("batch (Windows)", "train.bat"), ("PowerShell (Windows)", "train.ps1")]
ABOUT_DRILL = (
    "It trains a toy model on example photos and freezes it in the middle. You see how the hang is detected, explained and "
    "ended, and how the run starts again and finishes. No run of yours is touched."
)


def _folder() -> Path:
    folder = data_root() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def examine(full: bool = False) -> None:
    """Look at the machine in the background; full: also start kohya's trainers as far as their help, up to half a minute each.

    Raises:
        RunError: it looks already, or cannot be started.
    """
    words = ["doctor", "--lines", *([] if full else ["--quick"])]
    jobs.start(_folder(), JOB, words, FULL_S if full else QUICK_S)


def findings() -> list[dict[str, str]]:
    """What the last examination has found so far: {"name", "status": ok, note or failed, "text", "action"}."""
    # jobs.output takes a last line that is JSON for the command's result; here each line is one.
    path = _folder() / jobs.FOLDER / f"{JOB}.out"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [found for line in lines if (found := _finding(line)) is not None]


def _finding(line: str) -> dict[str, str] | None:
    try:
        values = json.loads(line)
        status = values["status"] if values["status"] in VERDICTS else "note"
        return {**{key: str(values[key]) for key in ("name", "text", "action")}, "status": status}
    except (ValueError, KeyError, TypeError):
        return None


def report(found: list[dict[str, str]]) -> str:
    """The findings as a text to copy, without secrets."""
    lines = [f"{VERDICTS[one['status']]:<8} {one['name']}: {one['text']}" for one in found]
    actions = [f"\n{'':<8} → {one['action']}" if one["action"] else "" for one in found]
    return doctor_tools.without_secrets("\n".join(map("".join, zip(lines, actions, strict=True))))


def explain(pid: object) -> str:
    """What a process does and waits for, with the stack of every thread where it can be had, as markup. Takes about three seconds.

    Raises:
        RunError: no number, no such process, another user's, or no answer.
    """
    from monitor.cli.explain import checked
    from monitor.process.subjob import Subjob, python
    from monitor.run_folder import MonitorError

    try:
        process = checked(pid.strip() if isinstance(pid, str) else pid)
    except MonitorError as error:
        raise RunError(str(error)) from error
    job = Subjob(python("monitor", "diagnose", str(process.pid), "--json"), EXPLAIN_S)
    job.wait(time.sleep)
    answer = job.answer()
    if answer is None or "process" not in answer:
        raise RunError((job.error or "There is no answer").removeprefix("monitor: "))
    signals, stacks = answer.get("signals") or {}, answer.get("stacks") or {}
    parts = [f"<p>{esc(line)}</p>" for line in answer["process"]["lines"]]
    if signs := [*signals.get("stuck", ()), *signals.get("slow", ())]:
        parts.append(f'<p class="hp-verdict hp-warn">It looks stuck or slow: {esc("; ".join(signs))}.</p>')
    if not stacks:
        note = "Its stacks could not be read in time. Try again when the machine is less busy."
        parts.append(f'<p class="hp-hint">{note}</p>')
    if cause := answer.get("explanation"):
        text = f"If it is a training: {cause} {answer.get('advice') or ''}"
        parts.append(f'<p class="hp-hint">{esc(text)}</p>')
    for one, text in stacks.items():
        title = f"Stacks of process {one}"
        parts.append(f"<h4>{esc(title)}</h4>{_printed(title, str(text)[:20_000])}")
    return "".join(parts)


# What is shown --------------------------------------------------------------------------------------------------------------


def build(tab: gr.Tab) -> None:
    """Build what the tab shows each time that it is opened."""

    @gr.render(triggers=[tab.select], **DRAWN)
    def _opened() -> None:
        for name, title, about, part in PARTS:
            with gr.Column(elem_id=f"doctor-{name}", elem_classes="hp-section hp-doctor-part"):
                _html(f"<h3>{title}<span>{about}</span></h3>")
                part()


def _html(text: str = "", **more: Any) -> gr.HTML:
    return gr.HTML(text, apply_default_css=False, **more)


def _button(label: str, primary: bool = False, width: int = 150, **more: Any) -> gr.Button:
    return gr.Button(label, variant="primary" if primary else "secondary", scale=0, min_width=width, **more)


def _listed(status: str, title: str, text: str, action: str) -> str:
    mark = f'<span class="hp-finding-mark">{VERDICTS[status]}</span>'
    more = f"<p>{esc(action)}</p>" if action else ""
    return (
        f'<li class="hp-finding hp-{CLASSES[status]}" data-status="{status}">{mark}'
        f"<div><strong>{esc(title)}</strong><span>{esc(text)}</span>{more}</div></li>"
    )


def _list(items: list[str]) -> str:
    return f'<ul class="hp-findings-list">{"".join(items)}</ul>' if items else ""


def _printed(label: str, text: str) -> str:
    """A text that scrolls, and that the keyboard reaches."""
    return f'<pre class="hp-doctor-text" role="region" tabindex="0" aria-label="{esc(label)}">{esc(text)}</pre>'


def _title(name: str) -> str:
    """The name of a finding with a capital; a trainer's own name, such as sd-scripts, stays as it is."""
    return name[:1].upper() + name[1:] if re.match(r"built-in |[a-z]+( |$)", name) else name


def _state(job: jobs.Job, found: list[dict[str, str]]) -> str:
    """What an examination does, or how much it found, in one line."""
    if job.state == "running":
        return f"Looking for {duration(round(job.seconds))}…"
    count = {status: sum(one["status"] == status for one in found) for status in VERDICTS}
    return f"{count['ok']} OK · warnings: {count['note']} · problems: {count['failed']}" if found else ""


def look() -> tuple[bool, str]:
    """(whether an examination runs, what it has found as markup)."""
    job, found = jobs.read(_folder(), JOB), findings()
    if job is None:
        return False, ""
    busy, problem = job.state == "running", ""
    if job.state == "failed" and not any(one["status"] == "failed" for one in found):
        problem = jobs.reason(_folder(), JOB)
    items = [_listed(one["status"], _title(one["name"]), one["text"], one["action"]) for one in found]
    copied = f'<label id="doctor-report">Report to copy<textarea class="hp-doctor-text" rows="6" readonly>{esc(report(found))}</textarea></label>'
    return busy, fold.note(_state(job, found)) + fold.note(problem, True) + _list(items) + (
        copied if items and not busy else ""
    )


def _machine() -> None:
    if jobs.read(_folder(), JOB) is None:
        examine()
    full = gr.Checkbox(label="Also start the trainers (half a minute each)", interactive=True)
    followed = fold.Jobs()
    followed.add(
        _button("Look again", primary=True), examine, look, lambda: jobs.cancel(_folder(), JOB), "doctor", [full]
    )
    followed.follow()


def _left() -> list[tuple[str, str]]:
    """(label, value) of each trainer that is left over."""
    return [
        (
            f"{one['name']}, process {one['pid']}: run {one['run']}, {duration(one['age_s'])} old, "
            f"{one['memory_bytes'] / 1e6:.0f} MB of memory",
            json.dumps([one["pid"], one["start"]]),
        )
        for one in doctor_tools.orphans()
    ]


def _left_over() -> None:
    def draw(said: str = "") -> list[Any]:
        choices = _left()
        there = gr.update(visible=bool(choices))
        text = said if choices else f"{said} None. Every trainer that runs is watched."
        radio = gr.update(choices=choices, value=None, visible=bool(choices))
        return [radio, there, gr.update(visible=False), fold.note(text.strip())]

    def ask(value: str | None) -> list[Any]:
        return [gr.update(visible=bool(value)), fold.note("" if value else "Choose a process first.")]

    def kill(value: str) -> list[Any]:
        try:
            return draw(f"{doctor_tools.end_orphan(*json.loads(value))}.")
        except RunError as error:
            return draw(f"{error}.")

    choices = _left()
    chosen = gr.Radio(choices, label="Process to end", visible=bool(choices), interactive=True)
    with gr.Row(elem_classes="hp-actions"):
        again, end = _button("Look again"), _button("End the process", visible=bool(choices))
        sure = _button(
            "End it now? Steps since its last checkpoint are lost", width=420, visible=False, elem_classes="hp-danger"
        )
    outputs = [chosen, end, sure, _html(draw()[-1])]
    again.click(draw, None, outputs, **QUIET)
    end.click(ask, chosen, outputs[2:], **QUIET)
    sure.click(kill, chosen, outputs, **QUIET)


def _explain() -> None:
    pid = gr.Textbox(
        label="Process number (pid)",
        info="As nvidia-smi, top or ps shows it",
        max_lines=1,
        max_length=20,
        interactive=True,
    )
    with gr.Row(elem_classes="hp-actions"):
        go = _button("Explain", primary=True)
    shown = _html()

    def on_go(number: str) -> Any:
        yield '<p class="hp-hint" role="status">Looking twice, two seconds apart…</p>'
        try:
            yield explain(number)
        except RunError as error:
            yield fold.note(f"{error}.", True)

    gr.on([go.click, pid.submit], on_go, pid, shown, **QUIET)


def _lint() -> None:
    text = gr.Textbox(
        label="Script", info="It is read, not run. Nothing is stored.", placeholder="accelerate launch … flux_train_network.py …",
        lines=8, max_lines=20, interactive=True,
    )  # fmt: skip
    kind = gr.Dropdown(SHELLS, value="train.sh", label="Shell", interactive=True)
    with gr.Row(elem_classes="hp-actions"):
        go = _button("Check the script", primary=True)
    shown = _html()
    fixed = gr.Textbox(
        label="The script with these fixes", lines=8, max_lines=30, buttons=["copy"], visible=False, interactive=False,
        elem_id="doctor-fixed",
    )  # fmt: skip

    def on_go(script: str, name: str) -> list[Any]:
        try:
            found = doctor_tools.lint_script(script, name)
        except RunError as error:
            return [fold.note(f"{error}.", True), gr.update(visible=False)]
        items = [
            _listed(
                "failed" if one["level"] == "error" else "note",
                f"Line {one['line']}: {one['id']}",
                one["why"],
                one["fix"],
            )
            for one in found["findings"]
        ]
        note = f'<p class="hp-hint">{esc(found["note"])}</p>' if found["note"] else ""
        none = '<p class="hp-verdict hp-done">No problems found.</p>'
        return [(_list(items) or none) + note, gr.update(visible=bool(found["fixed"]), value=found["fixed"])]

    go.click(on_go, [text, kind], [shown, fixed], **QUIET)


def _drill() -> None:
    _html(f'<p class="hp-hint">{ABOUT_DRILL}</p>')
    followed = fold.Jobs()
    followed.add(_button("Start the drill", primary=True), drill.start, drill.look, drill.cancel, "drill")
    followed.follow()


PARTS = (
    ("machine", "This machine", "Python, PyTorch, GPU, disks, memory and the trainers", _machine),
    ("orphans", "Left-over trainers", "Trainers of Hangproof that no monitor watches any more", _left_over),
    (
        "explain",
        "Explain a process",
        "What a process of yours does, what it waits for, and the stack of every thread",
        _explain,
    ),
    (
        "lint",
        "Check a training script",
        "Finds what is known to hang or fail in scripts of kohya's trainers, kohya_ss and FluxGym",
        _lint,
    ),
    ("drill", "Hang drill", "Watch a demo run freeze and recover, in about a minute", _drill),
)
