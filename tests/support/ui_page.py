"""User actions on the page as functions of a Playwright page: type, drop, choose, start, wait for a state."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Error, TimeoutError
from ui_helpers import photos, serving

PATIENCE_S = 90  # for the page itself; a busy machine responds late
RUN_S = 400  # for a run on the tiny model


@contextlib.contextmanager
def a_tab(browser, width: int = 1280, height: int = 900, **options) -> Iterator:
    """A new tab. It fails the test on a request to another machine, a script error or a dialog."""
    errors = []
    context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True, **options)
    context.set_default_timeout(PATIENCE_S * 1000)
    page = context.new_page()
    page.on("request", lambda r: r.url.startswith(("http://127.0.0.1:", "data:", "blob:")) or errors.append(r.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
    page.errors = errors
    waiting, console, unanswered = {}, [], []
    page.on("request", lambda r: waiting.update({r: time.monotonic()}))
    for ended in ("requestfinished", "requestfailed"):
        page.on(ended, lambda r: waiting.pop(r, None))
    page.on("requestfailed", lambda r: unanswered.append(r.url))  # the server is gone: a 404 is an answer
    page.on("console", lambda message: console.append(message.text))
    try:
        yield page
    except Exception as error:  # a failed test says what the page was doing
        with contextlib.suppress(Error):
            page.wait_for_timeout(500)  # what happened while the test asked for something else
        now = time.monotonic()
        error.add_note(f"errors of the page: {errors}, its console: {console[-10:]}")
        waited = [(request.url, f"{now - since:.1f} s") for request, since in waiting.items()]
        error.add_note(f"requests without an answer: {waited}")
        raise
    finally:
        context.close()
    if unanswered:  # a test that ends its server may end it while a page loads
        errors = [error for error in errors if "Failed to fetch dynamically imported module" not in error]
    assert errors == [], errors


def field(page, key: str):
    return page.locator(f"#{key} input, #{key} textarea").first


def become(page, **expected: str) -> None:
    """Wait until these fields have these values."""

    def now(key: str) -> str | None:
        chosen = page.locator(f"#{key} input:checked")  # of radio buttons
        return chosen.get_attribute("value") if key in ("tier", "backend") else field(page, key).input_value()

    until(lambda: {key: now(key) for key in expected} == expected, f"the page shows {expected}")


@contextlib.contextmanager
def serving_again(pages: list, data, port: int, **environment) -> Iterator:
    """A server in place of one that ended, once these open pages have loaded themselves again."""
    for page in pages:
        page.evaluate("window.notReloaded = true")
    with serving(data, port=port, **environment) as server:
        for page in pages:
            page.wait_for_function("!window.notReloaded && document.body?.classList.contains('hp-open')")
        yield server


def press(target, shown) -> None:
    """Click on an element, and wait for what that shows."""
    target.click()
    shown.wait_for()


def open_page(page, server) -> None:
    """Open the page and wait until the form is enabled."""
    page.goto(server.url)
    page.locator("body.hp-open").wait_for()


def show_run(page, server, name: str) -> None:
    """Select a run: in the list of an open page, else by its address."""
    if clicked := page.url.startswith(server.url):
        page.get_by_role("tab", name="Runs").click()
        page.locator(f".hp-run[data-run='{name}']").click()
    else:
        page.goto(f"{server.url}/?run={name}")
        page.locator("body.hp-open").wait_for()
    page.locator(f".hp-here[data-run='{name}']").wait_for()
    page.locator(f"[data-testid=run-name][data-run='{name}']").wait_for()
    if clicked:  # a tick may show the run before the click has its answer, which closes the folds
        two_ticks(page)


def two_ticks(page) -> None:
    """Wait until the tab Runs has asked twice: no answer is under way then that was asked for before."""
    for _ in range(2):
        with page.expect_response("**/run/predict*"):
            pass


@contextlib.contextmanager
def hold(page, what: str = "", to: Any = "**/component_server/", first: bool = False) -> Iterator[Callable[[], None]]:
    """Hold requests that contain a text back until the end of the block, or only the first one. Yields what waits for one."""
    held, over = list[Any](), False

    def handle(route) -> None:
        ours = what in (route.request.post_data or "") and not (first and held)
        held.append(route) if ours and not over else route.continue_()

    def wait() -> None:
        until(lambda: page.wait_for_timeout(50) or held, f"a request with {what!r}")

    page.route(to, handle)
    yield wait
    wait()
    over = True
    for route in held:
        route.continue_()
    page.unroute(to, handle)


def drop(page, *paths, count: int) -> None:
    """Give files to the drop zone and wait until the page shows `count` images."""
    page.get_by_test_id("image-picker").set_input_files([str(p) for p in paths])
    shows(page, count)


def shows(page, count: int) -> None:
    """Wait until the page shows this number of images."""
    page.get_by_test_id("image-count").get_by_text(re.compile(rf"^{count} images?\b")).wait_for()


def captions(page, name: str = "card.dataset.file") -> dict[str, str]:
    """Captions by image file, or by what the expression `name` says of a card."""
    entry = f"(card) => [{name}, card.querySelector('textarea').value]"
    return page.evaluate(f"Object.fromEntries([...document.querySelectorAll('.hp-card')].map({entry}))")


def caption(page, file: str):
    return page.locator(f".hp-card[data-file='{file}'] textarea")


def saved(page, file: str) -> None:
    """Wait until a caption is stored."""
    page.locator(f".hp-card[data-file='{file}'] .hp-saved").get_by_text("saved", exact=True).wait_for()


def nothing_is_kept(page) -> bool:
    """Whether the server has confirmed everything; false while the page is being reloaded."""
    with contextlib.suppress(Error):
        ready = "document.body.classList.contains('hp-open')"
        return page.evaluate(f"{ready} && !hangproof.unsaved().length && !hangproof.kept()")
    return False


def until(condition, what: str, seconds: float = PATIENCE_S) -> None:
    """Wait until `condition()` is true; fails with `what` after `seconds`. A page that reloads is asked again."""
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except Error as error:
            if not re.search("Execution context was destroyed|hangproof is not defined", str(error)):
                raise
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def has_focus(page, attribute: str, value: str) -> None:
    """Wait until the element with the focus has this attribute; the page moves the focus after what it shows."""
    shown = "([name, value]) => document.activeElement.getAttribute(name) === value"
    page.wait_for_function(shown, arg=[attribute, value])


def unfold(label) -> None:
    """Open a fold by its label; again where an answer moved the page between press and release of the button."""
    until(lambda: label.evaluate("(label) => label.matches('.open')") or label.click(), "the fold is open")


def more_settings(page) -> None:
    """Open the fold with the rest of the settings."""
    unfold(page.get_by_role("button", name="More settings"))


def gpu_fold(page) -> None:
    """Open the fold with the GPU's memory and the trainer."""
    unfold(page.locator("#gpu-fold button.label-wrap").first)
    page.locator("#backend").wait_for()


