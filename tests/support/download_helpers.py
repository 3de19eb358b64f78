"""Downloads from the hub of hub_server.py: one file or the whole repository, and what was sent twice."""

from pathlib import Path

import pytest
from hub_server import Hub, only_hub

from guards import download
from guards import hub as hub_module
from guards.hub import Options, Source

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
    return download.snapshot(Source("me/model", ""), lambda names: names, how)


def no_overlap(hub: Hub, name: str = NAME) -> bool:
    """Whether every byte of the file was sent exactly once."""
    covered = sorted((start, to) for one, start, to in hub.sent if one == name)
    ends = [0, *(to for _, to in covered)]
    return [start for start, _ in covered] == ends[:-1] and ends[-1] == len(hub.files[name])
