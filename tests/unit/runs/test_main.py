"""The command `python -m runs` in this process."""

import json
import re
from pathlib import Path

from hub_server import Fault, only_hub
from runs_helpers import call, pictures, spec

import presets
import runs
from runs.dataset import Source


def test_the_command_line_makes_shows_and_renders(tmp_path, data):
    images = pictures(tmp_path / "in")
    assert call("runs", "show").stdout == f"no runs in {data / 'outputs'}\n"
    made = call(
        "runs", "new", "--name", "cli run", "--images", str(images), "--trigger", "ohwx", "--model", "FLUX.1-schnell",
        "--tier", "20G+", "--backend", "diffusers", "--prompt", "one", "--prompt", "two --w 128", "--set", "rank=16",
        "--set", "network_dropout=0.1", "--set", "sample_every_n_steps=4", "--set", "highvram=false",
        "--set", "network_args=train_blocks=double split_qkv=False", "--json",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    folder = Path(json.loads(made.stdout.splitlines()[-1])["folder"])
    assert folder == data / "outputs/cli-run" and made.stdout.splitlines()[0] == str(folder)
    script = (folder / "train.sh").read_text()
    for line in ("--network_dim 16", "--network_dropout 0.1", "--network_args train_blocks=double split_qkv=False"):
        assert f"  {line} \\\n" in script or f"  {line}\n" in script
    assert "--highvram" not in script and "black-forest-labs/FLUX.1-schnell" in script
    prompts = "one --w 512 --h 512 --s 20 --d 42\ntwo --w 128 --h 512 --s 20 --d 42\n"
    assert (folder / "sample_prompts.txt").read_text() == prompts
    shown = call("runs", "show", "cli run", "--json")
    assert json.loads(shown.stdout.splitlines()[-1])["spec"]["rank"] == 16
    shown, last = call("runs", "show", "--json").stdout.splitlines()
    assert shown == str(folder) and json.loads(last) == {"runs": [str(folder)]}
    missing = call("runs", "show", "dog")
    assert missing.returncode == 1 and "no run 'dog'" in missing.stderr


def test_wrong_words_are_refused_by_name(tmp_path, data):
    for words, code, says in (
        (["--name", "x", "--set", "rnak=3"], 1, "did you mean rank?"),
        (["--name", "x", "--set", "lr=1e-4"], 1, "did you mean learning_rate?"),
        (["--name", "x", "--set", "steps=9"], 1, "did you mean max_train_steps?"),
        (["--name", "x", "--set", "rank"], 1, "KEY=VALUE"),
        (["--name", "x", "--tier", "8G"], 1, "tier"),
        (["--name", "x", "--model", "flux-devv"], 1, "did you mean flux-dev"),
        (["--name", "x", "--set", "repeats=1000000000", "--model", "tiny-flux"], 1, "At 10"),
        ([], 2, "--name"),
    ):
        done = call("runs", "new", "--images", pictures(tmp_path / "in"), *words)
        assert done.returncode == code and says in done.stderr, done.stderr
        assert not list(data.glob("*/*"))


def test_the_repeats_that_the_name_of_the_given_folder_sets_are_those_of_its_images(tmp_path, data, monkeypatch):
    monkeypatch.chdir(pictures(tmp_path / "10_cat"))
    done = call("runs", "new", "--name", "x", "--images", ".", "--model", "tiny-flux")
    assert done.returncode == 0 and "note: the folder's name sets 10 repeats" in done.stderr
    assert runs.read_captions("x") == {f"10_cat/{number}.png": "cat" for number in range(3)}
    given = [Source(Path(f"{n}.png"), f"{n}.png", "a cat", weight=n + 1) for n in range(3)]
    runs.create(spec(name="2024_cats", model="tiny-flux"), given)  # of another run: its name sets nothing
    done = call("runs", "new", "--name", "y", "--images", data / "datasets/2024_cats", "--model", "tiny-flux")
    assert done.returncode == 0 and "repeats" not in done.stderr
    assert list(runs.read_captions("y")) == ["0.png", "weight-2/1.png", "weight-3/2.png"], "weights are kept"


def test_an_estimate_is_of_a_run_by_name_folder_or_file(tmp_path, data):
    folder = runs.create(spec(name="my run", tier="12G", price_per_hour=2), pictures(tmp_path / "in"))
    for name in ("my-run", str(folder), str(folder / "run.toml")):
        done = call("runs", "estimate", name, "--json")
        found = json.loads(done.stdout.splitlines()[-1])
        assert done.returncode == 0 and found["peak_stage"] == "text" and found["steps"] == 480
        assert found["seconds"] > 480 and found["cost"] > 0 and found["disk_bytes"]["LoRAs"] > 0
    assert "cost: about " in done.stdout
    assert re.search(r"time: about (\d\d? min|[1-9]\d*\.\d h) for 480 steps", done.stdout), "not 0.0 h"
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace("resolution = 512", "resolution = -1"))
    done = call("runs", "estimate", "my-run")
    assert done.returncode == 1 and "resolution: Must be a multiple of 32" in done.stderr


