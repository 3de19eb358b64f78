"""What ~/.ssh/config says of a host, and a rename on a server that does not replace files."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from launch.store import sftp

CONFIG = """
Host box
    HostName 10.0.0.7
    Port 2022
    User me
    IdentityFile ~/.ssh/box key
"""


@pytest.mark.parametrize(
    ("host", "port", "user", "expected"),
    [
        ("box", None, "", {"host": "10.0.0.7", "port": 2022, "username": "me"}),
        ("box", 22, "you", {"host": "10.0.0.7", "port": 22, "username": "you"}),
        ("other", None, "", {"host": "other", "port": 22}),
    ],
)
def test_the_address_decides_and_sshs_settings_fill_it_in(tmp_path, monkeypatch, host, port, user, expected):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(CONFIG)
    found = sftp.login(host, port, user)
    assert {name: found[name] for name in ("host", "port", "username") if name in found} == expected
    assert found.get("key_filename") == ([f"{tmp_path}/.ssh/box key"] if host == "box" else None)
    assert found["timeout"] == found["auth_timeout"] == sftp.CONNECT_S


@pytest.mark.parametrize("exists", [True, False])
def test_a_server_without_posix_rename_deletes_the_old_file_first(exists):
    files = {"new": 1, "temporary": 2} if exists else {"temporary": 2}
    posix_rename = Mock(side_effect=OSError("Operation unsupported"))

    def rename(old: str, new: str) -> None:
        if new in files:
            raise OSError("Failure")
        files[new] = files.pop(old)

    def remove(name: str) -> None:
        if files.pop(name, None) is None:
            raise FileNotFoundError(name)

    server = SimpleNamespace(ftp=SimpleNamespace(posix_rename=posix_rename, rename=rename, remove=remove))
    sftp.KnownHosts.mv(server, "temporary", "new")
    assert files == {"new": 2}
    posix_rename.side_effect = OSError("Permission denied")
    with pytest.raises(OSError, match="denied"):
        sftp.KnownHosts.mv(server, "temporary", "new")
