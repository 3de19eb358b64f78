"""What a person asks of a run under way: sample images, a checkpoint, a pause, and to go on.

Sample images and checkpoints are requested of the training itself (guards/step_requests.py), between two steps; a pause
is a stop of the monitor's with another name for its end. The functions with a folder are also those of the page.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from guards import step_requests
from monitor.cli import commands
from monitor.run_folder import EVENTS, MonitorError, RunFolder, find
from monitor.state import FINAL, State, read_status
from runs.metrics_lines import json_objects

EVENT_BYTES = 256 << 10  # the end of events.jsonl, in which an answer is looked for
POLL_S = 0.2


def request(folder: Path, kind: str) -> str:
    """Request sample images ("sample") or a checkpoint with its LoRA ("save") of a run under way; the request's id.

    It is done once the current step is complete; one that waits already is returned.

    Raises:
        MonitorError: the run is not under way, is ending, or makes no sample images.
        OSError: the request cannot be written.
    """
    status = read_status(folder)
    if status is None or not status["alive"] or status["state"] in FINAL:
        state = status["state"] if status else "never started"
        how = f"start it first: python -m monitor start {folder.name}"
        raise MonitorError(
            f"{folder.name}: {step_requests.KINDS[kind]} can be made while it trains, but it is {state}; {how}"
        )
    if status["state"] == State.STOPPING:
        raise MonitorError(f"{folder.name} is stopping: {status['message']}")
    spec = RunFolder(folder).spec
    if kind == "sample" and spec and not (folder / "sample_prompts.txt").read_text(encoding="utf-8").strip():
        raise MonitorError(
            f"{folder.name} has no prompts for sample images; add prompts to run.toml, write it again with "
            f"`python -m runs render {folder.name}`, then start it again"
        )
    return step_requests.ask(folder, kind)


def outcome(folder: Path, name: str) -> dict[str, Any] | None:
    """The event that answers the request with this id: "done", "message" and "step"; None while there is none."""
    try:
        with open(folder / EVENTS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - EVENT_BYTES))
            return step_requests.answer(json_objects(file.read(EVENT_BYTES)), name)
    except OSError:
        return None


def pause(folder: Path) -> None:
    """Ask the run's monitor to save a checkpoint and end the training, so that its GPU is free; `resume` continues it.

    Raises:
        MonitorError: nothing of the run is under way.
        OSError: the request cannot be written.
    """
    commands.ask_to_end(folder, {"pause": True})


# ---- the commands ----


def run(args: argparse.Namespace) -> commands.Answer:
    """`monitor sample|save|pause|resume RUN`."""
    folder = find(args.run)
    if args.command == "resume":
        return commands.start(args)
    if args.command == "pause":
        return _pause(folder, args)
    name = request(folder, args.command)
    print(f"{folder.name}: {step_requests.KINDS[args.command]} requested; it is made when the current step is complete")
    until, found = time.monotonic() + args.wait, None
    while (found := outcome(folder, name)) is None and time.monotonic() < until:
        time.sleep(POLL_S)
    if found is not None:
        print(f"{folder.name}: {found.get('message')}")
    code = 0 if not args.wait or (found or {}).get("done") is True else 1
    return code, {"folder": str(folder), "id": name, "outcome": found}


def _pause(folder: Path, args: argparse.Namespace) -> commands.Answer:
    status = read_status(folder)
    if status is not None and status["state"] == State.PAUSED and not status["alive"]:
        print(f"{folder.name}: {status['reason']} already")
    else:
        pause(folder)
        print(f"{folder.name}: pause requested")
    return commands.wait_for_end(folder, args)
