"""`python app.py` as a process: its startup errors, and what it serves to whom."""

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from ui_helpers import PROJECT, Server, free_port, serving, small_disk

from ui.dataset import draft
from ui.new import new_lora

LIMIT_S = 200  # only an upper limit; `python -m benchmarks ui` measures the start
RSS_MB = 250
CONFIG_KB = 110


def refused(*arguments: str, data: Path | None = None, prefix: tuple = (), **env: str) -> str:
    """Run app.py, which must exit with code 1. Returns its message: one or two lines without a traceback."""
    done = subprocess.run(
        [*prefix, sys.executable, "app.py", "--no-browser", *arguments],
        cwd=PROJECT,
        env={**os.environ, **({"HANGPROOF_DATA": str(data)} if data else {}), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1, done
    assert done.stdout == "" and "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests that only send requests."""
    data = tmp_path_factory.mktemp("app") / "data"
    with serving(data) as running:
        yield running


def test_the_page_responds_and_uses_little_memory(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    began = time.monotonic()
    server = Server(data)
    try:
        while True:
            try:
                status, page = server.get("/")
                break
            except OSError:
                assert server.process.poll() is None and time.monotonic() - began < LIMIT_S
                time.sleep(0.01)
        assert status == 200 and b"Hangproof" in page
        rss = psutil.Process(server.process.pid).memory_info().rss / 2**20
        assert rss < RSS_MB, f"{rss:.0f} MB"
    finally:
        server.stop()


def test_the_config_that_each_visit_downloads_is_small(server):
    status, config = server.get("/config")
    assert status == 200 and len(config) <= CONFIG_KB * 1000, f"{len(config)} bytes"


def test_the_scripts_and_the_style_sheet_are_files_that_a_browser_keeps(server):
    page = server.get("/")[1].decode()
    for pattern, kind in ((r"scripts/page-\w{16}\.js", "text/javascript"), (r"scripts/style-\w{16}\.css", "text/css")):
        found = set(re.findall(pattern, page))
        assert len(found) == 1, pattern
        request = urllib.request.Request(f"{server.url}/{found.pop()}", headers=server.headers)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            assert reply.headers["content-type"].startswith(kind) and "immutable" in reply.headers["cache-control"]
            assert len(reply.read()) > 10_000
    assert server.get("/scripts/page-0123456789abcdef.js")[0] == 404


def test_the_address_is_printed_once_the_page_responds(server):
    place = server.config / "hangproof" / "token"  # others can read this log
    text = f"Hangproof is running at {server.url}; the page asks for the token in {place}\n"
    assert server.log.read_text() == text and server.token not in text
    assert server.get("/")[0] == 200


def test_torch_is_never_imported(server):
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    server.get("/")
    assert "/torch/" not in maps.read_text()
    code = (
        "import sys, app, ui.page, monitor.state; ui.page.build(); print([m for m in sys.modules if m.split('.')[0] in "
    )
    code += "('torch', 'diffusers', 'transformers', 'peft', 'accelerate', 'matplotlib')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "[]", done


def test_the_page_loads_nothing_from_other_hosts(server):
    page = server.get("/")[1].decode()
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page) + re.findall(r"url\(([^)]+)\)", page)
    assert not [url for url in loaded if url.startswith(("http:", "https:", "//"))]
    assert "fonts.googleapis.com" not in page and "fonts.googleapis.com" not in server.get("/theme.css")[1].decode()
    assert '"analytics_enabled":false' in page.replace(" ", "")


def test_only_the_two_data_folders_are_served(server):
    inside = server.data / "outputs" / "r" / "sample.txt"
    inside.parent.mkdir(parents=True, exist_ok=True)
    inside.write_text("a sample")
    assert server.get(f"/gradio_api/file={inside}") == (200, b"a sample")
    secret = server.data / "models.toml"
    secret.write_text("mine")
    up = f"{server.data}/outputs/../models.toml"
    for path in (secret, up, PROJECT / "app.py", PROJECT / "presets" / "models.toml", "/etc/passwd", server.log):
        status, body = server.get(f"/gradio_api/file={path}")
        assert status in (403, 404), (path, status, body[:80])
        assert b"mine" not in body and b"root:" not in body


def test_another_host_name_or_origin_is_refused(server):
    own = f"localhost:{server.port}"
    assert server.get("/", Host=own)[0] == 200
    assert server.get("/", Host=own, Origin=f"http://{own}")[0] == 200
    for host, origin in (("evil.example", None), (f"evil.example:{server.port}", None), (own, "http://evil.example")):
        headers = {"Host": host, **({"Origin": origin} if origin else {})}
        assert server.get("/", **headers)[0] == 403, headers
        assert server.get("/config", **headers)[0] == 403, headers


def test_drafts_that_no_page_opened_for_sixty_days_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    now, day = time.time(), 24 * 3600

    def aged(mine, days):
        for path in draft.folder(mine).glob("draft.sqlite*"):
            os.utime(path, (now - days * day,) * 2)

    ages = {days: draft.new_id() for days in (0, 59, 61)}
    for days, mine in ages.items():
        draft.save_fields(mine, {"name": f"{days}"})
        aged(mine, days)
    other = draft.folder(ages[0]).parent / "not-a-draft"
    other.mkdir()
    os.utime(other, (0, 0))
    draft.delete_expired()
    assert [draft.folder(mine).exists() for mine in ages.values()] == [True, True, False] and other.exists()
    draft.touch(ages[59])  # a page has opened it, which restarts its expiry
    aged(ages[0], 61)
    assert new_lora.load(ages[0])[0] == ages[0]  # opening the page does the same
    draft.delete_expired()
    assert draft.form(ages[59]) == {"name": "59"} and draft.form(ages[0]) == {"name": "0"}
    assert new_lora.load(ages[61])[0] == ages[61]  # a deleted draft opens empty, without an error


def test_leftovers_of_failed_uploads_are_deleted_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    old, new = draft.uploads_dir() / "old", draft.uploads_dir() / "new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "a.png").write_text("x")
    for path in (old / "a.png", old):
        os.utime(path, (0, 0))
    draft.delete_expired()
    assert not old.exists() and new.exists()


def test_it_listens_on_loopback_only(server):
    listening = [
        c for c in psutil.Process(server.process.pid).net_connections(kind="inet") if c.status == psutil.CONN_LISTEN
    ]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


def test_a_port_in_use_is_reported_with_an_available_one(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refused("--port", str(port), data=tmp_path)
    assert f"port {port} is in use" in message
    free = int(re.search(r"use another port: --port (\d+)", message)[1])
    assert free != port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free))


@pytest.mark.parametrize("port", ["0", "70000", "-1"])
def test_an_invalid_port_is_reported(port, tmp_path):
    assert "use a number from 1 to 65535" in refused("--port", port, data=tmp_path)


def test_listening_without_a_password_is_refused(tmp_path):
    for flags in (("--listen",), ("--allow-host", "train.example.org")):
        assert "add --auth USER:PASSWORD" in refused(*flags, data=tmp_path)
    for auth in ("me", ":secret", "me:"):
        assert "write USER:PASSWORD" in refused("--listen", "--auth", auth, data=tmp_path)


def test_missing_write_permission_is_reported(tmp_path):
    folder = tmp_path / "read only"
    folder.mkdir()
    folder.chmod(0o555)
    prefix = ()
    if os.geteuid() == 0:  # root can write everywhere unless it drops that capability
        if not shutil.which("setpriv"):
            pytest.skip("root can write everywhere, and setpriv is not installed to drop that capability")
        prefix = ("setpriv", "--bounding-set", "-dac_override", "--inh-caps", "-dac_override")
    message = refused(data=folder, prefix=prefix)
    assert str(folder) in message and "permission" in message and "HANGPROOF_DATA" in message


def test_a_file_in_place_of_the_data_folder_is_reported(tmp_path):
    (tmp_path / "outputs").write_text("I am a file")
    message = refused(data=tmp_path)
    assert "file" in message and str(tmp_path / "outputs") in message


def test_an_invalid_table_of_models_is_reported(tmp_path):
    (tmp_path / "models.toml").write_text("[models.mine]\nrepo = 7\n")
    message = refused(data=tmp_path)
    assert f"{tmp_path / 'models.toml'}: [models.mine]" in message and "repo" in message


def test_a_full_disk_at_start_is_reported(tmp_path):
    with small_disk(tmp_path, "64k") as disk:
        for folder in ("outputs", "datasets"):
            (disk / folder).mkdir()
        with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        message = refused(data=disk)
    assert "disk is full" in message


def test_a_password_is_required(tmp_path):
    with serving(tmp_path / "data", "--auth", "me:secret") as server:
        inside = server.data / "outputs" / "x.txt"
        inside.write_text("hidden")
        assert server.get(f"/gradio_api/file={inside}")[0] == 401
        assert server.get("/config")[0] == 401
        wrong = base64.b64encode(b"me:wrong").decode()
        assert server.get(f"/gradio_api/file={inside}", Authorization=f"Basic {wrong}")[0] == 401
        assert "secret" not in server.log.read_text()


def test_ctrl_c_closes_the_page(tmp_path):
    with serving(tmp_path / "data") as server:
        server.process.send_signal(2)
        assert server.process.wait(LIMIT_S) == 0
        assert "Runs that were started continue" in server.log.read_text()


def test_a_proxy_in_the_environment_does_not_affect_it(tmp_path):
    dead = f"http://127.0.0.1:{free_port()}"
    with serving(tmp_path / "data", HTTP_PROXY=dead, http_proxy=dead, HTTPS_PROXY=dead, ALL_PROXY=dead) as server:
        assert server.get("/")[0] == 200
