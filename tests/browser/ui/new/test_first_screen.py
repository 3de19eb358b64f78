"""What a new user sees without scrolling: images first, then name and trigger word, and Start."""

from ui_helpers import photos
from ui_page import drop, open_page, until

# The fields and buttons that can be used; a group of radio buttons is one, and a link in a sentence is none.
CONTROLS = """() => new Set([...document.querySelectorAll("button, input, textarea, select")]
  .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(".visually-hidden, [aria-hidden=true]"))
  .map((one) => (one.type === "radio" ? one.closest("fieldset") : one))).size"""


def test_what_a_run_needs_is_on_the_first_screen(tab, server):
    tab.set_viewport_size({"width": 1440, "height": 900})
    open_page(tab, server)
    tab.locator("#plan .hp-plan").wait_for()

    def in_order() -> bool:
        places = [tab.locator(name).bounding_box() for name in (".hp-drop", "#name", "#trigger", "#start")]
        tops = [box["y"] for box in places]
        return tops == sorted(tops) and all(box["y"] + box["height"] <= 900 for box in places)

    until(in_order, "images, name, trigger word and Start on the screen, in this order")
    assert tab.evaluate(CONTROLS) <= 25

    tab.set_viewport_size({"width": 390, "height": 844})
    drop(tab, *photos("chelsea.png"), count=1)
    tab.evaluate("scrollTo(0, 0)")

    def height(name: str) -> float:
        return tab.locator(name).first.bounding_box()["y"]

    until(lambda: height(".hp-card img") + 100 < height("#start") < 844, "the picture above Start")
    tab.mouse.wheel(0, 600)
    tab.wait_for_function("scrollY > 300")
    until(lambda: 0 < height("#start") < 844, "Start stays in sight")


def test_nothing_moves_once_the_page_is_open(tab, bare_server):
    shown = "['#model-note', '#plan', '#start'].map((one) => document.querySelector(one).getBoundingClientRect().y)"
    tab.add_init_script(f"addEventListener('hangproof-open', () => (window.places = {shown}))")
    open_page(tab, bare_server)
    tab.locator("#note-model-0").wait_for()  # a machine without a GPU
    tab.evaluate("hangproof.flush()")
    tab.wait_for_timeout(1000)  # until the answer to that would have moved something
    assert tab.evaluate("places") == tab.evaluate(shown)
