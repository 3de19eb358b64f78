"""The scripts and the style sheet of the page as files."""

import re

from ui_requests import ask


def test_the_scripts_and_the_style_sheet_are_files_that_a_browser_keeps(server):
    page = server.get("/")[1].decode()
    for pattern, kind in ((r"scripts/page-\w{16}\.js", "text/javascript"), (r"scripts/style-\w{16}\.css", "text/css")):
        (found,) = set(re.findall(pattern, page))
        status, headers, body = ask(server, "GET", f"/{found}")
        assert status == 200 and len(body) > 10_000
        assert headers["content-type"].startswith(kind) and "immutable" in headers["cache-control"]
    assert server.get("/scripts/page-0123456789abcdef.js")[0] == 404
