"""A person copies the command of a message into their own shell."""

from guards import shell


def test_a_path_of_a_command_is_one_word_for_the_shell_of_this_system(monkeypatch):
    assert shell.word("/my runs/cat") == "'/my runs/cat'"
    with monkeypatch.context() as on_windows:
        on_windows.setattr(shell.os, "name", "nt")
        assert shell.word(r"C:\my runs\cat") == r'"C:\my runs\cat"', "cmd knows no single quotes"
