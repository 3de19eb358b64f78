"""What a card says about its caption follows what is typed, without a reload."""

from ui_helpers import photos
from ui_page import caption, drop, open_page, saved, until


def test_a_typed_caption_removes_the_warning_and_an_emptied_one_brings_it_back(server, tab):
    open_page(tab, server)
    drop(tab, *photos("astronaut.png"), count=1)
    warning = tab.locator(".hp-card[data-file='astronaut.png'] .hp-warnings").get_by_text("No caption")
    warning.wait_for()
    for text, shown in (("an astronaut", 0), ("", 1)):
        caption(tab, "astronaut.png").fill(text)
        saved(tab, "astronaut.png")
        caption(tab, "astronaut.png").blur()
        until(lambda shown=shown: warning.count() == shown, f"what the card says of the caption {text!r}")
