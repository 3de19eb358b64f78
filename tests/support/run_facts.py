"""What the files and the processes of a supervised run say."""

import json
from pathlib import Path

import psutil
from toys import undisturbed

from monitor.process import spawned


def members(folder: Path) -> list[int]:
    """Every process of this run's training, launcher and shell included."""
    return [process.pid for process in spawned.with_environment(spawned.RUN, str(folder))]


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text(encoding="utf-8"))


def incidents(folder: Path) -> list[dict]:
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("incidents/*/incident.json"))]


def report(folder: Path, number: int = 1) -> str:
    return (folder / "incidents" / f"{number:04d}" / "report.md").read_text(encoding="utf-8")


def weight(folder: Path) -> str:
    """The result of the run: what an undisturbed one would have, or not."""
    header = (folder / f"{folder.name}.safetensors").read_bytes()[8:-4]
    return json.loads(header)["__metadata__"]["weight"]


def completed(folder: Path, restarts: int = 0, steps: int = 50) -> dict:
    """Assert that the run completed with the result of an undisturbed one, and left no process; its status."""
    now = status(folder)
    assert (now["state"], now["restarts"], now["step"]) == ("completed", restarts, steps), now
    assert weight(folder) == undisturbed(steps)
    assert trainers(folder) == []
    return now


def step_of(folder: Path) -> int:
    return status(folder).get("step", 0)


def trainers(folder: Path) -> list[int]:
    """Process numbers of living toy trainers of this run."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        command = process.info["cmdline"] or []
        if command[-1:] == ["toy.py"] and process.info["cwd"] == str(folder) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found
