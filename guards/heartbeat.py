"""The heartbeat: one memory-mapped record for each rank, so that other processes can read the progress.

Decision: a file that both sides map, not a socket or a queue. A beat is a few memory writes (no system call, no lock,
nothing that can block), it outlives either side, and a reader finds the final record of a killed process. A client
that contacts a server at each step costs hundreds of microseconds; a beat costs one.

The record carries *progress* (steps completed, items done in a phase). There is no thread that beats: a tick without a
changed counter is not progress. Times are `time.monotonic()` seconds, one clock for all processes of a host. A sequence
number that is odd during a write lets a reader refuse a torn record. Behind it stand the check points of the start
(guards/startup.py), so that a rank that hangs before its first step shows where, beside the others.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from guards import startup

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
REQUEST_TERM = 2  # set by the process itself when it got SIGTERM; it acts as for REQUEST_STOP

_MAGIC = 0x48504842  # "HPHB"
_VERSION = 2
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
_BEAT_FIELD = 10  # of _BODY: when the last beat was written
_AT_NOTE = _AT_BODY + _BODY.size
_AT_WAITED = 504
_AT_RING = 512
# last check point reached (-1: none), local rank | since when | when each one was first reached | seconds spent in each
_POINTS = struct.Struct(f"<iid{len(startup.NAMES)}d{len(startup.NAMES)}d")
_AT_POINTS = _AT_RING + _RING * _ITEM.size
_AT_ABOUT = _AT_POINTS + _POINTS.size
SIZE = 8192
_ABOUT = SIZE - _AT_ABOUT - _NOTE_LENGTH.size
assert _AT_NOTE + _NOTE_LENGTH.size + _NOTE <= _AT_WAITED

_PHASE_INDEX = {name: i for i, name in enumerate(PHASES)}


class HeartbeatError(OSError):
    """A heartbeat record that cannot be read: missing, of another version, or torn for longer than a write lasts."""


@dataclass(frozen=True)
class Beat:
    """A record at one moment. Times are `time.monotonic()` seconds of this host; `intervals` are seconds."""

    rank: int
    world: int
    pid: int
    request: int
    phase: str
    outcome: str
    step: int  # global optimizer steps completed, resumed ones included
    planned: int  # optimizer steps of the complete run, 0 while unknown
    epoch: int
    done: int  # items done inside the phase
    total: int  # items of the phase, 0 while unknown
    count: int  # optimizer steps completed by this process
    loss: float
    lr: float
    beat_s: float  # the last beat of any kind
    phase_s: float  # when the phase was entered
    step_s: float  # when the last optimizer step completed, 0.0 before the first
    started_s: float
    note: str
    intervals: tuple[float, ...]  # durations of the last steps of this process, oldest first
    local_rank: int = 0
    point: str = ""  # the check point reached last, one of startup.NAMES; "" before the first
    point_s: float = 0.0  # when it was reached
    reached: tuple[float, ...] = ()  # when each check point was first reached, 0.0 for never
    spent: tuple[float, ...] = ()  # seconds in each check point, those in the last one up to `point_s`
    waited_s: float = 0.0  # seconds that this process has waited for its data loader
    about: str = ""  # host, device, backend, environment: `startup.read_about`


def path_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """The record of `rank` in a heartbeat folder."""
    return Path(folder) / f"rank-{rank}.hb"


class Heartbeat:
    """The writer, one for each process. Without a path it counts and writes nowhere, so callers need no `if`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
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
        self._waited_s = 0.0
        self._point, self._point_s, self._local_rank = -1, now, _number_in_environment("LOCAL_RANK")
        self._reached, self._spent = [0.0] * len(startup.NAMES), [0.0] * len(startup.NAMES)
        _STATIC.pack_into(self._map, 0, _MAGIC, _VERSION)
        _IDENTITY.pack_into(self._map, _AT_IDENTITY, rank, world, os.getpid())
        self._write(now, "")
        self._write_points()
        self.describe()

    @classmethod
    def from_env(cls, rank: int | None = None) -> Heartbeat:
        """The heartbeat that the environment describes.

        `HANGPROOF_HEARTBEAT` names the folder (unset: nothing is written), `RANK` and `WORLD_SIZE` are the launcher's,
        `HANGPROOF_INJECT` = `module:function` is a fault injector that every beat calls (tests and benchmarks only).
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
    def last_beat_s(self) -> float:
        """When the last beat of any kind was written, in monotonic seconds."""
        return float(_BODY.unpack_from(self._map, _AT_BODY)[_BEAT_FIELD])

    @property
    def request(self) -> int:
        """REQUEST_NONE, or REQUEST_STOP: save a state at the next step boundary, then exit.

        The record itself tells who requested it: REQUEST_STOP the monitor, REQUEST_TERM a signal to this process.
        """
        request: int = _REQUEST.unpack_from(self._map, _AT_REQUEST)[0]
        return REQUEST_STOP if request == REQUEST_TERM else request

    def request_stop(self) -> bool:
        """Request a stop because of SIGTERM. False where no step is complete: there is nothing to save."""
        if self._count and self.request == REQUEST_NONE:
            _REQUEST.pack_into(self._map, _AT_REQUEST, REQUEST_TERM)
        return self._count > 0

    def plan(self, total_steps: int) -> None:
        """Record how many optimizer steps the run has."""
        self._planned = total_steps
        self._write(time.monotonic())

    def phase(self, name: str, total: int = 0, note: str = "") -> None:
        """Enter a phase of PHASES with `total` items (0: unknown). KeyError for any other name."""
        now = time.monotonic()
        self._phase, self._done, self._total = _PHASE_INDEX[name], 0, total
        self._phase_s = now
        if name in ("first_step", "step"):
            self._since_s = now
        self._write(now, note)
        if self._inject is not None:
            self._inject(name, self._step, self)

    def item(self, done: int, note: str | None = None) -> None:
        """`done` items of this phase are complete. `note` names the next or the last one."""
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

    def waited(self, seconds: float) -> None:
        """The training has waited so many seconds for a batch of its data loader."""
        self._waited_s += seconds
        _ITEM.pack_into(self._map, _AT_WAITED, self._waited_s)

    def reach(self, point: str) -> None:
        """The check point `point` of startup.NAMES begins now. It may start over later; an unknown name is ignored.

        Never raises: a trainer must not fail because of its report. It costs microseconds, a few times in a run.
        """
        index = _POINT_INDEX.get(point, -1)
        if index < 0 or index == self._point:
            return
        now = time.monotonic()
        if self._point >= 0:
            self._spent[self._point] += now - self._point_s
        passed = range(index + 1) if point in startup.PASSES_ALL else (index,)
        for i in passed:
            self._reached[i] = self._reached[i] or now
        self._point, self._point_s = index, now
        self._write_points()
        if self._inject is not None:
            self._inject(POINT + point, self._step, self)

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its machine."""
        return self._local_rank

    @property
    def point(self) -> str:
        """The check point reached last, "" before the first."""
        return startup.NAMES[self._point] if self._point >= 0 else ""

    def describe(self, device: str = "", backend: str = "") -> None:
        """Record the environment as it is now, the device and the backend of the process group. Never raises."""
        text = startup.about(device, backend, _ABOUT)
        self._begin()
        _NOTE_LENGTH.pack_into(self._map, _AT_ABOUT, len(text))
        at = _AT_ABOUT + _NOTE_LENGTH.size
        self._map[at : at + len(text)] = text
        self._finish()

    def end(self, outcome: str, note: str = "") -> None:
        """Record the outcome, one of OUTCOMES, and its reason. A launcher may lose the exit code; the record is kept.

        "done" is the final beat: only what the limit `exit_grace_s` covers may follow.
        """
        now = time.monotonic()
        self._outcome = OUTCOMES.index(outcome)
        if outcome in ("done", "stopped"):  # after a failure the phase it happened in is the evidence
            self._phase, self._phase_s = _PHASE_INDEX["end"], now
        self._write(now, note)

    def _begin(self) -> None:
        """The record is being written: the sequence number is odd."""
        self._sequence += 1
        _SEQUENCE.pack_into(self._map, _AT_SEQUENCE, self._sequence)

    def _finish(self) -> None:
        self._sequence += 1
        _SEQUENCE.pack_into(self._map, _AT_SEQUENCE, self._sequence)

    def _write_points(self) -> None:
        self._begin()
        _POINTS.pack_into(
            self._map, _AT_POINTS, self._point, self._local_rank, self._point_s, *self._reached, *self._spent
        )
        self._finish()

    def _write(self, now: float, note: str | None = None) -> None:
        m = self._map
        self._begin()
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
        self._finish()


