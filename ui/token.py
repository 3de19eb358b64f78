"""The token: a random text that lets its account, and no other account of this machine, use the page.

Every user of a machine can connect to its loopback, so a port there protects nothing. As with Jupyter, the page needs a
token that is in a file which only its account may read. The file is in the user's configuration folder and not in the
data folder: accounts can share data, and a program finds the token whatever folder the server uses. It stays the same
across restarts; a new one is made when the file is gone.
"""

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
from pathlib import Path

from runs.files import RunError
from runs.paths import config_dir

TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
WRITTEN_S = 1.0  # until a file that another server has just created has its token


def token_file() -> Path:
    """The file with this account's token."""
    return config_dir() / "token"


def load() -> str:
    """This account's token; the first call makes it.

    Raises:
        RunError: the file cannot be used, or is not this account's alone.
    """
    path = token_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            _create(path)
        return _read(path)
    except OSError as error:
        raise RunError(
            f"{path}: the page's token cannot be kept there ({error}); fix the permissions, or name a folder of yours "
            f"in {'APPDATA' if os.name == 'nt' else 'XDG_CONFIG_HOME'}"
        ) from error


def _create(path: Path) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32))
    except OSError:
        path.unlink()
        raise


def _read(path: Path) -> str:
    until_s = time.monotonic() + WRITTEN_S
    while True:
        with path.open(encoding="ascii", errors="replace") as file:
            found = os.fstat(file.fileno())
            text = file.read(1000).strip()
        if os.name != "nt" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077):
            raise RunError(f"{path}: other users can read the token; delete the file, and a new one is made")
        if TOKEN.fullmatch(text):
            return text
        if time.monotonic() > until_s:
            raise RunError(f"{path}: this is not a token; delete the file, and a new one is made")
        time.sleep(0.01)


def cookie_value(token: str) -> str:
    """What a browser keeps instead of the token, and sends to every port of the host."""
    return hashlib.sha256(f"cookie {token}".encode()).hexdigest()


def bearer(token: str | None) -> dict[str, str]:
    """The header of a program's requests; none without a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}
