"""The monitor's one loop. Read `Supervisor.run` top to bottom: wait, look, and let the state's own method decide.

    queued → starting → running ⇄ suspect ⇄ slow → recovering → backoff → starting …
    any of them → stopping → stopped | preempted;   running → completed;   recovering → failed | unkillable

Every transition is one method. What is decided is decided elsewhere by pure functions (`decide`, `signals`, `causes`,
`policy`); here it is only carried out.
"""

from __future__ import annotations

import signal
from pathlib import Path

from monitor import clock, system
from monitor.book import nothing_left
from monitor.core import EXIT_DONE, Interrupted
from monitor.failing import Failing
from monitor.folder import FINAL, MonitorError
from monitor.leaving import Leaving
from monitor.limits import LimitsError
from monitor.locks import LOCK, Lock
from monitor.starting import Starting
from monitor.watching import Watching


def supervise(folder: Path, echo: bool = False, checked: bool = False) -> int:
    """Watch the run in `folder` until its end; the exit code of `monitor run`. `checked`: nothing is missing for a start.

    Raises:
        MonitorError: another monitor watches it, or the limits file is wrong.
    """
    lock = Lock(folder / LOCK)
    if not lock.acquire(patience_s=2.0):
        raise MonitorError(f"{folder}: another monitor watches this run; see `python -m monitor status {folder.name}`")
    try:
        if done := nothing_left(folder):
            print(f"{folder.name}: {done}", flush=True)
            return EXIT_DONE
        return Supervisor(folder, lock, echo, checked).run()
    except LimitsError as error:
        raise MonitorError(str(error)) from error
    finally:
        lock.release()


LAST_MESSAGE_S = 10.0  # for the message that the run has ended
STARTING_S = 0.2  # between looks at a run that is not under way yet


class Supervisor(Starting, Watching, Failing, Leaving):
    """Watches one run until it reaches a final state."""

    def run(self) -> int:
        """Watch until the end; the exit code."""
        self.waker = system.Waker()
        self._listen()
        system.become_subreaper()
        try:
            self.open()
            while self.state not in FINAL:
                self.outlook.write()
                self.waker.sleep(self.poll_s())
                self.now = clock.now()
                try:
                    self.asked()
                    {
                        "queued": self.queued,
                        "starting": self.watching,
                        "running": self.watching,
                        "suspect": self.watching,
                        "slow": self.watching,
                        "backoff": self.backing_off,
                        "recovering": self.ending_rest,
                        "stopping": self.stopping,
                    }.get(self.state, self.nothing)()
                except Interrupted:
                    continue
            self.outlook.write(force=True)
            return self.code
        finally:
            self.close()

    def poll_s(self) -> float:
        """Seconds until the next look."""
        if self.state in ("running", "suspect", "slow", "stopping"):
            return self.watch.poll_s()
        return STARTING_S

    def nothing(self) -> None:
        """A final state: the loop ends."""

    def _listen(self) -> None:
        for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda number, _frame: self._signals.append(number))
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal goes, the run stays

    def close(self) -> None:
        """Leave. The lock is released by whoever took it, last."""
        self.drop_inquiry()
        self.verifier.cancel()
        self.foresight.close()
        self.gpus.close()
        self.queue.release()
        if self.attempt is not None and self.state in FINAL and self.state != "unkillable":
            self.attempt.close()
            self.book.attempt_under_way = None
        if self.state in FINAL:
            self.book.state = self.state
        self.book.known = self.watch.learned()
        self.book.save(self.files)
        self.waker.close()
        self.notifier.poll(wait_s=LAST_MESSAGE_S)
