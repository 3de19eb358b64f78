"""How long and how fast a call to a store may be, what it sends, and which errors no repeated call can help against."""

import errno
from types import SimpleNamespace

import pytest

from launch.store.filesystems import refusal


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
        (OSError(errno.ENOSPC, "x"), "no space is left"),
        (OSError(errno.EROFS, "x"), "read-only"),
        (caused("the specified NOSUCHBUCKET", 4), "no such bucket"),
        (caused("NoSuchBucket", 5), ""),
        (OSError(errno.ECONNRESET, "x"), ""),
    ],
)
def test_which_errors_are_final(error, why):
    assert why in refusal(error) and bool(why) == bool(refusal(error))
