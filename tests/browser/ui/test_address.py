"""The page's address names what is open, so that a reload, a bookmark or a link from elsewhere opens it again."""

from urllib.parse import parse_qs, urlencode, urlsplit

from ui_helpers import write_run
from ui_page import a_tab, until


def test_a_tab_and_a_run_are_opened_by_their_address_and_named_in_it(tab, server):
    for name in ("address one", "address two"):
        write_run(server.data, name, state="completed")

    def is_open(selected: str, **query: str) -> None:
        """The tab that is open, and what the address says."""
        tab.locator("body.hp-open").wait_for()

        def now() -> tuple[str, dict[str, str]]:
            address = tab.evaluate("location.href")  # page.url is what Playwright knew at its last call
            found = {key: value[0] for key, value in parse_qs(urlsplit(address).query).items()}
            return tab.locator("[data-tab-id][aria-selected=true]").inner_text(), found

        until(lambda: now() == (selected, query), f"{selected} and {query}")

    tab.goto(f"{server.url}/?run=address-one")
    is_open("Runs", run="address-one")
    tab.locator(".hp-here[data-run='address-one']").wait_for()
    tab.locator("#run-list [data-run='address-two']").click()
    is_open("Runs", run="address-two")
    tab.get_by_role("tab", name="New LoRA").click()
    is_open("New LoRA")  # the first tab needs no address
    tab.get_by_role("tab", name="Other machines").click()
    is_open("Other machines", tab="fleet")
    tab.reload()
    is_open("Other machines", tab="fleet")
    hostile = {"tab": "<script>", "run": "../.."}
    tab.goto(f"{server.url}/?{urlencode(hostile)}")
    is_open("New LoRA", **hostile)  # what nobody knows opens the first tab


def test_a_tab_that_a_narrow_page_has_in_its_menu_is_named_in_the_address_and_read(browser, server):
    with a_tab(browser, width=390) as page:
        page.goto(f"{server.url}/?tab=fleet")
        page.locator("#fleet-stores .hp-empty, #fleet-stores section").first.wait_for()
        assert page.evaluate("location.search") == "?tab=fleet"
