"""The word in front of every command, as Windows runs it."""

import os
import signal

import hangproof


def test_on_windows_ctrl_c_is_answered_by_the_command_alone(monkeypatch):
    def call(line, env):
        signal.raise_signal(signal.SIGINT)  # a terminal sends it to both
        return 130

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(hangproof.subprocess, "call", call)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        assert hangproof.main(["status", "--watch"]) == 130
    signal.signal(signal.SIGINT, before)
