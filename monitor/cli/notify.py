"""Messages to people (mail, Discord, Slack, Telegram, ntfy…) through apprise, on the events they asked for.

The addresses are secrets (they contain tokens): they are in one file of the user's own that others must not read, and
nowhere else, not in a log, a status, an argument or an environment. This is the subprocess that sends
(`run_folder.Notifier` starts it): apprise is large, and a mail server that does not answer must not stop the
monitor.

`notify.toml` in the user's configuration folder (`HANGPROOF_NOTIFY` names another):

    urls = ["ntfy://my-topic", "discord://…"]
    on = ["hang", "crash", "restarted", "completed", "failed", "unkillable", "unwatched", "slowdown"]   # the default
"""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomllib

from monitor.run_folder import NOTIFIED, MonitorError, notify_file
from presets.terminal import plain


def read_config(path: Path) -> dict[str, Any]:
    """{"urls", "on"}.

    Raises:
        MonitorError: not TOML, no addresses, or readable by others; the message contains no address.
    """
    try:
        if os.name != "nt" and path.stat().st_mode & 0o077:
            raise MonitorError(f"{path}: others can read your addresses; run `chmod 600 {path}`")
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise MonitorError(f"{path}: cannot be read: {error.strerror}; docs/recovery.md shows one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # the parser's message may quote the line, which is an address
        raise MonitorError(f"{path}: not a TOML file; see monitor/cli/notify.py for its form") from error
    urls, kinds = table.get("urls"), table.get("on", list(NOTIFIED))
    if not isinstance(urls, list) or not urls or not all(isinstance(u, str) for u in urls):
        raise MonitorError(f'{path}: write urls = ["…"] with one apprise address each')
    if not isinstance(kinds, list):
        raise MonitorError(f"{path}: on must be a list of events, for example {list(NOTIFIED)}")
    return {"urls": urls, "on": kinds}


def send(kind: str, title: str, body: str) -> tuple[int, int]:
    """Send to every address; (sent, addresses). (0, 0): the user did not ask for this kind of event."""
    config = read_config(notify_file())
    if kind != "test" and kind not in config["on"]:
        return 0, 0
    import apprise

    # A file named @everyone calls nobody, and an error such as <class 'int'> is no markup.
    title, body = (re.sub(r"@(?=everyone|here)|(?<=<)@", "@\u200b", plain(text)) for text in (title, body))
    message = {"title": title, "body": body, "body_format": "text", "notify_type": NOTIFIED.get(kind, "info")}

    def reached(url: str) -> bool:
        service = apprise.Apprise()
        return bool(service.add(url) and service.notify(**message))

    with ThreadPoolExecutor(len(config["urls"])) as pool:  # one that hangs delays no other
        return sum(pool.map(reached, config["urls"])), len(config["urls"])


def main() -> int:
    """The subprocess: a message as JSON on standard input."""
    message = json.load(sys.stdin)
    try:
        sent, addresses = send(message["kind"], message["title"], message["body"])
    except MonitorError as error:
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
