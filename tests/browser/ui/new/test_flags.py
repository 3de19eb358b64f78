"""The table of a trainer's options: listed as in its parser, validated by runs, stored in one field."""

import re

from parser_checkout import parser_checkout
from ui_helpers import serving
from ui_page import field, open_page, until

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
        tab.get_by_text("All trainer options").click()
        option, value, put = field(tab, "flag-option"), field(tab, "flag-value"), tab.locator("#flag-set")

        def choose(words: str, name: str) -> None:
            option.click()
            option.fill(words)
            tab.get_by_role("option", name=re.compile(f"^{name} ")).click()

        option.wait_for()
        choose("noise", "noise_offset")
        value.fill("much")
        put.click()
        tab.locator("#flag-note").get_by_text("'much'").wait_for()
        value.fill("0.05")
        put.click()
        tab.locator("#flag-about").get_by_text("Your value: 0.05").wait_for()
        until(lambda: box.input_value() == "betas=0.9 0.99\nlog_levl=INFO\nnoise_offset=0.05", "the line")
        choose("network_dim", "network_dim")
        tab.locator("#flag-about").get_by_text("Set by: Rank. Change it there.").wait_for()
        assert not value.is_visible()
        choose("noise", "noise_offset")
        value.wait_for()
        box.fill(box.input_value().replace("log_levl", "log_level"))
        note.get_by_text("did you mean").wait_for(state="detached")
        tab.get_by_text("The script", exact=True).click()
        tab.locator("#script .cm-scroller").wait_for()
        tab.wait_for_function(END % r"/--noise_offset 0\.05/")
        shown = tab.locator("#script").inner_text()
        assert "--betas 0.9 0.99" in shown and "--log_level INFO" in shown
        tab.locator("#flag-remove").click()
        tab.wait_for_function(END.replace("return", "return !") % "/noise_offset/")
        until(lambda: box.input_value() == "betas=0.9 0.99\nlog_level=INFO", "the line is gone")
        tab.get_by_text("Built-in (Diffusers)").click()  # another trainer, another list
        tab.locator("#flag-option").get_by_text("Options of Built-in (Diffusers)").wait_for()
