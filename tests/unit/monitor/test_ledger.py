"""The ledger: where a run's time went, whatever its clocks did; what it cost, and when it has cost enough."""

import json
from dataclasses import asdict

import pytest

from monitor import ledger
from monitor.ledger import STATES, Ledger, amount
from monitor.process.platform import Moment


def read_back(found: Ledger) -> Ledger:
    return Ledger.of(json.loads(json.dumps({"ledger": asdict(found)})))


def kept(monkeypatch, *story: tuple[str, float]) -> Ledger:
    """The ledger of a run to which this happens, one after the other.

    A state and its seconds. step, starts, fails: the ledger's own. ends: 1 preempted, 2 completed, 0 stopped. clock: it
    is set by so many seconds. monitor, machine: another one goes on so many seconds later.
    """
    utc_s, mono_s, boot, found = 1_800_000_000.0, 500.0, 1, Ledger()
    monkeypatch.setattr(ledger.platform, "boot_id", lambda: str(boot))
    monkeypatch.setattr(ledger.platform, "now", lambda: Moment(mono_s, 0.0, utc_s))
    for what, value in story:
        if what in STATES:
            found.passes(what)
            utc_s, mono_s = utc_s + value, mono_s + value
            found.passes(what)
        elif what == "step":
            found.reaches(int(value))
        elif what == "clock":
            utc_s += value
        elif what == "ends":
            found.ends(value == 1, value == 2)
        elif what in ("monitor", "machine"):
            utc_s, mono_s = utc_s + value, mono_s + value
            if what == "machine":
                mono_s, boot = 3.0, boot + 1
            found = read_back(found)
            found.follows(0.0)
        else:
            getattr(found, what)(value)
    return found


HANG = (  # two seconds a step, a checkpoint every ten
    ("starts", 0), ("loading", 100), ("training", 194), ("step", 97), ("clock", 3600), ("training", 60), ("fails", 60),
    ("waiting", 15), ("clock", -7200), ("starts", 90), ("training", 220), ("step", 200), ("ends", 2),
)  # fmt: skip
TRAINED = (("starts", 0), ("training", 20), ("step", 10))  # its checkpoint is of step 5
AGAIN = (("starts", 5), ("recovering", 4), ("training", 12), ("step", 11))
# What happens; the seconds in each of STATES; unpaid seconds, steps trained twice, failures and recovered ones.
STORIES = {
    "a hang, and the clock is set": (HANG, [400, 100, 15, 0, 60 + 14], (0, 7, 1, 1)),
    "a hang while it loads": (
        [("starts", 0), ("loading", 70), ("fails", 20), ("recovering", 30), ("training", 10), ("step", 5)],
        [10, 50, 0, 30, 20], (0, 0, 1, 1)),
    "killed with its monitor": (
        [*TRAINED, ("monitor", 9), ("fails", 9), *AGAIN], [22, 0, 0, 4, 9 + 10], (0, 5, 1, 1)),
    "its machine vanishes": ([*TRAINED, ("machine", 100), *AGAIN], [22, 0, 0, 4, 100 + 10], (100, 5, 1, 1)),
    "its machine vanishes while it waits": ([("waiting", 30), ("machine", 70)], [0, 0, 100, 0, 0], (70, 0, 0, 0)),
    "pre-empted with a checkpoint, and paid for again afterwards": (
        [*TRAINED, ("ends", 1), ("machine", 100), ("starts", 10), ("recovering", 5), ("training", 2), ("step", 11)],
        [22, 0, 100, 5, 0], (100, 0, 1, 1)),
    "stopped before it has recovered, and started again": (
        [*TRAINED, ("training", 3), ("fails", 3), ("recovering", 2), ("ends", 0), ("monitor", 500), ("starts", 10),
         ("loading", 5), ("training", 2), ("step", 11)],
        [22, 5, 0, 2, 3], (0, 0, 1, 0)),
    "a failure longer ago than the attempt": ([*TRAINED, ("fails", 99), ("ends", 2)], [0, 0, 0, 0, 20], (0, 0, 1, 1)),
    "a smaller part is trained twice": (
        [("starts", 50), ("training", 20), ("step", 60), ("starts", 55)], [10, 0, 0, 0, 10], (0, 5, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("what", STORIES)
def test_where_the_time_went_when(monkeypatch, what):
    """Their sum is the wall time of the run."""
    story, seconds, counts = STORIES[what]
    found = kept(monkeypatch, *story)
    assert found.seconds == pytest.approx(dict(zip(STATES, seconds, strict=True)))
    assert (found.unpaid_s, found.repeated, found.failures, found.recovered) == counts
    assert found.wall_s == pytest.approx(sum(seconds)) and found.machine_s == pytest.approx(sum(seconds) - counts[0])


def test_a_hang_costs_money_and_its_checkpoint_saves_some(monkeypatch):
    found = kept(monkeypatch, *HANG)
    found.price_per_hour = 0.36
    assert (found.steps, found.kept_steps) == (200, 90) and found.kept_s == pytest.approx(90 * 414 / (97 + 110))
    assert found.cost == pytest.approx(589 / 3600 * 0.36)
    values = found.values()
    assert sum(values["hours"].values()) == pytest.approx(589 / 3600, abs=1e-4)
    assert values["wall_hours"] == values["machine_hours"] == pytest.approx(589 / 3600, abs=1e-5)
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


def test_an_amount_is_a_number_above_0_of_a_sensible_size():
    assert [amount(one) for one in (0.36, 3, True, "1", -1, 1e999, None)] == [0.36, 3, 0, 0, 0, 0, 0]


def test_another_price_such_as_that_of_the_next_machine_counts_from_then_on():
    found = Ledger()
    for price, hours, cost in ((0.0, 1, 0), (0.5, 9, 5), (3.0, 1, 8), (0.0, 1, 0), (1.0, 1, 10)):
        found.follows(price)
        found.seconds["training"] += hours * 3600
        found = read_back(found)
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
