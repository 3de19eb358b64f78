"""The durable store as the monitor sees it: a process that copies, the file that it writes, and orders to it.

Decision: the monitor opens no connection. `python -m launch store agent RUN` does all that can be slow, hang or need a
library of 80 MB; it runs at low priority, is started again whenever it ends, and costs the training nothing. It writes
`store.json` in the run's folder; the end of its standard input, which takes the monitor's orders, ends it. The lease
decides who may train (launch/store/lease.py).

A machine that dies while checkpoint N is being copied leaves the one before it in the store: a whole interval and the
time of the copy would be lost. So between two saves the monitor requests one more of the training.
"""

from __future__ import annotations

import contextlib
import enum
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from guards import step_requests
from guards.reading import json_object, read_text
from monitor import config
from monitor.process import platform
from monitor.process.spawned import helper, is_python_of, python
from monitor.run_folder import LOG, RunFolder
from runs.files import typed

STORE = "store.json"  # written by the agent
CLOSE_WAIT_S = 1.0  # for an agent that was killed
HEALTHY_S = 60.0  # an agent that ran this long was healthy: the next start waits for `restart_s` only
SAVE_SHARE = 0.02  # of a save interval: a save that takes longer is not requested between two
STALE_SHARE = 0.5  # of a part of the interval: later, the next regular save is near
RESTART_TIMES = 12  # the longest pause between two starts, as a multiple of `restart_s`


class LeaseState(enum.StrEnum):
    """What the agent says of the lease."""

    CONNECTING = "connecting"  # nothing is known yet, or the store cannot be reached
    WAITING = "waiting"  # another machine holds it; the agent finds out whether that machine is alive
    HELD = "held"
    REFUSED = "refused"  # a living machine holds it
    LOST = "lost"  # another machine took it
    UNUSABLE = "unusable"  # the address is wrong, or a library is missing: waiting does not help


@dataclass(frozen=True)
class StoreView:
    """What the agent wrote last. `message` is for people: why it waits, who holds the lease, who took it."""

    lease: LeaseState = LeaseState.CONNECTING
    ready: bool = False  # the lease is held, and what was newer in the store is in the run's folder
    reachable: bool = False  # the last call to the store succeeded
    message: str = "connecting to the store"
    holder: str = ""  # the machine that holds the lease
    step: int | None = None  # of the newest checkpoint in the store
    restored_step: int | None = None  # of the checkpoint that was fetched before the start
    restored_from: str = ""  # who wrote it
    pending: str = ""  # what is not in the store yet
    pending_bytes: int = 0
    error: str = ""  # of the last copy, "" once it succeeds
    done: int = 0  # the last order that was carried out


def extra_save_due(step: int, every: int, count: int) -> int | None:
    """The step at which the extra save was due that can be requested now, None while there is none.

    every: steps between two regular saves, with `count` extra ones between them.
    """
    if every < 2 * (count + 1):
        return None
    part_steps = every / (count + 1)
    part, into = divmod(step % every, part_steps)
    return step - round(into) if part and into < part_steps * STALE_SHARE else None


