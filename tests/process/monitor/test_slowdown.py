"""A slow run: when its steps count as slow, which cause is named, and what one real monitor says about it."""

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_helpers import ROOT, environment, events, finish, limits_file, monitor, status, toy_run, wait_for
from monitor_traces import KINDS, step_times
from runs_helpers import spec

import runs
from benchmarks import toy_loop
from benchmarks.goodput_contenders import ours
from guards import heartbeat
from monitor.cli import commands
from monitor.detect.pace import MIN_STEPS, OVER, SLOW, Pace
from monitor.detect.probe import ProcessSample, Sample
from monitor.diagnose import slow
from monitor.gpu import nvml
from runs import job, mitigate
from runs.sanity import judge
from ui.run import cards
from ui.run.view import View

WINDOW_S = 20.0


def said(pace: Pace, steps) -> list[str]:
    """What the pace says to steps that are seen one by one."""
    return [word for step_s in steps if (word := pace.observe([step_s]))]


@pytest.mark.parametrize("usual_s", [0.5, 2.0, 14.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_its_ordinary_steps_is_never_slow(kind, usual_s):
    for seed in range(2):
        times = step_times(kind, usual_s, random.Random(seed))
        assert said(Pace(WINDOW_S), (next(times) for _ in range(3000))) == [], seed


@settings(max_examples=400)
@given(
    usual_s=st.floats(0.2, 20.0),
    jitter=st.floats(0.0, 0.3),
    share=st.floats(0.0, 0.5),
    larger=st.floats(1.0, 8.0),
    epoch=st.integers(1, 40),
    epoch_s=st.floats(0.0, 60.0),
    seed=st.integers(0, 1 << 20),
)
def test_epochs_and_images_of_two_sizes_are_not_slow(usual_s, jitter, share, larger, epoch, epoch_s, seed):
    rng = random.Random(seed)
    if epoch <= 2:  # where most steps begin an epoch, these are the usual ones
        epoch_s = min(epoch_s, usual_s)
    steps = []
    for number in range(300):
        step_s = usual_s * (1 + jitter * rng.random()) * (larger if rng.random() < share else 1)
        steps.append(step_s + (epoch_s if number % epoch == 0 else 0))
    assert said(Pace(WINDOW_S), steps) == []


@settings(max_examples=400)
@given(
    usual_s=st.floats(0.2, 20.0),
    jitter=st.floats(0.0, 0.3),
    factor=st.floats(3.0, 150.0),
    seed=st.integers(0, 1 << 20),
)
def test_steps_that_take_longer_are_slow_within_two_windows_and_no_longer_once_they_are_back(
    usual_s, jitter, factor, seed
):
    rng = random.Random(seed)

    def steps(count, times=1.0):
        return [usual_s * times * (1 + jitter * rng.random()) for _ in range(count)]

    pace = Pace(WINDOW_S)
    assert said(pace, steps(40 + int(40 / usual_s))) == []
    slow_s, passed_s, count = usual_s * factor, 0.0, 0
    while not pace.slow:
        step_s = steps(1, factor)[0]
        passed_s, count = passed_s + step_s, count + 1
        words = said(pace, [step_s])
        assert passed_s <= 2 * WINDOW_S + MIN_STEPS * slow_s * 1.3, "too late"
    assert words == [SLOW] and count >= 3
    assert pace.usual_s == pytest.approx(usual_s, rel=0.35), "slow steps do not become the usual ones"
    assert said(pace, steps(500, factor)) == []
    assert said(pace, steps(40 + int(40 / usual_s))) == [OVER]
    assert pace.lost_s >= 500 * (slow_s - 1.31 * usual_s)


def test_a_speed_that_falls_slowly_is_noticed():
    pace = Pace(WINDOW_S)
    assert said(pace, [1 + number / 2000 for number in range(8000)]) == [SLOW]


def test_one_long_step_under_way_is_not_slow_and_the_third_very_long_one_is():
    pace = Pace(WINDOW_S)
    said(pace, [2.0] * 60)
    assert pace.observe([], 3600.0) == ""  # a suspended laptop, a stopped process
    assert pace.observe([277.0, 277.0], 5.0) == ""
    assert pace.observe([], 20.0) == SLOW
    assert pace.now_s(20.0) == 277.0, "what is reported is a slow step, not one of the usual ones before it"


def test_from_a_rehearsal_three_times_its_step_is_slow_until_the_run_has_its_own_pace():
    assert said(Pace(WINDOW_S, 2.0), [5.0] * 40) == []
    assert said(Pace(WINDOW_S, 2.0), [7.0] * 10) == [SLOW]


# ---- causes ----

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


@pytest.mark.parametrize(
    "row", [row for row in SERIES if row["usual"]], ids=[row["name"] for row in SERIES if row["usual"]]
)
def test_what_was_so_at_the_usual_pace_too_explains_nothing(row):
    found = slow.figures(amounts(row["slow"]), amounts(row["slow"]))
    cause = slow.match(found)["name"]
    assert cause in (slow.UNKNOWN, "swapping", "vram_spill"), "these two are never right, however long they last"


def test_only_a_spill_with_all_its_signs_is_named_without_a_usual_pace():
    named = [row["name"] for row in SERIES if slow.match(slow.figures(amounts(row["slow"]), {}), alone=True)]
    assert named == ["spill, with counters"]


def test_every_cause_has_a_series_and_its_row_in_the_documents():
    causes = {row["name"] for row in slow.TABLE}
    assert causes == {row["cause"] for row in SERIES}
    text = (Path(__file__).parents[1] / "docs" / "slow.md").read_text(encoding="utf-8")
    assert [name for name in causes if f"`{name}`" not in text] == []
    assert {change for row in slow.TABLE for change in row.get("ladder", [])} <= mitigate.MITIGATIONS.keys()


def reading(at_s: float, **gpu) -> slow.Reading:
    process = {(7, 1.0): ProcessSample("S", "python", at_s, 0)}
    return slow.Reading(
        at_s, Sample(at_s, process), {"/a": (int(10 * at_s), int(4 * at_s))}, 2 * at_s, 0.5 * at_s, (gpu,)
    )


def test_two_readings_give_shares_of_the_time_between_them():
    first = reading(10.0)
    second = reading(
        14.0, memory_used=95, memory_total=100, pids=[7, 9], use={"9": 40}, throttle="too hot, power limit"
    )
    found = slow.figures(slow.add([slow.between(first, second, [7])]), {})
    assert found["quota"] == pytest.approx(0.4) and found["loader"] == pytest.approx(0.5)
    assert (found["memory_share"], found["foreign"], found["foreign_use"], found["hot"]) == (0.95, 1.0, 40.0, 1.0)
    hidden = dataclasses.replace(second, gpus=({**second.gpus[0], "pids": [9]},))  # a container: numbers of the host
    assert slow.figures(slow.add([slow.between(first, hidden, [7])]), {})["foreign"] == 0


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_a_container_is_read_from_either_version_of_cgroups(tmp_path, monkeypatch, version):
    monkeypatch.setattr(slow, "CGROUPS", tmp_path)
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
    real = slow._text
    line = "4:cpu,cpuacct:/a/b\n" if version == 1 else "0::/a/b\n"
    monkeypatch.setattr(slow, "_text", lambda path: line if path.name == "cgroup" else real(path))
    assert slow.quotas(7) == {str(inner.parent): (100, 80)}
    assert slow.quota_cores(7) == 0.5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"DedicatedUsage":100,"SharedUsage":9000},{"DedicatedUsage":12000,"SharedUsage":700}]', 700),
        ('{"DedicatedUsage":12000,"SharedUsage":700}', 700),
        ("", None),
        ("[]", None),
        ("Get-CimInstance : Invalid class", None),
    ],
)
def test_the_counter_of_shared_memory_is_that_of_the_gpu_with_the_most_of_its_own(text, found):
    assert nvml.shared_bytes(text) == found


