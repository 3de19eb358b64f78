"""Which files the page sends, and as what."""

import contextlib
import http.client

import psutil
import pytest
from runs_helpers import written
from ui_helpers import PROJECT, photos
from ui_page import PATIENCE_S
from ui_requests import ask

CONTENT = b"<!doctype html><title>page</title><script>document.title = 'ran'</script>"
KINDS = {f"a.{kind}": f"image/{kind}" for kind in ("png", "webp", "gif", "avif")} | {"a.JPG": "image/jpeg"}
KINDS |= dict.fromkeys(("a.txt", "training.log"), "text/plain; charset=utf-8")
KINDS |= {"a.safetensors": "application/octet-stream"}
OTHERS = "a.html a.svg a.xml a.xhtml a.js a.pdf a.css a a.png.html .a.png .hidden/a.png a.pt"


@pytest.mark.parametrize("name", [*KINDS, *OTHERS.split()])
def test_a_file_of_a_run_is_an_image_or_a_download_and_no_other_is_sent(server, name):
    path = server.data / "outputs" / "kinds" / name
    written(path, CONTENT)
    status, headers, body = ask(server, "GET", f"/gradio_api/file={path}")
    if name not in KINDS:
        assert status == 404
        return
    assert (status, headers["Content-Type"], body) == (200, KINDS[name], CONTENT)
    assert headers["Content-Disposition"].startswith("inline" if KINDS[name].startswith("image") else "attachment")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_downloaded_log_has_only_the_names_of_the_secrets_of_its_run(server):
    log = server.data / "outputs" / "logged" / "training.log"
    written(log, b"key 0123456789abcdef\n" * 100_000 + b"\xff end")
    env = server.data / ".secrets" / "logged.env"
    written(env, "export WANDB_API_KEY=0123456789abcdef\n")
    status, headers, body = ask(server, "GET", f"/gradio_api/file={log}")
    assert (status, body) == (200, b"key (WANDB_API_KEY)\n" * 100_000 + b"\xff end")
    assert headers["Content-Disposition"].startswith("attachment") and headers["Content-Type"] == KINDS[log.name]


def test_files_are_found_only_by_their_own_path(server, tmp_path):
    photo, data = photos("chelsea.png")[0].read_bytes(), server.data
    draft = data / "datasets" / ".drafts" / ("a" * 24)
    thumb, state = draft / "thumbs" / "1.jpg", draft / "draft.sqlite"
    waiting, outside = data / "datasets" / ".uploads" / "x" / "1.png", tmp_path / "outside.png"
    link = data / "outputs" / "link.png"
    for path in (thumb, state, waiting, outside, data / "models.toml"):
        written(path, photo)
    link.symlink_to(outside)
    assert ask(server, "GET", f"/gradio_api/file={thumb}")[0] == 200
    refused = [state, waiting, outside, link, data / "outputs", data / "models.toml", server.log, PROJECT / "app.py"]
    refused += [f"{data}/outputs/../models.toml", f"{data}/outputs/../../outside.png", PROJECT / "presets/models.toml"]
    refused += [f"{data}/datasets/.drafts/../.uploads/x/1.png", f"{data}/outputs/%2e%2e/datasets/.uploads/x/1.png"]
    refused += ["/etc/passwd", "http://127.0.0.1:1/a.png", "a%00.png", "", "x" * 5000]
    (data / "models.toml").rename(tmp_path / "models.toml")  # the page reads it
    others = [f"/gradio_api/file/{thumb}", f"/file={thumb}", "/gradio_api/proxy=http://127.0.0.1/"]
    others += ["/gradio_api//file=/x", "/api/gradio_api/file=/etc/passwd", "/api/nonsense", "/login/", "/config/x"]
    others += ["/openapi.json", "/docs", "/gradio_api/openapi.json"]
    for path in [*(f"/gradio_api/file={path}" for path in refused), *others]:
        status, _, body = ask(server, "GET", path)
        assert status == 404 and photo[:100] not in body and b"root:" not in body, path


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
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", f"/gradio_api/file={path}", headers=server.headers)
        reply = connection.getresponse()
        assert reply.status == 200 and reply.headers["Content-Length"] == "200000000"
        assert reply.headers["Content-Disposition"] == 'attachment; filename="lora.safetensors"'
        while block := reply.read(4_000_000):
            received += len(block)
            most = max(most, process.memory_info().rss - began)
    assert received == 200_000_000 and most < 60e6, most
    status, headers, body = ask(server, "GET", f"/gradio_api/file={path}", Range="bytes=100-105")
    assert (status, body, headers["Content-Range"]) == (206, b"middle", "bytes 100-105/200000000")
    status, headers, body = ask(server, "GET", f"/gradio_api/file={path}", If_None_Match=headers["ETag"])
    assert (status, body) == (304, b"") and headers["X-Content-Type-Options"] == "nosniff"
