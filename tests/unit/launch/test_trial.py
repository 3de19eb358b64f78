"""What a killed rehearsal left behind is removed by the next one; while one is under way there is no other."""

import os
import subprocess

import pytest

from launch import trial
from launch.common import LaunchError
from monitor.process import spawned


def test_what_a_killed_one_left_goes_with_what_it_started_and_one_runs_at_a_time(data):
    run = data / trial.SCRATCH / "outputs" / trial.NAME
    (run / "cache").mkdir(parents=True)
    left = subprocess.Popen(["sleep", "60"], env=os.environ | {spawned.RUN: str(run), spawned.TOKEN: "0" * 32})
    environment = dict(os.environ)
    try:
        with trial.scratch() as scratch:
            assert left.wait(10) < 0, "it was killed"
            assert scratch == run and not (run / "cache").exists()
            assert os.environ["HANGPROOF_DATA"] == str(data / trial.SCRATCH)
            os.environ["HANGPROOF_DATA"] = str(data)
            with pytest.raises(LaunchError, match="another run is being rehearsed"), trial.scratch():
                pass
    finally:
        left.kill()
    assert [path.name for path in data.iterdir()] == [trial.LOCK] and dict(os.environ) == environment
