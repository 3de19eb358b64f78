"""Is the run making progress, and at its usual pace? Pure decisions over observations: nothing here reads a clock, a
file or a process.

Decision: progress is a completed step, a counted item of a phase, a new phase. A tick without a changed counter is not
progress. In the step phase items do not count: a healthy inner loop must not hide that no step completes (a bug of
nvidia-resiliency-ext 0.4.1).

A smaller item count in the same phase is a new loop (tqdm starts at 1 for each), hence progress, at a pace of its own.
So that a count that flips between two values does not run for ever, a phase is hung once MAX_LOOPS loops and
`between_steps_s` have passed since its count last exceeded the highest of the visit. Neither bound is enough alone: the
second pass over a big data set takes hours and exceeds nothing; a few tiny data sets begin many loops within seconds.

In a group, ranks in a step wait for one that saves, samples, caches or loads. They are judged with the T of that phase,
and its progress is theirs; the wait is no duration of a step.

Time is measured on the awake clock: a gap between two observations (a suspended machine, a stopped or starved monitor)
advances it by one poll interval at most. Names in `_at` are moments of this clock.

T, the time without progress that is a hang, is the largest of three estimates over completed durations. Five times the
longest of the last 200 follows a drift and work of two speeds. 25 medians, and 1.5 times the longest that ever
completed, keep a rare slow one below T. SRTT + 8 RTTVAR (RFC 6298) adds nothing to these. Phi accrual guesses the tail
of a distribution from samples that have no tail.

A pace is slow by nearly all steps of a window of `window_s` seconds and six steps, not by their mean. One slow step (a
sample, a save, the start of an epoch's workers, a laptop that slept) changes a mean and decides nothing here. The limit
is above the run's own median and above its slowest twentieth: a run with images of several sizes has steps of several
speeds. What is usual comes from all steps since the run began, thinned out evenly, and of these from the first half: a
speed that falls slowly must not become the usual one. Steps of a slow time never count as usual.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from guards.heartbeat import Beat
from monitor.config import Config, Section
from monitor.state import Observation, Signals, Verdict

RECENT = 200  # durations that the estimates look back on
WARM_UP = 5  # durations of a new process that do not count as the longest
OF_HIGHEST = 5  # T covers this many times the longest of the recent ones
OF_MEDIAN = 25  # healthy runs have steps of 20 medians
OF_LONGEST = 1.5  # T covers this many times the longest that ever completed
OF_PRIOR = 2  # a new attempt may be slower than the last: T is this many times what the last one had
OF_DISTURBED = 2  # a duration beside the imports of the standby attempt counts as this many medians at most
OF_CEILING = 3  # work longer than the ceiling is slow: the ceiling rises to this many times the longest


class Durations:
    """Completed durations of one kind, seconds. known: what `known()` returned in an earlier attempt or run.

    The kinds: "PHASE" from entering the phase to its first item, or to its end when it has none; "PHASE/item" from one
    item of the phase to the next; "step" an optimizer step.
    """

    def __init__(self, known: Mapping[str, float] | None = None):
        self._prior = dict(known or {})
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.seen = 0
        self.longest = self._prior.get("longest", 0.0)
        self.median = self._prior.get("median", 0.0)  # seconds of the usual one, 0.0 while unknown

    def add(self, values: Iterable[float], disturbed: bool = False) -> None:
        """Add completed durations, oldest first. disturbed: another process made them longer than they are."""
        limit = OF_DISTURBED * self.median if disturbed and self.median else math.inf
        for value in (min(value, limit) for value in values):
            self._recent.append(value)
            self.seen += 1
            if self.seen > WARM_UP:
                self.longest = max(self.longest, value)
        self.median = _median(self._recent) if self._recent else self.median

    def restarted(self) -> Durations:
        """An estimator for another loop or process: it has its own pace, and the longest still counts."""
        return Durations({"longest": self.longest})

    def known(self) -> dict[str, float]:
        """What the next attempt or run needs, as plain numbers; {} when nothing is known."""
        if self.seen == 0:
            return dict(self._prior)
        n, usual_s = self.seen + self._prior.get("n", 0), OF_HIGHEST * max(self._recent)
        return {"n": n, "usual": usual_s, "longest": self.longest, "median": self.median}

    def budget(self, phase: Section, watch: Section, early_s: float = math.inf) -> float:
        """T: seconds without progress that are a hang, given evidence. While too little is known it is `early_s` or 25
        times the longest, and at most the ceiling."""
        before = self._prior.get("n", 0)
        if max(self.seen, before) < max(watch.min_sample_count, 1):
            return min(phase.ceiling_s, max(early_s, OF_MEDIAN * max(self._recent, default=0.0)))
        known, factor = (self.known(), 1) if self.seen >= watch.min_sample_count else (self._prior, OF_PRIOR)
        wanted = factor * max(known.get("usual", 0.0), OF_MEDIAN * known.get("median", 0.0), OF_LONGEST * self.longest)
        floor_s = phase.floor_s
        if self.seen + before < watch.warm_sample_count:
            floor_s = max(floor_s, min(watch.warmup_floor_s, phase.ceiling_s))
        return min(max(wanted, floor_s), max(phase.ceiling_s, OF_CEILING * self.longest))


def _median(values: Iterable[float]) -> float:
    """Not `statistics.median`: that module brings decimal and fractions into the monitor's memory."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


