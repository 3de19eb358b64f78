"""Runs are deleted and renamed completely or not at all, and only inside the two folders."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from runs_helpers import call
from ui_helpers import lora_file, photos

import runs
from monitor.process.locks import LOCK, Lock
from monitor.process.tree import idle
from monitor.state import spec_hash
from runs import manage
from ui.run import view


def new_run(name: str = "first light", **fields) -> Path:
    """A run with one image, a LoRA, a state and a sample, stopped at step 8."""
    spec = runs.make({"name": name, "model": "tiny-flux", "backend": "diffusers", "trigger": "tok", **fields})
    folder = runs.create(spec, photos("coffee.png"))
    slug = folder.name
    lora_file(folder / f"{slug}.safetensors", 8)
    lora_file(folder / f"{slug}-step00000008.safetensors", 8)
    state = folder / f"{slug}-step00000008-state"
    state.mkdir()
    (state / "hangproof.json").write_text("{}")
    (folder / "sample").mkdir()
    (folder / "sample" / f"{slug}_000008_00_20260101120000_42.png").write_bytes(b"x")
    status = {"name": name, "folder": str(folder), "state": "stopped", "lora": str(folder / f"{slug}.safetensors")}
    status |= {"message": f"stopped at step 8; checkpoint: {state.name}", "checkpoint": {"path": str(state), "step": 8}}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "monitor.json").write_text(json.dumps({"version": 2, "state": "stopped", "spec_hash": spec_hash(folder)}))
    return folder


def everything(root: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


# Delete ---------------------------------------------------------------------------------------------------------------


def test_a_deleted_run_frees_what_was_said_and_keeps_its_images_unless_asked(data):
    folder, other = new_run(), new_run("other")
    (folder / "big.bin").write_bytes(b"x" * 3_000_000)
    used = manage.usage("first light")
    assert used.run_bytes > 3_000_000 and used.images == 1 and used.images_bytes > 1000
    before = everything(other)
    assert manage.delete("first light", idle) == used.run_bytes
    assert not folder.exists() and (runs.datasets_dir() / "first-light").is_dir()
    assert everything(other) == before and [p.name for p in runs.outputs_dir().iterdir()] == ["other"]
    manage.delete("other", idle, images=True)
    assert not (runs.datasets_dir() / "other").exists()


def test_a_running_run_is_neither_deleted_nor_renamed(data):
    folder = new_run()
    lock = Lock(folder / LOCK)
    assert lock.acquire()
    try:
        for action in (lambda: manage.delete("first light", idle), lambda: manage.rename("first light", "x", idle)):
            with pytest.raises(runs.RunError, match="is running; stop it first"):
                action()
    finally:
        lock.release()
    assert folder.is_dir()


def test_a_run_whose_training_lives_without_a_monitor_is_not_deleted(data):
    folder = new_run()
    training = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "HANGPROOF_RUN": str(folder), "HANGPROOF_TOKEN": "0" * 32}
    )
    try:
        with pytest.raises(runs.RunError, match="is running"):
            manage.delete("first light", idle, images=True)
    finally:
        training.kill()
        training.wait()
    assert folder.is_dir()


def test_a_link_is_not_followed(data, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run.toml").write_text('name = "x"\n')
    (outside / "precious").write_text("keep")
    runs.outputs_dir().mkdir(parents=True)
    (runs.outputs_dir() / "x").symlink_to(outside)
    for target in ("x", outside):
        with pytest.raises(runs.RunError, match="by hand"):
            manage.delete(target, idle, images=True)
        with pytest.raises(runs.RunError, match="by hand"):
            manage.rename(target, "y", idle)
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

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            manage.delete("first light", idle, images)
    assert runs.list_runs() == []
    manage.empty_trash()
    assert list(runs.outputs_dir().iterdir()) == []
    assert [p.name for p in runs.datasets_dir().iterdir()] == ([] if images else ["first-light"])


@pytest.mark.parametrize("name", ["images-cat", "images-images-cat", "0badcafe-images-cat"])
def test_a_deleted_run_takes_no_data_set_of_another_name_with_it(data, name):
    """Its folder's name in the trash must not read as "and the images of cat"."""
    new_run(name)
    images = runs.datasets_dir() / "cat"  # of no run, so nothing else protects it
    images.mkdir()
    (images / "a.png").write_bytes(b"precious")
    manage.delete(name, idle)
    assert (images / "a.png").read_bytes() == b"precious" and (runs.datasets_dir() / name).is_dir()
    old = runs.outputs_dir() / f"{manage.TRASH}0badcafe-images-cat"  # of an earlier version: a run of either name
    old.mkdir()
    manage.empty_trash()
    assert (images / "a.png").is_file() and not old.exists()


# Rename ---------------------------------------------------------------------------------------------------------------


