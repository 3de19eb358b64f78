"""How long a call of the store may take, how often it is repeated, and how many bytes a second it moves."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from guards import deadline

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How long a call may take and how often it is repeated; how many bytes a second puts and gets move together."""

    call_s: float = 30.0  # in which no byte moves
    tries: int = 8
    first_wait_s: float = 0.25
    longest_wait_s: float = 8.0
    bytes_per_s: float = 0.0  # 0: no limit


class Pace:
    """Spreads bytes over time: `spend` returns when the bytes so far fit the limit. Shared by threads."""

    def __init__(self, bytes_per_s: float):
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0  # monotonic: when the bytes so far are paid for
        self._lock = threading.Lock()

    def spend(self, count: int, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until `count` more bytes may have been moved; `tick` is called before and meanwhile."""
        tick()
        if not self.bytes_per_s or not count:
            return
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + count / self.bytes_per_s
            until = self._free_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            tick()


def bounded(work: Callable[[Callable[[], None]], T], idle_s: float, what: str) -> T:
    """The result of `work(tick)`. TimeoutError when neither it returned nor `tick` was called for `idle_s`.

    The thread of a call that hangs is abandoned: nothing can interrupt a read of a dead mount.
    """
    moved, abandoned = [time.monotonic()], threading.Event()

    def tick() -> None:
        if abandoned.is_set():
            raise TimeoutError(f"{what} was given up")
        moved[0] = time.monotonic()

    def check() -> None:
        if time.monotonic() - moved[0] > idle_s:
            abandoned.set()
            raise TimeoutError(f"no answer within {round(idle_s, 1):g} s")

    return deadline.call(work, tick, seconds=math.inf, what=what, waiting=check)
