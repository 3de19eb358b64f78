"""The cards of a run, and the list of runs: from a view to what cards.html shows of it.

Each state has a sentence that says what to do; the numbers follow it. A row of the list and a report are made once for
each object that they show, because a timer asks every second.
"""

import functools
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from monitor.ledger import Ledger
from monitor.phrases import PHASES, count
from presets.tables import read_toml
from runs.manage import size_text
from runs.results import Lora
from ui.html import duration, linked, markdown, number, part, per_step
from ui.run.readers import latest
from ui.run.snapshots import Evolution
from ui.run.view import Incident, View, number_of, unreadable
from ui.served import archive_url, file_url

CARD = functools.partial(part, "run/cards.html")
TIME = Markup('<time datetime="{}">{}</time>')
DOT = Markup('<i class="hp-dot hp-{}"></i>{}')
Fact = tuple[str, str, str]  # label, value, explanation
LISTED = 100  # runs that the list shows; the search finds the others
NEWEST = 200  # LoRAs, and incidents, that a run shows
UTC_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)")

_ROWS = read_toml(Path(__file__).with_name("states.toml"))
STATES = {state: (row["colour"], row["label"], row["about"]) for state, row in _ROWS.items()}
SILENT = ("warn", "Monitor does not respond", "Its keeper replaces it. If this stays, check the disk with the run.")


def describe(view: View) -> tuple[str, str, str]:
    """Colour class, label and explanation of a run's state; the label of an unknown state is its name.

    A run that uses no GPU does not queue for one, and old figures are shown as such.
    """
    if view.stale:
        return SILENT
    needs_no_gpu = view.state == "queued" and view.status.get("devices") == []
    return STATES.get("opening" if needs_no_gpu else view.state, ("idle", view.state, ""))


