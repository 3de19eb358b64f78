"""A run is resolved once: every attempt runs its job.json, whatever the tables or run.toml say since."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder_runs import CRASHES, FORK, TRAINER
from monitor_helpers import ROOT, environment, events, finish, status, wait_for
from runs_helpers import pictures, spec

import runs
from launch import bundle
from monitor.run_folder import RunFolder
from monitor.state import RunState, spec_edited, spec_hash
from runs import job as jobs
from runs import manage, mitigate
from runs.command import words
from runs.pin import adopted, pinned
from runs.scripts import rendered
from tests.unit.presets.test_families import MODELS, PLATFORMS, fitting, made

PARTS = ("guards", "monitor", "presets", "runs")
# It notes its arguments, refuses a state of another optimizer as a real one does, and fails in attempt 1 once it may.
KEEN = """
attempt = os.environ["HANGPROOF_ATTEMPT"]
Path(os.environ["NOTES"], f"arguments-{attempt}.json").write_text(json.dumps(sys.argv[1:]))
if args.resume and (args.resume / "optimizer.txt").read_text() != args.optimizer_type:
    sys.exit("the state has another optimizer")
hb.plan(40)"""
WAITS = """
if attempt == "1":
    Path(os.environ["NOTES"], "at-25").touch()
    while not Path(os.environ["NOTES"], "go").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
