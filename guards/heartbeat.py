"""The heartbeat: one memory-mapped record a rank, so that progress can be read from outside without asking.

Decision: a file mapped by both sides, not a socket or a queue. A beat is a few memory writes (no system call, no lock,
nothing that can block), it survives the death of either side, and a reader sees the last words of a killed process. A
client that asks a server at each step costs hundreds of microseconds; this costs one to two.

The record carries *progress* (steps completed, items done inside a phase), never mere liveness: there is no beating thread.
Times are `time.monotonic()` seconds, one clock for all processes of a host. A sequence number, odd while a write is under
way, lets a reader refuse a torn record.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "import",
    "load",
    "cache_latents",
    "cache_text",
    "hash",
    "first_step",
    "step",
    "validate",
    "sample",
    "save",
    "end",
)
OUTCOMES = ("running", "done", "stopped", "failed", "deadline")
REQUEST_NONE = 0
REQUEST_STOP = 1
REQUEST_TERM = 2  # the process's own: it was sent SIGTERM, and does as for REQUEST_STOP

_MAGIC = 0x48504842  # "HPHB"
_VERSION = 1
_RING = 256
_NOTE = 240
# magic, version | sequence | rank, world, pid, request | phase, outcome | step, planned, epoch, done, total, count |
# loss, lr, beat_s, phase_s, step_s, started_s
_SEQUENCE = struct.Struct("<Q")
_STATIC = struct.Struct("<II")
_IDENTITY = struct.Struct("<iii")
_REQUEST = struct.Struct("<i")
_BODY = struct.Struct("<ii6q6d")
_ITEM = struct.Struct("<d")
_NOTE_LENGTH = struct.Struct("<H")
_AT_SEQUENCE = 8
_AT_IDENTITY = 16
_AT_REQUEST = 28
_AT_BODY = 32
_AT_NOTE = _AT_BODY + _BODY.size
_AT_RING = 512
SIZE = _AT_RING + _RING * _ITEM.size
assert _AT_NOTE + _NOTE_LENGTH.size + _NOTE <= _AT_RING

_PHASE_INDEX = {name: i for i, name in enumerate(PHASES)}


class HeartbeatError(OSError):
    """A heartbeat record that cannot be read: not there, of another version, or torn for longer than a write can last."""


@dataclass(frozen=True)
class Beat:
    """What a record said at one moment. Times are `time.monotonic()` seconds of this host; `intervals` are seconds."""

    rank: int
    world: int
    pid: int
    request: int
    phase: str
    outcome: str
    step: int  # global optimizer steps completed, resumed ones included
    planned: int  # optimizer steps of the whole run, 0 while unknown
    epoch: int
    done: int  # items done inside the phase
    total: int  # items of the phase, 0 while unknown
    count: int  # optimizer steps completed by this process
    loss: float
    lr: float
    beat_s: float  # last sign of any kind
    phase_s: float  # when the phase was entered
    step_s: float  # when the last optimizer step completed, 0.0 before the first
    started_s: float
    note: str
    intervals: tuple[float, ...]  # durations of the last steps of this process, oldest first


def path_of(folder: str | os.PathLike, rank: int) -> Path:
    """The record of `rank` in a heartbeat folder."""
    return Path(folder) / f"rank-{rank}.hb"


class Heartbeat:
    """The writer, one for a process. Without a path it keeps its counts and writes nowhere, so callers need no `if`."""

    def __init__(
        self,
        path: str | os.PathLike | None,
        rank: int = 0,
        world: int = 1,
        inject: Callable[[str, int, Heartbeat], None] | None = None,
    ):
        self.path = Path(path) if path is not None else None
        self.rank = rank
        self._inject = inject
        self._map: mmap.mmap | bytearray = bytearray(SIZE)
        if self.path is not None:
            self._map = _create(self.path)
        now = time.monotonic()
        self._sequence = 0
        self._phase = self._outcome = 0
        self._step = self._planned = self._epoch = self._done = self._total = self._count = 0
        self._loss = self._lr = math.nan
        self._phase_s, self._step_s, self._started_s = now, 0.0, now
        self._since_s = now  # when the step under way began
        _STATIC.pack_into(self._map, 0, _MAGIC, _VERSION)
        _IDENTITY.pack_into(self._map, _AT_IDENTITY, rank, world, os.getpid())
        self._write(now, "")

    @classmethod
    def from_env(cls, rank: int | None = None) -> Heartbeat:
        """The heartbeat that the environment asks for.

        `HANGPROOF_HEARTBEAT` names the folder (unset: nothing is written), `RANK` and `WORLD_SIZE` are the launcher's,
        `HANGPROOF_INJECT` = `module:function` is a fault injector called at every beat (tests and benchmarks only).
        """
        folder = os.environ.get("HANGPROOF_HEARTBEAT")
        if rank is None:
            rank = int(os.environ.get("RANK", "0"))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        inject = None
        if os.environ.get("HANGPROOF_INJECT"):
            module, _, function = os.environ["HANGPROOF_INJECT"].partition(":")
            inject = getattr(importlib.import_module(module), function)
        return cls(path_of(folder, rank) if folder else None, rank, world, inject)

    @property
    def current_phase(self) -> str:
        return PHASES[self._phase]

    @property
    def request(self) -> int:
        """What is asked for: REQUEST_NONE, or REQUEST_STOP (save at the next step boundary, then leave).

        A reader of the record is told which: REQUEST_STOP by the monitor, REQUEST_TERM by a signal to this process.
        """
        asked = _REQUEST.unpack_from(self._map, _AT_REQUEST)[0]
        return REQUEST_STOP if asked == REQUEST_TERM else asked

    def sent_term(self) -> bool:
        """SIGTERM has come: ask for a stop. False where no step is complete, so that there is nothing to save."""
        if self._count and self.request == REQUEST_NONE:
            _REQUEST.pack_into(self._map, _AT_REQUEST, REQUEST_TERM)
        return self._count > 0

    def plan(self, total_steps: int) -> None:
        """Say how many optimizer steps the whole run has."""
        self._planned = total_steps
        self._write(time.monotonic())

    def phase(self, name: str, total: int = 0, note: str = "") -> None:
        """Enter a phase of PHASES; `total` is the number of items it has, 0 where unknown. KeyError on another name."""
        now = time.monotonic()
        self._phase, self._done, self._total = _PHASE_INDEX[name], 0, total
        self._phase_s = now
        if name in ("first_step", "step"):
            self._since_s = now
        self._write(now, note)
        if self._inject is not None:
            self._inject(name, self._step, self)

    def item(self, done: int, note: str | None = None) -> None:
        """Sub-progress: `done` items of this phase are complete. `note` says which one is next or was last."""
        self._done = done
        self._write(time.monotonic(), note)
        if self._inject is not None:
            self._inject(PHASES[self._phase], self._step, self)

    def step(self, step: int, epoch: int = 0, loss: float = math.nan, lr: float = math.nan) -> None:
        """Optimizer step number `step` (global, from 1) is complete. Moves the phase to "step"."""
        now = time.monotonic()
        _ITEM.pack_into(self._map, _AT_RING + (self._count % _RING) * 8, now - self._since_s)
        if self._phase != _STEP:
            self._phase, self._phase_s = _STEP, now
        self._count += 1
        self._step, self._epoch, self._loss, self._lr = step, epoch, loss, lr
        self._step_s = self._since_s = now
        self._done = self._total = 0
        self._write(now)
        if self._inject is not None:
            self._inject("step", step, self)

    def end(self, outcome: str, note: str = "") -> None:
        """Last words: why this process ends, one of OUTCOMES. A launcher may lose the exit code; the record does not."""
        now = time.monotonic()
        self._outcome = OUTCOMES.index(outcome)
        if outcome in ("done", "stopped"):  # otherwise the phase it ended in is the evidence
            self._phase, self._phase_s = _PHASE_INDEX["end"], now
        self._write(now, note)

    def _write(self, now: float, note: str | None = None) -> None:
        m = self._map
        self._sequence += 1
        _SEQUENCE.pack_into(m, _AT_SEQUENCE, self._sequence)
        _BODY.pack_into(
            m,
            _AT_BODY,
            self._phase,
            self._outcome,
            self._step,
            self._planned,
            self._epoch,
            self._done,
            self._total,
            self._count,
            self._loss,
            self._lr,
            now,
            self._phase_s,
            self._step_s,
            self._started_s,
        )
        if note is not None:
            text = _fit(note)
            _NOTE_LENGTH.pack_into(m, _AT_NOTE, len(text))
            m[_AT_NOTE + 2 : _AT_NOTE + 2 + len(text)] = text
        self._sequence += 1
        _SEQUENCE.pack_into(m, _AT_SEQUENCE, self._sequence)


_STEP = _PHASE_INDEX["step"]


def _fit(note: str) -> bytes:
    """`note` as UTF-8 of at most _NOTE bytes, cut between characters."""
    return note.encode("utf-8", "replace")[:_NOTE].decode("utf-8", "ignore").encode("utf-8")


def _create(path: Path) -> mmap.mmap:
    """A fresh zeroed record, put in place whole: a reader of the old one keeps the old one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w+b") as file:
        file.write(bytes(SIZE))
        file.flush()
        mapped = mmap.mmap(file.fileno(), SIZE)
    os.replace(temporary, path)
    return mapped


