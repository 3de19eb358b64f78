"""The heartbeat: one memory-mapped record for each rank, so that other processes can read the progress.

Decision: a file that both sides map, not a socket or a queue. A beat is a few memory writes (no system call, no lock,
nothing that can block), it outlives either side, and a reader finds the final record of a killed process. A client
that contacts a server at each step costs hundreds of microseconds; a beat costs one.

The record carries *progress* (steps completed, items done in a phase). There is no thread that beats: a tick without a
changed counter is not progress. Times are `time.monotonic()` seconds, one clock for all processes of a host. A sequence
number that is odd during a write lets a reader refuse a torn record.

Behind it stand the check points of the start, so that a rank that hangs before its first step shows where. They have
fixed numbers for all three trainers, although these pass them in different orders: a report is read across trainers and
across ranks. Stored are when each one was first reached, how long was spent in it, and which one was reached last.

The environment is part of the record because it is the process's own: a launcher may change it after the monitor
started the script. The limits of guards/limits.toml are among it, because the monitor's own must enclose them. Values
that may be secrets are replaced before they are stored.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import mmap
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guards.checkpoint import writing_file
from guards.reading import json_object, number

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
CHECK_POINTS: dict[str, str] = {
    "arguments": "imports and arguments",
    "folders": "folders",
    "tokenizer": "tokenizers and text encoders",
    "model": "base model",
    "network": "LoRA network",
    "data": "data set and caches",
    "accelerator": "device and process group",
    "tracker": "experiment tracker",
    "loader": "data loader and optimizer",
    "ready": "last preparations",
    "first_step": "first step",
    "finished": "end of training",
}
"""Name -> what the rank does from there on. The number of a check point is its position, from 1."""
POINTS = tuple(CHECK_POINTS)
OUTCOMES = ("running", "done", "stopped", "failed", "deadline")
REQUEST_NONE = 0
REQUEST_STOP = 1
REQUEST_TERM = 2  # set by the process itself when it got SIGTERM; it acts as for REQUEST_STOP

_MAGIC = 0x48504842  # "HPHB"
_VERSION = 2
_RING = 256
_NOTE = 240
SIZE = 8192
_ABOUT = 5422  # bytes: what is left of SIZE

_PHASE_INDEX = {name: i for i, name in enumerate(PHASES)}
_STEP = _PHASE_INDEX["step"]
WAITS = "waiting for rank"
"""Begins the note of a rank that waits for another one."""

SHOWN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(CUDA|HIP|ROCR)_VISIBLE_DEVICES"
    r"|(TORCH_)?NCCL_\w+|GLOO_\w+|TP_SOCKET_IFNAME|WANDB_\w+|HF_HUB_OFFLINE|OMP_NUM_THREADS|HANGPROOF_\w+_S)"
)
HIDDEN = "(set, hidden)"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|IDENTITY|HEADER", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*@|[A-Za-z0-9+_=-]{32,}")  # a password in an address; a long key without "/"
VALUE_CHARACTERS, SECRET_CHARACTERS = 200, 8  # of a value: shown at most; from which it is looked for in a text


class Record(ctypes.Structure):
    """The record as it lies in the file. Times in monotonic seconds; `Beat` says what each field means."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("sequence", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("rank", "world", "pid", "request", "phase", "outcome")),
        *((name, ctypes.c_int64) for name in ("step", "planned", "epoch", "done", "total", "count")),
        *((name, ctypes.c_double) for name in ("loss", "lr", "beat_s", "phase_s", "step_s", "started_s")),
        ("note_bytes", ctypes.c_uint16),
        ("note", ctypes.c_ubyte * _NOTE),
        ("unused", ctypes.c_ubyte * 126),
        ("waited_s", ctypes.c_double),
        ("ring", ctypes.c_double * _RING),  # durations of steps, the one with number N at N % _RING
        ("point", ctypes.c_int32),  # the last check point reached, -1: none
        ("local_rank", ctypes.c_int32),
        ("point_s", ctypes.c_double),
        ("reached", ctypes.c_double * len(POINTS)),
        ("spent", ctypes.c_double * len(POINTS)),
        ("about_bytes", ctypes.c_uint16),
        ("about", ctypes.c_ubyte * _ABOUT),
    )


assert ctypes.sizeof(Record) == SIZE and Record.waited_s.offset == 504
_NUMBERS = (ctypes.c_int32, ctypes.c_int64, ctypes.c_double)
_SAME = [name for name, kind, *_ in Record._fields_ if kind in _NUMBERS and name not in ("phase", "outcome", "point")]
"""The fields that a Beat has as they are."""


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
    point: str = ""  # the check point reached last, one of POINTS; "" before the first
    point_s: float = 0.0  # when it was reached
    reached: tuple[float, ...] = ()  # when each check point was first reached, 0.0 for never
    spent: tuple[float, ...] = ()  # seconds in each check point, those in the last one up to `point_s`
    waited_s: float = 0.0  # seconds that this process has waited for its data loader
    about: dict[str, Any] = field(default_factory=dict)  # host, device, backend, environment; {}: not readable


