"""A run's job stays pinned through moves, edits and updates; where a person edited its script, it is that script's."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import children
import pytest
from families import fitting, made
from runs_helpers import call, folder_of

import runs
from monitor.resume import next_attempt
from monitor.run_folder import RunFolder
from monitor.state import spec_edited, spec_hash
from runs import job as jobs
from runs.paths import ROOT
from runs.pin import adopted, pinned
from runs.scripts import rendered


def test_a_hostile_name_and_place_hold_through_a_move(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "da ta's $(x)"))
    folder = folder_of(tmp_path, name='写真 `it\'s` $(id) "x"', prompts=["a"], sample_every_n_steps=2)
    job = pinned(folder)
    assert job.flags["output_name"] == folder.name == job.slug
    assert job.flags["output_dir"] == str(folder) and job.flags["sample_prompts"] == f"{folder}/sample_prompts.txt"
    assert rendered(job) == (folder / "train.sh").read_text() == runs.script(runs.load(folder), folder)
    assert not spec_edited(folder)
    moved = tmp_path / "写真 other"
    os.rename(tmp_path / "da ta's $(x)", moved)
    monkeypatch.setenv("HANGPROOF_DATA", str(moved))
    there = moved / "outputs" / folder.name
    assert rendered(pinned(there)) == (there / "train.sh").read_text() == runs.script(runs.load(there), there)
    assert str(folder.parent) not in (there / "train.sh").read_text() + (there / "dataset.toml").read_text()


def test_notes_name_the_script_of_windows_there():
    code = "import importlib, sys; from runs import paths, pin; sys.platform = 'win32'; importlib.reload(paths)"
    said = children.run(f"{code}; pin = importlib.reload(pin); print(pin.EDITED, pin.UNREADABLE, pin.OLDER)").stdout
    assert said.count("train.bat") == 3 and "train.sh" not in said


def test_a_script_edited_by_hand_is_what_every_attempt_runs(tmp_path, data):
    folder = folder_of(tmp_path)
    said: list[str] = []
    text = (folder / "train.sh").read_text().replace("set -eu\n", "set -eu\nulimit -n 4096\n")
    text = text.replace("--network_dim 4", "--network_dim 12")
    (folder / "train.sh").write_text(text)
    job = pinned(folder, said.append)
    assert rendered(job) == text == (folder / "train.sh").read_text() and job.flags["network_dim"] == "12"
    assert len(said) == 1 and "edited by hand" in said[0] and job.spec["rank"] == 12 and "edited" in job.spec
    again = rendered(pinned(folder, said.append), folder / "x-state")
    assert "ulimit -n 4096" in again and "--resume" in again and len(said) == 1
    found = ask(folder, "change", ladder=["workers_0"], changes=[])
    mitigated = rendered(job.patched(found["patch"]), folder / "x-state")
    assert "ulimit -n 4096" in mitigated and "--max_data_loader_n_workers 0" in mitigated and "x-state" in mitigated


def test_a_change_that_keeps_the_steps_is_one_whose_states_can_be_resumed(tmp_path, data):
    """The smaller tier of FLUX has another optimizer; of FLUX.2 klein it has the same."""
    for model, backend, kept in (("flux-dev", "diffusers", {}), ("flux2-klein-4b", "diffusers", {"name": "tier_down"})):
        folder = folder_of(tmp_path, name=model, model=model, backend=backend, tier="20G")
        assert ask(folder, "change", ladder=["tier_down"], changes=[])["name"] == "tier_down"
        found = ask(folder, "change", ladder=["tier_down"], changes=[], keeps=True)
        assert {key: found[key] for key in found if key == "name"} == kept


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_a_script_of_other_tables_gives_its_own_flags(platform):
    """Those of the commands that cache, too; nothing of it is executed."""
    for model, backend in (("z-image", "musubi"), ("flux-dev", "sd-scripts"), ("tiny-flux", "diffusers")):
        one = made(model, backend, fitting(model, backend)[-1])
        job = jobs.resolve(one, Path("/out/my it's run"), platform)
        other = {"batch_size": "3", "mixed_precision": "a b's"}
        older = replace(job, commands=[{**one, "flags": {**one["flags"], **other}} for one in job.commands])
        found = adopted(job, rendered(older))
        assert found is not None and "edited" not in found.spec
        assert rendered(found) == rendered(older)
        assert adopted(job, rendered(job)) == job and adopted(job, "echo hello\n") is None


def test_a_run_of_an_earlier_version_keeps_its_place_in_the_monitor(tmp_path, data):
    folder = folder_of(tmp_path)
    (folder / "job.json").unlink()
    before = spec_hash(folder)
    pinned(folder)
    assert spec_hash(folder) == before and (folder / "job.json").is_file() and not spec_edited(folder)


def test_a_run_of_an_earlier_version_that_was_moved_trains_where_it_and_hangproof_are_now(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "before"))
    folder = folder_of(tmp_path)
    rank = f"--network_dim 12 --log_prefix {tmp_path}/before-x"
    now = (folder / "train.sh").read_text().replace("--network_dim 4", rank)
    (folder / "train.sh").write_text(re.sub(rf'{ROOT}(?=["\n]|/\.venv)', "/gone", now))
    (folder / "job.json").unlink()
    (tmp_path / "before").rename(tmp_path / "now")
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "now"))
    folder = tmp_path / "now/outputs" / folder.name
    job = pinned(folder)
    assert rendered(job) == (folder / "train.sh").read_text() == now.replace("/before/", "/now/")
    assert job.flags["output_dir"] == str(folder) and job.flags["network_dim"] == "12"


def test_a_data_set_file_edited_by_hand_is_written_again_before_the_first_attempt_as_before_all(tmp_path, data):
    folder = folder_of(tmp_path)
    before = (folder / "dataset.toml").read_text()
    (folder / "dataset.toml").write_text(before.replace("resolution = 512", "resolution = 256"))
    assert (folder / "dataset.toml").read_text() != before
    done = ask(folder, "problems")
    assert (folder / "dataset.toml").read_text() == before
    assert "dataset.toml said something else" in done["notes"][0] and ask(folder, "problems")["notes"] == []


def ask(folder: Path, want: str, **more) -> dict:
    """What the process that the monitor asks answers."""
    return next_attempt.respond(folder, {"want": want, **more})


def test_a_damaged_job_is_an_error_that_names_the_key_and_that_render_corrects(tmp_path, data, monkeypatch):
    folder = folder_of(tmp_path)
    good = json.loads((folder / "job.json").read_text())
    wrong = [({key: value}, key) for key in good for value in (None, 5, [5])]
    wrong += [({"spec": good["spec"] | {key: [5]}}, key) for key in ("name", "backend", "nodes", "secrets", "edited")]
    wrong += [({"spec": good["spec"] | {"backend": "gone"}}, "spec.backend"), ({"places": {"run": "/x"}}, "'root'")]
    wrong += [({"commands": commands}, key) for commands, key in (([], "commands"), ([{}], "'flags'"))]
    for change, key in [*wrong, ({"dataset": {"a": None}}, "TOML")]:
        (folder / "job.json").write_text(json.dumps(good | change))
        with pytest.raises(runs.RunError, match=f"job.json cannot be read: .*{key}.*python -m runs render my-lora"):
            pinned(folder)
    assert call("runs", "render", "my-lora").returncode == 0 and pinned(folder).flags
    monkeypatch.setattr("pathlib.Path.read_text", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(runs.RunError, match="job.json cannot be read: Input/output error; check its disk and its perm"):
        jobs.load(folder)  # without the advice to replace what is not damaged


def test_a_spec_that_this_version_refuses_still_resumes(tmp_path, data):
    """An update that removes a tier or renames a model ends no run."""
    folder = folder_of(tmp_path)
    job = pinned(folder)
    gone = replace(job, spec={**job.spec, "tier": "11G"})
    (folder / "job.json").write_text(jobs.dumps(gone))
    assert "refuses the run's spec" in ask(folder, "problems")["notes"][-1]
    assert ask(folder, "script", number=2, resume=str(folder / "x-state"), was=[])["compatible"]
    assert rendered(job, folder / "x-state") == (folder / "train.attempt-2.sh").read_text()


def test_what_only_the_monitor_reads_is_taken_from_run_toml_at_each_start(tmp_path, data):
    folder = folder_of(tmp_path)
    runs.save(folder, runs.load(folder).changed(spend_limit=5.0, gpus=2))
    found = RunFolder(folder).spec
    assert found["spend_limit"] == 5.0 and found["gpus"] == 1
    (folder / "run.toml").write_text("not TOML")
    assert not RunFolder(folder).foreign and RunFolder(folder).spec["model"] == "flux-dev"