# ---- before the run, and one change ----


def test_the_form_warns_when_the_estimate_comes_within_a_tenth_of_the_free_memory():
    from tests.unit.runs.test_sanity import RTX_4090

    made = spec(tier="20G")
    findings_by_free = [judge(made, 20, dataclasses.replace(RTX_4090, vram_free_gb=free)) for free in (24.0, 15.0)]
    assert [any("free now" in finding.message for finding in findings) for findings in findings_by_free] == [
        False,
        True,
    ]


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


# ---- what is shown ----

STATUS = {
    "name": "x", "state": "running", "phase": "step", "step": 5, "planned_steps": 9, "restarts": 0, "message": "", "alive": True,
    "slow": {"title": "The disk is slow", "pace": "A step takes 3 s instead of 1 s", "explanation": "It waited.", "advice": "Copy it."},
}  # fmt: skip


def test_the_page_and_the_status_name_the_cause_and_the_cure(tmp_path):
    text = "The disk is slow. A step takes 3 s instead of 1 s. It waited. Copy it."
    assert text in commands.line(tmp_path, STATUS)
    view = View(tmp_path, "x", {**STATUS, "monitor_pid": 1})
    assert text in cards.head(view)


def test_the_time_that_a_training_waits_for_its_loader_is_in_its_heartbeat(tmp_path):
    beat = heartbeat.Heartbeat(heartbeat.path_of(tmp_path, 0))
    beat.waited(1.5)
    beat.waited(0.25)
    assert heartbeat.read(heartbeat.path_of(tmp_path, 0)).waited_s == 1.75