def test_what_a_new_run_is_short_of_and_what_a_changed_one_trains_differently_is_said(tmp_path, data):
    words = ["--name", "cat", "--images", pictures(tmp_path / "in"), "--model", "flux-dev", "--backend", "sd-scripts"]
    done = call("runs", "new", *words, "--set", "learning_rate=0.9", "--set", "MY_KEY=s3cret-key")
    assert done.returncode == 0 and "warning: learning_rate: Learning rate 0.9 is" in done.stderr
    assert "note: MY_KEY: kept in a file" in done.stderr and "not ready to start: " in done.stderr
    folder = data / "outputs" / "cat"
    assert json.loads(call("runs", "show", "cat", "--json").stdout.splitlines()[-1])["problems"]
    again = call("runs", "render", "cat", "--json")
    made = {"folder": str(folder), "script": str(folder / "train.sh"), "changed": []}
    assert json.loads(again.stdout.splitlines()[-1]) == made
    assert "note: MY_KEY: kept" in again.stderr and "changed" not in again.stderr
    (folder / "cat-000001-state").mkdir()
    runs.save(folder, runs.load(folder).changed(rank=2))
    said = call("runs", "render", "cat").stderr
    assert "changed: -  --network_dim 4 \\\nchanged: +  --network_dim 2 \\\n" in said
    assert "cannot go on from its states, such as cat-000001-state" in said
    runs.save(folder, runs.load(folder).changed(epochs=99))
    assert "warning" not in call("runs", "render", "cat").stderr
    assert call("runs", "rename", "cat", "My cat", "--json").stdout.startswith(f"{folder}: My cat\n")


def test_a_download_shows_its_progress_through_a_fault_and_one_that_is_refused_says_why(tmp_path, data, monkeypatch):
    (data / "models").mkdir()
    first, *others = presets.models()["flux-schnell"]["files"].values()
    for name in others:
        (data / "models" / name).write_bytes(b"already here")
    with only_hub(monkeypatch, tmp_path, {first: b"x" * 10_000_000}) as hub:
        hub.faults = [Fault("drop", 100_000)]
        done = call("runs", "fetch-model", "FLUX.1-schnell", "--json")
    assert done.returncode == 0, done.stderr
    path = str(data / "models" / first)
    assert done.stdout.splitlines() == [path, json.dumps({"files": [path]})]
    assert f"{first}: 0.01 of 0.01 GB · 100 %" in done.stderr
    again = call("runs", "fetch-model", "FLUX.1-schnell")
    assert again.stdout == "FLUX.1-schnell: all files are downloaded already\n"
    assert {(data / "models" / name).read_bytes() for name in others} == {b"already here"}
    assert not runs.missing_files("flux-schnell") and not list((data / "models").glob(".*.part*"))
    Path(path).unlink()
    with only_hub(monkeypatch, tmp_path, {}) as hub:
        hub.refusal = (403, "GatedRepo")
        done = call("runs", "fetch-model", "FLUX.1-schnell", "--json")
        assert done.returncode == 1 and f"accept its licence at {hub.url}/" in done.stderr
