"""Runs on other machines: what a store holds is shown, however slow, broken or hostile it is; a stop goes through the store."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
import store_servers
from monitor_helpers import wait_for
from PIL import Image
from ui_helpers import serving
from ui_page import a_tab, faint_texts, nameless_controls, open_page, until

from benchmarks.machines import Machine, toy
from launch import fleet
from launch.common import LaunchError
from launch.store.lease import Lease, this_owner
from launch.store.manifest import Manifest, Member
from launch.store.places import open_place
from runs.paths import ROOT
from ui.run import fleet_page

SLOW = toy(2000, 20, step_s=0.05)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


def put_run(store: Path, slug: str = "far-cat", **status) -> Path:
    """A run in a store that is a folder, as its agent writes it."""
    folder = store / slug
    folder.mkdir(parents=True)
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    values = {"name": "far cat", "state": "running", "step": 40, "planned_steps": 100, "loss": 0.25, "updated_at": at}
    (folder / "status.json").write_text(json.dumps({**values, **status}))
    owner = {**asdict(this_owner()), "host": "far.example"}
    (folder / "lease").mkdir()
    claim = {"number": 1, "owner": owner, "beat": 3, "held": True, "released": False, "period_s": 60}
    (folder / "lease" / "000001.json").write_text(json.dumps(claim))
    return folder


def put_sample(
    store: Path | str, content: bytes, name: str = "run/sample/far-cat_000040.png", slug: str = "far-cat"
) -> None:
    """A manifest that names one sample, and its contents."""
    import hashlib

    place = open_place(str(store)).under(slug)
    member = Member(hashlib.sha256(content).hexdigest(), len(content), 5.0)
    place.put(member.blob, content)
    manifest = Manifest(slug, 1, 1, 40, False, "a machine", "2026-11-22T10:00:00Z", {name: member})
    place.put(manifest.name, manifest.dumps())


def picture(size: tuple[int, int] = (64, 48)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(out, "PNG")
    return out.getvalue()


# What is read -------------------------------------------------------------------------------------------------------------


def test_a_store_shows_its_runs_with_the_machine_that_holds_each(data, tmp_path):
    store = tmp_path / "store"
    put_run(store)
    put_run(store, "done", state="completed", step=100)
    lease = Lease(open_place(str(store)).under("starting"))  # has a lease, and no status yet
    wait_for(lambda: lease.poll() == "held", what="the lease is held")
    put_sample(store, picture())
    (store / "far-cat" / "requests").mkdir()
    (store / "an-empty-folder").mkdir()
    (store / "not a run").mkdir()
    found = {run["slug"]: run for run in fleet.read_store(str(store), samples=True)}
    assert set(found) == {"far-cat", "done", "starting"}
    assert found["starting"]["state"] == "unknown" and socket.gethostname() in found["starting"]["holder"]
    one = found["far-cat"]
    assert (one["state"], one["step"], one["planned_steps"], one["loss"]) == ("running", 40, 100, 0.25)
    assert one["held"] and "far.example" in one["holder"] and not one["stop_requested"] and not one["problem"]
    (thumb,) = one["samples"]
    with Image.open(fleet.thumbs_dir() / thumb) as image:
        assert image.format == "JPEG" and max(image.size) <= fleet.THUMB_SIDE
    assert found["done"]["state"] == "completed" and found["done"]["samples"] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[1]",
        b"[" * 100_000,
        b'{"state": "<script>alert(1)</script>", "step": "many", "loss": 1e999, "name": 7, "message": ["x"]}',
        b'{"state": ["running"], "updated_at": "9999-12-31T23:59:59+99:99", "checkpoint": "x", "step": -1e400, "loss": 1' + b"0" * 400 + b"}",
        b'{"name": "' + b"a\\n\\u0000\\u202e" * 1000 + b'", "planned_steps": true}',
        b"x" * (fleet.STATUS_BYTES + 1),
    ],
)  # fmt: skip
def test_a_hostile_status_costs_only_itself(data, tmp_path, content):
    store = tmp_path / "store"
    put_run(store, "bad")
    (store / "bad" / "status.json").write_bytes(content)
    (store / "bad" / "lease" / "000001.json").write_bytes(content)
    put_run(store, "good")
    found = {run["slug"]: run for run in fleet.read_store(str(store), samples=True)}
    assert found["good"]["state"] == "running" and not found["good"]["problem"]
    bad = found["bad"]
    assert bad["state"] == "unknown" and len(json.dumps(bad)) < 4000 and bad["name"].isprintable()
    assert all(not isinstance(bad.get(key), str | bool) for key in fleet.NUMBERS)
    fleet.describe(bad, datetime.now(UTC))


@pytest.mark.parametrize(
    "name, content",
    [
        ("run/sample/a.png", b"no image"),
        ("run/sample/a.png", b"<svg onload=alert(1)>"),
        ("run/sample/a.png", picture()[:60]),
        ("run/sample/a.gif", picture()),
        ("run/sample/../../a.png", picture()),
        ("run/sample/huge.png", picture((7000, 7000))),
    ],
)
def test_a_sample_that_is_no_plain_image_is_not_shown(data, tmp_path, name, content):
    store = tmp_path / "store"
    put_run(store)
    put_sample(store, content, name)
    (run,) = fleet.read_store(str(store), samples=True)
    assert run["samples"] == [] and run["state"] == "running"
    assert not fleet.thumbs_dir().exists() or not list(fleet.thumbs_dir().iterdir())


def test_names_that_leave_the_store_are_no_runs(data, tmp_path):
    store = tmp_path / "store"
    put_run(store)
    for slug in ("..", "../far-cat", "a/b", "", ".hidden", "x" * 200, "a b"):
        with pytest.raises(LaunchError):
            fleet.request_stop(str(store), slug)
    with pytest.raises(LaunchError, match="has no run"):
        fleet.request_stop(str(store), "other")
    assert not list(store.glob("**/requests"))


def test_the_stores_are_those_of_the_runs_and_those_that_were_added(data):
    for name, store in (("one", "/far/one"), ("two", ""), ("three", "/far/one")):
        folder = data / "outputs" / name
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(f'name = "{name}"\nstore = "{store}"\n')
    assert fleet.stores() == ["/far/one"]
    fleet.add("/far/two")
    fleet.add("/far/two")
    assert fleet.stores() == ["/far/one", "/far/two"]
    for secret in ("s3://key:password@bucket/x", "https://x?token=1", "sftp://me:secret@host/x", ""):
        with pytest.raises(LaunchError):
            fleet.add(secret)
    assert "password" not in (data / fleet.STORES).read_text() and "secret" not in (data / fleet.STORES).read_text()
    fleet.remove("/far/two")
    assert fleet.added() == []
    (data / fleet.STORES).write_text("{broken")
    assert fleet.stores() == ["/far/one"]


def test_the_command_prints_every_store_and_fails_when_none_answers(data, tmp_path):
    put_run(tmp_path / "store")
    (tmp_path / "file").write_text("")

    def run(*words: str) -> tuple[int, list]:
        command = [sys.executable, "-m", "launch", "fleet", *words, "--json"]
        done = subprocess.run(
            command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=200, check=False
        )
        return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else [done.stderr]

    code, (first, second) = run(f"--store={tmp_path / 'store'}", f"--store={tmp_path / 'file'}")
    assert code == 0 and [row["slug"] for row in first["runs"]] == ["far-cat"]
    assert second["runs"] == []
    code, _ = run(f"--store={tmp_path / 'store'}", "--stop=far-cat")
    assert code == 0
    assert json.loads((tmp_path / "store/far-cat/requests/stop.json").read_text())["now"] is False
    assert fleet.read_store(str(tmp_path / "store"))[0]["stop_requested"]
    assert run("--store=ftp://x/y")[0] == 1 and run("--stop=far-cat")[0] == 1


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
        put_sample(server.address, picture())

        def run(*words: str) -> tuple[int, object]:
            command = [sys.executable, "-m", "launch", "fleet", f"--store={server.address}", *words, "--json"]
            done = subprocess.run(
                command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=200, check=False
            )
            assert done.stdout, done.stderr
            return done.returncode, json.loads(done.stdout.splitlines()[-1])

        code, (answer,) = run("--samples")
        assert code == 0, answer
        (one,) = answer["runs"]
        assert (one["state"], one["step"], one["held"], len(one["samples"])) == ("running", 40, True, 1)
        assert run("--stop=far-cat")[0] == 0
        assert json.loads(place.read("requests/stop.json"))["now"] is False
        code, (answer,) = run()
        assert answer["runs"][0]["stop_requested"]


# The page never waits -----------------------------------------------------------------------------------------------------


@pytest.fixture
def silent_server():
    """An address that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted = []
        thread = threading.Thread(target=lambda: accepted.append(listening.accept()), daemon=True)
        thread.start()
        yield f"sftp://nobody@127.0.0.1:{listening.getsockname()[1]}/runs"


