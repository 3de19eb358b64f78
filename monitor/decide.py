"""Is the run stuck? A pure decision over what is seen; no clock is read and nothing is touched here.

Progress is a completed step, an item of a phase that has them, a phase entered. A heartbeat that only ticks is none: the
record's time is never asked, only whether its counts moved. Inside the step phase items do not count either: an outer
deadline must not be masked by a healthy inner one (a bug of nvidia-resiliency-ext 0.4.1).

Time counts only while the monitor was awake to see it: a gap between two looks (the machine suspended, the monitor
stopped or starved) adds at most one look's length, so no verdict is ever founded on time that nobody watched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from guards.heartbeat import Beat
from monitor.learn import Durations
from monitor.limits import Limits, Phase

OK, SUSPECT, SLOW, HUNG = SEVERITY = "ok", "suspect", "slow", "hung"
_ITEMS = ("cache_latents", "cache_text", "hash", "load", "sample", "validate", "save", "end")
_STEPS = ("first_step", "step")
_BETWEEN_STEPS = ("validate", "sample", "save")
SUSPEND_S = 2.0  # the boot clock ran this far ahead of the monotonic one: the machine was suspended
AWAKE_S = 1.0  # a look may be this late and still count in full


@dataclass(frozen=True)
class Signals:
    """What else was seen since the suspicion, in words: for a hang, for slow but moving, and that it computes.

    `busy` proves nothing where there are steps to count (rule 1); of a script without heartbeats it is all there is.
    """

    stuck: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """One look. Seconds of the monotonic and the boot clock; `log_bytes` is the size of the log; `stopped` are the process
    numbers of the ranks that a signal has stopped."""

    now_s: float
    boot_s: float
    beats: tuple[Beat, ...] = ()
    log_bytes: int = 0
    signals: Signals = Signals()
    stopped: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """`kind` is ok, suspect, slow or hung; the rest says of which rank, where, for how long, and by what evidence."""

    kind: str
    rank: int = 0
    phase: str = "import"
    step: int = 0
    quiet_s: float = 0.0
    budget_s: float = 0.0
    why: tuple[str, ...] = ()
    reset: str = ""  # why the timers were set back at this look, "" when they were not


def decide(quiet_s: float, budget_s: float, slow_s: float, signals: Signals) -> str:
    """The verdict on `quiet_s` seconds without progress, given T and the longest that a slow run is left alone."""
    if quiet_s < budget_s / 2:
        return OK
    if quiet_s < budget_s:
        return SUSPECT
    if signals.slow:
        return SLOW if quiet_s < slow_s else HUNG
    if signals.stuck or quiet_s >= 2 * budget_s:
        return HUNG
    return SUSPECT


@dataclass
class _Rank:
    """What is remembered of one rank between two looks."""

    pid: int = 0
    beat: Beat | None = None
    quiet_s: float = 0.0
    stepless_s: float = 0.0  # since the last optimizer step, whatever phases came and went
    stopped_s: float = 0.0  # since a signal stopped its process
    most_done: int = 0
    moved_s: float = 0.0  # monotonic time of the last progress
    fed: int = 0  # steps of this process whose duration was learned


def _new_steps(rank: _Rank, beat: Beat) -> list[float]:
    """Durations of the steps since the last look, without the first of the process (compilation, the loader's start: that
    is the phase "first_step") and without one that a save or a sample may have been counted into."""
    new = list(beat.intervals[-(beat.count - rank.fed) :])
    if rank.fed == 0 and beat.count <= len(beat.intervals):
        new = new[1:]
    if rank.beat is not None and rank.beat.phase in _BETWEEN_STEPS and new:
        new.remove(max(new))
    return new


@dataclass
class Watch:
    """Follows one attempt; `known` is what earlier attempts or runs taught, by phase."""

    limits: Limits
    known: dict[str, dict] = field(default_factory=dict)
    durations: dict[str, Durations] = field(default_factory=dict)
    ranks: dict[int, _Rank] = field(default_factory=dict)
    started_s: float | None = None
    _last: Observation | None = None
    _log_quiet_s: float = 0.0
    _log_moved_s: float = 0.0

    def learned(self) -> dict[str, dict]:
        """What to give the next attempt as `known`."""
        return {**self.known, **{name: d.known() for name, d in self.durations.items() if d.known()}}

    def step_s(self) -> float:
        """Seconds of the usual step, 0.0 while unknown."""
        return self._of("step").median

    def poll_s(self) -> float:
        """How long to sleep until the next look: a tenth of the shortest budget, within the table's bounds."""
        watch = self.limits.watch
        phases = {r.beat.phase for r in self.ranks.values() if r.beat is not None} or {"import"}
        shortest = min(self._budget(phase) for phase in phases)
        return min(max(shortest / 10, watch.poll_min), watch.poll_max)

    def last_progress_s(self) -> float:
        """Monotonic time of the run's last progress (that of the rank which is longest without)."""
        moved = [r.moved_s for r in self.ranks.values()] or [self._log_moved_s]
        return min(moved)

    def look(self, seen: Observation) -> Verdict:
        """Take one observation and judge."""
        if self._last is None:
            self.started_s = self._log_moved_s = seen.now_s
            self._last = seen
        elapsed = max(0.0, seen.now_s - self._last.now_s)
        ahead = (seen.boot_s - self._last.boot_s) - elapsed
        reset = f"the machine was suspended for {ahead:.0f} s" if ahead > SUSPEND_S else ""
        awake = min(elapsed, AWAKE_S + self.limits.watch.poll_max)
        verdicts = [self._rank(beat, seen, awake, bool(reset)) for beat in seen.beats]
        if not seen.beats:
            verdicts = [self._log(seen, awake, bool(reset))]
        self._last = seen
        worst = max(verdicts, key=lambda v: (SEVERITY.index(v.kind), v.quiet_s))
        return worst if not reset else Verdict(OK, worst.rank, worst.phase, worst.step, reset=reset)

    def _rank(self, beat: Beat, seen: Observation, awake: float, reset: bool) -> Verdict:
        rank = self.ranks.get(beat.rank)
        if rank is None or rank.pid != beat.pid:
            rank = self.ranks[beat.rank] = _Rank(beat.pid, moved_s=seen.now_s)
        moved = self._learn(rank, beat)
        if moved:
            # The record says when; without that, half a look's length would be lost at each.
            since = seen.now_s - beat.beat_s
            rank.quiet_s = since if 0 <= since <= awake else 0.0
            rank.moved_s = seen.now_s - rank.quiet_s
        else:
            rank.quiet_s += awake
        if rank.beat is None or beat.count != rank.beat.count:
            rank.stepless_s = rank.quiet_s
        else:
            rank.stepless_s += awake
        rank.stopped_s = rank.stopped_s + awake if beat.pid in seen.stopped and not moved else 0.0
        if reset:
            rank.quiet_s = rank.stepless_s = rank.stopped_s = 0.0
        rank.beat = beat
        return self._judge(rank, beat, seen.signals)

    def _learn(self, rank: _Rank, beat: Beat) -> bool:
        """Did the rank make progress since the last look? Learn from what it completed."""
        old = rank.beat
        if beat.count > rank.fed:
            self._of("step").add(_new_steps(rank, beat))
            rank.fed = beat.count
        if old is None:
            rank.most_done = beat.done
            return True
        if beat.phase != old.phase or beat.phase_s != old.phase_s:
            self._phase_ended(rank, old, beat)
            rank.most_done = beat.done
            return beat.phase not in _STEPS or beat.phase != old.phase or beat.count != old.count
        if beat.count != old.count or beat.step != old.step or beat.outcome != old.outcome:
            return True
        if beat.phase in _ITEMS and beat.done > rank.most_done and (beat.total == 0 or beat.done <= beat.total):
            if rank.most_done or beat.done == 1:
                each = max(0.0, beat.beat_s - old.beat_s) / max(1, beat.done - rank.most_done)
                self._of(beat.phase).add([each])
            rank.most_done = beat.done
            return True
        return False

    def _phase_ended(self, rank: _Rank, old: Beat, beat: Beat) -> None:
        took = beat.phase_s - old.phase_s
        if old.phase not in _STEPS and old.done == 0 and took > 0:
            self._of(old.phase).add([took])
        elif old.phase == "first_step" and took > 0:
            self._of("first_step").add([took])

    def _judge(self, rank: _Rank, beat: Beat, signals: Signals) -> Verdict:
        watch = self.limits.watch
        quiet, phase = rank.quiet_s, beat.phase
        if beat.outcome != "running":
            budget, phase = watch.exit / 2, "end"  # its last words are said: it only has to leave
            slow_s = watch.exit
        else:
            budget = self._budget(phase)
            slow_s = max(watch.slow_times * budget, self._table(phase).ceiling)
        kind = decide(quiet, budget, slow_s, signals)
        why = signals.slow if kind == SLOW else signals.stuck
        by_signal = (f"the training process (pid {beat.pid}) is stopped by a signal",)
        stopped = decide(rank.stopped_s, watch.stopped, watch.stopped, Signals(stuck=by_signal))
        if SEVERITY.index(stopped) > SEVERITY.index(kind):
            kind, quiet, budget, why = stopped, rank.stopped_s, watch.stopped, by_signal
        if kind != HUNG and beat.count and beat.outcome == "running" and rank.stepless_s >= self._between():
            kind, quiet, budget = HUNG, rank.stepless_s, self._between()
            why = (f"phases come and go, but no step has completed for {quiet:.0f} s",)
        return Verdict(kind, beat.rank, phase, beat.step, quiet, budget, why)

    def _log(self, seen: Observation, awake: float, reset: bool) -> Verdict:
        """No heartbeat: a run is watched by the growth of its log, and one that computes is left alone for longer."""
        if reset or self._last is None or seen.log_bytes != self._last.log_bytes:
            self._log_quiet_s, self._log_moved_s = 0.0, seen.now_s
        else:
            self._log_quiet_s += awake
        budget = self.limits.watch.log_silence
        signals = Signals(seen.signals.stuck, seen.signals.slow + seen.signals.busy)
        kind = decide(self._log_quiet_s, budget, self.limits.watch.slow_times * budget, signals)
        why = signals.slow if kind == SLOW else signals.stuck
        return Verdict(kind, 0, "import", 0, self._log_quiet_s, budget, why)

    def _between(self) -> float:
        """The outer deadline: a step must complete within this whatever happens between steps."""
        return max(self.limits.watch.between_steps, *(2 * self._budget(p) for p in _BETWEEN_STEPS))

    def _budget(self, phase: str) -> float:
        return self._of(phase).budget(self._table(phase), self.limits.watch)

    def _table(self, phase: str) -> Phase:
        return self.limits.phases[phase]

    def _of(self, phase: str) -> Durations:
        if phase not in self.durations:
            self.durations[phase] = Durations(self.known.get(phase))
        return self.durations[phase]
