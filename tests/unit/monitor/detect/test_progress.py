"""Is a run stuck? The decision alone, on a virtual clock: hundreds of healthy hours, every hang, every clock trick."""

import dataclasses
from collections.abc import Iterable

import pytest
from monitor_traces import ASLEEP, KINDS, hanging, healthy, new_watch, play

from guards.heartbeat import Beat
from monitor import config
from monitor.detect.durations import Durations
from monitor.detect.progress import (
    HUNG,
    MAX_LOOPS,
    OK,
    OVER,
    SLOW,
    SLOW_FACTOR,
    SUSPECT,
    Observation,
    Signals,
    Verdict,
    Watch,
    decide,
)

CONFIG = config.load()
# seconds a step -> simulated hours of each training stage, and how many of these the script has
HOURS = {0.05: (0.06, 2), 2.0: (1.2, 1), 8.0: (13.0, 1)}


def beat(**values) -> Beat:
    """A record; by default that of a run in the middle of its steps."""
    base = dict(
        rank=0, world=1, pid=7, request=0, phase="step", outcome="running", step=100, planned=1000, epoch=1, done=0,
        total=0, count=100, loss=0.1, lr=1e-4, beat_s=0.0, phase_s=0.0, step_s=0.0, started_s=0.0, note="",
        intervals=(0.05,) * 100,
    )  # fmt: skip
    return Beat(**{**base, **values})


def still(watch: Watch, seconds: float, record: Beat, start: float, poll_s: float = 0.15, boot: float = 0.0) -> Verdict:
    """Observe the same record for so long; the last verdict."""
    verdict, now = Verdict(OK), start
    while now <= start + seconds:
        verdict = watch.observe(Observation(now, now + boot, (record,)))
        now += poll_s
    return verdict


def items(watch: Watch, start: float, counts: Iterable[int], each_s: float, phase: str = "cache_latents", **more):
    """Observe each count for `each_s` seconds, one a second; the verdicts and the time at the end."""
    verdicts, now, phase_s = [], start, more.pop("phase_s", start)
    for done in counts:
        record = beat(phase=phase, phase_s=phase_s, beat_s=now, done=done, count=0, step=0, intervals=(), **more)
        for _ in range(max(1, round(each_s))):
            verdicts.append(watch.observe(Observation(now, now, (record,), 0, ASLEEP)))
            now += each_s / max(1, round(each_s))
    return verdicts, now