# ---- progress ----

OK, SUSPECT, SLOW, HUNG, OVER = SEVERITY = "ok", "suspect", "slow", "hung", "over"
_ITEMS = ("cache_latents", "cache_text", "hash", "load", "sample", "validate", "save", "end")
_UNEVEN = ("load",)  # items (MiB of a download) do not show how long the rest takes (loading the model)
_STEPS = ("first_step", "step")
_BETWEEN_STEPS = ("validate", "sample", "save")
SUSPEND_S = 2.0  # a boot clock this far ahead of the monotonic clock means that the machine was suspended
AWAKE_S = 1.0  # an observation may be this late and still count in full
SLOW_FACTOR = 8  # a slow run that moves is left alone for this many T, or for the ceiling where that is longer
MAX_LOOPS = 100  # loops of one phase visit without a new highest count; sd-scripts runs two for each data set


def decide(stalled_s: float, budget_s: float, slow_s: float, signals: Signals) -> str:
    """The verdict on `stalled_s` seconds without progress. budget_s: T. slow_s: how long a slow run is left alone."""
    if stalled_s < budget_s / 2:
        return OK
    if stalled_s >= budget_s and signals.slow:
        return SLOW if stalled_s < slow_s else HUNG
    hung = stalled_s >= 2 * budget_s or (stalled_s >= budget_s and signals.stuck)
    return HUNG if hung else SUSPECT


@dataclass
class _Rank:
    """What is remembered of one rank's process between two observations."""

    beat: Beat
    moved_s: float  # monotonic time of the last progress
    moved_at: float  # the same on the awake clock
    step_at: float  # last optimizer step, whatever the phases did since
    runs_at: float  # last seen running: not stopped by a signal
    grew_at: float  # `highest` grew
    highest: int  # item count of this phase visit
    entered_at: float = 0.0  # the phase was entered
    loops: int = 0  # begun since `highest` grew
    waited: bool = False  # for another rank, since its last step


