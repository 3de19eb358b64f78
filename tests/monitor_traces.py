"""Simulated training runs on a virtual clock: what a healthy run does in an hour, and what a stuck one looks like.

A trace is a list of (phase, seconds, items): phases and steps one after the other. `play` shows it to `Watch` exactly as the
monitor would see it: one look every `poll_s()` seconds, records that say what has completed by then.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from guards.heartbeat import Beat
from monitor.decide import HUNG, Observation, Signals, Verdict, Watch
from monitor.limits import Limits

FOREVER = 1e9
ASLEEP = Signals(stuck=("asleep",))


@dataclass
class Played:
    """What came of a trace."""

    hours: float
    steps: int
    looks: int
    kills: list[Verdict]
    suspects: int
    detect_s: float | None = None  # for a hang: from the last progress to the verdict
    caught: Verdict | None = None
    reached: Beat | None = field(default=None, repr=False)


def play(
    trace: Iterator[tuple[str, float, int]], watch: Watch, signals: Signals = ASLEEP, limit_s: float = FOREVER
) -> Played:
    """Show the trace to `watch`. `signals` is what the second opinion says whenever it is asked: ASLEEP is the worst case."""
    clock = 1000.0
    phase, phase_s, done, total, count, step_s, since_s, beat_s = "import", clock, 0, 0, 0, 0.0, clock, clock
    ring: deque[float] = deque(maxlen=256)
    look_at, result = clock, Played(0.0, 0, 0, [], 0)
    begun, pid = clock, 1

    def looks(until: float) -> bool:
        """The monitor's looks before `until`; True when one of them ends the run."""
        nonlocal look_at
        while look_at < until:
            if look_at - begun > limit_s:
                return True
            beat = Beat(
                0, 1, pid, 0, phase, "running", count, 0, 1, done, total, count, 0.5, 1e-4,
                beat_s, phase_s, step_s, begun, "", tuple(ring),
            )  # fmt: skip
            verdict = watch.look(Observation(look_at, look_at, (beat,), 0, Signals()))
            if verdict.quiet_s >= verdict.budget_s:
                verdict = watch.look(Observation(look_at, look_at, (beat,), 0, signals))
            result.looks += 1
            if verdict.kind == HUNG:
                result.kills.append(verdict)
                result.caught, result.detect_s, result.reached = verdict, look_at - beat_s, beat
                return True
            result.suspects += verdict.kind != "ok"
            look_at += watch.poll_s()
        return False

    for name, seconds, items in trace:
        if name == "step":
            if phase not in ("step", "first_step"):
                phase, phase_s, since_s, beat_s, done, total = "step", clock, clock, clock, 0, 0
            if looks(clock + seconds):
                break
            clock += seconds
            if phase == "first_step":
                phase, phase_s = "step", clock
            count += 1
            ring.append(clock - since_s)
            step_s = since_s = beat_s = clock
        else:
            phase, phase_s, beat_s, done, total = name, clock, clock, 0, items
            since_s = clock if name == "first_step" else since_s
            if name == "first_step":
                continue
            for item in range(1, max(items, 1) + 1):
                if looks(clock + seconds / max(items, 1)):
                    break
                clock += seconds / max(items, 1)
                if items:
                    done, beat_s = item, clock
            if result.caught:
                break
    result.hours, result.steps = (min(clock, look_at) - begun) / 3600, count
    return result


def step_times(kind: str, usual_s: float, rng: random.Random) -> Iterator[float]:
    """Endless step durations of a healthy run."""
    n = 0
    while True:
        n += 1
        if kind == "steady":
            yield usual_s * rng.uniform(0.97, 1.05)
        elif kind == "heavy-tailed":
            yield usual_s * min(math.exp(rng.gauss(0.0, 0.6)), 20.0)
        elif kind == "bimodal":  # buckets, or a slow batch now and then
            yield usual_s * (rng.uniform(0.9, 1.1) if rng.random() < 0.9 else rng.uniform(4.0, 6.0))
        elif kind == "rare slow":  # a mode that the last 200 need not contain
            yield usual_s * (rng.uniform(0.95, 1.05) if rng.random() < 0.997 else rng.uniform(9.0, 11.0))
        elif kind == "warm-up":
            yield usual_s * rng.uniform(0.97, 1.05) * (1 + 15 * math.exp(-n / 8))
        elif kind == "outliers":  # one in a thousand takes 20 times as long
            yield usual_s * (rng.uniform(0.95, 1.05) if rng.random() < 0.999 else 20.0)
        elif kind == "drifting":  # the card gets hot, then cool
            yield usual_s * (1.5 + 0.5 * math.sin(n / 500)) * rng.uniform(0.95, 1.05)
        else:
            raise ValueError(kind)


KINDS = ("steady", "heavy-tailed", "bimodal", "rare slow", "warm-up", "outliers", "drifting")


def healthy(kind: str, usual_s: float, hours: float, seed: int) -> Iterator[tuple[str, float, int]]:
    """A run of so many hours: start, caching, steps, a save every ten minutes, samples and a slow save every hour."""
    rng = random.Random(f"{kind} {usual_s} {seed}")
    yield "import", rng.uniform(5, 60), 0
    yield "load", rng.uniform(10, 240), 0
    yield "cache_latents", rng.uniform(20, 200), 40
    yield "cache_text", rng.uniform(10, 60), 40
    yield "first_step", 0.0, 0
    yield "step", rng.uniform(2, 90) + usual_s, 0
    passed, saves, samples = 0.0, 600.0, 3600.0
    for seconds in step_times(kind, usual_s, rng):
        yield "step", seconds, 0
        passed += seconds
        if passed >= saves:
            yield "save", rng.uniform(0.2, 8.0), 0
            saves += 600.0
        if passed >= samples:
            yield "sample", rng.uniform(30, 180), 4
            yield "save", rng.uniform(5, 40), 0
            samples += 3600.0
        if passed >= hours * 3600:
            break
    yield "end", rng.uniform(1, 20), 0


def hanging(kind: str, usual_s: float, at: str, after: int, seed: int) -> Iterator[tuple[str, float, int]]:
    """A healthy run that stops for good: in phase `at`, or at step number `after` of the training."""
    n = 0
    for phase, seconds, items in healthy(kind, usual_s, 1000.0, seed):
        if phase == "step":
            n += 1
        if (at == "step" and phase == "step" and n > after) or (phase == at != "step"):
            yield phase, FOREVER, 0
            return
        yield phase, seconds, items


def new_watch(limits: Limits, known: dict | None = None) -> Watch:
    return Watch(limits, known or {})
