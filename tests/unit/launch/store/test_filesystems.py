"""How long and how fast a call to a store may be, what it sends, and which errors no repeated call can help against."""

import errno
import time
from types import SimpleNamespace

import pytest

from launch.store import filesystems


def test_bytes_are_spread_over_time(monkeypatch):
    now, ticks, slept = [100.0], [], []
    sleep = lambda seconds: slept.append(seconds) or now.append(now[-1] + seconds)  # noqa: E731
    monkeypatch.setattr(filesystems, "time", SimpleNamespace(monotonic=lambda: now[-1], sleep=sleep))
    pace = filesystems.Pace(1000.0)
    pace.spend(2500, lambda: ticks.append(now[-1]))
    assert slept == [1.0, 1.0, 0.5] and ticks == [100.0, 101.0, 102.0, 102.5]
    pace.spend(0), filesystems.Pace(0.0).spend(10**9)
    assert len(slept) == 3, "nothing to wait for"
    now.append(200.0)
    pace.spend(500)
    assert slept[3:] == [0.5], "time in which nothing was sent is not saved up"


def test_a_call_in_which_nothing_moves_is_given_up_and_its_thread_ends_with_its_next_byte():
    assert filesystems.bounded(lambda tick: "found", 30.0, "read x") == "found"
    late = []

    def hangs(tick) -> None:
        try:
            while True:
                time.sleep(0.01)
                if late:
                    tick()
        except TimeoutError as error:
            late.append(str(error))

    with pytest.raises(TimeoutError, match=r"no answer within 0.1 s"):
        filesystems.bounded(hangs, 0.1, "read x")
    late.append("")
    while len(late) < 2:
        time.sleep(0.01)
    assert late[1] == "read x was given up"


def caused(text: str, levels: int) -> Exception:
    """An error with this text, below others."""
    error = RuntimeError(text)
    for _ in range(levels):
        error, below = ValueError("above"), error
        error.__cause__ = below
    return error


ANSWER = Exception("x")
ANSWER.response = SimpleNamespace(status_code=403)
LATE = PermissionError("The difference between the request time and the current time is too large.")
LATE.__cause__ = RuntimeError("An error occurred (RequestTimeTooSkewed) when calling the PutObject operation: …")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (PermissionError(errno.EACCES, "no"), "no permission"),
        (ANSWER, "no permission"),
        (OSError("Forbidden: b/b/o"), "no permission"),  # gcsfs
        (LATE, "this machine's clock is wrong"),
        (caused("(400) when calling the HeadObject operation (reached max retries: 0): Bad Request", 1), "has expired"),
        (OSError(errno.ENOSPC, "x"), "no space is left"),
        (OSError(errno.EROFS, "x"), "read-only"),
        (caused("the specified NOSUCHBUCKET", 4), "no such bucket"),
        (caused("NoSuchBucket", 5), ""),
        (OSError(errno.ECONNRESET, "x"), ""),
    ],
)
def test_which_errors_are_final(error, why):
    assert why in filesystems.refusal(error) and bool(why) == bool(filesystems.refusal(error))
