"""`python -m captions` on a folder of images: what is written and kept, how each engine fails. Real servers."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy
import onnx.parser
import pytest
from caption_server import answering, drip
from draft_helpers import photo
from hub_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from runs_helpers import PROJECT, python
from strategies import ANY_VALUE

from captions import endpoint, job, models, tagger
from captions.text import MOST_CHARACTERS, Frame, NoCaption, cleaned, framed
from captions.work import Folder, Picture, upright
from runs.files import RunError

KEY = "sk-secret-0123456789"


def texts(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def command(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command's result; HTTP_PROXY is set to see that this machine is asked directly."""
    env = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "", **env}
    return python("-m", "captions", str(folder), *arguments, timeout=120, **env)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for number in range(4):
        photo(folder / f"{number}.png", seed=number)
    return folder


def run(server, folder: Path, **limits) -> job.Report:
    """A job in this process, with a server."""
    asked = endpoint.Server(server.url, "m", limit_s=limits.pop("limit_s", 5.0))
    return job.run(Folder(folder), lambda: endpoint.load(asked), Frame(), **limits)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_PAUSE_S", 0.02)
    with answering() as found:
        yield found


# The texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("A cat.", "A cat."),
        ('"A cat."', "A cat."),
        ("```\na cat\n```", "a cat"),
        ("<think>Is it a dog?</think>\nA cat.", "A cat."),
        ("<THINK>it never ends", None),
        ("a\x00c\x1b[31mat\x7f", "a c [31mat"),
        ("ca\u202et \ufeffhere", "cat here"),
        ("a family: 👨‍👩‍👧", "a family: 👨‍👩‍👧"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),  # text, which nothing turns into markup
        ("\ud800half", "�half"),
        ("", None),
        ("x" * (MOST_CHARACTERS + 1), None),
    ],
)
def test_an_answer_becomes_one_line_of_plain_text(answer, caption):
    with contextlib.nullcontext() if caption else pytest.raises(NoCaption):
        assert cleaned(answer) == caption


@settings(max_examples=60)
@given(st.text(max_size=300))
def test_no_answer_gives_a_caption_with_control_characters_or_several_lines(answer):
    try:
        text = cleaned(answer)
    except NoCaption:
        return
    assert text and text == text.strip() and len(text.splitlines()) == 1
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    text.encode("utf-8")


@pytest.mark.parametrize(
    ("caption", "frame", "result"),
    [
        ("a cat", Frame(trigger="ohwx"), "ohwx, a cat"),
        ("Ohwx, a cat", Frame(trigger="ohwx"), "Ohwx, a cat"),
        ("ohwxen graze", Frame(trigger="ohwx"), "ohwx, ohwxen graze"),
        ("a cat", Frame("in style, ", "", "ohwx"), "ohwx, in style, a cat"),
    ],
)
def test_prefix_suffix_and_trigger(caption, frame, result):
    assert framed(caption, frame) == result


# A folder ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_captions_of_a_folder_are_written_beside_the_images_and_none_is_replaced(images):
    (images / "1.txt").write_text("mine\n")
    (images / "2.txt").write_text("\n")
    with answering() as server:
        done = command(images, "--with=endpoint", f"--url={server.url}", "--model=vision", "--trigger=ohwx", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == {"written": 3, "failed": 0, "left": 0}
        assert texts(images) == {
            "0": "ohwx, a picture, number 1\n",
            "1": "mine\n",
            "2": "ohwx, a picture, number 2\n",
            "3": "ohwx, a picture, number 3\n",
        }
        assert [one["model"] for one in server.questions] == ["vision"] * 3
        assert server.paths[0] == "/v1/chat/completions"
        again = command(images, "--with=endpoint", f"--url={server.url}", "--model=vision")
        assert again.returncode == 0 and len(server.questions) == 3, "everything has a caption"
        rewritten = command(images, "--with=endpoint", f"--url={server.url}", "--model=vision", "--rewrite")
        assert rewritten.returncode == 0 and len(server.questions) == 7
        assert texts(images)["1"] != "mine\n"


@pytest.mark.slow
def test_the_key_is_sent_and_is_nowhere_else(images):
    with answering() as server:
        server.answer = lambda number, question: (
            (200, json.dumps({"choices": [{"message": {"content": f"a cat {KEY}"}}]}).encode(), {})
            if number == 1
            else (403, json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), {})
        )
        arguments = ["--with=endpoint", f"--url={server.url}", "--model=m", "--key-variable=MY_KEY"]
        done = command(images, *arguments, MY_KEY=KEY)
        assert {one["authorization"] for one in server.headers} == {f"Bearer {KEY}"}
        everything = done.stdout + done.stderr + "".join(texts(images).values())
        assert KEY not in everything and "[key]" in everything
        assert done.returncode == 1 and "1 caption written, 1 failed, 2 left." in done.stdout
        missing = command(images, *arguments)
        assert missing.returncode == 1 and "No environment variable" in missing.stderr
        typed = command(images, *arguments[:-1], f"--key-variable={KEY}")
        assert typed.returncode == 1 and KEY not in typed.stderr and "not the key itself" in typed.stderr


