"""A run is created completely or not at all, errors say what is wrong, and the same spec gives the same bytes."""

import ctypes
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tomllib
from runs_helpers import contents, picture, pictures, sources, spec, written
from ui_helpers import small_disk

import runs
from runs import folders


def test_a_run_has_its_files_and_render_writes_them_again(tmp_path, data):
    folder = runs.create(spec(name="Mein Hund", prompts=["ohwx at sea"]), pictures(tmp_path / "in"))
    assert folder == data / "outputs/Mein-Hund"
    files = "dataset.toml job.json run.toml sample_prompts.txt train.sh"
    assert sorted(p.name for p in folder.iterdir()) == files.split()
    assert os.access(folder / "train.sh", os.X_OK)
    config = tomllib.loads((folder / "dataset.toml").read_text(encoding="utf-8"))
    assert config["datasets"][0]["subsets"][0]["image_dir"] == str(data / "datasets/Mein-Hund")
    assert runs.load(folder).name == "Mein Hund"
    assert runs.list_runs() == [folder]
    assert {runs.run_folder(n) for n in ("Mein Hund", "Mein-Hund", folder)} == {folder}
    with pytest.raises(runs.RunError, match="use one of Mein-Hund"):
        runs.run_folder("Katze")
    before = contents(folder)
    (folder / "train.sh").write_text("broken")
    assert runs.render(folder) == folder / "train.sh" and contents(folder) == before