def test_a_renamed_run_is_consistent(data):
    old = new_run()
    folder = manage.rename("first light", "Second Light!", idle)
    assert folder == runs.outputs_dir() / "Second-Light" and not old.exists()
    assert not (runs.datasets_dir() / "first-light").exists()
    made = {p.name.removeprefix("Second-Light") for p in folder.iterdir() if p.name.startswith("Second")}
    assert made == {"-step00000008-state", "-step00000008.safetensors", ".safetensors"}
    assert [p.name for p in (folder / "sample").iterdir()] == ["Second-Light_000008_00_20260101120000_42.png"]
    assert runs.load(folder).name == "Second Light!"
    for name, content in everything(folder).items():
        assert b"first-light" not in content, name
    assert str(runs.datasets_dir() / "Second-Light") in (folder / "dataset.toml").read_text()
    assert subprocess.run(["bash", "-n", folder / "train.sh"], check=False).returncode == 0
    status = json.loads((folder / "status.json").read_text())
    assert Path(status["checkpoint"]["path"]).is_dir() and Path(status["lora"]).is_file()
    assert json.loads((folder / "monitor.json").read_text())["spec_hash"] == spec_hash(folder)
    assert not [p for p in folder.iterdir() if "rename" in p.name]


@pytest.mark.parametrize("name", ["train", "dataset", "sample", "run", "status", "monitor"])
def test_a_run_named_like_its_files_keeps_them(data, name):
    new_run(name)
    folder = manage.rename(name, "other", idle)
    assert {"train.sh", "dataset.toml", "sample_prompts.txt", "run.toml", "status.json"} <= set(os.listdir(folder))
    assert runs.load(folder).name == "other"


def test_only_the_spelling_and_only_the_case_can_change(data):
    new_run()
    assert manage.rename("first light", "first-light", idle).name == "first-light"
    assert runs.load(runs.outputs_dir() / "first-light").name == "first-light"
    assert manage.rename("first-light", "First Light", idle).name == "First-Light"
    assert os.listdir(runs.outputs_dir()) == ["First-Light"] and os.listdir(runs.datasets_dir()) == ["First-Light"]


@pytest.mark.parametrize(
    "name, problem", [("OTHER", "exists already"), ("other", "exists already"), ("!!", "letter or digit")]
)
def test_a_name_that_cannot_be_used_changes_nothing(data, name, problem):
    new_run(), new_run("other")
    before = everything(data)
    with pytest.raises(runs.RunError, match=problem):
        manage.rename("first light", name, idle)
    after = {k: v for k, v in everything(data).items() if not k.endswith(LOCK)}
    assert after == {k: v for k, v in before.items() if not k.endswith(LOCK)}


def renamed_until(kills: int, monkeypatch) -> bool:
    """Rename the run, killed before its rename of a file or folder with this number; whether it was killed."""
    done = [0]

    def killed(kind):
        def call(*arguments, **more):
            if done[0] == kills:
                raise KeyboardInterrupt
            done[0] += 1
            return kind(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", killed(os.rename))
        patch.setattr("os.replace", killed(os.replace))
        try:
            manage.rename("first light", "second", idle)
        except KeyboardInterrupt:
            return True
    return False


def test_a_rename_that_is_killed_anywhere_is_untouched_or_completed_by_the_next_look(tmp_path, monkeypatch):
    slugs = []
    for kills in range(100):
        monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / str(kills)))
        new_run()
        killed = renamed_until(kills, monkeypatch)
        view.read_all()  # the page's next look completes it
        [folder] = runs.list_runs()
        slug = folder.name
        assert os.listdir(runs.datasets_dir()) == [slug]
        assert runs.load(folder).slug == slug and (folder / f"{slug}.safetensors").is_file()
        assert (folder / f"{slug}-step00000008-state" / "hangproof.json").is_file()
        assert str(runs.datasets_dir() / slug) in (folder / "dataset.toml").read_text()
        slugs.append(slug)
        if not killed:
            break
    assert not killed and slugs == sorted(slugs), "once it is known what is meant, a kill does not undo it"
    assert slugs.count("first-light") >= 1 and slugs.count("second") >= 5


# The command line -----------------------------------------------------------------------------------------------------


def test_the_commands_have_their_exit_codes(data):
    new_run()
    done = call("runs", "rename", "first light", "second", "--json")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["folder"].endswith("outputs/second")
    done = call("runs", "rename", "nothing", "x")
    assert done.returncode == 1 and "no run 'nothing'" in done.stderr
    done = call("runs", "delete", "second")
    assert done.returncode == 1 and re.search(r"frees \d.* add --yes", done.stderr)
    assert call("runs", "delete").returncode == 2
    done = call("runs", "delete", "second", "--images", "--yes", "--json")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["freed_bytes"] > 1000
    assert runs.list_runs() == [] and os.listdir(runs.datasets_dir()) == []
