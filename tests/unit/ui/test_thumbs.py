"""The small pictures of a run's samples, what the API says of them, and nothing outside the run's samples."""

import asyncio
import io
import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from ui_helpers import lora_file, photos, write_run

from ui import thumbs
from ui.api.runs import run_samples
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
    response = asyncio.run(thumbs.respond(Request(scope)))
    return response.status_code, response.headers, getattr(response, "body", None)


def test_what_the_api_says_of_the_samples(data):
    fill(write_run(data, "My cat", state="completed"), 10, 20, 30)
    found = run_samples("My-cat")
    assert (found["run"], found["name"], found["state"]) == ("My-cat", "My cat", "completed")
    assert [one["step"] for one in found["snapshots"]] == [10, 20, 30]
    assert found["best"] == {"step": 30, "val_loss": 0.0333333} and found["picked"] is None
    assert [one["prompt"] for one in found["prompts"]] == ["a cat", "a dog <img src=x onerror=alert(1)>"]
    one = found["snapshots"][1]
    assert (one["step"], one["loss"], one["val_loss"]) == (20, 0.5, 0.05) and one["time"].endswith("+00:00")
    assert one["lora"]["name"] == "My-cat-step00000020.safetensors" and one["lora"]["size"] > 100
    first = one["samples"][0]
    assert (first["prompt"], first["seed"], first["number"]) == ("a cat", 42, 0)


def test_a_sample_as_a_small_picture(data):
    from PIL import Image

    folder = write_run(data, "cat")
    fill(folder, 10)
    url = evolution.summary(folder)["snapshots"][0]["samples"][0]["url"]
    name, version = url.split("/")[-1].split("?v=")
    status, headers, body = get(f"/thumbs/cat/{name}?v={version}")
    assert status == 200 and headers["content-type"] == "image/webp" and "immutable" in headers["cache-control"]
    with Image.open(io.BytesIO(body)) as image:
        assert max(image.size) == thumbs.THUMB
    assert "no-cache" in get(f"/thumbs/cat/{name}?v=1")[1]["cache-control"]
    assert get(f"/thumbs/cat/{name}", **{"if-none-match": headers["etag"]})[0] == 304
    (folder / "sample" / name).write_bytes(b"no image")
    status, _, body = get(f"/thumbs/cat/{name}")
    assert status == 404 and b"Not a readable image" in body


PARTS = st.text(max_size=30) | st.sampled_from(
    ["..", ".", "cat", "sample", "10", "9" * 400, "%2e%2e", "cat\0", "CAT", "٣", "run.toml", "train.sh"]
)


@given(st.lists(PARTS, max_size=5))
@settings(max_examples=60)
def test_any_address_gets_an_answer_and_no_other_file(hostile, parts):
    status, headers, body = get("/thumbs/" + "/".join(parts))
    assert status == 404 and headers["content-type"].startswith("text/plain")
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
    name = evolution.summary(folder)["snapshots"][0]["samples"][0]["url"].split("/")[-1].split("?")[0]
    assert get(f"/thumbs/cat/{name}")[0] == 404
