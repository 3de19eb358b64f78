"""The trainer's own part of the New LoRA tab: what fits a changed version, a test of it, and the way back to the old one.

The test is one process (`python -m sd_scripts_patches selftest`), which trains tiny weights for a minute. It runs in
the background (ui/jobs.py) under a name that has the commit, so that a reloaded page shows what belongs to the version
that is there now, and nothing else. The test and the way back share one slot of a trainer: a checkout never changes
under a test, whichever page or server started it.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

import runs
from sd_scripts_patches import compatibility, registry, versions
from sd_scripts_patches.trainers import TRAINERS, Trainer
from sd_scripts_patches.versions import VersionError
from ui import jobs
from ui.html import esc
from ui.run import view
from ui.run.fold import QUIET

TICK_S = 1.0
LIMIT_S = 1800.0  # for the self-test
BACK = "back"


@dataclass(frozen=True)
class Status:
    """A trainer that is installed. now: its commit, "" when unknown. before: the one to go back to, "" when nothing changed.

    used: `before` is what a run used last; else it is the commit that Hangproof is tested with.
    """

    trainer: Trainer
    now: str
    before: str = ""
    used: bool = False


@dataclass
class TrainerChecks:
    """The components; `build` makes them and `wire` connects them."""

    note: gr.HTML
    test: gr.Button
    back: gr.Button
    timer: gr.Timer
    panel: gr.Column
    question: gr.HTML
    back_ok: gr.Button
    back_no: gr.Button

    @property
    def outputs(self) -> list[Any]:
        """The components that `show` updates, in order."""
        return [self.note, self.test, self.back, self.timer, self.panel]

    @property
    def panels(self) -> list[Any]:
        """The components that `ask_back` updates, in order."""
        return [self.panel, self.question, self.back_ok]


def build() -> TrainerChecks:
    """Build the part; it is hidden until a trainer that has a checkout is chosen."""
    small = {"size": "sm", "scale": 0, "min_width": 250}
    note = gr.HTML(elem_id="trainer-note", apply_default_css=False)
    with gr.Row(elem_classes="hp-actions"):
        test = gr.Button(visible=False, elem_id="trainer-test", **small)
        back = gr.Button(visible=False, elem_id="trainer-back", **small)
    with gr.Column(visible=False, elem_classes="hp-panel", elem_id="trainer-panel") as panel:
        question = gr.HTML(elem_id="trainer-question", apply_default_css=False)
        with gr.Row():
            back_ok = gr.Button("Go back", variant="stop", elem_id="trainer-back-ok", **small)
            back_no = gr.Button("Cancel", elem_id="trainer-back-no", **small)
    timer = gr.Timer(TICK_S, active=False)
    return TrainerChecks(note, test, back, timer, panel, question, back_ok, back_no)


def wire(checks: TrainerChecks, backend: Any, loaded: gr.State) -> None:
    """Connect the part to the choice of the trainer."""
    gr.on(
        [loaded.change, backend.change, checks.timer.tick],
        show,
        backend,
        checks.outputs,
        trigger_mode="always_last",
        **QUIET,
    )
    checks.test.click(test, backend, checks.outputs, **QUIET)
    checks.back.click(ask_back, backend, checks.panels, **QUIET)
    checks.back_no.click(lambda: gr.update(visible=False), None, checks.panel, **QUIET)
    checks.back_ok.click(go_back, backend, [*checks.outputs, checks.question, checks.back_ok], **QUIET)


def status(backend: str) -> Status | None:
    """The state of a backend's checkout; None for a backend that has none here."""
    trainer = TRAINERS.get(backend) if isinstance(backend, str) else None
    if trainer is None or not trainer.checkout.is_dir():
        return None
    now = versions.commit(trainer.checkout)
    if not now:
        return Status(trainer, "")
    before = last_used(trainer)
    if before:
        return Status(trainer, now, before if before != now else "", True)
    return Status(trainer, now, "" if now in (trainer.commit, *trainer.tested) else trainer.commit)


def last_used(trainer: Trainer) -> str:
    """The commit of the run that used this checkout last, "" when none did."""
    noted, here = [], trainer.checkout.resolve()
    for folder in runs.list_runs():
        found = versions.used(folder)
        if found and found.trainer == trainer.key and found.commits and Path(found.checkout).resolve() == here:
            noted.append(((folder / versions.FILE).stat().st_mtime_ns, found.commits[-1]))
    return max(noted)[1] if noted else ""


