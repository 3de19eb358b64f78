"""Nothing that was typed or dropped is lost, and nothing is shown as saved that is not, while the server is killed."""

import contextlib
import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
from playwright.sync_api import Error as PlaywrightError
from ui_helpers import Server, photos, serving
from ui_page import PATIENCE_S, a_tab, caption, captions, choose_tiny, drop, field, open_page, saved, until

from ui.dataset import draft

KILLS = int(os.environ.get("PAGE_KILLS", "1"))


@pytest.fixture
def tab(browser):
    with a_tab(browser) as page:
        yield page
        page.errors.clear()  # requests to the dead server failed


def mark(page, file: str):
    return page.locator(f".hp-card[data-file='{file}'] .hp-saved")


def banner(page):
    return page.get_by_test_id("unsaved-banner")


def stored_captions(page) -> dict[str, str]:
    return {item.file: item.caption for item in draft.items(page.evaluate("hangproof.draft()"))}


def nothing_is_kept(page) -> bool:
    """Whether the server has confirmed everything; false while the page is being reloaded."""
    try:
        return page.evaluate(
            "document.body.classList.contains('hp-open') && !hangproof.unsaved().length && !hangproof.kept()"
        )
    except PlaywrightError:
        return False


def test_what_is_typed_while_the_server_is_dead_is_not_called_saved_and_arrives_later(tab, data):
    with serving(data) as server:
        open_page(tab, server)
        drop(tab, *photos("coffee.png", "rocket.jpg"), count=2)
        caption(tab, "coffee.png").fill("a cup")
        saved(tab, "coffee.png")
        server.stop(hard=True)
        caption(tab, "coffee.png").fill("a cup of coffee")
        field(tab, "name").fill("after")
        field(tab, "repeats").fill("7")  # Gradio has noticed the dead server and sends no more events
        tab.get_by_label("16 GB").click()
        mark(tab, "coffee.png").get_by_text("not saved").wait_for()
        banner(tab).get_by_text("Not connected to Hangproof. Your changes are kept in this browser").wait_for()
        tab.get_by_label("Remove rocket.jpg").click()
        tab.locator(".hp-notes").get_by_text("Nothing was changed").wait_for()
        assert set(captions(tab)) == {"coffee.png", "rocket.jpg"}
    with serving(data, port=server.port):
        until(lambda: nothing_is_kept(tab), "the server has everything")
        banner(tab).wait_for(state="hidden")
        assert mark(tab, "coffee.png").inner_text() in ("saved", "")  # "" after Gradio has reloaded the page
        assert stored_captions(tab) == {"coffee.png": "a cup of coffee", "rocket.jpg": ""}
        stored = draft.form(tab.evaluate("hangproof.draft()"))
        assert [stored[key] for key in ("name", "repeats", "tier")] == ["after", 7, "16G"]
        until(lambda: field(tab, "name").input_value() == "after", "the page shows the name")
        until(lambda: field(tab, "repeats").input_value() == "7", "the page shows the repeats")


def test_texts_outlive_a_closed_tab_and_fields_a_restarted_server(tab, data):
    with serving(data) as server:
        open_page(tab, server)
        drop(tab, *photos("coffee.png"), count=1)
        server.stop(hard=True)
        caption(tab, "coffee.png").fill("a cup")
        field(tab, "name").fill("kept")
        field(tab, "trigger").fill("tok")
        field(tab, "epochs").fill("3")
        mark(tab, "coffee.png").get_by_text("not saved").wait_for()
        other = tab.context.new_page()
        tab.close()
    with serving(data, port=server.port):
        other.set_default_timeout(PATIENCE_S * 1000)
        open_page(other, server)
        until(lambda: [field(other, key).input_value() for key in ("name", "trigger", "epochs")] == ["kept", "tok", "3"],
              "the fields are restored")  # fmt: skip
        assert captions(other) == {"coffee.png": "a cup"}
        until(lambda: nothing_is_kept(other), "the server has everything")
        assert stored_captions(other) == {"coffee.png": "a cup"}
        stored = draft.form(other.evaluate("hangproof.draft()"))
        assert (stored["name"], stored["trigger"], stored["epochs"]) == ("kept", "tok", 3)


def test_files_dropped_while_the_server_is_dead_are_uploaded_when_it_is_back(tab, data):
    with serving(data) as server:
        open_page(tab, server)
        drop(tab, *photos("coffee.png"), count=1)
        server.stop(hard=True)
        tab.get_by_test_id("image-picker").set_input_files([str(path) for path in photos("rocket.jpg", "chelsea.png")])
        tab.locator(".hp-notes").get_by_text("2 files are kept in this browser").wait_for()
        field(tab, "name").fill("so that Gradio reloads the page")
    with serving(data, port=server.port):
        tab.get_by_test_id("image-count").get_by_text("3 images").wait_for()
        until(lambda: nothing_is_kept(tab), "the server has everything")
        assert set(stored_captions(tab)) == {"coffee.png", "rocket.jpg", "chelsea.png"}


