"""The commands beside `run`: start a monitor in the background, ask, stop, take up what was left."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from monitor import status as statuses
from monitor import system, tree
from monitor.attempt import Attempt
from monitor.book import nothing_left
from monitor.folder import BOOK, FINAL, LOG, STATUS, STOP, MonitorError, RunFiles, all_folders, find, read_json
from monitor.helpers import ROOT, environment, problems
from monitor.locks import LOCK, is_held
from monitor.report import PHASES, count, duration

START_S = 20.0


def start(args: argparse.Namespace) -> int:
    """Start a monitor for the run; print its process number, or that nothing is left to train."""
    folder = find(args.run)
    done = "" if is_held(folder / LOCK) else nothing_left(folder)
    answer = {"folder": str(folder), "pid": None, "already": False} if done else launch(folder)
    watched = f"{'already ' * answer['already']}watched by process {answer['pid']}"
    print(f"{folder}: {done or watched}")
    if args.json:
        print(json.dumps(answer))
    return 0


def launch(folder: Path) -> dict:
    """Start a detached monitor for `folder`: {"folder", "pid", "already"}.

    Raises:
        MonitorError: something is missing for a start, or the monitor ended at once; the message says what.
    """
    if is_held(folder / LOCK):
        known = read_json(folder / STATUS) or {}
        return {"folder": str(folder), "pid": known.get("monitor_pid"), "already": True}
    if not (read_json(folder / BOOK) or {}).get("attempt_under_way"):
        missing = problems(RunFiles(folder), START_S, time.sleep)
        if missing:
            raise MonitorError(f"{folder.name} cannot be started: {'; '.join(missing)}")
    log = folder / LOG
    before = log.stat().st_size if log.exists() else 0
    try:
        with open(log, "ab") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", "monitor", "run", "--checked", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=out,
                cwd=ROOT,
                env=environment() | {"HANGPROOF_QUIET": "1"},
                **system.detached(),
            )
    except OSError as error:
        raise MonitorError(f"{folder}: the monitor cannot be started: {error.strerror}") from error
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        known = read_json(folder / STATUS) or {}
        if known.get("monitor_pid") == popen.pid:
            return {"folder": str(folder), "pid": popen.pid, "already": False}
        if popen.poll() is not None:
            with open(log, "rb") as file:
                file.seek(before)
                lines = file.read().decode("utf-8", "replace").strip().splitlines()
            raise MonitorError(lines[-1].removeprefix("monitor: ") if lines else f"{folder}: the monitor ended at once")
        time.sleep(0.02)
    return {"folder": str(folder), "pid": popen.pid, "already": False}


def status(args: argparse.Namespace) -> int:
    """Say what one run or every run is doing."""
    folders = [find(args.run)] if args.run else all_folders()
    if args.watch:
        from monitor.screen import watch

        return watch(folders)
    found = [(folder, statuses.read(folder)) for folder in folders]
    for folder, values in found:
        print(line(folder, values))
    for text in tree.strays() if not args.run else []:
        print(text)
    if args.json:
        values = [value or {"folder": str(folder), "state": None} for folder, value in found]
        print(json.dumps(values[0] if args.run else values, ensure_ascii=False))
    return 0


def line(folder: Path, values: dict | None) -> str:
    """One run in one line."""
    if values is None:
        return f"{folder.name}: not started"
    state = values["state"] + (" (not watched: start it again)" if statuses.left_alone(values) else "")
    if values["state"] in FINAL:
        return f"{folder.name}: {state}. {values['message']}"
    steps = f"step {values['step']}" + (f" of {values['planned_steps']}" if values["planned_steps"] else "")
    phase = f" ({PHASES[values['phase']]})" if values.get("phase") else ""
    eta = f", {duration(values['eta_s'])} to go" if values.get("eta_s") else ""
    restarts = f", {count(values['restarts'], 'restart')}" if values["restarts"] else ""
    return f"{folder.name}: {state}{phase}, {steps}{eta}{restarts}" + (f". {m}" if (m := values["message"]) else "")


def stop(args: argparse.Namespace) -> int:
    """Ask the run's monitor to stop it."""
    folder = find(args.run)
    if not is_held(folder / LOCK) and not _take_up(folder):
        return 0
    temporary = folder / f".{STOP}.{os.getpid()}"
    temporary.write_text(json.dumps({"now": args.now}), encoding="utf-8")
    os.replace(temporary, folder / STOP)
    print(f"{folder.name}: asked to stop")
    until = time.monotonic() + args.wait
    while time.monotonic() < until and is_held(folder / LOCK):
        time.sleep(0.1)
    values = statuses.read(folder)
    if args.json:
        print(json.dumps({"folder": str(folder), "state": values["state"] if values else None}))
    return 0 if not args.wait or (values and values["state"] in FINAL) else 1


def _take_up(folder: Path) -> bool:
    """A run that nobody watches is to be stopped: have a living training watched again, so that it is stopped as any other.

    False: it could not be (its monitor left no record), and what lived of it was ended here.

    Raises:
        MonitorError: nothing of it runs.
    """
    left = tree.with_environment(tree.RUN, str(folder))
    if not left:
        values = statuses.read(folder)
        state = values["state"] if values else "it was never started"
        raise MonitorError(f"{folder.name}: no monitor watches it, and nothing of it runs ({state})")
    adopted = Attempt.adopt(read_json(folder / BOOK) or {})
    if adopted is not None and adopted.tree.members:
        launch(folder)
        return True
    ended = tree.end(tree.Tree("", members={p.pid: p for p in left}), 3.0, 10.0)
    if ended.left:
        raise MonitorError(f"{folder.name}: cannot be ended: pid {', '.join(str(p.pid) for p in ended.left)}")
    print(f"{folder.name}: ended {count(len(ended.killed), 'process')} that nobody watched")
    return False


def resume_all(args: argparse.Namespace) -> int:
    """Start whatever was under way when its monitor died."""
    started = []
    for folder in all_folders():
        if statuses.left_alone(statuses.read(folder)):
            answer = launch(folder)
            print(f"{folder.name}: watched by process {answer['pid']}")
            started.append(answer)
    if not started:
        print("no unfinished run")
    if args.json:
        print(json.dumps(started))
    return 0


def diagnose(args: argparse.Namespace) -> int:
    """Explain what a run or a process waits for."""
    from monitor.diagnose import diagnose as look
    from monitor.diagnose import words

    found = look(args.run)
    print(words(found))
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    return 0


def metrics(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from monitor.server import serve

    try:
        server = serve(args.port)
    except OSError as error:
        raise MonitorError(f"port {args.port} cannot be used: {error.strerror}; give another with --port") from error
    print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
    if args.json:
        print(json.dumps({"port": server.server_port}), flush=True)
    server.serve_forever()
    return 0


def notify(args: argparse.Namespace) -> int:
    """Send a message to the user's own addresses, to see that they work."""
    from monitor.notify import NotifyError, config_path, send

    try:
        sent, asked = send("test", "Hangproof", "This is what a message from your training will look like.")
    except NotifyError as error:
        raise MonitorError(str(error)) from error
    print(f"{sent} of {asked} addresses of {config_path()} took the message")
    if args.json:
        print(json.dumps({"sent": sent, "addresses": asked}))
    return 0 if sent == asked else 1
