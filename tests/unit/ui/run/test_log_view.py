"""The log: its end, colours, search with a time limit, places, and that nothing in a log is executed."""

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ui_helpers import write_incident, write_run

from runs import env_file
from runs.files import RunError
from ui.run import log_view, readers, view

HEADER = "=== 2026-11-22T00:{:02d}:00.000Z attempt {}: train.sh, from the start\n"


def all_found(folder, text="", **question) -> tuple[list[str], int]:
    """(all lines that a search finds, number of calls)."""
    lines, before, calls = [], None, 0
    while True:
        found, before, _ = log_view.find(folder, text, before=before, **question)
        lines, calls = [line for _, _, line in found] + lines, calls + 1
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
    errors = ["RuntimeError: CUDA out of memory", "Traceback (most recent call last):"]
    lines = ["epoch 1", "\x1b[33mWARNING: slow disk\x1b[0m", *errors, "fine", ""]
    (folder / "training.log").write_text("\n".join(lines))
    assert all_found(folder, level="error")[0] == errors
    assert all_found(folder, level="warning")[0] == ["\x1b[33mWARNING: slow disk\x1b[0m", *errors]
    assert all_found(folder, level="warning", text="disk")[0] == ["\x1b[33mWARNING: slow disk\x1b[0m"]
    assert [kind for _, kind, _ in log_view.find(folder, "", level="warning")[0]] == ["warning", "error", "error"]


def test_a_secret_of_the_run_is_neither_shown_nor_found(data):
    folder = write_run(data)
    key = "0123456789abcdef"
    env_file.write(folder, {"WANDB_API_KEY": key})
    (folder / "training.log").write_text(f"one\nValueError: key {key} is refused\nat 89% key={key}")
    hidden = "ValueError: key (WANDB_API_KEY) is refused"
    assert [text for _, _, text in log_view.tail(folder)] == ["one", hidden, "at 89% key=(WANDB_API_KEY)"]
    assert view.log(folder).error == hidden and "0123" not in str(view.log(folder).lines)
    assert all_found(folder, text="is refused")[0] == [hidden] and all_found(folder, level="error")[0] == [hidden]
    for question in ({"text": "0123456789"}, {"text": "01[0-9]+abc", "pattern": True}):
        assert all_found(folder, **question)[0] == []
    lines, at = log_view.around(folder, len("one\n"))
    assert lines[at][2] == hidden


@pytest.mark.parametrize("text", ["(", "*", "[", "(?P<", "\\", "a{1,2}{3}", "(x+x+)+y", "(" * 150])
def test_a_pattern_that_is_wrong_or_slow_is_answered_in_time(data, text):
    folder = write_run(data)
    (folder / "training.log").write_text(("x" * 3000 + "\n") * 50)
    began = time.monotonic()
    with pytest.raises(RunError, match="egular expression"):
        log_view.find(folder, text, pattern=True)
    assert time.monotonic() - began < 20


def test_a_slow_pattern_stops_between_lines_and_continues(data):
    folder = write_run(data)
    (folder / "training.log").write_text("".join(f"line {n}\n" for n in range(30)))
    with (folder / "training.log").open("rb") as file:
        pattern = log_view._compiled("line 2")
        found_now, rest = log_view.search(file, 240, "line 2", pattern, "", until_s=0.0)
    assert rest is not None and [line for _, _, line in found_now] == ["line 29"]


def test_a_search_that_cannot_be_done_is_a_sentence(data):
    folder = write_run(data)
    (folder / "training.log").write_text("one\n")
    for question in ({"text": "x" * 201}, {"text": "a", "level": "all"}):
        with pytest.raises(RunError):
            log_view.find(folder, **question)
    (folder / "training.log").unlink()
    with pytest.raises(RunError, match="training.log cannot be read"):
        log_view.find(folder, "a")
    (folder / "training.log").mkdir()
    with pytest.raises(RunError, match="cannot be read"):
        log_view.around(folder, 0)


def test_an_incident_leads_to_the_end_of_its_attempt(data, monkeypatch):
    monkeypatch.setattr(log_view, "CHUNK_BYTES", 500)
    folder = write_run(data)
    with (folder / "training.log").open("w") as file:
        for number in (1, 2, 3):
            file.write(HEADER.format(number, number) + "".join(f"attempt {number} line {n}\n" for n in range(40)))
    for number in (1, 2, 3):
        write_incident(folder, f"{number:04d}", attempt=number)
        lines, here = log_view.around_incident(folder, f"{number:04d}")
        assert lines[here][2] == f"attempt {number} line 39"
    with pytest.raises(RunError):
        log_view.around_incident(folder, "0009")
    ((at, _, _),) = log_view.find(folder, "attempt 2 line 7")[0]
    lines, here = log_view.around(folder, at)
    assert lines[here][2] == "attempt 2 line 7"


def test_what_a_log_says_is_text_and_its_times_are_elements():
    lines = [(7, "error", "2026-11-22T20:15:38.271Z <img src=x onerror=alert(1)> \x1b[1;31m<b>\x1b[0m")]
    shown = log_view.markup(lines)
    assert "<img" not in shown and "<b>" not in shown and 'class="hp-sgr-bold hp-sgr-c1">&lt;b&gt;' in shown
    assert '<time datetime="2026-11-22T20:15:38.271Z">' in shown and 'data-at="7"' in shown


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
    assert log_view.tail(folder)[-1][2] == "the last line"
    assert time.process_time() - began < 1.0
    slowest, before, calls, lines = 0.0, None, 0, []
    while calls < 200:
        began = time.process_time()
        found, before, _ = log_view.find(folder, "needle", before=before, limit_s=0.4)
        slowest, calls = max(slowest, time.process_time() - began), calls + 1
        lines = [line for _, _, line in found] + lines
        if before is None:
            break
    assert lines == ["the very first needle"] and slowest < 2.0, (slowest, calls)
