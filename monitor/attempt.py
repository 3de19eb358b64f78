"""One attempt: the script started in a session of its own, its processes, its heartbeats, and how it ended.

The script runs under a one-line shell that writes its exit code to a file: a monitor that adopts a living training is not
its parent and could not ask otherwise. The launcher's code is only a hint; what counts is the heartbeat's last word.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path

from guards import heartbeat
from guards.heartbeat import Beat
from monitor import clock, folder, system
from monitor.tree import RUN, TOKEN, Tree

_WRAPPER = 'bash "$1"; code=$?; printf %s "$code" >"$2"; exit "$code"'
_OURS = (TOKEN, RUN, "HANGPROOF_ATTEMPT", "HANGPROOF_HEARTBEAT", "HANGPROOF_RESUME")


LIST_S = 1.0


@dataclass(frozen=True)
class Exit:
    """How an attempt ended. `code` None: not known (adopted, and killed); `outcome` is rank 0's last word, "" without one."""

    code: int | None
    signal: int | None
    outcome: str
    note: str

    @property
    def done(self) -> bool:
        """Is the training complete? The heartbeat's word, or exit code 0 of a script that has no heartbeat."""
        return self.outcome == "done" or (self.outcome == "" and self.code == 0)

    def __str__(self) -> str:
        if self.signal:
            return f"ended by {system.signal_name(self.signal)}"
        said = ""
        if self.outcome not in ("", "running"):
            said = f", its last word: {self.outcome}" + (f" ({self.note})" if self.note else "")
        return (f"exit code {self.code}" if self.code is not None else "it is gone, without an exit code") + said


class Attempt:
    """The training under way. Make one with `start` or `adopt`."""

    def __init__(self, number: int, tree: Tree, beats: Path, log_start: int, started_s: float):
        self.number = number
        self.tree = tree
        self.heartbeats = beats
        self.log_start = log_start
        self.started_s = started_s  # monotonic
        self._popen: subprocess.Popen | None = None
        self._records: list[str] = []
        self._listed_s = 0.0
        self._starts: dict[int, float] = {}  # rank's pid -> start
        self.stopped: frozenset[int] = frozenset()  # ranks that a signal has stopped, at the last `ranks_alive`

    @classmethod
    def start(
        cls, files: folder.RunFiles, script: Path, number: int, resume: Path | None, inherit: tuple[int, ...] = ()
    ) -> Attempt:
        """Start `script` as attempt `number`; its output is appended to training.log, `inherit` are descriptors it keeps.

        OSError: it cannot be started.
        """
        token = secrets.token_hex(16)
        beats = folder.private_folder(files.folder.name)
        env = {k: v for k, v in os.environ.items() if k not in _OURS}
        env |= {
            RUN: str(files.folder),
            TOKEN: token,
            "HANGPROOF_ATTEMPT": str(number),
            "HANGPROOF_HEARTBEAT": str(beats),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        if resume is not None:
            env["HANGPROOF_RESUME"] = str(resume)
        command = system.shell_command(script)
        if not system.WINDOWS:
            command = ["bash", "-c", _WRAPPER, "hangproof", str(script), str(beats / "exit")]
        with open(files.folder / folder.TRAINING_LOG, "ab") as log:
            start = log.tell()
            log.write(f"=== {clock.now().utc} attempt {number}: {script.name}, from {resume or 'the start'}\n".encode())
            log.flush()
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=files.folder,
                env=env,
                pass_fds=inherit,
                **system.detached(),
            )
        process = system.proc(popen.pid)
        tree = Tree(token, (popen.pid, process.start if process else 0.0))
        attempt = cls(number, tree, beats, start, clock.now().mono_s)
        attempt._popen = popen
        return attempt

    @classmethod
    def adopt(cls, book: dict) -> Attempt | None:
        """The attempt that an earlier monitor wrote into its book, when processes of it still live; else None."""
        kept = book.get("attempt_under_way")
        if not kept or kept["boot_id"] != system.boot_id():
            return None
        tree = Tree(kept["token"], tuple(kept["root"]))
        attempt = cls(kept["number"], tree, Path(kept["heartbeats"]), kept["log_start"], kept["started_s"])
        if tree.refresh():
            return attempt
        # Nobody was there when it ended: its last words tell whether it has to be run again.
        return attempt if kept.get("number") and attempt.heartbeats.is_dir() else None

    def to_book(self) -> dict:
        """What `adopt` needs."""
        return {
            "boot_id": system.boot_id(),
            "number": self.number,
            "token": self.tree.token,
            "root": list(self.tree.root),
            "heartbeats": str(self.heartbeats),
            "log_start": self.log_start,
            "started_s": self.started_s,
        }

    @property
    def pid(self) -> int:
        return self.tree.root[0]

    def beats(self, fresh: bool = False) -> list[Beat]:
        """The records of its ranks. The folder is listed again only now and then, which costs more; `fresh`: now."""
        now_s = clock.now().mono_s
        if fresh or not self._records or now_s - self._listed_s >= LIST_S:
            self._listed_s = now_s
            try:
                names = sorted(name for name in os.listdir(self.heartbeats) if name.endswith(".hb") and name[0] != ".")
            except OSError:
                names = []
            self._records = [os.path.join(self.heartbeats, name) for name in names]
        found = []
        for path in self._records:
            with contextlib.suppress(heartbeat.HeartbeatError):  # being replaced, or torn by a kill
                found.append(heartbeat.read(path))
        return sorted(found, key=lambda beat: beat.rank)

    def root_alive(self) -> bool:
        """Does the script's shell live? Collects its exit code once it does not."""
        if self._popen is not None:
            return self._popen.poll() is None
        return system.alive(*self.tree.root)

    def ranks_alive(self, beats: list[Beat]) -> list[int]:
        """The process numbers of the ranks that live. A number that is used again by another process does not count."""
        living = []
        for beat in beats:
            process = system.proc(beat.pid)
            if process is None or process.dead:
                continue
            if self._starts.setdefault(beat.pid, process.start) == process.start:
                living.append(process)
        self.stopped = frozenset(process.pid for process in living if process.state == "T")
        return [process.pid for process in living]

    def exit(self, beats: list[Beat]) -> Exit:
        """How it ended, once it has."""
        code = self._popen.returncode if self._popen is not None else None
        with contextlib.suppress(OSError, ValueError):  # none when the shell itself was killed
            code = int((self.heartbeats / "exit").read_text())
        number = None
        if code is not None and (code < 0 or 128 < code <= 192):
            number = -code if code < 0 else code - 128
        first = next((b for b in beats if b.rank == 0), None)
        outcome = first.outcome if first and first.outcome != "running" else ("running" if first else "")
        return Exit(code, number, outcome, first.note if first and first.outcome != "running" else "")

    def ask_to_stop(self) -> bool:
        """Ask every rank for a checkpoint at the next step boundary and an end; False when nobody beats."""
        asked = False
        for beat in self.beats():
            heartbeat.set_request(heartbeat.path_of(self.heartbeats, beat.rank), heartbeat.REQUEST_STOP)
            asked = True
        return asked

    def close(self) -> None:
        """Remove what it left outside the run's folder. Only once all its processes are gone."""
        if self._popen is not None:
            self._popen.poll()
        folder.drop_private(self.heartbeats)
