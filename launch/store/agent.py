"""The process beside the monitor: holds the lease of a run, restores what is newer before the start, then copies.

    python -m launch store agent FOLDER [--adopted]

Decision: three threads, because none may wait for another's network call. `Agent.serve` obeys the monitor, whose end it
sees as the end of its standard input; `keep_lease` renews the lease and exchanges the small files of a fleet's page;
`copy` pushes. All three report in `store.json`. Every call to the store has an end (places.py), and one that fails is
tried again: nothing here can stop the training, except the lease when another machine takes it.

What is copied is decided by what is there now, not by a queue: when copying is slower than saving, older checkpoints
are skipped. A push is cut short only by an order to copy everything now, which begins with the newest files.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from guards import checkpoint
from launch.store import lease
from launch.store.copies import Copier, NotHeld
from launch.store.lease import Lease
from launch.store.manifest import result_folders
from launch.store.places import Limits, NotFound, Place, Refused, StoreError, Unavailable, open_place
from launch.store.restore import restore
from monitor import config
from monitor.process import platform
from monitor.process.platform import Lock
from monitor.run_folder import STATUS, STOP, read_json, read_spec
from monitor.state import FINAL, State
from monitor.store import STORE, LeaseState, StoreView
from runs.files import RunError

LOCK = ".store.lock"  # in the run's folder: held by its agent
LOCK_S = 20.0  # for an earlier agent to end
POLL_S = 0.5  # between two readings of the run's folder
RETRY_S, RETRY_MAX_S = 2.0, 60.0  # after a failed copy
REQUEST, REQUEST_BYTES = "requests/stop.json", 4096
STATUS_BYTES = 4 << 20
SMALL = {"call_s": 10.0, "tries": 2, "bytes_per_s": 0.0}  # of calls that the next one repeats anyway
REFUSE_PERIODS = 0.5  # a living holder is watched so long: one that is just ending gives the lease back
RELEASE_SHARE = 0.6  # of the time to release the lease: for the copy under way
NICE = 10
ENDING = (LeaseState.REFUSED, LeaseState.LOST, LeaseState.UNUSABLE)  # another thread may not know yet
EXIT_FAILED = 1


class Superseded(Exception):
    """A copy was cut short by an order."""


class Report:
    """`store.json`: what the monitor and people see. Safe for several threads; replaced when a value changes."""

    def __init__(self, folder: Path, owner: str):
        """owner: the ID with which this process claims the lease, for the one that replaces it."""
        self._path, self._about = folder / STORE, {"version": 1, "pid": os.getpid(), "owner": owner}
        self._view, self._written, self._lock = StoreView(), StoreView(), threading.Lock()
        self._write()

    def set(self, **values: Any) -> None:
        """Change values of a StoreView; nothing after a state that ends the run here."""
        with self._lock:
            if self._view.lease not in ENDING:
                self._view = replace(self._view, **values)
            if self._view != self._written:
                self._write()

    def _write(self) -> None:
        now = platform.now()
        values = {**self._about, **asdict(self._view), "updated_at": now.utc, "updated_s": now.mono_s}
        with contextlib.suppress(OSError):  # a full disk: the next call tries again
            checkpoint.atomic_write(self._path, json.dumps(values, ensure_ascii=False), sync=False)
            self._written = self._view


@dataclass
class Agent:
    """The agent of the run in `folder`. `place`: the run's folder in the store; `small`: the same with
    limits of its own, so that no long copy delays it. `adopted`: the training runs already."""

    folder: Path
    place: Place
    small: Place
    lease: Lease
    report: Report
    limits: config.Section
    adopted: bool
    held: threading.Event = field(default_factory=threading.Event)  # for the first time
    wake: threading.Event = field(default_factory=threading.Event)  # the copying thread has something to do
    released: threading.Event = field(default_factory=threading.Event)
    orders: int = 0  # the last order to copy everything
    final: bool = False  # only the end of the run is left to be copied
    request: bytes = b""  # the stop that was handed to the monitor
    sent: bytes = b""  # the status in the store
    moved_s: float = 0.0  # when a restore fetched something last
    copier: Copier | None = None

    # ---- the monitor's orders ----

    def serve(self) -> None:
        """Obey until the monitor is gone or wants the lease released."""
        work = (self.copy, self.keep_lease)
        copying, keeping = (threading.Thread(target=self.guarded, args=(one,), daemon=True) for one in work)
        copying.start()
        keeping.start()
        for line in sys.stdin.buffer:
            order = json.loads(line)
            if order["what"] == "flush":
                self.orders = order["order"]
                self.wake.set()
            elif order["what"] == "release":
                self.release(copying, keeping, time.monotonic() + order["limit_s"] * RELEASE_SHARE)
                break

    def guarded(self, work: Callable[[], None]) -> None:
        """Run a method as a thread; an error that nobody expected ends the process, and the monitor starts it again."""
        try:
            work()
        except BaseException:  # noqa: BLE001 - the top of a thread
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    def release(self, copying: threading.Thread, keeping: threading.Thread, until_s: float) -> None:
        """Copy the last lines and the final status, then give the lease back."""
        self.final = True
        self.wake.set()
        copying.join(max(0.0, until_s - time.monotonic()))
        self.released.set()
        keeping.join(max(0.0, until_s - time.monotonic()))  # a renewal under way would undo the release
        for last in (self.send_status, self.lease.release):
            with contextlib.suppress(StoreError):
                last()
        self.report.set(lease=LeaseState.CONNECTING, message="the lease was given back")

    # ---- the lease ----

    def keep_lease(self) -> None:
        """Take the lease, renew it, and exchange the small files, until it is lost or released."""
        watched_s: float | None = None  # since when a living machine was seen to hold it
        small_s = -1e9
        while not self.released.is_set():
            state, now_s = self.lease.poll(), time.monotonic()
            holder, reachable = self.lease.holder, not self.lease.error
            alive = self.lease.seen_alive and state == lease.WAITING
            watched_s = (watched_s or now_s) if alive else None
            if state == lease.LOST or (alive and self.adopted):
                text = "took the lease of this run, so it was stopped here; the next start fetches what is newer"
                self.report.set(lease=LeaseState.LOST, ready=False, holder=holder, message=f"{holder} {text}")
                return
            if state == lease.HELD:
                if not self.held.is_set():
                    self.report.set(message="the lease is held")
                    self.discard_old_request()
                    self.held.set()
                self.report.set(lease=LeaseState.HELD, holder="", reachable=reachable)
                if reachable and now_s - small_s >= self.limits.status_s:
                    small_s = now_s
                    for exchange in (self.fetch_request, self.send_status):
                        with contextlib.suppress(StoreError):
                            exchange()
            elif state == lease.UNREACHABLE:
                self.report.set(reachable=False, error=self.lease.error)
            elif watched_s and now_s - watched_s >= REFUSE_PERIODS * self.limits.lease_s:
                text = f"{holder} trains this run. Stop it there, or wait until it ends, then start it here"
                self.report.set(lease=LeaseState.REFUSED, holder=holder, message=text)
                return
            else:
                waiting, text = LeaseState.CONNECTING, f"connecting to {self.place.address}"
                if holder and reachable:
                    left = f"its lease expires within {lease.WATCH * self.limits.lease_s:.0f} s if it is not"
                    waiting = LeaseState.WAITING
                    text = f"{holder} holds the lease of this run; finding out if it is alive, {left}"
                self.report.set(lease=waiting, holder=holder, reachable=reachable, message=text, error=self.lease.error)
            pause_s = self.limits.lease_s / (4 if state in (lease.HELD, lease.UNREACHABLE) else 20)
            self.released.wait(min(pause_s, self.limits.status_s))

    def discard_old_request(self) -> None:
        """Remove a stop that was requested when the run had ended already: whoever starts it now does not mean that."""
        with contextlib.suppress(StoreError, ValueError, AttributeError, RecursionError):
            state = json.loads(self.small.read(STATUS, STATUS_BYTES)).get("state")
            if not self.adopted and state in FINAL - {State.PREEMPTED}:
                self.small.delete([REQUEST])

    def fetch_request(self) -> None:
        """Hand a stop that was requested through the store to the monitor, as one from here. NotFound: none."""
        data = self.small.read(REQUEST, REQUEST_BYTES)
        try:
            now = json.loads(data).get("now") is True
        except (ValueError, AttributeError, RecursionError):
            now = False
        if data != self.request:  # else it could not be deleted: a second request would mean "at once"
            with contextlib.suppress(OSError):
                checkpoint.atomic_write(self.folder / STOP, json.dumps({"now": now}))
                self.request = data
        if data == self.request:
            self.small.delete([REQUEST])

    def send_status(self) -> None:
        """Copy status.json when it changed. Raises StoreError."""
        with contextlib.suppress(OSError):
            data = (self.folder / STATUS).read_bytes()
            if data != self.sent and len(data) <= STATUS_BYTES and self.lease.valid():
                self.small.put(STATUS, data)
                self.sent = data

    # ---- copying ----

    def copy(self) -> None:
        """Restore what is newer, report that the training may start, then copy what changes, until the end."""
        while not self.held.wait(POLL_S):
            if self.final:
                return
        damaged = set[str]() if self.adopted else self.retried_restore()
        if damaged is None:
            return
        self.report.set(ready=True, message="the lease is held")
        self.copier = Copier(self.place, self.folder, self.lease, damaged)
        seen, done, noted = list[tuple[str, int]](), 0, set[str]()
        wait_s, next_s, copied_s = RETRY_S, 0.0, -1e9
        while True:
            order, final = wanted = self.orders, self.final
            newest, now_s = self.signature(), time.monotonic()
            self.report.set(pending=self.pending())
            due = newest != seen or now_s - copied_s >= self.limits.copy_s
            if final or order > done or (due and now_s >= next_s):
                try:
                    pushed = self.copier.push(partial(self.progress, wanted=wanted))
                    seen, done, copied_s, wait_s = newest, order, time.monotonic(), RETRY_S
                    for note in set(pushed.notes) - noted:
                        noted.add(note)
                        print(f"store: {note}", file=sys.stderr, flush=True)
                    last = self.copier.last
                    step = last.step if last and last.step >= 0 else None
                    left_out = next((note for note in pushed.notes if note.startswith("not copied: ")), "")
                    self.report.set(step=step, error=left_out, done=done, pending=self.pending())
                    if pushed.manifest is not None and not final:
                        self.copier.prune()
                except Superseded:
                    continue
                except (StoreError, OSError) as error:
                    if self.lease.state == lease.LOST:
                        return
                    if not isinstance(error, NotHeld):  # else `keep_lease` reports why
                        self.report.set(error=str(error))
                    next_s, wait_s = time.monotonic() + wait_s, min(2 * wait_s, RETRY_MAX_S)
                    if order > done and not final:
                        time.sleep(POLL_S)  # an order is not put off, but a store that refuses is not hammered
                finally:
                    self.report.set(pending_bytes=0)
            if final:
                return
            self.wake.wait(POLL_S)
            self.wake.clear()

    def retried_restore(self) -> set[str] | None:
        """Restore until it succeeds; the damaged contents of the store, None when the run ends first."""
        wait_s = RETRY_S
        self.moved_s = time.monotonic()
        while not self.final:
            try:
                found = restore(self.place, self.folder, self.restoring)
                for note in found.notes:
                    print(f"store: {note}", file=sys.stderr, flush=True)
                if found.files and found.manifest is not None:
                    self.report.set(restored_step=max(0, found.step), restored_from=found.manifest.owner)
                return found.damaged
            except (StoreError, RunError, OSError) as error:
                late = time.monotonic() - self.moved_s >= self.limits.connect_s
                if late or not isinstance(error, Unavailable | NotFound):  # another run of this name, a full disk
                    self.report.set(lease=LeaseState.UNUSABLE, message=str(error))
                    return None
                self.report.set(error=str(error))
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
        return None

    def restoring(self, done: int, total: int) -> None:
        """Show how far a restore is, in bytes."""
        self.moved_s = time.monotonic() if done else self.moved_s
        self.report.set(message=f"restoring from the store: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def progress(self, sent: int, total: int, wanted: tuple[int, bool]) -> None:
        """Show how far a push is; cut it short when everything is to be copied now."""
        if (self.orders, self.final) != wanted:
            raise Superseded
        self.report.set(pending=self.pending(), pending_bytes=total - sent)

    # ---- the run's folder ----

    def signature(self) -> list[tuple[str, int]]:
        """Changes with each new complete state and LoRA."""
        found = []
        for folder in result_folders(self.folder):
            for path in [*folder.glob(f"[!.]*-state/{checkpoint.GUARD}"), *folder.glob("[!.]*.safetensors")]:
                with contextlib.suppress(OSError):
                    found.append((str(path), path.stat().st_mtime_ns))
        return sorted(found)

    def pending(self) -> str:
        """What the store lacks: "the checkpoint of step 120, the LoRA"; "" for neither."""
        parts, steps, folders = [], list[int](), result_folders(self.folder)
        for folder in folders:
            with contextlib.suppress(OSError):
                steps += [step for step in checkpoint.states(folder, self.folder.name).values() if step >= 0]
        last, lora = self.copier.last if self.copier else None, f"{self.folder.name}.safetensors"
        if steps and max(steps) > (last.step if last else -1):
            parts.append(f"the checkpoint of step {max(steps)}")
        if not (last and f"run/{lora}" in last.files) and any((one / lora).is_file() for one in folders):
            parts.append("the LoRA")
        return ", ".join(parts)


def run(folder: Path, adopted: bool) -> int:
    """Be the agent of the run in `folder`; the exit code. The reason of a refusal is in store.json."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        # A machine that is taken away signals every process: the monitor decides what is copied.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICE)
    lock = Lock(folder / LOCK)
    if not lock.acquire(patience_s=LOCK_S):
        print(f"store: {folder}: another process copies this run", file=sys.stderr)
        return EXIT_FAILED
    owner = lease.this_owner()
    before = (read_json(folder / STORE) or {}).get("owner") if adopted else None
    if isinstance(before, str):
        owner = replace(owner, id=before)
    report = Report(folder, owner.id)
    address = str(read_spec(folder).get("store") or "")
    limits = config.load().store
    passing = (Unavailable, NotFound, *[Refused] * adopted)  # beside a training a refusal, too: a login is renewed
    try:
        place = open_place(address, Limits(bytes_per_s=limits.bandwidth_bytes)).under(folder.name)
        small = place.limited(**SMALL)
        small.list(lease.FOLDER)
    except passing as error:  # perhaps it answers later: `keep_lease` goes on
        report.set(error=str(error))
    except StoreError as error:  # the address or the permissions are wrong: wait for the monitor to read that
        report.set(lease=LeaseState.UNUSABLE, message=str(error), error=str(error))
        sys.stdin.buffer.read()
        return EXIT_FAILED
    claims = Lease(small, owner, limits.lease_s, resumes=isinstance(before, str))
    Agent(folder, place, small, claims, report, limits, adopted).serve()
    sys.stderr.flush()
    os._exit(0)  # a thread may hang in a call to a dead store
