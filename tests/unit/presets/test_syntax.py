"""A word of a command knows its place, and has no value where a part of it is unknown."""

from presets.syntax import UNKNOWN, Command, Word


def test_a_word_with_an_unknown_part_has_no_value():
    first, second = Word("program", 2, 9), Word(f"a{UNKNOWN}b", 10, 15)
    assert (first.value, second.value) == ("program", None)
    command = Command([first, second])
    assert (command.start, command.end) == (2, 15) and not command.opaque
