"""Downloads from the hub of hub_server.py: one file or the whole repository, and what was sent twice."""

from pathlib import Path

import pytest
from hub_server import Hub, only_hub

from guards import download, hub as hub_module

CONTENT = bytes(range(251)) * 2_000  # 502 kB
NAME = "x.safetensors"
REPO = "me/model"
FILES = {NAME: CONTENT, "config.json": b'{"a": 1}'}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with only_hub(monkeypatch, tmp_path, FILES) as server:
        yield server


def get(target: Path, stall_s: float = 20, on_progress: download.OnProgress = lambda _: None) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HANGPROOF_DOWNLOAD_STALL_S", str(stall_s))
        download.fetch(hub_module.listing(REPO)[NAME], target, on_progress)


def part(folder: Path) -> Path:
    """The file that holds the received bytes."""
    return next(folder.glob(".*.part"), folder / "none")


def whole() -> Path:
    return download.snapshot(REPO, lambda names: names, lambda _: None)


def no_overlap(hub: Hub) -> bool:
    """Whether every byte of the file was sent exactly once."""
    covered = sorted((start, to) for one, start, to in hub.sent if one == NAME)
    ends = [0, *(to for _, to in covered)]
    return [start for start, _ in covered] == ends[:-1] and ends[-1] == len(hub.files[NAME])