"""


class Program:
    """A copy of Hangproof that can be updated, and a run made with it."""

    def __init__(self, place: Path):
        self.place, self.root, self.data = place, place / "program", place / "data"
        for part in PARTS:
            shutil.copytree(ROOT / part, self.root / part, ignore=shutil.ignore_patterns("__pycache__"))
        (place / "trainer.py").write_text(TRAINER.replace("\nhb.plan(40)", KEEN).replace(str(ROOT), str(self.root)))
        (place / "limits.toml").write_text(CRASHES)
        program = place / "python"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {place}/trainer.py "$@"\n')
        program.chmod(0o755)
        self.folder = self.data / "outputs" / "cat"
        more = {
            "HANGPROOF_DATA": str(self.data),
            "TRAINER_PYTHON": str(program),
            "NOTES": str(place),
            "TOY_FAULT": WAITS,
        }
        self.data.mkdir()
        self.env = environment(self.data, **more, HANGPROOF_LIMITS=str(place / "limits.toml"))
        images = pictures(place / "in", 2)
        self.call(
            "runs", "new", "--name", "cat", "--images", images, "--model", "tiny-flux", "--set", "max_train_steps=40"
        )

    def call(self, module: str, *arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.root, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    def train(self, meanwhile) -> None:
        """Supervise the run; `meanwhile` is called while attempt 1 waits for its crash."""
        command = [sys.executable, "-m", "monitor", "run", "cat"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=self.root, env=self.env, stdout=pipe, stderr=pipe, text=True)
        wait_for((self.place / "at-25").exists, 120)
        meanwhile()
        (self.place / "go").touch()
        code, _, err = finish(process)
        assert code == 0, (status(self.folder), err[-2000:], (self.folder / "training.log").read_text()[-2000:])

    def arguments(self, attempt: int) -> list[str]:
        """What the trainer got, without where it resumed from."""
        words = json.loads((self.place / f"arguments-{attempt}.json").read_text())
        if "--resume" in words:
            at = words.index("--resume")
            assert "-step00000020-state" in words[at + 1]
            del words[at : at + 2]
        return words

    def update(self) -> None:
        """Another version: each tier has another optimizer."""
        for path in (self.root / "presets" / "families").glob("*.toml"):
            text = re.sub(r'optimizer_type = "\w+"', 'optimizer_type = "prodigy"', path.read_text())
            path.write_text(re.sub(r"optimizer_args = \[.*\]", "optimizer_args = []", text))


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def test_an_update_between_a_crash_and_the_restart_changes_nothing(program):
    program.train(program.update)
    assert program.arguments(2) == program.arguments(1) and "prodigy" not in program.arguments(2)
    assert status(program.folder)["restarts"] == 1 and not list(program.folder.glob("*.bad"))
    before = (program.folder / "job.json").read_bytes()
    said = program.call("runs", "render", "cat").stderr
    assert "changed: --optimizer_type: " in said and " → prodigy" in said and "cannot go on from its states" in said
    assert (program.folder / "job.json").read_bytes() != before
    assert "--optimizer_type prodigy" in (program.folder / "train.sh").read_text()


def test_an_edited_run_toml_changes_no_attempt_until_the_run_is_made_again(program):
    def edit(old: str, new: str) -> None:
        path = program.folder / "run.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    edit("\nrank = 4", "\nrank = 64")
    program.train(lambda: edit("\nlearning_rate = ", "\nlearning_rate = 1"))
    assert program.arguments(2) == program.arguments(1) and "64" not in program.arguments(2)
    (said,) = [e["message"] for e in events(program.folder) if "run.toml was edited" in e["message"]]
    assert "python -m runs render cat" in said
    assert "changed: --network_dim: 4 → 64" in program.call("runs", "render", "cat").stderr
    assert "--network_dim 64" in (program.folder / "train.sh").read_text() and not spec_edited(program.folder)


def test_a_change_of_the_ladder_is_recorded_and_leaves_the_job_alone(run, monkeypatch):
    kept = {}
    create = runs.create

    def keep(*args):
        kept["folder"] = create(*args)
        kept["job"] = (kept["folder"] / "job.json").read_bytes()
        return kept["folder"]

    monkeypatch.setattr(runs, "create", keep)
    folder, code = run(FORK, workers=2)
    assert code == 0 and (folder / "job.json").read_bytes() == kept["job"]
    (mitigated,), (again,) = events(folder, "mitigated"), events(folder, "restarted")
    assert (
        mitigated["patch"]["commands"]["0"]["flags"]["max_data_loader_n_workers"] == 0
        and "spec" not in mitigated["patch"]
    )
    assert again["changes"] == ["workers_0"]
    (change,) = RunState.load(RunFolder(folder)).changes
    job = pinned(folder).patched(change["patch"])
    state = folder / "Ladder-1-step00000020-state"
    assert rendered(job, state) == (folder / "train.attempt-2.sh").read_text() and job.spec["workers"] == 0


def test_a_run_of_an_earlier_version_trains_what_its_script_says(run, monkeypatch):
    create = runs.create

    def older(*args):
        folder = create(*args)
        (folder / "job.json").unlink()
        text = (folder / "train.sh").read_text()
        (folder / "train.sh").write_text(re.sub(r"--optimizer_type \w+", "--optimizer_type older", text))
        return folder

    monkeypatch.setattr(runs, "create", older)
    folder, code = run(FORK, workers=2)
    assert code == 0
    text = (folder / "train.attempt-2.sh").read_text()
    assert "--optimizer_type older" in text and "--max_data_loader_n_workers 0" in text
    assert len([e for e in events(folder, "job") if "an earlier version" in e["message"]]) == 1
    assert pinned(folder).flags["optimizer_type"] == "older"


# Without a training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_a_job_from_its_file_is_the_script_of_its_spec_byte_for_byte(model, backend):
    """Each family × tier × platform, with each thing that a script can have."""
    variants = [{}, {"gpus": 2}, {"save_dir": "/fast disk"}, {"trackers": "tensorboard"}]
    folder = Path("/out/my it's run")
    for number, tier in enumerate(fitting(model, backend)):
        one = made(model, backend, tier, **variants[number % len(variants)])
        for platform in PLATFORMS:
            job = jobs.resolve(one, folder, platform)
            again = jobs.loads(jobs.dumps(job))
            assert again == job
            for resume in (None, Path("/out/x-state")):
                assert rendered(again, resume) == runs.script(one, folder, resume, platform)


HOSTILE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=20)


@settings(max_examples=20, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_hostile_values_come_through_the_file_and_the_shell(trigger, value, other):
    """Bash reads exactly the words of the job, and a patch made of two jobs gives the second."""
    plain = spec(trigger=trigger, extra={"training_comment": value})
    folder = Path(f"/tmp/写真 $(id) it's `x` {os.getpid()}")
    job = jobs.loads(jobs.dumps(jobs.resolve(plain, folder)))
    changed = plain.changed(extra={"training_comment": other}, environment={"A": other}, gpus=2)
    patch = json.loads(json.dumps(jobs.difference(job, jobs.resolve(changed, folder))))
    assert job.patched(patch).trains() == jobs.resolve(changed, folder).trains()
    command = rendered(job).split('\nexec "$python"', 1)[1]
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
    read = done.stdout.decode("utf-8", "surrogateescape").split("\0")[2:-1]
    assert read == [word for line in words(job.flags) for word in line]


def folder_of(tmp_path, **fields) -> Path:
    return runs.create(spec(**fields), pictures(tmp_path / "in"))


def test_a_hostile_name_and_place_hold_through_a_rename_and_a_move(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "da ta's $(x)"))
    folder = folder_of(tmp_path, name='写真 `it\'s` $(id) "x"', prompts=["a"], sample_every_n_steps=2)
    before = pinned(folder)

    class Idle:
        def __init__(self, _):
            pass

        def __enter__(self):
            return True

        def __exit__(self, *_):
            pass

    folder = manage.rename(folder, "other %PATH% & 写真2", Idle)
    job = pinned(folder)
    assert job.digest == before.digest and job.flags["output_name"] == folder.name == job.slug
    assert job.flags["output_dir"] == str(folder) and job.flags["sample_prompts"] == f"{folder}/sample_prompts.txt"
    assert rendered(job) == (folder / "train.sh").read_text() == runs.script(runs.load(folder), folder)
    assert not spec_edited(folder)
    moved = tmp_path / "写真 other"
    os.rename(tmp_path / "da ta's $(x)", moved)
    monkeypatch.setenv("HANGPROOF_DATA", str(moved))
    there = moved / "outputs" / folder.name
    assert rendered(pinned(there)) == (there / "train.sh").read_text() == runs.script(runs.load(there), there)
    assert str(folder.parent) not in (there / "train.sh").read_text() + (there / "dataset.toml").read_text()


def old_tables(folder: Path, monkeypatch) -> jobs.Job:
    """The job of a run that was made with other tables than those of now."""
    job = pinned(folder)
    patch = {"commands": {"0": {"flags": {"optimizer_type": "older", "optimizer_args": ["a=1"]}}}}
    from runs.pin import write

    return write(folder, job.patched(patch))


def test_a_longer_training_keeps_what_the_tables_said_when_the_run_was_made(tmp_path, data, monkeypatch):
    folder = folder_of(tmp_path, epochs=2)
    old_tables(folder, monkeypatch)
    runs.train_longer(folder, 5)
    job = pinned(folder)
    assert job.flags["optimizer_type"] == "older" and job.flags["max_train_epochs"] == 5 == runs.load(folder).epochs
    assert "--max_train_epochs 5" in (folder / "train.sh").read_text() and not spec_edited(folder)


def test_a_bundle_trains_what_the_run_trained(tmp_path, data, monkeypatch):
    folder = folder_of(tmp_path, save_dir="/fast disk", store="/mnt/store")
    old_tables(folder, monkeypatch)
    packed = {entry.name: entry.source for entry in bundle.entries(runs.load(folder), None, models=False)}
    there = tmp_path / "there" / "outputs" / folder.name
    there.mkdir(parents=True)
    for name in ("run.toml", "job.json", "dataset.toml"):
        content = packed[f"outputs/{folder.name}/{name}"]
        assert isinstance(content, bytes) and str(tmp_path).encode() not in content and b"/mnt" not in content
        (there / name).write_bytes(content)
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "there"))
    job = pinned(there)
    assert job.flags["optimizer_type"] == "older" and job.flags["output_dir"] == str(there)
    assert job.dataset["datasets"][0]["subsets"][0]["image_dir"] == f"{tmp_path}/there/datasets/{folder.name}"
    assert "--optimizer_type older" in (there / "train.sh").read_text() and not spec_edited(there)


def test_a_mitigation_starts_from_the_job_and_touches_nothing_else(tmp_path, data, monkeypatch):
    folder = folder_of(tmp_path, batch_size=2, tier="20G")
    job = old_tables(folder, monkeypatch)
    runs.save(folder, runs.load(folder).changed(batch_size=1))
    patch, sentence = mitigate.change(job, "batch_1")
    after = job.patched(patch)
    assert "batch size 1 instead of 2" in sentence and after.dataset["datasets"][0]["batch_size"] == 1
    assert after.flags == {**job.flags, "gradient_accumulation_steps": 2} and mitigate.same_state(job, after)
    assert mitigate.change(after, "batch_1") == ({}, "")
    smaller = job.patched(mitigate.change(job, "tier_down")[0])
    assert smaller.spec["tier"] == "16G" and not mitigate.same_state(job, smaller)


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


@pytest.mark.parametrize(
    ("model", "backend"), [("z-image", "musubi"), ("flux-dev", "sd-scripts"), ("tiny-flux", "diffusers")]
)
@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_a_script_of_other_tables_gives_its_own_flags(model, backend, platform):
    """Those of the commands that cache, too; nothing of it is executed."""
    one = made(model, backend, fitting(model, backend)[-1])
    job = jobs.resolve(one, Path("/out/my it's run"), platform)
    older = replace(
        job,
        commands=[{**c, "flags": {**c["flags"], "batch_size": "3", "mixed_precision": "a b's"}} for c in job.commands],
    )
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


def test_a_data_set_file_edited_by_hand_is_written_again_before_the_first_attempt_as_before_all(tmp_path, data):
    folder = folder_of(tmp_path)
    before = (folder / "dataset.toml").read_text()
    (folder / "dataset.toml").write_text(before.replace("resolution = 512", "resolution = 256"))
    assert (folder / "dataset.toml").read_text() != before
    done = ask(folder, data, "--problems")
    assert (folder / "dataset.toml").read_text() == before
    assert "dataset.toml said something else" in done["notes"][0] and ask(folder, data, "--problems")["notes"] == []


def ask(folder: Path, data: Path, *arguments: str) -> dict:
    """What the monitor's subprocess answers."""
    command = [sys.executable, "-m", "monitor.resume.script", str(folder), *arguments]
    env = {**os.environ, "HANGPROOF_DATA": str(data)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_damaged_job_is_an_error_that_render_corrects(tmp_path, data):
    folder = folder_of(tmp_path)
    (folder / "job.json").write_text('{"commands": []}')
    with pytest.raises(runs.RunError, match="job.json cannot be read: .*python -m runs render my-lora"):
        pinned(folder)
    assert main(["render", "my-lora"]) == 0 and pinned(folder).flags


def test_a_spec_that_this_version_refuses_still_resumes(tmp_path, data):
    """An update that removes a tier or renames a model ends no run."""
    folder = folder_of(tmp_path)
    job = pinned(folder)
    gone = replace(job, spec={**job.spec, "tier": "11G"})
    (folder / "job.json").write_text(jobs.dumps(gone))
    assert "refuses the run's spec" in ask(folder, data, "--problems")["notes"][-1]
    assert ask(folder, data, "--attempt", "2", "--resume", str(folder / "x-state"))["compatible"]
    assert rendered(job, folder / "x-state") == (folder / "train.attempt-2.sh").read_text()


def test_what_only_the_monitor_reads_is_taken_from_run_toml_at_each_start(tmp_path, data):
    folder = folder_of(tmp_path)
    runs.save(folder, runs.load(folder).changed(spend_limit=5.0, gpus=2))
    found = RunFolder(folder).spec
    assert found["spend_limit"] == 5.0 and found["gpus"] == 1
    (folder / "run.toml").write_text("not TOML")
    assert not RunFolder(folder).foreign and RunFolder(folder).spec["model"] == "flux-dev"


def main(arguments: list[str]) -> int:
    from runs.__main__ import main as command

    return command(arguments)
