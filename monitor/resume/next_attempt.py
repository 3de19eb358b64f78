"""The next attempt, prepared while the run is healthy: its script is rendered, and it is started early (the standby).

An attempt's script is the run's job (`job.json`) with the changes of the ladder. `python -m monitor.resume.next_attempt
FOLDER` renders it, a subprocess, because a change needs the spec and so pydantic (20 MB), which the monitor does
without: a request on its standard input, the answer on its last line, both JSON (see `respond`).

`Prewarm` renders the next script meanwhile, so that this does not delay a restart by half a second. The script is
rendered with a stand-in for the state's name, which is known only at the restart; another job or a new change makes it
stale, and then it is rendered again.

`Standby` starts that script, which waits with everything imported; monitor/README.md explains it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from guards import gate, reading
from guards.reading import read_text
from monitor import config
from monitor.attempt import Attempt
from monitor.process import platform
from monitor.process.spawned import ROOT, Subjob, python
from monitor.run_folder import JOB, SCRIPT, TRAINING_LOG, MonitorError, RunFolder
from monitor.state import Observation, spec_edited
from runs.quoting import quote

if TYPE_CHECKING:
    from monitor.recovery import Run

Pause = Callable[[float], None]
Change = dict[str, Any]  # a mitigation: {"name", "sentence", "patch"}; the patch is of the job (runs/job.py)
STAND_IN = "HANGPROOF-NEWEST-state"
REST_S = 60.0  # to the next try, where a script could not be rendered
LOOK_S = 5.0  # between two looks at the standby's processes and at the free memory
AT_MOST_BYTES = 4 << 30  # what the imports of a trainer need; a training holds its model and data beside them
CHECKED = "HANGPROOF_CHECKED"  # set: whoever started the monitor has looked for what is missing; START: it was a person
START, UNCHECKED = "start", " unchecked"  # UNCHECKED at its end: that could not be found out
OUTPUT = "output"  # what the standby prints before it is released; then it goes into training.log


@dataclass(frozen=True)
class Rendered:
    """An attempt's script. `compatible`: the changed run can resume the state that it was to resume from."""

    script: Path
    save_dir: str = ""
    compatible: bool = True


def start_problems(folder: RunFolder, timeout_s: float, pause: Pause) -> list[str]:
    """What prevents a start (a missing model file, no checkout), each as a sentence; [] for the user's own script.

    Raises:
        MonitorError: the spec itself is wrong.
    """
    if folder.foreign:
        return []
    answer = _ask(folder, {"want": "problems"}, timeout_s, pause)
    for note in answer["notes"]:
        folder.event("job", note)
    problems: list[str] = answer["problems"]
    return problems


def with_state(text: str, folder: Path, state: Path | None) -> str:
    """A prepared script with this state in place of the stand-in, each as a word of the shell."""
    return text.replace(quote(str(folder / STAND_IN)), quote(str(state)))


def next_change(run: Run, ladder: Sequence[str], keeps: bool = False) -> Change:
    """The first mitigation of `ladder` that changes anything beyond those in force; {} for none, or where that fails.

    keeps: only one after which the run's checkpoints can be resumed. One that cannot change a script that the user
    edited is left out, and an event says why.
    """
    folder, changes = run.folder, run.state.changes
    left = [name for name in ladder if name not in [change["name"] for change in changes]]
    if folder.foreign or not left:
        return {}
    try:
        request = {"want": "change", "ladder": left, "changes": changes, "keeps": keeps}
        answer = _ask(folder, request, run.config.check.render_s, run.pause)
    except (MonitorError, OSError) as error:
        folder.log(f"the run is not changed: {error}")
        return {}
    for reason in answer.pop("refused", []):
        folder.event("not_mitigated", reason)
    return answer


def _job(folder: RunFolder, request: dict[str, Any], timeout_s: float) -> Subjob:
    stdin = json.dumps(request, default=str).encode()
    return Subjob(python("monitor.resume.next_attempt", str(folder.folder)), timeout_s, stdin)


