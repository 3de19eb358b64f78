"""The run page as HTML: pure functions from a view to markup.

Words first: a state is said in a sentence with what to do, numbers come after. Everything from a file goes through
`esc` or `markdown`.
"""

from pathlib import Path

from ui.chart import chart
from ui.html import duration, esc, markdown, number, per_step
from ui.images import file_url
from ui.view import FINAL, Incident, View

# State: (colour class, what it is called, what it means or what to do). The monitor's own message is shown with it.
STATES = {
    "new": ("idle", "Not started", "Press Start to train it."),
    "queued": ("idle", "Queued", "It starts when the GPU is free."),
    "starting": ("busy", "Starting", "The trainer is being started."),
    "running": ("good", "Training", ""),
    "suspect": ("warn", "Quiet", "No sign of life for longer than usual; looking closer."),
    "slow": ("warn", "Slow", "It is slower than usual, but not stuck."),
    "recovering": (
        "warn",
        "Recovering",
        "It was stuck or broke off, and is being brought back from its last checkpoint.",
    ),
    "backoff": ("warn", "Waiting to restart", "It starts again by itself in a moment."),
    "stopping": ("busy", "Stopping", "It saves a checkpoint first."),
    "completed": ("done", "Completed", "The LoRA is ready."),
    "failed": ("bad", "Failed", "Read the reason, then press {again} to go on from {where}."),
    "stopped": ("idle", "Stopped", "Press {again} to go on from {where}."),
    "preempted": ("idle", "Interrupted", "The machine was taken away. Press {again} to go on from {where}."),
    "unkillable": (
        "bad",
        "Stuck in the kernel",
        "The trainer cannot be ended. Restart the machine, then press {again}.",
    ),
    "orphaned": (
        "warn",
        "Not watched",
        "Nothing watches this run (was the machine restarted?). Press {again} to go on.",
    ),
}
PHASES = {
    "import": "loading the program",
    "load": "loading the model",
    "cache_latents": "preparing the images",
    "cache_text": "preparing the captions",
    "hash": "hashing the model file",
    "first_step": "first step",
    "step": "training",
    "validate": "validating",
    "sample": "drawing samples",
    "save": "saving",
    "end": "finishing",
}


def look(state: str) -> tuple[str, str, str]:
    """Colour class, name and meaning of a state; one that we do not know is shown by its own word."""
    return STATES.get(state, ("idle", state, ""))


def run_list(views: list[View], selected: str) -> str:
    """The runs at the side."""
    if not views:
        return (
            '<div class="hp-empty"><strong>No runs yet</strong><p>Set one up under <em>New LoRA</em>; '
            "it appears here as soon as it starts.</p></div>"
        )
    rows = []
    for view in views:
        colour, word, _ = look(view.state)
        here = view.folder.name == selected
        share = f"{view.share:.0%}" if view.status and view.state != "completed" else ""
        rows.append(
            f'<button type="button" class="hp-run{" hp-here" if here else ""}" data-run="{esc(view.folder.name)}" '
            f'aria-current="{str(here).lower()}"><span class="hp-run-name" title="{esc(view.name)}">{esc(view.name)}</span>'
            f'<span class="hp-run-state"><i class="hp-dot hp-{colour}"></i>{esc(word)} {share}</span>'
            f'<span class="hp-mini"><i class="hp-{colour}" style="width:{view.share:.1%}"></i></span></button>'
        )
    return "".join(rows)


