"""The ledger: where a run's time went, whatever its clocks did. A simulation writes the files of runs whose true hours it knows."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from monitor import ledger
from monitor.ledger import ENDED, STATES
from monitor.run_folder import RunFolder


@dataclass
class World:
    """A run that happens: two clocks, and the files that a monitor and a trainer write. `truth`: seconds by state."""

    folder: Path
    utc_s: float = 1_800_000_000.0
    mono_s: float = 500.0
    boot: str = "boot-one"
    machines: int = 1
    attempt: int = 0
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

    def stamp(self) -> dict:
        at = datetime.fromtimestamp(self.utc_s, UTC).isoformat(timespec="milliseconds")
        return {"t": at.replace("+00:00", "Z"), "mono_s": round(self.mono_s, 3)}

    def event(self, kind: str, **more) -> None:
        if kind in (*ENDED, "preempted", "hang", "crash"):
            more["reached"] = self.step
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({**self.stamp(), "kind": kind, "message": "", **more, "boot": self.boot}) + "\n")

    def passes(self, seconds: float, state: str | None) -> None:
        self.utc_s += seconds
        self.mono_s += seconds
        if state:
            self.truth[state] += seconds

    def keeps(self) -> None:
        """A checkpoint of the newest step."""
        self.saved, self.since_saved = self.step, 0.0

    def starts(self, kind: str = "started", waited: float = 0.0) -> None:
        self.attempt += 1
        self.step = self.saved
        self.event(
            kind, attempt=self.attempt, step=self.saved, before=RunFolder(self.folder).last_step(), waited_s=waited
        )

    def trains(self, steps: int, step_s: float, every: int) -> None:
        self.recovered, self.pending = self.recovered + self.pending, 0
        self.event("phase", phase="first_step", step=self.step)
        with (self.folder / "metrics.jsonl").open("a") as file:
            for _ in range(steps):
                self.passes(step_s, "training")
                self.since_saved += step_s
                self.step += 1
                self.best = max(self.best, self.step)
                line = {"kind": "step", **self.stamp(), "attempt": self.attempt, "step": self.step, "step_s": step_s}
                file.write(json.dumps(line) + "\n")
                if self.step % 7 == 0:
                    file.write(json.dumps({"kind": "gpu", **self.stamp(), "gpu": 0}) + "\n")
                if self.step % every == 0:
                    self.keeps()

    def loses(self) -> None:
        """Everything since the last checkpoint has to be trained again."""
        self.repeated += self.step - self.saved
        self.truth["training"] -= self.since_saved
        self.truth["lost"] += self.since_saved
        self.since_saved = 0.0

    def fails(self, seconds: float, state: str = "lost", paid: bool = True) -> None:
        """The attempt ends in a failure, and this much time passes until that is known, or until another machine begins."""
        self.failures, self.pending = self.failures + 1, self.pending + 1
        self.passes(seconds, state)
        self.unpaid += 0 if paid else seconds

    def reboots(self) -> None:
        """On this machine or on another one, with what was saved."""
        self.machines += 1
        self.boot, self.mono_s = f"boot-{self.machines}", 3.0 * self.machines

    def status(self, **values) -> dict:
        stamp = self.stamp()
        now = {"updated_at": stamp["t"], "updated_mono_s": stamp["mono_s"], "boot": self.boot, "step": self.step}
        now |= {"alive": False, **values}
        (self.folder / "status.json").write_text(json.dumps(now))
        return now

    def read(self, **values) -> ledger.Ledger:
        return ledger.read(self.folder, self.status(**values))

    def check(self, found: ledger.Ledger) -> None:
        assert found.seconds == pytest.approx(self.truth, abs=0.1), (found.seconds, self.truth)
        assert found.wall_s == pytest.approx(sum(self.truth.values()), abs=0.1)
        assert found.unpaid_s == pytest.approx(self.unpaid, abs=0.1)
        assert found.machine_s == pytest.approx(found.wall_s - found.unpaid_s)
        assert (found.repeated, found.steps) == (self.repeated, self.best)
        assert (found.failures, found.recovered) == (self.failures, self.recovered)


@pytest.fixture
def world(tmp_path) -> World:
    (tmp_path / "run").mkdir()
    return World(tmp_path / "run")


def test_a_hang_costs_detection_recovery_and_the_steps_since_the_checkpoint(world):
    world.passes(30, "waiting")
    world.starts(waited=30)
    world.passes(100, "loading")
    world.trains(97, 2.0, every=10)
    world.fails(60)  # the hang, until it is detected
    world.event("hang", phase="step", step=97, since_s=60.0)
    world.passes(5, "recovering")
    world.event("backoff")
    world.passes(15, "waiting")
    world.loses()
    world.starts("restarted")
    world.passes(90, "recovering")
    world.trains(110, 2.0, every=10)
    world.passes(4, "training")  # the final LoRA is saved
    world.event("completed")
    (world.folder / "run.toml").write_text('name = "run"\nprice_per_hour = 0.36\n')
    found = world.read(state="completed")
    world.check(found)
    assert found.repeated == 7 and found.seconds["lost"] == pytest.approx(60 + 14)
    assert found.failures == 1 and found.kept_steps == 90
    assert found.kept_s == pytest.approx(90 * found.step_s)
    assert found.cost == pytest.approx(found.wall_s / 3600 * 0.36)
    values = found.values()
    assert sum(values["hours"].values()) == pytest.approx(values["wall_hours"], abs=1e-4)
    assert values["steps_trained_twice"] == 7 and values["saved"]["steps"] == 90
    line = found.line()
    for part in ("7 steps trained twice", "cost 0.07 at 0.36 per hour", "1 of 1 failure recovered"):
        assert part in line, line


def test_a_run_that_is_under_way_is_counted_up_to_now(world, monkeypatch):
    monkeypatch.setattr(ledger.platform, "boot_id", lambda: world.boot)
    monkeypatch.setattr(ledger.platform, "now", lambda: ledger.platform.Moment(world.mono_s, 0.0, world.utc_s))
    began = world.stamp()["t"]
    world.passes(20, "waiting")
    assert world.read(state="queued", alive=True, started_at=began).seconds == pytest.approx(world.truth)
    world.starts(waited=20)
    world.passes(10, "loading")
    world.check(world.read(state="starting", alive=True))
    world.trains(3, 1.0, every=10)
    world.passes(0.5, "training")
    world.utc_s -= 90_000  # the wall clock is set back by a day
    world.passes(0.5, "training")
    world.check(world.read(state="running", alive=True))
    world.fails(30)
    world.event("crash", phase="step", step=3, since_s=30.0)
    world.passes(8, "recovering")
    world.check(world.read(state="recovering", alive=True))


def test_without_clocks_the_utc_is_used(world):
    """Earlier versions wrote only that."""
    world.starts()
    world.passes(10, "loading")
    world.trains(20, 1.0, every=10)
    world.event("checkpoint", step=20)
    world.event("completed")
    path = world.folder / "events.jsonl"
    missing = ("mono_s", "boot", "waited_s", "before")
    old = [{k: v for k, v in json.loads(line).items() if k not in missing} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in old))
    world.check(world.read(state="completed"))


def test_damaged_and_hostile_lines_cost_only_themselves(world):
    world.starts()
    world.passes(10, "loading")
    with (world.folder / "events.jsonl").open("ab") as file:
        file.write(b'{"t": "never", "kind": "hang", "step": 1}\nnot json\n[1]\n' + b"[" * 50_000 + b"\n\xff\xfe\n")
        file.write(b'{"t": "2026-01-01T00:00:00Z", "kind": "started", "attempt": -1, "step": 1e999}\n')
        file.write(b'{"t": "9999-99-99", "kind": 7}\n')
        file.write(b'{"t": "2026-01-01T00:00:00Z", "kind": "hang", "step": 1, "since_s": 1' + b"0" * 400 + b"}\n")
    (world.folder / "run.toml").write_bytes(b"price_per_hour = 'much'\n\xff")
    found = world.read(state="running")
    assert min(found.seconds.values()) >= 0 and json.dumps(found.values(), allow_nan=False)
    assert ledger.read(world.folder / "missing").wall_s == 0


@pytest.mark.parametrize(
    "text, price",
    [
        ("price_per_hour = 0.35\n", 0.35),
        ("price_per_hour=2 # euros\r\nname = 'a'\n", 2.0),
        ("price_per_hour = 1_000.5\n", 1000.5),
        ("[extra]\n", 0.0),
        ("price_per_hour = true\n", 0.0),
    ],
)
def test_the_price_is_that_of_the_spec(tmp_path, text, price):
    (tmp_path / "run.toml").write_text(text)
    assert ledger.price(tmp_path) == price


SECONDS = st.floats(0.1, 500)
JUMP = st.sampled_from([0.0, 0.0, 0.0, 3600.0, -3600.0, 90_000.0])
# Each: how an attempt ends, how long it loads, its steps, the clock's jump meanwhile, and two times that its end takes.
ENDS = ["hang", "crash", "hang while loading", "killed", "vanished", "preempted", "stopped", "monitor killed"]
PART = st.tuples(st.sampled_from(ENDS), SECONDS, st.integers(1, 40), JUMP, SECONDS, SECONDS)


@settings(max_examples=examples(40))
@given(st.lists(PART, max_size=8), st.integers(1, 12), st.floats(0.05, 20), SECONDS)
def test_the_hours_by_state_are_those_that_passed(tmp_path_factory, parts, every, step_s, first):
    """And their sum is the wall time of the run: reboots, other machines, clocks that are set, monitors that are replaced."""
    world, step_s = World(tmp_path_factory.mktemp("world")), round(step_s, 3)
    world.passes(first, "waiting")
    world.starts(waited=first)
    loading = "loading"
    for end, load, steps, jump, one, two in parts:
        world.passes(load, loading)
        world.utc_s += jump
        if end != "hang while loading":
            world.trains(steps, step_s, every)
        kind, loading = "started", "loading" if end in ("stopped", "monitor killed") else "recovering"
        if end in ("hang", "crash", "hang while loading"):
            world.fails(one)
            world.event("crash" if end == "crash" else "hang", phase="step", step=world.step, since_s=one)
            world.utc_s -= jump
            world.passes(two, "recovering")
            kind = "restarted"
        elif end == "killed":  # with the monitor, on a machine that stays
            world.fails(one)
        elif end == "vanished":
            world.reboots()
            world.fails(one, paid=False)
        elif end == "preempted":
            world.passes(one, "training")  # saving
            world.event("preempted")
            world.keeps()
            world.reboots()
            world.fails(two, "waiting", paid=False)
        else:
            if end == "monitor killed":
                world.event("started", message="adopted")
                world.passes(round(one, 3), "training")
            world.event("stopped")
            world.pending = 0
            world.keeps()
            world.passes(one if end == "stopped" else 0.0, None)
        world.loses()
        world.starts(kind)
    world.passes(first, loading)
    world.trains(1, step_s, every)
    world.event("completed")
    found = world.read(state="completed")
    world.check(found)
    assert world.read(state="completed").seconds == found.seconds
