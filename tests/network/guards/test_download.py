"""Every download ends: complete with the right bytes, or with a reason and its bytes kept. A server on loopback."""

import contextlib
import hashlib
import shutil
import signal
import subprocess
from pathlib import Path

import children
import huggingface_hub
import pytest
from download_helpers import CONTENT, FILES, NAME, REPO, get, no_overlap, part, whole
from filelock import FileLock
from hub_server import COMMIT, Fault, only_hub
from hypothesis import HealthCheck, example, given, settings, strategies as st
from monitor_helpers import wait_for
from ui_helpers import small_disk

from guards import download
from guards.hub import DownloadError, Progress
from trainer import models, tiny_flux
from trainer.errors import TrainError

HONEST = ("drop", "busy")
KINDS = (*HONEST, "whole", "short", "long", "extra", "moved", "flipped", "changed")
FAULT = st.builds(Fault, st.sampled_from(KINDS), st.integers(0, len(CONTENT)))
HONEST_FAULT = st.builds(Fault, st.sampled_from(HONEST), st.integers(0, len(CONTENT)))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(faults=st.lists(HONEST_FAULT, max_size=8) | st.lists(FAULT, max_size=6))
@example(faults=[Fault("drop", 100_000), Fault("moved", 0)])
@example(faults=[Fault("drop", 100_000), Fault("changed")])
@example(faults=[Fault("drop", 100_000), Fault("whole"), Fault("flipped")])
@example(faults=[Fault("short", 1000), Fault("long", 5), Fault("extra", 9)])
def test_whatever_a_server_does_the_file_is_right_or_there_is_a_reason(tmp_path_factory, faults):
    """A connection that only breaks, at any place, is continued, and no byte is sent twice."""
    folder = tmp_path_factory.mktemp("d")
    honest = all(fault.kind in HONEST for fault in faults)
    with pytest.MonkeyPatch.context() as environment, only_hub(environment, folder, FILES) as hub:
        hub.faults = list(faults)
        for _ in range(10):  # each with what the one before has kept
            try:
                get(folder / NAME, stall_s=120)
                break
            except DownloadError as error:
                assert error.kind in ("damaged", "server") and str(error) and not honest
                kept = part(folder).read_bytes() if part(folder).exists() else b""
                right = CONTENT.startswith(kept) or CONTENT[::-1].startswith(kept)
                assert right or any(fault.kind == "flipped" for fault in faults)
        assert (folder / NAME).read_bytes() == hub.files[NAME]
        if honest:
            assert no_overlap(hub) and {p.name for p in folder.iterdir()} == {NAME, f".{NAME}.lock"}


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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command: no certificate for a local server")
def test_https_is_watched_too_and_an_unknown_certificate_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_READ_S", "1")
    key, made, both = (tmp_path / name for name in ("key.pem", "certificate.pem", "both.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    both.write_bytes(key.read_bytes() + made.read_bytes())
    try:
        with only_hub(monkeypatch, tmp_path, FILES, both) as hub:
            with pytest.raises(DownloadError, match="CERTIFICATE_VERIFY_FAILED") as error:
                get(tmp_path / "d" / NAME)
            assert error.value.kind == "server"
            monkeypatch.setenv("SSL_CERT_FILE", str(made))
            huggingface_hub.close_session()
            hub.faults = [Fault("drop", 100_000), Fault("stall", 200_000)]
            get(tmp_path / "d" / NAME, stall_s=60)
            assert (tmp_path / "d" / NAME).read_bytes() == CONTENT and no_overlap(hub)
    finally:
        huggingface_hub.close_session()


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

        with pytest.raises(
            DownloadError, match=r"the disk of .* is full \(No space left .*\); \d+ bytes received are kept"
        ) as error:
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
    lock = download.cache_folder() / ".locks" / "models--me--model" / f"{hashlib.sha256(CONTENT).hexdigest()}.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock), pytest.raises(DownloadError, match="another process holds .*lock"):
        whole()


def test_too_little_space_for_all_files_is_noticed_before_the_first_byte(hub, tmp_path, monkeypatch):
    hub.files["y.safetensors"] = CONTENT[1:]
    with small_disk(tmp_path, "700k") as disk:
        with pytest.raises(DownloadError, match="me/model needs 0.0 GB more, but .*disk has .* free some space"):
            monkeypatch.setenv("HF_HUB_CACHE", str(disk))
            whole()
    assert hub.sent == []


LOAD = """
import sys
from pathlib import Path
from guards import download
found = download.snapshot("me/model", lambda names: ["x.safetensors"], lambda _: None)
print(found / "x.safetensors")
"""


@pytest.mark.slow
def test_a_killed_download_is_continued_once_by_the_next_two_processes(hub, tmp_path):
    """SIGKILL: its lock is free at once, its bytes are kept."""
    hub.faults = [Fault("stall", 300_000)]
    first = children.start(LOAD)
    blobs = download.repository(REPO) / "blobs"
    wait_for(lambda: part(blobs).exists() and part(blobs).stat().st_size > 100_000, 200)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=100)
    kept = part(blobs).stat().st_size
    assert 0 < kept < len(CONTENT)
    hub.requests.clear()
    hub.sent, hub.nap_s = [], 0.05
    both = [children.start(LOAD), children.start(LOAD)]
    assert all(Path(one.communicate(timeout=300)[0].strip()).read_bytes() == CONTENT for one in both)
    assert {h["range"] for _, _, h in hub.requests if "range" in h} == {f"bytes={kept}-"}
    assert hub.sent_of(NAME) == len(CONTENT) - kept
    assert sorted(p.name for p in blobs.iterdir()) == [hashlib.sha256(CONTENT).hexdigest()]


def test_the_hubs_library_finds_the_file_without_a_network(hub, tmp_path):
    folder, cache = whole(), str(download.cache_folder())
    for name, content in FILES.items():
        library = huggingface_hub.hf_hub_download("me/model", name, cache_dir=cache, local_files_only=True)
        found = folder / name
        assert Path(library) == found and found.is_symlink() and found.read_bytes() == content
    assert (download.repository(REPO) / "refs/main").read_text() == COMMIT


@pytest.mark.parametrize("name", ["../../escaped", "/etc/escaped", "a/../../b", "C:/x", "a\\b"])
def test_a_name_that_leaves_the_repository_is_refused(hub, tmp_path, name):
    hub.files = {name: b"x"}
    with pytest.raises(DownloadError, match="is not a name of a file"):
        whole()
    assert hub.sent == []


@pytest.mark.slow
def test_the_built_in_trainer_loads_the_files_of_a_hub_id_once_or_says_why_not(hub, tmp_path, monkeypatch):
    folder = tiny_flux.ensure(tmp_path / "tiny-flux")
    own = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    needless = ("flux.safetensors", "vae/diffusion_pytorch_model.fp16.safetensors", "README.md")
    hub.files = own | dict.fromkeys(needless, CONTENT)
    ticks: list[tuple[int, int]] = []
    found = models.locate("me/model", lambda *at: ticks.append(at))
    loaded = {p.relative_to(found).as_posix(): p.read_bytes() for p in found.rglob("*") if p.is_file()}
    assert loaded.items() <= own.items() and len(ticks) > len(loaded)
    assert not [name for name, *_ in hub.sent if name in needless]
    models.check(found)
    hub.silent = True
    hub.requests.clear()
    assert models.locate("me/model", print) == found and hub.requests == []
    (download.repository(REPO) / ".hangproof.json").unlink()  # as the hub's library leaves it
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_STALL_S", "1")
    assert models.locate("me/model", print) == found
    shutil.rmtree(found / "vae")
    with pytest.raises(TrainError, match="me/model: no data from .* Check the network"):
        models.locate("me/model", print)
    hub.silent, hub.refusal = False, (403, "GatedRepo")
    shutil.rmtree(download.cache_folder())
    with pytest.raises(TrainError, match="me/model: no access to me/model .*accept its licence at http"):
        models.locate("me/model", print)
