"""The charts of a run: what is read of metrics.jsonl, and which points are sent."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ANY_VALUE
from ui_helpers import metrics_line as line
from ui_helpers import write_incident, write_run

from runs.metrics_lines import entries
from ui.run import charts, metrics, view


def losses(folder: Path) -> dict[int, float]:
    return view.with_metrics(folder, lambda found: found.losses())


def test_metrics_are_read_from_where_the_last_read_ended(data):
    folder = write_run(data)
    path = folder / "metrics.jsonl"
    assert losses(folder) == {}
    path.write_text("".join(line(s, 1 / s) for s in (1, 2, 4)) + '{"kind":"gpu"}\n{"kind":"step","st')
    assert list(losses(folder)) == [1, 2, 4]
    with path.open("a") as file:
        file.write('ep":5,"loss":0.25}\n')
    assert losses(folder) == {1: 1.0, 2: 0.5, 4: 0.25, 5: 0.25}
    revision = view.with_metrics(folder, lambda found: found.revision)
    assert view.with_metrics(folder, lambda found: found.revision) == revision  # nothing was added
    path.unlink()
    path.write_text(line(1, 5.0))
    os.utime(path)
    assert losses(folder) == {1: 5.0}


def test_another_server_gives_the_same_lines_the_same_revision(data):
    folder = write_run(data)
    path = folder / "metrics.jsonl"
    path.write_text("".join(line(s) for s in range(1, 9)))
    first = metrics.Metrics(path)
    seen = {first.update().revision}
    with path.open("a") as file:
        file.write(line(9))
    seen.add(first.update().revision)
    assert len(seen) == 2 and metrics.Metrics(path).update().revision in seen, "a page of the old server asks"
    with path.open("a") as file:
        file.write(line(10))
    assert metrics.Metrics(path).update().revision not in seen


def test_a_restart_replaces_the_steps_that_it_repeats(data):
    folder = write_run(data)
    first = [line(s, 1.0, 1, s) for s in range(1, 26)]
    second = [line(s, 2.0, 2, 60 + s) for s in range(21, 24)]
    (folder / "metrics.jsonl").write_text("".join(first + second))
    assert losses(folder) == {**dict.fromkeys(range(1, 21), 1.0), **dict.fromkeys(range(21, 24), 2.0)}
    with (folder / "metrics.jsonl").open("a") as file:  # stopped at a checkpoint, and continued: no step is repeated
        file.write("".join(line(s, 3.0, 3, 120 + s) for s in range(24, 27)))
    found = view.with_metrics(folder, lambda one: (list(one.steps["step"]), [r.step for r in one.restarts]))
    assert found == (list(range(1, 27)), [21, 24])


def test_a_long_history_is_read_in_parts(data, monkeypatch):
    monkeypatch.setattr(metrics, "READ_BYTES", 10_000)
    folder = write_run(data)
    (folder / "metrics.jsonl").write_text("".join(line(s) for s in range(1, 501)))
    shares = [view.with_metrics(folder, lambda found: found.share) for _ in range(20)]
    assert shares[0] < 0.5 and shares[-1] == 1.0 and shares == sorted(shares)
    assert len(losses(folder)) == 500


KEYS = ["kind", "t", "attempt", "step", "loss", "lr", "step_s", "gpu", "name", "memory_used", "memory_total"]
VALUES = ANY_VALUE | st.sampled_from(["step", "gpu", "2026-11-22T12:00:00.000Z", 1, 2, 3, 10**12])
RECORDS = st.dictionaries(st.sampled_from(KEYS), VALUES)


@given(st.lists(st.one_of(st.binary(max_size=60), RECORDS.map(lambda r: json.dumps(r).encode())), max_size=12))
def test_no_line_of_metrics_can_break_the_charts(tmp_path_factory, found):
    path = tmp_path_factory.mktemp("hostile") / "metrics.jsonl"
    path.write_bytes(line(1).encode() + b"\n".join(found) + b"\n")
    read = metrics.Metrics(path).update()
    steps = read.steps["step"].tolist()
    assert steps == sorted(set(steps)) and all(0 <= s <= metrics.MAX_STEP for s in steps)
    for axis in charts.AXES:
        answer = charts.lines_of(read, axis, None, None, 0, [])
        json.dumps(answer, allow_nan=False)


@given(st.binary(max_size=300))
def test_a_damaged_line_costs_only_itself(noise):
    good = [line(s).encode().strip() for s in (1, 2)]
    found = entries([good[0], noise.replace(b"\n", b""), good[1]])
    assert [one["step"] for one in found if one.get("loss") == 0.5] == [1, 2]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 50))
def test_points_keep_the_extremes_and_the_mean(values, buckets):
    x, y = np.arange(1.0, len(values) + 1), np.array(values)
    found = charts.points(x, y, 1.0, float(len(values)), buckets)
    assert len(found["x"]) <= max(buckets, min(buckets, len(values))) and found["x"] == sorted(found["x"])
    low, high = (found[key] or found["mean"] for key in ("low", "high"))
    near = lambda a, b: math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9)  # noqa: E731
    assert near(min(low), min(values)) and near(max(high), max(values))
    assert all(
        a <= m + 1e-3 * abs(m) and m <= b + 1e-3 * abs(m) + 1e-9
        for a, m, b in zip(low, found["mean"], high, strict=True)
    ) or any(abs(v) < 1e-3 for v in values)


def test_a_range_shows_more_of_the_line(data):
    folder = write_run(data, planned_steps=5000)
    (folder / "metrics.jsonl").write_text("".join(line(s, s / 1000, second=s / 10) for s in range(1, 3001)))
    everything = charts.chart_data({"run": folder.name})
    assert everything["all"] == [1.0, 5000.0] and everything["range"] == [1.0, 5000.0]
    loss = everything["lines"][0]
    assert loss["key"] == "loss" and len(loss["x"]) <= charts.BUCKETS and loss["high"][-1] == 3.0
    part = charts.chart_data({"run": folder.name, "from": 100, "to": 200})
    assert part["lines"][0]["x"] == list(range(100, 201)) and part["lines"][0]["low"] == []
    by_time = charts.chart_data({"run": folder.name, "axis": "time"})
    assert by_time["all"] == [0.0, pytest.approx(299.9)]
    rows = everything["table"].split("<tr>")[2:]
    assert len(rows) == charts.TABLE_ROWS and "<td>0 s</td><td>0.001</td>" in rows[0]


def test_restarts_and_incidents_are_marked_once(data):
    folder = write_run(data)
    text = [line(s, attempt=1, second=s) for s in range(1, 26)]
    text += [line(s, attempt=2, second=60 + s) for s in range(21, 30)]
    text += [line(s, attempt=3, second=120 + s) for s in range(30, 33)]
    (folder / "metrics.jsonl").write_text("".join(text))
    write_incident(folder, "0001", step=25, resumed_from=20)
    marks = charts.chart_data({"run": folder.name})["marks"]
    assert [(mark["x"], mark["incident"]) for mark in marks] == [(25.0, "0001"), (30.0, "")]
    assert marks[0]["label"] == "hung after step 25" and marks[1]["label"] == "continued at step 30"


def test_each_gpu_has_its_lines_on_both_axes(data):
    folder = write_run(data)
    gpu = {"kind": "gpu", "name": "Card", "utilization": 97, "memory_used": 8e9, "memory_total": 12e9, "power_w": 210.5}
    gpu["temperature"] = 64
    text = [line(s, second=s) for s in range(1, 100)]
    text += [json.dumps({**gpu, "gpu": g, "t": f"2026-11-22T12:00:{s:02d}Z"}) + "\n" for s in (10, 40) for g in (0, 1)]
    (folder / "metrics.jsonl").write_text("".join(text))
    lines = charts.chart_data({"run": folder.name})["lines"]
    shown = {(one["key"], one.get("name")): one for one in lines}
    assert shown[("memory_used", "1: Card")]["mean"] == [8.0, 8.0] and shown[("memory_used", "1: Card")]["top"] == 12.0
    assert shown[("power_w", "0: Card")]["x"] == [10.0, 40.0]
    # A restart repeats the steps from 31 on: what was measured meanwhile has no step.
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(line(s, attempt=2, second=200 + s) for s in range(31, 60))
    lines = charts.chart_data({"run": folder.name})["lines"]
    assert "power_w" not in {one["key"] for one in lines}  # one point is no line
    by_time = {one["key"]: one for one in charts.chart_data({"run": folder.name, "axis": "time"})["lines"]}
    assert by_time["temperature"]["x"] == [9.0, 39.0]
