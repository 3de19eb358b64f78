"""Is a run stuck? The decision alone, on a virtual clock: hundreds of healthy hours, every hang, every clock trick."""

import dataclasses
import itertools
import random
import statistics

import pytest
from monitor_traces import ASLEEP, KINDS, hanging, healthy, new_watch, play

from guards.heartbeat import Beat
from monitor import limits
from monitor.decide import HUNG, OK, SLOW, SUSPECT, Observation, Signals, Watch, decide
from monitor.learn import Durations

LIMITS = limits.load()
HOURS = {0.05: 1.0, 0.5: 4.0, 2.0: 10.0, 8.0: 15.0}  # seconds a step -> simulated hours of each kind
PLAYED: list = []


def beat(**values) -> Beat:
    """A record; what is not given is that of a run in the middle of its steps."""
    base = dict(
        rank=0, world=1, pid=7, request=0, phase="step", outcome="running", step=100, planned=1000, epoch=1, done=0,
        total=0, count=100, loss=0.1, lr=1e-4, beat_s=0.0, phase_s=0.0, step_s=0.0, started_s=0.0, note="",
        intervals=(0.05,) * 100,
    )  # fmt: skip
    return Beat(**{**base, **values})


def quiet(watch: Watch, seconds: float, record: Beat, start: float, look_s: float = 0.15, boot: float = 0.0):
    """Look at the same record for so long; the last verdict."""
    verdict, now = None, start
    while now <= start + seconds:
        verdict = watch.look(Observation(now, now + boot, (record,)))
        now += look_s
    return verdict


@pytest.mark.parametrize("usual_s", HOURS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_healthy_run_is_killed_even_when_the_second_opinion_always_says_asleep(kind, usual_s):
    played = play(healthy(kind, usual_s, HOURS[usual_s], seed=1), new_watch(LIMITS), ASLEEP)
    PLAYED.append(played)
    assert played.kills == [], f"killed after {played.hours:.1f} h: {played.kills}"
    assert played.hours > HOURS[usual_s]


def test_the_healthy_traces_are_two_hundred_hours():
    if len(PLAYED) < len(KINDS) * len(HOURS):
        pytest.skip("counts what the test before it has played; run the whole file")
    assert sum(p.hours for p in PLAYED) >= 200
    assert sum(p.suspects for p in PLAYED) > 0, "traces without one suspicion are too easy"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["import", "load", "cache_latents", "cache_text", "step", "save", "sample", "end"])
def test_every_hang_is_caught_in_its_own_phase(kind, at):
    if at == "end":
        trace = itertools.chain(
            itertools.takewhile(lambda e: e[0] != "end", healthy(kind, 2.0, 0.2, 2)), [("end", 1e9, 0)]
        )
    else:
        trace = hanging(kind, 2.0, at, after=37, seed=2)
    played = play(trace, new_watch(LIMITS), Signals(), limit_s=24 * 3600.0)
    assert played.caught is not None, "never caught"
    # The first step of an attempt stands in its own phase until it is complete.
    assert played.caught.phase == at
    phase = LIMITS.phases[at]
    assert played.detect_s <= 2 * max(phase.ceiling, 3 * 90) + 2


@pytest.mark.parametrize("after", [0, 1, 3, 6, 20, 200, 3000])
def test_a_hang_at_any_step_is_caught(after):
    played = play(hanging("heavy-tailed", 0.05, "step", after, seed=3), new_watch(LIMITS), limit_s=3 * 3600.0)
    assert played.caught is not None
    assert played.caught.step == after


def test_an_untuned_toy_loop_of_50_ms_steps_is_declared_stuck_within_three_seconds():
    rng = random.Random(4)
    slow, fast = [], []
    for seed in range(60):
        after = rng.randrange(40, 400)
        for found, signals in ((fast, ASLEEP), (slow, Signals())):
            found.append(play(hanging("steady", 0.05, "step", after, seed), new_watch(LIMITS), signals).detect_s)
    assert statistics.quantiles(fast, n=20)[-1] <= 1.6, "with a second signal"
    assert statistics.quantiles(slow, n=20)[-1] <= 3.0, "without one"


def test_what_a_run_has_learned_serves_the_next_attempt_from_its_first_step_on():
    first = new_watch(LIMITS)
    play(healthy("steady", 0.05, 0.05, 5), first)
    again = new_watch(LIMITS, first.learned())
    played = play(hanging("steady", 0.05, "step", 3, 5), again)
    assert played.detect_s < 6
    new = play(hanging("steady", 0.05, "step", 3, 5), new_watch(LIMITS))
    assert new.detect_s > 500, "a run of which nothing is known gets the long ceiling"


