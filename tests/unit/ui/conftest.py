"""What most tests of the page's modules start with: a draft in an empty data root, or one with settings and images."""

import pytest
from configure_helpers import NO_GPU, filled
from draft_helpers import mine
from ui_helpers import write_run
from ui_markup import sampled

from ui.new import form


@pytest.fixture
def folder(data):
    """The folder of a run that trains."""
    return write_run(data)


@pytest.fixture
def no_gpu(monkeypatch):
    """The settings of a draft are those of a machine without a GPU."""
    monkeypatch.setattr(form, "this_machine", lambda *_: NO_GPU)