@pytest.mark.parametrize(
    "url",
    ["", "ftp://x", "http://", "http://me:pass@host/v1", "http://host/v1?key=1", "http://host:99999/v1", "http://a b"],
)
def test_an_address_that_is_none_or_holds_a_key_is_refused(url):
    with pytest.raises(RunError, match="address") as found:
        endpoint.checked(endpoint.Server(url, "m"))
    assert "pass" not in str(found.value).replace("password", "")


# A server that fails -------------------------------------------------------------------------------------------------


def refused(status: int, body: bytes = b"{}", **headers: str):
    return lambda number, question: (status, body, {key.replace("_", "-"): value for key, value in headers.items()})


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        (refused(401, b'{"error": {"message": "no such key"}}'), "401: no such key", 1),
        (refused(302, Location="http://127.0.0.1:1/steal"), "302", 1),
        (refused(500), "HTTP status 500", 4 * endpoint.TRIES),
        (refused(429, Retry_After="9999"), "HTTP status 429", 4 * endpoint.TRIES),
        (refused(200, b"<html>"), "something else than a chat completion", 4),
        (refused(200, b"[" * 100_000), "something else than a chat completion", 4),
        (refused(200, b'{"choices": [{"message": {"content": 7}}]}'), "without text", 4),
        (refused(200, b" " * (endpoint.ANSWER_BYTES + 2)), "more than 1 MB", 4),
        (lambda number, question: "x" * 5_000, "5,000 characters", 4),
    ],
)
def test_a_server_that_refuses_or_lies_ends_the_job_with_its_reason(images, server, answer, reason, requests):
    server.answer = answer
    report = run(server, images)
    assert reason in report.reason and report.written == 0, report
    assert len(server.questions) == requests
    assert not texts(images)


@pytest.mark.parametrize("answer", [lambda n, q: None, lambda n, q: (200, drip(), {})], ids=["silent", "drips"])
def test_a_server_that_never_ends_its_answer_is_left_and_one_that_is_gone_is_said(images, server, answer):
    server.answer = answer
    for number in range(1, 4):
        (images / f"{number}.png").unlink()
    assert "did not answer within 0.3 s" in run(server, images, limit_s=0.3).reason
    with answering() as gone:
        pass
    assert "cannot be reached" in run(gone, images).reason


def test_a_failed_image_stops_no_other_a_busy_server_is_asked_again_and_many_failures_stop_the_job(
    images, server, monkeypatch
):
    server.answer = lambda number, question: (503, b"", {}) if number % 3 == 1 else "" if number == 2 else f"a {number}"
    (images / "3.png").write_bytes(b"not an image")
    report = run(server, images)
    assert (report.written, report.failed, report.left, report.reason) == (2, 2, 0, "")
    assert sorted(texts(images)) == ["1", "2"]
    for number in "12":
        (images / f"{number}.txt").unlink()
    photo(images / "3.png", seed=3)
    monkeypatch.setattr(job, "FAILURES_IN_A_ROW", 2)
    first = len(server.questions) + 1
    server.answer = lambda number, question: "fine" if number == first else ""
    report = run(server, images)
    assert (report.written, report.failed, report.left) == (1, 2, 1) and "empty" in report.reason


@settings(max_examples=60)
@given(
    st.binary(max_size=400) | ANY_VALUE.map(lambda v: json.dumps({"choices": [{"message": v}], "error": v}).encode())
)
def test_no_answer_of_a_server_is_more_than_unanswered(data):
    assert isinstance(endpoint._reason(data), str) and "\n" not in endpoint._reason(data)
    try:
        assert isinstance(endpoint._text_of(data, "host"), str)
    except NoCaption as error:
        assert "host" in str(error)


def test_an_image_is_sent_small_upright_turned_and_cropped(tmp_path, server):
    path = photo(tmp_path / "large.jpg", size=(3000, 2000))
    describe = endpoint.load(endpoint.Server(server.url, "m"))
    for picture in (Picture("a", "a", path), Picture("a", "a", path, 1), Picture("a", "a", path, 0, (0, 0, 0.1, 0.3))):
        with upright(picture) as image:
            describe(image)
    large, turned, part = server.sizes
    assert large[0] == 1024 and turned[1] == 1024 and turned[0] < 1024
    assert abs(part[0] / part[1] - 0.5) < 0.02


# The tagger ----------------------------------------------------------------------------------------------------------

TAGS = [("general", 9), ("long_hair", 0), ("blue_sky", 0), ("o_o", 0), ("red", 0)]
TAGS += [("alice_(wonderland)", 4), ("solo", 0)]


