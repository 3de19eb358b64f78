"""Every download ends: complete with the right bytes, or with a reason and its bytes kept. A server on loopback."""

import contextlib
import hashlib
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import children
import pytest
from filelock import FileLock
from hub_server import COMMIT, Fault, Hub, only_hub
from huggingface_hub import close_session
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from monitor_helpers import wait_for
from ui_helpers import small_disk

from guards import download, hub_cache
from guards import hub as hub_module
from guards.hub import DownloadError, Options, Progress, Source

CONTENT = bytes(range(251)) * 2_000  # 502 kB
NAME = "x.safetensors"
SOURCE = Source("me/model", NAME)
FILES = {NAME: CONTENT, "config.json": b'{"a": 1}'}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with only_hub(monkeypatch, tmp_path, FILES) as server:
        yield server


def get(target: Path, stall_s: float = 20, **more) -> None:
    how = Options(**more)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HANGPROOF_DOWNLOAD_STALL_S", str(stall_s))
        download.fetch(SOURCE, target, hub_module.listing(SOURCE, how)[1][NAME], how)


def part(folder: Path) -> Path:
    """The file that holds the received bytes."""
    return next(folder.glob(".*.part"), folder / "none")


def whole(how: Options) -> Path:
    """Download the complete repository."""
    return hub_cache.snapshot(Source("me/model", ""), lambda names: names, how)


def no_overlap(hub: Hub, name: str = NAME) -> bool:
    """Whether every byte of the file was sent exactly once."""
    covered = sorted((start, to) for one, start, to in hub.sent if one == name)
    ends = [0, *(to for _, to in covered)]
    return [start for start, _ in covered] == ends[:-1] and ends[-1] == len(hub.files[name])


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


@pytest.mark.slow
def test_a_silent_server_ends_the_first_request_at_its_own_limit(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_HUB_REACH_S", "1")
    hub.silent = True
    with pytest.raises(DownloadError, match="no data from .* for 1 s"):
        get(tmp_path / "d" / NAME, stall_s=300)


def test_a_server_that_names_no_hash_is_not_a_hub(hub, tmp_path):
    hub.hashes = False
    with pytest.raises(DownloadError, match="is not the list of files of a model hub"):
        get(tmp_path / "d" / NAME)
    assert len(hub.requests) == 1


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


@pytest.mark.parametrize("retry_after", ["", "2", "Fri, 27 Nov 2026 09:00:00 GMT"])
def test_a_busy_server_is_asked_again_after_as_long_as_it_says(hub, tmp_path, monkeypatch, retry_after):
    monkeypatch.setattr(hub_module, "LONGEST_PAUSE_S", 5.0)
    hub.refusal, hub.retry_after, began_s = (429, ""), retry_after, time.monotonic()
    threading.Timer(0.5, lambda: setattr(hub, "refusal", None)).start()
    get(tmp_path / "d" / NAME)
    if retry_after == "2":
        assert time.monotonic() - began_s >= 2 and hub_module.Busy(429, "9999").pause_s == 5.0


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (401, "GatedRepo", "gated", "no access to me/model .*accept its licence at http.*/me/model, then set HF_TOKEN"),
        (401, "RepoNotFound", "missing", "does not exist, or is private"),
        (404, "", "missing", "me/model does not exist at http"),
        (400, "", "server", "HTTP status 400"),
    ],
)
def test_a_refusal_names_the_page_and_what_to_do_at_once(hub, tmp_path, status, code, kind, says):
    hub.refusal = (status, code)
    with pytest.raises(DownloadError, match=says) as error:
        get(tmp_path / "d" / NAME)
    assert error.value.kind == kind and len(hub.requests) == 1


def test_the_token_goes_to_the_hub_only_and_into_no_message(hub, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get(tmp_path / "d" / NAME)
    sent = {path.startswith("/cdn/"): headers.get("authorization") for _, path, headers in hub.requests}
    assert sent == {False: "Bearer hf_secret", True: None}
    hub.refusal = (403, "GatedRepo")
    with pytest.raises(DownloadError, match="A token is set") as error:
        get(tmp_path / "d" / "other")
    out, err = capfd.readouterr()
    assert "secret" not in f"{error.value}{out}{err}"
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"hf_secret" in p.read_bytes()]


def test_a_redirect_to_a_local_file_is_not_followed(hub, tmp_path):
    hub.redirect = "file:///etc/hostname"
    with pytest.raises(DownloadError, match="unsupported protocol .*check HF_ENDPOINT"):
        get(tmp_path / "d" / NAME)


# The disk.


def test_too_little_space_for_all_files_is_noticed_before_the_first_byte(hub, tmp_path, monkeypatch):
    hub.files["y.safetensors"] = CONTENT[1:]
    with small_disk(tmp_path, "700k") as disk:
        with pytest.raises(DownloadError, match="me/model needs 0.0 GB more, but .*disk has .* free some space"):
            monkeypatch.setenv("HF_HUB_CACHE", str(disk))
            whole(Options())
    assert hub.sent == []


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