def log_in(page) -> None:
    page.locator("input[type=text], input[name=user], input[name=username]").first.fill("me")
    page.locator("input[type=password]").fill("secret")
    page.locator("button").first.click()
    page.locator("body.hp-open").wait_for()


def test_an_ended_login_saves_nothing_and_loses_nothing(tab, data):
    login = ("--auth", "me:secret")
    with serving(data, *login) as server:
        tab.goto(server.url)
        log_in(tab)
        drop(tab, *photos("coffee.png"), count=1)
        tab.wait_for_function("() => [...document.images].every((one) => one.complete && one.naturalWidth)")
        tab.context.clear_cookies()
        caption(tab, "coffee.png").fill("a cup")
        mark(tab, "coffee.png").get_by_text("not saved").wait_for()
        banner(tab).get_by_text("Your login has ended").wait_for()
        tab.get_by_test_id("image-picker").set_input_files([str(path) for path in photos("rocket.jpg")])
        tab.locator(".hp-notes").get_by_text("1 file is kept in this browser").wait_for()
        field(tab, "trigger").fill("tok")
        tab.get_by_label("Remove coffee.png").click()
        tab.locator(".hp-notes").get_by_text("Your login has ended. Nothing was changed").wait_for()
        banner(tab).get_by_role("button", name="Log in again").click()
        log_in(tab)
        tab.get_by_test_id("image-count").get_by_text("2 images").wait_for()
        until(lambda: nothing_is_kept(tab), "the server has everything")
        assert stored_captions(tab) == {"coffee.png": "a cup", "rocket.jpg": ""}
        assert field(tab, "trigger").input_value() == "tok"


def test_start_is_refused_while_a_caption_cannot_be_saved(tab, server):
    open_page(tab, server)
    field(tab, "name").fill("refused")
    choose_tiny(tab)
    drop(tab, *photos("coffee.png"), count=1)
    caption(tab, "coffee.png").fill("x" * 20_001)
    mark(tab, "coffee.png").get_by_text("not saved").wait_for()
    banner(tab).get_by_text("shorten it to 20000").wait_for()
    tab.locator("#start").click()
    tab.locator("#problem").get_by_text("Captions or masks not saved: 1").wait_for()
    assert not (server.data / "outputs" / "refused").exists()
    caption(tab, "coffee.png").fill("a cup")
    saved(tab, "coffee.png")
    banner(tab).wait_for(state="hidden")


def test_two_tabs_of_a_new_browser_share_one_draft(browser, server):
    context = browser.new_context()
    tabs = [context.new_page() for _ in range(2)]
    for page in tabs:
        page.goto(server.url, wait_until="commit")
    for page in tabs:
        page.locator("body.hp-open").wait_for(timeout=PATIENCE_S * 1000)
    assert len({page.evaluate("hangproof.draft()") for page in tabs}) == 1


# The server is killed at random moments ----------------------------------------------------------------------------

# Each text that appears beside a card as "saved" is reported with the card's image and caption. What is on disk at a kill
# must be this text or a later one; texts are numbered.
SAVED_LOG = """() => {
  const watch = new MutationObserver((changes) => {
    for (const { target } of changes) {
      const mark = target.nodeType === 1 ? target : target.parentElement;
      const card = mark?.closest?.(".hp-card");
      if (!card || !mark.closest(".hp-saved") || mark.textContent !== "saved") continue;
      window.reportSaved([card.dataset.id, card.querySelector("textarea").value]);
    }
  });
  addEventListener("DOMContentLoaded", () => watch.observe(document, { subtree: true, childList: true, characterData: true }));
}"""
# A user's keystrokes, in one turn of the page's own script: none happens before the form is enabled.
TYPE = """([selector, text]) => {
  const input = document.querySelector(selector);
  if (!input || !document.body.classList.contains("hp-open")) return false;
  input.focus();
  input.select();
  document.execCommand("insertText", false, text);
  return true;
}"""


KEPT = """() => [hangproof.unsaved(), hangproof.kept(), hangproof.trouble(), document.body.className,
  document.querySelector(".hp-banner")?.innerText, document.querySelector(".hp-notes")?.innerText]"""


