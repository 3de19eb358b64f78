"""What other websites, other host names, wrong passwords and hostile files can do to the page: nothing.

Real servers, a real browser, and an attacker's page on another port of this machine: `127.0.0.1` is then another origin of
the same site, `localhost` another site.
"""

import contextlib
import http.client
import http.server
import json
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator

import psutil
import pytest
from ui_helpers import PROJECT, Server, free_port, give_cookie, photos, serving
from ui_page import PATIENCE_S, a_tab, until

AUTH = ("--auth", "me:a-long-secret")
SCRIPT = b"<!doctype html><title>page</title><script>document.title = 'ran'</script>"
SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg"><script>document.documentElement.setAttribute("ran", "1")</script></svg>'
)
PROBES = (
    "/",
    "/config",
    "/theme.css",
    "/login",
    "/gradio_api/info",
    "/assets/none.js",
    "/none",
    "/gradio_api/file=/etc/passwd",
)


@pytest.fixture(scope="module")
def listening(tmp_path_factory):
    """A server for other machines, behind a login."""
    with serving(tmp_path_factory.mktemp("listen") / "data", "--listen", *AUTH) as running:
        yield running


def ask(server: Server, method: str, path: str, body=None, source: str = "127.0.0.1", **headers: str):
    """(status, headers, body) of one request, with the token where there is no login; a header's `_` stands for `-`."""
    headers = {**server.headers, **headers}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S, source_address=(source, 0))
    try:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, path, body, named)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def log_in(server: Server, password: str = "a-long-secret", user: str = "me", **options):
    """(status, headers, cookie) of a login."""
    form = urllib.parse.urlencode({"username": user, "password": password})
    kind = {"Content_Type": "application/x-www-form-urlencoded"}
    status, headers, _ = ask(server, "POST", "/login", form, **kind, **options)
    return status, headers, "; ".join(one.split(";")[0] for one in headers.get_all("Set-Cookie") or [])


def upload(server: Server, name: str, content: bytes, **headers: str):
    """(status, body) of an upload as the page sends it."""
    line = f'Content-Disposition: form-data; name="files"; filename="{name}"'.encode()
    body = b"--x\r\n" + line + b"\r\nContent-Type: text/plain\r\n\r\n" + content + b"\r\n--x--\r\n"
    kind = {"Content_Type": "multipart/form-data; boundary=x"}
    status, _, reply = ask(server, "POST", "/gradio_api/upload", body, **kind, **headers)
    return status, reply


def uploads(server: Server) -> list[str]:
    """Names of the files in the folder for uploads."""
    folder = server.data / "datasets" / ".uploads"
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def attacker(html: str) -> Iterator[int]:
    """Another web server, with one page; its port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Page)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield running.server_port
    finally:
        running.shutdown()
        running.server_close()
        thread.join(PATIENCE_S)


@contextlib.contextmanager
def tab(browser) -> Iterator:
    """A tab that may go anywhere and may see errors: it belongs to an attack."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    try:
        yield page
    finally:
        context.close()


def give_login(page, server: Server) -> None:
    """Log the tab's browser in; where there is no login, give it the token's cookie."""
    give_cookie(page.context, server.url)
    form = {"username": "me", "password": "a-long-secret"}
    assert server.sends_token or page.context.request.post(f"{server.url}/login", form=form).ok
    assert page.context.request.get(f"{server.url}/config").ok


def test_an_uploaded_page_never_runs_its_script(listening, browser):
    with tab(browser) as page:
        give_login(page, listening)
        for name, content in (("evil.html", SCRIPT), ("evil.svg", SVG), ("evil.xhtml", SVG), ("evil.png", SCRIPT)):
            part = {"name": name, "mimeType": "text/plain", "buffer": content}
            reply = page.context.request.post(f"{listening.url}/gradio_api/upload", multipart={"files": part})
            assert reply.ok
            url = f"{listening.url}/gradio_api/file={urllib.parse.quote(reply.json()[0])}"
            page.goto(url)
            ran = page.evaluate("document.title === 'ran' || document.documentElement.hasAttribute('ran')")
            answer = page.context.request.get(url)
            assert not ran and answer.status == 404 and answer.headers["x-content-type-options"] == "nosniff", name


