"""The ledger: where a run's time went, whatever its clocks did. A simulation of runs whose true hours it knows."""

import json
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given, settings, strategies as st
from seeds import examples

from monitor import ledger
from monitor.ledger import STATES, Ledger
from monitor.process.platform import Moment


@dataclass
class World:
    """A run that happens: two clocks, and a monitor that keeps the ledger. `truth`: seconds by state."""

    utc_s: float = 1_800_000_000.0
    mono_s: float = 500.0
    machines: int = 1
    step: int = 0
    best: int = 0
    saved: int = 0
    repeated: int = 0
    failures: int = 0
    recovered: int = 0
    pending: int = 0  # failures without a new step since
    truth: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    unpaid: float = 0.0
    since_saved: float = 0.0  # training time since the last checkpoint: lost when the run fails
    ledger: Ledger = field(default_factory=Ledger)

    def now(self) -> Moment:
        return Moment(self.mono_s, 0.0, self.utc_s)

    def passes(self, seconds: float, state: str | None) -> None:
        """The loop turns, and later again."""
        if state != "lost":
            self.ledger.passes(state or "")
        self.utc_s += seconds
        self.mono_s += seconds
        if state:
            self.truth[state] += seconds

    def is_followed(self) -> None:
        """By another monitor, which knows what the last one wrote."""
        self.ledger = Ledger.of(json.loads(json.dumps({"ledger": asdict(self.ledger)})))
        self.ledger.follows(0.0)

    def starts(self) -> None:
        """What was trained since the last checkpoint has to be trained again."""
        self.repeated += self.step - self.saved
        self.truth["training"] -= self.since_saved
        self.truth["lost"] += self.since_saved
        self.since_saved, self.step = 0.0, self.saved
        self.ledger.starts(self.saved)

    def keeps(self) -> None:
        """A checkpoint of the newest step."""
        self.saved, self.since_saved = self.step, 0.0

    def trains(self, steps: int, step_s: float, every: int) -> None:
        self.recovered, self.pending = self.recovered + self.pending, 0
        for _ in range(steps):
            self.passes(step_s, "training")
            self.since_saved += step_s
            self.step += 1
            self.best = max(self.best, self.step)
            self.ledger.reaches(self.step)
            if self.step % every == 0:
                self.keeps()
        self.ledger.passes("training")

    def fails(self, seconds: float, state: str = "lost", paid: bool = True) -> None:
        """The attempt ends in a failure; this much time passes until that is known, or until another machine begins."""
        self.failures, self.pending = self.failures + 1, self.pending + 1
        self.passes(seconds, state)
        self.unpaid += 0 if paid else seconds

    def hangs(self, seconds: float) -> None:
        self.fails(seconds)
        self.ledger.fails(seconds)

    def ends(self, how: str = "completed") -> None:
        self.ledger.ends(how == "preempted", how == "completed")

    def reboots(self) -> None:
        """On this machine or on another one, with what was saved."""
        self.machines += 1
        self.mono_s = 3.0 * self.machines

    def check(self) -> None:
        found = self.ledger
        assert found.seconds == pytest.approx(self.truth, abs=0.1), (found.seconds, self.truth)
        assert found.wall_s == pytest.approx(sum(self.truth.values()), abs=0.1)
        assert found.unpaid_s == pytest.approx(self.unpaid, abs=0.1)
        assert found.machine_s == pytest.approx(found.wall_s - found.unpaid_s)
        assert (found.repeated, found.steps) == (self.repeated, self.best)
        assert (found.failures, found.recovered) == (self.failures, self.recovered)


def a_world(monkeypatch) -> World:
    world = World()
    monkeypatch.setattr(ledger.platform, "boot_id", lambda: f"{world.machines:08d}")
    monkeypatch.setattr(ledger.platform, "now", world.now)
    return world


def test_a_hang_costs_detection_recovery_and_the_steps_since_the_checkpoint(monkeypatch):
    world = a_world(monkeypatch)
    world.starts()
    world.passes(100, "loading")
    world.trains(97, 2.0, every=10)
    world.hangs(60)
    world.passes(15, "waiting")
    world.starts()
    world.trains(110, 2.0, every=10)
    world.ends()
    world.check()
    found = world.ledger
    found.price_per_hour = 0.36
    assert found.repeated == 7 and found.seconds["lost"] == pytest.approx(60 + 14)
    assert found.failures == 1 and found.kept_steps == 90
    assert found.kept_s == pytest.approx(90 * found.made_s / (97 + 110))
    assert found.cost == pytest.approx(found.wall_s / 3600 * 0.36)
    values = found.values()
    assert sum(values["hours"].values()) == pytest.approx(values["wall_hours"], abs=1e-4)
    assert values["steps_trained_twice"] == 7 and values["saved"]["steps"] == 90
    line = found.line()
    for part in ("7 steps trained twice", "cost 0.06 at 0.36 per hour", "1 of 1 failure recovered"):
        assert part in line, line


