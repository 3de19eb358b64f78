"""Random actions in two tabs, with delayed answers and a server that is killed: in the end each shows what a newly opened
tab shows. (What is typed while the server is killed: tests/browser/ui/test_kept.py.)

PAGE_MINUTES=10 for a longer one; HANGPROOF_SEED repeats the actions, not their timing.
"""

import contextlib
import os
import random
import threading
import time

import pytest
from draft_helpers import photo
from playwright.sync_api import Error, Page
from seeds import seed
from ui_helpers import Server, a_run, alone, lora_file, write_incident
from ui_page import PATIENCE_S, field, nothing_is_kept, open_page, until

MINUTES = float(os.environ.get("PAGE_MINUTES", "3"))
TEXTS = ("a cat", "dog, red", "<b>bold</b>", "写真 café", 'it\'s "quoted"', "$(id)", "")
TEXTS += ("1", "4", "2.5", "x", "1e-4", "tok")
FIELDS = "#name, #trigger, #epochs, #repeats, #rank, #alpha, #learning_rate, #max_train_steps, #batch_size, #resolution"
# What is pressed and typed into, by the tab of the page; a part that is listed twice is used twice as often.
PRESSED = {
    "New LoRA": (
        *(".hp-card button", ".hp-card .hp-pick", ".hp-toolbar button", ".hp-toolbar button", "dialog[open] button"),
        *("#subject input", "#tier input", "#backend input", "#image-check button", "#bulk-apply"),
        *("#edit-script, #discard-script, #keep-script, #merge-script", ".hp-step button.label-wrap", ".hp-step button.label-wrap"),
    ),
    "Runs": (
        *("#run-list [data-run]", "#run-list [data-run]", "#run-actions [data-do]", "#run-queue [data-do]", "#run-loras button"),
        *("[id$=-fold] > button.label-wrap", "[id$=-fold] > button.label-wrap", "#samples-fold button", "#checks-fold input", "#log-fold button"),
    ),
}  # fmt: skip
TYPED = {
    "New LoRA": (".hp-card textarea", FIELDS, FIELDS, "#bulk-fold input", "#sweep input", "dialog[open] textarea"),
    "Runs": ("#run-search", "#new-name"),
}
# Requests are sent and answers arrive after a while, so that one can overtake another.
SLOW = """(() => {
  const [plain, pause] = [window.fetch, () => new Promise((done) => setTimeout(done, 400 * Math.random()))];
  window.fetch = async (...request) => {
    const url = String(request[0].url || request[0]);
    if (!url.includes("gradio_api") || url.includes("upload")) return plain(...request);
    await pause();
    const answer = await plain(...request);
    if (url.includes("component_server")) await pause();
    return answer;
  };
})()"""
ACT = """([selector, part, text]) => {
  const found = [...document.querySelectorAll(selector)].map((one) => (text === null ? one : one.querySelector("input, textarea") || one));
  const seen = found.filter((one) => one.checkVisibility() && !one.disabled && one.ariaDisabled !== "true");
  const chosen = seen[Math.floor(part * seen.length)];
  if (!chosen) return false;
  if (text === null) return chosen.click(), true;
  chosen.focus();
  chosen.select?.();
  return document.execCommand(text ? "insertText" : "delete", false, text), true;
}"""
# The texts and values of the parts that say what is stored; numbers that go on by themselves do not count.
SHOWN = """() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const text = (one) => one.textContent.replace(/\\s+/g, " ").trim();
  const value = (one) => one.querySelector("input[type=radio]:checked")?.value ?? one.querySelector("input, textarea")?.value;
  const parts = ["plan", "model-note", "run-queue", "run-list", "run-head", "run-actions", "run-loras", "run-incidents"];
  return {
    ...Object.fromEntries(parts.map((id) => [id, document.getElementById(id) ? text(document.getElementById(id)) : ""])),
    ...Object.fromEntries(all(".hp-step .hp-fields > [id]").map((one) => [one.id, [value(one), ...[...one.querySelectorAll("[id^=note-]")].map(text)]])),
    captions: all(".hp-card").map((one) => [one.dataset.id, one.querySelector("textarea").value]),
    history: all(".hp-toolbar:not(.hp-tools) button").slice(0, 2).map(text),
    messages: all(".toast-body").map(text),
  };
}"""


