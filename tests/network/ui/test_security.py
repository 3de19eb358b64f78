"""What other host names, wrong passwords and hostile requests can do to the page. (Websites: tests/browser.)"""

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import uvicorn
from ui_helpers import Server, serving, write_run
from ui_page import PATIENCE_S, until
from ui_requests import PASSWORD, ask, log_in, upload, uploads
from uvicorn.server import ServerState

from ui import security

AUTH = ("--auth", f"me:{PASSWORD}")
JSON = {"Content_Type": "application/json"}


def test_an_event_cannot_fetch_a_file_of_this_machine(server):
    """Each event is carried out (200, and an answer), and fails at the file; only a state ignores what is sent."""
    config = json.loads(server.get("/config")[1])
    kinds = {one["id"]: one["type"] for one in config["components"]}
    stolen = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    events = [one for one in config["dependencies"] if any(kinds[number] != "state" for number in one["inputs"])][:12]
    assert len(events) == 12
    for number, event in enumerate(events):
        values = {"data": [stolen] * len(event["inputs"]), "fn_index": event["id"], "session_hash": f"thief{number}"}
        status, _, answer = ask(server, "POST", "/gradio_api/run/predict", json.dumps(values), **JSON)
        assert status == 500 and b"Cannot move /etc/passwd" in answer and b"root:" not in answer
        if number < 3:  # the queue does the same, and closes its stream a while later
            assert ask(server, "POST", "/gradio_api/queue/join", json.dumps(values), **JSON)[0] == 200
            status, _, answer = ask(server, "GET", f"/gradio_api/queue/data?session_hash=thief{number}")
            assert status == 200 and b"Cannot move /etc/passwd" in answer and b"root:" not in answer
    assert "passwd" not in uploads(server)