class Campaign:
    """Two tabs of one browser, a user who acts in both, and a server that is killed now and then."""

    def __init__(self, browser, data: Path, work: Path, seed: int) -> None:
        self.data, self.work, self.random = data, work, random.Random(seed)
        self.context = browser.new_context()
        self.saved: list[tuple[str, int]] = []  # image, number of the text
        self.context.expose_binding("reportSaved", lambda _, found: self.note_saved(*found))
        self.context.add_init_script(f"({SAVED_LOG})()")
        self.tabs = [self.context.new_page() for _ in range(2)]
        for page in self.tabs:
            page.set_default_timeout(PATIENCE_S * 1000)
        self.number = 0
        self.captions: dict[str, tuple[int, set[int]]] = {}  # image → number certainly typed last, later ones perhaps
        self.fields: dict[str, tuple[str, set[str]]] = {}
        self.dropped: dict[str, bool] = {}  # file → whether the drop certainly reached the page
        self.ever: dict[str, set[str]] = {}  # image → all texts typed for it
        self.last: dict[str, tuple[int, float]] = {}  # field or image → tab and time of the last typing
        self.done: dict[str, int] = {}

    def note_saved(self, image: str, text: str) -> None:
        self.saved.append((image, int(text.split()[-1])))

    def next(self) -> int:
        self.number += 1
        return self.number

    def typed(self, table: dict, key: str, value, selector: str, text: str) -> None:
        tab, when = self.last.get(key, (0, -9.0))
        if time.monotonic() - when > 3:  # nobody types into one field of two tabs at once
            tab = self.random.randrange(2)
        self.last[key] = (tab, time.monotonic())
        page = self.tabs[tab]
        certain, perhaps = table.get(key, (None, set()))
        try:
            if page.evaluate(TYPE, [selector, text]):
                table[key] = (value, set())
        except PlaywrightError:  # the page was just being reloaded
            table[key] = (certain, {*perhaps, value})

    def type_caption(self) -> None:
        cards = self.cards()
        if cards:
            image, number = self.random.choice(cards), self.next()
            selector = f".hp-card[data-id='{image}'] textarea"
            self.ever.setdefault(image, set()).add(f"text number {number}")
            self.typed(self.captions, image, number, selector, f"text number {number}")

    def type_field(self) -> None:
        key = self.random.choice(("name", "trigger", "epochs", "repeats"))
        text = f"word-{self.next()}" if key in ("name", "trigger") else str(self.next() % 9 + 1)
        self.typed(self.fields, key, text, f"#{key} input, #{key} textarea", text)

    def drop(self) -> None:
        from PIL import Image

        number, page = self.next(), self.random.choice(self.tabs)
        path = self.work / f"dropped-{number}.png"
        image = Image.frombytes("RGB", (96, 96), self.random.randbytes(96 * 96 * 3))
        image.save(path)
        self.dropped[path.name] = False
        try:
            before = page.evaluate("document.body.classList.contains('hp-open') && performance.timeOrigin")
            if not before:
                del self.dropped[path.name]
                return
            page.get_by_test_id("image-picker").set_input_files(str(path), timeout=10_000)
            page.wait_for_timeout(300)
            self.dropped[path.name] = page.evaluate("performance.timeOrigin") == before
        except PlaywrightError:
            pass  # the page was just being reloaded

    def reorder(self) -> None:
        cards = self.cards()
        if len(cards) > 1:
            self.press(f".hp-card[data-id='{self.random.choice(cards)}'] .hp-later")

    def start(self) -> None:
        self.press("#start")
        self.type_field()

    def press(self, selector: str) -> None:
        script = "(selector) => document.querySelector(selector)?.click()"
        with contextlib.suppress(PlaywrightError):  # the page is just being reloaded
            self.random.choice(self.tabs).evaluate(script, selector)

    def cards(self) -> list[str]:
        try:
            return self.tabs[0].evaluate("[...document.querySelectorAll('.hp-card')].map((card) => card.dataset.id)")
        except PlaywrightError:
            return []

    def act(self) -> None:
        actions = (self.type_caption,) * 6 + (self.type_field,) * 3 + (self.drop,) * 2 + (self.reorder, self.start)
        action = self.random.choice(actions)
        action()
        self.done[action.__name__] = self.done.get(action.__name__, 0) + 1
        for page in self.tabs:  # Start opens the run's page
            try:
                page.evaluate("document.querySelector('#tabs [role=tab]')?.click()")
            except PlaywrightError:
                continue
        self.tabs[0].wait_for_timeout(self.random.uniform(10, 250))

    def draft(self) -> str:
        [path] = (self.data / "datasets" / ".drafts").iterdir()
        return path.name

    def check_saved(self) -> None:
        """What the page has called saved is on disk, or a text typed later is."""
        disk = {item.id: item.caption for item in draft.items(self.draft())}
        last: dict[str, int] = {}
        for image, number in self.saved:
            last[image] = max(number, last.get(image, 0))
        for image, number in last.items():
            assert disk[image], f"{image}: {number} was shown as saved; nothing is on disk"
            assert int(disk[image].split()[-1]) >= number, (
                f"{image}: {number} was shown as saved; {disk[image]!r} is on disk"
            )

    def missing(self) -> list[str]:
        """The images that certainly reached a page and are not in the draft."""
        files = {item.file for item in draft.items(self.draft())}
        return [file for file, certain in self.dropped.items() if certain and file not in files]

    def check_everything(self, server: Server) -> None:
        for page in self.tabs:
            if page.url.startswith("chrome-error:"):  # reloaded while the server was dead: the user opens it again
                open_page(page, server)
            try:
                until(lambda page=page: nothing_is_kept(page), "the server has everything", 2 * PATIENCE_S)
            except AssertionError as error:
                kept = page.evaluate(f"window.hangproof ? ({KEPT})() : document.body.innerText")
                raise AssertionError(f"still kept in the browser: {page.url} {kept}") from error
        # A page that was just reloaded looks for its kept files a moment later.
        with contextlib.suppress(AssertionError):
            until(lambda: not self.missing(), "every image that was dropped is in the draft")
        assert not self.missing(), f"lost images: {self.missing()}"
        found = {item.id: item for item in draft.items(self.draft())}
        for image, (certain, perhaps) in self.captions.items():
            allowed = {f"text number {n}" for n in (certain, *perhaps) if n is not None} | (
                {""} if certain is None else set()
            )
            assert found[image].caption in allowed, (found[image].file, found[image].caption, allowed)
        form = draft.form(self.draft())
        for key, (certain, perhaps) in self.fields.items():
            assert str(form.get(key)) in {str(certain), *perhaps}, (key, form.get(key), certain, perhaps)
        for page in self.tabs:  # a tab asks again for its page when another one has stored a caption

            def shows_what_is_stored(page=page) -> bool:
                shown = {c: t for c, t in captions_by_id(page).items() if c in found}
                return shown == {c: found[c].caption for c in shown}

            until(shows_what_is_stored, "each tab shows the captions that are stored")


