"""Every download ends: complete with the right bytes, or with a reason and its bytes kept. A server on loopback."""

import contextlib
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from download_helpers import CONTENT, FILES, NAME, get, no_overlap, part, whole
from filelock import FileLock
from hub_server import Fault, only_hub
from huggingface_hub import close_session
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ui_helpers import small_disk

from guards import hub_cache
from guards.hub import DownloadError, Options, Progress

# Faults.

HONEST = ("drop", "busy")
KINDS = (*HONEST, "whole", "short", "long", "extra", "moved", "flipped", "changed")
FAULT = st.builds(Fault, st.sampled_from(KINDS), st.integers(0, len(CONTENT)))
HONEST_FAULT = st.builds(Fault, st.sampled_from(HONEST), st.integers(0, len(CONTENT)))


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(faults=st.lists(HONEST_FAULT, max_size=8))
def test_a_connection_that_breaks_at_any_place_is_continued_and_no_byte_is_sent_twice(tmp_path_factory, faults):
    folder = tmp_path_factory.mktemp("d")
    with pytest.MonkeyPatch.context() as environment, only_hub(environment, folder, FILES) as hub:
        hub.faults = list(faults)
        get(folder / NAME, stall_s=120)
        assert (folder / NAME).read_bytes() == CONTENT
        assert no_overlap(hub)
        assert {p.name for p in folder.iterdir()} == {NAME, f".{NAME}.lock"}


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(faults=st.lists(FAULT, max_size=6))
@example(faults=[Fault("drop", 100_000), Fault("moved", 0)])
@example(faults=[Fault("drop", 100_000), Fault("changed")])
@example(faults=[Fault("drop", 100_000), Fault("whole"), Fault("flipped")])
@example(faults=[Fault("short", 1000), Fault("long", 5), Fault("extra", 9)])
def test_whatever_a_server_does_the_file_is_right_or_there_is_a_reason(tmp_path_factory, faults):
    folder = tmp_path_factory.mktemp("d")
    with pytest.MonkeyPatch.context() as environment, only_hub(environment, folder, FILES) as hub:
        hub.faults = list(faults)
        for _ in range(10):  # each with what the one before has kept
            try:
                get(folder / NAME, stall_s=30)
                break
            except DownloadError as error:
                assert error.kind in ("damaged", "server") and str(error)
                kept = part(folder).read_bytes() if part(folder).exists() else b""
                assert any(f.kind == "flipped" for f in faults) or any(
                    content.startswith(kept) for content in (CONTENT, CONTENT[::-1])
                )
        assert (folder / NAME).read_bytes() == hub.files[NAME]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stall", "trickle"])
def test_a_server_that_sends_too_little_fails_with_the_reason_and_the_bytes_kept(hub, tmp_path, monkeypatch, kind):
    """A byte now and then is not progress. A connection that stalls is replaced."""
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_READ_S", "0.5")
    target = tmp_path / "d" / NAME
    hub.faults = [Fault(kind, 200_000), *[Fault(kind, 0)] * 100]
    says = r"no data from .* for 2 s .*bytes received are kept.* Check the network"
    with pytest.raises(DownloadError, match=says) as error:
        get(target, stall_s=2)
    assert error.value.kind == "stalled"
    kept = part(target.parent).stat().st_size
    assert kept >= 200_000
    hub.faults = [Fault("stall", 100_000), Fault("stall", 50_000)]
    hub.requests.clear()
    get(target, stall_s=60)
    assert target.read_bytes() == CONTENT
    assert next(h["range"] for _, _, h in hub.requests if "range" in h) == f"bytes={kept}-"


def certificate_in(folder: Path) -> Path:
    """A certificate for this machine, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command: no certificate for a local HTTPS server")
    key, made, both = folder / "key.pem", folder / "certificate.pem", folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command, *names], check=True, capture_output=True, timeout=120)
    both.write_bytes(key.read_bytes() + made.read_bytes())
    return both


@pytest.mark.slow
def test_https_is_watched_too_and_an_unknown_certificate_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_READ_S", "1")
    try:
        with only_hub(monkeypatch, tmp_path, FILES, certificate_in(tmp_path)) as hub:
            with pytest.raises(DownloadError, match="CERTIFICATE_VERIFY_FAILED") as error:
                get(tmp_path / "d" / NAME)
            assert error.value.kind == "server"
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
            close_session()
            hub.faults = [Fault("drop", 100_000), Fault("stall", 200_000)]
            get(tmp_path / "d" / NAME, stall_s=60)
            assert (tmp_path / "d" / NAME).read_bytes() == CONTENT and no_overlap(hub)
    finally:
        close_session()


# The disk.


def test_a_disk_that_fills_keeps_the_received_bytes_and_says_so(hub, tmp_path):
    hub.faults = [Fault("trickle", 37 * 4096 - 96)]  # the rest comes slowly, so that the disk fills before it
    with small_disk(tmp_path, "700k") as disk:
        target, filler = disk / NAME, disk / "filler"

        def fill(at: Progress) -> None:
            if at.done > 100_000 and not filler.exists():
                filler.write_bytes(b"")
                with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                    for _ in range(100):
                        file.write(bytes(8192))

        with pytest.raises(DownloadError, match=r"the disk of .* is full; the \d+ bytes received are kept") as error:
            get(target, on_progress=fill)
        kept = part(target.parent).stat().st_size
        assert error.value.kind == "space" and 100_000 < kept < len(CONTENT)
        assert part(target.parent).read_bytes() == CONTENT[:kept]
        filler.unlink()
        hub.sent = []
        get(target)
        assert target.read_bytes() == CONTENT and hub.sent_of(NAME) == len(CONTENT) - kept


def test_a_lock_whose_holder_makes_no_progress_is_a_reason(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_STALL_S", "1")
    lock = hub_cache.folder() / ".locks" / "models--me--model" / f"{hashlib.sha256(CONTENT).hexdigest()}.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock), pytest.raises(DownloadError, match="another process holds .*lock"):
        whole(Options())
