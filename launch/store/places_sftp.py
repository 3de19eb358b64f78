"""A place on a server that speaks SFTP, through fsspec and paramiko.

Three things differ from fsspec's own file system. An unknown host key is refused, because the place's contents and the
login would go to whoever answers: `ssh HOST` once adds the key to known_hosts. A file is written under a hidden name and renamed
(posix-rename@openssh.com replaces; servers without it delete first). And a new file is opened exclusively, which the protocol
has: a server that stops in the middle leaves a short file, which readers take for a damaged one.

Host, user, port and key may come from ~/.ssh/config; the login is by key or agent. There is no password in an address.
"""

import contextlib
import errno
import os
import posixpath
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from launch.store.kind import Entry, Meter, StoreError

BLOCK, WINDOW = 1 << 18, 1 << 20  # bytes of one read, and of the writes that are under way together
CONNECT_S, CALL_S = 10.0, 25.0
MISSING_RENAME = "Operation unsupported"


def make(scheme: str, body: str) -> tuple["SftpKind", str]:
    """The kind of an address without `sftp://`; the folder is part of the kind, so the prefix is empty."""
    parts = urlsplit(f"sftp://{body}")
    if not parts.hostname:
        raise StoreError(f"sftp://{body}: the host is missing; write sftp://user@host/folder")
    try:
        port = parts.port
    except ValueError as error:
        raise StoreError(f"sftp://{body}: the port is not a number") from error
    return SftpKind(parts.hostname, port, unquote(parts.username or ""), unquote(parts.path) or "/"), ""


class KnownHostsOnly(SFTPFileSystem):
    """fsspec's file system, with the known hosts and a limit on every answer."""

    cachable = False

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()
        self.client.load_system_host_keys()
        self.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        self.client.connect(self.host, **self.ssh_kwargs)
        self.ftp = self.client.open_sftp()
        self.ftp.get_channel().settimeout(CALL_S)


