"""The token: nothing answers without it, no other user gets it, and its own account notices little of it."""

import contextlib
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from ui_helpers import PROJECT, Server, serving
from ui_page import PATIENCE_S
from ui_requests import ask

import app
from runs.files import RunError
from ui import security, token
from ui.api.server import CLIENT

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


def routes(application, prefix: str = ""):
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
        found: dict[str, set[str]] = {}
        for path, methods in routes(guard.app):
            found.setdefault(path, set()).update(methods)
    for path in (*security.ROUTES, security.MCP):  # our own answers are no routes of Gradio's
        found.setdefault(path.replace("*", "x"), set()).update(security.methods_of(path.replace("*", "x"), True))
    nothing = ("/none", "//", "/api/none", "/login/x", "/gradio_api/mcp/", "/%2e%2e/x", "/gradio_api/component_server/")
    return {**{path: set(METHODS) for path in nothing}, **found}


@pytest.mark.slow
def test_no_route_answers_without_the_token_and_each_does_with_it(every_route, tmp_path):
    """The routes come from the application itself, so a new one cannot be forgotten."""
    known = "/config /gradio_api/component_server /gradio_api/upload /api/config /healthz"
    assert {*known.split()} <= {*every_route}
    assert any("/api/gradio_api/mcp" in path for path in every_route) and len(every_route) > 120
    with serving(tmp_path / "data", "--mcp") as server:
        wrong = {"Authorization": f"Bearer {'x' * 43}", "Cookie": f"hangproof-{server.port}={'0' * 64}"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
            for path, methods in sorted(every_route.items()):
                for method in {*METHODS} | methods:
                    tries = [(path, {}), (f"{path}?token={'x' * 43}", wrong)]
                    for where, headers in tries if method in methods else tries[:1]:
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
            for path in ("/config", "/api/config"):
                assert status(server, "GET", f"{path}{query}", **headers, **foreign) == 403
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


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("APPDATA" if os.name == "nt" else "XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "hangproof" / "token"


def test_the_token_is_made_once_and_is_its_accounts_alone(config):
    old = os.umask(0)
    try:
        start = [sys.executable, "-c", "from ui import token; print(token.load())"]
        made = [subprocess.Popen(start, cwd=PROJECT, stdout=subprocess.PIPE, text=True) for _ in range(6)]  # at once
        found = {one.communicate(timeout=PATIENCE_S)[0].strip() for one in made}
    finally:
        os.umask(old)
    assert found == {config.read_text()} == {token.load()} and token.TOKEN.fullmatch(*found)
    assert os.name == "nt" or (config.stat().st_mode & 0o777, config.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    config.unlink()
    assert token.load() not in found


def test_a_file_that_others_can_read_or_that_is_no_token_is_refused(config, monkeypatch, refused):
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
    assert "is not a token; delete the file" in refused("--port", "31999", XDG_CONFIG_HOME=str(config.parent.parent))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    with pytest.raises(RunError, match="XDG_CONFIG_HOME"):
        token.load()


@pytest.mark.slow
def test_another_user_of_the_machine_gets_neither_the_token_nor_an_answer():
    """Everything on the way to the file is open, as in a home folder that others may list."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("curl") is None:
        pytest.skip("only root can become another user, who needs curl")
    home = Path(tempfile.mkdtemp())
    try:
        (home / "config" / "hangproof").mkdir(parents=True)
        for folder in (home, home / "config", home / "config" / "hangproof"):
            folder.chmod(0o755)
        with serving(home / "data", fresh=True) as server:  # its own command line is what the other user looks at

            def nobody(*command: str) -> subprocess.CompletedProcess:
                other = {"user": "nobody", "group": 65534, "extra_groups": []}
                return subprocess.run(command, **other, capture_output=True, text=True, errors="replace")

            file = str(home / "config" / "hangproof" / "token")
            assert nobody("ls", file).returncode == 0 and nobody("cat", file).returncode != 0
            url = f"{server.url}/gradio_api/component_server"
            answer = nobody("curl", "-s", "-X", "POST", "-w", "%{http_code}", url)
            assert answer.stdout.endswith("401") and server.token not in answer.stdout
            assert str(server.port) in nobody("cat", f"/proc/{server.process.pid}/cmdline").stdout
            shown = nobody("sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null").stdout
            assert server.token not in shown
    finally:
        shutil.rmtree(home)


@pytest.mark.slow
def test_the_documented_client_works_as_it_stands(server, tmp_path):
    """The lines of docs/api.md and those of the API's page, on the account that started the server."""
    shutil.copytree(server.config / "hangproof", tmp_path / ".config" / "hangproof")
    page = (PROJECT / "docs" / "api.md").read_text(encoding="utf-8")
    block = next(one for one in re.findall(r"```\w*\n(.*?)```", page, re.DOTALL) if "gradio_client" in one)
    assert set(CLIENT.splitlines()[-2:]) <= set(block.splitlines())
    for code in (CLIENT, block.partition("draft =")[0]):
        code = code.replace("127.0.0.1:7860", f"127.0.0.1:{server.port}")
        command = [sys.executable, "-c", f'{code}\nprint(client.predict(api_name="/list_runs"))']
        env = {key: value for key, value in os.environ.items() if key != "XDG_CONFIG_HOME"} | {"HOME": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 and done.stdout.rstrip().endswith("]"), done.stderr


def test_with_a_login_the_token_still_serves_programs_and_is_not_printed(listening):
    assert listening.log.read_text().splitlines()[0] == f"Hangproof is running at {listening.url}"
    assert listening.token not in listening.log.read_text()
    assert status(listening, "GET", "/config", Authorization=f"Bearer {listening.token}") == 200
    assert status(listening, "GET", f"/?token={listening.token}") == 303
    page = ask(listening, "GET", "/login")[2].decode()
    assert "Password" in page and 'name="token"' not in page


@pytest.mark.slow
def test_without_a_token_it_says_what_that_opens(tmp_path, capsys):
    with serving(tmp_path / "data", "--no-token") as server:
        warning, running = server.log.read_text().splitlines()
        assert "every user of this machine" in warning and "run programs with your permissions" in warning
        assert running == f"Hangproof is running at {server.url}" and not server.config.exists()
        assert status(server, "GET", "/config") == 200 and status(server, "GET", "/login") == 404
        assert status(server, "GET", "/config", Origin="http://evil.example") == 403
    assert app.token_of(app.parser().parse_args(["--no-token"]), ("me", "x")) is None and capsys.readouterr().err == ""