@dataclass
class Watch:
    """Judges the progress of one attempt, and learns its usual durations. known: what an earlier `learned()` returned."""

    config: Config
    known: dict[str, dict[str, float]] = field(default_factory=dict)
    durations: dict[str, Durations] = field(default_factory=dict)
    ranks: dict[int, _Rank] = field(default_factory=dict)
    disturbed: bool = False  # the standby attempt imports: long steps are not the training's own
    new_steps: list[float] = field(default_factory=list)  # of the first rank, until they are taken (diagnose/slow.py)
    _last: Observation | None = None
    _clock_s: float = 0.0  # the awake clock
    _log_moved_s: float = 0.0  # monotonic time of the log's last growth
    _log_at: float = 0.0  # the same on the awake clock
    _gone_at: float | None = None  # all ranks are gone since then
    _active_at: float = 0.0  # last activity of a script without ranks
    _activity: float = 0.0

    def learned(self) -> dict[str, dict[str, float]]:
        """What to pass to the next attempt as `known`."""
        return {**self.known, **{name: known for name, d in self.durations.items() if (known := d.known())}}

    def step_s(self) -> float:
        """Seconds of the usual step, 0.0 while unknown."""
        return self._of("step").median

    def poll_s(self) -> float:
        """Seconds until the next observation: a tenth of the shortest T, within the configured bounds."""
        beats = [rank.beat for rank in self.ranks.values()]
        shortest = min((self._budget(b.phase, b.done) for b in beats), default=self._budget("import"))
        return min(max(shortest / 10, self.config.watch.poll_min_s), self.config.watch.poll_max_s)

    def last_progress_s(self) -> float:
        """Monotonic time of the last progress, of the rank that has been without for longest."""
        return min((r.moved_s for r in self.ranks.values()), default=self._log_moved_s)

    def observe(self, seen: Observation) -> Verdict:
        """The verdict after one more observation."""
        last, self._last = self._last or seen, seen
        elapsed = max(0.0, seen.now_s - last.now_s)
        awake = min(elapsed, AWAKE_S + self.config.watch.poll_max_s)
        self._clock_s += awake
        if last is seen or seen.beats or seen.log_bytes != last.log_bytes:
            self._log_moved_s, self._log_at = seen.now_s, self._clock_s
        if seen.ranks_gone and seen.beats:
            verdict = self._script(seen)
        else:
            self._gone_at = None
            verdict = self._all_ranks(seen, awake) if seen.beats else self._log(seen)
        suspended_s = seen.boot_s - last.boot_s - elapsed
        if suspended_s <= SUSPEND_S:
            return verdict
        self._log_at = self._active_at = self._clock_s
        for rank in self.ranks.values():
            rank.moved_at = rank.step_at = rank.runs_at = rank.grew_at = self._clock_s
        reset = f"the machine was suspended for {suspended_s:.0f} s"
        return Verdict(OK, verdict.rank, verdict.phase, verdict.step, reset=reset)

    def _all_ranks(self, seen: Observation, awake: float) -> Verdict:
        """The verdict on the rank that is worst off."""
        watched = [b for b in seen.beats if b.outcome != "done" or b.pid not in seen.dead] or list(seen.beats)
        for rank in self.ranks.keys() & {b.rank for b in seen.beats} - {b.rank for b in watched}:
            del self.ranks[rank]
        for beat in watched:
            self._update(beat, seen, awake)
        verdicts = [self._judge(beat, seen.signals, self._wait_for_others(beat, watched)) for beat in watched]
        return max(verdicts, key=lambda v: (SEVERITY.index(v.kind), v.stalled_s))

    def _wait_for_others(self, beat: Beat, group: Sequence[Beat]) -> float:
        """The least T of a rank that others keep waiting, 0.0 for none; their progress between the steps is its own."""
        rank, least_s = self.ranks[beat.rank], 0.0
        for other in group:
            if other is beat or other.outcome != "running" or other.step > beat.step:
                continue
            theirs = self.ranks[other.rank]
            between = other.phase not in _STEPS
            rank.moved_at = max(rank.moved_at, theirs.moved_at if between else theirs.entered_at)
            if between:
                rank.waited, least_s = True, max(least_s, self._budget(other.phase, other.done))
        return least_s

    def _update(self, beat: Beat, seen: Observation, awake: float) -> None:
        """Remember the rank's progress; learn from it."""
        now, rank = self._clock_s, self.ranks.get(beat.rank)
        old = rank.beat if rank is not None and rank.beat.pid == beat.pid else None
        if rank is None or old is None:
            if rank is not None:  # another stage of the script, or a worker restarted by its launcher
                self.durations = {name: durations.restarted() for name, durations in self.durations.items()}
            rank = self.ranks[beat.rank] = _Rank(beat, seen.now_s, now, now, now, now, beat.done, now)
        self._learn_steps(old, beat, rank.waited)
        moved = old is None or self._progress(rank, old, beat)
        if moved:
            # Use the record's timestamp: poll time is half an interval late on average, and a monitor that was stuck or
            # replaced sees the last step long after it. What is judged is only the time that somebody watched.
            progress_s = max(beat.step_s, beat.phase_s) if beat.phase in _STEPS and beat.step_s else beat.beat_s
            late = max(0.0, seen.now_s - progress_s)
            rank.moved_s, rank.moved_at = seen.now_s - late, now - (late if late <= awake else 0.0)
        if old is None or beat.count != old.count:
            rank.step_at, rank.waited = rank.moved_at, False
        if old is not None and (beat.phase, beat.phase_s) != (old.phase, old.phase_s):
            rank.entered_at = now
        if moved or beat.pid not in seen.stopped:
            rank.runs_at = now
        rank.beat = beat

    def _learn_steps(self, old: Beat | None, beat: Beat, waited: bool) -> None:
        count = beat.count - (old.count if old else 0)
        new = list(beat.intervals[-count:]) if count > 0 else []
        if new and len(new) == beat.count:
            del new[0]  # compilation, the start of the loader: the phase "first_step" holds it
        if new and old and (waited or old.phase in _BETWEEN_STEPS):
            new.remove(max(new))  # it may include the save or the sample, its own or that of the rank it waited for
        if new:
            self._of("step").add(new, self.disturbed)
            self.new_steps += new if beat.rank == min(self.ranks) and not self.disturbed else []

    def _progress(self, rank: _Rank, old: Beat, beat: Beat) -> bool:
        """Has the rank made progress since its beat `old`? Learns the durations of what it completed."""
        entered = beat.phase != old.phase or beat.phase_s != old.phase_s
        counts = beat.phase in _ITEMS and not 0 < beat.total < beat.done
        if entered and old.phase != "step" and (old.done == 0 or old.phase not in _ITEMS):
            self._of(old.phase).add([max(0.0, beat.phase_s - old.phase_s)])
        if counts and beat.done and (entered or old.done == 0):
            self._of(beat.phase).add([max(0.0, beat.beat_s - beat.phase_s)])
        grew = entered or (counts and beat.done > rank.highest)
        if grew:
            rank.highest, rank.loops, rank.grew_at = beat.done, 0, self._clock_s
        if entered:
            # A step phase that is entered again without a step between is not progress.
            return beat.phase not in _STEPS or beat.phase != old.phase or beat.count != old.count
        if (beat.count, beat.step, beat.outcome) != (old.count, old.step, old.outcome):
            return True
        if counts and beat.done < old.done:  # a new loop
            self.durations[f"{beat.phase}/item"] = self._of(f"{beat.phase}/item").restarted()
            rank.loops += 1
        elif counts and 0 < old.done < beat.done:
            self._of(f"{beat.phase}/item").add([max(0.0, beat.beat_s - old.beat_s) / (beat.done - old.done)])
        return counts and beat.done != old.done

    def _judge(self, beat: Beat, signals: Signals, least_s: float) -> Verdict:
        """The most severe verdict of the limits that apply to the rank; of equal ones the first. least_s: of its T."""
        rank = self.ranks[beat.rank]
        watch, now, phase, running = self.config.watch, self._clock_s, beat.phase, beat.outcome == "running"
        stalled, no_step, no_growth = now - rank.moved_at, now - rank.step_at, now - rank.grew_at
        limit = watch.between_steps_s
        # Their ceilings may be longer.
        between = max([limit, *(2 * self._budget(name) for name in _BETWEEN_STEPS if no_step >= limit)])
        rows = [  # seconds, their limit, does it apply, the evidence
            # After the outcome only the exit is missing. The guards inside have their own deadline, which comes first.
            (stalled, watch.exit_s, not running, f"the outcome is {beat.outcome!r}, but the process does not exit"),
            (now - rank.runs_at, watch.stopped_s, True, f"the training (pid {beat.pid}) is stopped by a signal"),
            (no_step, between, running and beat.count and no_step >= between,
             f"the phase changes, but no step has completed for {no_step:.0f} s"),
            (no_growth, limit, rank.loops >= MAX_LOOPS and no_growth >= limit,
             f"{rank.loops} loops began within {no_growth:.0f} s and none passed item {rank.highest}"),
        ]  # fmt: skip
        found = []
        if running:
            budget = max(least_s, self._budget(phase, beat.done))
            kind = decide(stalled, budget, max(SLOW_FACTOR * budget, self.config.phases[phase].ceiling_s), signals)
            found = [(kind, stalled, budget, signals.slow if kind == SLOW else signals.stuck)]
        for seconds, limit, applies, sentence in rows:
            if applies:
                kind = decide(seconds, limit, 0.0, Signals(stuck=(sentence,)))  # nothing extends such a limit
                found.append((kind, seconds, limit, (sentence,)))
        kind, stalled, budget, evidence = max(found, key=lambda row: SEVERITY.index(row[0]))
        return Verdict(kind, beat.rank, phase if running else "end", beat.step, stalled, budget, evidence)

    def _script(self, seen: Observation) -> Verdict:
        """All ranks are gone. OVER once the rest of the script is idle, or has worked too long without a new rank."""
        watch, now = self.config.watch, self._clock_s
        begins, self._gone_at = self._gone_at is None, now if self._gone_at is None else self._gone_at
        if begins or seen.activity != self._activity:
            self._active_at, self._activity = now, seen.activity
        first = min(seen.beats, key=lambda b: b.rank)
        idle, gone = now - self._active_at, now - self._gone_at
        limit = watch.script_idle_s if first.outcome == "done" else watch.launcher_s
        kind, why = OK, ""
        if idle >= limit:
            kind, why = OVER, f"the training processes are gone and the script has been idle for {idle:.0f} s"
        elif gone >= watch.between_steps_s:
            kind, why = OVER, f"the training processes are gone and none has started within {gone:.0f} s"
            idle, limit = gone, watch.between_steps_s
        return Verdict(kind, first.rank, first.phase, first.step, idle, limit, (why,) if why else ())

    def _log(self, seen: Observation) -> Verdict:
        """Without a heartbeat the log's growth is progress, and a script that computes counts as slow."""
        stalled, budget = self._clock_s - self._log_at, self.config.watch.log_silence_s
        signals = Signals(seen.signals.stuck, seen.signals.slow + seen.signals.busy)
        kind = decide(stalled, budget, SLOW_FACTOR * budget, signals)
        return Verdict(kind, 0, "import", 0, stalled, budget, signals.slow if kind == SLOW else signals.stuck)

    def _budget(self, phase: str, done: int = 0) -> float:
        """T of a phase in which `done` items are counted."""
        counting = done and phase in _ITEMS and phase not in _UNEVEN
        name, early_s = f"{phase}/item" if counting else phase, math.inf
        if phase == "step":  # the first one is the slowest, mostly: it compiles, and the loader starts
            early_s = max(self.config.watch.early_step_s, self._of("first_step").known().get("usual", math.inf))
        return self._of(name).budget(self.config.phases[phase], self.config.watch, early_s)

    def _of(self, name: str) -> Durations:
        return self.durations.setdefault(name, Durations(self.known.get(name)))


