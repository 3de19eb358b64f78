"""The scripts of every family: each flag is its own table's, lint finds nothing, and the real parsers take them.

The real parsers run in the trainer's environment, one process a trainer: importing torch costs more than parsing.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
import tiny_musubi
import tiny_sd_scripts
from families import BY_FILE, FAMILIES, MODELS, PLATFORMS, fitting, made
from runs_helpers import PROJECT, executable, picture, pictures, run_script, spec

import presets
import runs
from presets import schema
from presets.estimate import disk, estimate, table_time
from presets.lint import lint
from presets.training import commands
from runs.command import commands as commands_of
from runs.paths import CHECKOUTS, datasets_dir
from runs.sanity import judge


def scripts(models=FAMILIES, platforms=PLATFORMS):
    """(spec, platform, text) of each of these × tier × platform."""
    for model, backend in models:
        for tier in fitting(model, backend):
            one = made(model, backend, tier)
            for platform in platforms:
                yield one, platform, runs.script(one, Path("/out/my it's run"), Path("/out/x-state"), platform)


def started(text: str, platform: str) -> list[tuple[str, list[str]]]:
    """(file name, arguments) of each script that a rendered script starts with the guards, as its shell reads it."""
    found = []
    for command in commands(text, "cmd" if platform == "win32" else "sh"):
        words = [word.value for word in command.words]
        if "sd_scripts_patches" in words:
            at = words.index("sd_scripts_patches") + 1
            assert None not in words[at:], words
            found.append((Path(words[at]).name, words[at + 1 :]))
    return found


def test_no_code_names_a_family():
    names = {*presets.families(), *presets.models()}
    for path in [*(PROJECT / "presets").glob("*.py"), *(PROJECT / "runs").glob("*.py")]:
        quoted = set(re.findall(r'["\']([\w-]+)["\']', path.read_text(encoding="utf-8")))
        assert not quoted & names, (path.name, quoted & names)


@pytest.mark.parametrize(("model", "backend"), MODELS)
def test_every_tier_says_what_it_does_and_where_its_figures_come_from(model, backend):
    rows = presets.tiers_of(model, backend)
    assert list(rows) == list(presets.tiers())
    for name, row in rows.items():
        assert row["label"] and row["source"] and row["basis"] and row["note"]
        if row["problem"]:
            assert re.search(r"does not fit: .+; choose \w+ or more$", row["problem"])
            assert row["needs_gb"] is None and row["flags"] == {}
            with pytest.raises(runs.RunError, match="^tier: "):
                made(model, backend, name)
            continue
        assert 0 < row["needs_gb"] <= max(row["vram_gb"], 24 if name == "20G" else 0)
        assert ("swapped" in row["note"] and "time limit" in row["note"]) == ("blocks_to_swap" in row["flags"])
        assert "blocks_to_swap" not in row["flags"] or backend == "musubi"
    assert fitting(model, backend), "no tier holds it"


def test_lint_finds_nothing_in_the_script_of_any_family():
    for one, platform, text in scripts(platforms=("linux", "win32")):
        file = "train.bat" if platform == "win32" else "train.sh"
        assert [f.id for f in lint(text, file)] == [], (one.model, one.tier, platform)


def test_a_new_run_of_each_model_has_its_trainer_and_settings(tmp_path, data, monkeypatch):
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("MUSUBI_DIR", str(tmp_path / "none"))
    images = pictures(tmp_path / "in", 2)
    for key in presets.models():
        one = runs.make({"name": f"run of {key}", "trigger": "ohwx", "model": key})
        family = presets.families()[presets.models()[key]["family"]]
        assert one.backend in presets.backends_of(key) and one.backend == presets.backend_of(key)
        for field, value in {**family["settings"], **presets.models()[key]["settings"]}.items():
            assert getattr(one, field) == value
        folder = runs.create(one, images)
        assert runs.load(folder).backend == one.backend
        assert estimate(one.model_dump())["peak_gb"] > 0 and table_time(one.model_dump())[0] > 0
        assert all(size > 0 for part, size in disk(one.model_dump(), {"": 10}).items() if part != "samples")


def test_the_settings_of_a_family_make_sense_and_raise_no_warning():
    for model, backend in FAMILIES:
        for tier in fitting(model, backend):
            one = made(model, backend, tier, sample_every_n_steps=None)
            found = {finding.field for finding in judge(one, {"": 20}, None)}
            needs = presets.tiers_of(model, backend)[tier]["needs_gb"]
            assert found <= ({"tier"} if needs > presets.tiers()[tier]["vram_gb"] else set()), (model, found)


def test_musubis_data_set_has_one_table_for_each_folder(tmp_path, data):
    folder = datasets_dir() / "my-lora"
    for name in ("a.png", "3_cat/b.png"):
        picture(folder / name)
    one = spec(model="z-image", backend="musubi", resolution=768, batch_size=2, repeats=5)
    table = runs.dataset_tables(one)
    assert table["general"] == {
        "resolution": [768, 768], "caption_extension": ".txt", "batch_size": 2, "enable_bucket": True,
        "bucket_no_upscale": False,
    }  # fmt: skip
    rows = {row["image_directory"]: row for row in table["datasets"]}
    assert {path: row["num_repeats"] for path, row in rows.items()} == {f"{folder}": 5, f"{folder}/3_cat": 3}
    caches = {row["cache_directory"] for row in rows.values()}
    assert len(caches) == 2 and all(path.startswith((data / "outputs/my-lora/cache").as_posix()) for path in caches)


def test_a_model_that_learns_from_pairs_needs_a_control_image_for_each_image(tmp_path, data):
    pictures(datasets_dir() / "my-lora", 2)
    one = spec(model="qwen-image-edit", backend="musubi")

    def fault(**fields) -> list[str]:
        return [f.message for f in runs.problems(one.changed(**fields)) if f.field == "control_dir"]

    (missing,) = fault()
    assert "learns from pairs" in missing
    control = pictures(tmp_path / "control", 1)
    assert "No control image 1.*" in fault(control_dir=str(control))[0]
    pictures(control, 2)
    assert fault(control_dir=str(control)) == []
    rows = runs.dataset_tables(one.changed(control_dir=str(control)))["datasets"]
    assert rows[0]["control_directory"] == control.as_posix()
    pictures(datasets_dir() / "my-lora" / "weight-3", 1), pictures(datasets_dir() / "my-lora" / "30_weight-3-cat", 1)
    assert "No control image 10_cat/0.* in" in fault(control_dir=str(control))[0]
    pictures(control / "10_cat", 1)
    assert fault(control_dir=str(control)) == [], "a repeated image has the control image of the others"


def test_only_the_training_command_resumes_and_caching_takes_its_flags_over():
    one = made("flux2-klein-4b", "musubi", "8G", extra={"vae_dtype": "float32"})
    text = runs.script(one, Path("/out"), Path("/out/x-state"), "linux")
    commands = dict(started(text, "linux"))
    parts = ("cache_latents", "cache_text_encoder_outputs", "train_network")
    assert list(commands) == [f"flux_2_{part}.py" for part in parts]
    latents, captions, training = commands.values()
    assert "--resume" in training and "--resume" not in latents + captions
    assert latents[latents.index("--vae_dtype") + 1] == "float32", "an extra flag reaches the command that knows it"
    assert len(commands_of(made("sdxl", "sd-scripts", "12G"), Path("/out"))) == 1


STUB = """#!/bin/sh
for word in "$@"; do case $word in */src/*.py) name=$(basename "$word" .py);; esac; done
echo $name
[ $name != "$FAILS" ] || exit 75
"""


def test_a_failing_caching_command_ends_the_script_with_its_exit_code(tmp_path, data):
    program, script = executable(tmp_path / "its bin/python", STUB), tmp_path / "train.sh"
    script.write_text(runs.script(made("z-image", "musubi", "12G"), tmp_path / "out"))
    names = [f"zimage_{part}" for part in ("cache_latents", "cache_text_encoder_outputs", "train_network")]
    assert run_script(script, program).stdout.decode().split() == names
    for count, name in enumerate(names, 1):
        done = run_script(script, program, FAILS=name)
        assert (done.returncode, done.stdout.decode().split()) == (75, names[:count])


TRAINERS = {"sd-scripts": (tiny_sd_scripts, ".", 7), "musubi": (tiny_musubi, "src", 18)}
# Each script gives its parser away at its first call of parse_args.
PARSE = """
import argparse, json, runpy, sys
from presets import schema
sys.path.insert(0, sys.argv[1])
original, parsers = argparse.ArgumentParser.parse_args, {}
for path, words in json.load(sys.stdin):
    if path not in parsers:
        argparse.ArgumentParser.parse_args = schema._give_away
        try:
            runpy.run_path(path, run_name="__main__")
        except schema._Parsing as found:
            parsers[path] = found.args[0]
        argparse.ArgumentParser.parse_args = original
    parsers[path].parse_args(words)
print(json.dumps({path: schema.of_parser(parser) for path, parser in parsers.items()}, default=str))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", TRAINERS)
def test_the_real_parsers_take_the_scripts_of_every_family_tier_and_platform(tmp_path, backend):
    """And they have the flags that are read from their source."""
    tiny, modules, count = TRAINERS[backend]
    if reason := tiny.why_not():
        pytest.skip(reason)
    tiny.write_site(tmp_path)
    texts = [(text, platform) for _, platform, text in scripts([one for one in BY_FILE if one[1] == backend])]
    found = {(str(CHECKOUTS[backend].script(name)), tuple(words)) for text in texts for name, words in started(*text)}
    checkout = CHECKOUTS[backend].path()
    done = subprocess.run(
        [tiny.python(), "-c", PARSE, str(checkout / modules)], input=json.dumps(sorted(found)), cwd=checkout,
        env=tiny.environment(tmp_path), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    parsers = json.loads(done.stdout.splitlines()[-1])
    assert len(parsers) == count
    for path, live in parsers.items():
        read = schema.flags_of(checkout, Path(path).relative_to(checkout).as_posix())
        assert list(read) == list(live), "the flags, in the parser's order"
        different = [flag for flag, entry in live.items() if any(read[flag][key] != entry[key] for key in entry)]
        assert not different or backend == "musubi", "some of its choices are those of a library"
