"""A run comes back from its store, on an empty machine or beside what that one has; what is newer wins."""

import contextlib
import itertools
import json
import os
import re
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from runs_helpers import call, contents
from safetensors.numpy import save_file
from store_helpers import add_state, belonging, held, log, make_run

import runs
from launch.store import filesystems
from launch.store.copies import Copier
from launch.store.manifest import FILES
from launch.store.places import StoreError, Unavailable
from launch.store.restore import restore
from runs import pin, scripts
from runs.paths import datasets_dir, outputs_dir
from runs.results import loras


def test_an_empty_machine_gets_the_run_as_it_was(run, place, other, tmp_path):
    pushed = Copier(place, run, held(place)).push()
    assert pushed.manifest.name == "manifests/000001-000001.json" and pushed.manifest.step == 10 and not pushed.notes
    before, images = belonging(run), contents(datasets_dir() / run.name)
    place.put("status.json", json.dumps({"ledger": {"seconds": {"training": 60.0}, "state": "training"}}).encode())
    outputs = other()
    done = restore(place, run.name)
    assert done.step == 10 and done.notes == []
    assert belonging(outputs / run.name) == before
    assert contents(datasets_dir() / run.name) == images
    assert [path.name for path in outputs.iterdir()] == [run.name], "nothing is left of the fetching"
    saved = json.loads((outputs / run.name / "monitor.json").read_text())
    assert saved.pop("ledger")["seconds"]["training"] == 60.0, "what it cost since its last checkpoint"
    assert saved == {"version": 2, "state": "opening", "attempt": 3, "current": None}
    script = (outputs / run.name / runs.script_name()).read_text()
    assert str(outputs / run.name) in script and str(tmp_path / "home") not in script
    assert str(datasets_dir() / run.name) in (outputs / run.name / "dataset.toml").read_text()
    again = restore(place, run.name)
    assert (again.files, again.fetched_bytes) == (0, 0)


def test_damaged_files_of_the_monitor_and_the_spec_keep_no_checkpoint_from_coming_back(run, place, other, monkeypatch):
    for name in ("monitor.json", "run.toml"):
        (run / name).write_text("a = " * name.endswith("toml") + "[" * 50_000)  # too deep for its parser
    Copier(place, run, held(place)).push()
    outputs = other()
    assert restore(place, run.name).step == 10 and restore(place, run.name).files == 0
    assert json.loads((outputs / run.name / "monitor.json").read_text()) == {"state": "opening"}
    shutil.rmtree(outputs / run.name)
    monkeypatch.setattr("launch.store.restore.SPEC_BYTES", 9)
    with pytest.raises(StoreError, match=r"run/\w+\.\w+ has \d+ bytes; put an intact copy there"):
        restore(place, run.name)


def test_a_damaged_job_is_named_with_its_key_and_what_makes_it_again(run, place, other):
    (run / "job.json").write_text((run / "job.json").read_text().replace('"gpus": 1', '"gpus": "one"'))
    Copier(place, run, held(place)).push()
    here = other() / run.name
    with pytest.raises(runs.RunError, match=r"job\.json .*: gpus: 'one' is not of type int; make .*render") as said:
        restore(place, run.name)
    shutil.move(*re.search(r"once (\S+) is moved to (\S+); then restore it again", str(said.value)).groups())
    assert call("runs", "render", run.name).returncode == 0
    assert restore(place, run.name).step == 10 and pin.pinned(here).spec["gpus"] == 1


def test_a_restore_that_is_killed_is_repeated_and_keeps_what_it_fetched(run, place, other, monkeypatch):
    total = Copier(place, run, held(place)).push().manifest.size
    before, outputs = belonging(run), other()
    reads, read = itertools.count(1), place._read

    def interrupted(name, *where, **more):
        with pytest.raises(StoreError, match="another process restores my-lora on this machine"):
            restore(place, run.name)
        if name.startswith(f"{FILES}/") and next(reads) % 5 == 0:
            raise KeyboardInterrupt
        return read(name, *where, **more)

    monkeypatch.setattr(place, "_read", interrupted)
    rounds, done = 0, None
    while done is None and rounds < 50:
        rounds += 1
        try:
            done = restore(place, run.name)
        except KeyboardInterrupt:
            assert not (outputs / run.name / "run.toml").exists()
    assert rounds > 2 and done.fetched_bytes < total
    assert belonging(outputs / run.name) == before


