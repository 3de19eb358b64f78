"""A bundle: the same run gives the same bytes, and it trains where there is only Python: no project, no home, no network."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from runs_helpers import pictures, python, spec

import runs
from launch import bundle
from launch.common import LaunchError

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {
    "model": "tiny-flux",
    "max_train_steps": 4,
    "save_every_n_steps": 2,
    "resolution": 64,
    "mixed_precision": "no",
    "sample_every_n_steps": 0,
    "repeats": 1,
    "workers": 0,
}
# The project is hidden (an empty file system on its folder, but for its environment), and so are all networks.
ELSEWHERE = """
set -eu
mkdir "$1/venv"
mount --bind {root}/.venv "$1/venv"
mount -t tmpfs none {root}
mkdir {root}/.venv
mount --bind "$1/venv" {root}/.venv
cd /
exec env -i PATH=/usr/bin:/bin HOME="$1/home" TMPDIR="$1" PYTHON={python} bash "$2/train.sh"
"""


def tiny(root: Path, name: str = "my lora") -> Path:
    """A run of the tiny model in a data root."""
    return runs.create(spec(name=name, trigger="ohwx", **SETTINGS), pictures(root / "photos"))


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return {member.name: member for member in tar}


def test_the_same_run_gives_the_same_bytes(data, tmp_path):
    folder = tiny(data)
    first = python("-m", "launch", "bundle", str(folder), "-o", str(tmp_path / "a.tar"), "--json")
    assert first.returncode == 0, first.stderr
    first_said = json.loads(first.stdout.splitlines()[-1])
    for path in (data / "datasets").rglob("*"):
        os.utime(path, (1, 1))
    second = python("-m", "launch", "bundle", folder.name, "-o", str(tmp_path / "b.tar"), "--json")
    assert json.loads(second.stdout.splitlines()[-1])["sha256"] == first_said["sha256"]
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    found = members(tmp_path / "a.tar")
    assert list(found) == sorted(found) and {m.mtime for m in found.values()} == {bundle.TIME_S}
    assert {(m.uid, m.gid, m.uname, m.gname) for m in found.values()} == {(0, 0, "", "")}
    assert {oct(m.mode) for m in found.values()} == {"0o644", "0o755"}
    assert not list(tmp_path.glob(".*")), "no temporary file is left"


def test_it_holds_what_trains_and_nothing_else(data, tmp_path):
    python("-m", "launch", "bundle", str(tiny(data)), "-o", str(tmp_path / "a.tar"))
    names = {name.partition("/")[2] for name in members(tmp_path / "a.tar")}
    assert {
        "train.sh",
        "requirements.txt",
        "outputs/my-lora/run.toml",
        "trainer/loop.py",
        "monitor/supervisor.py",
    } <= names
    assert "monitor/config.toml" in names and "monitor/keeper.sh" in names and "launch/train.py" in names
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
    import presets

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
    assert (
        "import pydantic" in bundle.train_script(made)
        and "torch" not in bundle.train_script(made).split("modules=")[1].split("\n")[0]
    )


@pytest.mark.parametrize("hidden", [True, False])
def test_it_trains_to_the_same_lora_where_there_is_only_python(data, tmp_path, hidden):
    if hidden and subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here (needs root): the project cannot be hidden from the bundle")
    if not hidden and not subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode:
        pytest.skip("done with the project hidden")
    folder = tiny(data)
    home = python("-m", "monitor", "run", str(folder), HANGPROOF_GPUS="", CUDA_VISIBLE_DEVICES="")
    assert home.returncode == 0, home.stderr[-2000:]
    here = (folder / "my-lora.safetensors").read_bytes()
    assert python("-m", "launch", "bundle", str(folder), "-o", str(tmp_path / "a.tar")).returncode == 0
    there = tmp_path / "another machine"
    (there / "home").mkdir(parents=True)
    subprocess.run(["tar", "xf", str(tmp_path / "a.tar")], cwd=there, check=True)
    shutil.rmtree(data)
    top = there / "my-lora"
    if hidden:
        script = ELSEWHERE.format(root=ROOT, python=sys.executable)
        command = ["unshare", "--mount", "--net", "bash", "-c", script, "-", str(there), str(top)]
        env = {"PATH": os.environ["PATH"]}
    else:
        command = ["bash", str(top / "train.sh")]
        env = {"PATH": "/usr/bin:/bin", "HOME": str(there / "home"), "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    status = json.loads((top / "outputs" / "my-lora" / "status.json").read_text())
    assert status["state"] == "completed" and status["step"] == 4
    script = (top / "outputs" / "my-lora" / "train.sh").read_text()
    assert str(top) in script and str(ROOT) not in script
    elsewhere = (top / "outputs" / "my-lora" / "my-lora.safetensors").read_bytes()
    assert here == elsewhere


def test_without_an_environment_it_says_what_to_do(data, tmp_path):
    python("-m", "launch", "bundle", str(tiny(data)), "-o", str(tmp_path / "a.tar"))
    subprocess.run(["tar", "xf", "a.tar"], cwd=tmp_path, check=True)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["bash", "my-lora/train.sh"], cwd=tmp_path, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "no Python 3.11 to 3.14 with the packages of requirements.txt" in done.stderr


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
    done = python("-m", "launch", "bundle", str(path), "--unpack", str(tmp_path / "in" / "side"))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["evil.tar"]


def test_a_bundle_is_unpacked_once_and_a_damaged_one_never(data, tmp_path):
    path = tmp_path / "a.tar"
    python("-m", "launch", "bundle", str(tiny(data)), "-o", str(path))
    done = python("-m", "launch", "bundle", str(path), "--unpack", str(tmp_path / "to"), "--json")
    top = Path(json.loads(done.stdout.splitlines()[-1])["folder"])
    assert os.access(top / "train.sh", os.X_OK) and (top / "outputs/my-lora/run.toml").is_file()
    again = python("-m", "launch", "bundle", str(path), "--unpack", str(tmp_path / "to"))
    assert again.returncode == 1 and "exists already" in again.stderr
    for text in (b"", b"not a tar file at all" * 100):
        path.write_bytes(text)
        done = python("-m", "launch", "bundle", str(path), "--unpack", str(tmp_path / "other"))
        assert done.returncode == 1 and "Traceback" not in done.stderr and not (tmp_path / "other").exists()
