"""`python -m launch train RUN`: write the run's script for this machine, then supervise it until it ends.

A run that came in a bundle or in a container's volume has the paths of the machine that wrote it. The exit code is that of
`monitor run`; the process becomes the monitor's keeper, so signals reach it.
"""

import argparse
import os

import runs
from launch import common
from monitor.process.locks import LOCK, is_held
from monitor.run_folder import STATE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN."""
    common.add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Render and supervise; the monitor's exit code. Raises RunError, OSError."""
    from monitor.keeper import become

    folder = common.find(args)
    if not is_held(folder / LOCK):  # another monitor watches it, which `become` reports
        runs.render(folder)
    return become(os.fspath(folder), os.fspath(folder / STATE), False)
