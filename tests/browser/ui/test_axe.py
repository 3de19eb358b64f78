"""Everyone can use the page: axe-core finds nothing serious on any view of it, all of it is readable in three widths,
and the keyboard reaches every action."""

import shutil

import pytest
from PIL import Image
from ui_helpers import lora_file, photos, serving, watched, write_incident, write_run
from ui_page import a_tab, assert_accessible, faint_texts, field, has_focus, open_page, press, show_run, shows

from runs import slug
from ui.run import cards

AUTH = ("--auth", "me:a-long-secret")
VIEWS = [(390, "dark"), (1024, "light"), (1440, "dark")]
TABS = {"Other machines": "#store-refresh", "Doctor": "#job-doctor pre"}  # and what shows that it is ready
STATES = ("running", "failed")


def name_of(state: str) -> str:
    """The name of the run in a state."""
    return f"{state}_" + "a_very_long_name_without_any_break_" * 3


# The control that has the focus, and whether one sees it: an outline or a shadow that it has only with the focus, on
# itself, on its label or on the box around it.
FOCUS = """() => {
  const on = document.activeElement;
  if (!on || on === document.body) return null;
  const parent = on.parentElement;
  const around = [on, on.closest("label"), parent, parent.parentElement, on.nextElementSibling].filter(Boolean);
  const look = () => around.map((one) => {
    const style = getComputedStyle(one);
    return [style.outlineStyle === "none" ? "" : style.outline, style.boxShadow, style.borderColor].join("|");
  }).join();
  const name = on.id || on.getAttribute("aria-label") || on.innerText || on.value || on.outerHTML.slice(0, 90);
  const focused = look();
  on.blur();
  const rest = look();
  on.focus({ focusVisible: true, preventScroll: true });
  const kind = `${on.tagName} ${on.id || on.className}`;
  return { kind, name: `${on.tagName} ${name}`.slice(0, 120), seen: focused !== rest, key: on.outerHTML.slice(0, 300) };
}"""
# What can be clicked or typed into, by kind. Arrow keys move within radio buttons and tabs.
ACTIONS = """() => [...document.querySelectorAll(
    "button, a[href], input, textarea, select, summary, [role=button], [tabindex='0']")]
  .filter((one) => one.checkVisibility() && !one.closest("dialog:not([open]), [inert], .cm-editor"))
  .filter((one) => !one.matches(":disabled, [type=radio], [type=file], [role=tab], [tabindex='-1']"))
  .map((one) => `${one.tagName} ${one.id || one.className}`)"""
CLOSED = """() => [...document.querySelectorAll("button.label-wrap:not(.open, [aria-expanded=true])")]
  .filter((one) => one.checkVisibility()).forEach((one) => one.click())"""
# While `quiet` is set, no interval of the page fires: each tick of an open fold costs Gradio's client a tenth of a
# second or more, and a dozen folds that are open at once leave the browser no time for anything else.
INTERVALS = """{
  const real = window.setInterval;
  window.setInterval = (act, ...more) => real((...given) => window.quiet || act(...given), ...more);
}"""
# A state in each of these colours, beside that of the run.
PILLS = """(pill, colours) => colours.forEach((colour) => {
  const one = pill.cloneNode(true);
  one.className = `hp-pill hp-${colour}`;
  pill.after(one);
})"""
# Not a style element: the login page's policy forbids other styles than its own.
STILL = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("*, *::before, *::after { transition: none !important; animation: none !important; }");
  document.adoptedStyleSheets = [sheet];
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a login and a run in each of these states, with all that a run can have."""
    data = tmp_path_factory.mktemp("axe") / "data"
    for state in STATES:
        status = {"state": state, "reason": "no_break_" * 30, "loss": 0.1, "checkpoint": {"step": 30}}
        folder = write_run(data, name_of(state), **status)
        (folder / "training.log").write_text("y" * 500 + "\n" + "a line of the log\n" * 300, encoding="utf-8")
        lora_file(folder / f"{folder.name}-step00000020.safetensors", 20)
        (folder / "sample").mkdir()
        (folder / "sample_prompts.txt").write_text("a cat\n", encoding="utf-8")
        shutil.copy(photos("coffee.png")[0], folder / "sample" / f"{folder.name}_000020_00_20260101120000_42.png")
        lines = "".join(f'{{"step": {n}, "loss": {1 / (n + 1)}}}\n' for n in range(40))
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
        report = "# Hang\n\n`" + "x" * 300 + "`\n\n```\n" + "a long line " * 40 + "\n```"
        write_incident(folder, report=report, explanation="why " * 40, detect_s=2.0)
    with watched(data / "outputs" / slug(name_of("running"))), serving(data, *AUTH) as running:
        yield running


@pytest.fixture(scope="module")
def page(browser, server):
    """The page, logged in, without transitions."""
    with a_tab(browser) as tab:
        form = {"username": "me", "password": "a-long-secret"}
        assert tab.context.request.post(f"{server.url}/login", form=form).ok
        tab.add_init_script(INTERVALS)
        open_page(tab, server)
        tab.evaluate(STILL)
        tab.get_by_role("tab", name="Doctor").click()  # its report takes seconds, meanwhile the others are looked at
        yield tab


def stops_of(page, where: str, most: int = 400) -> str:
    """Walk with the Tab key from the page's top to its end: each stop shows its focus, and every action is one.

    Returns the names of the stops.
    """
    page.evaluate("() => { window.quiet = true; document.activeElement.blur(); scrollTo(0, 0); }")
    page.locator("h1").first.click(position={"x": 1, "y": 1})
    stops: list[dict] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUS)
        if stop is None or (len(stops) > 5 and stop["key"] == stops[0]["key"]):
            break
        stops.append(stop)
    else:
        raise AssertionError(f"{where}: Tab does not leave {stops[-1]['name']}")
    assert [one["name"] for one in stops if not one["seen"]] == [], where
    assert not set(page.evaluate(ACTIONS)) - {one["kind"] for one in stops}, where
    page.evaluate("window.quiet = false")
    return " · ".join(one["name"] for one in stops)


def test_the_keyboard_reaches_every_action_with_a_visible_focus(page, server):
    page.get_by_role("tab", name="New LoRA").click()
    with page.expect_file_chooser() as chooser:
        page.locator(".hp-drop").press("Enter")
    chooser.value.set_files([str(path) for path in photos("chelsea.png", "coffee.png")])
    shows(page, 2)
    names = stops_of(page, "the form")
    for wanted in ("Log out", "New LoRA", "Caption of chelsea.png", "Remove coffee.png", "Add trigger word", "start"):
        assert wanted in names, (wanted, names)

    page.get_by_role("group", name="What do you train?").wait_for()
    for opened in (True, False):
        page.get_by_role("button", name="More settings").press("Enter")
        page.get_by_role("button", name="More settings", expanded=opened).wait_for()

    # The images can be skipped. When a button goes with its image, the focus moves to the next image.
    skip = page.get_by_role("link", name="Skip the images")
    skip.focus()
    assert skip.bounding_box()["x"] >= 0  # visible while it has the focus
    page.keyboard.press("Enter")
    has_focus(page, "id", "start")
    page.get_by_label("Remove chelsea.png").press("Enter")
    has_focus(page, "aria-label", "Remove coffee.png")

    for state in STATES:
        show_run(page, server, slug(name_of(state)))
        stops_of(page, state)
    for name, ready in TABS.items():
        press(page.get_by_role("tab", name=name), page.locator(ready).first)
        stops_of(page, name)


def look_at(page, width: int, scheme: str) -> None:
    """Show the page in this width and colour scheme."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    if page.locator("body.hp-open").count():
        page.wait_for_function(f"document.body.classList.contains('dark') === {str(scheme == 'dark').lower()}")