def test_a_store_in_a_relative_folder_is_that_of_the_folder_in_which_the_run_was_made(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for store, kept in (("kept/here", str(tmp_path / "kept/here")), *((same, same) for same in ("", "~/x", "s3://b"))):
        folder = runs.create(spec(name=f"to {store}", store=store), pictures(tmp_path / "in"))
        assert runs.load(folder).store == kept


def nothing_made(root: Path) -> bool:
    """No run, no data set, no temporary left."""
    return not list(root.glob("*/*"))


def test_bad_input_and_ctrl_c_in_the_middle_leave_nothing(tmp_path, data, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("runs.folders.write", Mock(side_effect=KeyboardInterrupt))
        runs.create(spec(), pictures(tmp_path / "in"))
    assert nothing_made(data)
    text = written(tmp_path / "words.png", "words")
    for images, match in (
        (sources([picture(tmp_path / "a.png"), text]), "words.png: Not a readable image"),
        ([], "no images"),
        (tmp_path / "gone", "gone is not a folder; use the folder of the images"),
    ):
        with pytest.raises(runs.RunError, match=match):
            runs.create(spec(), images)
        assert nothing_made(data)
    with pytest.raises(runs.RunError, match="did you mean guidance_scale"):
        runs.create(spec(extra={"guidance_skale": 1}), pictures(tmp_path / "in"))
    with pytest.raises(runs.RunError, match="no prompt"):
        runs.create(spec(trigger="", sample_every_n_steps=5), pictures(tmp_path / "in"))
    assert nothing_made(data)
    (data / "outputs").rmdir()
    (data / "outputs").write_text("I am a file")
    with pytest.raises(runs.RunError, match="a file has the name of the folder"):
        runs.create(spec(), pictures(tmp_path / "in"))


def test_a_name_that_exists_is_refused_and_the_old_run_untouched(tmp_path, data):
    images = pictures(tmp_path / "in")
    runs.create(spec(name="a b"), images)
    before = contents(data)
    with pytest.raises(runs.RunError, match=r"name: A run named 'a-b' already exists in .*; choose another name"):
        runs.create(spec(name="a-b", rank=64), images)
    shutil.rmtree(data / "outputs/a-b")
    with pytest.raises(runs.RunError, match="name: A data set named 'a b' already exists"):
        runs.create(spec(name="a b"), images)
    assert {k: v for k, v in before.items() if k.startswith("datasets")} == contents(data)
    with pytest.raises(runs.RunError, match="no data set"):
        runs.read_captions("another")
    again = runs.create(spec(name="a b"), data / "datasets/a-b")
    assert again.is_dir() and {k: v for k, v in contents(data).items() if k in before} == before


def test_a_name_whose_checkpoints_windows_cannot_write_is_refused_there(data, monkeypatch):
    outputs = Path(r"C:\Users\Somebody\Documents\hangproof\outputs")
    monkeypatch.setattr(folders, "outputs_dir", lambda: outputs)
    windows, on = spec(name="c" * 80), SimpleNamespace(RtlAreLongPathsEnabled=lambda: 1)
    assert folders.name_fault(windows) is None, "here"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(ntdll=on), raising=False)
    assert folders.name_fault(windows) is None
    on.RtlAreLongPathsEnabled = lambda: 0xFF00  # a BOOLEAN: the rest of the register says nothing
    assert "shorten the name by 4 letters" in folders.name_fault(windows).message
    assert folders.name_fault(spec(name="c" * 76)) is None


@pytest.mark.parametrize("given", ["{}/fast", "fast", "~/fast"])
def test_runs_that_are_given_one_save_dir_have_a_folder_each(tmp_path, data, monkeypatch, given):
    fast, images = tmp_path / "fast", pictures(tmp_path / "in")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    first = runs.create(spec(name="a", save_dir=given.format(tmp_path)), images)
    second = runs.create(runs.load(first).changed(name="b"), images)  # a copy of it, or a run of a sweep
    for folder in (first, second):
        assert runs.load(folder).save_dir == str(fast / folder.name)
        assert f"--output_dir {fast / folder.name} " in (folder / "train.sh").read_text()
    (fast / "c" / "c-state").mkdir(parents=True)  # of a run that was deleted
    with pytest.raises(runs.RunError, match="c has files already"):
        runs.create(spec(name="c", save_dir=str(fast)), images)


def test_of_two_that_make_the_same_name_at_once_one_wins_whole(tmp_path, data):
    images = pictures(tmp_path / "in", 8)
    barrier = threading.Barrier(4)

    def make(rank: int) -> Path:
        barrier.wait(timeout=200)
        return runs.create(spec(name="race", rank=rank), images)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(make, rank) for rank in (4, 8, 16, 32)]
    (won,) = (future.result() for future in futures if not future.exception())
    assert all("exists" in str(future.exception() or "exists") for future in futures)
    assert len(runs.read_captions("race")) == 8
    assert runs.render(won) and not list(data.rglob(".new-*"))


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    with small_disk(tmp_path, "256k") as disk:
        monkeypatch.setenv("HANGPROOF_DATA", str(disk))
        images = sources(picture(tmp_path / f"noise {i}.bmp", size=(200, 200)) for i in range(4))  # 120 kB each
        with pytest.raises(runs.RunError, match=r"the disk is full; free some space and try again"):
            runs.create(spec(), images)
        assert nothing_made(disk)
        made = runs.create(spec(), images[:1])  # with less to store, the same name works
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        before = contents(made)
        (tmp_path / "run.toml").write_text(runs.dumps(runs.load(made).changed(prompts=["long " * 4000])))
        with pytest.raises(runs.RunError, match="the disk is full"):
            runs.render(made, tmp_path)
        with pytest.raises(runs.RunError, match="the disk is full"):
            runs.train_longer(made, 99)
        assert contents(made) == before and runs.read_captions("my-lora") == {"noise-0.bmp": "ohwx"}


def test_missing_model_files_are_named_before_a_start(tmp_path, data, monkeypatch):
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path / "no checkout"))
    one = spec(backend="sd-scripts", tier="12G", extra={"ae": str(tmp_path / "ae.safetensors")})
    found = [fault.message for fault in runs.problems(one)]
    (files,) = [line for line in found if line.startswith("model files missing")]
    flags = ["pretrained_model_name_or_path", "clip_l", "t5xxl", "ae"]
    assert [part.split(")")[0] for part in files.split(" (--")[1:]] == flags
    assert f"{tmp_path / 'ae.safetensors'} (--ae)" in files and "fetch-model flux-dev" in files
    assert any("start.sh sd-scripts" in line for line in found)
    assert any("no images" in line for line in found)
    for name in ("b.png", "a.png", "a.bmp"):  # by hand
        picture(data / "datasets/my-lora" / name)
    for backend, twice in (("sd-scripts", True), ("diffusers", False)):
        found = [fault.message for fault in runs.problems(spec(backend=backend))]
        assert any("a.bmp and a.png: sd-scripts would train one of them twice" in line for line in found) == twice
    for tier, model, refused in (("12G", "z-image", True), ("20G", "z-image", False), ("12G", "tiny-flux", False)):
        found = runs.problems(spec(tier=tier, model=model, extra={"network_weights": "~/gone"}), "darwin")
        assert any("network_weights: " in fault.message and "gone cannot be read" in fault.message for fault in found)
        assert any("(int8), which Apple's GPUs cannot train" in fault.message for fault in found) == refused


