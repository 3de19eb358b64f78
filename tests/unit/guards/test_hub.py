"""What names a file on a hub, what its settings say and how long it is waited for, without a request."""

import math
import os
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from guards import download, hub
from guards.hub import DownloadError, Remote


@pytest.fixture(autouse=True)
def setting(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_", "XDG_CACHE_HOME"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch.setenv


def test_the_settings_are_read_as_the_hubs_library_reads_them(setting, tmp_path):
    assert hub.endpoint() == "https://huggingface.co" and hub.hub_home() == tmp_path / ".cache/huggingface"
    assert not hub.offline() and hub.token() is None
    setting("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.hub_home() == tmp_path / "xdg/huggingface"
    setting("HF_HOME", "~/hf")
    assert hub.hub_home() == tmp_path / "hf"
    for folder, secret in (("hf", "hf_home"), ("other", "hf_other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "token").write_text(f" {secret}\n")
    assert hub.token() == "hf_home"
    setting("HF_TOKEN_PATH", str(tmp_path / "other/token"))
    assert hub.token() == "hf_other"
    setting("HUGGING_FACE_HUB_TOKEN", "hf_old")
    setting("TRANSFORMERS_OFFLINE", "1")
    setting("HUGGINGFACE_HUB_CACHE", str(tmp_path / "old"))
    assert hub.token() == "hf_old" and hub.offline() and download.cache_folder() == tmp_path / "old"
    setting("HF_TOKEN", "hf_set ")
    setting("HF_HUB_OFFLINE", "NO")
    setting("HF_HUB_CACHE", "~/new")
    setting("HF_ENDPOINT", "http://mirror/")
    assert hub.token() == "hf_set" and not hub.offline() and download.cache_folder() == tmp_path / "new"
    assert Remote("me/model", "c0ffee", "a b/c.bin", 1, "").url == "http://mirror/me/model/resolve/c0ffee/a%20b/c.bin"


@pytest.fixture
def clock(monkeypatch):
    """The time of the hub's module, in seconds; a pause moves it."""
    now_s = [100.0]

    def sleep(pause_s: float) -> None:
        now_s[0] += pause_s

    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    return now_s


def test_pauses_grow_until_a_limit_without_progress_ends_them_and_the_log_says_what_is_waited_for(clock, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(hub, "say", said.append)
    patience, ends_s = hub.Patience(20, "a byte of x"), []
    reason = r"no data from huggingface.co for 20 s \(lost\); the 7 bytes received are kept.* again$"
    with pytest.raises(DownloadError, match=reason) as error:
        while True:
            patience.pause(ConnectionError("lost"), 7)
            ends_s.append(clock[0])
    assert (ends_s, error.value.kind) == ([101, 103, 107, 115, 120], "stalled")
    assert error.value.or_by_hand("copy it") == f"{error.value}, or copy it"
    assert DownloadError("space", "it is full").or_by_hand("copy it") == "it is full"
    assert said == ["waited 4 s for a byte of x (lost); giving up after 20 s"]
    patience.progress()
    assert patience.left_s() == 20
    patience.pause(ConnectionError("lost"))
    assert (clock[0], patience.left_s(), patience.read_s()) == (121, 19, 20)
    endless = hub.Patience(0, "x")
    for _ in range(7):
        endless.pause(ConnectionError("HTTP status 503"))
    assert endless.left_s() == math.inf and clock[0] - 121 == 1 + 2 + 4 + 8 + 16 + 30 + 30
    assert said[1:] == [f"waited {waited_s} s for x (HTTP status 503)" for waited_s in (4, 34, 64)]
    with pytest.raises(DownloadError, match=r"huggingface.co: .*7 bytes received are kept. Check HF_ENDPOINT and"):
        endless.pause(ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED]"), 7)


ANSWERS = {
    200: "", 206: "", 302: "server .*/me/model: HTTP status 302 for x.bin; check HF_ENDPOINT",
    401: r"gated no access to me/model \(HTTP status 401\): accept its licence at https://.*/me/model, then .*\)$",
    404: "missing x.bin of me/model does not exist at .*; correct the name$", 410: "missing .*does not exist",
    **dict.fromkeys((408, 425, 429, 500), "busy HTTP status"),
}  # fmt: skip


@pytest.mark.parametrize("status", ANSWERS)
def test_an_answer_is_used_refused_with_what_to_do_or_asked_for_again(status):
    response = SimpleNamespace(status_code=status, headers={})
    kind, _, says = ANSWERS[status].partition(" ")
    with pytest.raises((ConnectionError, DownloadError)) if kind else nullcontext() as error:
        hub.check_status(response, "me/model", "x.bin")
    assert not kind or (getattr(error.value, "kind", "busy") == kind and re.search(says, str(error.value)))
