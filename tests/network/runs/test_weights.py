"""The files of base models: where they come from, what is missing, what is said. (Faults: tests/network/guards.)"""

import json
from pathlib import Path

import pytest
from hub_server import COMMIT, Fault, only_hub
from runs_helpers import python

import runs
from guards.hub import Source
from runs import weights

CONTENT = bytes(range(256)) * 2_000  # 512 kB
NAME = "sub dir/ü.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with only_hub(monkeypatch, tmp_path, {NAME: CONTENT}) as server:
        yield server


def get(target: Path, stall_s: float = 60, sha256: str = "") -> list[tuple]:
    """Download the file; (name, bytes so far, size) of each report."""
    calls: list[tuple] = []
    report = lambda at: calls.append((at.name, at.done, at.total))  # noqa: E731
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HANGPROOF_DOWNLOAD_STALL_S", str(stall_s))
        weights.fetch(target.name, [(Source("me/model", NAME), target, sha256)], report)
    return calls


def test_a_file_arrives_with_progress(hub, tmp_path):
    calls = get(tmp_path / "m" / "model.safetensors")
    assert {p.name for p in (tmp_path / "m").iterdir()} == {"model.safetensors", ".model.safetensors.lock"}
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == CONTENT
    assert hub.requests[1][1] == f"/me/model/resolve/{COMMIT}/{NAME}"
    arrived = [done for name, done, size in calls if name == "model.safetensors" and size == len(CONTENT)]
    assert arrived == sorted(arrived) and arrived[0] == 0 and arrived[-1] == len(CONTENT) and len(arrived) > 3


def test_a_damaged_file_is_deleted_and_reported(hub, tmp_path):
    for more in ({}, {"sha256": "ab" * 32}):  # not what the hub announced; not what the table says
        hub.faults = [] if more else [Fault("flipped")]
        with pytest.raises(runs.RunError, match="arrived damaged .* download it again"):
            get(tmp_path / "m" / "x", **more)
        assert not [p for p in (tmp_path / "m").iterdir() if p.suffix != ".lock"]


def test_a_missing_file_names_the_table_and_no_network_the_server(hub, tmp_path, monkeypatch):
    hub.files = {"other": b""}
    with pytest.raises(runs.RunError, match=r"does not exist.*; or correct \[downloads\] in models.toml"):
        get(tmp_path / "m" / "x")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(runs.RunError, match=r"no data from 127\.0\.0\.1:9 for 1 s \(.*refused.*\)\. Check the network"):
        get(tmp_path / "m" / "x", stall_s=1)


@pytest.mark.slow
def test_the_command_fetches_what_is_missing_through_faults(hub, data):
    names = ["ae.safetensors", "flux1-schnell.safetensors", "t5xxl_fp16.safetensors"]
    hub.files = dict.fromkeys(names, CONTENT)
    hub.faults = [Fault("drop", 100_000), Fault("busy"), Fault("drop", 70_000)]
    (data / "models").mkdir()
    (data / "models/clip_l.safetensors").write_bytes(b"already here")
    fetch = ("-m", "runs", "fetch-model", "--json")
    done = python(*fetch, "FLUX.1-schnell")
    assert done.returncode == 0, done.stderr
    assert sorted(Path(f).name for f in json.loads(done.stdout.splitlines()[-1])["files"]) == names
    assert "ae.safetensors: 0.00 of 0.00 GB · 100 %" in done.stderr
    assert not runs.missing_files("flux-schnell") and not list((data / "models").glob(".*.part*"))
    assert {(data / "models" / name).read_bytes() for name in names} == {CONTENT}
    assert (data / "models/clip_l.safetensors").read_bytes() == b"already here"
    (data / "models/ae.safetensors").unlink()
    hub.refusal = (403, "GatedRepo")
    wrong = {"FLUX.1-schnell": f"accept its licence at {hub.url}/", "tiny-flux": "is generated on this machine"}
    for name, says in (wrong | {"nope": "no base model 'nope'"}).items():
        done = python(*fetch, name)
        assert done.returncode == 1 and says in done.stderr