def read(path: str | os.PathLike) -> Beat:
    """The record at `path`. HeartbeatError when it is missing, foreign, or torn."""
    try:
        with open(path, "rb") as file:
            for _ in range(50):
                file.seek(0)
                data = file.read(SIZE)
                beat = _parse(data, path)
                if beat is not None:
                    file.seek(_AT_SEQUENCE)
                    if file.read(8) == data[_AT_SEQUENCE : _AT_SEQUENCE + 8]:
                        return beat
                time.sleep(0.0002)
    except OSError as error:
        raise HeartbeatError(f"{path}: cannot read the heartbeat: {error.strerror or error}") from error
    raise HeartbeatError(f"{path}: the heartbeat is torn: its process was ended in the middle of a write")


def _parse(data: bytes, path: str | os.PathLike) -> Beat | None:
    if len(data) != SIZE or _STATIC.unpack_from(data, 0) != (_MAGIC, _VERSION):
        raise HeartbeatError(f"{path}: not a heartbeat of this version")
    if _SEQUENCE.unpack_from(data, _AT_SEQUENCE)[0] % 2:
        return None
    rank, world, pid = _IDENTITY.unpack_from(data, _AT_IDENTITY)
    phase, outcome, step, planned, epoch, done, total, count, loss, lr, beat_s, phase_s, step_s, started_s = (
        _BODY.unpack_from(data, _AT_BODY)
    )
    length = _NOTE_LENGTH.unpack_from(data, _AT_NOTE)[0]
    if phase >= len(PHASES) or outcome >= len(OUTCOMES) or length > _NOTE:
        return None
    note = data[_AT_NOTE + 2 : _AT_NOTE + 2 + length].decode("utf-8", "replace")
    ring = struct.unpack_from(f"<{_RING}d", data, _AT_RING)
    oldest = count % _RING
    intervals = ring[:count] if count < _RING else ring[oldest:] + ring[:oldest]
    return Beat(
        rank=rank,
        world=world,
        pid=pid,
        request=_REQUEST.unpack_from(data, _AT_REQUEST)[0],
        phase=PHASES[phase],
        outcome=OUTCOMES[outcome],
        step=step,
        planned=planned,
        epoch=epoch,
        done=done,
        total=total,
        count=count,
        loss=loss,
        lr=lr,
        beat_s=beat_s,
        phase_s=phase_s,
        step_s=step_s,
        started_s=started_s,
        note=note,
        intervals=intervals,
    )


def read_all(folder: str | os.PathLike) -> list[Beat]:
    """Every readable record of a heartbeat folder, by rank; [] when there is none yet. Unreadable ones are left out."""
    beats = []
    for path in Path(folder).glob("rank-*.hb"):
        try:
            beats.append(read(path))
        except HeartbeatError:
            continue  # a record being replaced, or torn by a kill: the caller judges by what it can read
    return sorted(beats, key=lambda b: b.rank)


def set_request(path: str | os.PathLike, request: int) -> None:
    """Ask the process that beats at `path` for something: REQUEST_STOP, or REQUEST_NONE to take it back."""
    with open(path, "r+b") as file:
        file.seek(_AT_REQUEST)
        file.write(_REQUEST.pack(request))
