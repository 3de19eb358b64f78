"""Every kind of place keeps the same promises: names, exclusive creation, sizes, limits of time and speed, failures."""

import gc
import hashlib
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from store_helpers import QUICK
from store_servers import ERROR, serving
from werkzeug import wrappers

from guards import deadline
from launch.store import filesystems
from launch.store.places import MOST_CALLS, Limits, NotFound, Place, Refused, StoreError, Unavailable, open_place

BIG = 9_000_000  # more than one piece, more than one part of an upload


@pytest.fixture
def place(server) -> Place:
    return server.place(QUICK).under("my-run")


def test_what_is_written_is_read_and_listed(place, tmp_path):
    assert place.list() == {} and place.list("files") == {}
    big = tmp_path / "big"
    big.write_bytes(os.urandom(BIG))
    for name, content in {"small": b"one", "small ": b"two!", "big": big, "empty": b""}.items():
        place.put(f"files/{name.strip()}", content)
    assert place.read("files/small") == b"two!" and place.read("files/empty") == b""
    sizes = {"files/big": BIG, "files/empty": 0, "files/small": 4}
    assert place.list() == sizes
    assert set(place.list("files")) == set(sizes) and place.under("files").read("small") == b"two!"
    place.put("other/deep/x", b"1")
    place.put("file", b"1")
    assert place.folders() == ["files", "other"] and place.under("none").folders() == []
    place.delete(["other/deep/x", "file"])
    assert place.get("files/big", tmp_path / "copy", BIG) == hashlib.sha256(big.read_bytes()).hexdigest()
    assert (tmp_path / "copy").read_bytes() == big.read_bytes()
    place.delete(["files/big", "files/none", "files/small"])
    assert set(place.list()) == {"files/empty"}


