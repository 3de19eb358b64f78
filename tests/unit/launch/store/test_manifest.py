"""A manifest of a store is hostile until it was checked."""

import json

import pytest

from launch.store.manifest import LAST_S, Manifest, Member, check_member, parse
from launch.store.places import StoreError

OUTSIDE = [
    "run/../run.toml", "run//etc", "/run/run.toml", "run/sample/../../x", "data/../x", "data/.ssh/key", "data/a\\b",
    "data/a:b", "run/.ssh/config", "run/sample/\0", "run/other.safetensors", "run/evil.py", "run/my-run-state",
    "home/x", "data", "run/", "data/a /b", "data/a./b", "run/monitor.json/x", "data/" + "a/" * 20 + "b",
    "data/" + "x" * 600, "data/a\nb", "data/\u202eb",
]  # fmt: skip


def test_a_manifest_cannot_name_a_file_outside_the_run():
    assert check_member(of_a_mac := "data/Screenshot at 9.41\u202fAM.png", "my-run") == of_a_mac
    made = Manifest("my-run", 1, 1, 1, False, "", "", {})
    for name in OUTSIDE:
        with pytest.raises(ValueError, match="not (the name of )?a file"):
            check_member(name, "my-run")
        values = {**json.loads(made.dumps()), "files": {name: ["a" * 64, 1, 0.0]}}
        with pytest.raises(StoreError, match="is damaged"):
            parse(json.dumps(values).encode(), made.name, "my-run")


def test_a_damaged_manifest_is_refused():
    manifest = Manifest("my-run", 1, 1, 5, False, "me", "now", {})
    assert parse(manifest.dumps(), manifest.name, "my-run") == manifest
    files = [["x", 1, 0], ["a" * 64, -1, 0], ["a" * 64, 1e99, 0], ["a" * 64, 1], ["a" * 64, 1, "x"]]
    changes = [{"files": []}, {"lease": "1"}, {"step": None}, {"number": True}]
    for change in changes + [{"files": {"run/run.toml": one}} for one in files]:
        with pytest.raises(StoreError):
            parse(json.dumps({**json.loads(manifest.dumps()), **change}).encode(), manifest.name, "my-run")
    for name, run_name in (("manifests/000001-000002.json", "my-run"), (manifest.name, "another")):
        with pytest.raises(StoreError, match="belongs to"):
            parse(manifest.dumps(), name, run_name)


@pytest.mark.parametrize(("changed_s", "read_s"), [(-14400.0, 0.0), (1.5, 1.5), (1e99, LAST_S), (float("nan"), 0.0)])
def test_the_date_of_a_file_makes_no_copy_unusable(changed_s, read_s):
    """A camera without a clock, and a file system that was damaged."""
    made = Manifest("my-run", 1, 1, 1, False, "", "", {"data/a.png": Member("a" * 64, 1, changed_s)})
    assert parse(made.dumps(), made.name, "my-run").files["data/a.png"].changed_s == read_s