def head(view: View | None) -> str:
    """Name, state, progress and figures of the run looked at."""
    if view is None:
        return (
            '<div class="hp-empty hp-tall"><strong>Nothing to show yet</strong>'
            "<p>Here you watch a run: its steps and loss, its samples, and what was done when it got stuck.</p></div>"
        )
    colour, word, meaning = look(view.state)
    status = view.status
    said = str(status.get("reason") or status.get("message") or "") if view.state != "orphaned" else ""
    running = view.alive and view.state not in FINAL
    phase = PHASES.get(str(status.get("phase")), str(status.get("phase") or ""))
    if status.get("phase") != "step" and view.number("phase_total"):
        phase += f", {int(view.number('phase_done') or 0):,} of {int(view.number('phase_total')):,}"
    step, planned = view.number("step"), view.number("planned_steps")
    count = (
        f"{int(step or 0):,} of {int(planned):,} steps" if planned else ("" if not running else "counting the steps…")
    )
    rows = [
        f'<div class="hp-head"><h2 data-testid="run-name">{esc(view.name)}</h2>'
        f'<span class="hp-pill hp-{colour}" data-testid="state" data-state="{esc(view.state)}">{esc(word)}</span>'
        + (f'<span class="hp-phase">{esc(phase)}</span>' if running and phase and phase != word.lower() else "")
        + "</div>",
        f'<div class="hp-bar"><i class="hp-{colour}{" hp-moving" if running and not view.share else ""}" '
        f'style="width:{view.share:.2%}"></i></div>',
        f'<div class="hp-barline"><span data-testid="steps" data-step="{int(step or 0)}">{count}</span>'
        f"<span>{view.share:.0%}</span></div>"
        if view.status
        else "",
    ]
    where = "the beginning" if view.checkpoint is None else f"its checkpoint at step {view.checkpoint:,}"
    meaning = meaning.format(again=view.again, where=where)
    lines = [text for text in (said, meaning) if text]
    if view.fault:
        lines.insert(0, view.fault)
    rows += [f'<p class="hp-say" data-testid="message">{esc(text)}</p>' for text in dict.fromkeys(lines)]
    if status:
        rows.append(f'<dl class="hp-facts">{"".join(_fact(*fact) for fact in facts(view, running))}</dl>')
    return f'<div class="hp-sheet">{"".join(rows)}</div>'


def facts(view: View, running: bool) -> list[tuple[str, str, str]]:
    """Figures of a run: (label, value, explanation)."""
    out = []
    if running:
        out.append(("Time left", duration(view.number("eta_s")), "from the last steps' speed"))
        since = view.since("last_progress_at")
        if since is not None:
            words = "just now" if since < 1.5 else f"{duration(since)} ago"
            out.append(("Last sign of life", words, "the last step or item done"))
    out.append(("Speed", per_step(view.number("step_s")), ""))
    if view.number("epoch"):
        out.append(("Epoch", f"{int(view.number('epoch'))}", ""))
    out.append(("Loss", number(view.number("loss"), 3), "of the last step"))
    out.append(("Restarts", f"{int(view.number('restarts') or 0)}", "brought back without you"))
    if view.checkpoint is not None:
        out.append(("Last checkpoint", f"step {view.checkpoint:,}", "a restart goes on from here"))
    return out


def _fact(label: str, value: str, note: str) -> str:
    return f'<div title="{esc(note)}"><dt>{esc(label)}</dt><dd>{esc(value)}</dd></div>'


def result(view: View | None) -> str:
    """The finished LoRA with its download."""
    if view is None or view.lora is None:
        return ""
    size = view.lora.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    return (
        f'<div class="hp-result"><div><strong>{esc(view.lora.name)}</strong><span>{shown} · {esc(view.folder)}</span></div>'
        f'<a class="hp-button hp-primary" data-testid="download" href="{esc(file_url(view.lora))}" '
        f'download="{esc(view.lora.name)}">Download the LoRA</a></div>'
    )


def loss(view: View | None, losses: dict[int, float], incidents: list[Incident]) -> str:
    """The loss chart, restarts marked."""
    if view is None or not view.status:
        return ""
    planned = view.number("planned_steps")
    marks = [(i.fields["step"], "restart") for i in incidents if isinstance(i.fields.get("step"), int)]
    drawn = chart(losses, int(planned) if planned else None, marks)
    if not drawn:
        return _section("Loss", '<p class="hp-none">The curve begins with the second step.</p>')
    return _section("Loss", drawn, "thin: as measured · thick: smoothed")