# Processes.

LOAD = """
import sys
from pathlib import Path
from guards import hub, hub_cache
found = hub_cache.snapshot(hub.Source("me/model", ""), lambda names: ["x.safetensors"], hub.Options())
print(found / "x.safetensors")
"""


@pytest.mark.slow
def test_two_processes_download_a_file_once(hub, tmp_path):
    hub.nap_s = 0.05
    both = [children.start(LOAD), children.start(LOAD)]
    paths = {Path(one.communicate(timeout=300)[0].strip()) for one in both}
    assert len(paths) == 1 and paths.pop().read_bytes() == CONTENT
    assert no_overlap(hub)


@pytest.mark.slow
def test_a_killed_download_continues_in_the_next_process(hub, tmp_path):
    """SIGKILL: its lock is free at once, its bytes are kept."""
    hub.nap_s = 0.2
    first = children.start(LOAD)
    blobs = hub_cache.repository(SOURCE) / "blobs"
    wait_for(lambda: part(blobs).exists() and part(blobs).stat().st_size > 100_000, 200)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=100)
    kept = part(blobs).stat().st_size
    assert 0 < kept < len(CONTENT)
    hub.nap_s = 0
    hub.requests.clear()
    out, _ = children.start(LOAD).communicate(timeout=300)
    assert Path(out.strip()).read_bytes() == CONTENT
    assert {h["range"] for _, _, h in hub.requests if "range" in h} == {f"bytes={kept}-"}
    assert sorted(p.name for p in blobs.iterdir()) == [hashlib.sha256(CONTENT).hexdigest()]


def test_a_lock_whose_holder_makes_no_progress_is_a_reason(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_STALL_S", "1")
    lock = hub_cache.folder() / ".locks" / "models--me--model" / f"{hashlib.sha256(CONTENT).hexdigest()}.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock), pytest.raises(DownloadError, match="another process holds .*lock"):
        whole(Options())


# The cache of the hub's library, and a whole repository.


def test_the_hubs_library_finds_the_file_without_a_network(hub, tmp_path):
    import huggingface_hub

    folder, cache = whole(Options()), str(hub_cache.folder())
    for name, content in FILES.items():
        library = huggingface_hub.hf_hub_download("me/model", name, cache_dir=cache, local_files_only=True)
        found = folder / name
        assert Path(library) == found and found.is_symlink() and found.read_bytes() == content
    assert (hub_cache.repository(SOURCE) / "refs/main").read_text() == COMMIT


@pytest.mark.parametrize("name", ["../../escaped", "/etc/escaped", "a/../../b", "C:/x", "a\\b"])
def test_a_name_that_leaves_the_repository_is_refused(hub, tmp_path, name):
    hub.files = {name: b"x"}
    with pytest.raises(DownloadError, match="is not a name of a file"):
        whole(Options())
    assert hub.sent == []


@pytest.mark.slow
def test_the_built_in_trainer_loads_a_hub_id_through_faults_and_again_without_a_network(hub, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from trainer import models, tiny_flux
    from trainer.errors import TrainError

    def locate(tick=lambda *_: None):
        return models.locate("me/model", tick)

    folder = tiny_flux.ensure(tmp_path / "tiny-flux")
    hub.files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    names = set(hub.files)
    needless = ("flux.safetensors", "vae/diffusion_pytorch_model.fp16.safetensors", "README.md")
    hub.files |= dict.fromkeys(needless, CONTENT)
    hub.faults = [Fault("drop", 50), Fault("busy"), Fault("none"), Fault("drop", 3)] * 5
    ticks: list[tuple[int, int]] = []
    found = locate(lambda *at: ticks.append(at))
    loaded = {p.relative_to(found).as_posix() for p in found.rglob("*") if p.is_file()}
    assert loaded <= names and not loaded & set(needless) and len(ticks) > len(loaded)
    assert all(no_overlap(hub, name) for name in loaded if hub.files[name])
    assert not [name for name, *_ in hub.sent if name in needless]
    assert all((found / name).read_bytes() == hub.files[name] for name in loaded)
    models.check(found)
    hub.silent = True
    hub.requests.clear()
    assert locate() == found and hub.requests == []
    (hub_cache.repository(SOURCE) / ".hangproof.json").unlink()  # as the hub's library leaves it
    monkeypatch.setenv("HANGPROOF_DOWNLOAD_STALL_S", "1")
    assert locate() == found
    shutil.rmtree(found / "vae")
    with pytest.raises(TrainError, match="me/model: no data from .* Check the network"):
        locate()
    hub.silent, hub.refusal = False, (403, "GatedRepo")
    shutil.rmtree(hub_cache.folder())
    with pytest.raises(TrainError, match="me/model: no access to me/model .*accept its licence at http"):
        locate()
