"""`python -m launch train RUN`: write the run's script for this machine, fetch its base model, supervise it to its end.

A run that came in a bundle or in a container's volume has the paths of the machine that wrote it. The exit code is that
of `monitor run`; the process becomes the monitor's keeper, so signals reach it.
"""

import argparse
import contextlib
import os

import runs
from launch import common, travel
from monitor.process.platform import LOCK, is_held
from runs import weights
from runs.files import RunError

OPTIONS = (common.RUN, ("--prepare", False, "write the script and fetch the base model, but do not train"))


def run(args: argparse.Namespace) -> int:
    """Prepare and supervise; the monitor's exit code. Raises RunError, OSError."""
    from monitor.__main__ import become

    folder = runs.run_folder(args.run)
    if is_held(folder / LOCK):  # another monitor watches it, which `become` reports
        return 0 if args.prepare else become(os.fspath(folder))
    job, spec = runs.pinned(folder), None
    with contextlib.suppress(RunError):  # a model of another machine's models.toml: its job trains without that
        spec = job.run_spec()
    if spec and travel.fetches_files(spec) and weights.problems(spec):  # a run may use files in other places
        runs.fetch_model(spec.model)
    if args.prepare:
        return common.report(args, f"{folder}: ready", {"folder": str(folder)})
    return become(os.fspath(folder))
