"""In a real browser: values are judged beside their field while they are typed; a trainer's options are listed."""

import re

from checkout_helpers import parser_checkout
from ui_helpers import serving
from ui_page import field, gpu_fold, more_settings, open_page, unfold, until

# The editor draws only visible lines; the options are at its end.
END = """(text) => { const e = document.querySelector("#script .cm-scroller"); e.scrollTop = e.scrollHeight;
  return e.innerText.includes(text); }"""


def test_an_option_is_found_typed_and_in_the_script(tab, tmp_path):
    checkout = parser_checkout(tmp_path / "checkout")
    with serving(tmp_path / "data", SD_SCRIPTS_DIR=str(checkout)) as server:
        open_page(tab, server)
        field(tab, "name").fill("flags")
        field(tab, "model").click()
        tab.get_by_role("option", name=re.compile("FLUX.1-schnell")).click()
        gpu_fold(tab)
        tab.get_by_label("kohya's sd-scripts").click()
        more_settings(tab)

        # What makes no sense is an error beside its field and above Start.
        field(tab, "rank").fill("1000000000")
        error = tab.locator("#rank .hp-field-error").get_by_text("Must be 16384 or less").first
        error.wait_for()
        tab.locator("#plan .hp-findings .hp-bad").get_by_text("Must be 16384 or less").first.wait_for()
        invalid = tab.locator("#rank [aria-invalid=true]")
        named = lambda: error.get_attribute("id") in (invalid.get_attribute("aria-describedby") or "")  # noqa: E731
        until(named, "the field names its error")
        field(tab, "rank").fill("4")
        tab.locator("#rank .hp-field-error").wait_for(state="detached")

        box, note = tab.locator("#flags textarea"), tab.locator("#flags")
        box.fill("betas=0.9 0.99\nlog_levl=INFO")
        note.get_by_text("did you mean log_level?").wait_for()
        unfold(tab.locator("#all-flags-fold button.label-wrap"))
        search, shown = field(tab, "flag-search"), tab.locator("#flag-table")
        shown.get_by_role("rowheader", name="network_dim").wait_for()
        search.fill("noise")
        shown.get_by_role("rowheader", name="network_dim").wait_for(state="detached")
        shown.get_by_role("rowheader", name="noise_offset").wait_for()
        box.fill("betas=0.9 0.99\nlog_level=INFO\nnoise_offset=0.05")
        note.get_by_text("did you mean").wait_for(state="detached")
        tab.get_by_text("The script", exact=True).click()
        tab.locator("#script .cm-scroller").wait_for()
        for option in ("noise_offset 0.05", "betas 0.9 0.99", "log_level INFO"):
            tab.wait_for_function(END, arg=f"--{option}")
        tab.get_by_text("Built-in (Diffusers)").click()  # another trainer, another list
        shown.get_by_text("Options of Built-in (Diffusers)").wait_for()
