"""An attempt's script: the run's job (`job.json`) with the changes of the ladder, rendered by a subprocess.

`python -m monitor.resume.script FOLDER …` is that subprocess, because a change needs the spec and so pydantic (20 MB),
which the monitor does without; its last line is JSON. The rest of this file is the monitor's side, and the prewarming:
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
from monitor.process.subjob import Subjob, python
from monitor.resume.checkpoints import Verifier, newest
from monitor.run_folder import JOB, SCRIPT, MonitorError, RunFolder
from monitor.state import spec_edited

Pause = Callable[[float], None]
Change = dict[str, Any]  # a mitigation: {"name", "sentence", "patch"}; the patch is of the job (runs/job.py)
STAND_IN = "HANGPROOF-NEWEST-state"  # characters that no shell quoting changes
REST_COUNT = 25.0  # rest this many times as long as a job took
REST_MAX_S = 60.0
EVERY_S = 1.0


@dataclass(frozen=True)
class Rendered:
    """An attempt's script. `compatible`: the changed run can resume the state that it was to resume from."""

    script: Path
    save_dir: str = ""
    compatible: bool = True


def render(
    folder: RunFolder,
    number: int,
    resume: Path | None,
    changes: list[Change],
    changes_at_save: list[str],
    timeout_s: float,
    pause: Pause,
) -> Rendered:
    """Write the script of attempt `number`. The user's own script is always itself; its environment says where to resume.

    Raises:
        MonitorError: it could not be rendered.
    """
    if folder.foreign or (number == 1 and resume is None and not changes):
        return Rendered(folder.folder / SCRIPT, str(folder.spec.get("save_dir", "")))
    arguments = ["--attempt", str(number), *(["--resume", str(resume)] if resume else [])]
    answer = _ask(folder, [*arguments, *_changed(changes), *_flags("--was", changes_at_save)], timeout_s, pause)
    return Rendered(Path(answer["script"]), answer["save_dir"], answer["compatible"])


def start_problems(folder: RunFolder, timeout_s: float, pause: Pause) -> list[str]:
    """What prevents a start (a missing model file, no checkout), each as a sentence; [] for the user's own script.

    Raises:
        MonitorError: the spec itself is wrong.
    """
    if folder.foreign:
        return []
    answer = _ask(folder, ["--problems"], timeout_s, pause)
    for note in answer["notes"]:
        folder.event("job", note)
    problems: list[str] = answer["problems"]
    return problems


def next_change(
    folder: RunFolder, ladder: Sequence[str], changes: list[Change], timeout_s: float, pause: Pause
) -> Change:
    """The first mitigation of `ladder` that changes anything beyond `changes`; {} for none.

    One that cannot change a script that the user edited is left out, and an event says why.

    Raises:
        MonitorError: the spec is wrong.
    """
    left = [name for name in ladder if name not in [c["name"] for c in changes]]
    if folder.foreign or not left:
        return {}
    answer = _ask(folder, ["--next", *left, *_changed(changes)], timeout_s, pause)
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


def _flags(flag: str, names: list[str]) -> list[str]:
    return [word for name in names for word in (flag, name)]


def _changed(changes: list[Change]) -> list[str]:
    return _flags("--change", [json.dumps(change) for change in changes])


def _job(folder: RunFolder, arguments: list[str], timeout_s: float) -> Subjob:
    return Subjob(python("monitor.resume.script", str(folder.folder), *arguments), timeout_s)


def _ask(folder: RunFolder, arguments: list[str], timeout_s: float, pause: Pause) -> dict[str, Any]:
    """What the subprocess answers. MonitorError: the spec is wrong. OSError: the subprocess could not do its work."""
    job = _job(folder, arguments, timeout_s)
    job.wait(pause)
    answer = job.answer()
    if answer is None and job.code != 1:
        raise OSError(job.error or "rendering the script gave no result")
    if answer is None:
        raise MonitorError(job.error.removeprefix("render: ") or "rendering the script gave no result")
    return answer


