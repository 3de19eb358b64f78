"""Runs on other machines: what a store holds is read and shown, however slow, broken or hostile it is."""

import json
import socket
import sys
import time

import pytest
from launch_helpers import put_run
from monitor_helpers import wait_for
from ui_page import until

from launch import fleet
from runs.files import RunError
from ui.run import fleet_page, fold

pytestmark = pytest.mark.slow


def test_a_store_that_hangs_or_fails_delays_nobody(data, tmp_path, request):
    listening = socket.create_server(("127.0.0.1", 0))  # the system accepts what waits for it, and nobody answers
    request.addfinalizer(listening.close)
    silent_server = f"sftp://nobody@127.0.0.1:{listening.getsockname()[1]}/runs"
    put_run(tmp_path / "store")
    answering = str(tmp_path / "store")
    for address in (silent_server, answering):
        fleet.add(address)
    one = fleet_page.Fleet()

    def shown() -> dict[str, fleet_page.Store]:
        began_s = time.monotonic()
        found = one.look()
        assert time.monotonic() - began_s < 10, "asking never waits for a store"
        return found

    until(lambda: answering in shown() and one.stores[answering].runs, "the store that answers is shown")
    now = shown()
    assert now[answering].read_at and not now[answering].error
    assert now[silent_server].runs == [] and now[silent_server].read_at == "" and now[silent_server].error
    # The store goes away: what was read stays, with its age and the reason.
    (tmp_path / "store").rename(tmp_path / "gone")
    (tmp_path / "store").write_text("")
    one.read_s = None
    wait_for(lambda: shown()[answering].error or not shown()[answering].runs)
    if one.reading is not None:
        one.reading.kill()


def test_a_store_that_is_added_or_removed_during_a_reading_stays_so(data, tmp_path, monkeypatch):
    before, added, answer = str(tmp_path / "before"), str(tmp_path / "added"), tmp_path / "answer"
    fleet.add(before)
    slow = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint(sys.argv[2])"
    lists = iter([before, added])

    def reading(*_: str) -> list[str]:
        found = [{"store": next(lists), "runs": [], "error": ""}]
        return [sys.executable, "-c", slow, str(answer), json.dumps(found)]

    monkeypatch.setattr(fleet_page, "python", reading)
    monkeypatch.setattr(fleet_page, "FLEET", one := fleet_page.Fleet())
    one.look()
    fleet_page.change("add", added)
    fleet_page.change("remove", before)
    assert list(one.look()) == [added]
    answer.touch()
    until(lambda: one.look() and one.read_s is not None, "the next answer")
    assert list(one.stores) == [added]


def test_a_run_that_was_stopped_here_and_trains_again_can_be_stopped_again(data, tmp_path, monkeypatch):
    store, shown = str(tmp_path / "store"), []
    put_run(tmp_path / "store")
    fleet.add(store)
    monkeypatch.setattr(fleet_page, "FLEET", one := fleet_page.Fleet())
    for state in ("running", "stopped", "running"):
        (tmp_path / "store" / "far-cat" / "status.json").write_text(json.dumps({"state": state}))
        one.read_s = None
        until(lambda: one.look() and one.read_s is not None, "the next answer")
        shown.append("Stop" if ">Stop<" in fleet_page.html() else "")
        if len(shown) == 1:
            fleet_page.change("stop", store, "far-cat")
            until(one.stores[store].stops["far-cat"].done, "the request")
            (tmp_path / "store" / "far-cat" / "requests" / "stop.json").unlink()
    assert shown == ["Stop", "", "Stop"]


@pytest.mark.parametrize("address", ["", " ", "a" * 501, "a\nb", "s3://me:password@bucket"])
def test_addresses_that_are_none_change_nothing(data, address):
    with pytest.raises(fold.ERRORS):
        fleet_page.change("add", address)
    with pytest.raises(RunError, match="not in the list"):
        fleet_page.change("stop", address, "x")
    assert not (data / fleet.STORES).exists()


def test_text_of_another_machine_is_text(data, tmp_path, monkeypatch):
    """Markup in any value of a status or an address is escaped, and a status without values is shown."""
    mark = "<i onclick=x>\"'"
    one = fleet_page.Fleet()
    one.stores[mark] = fleet_page.Store(error=mark, read_at="2026-01-01T00:00:00+00:00")
    one.read_s = time.monotonic()
    words = {key: mark for key in (*fleet.WORDS, "holder", "problem", "slug", "updated_at", "state")}
    one.stores[mark].runs = [words, {"slug": "bare", "name": "bare", "state": "running"}]
    monkeypatch.setattr(fleet_page, "FLEET", one)
    shown = fleet_page.html()
    assert "<i" not in shown and shown.count("&lt;i onclick=x&gt;") >= 6
    assert 'data-run="bare"' in shown and "Training" in shown
    assert "older runs" not in shown
    one.stores[mark].runs *= fleet.MOST_RUNS // 2
    assert "The store may have older runs: the 100 newest are shown." in fleet_page.html()
