"""How fast earlier runs were: only runs with the same settings count, and broken files are passed over."""

import json

import pytest

import runs
from runs.history import earlier, expected

FIELDS = {"name": "one", "model": "tiny-flux", "tier": "16G"}


def write(data, name: str, at: str = "2026-01-01T00:20:00.000Z", **status) -> None:
    folder = data / "outputs" / name
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(runs.dumps(runs.make({**FIELDS, "name": name})), encoding="utf-8-sig")
    state = {
        "state": "completed", "restarts": 0, "step": 500, "step_s": 2.0, "elapsed_s": 1200.0,
        "started_at": "2025-12-01T00:00:00.000Z", "updated_at": at, **status,
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps(state), encoding="utf-8")


def spec(**fields) -> dict:
    return runs.make({**FIELDS, **fields}).model_dump()


def test_the_newest_completed_run_with_the_same_settings_gives_its_speed_and_the_rest_of_its_time(data):
    write(data, "aged", step_s=9.0)
    write(data, "before", "2026-01-02T00:20:00.000Z")
    write(data, "restarted", "2026-01-03T00:20:00.000Z", step_s=4.0, restarts=2)
    found = earlier(spec())
    assert (found.name, found.step_s, found.other_s) == ("before", 2.0, pytest.approx(200.0))
    assert expected(runs.make(FIELDS), 2000) == (4200, "measured on this machine in the run “before”")
    others = {"tier": "20G", "model": "flux-dev", "mixed_precision": "bf16", "resolution": 128, "batch_size": 2}
    for name, value in (others | {"nodes": 2}).items():
        assert earlier(spec(**{name: value})) is None, "with other settings"


def test_runs_without_a_usable_speed_and_broken_files_are_passed_over_and_a_stopped_one_has_no_rest(data):
    bad = ({"step": 3}, {"step_s": "x"}, {"elapsed_s": None})
    for number, status in enumerate(bad):
        write(data, f"bad-{number}", **status)
    for name, file, content in (("a", "status.json", b"{"), ("b", "run.toml", b"\xff\xfe")):
        write(data, name)
        (data / "outputs" / name / file).write_bytes(content)
    assert earlier(spec()) is None
    write(data, "stopped", state="stopped")
    assert earlier(spec()).other_s is None and earlier(spec()).step_s == 2.0
