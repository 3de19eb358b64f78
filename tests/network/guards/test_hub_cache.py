"""A whole repository in the cache of the hub's library: downloaded once, found without a network."""

import hashlib
import shutil
import signal
from pathlib import Path

import children
import pytest
from download_helpers import CONTENT, FILES, SOURCE, no_overlap, part, whole
from hub_server import COMMIT, Fault
from monitor_helpers import wait_for
from ui_helpers import small_disk

from guards import hub_cache
from guards.hub import DownloadError, Options


def test_too_little_space_for_all_files_is_noticed_before_the_first_byte(hub, tmp_path, monkeypatch):
    hub.files["y.safetensors"] = CONTENT[1:]
    with small_disk(tmp_path, "700k") as disk:
        with pytest.raises(DownloadError, match="me/model needs 0.0 GB more, but .*disk has .* free some space"):
            monkeypatch.setenv("HF_HUB_CACHE", str(disk))
            whole(Options())
    assert hub.sent == []


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
    hub.faults = [Fault("stall", 300_000)]
    first = children.start(LOAD)
    blobs = hub_cache.repository(SOURCE) / "blobs"
    wait_for(lambda: part(blobs).exists() and part(blobs).stat().st_size > 100_000, 200)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=100)
    kept = part(blobs).stat().st_size
    assert 0 < kept < len(CONTENT)
    hub.requests.clear()
    out, _ = children.start(LOAD).communicate(timeout=300)
    assert Path(out.strip()).read_bytes() == CONTENT
    assert {h["range"] for _, _, h in hub.requests if "range" in h} == {f"bytes={kept}-"}
    assert sorted(p.name for p in blobs.iterdir()) == [hashlib.sha256(CONTENT).hexdigest()]


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
