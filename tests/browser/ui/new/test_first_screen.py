"""What a new user sees without scrolling: images first, then name and trigger word, and Start."""

from ui_helpers import photos
from ui_page import drop, open_page

# The fields and buttons that can be used; a group of radio buttons is one, and a link in a sentence is none.
CONTROLS = """() => new Set([...document.querySelectorAll("button, input, textarea, select")]
  .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(".visually-hidden, [aria-hidden=true]"))
  .map((one) => (one.type === "radio" ? one.closest("fieldset") : one))).size"""


def test_what_a_run_needs_is_on_the_first_screen(tab, server):
    tab.set_viewport_size({"width": 1440, "height": 900})
    open_page(tab, server)
    tab.locator("#plan .hp-plan").wait_for()
    places = {name: tab.locator(name).bounding_box() for name in (".hp-drop", "#name", "#trigger", "#start")}
    assert all(box["y"] + box["height"] <= 900 for box in places.values()), places
    assert [*places] == sorted(places, key=lambda name: places[name]["y"]), "images first"
    assert tab.evaluate(CONTROLS) <= 25

    tab.set_viewport_size({"width": 390, "height": 844})
    drop(tab, *photos("chelsea.png"), count=1)
    tab.evaluate("scrollTo(0, 0)")
    picture, start = (tab.locator(name).first.bounding_box() for name in (".hp-card img", "#start"))
    assert picture["y"] + 100 < start["y"] < 844, (picture, start)
    tab.mouse.wheel(0, 600)
    tab.wait_for_function("scrollY > 300")
    assert tab.locator("#start").bounding_box()["y"] == start["y"], "Start stays in sight"


# Scrolls until the label is as high as Start; says what a press there meets.
UNDER_START = """() => {
  const middle = (one) => { const box = one.getBoundingClientRect(); return box.y + box.height / 2; };
  const label = document.querySelector("#name label > span"), start = document.querySelector("#start");
  scrollBy({ top: middle(label) - middle(start), behavior: "instant" });
  const met = document.elementFromPoint(label.getBoundingClientRect().x + 2, middle(start));
  return [Math.round(middle(label) - middle(start)), met.closest("#start-bar") ? "Start" : met.outerHTML];
}"""


def test_what_scrolls_under_start_is_covered_by_it(tab, server):
    tab.set_viewport_size({"width": 1440, "height": 500})
    open_page(tab, server)
    tab.locator("#plan .hp-plan").wait_for()
    assert tab.evaluate(UNDER_START) == [0, "Start"]


def test_nothing_moves_once_the_page_is_open(tab, bare_server):
    shown = "['#model-note', '#plan', '#start'].map((one) => document.querySelector(one).getBoundingClientRect().y)"
    tab.add_init_script(f"addEventListener('hangproof-open', () => (window.places = {shown}))")
    open_page(tab, bare_server)
    tab.locator("#note-model-0").wait_for()  # a machine without a GPU
    tab.evaluate("hangproof.flush()")
    tab.wait_for_timeout(1000)  # until the answer to that would have moved something
    assert tab.evaluate("places") == tab.evaluate(shown)
