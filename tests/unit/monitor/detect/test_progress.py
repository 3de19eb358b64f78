"""Is a run stuck, or slow? The decisions alone, on a virtual clock: two healthy days, every hang, every clock trick."""

import dataclasses
from collections.abc import Callable, Iterable

import monitor_evidence
import pytest
from monitor_traces import ASLEEP, KINDS, hanging, healthy, play

from guards.heartbeat import Beat
from monitor import config
from monitor.detect import progress
from monitor.detect.progress import HUNG, MAX_LOOPS, OK, OVER, SLOW, SUSPECT, Durations, Watch
from monitor.state import Observation, Signals

CONFIG = config.load()
WATCH = CONFIG.watch
NONE = Signals()
See = Callable[[float], Observation]
# seconds a step -> simulated hours of each training stage, and how many of these the script has
HOURS = {0.05: (0.06, 2), 2.0: (1.2, 1), 8.0: (2.0, 1)}


def beat(**values) -> Beat:
    """A record; by default that of a run in the middle of its steps."""
    known = dict(pid=7, step=100, planned=1000, epoch=1, beat_s=100.0, phase_s=0.0, step_s=0.0, started_s=0.0)
    return monitor_evidence.beat(**{**known, "count": 100, "intervals": (0.05,) * 100, **values})


def stepped(step: int, each_s: float = 0.05, **values) -> Beat:
    """The record of a process that has completed so many steps."""
    return beat(**{"step": step, "count": step, "intervals": (each_s,) * step, **values})


def counting(phase: str = "cache_latents", **values) -> Beat:
    """The record of a process that has no step yet."""
    return stepped(0, phase=phase, **values)


def look(now: float, *beats: Beat, signals: Signals = NONE, **more) -> Observation:
    return Observation(now, now, beats, signals=signals, **more)


def asleep(now: float, *beats: Beat) -> Observation:
    return look(now, *beats, signals=ASLEEP)


def follow(watch: Watch, see: See, start: float = 100.0, seconds: float = 20_000.0, every_s: float = 1.0):
    """Observe until HUNG or OVER, or for so long: the last verdict, its second, and the first second of each kind."""
    kinds, now = dict[str, float](), start
    while True:
        verdict = watch.observe(see(now))
        kinds.setdefault(verdict.kind, now - start)
        if verdict.kind in (HUNG, OVER) or now - start >= seconds:
            return verdict, now - start, kinds
        now += every_s


def items(watch: Watch, start: float, counts: Iterable[int], each_s: float, phase: str = "cache_latents", **more):
    """Observe each count for `each_s` seconds, one a second; the verdicts and the time at the end."""
    verdicts, now, phase_s = [], start, more.pop("phase_s", start)
    for done in counts:
        record = counting(phase, phase_s=phase_s, beat_s=now, done=done, **more)
        for _ in range(max(1, round(each_s))):
            verdicts.append(watch.observe(asleep(now, record)))
            now += each_s / max(1, round(each_s))
    return verdicts, now