@pytest.mark.parametrize(
    "name, kind, shown",
    [
        ("a.png", "image/png", True),
        ("a.JPG", "image/jpeg", True),
        ("a.webp", "image/webp", True),
        ("a.gif", "image/gif", True),
        ("a.avif", "image/avif", True),
        ("a.txt", "text/plain; charset=utf-8", False),
        ("training.log", "text/plain; charset=utf-8", False),
        ("a.safetensors", "application/octet-stream", False),
    ],
)
def test_a_file_of_a_run_is_an_image_or_a_download(server, name, kind, shown):
    path = server.data / "outputs" / "kinds" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SCRIPT)
    status, headers, body = ask(server, "GET", f"/gradio_api/file={path}")
    assert (status, headers["Content-Type"], body) == (200, kind, SCRIPT)
    assert headers["Content-Disposition"].startswith("inline" if shown else "attachment")
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "name",
    [
        "a.html",
        "a.svg",
        "a.xml",
        "a.xhtml",
        "a.js",
        "a.pdf",
        "a.css",
        "a",
        "a.png.html",
        ".a.png",
        ".hidden/a.png",
        "a.pt",
    ],
)
def test_no_other_file_is_sent(server, name):
    path = server.data / "outputs" / "others" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SCRIPT)
    assert ask(server, "GET", f"/gradio_api/file={path}")[0] == 404


def test_files_are_found_only_by_their_own_path(server, tmp_path):
    photo = photos("chelsea.png")[0].read_bytes()
    draft = server.data / "datasets" / ".drafts" / ("a" * 24)
    thumb, state, waiting = (
        draft / "thumbs" / "1.jpg",
        draft / "draft.sqlite",
        server.data / "datasets" / ".uploads" / "x" / "1.png",
    )
    outside, link = tmp_path / "outside.png", server.data / "outputs" / "link.png"
    for path in (thumb, state, waiting, outside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo)
    link.symlink_to(outside)
    assert ask(server, "GET", f"/gradio_api/file={thumb}")[0] == 200
    refused = (
        state,
        waiting,
        outside,
        link,
        f"{server.data}/outputs/../../outside.png",
        f"{server.data}/datasets/.drafts/../.uploads/x/1.png",
        f"{server.data}/outputs/%2e%2e/datasets/.uploads/x/1.png",
        server.data / "outputs",
        "/etc/passwd",
        "http://127.0.0.1:1/a.png",
        "a%00.png",
        "",
        "x" * 5000,
    )
    for path in refused:
        assert ask(server, "GET", f"/gradio_api/file={path}")[0] == 404, path
    for path in (
        f"/gradio_api/file/{thumb}",
        f"/file={thumb}",
        "/gradio_api/proxy=http://127.0.0.1/",
        "/gradio_api//file=/x",
    ):
        assert ask(server, "GET", path)[0] == 404, path


def test_an_event_cannot_fetch_a_file_of_this_machine(server):
    config = json.loads(server.get("/config")[1])
    stolen = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    for number, event in enumerate(config["dependencies"][:12]):
        data = [stolen] * len(event["inputs"])
        body = json.dumps({"data": data, "fn_index": event["id"], "session_hash": f"thief{number}"})
        ask(server, "POST", "/gradio_api/queue/join", body, Content_Type="application/json")
        ask(server, "POST", "/gradio_api/run/predict", body, Content_Type="application/json")
        ask(server, "GET", f"/gradio_api/queue/data?session_hash=thief{number}")
    assert "passwd" not in uploads(server)


def test_every_answer_has_the_security_headers(server, listening):
    for one in (server, listening):
        for path in PROBES:
            _, headers, _ = ask(one, "GET", path)
            assert headers["X-Content-Type-Options"] == "nosniff", path
            assert headers["X-Frame-Options"] == "DENY" and headers["Referrer-Policy"] == "same-origin", path
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"], path
            assert headers["Server"] is None and headers["Access-Control-Allow-Origin"] is None, path
    policy = ask(server, "GET", "/")[1]["Content-Security-Policy"]
    for part in ("object-src 'none'", "base-uri 'self'", "form-action 'self'"):
        assert part in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def test_markup_in_the_page_runs_no_script(server, browser):
    with tab(browser) as page:
        page.goto(server.url)
        page.locator("body.hp-open").wait_for()
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


