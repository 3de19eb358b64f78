"""A server that describes images: what it is sent, and how it can refuse, lie and hang."""

import json

import pytest
from caption_server import answering, drip, run, texts
from draft_helpers import photo
from hypothesis import given, settings, strategies as st
from seeds import ANY_VALUE

from captions import endpoint
from captions.text import NoCaption
from captions.work import Picture, upright
from runs.files import RunError


def test_an_address_that_is_none_or_holds_a_key_is_refused():
    hosts = ("me:pass@host/v1", "host/v1?key=1", "host:99999/v1")
    for url in ("", "ftp://x", *(f"http://{host}" for host in hosts)):
        with pytest.raises(RunError, match="address") as found:
            endpoint.checked(endpoint.Server(url, "m", "What is it?"))
        assert "pass" not in str(found.value).replace("password", "")


def refused(status: int, body: bytes = b"{}", **headers: str):
    return lambda number, question: (status, body, {key.replace("_", "-"): value for key, value in headers.items()})


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        (refused(401, b'{"error": {"message": "no such key"}}'), "401: no such key", 1),
        (refused(302, Location="http://127.0.0.1:1/steal"), "302", 1),
        (refused(429, Retry_After="9999"), "HTTP status 429", 4 * endpoint.TRIES),
        (refused(200, b"<html>"), "something else than a chat completion", 4),
        (refused(200, b'{"choices": [{"message": {"content": 7}}]}'), "without text", 4),
        (refused(200, b'{"choices": [{"finish_reason": "length", "message": {"content": ""}}]}'), "its thoughts", 4),
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


def test_a_server_that_wants_the_newer_name_of_the_limit_is_asked_with_it(images, server):
    body = b'{"error": {"message": "Unsupported parameter: max_tokens. Use max_completion_tokens instead."}}'
    server.answer = lambda number, question: (400, body, {}) if "max_tokens" in question else "a cat"
    assert run(server, images).written == 4 and server.questions[1]["max_completion_tokens"] == endpoint.MOST_TOKENS


@settings(max_examples=60)
@given(st.binary(max_size=99) | ANY_VALUE.map(lambda v: json.dumps({"choices": [{"message": v}], "error": v}).encode()))
def test_no_answer_of_a_server_is_more_than_unanswered(data):
    assert isinstance(endpoint._reason(data), str) and "\n" not in endpoint._reason(data)
    try:
        assert isinstance(endpoint._text_of(data, "host"), str)
    except NoCaption as error:
        assert "host" in str(error)


def test_an_image_is_sent_small_upright_turned_and_cropped(tmp_path, server):
    path = photo(tmp_path / "large.jpg", size=(3000, 2000))
    asked = endpoint.checked(endpoint.Server(server.url, "m", "What is it?"))
    for picture in (Picture("a", "a", path), Picture("a", "a", path, 1), Picture("a", "a", path, 0, (0, 0, 0.1, 0.3))):
        endpoint.ask(asked, upright(picture))
    large, turned, part = server.sizes
    assert large[0] == 1024 and turned[1] == 1024 and turned[0] < 1024
    assert abs(part[0] / part[1] - 0.5) < 0.02