LOADER = """
def fault(step):
    load_s = 0.6 if 60 <= step < 85 else 0.0
    time.sleep(load_s)
    hb.waited(load_s)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the toy is a shell script")
def test_a_real_run_reports_a_slow_loader_goes_on_and_reports_its_end(tmp_path):
    folder = toy_run(tmp_path / "toy", LOADER, steps=150, pace=0.1, every=500)
    limits = limits_file(folder, "[slow]\nwindow_s = 4\n")
    process = monitor(folder, HANGPROOF_LIMITS=str(limits))
    wait_for(lambda: events(folder, "slowdown"), 60, "a slowdown")
    event, shown = events(folder, "slowdown")[0], status(folder)["slow"]
    code, _, said_there = finish(process, 120)
    assert code == 0, said_there
    assert event["cause"] == shown["cause"] == "loader_slow" and "next batch" in event["message"], event
    (over,) = events(folder, "slowdown_over")
    assert over["lost_s"] > 5 and not events(folder, "restarted")
    assert status(folder)["slow"] is None


SPILL = {"used_gib": 23.8, "utilization": 100, "power_w": 55, "limit_w": 320}  # of 24 GiB


@pytest.mark.skipif(sys.platform == "win32", reason="the toy is a shell script")
@pytest.mark.parametrize(("slow_attempts", "kept"), [(1, True), (2, False)])
def test_one_change_is_made_where_it_is_allowed_and_taken_back_where_it_does_not_help(tmp_path, slow_attempts, kept):
    job = ours(tmp_path, steps=180, every=40, limits="[slow]\nwindow_s = 4\nchanges_count = 1\n")
    batch = (job.folder / "run.toml").read_text().replace("batch_size = 1", "batch_size = 2")
    (job.folder / "run.toml").write_text(batch if "batch_size = 2" in batch else f"batch_size = 2\n{batch}")
    runs.render(job.folder)
    values = tmp_path / "gpu.json"
    values.write_text(json.dumps(SPILL))
    shims = ROOT / "benchmarks" / "shims" / "nvml"
    env = environment(
        job.folder, TOY_RUN="slow", TOY_LEDGER=str(tmp_path / "ledger"), TOY_STEP_S="0.1", **job.environment
    )
    env |= {"PYTHONPATH": f"{shims}:{ROOT / 'tests/support'}", "HANGPROOF_INJECT": "slow_steps:fire"}
    env |= {"TEST_SLOW": f"70 0.8 {slow_attempts}", "HANGPROOF_GPUS": "0", "HANGPROOF_NEEDS_GPU": "0"}
    env |= {"FAULTS_NVML_VALUES": str(values), "FAULTS_NVML_WSL": "1"}
    done = subprocess.run(job.command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert events(job.folder, "slowdown")[0]["cause"] == "vram_spill"
    assert len(events(job.folder, "mitigated")) == 1, "once"
    assert len(events(job.folder, "reverted")) == (not kept)
    assert bool(status(job.folder)["changes"]) == kept
    assert status(job.folder)["attempt"] == (2 if kept else 3) and status(job.folder)["restarts"] == 0
    assert not events(job.folder, "hang") and not events(job.folder, "crash")
    assert (job.folder / "toy.safetensors").read_bytes() == toy_loop.expected(180)