def test_a_restore_shows_each_piece_and_goes_on_in_the_middle_of_a_file(run, place, copier, other, monkeypatch):
    file = f"run/{run.name}-step00000010-state/model.safetensors"
    staged, blob = other() / f".restore-{run.name}" / file, copier.last.files[file].blob
    seen, starts, read = [0], [], place._read

    def cut(name, key, start, *length, **more):
        starts.extend([start] if name == blob else [])
        if starts == [*range(0, 120_000, 20_000)]:
            raise Unavailable("the link is cut")
        return read(name, key, start, *length, **more)

    monkeypatch.setattr(place, "_read", cut)
    monkeypatch.setattr(filesystems, "PIECE", 20_000)
    with pytest.raises(Unavailable, match="the link is cut"):
        restore(place, run.name, lambda done, total: seen.append(done))
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 20_000, "whoever waits sees bytes move"
    starts.clear()
    assert restore(place, run.name).step == 10 and starts == [*range(100_000, 200_000, 20_000)]
    shutil.rmtree(other() / run.name)
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"a part of other contents")
    done = restore(place, run.name)
    assert done.step == 10 and not done.damaged and not done.notes


@pytest.mark.parametrize("behind", [False, True])
def test_a_restore_that_is_killed_while_it_renames_is_repeated(run, place, copier, other, monkeypatch, behind):
    """Beside a run: of its data set that was lost, and where the store is newer. No half of it is trained."""
    expected = [contents(datasets_dir() / run.name)]
    add_state(run, 20), log(run, "later")
    (run / "monitor.json").write_text('{"state": "stopped", "ledger": "later"}')
    (run / "run.toml").write_text((run / "run.toml").read_text() + "# later\n")
    here = other() / run.name
    restore(place, run.name)
    shutil.rmtree(datasets_dir() / run.name)
    if behind:
        other("home")
        copier.push()
        expected += [belonging(run), "later"]
        other()
    move, left = shutil.move, [0]

    def killed(source, target):
        move(source, target)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "move", killed)
    for left[0] in range(1, 30):  # each gets further
        with contextlib.suppress(KeyboardInterrupt):
            restore(place, run.name)
            break
    assert left[0] > 0, "the last one was not killed"
    found = [contents(datasets_dir() / run.name)]
    if behind:
        found += [belonging(here), json.loads((here / "monitor.json").read_text())["ledger"]]
    assert found == expected


def test_an_edit_of_the_spec_or_of_a_caption_here_is_kept_and_an_older_one_replaced(run, place, copier, other):
    other()
    restore(place, run.name)
    here, data = outputs_dir() / run.name, datasets_dir() / run.name
    runs.train_longer(here, 999), (data / "0.txt").write_text("written by hand")
    other("home")
    for number in (0, 1):
        path = datasets_dir() / run.name / f"{number}.txt"
        path.write_text("from home")
        os.utime(path, (time.time() - 60 * (number == 0),) * 2)
    add_state(run, 20)
    copier.push()
    other()
    assert restore(place, run.name).step == 20
    assert runs.load(here).epochs == 999, "it was edited after the store's"
    assert "999" in (here / runs.script_name()).read_text()
    (here / "run.toml").rename(here / "aside")  # the run was deleted, and its data set stayed
    assert restore(place, run.name).step == 20
    (here / "aside").replace(here / "run.toml")
    assert [(data / name).read_text() for name in ("0.txt", "1.txt")] == ["written by hand", "from home"]
    os.utime(here / "run.toml", (1e9, 1e9))
    other("home")
    runs.train_longer(run, 777)
    add_state(run, 30)
    copier.push()
    other()
    assert restore(place, run.name).step == 30
    assert runs.load(here).epochs == 777


@pytest.mark.parametrize("hours", [-5, 5])
def test_which_machine_has_edited_the_run_does_not_depend_on_their_clocks(run, place, copier, other, hours):
    """hours: by which the clock of the other machine is wrong."""

    def restored_after(step: int) -> None:
        other("home")
        add_state(run, step), copier.push()
        other()
        assert restore(place, run.name).step == step

    here = other() / run.name
    restore(place, run.name)
    runs.train_longer(here, 999)
    os.utime(here / "run.toml", (time.time() + 3600 * hours,) * 2)
    restored_after(20)
    assert runs.load(here).epochs == 999, "it was edited here, and not there"
    Copier(place, here, copier.lease).push()
    other("home")
    runs.train_longer(run, 1200)
    restored_after(30)
    assert runs.load(here).epochs == 1200, "it was edited there, and not here"
    other("home")
    runs.train_longer(run, 1500), copier.push()
    other()
    assert restore(place, run.name).files == 0, "this machine is as far, and keeps what it has"
    restored_after(40)
    assert runs.load(here).epochs == 1500


