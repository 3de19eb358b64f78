"""Endpoints of the machine: models, the examination of the tab Doctor, the demo, other machines."""

from typing import Any

import doctor_tools
import presets
from ui import doctor_page
from ui.new import try_it
from ui.run import control, drill, fleet_page

TITLE = "This machine and others"


def list_models() -> list[dict[str, Any]]:
    """The base models: key, name, trainers, licence."""
    return [
        {"key": key, "name": one["name"], "trainers": one["backends"], "licence": one["licence"], "note": one["note"]}
        for key, one in presets.models().items()
    ]


def list_tiers() -> list[dict[str, Any]]:
    """The VRAM tiers."""
    return [{"key": key, **one} for key, one in presets.tiers().items()]


def examine_machine(full: bool = False) -> dict[str, Any]:
    """Examine Python, GPU, disk and trainers in the background; `full` adds the self-tests. `machine_report` has the result."""
    doctor_page.examine(full)
    return doctor_page.report()


def machine_report() -> dict[str, Any]:
    """The last examination."""
    return doctor_page.report()


def explain_process(pid: int) -> dict[str, Any]:
    """What a process of this user does and waits for, with the stack of every thread where it can be had."""
    return doctor_page.explain(pid)


def list_orphans() -> list[dict[str, Any]]:
    """Trainers of Hangproof that no monitor watches any more: pid, start, run, age_s, memory_bytes."""
    return doctor_tools.orphans()


def end_orphan(pid: int, start: float) -> dict[str, Any]:
    """Kill one of `list_orphans`, by its pid and start. Its steps since the last checkpoint are lost."""
    return {"text": doctor_tools.end_orphan(pid, start), "orphans": doctor_tools.orphans()}


def check_script(text: str, name: str = "train.sh") -> dict[str, Any]:
    """What in a training script is known to hang or fail, and the fixed script. It is read, not run.

    name: "train.sh", "train.bat" or "train.ps1", for its shell.
    """
    return doctor_tools.lint_script(text, name)


def start_demo() -> dict[str, Any]:
    """Train the demo: a tiny generated model on example images."""
    folder = try_it.create()
    control.start(folder)
    return {"run": folder.name}


def start_drill(kind: str = "worker") -> dict[str, Any]:
    """Train the demo and freeze it on purpose, to see how the hang is detected and the run recovers."""
    return {"run": drill.start(kind)}


def list_fleet() -> list[dict[str, Any]]:
    """The runs on other machines, as their stores show them; a first call starts to read the stores."""
    return fleet_page.FLEET.snapshot() or []


def add_store(address: str) -> None:
    """Keep the address of a store, such as s3://bucket/runs, so that `list_fleet` reads it. It holds no password."""
    fleet_page.change_stores("add", address)


def remove_store(address: str) -> None:
    """Forget the address of a store; nothing in the store changes."""
    fleet_page.change_stores("remove", address)


def stop_far_run(store: str, run: str) -> None:
    """Ask the machine that trains a run to save a checkpoint and stop, through its store; `list_fleet` shows when it has."""
    fleet_page.stop_far(store, run)


ACTIONS = (
    list_models,
    list_tiers,
    examine_machine,
    machine_report,
    explain_process,
    list_orphans,
    end_orphan,
    check_script,
    start_demo,
    start_drill,
    list_fleet,
    add_store,
    remove_store,
    stop_far_run,
)
