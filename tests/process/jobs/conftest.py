"""A data root with one GPU."""

import pytest
from queue_helpers import one_gpu


@pytest.fixture
def data(tmp_path, monkeypatch):
    with one_gpu(tmp_path, monkeypatch) as root:
        yield root
