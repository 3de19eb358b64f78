"""What other websites can do to the page: nothing. What a browser sees of the token and of the login.

Real servers, a real browser, and an attacker's page on another port of this machine: `127.0.0.1` is then another origin
of the same site, `localhost` another site.
"""

import contextlib
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from loopback import answering
from ui_helpers import PROJECT, Server, free_port, give_cookie, photos, serving, write_run
from ui_page import PATIENCE_S, a_tab, has_focus, press, until
from ui_requests import PASSWORD, ask, files_with, uploads


@pytest.fixture(scope="module")
def listening(tmp_path_factory):
    """A server for other machines, behind a login."""
    with serving(tmp_path_factory.mktemp("listen") / "data", "--listen", "--auth", f"me:{PASSWORD}") as running:
        yield running


@pytest.fixture(params=["server", "listening"])
def mode(request) -> Server:
    """A server with the token, and one with a login."""
    return request.getfixturevalue(request.param)


@contextlib.contextmanager
def attacker(pages: dict[str, str]):
    """Another web server with these pages; its port."""
    with answering(lambda request: (200, pages.get(request.path, ""), {"Content-Type": "text/html"})) as server:
        yield server.server_port


@contextlib.contextmanager
def free_tab(browser):
    """A tab that may go anywhere and may see errors, as an attack needs, and that has no cookie."""
    with contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        yield page


def give_login(page, server: Server) -> None:
    """Log the tab's browser in; where there is no login, give it the token's cookie."""
    give_cookie(page.context, server.url)
    form = {"username": "me", "password": PASSWORD}
    assert server.sends_token or page.context.request.post(f"{server.url}/login", form=form).ok
    assert page.context.request.get(f"{server.url}/config").ok


ATTACK = """
<body><script>
const to = "%s";
const form = () => { const data = new FormData(); data.append("files", new File(["x"], "stolen.txt")); return data; };
const tries = [
  ...[{}, { mode: "no-cors" }, { headers: { "X-A": "1" } }].map((more) => () =>
    fetch(to + "/gradio_api/upload", { method: "POST", body: form(), credentials: "include", ...more })),
  () => fetch(to + "/config", { credentials: "include" }),
  () => fetch(to + "/logout", { method: "POST", credentials: "include", mode: "no-cors" }),
  () => fetch(to + "/logout", { credentials: "include", mode: "no-cors" }),
];
(async () => {
  window.read = [];
  for (const one of tries) {
    try { const answer = await one(); if (answer.ok) window.read.push(await answer.text()); } catch (error) { }
  }
  const image = new Image();
  image.onload = image.onerror = (event) => { window.image = event.type; };
  image.src = to + "/gradio_api/file=%s";
})();
</script></body>"""


FORM = """<form method="post" enctype="multipart/form-data" action="%s/gradio_api/upload">
<input type="file" name="files"><button>Win</button></form>
<script>const socket = new WebSocket("ws://127.0.0.1:%s/gradio_api/queue/join");
socket.onopen = () => { window.end = "open"; }; socket.onerror = () => { window.end ||= "refused"; };</script>"""


def test_another_origin_can_neither_frame_nor_read_nor_write_the_page(mode, browser):
    picture = mode.data / "outputs" / "private" / "sample.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(photos("chelsea.png")[0].read_bytes())
    before = uploads(mode)
    pages = {"/frame": f'<iframe src="{mode.url}/"></iframe>', "/attack": ATTACK % (mode.url, picture)}
    pages["/form"] = FORM % (mode.url, mode.port)
    with attacker(pages) as port, free_tab(browser) as page:
        give_login(page, mode)
        page.goto(f"http://127.0.0.1:{port}/frame", wait_until="load")
        until(lambda: len(page.frames) == 2 and page.frames[1].url not in ("", "about:blank"), "the frame has loaded")
        assert page.frames[1].url.startswith("chrome-error:"), page.frames[1].url
        for host in ("127.0.0.1", "localhost"):  # another origin of the same site, and another site
            page.goto(f"http://{host}:{port}/attack")
            page.wait_for_function("() => window.image")
            assert page.evaluate("window.read") == [] and page.evaluate("window.image") == "error", host
            assert uploads(mode) == before, host
            assert page.context.request.get(f"{mode.url}/config").ok, "nobody was logged out"
        page.goto(f"http://127.0.0.1:{port}/form")
        page.wait_for_function("() => window.end")
        assert page.evaluate("window.end") == "refused", "a web socket"
        page.locator("input").set_input_files({"name": "stolen.txt", "mimeType": "text/plain", "buffer": b"x"})
        with page.expect_navigation() as answer:
            page.get_by_text("Win").click()
        assert answer.value.status == 403 and uploads(mode) == before, "a form"


def test_a_link_from_another_site_opens_the_page_and_markup_in_it_runs_no_script(server, browser):
    """The cookie does not come with the link, only with the address that the first answer opens again."""
    link = f'<a href="{server.url}/?tab=doctor">Hangproof</a>'
    with attacker({"/": link}) as port, free_tab(browser) as page:
        give_cookie(page.context, server.url)
        page.goto(f"http://localhost:{port}/")
        press(page.get_by_text("Hangproof"), page.locator("body.hp-open"))
        assert page.url == f"{server.url}/?tab=doctor"
        page.evaluate("""() => {
            const box = document.createElement("div");
            box.innerHTML = "<img src='data:,' onerror='window.ran = 1'><a href='javascript:window.ran = 1'>x</a>";
            document.body.append(box);
            box.querySelector("a").click();
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.body.append(script);
        }""")
        page.wait_for_function("() => document.querySelector('img[src=\"data:,\"]').complete")
        assert page.evaluate("window.ran") is None


