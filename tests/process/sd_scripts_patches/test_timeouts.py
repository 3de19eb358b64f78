"""Limits and settings as flags."""

import os

import pytest

from guards import limits
from sd_scripts_patches import timeouts


def test_a_flag_wins_over_the_environment_and_reaches_children(monkeypatch):
    for name in ("HANGPROOF_GIT_TIMEOUT_S", "HANGPROOF_SKIP_IMAGES"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the test sets
    monkeypatch.setenv("HANGPROOF_NPZ_TIMEOUT_S", "7")
    flags = ["--lr", "1", "--hangproof_npz_timeout_s=9", "--hangproof_git_timeout_s", "2"]
    assert timeouts.take_flags(flags) == ["--lr", "1"]
    assert limits.seconds("npz_timeout_s") == 9 and os.environ["HANGPROOF_GIT_TIMEOUT_S"] == "2"
    with pytest.raises(timeouts.UsageError, match="HANGPROOF_SKIP_IMAGES='many': expected a whole number"):
        timeouts.take_flags(["--hangproof_skip_images=many"])