def changed(run: Path) -> list[str]:
    """What is said when a run continues on another version than the one it used so far; [] when it does not."""
    noted = versions.used(run)
    trainer = TRAINERS.get(noted.trainer) if noted else None
    now = versions.commit(trainer.checkout) if trainer else ""
    if noted is None or trainer is None or not noted.commits or not now or noted.commits[-1] == now:
        return []
    return [
        f"This run used commit {noted.commits[-1][:8]} of {trainer.name} so far and continues on {now[:8]}. To see what "
        "fits it, or to go back first, stop it and choose this trainer under New LoRA."
    ]


def show(backend: str) -> list[Any]:
    """Updates of TrainerChecks.outputs for the chosen backend."""
    found, hidden = status(backend), gr.update(visible=False)
    if found is None:
        return ["", hidden, hidden, gr.Timer(active=False), hidden]
    busy = running(found)
    changed = bool(found.before)
    return [
        _note(found) + _result(found),
        gr.update(visible=True, interactive=not busy, value=f"Test {found.trainer.name} (1 minute)"),
        gr.update(visible=changed, interactive=not busy, value=f"Go back to {found.before[:8]}…"),
        gr.Timer(active=busy),
        hidden,
    ]


def _note(found: Status) -> str:
    if not found.before:
        return ""
    trainer, folder = found.trainer, found.trainer.checkout
    now, before = (f"<code>{one[:8]}</code>{esc(_described(folder, one))}" for one in (found.now, found.before))
    if found.used:
        says = f"<strong>{esc(trainer.name)} was changed</strong> since your last run with it. It used {before}; now it is {now}."
    else:
        says = (
            f"<strong>{esc(trainer.name)} is at {now}</strong>, which Hangproof is not tested with. "
            f"Tested: {before} ({esc(trainer.version)})."
        )
    return (
        f'<p class="hp-hint" data-testid="trainer-changed">{says} {esc(_check(folder, found.now))} Test it before you start: tiny random '
        "weights, one minute, on the processor.</p>"
    )


@functools.lru_cache(maxsize=4)
def _check(checkout: Path, now: str) -> str:
    """What `python -m sd_scripts_patches check` says about a checkout at commit `now`, in a sentence or two."""
    found = compatibility.find_checkout(checkout)
    if found is None:
        return f"{checkout} is not a checkout of sd-scripts or musubi-tuner."
    findings = [compatibility.check_patch(patch, found.source) for patch in registry.patches(found.trainer)]
    waits = sorted({f"{finding.patch} ({one.open})" for finding in findings for one in finding.open})
    if not waits:
        return f"All {len(findings)} guards fit this version."
    return f"Not guarded in this version: {'; '.join(waits)}. A run that needs one of them does not start."


def _described(checkout: Path, commit: str) -> str:
    """Date and subject of a commit in brackets, "" when the checkout does not have it."""
    try:
        return f" ({versions.git(checkout, 'log', '-1', '--format=%cs, %s', commit).strip()[:100]})"
    except VersionError:
        return ""


# The self-test -----------------------------------------------------------------------------------------------------


def place() -> Path:
    """The folder that the tests are about."""
    return runs.data_root() / "checks"


def job_of(found: Status) -> str:
    """The name of the self-test of the commit that is there now."""
    return f"self-test-{found.trainer.key}-{found.now[:12] or 'unknown'}"


def running(found: Status) -> bool:
    """Whether something tests or changes the checkout."""
    return jobs.running(place(), found.trainer.key)


def test(backend: str) -> list[Any]:
    """Start the self-test of the chosen trainer."""
    found = status(backend)
    if found is not None and not running(found):
        words = ["sd_scripts_patches", "selftest", str(found.trainer.checkout), "--json"]
        environment = {found.trainer.venv_variable: str(found.trainer.environment)}
        try:
            jobs.start(place(), job_of(found), words, LIMIT_S, slot=found.trainer.key, environment=environment)
        except runs.RunError as error:
            raise gr.Error(str(error)) from error
    return show(backend)


def _result(found: Status) -> str:
    """What the self-test found, as HTML; "" when it was not started."""
    name, job = found.trainer.name, jobs.read(place(), job_of(found))
    if job is None:
        return ""
    if job.state == "running":
        return f'<p class="hp-hint" role="status" data-testid="trainer-busy">Testing {esc(name)}: training tiny weights…</p>'
    _, content, errors = jobs.output(place(), job.name)
    if not isinstance(content, dict):
        last = (errors.strip().splitlines() or ["It was stopped. Start it again."])[-1]
        return _box("The self-test ended without a result", [last], good=False)
    rows = []
    for check in content["checks"]:
        action = f" {check['action']}" if check["action"] else ""
        rows.append(f"{check['name']} ({check['status']}): {check['text']}{action}")
    passed = f"{name} trains, its hangs end, and its resume is exact"
    return _box(passed if content["ok"] else f"{name} did not pass its self-test", rows, content["ok"])


