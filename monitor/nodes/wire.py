"""The messages between the leader and the nodes: JSON with a signature (HMAC-SHA256), checked field by field.

Decision: a shared secret that never travels. Each request carries a fresh number, and the answer's signature covers the
request's, so an answer cannot be replayed; a report repeats the challenge of the answer before, so a report cannot be
replayed either. Nothing is encrypted: who must hide the data set on the wire uses a VPN, as for accelerate's own traffic.

Clocks differ between machines: a node's monotonic times are shifted by an offset that the leader measures (`Clock`).
"""

from __future__ import annotations

import json
import math
import os
import types
import typing
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from guards.heartbeat import OUTCOMES, PHASES, Beat
from monitor.phrases import NODE_PIDS
from monitor.process.platform import ProcessInfo
from monitor.run_folder import MonitorError

POLL, LIST, FILE = "/poll", "/list", "/file"
SIGNATURE = "X-Hangproof-Signature"
REQUEST_BYTES = 8 << 20
ANSWER_BYTES = 64 << 20
TEXT = 1 << 20  # characters of one text
ITEMS = 20_000  # of one list
TOKEN_CHARACTERS = 16  # at least
MOMENTS = ("beat_s", "phase_s", "step_s", "started_s", "point_s")  # of a Beat; 0.0 stands for "never"
MOMENT_LISTS = ("reached",)
OFFSETS = 30  # reports over which a clock is compared
T = TypeVar("T")


class WireError(ValueError):
    """A message that is not what it should be. Nothing of it is used."""


@dataclass(frozen=True)
class Order:
    """What a node is to do. `want`: idle, prepare, run or exit. The rest describes the attempt, `group` is its name."""

    want: str = "idle"
    group: str = ""
    run: str = ""  # the name of the run's folder
    attempt: int = 0
    script: str = ""  # its file name, used where the folder is shared
    resume: str = ""  # the name of the state, "" for the start
    resume_path: str = ""  # its path on the leader, used where the folder is shared
    changes: tuple[str, ...] = ()  # mitigations in force
    shared: str = ""  # a number that the leader has written into its folder: a node that finds it shares the disk
    main_address: str = ""
    main_port: int = 0
    evidence: int = 0  # collect evidence on a suspected hang; another number asks anew, 0 stops
    lost_s: float = 30.0
    return_s: float = 900.0
    code: int = 0  # of `exit`
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What a node says about itself. `phase`: idle, preparing, ready, running, ended; all but idle belong to `group`."""

    node: int
    session: str  # another one after each start of the node's monitor
    mono_s: float  # its monotonic clock as it sends this
    group: str = ""
    phase: str = "idle"
    problem: str = ""  # why it cannot prepare, for people
    progress: str = ""  # what it prepares
    beats: tuple[Beat, ...] = ()
    living: tuple[ProcessInfo, ...] = ()  # ranks
    log_bytes: int = 0
    activity: float = 0.0
    code: int | None = None  # of the script, once it has ended
    signal: int | None = None
    note: str = ""  # why it ended, where the node itself ended it
    killed: tuple[str, ...] = ()  # processes that the node killed, for people
    survivors: tuple[ProcessInfo, ...] = ()  # that it could not kill
    evidence: int = 0  # of the order that the next five answer
    stuck: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    stacks: Mapping[int, str] | None = None
    processes: tuple[Mapping[str, int | float | str | bool], ...] = ()
    log_tail: str = ""  # once it has ended
    departs: bool = False  # its machine is taken away, or somebody stopped it


PHASES_OF_A_NODE = ("idle", "preparing", "ready", "running", "ended")
WANTS = ("idle", "prepare", "run", "exit")


def token_from(environ: Mapping[str, str]) -> bytes:
    """The shared secret of a run's machines. MonitorError: none is set, or it is too short."""
    token = environ.get("HANGPROOF_NODE_TOKEN", "")
    if len(token) < TOKEN_CHARACTERS:
        what = "is not set" if not token else f"has fewer than {TOKEN_CHARACTERS} characters"
        make = 'python -c "import secrets; print(secrets.token_hex(32))"'
        raise MonitorError(
            f"HANGPROOF_NODE_TOKEN {what}; make one secret with {make} and set it on every machine of the run"
        )
    return token.encode()


