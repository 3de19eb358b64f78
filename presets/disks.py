"""Which file system a path is on; on one of a network, a read or a write can wait without limit."""

import os
import re
from pathlib import Path

NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse\.(?!fuseblk|lxcfs|gvfsd)\S+", re.I
)


def file_system(path: Path) -> tuple[str, str]:
    """(kind, mount point) of the file system of an absolute path, from the table of mounts; ("", "") where it has none.

    The path itself is not looked at, because a network disk may not answer.
    """
    import psutil

    place = Path(os.path.normpath(path))
    inside = [disk for disk in psutil.disk_partitions(all=True) if place.is_relative_to(disk.mountpoint)]
    # Of two at one place, the later is on top.
    disk = max(reversed(inside), key=lambda one: len(one.mountpoint), default=None)
    return (disk.fstype, disk.mountpoint) if disk else ("", "")


def is_network(path: Path) -> bool:
    """Whether a path is on a network file system."""
    return bool(NETWORK.fullmatch(file_system(path)[0]))