def _box(title: str, rows: list[str], good: bool) -> str:
    lines = "".join(f"<li>{esc(row)}</li>" for row in rows if row)
    kind, role = ("info", "status") if good else ("bad", "alert")
    return f'<div class="hp-problem hp-{kind}" role="{role}" data-testid="trainer-verdict"><strong>{esc(title)}</strong><ul>{lines}</ul></div>'


# The way back ---------------------------------------------------------------------------------------------------------


def ask_back(backend: str) -> list[Any]:
    """Open the panel, which says exactly what going back does, or why it cannot be done."""
    found = status(backend)
    if found is None or not found.before:
        return [gr.update(visible=False), gr.skip(), gr.skip()]
    folder, before = found.trainer.checkout, found.before
    try:
        _free(found)
        commands = versions.way_back(folder, found.trainer, before)
    except VersionError as error:
        return [gr.update(visible=True), f'<p class="hp-say" role="alert">{esc(error)}</p>', gr.update(visible=False)]
    shown = "".join(f"<li><code>{esc(' '.join(command))}</code></li>" for command in commands)
    after = ""
    if versions.needs_differ(folder, before, found.now):
        after = f" The old version lists other requirements: afterwards run ./start.sh {found.trainer.key}, which installs them."
    text = (
        f'<p class="hp-say">Going back to {esc(before[:8])} runs:</p><ul>{shown}</ul><p class="hp-say">This changes only files '
        f"in {esc(folder)} that git tracks; your own files there, your runs and the environment stay.{esc(after)} To return to "
        f"the new version: <code>git -C {esc(folder)} checkout {esc(_name_of_now(folder, found.now))}</code></p>"
    )
    return [gr.update(visible=True), text, gr.update(visible=True, value=f"Go back to {before[:8]}")]


def go_back(backend: str) -> list[Any]:
    """Put the old version back."""
    found = status(backend)
    if found is None or not found.before:
        return [*show(backend), gr.skip(), gr.skip()]
    try:
        _free(found)
        _go_back(found)
    except (VersionError, runs.RunError) as error:
        problem = f'<p class="hp-say" role="alert">{esc(error)}</p>'
        return [*show(backend)[:-1], gr.update(visible=True), problem, gr.update(visible=False)]
    updates = show(backend)
    done = f"{found.trainer.name} is at {found.before[:8]} again."
    updates[0] = f'<p class="hp-hint" role="status" data-testid="trainer-changed-back">{esc(done)}</p>'
    return [*updates, gr.skip(), gr.skip()]


def _go_back(found: Status) -> None:
    """Raises VersionError with git's message; RunError: a check has just been started."""
    words = ["sd_scripts_patches.versions", found.trainer.key, found.before]
    limit_s, job = versions.FETCH_LIMIT_S + versions.GIT_LIMIT_S, f"{BACK}-{found.trainer.key}"
    jobs.start(place(), job, words, limit_s, slot=found.trainer.key, prepare=lambda: _no_run(found))
    ended = jobs.wait(place(), job, limit_s)
    if ended is None or ended.state != "done":
        raise VersionError((jobs.output(place(), job)[2].strip().splitlines() or ["git was stopped; try again"])[-1])


def _free(found: Status) -> None:
    """Raises VersionError while a run or a test trains with this checkout: it would use the code of two versions."""
    if running(found):
        raise VersionError(f"{found.trainer.name} is being tested. Wait until the result is there.")
    _no_run(found)


def _no_run(found: Status) -> None:
    trainer = found.trainer
    for shown in view.read_all():
        noted = versions.used(shown.folder)
        if shown.running and noted and noted.trainer == trainer.key:
            raise VersionError(
                f"The run {shown.name!r} is training with {trainer.name}. Stop it, or wait until it has ended."
            )


def _name_of_now(checkout: Path, now: str) -> str:
    """The branch that the checkout is on, else its commit."""
    try:
        return versions.git(checkout, "symbolic-ref", "--short", "HEAD").strip()
    except VersionError:
        return now