def test_a_tracker_that_is_not_installed_is_named_before_a_start(data, monkeypatch):
    for there, expected in ((None, ["trackers"]), (Mock(), [])):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, there=there: there)
        found = runs.problems(spec(backend="diffusers", model="tiny-flux", trackers="wandb"))
        assert [one.field for one in found if one.field != "images"] == expected


def test_a_run_is_trained_longer(tmp_path, data):
    folder = runs.create(spec(epochs=4), pictures(tmp_path / "in"))
    assert runs.train_longer(folder, 6).epochs == 6 and runs.load(folder).epochs == 6
    assert "--max_train_epochs 6" in (folder / "train.sh").read_text()
    before = contents(folder)
    with pytest.raises(runs.RunError, match="epochs: Must be 6 or more; the run is set to 6 already"):
        runs.train_longer(folder, 5)
    assert contents(folder) == before
    by_steps = runs.create(spec(name="steps", max_train_steps=100), pictures(tmp_path / "in"))
    (by_steps / "steps.safetensors").write_text("of step 100")
    assert runs.train_longer(by_steps, 120) and runs.train_longer(by_steps, 150).max_train_steps == 150
    loras = {path.name: path.read_text() for path in by_steps.glob("*.safetensors")}
    assert loras == dict.fromkeys(("steps.safetensors", "steps-100-steps.safetensors"), "of step 100")
    assert "--max_train_steps 150" in (by_steps / "train.sh").read_text()


def open_spec(**fields):
    return spec(**{"sample_every_n_steps": None, **fields})


def test_without_a_trigger_the_first_caption_is_drawn_without_its_options():
    captions = ["", " ", "a cat --w 9999\n--n x", "a dog"]
    made = runs.with_intervals(open_spec(trigger="", max_train_steps=100), {"": 5}, captions)
    assert made.sample_every_n_steps == 10 and made.prompts == ["a cat  w 9999  n x"]
    assert runs.sample_prompts(made).startswith("a cat w 9999 n x --w 512 --h 512")


def test_a_new_run_has_states_every_tenth_of_it_and_pictures_where_there_is_something_to_draw(tmp_path, data):
    folder = runs.create(open_spec(trigger="tok", repeats=10, epochs=20), pictures(tmp_path / "in"))
    text = (folder / "train.sh").read_text()
    assert "--sample_every_n_steps 60" in text and "--save_every_n_steps 60" in text
    assert (folder / "sample_prompts.txt").read_text().startswith("tok --w")
    shutil.rmtree(folder)
    of_its_captions = runs.create(open_spec(trigger=""), runs.datasets_dir() / folder.name)
    assert (of_its_captions / "sample_prompts.txt").read_text().startswith("tok --w")
    for fields, sample, save in (
        ({"trigger": ""}, 0, 48),
        ({"sample_every_n_steps": 0}, 0, 48),
        ({"max_train_steps": 3}, 1, 1),
        ({"repeats": 1, "epochs": 10**9, "save_every_n_epochs": 1}, 300_000_000, 100),
        ({"epochs": 100, "save_every_n_steps": 0}, 600, 0),
    ):
        made = runs.with_intervals(open_spec(**fields), {"": 3})
        assert (made.sample_every_n_steps, made.save_every_n_steps) == (sample, save), fields


def test_each_lora_that_stays_has_samples_of_its_step():
    for images, repeats, epochs, every in ((12, 10, 17, 4), (20, 10, 10, 4), (4, 24, 20, 4), (10, 10, 20, 0)):
        made = open_spec(repeats=repeats, epochs=epochs, save_every_n_epochs=every, trigger="tok")
        interval, epoch = runs.with_intervals(made, {"": images}).sample_every_n_steps, images * repeats
        assert epoch * every % interval == 0 and epoch * epochs % interval == 0
        assert 5 <= epoch * epochs / interval <= 20