def samples(view: View | None, pictures: list[tuple[Path, str]]) -> str:
    """The newest samples."""
    if view is None or not pictures:
        return ""
    tiles = "".join(
        f'<a href="{esc(file_url(path))}" target="_blank" rel="noopener"><img loading="lazy" src="{esc(file_url(path))}" '
        f'alt="{esc(what)}"><span>{esc(what)}</span></a>'
        for path, what in pictures
    )
    return _section("Samples", f'<div class="hp-samples">{tiles}</div>', "newest first")


def incidents(view: View | None, found: list[Incident]) -> str:
    """What went wrong, what was done about it, and what it cost."""
    if view is None or not view.status:
        return ""
    if not found:
        return ""
    return _section("What went wrong, and what was done", "".join(incident(one) for one in found))


def incident(one: Incident) -> str:
    """One hang or crash: what it was, why, what was changed, what it cost."""
    f = one.fields
    what = {"hang": "Stuck", "crash": "Broke off"}.get(str(f.get("kind")), str(f.get("kind") or "Incident"))
    phase = str(f.get("phase") or "")
    where = f"after step {f['step']}" if phase == "step" and f.get("step") is not None else ""
    where = where or (f"while {PHASES.get(phase, phase)}" if phase else "")
    title = str(f.get("title") or f.get("cause") or "Cause not known").replace("_", " ")
    title = title[:1].upper() + title[1:]
    back = isinstance(f.get("recover_s"), int | float)
    changed = f.get("changed")
    changed = "; ".join(map(str, changed)) if isinstance(changed, list) else str(changed or "")
    parts = [f"<p>{esc(f['explanation'])}</p>"] if f.get("explanation") else []
    if changed:
        parts.append(f"<p><b>What was changed:</b> {esc(changed)}</p>")
    elif back:
        parts.append("<p><b>What was changed:</b> nothing; it was started again as it was.</p>")
    if one.report:
        report = f'<details><summary>Full report</summary><div class="hp-report">{markdown(one.report)}</div></details>'
    return (
        f'<article class="hp-incident hp-{"done" if back else "warn"}" data-testid="incident">'
        f"<header><strong>{esc(title)}</strong><span>{esc(what)} {esc(where)}</span></header>{''.join(parts)}"
        f'<dl class="hp-facts">{"".join(_fact(a, b, "") for a, b in costs(f))}</dl>'
        f"{report if one.report else ''}</article>"
    )


def costs(fields: dict) -> list[tuple[str, str]]:
    """What an incident cost: (label, value)."""
    out = []
    if isinstance(fields.get("detect_s"), int | float):
        out.append(("Noticed after", _short(fields["detect_s"])))
    back = isinstance(fields.get("recover_s"), int | float)
    out.append(("Going again after", _short(fields["recover_s"]) if back else "not yet"))
    if fields.get("resumed_from") is not None:
        out.append(("Resumed from", f"step {fields['resumed_from']}"))
    if isinstance(fields.get("steps_repeated"), int):
        out.append(("Steps repeated", f"{fields['steps_repeated']}"))
    return out


def log(view: View | None, text: str) -> str:
    """The end of the training log."""
    if view is None or not view.status:
        return ""
    body = (
        f'<div class="hp-log" data-testid="log"><pre>{esc(text)}</pre></div>'
        if text
        else '<p class="hp-none">Empty so far.</p>'
    )
    return _section("Log", body, esc(f"outputs/{view.folder.name}/training.log"))


def _short(seconds: float) -> str:
    """A time span where tenths of a second count."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _section(title: str, body: str, note: str = "") -> str:
    aside = f"<span>{note}</span>" if note else ""
    return f'<section class="hp-section"><h3>{esc(title)}{aside}</h3>{body}</section>'
