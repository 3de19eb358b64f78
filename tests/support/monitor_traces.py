"""Simulated runs on a virtual clock: what a healthy script does in an hour, and what a stuck one looks like.

A trace is a sequence of (event, seconds, amount):
    PHASE     enter the phase; `amount` items are counted in it, evenly
    "loop"    the next tqdm of the same phase, which counts from 1 again
    "step"    one optimizer step
    "stuck"   nothing changes any more
    "exit"    rank 0's outcome is "done" and its process lives on
    "gone"    no rank lives, the script does; its processes use `amount` of activity (CPU seconds, bytes) a second
    "process" the next stage of the script: a new rank process in phase "import"
`play` shows a trace to `Watch` as the monitor sees it: one observation every `poll_s()` seconds, and at T/2 and T.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

from guards import heartbeat
from monitor.detect.progress import HUNG, OVER, Watch
from monitor.state import Observation, Signals, Verdict

FOREVER = 1e9
ASLEEP = Signals(stuck=("asleep",))
Event = tuple[str, float, float]


@dataclass
class Played:
    """A simulated run, as it is at `clock`. Its heartbeat is a real one."""

    clock: float = 1000.0
    poll_at: float = 1000.0
    gone_s: float = 0.0  # when the last rank ended; 0: one lives
    activity: float = 0.0
    rate: float = 0.0
    stages: int = 0
    detect_s: float = 0.0  # of a hang: from the last progress to the verdict
    caught: Verdict | None = None  # a false kill where the trace is healthy

    @property
    def hours(self) -> float:
        return (min(self.clock, self.poll_at) - 1000.0) / 3600

    def start(self) -> None:
        """A process begins."""
        self.gone_s, self.rate, self.stages = 0.0, 0.0, self.stages + 1
        self.heart = heartbeat.Heartbeat(None)
        self.heart.record.pid = self.stages
        self.heart.phase("import")

    def event(self, name: str, seconds: float, amount: float) -> Iterator[float]:
        """Play one event; yields the seconds for which nothing changes."""
        items = 0
        if name == "step":
            if self.heart.current_phase not in ("step", "first_step"):
                self.heart.phase("step")
        elif name == "stuck":
            self.rate = 0.0
        elif name == "exit":
            self.heart.end("done")
        elif name == "gone":
            self.gone_s, self.rate = self.clock, amount
        elif name == "process":
            self.start()
        else:
            items = int(amount)
            if name != "loop":
                self.heart.phase(name)
        for item in range(1, max(items, 1) + 1):
            yield seconds / max(items, 1)
            if items:
                self.heart.item(item)
        if name == "step":
            self.heart.step(self.heart.record.step + 1)


def play(trace: Iterator[Event], watch: Watch, signals: Signals = ASLEEP) -> Played:
    """Show the trace to `watch`. signals: the probe's evidence whenever it is taken; ASLEEP is the worst case."""
    played = Played()
    with mock.patch.object(heartbeat, "time", SimpleNamespace(monotonic=lambda: played.clock)):
        played.start()
        for seconds in (seconds for event in trace for seconds in played.event(*event)):
            beat = None
            while played.poll_at < played.clock + seconds:
                beat = beat or heartbeat._parse(bytes(played.heart.record), "a trace")
                now_s = played.poll_at
                activity = played.activity + played.rate * max(0.0, now_s - played.clock)
                seen = Observation(now_s, now_s, (beat,), ranks_gone=played.gone_s > 0, activity=activity)
                verdict = watch.observe(seen)
                if verdict.stalled_s >= verdict.budget_s and verdict.kind != OVER:
                    verdict = watch.observe(dataclasses.replace(seen, signals=signals))
                if verdict.kind in (HUNG, OVER):
                    played.caught, played.detect_s = verdict, now_s - max(played.gone_s, beat.beat_s)
                    return played
                moments = (verdict.budget_s / 2 - verdict.stalled_s, verdict.budget_s - verdict.stalled_s)
                played.poll_at += min([watch.poll_s(), *(left_s + 0.005 for left_s in moments if left_s > 0)])
            played.clock += seconds
            played.activity += played.rate * seconds
    return played


