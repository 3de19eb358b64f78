"""`python app.py` as a process: its startup errors, and what it serves."""

import os
import re
import shutil
import socket
from pathlib import Path

import psutil
import pytest
from ui_helpers import free_port, serving, small_disk
from ui_page import PATIENCE_S

RSS_MB = 250


CONFIG_KB = 104


def arenas(pid: int) -> int:
    """glibc's arenas beside the main one: each reserves 64 MB of addresses. 0 where there is no /proc."""
    if not Path(f"/proc/{pid}/maps").exists():
        return 0
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    reserved = (line.split()[0].split("-") for line in lines if "---p" in line)
    return sum(32 << 20 < int(end, 16) - int(begin, 16) <= 64 << 20 for begin, end in reserved)


@pytest.mark.slow
def test_a_server_uses_little_memory_no_proxy_and_ends_with_ctrl_c(tmp_path):
    dead = f"http://127.0.0.1:{free_port()}"
    with serving(tmp_path / "data", HTTP_PROXY=dead, http_proxy=dead, HTTPS_PROXY=dead, ALL_PROXY=dead) as server:
        status, page = server.get("/")
        assert status == 200 and b"Hangproof" in page
        rss = psutil.Process(server.process.pid).memory_info().rss / 2**20
        assert rss < RSS_MB, f"{rss:.0f} MB"
        assert arenas(server.process.pid) == 0, "threads that keep memory of their own"
        server.process.send_signal(2)
        assert server.process.wait(PATIENCE_S) == 0
        assert "Runs that were started continue" in server.log.read_text()


def test_the_config_that_each_visit_downloads_is_small(server):
    status, config = server.get("/config")
    assert status == 200 and len(config) <= CONFIG_KB * 1000, f"{len(config)} bytes"


def test_the_address_is_printed_without_the_token_where_others_can_read_it(server):
    place = server.config / "hangproof" / "token"
    text = f"Hangproof is running at {server.url}; the page asks for the token in {place}\n"
    log = server.log.read_text()  # other files' tests may have asked this server for what makes Gradio print an error
    assert log.startswith(text) and server.token not in log


def test_torch_is_never_imported(server):
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    assert server.get("/")[0] == 200
    loaded = maps.read_text()  # of what imports it, each has compiled code, or imports torch
    assert not [name for name in ("torch", "tokenizers", "matplotlib") if f"/{name}/" in loaded]


def test_it_listens_on_loopback_only(server):
    connections = psutil.Process(server.process.pid).net_connections(kind="inet")
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_a_port_in_use_is_reported_with_an_available_one(refused):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refused("--port", str(port))
    assert f"port {port} is in use" in message
    free = int(re.search(r"use another port: --port (\d+)", message)[1])
    assert free != port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[(("--port", port), "use a number from 1 to 65535") for port in ("0", "70000", "-1")],
        *[(flags, "add --auth USER:PASSWORD") for flags in (("--listen",), ("--allow-host", "train.example.org"))],
        *[(("--listen", "--auth", auth), "write USER:PASSWORD") for auth in ("me", ":secret", "me:")],
        (("--no-token", "--listen"), "add --auth USER:PASSWORD"),
        (("--no-token", "--allow-host", "train.example.org"), "add --auth USER:PASSWORD"),
        (("--no-token", "--mcp", "--auth", "me:x"), "leave --no-token out"),
    ],
)
def test_arguments_that_cannot_be_served_are_reported(refused, arguments, message):
    assert message in refused("--port", str(free_port()), *arguments)


def test_a_file_in_place_of_the_data_folder_is_reported(refused, tmp_path):
    (tmp_path / "outputs").write_text("I am a file")
    message = refused("--port", str(free_port()))
    assert "file" in message and str(tmp_path / "outputs") in message


@pytest.mark.slow
def test_missing_write_permission_a_full_disk_and_an_invalid_table_are_reported(refused, tmp_path):
    (tmp_path / "models.toml").write_text("[models.mine]\nrepo = 7\n")
    message = refused(prefix=("env",))
    assert f"{tmp_path / 'models.toml'}: [models.mine]" in message and "repo" in message
    with small_disk(tmp_path, "64k") as disk:
        for folder in ("outputs", "datasets"):
            (disk / folder).mkdir()
        with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        assert "disk is full" in refused(HANGPROOF_DATA=str(disk))
    folder = tmp_path / "read only"
    folder.mkdir()
    folder.chmod(0o555)
    prefix = ("env",)
    if os.geteuid() == 0:  # root can write everywhere unless it drops that capability
        if not shutil.which("setpriv"):
            pytest.skip("root can write everywhere, and setpriv is not installed to drop that capability")
        prefix = ("setpriv", "--bounding-set", "-dac_override", "--inh-caps", "-dac_override")
    message = refused(prefix=prefix, HANGPROOF_DATA=str(folder))
    assert str(folder) in message and "permission" in message and "HANGPROOF_DATA" in message
