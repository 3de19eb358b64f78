"""A file system that opens files and never completes a read, like a dead NFS or SMB mount: a FUSE of one file.

It uses the kernel's interface directly (struct layouts: linux/fuse.h, protocol 7), because sixty lines are less than one
more dependency. It needs root and /dev/fuse; `why_not()` returns a line when they are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_IN = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extension, padding
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT = (
    1, 2, 3, 14, 15, 17, 18, 25, 26, 27, 28, 29, 36,
)  # fmt: skip
ENOSYS, ENOENT = 38, 2
SIZE = 4096


def why_not() -> str:
    """Return one line that says why such a mount is not possible here, or ""."""
    if sys.platform != "linux":
        return "a stalled file system needs Linux's FUSE"
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "a stalled file system needs root and /dev/fuse"
    return ""


def _attributes(node: int) -> bytes:
    mode, size = (0o040755, 0) if node == 1 else (0o100644, SIZE)
    return _ATTR.pack(node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 512, 0)


def _serve(fd: int) -> None:
    while True:
        try:
            request = os.read(fd, 1 << 20)
        except OSError:
            return  # unmounted
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        answer: bytes | int
        if opcode in (FORGET, INTERRUPT):
            continue
        if opcode == INIT:
            answer = struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 16, 12, 1 << 16, 1, 0, 0, 0, *[0] * 7)
        elif opcode == LOOKUP:
            answer = struct.pack("<QQQQII", 2, 0, 60, 60, 0, 0) + _attributes(2) if b".npz\0" in request else -ENOENT
        elif opcode == GETATTR:
            answer = struct.pack("<QII", 60, 0, 0) + _attributes(node)
        elif opcode in (OPEN, OPENDIR):
            answer = struct.pack("<QII", 1, 1 | 32, 0)  # direct I/O; no flush, for which an exiting process would wait
        elif opcode in (RELEASE, RELEASEDIR, FLUSH, READDIR):
            answer = b""
        else:
            answer = -ENOSYS
        error, body = (answer, b"") if isinstance(answer, int) else (0, answer)
        os.write(fd, _OUT.pack(_OUT.size + len(body), error, unique) + body)
        if opcode == OPEN:
            return  # from here on no request is answered


@contextlib.contextmanager
def stalled_mount(folder: Path) -> Iterator[None]:
    """`folder` holds `*.npz` files; the first that is opened stalls the mount: its daemon reads no more requests.

    A reader is then in state D: a signal handler does not wake it, but it can be killed. (A request that a daemon has
    read and never answers cannot even be killed; no deadline can help there.)
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"stalled", str(folder).encode(), b"fuse", 0, options.encode()):
        os.close(fd)
        raise OSError(ctypes.get_errno(), f"mount of FUSE on {folder}: {os.strerror(ctypes.get_errno())}")
    threading.Thread(target=_serve, args=(fd,), daemon=True).start()
    try:
        yield
    finally:
        libc.umount2(str(folder).encode(), 1 | 2)  # MNT_FORCE, which fails what is waiting, and MNT_DETACH
        os.close(fd)
