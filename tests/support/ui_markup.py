"""Shared by the tests of what the page draws of a run: hostile text, harmless markup, a run with samples."""

import shutil
from html.parser import HTMLParser

import pytest
from ui_helpers import photos, write_run

HOSTILE = "\"><img src=x onerror=alert(1)><script>alert(2)</script>'${7*7}{{7*7}}`&amp;\x1b[31m\u202e💥"
PROMPT = "a dog </p><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """The elements and attributes of some markup."""

    def __init__(self, markup: str):
        super().__init__()
        self.tags, self.attributes, self.open = [], {}, []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("img", "br", "hr", "line", "path"):
            self.open.append(tag)
        for key, value in attrs:
            self.attributes.setdefault(key, []).append(value)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def harmless(markup: str) -> Tags:
    """Fails when the markup has a script, an event handler or an unclosed element."""
    found = Tags(markup)
    assert found.open == [], found.open
    assert "script" not in found.tags and "iframe" not in found.tags
    assert not [key for key in found.attributes if key.startswith("on")]
    assert not [url for url in found.attributes.get("href", []) if url.lower().startswith("javascript")]
    assert "x" not in found.attributes.get("src", [])
    return found


def sample(folder, name: str):
    (folder / "sample").mkdir(exist_ok=True)
    return shutil.copy(photos("coffee.png")[0], folder / "sample" / name)


@pytest.fixture
def sampled(data):
    """A run with two prompts at three steps, and an image of another name."""
    made = write_run(data, "my cat")
    (made / "sample_prompts.txt").write_text(f"a cat\n{PROMPT}\n")
    for step in (8, 16, 24):
        for prompt in (0, 1):
            sample(made, f"cat_{step:06}_{prompt:02}_20260101120000_42.png")
    sample(made, "mine.png")
    return made