class Prewarm:
    """Prepares the next restart of one run while it is healthy, one job at a time."""

    def __init__(self, folder: RunFolder, verifier: Verifier, timeout_s: float):
        self.folder = folder
        self.verifier = verifier
        self.timeout_s = timeout_s
        self._rendering: tuple[list[object], Subjob] | None = None
        self._template: tuple[list[object], dict[str, Any]] | None = None  # (what it depends on, the result)
        self._next_s = 0.0
        self._verifying = False

    def tick(self, now_s: float, folders: list[Path], changes: list[Change]) -> None:
        """Collect what is ready and start what is missing. Called while the run makes progress."""
        self.verifier.poll()
        if self._rendering is not None and self._rendering[1].done():
            (depends_on, job), self._rendering = self._rendering, None
            answer = job.answer()  # without one the restart renders it and reports what is wrong
            self._template = (depends_on, answer) if answer else self._template
            self._next_s = now_s + (min(REST_COUNT * job.took_s, REST_MAX_S) if answer else REST_MAX_S)
        elif self._verifying and not self.verifier.busy():
            self._verifying = False
            self._next_s = now_s + min(REST_COUNT * self.verifier.took_s, REST_MAX_S)
        if now_s < self._next_s or self._rendering is not None or self.verifier.busy():
            return
        self._next_s = now_s + EVERY_S
        state = newest(folders)
        if not self.folder.foreign and not platform.WINDOWS and self._fresh(changes) is None:
            arguments = ["--text", "--resume", str(self.folder.folder / STAND_IN), *_changed(changes)]
            self._rendering = self._depends_on(changes), _job(self.folder, arguments, self.timeout_s)
        elif state is not None and not self.verifier.known(state):
            self.verifier.begin(state)
            self._verifying = True

    def text(self, changes: list[Change]) -> str:
        """The prepared script with the stand-in; "" when it is missing or stale."""
        found = self._fresh(changes)
        return str(found["text"]) if found else ""

    def script(
        self, number: int, resume: Path | None, changes: list[Change], changes_at_save: list[str]
    ) -> Rendered | None:
        """The script of attempt `number` from the prepared text; None when that is missing or stale."""
        found = self._fresh(changes)
        same = changes_at_save == [c["name"] for c in changes]
        if found is None or resume is None or not same:
            return None
        path = self.folder.folder / f"train.attempt-{number}.sh"
        # A path with characters that the shell's quoting changes is not found in the text; then nothing is replaced.
        text = found["text"].replace(str(self.folder.folder / STAND_IN), str(resume))
        if STAND_IN in text or not self.folder.replace(path.name, text.rstrip("\n")):
            return None
        path.chmod(0o755)
        return Rendered(path, found["save_dir"])

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


def main(argv: list[str] | None = None) -> int:
    """The subprocess. Exit code 1 with the reason on standard error when the spec or a mitigation is wrong.

    `--attempt N` writes the script: {"script", "save_dir", "compatible"}; `--text` prints it: {"text", "save_dir"};
    `--next NAMES` finds the first mitigation that changes something: {"name", "sentence", "patch"} or {}; `--problems`:
    {"problems", "notes"}.
    """
    import argparse  # not in the monitor, which imports this file, too

    parser = argparse.ArgumentParser(prog="python -m monitor.resume.script")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--change", action="append", default=[], help="a mitigation in force, as JSON")
    parser.add_argument("--was", action="append", default=[], help="one in force when the states were saved")
    parser.add_argument("--problems", action="store_true", help="what prevents a start")
    parser.add_argument("--text", action="store_true", help="the script's text")
    parser.add_argument("--next", nargs="*", default=None, metavar="MITIGATION")
    args = parser.parse_args(argv)
    import runs
    from presets import PresetError
    from runs import mitigate
    from runs.pin import write_inputs
    from runs.scripts import rendered

    notes: list[str] = []
    changes: list[Change] = [json.loads(text) for text in args.change]
    patches = {change["name"]: change["patch"] for change in changes if "patch" in change}

    def changed(job: Any, names: list[str]) -> Any:
        for name in names:  # a change of an earlier version has no patch
            job = job.patched(patches[name] if name in patches else mitigate.change(job, name)[0])
        return job

    try:
        original = runs.pinned(args.folder, notes.append, restarts=not args.problems)
        job = changed(original, [change["name"] for change in changes])
        answer: dict[str, Any]
        if args.next is not None:
            answer, refused = {}, []
            for name in args.next:
                patch, sentence = mitigate.change(job, name)
                if patch:
                    answer = {"name": name, "sentence": sentence, "patch": patch}
                    break
                if reason := mitigate.refusal(job.run_spec(), name):
                    refused.append(f"{name.replace('_', ' ')}: {reason}")
            answer |= {"refused": refused} if refused else {}
        elif args.problems:
            edited = write_inputs(args.folder, job)
            if edited and not list(args.folder.glob("train.attempt-*")):  # later ones write them with their changes
                notes.append(f"{' and '.join(edited)} said something else; written again, as job.json has it")
            try:
                problems = [fault.message for fault in runs.problems(job.run_spec(), ask=True)]
            except runs.RunError as error:  # the job says all that an attempt needs
                problems = []
                notes.append(
                    f"nothing is checked before the start, because this version refuses the run's spec: {error}"
                )
            answer = {"problems": problems, "notes": notes}
        elif args.text:
            answer = {"text": rendered(job, args.resume), "save_dir": job.save_dir}
        else:
            compatible = mitigate.same_state(changed(original, args.was), job)
            path = runs.write_attempt(args.folder, job, args.attempt, args.resume if compatible else None)
            answer = {"script": str(path), "save_dir": job.save_dir, "compatible": compatible}
    except (runs.RunError, PresetError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