POINT = "check point "
"""Begins the name that `inject` is called with at a check point."""
_STEP = _PHASE_INDEX["step"]
_POINT_INDEX = {name: i for i, name in enumerate(startup.NAMES)}


def _number_in_environment(name: str) -> int:
    """The number in an environment variable, 0 without one."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def _fit(note: str) -> bytes:
    """`note` as UTF-8 of at most _NOTE bytes, cut between characters."""
    return note.encode("utf-8", "replace")[:_NOTE].decode("utf-8", "ignore").encode("utf-8")


def _create(path: Path) -> mmap.mmap:
    """A new zeroed record at `path`, mode 0600. A reader of the old record keeps the old one.

    Windows does not rename a file that is open or mapped, so the temporary file is closed before the rename and the final
    one is mapped. Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(bytes(SIZE))
    _replace(temporary, path)
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)


def _replace(temporary: Path, path: Path) -> None:
    for _ in range(50 if os.name == "nt" else 0):  # a reader has the old record open for a moment
        try:
            return os.replace(temporary, path)
        except PermissionError:
            time.sleep(0.02)
    os.replace(temporary, path)


def read(path: str | os.PathLike[str]) -> Beat:
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
    raise HeartbeatError(f"{path}: the heartbeat is torn: its process was killed during a write")