def test_a_store_that_hangs_or_fails_delays_nobody(data, tmp_path, silent_server):
    put_run(tmp_path / "store")
    for address in (silent_server, str(tmp_path / "store")):
        fleet.add(address)
    one = fleet_page.Fleet()
    slowest_s = 0.0

    def shown() -> dict:
        nonlocal slowest_s
        began_s = time.monotonic()
        found = {store["store"]: store for store in one.snapshot() or ()}
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        return found

    until(lambda: shown().get(str(tmp_path / "store"), {}).get("runs"), "the store that answers is shown")
    now = shown()
    assert now[str(tmp_path / "store")]["age_s"] is not None and not now[str(tmp_path / "store")]["error"]
    assert now[silent_server]["runs"] == [] and now[silent_server]["age_s"] is None
    assert now[silent_server]["reading"] or now[silent_server]["error"]
    assert slowest_s < 2, "asking never waits for a store"
    # The store goes away: what was read stays, with its age and the reason.
    (tmp_path / "store").rename(tmp_path / "gone")
    (tmp_path / "store").write_text("")
    one.refresh()
    wait_for(lambda: shown()[str(tmp_path / "store")]["error"] or not shown()[str(tmp_path / "store")]["runs"])
    for store in one.stores.values():
        if store.job is not None:
            store.job.kill()