def _ask(folder: RunFolder, request: dict[str, Any], timeout_s: float, pause: Pause) -> dict[str, Any]:
    """What the subprocess answers. MonitorError: the spec is wrong. OSError: the subprocess could not do its work."""
    job = _job(folder, request, timeout_s)
    job.wait(pause)
    if (answer := job.answer()) is not None:
        return answer
    reason = job.error.removeprefix("render: ") or "rendering the script gave no result"
    # Windows: 1 is also the code of what was killed.
    raise MonitorError(reason) if job.code == 1 and not job.timed_out else OSError(reason)


class Prewarm:
    """Renders the scripts of one run, the next one while the run is healthy."""

    def __init__(self, run: Run):
        self.run = run
        self._job: Subjob | None = None  # renders the next script, or has
        self._found: dict[str, Any] = {}  # its answer
        self._made_from: list[object] = []
        self._next_s = 0.0  # not again before, from the same

    def tick(self, now_s: float) -> None:
        """Begin to render the script where it is missing or stale. Called while the run makes progress.

        Where that fails, the restart renders it, and reports what is wrong.
        """
        run, made_from = self.run, self._depends_on()
        rests = self._job is not None and made_from == self._made_from and (now_s < self._next_s or self.prepared())
        if run.folder.foreign or run.several or platform.WINDOWS or rests:
            return
        self.close()
        request = {"want": "text", "resume": run.folder.folder / STAND_IN, "changes": run.state.changes}
        self._job, self._found = _job(run.folder, request, run.config.check.render_s), {}
        self._made_from, self._next_s = made_from, now_s + REST_S

    def prepared(self) -> dict[str, Any]:
        """The next script, with the stand-in, as `respond` says; {} while it is missing, and where it is stale."""
        if self._job is None or self._made_from != self._depends_on():
            return {}
        if not self._found and self._job.done():
            self._found = self._job.answer() or {}
        return self._found

    def render(self, number: int, resume: Path | None) -> Rendered:
        """The script of attempt `number`: train.sh itself, the prepared text with the state's name, or rendered now.

        The user's own script is always itself; its environment says where to resume. MonitorError: not rendered.
        """
        folder, changes, changes_at_save = self.run.folder, self.run.state.changes, self.run.state.changes_at_save
        if folder.foreign or (number == 1 and resume is None and not changes):
            return Rendered(folder.folder / SCRIPT, str(folder.spec.get("save_dir", "")))
        same = changes_at_save == [change["name"] for change in changes]
        if (found := self.prepared()) and resume is not None and same:
            path = folder.folder / f"train.attempt-{number}.sh"
            text = with_state(found["text"], folder.folder, resume)
            if STAND_IN not in text and folder.replace(path.name, text.rstrip("\n"), errors="surrogateescape"):
                with contextlib.suppress(OSError):  # a drive that root has mounted: bash runs it all the same
                    path.chmod(0o755)
                return Rendered(path, found["save_dir"])
        request = {"want": "script", "number": number, "resume": resume, "changes": changes, "was": changes_at_save}
        answer = _ask(folder, request, self.run.config.check.render_s, self.run.pause)
        return Rendered(Path(answer["script"]), answer["save_dir"], answer["compatible"])

    def close(self) -> None:
        """Kill a job under way."""
        if self._job is not None:
            self._job.kill()

    def _depends_on(self) -> list[object]:
        try:
            stat = os.stat(self.run.folder.folder / JOB)
        except OSError:
            return []
        return [stat.st_mtime_ns, stat.st_size, *(change["name"] for change in self.run.state.changes)]


# ---- the standby ----


