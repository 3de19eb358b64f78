"""The tab "Doctor": is this machine ready, what is left over, what does a process wait for, and is a script known to hang?

The lines are those of `./start.sh doctor`, from the same command. It runs in the background (ui/jobs.py), so the server imports no
torch, waits for no driver, and a reload shows what was found. One call of the script serves the whole tab: the page's config stays
small. Each value from the browser is checked here.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs.files import RunError
from runs.paths import data_root
from ui import jobs, scripts
from ui.dataset.images import OUT_OF_DATE

if TYPE_CHECKING:
    import gradio as gr

FOLDER = ".doctor"  # in the data folder: what the commands printed
QUICK_S, FULL_S, EXPLAIN_S = 600.0, 3600.0, 60.0
VERDICTS = {"ok": "OK", "note": "Warning", "failed": "Problem"}


def _folder() -> Path:
    folder = data_root() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def examine(full: bool = False) -> None:
    """Look at the machine in the background; full: with the self-tests of kohya's trainers, about a minute each.

    Raises:
        RunError: it looks already, or cannot be started.
    """
    words = ["doctor", "--lines", *([] if full else ["--quick"])]
    jobs.start(_folder(), "doctor", words, FULL_S if full else QUICK_S)


def report() -> dict[str, Any]:
    """What the last examination found.

    Returns:
        {"state": none, running, done, failed (it found a problem), cancelled or lost, "seconds", "findings": [{"name", "status": ok,
        note or failed, "verdict": OK, Warning or Problem, "text", "action"}], "text": the report to copy, "error"}
    """
    import doctor_tools

    job = jobs.read(_folder(), "doctor")
    if job is None:
        return {"state": "none", "seconds": 0, "findings": [], "text": "", "error": ""}
    _, _, errors = jobs.output(_folder(), "doctor")
    # jobs.output takes a last line that is JSON for the command's result; here each line is one.
    lines = (_folder() / jobs.FOLDER / "doctor.out").read_text(encoding="utf-8", errors="replace").splitlines()
    findings = [found for line in lines if (found := _finding(line)) is not None]
    text = "\n".join(
        f"{one['verdict']:<8} {one['name']}: {one['text']}" + (f"\n{'':<8} → {one['action']}" if one["action"] else "")
        for one in findings
    )
    failed = job.state == "failed" and not any(one["status"] == "failed" for one in findings)
    return {
        "state": job.state, "seconds": round(job.seconds), "findings": findings,
        "text": doctor_tools.without_secrets(text),
        "error": (errors.strip().splitlines() or ["It ended without a result."])[-1][:500] if failed else "",
    }  # fmt: skip


def _finding(line: str) -> dict[str, str] | None:
    try:
        values = json.loads(line)
        status = values["status"]
        return {
            **{key: str(values[key]) for key in ("name", "text", "action")},
            "status": status if status in VERDICTS else "note", "verdict": VERDICTS.get(status, "Warning"),
        }  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None


def explain(pid: object) -> dict[str, Any]:
    """What a process does and waits for, with the stack of every thread where it can be had. Takes about three seconds.

    Returns:
        {"pid", "name", "lines": sentences, "stacks": {pid: text}, "note": why there are none, "signs": why it looks stuck, "cause", "advice"}

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
    return {
        "pid": process.pid, "name": process.name, "lines": answer["process"]["lines"],
        "stacks": {str(key): str(text)[:20_000] for key, text in stacks.items()},
        "note": "" if stacks else "Its stacks could not be read in time. Try again when the machine is less busy.",
        "signs": [*signals.get("stuck", ()), *signals.get("slow", ())],
        "cause": answer.get("explanation") or "", "advice": answer.get("advice") or "",
    }  # fmt: skip


# Calls of the script ------------------------------------------------------------------------------------------------------


def doctor(data: dict[str, Any]) -> dict[str, Any]:
    """{"do": what, …}: the answer of one of the actions below, with "ok"; or {"ok": False, "error"}."""
    given = data if isinstance(data, dict) else {}
    action = ACTIONS.get(given.get("do", "")) if isinstance(given.get("do", ""), str) else None
    try:
        if action is None:
            raise RunError(OUT_OF_DATE)
        return {"ok": True, **action(given)}
    except RunError as error:
        return {"ok": False, "error": str(error)}


def _examine(given: dict[str, Any]) -> dict[str, Any]:
    known = jobs.read(_folder(), "doctor")
    if known is None or known.state != "running":
        examine(given.get("full") is True)
    return report()


def _cancel(_: dict[str, Any]) -> dict[str, Any]:
    jobs.cancel(_folder(), "doctor")
    return report()


def _orphans(_: dict[str, Any]) -> dict[str, Any]:
    import doctor_tools

    return {"orphans": doctor_tools.orphans()}


def _end(given: dict[str, Any]) -> dict[str, Any]:
    import doctor_tools

    return {"text": doctor_tools.end_orphan(given.get("pid"), given.get("start")), "orphans": doctor_tools.orphans()}


def _lint(given: dict[str, Any]) -> dict[str, Any]:
    import doctor_tools

    return doctor_tools.lint_script(given.get("text"), given.get("name", "train.sh"))


def _drills(_: dict[str, Any]) -> dict[str, Any]:
    from ui.run import drill

    return {"drills": drill.choices()}


def _drill(given: dict[str, Any]) -> dict[str, Any]:
    from ui.run import drill

    kind = given.get("kind")
    return {"run": drill.start(kind if isinstance(kind, str) else "")}


ACTIONS = {
    "show": lambda _: report(),
    "look": _examine,
    "cancel": _cancel,
    "orphans": _orphans,
    "end": _end,
    "explain": lambda given: explain(given.get("pid")),
    "lint": _lint,
    "drills": _drills,
    "drill": _drill,
}


def build() -> "gr.HTML":
    """The component. Its script asks for what it shows while its tab is open."""
    return scripts.component("doctor_page", "doctor", doctor)
