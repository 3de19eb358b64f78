"""The tab "Doctor": is this machine ready, what does a process wait for, does a script hang?

Each part shows what a command of ours prints, so the page and a terminal say the same. The examination runs in the
background (ui/jobs.py): the server imports no torch, waits for no driver, and a reload shows what was found. The
components are made when the tab is opened and not with the page, so that they cost a visit nothing.
"""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import gradio as gr

from guards import hub
from monitor.cli.explain import checked
from monitor.process.spawned import Subjob, python
from runs import env_file
from runs.files import RunError
from runs.paths import data_root
from ui import jobs
from ui.html import duration, esc, region
from ui.run import fold, view
from ui.run.fold import DRAWN, QUIET

FOLDER, JOB = ".doctor", "doctor"  # the folder, in the data folder, has what the command printed
QUICK_S, FULL_S, EXPLAIN_S, LINT_S = 600.0, 3600.0, 60.0, 30.0
DRILL, DRILL_S = "drill", 600.0  # the time is for its start alone: its run, one of the list, goes on without the page
MOST_TEXT = 100_000  # characters of the stacks of a process
SCRIPT_BYTES = 200_000
SHELLS = [("bash (Linux, macOS)", "train.sh"), ("batch (Windows)", "train.bat"), ("PowerShell (Windows)", "train.ps1")]
ABOUT_DRILL = (
    "It trains a toy model on example photos and freezes it in the middle. You see how the hang is detected, explained "
    "and ended, and how the run starts again and finishes. No run of yours is touched."
)


def _folder() -> Path:
    return data_root() / FOLDER


def examine(full: bool = False) -> None:
    """Look at the machine in the background; full: also start kohya's trainers as far as their help, 30 s each.

    Raises:
        RunError: it looks already, or cannot be started.
    """
    jobs.start(_folder(), JOB, ["doctor", *([] if full else ["--quick"])], FULL_S if full else QUICK_S)


def explain(pid: str) -> str:
    """What a process does and waits for, with the stack of every thread where it can be had. Takes about three seconds.

    Raises:
        RunError: no number, no such process, another user's, or no answer.
    """
    process = checked(pid.strip())
    job = _done(python("monitor", "diagnose", str(process.pid)), EXPLAIN_S)
    if job.error:
        raise RunError(job.text().strip().removeprefix("monitor: ") or job.error)
    return job.text().strip()[:MOST_TEXT]


def lint(text: str, name: str) -> tuple[str, str]:
    """(what `python -m presets lint` says of a pasted script, the script as --fix makes it; "" for the same).

    A process of its own judges it, within a limit. It runs nothing of the script.

    Raises:
        RunError: too long, no text, no training command, or no answer.
    """
    if not text.strip() or name not in dict(SHELLS).values():
        raise RunError("Paste a training script first, such as the train.sh of kohya_ss or FluxGym")
    data = text.encode("utf-8", "replace")
    if len(data) > SCRIPT_BYTES:
        raise RunError(f"The script is longer than {SCRIPT_BYTES // 1000} kB. Paste only the training command")
    with tempfile.TemporaryDirectory(prefix="hangproof-lint-") as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        said = []
        for flags in (["--json"], ["--json", "--fix"]):
            job = _done(python("presets", "lint", str(path), *flags), LINT_S)
            printed, _, last = job.text().replace(str(path), name).strip().rpartition("\n")
            if job.answer() is None:
                raise RunError(f"The script could not be judged: {last.removeprefix('presets: ') or job.error}")
            said.append(printed)
        fixed = path.read_bytes()
    return said[0], "" if fixed == data else fixed.decode("utf-8", "replace")


def _done(command: list[str], limit_s: float) -> Subjob:
    job = Subjob(command, limit_s)
    job.wait(time.sleep)
    return job


def without_secrets(text: str) -> str:
    """A text for others to read: no home folder, no user in an address, no token."""
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    return env_file.VALUE.sub("(hidden)", hub.LOGIN.sub("", text))


# What is shown --------------------------------------------------------------------------------------------------------


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


def _button(label: str) -> gr.Button:
    return gr.Button(label, variant="primary", scale=0, min_width=150)


def look() -> tuple[bool, str]:
    """(whether an examination runs, what it has found, without secrets, as markup)."""
    job = jobs.read(_folder(), JOB)
    if job is None:
        return False, ""
    text = without_secrets(jobs.output(_folder(), JOB)[0].strip())
    if job.state == "running":
        return True, fold.note(f"Looking for {duration(round(job.seconds))}…") + region("Report", esc(text))
    problem = "" if text else jobs.reason(_folder(), JOB)
    return False, fold.note(problem, True) + region("Report", esc(text))


def _machine() -> None:
    try:
        if jobs.read(_folder(), JOB) is None:
            examine()
    except RunError as error:  # such as a full disk: the other parts are needed then
        fold.say(f"{error}.")
    full = gr.Checkbox(label="Also start the trainers (half a minute each)", interactive=True)
    go = _button("Look again")
    fold.job(go, examine, look, lambda: jobs.cancel(_folder(), JOB), "doctor", [full])


def _explain() -> None:
    pid = fold.line("Process number (pid)", "As nvidia-smi, top or ps shows it", max_length=20)
    with gr.Row(elem_classes="hp-actions"):
        go = _button("Explain")
    shown = _html()

    def on_go(number: str) -> Any:
        yield '<p class="hp-hint" role="status">Looking twice, two seconds apart…</p>'
        try:
            yield region(f"Process {number}", esc(explain(number)))
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
        go = _button("Check the script")
    shown = _html()
    fixed = gr.Textbox(
        label="The script with these fixes", lines=8, max_lines=30, buttons=["copy"], visible=False, interactive=False,
        elem_id="doctor-fixed",
    )  # fmt: skip

    def on_go(script: str, name: str) -> list[Any]:
        try:
            said, better = lint(script, name)
        except RunError as error:
            return [fold.note(f"{error}.", True), gr.update(visible=False)]
        return [region("Problems of the script", esc(said)), gr.update(visible=bool(better), value=better)]

    go.click(on_go, [text, kind], [shown, fixed], **QUIET)


def _drill() -> None:
    _html(f'<p class="hp-hint">{ABOUT_DRILL}</p>')
    words = ["launch", "drill", "--no-wait", "--json"]
    start = functools.partial(jobs.start, data_root(), DRILL, words, DRILL_S)
    go = _button("Start the drill")
    fold.job(go, start, look_at_drill, lambda: jobs.cancel(data_root(), DRILL), DRILL)


def look_at_drill() -> tuple[bool, str]:
    """(whether a drill is starting, why the last one did not start or a link to its run, as markup)."""

    def link(found: dict[str, Any]) -> str:
        name = str(found["run"])
        try:
            view.folder_of(name)
        except RunError:  # deleted since
            return ""
        return f'<p role="status"><a class="hp-link" href="?run={esc(name)}">Watch the run {esc(name)}</a></p>'

    return fold.outcome(data_root(), DRILL, "Starting", "The drill did not start", link)


PARTS = (
    ("machine", "This machine", "Python, PyTorch, GPU, disks, memory and the trainers", _machine),
    ("explain", "Explain a process", "What it does and waits for, and the stack of every thread", _explain),
    ("lint", "Check a training script", "What hangs or fails in scripts of kohya's trainers and FluxGym", _lint),
    ("drill", "Hang drill", "Watch a demo run freeze and recover, in about a minute", _drill),
)
