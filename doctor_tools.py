"""Tools of the doctor: orphaned trainers and how to end one, lint of a pasted script, the report without the user's paths.

Plain functions for the page and the API; each checks its arguments.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from doctor_machine import ask
from monitor.process import platform, spawned
from runs.files import RunError

SCRIPT_BYTES = 200_000
LINT_S = 30.0
END_S = 10.0
SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{10,}|gh[pousr]_[A-Za-z0-9]{10,}|rpa_[A-Za-z0-9]{10,}|AKIA[A-Z0-9]{12,})"
)
JUDGE = """
import json, pathlib, sys, doctor_tools
text = sys.stdin.buffer.read().decode("utf-8", "replace")
print(json.dumps(doctor_tools.judge_script(text, sys.argv[1], pathlib.Path(sys.argv[2]))))
"""
PASSWORD = re.compile(r"(://)[^/\s@]+@")


def orphans() -> list[dict[str, Any]]:
    """Trainers of ours that run although no monitor watches them, oldest first.

    Returns:
        [{"pid", "start", "name", "run": the folder's name, "age_s", "memory_bytes"}]; [] where nothing is left over.
    """
    now, found = platform.now(), []
    for process, folder in spawned.unwatched():
        found.append({
            "pid": process.pid, "start": process.start, "name": process.name, "run": folder.name,
            "age_s": round(max(0.0, now.boot_s - _started_s(process)), 1),
            "memory_bytes": platform.private_bytes(process.pid),
        })  # fmt: skip
    return sorted(found, key=lambda one: (-one["age_s"], one["pid"]))


def _started_s(process: platform.ProcessInfo) -> float:
    """When a process started, in seconds since boot."""
    if platform.LINUX:
        return process.start / os.sysconf("SC_CLK_TCK")
    return process.start - time.time() + platform.now().boot_s


def end_orphan(pid: object, start: object) -> str:
    """End one process that `orphans` lists, with those that it started; returns what came of it.

    Raises RunError: it is none of them (any more).
    """
    gone = RunError("This process is not an orphan any more; look again")
    if isinstance(pid, bool) or not isinstance(pid, int) or not isinstance(start, int | float):
        raise gone
    listed = next((one for one in orphans() if one["pid"] == pid and one["start"] == start), None)
    if listed is None:
        raise gone
    process = platform.process_info(pid)
    if process is not None and process.start == start:
        left = spawned.kill(spawned.Tree("", members={pid: process}), END_S / 2, END_S / 2).survivors
        if left:
            raise RunError(
                f"Process {left[0].pid} does not end: it is stuck in the kernel. Restart the machine to remove it"
            )
    return f"Process {pid} ({listed['name']} of {listed['run']}) was ended"


def lint_script(text: object, name: object = "train.sh") -> dict[str, Any]:
    """What lint finds in a pasted script, and the script with what can be fixed.

    A process of its own judges it, within a limit. It runs nothing of the script. A config file that the script names is not
    changed, so such a script is not fixed here.

    Returns:
        {"findings": [{"id", "level", "line", "why", "fix", "fixable"}], "fixed": the script or "", "changes": sentences, "note"}

    Raises RunError: too long, no text, no training command, or no answer.
    """
    if not isinstance(text, str) or not isinstance(name, str) or not re.fullmatch(r"train\.(sh|bat|ps1)", name):
        raise RunError("Paste the text of a script, and choose bash, batch or PowerShell")
    if not text.strip():
        raise RunError("Paste a training script first, such as the train.sh of kohya_ss or FluxGym")
    if len(text.encode("utf-8", "replace")) > SCRIPT_BYTES:
        raise RunError(f"The script is longer than {SCRIPT_BYTES // 1000} kB. Paste only the training command")
    with tempfile.TemporaryDirectory(prefix="hangproof-lint-") as folder:
        found = ask([sys.executable, "-c", JUDGE, name, folder], LINT_S, text)
    if isinstance(found, str):
        raise RunError(f"The script could not be judged: {found}. Paste only the training command")
    if found.get("error"):
        raise RunError(str(found["error"]))
    return found


def judge_script(text: str, name: str, base: Path) -> dict[str, Any]:
    """The answer of `lint_script`, without its limit; {"error"} where there is no training command."""
    from dataclasses import asdict

    import presets
    from presets.fix import fix
    from presets.lint import lint
    from presets.training import trainings

    try:
        commands = trainings(text, name, base)
        if not commands:
            return {
                "error": "There is no training command in this script. It must start one of kohya's scripts, such as "
                "flux_train_network.py, or `-m trainer`"
            }
        findings, note, fixed, changes = lint(text, name, base), "", "", []
        if any(command.config for command in commands):
            note = "The script names a config file. Fix the script with `python -m presets lint --fix SCRIPT`, and the file by hand."
        elif findings:
            result = fix(text, name, base)
            fixed = result.text if result.text != text else ""
            changes = [change.text for _, _, change in result.changes]
        return {"findings": [asdict(finding) for finding in findings], "fixed": fixed, "changes": changes, "note": note}
    except presets.PresetError as error:
        return {"error": str(error)}


def without_secrets(text: str) -> str:
    """A text for others to read: no home folder, no user in an address, no token."""
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    return SECRET.sub("(hidden)", PASSWORD.sub(r"\1", text))