@pytest.mark.parametrize("usual_s", [0.05, 2.0, pytest.param(8.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_healthy_run_is_killed_even_when_all_evidence_says_asleep(kind, usual_s):
    hours, trainings = HOURS[usual_s]
    played = play(healthy(kind, usual_s, hours, 1, trainings), new_watch(CONFIG), ASLEEP)
    assert played.caught is None, f"killed after {played.hours:.1f} h: {played.caught}"
    assert played.hours > hours * trainings
    assert played.stages == 1 + trainings


# event, how many of them are complete before the hang -> the phase it is found in and the seconds that it may take
HANGS = {
    "the start": ("import", 0, "import"),
    "loading": ("load", 0, "load"),
    "the first pass of caching": ("cache_latents", 0, "cache_latents"),
    "the second pass of caching": ("loop", 0, "cache_latents"),
    "a later loop of the next stage": ("cache_text", 0, "cache_text"),
    "an upload at the end of the first stage": ("end", 0, "end"),
    "the exit of the first stage": ("exit", 0, "end"),
    "the script between two stages": ("gone", 0, "end"),
    "the script between two stages, after it was active": ("gone", 1, "end"),
    "the import of the second stage": ("process", 0, "import"),
    "the start of the second stage": ("load", 1, "load"),
    "a step": ("step", 37, "step"),
    "a save": ("save", 0, "save"),
    "a sample": ("sample", 0, "sample"),
    "a step of the third stage": ("step", -5, "step"),
    "the last upload": ("end", -1, "end"),
    "the last exit": ("exit", -1, "end"),
    "the copy of the LoRA": ("gone", -1, "end"),
}


@pytest.mark.parametrize("kind", ["heavy-tailed", pytest.param("warm-up", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", HANGS)
def test_every_hang_is_caught_in_its_own_phase(kind, where):
    event, after, phase = HANGS[where]
    if after < 0:  # counted from the end
        after += sum(name == event for name, *_ in healthy(kind, 2.0, 1.1, 2, 2))
    played = play(hanging(kind, 2.0, event, after, 2, 2), new_watch(CONFIG), Signals())
    assert played.caught is not None, "never caught"
    assert (played.caught.kind, played.caught.phase) == (OVER if event == "gone" else HUNG, phase)
    watch, bounds = CONFIG.watch, CONFIG.phases[phase]
    within_s = {"exit": watch.exit_s, "gone": watch.script_idle_s}.get(event, 2 * max(bounds.ceiling_s, 3 * 90))
    assert played.detect_s <= within_s + 2


@pytest.mark.parametrize("after", [0, 1, 3, 6, 20, 200, 3000])
def test_a_hang_at_any_step_is_caught(after):
    played = play(hanging("heavy-tailed", 0.05, "step", after, seed=3), new_watch(CONFIG), limit_s=6 * 3600.0)
    assert played.caught is not None
    assert played.caught.step == after


def test_an_untuned_toy_loop_of_50_ms_steps_is_declared_stuck_within_three_seconds():
    slow, fast = [], []
    for seed in range(4):
        after = 40 + 100 * seed
        for found, signals in ((fast, ASLEEP), (slow, Signals())):
            found.append(play(hanging("steady", 0.05, "step", after, seed), new_watch(CONFIG), signals).detect_s)
    assert max(fast) <= 1.7, "with a second signal"
    assert max(slow) <= 3.1, "without one"


def test_what_a_run_has_learned_serves_the_next_attempt_from_its_first_step_on():
    first = new_watch(CONFIG)
    play(healthy("steady", 0.05, 0.05, 5), first)
    assert first.step_s() == pytest.approx(0.05, rel=0.1)
    again = new_watch(CONFIG, first.learned())
    played = play(hanging("steady", 0.05, "step", 3, 5), again)
    assert played.detect_s < 6
    new = play(hanging("steady", 0.05, "step", 3, 5), new_watch(CONFIG))
    assert new.detect_s > 500, "a run of which nothing is known gets the long ceiling"


def test_the_budget_follows_the_longest_of_the_last_two_hundred():
    known = Durations()
    known.add([1.0] * 50)
    calm = known.budget(CONFIG.phases["step"], CONFIG.watch)
    known.add([30.0])
    assert known.budget(CONFIG.phases["step"], CONFIG.watch) >= 5 * 30.0
    known.add([1.0] * 200)
    assert calm <= known.budget(CONFIG.phases["step"], CONFIG.watch) <= 2 * 30.0


@pytest.mark.parametrize(
    ("stalled_s", "signals", "expected"),
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
        (20.0, Signals(busy=("it computes: 1.0 processor cores in use", "a GPU is at work")), HUNG),
    ],
)
def test_suspect_at_half_hung_at_the_budget_with_a_second_signal_else_at_twice(stalled_s, signals, expected):
    assert decide(stalled_s, 10.0, 80.0, signals) == expected


@pytest.mark.parametrize("items", [0, 1], ids=["it only ticks", "items inside a step"])
def test_a_heartbeat_without_a_completed_step_is_no_progress(items):
    watch, now, verdict = new_watch(CONFIG), 100.0, None
    for n in range(40):  # beats at every poll
        verdict = watch.observe(Observation(now, now, (beat(beat_s=now, done=items * n),)))
        now += 0.15
    assert verdict.kind == HUNG


def test_items_beyond_the_announced_number_are_no_progress():
    watch, now = new_watch(CONFIG), 100.0
    kinds = set()
    for n in range(0, 3000):
        record = beat(phase="cache_latents", count=0, step=0, done=n, total=5, beat_s=now, intervals=())
        kinds.add(watch.observe(Observation(now, now, (record,), 0, ASLEEP)).kind)
        now += 1.0
    assert HUNG in kinds


def test_phases_that_come_and_go_without_a_step_end_at_the_outer_deadline():
    watch, now = new_watch(CONFIG), 100.0
    for n in range(20000):
        record = beat(phase=("save", "step")[n % 2], phase_s=now, beat_s=now)
        verdict = watch.observe(Observation(now, now, (record,)))
        if verdict.kind == HUNG:
            assert "no step has completed" in verdict.evidence[0]
            assert now - 100.0 >= CONFIG.watch.between_steps_s
            return
        now += 1.0
    pytest.fail("never caught")


def test_a_suspended_machine_is_not_a_hang():
    watch = new_watch(CONFIG)
    record = beat(beat_s=100.0)
    assert still(watch, 0.5, record, 100.0).kind == OK
    # Eight hours later by the boot clock; the monotonic one stood still meanwhile.
    verdict = watch.observe(Observation(100.6, 100.6 + 8 * 3600, (record,)))
    assert verdict.kind == OK and "suspended" in verdict.reset
    assert still(watch, 0.5, record, 100.7, boot=8 * 3600.0).kind == OK
    assert still(watch, 5.0, record, 101.3, boot=8 * 3600.0).kind == HUNG, "a run that does not wake up is caught"


def test_a_monitor_that_was_stopped_itself_judges_nothing_by_time_it_did_not_see():
    watch = new_watch(CONFIG)
    record = beat(beat_s=100.0)
    assert still(watch, 0.3, record, 100.0).kind == OK
    verdict = watch.observe(Observation(1000.0, 1000.0, (record,), 0, ASLEEP))
    assert verdict.stalled_s < 3.0
    moved = dataclasses.replace(record, step=101, count=101, beat_s=1000.1, intervals=(0.05,) * 101)
    assert watch.observe(Observation(1000.2, 1000.2, (moved,))).kind == OK


def test_time_is_lost_from_the_last_step_and_judged_only_while_somebody_watched():
    """A monitor that replaces another, or was stopped, sees the last step long after it."""
    record = beat(step_s=400.0, phase_s=90.0, beat_s=410.0)  # an item since: no progress in the step phase
    watch = new_watch(CONFIG)
    assert watch.observe(Observation(500.0, 500.0, (record,))).kind == OK
    assert watch.last_progress_s() == 400.0
    watch.observe(Observation(500.5, 500.5, (beat(step=101, count=101, step_s=500.2, phase_s=90.0, beat_s=500.2),)))
    assert watch.last_progress_s() == pytest.approx(500.2)
    later = beat(step=140, count=140, step_s=560.0, phase_s=90.0, beat_s=560.0)
    assert watch.observe(Observation(700.0, 700.0, (later,))).kind == OK, "the monitor was stopped for 200 s"
    assert watch.last_progress_s() == 560.0
    assert still(watch, 60, later, 700.15).kind == HUNG, "and from now on it is judged as ever"


@pytest.mark.parametrize("phase", ["import", "load", "cache_latents", "cache_text", "save", "sample", "end"])
def test_a_process_that_a_signal_has_stopped_is_stuck_in_any_phase_within_seconds(phase):
    watch, now, record = new_watch(CONFIG), 100.0, beat(phase=phase, count=0, intervals=(), beat_s=100.0)
    kinds = {}
    while now < 100 + 2 * CONFIG.watch.stopped_s:
        verdict = watch.observe(Observation(now, now, (record,), stopped=frozenset({record.pid})))
        kinds.setdefault(verdict.kind, now - 100)
        now += 1.0
    assert kinds[SUSPECT] == pytest.approx(CONFIG.watch.stopped_s / 2, abs=1.5)
    assert kinds[HUNG] == pytest.approx(CONFIG.watch.stopped_s, abs=1.5)
    assert verdict.phase == phase and "stopped by a signal" in verdict.evidence[0]


def test_a_process_that_was_stopped_and_goes_on_is_left_alone():
    watch, now, record = new_watch(CONFIG), 100.0, beat(phase="save", beat_s=100.0)
    for look in range(300):  # every other four seconds it is stopped
        stopped = frozenset({record.pid} if look % 8 < 4 else ())
        assert watch.observe(Observation(now, now, (record,), stopped=stopped)).kind in (OK, SUSPECT)
        now += 1.0


def test_the_rank_that_stands_still_is_named():
    watch, now, verdict = new_watch(CONFIG), 100.0, None
    for n in range(60):
        alive = beat(rank=0, pid=1, step=100 + n, count=100 + n, beat_s=now, intervals=(0.1,) * (100 + n))
        verdict = watch.observe(Observation(now, now, (alive, beat(rank=1, pid=2)), 0, ASLEEP))
        if verdict.kind == HUNG:
            break
        now += 0.15
    assert verdict.kind == HUNG and verdict.rank == 1


def group(now: float, step: int, phase: str, phase_s: float, **first) -> tuple[Beat, Beat]:
    """Rank 0 in this phase and rank 1 in its steps, both after `step` steps."""
    both = dict(world=2, step=step, count=step, intervals=(0.1,) * step)
    own = {"phase": phase, "phase_s": phase_s, "beat_s": now} | both | first
    return beat(rank=0, pid=1, **own), beat(rank=1, pid=2, **both)


def stepping(watch: Watch, now: float, steps: Iterable[int], **more) -> float:
    """Two ranks that complete these steps, 0.1 s each; the time at the end."""
    for step in steps:
        beats = [dataclasses.replace(b, phase="step", beat_s=now, **more) for b in group(now, step, "step", 100.0)]
        assert watch.observe(Observation(now, now, tuple(beats), 0, ASLEEP)).kind == OK
        now += 0.1
    return now


def test_the_other_ranks_wait_for_one_that_saves_however_short_a_step_is():
    watch = new_watch(CONFIG)
    now = stepping(watch, 100.0, range(1, 60))
    for step in (60, 70, 80):
        began = now
        while now < began + 40.0:  # T of a step is 1.2 s here, of a save 45 s
            beats = group(now, step - 1, "save", began, beat_s=began)
            assert watch.observe(Observation(now, now, beats, 0, ASLEEP)).kind in (OK, SUSPECT)
            now += 0.25
        back = group(now, step - 1, "step", now, beat_s=now)
        for _ in range(4):
            assert watch.observe(Observation(now, now, back, 0, ASLEEP)).kind in (OK, SUSPECT)
            now += 0.25
        # Rank 0 counts from the end of its save, rank 1 from its last step.
        late = [
            dataclasses.replace(
                b, step=step, count=step, beat_s=now, phase_s=back[0].phase_s, intervals=(*(0.1,) * (step - 1), took_s)
            )
            for b, took_s in zip(back, (0.9, 41.0), strict=True)
        ]
        assert watch.observe(Observation(now, now, tuple(late), 0, ASLEEP)).kind == OK
        now = stepping(watch, now + 0.1, range(step + 1, step + 10), phase_s=back[0].phase_s)
    assert watch.durations["step"].longest < 1.0, "the wait for the save is no step"
    start = now
    while watch.observe(Observation(now, now, tuple(group(now, 89, "step", 100.0)), 0, ASLEEP)).kind != HUNG:
        now += 0.25
        assert now - start < 5.0


def test_a_save_that_hangs_is_found_by_its_own_limit_and_not_by_that_of_the_ranks_that_wait():
    watch = new_watch(CONFIG)
    began = now = stepping(watch, 100.0, range(1, 60))
    while (
        said := watch.observe(Observation(now, now, group(now, 59, "save", began, beat_s=began), 0, ASLEEP))
    ).kind != HUNG:
        now += 1.0
        assert now - began < 2 * CONFIG.phases["save"].ceiling_s
    assert now - began >= CONFIG.phases["save"].floor_s and said.phase in ("save", "step")


def test_ranks_that_start_do_not_excuse_each_other():
    watch, now = new_watch(CONFIG), 100.0
    beats = tuple(beat(rank=n, pid=n + 1, phase="load", count=0, step=0, beat_s=100.0, intervals=()) for n in (0, 1))
    while watch.observe(Observation(now, now, beats, 0, ASLEEP)).kind != HUNG:
        now += 1.0
        assert now - 100.0 < CONFIG.phases["load"].ceiling_s + 5


def test_after_its_last_words_a_process_must_leave():
    watch = new_watch(CONFIG)
    verdict = still(watch, CONFIG.watch.exit_s + 1, beat(phase="end", outcome="done", beat_s=100.0), 100.0, poll_s=1.0)
    assert verdict.kind == HUNG and verdict.phase == "end"


def test_a_script_without_a_heartbeat_is_watched_by_its_log_at_five_minutes():
    watch, now = new_watch(CONFIG), 0.0
    while now < 3600:  # a line every four minutes
        assert watch.observe(Observation(now, now, (), int(now // 240), ASLEEP)).kind in (OK, SUSPECT)
        now += 1.0
    while watch.observe(Observation(now, now, (), 99999, ASLEEP)).kind != HUNG:
        now += 1.0
        assert now < 3600 + 302
    assert now >= 3600 + 300


def test_a_script_without_a_heartbeat_that_computes_in_silence_is_left_alone_for_longer_not_for_ever():
    watch, now, computes = new_watch(CONFIG), 0.0, Signals(busy=("it computes: 1.0 processor cores in use",))
    kinds = {}
    while now < 20 * CONFIG.watch.log_silence_s:
        kinds.setdefault(watch.observe(Observation(now, now, (), 7, computes)).kind, now)
        now += 1.0
    assert kinds[SLOW] == pytest.approx(CONFIG.watch.log_silence_s, abs=2)
    assert kinds[HUNG] == pytest.approx(SLOW_FACTOR * CONFIG.watch.log_silence_s, abs=2)


def test_a_save_counted_into_a_step_does_not_stretch_the_budget():
    watch = new_watch(CONFIG)
    watch.observe(Observation(100.0, 100.0, (beat(beat_s=100.0),)))
    watch.observe(Observation(130.0, 130.0, (beat(phase="save", phase_s=100.1, beat_s=100.1),)))
    after = beat(step=101, count=101, beat_s=160.0, phase_s=160.0, intervals=(0.05,) * 100 + (60.0,))
    watch.observe(Observation(160.1, 160.1, (after,)))
    assert watch._budget("step") < 2.0


def test_nothing_is_concluded_from_the_first_step():
    watch = new_watch(CONFIG)
    played = play(healthy("steady", 0.05, 0.02, 6), watch)
    assert played.caught is None
    assert watch.durations["step"].longest < 0.1, "the first step of a process (compilation) is no usual step"
    assert watch.durations["first_step"].seen == 1


# --- loops of items


@pytest.mark.parametrize(
    ("count", "each_s", "second", "second_each_s", "phase"),
    [
        pytest.param(40, 0.05, range(1, 41), 50.0, "cache_latents", id="validity, then encoding"),
        pytest.param(40, 0.05, range(1, 26), 50.0, "cache_latents", id="a smaller data set"),
        pytest.param(
            40, 0.05, range(1, 30), 120.0, "cache_latents", id="much slower: the ceiling, until its pace is known"
        ),
        pytest.param(1000, 0.01, range(1, 1001), 20.0, "cache_latents", id="longer than between_steps_s"),
        pytest.param(499, 0.1, [499], 400.0, "load", id="a model that loads after its download"),
    ],
)
def test_a_second_pass_over_the_items_is_progress(count, each_s, second, second_each_s, phase):
    """Fault 4: sd-scripts' validity pass is followed by the encoding pass; a further data set may be smaller."""
    watch = new_watch(CONFIG)
    verdicts, now = items(watch, 100.0, range(1, count + 1), each_s, phase=phase)
    more, _ = items(watch, now, second, second_each_s, phase=phase, phase_s=100.0)
    assert {v.kind for v in verdicts + more} <= {OK, SUSPECT}


def test_a_hundred_tiny_data_sets_are_progress():
    watch = new_watch(CONFIG)
    verdicts, _ = items(watch, 100.0, [1, 2] * (2 * MAX_LOOPS), 3.0)
    assert {v.kind for v in verdicts} == {OK}


@pytest.mark.parametrize("each_s", [1, 50])
def test_a_count_that_flips_between_two_values_ends_as_hung(each_s):
    watch, start, verdict, now = new_watch(CONFIG), 100, Verdict(OK), 100
    longest = max(CONFIG.watch.between_steps_s, 2 * MAX_LOOPS * each_s) + 3 * each_s
    while verdict.kind != HUNG and now - start <= longest:
        at = now - (now - start) % each_s
        done = 1 + (now - start) // each_s % 2
        record = beat(phase="cache_latents", phase_s=start, beat_s=at, done=done, count=0, step=0, intervals=())
        verdict = watch.observe(Observation(now, now, (record,)))
        now += 1
    assert verdict.kind == HUNG
    assert "none passed item 2" in verdict.evidence[0]
    assert now - start >= CONFIG.watch.between_steps_s


# --- seconds an item and seconds a phase


def visits(watch: Watch, start: float, count: int, each_s: float, phase: str = "sample") -> float:
    """So many visits of a phase without items, with a step between; the time at the end."""
    now = start
    for n in range(count):
        record = beat(phase=phase, phase_s=now, beat_s=now, count=100 + n, step=100 + n)
        watch.observe(Observation(now, now, (record,)))
        now += each_s
        watch.observe(Observation(now, now, (beat(phase_s=now, beat_s=now, count=101 + n, step=101 + n),)))
        now += 0.05
    return now


def test_long_visits_do_not_stretch_the_budget_of_an_item():
    """Fault 13: 250 s for a visit without items are not 250 s an item."""
    watch = new_watch(CONFIG)
    now = visits(watch, 100.0, 8, 250.0)
    _, now = items(watch, now, range(1, 11), 1.0, phase="sample")
    stuck, _ = items(watch, now, [10], 2 * CONFIG.phases["sample"].floor_s, phase="sample", phase_s=now - 10)
    hung = next(v for v in stuck if v.kind == HUNG)
    assert hung.budget_s == CONFIG.phases["sample"].floor_s


def test_short_items_do_not_shorten_the_budget_of_a_visit_without_items():
    """Fault 13: 0.1 s an item is not 0.1 s a visit."""
    watch, now = new_watch(CONFIG), 100.0
    for _ in range(3):
        _, now = items(watch, now, range(1, 21), 0.1, phase="sample")
        still(watch, 0.05, beat(phase_s=now, beat_s=now), now, poll_s=0.05)
        now += 1.0
    verdicts, _ = items(watch, now, [0], 250.0, phase="sample")
    assert {v.kind for v in verdicts} == {OK}


# --- the end of a rank and of the script


@pytest.mark.parametrize("outcome", ["done", "stopped", "failed", "deadline"])
@pytest.mark.parametrize("signals", [Signals(), ASLEEP, Signals(slow=("swapping",))])
def test_after_its_outcome_a_process_has_all_of_exit_s_to_exit(outcome, signals):
    """Fault 6: with evidence, the monitor killed it after half of that."""
    watch, now, record = new_watch(CONFIG), 100.0, beat(phase="end", outcome=outcome, beat_s=100.0)
    while watch.observe(Observation(now, now, (record,), 0, signals)).kind != HUNG:
        now += 0.5
    assert now - 100.0 == pytest.approx(CONFIG.watch.exit_s, abs=0.6)


@pytest.mark.parametrize(("outcome", "limit"), [("done", "script_idle_s"), ("running", "launcher_s"),
                                                ("failed", "launcher_s"), ("stopped", "launcher_s")])  # fmt: skip
def test_an_idle_script_without_ranks_is_over(outcome, limit):
    watch, now, record = new_watch(CONFIG), 100.0, beat(outcome=outcome, beat_s=100.0)
    watch.observe(Observation(now - 1, now - 1, (record,)))
    # A launcher that waits for its workers ten times a second uses 1 % of a core.
    while watch.observe(Observation(now, now, (record,), ranks_gone=True, activity=0.01 * now)).kind == OK:
        now += 0.25
    assert now - 100.0 == pytest.approx(getattr(CONFIG.watch, limit), abs=0.5)
    assert watch.observe(Observation(now, now, (record,), ranks_gone=True, activity=0.01 * now)).kind == OVER


@pytest.mark.parametrize("outcome", ["done", "running"])
@pytest.mark.parametrize("rate", [0.5, 2e6], ids=["a core imports", "cp writes"])
def test_a_script_that_works_without_ranks_is_left_alone_until_between_steps_s(outcome, rate):
    watch, now, record = new_watch(CONFIG), 100.0, beat(outcome=outcome, beat_s=100.0)
    while (verdict := watch.observe(Observation(now, now, (record,), ranks_gone=True, activity=rate * now))).kind == OK:
        now += 1.0
    assert verdict.kind == OVER
    assert now - 100.0 == pytest.approx(CONFIG.watch.between_steps_s, abs=3)


@pytest.mark.parametrize("burst", [0.2, 1.0, 1e5])
def test_a_script_that_works_for_a_moment_every_minute_is_left_alone(burst):
    watch, record, activity, now = new_watch(CONFIG), beat(outcome="done", beat_s=100.0), 0.0, 100.0
    for poll in range(4 * 1000):
        activity += burst if poll % 240 == 239 else 0.0
        assert watch.observe(Observation(now, now, (record,), ranks_gone=True, activity=activity)).kind == OK
        now += 0.25


def test_a_process_of_the_script_that_exits_is_activity():
    watch, record = new_watch(CONFIG), beat(outcome="running", beat_s=100.0)
    for now in range(100, 200):  # one of two helpers exits every two seconds: the sum shrinks
        activity = 10.0 if now % 4 < 2 else 3.0
        assert watch.observe(Observation(now, now, (record,), ranks_gone=True, activity=activity)).kind == OK


def test_a_new_rank_process_is_watched_from_its_start_and_with_its_own_pace():
    watch = new_watch(CONFIG)
    now = 100.0
    for n in range(1, 200):  # the first stage trains at 50 ms a step
        watch.observe(Observation(now, now, (beat(beat_s=now, count=n, step=n, intervals=(0.05,) * n),)))
        now += 0.05
    done = beat(outcome="done", phase="end", phase_s=now, beat_s=now, count=199, step=199, intervals=(0.05,) * 199)
    for _ in range(60):
        assert watch.observe(Observation(now, now, (done,), ranks_gone=True, activity=now)).kind == OK
        now += 1.0
    start = now
    for n in range(12):  # the second at 30 s a step
        record = beat(pid=8, beat_s=now, phase_s=start, count=n, step=n, intervals=(30.0,) * n)
        for _ in range(30):
            assert watch.observe(Observation(now, now, (record,), 0, ASLEEP)).kind in (OK, SUSPECT)
            now += 1.0
    verdict = still(watch, 2 * CONFIG.phases["step"].ceiling_s, record, now, poll_s=1.0)
    assert verdict.kind == HUNG and verdict.step == 11


def test_a_suspend_while_the_script_copies_is_no_idle_time():
    watch, record = new_watch(CONFIG), beat(outcome="running", beat_s=100.0)
    watch.observe(Observation(100.0, 100.0, (record,), ranks_gone=True))
    assert watch.observe(Observation(102.5, 102.5, (record,), ranks_gone=True)).kind == OK
    verdict = watch.observe(Observation(103.0, 9103.0, (record,), ranks_gone=True))
    assert verdict.kind == OK and "suspended" in verdict.reset
    assert watch.observe(Observation(105.0, 9105.0, (record,), ranks_gone=True)).kind == OK


def test_a_rank_that_is_done_and_gone_does_not_hang_the_others():
    watch, now = new_watch(CONFIG), 100.0
    done = beat(rank=1, pid=2, outcome="done", phase="end", beat_s=100.0)
    for n in range(300):
        alive = beat(rank=0, pid=1, step=100 + n, count=100 + n, beat_s=now, intervals=(1.0,) * (100 + n))
        verdict = watch.observe(Observation(now, now, (alive, done), 0, ASLEEP, gone=frozenset({2})))
        assert verdict.kind == OK
        now += 1.0
    assert watch.last_progress_s() == pytest.approx(now - 1.0)
    failed = dataclasses.replace(done, outcome="failed")
    for _ in range(int(CONFIG.watch.exit_s) + 3):
        verdict = watch.observe(Observation(now, now, (dataclasses.replace(alive, beat_s=now), failed), 0, Signals()))
        now += 1.0
    assert verdict.kind == HUNG and verdict.rank == 1