@pytest.mark.parametrize("usual_s", [0.05, 2.0, pytest.param(8.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_healthy_run_is_killed_even_when_all_evidence_says_asleep(kind, usual_s):
    hours, trainings = HOURS[usual_s]
    played = play(healthy(kind, usual_s, hours, 1, trainings), Watch(CONFIG, {}), ASLEEP)
    assert played.caught is None, f"killed after {played.hours:.1f} h: {played.caught}"
    assert played.hours > hours * trainings
    assert played.stages == 1 + trainings


@pytest.mark.parametrize(
    ("event", "after", "phase"),  # the event, how many of them are complete before the hang, the phase it is found in
    [
        pytest.param("import", 0, "import", id="the start"),
        pytest.param("load", 0, "load", id="loading"),
        pytest.param("cache_latents", 0, "cache_latents", id="the first pass of caching"),
        pytest.param("loop", 0, "cache_latents", id="the second pass of caching"),
        pytest.param("cache_text", 0, "cache_text", id="a later loop of the next stage"),
        pytest.param("end", 0, "end", id="an upload at the end of the first stage"),
        pytest.param("exit", 0, "end", id="the exit of the first stage"),
        pytest.param("gone", 0, "end", id="the script between two stages"),
        pytest.param("gone", 1, "end", id="the script between two stages, after it was active"),
        pytest.param("process", 0, "import", id="the import of the second stage"),
        pytest.param("step", 37, "step", id="a step"),
        pytest.param("save", 0, "save", id="a save"),
        pytest.param("sample", 0, "sample", id="a sample"),
        pytest.param("step", -5, "step", id="a step of the third stage"),
        pytest.param("gone", -1, "end", id="the copy of the LoRA"),
    ],
)
def test_every_hang_is_caught_in_its_own_phase(event, after, phase):
    if after < 0:  # counted from the end
        after += sum(name == event for name, *_ in healthy("heavy-tailed", 2.0, 1.1, 2, 2))
    played = play(hanging("heavy-tailed", 2.0, event, after, 2, 2), Watch(CONFIG, {}), Signals())
    assert played.caught is not None, "never caught"
    assert (played.caught.kind, played.caught.phase) == (OVER if event == "gone" else HUNG, phase)
    within_s = {"exit": WATCH.exit_s, "gone": WATCH.script_idle_s}
    assert played.detect_s <= within_s.get(event, 2 * max(CONFIG.phases[phase].ceiling_s, 3 * 90)) + 2


def test_an_untuned_toy_loop_of_50_ms_steps_is_declared_stuck_within_three_seconds():
    for seed in range(2):
        for limit_s, signals in ((1.7, ASLEEP), (3.1, Signals())):
            trace = hanging("steady", 0.05, "step", 40 + 300 * seed, seed)
            assert play(trace, Watch(CONFIG, {}), signals).detect_s <= limit_s


def test_what_a_run_has_learned_serves_the_next_attempt_from_its_first_step_on():
    first = Watch(CONFIG, {})
    assert play(healthy("steady", 0.05, 0.05, 5), first).caught is None
    assert first.step_s() == pytest.approx(0.05, rel=0.1)
    assert first.durations["step"].longest < 0.1, "the first step of a process (compilation) is no usual step"
    assert first.durations["first_step"].seen == 1
    played = play(hanging("steady", 0.05, "step", 3, 5), Watch(CONFIG, first.learned()))
    assert played.detect_s < 6
    for usual_s, after, least_s, most_s in ((0.05, 3, 120, 480), (14.0, 3, 350, 480), (0.05, 0, 880, 920)):
        new = play(hanging("steady", usual_s, "step", after, 5), Watch(CONFIG, {}))
        assert new.caught.step == after and least_s <= new.detect_s <= most_s, "its first steps are known at most"
    none_needed = config.Section(**{**vars(WATCH), "min_sample_count": 0})
    assert Durations().budget(CONFIG.phases["step"], none_needed) == CONFIG.phases["step"].ceiling_s


def test_the_budget_follows_the_longest_of_the_last_two_hundred():
    known = Durations()
    known.add([1.0] * 50)
    calm = known.budget(CONFIG.phases["step"], WATCH)
    known.add([30.0], disturbed=True)  # beside the imports of a standby attempt
    assert known.budget(CONFIG.phases["step"], WATCH) == calm
    known.add([30.0])
    assert known.budget(CONFIG.phases["step"], WATCH) == 5 * 30.0
    known.add([1.0] * 200)
    assert calm <= known.budget(CONFIG.phases["step"], WATCH) <= 2 * 30.0


@pytest.mark.parametrize(
    ("stalled_s", "signals", "expected"),
    [
        (4.9, ASLEEP, OK),
        (5.0, ASLEEP, SUSPECT),
        (9.9, ASLEEP, SUSPECT),
        (10.0, ASLEEP, HUNG),
        (19.9, Signals(), SUSPECT),
        (20.0, Signals(), HUNG),
        (20.0, Signals(slow=("swapping",)), SLOW),
        (79.9, Signals(stuck=("asleep",), slow=("swapping",)), SLOW),
        (80.0, Signals(slow=("swapping",)), HUNG),
        (20.0, Signals(busy=("it computes: 1.0 processor cores in use", "a GPU is at work")), HUNG),
    ],
)
def test_suspect_at_half_hung_at_the_budget_with_a_second_signal_else_at_twice(stalled_s, signals, expected):
    assert progress.decide(stalled_s, 10.0, 80.0, signals) == expected


def flips(each_s: int) -> See:
    """A count of items that changes between 1 and 2."""

    def see(now: float) -> Observation:
        at = now - (now - 100) % each_s
        return look(now, counting(phase_s=100, beat_s=at, done=1 + (now - 100) // each_s % 2))

    return see


BETWEEN = WATCH.between_steps_s
WITHOUT_PROGRESS = {  # what is seen, when it is a hang at the earliest and at the latest, what the evidence says
    "it only ticks": (lambda now: look(now, beat(beat_s=now)), 0, 6, ""),
    "items inside a step": (lambda now: look(now, beat(beat_s=now, done=int(now))), 0, 6, ""),
    "more items than announced": (
        lambda now: asleep(now, counting(done=int(now - 100), total=5, beat_s=now)), 0, 3000, ""),
    "phases that come and go without a step": (
        lambda now: look(now, beat(phase=("save", "step")[int(now) % 2], phase_s=now, beat_s=now)), BETWEEN, 20_000,
        "no step has completed"),
    "a count that flips every second": (flips(1), BETWEEN, BETWEEN + 3, "none passed item 2"),
    "a count that flips every 50 s": (flips(50), BETWEEN, 2 * MAX_LOOPS * 50 + 150, "none passed item 2"),
}  # fmt: skip


@pytest.mark.parametrize("what", WITHOUT_PROGRESS)
def test_no_progress_is(what):
    see, least_s, most_s, says = WITHOUT_PROGRESS[what]
    verdict, after_s, _ = follow(Watch(CONFIG, {}), see, seconds=most_s)
    assert verdict.kind == HUNG and after_s >= least_s and says in "".join(verdict.evidence)


def test_a_suspended_machine_is_not_a_hang():
    watch, asleep_s = Watch(CONFIG, {}), 8 * 3600.0
    assert follow(watch, lambda now: look(now, beat()), seconds=0.5, every_s=0.15)[0].kind == OK
    # The boot clock is eight hours ahead; the monotonic one stood still meanwhile.
    verdict = watch.observe(Observation(100.6, 100.6 + asleep_s, (beat(),)))
    assert verdict.kind == OK and "suspended" in verdict.reset
    verdict, after_s, _ = follow(watch, lambda now: Observation(now, now + asleep_s, (beat(),)), 100.7, 6.0, 0.15)
    assert verdict.kind == HUNG and after_s > 1.0, "a run that does not wake up is caught"


def test_time_is_lost_from_the_last_step_and_judged_only_while_somebody_watched():
    """A monitor that replaces another, or was stopped, sees the last step long after it."""
    watch = Watch(CONFIG, {})
    record = beat(step_s=400.0, phase_s=90.0, beat_s=410.0)  # an item since: no progress in the step phase
    assert watch.observe(look(500.0, record)).kind == OK
    assert watch.last_progress_s() == 400.0
    watch.observe(look(500.5, beat(step=101, count=101, step_s=500.2, phase_s=90.0, beat_s=500.2)))
    assert watch.last_progress_s() == pytest.approx(500.2)
    later = beat(step=140, count=140, step_s=560.0, phase_s=90.0, beat_s=560.0)
    assert watch.observe(look(700.0, later)).kind == OK, "the monitor was stopped for 200 s"
    assert watch.last_progress_s() == 560.0
    assert follow(watch, lambda now: look(now, later), 700.15, 60.0)[0].kind == HUNG, "and now it is judged as ever"


@pytest.mark.parametrize("phase", ["import", "load", "cache_latents", "cache_text", "save", "sample", "end"])
def test_a_process_that_a_signal_has_stopped_is_stuck_in_any_phase_within_seconds(phase):
    record = beat(phase=phase, count=0, intervals=())
    verdict, _, kinds = follow(Watch(CONFIG, {}), lambda now: look(now, record, stopped=frozenset({record.pid})))
    assert kinds[SUSPECT] == pytest.approx(WATCH.stopped_s / 2, abs=1.5)
    assert kinds[HUNG] == pytest.approx(WATCH.stopped_s, abs=1.5)
    assert verdict.phase == phase and "stopped by a signal" in verdict.evidence[0]


def test_a_process_that_was_stopped_and_goes_on_is_left_alone():
    record = beat(phase="save")

    def see(now):  # for four of eight seconds it is stopped
        return look(now, record, stopped=frozenset({record.pid} if now % 8 < 4 else ()))

    assert HUNG not in follow(Watch(CONFIG, {}), see, seconds=300)[2]


def test_the_rank_that_stands_still_is_named_and_two_that_start_do_not_excuse_each_other():
    still = beat(rank=1, pid=2)
    verdict, *_ = follow(Watch(CONFIG, {}), lambda now: asleep(now, stepped(int(now), pid=1, beat_s=now), still))
    assert verdict.kind == HUNG and verdict.rank == 1
    beats = [counting("load", rank=n, pid=n + 1) for n in (0, 1)]
    hung, *_ = follow(Watch(CONFIG, {}), lambda now: asleep(now, *beats), seconds=CONFIG.phases["load"].ceiling_s + 5)
    assert hung.kind == HUNG


def group(now: float, step: int, phase: str, phase_s: float, **first) -> tuple[Beat, Beat]:
    """Rank 0 in this phase and rank 1 in its steps, both after `step` steps."""
    own = {"phase": phase, "phase_s": phase_s, "beat_s": now} | first
    return stepped(step, 0.1, world=2, rank=0, pid=1, **own), stepped(step, 0.1, world=2, rank=1, pid=2, beat_s=0.0)


def stepping(watch: Watch, now: float, steps: Iterable[int], **more) -> float:
    """Two ranks that complete these steps, 0.1 s each; the time at the end."""
    for step in steps:
        beats = [dataclasses.replace(b, beat_s=now, **more) for b in group(now, step, "step", 100.0)]
        assert watch.observe(asleep(now, *beats)).kind == OK
        now += 0.1
    return now


def test_the_other_ranks_wait_for_one_that_saves_however_short_a_step_is():
    watch = Watch(CONFIG, {})
    now = stepping(watch, 100.0, range(1, 60))
    for step in (60, 70, 80):
        saving = group(now, step - 1, "save", now)
        _, took_s, kinds = follow(watch, lambda t, b=saving: asleep(t, *b), now, 40.0, 0.25)
        assert kinds.keys() <= {OK, SUSPECT}, "T of a step is 1.2 s here, of a save 45 s"
        now += took_s
        back = group(now, step - 1, "step", now)
        assert follow(watch, lambda t, b=back: asleep(t, *b), now, 0.75, 0.25)[2].keys() <= {OK, SUSPECT}
        now += 1.0
        # Rank 0 counts from the end of its save, rank 1 from its last step.
        known = {"step": step, "count": step, "beat_s": now, "phase_s": back[0].phase_s}
        took = zip(back, (0.9, 41.0), strict=True)
        late = [dataclasses.replace(b, **known, intervals=(*b.intervals, step_s)) for b, step_s in took]
        assert watch.observe(asleep(now, *late)).kind == OK
        now = stepping(watch, now + 0.1, range(step + 1, step + 10), phase_s=back[0].phase_s)
    assert watch.durations["step"].longest < 1.0, "the wait for the save is no step"
    hung, *_ = follow(watch, lambda t: asleep(t, *group(t, 89, "step", 100.0)), now, 5.0, 0.25)
    assert hung.kind == HUNG


def test_a_save_that_hangs_is_found_by_its_own_limit_and_not_by_that_of_the_ranks_that_wait():
    watch = Watch(CONFIG, {})
    began = stepping(watch, 100.0, range(1, 60))
    hung, after_s, _ = follow(watch, lambda now: asleep(now, *group(began, 59, "save", began)), began)
    assert CONFIG.phases["save"].floor_s <= after_s < 2 * CONFIG.phases["save"].ceiling_s
    assert hung.kind == HUNG and hung.phase in ("save", "step")


def test_a_rank_that_is_done_and_gone_does_not_hang_the_others():
    watch, done = Watch(CONFIG, {}), beat(rank=1, pid=2, outcome="done", phase="end")

    def see(now, other=done, gone=(2,)):
        alive = stepped(int(now), 1.0, pid=1, beat_s=now)
        return look(now, alive, other, signals=ASLEEP, dead=frozenset(gone))

    assert follow(watch, see, seconds=300)[2].keys() == {OK}
    assert watch.last_progress_s() == pytest.approx(400.0)
    for other, gone in ((dataclasses.replace(done, outcome="failed"), (2,)), (done, ())):
        hung, *_ = follow(Watch(CONFIG, {}), lambda now, o=other, g=gone: see(now, o, g), seconds=WATCH.exit_s + 3)
        assert hung.kind == HUNG and hung.rank == 1, "it did not succeed, or has not exited"


def test_a_script_without_a_heartbeat_is_watched_by_its_log():
    watch, quiet_s = Watch(CONFIG, {}), WATCH.log_silence_s
    lines = follow(watch, lambda now: look(now, signals=ASLEEP, log_bytes=int(now // 240)), 0.0, 3600)
    assert lines[2].keys() <= {OK, SUSPECT}, "a line every four minutes"
    assert follow(watch, lambda now: look(now, signals=ASLEEP, log_bytes=99), 3600.0)[2][HUNG] == quiet_s
    computes = Signals(busy=("it computes: 1.0 processor cores in use",))
    _, _, kinds = follow(Watch(CONFIG, {}), lambda now: look(now, signals=computes, log_bytes=7))
    assert kinds[SLOW] == pytest.approx(quiet_s, abs=2), "one that computes in silence is left alone for longer"
    assert kinds[HUNG] == pytest.approx(progress.SLOW_FACTOR * quiet_s, abs=2), "but not for ever"


@pytest.mark.parametrize(
    ("count", "each_s", "second", "second_each_s", "phase"),
    [
        pytest.param(40, 0.05, range(1, 26), 50.0, "cache_latents", id="a smaller data set"),
        pytest.param(40, 0.05, range(1, 30), 120.0, "cache_latents", id="the ceiling, until the pace is known"),
        pytest.param(1000, 0.01, range(1, 1001), 20.0, "cache_latents", id="longer than between_steps_s"),
        pytest.param(499, 0.1, [499], 400.0, "load", id="a model that loads after its download"),
        pytest.param(2, 3.0, [1, 2] * (2 * MAX_LOOPS), 3.0, "cache_latents", id="tiny data sets, and many"),
    ],
)
def test_a_second_pass_over_the_items_is_progress(count, each_s, second, second_each_s, phase):
    """Fault 4: sd-scripts' validity pass is followed by the encoding pass; a further data set may be smaller."""
    watch = Watch(CONFIG, {})
    verdicts, now = items(watch, 100.0, range(1, count + 1), each_s, phase)
    more, _ = items(watch, now, second, second_each_s, phase, phase_s=100.0)
    assert {v.kind for v in verdicts + more} <= {OK, SUSPECT}


def test_long_visits_do_not_stretch_the_budget_of_an_item():
    """Fault 13: 250 s for a visit without items are not 250 s an item."""
    watch, now = Watch(CONFIG, {}), 100.0
    for step in range(100, 108):
        watch.observe(look(now, beat(phase="sample", phase_s=now, beat_s=now, count=step, step=step)))
        now += 250.0
        watch.observe(look(now, beat(phase_s=now, beat_s=now, count=step + 1, step=step + 1)))
        now += 0.05
    _, now = items(watch, now, range(1, 11), 1.0, "sample")
    stuck, _ = items(watch, now, [10], 2 * CONFIG.phases["sample"].floor_s, "sample", phase_s=now - 10)
    hung = next(v for v in stuck if v.kind == HUNG)
    assert hung.budget_s == CONFIG.phases["sample"].floor_s


def test_short_items_do_not_shorten_the_budget_of_a_visit_without_items():
    """Fault 13: 0.1 s an item is not 0.1 s a visit."""
    watch, now = Watch(CONFIG, {}), 100.0
    for _ in range(3):
        _, now = items(watch, now, range(1, 21), 0.1, "sample")
        watch.observe(look(now, beat(phase_s=now, beat_s=now)))
        now += 1.0
    verdicts, _ = items(watch, now, [0], 250.0, "sample")
    assert {v.kind for v in verdicts} == {OK}


def test_a_save_counted_into_a_step_does_not_stretch_the_budget():
    watch = Watch(CONFIG, {})
    watch.observe(look(100.0, beat()))
    watch.observe(look(130.0, beat(phase="save", phase_s=100.1, beat_s=100.1)))
    after = beat(step=101, count=101, beat_s=160.0, phase_s=160.0, intervals=(0.05,) * 100 + (60.0,))
    watch.observe(look(160.1, after))
    assert watch._budget("step") < 2.0


def script(outcome: str, activity: Callable[[float], float]) -> See:
    """A script whose ranks are gone, after this outcome, and whose processes have been this active."""
    record = beat(outcome=outcome)
    return lambda now: look(now, record, ranks_gone=True, activity=activity(now))


@pytest.mark.parametrize("outcome", ["done", "stopped", "failed", "deadline"])
@pytest.mark.parametrize("signals", [Signals(), ASLEEP, Signals(slow=("swapping",))])
def test_after_its_outcome_a_process_has_all_of_exit_s_to_exit(outcome, signals):
    """Fault 6: with evidence, the monitor killed it after half of that."""
    record = beat(phase="end", outcome=outcome)
    verdict, after_s, _ = follow(Watch(CONFIG, {}), lambda now: look(now, record, signals=signals))
    assert (verdict.kind, verdict.phase, after_s) == (HUNG, "end", pytest.approx(WATCH.exit_s, abs=1.1))


@pytest.mark.parametrize(
    ("outcome", "limit"),
    [("done", "script_idle_s"), ("running", "launcher_s"), ("failed", "launcher_s"), ("stopped", "launcher_s")],
)
def test_an_idle_script_without_ranks_is_over(outcome, limit):
    watch, see = Watch(CONFIG, {}), script(outcome, lambda now: 7.0)
    watch.observe(look(99.0, beat(outcome=outcome)))
    verdict, after_s, _ = follow(watch, see, every_s=0.25)
    assert (verdict.kind, after_s) == (OVER, pytest.approx(getattr(WATCH, limit), abs=0.5))
    assert watch.observe(see(100.0 + after_s)).kind == OVER


@pytest.mark.parametrize(("outcome", "pause_s"), [("done", 1), ("done", 60), ("running", 1)])
def test_a_script_that_works_now_and_then_without_ranks_is_left_alone_until_between_steps_s(outcome, pause_s):
    verdict, after_s, _ = follow(Watch(CONFIG, {}), script(outcome, lambda now: now // pause_s))
    assert (verdict.kind, after_s) == (OVER, pytest.approx(WATCH.between_steps_s, abs=3))


def test_a_new_rank_process_is_watched_from_its_start_and_with_its_own_pace():
    watch, fast_s = Watch(CONFIG, {}), 0.05
    follow(watch, lambda now: look(now, stepped(int((now - 100) / fast_s), beat_s=now)), 100.0, 10.0, fast_s)
    done = stepped(200, outcome="done", phase="end", phase_s=110.0, beat_s=110.0)
    assert follow(watch, lambda now: look(now, done, ranks_gone=True, activity=now), 110.0, 60.0)[2].keys() == {OK}

    def slower(now):  # the second stage takes 30 s a step, and hangs in the twelfth
        done = min(11, int(now - 171) // 30)
        return asleep(now, stepped(done, 30.0, pid=8, beat_s=171.0 + 30 * done, phase_s=171.0))

    assert follow(watch, slower, 171.0, 360.0)[2].keys() <= {OK, SUSPECT}
    verdict, *_ = follow(watch, slower, 532.0, 2 * CONFIG.phases["step"].ceiling_s)
    assert verdict.kind == HUNG and verdict.step == 11


def test_a_suspend_while_the_script_copies_is_no_idle_time():
    watch, see = Watch(CONFIG, {}), script("running", lambda now: 0.0)
    assert follow(watch, see, 100.0, 2.5, 2.5)[0].kind == OK
    later = [dataclasses.replace(see(now), boot_s=now + 9000.0) for now in (103.0, 105.0)]
    verdict = watch.observe(later[0])
    assert verdict.kind == OK and "suspended" in verdict.reset
    assert watch.observe(later[1]).kind == OK
