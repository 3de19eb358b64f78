"""Wrong usage of the launcher and of its check."""

import os

import pytest

from sd_scripts_patches import __main__ as main
from sd_scripts_patches import registry


def test_a_folder_without_sd_scripts_is_refused_by_name(tmp_path, capsys):
    assert main.main(["check", str(tmp_path)]) == 1
    assert "is not an sd-scripts checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "usage:"),
        (["check"], "usage:"),
        (["-m"], "usage:"),
        (["no-such-script.py"], "no-such-script.py: script not found"),
        (["x.py", "--hangproof_nonsense=3"], "unknown flag --hangproof_nonsense=3"),
        (["x.py", "--hangproof_npz_timeout_s=soon"], "HANGPROOF_NPZ_TIMEOUT_S='soon': expected seconds"),
        (["x.py", "--hangproof_npz_timeout_s=nan"], "expected seconds"),
        (["x.py", "--hangproof_without=nothing"], "unknown patch: nothing"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_message(args, message, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a flag sets a variable
    registry.patches.cache_clear()
    assert main.main(args) == 2
    assert message in capsys.readouterr().err
    registry.patches.cache_clear()
