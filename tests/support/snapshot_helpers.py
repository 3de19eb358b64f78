"""Snapshots in a folder of the test's own in memory: taken, listed and restored."""

import shutil
import tempfile
from pathlib import Path

import pytest

from guards import checkpoint, snapshot_files
from guards.snapshots import Snapshots


@pytest.fixture
def ring():
    """A folder for snapshots in memory."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="hangproof-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def writer(ring, run="/runs/a", attempt=1):
    return Snapshots(ring, run, "spec", attempt)


def raw(text):
    return [snapshot_files.File("weights.bin", "raw", text)]


def take(snapshots_, step, files):
    snapshots_.due()
    snapshots_.take(f"toy-step{step:08d}-state", step, 1, files)
    snapshots_.wait()


def newest(ring):
    return next(iter(checkpoint.guards(ring)))


def restored(ring):
    folder = ring / snapshot_files.RESUMED / newest(ring).name
    snapshot_files.restore(folder, {snapshot_files.RING: str(ring)})
    return folder