@pytest.mark.parametrize(
    "known",
    [None, {}, [1], {"seconds": [1], "paid": 3, "boot": 7}, {"seconds": {"lost": 1e999, "loading": -1, "x": 3}},
     {"steps": 10**400, "failures": True, "made_s": "x", "state": "gone", "pending": -4, "price_per_hour": float("nan")}],
)  # fmt: skip
def test_what_is_missing_damaged_or_hostile_is_left_out(known):
    found = Ledger.of({"ledger": known})
    assert found == Ledger() and json.dumps(found.values(), allow_nan=False)


@pytest.mark.parametrize(
    "hours, price, limit, stop_s, over",
    [
        (19.97, 0.5, 10, 90, False),  # 20 hours, less the 90 seconds of a stop with a checkpoint
        (19.98, 0.5, 10, 90, True),
        (8.9 / 3600, 3600, 10, 90, False),  # less a tenth of a short one
        (9.1 / 3600, 3600, 10, 90, True),
        (1e6, 0, 10, 90, False),
        (1e6, 1, 0, 90, False),
    ],
)
def test_the_spend_limit_is_price_times_time_with_a_reserve_for_the_checkpoint(hours, price, limit, stop_s, over):
    found = Ledger(price_per_hour=price)
    found.seconds["training"] = hours * 3600
    text = found.over(limit, stop_s)
    assert bool(text) == over
    if over:
        assert text.startswith(f"the spend limit of {limit:g} is reached: {found.cost:.2f} spent in {hours:.2f} hours")


def test_another_price_such_as_that_of_the_next_machine_counts_from_then_on():
    found = Ledger()
    for price, hours, cost in ((0.0, 1, 0), (0.5, 9, 5), (3.0, 1, 8), (0.0, 1, 0), (1.0, 1, 10)):
        found.follows(price)
        found.seconds["training"] += hours * 3600
        found = Ledger.of(json.loads(json.dumps({"ledger": asdict(found)})))
        assert (found.cost or 0) == pytest.approx(cost)
    assert "cost 10.00 now at 1 per hour" in found.line()


@pytest.mark.parametrize(("mono_s", "lost", "failures"), [(-60.0, 0, 0), (1e9, 60, 1)])
def test_where_no_boot_has_a_name_a_monotonic_clock_that_starts_anew_tells_a_reboot(
    monkeypatch, mono_s, lost, failures
):
    """macOS and Windows: the time in which the machine was off counted as training."""
    monkeypatch.setattr(ledger.platform, "boot_id", lambda: "")
    now = ledger.platform.now()
    found = Ledger(state="training", utc_s=now.wall_s - 60, mono_s=now.mono_s + mono_s, boot="")
    found.follows(0.0)
    assert found.seconds["lost"] == pytest.approx(lost, abs=9) and found.failures == failures


SECONDS = st.floats(0.1, 500)
JUMP = st.sampled_from([0.0, 0.0, 0.0, 3600.0, -3600.0, 90_000.0])
# Each: how an attempt ends, how long it loads, its steps, the clock's jump meanwhile, and two times that its end takes.
ENDS = ["hang", "hang while loading", "killed", "vanished", "preempted", "stopped", "monitor killed"]
PART = st.tuples(st.sampled_from(ENDS), SECONDS, st.integers(1, 40), JUMP, SECONDS, SECONDS)


@settings(max_examples=examples(40))
@given(st.lists(PART, max_size=8), st.integers(1, 12), st.floats(0.05, 20), SECONDS)
def test_the_hours_by_state_are_those_that_passed(parts, every, step_s, first):
    """Their sum is the wall time of the run: reboots, other machines, clocks that are set, replaced monitors."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = a_world(monkeypatch)
        world.passes(first, "waiting")
        world.ledger.passes("waiting")  # the last that is known of a machine that vanished while it loaded
        world.reboots()
        world.utc_s, world.unpaid = world.utc_s + step_s, step_s
        world.truth["waiting"] += step_s
        world.is_followed()
        world.starts()
        loading = "loading"
        for end, load, steps, jump, one, two in parts:
            world.passes(load, loading)
            world.utc_s += jump
            if end != "hang while loading":
                world.trains(steps, step_s, every)
            loading = "loading" if end in ("stopped", "monitor killed") else "recovering"
            world.ledger.passes(world.ledger.state)  # the status of this second
            if end.startswith("hang"):
                world.hangs(one)
                world.utc_s -= jump
                world.passes(two, "recovering")
            elif end == "killed":  # with its monitor, on a machine that stays: the next one finds it dead
                world.fails(one)
                world.is_followed()
                world.ledger.fails(one)
            elif end == "vanished":
                world.reboots()
                world.fails(one, paid=False)
                world.is_followed()
            elif end == "preempted":
                world.passes(one, "training")  # saving
                world.ends("preempted")
                world.keeps()
                world.reboots()
                world.fails(two, "waiting", paid=False)
                world.is_followed()
            else:
                if end == "monitor killed":  # the training lives, and is stopped under the next one
                    world.passes(one, "training")
                    world.is_followed()
                world.ends("stopped")
                world.keeps()
                world.pending = 0
                world.passes(one, None)
                world.is_followed()
            world.starts()
        world.passes(first, loading)
        world.trains(1, step_s, every)
        world.ends()
        world.check()
