"""`python -m captions` on a folder of images: what is written and kept, and that a key is sent to its server only."""

import json

import pytest
from caption_server import answering, texts
from runs_helpers import python

KEY = "sk-secret-0123456789"


def command(folder, *arguments: str, **env: str):
    """The command's result; HTTP_PROXY is set to see that this machine is asked directly."""
    env = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "", **env}
    return python("-m", "captions", str(folder), *arguments, timeout=120, **env)


@pytest.mark.slow
def test_captions_of_a_folder_are_written_beside_the_images_and_none_is_replaced(images):
    (images / "1.txt").write_text("mine\n")
    (images / "2.txt").write_text("\n")
    with answering() as server:
        done = command(images, "--with=endpoint", f"--url={server.url}", "--model=vision", "--trigger=ohwx", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == {"written": 3, "failed": 0, "left": 0}
        written = {"0": "ohwx, a picture, number 1\n", "1": "mine\n"}
        written |= {key: f"ohwx, a picture, number {key}\n" for key in "23"}
        assert texts(images) == written
        assert [one["model"] for one in server.questions] == ["vision"] * 3
        assert server.paths[0] == "/v1/chat/completions"
        rewritten = command(images, "--with=endpoint", f"--url={server.url}", "--model=vision", "--rewrite")
        assert rewritten.returncode == 0 and len(server.questions) == 7 and texts(images)["1"] != "mine\n"


@pytest.mark.slow
def test_the_key_is_sent_and_is_nowhere_else(images):
    with answering() as server:
        server.answer = lambda number, question: (
            (200, json.dumps({"choices": [{"message": {"content": f"a cat {KEY}"}}]}).encode(), {})
            if number == 1
            else (403, json.dumps({"error": {"message": f"{'long ' * 58}{KEY}"}}).encode(), {})  # is cut off in the key
        )
        arguments = ["--with=endpoint", f"--url={server.url}", "--model=m", "--key-variable=MY_KEY"]
        done = command(images, *arguments, MY_KEY=KEY)
        assert {one["authorization"] for one in server.headers} == {f"Bearer {KEY}"}
        everything = done.stdout + done.stderr + "".join(texts(images).values())
        assert KEY[:9] not in everything and "[key]" in everything
        assert done.returncode == 1 and "1 caption written, 1 failed, 2 left." in done.stdout
        typed = command(images, *arguments[:-1], f"--key-variable={KEY}")
        assert typed.returncode == 1 and KEY not in typed.stderr and "not the key itself" in typed.stderr
