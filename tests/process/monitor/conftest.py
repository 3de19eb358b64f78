"""Fixtures of the monitor's tests."""

import os
import subprocess
import sys

import pytest
from monitor_evidence import make_loop
from monitor_helpers import folder, wait_for

from monitor.process import platform


@pytest.fixture
def spawn():
    """Starts a process with these variables, `sleep 60` by default, in a session of its own; killed at the end."""
    made = []

    def start(*command: str, **env: str) -> subprocess.Popen:
        made.append(
            subprocess.Popen(command or ("sleep", "60"), env=os.environ | env, text=True, stdout=subprocess.PIPE,
                             start_new_session=True)
        )  # fmt: skip
        for name, value in env.items() if sys.platform.startswith("linux") else ():  # in mid-exec there is none
            wait_for(lambda name=name, value=value: platform.environ_of(made[-1].pid).get(name) == value)
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture
def child(spawn):
    """A process that does nothing."""
    return spawn()