KINDS = {
    "steady": lambda n, rng: rng.uniform(0.97, 1.05),
    "heavy-tailed": lambda n, rng: min(math.exp(rng.gauss(0.0, 0.6)), 20.0),
    # buckets, or a slow batch now and then
    "bimodal": lambda n, rng: rng.uniform(0.9, 1.1) if rng.random() < 0.9 else rng.uniform(4.0, 6.0),
    # a mode that the last 200 need not contain
    "rare slow": lambda n, rng: rng.uniform(0.95, 1.05) if rng.random() < 0.997 else rng.uniform(9.0, 11.0),
    "warm-up": lambda n, rng: rng.uniform(0.97, 1.05) * (1 + 15 * math.exp(-n / 8)),
    # one in a thousand takes 20 times as long
    "outliers": lambda n, rng: rng.uniform(0.95, 1.05) if rng.random() < 0.999 else 20.0,
    # the card gets hot, then cool
    "drifting": lambda n, rng: (1.5 + 0.5 * math.sin(n / 500)) * rng.uniform(0.95, 1.05),
}


def step_times(kind: str, usual_s: float, rng: random.Random) -> Iterator[float]:
    """Endless step durations of a healthy run."""
    return (usual_s * KINDS[kind](n, rng) for n in itertools.count(1))


def caching(phase: str, rng: random.Random) -> Iterator[Event]:
    """One to three data sets: a fast pass that checks what is cached, then a slow pass that encodes."""
    for number in range(rng.randint(1, 3)):
        images = rng.randint(2, 120)
        yield phase if number == 0 else "loop", images * rng.uniform(0.001, 0.01), images
        yield "loop", images * rng.choice((0.05, 0.5, 5.0, 40.0)) * rng.uniform(0.5, 1.5), images


def ending(rng: random.Random) -> Iterator[Event]:
    """Uploads in phase "end", the outcome, the exit of the process."""
    yield "end", rng.uniform(1, 60), 0
    yield "exit", rng.uniform(0.1, 15), 0


def training(kind: str, usual_s: float, hours: float, rng: random.Random) -> Iterator[Event]:
    """A training process: a save every ten minutes, samples and a slow save every hour."""
    yield "load", rng.uniform(10, 240), 0
    yield from caching("cache_latents", rng)
    yield from caching("cache_text", rng)
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
    yield from ending(rng)


def healthy(kind: str, usual_s: float, hours: float, seed: int, trainings: int = 1) -> Iterator[Event]:
    """A script with a caching stage, one or two training stages (the second up to 20 times slower), a copy at the end.

    hours: of each training stage.
    """
    rng = random.Random(f"{kind} {usual_s} {seed}")
    yield "import", rng.uniform(5, 60), 0
    yield "load", rng.uniform(10, 240), 0
    yield from caching("cache_latents", rng)
    yield from ending(rng)
    for stage in range(trainings):
        yield "gone", rng.uniform(5, 120), 1.0  # the next stage imports: a core is busy
        yield "gone", rng.uniform(5, 110), 0.0  # from a slow disk
        yield "gone", rng.uniform(1, 10), 1.0
        yield "process", rng.uniform(5, 60), 0
        yield from training(kind, usual_s * (max(1.0, min(20.0, 8.0 / usual_s)) if stage else 1.0), hours, rng)
    yield "gone", rng.uniform(5, 900), 1e6  # cp of the LoRA to save_dir


def hanging(kind: str, usual_s: float, at: str, after: int, seed: int, trainings: int = 1) -> Iterator[Event]:
    """A healthy script that hangs for good in event `at`, once `after` of these are complete."""
    n = 0
    for event, seconds, amount in healthy(kind, usual_s, 1.1, seed, trainings):
        n += event == at
        if event == at and n > after:
            if amount >= 2 and event != "gone":
                yield event, seconds / 2, amount // 2
                yield "stuck", FOREVER, 0
            else:
                yield event, FOREVER, 0
            return
        yield event, seconds, amount
    raise ValueError(f"no {after + 1} times {at!r} in this trace")
