"""Fixtures of the page's tests in a browser."""

import pytest
from ui_helpers import alone, runs_data as data, serving
from ui_page import a_tab, open_page


@pytest.fixture(autouse=True)
def _no_page_is_left(request):
    """Contexts that a test opened itself are closed: their pages would ask servers that are gone."""
    browser = request.getfixturevalue("browser") if "browser" in request.fixturenames else None
    kept = browser.contexts if browser else []
    yield
    for context in browser.contexts if browser else []:
        if context not in kept:
            context.close()


@pytest.fixture(scope="module")
def page(browser, server):
    """One page for all tests of a file, because it opens in seconds; the name of a test's run or draft is its own."""
    with a_tab(browser, timezone_id="Asia/Tokyo", locale="en-GB") as tab:
        open_page(tab, server)
        yield tab


@pytest.fixture(scope="session")
def bare_server(tmp_path_factory):
    """One server on a machine without a GPU and kohya's trainers, and with nobody logged in to the hub."""
    folder = tmp_path_factory.mktemp("bare")
    nowhere = {name: str(folder / "none") for name in ("SD_SCRIPTS_DIR", "MUSUBI_DIR")}
    with serving(folder / "data", **alone(folder), **nowhere) as running:
        yield running