@pytest.mark.parametrize("mode", ["server", "listening"])
def test_the_page_cannot_be_framed(mode, request, browser):
    one = request.getfixturevalue(mode)
    with attacker(f'<iframe src="{one.url}/"></iframe>') as port, tab(browser) as page:
        give_cookie(page.context, one.url)
        page.goto(f"http://127.0.0.1:{port}/", wait_until="load")
        until(lambda: len(page.frames) == 2 and page.frames[1].url not in ("", "about:blank"), "the frame has loaded")
        assert page.frames[1].url.startswith("chrome-error:"), page.frames[1].url


ATTACK = """
<body><script>
const to = "%s";
const form = () => { const data = new FormData(); data.append("files", new File(["x"], "stolen.txt")); return data; };
const tries = [
  () => fetch(to + "/gradio_api/upload", { method: "POST", body: form(), credentials: "include" }),
  () => fetch(to + "/gradio_api/upload", { method: "POST", body: form(), credentials: "include", mode: "no-cors" }),
  () => fetch(to + "/gradio_api/upload", { method: "POST", body: form(), credentials: "include", headers: { "X-A": "1" } }),
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


@pytest.mark.parametrize("mode", ["server", "listening"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_another_origin_can_neither_read_nor_write(mode, host, request, browser):
    one = request.getfixturevalue(mode)
    picture = one.data / "outputs" / "private" / "sample.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(photos("chelsea.png")[0].read_bytes())
    before = uploads(one)
    with attacker(ATTACK % (one.url, picture)) as port, tab(browser) as page:
        give_login(page, one)
        page.goto(f"http://{host}:{port}/")
        page.wait_for_function("() => window.image")
        assert page.evaluate("window.read") == [] and page.evaluate("window.image") == "error"
        assert uploads(one) == before
        assert page.context.request.get(f"{one.url}/config").ok  # and nobody was logged out


@pytest.mark.parametrize("mode", ["server", "listening"])
def test_a_form_of_another_origin_is_refused(mode, request, browser):
    one = request.getfixturevalue(mode)
    html = f"""<form method="post" enctype="multipart/form-data" action="{one.url}/gradio_api/upload">
        <input type="file" name="files"><button>Win</button></form>"""
    before = uploads(one)
    with attacker(html) as port, tab(browser) as page:
        give_login(page, one)
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("input").set_input_files({"name": "stolen.txt", "mimeType": "text/plain", "buffer": b"x"})
        with page.expect_navigation() as answer:
            page.get_by_text("Win").click()
        assert answer.value.status == 403 and uploads(one) == before


def test_a_link_from_another_site_opens_the_page(server, browser):
    """Its cookie does not come with the link, only with the address that the first answer opens again."""
    with attacker(f'<a href="{server.url}/?tab=doctor">Hangproof</a>') as port, tab(browser) as page:
        give_cookie(page.context, server.url)
        page.goto(f"http://localhost:{port}/")
        page.get_by_text("Hangproof").click()
        page.locator("body.hp-open").wait_for()
        assert page.url == f"{server.url}/?tab=doctor"


@pytest.mark.parametrize("mode", ["server", "listening"])
def test_a_web_socket_of_another_origin_is_refused(mode, request, browser):
    one = request.getfixturevalue(mode)
    html = f"""<script>const socket = new WebSocket("ws://127.0.0.1:{one.port}/gradio_api/queue/join");
        socket.onopen = () => {{ window.end = "open"; }}; socket.onerror = () => {{ window.end ||= "refused"; }};</script>"""
    with attacker(html) as port, tab(browser) as page:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_function("() => window.end")
        assert page.evaluate("window.end") == "refused"
    host = f"127.0.0.1:{one.port}"
    handshake = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "x" * 22 + "==",
    }
    assert ask(one, "GET", "/", Host=host, Origin="http://evil.example", **handshake)[0] == 403


def raw(server: Server, *lines: str) -> int:
    """Status of a request that is written as it is."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall("\r\n".join((*lines, "Connection: close", "", "")).encode())
        reply = connection.makefile("rb").readline()
    return int(reply.split()[1])


