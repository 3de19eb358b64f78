"""Runs on other machines: what a store holds is read, however broken or hostile; a stop goes through the store."""

import json
import socket
from datetime import UTC, datetime

import pytest
from launch_helpers import put_run, run_with_store
from monitor_helpers import wait_for
from runs_helpers import call, written

from launch import fleet
from launch.common import LaunchError
from launch.store.lease import Lease
from launch.store.places import open_place


def test_a_store_shows_its_runs_with_the_machine_that_holds_each(data, tmp_path):
    store = tmp_path / "store"
    put_run(store)
    put_run(store, "done", state="completed", step=100)
    lease = Lease(open_place(str(store)).under("starting"))  # has a lease, and no status yet
    wait_for(lambda: lease.poll() == "held", what="the lease is held")
    (store / "far-cat" / "requests").mkdir()
    written(store / "unclaimed" / "status.json", '{"state": "running"}')
    (store / "not a run").mkdir()
    found = {run["slug"]: run for run in fleet.read_store(str(store))}
    assert set(found) == {"far-cat", "done", "starting", "unclaimed"}
    assert [found["unclaimed"][key] for key in ("state", "holder", "held")] == ["running", "", False]
    assert found["starting"]["state"] == "unknown" and socket.gethostname() in found["starting"]["holder"]
    one = found["far-cat"]
    assert (one["state"], one["step"], one["planned_steps"], one["loss"]) == ("running", 40, 100, 0.25)
    assert one["held"] and "far.example" in one["holder"] and not one["stop_requested"] and not one["problem"]
    assert found["done"]["state"] == "completed"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no json", b"[1]", b"[" * 100_000,
        b'{"state": "<script>alert(1)</script>", "step": "many", "loss": 1e999, "name": 7, "message": ["x"]}',
        b'{"state": ["running"], "updated_at": "9999-12-31T23:59:59+99:99", "checkpoint": "x", "step": -1e400, "loss": 1' + b"0" * 400 + b"}",
        b'{"name": "' + b"a\\n\\u0000\\u202e" * 1000 + b'", "planned_steps": true}', b"x" * (fleet.STATUS_BYTES + 1),
    ],
)  # fmt: skip
def test_a_hostile_status_costs_only_itself(data, tmp_path, content):
    store = tmp_path / "store"
    put_run(store, "bad")
    (store / "bad" / "status.json").write_bytes(content)
    (store / "bad" / "lease" / "000001.json").write_bytes(content)
    put_run(store, "good")
    found = {run["slug"]: run for run in fleet.read_store(str(store))}
    assert found["good"]["state"] == "running" and not found["good"]["problem"]
    bad = found["bad"]
    assert bad["state"] == "unknown" and len(json.dumps(bad)) < 4000 and bad["name"].isprintable()
    assert all(not isinstance(bad.get(key), str | bool) for key in fleet.NUMBERS)
    fleet.describe(bad, datetime.now(UTC))


def test_a_store_that_is_slow_shows_which_runs_it_did_not_send_in_time(data, tmp_path, monkeypatch):
    put_run(tmp_path / "store")
    monkeypatch.setattr(fleet, "STORE_S", -1.0)
    (run,) = fleet.read_store(str(tmp_path / "store"))
    assert run["state"] == "unknown" and "did not send all runs" in run["problem"]


def test_names_that_leave_the_store_are_no_runs(data, tmp_path):
    store = tmp_path / "store"
    put_run(store)
    for slug in ("..", "../far-cat", "a/b", "", ".hidden", "x" * 200, "a b"):
        with pytest.raises(LaunchError):
            fleet.request_stop(str(store), slug)
    with pytest.raises(LaunchError, match="has no run"):
        fleet.request_stop(str(store), "other")
    assert not list(store.glob("**/requests"))


def test_the_stores_are_those_of_the_runs(data):
    for name, store in (("one", "/far/one"), ("two", ""), ("three", "/far/one")):
        run_with_store(data, name, store)
    assert fleet.stores() == ["/far/one"]


@pytest.mark.slow
@pytest.mark.journey
def test_the_command_prints_every_store_and_fails_when_none_answers(data, tmp_path):
    put_run(tmp_path / "store")
    (tmp_path / "file").write_text("")

    def run(*words: str) -> tuple[int, list]:
        done = call("launch", "fleet", *words, "--json")
        assert "no store is known" not in done.stdout and ": 1 runs" not in done.stdout
        return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else [done.stderr]

    code, (first, second) = run(f"--store={tmp_path / 'store'}", f"--store={tmp_path / 'file'}")
    assert code == 0 and [row["slug"] for row in first["runs"]] == ["far-cat"]
    assert second["runs"] == []
    assert run(f"--store={tmp_path / 'store'}", "--stop=far-cat")[0] == 0
    assert json.loads((tmp_path / "store/far-cat/requests/stop.json").read_text())["now"] is False
    assert fleet.read_store(str(tmp_path / "store"))[0]["stop_requested"]
    assert run("--store=ftp://x/y")[0] == 1 and run("--stop=far-cat")[0] == 1


def test_what_is_taken_over_from_a_status(monkeypatch):
    values = {"name": "", "state": "running", "updated_at": "2026-11-22T10:00:00+01:00", "loss": 2e15}
    values["checkpoint"] = {"step": 7}
    found = fleet.status(json.dumps(values).encode(), "cat")
    assert found == {"name": "cat", "state": "running", "checkpoint_step": 7, "updated_at": "2026-11-22T09:00:00Z"}
    for step in (-1, 10**12, "7"):
        assert fleet.status(json.dumps({"checkpoint": {"step": step}}).encode(), "cat")["checkpoint_step"] is None
