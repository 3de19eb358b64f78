"""Everyone can use the page: axe-core finds nothing serious on any view of it, and the keyboard reaches every action."""

import shutil

import pytest
from ui_helpers import lora_file, photos, serving, write_incident, write_run
from ui_page import a_tab, drop, field, open_page, serious, until

import presets
from monitor.process.locks import LOCK, Lock

AUTH = ("--auth", "me:a-long-secret")
VIEWS = [(1280, "light"), (390, "dark")]
TABS = {
    "Other machines": "[data-testid=store-address]",
    "Doctor": "[data-testid=copy-report]",
}  # a tab, and what it ends with
RUNS = {"training now": "running", "a failure": "failed", "all done": "completed", "taken off": "stopped"}

# The control that has the focus, and whether one sees it: an outline or a shadow that it has only with the focus, on itself,
# on its label or on the box around it.
FOCUS = """() => {
  const on = document.activeElement;
  if (!on || on === document.body) return null;
  const around = [on, on.closest("label"), on.parentElement, on.parentElement.parentElement, on.nextElementSibling].filter(Boolean);
  const look = () => around.map((one) => {
    const style = getComputedStyle(one);
    return [style.outlineStyle === "none" ? "" : style.outline, style.boxShadow, style.borderColor].join("|");
  }).join();
  const box = on.getBoundingClientRect();
  const name = on.id || on.getAttribute("aria-label") || on.innerText || on.value || on.outerHTML.slice(0, 90);
  const focused = look();
  on.blur();
  const rest = look();
  on.focus({ focusVisible: true, preventScroll: true });
  return { kind: `${on.tagName} ${on.id || on.className}`, name: `${on.tagName} ${name}`.slice(0, 120), seen: focused !== rest, size: box.width * box.height, key: on.outerHTML.slice(0, 300) };
}"""
# What can be clicked or typed into, by kind. Arrow keys move within radio buttons and tabs.
ACTIONS = """() => [...document.querySelectorAll("button, a[href], input, textarea, select, summary, [role=button], [tabindex='0']")]
  .filter((one) => one.checkVisibility() && !one.disabled && !one.matches("[type=radio], [type=file], [role=tab], [tabindex='-1']"))
  .filter((one) => !one.closest("dialog:not([open]), [inert], .cm-editor"))
  .map((one) => `${one.tagName} ${one.id || one.className}`)"""
