"""The table of a trainer's options: listed as in its parser, validated by runs, stored in one field."""

import subprocess
import sys
from pathlib import Path

import pytest
from parser_checkout import parser_checkout
from ui_helpers import PROJECT

import presets
from runs.flags import known_flags
from runs.paths import CHECKOUTS
from ui.new import flags, form, settings


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A small checkout in place of sd-scripts."""
    folder = parser_checkout(tmp_path / "checkout")
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))
    return folder


def values(**given) -> dict:
    return {**form.defaults(), "model": "flux-dev", "backend": "sd-scripts", "tier": "12G", **given}


def row(name: str, **given) -> dict:
    return next(flag for flag in flags.listing(values(**given))["flags"] if flag["name"] == name)


def test_the_list_shows_what_sets_an_option_and_which_values_are_valid(data, checkout):
    owners = {flag["name"]: (flag["by"], flag["value"], flag["locked"]) for flag in flags.listing(values())["flags"]}
    assert list(owners) == sorted(owners)
    assert owners.pop("ae")[::2] == ("Base model", False)
    assert owners == {
        "output_dir": ("the run's folder", "", True),
        "network_dim": ("Rank", "", True),
        "split_mode": ("VRAM", "true", True),
        "optimizer_type": ("VRAM", "adafactor", True),
        "guidance_scale": ("Hangproof", "1", False),
        "log_level": ("", "", False),
        "noise_offset": ("", "", False),
        "betas": ("", "", False),
    }
    assert row("split_mode", tier="16G")["by"] == "" and not row("split_mode", tier="16G")["locked"]
    level = row("log_level")
    assert level["choices"] == ["DEBUG", "INFO"] and level["help"] == "Set it"
    assert row("betas")["type"] == "list of numbers" and row("guidance_scale")["default"] == "3.5"


def test_the_built_in_trainers_options_are_complete():
    listed = flags.listing(values(backend="diffusers"))
    known = known_flags("diffusers", "flux")
    assert {flag["name"] for flag in listed["flags"]} == set(known) and len(known) > 50


def test_a_real_checkouts_options_are_complete(data):
    if not (CHECKOUTS["sd-scripts"].path() / "flux_train_network.py").is_file():
        pytest.skip("no sd-scripts checkout: set SD_SCRIPTS_DIR or run ./start.sh sd-scripts")
    listed = flags.listing(values())["flags"]
    assert len(listed) == len(known_flags("sd-scripts", "flux")) > 150
    assert sum(bool(flags.JAPANESE.search(flag["help"])) for flag in listed) < 10


def test_without_a_checkout_the_message_says_how_to_install_one(data, tmp_path, monkeypatch):
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path / "none"))
    listed = flags.listing(values())
    assert listed["flags"] == [] and "Run ./start.sh sd-scripts" in listed["problem"]
    assert flags.listing(values(model="flux-dev2pro", backend="diffusers"))["problem"]  # an unsupported pair
    monkeypatch.setenv("MUSUBI_DIR", str(tmp_path / "none"))
    listed = flags.listing(values(model="z-image", backend="musubi"))
    assert listed["flags"] == [] and "musubi-tuner is not installed" in listed["problem"]
    assert "Run ./start.sh musubi (or set MUSUBI_DIR)" in listed["problem"]


@pytest.mark.parametrize("model", [key for key in presets.models() if "musubi" in presets.backends_of(key)])
def test_musubis_options_are_listed_with_what_the_model_and_the_tier_set(data, model):
    if not CHECKOUTS["musubi"].installed():
        pytest.skip("no musubi-tuner checkout: set MUSUBI_DIR or run ./start.sh musubi")
    tier = presets.smallest_tier(model, "musubi")
    listed = {flag["name"]: flag for flag in flags.listing(values(model=model, backend="musubi", tier=tier))["flags"]}
    assert len(listed) > 100
    assert listed["dit"]["by"] == "Base model" and listed["network_dim"]["by"] == "Rank"
    for name in presets.tier_flags(model, "musubi", tier):
        if name in listed:
            assert listed[name]["by"] == "VRAM" and listed[name]["locked"], name


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--noise-offset=0.05\nbetas=0.9 0.99\nsplit_mode=yes\n\n", []),
        ("noise_ofset=0.05", ["did you mean noise_offset?"]),
        ("a=1\nnoise_offset=0.1\n\nbetas=x\nlog_level=<img>", ["a: ", "betas", "<img>"]),
        ("noise_offset=much\nsplit_mode=3\nbetas=[1", ["'much'", "split_mode", "JSON list"]),
    ],
)
def test_each_line_is_judged_beside_the_field(mine, checkout, line, expected):
    marks = settings.save_settings({"draft": mine, "changes": values(name="x", flags=line)})["marks"].get("flags", [])
    texts = [text for _, text in marks]
    assert len(texts) == len(expected) and all(any(part in text for text in texts) for part in expected), texts


def test_the_table_is_searched_and_says_what_sets_an_option(data, checkout):
    listed = flags.listing(values())
    assert flags.markup(listed).count("<tr>") == len(listed["flags"]) + 1
    found = flags.markup(listed, "NETWORK dim")
    assert found.count("<tr>") == 2 and "Rank. Change it there" in found
    assert "No option has these words" in flags.markup(listed, "no such option")
    listed["flags"][0]["help"] = "<img src=x>"
    assert "<img" not in flags.markup(listed)


@pytest.mark.slow
def test_no_parser_is_read_before_the_list_is_opened():
    code = "import sys, ui.page; ui.page.build(); print('presets.schema' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done
