"""The page's address names what is open, so that a reload, a bookmark or a link from elsewhere opens it again."""

from urllib.parse import parse_qs, urlsplit

from ui_helpers import serving, write_run
from ui_page import until


def _query(page):
    address = page.evaluate("location.href")  # page.url is what Playwright knew at its last call
    return {key: value[0] for key, value in parse_qs(urlsplit(address).query).items()}


def _selected(page):
    return page.locator("[data-tab-id][aria-selected=true]").inner_text()


def test_a_tab_and_a_run_are_opened_by_their_address_and_named_in_it(tmp_path, tab):
    data = tmp_path / "data"
    (data / "outputs").mkdir(parents=True)
    for name in ("one", "two"):
        write_run(data, name, state="completed")
    with serving(data) as server:
        tab.goto(f"{server.url}/?tab=doctor")
        tab.locator("body.hp-open").wait_for()
        until(lambda: _selected(tab) == "Doctor", "the tab of the address is open")
        assert _query(tab) == {"tab": "doctor"}
        tab.get_by_role("tab", name="Other machines").click()
        until(lambda: _query(tab) == {"tab": "fleet"}, "the address names the tab")
        tab.reload()
        tab.locator("body.hp-open").wait_for()
        until(lambda: _selected(tab) == "Other machines", "a reload opens it again")
        tab.get_by_role("tab", name="Runs").click()
        until(lambda: set(_query(tab)) == {"run"}, "the address names the run")
        tab.goto(f"{server.url}/?run=one")
        tab.locator("body.hp-open").wait_for()
        until(lambda: _selected(tab) == "Runs" and _query(tab) == {"run": "one"}, "the run of the address is open")
        tab.locator(".hp-here[data-run='one']").wait_for()
        tab.locator("#run-list [data-run='two']").click()
        until(lambda: _query(tab) == {"run": "two"}, "the address follows the selection")
        tab.get_by_role("tab", name="New LoRA").click()
        until(lambda: _query(tab) == {}, "the first tab needs no address")
        tab.goto(f"{server.url}/?tab=%3Cscript%3E&run=..%2F..")
        tab.locator("body.hp-open").wait_for()
        until(lambda: _selected(tab) == "New LoRA", "what nobody knows opens the first tab")