def checked(page, where: str, *views: tuple[int, str]) -> None:
    """The view is accessible in these widths and colour schemes."""
    for width, scheme in views:
        look_at(page, width, scheme)
        try:
            assert_accessible(page)
        except AssertionError as error:
            error.add_note(f"{where}, {width} pixels, {scheme}")
            raise


def test_axe_finds_nothing_serious_and_all_is_readable_in_three_widths(browser, page, server, tmp_path):
    with a_tab(browser) as login:
        login.goto(f"{server.url}/login")
        login.evaluate(STILL)
        login.get_by_label("User name").fill("me")
        login.get_by_label("Password").fill("wrong")
        press(login.get_by_role("button", name="Log in"), login.get_by_role("alert"))
        checked(login, "the login page with an error", VIEWS[0])

    for state, view in zip(STATES, VIEWS, strict=False):
        page.set_viewport_size({"width": 1440, "height": 900})
        show_run(page, server, slug(name_of(state)))
        checked(page, state, view)
    page.get_by_test_id("state").evaluate(PILLS, sorted({colour for colour, _, _ in cards.STATES.values()}))
    for scheme in ("dark", "light"):
        look_at(page, 1440, scheme)
        assert faint_texts(page) == [], scheme
    for (name, ready), view in zip(TABS.items(), VIEWS, strict=False):
        page.set_viewport_size({"width": 1440, "height": 900})
        press(page.get_by_role("tab", name=name), page.locator(ready).first)
        checked(page, name, view)

    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_role("tab", name="New LoRA").click()
    many = [tmp_path / f"{'a-long-name-' * 8 if n == 0 else ''}{n:03}.png" for n in range(14)]
    for n, path in enumerate(many):
        Image.new("RGB", (64 + n, 64), (n * 15, 90, 120)).save(path)
    page.get_by_test_id("image-picker").set_input_files([str(path) for path in many])
    page.get_by_text("Page 1 of 2").wait_for()
    # Every accordion is opened.
    page.locator("#image-check button.label-wrap").first.click()
    page.locator("#check-kinds").wait_for()  # with a tick; the others come with the click that opens them
    page.evaluate("window.quiet = true")
    for _ in range(2):  # the second time for those inside others
        page.evaluate(CLOSED)
        page.locator("#flags").wait_for()
    for part in ["flag-search", "template-replace", "sweep-rank", "rehearse", "bulk-apply", "write-captions"]:
        page.locator(f"#{part}").wait_for()
    page.get_by_test_id("models").wait_for()
    field(page, "learning_rate").fill("very " * 30)
    page.locator("#learning_rate .hp-field-error").wait_for()
    press(page.locator("#start"), page.locator("#problem .hp-bad"))
    checked(page, "the form with images, every accordion open, errors, and the mouse on Start", *VIEWS)
