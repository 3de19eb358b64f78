"""The log: its end, colours, a search near the end, and that nothing in a log is executed."""

import pytest
from hypothesis import given, strategies as st

from runs import env_file
from runs.files import RunError
from ui.run import cards, log_view


def found(folder, text="") -> list[str]:
    """The lines that a search finds."""
    return log_view.find(folder, text)[0]


def test_a_search_finds_the_last_lines_in_order(folder, monkeypatch):
    lines = [f"line {n} of the log{' with a Needle' if n % 7 == 0 else ''}" for n in range(2000)]
    (folder / "training.log").write_text("\n".join(lines))
    wanted = [line for line in lines if "Needle" in line]
    assert found(folder, "needle") == wanted and found(folder, "no such text") == []
    assert log_view.tail(folder) == lines[-log_view.SHOWN :]
    monkeypatch.setattr(log_view, "MOST_FOUND", 10)
    assert found(folder, "needle") == wanted[-10:]
    monkeypatch.setattr(log_view, "SEARCHED_BYTES", 100)
    (newest, share) = log_view.find(folder, "line 1999")
    assert newest == lines[-1:] and 0 < share < 0.01
    assert found(folder, "line 1900") == []


def test_a_secret_of_the_run_is_neither_shown_nor_found(folder, monkeypatch):
    key = "0123456789abcdef"
    env_file.write(folder, {"WANDB_API_KEY": key})
    (folder / "training.log").write_text(f"one\nValueError: key {key} is refused\nat 89% key={key}")
    hidden = "ValueError: key (WANDB_API_KEY) is refused"
    assert log_view.tail(folder) == ["one", hidden, "at 89% key=(WANDB_API_KEY)"]
    assert found(folder, "is refused") == [hidden]
    assert found(folder, "0123456789") == []
    monkeypatch.setattr(log_view, "LOG_BYTES", 48)  # from within the first key on
    with (folder / "training.log").open("a") as file:
        file.write("\n")
    assert log_view.tail(folder) == ["at 89% key=(WANDB_API_KEY)"]
    monkeypatch.setattr(log_view, "SEARCHED_BYTES", 48)
    assert found(folder) == ["at 89% key=(WANDB_API_KEY)"]
    (folder / "training.log").write_text(f"{key}\r at 90%\r at 91%\n")  # of a progress bar, with the only line end
    assert found(folder) == [" at 91%"] == log_view.tail(folder)
    (folder / "training.log").write_text(key + "." * (log_view.LINE_BYTES - 8))  # of a long line, the end is shown
    monkeypatch.setattr(log_view, "LOG_BYTES", 2 * log_view.LINE_BYTES)
    assert key[-8:] not in log_view.tail(folder)[0]


def test_a_search_that_cannot_be_done_is_a_sentence(folder):
    (folder / "training.log").write_text("one\n")
    with pytest.raises(RunError):
        log_view.find(folder, "x" * 201)
    (folder / "training.log").unlink()
    with pytest.raises(RunError, match="training.log cannot be read"):
        log_view.find(folder, "a")


def test_what_a_log_says_is_text_and_its_times_are_elements():
    lines = ["2026-11-22T20:15:38.271Z <img src=x onerror=alert(1)> \x1b[1;31m<b>\x1b[0m"]
    shown = log_view.markup(lines)
    assert "<img" not in shown and "<b>" not in shown and 'class="hp-sgr-bold hp-sgr-c1">&lt;b&gt;' in shown
    assert '<time datetime="2026-11-22T20:15:38.271Z">' in shown
    assert cards.local_times('<a title="2026-11-22T00:21:00Z">x</a>') == '<a title="2026-11-22T00:21:00Z">x</a>'


@given(st.binary(max_size=400))
def test_no_bytes_of_a_log_leave_a_control_character_but_colours(noise):
    shown = log_view.COLOUR.sub("", log_view.styled(noise.replace(b"\n", b"")))
    assert all(character == "\t" or character.isprintable() for character in shown)


def test_the_log_reads_as_it_looked_on_a_terminal_with_its_colours(folder):
    bar = b"".join(b"\x1b[32msteps: %3d%%\x1b[0m\r" % n for n in range(0, 101, 10))
    end = b"\n\xff\xfe bytes\x00\x07\n\x1b]0;title\x07\x1b[2Kend\n"
    (folder / "training.log").write_bytes(b"\x1b[1;32mINFO\x1b[0m start\r\n" + bar + end)
    coloured = ("\x1b[1;32mINFO\x1b[0m start", "\x1b[32msteps: 100%\x1b[0m")
    assert log_view.tail(folder) == [*coloured, "\ufffd\ufffd bytes", "end"]
    shown = log_view.markup(log_view.tail(folder))
    assert '<span class="hp-sgr-c2">steps: 100%</span>' in shown and "\x1b" not in shown


def test_a_log_that_grows_or_begins_again_is_read_again_and_no_other(folder):
    path = folder / "training.log"
    whole = b"caf\xc3\xa9\n" + b"".join(b"steps: %d%%\r" % n for n in range(5)) + b"\n\x1b[31mred\x1b[0m\nend\n"
    for end in range(len(whole) + 1):
        path.write_bytes(b"") if end == 0 else path.open("ab").write(whole[end - 1 : end])
        last = log_view.tail(folder)
    assert last == ["café", "steps: 4%", "\x1b[31mred\x1b[0m", "end"]
    assert log_view.tail(folder) is last
    path.write_text("new\n")
    assert log_view.tail(folder) == ["new"]
