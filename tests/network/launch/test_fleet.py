"""A store far away is read and written by the command, as a page does it."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import store_servers
from fleet_helpers import put_run

from launch.store.places import open_place
from runs.paths import ROOT


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "sftp"])
def test_a_store_far_away_is_read_and_written_by_the_command(data, tmp_path, monkeypatch, kind):
    """As a page does it: a process for each call. The servers are real, on this machine."""
    for library in ("s3fs", "moto") if kind == "s3" else ("paramiko", "asyncssh"):
        pytest.importorskip(library)
    with contextlib.ExitStack() as stack:
        context = (
            store_servers.s3(tmp_path, monkeypatch, stack.enter_context(store_servers.moto())) if kind == "s3" else None
        )
        server = stack.enter_context(context or store_servers.sftp(tmp_path, monkeypatch))
        monkeypatch.setenv("HANGPROOF_DATA", str(data))
        place = open_place(server.address).under("far-cat")
        local = put_run(tmp_path / "local")
        for name in ("status.json", "lease/000001.json"):
            place.put(name, (local / name).read_bytes())

        def run(*words: str) -> tuple[int, object]:
            command = [sys.executable, "-m", "launch", "fleet", f"--store={server.address}", *words, "--json"]
            done = subprocess.run(
                command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=200, check=False
            )
            assert done.stdout, done.stderr
            return done.returncode, json.loads(done.stdout.splitlines()[-1])

        code, (answer,) = run()
        assert code == 0, answer
        (one,) = answer["runs"]
        assert (one["state"], one["step"], one["held"]) == ("running", 40, True)
        assert run("--stop=far-cat")[0] == 0
        assert json.loads(place.read("requests/stop.json"))["now"] is False
        code, (answer,) = run()
        assert answer["runs"][0]["stop_requested"]
