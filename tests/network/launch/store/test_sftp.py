"""SFTP: whom it connects to."""

import pytest
from store_helpers import QUICK
from store_servers import serving

from launch.store.places import Refused


def test_an_unknown_host_key_is_refused(tmp_path, monkeypatch):
    with serving("sftp", tmp_path, monkeypatch, lambda: 0) as server:
        (tmp_path / "home/.ssh/known_hosts").write_text("")
        with pytest.raises(Refused, match="host key is not known"):
            server.place(QUICK).put("x", b"1")
    assert not [*(tmp_path / "sftp root").rglob("x")]