def differs(page: Page, fresh: Page, url: str) -> list[str]:
    """What a tab shows otherwise than a newly opened one, and the open parts of it that are empty."""
    if page.locator("#run-search").is_visible():
        field(page, "run-search").fill("")
    run = page.evaluate("document.querySelector('#run-head [data-run]')?.dataset.run || ''")
    fresh.goto(f"{url}/?run={run}" if run else url)
    fresh.locator("body.hp-open").wait_for()
    fresh.wait_for_timeout(1000)
    mine, new = page.evaluate(SHOWN), fresh.evaluate(SHOWN)
    found = [f"{part}: {mine[part]!r}, not {new[part]!r}" for part in new if mine.get(part, new[part]) != new[part]]
    bare = """[...document.querySelectorAll("button.label-wrap.open")].filter((one) => one.checkVisibility()
        && one.parentElement.textContent.trim().length < one.textContent.trim().length + 9).map((one) => one.textContent)"""
    return found + [f"{one} is open and empty" for one in page.evaluate(bare)]


@pytest.mark.timeout(3600)
def test_two_tabs_show_what_is_stored_whatever_happens_in_whatever_order(browser, data, tmp_path):
    draw, environment = random.Random(seed()), alone(tmp_path)
    first = a_run(data, "one", 1e-4)
    a_run(data, "two", 1e-3, rank=16)
    write_incident(first)
    lora_file(first / "one.safetensors", 60)
    server = Server(data, **environment)
    with contextlib.closing(browser.new_context()) as context, contextlib.ExitStack() as at_end:
        at_end.callback(lambda: server.stop())
        server.wait()
        context.set_default_timeout(1000 * PATIENCE_S)
        tabs, fresh = [context.new_page(), context.new_page()], context.new_page()
        errors, done = list[str](), list[str]()
        for tab in tabs:
            tab.on("pageerror", lambda error: "fetch" in str(error) or errors.append(str(error)))
            tab.on("dialog", lambda dialog: dialog.dismiss())
            tab.add_init_script(SLOW)
            tab.goto(server.url)
            tab.locator("body.hp-open").wait_for()

        def act(tab: Page, shown: str) -> None:
            """One action in the tab of the page that is shown."""
            kind = draw.random()
            if kind < 0.06 and shown == "New LoRA":
                first = 10 * len(done)
                files = [photo(tmp_path / f"{first + n}.png", first + n) for n in range(draw.randint(1, 3))]
                done.append("drop")
                return tab.get_by_test_id("image-picker").set_input_files([*map(str, files)])
            if kind < 0.07:
                done.append("reload")
                tab.reload()
                return tab.locator("body.hp-open").wait_for()
            text = draw.choice(TEXTS) if kind < 0.45 else None
            where = draw.choice((PRESSED if text is None else TYPED)[shown])
            if tab.evaluate(ACT, [where, draw.random(), text]):
                done.append(f"tab {tabs.index(tab)}: {where} {text or ''}")
            return None

        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            shown = draw.choice(("New LoRA", "New LoRA", "Runs"))
            for tab in tabs:
                tab.get_by_role("tab", name=shown, exact=True).click()
            (killed := threading.Timer(draw.uniform(0, 20), server.stop, (True,))).start()
            for _ in range(draw.randint(20, 60)):
                with contextlib.suppress(Error):
                    act(tab := draw.choice(tabs), shown)
                    tab.wait_for_timeout(draw.choice((0, 0, 0, 50, 400)))
            killed.join()
            server = Server(data, port=server.port, **environment)
            server.wait()
            for tab in tabs:
                if tab.url.startswith("chrome-error:"):  # reloaded while the server was dead: the user opens it again
                    open_page(tab, server)
                for _ in range(3):
                    tab.keyboard.press("Escape")
            until(lambda: all(map(nothing_is_kept, tabs)), "all is stored")
            for tab in tabs:
                late = time.monotonic() + 30
                while (left := differs(tab, fresh, server.url)) and time.monotonic() < late:
                    tab.wait_for_timeout(500)
                _, *tracebacks = server.log.read_text("utf-8", "replace").split("Traceback")
                # Gradio's own answer to a press of what the other tab has just removed
                errors += [one for one in tracebacks if "is not in the list of choices" not in one]
                assert not left and not errors, "\n".join((*done[-60:], *left, *errors))
        print(f"{len(done)} actions")
