"""Files of the page that do not arrive, and a connection that breaks between two answers."""

import re

from ui_page import a_tab, open_page


def test_a_page_whose_files_do_not_arrive_loads_again(browser, server):
    with a_tab(browser) as page:
        refused = []

        def refuse(route):
            kind = route.request.url.rpartition(".")[2]
            if refused.count(kind) < 3:  # of several loads of the page
                refused.append(kind)
                route.abort("failed")
            else:
                route.continue_()

        page.route(re.compile(r"/assets/[^/]*\.css$|/scripts/page-[^/]*\.js$"), refuse)
        open_page(page, server)
        assert sorted(refused) == ["css"] * 3 + ["js"] * 3
        page.locator("#start").click()  # it works
        page.locator(".hp-problem").first.wait_for()
        page.errors.clear()  # of the files that did not arrive