# Not a style element: the login page's policy forbids other styles than its own.
STILL = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("*, *::before, *::after { transition: none !important; animation: none !important; }");
  document.adoptedStyleSheets = [sheet];
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a login and a run in each important state."""
    data = tmp_path_factory.mktemp("axe") / "data"
    locks = []
    for name, state in RUNS.items():
        folder = write_run(data, name, state=state, reason="the disk is full", loss=0.1, checkpoint={"step": 30})
        lora_file(folder / f"{folder.name}-step00000020.safetensors", 20)
        (folder / "sample").mkdir()
        (folder / "sample_prompts.txt").write_text("a cat\n", encoding="utf-8")
        shutil.copy(photos("coffee.png")[0], folder / "sample" / f"{folder.name}_000020_00_20260101120000_42.png")
        (folder / "training.log").write_text("a line of the log\n" * 300, encoding="utf-8")
        lines = "".join(f'{{"step": {n}, "loss": {1 / (n + 1)}}}\n' for n in range(40))
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
        if state == "running":
            locks.append(Lock(folder / LOCK))
            assert locks[-1].acquire()
        if state == "failed":
            write_incident(
                folder,
                report="# Hang\n\n`text`\n\n```\n" + "a long line " * 40 + "\n```",
                explanation="why",
                detect_s=2.0,
            )
    with serving(data, *AUTH) as running:
        yield running
    for lock in locks:
        lock.release()


def faults(page) -> list[str]:
    """What axe-core calls serious or critical."""
    page.evaluate(STILL)  # no colour between two others
    return serious(page)


def give_login(page, server) -> None:
    form = {"username": "me", "password": "a-long-secret"}
    assert page.context.request.post(f"{server.url}/login", form=form).ok


def unfold(page) -> None:
    """Open every accordion."""
    for _ in range(2):  # the second time for those inside others
        for one in page.locator("button.label-wrap:visible").all():
            if (
                one.get_attribute("aria-expanded") != "true"
                and "open" not in (one.get_attribute("class") or "").split()
            ):
                one.click()
        page.locator("#flags").wait_for()
    page.locator("[data-flag]").first.wait_for()
    page.get_by_test_id("models").wait_for()


@pytest.mark.parametrize("width, scheme", VIEWS)
def test_axe_finds_nothing_serious(browser, server, width, scheme):
    with a_tab(browser, width=width, color_scheme=scheme) as page:
        page.goto(f"{server.url}/login")
        assert faults(page) == []
        page.get_by_label("User name").fill("me")
        page.get_by_label("Password").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("alert").wait_for()
        assert faults(page) == [], "the login page with an error"
        give_login(page, server)
        open_page(page, server)
        page.get_by_role("tab", name="New LoRA").click()
        assert faults(page) == [], "the empty form"
        drop(page, *photos("chelsea.png", "coffee.png", "rocket.jpg"), count=3)
        unfold(page)
        page.locator("[data-flag=caption_prefix] button").click()
        field(page, "learning_rate").fill("0,0001")
        page.locator("#learning_rate .hp-field-error").wait_for()
        assert faults(page) == [], "the form with images, every accordion open and an error"
        page.get_by_role("tab", name="Runs").click()
        for row in page.locator(".hp-run").all():
            row.click()
            page.locator(f".hp-here[data-run='{row.get_attribute('data-run')}']").wait_for()
            assert faults(page) == [], row.get_attribute("data-run")
        for address, ready in (("fleet", TABS["Other machines"]), ("doctor", TABS["Doctor"])):
            page.goto(f"{server.url}/?tab={address}")
            page.locator(ready).first.wait_for()
            assert faults(page) == [], address
            assert page.evaluate("document.documentElement.scrollWidth") <= width, address


def walk(page, most: int = 400) -> list[dict]:
    """Every stop of the Tab key from the top of the page to its end."""
    page.evaluate(STILL)
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
    page.locator("h1").first.click(position={"x": 1, "y": 1})
    stops: list[dict] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUS)
        if stop is None or (len(stops) > 5 and stop["key"] == stops[0]["key"]):
            return stops
        stops.append(stop)
    raise AssertionError(f"Tab does not leave {stops[-1]['name']}")


def test_the_keyboard_reaches_every_action_with_a_visible_focus(browser, server):
    with a_tab(browser) as page:
        give_login(page, server)
        open_page(page, server)
        page.get_by_role("tab", name="New LoRA").click()
        drop(page, *photos("chelsea.png", "coffee.png"), count=2)
        stops = walk(page)
        names = " · ".join(one["name"] for one in stops)
        for wanted in (
            "Log out",
            "New LoRA",
            "Caption of chelsea.png",
            "Remove coffee.png",
            "Add trigger word",
            "start",
        ):
            assert wanted in names, (wanted, names)
        assert [one["name"] for one in stops if not one["seen"]] == []
        assert not set(page.evaluate(ACTIONS)) - {one["kind"] for one in stops}
        page.get_by_role("tab", name="Runs").click()
        for row in page.locator(".hp-run").all():
            row.click()
            page.locator(f".hp-here[data-run='{row.get_attribute('data-run')}']").wait_for()
            stops = walk(page)
            assert [one["name"] for one in stops if not one["seen"]] == [], row.get_attribute("data-run")
            assert not set(page.evaluate(ACTIONS)) - {one["kind"] for one in stops}, row.get_attribute("data-run")
        for name, ready in TABS.items():
            page.get_by_role("tab", name=name).click()
            page.locator(ready).first.wait_for()
            stops = walk(page)
            assert [one["name"] for one in stops if not one["seen"]] == [], name
            assert not set(page.evaluate(ACTIONS)) - {one["kind"] for one in stops}, name


def test_radios_follow_the_arrow_keys_and_leaving_the_base_model_closes_its_list(browser, server):
    with a_tab(browser) as page:
        give_login(page, server)
        open_page(page, server)
        page.get_by_role("tab", name="New LoRA").click()
        tier = page.locator("#tier input[type=radio]")
        chosen = page.locator("#tier input[type=radio]:checked")
        until(lambda: page.locator("#plan").inner_text(), "the form is complete")
        chosen.focus()
        before = chosen.get_attribute("value")
        page.keyboard.press("ArrowLeft")
        until(lambda: chosen.get_attribute("value") != before, "the arrow key chooses another tier")
        page.keyboard.press("ArrowRight")
        until(lambda: chosen.get_attribute("value") == before, "and back")
        assert tier.count() == len(presets.tiers())

        field(page, "model").focus()
        page.keyboard.press("ArrowDown")
        page.get_by_role("option").first.wait_for()
        page.keyboard.press("Tab")
        page.get_by_role("option").first.wait_for(state="hidden")
        assert page.evaluate("!document.querySelector('#model').contains(document.activeElement)")