def why_no_standby(folder: RunFolder, limits: config.Section) -> str:
    """Why this run has no standby attempt; "" when it can have one, if its script can start early (`alone`)."""
    spec = folder.spec
    reasons = {
        "turned off in the limits (standby = false)": not limits.tries_count,
        "only Linux has what it needs": not platform.LINUX,
        "the script is not one of Hangproof's": folder.foreign,
        "several processes train together": int(spec.get("gpus", 1)) * int(spec.get("nodes", 1)) > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def message(resume: str, environment: dict[str, str], log: str) -> bytes:
    """The line that opens the gate. At most PIPE_BUF bytes are written at once: it comes completely or not at all."""
    return json.dumps({"resume": resume, "environment": environment, "log": log}).encode() + b"\n"


class Standby:
    """The standby attempt of one run. `off`: why there is none."""

    def __init__(self, run: Run):
        self.run, self.off = run, why_no_standby(run.folder, run.config.standby)
        self.attempt: Attempt | None = None
        self._tries = 0 if self.off else run.config.standby.tries_count  # starts that may fail in a row
        self._gate: BinaryIO = io.BytesIO()
        self._next_s = 0.0  # of the next look at it; no start before
        self._waits = False  # it was ready at the last look

    @property
    def ready(self) -> bool:
        """It waits at the gate."""
        return self.attempt is not None and (self.attempt.heartbeats / gate.READY).exists()

    def tick(self, view: Observation, trains: Attempt) -> None:
        """Start the standby beside the attempt that `trains`, or look after it. Called while the run makes progress.

        OSError: it cannot be killed.
        """
        prepared = self.run.prewarm.prepared()
        if alone := prepared.get("alone"):
            self._tries = 0
            return self.drop(alone)
        attempt, limits, failed, waited = self.attempt, self.run.config.standby, "", self._waits
        may_begin = self._tries and prepared and any(b.count >= limits.steps_count for b in view.beats)
        if view.now_s < self._next_s or not (attempt or may_begin):
            return
        self._next_s, self._waits = view.now_s + LOOK_S, self.ready
        free, needed = reading.available_bytes(), limits.reserve_bytes // 2
        if attempt is None:  # more than what it may not fall below later
            needed = limits.reserve_bytes + min(platform.private_bytes(*trains.tree.members), AT_MOST_BYTES)
        if free is not None and free < needed:
            self.drop(f"memory is short: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed")
        elif attempt is None:
            failed = self._begin(trains.record.number + 1, prepared["text"])
        elif not attempt.script_alive():
            lines = read_text(attempt.heartbeats / OUTPUT).strip().splitlines()
            failed = f"it ended by itself: {lines[-1][:300] if lines else 'without a message'}"
        elif not self.ready and view.now_s - attempt.record.started_s >= limits.start_s:
            failed = f"its imports took more than {limits.start_s:g} s"
        if failed:  # tried again at the next look, a few times in a row
            self._tries -= 1
            self.drop(failed if self._tries else f"{failed} ({limits.tries_count} times)")
        # Short of memory, the kernel kills it and not the training. While it waits, its processes stay what they are.
        if attempt is None or not waited:
            platform.kill_first(self.pids())

    def _begin(self, number: int, text: str) -> str:
        """Start it; "" or why it cannot be started."""
        try:
            reader, writer = os.pipe()
            self._gate = open(writer, "wb", buffering=0)  # noqa: SIM115 - until it is released or dropped
            with open(reader, "rb"):
                self._version = reading.commit(ROOT)  # that it imports
                self.attempt = attempt = Attempt.prepare(self.run.folder, number)
                script = attempt.heartbeats / f"train.attempt-{number}.sh"
                script.write_text(text, encoding="utf-8", errors="surrogateescape")
                stand_in = str(self.run.folder.folder / STAND_IN)
                variables = {gate.VARIABLE: str(reader), gate.STAND_IN: stand_in, gate.NO_CONTEXT: "1"}
                attempt.start(script, attempt.heartbeats / OUTPUT, variables, (*self.run.queue.handles(), reader))
            return ""
        except OSError as error:
            return f"it cannot be started: {error.strerror or error}"

    def release(self, script: Path, resume: Path | None, more: Mapping[str, str]) -> Attempt | None:
        """Let it train if it was started for exactly this script; else, and where it does not answer, it is killed.

        Its imports are waited for: a cold start would begin them only now. more: of its environment.

        OSError: it cannot be killed. What `run.pause` raises leaves here.
        """
        attempt, limits, folder = self.attempt, self.run.config.standby, self.run.folder.folder
        self._next_s = 0.0  # the next one need not wait
        if attempt is None:
            return None
        waits_for, reason = with_state(read_text(attempt.heartbeats / script.name), folder, resume).rstrip(), ""
        if resume is None:
            reason = "the training starts over"
        elif self._version != reading.commit(ROOT):  # later imports would not fit
            reason = "Hangproof was updated"
        elif not waits_for or waits_for != read_text(script).rstrip():
            reason = "the failure changes the script"
        else:
            until_s = time.monotonic() + limits.imports_s
            while not self.ready and attempt.script_alive() and time.monotonic() < until_s:
                self.run.pause(0.05)
            if not (self.ready and self.pids()):
                reason = "it has not imported everything yet"
        if not reason:
            attempt.begins_now()
            self.run.record(attempt)
            until_s, passed = time.monotonic() + limits.gate_s, attempt.heartbeats / gate.PASSED
            with contextlib.suppress(OSError):  # it died a moment ago
                attempt.announce(script, resume, before=read_text(attempt.heartbeats / OUTPUT))
                platform.kill_first(attempt.tree.members, False)
                environment, log = {**more, "HANGPROOF_RESUME": str(resume)}, folder / TRAINING_LOG
                self._gate.write(message(str(resume), environment, str(log)))
                while not passed.exists() and time.monotonic() < until_s:
                    platform.sleep(0.02)
            if passed.exists():
                self.attempt, self._tries = None, limits.tries_count
                self._gate.close()
                return attempt
            reason = f"it did not go on within {limits.gate_s:g} s"
        self.drop(reason)
        return None

    def drop(self, reason: str) -> None:
        """Kill the standby, if there is one: for this reason there is none. OSError: it cannot be killed."""
        attempt, self.attempt, self.off = self.attempt, None, reason
        self._gate.close()
        if attempt is not None:
            self.run.folder.log(f"the standby attempt is dropped: {reason}")
            killed = attempt.kill(0.0, self.run.config.end.kill_wait_s)
            attempt.close()
            if killed.survivors:
                raise OSError("the standby attempt cannot be killed")

    def close(self) -> None:
        """The run has ended, or its monitor does."""
        self._tries = 0
        with contextlib.suppress(OSError):
            self.drop("the run has ended" if self.attempt else self.off)

    def pids(self) -> set[int]:
        """Its processes: none of them is a leftover."""
        return set(self.attempt.tree.refresh()) if self.attempt is not None else set()

    def summary(self) -> dict[str, Any]:
        """For status.json: "state" (none, starting, ready), "pid", "memory_bytes", "reason" (why there is none)."""
        if self.attempt is None:
            return {"state": "none", "pid": None, "memory_bytes": 0, "reason": self.off}
        state, used = "ready" if self.ready else "starting", platform.private_bytes(*self.attempt.tree.members)
        return {"state": state, "pid": self.attempt.pid, "memory_bytes": used, "reason": ""}


# ---- the subprocess ----


def respond(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What the subprocess answers. The request has "want", and for most of them "changes", the mitigations in force.

    script: writes attempt "number", which resumes "resume"; "was": the mitigations when that was saved; {"script",
    "save_dir", "compatible"}. text: prints it; {"text", "save_dir", "alone": why two must not run at once}. change: the
    first mitigation of "ladder" that changes something, with "keeps" one that resumes the states; {"name", "sentence",
    "patch"} or {}, and "refused". problems: what prevents a start; {"problems", "notes"}.

    Raises:
        runs.RunError, presets.PresetError: the spec or a mitigation is wrong.
    """
    import runs
    from runs import mitigate, staging
    from runs.scripts import rendered, write_inputs

    want, notes = request["want"], list[str]()
    changes: list[Change] = request.get("changes", [])
    resume = Path(request["resume"]) if request.get("resume") else None
    patches = {change["name"]: change["patch"] for change in changes if "patch" in change}

    def changed(job: Any, names: list[str]) -> Any:
        for name in names:  # a change of an earlier version has no patch
            job = job.patched(patches[name] if name in patches else mitigate.change(job, name)[0])
        return job

    original = runs.pinned(folder, notes.append, restarts=want != "problems")
    job = changed(original, [change["name"] for change in changes])
    if want == "script":
        compatible = mitigate.same_state(changed(original, request["was"]), job)
        path = runs.write_attempt(folder, job, request["number"], resume if compatible else None)
        return {"script": str(path), "save_dir": job.save_dir, "compatible": compatible}
    if want == "text":
        unknown = "the script was edited, and what it does before the training is not known"
        alone = unknown if "edited" in job.spec else "the script copies its results when it ends" * bool(job.save_dir)
        return {"text": rendered(job, resume), "save_dir": job.save_dir, "alone": alone}
    if want == "change":
        refused = list[str]()
        for name in request["ladder"]:
            patch, sentence = mitigate.change(job, name)
            if patch and (mitigate.same_state(job, job.patched(patch)) or not request.get("keeps")):
                return {"name": name, "sentence": sentence, "patch": patch, "refused": refused}
            if reason := mitigate.refusal(job.run_spec(), name):
                refused.append(f"{name.replace('_', ' ')}: {reason}")
        return {"refused": refused}
    if spec_edited(folder):
        how = f"stop the run, write it again with `python -m runs render {folder.name}`, and start it"
        notes.append(f"run.toml was edited; every attempt still runs job.json. To change what is trained, {how}")
    with contextlib.suppress(OSError):  # made while the disk can be written, for the mitigation `save_local`
        staging.identity(folder)
    edited = write_inputs(folder, job)
    if edited and not list(folder.glob("train.attempt-*")):  # later ones write them with their changes
        notes.append(f"{' and '.join(edited)} said something else; written again, as job.json has it")
    try:
        problems = [fault.message for fault in runs.problems(job.run_spec(), ask=True)]
    except runs.RunError as error:  # the job says all that an attempt needs
        problems = []
        notes.append(f"nothing is checked before the start, because this version refuses the run's spec: {error}")
    if (name := original.slug) != folder.name:  # its LoRA would not be found at the end
        again = f"change its name in run.toml and make it again with `python -m runs render {folder.name}`"
        problems.append(
            f"the folder {folder.name} has the run {name}: rename the folder to {name}, or, of a copy, {again}"
        )
    places = {"output_dir": original.save_dir or str(folder), "output_name": name, "save_model_as": "safetensors"}
    for flag, right in places.items():  # nor would it, where a person edited these in the script
        given = str(original.flags.get(flag) or right)
        if given != right and os.path.realpath(ROOT / given) != os.path.realpath(ROOT / right):
            problems.append(f"{SCRIPT} has --{flag} {given}, where the run's files are not found; set it to {right}")
    return {"problems": problems, "notes": notes}


def main() -> int:
    """The subprocess. Exit codes, with the reason on standard error: 1 a wrong spec or mitigation; 3 a disk error."""
    from presets import PresetError
    from runs import RunError

    request = json.load(sys.stdin)
    try:
        print(json.dumps(respond(Path(sys.argv[1]), request)))
    except (RunError, PresetError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 3 if request["want"] == "script" and isinstance(error.__cause__, OSError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