def test_logging_in_and_out(listening, browser):
    """By keyboard, on a small screen, with what a password manager needs and nothing from Gradio."""
    with a_tab(browser, width=390, height=800) as page:
        seen = []
        page.on("response", lambda reply: seen.append(reply.url))
        page.goto(f"{listening.url}/?run=mine")
        assert [urllib.parse.urlsplit(url).path for url in seen] == ["/", "/login"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        user, password = page.get_by_label("User name"), page.get_by_label("Password")
        autocomplete = [one.get_attribute("autocomplete") for one in (user, password)]
        assert autocomplete == ["username", "current-password"]
        has_focus(page, "name", "username")  # the first field
        page.keyboard.type("me")
        page.keyboard.press("Tab")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("Wrong user name or password. Try again.").wait_for()
        assert user.input_value() == "me" and password.input_value() == ""
        has_focus(page, "type", "password")
        page.keyboard.type("a-long-secret")
        with page.expect_navigation(url=re.compile(r"/\?run=mine$")):
            page.keyboard.press("Enter")
        page.locator("body.hp-open").wait_for()
        cookie = "; ".join(f"{one['name']}={one['value']}" for one in page.context.cookies())
        assert ask(listening, "GET", "/config", Cookie=cookie)[0] == 200
        press(page.get_by_role("button", name="Log out"), page.get_by_text("You are logged out."))
        assert page.context.cookies() == []
        assert ask(listening, "GET", "/config", Cookie=cookie)[0] == 401  # the old cookie is worth nothing
        page.goto(listening.url)
        assert page.url.endswith("/login")


def test_the_token_is_in_no_page_no_log_and_no_file_but_its_own(server, browser):
    write_run(server.data, "mine", "completed")
    with free_tab(browser) as page:
        page.goto(f"{server.url}/?run=mine&token={server.token}")
        page.locator("body.hp-open").wait_for()
        assert page.url == f"{server.url}/?run=mine" and server.token not in page.content()
        assert server.token not in page.evaluate("document.cookie + JSON.stringify(localStorage) + document.referrer")
    for path in ("/", "/config", "/api/", "/api/config", "/login"):
        assert server.token not in ask(server, "GET", path)[2].decode()
        assert server.token not in ask(server, "GET", path, Authorization="", Accept="text/html")[2].decode()
    assert files_with(server.token, server.data.parent) == ["token"]


def test_any_address_shows_where_the_token_is_and_takes_it(server, browser):
    with free_tab(browser) as page:
        for address in ("/none", "/gradio_api/file=/a%2Fb", "/scripts/x/y", "/?tab=doctor"):
            with page.expect_navigation():  # without the cookie of the tests
                page.evaluate("(url) => { location.href = url; }", f"{server.url}{address}")
            page.get_by_label("Token").wait_for()
        page.get_by_text("$XDG_CONFIG_HOME/hangproof/token").wait_for()
        assert page.get_by_text("address that Hangproof printed").is_visible()
        has_focus(page, "name", "token")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("This is not the token.").wait_for()
        page.get_by_label("Token").fill(f"  {server.url}/?token={server.token} ")  # the whole line from the terminal
        press(page.get_by_role("button", name="Open Hangproof"), page.locator("body.hp-open"))
        assert page.url == f"{server.url}/?tab=doctor"
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.context.clear_cookies()
        page.evaluate("hangproof.keep('test', 'x', 'y')")
        page.get_by_text("Your login has ended", exact=True).wait_for()


def test_the_printed_and_the_opened_address_open_the_page(tmp_path, browser):
    """The browser's arguments show no token: other users can list them."""
    seen, port = tmp_path / "seen", free_port()
    opener = tmp_path / "browser"
    opener.write_text(f'#!/bin/sh\necho "$1" > {seen}.new && mv {seen}.new {seen}\n')
    opener.chmod(0o755)
    env = {**os.environ, "HANGPROOF_DATA": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    env["BROWSER"] = f"{opener} %s"
    killed = tmp_path / "data" / "datasets" / ".open-killed.html"  # has the token
    killed.parent.mkdir(parents=True)
    killed.touch()
    command = [sys.executable, "app.py", "--port", str(port)]
    process = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        secret = (tmp_path / "config" / "hangproof" / "token").read_text()
        printed = f"http://127.0.0.1:{port}/?token={secret}"
        assert line == f"Hangproof is running at {printed}\n"
        until(seen.exists, "the browser is started")
        opened = seen.read_text().strip()
        assert opened.startswith("file:///") and secret not in opened
        assert Path(opened.removeprefix("file://")).stat().st_mode & 0o077 == 0
        for address in (printed, opened):
            with free_tab(browser) as page:
                page.goto(address)
                page.locator("body.hp-open").wait_for()
                assert page.url == f"http://127.0.0.1:{port}/"
                page.go_back()
                assert secret not in page.url
        process.stdout.close()  # as by Ctrl-C, where `| tee` reads it
        process.terminate()
        assert process.wait(PATIENCE_S) == 0 and not list((tmp_path / "data").rglob("*.html"))
    finally:
        process.kill()
        process.wait()