class StoreAgent:
    """The agent of one run that has a store."""

    def __init__(self, folder: RunFolder, limits: config.Section):
        self.folder = folder
        self.limits = limits
        self.address = str(folder.spec.get("store") or "")
        self.view = StoreView()
        self.admitted = False  # the training may run: the lease was held before its first attempt
        self._popen: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._started_s = self._next_start_s = -1e9
        self._failures = self._orders = 0
        self._seen = ""  # the text of STORE that is known
        self._reported: set[str] = set()  # errors
        self._requested = -1  # the step of the last extra save
        self._reachable_s: float | None = None  # when the store was reachable last, or the first poll; None before that

    # ---- what the supervisor asks ----

    @property
    def holds(self) -> bool:
        """This run has held the lease, and nobody took it."""
        return self._reachable_s is not None and self.admitted and self.view.lease is not LeaseState.LOST

    def unreachable_s(self) -> float:
        """Seconds since the store answered last, or since the agent was first started."""
        return time.monotonic() - self._reachable_s if self._reachable_s is not None else 0.0

    def request_save(self, step: int, step_s: float, save_s: float) -> None:
        """Request an extra save where one is due, none is being copied, and saving is quick.

        step_s, save_s: seconds of the usual step and save; a save too short to be seen is 0.0.
        """
        known = self.folder.spec.get("save_every_n_steps")
        every = known if isinstance(known, int) else 0
        due = extra_save_due(step, every, self.limits.extra_saves_count)
        slow = save_s > SAVE_SHARE * every * step_s
        if due is None or due <= self._requested or "checkpoint" in self.view.pending or slow:
            return
        with contextlib.suppress(OSError):
            step_requests.ask(self.folder.folder, "state")
            self._requested = due

    def summary(self) -> dict[str, Any]:
        """For status.json."""
        view = self.view
        return {
            "address": self.address,
            "state": view.message,
            "lease": str(view.lease) if self._reachable_s is not None else None,
            "holder": view.holder or None,
            "step": view.step,
            "pending": view.pending or None,
            "pending_bytes": view.pending_bytes,
            "error": view.error or None,
        }

    # ---- the process ----

    def poll(self) -> StoreView:
        """Start the agent when it does not run, and read what it wrote. The first call begins; never raises."""
        now_s = time.monotonic()
        if self._popen is not None and (code := self._popen.poll()) is not None:
            self._ended(code, now_s)
        if self._popen is None and not self._closed and now_s >= self._next_start_s:
            self._start(now_s)
        self._read()
        if self.view.reachable or self._reachable_s is None:
            self._reachable_s = now_s
        return self.view

    def _start(self, now_s: float) -> None:
        self._started_s = now_s
        self._seen = read_text(self.folder.folder / STORE)  # an earlier agent's: a container gives its pid to this, too
        command = [*python("launch", "store", "agent"), str(self.folder.folder), *["--adopted"] * self.admitted]
        try:
            with open(self.folder.folder / LOG, "ab") as log:
                self._popen = helper(command, log, subprocess.PIPE)
        except OSError as error:
            self._next_start_s = now_s + self.limits.restart_s
            self._report_error(f"the process that copies cannot be started: {error.strerror or error}")

    def _ended(self, code: int, now_s: float) -> None:
        """The agent is gone: start it again after a pause that grows while it fails at once."""
        self._drop()
        self._failures = 1 if now_s - self._started_s > HEALTHY_S else self._failures + 1
        self._next_start_s = now_s + self.limits.restart_s * min(2 ** (self._failures - 1), RESTART_TIMES)
        how = f"was killed by {platform.signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if self.view.lease not in (LeaseState.REFUSED, LeaseState.LOST, LeaseState.UNUSABLE):
            self.folder.log(f"store: the process that copies {how}; it is started again")

    def _drop(self) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        self._popen = None

    def _read(self) -> None:
        """Take over what the living agent wrote, and report what is new in it."""
        text = read_text(self.folder.folder / STORE)
        if text == self._seen:  # not by its time, which on a USB stick has steps of two seconds
            return
        values = json_object(text)
        if values is None or self._popen is None or not is_python_of(self._popen, values.get("pid")):
            return  # an earlier agent's
        try:
            view = typed(StoreView, values)
        except (TypeError, ValueError):
            return  # another version of this program wrote the file
        self._seen, before, self.view = text, self.view, view
        if view.step is not None and before.step is None:
            self.folder.event("store", f"the checkpoint of step {view.step} is in the store", step=view.step)
        if view.error:
            self._report_error(view.error)
        elif before.error in self._reported:
            self.folder.event("store", "copying to the store works again")
            self._reported.clear()

    def _report_error(self, error: str) -> None:
        """One event for each kind of error, until copying works again."""
        if error not in self._reported:
            self._reported.add(error)
            self.folder.event("store_error", f"{error}; the training goes on" if self.admitted else error)

    # ---- orders ----

    def order(self, what: str, limit_s: float = 0.0) -> int:
        """Order `what` (flush: copy everything now; release: give the lease back and exit); its number."""
        self._orders += 1
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                line = json.dumps({"order": self._orders, "what": what, "limit_s": limit_s})
                self._popen.stdin.write(line.encode() + b"\n")
        return self._orders

    def flush(self, limit_s: Callable[[], float], pause: Callable[[float], None]) -> str:
        """Copy everything that is left; "" or what is not in the store.

        limit_s: the seconds that are left for it, asked again and again: the machine may be taken away meanwhile.
        pause: waits so many seconds and keeps the status fresh.
        """
        ordered_from, number = None, 0
        while True:
            view = self.poll()
            if view.lease is LeaseState.LOST:
                return f"not in the store: {view.holder} took the lease of this run"
            if self._popen is not None and ordered_from is not self._popen and view.ready:
                ordered_from, number = self._popen, self.order("flush")  # an agent that was replaced knows no order
            if number and ordered_from is self._popen and view.done >= number:
                return ""
            left_s = limit_s()
            if left_s <= 0:
                what = view.pending or "the newest files"
                return f"not in the store: {what}" + (f" ({view.error})" if view.error else "")
            pause(min(left_s, 0.1))

    def close(self, limit_s: float) -> None:
        """Release the lease and end the agent, within `limit_s` seconds."""
        self._closed = True
        process = self._popen
        if process is None:
            return
        try:
            if limit_s > 0:
                self.order("release", limit_s)
            self._drop()  # the end of its standard input ends the agent
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(limit_s, 0.1))
            if process.poll() is None:
                process.kill()
                process.wait(CLOSE_WAIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.folder.log(f"store: the process that copies does not end: {error}")