def test_the_budget_follows_the_longest_of_the_last_two_hundred():
    known = Durations()
    known.add([1.0] * 50)
    calm = known.budget(LIMITS.phases["step"], LIMITS.watch)
    known.add([30.0])
    assert known.budget(LIMITS.phases["step"], LIMITS.watch) >= 5 * 30.0
    known.add([1.0] * 200)
    assert calm <= known.budget(LIMITS.phases["step"], LIMITS.watch) <= 2 * 30.0


@pytest.mark.parametrize(
    ("quiet_s", "signals", "expected"),
    [
        (4.9, ASLEEP, OK),
        (5.0, ASLEEP, SUSPECT),
        (9.9, ASLEEP, SUSPECT),
        (10.0, ASLEEP, HUNG),
        (10.0, Signals(), SUSPECT),
        (19.9, Signals(), SUSPECT),
        (20.0, Signals(), HUNG),
        (20.0, Signals(slow=("swapping",)), SLOW),
        (79.9, Signals(stuck=("asleep",), slow=("swapping",)), SLOW),
        (80.0, Signals(slow=("swapping",)), HUNG),
    ],
)
def test_suspect_at_half_hung_at_the_budget_with_a_second_signal_else_at_twice(quiet_s, signals, expected):
    assert decide(quiet_s, 10.0, 80.0, signals) == expected


def test_a_heartbeat_that_only_ticks_is_no_progress():
    watch, now, verdict = new_watch(LIMITS), 100.0, None
    for _ in range(40):  # beats every look, the counts stand still
        verdict = watch.look(Observation(now, now, (beat(beat_s=now, done=0),)))
        now += 0.15
    assert verdict.kind == HUNG


def test_items_inside_a_step_do_not_hide_that_no_step_completes():
    watch, now, verdict = new_watch(LIMITS), 100.0, None
    for n in range(40):
        verdict = watch.look(Observation(now, now, (beat(beat_s=now, done=n),)))
        now += 0.15
    assert verdict.kind == HUNG


def test_items_beyond_the_announced_number_are_no_progress():
    watch, now = new_watch(LIMITS), 100.0
    kinds = set()
    for n in range(0, 3000):
        record = beat(phase="cache_latents", count=0, step=0, done=n, total=5, beat_s=now, intervals=())
        kinds.add(watch.look(Observation(now, now, (record,), 0, ASLEEP)).kind)
        now += 1.0
    assert HUNG in kinds


def test_phases_that_come_and_go_without_a_step_end_at_the_outer_deadline():
    watch, now = new_watch(LIMITS), 100.0
    for n in range(20000):
        record = beat(phase=("save", "step")[n % 2], phase_s=now, beat_s=now)
        verdict = watch.look(Observation(now, now, (record,)))
        if verdict.kind == HUNG:
            assert "no step has completed" in verdict.why[0]
            assert now - 100.0 >= LIMITS.watch.between_steps
            return
        now += 1.0
    pytest.fail("never caught")


def test_a_suspended_machine_is_not_a_hang():
    watch = new_watch(LIMITS)
    record = beat(beat_s=100.0)
    assert quiet(watch, 0.5, record, 100.0).kind == OK
    # Eight hours later by the boot clock; the monotonic one stood still meanwhile.
    verdict = watch.look(Observation(100.6, 100.6 + 8 * 3600, (record,)))
    assert verdict.kind == OK and "suspended" in verdict.reset
    assert quiet(watch, 0.5, record, 100.7, boot=8 * 3600.0).kind == OK
    assert quiet(watch, 5.0, record, 101.3, boot=8 * 3600.0).kind == HUNG, "a run that does not wake up is caught"


def test_a_monitor_that_was_stopped_itself_judges_nothing_by_time_it_did_not_see():
    watch = new_watch(LIMITS)
    record = beat(beat_s=100.0)
    assert quiet(watch, 0.3, record, 100.0).kind == OK
    verdict = watch.look(Observation(1000.0, 1000.0, (record,), 0, ASLEEP))
    assert verdict.quiet_s < 3.0
    moved = dataclasses.replace(record, step=101, count=101, beat_s=1000.1, intervals=(0.05,) * 101)
    assert watch.look(Observation(1000.2, 1000.2, (moved,))).kind == OK


