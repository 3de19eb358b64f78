"""The door: `python app.py` as a process. What stands in the way is told; what is served is only what may be."""

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ui_helpers import PROJECT, Server, free_port, serving, small_disk

from ui import draft, new_lora
from ui.origin import allowed

LIMIT_S = 200  # only so that nothing waits for ever; how soon the page comes says `python -m benchmarks ui`
RSS_MB = 250


def refused(*arguments: str, data: Path | None = None, prefix: tuple = (), **env: str) -> str:
    """Run app.py, which must end by itself at once; what it said, one or two lines and no traceback."""
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
    """One server for all tests that only ask."""
    data = tmp_path_factory.mktemp("app") / "data"
    with serving(data) as running:
        yield running


def test_the_first_page_comes_and_takes_little_memory(tmp_path):
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


def test_its_address_is_printed_once_it_answers(server):
    said = server.log.read_text()
    assert said == f"Hangproof is at {server.url}\n"
    assert server.get("/")[0] == 200


def test_torch_is_never_imported(server):
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    server.get("/")
    assert "/torch/" not in maps.read_text()
    code = "import sys, app, ui.page, monitor.status; ui.page.build(); print([m for m in sys.modules if m.split('.')[0] in "
    code += "('torch', 'diffusers', 'transformers', 'peft', 'accelerate', 'matplotlib')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "[]", done


def test_the_page_asks_nobody_outside(server):
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


def test_another_host_name_or_page_is_refused(server):
    own = f"localhost:{server.port}"
    assert server.get("/", Host=own)[0] == 200
    assert server.get("/", Host=own, Origin=f"http://{own}")[0] == 200
    for host, origin in (("evil.example", None), (f"evil.example:{server.port}", None), (own, "http://evil.example")):
        headers = {"Host": host, **({"Origin": origin} if origin else {})}
        assert server.get("/", **headers)[0] == 403, headers
        assert server.get("/config", **headers)[0] == 403, headers


@pytest.mark.parametrize(
    "host, origin, let_through",
    [
        ("127.0.0.1:7860", None, True),
        ("[::1]:7860", "http://[::1]:7860", True),
        ("localhost:9000", "http://localhost:9000", True),
        ("localhost:9000", "http://localhost:8000", False),
        ("localhost:9000", "null", False),
        ("", None, False),
        ("localhost.evil.example", None, False),
        ("evil@localhost", "http://evil.example", False),
        ("[", None, False),
    ],
)
def test_who_may_speak_to_it(host, origin, let_through):
    assert allowed(host, origin) is let_through


def test_drafts_that_nobody_looked_at_for_sixty_days_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    now, day = time.time(), 24 * 3600
    ages = {days: draft.new_id() for days in (0, 59, 61)}
    for days, mine in ages.items():
        draft.save_form(mine, {"name": f"{days}"})
        os.utime(draft.folder(mine) / "draft.json", (now - days * day,) * 2)
    other = draft.folder(ages[0]).parent / "not-a-draft"
    other.mkdir()
    os.utime(other, (0, 0))
    draft.tidy()
    assert [draft.folder(mine).exists() for mine in ages.values()] == [True, True, False] and other.exists()
    draft.seen(ages[59])  # a page has opened it: it is as good as new
    os.utime(draft.folder(ages[0]) / "draft.json", (now - 61 * day,) * 2)
    assert new_lora.load(ages[0])[0] == ages[0]  # likewise
    draft.tidy()
    assert draft.form(ages[59]) == {"name": "59"} and draft.form(ages[0]) == {"name": "0"}
    assert new_lora.load(ages[61])[0] == ages[61]  # what is gone comes back empty, and is no error


def test_what_broken_uploads_left_is_deleted_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    old, new = draft.uploads_dir() / "old", draft.uploads_dir() / "new"
    for place in (old, new):
        place.mkdir(parents=True)
        (place / "a.png").write_text("x")
    os.utime(old, (0, 0))
    draft.tidy()
    assert not old.exists() and new.exists()


def test_it_listens_on_loopback_only(server):
    listening = [
        c for c in psutil.Process(server.process.pid).net_connections(kind="inet") if c.status == psutil.CONN_LISTEN
    ]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


def test_a_port_in_use_is_told_with_one_that_is_free(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refused("--port", str(port), data=tmp_path)
    assert f"port {port} is in use" in said
    free = int(re.search(r"choose another: --port (\d+)", said)[1])
    assert free != port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free))


@pytest.mark.parametrize("port", ["0", "70000", "-1"])
def test_a_port_that_cannot_be_is_told(port, tmp_path):
    assert "give a number from 1 to 65535" in refused("--port", port, data=tmp_path)


def test_listening_without_a_password_is_refused(tmp_path):
    assert "add --auth USER:PASSWORD" in refused("--listen", data=tmp_path)
    for auth in ("me", ":secret", "me:"):
        assert "write USER:PASSWORD" in refused("--listen", "--auth", auth, data=tmp_path)


def test_no_write_permission_is_told(tmp_path):
    place = tmp_path / "read only"
    place.mkdir()
    place.chmod(0o555)
    prefix = ()
    if os.geteuid() == 0:  # root writes everywhere, unless it gives that right up
        if not shutil.which("setpriv"):
            pytest.skip("root may write everywhere, and there is no setpriv to give that up")
        prefix = ("setpriv", "--bounding-set", "-dac_override", "--inh-caps", "-dac_override")
    said = refused(data=place, prefix=prefix)
    assert (
        str(place) in said
        and "no permission to write there; fix the folder's permissions, or set HANGPROOF_DATA" in said
    )


def test_a_file_in_the_way_of_the_data_is_told(tmp_path):
    (tmp_path / "outputs").write_text("I am a file")
    said = refused(data=tmp_path)
    assert "a file is in the way" in said and str(tmp_path / "outputs") in said


def test_a_table_of_models_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "models.toml").write_text("[models.mine]\nrepo = 7\n")
    said = refused(data=tmp_path)
    assert f"{tmp_path / 'models.toml'}: [models.mine]: repo must be a str" in said


def test_a_full_disk_at_start_is_told(tmp_path):
    with small_disk(tmp_path, "64k") as disk:
        for folder in ("outputs", "datasets"):
            (disk / folder).mkdir()
        with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        said = refused(data=disk)
    assert "the disk is full; free some space" in said


def test_a_password_is_asked_for(tmp_path):
    with serving(tmp_path / "data", "--auth", "me:secret") as server:
        inside = server.data / "outputs" / "x.txt"
        inside.write_text("hidden")
        assert server.get(f"/gradio_api/file={inside}")[0] == 401
        assert server.get("/config")[0] == 401
        wrong = base64.b64encode(b"me:wrong").decode()
        assert server.get(f"/gradio_api/file={inside}", Authorization=f"Basic {wrong}")[0] == 401
        assert "secret" not in server.log.read_text()


def test_ctrl_c_closes_it(tmp_path):
    with serving(tmp_path / "data") as server:
        server.process.send_signal(2)
        assert server.process.wait(LIMIT_S) == 0
        assert "runs go on by themselves" in server.log.read_text()


def test_a_proxy_of_the_environment_does_not_stop_it(tmp_path):
    dead = f"http://127.0.0.1:{free_port()}"
    with serving(tmp_path / "data", HTTP_PROXY=dead, http_proxy=dead, HTTPS_PROXY=dead, ALL_PROXY=dead) as server:
        assert server.get("/")[0] == 200
