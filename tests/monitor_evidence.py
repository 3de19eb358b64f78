"""What is found on a stuck or a dead run, made by hand: for tests of the causes, the stacks and the reports."""

from __future__ import annotations

from monitor.evidence import Evidence


def crash(log: str = "", **values) -> Evidence:
    return Evidence(kind="crash", phase=values.pop("phase", "step"), step=10, log_tail=log, **values)


def hang(stack: str = "", **values) -> Evidence:
    known = values.pop("stacks", {7: stack} if stack else {})
    return Evidence(kind="hang", phase=values.pop("phase", "step"), step=10, stacks=known, **values)


def frames(*names: str, main: bool = True) -> str:
    """A thread of a faulthandler dump with these `file.py:function` frames, innermost first."""
    lines = [f'  File "/x/{name.split(":")[0]}", line 1 in {name.split(":")[1]}' for name in names]
    return f"{'Current thread' if main else 'Thread'} 0x00007f (most recent call first):\n" + "\n".join(lines)


def rank(number: int, step: int = 5, phase: str = "step", silent: float = 9.0) -> dict:
    return {
        "rank": number, "pid": 100 + number, "phase": phase, "step": step, "done": 0, "total": 0, "note": "",
        "outcome": "running", "silent_s": silent,
    }  # fmt: skip


def proc(pid: int, state: str, trainer: bool = False, ppid: int = 1, wchan: str = "") -> dict:
    return {"pid": pid, "ppid": ppid, "name": "p", "state": state, "wchan": wchan, "cpu_s": 1.0, "trainer": trainer,
            "command": ""}  # fmt: skip
