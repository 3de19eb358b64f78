"""Every flag of a trainer on the page: listed as its parser has it, judged by runs, written into the one box."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs_helpers import data  # noqa: F401
from ui_helpers import PROJECT, browsing, serving
from ui_page import PATIENCE_S

from runs.flags import known_flags
from runs.paths import sd_scripts_dir
from ui import flags, form, new_lora

# As sd-scripts' own layout: the page must work where no checkout is, so these tests bring a small one of their own.
PARSER = """
import argparse

def setup_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ae", type=str, help="path")
    parser.add_argument("--output_dir", type=str)
    parser.add_argument("--network_dim", type=int)
    parser.add_argument("--split_mode", action="store_true")
    parser.add_argument("--optimizer_type", type=str)
    parser.add_argument("--guidance_scale", type=float, default=3.5)
    parser.add_argument("--log_level", choices=["DEBUG", "INFO"], help="Set it / ログ")
    parser.add_argument("--noise_offset", type=float, help="<img src=x onerror='document.title=1'> {{7*7}} ${7*7}")
    parser.add_argument("--betas", type=float, nargs="*")
    return parser
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A small checkout in place of sd-scripts'."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "flux_train_network.py").write_text(PARSER, encoding="utf-8")
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))
    return folder


def values(**given) -> dict:
    return {**form.defaults(), "model": "tiny-flux", "backend": "sd-scripts", "tier": "12G", **given}


def row(name: str, **given) -> dict:
    return next(flag for flag in flags.listing(values(**given))["flags"] if flag["name"] == name)


def test_the_list_says_who_sets_a_flag_and_what_may_be_set(data, checkout):  # noqa: F811
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
    assert level["choices"] == ["DEBUG", "INFO"] and (level["help"], level["brief"]) == ("Set it / ログ", "Set it")
    assert row("betas")["type"] == "list of numbers" and row("guidance_scale")["default"] == "3.5"


def test_the_built_in_trainers_flags_are_all_there():
    listed = flags.listing(values(backend="diffusers"))
    known = known_flags("diffusers", "flux")
    assert {flag["name"] for flag in listed["flags"]} == set(known) and len(known) > 50


def test_a_real_checkouts_flags_are_all_there(data):  # noqa: F811
    if not (sd_scripts_dir() / "flux_train_network.py").is_file():
        pytest.skip("no sd-scripts checkout: set SD_SCRIPTS_DIR or run ./start.sh sd-scripts")
    listed = flags.listing(values())["flags"]
    assert len(listed) == len(known_flags("sd-scripts", "flux")) > 150
    assert sum(bool(flags.JAPANESE.search(flag["brief"])) for flag in listed) < 10


def test_without_a_checkout_it_says_how_to_get_one(data, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(tmp_path / "none"))
    listed = flags.listing(values())
    assert listed["flags"] == [] and "run ./start.sh sd-scripts" in listed["problem"]
    assert flags.listing(values(model="flux-dev2pro", backend="diffusers"))["problem"]  # a pair that cannot be


@pytest.mark.parametrize(
    "line, said",
    [
        ("noise_offset=0.05", None),
        ("--noise-offset=0.05", None),
        ("betas=0.9 0.99", None),
        ("split_mode=yes", None),
        ("", None),
        ("noise_ofset=0.05", "sd-scripts has no flag 'noise_ofset'; did you mean noise_offset?"),
        ("noise_offset=much", "noise_offset: 'much' is not of type float"),
        ("log_level=LOUD", "log_level: 'LOUD' is none of DEBUG, INFO"),
        ("split_mode=3", "split_mode: is a switch"),
        ("output_dir=/", "output_dir follows from the run's folder and cannot be set"),
        ("network_dim=many", "Rank: Input should be a valid integer"),
        ("noise_offset", "'noise_offset': write KEY=VALUE"),
        ("betas=[1", "is not a JSON list"),
    ],
)
def test_a_line_is_judged_as_runs_does(data, checkout, line, said):  # noqa: F811
    found = flags.faults(values(flags=line))
    assert len(found) == (said is not None) and (said or "") in "".join(found)
    name, _, value = line.partition("=")
    if "=" in line:
        asked = {"model": "tiny-flux", "backend": "sd-scripts", "name": name, "value": value}
        assert flags.judge_flag(asked) == {"faults": found}


