"""A file of a model hub: what names it, what the hub says about it, how to download it, and how that can fail.

The hub's settings (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`…) are read as its library reads them, but each time
anew: a login on the page changes them in a running process.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from guards import limits
from guards.metrics import say
from guards.reading import read_text


class DownloadError(Exception):
    """A download that ended without its file. The message says why and what to do.

    kind: "gated", "missing", "offline", "space", "disk", "stalled", "damaged" or "server".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Source:
    """A file of a hub repository."""

    repo: str
    file: str
    revision: str = "main"

    @property
    def page(self) -> str:
        """The repository's page, which shows its licence."""
        return f"{endpoint()}/{self.repo}"

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"{self.page}/resolve/{urllib.parse.quote(self.revision, safe='')}/{urllib.parse.quote(self.file)}"


@dataclass(frozen=True)
class Remote:
    """What the hub says about a file: bytes, and the hash of its contents (git's SHA-1 or SHA-256)."""

    size: int
    digest: str


@dataclass(frozen=True)
class Progress:
    """Bytes of one file. total: 0 when unknown. speed: bytes per second."""

    name: str
    done: int
    total: int
    speed: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end; None when unknown."""
        return (self.total - self.done) / self.speed if self.speed else None


@dataclass(frozen=True)
class Options:
    """How to download. by_hand: where a user can put the file, for messages.

    stall_s: seconds without progress before the download fails; None: `download_stall_s`; 0: no limit.
    """

    on_progress: Callable[[Progress], object] = lambda _: None
    say: Callable[[str], object] = say
    stall_s: float | None = None
    by_hand: str = ""

    @property
    def limit_s(self) -> float:
        """The limit without progress, in seconds."""
        return limits.seconds("download_stall_s") if self.stall_s is None else self.stall_s

    @property
    def hint(self) -> str:
        """`by_hand` as the end of a message."""
        return f", or {self.by_hand}" if self.by_hand else ""


def endpoint() -> str:
    """The URL of the hub: `$HF_ENDPOINT`, else huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_home() -> Path:
    """The folder of the hub's library: `$HF_HOME`, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def token() -> str | None:
    """The user's hub token; None when there is none."""
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"].strip()
    return read_text(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token").strip() or None
