"""The files of base models: where they come from, what is missing, what is said. (Faults: tests/network/guards.)"""

from pathlib import Path

import pytest
from hub_server import COMMIT, Fault, only_hub

import runs
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
        weights.fetch(target.name, [("me/model", NAME, target, sha256)], report)
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
