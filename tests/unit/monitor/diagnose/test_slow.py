"""Which cause a slow run has, from readings at its usual pace and the slow one; what it says and changes."""

import dataclasses
import json
import os
from unittest.mock import Mock

import pytest
from monitor_evidence import beat
from monitor_helpers import ROOT, STATUS, events
from runs_helpers import spec

from monitor import gpu, supervisor
from monitor.cli import commands
from monitor.detect.probe import ProcessSample
from monitor.diagnose import slow
from monitor.resume import next_attempt
from monitor.state import Observation, Shutdown, State, Verdict
from runs import job, mitigate
from ui.run import cards
from ui.run.view import View

SERIES = json.loads((ROOT / "tests/support/data/slow_series.json").read_text(encoding="utf-8"))


def amounts(values: dict[str, float], seconds: float = 20.0) -> slow.Amounts:
    return {name: (value * seconds, seconds) for name, value in values.items()}


@pytest.mark.parametrize("row", SERIES, ids=[row["name"] for row in SERIES])
def test_a_recorded_series_is_named_with_its_figures_and_its_cure(row):
    found = slow.figures(amounts(row["slow"]), amounts(row["usual"]))
    cause = slow.match(found)
    assert cause["name"] == row["cause"]
    names = {"foreign_name": "blender (pid 7)", "busiest": "ffmpeg (pid 8)", "throttle": "too hot"}
    text = " ".join(slow.sentences(cause, {**found, "quota_cores": 0.5}, names).values())
    assert "{" not in text and " ?" not in text and row["says"] in text, text
    usual = slow.match(slow.figures(amounts(row["slow"]), amounts(row["slow"])))["name"]  # what was so before, too
    lasting = (slow.UNKNOWN, "swapping", "vram_spill")  # the last two are never right, however long they last
    assert not row["usual"] or usual in lasting


def test_only_a_spill_with_all_its_signs_is_named_without_a_usual_pace_and_an_unknown_figure_is_a_question_mark():
    named = [row["name"] for row in SERIES if slow.match(slow.figures(amounts(row["slow"]), {}), alone=True)]
    assert named == ["spill, with counters"]
    hot = next(row for row in slow.TABLE if row["name"] == "gpu_hot")
    assert "“too hot” at ? °C, 80% of" in slow.sentences(hot, {"hot": 0.8}, {"throttle": "too hot"})["explanation"]


def test_every_cause_has_a_series_and_its_row_in_the_documents():
    causes = {row["name"] for row in slow.TABLE}
    assert causes == {row["cause"] for row in SERIES}
    text = (ROOT / "docs" / "slow.md").read_text(encoding="utf-8")
    assert [name for name in causes if f"`{name}`" not in text] == []
    assert {change for row in slow.TABLE for change in row.get("ladder", [])} <= mitigate.MITIGATIONS.keys()


def reading(at_s: float, **gpu) -> slow.Reading:
    process = ProcessSample(7, 1.0, 1, "S", "python", at_s, 0)
    quotas = {"/a": (int(10 * at_s), int(4 * at_s))}
    counters = {"quotas": quotas, "busy_s": 2 * at_s, "waited_s": 0.5 * at_s}
    return slow.Reading(at_s, {(7, 1.0): process}, gpu=(gpu,), **counters)


def test_two_readings_give_shares_of_the_time_between_them():
    first = reading(10.0)
    throttle = "too hot, power limit"
    second = reading(14.0, memory_used=95, memory_total=100, pids=[7, 9], use={"9": 40}, throttle=throttle)
    found = slow.figures(slow.add([slow.between(first, second, [7])]), {})
    assert found["quota"] == pytest.approx(0.4) and found["loader"] == pytest.approx(0.5)
    assert (found["memory_share"], found["foreign"], found["foreign_use"]) == (0.95, 1.0, 40.0)
    assert (found["hot"], found["braked"]) == (1.0, 0.0)
    hidden = dataclasses.replace(second, gpu=({**second.gpu[0], "pids": [9]},))  # a container: numbers of the host
    assert slow.figures(slow.add([slow.between(first, hidden, [7])]), {})["foreign"] == 0


