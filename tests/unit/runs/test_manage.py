"""Runs are deleted completely or not at all, and only inside the two folders; a rename is a label."""

import errno
import json
import os
import re
import subprocess
from unittest.mock import Mock

import pytest
from runs_helpers import call, contents, made, sources, written
from ui_helpers import lora_file, photos

import runs
from monitor.process.platform import LOCK, Lock
from monitor.process.spawned import idle
from monitor.state import spec_hash
from runs import manage
from ui.run import view


def new_run(name: str = "first light"):
    """A run with one image, a LoRA and a state, stopped at step 8."""
    spec = runs.make({"name": name, "model": "tiny-flux", "backend": "diffusers", "trigger": "tok"})
    folder = runs.create(spec, sources(photos("coffee.png")))
    lora_file(folder / f"{folder.name}.safetensors", 8)
    written(folder / f"{folder.name}-step00000008-state" / "hangproof.json", "{}")
    (folder / "status.json").write_text(json.dumps({"name": name, "folder": str(folder), "state": "stopped"}))
    (folder / "monitor.json").write_text(json.dumps({"version": 2, "state": "stopped", "spec_hash": spec_hash(folder)}))
    return folder


def test_a_deleted_run_frees_what_was_said_and_keeps_its_images_unless_asked(data):
    folder, other = new_run(), new_run("other")
    (folder / "big.bin").write_bytes(b"x" * 3_000_000)
    used = manage.usage("first light")
    assert used.run_bytes > 3_000_000 and used.images == 1 and used.images_bytes > 1000
    before = contents(other)
    assert manage.delete("first light", idle) == used.run_bytes
    assert not folder.exists() and (runs.datasets_dir() / "first-light").is_dir()
    assert contents(other) == before and [p.name for p in runs.outputs_dir().iterdir()] == ["other"]


@pytest.mark.parametrize("monitor", [True, False])
def test_a_run_that_is_monitored_or_whose_training_lives_is_not_deleted(data, monitor):
    folder, lock = new_run(), None
    env = {**os.environ, "HANGPROOF_RUN": "/another" if monitor else str(folder), "HANGPROOF_TOKEN": "0" * 32}
    training = subprocess.Popen(["sleep", "60"], env=env)
    try:
        if monitor:
            lock = Lock(folder / LOCK)
            assert lock.acquire()
        with pytest.raises(runs.RunError, match="first-light runs or is being"):
            manage.delete("first light", idle, images=True)
    finally:
        training.kill()
        training.wait()
        if lock:
            lock.release()
    assert folder.is_dir()


def test_a_link_is_not_followed(data, tmp_path):
    outside = made(tmp_path / "outside")
    (outside / "run.toml").write_text('name = "x"\n')
    (outside / "precious").write_text("keep")
    runs.outputs_dir().mkdir(parents=True)
    (runs.outputs_dir() / "x").symlink_to(outside)
    for target in ("x", outside):
        with pytest.raises(runs.RunError, match="by hand"):
            manage.delete(target, idle, images=True)
        with pytest.raises(runs.RunError, match="by hand"):
            manage.rename(target, "y")
    folder = new_run()
    (folder / "inside").symlink_to(outside)
    images = runs.datasets_dir() / "first-light"
    for path in images.iterdir():
        path.rename(outside / path.name)
    images.rmdir()
    images.symlink_to(outside)
    with pytest.raises(runs.RunError, match="is a link"):
        manage.delete("first light", idle, images=True)
    assert folder.is_dir()  # refused before anything was renamed
    manage.delete("first light", idle)
    assert (outside / "precious").read_text() == "keep" and images.is_symlink()


@pytest.mark.parametrize("images", [False, True])
def test_an_interrupted_deletion_leaves_no_half_run_and_is_completed_later(data, monkeypatch, images):
    new_run()
    (runs.datasets_dir() / "light").mkdir()  # a data set of another name
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            manage.delete("first light", idle, images)
    assert runs.list_runs() == []
    new_run("another")
    manage.delete("another", idle, True)
    assert list(runs.outputs_dir().iterdir()) == []
    assert {p.name for p in runs.datasets_dir().iterdir()} == {"light", *(["first-light"] * (not images))}


@pytest.mark.parametrize("synced", [False, True])
def test_a_run_whose_images_cannot_be_deleted_stays_whole(data, monkeypatch, synced):
    folder, rename = new_run(), os.replace
    monkeypatch.setattr("guards.checkpoint.fsync_path", Mock(side_effect=None if synced else OSError(errno.EIO, "I/O")))

    def busy(old, new) -> None:
        if old.parent == runs.datasets_dir():
            raise OSError(errno.EBUSY, "Device or resource busy")  # a mount, or on Windows an open file
        rename(old, new)

    monkeypatch.setattr("os.replace", busy)
    with pytest.raises(runs.RunError, match="cannot delete first-light: Device or resource busy"):
        manage.delete("first light", idle, images=True)
    assert runs.list_runs() == [folder] and list(runs.outputs_dir().iterdir()) == [folder]


def test_a_renamed_run_has_another_label_and_keeps_its_files(data):
    folder = new_run()
    before = contents(folder)
    manage.rename("first light", " 写真 <b>\n$(id)\0 ")
    assert manage.label_of(folder) == view.read(folder).name == "写真 <b> $(id)"
    assert before.items() <= contents(folder).items() and runs.load(folder).name == "first light"
    manage.rename(folder, "second")
    assert view.read(folder).name == "second" and runs.list_runs() == [folder]
    for wrong in (" \n", "x" * 201):
        with pytest.raises(runs.RunError, match="1 to 200 characters"):
            manage.rename("first light", wrong)


def test_the_commands_have_their_exit_codes(data):
    new_run()
    sizes = (999_500_000, 999_400_000, 1_260_000, 0)
    assert list(map(manage.size_text, sizes)) == ["1.0 GB", "999.4 MB", "1.3 MB", "0 kB"]
    done = call("jobs", "delete", "first light")
    assert done.returncode == 1 and re.search(r"frees \d.* add --yes", done.stderr)
    done = call("jobs", "delete", "first light", "--images", "--yes", "--json")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["freed_bytes"] > 1000
    assert runs.list_runs() == [] and os.listdir(runs.datasets_dir()) == []