def captions_by_id(page) -> dict[str, str]:
    script = "Object.fromEntries([...document.querySelectorAll('.hp-card')].map((c) => [c.dataset.id, c.querySelector('textarea').value]))"
    found: dict[str, str] = page.evaluate(script)
    return found


def check_runs(data: Path, user: Campaign) -> int:
    """Each caption in a run's data set was typed for its image. Returns the number of runs."""
    images = {Path(item.file).stem: item.id for item in draft.items(user.draft())}
    runs = [folder for folder in (data / "outputs").iterdir() if (folder / "run.toml").exists()]
    for folder in runs:
        for path in (data / "datasets" / folder.name).rglob("dropped-*.txt"):
            text = path.read_text(encoding="utf-8").strip()
            if "text number" in text:
                assert text in user.ever[images[path.stem]], (folder.name, path.name, text)
    return len(runs)


def campaign(browser, data: Path, work: Path, kills: int, seed: int) -> None:
    work.mkdir()
    server = Server(data)
    user = Campaign(browser, data, work, seed)
    try:
        server.wait_for_output("Hangproof is running at")
        for page in user.tabs:
            open_page(page, server)
        choose_tiny(user.tabs[0])
        user.drop()
        user.tabs[0].locator(".hp-card").first.wait_for()
        for kill in range(kills):
            killed = threading.Event()

            def kill_server(process=server.process, killed=killed) -> None:
                process.kill()
                process.wait(60)
                killed.set()

            for _ in range(user.random.randrange(2, 20)):
                user.act()
            timer = threading.Timer(user.random.uniform(0, 1.5), kill_server)
            timer.start()
            while not killed.is_set():
                user.act()
            timer.join()
            user.tabs[0].wait_for_timeout(50)  # marks that were shown before the kill are reported
            user.check_saved()
            for _ in range(user.random.randrange(8)):
                user.act()
            server.stop()
            server = Server(data, port=server.port)
            server.wait_for_output("Hangproof is running at")
            kill_runs_but(data, server)
            print(
                f"kill {kill + 1} of {kills} (seed {seed}): {len(user.saved)} saved marks, done: {json.dumps(user.done)}"
            )
        user.check_everything(server)
        print(f"runs: {check_runs(data, user)}, images: {len(user.dropped)}, texts: {user.number}")
    finally:
        server.stop()
        user.context.close()


def kill_runs_but(data: Path, server: Server) -> None:
    """Kill the runs that Start made, not the server."""
    import psutil

    keep = {server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(recursive=True))}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in keep and process.environ().get("HANGPROOF_DATA") == str(data):
                process.kill()


@pytest.mark.timeout(3600)
def test_killed_at_random_moments(browser, data, tmp_path):
    """PAGE_KILLS=20 and more for a campaign; PAGE_SEED repeats one."""
    seed = int(os.environ.get("PAGE_SEED") or random.SystemRandom().randrange(10**6))
    campaign(browser, data, tmp_path / "work", KILLS, seed)
