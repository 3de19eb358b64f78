"""The table of a trainer's options: listed as in its parser, validated by runs, stored in one field."""

import re
from pathlib import Path

import pytest
from parser_checkout import parser_checkout
from ui_helpers import serving
from ui_page import a_tab, field, open_page


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A small checkout in place of sd-scripts."""
    folder = parser_checkout(tmp_path / "checkout")
    monkeypatch.setenv("SD_SCRIPTS_DIR", str(folder))
    return folder


def test_an_option_is_found_set_and_in_the_script(browser, checkout, tmp_path):
    with serving(tmp_path / "data", SD_SCRIPTS_DIR=str(checkout)) as server, a_tab(browser) as page:
        open_page(page, server)
        field(page, "name").fill("flags")
        field(page, "model").click()
        page.get_by_role("option", name=re.compile("FLUX.1-schnell")).click()
        page.get_by_label("kohya's sd-scripts").click()
        page.get_by_text("More settings").click()
        box, note = page.locator("#flags textarea"), page.locator("#flags")
        box.fill("betas=0.9 0.99\nlog_levl=INFO")
        note.get_by_text("did you mean log_level?").wait_for()
        assert page.locator("[data-flag]").count() == 0
        page.get_by_text("All trainer options").click()
        page.locator("[data-flag=noise_offset]").wait_for()
        page.get_by_label("Search options").fill("noise")
        page.get_by_text("1 of 9").wait_for()
        page.locator("[data-flag=noise_offset] button").click()
        value = page.get_by_label("Value of noise_offset", exact=True)
        value.fill("much")
        page.locator(".hp-flag-errors").get_by_text("'much'").wait_for()
        page.get_by_role("button", name="Set", exact=True).click()
        value.fill("0.05")
        page.get_by_role("button", name="Set", exact=True).click()
        page.locator("[data-flag=noise_offset]").get_by_text("your value: 0.05").wait_for()
        assert box.input_value() == "betas=0.9 0.99\nlog_levl=INFO\nnoise_offset=0.05"
        page.get_by_label("Search options").fill("network_dim")
        page.locator("[data-flag=network_dim] button").click()
        page.get_by_text("Set by: Rank. Change it there.").wait_for()
        assert page.get_by_label("Value of network_dim", exact=True).count() == 0
        page.get_by_label("Search options").fill("noise_ofset")
        page.locator("#all-flags").get_by_text("did you mean noise_offset?").wait_for()
        page.get_by_label("Search options").fill("")
        box.fill(box.input_value().replace("log_levl", "log_level"))
        note.get_by_text("did you mean").wait_for(state="detached")
        page.get_by_text("The script", exact=True).click()
        # the editor draws only visible lines; the options are at its end
        end = """() => { const e = document.querySelector("#script .cm-scroller"); e.scrollTop = e.scrollHeight;
            return %s.test(e.innerText) }"""
        page.wait_for_function(end % r"/--noise_offset 0\.05/")
        shown = page.locator("#script").inner_text()
        assert "--betas 0.9 0.99" in shown and "--log_level INFO" in shown
        page.locator("[data-flag=noise_offset]").get_by_role("button", name="Remove").click()
        page.wait_for_function(end.replace("return", "return !") % "/noise_offset/")
        assert box.input_value() == "betas=0.9 0.99\nlog_level=INFO"
        page.get_by_text("Built-in (Diffusers)").click()  # another trainer, another list
        page.locator("#all-flags").get_by_text("options of Built-in (Diffusers)").wait_for()
        assert page.title() == "Hangproof"