@pytest.mark.parametrize("mode", ["server", "listening"])
def test_a_foreign_host_name_is_refused(mode, request):
    one = request.getfixturevalue(mode)
    for path in ("/", "/config", "/login", "/gradio_api/heartbeat/a", f"http://127.0.0.1:{one.port}/config"):
        for host in (
            "evil.example",
            f"evil.example:{one.port}",
            f"127.0.0.1.evil.example:{one.port}",
            "203.0.113.7",
            "",
            "a@127.0.0.1",
        ):
            assert raw(one, f"GET {path} HTTP/1.1", f"Host: {host}") in (400, 403), (path, host)
    assert raw(one, "GET /login HTTP/1.1", f"Host: 127.0.0.1:{one.port}", "Host: evil.example") in (400, 403)
    body = ask(one, "GET", "/", Host="evil.example")[2].decode()
    assert "--allow-host evil.example" in body if mode == "listening" else f"http://127.0.0.1:{one.port}" in body


def test_the_names_of_this_machine_and_of_the_proxy_are_accepted(tmp_path):
    flags = ("--listen", *AUTH, "--allow-host", "train.example.org", "--allow-host", "*.proxy.runpod.net")
    with serving(tmp_path / "data", *flags, HANGPROOF_ALLOWED_HOSTS="other.example.org, third.example.org") as one:
        addresses = {a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET}
        names = {
            "localhost",
            socket.gethostname(),
            *addresses,
            "train.example.org",
            "other.example.org",
            "third.example.org",
        }
        for name in (*names, "abc-7860.proxy.runpod.net", "TRAIN.example.org"):
            for host in (name, f"{name}:{one.port}"):
                assert ask(one, "GET", "/login", Host=host)[0] == 200, host
                assert ask(one, "GET", "/login", Host=host, Origin=f"https://{host}")[0] == 200, host
                assert ask(one, "GET", "/login", Host=host, Origin="https://evil.example")[0] == 403, host
        for host in ("proxy.runpod.net", "example.org", "a.train.example.org", "proxy.runpod.net.evil.example"):
            assert ask(one, "GET", "/login", Host=host)[0] == 403, host
        # Another tenant of the proxy is the same site, but not the same origin.
        mine, other = "mine-7860.proxy.runpod.net", "other-7860.proxy.runpod.net"
        _, _, cookie = log_in(one)
        assert ask(one, "GET", "/config", Host=mine, Cookie=cookie)[0] == 200
        assert upload(one, "a.txt", b"x", Host=mine, Origin=f"https://{mine}", Cookie=cookie)[0] == 200
        assert upload(one, "b.txt", b"x", Host=mine, Origin=f"https://{other}", Cookie=cookie)[0] == 403


def test_the_cookie_is_for_this_site_only(listening):
    status, headers, _ = log_in(listening)
    (cookie,) = headers.get_all("Set-Cookie")
    parts = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert status == 303 and {"httponly", "samesite=strict", "path=/"} <= parts and "secure" not in parts
    _, headers, _ = log_in(listening, X_Forwarded_Proto="https")
    assert "; Secure" in headers.get_all("Set-Cookie")[0]


def test_wrong_passwords_slow_down(tmp_path):
    with serving(tmp_path / "data", *AUTH) as one:
        first = [log_in(one, password=f"guess {n}") for n in range(30)]
        statuses = [status for status, _, _ in first]
        assert statuses[:4] == [401] * 4 and statuses.count(401) < 10 and set(statuses) == {401, 429}
        waits = [int(headers["Retry-After"]) for status, headers, _ in first if status == 429]
        assert min(waits) >= 1
        if statuses[-1] == 429:
            assert log_in(one)[0] in (429, 303)  # the right password waits too
        assert log_in(one, source="127.0.0.2")[0] == 303  # another address does not
        until(lambda: log_in(one)[0] == 303, "the right password is accepted after the wait", 30)
        assert "a-long-secret" not in one.log.read_text() and "guess" not in one.log.read_text()


