"""The HTTP API of snapshots: what it answers, 404 with the steps that exist, and nothing outside the run's samples."""

import asyncio
import io
import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from ui_helpers import lora_file, photos, write_run

from ui import snapshot_api
from ui.run import evolution

PROMPTS = "a cat --w 64 --d 42\na dog <img src=x onerror=alert(1)> --w 64 --d 7\n"


def fill(folder, *steps: int) -> None:
    (folder / "sample").mkdir(exist_ok=True)
    (folder / "sample_prompts.txt").write_text(PROMPTS, encoding="utf-8")
    for step in steps:
        for prompt, seed in ((0, 42), (1, 7)):
            name = f"{folder.name}_{step:06}_{prompt:02}_20260101120000_{seed}.png"
            shutil.copy(photos("coffee.png")[0], folder / "sample" / name)
        lora_file(folder / f"{folder.name}-step{step:08}.safetensors", step)
    lines = [{"kind": "step", "step": step, "epoch": 1, "loss": 0.5} for step in range(1, 31)]
    lines += [{"kind": "validation", "step": step, "epoch": 1, "val_loss": 1 / step} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def get(path: str, **headers: str):
    """(status, headers, body) of a GET, without a server."""
    path, _, query = path.partition("?")
    sent = [(key.encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": sent}
    response = asyncio.run(snapshot_api.respond(Request(scope)))
    return response.status_code, response.headers, getattr(response, "body", None)


def test_the_list_and_one_snapshot(data):
    fill(write_run(data, "My cat", state="completed"), 10, 20, 30)
    status, headers, body = get("/api/evolution/My-cat")
    found = json.loads(body)
    assert status == 200 and headers["content-type"] == "application/json"
    assert (found["run"], found["name"], found["state"]) == ("My-cat", "My cat", "completed")
    assert [one["step"] for one in found["snapshots"]] == [10, 20, 30]
    assert found["best"] == {"step": 30, "val_loss": 0.0333333} and found["picked"] is None
    assert [one["prompt"] for one in found["prompts"]] == ["a cat", "a dog <img src=x onerror=alert(1)>"]
    one = json.loads(get("/api/evolution/My-cat/snapshot/20")[2])
    assert (one["run"], one["step"], one["loss"], one["val_loss"]) == ("My-cat", 20, 0.5, 0.05)
    assert one["lora"]["name"] == "My-cat-step00000020.safetensors" and one["lora"]["size"] > 100
    assert one["time"].endswith("+00:00")
    first = one["samples"][0]
    assert (first["prompt"], first["seed"], first["number"]) == ("a cat", 42, 0)
    assert json.loads(get("/api/evolution")[2])["runs"][0]["url"] == "api/evolution/My-cat"


def test_what_is_missing_is_a_404_that_names_what_exists(data):
    fill(write_run(data, "cat"), 10, 20)
    status, _, body = get("/api/evolution/cat/snapshot/15")
    said = "The run 'cat' has no snapshot of step '15'; it has the steps 10, 20"
    assert status == 404 and json.loads(body) == {"error": said, "steps": [10, 20]}
    write_run(data, "empty")
    status, _, body = get("/api/evolution/empty/snapshot/1")
    said = "The run 'empty' has no snapshot of step '1'; it has none yet"
    assert status == 404 and json.loads(body) == {"error": said, "steps": []}
    status, _, body = get("/api/evolution/dog")
    assert status == 404 and json.loads(body)["runs"] == ["empty", "cat"]
    for path in ("/api/evolution/cat/snapshot", "/api/evolution/cat/x/1"):
        status, _, body = get(path)
        assert status == 404 and json.loads(body)["error"]


def test_a_client_that_has_the_newest_answer_gets_304(data):
    folder = write_run(data, "cat", state="completed")
    fill(folder, 10)
    for path in ("/api/evolution/cat", "/api/evolution/cat/snapshot/10", "/api/evolution"):
        status, headers, _ = get(path)
        assert status == 200
        status, again, _ = get(path, **{"if-none-match": headers["etag"]})
        assert status == 304 and again["etag"] == headers["etag"]
    etag = get("/api/evolution/cat")[1]["etag"]
    fill(folder, 10, 20)
    assert get("/api/evolution/cat", **{"if-none-match": etag})[0] == 200


def test_a_sample_as_a_small_picture(data):
    from PIL import Image

    folder = write_run(data, "cat")
    fill(folder, 10)
    url = evolution.snapshot(folder, 10)["samples"][0]["url"]
    name, version = url.split("/")[-1].split("?v=")
    status, headers, body = get(f"/api/evolution/cat/thumb/{name}?v={version}")
    assert status == 200 and headers["content-type"] == "image/webp" and "immutable" in headers["cache-control"]
    with Image.open(io.BytesIO(body)) as image:
        assert max(image.size) == snapshot_api.THUMB
    assert "no-cache" in get(f"/api/evolution/cat/thumb/{name}?v=1")[1]["cache-control"]
    assert get(f"/api/evolution/cat/thumb/{name}", **{"if-none-match": headers["etag"]})[0] == 304
    (folder / "sample" / name).write_bytes(b"no image")
    status, _, body = get(f"/api/evolution/cat/thumb/{name}")
    assert status == 404 and "Not a readable image" in json.loads(body)["error"]


PARTS = st.text(max_size=30) | st.sampled_from(
    ["..", ".", "cat", "snapshot", "thumb", "10", "-1", "9" * 400, "%2e%2e", "cat\0", "CAT", "٣", "run.toml"]
)


@given(st.lists(PARTS, max_size=5))
@settings(max_examples=60)
def test_any_address_gets_an_answer_and_no_other_file(hostile, parts):
    status, headers, body = get("/api/evolution/" + "/".join(parts))
    assert status in (200, 404) and headers["content-type"] in ("application/json", "image/webp")
    assert b"secret" not in (body or b"")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A data folder with files beside the samples that no answer may have."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("hostile")
        patch.setenv("HANGPROOF_DATA", str(root))
        fill(write_run(root, "cat"), 10)
        (root / "outputs" / "secret.txt").write_text("secret")
        (root / "outputs" / "cat" / "train.sh").write_text("secret")
        (root / "outputs" / ".cat").mkdir()
        (root / "outputs" / ".cat" / "run.toml").write_text('name = "secret"')
        yield root


def test_a_link_out_of_the_folder_is_not_followed(data, tmp_path_factory):
    folder = write_run(data, "cat")
    fill(folder, 10, 20)
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    shutil.copy(photos("coffee.png")[0], outside)
    for name in list((folder / "sample").iterdir()):
        name.unlink()
        name.symlink_to(outside)
    name = evolution.snapshot(folder, 10)["samples"][0]["url"].split("/")[-1].split("?")[0]
    assert get(f"/api/evolution/cat/thumb/{name}")[0] == 404