def test_the_program_that_has_used_most_processor_time_since_is_named():
    before, parent = slow.scan(), os.getppid()
    before[parent] = dataclasses.replace(before[parent], cpu_s=before[parent].cpu_s - 1e6)
    assert slow.busiest(before, []).endswith(f"(pid {parent})")
    assert slow.busiest({}, []) == "short-lived programs"


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_a_container_is_read_from_either_version_of_cgroups(tmp_path, monkeypatch, version):
    monkeypatch.setattr("guards.reading.CGROUPS", tmp_path)
    monkeypatch.setattr("guards.reading.PROC", tmp_path / "proc")
    inner = tmp_path / ("cpu/a/b" if version == 1 else "a/b")
    inner.mkdir(parents=True)
    (inner / "cpu.stat").write_text("usage_usec 5\nnr_periods 0\nnr_throttled 0\n")
    (inner.parent / "cpu.stat").write_text("nr_periods 100\nnr_throttled 80\nthrottled_usec 9\n")
    if version == 1:
        (inner.parent / "cpu.cfs_quota_us").write_text("50000\n")
        (inner.parent / "cpu.cfs_period_us").write_text("100000\n")
        (inner / "cpu.cfs_quota_us").write_text("-1\n")
        (inner / "cpu.cfs_period_us").write_text("100000\n")
    else:
        (inner.parent / "cpu.max").write_text("50000 100000\n")
        (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text("4:cpu,cpuacct:/a/b\n" if version == 1 else "0::/a/b\n")
    assert slow.quotas(7) == {str(inner.parent): (100, 80)}
    assert slow.quota_cores(7) == 0.5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"DedicatedUsage":100,"SharedUsage":9000},{"DedicatedUsage":12000,"SharedUsage":700}]', 700),
        ('#< CLIXML\n{"DedicatedUsage":12000,"SharedUsage":700}\n<Objs Version="1.1.0.1">', 700),
        ("", None),
        ("[]", None),
        ("Get-CimInstance : Invalid class", None),
    ],
)
def test_the_counter_of_shared_memory_is_that_of_the_gpu_with_the_most_of_its_own(text, found):
    assert gpu.shared_bytes(text) == found


@pytest.mark.parametrize(
    ("model", "backend", "tier", "batch", "says"),
    [
        ("z-image", "musubi", "20G", 2, "tier 16G instead of 20G"),
        ("sdxl", "sd-scripts", "12G", 2, "in fp8 as in tier 8G"),
        ("flux-dev", "sd-scripts", "20G", 2, "batch size 1 instead of 2"),
    ],
)
def test_less_memory_never_refuses_the_saved_states(tmp_path, model, backend, tier, batch, says):
    before = spec(model=model, backend=backend, tier=tier, batch_size=batch)
    after, sentence = mitigate.apply(before, "less_vram")
    assert says in sentence and mitigate.same_state(*(job.resolve(one, tmp_path) for one in (before, after)))


def test_the_page_and_the_status_name_the_cause_and_the_cure(tmp_path):
    known = {"title": "The disk is slow", "pace": "A step takes 3 s", "explanation": "It waited.", "advice": "Copy it."}
    status = {**STATUS, "slow": known, "monitor_pid": 1}
    text = "The disk is slow. A step takes 3 s. It waited. Copy it."
    assert text in commands.line(tmp_path, status) and text in cards.head(View(tmp_path, "x", status))


class Training:
    """A training on a clock of its own, whose loader keeps it waiting for a part of each step."""

    def __init__(self, run, attempt, monkeypatch):
        self.run, self.attempt, self.now_s, self.step, self.waited_s = run, attempt, 1000.0, 0, 0.0
        monkeypatch.setattr(slow, "read", lambda tree, pid, waited_s, gpus: slow.Reading(self.now_s, waited_s=waited_s))
        monkeypatch.setattr(slow, "busiest", lambda before, ours: "ffmpeg (pid 8)")
        run.slowdown.attach()

    def steps(self, count: int, seconds: float, waits: float = 0.0):
        """The changes that are asked for after so many steps."""
        asked = None
        for _ in range(count):
            self.now_s, self.step, self.waited_s = self.now_s + seconds, self.step + 1, self.waited_s + waits
            self.run.watch.new_steps = [seconds]
            now = dict(step=self.step, count=self.step, phase_s=1000.0, step_s=self.now_s, waited_s=self.waited_s)
            view = Observation(self.now_s, 0.0, (beat(**now, pid=2**22 + 1),))
            changes = self.run.slowdown.poll(self.attempt, view, self.run.watch, Verdict("ok"))
            asked = asked if changes is None else changes
        return asked

    def told(self, kind: str) -> list[dict]:
        return events(self.run.folder.folder, kind)


