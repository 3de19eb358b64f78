"""What one kind of place does: the interface that `places_….py` implement and `places.Place` uses, and the errors of all.

A kind does one call and neither repeats nor limits it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.common import LaunchError


class StoreError(LaunchError):
    """What failed in a store, where, and what to do."""


class NotFound(StoreError):
    """The store has no file of this name."""


class Refused(StoreError):
    """The store answered, and repeating the call does not help: no permission, no such bucket, no space left."""


class Unavailable(StoreError):
    """The store did not answer, or failed each time. A later call may succeed."""


@dataclass(frozen=True)
class Entry:
    """A file of a place: its size in bytes, and when it was written (Unix time by the place's clock; None if unknown)."""

    size: int
    modified_s: float | None = None


Meter = Callable[[int], None]
"""Called with the number of bytes that were moved; waits where that was too fast. A call that calls it has not stalled."""


class Kind(Protocol):
    """One kind of place. Names are checked already. Calls may raise OSError and `failures`; they are not repeated here.

    FileNotFoundError: no such name. FileExistsError: only from `create`. `refusal` tells which errors are final.
    """

    exclusive: bool
    failures: tuple[type[Exception], ...]

    def prove(self, prefix: str) -> None:
        """Find out whether `create` is exclusive where that depends on the server; sets `exclusive`. Called before a lease."""

    def size(self, name: str) -> int:
        """The size of a file in bytes."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes of a file from byte `start`."""

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace a file by bytes, or by the contents of the file at the path `source`."""

    def create(self, name: str, data: bytes) -> None:
        """Write a file that does not exist. Where `exclusive` is False, two callers may both succeed."""

    def list(self, prefix: str) -> dict[str, Entry]:
        """The files below a folder, at any depth, by name; {} where there is none."""

    def folders(self, prefix: str) -> Sequence[str]:
        """The names of the folders directly in a folder; none where there is none."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete files; names that do not exist are ignored."""

    def refusal(self, error: Exception) -> str:
        """Why repeating the call cannot help, and what to do; "" where it may help."""

    def reset(self) -> None:
        """Drop connections after a failure."""