def test_nothing_is_read_while_nobody_looks(data, tmp_path, monkeypatch):
    put_run(tmp_path / "store")
    fleet.add(str(tmp_path / "store"))
    monkeypatch.setattr(fleet_page, "WATCHED_S", 0.3)
    monkeypatch.setattr(fleet_page, "REFRESH_S", 0.1)
    one = fleet_page.Fleet()
    until(lambda: one.snapshot() and one.snapshot()[0]["runs"], "it is read")
    until(lambda: one._thread is None, "the thread ends")
    read_s = one.stores[str(tmp_path / "store")].read_s
    time.sleep(0.5)
    assert one.stores[str(tmp_path / "store")].read_s == read_s
    one.snapshot()
    until(lambda: one.stores[str(tmp_path / "store")].read_s != read_s, "it is read again")


@pytest.mark.parametrize("sent", [None, {}, [], {"add": 1}, {"add": "a" * 501}, {"add": "a\nb"}, {"remove": None}])
def test_calls_with_wrong_values_change_nothing(data, sent):
    assert fleet_page.change_stores(sent)["ok"] is False
    assert fleet_page.stop_far(sent)["ok"] is False
    assert fleet_page.stop_far({"store": "/etc", "run": "x"})["ok"] is False
    assert not (data / fleet.STORES).exists()


# In a browser -------------------------------------------------------------------------------------------------------------


def open_fleet(page, server):
    open_page(page, server)
    page.get_by_role("tab", name="Other machines").click()
    page.get_by_test_id("store-address").wait_for()


def test_hostile_runs_are_shown_as_text_for_everyone(browser, tmp_path):
    from axe_playwright_python.sync_playwright import Axe

    store = tmp_path / "store"
    markup = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    put_run(store, name=markup, message=markup, reason=markup)
    put_run(store, "ended", state="failed", updated_at="2026-01-01T00:00:00Z")
    put_sample(store, picture())
    with serving(tmp_path / "data") as server, a_tab(browser, color_scheme="dark") as page:
        open_fleet(page, server)
        page.get_by_text("No store is known").wait_for()
        page.get_by_test_id("store-address").fill("s3://me:password@bucket")
        page.keyboard.press("Enter")
        page.get_by_text("holds no password").wait_for()
        page.get_by_test_id("store-address").fill(str(store))
        page.get_by_role("button", name="Add store").click()
        card = page.locator(".hp-far[data-run=far-cat]")
        card.wait_for()
        assert markup[:60] in card.inner_text() and page.title() == "Hangproof"
        assert card.locator("img").count() == 1 and card.locator("img").get_attribute("src").startswith(
            "data:image/jpeg"
        )
        until(lambda: card.locator("img").evaluate("one => one.naturalWidth") > 0, "the sample is decoded")
        assert "40 of 100" in card.inner_text() and "0.25" in card.inner_text()
        assert page.locator(".hp-far[data-run=ended]").get_by_test_id("far-stop").count() == 0
        assert faint_texts(page) == [] and nameless_controls(page) == []
        page.set_viewport_size({"width": 390, "height": 900})
        assert faint_texts(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = Axe().run(page, context="#fleet").response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        page.get_by_role("button", name="Remove").click()
        page.get_by_text("No store is known").wait_for()


def test_a_run_on_another_machine_is_watched_and_stopped_from_here(browser, tmp_path):
    """Two data roots and a store between them: a real run with its monitor and agent there, the page here."""
    store = str(tmp_path / "store")
    far = Machine(SLOW, tmp_path / "far", limits={"bandwidth_bytes": 0})
    SLOW.create(far.data, {"store": store})
    try:
        far.run()
        with serving(tmp_path / "data") as server, a_tab(browser) as page:
            open_fleet(page, server)
            page.get_by_test_id("store-address").fill(store)
            page.get_by_role("button", name="Add store").click()
            card = page.locator(".hp-far[data-run=toy]")
            card.wait_for()
            until(
                lambda: card.get_by_test_id("far-state").inner_text() == "Training", "it trains, as seen from here", 200
            )
            assert socket.gethostname() in card.inner_text()
            card.get_by_role("button", name="Stop toy").click()
            card.get_by_text("Stop requested").wait_for()
            assert far.wait(120) == 3, far.output()  # stopped by the user
            assert far.status()["state"] == "stopped" and far.newest_checkpoint() > 0
            page.get_by_role("button", name="Refresh").click()
            until(lambda: card.get_by_test_id("far-state").inner_text() == "Stopped", "its end is seen from here", 200)
    finally:
        far.kill()
