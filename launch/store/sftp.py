"""fsspec's file system over SFTP, with three changes, and the login of ~/.ssh/config.

An unknown host key is refused, because the store's contents and the login would go to whoever answers: `ssh HOST` once
adds the key to known_hosts. Every answer has a limit. A piece is read by several requests at once.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

CONNECT_S, ANSWER_S = 10.0, 25.0


class KnownHosts(SFTPFileSystem):
    """One connection. It carries one call at a time."""

    cachable = False

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()
        self.client.load_system_host_keys()
        self.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        self.client.connect(self.host, **self.ssh_kwargs)
        self.ftp = self.client.open_sftp()
        self.ftp.get_channel().settimeout(ANSWER_S)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes from `start` to `end`, both given."""
        with self.ftp.open(path, "rb") as file:
            return b"".join(file.readv([(start, (end or 0) - (start or 0))]))

    def mv(self, old: str, new: str, **kwargs: Any) -> None:
        """Rename a file. posix-rename@openssh.com replaces; where that is unknown, the other file is deleted first."""
        try:
            self.ftp.posix_rename(old, new)
        except OSError as error:
            if "Operation unsupported" not in str(error):
                raise
            with contextlib.suppress(FileNotFoundError):
                self.ftp.remove(new)
            self.ftp.rename(old, new)


def login(host: str, port: int | None, user: str) -> dict[str, Any]:
    """The arguments of KnownHosts, with what ~/.ssh/config says about the host. The login is by key or agent."""
    file = Path("~/.ssh/config").expanduser()
    settings: dict[str, Any] = {**paramiko.SSHConfig.from_path(str(file)).lookup(host)} if file.is_file() else {}
    limits = ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
    found: dict[str, Any] = {"host": settings.get("hostname", host), **dict.fromkeys(limits, CONNECT_S)}
    found["port"] = port or int(settings.get("port", 22))
    if user or settings.get("user"):
        found["username"] = user or settings["user"]
    if settings.get("identityfile"):
        found["key_filename"] = [os.path.expanduser(path) for path in settings["identityfile"]]
    return found
