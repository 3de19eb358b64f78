"""What a job writes with the options of a server, and that a key is sent to that server only."""

import json

import pytest
from caption_server import Folder, answering, texts

from captions import job, options
from runs.files import RunError

KEY = "sk-secret-0123456789"


def write(images, server, **more) -> job.Report:
    return options.write(
        Folder(images), options.checked({"engine": "endpoint", "url": server.url, "model": "m", **more})
    )


@pytest.fixture(autouse=True)
def proxy(monkeypatch):
    """To see that this machine is asked directly."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")


def test_each_caption_has_its_prefix_suffix_and_trigger(images, server):
    report = write(images, server, trigger="ohwx", suffix=" on grass")
    assert (report.written, report.failed, report.left) == (4, 0, 0)
    assert texts(images) == {str(n): f"ohwx, a picture, number {n + 1} on grass" for n in range(4)}
    assert [one["model"] for one in server.questions] == ["m"] * 4 and server.paths[0] == "/v1/chat/completions"


def test_the_key_is_sent_and_is_nowhere_else(images, monkeypatch, capfd):
    monkeypatch.setenv("MY_KEY", KEY)
    with answering() as server:
        server.answer = lambda number, question: (
            (200, json.dumps({"choices": [{"message": {"content": f"a cat {KEY}"}}]}).encode(), {})
            if number == 1
            else (403, json.dumps({"error": {"message": f"{'long ' * 58}{KEY}"}}).encode(), {})  # is cut off in the key
        )
        report = write(images, server, key_variable="MY_KEY")
        assert {one["authorization"] for one in server.headers} == {f"Bearer {KEY}"}
        everything = "".join([*capfd.readouterr(), report.reason, *texts(images).values()])
        assert KEY[:9] not in everything and "[key]" in everything
        assert job.summary(report) == "1 caption written, 1 failed, 2 left." and "403" in report.reason
        with pytest.raises(RunError, match="not the key itself") as typed:
            write(images, server, key_variable=KEY)
        assert KEY not in str(typed.value)
