"""A folder of images, and a server that describes them."""

import pytest
from caption_server import answering
from draft_helpers import photo

from captions import endpoint


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for number in range(4):
        photo(folder / f"{number}.png", seed=number)
    return folder


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_PAUSE_S", 0.02)
    with answering() as found:
        yield found
