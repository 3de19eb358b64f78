"""The word in front of every command, as Windows runs it."""

import os
import signal

import hangproof


def test_on_windows_ctrl_c_is_answered_by_the_command_alone(monkeypatch):
    before, to_both = signal.getsignal(signal.SIGINT), lambda line, env: signal.raise_signal(signal.SIGINT) or 130
    monkeypatch.setattr(hangproof.subprocess, "call", to_both)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        assert hangproof.main(["status", "--watch"]) == 130
    signal.signal(signal.SIGINT, before)
