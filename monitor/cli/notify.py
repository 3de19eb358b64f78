"""Messages to people (mail, Discord, Slack, Telegram, ntfy…) through apprise, on the events they asked for.

The addresses are secrets (they contain tokens): they are in one file of the user's own that others must not read, and
nowhere else, not in a log, a status, an argument or an environment. A subprocess sends: apprise is large, and a mail
server that does not answer must not stop the monitor.

`notify.toml` in the user's configuration folder (`HANGPROOF_NOTIFY` names another):

    urls = ["ntfy://my-topic", "discord://…"]
    on = ["hang", "crash", "restarted", "completed", "failed", "unkillable", "unwatched", "slowdown"]   # this is the default
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib

from monitor.process.spawned import Subjob, python
from runs.paths import config_dir

DEFAULT = ("hang", "crash", "restarted", "completed", "failed", "unkillable", "unwatched", "slowdown")
TYPES = {
    **dict.fromkeys(("hang", "crash", "unwatched", "slowdown"), "warning"),
    "completed": "success",
    **dict.fromkeys(("failed", "unkillable"), "failure"),
}
DEADLINE_S = 60.0


class NotifyError(ValueError):
    """A configuration that cannot be used; the message contains no address."""


def config_path() -> Path:
    """The file with the user's addresses."""
    given = os.environ.get("HANGPROOF_NOTIFY")
    return Path(given).expanduser() if given else config_dir() / "notify.toml"


def read_config(path: Path) -> dict[str, Any]:
    """{"urls", "on"}.

    Raises:
        NotifyError: not TOML, no addresses, or readable by others.
    """
    try:
        if os.name != "nt" and path.stat().st_mode & 0o077:
            raise NotifyError(f"{path}: others can read your addresses; run `chmod 600 {path}`")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotifyError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # the parser's message may quote the line, which is an address
        raise NotifyError(f"{path}: not a TOML file; see monitor/cli/notify.py for its form") from error
    urls, kinds = table.get("urls"), table.get("on", list(DEFAULT))
    if not isinstance(urls, list) or not urls or not all(isinstance(u, str) for u in urls):
        raise NotifyError(f'{path}: write urls = ["…"] with one apprise address each')
    if not isinstance(kinds, list):
        raise NotifyError(f"{path}: on must be a list of events, for example {list(DEFAULT)}")
    return {"urls": urls, "on": kinds}


class Notifier:
    """The monitor's side: starts a subprocess for an event, and kills one that takes too long."""

    def __init__(self, name: str, log: Callable[[str], None]):
        self.name = name
        self._log = log
        self._path = os.fspath(config_path())
        self._sending: list[tuple[str, Subjob]] = []

    def event(self, kind: str, message: str) -> None:
        """Send what the user asked for. Costs one file check where nothing is configured."""
        if not os.path.isfile(self._path):
            return
        text = json.dumps({"kind": kind, "title": f"{self.name}: {kind}", "body": message}).encode("utf-8")
        self._sending.append((kind, Subjob(python("monitor.cli.notify"), DEADLINE_S, stdin=text)))

    def poll(self, wait_s: float = 0.0) -> None:
        """Collect what is done; wait up to `wait_s` seconds for the rest (the last message of a run)."""
        until_s = time.monotonic() + wait_s
        while self._sending:
            for kind, job in [sending for sending in self._sending if sending[1].done()]:
                self._sending.remove((kind, job))
                if job.error:
                    said = job.text().strip()[:500] if job.code is not None and not job.timed_out else ""
                    self._log(f"notification of {kind}: {said or job.error}")
            if time.monotonic() >= until_s:
                return
            time.sleep(0.05)


def send(kind: str, title: str, body: str) -> tuple[int, int]:
    """Send to every address; (sent, addresses). (0, 0): the user did not ask for this kind of event."""
    config = read_config(config_path())
    if kind != "test" and kind not in config["on"]:
        return 0, 0
    import apprise

    sent = 0
    for url in config["urls"]:
        service = apprise.Apprise()
        sent += bool(service.add(url) and service.notify(title=title, body=body, notify_type=TYPES.get(kind, "info")))
    return sent, len(config["urls"])


def main() -> int:
    """The subprocess: a message as JSON on standard input."""
    message = json.load(sys.stdin)
    try:
        sent, addresses = send(message["kind"], message["title"], message["body"])
    except NotifyError as error:
        print(error)
        return 2
    except ImportError:
        print("apprise is not installed; run ./start.sh once, or pip install apprise")
        return 2
    if sent < addresses:
        print(f"{addresses - sent} of {addresses} addresses could not be reached")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
