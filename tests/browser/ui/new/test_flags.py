"""The table of a trainer's options: listed as in its parser, validated by runs, stored in one field."""

import re

from parser_checkout import parser_checkout
from ui_helpers import serving
from ui_page import field, open_page

# The editor draws only visible lines; the options are at its end.
END = """() => { const e = document.querySelector("#script .cm-scroller"); e.scrollTop = e.scrollHeight;
  return %s.test(e.innerText) }"""


def test_an_option_is_found_set_and_in_the_script(tab, tmp_path):
    checkout = parser_checkout(tmp_path / "checkout")
    with serving(tmp_path / "data", SD_SCRIPTS_DIR=str(checkout)) as server:
        open_page(tab, server)
        field(tab, "name").fill("flags")
        field(tab, "model").click()
        tab.get_by_role("option", name=re.compile("FLUX.1-schnell")).click()
        tab.get_by_label("kohya's sd-scripts").click()
        tab.get_by_text("More settings").click()
        box, note = tab.locator("#flags textarea"), tab.locator("#flags")
        box.fill("betas=0.9 0.99\nlog_levl=INFO")
        note.get_by_text("did you mean log_level?").wait_for()
        assert tab.locator("[data-flag]").count() == 0
        tab.get_by_text("All trainer options").click()
        search, offset = tab.get_by_label("Search options"), tab.locator("[data-flag=noise_offset]")
        offset.wait_for()
        search.fill("noise")
        tab.get_by_text("1 of 9").wait_for()
        offset.locator("button").click()
        value, put = (
            tab.get_by_label("Value of noise_offset", exact=True),
            tab.get_by_role("button", name="Set", exact=True),
        )
        value.fill("much")
        tab.locator(".hp-flag-errors").get_by_text("'much'").wait_for()
        put.click()
        value.fill("0.05")
        put.click()
        offset.get_by_text("your value: 0.05").wait_for()
        assert box.input_value() == "betas=0.9 0.99\nlog_levl=INFO\nnoise_offset=0.05"
        search.fill("network_dim")
        tab.locator("[data-flag=network_dim] button").click()
        tab.get_by_text("Set by: Rank. Change it there.").wait_for()
        assert tab.get_by_label("Value of network_dim", exact=True).count() == 0
        search.fill("noise_ofset")
        tab.locator("#all-flags").get_by_text("did you mean noise_offset?").wait_for()
        search.fill("")
        box.fill(box.input_value().replace("log_levl", "log_level"))
        note.get_by_text("did you mean").wait_for(state="detached")
        tab.get_by_text("The script", exact=True).click()
        tab.wait_for_function(END % r"/--noise_offset 0\.05/")
        shown = tab.locator("#script").inner_text()
        assert "--betas 0.9 0.99" in shown and "--log_level INFO" in shown
        offset.get_by_role("button", name="Remove").click()
        tab.wait_for_function(END.replace("return", "return !") % "/noise_offset/")
        assert box.input_value() == "betas=0.9 0.99\nlog_level=INFO"
        tab.get_by_text("Built-in (Diffusers)").click()  # another trainer, another list
        tab.locator("#all-flags").get_by_text("options of Built-in (Diffusers)").wait_for()
