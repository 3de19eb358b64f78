"""A run is resolved once: every attempt runs its job.json, whatever the tables or run.toml say since."""

import json
from pathlib import Path

import pytest
from families import FAMILIES, PLATFORMS, fitting, made
from hypothesis import given, settings, strategies as st
from runs_helpers import call, contents, folder_of, spec

import runs
from launch import bundle
from monitor.resume import next_attempt
from monitor.state import spec_edited
from runs import job as jobs, mitigate
from runs.pin import pinned
from runs.scripts import rendered, write


@pytest.mark.parametrize(("model", "backend"), [*FAMILIES, ("flux-dev", "diffusers")])
def test_a_job_from_its_file_is_the_script_of_its_spec_byte_for_byte(model, backend):
    """Each family and tier, each platform and thing that a script can have in turn."""
    variants = [{}, {"gpus": 2}, {"save_dir": "/fast disk"}, {"trackers": "tensorboard"}]
    folder = Path("/out/my it's run")
    for number, tier in enumerate(fitting(model, backend)):
        one = made(model, backend, tier, **variants[number % len(variants)])
        for platform in {"linux", PLATFORMS[number % 3]}:
            job = jobs.resolve(one, folder, platform)
            again = jobs.loads(jobs.dumps(job))
            assert again == job
            for resume in (None, Path("/out/x-state")):
                assert rendered(again, resume) == runs.script(one, folder, resume, platform)


HOSTILE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=20)


@settings(max_examples=20, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_hostile_values_come_through_the_file_and_a_patch(trigger, value, other):
    """A patch made of two jobs gives the second. What bash reads of the script: test_quoting.py."""
    plain, folder = spec(trigger=trigger, extra={"training_comment": value}), Path("/tmp/写真 $(id) it's `x`")
    job = jobs.loads(jobs.dumps(jobs.resolve(plain, folder)))
    changed = plain.changed(extra={"training_comment": other}, environment={"A": other}, gpus=2)
    patch = json.loads(json.dumps(jobs.difference(job, jobs.resolve(changed, folder))))
    assert job.patched(patch).trains() == jobs.resolve(changed, folder).trains()


def old_tables(folder: Path) -> jobs.Job:
    """The job of a run that was made with other tables than those of now."""
    patch = {"commands": {"0": {"flags": {"optimizer_type": "older", "optimizer_args": ["a=1"]}}}}
    return write(folder, pinned(folder).patched(patch))


def test_neither_an_update_nor_an_edit_changes_an_attempt_until_the_run_is_made_again(tmp_path, data):
    folder = folder_of(tmp_path)
    before = old_tables(folder)
    runs.save(folder, runs.load(folder).changed(rank=64))
    assert spec_edited(folder)
    (note,) = next_attempt.respond(folder, {"want": "problems"})["notes"]
    assert note.startswith("run.toml was edited; every attempt still runs job.json")
    files = contents(folder)
    assert runs.write_attempt(folder, before, 1) == folder / "train.sh"
    request = {"want": "script", "number": 2, "resume": str(folder / "x-state"), "was": []}  # as the monitor asks
    assert next_attempt.respond(folder, request)["compatible"] and pinned(folder) == before
    text = (folder / "train.attempt-2.sh").read_text()
    assert contents(folder) == files | {"train.attempt-2.sh": text.encode()}, "a script of its own"
    assert text == rendered(before, folder / "x-state") and "older" in text and "--network_dim 4 " in text
    said = call("runs", "render", folder.name).stderr
    assert all(f"changed: {line} \\\n" in said for line in ("-  --network_dim 4", "+  --network_dim 64"))
    assert "changed: -  --optimizer_type older \\\n" in said
    assert "--network_dim 64" in (folder / "train.sh").read_text() and not spec_edited(folder)


def test_a_bundle_trains_what_the_run_trained(tmp_path, data, monkeypatch):
    folder = folder_of(tmp_path, save_dir="/fast disk", store="/mnt/store")
    old_tables(folder)
    packed = dict(bundle.entries(runs.load(folder), None, models=False))
    there = tmp_path / "there" / "outputs" / folder.name
    there.mkdir(parents=True)
    for name in ("run.toml", "job.json"):
        content = packed[f"outputs/{folder.name}/{name}"]
        assert isinstance(content, bytes) and str(tmp_path).encode() not in content and b"/mnt" not in content
        (there / name).write_bytes(content)
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "there"))
    job = pinned(there)
    assert job.flags["optimizer_type"] == "older" and job.flags["output_dir"] == str(there)
    assert job.dataset["datasets"][0]["subsets"][0]["image_dir"] == f"{tmp_path}/there/datasets/{folder.name}"
    assert "--optimizer_type older" in (there / "train.sh").read_text() and not spec_edited(there)


def test_a_longer_training_and_a_mitigation_start_from_the_job_and_touch_nothing_else(tmp_path, data):
    folder = folder_of(tmp_path, batch_size=2, tier="20G", epochs=2)
    old_tables(folder)
    runs.train_longer(folder, 5)
    job = pinned(folder)
    assert job.flags["optimizer_type"] == "older" and job.flags["max_train_epochs"] == 5 == runs.load(folder).epochs
    assert "--max_train_epochs 5" in (folder / "train.sh").read_text() and not spec_edited(folder)
    runs.save(folder, runs.load(folder).changed(batch_size=1))
    patch, sentence = mitigate.change(job, "batch_1")
    after = job.patched(patch)
    assert "batch size 1 instead of 2" in sentence and after.dataset["datasets"][0]["batch_size"] == 1
    assert after.flags == {**job.flags, "gradient_accumulation_steps": 2} and mitigate.same_state(job, after)
    assert mitigate.change(after, "batch_1") == ({}, "")
    smaller = job.patched(mitigate.change(job, "tier_down")[0])
    assert smaller.spec["tier"] == "16G" and not mitigate.same_state(job, smaller)