def path_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """The record of `rank` in a heartbeat folder."""
    return Path(folder) / f"rank-{rank}.hb"


def stacks_path(folder: str | os.PathLike[str], pid: int) -> Path:
    """The file in it for the stacks of process `pid` (guards/crash.py), once its signal handler is registered."""
    return Path(folder) / f"stacks-{pid}.txt"


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
        self._inject = inject or (lambda *_: None)
        self.record = record = Record.from_buffer(_create(self.path) if self.path is not None else bytearray(SIZE))
        now = time.monotonic()
        self._since_s = now  # when the step under way began
        record.magic, record.version = _MAGIC, _VERSION
        record.rank, record.world, record.pid = rank, world, os.getpid()
        record.loss = record.lr = math.nan
        record.phase_s = record.started_s = record.beat_s = record.point_s = now
        record.point, record.local_rank = -1, number("LOCAL_RANK", 0)
        self.describe()

    @classmethod
    def from_env(cls) -> Heartbeat:
        """The heartbeat that the environment describes.

        `HANGPROOF_HEARTBEAT` names the folder (unset: nothing is written), `RANK` and `WORLD_SIZE` are the launcher's,
        `HANGPROOF_INJECT` = `module:function` is a fault injector that every beat calls (tests and benchmarks only).
        """
        folder = os.environ.get("HANGPROOF_HEARTBEAT")
        rank, world = number("RANK", 0), number("WORLD_SIZE", 1)
        inject = None
        if os.environ.get("HANGPROOF_INJECT"):
            module, _, function = os.environ["HANGPROOF_INJECT"].partition(":")
            inject = getattr(importlib.import_module(module), function)
        return cls(path_of(folder, rank) if folder else None, rank, world, inject)

    @property
    def current_phase(self) -> str:
        """The name of the phase, one of PHASES."""
        return PHASES[self.record.phase]

    @property
    def request(self) -> int:
        """REQUEST_NONE, or REQUEST_STOP, whoever requested it: save a state at the next step boundary, then exit."""
        request: int = self.record.request
        return REQUEST_STOP if request == REQUEST_TERM else request

    def request_stop(self) -> bool:
        """Request a stop because of SIGTERM. False where no step is complete: there is nothing to save."""
        if self.record.count and self.request == REQUEST_NONE:
            self.record.request = REQUEST_TERM
        return self.record.count > 0

    def plan(self, total_steps: int) -> None:
        """Record how many optimizer steps the run has."""
        self._write(time.monotonic(), planned=total_steps)

    def phase(self, name: str, total: int = 0, note: str = "") -> None:
        """Enter a phase of PHASES with `total` items (0: unknown). KeyError for any other name."""
        now = time.monotonic()
        if name in ("first_step", "step"):
            self._since_s = now
        self._write(now, note, phase=_PHASE_INDEX[name], done=0, total=total, phase_s=now)
        self._inject(name, self.record.step, self)

    def item(self, done: int, note: str | None = None) -> None:
        """`done` items of this phase are complete. `note` names the next or the last one."""
        self._write(time.monotonic(), note, done=done)
        self._inject(self.current_phase, self.record.step, self)

    def step(self, step: int, epoch: int = 0, loss: float = math.nan, lr: float = math.nan) -> None:
        """Optimizer step number `step` (global, from 1) is complete. Moves the phase to "step"."""
        now, record = time.monotonic(), self.record
        record.sequence += 1
        record.ring[record.count % _RING] = now - self._since_s
        if record.phase != _STEP:
            record.phase, record.phase_s = _STEP, now
        record.step, record.epoch, record.loss, record.lr = step, epoch, loss, lr
        record.count += 1
        record.done = record.total = 0
        record.beat_s = record.step_s = self._since_s = now
        record.sequence += 1
        self._inject("step", step, self)

    def waited(self, seconds: float) -> None:
        """The training has waited so many seconds for a batch of its data loader."""
        self.record.waited_s += seconds

    def reach(self, point: str) -> None:
        """The check point `point` of POINTS begins now. It may start over later; an unknown name is ignored.

        Never raises: a trainer must not fail because of its report. It costs microseconds, a few times in a run.
        """
        if point not in POINTS or point == self.point:
            return
        index, now, record = POINTS.index(point), time.monotonic(), self.record
        record.sequence += 1
        if record.point >= 0:
            record.spent[record.point] += now - record.point_s
        # A rank that reaches one of these has passed all before it, used or not (a run without a tracker).
        for i in range(index + 1) if point in ("first_step", "finished") else (index,):
            record.reached[i] = record.reached[i] or now
        record.point, record.point_s = index, now
        record.sequence += 1
        self._inject(f"check point {point}", record.step, self)

    @property
    def point(self) -> str:
        """The check point reached last, "" before the first."""
        return POINTS[self.record.point] if self.record.point >= 0 else ""

    def describe(self, device: str = "", backend: str = "") -> None:
        """Record the environment as it is now, the device and the backend of the process group. Never raises."""
        text = _about(device, backend)
        self.record.sequence += 1
        self.record.about_bytes, self.record.about[: len(text)] = len(text), text
        self.record.sequence += 1

    def end(self, outcome: str, note: str = "") -> None:
        """Record the outcome, one of OUTCOMES, and its reason. A launcher may lose the exit code; the record is kept.

        "done" is the final beat: only what the limit `exit_grace_s` covers may follow.
        """
        now = time.monotonic()
        # After a failure the phase it happened in is the evidence.
        ended = {"phase": _PHASE_INDEX["end"], "phase_s": now} if outcome in ("done", "stopped") else {}
        self._write(now, _hidden(note), outcome=OUTCOMES.index(outcome), **ended)

    def _write(self, now: float, note: str | None = None, **fields: float) -> None:
        """Set these fields. The sequence number is odd meanwhile."""
        record = self.record
        record.sequence += 1
        for name, value in fields.items():
            setattr(record, name, value)
        record.beat_s = now
        if note is not None:
            # Cut between characters.
            text = note.encode("utf-8", "replace")[:_NOTE].decode("utf-8", "ignore").encode("utf-8")
            record.note_bytes, record.note[: len(text)] = len(text), text
        record.sequence += 1