def tagger_model(folder: Path, channels_first: bool = False) -> Path:
    """A model whose first tags are as probable as the image is blue, green and red, the others by their number."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, axes = ("3, 8, 8", "2, 3") if channels_first else ("8, 8, 3", "1, 2")
    weights, bias = numpy.zeros((3, len(TAGS))), numpy.linspace(0, 1, len(TAGS))
    weights[range(3), range(1, 4)], bias[1:4] = 1 / 255, 0
    found = f"""<ir_version: 10, opset_import: ["" : 18]>
        tagger (float[1, {shape}] image) => (float[1, {len(TAGS)}] tags)
        <int64[2] axes = {{{axes}}}, float[3, {len(TAGS)}] weights = {{{", ".join(map(str, weights.flat))}}},
         float[{len(TAGS)}] bias = {{{", ".join(map(str, bias))}}}>
        {{ mean = ReduceMean <keepdims = 0> (image, axes)
           found = MatMul (mean, weights)
           tags = Add (found, bias) }}"""
    model = onnx.parser.parse_model(found)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    rows = [f"{number},{name},{category},1" for number, (name, category) in enumerate(TAGS)]
    (folder / "selected_tags.csv").write_text("\n".join(["tag_id,name,category,count", *rows, ""]))
    return folder


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_tagger_sees_bgr_on_a_white_square(tmp_path, channels_first):
    describe = tagger.load(
        tagger_model(tmp_path / "model", channels_first=channels_first), tagger.Choice(0.2, 0.8), device="cpu"
    )
    # White above and below makes blue 0.5, green 0.75 and red 1.
    caption = describe(Image.new("RGB", (64, 32), (255, 128, 0)))
    assert caption == "alice (wonderland), o_o, solo, blue sky, red, long hair"


def test_thresholds_blacklist_and_underscores():
    found = [0.9, 0.5, 0.36, 0.34, 0.99, 0.84, 0.35]
    assert tagger.caption_of(TAGS, found, tagger.Choice()) == "red, long hair, blue sky, solo"
    character = tagger.Choice(general=0.9, character=0.8, spaces=False)
    assert tagger.caption_of(TAGS, found, character) == "alice_(wonderland), red"
    without = tagger.Choice(without=frozenset({" Long_Hair ", "red"}))
    assert tagger.caption_of(TAGS, found, without) == "blue sky, solo"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.onnx", b"\0damaged" * 100, "model.onnx cannot be loaded"),
        ("selected_tags.csv", "hello\n\xff".encode(), "not a table of tags"),
        ("selected_tags.csv", b"name,category\ncat,0\n", "the model has 7 tags, selected_tags.csv has 1"),
    ],
)
def test_files_that_are_not_a_tagger_and_a_missing_onnxruntime_are_named(tmp_path, monkeypatch, name, content, message):
    model = tagger_model(tmp_path / "model")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(RunError, match="pip install onnxruntime"):
            tagger.load(model, tagger.Choice())
    (model / name).write_bytes(content)
    with pytest.raises(RunError, match=message):
        tagger.load(model, tagger.Choice(), device="cpu")(Image.new("RGB", (8, 8)))


# Limits and models ---------------------------------------------------------------------------------------------------


HANGS = """
import sys, time
from pathlib import Path
from captions import job
from captions.text import Frame
from captions.work import Folder
wait = lambda *_: time.sleep(600)
loads = sys.argv[2] == "loads"
job.run(Folder(Path(sys.argv[1])), (lambda: wait) if loads else wait, Frame(), 0.5, 0.5)
"""


@pytest.mark.parametrize(("which", "waited"), [("no", "the model to load"), ("loads", "a caption of 0.png")])
def test_a_model_that_hangs_ends_the_job_with_the_reason(images, which, waited):
    done = python("-c", HANGS, str(images), which, timeout=60)
    assert done.returncode == job.EXIT_STUCK
    assert f"waited 0.5 s for {waited}" in done.stderr and "start it again to continue" in done.stderr


def test_the_models_of_the_table():
    rows = models.captioners()
    assert {row.engine for row in rows.values()} == {"florence", "tagger"}
    assert models.find("florence", "") is rows["florence-2-base"]
    with pytest.raises(RunError, match="use one of wd-vit-v3"):
        models.find("tagger", "no-such-model")
    with pytest.raises(RunError, match="has no model.onnx"):
        models.find("tagger", str(PROJECT))


def test_a_model_is_downloaded_with_the_projects_own_download(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    files = {path.name: path.read_bytes() for path in tagger_model(tmp_path / "model").iterdir()}
    row = models.Captioner("t", "tagger", "T", "", "me/model", "", ("model.onnx", "selected_tags.csv"), 1, 0.0)
    lacking = models.Captioner("l", "florence", "L", "", "me/model", "", ("*.json",), 1, 0.0)
    with serving(files | {"model.msgpack": b"x" * 1000}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert models.present(row) is None
        folder = models.fetch(row, lambda line: None)
        assert tagger.read_tags(folder / "selected_tags.csv") == TAGS and not hub.sent_of("model.msgpack")
        assert models.present(row) == folder
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "second"))
        with pytest.raises(RunError, match=r"has no config\.json"):
            models.fetch(lacking, lambda line: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RunError, match="HF_HUB_OFFLINE"):
        models.fetch(lacking, lambda line: None)
