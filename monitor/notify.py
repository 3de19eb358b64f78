"""Messages to people (mail, Discord, Slack, Telegram, ntfy…) through apprise, on the events they asked for.

The addresses are secrets (they hold tokens), so they live in one file of the user's own, which others may not read, and
appear nowhere else: not in a log, a status, an argument or an environment. The sending is a helper's work: apprise is large,
and a mail server that does not answer must not stop the one who watches.

`notify.toml` in the user's configuration folder (`HANGPROOF_NOTIFY` names another):

    urls = ["ntfy://my-topic", "discord://…"]
    on = ["hang", "crash", "restarted", "completed", "failed", "unkillable"]   # this is the default
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

DEFAULT = ("hang", "crash", "restarted", "completed", "failed", "unkillable")
COLOUR = {"hang": "warning", "crash": "warning", "completed": "success", "failed": "failure", "unkillable": "failure"}
DEADLINE_S = 60.0


class NotifyError(ValueError):
    """A configuration that cannot be used; the message holds no address."""


def config_path() -> Path:
    """Where the user's addresses are."""
    given = os.environ.get("HANGPROOF_NOTIFY")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("APPDATA") if os.name == "nt" else os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "hangproof" / "notify.toml"


def read_config(path: Path) -> dict:
    """{"urls", "on"}.

    Raises:
        NotifyError: not TOML, no addresses, or others may read it.
    """
    import tomllib

    try:
        if os.name != "nt" and path.stat().st_mode & 0o077:
            raise NotifyError(f"{path}: others can read your addresses; run `chmod 600 {path}`")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotifyError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # the parser's message may quote the line, which is an address
        raise NotifyError(f"{path}: not a TOML file; see monitor/notify.py for its form") from error
    urls, kinds = table.get("urls"), table.get("on", list(DEFAULT))
    if not isinstance(urls, list) or not urls or not all(isinstance(u, str) for u in urls):
        raise NotifyError(f'{path}: give urls = ["…"], one address of apprise each')
    if not isinstance(kinds, list):
        raise NotifyError(f"{path}: on is a list of events, e.g. {list(DEFAULT)}")
    return {"urls": urls, "on": kinds}


class Notifier:
    """The monitor's side: starts a helper for an event, and ends one that takes too long."""

    def __init__(self, name: str, log) -> None:
        self.name = name
        self._log = log
        self._path = config_path()
        self._sending: list[tuple[subprocess.Popen, IO[bytes], float, str]] = []

    def event(self, kind: str, message: str) -> None:
        """Send what the user asked to be told. Costs one look at the file system where nothing is configured."""
        if not self._path.is_file():
            return
        from monitor.helpers import ROOT, environment

        text = json.dumps({"kind": kind, "title": f"{self.name}: {kind}", "body": message}).encode("utf-8")
        out, inbox = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed in `poll`
        inbox.write(text)
        inbox.seek(0)
        popen = subprocess.Popen(
            [sys.executable, "-m", "monitor.notify"],
            stdin=inbox,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment(),
        )
        inbox.close()
        self._sending.append((popen, out, time.monotonic(), kind))

    def poll(self, wait_s: float = 0.0) -> None:
        """Collect the helpers that are done; with `wait_s`, wait for the rest so long (the last message of a run)."""
        until = time.monotonic() + wait_s
        while self._sending:
            for sending in list(self._sending):
                popen, out, began, kind = sending
                if popen.poll() is None:
                    if time.monotonic() - began < DEADLINE_S:
                        continue
                    popen.kill()
                    self._log(f"notification of {kind}: no answer within {DEADLINE_S:.0f} s")
                elif popen.returncode:
                    out.seek(0)
                    self._log(f"notification of {kind}: {out.read(500).decode('utf-8', 'replace').strip() or 'failed'}")
                out.close()
                self._sending.remove(sending)
            if time.monotonic() >= until:
                return
            time.sleep(0.05)


def send(kind: str, title: str, body: str) -> tuple[int, int]:
    """Send to every address; (sent, addresses). (0, 0): the user did not ask for this kind."""
    config = read_config(config_path())
    if kind != "test" and kind not in config["on"]:
        return 0, 0
    import apprise

    sent = 0
    for url in config["urls"]:
        service = apprise.Apprise()
        sent += bool(service.add(url) and service.notify(title=title, body=body, notify_type=COLOUR.get(kind, "info")))
    return sent, len(config["urls"])


def main() -> int:
    """The helper: a message as JSON on standard input."""
    message = json.load(sys.stdin)
    try:
        sent, asked = send(message["kind"], message["title"], message["body"])
    except NotifyError as error:
        print(error)
        return 2
    except ImportError:
        print("apprise is not installed; run ./start.sh once, or pip install apprise")
        return 2
    if sent < asked:
        print(f"{asked - sent} of {asked} addresses could not be reached")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