@pytest.fixture
def training(make_loop, trained, monkeypatch):
    run = make_loop()
    return Training(run, trained(run), monkeypatch)


def test_a_slow_time_is_reported_with_its_cause_once_and_its_end_with_what_it_cost(training):
    run, window_s = training.run, training.run.config.slow.window_s
    usual, many = int(window_s), int(window_s)
    assert training.steps(3 * usual, 1.0) is None and run.slow == {} and run.slowdown.text() == ""
    assert run.slowdown.known() == {"usual_s": 1.0, "changes": []}
    training.steps(many, 3.0, waits=2.5)
    (told,) = training.told("slowdown")
    assert told["cause"] == run.slow["cause"] == "loader_slow" and "instead of 1 s" in told["message"]
    assert (run.slow["step_s"], run.slow["usual_s"]) == (3.0, 1.0) and told["figures"]["loader"] > 0.5
    assert run.slowdown.text().startswith(run.slow["title"])
    training.steps(3 * usual, 1.0)
    (over,) = training.told("slowdown_over")
    assert run.slow == {} and over["message"].startswith("a step takes 1 s again; ") and over["cause"] == "loader_slow"
    assert over["lost_s"] >= 2 * window_s / 3 * 0.8


def test_one_change_is_tried_and_taken_back_unless_it_helps(training, monkeypatch):
    run, window_s = training.run, int(training.run.config.slow.window_s)
    change = {"name": "workers_2", "sentence": "two workers", "patch": {"flags": 1, "spec": {}}}
    asked = []
    monkeypatch.setitem(next(row for row in slow.TABLE if row["name"] == "loader_slow"), "ladder", ["workers_2"])
    monkeypatch.setattr(next_attempt, "next_change", lambda folder, ladder, *more: asked.append(ladder) or change)
    for allowed, helped in ((0, False), (1, False), (1, True)):
        run.config.slow.changes_count, run.state.pace, run.state.changes = allowed, {}, []
        run.slowdown.attach()
        training.steps(3 * window_s, 1.0)
        wanted = training.steps(window_s, 3.0, waits=2.5)
        assert wanted == ([change] if allowed else None) and len(asked) == allowed + helped
        if allowed:
            assert training.told("mitigated")[-1]["patch"] == {"flags": 1}
            run.state.changes, run.state.pace = wanted, run.slowdown.known()
            run.slowdown.attach()
            without = training.steps(window_s, 1.0 if helped else 3.0, waits=0.0 if helped else 2.5)
            assert without == (None if helped else [])
    taken_back = "the change is taken back: a step takes 3 s with it, 3 s without"
    assert [event["message"] for event in training.told("reverted")] == [taken_back]
    assert any("instead of 3 s since the change" in event["message"] for event in training.told("slowdown_over"))


def test_a_turn_asks_for_a_change_and_saves_the_run_for_it(training, monkeypatch):
    run, change = training.run, {"name": "workers_2", "sentence": "two workers", "patch": {}}
    monkeypatch.setattr(run.slowdown, "poll", lambda *asked: [change])
    run.attempt = training.attempt
    monkeypatch.setattr(run, "observe", lambda attempt: Observation(training.now_s, 0.0, tuple(attempt.beats)))
    assert supervisor.watching(run).state is State.STOPPING
    assert run.state.changes == [change] and run.state.shutdown == Shutdown("changed")
    ended, run.standby.close = run.standby.close, Mock()
    supervisor.shut_down(run, Shutdown("changed"))
    assert not run.standby.close.called, "the attempt after the restart has a standby, too"
    supervisor.shut_down(run, Shutdown("stopped"))
    assert run.standby.close.called
    run.standby.close = ended
