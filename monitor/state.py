"""The records that the parts of the monitor hand one another: each thing has one, with one writer.

    record          what it is                              written by                  read by
    Observation     progress: an attempt at one poll        Attempt.poll                Watch, supervisor, loop, standby
    Signals         evidence that speaks for or against     detect/probe.py             Watch, diagnose
    Verdict         what follows from these                 Watch.observe               supervisor, diagnose
    AttemptRecord   an attempt, for whoever adopts it       Attempt                     Attempt.adopt; in monitor.json
    ExitStatus      how an attempt ended                    Attempt.exit_status         supervisor, recovery, diagnose
    ResumePoint     a state to resume from                  checkpoints.choose          recovery
    Transition      the next state of the run               supervisor, recovery        Loop.enter
    RunState        what must survive the monitor itself    loop, supervisor, recovery; kept in monitor.json

A monitor that is killed leaves monitor.json behind; the next one reads it, finds the living training by its token and
(pid, start time), and continues with whatever was under way: a recovery, a stop, or a healthy attempt. The progress of
a rank itself is a `Beat` (guards/heartbeat.py), which the training writes. What happened is an `Incident`
(diagnose/incident.py); where the time went, a `Ledger`.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from guards.checkpoint import atomic_write, exists
from guards.heartbeat import Beat
from guards.reading import read_bytes
from monitor import gpu
from monitor.config import Section
from monitor.ledger import Ledger, amount
from monitor.process import platform
from monitor.process.platform import LOCK, is_held
from monitor.run_folder import JOB, STATE, STATUS, MonitorError, RunFolder, read_json
from runs.files import checksum, typed, unwritable

VERSION = 2
LEARNED = ".learned.json"  # beside the runs: durations that completed runs recorded
CARRIED = (  # to another machine
    "attempt", "restarts", "best_step", "planned", "started_at", "gpu", "changes", "changes_at_save", "cause_counts", "ledger",
)  # fmt: skip
STALE_S = 30.0  # status.json is written once a second


class State(enum.StrEnum):
    """The states of a run. The values are part of the contract with the page (status.json)."""

    OPENING = "opening"  # adopt a living training, or prepare a start
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUSPECT = "suspect"
    SLOW = "slow"
    RECOVERING = "recovering"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    PAUSED = "paused"  # the user stopped it to go on later
    PREEMPTED = "preempted"
    UNKILLABLE = "unkillable"


WATCHED = (State.STARTING, State.RUNNING, State.SUSPECT, State.SLOW)  # a training is under way
EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_BUDGET, EXIT_PREEMPTED = 0, 1, 3, 4, 5  # of `monitor run`
EXIT_AGAIN = 6  # of several machines: this one has ended its ranks; whoever started the group starts all of it again
EXIT_CODES = {  # of the final states, where a transition names no other
    State.COMPLETED: EXIT_DONE, State.FAILED: EXIT_FAILED, State.STOPPED: EXIT_STOPPED, State.PAUSED: EXIT_STOPPED,
    State.PREEMPTED: EXIT_PREEMPTED, State.UNKILLABLE: EXIT_FAILED,
}  # fmt: skip
FINAL = frozenset(EXIT_CODES)


@dataclass(frozen=True)
class Transition:
    """The next state and a message for people: what a state, a start and a recovery return.

    `due_s`: the state's wait is over then, and the next turn is no later; `give_up_s`: processes that cannot be killed
    are waited for until then. Monotonic times, 0.0 for none. `code`: the exit code, where the final state has another.
    """

    state: State
    message: str = ""
    due_s: float = 0.0
    give_up_s: float = 0.0
    code: int | None = None


@dataclass(frozen=True)
class AttemptRecord:
    """What a later monitor needs to adopt an attempt. `Attempt` writes it before the script starts (`root` is then
    None), and `Attempt.adopt` reads it."""

    boot_id: str
    number: int
    token: str
    heartbeats: str
    log_start: int
    started_s: float  # monotonic
    root: tuple[int, float] | None = None  # (pid, start time) of the script's shell
    oom_kills: dict[str, int] = field(default_factory=dict)  # the kernel's counters at the start, by source


@dataclass(frozen=True)
class Signals:
    """Evidence as sentences: the run is stuck, is slow but moves, computes (counts only without heartbeats)."""

    stuck: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """What the monitor sees of an attempt at one poll."""

    now_s: float  # monotonic clock
    boot_s: float  # boot clock
    beats: Sequence[Beat] = ()  # of the ranks
    log_bytes: int = 0
    signals: Signals = Signals()
    stopped: frozenset[int] = frozenset()  # pids of the ranks that a signal has stopped
    ranks_gone: bool = False  # there were ranks, and no rank's process lives
    activity: float = 0.0  # grows while the script's remaining processes are at work
    dead: frozenset[int] = frozenset()  # pids of beats whose process does not live; once it is done, nothing watches it
    ended: bool = False  # neither the script nor a rank is alive on this machine

    @property
    def step(self) -> int:
        """The furthest step of any rank."""
        return max((b.step for b in self.beats), default=0)


@dataclass(frozen=True)
class Verdict:
    """One of OK, SUSPECT, SLOW, HUNG, OVER, for the rank that is worst off: its phase, its step, and for how long."""

    kind: str
    rank: int = 0
    phase: str = "import"
    step: int = 0
    stalled_s: float = 0.0
    budget_s: float = 0.0
    evidence: tuple[str, ...] = ()
    reset: str = ""  # why this observation reset the timers, "" when it did not


@dataclass(frozen=True)
class ExitStatus:
    """How an attempt ended. `code` None: unknown; `outcome` and `note` are the final record of this machine's first
    rank, "" without one."""

    code: int | None
    signal: int | None
    outcome: str
    note: str
    trained: bool  # that rank completed steps, and all that were planned

    def done(self, foreign: bool, killed: bool) -> bool:
        """Did the training complete? The script's own exit decides.

        foreign: the user's own script, whose stages and files are unknown. killed: the monitor killed it after its
        ranks had reported their outcome, so that its exit code says nothing. For a rendered script the caller also
        verifies the LoRA.
        """
        ended_well = self.code == 0 and not killed
        if self.outcome != "done":
            return ended_well and self.outcome == ""
        return ended_well or (self.trained and (killed or self.code is None or not foreign))

    def __str__(self) -> str:
        if self.signal:
            return f"killed by {platform.signal_name(self.signal)}"
        note = f" ({self.note})" if self.note else ""
        final = f", final record: {self.outcome}{note}" if self.outcome not in ("", "running") else ""
        return (f"exit code {self.code}" if self.code is not None else "gone without an exit code") + final


@dataclass(frozen=True)
class ResumePoint:
    """Where to resume: `choose` makes it, a start uses it. `path` None: from the start.

    `bad`: set aside, with the reason; `unsure`: not verifiable now.
    """

    path: Path | None
    step: int = 0
    bad: tuple[tuple[Path, str], ...] = ()
    unsure: tuple[tuple[Path, str], ...] = ()
    record: Path | None = None  # the snapshot in memory that the starting process makes `path` from
    python: str = ""  # the interpreter that made that
    small: bool = False  # the monitor verifies it itself, because reading it takes a moment only


MIXED_COUNT = 2  # failures of changing fingerprints are allowed this many more than one that repeats


@dataclass(frozen=True)
class History:
    """The failures so far, and the rule for restarts (recovery.py says why it is that)."""

    restarts: int = 0  # since the last refund
    failures: dict[str, int] = field(default_factory=dict)  # fingerprint -> failures since the last new step
    new_steps_s: float = 0.0  # seconds of new steps since the last refund

    def after_progress(self, seconds: float, restart: Section) -> tuple[History, bool]:
        """The history after a new step, which took `seconds`; whether it gave back the full allowance of restarts."""
        new_steps_s = self.new_steps_s + seconds
        if new_steps_s < restart.refund_s or not self.restarts:
            return replace(self, failures={}, new_steps_s=new_steps_s), False
        return History(), True

    def after_failure(
        self, mark: str, changes: bool, restart: Section, least_wait_s: float = 0.0
    ) -> tuple[History, str, float]:
        """The history after a failure; the reason to end the run, "" to restart it; the seconds to wait before that.

        Args:
            mark: the failure's fingerprint.
            changes: the restart changes something.
            least_wait_s: what the cause needs (a full disk, a GPU that is being reset).
        """
        failures = {**self.failures, mark: self.failures.get(mark, 0) + 1}
        counted = replace(self, failures=failures)
        same, in_all = failures[mark], sum(failures.values())
        if same >= restart.without_progress_count and not changes:
            return counted, f"the same failure {same} times without a new step", 0.0
        if in_all >= restart.without_progress_count + MIXED_COUNT and not changes:
            return counted, f"{in_all} failures in a row without a new step", 0.0
        if self.restarts >= restart.in_all_count:
            return counted, f"all {self.restarts} restarts are used up", 0.0
        wait_s = 0.0 if in_all == 1 else min(restart.backoff_first_s * 2 ** (in_all - 2), restart.backoff_last_s)
        return replace(counted, restarts=self.restarts + 1), "", max(wait_s, least_wait_s)


@dataclass(frozen=True)
class Shutdown:
    """A requested end. `ending` is stopped, paused, preempted, spent, or changed (a restart follows).

    gone_by_s: monotonic; the first SIGTERM sets it.
    """

    ending: str
    now: bool = False
    gone_by_s: float | None = None


@dataclass
class RunState:
    """What a later monitor must know of a run: all of monitor.json. Plain values only."""

    state: State = State.OPENING
    attempt: int = 0  # the last attempt that was started
    restarts: int = 0  # of the whole run, never refunded: what the user is shown
    best_step: int = 0  # the furthest step that any attempt reached since the user's start, or where that began
    resumed_step: int = 0  # where the current attempt began
    planned: int = 0
    started_at: str | None = None
    keeper: str = ""  # (pid, start) of the process that restarts the monitor which saved this
    reason: str | None = None
    code: int = EXIT_FAILED  # of `monitor run`, once the run has ended
    history: History = field(default_factory=History)
    changes: list[dict[str, Any]] = field(default_factory=list)  # mitigations in force: {"name", "sentence", "patch"}
    changes_at_save: list[str] = field(default_factory=list)  # mitigations in force when the states were saved
    save_dir: str = ""  # where states are written first, "" for the run's own folder
    gpu: str = ""  # the model of the GPU that it has trained on, "" for none: then a machine without one may train it
    cause_counts: dict[str, int] = field(default_factory=dict)  # cause -> failures by it since the run began
    durations: dict[str, dict[str, float]] = field(default_factory=dict)  # learned durations, by phase
    pace: dict[str, Any] = field(default_factory=dict)  # of its steps: `Slowdown.known`
    current: AttemptRecord | None = None
    incident: str = ""  # the number of the last incident, until a new step closes it
    failing: bool = False  # from the detection of a failure, which is that incident, until its restart is decided
    shutdown: Shutdown | None = None
    spec_hash: str = ""
    snapshots: str = ""  # the folder of the snapshots in memory, "" for none
    snapshots_off: str = ""  # why there is none
    ledger: Ledger = field(default_factory=Ledger)
    folder: str = ""  # where this was saved
    unsaved = ""  # the text that the disk refused; no field, so it is not saved itself
    problem = ""  # why a file that is there was not used; neither is this

    @classmethod
    def load(cls, folder: RunFolder) -> RunState:
        """The saved state of this run; a new one without any, where another version of this program wrote it, or where
        it is damaged, with the `problem`.

        Raises:
            MonitorError: it is there and cannot be read. A new state would forget a training that runs.
        """
        try:
            values = json.loads(read_bytes(folder.own / STATE))
            if values["version"] != VERSION:
                return cls()
            known = {key: value for key, value in values.items() if value is not None}
            loaded: RunState = typed(cls, {**known, "ledger": {}})
            names = [change["name"] for change in loaded.changes if change["sentence"]] + loaded.changes_at_save
            if not all(name.isidentifier() for name in names):
                raise ValueError("a mitigation has an invalid name")
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise MonitorError(f"{folder.own / STATE} cannot be read: {error.strerror}; try again") from error
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            damaged = cls()
            damaged.problem = f"{STATE} is damaged, and what it had is not used: {error}"
            return damaged
        loaded.ledger = Ledger.of(values)
        other = Path(loaded.folder or folder.own)
        try:
            os.stat(other / STATE)
            copied = not other.samefile(folder.own)
        except OSError as error:  # moved, or copied from another account's folder
            copied = not isinstance(error, FileNotFoundError | NotADirectoryError)
        if copied:  # what lives is that run's
            loaded.current, loaded.shutdown, loaded.snapshots = None, None, ""
        return loaded

    def save(self, folder: RunFolder) -> bool:
        """Write monitor.json; on the disk when this returns True. Else each write of the status tries again."""
        self.folder = str(folder.own)
        self.unsaved = json.dumps({"version": VERSION, **asdict(self)}, ensure_ascii=False, indent=1)
        return self.save_again(folder)

    def save_again(self, folder: RunFolder) -> bool:
        """Write what the last `save` could not write, as it was then; True when nothing is left to write."""
        if self.unsaved and folder.replace(STATE, self.unsaved, sync=True):
            self.unsaved = ""
        return not self.unsaved

    def adopt_restored(self, folder: RunFolder) -> str:
        """Continue the state of the machine that trained last, as the store had it; why nothing is left, or "".

        What depends on a machine (its attempt, its durations, its failures) is left behind.
        """
        before = RunState.load(folder)
        if before.problem:
            folder.log(before.problem)
            return ""
        for name in CARRIED:
            setattr(self, name, getattr(before, name))
        self.ledger.follows(amount(folder.spec.get("price_per_hour")))
        self.save(folder)
        unchanged = before.spec_hash == spec_hash(folder.folder)
        if before.state is State.COMPLETED and unchanged and folder.lora is not None:
            return f"already completed on another machine ({before.best_step} steps); LoRA: {folder.lora.name}"
        return ""

    def renew(self, spec_hash: str) -> None:
        """The user starts a finished run again: the allowance is full; changes stay unless the run was made again."""
        self.history, self.incident, self.failing = History(), "", False
        self.reason = self.current = self.shutdown = None
        if spec_hash != self.spec_hash:
            self.changes, self.cause_counts, self.pace, self.planned = [], {}, {}, 0
        self.spec_hash = spec_hash


def _checksum(folder: Path) -> str:
    """Of `run.toml`; "" where it cannot be read."""
    try:
        return checksum((folder / "run.toml").read_bytes())
    except OSError:
        return ""


def spec_hash(folder: Path) -> str:
    """What tells that a run was made again between two starts: the digest of its job, or for one without a checksum of
    `run.toml`; "" without either."""
    job = read_json(folder / JOB)
    return _checksum(folder) if job is None else str(job.get("digest", ""))


def spec_edited(folder: Path) -> bool:
    """Whether `run.toml` was edited since the run was made."""
    job, found = read_json(folder / JOB), _checksum(folder)
    return job is not None and found not in ("", job.get("run_toml"))


def nothing_left(folder: Path) -> str:
    """A sentence for a run that completed and was not made again since; "" when a start has work to do."""
    saved = RunState.load(run_folder := RunFolder(folder))
    unchanged = saved.spec_hash and saved.spec_hash == spec_hash(folder)
    if saved.state is not State.COMPLETED or not unchanged or run_folder.lora is None:
        return ""
    return (
        f"already completed ({saved.best_step} steps). To train longer, raise epochs or max_train_steps in "
        f"{folder / 'run.toml'}, make it again with `python -m runs render {folder.name}` and start it; to train from "
        "scratch, make a new run"
    )


def read_status(folder: str | Path) -> dict[str, Any] | None:
    """`status.json` of a run plus "alive": a monitor watches it now; "age_s" of its figures; "stale" (see `stale`).
    None: the run was never started.

    A run in no final state that is not watched was left by a killed monitor or a reboot: `python -m monitor start RUN`
    (or `resume-all`) continues it.
    """
    alive = is_held(Path(folder) / LOCK)  # first: a monitor that ends now writes the last status before it lets go
    values = read_json(Path(folder) / STATUS) or lost_status(Path(folder))
    return with_age({**values, "alive": alive}) if isinstance(values.get("state"), str) else None


def lost_status(folder: Path) -> dict[str, Any]:
    """What `monitor.json` knows of a `status.json` that a power cut has left empty; {} where there is none."""
    saved = read_json(folder / STATE) if exists(folder / STATUS) else None
    if saved is None:
        return {}
    names = {"attempt": "attempt", "restarts": "restarts", "step": "best_step", "planned_steps": "planned"}
    figures = {shown: saved.get(name) or 0 for shown, name in names.items()}
    same = {name: saved.get(name) for name in ("state", "started_at", "ledger")}
    return {**same, **figures, "message": saved.get("reason") or ""}


def with_age(status: dict[str, Any]) -> dict[str, Any]:
    """A status with "alive", plus "age_s": seconds since it was written, and "stale": a sentence once that is too long.

    Seconds on the monotonic clock, on which a suspended machine does not age; on the wall clock on another machine, or
    for a status of a version before November 2026.
    """
    now, age_s = platform.now(), 0.0
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if status.get("boot") == platform.boot_id()[:8]:
            age_s = max(0.0, now.mono_s - float(status["updated_mono_s"]))
        else:
            age_s = max(0.0, now.wall_s - datetime.fromisoformat(str(status.get("updated_at"))).timestamp())
    old = status["alive"] and status.get("state") not in FINAL and age_s >= STALE_S
    why = (old and unwritable(Path(str(status.get("folder"))))) or "the monitor does not respond"
    text = f"figures are {age_s:.0f} s old: {why}" if old else ""
    return {**status, "age_s": round(age_s, 1), "stale": text}


def is_abandoned(status: dict[str, Any] | None) -> bool:
    """The run was under way when its monitor died, or was preempted: it is to be continued."""
    return status is not None and not status["alive"] and status.get("state") not in FINAL - {State.PREEMPTED}


def learned_key(spec: dict[str, Any]) -> str:
    """Runs with the same key take equally long: same model, tier, resolution, batch size and GPU."""
    parts = [str(spec.get(k, "")) for k in ("backend", "model", "tier", "resolution", "batch_size")]
    return "|".join([*parts, gpu.model() or "cpu"])


def load_learned(folder: Path, spec: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Durations that earlier runs of this kind recorded beside the run in `folder`; {} for the first."""
    with contextlib.suppress(TypeError, ValueError):
        known = (read_json(folder.parent / LEARNED) or {}).get(learned_key(spec), {})
        return typed(dict[str, dict[str, float]], known)
    return {}


def store_learned(folder: RunFolder, durations: dict[str, dict[str, float]]) -> None:
    """Keep durations for the next run of this kind. OSError when they cannot be written."""
    path = folder.folder.parent / LEARNED
    atomic_write(path, json.dumps({**(read_json(path) or {}), learned_key(folder.spec): durations}, indent=1))