def choose_tiny(page) -> None:
    field(page, "model").click()
    page.get_by_role("option", name=re.compile("Tiny Flux")).click()


def set_up_run(page, server, name: str, **fields: str) -> Path:
    """Fill in the three steps with photographs and start. Returns the run's folder."""
    if not page.url.startswith(server.url):
        open_page(page, server)
    field(page, "name").fill(name)
    field(page, "trigger").fill("tok")
    choose_tiny(page)
    more_settings(page)
    for key, value in fields.items():
        field(page, key).fill(value)
    drop(page, *photos("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"), count=4)
    caption(page, "chelsea.png").fill("tok, a tabby cat")
    # At once: the run must contain the caption typed last. And twice, before the first press is sent.
    page.locator("#start").evaluate("(start) => [1, 2].forEach(() => start.click())")
    shown = page.get_by_test_id("run-name").get_by_text(name).or_(page.locator("#problem .hp-bad, #run-notice .hp-bad"))
    shown.first.wait_for()
    assert page.locator(".hp-bad:visible").all_inner_texts() == []  # the form, now hidden, says that the name is used
    return server.data / "outputs" / name


def state_is(page, *states: str) -> None:
    """Wait until the run page shows one of these states."""
    wanted = ", ".join(f"[data-testid=state][data-state={state}]" for state in states)
    try:
        page.locator(wanted).wait_for(timeout=RUN_S * 1000)
    except TimeoutError as error:
        shown = page.locator(".hp-main").inner_text()
        raise AssertionError(f"not {states} within {RUN_S} s; the page shows: {shown}") from error


def step_of(page) -> int:
    return int(page.get_by_test_id("steps").get_attribute("data-step") or 0)


FAINT = """() => {
  const parse = (c) => {
    const m = c.match(/[\\d.]+/g).map(Number);
    return (c.startsWith("color(srgb") ? m.slice(0, 3).map((v) => v * 255) : m.slice(0, 3)).concat(m[3] ?? 1);
  };
  const light = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const over = (a, b) => a.slice(0, 3).map((v, i) => v * a[3] + b[i] * (1 - a[3])).concat(1);
  const faint = new Set();
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join(" ").trim();
    const text = e.matches("textarea, input:not([type=radio], [type=checkbox], [type=file])");
    const typed = text ? e.value || e.placeholder : "";
    if ((!own && !typed) || e.closest("svg, script, style, [disabled], .cm-editor")) continue;
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || !e.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    let back = [255, 255, 255, 1];
    const chain = [];
    for (let n = e; n; n = n.parentElement) chain.unshift(n);
    for (const n of chain) back = over(parse(getComputedStyle(n).backgroundColor), back);
    const style = getComputedStyle(e, typed && !e.value ? "::placeholder" : null);
    const colour = parse(style.color);
    const [a, b] = [luminance(over([...colour.slice(0, 3), colour[3] * style.opacity], back)), luminance(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.add(`${ratio.toFixed(2)}: ${e.tagName}.${e.className} ${(own || typed).slice(0, 40)}`);
  }
  return [...faint];
}"""
# A colour on its way to another one says nothing about either.
TRANSITIONS_END = """() => Promise.allSettled(
  document.getAnimations().filter((one) => one instanceof CSSTransition).map((one) => one.finished))"""


def faint_texts(page) -> list[str]:
    """Texts with a contrast below 4.5 to 1 (WCAG 2, 1.4.3), each with its ratio."""
    return page.evaluate(FAINT)


def serious(page, part: str | None = None, **options) -> list[str]:
    """What axe-core calls serious or critical in a part of the page, or in all of it: rule, element."""
    found = Axe().run(page, context=part, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [
        f"{one['id']}: {node['html'][:200]} ({node.get('failureSummary', '')[:200]})"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def assert_accessible(page, part: str | None = None) -> None:
    """axe-core finds nothing serious in a part of the page, or in all of it; all of it can be read, it does not scroll
    sideways, and no message of Gradio's lies over it.

    The contrast, the slowest of axe-core's rules, is left to `faint_texts`, which asks more, and of placeholders too.
    """
    messages = page.locator(".toast-body").all_inner_texts()
    assert messages == [], f"the page shows a message over the others: {messages}"
    page.evaluate(TRANSITIONS_END)
    found = serious(page, part, rules={"color-contrast": {"enabled": False}}) + faint_texts(page)
    assert found == [], found
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"the page scrolls sideways by {wide} pixels"
