"""The messages that people get of a run, the file with their addresses. ../test_main.py has messages that arrive."""

import io
import json
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
from monitor_helpers import wait_for

from monitor.cli import notify


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ('urls = ["json://s3cr3t"]\n', 0o644, "chmod 600"),
        ("urls = [json://s3cr3t", 0o600, "not a TOML file"),
        ("urls = []", 0o600, "one apprise address each"),
        ('urls = "json://s3cr3t"', 0o600, "one apprise address each"),
        ('urls = ["json://s3cr3t", 1]', 0o600, "one apprise address each"),
        ('urls = ["json://s3cr3t"]\non = "hang"', 0o600, "on must be a list"),
    ],
)
def test_a_notification_file_that_is_refused_is_not_shown(tmp_path, text, mode, problem):
    config = tmp_path / "notify.toml"
    config.write_text(text)
    config.chmod(mode)
    with pytest.raises(notify.MonitorError, match=problem) as refused:
        notify.read_config(config)
    assert "s3cr3t" not in str(refused.value)
    with pytest.raises(notify.MonitorError, match=r"docs/recovery\.md shows one"):
        notify.read_config(tmp_path / "missing.toml")


class Apprise:
    """Stands in for the library: one address is wrong, and one does not answer before all others did."""

    sent: ClassVar[list] = []

    def add(self, url):
        self.url = url
        return url != "wrong"

    def notify(self, **message):
        if self.url == "down":
            wait_for(lambda: len(self.sent) == 2, what="the other messages")
        self.sent.append((self.url, message))
        return self.url != "down"


@pytest.mark.parametrize(
    ("kind", "urls", "code", "said", "told"),
    [
        ("hang", ["wrong", "down", "a", "b"], 1, "2 of 4 addresses could not be reached\n", ["a", "b", "down"]),
        ("failed", ["a"], 0, "", ["a"]),
        ("test", ["a"], 0, "", ["a"]),
        ("phase", ["a"], 0, "", []),  # not asked for
        ("hang", [], 2, "one apprise address each", []),
        ("no library", ["a"], 2, "apprise is not installed; run ./start.sh once", []),
    ],
)
def test_the_sender_says_how_many_addresses_it_reached(tmp_path, monkeypatch, capsys, kind, urls, code, said, told):
    config = tmp_path / "notify.toml"
    text = f"urls = {json.dumps(urls)}\n" + 'on = ["hang", "failed", "no library"]\n'
    config.write_text(text, encoding="utf-8-sig")
    config.chmod(0o600)
    monkeypatch.setenv("HANGPROOF_NOTIFY", str(config))
    sent = {"kind": kind, "title": "t\x07", "body": "<@1> @everyone"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(sent)))
    library = None if kind == "no library" else SimpleNamespace(Apprise=Apprise)
    monkeypatch.setitem(sys.modules, "apprise", library)
    Apprise.sent.clear()
    assert notify.main() == code and said in (out := capsys.readouterr().out) and bool(out) is bool(said)
    named = {"hang": "warning", "failed": "failure"}.get(kind, "info")
    message = {"title": "t\\u0007", "body": "<@\u200b1> @\u200beveryone", "body_format": "text", "notify_type": named}
    assert [*sorted(url for url, _ in Apprise.sent[:2]), *(url for url, _ in Apprise.sent[2:])] == told
    assert all(one == message for _, one in Apprise.sent)
