"""The log: its end, colours, search with a time limit, places, and that nothing in a log is executed."""

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ui_helpers import write_incident, write_run

from ui.run import log_view, readers

HEADER = "=== 2026-11-22T00:{:02d}:00.000Z attempt {}: train.sh, from the start\n"


def found(answer: dict) -> list[str]:
    return [line for _, _, line in answer["found"]]


def all_found(folder, **question) -> tuple[list[str], int]:
    """(all lines that a search finds, number of calls)."""
    lines, before, calls = [], None, 0
    while True:
        answer = log_view.log_search({"run": folder.name, "before": before, **question})
        assert answer["ok"], answer
        lines, before, calls = found(answer) + lines, answer["next"], calls + 1
        if before is None:
            return lines, calls


def test_a_search_finds_every_line_in_order(data, monkeypatch):
    monkeypatch.setattr(log_view, "CHUNK_BYTES", 700)
    folder = write_run(data)
    lines = [f"line {n} of the log{' with a Needle' if n % 7 == 0 else ''}" for n in range(2000)]
    (folder / "training.log").write_text("\n".join(lines))
    wanted = [line for line in lines if "Needle" in line]
    assert all_found(folder, text="needle")[0] == wanted
    got, _ = all_found(folder, text=r"line \d*3 of", pattern=True)
    assert got == [line for line in lines if line.split()[1].endswith("3")]
    assert all_found(folder, text="line 0 ")[0] == lines[:1] and all_found(folder, text="line 1999")[0] == lines[-1:]
    assert all_found(folder, text="no such text") == ([], 1)


def test_levels_select_errors_and_warnings(data):
    folder = write_run(data)
    text = "epoch 1\n\x1b[33mWARNING: slow disk\x1b[0m\nRuntimeError: CUDA out of memory\nTraceback (most recent call last):\nfine\n"
    (folder / "training.log").write_text(text)
    errors = ["RuntimeError: CUDA out of memory", "Traceback (most recent call last):"]
    assert all_found(folder, level="error")[0] == errors
    assert all_found(folder, level="warning")[0] == ["\x1b[33mWARNING: slow disk\x1b[0m", *errors]
    assert all_found(folder, level="warning", text="disk")[0] == ["\x1b[33mWARNING: slow disk\x1b[0m"]
    answer = log_view.log_search({"run": folder.name, "level": "warning"})
    assert [kind for _, kind, _ in answer["found"]] == ["warning", "error", "error"]


@pytest.mark.parametrize("text", ["(", "*", "[", "(?P<", "\\", "a{1,2}{3}", "(x+x+)+y", "(" * 150])
def test_a_pattern_that_is_wrong_or_slow_is_answered_in_time(data, text):
    folder = write_run(data)
    (folder / "training.log").write_text(("x" * 3000 + "\n") * 50)
    began = time.monotonic()
    answer = log_view.log_search({"run": folder.name, "text": text, "pattern": True})
    assert time.monotonic() - began < 20
    assert answer["ok"] is False and "egular expression" in answer["error"]
    assert "<" not in answer["error"].replace("(?P<", "")


def test_a_slow_pattern_stops_between_lines_and_continues(data, monkeypatch):
    monkeypatch.setattr(log_view, "SEARCH_S", 0.0)
    folder = write_run(data)
    (folder / "training.log").write_text("".join(f"line {n}\n" for n in range(30)))
    with (folder / "training.log").open("rb") as file:
        pattern = log_view._compiled("line 2")
        found_now, rest = log_view.search(file, 10_000, "line 2", pattern, "")
    assert rest is not None and found_now == []


def test_a_log_that_is_missing_or_a_folder_is_said(data):
    folder = write_run(data)
    assert "training.log cannot be read" in log_view.log_search({"run": folder.name, "text": "a"})["error"]
    (folder / "training.log").mkdir()
    assert "cannot be read" in log_view.log_around({"run": folder.name, "at": 0})["error"]


def test_an_incident_leads_to_the_end_of_its_attempt(data, monkeypatch):
    monkeypatch.setattr(log_view, "CHUNK_BYTES", 500)
    folder = write_run(data)
    parts = [
        HEADER.format(number, number) + "".join(f"attempt {number} line {n}\n" for n in range(40))
        for number in (1, 2, 3)
    ]
    (folder / "training.log").write_text("".join(parts))
    for number, last in ((1, "attempt 1 line 39"), (2, "attempt 2 line 39"), (3, "attempt 3 line 39")):
        write_incident(folder, f"{number:04d}", attempt=number)
        answer = log_view.log_around({"run": folder.name, "incident": f"{number:04d}"})
        assert answer["lines"][answer["here"]][1] == last
    assert log_view.log_around({"run": folder.name, "incident": "0009"})["ok"] is False
    answer = log_view.log_search({"run": folder.name, "text": "attempt 2 line 7"})
    around = log_view.log_around({"run": folder.name, "at": answer["found"][0][0]})
    assert around["lines"][around["here"]][1] == "attempt 2 line 7"


@given(st.binary(max_size=400))
def test_no_bytes_of_a_log_leave_a_control_character_but_colours(noise):
    shown = readers.styled_line(noise.replace(b"\n", b""))
    rest = readers.COLOUR.sub("", shown)
    assert all(character == "\t" or character.isprintable() for character in rest)


@given(st.binary(max_size=3000), st.text(max_size=20), st.sampled_from(["", "warning", "error"]), st.integers(1, 500))
def test_a_search_of_any_bytes_ends_and_names_places_of_lines(noise, text, level, chunk):
    whole, log_view.CHUNK_BYTES = log_view.CHUNK_BYTES, chunk
    try:
        end = len(noise)
        for _ in range(len(noise) + 2):
            lines, next_end = log_view.search(io.BytesIO(noise), end, text, None, level)
            for offset, kind, line in lines:
                assert 0 <= offset < max(1, end) and kind in log_view.LEVELS
                assert len(line) <= log_view.LONGEST_LINE
            if next_end is None:
                break
            assert next_end < end
            end = next_end
        else:
            raise AssertionError("the search does not end")
    finally:
        log_view.CHUNK_BYTES = whole


@pytest.mark.slow
def test_a_log_of_a_gigabyte_stays_quick(data):
    folder = write_run(data)
    block = b"steps: 0.123456 avr_loss=0.1234 some more of the line\n" * 15_000
    with (folder / "training.log").open("wb") as file:
        file.write(HEADER.format(1, 1).encode() + b"the very first needle\n")
        file.truncate(1_000_000_000)  # zeros in the middle take no disk space, and are one long line
        file.seek(0, 2)
        for _ in range(8):
            file.write(b"\n" + block)
        file.write(b"the last line\n")
    began = time.process_time()
    assert log_view.log_tail({"run": folder.name})["lines"][-1][1] == "the last line"
    assert time.process_time() - began < 1.0
    slowest, before, calls, lines = 0.0, None, 0, []
    while calls < 200:
        began = time.process_time()
        answer = log_view.log_search({"run": folder.name, "text": "needle", "before": before})
        slowest, calls = max(slowest, time.process_time() - began), calls + 1
        lines, before = found(answer) + lines, answer["next"]
        if before is None:
            break
    assert lines == ["the very first needle"] and slowest < 2.0, (slowest, calls)
