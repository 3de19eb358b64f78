"""Fixtures of the page's tests in a browser."""

import pytest
from ui_helpers import alone, kill_runs, serving


@pytest.fixture(autouse=True)
def _no_page_is_left(request):
    """Contexts that a test opened itself are closed: their pages would ask servers that are gone."""
    yield
    if "browser" in request.fixturenames:
        for context in request.getfixturevalue("browser").contexts:
            context.close()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder of its own, for this process too; what runs in it is killed at the end."""
    root = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    yield root
    (root / "outputs" / ".queue.json").unlink(missing_ok=True)
    kill_runs(root)


@pytest.fixture(scope="session")
def bare_server(tmp_path_factory):
    """One server on a machine without a GPU and kohya's trainers, and with nobody logged in to the hub."""
    folder = tmp_path_factory.mktemp("bare")
    nowhere = {name: str(folder / "none") for name in ("SD_SCRIPTS_DIR", "MUSUBI_DIR")}
    with serving(folder / "data", **alone(folder), **nowhere) as running:
        yield running
