"""Processes as the tests of monitor/process/ look at them, and files of /proc that cannot be read."""

import os
import sys
import time

import pytest

from guards import reading
from monitor.process import platform

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")


def start_of(process) -> float:
    return platform.process_info(process.pid).start


def error(number):
    return OSError(number, os.strerror(number))


def failing(monkeypatch, suffix, number, until_s=float("inf")):
    """Reading files of /proc whose path ends in `suffix` fails, up to this moment."""
    read = platform.read_bytes

    def broken(path):
        if path.endswith(suffix) and time.monotonic() < until_s:
            raise error(number)
        return read(path)

    for module in (platform, reading):
        monkeypatch.setattr(module, "read_bytes", broken)