def test_every_wrong_line_is_told_at_once_and_as_text(data, checkout):  # noqa: F811
    shown = flags.note(values(flags="a=1\nnoise_offset=0.1\n\n<b>=2\nlog_level=<img>"))
    assert shown.count("<li>") == 3 and "&lt;img&gt;" in shown and "<b>" not in shown and "<img" not in shown


def test_refresh_tells_the_flags_with_the_rest(data, checkout):  # noqa: F811
    from ui import draft

    typed = values(name="x", flags="noise_ofset=1")
    plan, script, note, faults, *_ = new_lora.refresh(draft.new_id(), *(typed[key] for key in form.KEYS))
    assert "did you mean noise_offset" in note and plan and script and faults == {}


@pytest.mark.parametrize(
    "asked",
    [
        None,
        {},
        {"model": "tiny-flux", "backend": "sd-scripts", "name": 1, "value": ""},
        {"model": "no", "backend": "sd-scripts", "name": "a", "value": "1"},
        {"model": "tiny-flux", "backend": "rm -rf", "name": "a", "value": "1"},
        {"model": "tiny-flux", "backend": "diffusers", "name": "seed", "value": "1\nrank=2"},
    ],
)
def test_what_a_browser_sends_is_tested(asked):
    assert flags.judge_flag(asked) == {"faults": ["the page and the server do not fit; reload the page"]}


def test_no_parser_is_read_before_the_list_is_opened():
    code = "import sys, ui.page; ui.page.build(); print('presets.schema' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done


def test_a_flag_is_found_set_and_in_the_script(checkout, tmp_path):
    with serving(tmp_path / "data", SD_SCRIPTS_DIR=str(checkout)) as server, browsing() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        faults = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(server.url)
        page.locator("body.hp-open").wait_for()
        page.locator("#name input, #name textarea").first.fill("flags")
        page.locator("#model input").first.click()
        page.get_by_role("option", name=re.compile("Tiny Flux")).click()
        page.get_by_label("kohya's sd-scripts").click()
        page.get_by_text("More settings").click()
        box, note = page.locator("#flags textarea"), page.locator("#flag-note")
        box.fill("betas=0.9 0.99\nlog_levl=INFO")
        note.get_by_text("did you mean log_level?").wait_for()
        assert page.locator("[data-flag]").count() == 0
        page.get_by_text("All flags of the trainer").click()
        page.locator("[data-flag=noise_offset]").wait_for()
        page.get_by_label("Search the flags").fill("noise")
        page.get_by_text("1 of 9").wait_for()
        page.locator("[data-flag=noise_offset] button").click()
        value = page.get_by_label("Value of noise_offset", exact=True)
        value.fill("much")
        page.get_by_text("'much' is not of type float").wait_for()
        page.get_by_role("button", name="Set", exact=True).click()
        value.fill("0.05")
        page.get_by_role("button", name="Set", exact=True).click()
        page.locator("[data-flag=noise_offset]").get_by_text("yours: 0.05").wait_for()
        assert box.input_value() == "betas=0.9 0.99\nlog_levl=INFO\nnoise_offset=0.05"
        page.get_by_label("Search the flags").fill("network_dim")
        page.locator("[data-flag=network_dim] button").click()
        page.get_by_text("It follows from: Rank. Change it there.").wait_for()
        assert page.get_by_label("Value of network_dim", exact=True).count() == 0
        page.get_by_label("Search the flags").fill("noise_ofset")
        page.locator("#all-flags").get_by_text("did you mean noise_offset?").wait_for()
        page.get_by_label("Search the flags").fill("")
        box.fill(box.input_value().replace("log_levl", "log_level"))
        note.locator("li").wait_for(state="detached")
        page.get_by_text("The script", exact=True).click()
        # the editor draws only the lines in sight: ours are at its end
        end = """() => { const e = document.querySelector("#script .cm-scroller"); e.scrollTop = e.scrollHeight;
            return %s.test(e.innerText) }"""
        page.wait_for_function(end % r"/--noise_offset 0\.05/")
        shown = page.locator("#script").inner_text()
        assert "--betas 0.9 0.99" in shown and "--log_level INFO" in shown
        page.locator("[data-flag=noise_offset]").get_by_role("button", name="Take out").click()
        page.wait_for_function(end.replace("return", "return !") % "/noise_offset/")
        assert box.input_value() == "betas=0.9 0.99\nlog_level=INFO"
        page.get_by_text("Built in").click()  # another trainer, another list
        page.locator("#all-flags").get_by_text("flags of: Built in").wait_for()
        assert page.title() == "Hangproof" and faults == []