def test_every_answer_has_the_security_headers(server, listening):
    probes = "/ /config /theme.css /login /gradio_api/info /assets/none.js /none /gradio_api/file=/etc/passwd"
    for one in (server, listening):
        for path in probes.split():
            _, headers, _ = ask(one, "GET", path)
            assert headers["X-Content-Type-Options"] == "nosniff", path
            assert headers["X-Frame-Options"] == "DENY" and headers["Referrer-Policy"] == "same-origin", path
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"], path
            assert headers["Server"] is None and headers["Access-Control-Allow-Origin"] is None, path
    policy = ask(server, "GET", "/")[1]["Content-Security-Policy"]
    for part in ("object-src 'none'", "base-uri 'self'", "form-action 'self'"):
        assert part in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def raw(server: Server, *lines: str) -> int:
    """Status of a request that is written as it is."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall("\r\n".join((*lines, "Connection: close", "", "")).encode())
        reply = connection.makefile("rb").readline()
    return int(reply.split()[1])


@pytest.mark.parametrize("mode", ["server", "listening"])
def test_a_foreign_host_name_or_origin_is_refused(mode, request):
    one = request.getfixturevalue(mode)
    evil = f"evil.example evil.example:{one.port} 127.0.0.1.evil.example:{one.port} 203.0.113.7 a@127.0.0.1"
    paths = f"/ /config /api/config /login /gradio_api/heartbeat/a http://127.0.0.1:{one.port}/config"
    for path in paths.split():
        for host in ("", *evil.split()):
            assert raw(one, f"GET {path} HTTP/1.1", f"Host: {host}") in (400, 403), (path, host)
    assert raw(one, "GET /login HTTP/1.1", f"Host: 127.0.0.1:{one.port}", "Host: evil.example") in (400, 403)
    body = ask(one, "GET", "/", Host="evil.example")[2].decode()
    assert "--allow-host evil.example" in body if mode == "listening" else f"http://127.0.0.1:{one.port}" in body
    own = f"localhost:{one.port}"
    for origin, status in ((f"http://{own}", 200), ("http://evil.example", 403)):
        assert ask(one, "GET", "/healthz", Host=own, Origin=origin, Authorization=f"Bearer {one.token}")[0] == status
    handshake = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}
    handshake |= {"Sec_WebSocket_Key": "x" * 22 + "==", "Origin": "http://evil.example"}
    assert ask(one, "GET", "/", Host=f"127.0.0.1:{one.port}", **handshake)[0] == 403


def test_the_names_of_this_machine_and_of_the_proxy_are_accepted(listening):
    addresses = {a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET}
    named = ["localhost", "train.example.org", "TRAIN.example.org", "third.example.org", "abc-7860.proxy.runpod.net"]
    for name in {socket.gethostname(), *addresses, *named}:
        for host in (name, f"{name}:{listening.port}"):
            assert ask(listening, "GET", "/login", Host=host)[0] == 200, host
            assert ask(listening, "GET", "/login", Host=host, Origin=f"https://{host}")[0] == 200, host
            assert ask(listening, "GET", "/login", Host=host, Origin="https://evil.example")[0] == 403, host
    for host in ("proxy.runpod.net", "example.org", "a.train.example.org", "proxy.runpod.net.evil.example"):
        assert ask(listening, "GET", "/login", Host=host)[0] == 403, host
    # Another tenant of the proxy is the same site, but not the same origin.
    mine, other = "mine-7860.proxy.runpod.net", "other-7860.proxy.runpod.net"
    _, _, cookie = log_in(listening)
    assert ask(listening, "GET", "/config", Host=mine, Cookie=cookie)[0] == 200
    assert upload(listening, "a.txt", b"x", Host=mine, Origin=f"https://{mine}", Cookie=cookie) == 200
    assert upload(listening, "b.txt", b"x", Host=mine, Origin=f"https://{other}", Cookie=cookie) == 403


def test_the_cookie_is_for_this_site_only_and_the_login_leads_to_no_other(listening):
    status, headers, _ = log_in(listening, following="//evil.example")
    (cookie,) = headers.get_all("Set-Cookie")
    parts = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert status == 303 and {"httponly", "samesite=strict", "path=/"} <= parts and "secure" not in parts
    assert headers["Location"] == "./?%2F%2Fevil.example="
    _, headers, _ = log_in(listening, X_Forwarded_Proto="https")
    assert "; Secure" in headers.get_all("Set-Cookie")[0]


@pytest.mark.slow
def test_wrong_passwords_slow_down_also_many_at_the_same_time(tmp_path):
    with serving(tmp_path / "data", *AUTH) as one:
        first = [log_in(one, password=f"guess {n}") for n in range(30)]
        statuses = [status for status, _, _ in first]
        assert statuses[:4] == [401] * 4 and statuses.count(401) < 10 and set(statuses) == {401, 429}
        assert min(int(headers["Retry-After"]) for status, headers, _ in first if status == 429) >= 1
        assert log_in(one, source="127.0.0.2")[0] == 303  # another address does not wait
        until(lambda: log_in(one)[0] == 303, "the right password is accepted after the wait")
        with ThreadPoolExecutor(40) as pool:
            guesses = (pool.submit(log_in, one, password=f"guess {n}", source="127.0.0.3") for n in range(40))
            found = [guess.result(PATIENCE_S)[0] for guess in [*guesses]]
        assert found.count(401) <= 10 and found.count(429) >= 30, found
        assert PASSWORD not in one.log.read_text() and "guess" not in one.log.read_text()


def test_nothing_is_sent_without_a_login(listening):
    page = listening.data / "outputs" / "x.txt"
    page.write_text("hidden")
    paths = f"/config /theme.css /assets/x.js /static/x /gradio_api/file={page} /gradio_api/info /healthz /api/config"
    paths += " /downloads/cat.zip"
    name, basic = f"hangproof-{listening.port}", "Basic bWU6d3Jvbmc="
    for path in paths.split():
        for headers in ({}, {"Cookie": f"{name}=wrong"}, {"Cookie": f"{name}="}, {"Authorization": basic}):
            assert ask(listening, "GET", path, **headers)[0] == 401, path
    for path in ["upload", "queue/join", "component_server", "run/predict"]:
        assert ask(listening, "POST", f"/gradio_api/{path}", "{}")[0] == 401, path
    for path in ("/logout", "/downloads/cat.zip"):
        assert ask(listening, "POST", path, "{}")[0] == 401
    status, headers, _ = ask(listening, "GET", "/?run=mine")
    assert status == 303 and headers["Location"] == "login?next=run%3Dmine"
    assert ask(listening, "GET", "/logout", Cookie=log_in(listening)[2])[0] == 405  # an image cannot log out
    assert PASSWORD not in listening.log.read_text()


def test_the_health_check_needs_the_token_and_tells_nothing(listening):
    write_run(listening.data, "secret name", "completed")
    bearer = {"Authorization": f"Bearer {listening.token}"}  # beside the login, as the container's health check
    status, headers, body = ask(listening, "GET", "/healthz", **bearer)
    assert (status, json.loads(body)) == (200, {"status": "ok"}) and headers["cache-control"] == "no-store"
    assert [ask(listening, method, "/healthz", **bearer)[0] for method in ("HEAD", "POST")] == [200, 405]


def chunked(server: Server, path: str, megabytes: int, **headers: str) -> int:
    """Status of a body that is sent in chunks without a length; the server may answer before its end."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        headers = {key.replace("_", "-"): value for key, value in {**server.headers, **headers}.items()}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", path, (b"x" * 1_000_000 for _ in range(megabytes)), headers, encode_chunked=True)
        return connection.getresponse().status