# ---- the pace ----

FACTOR, ABOVE_SLOWER = 2.0, 1.25  # slow: this many times the median, and this many times the slowest twentieth
BACK, BACK_SLOWER = 1.4, 1.1  # usual again: below these
AT_START = 3.0  # slow, while only the rehearsal's or an earlier pace is known
SHARE = 0.8  # of the window's steps
# so many steps in a row, each so many times above the median and the slowest fiftieth
SEVERE, ABOVE_SLOWEST, SEVERE_STEPS = 5.0, 2.0, 3
MIN_STEPS = 6  # of a window
WARM_STEPS = 10  # before the run's own pace is known
KEPT = 512


class Pace:
    """The pace of one run. expected_s: seconds of a step by the rehearsal or an earlier attempt, 0.0 without one."""

    def __init__(self, window_s: float, expected_s: float = 0.0):
        self._window_s, self._expected_s = window_s, expected_s
        self._usual: list[float] = []  # every `_stride`th step that was not slow
        self._stride, self._skipped = 1, 0
        self.window: deque[float] = deque()  # the newest steps; to be cleared after a suspend
        self._median = self._slower = self._slowest = 0.0  # of `_usual`: the middle, the 95th and the 98th percent
        self.slow = False
        self.lost_s = 0.0  # by the slow time so far

    @property
    def own(self) -> bool:
        """Whether the usual pace is measured in this attempt, and not expected."""
        return self._median > 0

    @property
    def usual_s(self) -> float:
        """Seconds of the usual step, 0.0 while nothing is known."""
        return self._median or self._expected_s

    def now_s(self, under_way_s: float = 0.0) -> float:
        """Seconds of the window's middle step."""
        found = sorted([*self.window, *([under_way_s] if under_way_s else [])])
        return found[len(found) // 2] if found else 0.0

    def limit_s(self, factor: float = FACTOR, above_slower: float = ABOVE_SLOWER) -> float:
        """Seconds above which a step is slow; 0.0 while nothing is known."""
        if not self.own:
            return AT_START * self._expected_s
        return max(factor * self._median, above_slower * self._slower)

    def observe(self, steps: Iterable[float], under_way_s: float = 0.0) -> str:
        """SLOW when the slow time begins, OVER when it ends, else "".

        Args:
            steps: durations of those completed since the last call, oldest first. under_way_s: of the one under way.
        """
        window_s = sum(self.window)
        for step_s in steps:
            self.window.append(step_s)
            window_s += step_s
            if self.slow:
                self.lost_s += max(0.0, step_s - self.usual_s)
            while len(self.window) > MIN_STEPS and window_s - self.window[0] >= self._window_s:
                window_s -= self.window[0]
                self._learn(self.window.popleft())
        limit_s = self.limit_s()
        # The step under way counts once it is slow: it can last for minutes.
        current = [under_way_s] if limit_s and under_way_s > limit_s else []
        window = [*self.window, *current][-max(MIN_STEPS, len(self.window)) :]
        last = window[-SEVERE_STEPS:]
        severe_s = max(SEVERE * self.usual_s, ABOVE_SLOWEST * self._slowest)
        severe = len(last) == SEVERE_STEPS and min(last) > severe_s and sum(last) >= self._window_s
        complete = len(window) >= MIN_STEPS and sum(window) >= self._window_s
        if not limit_s or not (complete or severe):
            return ""
        if not self.slow and (severe or sum(s > limit_s for s in window) >= SHARE * len(window)):
            self.slow, self.lost_s = True, sum(max(0.0, s - self.usual_s) for s in window)
            while self.window and self.window[0] <= limit_s:  # from before: three long steps need no whole window
                self.window.popleft()
            return SLOW
        back_s = self.limit_s(BACK, BACK_SLOWER) if self.own else FACTOR * self._expected_s
        if self.slow and sum(s <= back_s for s in window) >= SHARE * len(window):
            self.slow = False
            self.window.clear()
            return OVER
        return ""

    def _learn(self, step_s: float) -> None:
        """A step has left the window: it is a usual one, unless the run is slow."""
        self._skipped += 1
        if self.slow or self._skipped < self._stride:
            return
        self._skipped = 0
        self._usual.append(step_s)
        if len(self._usual) > KEPT:
            self._usual, self._stride = self._usual[::2], 2 * self._stride
        if len(self._usual) >= WARM_STEPS and len(self._usual) % (1 + len(self._usual) // 32) == 0:
            ordered = sorted(self._usual[: max(WARM_STEPS, len(self._usual) // 2)])
            self._median, self._slower, self._slowest = (ordered[int(len(ordered) * x)] for x in (0.5, 0.95, 0.98))