def test_many_guesses_at_the_same_time_are_counted(tmp_path):
    with serving(tmp_path / "data", *AUTH) as one:
        results = []
        threads = [
            threading.Thread(target=lambda n=n: results.append(log_in(one, password=f"{n}")[0])) for n in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(results) == 40 and results.count(401) <= 10 and results.count(429) >= 30, results


def test_the_api_is_not_described(server, listening):
    _, _, cookie = log_in(listening)
    for path in (
        "/openapi.json",
        "/docs",
        "/redoc",
        "/gradio_api/openapi.json",
        "/monitoring",
        "/gradio_api/mcp/",
        "/token",
    ):
        assert ask(server, "GET", path)[0] == 404, path
        assert ask(listening, "GET", path)[0] in (401, 404), path
        assert ask(listening, "GET", path, Cookie=cookie)[0] == 404, path
    assert ask(server, "POST", "/logout")[0] == 404 == ask(server, "POST", "/api/login")[0]  # there is no login


def test_nothing_is_sent_without_a_login(listening):
    page = listening.data / "outputs" / "x.txt"
    page.write_text("hidden")
    for path in ("/config", "/theme.css", "/assets/x.js", "/static/x", f"/gradio_api/file={page}", "/gradio_api/info"):
        for cookie in ("", f"hangproof-{listening.port}=wrong", f"hangproof-{listening.port}="):
            assert ask(listening, "GET", path, Cookie=cookie)[0] == 401, path
    for path in (
        "/gradio_api/upload",
        "/gradio_api/queue/join",
        "/gradio_api/component_server",
        "/gradio_api/run/predict",
        "/logout",
    ):
        assert ask(listening, "POST", path, "{}")[0] == 401, path
    status, headers, _ = ask(listening, "GET", "/?run=mine")
    assert status == 303 and headers["Location"] == "login?next=run%3Dmine"


def test_the_login_page(listening, browser):
    """By keyboard, on a small screen, with what a password manager needs and nothing from Gradio."""
    with a_tab(browser, width=390, height=800) as page:
        seen = []
        page.on("response", lambda reply: seen.append(reply.url))
        page.goto(f"{listening.url}/?run=mine")
        assert [urllib.parse.urlsplit(url).path for url in seen] == ["/", "/login"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        user, password = page.get_by_label("User name"), page.get_by_label("Password")
        assert user.get_attribute("autocomplete") == "username"
        assert (
            password.get_attribute("autocomplete") == "current-password"
            and password.get_attribute("type") == "password"
        )
        page.keyboard.type("me")  # the first field has the focus
        page.keyboard.press("Tab")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("Wrong user name or password. Try again.").wait_for()
        assert user.input_value() == "me" and password.input_value() == ""
        page.keyboard.type("a-long-secret")
        with page.expect_navigation(url=re.compile(r"/\?run=mine$")):
            page.keyboard.press("Enter")
        page.locator("body.hp-open").wait_for()


@pytest.mark.parametrize(
    "where", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)", "x\r\nA: b"]
)
def test_the_login_leads_to_no_other_site(listening, where):
    form = urllib.parse.urlencode({"username": "me", "password": "a-long-secret", "next": where})
    kind = {"Content_Type": "application/x-www-form-urlencoded"}
    status, headers, _ = ask(listening, "POST", "/login", form, **kind)
    location = urllib.parse.urlsplit(headers["Location"])
    assert status == 303 and headers["A"] is None
    assert (location.scheme, location.netloc, location.path) == ("", "", "./")


def test_logging_out(listening, browser):
    with a_tab(browser) as page:
        give_login(page, listening)
        page.goto(listening.url)
        page.locator("body.hp-open").wait_for()
        cookie = "; ".join(f"{one['name']}={one['value']}" for one in page.context.cookies())
        assert ask(listening, "GET", "/config", Cookie=cookie)[0] == 200
        page.get_by_role("button", name="Log out").click()
        page.get_by_text("You are logged out.").wait_for()
        assert page.context.cookies() == []
        assert ask(listening, "GET", "/config", Cookie=cookie)[0] == 401  # the old cookie is worth nothing
        page.goto(listening.url)
        assert page.url.endswith("/login")
    assert ask(listening, "GET", "/logout", Cookie=log_in(listening)[2])[0] == 405  # an image cannot log out


def test_a_login_survives_a_restart_until_the_password_changes(tmp_path):
    with serving(tmp_path / "data", *AUTH) as one:
        _, _, cookie = log_in(one)
        kept = [path for path in one.data.rglob(".*") if path.is_file()]
        assert kept and not any(
            b"secret" in path.read_bytes() or cookie.split("=")[1].encode() in path.read_bytes() for path in kept
        )
        assert os.name == "nt" or all(path.stat().st_mode & 0o077 == 0 for path in kept)
    with serving(tmp_path / "data", *AUTH, port=one.port) as two:
        assert ask(two, "GET", "/config", Cookie=cookie)[0] == 200
    with serving(tmp_path / "data", "--auth", "me:another", port=one.port) as three:
        assert ask(three, "GET", "/config", Cookie=cookie)[0] == 401


def test_the_password_can_be_kept_off_the_command_line(tmp_path):
    file = tmp_path / "login"
    file.write_text("me:from-file\n")
    file.chmod(0o600)
    with serving(tmp_path / "a", "--auth-file", str(file)) as one:
        assert log_in(one, "from-file")[0] == 303
        assert all("from-file" not in word for word in psutil.Process(one.process.pid).cmdline())
    with serving(tmp_path / "b", HANGPROOF_AUTH="me:from:variable") as one:
        assert log_in(one, "from:variable")[0] == 303
        assert log_in(one, "from")[0] == 401


def chunked(server: Server, path: str, megabytes: int, **headers: str) -> int:
    """Status of a body that is sent in chunks without a length; the server may answer before its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        headers = {**server.headers, **headers}
        parts = (b"x" * 1_000_000 for _ in range(megabytes))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(
                "POST", path, parts, {k.replace("_", "-"): v for k, v in headers.items()}, encode_chunked=True
            )
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_body_that_is_too_large_is_refused(server):
    kind = {"Content_Type": "multipart/form-data; boundary=x"}
    for path, size in (("/gradio_api/upload", 2_100_000_000), ("/gradio_api/queue/join", 50_000_000)):
        status, _, body = ask(server, "POST", path, b"", Content_Length=str(size), **kind)
        assert status == 413 and b"MB" in body, path
    began = psutil.Process(server.process.pid).memory_info().rss
    for path in ("/gradio_api/queue/join", "/gradio_api/component_server"):
        json_kind = {"Transfer_Encoding": "chunked", "Content_Type": "application/json"}
        assert chunked(server, path, 60, **json_kind) == 413, path
    assert psutil.Process(server.process.pid).memory_info().rss - began < 150e6
    assert server.get("/")[0] == 200


def test_a_large_download_streams(server):
    path = server.data / "outputs" / "large" / "lora.safetensors"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(200_000_000)
        file.seek(100)
        file.write(b"middle")
    process = psutil.Process(server.process.pid)
    server.get("/")
    began, most, received = process.memory_info().rss, 0, 0
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("GET", f"/gradio_api/file={path}", headers=server.headers)
    reply = connection.getresponse()
    assert reply.status == 200 and reply.headers["Content-Length"] == "200000000"
    assert reply.headers["Content-Disposition"] == 'attachment; filename="lora.safetensors"'
    while block := reply.read(4_000_000):
        received += len(block)
        most = max(most, process.memory_info().rss - began)
    connection.close()
    assert received == 200_000_000 and most < 60e6, most
    status, headers, body = ask(server, "GET", f"/gradio_api/file={path}", Range="bytes=100-105")
    assert (status, body, headers["Content-Range"]) == (206, b"middle", "bytes 100-105/200000000")
    status, headers, body = ask(server, "GET", f"/gradio_api/file={path}", If_None_Match=headers["ETag"])
    assert (status, body) == (304, b"") and headers["X-Content-Type-Options"] == "nosniff"


def test_events_arrive_at_once(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("GET", "/gradio_api/heartbeat/abc", headers=server.headers)
    reply = connection.getresponse()
    began = time.monotonic()
    assert reply.status == 200 and b"ALIVE" in reply.readline() and time.monotonic() - began < 5
    connection.close()


def test_the_readme_says_how_to_listen():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    for name in ("--listen", "--allow-host", "--auth-file", "HANGPROOF_AUTH", "HANGPROOF_ALLOWED_HOSTS"):
        assert name in text