def test_a_body_that_is_too_large_is_refused(server):
    kind = {"Content_Type": "multipart/form-data; boundary=x"}
    event, call = "/api/gradio_api/call/set_settings", "/gradio_api/component_server"  # which may have a mask
    for path, size in (("/gradio_api/upload", 2_100_000_000), (event, 5_000_000), (call, 50_000_000)):
        status, _, body = ask(server, "POST", path, b"", Content_Length=str(size), **kind)
        assert status == 413 and b"MB" in body, path
    form = {"Content_Type": "application/x-www-form-urlencoded", "Authorization": ""}
    assert ask(server, "POST", "/login", b"a=1&" * 2000, **form)[0] == 413, "more fields than any form has"
    began = psutil.Process(server.process.pid).memory_info().rss
    for path in ("/gradio_api/queue/join", "/gradio_api/component_server"):
        assert chunked(server, path, 60, Transfer_Encoding="chunked", **JSON) == 413, path
    assert psutil.Process(server.process.pid).memory_info().rss - began < 150e6
    assert upload(server, "large.txt", bytes(40_000_000)) == 200, "an upload may be larger than what is typed"
    assert ask(server, "POST", call, b" " * 30_000_000 + b"{}", **JSON)[0] == 400, "no component is named"


@pytest.mark.parametrize("top", ["", "/api"])
def test_bytes_that_are_no_text_get_an_answer_and_no_traceback(server, top):
    before = server.log.stat().st_size
    status, _, body = ask(server, "POST", f"{top}/gradio_api/queue/join", b"\xff", Content_Type="text/plain")
    assert status == 400 and b"cannot take this request" in body and server.log.stat().st_size == before


def test_an_upload_whose_browser_leaves_in_the_middle_is_removed(server):
    before, own = uploads(server), f"Host: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n"
    head = f"POST /gradio_api/upload HTTP/1.1\r\n{own}Content-Type: multipart/form-data; boundary=x\r\n"
    part = '--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"{head}Content-Length: 9999\r\n\r\n{part}half".encode())
        until(lambda: uploads(server) != before, "the upload has begun")
    until(lambda: uploads(server) == before, "what came of it is removed")


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="only Linux limits another process")
def test_connections_that_say_nothing_fill_no_disk(tmp_path):
    with serving(tmp_path / "data") as one, contextlib.ExitStack() as held:
        process = psutil.Process(one.process.pid)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 20, process.rlimit(psutil.RLIMIT_NOFILE)[1]))
        for _ in range(40):
            held.enter_context(socket.create_connection(("127.0.0.1", one.port), timeout=PATIENCE_S))
        until(lambda: "Too many open files" in one.log.read_text(), "no connection is accepted any more")
        time.sleep(3)
        assert one.log.stat().st_size < 500_000
        held.close()
        until(lambda: ask(one, "GET", "/healthz")[0] == 200, "it answers again")


def test_a_connection_without_a_request_is_closed_and_an_answer_under_way_is_not(monkeypatch):
    monkeypatch.setattr(security, "SILENT_S", 0.5)
    silent, written = {b"": b"", b"GET / HTTP": b"", b"GET /short HTTP/1.1\r\nHost: a\r\n\r\nGET": b"short"}, []

    async def app(scope, receive, send):
        long = scope["path"] == "/long"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"short" * (not long), "more_body": long})
        if long:
            await asyncio.gather(*(talk(*one) for one in silent.items()))
            await send({"type": "http.response.body", "body": b"long"})

    async def talk(said, answer):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        written.append(writer)
        writer.write(said)
        assert answer in await asyncio.wait_for(reader.read(), PATIENCE_S)

    async def main():
        nonlocal server
        made = functools.partial(
            security.Connection, uvicorn.Config(app, ws="none", log_level="error"), ServerState(), {}
        )
        server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        await talk(b"GET /long HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"long")

    server = None
    asyncio.run(main())
    assert len(written) == 4


def test_an_event_arrives_while_its_answer_goes_on(server):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", "/gradio_api/heartbeat/abc", headers=server.headers)
        reply = connection.getresponse()
        assert reply.status == 200 and b"ALIVE" in reply.readline() and not reply.isclosed()
