"""The token: nothing answers without it, no other user of this machine gets it, and its own account notices little of it."""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from ui_helpers import PROJECT, Server, free_port, serving, write_run
from ui_page import PATIENCE_S, open_page, until

import app
from runs.files import RunError
from tests.network.ui.test_app import refused
from tests.network.ui.test_security import ask
from ui import security, token
from ui.api.server import CLIENT

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


# ---- every route ----


def routes(application, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    """(path with its parameters filled in, methods) of every route of an application and of those mounted in it."""
    for route in getattr(application, "routes", None) or []:
        path = re.sub(r"\{[^}]*\}", "x", prefix + getattr(route, "path", ""))
        yield path or "/", set(getattr(route, "methods", None) or METHODS)
        if not getattr(route, "endpoint", None):
            yield f"{path}/x", set(METHODS)  # what a mounted application without routes serves
        yield from routes(getattr(route, "app", None) if not getattr(route, "endpoint", None) else None, path)
        yield from routes(getattr(route, "original_router", None), path)


@pytest.fixture(scope="module")
def every_route(tmp_path_factory) -> dict[str, set[str]]:
    """The routes of the application as `python app.py --mcp` builds it: Gradio's two applications and our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANGPROOF_DATA", str(tmp_path_factory.mktemp("routes")))
        guard = app.build(app.parser().parse_args(["--mcp"]), None, "x" * 43)
        on_demand = guard.app
        found: dict[str, set[str]] = {}
        for one in (on_demand.app.app, on_demand.make()):
            for path, methods in routes(one):
                found.setdefault(path, set()).update(methods)
    for path in (*security.ROUTES, security.MCP):  # our own answers are no routes of Gradio's
        found.setdefault(path.replace("*", "x"), set()).update(security.methods_of(path.replace("*", "x"), True))
    nothing = ("/none", "//", "/api/none", "/login/x", "/gradio_api/mcp/", "/%2e%2e/x")
    return {**{path: set(METHODS) for path in nothing}, **found}


def test_no_route_answers_without_the_token_and_each_does_with_it(every_route, tmp_path):
    """The routes come from the application itself, so a new one cannot be forgotten."""
    assert {"/config", "/gradio_api/component_server", "/gradio_api/upload", "/api/config", "/healthz"} <= {
        *every_route
    }
    assert any("/api/gradio_api/mcp" in path for path in every_route) and len(every_route) > 120
    with serving(tmp_path / "data", "--mcp") as server:
        wrong = {"Authorization": f"Bearer {'x' * 43}", "Cookie": f"hangproof-{server.port}={'0' * 64}"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
            for path, methods in sorted(every_route.items()):
                for method in {*METHODS} | methods:
                    for where, headers in ((path, {}), (f"{path}?token={'x' * 43}", wrong)):
                        connection.request(method, where, headers=headers)
                        reply = connection.getresponse()
                        reply.read()
                        assert reply.status == 401, (method, where)
        for path, methods in sorted(every_route.items()):
            for method in methods - {"TRACE", "PROPFIND"}:
                assert status(server, method, path, **server.headers) != 401, (method, path)


def status(server: Server, method: str, path: str, **headers: str) -> int:
    """The status of a request; some answers have no end."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status


def test_a_script_cannot_be_changed_without_the_token(server):
    """What another user of the machine did: a program sends no Origin, so no website was needed."""
    body = json.dumps({"data": ["x"], "component_id": 1, "fn_name": "save", "session_hash": "x"})
    kind = {"Content-Type": "application/json"}
    for path in ("/gradio_api/component_server", "/gradio_api/component_server/"):
        assert status(server, "POST", path, **kind) == 401
        assert ask(server, "POST", path, body, Content_Type="application/json")[0] != 401
        assert ask(server, "POST", path, body, Authorization="", Content_Type="application/json")[0] == 401


def test_a_request_may_carry_the_token_in_three_ways_and_only_from_this_page(server):
    cookie = f"hangproof-{server.port}={server.cookie()['value']}"
    for headers, query in (
        ({"Authorization": f"Bearer {server.token}"}, ""),
        ({"Authorization": f"bearer  {server.token}"}, ""),
        ({"Cookie": cookie}, ""),
        ({}, f"?token={server.token}"),
    ):
        assert status(server, "GET", f"/config{query}", **headers) == 200, headers
        assert status(server, "POST", f"/gradio_api/queue/join{query}", **headers) == 422, headers
        for foreign in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert status(server, "GET", f"/config{query}", **headers, **foreign) == 403
    for wrong in (server.token[:-1], server.token + "x", server.token.upper(), "", "x" * 10_000):
        assert status(server, "GET", f"/config?token={wrong}") == 401
        assert status(server, "GET", "/config", Authorization=f"Bearer {wrong}") == 401
    assert status(server, "GET", "/config", Authorization=f"Basic {server.token}") == 401
    assert status(server, "GET", "/config", Cookie=f"hangproof-{server.port}={server.token}") == 401


def test_the_first_address_gives_a_cookie_and_loses_its_token(server):
    for path, location in (
        (f"/?token={server.token}", "./"),
        (f"/?run=a%20b&token={server.token}&tab=", "./?run=a+b&tab="),
        (f"/api/?token={server.token}", "./"),
    ):
        status_, headers, body = ask(server, "GET", path, Authorization="")
        assert (status_, headers["Location"], body) == (303, location, b"")
        (morsel,) = SimpleCookie(headers["Set-Cookie"]).values()
        assert morsel.key == f"hangproof-{server.port}" and morsel.value != server.token  # other ports get cookies too
        assert morsel["httponly"] and morsel["samesite"].lower() == "strict" and morsel["path"] == "/"
        assert int(morsel["max-age"]) > 24 * 3600 and not morsel["secure"]
        assert headers["Referrer-Policy"] == "same-origin" and headers["Cache-Control"] == "no-store"
        assert status(server, "GET", "/config", Cookie=f"{morsel.key}={morsel.value}") == 200
    secure = ask(server, "GET", f"/?token={server.token}", Authorization="", X_Forwarded_Proto="https")[1]["Set-Cookie"]
    assert "; Secure" in secure
    deep = f"/gradio_api/file=/a%2Fb.png?token={server.token}"
    assert ask(server, "GET", deep, Authorization="", Sec_Fetch_Mode="navigate")[1]["Location"] == "./a%2Fb.png"
    assert ask(server, "GET", deep, Authorization="")[0] == 404  # a program's request is not redirected


def test_a_restart_keeps_the_token_and_each_port_has_a_cookie_of_its_own(tmp_path):
    with serving(tmp_path / "data") as one:
        first = one.token
        with serving(tmp_path / "other") as two:  # the same account, another data folder
            assert two.token == first and two.cookie()["name"] != one.cookie()["name"]
    with serving(tmp_path / "data", port=one.port) as again:
        assert again.token == first
        assert status(again, "GET", "/config", Authorization=f"Bearer {first}") == 200
        (again.config / "hangproof" / "token").unlink()
    with serving(tmp_path / "data", port=one.port) as new:
        assert new.token != first and status(new, "GET", "/config", Authorization=f"Bearer {first}") == 401


# ---- the file ----


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("APPDATA" if os.name == "nt" else "XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "hangproof" / "token"


def test_the_token_is_made_once_and_is_its_accounts_alone(config):
    old = os.umask(0)
    try:
        code = "from ui import token; print(token.load())"
        with ThreadPoolExecutor(8) as pool:  # servers that start at the same time
            start = [sys.executable, "-c", code]
            made = list(pool.map(lambda _: subprocess.check_output(start, cwd=PROJECT, text=True).strip(), range(8)))
    finally:
        os.umask(old)
    assert set(made) == {config.read_text()} == {token.load()} and token.TOKEN.fullmatch(made[0])
    assert os.name == "nt" or (config.stat().st_mode & 0o777, config.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_file_that_others_can_read_or_that_is_no_token_is_refused(config, monkeypatch, tmp_path):
    monkeypatch.setattr(token, "WRITTEN_S", 0.05)
    first = token.load()
    config.chmod(0o640)
    with pytest.raises(RunError, match="other users can read the token; delete the file"):
        token.load()
    config.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(config, 65534, -1)
        with pytest.raises(RunError, match="other users can read"):
            token.load()
        os.chown(config, 0, -1)
    assert token.load() == first
    for text in ("", "short", first + "x", "ü" * 43):
        config.write_text(text, encoding="utf-8")
        with pytest.raises(RunError, match=re.escape(str(config))) as caught:
            token.load()
        assert first not in str(caught.value)
    message = refused(data=tmp_path / "data", XDG_CONFIG_HOME=str(config.parent.parent))
    assert "is not a token; delete the file" in message
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    with pytest.raises(RunError, match="XDG_CONFIG_HOME"):
        token.load()


def test_another_user_of_the_machine_gets_neither_the_token_nor_an_answer():
    """Everything on the way to the file is open, as in a home folder that others may list."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("curl") is None:
        pytest.skip("only root can become another user, who needs curl")
    home = Path(tempfile.mkdtemp())
    try:
        (home / "config" / "hangproof").mkdir(parents=True)
        for folder in (home, home / "config", home / "config" / "hangproof"):
            folder.chmod(0o755)
        with serving(home / "data") as server:

            def nobody(*command: str) -> subprocess.CompletedProcess:
                return subprocess.run(
                    command, user="nobody", group=65534, extra_groups=[], capture_output=True, text=True
                )

            file = str(home / "config" / "hangproof" / "token")
            assert nobody("ls", file).returncode == 0 and nobody("cat", file).returncode != 0
            answer = nobody(
                "curl", "-s", "-X", "POST", "-w", "%{http_code}", f"{server.url}/gradio_api/component_server"
            )
            assert answer.stdout.endswith("401") and server.token not in answer.stdout
            shown = nobody("sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null").stdout
            assert str(server.port) in shown and server.token not in shown
    finally:
        shutil.rmtree(home)


def test_the_token_is_in_no_page_no_log_and_no_file_but_its_own(tmp_path, browser):
    with serving(tmp_path / "data") as server:
        write_run(server.data, "mine", "completed")
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{server.url}/?run=mine&token={server.token}")
        page.locator("body.hp-open").wait_for()
        assert page.url == f"{server.url}/?run=mine" and server.token not in page.content()
        assert server.token not in page.evaluate("document.cookie + JSON.stringify(localStorage) + document.referrer")
        context.close()
        for path in ("/", "/config", "/api/", "/api/config", "/login"):
            assert server.token not in ask(server, "GET", path)[2].decode()
            assert server.token not in ask(server, "GET", path, Authorization="", Accept="text/html")[2].decode()
        holders = [
            path for path in tmp_path.rglob("*") if path.is_file() and server.token.encode() in path.read_bytes()
        ]
        assert holders == [server.config / "hangproof" / "token"]


# ---- people and programs ----


def test_a_bare_address_shows_where_the_token_is_and_takes_it(server, browser):
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.evaluate("(url) => { location.href = url; }", f"{server.url}/?tab=doctor")  # without the cookie of the tests
    page.get_by_text(".config/hangproof/token").wait_for()
    assert page.get_by_text("address that Hangproof printed").is_visible()
    page.keyboard.type("wrong")  # the field has the focus
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("This is not the token.").wait_for()
    page.get_by_label("Token").fill(f"  {server.url}/?token={server.token} ")  # the whole line from the terminal
    page.get_by_role("button", name="Open Hangproof").click()
    page.locator("body.hp-open").wait_for()
    assert page.url == f"{server.url}/?tab=doctor"
    page.reload()
    page.locator("body.hp-open").wait_for()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    context.close()


@pytest.mark.parametrize("deep", ["/none", "/gradio_api/file=/a%2Fb", "/scripts/x/y"])
def test_any_address_shows_a_browser_that_page(server, browser, deep):
    context = browser.new_context()
    page = context.new_page()
    page.evaluate("(url) => { location.href = url; }", server.url + deep)
    page.get_by_label("Token").fill(server.token)
    page.get_by_role("button", name="Open Hangproof").click()
    page.locator("body.hp-open").wait_for()
    context.close()


def test_the_printed_and_the_opened_address_open_the_page(tmp_path, browser):
    """The browser's arguments show no token: other users can list them."""
    seen, port = tmp_path / "seen", free_port()
    opener = tmp_path / "browser"
    opener.write_text(f'#!/bin/sh\necho "$1" > {seen}.new && mv {seen}.new {seen}\n')
    opener.chmod(0o755)
    env = {**os.environ, "HANGPROOF_DATA": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    process = subprocess.Popen(
        [sys.executable, "app.py", "--port", str(port)],
        cwd=PROJECT,
        env={**env, "BROWSER": f"{opener} %s"},
        stdout=subprocess.PIPE,
        text=True,
    )
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
            context = browser.new_context()
            page = context.new_page()
            page.goto(address)
            page.locator("body.hp-open").wait_for()
            assert page.url == f"http://127.0.0.1:{port}/"
            page.go_back()
            assert secret not in page.url
            context.close()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0 and not list((tmp_path / "data").rglob("*.html"))
    finally:
        process.kill()
        process.wait()


def test_the_documented_client_works_as_it_stands(tmp_path):
    """The README's lines and those of the API's page, on the account that started the server."""
    home = tmp_path / "home"
    with serving(tmp_path / "data", XDG_CONFIG_HOME=str(home / ".config")) as server:
        readme = (PROJECT / "README.md").read_text(encoding="utf-8")
        block = next(one for one in re.findall(r"```\w*\n(.*?)```", readme, re.DOTALL) if "gradio_client" in one)
        assert set(CLIENT.splitlines()[-2:]) <= set(block.splitlines())
        for code in (CLIENT, "".join(block.partition("draft =")[:1])):
            code = (
                code.replace("127.0.0.1:7860", f"127.0.0.1:{server.port}")
                + '\nprint(client.predict(api_name="/list_runs"))'
            )
            env = {key: value for key, value in os.environ.items() if key != "XDG_CONFIG_HOME"} | {"HOME": str(home)}
            done = subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S
            )
            assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stderr


def test_with_a_login_the_token_still_serves_programs(tmp_path):
    with serving(tmp_path / "data", "--auth", "me:a-long-secret") as server:
        assert server.log.read_text() == f"Hangproof is running at {server.url}\n"
        for path in ("/config", "/healthz", "/favicon.ico", "/none"):
            assert status(server, "GET", path) == 401
        assert status(server, "GET", "/config", Authorization=f"Bearer {server.token}") == 200
        assert status(server, "GET", f"/?token={server.token}") == 303
        page = ask(server, "GET", "/login")[2].decode()
        assert "Password" in page and 'name="token"' not in page


def test_without_a_token_it_says_what_that_opens(tmp_path):
    with serving(tmp_path / "data", "--no-token") as server:
        warning, running = server.log.read_text().splitlines()
        assert "every user of this machine" in warning and "run programs with your permissions" in warning
        assert running == f"Hangproof is running at {server.url}" and not server.config.exists()
        assert status(server, "GET", "/config") == 200 and status(server, "GET", "/login") == 404
        assert status(server, "GET", "/config", Origin="http://evil.example") == 403
    for flags in (("--listen",), ("--allow-host", "train.example.org")):
        assert "add --auth USER:PASSWORD" in refused("--no-token", *flags, data=tmp_path / "data")
    assert "leave --no-token out" in refused("--no-token", "--mcp", "--auth", "me:x", data=tmp_path / "data")
    with serving(tmp_path / "data", "--no-token", "--auth", "me:a-long-secret") as server:
        assert "Warning" not in server.log.read_text() and status(server, "GET", "/config") == 401


def test_an_open_page_says_when_its_cookie_is_gone(server, browser):
    context = browser.new_context()
    page = context.new_page()
    open_page(page, server)
    context.clear_cookies()
    page.evaluate("hangproof.keep('test', 'x', 'y')")
    page.get_by_text("Your login has ended.").first.wait_for()
    context.close()