class SftpKind:
    """The files below `root` on a server. A thread has a connection of its own; it connects with its first call."""

    exclusive = True
    failures: tuple[type[Exception], ...] = (paramiko.SSHException,)

    def __init__(self, host: str, port: int | None, user: str, root: str):
        self.root = root.rstrip("/") or "/"
        self.login = _login(host, port, user)
        self._lock = threading.Lock()
        self._idle: list[KnownHostsOnly] = []

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        """A connection that no other call uses; it is dropped when the call fails other than by a file's absence."""
        with self._lock:
            system = self._idle.pop() if self._idle else None
        if system is None or not system.client.get_transport().is_active():
            system = KnownHostsOnly(**self.login)
        try:
            yield system.ftp
        except (FileNotFoundError, FileExistsError):
            with self._lock:
                self._idle.append(system)
            raise
        except BaseException:
            system.client.close()
            raise
        with self._lock:
            self._idle.append(system)

    def prove(self, prefix: str) -> None:
        """The protocol has exclusive creation."""

    def size(self, name: str) -> int:
        """The size in bytes."""
        with self._session() as ftp:
            return int(ftp.stat(self._path(name)).st_size)

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`."""
        with self._session() as ftp, ftp.open(self._path(name), "rb") as file:
            length = max(0, min(length, file.stat().st_size - start))
            file.seek(start)
            blocks = [(start + at, min(BLOCK, length - at)) for at in range(0, length, BLOCK)]
            return b"".join(file.readv(blocks))

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace a file."""
        path = self._path(name)
        temporary = self._beside(path)
        with self._session() as ftp:
            try:
                size = self._upload(ftp, temporary, source, meter)
                if ftp.stat(temporary).st_size != size:
                    raise OSError(errno.EIO, "the server has another size than was sent", name)
                _replace(ftp, temporary, path)
            except BaseException:
                with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                    ftp.remove(temporary)
                raise

    def create(self, name: str, data: bytes) -> None:
        """Write a new file. Raises FileExistsError."""
        path = self._path(name)
        with self._session() as ftp:
            try:
                target = _open(ftp, path, "wx")
            except OSError as error:
                if isinstance(error, FileNotFoundError) or not _exists(ftp, path):
                    raise
                # SFTP version 3 has no code for "exists": servers answer "Failure" (draft-ietf-secsh-filexfer-02, 7).
                raise FileExistsError(errno.EEXIST, "exists already", name) from error
            try:
                with target:
                    target.write(data)
            except BaseException:
                with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                    ftp.remove(path)
                raise

    def _upload(self, ftp: Any, path: str, source: bytes | str, meter: Meter) -> int:
        """Write a file, and its folders where they are missing; returns its size."""
        size = 0
        with _open(ftp, path, "w") as target:
            for block in [source] if isinstance(source, bytes) else _blocks(source):
                for at in range(0, len(block), WINDOW):
                    part = block[at : at + WINDOW]
                    # Many writes without waiting for their answers, then one that waits for all: paramiko forgets the
                    # errors of those that nobody waited for.
                    target.set_pipelined(True)
                    target.write(part[:-1])
                    target.set_pipelined(False)
                    target.write(part[-1:])
                    size += len(part)
                    meter(len(part))
        return size

    def list(self, prefix: str) -> dict[str, Entry]:
        """The files below the folder `prefix`."""
        found: dict[str, Entry] = {}
        folders = [prefix.strip("/")]
        with self._session() as ftp:
            while folders:
                folder = folders.pop()
                try:
                    rows = ftp.listdir_attr(self._path(folder))
                except FileNotFoundError:
                    continue
                for row in rows:
                    name = f"{folder}/{row.filename}".lstrip("/")
                    if row.filename.startswith(".") or "/" in row.filename or row.st_mode is None:
                        continue
                    if stat.S_ISDIR(row.st_mode):
                        folders.append(name)
                    elif stat.S_ISREG(row.st_mode):
                        found[name] = Entry(int(row.st_size or 0), row.st_mtime)
        return found

    def folders(self, prefix: str) -> Sequence[str]:
        """The folders directly in `prefix`."""
        with self._session() as ftp:
            try:
                rows = ftp.listdir_attr(self._path(prefix.strip("/")))
            except FileNotFoundError:
                return []
        return [row.filename for row in rows if row.st_mode is not None and stat.S_ISDIR(row.st_mode)]

    def delete(self, names: Sequence[str]) -> None:
        """Delete files."""
        with self._session() as ftp:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    ftp.remove(self._path(name))

    def refusal(self, error: Exception) -> str:
        """Why repeating cannot help; "" where it may."""
        host = self.login["host"]
        if isinstance(error, paramiko.BadHostKeyException):
            return f"{host} has another host key than in known_hosts; find out why before you replace it"
        if isinstance(error, paramiko.AuthenticationException):
            return f"{host} refused the login; add your key there (ssh-copy-id) or start an SSH agent"
        if isinstance(error, paramiko.SSHException) and "known_hosts" in str(error):
            return f"the host key of {host} is not known; run `ssh {host}` once and accept the key"
        if isinstance(error, PermissionError):
            return "no permission there; fix the permissions of the folder"
        if (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or _says_full(error):
            return "no space is left there; free some space"
        return ""

    def reset(self) -> None:
        """Close what is idle: the server may be gone."""
        with self._lock:
            idle, self._idle = self._idle, []
        for system in idle:
            system.client.close()

    def _path(self, name: str) -> str:
        return posixpath.join(self.root, name) if name else self.root

    def _beside(self, path: str) -> str:
        folder, name = posixpath.split(path)
        return posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")


def _login(host: str, port: int | None, user: str) -> dict[str, Any]:
    """The arguments of a connection, with what ~/.ssh/config says about the host."""
    settings: dict[str, Any] = {}
    file = Path("~/.ssh/config").expanduser()
    if file.is_file():
        settings = dict(paramiko.SSHConfig.from_path(str(file)).lookup(host))
    login: dict[str, Any] = {
        "host": settings.get("hostname", host),
        "port": port or int(settings.get("port", 22)),
        "timeout": CONNECT_S,
        "banner_timeout": CONNECT_S,
        "auth_timeout": CONNECT_S,
        "channel_timeout": CONNECT_S,
    }
    if user or settings.get("user"):
        login["username"] = user or settings["user"]
    if settings.get("identityfile"):
        login["key_filename"] = [os.path.expanduser(path) for path in settings["identityfile"]]
    return login


def _blocks(path: str) -> Iterator[bytes]:
    """The contents of a local file."""
    with open(path, "rb") as file:
        while block := file.read(WINDOW):
            yield block


def _open(ftp: Any, path: str, mode: str) -> Any:
    """Open a file for writing; its folders are made where they are missing."""
    try:
        return ftp.open(path, mode)
    except FileNotFoundError:
        _make_folders(ftp, posixpath.dirname(path))
        return ftp.open(path, mode)


def _exists(ftp: Any, path: str) -> bool:
    try:
        ftp.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _replace(ftp: Any, source: str, target: str) -> None:
    try:
        ftp.posix_rename(source, target)
    except OSError as error:
        if MISSING_RENAME not in str(error):
            raise
        with contextlib.suppress(FileNotFoundError):
            ftp.remove(target)
        ftp.rename(source, target)


def _make_folders(ftp: Any, folder: str) -> None:
    missing = []
    while folder not in ("", "/") and not _exists(ftp, folder):
        missing.append(folder)
        folder = posixpath.dirname(folder)
    for path in reversed(missing):
        try:
            ftp.mkdir(path)
        except OSError:
            if not _exists(ftp, path):  # else another process made it
                raise


def _says_full(error: Exception) -> bool:
    text = str(error).lower()
    return "no space" in text or "quota" in text