def _hidden(text: str) -> str:
    """A text with the names instead of the values of this process's secrets: an error gets into the run's reports."""
    for name, value in os.environ.items():
        if len(value) >= SECRET_CHARACTERS and _SECRET_NAME.search(name):
            text = text.replace(value, f"({name})")
    return text


def _about(device: str, backend: str) -> bytes:
    """What the record says about the process, as JSON: host, device, backend, environment.

    The variables of SHOWN that are set and fit, without secrets; long values are cut.
    """
    variables = {name: os.environ[name] for name in sorted(os.environ) if SHOWN.fullmatch(name)}
    for name, value in variables.items():
        secret = value and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
        variables[name] = HIDDEN if secret else value[:VALUE_CHARACTERS]
    while True:
        facts = {"host": socket.gethostname(), "device": device, "backend": backend, "environment": variables}
        text = json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace")
        if len(text) <= _ABOUT or not variables:
            return text[:_ABOUT]
        variables.popitem()


def _create(path: Path) -> mmap.mmap:
    """A new zeroed record at `path`, mode 0600. A reader of the old record keeps the old one.

    Windows does not rename a file that is open or mapped, so the temporary file is closed before the rename and the
    final one is mapped. Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with (
        writing_file(path, False, temporary),
        open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
    ):
        file.write(bytes(SIZE))
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)


def read(path: str | os.PathLike[str]) -> Beat:
    """The record at `path`. HeartbeatError when it is missing, foreign, or torn."""
    try:
        with open(path, "rb", buffering=0) as file:
            for _ in range(50):
                file.seek(0)
                data = file.read(SIZE)
                beat = _parse(data, path)
                if beat is not None:
                    file.seek(Record.sequence.offset)
                    if file.read(8) == data[Record.sequence.offset :][:8]:
                        return beat
                time.sleep(0.0002)
    except OSError as error:
        raise HeartbeatError(f"{path}: cannot read the heartbeat: {error.strerror or error}") from error
    raise HeartbeatError(f"{path}: the heartbeat is torn: its process was killed during a write")


def _parse(data: bytes, path: str | os.PathLike[str]) -> Beat | None:
    """The record in these bytes; None for one that is being written."""
    if len(data) != SIZE or (record := Record.from_buffer_copy(data)).magic != _MAGIC or record.version != _VERSION:
        raise HeartbeatError(f"{path}: not a heartbeat of this version")
    whole = 0 <= record.phase < len(PHASES) and 0 <= record.outcome < len(OUTCOMES) and record.note_bytes <= _NOTE
    whole = whole and -1 <= record.point < len(POINTS) and record.about_bytes <= _ABOUT
    if record.sequence % 2 or not whole:
        return None
    oldest = record.count % _RING if record.count > _RING else 0
    ring = record.ring[: min(record.count, _RING)]
    return Beat(
        **{name: getattr(record, name) for name in _SAME},
        phase=PHASES[record.phase],
        outcome=OUTCOMES[record.outcome],
        note=data[Record.note.offset :][: record.note_bytes].decode("utf-8", "replace"),
        intervals=(*ring[oldest:], *ring[:oldest]),
        point=POINTS[record.point] if record.point >= 0 else "",
        reached=tuple(record.reached),
        spent=tuple(record.spent),
        about=json_object(data[Record.about.offset :][: record.about_bytes]) or {},
    )


def read_all(folder: str | os.PathLike[str]) -> list[Beat]:
    """Every readable record of a heartbeat folder, sorted by rank; unreadable ones are left out. Never raises."""
    beats = []
    try:
        paths = [os.path.join(folder, name) for name in os.listdir(folder) if re.fullmatch(r"rank-\d+\.hb", name)]
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
        file.seek(Record.request.offset)
        file.write(request.to_bytes(4, "little"))