def test_a_missing_file_and_one_of_another_size_are_refused_and_only_one_creates_a_file(place, tmp_path):
    for call in (lambda: place.read("files/none"), lambda: place.get("files/none", tmp_path / "x", 3)):
        with pytest.raises(NotFound, match="files/none"):
            call()
    with pytest.raises(FileNotFoundError):
        place.put("files/x", tmp_path / "not here")
    place.put("files/x", b"12345")
    with pytest.raises(StoreError, match="ends after 5 of 6 bytes"):
        place.get("files/x", tmp_path / "x", 6)
    with pytest.raises(StoreError, match="larger than 3 bytes"):
        place.read("files/x", 3)
    assert place.create("lease/000001.json", b"first")
    assert not place.create("lease/000001.json", b"second")
    assert place.create("lease/000001.json", b"first"), "a repeated call finds its own file"
    assert place.read("lease/000001.json") == b"first"


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../b", "a//b", ".hidden", "a/.b", "a\\b", "", "a\nb", "ä", "x" * 201]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    place = open_place(str(tmp_path / "store"))
    writes = (lambda n: place.put(n, b""), lambda n: place.create(n, b""), lambda n: place.delete([n]))
    for call in (place.read, place.under, *writes):
        with pytest.raises(StoreError, match="not a name in a store"):
            call(name)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "no address"),
        ("ftp://host/x", "not a kind of store"),
        ("s3://key:secret@bucket/x", "holds no password"),
        ("s3://bucket/x?token=1", "holds no password"),
        ("sftp://me:secret@host/x", "holds no password"),
        ("s3://bucket/../x", "without . and .."),
        ("hf://me/model", "hf://buckets/OWNER/NAME"),
        ("sftp://host:x/y", "port is not a number"),
        ("gs://bucket/x", "pip install gcsfs"),
    ],
)
def test_addresses_that_are_refused(address, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # it is not installed
    with pytest.raises(StoreError, match=message) as caught:
        open_place(address)
    assert "secret" not in str(caught.value)


def test_a_store_that_always_fails_is_unavailable_after_its_tries_and_one_that_does_not_answer_after_its_limit(server):
    server.faults.fail_share = 1.0
    place = server.place(Limits(call_s=30, tries=2, first_wait_s=0.01)).under("my-run")
    writes = (lambda: place.put("files/x", b"1"), lambda: place.create("files/x", b"1"))
    for call in (*writes, lambda: place.read("files/x"), place.list):
        with pytest.raises(Unavailable, match="failed 2 times"):
            call()
    server.faults.clear()
    place.put("files/y", b"1")
    assert "files/y" in place.list()
    server.faults.slow_s = 4
    with pytest.raises(Unavailable, match="no answer within 0.3 s"):
        place.limited(call_s=0.3, tries=1).put("files/x", b"1")
    if server.s3:
        server.s3.page = b"<html><body>Sign in</body></html>"
        with pytest.raises(Unavailable, match="no listing of S3"):
            place.list()
        server.s3.page_status = "403 Forbidden"
        server.s3.page = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        with pytest.raises(Refused, match="no permission"):
            place.list()


def test_calls_that_hang_are_a_few_threads_and_the_place_works_again_when_they_return(monkeypatch):
    back, before = threading.Event(), threading.active_count()
    dead = SimpleNamespace(invalidate_cache=lambda: None, rm_file=lambda key: back.wait())
    monkeypatch.setattr(filesystems, "connect", lambda scheme, options: dead)
    monkeypatch.setattr(deadline, "POLL_S", 0.02)
    place = open_place("/mnt/nas", Limits(call_s=0.02, tries=MOST_CALLS + 20, first_wait_s=0.0))
    with pytest.raises(Unavailable, match="no answer within"):
        place.delete(["x"])
    assert threading.active_count() - before < MOST_CALLS + 15
    back.set()
    place.limited(call_s=30, tries=1).delete(["x"])


def test_bytes_per_second_are_limited(server, tmp_path):
    """A busy machine makes it slower, never faster."""
    data = os.urandom(300_000)
    (tmp_path / "x").write_bytes(data)
    place = server.place(Limits(call_s=90, tries=1, bytes_per_s=600_000))
    for call in (lambda: place.put("files/x", tmp_path / "x"), lambda: place.get("files/x", tmp_path / "y", len(data))):
        began = time.monotonic()
        call()
        assert time.monotonic() - began > 0.4
    assert (tmp_path / "y").read_bytes() == data


@pytest.mark.slow
def test_a_limited_upload_delays_no_other_call(tmp_path, monkeypatch):
    """A lease is renewed while a large file is sent slowly: all calls of fsspec share one event loop."""
    with serving("s3", tmp_path, monkeypatch) as server:
        (tmp_path / "x").write_bytes(os.urandom(3_000_000))
        place, renewed = server.place(QUICK), 0
        place.put("files/first", b"1")
        slow = server.place(Limits(call_s=90, tries=1, bytes_per_s=1_000_000))
        thread = threading.Thread(target=lambda: slow.put("files/x", tmp_path / "x"), daemon=True)
        thread.start()
        while thread.is_alive():
            place.put("lease/000001.json", b"1")
            renewed += thread.is_alive()
        assert renewed > 1 and place.list("files")["files/x"] == 3_000_000


def test_an_upload_that_is_given_up_leaves_what_was_there(server, tmp_path):
    (tmp_path / "x").write_bytes(os.urandom(BIG + 8_000_000))
    place, moved = server.place(QUICK), [0]
    place.put("files/x", b"old")

    def meter(count: int) -> None:
        moved[0] += count
        if moved[0] > BIG:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), place.session() as fs:
        place.write(fs, f"{place.prefix}files/x", str(tmp_path / "x"), meter)
    gc.collect()
    assert set(place.list("files")) == {"files/x"} and place.read("files/x") == b"old"
    folder = tmp_path / "folder store" / "files"  # of one kind
    assert not folder.exists() or [path.name for path in folder.iterdir()] == ["x"]


@pytest.mark.slow
def test_a_login_that_was_renewed_counts_from_the_next_call_on(tmp_path, monkeypatch):
    with serving("s3", tmp_path, monkeypatch) as server:
        file, answer = tmp_path / "credentials", server.s3.answer
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        expired = wrappers.Response(ERROR.format("ExpiredToken"), 400, content_type="application/xml")
        server.s3.answer = lambda environ: expired if "old" in environ["HTTP_AUTHORIZATION"] else answer(environ)
        place = server.place(QUICK)
        for call in (lambda: place.put("a", b"1"), place.list, lambda: place.read("a")):
            file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = x\n")
            with pytest.raises(Refused, match="the login has expired"):
                call()
            file.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = x\n")
            call()
            place._idle.clear()


def test_a_link_in_a_folder_is_not_followed(tmp_path):
    place = open_place(str(tmp_path / "store"), QUICK)
    place.put("files/x", b"1")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "store" / "files" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "store" / "files" / "pipe")
    assert set(place.list()) == {"files/x"}
    for name in ("files/link", "files/pipe"):
        with pytest.raises(StoreError):
            place.limited(tries=1).read(name)


def test_an_unknown_host_key_is_refused(tmp_path, monkeypatch):
    with serving("sftp", tmp_path, monkeypatch) as server:
        (tmp_path / "home/.ssh/known_hosts").write_text("")
        with pytest.raises(Refused, match="host key is not known"):
            server.place(QUICK).put("x", b"1")
    assert not [*(tmp_path / "sftp root").rglob("x")]
