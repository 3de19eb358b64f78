"""A file that another process writes is read in parts: complete lines once each, and a replaced file from its start."""

import os
from unittest.mock import ANY

from hypothesis import given, strategies as st
from ui_helpers import metrics_line as line

from runs.growing import Added, count_of, entries, json_objects


def test_lines_come_once_they_are_complete_and_a_replaced_file_starts_over(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    added = Added(path)
    assert added.lines() == ([], False), "a file that is not there yet"
    path.write_bytes(b"one\ntw")
    assert added.lines() == ([b"one"], True)
    path.write_bytes(b"one\ntwo\n")
    assert added.lines() == ([b"two"], False) and added.lines() == ([], False)
    other.write_bytes(b"1\n2\n3\n")
    os.replace(other, path)
    assert added.lines(limit=4) == ([b"1", b"2"], True) and added.lines() == ([b"3"], False)
    with path.open("ab") as file:
        file.write(b"4\n5")
    assert added.lines() == ([b"4"], False), "and not again what was read"
    before, _ = added.place, path.write_bytes(b"1\n")
    assert added.lines() == ([b"1"], True) and added.offset == 2, "it was cut"
    assert added.place not in (before, "None-0") and Added(path).place == "None-0"
    path.unlink()
    assert added.lines() == ([], False)


def test_what_is_no_object_is_passed_over_and_what_is_no_count_is_0():
    assert json_objects(b'{"a": 1}\n\n3\n{"c": NaN}\n' + b"[" * 100_000) == [{"a": 1}, {"c": ANY}]
    assert [count_of(value) for value in (3, -1, True, "3", 1 << 60)] == [3, 0, 0, 0, 0]


@given(st.binary(max_size=300))
def test_a_damaged_line_costs_only_itself(noise):
    good = [line(s).encode().strip() for s in (1, 2)]
    found = entries([good[0], noise.replace(b"\n", b""), good[1]])
    assert [one["step"] for one in found if one.get("loss") == 0.5] == [1, 2]
