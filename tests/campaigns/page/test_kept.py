"""Two tabs, a user who types, drops and starts in both, a server killed at random moments: nothing is lost or swapped.

Two minutes. PAGE_KILLS=100 for a longer one; HANGPROOF_SEED repeats one.
"""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from draft_helpers import photo
from playwright.sync_api import Error as PlaywrightError
from seeds import seed
from ui_helpers import Server, kill_runs
from ui_page import PATIENCE_S, captions, choose_tiny, nothing_is_kept, open_page, until

from ui.dataset import draft

KILLS = int(os.environ.get("PAGE_KILLS", "10"))
FIELDS = ("name", "trigger", "epochs", "repeats")

# Each text that appears beside a card as "saved" is reported with the card's image and caption. What is on disk at a
# kill must be this text or a later one; texts are numbered.
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


class Campaign:
    """Two tabs of one browser, a user who acts in both, and a server that is killed now and then."""

    def __init__(self, browser, data: Path, work: Path) -> None:
        self.data, self.work, self.random = data, work, random.Random(seed())
        self.context = browser.new_context()
        self.saved: dict[str, int] = {}  # image → number of the last text that was shown as saved
        self.context.expose_binding("reportSaved", lambda _, found: self.note_saved(*found))
        self.context.add_init_script(f"({SAVED_LOG})()")
        self.tabs = [self.context.new_page() for _ in range(2)]
        for page in self.tabs:
            page.set_default_timeout(PATIENCE_S * 1000)
        self.number = 0
        self.typed: dict[str, tuple[str, set[str]]] = {}  # field or image → certainly typed last, perhaps later
        self.shown: list[str] = []  # dropped files that got a card
        self.images: dict[str, str] = {}  # each text that was typed for an image → the image
        self.last: dict[str, tuple[int, float]] = {}  # field or image → tab and time of the last typing

    def next(self) -> int:
        self.number += 1
        return self.number

    def note_saved(self, image: str, text: str) -> None:
        self.saved[image] = max(int(text.split()[-1]), self.saved.get(image, 0))

    def type(self, key: str, text: str, selector: str, before: str) -> None:
        tab, when = self.last.get(key, (0, -9.0))
        if time.monotonic() - when > 3:  # nobody types into one field of two tabs at once
            tab = self.random.randrange(2)
        self.last[key] = (tab, time.monotonic())
        page = self.tabs[tab]
        certain, perhaps = self.typed.get(key, (before, set()))
        try:
            if page.evaluate(TYPE, [selector, text]):
                self.typed[key] = (text, set())
        except PlaywrightError:  # the page was just being reloaded
            self.typed[key] = (certain, {*perhaps, text})

    def type_caption(self) -> None:
        cards = self.cards()
        if cards:
            image, text = self.random.choice(cards), f"text number {self.next()}"
            self.images[text] = image
            self.type(image, text, f".hp-card[data-id='{image}'] textarea", "")

    def type_field(self) -> None:
        key = self.random.choice(FIELDS)
        text = f"word-{self.next()}" if key in ("name", "trigger") else str(self.next() % 9 + 1)
        self.type(key, text, f"#{key} input, #{key} textarea", str(None))

    def drop(self) -> None:
        number, page = self.next(), self.random.choice(self.tabs)
        path = photo(self.work / f"dropped-{number}.png", number)
        try:
            page.get_by_test_id("image-picker").set_input_files(str(path), timeout=10_000)
            page.locator(f".hp-card[data-file='{path.name}']").wait_for(timeout=1000)
            self.shown.append(path.name)
        except PlaywrightError:
            pass  # the page was being reloaded, or the server is dead and the page says that nothing was uploaded

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
        self.random.choice(actions)()
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
        for image, number in self.saved.items():
            assert disk[image], f"{image}: {number} was shown as saved; nothing is on disk"
            found = int(disk[image].split()[-1])
            assert found >= number, f"{image}: {number} was shown as saved; {found} is on disk"

    def check_everything(self, server: Server) -> None:
        for page in self.tabs:
            if page.url.startswith("chrome-error:"):  # reloaded while the server was dead: the user opens it again
                open_page(page, server)
            until(lambda page=page: nothing_is_kept(page), "the server has everything", 2 * PATIENCE_S)
        found = {item.id: item for item in draft.items(self.draft())}
        assert set(self.shown) <= {item.file for item in found.values()}, "every image that was shown is in the draft"
        form = draft.form(self.draft())
        stored = {key: str(form.get(key)) for key in FIELDS} | {image: item.caption for image, item in found.items()}
        for key, (certain, perhaps) in self.typed.items():
            assert stored[key] in {certain, *perhaps}, (key, stored[key], certain, perhaps)
        for page in self.tabs:  # a tab asks again for its page when another one has stored a caption
            shown = lambda page=page: captions(page, "card.dataset.id").items()  # noqa: E731
            same = lambda shown=shown: all(text == stored[card] for card, text in shown() if card in found)  # noqa: E731
            until(same, "each tab shows the captions that are stored")


def check_runs(data: Path, user: Campaign) -> int:
    """Each caption in a run's data set was typed for its image. Returns the number of runs."""
    images = {Path(item.file).stem: item.id for item in draft.items(user.draft())}
    runs = [folder for folder in (data / "outputs").iterdir() if (folder / "run.toml").exists()]
    for folder in runs:
        for path in (data / "datasets" / folder.name).rglob("dropped-*.txt"):
            text = path.read_text(encoding="utf-8").strip()
            if "text number" in text:
                assert user.images[text] == images[path.stem], (folder.name, path.name, text)
    return len(runs)


@pytest.mark.timeout(3600)
def test_killed_at_random_moments(browser, data, tmp_path):
    server = Server(data)
    user = Campaign(browser, data, tmp_path)
    try:
        server.wait()
        for page in user.tabs:
            open_page(page, server)
        choose_tiny(user.tabs[0])
        user.drop()
        user.tabs[0].locator(".hp-card").first.wait_for()
        for kill in range(KILLS):
            for _ in range(user.random.randrange(2, 20)):
                user.act()
            timer = threading.Timer(user.random.uniform(0, 1.5), os.kill, (server.process.pid, signal.SIGKILL))
            timer.start()
            while server.process.poll() is None:
                user.act()
            timer.join()
            user.tabs[0].wait_for_timeout(50)  # marks that were shown before the kill are reported
            user.check_saved()
            for _ in range(user.random.randrange(8)):
                user.act()
            server.stop()
            kill_runs(data)  # those that Start made
            server = Server(data, port=server.port)
            server.wait()
            print(f"kill {kill + 1} of {KILLS}: {len(user.saved)} images saved, {user.number} actions")
        user.check_everything(server)
        print(f"runs: {check_runs(data, user)}, images: {len(user.shown)}, texts: {user.number}")
    finally:
        server.stop()
        user.context.close()
