"""What a container runs (`python -m launch serve`): continue interrupted runs, serve the page, stop a pod that is done.

One loop over plain facts: which runs exist, in which state, and whether their monitors live. It trains and decides
nothing about a run, and the monitor knows nothing of clouds. SIGTERM (docker stop, a host that is taken away) goes to
every monitor, which saves a checkpoint within `end.preempt_total_s`; the runs are then *preempted*, and the next start
continues them.

Variables, all optional; the files of `python -m launch docker|runpod` set them:
    HANGPROOF_START_RUN    the run to fetch from its store and to train; HANGPROOF_START_STORE: that store
    HANGPROOF_STOP_POD     1: stop the rented machine when nothing is left to train. After a stop by the user, who may
                           start the next run, it waits half an hour; with "always" it does not
    HANGPROOF_STOP_AFTER_S seconds from the end of the last run to the stop: time to start the next one (default: 60)
    HANGPROOF_AUTH         USER:PASSWORD of the page. Without it the page answers inside the container only
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launch import rent
from launch.common import LaunchError
from monitor import config
from monitor.process.platform import LOCK, is_held
from monitor.process.spawned import python
from monitor.run_folder import all_folders, wake_queue
from monitor.state import FINAL, State, read_status
from runs.files import RunError
from runs.paths import ROOT, check_folders, outputs_dir, slug

POLL_S = 1.0
PAGE_PAUSE_S = 5.0  # before the page is started again
PAUSE_S, TRIES = 30.0, 20  # before the run is fetched again, and how often
HANGING, HANGING_S = 3, 900.0  # so many tries are enough once they took so long: each minute costs the full price
GRACE_S = 60.0  # from the end of the last run to the stop of the pod
IDLE_S = 1800.0  # the same where somebody may be there: after a stop, or a start with a run that had ended before
STOP_AGAIN_S = 300.0  # between two tries to stop a pod whose provider refuses
STARTED, STORE = "HANGPROOF_START_RUN", "HANGPROOF_START_STORE"
STOP_POD, STOP_AFTER = "HANGPROOF_STOP_POD", "HANGPROOF_STOP_AFTER_S"
PRIVATE = ("HANGPROOF_AUTH",)  # for the page only, not for the trainings
LEFT = {State.STOPPED, State.PAUSED}  # by the user


def observe() -> tuple[dict[str, str], set[str]]:
    """(the state of each run that was ever started, the names of those that are under way), from their status.json."""
    statuses = {folder.name: status for folder in all_folders() if (status := read_status(folder)) is not None}
    return {name: str(s.get("state")) for name, s in statuses.items()}, {n for n, s in statuses.items() if s["alive"]}


@dataclass
class Idle:
    """Since when nothing is left to train. Pure: the caller passes the time and what the runs do."""

    rule: str  # the value of HANGPROOF_STOP_POD
    grace_s: float = GRACE_S
    failed: str = ""  # what could not be started
    seen: set[str] = field(default_factory=set)  # runs that were under way since this process started
    alone_s: dict[str, float] = field(default_factory=dict)  # since when a run under way has no monitor
    since_s: float | None = None

    def reason(self, states: Mapping[str, str], under_way: AbstractSet[str], now_s: float, waiting: bool) -> str:
        """Why the pod is to be stopped now; "" for not now.

        states, under_way: what `observe` returns. waiting: a run is still being fetched or started.
        """
        # A run that was deleted does not count, nor one that the user stopped before another went on.
        gone = {name for name in self.seen if name not in states or (under_way and states[name] in LEFT)}
        self.seen = (self.seen - gone) | under_way
        ended = {name: states[name] for name in self.seen}
        self.alone_s = {n: self.alone_s.get(n, now_s) for n in ended.keys() - under_way if ended[n] not in FINAL}
        replaced = any(now_s - since_s < IDLE_S for since_s in self.alone_s.values())
        stopped = self.rule != "always" and LEFT & {*ended.values()}
        if not self.rule or waiting or under_way or replaced:
            self.since_s = None
            return ""
        self.since_s = now_s if self.since_s is None else self.since_s
        if now_s - self.since_s < (self.grace_s if (self.seen or self.failed) and not stopped else IDLE_S):
            return ""
        what = ", ".join([*(f"{name} {state}" for name, state in sorted(ended.items())), *filter(None, [self.failed])])
        return f"nothing is left to train ({what})" if what else "nothing was trained for half an hour"


class Container:
    """The processes of the container and the loop that watches them. Raises LaunchError: a variable is wrong."""

    def __init__(self, port: int, environ: Mapping[str, str] = os.environ):
        self.port, self.environ = port, dict(environ)
        self.quiet = {key: value for key, value in environ.items() if key not in PRIVATE}
        self.run_name, self.store = environ.get(STARTED, ""), environ.get(STORE, "")
        rule, after = environ.get(STOP_POD, ""), environ.get(STOP_AFTER, "")
        if rule not in ("", "0", "1", "always"):
            raise LaunchError(f"{STOP_POD}={rule}: write 1, always, or 0 for never")
        if not re.fullmatch(r"(\d+(\.\d*)?)?", after):
            raise LaunchError(f"{STOP_AFTER}={after}: write a number of seconds")
        self.idle = Idle(rule.replace("0", ""), float(after or GRACE_S))
        self.pod = rent.own_pod(environ)
        self.page: subprocess.Popen[bytes] | None = None
        self.task: subprocess.Popen[bytes] | None = None  # of `_bring`
        self.bringing = threading.Thread(target=self._bring, daemon=True)
        self.page_at_s = self.stop_at_s = 0.0
        self.resumed_s: dict[str, float] = {}  # when the monitor of a run was started again
        self.signals: list[int] = []

    def serve(self) -> int:
        """Run until SIGTERM or SIGINT. Exit code 0 when every run is saved; 1 also where no data can be written."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _frame: self.signals.append(got))
        try:
            check_folders()
        except RunError as error:
            fix = f"This is user {os.getuid()}: chown the volume, or build the image with --build-arg USER_ID=NUMBER"
            say(f"{error}. {fix}")
            if self.idle.rule and self.pod is not None:  # RunPod would start the container again, for ever
                say(rent.stop(*self.pod))
            return 1
        if self.idle.rule and self.pod is None:
            say(f"{STOP_POD} is set, but this is no pod of RunPod; the machine is not stopped")
        subprocess.run(python("monitor", "resume-all"), cwd=ROOT, env=self.quiet, check=False)
        self.bringing.start()
        while not self.signals:
            try:
                self._keep_page()
                self._look()
            except Exception:  # noqa: BLE001 - the top of the loop: a pod that nobody stops costs money
                say(traceback.format_exc())
                time.sleep(PAGE_PAUSE_S)
            time.sleep(POLL_S)
        return self.leave()

    def _keep_page(self) -> None:
        """Start the page, and start it again when it ended."""
        if self.page is not None and self.page.poll() is not None:
            say(f"the page ended with exit code {self.page.returncode}; it is started again")
            self.page, self.page_at_s = None, time.monotonic() + PAGE_PAUSE_S
        if self.page is None and time.monotonic() >= self.page_at_s:
            listen = ["--listen"] if self.environ.get("HANGPROOF_AUTH") else []
            if not listen:
                say("HANGPROOF_AUTH is not set: the page answers inside this container only; set it to USER:PASSWORD")
            command = [sys.executable, "app.py", "--no-browser", "--port", str(self.port), *listen]
            self.page = subprocess.Popen(command, cwd=ROOT, env=self.environ)

    def _bring(self) -> None:
        """Fetch the run from its store, write its script for this machine, fetch its base model, start its monitor.

        A network that fails is tried again, but not for ever: a store that hangs for a quarter of an hour.
        """
        if not self.run_name:
            return
        self.idle.failed = f"{self.run_name} cannot be started"  # also after an error that nobody expected
        known = (outputs_dir() / slug(self.run_name) / "run.toml").is_file()
        tasks = [  # its name, how often it is tried, the command
            ("fetched", TRIES, python("launch", "store", "restore", self.store, self.run_name)),
            ("prepared", TRIES, python("launch", "train", "--prepare", self.run_name)),
            ("started", 1, python("monitor", "start", self.run_name)),
        ]
        for name, tries, command in tasks[known or not self.store :]:
            began_s = time.monotonic()
            for number in range(1, tries + 1):
                self.task = subprocess.Popen(command, cwd=ROOT, env=self.quiet)
                code = self.task.wait()
                if self.signals:
                    return
                took_s = time.monotonic() - began_s
                if code == 0 or (number >= HANGING and took_s >= HANGING_S):
                    break
                time.sleep(PAUSE_S * (number < tries))
            if code:
                tried = f", tried {number} times in {took_s / 60:.0f} minutes" * (number > 1)
                self.idle.failed = f"{self.run_name} cannot be {name}{tried}"
                say(f"{self.idle.failed}; see the message above")
                return
        self.idle.failed = ""

    def _look(self) -> None:
        """Continue a run whose keeper was killed with its monitor, or gave up; stop the pod when nothing is left."""
        now_s = time.monotonic()
        reason = self.idle.reason(*observe(), now_s, self.bringing.is_alive())
        if self.idle.since_s == now_s:  # what was to start the next run may have been killed
            wake_queue(outputs_dir())
        for name, since_s in self.idle.alone_s.items():
            if now_s - max(since_s, self.resumed_s.get(name, 0.0)) >= GRACE_S:
                say(f"{name}: its monitor is gone; starting it again")
                self.resumed_s[name] = now_s
                subprocess.Popen(python("monitor", "start", name), cwd=ROOT, env=self.quiet)
        if reason and self.pod is not None and now_s >= self.stop_at_s:
            self.stop_at_s = now_s + STOP_AGAIN_S
            for line in endings(self.idle.seen):
                say(line)
            try:
                say(f"{reason}; {rent.stop(*self.pod)}")
            except LaunchError as error:
                say(f"{error}; trying again in {STOP_AGAIN_S / 60:.0f} minutes")

    def leave(self) -> int:
        """Save every run, end the page; 0, or 1 when a monitor outlives its time."""
        say("ending: each run saves a checkpoint")
        watched = [folder for folder in all_folders() if is_held(folder / LOCK)]
        for folder in watched:
            preempt(folder)
        children = [child for child in (self.page, self.task) if child is not None]
        for child in children:
            child.terminate()
        until_s = time.monotonic() + config.load().end.preempt_total_s + 5.0
        while (left := [folder.name for folder in watched if is_held(folder / LOCK)]) and time.monotonic() < until_s:
            time.sleep(0.1)
        for child in children:
            child.kill()
            child.wait()
        if left:
            say(f"not saved in time: {', '.join(left)}; the newest checkpoint is used at the next start")
        return 1 if left else 0


def preempt(folder: Path) -> None:
    """Send SIGTERM to the monitor of a run, through its keeper where that lives; nothing when it is gone."""
    status: dict[str, Any] = read_status(folder) or {}
    for key in ("keeper_pid", "monitor_pid"):
        try:
            process = psutil.Process(int(status[key]))
            if str(folder) in process.cmdline():  # the number may belong to another process by now
                process.terminate()
                return
        except (psutil.Error, KeyError, TypeError, ValueError):
            continue


def endings(names: set[str]) -> list[str]:
    """How each of these runs ended, and what it has that its store lacks, as its monitor said."""
    lines = []
    for name in sorted(names):
        status = read_status(outputs_dir() / name) or {}
        lines.append(f"{name}: {status.get('state')}: {status.get('reason') or status.get('message')}")
        if pending := (status.get("store") or {}).get("pending"):
            lines.append(f"{name}: not in the store: {pending}. It is kept on this machine's disk")
    return lines


def say(text: str) -> None:
    """Write a line to standard error, which is the container's log."""
    print(f"hangproof: {text}", file=sys.stderr, flush=True)


OPTIONS = (("--port N", 7860, "port of the page (default: 7860)"),)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Exit code 1: a run was not saved in time."""
    return Container(args.port).serve()
