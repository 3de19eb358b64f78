"""`python -m launch store`: what it says of a run in a store, and that it fetches it and takes its lease."""

import argparse
import json

import pytest
from store_helpers import QUICK, add_state, held, make_run

from launch.store import commands
from launch.store.copies import Copier
from launch.store.places import StoreError, open_place
from monitor.process.platform import LOCK, Lock


def test_a_run_is_shown_released_and_restored(data, tmp_path, monkeypatch, capsys):
    address, folder = str(tmp_path / "store"), make_run(data)

    def said(action: str) -> dict:
        parser = argparse.ArgumentParser()
        commands.add_arguments(parser)
        assert commands.run(parser.parse_args([action, address, folder.name, "--json"])) == 0
        text = capsys.readouterr()
        return {**json.loads(text.out.splitlines()[-1]), "error": text.err}

    for action, message in (("status", "holds no run"), ("restore", "has no complete copy of")):
        with pytest.raises(StoreError, match=message):
            said(action)
    place = open_place(address, QUICK).under(folder.name)
    lease = held(place)
    add_state(folder, 10)
    Copier(place, folder, lease).push()
    found = said("status")
    assert (found["step"], found["completed"], found["holder"]) == (10, False, lease.owner.text())
    assert said("release")["holder"] == lease.owner.text()
    assert said("status")["holder"] is None and said("release")["holder"] is None
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "another machine"))
    restored = said("restore")
    assert restored["step"] == 10 and restored["files"] > 0
    there = tmp_path / "another machine" / "outputs" / folder.name
    error = f"uses no store, as run.toml says. To go on with this one, set store = {address!r} in {there}"
    assert error in restored["error"]
    (there / "run.toml").write_text((there / "run.toml").read_text().replace('store = ""', f'store = "{address}/"'))
    again = said("restore")
    assert (again["files"], again["error"]) == (0, "")
    lock = Lock(there / LOCK)
    assert lock.acquire()
    with pytest.raises(StoreError, match="trains on this machine; stop it first"):
        said("restore")
    lock.release()