def _parse(data: bytes, path: str | os.PathLike[str]) -> Beat | None:
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
    last, local_rank, point_s, *times = _POINTS.unpack_from(data, _AT_POINTS)
    about = _NOTE_LENGTH.unpack_from(data, _AT_ABOUT)[0]
    if not -1 <= last < len(startup.NAMES) or about > _ABOUT:
        return None
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
        local_rank=local_rank,
        point=startup.NAMES[last] if last >= 0 else "",
        point_s=point_s,
        reached=tuple(times[: len(startup.NAMES)]),
        spent=tuple(times[len(startup.NAMES) :]),
        waited_s=_ITEM.unpack_from(data, _AT_WAITED)[0],
        about=data[_AT_ABOUT + 2 : _AT_ABOUT + 2 + about].decode("utf-8", "replace"),
    )


def read_all(folder: str | os.PathLike[str]) -> list[Beat]:
    """Every readable record of a heartbeat folder, sorted by rank; [] when there is none. Never raises: unreadable ones are left out."""
    beats = []
    try:
        paths = [Path(folder) / name for name in os.listdir(folder) if re.fullmatch(r"rank-\d+\.hb", name)]
    except OSError:
        return []
    for path in paths:
        try:
            beats.append(read(path))
        except HeartbeatError:
            continue  # it is being replaced, or a kill tore it: the caller decides with what is readable
    return sorted(beats, key=lambda b: b.rank)


def set_request(path: str | os.PathLike[str], request: int) -> None:
    """Send REQUEST_STOP to the process whose record is `path`, or REQUEST_NONE to withdraw it. Raises OSError."""
    with open(path, "r+b") as file:
        file.seek(_AT_REQUEST)
        file.write(_REQUEST.pack(request))
