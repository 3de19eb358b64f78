"""The scripts and the style sheet of the page as files."""

import re
import urllib.request

from ui_page import PATIENCE_S


def test_the_scripts_and_the_style_sheet_are_files_that_a_browser_keeps(server):
    page = server.get("/")[1].decode()
    for pattern, kind in ((r"scripts/page-\w{16}\.js", "text/javascript"), (r"scripts/style-\w{16}\.css", "text/css")):
        (found,) = set(re.findall(pattern, page))
        request = urllib.request.Request(f"{server.url}/{found}", headers=server.headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            assert reply.headers["content-type"].startswith(kind) and "immutable" in reply.headers["cache-control"]
            assert len(reply.read()) > 10_000
    assert server.get("/scripts/page-0123456789abcdef.js")[0] == 404