@pytest.mark.parametrize("phase", ["import", "load", "cache_latents", "save", "sample"])
def test_a_process_that_a_signal_has_stopped_is_stuck_in_any_phase_within_seconds(phase):
    watch, now, record = new_watch(LIMITS), 100.0, beat(phase=phase, count=0, intervals=(), beat_s=100.0)
    kinds = {}
    while now < 100 + 2 * LIMITS.watch.stopped:
        verdict = watch.look(Observation(now, now, (record,), stopped=frozenset({record.pid})))
        kinds.setdefault(verdict.kind, now - 100)
        now += 1.0
    assert kinds[SUSPECT] == pytest.approx(LIMITS.watch.stopped / 2, abs=1.5)
    assert kinds[HUNG] == pytest.approx(LIMITS.watch.stopped, abs=1.5)
    assert verdict.phase == phase and "stopped by a signal" in verdict.why[0]


def test_a_process_that_was_stopped_and_goes_on_is_left_alone():
    watch, now, record = new_watch(LIMITS), 100.0, beat(phase="save", beat_s=100.0)
    for look in range(300):  # every other four seconds it is stopped
        stopped = frozenset({record.pid} if look % 8 < 4 else ())
        assert watch.look(Observation(now, now, (record,), stopped=stopped)).kind in (OK, SUSPECT)
        now += 1.0


def test_the_rank_that_stands_still_is_named():
    watch, now, verdict = new_watch(LIMITS), 100.0, None
    for n in range(60):
        alive = beat(rank=0, pid=1, step=100 + n, count=100 + n, beat_s=now, intervals=(0.1,) * (100 + n))
        verdict = watch.look(Observation(now, now, (alive, beat(rank=1, pid=2)), 0, ASLEEP))
        if verdict.kind == HUNG:
            break
        now += 0.15
    assert verdict.kind == HUNG and verdict.rank == 1


def test_after_its_last_words_a_process_must_leave():
    watch = new_watch(LIMITS)
    verdict = quiet(watch, LIMITS.watch.exit + 1, beat(phase="end", outcome="done", beat_s=100.0), 100.0, look_s=1.0)
    assert verdict.kind == HUNG and verdict.phase == "end"


def test_a_script_without_a_heartbeat_is_watched_by_its_log_at_five_minutes():
    watch, now = new_watch(LIMITS), 0.0
    while now < 3600:  # a line every four minutes
        assert watch.look(Observation(now, now, (), int(now // 240), ASLEEP)).kind in (OK, SUSPECT)
        now += 1.0
    while watch.look(Observation(now, now, (), 99999, ASLEEP)).kind != HUNG:
        now += 1.0
        assert now < 3600 + 302
    assert now >= 3600 + 300


def test_a_script_without_a_heartbeat_that_computes_in_silence_is_left_alone_for_longer_not_for_ever():
    watch, now, computes = new_watch(LIMITS), 0.0, Signals(busy=("it computes: 1.0 processor cores in use",))
    kinds = {}
    while now < 20 * LIMITS.watch.log_silence:
        kinds.setdefault(watch.look(Observation(now, now, (), 7, computes)).kind, now)
        now += 1.0
    assert kinds[SLOW] == pytest.approx(LIMITS.watch.log_silence, abs=2)
    assert kinds[HUNG] == pytest.approx(LIMITS.watch.slow_times * LIMITS.watch.log_silence, abs=2)


def test_where_there_are_steps_to_count_computing_is_no_excuse():
    busy = Signals(busy=("it computes: 1.0 processor cores in use", "a GPU is at work"))
    assert decide(20.0, 10.0, 80.0, busy) == HUNG


def test_a_save_counted_into_a_step_does_not_stretch_the_budget():
    watch = new_watch(LIMITS)
    watch.look(Observation(100.0, 100.0, (beat(beat_s=100.0),)))
    watch.look(Observation(130.0, 130.0, (beat(phase="save", phase_s=100.1, beat_s=100.1),)))
    after = beat(step=101, count=101, beat_s=160.0, phase_s=160.0, intervals=(0.05,) * 100 + (60.0,))
    watch.look(Observation(160.1, 160.1, (after,)))
    assert watch._budget("step") < 2.0


def test_nothing_is_concluded_from_the_first_step():
    watch = new_watch(LIMITS)
    played = play(healthy("steady", 0.05, 0.02, 6), watch)
    assert played.kills == []
    assert watch.durations["step"].longest < 0.1, "the first step of a process (compilation) is no usual step"
    assert watch.durations["first_step"].seen == 1