def test_a_lora_of_more_steps_than_the_stores_is_kept_under_another_name(run, place, copier, other):
    """Whatever step the manifest says: its state and its LoRA need not be of the same time."""

    def lora(folder, steps):
        save_file({"a": np.ones(4, np.float32)}, folder / f"{run.name}.safetensors", {"ss_steps": str(steps)})

    here = other() / run.name
    restore(place, run.name)
    for step, steps in ((20, 5), (30, 40)):
        lora(here, steps)
        other("home")
        lora(run, 10), add_state(run, step), copier.push()
        other()
        restore(place, run.name)
        found = {one.path.name.removeprefix(run.name): one.step for one in loras(here) if one.step}
        assert found == {".safetensors": 10} | ({"-step00000040.safetensors": 40} if steps == 40 else {})


def test_the_same_spec_takes_the_stores_checkpoint_and_another_run_of_its_name_is_not_mixed_in(
    run, place, other, tmp_path
):
    """A job that is started again elsewhere brings its run.toml along, and nothing else."""
    Copier(place, run, held(place)).push()
    text = (run / "run.toml").read_text()
    here = other() / run.name
    here.mkdir(parents=True)
    (here / "run.toml").write_text(text.replace("price_per_hour = 0.0", "price_per_hour = 2.5"))
    assert restore(place, run.name).step == 10
    assert runs.load(here).price_per_hour == 2.5
    other("third")
    mine = make_run(tmp_path / "second", rank=3)
    before = contents(mine)
    with pytest.raises(StoreError, match="holds another run of this name: rank differ"):
        restore(place, run.name)
    assert contents(mine) == before
    other("fourth")
    mine = make_run(tmp_path / "third")
    restore(place, run.name)
    shutil.rmtree(mine)
    Image.new("RGB", (8, 8)).save(datasets_dir() / run.name / "0.png")
    (mine / "run.toml").parent.mkdir()
    (mine / "run.toml").write_text(text)
    with pytest.raises(StoreError, match="the images differ from .*make this run again under another name"):
        restore(place, run.name)


def test_a_store_that_was_emptied_is_filled_again_and_one_that_another_run_took_then_is_not_mixed_in(
    run, place, copier, other, tmp_path
):
    shutil.rmtree(place.prefix)  # while the run trains
    add_state(run, 20)
    copier.push()
    other("third")
    assert restore(place, run.name).step == 20
    other()
    mine = make_run(tmp_path / "second", rank=3)
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 9)).save(datasets_dir() / run.name / f"{number}.png")
    add_state(mine, 30)
    shutil.rmtree(place.prefix)
    Copier(place, mine, held(place)).push()
    other("home")
    before = contents(run)
    with pytest.raises(StoreError, match="holds another run of this name: rank differ"):
        restore(place, run.name)
    assert contents(run) == before


def test_a_restore_beside_a_machine_that_trains_takes_what_that_wrote_meanwhile(run, place, copier, other, monkeypatch):
    get = place.get

    def late(*given):
        monkeypatch.setattr(place, "get", get)
        other("home")
        for step in (20, 30, 40):
            shutil.rmtree(run / f"{run.name}-step{step - 10:08}-state")
            add_state(run, step), copier.push(), copier.prune()
        other()
        return get(*given)

    other()
    monkeypatch.setattr(place, "get", late)
    assert restore(place, run.name).step == 40


@pytest.mark.parametrize("own", [False, True])
def test_another_machine_trains_what_the_run_trained_whatever_its_tables_say(run, place, other, own):
    """Also where its own run.toml asks for one process less at a time: only that differs."""
    made = pin.pinned(run)
    scripts.write(run, made.patched({"commands": {"0": {"flags": {"optimizer_type": "older"}}}}))
    (run / "run.toml").write_text((run / "run.toml").read_text() + "\n# edited, and not made again\n")
    Copier(place, run, held(place)).push()
    here = other() / run.name
    if own:
        here.mkdir(parents=True)
        (here / "run.toml").write_text((run / "run.toml").read_text().replace("\nworkers = ", "\nworkers = 1"))
    assert restore(place, run.name).step == 10
    job = pin.pinned(here)
    assert job.flags["optimizer_type"] == "older" and job.flags["output_dir"] == str(here)
    assert (job.flags["max_data_loader_n_workers"] != made.flags["max_data_loader_n_workers"]) == own
    assert "--optimizer_type older" in (here / "train.sh").read_text() and (job.digest == made.digest) != own


def test_a_full_disk_is_reported_with_the_bytes_that_are_missing(run, place, copier, other, monkeypatch):
    other()
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match="MB free and the run needs"):
        restore(place, run.name)
    assert not [path for path in outputs_dir().rglob("*") if path.is_file()], "the reason must fit on the disk"