def local_time(when: datetime | None) -> str:
    """A time that the browser shows in its own time zone (drawn.js); without the script it is UTC."""
    if when is None:
        return "–"
    return TIME.format(when.isoformat(), f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC")


def local_times(markup: str) -> str:
    """Markup whose UTC times the browser shows in its own time zone. Times inside tags are none."""
    parts = re.split(r"(<[^>]*>)", markup)
    parts[::2] = [UTC_TIME.sub(lambda m: TIME.format(m[0], m[0]), text) for text in parts[::2]]
    return "".join(parts)


def matching(views: list[View], search: str) -> list[View]:
    """The runs whose name or state contains every word of `search`."""
    words = search.casefold().split()

    def found(view: View) -> bool:
        text = f"{view.name} {view.folder.name} {describe(view)[1]} {view.state}".casefold()
        return all(word in text for word in words)

    return [*filter(found, views)] if words else views


def run_list(views: list[View], selected: str, search: str = "") -> str:
    """The list of runs."""
    if not views:
        why = unreadable()
        text = why or "Set one up under New LoRA. It appears here when it starts."
        return CARD("empty", "The runs cannot be shown" if why else "No runs yet", text)
    found = matching(views, search)
    if not found:
        return CARD("empty", "No run found", f"No name or state contains “{search}”.")
    more = len(found) - LISTED
    note = f'<p class="hp-none hp-more">{more:,} older runs. Search to find them.</p>' if more > 0 else ""

    def row(view: View) -> str:
        here = view.folder.name == selected
        return latest(f"row {here}", view.folder, (view,), lambda: _row(view, here))

    return "".join(map(row, found[:LISTED])) + note


def _row(view: View, here: bool) -> str:
    colour, label, _ = describe(view)
    percent = f"{view.progress:.0%}" if view.status.get("state") and view.state != "completed" else ""
    return CARD("row", view, here, colour, label, percent)


def no_run(selected: str) -> str:
    """Why no run is shown: none is selected, or the selected one is gone."""
    if selected:
        why = unreadable()
        title = f"The run {selected!r} {'cannot be shown' if why else 'was renamed or deleted'}"
        return CARD("empty", title, why or "Choose a run in the list.", True, True)
    text = "A run shows its steps, loss and samples here, and each hang or crash with its recovery."
    return CARD("empty", "No run selected", text, True)


def head(view: View, waits: bool = False) -> str:
    """Name, state, progress and figures of the selected run. waits: whether the queue starts it."""
    colour, label, meaning = describe(view)
    status, running = view.status, view.running
    said = str(status.get("reason") or status.get("message") or "") if view.state != "orphaned" else ""
    phase = PHASES.get(str(status.get("phase")), str(status.get("phase") or ""))
    if status.get("phase") != "step" and (items := view.number("phase_total")):
        phase += f", {int(view.number('phase_done') or 0):,} of {int(items):,}"
    count = steps(view) or ("Preparing…" if running else "")
    resume = "start over" if view.checkpoint is None else f"continue from the checkpoint at step {view.checkpoint:,}"
    meaning = "" if waits and not running else meaning.format(start=view.start_label, resume=resume)
    if view.state == "preempted" and (view.folder / "train.sbatch").is_file():
        meaning += " A job of Slurm that waits does so by itself: see squeue --me."
    ready = snapshots(view) if running else ""
    old = f"These {view.stale}." if view.stale else ""
    why = slow(view) if running else ""
    texts = (view.problem, old, why, said[:1].upper() + said[1:], meaning, store(view), ready)
    lines = [Markup(linked(text)) for text in texts if text]
    used = machine(view) if running else []
    known = facts(view, running) if status.get("state") else []
    phase = phase if running and phase != label.lower() else ""
    return CARD("head", view, colour, label, phase, count, dict.fromkeys(lines), known, used if known else [])


def steps(view: View) -> str:
    """How many steps are done; "" while it is not known how many there are."""
    planned = view.number("planned_steps")
    return f"{view.number('step') or 0:,.0f} of {planned:,.0f} steps" if planned else ""


def slow(view: View) -> str:
    """Why the steps take longer than usual and what to do, in sentences; "" while they do not."""
    known = view.status.get("slow")
    if not isinstance(known, dict):
        return ""
    parts = [known.get(key) for key in ("title", "pace", "explanation", "advice")]
    return " ".join(
        part if part.endswith((".", "?")) else f"{part}." for part in parts if isinstance(part, str) and part
    )


def store(view: View) -> str:
    """What the run's durable store holds, in a sentence; "" without one."""
    known = view.status.get("store")
    if not isinstance(known, dict) or not known.get("address"):
        return ""
    name = f"Store {known['address']}"
    step = known.get("step")
    held = f"the checkpoint of step {step:,} is there" if isinstance(step, int) else "no checkpoint is there yet"
    waiting = known.get("pending_bytes")
    more = f"; {size_text(waiting)} still to copy" if isinstance(waiting, int) and waiting > 0 else ""
    if known.get("lease") == "held":
        error = known.get("error")
        return f"{name}: {held}{more}" + (f". {error}. Training goes on; copying is tried again." if error else ".")
    return f"{name}: {known.get('state') or held}."


def snapshots(view: View) -> str:
    """How far a restart would go back, or why there are no snapshots in memory; "" before the first one."""
    known = view.status.get("snapshots")
    if not isinstance(known, dict):
        return ""
    if known.get("off"):
        return f"Steps are not copied to memory: {known['off']}. A restart resumes from the newest checkpoint."
    every = known.get("every")
    if not isinstance(known.get("step"), int) or not isinstance(every, int):
        return ""
    often, size = "at each step" if every <= 1 else f"every {every:,} steps", size_text(known.get("bytes") or 0)
    return f"The training is copied to memory {often} ({size}). A restart goes on from the newest copy."


# State of the ledger: (label, colour class, explanation).
LEDGER = {
    "training": ("Training", "done", "Steps that count, with their saves and samples"),
    "loading": ("Loading", "busy", "From the start to the first step"),
    "waiting": ("Waiting", "idle", "For a GPU, for the pause before a restart, for the next machine"),
    "recovering": ("Recovering", "warn", "From the detection of a failure to the first step after it"),
    "lost": ("Lost", "bad", "Until a failure was detected, and steps that had to be trained twice"),
}


def ledger(view: View) -> str:
    """Where the time of the run went, its cost, and what recovery saved."""
    found = Ledger.of(view.status)
    if not view.status.get("state") or found.wall_s < 1:
        return ""
    shares = {state: found.seconds[state] / found.wall_s for state in LEDGER}
    rows: list[Fact] = [
        (DOT.format(colour, label), f"{_short(found.seconds[state])} · {shares[state]:.0%}", note)
        for state, (label, colour, note) in LEDGER.items()
        if found.seconds[state] >= 0.05
    ]
    rows.append(("Trained twice", count(found.repeated, "step"), "Steps since the last checkpoint, after a failure"))
    if found.cost is not None:
        at = f"{found.rate[:1].upper()}{found.rate[1:]}, in the currency of the price"
        rows.append(("Cost", f"{found.cost:,.2f}", at))
    saved = ""
    if found.failures:
        saved = f"{found.saved()}." + " The time until you would have noticed is not counted." * bool(found.recovered)
    bar = [(label, colour, shares[state]) for state, (label, colour, _) in LEDGER.items()]
    title = "Time and money" if found.cost is not None else "Time"
    return CARD("ledger", bar, rows, saved, title, _short(found.wall_s))


def facts(view: View, running: bool) -> list[Fact]:
    """Figures of a run; those that are not known are left out."""
    stepped, elapsed_s, epoch = bool(view.number("step")), view.number("elapsed_s"), view.number("epoch")
    saved = view.checkpoint
    progress, started, ended = map(view.time, ("last_progress_at", "started_at", "updated_at"))
    ago_s = max(0.0, (datetime.now(UTC) - progress).total_seconds()) if progress else 0.0
    ago = Markup('<span class="hp-ago">{}</span>').format("just now" if ago_s < 1.5 else f"{duration(ago_s)} ago")
    source = "the speed of the last steps" if stepped else "earlier runs of this kind"
    known: list[tuple[object, str, str, str]] = [
        (running, "Time left", duration(view.number("eta_s")), f"Estimated from {source}"),
        (running and progress, "Last progress", ago, "When the last step or item was completed"),
        (elapsed_s is not None, "Elapsed", duration(elapsed_s), "Time since Start, without pauses between two starts"),
        (started, "Started", local_time(started), "When the run was first started"),
        (ended and not running, "Ended", local_time(ended), ""),
        (stepped, "Speed", per_step(view.number("step_s")), "Typical time of a step"),
        (epoch, "Epoch", f"{epoch or 0:.0f}", ""),
        (True, "Loss", number(view.number("loss"), 3), "Loss of the last step"),
        (True, "Restarts", f"{view.number('restarts') or 0:.0f}", "Automatic restarts after a hang or crash"),
        (saved is not None, "Last checkpoint", f"step {saved or 0:,}", "A restart continues from here"),
    ]
    return [(label, text, note) for there, label, text, note in known if there]


def machine(view: View) -> list[Fact]:
    """What the run uses of its machine, where the monitor knows it."""
    out: list[Fact] = []
    gpus = view.status.get("gpus")
    known = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    for index, gpu in enumerate(known):
        label, name = f"GPU {index}" if len(known) > 1 else "GPU", str(gpu.get("name") or "")
        busy, heat, used, total = (
            number_of(gpu, key) for key in ("utilization", "temperature", "memory_used", "memory_total")
        )
        if busy is not None:
            out.append((label, f"{busy:.0f} %" + (f" · {heat:.0f} °C" if heat is not None else ""), name))
        if used is not None and total is not None:
            text = f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"
            out.append((f"{label} memory", text, f"{name}: memory in use, by all programs"))
    if (cores := view.number("cpu_cores")) is not None:
        out.append(("CPU", f"{cores:.1f} of {os.cpu_count() or 1} cores", "Processor cores that the training uses"))
    if memory := view.number("memory_bytes"):
        out.append(("Memory", size_text(memory), "Memory of the training's processes, without mapped files"))
    if (free := view.number("disk_free")) is not None:
        out.append(("Disk", f"{size_text(free)} free", "Free space where the run is stored"))
    return out


def loras(folder: Path, found: list[Lora], evolution: Evolution, picked: int | None) -> str:
    """Every saved LoRA with its step, its samples and a download, the final one first. picked: the best one's step."""
    drawn = {one.at: one.samples for one in evolution.snapshots}

    def row(lora: Lora) -> tuple[object, ...]:
        name, at = lora.path.name, lora.at
        title = f"Final LoRA · {at}" if lora.final and at != name else at[:1].upper() + at[1:] if at != name else name
        samples = drawn.get(at, ())
        thumbs = [(one, file_url(one.path), file_url(one.path, versioned=True)) for one in samples]
        best = picked is not None and lora.step == picked
        return lora, title, thumbs, best, size_text(lora.size), file_url(lora.path)

    rows, size, count = [*map(row, found[:NEWEST])], size_text(sum(lora.size for lora in found)), len(found)
    made = functools.partial(CARD, "loras", rows, count, folder.absolute(), archive_url(folder), size)
    return latest("loras", folder, (rows, count, size), made)


def incidents(folder: Path, found: list[Incident]) -> str:
    """The newest hangs and crashes of the run in `folder`; each report is made once, however many there are."""
    shown, more = found[:NEWEST], len(found[NEWEST:])
    rows = [latest("incident row", folder / one.number, (one,), functools.partial(incident, one)) for one in shown]
    made = functools.partial(CARD, "incidents", rows, more, folder.absolute() / "incidents", cost_of_all(found))
    return latest("incidents", folder, (rows, more), made) if found else ""


def cost_of_all(found: list[Incident]) -> str:
    """What all failures together have cost, as a phrase; "" before the first recovery."""
    spans = [span for one in found if (span := number_of(one.fields, "recover_s")) is not None]
    if not spans:
        return ""
    steps = sum(n for one in found if isinstance(n := one.fields.get("steps_repeated"), int))
    return f"Cost: {_short(sum(spans))} without a new step, {count(steps, 'step')} trained twice"


def incident(one: Incident) -> tuple[object, ...]:
    """What is shown of one hang or crash: its number, title, place, cause with what to do, the change for the restart,
    whether it recovered, what it cost, and the report."""
    f = one.fields
    what = {"hang": "Hung", "crash": "Crashed"}.get(str(f.get("kind")), str(f.get("kind") or "Incident"))
    phase = str(f.get("phase") or "")
    where = f"after step {f['step']}" if phase == "step" and f.get("step") is not None else ""
    where = where or (f"while {PHASES.get(phase, phase)}" if phase else "")
    title = str(f.get("title") or f.get("cause") or "Unknown cause").replace("_", " ")
    changed = f.get("changed")
    changed = "; ".join(map(str, changed)) if isinstance(changed, list) else str(changed or "")
    recovered, report = number_of(f, "recover_s") is not None, Markup(local_times(markdown(one.report)))
    known = f.get("diagnosis")
    said = f.get("explanation"), known.get("advice") if isinstance(known, dict) else ""
    why = " ".join(map(str, filter(None, said)))
    return one.number, title[:1].upper() + title[1:], f"{what} {where}", why, changed, recovered, costs(f), report


def costs(fields: dict[str, Any]) -> list[Fact]:
    """Times and steps that an incident cost."""
    detect_s, recover_s, repeated = (number_of(fields, key) for key in ("detect_s", "recover_s", "steps_repeated"))
    out = [("Detected after", _short(detect_s), "")] if detect_s is not None else []
    out.append(("Recovery", "Not recovered", "") if recover_s is None else ("Recovered in", _short(recover_s), ""))
    if fields.get("resumed_from") is not None:
        source = ", in memory" if fields.get("from_memory") is True else ""
        out.append(("Resumed from", f"step {fields['resumed_from']}{source}", ""))
    if repeated is not None:
        out.append(("Steps trained twice", f"{repeated:.0f}", ""))
    return out


def _short(seconds: float) -> str:
    """A time span with tenths of a second below one minute."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
