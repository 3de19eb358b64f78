"""What is asked of the operating system while it is short of something."""

import builtins
import errno
import random

from monitor.process import platform


def test_a_read_that_lacks_a_descriptor_is_tried_again_at_once(monkeypatch):
    """A scan reads hundreds of files: when each fails once in fifty times, it must not fail as a whole."""
    real, draw = open, random.Random(1)

    def flaky(*args, **more):
        if draw.random() < 0.02:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*args, **more)

    monkeypatch.setattr(builtins, "open", flaky)
    for _ in range(20):
        platform.scan()