def address_of(text: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT` or `[IPV6]:PORT`. MonitorError: it is neither."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise MonitorError(f"the leader's address is {text!r}; write HOST:PORT, for example 192.168.1.20:29400")
    return host, int(port)


def sign(token: bytes, *parts: bytes) -> str:
    """The signature of these bytes, as hexadecimal text. Each part counts with its length."""
    import hmac  # brings OpenSSL, which the monitor of a run on one machine does without

    digest = hmac.new(token, digestmod="sha256")
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def signed_by(token: bytes, signature: str, *parts: bytes) -> bool:
    """Whether `signature` is that of `sign`; takes the same time for every wrong one."""
    import hmac

    return hmac.compare_digest(signature.encode("utf-8", "replace"), sign(token, *parts).encode())


def encode(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def decode(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. WireError: it is none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise WireError("not a JSON object")
    return values


def values_of(message: Any) -> dict[str, Any]:
    """A message as plain values, for `encode`."""
    return asdict(message)


def parse(kind: type[T], values: Mapping[str, Any]) -> T:
    """A message of this dataclass; unknown fields are ignored, so that versions may differ by one. WireError: a field is wrong."""
    hints = typing.get_type_hints(kind)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: _value(hints[name], value, name) for name, value in values.items() if name in names})
    except TypeError as error:
        raise WireError(f"{kind.__name__}: {error}") from error


def _value(hint: Any, value: Any, name: str) -> Any:
    """`value` as `hint` wants it. WireError: it is something else, or too large."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _of_any(arguments, value, name)
    if origin is tuple and isinstance(value, list) and len(value) <= ITEMS:
        return tuple(_value(arguments[0], item, name) for item in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict) and len(value) <= ITEMS:
        number = arguments[0] is int
        try:
            return {int(key) if number else str(key): _value(arguments[1], v, name) for key, v in value.items()}
        except ValueError as error:
            raise WireError(f"{name}: {error}") from error
    if is_dataclass(hint) and isinstance(value, dict):
        return parse(typing.cast(type, hint), value)
    plain = hint in (int, float, str, bool) and type(value) in ((int, float) if hint is float else (hint,))
    if not plain or (isinstance(value, str) and len(value) > TEXT) or (hint is int and abs(value) >= 1 << 62):
        raise WireError(f"{name}: {str(value)[:80]!r} is not what belongs there")
    return float(value) if hint is float else value


def _of_any(hints: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in hints:
        return None
    for hint in hints:
        if hint is not type(None):
            try:
                return _value(hint, value, name)
            except WireError:
                continue
    raise WireError(f"{name}: {str(value)[:80]!r} is not what belongs there")


def report_of(values: Mapping[str, Any], nodes: int, gpus: int) -> Report:
    """A checked report. WireError: a field is wrong, or the node speaks of ranks that are not its own.

    gpus: ranks of each node, 0 where that is not known (the user's own script).
    """
    report = parse(Report, values)
    if not 0 < report.node < nodes or report.phase not in PHASES_OF_A_NODE or not math.isfinite(report.mono_s):
        raise WireError(f"node {report.node}, phase {report.phase!r}: this run has nodes 1 to {nodes - 1}")
    for beat in report.beats:
        if beat.phase not in PHASES or beat.outcome not in OUTCOMES:
            raise WireError(f"rank {beat.rank}: phase {beat.phase!r}, outcome {beat.outcome!r}")
        if beat.rank <= 0 or (gpus and beat.rank // gpus != report.node):
            raise WireError(f"rank {beat.rank} is none of node {report.node}")
        if not all(math.isfinite(getattr(beat, name)) for name in MOMENTS):
            raise WireError(f"rank {beat.rank}: a time is not a number")
    numbers = [b.pid for b in report.beats] + [p.pid for p in (*report.living, *report.survivors)]
    if not all(0 < pid < NODE_PIDS for pid in (*numbers, *(report.stacks or {}))):
        raise WireError("a process number is out of range")
    return report


def here(beat: Beat, node: int, offset_s: float) -> Beat:
    """A node's beat as the leader uses it: its times on the leader's clock, its process number unique."""
    shifted: dict[str, Any] = {name: at + offset_s for name in MOMENTS if (at := getattr(beat, name))}
    shifted |= {name: tuple(at and at + offset_s for at in getattr(beat, name)) for name in MOMENT_LISTS}
    return replace(beat, pid=pid_of(node, beat.pid), **shifted)


def pid_of(node: int, pid: int) -> int:
    """A process number that no other machine of the run has."""
    return pid + node * NODE_PIDS


def process_of(node: int, process: ProcessInfo) -> ProcessInfo:
    """A node's process as the leader shows it."""
    return replace(process, pid=pid_of(node, process.pid), ppid=pid_of(node, process.ppid), name=process.name[:40])


class Clock:
    """How far the leader's monotonic clock is ahead of a node's.

    The smallest difference of the last reports is the best estimate, because a message can be late but never early. The
    window is short, because clocks drift, and because a node's clock stops while the machine is suspended.
    """

    def __init__(self) -> None:
        self._differences: deque[float] = deque(maxlen=OFFSETS)

    def compare(self, here_s: float, there_s: float) -> None:
        """A report that was sent at `there_s` on the node's clock arrived at `here_s` on the leader's."""
        self._differences.append(here_s - there_s)

    def restart(self) -> None:
        """The node's monitor, perhaps its machine, has started again."""
        self._differences.clear()

    @property
    def offset_s(self) -> float:
        return min(self._differences, default=0.0)


def fresh() -> str:
    """A random name."""
    return os.urandom(16).hex()
