"""Runs an xet transfer in a child process (xet_child.py), watches its bytes, and kills it when they stall.

In a child, because a stuck thread of xet cannot be ended; and watched by the bytes on the disk, because xet reports nothing
while it waits. What the child leaves is not trusted: the caller takes only a complete file with the right hash.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from guards import limits
from guards.hub import Options, Remote, Source, endpoint, is_set, token
from guards.hub_request import LEAST_BYTES

SMALLEST_BYTES = 1 << 24  # for smaller files, starting the child takes longer than the download
CHILD = [sys.executable, str(Path(__file__).with_name("xet_child.py"))]
POLL_S = 0.1

failures: list[str] = []  # after the first one, this process uses HTTP only


def usable(remote: Remote) -> bool:
    """Whether to try xet for this file: it is there, the file is large, and its hash is known."""
    if not (remote.xet and remote.sha256 and remote.size and remote.size >= SMALLEST_BYTES):
        return False
    if failures or is_set("HF_HUB_DISABLE_XET"):
        return False
    return all(importlib.util.find_spec(name) is not None for name in ("hf_xet", "huggingface_hub"))


def fetch(source: Source, folder: Path, options: Options, on_bytes: Callable[[int], None]) -> str:
    """Run the child, which writes below `folder`, until it ends or its bytes stall; the reason for a failure, or ""."""
    job = {
        "repo_id": source.repo,
        "filename": source.file,
        "revision": source.revision,
        "repo_type": source.repo_type,
        "endpoint": endpoint(),
        "local_dir": str(folder),
        "token": (token() or False) if options.token is None else (options.token or False),
    }
    limit_s = limits.seconds("xet_stall_s")
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            CHILD, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=os.name != "nt"
        )
        try:
            with contextlib.suppress(OSError):  # a child that has ended already
                assert child.stdin is not None
                child.stdin.write(json.dumps(job).encode() + b"\n")  # less than a pipe's buffer
                child.stdin.flush()
            mark, since_s = 0, time.monotonic()
            while child.poll() is None:
                done = allocated(folder)
                if done - mark >= LEAST_BYTES:
                    mark, since_s = done, time.monotonic()
                    on_bytes(done)
                elif limit_s and time.monotonic() - since_s > limit_s:
                    return f"no data for {limit_s:g} s, killed"
                time.sleep(POLL_S)
        finally:
            _kill(child)
        if child.returncode:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 400))
            lines = log.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else f"exit code {child.returncode}"
    return ""


def allocated(folder: Path) -> int:
    """Bytes that the files of a folder occupy: a file that was made large in advance has none."""
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            total += getattr(found, "st_blocks", found.st_size // 512) * 512
    return total


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if os.name == "nt":
                child.kill()
            else:
                os.killpg(child.pid, signal.SIGKILL)
    if child.stdin is not None:
        with contextlib.suppress(OSError):
            child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be killed while the kernel waits for a disk
        child.wait(limits.seconds("worker_term_s"))
