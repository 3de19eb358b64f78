"""A disk that stops to respond: an ext4 in a file, frozen by fsfreeze. Whoever writes waits in the kernel until it thaws."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SIZE_BYTES = 256 << 20  # a sparse file; a run wants 64 MB free


def why_not() -> str:
    """One line that says why such a disk is not possible here, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a frozen disk needs root on Linux"
    missing = [name for name in ("mkfs.ext4", "losetup", "fsfreeze", "mount") if shutil.which(name) is None]
    if missing:
        return f"a frozen disk needs {', '.join(missing)}"
    found = subprocess.run(["losetup", "--find"], capture_output=True, text=True)
    return "" if found.returncode == 0 else "a frozen disk needs a loop device"


@contextlib.contextmanager
def loop_disk(scratch: Path) -> Iterator[Path]:
    """A mounted disk of its own in a folder of `scratch`."""
    image, folder = scratch / "disk.img", scratch / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(SIZE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Nothing can be written to the disk meanwhile; it can still be read."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)
