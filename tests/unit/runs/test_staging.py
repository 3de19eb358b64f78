"""The local folder of a run whose own disk stalls: of one user and one run, and gone when its files are safe."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
from runs_helpers import pictures, spec, written

import runs
from monitor.process.spawned import idle
from runs import manage, mitigate, staging


@pytest.fixture
def place(data, tmp_path, monkeypatch):
    """The machine's lasting temporary folder."""
    (tmp_path / "var tmp").mkdir()
    (tmp_path / "var tmp").chmod(0o1777)
    monkeypatch.setattr(staging, "PARENT", tmp_path / "var tmp", raising=False)
    return tmp_path / "var tmp"


def made(data: Path, name: str = "cat") -> Path:
    shutil.rmtree(data / "datasets" / name, ignore_errors=True)
    return runs.create(spec(name=name), pictures(data / "photos"))


def locally(folder: Path) -> Path:
    """The folder that the run's checkpoints go to after the mitigation, with its script written."""
    job = runs.pinned(folder)
    patch, sentence = mitigate.change(job, "save_local")
    local = patch["spec"]["save_dir"]
    assert local in sentence
    assert local in runs.write_attempt(folder, job.patched(patch), 2).read_text()
    return Path(local)


def test_a_later_run_of_the_same_name_does_not_see_the_files_of_the_first(data, place):
    folder = made(data)
    first = locally(folder)
    assert locally(folder) == first, "the same for all attempts of a run"
    written(first / "cat.safetensors", "of the first")
    shutil.rmtree(folder)  # by hand
    second = locally(made(data))
    assert second != first and not (second / "cat.safetensors").exists()
    assert not first.exists(), "what a run that is gone left behind is removed"
    manage.delete("cat", idle)
    assert not second.parent.exists(), "as by deleting the run"


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process")
def test_a_full_disk_does_not_make_the_files_of_a_run_those_of_one_that_is_gone(data, place):
    import resource

    folder = made(data)
    local = locally(folder)
    (local / "cat.safetensors").write_text("not copied yet")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError):
            staging.prepare(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(os.fsdecode((local.parent / staging.OWNER).read_bytes())) == folder
    (local.parent / staging.OWNER).write_bytes(b"")  # by an earlier version
    assert staging.prepare(folder) == local and (local / "cat.safetensors").read_text() == "not copied yet"


def test_the_name_of_the_folder_outlives_a_power_cut(data, place, monkeypatch):
    folder, synced, fsync = made(data), [], os.fsync
    (folder / staging.ID).unlink(missing_ok=True)
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), fsync(handle)))
    assert len(staging.identity(folder)) in synced, "an empty file would name another folder"


def test_a_run_on_a_stick_without_hard_links_can_use_the_local_folder(data, place, monkeypatch):
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    folder = made(data)
    assert staging.identity(folder) == staging.identity(folder) and not [*folder.glob(".run-id.*")]
    assert locally(folder).name == staging.FILES


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners of files")
def test_the_local_folder_is_this_users_alone(data, place, monkeypatch):
    folder = made(data)
    local = locally(folder)
    for path in (local, local.parent, local.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(local.parent.parent)
    (place / "elsewhere").mkdir()
    local.parent.parent.symlink_to(place / "elsewhere")
    made_before = runs.load(folder)
    assert mitigate.apply(made_before, "save_local") == (made_before, ""), "the next mitigation is taken"
    with pytest.raises(OSError, match="is a link"):
        staging.prepare(folder)
    assert list((place / "elsewhere").iterdir()) == [], "a link is not followed"
    own = staging.base()
    staging.sweep()
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    (staging.base() / "x").mkdir(parents=True)  # of the account that runs this test
    (staging.base() / "x" / staging.OWNER).write_bytes(os.fsencode(data / "gone"))
    staging.sweep()
    assert (staging.base() / "x").is_dir(), "nothing of another account's folder is read"
    assert staging.base().parent == own.parent and staging.base() != own, "a second account has one of its own"


def test_the_local_folder_is_removed_once_the_run_has_all_of_its_files(data, place, monkeypatch):
    folder = made(data)
    local = locally(folder)
    for name in ("cat.safetensors", "cat-step000010-state/weights", "sample/1.png"):
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(name)
    said = staging.drop_copied(folder)
    assert str(local) in said and "does not have all" in said and local.is_dir()
    shutil.copytree(local, folder, dirs_exist_ok=True)
    (folder / "cat.safetensors").write_text("cat.safetensorS")
    assert "cat.safetensors" in staging.drop_copied(folder), "the same size, other contents"
    (folder / "cat.safetensors").write_text("cat.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        assert f"{local} is kept: " in staging.drop_copied(folder), "nobody knows what is in it"
    assert staging.drop_copied(folder) == "" and not local.parent.exists()


def test_a_run_has_one_local_folder_whichever_path_leads_to_it(data, place, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(data)
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "link"))
    local = locally(made(data))
    assert local == staging.place(data / "outputs" / "cat"), "the monitor follows links"


def test_the_local_folder_of_a_run_whose_disk_is_not_there_is_kept(data, place):
    local = locally(made(data))
    (data / "outputs").rename(data / "unmounted")
    staging.sweep()
    assert local.is_dir()
    (data / "unmounted").rename(data / "outputs")
    staging.sweep()
    assert local.is_dir()
