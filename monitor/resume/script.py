"""An attempt's script: the run's job (`job.json`) with the changes of the ladder, rendered by a subprocess.

`python -m monitor.resume.script FOLDER` is that subprocess, because a change needs the spec and so pydantic (20 MB),
which the monitor does without: a request on its standard input, the answer on its last line, both JSON (see `respond`).
The rest of this file is the monitor's side, and the prewarming:
while the run is healthy, the newest checkpoint is verified and the next script is rendered, so that neither (half a
second each) delays a restart. The script is rendered with a stand-in for the state's name, which is known only at the
restart; another job or a new change makes it stale, and then it is rendered again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.process import platform
from monitor.process.spawned import Subjob, python
from monitor.resume.checkpoints import Verifier, newest
from monitor.run_folder import JOB, SCRIPT, MonitorError, RunFolder
from monitor.state import spec_edited

Pause = Callable[[float], None]
Change = dict[str, Any]  # a mitigation: {"name", "sentence", "patch"}; the patch is of the job (runs/job.py)
STAND_IN = "HANGPROOF-NEWEST-state"  # characters that no shell quoting changes
REST_COUNT = 25.0  # between the beginnings of two checks: this many times as long as the last one took
REST_MAX_S = 60.0
EVERY_S = 1.0


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


def next_change(
    folder: RunFolder, ladder: Sequence[str], changes: list[Change], timeout_s: float, pause: Pause
) -> Change:
    """The first mitigation of `ladder` that changes anything beyond `changes`; {} for none, and where that is not known.

    One that cannot change a script that the user edited is left out, and an event says why.
    """
    left = [name for name in ladder if name not in [c["name"] for c in changes]]
    if folder.foreign or not left:
        return {}
    try:
        answer = _ask(folder, {"want": "change", "ladder": left, "changes": changes}, timeout_s, pause)
    except (MonitorError, OSError) as error:
        folder.log(f"the run is not changed: {error}")
        return {}
    for reason in answer.pop("refused", []):
        folder.event("not_mitigated", reason)
    return answer


def report_edit(folder: RunFolder, reported: bool) -> bool:
    """Say once that run.toml was edited, which changes no attempt: all run the job. Returns whether it is."""
    edited = spec_edited(folder.folder)
    if edited and not reported:
        how = f"stop the run, write it again with `python -m runs render {folder.folder.name}`, and start it"
        folder.event("job", f"run.toml was edited; every attempt still runs job.json. To change what is trained, {how}")
    return edited


def _job(folder: RunFolder, request: dict[str, Any], timeout_s: float) -> Subjob:
    stdin = json.dumps(request, default=str).encode()
    return Subjob(python("monitor.resume.script", str(folder.folder)), timeout_s, stdin)


def _ask(folder: RunFolder, request: dict[str, Any], timeout_s: float, pause: Pause) -> dict[str, Any]:
    """What the subprocess answers. MonitorError: the spec is wrong. OSError: the subprocess could not do its work."""
    job = _job(folder, request, timeout_s)
    job.wait(pause)
    answer = job.answer()
    if answer is None and job.code != 1:
        raise OSError(job.error or "rendering the script gave no result")
    if answer is None:
        raise MonitorError(job.error.removeprefix("render: ") or "rendering the script gave no result")
    return answer


class Prewarm:
    """Renders the scripts of one run, and prepares its next restart while it is healthy, one job at a time."""

    def __init__(self, folder: RunFolder, verifier: Verifier, timeout_s: float):
        self.folder = folder
        self.verifier = verifier
        self.timeout_s = timeout_s
        self._rendering: tuple[list[object], Subjob] | None = None
        self._template: tuple[list[object], dict[str, Any]] | None = None  # (what it depends on, the result)
        self._next_s = 0.0

    def tick(self, now_s: float, folders: list[Path], changes: list[Change]) -> None:
        """Collect what is ready and start what is missing. Called while the run makes progress."""
        self.verifier.poll()
        if self._rendering is not None and self._rendering[1].done():
            (depends_on, job), self._rendering = self._rendering, None
            if answer := job.answer():
                self._template = (depends_on, answer)
            else:  # the restart renders it, and reports what is wrong
                self._next_s = now_s + REST_MAX_S
        if now_s < self._next_s or self._rendering is not None or self.verifier.busy():
            return
        self._next_s = now_s + EVERY_S
        if not self.folder.foreign and not platform.WINDOWS and self._fresh(changes) is None:
            request = {"want": "text", "resume": self.folder.folder / STAND_IN, "changes": changes}
            self._rendering = self._depends_on(changes), _job(self.folder, request, self.timeout_s)
        elif (state := newest(folders)) is not None and not self.verifier.known(state):
            self.verifier.begin(state)
            self._next_s = now_s + max(EVERY_S, min(REST_COUNT * self.verifier.took_s, REST_MAX_S))

    def text(self, changes: list[Change]) -> str:
        """The prepared script with the stand-in; "" when it is missing or stale."""
        found = self._fresh(changes)
        return str(found["text"]) if found else ""

    def render(
        self, number: int, resume: Path | None, changes: list[Change], changes_at_save: list[str], pause: Pause
    ) -> Rendered:
        """The script of attempt `number`: train.sh itself, the prepared text with the state's name, or rendered now.

        The user's own script is always itself; its environment says where to resume. MonitorError: not rendered.
        """
        folder, same = self.folder, changes_at_save == [c["name"] for c in changes]
        if folder.foreign or (number == 1 and resume is None and not changes):
            return Rendered(folder.folder / SCRIPT, str(folder.spec.get("save_dir", "")))
        if (found := self._fresh(changes)) is not None and resume is not None and same:
            path = folder.folder / f"train.attempt-{number}.sh"
            # A path with characters that the shell's quoting changes is not found in the text: nothing is replaced.
            text = found["text"].replace(str(folder.folder / STAND_IN), str(resume))
            if STAND_IN not in text and folder.replace(path.name, text.rstrip("\n")):
                path.chmod(0o755)
                return Rendered(path, found["save_dir"])
        request = {"want": "script", "number": number, "resume": resume, "changes": changes, "was": changes_at_save}
        answer = _ask(folder, request, self.timeout_s, pause)
        return Rendered(Path(answer["script"]), answer["save_dir"], answer["compatible"])

    def close(self) -> None:
        """Kill a job under way."""
        if self._rendering is not None:
            self._rendering[1].kill()

    def _depends_on(self, changes: list[Change]) -> list[object]:
        try:
            stat = os.stat(self.folder.folder / JOB)
        except OSError:
            return []
        return [stat.st_mtime_ns, stat.st_size, *(c["name"] for c in changes)]

    def _fresh(self, changes: list[Change]) -> dict[str, Any] | None:
        current = self._template is not None and self._template[0] == self._depends_on(changes)
        return self._template[1] if self._template and current else None


def respond(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What the subprocess answers. The request has "want", and for most of them "changes", the mitigations in force.

    script: writes attempt "number", which resumes "resume"; "was": the mitigations when that was saved; {"script",
    "save_dir", "compatible"}. text: prints it; {"text", "save_dir"}. change: the first mitigation of "ladder" that changes
    something; {"name", "sentence", "patch"} or {}, and "refused". problems: what prevents a start; {"problems", "notes"}.

    Raises:
        runs.RunError, presets.PresetError: the spec or a mitigation is wrong.
    """
    import runs
    from runs import mitigate
    from runs.pin import write_inputs
    from runs.scripts import rendered

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
        return {"text": rendered(job, resume), "save_dir": job.save_dir}
    if want == "change":
        refused = list[str]()
        for name in request["ladder"]:
            patch, sentence = mitigate.change(job, name)
            if patch:
                return {"name": name, "sentence": sentence, "patch": patch, "refused": refused}
            if reason := mitigate.refusal(job.run_spec(), name):
                refused.append(f"{name.replace('_', ' ')}: {reason}")
        return {"refused": refused}
    edited = write_inputs(folder, job)
    if edited and not list(folder.glob("train.attempt-*")):  # later ones write them with their changes
        notes.append(f"{' and '.join(edited)} said something else; written again, as job.json has it")
    try:
        problems = [fault.message for fault in runs.problems(job.run_spec(), ask=True)]
    except runs.RunError as error:  # the job says all that an attempt needs
        problems = []
        notes.append(f"nothing is checked before the start, because this version refuses the run's spec: {error}")
    return {"problems": problems, "notes": notes}


def main() -> int:
    """The subprocess. Exit code 1 with the reason on standard error when the spec or a mitigation is wrong."""
    from presets import PresetError
    from runs import RunError

    try:
        print(json.dumps(respond(Path(sys.argv[1]), json.load(sys.stdin))))
    except (RunError, PresetError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
