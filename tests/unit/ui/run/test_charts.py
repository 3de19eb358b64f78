"""The charts of a run: what is read of metrics.jsonl, and which points are sent."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from ui_helpers import metrics_line as line, write_incident, write_run

from ui.run import charts, view


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 50))
def test_points_keep_the_extremes_and_the_mean(values, buckets):
    x, y = np.arange(1.0, len(values) + 1), np.array(values)
    found = charts.points(x, y, buckets)
    assert len(found["x"]) <= buckets and found["x"] == sorted(found["x"])
    low, high = (found[key] or found["mean"] for key in ("low", "high"))
    near = lambda a, b: math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9)  # noqa: E731
    assert near(min(low), min(values)) and near(max(high), max(values))
    rows = zip(low, found["mean"], high, strict=True)
    inside = all(a <= m + 1e-3 * abs(m) and m <= b + 1e-3 * abs(m) + 1e-9 for a, m, b in rows)
    assert inside or any(abs(v) < 1e-3 for v in values)


@pytest.fixture
def shown(data):
    """The value of a run's charts after these lines were written."""

    def show(folder, text: list[str]) -> dict:
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(text)
        return charts.value(view.read(folder))

    return show


def test_a_long_run_has_few_points(data, shown):
    folder = write_run(data, planned_steps=5000)
    found = shown(folder, [line(s, s / 1000, second=s / 10) for s in range(1, 3001)])
    assert found["all"] == [1.0, 5000.0] and found["data"] == [1.0, 3000.0]
    loss = found["lines"][0]
    assert loss["key"] == "loss" and len(loss["x"]) == charts.BUCKETS and loss["high"][-1] == 3
    rows = found["table"].split("<tr>")[2:]
    assert len(rows) == charts.TABLE_ROWS and "<td>0.001</td>" in rows[0]
    assert shown(folder, []) is found, "nothing was added"
    assert shown(folder, [line(3001)])["revision"] != found["revision"]
    assert charts.value(None)["run"] == ""


def test_restarts_and_incidents_are_marked_once(folder, shown):
    write_incident(folder, "0001", step=25, resumed_from=20)
    attempts = {1: range(1, 26), 2: range(21, 30), 3: range(30, 33)}
    text = [line(step, attempt=attempt) for attempt, steps in attempts.items() for step in steps]
    first, second = shown(folder, text)["marks"]
    assert first == {"x": 25.0, "label": "hung after step 25", "incident": "0001"}
    assert second == {"x": 30.0, "label": "continued at step 30", "incident": ""}


def test_each_gpu_has_its_lines(folder, shown):
    gpu = {"kind": "gpu", "name": "Card", "utilization": 97, "memory_used": 8e9, "memory_total": 12e9, "power_w": 210.5}
    gpu["temperature"] = 64
    samples = [json.dumps({**gpu, "gpu": g}) + "\n" for g in (0, 1)]
    repeated = [line(s, attempt=2) for s in range(31, 61)]
    text = [*samples, *(line(s) for s in range(1, 41)), *samples, *repeated[:5], *samples, *repeated[5:], *samples]
    lines = {(one["key"], one.get("name")): one for one in shown(folder, text)["lines"]}
    assert lines[("memory_used", "1: Card")]["mean"] == [8.0] * 3 and lines[("memory_used", "1: Card")]["top"] == 12.0
    assert lines[("power_w", "0: Card")]["x"] == [0.0, 40.0, 60.0]
