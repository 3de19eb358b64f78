"""What is requested of a training at its next step boundary: sample images, a checkpoint.

Decision: one file for each kind in the run's folder (`sample.request`), which rank 0 looks for between two steps. It
needs no monitor, survives every process, and two requests of one kind are one. The file is removed once the request is
done, and a line of `events.jsonl` says what became of it. A request that arrives while no step runs waits for the next
boundary. One that the training was killed at is tried once more, then refused: it must not kill every attempt.

    sample    the sample images of the current step; the training is the same as without them
    save      a checkpoint and the LoRA, as the trainer's own save by steps
    state     a checkpoint only
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from guards.checkpoint import append_line, atomic_write
from guards.metrics import utc_now
from guards.reading import boot_id, number, read_json

KINDS = {"sample": "sample images", "save": "a checkpoint", "state": "a checkpoint"}
"""What each kind asks for, in the words of messages. The order is that in which several are done."""
FILES = {"sample": "sample.request", "save": "save.request", "state": "state.request"}
EVENTS = "events.jsonl"  # as in monitor/run_folder.py
EVENT = "request"  # the kind of its lines
POLL_S = 0.2  # least time between two looks: at most three calls of stat in that time
TRIES = 2  # a request that the training died at so often is refused


def path_of(folder: str | os.PathLike[str], kind: str) -> Path:
    """The file of a request. KeyError for an unknown kind."""
    return Path(folder) / FILES[kind]


def ask(folder: str | os.PathLike[str], kind: str) -> str:
    """Request `kind` of the training in `folder`; the request's id. One that waits already stays. Raises OSError."""
    path = path_of(folder, kind)
    if known := (read_json(path) or {}).get("id"):
        return str(known)
    name = os.urandom(6).hex()
    atomic_write(path, json.dumps({"id": name, "t": utc_now(), "tries": 0}))
    return name


def waiting(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """The kinds that are requested and not done yet."""
    return tuple(kind for kind in KINDS if os.path.exists(os.path.join(folder, FILES[kind])))


def refuse(folder: str | os.PathLike[str], kind: str, step: int, reason: str) -> None:
    """End a request that cannot be done any more, with its reason."""
    _end(Path(folder), kind, step, f"{KINDS[kind]} not made: {reason}", done=False)


def answer(events: list[dict], name: str) -> dict | None:
    """The event that ended the request with this id, None while there is none."""
    return next((event for event in events if event.get("kind") == EVENT and event.get("id") == name), None)


class StepRequests:
    """The reader inside the training. Without a folder, and on ranks other than 0, nothing is ever requested."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._next_s = 0.0
        self._begun_s: dict[str, float] = {}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> StepRequests:
        """Those of the run in `$HANGPROOF_RUN`, on rank 0."""
        run = environ.get("HANGPROOF_RUN")
        return cls(Path(run) if run and not number("RANK", 0, environ) else None)

    def pending(self, step: int) -> tuple[str, ...]:
        """The kinds that are to be done now, in order. Each is counted as tried: `done` or `refuse` must follow."""
        now_s = time.monotonic()
        if self.folder is None or now_s < self._next_s:
            return ()
        self._next_s = now_s + POLL_S
        return tuple(kind for kind in waiting(self.folder) if self._begin(path_of(self.folder, kind), kind, step))

    def _begin(self, path: Path, kind: str, step: int) -> bool:
        values = read_json(path) or {}  # one that cannot be read is a request all the same
        tries = values["tries"] if isinstance(values.get("tries"), int) else 0
        if tries >= TRIES:
            self.refuse(kind, step, f"the training ended {tries} times while it did that")
            return False
        try:
            atomic_write(path, json.dumps({**values, "id": str(values.get("id", "")), "tries": tries + 1}))
        except OSError:
            return False  # a full disk: no time for more files
        self._begun_s[kind] = time.monotonic()
        return True

    def done(self, kind: str, step: int, what: str) -> None:
        """The request is done. what: for people, such as `2 sample images`."""
        took_s = time.monotonic() - self._begun_s.pop(kind, time.monotonic())
        if self.folder is not None:
            _end(self.folder, kind, step, f"{what} of step {step}, as requested", done=True, took_s=round(took_s, 3))

    def refuse(self, kind: str, step: int, reason: str) -> None:
        """The request cannot be done."""
        self._begun_s.pop(kind, None)
        if self.folder is not None:
            refuse(self.folder, kind, step, reason)


def _end(folder: Path, kind: str, step: int, message: str, **more: object) -> None:
    """Write the event, then remove the file: a request without an answer is tried again, never lost."""
    path = path_of(folder, kind)
    try:
        append_event(
            folder, EVENT, message, request=kind, id=str((read_json(path) or {}).get("id", "")), step=step, **more
        )
        path.unlink()
    except OSError:
        pass  # a full disk, or removed by somebody else: the training goes on


def append_event(folder: Path, kind: str, message: str, **more: object) -> None:
    """Append an event to events.jsonl of a run, as the monitor does. Raises OSError."""
    clock = {"mono_s": round(time.monotonic(), 3), "boot": boot_id()[:8]}
    append_line(folder / EVENTS, {"t": utc_now(), "kind": kind, "message": message, **more, **clock})
