"""Which cause a slow run has, from readings at its usual pace and at the slow one; what it says, and what it would change."""

import dataclasses
import json

import pytest
from monitor_helpers import ROOT
from runs_helpers import spec

from guards import heartbeat, memory
from monitor import gpu
from monitor.cli import commands
from monitor.detect.probe import ProcessSample
from monitor.diagnose import slow
from runs import job, mitigate
from ui.run import cards
from ui.run.view import View

SERIES = json.loads((ROOT / "tests/support/data/slow_series.json").read_text(encoding="utf-8"))
USUAL = [row for row in SERIES if row["usual"]]


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


@pytest.mark.parametrize("row", USUAL, ids=[row["name"] for row in USUAL])
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


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_a_container_is_read_from_either_version_of_cgroups(tmp_path, monkeypatch, version):
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
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
        ('{"DedicatedUsage":12000,"SharedUsage":700}', 700),
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
