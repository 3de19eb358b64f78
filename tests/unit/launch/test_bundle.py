"""A bundle: the same run gives the same bytes, and it trains where there is only Python: no project, no home, no network."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from runs_helpers import call, pictures, spec

import presets
import runs
from launch import bundle
from launch.common import LaunchError

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {"model": "tiny-flux", "max_train_steps": 4, "resolution": 64, "mixed_precision": "no", "workers": 0}


def tiny(root: Path, name: str = "my lora") -> Path:
    """A run of the tiny model in a data root."""
    return runs.create(spec(name=name, trigger="ohwx", **SETTINGS), pictures(root / "photos"))


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return {member.name: member for member in tar}


def test_the_same_run_gives_the_same_bytes(data, tmp_path):
    folder = tiny(data)
    first = call("launch", "bundle", str(folder), "-o", str(tmp_path / "a.tar"), "--json")
    assert first.returncode == 0, first.stderr
    first_said = json.loads(first.stdout.splitlines()[-1])
    for path in (data / "datasets").rglob("*"):
        os.utime(path, (1, 1))
    second = call("launch", "bundle", folder.name, "-o", str(tmp_path / "b.tar"), "--json")
    assert json.loads(second.stdout.splitlines()[-1])["sha256"] == first_said["sha256"]
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    found = members(tmp_path / "a.tar")
    assert list(found) == sorted(found) and {m.mtime for m in found.values()} == {bundle.TIME_S}
    assert {(m.uid, m.gid, m.uname, m.gname) for m in found.values()} == {(0, 0, "", "")}
    assert {oct(m.mode) for m in found.values()} == {"0o644", "0o755"}
    assert not list(tmp_path.glob(".*")), "no temporary file is left"


def test_it_holds_what_trains_and_nothing_else(data, tmp_path):
    call("launch", "bundle", str(tiny(data)), "-o", str(tmp_path / "a.tar"))
    names = {name.partition("/")[2] for name in members(tmp_path / "a.tar")}
    assert {"train.sh", "requirements.txt", "outputs/my-lora/run.toml", "monitor/supervisor.py"} <= names
    assert {"monitor/config.toml", "monitor/keeper.sh", "launch/train.py", "trainer/loop.py"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {"ui", "tests", "benchmarks", "app.py", ".venv", ".git", "sd_scripts_patches"}
    assert sum(name.startswith("datasets/my-lora/") for name in names) == 6  # three images with captions
    text = bundle.requirements()
    assert "torch==" in text and "gradio" not in text
    assert str(ROOT) not in "".join(map(str, names))


def test_folders_of_this_machine_do_not_travel(data, tmp_path):
    made = spec(**SETTINGS, save_dir="/fast/disk", store="/mnt/store", control_dir="/photos/control")
    there = bundle.portable(made)
    assert (there.save_dir, there.store, there.control_dir) == ("", "", "control/my-lora")
    assert bundle.portable(spec(store="hf://buckets/me/runs")).store == "hf://buckets/me/runs"


def test_kohyas_trainers_travel_with_their_patches_and_model_files(data, tmp_path):
    made = spec(name="sd", model="sd15", backend="sd-scripts", trigger="x")
    runs.create(made, pictures(data / "photos"))
    with pytest.raises(LaunchError, match="fetch-model sd15"):
        list(bundle.entries(made, None, models=True))
    (data / "models").mkdir()
    for name in presets.models()["sd15"]["files"].values():
        (data / "models" / name).write_bytes(b"weights")
    names = {entry.name for entry in bundle.entries(made, None, models=True)}
    assert "sd_scripts_patches/runner.py" in names and not any(name.startswith("trainer/") for name in names)
    assert {f"models/{name}" for name in presets.models()["sd15"]["files"].values()} <= names
    text = bundle.train_script(made)
    assert "import pydantic" in text and "torch" not in text.split("modules=")[1].split("\n")[0]


def hostile(path: Path, *added: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for one in added:
            if isinstance(one, tarfile.TarInfo):
                tar.addfile(one)
            else:
                info = tarfile.TarInfo(one[0])
                info.size = len(one[1])
                tar.addfile(info, io.BytesIO(one[1]))
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "added",
    [
        [("a/train.sh", b"x"), ("../outside", b"x")],
        [("a/train.sh", b"x"), ("a/../../outside", b"x")],
        [("/etc/outside", b"x")],
        [("a/train.sh", b"x"), ("C:\\outside", b"x")],
        [("a/train.sh", b"x"), ("b/train.sh", b"x")],
        [("a/train.sh", b"x"), link("a/l", "/etc/passwd", tarfile.SYMTYPE)],
        [("a/train.sh", b"x"), link("a/l", "a/train.sh", tarfile.LNKTYPE)],
        [("a/train.sh", b"x"), link("a/l", "", tarfile.FIFOTYPE)],
        [("a/train.sh", b"x"), link("a/l", "", tarfile.CHRTYPE)],
        [],
    ],
)
def test_a_hostile_bundle_is_not_unpacked(tmp_path, added):
    path = hostile(tmp_path / "evil.tar", *added)
    done = call("launch", "bundle", str(path), "--unpack", str(tmp_path / "in" / "side"))
    assert done.returncode == 1 and done.stderr.startswith("launch bundle: "), done.stderr
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["evil.tar"]


def test_a_bundle_is_unpacked_once_and_a_damaged_one_never(data, tmp_path):
    path = tmp_path / "a.tar"
    call("launch", "bundle", str(tiny(data)), "-o", str(path))
    done = call("launch", "bundle", str(path), "--unpack", str(tmp_path / "to"), "--json")
    top = Path(json.loads(done.stdout.splitlines()[-1])["folder"])
    assert os.access(top / "train.sh", os.X_OK) and (top / "outputs/my-lora/run.toml").is_file()
    again = call("launch", "bundle", str(path), "--unpack", str(tmp_path / "to"))
    assert again.returncode == 1 and "exists already" in again.stderr
    for text in (b"", b"not a tar file at all" * 100):
        path.write_bytes(text)
        done = call("launch", "bundle", str(path), "--unpack", str(tmp_path / "other"))
        assert done.returncode == 1 and not (tmp_path / "other").exists()
